// Quantise, dequantise, assemble: rows of tokens to and from the wire formats.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "backends/host_backend.h"
#include "backends/host_rows.h"
#include "backends/parallel_for.h"

namespace nvte_ep {
namespace {

RowsView flipped(RowsView view) {
  const int64_t bytes = flip_of(view);
  view.payload += bytes;
  if (view.scales != nullptr) view.scales += bytes;
  if (view.token_scales != nullptr) view.token_scales += bytes;
  return view;
}

struct RowBytes {
  uint8_t* payload;
  uint8_t* scales;
  uint8_t* token_scale;
};
RowBytes row_at(const RowsView& rows, int64_t i) {
  return {rows.payload + i * rows.payload_stride,
          rows.scales ? rows.scales + i * rows.scales_stride : nullptr,
          rows.token_scales ? rows.token_scales + i * rows.token_scale_stride : nullptr};
}

void zero_pads(const RowLayout& layout, uint8_t* row) {
  const int64_t used = layout.payload_bytes + layout.scale_bytes;
  if (layout.token_scale_bytes != 0) {
    std::memset(row + used, 0, static_cast<size_t>(layout.token_scale_offset - used));
  }
  std::memset(row + layout.used_bytes(), 0, static_cast<size_t>(layout.row_bytes - layout.used_bytes()));
}

// The caller's tensor scale, read once: kZero stands for "none given".
struct TensorScale {
  Nvfp4::ScaleKind kind = Nvfp4::ScaleKind::kZero;
  int exponent = 0;
};
TensorScale read_tensor_scale(const CodecOptions& options) {
  TensorScale scale;
  if (options.tensor_scale == nullptr) return scale;
  scale.kind = Nvfp4::classify(*options.tensor_scale, &scale.exponent);
  if (scale.kind == Nvfp4::ScaleKind::kZero) scale.kind = Nvfp4::ScaleKind::kNan;
  if (scale.kind == Nvfp4::ScaleKind::kNan) report(options.findings, NVTE_EP_FINDING_TENSOR_SCALE);
  return scale;
}

void store_token_scale(uint8_t* where, float value) {
  if (where != nullptr) std::memcpy(where, &value, 4);
}

void encode_row(Bf16, const float* x, const RowsView& rows, int64_t i, const CodecOptions&,
                const TensorScale&) {
  store_row(x, DType::kBFloat16, rows.hidden, row_at(rows, i).payload);
}

void encode_row(Mxfp8, const float* x, const RowsView& rows, int64_t i, const CodecOptions&,
                const TensorScale&) {
  const RowBytes row = row_at(rows, i);
  for (int64_t b = 0; b < rows.hidden / Mxfp8::kBlock; ++b) {
    row.scales[b] = Mxfp8::encode_block(x + b * Mxfp8::kBlock, 1, row.payload + b * Mxfp8::kBlock, 1);
  }
}

void encode_row(Nvfp4, const float* x, const RowsView& rows, int64_t i, const CodecOptions& options,
                const TensorScale& tensor_scale) {
  const RowBytes row = row_at(rows, i);
  const int64_t blocks = rows.hidden / Nvfp4::kBlock;
  const float nan = bits_float(kNanBits);
  if (tensor_scale.kind == Nvfp4::ScaleKind::kNan) {  // no legal scale: every token reads as NaN
    std::fill_n(row.payload, blocks * Nvfp4::kBlock / 2, uint8_t{0});
    std::fill_n(row.scales, blocks, uint8_t{0x7F});
    store_token_scale(row.token_scale, nan);
    return;
  }
  uint32_t amax = 0;  // magnitudes compare as their bits; NaNs are dropped
  uint32_t largest = 0;
  for (int64_t h = 0; h < rows.hidden; ++h) {
    const uint32_t a = float_bits(x[h]) & 0x7FFFFFFFu;
    largest = std::max(largest, a);
    amax = std::max(amax, a > 0x7F800000u ? 0u : a);
  }
  const bool fixed = tensor_scale.kind == Nvfp4::ScaleKind::kLive;
  const int k = fixed ? tensor_scale.exponent : Nvfp4::token_exponent(bits_float(amax));
  if (largest == 0) {  // +-0 throughout: zero bytes
    std::fill_n(row.payload, blocks * Nvfp4::kBlock / 2, uint8_t{0});
    std::fill_n(row.scales, blocks, uint8_t{0});
    store_token_scale(row.token_scale, fixed ? exp2_int(k) : 0.0f);
    return;
  }
  const uint64_t first_id = (options.row_id_base + static_cast<uint64_t>(i)) * static_cast<uint64_t>(blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    Philox4 random;
    if (options.stochastic) {
      random = random_block(static_cast<uint64_t>(options.rng_state[0]),
                            static_cast<uint64_t>(options.rng_state[1]), RandomStream::kRow,
                            first_id + static_cast<uint64_t>(b));
    }
    row.scales[b] =
        Nvfp4::encode_block(x + b * Nvfp4::kBlock, 1, k, options.scale_up,
                            options.stochastic ? &random : nullptr, row.payload + b * Nvfp4::kBlock / 2);
  }
  const bool poisoned = largest >= 0x7F800000u && !options.saturate;
  store_token_scale(row.token_scale, poisoned ? nan : exp2_int(k));
  if (poisoned && row.token_scale == nullptr) std::fill_n(row.scales, blocks, uint8_t{0x7F});
}

void decode_row(Bf16, const RowsView& rows, int64_t i, const TensorScale&, float* out) {
  load_row(row_at(rows, i).payload, DType::kBFloat16, rows.hidden, out);
}

void decode_row(Mxfp8, const RowsView& rows, int64_t i, const TensorScale&, float* out) {
  const RowBytes row = row_at(rows, i);
  for (int64_t h = 0; h < rows.hidden; ++h)
    out[h] = Mxfp8::decode(row.payload[h], row.scales[h / Mxfp8::kBlock]);
}

void decode_row(Nvfp4, const RowsView& rows, int64_t i, const TensorScale& tensor_scale, float* out) {
  const RowBytes row = row_at(rows, i);
  float token_scale = bits_float(kNanBits);
  if (tensor_scale.kind == Nvfp4::ScaleKind::kLive) {
    token_scale = exp2_int(tensor_scale.exponent);
  } else if (tensor_scale.kind == Nvfp4::ScaleKind::kZero && row.token_scale != nullptr) {
    std::memcpy(&token_scale, row.token_scale, 4);
  }
  for (int64_t b = 0; b < rows.hidden / Nvfp4::kBlock; ++b) {
    const float unit = Nvfp4::block_unit(row.scales[b], token_scale);
    const uint8_t* codes = row.payload + b * Nvfp4::kBlock / 2;
    for (int j = 0; j < Nvfp4::kBlock / 2; ++j) {
      out[b * Nvfp4::kBlock + 2 * j] = Nvfp4::decode(codes[j] & 15u, unit);
      out[b * Nvfp4::kBlock + 2 * j + 1] = Nvfp4::decode(codes[j] >> 4, unit);
    }
  }
}

// In the order of RowWeighting.
double dot(const float* x, const float* y, int64_t n) {
  constexpr int kGroup = 32;
  double lanes[kDotLanes] = {};
  for (int64_t h = 0; h < n; ++h) lanes[h / kDotRun % kDotLanes] += static_cast<double>(x[h]) * y[h];
  double sum = 0.0;
  for (double* group = lanes; group < lanes + kDotLanes; group += kGroup) {
    for (int half = kGroup / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) group[i] += group[i + half];
    }
    sum += group[0];
  }
  return sum;
}

void weigh_row(const RowWeighting& w, int64_t slot, int64_t n, float* x) {
  if (w.slot_source != nullptr && w.slot_source[slot] < 0) {
    std::fill(x, x + n, 0.0f);
    if (w.dots != nullptr) w.dots[slot] = 0.0f;
    return;
  }
  if (w.dots != nullptr) {
    std::vector<float> y(static_cast<size_t>(n));
    load_row(w.expert_out.row(slot), w.expert_out.dtype, n, y.data());
    w.dots[slot] = canonical_nan(static_cast<float>(dot(x, y.data(), n)));
  }
  if (w.weights != nullptr) {
    for (int64_t h = 0; h < n; ++h) x[h] = mul_rn(x[h], w.weights[slot]);
  }
}

}  // namespace

