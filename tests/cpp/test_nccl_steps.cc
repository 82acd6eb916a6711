// The steps of `nccl` on host memory, over an NCCL between threads: the same bytes as `threads`.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "backends/host_backend.h"
#include "in_process_nccl.h"
#include "transports/nccl.h"
#include "transports/threads.h"

namespace nvte_ep::testing {
namespace {

// Memory is zero at first, as on a device.
class ZeroedHost final : public HostBackend {
 public:
  ZeroedHost() : HostBackend(1) {}
  Status preload() override {
    const bool last = ++preloads == failing_preload;
    return last ? Status(NVTE_EP_STATUS_OUT_OF_MEMORY, "no memory for kernels") : Status();
  }
  int failing_preload = -1;  // the n-th
  std::atomic<int> preloads{0};
  Status allocate(int64_t bytes, void** pointer) override {
    NVTE_EP_TRY(HostBackend::allocate(bytes, pointer));
    if (bytes > 0) std::memset(*pointer, 0, static_cast<size_t>(bytes));
    return Status();
  }
};

struct Shape {
  const char* name;
  std::vector<int64_t> tokens;  // of each rank
  int64_t hidden = 32;
  int32_t experts = 12, top_k = 3;
  int64_t capacity = 0;  // 0: eager
  int64_t max_tokens = 0;
  int32_t ranks() const { return static_cast<int32_t>(tokens.size()); }
  int64_t room() const { return std::max(max_tokens, *std::max_element(tokens.begin(), tokens.end())); }
};

// All that a rank got, in the order in which it got it.
using Results = std::vector<std::vector<uint8_t>>;

template <typename T>
std::vector<uint8_t> bytes_of(const std::vector<T>& values, int64_t count = -1) {
  const size_t size = (count < 0 ? values.size() : static_cast<size_t>(count)) * sizeof(T);
  std::vector<uint8_t> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), values.data(), size);
  return bytes;
}

template <typename T>
TensorView view(std::vector<T>* values, DType dtype, int64_t rows, int64_t columns) {
  return TensorView{values->data(), dtype, Device(), 2, {rows, columns}, columns};
}
template <typename T>
TensorView view(std::vector<T>* values, DType dtype) {
  const int64_t size = static_cast<int64_t>(values->size());
  return TensorView{values->data(), dtype, Device(), 1, {size, 1}, 1};
}

void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

