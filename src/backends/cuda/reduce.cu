// Slots to and from the rows of the ranks: the steps of dispatch and combine, forward and backward.
#include "backends/cuda/launch.h"
#include "backends/cuda/row_threads.h"
#include "device/elements.cuh"
#include "device/memory.cuh"
#include "device/warp.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kThreads = 256;

__device__ __forceinline__ int32_t rank_of(SlotAddress address) {
  return static_cast<int32_t>(address >> kSlotBits);
}
__device__ __forceinline__ int64_t slot_of(SlotAddress address) {
  return address & ((int64_t{1} << kSlotBits) - 1);
}

// ---- rows to slots ----------------------------------------------------------------------------------------

constexpr int kGatherWarps = kThreads / kWarp;
// Accesses of a lane that are under way at a time.
constexpr int kDepth = 4;

// A piece of a row in a warp's registers: 16 bytes a lane, kDepth times. Strides and row bytes that 16 does not divide are moved
// in smaller pieces.
struct RowPiece {
  static constexpr int64_t kBytes = kDepth * kWarp * 16;
  uint4 v[kDepth];

  // in null: zeros.
  __device__ __forceinline__ void load(const uint8_t* in, int64_t first, int64_t row_bytes, int alignment) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int64_t at = first + (d * kWarp + lane_id()) * 16;
      v[d] = make_uint4(0, 0, 0, 0);
      if (in != nullptr && at < row_bytes) {
        v[d] = load16(in + at, alignment, static_cast<int>(row_bytes - at < 16 ? row_bytes - at : 16));
      }
    }
  }
  __device__ __forceinline__ void store(uint8_t* out, int64_t first, int64_t row_bytes, int alignment) const {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int64_t at = first + (d * kWarp + lane_id()) * 16;
      if (at < row_bytes) {
        store16(out + at, v[d], alignment, static_cast<int>(row_bytes - at < 16 ? row_bytes - at : 16));
      }
    }
  }
};

__device__ __forceinline__ int alignment_with(const uint8_t* in, int out_alignment) {
  const int alignment = (reinterpret_cast<uint64_t>(in) & 15) == 0 ? 16 : 1;
  return alignment < out_alignment ? alignment : out_alignment;
}

__device__ __forceinline__ int64_t slots_in_use(const GatherRows& g) {
  if (g.slot_count.data == nullptr) return g.slots;
  const int64_t count = g.slot_count.is_int64 ? *static_cast<const int64_t*>(g.slot_count.data)
                                              : *static_cast<const int32_t*>(g.slot_count.data);
  return count < g.slots ? count : g.slots;
}

