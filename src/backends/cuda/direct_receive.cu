// Direct receive: packed rows, ordered by expert, to the operand of a grouped GEMM. The experts' exponents
// first, then the rowwise operand, or both operands by tiles (receive_columns_*.cu).
#include <cooperative_groups.h>

#include <type_traits>

#include "backends/cuda/launch.h"
#include "backends/cuda/receive_arguments.cuh"
#include "backends/cuda/receive_columns.h"
#include "device/e4m3.cuh"
#include "device/kernel_order.cuh"
#include "device/memory.cuh"
#include "formats/mxfp8.h"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT
namespace cg = cooperative_groups;

constexpr int kThreads = 256;
constexpr int kMaxCluster = 8;
constexpr int64_t kClusterRows = 4096;  // from here on, several thread blocks share an expert

// ---- exponents --------------------------------------------------------------------------------------------

// Largest value over the blocks of a cluster.
__device__ __forceinline__ uint32_t cluster_max(uint32_t value, uint32_t* exchange, uint32_t* shared_result) {
  value = block_max(value, kThreads / kWarp, exchange);
  cg::cluster_group cluster = cg::this_cluster();
  if (cluster.num_blocks() == 1) return value;
  if (threadIdx.x == 0) *shared_result = value;
  cluster.sync();
  for (unsigned rank = 0; rank < cluster.num_blocks(); ++rank) {
    value = max(value, *cluster.map_shared_rank(shared_result, rank));
  }
  return value;
}

// A cluster of thread blocks an expert. Reads the expert's token scales, publishes its second-level scales,
// and leaves the exponents where the blocks of the next kernel look for them.
__global__ void __launch_bounds__(kThreads, 3) find_exponents(const ReceiveArguments a) {
  __shared__ uint32_t exchange[2][kMaxWarps];
  __shared__ uint32_t result[2];
  let_next_kernel_start();  // which moves rows meanwhile
  cg::cluster_group cluster = cg::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks());
  const int rank = static_cast<int>(cluster.block_rank());
  const int32_t expert = static_cast<int32_t>(blockIdx.x / blocks);
  const Slab slab =
      find_slab<kThreads>(a.counts, nullptr, [expert](int32_t e, int64_t, int64_t) { return e == expert; });
  const int64_t first = static_cast<int64_t>(rank) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(blocks) * kThreads;

  bool live;
  bool illegal = false;
  int k = Nvfp4::kMinExponent;
  int column_k;
  if (a.options.fixed_expert_scale != nullptr) {
    live = slab.rows > 0;
    illegal = Nvfp4::classify(a.options.fixed_expert_scale[expert], &k) != Nvfp4::ScaleKind::kLive;
    column_k = k + 2;
    if (illegal && rank == 0 && threadIdx.x == 0) report(a.options.findings, NVTE_EP_FINDING_EXPERT_SCALE);
  } else {
    uint32_t largest = 0;  // exponent + 117; 0: no live row
#pragma unroll 4
    for (int64_t i = first; i < slab.rows; i += step) {
      int exponent;
      if (Nvfp4::classify(a.token_scale(slab.first_row + i), &exponent) == Nvfp4::ScaleKind::kLive) {
        largest = max(largest, static_cast<uint32_t>(exponent - Nvfp4::kMinExponent + 1));
      }
    }
    largest = cluster_max(largest, exchange[0], &result[0]);
    live = largest > 0;
    k = live ? static_cast<int>(largest) + Nvfp4::kMinExponent - 1 : Nvfp4::kMinExponent;
    column_k = k + 2;
    const bool wants_columns =
        a.tiles || a.columnwise_amax != nullptr || a.columnwise_expert_scale != nullptr;
    if (wants_columns && live && !a.options.column_max) {
      uint32_t largest_sum = 0;
#pragma unroll 2
      for (int64_t i = first - lane_id(); i < slab.rows;
           i += step) {  // whole warps: two blocks of 16 rows each
        const int64_t row = i + lane_id();
        int exponent;
        uint32_t sum = 0;
        if (row < slab.rows &&
            Nvfp4::classify(a.token_scale(slab.first_row + row), &exponent) == Nvfp4::ScaleKind::kLive) {
          sum = Nvfp4::l1_term(k, exponent);
        }
#pragma unroll
        for (int d = 1; d < Nvfp4::kBlock; d *= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
        const bool whole = (row & ~static_cast<int64_t>(Nvfp4::kBlock - 1)) + Nvfp4::kBlock <= slab.rows;
        largest_sum = max(largest_sum, whole ? sum : 0u);
      }
      column_k = Nvfp4::l1_exponent(k, cluster_max(largest_sum, exchange[1], &result[1]));
    }
  }
  if (rank == 0 && threadIdx.x == 0) {
    const auto publish = [&](float* part, float unit, int exponent) {
      if (part == nullptr) return;
      part[expert] = !live ? 0.0f : (illegal ? bits_float(kNanBits) : mul_rn(unit, exp2_int(exponent)));
    };
    publish(a.amax, Nvfp4::kRange, k);
    publish(a.columnwise_amax, Nvfp4::kRange, column_k);
    publish(a.expert_scale, 1.0f, k);
    publish(a.columnwise_expert_scale, 1.0f, column_k);
  }

  const uint8_t byte = illegal ? kIllegalExponent : static_cast<uint8_t>(k - Nvfp4::kMinExponent);
  const uint8_t column_byte =
      illegal ? kIllegalExponent : static_cast<uint8_t>(column_k - Nvfp4::kMinExponent);
  const int64_t owners = (slab.rows + kScaleTileRows - 1) / kScaleTileRows * a.column_groups;
  for (int64_t i = first; i < owners; i += step) {
    const int64_t band = i / a.column_groups;
    const int group = static_cast<int>(i % a.column_groups);
    if (a.scales != nullptr) *a.group_exponent(slab, band, group) = byte;
    if (a.tiles) *a.column_exponent(slab, band, group) = column_byte;
  }
  if (blocks > 1) cluster.sync();  // a block's shared memory outlives its readers
}

