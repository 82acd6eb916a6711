// Group and Handle: one rank's member of an expert-parallel group, and the routing state of one layer. A state machine over
// one Backend and one Transport, which are handed in. Calls arrive checked for shape by api; what depends on the state is
// checked here.
#ifndef NVTE_EP_CORE_GROUP_H_
#define NVTE_EP_CORE_GROUP_H_

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "core/backend.h"
#include "core/transport.h"

namespace nvte_ep {

// Backend memory that grows and is freed with its owner.
class Scratch {
 public:
  explicit Scratch(Backend* backend) : backend_(backend) {}
  ~Scratch() { backend_->release(pointer_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Status reserve(int64_t bytes);
  void* data() const { return pointer_; }

 private:
  Backend* backend_;
  void* pointer_ = nullptr;
  int64_t bytes_ = 0;
};

class Group {
 public:
  static Status create(std::shared_ptr<Communicator> comm, const GroupSettings& settings, int32_t transport,
                       std::shared_ptr<Group>* group);

  const GroupSettings& settings() const { return settings_; }
  int32_t rank() const { return rank_; }
  int32_t num_ranks() const { return num_ranks_; }
  Backend* backend() const { return backend_; }
  int32_t local_experts() const { return settings_.num_experts / num_ranks_; }

  // Runs function(transport); BAD_STATE once the group is closed.
  template <typename Function>
  Status with_transport(const Function& function) {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    if (!transport_) return bad_state("the group has been destroyed");
    return function(*transport_);
  }
  // OK while the group can work: neither destroyed nor ended by a failure.
  Status check_open() {
    return with_transport([](GroupTransport& transport) { return transport.failure(); });
  }
  void close();

  // Handles are numbered in the order of their creation.
  int64_t next_handle_id() const { return num_handles_; }
  void add_handle(const void* public_handle);
  const void* public_handle(int64_t id) const;
  void forget_handle(const void* public_handle);

 private:
  Group() = default;
  std::shared_ptr<Communicator>
      comm_;  // until the group is closed: handles that are left do not hold its rank
  int32_t rank_ = 0;
  int32_t num_ranks_ = 1;
  GroupSettings settings_;
  Backend* backend_ = nullptr;
  std::unique_ptr<GroupTransport> transport_;
  std::shared_mutex mutex_;
  mutable std::mutex handles_mutex_;
  int64_t num_handles_ = 0;
  std::map<int64_t, const void*> handles_;
};

class Handle {
 public:
  static Status create(std::shared_ptr<Group> group, const HandleSettings& settings,
                       std::shared_ptr<Handle>* handle);

  Group& group() { return *group_; }
  const HandleSettings& settings() const { return settings_; }
  bool prepared() const { return transport_->prepared(); }
  RoutingView routing() const { return transport_->routing(); }
  HandleTransport& transport() { return *transport_; }
  Scratch& send_rows() { return send_rows_; }
  Scratch& recv_rows() { return recv_rows_; }

  // OK where per-step calls other than prepare may run, if the group is open.
  Status check_prepared() const {
    if (prepared()) return Status();
    return bad_state("handle: expected a successful nvte_ep_handle_prepare before this call");
  }

 private:
  explicit Handle(std::shared_ptr<Group> group)
      : group_(std::move(group)), send_rows_(group_->backend()), recv_rows_(group_->backend()) {}
  std::shared_ptr<Group> group_;
  HandleSettings settings_;
  std::unique_ptr<HandleTransport> transport_;
  Scratch send_rows_;  // packed rows of this rank's tokens
  Scratch recv_rows_;  // packed rows in slots, where they are not received as such
};

// Bytes of the two scratch areas of a handle whose transport does not take a dispatch whole, largest over formats.
int64_t handle_scratch_bytes(const GroupSettings& settings);

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_GROUP_H_
