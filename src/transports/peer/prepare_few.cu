// A warp takes a group of whole tokens at a time, one choice a lane. Every expert has a bit for each token of all ranks: where the
// copies of a token go follows from the bits before its own, in whatever order they were set.
#include "transports/peer/prepare_few.h"

#include <algorithm>
#include <limits>

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
constexpr int kLoads = 4;

struct Groups {
  int tokens;  // of one
  int each;    // of a rank
  int all;
  int words;  // of 32 bits, for the tokens of a rank

  Groups(int32_t size, int64_t tokens_of_rank, int32_t top_k)
      : tokens(kWarp / top_k),
        each(static_cast<int>((tokens_of_rank + tokens - 1) / tokens)),
        all(size * each),
        words(static_cast<int>((tokens_of_rank + 31) / 32)) {}
};

// Shared memory.
struct Few {
  int32_t* begin;   // [num_experts] first slot on the expert's rank
  int32_t* end;     // [num_experts] of the slab
  int32_t* kept;    // [num_experts]
  int32_t* routed;  // [num_experts]
  uint32_t* bits;   // [size, words, num_experts] who chose the expert
  int32_t* before;  // [size, words, num_experts] how many of the words before did
  int32_t* chosen;  // [groups, 32] experts, as the lanes of the warp that takes the group have them

  static __host__ __device__ int64_t bytes(const Groups& g, const RouteMaps& m) {
    return 4 * (m.num_experts * (4 + int64_t{2} * m.size * g.words) + int64_t{g.all} * kWarp);
  }
  __device__ Few(int32_t* memory, const Groups& g, const RouteMaps& m)
      : begin(memory),
        end(begin + m.num_experts),
        kept(end + m.num_experts),
        routed(kept + m.num_experts),
        bits(reinterpret_cast<uint32_t*>(routed + m.num_experts)),
        before(routed + (1 + m.size * g.words) * m.num_experts),
        chosen(before + m.size * g.words * m.num_experts) {}
};

// A lane in those groups of some ranks that its warp takes: group warp_id(), and so many further on as there are warps.
struct Walk {
  int in_group, k;  // token and choice of the lane
  bool has_choice;  // of any group
  int group;        // of the rank's
  int32_t source;   // the rank
  int32_t ranks;    // to go, it included

  __device__ __forceinline__ Walk(const RouteMaps& m, const Groups& g, int32_t from, int32_t count)
      : in_group(lane_id() / m.top_k),
        k(lane_id() - in_group * m.top_k),
        has_choice(in_group < g.tokens),
        group(warp_id()),
        source(from),
        ranks(count) {
    settle(m, g);
  }
  // From rank to rank in a ring.
  static __device__ __forceinline__ int32_t after(const RouteMaps& m, int32_t rank) {
    return rank + 1 < m.size ? rank + 1 : 0;
  }
  __device__ __forceinline__ bool goes_on() const { return ranks > 0; }
  __device__ __forceinline__ void next(const RouteMaps& m, const Groups& g) {
    group += static_cast<int>(blockDim.x) / kWarp;
    settle(m, g);
  }
  __device__ __forceinline__ int token(const Groups& g) const { return group * g.tokens + in_group; }
  __device__ __forceinline__ bool live(const RouteMaps& m, const Groups& g) const {
    return has_choice && token(g) < m.tokens;
  }
  // Of the lane's choice among those of all ranks.
  __device__ __forceinline__ int place(const Groups& g) const {
    return (source * g.each + group) * kWarp + lane_id();
  }
  // Of the token's bits.
  __device__ __forceinline__ int word(const RouteMaps& m, const Groups& g) const {
    return (source * g.words + token(g) / 32) * m.num_experts;
  }
  __device__ __forceinline__ uint32_t bit(const Groups& g) const { return 1u << (token(g) % 32); }

 private:
  __device__ __forceinline__ void settle(const RouteMaps& m, const Groups& g) {
#pragma unroll 1
    for (; group >= g.each && ranks > 0; --ranks) {
      group -= g.each;
      source = after(m, source);
    }
  }
};

struct Wrong {
  int illegal, repeated;
};