// One rank's calls: small whole numbers, whose sums are the same in any order.
Results run_rank(GroupTransport* group, const Shape& shape, int32_t rank) {
  Results results;
  std::unique_ptr<HandleTransport> handle;
  HandleSettings settings;
  settings.top_k = shape.top_k;
  settings.alignment = 4;
  settings.dispatch = settings.combine = settings.dispatch_backward = settings.combine_backward =
      NVTE_EP_FORMAT_BF16;
  require(group->create_handle(settings, &handle));
  for (int turn = 0; turn < 2; ++turn) {  // the second with fewer tokens
    std::mt19937_64 rng(static_cast<uint64_t>(100 * turn + rank));
    const auto small = [&] { return static_cast<float>(static_cast<int>(rng() % 15) - 7); };
    const int64_t tokens = shape.tokens[static_cast<size_t>(rank)] / (turn + 1);
    std::vector<int32_t> topk;
    std::vector<int32_t> experts(static_cast<size_t>(shape.experts));
    std::iota(experts.begin(), experts.end(), 0);
    for (int64_t t = 0; t < tokens; ++t) {
      std::shuffle(experts.begin(), experts.end(), rng);
      for (int32_t k = 0; k < shape.top_k; ++k) topk.push_back(rng() % 5 == 0 ? -1 : experts[k]);
    }
    int64_t total_host = -1;
    std::vector<int64_t> total(1), tokens_per_expert(static_cast<size_t>(shape.experts / shape.ranks()));
    PrepareCall prepare;
    prepare.topk_idx = view(&topk, DType::kInt32, tokens, shape.top_k);
    prepare.total_rows = view(&total, DType::kInt64);
    prepare.tokens_per_expert = view(&tokens_per_expert, DType::kInt64);
    prepare.total_rows_host = &total_host;
    require(handle->prepare(prepare, nullptr));
    const int64_t slots = handle->routing().slots;
    results.push_back(bytes_of(total));
    results.push_back(bytes_of(tokens_per_expert));

    SendRows send;
    const int64_t row_bytes = shape.hidden * 2;
    std::vector<uint8_t> rows(static_cast<size_t>(tokens * row_bytes)),
        received(static_cast<size_t>(slots * row_bytes), 0xDD);
    const size_t seed = rng();
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<uint8_t>(seed + i * 37 + i / 251);
    std::vector<float> weights(static_cast<size_t>(tokens * shape.top_k)),
        recv_weights(static_cast<size_t>(slots), -1.0f);
    for (float& w : weights) w = small();
    send.rows = rows.data();
    send.row_stride = send.row_bytes = row_bytes;
    send.readable_rows = tokens;
    send.format = NVTE_EP_FORMAT_BF16;
    send.weights = view(&weights, DType::kFloat32, tokens, shape.top_k);
    send.gives_weights = true;
    send.out = received.data();
    send.out_stride = row_bytes;
    send.out_weights = recv_weights.data();
    require(handle->send_rows(send, nullptr));
    results.push_back(received);
    results.push_back(bytes_of(recv_weights));
    std::fill(received.begin(), received.end(), uint8_t{0xCC});
    send.backward = true;
    send.weights = TensorView();
    send.gives_weights = false;
    send.out_weights = nullptr;
    require(handle->send_rows(send, nullptr));
    results.push_back(received);

    std::vector<float> at_slots(static_cast<size_t>(slots * shape.hidden)),
        slot_weights(static_cast<size_t>(slots)), result(static_cast<size_t>(tokens * shape.hidden)),
        scalars(static_cast<size_t>(tokens * shape.top_k), -1.0f);
    for (size_t i = 0; i < at_slots.size(); ++i) at_slots[i] = static_cast<float>(i % 13) - 6;
    for (float& x : slot_weights) x = small();
    for (size_t i = 0; i < result.size(); ++i) result[i] = static_cast<float>(i % 11) - 5;
    ReturnRows back;
    back.slots = view(&at_slots, DType::kFloat32, slots, shape.hidden);
    back.slot_weights = slot_weights.data();
    back.format = NVTE_EP_FORMAT_BF16;
    back.result = view(&result, DType::kFloat32, tokens, shape.hidden);
    back.accumulate = true;
    require(handle->return_rows(back, nullptr));
    results.push_back(bytes_of(result));
    back.backward = true;
    back.accumulate = false;
    back.slot_weights = nullptr;
    back.slot_scalars = slot_weights.data();
    back.scalars = view(&scalars, DType::kFloat32, tokens, shape.top_k);
    back.wants_scalars = tokens > 0;
    require(handle->return_rows(back, nullptr));
    results.push_back(bytes_of(result));
    results.push_back(bytes_of(scalars));
  }
  return results;
}

using MakeGroup = std::function<Status(int32_t rank, const GroupSettings&, std::unique_ptr<GroupTransport>*)>;

GroupSettings settings_of(const Shape& shape) {
  GroupSettings settings;
  settings.num_experts = shape.experts;
  settings.max_top_k = shape.top_k;
  settings.hidden = shape.hidden;
  settings.max_tokens_per_rank = shape.room();
  settings.recv_capacity = shape.capacity;
  settings.timeout_ns = 20'000'000'000;
  settings.drop_on_overflow = true;
  return settings;
}

std::vector<Results> run_ranks(const Shape& shape, const MakeGroup& make) {
  std::vector<Results> results(shape.tokens.size());
  std::vector<std::string> failures(shape.tokens.size());
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < shape.ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      const size_t mine = static_cast<size_t>(rank);
      try {
        std::unique_ptr<GroupTransport> group;
        require(make(rank, settings_of(shape), &group));
        results[mine] = run_rank(group.get(), shape, rank);
      } catch (const std::exception& error) {
        failures[mine] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) EXPECT_EQ(failure, "");
  return results;
}

std::vector<Results> over_threads(const Shape& shape, Backend* backend) {
  uint8_t id[NVTE_EP_UNIQUE_ID_BYTES];
  thread_world_id(id);
  std::vector<std::unique_ptr<Communicator>> comms(shape.tokens.size());
  return run_ranks(shape,
                   [&](int32_t rank, const GroupSettings& settings, std::unique_ptr<GroupTransport>* group) {
                     std::unique_ptr<Communicator>& comm = comms[static_cast<size_t>(rank)];
                     NVTE_EP_TRY(create_thread_communicator(id, rank, shape.ranks(), &comm));
                     return create_threads(comm.get(), settings, backend, group);
                   });
}

// Of every rank of a world.
std::vector<std::unique_ptr<NcclCommunicator>> make_comms(const nccl::Api& api,
                                                          const std::shared_ptr<NcclWorld>& world) {
  std::vector<std::unique_ptr<NcclCommunicator>> comms;
  for (int32_t rank = 0; rank < world->size; ++rank) {
    comms.push_back(
        std::make_unique<NcclCommunicator>(api, new nccl::CommStruct{world, rank}, rank, world->size, 0));
  }
  return comms;
}

