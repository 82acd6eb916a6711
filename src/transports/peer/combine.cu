// A warp sums a stretch of columns of one token: its slots on this rank in FP32, in order of the choices. For another rank's
// token the sum is rounded to a partial row; for an own one the partial rows of the peers are added, ranks in order.
#include "transports/peer/combine.h"

#include "device/elements.cuh"
#include "device/kernel_order.cuh"
#include "device/memory.cuh"
#include "device/warp.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kSlotsInFlight = 4;
constexpr int kRanksInFlight = 4;  // peers whose rows are on their way
constexpr int kLongStretch = 8;    // chunks that a lane sums, one after the other, where there are many
constexpr int kStagedSlots = 8;    // that can be on their way through shared memory
constexpr int kStageBytes = kStagedSlots * kWarp * 16;  // of a warp

__host__ __device__ constexpr int elements_per_chunk(int token_bytes) { return 16 / token_bytes; }
// Codes | scales of the pass's columns.
__host__ __device__ constexpr int64_t mxfp8_partial_bytes(int64_t elements) {
  return (elements + elements / Mxfp8::kBlock + 15) / 16 * 16;
}

struct Work {
  CombineArguments c;
  int64_t partial_bytes;
  int32_t stretch;    // chunks that a lane sums
  int32_t stretches;  // of a token
  int64_t items;
  __host__ __device__ int64_t blocks() const { return (items + kWarps - 1) / kWarps; }
  int slot_alignment, result_alignment;
};

__device__ __forceinline__ uint4 load_slot(const uint8_t* from, int alignment) {
  return alignment >= 16 ? __ldcs(reinterpret_cast<const uint4*>(from)) : load16(from, alignment);
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
      if (live) bytes[i] = load_slot(w.c.slots + slot * w.c.slot_stride + at, w.slot_alignment);
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
#pragma unroll
        for (int j = 0; j < Elements<Token>::kCount; ++j) e.x[j] = mul_rn(weight, e.x[j]);
      }
#pragma unroll
      for (int j = 0; j < Elements<Token>::kCount; ++j) sum->x[j] = add_rn(sum->x[j], e.x[j]);
    }
  }
}

// All of this rank's slots of a row; false: there are none. first: the choices 0 to 31 (with more, the others are read again).
template <typename Token>
__device__ __forceinline__ void sum_slots(const Work& w, const int32_t* slots, const Choice& first,
                                          int64_t at, bool live, Elements<Token>* sum) {
  clear(sum);
  add_slots(w, first, at, live, sum);
  for (int k = kWarp; k < w.c.maps.top_k; k += kWarp)
    add_slots(w, choice_of(w.c, slots, k + lane_id()), at, live, sum);
}

// ---- partial rows of MXFP8 ------------------------------------------------------------------------------------------

// The lanes of a block of 32 elements agree on its scale; every lane calls, elements of lanes that are not live count as 0.
template <typename Token>
__device__ __forceinline__ void store_mxfp8(const Elements<Token>& e, uint8_t* row, int64_t elements,
                                            int chunk, bool live) {
  constexpr int kCount = Elements<Token>::kCount;
  uint8_t scale;
  uint8_t codes[kCount];
  encode_mxfp8(e, codes, &scale);
  if (!live) return;
  uint8_t* to = row + static_cast<int64_t>(chunk) * kCount;
  uint32_t word[kCount / 4];
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    word[i] = codes[4 * i] | codes[4 * i + 1] << 8 | codes[4 * i + 2] << 16 |
              static_cast<uint32_t>(codes[4 * i + 3]) << 24;
    reinterpret_cast<uint32_t*>(to)[i] = word[i];
  }
  if (chunk * kCount % Mxfp8::kBlock == 0) row[elements + chunk * kCount / Mxfp8::kBlock] = scale;
}

// A lane's chunk of a peer's partial row, on its way.
template <typename Token, bool kMxfp8>
struct Partial {
  static constexpr int kCount = Elements<Token>::kCount;
  static constexpr int kWords = kMxfp8 ? kCount / 4 : 4;
  uint32_t word[kWords];
  uint8_t scale;

