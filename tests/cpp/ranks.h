// Ranks as threads of one process: RAII over the C API, and checks of statuses and texts.
#ifndef NVTE_EP_TESTS_RANKS_H_
#define NVTE_EP_TESTS_RANKS_H_

#include <exception>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <thread>

#include "arrays.h"

namespace ep_test {

// Ends the rank's part of a test; run_ranks reports it.
struct RankFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(nvte_ep_status_t status) {
  if (status == NVTE_EP_STATUS_OK) return;
  throw RankFailure(std::string(nvte_ep_status_name(status)) + ": " + nvte_ep_last_error());
}

// The last call on this thread returned `got`, and its text holds every one of `parts`.
inline void expect_status(nvte_ep_status_t expected, nvte_ep_status_t got,
                          std::initializer_list<std::string> parts = {}, const std::string& what = "") {
  const std::string text = nvte_ep_last_error();
  EXPECT_EQ(nvte_ep_status_name(expected), std::string(nvte_ep_status_name(got))) << what << ": " << text;
  if (expected != got) return;
  EXPECT_EQ(expected == NVTE_EP_STATUS_OK, text.empty()) << what << ": " << text;
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << what << ": no \"" << part << "\" in: " << text;
  }
}

// Owns one of the library's objects.
template <typename Object, nvte_ep_status_t (*destroy)(Object)>
class Owned {
 public:
  Owned() = default;
  explicit Owned(Object object) : object_(object) {}
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() { EXPECT_EQ(destroy(object_), NVTE_EP_STATUS_OK) << nvte_ep_last_error(); }
  Object get() const { return object_; }
  Object release() { return std::exchange(object_, nullptr); }

 private:
  Object object_ = nullptr;
};
using Comm = Owned<nvte_ep_comm_t, nvte_ep_comm_destroy>;

// A rank that a failure takes out of its test ends the group, so that no peer waits for it.
inline nvte_ep_status_t end_group(nvte_ep_group_t group) {
  if (group != nullptr && std::uncaught_exceptions() > 0) (void)nvte_ep_group_abort(group);
  return nvte_ep_group_destroy(group);
}
using Group = Owned<nvte_ep_group_t, end_group>;
using Handle = Owned<nvte_ep_handle_t, nvte_ep_handle_destroy>;

struct WorldId {
  uint8_t bytes[NVTE_EP_UNIQUE_ID_BYTES] = {};
  explicit WorldId(int32_t kind = NVTE_EP_COMM_THREADS, bool fresh = true) {
    if (fresh) require(nvte_ep_unique_id(kind, bytes));  // else it comes from another process
  }
};

inline Comm make_comm(const WorldId& id, int rank, int size, int32_t kind = NVTE_EP_COMM_THREADS,
                      int device_id = 0) {
  nvte_ep_comm_config_t config = NVTE_EP_COMM_CONFIG_INIT;
  config.kind = kind;
  config.device_id = device_id;
  config.num_ranks = size;
  config.rank = rank;
  config.unique_id = id.bytes;
  nvte_ep_comm_t comm = nullptr;
  require(nvte_ep_comm_create(&config, &comm));
  return Comm(comm);
}

// One rank of a test. Its peers may be threads or processes: a test's body uses nothing else.
struct Rank {
  int rank = 0;
  int size = 1;
  nvte_ep_comm_t comm = nullptr;
};

// Runs body as every rank of a fresh communicator, and waits for all.
inline void run_ranks(int size, const std::function<void(Rank&)>& body) {
  const WorldId id;
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      try {
        const Comm comm = make_comm(id, r, size);
        Rank rank{r, size, comm.get()};
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << " of " << size << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kPatience = 60'000 * kMillisecond;  // of tests in which every rank arrives

inline nvte_ep_group_config_t group_config(int num_experts, int64_t hidden, int64_t max_tokens,
                                           int64_t recv_capacity) {
  nvte_ep_group_config_t config = NVTE_EP_GROUP_SETTINGS_INIT;
  config.num_experts = num_experts;
  config.hidden = hidden;
  config.max_tokens_per_rank = max_tokens;
  config.recv_capacity = recv_capacity;
  config.timeout_ns = kPatience;
  return config;
}
inline Group make_group(const Rank& rank, const nvte_ep_group_config_t& config) {
  nvte_ep_group_t group = nullptr;
  require(nvte_ep_group_create(rank.comm, &config, &group));
  return Group(group);
}

inline nvte_ep_handle_config_t handle_config(int top_k, int alignment, int32_t forward = NVTE_EP_FORMAT_BF16,
                                             int32_t backward = NVTE_EP_FORMAT_BF16) {
  nvte_ep_handle_config_t config = NVTE_EP_HANDLE_CONFIG_INIT;
  config.top_k = top_k;
  config.alignment = alignment;
  config.dispatch = forward;
  config.combine_backward = backward;
  return config;
}
inline Handle make_handle(const Group& group, const nvte_ep_handle_config_t& config) {
  nvte_ep_handle_t handle = nullptr;
  require(nvte_ep_handle_create(group.get(), &config, &handle));
  return Handle(handle);
}

inline nvte_ep_error_info_t poll(const Group& group) {
  nvte_ep_error_info_t info = NVTE_EP_ERROR_INFO_INIT;
  require(nvte_ep_group_poll_error(group.get(), &info));
  return info;
}

// prepare with nothing asked for.
inline nvte_ep_status_t prepare(const Handle& handle, Array* topk_idx) {
  nvte_ep_prepare_args_t args = NVTE_EP_PREPARE_ARGS_INIT;
  args.topk_idx = topk_idx->tensor();
  return nvte_ep_handle_prepare(handle.get(), &args, nullptr);
}

}  // namespace ep_test

#endif  // NVTE_EP_TESTS_RANKS_H_
