// Every golden vector, byte for byte: single functions through src/formats, the rest through the C ABI,
// in each kind of memory of this build. A case without a handler fails, and so does a field of a case that
// its handler does not read.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <memory>

#include "core/operand_layout.h"
#include "formats/mxfp8.h"
#include "formats/numerics.h"
#include "formats/nvfp4.h"
#include "golden.h"
#include "nvte_ep/nvte_ep.h"

#if defined(NVTE_EP_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace {

using golden::Array;
using golden::Case;
using Bytes = std::vector<uint8_t>;

constexpr uint8_t kUntouched = 0xA5;  // as in tests/golden/layout.py

enum class Place { kHost, kCuda };

// ---- comparison -------------------------------------------------------------------------------------------

// Names the first elements that differ by their coordinates.
void expect_equal(const std::string& what, const std::vector<int64_t>& shape, int64_t item_bytes,
                  const Bytes& expected, const Bytes& got) {
  ASSERT_EQ(expected.size(), got.size()) << what;
  int shown = 0;
  int64_t differing = 0;
  std::ostringstream report;
  const int64_t count = static_cast<int64_t>(expected.size()) / item_bytes;
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = static_cast<size_t>(i * item_bytes);
    if (std::memcmp(&expected[at], &got[at], static_cast<size_t>(item_bytes)) == 0) continue;
    ++differing;
    if (shown++ >= 8) continue;
    std::string coordinates;
    int64_t rest = i;
    for (size_t d = shape.size(); d-- > 0;) {
      const int64_t extent = d == 0 ? count + 1 : shape[d];
      coordinates = std::to_string(rest % extent) + (coordinates.empty() ? "" : ", ") + coordinates;
      rest /= extent;
    }
    const auto hex = [&](const Bytes& bytes) {
      std::string text = "0x";
      char digits[3];
      for (int64_t b = item_bytes; b-- > 0;) {
        std::snprintf(digits, sizeof(digits), "%02x", bytes[at + static_cast<size_t>(b)]);
        text += digits;
      }
      return text;
    };
    report << "\n  [" << coordinates << "]: expected " << hex(expected) << ", got " << hex(got);
  }
  EXPECT_EQ(differing, 0) << what << ": " << differing << " of " << count << " elements differ"
                          << report.str();
}

void expect_equal(const std::string& what, const Array& expected, const Bytes& got) {
  expect_equal(what, expected.shape, expected.item_bytes(), expected.bytes, got);
}

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// ---- memory -----------------------------------------------------------------------------------------------

// Bytes in the tested memory, aligned to 256, with a guard on either side that nobody may write.
class Buffer {
 public:
  Buffer(Place place, const Bytes& content) : place_(place), size_(content.size()) {
    Bytes all(size_ + 2 * kGuard, kUntouched);
    std::copy(content.begin(), content.end(), all.begin() + kGuard);
    if (place_ == Place::kHost) {
      base_ = static_cast<uint8_t*>(std::aligned_alloc(kGuard, (all.size() + kGuard - 1) / kGuard * kGuard));
      std::memcpy(base_, all.data(), all.size());
    } else {
#if defined(NVTE_EP_WITH_CUDA)
      void* pointer = nullptr;
      check(cudaMalloc(&pointer, all.size()));
      base_ = static_cast<uint8_t*>(pointer);
      check(cudaMemcpy(base_, all.data(), all.size(), cudaMemcpyHostToDevice));
#endif
    }
  }
  Buffer(Place place, int64_t bytes) : Buffer(place, Bytes(static_cast<size_t>(bytes), kUntouched)) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (place_ == Place::kHost) std::free(base_);
#if defined(NVTE_EP_WITH_CUDA)
    if (place_ == Place::kCuda) (void)cudaFree(base_);
#endif
  }

  uint8_t* data() const { return base_ + kGuard; }
  Bytes content() const {
    Bytes all(size_ + 2 * kGuard);
    if (place_ == Place::kHost) {
      std::memcpy(all.data(), base_, all.size());
    } else {
#if defined(NVTE_EP_WITH_CUDA)
      check(cudaDeviceSynchronize());
      check(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost));
#endif
    }
    const auto untouched = [](uint8_t b) { return b == kUntouched; };
    EXPECT_TRUE(std::all_of(all.begin(), all.begin() + kGuard, untouched))
        << "bytes before a buffer were written";
    EXPECT_TRUE(std::all_of(all.end() - kGuard, all.end(), untouched)) << "bytes past a buffer were written";
    return Bytes(all.begin() + kGuard, all.end() - kGuard);
  }

 private:
#if defined(NVTE_EP_WITH_CUDA)
  static void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  }
#endif
  static constexpr int kGuard = 256;
  Place place_;
  size_t size_;
  uint8_t* base_ = nullptr;
};

