// A warp sums some columns of one token: its slots on this rank in FP32, in order of the choices. For another rank's token the
// sum is rounded to a partial row; for an own one the partial rows of the peers are added, ranks in order. The tokens go in
// passes: partial rows of the next one are made while those of the one before are on the links.
//
// The sources of a sum (slots, and partial rows of peers) come through a ring of steps in shared memory. A warp asks for the
// steps that follow, of its item or, where num_sms bounds the grid and it has several, of the next, before it has summed those that
// are there: what is on its way to a multiprocessor is what it gets done, all the more where there are few of them or where the
// rows lie behind a link.
#include "transports/peer/combine.h"

#include "device/kernel_order.cuh"
#include "device/memory.cuh"
#include "transports/peer/combine_items.cuh"
#include "transports/peer/combine_values.cuh"
#include "transports/peer/meeting.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksOfASm = 4;                         // registers allow no more
constexpr int kStageBytes = kMostSources * kStepBytes;  // of a step
constexpr int kSlotsInFlight = 4;                       // of those that do not go through shared memory
constexpr int64_t kItemsOfAWarp = 8;  // for each that a multiprocessor holds, where rows are many
// Steps of a warp's ring. The deeper one has more on its way; the shorter one gives small batches more items, for more warps.
constexpr int kManySteps = 3;
constexpr int kFewSteps = 2;

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

// Chunks from the lane's in a block's first step to the row's end.
__device__ __forceinline__ int chunks_left(const Work& w, const Place& item) {
  return w.c.chunks - item.step * kStepChunks - lane_id();
}

// ---- partial rows -----------------------------------------------------------------------------------------------------

// The lane's chunk of a step, in shared memory or at its holder.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ Elements<Token> load_partial(const uint8_t* step) {
  constexpr int kCount = Elements<Token>::kCount;
  if constexpr (kMxfp8) {
    Mxfp8Elements<Token> e;
    const uint32_t* from = reinterpret_cast<const uint32_t*>(step + lane_id() * kCount);
#pragma unroll
    for (int i = 0; i < e.kWords; ++i) e.word[i] = from[i];
    e.scale = step[kStepChunks * kCount + lane_id() * kCount / Mxfp8::kBlock];
    return e.decode();
  } else {
    Elements<Token> e;
    e.unpack(*reinterpret_cast<const uint4*>(step + lane_id() * 16));
    return e;
  }
}

// Every lane calls.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ void store_partial(const Elements<Token>& sum, uint8_t* step, bool live) {
  constexpr int kCount = Elements<Token>::kCount;
  if constexpr (kMxfp8) {
    Mxfp8Elements<Token> e;
    e.encode(sum);
    if (!live) return;
    uint32_t* to = reinterpret_cast<uint32_t*>(step + lane_id() * kCount);
#pragma unroll
    for (int i = 0; i < e.kWords; ++i) to[i] = e.word[i];
    if (lane_id() * kCount % Mxfp8::kBlock == 0) {
      step[kStepChunks * kCount + lane_id() * kCount / Mxfp8::kBlock] = static_cast<uint8_t>(e.scale);
    }
  } else {
    if (live) sum.store(step + lane_id() * 16, 16);
  }
}

// ---- what becomes of a sum ----------------------------------------------------------------------------------------------

// The place of a block's sums: the lane's chunk of the result, or the partial row's step.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ uint8_t* place_of(const Work& w, const Place& item, uint32_t now) {
  const CombineArguments& c = w.c;
  if (item.is_sum) {
    return c.result + item.token * c.result_stride + int64_t{item.step} * kStepBytes + lane_id() * 16;
  }
  const int64_t row = outbox_row(w.partials.tokens, item.rank, c.maps.rank, item.token);
  return c.pools.to_write<uint8_t>(c.outbox, now) + row * w.partial_bytes +
         int64_t{item.step} * kPartialStepBytes<Token, kMxfp8>;
}

template <typename Token>
__device__ __forceinline__ void store_sum(const Work& w, Elements<Token> sum, uint8_t* to, int alignment,
                                          bool live) {
  if (!live) return;
  if (w.c.accumulate) {
    Elements<Token> total;
    total.load(to, alignment);
    add(sum, &total);
    sum = total;
  }
  sum.store(to, alignment);
}

// ---- through shared memory -----------------------------------------------------------------------------------------------

