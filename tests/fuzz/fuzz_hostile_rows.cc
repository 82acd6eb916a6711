// Hostile bytes and counts: whatever packed rows, scales and counts hold, a codec returns a status, writes its outputs and
// nothing else, gives the same bytes again, and follows nothing that it was given. LLVMFuzzerTestOneInput is libFuzzer's
// entry; replay.cc calls it with inputs of its own. Build with sanitizers: reads out of bounds are theirs to find.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "nvte_ep/nvte_ep.h"

namespace {

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "fuzz_hostile_rows: %s (last error: \"%s\")\n", what, nvte_ep_last_error());
  std::abort();
}

// The input as a stream of choices; zeros when it has run out.
class Choices {
 public:
  Choices(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  int below(int n) { return byte() % n; }
  template <typename T>
  T value() {
    T out{};
    uint8_t bytes[sizeof(T)];
    for (uint8_t& b : bytes) b = byte();
    std::memcpy(&out, bytes, sizeof(out));
    return out;
  }
  // n bytes: what is left of the input, over and over.
  void fill(uint8_t* out, size_t n) {
    const size_t left = size_ - at_;
    for (size_t i = 0; i < n; ++i) out[i] = left ? data_[at_ + i % left] : static_cast<uint8_t>(i * 37);
  }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

// Memory aligned to 256 bytes, with guards that must stay as they are.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    base_.reset(static_cast<uint8_t*>(std::aligned_alloc(256, (bytes_ + 3 * kGuard) / 256 * 256)));
    std::memset(base_.get(), kGuardByte, kGuard);
    std::memset(data(), kGuardByte, bytes_ + kGuard);
  }
  uint8_t* data() const { return base_.get() + kGuard; }
  size_t size() const { return bytes_; }
  std::vector<uint8_t> content() const { return std::vector<uint8_t>(data(), data() + bytes_); }
  void check_guards() const {
    for (size_t i = 0; i < kGuard; ++i) {
      if (base_.get()[i] != kGuardByte || data()[bytes_ + i] != kGuardByte)
        fail("bytes outside a buffer were written");
    }
  }
  bool untouched_from(size_t begin) const {
    return std::all_of(data() + begin, data() + bytes_, [](uint8_t b) { return b == kGuardByte; });
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr uint8_t kGuardByte = 0xA5;
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  size_t bytes_;
  std::unique_ptr<uint8_t, Free> base_;
};

nvte_ep_tensor_t matrix(const Buffer& buffer, int64_t rows, int64_t columns, int code, int bits) {
  return nvte_ep_tensor_2d(buffer.data(), rows, columns, code, bits, NVTE_EP_DEVICE_CPU, 0);
}
nvte_ep_tensor_t vector(const Buffer& buffer, int64_t size, int code, int bits) {
  return nvte_ep_tensor_1d(buffer.data(), size, code, bits, NVTE_EP_DEVICE_CPU, 0);
}

void expect_status(nvte_ep_status_t status) {
  if (status == NVTE_EP_STATUS_OK && nvte_ep_last_error()[0] != '\0') fail("a success with a text");
  if (status == NVTE_EP_STATUS_OK) return;
  if (status != NVTE_EP_STATUS_INVALID_ARGUMENT && status != NVTE_EP_STATUS_UNSUPPORTED)
    fail("an unexpected status");
  if (std::string(nvte_ep_last_error()).find("nvte_ep_") != 0)
    fail("a failure that does not name its function");
}

// Counts as they come, or close to what fits, int32 or int64.
struct Counts {
  Counts(Choices* in, int n, int64_t near)
      : wide(in->below(2) == 1),
        buffer(n * (wide ? 8 : 4)),
        tensor(vector(buffer, n, NVTE_EP_DTYPE_INT, wide ? 64 : 32)) {
    for (int i = 0; i < n; ++i) {
      int64_t count = in->value<int64_t>();
      const int kind = in->below(4);
      if (kind < 2) count = near / n + count % 3;
      if (kind == 2) count = count % (2 * near + 1);
      if (wide) {
        std::memcpy(buffer.data() + 8 * i, &count, 8);
      } else {
        const int32_t narrow = static_cast<int32_t>(count);
        std::memcpy(buffer.data() + 4 * i, &narrow, 4);
      }
    }
  }
  bool wide;
  Buffer buffer;
  nvte_ep_tensor_t tensor;
};

struct Format {
  int32_t id;
  decltype(&nvte_ep_nvfp4_pack) pack;
  decltype(&nvte_ep_nvfp4_unpack) unpack;
  decltype(&nvte_ep_nvfp4_direct_receive) direct_receive;
};
constexpr Format kFormats[] = {
    {NVTE_EP_FORMAT_MXFP8, nvte_ep_mxfp8_pack, nvte_ep_mxfp8_unpack, nvte_ep_mxfp8_direct_receive},
    {NVTE_EP_FORMAT_NVFP4, nvte_ep_nvfp4_pack, nvte_ep_nvfp4_unpack, nvte_ep_nvfp4_direct_receive}};
constexpr int kTokenTypes[][2] = {
    {NVTE_EP_DTYPE_BFLOAT, 16}, {NVTE_EP_DTYPE_FLOAT, 16}, {NVTE_EP_DTYPE_FLOAT, 32}};

// Options that point at hostile values.
struct Options {
  Options(Choices* in, int experts, int64_t rows)
      : rng(16), tensor_scale(4), expert_scale(4 * experts), findings(4), count(in, 1, rows) {
    rng_tensor = vector(rng, 2, NVTE_EP_DTYPE_INT, 64);
    tensor_scale_tensor = vector(tensor_scale, 1, NVTE_EP_DTYPE_FLOAT, 32);
    expert_scale_tensor = vector(expert_scale, experts, NVTE_EP_DTYPE_FLOAT, 32);
    findings_tensor = vector(findings, 1, NVTE_EP_DTYPE_INT, 32);
    for (Buffer* buffer : {&rng, &tensor_scale, &expert_scale}) {
      for (size_t i = 0; i < buffer->size(); ++i) buffer->data()[i] = in->byte();
    }
    const uint8_t bits = in->byte();
    value.rounding = bits & 1;
    value.nonfinite = bits >> 1 & 1;
    value.scale_rounding = bits >> 2 & 1;
    value.column_bound = bits >> 3 & 1;
    value.rank = in->value<uint16_t>() % 1024;
    value.row_id_base = in->value<int64_t>() & INT64_MAX;
    value.rng_state = &rng_tensor;
    value.findings = &findings_tensor;
    if (bits & 16) value.tensor_scale = &tensor_scale_tensor;
    if (bits & 32) value.fixed_expert_scale = &expert_scale_tensor;
    if (bits & 64) value.row_count = &count.tensor;
    clear_findings();
  }
  void clear_findings() { std::memset(findings.data(), 0, 4); }
  Buffer rng, tensor_scale, expert_scale, findings;
  Counts count;
  nvte_ep_tensor_t rng_tensor, tensor_scale_tensor, expert_scale_tensor, findings_tensor;
  nvte_ep_codec_options_t value = NVTE_EP_CODEC_OPTIONS_INIT;
};

// Runs a call twice from the same state; its outputs must be equal and guarded.
template <typename Run>
nvte_ep_status_t twice(const std::vector<Buffer*>& outputs, const Run& run) {
  std::vector<std::vector<uint8_t>> before, first;
  for (Buffer* output : outputs) before.push_back(output->content());
  const nvte_ep_status_t status = run();
  expect_status(status);
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i]->check_guards();
    first.push_back(outputs[i]->content());
    if (status != NVTE_EP_STATUS_OK && first[i] != before[i]) fail("a refused call wrote");
    std::copy(before[i].begin(), before[i].end(), outputs[i]->data());
  }
  if (run() != status) fail("another status for the same input");
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i]->check_guards();
    if (outputs[i]->content() != first[i]) fail("other bytes for the same input");
  }
  return status;
}

