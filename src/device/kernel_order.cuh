// Kernels that are made ready while the one before them in the stream ends (LaunchShape::overlaps): that hides what a launch
// costs. The order of the stream holds for what they do, as each of them waits here before it touches memory. (Only quantisation
// may read its inputs before, where the caller knows that the kernel before has waited for them: CodecOptions::reads_ahead.)
//
// A kernel that waits for other ranks must not let the next one start before it has done so: blocks of that one would take
// the multiprocessors that the other ranks need, where they share a GPU.
#ifndef NVTE_EP_DEVICE_KERNEL_ORDER_CUH_
#define NVTE_EP_DEVICE_KERNEL_ORDER_CUH_

namespace nvte_ep::device {

// Until the kernel before is done and what it wrote can be read. Every thread calls, first of all.
__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may be made ready once all blocks have come here (or ended).
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_KERNEL_ORDER_CUH_
