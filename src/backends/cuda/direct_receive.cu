// Direct receive: packed rows, ordered by expert, to the operand of a grouped GEMM. The experts' exponents first, then the
// rowwise operand, or both operands by tiles (direct_receive_columns.cu).
#include <cooperative_groups.h>

#include <type_traits>

#include "backends/cuda/launch_kernel.h"
#include "backends/cuda/receive_arguments.cuh"
#include "backends/cuda/receive_columns.h"
#include "device/e4m3.cuh"
#include "device/memory.cuh"
#include "formats/mxfp8.h"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT
namespace cg = cooperative_groups;

constexpr int kThreads = 256;
constexpr int kMaxCluster = 8;
constexpr int64_t kClusterRows = 4096;  // from here on, several thread blocks share an expert

// ---- exponents ------------------------------------------------------------------------------------------------------------------

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

// A cluster of thread blocks an expert. Reads the expert's token scales, publishes its second-level scales, and leaves the
// exponents where the blocks of the next kernel look for them.
__global__ void __launch_bounds__(kThreads, 3) find_exponents(const ReceiveArguments a) {
  __shared__ uint32_t exchange[2][kMaxWarps];
  __shared__ uint32_t result[2];
  cg::cluster_group cluster = cg::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks());
  const int rank = static_cast<int>(cluster.block_rank());
  const int32_t expert = static_cast<int32_t>(blockIdx.x / blocks);
  const Slab slab = find_slab<kThreads>(a.counts, nullptr, [expert](int32_t e, int64_t, int64_t) { return e == expert; });
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
    const bool wants_columns = a.tiles || a.columnwise_amax != nullptr || a.columnwise_expert_scale != nullptr;
    if (wants_columns && live && !a.options.column_max) {
      uint32_t largest_sum = 0;
#pragma unroll 2
      for (int64_t i = first - lane_id(); i < slab.rows; i += step) {  // whole warps: two blocks of 16 rows each
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
  const uint8_t column_byte = illegal ? kIllegalExponent : static_cast<uint8_t>(column_k - Nvfp4::kMinExponent);
  const int parts = a.tiles ? a.column_groups : kPatchesPerTile;
  const int64_t owners = (slab.rows + kScaleTileRows - 1) / kScaleTileRows * parts;
  for (int64_t i = first; i < owners; i += step) {
    const int64_t band = i / parts;
    const int part = static_cast<int>(i % parts);
    if (a.tiles) {
      if (a.scales != nullptr) *a.group_exponent(slab, band, part) = byte;
      *a.column_exponent(slab, band, part) = column_byte;
    } else if (a.scales != nullptr && band * kScaleTileRows + part * kPatchRows < slab.rows) {
      *a.patch_exponent(slab, band, part) = byte;
    }
  }
  if (blocks > 1) cluster.sync();  // a block's shared memory outlives its readers
}

// ---- the rowwise operand ------------------------------------------------------------------------------------------------------------

// A row's 16 scale bytes from a column on. The last ones of a row may run past its scales, but not past the row.
__device__ __forceinline__ uint4 load_scales(const ReceiveArguments& a, const uint8_t* row, int64_t column) {
  return *reinterpret_cast<const uint4*>(row + a.layout.payload_bytes + column);
}

// A thread block some patches of 32 rows of one band: payload is copied, scales are requantised (NVFP4) and put into tiles.
// patches is a divisor of kPatchesPerTile.
template <typename Format>
__global__ void __launch_bounds__(kThreads, 3) receive_rows(const ReceiveArguments a, int patches) {
  constexpr bool kNvfp4 = std::is_same_v<Format, Nvfp4>;
  constexpr int kInFlight = 4;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * patches / kPatchesPerTile;
  const int first_patch = static_cast<int>(blockIdx.x) * patches % kPatchesPerTile;
  const Slab slab = find_slab_of_tile<kThreads>(a.counts, a.options.findings, tile);
  if (slab.expert < 0) return;
  const int64_t band = tile - slab.first_tile;
  const int64_t rows = slab.rows - band * kScaleTileRows;  // in this band, perhaps more than 128
  const int64_t first_row = slab.first_row + band * kScaleTileRows;
  const uint8_t* from = a.rows + first_row * a.row_stride;
  bool misfit = false;
  for (int patch = first_patch; patch < first_patch + patches; ++patch) {
    uint8_t exponent = 0;
    if (kNvfp4 && a.scales != nullptr && patch * kPatchRows < rows) {
      exponent = *a.patch_exponent(slab, band, patch);
      __syncthreads();  // read by all, before the place is written
    }
    // The scales' loads go first, so that they are there when the payload has been copied.
    const int64_t my_column = patch_column(static_cast<int64_t>(warp_id()) * kPatchColumns);
    uint4 early[4];
    float token_scale[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int64_t row = 32 * q + patch_row(patch);
      if (a.scales == nullptr || row >= rows || my_column >= a.columns) continue;
      early[q] = load_scales(a, from + row * a.row_stride, my_column);
      if (kNvfp4) token_scale[q] = a.token_scale(first_row + row);
    }

    if (a.payload != nullptr) {
      const int64_t chunks = a.layout.payload_bytes / 16;
      const int r = patch * kPatchRows + warp_id();
#pragma unroll 1
      for (int q = 0; q < 4; ++q) {
        const int64_t row = 32 * q + r;
        if (row >= rows) break;
        const uint4* in = reinterpret_cast<const uint4*>(from + row * a.row_stride);
        uint4* out = reinterpret_cast<uint4*>(a.payload + (first_row + row) * a.layout.payload_bytes);
        for (int64_t c = lane_id(); c < chunks; c += kInFlight * kWarp) {
          uint4 v[kInFlight];
#pragma unroll
          for (int d = 0; d < kInFlight; ++d) {
            if (c + d * kWarp < chunks) v[d] = load_once(in + c + d * kWarp);
          }
#pragma unroll
          for (int d = 0; d < kInFlight; ++d) {
            if (c + d * kWarp < chunks) out[c + d * kWarp] = v[d];
          }
        }
      }
    }

    if (a.scales == nullptr) continue;
    for (int64_t first = static_cast<int64_t>(warp_id()) * kPatchColumns; first < a.columns;
         first += kThreads / kWarp * kPatchColumns) {
      const int64_t column = patch_column(first);
      if (column >= a.columns) continue;
      const int left = static_cast<int>(a.columns - column < 16 ? a.columns - column : 16);
      PatchScales scales;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int64_t row = 32 * q + patch_row(patch);
        scales.row[q] = make_uint4(0, 0, 0, 0);
        if (row >= rows) continue;
        uint4 v = column == my_column ? early[q] : load_scales(a, from + row * a.row_stride, column);
        if (left < 16) v = first_bytes(v, left);
        if constexpr (kNvfp4) {
          const RowRescale rescale(token_scale[q], exponent);
          v = make_uint4(rescale(v.x, &misfit), rescale(v.y, &misfit), rescale(v.z, &misfit), rescale(v.w, &misfit));
          if (left < 16) v = first_bytes(v, left);
        }
        scales.row[q] = v;
        if (a.linear) {
          store16(a.linear_scale(slab, band * kScaleTileRows + row, column), v, a.columns % 16 == 0 ? 16 : 1, left);
        }
      }
      if (!a.linear) store_patch(a.band_tiles(slab, band), a.columns, patch, column, scales);
    }
  }
  if (misfit) report(a.options.findings, NVTE_EP_FINDING_EXPERT_SCALE);
}

}  // namespace

