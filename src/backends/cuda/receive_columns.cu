// Direct receive with the columnwise operand: tiles of 128 tokens, from which both operands are made in one
// pass.
//
// A thread block works through a group of columns of one band of 128 tokens, 256 columns at a time in shared
// memory; the next 256 are on their way meanwhile.
#include <type_traits>

#include "backends/cuda/launch.h"
#include "backends/cuda/receive_arguments.cuh"
#include "backends/cuda/receive_columns.h"
#include "device/hadamard.cuh"
#include "device/memory.cuh"
#include "device/nvfp4_block.cuh"
#include "formats/mxfp8.h"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kThreads = 256;
constexpr int kBand = 128;

// What a stage of shared memory holds of 256 columns: codes, scales. 16 bytes lie between rows, and 16 more
// between every 16 rows, so that threads that read the same columns of different tokens or token blocks meet
// few bank conflicts.
template <typename Format>
struct Stage {
  static constexpr int kRowBytes = kTileColumns * Format::kPayloadBits / 8;
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kCodesBytes = kBand * (kRowBytes + 16) + kBand / 16 * 16;
  static constexpr int kScaleColumns = kTileColumns / Format::kBlock;  // 16 or 8
  static constexpr int kBytes = kCodesBytes + kBand * kScaleColumns;
  static __device__ __forceinline__ int row_place(int row) { return row * (kRowBytes + 16) + row / 16 * 16; }
};

struct Band {
  Slab slab;
  int64_t band;
  int64_t first_row;  // in the rows
  int rows;           // 1 to 128
};

__device__ __forceinline__ bool find_band(const ReceiveArguments& a, int64_t block, Band* b) {
  const int64_t tile = block / a.column_groups;
  b->slab = find_slab_of_tile<kThreads>(a.counts, block == 0 ? a.options.findings : nullptr, tile);
  if (b->slab.expert < 0) return false;
  b->band = tile - b->slab.first_tile;
  const int64_t rows = b->slab.rows - b->band * kBand;
  b->rows = static_cast<int>(rows < kBand ? rows : kBand);
  b->first_row = b->slab.first_row + b->band * kBand;
  return true;
}

// A thread's part of moving a stage: its 16-byte chunks of the rows first_row, first_row + kStep, ..., and
// the scales of one row. Addresses advance from stage to stage.
template <typename Format>
class Mover {
 public:
  using S = Stage<Format>;
  static constexpr int kStep = kThreads / S::kRowChunks;  // rows
  static constexpr int kCount = kBand / kStep;

  __device__ __forceinline__ Mover(const ReceiveArguments& a, const Band& b, int64_t column)
      : row_(static_cast<int>(threadIdx.x) / S::kRowChunks),
        at_(column * Format::kPayloadBits / 8 + static_cast<int>(threadIdx.x) % S::kRowChunks * 16),
        from_(a.rows + (b.first_row + row_) * a.row_stride),
        to_(a.payload + (b.first_row + row_) * a.layout.payload_bytes),
        scales_from_(a.rows + (b.first_row + threadIdx.x % kBand) * a.row_stride + a.layout.payload_bytes),
        scale_at_(column / Format::kBlock),
        place_(S::row_place(row_) + static_cast<int>(threadIdx.x) % S::kRowChunks * 16) {}

  // The stage that comes next after what has been fetched.
  __device__ __forceinline__ void fetch(const ReceiveArguments& a, const Band& b, int64_t columns_ahead,
                                        uint8_t* stage) {
    const int64_t at = at_ + columns_ahead * Format::kPayloadBits / 8;
    if (at < a.layout.payload_bytes) {
      const uint8_t* from = from_ + at;
      const uint32_t to = shared_address(stage) + place_;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (row_ + i * kStep < b.rows) copy_async16(to + i * kPlaceStep, from);
        from += kStep * a.row_stride;
      }
    }
    // Scales of 256 columns: 16 or 8 bytes of a row. A row of MXFP8 scales is not always aligned to 16 there.
    const int64_t scale = scale_at_ + columns_ahead / Format::kBlock;
    if (threadIdx.x < kBand && static_cast<int>(threadIdx.x) < b.rows && scale < a.columns) {
      uint8_t* to = stage + S::kCodesBytes + threadIdx.x * S::kScaleColumns;
      if constexpr (S::kScaleColumns == 16) {
        copy_async16(shared_address(to), scales_from_ + scale);
      } else {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(scales_from_ + scale);
      }
    }
    commit_copies();
  }
  // The payload of a stage to the operand.
  __device__ __forceinline__ void store_payload(const ReceiveArguments& a, const Band& b,
                                                const uint8_t* stage) const {
    if (a.payload == nullptr || at_ >= a.layout.payload_bytes) return;
    uint8_t* to = to_ + at_;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (row_ + i * kStep < b.rows) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(stage + place_ + i * kPlaceStep);
      }
      to += kStep * a.layout.payload_bytes;
    }
  }
  __device__ __forceinline__ void advance() {
    at_ += S::kRowBytes;
    scale_at_ += S::kScaleColumns;
  }

 private:
  static constexpr int kPlaceStep = kStep * (S::kRowBytes + 16) + kStep / 16 * 16;
  static_assert(kStep % 16 == 0, "gaps between 16 rows are regular");
  int row_;
  int64_t at_;
  const uint8_t* from_;
  uint8_t* to_;
  const uint8_t* scales_from_;
  int64_t scale_at_;
  int place_;
};

