// What goes wrong between ranks: peers that never arrive, abort, leave, disagree or call something else; objects that are
// gone; memory that is not there. Whatever happens, every rank gets a status, in time, and the process lives.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "venues.h"

// Memory that is not there is what some tests ask for.
#if defined(__SANITIZE_ADDRESS__)
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}
#endif
#if defined(__SANITIZE_THREAD__)
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "allocator_may_return_null=1";
}
#endif

namespace {

using namespace ep_test;
using Clock = std::chrono::steady_clock;

class Failures : public ::testing::TestWithParam<Venue> {};
NVTE_EP_ON_THE_HOST(Failures);

constexpr int64_t kHidden = 32;
constexpr int64_t kTokens = 4;

// What a rank of these tests has: a group, a handle, and the arrays of one step. Every rank sends one token to each.
struct Member {
  Member(const Venue& venue, const Rank& rank, int64_t timeout_ns, int32_t format = NVTE_EP_FORMAT_BF16)
      : memory(*venue.memory) {
    nvte_ep_group_config_t config = group_config(rank.size, kHidden, kTokens, 16 * kTokens);
    config.transport = venue.transport;
    config.timeout_ns = timeout_ns;
    group = make_group(rank, config);
    handle = make_handle(group, handle_config(1, 16, format, format));
    std::vector<int64_t> experts;
    for (int64_t t = 0; t < kTokens; ++t) experts.push_back(t % rank.size);
    idx = Array(memory, Type::kInt64, {kTokens, 1}, bytes_of(experts));
    tokens = Array(memory, Type::kBFloat16, {kTokens, kHidden},
                   encode(Type::kBFloat16, std::vector<float>(kTokens * kHidden, 3.0f)));
    received = Array(memory, Type::kBFloat16, {16 * kTokens, kHidden});
    result = Array(memory, Type::kBFloat16, {kTokens, kHidden});
  }
  nvte_ep_status_t prepare() { return ep_test::prepare(handle, &idx); }
  nvte_ep_status_t dispatch() {
    nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
    args.tokens = tokens.tensor();
    args.receive = NVTE_EP_RECEIVE_DECODED;
    args.received = received.tensor();
    return nvte_ep_handle_dispatch(handle.get(), &args, nullptr);
  }
  nvte_ep_status_t combine() {
    nvte_ep_combine_args_t args = NVTE_EP_COMBINE_ARGS_INIT;
    args.expert_out = received.tensor();
    args.result = result.tensor();
    return nvte_ep_handle_combine(handle.get(), &args, nullptr);
  }
  nvte_ep_status_t dispatch_backward() {
    nvte_ep_dispatch_backward_args_t args = NVTE_EP_DISPATCH_BACKWARD_ARGS_INIT;
    args.grad_received = received.tensor();
    args.grad_tokens = result.tensor();
    return nvte_ep_handle_dispatch_backward(handle.get(), &args, nullptr);
  }
  nvte_ep_status_t combine_backward() {
    nvte_ep_dispatch_args_t send = NVTE_EP_DISPATCH_ARGS_INIT;
    send.tokens = tokens.tensor();
    send.receive = NVTE_EP_RECEIVE_DECODED;
    send.received = received.tensor();
    nvte_ep_combine_backward_args_t args = NVTE_EP_COMBINE_BACKWARD_ARGS_INIT;
    args.send = &send;
    return nvte_ep_handle_combine_backward(handle.get(), &args, nullptr);
  }
  nvte_ep_status_t mem_alloc() {
    void* pointer = nullptr;
    return nvte_ep_mem_alloc(group.get(), 256, &pointer);
  }
  // Forward and back; an identity layer gives the tokens again.
  void expect_works() {
    for (const Step& step : steps()) expect_status(NVTE_EP_STATUS_OK, (this->*step.run)(), {}, step.name);
    EXPECT_EQ(result.get(), tokens.get());
  }

  struct Step {
    const char* name;
    nvte_ep_status_t (Member::*run)();
  };
  static const std::vector<Step>& steps() {
    static const std::vector<Step> all = {{"nvte_ep_handle_prepare", &Member::prepare},
                                          {"nvte_ep_handle_dispatch", &Member::dispatch},
                                          {"nvte_ep_handle_combine", &Member::combine},
                                          {"nvte_ep_handle_dispatch_backward", &Member::dispatch_backward},
                                          {"nvte_ep_handle_combine_backward", &Member::combine_backward},
                                          {"nvte_ep_mem_alloc", &Member::mem_alloc}};
    return all;
  }