// A warp a slot, for warps that are numbered from first. rows: only padding where they come otherwise.
__device__ __forceinline__ void gather_by_slot(const GatherRows& g, int out_alignment, int64_t first,
                                               int64_t warps, bool only_padding) {
  const int64_t slots = slots_in_use(g);
  for (int64_t slot = first; slot < slots; slot += warps) {
    const int64_t source = g.slot_source != nullptr ? g.slot_source[slot] : slot;
    const int64_t rank = source >> 32;
    const int64_t token = source & 0xFFFFFFFF;
    if (source < 0 ? g.part.which == TokenPart::kOthers : !g.part.has(rank, token)) continue;
    if (g.out_weights != nullptr && lane_id() == 0) {
      g.out_weights[slot] = source < 0 ? 0.0f : g.weights.floats(rank, token)[g.slot_k[slot]];
    }
    if (g.out == nullptr || (only_padding && source >= 0)) continue;
    uint8_t* out = static_cast<uint8_t*>(g.out) + slot * g.out_stride;
    const uint8_t* in = source < 0 ? nullptr : g.rows.row(rank, token);
    const int alignment = alignment_with(in, out_alignment);
    for (int64_t at = 0; at < g.row_bytes; at += RowPiece::kBytes) {
      RowPiece piece;
      piece.load(in, at, g.row_bytes, alignment);
      piece.store(out, at, g.row_bytes, alignment);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 4) gather_rows(const GatherRows g, int out_alignment) {
  gather_by_slot(g, out_alignment, static_cast<int64_t>(blockIdx.x) * kGatherWarps + warp_id(),
                 static_cast<int64_t>(gridDim.x) * kGatherWarps, false);
}

// The rows of a part, each piece read once and written to all its slots: a warp a piece. The blocks behind these look at the
// slots, for padding and weights.
__global__ void __launch_bounds__(kThreads, 4)
    spread_rows(const GatherRows g, int out_alignment, int64_t pieces_per_row, int64_t spread_blocks) {
  if (blockIdx.x >= spread_blocks) {
    gather_by_slot(g, out_alignment, (blockIdx.x - spread_blocks) * kGatherWarps + warp_id(),
                   (gridDim.x - spread_blocks) * kGatherWarps, true);
    return;
  }
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kGatherWarps + warp_id();
  const int64_t row = number / pieces_per_row;
  const int64_t at = number % pieces_per_row * RowPiece::kBytes;
  const int64_t rows_of_rank = g.part.end - g.part.begin;
  const bool own = g.part.which == TokenPart::kOwn;
  if (row >= (own ? 1 : g.num_ranks - 1) * rows_of_rank) return;
  int64_t rank = g.part.own_rank;
  if (!own) {
    rank = row / rows_of_rank;
    rank += rank >= g.part.own_rank;
  }
  const int64_t i = g.part.begin + row % rows_of_rank;
  const SlotAddress* slots = g.source_slots + (rank * g.source_rows + i) * g.top_k;
  const uint8_t* in = g.rows.row(rank, i);
  const int alignment = alignment_with(in, out_alignment);
  RowPiece piece;
  bool loaded = false;
  for (int32_t k = 0; k < g.top_k; k += kWarp) {
    const SlotAddress mine = k + lane_id() < g.top_k ? slots[k + lane_id()] : -1;
    for (unsigned left = __ballot_sync(0xFFFFFFFFu, mine >= 0); left != 0; left &= left - 1) {
      if (!loaded) piece.load(in, at, g.row_bytes, alignment);
      loaded = true;
      const int64_t slot = slot_of(__shfl_sync(0xFFFFFFFFu, mine, __ffs(static_cast<int>(left)) - 1));
      piece.store(static_cast<uint8_t*>(g.out) + slot * g.out_stride, at, g.row_bytes, alignment);
    }
  }
}

// ---- slots to tokens --------------------------------------------------------------------------------------

struct ReduceArguments {
  ReduceRows r;
  int64_t result_stride;  // bytes
  int result_alignment;
  int64_t tokens;
};

// Where a token's copy lies, and its weight; row null: there is none.
struct Slot {
  const uint8_t* row;
  float weight;

  Slot() = default;
  __device__ __forceinline__ Slot(const RankArrays& rows, const RankArrays& weights, SlotAddress address)
      : row(nullptr), weight(1.0f) {
    if (address < 0) return;
    row = rows.row(rank_of(address), slot_of(address));
    const float* given = weights.floats(rank_of(address), slot_of(address));
    if (given != nullptr) weight = *given;
  }
  __device__ __forceinline__ uint4 load(int64_t at) const {
    return load16(row + at, (reinterpret_cast<uint64_t>(row) & 15) == 0 ? 16 : 1);
  }
  // sum += weight * elements, two roundings; a weight of 1 changes nothing.
  template <typename Token>
  __device__ __forceinline__ void add(uint4 bytes, Elements<Token>* sum) const {
    Elements<Token> e;
    e.unpack(bytes);
#pragma unroll
    for (int i = 0; i < Elements<Token>::kCount; ++i) {
      sum->x[i] = add_rn(sum->x[i], mul_rn(weight, e.x[i]));
    }
  }
};

template <typename Token>
__device__ __forceinline__ void store_sum(const ReduceArguments& a, uint8_t* to, Elements<Token> sum) {
  if (a.r.accumulate) {
    Elements<Token> before;
    before.load(to, a.result_alignment);
#pragma unroll
    for (int i = 0; i < Elements<Token>::kCount; ++i) sum.x[i] = add_rn(before.x[i], sum.x[i]);
  }
  sum.store(to, a.result_alignment);
}

// A thread block finds the slots of its tokens once, and then reads eight of them at a time.
constexpr int kStagedSlots = 256;
template <typename Token>
__global__ void __launch_bounds__(kRowThreads, 4)
    sum_rows(const ReduceArguments a, const RowThreads threads) {
  constexpr int kInFlight = 8;
  __shared__ Slot staged[kStagedSlots];
  const int row_in_block = threads.row_of(threadIdx.x);
  const int first_chunk = static_cast<int>(threadIdx.x) - row_in_block * threads.threads_per_row;
  const int top_k = a.r.top_k;
  const bool stages = top_k <= kStagedSlots;  // then rows_per_block * top_k is too
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * threads.rows_per_block; first < a.tokens;
       first += static_cast<int64_t>(gridDim.x) * threads.rows_per_block) {
    if (stages) {
      const int64_t rows =
          a.tokens - first < threads.rows_per_block ? a.tokens - first : threads.rows_per_block;
      const SlotAddress* slots = a.r.slots + first * top_k;
      __syncthreads();  // the slots of the tokens before are read
      for (int i = static_cast<int>(threadIdx.x); i < rows * top_k; i += static_cast<int>(blockDim.x)) {
        staged[i] = Slot(a.r.rows, a.r.weights, slots[i]);
      }
      __syncthreads();
    }
    const int64_t t = first + row_in_block;
    if (row_in_block >= threads.rows_per_block || t >= a.tokens) continue;
    const SlotAddress* slots = a.r.slots + t * top_k;
    uint8_t* result = static_cast<uint8_t*>(a.r.result.data) + t * a.result_stride;
    for (int chunk = first_chunk; chunk < threads.chunks; chunk += threads.threads_per_row) {
      const int64_t at = static_cast<int64_t>(chunk) * 16;
      Elements<Token> sum;
      clear(&sum);
      for (int k = 0; k < top_k; k += kInFlight) {
        uint4 bytes[kInFlight];
        const auto slot = [&](int i) {
          return stages ? staged[row_in_block * top_k + k + i] : Slot(a.r.rows, a.r.weights, slots[k + i]);
        };
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (k + i >= top_k) break;
          const Slot s = slot(i);
          if (s.row != nullptr) bytes[i] = s.load(at);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (k + i >= top_k) break;
          const Slot s = slot(i);
          if (s.row != nullptr) s.add(bytes[i], &sum);
        }
      }
      store_sum(a, result + at, sum);
    }
  }
}