// Rowwise scales of a stage. A thread takes 16 bytes of a tile: four columns of the rows r, r + 32, r + 64, r
// + 96.
template <typename Format>
__device__ __forceinline__ void store_scales(const ReceiveArguments& a, const Band& b, int64_t column,
                                             const uint8_t* stage, const RowRescale* rescale, bool* misfit) {
  constexpr int kTiles = Stage<Format>::kScaleColumns / 4;
  if (a.scales == nullptr || threadIdx.x >= 32 * kTiles) return;
  const int r = static_cast<int>(threadIdx.x) % 32;
  const int tile = static_cast<int>(threadIdx.x) / 32;
  const int64_t first = column / Format::kBlock + tile * 4;
  if (first >= a.columns) return;
  const int left = static_cast<int>(a.columns - first < 4 ? a.columns - first : 4);
  const uint32_t mask = left == 4 ? 0xFFFFFFFFu : (1u << (8 * left)) - 1u;
  uint32_t word[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int row = 32 * q + r;
    word[q] = 0;
    if (row >= b.rows) continue;
    word[q] = *reinterpret_cast<const uint32_t*>(stage + Stage<Format>::kCodesBytes +
                                                 row * Stage<Format>::kScaleColumns + tile * 4) &
              mask;
    if constexpr (std::is_same_v<Format, Nvfp4>) word[q] = rescale[row](word[q], misfit) & mask;
  }
  if (!a.linear) {
    *reinterpret_cast<uint4*>(a.band_tiles(b.slab, b.band) + first / 4 * kTileBytes + r * 16) =
        make_uint4(word[0], word[1], word[2], word[3]);
    return;
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    if (32 * q + r >= b.rows) continue;
    uint8_t* to = a.linear_scale(b.slab, b.band * kBand + 32 * q + r, first);
    for (int i = 0; i < left; ++i) to[i] = static_cast<uint8_t>(word[q] >> (8 * i));
  }
}

// ---- NVFP4 ------------------------------------------------------------------------------------------------

// Units of the 16 column blocks by 128 rows, with gaps against bank conflicts.
constexpr int kUnitStride = kBand + kBand / 16 * 4 + 8;
constexpr int kUnitsBytes = kTileColumns / Nvfp4::kBlock * kUnitStride * 4;
constexpr int kTokenBlocks = kBand / Nvfp4::kBlock;
constexpr int kColumnScalesBytes = kTileColumns * kTokenBlocks + kTileColumns / 16 * 4;
constexpr int kColumnCodesBytes = kTileColumns * kTokenBlocks * 8;
constexpr uint32_t kNanCodes = 0x77777777u;
constexpr uint8_t kNanScale = 0x7F;

// What the columns of a stage become, in shared memory until whole lines can be written. Against bank
// conflicts, the token blocks of a column are in an order that differs from 16 columns to the next, and
// scales have a gap after every 16 columns.
struct ColumnTile {
  uint8_t* codes;   // 8 bytes a column and token block
  uint8_t* scales;  // [column][token block]

  __device__ __forceinline__ uint8_t* codes_at(int column, int block) const {
    return codes + column * (kTokenBlocks * 8) + ((block ^ (column / 16 % 8)) * 8);
  }
  // Of an even block and the next.
  __device__ __forceinline__ uint4 two_codes(int column, int block) const {
    const int flip = column / 16 % 8;
    const uint4 v =
        *reinterpret_cast<const uint4*>(codes + column * (kTokenBlocks * 8) + ((block ^ flip) & ~1) * 8);
    return flip % 2 == 0 ? v : make_uint4(v.z, v.w, v.x, v.y);
  }
  __device__ __forceinline__ uint8_t* scale_at(int column, int block) const {
    return scales + column * kTokenBlocks + column / 16 * 4 + block;
  }
};

