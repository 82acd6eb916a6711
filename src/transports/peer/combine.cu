// A warp sums a stretch of columns of one token: its slots on this rank in FP32, in order of the choices. For another rank's
// token the sum is rounded to a partial row; for an own one the partial rows of the peers are added, ranks in order.
//
// A warp's sources (slots, and partial rows of peers) come through a ring of stages in shared memory, and it is always ahead in
// asking for them, from one row to the next: what a multiprocessor has on its way is what it moves in the end, all the more where
// there are few of them, or where the rows lie behind a link.
#include "transports/peer/combine.h"

#include <cstdlib>

#include "device/elements.cuh"
#include "device/kernel_order.cuh"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "transports/peer/meeting.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostSources = 8;    // of a token that go through shared memory; more, or unaligned ones, do not
constexpr int kSlotsInFlight = 4;  // that do not go through shared memory

// A step: the chunks of 16 bytes that a warp sums at a time. A block of steps: those that are in shared memory.
constexpr int kStepChunks = kWarp;
constexpr int kStepBytes = kStepChunks * 16;
#define NVTE_X_STEPS 4
#define NVTE_X_BLOCKS 3
constexpr int kSteps = NVTE_X_STEPS;
constexpr int kBlockChunks = kSteps * kStepChunks;
constexpr int kStageBytes = kMostSources * kStepBytes;  // of a step
constexpr int kRingBytes = kSteps * kStageBytes;

__host__ __device__ constexpr int elements_per_chunk(int token_bytes) { return 16 / token_bytes; }
// A step of a partial row in MXFP8: codes | scales.
__host__ __device__ constexpr int mxfp8_step_bytes(int elements_per_chunk) {
  return kStepChunks * elements_per_chunk +
         (kStepChunks * elements_per_chunk / Mxfp8::kBlock + 15) / 16 * 16;
}

struct Work {
  CombineArguments c;
  int64_t partial_bytes;
  int32_t row_blocks;
  int32_t blocks;      // of an item
  uint32_t stretches;  // items of a row
  uint32_t items;
  // Of sums beside partial rows: how many of these come before the first, and their share of what follows, of 2^32.
  uint32_t lead, share;
  int slot_alignment, result_alignment;
};

// This rank's partial rows lie in a holder's outbox as those of another rank do in this one's.
__device__ __forceinline__ int32_t place_among_others(int32_t rank, int32_t holder) {
  return rank < holder ? rank : rank - 1;
}

// Up to 32 choices of a token, one a lane: the slot here or -1, and its weight.
struct Choice {
  int32_t slot;
  float weight;
};
__device__ __forceinline__ Choice choice_of(const CombineArguments& c, const int32_t* slots, int k) {
  Choice mine;
  mine.slot = k < c.maps.top_k ? slots[k] : -1;
  mine.weight = mine.slot >= 0 && c.slot_weights != nullptr ? c.slot_weights[mine.slot] : 1.0f;
  return mine;
}

template <typename Token>
__device__ __forceinline__ void add(const Elements<Token>& e, Elements<Token>* sum) {
#pragma unroll
  for (int j = 0; j < Elements<Token>::kCount; ++j) sum->x[j] = add_rn(sum->x[j], e.x[j]);
}
template <typename Token>
__device__ __forceinline__ void add_weighted(Elements<Token> e, float weight, Elements<Token>* sum) {
#pragma unroll
  for (int j = 0; j < Elements<Token>::kCount; ++j) e.x[j] = mul_rn(weight, e.x[j]);
  add(e, sum);
}

// ---- items ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ const int32_t* slots_of(const RouteMaps& m, int32_t rank, int64_t token) {
  return m.row_slots + (static_cast<int64_t>(rank) * m.tokens + token) * m.top_k;
}
__device__ __forceinline__ const uint32_t* holders_of(const RouteMaps& m, int64_t token) {
  return m.holders + token * m.holder_words();
}

