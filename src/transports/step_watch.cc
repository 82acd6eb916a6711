#include "transports/step_watch.h"

#include <utility>

namespace nvte_ep {

StepWatch::~StepWatch() {
  for (Step& step : steps_) {
    backend_->destroy_mark(step.began);
    backend_->destroy_mark(step.done);
  }
}

Status StepWatch::open() {
  for (Step& step : steps_) {
    NVTE_EP_TRY(backend_->create_mark(&step.began));
    NVTE_EP_TRY(backend_->create_mark(&step.done));
  }
  return Status();
}

// A mark may be long in being set, where the device takes no more work: nobody who looks waits for that.
Status StepWatch::begin(nvte_ep_stream_t stream) {
  bool capturing = false;
  NVTE_EP_TRY(backend_->is_capturing(stream, &capturing));
  if (capturing) return Status();
  Step* step = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    NVTE_EP_TRY(advance());
    step = oldest_->enqueued ? newest_ : oldest_;
    step->enqueued = false;
    open_ = step;
    opened_ = Clock::now();
  }
  const Status began = backend_->set_mark(step->began, stream);
  if (!began.ok()) {  // a step that did not begin is not pending
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = nullptr;
  }
  return began;
}

Status StepWatch::end(nvte_ep_stream_t stream) {
  Step* const step = open_;  // by this thread alone
  if (step == nullptr) return Status();
  const Status ended = backend_->set_mark(step->done, stream);
  const std::lock_guard<std::mutex> lock(mutex_);
  open_ = nullptr;
  if (!ended.ok()) return ended;
  step->enqueued = true;
  step->running = false;
  return Status();
}

Status StepWatch::advance() {
  for (int turn = 0; turn < 2 && oldest_->enqueued; ++turn) {
    bool done = false;
    NVTE_EP_TRY(backend_->mark_passed(oldest_->done, &done));
    if (!done) break;
    oldest_->enqueued = false;
    std::swap(oldest_, newest_);
  }
  return Status();
}

Status StepWatch::check() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const double seconds = static_cast<double>(timeout_ns_) * 1e-9;
  if (times_calls_ && open_ != nullptr && Clock::now() - opened_ > std::chrono::nanoseconds(timeout_ns_)) {
    return Status(NVTE_EP_STATUS_TIMEOUT, text("a call has waited inside NCCL for ", seconds,
                                               " s: a peer did not take part (NCCL does not tell which)"));
  }
  NVTE_EP_TRY(advance());
  if (!oldest_->enqueued) return Status();
  bool began = false;
  NVTE_EP_TRY(backend_->mark_passed(oldest_->began, &began));
  if (!began) return Status();
  const Clock::time_point now = Clock::now();
  if (!oldest_->running) {
    oldest_->running = true;
    oldest_->since = now;
  }
  if (now - oldest_->since <= std::chrono::nanoseconds(timeout_ns_)) return Status();
  return Status(NVTE_EP_STATUS_TIMEOUT,
                text("an exchange has not ended within ", seconds,
                     " s on the device: a peer did not take part (NCCL does not tell which)"));
}

bool StepWatch::pending() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !advance().ok() || oldest_->enqueued || open_ != nullptr;
}

}  // namespace nvte_ep
