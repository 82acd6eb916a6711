// Device memory for the arrays of tests/cpp. Blocks are kept and used again: giving memory back waits for the whole GPU.
#ifndef NVTE_EP_TESTS_CUDA_CUDA_MEMORY_H_
#define NVTE_EP_TESTS_CUDA_CUDA_MEMORY_H_

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <vector>

#include "../cpp/arrays.h"
#include "../cpp/require_cuda.h"

namespace ep_test {

class CudaBlocks {
 public:
  static CudaBlocks& instance() {
    static CudaBlocks* blocks = new CudaBlocks();  // never destroyed: the driver may be gone by then
    return *blocks;
  }
  void* take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t size = size_of(bytes);
    std::vector<void*>& free = free_[size];
    void* block = nullptr;
    if (free.empty()) {
      require_cuda(cudaMalloc(&block, size));
    } else {
      block = free.back();
      free.pop_back();
    }
    used_[block] = size;
    return block;
  }
  void give_back(void* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(block);
    free_[found->second].push_back(block);
    used_.erase(found);
  }

 private:
  static size_t size_of(size_t bytes) {
    size_t size = 4096;
    while (size < bytes) size *= 2;
    return size;
  }
  std::mutex mutex_;
  std::map<size_t, std::vector<void*>> free_;
  std::map<void*, size_t> used_;
};

// Of the device that is current when it is first asked for. Calls go on the legacy default stream: for one rank a process.
inline const Memory& cuda_memory() {
  static const Memory memory = [] {
    int device = 0;
    require_cuda(cudaGetDevice(&device));
    return Memory{"cuda",
                  NVTE_EP_DEVICE_CUDA,
                  [](size_t bytes) { return CudaBlocks::instance().take(bytes); },
                  [](void* block) { CudaBlocks::instance().give_back(block); },
                  [](void* to, const void* from, size_t bytes) {
                    if (bytes > 0) require_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
                  },
                  device};
  }();
  return memory;
}

}  // namespace ep_test

#endif  // NVTE_EP_TESTS_CUDA_CUDA_MEMORY_H_
