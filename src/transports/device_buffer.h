// Memory of a backend that goes with its owner.
#ifndef NVTE_EP_TRANSPORTS_DEVICE_BUFFER_H_
#define NVTE_EP_TRANSPORTS_DEVICE_BUFFER_H_

#include "core/backend.h"

namespace nvte_ep {

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  ~DeviceBuffer() { free(); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  // At least bytes; what it held is lost when it grows.
  Status reserve(Backend* backend, int64_t bytes) {
    if (bytes <= bytes_) return Status();
    void* fresh = nullptr;
    NVTE_EP_TRY(backend->allocate(bytes, &fresh));
    free();
    backend_ = backend;
    pointer_ = fresh;
    bytes_ = bytes;
    return Status();
  }
  void free() {
    if (backend_ != nullptr) backend_->release(pointer_);
    backend_ = nullptr;
    pointer_ = nullptr;
    bytes_ = 0;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(pointer_);
  }

 private:
  Backend* backend_ = nullptr;
  void* pointer_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_DEVICE_BUFFER_H_
