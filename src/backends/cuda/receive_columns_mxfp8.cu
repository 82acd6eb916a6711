// Direct receive of MXFP8 with the columnwise operand: both operands in one pass.
//
// A thread block works through a group of columns of one band of 128 tokens, 256 columns at a time in shared
// memory; the next 256 are on their way meanwhile.
#include "backends/cuda/receive_columns.cuh"
#include "device/tokens.cuh"
#include "formats/mxfp8.h"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kThreads = kTileThreads;

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

// A thread's part of moving a stage: its 16-byte chunks of the rows first_row, first_row + kStep, ..., and
// the scales of one row. Rows lie anywhere; places in them advance from stage to stage.
template <typename Format>
class Mover {
 public:
  using S = Stage<Format>;
  static constexpr int kStep = kThreads / S::kRowChunks;  // rows
  static constexpr int kCount = kBand / kStep;

  // rows: of the band, in shared memory.
  __device__ __forceinline__ Mover(const ReceiveArguments& a, const Band& b, const uint8_t* const* rows,
                                   int64_t column)
      : row_(static_cast<int>(threadIdx.x) / S::kRowChunks),
        at_(column * Format::kPayloadBits / 8 + static_cast<int>(threadIdx.x) % S::kRowChunks * 16),
        to_(a.payload + (b.first_row + row_) * a.layout.payload_bytes),
        scale_at_(column / Format::kBlock),
        rows_(rows),
        place_(S::row_place(row_) + static_cast<int>(threadIdx.x) % S::kRowChunks * 16) {}

  // The stage that comes next after what has been fetched.
  __device__ __forceinline__ void fetch(const ReceiveArguments& a, const Band& b, int64_t columns_ahead,
                                        uint8_t* stage) {
    const int64_t at = at_ + columns_ahead * Format::kPayloadBits / 8;
    if (at < a.layout.payload_bytes) {
      const uint32_t to = shared_address(stage) + place_;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (row_ + i * kStep < b.rows) copy_async16(to + i * kPlaceStep, rows_[row_ + i * kStep] + at);
      }
    }
    // Scales of 256 columns: 16 or 8 bytes of a row. A row of MXFP8 scales is not always aligned to 16 there.
    const int64_t scale = scale_at_ + columns_ahead / Format::kBlock;
    if (threadIdx.x < kBand && static_cast<int>(threadIdx.x) < b.rows && scale < a.columns) {
      uint8_t* to = stage + S::kCodesBytes + threadIdx.x * S::kScaleColumns;
      const uint8_t* scales_from = in_global(rows_[threadIdx.x]) + a.layout.payload_bytes;
      if constexpr (S::kScaleColumns == 16) {
        copy_async16(shared_address(to), scales_from + scale);
      } else {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(scales_from + scale);
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
  uint8_t* to_;
  int64_t scale_at_;
  const uint8_t* const* rows_;
  int place_;
};

// ---- 32 tokens by 4 columns, a lane ------------------------------------------------------------------------
//
// Scales are powers of two, and codes have four significant bits, so FP16 holds the values exactly, relative to
// the largest scale of the 32 tokens, as long as the scales do not span too much: two columns at a time, once
// read. Scales of 0 (blocks of zeros) are left out. What does not fit goes by the definition.
constexpr int kMostSpan = 14;         // a code is a multiple of 2^-9, FP16 of 2^-24
constexpr uint32_t kLeastScale = 60;  // what has scale 0 is nothing beside it
constexpr uint32_t kMostScale = 230;

// Of a warp's 32 tokens by 4 blocks of columns.
struct RelativeScales {
  uint32_t largest;  // a byte each
  uint32_t fits;     // a bit each
  uint32_t zeros;    // the same: some scales are 0
};

// A lane has a token. factors: [4 blocks of columns][kBand], 2^(scale - largest).
__device__ __forceinline__ RelativeScales relate_scales(uint32_t scales, uint16_t* factors) {
  RelativeScales r{};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t scale = scales >> (8 * j) & 0xFFu;
    const uint32_t largest = __reduce_max_sync(kAllLanes, scale);
    const uint32_t least = __reduce_min_sync(kAllLanes, scale == 0 ? 0xFFu : scale);
    const bool fits = largest <= kMostScale && largest >= kLeastScale && least >= kLeastScale &&
                      largest - least <= kMostSpan;
    r.largest |= largest << (8 * j);
    r.fits |= static_cast<uint32_t>(fits) << j;
    r.zeros |= static_cast<uint32_t>(__any_sync(kAllLanes, scale == 0) != 0) << j;
    factors[j * kBand] = static_cast<uint16_t>(scale == 0 ? 0u : (15u + scale - largest) << 10);
  }
  return r;
}

struct ColumnCodes {
  const uint8_t* codes;     // the lane's four of token 0, in shared memory
  const uint8_t* scales;    // of token 0 and the lane's block of columns
  const uint16_t* factors;  // of token 0
  uint8_t* to;              // null: codes are not wanted
  int64_t stride;
};

// Both return the scales of the four columns.
__device__ __noinline__ uint32_t encode_by_definition(ColumnCodes c) {
  const auto values = [&](int i, float* x) {
    const uint32_t code =
        *reinterpret_cast<const uint32_t*>(c.codes + i * (Stage<Mxfp8>::kRowBytes + 16) + i / 16 * 16);
    const float factor = e8m0_to_float(c.scales[i * Stage<Mxfp8>::kScaleColumns]);
    const float2 lo = e4m3x2_to_floats(code & 0xFFFFu), hi = e4m3x2_to_floats(code >> 16);
    x[0] = mul_rn(lo.x, factor);
    x[1] = mul_rn(lo.y, factor);
    x[2] = mul_rn(hi.x, factor);
    x[3] = mul_rn(hi.y, factor);
  };
  float amax[4] = {bits_float(kNanBits), bits_float(kNanBits), bits_float(kNanBits), bits_float(kNanBits)};
#pragma unroll 1
  for (int i = 0; i < Mxfp8::kBlock; ++i) {  // fmaxf drops NaNs
    float x[4];
    values(i, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) amax[j] = fmaxf(amax[j], fabsf(x[j]));
  }
  float multiplier[4];
  uint32_t scale_bytes = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint8_t scale = Mxfp8::scale(amax[j]);
    multiplier[j] = e8m0_inverse(scale);
    scale_bytes |= static_cast<uint32_t>(scale) << (8 * j);
  }
  if (c.to == nullptr) return scale_bytes;
#pragma unroll 1
  for (int i = 0; i < Mxfp8::kBlock; ++i) {
    float x[4];
    values(i, x);
    *reinterpret_cast<uint32_t*>(c.to + i * c.stride) =
        floats_to_e4m3x2(mul_rn(x[0], multiplier[0]), mul_rn(x[1], multiplier[1])) |
        (floats_to_e4m3x2(mul_rn(x[2], multiplier[2]), mul_rn(x[3], multiplier[3])) << 16);
  }
  return scale_bytes;
}

