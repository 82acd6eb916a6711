// Direct receive of NVFP4 with the columnwise operand: both operands in one pass.
//
// A thread block works through a group of columns of one band of 128 tokens, 256 columns at a time in shared
// memory; the next 256 are on their way meanwhile. Each warp works alone on 32 of the columns, 16 tokens at a
// time: the tensor cores transform them, and the results go through the warp's own corner of shared memory,
// so that a lane gets all 16 of one column and encodes them as a block.
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
constexpr int kWarpBlocks = kWarpColumns / kBlock;  // of columns
constexpr int kRowBytes = kTileColumns / 2;
constexpr int kRowChunks = kRowBytes / 16;
constexpr uint32_t kNanCodes = 0x77777777u;
constexpr uint32_t kNanScale = 0x7Fu;

// Shared memory. Gaps keep lanes that read at one time in different banks; so do the chunks of 16 bytes of a
// row of codes, which lie in an order of the row's own.
constexpr int kUnitStride = kBand + 8;  // BF16 numbers
// A column's place with its warp: 16 results of BF16, then the codes and the scales of its 8 token blocks.
constexpr int kSlotCodes = 2 * kBlock;
constexpr int kSlotScales = kSlotCodes + kTokenBlocks * 8;
constexpr int kSlotStride = kSlotScales + 16;
__device__ __forceinline__ uint32_t chunk_place(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + (chunk ^ (row % kRowChunks)) * 16;
}
// What the stages of a band need to know of it.
struct BandPlan {
  uint32_t rows;
  int column_k;  // the expert's columnwise exponent
  bool illegal;
  int64_t first_block;  // of tokens, in all slots
  // Its part of the operand; null: not wanted
  uint8_t* payload;
  uint8_t* scales;
  uint8_t* column_payload;  // column 0
  int column_stride;        // bytes from a column's codes to the next one's
  uint8_t* column_scales;   // the same; or the band's first tile of columns 0 to 127
  int column_tiles;         // of 128 columns
  bool second_tile;         // the band has two tiles of 128 columns

  __device__ __forceinline__ BandPlan(const ReceiveArguments& a, const Band& b, uint8_t column_exponent)
      : rows(b.rows),
        column_k(static_cast<int>(column_exponent) + Nvfp4::kMinExponent),
        illegal(column_exponent == kIllegalExponent),
        first_block(b.first_row / kBlock),
        payload(a.payload == nullptr ? nullptr : a.payload + b.first_row * a.layout.payload_bytes),
        scales(b.scales),
        column_payload(nullptr),
        column_stride(static_cast<int>(b.slab.rows / 2)),
        column_scales(nullptr) {
    const int blocks = static_cast<int>(b.slab.rows / kBlock);
    column_tiles = (blocks + 3) / 4;
    second_tile = (b.band * 2 + 1) * 4 < blocks;
    if (a.columnwise_payload != nullptr) {
      column_payload = a.columnwise_payload + b.slab.first_row * a.hidden / 2 + b.band * (kBand / 2);
    }
    if (a.columnwise_scales != nullptr) {
      column_scales = a.linear ? a.column_scales<kBlock>(b.slab) + b.band * kTokenBlocks
                               : a.column_tile<kBlock>(b.slab, 0, b.band * 2);
    }
  }
};

// 256 columns of the rows as they came.
struct Piece {
  uint8_t codes[kBand * kRowBytes];
  uint8_t scales[kBand * kScaleColumns];
};
struct Stage {
  Piece pieces[2];
  uint16_t units[kScaleColumns * kUnitStride];
  uint8_t slots[kTileThreads / kWarp][kWarpColumns * kSlotStride];
  const uint8_t* rows[kBand];
  alignas(8) uint8_t plan_bytes[sizeof(BandPlan)];
  RowRescale rescale[kBand];
  float row_units[kBand];           // 2^(k - c + 114), 0 or NaN
  float butterfly_units[kBand];     // 16 times the token scale
  TinyMultiplier multipliers[128];  // of every block scale, for results of the tensor cores

