// Every expert has a bit for each token of all ranks: where the copies of a token go follows from the bits before its own, in
// whatever order they were set. A word of bits, of 32 tokens of a rank, is one block's, and so are those tokens' choices, from
// which it is made, and their slots; what an expert's slab is, every block finds for itself from the words of all.
//
// A warp takes a group of whole tokens at a time, one choice a lane.
#include "transports/peer/prepare_few.h"

#include <algorithm>
#include <limits>

#include "device/cluster.cuh"
#include "device/kernel_order.cuh"
#include "transports/peer/meeting.cuh"
#include "transports/peer/prepare_outputs.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kMostTokens = 1024;       // of all ranks
constexpr int kMostThreads = 1024;      // of a block, and experts: one a thread
constexpr int kMostBlocks = 8;          // that are sure to be a cluster
constexpr int kMostShared = 200 << 10;  // of one block: compute capability 9.0 and 10.x have it
constexpr int kWordTokens = 32;
constexpr int kLoads = 4;  // in flight together

struct Groups {
  int tokens;   // of one
  int in_word;  // groups
  int words_each;
  int words;          // of all ranks
  int blocks;         // word w is that of block w % blocks
  int most_of_block;  // words

  Groups(int32_t size, int64_t tokens_of_rank, int32_t top_k, int most_blocks)
      : tokens(kWarp / top_k),
        in_word((kWordTokens + tokens - 1) / tokens),
        words_each(static_cast<int>((tokens_of_rank + kWordTokens - 1) / kWordTokens)),
        words(size * words_each),
        blocks(1) {
    while (blocks < words && 2 * blocks <= most_blocks) blocks *= 2;
    most_of_block = (words + blocks - 1) / blocks;
  }
};

// Shared memory of a block.
struct Few {
  int32_t* begin;   // [num_experts] first slot on the expert's rank
  int32_t* end;     // [num_experts] of the slab
  int32_t* kept;    // [num_experts]
  int32_t* routed;  // [num_experts]
  uint32_t* bits;   // [words of the block, num_experts] who chose the expert
  int32_t* before;  // the same: how many of the words before did
  int32_t* chosen;  // [groups of the block, 32] experts

  static __host__ __device__ int64_t bytes(const Groups& g, int experts) {
    return 4 * (experts * (4 + int64_t{2} * g.most_of_block) + int64_t{g.most_of_block} * g.in_word * kWarp);
  }
  __device__ Few(int32_t* memory, const Groups& g, int experts)
      : begin(memory),
        end(begin + experts),
        kept(end + experts),
        routed(kept + experts),
        bits(reinterpret_cast<uint32_t*>(routed + experts)),
        before(routed + (1 + g.most_of_block) * experts),
        chosen(before + g.most_of_block * experts) {}
};

// A lane in a group of its block.
struct Place {
  int group;       // of the block's
  int32_t source;  // the rank
  int token;
  int k;
  int bit;
  int row;   // of the word: its first expert's place among the block's bits
  int item;  // of the choice among those of all ranks
  bool live;

  __device__ __forceinline__ Place(const RouteMaps& m, const Groups& g, int index) : group(index) {
    const int word_here = index / g.in_word;
    const int in_word = index - word_here * g.in_word;
    const int word = block_in_cluster() + word_here * g.blocks;
    const int in_group = lane_id() / m.top_k;
    source = word / g.words_each;
    k = lane_id() - in_group * m.top_k;
    bit = in_word * g.tokens + in_group;
    token = (word - source * g.words_each) * kWordTokens + bit;
    row = word_here * m.num_experts;
    item = (word * g.in_word + in_word) * kWarp + lane_id();
    live = word < g.words && in_group < g.tokens && bit < kWordTokens && token < m.tokens;
    if (word >= g.words) source = -1;
  }
};

struct Wrong {
  int illegal, repeated;
};

