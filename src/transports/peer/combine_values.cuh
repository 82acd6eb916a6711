// Values of the choices (gradients of their weights) that go back beside the tokens' rows.
#ifndef NVTE_EP_TRANSPORTS_PEER_COMBINE_VALUES_CUH_
#define NVTE_EP_TRANSPORTS_PEER_COMBINE_VALUES_CUH_

#include "transports/peer/combine_items.cuh"

namespace nvte_ep {

// A value of each choice of a token, from where its slot is; 0 from a rank that gives none.
__device__ __forceinline__ void gather_values(const CombineArguments& c, uint32_t now, int64_t token) {
  const RouteMaps& m = c.maps;
  for (int k = device::lane_id(); k < m.top_k; k += device::kWarp) {
    const int32_t expert = m.kept_experts[token * m.top_k + k];
    float value = 0.0f;
    if (expert >= 0) {
      const int32_t holder = expert / m.local_experts();
      if (holder == m.rank) {
        if (c.slot_values != nullptr) value = c.slot_values[slots_of(m, m.rank, token)[k]];
      } else if (*c.pools.to_read<uint32_t>(c.values.given, holder, now) != 0) {
        const int64_t choice =
            (static_cast<int64_t>(place_among_others(m.rank, holder)) * m.tokens + token) * m.top_k + k;
        value = c.pools.to_read<float>(c.values.area, holder, now)[choice];
      }
    }
    c.own_values[token * c.own_value_stride + k] = value;
  }
}

// The values of another rank's token.
__device__ __forceinline__ void put_values(const CombineArguments& c, uint32_t now, const Place& item) {
  const RouteMaps& m = c.maps;
  const int32_t* slots = slots_of(m, item.rank, item.token);
  const int64_t row = static_cast<int64_t>(place_among_others(item.rank, m.rank)) * m.tokens + item.token;
  float* values = c.pools.to_write<float>(c.values.area, now) + row * m.top_k;
  for (int k = device::lane_id(); k < m.top_k; k += device::kWarp) {
    if (slots[k] >= 0) values[k] = c.slot_values[slots[k]];
  }
}

// A warp, with the first block of each row.
__device__ __forceinline__ void move_values(const Work& w, uint32_t now, const Place& item) {
  if (!item.begins_row()) return;
  if (item.is_sum) {
    if (w.c.own_values != nullptr) gather_values(w.c, now, item.token);
  } else if (w.c.send_values && w.c.slot_values != nullptr) {
    put_values(w.c, now, item);
  }
}

// A rank whose slots are all empty has nothing to give.
__device__ __forceinline__ bool gives_values(const CombineArguments& c) {
  return c.slot_values != nullptr || c.maps.totals[0] == 0;
}

// One thread of a kernel: peers learn with every pass whether this rank gives values, and the host with the first which ranks
// gave none.
__device__ __noinline__ void tell_given(const Work& w, uint32_t now) {
  const CombineArguments& c = w.c;
  if (c.send_values && w.partials.items > 0) {
    *c.pools.to_write<uint32_t>(c.values.given, now) = gives_values(c);
  }
  if (c.own_values == nullptr || w.sums.items == 0 || w.sums.tokens.first != 0) return;
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

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_COMBINE_VALUES_CUH_