// Some blocks of steps of a row: of an own token's, or of the partial row of another rank's.
struct Place {
  bool is_sum;
  int32_t other;  // of a partial row: the rank, among the others
  int32_t token;
  int32_t stretch, block, blocks;  // the next block, of the row, and how many from it on

  __device__ __forceinline__ int32_t rank(const RouteMaps& m) const {
    return is_sum ? m.rank : (other < m.rank ? other : other + 1);
  }
};
// What is read of the routing, early: it takes long to come.
struct Coming : Place {
  uint32_t stamp;    // of sums that may have been made already
  int32_t slot;      // of the lane's choice
  uint32_t holders;  // the first 32 ranks
};
struct Item : Place {
  unsigned choices;  // that have a slot here: bits
  float weight;      // of the lane's choice
  // Sources: slots in order of the choices, then partial rows, ranks in order.
  int32_t slots, sources;
  int32_t before;  // partial rows of ranks before this one
};
// Where the lane's chunk of each source lies, in the first step of a block.
struct Sources {
  const uint8_t* at[kMostSources];
};

template <typename Token, bool kMxfp8>
constexpr int kPartialStepBytes = kMxfp8 ? mxfp8_step_bytes(Elements<Token>::kCount) : kStepBytes;

template <typename Token, bool kMxfp8>
__device__ __forceinline__ const uint8_t* partial_row(const Work& w, uint32_t now, int32_t holder,
                                                      int64_t token) {
  const RouteMaps& m = w.c.maps;
  const int64_t place = static_cast<int64_t>(place_among_others(m.rank, holder)) * m.tokens + token;
  return w.c.pools.to_read<uint8_t>(w.c.outbox, holder, now) + place * w.partial_bytes;
}

// The items of a kernel are the sums of one pass of columns, and evenly among them the partial rows of the next.
__device__ __forceinline__ Coming look_at(const Work& sums, const Work& partials, uint32_t index) {
  Coming item;
  item.is_sum = partials.items == 0;
  if (sums.items > 0 && index >= sums.lead) {
    index -= sums.lead;
    const uint32_t before = __umulhi(index, sums.share);
    item.is_sum = __umulhi(index + 1, sums.share) == before;
    index = item.is_sum ? index - before : before + sums.lead;
  }
  const Work& w = item.is_sum ? sums : partials;
  const RouteMaps& m = w.c.maps;
  const uint32_t row = index / w.stretches;
  item.stretch = static_cast<int32_t>(index - row * w.stretches);
  item.token = static_cast<int32_t>(row);
  item.other = 0;
  if (!item.is_sum && m.size > 2) {
    const uint32_t others = static_cast<uint32_t>(m.size - 1);
    item.token = static_cast<int32_t>(row / others);
    item.other = static_cast<int32_t>(row % others);
  }
  item.block = item.stretch * w.blocks;
  item.blocks = min(w.blocks, w.row_blocks - item.block);
  item.slot = lane_id() < m.top_k ? slots_of(m, item.rank(m), item.token)[lane_id()] : -1;
  item.holders = item.is_sum && m.size > 1 ? *holders_of(m, item.token) : 0;
  item.stamp = item.is_sum && w.c.mode == Sums::kLeft ? w.c.early.stamps[index] : 0;
  return item;
}

