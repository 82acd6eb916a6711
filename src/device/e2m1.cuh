// E2M1 codes, eight at a time in one word (element i in nibble i): the bytes of formats/numerics.h with few
// instructions.
#ifndef NVTE_EP_DEVICE_E2M1_CUH_
#define NVTE_EP_DEVICE_E2M1_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/e4m3.cuh"
#include "formats/numerics.h"

// The sm_100 family converts to E2M1 in hardware: nearest even, saturating at 6, NaN to +6, the sign of zero
// kept.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000 && __CUDA_ARCH_FAMILY_SPECIFIC__ < 1100
#define NVTE_EP_HARDWARE_E2M1 1
#endif
#endif

namespace nvte_ep::device {

__device__ __forceinline__ uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}
// (a & mask) | (b & ~mask), one instruction also where the mask is a constant.
__device__ __forceinline__ uint32_t blend(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(out) : "r"(a), "r"(b), "r"(mask));
  return out;
}

#if defined(NVTE_EP_HARDWARE_E2M1)
__device__ __forceinline__ uint32_t floats_to_e2m1x8(const float* y) {
  uint32_t word;
  asm("{\n\t.reg .b8 b0, b1, b2, b3;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n\t"
      "mov.b32 %0, {b0, b1, b2, b3};\n\t}"
      : "=r"(word)
      : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
  return word;
}
#endif

// Any FP32 number times the multiplier, where the products are below 7. A number reaches the E2M1 grid by
// adding and subtracting 1.5 * 2^22 * p, where p is its power of two, at least 1: the sum's last place is the
// grid's step there, so the addition rounds to nearest even, once. On the grid a number is exact in E4M3, and
// scaled by 2^-6 its E4M3 code is (sign, 0, 0, the E2M1 code's three bits, 0, 0): the hardware conversion
// packs it.
constexpr float kGridScale = 0.015625f;  // 2^-6
__device__ __forceinline__ float to_grid(float y) {
  const float p = fmaxf(bits_float(float_bits(y) & 0x7F800000u), kGridScale);
  const float v = __fmaf_rn(p, -6291456.0f, __fmaf_rn(p, 6291456.0f, y));
  return bits_float(float_bits(v) | (float_bits(y) & 0x80000000u));  // -0 stays -0
}
__device__ __forceinline__ uint32_t encode_e2m1x8(const float* x, float multiplier) {
#if defined(NVTE_EP_HARDWARE_E2M1)
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = mul_rn(x[i], multiplier);
  return floats_to_e2m1x8(y);
#else
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = to_grid(mul_rn(x[i], mul_rn(multiplier, kGridScale)));
  const uint32_t even = floats_to_e4m3x2(v[0], v[2]) | (floats_to_e4m3x2(v[4], v[6]) << 16);
  const uint32_t odd = floats_to_e4m3x2(v[1], v[3]) | (floats_to_e4m3x2(v[5], v[7]) << 16);
  const uint32_t low = blend(even >> 2, even >> 4, 0x07070707u);
  const uint32_t high = blend(odd << 2, odd, 0x70707070u);
  return blend(low, high, 0x0F0F0F0Fu);
#endif
}

// The same for BF16 numbers, two at a time in FP16. Scaled by 2^-14, codes 0 and 1 are FP16's subnormal
// numbers, and the top bits of a number, rounded to one mantissa bit, are its code.
//
// Why FP16 decides right: a BF16 number has 8 significant bits and a block scale 4, so a product that is not
// halfway between two codes is at least 2^-9 away from there, relatively, and 2^-10 absolutely: more than
// FP16 rounds by. The FP32 product of the definition is exactly halfway where the quotient is, but for one
// significand of the scale: with 1.875 it comes out a last place above at 1.25, 2.5 and 5, and is rounded up.
// Nudging the multiplier by 0.9 * 2^-11 does the same to those three and, staying below half of FP16's last
// place at the others, to no other. tests/cuda goes through all cases.
constexpr float kHalvesScale = 6.103515625e-5f;  // 2^-14
__device__ __forceinline__ float bf16_multiplier(float multiplier, uint32_t scale_code) {
  const bool nudge = (scale_code & 7u) == 7u && scale_code > 7u;
  return mul_rn(multiplier, nudge ? kHalvesScale * (1.0f + 0.9f / 2048.0f) : kHalvesScale);
}
// Two products, rounded: in each half the sign in bit 15, the code in bits 11 to 9.
//
// Rounding to nearest even adds 255 of 512 parts, and one more where the code is odd. The one is added in
// FP16: the code's last bit, as a number, times 2^-8 is two parts of codes 1 and 3 and one of code 5; nothing
// but a tie lies as close to the next code.
__device__ __forceinline__ uint32_t round_products(float lo, float hi, float scaled_multiplier) {
  const uint32_t z = bits_of(__floats2half2_rn(mul_rn(lo, scaled_multiplier), mul_rn(hi, scaled_multiplier)));
  const uint32_t odd = z & 0x82008200u;  // with the sign
  return bits_of(__hfma2(half2_of(odd), half2_of(0x1C001C00u), half2_of(z))) + 0x00FF00FFu;
}
// Elements (0, 2), (4, 6) and (1, 3), (5, 7), rounded, to nibbles.
__device__ __forceinline__ uint32_t nibbles_of_rounded(uint32_t e02, uint32_t e46, uint32_t e13,
                                                       uint32_t e57) {
  // Bytes (sign, 0, 0, 0, code, any), then (sign, code, any): a product puts the code beside the sign.
  const uint32_t even = pick_bytes(e02, e46, 0x7531);
  const uint32_t odd = pick_bytes(e13, e57, 0x7531);
  return blend(blend(even, even * 8u, 0x80808080u) >> 4, blend(odd, odd * 8u, 0x80808080u), 0x0F0F0F0Fu);
}
__device__ __forceinline__ uint32_t encode_bf16_e2m1x8(const uint32_t* x, float scaled_multiplier) {
  const auto lo = [&](int i) { return bits_float(x[i] << 16); };
  const auto hi = [&](int i) { return bits_float(x[i] & 0xFFFF0000u); };
  return nibbles_of_rounded(
      round_products(lo(0), lo(1), scaled_multiplier), round_products(lo(2), lo(3), scaled_multiplier),
      round_products(hi(0), hi(1), scaled_multiplier), round_products(hi(2), hi(3), scaled_multiplier));
}

// BF16 numbers that are below 2^-96 and hold 2^-112 times what is encoded, 16 of them times one multiplier: by
// FP16 arithmetic alone, which leaves the pipe of integer and logic instructions free.
//
// Shifted by 3 bits, the magnitude of such a BF16 number is an FP16 number y, 2^112 times as large. With the
// product q = y * m below 7, half of (code as a number) is h(q) = q/4 + min(q, 4)/4 + min(q, 2)/2, rounded to
// nearest even multiples of 1/2: the three slopes are the steps of E2M1, and its ties are those of the
// integers. 2^-23 times 2h is one of FP16's subnormal numbers: the multiplication rounds it to the code, as an
// integer. The minima are saturating multiplications.
//
// Why FP16 decides right: y has 8 significant bits and the block scale 4, so a product that is not a tie is at
// least 2^-8 away from one, relatively; h is off by less. A tie must come out exactly, and the multiplier is
// rounded. For two significands of the scale the roundings miss: 1.375 and 1.875; their multipliers differ in
// the last places. (With 1.875 the FP32 product of the definition is above the ties at 1.25, 2.5 and 5, and
// goes up.) tests/cuda goes through all cases.
struct TinyMultiplier {
  uint32_t halves;  // for min(q, 2) / 2 in the low half, for min(q, 4) / 4 in the high one
  uint32_t third;   // for q / 4 in the low half; in the high one the largest BF16 number that is encoded
};
// multiplier: m; a quarter of it must be a normal FP16 number.
__device__ __forceinline__ TinyMultiplier tiny_multiplier(float multiplier, uint32_t scale_code) {
  constexpr uint32_t kLastPlace = 1;
  const uint32_t half = __half_as_ushort(__float2half_rn(multiplier * 0.5f));
  const uint32_t quarter = half - 0x400u;  // half of it
  const uint32_t significand =
      scale_code > 7u ? scale_code & 7u : 0u;  // less one, eighths; subnormals have no such
  const uint32_t second = quarter + (significand == 3u ? kLastPlace : 0u);
  const uint32_t third = quarter + (significand == 7u ? 2u * kLastPlace : 0u);
  return TinyMultiplier{half | (second << 16), third};
}
// Two magnitudes times 2^112 / 2^112: BF16 to FP16.
__device__ __forceinline__ uint32_t halves_of_tiny(uint32_t pair) { return (pair & 0x7FFF7FFFu) * 8u; }
// Codes of two numbers, an integer in each half.
__device__ __forceinline__ __half2 codes_of_tiny(uint32_t pair, const TinyMultiplier& m) {
  const __half2 y = half2_of(halves_of_tiny(pair));
  const __half2 halves = half2_of(m.halves), third = half2_of(m.third);
  const __half2 below = __hadd2_rn(__hmul2_sat(y, __low2half2(halves)), __hmul2_sat(y, __high2half2(halves)));
  return __hmul2_rn(__hfma2(y, __low2half2(third), below), half2_of(0x00020002u));  // times 2^-23
}
// Elements (0, 2), (4, 6), (1, 3), (5, 7) to nibbles.
__device__ __forceinline__ uint32_t encode_tiny_e2m1x8(const uint32_t* x, const TinyMultiplier& m) {
  const __half2 sixteen = half2_of(0x4C004C00u);
  const uint32_t low = bits_of(__hfma2(codes_of_tiny(x[2], m), sixteen, codes_of_tiny(x[0], m)));
  const uint32_t high = bits_of(__hfma2(codes_of_tiny(x[3], m), sixteen, codes_of_tiny(x[1], m)));
  const uint32_t even = pick_bytes(x[0], x[1], 0x7531), odd = pick_bytes(x[2], x[3], 0x7531);
  return pick_bytes(low, high, 0x6420) | ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}

// Stochastic rounding; the products are below 7. The definition adds (r / 256) * step to a number and cuts
// the sum down to a code: a code goes up where the number has at least 256 - r of 256 parts of the step.
//
// BF16 and FP16 numbers, two at a time in FP16, scaled by 2^-14 as above. FP16 has 512 parts of a step there,
// so cutting a product down to them (the conversion rounds towards zero) changes no decision, and the random
// byte, twice, is added to the bits below the code. tests/cuda goes through all numbers.
__device__ __forceinline__ uint32_t round_products_stochastic(float lo, float hi, float scaled_multiplier,
                                                              uint32_t random_pair) {
  constexpr uint32_t kSix = 0x0E000E00u;
  uint32_t z;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;"
      : "=r"(z)
      : "f"(mul_rn(hi, scaled_multiplier)), "f"(mul_rn(lo, scaled_multiplier)));
  asm("min.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(z) : "r"(kSix));
  return z + random_pair * 2u;
}
template <typename Token>
__device__ __forceinline__ uint32_t encode_halves_stochastic(const uint32_t* x, float scaled_multiplier,
                                                             const uint32_t* random) {
  const auto even = [&](int i) {
    return round_products_stochastic(Token::lo(x[2 * i]), Token::lo(x[2 * i + 1]), scaled_multiplier,
                                     random[i] & 0x00FF00FFu);
  };
  const auto odd = [&](int i) {
    return round_products_stochastic(Token::hi(x[2 * i]), Token::hi(x[2 * i + 1]), scaled_multiplier,
                                     pick_bytes(random[i], 0u, 0x4341));
  };
  return nibbles_of_rounded(even(0), even(1), odd(0), odd(1));
}

// The same of elements (0, 2), (4, 6), (1, 3), (5, 7), as encode_tiny_e2m1x8 has them.
template <typename Token>
__device__ __forceinline__ uint32_t encode_pairs_stochastic(const uint32_t* x, float scaled_multiplier,
                                                            const uint32_t* random) {
  const auto even = [&](int i) {
    return round_products_stochastic(Token::lo(x[i]), Token::hi(x[i]), scaled_multiplier,
                                     random[i] & 0x00FF00FFu);
  };
  const auto odd = [&](int i) {
    return round_products_stochastic(Token::lo(x[i + 2]), Token::hi(x[i + 2]), scaled_multiplier,
                                     pick_bytes(random[i], 0u, 0x4341));
  };
  return nibbles_of_rounded(even(0), even(1), odd(0), odd(1));
}

// FP32 numbers, by the definition: a + (r / 512) * p, p the power of two of a, at least 1. Scaled by 2^-126,
// codes 0 and 1 are FP32's subnormal numbers, and the bits of a number, cut to one mantissa bit, its code.
__device__ __forceinline__ uint32_t encode_e2m1x8_stochastic(const float* x, float multiplier,
                                                             const uint32_t* random) {
  constexpr float kToBits = 1.1754943508222875e-38f;  // 2^-126
  constexpr float kLargest = 6.0f * 1.1754943508222875e-38f;
  uint32_t w[8];  // the code in the top byte
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = mul_rn(fabsf(x[i]), multiplier);
    const uint32_t byte = static_cast<uint32_t>(i % 4);
    const float p = fmaxf(bits_float(float_bits(a) & 0x7F800000u), 1.0f);
    // 2^14 + r / 512, minus 2^14.
    const float r = __fadd_rn(bits_float(pick_bytes(random[i / 4], 0x46800000u, 0x7650u | byte)), -16384.0f);
    w[i] = float_bits(fminf(__fmul_rz(__fmaf_rn(r, p, a), kToBits), kLargest)) * 4u;
  }
  const auto top_bytes = [](uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return pick_bytes(pick_bytes(a, b, 0x0073), pick_bytes(c, d, 0x0073), 0x5410);
  };
  const uint32_t even = top_bytes(w[0], w[2], w[4], w[6]);
  const uint32_t odd = top_bytes(w[1], w[3], w[5], w[7]);
  const uint32_t sign_even =
      top_bytes(float_bits(x[0]), float_bits(x[2]), float_bits(x[4]), float_bits(x[6]));
  const uint32_t sign_odd = top_bytes(float_bits(x[1]), float_bits(x[3]), float_bits(x[5]), float_bits(x[7]));
  return (even + odd * 16u) | ((sign_even >> 4) & 0x08080808u) | (sign_odd & 0x80808080u);
}

