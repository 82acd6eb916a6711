// Arrays in the memory under test, with guards that nobody may touch, and the values that go into them. Conversions are
// written from the formats' definitions and share nothing with src/.
#ifndef NVTE_EP_TESTS_ARRAYS_H_
#define NVTE_EP_TESTS_ARRAYS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "nvte_ep/nvte_ep.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace ep_test {

using Bytes = std::vector<uint8_t>;

// ---- memory --------------------------------------------------------------------------------------------------------------

// A kind of memory that tensors may live in. Arrays reach theirs through these calls alone.
struct Memory {
  const char* name;
  int32_t device_type;
  void* (*allocate)(size_t bytes);  // aligned to 256
  void (*release)(void* pointer);
  void (*copy)(void* to, const void* from,
               size_t bytes);  // between it and the host, either way, after all work of this thread is done
  int32_t device_id = 0;
  nvte_ep_stream_t (*stream)() = [] { return nvte_ep_stream_t{}; };  // of this thread's calls
};

inline const Memory& host_memory() {
  static const Memory memory = {
      "host",
      NVTE_EP_DEVICE_CPU,
      [](size_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); },
      [](void* pointer) { std::free(pointer); },
      [](void* to, const void* from, size_t bytes) {
        if (bytes > 0) std::memcpy(to, from, bytes);
      },
      0};
  return memory;
}

// Under AddressSanitizer, host memory that may be neither read nor written.
inline void forbid(const Memory& memory, const void* begin, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  if (memory.device_type == NVTE_EP_DEVICE_CPU) ASAN_POISON_MEMORY_REGION(begin, bytes);
#else
  (void)memory, (void)begin, (void)bytes;
#endif
}
inline void allow(const Memory& memory, const void* begin, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  if (memory.device_type == NVTE_EP_DEVICE_CPU) ASAN_UNPOISON_MEMORY_REGION(begin, bytes);
#else
  (void)memory, (void)begin, (void)bytes;
#endif
}

// ---- element types -------------------------------------------------------------------------------------------------------

enum class Type { kBFloat16, kFloat16, kFloat32, kUInt8, kInt32, kInt64 };
struct TypeInfo {
  const char* name;
  uint8_t code;
  uint8_t bits;
};
inline const TypeInfo& info_of(Type type) {
  static const TypeInfo infos[] = {
      {"bfloat16", NVTE_EP_DTYPE_BFLOAT, 16}, {"float16", NVTE_EP_DTYPE_FLOAT, 16},
      {"float32", NVTE_EP_DTYPE_FLOAT, 32},   {"uint8", NVTE_EP_DTYPE_UINT, 8},
      {"int32", NVTE_EP_DTYPE_INT, 32},       {"int64", NVTE_EP_DTYPE_INT, 64}};
  return infos[static_cast<int>(type)];
}
inline int64_t item_bytes(Type type) { return info_of(type).bits / 8; }

// x to the nearest multiple (ties to even) of 2^q with `precision` significant bits, but of 2^min_quantum at least.
inline double round_to_precision(double x, int precision, int min_quantum) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  int exponent;
  std::frexp(x, &exponent);  // |x| in [2^(exponent - 1), 2^exponent)
  const int quantum = std::max(exponent - precision, min_quantum);
  return std::ldexp(std::nearbyint(std::ldexp(x, -quantum)), quantum);
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline uint16_t to_bfloat16(float x) {
  if (std::isnan(x)) return 0x7FC0;
  const double rounded = round_to_precision(x, 8, -133);
  if (std::fabs(rounded) >= std::ldexp(1.0, 128)) return std::signbit(x) ? 0xFF80 : 0x7F80;
  return static_cast<uint16_t>(bits_of(static_cast<float>(rounded)) >> 16);
}
inline float from_bfloat16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

inline uint16_t to_float16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7E00;
  const double magnitude = std::fabs(round_to_precision(x, 11, -24));
  if (magnitude >= 65536.0) return sign | 0x7C00;
  if (magnitude < std::ldexp(1.0, -14))
    return static_cast<uint16_t>(sign | static_cast<int>(std::ldexp(magnitude, 24)));
  int exponent;
  const double fraction = std::frexp(magnitude, &exponent);  // [0.5, 1)
  const int mantissa = static_cast<int>(std::ldexp(fraction, 11)) - 1024;
  return static_cast<uint16_t>(sign | ((exponent + 14) << 10) | mantissa);
}
inline float from_float16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double magnitude;
  if (exponent == 31) {
    magnitude = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else {
    magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  }
  return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
}

