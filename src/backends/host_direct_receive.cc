// Direct receive and scale swizzle: packed rows, ordered by expert, to the operand of a grouped GEMM.
#include <algorithm>
#include <atomic>
#include <vector>

#include "backends/host_backend.h"
#include "backends/parallel_for.h"

namespace nvte_ep {
namespace {

// Rows of each expert, clamped to what there is.
struct Slabs {
  std::vector<int64_t> rows, row_offsets, scale_row_offsets;
  bool clamped = false;
};
Slabs read_slabs(const IndexView& rows_per_expert, int32_t num_experts, int64_t available,
                 int64_t alignment) {
  Slabs s;
  int64_t offset = 0;
  int64_t scale_offset = 0;
  for (int32_t e = 0; e < num_experts; ++e) {
    const int64_t asked = load_index(rows_per_expert, e);
    int64_t rows = std::min(std::max<int64_t>(asked, 0), available - offset);
    rows -= rows % alignment;
    s.clamped |= rows != asked;
    s.rows.push_back(rows);
    s.row_offsets.push_back(offset);
    s.scale_row_offsets.push_back(scale_offset);
    offset += rows;
    scale_offset += round_up(rows, kScaleTileRows);
  }
  return s;
}

// Where scale (i, j) of a slab goes; pads of the tiles in use are zeroed beforehand.
class ScaleWriter {
 public:
  ScaleWriter(uint8_t* base, int64_t rows, int64_t columns, bool linear, int64_t linear_stride_i,
              int64_t linear_stride_j)
      : base_(base),
        columns_(columns),
        linear_(linear),
        stride_i_(linear_stride_i),
        stride_j_(linear_stride_j) {
    if (base_ != nullptr && !linear_) {
      const int64_t bytes = round_up(rows, kScaleTileRows) * round_up(columns, kScaleTileColumns);
      std::memset(base_, 0, static_cast<size_t>(bytes));
    }
  }
  explicit operator bool() const { return base_ != nullptr; }
  void put(int64_t i, int64_t j, uint8_t value) const {
    base_[linear_ ? i * stride_i_ + j * stride_j_ : swizzle_index(i, j, columns_)] = value;
  }

