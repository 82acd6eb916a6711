#include "core/routing.h"

#include <algorithm>

namespace nvte_ep {
namespace {

template <typename Index>
IndexFaults clean_typed(const TensorView& topk_idx, int32_t num_experts, int32_t* clean) {
  IndexFaults faults;
  const int64_t top_k = topk_idx.columns();
  for (int64_t t = 0; t < topk_idx.rows(); ++t) {
    const Index* row = reinterpret_cast<const Index*>(topk_idx.row(t));
    int32_t* out = clean + t * top_k;
    for (int64_t k = 0; k < top_k; ++k) {
      const Index expert = row[k];
      out[k] = -1;
      if (expert == -1) continue;
      if (expert < 0 || expert >= num_experts) {
        ++faults.out_of_range;
      } else if (std::find(out, out + k, static_cast<int32_t>(expert)) != out + k) {
        ++faults.duplicates;
      } else {
        out[k] = static_cast<int32_t>(expert);
      }
    }
  }
  return faults;
}

template <typename Function>
void for_each_copy(const std::vector<RoutingSource>& sources, const RoutingShape& shape,
                   const Function& function) {
  const int32_t first = shape.rank * shape.num_local_experts;
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    const RoutingSource& source = sources[rank];
    for (int64_t i = 0; i < source.tokens * shape.top_k; ++i) {
      const int32_t local = source.indices[i] - first;
      if (source.indices[i] >= 0 && local >= 0 && local < shape.num_local_experts) {
        function(static_cast<int32_t>(rank), i, local);
      }
    }
  }
}

}  // namespace

IndexFaults clean_indices(const TensorView& topk_idx, int32_t num_experts, int32_t* clean) {
  return topk_idx.dtype == DType::kInt64 ? clean_typed<int64_t>(topk_idx, num_experts, clean)
                                         : clean_typed<int32_t>(topk_idx, num_experts, clean);
}

void build_routing(const std::vector<RoutingSource>& sources, const RoutingShape& shape, Routing* r) {
  const size_t experts = static_cast<size_t>(shape.num_local_experts);
  r->tokens_routed.assign(experts, 0);
  for_each_copy(sources, shape, [&](int32_t, int64_t, int32_t e) { ++r->tokens_routed[e]; });

  r->tokens_per_expert.resize(experts);
  r->rows_per_expert.resize(experts);
  r->row_offsets.assign(1, 0);
  r->scale_row_offsets.assign(1, 0);
  r->dropped_rows = 0;
  int64_t offset = 0;  // o_e
  for (size_t e = 0; e < experts; ++e) {
    offset += round_up(r->tokens_routed[e], shape.alignment);
    r->row_offsets.push_back(std::min(offset, shape.capacity));
    r->rows_per_expert[e] = r->row_offsets[e + 1] - r->row_offsets[e];
    r->tokens_per_expert[e] = std::min(r->tokens_routed[e], r->rows_per_expert[e]);
    r->dropped_rows += r->tokens_routed[e] - r->tokens_per_expert[e];
    r->scale_row_offsets.push_back(r->scale_row_offsets[e] + round_up(r->rows_per_expert[e], kScaleTileRows));
  }
  r->needed_rows = offset;
  r->total_rows = r->row_offsets[experts];

  const size_t total = static_cast<size_t>(r->total_rows);
  r->slot_source.assign(total, -1);
  r->slot_k.assign(total, 0);
  r->slot_expert.resize(total);
  for (size_t e = 0; e < experts; ++e) {
    std::fill(r->slot_expert.begin() + r->row_offsets[e], r->slot_expert.begin() + r->row_offsets[e + 1],
              static_cast<int32_t>(e));
  }
  std::vector<int64_t> filled(experts, 0);
  for_each_copy(sources, shape, [&](int32_t rank, int64_t i, int32_t e) {
    if (filled[e] >= r->tokens_per_expert[e]) return;  // dropped: the slot map keeps -1
    const int64_t slot = r->row_offsets[e] + filled[e]++;
    r->slot_source[slot] = (static_cast<int64_t>(rank) << 32) | (i / shape.top_k);
    r->slot_k[slot] = static_cast<int32_t>(i % shape.top_k);
    sources[rank].slots[i] = slot_address(shape.rank, slot);
  });
}

}  // namespace nvte_ep
