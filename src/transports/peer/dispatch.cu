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
constexpr int kTailsOfAWarp = 4;
constexpr int64_t kFewRows = 1024;  // of all ranks

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
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *a.pools.to_write<uint32_t>(a.weights.given, now) = a.gives_weights;
    if (a.tails_shares != nullptr) *a.tails_shares = TailsShares{};
  }
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
    const float* mine = a.own_weights + first * a.own_weight_stride;
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(end - first) * m.top_k; i += kThreads) {
      theirs[first * m.top_k + i] = mine[i / m.top_k * a.own_weight_stride + i % m.top_k];
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

__device__ __forceinline__ bool gives_weights(const DeliverArguments& a, int32_t rank, uint32_t now) {
  return *a.pools.to_read<uint32_t>(a.weights.given, rank, now) != 0;
}

// A warp: a piece of a row to its slots.
template <typename Form>
__device__ __forceinline__ void deliver_piece(const DeliverArguments& a, uint32_t now, int64_t item) {
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
  const int first = piece * a.piece_chunks + lane;
  const int end = min((piece + 1) * a.piece_chunks, a.chunks);
  uint4 v[kDepth];
  if (a.out != nullptr) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (first + d * kWarp >= end) continue;
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
      } else {
        const float theirs = a.pools.to_read<float>(a.weights.area, rank, now)[token * m.top_k + k + lane];
        weight = gives_weights(a, rank, now) ? theirs : 0.0f;
      }
      a.out_weights[mine] = weight;
    }
    if (a.out == nullptr) continue;
    for (unsigned left = __ballot_sync(kAllLanes, mine >= 0); left != 0; left &= left - 1) {
      const int32_t slot = __shfl_sync(kAllLanes, mine, __ffs(static_cast<int>(left)) - 1);
      uint8_t* out = a.out + slot * a.out_stride;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (first + d * kWarp < end) store_once(out + (first + d * kWarp) * int64_t{16}, v[d]);
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

// An exponent as it is published and compared: from kMinExponent up, and one more; 0: none.
__device__ __forceinline__ uint32_t exponent_of(float token_scale) {
  int k;
  const bool live = Nvfp4::classify(token_scale, &k) == Nvfp4::ScaleKind::kLive;
  return live ? static_cast<uint32_t>(k - Nvfp4::kMinExponent + 1) : 0u;
}
__device__ __forceinline__ uint32_t published_exponent(const DeliverArguments& a, uint32_t now, int32_t e) {
  uint32_t largest = 0;
  for (int32_t r = 0; r < a.maps.size; ++r) {
    const uint32_t* theirs = a.pools.to_read<uint32_t>(a.exponents.area, r, now);
    largest = max(largest, theirs[a.maps.rank * a.maps.local_experts() + e]);
  }
  return largest;
}

// The second-level exponent of an expert, and its publication. largest: of its rows.
__device__ __forceinline__ uint8_t expert_exponent(const DeliverArguments& a, int32_t e, uint32_t largest,
                                                   bool publishes) {
  const OperandScales& o = a.operand;
  bool live = largest > 0, illegal = false;
  int k = live ? static_cast<int>(largest) + Nvfp4::kMinExponent - 1 : Nvfp4::kMinExponent;
  if (o.fixed_expert_scale != nullptr) {
    live = a.maps.rows_per_expert[e] > 0;
    illegal = Nvfp4::classify(o.fixed_expert_scale[e], &k) != Nvfp4::ScaleKind::kLive;
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

// 128 rows of a slab, which share tiles of scales.
struct Band {
  int32_t expert = -1;  // below 0: none
  int64_t index = 0;    // in the slab
  int64_t tile = 0;     // among all
  int64_t first_slot = 0;
  int rows = 0;  // in use

  // The first one of an expert.
  static __device__ __forceinline__ Band of_expert(const RouteMaps& m, int32_t e) {
    Band band;
    band.expert = e;
    band.tile = m.scale_row_offsets[e] / kScaleTileRows;
    band.first_slot = m.row_offsets[e];
    band.rows = rows_from(m.rows_per_expert[e]);
    return band;
  }
  // A warp looks for it.
  static __device__ __forceinline__ Band at_tile(const RouteMaps& m, int64_t tile) {
    Band band;
    for (int32_t base = 0; base < m.local_experts() && band.expert < 0; base += kWarp) {
      const int32_t e = base + lane_id();
      const bool here = e < m.local_experts() && tile < m.scale_row_offsets[e + 1] / kScaleTileRows;
      const unsigned found = __ballot_sync(kAllLanes, here);
      if (found != 0) band = of_expert(m, base + __ffs(static_cast<int>(found)) - 1);
    }
    if (band.expert >= 0) band.go_to(m, tile - band.tile);
    return band;
  }
  // Further on in the slab; no rows: there are no more.
  __device__ __forceinline__ void go_to(const RouteMaps& m, int64_t to) {
    tile += to - index;
    first_slot += (to - index) * kScaleTileRows;
    index = to;
    rows = rows_from(m.rows_per_expert[expert] - index * kScaleTileRows);
  }

 private:
  static __device__ __forceinline__ int rows_from(int64_t left) {
    return static_cast<int>(max(int64_t{0}, min(left, int64_t{kScaleTileRows})));
  }
};

// A peer's tail, once it has been brought.
__device__ __forceinline__ uint8_t* tail_of(const DeliverArguments& a, int32_t rank, int64_t token) {
  const RouteMaps& m = a.maps;
  return a.tails + (int64_t{place_among_others(rank, m.rank)} * m.tokens + token) * a.tail_bytes;
}

// A warp: the tails of some rows of peers, those that have slots here.
__device__ __forceinline__ void copy_tails(const DeliverArguments& a, uint32_t now, uint32_t item) {
  const RouteMaps& m = a.maps;
  const uint32_t others = static_cast<uint32_t>(m.size - 1);
  const uint8_t* from[kTailsOfAWarp];
  uint8_t* to[kTailsOfAWarp];
#pragma unroll
  for (int i = 0; i < kTailsOfAWarp; ++i) {
    const uint32_t row = item * kTailsOfAWarp + i;
    const uint32_t token = row / others;  // ranks side by side, so that all links are in use
    const int32_t rank = rank_among_others(static_cast<int32_t>(row - token * others), m.rank);
    bool here = false;
    if (token < static_cast<uint32_t>(m.tokens)) {
      const int32_t* slots = m.row_slots + (static_cast<int64_t>(rank) * m.tokens + token) * m.top_k;
      for (int k = lane_id(); k < m.top_k; k += kWarp) here |= slots[k] >= 0;
    }
    from[i] = nullptr;
    if (!__any_sync(kAllLanes, here)) continue;
    from[i] = row_of(a.pools, a.rows, rank, token, now) + a.operand.layout.payload_bytes;
    to[i] = tail_of(a, rank, token);
  }
  for (int64_t at = lane_id() * 16; at < a.tail_bytes; at += kWarp * 16) {
    uint4 v[kTailsOfAWarp];
#pragma unroll
    for (int i = 0; i < kTailsOfAWarp; ++i) {
      if (from[i] != nullptr) v[i] = load_once(from[i] + at);
    }
#pragma unroll
    for (int i = 0; i < kTailsOfAWarp; ++i) {
      if (from[i] != nullptr) *reinterpret_cast<uint4*>(to[i] + at) = v[i];
    }
  }
}

// A block that needs tails: all are there when it returns. The blocks share the work; who has claimed a part of it runs and waits
// for nobody before it is done, so waiting for the rest is safe whatever order blocks come in and whoever shares the GPU.
__device__ __forceinline__ void bring_tails(const DeliverArguments& a, uint32_t now) {
  constexpr uint32_t kShare = kWarps * kTailsOfAWarp;
  const RouteMaps& m = a.maps;
  const uint32_t shares =
      (static_cast<uint32_t>(m.tokens) * static_cast<uint32_t>(m.size - 1) + kShare - 1) / kShare;
  __shared__ uint32_t claimed;
  while (true) {
    if (threadIdx.x == 0) claimed = atomicAdd(&a.tails_shares->claimed, 1u);
    __syncthreads();
    const uint32_t share = claimed;
    if (share >= shares) break;
    copy_tails(a, now, share * kWarps + static_cast<uint32_t>(warp_id()));
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(&a.tails_shares->done, 1u);
    }
  }
  if (threadIdx.x == 0) {
    while (*static_cast<volatile const uint32_t*>(&a.tails_shares->done) < shares) {
    }
    __threadfence();
  }
  __syncthreads();
}

// A block: a part of a band's scales, requantised (NVFP4) and put into tiles.
template <typename Format, bool kTails>
__device__ __forceinline__ void make_band(const DeliverArguments& a, uint32_t now, const Band& band,
                                          int part) {
  constexpr bool kNvfp4 = std::is_same_v<Format, Nvfp4>;
  __shared__ const uint8_t* scales_of[kScaleTileRows];  // null: padding
  __shared__ RowRescale rescale[kScaleTileRows];
  __shared__ uint8_t exponent;
  __shared__ uint32_t exchange[kMaxWarps];
  const RouteMaps& m = a.maps;
  const OperandScales& o = a.operand;
  const int rows = band.rows;
  // The exponent by the last warp, the rows by the first four, side by side.
  const int row_here = static_cast<int>(threadIdx.x);
  const int64_t token_scale_at = o.layout.token_scale_offset - o.layout.payload_bytes;  // in a tail
  const auto tail_in = [&](int64_t slot) -> const uint8_t* {
    const int64_t source = m.slot_source[slot];
    if (source < 0) return nullptr;
    const int32_t rank = static_cast<int32_t>(source >> 32);
    const int64_t token = source & 0xFFFFFFFF;
    if (kTails && rank != m.rank) return tail_of(a, rank, token);
    return row_of(a.pools, a.rows, rank, token, now) + o.layout.payload_bytes;
  };
  float token_scale = 0.0f;
  if (row_here < rows) {
    const uint8_t* tail = tail_in(band.first_slot + row_here);
    scales_of[row_here] = tail;
    if (kNvfp4 && tail != nullptr) token_scale = *reinterpret_cast<const float*>(tail + token_scale_at);
  }
  __syncthreads();
  // A warp's first patch, on its way while the exponent is found.
  const int64_t pieces = (o.columns + kPatchColumns - 1) / kPatchColumns;
  const int64_t items = o.scales == nullptr ? 0 : pieces * kPatchesPerTile;
  int64_t i = part * kWarps + warp_id();
  const auto fetch = [&] {
    PatchScales scales;
    const int patch = static_cast<int>(i % kPatchesPerTile);
    const int64_t column = patch_column(i / kPatchesPerTile * kPatchColumns);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int row = 32 * q + patch_row(patch);
      const uint8_t* from = i < items && column < o.columns && row < rows ? scales_of[row] : nullptr;
      scales.row[q] = make_uint4(0, 0, 0, 0);
      // A row's last 16 bytes may run past its scales, but not past the row.
      if (from != nullptr) scales.row[q] = *reinterpret_cast<const uint4*>(from + column);
    }
    return scales;
  };
  PatchScales scales = fetch();
  if constexpr (kNvfp4) {
    if (a.exponents_travel) {
      if (threadIdx.x == kThreads - 1) {
        exponent = expert_exponent(a, band.expert, published_exponent(a, now, band.expert), false);
      }
    } else {
      uint32_t largest = exponent_of(token_scale);
      for (int64_t i = threadIdx.x; i < m.tokens_per_expert[band.expert]; i += kThreads) {
        if (i / kScaleTileRows == band.index) continue;
        const uint8_t* tail = tail_in(m.row_offsets[band.expert] + i);
        largest = max(largest, exponent_of(*reinterpret_cast<const float*>(tail + token_scale_at)));
      }
      largest = block_max(largest, kWarps, exchange);
      if (threadIdx.x == 0) exponent = expert_exponent(a, band.expert, largest, band.index == 0 && part == 0);
    }
    __syncthreads();
    if (row_here < rows) rescale[row_here] = RowRescale(token_scale, exponent);
    __syncthreads();
  }
  bool misfit = false;
  const int64_t step = a.band_parts * kWarps;
  for (; i < items; i += step, scales = fetch()) {
    const int patch = static_cast<int>(i % kPatchesPerTile);
    const int64_t column = patch_column(i / kPatchesPerTile * kPatchColumns);
    if (column >= o.columns) continue;
    const int bytes = static_cast<int>(min(o.columns - column, int64_t{16}));
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
        store16(o.scales + (band.first_slot + row) * o.columns + column, v, o.columns % 16 == 0 ? 16 : 1,
                bytes);
      }
    }
    if (!o.linear) {
      store_patch(o.scales + band.tile * ((o.columns + 3) / 4) * kTileBytes, o.columns, patch, column,
                  scales);
    }
  }
  if (misfit) report(o.findings, NVTE_EP_FINDING_EXPERT_SCALE);
}