// Any FP32 number, finite or not, by the definition: for blocks that the functions above do not take.
template <int kCount = 8>
__device__ __forceinline__ uint32_t encode_e2m1_any(const float* x, float multiplier,
                                                    const uint32_t* random) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float y = mul_rn(x[i], multiplier);
    const uint32_t code =
        random ? float_to_e2m1_stochastic(y, (random[i / 4] >> (8 * (i % 4))) & 0xFFu) : float_to_e2m1(y);
    word |= code << (4 * i);
  }
  return word;
}

// ---- decoding ---------------------------------------------------------------------------------------------

__device__ __forceinline__ __nv_bfloat162 bf162_of(uint32_t u) {
  return *reinterpret_cast<const __nv_bfloat162*>(&u);
}
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 b) {
  return *reinterpret_cast<const uint32_t*>(&b);
}

// Codes in the upper byte of each half (the other bytes do not matter), those in its high or low nibbles, to
// BF16 values times 2^-126: exponent and mantissa go below BF16's lowest exponent bits, codes 0 and 1 become
// subnormal numbers.
__device__ __forceinline__ uint32_t tiny_of_high(uint32_t w) {
  return (w & 0x80008000u) | ((w >> 6) & 0x01C001C0u);
}

// Eight codes times a unit (BF16 in both halves, not NaN) to eight BF16 numbers; exact.
__device__ __forceinline__ void decode_e2m1x8_bf16(uint32_t codes, uint32_t unit, uint32_t* out) {
  const uint32_t even =
      codes << 4;  // now every code's sign is the top bit of a byte, in one word or the other
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t w =
        pick_bytes(even, codes, 0x4000u + 0x1010u * static_cast<uint32_t>(i));  // codes 2i and 2i + 1
    out[i] = bits_of(__hmul2(__hmul2(bf162_of(tiny_of_high(w)), bf162_of(0x7E807E80u)), bf162_of(unit)));
  }
}

// E4M3 bytes of value * 2^-6 of the codes in the low nibbles.
__device__ __forceinline__ uint32_t e2m1_low_to_e4m3(uint32_t codes) {
  return ((codes << 4) & 0x80808080u) | ((codes << 2) & 0x1C1C1C1Cu);
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_E2M1_CUH_
