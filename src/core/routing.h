// Routing on the host: which slot each token's copies take. This is the definition of prepare for every transport.
#ifndef NVTE_EP_CORE_ROUTING_H_
#define NVTE_EP_CORE_ROUTING_H_

#include <cstdint>
#include <vector>

#include "core/backend.h"
#include "core/tensor_view.h"

namespace nvte_ep {

struct IndexFaults {
  int64_t out_of_range = 0;
  int64_t duplicates = 0;
};

// topk_idx [T, K] to clean [T, K]: an index out of range, and an expert's second mention in a token, become -1.
IndexFaults clean_indices(const TensorView& topk_idx, int32_t num_experts, int32_t* clean);

// One rank's clean indices, and where the slots of its tokens are to be noted (filled with -1 beforehand).
struct RoutingSource {
  const int32_t* indices = nullptr;  // [tokens, top_k]
  int64_t tokens = 0;
  SlotAddress* slots = nullptr;  // [tokens, top_k]
};

struct RoutingShape {
  int32_t rank = 0;
  int32_t num_local_experts = 0;  // expert e of the group is local expert e % num_local_experts of its rank
  int32_t top_k = 0;
  int64_t alignment = 1;
  int64_t capacity = 0;  // INT64_MAX: whatever is needed
};

// What one rank receives. For expert e with n_e routed tokens, p_e = n_e rounded up to the alignment, o the prefix sum of p.
struct Routing {
  std::vector<int64_t> tokens_routed;      // n_e
  std::vector<int64_t> tokens_per_expert;  // kept: min(n_e, rows_per_expert)
  std::vector<int64_t> rows_per_expert;    // difference of row_offsets
  std::vector<int64_t> row_offsets;        // min(o_e, capacity), one more than experts
  std::vector<int64_t> scale_row_offsets;  // prefix sum of rows_per_expert rounded up to 128
  std::vector<int64_t> slot_source;        // [total_rows] rank << 32 | token, -1: padding
  std::vector<int32_t> slot_k;             // [total_rows] which of the token's choices
  std::vector<int32_t> slot_expert;        // [total_rows] local expert
  int64_t total_rows = 0;
  int64_t dropped_rows = 0;
  int64_t needed_rows = 0;  // the capacity that drops nothing
};

// Slots of this rank's experts in the order (source rank, token); notes them in the sources' slot maps.
void build_routing(const std::vector<RoutingSource>& sources, const RoutingShape& shape, Routing* routing);

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_ROUTING_H_