  __device__ __forceinline__ BandPlan* plan() { return reinterpret_cast<BandPlan*>(plan_bytes); }
};

// How values go through the tensor cores. A unit is a row's block scale times 2^(k - c + 114), k the token's
// exponent and c the expert's columnwise one, in BF16: exact. Codes come as BF16 numbers times 2^-126, so that
// a product is the value times 2^(-c - 12). The signs have 2^-99, and a sum is the result times 2^(-c - 109):
// the quarter is not taken. That is a block of numbers under the second-level scale 2^-109, below 2^-97.
constexpr int kUnitExponent = 114;
constexpr int kSumExponent = -10 + kSignExponent;
// 16 products of 8 bits whose exponents span 10, and 4 bits of sum: 22 of the 24 bits, two to spare. Under
// smaller units terms would be multiples of less than 2^-126, the smallest normal number.
constexpr uint32_t kMaxSpan = 10;
constexpr uint32_t kLeastUnit = static_cast<uint32_t>(4 - kSignExponent + 127) << 23;
constexpr uint32_t kMostUnit = 0x7F000000u;  // 2^127
// Units as FP32 bits; least: the smallest that is not 0, less one.
__device__ __forceinline__ bool sums_are_exact(uint32_t most, uint32_t least) {
  return most < kMostUnit && least >= kLeastUnit - 1 &&
         static_cast<int>(most >> 23) - static_cast<int>(least >> 23) <= static_cast<int>(kMaxSpan);
}

// Of stochastic rounding.
struct Draws {
  uint64_t seed, offset;
  uint64_t stream;  // rank << 54
};

// A thread's part of moving 256 columns of a band: 16-byte chunks of the rows r, r + 32, ..., and the scales of
// one row. Rows past the band's end are copies of its first.
class Mover {
 public:
  // column: of the operand.
  static __device__ __forceinline__ void fetch(const ReceiveArguments& a, const Stage* stage, Piece* piece,
                                               uint32_t column) {
    const uint32_t at = column / 2 + chunk() * 16;
    if (at < static_cast<uint32_t>(a.layout.payload_bytes)) {
      const uint32_t to = shared_address(piece->codes) + place();
      const uint8_t* from[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) from[i] = stage->rows[first_row() + i * kStep] + at;
#pragma unroll
      for (int i = 0; i < kCount; ++i) copy_async16(to + i * kStep * kRowBytes, from[i]);
    }
    // 16 bytes of scales: they may run past a row's last scale, but not past the row.
    if (threadIdx.x < kBand) {
      copy_async16(
          shared_address(piece->scales) + threadIdx.x * kScaleColumns,
          stage->rows[threadIdx.x] + (static_cast<uint32_t>(a.layout.payload_bytes) + column / kBlock));
    }
    commit_copies();
  }
  static __device__ __forceinline__ void store_payload(const ReceiveArguments& a, uint32_t rows,
                                                       uint8_t* band, const Piece& piece, uint32_t column) {
    const uint32_t bytes = static_cast<uint32_t>(a.layout.payload_bytes);
    const uint32_t at = column / 2 + chunk() * 16;
    if (band == nullptr || at >= bytes) return;
    uint8_t* to = in_global(band) + (first_row() * bytes + at);
    const uint8_t* from = piece.codes + place();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first_row() + i * kStep < rows) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + i * kStep * kRowBytes);
      }
      to += kStep * bytes;
    }
  }

 private:
  static constexpr int kStep = kTileThreads / kRowChunks;  // rows
  static constexpr int kCount = kBand / kStep;
  static_assert(kStep % kRowChunks == 0, "a thread's chunks lie at one place in their rows");
  static __device__ __forceinline__ uint32_t first_row() { return threadIdx.x / kRowChunks; }
  static __device__ __forceinline__ uint32_t chunk() { return threadIdx.x % kRowChunks; }
  static __device__ __forceinline__ uint32_t place() { return chunk_place(first_row(), chunk()); }
};

