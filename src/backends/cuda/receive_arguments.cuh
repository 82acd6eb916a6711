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

#include <type_traits>

#include "backends/cuda/launch.h"
#include "device/row_rescale.cuh"
#include "device/scale_tiles.cuh"
#include "device/slabs.cuh"
#include "formats/nvfp4.h"

namespace nvte_ep {

constexpr int kTileColumns = 256;  // columns of tokens that a block of the tile kernels has in shared memory
using device::kIllegalExponent;
using device::RowRescale;

struct ReceiveArguments {
  const uint8_t* rows;  // packed
  int64_t row_stride;
  const uint8_t* const* anywhere;  // null: they follow each other
  const uint8_t* late_begin;       // as RowsView has them
  const uint8_t* late_end;
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

  __device__ __forceinline__ const uint8_t* row(int64_t i) const {
    return anywhere == nullptr ? rows + i * row_stride : anywhere[i];
  }
  __device__ __forceinline__ float token_scale(int64_t i) const {
    return *reinterpret_cast<const float*>(row(i) + layout.token_scale_offset);
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

// A lane's part of a patch of rowwise scales (scale_tiles.cuh) from packed rows to their place: requantised (NVFP4), and put into
// tiles or, linear, one after the other. band: of 128 rows, the first of its tiles or of its scales; rows: in use; row_at: where a
// row is.
template <typename Format, typename RowAt>
__device__ __forceinline__ void move_patch(const ReceiveArguments& a, int patch, int64_t column, int rows,
                                           uint8_t* band, const RowAt& row_at, const RowRescale* rescale,
                                           bool* misfit) {
  const int bytes = static_cast<int>(a.columns - column < 16 ? a.columns - column : 16);
  device::PatchScales scales;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int row = 32 * q + device::patch_row(patch);
    scales.row[q] = make_uint4(0, 0, 0, 0);
    // A row's last 16 bytes may run past its scales, but not past the row.
    if (row < rows) {
      scales.row[q] = *reinterpret_cast<const uint4*>(row_at(row) + a.layout.payload_bytes + column);
    }
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int row = 32 * q + device::patch_row(patch);
    if (row >= rows) continue;
    uint4 v = scales.row[q];
    if constexpr (std::is_same_v<Format, Nvfp4>) {
      const RowRescale& r = rescale[row];
      if (bytes < 16) v = device::first_bytes(v, bytes);
      v = make_uint4(r(v.x, misfit), r(v.y, misfit), r(v.z, misfit), r(v.w, misfit));
    }
    if (bytes < 16) v = device::first_bytes(v, bytes);
    scales.row[q] = v;
    if (a.linear) device::store16(band + row * a.columns + column, v, a.columns % 16 == 0 ? 16 : 1, bytes);
  }
  if (!a.linear) device::store_patch(band, a.columns, patch, column, scales);
}

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_CUDA_RECEIVE_ARGUMENTS_CUH_