  const Memory& memory;
  Group group;
  Handle handle;
  Array idx, tokens, received, result;
};

// Lets threads of a test go on together, outside the library.
class Gate {
 public:
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

void expect_fatal(Member* m, nvte_ep_status_t status, int culprit) {
  const std::string name = "rank " + std::to_string(culprit);
  const auto start = Clock::now();
  for (const Member::Step& step : Member::steps())
    expect_status(status, (m->*step.run)(), {step.name, name}, "after the failure");
  nvte_ep_handle_t handle = nullptr;
  const nvte_ep_handle_config_t config = handle_config(1, 16);
  expect_status(status, nvte_ep_handle_create(m->group.get(), &config, &handle),
                {"nvte_ep_handle_create", name}, "only abort and destroy are accepted");
  for (int round = 0; round < 2; ++round) {
    const nvte_ep_error_info_t info = poll(m->group);
    expect_status(status, info.status, {"nvte_ep_group_poll_error: ", name}, "fatal findings stay");
    EXPECT_EQ(info.rank, culprit);
  }
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(5)) << "later calls return at once";
  EXPECT_EQ(nvte_ep_group_abort(m->group.get()), NVTE_EP_STATUS_OK);
  EXPECT_EQ(poll(m->group).status, status) << "the first cause stays";
}

// ---- peers that do not come ---------------------------------------------------------------------------------------------------

TEST_P(Failures, ARankThatNeverArrivesIsNamedInEveryStep) {
  const int64_t timeout_ms = 500;
  for (const Member::Step& step : Member::steps()) {
    Gate over;
    run_ranks(3, [&](Rank& rank) {
      Member m(GetParam(), rank, timeout_ms * kMillisecond);
      require(m.prepare());
      if (rank.rank == 2) {
        over.wait();
      } else {
        const auto start = Clock::now();
        expect_status(NVTE_EP_STATUS_TIMEOUT, (m.*step.run)(), {step.name, "rank 2"}, step.name);
        EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(2 * timeout_ms));
        over.open();
      }
      expect_fatal(&m, NVTE_EP_STATUS_TIMEOUT, 2);
    });
  }
}

TEST_P(Failures, GroupCreationTimesOutAndMayBeTriedAgain) {
  Gate over;
  run_ranks(2, [&](Rank& rank) {
    nvte_ep_group_config_t config = group_config(2, kHidden, kTokens, 16);
    config.transport = GetParam().transport;
    nvte_ep_group_t group = nullptr;
    if (rank.rank == 0) {
      config.timeout_ns = 300 * kMillisecond;
      expect_status(NVTE_EP_STATUS_TIMEOUT, nvte_ep_group_create(rank.comm, &config, &group),
                    {"nvte_ep_group_create", "rank 1"});
      over.open();
    } else {
      over.wait();
      config.timeout_ns = kPatience;
      const nvte_ep_status_t status = nvte_ep_group_create(rank.comm, &config, &group);
      EXPECT_EQ(status, NVTE_EP_STATUS_TIMEOUT) << "the late rank meets the failure it caused";
    }
    EXPECT_EQ(group, nullptr);
    config.timeout_ns = kPatience;
    require(nvte_ep_group_create(rank.comm, &config, &group));
    const Group owned(group);
  });
}

TEST_P(Failures, AThreadThatEndsWithoutAWordTimesOut) {
  run_ranks(2, [&](Rank& rank) {
    nvte_ep_group_t abandoned = nullptr;
    {
      nvte_ep_group_config_t config = group_config(2, kHidden, kTokens, 64);
      config.transport = GetParam().transport;
      config.timeout_ns = 300 * kMillisecond;
      require(nvte_ep_group_create(rank.comm, &config, &abandoned));
    }
    if (rank.rank == 1) return;  // its group stays alive, nobody speaks for it
    const Group group(abandoned);
    const Handle handle = make_handle(group, handle_config(1, 16));
    Array idx(*GetParam().memory, Type::kInt64, {1, 1}, bytes_of(std::vector<int64_t>{0}));
    expect_status(NVTE_EP_STATUS_TIMEOUT, prepare(handle, &idx), {"rank 1"});
  });
}

// ---- abort and destroy ----------------------------------------------------------------------------------------------------------