// True in all lanes: done, where active. largest: the largest scale of the lane's block of columns; zeros: some are 0.
__device__ __forceinline__ bool encode_in_halves(const ColumnCodes& c, bool active, uint32_t largest,
                                                 bool zeros, uint32_t* scale_bytes) {
  uint32_t x[Mxfp8::kBlock][2];
  uint32_t most[2] = {0x7FFF7FFFu, 0x7FFF7FFFu};  // NaN, which a number replaces
#pragma unroll
  for (int i = 0; i < Mxfp8::kBlock; ++i) {
    const uint32_t code =
        *reinterpret_cast<const uint32_t*>(c.codes + i * (Stage<Mxfp8>::kRowBytes + 16) + i / 16 * 16);
    const __half2 pair = half2_of(reinterpret_cast<const uint32_t*>(c.factors)[i / 2]);
    const __half2 factor = i % 2 == 0 ? __low2half2(pair) : __high2half2(pair);
    x[i][0] = bits_of(__hmul2_rn(half2_of(e4m3x2_to_halves(code & 0xFFFFu)), factor));
    x[i][1] = bits_of(__hmul2_rn(half2_of(e4m3x2_to_halves(code >> 16)), factor));
    most[0] = Fp16Token::max_dropping_nan(most[0], x[i][0]);
    most[1] = Fp16Token::max_dropping_nan(most[1], x[i][1]);
  }
  uint32_t scales = 0;
  uint32_t raise[2] = {0, 0};  // 2^(largest - scale) of two columns
  bool fits = true;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t magnitude = most[j / 2] >> (j % 2 * 16) & 0x7FFFu;
    const float amax = mul_rn(Fp16Token::lo(magnitude), bits_float(largest << 23));
    const uint32_t scale = Mxfp8::scale(amax);
    const int up = magnitude == 0 ? 0 : static_cast<int>(largest) - static_cast<int>(scale);
    fits &= magnitude == 0 ? !zeros : up >= -14 && up <= 15;
    scales |= scale << (8 * j);
    raise[j / 2] |= static_cast<uint32_t>(up + 15) << (10 + j % 2 * 16);
  }
  if (__all_sync(kAllLanes, fits || !active) == 0) return false;
  *scale_bytes = scales;
  if (c.to == nullptr) return true;
  uint8_t* to = c.to;
#pragma unroll
  for (int i = 0; i < Mxfp8::kBlock; ++i) {
    *reinterpret_cast<uint32_t*>(to) =
        halves_to_e4m3x2(bits_of(__hmul2_rn(half2_of(x[i][0]), half2_of(raise[0])))) |
        halves_to_e4m3x2(bits_of(__hmul2_rn(half2_of(x[i][1]), half2_of(raise[1])))) << 16;
    to += c.stride;
  }
  return true;
}

