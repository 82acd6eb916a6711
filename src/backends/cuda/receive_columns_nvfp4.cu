// Direct receive of NVFP4 with the columnwise operand: both operands in one pass.
//
// A thread block works through a group of columns of one band of 128 tokens, 256 columns at a time. It brings
// their codes and scales to shared memory and writes the rowwise operand; from there on each warp works alone
// on 32 of the columns, 16 tokens at a time: the tensor cores transform them, and the results go through the
// warp's own corner of shared memory, so that a lane gets all 16 of one column and encodes them as a block.
#include "backends/cuda/receive_columns.cuh"
#include "device/hadamard.cuh"
#include "device/kernel_order.cuh"
#include "device/nvfp4_block.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kBlock = Nvfp4::kBlock;
constexpr int kWarpColumns = 32;
constexpr int kTokenBlocks = kBand / kBlock;
constexpr int kScaleColumns = kTileColumns / kBlock;
constexpr int kRowBytes = kTileColumns / 2;
constexpr uint32_t kNanCodes = 0x77777777u;
constexpr uint32_t kNanScale = 0x7Fu;

// Shared memory. Gaps keep lanes that read at one time in different banks.
constexpr int kRowStride = kRowBytes + 16;
constexpr int kUnitStride = kBand + 8;  // BF16 numbers
// A column's place with its warp: 16 results of BF16, then the codes and the scales of its 8 token blocks.
constexpr int kSlotCodes = 2 * kBlock;
constexpr int kSlotScales = kSlotCodes + kTokenBlocks * 8;
constexpr int kSlotStride = kSlotScales + 16;
struct Stage {
  uint8_t codes[kBand * kRowStride];
  uint8_t scales[kBand * kScaleColumns];
  uint16_t units[kScaleColumns * kUnitStride];
  uint8_t slots[kTileThreads / kWarp][kWarpColumns * kSlotStride];
  RowRescale rescale[kBand];
  float row_units[kBand];               // 16 times the token scale, for the butterflies
  float multipliers[128];               // of every block scale, for results of the tensor cores
  uint8_t exact[kTileThreads / kWarp];  // of 32 tokens and 8 blocks of columns
};

// How values go through the tensor cores. A unit is a row's block scale times 2^(k - c + 114), k the token's
// exponent and c the expert's columnwise one, in BF16: exact. Codes come as BF16 numbers times 2^-126, so that
// a product is the value times 2^(-c - 12), and a sum the result times 2^(-c - 10): the quarter is not taken.
// That is a block of numbers under the second-level scale 2^-10.
constexpr int kUnitExponent = 114;
constexpr int kSumExponent = -10;
// 16 products of 8 bits whose exponents span 10, and 4 bits of sum: 22 of the 24 bits, two to spare. Units of
// less than 2 would make products that are not normal numbers.
constexpr uint32_t kMaxSpan = 10;
constexpr uint32_t kLeastUnit = 0x40000000u;  // 2
constexpr uint32_t kMostUnit = 0x7F000000u;   // 2^127
// Units as FP32 bits; least: the smallest that is not 0, less one.
__device__ __forceinline__ bool sums_are_exact(uint32_t most, uint32_t least) {
  return most < kMostUnit && least >= kLeastUnit - 1 &&
         static_cast<int>(most >> 23) - static_cast<int>(least >> 23) <= static_cast<int>(kMaxSpan);
}

struct ColumnScaling {
  int k;  // the expert's columnwise exponent
  bool illegal;
  uint64_t seed, offset;  // of stochastic rounding
  uint64_t stream;        // rank << 54
};

// A thread's part of moving 256 columns of a band: 16-byte chunks of the rows first, first + kStep, ..., and the scales of
// one row. The rowwise payload is written on the way. Addresses advance from one stage to the next.
class Mover {
 public:
  __device__ __forceinline__ Mover(const ReceiveArguments& a, const Band& b, int64_t column)
      : from_(a.rows + ((b.first_row + first_row()) * a.row_stride + column / 2 + chunk() * 16)),
        to_(a.payload + ((b.first_row + first_row()) * a.layout.payload_bytes + column / 2 + chunk() * 16)) {}

