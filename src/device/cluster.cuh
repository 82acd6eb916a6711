// Thread blocks of one cluster: their barrier, in two halves, and each other's shared memory.
#ifndef NVTE_EP_DEVICE_CLUSTER_CUH_
#define NVTE_EP_DEVICE_CLUSTER_CUH_

#include <cstdint>

namespace nvte_ep::device {

__device__ __forceinline__ int block_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Every thread of every block comes, whole warps together, and waits before it comes again. What was written before it came is
// visible after the wait; without_writes: nobody relies on that, and nobody waits for writes that are under way.
__device__ __forceinline__ void come_to_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void come_to_cluster_without_writes() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where a block has what this one has at a place of its shared memory; between two barriers.
template <typename T>
__device__ __forceinline__ const T* in_block(const T* mine, int block) {
  uint64_t theirs;
  asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(block));
  return reinterpret_cast<const T*>(theirs);
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_CLUSTER_CUH_
