// The same call on both backends: memory that exists twice, on the host and on the device, with guard bytes
// around it. Results are compared byte by byte, guards and bytes that nothing should have written included.
#ifndef NVTE_EP_TESTS_CUDA_MIRROR_H_
#define NVTE_EP_TESTS_CUDA_MIRROR_H_

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/backend.h"

namespace nvte_ep::testing {

#define ASSERT_CUDA(call)                                                          \
  do {                                                                             \
    const cudaError_t error_ = (call);                                             \
    ASSERT_EQ(error_, cudaSuccess) << #call << ": " << cudaGetErrorString(error_); \
  } while (false)

inline void check_cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  ADD_FAILURE() << cudaGetErrorString(error);
  std::abort();  // nothing after this can be trusted
}

inline bool required(const char* what) {
  const char* list = std::getenv("NVTE_EP_REQUIRE");
  return list != nullptr &&
         ("," + std::string(list) + ",").find("," + std::string(what) + ",") != std::string::npos;
}

// Skips where there is no GPU; fails there if NVTE_EP_REQUIRE names cuda.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const Status status = find_backend(Device{NVTE_EP_DEVICE_CUDA, 0}, 0, &cuda_);
    if (!status.ok()) {
      if (required("cuda")) FAIL() << status.message();
      GTEST_SKIP() << status.message();
    }
    ASSERT_TRUE(find_backend(Device(), 0, &host_).ok());
  }
  Backend* cuda_ = nullptr;
  Backend* host_ = nullptr;
};

// One array in both memories.
class Mirror {
 public:
  static constexpr size_t kGuard = 512;
  static constexpr uint8_t kFill = 0x5A;

  // offset moves the array off its alignment of 256 bytes.
  explicit Mirror(size_t bytes, size_t offset = 0)
      : bytes_(bytes), offset_(offset), storage_(bytes + offset + 2 * kGuard + 256, kFill) {
    check_cuda(cudaMalloc(&device_, storage_.size()));
    upload();
  }
  template <typename T>
  static std::unique_ptr<Mirror> of(const std::vector<T>& values, size_t offset = 0) {
    auto mirror = std::make_unique<Mirror>(values.size() * sizeof(T), offset);
    if (!values.empty()) std::memcpy(mirror->host(), values.data(), values.size() * sizeof(T));
    mirror->upload();
    return mirror;
  }
  ~Mirror() { check_cuda(cudaFree(device_)); }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  size_t bytes() const { return bytes_; }
  uint8_t* host() { return storage_.data() + host_begin(); }
  uint8_t* device() { return static_cast<uint8_t*>(device_) + kGuard + offset_; }
  uint8_t* on(bool cuda) { return cuda ? device() : host(); }
  void upload() {
    check_cuda(cudaMemcpy(device(), host(), bytes_, cudaMemcpyHostToDevice));
    check_cuda(cudaMemset(device_, kFill, kGuard + offset_));
    check_cuda(cudaMemset(device() + bytes_, kFill, storage_.size() - kGuard - offset_ - bytes_));
  }

  // Where the two differ first, guards included. place names a byte's coordinates.
  ::testing::AssertionResult equal(const char* name, const std::function<std::string(size_t)>& place = {}) {
    std::vector<uint8_t> got(storage_.size());
    check_cuda(cudaMemcpy(got.data(), device_, got.size(), cudaMemcpyDeviceToHost));
    const uint8_t* array = got.data() + kGuard + offset_;
    for (size_t i = 0; i < kGuard + offset_; ++i) {
      if (got[i] != kFill)
        return ::testing::AssertionFailure()
               << name << ": byte " << kGuard + offset_ - i << " before the array was written";
    }
    for (size_t i = kGuard + offset_ + bytes_; i < got.size(); ++i) {
      if (got[i] != kFill)
        return ::testing::AssertionFailure()
               << name << ": byte " << i - kGuard - offset_ - bytes_ << " past the array was written";
    }
    if (bytes_ == 0 || std::memcmp(array, host(), bytes_) == 0) return ::testing::AssertionSuccess();
    size_t first = 0;
    while (array[first] == host()[first]) ++first;
    size_t wrong = 0;
    for (size_t i = 0; i < bytes_; ++i) wrong += array[i] != host()[i];
    std::ostringstream out;
    out << name << ": " << wrong << " of " << bytes_ << " bytes differ, first byte " << first;
    if (place) out << " (" << place(first) << ")";
    out << "; expected (host)";
    const size_t end = std::min(bytes_, first + 16);
    out << std::hex;
    for (size_t i = first; i < end; ++i) out << ' ' << int(host()[i]);
    out << ", got (cuda)";
    for (size_t i = first; i < end; ++i) out << ' ' << int(array[i]);
    return ::testing::AssertionFailure() << out.str();
  }