// A block: its part of the scales of an expert, or where there are many rows of a band.
template <typename Format, bool kTails>
__device__ __forceinline__ void deliver_scales(const DeliverArguments& a, uint32_t now, int64_t item,
                                               int part) {
  const RouteMaps& m = a.maps;
  Band band = a.exponents_travel ? Band::at_tile(m, item) : Band::of_expert(m, static_cast<int32_t>(item));
  if (std::is_same_v<Format, Nvfp4> && band.rows == 0 && !a.exponents_travel && part == 0 &&
      threadIdx.x == 0) {
    expert_exponent(a, band.expert, 0, true);
  }
  if (kTails && band.rows > 0) bring_tails(a, now);
  while (band.rows > 0) {
    make_band<Format, kTails>(a, now, band, part);
    __syncthreads();
    if (a.exponents_travel) break;
    band.go_to(m, band.index + 1);
  }
}

// One thread: the host learns which ranks gave no weights.
__device__ void tell_missing(const DeliverArguments& a, uint32_t now) {
  for (int32_t r = 0; r < a.maps.size; ++r) {
    if (r == a.maps.rank || gives_weights(a, r, now)) continue;
    volatile int64_t* report = a.report;
    a.counters[5] = r;
    a.counters[4] += 1;
    report[5] = r;
    __threadfence_system();
    report[4] = a.counters[4];
  }
}