// A warp's units: those of its two blocks of columns, a lane two pairs of tokens. Whether all sums of its 128
// tokens are exact.
__device__ __forceinline__ bool make_units(Stage* stage, const Piece& piece) {
  uint32_t most = 0, least = ~0u;
  const auto add = [&](uint32_t unit) {
    most = max(most, unit);
    least = min(least, unit - 1);
  };
  uint16_t* units = stage->units + warp_id() * kWarpBlocks * kUnitStride;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = (lane_id() + i * kWarp) * 2;
    const float2 row_unit = *reinterpret_cast<const float2*>(stage->row_units + row);
    const uint8_t* scales = piece.scales + row * kScaleColumns + warp_id() * kWarpBlocks;
    const float2 f = e4m3x2_to_floats(*reinterpret_cast<const uint16_t*>(scales) & 0x7F7Fu);
    const float2 g = e4m3x2_to_floats(*reinterpret_cast<const uint16_t*>(scales + kScaleColumns) & 0x7F7Fu);
    const uint32_t first[2] = {float_bits(mul_rn(f.x, row_unit.x)), float_bits(mul_rn(g.x, row_unit.y))};
    const uint32_t second[2] = {float_bits(mul_rn(f.y, row_unit.x)), float_bits(mul_rn(g.y, row_unit.y))};
    add(first[0]);
    add(first[1]);
    add(second[0]);
    add(second[1]);
    *reinterpret_cast<uint32_t*>(units + row) = pick_bytes(first[0], first[1], 0x7632);
    *reinterpret_cast<uint32_t*>(units + kUnitStride + row) = pick_bytes(second[0], second[1], 0x7632);
  }
  most = __reduce_max_sync(kAllLanes, most);
  least = __reduce_min_sync(kAllLanes, least);
  return sums_are_exact(most, least);
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
// exponent bits and the highest of the mantissa. One product puts a nibble to both places.
template <int kNibble>
__device__ __forceinline__ uint32_t tiny_of_nibble(uint32_t w) {
  if constexpr (kNibble == 3) return (w & 0x80008000u) | ((w >> 6) & 0x01C001C0u);
  if constexpr (kNibble == 2) return tiny_of_nibble<0>(w >> 8);
  constexpr uint32_t kNibbles = kNibble == 0 ? 0x000F000Fu : 0x00F000F0u;
  constexpr uint32_t kPlaces = kNibble == 0 ? (1u << 12) + (1u << 6) : (1u << 8) + (1u << 2);
  return (w & kNibbles) * kPlaces & 0x81C081C0u;
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
  load_matrices_transposed(shared_codes + block * (kBlock * kRowBytes), &w[0], &w[1]);
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
__device__ __forceinline__ Block16<Bf16Token> transform_by_butterflies(const Stage* stage, const Piece& piece,
                                                                       int block, uint32_t column) {
  float value[16], unit[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = block * kBlock + i;
    const uint32_t codes = piece.codes[chunk_place(row, column / 32) + column / 2 % 16];
    value[i] = fast_e4m3_to_float(e2m1_low_to_e4m3(column % 2 == 0 ? codes : codes >> 4) & 0xFFu);
    // A quarter of the row's token scale times 64: the value's factor 2^-6.
    unit[i] = mul_rn(fast_e4m3_to_float(piece.scales[row * kScaleColumns + column / kBlock] & 0x7Fu),
                     stage->butterfly_units[row]);
  }
  return hadamard16_of_products(value, unit);
}

// The token blocks of a warp's 32 columns whose sums are exact, a bit each. Ends with the units in place.
__device__ __forceinline__ uint32_t exact_blocks(Stage* stage, const Piece& piece, int blocks) {
  const bool all = make_units(stage, piece);
  __syncwarp();
  if (all) return (1u << blocks) - 1u;
  uint32_t mask = 0;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    if (is_exact(stage, block)) mask |= 1u << block;
  }
  return mask;
}

__device__ __forceinline__ Philox4 column_random(const Draws& d, int64_t block, int64_t h) {
  return random_block(d.seed, d.offset, RandomStream::kColumn,
                      d.stream | (static_cast<uint64_t>(h) << 32) | static_cast<uint64_t>(block));
}