// ---- the rowwise operand ----------------------------------------------------------------------------------

// Thread blocks are small and come in the order of the rows, so that what the device reads and writes at one
// time lies close together: 16 blocks that copy the payload of 8 rows each, then one that makes the scales of
// a band of 128 rows.
constexpr int kCopyRows = 8;
constexpr int kCopyBlocks = static_cast<int>(kScaleTileRows) / kCopyRows;

__device__ __forceinline__ void copy_payload(const ReceiveArguments& a, int64_t first_row) {
  constexpr int kInFlight = 4;
  const int64_t total = rows_of_all(a.counts);
  if (first_row >= total) return;
  const int64_t left = total - first_row;
  const int64_t chunks = a.layout.payload_bytes / 16;
  const int64_t end = (left < kCopyRows ? left : kCopyRows) * chunks;
  const uint8_t* from = a.rows + first_row * a.row_stride;
  uint4* to = reinterpret_cast<uint4*>(a.payload + first_row * a.layout.payload_bytes);
  const int64_t pad = a.row_stride - a.layout.payload_bytes;  // bytes from a row's payload to the next one's
  for (int64_t i = threadIdx.x; i < end; i += kInFlight * kThreads) {
    uint4 v[kInFlight];
#pragma unroll
    for (int d = 0; d < kInFlight; ++d) {
      const int64_t at = i + d * kThreads;
      if (at < end) {
        const int row = static_cast<int>(static_cast<uint32_t>(at) / static_cast<uint32_t>(chunks));
        const uint8_t* chunk = a.anywhere == nullptr ? from + at * 16 + row * pad
                                                     : a.anywhere[first_row + row] + (at - row * chunks) * 16;
        v[d] = *reinterpret_cast<const uint4*>(chunk);
      }
    }
#pragma unroll
    for (int d = 0; d < kInFlight; ++d) {
      if (i + d * kThreads < end) to[i + d * kThreads] = v[d];
    }
  }
}

// The scales of a band, requantised (NVFP4) and put into tiles.
template <typename Format>
__device__ __forceinline__ void make_scales(const ReceiveArguments& a, int64_t tile) {
  constexpr bool kNvfp4 = std::is_same_v<Format, Nvfp4>;
  __shared__ RowRescale rescale[kScaleTileRows];
  const Slab slab = find_slab_of_tile<kThreads>(a.counts, tile == 0 ? a.options.findings : nullptr, tile);
  if (slab.expert < 0 || a.scales == nullptr) return;
  const int64_t band = tile - slab.first_tile;
  const int64_t left = slab.rows - band * kScaleTileRows;
  const int rows = static_cast<int>(left < kScaleTileRows ? left : kScaleTileRows);
  const int64_t first_row = slab.first_row + band * kScaleTileRows;
  if constexpr (kNvfp4) {
    if (static_cast<int>(threadIdx.x) < rows) {
      const uint8_t* known = a.options.expert_exponents;
      rescale[threadIdx.x] =
          RowRescale(a.token_scale(first_row + threadIdx.x),
                     known != nullptr ? known[2 * slab.expert] : *a.group_exponent(slab, band, 0));
    }
    __syncthreads();  // the exponent is read, before its place is written
  }
  bool misfit = false;
  uint8_t* band_scales = a.linear ? a.linear_scale(slab, band * kScaleTileRows, 0) : a.band_tiles(slab, band);
  const int64_t pieces = (a.columns + kPatchColumns - 1) / kPatchColumns;
  for (int64_t i = warp_id(); i < pieces * kPatchesPerTile; i += kThreads / kWarp) {
    const int patch = static_cast<int>(i % kPatchesPerTile);
    const int64_t column = patch_column(i / kPatchesPerTile * kPatchColumns);
    if (column >= a.columns) continue;
    move_patch<Format>(
        a, patch, column, rows, band_scales, [&](int row) { return a.row(first_row + row); }, rescale,
        &misfit);
  }
  if (misfit) report(a.options.findings, NVTE_EP_FINDING_EXPERT_SCALE);
}

