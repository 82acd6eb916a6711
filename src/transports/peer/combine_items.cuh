// What the warps of combine work on: some blocks of columns of a row, and where the sources of its sum lie.
#ifndef NVTE_EP_TRANSPORTS_PEER_COMBINE_ITEMS_CUH_
#define NVTE_EP_TRANSPORTS_PEER_COMBINE_ITEMS_CUH_

#include <cstdint>

#include "device/elements.cuh"
#include "device/warp.cuh"
#include "transports/peer/combine.h"
#include "transports/peer/combine_share.h"

namespace nvte_ep {

// A step: the chunks of 16 bytes that a warp sums at a time. A block: the steps that a warp's ring in shared memory holds.
constexpr int kStepChunks = device::kWarp;
constexpr int kStepBytes = kStepChunks * 16;
constexpr int kMostSources = 8;  // of a token, that go through shared memory

// A step of a partial row in MXFP8: codes | scales.
__host__ __device__ constexpr int mxfp8_step_bytes(int elements_per_chunk) {
  return kStepChunks * elements_per_chunk + (kStepChunks * elements_per_chunk / Mxfp8::kBlock + 15) / 16 * 16;
}
template <typename Token, bool kMxfp8>
constexpr int kPartialStepBytes = kMxfp8 ? mxfp8_step_bytes(device::Elements<Token>::kCount) : kStepBytes;

// The rows of a kernel of one kind, cut into items.
struct Pass {
  TokenRange tokens;   // of a rank
  int32_t blocks;      // of an item
  uint32_t stretches;  // items of a row
  uint32_t items;
};
struct Work {
  CombineArguments c;
  int32_t block_steps;
  int32_t row_blocks;
  int64_t partial_bytes;  // of a row
  Pass sums;              // of this rank's tokens
  Pass partials;          // rows of other ranks' tokens
  uint32_t share;         // of the warps that make partial rows, where there are both kinds, of 2^32
  int slot_alignment, result_alignment;
};

struct Place {
  bool is_sum;   // else a partial row
  int32_t rank;  // whose token it is
  int32_t token;
  int32_t step;    // the first one of the next block
  int32_t blocks;  // of the row, from it on; none: the token has no slot here

  __device__ __forceinline__ bool begins_row() const { return step == 0; }
};
// What is read of the routing, early: it takes long to come.
struct Coming : Place {
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

__device__ __forceinline__ const int32_t* slots_of(const RouteMaps& m, int32_t rank, int64_t token) {
  return m.row_slots + (static_cast<int64_t>(rank) * m.tokens + token) * m.top_k;
}
__device__ __forceinline__ const uint32_t* holders_of(const RouteMaps& m, int64_t token) {
  return m.holders + token * m.holder_words();
}
// The row of a token in a holder's outbox: ranks in order, without the holder.
__device__ __forceinline__ int64_t outbox_row(const TokenRange& pass, int32_t rank, int32_t holder,
                                              int32_t token) {
  return static_cast<int64_t>(place_among_others(rank, holder)) * pass.count + token - pass.first;
}

// The partial row of an own token at a holder, after the meeting; the lane's chunk of the first step of a block.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ const uint8_t* partial_row(const Work& w, uint32_t now, int32_t holder,
                                                      const Place& item) {
  const int64_t row = outbox_row(w.sums.tokens, w.c.maps.rank, holder, item.token);
  return w.c.pools.to_read<uint8_t>(w.c.outbox, holder, now) + row * w.partial_bytes +
         int64_t{item.step} * kPartialStepBytes<Token, kMxfp8>;
}

__device__ __forceinline__ CombineShare share_of(const Work& w) {
  const uint32_t warp = blockIdx.x * (blockDim.x / device::kWarp) + device::warp_id();
  return share_of(warp, gridDim.x * (blockDim.x / device::kWarp), w.sums.items, w.partials.items, w.share);
}

__device__ __forceinline__ Coming look_at(const Work& w, const CombineShare& share) {
  const RouteMaps& m = w.c.maps;
  const uint32_t index = share.next;
  Coming item;
  item.is_sum = share.is_sum;
  const uint32_t stretches = item.is_sum ? w.sums.stretches : w.partials.stretches;
  const uint32_t row = index / stretches;
  const int32_t blocks = item.is_sum ? w.sums.blocks : w.partials.blocks;
  const int32_t block = static_cast<int32_t>(index - row * stretches) * blocks;
  item.step = block * w.block_steps;
  item.blocks = min(blocks, w.row_blocks - block);
  item.token = static_cast<int32_t>(row);
  item.rank = m.rank;
  if (!item.is_sum) {  // ranks side by side
    const uint32_t others = static_cast<uint32_t>(m.size - 1);
    item.token = static_cast<int32_t>(others == 1 ? row : row / others);
    const int32_t other = static_cast<int32_t>(row - static_cast<uint32_t>(item.token) * others);
    item.rank = rank_among_others(other, m.rank);
  }
  item.token += item.is_sum ? w.sums.tokens.first : w.partials.tokens.first;
  const int lane = device::lane_id();
  item.slot = lane < m.top_k ? slots_of(m, item.rank, item.token)[lane] : -1;
  item.holders = item.is_sum && m.size > 1 ? *holders_of(m, item.token) : 0;
  return item;
}

// Of a token with at most kMostSources choices. Every lane calls.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ void open_item(const Work& w, const Coming& coming, uint32_t now, Item* item,
                                          Sources* sources) {
  using device::kAllLanes;
  const CombineArguments& c = w.c;
  const RouteMaps& m = c.maps;
  static_cast<Place&>(*item) = coming;
  item->choices = __ballot_sync(kAllLanes, coming.slot >= 0);
  item->slots = item->sources = __popc(item->choices);
  item->before = 0;
  if (!item->is_sum && item->slots == 0) item->blocks = 0;
  item->weight = c.slot_weights != nullptr && coming.slot >= 0 ? c.slot_weights[coming.slot] : 1.0f;
  const uint8_t* lane_slots = c.slots + int64_t{item->step} * kStepBytes + device::lane_id() * 16;
  unsigned left = item->choices;
#pragma unroll
  for (int s = 0; s < kMostSources; ++s) {
    if (left == 0) break;
    const int32_t slot = __shfl_sync(kAllLanes, coming.slot, __ffs(static_cast<int>(left)) - 1);
    left &= left - 1;
    sources->at[s] = lane_slots + slot * c.slot_stride;
  }
  if (!item->is_sum || m.size == 1) return;
  for (int word = 0; word < m.holder_words(); ++word) {
    uint32_t holders = word == 0 ? coming.holders : holders_of(m, item->token)[word];
    if (m.rank / 32 == word) holders &= ~(1u << m.rank % 32);
    for (; holders != 0; holders &= holders - 1) {
      const int32_t holder = word * 32 + __ffs(static_cast<int>(holders)) - 1;
      const uint8_t* row = partial_row<Token, kMxfp8>(w, now, holder, *item) + device::lane_id() * 16;
#pragma unroll
      for (int s = 0; s < kMostSources; ++s) {  // registers have no index
        if (s == item->sources) sources->at[s] = row;
      }
      item->before += holder < m.rank;
      ++item->sources;
    }
  }
}

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_COMBINE_ITEMS_CUH_
