// TensorView: a checked nvte_ep_tensor_t. Checks name the argument and say what was expected and what was found.
#ifndef NVTE_EP_CORE_TENSOR_VIEW_H_
#define NVTE_EP_CORE_TENSOR_VIEW_H_

#include <cstdint>
#include <initializer_list>

#include "core/status.h"
#include "nvte_ep/nvte_ep.h"

namespace nvte_ep {

struct Device {
  int32_t type = NVTE_EP_DEVICE_CPU;  // CPU or CUDA; pinned host memory counts as CPU
  int32_t id = 0;
  bool is_host() const { return type == NVTE_EP_DEVICE_CPU; }
  bool operator==(const Device& other) const {
    return type == other.type && (type == NVTE_EP_DEVICE_CPU || id == other.id);
  }
};
std::string device_name(const Device& device);

enum class DType { kBFloat16, kFloat16, kFloat32, kUInt8, kInt32, kInt64 };
const char* dtype_name(DType dtype);
int64_t dtype_bytes(DType dtype);

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kUInt8;
  Device device;
  int32_t ndim = 0;
  int64_t shape[2] = {0, 0};
  int64_t stride = 0;  // of the outer dimension of a matrix, in elements

  int64_t rows() const { return shape[0]; }
  int64_t columns() const { return shape[1]; }
  int64_t size() const { return ndim == 2 ? shape[0] * shape[1] : shape[0]; }
  bool is_index() const { return dtype == DType::kInt32 || dtype == DType::kInt64; }
  bool is_token() const {
    return dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat32;
  }
  uint8_t* row(int64_t i) const { return static_cast<uint8_t*>(data) + i * stride * dtype_bytes(dtype); }
};

// What an argument must be. A dimension of -1 is free.
struct TensorRule {
  const char* name;
  std::initializer_list<DType> dtypes;
  int32_t ndim;
  int64_t dim0 = -1;
  int64_t dim1 = -1;
  int64_t alignment = 0;  // bytes, of the base pointer and of row strides; 0: the element
  bool at_least = false;  // dim0 is a minimum
};

constexpr std::initializer_list<DType> kTokenDTypes = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
constexpr std::initializer_list<DType> kIndexDTypes = {DType::kInt32, DType::kInt64};

// Reads and checks; a null tensor is an error.
Status read_tensor(const nvte_ep_tensor_t* tensor, const TensorRule& rule, TensorView* view);

// The same, and on the device given.
Status read_tensor_on(const Device& device, const nvte_ep_tensor_t* tensor, const TensorRule& rule,
                      TensorView* view);

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_TENSOR_VIEW_H_
