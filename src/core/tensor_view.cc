#include "core/tensor_view.h"

#include <algorithm>

#include "core/struct_reader.h"

namespace nvte_ep {
namespace {

struct DTypeRow {
  DType dtype;
  const char* name;
  uint8_t code;
  uint8_t bits;
};
constexpr DTypeRow kDTypes[] = {
    {DType::kBFloat16, "bfloat16", NVTE_EP_DTYPE_BFLOAT, 16},
    {DType::kFloat16, "float16", NVTE_EP_DTYPE_FLOAT, 16},
    {DType::kFloat32, "float32", NVTE_EP_DTYPE_FLOAT, 32},
    {DType::kUInt8, "uint8", NVTE_EP_DTYPE_UINT, 8},
    {DType::kInt32, "int32", NVTE_EP_DTYPE_INT, 32},
    {DType::kInt64, "int64", NVTE_EP_DTYPE_INT, 64},
};

const DTypeRow& row_of(DType dtype) {
  return *std::find_if(std::begin(kDTypes), std::end(kDTypes),
                       [&](const DTypeRow& r) { return r.dtype == dtype; });
}

std::string expected_text(const TensorRule& rule) {
  std::string out;
  for (DType dtype : rule.dtypes) out += (out.empty() ? "" : " or ") + std::string(dtype_name(dtype));
  const auto dim = [&](int64_t d, const char* free) { return d < 0 ? std::string(free) : std::to_string(d); };
  out += " [" + std::string(rule.at_least ? ">= " : "") + dim(rule.dim0, "n");
  if (rule.ndim == 2) out += ", " + dim(rule.dim1, "m");
  return out + "]";
}

std::string got_text(const nvte_ep_tensor_t& t) {
  std::string out;
  const auto* found = std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const DTypeRow& r) {
    return r.code == t.dtype_code && r.bits == t.dtype_bits;
  });
  // DLPack's other types, so that a caller reads what was passed.
  constexpr const char* kKinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  if (found != std::end(kDTypes)) {
    out = found->name;
  } else if (t.dtype_code < sizeof(kKinds) / sizeof(kKinds[0])) {
    out = text(kKinds[t.dtype_code], int(t.dtype_bits));
  } else {
    out = text("dtype code ", int(t.dtype_code), " of ", int(t.dtype_bits), " bits");
  }
  out += " [";
  for (int32_t i = 0; i < t.ndim && i < NVTE_EP_MAX_NDIM; ++i)
    out += (i ? ", " : "") + std::to_string(t.shape[i]);
  return out + "]";
}

}  // namespace

const char* dtype_name(DType dtype) { return row_of(dtype).name; }
int64_t dtype_bytes(DType dtype) { return row_of(dtype).bits / 8; }

std::string device_name(const Device& device) {
  return device.is_host() ? "host memory" : text("CUDA device ", device.id);
}

Status read_tensor(const nvte_ep_tensor_t* tensor, const TensorRule& rule, TensorView* view) {
  nvte_ep_tensor_t t;
  if (tensor == nullptr) return invalid_argument(rule.name, ": expected ", expected_text(rule), ", got NULL");
  NVTE_EP_TRY(read_struct(tensor, NVTE_EP_TENSOR_V1_SIZE, rule.name, &t));
  const auto wrong = [&] {
    return invalid_argument(rule.name, ": expected ", expected_text(rule), ", got ", got_text(t));
  };
  if (t.ndim != rule.ndim) return wrong();
  const auto* dtype = std::find_if(rule.dtypes.begin(), rule.dtypes.end(), [&](DType d) {
    return row_of(d).code == t.dtype_code && row_of(d).bits == t.dtype_bits;
  });
  if (dtype == rule.dtypes.end() || t.dtype_lanes > 1) return wrong();
  for (int32_t i = 0; i < t.ndim; ++i) {
    if (t.shape[i] < 0) return wrong();
  }
  if (rule.dim0 >= 0 && (rule.at_least ? t.shape[0] < rule.dim0 : t.shape[0] != rule.dim0)) return wrong();
  if (rule.ndim == 2 && rule.dim1 >= 0 && t.shape[1] != rule.dim1) return wrong();

  view->data = t.data;
  view->dtype = *dtype;
  view->ndim = t.ndim;
  view->shape[0] = t.shape[0];
  view->shape[1] = t.ndim == 2 ? t.shape[1] : 1;
  const bool compact = std::all_of(t.strides, t.strides + t.ndim, [](int64_t s) { return s == 0; });
  const int64_t inner = compact ? 1 : t.strides[t.ndim - 1];
  view->stride = t.ndim == 1 ? 1 : (compact ? t.shape[1] : t.strides[0]);
  if (inner != 1 && t.shape[t.ndim - 1] > 1) {
    return invalid_argument(rule.name, ": expected a contiguous inner dimension, got stride ", inner);
  }
  if (t.ndim == 2 && t.shape[0] > 1 && view->stride < t.shape[1]) {
    return invalid_argument(rule.name, ": expected a row stride of at least ", t.shape[1], " elements, got ",
                            view->stride);
  }

  if (t.ndim == 2 && t.shape[0] <= 1)
    view->stride = t.shape[1];  // no second row: whatever was given does not matter

  switch (t.device_type) {
    case 0:
    case NVTE_EP_DEVICE_CPU:
    case NVTE_EP_DEVICE_CUDA_HOST:
      view->device = Device{NVTE_EP_DEVICE_CPU, 0};
      break;
    case NVTE_EP_DEVICE_CUDA:
      view->device = Device{NVTE_EP_DEVICE_CUDA, t.device_id};
      break;
    default:
      return invalid_argument(rule.name, ": expected device type 1 (CPU), 2 (CUDA) or 3 (pinned host), got ",
                              t.device_type);
  }

  const int64_t element = dtype_bytes(*dtype);
  int64_t elements = 0;
  int64_t bytes = 0;
  const int64_t rows_before_last = t.ndim == 2 && t.shape[0] > 0 ? t.shape[0] - 1 : 0;
  if (__builtin_mul_overflow(rows_before_last, view->stride, &elements) ||
      __builtin_add_overflow(elements, t.ndim == 2 ? t.shape[1] : t.shape[0], &elements) ||
      __builtin_mul_overflow(elements, element, &bytes)) {
    return invalid_argument(rule.name, ": expected a size below 2^63 bytes, got ", got_text(t));
  }
  if (view->size() == 0) return Status();  // nothing is read: the pointer does not matter

  if (t.data == nullptr) return invalid_argument(rule.name, ": expected data, got NULL for ", got_text(t));
  const int64_t alignment = rule.alignment > 0 ? rule.alignment : element;
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(alignment) != 0) {
    return invalid_argument(rule.name, ": expected a base pointer aligned to ", alignment, " bytes, got ",
                            t.data);
  }
  if (t.ndim == 2 && t.shape[0] > 1 && rule.alignment > 0 && view->stride * element % alignment != 0) {
    return invalid_argument(rule.name, ": expected a row stride that is a multiple of ", alignment,
                            " bytes, got ", view->stride * element);
  }
  return Status();
}

Status read_tensor_on(const Device& device, const nvte_ep_tensor_t* tensor, const TensorRule& rule,
                      TensorView* view) {
  NVTE_EP_TRY(read_tensor(tensor, rule, view));
  if (!(view->device == device)) {
    return invalid_argument(rule.name, ": expected ", device_name(device), ", got ",
                            device_name(view->device));
  }
  return Status();
}

}  // namespace nvte_ep
