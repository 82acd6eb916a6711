// Who may end an NCCL communicator, and when: over an NCCL that counts, and whose calls last as long as a test says.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "backends/host_backend.h"
#include "transports/nccl.h"
#include "transports/nccl_group_comm.h"

namespace nvte_ep {

struct nccl::CommStruct {
  int aborted = 0;
  int destroyed = 0;
};

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// One for a test at a time.
struct FakeNccl {
  std::mutex mutex;
  std::condition_variable changed;
  bool hold = false;             // calls stay inside, until this is false or their communicator is aborted
  bool inside = false;           // one does
  nccl::Result result = 0;       // of calls
  nccl::Result async_error = 0;  // of every communicator
  nccl::Result of_split = 0;
  int in_progress = 0;  // so many times yet that is the answer to how a communicator does
  bool loses = false;   // what is gathered does not come
  nccl::CommStruct base;
  nccl::CommStruct split;  // of base
  int ended_under_a_call = 0;

  static FakeNccl* current;
};
FakeNccl* FakeNccl::current = nullptr;

nccl::Api fake_api() {
  nccl::Api api{};
  api.ncclCommSplit = [](nccl::Comm, int, int, nccl::Comm* fresh, void*) {
    *fresh = &FakeNccl::current->split;
    return FakeNccl::current->of_split;
  };
  api.ncclCommDestroy = [](nccl::Comm comm) {
    ++comm->destroyed;
    return 0;
  };
  api.ncclCommAbort = [](nccl::Comm comm) {
    FakeNccl& fake = *FakeNccl::current;
    const std::lock_guard<std::mutex> lock(fake.mutex);
    ++comm->aborted;
    fake.ended_under_a_call += fake.inside;
    fake.changed.notify_all();
    return 0;
  };
  api.ncclCommGetAsyncError = [](nccl::Comm, nccl::Result* error) {
    FakeNccl& fake = *FakeNccl::current;
    *error = fake.in_progress > 0 ? nccl::kInProgress : fake.async_error;
    fake.in_progress -= fake.in_progress > 0;
    return 0;
  };
  api.ncclGetErrorString = [](nccl::Result) { return "an error"; };
  api.ncclGetLastError = [](nccl::Comm) { return ""; };
  // Of groups of one rank.
  api.ncclAllGather = [](const void* mine, void* all, size_t bytes, nccl::DataType, nccl::Comm comm,
                         nvte_ep_stream_t) {
    FakeNccl& fake = *FakeNccl::current;
    std::unique_lock<std::mutex> lock(fake.mutex);
    fake.inside = true;
    fake.changed.notify_all();
    fake.changed.wait(lock, [&] { return !fake.hold || comm->aborted > 0; });
    fake.inside = false;
    if (bytes > 0 && !fake.loses) std::memcpy(all, mine, bytes);
    if (bytes > 0 && fake.loses) std::memset(all, 0, bytes);
    fake.changed.notify_all();
    return fake.result;
  };
  return api;
}

// What was enqueued is done at once, or never.
class Device final : public HostBackend {
 public:
  Device() : HostBackend(1) {}
  Status is_idle(nvte_ep_stream_t, bool* idle) override {
    *idle = !hangs;
    return Status();
  }
  Status mark_passed(void*, bool* passed) override {
    *passed = !hangs;
    return Status();
  }
  void abandon() override { ++abandoned; }

  std::atomic<bool> hangs{false};
  std::atomic<int> abandoned{0};
};

class NcclGroupCommTest : public ::testing::Test {
 protected:
  NcclGroupCommTest() { FakeNccl::current = &fake_; }

