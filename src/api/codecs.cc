// Codecs: packed rows, payload and scales apart, and back. One function per shape of call; the exported ones name the format.
#include <limits>

#include "api/guard.h"
#include "api/options.h"
#include "core/backend.h"
#include "core/struct_reader.h"

using namespace nvte_ep;

namespace {

const FormatRow& traits_of(int32_t format) { return *find_format(format); }

// The first argument decides the device; everything else must lie there too.
Status start(const Device& device, nvte_ep_stream_t stream, const nvte_ep_codec_options_t* options,
             int32_t format, Backend** backend, CodecOptions* codec) {
  NVTE_EP_TRY(find_backend(device, 0, backend));
  NVTE_EP_TRY(check_stream(device, stream));
  NVTE_EP_TRY(read_codec_options(options, device, -1, codec));
  return check_format_options(traits_of(format), *codec);
}

Status read_packed(const Device& device, const nvte_ep_tensor_t* tensor, int32_t format, int64_t rows,
                   int64_t hidden, RowsView* view) {
  TensorView t;
  NVTE_EP_TRY(read_tensor_on(
      device, tensor, {"rows", {DType::kUInt8}, 2, rows, row_layout(traits_of(format), hidden).row_bytes, 16},
      &t));
  *view = packed_rows(format, t.data, t.stride, t.rows(), hidden);
  return Status();
}

Status read_apart(const Device& device, int32_t format, int64_t rows, int64_t hidden,
                  const nvte_ep_tensor_t* payload, const nvte_ep_tensor_t* scales,
                  const nvte_ep_tensor_t* token_scales, bool needs_token_scales, RowsView* view) {
  const RowLayout layout = row_layout(traits_of(format), hidden);
  TensorView p, s, t;
  NVTE_EP_TRY(
      read_tensor_on(device, payload, {"payload", {DType::kUInt8}, 2, rows, layout.payload_bytes}, &p));
  NVTE_EP_TRY(read_tensor_on(device, scales, {"scales", {DType::kUInt8}, 2, rows, layout.scale_bytes}, &s));
  view->payload = static_cast<uint8_t*>(p.data);
  view->payload_stride = p.stride;
  view->scales = static_cast<uint8_t*>(s.data);
  view->scales_stride = s.stride;
  view->rows = rows;
  view->hidden = hidden;
  if (token_scales != nullptr) {
    NVTE_EP_TRY(read_tensor_on(device, token_scales, {"token_scales", {DType::kFloat32}, 1, rows}, &t));
    view->token_scales = static_cast<uint8_t*>(t.data);
    view->token_scale_stride = 4;
  } else if (needs_token_scales) {
    return invalid_argument("token_scales: expected float32 [", rows,
                            "] unless options.tensor_scale is given, got NULL");
  }
  return Status();
}

Status pack(int32_t format, const nvte_ep_tensor_t* tokens, nvte_ep_tensor_t* rows,
            const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream) {
  TensorView x;
  RowsView out;
  Backend* backend;
  CodecOptions codec;
  NVTE_EP_TRY(read_tensor(tokens, {"tokens", kTokenDTypes, 2}, &x));
  NVTE_EP_TRY(check_hidden(traits_of(format), x.columns(), "tokens"));
  NVTE_EP_TRY(start(x.device, stream, options, format, &backend, &codec));
  NVTE_EP_TRY(read_packed(x.device, rows, format, x.rows(), x.columns(), &out));
  return x.rows() == 0 ? Status() : backend->quantize(format, x, out, codec, stream);
}

Status unpack(int32_t format, const nvte_ep_tensor_t* rows, nvte_ep_tensor_t* tokens,
              const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream) {
  TensorView x;
  RowsView in;
  Backend* backend;
  CodecOptions codec;
  NVTE_EP_TRY(read_tensor(tokens, {"tokens", kTokenDTypes, 2}, &x));
  NVTE_EP_TRY(check_hidden(traits_of(format), x.columns(), "tokens"));
  NVTE_EP_TRY(start(x.device, stream, options, format, &backend, &codec));
  codec.tensor_scale = nullptr;  // packed rows carry theirs
  NVTE_EP_TRY(read_packed(x.device, rows, format, x.rows(), x.columns(), &in));
  return x.rows() == 0 ? Status() : backend->dequantize(format, in, x, codec, RowWeighting(), stream);
}

Status quantize(int32_t format, const nvte_ep_tensor_t* tokens, nvte_ep_tensor_t* payload,
                nvte_ep_tensor_t* scales, nvte_ep_tensor_t* token_scales,
                const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream) {
  TensorView x;
  RowsView out;
  Backend* backend;
  CodecOptions codec;
  NVTE_EP_TRY(read_tensor(tokens, {"tokens", kTokenDTypes, 2}, &x));
  NVTE_EP_TRY(check_hidden(traits_of(format), x.columns(), "tokens"));
  NVTE_EP_TRY(start(x.device, stream, options, format, &backend, &codec));
  const bool needs = traits_of(format).token_scale_bytes != 0 && codec.tensor_scale == nullptr;
  NVTE_EP_TRY(
      read_apart(x.device, format, x.rows(), x.columns(), payload, scales, token_scales, needs, &out));
  return x.rows() == 0 ? Status() : backend->quantize(format, x, out, codec, stream);
}

Status dequantize(int32_t format, const nvte_ep_tensor_t* payload, const nvte_ep_tensor_t* scales,
                  const nvte_ep_tensor_t* token_scales, nvte_ep_tensor_t* tokens,
                  const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream) {
  TensorView x;
  RowsView in;
  Backend* backend;
  CodecOptions codec;
  NVTE_EP_TRY(read_tensor(tokens, {"tokens", kTokenDTypes, 2}, &x));
  NVTE_EP_TRY(check_hidden(traits_of(format), x.columns(), "tokens"));
  NVTE_EP_TRY(start(x.device, stream, options, format, &backend, &codec));
  if (token_scales != nullptr && codec.tensor_scale != nullptr) {
    return invalid_argument(
        "token_scales: expected NULL together with options.tensor_scale, which replaces them");
  }
  const bool needs = traits_of(format).token_scale_bytes != 0 && codec.tensor_scale == nullptr;
  NVTE_EP_TRY(read_apart(x.device, format, x.rows(), x.columns(), payload, scales, token_scales, needs, &in));
  return x.rows() == 0 ? Status() : backend->dequantize(format, in, x, codec, RowWeighting(), stream);
}

Status direct_receive(int32_t format, const nvte_ep_tensor_t* rows, const nvte_ep_tensor_t* rows_per_expert,
                      nvte_ep_operand_t* operand, const nvte_ep_codec_options_t* options,
                      nvte_ep_stream_t stream) {
  OperandView view;
  TensorView in, counts;
  Backend* backend;
  CodecOptions codec;
  NVTE_EP_TRY(read_operand(operand, &view));
  if (view.shape.format != format) {
    return invalid_argument("operand.format: expected ", traits_of(format).name, ", got ",
                            view.shape.traits().name);
  }
  NVTE_EP_TRY(read_tensor_on(view.device, rows,
                             {"rows", {DType::kUInt8}, 2, -1, view.shape.row().row_bytes, 16}, &in));
  if (in.rows() > view.shape.capacity) {
    return invalid_argument("rows: expected at most ", view.shape.capacity, " rows (operand.capacity), got ",
                            in.rows());
  }
  NVTE_EP_TRY(read_tensor_on(view.device, rows_per_expert,
                             {"rows_per_expert", kIndexDTypes, 1, view.shape.num_experts}, &counts));
  NVTE_EP_TRY(find_backend(view.device, 0, &backend));
  NVTE_EP_TRY(check_stream(view.device, stream));
  NVTE_EP_TRY(read_codec_options(options, view.device, view.shape.num_experts, &codec));
  NVTE_EP_TRY(check_format_options(traits_of(format), codec));
  if (codec.row_count.data != nullptr) {
    return invalid_argument("options.row_count: rows_per_expert says how many rows there are, expected NULL");
  }
  const RowsView packed = packed_rows(format, in.data, in.stride, in.rows(), view.shape.hidden);
  const IndexView index{counts.data, counts.dtype == DType::kInt64};
  return backend->direct_receive(format, packed, index, view, codec, stream);
}

Status swizzle(const nvte_ep_tensor_t* scales, const nvte_ep_tensor_t* rows_per_expert,
               const nvte_ep_tensor_t* swizzled, bool inverse, nvte_ep_stream_t stream) {
  TensorView s, counts, tiles;
  Backend* backend;
  NVTE_EP_TRY(read_tensor(scales, {"scales", {DType::kUInt8}, 2}, &s));
  constexpr int64_t kMost = int64_t{1}
                            << 40;  // rows, columns, experts: sums and products below stay in range
  if (s.rows() > kMost || s.columns() > kMost)
    return invalid_argument("scales: expected at most 2^40 rows and columns");
  int64_t tile_rows = round_up(s.rows(), kScaleTileRows);
  if (rows_per_expert != nullptr) {
    NVTE_EP_TRY(read_tensor_on(s.device, rows_per_expert, {"rows_per_expert", kIndexDTypes, 1}, &counts));
    if (counts.rows() < 1 || counts.rows() > std::numeric_limits<int32_t>::max()) {
      return invalid_argument("rows_per_expert: expected 1 to 2^31 - 1 experts, or NULL for one matrix, got ",
                              counts.rows());
    }
    // Where the tiles are given, as many as the rows need at least: the operand of direct receive has no more than its
    // alignment calls for.
    if (!inverse) {
      tile_rows = (s.rows() + (kScaleTileRows - 1) * counts.rows()) / kScaleTileRows * kScaleTileRows;
    }
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(tile_rows, round_up(s.columns(), kScaleTileColumns), &bytes)) {
    return invalid_argument("scales: expected tiles of less than 2^63 bytes");
  }
  NVTE_EP_TRY(
      read_tensor_on(s.device, swizzled, {"swizzled", {DType::kUInt8}, 1, bytes, -1, 16, true}, &tiles));
  NVTE_EP_TRY(find_backend(s.device, 0, &backend));
  NVTE_EP_TRY(check_stream(s.device, stream));
  if (s.size() == 0) return Status();
  const IndexView index{counts.data, counts.dtype == DType::kInt64};
  const int64_t row_bytes = round_up(s.columns(), kScaleTileColumns);
  return backend->swizzle(s, index, static_cast<int32_t>(counts.rows()), static_cast<uint8_t*>(tiles.data),
                          tiles.size() / row_bytes / kScaleTileRows * kScaleTileRows, inverse, stream);
}

}  // namespace