struct ColumnScaling {
  int k;  // the expert's columnwise exponent
  bool illegal;
  bool round_up;
  uint64_t seed, offset;  // of stochastic rounding
  uint64_t stream;        // rank << 54
};

// Four columns of a token block, by the butterflies of the definition: column 8 * word + 2 * i + odd, i < 4.
template <bool kStochastic>
__device__ __forceinline__ void transform_columns(const uint8_t* stage, const float* units, int block,
                                                  int word, int odd, int64_t first_column,
                                                  int64_t token_block, const ColumnScaling& c,
                                                  const ColumnTile& out) {
  const SecondLevel second(c.k, c.round_up);
#pragma unroll 1
  for (int byte = 0; byte < 4; ++byte) {
    const int column = word * 8 + byte * 2 + odd;
    float value[16], unit[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t codes = stage[Stage<Nvfp4>::row_place(block * 16 + i) + word * 4 + byte];
      value[i] = fast_e4m3_to_float(e2m1_low_to_e4m3(codes >> (4 * odd)) & 0xFFu);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 u = *reinterpret_cast<const float4*>(units + word / 2 * kUnitStride + block * 20 + i * 4);
      unit[4 * i] = u.x;
      unit[4 * i + 1] = u.y;
      unit[4 * i + 2] = u.z;
      unit[4 * i + 3] = u.w;
    }
    const Block16<Bf16Token> y = hadamard16_of_products(value, unit);
    const uint32_t largest = y.largest();
    uint2 codes = make_uint2(kNanCodes, kNanCodes);
    uint32_t scale = kNanScale;
    if (!c.illegal && largest <= 0x7F800000u) {
      Philox4 random;
      if constexpr (kStochastic) {
        random = random_block(c.seed, c.offset, RandomStream::kColumn,
                              c.stream | (static_cast<uint64_t>(first_column + column) << 32) |
                                  static_cast<uint64_t>(token_block));
      }
      codes = encode_nvfp4_block<Bf16Token, kStochastic>(y, bits_float(largest), true, second, random.word,
                                                         &scale);
    }
    *reinterpret_cast<uint2*>(out.codes_at(column, block)) = codes;
    *out.scale_at(column, block) = static_cast<uint8_t>(scale);
  }
}

// A warp's 16 tokens by 128 columns on the tensor cores. False, and nothing done, where a sum might not be
// exact: then the butterflies have to do it.
//
// Lane 4g + t has columns 16g to 16g + 15 of the tokens 2t, 2t + 1, 2t + 8, 2t + 9, and of the results
// outputs 4t to 4t + 3. Values are scaled so that the largest unit of the 16 columns is 2^0 to 2^1: powers of
// two change no rounding, and BF16's exponents suffice.
__device__ __forceinline__ bool transform_on_tensor_cores(const uint8_t* stage, const float* units,
                                                          const HadamardSigns& signs, int block, int half,
                                                          bool columns_exist, const ColumnScaling& c,
                                                          const ColumnTile& out) {
  constexpr int kMaxSpan = 10;  // of the units' exponents; 16 terms of 8 bits, 4 bits of sum, 2 to spare: 24
  const int t = lane_id() % 4;
  const int column_block = half * 8 + lane_id() / 4;
  const auto token = [t](int i) { return 2 * t + i % 2 + i / 2 * 8; };
  uint32_t unit[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unit[i] = columns_exist ? float_bits(units[column_block * kUnitStride + block * 20 + token(i)]) : 0u;
  }
  uint32_t most = max(max(unit[0], unit[1]), max(unit[2], unit[3]));
  uint32_t least = min(min(unit[0] - 1, unit[1] - 1), min(unit[2] - 1, unit[3] - 1));  // zeros do not count
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    most = max(most, __shfl_xor_sync(kAllLanes, most, d));
    least = min(least, __shfl_xor_sync(kAllLanes, least, d));
  }
  const int exponent = static_cast<int>(most >> 23);
  const bool exact = most < 0x7F800000u && exponent - static_cast<int>(least >> 23) <= kMaxSpan;
  if (!__all_sync(kAllLanes, exact)) return false;

  uint32_t unit_pair[2];
  {
    const auto scaled = [&](uint32_t u) {
      return u == 0 ? 0u : u + (static_cast<uint32_t>(253 - exponent) << 23);
    };
    unit_pair[0] = pick_bytes(scaled(unit[0]), scaled(unit[1]), 0x7632);
    unit_pair[1] = pick_bytes(scaled(unit[2]), scaled(unit[3]), 0x7632);
  }
  // A result is y * 2^shift: units hold 16 times the row's scale, that is 64 times the quarter of it.
  const int shift = exponent - 127 - 6;
  const SecondLevel second(max(-60, min(60, c.k - shift)),
                           c.round_up);  // beyond, every block scale is 448 or 0
  // All of a lane's columns lie in one group of 16, where the order of token blocks is the same.
  uint8_t* codes_to = out.codes_at(column_block * 16, block) + 2 * t;
  uint8_t* scale_to = out.scale_at(column_block * 16 + t % 2 * 2 + t / 2, block);
