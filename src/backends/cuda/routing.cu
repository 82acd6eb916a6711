// prepare on the device: a stable counting sort of every rank's choices by expert, in three launches.
//
//   count    one warp a chunk of choices: how many of each expert it holds             hist [chunks, experts]
//   offsets  experts side by side: where each chunk's copies of an expert begin, then the slabs of every rank
//   assign   the warps again: each copy's slot, noted at both ends; padding noted by the spare warps
//
// The order inside a slab is (source rank, token), as core/routing.h says, because chunks are in that order and a warp takes
// its choices in order.
#include <cuda_runtime.h>

#include <climits>

#include "backends/cuda/launch.h"

namespace nvte_ep {
namespace {

constexpr int kWarp = 32;
constexpr int kCleanThreads = 128;
constexpr int kWarpsPerBlock = 4;
constexpr int kOffsetThreads = 1024;
constexpr int kChunk = 512;  // choices
constexpr int kLoads = 16;

// ---- clean indices ----

// One thread a token. top_k is small, so a choice is compared with those before it.
template <typename Index>
__global__ void __launch_bounds__(kCleanThreads)
    clean_kernel(const Index* indices, int64_t rows, int64_t stride, int32_t top_k, int32_t num_experts,
                 int64_t tokens, int32_t* clean, int64_t* faults) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kCleanThreads + threadIdx.x;
  int illegal = 0;
  int repeated = 0;
  if (t < tokens) {
    int32_t* out = clean + t * top_k;
    for (int32_t k = 0; k < top_k; ++k) {
      int32_t expert = -1;
      if (t < rows) {
        const Index given = indices[t * stride + k];
        if (given < -1 || given >= num_experts) {
          ++illegal;
        } else {
          expert = static_cast<int32_t>(given);
        }
        for (int32_t j = 0; j < k && expert >= 0; ++j) {
          if (out[j] != expert) continue;
          expert = -1;
          ++repeated;
        }
      }
      out[k] = expert;
    }
  }
  if (illegal)
    atomicAdd(reinterpret_cast<unsigned long long*>(&faults[0]), static_cast<unsigned long long>(illegal));
  if (repeated)
    atomicAdd(reinterpret_cast<unsigned long long*>(&faults[1]), static_cast<unsigned long long>(repeated));
}

// ---- workspace ----

struct Workspace {
  int32_t* hist;        // [chunks, experts]: counts, then where the chunk's copies begin among the expert's
  int64_t* slab_begin;  // [experts] min(o_e, capacity) on the expert's rank
  int64_t* kept;        // [experts]
};

__host__ __device__ int64_t chunks_per_rank(const Route& r) {
  return (r.tokens * r.top_k + kChunk - 1) / kChunk;
}
__host__ __device__ int64_t num_chunks(const Route& r) { return chunks_per_rank(r) * r.num_ranks; }

__host__ __device__ Workspace workspace_of(const Route& r) {
  Workspace w;
  w.slab_begin = static_cast<int64_t*>(r.workspace);
  w.kept = w.slab_begin + r.num_experts;
  w.hist = reinterpret_cast<int32_t*>(w.kept + r.num_experts);
  return w;
}

// The choices of a chunk, which lie within one rank.
struct Chunk {
  int32_t rank;
  int64_t begin, end;  // among the rank's choices
};
__device__ Chunk chunk_of(const Route& r, int64_t chunk) {
  Chunk c;
  const int64_t per_rank = chunks_per_rank(r);
  c.rank = static_cast<int32_t>(chunk / per_rank);
  c.begin = chunk % per_rank * kChunk;
  c.end = min(c.begin + kChunk, r.tokens * r.top_k);
  return c;
}

// An expert of the routing, or -1. What the ranks sent is clean; what an exchange left that was aborted may be anything, and must not
// become an address: a sticky error of the device would outlive the group.
__device__ int32_t expert_of(const Route& r, int32_t index) {
  return index < 0 || index >= r.num_experts ? -1 : index;
}

// ---- count ----

__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) count_kernel(Route r) {
  const Workspace w = workspace_of(r);
  const int lane = threadIdx.x % kWarp;
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
  if (chunk >= num_chunks(r)) return;
  int32_t* hist = w.hist + chunk * r.num_experts;
  for (int32_t e = lane; e < r.num_experts; e += kWarp) hist[e] = 0;
  __syncwarp();
  const Chunk c = chunk_of(r, chunk);
  const int32_t* indices = r.indices + c.rank * r.tokens * r.top_k;
  for (int64_t i = c.begin + lane; i < c.end; i += kWarp) {
    const int32_t expert = expert_of(r, indices[i]);
    if (expert >= 0) atomicAdd(&hist[expert], 1);
  }
  if (r.rank_rows == nullptr || c.rank != r.rank) return;  // assign fills in the ranks that hold something
  for (int64_t i = c.begin + lane; i < c.end; i += kWarp) {
    if (i % r.top_k != 0) continue;
    for (int32_t rank = 0; rank < r.num_ranks; ++rank) r.rank_rows[i / r.top_k * r.num_ranks + rank] = -1;
  }
}

