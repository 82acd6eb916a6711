// What the tile kernels of direct receive share: the columnwise operand is made from bands of 128 tokens, 256
// columns at a time.
#ifndef NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_CUH_
#define NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_CUH_

#include <type_traits>

#include "backends/cuda/receive_arguments.cuh"
#include "backends/cuda/receive_columns.h"
#include "device/launch_kernel.h"
#include "device/memory.cuh"
#include "device/warp.cuh"

namespace nvte_ep {

constexpr int kTileThreads = 256;
constexpr int kBand = 128;

struct Band {
  device::Slab slab;
  int64_t band;
  int64_t first_row;  // in the rows
  int rows;           // 1 to 128
};

// The band of a piece of work, and false where there is none. Called by a whole block; ends with a barrier.
__device__ __forceinline__ bool find_band(const ReceiveArguments& a, uint32_t work, Band* b) {
  const int64_t tile = work / static_cast<uint32_t>(a.column_groups);
  b->slab = device::find_slab_of_tile<kTileThreads>(a.counts, work == 0 ? a.options.findings : nullptr, tile);
  if (b->slab.expert < 0) return false;
  b->band = tile - b->slab.first_tile;
  const int64_t rows = b->slab.rows - b->band * kBand;
  b->rows = static_cast<int>(rows < kBand ? rows : kBand);
  b->first_row = b->slab.first_row + b->band * kBand;
  return true;
}

// Rowwise scales of 256 columns, which lie in shared memory row by row. A thread takes 8 bytes of a tile: four columns of the
// rows r and r + 32, or r + 64 and r + 96.
template <typename Format>
__device__ __forceinline__ void store_scales(const ReceiveArguments& a, const Band& b, int64_t column,
                                             const uint8_t* scales, const device::RowRescale* rescale,
                                             bool* misfit) {
  constexpr int kScaleColumns = kTileColumns / Format::kBlock;
  constexpr int kTiles = kScaleColumns / 4;
  constexpr int kWords = 2;
  if (a.scales == nullptr || threadIdx.x >= 4 / kWords * 32 * kTiles) return;
  const int tile = static_cast<int>(threadIdx.x) / 32 % kTiles;
  const int first_row =
      static_cast<int>(threadIdx.x) % 32 + static_cast<int>(threadIdx.x) / (32 * kTiles) * (32 * kWords);
  const int64_t first = column / Format::kBlock + tile * 4;
  if (first >= a.columns) return;
  const int left = static_cast<int>(a.columns - first < 4 ? a.columns - first : 4);
  const uint32_t mask = left == 4 ? 0xFFFFFFFFu : (1u << (8 * left)) - 1u;
  uint32_t word[kWords];
#pragma unroll
  for (int q = 0; q < kWords; ++q) {
    const int row = first_row + 32 * q;
    word[q] = 0;
    if (row >= b.rows) continue;
    word[q] = *reinterpret_cast<const uint32_t*>(scales + row * kScaleColumns + tile * 4) & mask;
    if constexpr (std::is_same_v<Format, Nvfp4>) word[q] = rescale[row](word[q], misfit) & mask;
  }
  if (!a.linear) {
    *reinterpret_cast<uint2*>(a.band_tiles(b.slab, b.band) + first / 4 * device::kTileBytes +
                              first_row % 32 * 16 + first_row / 32 * 4) = make_uint2(word[0], word[1]);
    return;
  }
#pragma unroll
  for (int q = 0; q < kWords; ++q) {
    const int row = first_row + 32 * q;
    if (row >= b.rows) continue;
    uint8_t* to = a.linear_scale(b.slab, b.band * kBand + row, first);
    for (int i = 0; i < left; ++i) to[i] = static_cast<uint8_t>(word[q] >> (8 * i));
  }
}

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_CUH_
