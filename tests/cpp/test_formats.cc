// Properties of the scalar conversions in src/formats over all codes, against searches in the formats' definitions; and
// of the codecs of the C ABI that no single vector can show. Exact vectors: test_golden.cc.
#include <functional>
#include <set>

#include "core/row_layout.h"
#include "formats/mxfp8.h"
#include "formats/numerics.h"
#include "formats/nvfp4.h"
#include "model.h"

namespace {

using namespace ep_test;
namespace lib = nvte_ep;

// ---- definitions of the small formats --------------------------------------------------------------------------------------

double e4m3_value(int code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  if ((code & 127) == 127) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return code & 128 ? -magnitude : magnitude;
}
double e2m1_value(int code) {
  const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

// The code of the nearest magnitude among codes 0 .. last, ties to the even one; saturating.
int nearest_code(double x, int last, const std::function<double(int)>& value) {
  x = std::min(x, 4 * value(last));  // so that differences stay exact
  int best = 0;
  for (int code = 1; code <= last; ++code) {
    const double closer = std::fabs(value(code) - x) - std::fabs(value(best) - x);
    if (closer < 0 || (closer == 0 && code % 2 == 0)) best = code;
  }
  return best;
}

// FP32 magnitudes around every value and every midpoint of two neighbours, and others at random.
std::vector<float> probes(int last, const std::function<double(int)>& value) {
  std::vector<float> x = {0.0f, 1e-45f, 1.17549435e-38f, 3.4e38f, std::numeric_limits<float>::infinity()};
  for (int code = 0; code <= last; ++code) {
    const double next = code == last ? value(last) * 2 - value(last - 1) : value(code + 1);
    for (double centre : {value(code), (value(code) + next) / 2}) {
      const float f = static_cast<float>(centre);
      x.insert(x.end(), {f, std::nextafterf(f, 0.0f), std::nextafterf(f, 1e30f)});
    }
  }
  Random random(seed_of("probes"));
  for (int i = 0; i < 20000; ++i) x.push_back(float_of(static_cast<uint32_t>(random.next()) & 0x7F7FFFFFu));
  for (int i = 0; i < 20000; ++i) x.push_back(static_cast<float>(random.uniform() * value(last) * 1.1));
  return x;
}

TEST(E4m3, EveryCodeDecodesAndComesBack) {
  for (int code = 0; code < 256; ++code) {
    const float value = lib::e4m3_to_float(static_cast<uint8_t>(code));
    if ((code & 127) == 127) {
      EXPECT_EQ(bits_of(value), 0x7FC00000u);
      continue;
    }
    EXPECT_EQ(value, e4m3_value(code));
    EXPECT_EQ(lib::float_to_e4m3(value), code);
  }
}

TEST(E4m3, RoundsToTheNearestAndUp) {
  for (float x : probes(126, e4m3_value)) {
    const int nearest = nearest_code(x, 126, e4m3_value);
    ASSERT_EQ(lib::float_to_e4m3(x), nearest) << x;
    ASSERT_EQ(lib::float_to_e4m3(-x), nearest | 128) << x;
    int up = 0;
    while (up < 126 && e4m3_value(up) < x) ++up;
    ASSERT_EQ(lib::float_to_e4m3_up(x), up) << x;
  }
  EXPECT_EQ(lib::float_to_e4m3(float_of(0xFFC00001u)), 0x7F);
  EXPECT_EQ(lib::float_to_e4m3_up(float_of(0x7FC00000u)), 0x7F);
}

TEST(E4m3, ScalingByAPowerOfTwoRoundsOnce) {
  for (int code = 0; code < 127; ++code) {
    for (int d = -300; d <= 300; ++d) {
      const double exact = std::ldexp(e4m3_value(code), -std::min(std::max(d, -40), 40));
      ASSERT_EQ(lib::e4m3_scale_exponent(static_cast<uint8_t>(code), d), nearest_code(exact, 126, e4m3_value))
          << code << " " << d;
    }
  }
}

TEST(E2m1, EveryCodeDecodesAndComesBack) {
  for (uint32_t code = 0; code < 16; ++code) {
    const float value = lib::e2m1_to_float(code);
    EXPECT_EQ(value, e2m1_value(static_cast<int>(code)));
    EXPECT_EQ(lib::float_to_e2m1(value), code);
    for (uint32_t byte = 0; byte < 256; ++byte)
      EXPECT_EQ(lib::float_to_e2m1_stochastic(value, byte), code) << byte;
  }
}

TEST(E2m1, RoundsToTheNearest) {
  for (float x : probes(7, e2m1_value)) {
    const uint32_t nearest = static_cast<uint32_t>(nearest_code(x, 7, e2m1_value));
    ASSERT_EQ(lib::float_to_e2m1(x), nearest) << x;
    ASSERT_EQ(lib::float_to_e2m1(-x), nearest | 8) << x;
  }
  EXPECT_EQ(lib::float_to_e2m1(float_of(0xFFC00000u)), 7u);
}

TEST(E2m1, StochasticRoundingHitsNeighboursInProportion) {
  Random random(seed_of("stochastic"));
  for (int i = 0; i < 4000; ++i) {
    const float x = static_cast<float>(random.uniform() * 6.5);
    int below = 0;
    while (below < 7 && e2m1_value(below + 1) <= x) ++below;
    const int above = std::min(below + 1, 7);
    int ups = 0;
    uint32_t last = 0;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t code = lib::float_to_e2m1_stochastic(x, byte);
      ASSERT_TRUE(code == static_cast<uint32_t>(below) || code == static_cast<uint32_t>(above))
          << x << " " << byte;
      ASSERT_GE(code, last) << "a larger byte never rounds lower: " << x;
      ASSERT_EQ(lib::float_to_e2m1_stochastic(-x, byte), code | 8);
      last = code;
      ups += code == static_cast<uint32_t>(above) && above != below;
    }
    if (above == below) continue;
    const double fraction = (x - e2m1_value(below)) / (e2m1_value(above) - e2m1_value(below));
    ASSERT_NEAR(ups, 256 * fraction, 1.0 + 1e-3) << x;
  }
}

TEST(E8m0, EveryCodeDecodesAndComesBack) {
  for (int code = 0; code < 255; ++code) {
    const float value = lib::e8m0_to_float(static_cast<uint8_t>(code));
    EXPECT_EQ(value, std::ldexp(1.0, code - 127));
    EXPECT_EQ(lib::float_to_e8m0_up(value), code);
    EXPECT_EQ(lib::e8m0_inverse(static_cast<uint8_t>(code)), std::ldexp(1.0, 127 - code));
    if (code < 254) {
      EXPECT_EQ(lib::float_to_e8m0_up(std::nextafterf(value, 3e38f)), code + 1);
    }
  }
  EXPECT_TRUE(std::isnan(lib::e8m0_to_float(255)));
  EXPECT_TRUE(std::isnan(lib::e8m0_inverse(255)));
  EXPECT_EQ(lib::float_to_e8m0_up(0.0f), 0);
  EXPECT_EQ(lib::float_to_e8m0_up(std::numeric_limits<float>::infinity()), 254);
  EXPECT_EQ(lib::float_to_e8m0_up(std::numeric_limits<float>::quiet_NaN()), 255);
}

TEST(Halves, EveryCodeComesBackAndRoundingAgreesWithTheDefinition) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const uint16_t bits = static_cast<uint16_t>(code);
    const float bfloat = lib::bf16_to_float(bits);
    const float half = lib::fp16_to_float(bits);
    ASSERT_EQ(bits_of(half), bits_of(std::isnan(half) ? half : from_float16(bits))) << code;
    ASSERT_EQ(lib::float_to_bf16(bfloat), std::isnan(bfloat) ? 0x7FC0 : bits);
    ASSERT_EQ(lib::float_to_fp16(half), std::isnan(half) ? 0x7E00 : bits);
    for (float x : {std::nextafterf(bfloat, 1e38f), std::nextafterf(bfloat, -1e38f), bfloat * 1.00390625f,
                    std::nextafterf(half, 1e38f), half * 1.00048828125f}) {
      ASSERT_EQ(lib::float_to_bf16(x), to_bfloat16(x)) << x;
      ASSERT_EQ(lib::float_to_fp16(x), to_float16(x)) << x;
    }
  }
  Random random(seed_of("halves"));
  for (int i = 0; i < 200000; ++i) {
    const float x = float_of(static_cast<uint32_t>(random.next()));
    ASSERT_EQ(lib::float_to_bf16(x), to_bfloat16(x)) << x;
    ASSERT_EQ(lib::float_to_fp16(x), to_float16(x)) << x;
    const float small = std::ldexp(x, -bits_of(x) % 64);
    ASSERT_EQ(lib::float_to_fp16(small), to_float16(small)) << small;
  }
}

