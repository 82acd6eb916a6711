// prepare: the ranks' choices to slots, on the device. The order of a slab is (source rank, token), as core/routing.h says.
#ifndef NVTE_EP_TRANSPORTS_PEER_PREPARE_H_
#define NVTE_EP_TRANSPORTS_PEER_PREPARE_H_

#include "core/backend.h"
#include "core/tensor_view.h"
#include "transports/peer/peer_kernels.h"
#include "transports/peer/pools.h"
#include "transports/peer/route_maps.h"

namespace nvte_ep {

struct PrepareArguments {
  Pools pools;
  Meeting meeting;
  Area indices;     // int32 [tokens, top_k], clean
  Area histograms;  // int32 [chunks, num_experts]: how many choices of each expert a chunk of tokens holds
  Area inbox;       // of few choices: those of every rank, numbered (prepare_few.h)
  RouteMaps maps;

  const void* topk_idx;  // [given_tokens, top_k]
  bool is_int64;
  int64_t stride;  // elements
  int32_t given_tokens;

  int32_t*
      starts;  // [size * chunks, num_experts] where a chunk's copies of an expert begin among all of the expert's
  int32_t* totals;   // [num_experts]
  uint32_t* ticket;  // 0 between launches

  // The caller's, int32 or int64; data null: not wanted
  IndexView tokens_routed, tokens_per_expert, rows_per_expert, row_offsets, scale_row_offsets, total_rows,
      dropped_rows;
  int64_t* slot_source;
  int32_t* slot_expert;
  int64_t* counters;        // DeviceCounters in device memory
  int64_t* told;            // those that the host knows
  int64_t* report;          // and where it reads them
  const int64_t* reported;  // dropped rows that it has reported
};

int32_t prepare_chunks(int64_t tokens);  // of a rank
// UNSUPPORTED where the kernels' shared memory does not suffice.
Status check_prepare(const RouteMaps& maps, const LaunchContext& context);
Status launch_prepare(const PrepareArguments& arguments, const LaunchContext& context);

// The slot maps again, to arrays of the caller that are given later; null: not wanted.
Status launch_copy_slots(const RouteMaps& maps, int64_t* slot_source, int32_t* slot_expert,
                         const LaunchContext& context);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PREPARE_H_