// Rows that cross in MXFP8: a token's copies on one rank are summed and rounded first.
template <typename Token>
__global__ void __launch_bounds__(kRowThreads, 4)
    sum_mxfp8_partials(const ReduceArguments a, const RowThreads threads) {
  using E = Elements<Token>;
  const int row_in_block = threads.row_of(threadIdx.x);
  const int first_chunk = static_cast<int>(threadIdx.x) - row_in_block * threads.threads_per_row;
  if (row_in_block >= threads.rows_per_block) return;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * threads.rows_per_block + row_in_block; t < a.tokens;
       t += static_cast<int64_t>(gridDim.x) * threads.rows_per_block) {
    const SlotAddress* slots = a.r.slots + t * a.r.top_k;
    uint8_t* result = static_cast<uint8_t*>(a.r.result.data) + t * a.result_stride;
    for (int chunk = first_chunk; chunk < threads.chunks; chunk += threads.threads_per_row) {
      const int64_t at = static_cast<int64_t>(chunk) * 16;
      E sum;
      clear(&sum);
      for (int32_t rank = 0; rank < a.r.num_ranks; ++rank) {
        E partial;
        clear(&partial);
        bool any = false;
        for (int k = 0; k < a.r.top_k; ++k) {
          if (slots[k] < 0 || rank_of(slots[k]) != rank) continue;
          any = true;
          const Slot slot(a.r.rows, a.r.weights, slots[k]);
          slot.add(slot.load(at), &partial);
        }
        if (!any) continue;  // the same for all lanes of a token
        round_to_mxfp8(&partial);
#pragma unroll
        for (int i = 0; i < E::kCount; ++i) sum.x[i] = add_rn(sum.x[i], partial.x[i]);
      }
      store_sum(a, result + at, sum);
    }
  }
}

struct MergeArguments {
  MergeSlots m;
  RankArrays rows, weights;
  int64_t out_stride;  // bytes
  int out_alignment;
};

// The elements of one access, as they are or as FP32 numbers; at: where they lie in a row of tokens.
template <typename Token, typename Out>
__device__ __forceinline__ void store_as(const Elements<Token>& e, uint8_t* row, int64_t at, int alignment) {
  if constexpr (std::is_same_v<Token, Out>) {
    e.store(row + at, alignment);
  } else {
    static_assert(std::is_same_v<Out, Fp32Token> && Token::kBytes == 2, "16 bits to 32");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Elements<Out> wide;
#pragma unroll
      for (int i = 0; i < Elements<Out>::kCount; ++i) wide.x[i] = e.x[half * Elements<Out>::kCount + i];
      wide.store(row + 2 * at + half * 16, alignment);
    }
  }
}

