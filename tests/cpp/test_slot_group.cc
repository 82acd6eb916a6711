// Groups whose engine moves rows between tokens and slots by itself: what of a step is the engine's, and what is not. The device
// is the host backend, the engine notes what it is asked for.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "backends/host_backend.h"
#include "transports/device_exchange.h"

namespace nvte_ep {
namespace {

class Engine final : public SlotExchange {
 public:
  explicit Engine(std::vector<std::string>* asked) : asked_(asked) {}
  Status prepare(int64_t, int64_t, nvte_ep_stream_t) override { return note("prepare"); }
  Status dispatch(const DispatchCall&, const RoutingView&, nvte_ep_stream_t) override {
    return note("dispatch");
  }
  Status return_rows(const ReturnRows& call, nvte_ep_stream_t) override {
    return note(call.backward ? "dispatch_backward" : "combine");
  }

 private:
  Status note(const char* what) {
    asked_->push_back(what);
    return Status();
  }
  std::vector<std::string>* const asked_;
};

class Ranks final : public RoutingRanks {
 public:
  Ranks(int32_t size, int32_t experts, std::vector<std::string>* asked)
      : size_(size), kept_(experts / size), asked_(asked) {}
  Status agree(const char*, const std::vector<Agreed>&, nvte_ep_stream_t) override { return Status(); }
  Status failure(int32_t* rank) override {
    *rank = -1;
    return Status();
  }
  void abort(const std::string&) override {}
  void close() override {}
  // Every rank routes as this one does.
  Status gather(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t) override {
    for (int32_t r = 0; r < size_; ++r)
      std::memcpy(static_cast<uint8_t*>(all) + r * bytes, mine, static_cast<size_t>(bytes));
    return Status();
  }
  Status wait(const char*, nvte_ep_stream_t) override { return Status(); }
  Status open_slots(const HandleSettings&, const Route&, std::unique_ptr<SlotExchange>* slots) override {
    *slots = std::make_unique<Engine>(asked_);
    return Status();
  }
  int32_t kept_experts() const override { return kept_; }

 private:
  const int32_t size_, kept_;
  std::vector<std::string>* const asked_;
};

// Memory is zero at first, as on a device.
class ZeroedHost final : public HostBackend {
 public:
  ZeroedHost() : HostBackend(1) {}
  Status allocate(int64_t bytes, void** pointer) override {
    NVTE_EP_TRY(HostBackend::allocate(bytes, pointer));
    if (bytes > 0) std::memset(*pointer, 0, static_cast<size_t>(bytes));
    return Status();
  }
};

template <typename T>
TensorView view(std::vector<T>* values, DType dtype, int64_t rows, int64_t columns) {
  return TensorView{values->data(), dtype, Device(), 2, {rows, columns}, columns};
}

constexpr int64_t kHidden = 8, kTokens = 3;
constexpr int32_t kExperts = 4, kTopK = 2;

struct SlotGroup : ::testing::Test {
  void make(int32_t size, int32_t num_sms = 0, int64_t capacity = 16) {
    GroupSettings s;
    s.num_experts = kExperts;
    s.max_top_k = kTopK;
    s.hidden = kHidden;
    s.max_tokens_per_rank = 5;
    s.recv_capacity = capacity;
    s.num_sms = num_sms;
    s.timeout_ns = 1'000'000'000;
    group = make_slot_group("slots", s, &device, 0, size, std::make_unique<Ranks>(size, kExperts, &asked));
    HandleSettings h;
    h.top_k = kTopK;
    h.alignment = 2;
    ASSERT_TRUE(group->create_handle(h, &handle).ok());
    PrepareCall prepare;
    prepare.topk_idx = view(&topk, DType::kInt32, kTokens, kTopK);
    const Status prepared = handle->prepare(prepare, nullptr);
    ASSERT_TRUE(prepared.ok()) << prepared.message();
    slots = handle->routing().slots;
    rows.assign(static_cast<size_t>(slots * kHidden), 0.0f);
    for (int64_t s = 0; s < slots; ++s) {
      for (int64_t h = 0; h < kHidden; ++h)
        rows[static_cast<size_t>(s * kHidden + h)] = static_cast<float>(100 * s + h);
    }
    slot_values.resize(static_cast<size_t>(slots));
    for (int64_t s = 0; s < slots; ++s) slot_values[static_cast<size_t>(s)] = static_cast<float>(s + 1);
    asked.clear();
  }
  ReturnRows sums() {
    ReturnRows call;
    call.format = NVTE_EP_FORMAT_BF16;
    call.slots = view(&rows, DType::kFloat32, slots, kHidden);
    call.result = view(&result, DType::kFloat32, kTokens, kHidden);
    return call;
  }

