#include "transports/peer/peer.h"

#include <utility>

#include "transports/peer/peer_group.h"
#include "transports/peer/peer_handle.h"

namespace nvte_ep {

Status probe_peer(const Communicator& comm, const GroupSettings& settings) {
  if (settings.device.is_host()) return unsupported("peer works on CUDA devices, not on host memory");
  NVTE_EP_TRY(probe_peer_memory(comm, settings));
  if (settings.zero_copy) return unsupported("peer has no zero_copy yet");
  if (comm.size() > kMostRanks)
    return unsupported("peer: expected at most ", kMostRanks, " ranks, got ", comm.size());
  return Status();
}

Status create_peer(Communicator* comm, const GroupSettings& settings, Backend* backend,
                   std::unique_ptr<GroupTransport>* group) {
  auto peers = std::make_shared<PeerGroup>(settings, backend);
  NVTE_EP_TRY(peers->open(comm));
  auto member = std::make_shared<DeviceMember>();
  member->ranks = peers;
  member->settings = settings;
  member->backend = backend;
  member->rank = comm->rank();
  member->size = comm->size();
  *group = make_device_group(
      Capabilities{"peer", true, true, true}, member,
      [member, peers](const HandleSettings& handle_settings, std::unique_ptr<HandleTransport>* handle) {
        return make_peer_handle(member, peers, handle_settings, handle);
      });
  return Status();
}

void peer_memory(const Communicator& comm, const GroupSettings& settings, int64_t* group_bytes,
                 int64_t* exchange_bytes, int64_t* handle_bytes) {
  *exchange_bytes = PoolLayout(settings, comm.size()).bytes;
  *group_bytes = *exchange_bytes;
  *handle_bytes = peer_handle_bytes(settings, comm.size());
}

}  // namespace nvte_ep