// One token block of one column by the definition, into its slot.
template <bool kStochastic, bool kScaleUp>
__device__ __noinline__ void encode_by_definition(const Stage* stage, const Piece& piece, uint8_t* slot,
                                                  int block, int column, int k, bool illegal, uint32_t r0,
                                                  uint32_t r1, uint32_t r2, uint32_t r3) {
  const uint32_t random[4] = {r0, r1, r2, r3};
  uint2 codes = make_uint2(kNanCodes, kNanCodes);
  uint32_t scale = kNanScale;
  if (!illegal) {
    const Block16<Bf16Token> y = transform_by_butterflies(stage, piece, block, column);
    const uint32_t largest = y.largest();
    if (largest <= 0x7F800000u) {
      codes = encode_nvfp4_block<Bf16Token, kStochastic>(y, bits_float(largest), true,
                                                         SecondLevel(k, kScaleUp), random, &scale);
    }
  }
  *reinterpret_cast<uint2*>(slot + kSlotCodes + block * 8) = codes;
  slot[kSlotScales + block] = static_cast<uint8_t>(scale);
}

// A block scale's part of the encoder, for results of the tensor cores: TinyMultiplier, or the FP32 multiplier
// where that one is not used.
template <bool kStochastic>
constexpr bool kByTiny = !kStochastic && !kHardwareE2m1;
template <bool kStochastic>
__device__ __forceinline__ TinyMultiplier encoder_of(uint32_t scale) {
  const float multiplier = SecondLevel(kSumExponent, false).multiplier(scale);
  if constexpr (!kByTiny<kStochastic>) {
    return TinyMultiplier{float_bits(prepare_multiplier<Bf16Token, kStochastic>(multiplier, scale)), 0};
  }
  if (scale == 0 || scale == kNanScale) return TinyMultiplier{0, 0};  // the latter is no block's
  TinyMultiplier m = tiny_multiplier(multiplier * exp2_int(-112), scale);
  uint32_t largest = float_bits(__fdiv_rn(kFastLimit, multiplier)) >> 16;
  while (mul_rn(bits_float((largest + 1) << 16), multiplier) < kFastLimit) ++largest;
  while (!(mul_rn(bits_float(largest << 16), multiplier) < kFastLimit)) --largest;
  m.third |= largest << 16;
  return m;
}
// Whether a block is encoded right: not where its scale came out 0, or was cut off at 448.
template <bool kStochastic>
__device__ __forceinline__ bool takes(const TinyMultiplier& m, float amax) {
  if constexpr (kByTiny<kStochastic>) return float_bits(amax) <= m.third;  // the low bits of amax are 0
  return is_within_codes<Bf16Token, kStochastic>(amax, bits_float(m.halves));
}
// y: pairs (0, 2), (4, 6), (1, 3), (5, 7), and the same of the other eight.
template <bool kStochastic>
__device__ __forceinline__ uint2 encode_pairs(const Block16<Bf16Token>& y, const TinyMultiplier& m,
                                              const uint32_t* random) {
  if constexpr (kByTiny<kStochastic>) {
    return make_uint2(encode_tiny_e2m1x8(y.word, m), encode_tiny_e2m1x8(y.word + 4, m));
  } else if constexpr (kStochastic) {
    const float multiplier = bits_float(m.halves);
    return make_uint2(encode_pairs_stochastic<Bf16Token>(y.word, multiplier, random),
                      encode_pairs_stochastic<Bf16Token>(y.word + 4, multiplier, random + 2));
  } else {
    uint2 codes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = y.value(h * 8 + i % 2 * 4 + i / 2);
      (h == 0 ? codes.x : codes.y) = encode_e2m1x8(v, bits_float(m.halves));
    }
    return codes;
  }
}

