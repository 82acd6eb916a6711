// Rows to tokens: the 16 bytes of one store, 8 elements of BF16 or FP16, 4 of FP32.
#ifndef NVTE_EP_DEVICE_DECODE_CUH_
#define NVTE_EP_DEVICE_DECODE_CUH_

#include <cstdint>
#include <type_traits>

#include "device/e2m1.cuh"
#include "device/memory.cuh"
#include "device/tokens.cuh"
#include "formats/bf16.h"
#include "formats/mxfp8.h"
#include "formats/nvfp4.h"

namespace nvte_ep::device {

template <typename Token>
constexpr int kElements = 16 / Token::kBytes;

// FP32 numbers, NaN canonical or not, to the 16 bytes of a store.
template <typename Token>
__device__ __forceinline__ uint4 pack_tokens(const float* x) {
  if constexpr (std::is_same_v<Token, Bf16Token>) {
    return make_uint4(floats_to_bf16x2(x[0], x[1]), floats_to_bf16x2(x[2], x[3]),
                      floats_to_bf16x2(x[4], x[5]), floats_to_bf16x2(x[6], x[7]));
  } else if constexpr (std::is_same_v<Token, Fp16Token>) {
    return make_uint4(floats_to_fp16x2(x[0], x[1]), floats_to_fp16x2(x[2], x[3]),
                      floats_to_fp16x2(x[4], x[5]), floats_to_fp16x2(x[6], x[7]));
  } else {
    return make_uint4(float_bits(canonical_nan(x[0])), float_bits(canonical_nan(x[1])),
                      float_bits(canonical_nan(x[2])), float_bits(canonical_nan(x[3])));
  }
}

// A chunk of a row, before it is decoded and decoded: the elements of one store.
template <typename Format, typename Token>
struct Chunk;

template <typename Token>
struct Chunk<Nvfp4, Token> {
  uint32_t codes;
  uint32_t scale;

  __device__ __forceinline__ void load(const uint8_t* payload, const uint8_t* scales, int chunk,
                                       int alignment) {
    codes = Token::kBytes == 4 ? load2(payload + chunk * int64_t{2}, alignment)
                               : load4(payload + chunk * int64_t{4}, alignment);
    scale = scales[chunk / (Nvfp4::kBlock / kElements<Token>)];
  }
  // Exact in BF16, or NaN: then the result is true.
  __device__ __forceinline__ bool decode_bf16(float token_scale, uint32_t* pairs) const {
    const float unit = mul_rn(fast_e4m3_to_float(scale & 0x7Fu), token_scale);
    const uint32_t u = float_bits(unit) >> 16;
    decode_e2m1x8_bf16(codes, u | (u << 16), pairs);
    return is_nan(unit);
  }
  __device__ __forceinline__ uint4 tokens(float token_scale) const {
    uint32_t p[4];
    const bool nan = decode_bf16(token_scale, p);
    if constexpr (std::is_same_v<Token, Bf16Token>) {
      return nan ? make_uint4(0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u)
                 : make_uint4(p[0], p[1], p[2], p[3]);
    } else if constexpr (std::is_same_v<Token, Fp16Token>) {
      if (nan) return make_uint4(0x7E007E00u, 0x7E007E00u, 0x7E007E00u, 0x7E007E00u);
      uint32_t h[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) h[i] = bits_of(__floats2half2_rn(Bf16Token::lo(p[i]), Bf16Token::hi(p[i])));
      return make_uint4(h[0], h[1], h[2], h[3]);
    } else {
      if (nan) return make_uint4(kNanBits, kNanBits, kNanBits, kNanBits);
      return make_uint4(p[0] << 16, p[0] & 0xFFFF0000u, p[1] << 16, p[1] & 0xFFFF0000u);
    }
  }
  __device__ __forceinline__ void values(float token_scale, float* x) const {
    uint32_t p[4];
    const bool nan = decode_bf16(token_scale, p);
#pragma unroll
    for (int i = 0; i < kElements<Token>; ++i) {
      x[i] = nan ? bits_float(kNanBits) : (i % 2 ? Bf16Token::hi(p[i / 2]) : Bf16Token::lo(p[i / 2]));
    }
  }
};

template <typename Token>
struct Chunk<Mxfp8, Token> {
  uint2 codes;
  uint32_t scale;

  __device__ __forceinline__ void load(const uint8_t* payload, const uint8_t* scales, int chunk,
                                       int alignment) {
    codes = Token::kBytes == 4 ? make_uint2(load4(payload + chunk * int64_t{4}, alignment), 0)
                               : load8(payload + chunk * int64_t{8}, alignment);
    scale = scales[chunk / (Mxfp8::kBlock / kElements<Token>)];
  }
  __device__ __forceinline__ void values(float, float* x) const {
    const float s = e8m0_to_float(static_cast<uint8_t>(scale));
    const uint32_t pair[4] = {codes.x & 0xFFFFu, codes.x >> 16, codes.y & 0xFFFFu, codes.y >> 16};
#pragma unroll
    for (int i = 0; i < kElements<Token> / 2; ++i) {
      const float2 f = e4m3x2_to_floats(pair[i]);
      x[2 * i] = mul_rn(s, f.x);
      x[2 * i + 1] = mul_rn(s, f.y);
    }
  }
  __device__ __forceinline__ uint4 tokens(float) const {
    float x[kElements<Token>];
    values(0.0f, x);
    // 0x7F and 0xFF are the NaNs; only then are results looked at one by one.
    const uint32_t nan =
        (((codes.x & 0x7F7F7F7Fu) + 0x01010101u) | ((codes.y & 0x7F7F7F7Fu) + 0x01010101u)) & 0x80808080u;
    if (nan != 0 || scale == 0xFFu || Token::kBytes == 4) return pack_tokens<Token>(x);
    uint32_t h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      h[i] = std::is_same_v<Token, Bf16Token> ? bits_of(__floats2bfloat162_rn(x[2 * i], x[2 * i + 1]))
                                              : bits_of(__floats2half2_rn(x[2 * i], x[2 * i + 1]));
    }
    return make_uint4(h[0], h[1], h[2], h[3]);
  }
};

template <typename Token>
struct Chunk<Bf16, Token> {
  uint4 pairs;

  __device__ __forceinline__ void load(const uint8_t* payload, const uint8_t*, int chunk, int alignment) {
    if constexpr (Token::kBytes == 4) {
      const uint2 half = load8(payload + chunk * int64_t{8}, alignment);
      pairs = make_uint4(half.x, half.y, 0, 0);
    } else {
      pairs = load16(payload + chunk * int64_t{16}, alignment);
    }
  }
  __device__ __forceinline__ void values(float, float* x) const {
    const uint32_t p[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < kElements<Token>; ++i)
      x[i] = i % 2 ? Bf16Token::hi(p[i / 2]) : Bf16Token::lo(p[i / 2]);
  }
  __device__ __forceinline__ uint4 tokens(float) const {
    if constexpr (std::is_same_v<Token, Bf16Token>) {
      return pairs;  // the bytes, NaN payloads too
    } else {
      float x[kElements<Token>];
      values(0.0f, x);
      return pack_tokens<Token>(x);
    }
  }
};

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_DECODE_CUH_