__device__ __forceinline__ bool is_ready(const CombineArguments& c, int32_t holder, int32_t token, uint32_t meeting) {
  const uint32_t* ready = reinterpret_cast<const uint32_t*>(c.pools.own + c.early.ready.offset);
  uint32_t announced;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
               : "=r"(announced)
               : "l"(ready + token / c.early.chunk_tokens * c.maps.size + holder)
               : "memory");
  return !is_missing(announced, meeting);
}
// Every lane calls; `choices` of more than 32 are not looked at, nor sources of more than kMostSources.
template <typename Token, bool kMxfp8, bool kStaged>
__device__ __forceinline__ void open_item(const Work& w, const Coming& coming, uint32_t now, Item* item,
                                          Sources* sources) {
  const CombineArguments& c = w.c;
  const RouteMaps& m = c.maps;
  static_cast<Place&>(*item) = coming;
  item->weight = 1.0f;
  item->choices = __ballot_sync(kAllLanes, coming.slot >= 0);
  item->slots = item->sources = __popc(item->choices);
  item->before = 0;
  if (item->is_sum && c.mode == Sums::kLeft && coming.stamp == now) item->blocks = 0;
  if constexpr (!kStaged) {
    bool any = item->is_sum;
    for (int k = lane_id(); k < m.top_k; k += kWarp) any |= slots_of(m, item->rank(m), item->token)[k] >= 0;
    if (!__any_sync(kAllLanes, any)) item->blocks = 0;
    return;
  }
  if (!item->is_sum && item->slots == 0) item->blocks = 0;
  if (c.slot_weights != nullptr && coming.slot >= 0) item->weight = c.slot_weights[coming.slot];
  const bool early = item->is_sum && c.mode == Sums::kEarly;
  const uint32_t reads = early ? now + 1 : now;
  const int64_t first = static_cast<int64_t>(item->block) * kBlockChunks;
  const uint8_t* slots = c.slots + (c.first_chunk + first + lane_id()) * 16;
  unsigned left = item->choices;
  int32_t word = 0;
  uint32_t holders = coming.holders;
  if (m.rank < 32) holders &= ~(1u << m.rank);
#pragma unroll
  for (int s = 0; s < kMostSources; ++s) {
    if (left != 0) {
      const int32_t slot = __shfl_sync(kAllLanes, coming.slot, __ffs(static_cast<int>(left)) - 1);
      left &= left - 1;
      sources->at[s] = slots + slot * c.slot_stride;
      continue;
    }
    if (!item->is_sum || m.size == 1) break;
    while (holders == 0 && ++word < m.holder_words()) {
      holders = holders_of(m, item->token)[word];
      if (m.rank / 32 == word) holders &= ~(1u << (m.rank % 32));
    }
    if (holders == 0) break;
    const int32_t holder = word * 32 + __ffs(static_cast<int>(holders)) - 1;
    holders &= holders - 1;
    sources->at[s] = partial_row<Token, kMxfp8>(w, reads, holder, item->token) +
                     static_cast<int64_t>(item->block) * kSteps * kPartialStepBytes<Token, kMxfp8> +
                     lane_id() * 16;
    item->before += holder < m.rank;
    ++item->sources;
    if (early && !is_ready(c, holder, item->token, reads)) item->blocks = 0;
  }
}

// The warp is done with an item.
__device__ __forceinline__ void close_item(const Work& w, const Item& item, uint32_t now) {
  const CombineArguments& c = w.c;
  const RouteMaps& m = c.maps;
  if (c.mode != Sums::kEarly) return;
  __syncwarp();
  if (lane_id() != 0) return;
  if (item.is_sum) {
    if (item.blocks > 0) c.early.stamps[static_cast<int64_t>(item.token) * w.stretches + item.stretch] = now + 1;
    return;
  }
  __threadfence();
  const int32_t chunk = item.token / c.early.chunk_tokens;
  const int32_t tokens = min(c.early.chunk_tokens, m.tokens - chunk * c.early.chunk_tokens);
  const uint32_t all = static_cast<uint32_t>(tokens * (m.size - 1) * w.stretches);
  if (atomicAdd(&c.early.counters[chunk], 1u) + 1 != all) return;
  c.early.counters[chunk] = 0;
  __threadfence_system();
  for (int32_t peer = 0; peer < m.size; ++peer) {
    if (peer == m.rank) continue;
    uint32_t* ready = reinterpret_cast<uint32_t*>(c.pools.base[peer] + c.early.ready.offset);
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(ready + chunk * m.size + m.rank), "r"(now + 1) : "memory");
  }
}