// Asks for step k of a block. left: chunks_left; lane_ring: the lane's place in the warp's ring.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ void ask_for_step(const Item& item, const Sources& sources, int k, int left,
                                             uint32_t lane_ring) {
  constexpr int kPartialStep = kPartialStepBytes<Token, kMxfp8>;
  const bool live = k * kStepChunks < left;
  // A step of a partial row in MXFP8 is shorter, and as long at the row's end.
  const bool partial_live =
      kMxfp8 ? lane_id() * 16 < kPartialStep && k * kStepChunks < left + lane_id() : live;
#pragma unroll
  for (int s = 0; s < kMostSources; ++s) {
    if (s >= item.sources) break;
    const bool is_slot = s < item.slots;
    copy_async16_if(is_slot ? live : partial_live, lane_ring + k * kStageBytes + s * kStepBytes,
                    sources.at[s] + k * (is_slot ? kStepBytes : kPartialStep));
  }
}

template <typename Token, bool kMxfp8, int kSteps>
__device__ __forceinline__ void go_on(const Item& item, Sources* sources) {
#pragma unroll
  for (int s = 0; s < kMostSources; ++s) {
    sources->at[s] += kSteps * (s < item.slots ? kStepBytes : kPartialStepBytes<Token, kMxfp8>);
  }
}

// stage: the lane's place of the step.
template <typename Token>
__device__ __forceinline__ Elements<Token> sum_staged(const Item& item, bool weighted, uint32_t stage) {
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

// Ranks in order. stage: of the step.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ Elements<Token> add_staged_partials(const Item& item, const uint8_t* stage,
                                                               Elements<Token> own) {
  if constexpr (kMxfp8) {
    round_to_mxfp8(&own);
  } else {
    if (item.sources == item.slots) return own;
  }
  Elements<Token> sum;
  clear(&sum);
#pragma unroll 1
  for (int s = item.slots; s <= item.sources; ++s) {
    if (s == item.slots + item.before) add(own, &sum);
    if (s < item.sources) add(load_partial<Token, kMxfp8>(stage + s * kStepBytes), &sum);
  }
  return sum;
}

template <typename Token, bool kMxfp8, int kSteps>
__global__ void __launch_bounds__(kThreads, kBlocksOfASm) combine_rows(const __grid_constant__ Work w) {
  extern __shared__ __align__(128) uint8_t rings[];
  wait_for_kernel_before();
  const bool meets = w.partials.items > 0;
  if (!meets) let_next_kernel_start();
  const uint32_t now = *w.c.pools.epoch;
  if (blockIdx.x == 0 && threadIdx.x == 0) tell_given(w, now);
  const uint8_t* ring = rings + warp_id() * kSteps * kStageBytes;
  const uint32_t lane_ring = shared_address(ring) + lane_id() * 16;
  CombineShare share = share_of(w);
  Coming coming;
  if (share.next < share.end) coming = look_at(w, share);
  Item item{}, asked{};  // the block that is summed, the one after it
  Sources sources;
  const auto advance = [&] {
    if (asked.blocks > 1) {
      asked.step += kSteps;
      --asked.blocks;
      go_on<Token, kMxfp8, kSteps>(asked, &sources);
      return true;
    }
    while (share.next < share.end) {
      open_item<Token, kMxfp8>(w, coming, now, &asked, &sources);
      share.next += share.stride;
      if (share.next < share.end) coming = look_at(w, share);
      if (asked.blocks == 0) continue;
      move_values(w, now, asked);
      return true;
    }
    return false;
  };
  while (true) {
    const bool more = advance();
    if (!more && item.blocks == 0) break;
    uint8_t* to = item.blocks > 0 ? place_of<Token, kMxfp8>(w, item, now) : nullptr;
    const int left = chunks_left(w, item), asked_left = chunks_left(w, asked);
#pragma unroll 1
    for (int k = 0; k < kSteps; ++k) {
      if (item.blocks > 0) {
        wait_copies<kSteps - 1>();
        if constexpr (kMxfp8) __syncwarp();  // lanes read what others have copied
        const bool live = k * kStepChunks < left;
        const Elements<Token> own =
            sum_staged<Token>(item, w.c.slot_weights != nullptr, lane_ring + k * kStageBytes);
        if (item.is_sum) {
          const Elements<Token> sum = add_staged_partials<Token, kMxfp8>(item, ring + k * kStageBytes, own);
          store_sum(w, sum, to + k * kStepBytes, 16, live);
        } else {
          store_partial<Token, kMxfp8>(own, to + k * kPartialStepBytes<Token, kMxfp8>, live);
        }
        if constexpr (kMxfp8) __syncwarp();
      }
      if (more) ask_for_step<Token, kMxfp8>(asked, sources, k, asked_left, lane_ring);
      commit_copies();
    }
    item = asked;
    if (!more) item.blocks = 0;
  }
  if (meets && is_last_block(w.c.ticket)) meet(w.c.meeting);
}

