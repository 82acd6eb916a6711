// Scale matrices to and from the 128 x 4 tiles that GEMMs read.
#include "backends/cuda/launch.h"
#include "device/scale_tiles.cuh"
#include "device/slabs.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kThreads = 128;  // a warp a patch

struct SwizzleArguments {
  uint8_t* scales;
  int64_t stride;
  int alignment;
  int64_t columns;
  uint8_t* tiles;
  SlabCounts counts;
};

// A thread block 128 rows by 64 columns. Blocks come in the order of the memory.
template <bool kInverse>
__global__ void __launch_bounds__(kThreads, 8) swizzle_scales(const SwizzleArguments a) {
  const int64_t pieces = (a.columns + kPatchColumns - 1) / kPatchColumns;
  const int64_t tile = blockIdx.x / pieces;
  const Slab slab = find_slab_of_tile<kThreads>(a.counts, nullptr, tile);
  if (slab.expert < 0) return;
  uint8_t* tiles = a.tiles + tile * ((a.columns + 3) / 4) * kTileBytes;
  const int64_t done = (tile - slab.first_tile) * kScaleTileRows;
  const int64_t left = slab.rows - done;
  const int rows = static_cast<int>(left < kScaleTileRows ? left : kScaleTileRows);
  const int patch = warp_id();
  const int64_t column = patch_column(blockIdx.x % pieces * kPatchColumns);
  if (column >= a.columns) return;
  const int bytes = static_cast<int>(a.columns - column < 16 ? a.columns - column : 16);
  uint8_t* at = a.scales + (slab.first_row + done + patch_row(patch)) * a.stride + column;
  PatchScales scales;
  if constexpr (kInverse) scales = load_patch(tiles, a.columns, patch, column);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const bool there = 32 * q + patch_row(patch) < rows;
    if constexpr (kInverse) {
      if (there) store16(at + 32 * q * a.stride, scales.row[q], a.alignment, bytes);
    } else {
      scales.row[q] = there ? load16(at + 32 * q * a.stride, a.alignment, bytes) : make_uint4(0, 0, 0, 0);
    }
  }
  if constexpr (!kInverse) store_patch(tiles, a.columns, patch, column, scales);
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
  shape.blocks =
      max_tiles(scales.rows(), 1, a.counts.num_experts) * ((a.columns + kPatchColumns - 1) / kPatchColumns);
  shape.threads = kThreads;
  if (shape.blocks == 0) return Status();
  return inverse ? launch_kernel<swizzle_scales<true>>("unswizzle_scales", context, shape, a)
                 : launch_kernel<swizzle_scales<false>>("swizzle_scales", context, shape, a);
}

}  // namespace nvte_ep
