// A row's block scales under its expert's second-level scale in place of its own.
#ifndef NVTE_EP_DEVICE_ROW_RESCALE_CUH_
#define NVTE_EP_DEVICE_ROW_RESCALE_CUH_

#include <cstdint>

#include "device/e4m3.cuh"
#include "formats/nvfp4.h"

namespace nvte_ep::device {

constexpr uint8_t kIllegalExponent =
    255;  // of a second-level scale that is none; otherwise from kMinExponent up

// Requantises the scales of one row to the expert's exponent, four at a time. Eight bytes, so that a tile's
// rows fit shared memory.
class RowRescale {
 public:
  RowRescale() = default;
  __device__ __forceinline__ RowRescale(float token_scale, uint8_t expert_exponent) {
    int k;
    const Nvfp4::ScaleKind kind = Nvfp4::classify(token_scale, &k);
    const int shift = static_cast<int>(expert_exponent) + Nvfp4::kMinExponent - k;
    const bool live = kind == Nvfp4::ScaleKind::kLive && expert_exponent != kIllegalExponent;
    const bool nan = kind == Nvfp4::ScaleKind::kNan || expert_exponent == kIllegalExponent;
    // A zero token's scales become 0, but a NaN stays one.
    factor_ = live ? half_exp2_down(shift < 0 ? 0 : (shift > 24 ? 24 : shift)) : 0u;
    set_ = nan ? 0x7F7F7F7F : (live && shift < 0 ? shift : 0);
  }

  __device__ __forceinline__ uint32_t operator()(uint32_t codes, bool* misfit) const {
    if (set_ < 0) {
      const uint32_t scaled = scale_up(codes, set_);
      *misfit |= (scaled & 0x80808080u) != 0;
      return scaled & 0x7F7F7F7Fu;
    }
    return e4m3x4_scale_down(codes, factor_) | static_cast<uint32_t>(set_);
  }

 private:
  // The row lies above a fixed expert scale. The top bit of a code: it does not fit.
  static __device__ __noinline__ uint32_t scale_up(uint32_t codes, int32_t shift) {
    uint32_t out = 0;
#pragma unroll 1
    for (int i = 0; i < 4; ++i, codes >>= 8) {
      const uint8_t magnitude = codes & 0x7Fu;
      const uint8_t code = e4m3_scale_exponent(magnitude, shift);
      const uint32_t misfit = e4m3_scale_exponent(code, -shift) != magnitude ? 0x80u : 0u;
      out = (out >> 8) | ((code | misfit) << 24);
    }
    return out;
  }

  uint32_t factor_;  // FP16 2^-shift, twice
  int32_t set_;      // ORed into every scale; below 0: the (negative) shift of a row that is too large
};

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_ROW_RESCALE_CUH_
