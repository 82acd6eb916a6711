// A warp holds the choices of a few whole tokens at a time, one a lane: a group. Groups are counted through all ranks; each warp
// counts a stretch of them, in order, and so knows where its copies of an expert come after those of the warps before it.
#include "transports/peer/prepare_few.h"

#include <algorithm>

#include "device/kernel_order.cuh"
#include "transports/peer/meeting.cuh"
#include "transports/peer/prepare_outputs.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kMostTokens = 1024;       // of all ranks
constexpr int kMostThreads = 1024;      // and experts: one a thread
constexpr int kFewestThreads = 256;     // for what is not done by groups
constexpr int kMostShared = 200 << 10;  // of every device that there are kernels for
constexpr int kLoads = 8;               // in flight together
constexpr uint32_t kNone = 0xFFFFFFFFu;

struct Groups {
  int tokens;  // of one
  int each;    // of a rank
  int all;
  int of_a_warp;
  int warps;  // that have some

  Groups(int32_t size, int64_t tokens_of_rank, int32_t top_k, int most_warps)
      : tokens(kWarp / top_k),
        each(static_cast<int>((tokens_of_rank + tokens - 1) / tokens)),
        all(size * each),
        of_a_warp((all + most_warps - 1) / most_warps),
        warps((all + of_a_warp - 1) / of_a_warp) {}
};

// A choice as a lane finds it.
struct Place {
  int in_group;  // token
  int k;
  bool live;

  __device__ __forceinline__ Place(const RouteMaps& m, const Groups& g)
      : in_group(lane_id() / m.top_k), k(lane_id() % m.top_k), live(in_group < g.tokens) {}
  __device__ __forceinline__ int token(const Groups& g, int group) const {
    return group * g.tokens + in_group;
  }
};

// Shared memory.
struct Few {
  Slabs slabs;
  int32_t* totals;  // [num_experts]
  int32_t* counts;  // [warps, num_experts] a warp's copies of an expert; later where they begin
  uint32_t*
      chosen;  // [groups, 32] expert, and above 16 bits how many copies of it the warp has before; kNone: unrouted

  static __host__ __device__ int64_t bytes(const Groups& g, int experts) {
    return Slabs::bytes(experts) +
           4 * (static_cast<int64_t>(experts) * (1 + g.warps) + int64_t{g.all} * kWarp);
  }
  __device__ Few(void* memory, const Groups& g, int experts)
      : slabs(memory, experts),
        totals(reinterpret_cast<int32_t*>(static_cast<uint8_t*>(memory) + Slabs::bytes(experts))),
        counts(totals + experts),
        chosen(reinterpret_cast<uint32_t*>(counts + g.warps * experts)) {}
};

struct Wrong {
  int illegal, repeated;
};

// A warp cleans a group: the lane's expert, or -1 for what is illegal, mentioned before, or past the given tokens.
__device__ __forceinline__ int32_t clean(const PrepareArguments& a, const Place& at, int token,
                                         Wrong* wrong) {
  const int64_t given = at.live && token < a.given_tokens ? given_index(a, token, at.k) : -1;
  const int experts = a.maps.num_experts;
  const bool illegal = given < -1 || given >= experts;
  const bool routed = given >= 0 && !illegal;
  const int32_t key = routed ? at.in_group * experts + static_cast<int32_t>(given) : -1;
  const unsigned same = __match_any_sync(kAllLanes, key);
  const bool repeated = routed && (same & ((1u << lane_id()) - 1)) != 0;
  const unsigned all_illegal = __ballot_sync(kAllLanes, illegal);
  const unsigned all_repeated = __ballot_sync(kAllLanes, repeated);
  if ((all_illegal | all_repeated) != 0 && lane_id() == 0) {
    atomicAdd(&wrong->illegal, __popc(all_illegal));
    atomicAdd(&wrong->repeated, __popc(all_repeated));
  }
  return routed && !repeated ? static_cast<int32_t>(given) : -1;
}

// Of another rank, as soon as it is here; -1 if it does not come.
__device__ __forceinline__ int32_t receive(const Meeting& m, const uint64_t* from, int32_t peer,
                                           uint32_t epoch, int* reported) {
  Patience patience;
  for (;;) {
    const uint64_t both = load_numbered(from);
    if (static_cast<uint32_t>(both >> 32) == epoch) return static_cast<int32_t>(both);
    if (patience.is_over(m, peer, epoch, reported)) return -1;
  }
}