// A 2-d array with a pitch, and optionally a base that is aligned to one element only.
class Matrix {
 public:
  Matrix(Place place, int64_t rows, int64_t columns, int code, int bits, int64_t gap = 0, int64_t shift = 0)
      : rows_(rows),
        columns_(columns),
        pitch_(columns + gap),
        shift_(shift),
        item_(bits / 8),
        buffer_(place, (rows * pitch_ + shift) * item_) {
    tensor = nvte_ep_tensor_2d(buffer_.data() + shift * item_, rows, columns, code, bits,
                               place == Place::kHost ? NVTE_EP_DEVICE_CPU : NVTE_EP_DEVICE_CUDA, 0);
    tensor.strides[0] = pitch_;
    tensor.strides[1] = 1;
    place_ = place;
  }
  void fill(const Bytes& compact) {
    Bytes all(static_cast<size_t>((rows_ * pitch_ + shift_) * item_), kUntouched);
    each_row([&](size_t in_all, size_t in_compact, size_t n) {
      std::memcpy(all.data() + in_all, compact.data() + in_compact, n);
    });
    if (place_ == Place::kHost) {
      std::copy(all.begin(), all.end(), buffer_.data());
    } else {
#if defined(NVTE_EP_WITH_CUDA)
      ASSERT_EQ(cudaMemcpy(buffer_.data(), all.data(), all.size(), cudaMemcpyHostToDevice), cudaSuccess);
#endif
    }
  }
  // The rows without the gaps, which must be as they were.
  Bytes content() const {
    Bytes all = buffer_.content();
    Bytes compact(static_cast<size_t>(rows_ * columns_ * item_));
    each_row([&](size_t in_all, size_t in_compact, size_t n) {
      std::memcpy(compact.data() + in_compact, all.data() + in_all, n);
      std::memset(all.data() + in_all, kUntouched, n);
    });
    EXPECT_TRUE(std::all_of(all.begin(), all.end(), [](uint8_t b) { return b == kUntouched; }))
        << "bytes between the rows were written";
    return compact;
  }
  nvte_ep_tensor_t tensor;

 private:
  template <typename Function>
  void each_row(Function&& function) const {
    for (int64_t r = 0; r < rows_; ++r) {
      if (columns_ == 0) return;
      function(static_cast<size_t>((r * pitch_ + shift_) * item_), static_cast<size_t>(r * columns_ * item_),
               static_cast<size_t>(columns_ * item_));
    }
  }
  int64_t rows_, columns_, pitch_, shift_, item_;
  Place place_;
  Buffer buffer_;
};

// A 1-d array.
class Vector {
 public:
  Vector(Place place, const Bytes& content, int code, int bits) : buffer_(place, content) {
    tensor = nvte_ep_tensor_1d(buffer_.data(), static_cast<int64_t>(content.size()) / (bits / 8), code, bits,
                               place == Place::kHost ? NVTE_EP_DEVICE_CPU : NVTE_EP_DEVICE_CUDA, 0);
  }
  Bytes content() const { return buffer_.content(); }
  nvte_ep_tensor_t tensor;

 private:
  Buffer buffer_;
};

#define EXPECT_OK(call) EXPECT_EQ(call, NVTE_EP_STATUS_OK) << nvte_ep_last_error()

// ---- options ----------------------------------------------------------------------------------------------

int choice(const std::string& text, std::initializer_list<const char*> names) {
  int value = 0;
  for (const char* name : names) {
    if (text == name) return value;
    ++value;
  }
  throw std::runtime_error("unknown value " + text);
}

// The options a case asks for, and what the call reports.
class Options {
 public:
  Options(const Case& c, Place place)
      : place_(place),
        expected_findings_(static_cast<int32_t>(c.number("findings", 0))),
        findings_(place, bytes_of<int32_t>({0}), NVTE_EP_DTYPE_INT, 32) {
    raw.rounding = choice(c.text("rounding", "nearest"), {"nearest", "stochastic"});
    raw.nonfinite = choice(c.text("nonfinite", "propagate"), {"propagate", "saturate"});
    raw.scale_rounding = choice(c.text("scale_rounding", "nearest"), {"nearest", "up"});
    raw.column_bound = choice(c.text("column_bound", "l1"), {"l1", "max"});
    raw.row_id_base = c.number("row_id_base", 0);
    raw.rank = static_cast<int32_t>(c.number("rank", 0));
    raw.findings = &findings_.tensor;
    if (raw.rounding == NVTE_EP_ROUNDING_STOCHASTIC) {
      raw.rng_state = add(bytes_of<int64_t>({c.number("seed"), c.number("offset")}), NVTE_EP_DTYPE_INT, 64);
    }
    if (c.has("tensor_scale")) set_tensor_scale(static_cast<uint32_t>(c.number("tensor_scale")));
    if (c.has("fixed_expert_scale")) {
      raw.fixed_expert_scale = add(c.array("fixed_expert_scale").bytes, NVTE_EP_DTYPE_FLOAT, 32);
    }
  }
  void set_tensor_scale(uint32_t bits) {
    raw.tensor_scale = add(bytes_of<uint32_t>({bits}), NVTE_EP_DTYPE_FLOAT, 32);
  }
  void set_row_count(int32_t rows) { raw.row_count = add(bytes_of<int32_t>({rows}), NVTE_EP_DTYPE_INT, 32); }
  void check_findings() const {
    int32_t findings;
    std::memcpy(&findings, findings_.content().data(), 4);
    EXPECT_EQ(findings, expected_findings_) << "findings";
  }
  nvte_ep_codec_options_t raw = NVTE_EP_CODEC_OPTIONS_INIT;

