// Rendezvous: where the ranks of one process meet. Each step is one exchange: every rank publishes what the others need, all
// wait until everybody has, then each does its part of the work, reading (and, where agreed, writing) the peers' memory; no
// rank returns before every rank has finished its part. So memory that was published may be reused on return, and nothing is
// touched after a failure: waiting can time out, working cannot.
#ifndef NVTE_EP_TRANSPORTS_RENDEZVOUS_H_
#define NVTE_EP_TRANSPORTS_RENDEZVOUS_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/backend.h"
#include "core/status.h"

namespace nvte_ep {

// A value on which all ranks must agree in a step.
struct Setting {
  const char* name = nullptr;
  int64_t value = 0;
};

struct Publication {
  static constexpr int kMaxSettings = 12;
  const char* step = nullptr;
  Setting settings[kMaxSettings];
  int num_settings = 0;

  // Of prepare
  const int32_t* indices = nullptr;
  int64_t tokens = 0;
  SlotAddress* slots = nullptr;
  // Of send_rows and return_rows
  const void* rows = nullptr;
  int64_t row_stride = 0;
  const float* weights = nullptr;
  int64_t weight_stride = 0;
  const float* scalars = nullptr;
  bool gives = false;  // weights of its tokens, or gradients of its slots' weights
  bool wants = false;  // the same, from the others

  void agree_on(const char* name, int64_t value) { settings[num_settings++] = Setting{name, value}; }
};

class Rendezvous {
 public:
  explicit Rendezvous(int32_t size);

  // Publishes, waits for all ranks, runs work(publications) unless the ranks disagree on the step or a setting (then every
  // rank gets INVALID_ARGUMENT), waits for all to finish. A step that fails on one rank fails on all. TIMEOUT and PEER_FAILED
  // are for ever.
  using Work = std::function<Status(const std::vector<Publication>&)>;
  Status exchange(int32_t rank, const Publication& mine, int64_t timeout_ns, const Work& work);

  // One object for all ranks, made by whichever asks first; it lives as long as the rendezvous.
  Status common(const std::function<Status(std::shared_ptr<void>*)>& make, std::shared_ptr<void>* object);

  void abort(int32_t rank);
  void leave(int32_t rank);  // this rank will not come again

  // The failure that ended the group, or OK; *rank is the one that caused it.
  Status failure(int32_t* rank) const;

 private:
  void fail(nvte_ep_status_t code, int32_t rank, const std::string& message);
  Status disagreement() const;

  const int32_t size_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Publication> publications_;
  std::vector<bool> arrived_;
  std::vector<bool> left_;
  int32_t num_arrived_ = 0;
  int32_t num_working_ = 0;
  uint64_t round_ = 0;
  std::mutex common_mutex_;
  std::shared_ptr<void> common_;
  Status outcome_;  // of the round: the first failure of a rank's work
  Status failure_;
  int32_t failed_rank_ = -1;
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_RENDEZVOUS_H_
