#include "transports/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

namespace nvte_ep {
namespace {

// Exceptions stop here: a rank that left by one would keep its peers waiting for ever.
Status run(const Rendezvous::Work& work, const std::vector<Publication>& publications) {
  try {
    return work(publications);
  } catch (const std::bad_alloc&) {
    return Status(NVTE_EP_STATUS_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception& error) {
    return Status(NVTE_EP_STATUS_INTERNAL, error.what());
  }
}

}  // namespace

Rendezvous::Rendezvous(int32_t size)
    : size_(size), publications_(size), arrived_(size, false), left_(size, false) {}

void Rendezvous::fail(nvte_ep_status_t code, int32_t rank, const std::string& message) {
  if (!failure_.ok()) return;  // the first one names the cause
  failure_ = Status(code, message);
  failed_rank_ = rank;
  changed_.notify_all();
}

Status Rendezvous::common(const std::function<Status(std::shared_ptr<void>*)>& make,
                          std::shared_ptr<void>* object) {
  const std::lock_guard<std::mutex> lock(common_mutex_);
  if (!common_) NVTE_EP_TRY(make(&common_));
  *object = common_;
  return Status();
}

void Rendezvous::abort(int32_t rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fail(NVTE_EP_STATUS_PEER_FAILED, rank, text("rank ", rank, " aborted the group"));
}

void Rendezvous::leave(int32_t rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  left_[rank] = true;
  if (num_arrived_ > 0 && !arrived_[rank]) {
    fail(NVTE_EP_STATUS_PEER_FAILED, rank,
         text("rank ", rank, " destroyed its group while others waited for it"));
  }
}

Status Rendezvous::failure(int32_t* rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  *rank = failed_rank_;
  return failure_;
}

Status Rendezvous::disagreement() const {
  const Publication& first = publications_[0];
  for (int32_t r = 1; r < size_; ++r) {
    const Publication& other = publications_[r];
    if (std::strcmp(first.step, other.step) != 0) {
      return invalid_argument("every rank of a group makes the same calls: rank 0 is in ", first.step,
                              ", rank ", r, " in ", other.step);
    }
    for (int i = 0; i < first.num_settings; ++i) {
      if (first.settings[i].value == other.settings[i].value) continue;
      return invalid_argument(first.settings[i].name, ": expected the same on every rank, got ",
                              first.settings[i].value, " on rank 0 and ", other.settings[i].value,
                              " on rank ", r);
    }
  }
  return Status();
}

Status Rendezvous::exchange(int32_t rank, const Publication& mine, int64_t timeout_ns, const Work& work) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!failure_.ok()) return failure_;
  const auto gone = std::find(left_.begin(), left_.end(), true);
  if (gone != left_.end()) {
    const int32_t peer = static_cast<int32_t>(gone - left_.begin());
    fail(NVTE_EP_STATUS_PEER_FAILED, peer, text("rank ", peer, " has destroyed its group"));
    return failure_;
  }
  const uint64_t round = round_;
  publications_[rank] = mine;
  arrived_[rank] = true;
  if (++num_arrived_ == size_) {
    // All are here. From now on every rank works; none is let go before all have finished.
    num_arrived_ = 0;
    std::fill(arrived_.begin(), arrived_.end(), false);
    num_working_ = size_;
    outcome_ = Status();
    ++round_;
    changed_.notify_all();
  } else {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
    const bool in_time =
        changed_.wait_until(lock, deadline, [&] { return round_ != round || !failure_.ok(); });
    if (!in_time) {
      const int32_t late =
          static_cast<int32_t>(std::find(arrived_.begin(), arrived_.end(), false) - arrived_.begin());
      std::string all;
      for (int32_t r = 0; r < size_; ++r) {
        if (!arrived_[r]) all += (all.empty() ? "" : ", ") + std::to_string(r);
      }
      fail(NVTE_EP_STATUS_TIMEOUT, late,
           text("rank ", all, " did not arrive at ", mine.step, " within ",
                static_cast<double>(timeout_ns) * 1e-9, " s"));
    }
    if (round_ == round) return failure_;
  }

  Status status = disagreement();
  if (status.ok()) {
    lock.unlock();
    status = run(work, publications_);
    lock.lock();
  }
  if (!status.ok() && outcome_.ok())
    outcome_ = Status(status.code(), text("rank ", rank, ": ", status.message()));
  if (--num_working_ == 0) {
    changed_.notify_all();
  } else {
    changed_.wait(lock, [&] { return num_working_ == 0; });
  }
  return status.ok() ? outcome_ : status;
}

}  // namespace nvte_ep