// A warp's 32 columns of a band: codes and scales to the slots.
template <bool kStochastic, bool kScaleUp>
__device__ __forceinline__ void encode_columns(Stage* stage, const Piece& piece, const HadamardSigns& signs,
                                               const Draws& draws, uint32_t first_column) {
  uint8_t* const slots = stage->slots[warp_id()];
  uint8_t* const slot = slots + lane_id() * kSlotStride;
  // Lane l names row l % 8 of matrix l / 8.
  const uint32_t shared_codes = shared_address(piece.codes + chunk_place(lane_id() % 16, warp_id()));
  const uint32_t shared_slots =
      shared_address(slots + (lane_id() / 16 * 8 + lane_id() % 8) * kSlotStride + lane_id() / 8 % 2 * kBlock);
  const int column = column_of_slot(lane_id());
  const int blocks = static_cast<int>(stage->plan()->rows / kBlock);
  const uint32_t all = (1u << blocks) - 1u;
  uint32_t exact = __reduce_or_sync(kAllLanes, exact_blocks(stage, piece, blocks));
  if (stage->plan()->illegal) exact = 0;
  uint32_t left = ~exact & all;  // what the loop does not do, or not right
  *reinterpret_cast<uint2*>(slot + kSlotScales) = make_uint2(0, 0);
  const SecondLevel second(kSumExponent, kScaleUp);
  const auto encode = [&](int block) {
    transform_on_tensor_cores(stage, signs, block, shared_codes, shared_slots);
    __syncwarp();
    const uint4 lo = *reinterpret_cast<const uint4*>(slot), hi = *reinterpret_cast<const uint4*>(slot + 16);
    const Block16<Bf16Token> y{{lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}};
    const float amax = bits_float(y.largest());
    const uint32_t scale = second.block_scale_of_finite(amax);
    const TinyMultiplier multiplier = stage->multipliers[scale];
    Philox4 random;
    if constexpr (kStochastic)
      random = column_random(draws, stage->plan()->first_block + block, first_column + column);
    *reinterpret_cast<uint2*>(slot + kSlotCodes + block * 8) =
        encode_pairs<kStochastic>(y, multiplier, random.word);
    slot[kSlotScales + block] = static_cast<uint8_t>(scale);
    if (!takes<kStochastic>(multiplier, amax)) left |= 1u << block;
    __syncwarp();  // the results are read
  };
  if (exact == (1u << kTokenBlocks) - 1u) {  // nearly always
#pragma unroll kStochastic ? 1 : 4
    for (int block = 0; block < kTokenBlocks; ++block) encode(block);
  } else {
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      if ((exact >> block & 1u) != 0) encode(block);
    }
  }
  if (__any_sync(kAllLanes, left != 0) != 0) {  // rare
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      if ((left >> block & 1u) == 0) continue;
      Philox4 random{};
      if constexpr (kStochastic)
        random = column_random(draws, stage->plan()->first_block + block, first_column + column);
      encode_by_definition<kStochastic, kScaleUp>(
          stage, piece, slot, block, warp_id() * kWarpColumns + column, stage->plan()->column_k,
          stage->plan()->illegal, random.word[0], random.word[1], random.word[2], random.word[3]);
    }
  }
  __syncwarp();  // the codes are there
}

// Where a column's scales are.
__device__ __forceinline__ uint8_t* scales_of_column(const BandPlan& p, uint32_t h) {
  constexpr uint32_t kTileRows = static_cast<uint32_t>(kScaleTileRows);
  return in_global(p.column_scales) + static_cast<int64_t>(h / kTileRows) * p.column_tiles * kTileBytes +
         h % 32 * 16 + h % kTileRows / 32 * 4;
}
__device__ __forceinline__ void store_tile_scales(const BandPlan& p, uint32_t h, uint2 scales) {
  uint8_t* to = scales_of_column(p, h);
  *reinterpret_cast<uint32_t*>(to) = scales.x;
  if (p.second_tile) *reinterpret_cast<uint32_t*>(to + kTileBytes) = scales.y;
}

