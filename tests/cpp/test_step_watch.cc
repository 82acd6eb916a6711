// The clock of exchanges that may never end, over a device that gets exactly as far as a test says.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "backends/host_backend.h"
#include "transports/step_watch.h"

namespace nvte_ep {
namespace {

// One stream. Marks have places on it, and the device has passed those up to `passed`.
class SlowDevice final : public HostBackend {
 public:
  SlowDevice() : HostBackend(1) {}

  Status create_mark(void** mark) override {
    marks_.push_back(std::make_unique<int64_t>(0));
    *mark = marks_.back().get();
    return Status();
  }
  void destroy_mark(void* mark) override { destroyed += mark != nullptr; }
  Status set_mark(void* mark, nvte_ep_stream_t) override {
    while (is_full) std::this_thread::yield();
    if (refuses) return Status(NVTE_EP_STATUS_CUDA, "refused");
    *static_cast<int64_t*>(mark) = ++enqueued;
    return Status();
  }
  Status mark_passed(void* mark, bool* is_passed) override {
    *is_passed = *static_cast<int64_t*>(mark) <= passed;
    return Status();
  }
  Status is_capturing(nvte_ep_stream_t, bool* is) override {
    *is = capturing;
    return Status();
  }

  int64_t created() const { return static_cast<int64_t>(marks_.size()); }

  std::atomic<int64_t> enqueued{0};
  std::atomic<int64_t> passed{0};
  int64_t destroyed = 0;
  bool capturing = false;
  bool refuses = false;
  std::atomic<bool> is_full{false};  // takes no more work

 private:
  std::vector<std::unique_ptr<int64_t>> marks_;
};

constexpr std::chrono::milliseconds kTimeout(40);

class StepWatchTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(watch_.open().ok()); }

  // Its first mark is one further on the stream, its second two.
  void step() {
    ASSERT_TRUE(watch_.step(nullptr, [] { return Status(); }).ok());
  }
  int32_t seen() { return watch_.check().code(); }
  static void wait() { std::this_thread::sleep_for(kTimeout + std::chrono::milliseconds(10)); }

  SlowDevice device_;
  StepWatch watch_{&device_, std::chrono::nanoseconds(kTimeout).count(), true};
};

TEST_F(StepWatchTest, StepThatHasBegunAndDoesNotEndIsFoundOnceItsTimeIsOver) {
  step();
  device_.passed = 1;
  EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
  wait();
  EXPECT_EQ(seen(), NVTE_EP_STATUS_TIMEOUT);
  EXPECT_TRUE(watch_.pending());
}

TEST_F(StepWatchTest, TimeBeforeAStepBeginsDoesNotCount) {
  step();
  EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
  wait();
  EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);  // the device is busy with something else
  device_.passed = 1;
  EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
  device_.passed = 2;
  wait();
  EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
  EXPECT_FALSE(watch_.pending());
}

TEST_F(StepWatchTest, ManyStepsThatEndAreNotAFailure) {
  for (int turn = 0; turn < 8; ++turn) {
    step();
    step();
    step();
    device_.passed = device_.enqueued.load() - 1;
    EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
    std::this_thread::sleep_for(kTimeout / 4);  // together longer than one may take
    device_.passed = device_.enqueued.load();
    EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
    EXPECT_FALSE(watch_.pending());
  }
}

TEST_F(StepWatchTest, StepBehindOthersThatNobodyLookedAtIsFoundAsTheNewest) {
  for (int i = 0; i < 5; ++i) step();
  device_.passed = 9;  // the fifth has begun
  EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
  wait();
  EXPECT_EQ(seen(), NVTE_EP_STATUS_TIMEOUT);
}

TEST_F(StepWatchTest, StepsBehindOneThatNeverEndsDoNotHideIt) {
  step();
  device_.passed = 1;
  EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
  for (int i = 0; i < 5; ++i) step();
  wait();
  step();
  EXPECT_EQ(seen(), NVTE_EP_STATUS_TIMEOUT);
}

TEST_F(StepWatchTest, CapturedStepLeavesNoTrace) {
  device_.capturing = true;
  step();
  EXPECT_EQ(device_.enqueued, 0);
  EXPECT_FALSE(watch_.pending());
}

TEST_F(StepWatchTest, StepThatCannotBeginIsNotPending) {
  device_.refuses = true;
  EXPECT_EQ(watch_.step(nullptr, [] { return Status(); }).code(), NVTE_EP_STATUS_CUDA);
  EXPECT_FALSE(watch_.pending());
}

TEST_F(StepWatchTest, StepThatIsBeingEnqueuedIsPending) {
  const Status enqueued = watch_.step(nullptr, [&] {
    device_.passed = 1;
    EXPECT_TRUE(watch_.pending());
    return Status();
  });
  ASSERT_TRUE(enqueued.ok());
  device_.passed = 2;
  EXPECT_FALSE(watch_.pending());
}

TEST_F(StepWatchTest, CallThatDoesNotComeBackIsFound) {
  const Status enqueued = watch_.step(nullptr, [&] {
    EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
    wait();
    EXPECT_EQ(seen(), NVTE_EP_STATUS_TIMEOUT);
    return Status();
  });
  ASSERT_TRUE(enqueued.ok());
  device_.passed = 2;
  EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
}

TEST_F(StepWatchTest, NobodyWhoLooksWaitsForADeviceThatTakesNoMoreWork) {
  for (const bool from_the_start : {true, false}) {
    device_.is_full = from_the_start;
    std::atomic<bool> inside{false};
    std::thread owner([&] {
      (void)watch_.step(nullptr, [&] {
        device_.is_full = true;
        inside = true;
        return Status();
      });
    });
    while (!from_the_start && !inside) std::this_thread::yield();
    wait();
    EXPECT_EQ(seen(), NVTE_EP_STATUS_TIMEOUT);
    EXPECT_TRUE(watch_.pending());
    device_.is_full = false;
    while (from_the_start && !inside) std::this_thread::yield();
    device_.is_full = false;
    owner.join();
    device_.passed = device_.enqueued.load();
    EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
  }
}

TEST(StepWatchOfCallsThatMayTakeLong, DoesNotTimeThem) {
  SlowDevice device;
  StepWatch watch(&device, 1, false);
  ASSERT_TRUE(watch.open().ok());
  const Status enqueued = watch.step(nullptr, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_TRUE(watch.check().ok());
    return Status();
  });
  EXPECT_TRUE(enqueued.ok());
}

TEST_F(StepWatchTest, StepThatIsRefusedIsWatchedForWhatItEnqueued) {
  EXPECT_EQ(watch_.step(nullptr, [] { return invalid_argument("no"); }).code(),
            NVTE_EP_STATUS_INVALID_ARGUMENT);
  EXPECT_TRUE(watch_.pending());
  device_.passed = 1;
  EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
  wait();
  EXPECT_EQ(seen(), NVTE_EP_STATUS_TIMEOUT);
  device_.passed = 2;
  EXPECT_FALSE(watch_.pending());
  EXPECT_EQ(seen(), NVTE_EP_STATUS_OK);
}

TEST(StepWatchLife, MarksAreGivenBack) {
  SlowDevice device;
  {
    StepWatch watch(&device, 1, true);
    ASSERT_TRUE(watch.open().ok());
  }
  EXPECT_GT(device.created(), 0);
  EXPECT_EQ(device.destroyed, device.created());
}

}  // namespace
}  // namespace nvte_ep