int64_t rows_in_use(int64_t rows, const CodecOptions& options) {
  if (options.row_count.data == nullptr) return rows;
  const int64_t count = load_index(options.row_count, 0);
  if (count < 0 || count > rows) report(options.findings, NVTE_EP_FINDING_ROW_COUNT);
  return std::min(std::max<int64_t>(count, 0), rows);
}

Status HostBackend::quantize(int32_t format, const TensorView& tokens, const RowsView& view,
                             const CodecOptions& options, nvte_ep_stream_t) {
  const RowsView rows = flipped(view);
  const RowLayout layout = row_layout(*find_format(format), rows.hidden);
  const TensorScale tensor_scale =
      format == NVTE_EP_FORMAT_NVFP4 ? read_tensor_scale(options) : TensorScale();
  const bool copy = format == NVTE_EP_FORMAT_BF16 && tokens.dtype == DType::kBFloat16;
  with_format(format, [&](auto traits) {
    parallel_for(rows_in_use(rows.rows, options), grain_of(rows.hidden), max_threads_,
                 [&](int64_t begin, int64_t end) {
                   std::vector<float> x(static_cast<size_t>(rows.hidden));
                   for (int64_t i = begin; i < end; ++i) {
                     if (copy) {  // NaN payloads too
                       std::memcpy(row_at(rows, i).payload, tokens.row(i),
                                   static_cast<size_t>(layout.payload_bytes));
                     } else {
                       load_row(tokens.row(i), tokens.dtype, rows.hidden, x.data());
                       encode_row(traits, x.data(), rows, i, options, tensor_scale);
                     }
                     if (rows.packed) zero_pads(layout, row_at(rows, i).payload);
                   }
                 });
  });
  return Status();
}