 private:
  const nvte_ep_tensor_t* add(const Bytes& content, int code, int bits) {
    inputs_.push_back(std::make_unique<Vector>(place_, content, code, bits));
    return &inputs_.back()->tensor;
  }
  Place place_;
  int32_t expected_findings_;
  Vector findings_;
  std::vector<std::unique_ptr<Vector>> inputs_;
};

// ---- tokens -----------------------------------------------------------------------------------------------

struct Dtype {
  int code, bits;
};
Dtype dtype_of(const std::string& name) {
  return std::array<Dtype, 3>{
      {{NVTE_EP_DTYPE_BFLOAT, 16},
       {NVTE_EP_DTYPE_FLOAT, 16},
       {NVTE_EP_DTYPE_FLOAT, 32}}}[static_cast<size_t>(choice(name, {"bfloat16", "float16", "float32"}))];
}

struct Tokens {
  int64_t rows, hidden;
  Dtype dtype;
  Bytes bytes;
};

// Tokens are stored, or made of all 16-bit codes by one of three rules.
Tokens tokens_of(const Case& c) {
  Tokens tokens{0, c.number("hidden"), dtype_of(c.text("dtype")), {}};
  const std::string input = c.text("input", "stored");
  if (input == "stored") {
    const Array stored = c.array("tokens");
    tokens.rows = stored.shape[0];
    tokens.bytes = stored.bytes;
    return tokens;
  }
  std::vector<uint16_t> codes;
  const size_t hidden = static_cast<size_t>(tokens.hidden);
  if (input == "in_order") {  // row after row
    for (int code = 0; code < 65536; ++code) codes.push_back(static_cast<uint16_t>(code));
  } else if (input == "alone") {  // [code, 0, 0, ...]
    codes.assign(65536 * hidden, 0);
    for (size_t code = 0; code < 65536; ++code) codes[code * hidden] = static_cast<uint16_t>(code);
  } else if (input ==
             "beside") {  // row r holds 256 codes from r % 256 * 256, 15 a block; `last` ends each block
    const std::vector<uint16_t> last = c.array("last").to<uint16_t>();
    for (size_t block = 0; block < last.size(); ++block) {
      const size_t row = block / (hidden / 16);
      const size_t first = block % (hidden / 16) * 15;
      for (size_t i = first; i < first + 15; ++i) {
        codes.push_back(static_cast<uint16_t>(i < 256 ? row % 256 * 256 + i : 0));
      }
      codes.push_back(last[block]);
    }
  } else {
    throw std::runtime_error("unknown input " + input);
  }
  tokens.rows = static_cast<int64_t>(codes.size() / hidden);
  tokens.bytes = bytes_of(codes);
  return tokens;
}

// ---- rows -------------------------------------------------------------------------------------------------

// What the functions of the two formats have in common.
struct Codec {
  int32_t format;
  int64_t block;
  decltype(&nvte_ep_nvfp4_pack) pack;
  decltype(&nvte_ep_nvfp4_unpack) unpack;
  decltype(&nvte_ep_nvfp4_direct_receive) direct_receive;
};
const Codec kNvfp4 = {NVTE_EP_FORMAT_NVFP4, 16, nvte_ep_nvfp4_pack, nvte_ep_nvfp4_unpack,
                      nvte_ep_nvfp4_direct_receive};
const Codec kMxfp8 = {NVTE_EP_FORMAT_MXFP8, 32, nvte_ep_mxfp8_pack, nvte_ep_mxfp8_unpack,
                      nvte_ep_mxfp8_direct_receive};

int64_t payload_bytes(const Codec& codec, int64_t hidden) {
  return codec.format == NVTE_EP_FORMAT_NVFP4 ? hidden / 2 : hidden;
}

int64_t row_bytes(const Codec& codec, int64_t hidden) {
  int64_t bytes = 0;
  EXPECT_OK(nvte_ep_row_bytes(codec.format, hidden, &bytes));
  return bytes;
}

// Columns [first, first + count) of rows.
Bytes columns_of(const Bytes& rows, int64_t row_bytes, int64_t first, int64_t count) {
  Bytes part;
  for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(row_bytes)) {
    const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(at) + first;
    part.insert(part.end(), begin, begin + count);
  }
  return part;
}

struct RowParts {
  Bytes payload, scales, token_scales;
};
RowParts split(const Codec& codec, const Bytes& rows, int64_t row_bytes, int64_t hidden) {
  const int64_t payload = payload_bytes(codec, hidden);
  const int64_t scales = hidden / codec.block;
  RowParts parts{columns_of(rows, row_bytes, 0, payload), columns_of(rows, row_bytes, payload, scales), {}};
  if (codec.format == NVTE_EP_FORMAT_NVFP4) {
    parts.token_scales = columns_of(rows, row_bytes, (payload + scales + 3) / 4 * 4, 4);
  }
  return parts;
}

Bytes with_pad_row(Bytes bytes, size_t row_bytes) {
  bytes.insert(bytes.end(), row_bytes, kUntouched);
  return bytes;
}

