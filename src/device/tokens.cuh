// Token elements of the three input types: sixteen of them in registers, their largest magnitude, their
// values.
#ifndef NVTE_EP_DEVICE_TOKENS_CUH_
#define NVTE_EP_DEVICE_TOKENS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/e2m1.cuh"
#include "device/e4m3.cuh"
#include "formats/numerics.h"

namespace nvte_ep::device {

// Two magnitudes at a time; a NaN is kept or dropped.
struct Bf16Token {
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float lo(uint32_t pair) { return bits_float(pair << 16); }
  static __device__ __forceinline__ float hi(uint32_t pair) { return bits_float(pair & 0xFFFF0000u); }
  static __device__ __forceinline__ uint32_t max_keeping_nan(uint32_t a, uint32_t b) {
    uint32_t m;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    return m;
  }
  static __device__ __forceinline__ uint32_t max_dropping_nan(uint32_t a, uint32_t b) {
    uint32_t m;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    return m;
  }
  // FP32 bits of a magnitude of 16 bits.
  static __device__ __forceinline__ uint32_t widen(uint32_t magnitude) { return magnitude << 16; }
};

struct Fp16Token {
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float lo(uint32_t pair) { return __low2float(half2_of(pair)); }
  static __device__ __forceinline__ float hi(uint32_t pair) { return __high2float(half2_of(pair)); }
  static __device__ __forceinline__ uint32_t max_keeping_nan(uint32_t a, uint32_t b) {
    uint32_t m;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    return m;
  }
  static __device__ __forceinline__ uint32_t max_dropping_nan(uint32_t a, uint32_t b) {
    uint32_t m;
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    return m;
  }
  static __device__ __forceinline__ uint32_t widen(uint32_t magnitude) { return float_bits(lo(magnitude)); }
};

struct Fp32Token {
  static constexpr int kBytes = 4;
};

// Sixteen elements as they lie in memory.
template <typename Token>
struct Block16 {
  static constexpr int kWords = 4 * Token::kBytes;
  uint32_t word[kWords];

  __device__ __forceinline__ float value(int i) const {
    if constexpr (Token::kBytes == 4) {
      return bits_float(word[i]);
    } else {
      return i % 2 ? Token::hi(word[i / 2]) : Token::lo(word[i / 2]);
    }
  }

  // The largest magnitude as it can be had at little cost; combine() makes one of two, largest_of() FP32 bits,
  // above infinity's if there is a NaN.
  __device__ __forceinline__ uint32_t partial_largest() const {
    uint32_t m = word[0];
    if constexpr (Token::kBytes == 4) m &= 0x7FFFFFFFu;
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
      m = combine(m, Token::kBytes == 4 ? word[i] & 0x7FFFFFFFu : word[i]);
    }
    return m;
  }
  static __device__ __forceinline__ uint32_t combine(uint32_t a, uint32_t b) {
    if constexpr (Token::kBytes == 4) {
      return max(a, b);
    } else {
      return Token::max_keeping_nan(a, b);
    }
  }
  static __device__ __forceinline__ uint32_t largest_of(uint32_t partial) {
    if constexpr (Token::kBytes == 4) {
      return partial;
    } else {
      return Token::widen(combine(partial, (partial >> 16) | (partial << 16)) & 0x7FFFu);
    }
  }
  __device__ __forceinline__ uint32_t largest() const { return largest_of(partial_largest()); }

  // FP32 bits of the largest magnitude that is not NaN; NaN if all are.
  __device__ __forceinline__ uint32_t largest_number() const {
    if constexpr (Token::kBytes == 4) {
      float m = bits_float(word[0]);
#pragma unroll
      for (int i = 1; i < 16; ++i) m = fmaxf(fabsf(m), fabsf(bits_float(word[i])));
      return float_bits(m) & 0x7FFFFFFFu;
    } else {
      uint32_t m = word[0];
#pragma unroll
      for (int i = 1; i < 8; ++i) m = Token::max_dropping_nan(m, word[i]);
      m = Token::max_dropping_nan(m, (m >> 16) | (m << 16));
      return Token::widen(m & 0x7FFFu);
    }
  }
};

// ---- results ----------------------------------------------------------------------------------------------

// Two FP32 numbers to a pair of BF16 or FP16, NaN canonical as in formats/numerics.h.
__device__ __forceinline__ uint32_t floats_to_bf16x2(float lo, float hi) {
  const uint32_t pair = bits_of(__floats2bfloat162_rn(lo, hi));
  const uint32_t a = is_nan(lo) ? (pair & 0xFFFF0000u) | 0x7FC0u : pair;
  return is_nan(hi) ? (a & 0xFFFFu) | 0x7FC00000u : a;
}
__device__ __forceinline__ uint32_t floats_to_fp16x2(float lo, float hi) {
  const uint32_t pair = bits_of(__floats2half2_rn(lo, hi));
  const uint32_t a = is_nan(lo) ? (pair & 0xFFFF0000u) | 0x7E00u : pair;
  return is_nan(hi) ? (a & 0xFFFFu) | 0x7E000000u : a;
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_TOKENS_CUH_
