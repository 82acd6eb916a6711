// What every way to prepare reads and tells alike.
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

__device__ __forceinline__ int64_t padded_rows(const RouteMaps& m, int64_t routed) {
  return (routed + m.alignment - 1) & ~(m.alignment - 1);
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
  const int64_t dropped_before = __shfl_sync(0xF, before.count, 2);
  int64_t count = before.count;
  if (i < 3) count += i == 0 ? illegal : (i == 1 ? repeated : dropped);
  if (i == 3 && dropped > 0) {
    const int64_t reported = *static_cast<const volatile int64_t*>(a.reported);
    count = largest_need(needed, count, dropped_before, reported);
  }
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

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PREPARE_OUTPUTS_CUH_
