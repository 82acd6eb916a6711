// Arrays as NCCL EP takes them, and the sizes that a group of this library asks of it.
#ifndef NVTE_EP_TRANSPORTS_NCCL_EP_ARRAYS_H_
#define NVTE_EP_TRANSPORTS_NCCL_EP_ARRAYS_H_

#include <algorithm>
#include <initializer_list>

#include "core/row_layout.h"
#include "core/transport.h"
#include "transports/nccl_ep_api.h"

namespace nvte_ep {

inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % nccl_ep::kAlignment == 0;
}

// The largest row that travels: BF16 tokens. FP32 sums go in two halves of that size.
inline int64_t token_bytes(const GroupSettings& settings) { return settings.hidden * 2; }

// Tokens and slots that NCCL EP is made for.
inline int64_t max_tokens(const GroupSettings& settings) {
  return round_up(settings.max_tokens_per_rank, nccl_ep::kTokenMultiple);
}
inline int64_t max_slots(const GroupSettings& settings) {
  return std::max(settings.recv_capacity, max_tokens(settings));
}

// NCCL EP wants a multiple of experts in all: every rank gets as many more, without tokens, as that takes.
inline int32_t padded_local_experts(const GroupSettings& settings, int32_t size) {
  int32_t local = settings.num_experts / size;
  while (local * size % nccl_ep::kExpertMultiple != 0) ++local;
  return local;
}

inline int data_type(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return nccl::kBfloat16;
    case DType::kFloat16:
      return nccl::kFloat16;
    default:
      return nccl::kFloat32;
  }
}

// A contiguous array with the extents that its descriptor points at. Rows count as given even where NCCL EP asks for memory
// that it does not touch.
struct Array {
  Array(const void* data, int datatype, std::initializer_list<int64_t> extents) {
    for (int64_t extent : extents) sizes[tensor.ndim++] = static_cast<size_t>(extent);
    tensor.datatype = datatype;
    tensor.data = const_cast<void*>(data);
    tensor.sizes = sizes;
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  size_t sizes[3];
  nccl_ep::Tensor tensor;
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_NCCL_EP_ARRAYS_H_