// A warp: where the own choices have something wrong with them. False for the lanes whose expert the token has mentioned before.
__device__ __noinline__ bool is_first_mention(int in_group, int32_t expert, bool illegal, Wrong* wrong) {
  const unsigned same = __match_any_sync(kAllLanes, expert < 0 ? -1 : in_group << 16 | expert);
  const bool repeated = expert >= 0 && (same & ((1u << lane_id()) - 1)) != 0;
  const unsigned all_illegal = __ballot_sync(kAllLanes, illegal);
  const unsigned all_repeated = __ballot_sync(kAllLanes, repeated);
  if (lane_id() == 0) {
    atomicAdd(&wrong->illegal, __popc(all_illegal));
    atomicAdd(&wrong->repeated, __popc(all_repeated));
  }
  return !repeated;
}

// A warp: its lanes' own choices, -1 for what is illegal, mentioned before, or past the given tokens.
__device__ __forceinline__ int32_t clean(const RouteMaps& m, const Groups& g, const Walk& at, int64_t given,
                                         uint32_t* bits, Wrong* wrong) {
  const bool illegal = given < -1 || given >= m.num_experts;
  const int32_t expert = illegal ? -1 : static_cast<int32_t>(given);
  bool mentioned = false;
  if (expert >= 0) mentioned = (atomicOr(&bits[at.word(m, g) + expert], at.bit(g)) & at.bit(g)) != 0;
  if (!__any_sync(kAllLanes, illegal || mentioned)) return expert;
  return is_first_mention(at.in_group, expert, illegal, wrong) ? expert : -1;
}

// An own choice to all peers.
__device__ __forceinline__ void send(const PrepareArguments& a, uint32_t now, int place, int32_t expert) {
  const RouteMaps& m = a.maps;
#pragma unroll 1
  for (int32_t d = 1; d < m.size; ++d) {
    const int32_t peer = m.rank + d < m.size ? m.rank + d : m.rank + d - m.size;
    store_numbered(&a.pools.inbox_of<uint64_t>(a.inbox, peer, now)[place], now + 1,
                   static_cast<uint32_t>(expert));
  }
}

// Another rank's choice, when it is here; -1 if it does not come. seen: what was there before.
__device__ __forceinline__ int32_t receive(const Meeting& m, const uint64_t* from, uint64_t seen,
                                           int32_t peer, uint32_t epoch, int* reported) {
  Patience patience;
  while (static_cast<uint32_t>(seen >> 32) != epoch) {
    if (patience.is_over(m, peer, epoch, reported)) return -1;
    seen = load_numbered(from);
  }
  return static_cast<int32_t>(seen);
}

// What a thread knows of its expert in the end.
struct Slab {
  int32_t routed = 0, kept = 0, begin = 0, end = 0;
  int32_t needed = 0;  // slots of the rank up to here
};

// A thread an expert: its copies word by word, and its slab. first: expert of its rank.
__device__ __forceinline__ Slab lay_out(const RouteMaps& m, const Groups& g, const Few& few, int first) {
  __shared__ int32_t warp_rows[kMaxWarps];
  const int experts = m.num_experts;
  const int e = static_cast<int>(threadIdx.x);
  Slab s;
  if (e < experts) {
    const int words = m.size * g.words;
#pragma unroll 1
    for (int w = 0; w < words; w += kLoads) {
      int n[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) n[i] = w + i < words ? __popc(few.bits[(w + i) * experts + e]) : 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (w + i < words) few.before[(w + i) * experts + e] = s.routed;
        s.routed += n[i];
      }
    }
  }
  const int32_t rows = static_cast<int32_t>(padded_rows(m, s.routed));
  s.needed = rows;
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const int32_t below = __shfl_up_sync(kAllLanes, s.needed, d);
    if (lane_id() >= d && e - d >= first) s.needed += below;
  }
  if (lane_id() == kWarp - 1) warp_rows[warp_id()] = s.needed;
  __syncthreads();
  if (e < experts) {
    // A warp's last sum is that of its last rank.
#pragma unroll 1
    for (int w = first / kWarp; w < warp_id(); ++w) s.needed += warp_rows[w];
    const int32_t capacity = static_cast<int32_t>(m.capacity);
    s.begin = min(s.needed - rows, capacity);
    s.end = min(s.needed, capacity);
    s.kept = min(s.routed, s.end - s.begin);
    few.begin[e] = s.begin;
    few.end[e] = s.end;
    few.kept[e] = s.kept;
    few.routed[e] = s.routed;
  }
  __syncthreads();
  return s;
}

