// Makes a device current, and the caller's again at the end of the scope.
#ifndef NVTE_EP_BACKENDS_CUDA_DEVICE_GUARD_H_
#define NVTE_EP_BACKENDS_CUDA_DEVICE_GUARD_H_

#include <cuda_runtime.h>

namespace nvte_ep {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_CUDA_DEVICE_GUARD_H_
