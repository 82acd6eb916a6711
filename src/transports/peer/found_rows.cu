#include "transports/peer/found_rows.h"

#include "device/codec_options.cuh"
#include "device/e4m3.cuh"
#include "device/kernel_order.cuh"
#include "device/row_rescale.cuh"
#include "device/warp.cuh"
#include "transports/peer/meeting.cuh"
#include "transports/peer/travelling_rows.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// ---- where rows are -----------------------------------------------------------------------------------------------

__device__ __forceinline__ uint8_t* copy_of(const FindRowsArguments& a, int32_t rank, int64_t token) {
  return a.copies +
         (int64_t{place_among_others(rank, a.maps.rank)} * a.maps.tokens + token) * a.rows.row_bytes;
}

// Of each expert here, in shared memory: where its slots begin, and its largest exponent.
struct Expert {
  int32_t first_slot;
  int32_t k;
};

// The expert of a slot in use.
__device__ __forceinline__ int32_t expert_of(const Expert* experts, int32_t count, int64_t slot) {
  int32_t low = 0, high = count;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (slot >= experts[middle].first_slot ? low : high) = middle;
  }
  return low;
}

// The largest exponent of an expert's rows, as ranks have published it; below kMinExponent: no row is live.
__device__ __forceinline__ int largest_exponent(const FindRowsArguments& a, uint32_t now, int32_t expert) {
  uint32_t largest = 0;
  for (int32_t r = 0; r < a.maps.size; ++r) {
    const uint32_t* theirs = a.pools.to_read<uint32_t>(a.exponents.maxima.area, r, now);
    largest = max(largest, theirs[a.maps.rank * a.maps.local_experts() + expert]);
  }
  return static_cast<int>(largest) + Nvfp4::kMinExponent - 1;
}

// All sums are there: both exponents, and the parts of the operand that hold them.
__device__ __forceinline__ void find_exponents(const FindRowsArguments& a, uint32_t now, int32_t expert) {
  const FoundExponents& x = a.exponents;
  bool live, illegal = false;
  int k, column_k;
  if (x.fixed_expert_scale != nullptr) {
    live = a.maps.rows_per_expert[expert] > 0;
    illegal = Nvfp4::classify(x.fixed_expert_scale[expert], &k) != Nvfp4::ScaleKind::kLive;
    if (illegal) {
      k = Nvfp4::kMinExponent;
      report(x.findings, NVTE_EP_FINDING_EXPERT_SCALE);
    }
    column_k = k + 2;
  } else {
    k = largest_exponent(a, now, expert);
    live = k >= Nvfp4::kMinExponent;
    k = max(k, Nvfp4::kMinExponent);
    const uint32_t sum = __ldcg(&x.sums[expert]);
    column_k = live && !x.column_max ? Nvfp4::l1_exponent(k, sum) : k + 2;
    x.sums[expert] = 0;
  }
  const auto tell = [&](float* part, float unit, int exponent) {
    if (part == nullptr) return;
    part[expert] = !live ? 0.0f : (illegal ? bits_float(kNanBits) : mul_rn(unit, exp2_int(exponent)));
  };
  tell(x.amax, Nvfp4::kRange, k);
  tell(x.columnwise_amax, Nvfp4::kRange, column_k);
  tell(x.expert_scale, 1.0f, k);
  tell(x.columnwise_expert_scale, 1.0f, column_k);
  x.found[2 * expert] = illegal ? kIllegalExponent : static_cast<uint8_t>(k - Nvfp4::kMinExponent);
  x.found[2 * expert + 1] = illegal ? kIllegalExponent : static_cast<uint8_t>(column_k - Nvfp4::kMinExponent);
}