TEST(Philox, KnownAnswersOfItsAuthors) {
  struct {
    uint32_t counter[4], key[2], words[4];
  } const vectors[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627E8D5u, 0xE169C58Du, 0xBC57AC4Cu, 0x9B00DBD8u}},
      {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408F276Du, 0x41C83B0Eu, 0xA20BC7C6u, 0x6D5451FDu}},
      {{0x243F6A88u, 0x85A308D3u, 0x13198A2Eu, 0x03707344u},
       {0xA4093822u, 0x299F31D0u},
       {0xD16CFE09u, 0x94FDCCEBu, 0x5001E420u, 0x24126EA1u}}};
  for (const auto& v : vectors) {
    const lib::Philox4 out =
        lib::philox4x32_10(v.counter[0], v.counter[1], v.counter[2], v.counter[3], v.key[0], v.key[1]);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(out.word[i], v.words[i]);
  }
}

TEST(RandomBlock, IdentitiesDoNotCollide) {
  std::set<std::vector<uint32_t>> seen;
  int draws = 0;
  for (uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
    for (uint64_t offset : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, uint64_t{1} << 62}) {
      for (lib::RandomStream stream : {lib::RandomStream::kRow, lib::RandomStream::kColumn}) {
        for (uint64_t block :
             {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, uint64_t{1} << 54, uint64_t{1023} << 54}) {
          const lib::Philox4 out = lib::random_block(seed, offset, stream, block);
          seen.insert(std::vector<uint32_t>(out.word, out.word + 4));
          ++draws;
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(draws));
  const lib::Philox4 a = lib::random_block(5, 7, lib::RandomStream::kRow, 9);
  const lib::Philox4 b = lib::random_block(5, 7 + (uint64_t{1} << 63), lib::RandomStream::kRow, 9);
  EXPECT_TRUE(std::equal(a.word, a.word + 4, b.word)) << "the offset is taken modulo 2^63";
}

// ---- blocks and rows ---------------------------------------------------------------------------------------------------------

TEST(Hadamard, IsTheMatrixWithSigns) {
  Random random(seed_of("hadamard"));
  const int sign[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  for (int round = 0; round < 500; ++round) {
    float v[16];
    double x[16], largest = 0;
    for (int i = 0; i < 16; ++i) {
      v[i] = from_bfloat16(to_bfloat16(random.normal()));
      x[i] = v[i];
      largest = std::max(largest, std::fabs(x[i]));
    }
    lib::hadamard16(v);
    for (int n = 0; n < 16; ++n) {
      double y = 0;
      for (int k = 0; k < 16; ++k)
        y += x[k] * sign[k] * (__builtin_popcount(static_cast<unsigned>(n & k)) % 2 ? -0.25 : 0.25);
      ASSERT_NEAR(v[n], y, std::fabs(y) * 0x1p-8 + largest * 0x1p-22);
      ASSERT_LE(std::fabs(v[n]), 4 * largest);
      ASSERT_EQ(v[n], from_bfloat16(to_bfloat16(v[n]))) << "a BF16 value";
      ASSERT_NE(bits_of(v[n]), 0x80000000u) << "no negative zero";
    }
  }
}

TEST(Nvfp4, TokenExponentIsTheSmallestThatFits) {
  const auto check = [](float amax) {
    int k = lib::Nvfp4::kMinExponent;
    while (k < lib::Nvfp4::kMaxExponent && std::ldexp(2688.0, k) < amax) ++k;
    ASSERT_EQ(lib::Nvfp4::token_exponent(amax), k) << amax;
  };
  for (uint32_t bits = 1; bits < 0x7F80; ++bits) check(from_bfloat16(static_cast<uint16_t>(bits)));
  Random random(seed_of("token exponent"));
  for (int i = 0; i < 20000; ++i) check(float_of(static_cast<uint32_t>(random.next()) & 0x7F7FFFFFu));
}

TEST(Nvfp4, DecodesWithinTheStepOfItsBlock) {
  const int64_t hidden = 256;
  Random random(seed_of("nvfp4 error"));
  const std::vector<float> x = rounded(Type::kBFloat16, random_tokens(&random, 200, hidden));
  const Bytes rows = pack(NVTE_EP_FORMAT_NVFP4, Type::kBFloat16, x, hidden);
  const std::vector<float> y =
      decode(Type::kFloat32, unpack(NVTE_EP_FORMAT_NVFP4, rows, hidden, Type::kFloat32));
  EXPECT_EQ(unpack(NVTE_EP_FORMAT_NVFP4, rows, hidden, Type::kBFloat16), encode(Type::kBFloat16, y))
      << "exact in BF16";
  const int64_t row_bytes = row_parts(NVTE_EP_FORMAT_NVFP4, hidden).bytes;
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t row = i / static_cast<size_t>(hidden);
    const uint8_t* bytes = &rows[row * static_cast<size_t>(row_bytes)];
    float token_scale;
    std::memcpy(&token_scale, bytes + row_parts(NVTE_EP_FORMAT_NVFP4, hidden).token_scale_at, 4);
    const double scale = e4m3_value(bytes[hidden / 2 + static_cast<int64_t>(i) % hidden / 16]) * token_scale;
    // Half a step of E2M1's top binade, and what a scale rounded down clips or a flushed block loses.
    ASSERT_LE(std::fabs(x[i] - y[i]), std::max(scale, 6.0 * 0x1p-10 * token_scale)) << i;
  }
  // Packing again may choose other bytes, but no other values.
  EXPECT_EQ(unpack(NVTE_EP_FORMAT_NVFP4, pack(NVTE_EP_FORMAT_NVFP4, Type::kFloat32, y, hidden), hidden,
                   Type::kFloat32),
            encode(Type::kFloat32, y));
}

TEST(Mxfp8, DecodesWithinTheStepOfItsBlock) {
  const int64_t hidden = 256;
  Random random(seed_of("mxfp8 error"));
  const std::vector<float> x = rounded(Type::kBFloat16, random_tokens(&random, 200, hidden));
  const Bytes rows = pack(NVTE_EP_FORMAT_MXFP8, Type::kBFloat16, x, hidden);
  const std::vector<float> y =
      decode(Type::kFloat32, unpack(NVTE_EP_FORMAT_MXFP8, rows, hidden, Type::kFloat32));
  for (size_t b = 0; b < x.size() / 32; ++b) {
    const size_t row = b / static_cast<size_t>(hidden / 32);
    const uint8_t code = rows[row * static_cast<size_t>(row_parts(NVTE_EP_FORMAT_MXFP8, hidden).bytes) +
                              static_cast<size_t>(hidden) + b % static_cast<size_t>(hidden / 32)];
    double largest = 0;
    for (size_t i = 32 * b; i < 32 * (b + 1); ++i) {
      ASSERT_LE(std::fabs(x[i] - y[i]), std::ldexp(16.0, code - 127)) << i;
      largest = std::max<double>(largest, std::fabs(x[i]));
    }
    ASSERT_LE(largest, std::ldexp(448.0, code - 127));
    if (largest > 0) {
      ASSERT_GT(largest, std::ldexp(224.0, code - 127)) << "the smallest scale that fits";
    }
  }
  EXPECT_EQ(unpack(NVTE_EP_FORMAT_MXFP8, pack(NVTE_EP_FORMAT_MXFP8, Type::kFloat32, y, hidden), hidden,
                   Type::kFloat32),
            encode(Type::kFloat32, y))
      << "packing again changes no value";
}

// No element is lost to its neighbours: a row depends on its own token alone.
TEST(Rows, DependOnTheirOwnTokenAlone) {
  const int64_t hidden = 96;
  Random random(seed_of("rows"));
  const std::vector<float> x = random_tokens(&random, 12, hidden);
  for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    const Bytes all = pack(format, Type::kFloat16, x, hidden);
    const int64_t row_bytes = row_parts(format, hidden).bytes;
    for (int64_t t = 0; t < 12; ++t) {
      const Bytes one =
          pack(format, Type::kFloat16,
               std::vector<float>(x.begin() + t * hidden, x.begin() + (t + 1) * hidden), hidden);
      ASSERT_EQ(one, Bytes(all.begin() + t * row_bytes, all.begin() + (t + 1) * row_bytes))
          << format_name(format) << " " << t;
    }
  }
}

TEST(Rows, FormatInfoAgreesWithRowBytes) {
  for (int32_t format = 0;; ++format) {
    nvte_ep_format_info_t info = NVTE_EP_FORMAT_INFO_INIT;
    const nvte_ep_status_t status = nvte_ep_format_info(format, &info);
    if (status == NVTE_EP_STATUS_UNSUPPORTED) {
      EXPECT_EQ(format, 3) << "three formats are known to this test";
      break;
    }
    require(status);
    for (int64_t hidden = info.hidden_multiple; hidden < 3000; hidden += info.hidden_multiple) {
      int64_t bytes = 0;
      require(nvte_ep_row_bytes(format, hidden, &bytes));
      EXPECT_EQ(bytes, row_parts(format, hidden).bytes) << info.name << " " << hidden;
      const int64_t content = hidden * info.payload_bits / 8 +
                              (info.block ? hidden / info.block * info.scale_bytes : 0) +
                              info.token_scale_bytes;
      EXPECT_GE(bytes, content);
      EXPECT_LT(bytes, content + 4 + 16);
      EXPECT_EQ(bytes % 16, 0);
    }
  }
}

}  // namespace
