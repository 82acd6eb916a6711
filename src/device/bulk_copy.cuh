// Copies to shared memory that a barrier there waits for: a ring of stages that a warp fills and empties by itself.
#ifndef NVTE_EP_DEVICE_BULK_COPY_CUH_
#define NVTE_EP_DEVICE_BULK_COPY_CUH_

#include <cstdint>

#include "device/memory.cuh"

namespace nvte_ep::device {

// One thread; what uses the barrier comes after a barrier of the threads.
__device__ __forceinline__ void init_copy_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish_copy_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The one arrival of a phase, and the bytes that complete it.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// bytes: a multiple of 16, as are both addresses.
__device__ __forceinline__ void copy_bulk(uint32_t shared_to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// The thread arrives when its copies so far (copy_async16) are done.
__device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Until the phase of this parity is over: 0 for the first one.
__device__ __forceinline__ void wait_copy_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_BULK_COPY_CUH_
