// Two launches after the rows are packed. Publish: what peers need into the outbox, then the meeting. Deliver: each row that
// has slots here is read once, from this rank's memory or over the link, and written to all its slots in final form.
//
// Thread blocks are short-lived and come in the order of the rows; a warp holds a piece of a row in registers and writes it
// to one slot after the other.
#include "transports/peer/dispatch.h"

#include "device/codec_options.cuh"
#include "device/decode.cuh"
#include "device/kernel_order.cuh"
#include "device/memory.cuh"
#include "device/row_rescale.cuh"
#include "device/scale_tiles.cuh"
#include "device/warp.cuh"
#include "transports/peer/meeting.cuh"
#include "transports/peer/travelling_rows.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kDepth = 4;  // chunks of a piece that a lane holds
constexpr int kPieceChunks = kDepth * kWarp;
constexpr int kMostPublishBlocks = 1024;

__device__ __forceinline__ uint4 load_once(const void* from) {
  return __ldcs(static_cast<const uint4*>(from));
}
__device__ __forceinline__ void store_once(void* to, const uint4& v) { __stcs(static_cast<uint4*>(to), v); }

// ---- publish ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool peers_hold(const RouteMaps& m, int64_t token) {
  const uint32_t* holders = m.holders + token * m.holder_words();
  for (int w = 0; w < m.holder_words(); ++w) {
    const uint32_t own = w == m.rank / 32 ? 1u << (m.rank % 32) : 0u;
    if ((holders[w] & ~own) != 0) return true;
  }
  return false;
}

// A warp copies a row.
__device__ __forceinline__ void copy_row(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const int chunks = static_cast<int>(bytes / 16);
  for (int first = lane_id(); first < chunks; first += kPieceChunks) {
    uint4 v[kDepth];
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (first + d * kWarp < chunks) v[d] = load_once(from + (first + d * kWarp) * int64_t{16});
    }
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (first + d * kWarp < chunks)
        *reinterpret_cast<uint4*>(to + (first + d * kWarp) * int64_t{16}) = v[d];
    }
  }
}

__global__ void __launch_bounds__(kThreads) publish_rows(const PublishArguments a) {
  extern __shared__ uint32_t largest[];  // [num_experts], where exponents are sent
  const RouteMaps& m = a.maps;
  wait_for_kernel_before();
  const uint32_t now = *a.pools.epoch;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * a.tokens_per_block;
  const int64_t end = min(first + a.tokens_per_block, static_cast<int64_t>(a.tokens));
  if (blockIdx.x == 0 && threadIdx.x == 0)
    *a.pools.to_write<uint32_t>(a.weights.given, now) = a.gives_weights;
  const uint8_t* rows = a.rows.own != nullptr ? a.rows.own : a.pools.to_write<uint8_t>(a.rows.outbox, now);
  const int64_t stride = a.rows.own != nullptr ? a.rows.own_stride : a.rows.row_bytes;
  if (a.send_exponents) {
    for (int e = static_cast<int>(threadIdx.x); e < m.num_experts; e += kThreads) largest[e] = 0;
    __syncthreads();
#pragma unroll 4
    for (int64_t i = first * m.top_k + threadIdx.x; i < end * m.top_k; i += kThreads) {
      const int32_t expert = m.kept_experts[i];
      const float scale = *reinterpret_cast<const float*>(rows + i / m.top_k * stride + a.token_scale_offset);
      int exponent;
      if (expert >= 0 && Nvfp4::classify(scale, &exponent) == Nvfp4::ScaleKind::kLive) {
        atomicMax(&largest[expert], static_cast<uint32_t>(exponent - Nvfp4::kMinExponent + 1));
      }
    }
    __syncthreads();
    uint32_t* theirs = a.pools.to_write<uint32_t>(a.exponents.area, now);
    for (int e = static_cast<int>(threadIdx.x); e < m.num_experts; e += kThreads) {
      if (largest[e] != 0) atomicMax(&theirs[e], largest[e]);
    }
  }
  if (a.send_weights) {
    float* theirs = a.pools.to_write<float>(a.weights.area, now);
    for (int64_t i = first * m.top_k + threadIdx.x; i < end * m.top_k; i += kThreads) {
      theirs[i] = a.own_weights[i / m.top_k * a.own_weight_stride + i % m.top_k];
    }
  }
  if (a.copy_rows) {
    uint8_t* outbox = a.pools.to_write<uint8_t>(a.rows.outbox, now);
    for (int64_t t = first + warp_id(); t < end; t += kWarps) {
      if (peers_hold(m, t)) copy_row(outbox + t * a.rows.row_bytes, rows + t * stride, a.rows.row_bytes);
    }
  }
  if (is_last_block(a.ticket)) meet(a.meeting);
}