// A warp: where the own choices have something wrong with them. False for the lanes whose expert the token has mentioned before.
__device__ __noinline__ bool is_first_mention(int token, int32_t expert, bool illegal, Wrong* wrong) {
  const unsigned same = __match_any_sync(kAllLanes, expert < 0 ? -1 : token << 16 | expert);
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
__device__ __forceinline__ int32_t clean(const PrepareArguments& a, const Place& at, const Few& few,
                                         Wrong* wrong) {
  const int64_t given = at.live && at.token < a.given_tokens ? given_index(a, at.token, at.k) : -1;
  const bool illegal = given < -1 || given >= a.maps.num_experts;
  const int32_t expert = illegal ? -1 : static_cast<int32_t>(given);
  const uint32_t bit = 1u << at.bit;
  bool mentioned = false;
  if (expert >= 0) mentioned = (atomicOr(&few.bits[at.row + expert], bit) & bit) != 0;
  if (!__any_sync(kAllLanes, illegal || mentioned)) return expert;
  return is_first_mention(at.token, expert, illegal, wrong) ? expert : -1;
}

// What travels of a choice: the expert, and something of what its rank has come for.
__device__ __forceinline__ uint32_t tag_of(const Meeting& m) { return (m.call ^ m.call >> 12) & 0xFFFFu; }
__device__ __forceinline__ uint32_t value_of(const Meeting& m, int32_t expert) {
  return tag_of(m) << 16 | (static_cast<uint32_t>(expert) & 0xFFFFu);
}

// An own choice to all peers.
__device__ __forceinline__ void send(const PrepareArguments& a, uint32_t now, int item, int32_t expert) {
  const RouteMaps& m = a.maps;
#pragma unroll 1
  for (int32_t d = 1; d < m.size; ++d) {
    const int32_t peer = m.rank + d < m.size ? m.rank + d : m.rank + d - m.size;
    uint64_t* inbox = a.pools.inbox_of<uint64_t>(a.inbox, peer, now);
    store_numbered(&inbox[item], now + 1, value_of(a.meeting, expert));
  }
}

// Another rank's choice, when it is here; -1 if it does not come, or came for something else.
__device__ __forceinline__ int32_t receive(const Meeting& m, const uint64_t* from, int32_t peer,
                                           uint32_t epoch) {
  Patience patience;
  for (;;) {
    const uint64_t both = load_numbered(from);
    if (static_cast<uint32_t>(both >> 32) == epoch) {
      const uint32_t value = static_cast<uint32_t>(both);
      if (value >> 16 == tag_of(m)) return static_cast<int16_t>(value & 0xFFFFu);
      report_failure(m, NVTE_EP_STATUS_INVALID_ARGUMENT, peer);
      return -1;
    }
    if (patience.is_over(m, peer, epoch)) return -1;
  }
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
    const int block = block_in_cluster();
#pragma unroll 1
    for (int row = 0; row < g.most_of_block; ++row) {
#pragma unroll 1
      for (int b = 0; b < g.blocks; b += kLoads) {
        int n[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          n[i] = b + i < g.blocks ? __popc(in_block(few.bits, b + i)[row * experts + e]) : 0;
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (b + i == block) few.before[row * experts + e] = s.routed;
          s.routed += n[i];
        }
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
__device__ __forceinline__ void assign(const PrepareArguments& a, const Few& few, const Place& at) {
  const RouteMaps& m = a.maps;
  const int32_t expert = few.chosen[at.group * kWarp + lane_id()];
  const int local = m.local_experts();
  int32_t slot = -1;
  bool kept = false;
  if (at.live && expert >= 0) {
    const int i = at.row + expert;
    const int32_t position = few.before[i] + __popc(few.bits[i] & ((1u << at.bit) - 1));
    kept = position < few.kept[expert];
    if (kept && static_cast<unsigned>(expert - m.rank * local) < static_cast<unsigned>(local)) {
      slot = few.begin[expert] + position;
    }
  }
  const int choice = at.token * m.top_k + at.k;
  if (at.live) m.row_slots[at.source * m.choices() + choice] = slot;
  if (slot >= 0) {
    const int64_t from = (static_cast<int64_t>(at.source) << 32) | at.token;
    m.slot_source[slot] = from;
    if (a.slot_source != nullptr) a.slot_source[slot] = from;
  }
  if (at.source != m.rank) return;
  if (at.live) m.kept_experts[choice] = kept ? expert : -1;
  const unsigned siblings = ((m.top_k < kWarp ? 1u << m.top_k : 0u) - 1u) << (lane_id() - at.k);
  uint32_t holders = 0;
#pragma unroll 1
  for (int32_t r = 0; r < m.size; ++r) {
    const bool here = kept && static_cast<unsigned>(expert - r * local) < static_cast<unsigned>(local);
    if ((__ballot_sync(kAllLanes, here) & siblings) != 0) holders |= 1u << (r % 32);
    if (r % 32 != 31 && r != m.size - 1) continue;
    if (at.live && at.k == 0) m.holders[at.token * m.holder_words() + r / 32] = holders;
    holders = 0;
  }
}

// The padding of this rank's slabs, and where the caller wants it the expert of every slot; all blocks together.
__device__ __forceinline__ void mark_slabs(const PrepareArguments& a, const Groups& g, const Few& few) {
  const RouteMaps& m = a.maps;
  const int lanes =
      static_cast<int>(min(m.alignment, int64_t{kWarp}));  // that share an expert: a power of two
  const int shift = __ffs(lanes) - 1;
  const int first = static_cast<int>(threadIdx.x) & (lanes - 1);
  const unsigned thread = static_cast<unsigned>(block_in_cluster()) * blockDim.x + threadIdx.x;
#pragma unroll 1
  for (unsigned i = thread >> shift; i < m.local_experts(); i += g.blocks * blockDim.x >> shift) {
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

// The warps that have this rank's experts, a thread each: their counts to whoever reads them. counts: true in the warp of the
// last one; wrong: of the whole cluster.
__device__ __forceinline__ void tell_slabs(const PrepareArguments& a, const Few& few, const Slab& s,
                                           bool counts, const Counted& counted, const Wrong& wrong) {
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
  if (!counts) return;
  const int32_t needed = __shfl_sync(kAllLanes, s.needed, last % kWarp);
  int32_t dropped = 0;
  if (needed > m.capacity) {
#pragma unroll 1
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

// What every block has found wrong; every lane calls.
__device__ __forceinline__ Wrong add_up(const Wrong& mine, const Groups& g) {
  const bool live = lane_id() < g.blocks;
  const Wrong* theirs = in_block(&mine, live ? lane_id() : 0);
  return Wrong{__reduce_add_sync(kAllLanes, live ? theirs->illegal : 0),
               __reduce_add_sync(kAllLanes, live ? theirs->repeated : 0)};
}

__global__ void __launch_bounds__(kMostThreads, 1)
    prepare_few(const __grid_constant__ PrepareArguments a, const Groups g) {
  extern __shared__ __align__(8) int32_t memory[];
  __shared__ Wrong wrong;
  const RouteMaps& m = a.maps;
  const Few few(memory, g, m.num_experts);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int groups = g.most_of_block * g.in_word;
  const Place first(m, g, warp_id());
  const int first_of_rank = static_cast<int>(threadIdx.x) / m.local_experts() * m.local_experts();
  const bool leads = block_in_cluster() == 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < g.most_of_block * m.num_experts;
       i += static_cast<int>(blockDim.x)) {
    few.bits[i] = 0;
  }
  if (threadIdx.x == 0) wrong = Wrong{0, 0};
  __syncthreads();
  wait_for_kernel_before();
  if (m.size == 1) let_next_kernel_start();
  const uint32_t now = *a.pools.epoch;
  const uint32_t epoch = now + 1;
  const bool failed = *a.meeting.failed != 0;
  const Counted counted(a);
#pragma unroll 1
  for (Place at = first; at.group < groups; at = Place(m, g, at.group + warps)) {
    if (at.source != m.rank) continue;
    const int32_t expert = clean(a, at, few, &wrong);
    few.chosen[at.group * kWarp + lane_id()] = expert;
    if (at.live && !failed) send(a, now, at.item, expert);
  }
  if (m.size > 1) {
    __syncwarp();
    come_to_cluster_without_writes();
    wait_for_cluster();
    // All blocks have sent this rank's choices.
    if (leads && !failed) tell_arrival(a.meeting, epoch);
    const uint64_t* inbox = a.pools.inbox_of<uint64_t>(a.inbox, m.rank, now);
#pragma unroll 1
    for (Place at = first; at.group < groups; at = Place(m, g, at.group + warps)) {
      if (at.source == m.rank) continue;
      int32_t expert = -1;
      if (at.live && !failed) expert = receive(a.meeting, &inbox[at.item], at.source, epoch);
      if (expert >= 0) atomicOr(&few.bits[at.row + expert], 1u << at.bit);
      few.chosen[at.group * kWarp + lane_id()] = expert;
    }
  }
  __syncwarp();
  come_to_cluster();
  wait_for_cluster();
  let_next_kernel_start();  // not while this one waits for ranks that may share the GPU
  if (leads && threadIdx.x == 0) *a.meeting.epoch = epoch;

  const Slab slab = lay_out(m, g, few, first_of_rank);
  const bool counts = leads && warp_id() == ((m.rank + 1) * m.local_experts() - 1) / kWarp;
  Wrong all_wrong{0, 0};
  if (counts) all_wrong = add_up(wrong, g);
  come_to_cluster_without_writes();  // that no block ends while others look at its memory
#pragma unroll 1
  for (Place at = first; at.group < groups; at = Place(m, g, at.group + warps)) {
    if (at.source >= 0) assign(a, few, at);
  }
  mark_slabs(a, g, few);
  if (leads) tell_slabs(a, few, slab, counts, counted, all_wrong);
  if (block_in_cluster() == g.blocks - 1) clear_maxima(a.meeting, epoch);
  __syncwarp();
  wait_for_cluster();
}

Groups groups_of(const RouteMaps& m, int most_blocks) {
  return Groups(m.size, m.tokens, m.top_k, most_blocks);
}
int threads_of(const RouteMaps& m, const Groups& g) {
  const int wanted =
      std::max(g.most_of_block * g.in_word * kWarp, static_cast<int>(round_up(m.num_experts, kWarp)));
  return std::min(std::max(wanted, 4 * kWarp), kMostThreads);
}
// Slots of a rank that the alignment can add, and all choices.
bool slots_are_countable(const RouteMaps& m) {
  return m.alignment <= std::numeric_limits<int32_t>::max() / (2 * m.num_experts);
}

}  // namespace

bool few_choices(const RouteMaps& m) {
  return static_cast<int64_t>(m.size) * m.tokens <= kMostTokens && m.top_k <= kWarp &&
         m.num_experts <= kMostThreads && slots_are_countable(m) &&
         Few::bytes(groups_of(m, 1), m.num_experts) <= kMostShared;
}

Status launch_prepare_few(const PrepareArguments& a, const LaunchContext& context) {
  // All ranks may share a GPU and wait there for each other: a quarter of it holds them.
  int most_blocks = std::min(kMostBlocks, std::max(1, context.sms / (4 * a.maps.size)));
  if (context.max_sms > 0) most_blocks = std::min(most_blocks, context.max_sms);
  const Groups groups = groups_of(a.maps, most_blocks);
  LaunchShape shape;
  shape.blocks = groups.blocks;
  shape.cluster = groups.blocks;
  shape.threads = threads_of(a.maps, groups);
  shape.overlaps = true;
  shape.shared_bytes = static_cast<int>(Few::bytes(groups, a.maps.num_experts));
  if (shape.shared_bytes > context.shared_bytes_per_block) {
    return unsupported("peer: ", a.maps.num_experts, " experts and ", a.maps.size * int64_t{a.maps.tokens},
                       " tokens of all ranks need ", shape.shared_bytes, " bytes of shared memory in one of ",
                       groups.blocks, " thread blocks, which has ", context.shared_bytes_per_block);
  }
  return launch_kernel<prepare_few>("prepare", context, shape, a, groups);
}

int64_t prepare_inbox_bytes(int32_t size, int64_t tokens, int32_t max_top_k) {
  if (size == 1 || size * tokens > kMostTokens) return 0;
  // The more choices a token has, the fewer tokens a group holds.
  const Groups groups(size, tokens, std::min(max_top_k, kWarp), 1);
  return int64_t{8} * kWarp * groups.words * groups.in_word;
}

}  // namespace nvte_ep
