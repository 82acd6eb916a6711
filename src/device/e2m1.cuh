// E2M1 codes, eight at a time in one word (element i in nibble i): the bytes of formats/numerics.h with few instructions.
//
// Numbers reach the E2M1 grid by adding and subtracting 1.5 * 2^s * p, where p is the number's power of two, at least 1: the
// sum's last place is the grid's step, so the addition rounds to nearest even once. On the grid a number is exact in E4M3,
// and scaled by 2^-6 its E4M3 code is (sign, 0, 0, E2M1 exponent and mantissa, 0, 0): E4M3's hardware conversion packs it.
#ifndef NVTE_EP_DEVICE_E2M1_CUH_
#define NVTE_EP_DEVICE_E2M1_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/e4m3.cuh"
#include "formats/numerics.h"

// The sm_100 family converts to E2M1 in hardware: nearest even, saturating at 6, NaN to +6, the sign of zero kept.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000 && __CUDA_ARCH_FAMILY_SPECIFIC__ < 1100
#define NVTE_EP_HARDWARE_E2M1 1
#endif
#endif

namespace nvte_ep::device {

constexpr float kGridScale = 0.015625f;  // 2^-6

__device__ __forceinline__ uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}
// (a & mask) | (b & ~mask)
__device__ __forceinline__ uint32_t blend(uint32_t a, uint32_t b, uint32_t mask) { return (a & mask) | (b & ~mask); }

// E4M3 bytes of elements 0, 2, 4, 6 and 1, 3, 5, 7, on the grid and scaled, to nibbles.
__device__ __forceinline__ uint32_t nibbles_from_grid(uint32_t even, uint32_t odd) {
  const uint32_t low = blend(even >> 2, even >> 4, 0x07070707u);
  const uint32_t high = blend(odd << 2, odd, 0x70707070u);
  return blend(low, high, 0x0F0F0F0Fu);
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

// A scaled number below 7 * 2^-6 to the grid.
__device__ __forceinline__ float to_grid(float y) {
  const float p = fmaxf(bits_float(float_bits(y) & 0x7F800000u), kGridScale);
  const float v = __fmaf_rn(p, -6291456.0f, __fmaf_rn(p, 6291456.0f, y));  // 1.5 * 2^22
  return bits_float(float_bits(v) | (float_bits(y) & 0x80000000u));        // -0 stays -0
}
__device__ __forceinline__ uint32_t to_grid_half2(uint32_t y) {
  const __half2 p = __hmax2(half2_of(y & 0x7C007C00u), half2_of(0x24002400u));              // 2^-6
  const __half2 t = __hfma2(p, half2_of(0x62006200u), half2_of(y));                           // 1.5 * 2^9
  return bits_of(__hfma2(p, half2_of(0xE200E200u), t)) | (y & 0x80008000u);
}

// x[i] * multiplier to nearest, exact for every FP32 x; the products are below 7.
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
  return nibbles_from_grid(floats_to_e4m3x2(v[0], v[2]) | (floats_to_e4m3x2(v[4], v[6]) << 16),
                           floats_to_e4m3x2(v[1], v[3]) | (floats_to_e4m3x2(v[5], v[7]) << 16));
#endif
}

// The same for BF16 x, two elements an instruction in FP16. A BF16 number has 8 significant bits and a block scale 4, so a
// product that is not halfway between two codes is at least 2^-9 away from there, relatively: FP16's 11 bits decide right. The
// FP32 product of the definition is exactly halfway where the quotient is, but for one significand of the scale: with
// 1.875 it comes out a last place above at 1.25, 2.5 and 5, and is rounded up. Nudging the multiplier by 0.9 * 2^-11 does
// the same to those three and, staying below half of FP16's last place there, to no other. (All cases: tests/cuda.)
__device__ __forceinline__ float nudged_multiplier(float multiplier, uint32_t scale_code) {
  const bool nudge = (scale_code & 7u) == 7u && scale_code > 7u;
  return mul_rn(multiplier, nudge ? kGridScale * (1.0f + 0.9f / 2048.0f) : kGridScale);
}
__device__ __forceinline__ uint32_t product_half2(float lo, float hi, float multiplier) {
  return bits_of(__floats2half2_rn(mul_rn(lo, multiplier), mul_rn(hi, multiplier)));
}
__device__ __forceinline__ uint32_t encode_bf16_e2m1x8(const uint32_t* x, float nudged) {
  uint32_t even[2], odd[2];  // (0, 2), (4, 6) and (1, 3), (5, 7)
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t a = x[2 * i], b = x[2 * i + 1];
    even[i] = to_grid_half2(product_half2(bits_float(a << 16), bits_float(b << 16), nudged));
    odd[i] = to_grid_half2(product_half2(bits_float(a & 0xFFFF0000u), bits_float(b & 0xFFFF0000u), nudged));
  }
  return nibbles_from_grid(halves_to_e4m3x2(even[0]) | (halves_to_e4m3x2(even[1]) << 16),
                           halves_to_e4m3x2(odd[0]) | (halves_to_e4m3x2(odd[1]) << 16));
}

