// Rows of tokens to and from FP32 on the host.
#ifndef NVTE_EP_BACKENDS_HOST_ROWS_H_
#define NVTE_EP_BACKENDS_HOST_ROWS_H_

#include <cstdint>
#include <cstring>

#include "core/tensor_view.h"
#include "formats/numerics.h"

namespace nvte_ep {

inline void load_row(const void* row, DType dtype, int64_t n, float* out) {
  switch (dtype) {
    case DType::kBFloat16: {
      const uint16_t* x = static_cast<const uint16_t*>(row);
      for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_float(x[i]);
      return;
    }
    case DType::kFloat16: {
      const uint16_t* x = static_cast<const uint16_t*>(row);
      for (int64_t i = 0; i < n; ++i) out[i] = fp16_to_float(x[i]);
      return;
    }
    default:
      std::memcpy(out, row, static_cast<size_t>(n) * 4);
  }
}

inline void store_row(const float* in, DType dtype, int64_t n, void* row) {
  switch (dtype) {
    case DType::kBFloat16: {
      uint16_t* y = static_cast<uint16_t*>(row);
      for (int64_t i = 0; i < n; ++i) y[i] = float_to_bf16(in[i]);
      return;
    }
    case DType::kFloat16: {
      uint16_t* y = static_cast<uint16_t*>(row);
      for (int64_t i = 0; i < n; ++i) y[i] = float_to_fp16(in[i]);
      return;
    }
    default: {
      float* y = static_cast<float*>(row);
      for (int64_t i = 0; i < n; ++i) y[i] = canonical_nan(in[i]);
    }
  }
}

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_HOST_ROWS_H_