 private:
  // The host array has the alignment of the device's.
  size_t host_begin() {
    const size_t at = reinterpret_cast<uintptr_t>(storage_.data()) + kGuard;
    return kGuard + (256 - at % 256) % 256 + offset_;
  }
  size_t bytes_, offset_;
  std::vector<uint8_t> storage_;
  void* device_ = nullptr;
};

// ---- data -------------------------------------------------------------------------------------------------

using Rng = std::mt19937_64;

enum class Data { kGaussian, kOutlierChannels, kHalfZero, kWide, kNonFinite, kBits };
constexpr Data kAllData[] = {Data::kGaussian, Data::kOutlierChannels, Data::kHalfZero,
                             Data::kWide,     Data::kNonFinite,       Data::kBits};

inline std::vector<float> make_values(Data kind, int64_t rows, int64_t hidden, Rng* rng) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(rows * hidden));
  for (int64_t r = 0; r < rows; ++r) {
    const float row_scale =
        kind == Data::kWide ? std::ldexp(1.0f, static_cast<int>((*rng)() % 200) - 100) : 1.0f;
    for (int64_t h = 0; h < hidden; ++h) {
      float v = normal(*rng) * row_scale;
      switch (kind) {
        case Data::kOutlierChannels:
          if (h % 37 == 5) v *= 80.0f;
          break;
        case Data::kHalfZero:
          v = v > 0 && (h / 16 + r) % 5 != 0 && r % 7 != 3 ? v : ((*rng)() % 8 == 0 ? -0.0f : 0.0f);
          break;
        case Data::kWide:
          v = std::ldexp(v, static_cast<int>((*rng)() % 50) - 30);
          break;
        case Data::kNonFinite:
          if (r % 3 == 1 && (*rng)() % 40 == 0)
            v = (*rng)() % 2 ? NAN : ((*rng)() % 2 ? INFINITY : -INFINITY);
          if (r % 11 == 4) v = h / 16 % 2 ? NAN : 0.0f;
          break;
        case Data::kBits: {
          const uint32_t u = static_cast<uint32_t>((*rng)());
          std::memcpy(&v, &u, 4);
          break;
        }
        default:
          break;
      }
      x[static_cast<size_t>(r * hidden + h)] = v;
    }
  }
  return x;
}

// As bytes of a dtype, rows stride elements apart.
inline std::vector<uint8_t> to_bytes(const std::vector<float>& x, DType dtype, int64_t rows, int64_t hidden,
                                     int64_t stride) {
  const int64_t size = dtype_bytes(dtype);
  std::vector<uint8_t> out(static_cast<size_t>(rows * stride * size), 0xCC);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < hidden; ++h) {
      const float v = x[static_cast<size_t>(r * hidden + h)];
      uint8_t* to = out.data() + (r * stride + h) * size;
      uint32_t u;
      std::memcpy(&u, &v, 4);
      // Truncated, so that NaN payloads, every mantissa and subnormals are among the inputs.
      const uint16_t half = dtype == DType::kBFloat16 ? static_cast<uint16_t>(u >> 16) : float_to_fp16(v);
      std::memcpy(to, size == 4 ? static_cast<const void*>(&u) : &half, static_cast<size_t>(size));
    }
  }
  return out;
}

inline std::vector<uint8_t> random_bytes(size_t count, Rng* rng) {
  std::vector<uint8_t> out(count);
  for (uint8_t& b : out) b = static_cast<uint8_t>((*rng)());
  return out;
}

}  // namespace nvte_ep::testing

#endif  // NVTE_EP_TESTS_CUDA_MIRROR_H_
