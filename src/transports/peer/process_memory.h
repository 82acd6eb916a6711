// PeerMemory between processes: pools mapped by NCCL symmetric windows or CUDA IPC (process_pools.h). NCCL serves creation
// only; afterwards the ranks talk through the pools, so that every wait is bounded and says who is late.
#ifndef NVTE_EP_TRANSPORTS_PEER_PROCESS_MEMORY_H_
#define NVTE_EP_TRANSPORTS_PEER_PROCESS_MEMORY_H_

#include <memory>

#include "transports/peer/peer_memory.h"

namespace nvte_ep {

// comm: of kind NCCL. The way is chosen by NVTE_EP_PEER_MEMORY: windows, ipc, or auto (default), which takes windows where
// they are to be had.
Status probe_process_memory(const Communicator& comm);
std::unique_ptr<PeerMemory> make_process_memory(Communicator* comm, const GroupSettings& settings,
                                                Backend* backend);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PROCESS_MEMORY_H_
