// How processes come to address each other's pools. Two ways: symmetric windows of NCCL, and CUDA IPC handles, which need no
// particular NCCL but one host.
#ifndef NVTE_EP_TRANSPORTS_PEER_PROCESS_POOLS_H_
#define NVTE_EP_TRANSPORTS_PEER_PROCESS_POOLS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "transports/nccl.h"
#include "transports/nccl_gather.h"

namespace nvte_ep {

// What opening and closing needs: the ranks' communicator and a way to tell each other how it went.
struct ProcessRanks {
  NcclCommunicator* comm;
  Backend* backend;
  const NcclGather* gather;
  nvte_ep_stream_t stream;  // of the group's own
};

class ProcessPools {
 public:
  virtual ~ProcessPools() = default;
  // Collective: pools [ranks] of bytes each, zero, as this rank's device addresses them. What cannot be here is UNSUPPORTED
  // or TRANSPORT on every rank; then nothing is left behind.
  virtual Status open(const ProcessRanks& ranks, int64_t bytes, std::vector<uint8_t*>* pools) = 0;
  // No kernel uses the pools any more. orderly: nor does a peer's, and every rank comes here.
  virtual void close(const ProcessRanks& ranks, bool orderly) = 0;
};

// OK, or UNSUPPORTED with the reason.
Status probe_window_pools(const NcclCommunicator& comm);
std::unique_ptr<ProcessPools> make_window_pools();
std::unique_ptr<ProcessPools> make_ipc_pools();

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PROCESS_POOLS_H_