// ---- from where the sources lie: many choices, or memory that is not aligned to 16 -------------------------------------------

// sum += weight * slot over the choices of a group of 32, one a lane, in order. at: byte of the lane's chunk; every lane calls.
template <typename Token>
__device__ __forceinline__ void add_slots(const Work& w, int32_t mine, int64_t at, bool live,
                                          Elements<Token>* sum) {
  const bool weighted = w.c.slot_weights != nullptr;
  const float my_weight = weighted && mine >= 0 ? w.c.slot_weights[mine] : 1.0f;
  unsigned left = __ballot_sync(kAllLanes, mine >= 0);
  while (left != 0) {
    uint4 bytes[kSlotsInFlight];
    unsigned fetched = left;
#pragma unroll
    for (int i = 0; i < kSlotsInFlight; ++i) {
      if (fetched == 0) break;
      const int32_t slot = __shfl_sync(kAllLanes, mine, __ffs(static_cast<int>(fetched)) - 1);
      fetched &= fetched - 1;
      if (live) bytes[i] = load16(w.c.slots + slot * w.c.slot_stride + at, w.slot_alignment);
    }
#pragma unroll
    for (int i = 0; i < kSlotsInFlight; ++i) {
      if (left == 0) break;
      const float weight = __shfl_sync(kAllLanes, my_weight, __ffs(static_cast<int>(left)) - 1);
      left &= left - 1;
      if (!live) continue;
      Elements<Token> e;
      e.unpack(bytes[i]);
      if (weighted) {
        add_weighted(e, weight, sum);
      } else {
        add(e, sum);
      }
    }
  }
}

template <typename Token, bool kMxfp8>
__device__ __forceinline__ Elements<Token> add_partials(const Work& w, uint32_t now, const Place& item, int k,
                                                        Elements<Token> own, bool live) {
  const RouteMaps& m = w.c.maps;
  if constexpr (kMxfp8) round_to_mxfp8(&own);
  Elements<Token> sum;
  clear(&sum);
  for (int word = 0; word < m.holder_words(); ++word) {
    for (uint32_t left = holders_of(m, item.token)[word]; left != 0; left &= left - 1) {
      const int32_t holder = word * 32 + __ffs(static_cast<int>(left)) - 1;
      if (holder == m.rank) {
        add(own, &sum);
      } else if (live) {
        const uint8_t* row = partial_row<Token, kMxfp8>(w, now, holder, item);
        add(load_partial<Token, kMxfp8>(row + k * kPartialStepBytes<Token, kMxfp8>), &sum);
      }
    }
  }
  return sum;
}

template <typename Token, bool kMxfp8>
__global__ void __launch_bounds__(kThreads) combine_rows_unstaged(const __grid_constant__ Work w) {
  const RouteMaps& m = w.c.maps;
  wait_for_kernel_before();
  const bool meets = w.partials.items > 0;
  if (!meets) let_next_kernel_start();
  const uint32_t now = *w.c.pools.epoch;
  if (blockIdx.x == 0 && threadIdx.x == 0) tell_given(w, now);
  for (CombineShare share = share_of(w); share.next < share.end; share.next += share.stride) {
    Coming item = look_at(w, share);
    const int32_t* slots = slots_of(m, item.rank, item.token);
    bool any = item.is_sum;
    for (int k = lane_id(); k < m.top_k; k += kWarp) any |= slots[k] >= 0;
    if (!__any_sync(kAllLanes, any)) continue;
    move_values(w, now, item);
    for (; item.blocks > 0; item.step += w.block_steps, --item.blocks) {
      uint8_t* to = place_of<Token, kMxfp8>(w, item, now);
      for (int k = 0; k < w.block_steps; ++k) {
        const bool live = k * kStepChunks < chunks_left(w, item);
        const int64_t chunk = int64_t{item.step + k} * kStepChunks + lane_id();
        Elements<Token> own;
        clear(&own);
        for (int first = 0; first < m.top_k; first += kWarp) {
          const int choice = first + lane_id();
          add_slots(w, choice < m.top_k ? slots[choice] : -1, chunk * 16, live, &own);
        }
        if (item.is_sum) {
          const Elements<Token> sum = add_partials<Token, kMxfp8>(w, now, item, k, own, live);
          store_sum(w, sum, to + k * kStepBytes, w.result_alignment, live);
        } else {
          store_partial<Token, kMxfp8>(own, to + k * kPartialStepBytes<Token, kMxfp8>, live);
        }
      }
    }
  }
  if (meets && is_last_block(w.c.ticket)) meet(w.c.meeting);
}