// Asks for step k of a block. left: chunks of the row from the lane's in the block's first step on. ring: the lane's place.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ void ask_for_step(const Item& item, const Sources& sources, int k, int left,
                                             uint32_t ring) {
  constexpr int kPartialStep = kPartialStepBytes<Token, kMxfp8>;
  const bool live = k * kStepChunks < left;
  // A step of a partial row in MXFP8 is shorter, and as long at the row's end.
  const bool partial_live = kMxfp8 ? lane_id() * 16 < kPartialStep && k * kStepChunks < left + lane_id() : live;
#pragma unroll
  for (int s = 0; s < kMostSources; ++s) {
    if (s >= item.sources) break;
    const bool is_slot = s < item.slots;
    if (is_slot ? live : partial_live) {
      copy_async16(ring + k * kStageBytes + s * kStepBytes,
                   sources.at[s] + k * (is_slot ? kStepBytes : kPartialStep));
    }
  }
}

// The lane's sum of a step. stage: the lane's place.
template <typename Token>
__device__ __forceinline__ Elements<Token> sum_staged_slots(const Item& item, bool weighted, uint32_t stage) {
  uint4 bytes[kMostSources];
#pragma unroll
  for (int s = 0; s < kMostSources; ++s) {
    if (s < item.slots) bytes[s] = load_shared16(stage + s * kStepBytes);
  }
  Elements<Token> sum, e;
  clear(&sum);
  if (!weighted) {
#pragma unroll
    for (int s = 0; s < kMostSources; ++s) {
      if (s >= item.slots) break;
      e.unpack(bytes[s]);
      add(e, &sum);
    }
    return sum;
  }
  unsigned left = item.choices;
#pragma unroll
  for (int s = 0; s < kMostSources; ++s) {
    if (s >= item.slots) break;
    e.unpack(bytes[s]);
    add_weighted(e, __shfl_sync(kAllLanes, item.weight, __ffs(static_cast<int>(left)) - 1), &sum);
    left &= left - 1;
  }
  return sum;
}

// step: of a partial row, in shared memory or where it lies.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ Elements<Token> partial_chunk(const uint8_t* step) {
  if constexpr (kMxfp8) {
    constexpr int kCount = Elements<Token>::kCount;
    Mxfp8Elements<Token> e;
    const uint8_t* from = step + lane_id() * kCount;
#pragma unroll
    for (int i = 0; i < e.kWords; ++i) e.word[i] = reinterpret_cast<const uint32_t*>(from)[i];
    e.scale = step[kStepChunks * kCount + lane_id() * kCount / Mxfp8::kBlock];
    return e.decode();
  } else {
    Elements<Token> e;
    e.unpack(*reinterpret_cast<const uint4*>(step + lane_id() * 16));
    return e;
  }
}

// ---- a step from where the sources lie: many choices, or slots that are not aligned to 16 -----------------------------------

// sum += weight * slot over the choices of a group of 32, in order. at: byte of the lane's chunk; every lane calls.
template <typename Token>
__device__ __forceinline__ void add_slots(const Work& w, const Choice& mine, int64_t at, bool live,
                                          Elements<Token>* sum) {
  unsigned left = __ballot_sync(kAllLanes, mine.slot >= 0);
  while (left != 0) {
    uint4 bytes[kSlotsInFlight];
    unsigned fetched = left;
#pragma unroll
    for (int i = 0; i < kSlotsInFlight; ++i) {
      if (fetched == 0) break;
      const int32_t slot = __shfl_sync(kAllLanes, mine.slot, __ffs(static_cast<int>(fetched)) - 1);
      fetched &= fetched - 1;
      if (live) bytes[i] = load16(w.c.slots + slot * w.c.slot_stride + at, w.slot_alignment);
    }
#pragma unroll
    for (int i = 0; i < kSlotsInFlight; ++i) {
      if (left == 0) break;
      const float weight = __shfl_sync(kAllLanes, mine.weight, __ffs(static_cast<int>(left)) - 1);
      left &= left - 1;
      if (!live) continue;
      Elements<Token> e;
      e.unpack(bytes[i]);
      if (w.c.slot_weights != nullptr) {
        add_weighted(e, weight, sum);
      } else {
        add(e, sum);
      }
    }
  }
}