// A warp's codes and scales to the operand.
__device__ __forceinline__ void store_columns(const BandPlan& p, bool linear, const uint8_t* slots,
                                              uint32_t first_column) {
  const int blocks = static_cast<int>(p.rows / kBlock);
  if (p.column_payload != nullptr) {
    // Four lanes a column: 16 bytes, two token blocks, each.
    const uint8_t* from = slots + lane_id() / 4 * kSlotStride + kSlotCodes + lane_id() % 4 * 16;
    const int block = lane_id() % 4 * 2;
    uint8_t* to = in_global(p.column_payload) +
                  static_cast<int64_t>(first_column + lane_id() / 4 * 4) * p.column_stride + block * 8;
    const bool whole = block + 1 < blocks && p.column_stride % 16 == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + i * 8 * kSlotStride);
      if (whole) {
        *reinterpret_cast<uint4*>(to) = v;
      } else {
        if (block < blocks) *reinterpret_cast<uint2*>(to) = make_uint2(v.x, v.y);
        if (block + 1 < blocks) *reinterpret_cast<uint2*>(to + 8) = make_uint2(v.z, v.w);
      }
      to += p.column_stride;
    }
  }
  if (p.column_scales == nullptr) return;
  const uint32_t h = first_column + column_of_slot(lane_id());
  const uint2 scales = *reinterpret_cast<const uint2*>(slots + lane_id() * kSlotStride + kSlotScales);
  if (!linear) {
    store_tile_scales(p, h, scales);
    return;
  }
  uint8_t* to = in_global(p.column_scales) + static_cast<int64_t>(h) * (p.column_stride / 8);
#pragma unroll 1
  for (int i = 0; i < blocks; ++i) {
    to[i] = static_cast<uint8_t>((i < 4 ? scales.x : scales.y) >> (8 * (i % 4)));
  }
}

// What all of a band's stages need to know of its rows.
__device__ __forceinline__ void scale_band_rows(const ReceiveArguments& a, const Band& b, Stage* stage,
                                                uint8_t exponent, int column_k) {
  if (threadIdx.x >= kBand) return;
  const int row = static_cast<int>(threadIdx.x);
  float row_unit = 0.0f;
  float token_scale = 0.0f;
  if (row < b.rows) {
    token_scale = *reinterpret_cast<const float*>(stage->rows[row] + a.layout.token_scale_offset);
    int k;
    const Nvfp4::ScaleKind kind = Nvfp4::classify(token_scale, &k);
    if (kind == Nvfp4::ScaleKind::kLive) {
      const int exponent_of_unit = k - column_k + kUnitExponent;
      row_unit = exponent_of_unit > kUnitExponent + 4 ? bits_float(kNanBits)  // above a fixed scale
                                                      : exp2_int(max(exponent_of_unit, -126));
    } else if (kind == Nvfp4::ScaleKind::kNan) {
      row_unit = token_scale = bits_float(kNanBits);
    }
  }
  stage->rescale[row] = RowRescale(token_scale, exponent);
  stage->row_units[row] = row_unit;
  stage->butterfly_units[row] = mul_rn(token_scale, 16.0f);
}

// The rowwise scales of a group of columns.
__device__ __forceinline__ void move_scales(const ReceiveArguments& a, Stage* stage, int64_t begin,
                                            int64_t end) {
  const BandPlan& plan = *stage->plan();
  if (plan.scales == nullptr) return;
  bool misfit = false;
  for (int64_t i = warp_id(); i < (end - begin + kPatchColumns - 1) / kPatchColumns * kPatchesPerTile;
       i += kTileThreads / kWarp) {
    const int64_t column = patch_column(begin + i / kPatchesPerTile * kPatchColumns);
    if (column >= end) continue;
    move_patch<Nvfp4>(
        a, static_cast<int>(i % kPatchesPerTile), column, static_cast<int>(plan.rows), in_global(plan.scales),
        [&](int row) { return in_global(stage->rows[row]); }, stage->rescale, &misfit);
  }
  if (misfit) report(a.options.findings, NVTE_EP_FINDING_EXPERT_SCALE);
}