__global__ void __launch_bounds__(kThreads) find_rows(const FindRowsArguments a) {
  wait_for_kernel_before();
  const RouteMaps& m = a.maps;
  const FoundExponents& x = a.exponents;
  const uint32_t now = *a.pools.epoch;
  const int64_t total = m.totals[0];
  const bool sums = x.found != nullptr && x.fixed_expert_scale == nullptr && !x.column_max;
  extern __shared__ Expert experts[];  // [local experts], where sums are wanted
  if (sums) {
    for (int32_t e = static_cast<int32_t>(threadIdx.x); e < m.local_experts(); e += kThreads) {
      experts[e] = Expert{static_cast<int32_t>(m.row_offsets[e]), largest_exponent(a, now, e)};
    }
    __syncthreads();
  }
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  // Whole warps: slabs are multiples of 16 slots where sums are wanted.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + warp_id() * kWarp; first < total;
       first += step) {
    const int64_t slot = first + lane_id();
    const int64_t source = slot < total ? m.slot_source[slot] : -1;
    const uint8_t* row = a.zero_row;
    if (source >= 0) {
      const int32_t rank = static_cast<int32_t>(source >> 32);
      row = row_of(a.pools, a.rows, rank, source & 0xFFFFFFFF, now);
      a.found[slot] = a.copies != nullptr && rank != m.rank ? copy_of(a, rank, source & 0xFFFFFFFF) : row;
    } else if (slot < total) {
      a.found[slot] = row;
    }
    if (!sums) continue;
    const float scale = *reinterpret_cast<const float*>(row + x.token_scale_offset);
    const int32_t expert = slot < total ? expert_of(experts, m.local_experts(), slot) : 0;
    int exponent;
    uint32_t sum = Nvfp4::classify(scale, &exponent) == Nvfp4::ScaleKind::kLive
                       ? Nvfp4::l1_term(experts[expert].k, exponent)
                       : 0;
#pragma unroll
    for (int d = 1; d < Nvfp4::kBlock; d *= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
    if (lane_id() % Nvfp4::kBlock == 0 && sum != 0) atomicMax(&x.sums[expert], sum);
  }
  if (x.found == nullptr || !is_last_block(a.ticket)) return;
  __syncthreads();  // a block alone has not waited for its sums yet
  for (int32_t e = static_cast<int32_t>(threadIdx.x); e < m.local_experts(); e += kThreads) {
    find_exponents(a, now, e);
  }
}

// ---- copies -------------------------------------------------------------------------------------------------------

// Whether a token of a rank has a slot here. A warp asks.
__device__ __forceinline__ bool has_slots(const RouteMaps& m, int32_t rank, int64_t token) {
  const int32_t* slots = m.row_slots + (static_cast<int64_t>(rank) * m.tokens + token) * m.top_k;
  bool here = false;
  for (int k = lane_id(); k < m.top_k; k += kWarp) here |= slots[k] >= 0;
  return __any_sync(kAllLanes, here) != 0;
}

// Few blocks, which leave room for the kernel that runs beside them and keep the links busy all the same: a warp a row, eight
// chunks of 16 bytes a lane at a time.
constexpr int kDepth = 8;
constexpr int kCopyBlocks = 48;

__global__ void __launch_bounds__(kThreads) copy_rows(const FindRowsArguments a) {
  wait_for_kernel_before();
  let_next_kernel_start();
  const RouteMaps& m = a.maps;
  const uint32_t now = *a.pools.epoch;
  const int64_t peers = m.size - 1;
  const int chunks = static_cast<int>(a.rows.row_bytes / 16);
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id(); item < peers * m.tokens;
       item += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t token = item / peers;
    const int32_t peer = static_cast<int32_t>(item % peers);  // side by side, so that all links are in use
    const int32_t rank = peer + (peer >= m.rank);
    if (!has_slots(m, rank, token)) continue;
    const uint4* from = reinterpret_cast<const uint4*>(row_of(a.pools, a.rows, rank, token, now));
    uint4* to = reinterpret_cast<uint4*>(copy_of(a, rank, token));
    for (int first = lane_id(); first < chunks; first += kDepth * kWarp) {
      uint4 v[kDepth];
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (first + d * kWarp < chunks) v[d] = __ldcs(from + first + d * kWarp);
      }
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (first + d * kWarp < chunks) to[first + d * kWarp] = v[d];
      }
    }
  }
}

}  // namespace

Status launch_find_rows(const FindRowsArguments& a, const LaunchContext& context) {
  LaunchShape shape;
  shape.threads = kThreads;
  shape.blocks =
      std::max<int64_t>(1, std::min<int64_t>((a.maps.capacity + kThreads - 1) / kThreads, 4 * context.sms));
  shape.bounded = true;
  shape.overlaps = true;
  shape.shared_bytes =
      a.exponents.found == nullptr ? 0 : a.maps.local_experts() * static_cast<int>(sizeof(Expert));
  return launch_kernel<find_rows>("find_rows", context, shape, a);
}

Status launch_copy_rows(const FindRowsArguments& a, const LaunchContext& context) {
  LaunchShape shape;
  shape.threads = kThreads;
  const int64_t rows = (a.maps.size - 1) * int64_t{a.maps.tokens};
  shape.blocks = std::min<int64_t>((rows + kWarps - 1) / kWarps, kCopyBlocks);
  shape.bounded = true;
  shape.overlaps = true;
  return launch_kernel<copy_rows>("copy_rows", context, shape, a);
}

}  // namespace nvte_ep