template <typename Token>
__device__ __forceinline__ Elements<Token> sum_slots(const Work& w, const Item& item, int chunk, bool live) {
  const int32_t* slots = slots_of(w.c.maps, item.rank(w.c.maps), item.token);
  const int64_t at = (static_cast<int64_t>(w.c.first_chunk) + chunk) * 16;
  Elements<Token> sum;
  clear(&sum);
  for (int k = 0; k < w.c.maps.top_k; k += kWarp)
    add_slots(w, choice_of(w.c, slots, k + lane_id()), at, live, &sum);
  return sum;
}

// ---- what becomes of a sum ------------------------------------------------------------------------------------------------

// A lane's chunk of a step of a partial row. Every lane calls.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ void store_partial(const Elements<Token>& sum, uint8_t* step, bool live) {
  if constexpr (kMxfp8) {
    constexpr int kCount = Elements<Token>::kCount;
    Mxfp8Elements<Token> e;
    e.encode(sum);
    if (!live) return;
    uint32_t* to = reinterpret_cast<uint32_t*>(step + lane_id() * kCount);
#pragma unroll
    for (int i = 0; i < e.kWords; ++i) to[i] = e.word[i];
    if (lane_id() * kCount % Mxfp8::kBlock == 0)
      step[kStepChunks * kCount + lane_id() * kCount / Mxfp8::kBlock] = static_cast<uint8_t>(e.scale);
  } else {
    if (live) sum.store(step + lane_id() * 16, 16);
  }
}

// A value of each choice of a token, from where its slot is; 0 from a rank that gives none.
__device__ __forceinline__ void gather_values(const CombineArguments& c, uint32_t now, int64_t token) {
  const RouteMaps& m = c.maps;
  for (int k = lane_id(); k < m.top_k; k += kWarp) {
    const int32_t expert = m.kept_experts[token * m.top_k + k];
    float value = 0.0f;
    if (expert >= 0) {
      const int32_t holder = expert / m.local_experts();
      if (holder == m.rank) {
        const int64_t choice = (static_cast<int64_t>(m.rank) * m.tokens + token) * m.top_k + k;
        if (c.slot_values != nullptr) value = c.slot_values[m.row_slots[choice]];
      } else if (*c.pools.to_read<uint32_t>(c.values.given, holder, now) != 0) {
        const int64_t choice =
            (static_cast<int64_t>(place_among_others(m.rank, holder)) * m.tokens + token) * m.top_k + k;
        value = c.pools.to_read<float>(c.values.area, holder, now)[choice];
      }
    }
    c.own_values[token * c.own_value_stride + k] = value;
  }
}

// The values of another rank's token, beside its partial row.
__device__ __forceinline__ void send_values(const CombineArguments& c, uint32_t now, const Item& item) {
  const RouteMaps& m = c.maps;
  const int32_t* slots = slots_of(m, item.rank(m), item.token);
  float* values = c.pools.to_write<float>(c.values.area, now) +
                  (static_cast<int64_t>(item.other) * m.tokens + item.token) * m.top_k;
  for (int k = lane_id(); k < m.top_k; k += kWarp) {
    if (slots[k] >= 0) values[k] = c.slot_values[slots[k]];
  }
}

// A rank whose slots are all empty has nothing to give.
__device__ __forceinline__ bool gives_values(const CombineArguments& c) {
  return c.slot_values != nullptr || c.maps.totals[0] == 0;
}

// One thread: the host learns which ranks gave no values.
__device__ __noinline__ void tell_missing(const CombineArguments& c, uint32_t now) {
  volatile int64_t* report = c.report;
  for (int32_t r = 0; r < c.maps.size; ++r) {
    const bool gave =
        r == c.maps.rank ? gives_values(c) : *c.pools.to_read<uint32_t>(c.values.given, r, now) != 0;
    if (gave) continue;
    report[5] = c.counters[5] = r;
    __threadfence_system();
    report[4] = c.counters[4] += 1;
  }
}

