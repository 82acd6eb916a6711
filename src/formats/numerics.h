// Scalar arithmetic of the wire formats, bit-exact on host and device.
//
// Everything here is IEEE FP32 with round to nearest even, one rounding per written operation; no contraction, no
// flushing of subnormals. NaN results are the quiet NaN with a zero payload, so that every byte is defined.
#ifndef NVTE_EP_FORMATS_NUMERICS_H_
#define NVTE_EP_FORMATS_NUMERICS_H_

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define NVTE_EP_HD __host__ __device__ __forceinline__
#else
#define NVTE_EP_HD inline
#endif

namespace nvte_ep {

constexpr uint32_t kNanBits = 0x7FC00000u;
constexpr float kFloatMax = 3.402823466e+38f;

NVTE_EP_HD uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof(u));
  return u;
}
NVTE_EP_HD float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof(x));
  return x;
}

// Single-rounded operations that neither the device compiler nor -ffast-math habits of a build may contract.
NVTE_EP_HD float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
NVTE_EP_HD float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
NVTE_EP_HD float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

NVTE_EP_HD bool is_nan(float x) { return (float_bits(x) & 0x7FFFFFFFu) > 0x7F800000u; }
NVTE_EP_HD bool is_finite(float x) { return (float_bits(x) & 0x7F800000u) != 0x7F800000u; }
NVTE_EP_HD float abs_float(float x) { return bits_float(float_bits(x) & 0x7FFFFFFFu); }
NVTE_EP_HD float canonical_nan(float x) { return is_nan(x) ? bits_float(kNanBits) : x; }

// 2^k for k in [-126, 127].
NVTE_EP_HD float exp2_int(int k) { return bits_float(static_cast<uint32_t>(k + 127) << 23); }

// ---- BF16 and FP16 ---------------------------------------------------------------------------------------------------

NVTE_EP_HD float bf16_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }
NVTE_EP_HD uint16_t float_to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if (is_nan(x)) return 0x7FC0;
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

NVTE_EP_HD float fp16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1Fu;
  const uint32_t mantissa = h & 0x3FFu;
  if (exponent == 0x1Fu) return bits_float(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  // Subnormal: mantissa * 2^-24, exact.
  return bits_float(sign | float_bits(static_cast<float>(mantissa) * 5.9604644775390625e-8f));
}
NVTE_EP_HD uint16_t float_to_fp16(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return 0x7E00;
  if (a >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to 65536 or more
  if (a >= 0x38800000u) {                                              // normal, 2^-14 and more
    return static_cast<uint16_t>(sign | ((a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13));
  }
  // Subnormal: an integer multiple of 2^-24; adding 0.5 puts the last kept bit at FP32's last place.
  return static_cast<uint16_t>(sign | (float_bits(add_rn(bits_float(a), 0.5f)) - 0x3F000000u));
}

// ---- E4M3 (finite-only: max 448, NaN 0x7F) -----------------------------------------------------------------------------

NVTE_EP_HD float e4m3_to_float(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7Fu;
  if (magnitude == 0x7Fu) return bits_float(kNanBits);
  if (magnitude >= 8u) return bits_float(sign | ((magnitude + (120u << 3)) << 20));
  return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0.001953125f));  // multiples of 2^-9
}

// To nearest even, saturating at 448; NaN to 0x7F (its sign is dropped).
NVTE_EP_HD uint8_t float_to_e4m3(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 24) & 0x80u;
  const uint32_t a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return 0x7F;
  if (a >= 0x43E80000u) return static_cast<uint8_t>(sign | 0x7Eu);  // 464 and more
  uint32_t code;
  if (a >= 0x3C800000u) {  // normal, 2^-6 and more
    code = ((a + 0x7FFFFu + ((a >> 20) & 1u)) >> 20) - (120u << 3);
  } else {  // multiples of 2^-9: adding 2^14 puts the last kept bit at FP32's last place
    code = float_bits(add_rn(bits_float(a), 16384.0f)) - 0x46800000u;
  }
  code = code > 0x7Eu ? 0x7Eu : code;
  return static_cast<uint8_t>(sign | code);
}

// Non-negative x towards +infinity, saturating at 448; NaN to 0x7F.
NVTE_EP_HD uint8_t float_to_e4m3_up(float x) {
  const uint8_t code = float_to_e4m3(x);
  return (code < 0x7Eu && e4m3_to_float(code) < x) ? static_cast<uint8_t>(code + 1) : code;
}

// Non-negative code times 2^-d (d may be negative: saturates at 448), to nearest even.
NVTE_EP_HD uint8_t e4m3_scale_exponent(uint8_t code, int d) {
  const int shift = d > 24 ? 24 : (d < -24 ? -24 : d);  // beyond 2^24 everything is 0 or saturated
  return float_to_e4m3(mul_rn(e4m3_to_float(code), exp2_int(-shift)));
}

// ---- E8M0 --------------------------------------------------------------------------------------------------------------

