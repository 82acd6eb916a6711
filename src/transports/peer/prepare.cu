// A stable counting sort of every rank's choices by expert.
//
//   publish  a warp a chunk of 32 tokens: the clean indices and how many choices of each expert there are, into this rank's
//            pool; the last block comes to the meeting
//   scan     experts side by side: where each chunk's copies of an expert begin
//   assign   a warp a chunk of every rank: each copy's slot; the slabs are laid out by every block for itself
//
// A few tokens are the work of one cluster of blocks: prepare_few.cu.
#include "transports/peer/prepare.h"

#include "device/kernel_order.cuh"
#include "device/warp.cuh"
#include "transports/peer/meeting.cuh"
#include "transports/peer/prepare_few.h"
#include "transports/peer/prepare_outputs.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kChunkTokens = 32;
constexpr int kWarpsPerBlock = 4;
constexpr int kBlockThreads = kWarp * kWarpsPerBlock;
constexpr int kScanThreads = 1024;
constexpr int kMarkWarps = 4;  // that share the slots of an expert
constexpr int kLoads = 8;      // in flight together

__host__ __device__ int chunks_of(int64_t tokens) {
  return static_cast<int>((tokens + kChunkTokens - 1) / kChunkTokens);
}
__device__ __forceinline__ int chunk_choices(const RouteMaps& m, int chunk) {
  const int left = m.tokens - chunk * kChunkTokens;
  return (left < kChunkTokens ? left : kChunkTokens) * m.top_k;
}

// ---- clean and publish --------------------------------------------------------------------------------------------

// A warp's chunk: choices [32 * top_k] with -1 for what is illegal, mentioned before, or past the given tokens, and how many
// choices of each expert there are.
__device__ void clean_chunk(const PrepareArguments& a, int chunk, int32_t* choices, int32_t* histogram) {
  const int top_k = a.maps.top_k;
  const int lane = lane_id();
  for (int e = lane; e < a.maps.num_experts; e += kWarp) histogram[e] = 0;
  int illegal = 0;
  for (int first = lane; first < kChunkTokens * top_k; first += kLoads * kWarp) {
    int64_t given[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = first + j * kWarp;
      const int token = chunk * kChunkTokens + i / top_k;
      given[j] = i < kChunkTokens * top_k && token < a.given_tokens ? given_index(a, token, i % top_k) : -1;
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = first + j * kWarp;
      const bool legal = given[j] >= -1 && given[j] < a.maps.num_experts;
      if (!legal) ++illegal;
      if (i < kChunkTokens * top_k) choices[i] = legal ? static_cast<int32_t>(given[j]) : -1;
    }
  }
  __syncwarp();
  int repeated = 0;
  int32_t* mine = choices + lane * top_k;  // a token a lane
  for (int k = 1; k < top_k; ++k) {
    for (int j = 0; j < k && mine[k] >= 0; ++j) {
      if (mine[j] != mine[k]) continue;
      mine[k] = -1;
      ++repeated;
    }
  }
  __syncwarp();
  for (int i = lane; i < kChunkTokens * top_k; i += kWarp) {
    if (choices[i] >= 0) atomicAdd(&histogram[choices[i]], 1);
  }
  __syncwarp();
  illegal = __reduce_add_sync(kAllLanes, illegal);
  repeated = __reduce_add_sync(kAllLanes, repeated);
  if (lane != 0 || illegal + repeated == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&a.counters[0]), static_cast<unsigned long long>(illegal));
  atomicAdd(reinterpret_cast<unsigned long long*>(&a.counters[1]), static_cast<unsigned long long>(repeated));
}

__device__ void publish_chunk(const PrepareArguments& a, uint32_t now, int chunk, const int32_t* choices,
                              const int32_t* histogram) {
  int32_t* indices =
      a.pools.to_write<int32_t>(a.indices, now) + static_cast<int64_t>(chunk) * kChunkTokens * a.maps.top_k;
  const int count = chunk_choices(a.maps, chunk);
  for (int i = lane_id(); i < count; i += kWarp) indices[i] = choices[i];
  int32_t* counts =
      a.pools.to_write<int32_t>(a.histograms, now) + static_cast<int64_t>(chunk) * a.maps.num_experts;
  for (int e = lane_id(); e < a.maps.num_experts; e += kWarp) counts[e] = histogram[e];
}

