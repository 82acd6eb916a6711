#include "transports/nccl_group_comm.h"

#include <chrono>
#include <thread>
#include <utility>

#include "transports/device_exchange.h"
#include "transports/nccl.h"

namespace nvte_ep {

using nccl::check;
using Clock = std::chrono::steady_clock;

Status NcclGroupComm::open(NcclCommunicator* base, const GroupSettings& settings, int32_t transport,
                           const std::vector<Agreed>& more) {
  NVTE_EP_TRY(watch_.open());
  base_ = base;
  NVTE_EP_TRY(backend_->with_device([&] { return nccl::split(api_, base->comm(), rank_, &comm_); }));
  std::vector<Agreed> agreement = group_agreement(settings);
  agreement.push_back({"transport", transport});
  agreement.insert(agreement.end(), more.begin(), more.end());
  return agree("group_create", agreement, nullptr);
}

Status NcclGroupComm::use(const std::function<Status(nccl::Comm comm)>& calls) {
  class InUse {
   public:
    explicit InUse(NcclGroupComm* group) : group_(group) { set(true); }
    ~InUse() { set(false); }

   private:
    void set(bool in_use) {
      const std::lock_guard<std::mutex> lock(group_->use_mutex_);
      group_->in_use_ = in_use;
      group_->left_use_.notify_all();
    }
    NcclGroupComm* const group_;
  };
  NVTE_EP_TRY(failure());
  nccl::Comm comm = nullptr;
  Status called;
  {
    const InUse in_use(this);
    NVTE_EP_TRY(alive(&comm));
    called = backend_->with_device([&] { return calls(comm); });
  }
  const Status meanwhile = alive(&comm);
  if (meanwhile.ok()) return called;
  close();
  return meanwhile;
}

Status NcclGroupComm::gather(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream) {
  return use([&](nccl::Comm comm) {
    return check(api_, api_.ncclAllGather(mine, all, static_cast<size_t>(bytes), nccl::kUint8, comm, stream),
                 "ncclAllGather", comm);
  });
}

NcclGather NcclGroupComm::hosts() {
  return NcclGather(
      backend_, size_,
      [this](const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream) {
        return gather(mine, all, bytes, stream);
      },
      [this](const char* step, nvte_ep_stream_t stream) { return wait(step, stream); });
}

// What the hosts tell each other needs memory, and copies that wait for the stream: it is waited for before, with a clock.
Status NcclGroupComm::agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) {
  NVTE_EP_TRY(wait(step, stream));
  return hosts().agree(step, mine, stream);
}

Status NcclGroupComm::settle(const char* step, const Status& mine, nvte_ep_stream_t stream) {
  NVTE_EP_TRY(wait(step, stream));
  return hosts().settle(step, mine, stream);
}

Status NcclGroupComm::wait(const char* step, nvte_ep_stream_t stream) {
  const auto deadline = Clock::now() + std::chrono::nanoseconds(timeout_ns_);
  for (;;) {
    bool idle = false;
    NVTE_EP_TRY(backend_->is_idle(stream, &idle));
    // Idle it is also where the communicator was aborted: what should have come has not.
    NVTE_EP_TRY(failure());
    if (idle) return Status();
    if (Clock::now() > deadline) {
      const Status late = fail(NVTE_EP_STATUS_TIMEOUT, text(step, ": a peer did not arrive within ",
                                                            static_cast<double>(timeout_ns_) * 1e-9,
                                                            " s (NCCL does not tell which)"));
      close();  // the caller waits for it
      return late;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

Status NcclGroupComm::failure() {
  Status failed;
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (!failure_.ok() || comm_ == nullptr) return failure_;
    nccl::Result error = 0;
    NVTE_EP_TRY(check(api_, api_.ncclCommGetAsyncError(comm_, &error), "ncclCommGetAsyncError", comm_));
    if (error == 0 || error == nccl::kInProgress) return Status();
    failed = fail(NVTE_EP_STATUS_PEER_FAILED, text("NCCL reports ", api_.ncclGetErrorString(error)));
  }
  (void)close_unless_used(std::chrono::milliseconds(0));
  return failed;
}

Status NcclGroupComm::alive(nccl::Comm* comm) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  *comm = comm_;
  if (!failure_.ok() || comm_ != nullptr) return failure_;
  return bad_state("the group is closed");
}

Status NcclGroupComm::check_watch() {
  NVTE_EP_TRY(failure());
  const Status late = watch_.check();
  return late.code() == NVTE_EP_STATUS_TIMEOUT ? fail(late.code(), late.message()) : late;
}

Status NcclGroupComm::fail(nvte_ep_status_t code, const std::string& message, bool lost_peer) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (failure_.ok()) failure_ = Status(code, message);
  if (base_ != nullptr) base_->expect_lost_peer();
  if (lost_peer && is_stuck()) {
    backend_->abandon();
    if (base_ != nullptr) base_->forget();
  }
  return failure_;
}

void NcclGroupComm::abort(const std::string& message) {
  (void)fail(NVTE_EP_STATUS_PEER_FAILED, message);
  // A call that NCCL keeps for long waits for a peer inside, and ends by the abort.
  constexpr std::chrono::milliseconds kLong(200);
  if (!close_unless_used(kLong)) close();
}

bool NcclGroupComm::close_unless_used(std::chrono::milliseconds patience) {
  {
    std::unique_lock<std::mutex> lock(use_mutex_);
    if (!left_use_.wait_for(lock, patience, [this] { return !in_use_; })) return false;
  }
  close();  // who comes to use() now finds the failure
  return true;
}

void NcclGroupComm::close() {
  nccl::Comm mine = nullptr;
  bool orderly = false;
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    base_ = nullptr;
    mine = std::exchange(comm_, nullptr);
    if (mine == nullptr || is_stuck()) return;
    orderly = failure_.ok();
  }
  (void)backend_->with_device([&] {
    (void)(orderly ? api_.ncclCommDestroy(mine) : api_.ncclCommAbort(mine));
    return Status();
  });
}

bool NcclGroupComm::is_stuck() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return !failure_.ok() && !abort_ends_kernels_ && watch_.pending();
}

}  // namespace nvte_ep
