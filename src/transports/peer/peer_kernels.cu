#include "transports/peer/peer_kernels.h"

#include <cuda_runtime.h>

namespace nvte_ep {
namespace {

constexpr int kPullThreads = 256;

__device__ __forceinline__ void store_release(uint32_t* where, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(where), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* where) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(where) : "memory");
  return value;
}
__device__ __forceinline__ int64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return static_cast<int64_t>(t);
}

// One thread a peer.
__global__ void meet_kernel(Meeting m) {
  __shared__ uint32_t epoch;
  if (threadIdx.x == 0) epoch = *m.epoch + 1;
  __syncthreads();
  volatile MeetingReport* report = m.report;
  const int32_t peer = static_cast<int32_t>(threadIdx.x);
  if (peer < m.size && report->status == 0) {
    store_release(&m.arrivals[peer][m.rank], epoch);
    const int64_t start = now_ns();
    const uint32_t* arrival = &m.arrivals[m.rank][peer];
    for (int spin = 0; static_cast<int32_t>(load_acquire(arrival) - epoch) < 0; ++spin) {
      if (spin % 64 != 63) continue;
      const int32_t ended = *static_cast<volatile const int32_t*>(m.ended);
      const bool late = now_ns() - start > m.timeout_ns;
      if (ended == 0 && !late && report->status == 0) continue;
      if (ended != 0 || late) {
        report->rank = ended != 0 ? ended - 1 : peer;
        __threadfence_system();
        report->status = ended != 0 ? NVTE_EP_STATUS_PEER_FAILED : NVTE_EP_STATUS_TIMEOUT;
      }
      break;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *m.epoch = epoch;
}

template <typename Word>
__global__ void __launch_bounds__(kPullThreads)
    pull_blocks_kernel(const void* const* blocks, int64_t words, Word* out) {
  const int32_t rank = static_cast<int32_t>(blockIdx.y);
  const Word* in = static_cast<const Word*>(blocks[rank]);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPullThreads + threadIdx.x; i < words;
       i += static_cast<int64_t>(gridDim.x) * kPullThreads) {
    out[rank * words + i] = in[i];
  }
}

Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  return Status(NVTE_EP_STATUS_CUDA, text(what, ": ", cudaGetErrorString(error)));
}

}  // namespace

Status launch_meet(const Meeting& meeting, nvte_ep_stream_t stream) {
  meet_kernel<<<1, static_cast<unsigned>((meeting.size + 31) / 32 * 32), 0, stream>>>(meeting);
  return cuda_status(cudaPeekAtLastError(), "meet");
}

template <typename Word>
Status pull_words(const void* const* blocks, int32_t size, int64_t words, void* out, int32_t sms,
                  nvte_ep_stream_t stream) {
  const int64_t wanted = (words + kPullThreads - 1) / kPullThreads;
  const int64_t most = 2 * static_cast<int64_t>(sms) / size + 1;
  const dim3 grid(static_cast<unsigned>(wanted < most ? wanted : most), static_cast<unsigned>(size));
  if (words == 0) return Status();
  pull_blocks_kernel<Word><<<grid, kPullThreads, 0, stream>>>(blocks, words, static_cast<Word*>(out));
  return cuda_status(cudaPeekAtLastError(), "pull_blocks");
}

Status launch_pull_blocks(const void* const* blocks, int32_t size, int64_t bytes, void* out, int32_t sms,
                          nvte_ep_stream_t stream) {
  return bytes % 16 == 0 ? pull_words<uint4>(blocks, size, bytes / 16, out, sms, stream)
                         : pull_words<uint32_t>(blocks, size, bytes / 4, out, sms, stream);
}

Status enable_peer_access(int32_t device, int32_t other) {
  if (device == other) return Status();
  int possible = 0;
  NVTE_EP_TRY(cuda_status(cudaDeviceCanAccessPeer(&possible, device, other), "cudaDeviceCanAccessPeer"));
  if (!possible)
    return unsupported("peer: CUDA device ", device, " cannot access the memory of device ", other);
  const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return Status();
  }
  return cuda_status(error, "cudaDeviceEnablePeerAccess");
}

Status load_peer_kernels() {
  cudaFuncAttributes attributes;
  NVTE_EP_TRY(cuda_status(cudaFuncGetAttributes(&attributes, meet_kernel), "cudaFuncGetAttributes"));
  NVTE_EP_TRY(
      cuda_status(cudaFuncGetAttributes(&attributes, pull_blocks_kernel<uint4>), "cudaFuncGetAttributes"));
  return cuda_status(cudaFuncGetAttributes(&attributes, pull_blocks_kernel<uint32_t>),
                     "cudaFuncGetAttributes");
}

}  // namespace nvte_ep