// A thread an expert: where each warp's copies of it begin, and all slabs.
__device__ __forceinline__ void lay_out(const RouteMaps& m, const Groups& g, const Few& few) {
  __shared__ int64_t warp_rows[kMaxWarps];
  const int experts = m.num_experts;
  const int e = static_cast<int>(threadIdx.x);
  int32_t total = 0;
  if (e < experts) {
    int32_t* mine = few.counts + e;
    for (int first = 0; first < g.warps; first += kLoads) {
      int32_t n[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) n[i] = first + i < g.warps ? mine[(first + i) * experts] : 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + i < g.warps) mine[(first + i) * experts] = total;
        total += n[i];
      }
    }
    few.totals[e] = total;
  }
  const int64_t rows = e < experts ? padded_rows(m, total) : 0;
  int64_t end = rows;
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const int64_t below = __shfl_up_sync(kAllLanes, end, d);
    if (lane_id() >= d) end += below;
  }
  if (lane_id() == kWarp - 1) warp_rows[warp_id()] = end;
  __syncthreads();
  if (e < experts) {
    for (int w = 0; w < warp_id(); ++w) end += warp_rows[w];
    few.slabs.offset[e + 1] = end;
    if (e == 0) few.slabs.offset[0] = 0;
  }
  __syncthreads();
  if (e < experts) few.slabs.place(m, e, total);
  __syncthreads();
}

// A warp: the slots of a group of a rank's.
__device__ __forceinline__ void assign(const PrepareArguments& a, const Groups& g, const Few& few,
                                       const Place& at, int32_t source, int group, uint32_t chosen,
                                       const int32_t* before) {
  const RouteMaps& m = a.maps;
  const int token = at.token(g, group);
  const bool live = at.live && token < m.tokens;
  const int32_t expert = static_cast<int32_t>(chosen & 0xFFFFu);
  const int local = m.local_experts();
  int32_t slot = -1;
  bool kept = false;
  if (live && chosen != kNone) {
    const int32_t position = before[expert] + static_cast<int32_t>(chosen >> 16);
    kept = position < few.slabs.kept[expert];
    if (kept && static_cast<unsigned>(expert - m.rank * local) < static_cast<unsigned>(local)) {
      slot = few.slabs.begin[expert] + position;
    }
  }
  const int64_t choice = static_cast<int64_t>(token) * m.top_k + at.k;
  if (live) m.row_slots[source * m.choices() + choice] = slot;
  if (slot >= 0) {
    const int64_t from = (static_cast<int64_t>(source) << 32) | token;
    m.slot_source[slot] = from;
    if (a.slot_source != nullptr) a.slot_source[slot] = from;
  }
  if (source != m.rank) return;
  if (live) m.kept_experts[choice] = kept ? expert : -1;
  const unsigned siblings = ((m.top_k < kWarp ? 1u << m.top_k : 0u) - 1u) << (lane_id() - at.k);
  uint32_t bits = 0;
#pragma unroll 1
  for (int32_t r = 0; r < m.size; ++r) {
    const bool here = kept && static_cast<unsigned>(expert - r * local) < static_cast<unsigned>(local);
    if ((__ballot_sync(kAllLanes, here) & siblings) != 0) bits |= 1u << (r % 32);
    if (r % 32 != 31 && r != m.size - 1) continue;
    if (live && at.k == 0) m.holders[token * m.holder_words() + r / 32] = bits;
    bits = 0;
  }
}

// The padding of this rank's slabs, and where the caller wants it the expert of every slot.
__device__ __forceinline__ void mark_slabs(const PrepareArguments& a, const Few& few) {
  const RouteMaps& m = a.maps;
  const int lanes =
      static_cast<int>(min(m.alignment, int64_t{kWarp}));  // that share an expert: a power of two
  const int local = m.local_experts();
  const int shift = __ffs(lanes) - 1;
#pragma unroll 1
  for (unsigned i = threadIdx.x >> shift; i < local; i += blockDim.x >> shift) {
    const int e = m.rank * local + i;
    const int64_t end = slab_end(m, few.slabs, e);
    const int64_t begin = few.slabs.begin[e];
    const int first = static_cast<int>(threadIdx.x) & (lanes - 1);
#pragma unroll 1
    for (int64_t slot = begin + few.slabs.kept[e] + first; slot < end; slot += lanes) {
      m.slot_source[slot] = -1;
      if (a.slot_source != nullptr) a.slot_source[slot] = -1;
    }
    if (a.slot_expert == nullptr) continue;
#pragma unroll 1
    for (int64_t slot = begin + first; slot < end; slot += lanes) a.slot_expert[slot] = i;
  }
}

__global__ void __launch_bounds__(kMostThreads, 1)
    prepare_few(const __grid_constant__ PrepareArguments a, const Groups g) {
  extern __shared__ __align__(8) uint8_t memory[];
  __shared__ Wrong wrong;
  __shared__ int reported;
  const RouteMaps& m = a.maps;
  const int experts = m.num_experts;
  const Few few(memory, g, experts);
  const Place at(m, g);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < g.warps * experts; i += static_cast<int>(blockDim.x)) {
    few.counts[i] = 0;
  }
  if (threadIdx.x == 0) {
    wrong = Wrong{0, 0};
    reported = 0;
  }
  __syncthreads();
  wait_for_kernel_before();
  if (m.size == 1) let_next_kernel_start();
  const uint32_t now = *a.pools.epoch;
  const uint32_t epoch = now + 1;
  const bool failed = *a.meeting.failed != 0;
  const bool counts_too = warp_id() == warps - 1;  // the last warp has the fewest groups
  const Counted counted(a);
  const int inbox_of_rank = g.each * kWarp;