// ---- offsets ----

// Exclusive prefix sum of one value a thread over the block; *total is the sum. Every thread calls.
__device__ int64_t block_prefix(int64_t value, int64_t* total) {
  __shared__ int64_t warp_sum[kOffsetThreads / kWarp];
  const int lane = threadIdx.x % kWarp;
  int64_t inclusive = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t other = __shfl_up_sync(0xFFFFFFFFu, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  __syncthreads();
  if (lane == kWarp - 1) warp_sum[threadIdx.x / kWarp] = inclusive;
  __syncthreads();
  int64_t before = 0;
  *total = 0;
  for (int i = 0; i < kOffsetThreads / kWarp; ++i) {
    if (i < threadIdx.x / kWarp) before += warp_sum[i];
    *total += warp_sum[i];
  }
  return before + inclusive - value;
}

// One block: the counts over chunks become starts, then each rank's slabs are laid out.
__global__ void __launch_bounds__(kOffsetThreads) offsets_kernel(Route r) {
  const Workspace w = workspace_of(r);
  const int64_t chunks = num_chunks(r);
  const int32_t local = r.num_experts / r.num_ranks;
  for (int32_t e = threadIdx.x; e < r.num_experts; e += kOffsetThreads) {
    int32_t routed = 0;
    for (int64_t first = 0; first < chunks; first += kLoads) {
      int32_t* at = &w.hist[first * r.num_experts + e];
      int32_t n[kLoads];  // in flight together: the memory's latency is paid once for all
#pragma unroll
      for (int c = 0; c < kLoads; ++c) n[c] = first + c < chunks ? at[c * r.num_experts] : 0;
#pragma unroll
      for (int c = 0; c < kLoads; ++c) {
        if (first + c < chunks) at[c * r.num_experts] = routed;
        routed += n[c];
      }
    }
    w.kept[e] = routed;  // cut to what fits below
  }
  __syncthreads();
  for (int32_t rank = 0; rank < r.num_ranks; ++rank) {
    const bool mine = rank == r.rank;
    int64_t offset = 0;  // o of the experts handled so far
    int64_t scale_offset = 0;
    int64_t dropped = 0;
    for (int32_t first = 0; first < local; first += kOffsetThreads) {
      const int32_t e = first + static_cast<int32_t>(threadIdx.x);
      const bool live = e < local;
      const int64_t routed = live ? w.kept[rank * local + e] : 0;
      const int64_t padded = (routed + r.alignment - 1) / r.alignment * r.alignment;
      int64_t sum;
      const int64_t begin = offset + block_prefix(padded, &sum);
      const int64_t slab_begin = min(begin, r.capacity);
      const int64_t slab_end = min(begin + padded, r.capacity);
      const int64_t rows = slab_end - slab_begin;
      const int64_t kept = min(routed, rows);
      if (live) {
        w.slab_begin[rank * local + e] = slab_begin;
        w.kept[rank * local + e] = kept;
      }
      offset += sum;
      if (!mine) continue;
      int64_t scale_sum, dropped_sum;
      const int64_t scale_begin = scale_offset + block_prefix((rows + 127) / 128 * 128, &scale_sum);
      block_prefix(routed - kept, &dropped_sum);
      if (live) {
        if (r.tokens_routed) r.tokens_routed[e] = routed;
        if (r.tokens_per_expert) r.tokens_per_expert[e] = kept;
        if (r.rows_per_expert) r.rows_per_expert[e] = rows;
        if (r.row_offsets) r.row_offsets[e] = slab_begin;
        if (r.scale_row_offsets) r.scale_row_offsets[e] = scale_begin;
      }
      scale_offset += scale_sum;
      dropped += dropped_sum;
    }
    if (!mine || threadIdx.x != 0) continue;
    if (r.row_offsets) r.row_offsets[local] = min(offset, r.capacity);
    if (r.scale_row_offsets) r.scale_row_offsets[local] = scale_offset;
    if (r.totals) {
      r.totals[0] = min(offset, r.capacity);
      r.totals[1] = dropped;
      r.totals[2] = offset;
    }
    if (r.history && dropped > 0) {
      const int64_t reported = *static_cast<const volatile int64_t*>(r.reported);
      r.history[1] = largest_need(offset, r.history[1], r.history[0], reported);
      r.history[0] += dropped;
    }
  }
}

// ---- assign ----

// A warp takes 32 choices at a time; lanes with the same expert line up behind each other.
__device__ void assign_chunk(const Route& r, const Workspace& w, int64_t chunk, int lane) {
  const Chunk c = chunk_of(r, chunk);
  const int32_t local = r.num_experts / r.num_ranks;
  const int64_t choices = r.tokens * r.top_k;
  const int32_t* indices = r.indices + c.rank * choices;
  int32_t* next = w.hist + chunk * r.num_experts;
  for (int64_t first = c.begin; first < c.end; first += kWarp) {
    const int64_t i = first + lane;
    const int32_t expert = i < c.end ? expert_of(r, indices[i]) : -1;
    const unsigned same = __match_any_sync(0xFFFFFFFFu, expert);
    SlotAddress address = -1;
    if (expert >= 0) {
      const int64_t at = next[expert] + __popc(same & ((1u << lane) - 1));
      if (at < w.kept[expert]) {
        const int32_t rank = expert / local;
        const int64_t slot = w.slab_begin[expert] + at;
        address = (static_cast<int64_t>(rank) << kSlotBits) | slot;
        if (rank == r.rank) {
          if (r.slot_source) r.slot_source[slot] = (static_cast<int64_t>(c.rank) << 32) | (i / r.top_k);
          if (r.slot_k) r.slot_k[slot] = static_cast<int32_t>(i % r.top_k);
        }
      }
    }
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) next[expert] += __popc(same);
    __syncwarp();
    if (i < c.end) {
      if (c.rank == r.rank) {
        const int64_t holder = address >> kSlotBits;
        if (r.slots) r.slots[i] = address;
        if (r.kept_indices) {
          r.kept_indices[i] = address < 0 ? -1 : expert / local * r.kept_experts + expert % local;
        }
        if (r.rank_choices) r.rank_choices[i] = address < 0 ? SlotAddress{-1} : (holder << kSlotBits) | i;
        if (r.rank_rows && address >= 0) {
          r.rank_rows[i / r.top_k * r.num_ranks + holder] = (holder << kSlotBits) | (i / r.top_k);
        }
      }
      if (r.in_slots) {
        r.in_slots[c.rank * choices + i] =
            address >= 0 && (address >> kSlotBits) == r.rank ? address : SlotAddress{-1};
      }
    }
  }
}