  __device__ __forceinline__ void move(const ReceiveArguments& a, const Band& b, int64_t column,
                                       Stage* stage) {
    const bool inside = column / 2 + chunk() * 16 < a.layout.payload_bytes;
    const int rows = b.rows - first_row();
    uint4 codes[kCount];
    uint4 scales = make_uint4(0, 0, 0, 0);
    const uint8_t* from = from_;
    const int64_t from_step = kStep * a.row_stride;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      codes[i] = make_uint4(0, 0, 0, 0);
      if (inside && i * kStep < rows) codes[i] = *reinterpret_cast<const uint4*>(from);
      from += from_step;
    }
    // Up to 16 bytes of scales: they may run past a row's last scale, but not past the row.
    if (static_cast<int>(threadIdx.x) < b.rows) {
      scales = *reinterpret_cast<const uint4*>(
          a.rows + ((b.first_row + threadIdx.x) * a.row_stride + a.layout.payload_bytes + column / kBlock));
    }
    if (threadIdx.x < kBand) {
      *reinterpret_cast<uint4*>(stage->scales + threadIdx.x * kScaleColumns) = scales;
    }
    uint8_t* place = stage->codes + first_row() * kRowStride + chunk() * 16;
    uint8_t* to = to_;
    const int64_t to_step = kStep * a.layout.payload_bytes;
    const bool writes = inside && a.payload != nullptr;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      *reinterpret_cast<uint4*>(place + i * kStep * kRowStride) = codes[i];
      if (writes && i * kStep < rows) *reinterpret_cast<uint4*>(to) = codes[i];
      to += to_step;
    }
    from_ += kRowBytes;
    to_ += kRowBytes;
  }

 private:
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kStep = kTileThreads / kChunks;  // rows
  static constexpr int kCount = kBand / kStep;
  static __device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) / kChunks; }
  static __device__ __forceinline__ int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }

  const uint8_t* from_;
  uint8_t* to_;
};

// A thread takes 8 blocks of columns of one row. row_unit: 2^(k - c + 114), 0 or NaN.
__device__ __forceinline__ void make_units(Stage* stage, float row_unit) {
  const int row = static_cast<int>(threadIdx.x) % kBand;
  const int first = static_cast<int>(threadIdx.x) / kBand * 8;
  const uint2 scales = *reinterpret_cast<const uint2*>(stage->scales + row * kScaleColumns + first);
  uint32_t most = 0, least = ~0u;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float2 f = e4m3x2_to_floats(((i < 4 ? scales.x : scales.y) >> (i % 4 * 8)) & 0x7F7Fu);
    const uint32_t lo = float_bits(mul_rn(f.x, row_unit)), hi = float_bits(mul_rn(f.y, row_unit));
    most = max(most, max(lo, hi));
    least = min(least, min(lo - 1, hi - 1));
    stage->units[(first + i) * kUnitStride + row] = static_cast<uint16_t>(lo >> 16);
    stage->units[(first + i + 1) * kUnitStride + row] = static_cast<uint16_t>(hi >> 16);
  }
  most = __reduce_max_sync(kAllLanes, most);
  least = __reduce_min_sync(kAllLanes, least);
  if (lane_id() == 0) stage->exact[warp_id()] = sums_are_exact(most, least);
}

// Whether the sums of a warp's 16 tokens by 32 columns are exact, where those of more are not all.
__device__ __forceinline__ bool is_exact(const Stage* stage, int block) {
  const int column_block = warp_id() * 2 + lane_id() / kBlock;
  const uint32_t unit =
      static_cast<uint32_t>(stage->units[column_block * kUnitStride + block * kBlock + lane_id() % kBlock])
      << 16;
  uint32_t most = unit, least = unit - 1;
#pragma unroll
  for (int d = 1; d < kBlock; d *= 2) {
    most = max(most, __shfl_xor_sync(kAllLanes, most, d));
    least = min(least, __shfl_xor_sync(kAllLanes, least, d));
  }
  return __all_sync(kAllLanes, sums_are_exact(most, least)) != 0;
}

