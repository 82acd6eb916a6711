#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <utility>

#include "transports/peer/cuda_status.h"
#include "transports/peer/peer_kernels.h"
#include "transports/peer/process_pools.h"

namespace nvte_ep {
namespace {

// An allocation of this size is not carved out of a larger one, so a handle of it gives away nothing else.
constexpr int64_t kAllocationUnit = int64_t{2} << 20;

// What names this process and its machine among the ranks.
int64_t process_token() {
  static const int64_t token = [] {
    std::random_device device;
    return static_cast<int64_t>((static_cast<uint64_t>(device()) << 32) | device());
  }();
  return token;
}

std::string host_name() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return id;
}

struct Offer {
  char host[64];
  int64_t process;
  uint8_t* pool;
  int32_t device;
  cudaIpcMemHandle_t handle;
};

class IpcPools : public ProcessPools {
 public:
  Status open(const ProcessRanks& ranks, int64_t bytes, std::vector<uint8_t*>* pools) override {
    const Status opened = try_open(ranks, bytes, pools);
    if (!opened.ok()) close(ranks, false);
    return opened;
  }

  void close(const ProcessRanks& ranks, bool orderly) override {
    (void)ranks.backend->with_device([&] {
      for (void* mapped : std::exchange(mapped_, {})) (void)cudaIpcCloseMemHandle(mapped);
      return Status();
    });
    // Freeing memory that a peer has still mapped is undefined by the books. (A peer that is lost has it no more.)
    if (orderly) (void)ranks.gather->settle("group_destroy", Status(), ranks.stream);
    if (void* pool = std::exchange(pool_, nullptr)) ranks.backend->release(pool);
  }

 private:
  Status try_open(const ProcessRanks& ranks, int64_t bytes, std::vector<uint8_t*>* pools) {
    Offer mine{};
    const Status offered = offer(ranks, bytes, &mine);
    NVTE_EP_TRY(ranks.gather->settle("group_create", offered, ranks.stream));
    std::vector<Offer> all(static_cast<size_t>(ranks.comm->size()));
    NVTE_EP_TRY(ranks.gather->gather("group_create", &mine, sizeof(mine), all.data(), ranks.stream));
    return ranks.gather->settle("group_create", map(ranks, mine, all, pools), ranks.stream);
  }

  Status offer(const ProcessRanks& ranks, int64_t bytes, Offer* mine) {
    NVTE_EP_TRY(ranks.backend->allocate(round_up(bytes, kAllocationUnit), &pool_));
    const std::string host = host_name();
    std::memcpy(mine->host, host.data(), std::min(host.size(), sizeof(mine->host) - 1));
    mine->process = process_token();
    mine->pool = static_cast<uint8_t*>(pool_);
    mine->device = ranks.comm->device();
    return ranks.backend->with_device(
        [&] { return peer_cuda_status(cudaIpcGetMemHandle(&mine->handle, pool_), "cudaIpcGetMemHandle"); });
  }

  Status map(const ProcessRanks& ranks, const Offer& mine, const std::vector<Offer>& all,
             std::vector<uint8_t*>* pools) {
    return ranks.backend->with_device([&]() -> Status {
      for (size_t r = 0; r < all.size(); ++r) {
        const Offer& other = all[r];
        if (std::memcmp(other.host, mine.host, sizeof(mine.host)) != 0) {
          return unsupported("peer: CUDA IPC serves the processes of one host, and rank ", r,
                             " is on another one (NCCL ", nccl::kWindowsVersion,
                             " or newer serves an NVLink domain)");
        }
        if (other.process == mine.process) {  // a handle cannot be opened where it was made
          NVTE_EP_TRY(enable_peer_access(mine.device, other.device));
          pools->push_back(other.pool);
          continue;
        }
        void* mapped = nullptr;
        const cudaError_t error = cudaIpcOpenMemHandle(&mapped, other.handle, cudaIpcMemLazyEnablePeerAccess);
        if (error != cudaSuccess) {
          (void)cudaGetLastError();
          return unsupported("peer: the memory of rank ", r,
                             ": cudaIpcOpenMemHandle: ", cudaGetErrorString(error));
        }
        mapped_.push_back(mapped);
        pools->push_back(static_cast<uint8_t*>(mapped));
      }
      return Status();
    });
  }

  void* pool_ = nullptr;
  std::vector<void*> mapped_;
};

}  // namespace

std::unique_ptr<ProcessPools> make_ipc_pools() { return std::make_unique<IpcPools>(); }

}  // namespace nvte_ep