// A slab's padding, and the expert of all its slots.
__device__ void mark_slab(const Route& r, const Workspace& w, int32_t e, int lane) {
  const int32_t global = r.rank * (r.num_experts / r.num_ranks) + e;
  const int64_t begin = w.slab_begin[global];
  const int64_t kept = w.kept[global];
  const int64_t padded = (kept + r.alignment - 1) / r.alignment * r.alignment;
  const int64_t rows = min(padded, r.capacity - begin);
  for (int64_t i = lane; i < rows; i += kWarp) {
    if (r.slot_expert) r.slot_expert[begin + i] = e;
    if (i < kept) continue;
    if (r.slot_source) r.slot_source[begin + i] = -1;
    if (r.slot_k) r.slot_k[begin + i] = 0;
  }
}

__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) assign_kernel(Route r) {
  const Workspace w = workspace_of(r);
  const int lane = threadIdx.x % kWarp;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
  const int64_t chunks = num_chunks(r);
  if (item < chunks) {
    assign_chunk(r, w, item, lane);
  } else if (item - chunks < r.num_experts / r.num_ranks) {
    mark_slab(r, w, static_cast<int32_t>(item - chunks), lane);
  }
}

}  // namespace

namespace {

__global__ void copy_words_kernel(uint32_t* to, const uint32_t* from, int64_t words_per_item, int64_t items,
                                  IndexView count) {
  const int64_t in_use =
      count.is_int64 ? *static_cast<const int64_t*>(count.data) : *static_cast<const int32_t*>(count.data);
  const int64_t words = min(items, in_use) * words_per_item;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    to[i] = from[i];
  }
}

