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

// A warp a slot. Strides and row bytes that 16 does not divide are moved in smaller pieces.
__global__ void __launch_bounds__(kThreads, 4) gather_rows(const GatherRows g, int out_alignment) {
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kDepth = 4;
  int64_t slots = g.slots;
  if (g.slot_count.data != nullptr) {
    const int64_t count = g.slot_count.is_int64 ? *static_cast<const int64_t*>(g.slot_count.data)
                                                : *static_cast<const int32_t*>(g.slot_count.data);
    slots = count < slots ? count : slots;
  }
  for (int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id(); slot < slots;
       slot += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t source = g.slot_source != nullptr ? g.slot_source[slot] : slot;
    const int64_t rank = source >> 32;
    const int64_t token = source & 0xFFFFFFFF;
    if (g.out_weights != nullptr && lane_id() == 0) {
      g.out_weights[slot] = source < 0 ? 0.0f : g.weights.floats(rank, token)[g.slot_k[slot]];
    }
    if (g.out == nullptr) continue;
    uint8_t* out = static_cast<uint8_t*>(g.out) + slot * g.out_stride;
    const uint8_t* in = source < 0 ? nullptr : g.rows.row(rank, token);
    const int in_alignment = in == nullptr ? 16 : ((reinterpret_cast<uint64_t>(in) & 15) == 0 ? 16 : 1);
    const int alignment = in_alignment < out_alignment ? in_alignment : out_alignment;
    const int64_t chunks = (g.row_bytes + 15) / 16;
    for (int64_t c = lane_id(); c < chunks; c += kDepth * kWarp) {
      uint4 v[kDepth];
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const int64_t at = (c + d * kWarp) * 16;
        v[d] = make_uint4(0, 0, 0, 0);
        if (in != nullptr && at < g.row_bytes) {
          v[d] = load16(in + at, alignment, static_cast<int>(g.row_bytes - at < 16 ? g.row_bytes - at : 16));
        }
      }
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const int64_t at = (c + d * kWarp) * 16;
        if (at < g.row_bytes) {
          store16(out + at, v[d], alignment, static_cast<int>(g.row_bytes - at < 16 ? g.row_bytes - at : 16));
        }
      }
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

// A slot on its way: its 16 bytes, and its weight.
template <typename Token>
struct SlotPart {
  uint4 bytes;
  float weight;
  bool weighted;

  __device__ __forceinline__ void load(const RankArrays& rows, const RankArrays& weights, SlotAddress address,
                                       int64_t at) {
    const int32_t rank = rank_of(address);
    const int64_t slot = slot_of(address);
    const uint8_t* row = rows.row(rank, slot) + at;
    const float* its_weight = weights.floats(rank, slot);
    bytes = load16(row, (reinterpret_cast<uint64_t>(row) & 15) == 0 ? 16 : 1);
    weighted = its_weight != nullptr;
    weight = weighted ? *its_weight : 1.0f;
  }
  // sum += weight * the slot's elements, two roundings.
  __device__ __forceinline__ void add_to(Elements<Token>* sum) const {
    Elements<Token> e;
    e.unpack(bytes);
#pragma unroll
    for (int i = 0; i < Elements<Token>::kCount; ++i) {
      sum->x[i] = add_rn(sum->x[i], weighted ? mul_rn(weight, e.x[i]) : e.x[i]);
    }
  }
};

template <typename Token, bool kMxfp8Partials>
__global__ void __launch_bounds__(kRowThreads, 4)
    reduce_rows(const ReduceArguments a, const RowThreads threads) {
  using E = Elements<Token>;
  const int row_in_block = static_cast<int>(threadIdx.x) / threads.threads_per_row;
  const int first_chunk = static_cast<int>(threadIdx.x) % threads.threads_per_row;
  if (row_in_block >= threads.rows_per_block) return;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * threads.rows_per_block + row_in_block; t < a.tokens;
       t += static_cast<int64_t>(gridDim.x) * threads.rows_per_block) {
    const SlotAddress* slots = a.r.slots + t * a.r.top_k;
    uint8_t* result = static_cast<uint8_t*>(a.r.result.data) + t * a.result_stride;
    for (int chunk = first_chunk; chunk < threads.chunks; chunk += threads.threads_per_row) {
      const int64_t at = static_cast<int64_t>(chunk) * 16;
      E sum;
      clear(&sum);
      if constexpr (!kMxfp8Partials) {
        constexpr int kInFlight = 4;  // slots whose loads are issued before the first is added
        for (int k = 0; k < a.r.top_k; k += kInFlight) {
          SlotPart<Token> part[kInFlight];
          bool there[kInFlight];
#pragma unroll
          for (int i = 0; i < kInFlight; ++i) {
            there[i] = k + i < a.r.top_k && slots[k + i] >= 0;
            if (there[i]) part[i].load(a.r.rows, a.r.weights, slots[k + i], at);
          }
#pragma unroll
          for (int i = 0; i < kInFlight; ++i) {
            if (there[i]) part[i].add_to(&sum);
          }
        }
      } else {
        for (int32_t rank = 0; rank < a.r.num_ranks; ++rank) {
          E partial;
          clear(&partial);
          bool any = false;
          for (int k = 0; k < a.r.top_k; ++k) {
            if (slots[k] < 0 || rank_of(slots[k]) != rank) continue;
            any = true;
            SlotPart<Token> part;
            part.load(a.r.rows, a.r.weights, slots[k], at);
            part.add_to(&partial);
          }
          if (!any) continue;  // the same for all lanes of a token
          round_to_mxfp8(&partial);
#pragma unroll
          for (int i = 0; i < E::kCount; ++i) sum.x[i] = add_rn(sum.x[i], partial.x[i]);
        }
      }
      if (a.r.accumulate) {
        E before;
        before.load(result + at, a.result_alignment);
#pragma unroll
        for (int i = 0; i < E::kCount; ++i) sum.x[i] = add_rn(before.x[i], sum.x[i]);
      }
      sum.store(result + at, a.result_alignment);
    }
  }
}