template <bool kStochastic, bool kScaleUp>
__device__ __forceinline__ void receive_columns(const ReceiveArguments& a, uint32_t index, Stage* stage) {
  Band b;
  const Turn turn(a, index);
  const uint32_t work = turn.work;
  const int group = static_cast<int>(work % static_cast<uint32_t>(a.column_groups));
  const uint32_t group_begin = static_cast<uint32_t>(group * a.group_columns);
  const uint32_t group_end = static_cast<uint32_t>(min(group_begin + a.group_columns, a.hidden));
  bool there = find_band(a, work, &b);
  turn.wait_for_pointers(a);
  if (there) {
    const int row = static_cast<int>(threadIdx.x) % kBand;
    const uint8_t* at = a.row(b.first_row + (row < b.rows ? row : 0));
    if (threadIdx.x < kBand) stage->rows[row] = at;
    there = turn.takes(a, at);
  }
  if (there) Mover::fetch(a, stage, &stage->pieces[0], group_begin);
  turn.wait_for_rest();  // the exponents
  if (!there) return;
  const uint8_t* known = a.options.expert_exponents;
  const uint8_t exponent = known != nullptr      ? known[2 * b.slab.expert]
                           : a.scales != nullptr ? *a.group_exponent(b.slab, b.band, group)
                                                 : 0;
  const uint8_t column_exponent =
      known != nullptr ? known[2 * b.slab.expert + 1] : *a.column_exponent(b.slab, b.band, group);
  Draws draws{};
  if constexpr (kStochastic) {
    draws.seed = uniform(static_cast<uint64_t>(a.options.rng_state[0]));
    draws.offset = uniform(static_cast<uint64_t>(a.options.rng_state[1]));
    draws.stream = static_cast<uint64_t>(a.options.rank) << 54;
  }
  const BandPlan& plan = *stage->plan();
  if (threadIdx.x == 0) *stage->plan() = BandPlan(a, b, column_exponent);
  scale_band_rows(a, b, stage, exponent, static_cast<int>(column_exponent) + Nvfp4::kMinExponent);
  if (threadIdx.x >= kBand) {
    stage->multipliers[threadIdx.x - kBand] = encoder_of<kStochastic>(threadIdx.x - kBand);
  }
  __syncthreads();  // the exponents are read by all
  move_scales(a, stage, group_begin / kBlock, group_end / kBlock);
  const HadamardSigns signs;
  int s = 0;

#pragma unroll 1
  for (uint32_t column = group_begin; column < group_end; column += kTileColumns, s ^= 1) {
    const Piece& piece = stage->pieces[s];
    wait_copies<0>();
    __syncthreads();  // the piece is there, the one before is done with
    if (column + kTileColumns < group_end) {
      Mover::fetch(a, stage, &stage->pieces[s ^ 1], column + kTileColumns);
    }
    Mover::store_payload(a, plan.rows, plan.payload, piece, column);
    const uint32_t first_column = column + warp_id() * kWarpColumns;
    if (first_column < group_end) {
      encode_columns<kStochastic, kScaleUp>(stage, piece, signs, draws, first_column);
      store_columns(plan, a.linear, stage->slots[warp_id()], first_column);
    } else if (plan.column_scales != nullptr && !a.linear &&
               first_column < static_cast<uint32_t>(round_up(a.hidden, kScaleTileRows))) {
      store_tile_scales(plan, first_column + lane_id(), make_uint2(0, 0));  // the last tile past the columns
    }
  }
}

template <bool kStochastic, bool kScaleUp>
__global__ void __launch_bounds__(kTileThreads, 3) receive_columns_nvfp4(const ReceiveArguments a) {
  extern __shared__ __align__(128) uint8_t shared[];
  for (uint32_t work = blockIdx.x; work < a.blocks; work += gridDim.x) {
    receive_columns<kStochastic, kScaleUp>(a, work, reinterpret_cast<Stage*>(shared));
    __syncthreads();
  }
  wait_for_late_rows(a);
}

template <bool kStochastic, bool kScaleUp>
Status launch(const ReceiveArguments& a, const LaunchContext& context) {
  LaunchShape shape;
  shape.blocks = a.blocks;
  shape.bounded = true;
  shape.overlaps = a.late_begin == nullptr || context.max_sms == 0;  // not more multiprocessors than allowed
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