__global__ void __launch_bounds__(kBlockThreads) publish_choices(const PrepareArguments a) {
  extern __shared__ int32_t shared[];
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int chunk = static_cast<int>(blockIdx.x) * warps + warp_id();
  int32_t* choices = shared + warp_id() * (kChunkTokens * a.maps.top_k + a.maps.num_experts);
  int32_t* histogram = choices + kChunkTokens * a.maps.top_k;
  wait_for_kernel_before();
  if (chunk < chunks_of(a.maps.tokens)) {
    clean_chunk(a, chunk, choices, histogram);
    publish_chunk(a, *a.pools.epoch, chunk, choices, histogram);
  }
  if (is_last_block(a.ticket)) meet(a.meeting);
}

// ---- scan ---------------------------------------------------------------------------------------------------------

// How many choices of each expert the chunk (counted through all ranks) holds.
__device__ __forceinline__ const int32_t* histogram_of(const PrepareArguments& a, uint32_t now, int chunk) {
  const int chunks = chunks_of(a.maps.tokens);
  return a.pools.to_read<int32_t>(a.histograms, chunk / chunks, now) +
         static_cast<int64_t>(chunk % chunks) * a.maps.num_experts;
}

// A warp takes a stretch of the chunks of 32 experts.
__global__ void __launch_bounds__(kScanThreads) scan_chunks(const PrepareArguments a) {
  constexpr int kWarps = kScanThreads / kWarp;
  __shared__ int32_t stretch[kWarps][kWarp];
  const int experts = a.maps.num_experts;
  const int e = static_cast<int>(blockIdx.x) * kWarp + lane_id();
  const int chunks = a.maps.size * chunks_of(a.maps.tokens);
  const int length = (chunks + kWarps - 1) / kWarps;
  const int begin = min(warp_id() * length, chunks);
  const int end = min(begin + length, chunks);
  wait_for_kernel_before();
  let_next_kernel_start();
  const uint32_t now = *a.pools.epoch;
  int32_t running = 0;
  for (int c = begin; c < end; c += kLoads) {
    int32_t n[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) n[i] = e < experts && c + i < end ? histogram_of(a, now, c + i)[e] : 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (e < experts && c + i < end) a.starts[static_cast<int64_t>(c + i) * experts + e] = running;
      running += n[i];
    }
  }
  stretch[warp_id()][lane_id()] = running;
  __syncthreads();
  int32_t before = 0;
  for (int w = 0; w < warp_id(); ++w) before += stretch[w][lane_id()];
  if (e >= experts) return;
  if (warp_id() == kWarps - 1) a.totals[e] = before + running;
  if (before == 0) return;
#pragma unroll 8
  for (int c = begin; c < end; ++c) a.starts[static_cast<int64_t>(c) * experts + e] += before;
}

// ---- slabs --------------------------------------------------------------------------------------------------------

// The slabs of all ranks, in shared memory.
struct Slabs {
  int64_t* offset;  // [num_experts + 1] padded rows before an expert, ranks counted through
  int32_t* begin;   // [num_experts] first slot on the expert's rank
  int32_t* kept;    // [num_experts]

  static __host__ __device__ int64_t bytes(int experts) {
    return (static_cast<int64_t>(experts) + 1) * 8 + experts * int64_t{8};
  }
  __device__ Slabs(void* memory, int experts)
      : offset(static_cast<int64_t*>(memory)),
        begin(reinterpret_cast<int32_t*>(offset + experts + 1)),
        kept(begin + experts) {}

  // One thread an expert, when all offsets are known.
  __device__ __forceinline__ void place(const RouteMaps& m, int expert, int32_t routed) const {
    const int64_t first = offset[expert / m.local_experts() * m.local_experts()];
    const int64_t from = min(offset[expert] - first, m.capacity);
    const int64_t end = min(offset[expert + 1] - first, m.capacity);
    begin[expert] = static_cast<int32_t>(from);
    kept[expert] = static_cast<int32_t>(min(static_cast<int64_t>(routed), end - from));
  }
};

