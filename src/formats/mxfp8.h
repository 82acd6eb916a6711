// MXFP8 (OCP Microscaling Formats v1.0): E4M3 payload, one E8M0 scale per 32 elements.
#ifndef NVTE_EP_FORMATS_MXFP8_H_
#define NVTE_EP_FORMATS_MXFP8_H_

#include "formats/numerics.h"

namespace nvte_ep {

struct Mxfp8 {
  static constexpr const char* kName = "mxfp8";
  static constexpr int kBlock = 32;
  static constexpr int kPayloadBits = 8;
  static constexpr int kScaleBytes = 1;
  static constexpr int kTokenScaleBytes = 0;
  static constexpr int kHiddenMultiple = 32;
  static constexpr int kOperandMultiple = 32;
  static constexpr int kColumnwiseAlignment = 32;

  // Scale of a block from amax, the largest magnitude of its elements that are not NaN (NaN if all are): the smallest
  // power of two that brings amax to 448 or below.
  static NVTE_EP_HD uint8_t scale(float amax) { return float_to_e8m0_up(mul_rn(amax, 1.0f / 448.0f)); }

  // Quantises 32 elements, stride apart, to 32 codes, code_stride apart; returns the scale.
  static NVTE_EP_HD uint8_t encode_block(const float* x, int64_t stride, uint8_t* codes,
                                         int64_t code_stride) {
    uint32_t amax = 0;  // magnitudes compare as their bits
    bool all_nan = true;
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t a = float_bits(x[i * stride]) & 0x7FFFFFFFu;
      if (a > 0x7F800000u) continue;
      all_nan = false;
      amax = a > amax ? a : amax;
    }
    const uint8_t code = scale(bits_float(all_nan ? kNanBits : amax));
    const float multiplier = e8m0_inverse(code);
    for (int i = 0; i < kBlock; ++i)
      codes[i * code_stride] = float_to_e4m3(mul_rn(x[i * stride], multiplier));
    return code;
  }

  static NVTE_EP_HD float decode(uint8_t code, uint8_t scale_code) {
    return canonical_nan(mul_rn(e8m0_to_float(scale_code), e4m3_to_float(code)));
  }
};

}  // namespace nvte_ep

#endif  // NVTE_EP_FORMATS_MXFP8_H_
