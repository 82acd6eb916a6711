// The elements of one 16-byte access as FP32 numbers, for sums.
#ifndef NVTE_EP_DEVICE_ELEMENTS_CUH_
#define NVTE_EP_DEVICE_ELEMENTS_CUH_

#include <cstdint>
#include <type_traits>

#include "device/memory.cuh"
#include "device/mxfp8_scale.cuh"
#include "device/tokens.cuh"
#include "device/warp.cuh"
#include "formats/mxfp8.h"

namespace nvte_ep::device {

template <typename Token>
struct Elements {  // the 16 bytes of one access
  static constexpr int kCount = 16 / Token::kBytes;
  float x[kCount];

  __device__ __forceinline__ void load(const uint8_t* from, int alignment) {
    unpack(load16(from, alignment));
  }
  __device__ __forceinline__ void unpack(uint4 v) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (Token::kBytes == 4) {
        x[i] = bits_float(w[i]);
      } else {
        x[i] = i % 2 ? Token::hi(w[i / 2]) : Token::lo(w[i / 2]);
      }
    }
  }
  __device__ __forceinline__ void store(uint8_t* to, int alignment) const {
    uint32_t w[4];
    if constexpr (Token::kBytes == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = float_bits(canonical_nan(x[i]));
    } else {
      float any = x[0];  // NaN where one of them is (or where there are infinities of both signs): rare
#pragma unroll
      for (int i = 1; i < kCount; ++i) any = add_rn(any, x[i]);
      if (is_nan(any)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[i] = std::is_same_v<Token, Bf16Token> ? floats_to_bf16x2(x[2 * i], x[2 * i + 1])
                                                  : floats_to_fp16x2(x[2 * i], x[2 * i + 1]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[i] = std::is_same_v<Token, Bf16Token> ? bits_of(__floats2bfloat162_rn(x[2 * i], x[2 * i + 1]))
                                                  : bits_of(__floats2half2_rn(x[2 * i], x[2 * i + 1]));
        }
      }
    }
    store16(to, make_uint4(w[0], w[1], w[2], w[3]), alignment);
  }
};

template <typename Token>
__device__ __forceinline__ void clear(Elements<Token>* e) {
#pragma unroll
  for (int i = 0; i < Elements<Token>::kCount; ++i) e->x[i] = 0.0f;
}

// A lane's elements in MXFP8; lanes that share a block of 32 have the same scale.
template <typename Token>
struct Mxfp8Elements {
  static constexpr int kCount = Elements<Token>::kCount;
  static constexpr int kWords = kCount / 4;
  uint32_t word[kWords];  // codes
  uint32_t scale;

  // All lanes of a block call.
  __device__ __forceinline__ void encode(const Elements<Token>& e) {
    constexpr int kLanes = Mxfp8::kBlock / kCount;
    const unsigned mine = ((1u << kLanes) - 1u) << (lane_id() / kLanes * kLanes);
    float amax = bits_float(kNanBits);  // fmaxf drops NaNs, unless there is nothing else
#pragma unroll
    for (int i = 0; i < kCount; ++i) amax = fmaxf(amax, fabsf(e.x[i]));
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) amax = fmaxf(amax, __shfl_xor_sync(mine, amax, d));
    scale = fast_mxfp8_scale(amax);
    const float multiplier = fast_e8m0_inverse(scale);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const float* x = e.x + 4 * w;
      word[w] = floats_to_e4m3x2(mul_rn(x[0], multiplier), mul_rn(x[1], multiplier)) |
                floats_to_e4m3x2(mul_rn(x[2], multiplier), mul_rn(x[3], multiplier)) << 16;
    }
  }
  // NaNs are any NaN.
  __device__ __forceinline__ Elements<Token> decode() const {
    const float unit = e8m0_to_float(static_cast<uint8_t>(scale));
    Elements<Token> e;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 pair = e4m3x2_to_floats(word[i / 2] >> (16 * (i % 2)) & 0xFFFFu);
      e.x[2 * i] = mul_rn(unit, pair.x);
      e.x[2 * i + 1] = mul_rn(unit, pair.y);
    }
    return e;
  }
};

// What a partial row becomes when it crosses in MXFP8.
template <typename Token>
__device__ __forceinline__ void round_to_mxfp8(Elements<Token>* e) {
  Mxfp8Elements<Token> rounded;
  rounded.encode(*e);
  *e = rounded.decode();
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_ELEMENTS_CUH_