// Exclusive prefix sum over the block; *total is the sum. Every thread calls.
__device__ int64_t block_prefix(int64_t value, int64_t* total) {
  __shared__ int64_t warp_sum[kMaxWarps];
  int64_t inclusive = value;
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const int64_t below = __shfl_up_sync(kAllLanes, inclusive, d);
    if (lane_id() >= d) inclusive += below;
  }
  __syncthreads();
  if (lane_id() == kWarp - 1) warp_sum[warp_id()] = inclusive;
  __syncthreads();
  int64_t before = 0;
  *total = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) {
    if (w < warp_id()) before += warp_sum[w];
    *total += warp_sum[w];
  }
  return before + inclusive - value;
}

__device__ void lay_out_slabs(const RouteMaps& m, const int32_t* totals, const Slabs& s) {
  const int threads = static_cast<int>(blockDim.x);
  int64_t before = 0;
  for (int first = 0; first < m.num_experts; first += threads) {
    const int e = first + static_cast<int>(threadIdx.x);
    const int64_t routed = e < m.num_experts ? totals[e] : 0;
    int64_t sum;
    const int64_t offset = before + block_prefix(padded_rows(m, routed), &sum);
    if (e < m.num_experts) s.offset[e] = offset;
    before += sum;
  }
  if (threadIdx.x == 0) s.offset[m.num_experts] = before;
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < m.num_experts; e += threads) s.place(m, e, totals[e]);
  __syncthreads();
}

__device__ __forceinline__ int64_t slab_end(const RouteMaps& m, const Slabs& s, int expert) {
  return min(s.offset[expert + 1] - s.offset[m.rank * m.local_experts()], m.capacity);
}

// A warp: the counts of this rank's experts to whoever reads them.
__device__ void tell_counts(const PrepareArguments& a, const int32_t* totals, const Slabs& s) {
  const RouteMaps& m = a.maps;
  const int local = m.local_experts();
  const int first_expert = m.rank * local;
  const int lane = lane_id();
  int64_t scale_rows = 0;
  int32_t dropped = 0;
  for (int first = 0; first < local; first += kWarp) {
    const int i = first + lane;
    const int e = first_expert + i;
    const bool live = i < local;
    const int64_t rows = live ? slab_end(m, s, e) - s.begin[e] : 0;
    int64_t scale_end = (rows + 127) & ~int64_t{127};
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const int64_t below = __shfl_up_sync(kAllLanes, scale_end, d);
      if (lane >= d) scale_end += below;
    }
    scale_end += scale_rows;
    if (live) {
      tell(m.tokens_routed, a.tokens_routed, i, totals[e]);
      tell(m.tokens_per_expert, a.tokens_per_expert, i, s.kept[e]);
      tell(m.rows_per_expert, a.rows_per_expert, i, rows);
      tell(m.row_offsets, a.row_offsets, i, s.begin[e]);
      tell(m.scale_row_offsets, a.scale_row_offsets, i + 1, scale_end);
      dropped += totals[e] - s.kept[e];
    }
    scale_rows = __shfl_sync(kAllLanes, scale_end, kWarp - 1);
  }
  const int64_t lost = __reduce_add_sync(kAllLanes, dropped);
  const int64_t needed = s.offset[first_expert + local] - s.offset[first_expert];
  count_and_tell(a, Counted(a), 0, 0, lost, needed);
  if (lane != 0) return;
  const int64_t total = min(needed, m.capacity);
  tell(m.row_offsets, a.row_offsets, local, total);
  tell(m.scale_row_offsets, a.scale_row_offsets, 0, 0);
  tell(m.totals, a.total_rows, 0, total);
  tell(m.totals + 1, a.dropped_rows, 0, lost);
}

// ---- assign -------------------------------------------------------------------------------------------------------

