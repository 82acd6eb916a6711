// hadamard16 of formats/numerics.h for inputs that are an exact product: value[i] * unit[i], the quarter
// already in the unit.
#ifndef NVTE_EP_DEVICE_HADAMARD_CUH_
#define NVTE_EP_DEVICE_HADAMARD_CUH_

#include <cuda_bf16.h>

#include "device/e2m1.cuh"
#include "device/tokens.cuh"
#include "device/warp.cuh"
#include "formats/numerics.h"

namespace nvte_ep::device {

// The products are exact, so the first butterflies are fused multiply-adds of one rounding, as the
// definition's additions are; a power of two as a factor changes no rounding. Adding +0 in BF16 turns -0 into
// +0. A NaN reaches all 16 results.
__device__ __forceinline__ Block16<Bf16Token> hadamard16_of_products(const float* value, const float* unit) {
  float v[16];
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const float u = (kHadamardSigns >> i) & 1u ? -unit[i] : unit[i];
    const float w = (kHadamardSigns >> (i + 1)) & 1u ? -unit[i + 1] : unit[i + 1];
    const float b = mul_rn(value[i + 1], w);
    v[i] = __fmaf_rn(value[i], u, b);
    v[i + 1] = __fmaf_rn(value[i], u, -b);
  }
#pragma unroll
  for (int stride = 2; stride < 16; stride *= 2) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i & stride) continue;
      const float a = v[i];
      const float b = v[i + stride];
      v[i] = add_rn(a, b);
      v[i + stride] = add_rn(a, -b);
    }
  }
  Block16<Bf16Token> y;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    y.word[i] = bits_of(__hadd2_rn(__floats2bfloat162_rn(v[2 * i], v[2 * i + 1]), bf162_of(0u)));
  }
  return y;
}

// ---- on the tensor cores ----------------------------------------------------------------------------------
//
// Sixteen tokens by sixteen columns at a time: D = A B, with A [column, token] the values and B [token,
// result] the signs. A tensor core aligns the products to the largest and adds them with at least FP32's 24
// bits. Where every term is a multiple of 2^q and the sum of the magnitudes stays below 2^(q + 23), nothing
// is cut off, the sum is exact, and so is every sum of the definition's butterflies: the results are the same
// bits. Callers see to that.

// B of one lane: outputs 0 to 7 in tile 0, 8 to 15 in tile 1, each in the order 0, 2, 4, 6, 1, 3, 5, 7. Signs
// times 2^kSignExponent.
constexpr int kSignExponent = -99;
struct HadamardSigns {
  uint32_t tile[2][2];

  __device__ __forceinline__ HadamardSigns() {
    const int k = lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t output = static_cast<uint32_t>(lane_id() / 4 % 4 * 2 + lane_id() / 16 + 8 * i);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t token = static_cast<uint32_t>(k + 8 * j);
        tile[i][j] = one(token, output) | (one(token + 1, output) << 16);
      }
    }
  }

 private:
  static __device__ __forceinline__ uint32_t one(uint32_t token, uint32_t output) {
    const uint32_t negative =
        ((kHadamardSigns >> token) ^ static_cast<uint32_t>(__popc(token & output))) & 1u;
    return static_cast<uint32_t>(kSignExponent + 127) << 7 | (negative << 15);
  }
};

__device__ __forceinline__ float4 multiply_tile(const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  float4 d;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(d.x), "=f"(d.y), "=f"(d.z), "=f"(d.w)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
  return d;
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_HADAMARD_CUH_
