// NCCL between threads, in host memory: what the transport `nccl` calls of it, done when the call returns.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "transports/nccl_api.h"

namespace nvte_ep {
namespace testing {

// The ranks of a communicator, and what is on its way between them.
struct NcclWorld {
  struct Message {
    const void* data;
    size_t bytes;
    bool* taken;
  };
  explicit NcclWorld(int ranks) : size(ranks), boxes(static_cast<size_t>(ranks * ranks)) {}
  std::deque<Message>& box(int from, int to) { return boxes[static_cast<size_t>(from * size + to)]; }

  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<Message>> boxes;
  std::set<std::pair<int, int>> connected;           // ranks of which the first has sent the second something
  std::map<int, std::shared_ptr<NcclWorld>> splits;  // the n-th
};

}  // namespace testing

struct nccl::CommStruct {
  std::shared_ptr<testing::NcclWorld> world;
  int rank;
  int splits = 0;
};

namespace testing {

struct NcclCall {
  nccl::Comm comm;
  const void* out;  // null: this one receives
  void* in;
  size_t bytes;
  int peer;
  bool collective = false;
};
inline std::vector<NcclCall>& calls_of_group() {
  thread_local std::vector<NcclCall> calls;
  return calls;
}
inline int& group_depth() {
  thread_local int depth = 0;
  return depth;
}

// All that a thread has called since its group began, at once: as NCCL does, so that no order between ranks can stall them.
inline nccl::Result run_calls() {
  constexpr nccl::Result kInvalidUsage = 5;
  const std::vector<NcclCall> calls = std::exchange(calls_of_group(), {});
  std::deque<bool> taken;
  nccl::Result result = 0;
  for (const NcclCall& c : calls) {
    if (c.out == nullptr) continue;
    taken.push_back(false);
    NcclWorld& world = *c.comm->world;
    const std::lock_guard<std::mutex> lock(world.mutex);
    world.box(c.comm->rank, c.peer).push_back({c.out, c.bytes, &taken.back()});
    if (!c.collective) world.connected.insert({c.comm->rank, c.peer});
    world.changed.notify_all();
  }
  for (const NcclCall& c : calls) {
    if (c.in == nullptr) continue;
    NcclWorld& world = *c.comm->world;
    std::unique_lock<std::mutex> lock(world.mutex);
    std::deque<NcclWorld::Message>& box = world.box(c.peer, c.comm->rank);
    world.changed.wait(lock, [&] { return !box.empty(); });
    const NcclWorld::Message message = box.front();
    box.pop_front();
    if (message.bytes != c.bytes) result = kInvalidUsage;
    std::memcpy(c.in, message.data, std::min(message.bytes, c.bytes));
    *message.taken = true;
    world.changed.notify_all();
  }
  for (const NcclCall& c : calls) {  // what was sent may be written again
    NcclWorld& world = *c.comm->world;
    std::unique_lock<std::mutex> lock(world.mutex);
    world.changed.wait(lock, [&] { return std::find(taken.begin(), taken.end(), false) == taken.end(); });
  }
  return result;
}

inline nccl::Result call_nccl(const NcclCall& call) {
  calls_of_group().push_back(call);
  return group_depth() > 0 ? 0 : run_calls();
}

inline nccl::Api in_process_nccl() {
  nccl::Api api{};
  api.ncclCommSplit = [](nccl::Comm comm, int, int, nccl::Comm* fresh, void*) {
    NcclWorld& world = *comm->world;
    const std::lock_guard<std::mutex> lock(world.mutex);
    std::shared_ptr<NcclWorld>& split = world.splits[comm->splits++];
    if (split == nullptr) split = std::make_shared<NcclWorld>(world.size);
    *fresh = new nccl::CommStruct{split, comm->rank};
    return 0;
  };
  api.ncclCommDestroy = [](nccl::Comm comm) {
    delete comm;
    return 0;
  };
  api.ncclCommAbort = api.ncclCommDestroy;
  api.ncclCommGetAsyncError = [](nccl::Comm, nccl::Result* error) {
    *error = 0;
    return 0;
  };
  api.ncclGetErrorString = [](nccl::Result) { return "what one rank sends another does not expect"; };
  api.ncclGetLastError = [](nccl::Comm) { return ""; };
  api.ncclGroupStart = [] {
    ++group_depth();
    return 0;
  };
  api.ncclGroupEnd = [] { return --group_depth() > 0 ? 0 : run_calls(); };
  api.ncclSend = [](const void* data, size_t bytes, nccl::DataType, int peer, nccl::Comm comm,
                    nvte_ep_stream_t) { return call_nccl({comm, data, nullptr, bytes, peer}); };
  api.ncclRecv = [](void* data, size_t bytes, nccl::DataType, int peer, nccl::Comm comm, nvte_ep_stream_t) {
    return call_nccl({comm, nullptr, data, bytes, peer});
  };
  api.ncclAllGather = [](const void* mine, void* all, size_t bytes, nccl::DataType, nccl::Comm comm,
                         nvte_ep_stream_t) {
    ++group_depth();
    for (int r = 0; r < comm->world->size; ++r) {
      call_nccl({comm, mine, nullptr, bytes, r, true});
      call_nccl({comm, nullptr, static_cast<uint8_t*>(all) + static_cast<size_t>(r) * bytes, bytes, r});
    }
    return --group_depth() > 0 ? 0 : run_calls();
  };
  return api;
}

}  // namespace testing
}  // namespace nvte_ep
