// Hardware conversions of E4M3 (sm_89 and later), two at a time. They give the bytes of formats/numerics.h:
// nearest even, saturating at 448, NaN to 0x7F.
#ifndef NVTE_EP_DEVICE_E4M3_CUH_
#define NVTE_EP_DEVICE_E4M3_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "formats/numerics.h"

namespace nvte_ep::device {

__device__ __forceinline__ uint32_t bits_of(__half2 h) { return *reinterpret_cast<const uint32_t*>(&h); }
__device__ __forceinline__ __half2 half2_of(uint32_t u) { return *reinterpret_cast<const __half2*>(&u); }

// Two codes in the low 16 bits, lo first.
__device__ __forceinline__ uint32_t floats_to_e4m3x2(float lo, float hi) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));
  return codes;
}
__device__ __forceinline__ uint32_t halves_to_e4m3x2(uint32_t halves) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes) : "r"(halves));
  return codes;
}
__device__ __forceinline__ uint32_t e4m3x2_to_halves(uint32_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  return halves;
}
// The two codes in the low 16 bits of a word.
__device__ __forceinline__ float2 e4m3x2_to_floats(uint32_t codes) {
  return __half22float2(half2_of(e4m3x2_to_halves(codes)));
}
__device__ __forceinline__ float fast_e4m3_to_float(uint32_t code) { return e4m3x2_to_floats(code).x; }

// float_to_e4m3 and float_to_e4m3_up of a number that is not negative and not NaN.
__device__ __forceinline__ uint32_t fast_float_to_e4m3(float x, bool up) {
  const uint32_t code = floats_to_e4m3x2(x, 0.0f);
  return up && code < 0x7Eu && fast_e4m3_to_float(code) < x ? code + 1 : code;
}

// Four codes (signs dropped) times 2^-shift, 0 <= shift <= 24, each rounded once: a product that FP16 rounds
// is below 2^-14, and becomes 0 either way.
__device__ __forceinline__ uint32_t e4m3x4_scale_down(uint32_t codes, uint32_t two_to_minus_shift) {
  codes &= 0x7F7F7F7Fu;
  const __half2 factor = half2_of(two_to_minus_shift);
  const uint32_t lo = bits_of(__hmul2(half2_of(e4m3x2_to_halves(codes & 0xFFFFu)), factor));
  const uint32_t hi = bits_of(__hmul2(half2_of(e4m3x2_to_halves(codes >> 16)), factor));
  return halves_to_e4m3x2(lo) | (halves_to_e4m3x2(hi) << 16);
}

// FP16 bits of 2^-shift in both halves, 0 <= shift <= 24.
__device__ __forceinline__ uint32_t half_exp2_down(int shift) {
  const uint32_t h = shift < 15 ? static_cast<uint32_t>(15 - shift) << 10 : 0x400u >> (shift - 14);
  return h | (h << 16);
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_E4M3_CUH_
