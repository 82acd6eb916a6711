// What the `peer` transport runs on a device, but the steps (prepare.h, dispatch.h, combine.h).
#ifndef NVTE_EP_TRANSPORTS_PEER_PEER_KERNELS_H_
#define NVTE_EP_TRANSPORTS_PEER_PEER_KERNELS_H_

#include <cstdint>

#include "core/status.h"
#include "core/tensor_view.h"
#include "device/launch_kernel.h"
#include "transports/peer/peer_memory.h"
#include "transports/peer/pools.h"

namespace nvte_ep {

// One rank's part of the flags through which the ranks of a group meet. All pointers are device pointers but report and
// ended, which lie in host memory that the device reads and writes.
struct Meeting {
  int32_t rank;
  int32_t size;
  // [size] every rank's array [size]: in rank r's, entry s is the last meeting that s came to, and above it what s came for
  uint64_t* const* arrivals;
  uint32_t call;    // what this rank comes for (signature_of)
  uint32_t* epoch;  // [1] meetings of this rank so far
  int32_t* failed;  // [1] not 0: one of them has failed
  int64_t timeout_ns;
  MeetingReport* report;
  const int32_t* ended;         // [1] rank + 1 of the one that ended the group; 0: nobody
  int32_t* const* ended_words;  // [size] the same of every rank: who gives up tells all
  // This rank's area that starts from zero in every exchange.
  uint32_t* maxima;
  int64_t maxima_distance;  // words from one copy to the other
  int32_t num_maxima;
};

// What the ranks of a meeting must agree on: the call, of which handle, and a type where it decides how many meetings follow.
enum class PeerCall : uint32_t { kPrepare, kDispatch, kCombineBackward, kCombine, kDispatchBackward };
inline uint32_t signature_of(PeerCall call, int64_t handle_id, DType dtype = DType{}) {
  return static_cast<uint32_t>(call) | static_cast<uint32_t>(dtype) << 4 |
         static_cast<uint32_t>(handle_id) << 12;
}

constexpr int64_t kFlagBytes = 4096;
constexpr int32_t kMostRanks = kFlagBytes / 8 - 1;  // the flags and the epoch share the first page of a pool

// Lets the current device load and store the memory of another; the same device is fine.
Status enable_peer_access(int32_t device, int32_t other);

// What launches on the current device need to know of it; num_sms as in the group's settings.
Status describe_launches(int32_t device, int32_t num_sms, LaunchContext* context);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PEER_KERNELS_H_
