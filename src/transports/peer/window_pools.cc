#include <cuda_runtime.h>

#include <utility>

#include "transports/peer/cuda_status.h"
#include "transports/peer/process_pools.h"

namespace nvte_ep {
namespace {

class WindowPools : public ProcessPools {
 public:
  Status open(const ProcessRanks& ranks, int64_t bytes, std::vector<uint8_t*>* pools) override {
    const Status opened = try_open(ranks, bytes, pools);
    if (!opened.ok()) close(ranks, false);
    return opened;
  }

  // A peer that still has the memory mapped keeps it alive.
  void close(const ProcessRanks& ranks, bool) override {
    const nccl::Api& api = ranks.comm->api();
    const nccl::Comm comm = ranks.comm->comm();
    (void)ranks.backend->with_device([&] {
      if (nccl::Window window = std::exchange(window_, nullptr)) {
        if (comm != nullptr) (void)api.ncclCommWindowDeregister(comm, window);
      }
      if (void* memory = std::exchange(memory_, nullptr)) (void)api.ncclMemFree(memory);
      return Status();
    });
  }

 private:
  Status try_open(const ProcessRanks& ranks, int64_t bytes, std::vector<uint8_t*>* pools) {
    const size_t size = static_cast<size_t>(bytes);
    const nccl::Api& api = ranks.comm->api();
    const nccl::Comm comm = ranks.comm->comm();
    const Status allocated = ranks.backend->with_device([&]() -> Status {
      NVTE_EP_TRY(nccl::check(api, api.ncclMemAlloc(&memory_, size), "ncclMemAlloc", comm));
      NVTE_EP_TRY(peer_cuda_status(cudaMemsetAsync(memory_, 0, size, ranks.stream), "cudaMemsetAsync"));
      return peer_cuda_status(cudaStreamSynchronize(ranks.stream), "cudaStreamSynchronize");
    });
    // Registering waits for all ranks inside NCCL: nobody enters it alone.
    NVTE_EP_TRY(ranks.gather->settle("group_create", allocated, ranks.stream));
    const Status mapped = ranks.backend->with_device([&]() -> Status {
      NVTE_EP_TRY(nccl::check(
          api, api.ncclCommWindowRegister(comm, memory_, size, &window_, nccl::kWindowCollectiveSymmetric),
          "ncclCommWindowRegister", comm));
      if (window_ == nullptr) return unsupported("NCCL has no symmetric windows here (NCCL_CUMEM_ENABLE=0?)");
      for (int32_t r = 0; r < ranks.comm->size(); ++r) {
        void* pool = nullptr;
        NVTE_EP_TRY(nccl::check(api, api.ncclGetLsaDevicePointer(window_, 0, r, &pool),
                                "ncclGetLsaDevicePointer", comm));
        if (pool == nullptr) return unsupported("NCCL gives no address of rank ", r, "'s window");
        pools->push_back(static_cast<uint8_t*>(pool));
      }
      return Status();
    });
    return ranks.gather->settle("group_create", mapped, ranks.stream);
  }

  void* memory_ = nullptr;
  nccl::Window window_ = nullptr;
};

}  // namespace

Status probe_window_pools(const NcclCommunicator& comm) {
  const nccl::Api& api = comm.api();
  if (api.version < nccl::kWindowsVersion || api.ncclMemAlloc == nullptr || api.ncclMemFree == nullptr ||
      api.ncclCommWindowRegister == nullptr || api.ncclCommWindowDeregister == nullptr ||
      api.ncclGetLsaDevicePointer == nullptr || api.ncclTeamLsa == nullptr) {
    return unsupported("peer: symmetric windows need NCCL ", nccl::kWindowsVersion, " or newer, got ",
                       api.version, " from ", api.path);
  }
  const nccl::Team team = api.ncclTeamLsa(comm.comm());
  if (team.size == comm.size() && team.rank == comm.rank()) return Status();
  return unsupported("peer: the communicator spans several NVLink domains: ", team.size, " of its ",
                     comm.size(), " ranks can address each other's memory");
}

std::unique_ptr<ProcessPools> make_window_pools() { return std::make_unique<WindowPools>(); }

}  // namespace nvte_ep