  // abort_ends_kernels as NcclGroupComm has it.
  std::unique_ptr<NcclGroupComm> make_group(bool abort_ends_kernels = true) {
    auto group = std::make_unique<NcclGroupComm>(api_, &device_, 0, 1, kTimeout.count(), abort_ends_kernels);
    GroupSettings settings;
    const Status opened = group->open(&base_, settings, NVTE_EP_TRANSPORT_NCCL);
    EXPECT_TRUE(opened.ok()) << opened.message();
    return group;
  }
  Status step(NcclGroupComm* group) {
    return group->watch().step(nullptr, [&] { return group->gather(nullptr, nullptr, 0, nullptr); });
  }
  void wait_until_inside() {
    std::unique_lock<std::mutex> lock(fake_.mutex);
    fake_.changed.wait(lock, [&] { return fake_.inside; });
  }
  void let_go() {
    const std::lock_guard<std::mutex> lock(fake_.mutex);
    fake_.hold = false;
    fake_.changed.notify_all();
  }

  static constexpr std::chrono::nanoseconds kTimeout = milliseconds(50);
  FakeNccl fake_;
  Device device_;
  const nccl::Api api_ = fake_api();
  NcclCommunicator base_{api_, &fake_.base, 0, 2, 0};
};

TEST_F(NcclGroupCommTest, IsOnTheDeviceOfItsCommunicator) {
  const NcclCommunicator other(api_, nullptr, 0, 1, 3);
  EXPECT_EQ(other.check_usable(nvte_ep::Device{NVTE_EP_DEVICE_CUDA, 1}).message(),
            "config.device_id: expected 3, the communicator's device, got 1");
  EXPECT_TRUE(base_.check_usable(nvte_ep::Device{NVTE_EP_DEVICE_CUDA, 0}).ok());
}

TEST_F(NcclGroupCommTest, ACommunicatorThatDoesNotBlockIsRefused) {
  fake_.of_split = nccl::kInProgress;
  fake_.in_progress = 3;
  nccl::Comm fresh = nullptr;
  const Status refused = nccl::split(api_, &fake_.base, 0, &fresh);
  EXPECT_EQ(refused.code(), NVTE_EP_STATUS_INVALID_ARGUMENT);
  EXPECT_NE(refused.message().find("nccl_comm: expected a communicator whose calls block"),
            std::string::npos);
  EXPECT_EQ(fresh, nullptr);
  EXPECT_EQ(fake_.in_progress, 0);
  EXPECT_EQ(fake_.split.aborted, 1) << "what was split off is gone";
  EXPECT_EQ(fake_.base.aborted + fake_.base.destroyed, 0);
}

TEST_F(NcclGroupCommTest, ACallThatIsStillInProgressHasFailed) {
  const auto group = make_group();
  fake_.result = nccl::kInProgress;
  EXPECT_EQ(step(group.get()).code(), NVTE_EP_STATUS_TRANSPORT);
}

TEST_F(NcclGroupCommTest, WhatDidNotComeIsNotTakenForZeros) {
  const auto group = make_group();
  fake_.loses = true;
  const Status lost = group->agree("prepare", {{"top_k", 0}}, nullptr);
  EXPECT_EQ(lost.message(), "prepare: NCCL has ended, and nothing came from rank 0");
}

TEST_F(NcclGroupCommTest, AReasonIsToldWhole) {
  const auto group = make_group();
  for (const size_t length : {size_t{700}, size_t{1019}, size_t{1020}, size_t{4000}}) {
    const Status mine(NVTE_EP_STATUS_UNSUPPORTED, std::string(length - 3, 'x') + "end");
    const Status told = group->settle("group_create", mine, nullptr);
    EXPECT_EQ(told.code(), mine.code());
    EXPECT_EQ(told.message(), "rank 0: " + (length < 1020 ? mine.message() : std::string(1016, 'x') + "..."));
  }
}

TEST_F(NcclGroupCommTest, AGroupThatWorkedIsDestroyedAndItsBaseLivesOn) {
  make_group();
  EXPECT_EQ(fake_.split.destroyed, 1);
  EXPECT_EQ(fake_.split.aborted + fake_.base.destroyed + fake_.base.aborted, 0);
  EXPECT_TRUE(base_.check_usable().ok());
}

TEST_F(NcclGroupCommTest, PollErrorDoesNotEndTheCommunicatorUnderACall) {
  const auto group = make_group();
  fake_.hold = true;
  Status stepped;
  std::thread owner([&] { stepped = step(group.get()); });
  wait_until_inside();
  fake_.async_error = 6;
  const auto start = Clock::now();
  EXPECT_EQ(group->check_watch().code(), NVTE_EP_STATUS_PEER_FAILED);
  EXPECT_EQ(group->check_watch().code(), NVTE_EP_STATUS_PEER_FAILED);
  EXPECT_LT(Clock::now() - start, milliseconds(100)) << "it never blocks";
  EXPECT_EQ(fake_.split.aborted, 0);
  let_go();
  owner.join();
  EXPECT_EQ(stepped.code(), NVTE_EP_STATUS_PEER_FAILED);
  EXPECT_EQ(fake_.split.aborted, 1);
  EXPECT_EQ(fake_.ended_under_a_call, 0);
  EXPECT_EQ(step(group.get()).code(), NVTE_EP_STATUS_PEER_FAILED) << "nothing is called any more";
}

TEST_F(NcclGroupCommTest, PollErrorEndsTheCommunicatorThatNobodyUses) {
  const auto group = make_group();
  fake_.async_error = 6;
  EXPECT_EQ(group->check_watch().code(), NVTE_EP_STATUS_PEER_FAILED);
  EXPECT_EQ(fake_.split.aborted, 1);
  EXPECT_EQ(step(group.get()).code(), NVTE_EP_STATUS_PEER_FAILED);
}

TEST_F(NcclGroupCommTest, AnAbortEndsACallThatWaitsForAPeerInside) {
  const auto group = make_group();
  fake_.hold = true;
  Status stepped;
  std::thread owner([&] { stepped = step(group.get()); });
  wait_until_inside();
  group->abort("rank 0 aborted the group");
  owner.join();
  EXPECT_EQ(stepped.code(), NVTE_EP_STATUS_PEER_FAILED);
  EXPECT_EQ(fake_.split.aborted, 1);
}

TEST_F(NcclGroupCommTest, ManyThreadsPollAndAbortWhileCallsGoOn) {
  for (int round = 0; round < 20; ++round) {
    fake_.split = nccl::CommStruct();
    const auto group = make_group();
    std::atomic<bool> done{false};
    std::thread poller([&] {
      while (!done) (void)group->check_watch();
    });
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
      group->abort("rank 0 aborted the group");
    });
    while (step(group.get()).ok()) std::this_thread::yield();
    aborter.join();
    done = true;
    poller.join();
    EXPECT_EQ(fake_.split.aborted, 1);
    EXPECT_EQ(fake_.ended_under_a_call, 0);
  }
}

