// Meetings of the ranks of a group, on the device. A whole block calls. Nothing else waits for other ranks but prepare of
// few tokens (prepare_few.cu), whose blocks wait for values.
#ifndef NVTE_EP_TRANSPORTS_PEER_MEETING_CUH_
#define NVTE_EP_TRANSPORTS_PEER_MEETING_CUH_

#include "device/kernel_order.cuh"
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
// A value and the number of the meeting that it belongs to, in one piece: who reads the number has the value.
__device__ __forceinline__ void store_numbered(uint64_t* where, uint32_t number, uint32_t value) {
  const uint64_t both = static_cast<uint64_t>(number) << 32 | value;
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(where), "l"(both) : "memory");
}
__device__ __forceinline__ uint64_t load_numbered(const uint64_t* where) {
  uint64_t both;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(both) : "l"(where) : "memory");
  return both;
}
__device__ __forceinline__ int64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return static_cast<int64_t>(t);
}

// What went wrong in a meeting, told to the host by the thread that finds it first; true in that one.
__device__ __forceinline__ bool report_failure(const Meeting& m, int32_t status, int32_t rank) {
  if (atomicExch(m.failed, 1) != 0) return false;
  volatile MeetingReport* report = m.report;
  report->rank = rank;
  __threadfence_system();
  report->status = status;
  return true;
}

// Whether a peer has come to the same meeting for something else. Both see it then. One that is a meeting ahead has found this
// rank to agree with it.
__device__ __forceinline__ bool differs(const Meeting& m, uint64_t flag, uint32_t epoch) {
  return meeting_of(flag) == epoch && call_of(flag) != m.call;
}

// One thread's patience with a peer, for a thread that looks at memory again and again. Memory of the host is looked at now and
// then only: it is far away.
class Patience {
 public:
  // True when it is at an end: the peer is late, or here for something else, or the group has ended.
  __device__ __forceinline__ bool is_over(const Meeting& m, int32_t peer, uint32_t epoch) {
    return ++looks_ % 64 == 0 && gives_up(m, peer, epoch);
  }

 private:
  __device__ __forceinline__ bool gives_up(const Meeting& m, int32_t peer, uint32_t epoch) {
    if (start_ == 0) start_ = now_ns();
    const auto arrivals = [&](int32_t at, int32_t of) {
      return meeting_of(load_acquire(&m.arrivals[at][of]));
    };
    const int32_t ended = *static_cast<volatile const int32_t*>(m.ended);
    const bool late = now_ns() - start_ > m.timeout_ns;
    if (ended == 0 && !late) {
      if (!differs(m, load_acquire(&m.arrivals[m.rank][peer]), epoch)) return false;
      report_failure(m, NVTE_EP_STATUS_INVALID_ARGUMENT, peer);
      return true;
    }
    const int32_t rank = ended != 0 ? ended - 1 : blamed(m.rank, m.size, peer, epoch, arrivals);
    const int32_t status = ended != 0 ? NVTE_EP_STATUS_PEER_FAILED : NVTE_EP_STATUS_TIMEOUT;
    if (report_failure(m, status, rank) && ended == 0) {  // the others need not find out for themselves
      for (int32_t r = 0; r < m.size; ++r) *static_cast<volatile int32_t*>(m.ended_words[r]) = rank + 1;
    }
    return true;
  }

  int looks_ = 0;
  int64_t start_ = 0;
};

// Waits until the peer has come to the meeting, the time-out at most. False: it did not, or for something else, or the group has
// ended.
__device__ __forceinline__ bool wait_for(const Meeting& m, int32_t peer, uint32_t epoch) {
  const uint64_t* arrival = &m.arrivals[m.rank][peer];
  uint64_t flag;
  Patience patience;
  while (is_missing(meeting_of(flag = load_acquire(arrival)), epoch)) {
    if (patience.is_over(m, peer, epoch)) return false;
  }
  if (!differs(m, flag, epoch)) return true;
  report_failure(m, NVTE_EP_STATUS_INVALID_ARGUMENT, peer);
  return false;
}

// This rank's flag at every peer, for who looks for the one to blame, or what it came for: where data comes with the number,
// nobody waits for this.
__device__ __forceinline__ void tell_arrival(const Meeting& m, uint32_t epoch) {
  const int32_t threads = static_cast<int32_t>(blockDim.x);
#pragma unroll 1
  for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < m.size; peer += threads) {
    if (peer != m.rank) *static_cast<volatile uint64_t*>(&m.arrivals[peer][m.rank]) = flag_of(epoch, m.call);
  }
}

// After a meeting: maxima are gathered with atomics, from zero, in the copy that the next exchange writes, which no peer reads
// any more. epoch: meetings so far, this one included.
__device__ __forceinline__ void clear_maxima(const Meeting& m, uint32_t epoch) {
  uint32_t* maxima = m.maxima + (epoch & 1u) * m.maxima_distance;
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < m.num_maxima;
       i += static_cast<int32_t>(blockDim.x)) {
    maxima[i] = 0;
  }
}

// Comes to the next meeting and waits for all. What the block's threads wrote before, and what they know to be written, is
// visible to the peers then, and theirs to this block and to what is enqueued after it. A failure is reported, and every
// later meeting returns at once.
__device__ __forceinline__ void meet(const Meeting& m) {
  const uint32_t epoch = *m.epoch + 1;
  const bool failed = *m.failed != 0;
  __syncthreads();
  if (!failed) {
    const int32_t threads = static_cast<int32_t>(blockDim.x);
    for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < m.size; peer += threads) {
      if (peer != m.rank) store_release(&m.arrivals[peer][m.rank], flag_of(epoch, m.call));
    }
    for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < m.size; peer += threads) {
      if (peer != m.rank && !wait_for(m, peer, epoch)) break;
    }
  }
  __syncthreads();
  device::let_next_kernel_start();  // not while this one waits for ranks that may share the GPU
  clear_maxima(m, epoch);
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