// ---- deliver ------------------------------------------------------------------------------------------------------

// What a chunk of a slot is made of.
struct SameBytes {
  __device__ __forceinline__ SameBytes(const DeliverArguments&, const uint8_t* row) : row_(row) {}
  __device__ __forceinline__ void fetch(int chunk) { v_ = load_once(row_ + chunk * int64_t{16}); }
  __device__ __forceinline__ uint4 bytes() const { return v_; }

 private:
  const uint8_t* row_;
  uint4 v_;
};

template <typename Format, typename Token>
class Decoded {
 public:
  __device__ __forceinline__ Decoded(const DeliverArguments& a, const uint8_t* row)
      : row_(row), scales_(row + a.payload_bytes), token_scale_(0.0f) {
    if constexpr (std::is_same_v<Format, Nvfp4>) {
      token_scale_ = *reinterpret_cast<const float*>(row + a.token_scale_offset);
      int exponent;
      if (Nvfp4::classify(token_scale_, &exponent) == Nvfp4::ScaleKind::kNan)
        token_scale_ = bits_float(kNanBits);
    }
  }
  __device__ __forceinline__ void fetch(int chunk) { chunk_.load(row_, scales_, chunk, 16); }
  __device__ __forceinline__ uint4 bytes() const { return chunk_.tokens(token_scale_); }

 private:
  const uint8_t* row_;
  const uint8_t* scales_;
  float token_scale_;
  Chunk<Format, Token> chunk_;
};

// A warp: a piece of a row to its slots.
template <typename Form>
__device__ __forceinline__ void deliver_piece(const DeliverArguments& a, uint32_t now, const bool* gives,
                                              int64_t item) {
  const RouteMaps& m = a.maps;
  const int piece = static_cast<int>(item % a.pieces);
  item /= a.pieces;
  const int rank = static_cast<int>(item % m.size);  // side by side, so that all links are in use
  const int64_t token = item / m.size;
  if (token >= m.tokens) return;
  const int32_t* slots = m.row_slots + (static_cast<int64_t>(rank) * m.tokens + token) * m.top_k;
  const int lane = lane_id();
  int32_t mine = lane < m.top_k ? slots[lane] : -1;
  unsigned holds = __ballot_sync(kAllLanes, mine >= 0);
  if (m.top_k > kWarp) {
    for (int k = kWarp + lane; k < round_up(m.top_k, kWarp); k += kWarp) {
      holds |= __ballot_sync(kAllLanes, k < m.top_k && slots[k] >= 0);
    }
  }
  if (holds == 0) return;

  const uint8_t* row = row_of(a.pools, a.rows, rank, token, now);
  const int first = piece * kPieceChunks + lane;
  uint4 v[kDepth];
  if (a.out != nullptr) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (first + d * kWarp >= a.chunks) continue;
      Form form(a, row);
      form.fetch(first + d * kWarp);
      v[d] = form.bytes();
    }
  }
  for (int k = 0; k < m.top_k; k += kWarp) {
    if (k > 0) mine = k + lane < m.top_k ? slots[k + lane] : -1;
    if (a.out_weights != nullptr && piece == 0 && mine >= 0) {
      float weight = 0.0f;
      if (rank == m.rank) {
        weight = a.own_weights[token * a.own_weight_stride + k + lane];
      } else if (gives[rank]) {
        weight = a.pools.to_read<float>(a.weights.area, rank, now)[token * m.top_k + k + lane];
      }
      a.out_weights[mine] = weight;
    }
    if (a.out == nullptr) continue;
    for (unsigned left = __ballot_sync(kAllLanes, mine >= 0); left != 0; left &= left - 1) {
      const int32_t slot = __shfl_sync(kAllLanes, mine, __ffs(static_cast<int>(left)) - 1);
      uint8_t* out = a.out + slot * a.out_stride;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (first + d * kWarp < a.chunks) store_once(out + (first + d * kWarp) * int64_t{16}, v[d]);
      }
    }
  }
}