struct MergeArguments {
  MergeSlots m;
  RankArrays rows, weights;
  int64_t out_stride;  // bytes
  int out_alignment;
};

// The threads of a row look at its token's slots; all but those of the first write zeros.
template <typename Token>
__global__ void __launch_bounds__(kRowThreads, 4)
    merge_slots(const MergeArguments a, const RowThreads threads) {
  using E = Elements<Token>;
  const int row_in_block = static_cast<int>(threadIdx.x) / threads.threads_per_row;
  const int first_chunk = static_cast<int>(threadIdx.x) % threads.threads_per_row;
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
        SlotPart<Token> part;
        part.load(a.rows, a.weights, slots[i], at);
        part.add_to(&sum);
      }
      sum.store(out + at, a.out_alignment);
    }
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
  const RowThreads threads = row_threads(a.r.result.columns() / Elements<Token>::kCount);
  const LaunchShape shape = row_launch(threads, a.tokens);
  return a.r.partial_format == NVTE_EP_FORMAT_MXFP8
             ? launch_kernel<reduce_rows<Token, true>>("reduce_rows", context, shape, a, threads)
             : launch_kernel<reduce_rows<Token, false>>("reduce_rows", context, shape, a, threads);
}

template <typename Token>
Status launch_merge(const MergeArguments& a, const LaunchContext& context) {
  const RowThreads threads = row_threads(a.m.out.columns() / Elements<Token>::kCount);
  return launch_kernel<merge_slots<Token>>("merge_slots", context, row_launch(threads, a.m.out.rows()), a,
                                           threads);
}

}  // namespace

Status launch_gather_rows(const GatherRows& g, const LaunchContext& context) {
  LaunchShape shape;
  shape.bounded = true;
  shape.blocks = (g.slots + kThreads / kWarp - 1) / (kThreads / kWarp);
  shape.threads = kThreads;
  return launch_kernel<gather_rows>("gather_rows", context, shape, g, alignment_of(g.out, g.out_stride));
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
  switch (m.out.dtype) {
    case DType::kBFloat16:
      return launch_merge<Bf16Token>(a, context);
    case DType::kFloat16:
      return launch_merge<Fp16Token>(a, context);
    default:
      return launch_merge<Fp32Token>(a, context);
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