// The values of an item's token, with its first steps.
__device__ __forceinline__ void move_values(const CombineArguments& c, uint32_t now, const Item& item) {
  if (item.stretch != 0 || (item.is_sum && c.mode == Sums::kEarly)) return;
  if (item.is_sum) {
    if (c.own_values != nullptr) gather_values(c, now, item.token);
  } else if (c.send_values && c.slot_values != nullptr) {
    send_values(c, now, item);
  }
}

// The sums of a token's ranks, in order. own: of this rank's slots. stage: the step in shared memory; null: partial rows are
// read where they lie. block: of the row.
template <typename Token, bool kMxfp8, bool kStaged>
__device__ __forceinline__ Elements<Token> sum_ranks(const Work& w, uint32_t now, const Item& item, int block,
                                                     int k, const uint8_t* stage, Elements<Token> own, bool live) {
  if constexpr (kMxfp8) round_to_mxfp8(&own);
  if (w.c.maps.size == 1) return own;
  Elements<Token> sum;
  clear(&sum);
  if constexpr (kStaged) {
    for (int s = item.slots; s <= item.sources; ++s) {
      if (s == item.slots + item.before) add(own, &sum);
      if (s < item.sources) add(partial_chunk<Token, kMxfp8>(stage + s * kStepBytes), &sum);
    }
    return sum;
  }
  const RouteMaps& m = w.c.maps;
  for (int word = 0; word < m.holder_words(); ++word) {
    for (uint32_t left = holders_of(m, item.token)[word]; left != 0; left &= left - 1) {
      const int32_t holder = word * 32 + __ffs(static_cast<int>(left)) - 1;
      if (holder == m.rank) {
        add(own, &sum);
      } else if (live) {
        const int64_t step = static_cast<int64_t>(block) * kSteps + k;
        const uint8_t* row = partial_row<Token, kMxfp8>(w, now, holder, item.token);
        add(partial_chunk<Token, kMxfp8>(row + step * kPartialStepBytes<Token, kMxfp8>), &sum);
      }
    }
  }
  return sum;
}

// What a block of steps is added up to.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ uint8_t* place_of_block(const Work& w, const Item& item, uint32_t now) {
  const CombineArguments& c = w.c;
  if (item.is_sum) {
    return c.result + item.token * c.result_stride +
           (c.first_chunk + static_cast<int64_t>(item.block) * kBlockChunks + lane_id()) * 16;
  }
  const int64_t row = static_cast<int64_t>(item.other) * c.maps.tokens + item.token;
  return c.pools.to_write<uint8_t>(c.outbox, now) + row * w.partial_bytes +
         static_cast<int64_t>(item.block) * kSteps * kPartialStepBytes<Token, kMxfp8>;
}

// Step k of a block, whose place is `to`. stage: as above; the lane's is lane_id() * 16 on.
template <typename Token, bool kMxfp8, bool kStaged>
__device__ __forceinline__ void sum_step(const Work& sums, const Work& partials, uint32_t now, const Item& item,
                                         int k, int left, const uint8_t* stage, uint32_t lane_stage, uint8_t* to) {
  using E = Elements<Token>;
  const bool live = k * kStepChunks < left;
  E own;
  if constexpr (kStaged) {
    own = sum_staged_slots<Token>(item, sums.c.slot_weights != nullptr, lane_stage);
  } else {
    own = sum_slots<Token>(item.is_sum ? sums : partials, item, item.block * kBlockChunks + k * kStepChunks + lane_id(),
                           live);
  }
  if (!item.is_sum) {
    store_partial<Token, kMxfp8>(own, to + k * kPartialStepBytes<Token, kMxfp8>, live);
    return;
  }
  E sum = sum_ranks<Token, kMxfp8, kStaged>(sums, now, item, item.block, k, stage, own, live);
  if (!live) return;
  uint8_t* result = to + k * kStepBytes;
  const int alignment = kStaged ? 16 : sums.result_alignment;
  if (sums.c.accumulate) {
    E before;
    before.load(result, alignment);
    add(sum, &before);
    sum = before;
  }
  sum.store(result, alignment);
}