// Tokens to packed rows: compact, and then with gaps between rows, a base aligned to one element only and a
// last row that row_count excludes.
void check_pack(const Codec& codec, const Tokens& tokens, const Bytes& expected, Options& options,
                Place place) {
  const int64_t bytes = row_bytes(codec, tokens.hidden);
  const std::vector<int64_t> shape = {tokens.rows, bytes};
  {
    Matrix in(place, tokens.rows, tokens.hidden, tokens.dtype.code, tokens.dtype.bits);
    Matrix out(place, tokens.rows, bytes, NVTE_EP_DTYPE_UINT, 8);
    in.fill(tokens.bytes);
    EXPECT_OK(codec.pack(&in.tensor, &out.tensor, &options.raw, nullptr));
    expect_equal("pack", shape, 1, expected, out.content());
  }
  const size_t token_bytes = static_cast<size_t>(tokens.hidden * tokens.dtype.bits / 8);
  Matrix in(place, tokens.rows + 1, tokens.hidden, tokens.dtype.code, tokens.dtype.bits, 3, 1);
  Matrix out(place, tokens.rows + 1, bytes, NVTE_EP_DTYPE_UINT, 8, 16);
  in.fill(with_pad_row(tokens.bytes, token_bytes));
  options.set_row_count(static_cast<int32_t>(tokens.rows));
  EXPECT_OK(codec.pack(&in.tensor, &out.tensor, &options.raw, nullptr));
  expect_equal("pack with gaps", shape, 1, with_pad_row(expected, static_cast<size_t>(bytes)), out.content());
  options.raw.row_count = nullptr;
}

// Tokens to payload and scales apart. token_scales: whether the call asks for them.
void check_quantize(const Codec& codec, const Tokens& tokens, const RowParts& expected, bool token_scales,
                    Options& options, Place place) {
  const int64_t payload = payload_bytes(codec, tokens.hidden);
  const int64_t scales = tokens.hidden / codec.block;
  for (const int64_t gap : {0, 5}) {
    Matrix in(place, tokens.rows, tokens.hidden, tokens.dtype.code, tokens.dtype.bits, gap);
    Matrix payload_out(place, tokens.rows, payload, NVTE_EP_DTYPE_UINT, 8, gap);
    Matrix scales_out(place, tokens.rows, scales, NVTE_EP_DTYPE_UINT, 8, gap);
    Vector token_scales_out(place, Bytes(static_cast<size_t>(tokens.rows) * 4, kUntouched),
                            NVTE_EP_DTYPE_FLOAT, 32);
    in.fill(tokens.bytes);
    if (codec.format == NVTE_EP_FORMAT_NVFP4) {
      EXPECT_OK(nvte_ep_nvfp4_quantize(&in.tensor, &payload_out.tensor, &scales_out.tensor,
                                       token_scales ? &token_scales_out.tensor : nullptr, &options.raw,
                                       nullptr));
      const Bytes untouched(static_cast<size_t>(tokens.rows) * 4, kUntouched);
      expect_equal("token scales of quantize", {tokens.rows}, 4,
                   token_scales ? expected.token_scales : untouched, token_scales_out.content());
    } else {
      EXPECT_OK(
          nvte_ep_mxfp8_quantize(&in.tensor, &payload_out.tensor, &scales_out.tensor, &options.raw, nullptr));
    }
    expect_equal("payload of quantize", {tokens.rows, payload}, 1, expected.payload, payload_out.content());
    expect_equal("scales of quantize", {tokens.rows, scales}, 1, expected.scales, scales_out.content());
  }
}

// Rows as a case stores them: whole, or the bytes that can differ from zero.
Bytes expected_rows(const Codec& codec, const Case& c, int64_t hidden) {
  if (!c.has("kept")) {
    const Array rows = c.array("rows");
    EXPECT_EQ(rows.shape[1], row_bytes(codec, hidden)) << "row_bytes";
    return rows.bytes;
  }
  const Array kept = c.array("kept");
  const std::vector<int64_t> columns = c.numbers("kept_bytes");
  const size_t bytes = static_cast<size_t>(row_bytes(codec, hidden));
  Bytes rows(static_cast<size_t>(kept.shape[0]) * bytes, 0);
  for (size_t i = 0; i < kept.bytes.size(); ++i) {
    rows[i / columns.size() * bytes + static_cast<size_t>(columns[i % columns.size()])] = kept.bytes[i];
  }
  return rows;
}

void pack_case(const Codec& codec, const Case& c, Place place) {
  const Tokens tokens = tokens_of(c);
  const Bytes expected = expected_rows(codec, c, tokens.hidden);
  Options options(c, place);
  check_pack(codec, tokens, expected, options, place);
  RowParts parts = split(codec, expected, row_bytes(codec, tokens.hidden), tokens.hidden);
  check_quantize(codec, tokens, parts, true, options, place);
  if (c.has("scales_apart")) {
    parts.scales = c.array("scales_apart").bytes;
    check_quantize(codec, tokens, parts, false, options, place);
  }
  options.check_findings();
}