#pragma unroll 1
  for (int group = 0; group < 4; ++group) {  // of four columns
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8_t* at =
          stage + Stage<Nvfp4>::row_place(block * 16 + token(i)) + column_block * 8 + group * 2;
      codes[i] = columns_exist ? *reinterpret_cast<const uint16_t*>(at) : 0u;
    }
    uint32_t
        y[2][4];  // of each pair of columns: outputs 4t, 4t + 1 and 4t + 2, 4t + 3 of one, then of the other
    uint32_t largest[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t pick = 0x4000u + 0x1010u * static_cast<uint32_t>(j);
      const uint32_t w[2] = {pick_bytes(codes[0], codes[1], pick), pick_bytes(codes[2], codes[3], pick)};
      const auto times_unit = [&](uint32_t tiny, int pair) {
        return bits_of(__hmul2(bf162_of(tiny), bf162_of(unit_pair[pair])));
      };
      const uint32_t a[4] = {times_unit(tiny_of_low(w[0]), 0), times_unit(tiny_of_high(w[0]), 0),
                             times_unit(tiny_of_low(w[1]), 1), times_unit(tiny_of_high(w[1]), 1)};
      const float4 d0 = multiply_tile(a, signs.tile[0]);
      const float4 d1 = multiply_tile(a, signs.tile[1]);
      y[j][0] = bits_of(__floats2bfloat162_rn(d0.x, d0.y));
      y[j][1] = bits_of(__floats2bfloat162_rn(d1.x, d1.y));
      y[j][2] = bits_of(__floats2bfloat162_rn(d0.z, d0.w));
      y[j][3] = bits_of(__floats2bfloat162_rn(d1.z, d1.w));
      const uint32_t first = Bf16Token::max_dropping_nan(y[j][0], y[j][1]);
      const uint32_t next = Bf16Token::max_dropping_nan(y[j][2], y[j][3]);
      largest[j] =
          Bf16Token::max_dropping_nan(pick_bytes(first, next, 0x5410), pick_bytes(first, next, 0x7632));
    }
    // Lane t takes care of the column t / 2 of the pair t % 2.
    uint32_t mine;
    {
      const bool odd = t % 2 != 0;
      mine = Bf16Token::max_dropping_nan(odd ? largest[1] : largest[0],
                                         __shfl_xor_sync(kAllLanes, odd ? largest[0] : largest[1], 1));
      mine = Bf16Token::max_dropping_nan(mine, __shfl_xor_sync(kAllLanes, mine, 2)) & 0x7FFF7FFFu;
    }
    const float amax = t / 2 == 0 ? Bf16Token::lo(mine) : Bf16Token::hi(mine);
    const uint32_t b = second.block_scale(amax);
    const float multiplier = second.multiplier(b);
    *scale_to = static_cast<uint8_t>(b);
    if (__all_sync(kAllLanes, mul_rn(amax, multiplier) < kFastLimit)) {
      const float scaled = bf16_multiplier(multiplier, b);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float m0 = __shfl_sync(kAllLanes, scaled, (lane_id() & ~3) | j);
        const float m1 = __shfl_sync(kAllLanes, scaled, (lane_id() & ~3) | j | 2);
        const uint32_t word =
            nibbles_of_rounded(round_products(Bf16Token::lo(y[j][0]), Bf16Token::lo(y[j][1]), m0),
                               round_products(Bf16Token::lo(y[j][2]), Bf16Token::lo(y[j][3]), m1),
                               round_products(Bf16Token::hi(y[j][0]), Bf16Token::hi(y[j][1]), m0),
                               round_products(Bf16Token::hi(y[j][2]), Bf16Token::hi(y[j][3]), m1));
        *reinterpret_cast<uint16_t*>(codes_to + 2 * j * (kTokenBlocks * 8)) = static_cast<uint16_t>(word);
        *reinterpret_cast<uint16_t*>(codes_to + (2 * j + 1) * (kTokenBlocks * 8)) =
            static_cast<uint16_t>(word >> 16);
      }
    } else {  // a block scale of 0, or cut off at 448: codes follow from the numbers as they are
      const float up = exp2_int(exponent == 0 ? -126 : exponent - 127);
      const float exact = SecondLevel(c.k, c.round_up).multiplier(b);
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {  // column i % 2 of pair i / 2
        const float m = __shfl_sync(kAllLanes, exact, (lane_id() & ~3) | (i / 2) | (i % 2 * 2));
        const uint32_t first = i < 2 ? (i == 0 ? y[0][0] : y[0][2]) : (i == 2 ? y[1][0] : y[1][2]);
        const uint32_t next = i < 2 ? (i == 0 ? y[0][1] : y[0][3]) : (i == 2 ? y[1][1] : y[1][3]);
        const float x[4] = {Bf16Token::lo(first), Bf16Token::hi(first), Bf16Token::lo(next),
                            Bf16Token::hi(next)};
        float v[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) v[n] = mul_rn(mul_rn(x[n], up), 0.015625f);
        *reinterpret_cast<uint16_t*>(codes_to + i * (kTokenBlocks * 8)) =
            static_cast<uint16_t>(encode_e2m1_any<4>(v, m, nullptr));
      }
    }
    codes_to += 4 * (kTokenBlocks * 8);
    scale_to += 4 * kTokenBlocks;
  }
  return true;
}