 private:
  uint8_t* base_;
  int64_t columns_;
  bool linear_;
  int64_t stride_i_, stride_j_;
};

float token_scale_at(const RowsView& rows, int64_t i) {
  float scale;
  std::memcpy(&scale, rows.token_scales + i * rows.token_scale_stride, 4);
  return scale;
}

// The second-level exponents of one expert, from token scales alone.
struct ExpertScale {
  bool live = false;     // false: no live row; its amax is 0
  bool illegal = false;  // a fixed scale that is no legal power of two: the whole expert reads as NaN
  int k = Nvfp4::kMinExponent;
  int column_k = Nvfp4::kMinExponent;
};
ExpertScale expert_scale(const RowsView& rows, int64_t first, int64_t count, const float* fixed,
                         bool column_max) {
  ExpertScale s;
  std::vector<int> exponent(static_cast<size_t>(count));
  std::vector<bool> live(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    int k;
    live[i] = Nvfp4::classify(token_scale_at(rows, first + i), &k) == Nvfp4::ScaleKind::kLive;
    exponent[i] = k;
    if (live[i]) s.k = s.live ? std::max(s.k, k) : k;
    s.live = s.live || live[i];
  }
  if (fixed != nullptr) {
    s.live = count > 0;
    s.illegal = Nvfp4::classify(*fixed, &s.k) != Nvfp4::ScaleKind::kLive;
    s.column_k = s.k + 2;  // the same for every batch, as the fixed scale is
    return s;
  }
  s.column_k = s.k + 2;
  if (column_max || !s.live) return s;
  uint32_t largest = 0;
  for (int64_t block = 0; block + Nvfp4::kBlock <= count; block += Nvfp4::kBlock) {
    uint32_t sum = 0;
    for (int64_t i = block; i < block + Nvfp4::kBlock; ++i) {
      if (live[i]) sum += Nvfp4::l1_term(s.k, exponent[i]);
    }
    largest = std::max(largest, sum);
  }
  s.column_k = Nvfp4::l1_exponent(s.k, largest);
  return s;
}

}  // namespace

Status HostBackend::direct_receive(int32_t format, const RowsView& rows, const IndexView& rows_per_expert,
                                   const OperandView& operand, const CodecOptions& options,
                                   nvte_ep_stream_t) {
  const OperandShape& shape = operand.shape;
  const int64_t hidden = shape.hidden;
  const FormatRow& traits = shape.traits();
  const RowLayout layout = shape.row();
  const int64_t columns = hidden / traits.block;
  const bool nvfp4 = format == NVTE_EP_FORMAT_NVFP4;
  const Slabs slabs =
      read_slabs(rows_per_expert, shape.num_experts, std::min(shape.capacity, rows.rows), shape.alignment);
  if (slabs.clamped) report(options.findings, NVTE_EP_FINDING_ROW_COUNT);
  std::atomic<bool> misfit{false};

  for (int32_t e = 0; e < shape.num_experts; ++e) {
    const int64_t count = slabs.rows[e];
    const int64_t first = slabs.row_offsets[e];
    const int64_t scale_first = slabs.scale_row_offsets[e];
    ExpertScale second;
    if (nvfp4) {
      second = expert_scale(rows, first, count,
                            options.fixed_expert_scale ? options.fixed_expert_scale + e : nullptr,
                            options.column_max);
      if (second.illegal) misfit = true;
      const auto publish = [&](float* part, float unit, int k) {
        if (part == nullptr) return;
        part[e] = !second.live ? 0.0f : (second.illegal ? bits_float(kNanBits) : unit * exp2_int(k));
      };
      publish(operand.amax, Nvfp4::kRange, second.k);
      publish(operand.columnwise_amax, Nvfp4::kRange, second.column_k);
      publish(operand.expert_scale, 1.0f, second.k);
      publish(operand.columnwise_expert_scale, 1.0f, second.column_k);
    }

    uint8_t* scale_base = nullptr;
    if (operand.scales != nullptr) {
      scale_base =
          operand.scales +
          (shape.linear_scales ? first * columns : scale_first * round_up(columns, kScaleTileColumns));
    }
    const ScaleWriter scales(scale_base, count, columns, shape.linear_scales, columns, 1);
    parallel_for(count, grain_of(hidden), max_threads_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (operand.payload != nullptr) {
          std::memcpy(operand.payload + (first + i) * layout.payload_bytes,
                      rows.payload + (first + i) * rows.payload_stride,
                      static_cast<size_t>(layout.payload_bytes));
        }
        if (!scales) continue;
        const uint8_t* b = rows.scales + (first + i) * rows.scales_stride;
        if (!nvfp4) {
          for (int64_t j = 0; j < columns; ++j) scales.put(i, j, b[j]);
          continue;
        }
        int k;
        const Nvfp4::ScaleKind kind = Nvfp4::classify(token_scale_at(rows, first + i), &k);
        for (int64_t j = 0; j < columns; ++j) {
          const uint8_t magnitude = b[j] & 0x7Fu;
          uint8_t code = 0;  // a zero token
          if (kind == Nvfp4::ScaleKind::kNan || second.illegal || magnitude == 0x7Fu) {
            code = 0x7F;  // a NaN block scale reads as NaN under any token scale
          } else if (kind == Nvfp4::ScaleKind::kLive) {
            code = e4m3_scale_exponent(magnitude, second.k - k);
            if (k > second.k && e4m3_scale_exponent(code, k - second.k) != magnitude) misfit = true;
          }
          scales.put(i, j, code);
        }
      }
    });

