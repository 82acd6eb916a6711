// The device's part of dispatch and combine: rows into slots, and slots summed back to tokens.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "backends/cuda/launch.h"
#include "backends/cuda/launch_kernel.h"
#include "device/memory.cuh"
#include "formats/mxfp8.h"
#include "formats/numerics.h"

namespace nvte_ep {
namespace {

constexpr int kGatherThreads = 256;
constexpr int kReduceThreads = 256;
constexpr int kVector = 8;  // elements that a thread sums at a time

// ---- rows into slots ----

__device__ __forceinline__ int pointer_alignment(const void* p, int64_t stride) {
  const uint64_t bits = reinterpret_cast<uint64_t>(p) | static_cast<uint64_t>(stride);
  return bits % 16 == 0 ? 16 : (bits % 4 == 0 ? 4 : (bits % 2 == 0 ? 2 : 1));
}

// One warp a slot.
__global__ void __launch_bounds__(kGatherThreads) gather_rows_kernel(GatherRows g) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kGatherThreads / 32);
  for (int64_t s = static_cast<int64_t>(blockIdx.x) * (kGatherThreads / 32) + threadIdx.x / 32; s < g.slots; s += warps) {
    const int64_t source = g.slot_source[s];
    const int64_t rank = source >> 32;
    const int64_t token = source & 0xFFFFFFFF;
    if (g.out != nullptr) {
      uint8_t* out = static_cast<uint8_t*>(g.out) + s * g.out_stride;
      const uint8_t* row = nullptr;
      if (source >= 0) row = static_cast<const uint8_t*>(g.rank_rows[rank]) + token * g.rank_strides[rank];
      const int alignment = min(pointer_alignment(out, 0), pointer_alignment(row, 0));
      for (int64_t at = lane * 16; at < g.row_bytes; at += 512) {
        const int bytes = static_cast<int>(min(int64_t{16}, g.row_bytes - at));
        const uint4 v = row ? device::load16(row + at, alignment, bytes) : make_uint4(0, 0, 0, 0);
        device::store16(out + at, v, alignment, bytes);
      }
    }
    if (g.out_weights != nullptr && lane == 0) {
      g.out_weights[s] = source < 0 ? 0.0f : g.rank_weights[rank][token * g.rank_weight_strides[rank] + g.slot_k[s]];
    }
  }
}

// ---- slots summed to tokens ----

template <DType kType>
struct Element;
template <>
struct Element<DType::kBFloat16> {
  using Raw = uint16_t;
  static __device__ __forceinline__ float load(Raw x) { return bf16_to_float(x); }
  static __device__ __forceinline__ Raw store(float x) { return float_to_bf16(x); }
};
template <>
struct Element<DType::kFloat16> {
  using Raw = uint16_t;
  static __device__ __forceinline__ float load(Raw x) { return __half2float(__ushort_as_half(x)); }
  static __device__ __forceinline__ Raw store(float x) { return float_to_fp16(x); }
};
template <>
struct Element<DType::kFloat32> {
  using Raw = float;
  static __device__ __forceinline__ float load(Raw x) { return x; }
  static __device__ __forceinline__ Raw store(float x) { return canonical_nan(x); }
};

// Eight elements as they lie in memory.
template <typename Raw>
struct Vector {
  static constexpr int kWords = kVector * static_cast<int>(sizeof(Raw)) / 16;
  uint4 word[kWords];
  __device__ __forceinline__ void load(const Raw* p, int alignment) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = device::load16(reinterpret_cast<const uint4*>(p) + i, alignment);
  }
  __device__ __forceinline__ void store(Raw* p, int alignment) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) device::store16(reinterpret_cast<uint4*>(p) + i, word[i], alignment);
  }
  __device__ __forceinline__ Raw at(int i) const {
    Raw x;
    memcpy(&x, reinterpret_cast<const char*>(word) + i * sizeof(Raw), sizeof(Raw));
    return x;
  }
  __device__ __forceinline__ void put(int i, Raw x) { memcpy(reinterpret_cast<char*>(word) + i * sizeof(Raw), &x, sizeof(Raw)); }
};

__device__ __forceinline__ int32_t rank_of(SlotAddress address) { return static_cast<int32_t>(address >> kSlotBits); }
__device__ __forceinline__ int64_t slot_of(SlotAddress address) { return address & ((SlotAddress{1} << kSlotBits) - 1); }

// The row of a slot and its weight, found once per token.
struct Term {
  const uint8_t* row;  // null: none
  float weight;
  int32_t rank;
};

template <typename E>
__device__ __forceinline__ void add(float (&sum)[kVector], const Vector<typename E::Raw>& v, bool weighted, float weight) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float x = E::load(v.at(i));
    sum[i] = add_rn(sum[i], weighted ? mul_rn(weight, x) : x);
  }
}

// A partial row rounded to MXFP8 and back; four lanes hold a block of 32.
__device__ __forceinline__ void round_to_mxfp8(float (&x)[kVector]) {
  uint32_t amax = 0;
  bool all_nan = true;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint32_t a = float_bits(x[i]) & 0x7FFFFFFFu;
    all_nan = all_nan && a > 0x7F800000u;
    amax = max(amax, a > 0x7F800000u ? 0u : a);
  }
  const unsigned group = 0xFu << (threadIdx.x % 32 / 4 * 4);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) amax = max(amax, __shfl_xor_sync(group, amax, step));
  all_nan = __all_sync(group, all_nan);
  const uint8_t scale = Mxfp8::scale(bits_float(all_nan ? kNanBits : amax));
  const float multiplier = e8m0_inverse(scale);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] = Mxfp8::decode(float_to_e4m3(mul_rn(x[i], multiplier)), scale);
}

