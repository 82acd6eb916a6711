// Sixteen elements to NVFP4: the fast form of Nvfp4::encode_block, with the same bytes.
#ifndef NVTE_EP_DEVICE_NVFP4_BLOCK_CUH_
#define NVTE_EP_DEVICE_NVFP4_BLOCK_CUH_

#include <type_traits>

#include "device/e2m1.cuh"
#include "device/e4m3.cuh"
#include "device/tokens.cuh"
#include "formats/nvfp4.h"

namespace nvte_ep::device {

// 1 / x to nearest, for a positive E4M3 number x: the approximation is within one last place, one step of
// Newton's method rounds it right.
__device__ __forceinline__ float reciprocal_of_e4m3(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(__fmaf_rn(-x, r, 1.0f), r, r);
}

// Products up to here are encoded by the fast functions: those of a block whose scale is neither 0 nor cut
// off are below 6 * (1 + 1/16), and 7 would be a tie with what E2M1 does not have.
constexpr float kFastLimit = 6.5f;

// A second-level scale 2^k as the block encoder needs it.
struct SecondLevel {
  float sixth;    // 2^-k / 6
  float inverse;  // 2^-k
  bool round_up;  // block scales towards infinity

  __device__ __forceinline__ SecondLevel(int k, bool up)
      : sixth(mul_rn(exp2_int(-k), 1.0f / 6.0f)), inverse(exp2_int(-k)), round_up(up) {}

  // amax: NaN if all elements are; the conversion saturates, but makes a code of NaN that the definition does
  // not.
  __device__ __forceinline__ uint32_t block_scale(float amax) const {
    return fast_float_to_e4m3(fminf(mul_rn(amax, sixth), kFloatMax), round_up);
  }
  __device__ __forceinline__ uint32_t block_scale_of_finite(float amax) const {
    return fast_float_to_e4m3(mul_rn(amax, sixth), round_up);
  }
  __device__ __forceinline__ float multiplier(uint32_t block_scale) const {
    const float m = mul_rn(reciprocal_of_e4m3(fast_e4m3_to_float(block_scale)), inverse);
    return block_scale == 0 ? kFloatMax : m;
  }
};

#if defined(NVTE_EP_HARDWARE_E2M1)
constexpr bool kHardwareE2m1 = true;  // the conversion saturates, and takes NaN for 6
#else
constexpr bool kHardwareE2m1 = false;
#endif

// How encode_fast encodes: two products at a time in FP16, or one by one in FP32 or in hardware.
template <typename Token, bool kStochastic>
constexpr bool kInHalves =
    kStochastic ? Token::kBytes == 2 : !kHardwareE2m1 && std::is_same_v<Token, Bf16Token>;

// A block's multiplier as encode_fast wants it.
template <typename Token, bool kStochastic>
__device__ __forceinline__ float prepare_multiplier(float multiplier, uint32_t scale_code) {
  if constexpr (!kInHalves<Token, kStochastic>) return multiplier;
  return kStochastic ? mul_rn(multiplier, kHalvesScale) : bf16_multiplier(multiplier, scale_code);
}

// Under larger exponents a prepared multiplier, down to 2^-(k + 23), might not be a normal number, and lose bits that
// stochastic rounding needs.
constexpr int kMaxFastExponent = 103;

// True where encode_fast takes a block without NaN and infinity, under an exponent that is not too large: not where its
// scale came out 0 or was cut off at 448.
template <typename Token, bool kStochastic>
__device__ __forceinline__ bool is_within_codes(float amax, float prepared) {
  constexpr float kScale = kInHalves<Token, kStochastic> ? kHalvesScale : 1.0f;
  return mul_rn(amax, prepared) < kFastLimit * kScale;
}
template <typename Token, bool kStochastic>
__device__ __forceinline__ bool is_fast(float amax, float prepared) {
  return (kHardwareE2m1 && !kStochastic) || is_within_codes<Token, kStochastic>(amax, prepared);
}

// Codes of a block. random: the 16 bytes of the block's draw, for kStochastic.
template <typename Token, bool kStochastic>
__device__ __forceinline__ uint2 encode_fast(const Block16<Token>& x, float prepared,
                                             const uint32_t* random) {
  if constexpr (kInHalves<Token, kStochastic>) {
    if constexpr (kStochastic) {
      return make_uint2(encode_halves_stochastic<Token>(x.word, prepared, random),
                        encode_halves_stochastic<Token>(x.word + 4, prepared, random + 2));
    } else {
      return make_uint2(encode_bf16_e2m1x8(x.word, prepared), encode_bf16_e2m1x8(x.word + 4, prepared));
    }
  } else {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = x.value(i);
    if constexpr (kStochastic) {
      return make_uint2(encode_e2m1x8_stochastic(v, prepared, random),
                        encode_e2m1x8_stochastic(v + 8, prepared, random + 2));
    } else {
      return make_uint2(encode_e2m1x8(v, prepared), encode_e2m1x8(v + 8, prepared));
    }
  }
}

// Codes of any numbers, finite or not, under the multiplier itself.
template <typename Token, bool kStochastic>
__device__ __forceinline__ uint2 encode_any(const Block16<Token>& x, float multiplier,
                                            const uint32_t* random) {
  float v[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = x.value(i);
  return make_uint2(encode_e2m1_any(v, multiplier, kStochastic ? random : nullptr),
                    encode_e2m1_any(v + 8, multiplier, kStochastic ? random + 2 : nullptr));
}

// Any block. amax: the largest magnitude that is not NaN (NaN if all are). finite: there is neither NaN nor
// infinity among x.
template <typename Token, bool kStochastic>
__device__ __forceinline__ uint2 encode_nvfp4_block(const Block16<Token>& x, float amax, bool finite,
                                                    const SecondLevel& second, const uint32_t* random,
                                                    uint32_t* scale_code) {
  const uint32_t b = second.block_scale(amax);
  const float multiplier = second.multiplier(b);
  *scale_code = b;
  const float prepared = prepare_multiplier<Token, kStochastic>(multiplier, b);
  const bool fast = finite && second.inverse >= exp2_int(-kMaxFastExponent);
  if ((kHardwareE2m1 && !kStochastic) || (fast && is_fast<Token, kStochastic>(amax, prepared))) {
    return encode_fast<Token, kStochastic>(x, prepared, random);
  }
  return encode_any<Token, kStochastic>(x, multiplier, random);
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_NVFP4_BLOCK_CUH_
