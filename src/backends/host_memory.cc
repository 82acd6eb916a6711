// Memory of the host backend.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "backends/host_backend.h"

namespace nvte_ep {

Status HostBackend::allocate(int64_t bytes, void** pointer) {
  const size_t size = static_cast<size_t>(round_up(std::max<int64_t>(bytes, 1), kOperandPartAlignment));
  *pointer = std::aligned_alloc(static_cast<size_t>(kOperandPartAlignment), size);
  if (*pointer != nullptr) return Status();
  return Status(NVTE_EP_STATUS_OUT_OF_MEMORY, text("could not allocate ", bytes, " bytes of host memory"));
}

void HostBackend::release(void* pointer) { std::free(pointer); }

Status HostBackend::copy_rows(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                              int64_t row_bytes, int64_t rows, nvte_ep_stream_t) {
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(static_cast<uint8_t*>(to) + i * to_stride,
                static_cast<const uint8_t*>(from) + i * from_stride, static_cast<size_t>(row_bytes));
  }
  return Status();
}

Status HostBackend::copy_words(void* to, const void* from, int64_t words_per_item, int64_t items,
                               const IndexView& count, nvte_ep_stream_t) {
  std::memcpy(to, from, static_cast<size_t>(std::min(items, load_index(count, 0)) * words_per_item * 4));
  return Status();
}

Status HostBackend::write_index(const TensorView& out, const int64_t* counts, nvte_ep_stream_t) {
  for (int64_t i = 0; i < out.rows(); ++i) {
    if (out.dtype == DType::kInt64) {
      static_cast<int64_t*>(out.data)[i] = counts[i];
    } else {
      static_cast<int32_t*>(out.data)[i] = saturated_int32(counts[i]);
    }
  }
  return Status();
}

Status HostBackend::upload(void* to, const void* from, int64_t bytes, nvte_ep_stream_t) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return Status();
}

Status HostBackend::download(void* to, const void* from, int64_t bytes, nvte_ep_stream_t stream) {
  return upload(to, from, bytes, stream);
}

}  // namespace nvte_ep
