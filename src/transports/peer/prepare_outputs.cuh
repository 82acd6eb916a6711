// What every way to prepare tells at its end: the counts of this rank's experts, and what went wrong with its choices.
#ifndef NVTE_EP_TRANSPORTS_PEER_PREPARE_OUTPUTS_CUH_
#define NVTE_EP_TRANSPORTS_PEER_PREPARE_OUTPUTS_CUH_

#include "device/warp.cuh"
#include "transports/peer/prepare.h"

namespace nvte_ep {

__device__ __forceinline__ int64_t given_index(const PrepareArguments& a, int64_t token, int k) {
  const int64_t at = token * a.stride + k;
  return a.is_int64 ? static_cast<const int64_t*>(a.topk_idx)[at]
                    : static_cast<const int32_t*>(a.topk_idx)[at];
}

// The slabs of all ranks, in shared memory.
struct Slabs {
  int64_t* offset;  // [num_experts + 1] padded rows before an expert, ranks counted through
  int32_t* begin;   // [num_experts] first slot on the expert's rank
  int32_t* kept;    // [num_experts]

  static __host__ __device__ int64_t bytes(int experts) {
    return (static_cast<int64_t>(experts) + 1) * 8 + experts * int64_t{8};
  }
  __device__ Slabs(void* memory, int experts)
      : offset(static_cast<int64_t*>(memory)),
        begin(reinterpret_cast<int32_t*>(offset + experts + 1)),
        kept(begin + experts) {}

  // One thread an expert, when all offsets are known.
  __device__ __forceinline__ void place(const RouteMaps& m, int expert, int32_t routed) const {
    const int64_t first = offset[expert / m.local_experts() * m.local_experts()];
    const int64_t from = min(offset[expert] - first, m.capacity);
    const int64_t end = min(offset[expert + 1] - first, m.capacity);
    begin[expert] = static_cast<int32_t>(from);
    kept[expert] = static_cast<int32_t>(min(static_cast<int64_t>(routed), end - from));
  }
};

__device__ __forceinline__ int64_t padded_rows(const RouteMaps& m, int64_t routed) {
  return (routed + m.alignment - 1) & ~(m.alignment - 1);
}
__device__ __forceinline__ int64_t slab_end(const RouteMaps& m, const Slabs& s, int expert) {
  return min(s.offset[expert + 1] - s.offset[m.rank * m.local_experts()], m.capacity);
}

__device__ __forceinline__ void tell(int64_t* own, const IndexView& theirs, int i, int64_t value) {
  own[i] = value;
  if (theirs.data == nullptr) return;
  if (theirs.is_int64) {
    static_cast<int64_t*>(theirs.data)[i] = value;
  } else {
    static_cast<int32_t*>(theirs.data)[i] = static_cast<int32_t>(value);
  }
}

// The handle's counters, one in each of a warp's first lanes, and what the host knows of them.
struct Counted {
  int64_t count = 0, told = 0;
  __device__ __forceinline__ explicit Counted(const PrepareArguments& a) {
    if (device::lane_id() >= 4) return;
    count = a.counters[device::lane_id()];
    told = a.told[device::lane_id()];
  }
};

// A warp: what this call adds to the counters, and what is new to the host, whose memory is far away.
__device__ __forceinline__ void count_and_tell(const PrepareArguments& a, const Counted& before,
                                               int64_t illegal, int64_t repeated, int64_t dropped,
                                               int64_t needed) {
  const int i = device::lane_id();
  if (i >= 4) return;
  const int64_t count =
      i == 3 ? max(before.count, needed) : before.count + (i == 0 ? illegal : (i == 1 ? repeated : dropped));
  volatile int64_t* report = a.report;
  if (count != before.count) a.counters[i] = count;
  const bool is_new = count != before.told;
  if (is_new) a.told[i] = count;
  if (is_new && i == 3) {  // what is needed comes before what was dropped
    report[3] = count;
    __threadfence_system();
  }
  __syncwarp(0xF);
  if (is_new && i < 3) report[i] = count;
}

// A warp: the counts of this rank's experts to whoever reads them. illegal, repeated: choices of this call that are not in the
// counters yet.
__device__ __forceinline__ void tell_counts(const PrepareArguments& a, const int32_t* totals, const Slabs& s,
                                            const Counted& before, int64_t illegal, int64_t repeated) {
  using device::kAllLanes;
  using device::kWarp;
  const RouteMaps& m = a.maps;
  const int local = m.local_experts();
  const int first_expert = m.rank * local;
  const int lane = device::lane_id();
  int64_t scale_rows = 0;
  int32_t dropped = 0;
  for (int first = 0; first < local; first += kWarp) {
    const int i = first + lane;
    const int e = first_expert + i;
    const bool live = i < local;
    const int64_t rows = live ? slab_end(m, s, e) - s.begin[e] : 0;
    int64_t scale_end = (rows + 127) & ~int64_t{127};
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const int64_t below = __shfl_up_sync(kAllLanes, scale_end, d);
      if (lane >= d) scale_end += below;
    }
    scale_end += scale_rows;
    if (live) {
      tell(m.tokens_routed, a.tokens_routed, i, totals[e]);
      tell(m.tokens_per_expert, a.tokens_per_expert, i, s.kept[e]);
      tell(m.rows_per_expert, a.rows_per_expert, i, rows);
      tell(m.row_offsets, a.row_offsets, i, s.begin[e]);
      tell(m.scale_row_offsets, a.scale_row_offsets, i + 1, scale_end);
      dropped += totals[e] - s.kept[e];
    }
    scale_rows = __shfl_sync(kAllLanes, scale_end, kWarp - 1);
  }
  const int64_t lost = __reduce_add_sync(kAllLanes, dropped);
  const int64_t needed = s.offset[first_expert + local] - s.offset[first_expert];
  count_and_tell(a, before, illegal, repeated, lost, needed);
  if (lane != 0) return;
  const int64_t total = min(needed, m.capacity);
  tell(m.row_offsets, a.row_offsets, local, total);
  tell(m.scale_row_offsets, a.scale_row_offsets, 0, 0);
  tell(m.totals, a.total_rows, 0, total);
  tell(m.totals + 1, a.dropped_rows, 0, lost);
}

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PREPARE_OUTPUTS_CUH_
