// Slabs of experts and their scale tiles (128 rows), found on the device from rows_per_expert.
#ifndef NVTE_EP_DEVICE_SLABS_CUH_
#define NVTE_EP_DEVICE_SLABS_CUH_

#include <cstdint>

#include "core/operand_layout.h"
#include "device/codec_options.cuh"
#include "device/warp.cuh"

namespace nvte_ep::device {

struct SlabCounts {
  IndexView rows_per_expert;  // data null: one slab of all rows
  int32_t num_experts;
  int64_t available;  // rows that there are, a multiple of alignment
  int64_t alignment;  // a power of two
};

struct Slab {
  int32_t expert;     // -1: none
  int64_t first_row;  // in the rows and in the payload
  int64_t rows;
  int64_t first_tile;  // tiles of the slabs before
};

// Rows that expert e asks for, as far as they can fit at all.
__device__ __forceinline__ int64_t asked_rows(const SlabCounts& counts, int64_t e) {
  const int64_t asked = load_index(counts.rows_per_expert, e);
  const int64_t bounded = asked < 0 ? 0 : (asked < counts.available ? asked : counts.available);
  return bounded & ~(counts.alignment - 1);
}

// The slab for which match(expert, first tile, end tile) is true, tiles of all slabs counted through; expert
// -1 where there is none. Slabs are clamped as on the host: a slab begins where the ones before end, and gets
// what is left; findings: where that is reported, null but for one block of a grid. Called by a whole block
// of kThreads; ends with a barrier.
template <int kThreads, typename Match>
__device__ __forceinline__ Slab find_slab(const SlabCounts& counts, int32_t* findings, const Match& match) {
  if (counts.rows_per_expert.data == nullptr) return Slab{0, 0, counts.available, 0};
  __shared__ int64_t exchange[kThreads / kWarp];
  __shared__ Slab found;
  __shared__ int64_t total_rows, total_tiles;
  if (threadIdx.x == 0) {
    found.expert = -1;
    total_rows = total_tiles = 0;
  }
  const bool reports = findings != nullptr;
  bool clamped = false;
  __syncthreads();
  for (int64_t base = 0; base < counts.num_experts; base += kThreads) {
    const int64_t e = base + threadIdx.x;
    const bool mine = e < counts.num_experts;
    const int64_t before_rows = total_rows, before_tiles = total_tiles;
    int64_t end = block_scan<kThreads>(mine ? asked_rows(counts, e) : 0, counts.available, exchange);
    end = add_up_to(end, before_rows, counts.available);
    // Sums that stop at the limit give every slab's end; it begins at the end of the one before.
    int64_t begin = __shfl_up_sync(kAllLanes, end, 1);
    __syncthreads();
    if (lane_id() == kWarp - 1) exchange[warp_id()] = end;
    __syncthreads();
    if (lane_id() == 0) begin = warp_id() == 0 ? before_rows : exchange[warp_id() - 1];
    const int64_t rows = end - begin;
    if (reports && mine) clamped |= rows != load_index(counts.rows_per_expert, e);
    const int64_t tiles = (rows + kScaleTileRows - 1) / kScaleTileRows;
    const int64_t end_tile = block_scan<kThreads>(tiles, INT64_MAX / 2, exchange) + before_tiles;
    if (mine && match(static_cast<int32_t>(e), end_tile - tiles, end_tile)) {
      found = Slab{static_cast<int32_t>(e), begin, rows, end_tile - tiles};
    }
    if (threadIdx.x == kThreads - 1) {
      total_rows = end;
      total_tiles = end_tile;
    }
    __syncthreads();
    if (found.expert >= 0 && !reports) break;
  }
  if (clamped) report(findings, NVTE_EP_FINDING_ROW_COUNT);
  return found;
}

// The same of a tile by a warp alone, for less than 2^31 rows.
__device__ __forceinline__ Slab find_slab_of_tile_alone(const SlabCounts& counts, int64_t tile) {
  const uint32_t available = static_cast<uint32_t>(counts.available);
  uint32_t rows_before = 0, tiles_before = 0;
  for (int64_t base = 0; base < counts.num_experts; base += kWarp) {
    const int64_t e = base + lane_id();
    uint32_t end = e < counts.num_experts ? static_cast<uint32_t>(asked_rows(counts, e)) : 0u;
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const uint32_t below = __shfl_up_sync(kAllLanes, end, d);
      if (lane_id() >= d) end = min(end + below, available);
    }
    end = min(end + rows_before, available);
    uint32_t begin = __shfl_up_sync(kAllLanes, end, 1);
    if (lane_id() == 0) begin = rows_before;
    const uint32_t tiles = (end - begin + static_cast<uint32_t>(kScaleTileRows - 1)) / kScaleTileRows;
    uint32_t end_tile = tiles;
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const uint32_t below = __shfl_up_sync(kAllLanes, end_tile, d);
      if (lane_id() >= d) end_tile += below;
    }
    end_tile += tiles_before;
    const unsigned past = __ballot_sync(kAllLanes, tile < end_tile);
    if (past != 0) {
      const int at = __ffs(static_cast<int>(past)) - 1;
      return Slab{static_cast<int32_t>(base) + at, __shfl_sync(kAllLanes, begin, at),
                  __shfl_sync(kAllLanes, end - begin, at), __shfl_sync(kAllLanes, end_tile - tiles, at)};
    }
    rows_before = __shfl_sync(kAllLanes, end, kWarp - 1);
    tiles_before = __shfl_sync(kAllLanes, end_tile, kWarp - 1);
  }
  return Slab{-1, 0, 0, 0};
}

template <int kThreads>
__device__ __forceinline__ Slab find_slab_of_tile(const SlabCounts& counts, int32_t* findings, int64_t tile) {
  if (counts.rows_per_expert.data != nullptr && findings == nullptr && counts.available <= INT32_MAX) {
    return find_slab_of_tile_alone(counts, tile);
  }
  return find_slab<kThreads>(
      counts, findings, [tile](int32_t, int64_t first, int64_t end) { return tile >= first && tile < end; });
}

// Rows of all slabs. Called by a whole block; ends with a barrier.
__device__ __forceinline__ int64_t rows_of_all(const SlabCounts& counts) {
  __shared__ int64_t total;
  if (warp_id() == 0) {
    int64_t sum = 0;
    for (int64_t e = lane_id(); e < counts.num_experts; e += kWarp) {
      sum = add_up_to(sum, asked_rows(counts, e), counts.available);
    }
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      sum = add_up_to(sum, __shfl_xor_sync(kAllLanes, sum, d), counts.available);
    }
    if (lane_id() == 0) total = sum;
  }
  __syncthreads();
  return total;
}

// Tiles that all slabs together can have.
inline int64_t max_tiles(int64_t available, int64_t alignment, int64_t num_experts) {
  const int64_t slabs = num_experts < available / alignment ? num_experts : available / alignment;
  const int64_t waste = alignment < kScaleTileRows ? kScaleTileRows - alignment : 0;
  return (available + slabs * waste) / kScaleTileRows;
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_SLABS_CUH_