// The code in nibble kNibble of each half, as BF16 times 2^-126: the sign at the top, the code as the lowest
// exponent bits and the highest of the mantissa.
template <int kNibble>
__device__ __forceinline__ uint32_t tiny_of_nibble(uint32_t w) {
  constexpr int kSignUp = 12 - 4 * kNibble;
  constexpr int kCodeUp = 6 - 4 * kNibble;
  const uint32_t sign = w * (1u << kSignUp);
  const uint32_t code =
      kCodeUp >= 0 ? w * (1u << (kCodeUp >= 0 ? kCodeUp : 0)) : w >> (kCodeUp >= 0 ? 0 : -kCodeUp);
  return (sign & 0x80008000u) | (code & 0x01C001C0u);
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t shared_from, uint32_t* m0, uint32_t* m1) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(*m0), "=r"(*m1)
               : "r"(shared_from)
               : "memory");
}
__device__ __forceinline__ void store_matrices(uint32_t shared_to, uint32_t m0, uint32_t m1, uint32_t m2,
                                               uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_to), "r"(m0),
               "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

// Columns 4g + i of a warp's 32 go through the tensor cores with lane 4g + t, and lie in slot 8i + g: lane
// 8i + g encodes them.
__device__ __forceinline__ int column_of_slot(int slot) { return 4 * (slot % 8) + slot / 8; }

// Results of a warp's 16 tokens by 32 columns to the slots.
__device__ __forceinline__ void transform_on_tensor_cores(const Stage* stage, const HadamardSigns& signs,
                                                          int block, uint32_t shared_codes,
                                                          uint32_t shared_slots) {
  uint32_t w[2];
  load_matrices_transposed(shared_codes + block * (kBlock * kRowStride), &w[0], &w[1]);
  // Tokens 2t, 2t + 1, then 2t + 8, 2t + 9, of the block of columns.
  const uint16_t* units =
      stage->units + (warp_id() * 2 + lane_id() / kBlock) * kUnitStride + block * kBlock + lane_id() % 4 * 2;
  const uint32_t unit[2] = {*reinterpret_cast<const uint32_t*>(units),
                            *reinterpret_cast<const uint32_t*>(units + 8)};
  const auto times_unit = [&](uint32_t tiny, int half) {
    return bits_of(__hmul2(bf162_of(tiny), bf162_of(unit[half])));
  };
  uint32_t y[4][2];  // of column 4g + i: outputs 2t, 2t + 1 and 8 more
  const auto multiply = [&](int i, const uint32_t (&a)[4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 d = multiply_tile(a, signs.tile[j]);
      y[i][j] = bits_of(__floats2bfloat162_rn(d.x, d.y));
      y[i + 1][j] = bits_of(__floats2bfloat162_rn(d.z, d.w));
    }
  };
  multiply(0, {times_unit(tiny_of_nibble<0>(w[0]), 0), times_unit(tiny_of_nibble<1>(w[0]), 0),
               times_unit(tiny_of_nibble<0>(w[1]), 1), times_unit(tiny_of_nibble<1>(w[1]), 1)});
  multiply(2, {times_unit(tiny_of_nibble<2>(w[0]), 0), times_unit(tiny_of_nibble<3>(w[0]), 0),
               times_unit(tiny_of_nibble<2>(w[1]), 1), times_unit(tiny_of_nibble<3>(w[1]), 1)});
  store_matrices(shared_slots, y[0][0], y[0][1], y[1][0], y[1][1]);
  store_matrices(shared_slots + 16 * kSlotStride, y[2][0], y[2][1], y[3][0], y[3][1]);
}

// Results of one column of 16 tokens by the butterflies of the definition.
__device__ __forceinline__ Block16<Bf16Token> transform_by_butterflies(const Stage* stage, int block,
                                                                       int column) {
  float value[16], unit[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = block * kBlock + i;
    const uint32_t codes = stage->codes[row * kRowStride + column / 2];
    value[i] = fast_e4m3_to_float(e2m1_low_to_e4m3(column % 2 == 0 ? codes : codes >> 4) & 0xFFu);
    // A quarter of the row's token scale times 64: the value's factor 2^-6.
    unit[i] = mul_rn(fast_e4m3_to_float(stage->scales[row * kScaleColumns + column / kBlock] & 0x7Fu),
                     stage->row_units[row]);
  }
  return hadamard16_of_products(value, unit);
}

