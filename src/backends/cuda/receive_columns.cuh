// What the tile kernels of direct receive share: the columnwise operand is made from bands of 128 tokens, 256
// columns at a time.
#ifndef NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_CUH_
#define NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_CUH_

#include <type_traits>

#include "backends/cuda/receive_arguments.cuh"
#include "backends/cuda/receive_columns.h"
#include "device/kernel_order.cuh"
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
  uint8_t* scales;    // where its rowwise scales begin; null: not wanted
};

// The band of a piece of work, and false where there is none. Called by a whole block.
__device__ __forceinline__ bool find_band(const ReceiveArguments& a, uint32_t work, Band* b) {
  const uint32_t tile = work / static_cast<uint32_t>(a.column_groups);
  b->slab = device::find_slab_of_tile<kTileThreads>(a.counts, work == 0 ? a.options.findings : nullptr, tile);
  if (b->slab.expert < 0) return false;
  b->band = tile - b->slab.first_tile;
  const int64_t rows = b->slab.rows - b->band * kBand;
  b->rows = static_cast<int>(rows < kBand ? rows : kBand);
  b->first_row = b->slab.first_row + b->band * kBand;
  b->scales = a.scales == nullptr ? nullptr
              : a.linear          ? a.linear_scale(b->slab, b->band * kBand, 0)
                                  : a.band_tiles(b->slab, b->band);
  return true;
}

// A block's turn. Where some rows are late, each piece of work has two: the first is taken where none of the band's rows is, while
// the kernel before ends, the second, which comes after all the first ones, where one is.
struct Turn {
  uint32_t work;
  bool second;

  __device__ __forceinline__ Turn(const ReceiveArguments& a, uint32_t index) : work(index), second(false) {
    const bool two = a.late_begin != nullptr;
    const uint32_t half = static_cast<uint32_t>(a.blocks / 2);
    if (two && index >= half) {
      second = true;
      work = index - half;
    }
    takes_all_ = !two;
  }
  // Before rows are looked for.
  __device__ __forceinline__ void wait_for_pointers(const ReceiveArguments& a) const {
    if (a.anywhere != nullptr && (takes_all_ || second)) device::wait_for_kernel_before();
  }
  // Every thread calls, with a row of the band; ends with a barrier.
  __device__ __forceinline__ bool takes(const ReceiveArguments& a, const uint8_t* row) const {
    const bool late = __syncthreads_or(row >= a.late_begin && row < a.late_end) != 0;
    return takes_all_ || late == second;
  }
  // Before anything else is read that the kernel before wrote.
  __device__ __forceinline__ void wait_for_rest() const {
    if (takes_all_ || second) device::wait_for_kernel_before();
  }

 private:
  bool takes_all_;
};
// At the end of a kernel of turns: it is not done before the one before.
__device__ __forceinline__ void wait_for_late_rows(const ReceiveArguments& a) {
  if (a.late_begin != nullptr) device::wait_for_kernel_before();
}

// Rowwise scales of 256 columns, which lie in shared memory row by row, to a band's place. A thread takes 8 bytes of a tile: four columns of the
// rows r and r + 32, or r + 64 and r + 96.
template <typename Format>
__device__ __forceinline__ void store_scales(const ReceiveArguments& a, int rows, uint8_t* band, int column,
                                             const uint8_t* scales, const device::RowRescale* rescale,
                                             bool* misfit) {
  constexpr int kScaleColumns = kTileColumns / Format::kBlock;
  constexpr int kTiles = kScaleColumns / 4;
  constexpr int kWords = 2;
  if (band == nullptr || threadIdx.x >= 4 / kWords * 32 * kTiles) return;
  const int tile = static_cast<int>(threadIdx.x) / 32 % kTiles;
  const int first_row =
      static_cast<int>(threadIdx.x) % 32 + static_cast<int>(threadIdx.x) / (32 * kTiles) * (32 * kWords);
  const int first = column / Format::kBlock + tile * 4;
  const int columns = static_cast<int>(a.columns);
  if (first >= columns) return;
  const int left = columns - first < 4 ? columns - first : 4;
  const uint32_t mask = left == 4 ? 0xFFFFFFFFu : (1u << (8 * left)) - 1u;
  uint32_t word[kWords];
#pragma unroll
  for (int q = 0; q < kWords; ++q) {
    const int row = first_row + 32 * q;
    word[q] = 0;
    if (row >= rows) continue;
    word[q] = *reinterpret_cast<const uint32_t*>(scales + row * kScaleColumns + tile * 4) & mask;
    if constexpr (std::is_same_v<Format, Nvfp4>) word[q] = rescale[row](word[q], misfit) & mask;
  }
  if (!a.linear) {
    *reinterpret_cast<uint2*>(band + static_cast<int64_t>(first / 4) * device::kTileBytes +
                              first_row % 32 * 16 + first_row / 32 * 4) = make_uint2(word[0], word[1]);
    return;
  }
#pragma unroll
  for (int q = 0; q < kWords; ++q) {
    const int row = first_row + 32 * q;
    if (row >= rows) continue;
    uint8_t* to = band + row * a.columns + first;
#pragma unroll 1
    for (int i = 0; i < left; ++i) to[i] = static_cast<uint8_t>(word[q] >> (8 * i));
  }
}

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_CUH_