inline Bytes encode(Type type, const std::vector<float>& values) {
  Bytes bytes(values.size() * static_cast<size_t>(item_bytes(type)));
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == Type::kFloat32) {
      const float x = std::isnan(values[i]) ? float_of(0x7FC00000u) : values[i];
      std::memcpy(&bytes[4 * i], &x, 4);
    } else {
      const uint16_t x = type == Type::kBFloat16 ? to_bfloat16(values[i]) : to_float16(values[i]);
      std::memcpy(&bytes[2 * i], &x, 2);
    }
  }
  return bytes;
}
inline std::vector<float> decode(Type type, const Bytes& bytes) {
  std::vector<float> values(bytes.size() / static_cast<size_t>(item_bytes(type)));
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == Type::kFloat32) {
      std::memcpy(&values[i], &bytes[4 * i], 4);
    } else {
      uint16_t x;
      std::memcpy(&x, &bytes[2 * i], 2);
      values[i] = type == Type::kBFloat16 ? from_bfloat16(x) : from_float16(x);
    }
  }
  return values;
}
// What of x is left in an array of the type.
inline std::vector<float> rounded(Type type, const std::vector<float>& x) {
  return decode(type, encode(type, x));
}

inline Bytes encode_index(Type type, const std::vector<int64_t>& values) {
  Bytes bytes(values.size() * static_cast<size_t>(item_bytes(type)));
  for (size_t i = 0; i < values.size(); ++i) {
    const int32_t narrow = static_cast<int32_t>(values[i]);
    if (type == Type::kInt32) {
      std::memcpy(&bytes[4 * i], &narrow, 4);
    } else {
      std::memcpy(&bytes[8 * i], &values[i], 8);
    }
  }
  return bytes;
}

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// ---- arrays ----------------------------------------------------------------------------------------------------------------

constexpr uint8_t kPoison = 0xFF;  // NaN in every float type, -1 in every integer type
constexpr uint8_t kGuardByte = 0xA5;

// One or two dimensions, guarded on both sides and in the gaps between rows. Default constructed: absent, tensor() is null.
class Array {
 public:
  Array() = default;
  Array(const Memory& memory, Type type, std::vector<int64_t> shape, int64_t gap = 0, uint8_t fill = kPoison)
      : memory_(&memory), type_(type), shape_(std::move(shape)) {
    const bool matrix = shape_.size() == 2;
    rows_ = matrix ? shape_[0] : 1;
    columns_ = shape_.back();
    pitch_ = columns_ + (matrix ? gap : 0);
    bytes_ = static_cast<size_t>(rows_ * pitch_ * item_bytes(type_));
    base_ = std::shared_ptr<uint8_t>(static_cast<uint8_t*>(memory.allocate(bytes_ + 2 * kGuard)),
                                     [memory = memory_, n = bytes_](uint8_t* p) {
                                       allow(*memory, p, n + 2 * kGuard);
                                       memory->release(p);
                                     });
    Bytes all(bytes_ + 2 * kGuard, kGuardByte);
    for (int64_t r = 0; r < rows_; ++r) std::fill_n(all.begin() + kGuard + row_start(r), row_bytes(), fill);
    memory.copy(base_.get(), all.data(), all.size());
    forbid(memory, base_.get(), kGuard);
    forbid(memory, data() + bytes_, kGuard);

    tensor_.data = size() > 0 ? data() : nullptr;
    tensor_.ndim = static_cast<int32_t>(shape_.size());
    tensor_.device_type = memory.device_type;
    tensor_.device_id = memory.device_id;
    tensor_.dtype_code = info_of(type).code;
    tensor_.dtype_bits = info_of(type).bits;
    std::copy(shape_.begin(), shape_.end(), tensor_.shape);
    if (pitch_ != columns_) {
      tensor_.strides[0] = pitch_;
      tensor_.strides[1] = 1;
    }
  }
  Array(const Memory& memory, Type type, std::vector<int64_t> shape, const Bytes& content, int64_t gap = 0)
      : Array(memory, type, std::move(shape), gap) {
    set(content);
  }

  explicit operator bool() const { return base_ != nullptr; }
  nvte_ep_tensor_t* tensor() { return base_ ? &tensor_ : nullptr; }
  uint8_t* data() const { return base_ ? base_.get() + kGuard : nullptr; }
  Type type() const { return type_; }
  int64_t size() const { return rows_ * columns_; }
  int64_t columns() const { return columns_; }