// The token blocks of a warp's 32 columns whose sums are exact, a bit each.
__device__ __forceinline__ uint32_t exact_blocks(const Stage* stage, int blocks) {
  const uint32_t whole = *reinterpret_cast<const uint32_t*>(stage->exact + warp_id() / 4 * 4);
  if (whole == 0x01010101u) return (1u << blocks) - 1u;
  uint32_t mask = 0;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    if ((whole >> (block / 2 * 8) & 1u) != 0 || is_exact(stage, block)) mask |= 1u << block;
  }
  return mask;
}

template <bool kStochastic>
__device__ __forceinline__ Philox4 column_random(const Band& b, const ColumnScaling& c, int block,
                                                 int64_t h) {
  return random_block(
      c.seed, c.offset, RandomStream::kColumn,
      c.stream | (static_cast<uint64_t>(h) << 32) | static_cast<uint64_t>(b.first_row / kBlock + block));
}

// One token block of one column by the definition, into its slot.
template <bool kStochastic, bool kScaleUp>
__device__ __noinline__ void encode_by_definition(const Stage* stage, uint8_t* slot, int block, int column,
                                                  int k, bool illegal, uint32_t r0, uint32_t r1, uint32_t r2,
                                                  uint32_t r3) {
  const uint32_t random[4] = {r0, r1, r2, r3};
  uint2 codes = make_uint2(kNanCodes, kNanCodes);
  uint32_t scale = kNanScale;
  if (!illegal) {
    const Block16<Bf16Token> y = transform_by_butterflies(stage, block, column);
    const uint32_t largest = y.largest();
    if (largest <= 0x7F800000u) {
      codes = encode_nvfp4_block<Bf16Token, kStochastic>(y, bits_float(largest), true,
                                                         SecondLevel(k, kScaleUp), random, &scale);
    }
  }
  *reinterpret_cast<uint2*>(slot + kSlotCodes + block * 8) = codes;
  slot[kSlotScales + block] = static_cast<uint8_t>(scale);
}

// A warp's 32 columns of a band: codes and scales to the slots.
template <bool kStochastic, bool kScaleUp>
__device__ __forceinline__ void encode_columns(const Band& b, Stage* stage, const HadamardSigns& signs,
                                               const ColumnScaling& c, int64_t first_column) {
  uint8_t* const slots = stage->slots[warp_id()];
  uint8_t* const slot = slots + lane_id() * kSlotStride;
  // Lane l names row l % 8 of matrix l / 8.
  const uint32_t shared_codes =
      shared_address(stage->codes + lane_id() % 16 * kRowStride + warp_id() * (kWarpColumns / 2));
  const uint32_t shared_slots =
      shared_address(slots + (lane_id() / 16 * 8 + lane_id() % 8) * kSlotStride + lane_id() / 8 % 2 * kBlock);
  const int column = column_of_slot(lane_id());
  const int blocks = b.rows / kBlock;
  const uint32_t exact = c.illegal ? 0u : exact_blocks(stage, blocks);
  uint32_t left = ~exact & ((1u << blocks) - 1u);  // what the loop does not do, or not right
  *reinterpret_cast<uint2*>(slot + kSlotScales) = make_uint2(0, 0);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    if ((exact >> block & 1u) == 0) continue;
    transform_on_tensor_cores(stage, signs, block, shared_codes, shared_slots);
    __syncwarp();
    const uint4 lo = *reinterpret_cast<const uint4*>(slot), hi = *reinterpret_cast<const uint4*>(slot + 16);
    const Block16<Bf16Token> y{{lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}};
    const SecondLevel second(kSumExponent, kScaleUp);
    const float amax = bits_float(y.largest());
    const uint32_t scale = second.block_scale_of_finite(amax);
    const float prepared = stage->multipliers[scale];
    Philox4 random;
    if constexpr (kStochastic) random = column_random<kStochastic>(b, c, block, first_column + column);
    *reinterpret_cast<uint2*>(slot + kSlotCodes + block * 8) =
        encode_fast<Bf16Token, kStochastic>(y, prepared, random.word);
    slot[kSlotScales + block] = static_cast<uint8_t>(scale);
    // A scale of 0, or cut off at 448.
    if (!is_within_codes<Bf16Token, kStochastic>(amax, prepared)) left |= 1u << block;
    __syncwarp();  // the results are read
  }
  if (__any_sync(kAllLanes, left != 0) != 0) {  // rare
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      if ((left >> block & 1u) == 0) continue;
      Philox4 random{};
      if constexpr (kStochastic) random = column_random<kStochastic>(b, c, block, first_column + column);
      encode_by_definition<kStochastic, kScaleUp>(stage, slot, block, warp_id() * kWarpColumns + column, c.k,
                                                  c.illegal, random.word[0], random.word[1], random.word[2],
                                                  random.word[3]);
    }
  }
  __syncwarp();  // the codes are there
}

