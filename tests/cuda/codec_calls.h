// Codec calls on both backends, over mirrors.
#ifndef NVTE_EP_TESTS_CUDA_CODEC_CALLS_H_
#define NVTE_EP_TESTS_CUDA_CODEC_CALLS_H_

#include "mirror.h"

namespace nvte_ep::testing {

// Options whose pointers lie in both memories.
struct Options {
  CodecOptions plain;
  std::unique_ptr<Mirror> rng_state, tensor_scale, fixed_expert_scale, row_count, findings;

  CodecOptions on(bool cuda) const {
    CodecOptions o = plain;
    if (rng_state) o.rng_state = reinterpret_cast<const int64_t*>(rng_state->on(cuda));
    if (tensor_scale) o.tensor_scale = reinterpret_cast<const float*>(tensor_scale->on(cuda));
    if (fixed_expert_scale)
      o.fixed_expert_scale = reinterpret_cast<const float*>(fixed_expert_scale->on(cuda));
    if (row_count) o.row_count = IndexView{row_count->on(cuda), plain.row_count.is_int64};
    if (findings) o.findings = reinterpret_cast<int32_t*>(findings->on(cuda));
    return o;
  }
  void with_findings() { findings = Mirror::of(std::vector<int32_t>{0}); }
  void with_rng(int64_t seed, int64_t offset) {
    plain.stochastic = true;
    rng_state = Mirror::of(std::vector<int64_t>{seed, offset});
  }
  void with_row_count(int64_t count, bool is_int64) {
    plain.row_count.is_int64 = is_int64;
    row_count = is_int64 ? Mirror::of(std::vector<int64_t>{count})
                         : Mirror::of(std::vector<int32_t>{static_cast<int32_t>(count)});
  }
};

// Rows in both memories, packed or apart.
struct Rows {
  int32_t format;
  int64_t rows, hidden;
  bool packed;
  RowLayout layout;
  int64_t payload_stride, scales_stride;
  std::unique_ptr<Mirror> payload, scales, token_scales;  // packed: the first holds all

  Rows(int32_t format_in, int64_t rows_in, int64_t hidden_in, bool packed_in, bool token_scale = true,
       int64_t extra = 0, size_t offset = 0)
      : format(format_in),
        rows(rows_in),
        hidden(hidden_in),
        packed(packed_in),
        layout(row_layout(*find_format(format_in), hidden_in)) {
    if (packed) {
      payload_stride = scales_stride = layout.row_bytes + extra;
      payload = std::make_unique<Mirror>(static_cast<size_t>(rows * payload_stride));
      return;
    }
    payload_stride = layout.payload_bytes + extra;
    scales_stride = layout.scale_bytes + extra;
    payload = std::make_unique<Mirror>(static_cast<size_t>(rows * payload_stride), offset);
    scales = std::make_unique<Mirror>(static_cast<size_t>(rows * scales_stride), offset);
    if (layout.token_scale_bytes && token_scale)
      token_scales = std::make_unique<Mirror>(static_cast<size_t>(rows * 4));
  }
  RowsView on(bool cuda) {
    if (packed) return packed_rows(format, payload->on(cuda), payload_stride, rows, hidden);
    RowsView v;
    v.payload = payload->on(cuda);
    v.payload_stride = payload_stride;
    v.scales = layout.scale_bytes ? scales->on(cuda) : nullptr;
    v.scales_stride = scales_stride;
    v.token_scales = token_scales ? token_scales->on(cuda) : nullptr;
    v.token_scale_stride = 4;
    v.rows = rows;
    v.hidden = hidden;
    return v;
  }
  ::testing::AssertionResult equal() {
    const auto place = [this](size_t byte) {
      const int64_t row = static_cast<int64_t>(byte) / payload_stride,
                    at = static_cast<int64_t>(byte) % payload_stride;
      std::string what =
          at < layout.payload_bytes
              ? "payload, element " + std::to_string(at * 8 / find_format(format)->payload_bits)
          : at < layout.payload_bytes + layout.scale_bytes
              ? "scale " + std::to_string((at - layout.payload_bytes))
              : "token scale or pad, byte " + std::to_string(at - layout.payload_bytes - layout.scale_bytes);
      return "row " + std::to_string(row) + ", " + what;
    };
    ::testing::AssertionResult result = payload->equal(packed ? "rows" : "payload", place);
    if (!result || packed) return result;
    result = scales->equal("scales", [this](size_t byte) {
      return "row " + std::to_string(byte / scales_stride) + ", scale " +
             std::to_string(byte % scales_stride);
    });
    if (result && token_scales) result = token_scales->equal("token_scales");
    return result;
  }
};

struct Tokens {
  DType dtype;
  int64_t rows, hidden, stride;
  std::unique_ptr<Mirror> data;

