// dispatch and combine_backward on the device: rows to the slots of their experts, in their final form.
#ifndef NVTE_EP_TRANSPORTS_PEER_DISPATCH_H_
#define NVTE_EP_TRANSPORTS_PEER_DISPATCH_H_

#include "core/backend.h"
#include "core/row_layout.h"
#include "transports/peer/peer_kernels.h"
#include "transports/peer/pools.h"
#include "transports/peer/route_maps.h"

namespace nvte_ep {

// The rows that travel: peers find them in the outbox, this rank where they are.
struct TravellingRows {
  const uint8_t* own = nullptr;  // [tokens]; null: in this rank's outbox
  int64_t own_stride = 0;        // bytes
  Area outbox;                   // [tokens] of row_bytes
  int64_t row_bytes = 0;
};

// The same on every rank of a group.
bool few_rows(const RouteMaps& maps);

// Values of each choice (weights of tokens, or their gradients) that travel beside the rows.
struct TravellingValues {
  Area area;   // float32 [tokens, top_k]
  Area given;  // uint32 [1]: 0: this rank gives none
};

// The largest exponent of this rank's token scales by the expert they go to, from kMinExponent up and one more; 0: none.
// What needs to be known of an expert before its rows are read. With few rows it does not travel: the receiver looks at all token
// scales of an expert.
struct TravellingExponents {
  Area area;  // uint32 [num_experts]
};

// How far the blocks that bring tails have come: 0 before deliver.
struct TailsShares {
  uint32_t claimed, done;
};

struct PublishArguments {
  Pools pools;
  Meeting meeting;
  RouteMaps maps;
  TravellingRows rows;
  bool copy_rows;  // those that peers need go from where they are to the outbox
  int32_t tokens;  // that this rank has
  TravellingValues weights;
  const float* own_weights;  // [tokens, top_k]
  int64_t own_weight_stride;
  bool send_weights;
  bool gives_weights;
  TravellingExponents exponents;
  bool send_exponents;
  int64_t token_scale_offset;
  TailsShares* tails_shares;  // null: deliver brings none
  int32_t tokens_per_block;
  uint32_t* ticket;
};
// Fills the outbox and comes to the meeting.
Status launch_publish(const PublishArguments& arguments, const LaunchContext& context);

// What the slots become. The rowwise operand: the payload at out, and its scales.
struct OperandScales {
  uint8_t* scales = nullptr;  // null: rows or tokens are wanted, not an operand; or no scales
  bool linear = false;
  RowLayout layout;
  int64_t columns = 0;  // scales of a row
  float* amax = nullptr;
  float* expert_scale = nullptr;
  const float* fixed_expert_scale = nullptr;
  int32_t* findings = nullptr;
  int64_t bands = 0;  // of 128 rows, of all slabs at most
};

struct DeliverArguments {
  Pools pools;
  RouteMaps maps;
  TravellingRows rows;
  uint8_t* out;  // [slots]; null: not wanted
  int64_t out_stride;
  int32_t chunks;      // of 16 bytes, of a slot
  float* out_weights;  // [slots]; null: not wanted
  TravellingValues weights;
  const float* own_weights;
  int64_t own_weight_stride;
  int64_t* counters;
  int64_t* report;
  int64_t payload_bytes;       // of a row, for those that are decoded
  int64_t token_scale_offset;  // the same
  OperandScales operand;
  TravellingExponents exponents;
  bool exponents_travel;
  // The tails of the peers' rows, what stands behind the payload. Bands read them slot by slot: over the links they come once.
  uint8_t*
      tails;  // [size - 1 (the other ranks), tokens] of tail_bytes; null: bands read the rows where they are
  int64_t tail_bytes;
  TailsShares* tails_shares;
  // Of the launch
  int32_t pieces, piece_chunks;  // that a row is moved in
  int32_t band_parts;            // blocks that share a band's scales
  int64_t band_blocks, copy_blocks, blocks;
};

enum class SlotForm { kBytes, kDecoded, kOperand };
// All of out's 16-byte chunks are aligned. format: of the rows; dtype: of decoded slots.
Status launch_deliver(SlotForm form, int32_t format, DType dtype, const DeliverArguments& arguments,
                      const LaunchContext& context);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_DISPATCH_H_