// A warp: a slot of padding.
__device__ __forceinline__ void clear_pad(const DeliverArguments& a, int64_t item) {
  const RouteMaps& m = a.maps;
  const int64_t most = m.alignment - 1;  // of a slab
  const int64_t e = item / most;
  if (e >= m.local_experts()) return;
  const int64_t in_slab = m.tokens_per_expert[e] + item % most;
  if (in_slab >= m.rows_per_expert[e]) return;
  const int64_t slot = m.row_offsets[e] + in_slab;
  if (a.out_weights != nullptr && lane_id() == 0) a.out_weights[slot] = 0.0f;
  if (a.out == nullptr) return;
  for (int c = lane_id(); c < a.chunks; c += kWarp) {
    store_once(a.out + slot * a.out_stride + c * int64_t{16}, make_uint4(0, 0, 0, 0));
  }
}

// The second-level exponent of an expert, and its publication.
__device__ __forceinline__ uint8_t expert_exponent(const DeliverArguments& a, uint32_t now, int32_t e,
                                                   bool publishes) {
  const OperandScales& o = a.operand;
  bool live = false, illegal = false;
  int k = Nvfp4::kMinExponent;
  if (o.fixed_expert_scale != nullptr) {
    live = a.maps.rows_per_expert[e] > 0;
    illegal = Nvfp4::classify(o.fixed_expert_scale[e], &k) != Nvfp4::ScaleKind::kLive;
  } else {
    uint32_t largest = 0;
    for (int32_t r = 0; r < a.maps.size; ++r) {
      const uint32_t* theirs = a.pools.to_read<uint32_t>(a.exponents.area, r, now);
      largest = max(largest, theirs[a.maps.rank * a.maps.local_experts() + e]);
    }
    live = largest > 0;
    if (live) k = static_cast<int>(largest) + Nvfp4::kMinExponent - 1;
  }
  if (publishes) {
    if (illegal) report(o.findings, NVTE_EP_FINDING_EXPERT_SCALE);
    const auto tell = [&](float* part, float unit) {
      if (part != nullptr)
        part[e] = !live ? 0.0f : (illegal ? bits_float(kNanBits) : mul_rn(unit, exp2_int(k)));
    };
    tell(o.amax, Nvfp4::kRange);
    tell(o.expert_scale, 1.0f);
  }
  return illegal ? kIllegalExponent : static_cast<uint8_t>(k - Nvfp4::kMinExponent);
}

