// THE list of transports, in the order in which AUTO tries them.
#include <algorithm>

#include "core/transport.h"
#include "transports/nccl.h"
#include "transports/nccl_ep.h"
#if defined(NVTE_EP_WITH_CUDA)
#include "transports/peer/peer.h"
#endif
#include "transports/threads.h"

namespace nvte_ep {
namespace {

struct TransportRow {
  int32_t id;
  const char* name;
  bool on_device;
  Status (*probe)(const Communicator&, const GroupSettings&);  // OK, or UNSUPPORTED with the reason
  Status (*create)(Communicator*, const GroupSettings&, Backend*, std::unique_ptr<GroupTransport>*);
  void (*memory)(const Communicator&, const GroupSettings&, int64_t*, int64_t*, int64_t*);
  Status (*ready)();  // what it needs of this machine besides a device; null: nothing
};

constexpr TransportRow kTransports[] = {
    {NVTE_EP_TRANSPORT_THREADS, "threads", false, probe_threads, create_threads, threads_memory, nullptr},
#if defined(NVTE_EP_WITH_CUDA)
    {NVTE_EP_TRANSPORT_PEER, "peer", true, probe_peer, create_peer, peer_memory, nullptr},
#endif
    {NVTE_EP_TRANSPORT_NCCL_EP, "nccl_ep", true, probe_nccl_ep, create_nccl_ep, nccl_ep_memory,
     nccl_ep_ready},
    {NVTE_EP_TRANSPORT_NCCL, "nccl", true, probe_nccl, create_nccl, nccl_memory, nullptr},
};

#if defined(NVTE_EP_WITH_CUDA)
constexpr const char* kPeerMissing = nullptr;
#else
constexpr const char* kPeerMissing = "this build has no CUDA backend";
#endif

Status unknown_kind(int32_t kind) {
  return unsupported("kind: expected 1 (THREADS) or 2 (NCCL), got ", kind);
}

// Calls use(row) with each transport that was asked for and fits, until one does not answer UNSUPPORTED (which all ranks then
// do alike).
template <typename Use>
Status select(const Communicator& comm, const GroupSettings& settings, int32_t transport, const Use& use) {
  std::string reasons;
  for (const TransportRow& candidate : kTransports) {
    if (transport != NVTE_EP_TRANSPORT_AUTO && transport != candidate.id) continue;
    Status fits = candidate.probe(comm, settings);
    if (fits.ok()) fits = use(candidate);
    if (fits.code() != NVTE_EP_STATUS_UNSUPPORTED) return fits;
    reasons += (reasons.empty() ? "" : "; ") + fits.message();
  }
  if (kPeerMissing != nullptr && transport == NVTE_EP_TRANSPORT_PEER) reasons = text("peer: ", kPeerMissing);
  if (reasons.empty()) reasons = text("unknown transport ", transport);
  return unsupported("config.transport: ", reasons);
}

}  // namespace

Status make_unique_id(int32_t kind, uint8_t* unique_id) {
  if (kind == NVTE_EP_COMM_NCCL) return make_nccl_id(unique_id);
  if (kind != NVTE_EP_COMM_THREADS) return unknown_kind(kind);
  thread_world_id(unique_id);
  return Status();
}

Status create_communicator(const CommunicatorSettings& settings,
                           std::unique_ptr<Communicator>* communicator) {
  if (settings.kind == NVTE_EP_COMM_NCCL) return create_nccl_communicator(settings, communicator);
  if (settings.kind != NVTE_EP_COMM_THREADS) return unknown_kind(settings.kind);
  return create_thread_communicator(settings.unique_id, settings.rank, settings.size, communicator);
}

Status borrow_nccl_communicator(void* nccl_comm, std::unique_ptr<Communicator>* communicator) {
  return split_nccl_communicator(nccl_comm, communicator);
}

Status create_transport(Communicator* comm, const GroupSettings& settings, int32_t transport,
                        Backend* backend, std::unique_ptr<GroupTransport>* group) {
  return select(*comm, settings, transport,
                [&](const TransportRow& row) { return row.create(comm, settings, backend, group); });
}

Status transport_memory(const Communicator& comm, const GroupSettings& settings, int32_t transport,
                        int64_t* group_bytes, int64_t* exchange_bytes, int64_t* handle_bytes) {
  return select(comm, settings, transport, [&](const TransportRow& row) {
    row.memory(comm, settings, group_bytes, exchange_bytes, handle_bytes);
    return Status();
  });
}

std::vector<Availability> list_transports() {
  std::vector<Availability> list;
  const std::vector<Availability> backends = list_backends();
  const auto cuda = std::find_if(backends.begin(), backends.end(),
                                 [](const Availability& b) { return b.name == std::string("cuda"); });
  for (const TransportRow& row : kTransports) {
    Availability a{row.name, true, ""};
    if (row.on_device) a = Availability{row.name, cuda->available, cuda->reason};
    if (a.available && row.ready != nullptr) {
      const Status ready = row.ready();
      a = Availability{row.name, ready.ok(), ready.message()};
    }
    list.push_back(a);
  }
  if (kPeerMissing != nullptr) list.push_back({"peer", false, kPeerMissing});
  return list;
}

}  // namespace nvte_ep
