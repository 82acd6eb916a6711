// Watches the clock for exchanges whose kernels have no time-out of their own.
#ifndef NVTE_EP_TRANSPORTS_STEP_WATCH_H_
#define NVTE_EP_TRANSPORTS_STEP_WATCH_H_

#include <chrono>
#include <mutex>

#include "core/backend.h"

namespace nvte_ep {

// A step is what a call of step() puts on a stream. Only the time for which it has been begun and not done counts, not
// the work before it. The oldest step that is not done and the newest one are kept: when the oldest is done, the newest takes
// its place, so a step that never ends is found, at the latest, one time-out after it has become the oldest.
// Where calls are timed, one that does not come back from enqueueing its step is found as well: NCCL may wait for peers inside.
// A captured step leaves no trace: replays are not watched.
class StepWatch {
 public:
  StepWatch(Backend* backend, int64_t timeout_ns, bool times_calls)
      : backend_(backend), timeout_ns_(timeout_ns), times_calls_(times_calls) {}
  ~StepWatch();
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

  Status open();
  // enqueue() puts one step on the stream. Where it fails, what it may have put there is watched all the same.
  template <typename Enqueue>
  Status step(nvte_ep_stream_t stream, const Enqueue& enqueue) {
    NVTE_EP_TRY(begin(stream));
    const Status enqueued = enqueue();
    const Status ended = end(stream);
    return enqueued.ok() ? ended : enqueued;
  }

  // TIMEOUT where a step takes too long. Never blocks; any thread.
  Status check();
  // Whether a step may still be on the device.
  bool pending();

 private:
  using Clock = std::chrono::steady_clock;
  struct Step {
    void* began = nullptr;
    void* done = nullptr;
    bool enqueued = false;
    bool running = false;  // seen to have begun, at since
    Clock::time_point since;
  };
  Status begin(nvte_ep_stream_t stream);
  Status end(nvte_ep_stream_t stream);
  // Leaves the oldest step that is not done in oldest_.
  Status advance();

  Backend* const backend_;
  const int64_t timeout_ns_;
  const bool times_calls_;
  std::mutex mutex_;
  Step steps_[2];
  Step* oldest_ = &steps_[0];
  Step* newest_ = &steps_[1];
  Step* open_ = nullptr;  // between begin and end; written by the thread that enqueues
  Clock::time_point opened_;
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_STEP_WATCH_H_