void illegal_tensor_scale_case(const Case& c, Place place) {
  const Tokens tokens = tokens_of(c);
  const Bytes expected = expected_rows(kNvfp4, c, tokens.hidden);
  const RowParts parts = split(kNvfp4, expected, row_bytes(kNvfp4, tokens.hidden), tokens.hidden);
  for (const uint32_t scale : c.array("tensor_scales").to<uint32_t>()) {
    SCOPED_TRACE("tensor scale " + std::to_string(scale));
    Options options(c, place);
    options.set_tensor_scale(scale);
    check_pack(kNvfp4, tokens, expected, options, place);
    options.check_findings();
    check_quantize(kNvfp4, tokens, parts, true, options, place);
    check_quantize(kNvfp4, tokens, parts, false, options, place);
    options.check_findings();
  }
}

void unpack_case(const Codec& codec, const Case& c, Place place) {
  const Array rows = c.array("rows");
  const int64_t hidden = c.number("hidden");
  const int64_t count = rows.shape[0];
  const int64_t bytes = rows.shape[1];
  ASSERT_EQ(bytes, row_bytes(codec, hidden)) << "row_bytes";
  const RowParts parts = split(codec, rows.bytes, bytes, hidden);
  for (const char* name : {"float32", "bfloat16", "float16"}) {
    SCOPED_TRACE(name);
    const Array expected = c.array(name);
    const Dtype dtype = dtype_of(name);
    Options options(c, place);
    {
      Matrix in(place, count, bytes, NVTE_EP_DTYPE_UINT, 8);
      Matrix out(place, count, hidden, dtype.code, dtype.bits);
      in.fill(rows.bytes);
      EXPECT_OK(codec.unpack(&in.tensor, &out.tensor, &options.raw, nullptr));
      expect_equal("unpack", expected, out.content());
    }
    {
      Matrix in(place, count + 1, bytes, NVTE_EP_DTYPE_UINT, 8, 16);
      Matrix out(place, count + 1, hidden, dtype.code, dtype.bits, 3, 1);
      in.fill(with_pad_row(rows.bytes, static_cast<size_t>(bytes)));
      options.set_row_count(static_cast<int32_t>(count));
      EXPECT_OK(codec.unpack(&in.tensor, &out.tensor, &options.raw, nullptr));
      expect_equal("unpack with gaps", expected.shape, expected.item_bytes(),
                   with_pad_row(expected.bytes, static_cast<size_t>(hidden * dtype.bits / 8)), out.content());
      options.raw.row_count = nullptr;
    }
    Matrix payload(place, count, payload_bytes(codec, hidden), NVTE_EP_DTYPE_UINT, 8, 1);
    Matrix scales(place, count, hidden / codec.block, NVTE_EP_DTYPE_UINT, 8, 1);
    Matrix out(place, count, hidden, dtype.code, dtype.bits);
    payload.fill(parts.payload);
    scales.fill(parts.scales);
    if (codec.format == NVTE_EP_FORMAT_NVFP4) {
      Vector token_scales(place, parts.token_scales, NVTE_EP_DTYPE_FLOAT, 32);
      EXPECT_OK(nvte_ep_nvfp4_dequantize(&payload.tensor, &scales.tensor, &token_scales.tensor, &out.tensor,
                                         &options.raw, nullptr));
    } else {
      EXPECT_OK(
          nvte_ep_mxfp8_dequantize(&payload.tensor, &scales.tensor, &out.tensor, &options.raw, nullptr));
    }
    expect_equal("dequantize", expected, out.content());
    options.check_findings();
  }
}

// ---- operands ---------------------------------------------------------------------------------------------