constexpr int kFactorsBytes = kTileColumns / Mxfp8::kBlock * kBand * 2;
constexpr int kColumnScalesBytes = kTileColumns * (kBand / Mxfp8::kBlock);

__device__ __forceinline__ void receive_columns(const ReceiveArguments& a, uint32_t index) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = Stage<Mxfp8>;
  uint16_t* factors =
      reinterpret_cast<uint16_t*>(shared + 2 * Layout::kBytes);          // [8 blocks of columns][kBand]
  uint8_t* column_scales = shared + 2 * Layout::kBytes + kFactorsBytes;  // [256 columns][4 token blocks]
  const uint8_t** rows = reinterpret_cast<const uint8_t**>(column_scales + kColumnScalesBytes);
  Band b;
  const Turn turn(a, index);
  const uint32_t work = turn.work;
  const int group = static_cast<int>(work % static_cast<uint32_t>(a.column_groups));
  bool there = find_band(a, work, &b);
  turn.wait_for_pointers(a);
  if (there) {
    const int row = static_cast<int>(threadIdx.x) % kBand;
    const uint8_t* at = a.row(b.first_row + (row < b.rows ? row : 0));
    if (threadIdx.x < kBand) rows[row] = at;
    there = turn.takes(a, at);
  }
  turn.wait_for_rest();
  if (!there) return;
  const int64_t group_begin = group * a.group_columns;
  const int64_t group_end =
      group_begin + a.group_columns < a.hidden ? group_begin + a.group_columns : a.hidden;
  // A lane has 32 tokens (one of 4 blocks) by 4 columns.
  const int word = static_cast<int>(threadIdx.x) % 64;
  const int block = static_cast<int>(threadIdx.x) / 64;
  bool misfit = false;
  Mover<Mxfp8> mover(a, b, rows, group_begin);
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
    mover.store_payload(a, b, stage);
    mover.advance();
    store_scales<Mxfp8>(a, b.rows, b.scales, static_cast<int>(column), stage + Layout::kCodesBytes, nullptr,
                        &misfit);
    const int64_t h = column + word * 4;
    const bool active = block * Mxfp8::kBlock < b.rows && h < a.hidden;
    uint32_t scale_bytes = 0;
    if (block * Mxfp8::kBlock < b.rows) {  // a warp as a whole
      const int first_row = block * Mxfp8::kBlock;
      const int first_block = word / kWarp * 4;  // of columns
      const uint8_t* scales = stage + Layout::kCodesBytes + first_row * Layout::kScaleColumns + first_block;
      uint16_t* warp_factors = factors + first_block * kBand + first_row;
      const RelativeScales relative =
          relate_scales(*reinterpret_cast<const uint32_t*>(scales + lane_id() * Layout::kScaleColumns),
                        warp_factors + lane_id());
      __syncwarp();
      const int own = lane_id() / 8;  // block of columns
      ColumnCodes c;
      c.codes = stage + word * 4 + Layout::row_place(first_row);
      c.scales = scales + own;
      c.factors = warp_factors + own * kBand;
      c.stride = a.hidden;
      c.to = a.columnwise_payload == nullptr || !active
                 ? nullptr
                 : a.columnwise_payload + (b.first_row + first_row) * a.hidden + h;
      // Blocks past the columns hold anything.
      const uint32_t blocks =
          static_cast<uint32_t>(min((a.hidden - column) / Mxfp8::kBlock - first_block, int64_t{4}));
      const uint32_t wanted = static_cast<int>(blocks) <= 0 ? 0u : (1u << blocks) - 1u;
      bool done = (relative.fits & wanted) == wanted;
      if (done) {
        done = encode_in_halves(c, active, relative.largest >> (8 * own) & 0xFFu,
                                (relative.zeros >> own & 1u) != 0, &scale_bytes);
      }
      if (!done) scale_bytes = encode_by_definition(c);
      if (!active) scale_bytes = 0;
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

__global__ void __launch_bounds__(kThreads, 2) receive_columns_mxfp8(const ReceiveArguments a) {
  for (uint32_t work = blockIdx.x; work < a.blocks; work += gridDim.x) {
    receive_columns(a, work);
    __syncthreads();
  }
  wait_for_late_rows(a);
}

}  // namespace

Status launch_receive_columns_mxfp8(const ReceiveArguments& a, const LaunchContext& context) {
  LaunchShape shape;
  shape.blocks = a.blocks;
  shape.bounded = true;
  // Rows that lie anywhere were found by a kernel that has waited itself; others may come from any kernel.
  shape.overlaps = a.anywhere != nullptr && (a.late_begin == nullptr || context.max_sms == 0);
  shape.threads = kThreads;
  shape.shared_bytes = 2 * Stage<Mxfp8>::kBytes + kFactorsBytes + kColumnScalesBytes + kBand * 8;
  return launch_kernel<receive_columns_mxfp8>("receive_columns_mxfp8", context, shape, a);
}

}  // namespace nvte_ep
