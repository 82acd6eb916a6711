// One rank's part of a group's own NCCL communicator: what every transport over NCCL does with it besides moving rows.
#ifndef NVTE_EP_TRANSPORTS_NCCL_GROUP_COMM_H_
#define NVTE_EP_TRANSPORTS_NCCL_GROUP_COMM_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "core/backend.h"
#include "transports/device_exchange.h"
#include "transports/nccl_api.h"
#include "transports/nccl_gather.h"
#include "transports/step_watch.h"

namespace nvte_ep {

class NcclCommunicator;

class NcclGroupComm {
 public:
  // abort_ends_kernels: whether all kernels that run over the communicator look at its abort flag, as NCCL's own do.
  NcclGroupComm(const nccl::Api& api, Backend* backend, int32_t rank, int32_t size, int64_t timeout_ns,
                bool abort_ends_kernels)
      : api_(api),
        backend_(backend),
        rank_(rank),
        size_(size),
        timeout_ns_(timeout_ns),
        abort_ends_kernels_(abort_ends_kernels),
        // Kernels that end by themselves when it is time get a chance to do so. NCCL EP compiles inside its calls, for as long as
        // it takes.
        watch_(backend, abort_ends_kernels ? timeout_ns : timeout_ns + timeout_ns / 4, abort_ends_kernels) {}
  ~NcclGroupComm() { close(); }
  NcclGroupComm(const NcclGroupComm&) = delete;
  NcclGroupComm& operator=(const NcclGroupComm&) = delete;

  // Splits base, so that groups do not order each other's calls. Collective. INVALID_ARGUMENT where the ranks disagree on the
  // settings, or on the transport (NVTE_EP_TRANSPORT_*), which AUTO may have chosen differently, or what it adds to them.
  Status open(NcclCommunicator* base, const GroupSettings& settings, int32_t transport,
              const std::vector<Agreed>& more = {});

  const nccl::Api& api() const { return api_; }
  nccl::Comm comm() const { return comm_; }
  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  // Begins and ends what is enqueued on a stream for one exchange.
  StepWatch& watch() { return watch_; }

  // Calls of NCCL over the communicator, on the group's device, by the group's own thread. poll_error and abort come from any
  // thread and may end the group meanwhile: the communicator does not go away under the calls.
  Status use(const std::function<Status(nccl::Comm comm)>& calls);
  // All-gather of bytes a rank, in rank order.
  Status gather(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream);
  // Every rank's values to every rank's host; INVALID_ARGUMENT on all of them where they differ. Waits.
  Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream);
  // OK where every rank is; else the first failure, on every rank. Waits.
  Status settle(const char* step, const Status& mine, nvte_ep_stream_t stream);
  // Waits for the stream, the time-out at most.
  Status wait(const char* step, nvte_ep_stream_t stream);

  // The failure that ended the group, or OK. Neither blocks.
  Status failure();
  // Looks at the clock, too: TIMEOUT where an exchange has been on the device for longer than the time-out.
  Status check_watch();
  // Ends the group; what is in flight goes on. lost_peer: and may never end.
  Status fail(nvte_ep_status_t code, const std::string& message, bool lost_peer = true);
  // Ends the group, and with it what is in flight: the communicator is this group's own.
  void abort(const std::string& message);
  // After a failure the communicator is aborted, else destroyed; left alone for ever where kernels that nothing can end may
  // still use it. For the group's own thread.
  void close();
  // Whether such kernels may be on the device.
  bool is_stuck();

 private:
  NcclGather hosts();
  // After fail(), by any thread: closes, unless the group's thread is in use() for so long; it will close when it comes out.
  bool close_unless_used(std::chrono::milliseconds patience);
  // What failure() knows; where it is OK, the communicator.
  Status alive(nccl::Comm* comm);

  const nccl::Api& api_;
  Backend* const backend_;
  const int32_t rank_, size_;
  const int64_t timeout_ns_;
  const bool abort_ends_kernels_;
  NcclCommunicator* base_ = nullptr;  // until close
  nccl::Comm comm_ = nullptr;
  StepWatch watch_;
  std::mutex use_mutex_;
  std::condition_variable left_use_;
  bool in_use_ = false;
  std::recursive_mutex mutex_;  // of base_, comm_ and failure_
  Status failure_;
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_NCCL_GROUP_COMM_H_
