// hadamard16 of formats/numerics.h for inputs that are an exact product: value[i] * unit[i], the quarter already in the unit.
#ifndef NVTE_EP_DEVICE_HADAMARD_CUH_
#define NVTE_EP_DEVICE_HADAMARD_CUH_

#include <cuda_bf16.h>

#include "device/e2m1.cuh"
#include "device/tokens.cuh"
#include "formats/numerics.h"

namespace nvte_ep::device {

// The products are exact, so the first butterflies are fused multiply-adds of one rounding, as the definition's additions are;
// a power of two as a factor changes no rounding. Adding +0 in BF16 turns -0 into +0. A NaN reaches all 16 results.
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

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_HADAMARD_CUH_