// A block: the scales of a band of 128 rows of a slab, requantised (NVFP4) and put into tiles.
template <typename Format>
__device__ __forceinline__ void make_band(const DeliverArguments& a, uint32_t now, int64_t tile) {
  constexpr bool kNvfp4 = std::is_same_v<Format, Nvfp4>;
  __shared__ const uint8_t* scales_of[kScaleTileRows];  // null: padding
  __shared__ RowRescale rescale[kScaleTileRows];
  __shared__ uint8_t exponent;
  const RouteMaps& m = a.maps;
  const OperandScales& o = a.operand;
  // The slab: every warp looks for it.
  int32_t expert = -1;
  for (int32_t base = 0; base < m.local_experts() && expert < 0; base += kWarp) {
    const int32_t e = base + lane_id();
    const bool here = e < m.local_experts() && tile < m.scale_row_offsets[e + 1] / kScaleTileRows;
    const unsigned found = __ballot_sync(kAllLanes, here);
    if (found != 0) expert = base + __ffs(static_cast<int>(found)) - 1;
  }
  if (expert < 0) return;
  const int64_t first_tile = m.scale_row_offsets[expert] / kScaleTileRows;
  const int64_t band = tile - first_tile;
  const int64_t first_slot = m.row_offsets[expert] + band * kScaleTileRows;
  const int rows = static_cast<int>(min(m.rows_per_expert[expert] - band * kScaleTileRows, kScaleTileRows));
  // The exponent by the last warp, the rows by the first four, side by side.
  const int row_here = static_cast<int>(threadIdx.x);
  float token_scale = 0.0f;
  if (row_here < rows) {
    const int64_t source = m.slot_source[first_slot + row_here];
    const uint8_t* row =
        source < 0 ? nullptr
                   : row_of(a.pools, a.rows, static_cast<int32_t>(source >> 32), source & 0xFFFFFFFF, now);
    scales_of[row_here] = row == nullptr ? nullptr : row + o.layout.payload_bytes;
    if (kNvfp4 && row != nullptr) {
      token_scale = *reinterpret_cast<const float*>(row + o.layout.token_scale_offset);
    }
  }
  if constexpr (kNvfp4) {
    if (threadIdx.x == kThreads - 1) exponent = expert_exponent(a, now, expert, false);
    __syncthreads();
    if (row_here < rows) rescale[row_here] = RowRescale(token_scale, exponent);
  }
  __syncthreads();
  bool misfit = false;
  const int64_t pieces = (o.columns + kPatchColumns - 1) / kPatchColumns;
  for (int64_t i = warp_id(); i < pieces * kPatchesPerTile; i += kWarps) {
    const int patch = static_cast<int>(i % kPatchesPerTile);
    const int64_t column = patch_column(i / kPatchesPerTile * kPatchColumns);
    if (column >= o.columns) continue;
    const int bytes = static_cast<int>(min(o.columns - column, int64_t{16}));
    PatchScales scales;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int row = 32 * q + patch_row(patch);
      const uint8_t* from = row < rows ? scales_of[row] : nullptr;
      scales.row[q] = make_uint4(0, 0, 0, 0);
      // A row's last 16 bytes may run past its scales, but not past the row.
      if (from != nullptr) scales.row[q] = *reinterpret_cast<const uint4*>(from + column);
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int row = 32 * q + patch_row(patch);
      if (row >= rows) continue;
      uint4 v = scales.row[q];
      if (bytes < 16) v = first_bytes(v, bytes);
      if constexpr (kNvfp4) {
        const RowRescale& r = rescale[row];
        v = make_uint4(r(v.x, &misfit), r(v.y, &misfit), r(v.z, &misfit), r(v.w, &misfit));
        if (bytes < 16) v = first_bytes(v, bytes);
      }
      scales.row[q] = v;
      if (o.linear) {
        store16(o.scales + (first_slot + row) * o.columns + column, v, o.columns % 16 == 0 ? 16 : 1, bytes);
      }
    }
    if (!o.linear) {
      store_patch(o.scales + tile * ((o.columns + 3) / 4) * kTileBytes, o.columns, patch, column, scales);
    }
  }
  if (misfit) report(o.findings, NVTE_EP_FINDING_EXPERT_SCALE);
}

// Whether the peers gave weights; one block tells the host who did not.
__device__ void read_gifts(const DeliverArguments& a, uint32_t now, bool* gives) {
  for (int32_t r = static_cast<int32_t>(threadIdx.x); r < a.maps.size; r += kThreads) {
    gives[r] = *a.pools.to_read<uint32_t>(a.weights.given, r, now) != 0;
  }
  __syncthreads();
  if (!is_first_thread()) return;
  for (int32_t r = 0; r < a.maps.size; ++r) {
    if (gives[r] || r == a.maps.rank) continue;
    volatile int64_t* report = a.report;
    a.counters[5] = r;
    a.counters[4] += 1;
    report[5] = r;
    __threadfence_system();
    report[4] = a.counters[4];
  }
}

struct NoScales {};

template <typename Form, typename Scales>
__global__ void __launch_bounds__(kThreads, 4) deliver(const DeliverArguments a) {
  extern __shared__ bool gives[];  // [size], where weights are wanted
  wait_for_kernel_before();
  let_next_kernel_start();
  const uint32_t now = *a.pools.epoch;
  if (a.out_weights != nullptr) read_gifts(a, now, gives);
  if constexpr (std::is_same_v<Scales, Nvfp4>) {
    if (blockIdx.x == 0) {
      for (int32_t e = static_cast<int32_t>(threadIdx.x); e < a.maps.local_experts(); e += kThreads) {
        expert_exponent(a, now, e, true);
      }
    }
  }
  for (int64_t block = blockIdx.x; block < a.blocks; block += gridDim.x) {
    const int64_t item = (block - a.band_blocks) * kWarps + warp_id();
    if (block < a.band_blocks) {  // first: they wait for memory, and the others fill the time
      if constexpr (!std::is_same_v<Scales, NoScales>) {
        make_band<Scales>(a, now, block);
        __syncthreads();
      }
    } else if (block - a.band_blocks < a.copy_blocks) {
      deliver_piece<Form>(a, now, gives, item);
    } else {
      clear_pad(a, item - a.copy_blocks * kWarps);
    }
  }
}