// A warp's codes and scales to the operand.
__device__ __forceinline__ void store_columns(const ReceiveArguments& a, const Band& b, const Stage* stage,
                                              int64_t first_column) {
  const int blocks = b.rows / kBlock;
  const int64_t slab_blocks = b.slab.rows / kBlock;
  if (a.columnwise_payload != nullptr) {
    // Four lanes a column: 16 bytes, two token blocks, each.
    const uint8_t* from =
        stage->slots[warp_id()] + lane_id() / 4 * kSlotStride + kSlotCodes + lane_id() % 4 * 16;
    const int block = lane_id() % 4 * 2;
    const int64_t stride = b.slab.rows / 2;
    uint8_t* to = a.columnwise_payload +
                  (b.slab.first_row * a.hidden / 2 + (first_column + lane_id() / 4 * 4) * stride +
                   b.band * (kBand / 2) + block * 8);
    const bool whole = block + 1 < blocks && b.slab.rows % 32 == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + i * 8 * kSlotStride);
      if (whole) {
        *reinterpret_cast<uint4*>(to) = v;
      } else {
        if (block < blocks) *reinterpret_cast<uint2*>(to) = make_uint2(v.x, v.y);
        if (block + 1 < blocks) *reinterpret_cast<uint2*>(to + 8) = make_uint2(v.z, v.w);
      }
      to += stride;
    }
  }
  if (a.columnwise_scales == nullptr) return;
  const int64_t h = first_column + column_of_slot(lane_id());
  const uint2 scales =
      *reinterpret_cast<const uint2*>(stage->slots[warp_id()] + lane_id() * kSlotStride + kSlotScales);
  if (a.linear) {
    uint8_t* to = a.column_scales<kBlock>(b.slab) + h * slab_blocks + b.band * kTokenBlocks;
    for (int i = 0; i < blocks; ++i) {
      to[i] = static_cast<uint8_t>((i < 4 ? scales.x : scales.y) >> (8 * (i % 4)));
    }
    return;
  }
  uint8_t* to = a.column_tile<kBlock>(b.slab, h / kScaleTileRows, b.band * 2) + h % 32 * 16 +
                h % kScaleTileRows / 32 * 4;
  *reinterpret_cast<uint32_t*>(to) = scales.x;
  if ((b.band * 2 + 1) * 4 < slab_blocks) *reinterpret_cast<uint32_t*>(to + kTileBytes) = scales.y;
}

