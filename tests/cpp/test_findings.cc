// What the kernels of a device transport count, and how poll_error tells it: over host memory, where the "device" is the host
// backend, and the host looks between two calls or after several.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "backends/host_backend.h"
#include "transports/device_group.h"

namespace nvte_ep {
namespace {

constexpr int32_t kExperts = 2;
constexpr int64_t kCapacity = 8;

// A handle whose prepare counts as those of device transports do: on the device, then to the host.
class CountingHandle {
 public:
  CountingHandle(DeviceMember* member, int64_t id) : member_(member) {
    EXPECT_TRUE(report_.allocate(member->backend).ok());
    member_->add(&report_, id);
  }
  ~CountingHandle() { member_->remove(&report_); }

  // Of one choice a token.
  void prepare(std::vector<int32_t> experts) {
    std::vector<int32_t> clean(experts.size());
    const TensorView given{
        experts.data(), DType::kInt32, Device(), 2, {static_cast<int64_t>(experts.size()), 1}, 1};
    ASSERT_TRUE(
        member_->backend->clean_indices(given, kExperts, given.rows(), clean.data(), counters_, nullptr)
            .ok());
    Route route;
    route.num_ranks = 1;
    route.num_experts = kExperts;
    route.top_k = 1;
    route.alignment = 4;
    route.capacity = kCapacity;
    route.tokens = given.rows();
    route.indices = clean.data();
    route.history = counters_ + 2;
    route.reported = report_.reported();
    ASSERT_TRUE(member_->backend->route(route, nullptr).ok());
    std::copy_n(counters_, kDeviceCounters, report_.memory());
  }

  // As kernels of a transport do.
  void tell_missing_values(int32_t giver) {
    counters_[5] = giver;
    counters_[4] += 1;
    std::copy_n(counters_, kDeviceCounters, report_.memory());
  }

 private:
  DeviceMember* const member_;
  DeviceReport report_;
  int64_t counters_[kDeviceCounters] = {};
};

class Findings : public ::testing::Test {
 protected:
  Findings() {
    member_.backend = &host_;
    member_.size = 1;
  }

  void expect(nvte_ep_status_t status, int64_t handle, int64_t count, int64_t needed_rows) {
    const Finding found = member_.next_finding();
    EXPECT_EQ(found.status.code(), status);
    EXPECT_EQ(found.handle_id, handle);
    EXPECT_EQ(found.count, count);
    EXPECT_EQ(found.needed_rows, needed_rows);
  }
  // What it says is that of the finding that comes next.
  void expect_words(const char* words, nvte_ep_status_t status, int64_t count) {
    const Finding found = member_.next_finding();
    EXPECT_EQ(found.status.code(), status);
    EXPECT_EQ(found.count, count);
    EXPECT_EQ(found.status.message(), words);
  }
  void expect_nothing() { EXPECT_TRUE(member_.next_finding().status.ok()); }

  static std::vector<int32_t> of_expert_0(size_t tokens) { return std::vector<int32_t>(tokens, 0); }

  HostBackend host_{1};
  DeviceMember member_;
};

TEST_F(Findings, NeedIsTheLargestOfTheCallsThatWereNotReported) {
  CountingHandle handle(&member_, 7);
  handle.prepare(of_expert_0(23));
  handle.prepare(of_expert_0(13));
  handle.prepare(of_expert_0(5));  // fits
  expect(NVTE_EP_STATUS_OVERFLOW, 7, 15 + 5, 24);
  expect_nothing();
  handle.prepare(of_expert_0(17));
  expect(NVTE_EP_STATUS_OVERFLOW, 7, 9, 20);
  handle.prepare(of_expert_0(5));
  expect_nothing();
  handle.prepare(of_expert_0(13));
  handle.prepare(of_expert_0(17));
  expect(NVTE_EP_STATUS_OVERFLOW, 7, 5 + 9, 20);
  expect_nothing();
}

TEST_F(Findings, BadIndicesComeBeforeTheOverflowOfTheSameCall) {
  CountingHandle handle(&member_, 7);
  std::vector<int32_t> experts = of_expert_0(9);
  experts.insert(experts.end(), {kExperts, -2});
  handle.prepare(experts);
  expect(NVTE_EP_STATUS_INVALID_ARGUMENT, 7, 2, 0);
  handle.prepare(of_expert_0(13));
  expect(NVTE_EP_STATUS_OVERFLOW, 7, 1 + 5, 16);
  expect_nothing();
}

TEST_F(Findings, SayWhatTheyCount) {
  member_.settings.num_experts = kExperts;
  member_.settings.recv_capacity = kCapacity;
  CountingHandle handle(&member_, 7);
  std::vector<int32_t> experts = of_expert_0(9);
  experts.insert(experts.end(), {kExperts, -2});
  handle.prepare(experts);
  expect_words(
      "topk_idx: expected global expert ids below 2 or -1, each expert at most once a token; got 2 out of "
      "range and 0 "
      "named twice on rank 0, which count as -1",
      NVTE_EP_STATUS_INVALID_ARGUMENT, 2);
  handle.tell_missing_values(3);
  expect_words(
      "topk_weights (grad_recv_weights in dispatch_backward): expected on every rank where one asks for "
      "recv_weights "
      "(grad_topk_weights); rank 3 gave none, and zeros stand for them; calls: 1",
      NVTE_EP_STATUS_INVALID_ARGUMENT, 1);
  expect_words("recv_capacity: expected at least 12, got 8; rows dropped on rank 0: 1",
               NVTE_EP_STATUS_OVERFLOW, 1);
  expect_nothing();
}

TEST_F(Findings, AreKeptWhenTheirHandleGoes) {
  auto first = std::make_unique<CountingHandle>(&member_, 1);
  CountingHandle second(&member_, 2);
  std::vector<int32_t> experts = of_expert_0(9);
  experts.push_back(kExperts);
  first->prepare(experts);
  second.prepare(of_expert_0(13));
  first.reset();
  expect(NVTE_EP_STATUS_INVALID_ARGUMENT, 1, 1, 0);
  expect(NVTE_EP_STATUS_OVERFLOW, 1, 1, 12);
  expect(NVTE_EP_STATUS_OVERFLOW, 2, 5, 16);
  expect_nothing();
}

TEST_F(Findings, OverflowIsNoneWhereItIsToDrop) {
  member_.settings.drop_on_overflow = true;
  CountingHandle handle(&member_, 7);
  handle.prepare(of_expert_0(23));
  expect_nothing();
}

}  // namespace
}  // namespace nvte_ep