// ---- launches ---------------------------------------------------------------------------------------------------------------

// rows: of all ranks that are in it.
Pass pass_of(const TokenRange& tokens, int64_t rows, int32_t row_blocks, int64_t warps) {
  Pass p{};
  if (rows == 0) return p;
  p.tokens = tokens;
  // As long as leaves some items for every warp that the device holds, but two blocks where there are enough: it takes time to
  // open an item.
  const int64_t all = rows * row_blocks;
  const int64_t blocks = std::max<int64_t>(all / (warps * kItemsOfAWarp), all >= warps * 4 ? 2 : 1);
  const auto pieces_of = [row_blocks](int64_t n) { return static_cast<int32_t>((row_blocks + n - 1) / n); };
  p.stretches = static_cast<uint32_t>(pieces_of(std::min<int64_t>(row_blocks, blocks)));
  p.blocks = pieces_of(p.stretches);  // as long as each other
  p.items = static_cast<uint32_t>(rows * p.stretches);
  return p;
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

int64_t partial_row_bytes(DType dtype, bool mxfp8, int64_t hidden) {
  const int64_t chunks = hidden * dtype_bytes(dtype) / 16;
  const int64_t steps = (chunks + kStepChunks - 1) / kStepChunks;
  return mxfp8 ? steps * mxfp8_step_bytes(static_cast<int>(16 / dtype_bytes(dtype))) : chunks * 16;
}

Status launch_combine(DType dtype, const CombineArguments& c, const TokenRange& sums,
                      const TokenRange& partials, const LaunchContext& context) {
  const RouteMaps& m = c.maps;
  Work w{};
  w.c = c;
  const int sms = context.max_sms > 0 ? context.max_sms : context.sms;
  const int64_t warps = sms * int64_t{kBlocksOfASm * kWarps};
  const int32_t row_steps = (c.chunks + kStepChunks - 1) / kStepChunks;
  const int64_t rows = std::max<int64_t>(c.tokens, static_cast<int64_t>(m.size - 1) * partials.count);
  const bool few = rows * row_steps <= warps * 2 * kManySteps;
  w.block_steps = few ? kFewSteps : kManySteps;
  w.row_blocks = (row_steps + w.block_steps - 1) / w.block_steps;
  w.partial_bytes = partial_row_bytes(dtype, c.mxfp8, c.chunks * int64_t{16} / dtype_bytes(dtype));
  const int32_t own = std::max(0, std::min(sums.count, c.tokens - sums.first));  // that this rank has
  w.sums = pass_of(sums, own, w.row_blocks, warps);
  w.partials = pass_of(partials, static_cast<int64_t>(m.size - 1) * partials.count, w.row_blocks, warps);
  const uint64_t items = uint64_t{w.sums.items} + w.partials.items;
  if (items == 0) return Status();
  w.share = partial_share(w.sums.items, w.partials.items);
  w.slot_alignment = alignment_of(c.slots, c.slot_stride);
  w.result_alignment = alignment_of(c.result, c.result_stride);
  const bool staged = w.slot_alignment >= 16 && w.result_alignment >= 16 && m.top_k <= kMostSources;
  LaunchShape shape;
  shape.threads = kThreads;
  shape.blocks = static_cast<int64_t>((items + kWarps - 1) / kWarps);
  shape.bounded = true;
  shape.overlaps = true;
  shape.shared_bytes = staged ? kWarps * w.block_steps * kStageBytes : 0;
  return with_token(dtype, [&](auto token) {
    using Token = decltype(token);
    if (staged && few) {
      return c.mxfp8 ? launch_kernel<combine_rows<Token, true, kFewSteps>>("combine", context, shape, w)
                     : launch_kernel<combine_rows<Token, false, kFewSteps>>("combine", context, shape, w);
    }
    if (staged) {
      return c.mxfp8 ? launch_kernel<combine_rows<Token, true, kManySteps>>("combine", context, shape, w)
                     : launch_kernel<combine_rows<Token, false, kManySteps>>("combine", context, shape, w);
    }
    return c.mxfp8 ? launch_kernel<combine_rows_unstaged<Token, true>>("combine", context, shape, w)
                   : launch_kernel<combine_rows_unstaged<Token, false>>("combine", context, shape, w);
  });
}

}  // namespace nvte_ep