// A warp takes 32 choices at a time; lanes with the same expert line up behind each other. next [num_experts]: where the
// chunk's copies of each expert begin.
__device__ void assign_chunk(const PrepareArguments& a, const Slabs& s, int chunk, const int32_t* indices,
                             int32_t* next) {
  const RouteMaps& m = a.maps;
  const int chunks = chunks_of(m.tokens);
  const int source = chunk / chunks;
  const int first_token = chunk % chunks * kChunkTokens;
  const int64_t first = static_cast<int64_t>(first_token) * m.top_k;
  const int count = chunk_choices(m, chunk % chunks);
  const int local = m.local_experts();
  const int lane = lane_id();
  const bool own = source == m.rank;
  int32_t* row_slots = m.row_slots + source * m.choices() + first;
  if (own) {
    const int words = m.holder_words();
    for (int i = lane; i < count / m.top_k * words; i += kWarp) m.holders[first_token * words + i] = 0;
    __syncwarp();
  }
  int32_t loaded[kLoads];
  for (int at = 0; at < count; at += kWarp) {
    if (at % (kLoads * kWarp) == 0) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
        loaded[j] = at + j * kWarp + lane < count ? indices[at + j * kWarp + lane] : -1;
    }
    const int i = at + lane;
    const int32_t expert = loaded[0];
#pragma unroll
    for (int j = 0; j + 1 < kLoads; ++j) loaded[j] = loaded[j + 1];
    const unsigned same = __match_any_sync(kAllLanes, expert);
    int32_t slot = -1;
    bool kept = false;
    if (expert >= 0) {
      const int32_t position = next[expert] + __popc(same & ((1u << lane) - 1));
      kept = position < s.kept[expert];
      if (kept && expert / local == m.rank) slot = s.begin[expert] + position;
    }
    __syncwarp();
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) next[expert] += __popc(same);
    __syncwarp();
    if (i < count) {
      const int token = first_token + i / m.top_k;
      row_slots[i] = slot;
      if (slot >= 0) {
        const int64_t from = (static_cast<int64_t>(source) << 32) | token;
        m.slot_source[slot] = from;
        if (a.slot_source != nullptr) a.slot_source[slot] = from;
      }
      if (own) {
        m.kept_experts[first + i] = kept ? expert : -1;
        const int holder = expert / local;
        if (kept) atomicOr(&m.holders[token * m.holder_words() + holder / 32], 1u << (holder % 32));
      }
    }
  }
}

__device__ __forceinline__ const int32_t* indices_of(const PrepareArguments& a, uint32_t now, int chunk) {
  const int chunks = chunks_of(a.maps.tokens);
  return a.pools.to_read<int32_t>(a.indices, chunk / chunks, now) +
         chunk % chunks * kChunkTokens * a.maps.top_k;
}

// A warp's share of a slab: the padding, and where the caller wants it the expert of all slots.
__device__ void mark_slab(const PrepareArguments& a, const Slabs& s, int i, int share, int shares) {
  const RouteMaps& m = a.maps;
  const int e = m.rank * m.local_experts() + i;
  const int64_t begin = s.begin[e];
  const int64_t rows = slab_end(m, s, e) - begin;
  for (int64_t row = (a.slot_expert != nullptr ? 0 : s.kept[e] / kWarp * kWarp) + share * kWarp + lane_id();
       row < rows; row += shares * kWarp) {
    if (a.slot_expert != nullptr) a.slot_expert[begin + row] = i;
    if (row < s.kept[e]) continue;
    m.slot_source[begin + row] = -1;
    if (a.slot_source != nullptr) a.slot_source[begin + row] = -1;
  }
}

__global__ void __launch_bounds__(kBlockThreads) assign_slots(const PrepareArguments a) {
  extern __shared__ __align__(8) uint8_t shared_bytes[];
  const RouteMaps& m = a.maps;
  const Slabs slabs(shared_bytes, m.num_experts);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int item = static_cast<int>(blockIdx.x) * warps + warp_id();
  const int chunks = m.size * chunks_of(m.tokens);
  int32_t* next =
      reinterpret_cast<int32_t*>(shared_bytes + Slabs::bytes(m.num_experts)) + warp_id() * m.num_experts;
  wait_for_kernel_before();
  let_next_kernel_start();
  if (item < chunks) {
    const int32_t* starts = a.starts + static_cast<int64_t>(item) * m.num_experts;
    for (int e = lane_id(); e < m.num_experts; e += kWarp) next[e] = starts[e];
  }
  lay_out_slabs(m, a.totals, slabs);
  if (item < chunks) {
    assign_chunk(a, slabs, item, indices_of(a, *a.pools.epoch, item), next);
  } else if (item - chunks < m.local_experts() * kMarkWarps) {
    mark_slab(a, slabs, (item - chunks) / kMarkWarps, (item - chunks) % kMarkWarps, kMarkWarps);
  }
  if (blockIdx.x == gridDim.x - 1 && warp_id() == 0) tell_counts(a, a.totals, slabs);
}

