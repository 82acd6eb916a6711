// combine and dispatch_backward on the device: each token's slots summed, on the ranks that hold them first.
#ifndef NVTE_EP_TRANSPORTS_PEER_COMBINE_H_
#define NVTE_EP_TRANSPORTS_PEER_COMBINE_H_

#include "core/backend.h"
#include "core/tensor_view.h"
#include "transports/peer/dispatch.h"
#include "transports/peer/peer_kernels.h"
#include "transports/peer/pools.h"
#include "transports/peer/route_maps.h"

namespace nvte_ep {

// Partial rows that are read before the meeting. The rows of a chunk of tokens are announced once they are all there.
constexpr int32_t kReadyChunks = 64;
struct EarlySums {
  Area ready;          // uint32 [kReadyChunks, size]: the meeting before which a rank has announced a chunk
  uint32_t* counters;  // [kReadyChunks] items of a chunk that are done
  uint32_t* stamps;    // [tokens, stretches] the meeting before which an item was summed
  int32_t chunk_tokens;
};
// A kernel sums all of a pass, or what has been announced to it, or what is left after that.
enum class Sums { kAll, kEarly, kLeft };

struct CombineArguments {
  Pools pools;
  RouteMaps maps;
  bool mxfp8;   // partial rows are rounded to MXFP8
  Area outbox;  // partial rows [size - 1 (the other ranks), tokens] of this pass's columns
  const uint8_t* slots;
  int64_t slot_stride;        // bytes
  const float* slot_weights;  // [slots]; null: 1
  // The columns of this pass, in chunks of 16 bytes of the tokens' type
  int32_t first_chunk, chunks;
  // A value a choice, with the first pass
  bool send_values;
  const float* slot_values;  // [slots]; null: this rank gives none
  TravellingValues values;   // float32 [size - 1, tokens, top_k]
  // The result
  int32_t tokens;
  uint8_t* result;
  int64_t result_stride;  // bytes
  bool accumulate;
  float* own_values;  // [tokens, top_k]; null: not wanted
  int64_t own_value_stride;
  int64_t* counters;
  int64_t* report;
  EarlySums early;
  Sums mode;
};
// Of one row: stamps.
int32_t most_stretches(int64_t row_bytes);

// Bytes of a partial row of so many chunks.
int64_t partial_row_bytes(DType dtype, bool mxfp8, int32_t chunks);

// One launch: the sums of one pass (null: none yet), and the partial rows of the next, which end with the meeting of that pass
// (null: it was the last).
Status launch_combine(DType dtype, const CombineArguments* sums, const CombineArguments* partials,
                      const Meeting& meeting, uint32_t* ticket, const LaunchContext& context);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_COMBINE_H_
