// Routing on the host, for callers that hold every rank's choices.
#include <algorithm>
#include <vector>

#include "backends/host_backend.h"
#include "core/routing.h"

namespace nvte_ep {
namespace {

template <typename T>
void put(T* to, const std::vector<T>& from) {
  if (to != nullptr) std::copy(from.begin(), from.end(), to);
}

}  // namespace

Status HostBackend::clean_indices(const TensorView& topk_idx, int32_t num_experts, int64_t tokens,
                                  int32_t* clean, int64_t* faults, nvte_ep_stream_t) {
  const IndexFaults found = nvte_ep::clean_indices(topk_idx, num_experts, clean);
  std::fill(clean + topk_idx.size(), clean + tokens * topk_idx.columns(), -1);
  faults[0] += found.out_of_range;
  faults[1] += found.duplicates;
  return Status();
}

int64_t HostBackend::route_workspace_bytes(const Route&) const { return 0; }

Status HostBackend::route(const Route& r, nvte_ep_stream_t) {
  RoutingShape shape;
  shape.num_local_experts = r.num_experts / r.num_ranks;
  shape.top_k = r.top_k;
  shape.alignment = r.alignment;
  shape.capacity = r.capacity;
  const int64_t choices = r.tokens * r.top_k;
  std::vector<SlotAddress> all(static_cast<size_t>(choices * r.num_ranks), SlotAddress{-1});
  std::vector<RoutingSource> sources;
  for (int32_t source = 0; source < r.num_ranks; ++source) {
    sources.push_back(RoutingSource{r.indices + source * choices, r.tokens, all.data() + source * choices});
  }
  Routing mine;
  for (shape.rank = 0; shape.rank < r.num_ranks; ++shape.rank) {
    if (shape.rank != r.rank && !r.slots && !r.rank_rows && !r.rank_choices && !r.kept_indices) continue;
    Routing other;
    build_routing(sources, shape, shape.rank == r.rank ? &mine : &other);
  }
  put(r.tokens_routed, mine.tokens_routed);
  put(r.tokens_per_expert, mine.tokens_per_expert);
  put(r.rows_per_expert, mine.rows_per_expert);
  put(r.row_offsets, mine.row_offsets);
  put(r.scale_row_offsets, mine.scale_row_offsets);
  put(r.totals, {mine.total_rows, mine.dropped_rows, mine.needed_rows});
  if (r.history != nullptr && mine.dropped_rows > 0) {
    r.history[1] = largest_need(mine.needed_rows, r.history[1], r.history[0], *r.reported);
    r.history[0] += mine.dropped_rows;
  }
  put(r.slot_source, mine.slot_source);
  put(r.slot_k, mine.slot_k);
  put(r.slot_expert, mine.slot_expert);
  if (r.slots != nullptr) std::copy_n(all.data() + r.rank * choices, choices, r.slots);
  const SlotAddress* own = all.data() + r.rank * choices;
  for (int64_t i = 0; r.rank_choices != nullptr && i < choices; ++i) {
    r.rank_choices[i] =
        own[i] < 0 ? SlotAddress{-1} : slot_address(static_cast<int32_t>(own[i] >> kSlotBits), i);
  }
  for (int64_t i = 0; r.kept_indices != nullptr && i < choices; ++i) {
    const int32_t expert = r.indices[r.rank * choices + i];
    const int32_t local = shape.num_local_experts;
    r.kept_indices[i] = own[i] < 0 ? -1 : expert / local * r.kept_experts + expert % local;
  }
  if (r.rank_rows != nullptr) {
    std::fill_n(r.rank_rows, r.tokens * r.num_ranks, SlotAddress{-1});
    for (int64_t i = 0; i < choices; ++i) {
      if (own[i] < 0) continue;
      const int32_t rank = static_cast<int32_t>(own[i] >> kSlotBits);
      r.rank_rows[i / r.top_k * r.num_ranks + rank] = slot_address(rank, i / r.top_k);
    }
  }
  if (r.in_slots != nullptr) {
    std::transform(all.begin(), all.end(), r.in_slots,
                   [&](SlotAddress a) { return a >= 0 && (a >> kSlotBits) == r.rank ? a : SlotAddress{-1}; });
  }
  return Status();
}

}  // namespace nvte_ep