void fuzz_rows(Choices* in, const Format& format, int64_t hidden, int64_t tokens) {
  int64_t row_bytes = 0;
  if (nvte_ep_row_bytes(format.id, hidden, &row_bytes) != NVTE_EP_STATUS_OK) return;
  const int64_t stride = row_bytes + 16 * in->below(3);
  Options options(in, 1, tokens);
  const int* type = kTokenTypes[in->below(3)];
  Buffer rows(tokens * stride), values(tokens * hidden * type[1] / 8);
  nvte_ep_tensor_t rows_tensor = matrix(rows, tokens, row_bytes, NVTE_EP_DTYPE_UINT, 8);
  rows_tensor.strides[0] = stride;
  rows_tensor.strides[1] = 1;
  nvte_ep_tensor_t values_tensor = matrix(values, tokens, hidden, type[0], type[1]);
  const bool pack = in->below(3) == 0;
  Buffer& source = pack ? values : rows;
  in->fill(source.data(), source.size());
  const auto run = [&] {
    options.clear_findings();
    return pack ? format.pack(&values_tensor, &rows_tensor, &options.value, nullptr)
                : format.unpack(&rows_tensor, &values_tensor, &options.value, nullptr);
  };
  twice({pack ? &rows : &values, &options.findings}, run);
}

void fuzz_apart(Choices* in, int64_t hidden, int64_t tokens) {
  Options options(in, 1, tokens);
  const int* type = kTokenTypes[in->below(3)];
  Buffer payload(tokens * hidden / 2), scales(tokens * hidden / 16), token_scales(tokens * 4),
      values(tokens * hidden * type[1] / 8);
  nvte_ep_tensor_t payload_tensor = matrix(payload, tokens, hidden / 2, NVTE_EP_DTYPE_UINT, 8);
  nvte_ep_tensor_t scales_tensor = matrix(scales, tokens, hidden / 16, NVTE_EP_DTYPE_UINT, 8);
  nvte_ep_tensor_t token_scales_tensor = vector(token_scales, tokens, NVTE_EP_DTYPE_FLOAT, 32);
  nvte_ep_tensor_t values_tensor = matrix(values, tokens, hidden, type[0], type[1]);
  for (Buffer* buffer : {&payload, &scales, &token_scales}) in->fill(buffer->data(), buffer->size());
  nvte_ep_tensor_t* given = in->below(2) ? &token_scales_tensor : nullptr;
  twice({&values, &options.findings}, [&] {
    options.clear_findings();
    return nvte_ep_nvfp4_dequantize(&payload_tensor, &scales_tensor, given, &values_tensor, &options.value,
                                    nullptr);
  });
}