// Codes and scales of a stage's columns to the operand.
__device__ __forceinline__ void store_columnwise(const ReceiveArguments& a, const Band& b, int64_t column,
                                                 const ColumnTile& tile) {
  const int blocks = b.rows / Nvfp4::kBlock;
  const int64_t slab_blocks = b.slab.rows / Nvfp4::kBlock;
  if (a.columnwise_payload != nullptr) {
    constexpr int kPairs = kTokenBlocks / 2;
    const int first = static_cast<int>(threadIdx.x) / kPairs;  // and every 64th column from there on
    const int block = static_cast<int>(threadIdx.x) % kPairs * 2;
    const int64_t stride = b.slab.rows / 2;
    const bool both = block + 1 < blocks;
    const bool aligned = both && b.slab.rows % 32 == 0;
    uint8_t* to = a.columnwise_payload + b.slab.first_row * a.hidden / 2 + b.band * (kBand / 2) +
                  (column + first) * stride + block * 8;
#pragma unroll
    for (int j = first; j < kTileColumns; j += kThreads / kPairs) {
      if (column + j < a.hidden && block < blocks) {
        const uint4 v = tile.two_codes(j, block);
        if (aligned) {
          *reinterpret_cast<uint4*>(to) = v;
        } else {
          *reinterpret_cast<uint2*>(to) = make_uint2(v.x, v.y);
          if (both) *reinterpret_cast<uint2*>(to + 8) = make_uint2(v.z, v.w);
        }
      }
      to += kThreads / kPairs * stride;
    }
  }
  if (a.columnwise_scales == nullptr) return;
  if (a.linear) {
    const int64_t h = column + threadIdx.x;
    if (h >= a.hidden) return;
    uint8_t* to = a.column_scales<Nvfp4::kBlock>(b.slab) + h * slab_blocks + b.band * kTokenBlocks;
    for (int i = 0; i < blocks; ++i) to[i] = *tile.scale_at(static_cast<int>(threadIdx.x), i);
    return;
  }
  // 2 x 128 columns, 2 x 4 token blocks: a thread takes 16 bytes of a tile.
  const int r = static_cast<int>(threadIdx.x) % 32;
  const int half = static_cast<int>(threadIdx.x) / 32 % 2;
  const int64_t h_tile = column / kScaleTileRows + threadIdx.x / 64;
  const int64_t block_tile = b.band * 2 + half;
  if (threadIdx.x < 128 && h_tile * kScaleTileRows < a.hidden && block_tile * 4 < slab_blocks) {
    const auto word = [&](int q) {
      return *reinterpret_cast<const uint32_t*>(
          tile.scale_at(static_cast<int>(threadIdx.x) / 64 * 128 + 32 * q + r, half * 4));
    };
    *reinterpret_cast<uint4*>(a.column_tile<Nvfp4::kBlock>(b.slab, h_tile, block_tile) + r * 16) =
        make_uint4(word(0), word(1), word(2), word(3));
  }
}