NVTE_EP_HD float e8m0_to_float(uint8_t code) {
  if (code == 0xFFu) return bits_float(kNanBits);
  return bits_float(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}
// 2^(127 - code): what elements are multiplied by.
NVTE_EP_HD float e8m0_inverse(uint8_t code) {
  if (code == 0xFFu) return bits_float(kNanBits);
  return bits_float(code == 0xFEu ? 0x00400000u : static_cast<uint32_t>(254u - code) << 23);
}
// Smallest power of two >= x (x >= 0), clamped to 2^[-127, 127]; NaN to 0xFF.
NVTE_EP_HD uint8_t float_to_e8m0_up(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return 0xFF;
  if (u == 0x7F800000u) return 0xFE;
  const uint32_t exponent = u >> 23;
  const uint32_t mantissa = u & 0x7FFFFFu;
  const bool up = mantissa > 0 && exponent != 0xFEu && !(exponent == 0 && mantissa <= 0x400000u);
  return static_cast<uint8_t>(exponent + (up ? 1u : 0u));
}

// ---- E2M1 (0, .5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign) ------------------------------------------------------------------

NVTE_EP_HD float e2m1_to_float(uint32_t code) {
  const uint32_t sign = (code & 8u) << 28;
  const uint32_t magnitude = code & 7u;
  if (magnitude < 2u) return bits_float(sign | (magnitude ? 0x3F000000u : 0u));
  return bits_float(sign | (((magnitude >> 1) + 126u) << 23) | ((magnitude & 1u) << 22));
}

// To nearest even, saturating at 6; NaN to +6.
NVTE_EP_HD uint32_t float_to_e2m1(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return 7u;
  uint32_t code;
  if (a >= 0x3F800000u) {  // 1 and more: one mantissa bit
    code = ((a + 0x1FFFFFu + ((a >> 22) & 1u)) >> 22) - 0xFEu + 2u;
  } else {  // multiples of 0.5: adding 2^22 puts the last kept bit at FP32's last place
    code = float_bits(add_rn(bits_float(a), 4194304.0f)) - 0x4A800000u;
  }
  code = code > 7u ? 7u : code;
  return code | ((u >> 28) & 8u);
}

// Stochastic rounding with one random byte r: |x| + (r/256) * step(|x|), cut down to the grid; NaN to +6.
NVTE_EP_HD uint32_t float_to_e2m1_stochastic(float x, uint32_t random_byte) {
  const float a = abs_float(x);
  if (is_nan(x)) return 7u;
  const float step = a < 2.0f ? 0.5f : (a < 4.0f ? 1.0f : 2.0f);
  // The product is exact, so this is the fused multiply-add of the rule.
  const float t = add_rn(mul_rn(static_cast<float>(random_byte) * 0.00390625f, step), a);
  uint32_t code;
  if (t >= 1.0f) {
    code = (float_bits(t) >> 22) - 0xFEu + 2u;
    code = code > 7u ? 7u : code;
  } else {
    code = t >= 0.5f ? 1u : 0u;
  }
  return code | ((float_bits(x) >> 28) & 8u);
}

// ---- Philox4x32-10 (Salmon et al., SC 2011) --------------------------------------------------------------------------------

struct Philox4 {
  uint32_t word[4];
  // Byte i, little endian across the words.
  NVTE_EP_HD uint32_t byte(int i) const { return (word[i >> 2] >> (8 * (i & 3))) & 0xFFu; }
};

// Both halves of a product.
NVTE_EP_HD void mul_wide(uint32_t a, uint32_t b, uint32_t* low, uint32_t* high) {
#if defined(__CUDA_ARCH__)  // written out, the compiler adds a zero to every upper half
  asm("{\n\t.reg .b64 p;\n\tmul.wide.u32 p, %2, %3;\n\tmov.b64 {%0, %1}, p;\n\t}"
      : "=r"(*low), "=r"(*high)
      : "r"(a), "r"(b));
#else
  const uint64_t p = static_cast<uint64_t>(a) * b;
  *low = static_cast<uint32_t>(p);
  *high = static_cast<uint32_t>(p >> 32);
#endif
}

NVTE_EP_HD Philox4 philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                 uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    uint32_t low0, high0, low1, high1;
    mul_wide(0xD2511F53u, c0, &low0, &high0);
    mul_wide(0xCD9E8D57u, c2, &low1, &high1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  Philox4 out;
  out.word[0] = c0;
  out.word[1] = c1;
  out.word[2] = c2;
  out.word[3] = c3;
  return out;
}

// One draw serves the 16 elements of a block. Independent of launch geometry: the counter is the block's identity.
enum class RandomStream : uint32_t { kRow = 0, kColumn = 1 };
NVTE_EP_HD Philox4 random_block(uint64_t seed, uint64_t offset, RandomStream stream, uint64_t block_id) {
  const uint32_t high =
      (static_cast<uint32_t>(offset >> 32) & 0x7FFFFFFFu) | (static_cast<uint32_t>(stream) << 31);
  return philox4x32_10(static_cast<uint32_t>(offset), high, static_cast<uint32_t>(block_id),
                       static_cast<uint32_t>(block_id >> 32), static_cast<uint32_t>(seed),
                       static_cast<uint32_t>(seed >> 32));
}

// ---- 16-point random Hadamard transform --------------------------------------------------------------------------------------

constexpr uint32_t kHadamardSigns = 0xD7E8u;  // bit i set: input i is negated

// y = x diag(signs) H / 4, in place. Butterfly strides 1, 2, 4, 8 in this order: it decides the last bit and the sign of
// zero. The trailing + 0 turns -0 into +0; the result is rounded to BF16.
NVTE_EP_HD void hadamard16(float* v) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 16; ++i) {
    if ((kHadamardSigns >> i) & 1u) v[i] = -v[i];
  }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int stride = 1; stride < 16; stride *= 2) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < 16; ++i) {
      if (i & stride) continue;
      const float a = v[i];
      const float b = v[i + stride];
      v[i] = add_rn(a, b);
      v[i + stride] = add_rn(a, -b);
    }
  }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 16; ++i) v[i] = bf16_to_float(float_to_bf16(add_rn(mul_rn(v[i], 0.25f), 0.0f)));
}

}  // namespace nvte_ep

#endif  // NVTE_EP_FORMATS_NUMERICS_H_