extern "C" {

nvte_ep_status_t nvte_ep_row_bytes(int32_t format, int64_t hidden, int64_t* row_bytes) {
  return boundary("nvte_ep_row_bytes", [&]() -> Status {
    if (row_bytes == nullptr) return invalid_argument("row_bytes: expected a pointer, got NULL");
    const FormatRow* row = find_format(format);
    if (row == nullptr) return unsupported("format: expected 0 to ", kNumFormats - 1, ", got ", format);
    NVTE_EP_TRY(check_hidden(*row, hidden, "hidden"));
    *row_bytes = row_layout(*row, hidden).row_bytes;
    return Status();
  });
}

nvte_ep_status_t nvte_ep_nvfp4_pack(const nvte_ep_tensor_t* tokens, nvte_ep_tensor_t* rows,
                                    const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream) {
  return boundary("nvte_ep_nvfp4_pack",
                  [&] { return pack(NVTE_EP_FORMAT_NVFP4, tokens, rows, options, stream); });
}

nvte_ep_status_t nvte_ep_mxfp8_pack(const nvte_ep_tensor_t* tokens, nvte_ep_tensor_t* rows,
                                    const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream) {
  return boundary("nvte_ep_mxfp8_pack",
                  [&] { return pack(NVTE_EP_FORMAT_MXFP8, tokens, rows, options, stream); });
}

nvte_ep_status_t nvte_ep_nvfp4_unpack(const nvte_ep_tensor_t* rows, nvte_ep_tensor_t* tokens,
                                      const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream) {
  return boundary("nvte_ep_nvfp4_unpack",
                  [&] { return unpack(NVTE_EP_FORMAT_NVFP4, rows, tokens, options, stream); });
}

nvte_ep_status_t nvte_ep_mxfp8_unpack(const nvte_ep_tensor_t* rows, nvte_ep_tensor_t* tokens,
                                      const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream) {
  return boundary("nvte_ep_mxfp8_unpack",
                  [&] { return unpack(NVTE_EP_FORMAT_MXFP8, rows, tokens, options, stream); });
}

nvte_ep_status_t nvte_ep_nvfp4_quantize(const nvte_ep_tensor_t* tokens, nvte_ep_tensor_t* payload,
                                        nvte_ep_tensor_t* scales, nvte_ep_tensor_t* token_scales,
                                        const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream) {
  return boundary("nvte_ep_nvfp4_quantize", [&] {
    return quantize(NVTE_EP_FORMAT_NVFP4, tokens, payload, scales, token_scales, options, stream);
  });
}

nvte_ep_status_t nvte_ep_mxfp8_quantize(const nvte_ep_tensor_t* tokens, nvte_ep_tensor_t* payload,
                                        nvte_ep_tensor_t* scales, const nvte_ep_codec_options_t* options,
                                        nvte_ep_stream_t stream) {
  return boundary("nvte_ep_mxfp8_quantize", [&] {
    return quantize(NVTE_EP_FORMAT_MXFP8, tokens, payload, scales, nullptr, options, stream);
  });
}

nvte_ep_status_t nvte_ep_nvfp4_dequantize(const nvte_ep_tensor_t* payload, const nvte_ep_tensor_t* scales,
                                          const nvte_ep_tensor_t* token_scales, nvte_ep_tensor_t* tokens,
                                          const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream) {
  return boundary("nvte_ep_nvfp4_dequantize", [&] {
    return dequantize(NVTE_EP_FORMAT_NVFP4, payload, scales, token_scales, tokens, options, stream);
  });
}

nvte_ep_status_t nvte_ep_mxfp8_dequantize(const nvte_ep_tensor_t* payload, const nvte_ep_tensor_t* scales,
                                          nvte_ep_tensor_t* tokens, const nvte_ep_codec_options_t* options,
                                          nvte_ep_stream_t stream) {
  return boundary("nvte_ep_mxfp8_dequantize", [&] {
    return dequantize(NVTE_EP_FORMAT_MXFP8, payload, scales, nullptr, tokens, options, stream);
  });
}

nvte_ep_status_t nvte_ep_nvfp4_direct_receive(const nvte_ep_tensor_t* rows,
                                              const nvte_ep_tensor_t* rows_per_expert,
                                              nvte_ep_operand_t* operand,
                                              const nvte_ep_codec_options_t* options,
                                              nvte_ep_stream_t stream) {
  return boundary("nvte_ep_nvfp4_direct_receive", [&] {
    return direct_receive(NVTE_EP_FORMAT_NVFP4, rows, rows_per_expert, operand, options, stream);
  });
}

nvte_ep_status_t nvte_ep_mxfp8_direct_receive(const nvte_ep_tensor_t* rows,
                                              const nvte_ep_tensor_t* rows_per_expert,
                                              nvte_ep_operand_t* operand,
                                              const nvte_ep_codec_options_t* options,
                                              nvte_ep_stream_t stream) {
  return boundary("nvte_ep_mxfp8_direct_receive", [&] {
    return direct_receive(NVTE_EP_FORMAT_MXFP8, rows, rows_per_expert, operand, options, stream);
  });
}

nvte_ep_status_t nvte_ep_scales_swizzle(const nvte_ep_tensor_t* scales,
                                        const nvte_ep_tensor_t* rows_per_expert, nvte_ep_tensor_t* swizzled,
                                        nvte_ep_stream_t stream) {
  return boundary("nvte_ep_scales_swizzle",
                  [&] { return swizzle(scales, rows_per_expert, swizzled, false, stream); });
}

nvte_ep_status_t nvte_ep_scales_unswizzle(const nvte_ep_tensor_t* swizzled,
                                          const nvte_ep_tensor_t* rows_per_expert, nvte_ep_tensor_t* scales,
                                          nvte_ep_stream_t stream) {
  return boundary("nvte_ep_scales_unswizzle",
                  [&] { return swizzle(scales, rows_per_expert, swizzled, true, stream); });
}

nvte_ep_status_t nvte_ep_operand_layout(const nvte_ep_operand_config_t* config,
                                        nvte_ep_operand_layout_t* layout) {
  return boundary("nvte_ep_operand_layout", [&]() -> Status {
    OperandShape shape;
    bool columnwise;
    NVTE_EP_TRY(read_operand_config(config, &shape, &columnwise));
    NVTE_EP_TRY(check_out_struct(layout, NVTE_EP_OPERAND_LAYOUT_V1_SIZE, "layout"));
    write_struct(operand_layout(shape, columnwise), layout);
    return Status();
  });
}

nvte_ep_status_t nvte_ep_operand_bind(const nvte_ep_operand_config_t* config, const nvte_ep_tensor_t* buffer,
                                      nvte_ep_operand_t* operand) {
  return boundary("nvte_ep_operand_bind", [&]() -> Status {
    OperandShape shape;
    bool columnwise;
    TensorView bytes;
    NVTE_EP_TRY(read_operand_config(config, &shape, &columnwise));
    NVTE_EP_TRY(read_tensor(buffer, {"buffer", {DType::kUInt8}, 1, -1, -1, kOperandPartAlignment}, &bytes));
    NVTE_EP_TRY(check_out_struct(operand, NVTE_EP_OPERAND_V1_SIZE, "operand"));
    return bind_operand(shape, columnwise, bytes, operand);
  });
}

}  // extern "C"