// A warp: the slots of a group.
__device__ __forceinline__ void assign(const PrepareArguments& a, const Groups& g, const Few& few,
                                       const Walk& at) {
  const RouteMaps& m = a.maps;
  const int token = at.token(g);
  const bool live = at.live(m, g);
  const int32_t expert = few.chosen[at.place(g)];
  const int local = m.local_experts();
  int32_t slot = -1;
  bool kept = false;
  if (live && expert >= 0) {
    const int w = at.word(m, g) + expert;
    const int32_t position = few.before[w] + __popc(few.bits[w] & (at.bit(g) - 1));
    kept = position < few.kept[expert];
    if (kept && static_cast<unsigned>(expert - m.rank * local) < static_cast<unsigned>(local)) {
      slot = few.begin[expert] + position;
    }
  }
  const int choice = token * m.top_k + at.k;
  if (live) m.row_slots[at.source * m.choices() + choice] = slot;
  if (slot >= 0) {
    const int64_t from = (static_cast<int64_t>(at.source) << 32) | token;
    m.slot_source[slot] = from;
    if (a.slot_source != nullptr) a.slot_source[slot] = from;
  }
  if (at.source != m.rank) return;
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
  const int shift = __ffs(lanes) - 1;
  const int first = static_cast<int>(threadIdx.x) & (lanes - 1);
#pragma unroll 1
  for (unsigned i = threadIdx.x >> shift; i < m.local_experts(); i += blockDim.x >> shift) {
    const int e = m.rank * m.local_experts() + static_cast<int>(i);
    const int32_t end = few.end[e];
#pragma unroll 1
    for (int32_t slot = few.begin[e] + few.kept[e] + first; slot < end; slot += lanes) {
      m.slot_source[slot] = -1;
      if (a.slot_source != nullptr) a.slot_source[slot] = -1;
    }
    if (a.slot_expert == nullptr) continue;
#pragma unroll 1
    for (int32_t slot = few.begin[e] + first; slot < end; slot += lanes)
      a.slot_expert[slot] = static_cast<int>(i);
  }
}

// The warps that have this rank's experts, a thread each: their counts to whoever reads them.
__device__ __forceinline__ void tell_slabs(const PrepareArguments& a, const Few& few, const Slab& s,
                                           const Counted& counted, const Wrong& wrong) {
  const RouteMaps& m = a.maps;
  const int first = m.rank * m.local_experts();
  const int last = first + m.local_experts() - 1;
  if (warp_id() < first / kWarp || warp_id() > last / kWarp) return;
  const int e = static_cast<int>(threadIdx.x);
  const int i = e - first;
  const bool live = e >= first && e <= last;
  const auto scale_rows = [&](int32_t rows) { return (rows + 127) & ~127; };
  int32_t scale_end = live ? scale_rows(s.end - s.begin) : 0;
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const int32_t below = __shfl_up_sync(kAllLanes, scale_end, d);
    if (lane_id() >= d) scale_end += below;
  }
#pragma unroll 1
  for (int other = e - kWarp; other / kWarp >= first / kWarp && other >= lane_id(); other -= kWarp) {
    scale_end +=
        __reduce_add_sync(kAllLanes, other >= first ? scale_rows(few.end[other] - few.begin[other]) : 0);
  }
  if (live) {
    tell(m.tokens_routed, a.tokens_routed, i, s.routed);
    tell(m.tokens_per_expert, a.tokens_per_expert, i, s.kept);
    tell(m.rows_per_expert, a.rows_per_expert, i, s.end - s.begin);
    tell(m.row_offsets, a.row_offsets, i + 1, s.end);
    tell(m.scale_row_offsets, a.scale_row_offsets, i + 1, scale_end);
  }
  if (warp_id() != last / kWarp) return;
  const int32_t needed = __shfl_sync(kAllLanes, s.needed, last % kWarp);
  int32_t dropped = 0;
  if (needed > m.capacity) {
    for (int other = first + lane_id(); other <= last; other += kWarp)
      dropped += few.routed[other] - few.kept[other];
    dropped = __reduce_add_sync(kAllLanes, dropped);
  }
  count_and_tell(a, counted, wrong.illegal, wrong.repeated, dropped, needed);
  if (lane_id() != 0) return;
  tell(m.row_offsets, a.row_offsets, 0, 0);
  tell(m.scale_row_offsets, a.scale_row_offsets, 0, 0);
  tell(m.totals, a.total_rows, 0, min(static_cast<int64_t>(needed), m.capacity));
  tell(m.totals + 1, a.dropped_rows, 0, dropped);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    prepare_few(const __grid_constant__ PrepareArguments a, const Groups g) {
  extern __shared__ __align__(8) int32_t memory[];
  __shared__ Wrong wrong;
  __shared__ int reported;
  const RouteMaps& m = a.maps;
  const Few few(memory, g, m);
  const Walk own(m, g, m.rank, 1), others(m, g, Walk::after(m, m.rank), m.size - 1),
      all(m, g, m.rank, m.size);
  const int first_of_rank = static_cast<int>(threadIdx.x) / m.local_experts() * m.local_experts();
  const int bits = m.size * g.words * m.num_experts;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < bits; i += static_cast<int>(blockDim.x)) few.bits[i] = 0;
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
  const Counted counted(a);
  const auto look = [&](const Walk& at) {
    const int token = at.token(g);
    const bool is_given = at.goes_on() && at.has_choice && token < a.given_tokens;
    return is_given ? given_index(a, token, at.k) : int64_t{-1};
  };
  int64_t given = look(own);
