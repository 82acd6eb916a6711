// One way to launch a kernel: what it may use is asked of the runtime once per kernel and device, errors come
// back as Status, the caller's error state is left alone.
#ifndef NVTE_EP_DEVICE_LAUNCH_KERNEL_H_
#define NVTE_EP_DEVICE_LAUNCH_KERNEL_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "core/status.h"

namespace nvte_ep {

constexpr int kMaxDevices = 64;

struct LaunchContext {
  nvte_ep_stream_t stream = nullptr;
  int device = 0;
  int sms = 0;
  int shared_bytes_per_sm = 0;
  int shared_bytes_per_block = 0;
  int max_sms = 0;  // kernels take up no more than so many multiprocessors hold at one time; 0: no limit
};

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
      false;  // may be made ready while the kernel before ends: it waits by itself (kernel_order.cuh)
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

// prepare_kernel of every kernel that launch_kernel can launch, collected before main: what is done at a kernel's first launch may
// wait for the whole device.
using PrepareKernel = Status (*)(const LaunchContext& context, int* registers);
inline std::vector<PrepareKernel>& known_kernels() {
  static std::vector<PrepareKernel> kernels;
  return kernels;
}
template <auto kKernel>
struct KnownKernel {
  static const bool kKnown;
};
template <auto kKernel>
const bool KnownKernel<kKernel>::kKnown = (known_kernels().push_back(&prepare_kernel<kKernel>), true);

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
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  if (shape.overlaps) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  return cuda_status(cudaLaunchKernelEx(&config, kKernel, arguments...), what);
}

}  // namespace nvte_ep

#endif  // NVTE_EP_DEVICE_LAUNCH_KERNEL_H_