__global__ void write_index_kernel(void* out, bool is_int64, const int64_t* counts, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (is_int64) {
    static_cast<int64_t*>(out)[i] = counts[i];
  } else {
    static_cast<int32_t*>(out)[i] = saturated_int32(counts[i]);
  }
}

}  // namespace

Status launch_copy_words(void* to, const void* from, int64_t words_per_item, int64_t items,
                         const IndexView& count, const LaunchContext& context) {
  LaunchShape shape;
  shape.threads = 256;
  shape.blocks = std::min<int64_t>((items * words_per_item + 255) / 256, 4 * context.sms);
  return launch_kernel<copy_words_kernel>("copy_words", context, shape, static_cast<uint32_t*>(to),
                                          static_cast<const uint32_t*>(from), words_per_item, items, count);
}

Status launch_write_index(const TensorView& out, const int64_t* counts, const LaunchContext& context) {
  if (out.rows() == 0) return Status();
  LaunchShape shape;
  shape.threads = 256;
  shape.blocks = (out.rows() + 255) / 256;
  return launch_kernel<write_index_kernel>("write_index", context, shape, out.data,
                                           out.dtype == DType::kInt64, counts, out.rows());
}

Status launch_clean_indices(const TensorView& topk_idx, int32_t num_experts, int64_t tokens, int32_t* clean,
                            int64_t* faults, const LaunchContext& context) {
  if (tokens == 0) return Status();
  LaunchShape shape;
  shape.threads = kCleanThreads;
  shape.blocks = (tokens + kCleanThreads - 1) / kCleanThreads;
  const int32_t top_k = static_cast<int32_t>(topk_idx.columns());
  if (topk_idx.dtype == DType::kInt64) {
    return launch_kernel<clean_kernel<int64_t>>("clean_indices", context, shape,
                                                static_cast<const int64_t*>(topk_idx.data), topk_idx.rows(),
                                                topk_idx.stride, top_k, num_experts, tokens, clean, faults);
  }
  return launch_kernel<clean_kernel<int32_t>>("clean_indices", context, shape,
                                              static_cast<const int32_t*>(topk_idx.data), topk_idx.rows(),
                                              topk_idx.stride, top_k, num_experts, tokens, clean, faults);
}

int64_t route_workspace_size(const Route& route) {
  return route.num_experts * 16 + num_chunks(route) * route.num_experts * 4;
}

Status launch_route(const Route& route, const LaunchContext& context) {
  LaunchShape warps;
  warps.threads = kWarp * kWarpsPerBlock;
  warps.blocks = (num_chunks(route) + kWarpsPerBlock - 1) / kWarpsPerBlock;
  if (warps.blocks > 0) NVTE_EP_TRY(launch_kernel<count_kernel>("route: count", context, warps, route));
  LaunchShape one;
  one.threads = kOffsetThreads;
  NVTE_EP_TRY(launch_kernel<offsets_kernel>("route: offsets", context, one, route));
  const int64_t items = num_chunks(route) + route.num_experts / route.num_ranks;
  warps.blocks = (items + kWarpsPerBlock - 1) / kWarpsPerBlock;
  return launch_kernel<assign_kernel>("route: assign", context, warps, route);
}

}  // namespace nvte_ep
