// What the `peer` transport runs on a device.
#ifndef NVTE_EP_TRANSPORTS_PEER_PEER_KERNELS_H_
#define NVTE_EP_TRANSPORTS_PEER_PEER_KERNELS_H_

#include <cstdint>

#include "core/status.h"
#include "transports/peer/peer_memory.h"

namespace nvte_ep {

// One rank's part of the flags through which the ranks of a group meet. All pointers are device pointers but report and
// ended, which lie in host memory that the device reads and writes.
struct Meeting {
  int32_t rank;
  int32_t size;
  // [size] every rank's array [size]: in rank r's, entry s is the last meeting that s came to
  uint32_t* const* arrivals;
  uint32_t* epoch;  // [1] meetings of this rank so far
  int64_t timeout_ns;
  MeetingReport* report;
  const int32_t* ended;  // [1] rank + 1 of the one that ended the group; 0: nobody
};

// Comes to the next meeting and waits for all, timeout_ns at most. What was enqueued before is visible to the peers then, and
// theirs to what is enqueued after. A failure is reported, and every later meeting returns at once.
Status launch_meet(const Meeting& meeting, nvte_ep_stream_t stream);

// blocks [size] of bytes each (a multiple of 4), one from every rank, one after the other.
Status launch_pull_blocks(const void* const* blocks, int32_t size, int64_t bytes, void* out, int32_t sms,
                          nvte_ep_stream_t stream);

// Lets the current device load and store the memory of another; the same device is fine.
Status enable_peer_access(int32_t device, int32_t other);

// Loads the kernels above on the current device: a kernel that is loaded while others wait for it would wait, too.
Status load_peer_kernels();

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PEER_KERNELS_H_