// The threads of a row look at its token's slots; all but those of the first write zeros.
template <typename Token, typename Out>
__global__ void __launch_bounds__(kRowThreads, 4)
    merge_slots(const MergeArguments a, const RowThreads threads) {
  using E = Elements<Token>;
  const int row_in_block = threads.row_of(threadIdx.x);
  const int first_chunk = static_cast<int>(threadIdx.x) - row_in_block * threads.threads_per_row;
  if (row_in_block >= threads.rows_per_block) return;
  const IndexView& count = a.m.slot_count;
  const int64_t in_use =
      count.is_int64 ? *static_cast<const int64_t*>(count.data) : *static_cast<const int32_t*>(count.data);
  for (int64_t s = static_cast<int64_t>(blockIdx.x) * threads.rows_per_block + row_in_block; s < in_use;
       s += static_cast<int64_t>(gridDim.x) * threads.rows_per_block) {
    const int64_t source = a.m.slot_source[s];
    if (source < 0) continue;
    const SlotAddress* slots = a.m.slots + ((source >> 32) * a.m.tokens + (source & 0xFFFFFFFF)) * a.m.top_k;
    int k = 0;
    while (slots[k] < 0) ++k;  // s is one of them
    const bool first = slot_of(slots[k]) == s;
    uint8_t* out = static_cast<uint8_t*>(a.m.out.data) + s * a.out_stride;
    for (int chunk = first_chunk; chunk < threads.chunks; chunk += threads.threads_per_row) {
      const int64_t at = static_cast<int64_t>(chunk) * 16;
      E sum;
      clear(&sum);
      for (int i = k; first && i < a.m.top_k; ++i) {
        if (slots[i] < 0) continue;
        const Slot slot(a.rows, a.weights, slots[i]);
        slot.add(slot.load(at), &sum);
      }
      store_as<Token, Out>(sum, out, at, a.out_alignment);
    }
  }
}

// A thread an access of the result.
template <typename Token>
__global__ void __launch_bounds__(kThreads, 4) add_sums(const float* sums, uint8_t* result, int64_t stride,
                                                        int alignment, int64_t chunks, int64_t count) {
  using E = Elements<Token>;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    uint8_t* to = result + i / chunks * stride + i % chunks * 16;
    E sum;
    sum.load(to, alignment);
#pragma unroll
    for (int part = 0; part < E::kCount / 4; ++part) {
      const float4 more = reinterpret_cast<const float4*>(sums)[i * (E::kCount / 4) + part];
      sum.x[part * 4] = add_rn(sum.x[part * 4], more.x);
      sum.x[part * 4 + 1] = add_rn(sum.x[part * 4 + 1], more.y);
      sum.x[part * 4 + 2] = add_rn(sum.x[part * 4 + 2], more.z);
      sum.x[part * 4 + 3] = add_rn(sum.x[part * 4 + 3], more.w);
    }
    sum.store(to, alignment);
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    gather_scalars(int32_t top_k, const SlotAddress* slots, RankArrays values, float* out, int64_t out_stride,
                   int64_t count) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const SlotAddress address = slots[i];
    out[i / top_k * out_stride + i % top_k] =
        address < 0 ? 0.0f : *values.floats(rank_of(address), slot_of(address));
  }
}

template <typename Token>
Status launch_reduce(const ReduceArguments& a, const LaunchContext& context) {
  RowThreads threads = row_threads(a.r.result.columns() / Elements<Token>::kCount);
  if (a.r.partial_format == NVTE_EP_FORMAT_MXFP8) {
    return launch_kernel<sum_mxfp8_partials<Token>>("sum_mxfp8_partials", context,
                                                    row_launch(threads, a.tokens), a, threads);
  }
  const int staged_rows = std::max(1, kStagedSlots / std::max(1, a.r.top_k));
  threads.rows_per_block = std::min(threads.rows_per_block, staged_rows);
  return launch_kernel<sum_rows<Token>>("sum_rows", context, row_launch(threads, a.tokens), a, threads);
}

template <typename Token>
Status launch_merge(const MergeArguments& a, const LaunchContext& context) {
  const RowThreads threads = row_threads(a.m.out.columns() / Elements<Token>::kCount);
  const LaunchShape shape = row_launch(threads, a.m.out.rows());
  if (a.m.out.dtype == a.m.rows.dtype) {
    return launch_kernel<merge_slots<Token, Token>>("merge_slots", context, shape, a, threads);
  }
  if constexpr (Token::kBytes == 2) {
    return launch_kernel<merge_slots<Token, Fp32Token>>("merge_slots", context, shape, a, threads);
  }
  return Status(NVTE_EP_STATUS_INTERNAL, "merge_slots: slots are merged to their own type or to FP32");
}