  __device__ __forceinline__ void load(const uint8_t* row, int64_t elements, int chunk) {
    if constexpr (kMxfp8) {
      const uint32_t* from = reinterpret_cast<const uint32_t*>(row + static_cast<int64_t>(chunk) * kCount);
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = from[i];
      scale = row[elements + chunk * kCount / Mxfp8::kBlock];
    } else {
      const uint4 v = *reinterpret_cast<const uint4*>(row + chunk * int64_t{16});
      word[0] = v.x;
      word[1] = v.y;
      word[2] = v.z;
      word[3] = v.w;
    }
  }
  __device__ __forceinline__ Elements<Token> elements() const {
    Elements<Token> e;
    if constexpr (kMxfp8) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        e.x[i] = Mxfp8::decode(static_cast<uint8_t>(word[i / 4] >> (8 * (i % 4))), scale);
      }
    } else {
      e.unpack(make_uint4(word[0], word[1], word[2], word[3]));
    }
    return e;
  }
};

// ---- kernels ----------------------------------------------------------------------------------------------------------

// This rank's partial rows lie in a holder's outbox as those of another rank do in this one's.
__device__ __forceinline__ int32_t place_among_others(int32_t rank, int32_t holder) {
  return rank < holder ? rank : rank - 1;
}

// A rank whose slots are all empty has nothing to give.
__device__ __forceinline__ bool gives_values(const CombineArguments& c) {
  return c.slot_values != nullptr || c.maps.totals[0] == 0;
}

// A warp: a stretch of the partial row of another rank's token.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ void partial_item(const Work& w, uint32_t now, int64_t item) {
  const CombineArguments& c = w.c;
  const RouteMaps& m = c.maps;
  if (item >= w.items) return;
  const int64_t elements = static_cast<int64_t>(c.chunks) * Elements<Token>::kCount;
  const int stretch = static_cast<int>(item % w.stretches);
  const int32_t other = static_cast<int32_t>(item / w.stretches % (m.size - 1));
  const int64_t token = item / w.stretches / (m.size - 1);
  const int32_t rank = other < m.rank ? other : other + 1;
  const int32_t* slots = m.row_slots + (static_cast<int64_t>(rank) * m.tokens + token) * m.top_k;
  const Choice first = choice_of(c, slots, lane_id());
  bool any = __ballot_sync(kAllLanes, first.slot >= 0) != 0;
  for (int k = kWarp; k < m.top_k; k += kWarp) {
    any |= __ballot_sync(kAllLanes, k + lane_id() < m.top_k && slots[k + lane_id()] >= 0) != 0;
  }
  if (!any) return;
  const int64_t place = static_cast<int64_t>(other) * m.tokens + token;
  if (c.send_values && c.slot_values != nullptr && stretch == 0) {
    float* values = c.pools.to_write<float>(c.values.area, now) + place * m.top_k;
    for (int k = lane_id(); k < m.top_k; k += kWarp) {
      if (slots[k] >= 0) values[k] = c.slot_values[slots[k]];
    }
  }
  uint8_t* row = c.pools.to_write<uint8_t>(c.outbox, now) + place * w.partial_bytes;
#pragma unroll 1
  for (int i = 0; i < w.stretch; ++i) {
    const int chunk = (stretch * w.stretch + i) * kWarp + lane_id();
    if (chunk - lane_id() >= c.chunks) break;
    const bool live = chunk < c.chunks;
    Elements<Token> sum;
    sum_slots(w, slots, first, (c.first_chunk + chunk) * int64_t{16}, live, &sum);
    if constexpr (kMxfp8) {
      store_mxfp8(sum, row, elements, chunk, live);
    } else {
      if (live) sum.store(row + chunk * int64_t{16}, 16);
    }
  }
}