TEST_P(Failures, AbortFromAnotherThreadEndsEveryWait) {
  for (int aborter : {0, 1, 2}) {
    Gate created;
    std::atomic<nvte_ep_group_t> target{nullptr};
    std::atomic<int> waiting{0};
    std::thread thread([&] {
      created.wait();
      while (waiting < 2) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_EQ(nvte_ep_group_abort(target), NVTE_EP_STATUS_OK);
    });
    Gate aborted;
    run_ranks(3, [&](Rank& rank) {
      Member m(GetParam(), rank, kPatience);
      require(m.prepare());
      if (rank.rank == aborter) {
        target = m.group.get();
        created.open();
      }
      if (rank.rank == (aborter + 1) % 3) {  // one rank does not come: the other two wait
        aborted.wait();
      } else {
        ++waiting;
        expect_status(NVTE_EP_STATUS_PEER_FAILED, m.dispatch(),
                      {"nvte_ep_handle_dispatch", "rank " + std::to_string(aborter)});
        aborted.open();
      }
      expect_fatal(&m, NVTE_EP_STATUS_PEER_FAILED, aborter);
    });
    thread.join();
  }
}

TEST_P(Failures, DestroyWhileOthersWaitIsNamed) {
  run_ranks(3, [&](Rank& rank) {
    Member m(GetParam(), rank, kPatience);
    m.expect_works();
    if (rank.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      m.group = Group();
      return;
    }
    expect_status(NVTE_EP_STATUS_PEER_FAILED, m.prepare(), {"nvte_ep_handle_prepare", "rank 1"});
    expect_fatal(&m, NVTE_EP_STATUS_PEER_FAILED, 1);
  });
}

TEST_P(Failures, HandlesOutliveTheirGroupAndSayBadState) {
  run_ranks(2, [&](Rank& rank) {
    Member m(GetParam(), rank, kPatience);
    m.expect_works();
    m.group = Group();
    for (const Member::Step& step : Member::steps()) {
      if (step.run == &Member::mem_alloc) continue;  // takes the group itself
      expect_status(NVTE_EP_STATUS_BAD_STATE, (m.*step.run)(), {step.name, "destroyed"}, step.name);
    }
  });  // and the handle is destroyed after its group
}

TEST_P(Failures, AFailedGroupIsDestroyedWithoutItsPeers) {
  run_ranks(2, [&](Rank& rank) {
    Member m(GetParam(), rank, kPatience);
    require(m.prepare());
    if (rank.rank == 0) require(nvte_ep_group_abort(m.group.get()));
    const auto start = Clock::now();
    m.group = Group();
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));
  });
}

// ---- objects that are gone, or never were -----------------------------------------------------------------------------------------

TEST(Objects, StaleAndForeignPointersAreRefused) {
  const WorldId id;
  Comm comm = make_comm(id, 0, 1);
  Group group = make_group(Rank{0, 1, comm.get()}, group_config(1, kHidden, 2, 2));
  Handle handle = make_handle(group, handle_config(1, 1));
  Array idx(host_memory(), Type::kInt64, {1, 1}, bytes_of(std::vector<int64_t>{0}));
  nvte_ep_prepare_args_t args = NVTE_EP_PREPARE_ARGS_INIT;
  args.topk_idx = idx.tensor();
  nvte_ep_group_info_t info = NVTE_EP_GROUP_INFO_INIT;
  nvte_ep_group_config_t config = group_config(1, kHidden, 2, 2);
  nvte_ep_group_t created = nullptr;
  const nvte_ep_status_t invalid = NVTE_EP_STATUS_INVALID_ARGUMENT;

  // Of another kind, or of no kind at all.
  alignas(64) unsigned char noise[64] = {1, 2, 3};
  for (void* wrong :
       {static_cast<void*>(noise), static_cast<void*>(group.get()), reinterpret_cast<void*>(uintptr_t{8})}) {
    expect_status(invalid, nvte_ep_handle_prepare(static_cast<nvte_ep_handle_t>(wrong), &args, nullptr),
                  {"nvte_ep_handle_prepare: handle"});
    expect_status(invalid, nvte_ep_handle_destroy(static_cast<nvte_ep_handle_t>(wrong)),
                  {"nvte_ep_handle_destroy: handle"});
    expect_status(invalid, nvte_ep_comm_destroy(static_cast<nvte_ep_comm_t>(wrong)),
                  {"nvte_ep_comm_destroy: comm"});
    expect_status(invalid, nvte_ep_group_create(static_cast<nvte_ep_comm_t>(wrong), &config, &created),
                  {"nvte_ep_group_create: comm"});
  }
  expect_status(invalid, nvte_ep_group_info(reinterpret_cast<nvte_ep_group_t>(handle.get()), &info),
                {"nvte_ep_group_info: group"});
  expect_status(invalid, nvte_ep_group_destroy(reinterpret_cast<nvte_ep_group_t>(handle.get())),
                {"nvte_ep_group_destroy: group"});

  // Destroyed before.
  nvte_ep_handle_t old_handle = handle.get();
  handle = Handle();
  const Handle newer = make_handle(group, handle_config(1, 1));  // does not answer to the old one's name
  expect_status(invalid, nvte_ep_handle_prepare(old_handle, &args, nullptr),
                {"nvte_ep_handle_prepare: handle"});
  expect_status(invalid, nvte_ep_handle_destroy(old_handle), {"nvte_ep_handle_destroy: handle"});
  nvte_ep_group_t old_group = group.get();
  group = Group();
  expect_status(invalid, nvte_ep_group_info(old_group, &info), {"nvte_ep_group_info: group"});
  expect_status(invalid, nvte_ep_group_destroy(old_group), {"nvte_ep_group_destroy: group"});
  expect_status(invalid, nvte_ep_group_abort(old_group), {"nvte_ep_group_abort: group"});
  nvte_ep_comm_t old_comm = comm.get();
  comm = Comm();
  expect_status(invalid, nvte_ep_comm_destroy(old_comm), {"nvte_ep_comm_destroy: comm"});
}