template <bool kStochastic, bool kScaleUp>
__device__ __forceinline__ void receive_columns(const ReceiveArguments& a, uint32_t work, Stage* stage) {
  Band b;
  const int group = static_cast<int>(work % static_cast<uint32_t>(a.column_groups));
  const int64_t group_begin = group * a.group_columns;
  const int64_t group_end =
      group_begin + a.group_columns < a.hidden ? group_begin + a.group_columns : a.hidden;
  const bool there = find_band(a, work, &b);
  Mover mover(a, b, group_begin);
  if (there) mover.move(a, b, group_begin, stage);
  wait_for_kernel_before();  // the exponents are there
  if (!there) return;
  const uint8_t exponent = a.scales != nullptr ? *a.group_exponent(b.slab, b.band, group) : 0;
  const uint8_t column_exponent = *a.column_exponent(b.slab, b.band, group);
  ColumnScaling c{};
  c.illegal = column_exponent == kIllegalExponent;
  c.k = c.illegal ? 0 : static_cast<int>(column_exponent) + Nvfp4::kMinExponent;
  if constexpr (kStochastic) {
    c.seed = uniform(static_cast<uint64_t>(a.options.rng_state[0]));
    c.offset = uniform(static_cast<uint64_t>(a.options.rng_state[1]));
    c.stream = static_cast<uint64_t>(a.options.rank) << 54;
  }
  const int row = static_cast<int>(threadIdx.x) % kBand;
  float row_unit = 0.0f;
  if (row < b.rows) {
    const float token_scale = a.token_scale(b.first_row + row);
    int k;
    const Nvfp4::ScaleKind kind = Nvfp4::classify(token_scale, &k);
    if (kind == Nvfp4::ScaleKind::kLive) {
      const int exponent_of_unit = k - c.k + kUnitExponent;
      row_unit = exponent_of_unit > kUnitExponent + 4 ? bits_float(kNanBits)  // above a fixed scale
                                                      : exp2_int(max(exponent_of_unit, -126));
    } else if (kind == Nvfp4::ScaleKind::kNan) {
      row_unit = bits_float(kNanBits);
    }
    if (threadIdx.x < kBand) {
      stage->rescale[row] = RowRescale(token_scale, exponent);
      stage->row_units[row] =
          kind == Nvfp4::ScaleKind::kNan ? bits_float(kNanBits) : mul_rn(token_scale, 16.0f);
    }
  }
  if (threadIdx.x < 128) {
    const SecondLevel second(kSumExponent, false);
    stage->multipliers[threadIdx.x] =
        prepare_multiplier<Bf16Token, kStochastic>(second.multiplier(threadIdx.x), threadIdx.x);
  }
  const HadamardSigns signs;
  bool misfit = false;

#pragma unroll 1
  for (int64_t column = group_begin; column < group_end; column += kTileColumns) {
    if (column != group_begin) mover.move(a, b, column, stage);
    __syncthreads();  // the exponents are read too: from here on their places are written
    make_units(stage, row_unit);
    store_scales<Nvfp4>(a, b, column, stage->scales, stage->rescale, &misfit);
    __syncthreads();
    const int64_t first_column = column + warp_id() * kWarpColumns;
    if (first_column < a.hidden) {
      encode_columns<kStochastic, kScaleUp>(b, stage, signs, c, first_column);
      store_columns(a, b, stage, first_column);
    } else if (a.columnwise_scales != nullptr && !a.linear &&
               first_column < round_up(a.hidden, kScaleTileRows)) {
      // What the last tile has past the columns is 0.
      const int64_t h = first_column + lane_id();
      uint8_t* to = a.column_tile<kBlock>(b.slab, h / kScaleTileRows, b.band * 2) + h % 32 * 16 +
                    h % kScaleTileRows / 32 * 4;
      *reinterpret_cast<uint32_t*>(to) = 0;
      if ((b.band * 2 + 1) * 4 < b.slab.rows / kBlock) *reinterpret_cast<uint32_t*>(to + kTileBytes) = 0;
    }
    __syncthreads();  // before the next stage
  }
  if (misfit) report(a.options.findings, NVTE_EP_FINDING_EXPERT_SCALE);
}

template <bool kStochastic, bool kScaleUp>
__global__ void __launch_bounds__(kTileThreads, 3) receive_columns_nvfp4(const ReceiveArguments a) {
  extern __shared__ __align__(128) uint8_t shared[];
  for (uint32_t work = blockIdx.x; work < a.blocks; work += gridDim.x) {
    receive_columns<kStochastic, kScaleUp>(a, work, reinterpret_cast<Stage*>(shared));
    __syncthreads();
  }
}

template <bool kStochastic, bool kScaleUp>
Status launch(const ReceiveArguments& a, const LaunchContext& context) {
  LaunchShape shape;
  shape.blocks = a.blocks;
  shape.bounded = true;
  shape.overlaps = true;
  shape.threads = kTileThreads;
  shape.shared_bytes = static_cast<int>(sizeof(Stage));
  return launch_kernel<receive_columns_nvfp4<kStochastic, kScaleUp>>("receive_columns_nvfp4", context, shape,
                                                                     a);
}

}  // namespace

Status launch_receive_columns_nvfp4(const ReceiveArguments& a, const LaunchContext& context) {
  if (a.options.scale_up) {
    return a.options.stochastic ? launch<true, true>(a, context) : launch<false, true>(a, context);
  }
  return a.options.stochastic ? launch<true, false>(a, context) : launch<false, false>(a, context);
}

}  // namespace nvte_ep
