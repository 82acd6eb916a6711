// Options of a codec call that are read on the device: row count, tensor scale, findings.
#ifndef NVTE_EP_DEVICE_CODEC_OPTIONS_CUH_
#define NVTE_EP_DEVICE_CODEC_OPTIONS_CUH_

#include <cstdint>

#include "core/backend.h"
#include "formats/nvfp4.h"

namespace nvte_ep::device {

__device__ __forceinline__ int64_t load_index(const IndexView& view, int64_t i) {
  return view.is_int64 ? static_cast<const int64_t*>(view.data)[i]
                       : static_cast<const int32_t*>(view.data)[i];
}

__device__ __forceinline__ bool is_first_thread() { return blockIdx.x == 0 && threadIdx.x == 0; }

__device__ __forceinline__ void report(int32_t* findings, int32_t bits) {
  if (findings != nullptr && bits != 0) atomicOr(findings, bits);
}

// Rows in use: row_count where given, clamped to the rows there are. One thread of the grid reports.
__device__ __forceinline__ int64_t rows_in_use(int64_t rows, const CodecOptions& options) {
  if (options.row_count.data == nullptr) return rows;
  const int64_t count = load_index(options.row_count, 0);
  if ((count < 0 || count > rows) && is_first_thread()) report(options.findings, NVTE_EP_FINDING_ROW_COUNT);
  return count < 0 ? 0 : (count < rows ? count : rows);
}

// The caller's tensor scale: kZero stands for "none given".
struct TensorScale {
  Nvfp4::ScaleKind kind = Nvfp4::ScaleKind::kZero;
  int exponent = 0;
};
__device__ __forceinline__ TensorScale read_tensor_scale(const CodecOptions& options) {
  TensorScale scale;
  if (options.tensor_scale == nullptr) return scale;
  scale.kind = Nvfp4::classify(*options.tensor_scale, &scale.exponent);
  if (scale.kind == Nvfp4::ScaleKind::kZero) scale.kind = Nvfp4::ScaleKind::kNan;
  if (scale.kind == Nvfp4::ScaleKind::kNan && is_first_thread()) {
    report(options.findings, NVTE_EP_FINDING_TENSOR_SCALE);
  }
  return scale;
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_CODEC_OPTIONS_CUH_
