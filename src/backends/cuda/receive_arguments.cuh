// What the direct-receive kernels share: the operand as they write it, and how they learn the experts'
// exponents.
//
// A call has no memory of its own: calls may overlap on several streams and be replayed from graphs, so there
// is no scratch that a call could own, except its results. The exponents travel there: a first kernel, which
// reads nothing but token scales, leaves each exponent as one byte where a thread block of the second kernel
// will write its first scale. That block is the only one to touch the place, and reads the byte before it
// writes anything.
#ifndef NVTE_EP_BACKENDS_CUDA_RECEIVE_ARGUMENTS_CUH_
#define NVTE_EP_BACKENDS_CUDA_RECEIVE_ARGUMENTS_CUH_

#include "backends/cuda/launch.h"
#include "device/e4m3.cuh"
#include "device/scale_tiles.cuh"
#include "device/slabs.cuh"
#include "formats/nvfp4.h"

namespace nvte_ep {

constexpr int kTileColumns = 256;  // columns of tokens that a block of the tile kernels has in shared memory
constexpr uint8_t kIllegalExponent = 255;

struct ReceiveArguments {
  const uint8_t* rows;  // packed
  int64_t row_stride;
  RowLayout layout;
  int64_t hidden;
  int64_t columns;  // scales of a row
  bool linear;
  bool tiles;  // the columnwise operand is wanted: blocks own tiles, otherwise patches of rows
  uint8_t* payload;
  uint8_t* scales;
  uint8_t* columnwise_payload;
  uint8_t* columnwise_scales;
  float* amax;
  float* columnwise_amax;
  float* expert_scale;
  float* columnwise_expert_scale;
  device::SlabCounts counts;
  CodecOptions options;
  int64_t blocks;  // of work; a grid may have fewer
  int column_groups;
  int64_t group_columns;  // that a block of the tile kernels works through, a multiple of kTileColumns

  __device__ __forceinline__ float token_scale(int64_t row) const {
    return *reinterpret_cast<const float*>(rows + row * row_stride + layout.token_scale_offset);
  }
  // Tiles of scales of a slab's band of 128 rows.
  __device__ __forceinline__ uint8_t* band_tiles(const device::Slab& slab, int64_t band) const {
    return scales + (slab.first_tile + band) * ((columns + 3) / 4) * device::kTileBytes;
  }
  // Rowwise scale (row of the slab, column) where scales are linear.
  __device__ __forceinline__ uint8_t* linear_scale(const device::Slab& slab, int64_t row,
                                                   int64_t column) const {
    return scales + (slab.first_row + row) * columns + column;
  }
  // Columnwise scales of a slab, blocks of kBlock tokens.
  template <int kBlock>
  __device__ __forceinline__ uint8_t* column_scales(const device::Slab& slab) const {
    return columnwise_scales +
           (linear ? slab.first_row / kBlock * hidden
                   : slab.first_tile * kScaleTileRows / kBlock * round_up(hidden, kScaleTileRows));
  }
  // Tile of scales (h / 128, token block / 4) of a slab.
  template <int kBlock>
  __device__ __forceinline__ uint8_t* column_tile(const device::Slab& slab, int64_t h_tile,
                                                  int64_t block_tile) const {
    return column_scales<kBlock>(slab) +
           (h_tile * ((slab.rows / kBlock + 3) / 4) + block_tile) * device::kTileBytes;
  }

  // Where the rowwise exponent travels: to the owner of a band's scales, or of the tiles of a column group of
  // it.
  __device__ __forceinline__ uint8_t* group_exponent(const device::Slab& slab, int64_t band,
                                                     int group) const {
    const int64_t column = group * group_columns / Nvfp4::kBlock;
    return linear ? linear_scale(slab, band * kScaleTileRows, column)
                  : band_tiles(slab, band) + column / 4 * device::kTileBytes;
  }
  // Where the columnwise exponent does.
  __device__ __forceinline__ uint8_t* column_exponent(const device::Slab& slab, int64_t band,
                                                      int group) const {
    const int64_t h = group * group_columns;
    const int64_t block = band * kScaleTileRows / Nvfp4::kBlock;
    if (columnwise_scales == nullptr) {
      return columnwise_payload + slab.first_row * hidden / 2 + h * (slab.rows / 2) +
             block * Nvfp4::kBlock / 2;
    }
    return linear ? column_scales<Nvfp4::kBlock>(slab) + h * (slab.rows / Nvfp4::kBlock) + block
                  : column_tile<Nvfp4::kBlock>(slab, h / kScaleTileRows, block / 4);
  }
};

// Requantises the scales of one row to the expert's exponent, four at a time. Eight bytes, so that a tile's
// rows fit shared memory.
class RowRescale {
 public:
  RowRescale() = default;
  __device__ __forceinline__ RowRescale(float token_scale, uint8_t expert_exponent) {
    int k;
    const Nvfp4::ScaleKind kind = Nvfp4::classify(token_scale, &k);
    const int shift = static_cast<int>(expert_exponent) + Nvfp4::kMinExponent - k;
    const bool live = kind == Nvfp4::ScaleKind::kLive && expert_exponent != kIllegalExponent;
    const bool nan = kind == Nvfp4::ScaleKind::kNan || expert_exponent == kIllegalExponent;
    // A zero token's scales become 0, but a NaN stays one.
    factor_ = live ? device::half_exp2_down(shift < 0 ? 0 : (shift > 24 ? 24 : shift)) : 0u;
    set_ = nan ? 0x7F7F7F7F : (live && shift < 0 ? shift : 0);
  }

  __device__ __forceinline__ uint32_t operator()(uint32_t codes, bool* misfit) const {
    if (set_ < 0) return scale_up(codes, misfit);
    return device::e4m3x4_scale_down(codes, factor_) | static_cast<uint32_t>(set_);
  }

 private:
  // The row lies above a fixed expert scale.
  __device__ __forceinline__ uint32_t scale_up(uint32_t codes, bool* misfit) const {
    uint32_t out = 0;
#pragma unroll 1
    for (int i = 0; i < 4; ++i, codes >>= 8) {
      const uint8_t magnitude = codes & 0x7Fu;
      const uint8_t code = e4m3_scale_exponent(magnitude, set_);
      *misfit |= e4m3_scale_exponent(code, -set_) != magnitude;
      out = (out >> 8) | (static_cast<uint32_t>(code) << 24);
    }
    return out;
  }

  uint32_t factor_;  // FP16 2^-shift, twice
  int32_t set_;      // ORed into every scale; below 0: the (negative) shift of a row that is too large
};

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_CUDA_RECEIVE_ARGUMENTS_CUH_