template <typename Token>
Status launch_add(const float* sums, const TensorView& result, const LaunchContext& context) {
  const int64_t stride = result.stride * dtype_bytes(result.dtype);
  const int64_t chunks = result.columns() / Elements<Token>::kCount;
  const int64_t count = result.rows() * chunks;
  LaunchShape shape;
  shape.bounded = true;
  shape.blocks = (count + kThreads - 1) / kThreads;
  shape.threads = kThreads;
  return launch_kernel<add_sums<Token>>("add_sums", context, shape, sums, static_cast<uint8_t*>(result.data),
                                        stride, alignment_of(result.data, stride), chunks, count);
}

}  // namespace

Status launch_gather_rows(const GatherRows& g, const LaunchContext& context) {
  const auto blocks_of = [](int64_t warps) { return (warps + kGatherWarps - 1) / kGatherWarps; };
  const int out_alignment = alignment_of(g.out, g.out_stride);
  LaunchShape shape;
  shape.threads = kThreads;
  const bool by_source = g.source_slots != nullptr && g.out != nullptr && g.part.which != TokenPart::kAll;
  if (!by_source) {
    shape.bounded = true;
    shape.blocks = blocks_of(g.slots);
    return launch_kernel<gather_rows>("gather_rows", context, shape, g, out_alignment);
  }
  const int64_t pieces = (g.row_bytes + RowPiece::kBytes - 1) / RowPiece::kBytes;
  const int64_t ranks = g.part.which == TokenPart::kOwn ? 1 : g.num_ranks - 1;
  const int64_t spread_blocks = blocks_of(ranks * (g.part.end - g.part.begin) * pieces);
  const bool looks_at_slots = g.part.which == TokenPart::kOwn || g.out_weights != nullptr;
  shape.blocks =
      spread_blocks + (looks_at_slots ? std::min(blocks_of(g.slots), int64_t{context.sms} * 4) : 0);
  if (shape.blocks == 0) return Status();
  return launch_kernel<spread_rows>("spread_rows", context, shape, g, out_alignment, pieces, spread_blocks);
}

Status launch_reduce_rows(const ReduceRows& r, const LaunchContext& context) {
  ReduceArguments a{};
  a.r = r;
  a.result_stride = r.result.stride * dtype_bytes(r.result.dtype);
  a.result_alignment = alignment_of(r.result.data, a.result_stride);
  a.tokens = r.result.rows();
  switch (r.result.dtype) {
    case DType::kBFloat16:
      return launch_reduce<Bf16Token>(a, context);
    case DType::kFloat16:
      return launch_reduce<Fp16Token>(a, context);
    default:
      return launch_reduce<Fp32Token>(a, context);
  }
}

Status launch_merge_slots(const MergeSlots& m, const LaunchContext& context) {
  MergeArguments a{};
  a.m = m;
  a.rows.block = m.rows.data;
  a.rows.row_stride = m.rows.stride * dtype_bytes(m.rows.dtype);
  a.weights.block = m.weights;
  a.weights.row_stride = 4;
  a.out_stride = m.out.stride * dtype_bytes(m.out.dtype);
  a.out_alignment = alignment_of(m.out.data, a.out_stride);
  switch (m.rows.dtype) {
    case DType::kBFloat16:
      return launch_merge<Bf16Token>(a, context);
    case DType::kFloat16:
      return launch_merge<Fp16Token>(a, context);
    default:
      return launch_merge<Fp32Token>(a, context);
  }
}

Status launch_add_sums(const float* sums, const TensorView& result, const LaunchContext& context) {
  switch (result.dtype) {
    case DType::kBFloat16:
      return launch_add<Bf16Token>(sums, result, context);
    case DType::kFloat16:
      return launch_add<Fp16Token>(sums, result, context);
    default:
      return launch_add<Fp32Token>(sums, result, context);
  }
}

Status launch_gather_scalars(int32_t top_k, const SlotAddress* slots, const RankArrays& values,
                             const TensorView& out, const LaunchContext& context) {
  const int64_t count = out.rows() * top_k;
  LaunchShape shape;
  shape.bounded = true;
  shape.blocks = (count + kThreads - 1) / kThreads;
  shape.threads = kThreads;
  return launch_kernel<gather_scalars>("gather_scalars", context, shape, top_k, slots, values,
                                       static_cast<float*>(out.data), out.stride, count);
}

}  // namespace nvte_ep
