// A warp sums a stretch of columns of one token: its slots on this rank in FP32, in order of the choices. For another rank's
// token the sum is rounded to a partial row; for an own one the partial rows of the peers are added, ranks in order.
//
// A warp's sources (slots, and partial rows of peers) come through a ring of stages in shared memory, and it is always ahead in
// asking for them, from one row to the next: what a multiprocessor has on its way is what it moves in the end, all the more where
// there are few of them, or where the rows lie behind a link.
#include "transports/peer/combine.h"

#include <cstdlib>

#include "device/bulk_copy.cuh"
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
constexpr int kStages = 4;
constexpr int kMostStaged = 16;  // sources of a token that go through shared memory; more, or unaligned ones, do not
constexpr int kLongStretch = 8;  // steps of an item, where there are many
constexpr int kSlotsInFlight = 4;  // that do not go through shared memory

// A step: the chunks of 16 bytes that a warp sums at a time.
#ifndef NVTE_X_LANE
#define NVTE_X_LANE 1
#endif
constexpr int kLaneChunks = NVTE_X_LANE;
constexpr int kStepChunks = kWarp * kLaneChunks;
constexpr int kSourceBytes = kStepChunks * 16;  // of a step

__host__ __device__ constexpr int elements_per_chunk(int token_bytes) { return 16 / token_bytes; }
// A step of a partial row in MXFP8: codes | scales.
__host__ __device__ constexpr int mxfp8_step_bytes(int elements_per_chunk) {
  return kStepChunks * elements_per_chunk +
         (kStepChunks * elements_per_chunk / Mxfp8::kBlock + 15) / 16 * 16;
}