TEST(Objects, AGroupOutlivesItsCommunicator) {
  const WorldId id;
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      Comm comm = make_comm(id, r, 2);
      Member m(Venue(), Rank{r, 2, comm.get()}, kPatience);
      comm = Comm();
      m.expect_works();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Objects, CommunicatorsOfOneIdMayBeMadeByOneThread) {
  const WorldId id;
  std::vector<Comm> comms;
  for (int r = 0; r < 3; ++r) comms.push_back(make_comm(id, r, 3));
  comms[1] = Comm();
  comms[1] = make_comm(id, 1, 3);  // a rank that left may come back
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      Member m(Venue(), Rank{r, 3, comms[static_cast<size_t>(r)].get()}, kPatience);
      m.expect_works();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- disagreement ------------------------------------------------------------------------------------------------------------------

TEST_P(Failures, RanksThatDisagreeOnAGroupSettingAllHearWhich) {
  struct Change {
    const char* name;
    std::function<void(nvte_ep_group_config_t*)> apply;
  };
  const Change changes[] = {
      {"num_experts", [](nvte_ep_group_config_t* c) { c->num_experts = 6; }},
      {"hidden", [](nvte_ep_group_config_t* c) { c->hidden = 64; }},
      {"max_tokens_per_rank", [](nvte_ep_group_config_t* c) { c->max_tokens_per_rank = 5; }},
      {"max_top_k", [](nvte_ep_group_config_t* c) { c->max_top_k = 2; }},
      {"recv_capacity", [](nvte_ep_group_config_t* c) { c->recv_capacity = 32; }},
      {"recv_capacity", [](nvte_ep_group_config_t* c) { c->recv_capacity = 0; }},
      {"overflow", [](nvte_ep_group_config_t* c) { c->overflow = NVTE_EP_ON_OVERFLOW_DROP; }},
      {"zero_copy", [](nvte_ep_group_config_t* c) { c->zero_copy = 1; }}};
  run_ranks(3, [&](Rank& rank) {
    for (int odd = 0; odd < 3; ++odd) {
      for (const Change& change : changes) {
        nvte_ep_group_config_t config = group_config(3, kHidden, kTokens, 16);
        config.transport = GetParam().transport;
        if (rank.rank == odd) change.apply(&config);
        nvte_ep_group_t group = nullptr;
        expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_group_create(rank.comm, &config, &group),
                      {"nvte_ep_group_create", change.name, "rank " + std::to_string(odd == 0 ? 1 : odd)},
                      change.name);
        EXPECT_EQ(group, nullptr);
      }
    }
    Member m(GetParam(), rank, kPatience);  // the communicator is as good as new
    m.expect_works();
  });
}