// Stochastic rounding of x[i] * multiplier for x with at most 11 significant bits (BF16, FP16); the products are below 7.
// Scaled by 2^-126, codes 0 and 1 are FP32's subnormal numbers and the bits of a number, cut to one mantissa bit, are its
// code; adding the random byte below that place carries into the code exactly as the definition's addition does. (A sum that
// FP32 rounds up to the next code would need a number with more bits.)
__device__ __forceinline__ uint32_t encode_e2m1x8_stochastic(const float* x, float multiplier, const uint32_t* random) {
  constexpr float kToBits = 1.1754943508222875e-38f;     // 2^-126
  constexpr float kLargest = 6.0f * 1.1754943508222875e-38f;
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float z = fminf(mul_rn(mul_rn(fabsf(x[i]), multiplier), kToBits), kLargest);
    w[i] = float_bits(z) * 4u + pick_bytes(random[i / 4], 0, 0x4044u | (static_cast<uint32_t>(i % 4) << 8));
  }
  const auto top_bytes = [](uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return pick_bytes(pick_bytes(a, b, 0x0073), pick_bytes(c, d, 0x0073), 0x5410);
  };
  const uint32_t even = top_bytes(w[0], w[2], w[4], w[6]);
  const uint32_t odd = top_bytes(w[1], w[3], w[5], w[7]);
  const uint32_t sign_even = top_bytes(float_bits(x[0]), float_bits(x[2]), float_bits(x[4]), float_bits(x[6]));
  const uint32_t sign_odd = top_bytes(float_bits(x[1]), float_bits(x[3]), float_bits(x[5]), float_bits(x[7]));
  return (even + odd * 16u) | ((sign_even >> 4) & 0x08080808u) | (sign_odd & 0x80808080u);
}

// Any FP32 number, finite or not, by the definition: for blocks that the functions above do not take.
__device__ __forceinline__ uint32_t encode_e2m1x8_any(const float* x, float multiplier, const uint32_t* random) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float y = mul_rn(x[i], multiplier);
    const uint32_t code = random ? float_to_e2m1_stochastic(y, (random[i / 4] >> (8 * (i % 4))) & 0xFFu)
                                 : float_to_e2m1(y);
    word |= code << (4 * i);
  }
  return word;
}

// ---- decoding -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ __nv_bfloat162 bf162_of(uint32_t u) { return *reinterpret_cast<const __nv_bfloat162*>(&u); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 b) { return *reinterpret_cast<const uint32_t*>(&b); }

// Eight codes times a unit (BF16 in both halves, not NaN) to eight BF16 numbers; exact.
__device__ __forceinline__ void decode_e2m1x8_bf16(uint32_t codes, uint32_t unit, uint32_t* out) {
  const uint32_t even = codes << 4;  // now every code's sign is the top bit of a byte, in one word or the other
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t w = pick_bytes(even, codes, 0x4000u + 0x1010u * static_cast<uint32_t>(i));  // codes 2i and 2i + 1
    // Sign, and exponent and mantissa below BF16's lowest exponent bits: the value times 2^-126, subnormals included.
    const uint32_t tiny = (w & 0x80008000u) | ((w >> 6) & 0x01C001C0u);
    out[i] = bits_of(__hmul2(__hmul2(bf162_of(tiny), bf162_of(0x7E807E80u)), bf162_of(unit)));
  }
}

// E4M3 bytes of value * 2^-6 of the codes in the low nibbles.
__device__ __forceinline__ uint32_t e2m1_low_to_e4m3(uint32_t codes) {
  return ((codes << 4) & 0x80808080u) | ((codes << 2) & 0x1C1C1C1Cu);
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_E2M1_CUH_