struct Work {
  CombineArguments c;
  int64_t partial_bytes;
  int32_t steps;      // of an item
  int32_t stretches;  // items of a row
  int64_t items;
  int32_t staged;  // most sources of a token, that go through shared memory; 0: they do not
  int32_t stages;
  int64_t lead;  // of partial rows, before the first early sums
  int slot_alignment, result_alignment;
  __host__ __device__ int stage_bytes() const { return staged * kSourceBytes; }
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

// Some steps of a row: of an own token's, or of the partial row of another rank's.
struct Place {
  bool is_sum;
  int32_t other;  // of a partial row: the rank, among the others
  int32_t token;
  int32_t first_step, steps;  // no steps: the token has no slot here

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
// Sources: slots in order of the choices, one a lane, then partial rows, ranks in order.
struct Item : Place {
  const uint8_t* source;  // the lane's, at first_step
  float weight;           // the lane's
  int32_t slots, sources;
  int32_t before;  // partial rows of ranks before this one
};

template <typename Token, bool kMxfp8>
constexpr int kPartialStepBytes = kMxfp8 ? mxfp8_step_bytes(Elements<Token>::kCount) : kSourceBytes;

template <typename Token, bool kMxfp8>
__device__ __forceinline__ const uint8_t* partial_row(const Work& w, uint32_t now, int32_t holder,
                                                      int64_t token) {
  const RouteMaps& m = w.c.maps;
  const int64_t place = static_cast<int64_t>(place_among_others(m.rank, holder)) * m.tokens + token;
  return w.c.pools.to_read<uint8_t>(w.c.outbox, holder, now) + place * w.partial_bytes;
}

__device__ __forceinline__ uint32_t divide(int64_t a, uint32_t b) {
  return static_cast<uint32_t>(a >> 32 == 0 ? static_cast<uint32_t>(a) / b : a / b);
}

// The items of a kernel are the sums of one pass of columns, and evenly among them the partial rows of the next.
__device__ __forceinline__ Coming look_at(const Work& sums, const Work& partials, int64_t index) {
  Coming item;
  item.is_sum = partials.items == 0;
  if (sums.items > 0 && partials.items > 0) {
    const int64_t lead = sums.lead;
    if (index >= lead) {
      const int64_t rest = partials.items - lead, all = sums.items + rest;
      index -= lead;
      const int64_t before = index * rest / all;
      item.is_sum = (index + 1) * rest / all == before;
      index = item.is_sum ? index - before : before + lead;
    }
  }
  const Work& w = item.is_sum ? sums : partials;
  const RouteMaps& m = w.c.maps;
  const uint32_t stretches = static_cast<uint32_t>(w.stretches);
  const uint32_t row = divide(index, stretches);
  const int32_t stretch = static_cast<int32_t>(index - static_cast<int64_t>(row) * stretches);
  const uint32_t others = static_cast<uint32_t>(m.size - 1);
  item.token = static_cast<int32_t>(item.is_sum ? row : row / others);
  item.other = static_cast<int32_t>(item.is_sum ? 0 : row % others);
  item.first_step = stretch * w.steps;
  item.steps = min(w.steps, (w.c.chunks + kStepChunks - 1) / kStepChunks - item.first_step);
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
__device__ __forceinline__ void read_after_announcement() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Every lane calls, and gets the same but source and weight.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ Item open_item(const Work& w, const Coming& coming, uint32_t now) {
  const CombineArguments& c = w.c;
  const RouteMaps& m = c.maps;
  Item item;
  static_cast<Place&>(item) = coming;
  item.source = nullptr;
  item.weight = 1.0f;
  item.slots = item.sources = item.before = 0;
  if (item.is_sum && c.mode == Sums::kLeft && coming.stamp == now) item.steps = 0;
  const bool early = item.is_sum && c.mode == Sums::kEarly;
  const uint32_t reads = early ? now + 1 : now;
  if (w.staged == 0) {
    bool any = item.is_sum;
    for (int k = lane_id(); k < m.top_k; k += kWarp) any |= slots_of(m, item.rank(m), item.token)[k] >= 0;
    if (!__any_sync(kAllLanes, any)) item.steps = 0;
    return item;
  }
  const int64_t column = (c.first_chunk + static_cast<int64_t>(item.first_step) * kStepChunks) * 16;
  for (unsigned left = __ballot_sync(kAllLanes, coming.slot >= 0); left != 0; left &= left - 1) {
    const int32_t slot = __shfl_sync(kAllLanes, coming.slot, __ffs(static_cast<int>(left)) - 1);
    if (lane_id() == item.slots) {
      item.source = c.slots + slot * c.slot_stride + column;
      if (c.slot_weights != nullptr) item.weight = c.slot_weights[slot];
    }
    ++item.slots;
  }
  item.sources = item.slots;
  if (!item.is_sum) {
    if (item.slots == 0) item.steps = 0;
    return item;
  }
  for (int word = 0; word < m.holder_words(); ++word) {
    for (uint32_t left = word == 0 ? coming.holders : holders_of(m, item.token)[word]; left != 0; left &= left - 1) {
      const int32_t holder = word * 32 + __ffs(static_cast<int>(left)) - 1;
      if (holder == m.rank) continue;
      if (lane_id() == item.sources) {
        item.source = partial_row<Token, kMxfp8>(w, reads, holder, item.token) +
                      static_cast<int64_t>(item.first_step) * kPartialStepBytes<Token, kMxfp8>;
      }
      item.before += holder < m.rank;
      ++item.sources;
      if (early && !is_ready(c, holder, item.token, reads)) item.steps = 0;
    }
  }
  if (early) read_after_announcement();
  return item;
}

// The warp is done with an item.
__device__ __forceinline__ void close_item(const Work& w, const Item& item, uint32_t now) {
  const CombineArguments& c = w.c;
  const RouteMaps& m = c.maps;
  if (c.mode != Sums::kEarly || lane_id() != 0) return;
  if (item.is_sum) {
    if (item.steps > 0)
      c.early.stamps[static_cast<int64_t>(item.token) * w.stretches + item.first_step / w.steps] = now + 1;
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

__device__ __forceinline__ int live_chunks(const Work& w, const Item& item, int step) {
  return min(kStepChunks, w.c.chunks - (item.first_step + step) * kStepChunks);
}

// ---- a step through shared memory ---------------------------------------------------------------------------------------

// kBulk: a lane starts the copy of its own source; else all lanes copy each.
template <typename Token, bool kMxfp8, bool kBulk>
__device__ __forceinline__ void fetch_step(const Work& w, const Item& item, int step, uint32_t stage,
                                           uint32_t barrier) {
  constexpr int kPartialStep = kPartialStepBytes<Token, kMxfp8>;
  const int bytes = live_chunks(w, item, step) * 16;
  const int partial_bytes = kMxfp8 ? kPartialStep : bytes;
  const bool is_slot = lane_id() < item.slots;
  const uint8_t* from = item.source + static_cast<int64_t>(step) * (is_slot ? kSourceBytes : kPartialStep);
  if constexpr (kBulk) {
    if (lane_id() == 0)
      expect_bytes(barrier, item.slots * bytes + (item.sources - item.slots) * partial_bytes);
    if (lane_id() < item.sources)
      copy_bulk(stage + lane_id() * kSourceBytes, from, is_slot ? bytes : partial_bytes, barrier);
  } else {
    const uint64_t address = reinterpret_cast<uint64_t>(from);
#pragma unroll 8
    for (int s = 0; s < item.sources; ++s) {
      const uint64_t base = __shfl_sync(kAllLanes, address, s);
      const int live = s < item.slots ? bytes : partial_bytes;
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i) {
        const int at = (i * kWarp + lane_id()) * 16;
        if (at < live) copy_async16(stage + s * kSourceBytes + at, reinterpret_cast<const void*>(base + at));
      }
    }
    arrive_when_copied(barrier);
  }
}

template <typename Token>
__device__ __forceinline__ Elements<Token> staged_chunk(const uint8_t* from) {
  Elements<Token> e;
  e.unpack(*reinterpret_cast<const uint4*>(from));
  return e;
}

// Sums of the lane's chunk i of a step.
template <typename Token>
__device__ __forceinline__ Elements<Token> sum_staged_slots(const Work& w, const Item& item,
                                                            const uint8_t* stage, int chunk) {
  Elements<Token> sum;
  clear(&sum);
  const uint8_t* from = stage + chunk * 16;
  if (w.c.slot_weights != nullptr) {
#pragma unroll 4
    for (int s = 0; s < item.slots; ++s) {
      const float weight = __shfl_sync(kAllLanes, item.weight, s);
      add_weighted(staged_chunk<Token>(from + s * kSourceBytes), weight, &sum);
    }
  } else {
#pragma unroll 8
    for (int s = 0; s < item.slots; ++s) add(staged_chunk<Token>(from + s * kSourceBytes), &sum);
  }
  return sum;
}

template <typename Token, bool kMxfp8>
__device__ __forceinline__ Elements<Token> partial_chunk(const uint8_t* step, int chunk) {
  if constexpr (kMxfp8) {
    constexpr int kCount = Elements<Token>::kCount;
    Mxfp8Elements<Token> e;
    const uint8_t* from = step + chunk * kCount;
#pragma unroll
    for (int i = 0; i < e.kWords; ++i) e.word[i] = reinterpret_cast<const uint32_t*>(from)[i];
    e.scale = step[kStepChunks * kCount + chunk * kCount / Mxfp8::kBlock];
    return e.decode();
  } else {
    return staged_chunk<Token>(step + chunk * 16);
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
__device__ __forceinline__ Elements<Token> sum_slots(const Work& w, const int32_t* slots, int chunk,
                                                     bool live) {
  const int64_t at = (static_cast<int64_t>(w.c.first_chunk) + chunk) * 16;
  Elements<Token> sum;
  clear(&sum);
  for (int k = 0; k < w.c.maps.top_k; k += kWarp)
    add_slots(w, choice_of(w.c, slots, k + lane_id()), at, live, &sum);
  return sum;
}

// ---- what becomes of a sum ------------------------------------------------------------------------------------------------

// A lane's chunk of a partial row. Every lane calls.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ void store_partial(const Elements<Token>& sum, uint8_t* step, int chunk, bool live) {
  if constexpr (kMxfp8) {
    constexpr int kCount = Elements<Token>::kCount;
    Mxfp8Elements<Token> e;
    e.encode(sum);
    if (!live) return;
    uint32_t* to = reinterpret_cast<uint32_t*>(step + chunk * kCount);
#pragma unroll
    for (int i = 0; i < e.kWords; ++i) to[i] = e.word[i];
    if (chunk * kCount % Mxfp8::kBlock == 0)
      step[kStepChunks * kCount + chunk * kCount / Mxfp8::kBlock] = static_cast<uint8_t>(e.scale);
  } else {
    if (live) sum.store(step + chunk * 16, 16);
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
  if (item.first_step != 0 || (item.is_sum && c.mode == Sums::kEarly)) return;
  if (item.is_sum) {
    if (c.own_values != nullptr) gather_values(c, now, item.token);
  } else if (c.send_values && c.slot_values != nullptr) {
    send_values(c, now, item);
  }
}

// own: the slots of this rank. stage: where the sources are; null: where they lie.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ void finish_sum(const Work& w, uint32_t now, const Item& item, int step, int chunk,
                                           const uint8_t* stage, const Elements<Token>& before,
                                           Elements<Token> own) {
  using E = Elements<Token>;
  const RouteMaps& m = w.c.maps;
  const int row_chunk = (item.first_step + step) * kStepChunks + chunk;
  const bool live = row_chunk < w.c.chunks;
  if constexpr (kMxfp8) round_to_mxfp8(&own);
  E sum = own;
  if (stage != nullptr) {
    if (item.sources > item.slots) {
      const uint8_t* partials = stage + item.slots * kSourceBytes;
      clear(&sum);
      const int others = item.sources - item.slots;
      for (int p = 0; p <= others; ++p) {
        if (p == item.before) add(own, &sum);
        if (p < others) add(partial_chunk<Token, kMxfp8>(partials + p * kSourceBytes, chunk), &sum);
      }
    }
  } else if (m.size > 1) {
    clear(&sum);
    for (int word = 0; word < m.holder_words(); ++word) {
      uint32_t left = holders_of(m, item.token)[word];
      for (; left != 0; left &= left - 1) {
        const int32_t holder = word * 32 + __ffs(static_cast<int>(left)) - 1;
        if (holder == m.rank) {
          add(own, &sum);
        } else if (live) {
          const uint8_t* row = partial_row<Token, kMxfp8>(w, now, holder, item.token);
          row += static_cast<int64_t>(item.first_step + step) * kPartialStepBytes<Token, kMxfp8>;
          add(partial_chunk<Token, kMxfp8>(row, chunk), &sum);
        }
      }
    }
  }
  if (!live) return;
  if (w.c.accumulate) {
    E total = before;
    add(sum, &total);
    sum = total;
  }
  uint8_t* result = w.c.result + item.token * w.c.result_stride;
  sum.store(result + (static_cast<int64_t>(w.c.first_chunk) + row_chunk) * 16, w.result_alignment);
}

template <typename Token, bool kMxfp8>
__device__ __forceinline__ void sum_step(const Work& w, uint32_t now, const Item& item, int step,
                                         const uint8_t* stage, uint32_t barrier, uint32_t parity) {
  using E = Elements<Token>;
  const RouteMaps& m = w.c.maps;
  E before[kLaneChunks];
  if (item.is_sum && w.c.accumulate) {
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i) {
      const int row_chunk = (item.first_step + step) * kStepChunks + i * kWarp + lane_id();
      const uint8_t* result = w.c.result + item.token * w.c.result_stride;
      if (row_chunk < w.c.chunks)
        before[i].load(result + (static_cast<int64_t>(w.c.first_chunk) + row_chunk) * 16, w.result_alignment);
    }
  }
  if (stage != nullptr) wait_copy_barrier(barrier, parity);
#pragma unroll
  for (int i = 0; i < kLaneChunks; ++i) {
    const int chunk = i * kWarp + lane_id();
    const int row_chunk = (item.first_step + step) * kStepChunks + chunk;
    const E own = stage != nullptr ? sum_staged_slots<Token>(w, item, stage, chunk)
                                   : sum_slots<Token>(w, slots_of(m, item.rank(m), item.token), row_chunk,
                                                      row_chunk < w.c.chunks);
    if (item.is_sum) {
      finish_sum<Token, kMxfp8>(w, now, item, step, chunk, stage, before[i], own);
    } else {
      uint8_t* row = w.c.pools.to_write<uint8_t>(w.c.outbox, now) +
                     (static_cast<int64_t>(item.other) * m.tokens + item.token) * w.partial_bytes;
      store_partial<Token, kMxfp8>(
          own, row + static_cast<int64_t>(item.first_step + step) * kPartialStepBytes<Token, kMxfp8>, chunk,
          row_chunk < w.c.chunks);
    }
  }
}

// ticket: not null: the last block comes to the meeting.
template <typename Token, bool kMxfp8, bool kBulk>
__global__ void __launch_bounds__(kThreads, 3)
    combine_rows(const __grid_constant__ Work sums, const __grid_constant__ Work partials,
                 const __grid_constant__ Meeting meeting, uint32_t* ticket) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) uint64_t barriers[kWarps][8];
  wait_for_kernel_before();
  if (ticket == nullptr) let_next_kernel_start();
  const uint32_t now = *sums.c.pools.epoch;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (sums.items > 0 && sums.c.own_values != nullptr && sums.c.mode != Sums::kEarly) tell_missing(sums.c, now);
    if (partials.c.send_values) *partials.c.pools.to_write<uint32_t>(partials.c.values.given, now) = gives_values(partials.c);
  }
  const bool staged = sums.staged != 0;
  const uint32_t stages = static_cast<uint32_t>(sums.stages);
  const int stage_bytes = sums.stage_bytes();
  const uint8_t* ring = shared + warp_id() * stages * stage_bytes;
  const uint32_t ring_address = shared_address(ring), barrier = shared_address(barriers[warp_id()]);
  if (staged) {
    if (lane_id() < static_cast<int>(stages)) init_copy_barrier(barrier + lane_id() * 8, kBulk ? 1 : kWarp);
    publish_copy_barriers();
    __syncwarp();
  }
  const int64_t all = sums.items + partials.items, stride = static_cast<int64_t>(gridDim.x) * kWarps;
  // Items first, first + stride, ..: one is summed, while it or the next is asked for.
  int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id() - stride, asked_at = at;
  Coming coming;
  if (at + stride < all) coming = look_at(sums, partials, at + stride);
  Item item, asked;
  item.steps = asked.steps = 0;
  item.token = -1;
  int step = 0, asked_step = 0;
  uint32_t in_ring = 0, stage = 0, asked_stage = 0, parity = 0;
  while (true) {
    while (in_ring < stages) {
      if (asked_step == asked.steps) {
        if (asked_at != at || at + stride >= all) break;
        asked_at += stride;
        asked = open_item<Token, kMxfp8>(coming.is_sum ? sums : partials, coming, now);
        if (asked_at + stride < all) coming = look_at(sums, partials, asked_at + stride);
        asked_step = 0;
        continue;
      }
      if (staged) {
        fetch_step<Token, kMxfp8, kBulk>(asked.is_sum ? sums : partials, asked, asked_step,
                                         ring_address + asked_stage * stage_bytes, barrier + asked_stage * 8);
      }
      ++asked_step;
      ++in_ring;
      if (++asked_stage == stages) asked_stage = 0;
    }
    if (step == item.steps) {
      if (item.token >= 0) close_item(item.is_sum ? sums : partials, item, now);
      if (asked_at == at) break;  // there is no next one
      at = asked_at;
      item = asked;
      step = 0;
      if (item.steps > 0 || sums.c.mode == Sums::kLeft) move_values(item.is_sum ? sums.c : partials.c, now, item);
      continue;
    }
    sum_step<Token, kMxfp8>(item.is_sum ? sums : partials, now, item, step,
                            staged ? ring + stage * stage_bytes : nullptr, barrier + stage * 8, parity);
    __syncwarp();
    ++step;
    --in_ring;
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
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
  const int32_t steps = (c.chunks + kStepChunks - 1) / kStepChunks;
  const int32_t longest = env("NVTE_X_STRETCH", kLongStretch);
  const bool many = rows * steps > int64_t{4} * longest * 24 * context.sms;
  w.stretches = many ? (steps + longest - 1) / longest : steps;
  w.steps = (steps + w.stretches - 1) / w.stretches;
  w.stretches = (steps + w.steps - 1) / w.steps;
  w.items = rows * w.stretches;
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
  const bool staged = s.slot_alignment >= 16 && m.top_k <= kMostStaged;
  if (sums != nullptr && sums->mode == Sums::kEarly) {
    s.lead = p.items * env("NVTE_X_LEAD", 12) / 64;
    if (!staged) s.items = 0;
  }
  s.staged = p.staged = staged ? m.top_k : 0;
  s.stages = p.stages = env("NVTE_X_STAGES", kStages);
  LaunchShape shape;
  shape.threads = kThreads;
  shape.blocks = std::max<int64_t>(1, (s.items + p.items + kWarps - 1) / kWarps);
  shape.bounded = true;
  shape.overlaps = true;
  shape.shared_bytes = kWarps * s.stages * s.stage_bytes();
  uint32_t* const meets = partials != nullptr ? ticket : nullptr;
  LaunchContext resident = context;
  if (env("NVTE_X_PERSIST", 1) && resident.max_sms == 0) resident.max_sms = resident.sms;
  return with_token(dtype, [&](auto token) {
    using Token = decltype(token);
    const auto launch = [&](auto mxfp8, auto bulk) {
      return launch_kernel<combine_rows<Token, decltype(mxfp8)::value, decltype(bulk)::value>>(
          "combine", resident, shape, s, p, meeting, meets);
    };
    const auto with_bulk = [&](auto bulk) {
      return any.mxfp8 ? launch(std::true_type(), bulk) : launch(std::false_type(), bulk);
    };
    return env("NVTE_X_BULK", 1) ? with_bulk(std::true_type()) : with_bulk(std::false_type());
  });
}

}  // namespace nvte_ep
