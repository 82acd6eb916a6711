// What is found after a call has returned, in numbers and in words: nvte_ep_group_poll_error.
#ifndef NVTE_EP_CORE_FINDING_H_
#define NVTE_EP_CORE_FINDING_H_

#include "core/routing.h"
#include "core/status.h"

namespace nvte_ep {

struct Finding {
  Status status;      // OK: nothing
  int32_t rank = -1;  // it is about
  int64_t handle_id = -1;
  int64_t count = 0;
  int64_t needed_rows = 0;
};

// rank: this one.
Finding bad_indices(const IndexFaults& faults, int32_t num_experts, int32_t rank, int64_t handle_id);
Finding dropped_rows(int64_t count, int64_t needed_rows, int64_t capacity, int32_t rank, int64_t handle_id);
// Weights, or gradients of them, that a rank did not give in so many calls.
Finding missing_values(int64_t calls, int32_t giver, int64_t handle_id);
// Why the group has failed, because of this rank; -1: not known.
Finding fatal(const Status& why, int32_t rank);

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_FINDING_H_