// ticket: not null: the last block comes to the meeting.
template <typename Token, bool kMxfp8, bool kStaged>
__global__ void __launch_bounds__(kThreads, NVTE_X_BLOCKS)
    combine_rows(const __grid_constant__ Work sums, const __grid_constant__ Work partials,
                 const __grid_constant__ Meeting meeting, uint32_t* ticket) {
  extern __shared__ __align__(128) uint8_t rings[];
  wait_for_kernel_before();
  if (ticket == nullptr) let_next_kernel_start();
  const uint32_t now = *sums.c.pools.epoch;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (sums.items > 0 && sums.c.own_values != nullptr && sums.c.mode != Sums::kEarly) tell_missing(sums.c, now);
    if (partials.c.send_values)
      *partials.c.pools.to_write<uint32_t>(partials.c.values.given, now) = gives_values(partials.c);
  }
  const uint8_t* ring = rings + warp_id() * kRingBytes;
  const uint32_t lane_ring = kStaged ? shared_address(ring) + lane_id() * 16 : 0;
  const uint32_t all = sums.items + partials.items, stride = gridDim.x * kWarps;
  // Items first, first + stride, ..: a block of steps is summed while the next one, of this item or the next, is asked for.
  uint32_t asked_at = blockIdx.x * kWarps + warp_id();
  Coming coming;
  Item item, asked;
  Sources sources;
  item.blocks = asked.blocks = 0;
  if (asked_at < all) coming = look_at(sums, partials, asked_at);
  const auto left_of = [&](const Item& i) {
    return (i.is_sum ? sums.c.chunks : partials.c.chunks) - i.block * kBlockChunks - lane_id();
  };
  // Goes on to the next block that there is something to do in; false: there is none.
  const auto advance = [&] {
    if (asked.blocks > 0) {
      ++asked.block;
      if (--asked.blocks > 0) {
#pragma unroll
        for (int s = 0; s < kMostSources; ++s) {
          sources.at[s] += kSteps * (s < asked.slots ? kStepBytes : kPartialStepBytes<Token, kMxfp8>);
        }
        return true;
      }
    }
    while (asked_at < all) {
      open_item<Token, kMxfp8, kStaged>(coming.is_sum ? sums : partials, coming, now, &asked, &sources);
      const bool values_only = asked.blocks == 0;
      asked_at += stride;
      if (asked_at < all) coming = look_at(sums, partials, asked_at);
      if (!values_only || asked.is_sum) move_values(asked.is_sum ? sums.c : partials.c, now, asked);
      if (asked.blocks > 0) return true;
      close_item(asked.is_sum ? sums : partials, asked, now);
    }
    return false;
  };
  while (true) {
    const bool more = advance();
    if (!more && item.blocks == 0) break;
    uint8_t* to = item.blocks == 0 ? nullptr : place_of_block<Token, kMxfp8>(item.is_sum ? sums : partials, item, now);
    const int left = left_of(item), asked_left = left_of(asked);
#pragma unroll 1
    for (int k = 0; k < kSteps; ++k) {
      if (item.blocks > 0) {
        if constexpr (kStaged) {
          wait_copies<kSteps - 1>();
          if (kMxfp8) __syncwarp();  // lanes read what others have copied
        }
        sum_step<Token, kMxfp8, kStaged>(sums, partials, now, item, k, left, ring + k * kStageBytes,
                                         lane_ring + k * kStageBytes, to);
        if (kStaged && kMxfp8) __syncwarp();
      }
      if constexpr (kStaged) {
        if (more) ask_for_step<Token, kMxfp8>(asked, sources, k, asked_left, lane_ring);
        commit_copies();
      }
    }
    if (item.blocks == 1) close_item(item.is_sum ? sums : partials, item, now);
    item = asked;
    if (!more) item.blocks = 0;
  }
  if (ticket != nullptr && is_last_block(ticket)) meet(meeting);
}

int env(const char* name, int otherwise) {
  const char* v = std::getenv(name);
  return v == nullptr ? otherwise : std::atoi(v);
}