TEST_P(Failures, RanksThatDisagreeOnAHandleSettingAllHearWhich) {
  struct Change {
    const char* name;
    std::function<void(nvte_ep_handle_config_t*)> apply;
  };
  const Change changes[] = {
      {"top_k", [](nvte_ep_handle_config_t* c) { c->top_k = 2; }},
      {"alignment", [](nvte_ep_handle_config_t* c) { c->alignment = 8; }},
      {"dispatch", [](nvte_ep_handle_config_t* c) { c->dispatch = NVTE_EP_FORMAT_NVFP4; }},
      {"combine", [](nvte_ep_handle_config_t* c) { c->combine = NVTE_EP_FORMAT_MXFP8; }},
      {"dispatch_backward", [](nvte_ep_handle_config_t* c) { c->dispatch_backward = NVTE_EP_FORMAT_MXFP8; }},
      {"combine_backward", [](nvte_ep_handle_config_t* c) { c->combine_backward = NVTE_EP_FORMAT_MXFP8; }}};
  run_ranks(3, [&](Rank& rank) {
    Member m(GetParam(), rank, kPatience);
    for (const Change& change : changes) {
      nvte_ep_handle_config_t config = handle_config(1, 16);
      if (rank.rank == 1) change.apply(&config);
      const Handle handle = make_handle(m.group, config);
      Array idx(m.memory, Type::kInt64, {0, config.top_k});
      expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, prepare(handle, &idx),
                    {"nvte_ep_handle_prepare", change.name, "rank 1"}, change.name);
      nvte_ep_combine_args_t args = NVTE_EP_COMBINE_ARGS_INIT;
      args.expert_out = m.received.tensor();
      args.result = m.result.tensor();
      expect_status(NVTE_EP_STATUS_BAD_STATE, nvte_ep_handle_combine(handle.get(), &args, nullptr),
                    {"prepare"}, "the handle is not prepared");
      m.expect_works();
    }
  });
}

TEST_P(Failures, DifferentCallSequencesAreRefusedOnEveryRankAndTheGroupLives) {
  run_ranks(2, [&](Rank& rank) {
    Member m(GetParam(), rank, kPatience);
    const std::vector<Member::Step>& steps = Member::steps();
    for (const Member::Step& mine : steps) {
      for (const Member::Step& theirs : steps) {
        require(m.prepare());
        const Member::Step& step = rank.rank == 0 ? mine : theirs;
        const nvte_ep_status_t status = (m.*step.run)();
        if (mine.run == theirs.run) {
          expect_status(NVTE_EP_STATUS_OK, status, {}, mine.name);
        } else {
          expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, status, {"rank 0", "rank 1"},
                        std::string(mine.name) + " against " + theirs.name);
        }
      }
    }
    m.expect_works();
  });
}

TEST_P(Failures, APrepareThatFailedLeavesNoRoutingBehind) {
  run_ranks(2, [&](Rank& rank) {
    Member m(GetParam(), rank, kPatience);
    m.expect_works();
    const nvte_ep_status_t status = rank.rank == 0 ? m.prepare() : m.dispatch();
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, status, {"nvte_ep_handle_", "rank 0 is in prepare"});
    if (rank.rank == 0) {
      expect_status(NVTE_EP_STATUS_BAD_STATE, m.dispatch(), {"nvte_ep_handle_dispatch", "prepare"});
    }
    m.expect_works();
  });
}

TEST_P(Failures, HandlesMadeInAnotherOrderAreNoticed) {
  run_ranks(2, [&](Rank& rank) {
    Member m(GetParam(), rank, kPatience);
    const Handle first = make_handle(m.group, handle_config(1, 16));
    const Handle second = make_handle(m.group, handle_config(1, 16));
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, prepare(rank.rank == 0 ? first : second, &m.idx),
                  {"handle"}, "two handles in one call");
    require(prepare(first, &m.idx));
    require(prepare(second, &m.idx));
    m.expect_works();
  });
}

// Types may differ where the contract lets each rank choose, and where not, all are told.
TEST_P(Failures, CombineDtypesMustAgree) {
  run_ranks(2, [&](Rank& rank) {
    Member m(GetParam(), rank, kPatience);
    require(m.prepare());
    const Type type = rank.rank == 0 ? Type::kFloat32 : Type::kFloat16;
    Array out(m.memory, type, {16 * kTokens, kHidden},
              encode(type, std::vector<float>(16 * kTokens * kHidden, 1.0f))),
        result(m.memory, type, {kTokens, kHidden});
    nvte_ep_combine_args_t args = NVTE_EP_COMBINE_ARGS_INIT;
    args.expert_out = out.tensor();
    args.result = result.tensor();
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_combine(m.handle.get(), &args, nullptr),
                  {"dtype"});
    m.expect_works();
  });
}

// ---- several at once -----------------------------------------------------------------------------------------------------------------