// Rows to an operand in one buffer: every byte of the buffer is compared, those that nobody may write too.
void receive_case(const Codec& codec, const Case& c, Place place) {
  const Array rows = c.array("rows");
  const std::vector<int64_t> counts = c.array("rows_per_expert").to<int64_t>();
  int64_t total = 0;
  for (const int64_t count : counts) total += count;
  Bytes payload = columns_of(rows.bytes, rows.shape[1], 0, payload_bytes(codec, c.number("hidden")));
  payload.resize(static_cast<size_t>(total * payload_bytes(codec, c.number("hidden"))));

  const bool columnwise = c.has("columnwise_payload");
  for (const bool linear : {false, true}) {
    SCOPED_TRACE(linear ? "linear scales" : "swizzled scales");
    nvte_ep_operand_config_t config = NVTE_EP_OPERAND_CONFIG_INIT;
    config.format = codec.format;
    config.scale_layout = linear ? NVTE_EP_SCALE_LAYOUT_LINEAR : NVTE_EP_SCALE_LAYOUT_SWIZZLED;
    config.hidden = c.number("hidden");
    config.capacity = rows.shape[0];
    config.num_experts = static_cast<int32_t>(counts.size());
    config.alignment = static_cast<int32_t>(c.number("alignment"));
    config.columnwise = columnwise ? 1 : 0;
    nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
    ASSERT_EQ(nvte_ep_operand_layout(&config, &layout), NVTE_EP_STATUS_OK) << nvte_ep_last_error();

    struct Part {
      const char* name;
      int64_t offset, bytes;
      std::vector<int64_t> shape;
      Bytes expected;
    };
    std::vector<Part> parts;
    parts.push_back({"payload",
                     layout.payload_offset,
                     layout.payload_bytes,
                     {total, payload_bytes(codec, config.hidden)},
                     payload});
    const auto stored = [&](const char* name, const std::string& key, int64_t offset, int64_t bytes) {
      if (!c.has(key)) {
        EXPECT_EQ(bytes, 0) << name << " is not in the case";
        return;
      }
      const Array expected = c.array(key);
      parts.push_back({name, offset, bytes, expected.shape, expected.bytes});
    };
    const std::string suffix = linear ? "_linear" : "_swizzled";
    stored("scales", "scales" + suffix, layout.scales_offset, layout.scales_bytes);
    stored("columnwise_payload", "columnwise_payload", layout.columnwise_payload_offset,
           layout.columnwise_payload_bytes);
    stored("columnwise_scales", "columnwise_scales" + suffix, layout.columnwise_scales_offset,
           layout.columnwise_scales_bytes);
    stored("amax", "amax", layout.amax_offset, layout.amax_bytes);
    stored("columnwise_amax", "columnwise_amax", layout.columnwise_amax_offset, layout.columnwise_amax_bytes);
    stored("expert_scale", "expert_scale", layout.expert_scale_offset, layout.expert_scale_bytes);
    stored("columnwise_expert_scale", "columnwise_expert_scale", layout.columnwise_expert_scale_offset,
           layout.columnwise_expert_scale_bytes);

    Buffer buffer(place, layout.total_bytes);
    const nvte_ep_tensor_t whole =
        nvte_ep_tensor_1d(buffer.data(), layout.total_bytes, NVTE_EP_DTYPE_UINT, 8,
                          place == Place::kHost ? NVTE_EP_DEVICE_CPU : NVTE_EP_DEVICE_CUDA, 0);
    nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
    ASSERT_EQ(nvte_ep_operand_bind(&config, &whole, &operand), NVTE_EP_STATUS_OK) << nvte_ep_last_error();
    Matrix in(place, rows.shape[0], rows.shape[1], NVTE_EP_DTYPE_UINT, 8, linear ? 16 : 0);
    in.fill(rows.bytes);
    const Bytes narrow = bytes_of(std::vector<int32_t>(counts.begin(), counts.end()));
    Vector rows_per_expert(place, linear ? narrow : bytes_of(counts), NVTE_EP_DTYPE_INT, linear ? 32 : 64);
    Options options(c, place);
    ASSERT_EQ(codec.direct_receive(&in.tensor, &rows_per_expert.tensor, &operand, &options.raw, nullptr),
              NVTE_EP_STATUS_OK)
        << nvte_ep_last_error();
    options.check_findings();

    Bytes got = buffer.content();
    for (const Part& part : parts) {
      ASSERT_LE(static_cast<int64_t>(part.expected.size()), part.bytes) << part.name;
      const auto begin = got.begin() + static_cast<std::ptrdiff_t>(part.offset);
      const auto end = begin + static_cast<std::ptrdiff_t>(part.expected.size());
      expect_equal(part.name, part.shape, 1, part.expected, Bytes(begin, end));
      std::fill(begin, end, kUntouched);
    }
    const auto written = std::find_if(got.begin(), got.end(), [](uint8_t b) { return b != kUntouched; });
    EXPECT_EQ(written, got.end()) << "byte " << written - got.begin()
                                  << " of the buffer, outside the slabs, was written";
  }
}

void swizzle_case(const Case& c, Place place) {
  const Array scales = c.array("scales");
  const Array swizzled = c.array("swizzled");
  const int64_t rows = scales.shape[0];
  const int64_t columns = scales.shape[1];
  if (c.has("index")) {
    const std::vector<int32_t> index = c.array("index").to<int32_t>();
    for (int64_t i = 0; i < rows * columns; ++i) {
      EXPECT_EQ(nvte_ep::swizzle_index(i / columns, i % columns, columns), index[static_cast<size_t>(i)])
          << "[" << i / columns << ", " << i % columns << "]";
    }
  }
  std::unique_ptr<Vector> counts;
  int64_t tile_rows = (rows + 127) / 128 * 128;
  if (c.has("rows_per_expert")) {
    const Array stored = c.array("rows_per_expert");
    tile_rows = (rows + 127 * stored.size()) / 128 * 128;
    counts = std::make_unique<Vector>(place, stored.bytes, NVTE_EP_DTYPE_INT, 64);
  }
  const nvte_ep_tensor_t* rows_per_expert = counts ? &counts->tensor : nullptr;
  Bytes expected(static_cast<size_t>((columns + 3) / 4 * 4 * tile_rows), kUntouched);
  std::copy(swizzled.bytes.begin(), swizzled.bytes.end(), expected.begin());
  for (const int64_t gap : {0, 3}) {
    Matrix in(place, rows, columns, NVTE_EP_DTYPE_UINT, 8, gap);
    in.fill(scales.bytes);
    Vector tiles(place, Bytes(expected.size(), kUntouched), NVTE_EP_DTYPE_UINT, 8);
    EXPECT_OK(nvte_ep_scales_swizzle(&in.tensor, rows_per_expert, &tiles.tensor, nullptr));
    expect_equal("swizzle", {static_cast<int64_t>(expected.size())}, 1, expected, tiles.content());
    Matrix back(place, rows, columns, NVTE_EP_DTYPE_UINT, 8, gap);
    EXPECT_OK(nvte_ep_scales_unswizzle(&tiles.tensor, rows_per_expert, &back.tensor, nullptr));
    expect_equal("unswizzle", scales, back.content());
  }
}