Work work_of(DType dtype, const CombineArguments& c, int64_t rows, const LaunchContext& context) {
  Work w{};
  w.c = c;
  w.partial_bytes = partial_row_bytes(dtype, c.mxfp8, c.chunks);
  w.row_blocks = (c.chunks + kBlockChunks - 1) / kBlockChunks;
  w.blocks = rows * w.row_blocks > int64_t{8} * 16 * context.sms ? env("NVTE_X_STRETCH", 2) : 1;
  w.stretches = static_cast<uint32_t>((w.row_blocks + w.blocks - 1) / w.blocks);
  w.items = static_cast<uint32_t>(rows * w.stretches);
  w.slot_alignment = alignment_of(c.slots, c.slot_stride);
  w.result_alignment = alignment_of(c.result, c.result_stride);
  return w;
}

template <typename Function>
Status with_token(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kBFloat16:
      return function(Bf16Token());
    case DType::kFloat16:
      return function(Fp16Token());
    default:
      return function(Fp32Token());
  }
}

}  // namespace

int32_t most_stretches(int64_t row_bytes) {
  return static_cast<int32_t>((row_bytes / 16 + kStepChunks - 1) / kStepChunks);
}

int64_t partial_row_bytes(DType dtype, bool mxfp8, int32_t chunks) {
  const int64_t steps = (chunks + kStepChunks - 1) / kStepChunks;
  return mxfp8 ? steps * mxfp8_step_bytes(elements_per_chunk(static_cast<int>(dtype_bytes(dtype))))
               : chunks * int64_t{16};
}

Status launch_combine(DType dtype, const CombineArguments* sums, const CombineArguments* partials,
                      const Meeting& meeting, uint32_t* ticket, const LaunchContext& context) {
  const CombineArguments& any = sums != nullptr ? *sums : *partials;
  const RouteMaps& m = any.maps;
  Work s = work_of(dtype, any, sums != nullptr ? sums->tokens : 0, context);
  Work p = work_of(dtype, partials != nullptr ? *partials : any,
                   partials != nullptr ? static_cast<int64_t>(m.size - 1) * m.tokens : 0, context);
  if (partials == nullptr) p.c.send_values = false;
  if (s.items + p.items == 0 && partials == nullptr) return Status();
  const bool staged = s.slot_alignment >= 16 && s.result_alignment >= 16 && m.top_k <= kMostSources;
  if (sums != nullptr && sums->mode == Sums::kEarly) {
    s.lead = static_cast<uint32_t>(p.items * int64_t{env("NVTE_X_LEAD", 12)} / 64);
    if (!staged) s.items = 0;
  }
  if (s.items > 0 && p.items > 0) {
    const uint64_t rest = p.items - s.lead, both = rest + s.items;
    s.share = static_cast<uint32_t>(((rest << 32) + both - 1) / both);
  }
  LaunchShape shape;
  shape.threads = kThreads;
  shape.blocks = std::max<int64_t>(1, (int64_t{s.items} + p.items + kWarps - 1) / kWarps);
  shape.bounded = true;
  shape.overlaps = true;
  shape.shared_bytes = staged ? kWarps * kRingBytes : 0;
  uint32_t* const meets = partials != nullptr ? ticket : nullptr;
  LaunchContext resident = context;
  if (env("NVTE_X_PERSIST", 1) && resident.max_sms == 0) resident.max_sms = resident.sms;
  return with_token(dtype, [&](auto token) {
    using Token = decltype(token);
    const auto launch = [&](auto mxfp8, auto through_shared) {
      return launch_kernel<combine_rows<Token, decltype(mxfp8)::value, decltype(through_shared)::value>>(
          "combine", resident, shape, s, p, meeting, meets);
    };
    const auto with_format = [&](auto through_shared) {
      return any.mxfp8 ? launch(std::true_type(), through_shared) : launch(std::false_type(), through_shared);
    };
    return staged ? with_format(std::true_type()) : with_format(std::false_type());
  });
}

}  // namespace nvte_ep
