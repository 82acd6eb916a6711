// What the transports of device memory share beside how items travel: a rank's group, and what its handles report.
#ifndef NVTE_EP_TRANSPORTS_DEVICE_GROUP_H_
#define NVTE_EP_TRANSPORTS_DEVICE_GROUP_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/transport.h"

namespace nvte_ep {

// A value on which the ranks must agree.
struct Agreed {
  const char* name;
  int64_t value;
};

// How the hosts of a group's ranks reach each other.
class DeviceRanks {
 public:
  virtual ~DeviceRanks() = default;
  // Every rank's values to every rank's host; INVALID_ARGUMENT on all of them where they differ. Waits.
  virtual Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) = 0;
  // The failure that ended the group, or OK; *rank is the one that caused it, -1 unknown. Never blocks.
  virtual Status failure(int32_t* rank) = 0;
  // The same, and TIMEOUT where kernels that cannot be timed are on the device for too long.
  virtual Status check_clock() { return Status(); }
  virtual void abort(const std::string& message) = 0;
  virtual void close() = 0;
  // Memory for mem_alloc, the same bytes on every rank. Peers reach it where the group has zero_copy; collective.
  virtual Status allocate_symmetric(Backend* backend, int64_t bytes, void** memory) {
    return backend->allocate(bytes, memory);
  }
  virtual void release_symmetric(Backend* backend, void* memory) { backend->release(memory); }
};

// What a handle's kernels tell the host, at any time: sums over all calls, but for needed_rows.
struct DeviceCounters {
  int64_t out_of_range;
  int64_t duplicates;
  int64_t dropped_rows;
  int64_t needed_rows;     // the largest need since dropped rows were reported
  int64_t missing_values;  // weights, or gradients of weights, that another rank wanted and did not get
  int64_t missing_rank;    // which did not give them
};
constexpr int64_t kDeviceCounters = sizeof(DeviceCounters) / sizeof(int64_t);

class DeviceReport {
 public:
  ~DeviceReport();
  Status allocate(Backend* backend);
  int64_t* memory() const { return memory_; }  // DeviceCounters in host memory that the device writes
  const int64_t* reported() const {
    return memory_ + kDeviceCounters;
  }  // dropped rows, for the device to read
  // What is new since the last time. rank: this one.
  Finding next_finding(const GroupSettings& settings, int32_t rank, int64_t handle_id);

 private:
  Backend* backend_ = nullptr;
  int64_t* memory_ = nullptr;
  DeviceCounters seen_{};
};

// What a group and its handles share on one rank.
struct DeviceMember {
  std::shared_ptr<DeviceRanks> ranks;
  GroupSettings settings;
  Backend* backend = nullptr;
  int32_t rank = 0;
  int32_t size = 0;

  int32_t local_experts() const { return settings.num_experts / size; }
  Status check_alive() const {
    int32_t rank_ignored;
    return ranks->failure(&rank_ignored);
  }
  // What comes before anything of a handle's prepare. The first one asks whether the ranks mean the same handle, which waits;
  // *agreed says that it was asked.
  Status begin_prepare(const HandleSettings& settings, nvte_ep_stream_t stream, bool* agreed) const;

  void add(DeviceReport* report, int64_t handle_id);
  void remove(DeviceReport* report);
  Finding next_finding();

 private:
  struct Reporter {
    DeviceReport* report;
    int64_t handle_id;
  };
  Finding next_of(const Reporter& reporter) const;

  std::mutex mutex_;
  std::vector<Reporter> reporters_;
  std::deque<Finding> left_;  // of handles that are gone
};

// A rank that wants weights gives its own: peers do not learn in time what this one wants.
Status check_weights_given(bool wanted, bool given, int64_t tokens);
// The same of their gradients, of this rank's slots.
Status check_gradients_given(const ReturnRows& call, int64_t slots);

using MakeDeviceHandle =
    std::function<Status(const HandleSettings& settings, std::unique_ptr<HandleTransport>* handle)>;

// A rank's group of a transport of device memory, whose handles make_handle makes.
std::unique_ptr<GroupTransport> make_device_group(const Capabilities& capabilities,
                                                  std::shared_ptr<DeviceMember> member,
                                                  MakeDeviceHandle make_handle);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_DEVICE_GROUP_H_
