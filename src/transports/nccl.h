// `nccl`: grouped ncclSend and ncclRecv of packed rows. Any number of ranks, no run-time compiler.
//
// Fixed capacity: counts must be known to the host, so every rank sends max_tokens_per_rank rows to every rank, (R - 1) *
// max_tokens_per_rank * row_bytes in each direction and R times that in receive memory; in return calls can be captured.
// Eager: the host knows the routing, and only rows that are needed travel.
#ifndef NVTE_EP_TRANSPORTS_NCCL_H_
#define NVTE_EP_TRANSPORTS_NCCL_H_

#include <atomic>
#include <memory>

#include "core/transport.h"
#include "transports/nccl_api.h"

namespace nvte_ep {

class NcclCommunicator : public Communicator {
 public:
  // Takes over comm.
  NcclCommunicator(const nccl::Api& api, nccl::Comm comm, int32_t rank, int32_t size, int32_t device)
      : Communicator(NVTE_EP_COMM_NCCL, rank, size), api_(api), comm_(comm), device_(device) {}
  ~NcclCommunicator() override;
  const nccl::Api& api() const { return api_; }
  nccl::Comm comm() const { return comm_; }  // null once it is ended or forgotten
  int32_t device() const override { return device_; }
  // BAD_STATE where no more groups can be made of it.
  Status check_usable() const;
  // The same for a group on this device: INVALID_ARGUMENT where it is not the communicator's.
  Status check_usable(const Device& device) const;

  // Where hosts meet that may wait in vain: comm() itself, until there is a group whose memory belongs to it. Null once ended.
  nccl::Comm meeting_point() const {
    const nccl::Comm apart = apart_;
    return ended_ ? nullptr : apart != nullptr ? apart : comm_.load();
  }
  // From now on it is a communicator of its own, so that ending a wait takes nothing from the groups that live. Collective.
  Status meet_apart(Backend* backend);
  // A peer does not come any more: what is in flight at the meeting point ends now.
  void end_meetings();

  // A peer is lost: the communicator will go without waiting for it.
  void expect_lost_peer() { lost_peer_ = true; }
  // Kernels that nothing can end use it: it is left alone for ever.
  void forget() { comm_ = nullptr; }

 private:
  void abort_comm(std::atomic<nccl::Comm>* comm);

  const nccl::Api& api_;
  std::atomic<nccl::Comm> comm_;
  std::atomic<nccl::Comm> apart_{nullptr};
  std::atomic<bool> ended_{false};
  int32_t device_;
  std::atomic<bool> lost_peer_{false};
};

Status make_nccl_id(uint8_t* unique_id);
Status create_nccl_communicator(const CommunicatorSettings& settings,
                                std::unique_ptr<Communicator>* communicator);
Status split_nccl_communicator(void* nccl_comm, std::unique_ptr<Communicator>* communicator);

Status probe_nccl(const Communicator& comm, const GroupSettings& settings);
Status create_nccl(Communicator* comm, const GroupSettings& settings, Backend* backend,
                   std::unique_ptr<GroupTransport>* group);
void nccl_memory(const Communicator& comm, const GroupSettings& settings, int64_t* group_bytes,
                 int64_t* exchange_bytes, int64_t* handle_bytes);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_NCCL_H_