  // Rows without gaps.
  void set(const Bytes& content) {
    ASSERT_LE(content.size(), static_cast<size_t>(rows_) * row_bytes());
    for (size_t at = 0, r = 0; at < content.size(); at += row_bytes(), ++r) {
      memory_->copy(data() + row_start(static_cast<int64_t>(r)), &content[at],
                    std::min(row_bytes(), content.size() - at));
    }
  }
  Bytes get() const {
    if (!base_) return {};
    allow(*memory_, base_.get(), bytes_ + 2 * kGuard);
    Bytes all(bytes_ + 2 * kGuard);
    memory_->copy(all.data(), base_.get(), all.size());
    Bytes content;
    for (int64_t r = 0; r < rows_; ++r) {
      const auto start = all.begin() + kGuard + row_start(r);
      content.insert(content.end(), start, start + static_cast<std::ptrdiff_t>(row_bytes()));
      std::fill_n(start, row_bytes(), kGuardByte);
    }
    EXPECT_TRUE(std::all_of(all.begin(), all.end(), [](uint8_t b) { return b == kGuardByte; }))
        << "bytes outside an array were written";
    forbid(*memory_, base_.get(), kGuard);
    forbid(*memory_, data() + bytes_, kGuard);
    return content;
  }
  template <typename T>
  std::vector<T> values() const {
    const Bytes bytes = get();
    std::vector<T> out(bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
  // Rows (elements of a 1-d array) from `first` on may not be touched until get() is called.
  void forbid_from(int64_t first) const {
    if (!base_) return;
    const size_t start = static_cast<size_t>(first * (shape_.size() == 2 ? pitch_ : 1) * item_bytes(type_));
    if (start < bytes_) forbid(*memory_, data() + start, bytes_ - start);
  }

 private:
  static constexpr size_t kGuard = 256;
  std::ptrdiff_t row_start(int64_t r) const {
    return static_cast<std::ptrdiff_t>(r * pitch_ * item_bytes(type_));
  }
  size_t row_bytes() const { return static_cast<size_t>(columns_ * item_bytes(type_)); }

  const Memory* memory_ = nullptr;
  Type type_ = Type::kUInt8;
  std::vector<int64_t> shape_;
  int64_t rows_ = 0, columns_ = 0, pitch_ = 0;
  size_t bytes_ = 0;
  std::shared_ptr<uint8_t> base_;
  nvte_ep_tensor_t tensor_ = NVTE_EP_TENSOR_INIT;
};

// Names the first elements that differ by their coordinates. columns 0: one dimension.
inline void expect_bytes(const std::string& what, const Bytes& expected, const Bytes& got, int64_t item,
                         int64_t columns) {
  ASSERT_EQ(expected.size(), got.size()) << what;
  if (expected == got) return;
  const auto hex = [&](const Bytes& bytes, size_t at) {
    std::string text = "0x";
    char digits[3];
    for (int64_t b = item; b-- > 0;) {
      std::snprintf(digits, sizeof(digits), "%02x", bytes[at + static_cast<size_t>(b)]);
      text += digits;
    }
    return text;
  };
  std::ostringstream report;
  int64_t differing = 0;
  const int64_t count = static_cast<int64_t>(expected.size()) / item;
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = static_cast<size_t>(i * item);
    if (std::memcmp(&expected[at], &got[at], static_cast<size_t>(item)) == 0) continue;
    if (++differing > 6) continue;
    report << "\n  [" << (columns ? i / columns : i);
    if (columns) report << ", " << i % columns;
    report << "]: expected " << hex(expected, at) << ", got " << hex(got, at);
  }
  ADD_FAILURE() << what << ": " << differing << " of " << count << " elements differ" << report.str();
}

// ---- random values, replayable ---------------------------------------------------------------------------------------------

// splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  bool chance(double p) { return uniform() < p; }
  float normal() {  // twelve uniforms: close enough
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return static_cast<float>(sum);
  }

 private:
  uint64_t state_;
};

// NVTE_EP_TEST_SEED replays a run with other data; every failure names the seed in use.
inline uint64_t base_seed() {
  static const uint64_t seed = [] {
    const char* text = std::getenv("NVTE_EP_TEST_SEED");
    return text ? std::strtoull(text, nullptr, 0) : 1u;
  }();
  return seed;
}
inline uint64_t seed_of(const std::string& name) {
  uint64_t hash = 0xCBF29CE484222325u ^ base_seed();
  for (char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
  return hash;
}
inline std::string replay_text(const std::string& name) {
  return name + " (NVTE_EP_TEST_SEED=" + std::to_string(base_seed()) + ")";
}

// Tokens as they occur: outlier channels, small and large tokens, zeros.
inline std::vector<float> random_tokens(Random* random, int64_t tokens, int64_t hidden) {
  std::vector<float> x(static_cast<size_t>(tokens * hidden));
  for (int64_t t = 0; t < tokens; ++t) {
    const float size = random->chance(0.05) ? 0.0f : std::ldexp(1.0f, static_cast<int>(random->below(9)) - 4);
    for (int64_t h = 0; h < hidden; ++h) {
      const float outlier = h % 29 == 7 ? 16.0f : 1.0f;
      x[static_cast<size_t>(t * hidden + h)] =
          random->chance(0.05) ? 0.0f : random->normal() * size * outlier;
    }
  }
  return x;
}

}  // namespace ep_test

#endif  // NVTE_EP_TESTS_ARRAYS_H_
