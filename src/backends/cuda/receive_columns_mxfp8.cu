// Direct receive of MXFP8 with the columnwise operand: both operands in one pass.
//
// A thread block works through a group of columns of one band of 128 tokens, 256 columns at a time in shared
// memory; the next 256 are on their way meanwhile.
#include "backends/cuda/receive_columns.cuh"
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

// ---- MXFP8 ------------------------------------------------------------------------------------------------

// Scales of the 8 column blocks by 128 rows as FP32.
constexpr int kFactorsBytes = kTileColumns / Mxfp8::kBlock * kBand * 4;

__device__ __forceinline__ void receive_columns(const ReceiveArguments& a, uint32_t work) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = Stage<Mxfp8>;
  float* factors = reinterpret_cast<float*>(shared + 2 * Layout::kBytes);
  uint8_t* column_scales = shared + 2 * Layout::kBytes + kFactorsBytes;  // [256 columns][4 token blocks]
  Band b;
  const int group = static_cast<int>(work % static_cast<uint32_t>(a.column_groups));
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
    store_scales<Mxfp8>(a, b, column, stage + Layout::kCodesBytes, nullptr, &misfit);
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

__global__ void __launch_bounds__(kThreads, 2) receive_columns_mxfp8(const ReceiveArguments a) {
  for (uint32_t work = blockIdx.x; work < a.blocks; work += gridDim.x) {
    receive_columns(a, work);
    __syncthreads();
  }
}

}  // namespace

Status launch_receive_columns_mxfp8(const ReceiveArguments& a, const LaunchContext& context) {
  LaunchShape shape;
  shape.blocks = a.blocks;
  shape.bounded = true;
  shape.threads = kThreads;
  shape.shared_bytes = 2 * Stage<Mxfp8>::kBytes + kFactorsBytes + kTileColumns * (kBand / Mxfp8::kBlock);
  return launch_kernel<receive_columns_mxfp8>("receive_columns_mxfp8", context, shape, a);
}

}  // namespace nvte_ep
