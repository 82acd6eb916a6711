// Scale matrices to and from the 128 x 4 tiles that GEMMs read.
#include "backends/cuda/launch_kernel.h"
#include "device/scale_tiles.cuh"
#include "device/slabs.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kThreads = 256;

struct SwizzleArguments {
  uint8_t* scales;
  int64_t stride;
  int alignment;
  int64_t columns;
  uint8_t* tiles;
  SlabCounts counts;
};

// A thread block a band of 128 rows; its warps share the band's patches.
template <bool kInverse>
__global__ void __launch_bounds__(kThreads, 3) swizzle_scales(const SwizzleArguments a) {
  const Slab slab = find_slab_of_tile<kThreads>(a.counts, nullptr, blockIdx.x);
  if (slab.expert < 0) return;
  const int64_t tile_columns = (a.columns + 3) / 4;
  const int64_t band = blockIdx.x - slab.first_tile;
  uint8_t* tiles = a.tiles + static_cast<int64_t>(blockIdx.x) * tile_columns * kTileBytes;
  const int64_t first_row = slab.first_row + band * kScaleTileRows;
  const int64_t rows = slab.rows - band * kScaleTileRows;
  const int64_t patches = (a.columns + kPatchColumns - 1) / kPatchColumns * kPatchesPerTile;
#pragma unroll 2
  for (int64_t i = warp_id(); i < patches; i += kThreads / kWarp) {
    const int patch = static_cast<int>(i % kPatchesPerTile);
    const int64_t column = patch_column(i / kPatchesPerTile * kPatchColumns);
    if (column >= a.columns) continue;
    const int bytes = static_cast<int>(a.columns - column < 16 ? a.columns - column : 16);
    PatchScales scales;
    if constexpr (kInverse) scales = load_patch(tiles, a.columns, patch, column);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int64_t row = 32 * q + patch_row(patch);
      uint8_t* at = a.scales + (first_row + row) * a.stride + column;
      if constexpr (kInverse) {
        if (row < rows) store16(at, scales.row[q], a.alignment, bytes);
      } else {
        scales.row[q] = row < rows ? load16(at, a.alignment, bytes) : make_uint4(0, 0, 0, 0);
      }
    }
    if constexpr (!kInverse) store_patch(tiles, a.columns, patch, column, scales);
  }
}

}  // namespace

Status launch_swizzle(const TensorView& scales, const IndexView& rows_per_expert, int32_t num_experts,
                      uint8_t* swizzled, bool inverse, const LaunchContext& context) {
  SwizzleArguments a{};
  a.scales = static_cast<uint8_t*>(scales.data);
  a.stride = scales.stride;
  a.alignment = alignment_of(scales.data, scales.stride);
  a.columns = scales.columns();
  a.tiles = swizzled;
  a.counts = SlabCounts{rows_per_expert, rows_per_expert.data == nullptr ? 1 : num_experts, scales.rows(), 1};
  LaunchShape shape;
  shape.blocks = max_tiles(scales.rows(), 1, a.counts.num_experts);
  shape.threads = kThreads;
  if (shape.blocks == 0) return Status();
  return inverse ? launch_kernel<swizzle_scales<true>>("unswizzle_scales", context, shape, a)
                 : launch_kernel<swizzle_scales<false>>("swizzle_scales", context, shape, a);
}

}  // namespace nvte_ep
