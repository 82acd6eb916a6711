// Who is to blame that a rank waits in vain.
#ifndef NVTE_EP_TRANSPORTS_PEER_BLAME_H_
#define NVTE_EP_TRANSPORTS_PEER_BLAME_H_

#include <cstdint>

#include "formats/numerics.h"

namespace nvte_ep {

// True where a rank whose flag says that it has come to `arrival` is missing in a meeting. Numbers of meetings wrap around.
NVTE_EP_HD bool is_missing(uint32_t arrival, uint32_t meeting) {
  return static_cast<int32_t>(arrival - meeting) < 0;
}

// arrivals(at, of): the last meeting that rank `of` has come to, as its flag at rank `at` says; a rank has none at itself.
// Several ranks may be missing where `rank` waits: one that is killed while it sets its flags leaves some of the others a meeting
// behind. Those wait themselves, in the last meeting that they have come to; who is to blame does not. peer: one that is missing.
template <typename Arrivals>
NVTE_EP_HD int32_t blamed(int32_t rank, int32_t size, int32_t peer, uint32_t meeting,
                          const Arrivals& arrivals) {
  for (int32_t r = 0; r < size; ++r) {
    if (r == rank || !is_missing(arrivals(rank, r), meeting)) continue;
    const uint32_t theirs = arrivals(rank, r);
    bool waits = false;
    for (int32_t other = 0; other < size; ++other) {
      waits = waits || (other != r && is_missing(arrivals(r, other), theirs));
    }
    if (!waits) return r;
  }
  return peer;
}

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_BLAME_H_