// One block a token at a time. Four slots' loads are in flight before the first is added, in order of k.
template <DType kType, bool kMxfp8>
__global__ void __launch_bounds__(kReduceThreads) reduce_rows_kernel(ReduceRows r) {
  using E = Element<kType>;
  using Raw = typename E::Raw;
  extern __shared__ Term terms[];
  const int64_t hidden = r.result.shape[1];
  for (int64_t t = blockIdx.x; t < r.result.shape[0]; t += gridDim.x) {
    for (int k = threadIdx.x; k < r.top_k; k += kReduceThreads) {
      const SlotAddress address = r.slots[t * r.top_k + k];
      Term term{nullptr, 0.0f, -1};
      if (address >= 0) {
        term.rank = rank_of(address);
        term.row = static_cast<const uint8_t*>(r.rank_rows[term.rank]) + slot_of(address) * r.rank_strides[term.rank];
        const float* weights = r.rank_weights[term.rank];
        term.weight = weights ? weights[slot_of(address)] : 1.0f;
        if (!weights) term.rank |= 1 << 30;  // unweighted: nothing is multiplied
      }
      terms[k] = term;
    }
    __syncthreads();
    Raw* result = static_cast<Raw*>(r.result.data) + t * r.result.stride;
    const int result_alignment = pointer_alignment(result, 0);
    const int64_t rounds = (hidden / kVector + kReduceThreads - 1) / kReduceThreads;
    for (int64_t round = 0; round < rounds; ++round) {
      const int64_t h = (round * kReduceThreads + threadIdx.x) * kVector;
      if (h >= hidden) continue;  // blocks of 32 elements leave together: their four lanes take the same branch
      float sum[kVector] = {};
      const auto add_terms = [&](float (&to)[kVector], int32_t only_rank) {
        bool any = false;
        for (int k0 = 0; k0 < r.top_k; k0 += 4) {
          Vector<Raw> v[4];
          bool mine[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            mine[i] = k0 + i < r.top_k && terms[k0 + i].row != nullptr &&
                      (only_rank < 0 || (terms[k0 + i].rank & ~(1 << 30)) == only_rank);
            if (!mine[i]) continue;
            const Raw* row = reinterpret_cast<const Raw*>(terms[k0 + i].row);
            v[i].load(row + h, pointer_alignment(row, 0));
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (!mine[i]) continue;
            any = true;
            add<E>(to, v[i], !(terms[k0 + i].rank & (1 << 30)), terms[k0 + i].weight);
          }
        }
        return any;
      };
      if constexpr (kMxfp8) {
        for (int32_t rank = 0; rank < r.num_ranks; ++rank) {
          float partial[kVector] = {};
          if (!add_terms(partial, rank)) continue;
          round_to_mxfp8(partial);
#pragma unroll
          for (int i = 0; i < kVector; ++i) sum[i] = add_rn(sum[i], partial[i]);
        }
      } else {
        add_terms(sum, -1);
      }
      Vector<Raw> out;
      if (r.accumulate) {
        out.load(result + h, result_alignment);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[i] = add_rn(E::load(out.at(i)), sum[i]);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) out.put(i, E::store(sum[i]));
      out.store(result + h, result_alignment);
    }
    __syncthreads();
  }
}

__global__ void gather_scalars_kernel(int32_t top_k, const SlotAddress* slots, const float* const* rank_values,
                                      float* out, int64_t rows, int64_t stride) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * top_k;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const SlotAddress address = slots[i];
    out[i / top_k * stride + i % top_k] = address < 0 ? 0.0f : rank_values[rank_of(address)][slot_of(address)];
  }
}

template <DType kType>
Status launch_typed(const ReduceRows& reduce, const LaunchContext& context) {
  LaunchShape shape;
  shape.threads = kReduceThreads;
  shape.blocks = reduce.result.rows();
  shape.shared_bytes = reduce.top_k * static_cast<int>(sizeof(Term));
  return reduce.partial_format == NVTE_EP_FORMAT_MXFP8
             ? launch_kernel<reduce_rows_kernel<kType, true>>("reduce_rows", context, shape, reduce)
             : launch_kernel<reduce_rows_kernel<kType, false>>("reduce_rows", context, shape, reduce);
}

}  // namespace

Status launch_gather_rows(const GatherRows& gather, const LaunchContext& context) {
  if (gather.slots == 0) return Status();
  LaunchShape shape;
  shape.threads = kGatherThreads;
  shape.blocks = (gather.slots + kGatherThreads / 32 - 1) / (kGatherThreads / 32);
  return launch_kernel<gather_rows_kernel>("gather_rows", context, shape, gather);
}

Status launch_reduce_rows(const ReduceRows& reduce, const LaunchContext& context) {
  if (reduce.result.size() == 0) return Status();
  switch (reduce.result.dtype) {
    case DType::kBFloat16: return launch_typed<DType::kBFloat16>(reduce, context);
    case DType::kFloat16: return launch_typed<DType::kFloat16>(reduce, context);
    default: return launch_typed<DType::kFloat32>(reduce, context);
  }
}

Status launch_gather_scalars(int32_t top_k, const SlotAddress* slots, const float* const* rank_values,
                             const TensorView& out, const LaunchContext& context) {
  if (out.size() == 0) return Status();
  LaunchShape shape;
  shape.threads = 256;
  shape.blocks = (out.rows() * top_k + 255) / 256;
  return launch_kernel<gather_scalars_kernel>("gather_scalars", context, shape, top_k, slots, rank_values,
                                              static_cast<float*>(out.data), out.rows(), out.stride);
}

}  // namespace nvte_ep