    if (!operand.columnwise()) continue;
    const int64_t block = traits.block;
    uint8_t* column_base = nullptr;
    if (operand.columnwise_scales != nullptr) {
      column_base = operand.columnwise_scales +
                    (shape.linear_scales ? first / block * hidden
                                         : scale_first / block * round_up(hidden, kScaleTileRows));
    }
    const int64_t column_blocks = count / block;
    // Scale (h, token block): nvfp4 keeps the transposed order when linear, mxfp8 the order of its tokens.
    const ScaleWriter column_scales(column_base, hidden, column_blocks, shape.linear_scales,
                                    nvfp4 ? column_blocks : 1, nvfp4 ? 1 : hidden);
    parallel_for(column_blocks, grain_of(hidden * block), max_threads_, [&](int64_t begin, int64_t end) {
      std::vector<float> tile(static_cast<size_t>(block * hidden));
      const TensorView decoded{tile.data(), DType::kFloat32, Device(), 2, {block, hidden}, hidden};
      HostBackend inline_backend(1);
      for (int64_t j = begin; j < end; ++j) {
        RowsView sixteen = rows;
        const int64_t at = first + j * block;
        sixteen.payload += at * rows.payload_stride;
        sixteen.scales += at * rows.scales_stride;
        if (nvfp4) sixteen.token_scales += at * rows.token_scale_stride;
        sixteen.rows = block;
        (void)inline_backend.dequantize(format, sixteen, decoded, CodecOptions(), RowWeighting(), nullptr);
        for (int64_t h = 0; h < hidden; ++h) {
          uint8_t code;
          if (nvfp4) {
            float x[Nvfp4::kBlock];
            for (int i = 0; i < Nvfp4::kBlock; ++i) x[i] = tile[static_cast<size_t>(i * hidden + h)];
            hadamard16(x);
            uint8_t codes[Nvfp4::kBlock / 2];
            if (is_nan(x[0]) || second.illegal) {  // the transform spreads a NaN over its 16 tokens
              std::memset(codes, 0x77, sizeof(codes));
              code = 0x7F;
            } else {
              Philox4 random;
              if (options.stochastic) {
                const uint64_t id = (static_cast<uint64_t>(options.rank) << 54) |
                                    (static_cast<uint64_t>(h) << 32) |
                                    static_cast<uint64_t>(at / Nvfp4::kBlock);
                random = random_block(static_cast<uint64_t>(options.rng_state[0]),
                                      static_cast<uint64_t>(options.rng_state[1]), RandomStream::kColumn, id);
              }
              code = Nvfp4::encode_block(x, 1, second.column_k, options.scale_up,
                                         options.stochastic ? &random : nullptr, codes);
            }
            if (operand.columnwise_payload != nullptr) {
              std::memcpy(
                  operand.columnwise_payload + first * hidden / 2 + h * (count / 2) + j * Nvfp4::kBlock / 2,
                  codes, sizeof(codes));
            }
          } else {
            uint8_t codes[Mxfp8::kBlock];
            code = Mxfp8::encode_block(tile.data() + h, hidden, codes, 1);
            if (operand.columnwise_payload != nullptr) {
              for (int i = 0; i < Mxfp8::kBlock; ++i)
                operand.columnwise_payload[(at + i) * hidden + h] = codes[i];
            }
          }
          if (column_scales) column_scales.put(h, j, code);
        }
      }
    });
  }
  if (misfit) report(options.findings, NVTE_EP_FINDING_EXPERT_SCALE);
  return Status();
}

Status HostBackend::swizzle(const TensorView& scales, const IndexView& rows_per_expert, int32_t num_experts,
                            uint8_t* swizzled, int64_t tile_rows, bool inverse, nvte_ep_stream_t) {
  Slabs slabs;
  if (rows_per_expert.data != nullptr) {
    slabs = read_slabs(rows_per_expert, num_experts, scales.rows(), 1);
  } else {
    slabs.rows = {scales.rows()};
    slabs.row_offsets = slabs.scale_row_offsets = {0};
  }
  const int64_t columns = scales.columns();
  for (size_t e = 0; e < slabs.rows.size(); ++e) {
    const int64_t room = tile_rows - slabs.scale_row_offsets[e];
    if (room <= 0) break;
    const int64_t rows = std::min(slabs.rows[e], room);
    uint8_t* tiles = swizzled + slabs.scale_row_offsets[e] * round_up(columns, kScaleTileColumns);
    if (!inverse) {
      std::memset(tiles, 0,
                  static_cast<size_t>(round_up(rows, kScaleTileRows) * round_up(columns, kScaleTileColumns)));
    }
    parallel_for(rows, grain_of(columns), max_threads_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        uint8_t* row = scales.row(slabs.row_offsets[e] + i);
        for (int64_t j = 0; j < columns; ++j) {
          uint8_t& tile = tiles[swizzle_index(i, j, columns)];
          (inverse ? row[j] : tile) = inverse ? tile : row[j];
        }
      }
    });
  }
  return Status();
}

}  // namespace nvte_ep