// A block an expert.
__global__ void __launch_bounds__(kBlockThreads)
    copy_slots(const RouteMaps m, int64_t* slot_source, int32_t* slot_expert) {
  const int e = static_cast<int>(blockIdx.x);
  for (int64_t slot = m.row_offsets[e] + threadIdx.x; slot < m.row_offsets[e + 1]; slot += kBlockThreads) {
    if (slot_source != nullptr) slot_source[slot] = m.slot_source[slot];
    if (slot_expert != nullptr) slot_expert[slot] = e;
  }
}

int publish_bytes_per_warp(const RouteMaps& m) { return (kChunkTokens * m.top_k + m.num_experts) * 4; }

int warps_that_fit(int64_t fixed, int64_t per_warp, const LaunchContext& context) {
  const int64_t room = context.shared_bytes_per_block - 1024 - fixed;  // the kernels have some of their own
  return static_cast<int>(std::min<int64_t>(kWarpsPerBlock, room / per_warp));
}

}  // namespace

int32_t prepare_chunks(int64_t tokens) { return chunks_of(tokens); }

Status launch_copy_slots(const RouteMaps& m, int64_t* slot_source, int32_t* slot_expert,
                         const LaunchContext& context) {
  if (slot_source == nullptr && slot_expert == nullptr) return Status();
  LaunchShape shape;
  shape.threads = kBlockThreads;
  shape.blocks = m.local_experts();
  return launch_kernel<copy_slots>("copy_slots", context, shape, m, slot_source, slot_expert);
}

Status check_prepare(const RouteMaps& m, const LaunchContext& context) {
  if (warps_that_fit(0, publish_bytes_per_warp(m), context) >= 1 &&
      warps_that_fit(Slabs::bytes(m.num_experts), m.num_experts * int64_t{4}, context) >= 1) {
    return Status();
  }
  return unsupported("peer: ", m.num_experts, " experts and top_k ", m.top_k,
                     " are too many for the shared memory of a multiprocessor");
}

Status launch_prepare(const PrepareArguments& a, const LaunchContext& context) {
  const RouteMaps& m = a.maps;
  const int chunks = chunks_of(m.tokens);
  if (few_choices(m)) return launch_prepare_few(a, context);
  LaunchShape publish;
  const int publish_warps = warps_that_fit(0, publish_bytes_per_warp(m), context);
  publish.overlaps = true;
  publish.threads = publish_warps * kWarp;
  publish.shared_bytes = publish_warps * publish_bytes_per_warp(m);
  publish.blocks = std::max(1, (chunks + publish_warps - 1) / publish_warps);
  NVTE_EP_TRY(launch_kernel<publish_choices>("prepare: publish", context, publish, a));
  LaunchShape scan;
  scan.overlaps = true;
  scan.threads = kScanThreads;
  scan.blocks = (m.num_experts + kWarp - 1) / kWarp;
  NVTE_EP_TRY(launch_kernel<scan_chunks>("prepare: scan", context, scan, a));
  LaunchShape assign;
  const int64_t slabs = Slabs::bytes(m.num_experts);
  const int assign_warps = warps_that_fit(slabs, m.num_experts * int64_t{4}, context);
  const int64_t items = static_cast<int64_t>(m.size) * chunks + m.local_experts() * kMarkWarps;
  assign.overlaps = true;
  assign.threads = assign_warps * kWarp;
  assign.shared_bytes = static_cast<int>(slabs) + assign_warps * m.num_experts * 4;
  assign.blocks = (items + assign_warps - 1) / assign_warps;
  return launch_kernel<assign_slots>("prepare: assign", context, assign, a);
}

}  // namespace nvte_ep
