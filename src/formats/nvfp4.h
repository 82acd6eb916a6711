// NVFP4: E2M1 payload, one E4M3 scale per 16 elements, one FP32 power-of-two token scale per row.
#ifndef NVTE_EP_FORMATS_NVFP4_H_
#define NVTE_EP_FORMATS_NVFP4_H_

#include "formats/numerics.h"

namespace nvte_ep {

struct Nvfp4 {
  static constexpr const char* kName = "nvfp4";
  static constexpr int kBlock = 16;
  static constexpr int kPayloadBits = 4;
  static constexpr int kScaleBytes = 1;
  static constexpr int kTokenScaleBytes = 4;
  static constexpr int kHiddenMultiple = 16;
  static constexpr int kOperandMultiple = 32;
  static constexpr int kColumnwiseAlignment = 16;

  // Exponents of second-level scales. The lower end keeps the smallest decoded magnitude, 0.5 * 2^-9 * 2^-116, a normal
  // FP32 number; the upper keeps 448 * 2688 * 2^(105 + 2), a product that consumers form, finite.
  static constexpr int kMinExponent = -116;
  static constexpr int kMaxExponent = 105;
  static constexpr float kRange = 2688.0f;  // 6 * 448: the largest value with a second-level scale of 1

  // Smallest k with 2^k >= amax / 2688, clamped. 2688 = 1.3125 * 2^11, and 1.3125 has the mantissa field 0x280000.
  static NVTE_EP_HD int token_exponent(float amax) {
    if (!is_finite(amax)) return kMaxExponent;
    const uint32_t u = float_bits(amax) & 0x7FFFFFFFu;
    const int k = static_cast<int>(u >> 23) - 127 - 11 + ((u & 0x7FFFFFu) > 0x280000u ? 1 : 0);
    return k < kMinExponent ? kMinExponent : (k > kMaxExponent ? kMaxExponent : k);
  }

  // A second-level scale as found in memory: zero, a legal power of two, or anything else, which reads as NaN.
  enum class ScaleKind { kZero, kLive, kNan };
  static NVTE_EP_HD ScaleKind classify(float scale, int* exponent) {
    const uint32_t u = float_bits(scale);
    const int k = static_cast<int>(u >> 23) - 127;
    *exponent = kMinExponent;
    if (u == 0) return ScaleKind::kZero;
    if ((u & 0x807FFFFFu) != 0 || k < kMinExponent || k > kMaxExponent) return ScaleKind::kNan;
    *exponent = k;
    return ScaleKind::kLive;
  }

  // Scale of a block whose largest magnitude (NaNs dropped; NaN if all are) is amax, under the second-level scale 2^k.
  static NVTE_EP_HD uint8_t scale(float amax, int k, bool round_up) {
    const float product = mul_rn(amax, mul_rn(exp2_int(-k), 1.0f / 6.0f));
    const float bounded = product < kFloatMax ? product : kFloatMax;  // NaN too
    return round_up ? float_to_e4m3_up(bounded) : float_to_e4m3(bounded);
  }

  // What elements are multiplied by before E2M1: 1 / (scale * 2^k), bounded, so that a zero scale gives zero codes.
  static NVTE_EP_HD float multiplier(uint8_t scale_code, int k) {
    const float inverse = div_rn(1.0f, mul_rn(e4m3_to_float(scale_code), exp2_int(k)));
    return inverse < kFloatMax ? inverse : kFloatMax;
  }

  // Largest magnitude of 16 elements as FP32 bits (magnitudes compare as their bits); NaNs are dropped, NaN if all are.
  static NVTE_EP_HD float block_amax(const float* x, int64_t stride) {
    uint32_t amax = 0;
    bool all_nan = true;
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t a = float_bits(x[i * stride]) & 0x7FFFFFFFu;
      if (a > 0x7F800000u) continue;
      all_nan = false;
      amax = a > amax ? a : amax;
    }
    return bits_float(all_nan ? kNanBits : amax);
  }

  // Quantises 16 elements, stride apart, under 2^k, to 8 bytes of codes (element 2i in the low nibble of byte i); returns the
  // block's scale. random is null for rounding to nearest.
  static NVTE_EP_HD uint8_t encode_block(const float* x, int64_t stride, int k, bool round_scale_up,
                                         const Philox4* random, uint8_t* codes) {
    const uint8_t b = scale(block_amax(x, stride), k, round_scale_up);
    const float m = multiplier(b, k);
    for (int i = 0; i < kBlock; i += 2) {
      const float lo = mul_rn(x[i * stride], m);
      const float hi = mul_rn(x[(i + 1) * stride], m);
      const uint32_t pair = random ? float_to_e2m1_stochastic(lo, random->byte(i)) |
                                         (float_to_e2m1_stochastic(hi, random->byte(i + 1)) << 4)
                                   : float_to_e2m1(lo) | (float_to_e2m1(hi) << 4);
      codes[i / 2] = static_cast<uint8_t>(pair);
    }
    return b;
  }

  // Value of one unit of E2M1 in a block: block scale (sign ignored) times token scale. Exact, or NaN.
  static NVTE_EP_HD float block_unit(uint8_t scale_code, float token_scale) {
    int k;
    const ScaleKind kind = classify(token_scale, &k);
    if (kind == ScaleKind::kNan) return bits_float(kNanBits);
    return mul_rn(e4m3_to_float(scale_code & 0x7Fu), token_scale);
  }
  static NVTE_EP_HD float decode(uint32_t code, float unit) {
    return canonical_nan(mul_rn(e2m1_to_float(code), unit));
  }

  // Term of one row in the L1 bound of an expert whose largest exponent is expert_k: 2^(24 - (expert_k - k)), at least 1.
  static NVTE_EP_HD uint32_t l1_term(int expert_k, int k) {
    const int d = expert_k - k;
    return d >= 24 ? 1u : (1u << 24) >> d;
  }
  // Smallest c with 2^c >= a quarter of the largest sum of token scales over 16 rows, from the sum of terms.
  static NVTE_EP_HD int l1_exponent(int expert_k, uint32_t sum) {
    int log2_up = 0;
    while ((1ull << log2_up) < sum) ++log2_up;
    const int c = expert_k - 26 + log2_up;
    return c < kMinExponent ? kMinExponent : c;
  }
};

}  // namespace nvte_ep

#endif  // NVTE_EP_FORMATS_NVFP4_H_
