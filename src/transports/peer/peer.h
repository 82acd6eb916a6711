// `peer`: ranks load each other's memory directly. Today between the ranks of one process (threads that drive one GPU or
// several).
#ifndef NVTE_EP_TRANSPORTS_PEER_PEER_H_
#define NVTE_EP_TRANSPORTS_PEER_PEER_H_

#include <memory>

#include "core/transport.h"

namespace nvte_ep {

Status probe_peer(const Communicator& comm, const GroupSettings& settings);
Status create_peer(Communicator* comm, const GroupSettings& settings, Backend* backend,
                   std::unique_ptr<GroupTransport>* group);
void peer_memory(const Communicator& comm, const GroupSettings& settings, int64_t* group_bytes,
                 int64_t* exchange_bytes, int64_t* handle_bytes);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PEER_H_
