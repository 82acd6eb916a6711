// What a test does when CUDA fails.
#ifndef NVTE_EP_TESTS_REQUIRE_CUDA_H_
#define NVTE_EP_TESTS_REQUIRE_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

namespace ep_test {

inline void require_cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::abort();  // nothing after this can be trusted
}

}  // namespace ep_test

#endif  // NVTE_EP_TESTS_REQUIRE_CUDA_H_
