// Where kernels find rows that travel.
#ifndef NVTE_EP_TRANSPORTS_PEER_TRAVELLING_ROWS_CUH_
#define NVTE_EP_TRANSPORTS_PEER_TRAVELLING_ROWS_CUH_

#include "transports/peer/dispatch.h"

namespace nvte_ep {

// A row after the meeting.
__device__ __forceinline__ const uint8_t* row_of(const Pools& pools, const TravellingRows& rows, int32_t rank,
                                                 int64_t token, uint32_t now) {
  if (rank == pools.rank && rows.own != nullptr) return rows.own + token * rows.own_stride;
  return pools.to_read<uint8_t>(rows.outbox, rank, now) + token * rows.row_bytes;
}

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_TRAVELLING_ROWS_CUH_