TEST_F(NcclGroupCommTest, ARefusedCallIsNoStepInFlight) {
  const auto group = make_group(false);
  fake_.result = 5;
  EXPECT_EQ(step(group.get()).code(), NVTE_EP_STATUS_TRANSPORT);
  fake_.result = 0;
  EXPECT_FALSE(group->watch().pending());
  EXPECT_TRUE(step(group.get()).ok());
  group->abort("rank 0 aborted the group");
  EXPECT_FALSE(group->is_stuck());
  EXPECT_EQ(device_.abandoned, 0) << "memory is given back";
  EXPECT_EQ(fake_.split.aborted, 1);
}

TEST_F(NcclGroupCommTest, KernelsThatNothingEndsKeepTheirCommunicator) {
  const auto group = make_group(false);
  device_.hangs = true;
  EXPECT_TRUE(step(group.get()).ok());
  group->abort("rank 0 aborted the group");
  EXPECT_TRUE(group->is_stuck());
  EXPECT_EQ(device_.abandoned, 1);
  EXPECT_EQ(fake_.split.aborted + fake_.split.destroyed, 0);
}

TEST_F(NcclGroupCommTest, AFailureOfAllPeersThereKeepsNoMemory) {
  const auto group = make_group(false);
  device_.hangs = true;
  EXPECT_TRUE(step(group.get()).ok());
  EXPECT_EQ(group->fail(NVTE_EP_STATUS_TRANSPORT, "other rows", /*lost_peer=*/false).code(),
            NVTE_EP_STATUS_TRANSPORT);
  EXPECT_EQ(device_.abandoned, 0);
  EXPECT_EQ(step(group.get()).code(), NVTE_EP_STATUS_TRANSPORT);
}

