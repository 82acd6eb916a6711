#include "core/finding.h"

namespace nvte_ep {

Finding bad_indices(const IndexFaults& faults, int32_t num_experts, int32_t rank, int64_t handle_id) {
  const Status why = invalid_argument("topk_idx: expected global expert ids below ", num_experts,
                                      " or -1, each expert at most once a token; got ", faults.out_of_range,
                                      " out of range and ", faults.duplicates, " named twice on rank ", rank,
                                      ", which count as -1");
  return Finding{why, rank, handle_id, faults.out_of_range + faults.duplicates, 0};
}

Finding dropped_rows(int64_t count, int64_t needed_rows, int64_t capacity, int32_t rank, int64_t handle_id) {
  const Status why(NVTE_EP_STATUS_OVERFLOW, text("recv_capacity: expected at least ", needed_rows, ", got ",
                                                 capacity, "; rows dropped on rank ", rank, ": ", count));
  return Finding{why, rank, handle_id, count, needed_rows};
}

Finding missing_values(int64_t calls, int32_t giver, int64_t handle_id) {
  const Status why = invalid_argument(
      "topk_weights (grad_recv_weights in dispatch_backward): expected on every rank where one asks for "
      "recv_weights (grad_topk_weights); rank ",
      giver, " gave none, and zeros stand for them; calls: ", calls);
  return Finding{why, giver, handle_id, calls, 0};
}

Finding fatal(const Status& why, int32_t rank) { return Finding{why, rank, -1, 0, 0}; }

}  // namespace nvte_ep