struct NoScales {};

// kTails: bands take the peers' tails from copies.
template <typename Form, typename Scales, bool kTails>
__global__ void __launch_bounds__(kThreads, 4) deliver(const DeliverArguments a) {
  wait_for_kernel_before();
  let_next_kernel_start();
  const uint32_t now = *a.pools.epoch;
  const bool is_last = blockIdx.x == gridDim.x - 1;  // it has the least to do
  if (a.out_weights != nullptr && is_last && threadIdx.x == 0) tell_missing(a, now);
  if constexpr (std::is_same_v<Scales, Nvfp4>) {
    if (blockIdx.x == 0) {
      for (int32_t e = static_cast<int32_t>(threadIdx.x); e < a.maps.local_experts(); e += kThreads) {
        if (a.exponents_travel) expert_exponent(a, e, published_exponent(a, now, e), true);
      }
    }
  }
  for (int64_t block = blockIdx.x; block < a.blocks; block += gridDim.x) {
    const int64_t item = (block - a.band_blocks) * kWarps + warp_id();
    if (block < a.band_blocks) {  // first: they wait for memory, and the others fill the time
      if constexpr (!std::is_same_v<Scales, NoScales>) {
        deliver_scales<Scales, kTails>(a, now, block / a.band_parts, static_cast<int>(block % a.band_parts));
      }
    } else if (block - a.band_blocks < a.copy_blocks) {
      deliver_piece<Form>(a, now, item);
    } else {
      clear_pad(a, item - a.copy_blocks * kWarps);
    }
  }
}