TEST_F(NcclGroupCommTest, ATimeoutEndsTheGroupsOwnCommunicatorAlone) {
  const auto group = make_group();
  device_.hangs = true;
  EXPECT_EQ(group->agree("prepare", {}, nullptr).code(), NVTE_EP_STATUS_TIMEOUT);
  EXPECT_EQ(fake_.split.aborted, 1);
  EXPECT_EQ(fake_.base.aborted + fake_.base.destroyed, 0);
  EXPECT_TRUE(base_.check_usable().ok());
}

TEST_F(NcclGroupCommTest, AStreamThatIsIdleByAnAbortHasNotGotWhatItWaitedFor) {
  const auto group = make_group();
  EXPECT_TRUE(group->wait("prepare", nullptr).ok());
  group->abort("rank 0 aborted the group");
  EXPECT_EQ(group->wait("prepare", nullptr).code(), NVTE_EP_STATUS_PEER_FAILED);
}

TEST_F(NcclGroupCommTest, ACallThatStaysInsideForTooLongIsATimeout) {
  const auto group = make_group();
  fake_.hold = true;
  Status stepped;
  std::thread owner([&] { stepped = step(group.get()); });
  wait_until_inside();
  EXPECT_TRUE(group->check_watch().ok());
  std::this_thread::sleep_for(kTimeout + milliseconds(10));
  EXPECT_EQ(group->check_watch().code(), NVTE_EP_STATUS_TIMEOUT);
  group->abort("rank 0 aborted the group");
  owner.join();
  EXPECT_EQ(stepped.code(), NVTE_EP_STATUS_TIMEOUT);
}

TEST_F(NcclGroupCommTest, MeetingsThatAreInVainEndTheCommunicatorThatHasNoGroups) {
  EXPECT_EQ(base_.meeting_point(), &fake_.base);
  base_.end_meetings();
  EXPECT_EQ(fake_.base.aborted, 1);
  EXPECT_EQ(base_.meeting_point(), nullptr);
  EXPECT_EQ(base_.check_usable().code(), NVTE_EP_STATUS_BAD_STATE);
}

TEST_F(NcclGroupCommTest, MeetingsThatAreInVainTakeNothingFromTheGroupsThatLive) {
  ASSERT_TRUE(base_.meet_apart(&device_).ok());
  ASSERT_TRUE(base_.meet_apart(&device_).ok()) << "once is enough";
  EXPECT_EQ(base_.meeting_point(), &fake_.split);
  base_.end_meetings();
  EXPECT_EQ(fake_.split.aborted, 1);
  EXPECT_EQ(fake_.base.aborted, 0);
  EXPECT_EQ(base_.comm(), &fake_.base);
  EXPECT_EQ(base_.meeting_point(), nullptr);
  EXPECT_EQ(base_.check_usable().code(), NVTE_EP_STATUS_BAD_STATE) << "no further group";
}

TEST(NcclCommunicatorLife, EveryCommunicatorIsGivenBackOnce) {
  for (const bool lost : {false, true}) {
    FakeNccl fake;
    FakeNccl::current = &fake;
    Device device;
    const nccl::Api api = fake_api();
    {
      NcclCommunicator comm(api, &fake.base, 0, 2, 0);
      ASSERT_TRUE(comm.meet_apart(&device).ok());
      if (lost) comm.expect_lost_peer();
    }
    for (const nccl::CommStruct* each : {&fake.base, &fake.split}) {
      EXPECT_EQ(each->aborted, lost ? 1 : 0);
      EXPECT_EQ(each->destroyed, lost ? 0 : 1);
    }
  }
}

}  // namespace
}  // namespace nvte_ep
