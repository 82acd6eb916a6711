// The routing and the steps of one handle of a `peer` group.
#ifndef NVTE_EP_TRANSPORTS_PEER_PEER_HANDLE_H_
#define NVTE_EP_TRANSPORTS_PEER_PEER_HANDLE_H_

#include <memory>

#include "core/transport.h"
#include "transports/device_group.h"
#include "transports/peer/peer_group.h"

namespace nvte_ep {

Status make_peer_handle(std::shared_ptr<DeviceMember> member, std::shared_ptr<PeerGroup> group,
                        const HandleSettings& settings, std::unique_ptr<HandleTransport>* handle);

// Bytes of a handle's maps, and of its copies of the peers' rows, which operands with columns are made from.
int64_t peer_handle_bytes(const GroupSettings& settings, int32_t size);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PEER_HANDLE_H_
