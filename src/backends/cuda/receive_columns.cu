// Direct receive with the columnwise operand: tiles of 128 tokens, from which both operands are made in one pass.
//
// A thread block works through a group of columns of one band of 128 tokens, 256 columns at a time in shared memory; the next
// 256 are on their way meanwhile.
#include <type_traits>

#include "backends/cuda/launch_kernel.h"
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

// What a stage of shared memory holds of 256 columns: codes, scales. 16 bytes lie between every 16 rows, so that the threads
// that read the same columns of different token blocks meet no bank conflicts.
template <typename Format>
struct Stage {
  static constexpr int kRowBytes = kTileColumns * Format::kPayloadBits / 8;
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kCodesBytes = kBand * kRowBytes + kBand / 16 * 16;
  static constexpr int kScaleColumns = kTileColumns / Format::kBlock;  // 16 or 8
  static constexpr int kBytes = kCodesBytes + kBand * kScaleColumns;
  static __device__ __forceinline__ int row_place(int row) { return row * kRowBytes + row / 16 * 16; }
};

struct Band {
  Slab slab;
  int64_t band;
  int64_t first_row;  // in the rows
  int rows;           // 1 to 128
  const uint8_t* from;
};

template <typename Format>
__device__ __forceinline__ void fetch(const ReceiveArguments& a, const Band& b, int64_t column, uint8_t* stage) {
  if (column < a.hidden) {
#pragma unroll
    for (int i = 0; i < kBand * Stage<Format>::kRowChunks / kThreads; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = index / Stage<Format>::kRowChunks;
      const int64_t at = column * Format::kPayloadBits / 8 + index % Stage<Format>::kRowChunks * 16;
      if (row < b.rows && at < a.layout.payload_bytes) {
        copy_async16(stage + Stage<Format>::row_place(row) + index % Stage<Format>::kRowChunks * 16,
                     b.from + row * a.row_stride + at);
      }
    }
    // Scales of 256 columns: 16 or 8 bytes of a row. A row of MXFP8 scales is not always aligned to 16 there.
    const int row = static_cast<int>(threadIdx.x) % kBand;
    const int64_t at = a.layout.payload_bytes + column / Format::kBlock;
    if (threadIdx.x < kBand && row < b.rows) {
      uint8_t* to = stage + Stage<Format>::kCodesBytes + row * Stage<Format>::kScaleColumns;
      if constexpr (Stage<Format>::kScaleColumns == 16) {
        copy_async16(to, b.from + row * a.row_stride + at);
      } else {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(b.from + row * a.row_stride + at);
      }
    }
  }
  commit_copies();
}

// Rowwise payload and scales of a stage.
template <typename Format>
__device__ __forceinline__ void store_rowwise(const ReceiveArguments& a, const Band& b, int64_t column,
                                              const uint8_t* stage, uint8_t exponent, bool* misfit) {
  if (a.payload != nullptr) {
#pragma unroll
    for (int i = 0; i < kBand * Stage<Format>::kRowChunks / kThreads; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = index / Stage<Format>::kRowChunks;
      const int64_t at = column * Format::kPayloadBits / 8 + index % Stage<Format>::kRowChunks * 16;
      if (row < b.rows && at < a.layout.payload_bytes) {
        *reinterpret_cast<uint4*>(a.payload + (b.first_row + row) * a.layout.payload_bytes + at) =
            *reinterpret_cast<const uint4*>(stage + Stage<Format>::row_place(row) +
                                            index % Stage<Format>::kRowChunks * 16);
      }
    }
  }
  if (a.scales == nullptr) return;
  // A thread takes 16 bytes of a tile: four columns of the rows r, r + 32, r + 64, r + 96.
  constexpr int kTiles = Stage<Format>::kScaleColumns / 4;
  if (threadIdx.x >= 32 * kTiles) return;
  const int r = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = column / Format::kBlock + threadIdx.x / 32 * 4;
  const int left = static_cast<int>(a.columns - first);
  if (left <= 0) return;
  uint32_t word[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int row = 32 * q + r;
    word[q] = 0;
    if (row >= b.rows) continue;
    const uint32_t mask = left >= 4 ? 0xFFFFFFFFu : (1u << (8 * left)) - 1u;
    word[q] = *reinterpret_cast<const uint32_t*>(stage + Stage<Format>::kCodesBytes +
                                                 row * Stage<Format>::kScaleColumns + threadIdx.x / 32 * 4) & mask;
    if constexpr (std::is_same_v<Format, Nvfp4>) {
      word[q] = RowRescale(a.token_scale(b.first_row + row), exponent)(word[q], misfit) & mask;
    }
    if (a.linear) {
      uint8_t* to = a.linear_scale(b.slab, b.band * kBand + row, first);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < left) to[i] = static_cast<uint8_t>(word[q] >> (8 * i));
      }
    }
  }
  if (!a.linear) {
    *reinterpret_cast<uint4*>(a.band_tiles(b.slab, b.band) + first / 4 * kTileBytes + r * 16) =
        make_uint4(word[0], word[1], word[2], word[3]);
  }
}

