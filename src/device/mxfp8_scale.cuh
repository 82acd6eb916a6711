// Scales of MXFP8 with few instructions: the bytes of formats/numerics.h.
#ifndef NVTE_EP_DEVICE_MXFP8_SCALE_CUH_
#define NVTE_EP_DEVICE_MXFP8_SCALE_CUH_

#include <cstdint>

#include "formats/numerics.h"

namespace nvte_ep::device {

// Mxfp8::scale of a magnitude (NaN: of all 32), and what elements are multiplied by under it: any finite number
// where there is nothing but NaN, whose code does not depend on it.
__device__ __forceinline__ uint32_t fast_mxfp8_scale(float amax) {
  const uint32_t s = float_bits(mul_rn(fabsf(amax), 1.0f / 448.0f));
  const uint32_t up = min((s + 0x7FFFFFu) >> 23, 0xFEu);
  return s > 0x7F800000u ? 0xFFu : (s <= 0x400000u ? 0u : up);
}
__device__ __forceinline__ float fast_e8m0_inverse(uint32_t code) {
  return bits_float(static_cast<uint32_t>(max(0x7F000000 - static_cast<int>(code << 23), 0x00400000)));
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_MXFP8_SCALE_CUH_