#pragma unroll 1
  for (Walk at = own; at.goes_on();) {
    Walk next = at;
    next.next(m, g);
    const int64_t ahead = look(next);
    const int32_t expert = clean(m, g, at, given, few.bits, &wrong);
    few.chosen[at.place(g)] = expert;
    if (at.live(m, g) && !failed) send(a, now, at.place(g), expert);
    at = next;
    given = ahead;
  }
  if (m.size > 1) {
    __syncthreads();
    if (!failed) tell_arrival(a.meeting, epoch);
  }
  const uint64_t* inbox = a.pools.inbox_of<uint64_t>(a.inbox, m.rank, now);
  const auto peek = [&](const Walk& at) {
    return at.goes_on() && at.live(m, g) ? load_numbered(&inbox[at.place(g)]) : uint64_t{0};
  };
  uint64_t seen = peek(others);
#pragma unroll 1
  for (Walk at = others; at.goes_on();) {
    Walk next = at;
    next.next(m, g);
    const uint64_t ahead = peek(next);
    int32_t expert = -1;
    if (at.live(m, g) && !failed) {
      expert = receive(a.meeting, &inbox[at.place(g)], seen, at.source, epoch, &reported);
    }
    if (expert >= 0) atomicOr(&few.bits[at.word(m, g) + expert], at.bit(g));
    few.chosen[at.place(g)] = expert;
    __syncwarp();
    at = next;
    seen = ahead;
  }
  __syncthreads();
  let_next_kernel_start();  // not while this one waits for ranks that may share the GPU
  if (threadIdx.x == 0) *a.meeting.epoch = epoch;

  const Slab slab = lay_out(m, g, few, first_of_rank);
  tell_slabs(a, few, slab, counted, wrong);
#pragma unroll 1
  for (Walk at = all; at.goes_on(); at.next(m, g)) assign(a, g, few, at);
  mark_slabs(a, few);
  clear_maxima(a.meeting, epoch);
}

Groups groups_of(const RouteMaps& m) { return Groups(m.size, m.tokens, m.top_k); }
int threads_of(const RouteMaps& m) {
  const int wanted =
      std::max({kFewestThreads, groups_of(m).all * kWarp, static_cast<int>(round_up(m.num_experts, kWarp))});
  return std::min(wanted, kMostThreads);
}
// Slots of a rank that the alignment can add, and all choices.
bool slots_are_countable(const RouteMaps& m) {
  return m.alignment <= std::numeric_limits<int32_t>::max() / (2 * m.num_experts);
}

}  // namespace

bool few_choices(const RouteMaps& m) {
  return static_cast<int64_t>(m.size) * m.tokens <= kMostTokens && m.top_k <= kWarp &&
         m.num_experts <= kMostThreads && slots_are_countable(m) &&
         Few::bytes(groups_of(m), m) <= kMostShared;
}

Status launch_prepare_few(const PrepareArguments& a, const LaunchContext& context) {
  const Groups groups = groups_of(a.maps);
  LaunchShape shape;
  shape.threads = threads_of(a.maps);
  shape.overlaps = true;
  shape.shared_bytes = static_cast<int>(Few::bytes(groups, a.maps));
  return launch_kernel<prepare_few>("prepare", context, shape, a, groups);
}

int64_t prepare_inbox_bytes(int32_t size, int64_t tokens, int32_t max_top_k) {
  if (size == 1 || size * tokens > kMostTokens) return 0;
  // The more choices a token has, the fewer tokens a group holds.
  return int64_t{8} * kWarp * Groups(size, tokens, std::min(max_top_k, kWarp)).all;
}

}  // namespace nvte_ep