__device__ __forceinline__ bool find_band(const ReceiveArguments& a, int64_t tile, Band* b) {
  b->slab = find_slab_of_tile<kThreads>(a.counts, a.options.findings, tile);
  if (b->slab.expert < 0) return false;
  b->band = tile - b->slab.first_tile;
  const int64_t rows = b->slab.rows - b->band * kBand;
  b->rows = static_cast<int>(rows < kBand ? rows : kBand);
  b->first_row = b->slab.first_row + b->band * kBand;
  b->from = a.rows + b->first_row * a.row_stride;
  return true;
}

// ---- NVFP4 -----------------------------------------------------------------------------------------------------------------

// Units of the 16 column blocks by 128 rows, in the order and with the gaps of the rows.
constexpr int kUnitStride = kBand + kBand / 16 * 4;
constexpr int kUnitsBytes = kTileColumns / Nvfp4::kBlock * kUnitStride * 4;
constexpr int kColumnScalesBytes = kTileColumns * (kBand / Nvfp4::kBlock);

template <bool kStochastic>
__global__ void __launch_bounds__(kThreads, 2) receive_tiles_nvfp4(const ReceiveArguments a) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = Stage<Nvfp4>;
  float* units = reinterpret_cast<float*>(shared + 2 * Layout::kBytes);
  uint8_t* column_scales = shared + 2 * Layout::kBytes + kUnitsBytes;  // [256 columns][8 token blocks]

  Band b;
  const int group = static_cast<int>(blockIdx.x % a.column_groups);
  if (!find_band(a, blockIdx.x / a.column_groups, &b)) return;
  const uint8_t exponent = a.scales != nullptr ? *a.group_exponent(b.slab, b.band, group) : 0;
  const uint8_t column_exponent = *a.column_exponent(b.slab, b.band, group);
  const bool illegal = column_exponent == kIllegalExponent;
  const SecondLevel second(illegal ? 0 : static_cast<int>(column_exponent) + Nvfp4::kMinExponent, a.options.scale_up);
  uint64_t seed = 0, offset = 0;
  if constexpr (kStochastic) {
    seed = static_cast<uint64_t>(a.options.rng_state[0]);
    offset = static_cast<uint64_t>(a.options.rng_state[1]);
  }
  // A quarter of a row's token scale times 64: what E4M3 codes of E2M1 values times 2^-6 are multiplied by.
  const int my_row = static_cast<int>(threadIdx.x) % kBand;
  float row_unit = 0.0f;
  if (my_row < b.rows) {
    const float token_scale = a.token_scale(b.first_row + my_row);
    int k;
    const bool nan = Nvfp4::classify(token_scale, &k) == Nvfp4::ScaleKind::kNan;
    row_unit = nan ? bits_float(kNanBits) : mul_rn(token_scale, 16.0f);
  }
  bool misfit = false;
  __syncthreads();  // the exponents are read: from here on their places are written

  const int64_t group_begin = static_cast<int64_t>(group) * kGroupColumns;
  const int64_t group_end = group_begin + kGroupColumns < a.hidden ? group_begin + kGroupColumns : a.hidden;
  const int64_t token_blocks = b.slab.rows / Nvfp4::kBlock;
  // A lane has 16 tokens (one of 8 blocks) by 8 columns.
  const int block = lane_id() % 8;
  const int word = lane_id() / 8 + warp_id() * 4;
  fetch<Nvfp4>(a, b, group_begin, shared);
  int s = 0;
  for (int64_t column = group_begin; column < group_end; column += kTileColumns, s ^= 1) {
    fetch<Nvfp4>(a, b, column + kTileColumns < group_end ? column + kTileColumns : a.hidden,
                 shared + (s ^ 1) * Layout::kBytes);
    wait_copies<1>();
    __syncthreads();
    const uint8_t* stage = shared + s * Layout::kBytes;
    if (my_row < b.rows) {
      const int half = static_cast<int>(threadIdx.x) / kBand * 8;
      const uint2 scales = *reinterpret_cast<const uint2*>(stage + Layout::kCodesBytes + my_row * 16 + half);
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float2 f = e4m3x2_to_floats(((i < 4 ? scales.x : scales.y) >> (i % 4 * 8)) & 0x7F7Fu);
        float* at = units + (half + i) * kUnitStride + my_row + my_row / 16 * 4;
        at[0] = mul_rn(f.x, row_unit);
        at[kUnitStride] = mul_rn(f.y, row_unit);
      }
    }
    store_rowwise<Nvfp4>(a, b, column, stage, exponent, &misfit);
    __syncthreads();

    const int64_t h = column + word * 8;
    const bool active = block * Nvfp4::kBlock < b.rows && h < a.hidden;
    uint8_t* my_scales = column_scales + word * 64 + block;  // 8 apart
    if (active) {
      uint32_t codes[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        codes[i] = *reinterpret_cast<const uint32_t*>(stage + Layout::row_place(block * 16 + i) + word * 4);
      }
      const int64_t token_block = b.first_row / Nvfp4::kBlock + block;
      uint8_t* payload = a.columnwise_payload == nullptr
                             ? nullptr
                             : a.columnwise_payload + b.slab.first_row * a.hidden / 2 + h * (b.slab.rows / 2) +
                                   (b.band * kBand / 2) + block * 8;
      const auto store_column = [&](int j, const float* value) {
        float unit[16];
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
        uint2 out = make_uint2(0x77777777u, 0x77777777u);
        uint32_t scale = 0x7F;
        if (!illegal && largest <= 0x7F800000u) {
          Philox4 random;
          if constexpr (kStochastic) {
            random = random_block(seed, offset, RandomStream::kColumn,
                                  (static_cast<uint64_t>(a.options.rank) << 54) | (static_cast<uint64_t>(h + j) << 32) |
                                      static_cast<uint64_t>(token_block));
          }
          out = encode_nvfp4_block<Bf16Token, kStochastic>(y, bits_float(largest), true, second, random.word, &scale);
        }
        if (payload != nullptr) *reinterpret_cast<uint2*>(payload + j * (b.slab.rows / 2)) = out;
        my_scales[j * 8] = static_cast<uint8_t>(scale);
      };
      // Two columns at a time (one, where random numbers need the registers), in a loop: unrolled eightfold it would fit
      // neither the instruction cache nor the registers.
      constexpr int kAtOnce = kStochastic ? 1 : 2;
#pragma unroll 1
      for (int odd = 0; odd < 2; ++odd) {
        uint32_t e4m3[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) e4m3[i] = e2m1_low_to_e4m3(codes[i] >> (4 * odd));
#pragma unroll 1
        for (int byte = 0; byte < 4; byte += kAtOnce) {
          float first[16], next[16];
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const float2 f = e4m3x2_to_floats(e4m3[i] >> (8 * byte));
            first[i] = f.x;
            next[i] = f.y;
          }
          store_column(2 * byte + odd, first);
          if constexpr (kAtOnce == 2) store_column(2 * byte + 2 + odd, next);
        }
      }
    }
    if (!active) {
#pragma unroll
      for (int j = 0; j < 8; ++j) my_scales[j * 8] = 0;
    }
    if (a.columnwise_scales == nullptr) continue;
    if (a.linear) {
      if (!active) continue;
      uint8_t* to = a.column_scales<Nvfp4::kBlock>(b.slab) + h * token_blocks + b.band * 8 + block;
#pragma unroll
      for (int j = 0; j < 8; ++j) to[j * token_blocks] = my_scales[j * 8];
      continue;
    }
    __syncthreads();
    // 2 x 128 columns, 2 x 4 token blocks: a thread takes 16 bytes of a tile.
    const int r = static_cast<int>(threadIdx.x) % 32;
    const int half = static_cast<int>(threadIdx.x) / 32 % 2;
    const int64_t h_tile = column / kScaleTileRows + threadIdx.x / 64;
    const int64_t block_tile = b.band * 2 + half;
    if (threadIdx.x < 128 && h_tile * kScaleTileRows < a.hidden && block_tile * 4 < token_blocks) {
      const uint8_t* at = column_scales + (threadIdx.x / 64 * kScaleTileRows + r) * 8 + half * 4;
      *reinterpret_cast<uint4*>(a.column_tile<Nvfp4::kBlock>(b.slab, h_tile, block_tile) + r * 16) =
          make_uint4(*reinterpret_cast<const uint32_t*>(at), *reinterpret_cast<const uint32_t*>(at + 32 * 8),
                     *reinterpret_cast<const uint32_t*>(at + 64 * 8), *reinterpret_cast<const uint32_t*>(at + 96 * 8));
    }
  }
  wait_copies<0>();
  if (misfit) report(a.options.findings, NVTE_EP_FINDING_EXPERT_SCALE);
}

