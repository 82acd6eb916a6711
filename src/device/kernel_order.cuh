// Kernels that are made ready while the one before them in the stream ends (LaunchShape::overlaps): that hides what a launch
// costs. The order of the stream holds for what they do, as each of them waits here before it touches memory, but for two that
// know that the kernel before has itself waited for what they read: NVFP4 quantisation (CodecOptions::reads_ahead), and the blocks of
// the tile kernels that take bands whose rows are here (receive_columns.cuh). They see what kernels further back have written
// because a multiprocessor's L1 cache holds nothing from before a launch. They, too, wait before they end.
//
// A kernel that waits for other ranks must not let the next one start before it has done so: blocks of that one would take
// the multiprocessors that the other ranks need, where they share a GPU.
#ifndef NVTE_EP_DEVICE_KERNEL_ORDER_CUH_
#define NVTE_EP_DEVICE_KERNEL_ORDER_CUH_

namespace nvte_ep::device {

// Until the kernel before is done and what it wrote can be read. Every thread calls, first of all but for the two above.
__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may be made ready once all blocks have come here (or ended).
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_KERNEL_ORDER_CUH_