  ZeroedHost device;
  std::vector<std::string> asked;
  std::unique_ptr<GroupTransport> group;
  std::unique_ptr<HandleTransport> handle;
  // Slabs of 2, 2, 2 and no slots: token 0 has slots 0 and 2, token 1 slot 3, token 2 slots 1 and 4.
  std::vector<int32_t> topk{0, 1, 1, -1, 2, 0};
  int64_t slots = 0;
  std::vector<float> rows, slot_values, result = std::vector<float>(kTokens * kHidden, 0.5f),
                                        scalars = std::vector<float>(kTokens * kTopK, -1.0f);
};

class Alone : public SlotGroup, public ::testing::WithParamInterface<int64_t> {};
INSTANTIATE_TEST_SUITE_P(FixedAndEager, Alone, ::testing::Values(16, 0));

TEST_P(Alone, SumsDoNotGoThroughTheEngine) {
  make(1, 0, GetParam());
  ReturnRows call = sums();
  call.accumulate = true;
  call.slot_weights = slot_values.data();
  ASSERT_TRUE(handle->return_rows(call, nullptr).ok());
  for (int h = 0; h < kHidden; ++h) {
    const float x = static_cast<float>(h);
    EXPECT_EQ(result[static_cast<size_t>(h)], 0.5f + 1 * x + 3 * (200 + x));
    EXPECT_EQ(result[static_cast<size_t>(kHidden + h)], 0.5f + 4 * (300 + x));
    EXPECT_EQ(result[static_cast<size_t>(2 * kHidden + h)], 0.5f + 5 * (400 + x) + 2 * (100 + x));
  }
  call = sums();
  call.backward = true;
  call.slot_scalars = slot_values.data();
  call.scalars = view(&scalars, DType::kFloat32, kTokens, kTopK);
  call.wants_scalars = true;
  ASSERT_TRUE(handle->return_rows(call, nullptr).ok());
  EXPECT_EQ(result[0], 0.0f + 200.0f);
  EXPECT_EQ(scalars, (std::vector<float>{1, 3, 4, 0, 5, 2}));
  EXPECT_TRUE(asked.empty()) << asked.front();
}

TEST_F(SlotGroup, SumsOfARankAloneAreTheEnginesWhereMultiprocessorsAreBounded) {
  make(1, 24);
  ASSERT_TRUE(handle->return_rows(sums(), nullptr).ok());
  EXPECT_EQ(asked, std::vector<std::string>{"combine"});
}

TEST_F(SlotGroup, SumsOfSeveralRanksAreTheEngines) {
  make(2);
  ReturnRows call = sums();
  ASSERT_TRUE(handle->return_rows(call, nullptr).ok());
  call.backward = true;
  ASSERT_TRUE(handle->return_rows(call, nullptr).ok());
  EXPECT_EQ(asked, (std::vector<std::string>{"combine", "dispatch_backward"}));
}

TEST_F(SlotGroup, GradientsOfWeightsNeedThoseOfThisRanksSlots) {
  for (const int32_t size : {1, 2}) {
    make(size);
    ReturnRows call = sums();
    call.backward = true;
    call.scalars = view(&scalars, DType::kFloat32, kTokens, kTopK);
    call.wants_scalars = true;
    const Status refused = handle->return_rows(call, nullptr);
    EXPECT_EQ(refused.code(), NVTE_EP_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(refused.message().rfind("grad_recv_weights: expected", 0), size_t{0}) << refused.message();
    EXPECT_TRUE(asked.empty());
    handle.reset();
    group.reset();
  }
}

}  // namespace
}  // namespace nvte_ep