template <typename Format>
__global__ void __launch_bounds__(kThreads, 3) receive_rows(const ReceiveArguments a) {
  if (a.anywhere != nullptr) wait_for_kernel_before();  // the pointers are there
  for (int64_t work = blockIdx.x; work < a.blocks; work += gridDim.x) {
    const int64_t band = work / (kCopyBlocks + 1);
    const int member = static_cast<int>(work % (kCopyBlocks + 1));
    if (member == kCopyBlocks) {
      wait_for_kernel_before();  // the exponents are there
      make_scales<Format>(a, band);
    } else if (a.payload != nullptr) {
      copy_payload(a, band * kScaleTileRows + member * kCopyRows);
    }
    __syncthreads();
  }
}

// Into how many groups the columns of a band are best divided for the tile kernels: thread blocks come in whole rounds, and each
// has to find its band, which takes about half as long as 256 columns.
int64_t stages_of_group(int64_t tiles, int64_t stages, int32_t format, const LaunchContext& context) {
  const int64_t sms = context.max_sms > 0 ? std::min(context.max_sms, context.sms) : context.sms;
  const int64_t at_once = sms * (format == NVTE_EP_FORMAT_NVFP4 ? 3 : 2);
  int64_t best = 1, least = INT64_MAX;
  for (int64_t n = 1; n <= stages; ++n) {
    const int64_t rounds = (tiles * ((stages + n - 1) / n) + at_once - 1) / at_once;
    const int64_t halves = rounds * (2 * n + 1);
    if (halves < least) {
      least = halves;
      best = n;
    }
  }
  return best;
}

}  // namespace

Status launch_direct_receive(int32_t format, const RowsView& rows, const IndexView& rows_per_expert,
                             const OperandView& operand, const CodecOptions& options,
                             const LaunchContext& context) {
  const OperandShape& shape = operand.shape;
  if (!rows.packed || alignment_of(rows.payload, rows.payload_stride) < 16) {
    return invalid_argument("rows: expected packed rows at multiples of 16 bytes");
  }
  ReceiveArguments a{};
  a.rows = rows.payload;
  a.row_stride = rows.payload_stride;
  a.anywhere = rows.anywhere;
  a.late_begin = rows.late_begin;
  a.late_end = rows.late_end;
  a.layout = shape.row();
  a.hidden = shape.hidden;
  a.columns = shape.hidden / shape.traits().block;
  a.linear = shape.linear_scales;
  a.tiles = operand.columnwise();
  a.payload = operand.payload;
  a.scales = operand.scales;
  a.columnwise_payload = operand.columnwise_payload;
  a.columnwise_scales = operand.columnwise_scales;
  a.amax = operand.amax;
  a.columnwise_amax = operand.columnwise_amax;
  a.expert_scale = operand.expert_scale;
  a.columnwise_expert_scale = operand.columnwise_expert_scale;
  const int64_t available = std::min(shape.capacity, rows.rows) / shape.alignment * shape.alignment;
  a.counts = SlabCounts{rows_per_expert, shape.num_experts, available, shape.alignment};
  a.options = options;
  const int64_t tiles = std::max<int64_t>(1, max_tiles(available, shape.alignment, shape.num_experts));
  const int64_t stages = (shape.hidden + kTileColumns - 1) / kTileColumns;
  const int64_t group_stages = a.tiles ? stages_of_group(tiles, stages, format, context) : stages;
  a.group_columns = group_stages * kTileColumns;
  a.column_groups = static_cast<int>((stages + group_stages - 1) / group_stages);

  if (format == NVTE_EP_FORMAT_NVFP4 && options.expert_exponents == nullptr) {
    LaunchShape first;
    first.cluster = available >= kClusterRows ? kMaxCluster : 1;
    first.blocks = static_cast<int64_t>(shape.num_experts) * first.cluster;
    first.threads = kThreads;
    NVTE_EP_TRY(launch_kernel<find_exponents>("find_exponents", context, first, a));
    a.late_begin = a.late_end = nullptr;  // it has waited for all rows
  }
  if (a.tiles) {
    const int64_t blocks_of_a_tile = a.column_groups * (a.late_begin != nullptr ? 2 : 1);
    a.blocks = tiles * blocks_of_a_tile;
    if (a.blocks > INT32_MAX) {
      return unsupported("operand: expected at most ", INT32_MAX / blocks_of_a_tile * kScaleTileRows,
                         " rows for a columnwise part");
    }
    return format == NVTE_EP_FORMAT_NVFP4 ? launch_receive_columns_nvfp4(a, context)
                                          : launch_receive_columns_mxfp8(a, context);
  }
  LaunchShape second;
  second.threads = kThreads;
  a.blocks = second.blocks = tiles * (kCopyBlocks + 1);
  second.bounded = true;
  second.overlaps = format == NVTE_EP_FORMAT_NVFP4;
  return format == NVTE_EP_FORMAT_NVFP4
             ? launch_kernel<receive_rows<Nvfp4>>("receive_rows", context, second, a)
             : launch_kernel<receive_rows<Mxfp8>>("receive_rows", context, second, a);
}

}  // namespace nvte_ep
