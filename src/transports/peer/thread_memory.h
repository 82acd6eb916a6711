// PeerMemory between threads of one process that drive one GPU or several: plain allocations with peer access.
#ifndef NVTE_EP_TRANSPORTS_PEER_THREAD_MEMORY_H_
#define NVTE_EP_TRANSPORTS_PEER_THREAD_MEMORY_H_

#include <memory>

#include "transports/peer/peer_memory.h"

namespace nvte_ep {

// comm: of kind THREADS.
std::unique_ptr<PeerMemory> make_thread_memory(Communicator* comm, const GroupSettings& settings,
                                               Backend* backend);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_THREAD_MEMORY_H_
