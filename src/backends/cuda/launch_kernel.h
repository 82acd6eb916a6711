// One way to launch a kernel: what it may use is asked of the runtime once per kernel and device, errors come
// back as Status, the caller's error state is left alone.
#ifndef NVTE_EP_BACKENDS_CUDA_LAUNCH_KERNEL_H_
#define NVTE_EP_BACKENDS_CUDA_LAUNCH_KERNEL_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "backends/cuda/launch.h"
#include "core/status.h"

namespace nvte_ep {

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  const nvte_ep_status_t code =
      error == cudaErrorMemoryAllocation ? NVTE_EP_STATUS_OUT_OF_MEMORY : NVTE_EP_STATUS_CUDA;
  return Status(code, text(what, ": ", cudaGetErrorString(error)));
}

struct LaunchShape {
  int64_t blocks = 1;
  int threads = 0;
  int shared_bytes = 0;
  int cluster = 1;
  bool bounded = false;  // a smaller grid does the work too: LaunchContext::max_sms holds
  bool overlaps =
      false;  // the kernel calls wait_for_kernel_before(): it may start before that kernel is done
};

// Registers per thread of a kernel, after allowing it all the shared memory of the device.
template <auto kKernel>
Status prepare_kernel(const LaunchContext& context, int* registers) {
  static std::array<std::atomic<int>, kMaxDevices> known{};
  std::atomic<int>& mine = known[static_cast<size_t>(context.device)];
  *registers = mine.load(std::memory_order_acquire);
  if (*registers != 0) return Status();
  cudaFuncAttributes attributes;
  NVTE_EP_TRY(cuda_status(cudaFuncGetAttributes(&attributes, kKernel), "cudaFuncGetAttributes"));
  const int dynamic = context.shared_bytes_per_block - static_cast<int>(attributes.sharedSizeBytes);
  NVTE_EP_TRY(cuda_status(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic),
                          "cudaFuncSetAttribute"));
  *registers = attributes.numRegs;
  mine.store(attributes.numRegs, std::memory_order_release);
  return Status();
}

// Blocks that so many multiprocessors run at one time.
inline int64_t resident_blocks(const LaunchContext& context, const LaunchShape& shape, int registers,
                               int sms) {
  const int by_threads = 2048 / shape.threads;
  const int by_registers = 65536 / ((registers + 7) / 8 * 8 * shape.threads);
  const int by_shared = context.shared_bytes_per_sm / (shape.shared_bytes + 1024);
  return static_cast<int64_t>(sms) * std::max(1, std::min({by_threads, by_registers, by_shared, 32}));
}

// Every kernel that launch_kernel can launch, collected before main.
inline std::vector<const void*>& known_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}
template <auto kKernel>
struct KnownKernel {
  static const bool kKnown;
};
template <auto kKernel>
const bool KnownKernel<kKernel>::kKnown =
    (known_kernels().push_back(reinterpret_cast<const void*>(kKernel)), true);

template <auto kKernel, typename... Arguments>
Status launch_kernel(const char* what, const LaunchContext& context, const LaunchShape& shape,
                     const Arguments&... arguments) {
  (void)KnownKernel<kKernel>::kKnown;
  int registers;
  NVTE_EP_TRY(prepare_kernel<kKernel>(context, &registers));
  cudaLaunchConfig_t config = {};
  int64_t blocks = std::min<int64_t>(shape.blocks, 0x7FFFFFFF);
  if (context.max_sms > 0 && shape.bounded) {
    blocks = std::min(blocks, resident_blocks(context, shape, registers, context.max_sms));
  }
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = context.stream;
  std::array<cudaLaunchAttribute, 2> attributes;
  config.attrs = attributes.data();
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
#ifdef NVTE_EP_X
  static const bool no_pdl = getenv("NVTE_X_NOPDL") != nullptr;
  if (shape.overlaps && !no_pdl) {
#else
  if (shape.overlaps) {
#endif
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  return cuda_status(cudaLaunchKernelEx(&config, kKernel, arguments...), what);
}

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_CUDA_LAUNCH_KERNEL_H_
