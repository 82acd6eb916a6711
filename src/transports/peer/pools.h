// Where a kernel finds the memory of all ranks.
//
// The protocol. An exchange is: write into the own pool, meet, read the peers' pools; one meeting each (meeting.cuh). What is
// exchanged lies in areas of the pool that have two copies. The number of meetings that a rank has come to, its epoch, chooses
// the copy; it lives in device memory, so that a captured step counts on when it is replayed. With e meetings behind it
//
//   before meeting e + 1 a rank writes copy e % 2 of its own areas,
//   after it, with e + 1 meetings behind it, it reads copy e % 2 of its peers'.
//
// Why a peer never reads what is being overwritten: a rank writes copy e % 2 again after meeting e + 2 at the earliest, since
// the exchange in between uses the other copy. It has passed meeting e + 2 only when every peer has come there, and a peer comes
// to a meeting in the order of its stream: after its reads of the exchange before, which were those of copy e % 2. Why it reads
// what was written: a rank comes to meeting e + 1 after its writes (release), and the peer goes on after it saw that (acquire).
//
// All ranks make the same calls in the same order, and every exchange has exactly one meeting, so epochs agree. Nobody waits for
// another rank but meetings, which are one block each, or a small cluster: ranks that share a GPU cannot starve each other.
#ifndef NVTE_EP_TRANSPORTS_PEER_POOLS_H_
#define NVTE_EP_TRANSPORTS_PEER_POOLS_H_

#include <cstdint>

#include "formats/numerics.h"

namespace nvte_ep {

// Of every rank's pool, at the same place.
struct Area {
  int64_t offset = 0;
  int64_t bytes = 0;                                     // of each of the two copies
  NVTE_EP_HD int64_t distance() const { return bytes; }  // from one to the other
};

struct Pools {
  uint8_t* const* base = nullptr;   // [size] every rank's pool, an array in device memory
  uint8_t* own = nullptr;           // base[rank]
  const uint32_t* epoch = nullptr;  // meetings of this rank so far
  int32_t rank = 0;
  int32_t size = 0;

  static NVTE_EP_HD uint32_t copy_to_write(uint32_t now) { return now & 1u; }
  // now: *epoch before the meeting.
  template <typename T>
  NVTE_EP_HD T* to_write(const Area& area, uint32_t now) const {
    return reinterpret_cast<T*>(own + area.offset + copy_to_write(now) * area.distance());
  }
  // now: *epoch after the meeting.
  template <typename T>
  NVTE_EP_HD const T* to_read(const Area& area, int32_t peer, uint32_t now) const {
    return reinterpret_cast<const T*>((peer == rank ? own : base[peer]) + area.offset +
                                      copy_to_write(now - 1) * area.distance());
  }
  // An area that peers write instead, now: *epoch before the meeting.
  template <typename T>
  NVTE_EP_HD T* inbox_of(const Area& area, int32_t peer, uint32_t now) const {
    return reinterpret_cast<T*>((peer == rank ? own : base[peer]) + area.offset +
                                copy_to_write(now) * area.distance());
  }
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_POOLS_H_
