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

struct CombineArguments {
  Pools pools;
  RouteMaps maps;
  bool mxfp8;   // partial rows are rounded to MXFP8
  Area outbox;  // partial rows [size - 1 (the other ranks), tokens of a pass]
  const uint8_t* slots;
  int64_t slot_stride;        // bytes
  const float* slot_weights;  // [slots]; null: 1
  // A value a choice
  bool send_values;
  const float* slot_values;  // [slots]; null: this rank gives none
  TravellingValues values;   // float32 [size - 1, tokens, top_k]
  // The result
  int32_t tokens;
  int32_t chunks;  // of 16 bytes, of a row
  uint8_t* result;
  int64_t result_stride;  // bytes
  bool accumulate;
  float* own_values;  // [tokens, top_k]; null: not wanted
  int64_t own_value_stride;
  int64_t* counters;
  int64_t* report;
  Meeting meeting;
  uint32_t* ticket;
};

// Some tokens of every rank; none: no work.
struct TokenRange {
  int32_t first = 0;
  int32_t count = 0;
};

// Bytes of a partial row.
int64_t partial_row_bytes(DType dtype, bool mxfp8, int64_t hidden);

// One launch: the sums of some tokens, whose partial rows have come, and beside them the partial rows of others, which end with
// their meeting.
Status launch_combine(DType dtype, const CombineArguments& arguments, const TokenRange& sums,
                      const TokenRange& partials, const LaunchContext& context);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_COMBINE_H_