template <bool kStochastic>
__device__ __forceinline__ void receive_tiles(Nvfp4, const ReceiveArguments& a, int64_t work) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = Stage<Nvfp4>;
  float* units = reinterpret_cast<float*>(shared + 2 * Layout::kBytes);
  ColumnTile tile;
  tile.codes = shared + 2 * Layout::kBytes + kUnitsBytes;
  tile.scales = tile.codes + kColumnCodesBytes;
  RowRescale* rescale = reinterpret_cast<RowRescale*>(tile.scales + kColumnScalesBytes);

  Band b;
  const int group = static_cast<int>(work % a.column_groups);
  if (!find_band(a, work, &b)) return;
  const uint8_t exponent = a.scales != nullptr ? *a.group_exponent(b.slab, b.band, group) : 0;
  const uint8_t column_exponent = *a.column_exponent(b.slab, b.band, group);
  ColumnScaling scaling{};
  scaling.illegal = column_exponent == kIllegalExponent;
  scaling.k = scaling.illegal ? 0 : static_cast<int>(column_exponent) + Nvfp4::kMinExponent;
  scaling.round_up = a.options.scale_up;
  if constexpr (kStochastic) {
    scaling.seed = uniform(static_cast<uint64_t>(a.options.rng_state[0]));
    scaling.offset = uniform(static_cast<uint64_t>(a.options.rng_state[1]));
    scaling.stream = static_cast<uint64_t>(a.options.rank) << 54;
  }
  // A quarter of a row's token scale times 64: what E4M3 codes of E2M1 values times 2^-6 are multiplied by.
  const int my_row = static_cast<int>(threadIdx.x) % kBand;
  float row_unit = 0.0f;
  if (my_row < b.rows) {
    const float token_scale = a.token_scale(b.first_row + my_row);
    int k;
    const bool nan = Nvfp4::classify(token_scale, &k) == Nvfp4::ScaleKind::kNan;
    row_unit = nan ? bits_float(kNanBits) : mul_rn(token_scale, 16.0f);
    if (threadIdx.x < kBand) rescale[my_row] = RowRescale(token_scale, exponent);
  }
  const HadamardSigns signs;
  bool misfit = false;
  __syncthreads();  // the exponents are read: from here on their places are written

  const int64_t group_begin = group * a.group_columns;
  const int64_t group_end =
      group_begin + a.group_columns < a.hidden ? group_begin + a.group_columns : a.hidden;
  Mover<Nvfp4> mover(a, b, group_begin);
  mover.fetch(a, b, 0, shared);
  int s = 0;
