// The encoder of columnwise codes: every number under every block scale.
#include <vector>

#include "device/nvfp4_block.cuh"
#include "mirror.h"

namespace nvte_ep::testing {
namespace {

// As receive_columns has them.
constexpr int kSecondLevel = -109;
constexpr uint32_t kNumbers = 0x1000;  // BF16 bits below 2^-96

// Codes of number i, and of its negative, under a block scale: in every place of the eight, with other numbers beside it.
__global__ void encode(uint32_t scale, uint8_t* codes) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const float multiplier = device::SecondLevel(kSecondLevel, false).multiplier(scale);
  const device::TinyMultiplier m = device::tiny_multiplier(multiplier * exp2_int(-112), scale);
  // Places 0, 2, 4, 6, 1, 3, 5, 7.
  const uint32_t minus = i | 0x8000u, other = i * 29 % (i + 1) | 0x8000u;
  const uint32_t first[4] = {i | minus << 16, minus | i << 16, other | i << 16, minus | other << 16};
  const uint32_t second[4] = {minus | i << 16, i | minus << 16, i | other << 16, other | minus << 16};
  const uint32_t a = device::encode_tiny_e2m1x8(first, m), b = device::encode_tiny_e2m1x8(second, m);
  const auto nibble = [](uint32_t word, int place) { return word >> (4 * place) & 15u; };
  const uint32_t plus[] = {nibble(a, 0), nibble(a, 6), nibble(a, 3),
                           nibble(b, 2), nibble(b, 4), nibble(b, 1)};
  const uint32_t less[] = {nibble(a, 2), nibble(a, 4), nibble(a, 5),
                           nibble(b, 0), nibble(b, 6), nibble(b, 7)};
  bool same = true;
  for (int p = 1; p < 6; ++p) same &= plus[p] == plus[0] && less[p] == less[0];
  codes[i] = same ? static_cast<uint8_t>(plus[0] | less[0] << 4) : 0xFFu;
}

class ColumnCodes : public CudaTest {};

TEST_F(ColumnCodes, EveryNumberUnderEveryScale) {
  uint8_t* codes = nullptr;
  ASSERT_CUDA(cudaMalloc(reinterpret_cast<void**>(&codes), kNumbers));
  std::vector<uint8_t> got(kNumbers);
  int64_t checked = 0;
  for (uint32_t scale = 1; scale < 0x7F; ++scale) {
    encode<<<kNumbers / 256, 256>>>(scale, codes);
    ASSERT_CUDA(cudaMemcpy(got.data(), codes, kNumbers, cudaMemcpyDeviceToHost));
    const float b = e4m3_to_float(static_cast<uint8_t>(scale));
    const float multiplier = 1.0f / (b * exp2_int(kSecondLevel));
    for (uint32_t i = 0; i < kNumbers; ++i) {
      const float product = mul_rn(bits_float(i << 16), multiplier);
      if (!(product < device::kFastLimit)) continue;
      const uint32_t code = float_to_e2m1(product);
      ASSERT_EQ(got[i], code | (code | 8u) << 4) << "scale " << scale << ", number " << i;
      ++checked;
    }
  }
  EXPECT_EQ(checked, 348196);
  ASSERT_CUDA(cudaFree(codes));
}

}  // namespace
}  // namespace nvte_ep::testing
