// Rows that carry where they come from: marked at their source, found again among rows that came in any order, and put back
// into that order.
#include <algorithm>

#include "backends/cuda/launch.h"
#include "device/launch_kernel.h"
#include "device/memory.cuh"
#include "device/warp.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

__device__ __forceinline__ int64_t slot_of(SlotAddress address) {
  return address & ((int64_t{1} << kSlotBits) - 1);
}
__device__ __forceinline__ int64_t in_use(const IndexView& count, int64_t most) {
  const int64_t n =
      count.is_int64 ? *static_cast<const int64_t*>(count.data) : *static_cast<const int32_t*>(count.data);
  return n < most ? n : most;
}

// A thread a value of a trailer.
__global__ void __launch_bounds__(kThreads) tag_rows(const TagRows t) {
  constexpr int kTagWords = kTagBytes / 4;
  const int64_t words = kTagWords + t.top_k;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t token = i / words;
  const int word = static_cast<int>(i % words);
  if (token >= t.tokens) return;
  int32_t* trailer = reinterpret_cast<int32_t*>(t.rows + token * t.row_stride + t.trailer);
  if (word >= kTagWords) {
    const int k = word - kTagWords;
    reinterpret_cast<float*>(trailer)[word] =
        t.weights != nullptr ? t.weights[token * t.weights_stride + k] : 0.0f;
  } else {
    trailer[word] = word == 0 ? t.rank : word == 1 ? static_cast<int32_t>(token) : 0;
  }
}

__device__ __forceinline__ void tell_difference(const LocateRows& l) {
  *static_cast<volatile int32_t*>(l.differs) = 1;
}

// A thread a row that may have come; the blocks behind them look at the slots for padding, the first also at the counts.
__global__ void __launch_bounds__(kThreads) locate_rows(const LocateRows l, int64_t row_blocks) {
  if (blockIdx.x >= row_blocks) {
    if (blockIdx.x == row_blocks) {
      for (int32_t e = static_cast<int32_t>(threadIdx.x); e < l.num_experts; e += kThreads) {
        if (l.counts[e] != (e < l.num_expected ? l.expected[e] : 0)) tell_difference(l);
      }
    }
    const int64_t slots = in_use(l.slot_count, l.num_slots);
    for (int64_t s = (blockIdx.x - row_blocks) * kThreads + threadIdx.x; s < slots;
         s += (gridDim.x - row_blocks) * kThreads) {
      if (l.slot_source[s] < 0) l.place[s] = -1;
    }
    return;
  }
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int32_t expert = static_cast<int32_t>(at / l.rows_per_expert);
  if (expert >= l.num_experts || at % l.rows_per_expert >= l.counts[expert]) return;
  const int32_t* tag = reinterpret_cast<const int32_t*>(l.rows + at * l.row_stride + l.trailer);
  const bool known = tag[0] >= 0 && tag[0] < l.num_ranks && tag[1] >= 0 && tag[1] < l.tokens;
  const SlotAddress* slots = l.slots + (known ? tag[0] * l.tokens + tag[1] : 0) * l.top_k;
  bool found = false;
  for (int32_t k = 0; known && k < l.top_k; ++k) {
    if (slots[k] < 0 || l.slot_expert[slot_of(slots[k])] != expert) continue;
    l.place[slot_of(slots[k])] = at;
    found = true;
  }
  if (!found) tell_difference(l);
}

struct ScatterArguments {
  ScatterRows s;
  int64_t slots;
  int64_t row_bytes;
  int64_t row_stride;
  int alignment;
};

// A warp a slot.
__global__ void __launch_bounds__(kThreads, 4) scatter_rows(const ScatterArguments a) {
  const int64_t slots = in_use(a.s.slot_count, a.slots);
  for (int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id(); slot < slots;
       slot += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t place = a.s.place[slot];
    if (place < 0) continue;
    const uint8_t* in = static_cast<const uint8_t*>(a.s.rows.data) + slot * a.row_stride;
    uint8_t* out = a.s.out + place * a.s.out_stride;
    for (int64_t at = lane_id() * 16; at < a.row_bytes; at += kWarp * 16) {
      const int piece = static_cast<int>(a.row_bytes - at < 16 ? a.row_bytes - at : 16);
      store16(out + at, load16(in + at, a.alignment, piece), a.alignment, piece);
    }
  }
}

}  // namespace

Status launch_tag_rows(const TagRows& t, const LaunchContext& context) {
  LaunchShape shape;
  shape.threads = kThreads;
  shape.blocks = (t.tokens * (kTagBytes / 4 + t.top_k) + kThreads - 1) / kThreads;
  return launch_kernel<tag_rows>("tag_rows", context, shape, t);
}

Status launch_locate_rows(const LocateRows& l, const LaunchContext& context) {
  const int64_t row_blocks = (l.num_experts * l.rows_per_expert + kThreads - 1) / kThreads;
  LaunchShape shape;
  shape.threads = kThreads;
  shape.blocks = row_blocks + std::clamp<int64_t>((l.num_slots + kThreads - 1) / kThreads, 1, context.sms);
  return launch_kernel<locate_rows>("locate_rows", context, shape, l, row_blocks);
}

Status launch_scatter_rows(const ScatterRows& s, const LaunchContext& context) {
  ScatterArguments a{};
  a.s = s;
  a.slots = s.rows.rows();
  a.row_bytes = s.rows.columns() * dtype_bytes(s.rows.dtype);
  a.row_stride = s.rows.stride * dtype_bytes(s.rows.dtype);
  a.alignment = std::min(alignment_of(s.rows.data, a.row_stride), alignment_of(s.out, s.out_stride));
  LaunchShape shape;
  shape.threads = kThreads;
  shape.blocks = (s.rows.rows() + kWarps - 1) / kWarps;
  return launch_kernel<scatter_rows>("scatter_rows", context, shape, a);
}

}  // namespace nvte_ep