template <typename Form, typename Scales, bool kTails = false>
Status launch(DeliverArguments a, const LaunchContext& context) {
  const RouteMaps& m = a.maps;
  const bool moves = a.out != nullptr || a.out_weights != nullptr;
  // Of few rows small pieces, so that all multiprocessors have some.
  const bool few = few_rows(m);
  a.piece_chunks = few ? kWarp : kPieceChunks;
  a.band_parts = few ? kPatchesPerTile : 1;
  a.pieces = a.out == nullptr ? 1 : static_cast<int32_t>((a.chunks + a.piece_chunks - 1) / a.piece_chunks);
  const bool bands = !std::is_same_v<Scales, NoScales> &&
                     (a.operand.scales != nullptr || (std::is_same_v<Scales, Nvfp4> && !a.exponents_travel));
  a.band_blocks = bands ? (few ? m.local_experts() : a.operand.bands) * a.band_parts : 0;
  a.copy_blocks = moves ? (static_cast<int64_t>(m.tokens) * m.size * a.pieces + kWarps - 1) / kWarps : 0;
  const int64_t pads = moves ? m.local_experts() * (m.alignment - 1) : 0;
  a.blocks = a.band_blocks + a.copy_blocks + (pads + kWarps - 1) / kWarps;
  LaunchShape shape;
  shape.threads = kThreads;
  shape.blocks = std::max<int64_t>(1, a.blocks);
  shape.bounded = true;
  shape.overlaps = true;
  return launch_kernel<deliver<Form, Scales, kTails>>("deliver", context, shape, a);
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

bool few_rows(const RouteMaps& m) { return static_cast<int64_t>(m.size) * m.tokens <= kFewRows; }

Status launch_publish(const PublishArguments& arguments, const LaunchContext& context) {
  PublishArguments a = arguments;
  LaunchShape shape;
  shape.threads = kThreads;
  // Rows are copied by many blocks, exponents gathered by a thread for each choice, weights sent by few, and nothing by one.
  const int64_t per_block = a.copy_rows        ? kWarps
                            : a.send_exponents ? kThreads / a.maps.top_k
                            : a.send_weights   ? kThreads
                                               : a.tokens;
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
  if (form == SlotForm::kOperand && a.tails != nullptr) {
    return format == NVTE_EP_FORMAT_NVFP4 ? launch<SameBytes, Nvfp4, true>(a, context)
                                          : launch<SameBytes, Mxfp8, true>(a, context);
  }
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