void fuzz_direct_receive(Choices* in, const Format& format, int64_t hidden, int64_t tokens) {
  nvte_ep_operand_config_t config = NVTE_EP_OPERAND_CONFIG_INIT;
  config.format = format.id;
  config.scale_layout = in->below(2);
  config.hidden = hidden;
  config.num_experts = 1 + in->below(6);
  config.alignment = 1 << in->below(9);
  config.capacity = (tokens + config.alignment - 1) / config.alignment * config.alignment;
  config.columnwise = in->below(2);
  nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
  int64_t row_bytes = 0;
  const nvte_ep_status_t described = nvte_ep_operand_layout(&config, &layout);
  expect_status(described);
  if (described != NVTE_EP_STATUS_OK || nvte_ep_row_bytes(format.id, hidden, &row_bytes) != NVTE_EP_STATUS_OK)
    return;
  Buffer buffer(layout.total_bytes), rows(tokens * row_bytes);
  nvte_ep_tensor_t buffer_tensor = vector(buffer, layout.total_bytes, NVTE_EP_DTYPE_UINT, 8);
  nvte_ep_tensor_t rows_tensor = matrix(rows, tokens, row_bytes, NVTE_EP_DTYPE_UINT, 8);
  nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
  if (nvte_ep_operand_bind(&config, &buffer_tensor, &operand) != NVTE_EP_STATUS_OK)
    fail("an operand that does not bind");
  const uint8_t parts = in->byte();  // some parts are not wanted
  if (parts & 1) operand.payload = nullptr;
  if (parts & 2) operand.scales = nullptr;
  if (parts & 4) operand.columnwise_payload = nullptr;
  if (parts & 8) operand.columnwise_scales = nullptr;
  if (parts & 16) operand.amax = nullptr;
  Options options(in, config.num_experts, tokens);
  Counts counts(in, config.num_experts, tokens);
  in->fill(rows.data(), rows.size());
  const nvte_ep_status_t status = twice({&buffer, &options.findings}, [&] {
    options.clear_findings();
    return format.direct_receive(&rows_tensor, &counts.tensor, &operand, &options.value, nullptr);
  });
  if (status == NVTE_EP_STATUS_OK && operand.payload != nullptr) {
    // The payload of rows past the given ones is never written.
    const int64_t payload_row = layout.payload_bytes / std::max<int64_t>(config.capacity, 1);
    for (int64_t i = tokens * payload_row; i < layout.payload_bytes; ++i) {
      if (buffer.data()[layout.payload_offset + i] != 0xA5) fail("slots past the rows were written");
    }
  }
}

void fuzz_swizzle(Choices* in, int64_t tokens) {
  const int64_t columns = 1 + in->below(40);
  const int experts = in->below(5);
  const int64_t tile_rows = experts ? (tokens + 127 * experts) / 128 * 128 : (tokens + 127) / 128 * 128;
  Counts counts(in, std::max(experts, 1), tokens);
  Buffer scales(tokens * columns), tiles(tile_rows * ((columns + 3) / 4 * 4));
  nvte_ep_tensor_t scales_tensor = matrix(scales, tokens, columns, NVTE_EP_DTYPE_UINT, 8);
  nvte_ep_tensor_t tiles_tensor = vector(tiles, static_cast<int64_t>(tiles.size()), NVTE_EP_DTYPE_UINT, 8);
  const nvte_ep_tensor_t* rows_per_expert = experts ? &counts.tensor : nullptr;
  in->fill(scales.data(), scales.size());
  const std::vector<uint8_t> given = scales.content();
  if (twice({&tiles}, [&] {
        return nvte_ep_scales_swizzle(&scales_tensor, rows_per_expert, &tiles_tensor, nullptr);
      }) != NVTE_EP_STATUS_OK) {
    fail("swizzle refused what it must take");
  }
  if (twice({&scales}, [&] {
        return nvte_ep_scales_unswizzle(&tiles_tensor, rows_per_expert, &scales_tensor, nullptr);
      }) != NVTE_EP_STATUS_OK) {
    fail("unswizzle refused what it must take");
  }
  if (scales.content() != given) fail("unswizzle(swizzle(x)) is not x");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Choices in(data, size);
  const int kind = in.below(4);
  const Format& format = kFormats[in.below(2)];
  const int64_t hidden = 16 * (1 + in.below(20));
  const int64_t tokens = in.below(70);
  switch (kind) {
    case 0:
      fuzz_rows(&in, format, hidden, tokens);
      break;
    case 1:
      fuzz_direct_receive(&in, format, hidden, tokens);
      break;
    case 2:
      fuzz_swizzle(&in, tokens);
      break;
    default:
      fuzz_apart(&in, hidden, tokens);
      break;
  }
  return 0;
}
