// Scale tiles: 128 rows x 4 columns in 512 bytes, row r at (r % 32) * 16 + (r / 32) * 4.
//
// The unit of work is a patch of 8 x 4 rows (8u + r + 32q for r < 8, q < 4) by 64 columns, one warp: a lane
// holds 16 columns of the four rows of one r, which are 16 bytes of each of four tiles. Reads are 64 bytes of
// a row, writes 128 bytes of a tile.
#ifndef NVTE_EP_DEVICE_SCALE_TILES_CUH_
#define NVTE_EP_DEVICE_SCALE_TILES_CUH_

#include <cstdint>

#include "device/memory.cuh"
#include "device/warp.cuh"

namespace nvte_ep::device {

constexpr int kPatchesPerTile = 4;  // u
constexpr int kPatchRows = 8;       // r
constexpr int kPatchColumns = 64;
constexpr int kTileBytes = 512;

__device__ __forceinline__ int patch_row(int patch) { return patch * kPatchRows + lane_id() % kPatchRows; }
__device__ __forceinline__ int64_t patch_column(int64_t first) { return first + lane_id() / kPatchRows * 16; }

// Scales of a lane's four rows: row[q].
struct PatchScales {
  uint4 row[4];
};

__device__ __forceinline__ uint32_t word_of(const uint4& v, int j) {
  return j == 0 ? v.x : (j == 1 ? v.y : (j == 2 ? v.z : v.w));
}

// tiles: those of a band of 128 rows, one after the other. Bytes past the columns, and rows past the slab,
// are zero already.
__device__ __forceinline__ void store_patch(uint8_t* tiles, int64_t columns, int patch, int64_t column,
                                            const PatchScales& scales) {
  uint8_t* at = tiles + (column / 4) * kTileBytes + patch_row(patch) * 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (column + 4 * j >= columns) break;
    *reinterpret_cast<uint4*>(at + j * kTileBytes) =
        make_uint4(word_of(scales.row[0], j), word_of(scales.row[1], j), word_of(scales.row[2], j),
                   word_of(scales.row[3], j));
  }
}

__device__ __forceinline__ PatchScales load_patch(const uint8_t* tiles, int64_t columns, int patch,
                                                  int64_t column) {
  const uint8_t* at = tiles + (column / 4) * kTileBytes + patch_row(patch) * 16;
  uint4 piece[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    piece[j] = column + 4 * j < columns ? *reinterpret_cast<const uint4*>(at + j * kTileBytes)
                                        : make_uint4(0, 0, 0, 0);
  }
  PatchScales scales;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    scales.row[q] =
        make_uint4(word_of(piece[0], q), word_of(piece[1], q), word_of(piece[2], q), word_of(piece[3], q));
  }
  return scales;
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_SCALE_TILES_CUH_