#pragma unroll 1
  for (int group = warp_id(); group < g.each; group += warps) {
    const int token = at.token(g, group);
    const int32_t expert = clean(a, at, token, &wrong);
    const int i = group * kWarp + lane_id();
    few.chosen[m.rank * inbox_of_rank + i] = static_cast<uint32_t>(expert);
    if (!at.live || token >= m.tokens || failed) continue;
#pragma unroll 1
    for (int32_t d = 1; d < m.size; ++d) {
      const int32_t peer = m.rank + d < m.size ? m.rank + d : m.rank + d - m.size;
      uint64_t* inbox = a.pools.inbox_of<uint64_t>(a.inbox, peer, now) + m.rank * inbox_of_rank;
      store_numbered(&inbox[i], epoch, static_cast<uint32_t>(expert));
    }
  }
  __syncthreads();
  if (!failed) tell_arrival(a.meeting, epoch);

  // Each choice's place among the warp's copies of its expert.
  const int first_group = warp_id() * g.of_a_warp;
  const int end_group = min(first_group + g.of_a_warp, g.all);
  int32_t* mine = few.counts + warp_id() * experts;
  const uint64_t* inbox = a.pools.inbox_of<uint64_t>(a.inbox, m.rank, now);
  const int32_t first_source = first_group / g.each;
  const int first_of_source = first_group - first_source * g.each;
  int32_t source = first_source;
#pragma unroll 1
  for (int group = first_group, of_source = first_of_source; group < end_group; ++group, ++of_source) {
    if (of_source == g.each) of_source = 0, ++source;
    uint32_t* chosen = &few.chosen[group * kWarp + lane_id()];
    int32_t expert = -1;
    if (source == m.rank) {
      expert = static_cast<int32_t>(*chosen);
    } else if (!failed && at.live && at.token(g, of_source) < m.tokens) {
      expert = receive(a.meeting, &inbox[group * kWarp + lane_id()], source, epoch, &reported);
    }
    __syncwarp();
    const unsigned same = __match_any_sync(kAllLanes, expert);
    const unsigned before = same & ((1u << lane_id()) - 1);
    const int32_t running = expert >= 0 ? mine[expert] : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) mine[expert] = running + __popc(same);
    __syncwarp();
    const uint32_t position = static_cast<uint32_t>(running + __popc(before));
    *chosen = expert >= 0 ? position << 16 | static_cast<uint32_t>(expert) : kNone;
  }
  __syncthreads();
  let_next_kernel_start();  // not while this one waits for ranks that may share the GPU
  clear_maxima(a.meeting, epoch);
  if (threadIdx.x == 0) *a.meeting.epoch = epoch;

  lay_out(m, g, few);
  source = first_source;
#pragma unroll 1
  for (int group = first_group, of_source = first_of_source; group < end_group; ++group, ++of_source) {
    if (of_source == g.each) of_source = 0, ++source;
    assign(a, g, few, at, source, of_source, few.chosen[group * kWarp + lane_id()], mine);
  }
  mark_slabs(a, few);
  if (counts_too) tell_counts(a, few.totals, few.slabs, counted, wrong.illegal, wrong.repeated);
}

int threads_of(const RouteMaps& m) {
  const int groups = Groups(m.size, m.tokens, m.top_k, kMaxWarps).all;
  const int wanted =
      std::max({kFewestThreads, groups * kWarp, static_cast<int>(round_up(m.num_experts, kWarp))});
  return std::min(wanted, kMostThreads);
}
Groups groups_of(const RouteMaps& m) { return Groups(m.size, m.tokens, m.top_k, threads_of(m) / kWarp); }

}  // namespace

bool few_choices(const RouteMaps& m) {
  return static_cast<int64_t>(m.size) * m.tokens <= kMostTokens && m.top_k <= kWarp &&
         m.num_experts <= kMostThreads && Few::bytes(groups_of(m), m.num_experts) <= kMostShared;
}

Status launch_prepare_few(const PrepareArguments& a, const LaunchContext& context) {
  const Groups groups = groups_of(a.maps);
  LaunchShape shape;
  shape.threads = threads_of(a.maps);
  shape.overlaps = true;
  shape.shared_bytes = static_cast<int>(Few::bytes(groups, a.maps.num_experts));
  return launch_kernel<prepare_few>("prepare", context, shape, a, groups);
}

int64_t prepare_inbox_bytes(int32_t size, int64_t tokens, int32_t max_top_k) {
  if (size == 1 || size * tokens > kMostTokens) return 0;
  // The more choices a token has, the fewer tokens a group holds.
  return int64_t{8} * kWarp * Groups(size, tokens, std::min(max_top_k, kWarp), kMaxWarps).all;
}

}  // namespace nvte_ep