// ---- MXFP8 -----------------------------------------------------------------------------------------------------------------

// Scales of the 8 column blocks by 128 rows as FP32.
constexpr int kFactorsBytes = kTileColumns / Mxfp8::kBlock * kBand * 4;

__global__ void __launch_bounds__(kThreads, 2) receive_tiles_mxfp8(const ReceiveArguments a) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = Stage<Mxfp8>;
  float* factors = reinterpret_cast<float*>(shared + 2 * Layout::kBytes);
  uint8_t* column_scales = shared + 2 * Layout::kBytes + kFactorsBytes;  // [256 columns][4 token blocks]
  Band b;
  const int group = static_cast<int>(blockIdx.x % a.column_groups);
  if (!find_band(a, blockIdx.x / a.column_groups, &b)) return;
  const int64_t group_begin = static_cast<int64_t>(group) * kGroupColumns;
  const int64_t group_end = group_begin + kGroupColumns < a.hidden ? group_begin + kGroupColumns : a.hidden;
  // A lane has 32 tokens (one of 4 blocks) by 4 columns.
  const int word = static_cast<int>(threadIdx.x) % 64;
  const int block = static_cast<int>(threadIdx.x) / 64;
  bool misfit = false;
  fetch<Mxfp8>(a, b, group_begin, shared);
  int s = 0;
  for (int64_t column = group_begin; column < group_end; column += kTileColumns, s ^= 1) {
    fetch<Mxfp8>(a, b, column + kTileColumns < group_end ? column + kTileColumns : a.hidden,
                 shared + (s ^ 1) * Layout::kBytes);
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
    store_rowwise<Mxfp8>(a, b, column, stage, 0, &misfit);
    __syncthreads();

    const int64_t h = column + word * 4;
    const bool active = block * Mxfp8::kBlock < b.rows && h < a.hidden;
    uint32_t scale_bytes = 0;
    if (active) {
      const uint8_t* codes = stage + word * 4;
      const float* factor = factors + word / 8 * kBand + block * Mxfp8::kBlock;
      const auto values = [&](int i, float* x) {
        const uint32_t c = *reinterpret_cast<const uint32_t*>(codes + Layout::row_place(block * Mxfp8::kBlock + i));
        const float2 lo = e4m3x2_to_floats(c & 0xFFFFu), hi = e4m3x2_to_floats(c >> 16);
        x[0] = mul_rn(lo.x, factor[i]);
        x[1] = mul_rn(lo.y, factor[i]);
        x[2] = mul_rn(hi.x, factor[i]);
        x[3] = mul_rn(hi.y, factor[i]);
      };
      float amax[4] = {bits_float(kNanBits), bits_float(kNanBits), bits_float(kNanBits), bits_float(kNanBits)};
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
    if (a.columnwise_scales == nullptr) continue;
    if (a.linear) {
      if (active) {
        *reinterpret_cast<uint32_t*>(a.column_scales<Mxfp8::kBlock>(b.slab) + (b.band * 4 + block) * a.hidden + h) =
            scale_bytes;
      }
      continue;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      column_scales[(word * 4 + j) * 4 + block] = static_cast<uint8_t>(scale_bytes >> (8 * j));
    }
    __syncthreads();
    const int r = static_cast<int>(threadIdx.x) % 32;
    const int64_t h_tile = column / kScaleTileRows + threadIdx.x / 32;
    if (threadIdx.x < 64 && h_tile * kScaleTileRows < a.hidden) {
      const uint8_t* at = column_scales + (threadIdx.x / 32 * kScaleTileRows + r) * 4;
      *reinterpret_cast<uint4*>(a.column_tile<Mxfp8::kBlock>(b.slab, h_tile, b.band) + r * 16) =
          make_uint4(*reinterpret_cast<const uint32_t*>(at), *reinterpret_cast<const uint32_t*>(at + 32 * 4),
                     *reinterpret_cast<const uint32_t*>(at + 64 * 4), *reinterpret_cast<const uint32_t*>(at + 96 * 4));
    }
  }
  wait_copies<0>();
}

}  // namespace

Status launch_receive_tiles(int32_t format, const ReceiveArguments& a, int64_t tiles, const LaunchContext& context) {
  LaunchShape shape;
  shape.blocks = tiles * a.column_groups;
  shape.threads = kThreads;
  if (format == NVTE_EP_FORMAT_MXFP8) {
    shape.shared_bytes = 2 * Stage<Mxfp8>::kBytes + kFactorsBytes + kTileColumns * (kBand / Mxfp8::kBlock);
    return launch_kernel<receive_tiles_mxfp8>("receive_tiles_mxfp8", context, shape, a);
  }
  shape.shared_bytes = 2 * Stage<Nvfp4>::kBytes + kUnitsBytes + kColumnScalesBytes;
  return a.options.stochastic ? launch_kernel<receive_tiles_nvfp4<true>>("receive_tiles_nvfp4", context, shape, a)
                              : launch_kernel<receive_tiles_nvfp4<false>>("receive_tiles_nvfp4", context, shape, a);
}

}  // namespace nvte_ep