std::vector<Results> over_nccl(const Shape& shape, Backend* backend) {
  const nccl::Api api = in_process_nccl();
  const auto world = std::make_shared<NcclWorld>(shape.ranks());
  const auto comms = make_comms(api, world);
  return run_ranks(shape,
                   [&](int32_t rank, const GroupSettings& settings, std::unique_ptr<GroupTransport>* group) {
                     return create_nccl(comms[static_cast<size_t>(rank)].get(), settings, backend, group);
                   });
}

// A call of NCCL that connects ranks waits for them, and so does a kernel that is loaded behind one of NCCL's. No step may.
TEST(NcclGroup, IsConnectedAndHasItsKernelsWhenItIsMade) {
  for (const int64_t capacity : {0, 160}) {
    const Shape shape{"three", {1, 2, 3}, 32, 12, 3, capacity};
    ZeroedHost device;
    const nccl::Api api = in_process_nccl();
    const auto world = std::make_shared<NcclWorld>(shape.ranks());
    const auto comms = make_comms(api, world);
    std::atomic<size_t> most{0};
    run_ranks(
        shape, [&](int32_t rank, const GroupSettings& settings, std::unique_ptr<GroupTransport>* group) {
          const int before = device.preloads;
          const Status made = create_nccl(comms[static_cast<size_t>(rank)].get(), settings, &device, group);
          EXPECT_GT(device.preloads, before);
          const std::lock_guard<std::mutex> lock(world->mutex);
          NcclWorld& own = *world->splits.begin()->second;
          const std::lock_guard<std::mutex> lock_own(own.mutex);
          size_t here = 0;
          for (int32_t peer = 0; peer < shape.ranks(); ++peer) here += own.connected.count({rank, peer});
          EXPECT_EQ(here, static_cast<size_t>(shape.ranks() - 1)) << "rank " << rank;
          most = std::max(most.load(), own.connected.size());
          return made;
        });
    EXPECT_EQ(most, size_t{6});
  }
}

// What one rank lacks of its own is told to all, and nobody waits for it to connect.
TEST(NcclGroup, IsMadeByAllOrNone) {
  const Shape shape{"three", {1, 2, 3}};
  ZeroedHost device;
  device.failing_preload = 2;
  const nccl::Api api = in_process_nccl();
  const auto world = std::make_shared<NcclWorld>(shape.ranks());
  const auto comms = make_comms(api, world);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < shape.ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<GroupTransport> group;
      const Status made =
          create_nccl(comms[static_cast<size_t>(rank)].get(), settings_of(shape), &device, &group);
      EXPECT_EQ(made.code(), NVTE_EP_STATUS_OUT_OF_MEMORY) << made.message();
      EXPECT_NE(made.message().find("no memory for kernels"), std::string::npos) << made.message();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class NcclSteps : public ::testing::TestWithParam<Shape> {};

TEST_P(NcclSteps, AreThoseOfThreads) {
  const Shape& shape = GetParam();
  ZeroedHost device;
  const std::vector<Results> expected = over_threads(shape, &device), got = over_nccl(shape, &device);
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    ASSERT_EQ(got[rank].size(), expected[rank].size());
    for (size_t i = 0; i < expected[rank].size(); ++i) {
      EXPECT_TRUE(got[rank][i] == expected[rank][i]) << "rank " << rank << ", result " << i;
    }
  }
}

std::vector<Shape> shapes() {
  std::vector<Shape> all = {{"one_rank", {17}, 32, 12, 3, 96},
                            {"one_rank_eager", {17}},
                            {"two_ranks", {20, 13}, 32, 12, 3, 160},
                            {"two_ranks_eager", {20, 13}},
                            {"three_ranks", {5, 0, 31}, 48, 12, 3, 120},
                            {"three_ranks_eager", {5, 0, 31}, 48},
                            {"room_for_more", {20, 13}, 32, 12, 3, 160, 29},
                            {"some_dropped", {40, 33}, 32, 12, 3, 64},
                            {"nothing", {0, 0}, 32, 12, 3, 64}};
#ifndef __SANITIZE_THREAD__  // takes minutes of it, and shows no other threads
  // Enough bytes for two pieces.
  all.push_back({"two_pieces", {301, 760}, 16384, 4, 2, 1400});
  all.push_back({"two_pieces_of_three_ranks", {301, 0, 760}, 16384, 3, 1, 1000});
#endif
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, NcclSteps, ::testing::ValuesIn(shapes()),
                         [](const ::testing::TestParamInfo<Shape>& info) { return info.param.name; });

}  // namespace
}  // namespace nvte_ep::testing
