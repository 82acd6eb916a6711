#include "transports/peer/peer_memory.h"

#include "transports/peer/process_memory.h"
#include "transports/peer/thread_memory.h"

namespace nvte_ep {

PeerMemory::PeerMemory(const GroupSettings& settings, Backend* backend, int32_t rank, int32_t size)
    : settings_(settings), backend_(backend), rank_(rank), size_(size) {}

PeerMemory::~PeerMemory() {
  if (report_ != nullptr) backend_->release_shared(report_);
}

Status PeerMemory::failure(int32_t* rank) {
  *rank = -1;
  const volatile MeetingReport& report = *report_;
  const int32_t status = report.status;  // written after the rank
  if (status == 0) return host_failure(rank);
  *rank = report.rank;
  if (status == NVTE_EP_STATUS_TIMEOUT) {
    if (!told_.exchange(true)) tell(*rank);
    return Status(status, text("rank ", *rank, " did not arrive within ",
                               static_cast<double>(settings_.timeout_ns) * 1e-9, " s"));
  }
  if (status == NVTE_EP_STATUS_INVALID_ARGUMENT) {
    return Status(status,
                  text("every rank of a group makes the same calls, of the same handle and with tokens of "
                       "the same type: rank ",
                       *rank, " made another one than this rank"));
  }
  return Status(status, text("rank ", *rank, " ended the group"));
}

Status probe_peer_memory(const Communicator& comm, const GroupSettings& settings) {
  Backend* backend = nullptr;
  NVTE_EP_TRY(find_backend(settings.device, 0, &backend));
  return comm.kind() == NVTE_EP_COMM_NCCL ? probe_process_memory(comm) : Status();
}

Status open_peer_memory(Communicator* comm, const GroupSettings& settings, Backend* backend,
                        int64_t bytes_per_rank, std::unique_ptr<PeerMemory>* memory) {
  std::unique_ptr<PeerMemory> created = comm->kind() == NVTE_EP_COMM_NCCL
                                            ? make_process_memory(comm, settings, backend)
                                            : make_thread_memory(comm, settings, backend);
  void* report = nullptr;
  NVTE_EP_TRY(backend->allocate_shared(sizeof(MeetingReport), &report));
  created->report_ = static_cast<MeetingReport*>(report);
  NVTE_EP_TRY(created->open(bytes_per_rank));
  const int64_t bytes = created->size() * static_cast<int64_t>(sizeof(int32_t*));
  NVTE_EP_TRY(created->ended_words_.reserve(backend, bytes));
  NVTE_EP_TRY(backend->upload(created->ended_words_.as<void>(), created->ended_.data(), bytes, nullptr));
  *memory = std::move(created);
  return Status();
}

}  // namespace nvte_ep