  Tokens(DType dtype_in, int64_t rows_in, int64_t hidden_in, int64_t stride_in, size_t offset = 0)
      : dtype(dtype_in),
        rows(rows_in),
        hidden(hidden_in),
        stride(stride_in),
        data(std::make_unique<Mirror>(static_cast<size_t>(rows_in * stride_in * dtype_bytes(dtype_in)),
                                      offset)) {}
  void set(const std::vector<float>& x) {
    const std::vector<uint8_t> bytes = to_bytes(x, dtype, rows, hidden, stride);
    if (!bytes.empty()) std::memcpy(data->host(), bytes.data(), bytes.size());
    data->upload();
  }
  TensorView on(bool cuda) {
    TensorView v;
    v.data = data->on(cuda);
    v.dtype = dtype;
    v.device = cuda ? Device{NVTE_EP_DEVICE_CUDA, 0} : Device();
    v.ndim = 2;
    v.shape[0] = rows;
    v.shape[1] = hidden;
    v.stride = stride;
    return v;
  }
  ::testing::AssertionResult equal(const char* name = "tokens") {
    return data->equal(name, [this](size_t byte) {
      const size_t element = byte / static_cast<size_t>(dtype_bytes(dtype));
      return "token " + std::to_string(element / stride) + ", element " + std::to_string(element % stride);
    });
  }
};

// An operand in one buffer in both memories.
struct Operand {
  OperandShape shape;
  bool columnwise;
  nvte_ep_operand_layout_t layout;
  std::unique_ptr<Mirror> buffer;

  Operand(const OperandShape& shape_in, bool columnwise_in)
      : shape(shape_in),
        columnwise(columnwise_in),
        layout(operand_layout(shape_in, columnwise_in)),
        buffer(std::make_unique<Mirror>(static_cast<size_t>(layout.total_bytes))) {}
  OperandView on(bool cuda) {
    OperandView v;
    v.shape = shape;
    v.device = cuda ? Device{NVTE_EP_DEVICE_CUDA, 0} : Device();
    uint8_t* base = buffer->on(cuda);
    v.payload = base + layout.payload_offset;
    v.scales = base + layout.scales_offset;
    const bool second = shape.traits().token_scale_bytes != 0;
    if (second) {
      v.amax = reinterpret_cast<float*>(base + layout.amax_offset);
      v.expert_scale = reinterpret_cast<float*>(base + layout.expert_scale_offset);
    }
    if (columnwise) {
      v.columnwise_payload = base + layout.columnwise_payload_offset;
      v.columnwise_scales = base + layout.columnwise_scales_offset;
      if (second) {
        v.columnwise_amax = reinterpret_cast<float*>(base + layout.columnwise_amax_offset);
        v.columnwise_expert_scale = reinterpret_cast<float*>(base + layout.columnwise_expert_scale_offset);
      }
    }
    return v;
  }
  ::testing::AssertionResult equal() {
    return buffer->equal("operand", [this](size_t byte) {
      const struct {
        const char* name;
        int64_t offset, bytes;
      } parts[] = {{"payload", layout.payload_offset, layout.payload_bytes},
                   {"scales", layout.scales_offset, layout.scales_bytes},
                   {"columnwise_payload", layout.columnwise_payload_offset, layout.columnwise_payload_bytes},
                   {"columnwise_scales", layout.columnwise_scales_offset, layout.columnwise_scales_bytes},
                   {"amax", layout.amax_offset, layout.amax_bytes},
                   {"columnwise_amax", layout.columnwise_amax_offset, layout.columnwise_amax_bytes},
                   {"expert_scale", layout.expert_scale_offset, layout.expert_scale_bytes},
                   {"columnwise_expert_scale", layout.columnwise_expert_scale_offset,
                    layout.columnwise_expert_scale_bytes}};
      std::string where = "between parts";
      for (const auto& p : parts) {
        const int64_t at = static_cast<int64_t>(byte) - p.offset;
        if (p.bytes > 0 && at >= 0 && at < p.bytes) {
          where = std::string(p.name) + " + " + std::to_string(at);
          if (p.offset == layout.payload_offset) {
            where += ": slot " + std::to_string(at / shape.row().payload_bytes) + ", byte " +
                     std::to_string(at % shape.row().payload_bytes);
          }
        }
      }
      return where;
    });
  }
};

}  // namespace nvte_ep::testing

#endif  // NVTE_EP_TESTS_CUDA_CODEC_CALLS_H_