Status launch_direct_receive(int32_t format, const RowsView& rows, const IndexView& rows_per_expert,
                             const OperandView& operand, const CodecOptions& options, const LaunchContext& context) {
  const OperandShape& shape = operand.shape;
  if (!rows.packed || alignment_of(rows.payload, rows.payload_stride) < 16) {
    return invalid_argument("rows: expected packed rows at multiples of 16 bytes");
  }
  ReceiveArguments a{};
  a.rows = rows.payload;
  a.row_stride = rows.payload_stride;
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
  a.column_groups = static_cast<int>((shape.hidden + kGroupColumns - 1) / kGroupColumns);

  if (format == NVTE_EP_FORMAT_NVFP4) {
    LaunchShape first;
    first.cluster = available >= kClusterRows ? kMaxCluster : 1;
    first.blocks = static_cast<int64_t>(shape.num_experts) * first.cluster;
    first.threads = kThreads;
    NVTE_EP_TRY(launch_kernel<find_exponents>("find_exponents", context, first, a));
  }
  const int64_t tiles = std::max<int64_t>(1, max_tiles(available, shape.alignment, shape.num_experts));
  if (a.tiles) return launch_receive_tiles(format, a, tiles, context);
  // A block a whole band where there are plenty, so that finding the slab costs little; a patch where there are few.
  const int patches = tiles >= 16 * static_cast<int64_t>(context.sms) ? kPatchesPerTile : 1;
  LaunchShape second;
  second.blocks = tiles * kPatchesPerTile / patches;
  second.threads = kThreads;
  return format == NVTE_EP_FORMAT_NVFP4
             ? launch_kernel<receive_rows<Nvfp4>>("receive_rows", context, second, a, patches)
             : launch_kernel<receive_rows<Mxfp8>>("receive_rows", context, second, a, patches);
}

}  // namespace nvte_ep