#pragma unroll 1
  for (int64_t column = group_begin; column < group_end; column += kTileColumns, s ^= 1) {
    if (column + kTileColumns < group_end) {
      mover.fetch(a, b, kTileColumns, shared + (s ^ 1) * Layout::kBytes);
    } else {
      commit_copies();
    }
    wait_copies<1>();
    __syncthreads();
    const uint8_t* stage = shared + s * Layout::kBytes;
    if (my_row < b.rows) {
      const int half = static_cast<int>(threadIdx.x) / kBand * 8;
      const uint2 scales = *reinterpret_cast<const uint2*>(stage + Layout::kCodesBytes + my_row * 16 + half);
      float* at = units + half * kUnitStride + my_row + my_row / 16 * 4;
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float2 f = e4m3x2_to_floats(((i < 4 ? scales.x : scales.y) >> (i % 4 * 8)) & 0x7F7Fu);
        at[i * kUnitStride] = mul_rn(f.x, row_unit);
        at[(i + 1) * kUnitStride] = mul_rn(f.y, row_unit);
      }
    }
    mover.store_payload(a, b, stage);
    mover.advance();
    store_scales<Nvfp4>(a, b, column, stage, rescale, &misfit);
    __syncthreads();

    if constexpr (kStochastic) {
      // A lane one of 8 token blocks by 8 columns.
      const int block = lane_id() % 8;
      const int word = lane_id() / 8 + warp_id() * 4;
      if (block * Nvfp4::kBlock < b.rows && column + word * 8 < a.hidden) {
#pragma unroll 1
        for (int odd = 0; odd < 2; ++odd) {
          transform_columns<true>(stage, units, block, word, odd, column, b.first_row / Nvfp4::kBlock + block,
                                  scaling, tile);
        }
      } else {
        for (int j = 0; j < 8; ++j) *tile.scale_at(word * 8 + j, block) = 0;
      }
    } else {
      // A warp a token block, 128 columns at a time.
      const int block = warp_id();
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const bool columns_exist = column + (half * 8 + lane_id() / 4) * Nvfp4::kBlock < a.hidden;
        const bool tokens_exist = block * Nvfp4::kBlock < b.rows;
        if (tokens_exist && !scaling.illegal &&
            transform_on_tensor_cores(stage, units, signs, block, half, columns_exist, scaling, tile)) {
          continue;
        }
        const int word = half * 16 + lane_id() / 2;
        if (tokens_exist && column + word * 8 < a.hidden) {
          transform_columns<false>(stage, units, block, word, lane_id() % 2, column, 0, scaling, tile);
        } else {
          for (int i = 0; i < 4; ++i) *tile.scale_at(word * 8 + 2 * i + lane_id() % 2, block) = 0;
        }
      }
    }
    __syncthreads();
    store_columnwise(a, b, column, tile);
  }
  wait_copies<0>();
  if (misfit) report(a.options.findings, NVTE_EP_FINDING_EXPERT_SCALE);
}

// ---- MXFP8 ------------------------------------------------------------------------------------------------

// Scales of the 8 column blocks by 128 rows as FP32.
constexpr int kFactorsBytes = kTileColumns / Mxfp8::kBlock * kBand * 4;

template <bool kStochastic>
__device__ __forceinline__ void receive_tiles(Mxfp8, const ReceiveArguments& a, int64_t work) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = Stage<Mxfp8>;
  float* factors = reinterpret_cast<float*>(shared + 2 * Layout::kBytes);
  uint8_t* column_scales = shared + 2 * Layout::kBytes + kFactorsBytes;  // [256 columns][4 token blocks]
  Band b;
  const int group = static_cast<int>(work % a.column_groups);
  if (!find_band(a, work, &b)) return;
  const int64_t group_begin = group * a.group_columns;
  const int64_t group_end =
      group_begin + a.group_columns < a.hidden ? group_begin + a.group_columns : a.hidden;
  // A lane has 32 tokens (one of 4 blocks) by 4 columns.
  const int word = static_cast<int>(threadIdx.x) % 64;
  const int block = static_cast<int>(threadIdx.x) / 64;
  bool misfit = false;
  Mover<Mxfp8> mover(a, b, group_begin);
  mover.fetch(a, b, 0, shared);
  int s = 0;