// ---- single functions -------------------------------------------------------------------------------------

// y = function(x), element by element.
template <typename Y, typename X, typename Function>
void table(const Case& c, Function&& function) {
  const std::vector<X> x = c.array("x").to<X>();
  const Array y = c.array("y");
  std::vector<Y> got;
  for (const X value : x) got.push_back(static_cast<Y>(function(value)));
  expect_equal("function", y, bytes_of(got));
}

// y[i] = function(i), for a function that gives an FP32 number.
template <typename Function>
void decode_table(const Case& c, Function&& function) {
  const Array y = c.array("y");
  std::vector<uint32_t> got;
  for (int64_t i = 0; i < y.size(); ++i)
    got.push_back(nvte_ep::float_bits(function(static_cast<uint8_t>(i))));
  expect_equal("decoded", y, bytes_of(got));
}

float as_float(uint32_t bits) { return nvte_ep::bits_float(bits); }

void e4m3_shift_down(const Case& c) {
  const Array y = c.array("y");
  Bytes got;
  for (int code = 0; code < 127; ++code) {
    for (int d = 0; d < 25; ++d) got.push_back(nvte_ep::e4m3_scale_exponent(static_cast<uint8_t>(code), d));
  }
  expect_equal("code, distance", y, got);
}

void e2m1_stochastic(const Case& c) {
  const Array y = c.array("y");
  Bytes got;
  for (const uint32_t x : c.array("x").to<uint32_t>()) {
    for (uint32_t random = 0; random < 256; ++random) {
      got.push_back(static_cast<uint8_t>(nvte_ep::float_to_e2m1_stochastic(as_float(x), random)));
    }
  }
  expect_equal("value, random byte", y, got);
}

void philox(const Case& c) {
  const std::vector<uint32_t> counter = c.array("counter").to<uint32_t>();
  const std::vector<uint32_t> key = c.array("key").to<uint32_t>();
  std::vector<uint32_t> got;
  for (size_t i = 0; i < key.size() / 2; ++i) {
    const nvte_ep::Philox4 words =
        nvte_ep::philox4x32_10(counter[4 * i], counter[4 * i + 1], counter[4 * i + 2], counter[4 * i + 3],
                               key[2 * i], key[2 * i + 1]);
    got.insert(got.end(), words.word, words.word + 4);
  }
  expect_equal("draw", c.array("y"), bytes_of(got));
}

void random_bytes(const Case& c) {
  const std::vector<int64_t> seed = c.array("seed").to<int64_t>();
  const std::vector<int64_t> offset = c.array("offset").to<int64_t>();
  const std::vector<int32_t> stream = c.array("stream").to<int32_t>();
  const std::vector<uint64_t> block_id = c.array("block_id").to<uint64_t>();
  Bytes got;
  for (size_t i = 0; i < seed.size(); ++i) {
    const nvte_ep::Philox4 draw =
        nvte_ep::random_block(static_cast<uint64_t>(seed[i]), static_cast<uint64_t>(offset[i]),
                              static_cast<nvte_ep::RandomStream>(stream[i]), block_id[i]);
    for (int element = 0; element < 16; ++element) got.push_back(static_cast<uint8_t>(draw.byte(element)));
  }
  expect_equal("draw, element", c.array("y"), got);
}

void hadamard(const Case& c) {
  std::vector<uint32_t> x = c.array("x").to<uint32_t>();
  std::vector<uint16_t> got;
  for (size_t i = 0; i < x.size(); i += 16) {
    float v[16];
    std::memcpy(v, &x[i], sizeof(v));
    nvte_ep::hadamard16(v);
    for (const float y : v) got.push_back(nvte_ep::float_to_bf16(y));
  }
  expect_equal("block, token", c.array("y"), bytes_of(got));
}

// ---- the cases --------------------------------------------------------------------------------------------

using Handler = std::function<void(const Case&, Place)>;
Handler on_host(std::function<void(const Case&)> function) {
  return [function](const Case& c, Place) { function(c); };
}