TEST_P(Failures, SeveralGroupsWorkAtOnceAndFailAlone) {
  constexpr int kGroups = 4;
  std::vector<std::thread> threads;
  for (int g = 0; g < kGroups; ++g) {
    threads.emplace_back([&, g] {
      run_ranks(3, [&](Rank& rank) {
        Member m(GetParam(), rank, kPatience);
        for (int round = 0; round < 25; ++round) {
          m.expect_works();
          if (g == 0 && round == 10) {  // this one ends early
            if (rank.rank == 2) require(nvte_ep_group_abort(m.group.get()));
            expect_status(NVTE_EP_STATUS_PEER_FAILED, m.prepare(), {"rank 2"});
            return;
          }
        }
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(Failures, OneRankInManyGroupsAndHandles) {
  run_ranks(2, [&](Rank& rank) {
    std::vector<std::unique_ptr<Member>> members;
    for (int i = 0; i < 3; ++i) members.push_back(std::make_unique<Member>(GetParam(), rank, kPatience));
    std::vector<Handle> handles;
    for (const auto& member : members) {
      for (int i = 0; i < 3; ++i) handles.push_back(make_handle(member->group, handle_config(1, 1 << i)));
    }
    for (int round = 0; round < 5; ++round) {
      for (const Handle& handle : handles) require(prepare(handle, &members[0]->idx));
      for (const auto& member : members) member->expect_works();
    }
    members[1].reset();  // handles of its group answer BAD_STATE, the others go on
    for (size_t i = 0; i < handles.size(); ++i) {
      const nvte_ep_status_t expected = i / 3 == 1 ? NVTE_EP_STATUS_BAD_STATE : NVTE_EP_STATUS_OK;
      expect_status(expected, prepare(handles[i], &members[0]->idx));
    }
  });
}

// A batch that shrinks and grows on one handle; the routing of one handle does not leak into another.
TEST_P(Failures, HandlesInterleaveWithTheirOwnBatches) {
  run_ranks(2, [&](Rank& rank) {
    Member m(GetParam(), rank, kPatience);
    const Handle other = make_handle(m.group, handle_config(1, 16));
    for (int64_t tokens : {4, 0, 3, 1, 4}) {
      Array idx(m.memory, Type::kInt32, {tokens, 1},
                bytes_of(std::vector<int32_t>(static_cast<size_t>(tokens), 1 - rank.rank)));
      require(m.prepare());
      require(prepare(other, &idx));
      Array x(m.memory, Type::kFloat32, {tokens, kHidden},
              encode(Type::kFloat32,
                     std::vector<float>(static_cast<size_t>(tokens * kHidden), static_cast<float>(tokens))));
      Array slots(m.memory, Type::kFloat32, {16 * kTokens, kHidden}),
          back(m.memory, Type::kFloat32, {tokens, kHidden});
      nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
      args.tokens = x.tensor();
      args.receive = NVTE_EP_RECEIVE_DECODED;
      args.received = slots.tensor();
      require(nvte_ep_handle_dispatch(other.get(), &args, nullptr));
      require(m.dispatch());
      nvte_ep_combine_args_t combine = NVTE_EP_COMBINE_ARGS_INIT;
      combine.expert_out = slots.tensor();
      combine.result = back.tensor();
      require(nvte_ep_handle_combine(other.get(), &combine, nullptr));
      EXPECT_EQ(back.get(), x.get());
      require(m.combine());
      EXPECT_EQ(m.result.get(), m.tokens.get());
    }
  });
}

// ---- poll_error and abort from other threads --------------------------------------------------------------------------------------

TEST_P(Failures, PollErrorTellsOneFindingAtATimeAndSumsUp) {
  run_ranks(1, [&](Rank& rank) {
    nvte_ep_group_config_t config = group_config(2, kHidden, 8, 16);
    config.transport = GetParam().transport;
    const Group group = make_group(rank, config);
    const Handle first = make_handle(group, handle_config(2, 16));
    Handle second = make_handle(group, handle_config(2, 16));
    Array idx(*GetParam().memory, Type::kInt64, {3, 2},
              bytes_of(std::vector<int64_t>{0, 0, 1, 7, 1, -1}));  // a duplicate, a bad one, an overflow
    EXPECT_EQ(poll(group).status, NVTE_EP_STATUS_OK);
    require(prepare(first, &idx));
    require(prepare(second, &idx));
    require(prepare(first, &idx));
    const auto expect = [&](nvte_ep_status_t status, nvte_ep_handle_t handle, int64_t count, int64_t needed) {
      const nvte_ep_error_info_t info = poll(group);
      EXPECT_EQ(info.status, status);
      EXPECT_EQ(info.rank, status == NVTE_EP_STATUS_OK ? -1 : 0);
      EXPECT_EQ(info.handle, handle);
      EXPECT_EQ(info.count, count);
      EXPECT_EQ(info.needed_rows, needed);
    };
    expect(NVTE_EP_STATUS_INVALID_ARGUMENT, first.get(), 4, 0);  // both steps of the handle
    expect(NVTE_EP_STATUS_OVERFLOW, first.get(), 4, 32);
    expect(NVTE_EP_STATUS_INVALID_ARGUMENT, second.get(), 2, 0);
    second = Handle();
    expect(NVTE_EP_STATUS_OVERFLOW, nullptr, 2, 32);  // its handle is gone
    expect(NVTE_EP_STATUS_OK, nullptr, 0, 0);
  });
}

// As test_findings.cc has it of what devices report.
TEST_P(Failures, NeededRowsAreOfTheStepsThatWereNotReported) {
  run_ranks(1, [&](Rank& rank) {
    nvte_ep_group_config_t config = group_config(2, kHidden, 24, 8);
    config.transport = GetParam().transport;
    const Group group = make_group(rank, config);
    const Handle handle = make_handle(group, handle_config(1, 4));
    const auto step = [&](int64_t tokens) {
      Array idx(*GetParam().memory, Type::kInt64, {tokens, 1},
                bytes_of(std::vector<int64_t>(static_cast<size_t>(tokens), 0)));
      require(prepare(handle, &idx));
    };
    const auto expect = [&](int64_t dropped, int64_t needed) {
      const nvte_ep_error_info_t info = poll(group);
      EXPECT_EQ(info.status, NVTE_EP_STATUS_OVERFLOW);
      EXPECT_EQ(info.count, dropped);
      EXPECT_EQ(info.needed_rows, needed);
      EXPECT_EQ(poll(group).status, NVTE_EP_STATUS_OK);
    };
    step(23);
    step(13);
    step(5);  // fits
    expect(15 + 5, 24);
    step(17);
    expect(9, 20);
  });
}

TEST_P(Failures, PollErrorNeverWaitsAndMayComeFromAnyThread) {
  run_ranks(2, [&](Rank& rank) {
    Member m(GetParam(), rank, kPatience);
    std::atomic<bool> done{false};
    std::thread poller([&] {
      while (!done) {
        const auto start = Clock::now();
        EXPECT_EQ(poll(m.group).status, NVTE_EP_STATUS_OK);
        EXPECT_LT(Clock::now() - start, std::chrono::seconds(2));
        std::this_thread::yield();
      }
    });
    if (rank.rank == 1)
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the other rank waits meanwhile
    for (int round = 0; round < 30; ++round) m.expect_works();
    done = true;
    poller.join();
  });
}

TEST_P(Failures, ManyThreadsAbortAtOnce) {
  for (int round = 0; round < 10; ++round) {
    std::atomic<nvte_ep_group_t> groups[3] = {{nullptr}, {nullptr}, {nullptr}};
    std::atomic<int> ready{0};
    std::atomic<bool> joined{false};
    std::vector<std::thread> aborters;
    for (int a = 0; a < 4; ++a) {
      aborters.emplace_back([&, a] {
        while (ready < 3) std::this_thread::yield();
        for (int i = 0; i < 5; ++i) EXPECT_EQ(nvte_ep_group_abort(groups[a % 3]), NVTE_EP_STATUS_OK);
      });
    }
    run_ranks(3, [&](Rank& rank) {
      Member m(GetParam(), rank, kPatience);
      groups[rank.rank] = m.group.get();
      ++ready;
      nvte_ep_status_t status = NVTE_EP_STATUS_OK;
      while (status == NVTE_EP_STATUS_OK) status = m.prepare();
      expect_status(NVTE_EP_STATUS_PEER_FAILED, status, {"rank"});
      if (rank.rank == 0) {
        for (std::thread& thread : aborters) thread.join();
        joined = true;
      }
      while (!joined) std::this_thread::yield();  // the groups live as long as somebody aborts them
    });
  }
}

// ---- memory ------------------------------------------------------------------------------------------------------------------------------

TEST(Memory, AnImpossibleCapacityIsOutOfMemoryAndTheGroupLives) {
  run_ranks(1, [](Rank& rank) {
    const Group group =
        make_group(rank, group_config(1, 4096, 4, (int64_t{1} << 40) - 1));  // 2^53 bytes of slots
    const nvte_ep_handle_config_t config = handle_config(1, 1, NVTE_EP_FORMAT_NVFP4, NVTE_EP_FORMAT_NVFP4);
    nvte_ep_handle_t handle = nullptr;
    expect_status(NVTE_EP_STATUS_OUT_OF_MEMORY, nvte_ep_handle_create(group.get(), &config, &handle),
                  {"nvte_ep_handle_create", "memory"});
    EXPECT_EQ(handle, nullptr);
    void* pointer = nullptr;
    require(nvte_ep_mem_alloc(group.get(), 4096, &pointer));
    nvte_ep_memory_info_t info = NVTE_EP_MEMORY_INFO_INIT;
    const nvte_ep_group_config_t large = group_config(1, 4096, 4, (int64_t{1} << 40) - 1);
    require(nvte_ep_group_memory(rank.comm, &large, &info));
    EXPECT_GT(info.handle_bytes, int64_t{1} << 50);
  });
}

TEST(Memory, TheLargestSettingsHaveASize) {
  run_ranks(1, [](Rank& rank) {
    nvte_ep_group_config_t config =
        group_config(1, int64_t{1} << 31, (int64_t{1} << 31) - 1, (int64_t{1} << 60) / (int64_t{1} << 33));
    config.max_top_k = std::numeric_limits<int32_t>::max();
    nvte_ep_memory_info_t info = NVTE_EP_MEMORY_INFO_INIT;
    const nvte_ep_status_t status = nvte_ep_group_memory(rank.comm, &config, &info);
    if (status == NVTE_EP_STATUS_OK) {
      EXPECT_GT(info.handle_bytes, int64_t{1} << 60) << "no wrap-around";
    } else {
      expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, status, {"nvte_ep_group_memory", "config."});
    }
  });
}

TEST(Memory, SymmetricMemoryThatIsNotThere) {
  run_ranks(1, [](Rank& rank) {
    const Group group = make_group(rank, group_config(1, 32, 4, 16));
    void* pointer = nullptr;
    nvte_ep_status_t status = NVTE_EP_STATUS_OK;
    // Where the system promises memory that it does not have, the address space ends after a few of these.
    for (int i = 0; i < 32 && status == NVTE_EP_STATUS_OK; ++i) {
      pointer = nullptr;
      status = nvte_ep_mem_alloc(group.get(), (size_t{1} << 44) - 1, &pointer);
    }
    expect_status(NVTE_EP_STATUS_OUT_OF_MEMORY, status, {"nvte_ep_mem_alloc", "memory"});
    EXPECT_EQ(pointer, nullptr);
    require(nvte_ep_mem_alloc(group.get(), 64, &pointer));
  });
}

// Sanitizers end the process where operator new fails, so these two run in plain builds only.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(Memory, IndicesThatDoNotFitAreOutOfMemory) {
  run_ranks(1, [](Rank& rank) {
    nvte_ep_group_config_t config = group_config(1, 32, (int64_t{1} << 31) - 1, 16);
    config.max_top_k = 1 << 20;
    const Group group = make_group(rank, config);
    nvte_ep_handle_t handle = nullptr;
    for (int32_t top_k : {1 << 16, 1 << 20}) {
      const nvte_ep_handle_config_t settings = handle_config(top_k, 1);
      expect_status(NVTE_EP_STATUS_OUT_OF_MEMORY, nvte_ep_handle_create(group.get(), &settings, &handle),
                    {"nvte_ep_handle_create", "memory"});
    }
  });
}

// One rank cannot hold what an eager step needs (2^46 slots): it says so, and its peer does not wait for ever.
TEST(Memory, ARankThatRunsOutInAStepTellsItsPeers) {
  const int experts = 1 << 15;  // per rank
  run_ranks(2, [&](Rank& rank) {
    nvte_ep_group_config_t config = group_config(2 * experts, 32, 1, 0);
    config.max_top_k = experts;
    const Group group = make_group(rank, config);
    const Handle handle = make_handle(group, handle_config(experts, 1 << 30));
    std::vector<int32_t> every(static_cast<size_t>(experts));
    for (int e = 0; e < experts; ++e) every[static_cast<size_t>(e)] = e;  // all of rank 0
    Array idx(host_memory(), Type::kInt32, {rank.rank == 0 ? 1 : 0, experts},
              rank.rank == 0 ? bytes_of(every) : Bytes());
    const auto start = Clock::now();
    expect_status(NVTE_EP_STATUS_OUT_OF_MEMORY, prepare(handle, &idx), {"nvte_ep_handle_prepare", "memory"},
                  "on every rank");
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));
    // The group lives: a step that fits works.
    const Handle modest = make_handle(group, handle_config(experts, 1));
    require(prepare(modest, &idx));
  });
}
#endif

}  // namespace