Status HostBackend::dequantize(int32_t format, const RowsView& rows, const TensorView& tokens,
                               const CodecOptions& options, const RowWeighting& weighting, nvte_ep_stream_t) {
  const TensorScale tensor_scale =
      format == NVTE_EP_FORMAT_NVFP4 ? read_tensor_scale(options) : TensorScale();
  const bool weighted = weighting.weights != nullptr || weighting.dots != nullptr;
  const bool copy = format == NVTE_EP_FORMAT_BF16 && tokens.dtype == DType::kBFloat16 && !weighted;
  with_format(format, [&](auto traits) {
    parallel_for(rows_in_use(rows.rows, options), grain_of(rows.hidden), max_threads_,
                 [&](int64_t begin, int64_t end) {
                   std::vector<float> x(static_cast<size_t>(rows.hidden));
                   for (int64_t i = begin; i < end; ++i) {
                     if (copy) {
                       std::memcpy(tokens.row(i), row_at(rows, i).payload,
                                   static_cast<size_t>(rows.hidden) * 2);
                       continue;
                     }
                     decode_row(traits, rows, i, tensor_scale, x.data());
                     if (weighted) weigh_row(weighting, i, rows.hidden, x.data());
                     store_row(x.data(), tokens.dtype, rows.hidden, tokens.row(i));
                   }
                 });
  });
  return Status();
}

Status HostBackend::assemble(int32_t format, const RowsView& apart, const RowsView& view,
                             const CodecOptions& options, nvte_ep_stream_t) {
  const RowsView packed = flipped(view);
  const RowLayout layout = row_layout(*find_format(format), apart.hidden);
  const TensorScale tensor_scale =
      format == NVTE_EP_FORMAT_NVFP4 ? read_tensor_scale(options) : TensorScale();
  const int64_t count = rows_in_use(apart.rows, options);
  parallel_for(count, grain_of(apart.hidden), max_threads_, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowBytes from = row_at(apart, i);
      const RowBytes to = row_at(packed, i);
      std::memcpy(to.payload, from.payload, static_cast<size_t>(layout.payload_bytes));
      if (layout.scale_bytes) std::memcpy(to.scales, from.scales, static_cast<size_t>(layout.scale_bytes));
      if (layout.token_scale_bytes != 0) {
        if (tensor_scale.kind == Nvfp4::ScaleKind::kZero) {
          std::memcpy(to.token_scale, from.token_scale, 4);
        } else {
          const bool live = tensor_scale.kind == Nvfp4::ScaleKind::kLive;
          store_token_scale(to.token_scale, live ? exp2_int(tensor_scale.exponent) : bits_float(kNanBits));
        }
      }
      zero_pads(layout, to.payload);
    }
  });
  return Status();
}

}  // namespace nvte_ep