template <typename Form, typename Scales>
Status launch(DeliverArguments a, const LaunchContext& context) {
  const RouteMaps& m = a.maps;
  const bool moves = a.out != nullptr || a.out_weights != nullptr;
  a.pieces = a.out == nullptr ? 1 : static_cast<int32_t>((a.chunks + kPieceChunks - 1) / kPieceChunks);
  a.band_blocks = std::is_same_v<Scales, NoScales> || a.operand.scales == nullptr ? 0 : a.operand.bands;
  a.copy_blocks = moves ? (static_cast<int64_t>(m.tokens) * m.size * a.pieces + kWarps - 1) / kWarps : 0;
  const int64_t pads = moves ? m.local_experts() * (m.alignment - 1) : 0;
  a.blocks = a.band_blocks + a.copy_blocks + (pads + kWarps - 1) / kWarps;
  LaunchShape shape;
  shape.threads = kThreads;
  shape.blocks = std::max<int64_t>(1, a.blocks);
  shape.bounded = true;
  shape.overlaps = true;
  shape.shared_bytes = a.out_weights != nullptr ? m.size : 0;
  return launch_kernel<deliver<Form, Scales>>("deliver", context, shape, a);
}

template <typename Format>
Status launch_decoded(DType dtype, const DeliverArguments& a, const LaunchContext& context) {
  switch (dtype) {
    case DType::kBFloat16:
      return launch<Decoded<Format, Bf16Token>, NoScales>(a, context);
    case DType::kFloat16:
      return launch<Decoded<Format, Fp16Token>, NoScales>(a, context);
    default:
      return launch<Decoded<Format, Fp32Token>, NoScales>(a, context);
  }
}

}  // namespace

Status launch_publish(const PublishArguments& arguments, const LaunchContext& context) {
  PublishArguments a = arguments;
  LaunchShape shape;
  shape.threads = kThreads;
  // Rows are copied by many blocks; exponents alone by few, and nothing by one.
  const int64_t per_block = a.copy_rows ? kWarps : (a.send_exponents || a.send_weights ? kThreads : a.tokens);
  a.tokens_per_block = static_cast<int32_t>(
      std::max<int64_t>({1, per_block, (a.tokens + kMostPublishBlocks - 1) / kMostPublishBlocks}));
  shape.blocks = std::max<int64_t>(1, (a.tokens + a.tokens_per_block - 1) / a.tokens_per_block);
  if (context.max_sms > 0) {
    shape.blocks = std::min<int64_t>(shape.blocks, context.max_sms * int64_t{2048 / kThreads});
    a.tokens_per_block = static_cast<int32_t>((a.tokens + shape.blocks - 1) / shape.blocks);
  }
  shape.overlaps = true;
  shape.shared_bytes = a.send_exponents ? a.maps.num_experts * 4 : 0;
  return launch_kernel<publish_rows>("publish", context, shape, a);
}

Status launch_deliver(SlotForm form, int32_t format, DType dtype, const DeliverArguments& a,
                      const LaunchContext& context) {
  if (form == SlotForm::kBytes) return launch<SameBytes, NoScales>(a, context);
  if (form == SlotForm::kOperand) {
    return format == NVTE_EP_FORMAT_NVFP4 ? launch<SameBytes, Nvfp4>(a, context)
                                          : launch<SameBytes, Mxfp8>(a, context);
  }
  switch (format) {
    case NVTE_EP_FORMAT_NVFP4:
      return launch_decoded<Nvfp4>(dtype, a, context);
    case NVTE_EP_FORMAT_MXFP8:
      return launch_decoded<Mxfp8>(dtype, a, context);
    default:
      return launch_decoded<Bf16>(dtype, a, context);
  }
}

}  // namespace nvte_ep
