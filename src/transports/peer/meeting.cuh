// Meetings of the ranks of a group, on the device. A whole block calls; nothing else waits for other ranks.
#ifndef NVTE_EP_TRANSPORTS_PEER_MEETING_CUH_
#define NVTE_EP_TRANSPORTS_PEER_MEETING_CUH_

#include "transports/peer/blame.h"
#include "transports/peer/peer_kernels.h"

namespace nvte_ep {

__device__ __forceinline__ void store_release(uint64_t* where, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(where), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* where) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(where) : "memory");
  return value;
}
// A flag: the number of the meeting, and what its rank came for.
__device__ __forceinline__ uint64_t flag_of(uint32_t meeting, uint32_t call) {
  return static_cast<uint64_t>(call) << 32 | meeting;
}
__device__ __forceinline__ uint32_t meeting_of(uint64_t flag) { return static_cast<uint32_t>(flag); }
__device__ __forceinline__ uint32_t call_of(uint64_t flag) { return static_cast<uint32_t>(flag >> 32); }
__device__ __forceinline__ int64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return static_cast<int64_t>(t);
}

// What went wrong in a meeting, told to the host by the thread that finds it first.
__device__ __forceinline__ bool report_failure(const Meeting& m, int* reported, int32_t status,
                                               int32_t rank) {
  if (atomicExch(reported, 1) != 0) return false;
  volatile MeetingReport* report = m.report;
  report->rank = rank;
  __threadfence_system();
  report->status = status;
  *m.failed = 1;
  return true;
}

// Waits until the peer has come to the meeting, the time-out at most. False: it did not, or for something else, or the group has
// ended. Memory of the host is looked at now and then only: it is far away.
__device__ __forceinline__ bool wait_for(const Meeting& m, int32_t peer, uint32_t epoch, int* reported) {
  const uint64_t* arrival = &m.arrivals[m.rank][peer];
  uint64_t flag;
  int64_t start = 0;
  for (int spin = 0; is_missing(meeting_of(flag = load_acquire(arrival)), epoch); ++spin) {
    if (spin % 64 != 63) continue;
    if (start == 0) start = now_ns();
    const int32_t ended = *static_cast<volatile const int32_t*>(m.ended);
    const bool late = now_ns() - start > m.timeout_ns;
    if (ended == 0 && !late) continue;
    const auto arrivals = [&](int32_t at, int32_t of) {
      return meeting_of(load_acquire(&m.arrivals[at][of]));
    };
    const int32_t rank = ended != 0 ? ended - 1 : blamed(m.rank, m.size, peer, epoch, arrivals);
    const int32_t status = ended != 0 ? NVTE_EP_STATUS_PEER_FAILED : NVTE_EP_STATUS_TIMEOUT;
    if (report_failure(m, reported, status, rank) &&
        ended == 0) {  // the others need not find out for themselves
      for (int32_t r = 0; r < m.size; ++r) *static_cast<volatile int32_t*>(m.ended_words[r]) = rank + 1;
    }
    return false;
  }
  // Both see that they have come for different things. A peer that is a meeting ahead has found this rank to agree with it.
  if (meeting_of(flag) != epoch || call_of(flag) == m.call) return true;
  report_failure(m, reported, NVTE_EP_STATUS_INVALID_ARGUMENT, peer);
  return false;
}

// Comes to the next meeting and waits for all. What the block's threads wrote before, and what they know to be written, is
// visible to the peers then, and theirs to this block and to what is enqueued after it. A failure is reported, and every
// later meeting returns at once.
__device__ __forceinline__ void meet(const Meeting& m) {
  __shared__ uint32_t epoch;
  __shared__ int failed, reported;
  __syncthreads();
  if (threadIdx.x == 0) {
    epoch = *m.epoch + 1;
    failed = *m.failed;
    reported = 0;
  }
  __syncthreads();
  if (failed == 0) {
    const int32_t threads = static_cast<int32_t>(blockDim.x);
    for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < m.size; peer += threads) {
      if (peer != m.rank) store_release(&m.arrivals[peer][m.rank], flag_of(epoch, m.call));
    }
    for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < m.size; peer += threads) {
      if (peer != m.rank && !wait_for(m, peer, epoch, &reported)) break;
    }
  }
  // Maxima are gathered with atomics, from zero: the copy that the next exchange writes, which no peer reads any more.
  uint32_t* maxima = m.maxima + (epoch & 1u) * m.maxima_distance;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < m.num_maxima;
       i += static_cast<int32_t>(blockDim.x)) {
    maxima[i] = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) *m.epoch = epoch;
  __syncthreads();
}

// True in the block of a grid that comes here last; what all others wrote before is visible to it then. Every thread calls.
__device__ __forceinline__ bool is_last_block(uint32_t* ticket) {
  if (gridDim.x == 1) return true;
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) + 1 == gridDim.x;
    if (last) *ticket = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_MEETING_CUH_