const std::map<std::string, Handler>& table_handlers() {
  using namespace nvte_ep;
  static const std::map<std::string, Handler> handlers = {
      {"e2m1_decode", on_host([](const Case& c) { decode_table(c, e2m1_to_float); })},
      {"e4m3_decode", on_host([](const Case& c) { decode_table(c, e4m3_to_float); })},
      {"e8m0_decode", on_host([](const Case& c) { decode_table(c, e8m0_to_float); })},
      {"e8m0_multiplier", on_host([](const Case& c) { decode_table(c, e8m0_inverse); })},
      {"e4m3_encode", on_host([](const Case& c) {
         table<uint8_t, uint32_t>(c, [](uint32_t x) { return float_to_e4m3(as_float(x)); });
       })},
      {"e4m3_encode_up", on_host([](const Case& c) {
         table<uint8_t, uint32_t>(c, [](uint32_t x) { return float_to_e4m3_up(as_float(x)); });
       })},
      {"e2m1_encode", on_host([](const Case& c) {
         table<uint8_t, uint32_t>(c, [](uint32_t x) { return float_to_e2m1(as_float(x)); });
       })},
      {"e8m0_encode", on_host([](const Case& c) {
         table<uint8_t, uint32_t>(c, [](uint32_t x) { return float_to_e8m0_up(as_float(x)); });
       })},
      {"mxfp8_scale", on_host([](const Case& c) {
         table<uint8_t, uint32_t>(c, [](uint32_t x) { return Mxfp8::scale(as_float(x)); });
       })},
      {"token_exponent", on_host([](const Case& c) {
         table<int8_t, uint32_t>(c, [](uint32_t x) { return Nvfp4::token_exponent(as_float(x)); });
       })},
      {"bf16_round", on_host([](const Case& c) {
         table<uint16_t, uint32_t>(c, [](uint32_t x) { return float_to_bf16(as_float(x)); });
       })},
      {"fp16_round", on_host([](const Case& c) {
         table<uint16_t, uint32_t>(c, [](uint32_t x) { return float_to_fp16(as_float(x)); });
       })},
      {"e4m3_shift_down", on_host(e4m3_shift_down)},
      {"e2m1_stochastic", on_host(e2m1_stochastic)},
      {"philox", on_host(philox)},
      {"random_bytes", on_host(random_bytes)},
      {"hadamard", on_host(hadamard)},
  };
  return handlers;
}

const std::map<std::string, Handler>& codec_handlers() {
  static const std::map<std::string, Handler> handlers = {
      {"nvfp4_pack", [](const Case& c, Place place) { pack_case(kNvfp4, c, place); }},
      {"mxfp8_pack", [](const Case& c, Place place) { pack_case(kMxfp8, c, place); }},
      {"nvfp4_illegal_tensor_scale", illegal_tensor_scale_case},
      {"nvfp4_unpack", [](const Case& c, Place place) { unpack_case(kNvfp4, c, place); }},
      {"mxfp8_unpack", [](const Case& c, Place place) { unpack_case(kMxfp8, c, place); }},
      {"nvfp4_receive", [](const Case& c, Place place) { receive_case(kNvfp4, c, place); }},
      {"mxfp8_receive", [](const Case& c, Place place) { receive_case(kMxfp8, c, place); }},
      {"swizzle", swizzle_case},
  };
  return handlers;
}

struct Run {
  Case golden_case;
  Place place;
};
std::ostream& operator<<(std::ostream& stream, const Run& run) { return stream << run.golden_case.name(); }

// Empty where the index cannot be read; GoldenIndex.Complete then says why.
std::vector<Run> runs() {
  std::vector<Run> all;
  try {
    for (const Case& c : golden::read_index()) {
      all.push_back({c, Place::kHost});
#if defined(NVTE_EP_WITH_CUDA)
      if (table_handlers().count(c.kind()) == 0) all.push_back({c, Place::kCuda});
#endif
    }
  } catch (const std::exception&) {
  }
  return all;
}

class Golden : public testing::TestWithParam<Run> {};

TEST_P(Golden, Bytes) {
  const Case& c = GetParam().golden_case;
  SCOPED_TRACE(c.name());
#if defined(NVTE_EP_WITH_CUDA)
  int devices = 0;
  if (GetParam().place == Place::kCuda && (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)) {
    const char* required = std::getenv("NVTE_EP_REQUIRE");
    if (required == nullptr || std::strstr(required, "cuda") == nullptr) GTEST_SKIP() << "no CUDA device";
    FAIL() << "NVTE_EP_REQUIRE asks for CUDA, but there is no device";
  }
#endif
  const auto in_table = table_handlers().find(c.kind());
  const auto in_codec = codec_handlers().find(c.kind());
  const bool known = in_table != table_handlers().end() || in_codec != codec_handlers().end();
  ASSERT_TRUE(known) << "no test knows cases of kind " << c.kind();
  (in_table != table_handlers().end() ? in_table : in_codec)->second(c, GetParam().place);
  for (const std::string& key : c.unread()) ADD_FAILURE() << "the test did not read " << key;
}

INSTANTIATE_TEST_SUITE_P(Cases, Golden, testing::ValuesIn(runs()),
                         [](const testing::TestParamInfo<Run>& info) {
                           return info.param.golden_case.name() +
                                  (info.param.place == Place::kCuda ? "_cuda" : "");
                         });

TEST(GoldenIndex, Complete) {
  std::map<std::string, int> kinds;
  for (const Case& c : golden::read_index()) ++kinds[c.kind()];
  for (const auto* handlers : {&table_handlers(), &codec_handlers()}) {
    for (const auto& handler : *handlers)
      EXPECT_GT(kinds[handler.first], 0) << "no case of kind " << handler.first;
  }
  // A format with scales has vectors for each of its functions.
  for (int32_t format = 0;; ++format) {
    nvte_ep_format_info_t info = NVTE_EP_FORMAT_INFO_INIT;
    if (nvte_ep_format_info(format, &info) == NVTE_EP_STATUS_UNSUPPORTED) break;
    if (info.scale_bytes == 0) continue;
    for (const char* function : {"_pack", "_unpack", "_receive"}) {
      EXPECT_GT(kinds[std::string(info.name) + function], 0) << "no vectors for " << info.name << function;
    }
  }
}

}  // namespace
