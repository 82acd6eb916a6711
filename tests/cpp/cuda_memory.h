// Memory of GPU 0, and a stream for each thread. Ranks that share a GPU wait for each other in kernels, and CUDA's own allocation
// and release wait for the whole device: so each thread has its share of memory from the beginning. Threads that come later take
// over the streams of those before, since streams that share a queue of the device wait for each other.
#ifndef NVTE_EP_TESTS_CUDA_MEMORY_H_
#define NVTE_EP_TESTS_CUDA_MEMORY_H_

#include "arrays.h"

#if defined(NVTE_EP_WITH_CUDA)
#include <map>
#include <mutex>

#include "require_cuda.h"
#endif

namespace ep_test {

// There are so many queues, not 8, and what is loaded late waits for the whole device. Before main, since CUDA looks once.
inline const bool cuda_is_set_up =
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) == 0 && setenv("CUDA_MODULE_LOADING", "EAGER", 0) == 0;

#if defined(NVTE_EP_WITH_CUDA)
// A stream, and memory that is used on it: blocks of it again and again. One thread at a time has it.
class CudaLane {
 public:
  CudaLane() {
    require_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    require_cuda(cudaMalloc(reinterpret_cast<void**>(&memory_), kBytes));
  }

  cudaStream_t stream() const { return stream_; }
  void* take(size_t bytes) {
    size_t size = 4096;
    while (size < bytes) size *= 2;
    std::vector<void*>& free = free_[size];
    void* block = memory_ + taken_;
    if (free.empty()) {
      taken_ += size;
      if (taken_ > kBytes) require_cuda(cudaErrorMemoryAllocation);  // give lanes more
    } else {
      block = free.back();
      free.pop_back();
    }
    used_[block] = size;
    return block;
  }
  void give_back(void* block) {
    free_[used_.at(block)].push_back(block);
    used_.erase(block);
  }

  // This thread's.
  static CudaLane& mine() {
    thread_local const Lease lease;
    return *lease.lane;
  }

 private:
  struct Lease {
    Lease() {
      const std::lock_guard<std::mutex> lock(mutex());
      if (idle().empty()) {
        lane = new CudaLane();  // never destroyed: the driver may be gone by then
      } else {
        lane = idle().back();
        idle().pop_back();
      }
    }
    ~Lease() {
      require_cuda(cudaStreamSynchronize(lane->stream_));
      const std::lock_guard<std::mutex> lock(mutex());
      idle().push_back(lane);
    }
    CudaLane* lane;
  };
  static std::mutex& mutex() {
    static std::mutex* const one = new std::mutex();
    return *one;
  }
  static std::vector<CudaLane*>& idle() {
    static std::vector<CudaLane*>* const all = new std::vector<CudaLane*>();
    return *all;
  }

  static constexpr size_t kBytes = size_t{256} << 20;
  cudaStream_t stream_ = nullptr;
  uint8_t* memory_ = nullptr;
  size_t taken_ = 0;
  std::map<size_t, std::vector<void*>> free_;
  std::map<void*, size_t> used_;
};
#endif

// Null where there is no GPU. An array goes where it was made: on its thread.
inline const Memory* cuda_memory() {
#if defined(NVTE_EP_WITH_CUDA)
  static const int devices = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
  }();
  static const Memory memory = {"cuda",
                                NVTE_EP_DEVICE_CUDA,
                                [](size_t bytes) { return CudaLane::mine().take(bytes); },
                                [](void* block) { CudaLane::mine().give_back(block); },
                                [](void* to, const void* from, size_t bytes) {
                                  const cudaStream_t stream = CudaLane::mine().stream();
                                  // First: a copy to pageable memory holds a lock of CUDA's until it is done, and
                                  // behind a kernel that waits for another rank that rank needs the lock.
                                  require_cuda(cudaStreamSynchronize(stream));
                                  require_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
                                  require_cuda(cudaStreamSynchronize(stream));
                                },
                                0,
                                [] { return static_cast<nvte_ep_stream_t>(CudaLane::mine().stream()); }};
  return devices > 0 ? &memory : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace ep_test

#endif  // NVTE_EP_TESTS_CUDA_MEMORY_H_
