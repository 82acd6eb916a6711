// Reductions and scans over a warp and a block.
#ifndef NVTE_EP_DEVICE_WARP_CUH_
#define NVTE_EP_DEVICE_WARP_CUH_

#include <cstdint>

#include "device/memory.cuh"

namespace nvte_ep::device {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kMaxWarps = 32;

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }

// A value that is the same in all lanes, in a form of which the compiler knows that: arithmetic on it costs
// the lanes nothing.
__device__ __forceinline__ uint64_t uniform(uint64_t value) {
  const uint32_t low = __reduce_or_sync(kAllLanes, static_cast<uint32_t>(value));
  const uint32_t high = __reduce_or_sync(kAllLanes, static_cast<uint32_t>(value >> 32));
  return low | (static_cast<uint64_t>(high) << 32);
}

// Largest value over the warps of a block. exchange: kMaxWarps words of shared memory of which the block
// makes no other use until its next barrier; callers that come back at once alternate between two.
__device__ __forceinline__ uint32_t block_max(uint32_t value, int warps, uint32_t* exchange) {
  value = __reduce_max_sync(kAllLanes, value);
  if (warps == 1) return value;
  if (lane_id() == 0) exchange[warp_id()] = value;
  __syncthreads();
  return __reduce_max_sync(kAllLanes, lane_id() < warps ? exchange[lane_id()] : 0u);
}

// Sum that stops at limit; all operands are in [0, limit].
__device__ __forceinline__ int64_t add_up_to(int64_t a, int64_t b, int64_t limit) {
  const int64_t sum = a + b;
  return sum < limit ? sum : limit;
}

// Inclusive scan over a block of kThreads, with add_up_to. exchange: kThreads / 32 words of shared memory.
template <int kThreads>
__device__ __forceinline__ int64_t block_scan(int64_t value, int64_t limit, int64_t* exchange) {
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const int64_t below = __shfl_up_sync(kAllLanes, value, d);
    if (lane_id() >= d) value = add_up_to(value, below, limit);
  }
  __syncthreads();
  if (lane_id() == kWarp - 1) exchange[warp_id()] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / kWarp; ++w) {
    if (w < warp_id()) value = add_up_to(value, exchange[w], limit);
  }
  return value;
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_WARP_CUH_