template <typename Token, bool kMxfp8>
__global__ void __launch_bounds__(kThreads) partial_rows(const Work w) {
  const CombineArguments& c = w.c;
  wait_for_kernel_before();
  let_next_kernel_start();
  const uint32_t now = *c.pools.epoch;
  if (c.send_values && blockIdx.x == 0 && threadIdx.x == 0) {
    *c.pools.to_write<uint32_t>(c.values.given, now) = gives_values(c);
  }
  for (int64_t block = blockIdx.x; block < w.blocks(); block += gridDim.x) {
    partial_item<Token, kMxfp8>(w, now, block * kWarps + warp_id());
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

// One thread: the host learns which ranks gave no values.
__device__ void tell_missing(const CombineArguments& c, uint32_t now) {
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

// ---- slots through shared memory: a lane fetches what it will add itself, the next chunk while it adds one ----

// stage: the lane's place of the first slot. Every lane calls.
__device__ __forceinline__ void fetch_slots(const Work& w, const Choice& mine, int64_t at, bool live,
                                            uint32_t stage) {
  for (unsigned left = __ballot_sync(kAllLanes, mine.slot >= 0); left != 0; left &= left - 1) {
    const int32_t slot = __shfl_sync(kAllLanes, mine.slot, __ffs(static_cast<int>(left)) - 1);
    if (live) copy_async16(stage, w.c.slots + slot * w.c.slot_stride + at);
    stage += kWarp * 16;
  }
  commit_copies();
}

template <typename Token>
__device__ __forceinline__ void sum_fetched(const Work& w, const Choice& mine, const uint8_t* stage,
                                            bool live, Elements<Token>* sum) {
  clear(sum);
  for (unsigned left = __ballot_sync(kAllLanes, mine.slot >= 0); left != 0; left &= left - 1) {
    const float weight = __shfl_sync(kAllLanes, mine.weight, __ffs(static_cast<int>(left)) - 1);
    Elements<Token> e;
    if (live) {
      e.unpack(*reinterpret_cast<const uint4*>(stage));
    } else {
      clear(&e);
    }
    if (w.c.slot_weights != nullptr) {
#pragma unroll
      for (int j = 0; j < Elements<Token>::kCount; ++j) e.x[j] = mul_rn(weight, e.x[j]);
    }
#pragma unroll
    for (int j = 0; j < Elements<Token>::kCount; ++j) sum->x[j] = add_rn(sum->x[j], e.x[j]);
    stage += kWarp * 16;
  }
}

// A warp: a stretch of one of this rank's tokens. stage: the lane's part of its shared memory.
template <typename Token, bool kMxfp8>
__device__ __forceinline__ void sum_item(const Work& w, uint32_t now, int64_t item, const uint8_t* stage) {
  using E = Elements<Token>;
  const CombineArguments& c = w.c;
  const RouteMaps& m = c.maps;
  if (item >= w.items) return;
  const int64_t elements = static_cast<int64_t>(c.chunks) * E::kCount;
  const int stretch = static_cast<int>(item % w.stretches);
  const int64_t token = item / w.stretches;
  const int32_t* slots = m.row_slots + (static_cast<int64_t>(m.rank) * m.tokens + token) * m.top_k;
  const Choice first = choice_of(c, slots, lane_id());
  if (c.own_values != nullptr && stretch == 0) gather_values(c, now, token);
  const uint32_t* holders = m.holders + token * m.holder_words();
  uint8_t* result = c.result + token * c.result_stride;
  const bool staged = w.slot_alignment >= 16 && m.top_k <= kWarp &&
                      __popc(__ballot_sync(kAllLanes, first.slot >= 0)) <= kStagedSlots;
  const auto byte_of = [&](int chunk) { return (c.first_chunk + chunk) * int64_t{16}; };
  if (staged) {
    const int chunk = stretch * w.stretch * kWarp + lane_id();
    fetch_slots(w, first, byte_of(chunk), chunk < c.chunks, shared_address(stage));
  }
#pragma unroll 1
  for (int i = 0; i < w.stretch; ++i) {
    const int chunk = (stretch * w.stretch + i) * kWarp + lane_id();
    if (chunk - lane_id() >= c.chunks) break;
    const bool live = chunk < c.chunks;
    const int64_t at = byte_of(chunk);
    E own, sum;
    if (staged) {
      const int next = chunk + kWarp;
      fetch_slots(w, first, byte_of(next), i + 1 < w.stretch && next < c.chunks,
                  shared_address(stage) + (i + 1) % 2 * kStageBytes);
      wait_copies<1>();
      sum_fetched(w, first, stage + i % 2 * kStageBytes, live, &own);
    } else {
      sum_slots(w, slots, first, at, live, &own);
    }
    if constexpr (kMxfp8) round_to_mxfp8(&own);
    clear(&sum);
    for (int word = 0; word < m.holder_words(); ++word) {
      uint32_t left = holders[word];
      while (left != 0) {
        int32_t rank[kRanksInFlight];
        Partial<Token, kMxfp8> partial[kRanksInFlight];
#pragma unroll
        for (int r = 0; r < kRanksInFlight; ++r) {
          rank[r] = left == 0 ? -1 : word * 32 + __ffs(static_cast<int>(left)) - 1;
          left &= left - 1;
          if (rank[r] < 0 || rank[r] == m.rank || !live) continue;
          const int64_t place = static_cast<int64_t>(place_among_others(m.rank, rank[r])) * m.tokens + token;
          partial[r].load(c.pools.to_read<uint8_t>(c.outbox, rank[r], now) + place * w.partial_bytes,
                          elements, chunk);
        }
#pragma unroll
        for (int r = 0; r < kRanksInFlight; ++r) {
          if (rank[r] < 0) continue;
          const E e = rank[r] == m.rank ? own : partial[r].elements();
#pragma unroll
          for (int j = 0; j < E::kCount; ++j) sum.x[j] = add_rn(sum.x[j], e.x[j]);
        }
      }
    }
    if (!live) continue;
    if (c.accumulate) {
      E before;
      before.load(result + at, w.result_alignment);
#pragma unroll
      for (int j = 0; j < E::kCount; ++j) sum.x[j] = add_rn(before.x[j], sum.x[j]);
    }
    sum.store(result + at, w.result_alignment);
  }
}

// The sums of one pass of columns, and beside them the partial rows of the next (ahead; no items: it is the last): these keep
// the memory busy while those wait for the links.
template <typename Token, bool kMxfp8>
__global__ void __launch_bounds__(kThreads, 3) sum_rows(const Work w, const Work ahead) {
  extern __shared__ __align__(16) uint8_t stages[];
  const CombineArguments& c = w.c;
  wait_for_kernel_before();
  let_next_kernel_start();
  const uint32_t now = *c.pools.epoch;
  if (c.own_values != nullptr && blockIdx.x == 0 && threadIdx.x == 0) tell_missing(c, now);
  const uint8_t* stage = stages + warp_id() * 2 * kStageBytes + lane_id() * 16;
  const int64_t others = ahead.blocks();
  const int64_t blocks = w.blocks() + others;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t before = block * others / blocks;  // blocks of the next pass, evenly among the others
    if ((block + 1) * others / blocks != before) {
      partial_item<Token, kMxfp8>(ahead, now, before * kWarps + warp_id());
    } else {
      sum_item<Token, kMxfp8>(w, now, (block - before) * kWarps + warp_id(), stage);
    }
  }
}

Work work_of(DType dtype, const CombineArguments& c, int64_t rows, const LaunchContext& context) {
  Work w{};
  w.c = c;
  w.partial_bytes = partial_row_bytes(dtype, c.mxfp8, c.chunks);
  const int32_t warps = (c.chunks + kWarp - 1) / kWarp;  // that a row keeps busy with one chunk each
  const bool many = rows * warps > int64_t{4} * kLongStretch * kWarps * context.sms;
  w.stretches = many ? (warps + kLongStretch - 1) / kLongStretch : warps;
  w.stretch = (warps + w.stretches - 1) / w.stretches;
  w.items = rows * w.stretches;
  w.slot_alignment = alignment_of(c.slots, c.slot_stride);
  w.result_alignment = alignment_of(c.result, c.result_stride);
  return w;
}

LaunchShape shape_of(int64_t blocks) {
  LaunchShape shape;
  shape.threads = kThreads;
  shape.blocks = blocks;
  shape.bounded = true;
  shape.overlaps = true;
  return shape;
}

// Of the partial rows of the other ranks' tokens.
Work partial_work(DType dtype, const CombineArguments& c, const LaunchContext& context) {
  return work_of(dtype, c, static_cast<int64_t>(c.maps.size - 1) * c.maps.tokens, context);
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

int64_t partial_row_bytes(DType dtype, bool mxfp8, int32_t chunks) {
  return mxfp8 ? mxfp8_partial_bytes(static_cast<int64_t>(chunks) *
                                     elements_per_chunk(static_cast<int>(dtype_bytes(dtype))))
               : chunks * int64_t{16};
}

Status launch_partial_rows(DType dtype, const CombineArguments& c, const LaunchContext& context) {
  const Work w = partial_work(dtype, c, context);
  if (w.items == 0) return Status();
  const LaunchShape shape = shape_of(w.blocks());
  return with_token(dtype, [&](auto token) {
    using Token = decltype(token);
    return c.mxfp8 ? launch_kernel<partial_rows<Token, true>>("partial_rows", context, shape, w)
                   : launch_kernel<partial_rows<Token, false>>("partial_rows", context, shape, w);
  });
}

Status launch_sum_rows(DType dtype, const CombineArguments& c, const CombineArguments* next,
                       const LaunchContext& context) {
  const Work w = work_of(dtype, c, c.tokens, context);
  const Work ahead = next == nullptr ? Work{} : partial_work(dtype, *next, context);
  if (w.items + ahead.items == 0) return Status();
  LaunchShape shape = shape_of(w.blocks() + ahead.blocks());
  shape.shared_bytes = kWarps * 2 * kStageBytes;
  return with_token(dtype, [&](auto token) {
    using Token = decltype(token);
    return c.mxfp8 ? launch_kernel<sum_rows<Token, true>>("sum_rows", context, shape, w, ahead)
                   : launch_kernel<sum_rows<Token, false>>("sum_rows", context, shape, w, ahead);
  });
}

}  // namespace nvte_ep
