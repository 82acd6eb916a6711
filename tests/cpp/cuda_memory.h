// Memory of GPU 0, and a stream for each thread: ranks that share a GPU wait for each other in kernels, so that nothing here
// may wait for the whole device.
#ifndef NVTE_EP_TESTS_CUDA_MEMORY_H_
#define NVTE_EP_TESTS_CUDA_MEMORY_H_

#include "arrays.h"

#if defined(NVTE_EP_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace ep_test {

// Streams of one process share so many queues of a GPU, and ranks that wait for each other must share none. Before main, since
// CUDA looks once.
inline const bool queues_are_set = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) == 0;

// Null where there is no GPU.
inline const Memory* cuda_memory() {
#if defined(NVTE_EP_WITH_CUDA)
  static const int devices = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
  }();
  static const auto require_cuda = [](cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    std::abort();
  };
  static const auto stream = [] {
    thread_local const cudaStream_t mine = [] {
      cudaStream_t s;
      require_cuda(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
      return s;
    }();
    return mine;
  };
  static const Memory memory = {"cuda",
                                NVTE_EP_DEVICE_CUDA,
                                [](size_t bytes) {
                                  void* pointer = nullptr;
                                  require_cuda(cudaMallocAsync(&pointer, bytes, stream()));
                                  require_cuda(cudaStreamSynchronize(stream()));
                                  return pointer;
                                },
                                [](void* pointer) { require_cuda(cudaFreeAsync(pointer, stream())); },
                                [](void* to, const void* from, size_t bytes) {
                                  require_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()));
                                  require_cuda(cudaStreamSynchronize(stream()));
                                },
                                0,
                                [] { return static_cast<nvte_ep_stream_t>(stream()); }};
  return devices > 0 ? &memory : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace ep_test

#endif  // NVTE_EP_TESTS_CUDA_MEMORY_H_