#pragma unroll 1
  for (int64_t column = group_begin; column < group_end; column += kTileColumns, s ^= 1) {
    if (column + kTileColumns < group_end) {
      mover.fetch(a, b, kTileColumns, shared + (s ^ 1) * Layout::kBytes);
    } else {
      commit_copies();
    }
    wait_copies<1>();
    __syncthreads();
    const uint8_t* stage = shared + s * Layout::kBytes;
    for (int i = static_cast<int>(threadIdx.x); i < kBand * Layout::kScaleColumns; i += kThreads) {
      const int row = i % kBand;
      const int j = i / kBand;
      if (row < b.rows) {
        factors[i] = e8m0_to_float(stage[Layout::kCodesBytes + row * Layout::kScaleColumns + j]);
      }
    }
    mover.store_payload(a, b, stage);
    mover.advance();
    store_scales<Mxfp8>(a, b, column, stage, nullptr, &misfit);
    __syncthreads();

    const int64_t h = column + word * 4;
    const bool active = block * Mxfp8::kBlock < b.rows && h < a.hidden;
    uint32_t scale_bytes = 0;
    if (active) {
      const uint8_t* codes = stage + word * 4;
      const float* factor = factors + word / 8 * kBand + block * Mxfp8::kBlock;
      const auto values = [&](int i, float* x) {
        const uint32_t c =
            *reinterpret_cast<const uint32_t*>(codes + Layout::row_place(block * Mxfp8::kBlock + i));
        const float2 lo = e4m3x2_to_floats(c & 0xFFFFu), hi = e4m3x2_to_floats(c >> 16);
        x[0] = mul_rn(lo.x, factor[i]);
        x[1] = mul_rn(lo.y, factor[i]);
        x[2] = mul_rn(hi.x, factor[i]);
        x[3] = mul_rn(hi.y, factor[i]);
      };
      float amax[4] = {bits_float(kNanBits), bits_float(kNanBits), bits_float(kNanBits),
                       bits_float(kNanBits)};
#pragma unroll 8
      for (int i = 0; i < Mxfp8::kBlock; ++i) {  // fmaxf drops NaNs
        float x[4];
        values(i, x);
#pragma unroll
        for (int j = 0; j < 4; ++j) amax[j] = fmaxf(amax[j], fabsf(x[j]));
      }
      float multiplier[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint8_t scale = Mxfp8::scale(amax[j]);
        multiplier[j] = e8m0_inverse(scale);
        scale_bytes |= static_cast<uint32_t>(scale) << (8 * j);
      }
      if (a.columnwise_payload != nullptr) {
        uint8_t* to = a.columnwise_payload + (b.first_row + block * Mxfp8::kBlock) * a.hidden + h;
#pragma unroll 8
        for (int i = 0; i < Mxfp8::kBlock; ++i) {
          float x[4];
          values(i, x);
          *reinterpret_cast<uint32_t*>(to + i * a.hidden) =
              floats_to_e4m3x2(mul_rn(x[0], multiplier[0]), mul_rn(x[1], multiplier[1])) |
              (floats_to_e4m3x2(mul_rn(x[2], multiplier[2]), mul_rn(x[3], multiplier[3])) << 16);
        }
      }
    }
    if (a.columnwise_scales != nullptr && a.linear && active) {
      *reinterpret_cast<uint32_t*>(a.column_scales<Mxfp8::kBlock>(b.slab) + (b.band * 4 + block) * a.hidden +
                                   h) = scale_bytes;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      column_scales[(word * 4 + j) * 4 + block] = static_cast<uint8_t>(scale_bytes >> (8 * j));
    }
    __syncthreads();  // the stage is read, the scales are written
    if (a.columnwise_scales == nullptr || a.linear) continue;
    const int r = static_cast<int>(threadIdx.x) % 32;
    const int64_t h_tile = column / kScaleTileRows + threadIdx.x / 32;
    if (threadIdx.x < 64 && h_tile * kScaleTileRows < a.hidden) {
      const uint8_t* at = column_scales + (threadIdx.x / 32 * kScaleTileRows + r) * 4;
      *reinterpret_cast<uint4*>(a.column_tile<Mxfp8::kBlock>(b.slab, h_tile, b.band) + r * 16) = make_uint4(
          *reinterpret_cast<const uint32_t*>(at), *reinterpret_cast<const uint32_t*>(at + 32 * 4),
          *reinterpret_cast<const uint32_t*>(at + 64 * 4), *reinterpret_cast<const uint32_t*>(at + 96 * 4));
    }
  }
  wait_copies<0>();
}

template <typename Format, bool kStochastic>
__global__ void __launch_bounds__(kThreads, 2) receive_tiles(const ReceiveArguments a) {
  for (int64_t work = blockIdx.x; work < a.blocks; work += gridDim.x) {
    receive_tiles<kStochastic>(Format(), a, work);
    __syncthreads();
  }
}

}  // namespace

Status launch_receive_tiles(int32_t format, ReceiveArguments a, int64_t tiles, const LaunchContext& context) {
  LaunchShape shape;
  a.blocks = shape.blocks = tiles * a.column_groups;
  shape.bounded = true;
  shape.threads = kThreads;
  if (format == NVTE_EP_FORMAT_MXFP8) {
    shape.shared_bytes = 2 * Stage<Mxfp8>::kBytes + kFactorsBytes + kTileColumns * (kBand / Mxfp8::kBlock);
    return launch_kernel<receive_tiles<Mxfp8, false>>("receive_tiles", context, shape, a);
  }
  shape.shared_bytes = 2 * Stage<Nvfp4>::kBytes + kUnitsBytes + kColumnCodesBytes + kColumnScalesBytes +
                       kBand * static_cast<int>(sizeof(RowRescale));
  return a.options.stochastic
             ? launch_kernel<receive_tiles<Nvfp4, true>>("receive_tiles", context, shape, a)
             : launch_kernel<receive_tiles<Nvfp4, false>>("receive_tiles", context, shape, a);
}

}  // namespace nvte_ep
