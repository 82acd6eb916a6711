// The elements of one 16-byte access as FP32 numbers, for sums.
#ifndef NVTE_EP_DEVICE_ELEMENTS_CUH_
#define NVTE_EP_DEVICE_ELEMENTS_CUH_

#include <cstdint>
#include <type_traits>

#include "device/memory.cuh"
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
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<Token, Bf16Token>) {
        w[i] = floats_to_bf16x2(x[2 * i], x[2 * i + 1]);
      } else if constexpr (std::is_same_v<Token, Fp16Token>) {
        w[i] = floats_to_fp16x2(x[2 * i], x[2 * i + 1]);
      } else {
        w[i] = float_bits(canonical_nan(x[i]));
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

// Codes and scale of MXFP8: lanes that share a block of 32 agree on its scale.
template <typename Token>
__device__ __forceinline__ void encode_mxfp8(const Elements<Token>& e, uint8_t* codes, uint8_t* scale) {
  constexpr int kLanes = Mxfp8::kBlock / Elements<Token>::kCount;
  const unsigned mine = ((1u << kLanes) - 1u) << (lane_id() / kLanes * kLanes);
  float amax = bits_float(kNanBits);  // fmaxf drops NaNs, unless there is nothing else
#pragma unroll
  for (int i = 0; i < Elements<Token>::kCount; ++i) amax = fmaxf(amax, fabsf(e.x[i]));
#pragma unroll
  for (int d = 1; d < kLanes; d *= 2) amax = fmaxf(amax, __shfl_xor_sync(mine, amax, d));
  *scale = Mxfp8::scale(amax);
  const float multiplier = e8m0_inverse(*scale);
#pragma unroll
  for (int i = 0; i < Elements<Token>::kCount; ++i) codes[i] = float_to_e4m3(mul_rn(e.x[i], multiplier));
}

// What a partial row becomes when it crosses in MXFP8.
template <typename Token>
__device__ __forceinline__ void round_to_mxfp8(Elements<Token>* e) {
  uint8_t codes[Elements<Token>::kCount];
  uint8_t scale;
  encode_mxfp8(*e, codes, &scale);
#pragma unroll
  for (int i = 0; i < Elements<Token>::kCount; ++i) e->x[i] = Mxfp8::decode(codes[i], scale);
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_ELEMENTS_CUH_
