#include "transports/threads.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <random>

#include "core/group.h"
#include "core/routing.h"
#include "transports/rendezvous.h"

namespace nvte_ep {
namespace {

// ---- the world of an id --------------------------------------------------------------------------------------------------

// The ranks that share an id. The n-th group of every rank has one rendezvous, whichever rank asks first; it is kept until
// all have asked, so that a late rank meets the failure it caused and not an empty room.
class World {
 public:
  explicit World(int32_t size) : size_(size), taken_(size, false), num_groups_(size, 0) {}

  int32_t size() const { return size_; }
  bool take(int32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (taken_[rank]) return false;
    return taken_[rank] = true;
  }
  void release(int32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    taken_[rank] = false;
  }
  std::shared_ptr<Rendezvous> next_rendezvous(int32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t n = num_groups_[rank]++;
    Room& room = rooms_[n];
    if (!room.rendezvous) room.rendezvous = std::make_shared<Rendezvous>(size_);
    const std::shared_ptr<Rendezvous> rendezvous = room.rendezvous;
    if (++room.asked == size_) rooms_.erase(n);
    return rendezvous;
  }

 private:
  struct Room {
    std::shared_ptr<Rendezvous> rendezvous;
    int32_t asked = 0;
  };
  const int32_t size_;
  std::mutex mutex_;
  std::vector<bool> taken_;
  std::vector<int64_t> num_groups_;
  std::map<int64_t, Room> rooms_;
};

using WorldId = std::array<uint8_t, NVTE_EP_UNIQUE_ID_BYTES>;

std::shared_ptr<World> find_world(const WorldId& id, int32_t size) {
  static std::mutex mutex;
  static std::map<WorldId, std::weak_ptr<World>> worlds;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto it = worlds.begin(); it != worlds.end();)
    it = it->second.expired() ? worlds.erase(it) : std::next(it);
  std::shared_ptr<World> world = worlds[id].lock();
  if (!world) worlds[id] = world = std::make_shared<World>(size);
  return world;
}

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<World> world, int32_t rank)
      : Communicator(NVTE_EP_COMM_THREADS, rank, world->size()), world_(std::move(world)) {}
  ~ThreadCommunicator() override { world_->release(rank()); }
  std::shared_ptr<Rendezvous> next_rendezvous() { return world_->next_rendezvous(rank()); }

 private:
  std::shared_ptr<World> world_;
};

// ---- a group ---------------------------------------------------------------------------------------------------------------

// What one handle has found and nobody was told yet.
struct Found {
  int64_t handle_id;
  IndexFaults faults;
  int64_t dropped;  // rows
  int64_t needed_rows;
};

// What the group and its handles share on one rank.
struct Member {
  std::shared_ptr<Rendezvous> rendezvous;
  GroupSettings settings;
  Backend* backend = nullptr;
  int32_t rank = 0;
  int32_t size = 0;

  mutable std::mutex mutex;
  std::deque<Found> findings;
  std::map<const uint8_t*, int64_t> symmetric;        // base -> bytes, in order of address
  std::map<const uint8_t*, int64_t> symmetric_order;  // base -> how many were allocated before it
  int64_t num_symmetric = 0;

  void report(const Found& found) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (Found& known : findings) {
      if (known.handle_id != found.handle_id) continue;
      known.faults.out_of_range += found.faults.out_of_range;
      known.faults.duplicates += found.faults.duplicates;
      known.dropped += found.dropped;
      known.needed_rows = std::max(known.needed_rows, found.needed_rows);
      return;
    }
    findings.push_back(found);
  }

  // One at a time.
  Finding next_finding() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (findings.empty()) return Finding();
    Found& found = findings.front();
    const IndexFaults faults = std::exchange(found.faults, IndexFaults());
    const bool of_indices = faults.out_of_range + faults.duplicates > 0;
    const Finding told = of_indices ? bad_indices(faults, settings.num_experts, rank, found.handle_id)
                                    : dropped_rows(found.dropped, found.needed_rows, settings.recv_capacity,
                                                   rank, found.handle_id);
    if (!of_indices || found.dropped == 0) findings.pop_front();
    return told;
  }

  // Which allocation of the group a pointer lies in, and where; {-1, -1}: none.
  struct Place {
    int64_t allocation = -1;
    int64_t offset = -1;
  };
  Place symmetric_place(const void* pointer) const {
    const std::lock_guard<std::mutex> lock(mutex);
    const uint8_t* p = static_cast<const uint8_t*>(pointer);
    auto it = symmetric.upper_bound(p);
    if (it == symmetric.begin()) return Place();
    --it;
    if (p >= it->first + it->second) return Place();
    return Place{symmetric_order.at(it->first), p - it->first};
  }

  int32_t local_experts() const { return settings.num_experts / size; }
};

// Copies counts to the caller's tensors, int32 or int64.
void write_index(const TensorView& out, const int64_t* values, int64_t n) {
  if (out.data == nullptr) return;
  for (int64_t i = 0; i < n; ++i) {
    if (out.dtype == DType::kInt64) {
      static_cast<int64_t*>(out.data)[i] = values[i];
    } else {
      static_cast<int32_t*>(out.data)[i] = saturated_int32(values[i]);
    }
  }
}

// The peers' arrays of one step.
class HostRankArrays {
 public:
  explicit HostRankArrays(int32_t ranks) : pointers_(ranks), strides_(ranks) {}
  void set(size_t rank, const void* pointer, int64_t stride_bytes) {
    pointers_[rank] = pointer;
    strides_[rank] = stride_bytes;
  }
  RankArrays view() const { return RankArrays{pointers_.data(), strides_.data(), nullptr, 0, 0}; }

 private:
  std::vector<const void*> pointers_;
  std::vector<int64_t> strides_;
};

class ThreadHandle : public HandleTransport {
 public:
  ThreadHandle(std::shared_ptr<Member> member, const HandleSettings& settings)
      : member_(std::move(member)),
        settings_(settings),
        indices_(static_cast<size_t>(member_->settings.max_tokens_per_rank * settings.top_k)),
        slots_(indices_.size()),
        rows_(member_->size),
        weights_(member_->size),
        scalars_(member_->size) {}

  Status prepare(const PrepareCall& call, nvte_ep_stream_t) override {
    prepared_ = false;
    tokens_ = call.topk_idx.rows();
    const IndexFaults faults = clean_indices(call.topk_idx, member_->settings.num_experts, indices_.data());
    std::fill(slots_.begin(), slots_.end(), SlotAddress{-1});

    Publication mine = publication("prepare");
    mine.agree_on("top_k", settings_.top_k);
    mine.agree_on("alignment", settings_.alignment);
    mine.agree_on("dispatch", settings_.dispatch);
    mine.agree_on("combine", settings_.combine);
    mine.agree_on("dispatch_backward", settings_.dispatch_backward);
    mine.agree_on("combine_backward", settings_.combine_backward);
    mine.indices = indices_.data();
    mine.tokens = tokens_;
    mine.slots = slots_.data();
    NVTE_EP_TRY(exchange(mine, [&](const std::vector<Publication>& all) {
      std::vector<RoutingSource> sources;
      for (const Publication& p : all) sources.push_back(RoutingSource{p.indices, p.tokens, p.slots});
      RoutingShape shape;
      shape.rank = member_->rank;
      shape.num_local_experts = member_->local_experts();
      shape.top_k = settings_.top_k;
      shape.alignment = settings_.alignment;
      shape.capacity =
          member_->settings.eager() ? std::numeric_limits<int64_t>::max() : member_->settings.recv_capacity;
      build_routing(sources, shape, &routing_);
      return Status();
    }));
    prepared_ = true;
    report(faults);

    const int64_t experts = member_->local_experts();
    if (call.total_rows_host != nullptr) *call.total_rows_host = routing_.total_rows;
    write_index(call.tokens_routed, routing_.tokens_routed.data(), experts);
    write_index(call.tokens_per_expert, routing_.tokens_per_expert.data(), experts);
    write_index(call.rows_per_expert, routing_.rows_per_expert.data(), experts);
    write_index(call.row_offsets, routing_.row_offsets.data(), experts + 1);
    write_index(call.scale_row_offsets, routing_.scale_row_offsets.data(), experts + 1);
    write_index(call.total_rows, &routing_.total_rows, 1);
    write_index(call.dropped_rows, &routing_.dropped_rows, 1);
    const size_t total = static_cast<size_t>(routing_.total_rows);
    for (const TensorView* slots : {&call.slot_source, &call.slot_expert}) {
      if (slots->ndim != 0 && slots->size() < routing_.total_rows) {
        return invalid_argument(slots == &call.slot_source ? "slot_source" : "slot_expert",
                                ": expected at least ", routing_.total_rows, " slots, got ", slots->size());
      }
    }
    if (call.slot_source.data != nullptr) {
      std::copy_n(routing_.slot_source.begin(), total, static_cast<int64_t*>(call.slot_source.data));
    }
    if (call.slot_expert.data != nullptr) {
      std::copy_n(routing_.slot_expert.begin(), total, static_cast<int32_t*>(call.slot_expert.data));
    }
    return Status();
  }

  bool prepared() const override { return prepared_; }

  RoutingView routing() const override {
    RoutingView view;
    view.tokens = tokens_;
    view.rows_per_expert = IndexView{const_cast<int64_t*>(routing_.rows_per_expert.data()), true};
    view.total_rows = IndexView{const_cast<int64_t*>(&routing_.total_rows), true};
    view.slot_source = routing_.slot_source.data();
    view.slots = member_->settings.eager() ? routing_.total_rows : member_->settings.recv_capacity;
    return view;
  }

  Status send_rows(const SendRows& call, nvte_ep_stream_t stream) override {
    Publication mine = publication(call.backward ? "combine_backward" : "dispatch");
    mine.agree_on("format", call.format);
    agree_on_place(call.symmetric, &mine);
    mine.rows = call.rows;
    mine.row_stride = call.row_stride;
    mine.weights = static_cast<const float*>(call.weights.data);
    mine.weight_stride = call.weights.stride;
    mine.gives = call.gives_weights || tokens_ == 0;
    mine.wants = call.out_weights != nullptr;
    return exchange(mine, [&](const std::vector<Publication>& all) {
      NVTE_EP_TRY(check_wishes(all, "topk_weights", "recv_weights"));
      for (size_t r = 0; r < all.size(); ++r) {
        rows_.set(r, all[r].rows, all[r].row_stride);
        weights_.set(r, all[r].weights, all[r].weight_stride * 4);
      }
      GatherRows gather{};
      gather.rows = rows_.view();
      gather.weights = weights_.view();
      gather.slot_source = routing_.slot_source.data();
      gather.slot_k = routing_.slot_k.data();
      gather.slots = routing_.total_rows;
      gather.row_bytes = call.row_bytes;
      gather.out = call.out;
      gather.out_stride = call.out_stride;
      gather.out_weights = call.out_weights;
      return member_->backend->gather_rows(gather, stream);
    });
  }

  Status return_rows(const ReturnRows& call, nvte_ep_stream_t stream) override {
    Publication mine = publication(call.backward ? "dispatch_backward" : "combine");
    mine.agree_on("format", call.format);
    mine.agree_on("dtype", static_cast<int64_t>(call.result.dtype));
    agree_on_place(call.symmetric, &mine);
    mine.rows = call.slots.data;
    mine.row_stride = call.slots.stride * dtype_bytes(call.slots.dtype);
    mine.weights = call.slot_weights;
    mine.scalars = call.slot_scalars;
    mine.gives = call.slot_scalars != nullptr || routing_.total_rows == 0;
    mine.wants = call.wants_scalars;
    return exchange(mine, [&](const std::vector<Publication>& all) {
      NVTE_EP_TRY(check_wishes(all, "grad_recv_weights", "grad_topk_weights"));
      for (size_t r = 0; r < all.size(); ++r) {
        rows_.set(r, all[r].rows, all[r].row_stride);
        weights_.set(r, all[r].weights, 4);
        scalars_.set(r, all[r].scalars, 4);
      }
      ReduceRows reduce{};
      reduce.num_ranks = member_->size;
      reduce.top_k = settings_.top_k;
      reduce.rows = rows_.view();
      reduce.weights = weights_.view();
      reduce.slots = slots_.data();
      reduce.result = call.result;
      reduce.accumulate = call.accumulate;
      reduce.partial_format = call.format;
      NVTE_EP_TRY(member_->backend->reduce_rows(reduce, stream));
      if (call.scalars.data == nullptr) return Status();
      return member_->backend->gather_scalars(settings_.top_k, slots_.data(), scalars_.view(), call.scalars,
                                              stream);
    });
  }

 private:
  Publication publication(const char* step) const {
    Publication p;
    p.step = step;
    p.agree_on("handle (the n-th of the group)", settings_.id);
    return p;
  }

  void agree_on_place(const void* pointer, Publication* mine) const {
    if (!member_->settings.zero_copy) return;
    const Member::Place place = member_->symmetric_place(pointer);
    mine->agree_on("symmetric memory (the n-th allocation)", place.allocation);
    mine->agree_on("symmetric memory offset", place.offset);
  }

  // A rank that wants values needs them from every rank; all ranks come to the same answer.
  static Status check_wishes(const std::vector<Publication>& all, const char* given, const char* wanted) {
    for (size_t w = 0; w < all.size(); ++w) {
      for (size_t g = 0; all[w].wants && g < all.size(); ++g) {
        if (all[g].gives) continue;
        return invalid_argument(given, ": expected on every rank because rank ", w, " asks for ", wanted,
                                ", got NULL on rank ", g);
      }
    }
    return Status();
  }

  Status exchange(const Publication& mine, const Rendezvous::Work& work) {
    return member_->rendezvous->exchange(member_->rank, mine, member_->settings.timeout_ns, work);
  }

  void report(const IndexFaults& faults) {
    Found found{settings_.id, faults, 0, 0};
    if (!member_->settings.drop_on_overflow && routing_.dropped_rows > 0) {
      found.dropped = routing_.dropped_rows;
      found.needed_rows = routing_.needed_rows;
    }
    if (faults.out_of_range + faults.duplicates + found.dropped > 0) member_->report(found);
  }

  std::shared_ptr<Member> member_;
  HandleSettings settings_;
  bool prepared_ = false;
  int64_t tokens_ = 0;
  std::vector<int32_t> indices_;    // [T, K] clean
  std::vector<SlotAddress> slots_;  // [T, K]; the receiving ranks write it during prepare
  Routing routing_;
  // Filled in each step
  HostRankArrays rows_, weights_, scalars_;
};

class ThreadGroup : public GroupTransport {
 public:
  explicit ThreadGroup(std::shared_ptr<Member> member) : member_(std::move(member)) {}
  ~ThreadGroup() override {
    close();
    for (const auto& block : member_->symmetric) member_->backend->release(const_cast<uint8_t*>(block.first));
  }

  Capabilities capabilities() const override { return {"threads", false, true, true}; }

  Status create_handle(const HandleSettings& settings, std::unique_ptr<HandleTransport>* handle) override {
    int32_t rank;
    NVTE_EP_TRY(member_->rendezvous->failure(&rank));
    *handle = std::make_unique<ThreadHandle>(member_, settings);
    return Status();
  }

  Status mem_alloc(int64_t bytes, void** pointer) override {
    Publication mine;
    mine.step = "mem_alloc";
    mine.agree_on("bytes", bytes);
    void* block = nullptr;
    // In the exchange: where one rank is out of memory, all ranks hear of it.
    const Status met = member_->rendezvous->exchange(
        member_->rank, mine, member_->settings.timeout_ns,
        [&](const std::vector<Publication>&) { return member_->backend->allocate(bytes, &block); });
    if (!met.ok()) {
      member_->backend->release(block);
      return met;
    }
    const std::lock_guard<std::mutex> lock(member_->mutex);
    member_->symmetric[static_cast<uint8_t*>(block)] = bytes;
    member_->symmetric_order[static_cast<uint8_t*>(block)] = member_->num_symmetric++;
    *pointer = block;
    return Status();
  }

  Status mem_free(void* pointer) override {
    int64_t order = -1;
    {
      const std::lock_guard<std::mutex> lock(member_->mutex);
      const auto found = member_->symmetric_order.find(static_cast<uint8_t*>(pointer));
      if (found != member_->symmetric_order.end()) order = found->second;
    }
    if (order < 0)
      return invalid_argument("pointer: expected one from mem_alloc of this group, got ", pointer);
    Publication mine;
    mine.step = "mem_free";
    mine.agree_on("allocation (the n-th of the group)", order);
    NVTE_EP_TRY(exchange(mine));
    const std::lock_guard<std::mutex> lock(member_->mutex);
    member_->symmetric.erase(static_cast<uint8_t*>(pointer));
    member_->symmetric_order.erase(static_cast<uint8_t*>(pointer));
    member_->backend->release(pointer);
    return Status();
  }

  bool is_symmetric(const void* pointer, int64_t bytes) const override {
    const Member::Place first = member_->symmetric_place(pointer);
    const Member::Place last =
        member_->symmetric_place(static_cast<const uint8_t*>(pointer) + std::max<int64_t>(bytes, 1) - 1);
    return first.allocation >= 0 && last.allocation == first.allocation;
  }

  Finding poll() override {
    int32_t rank = -1;
    const Status failure = member_->rendezvous->failure(&rank);
    return failure.ok() ? member_->next_finding() : fatal(failure, rank);
  }

  Status failure() const override {
    int32_t rank = -1;
    return member_->rendezvous->failure(&rank);
  }

  void abort() override { member_->rendezvous->abort(member_->rank); }

  void close() override {
    if (closed_) return;
    closed_ = true;
    member_->rendezvous->leave(member_->rank);
  }

 private:
  Status exchange(const Publication& mine) {
    return member_->rendezvous->exchange(member_->rank, mine, member_->settings.timeout_ns,
                                         [](const std::vector<Publication>&) { return Status(); });
  }

  std::shared_ptr<Member> member_;
  bool closed_ = false;
};

}  // namespace

std::shared_ptr<Rendezvous> next_rendezvous(Communicator* comm) {
  return static_cast<ThreadCommunicator*>(comm)->next_rendezvous();
}

void thread_world_id(uint8_t* id) {
  static std::atomic<uint64_t> counter{0};
  static const uint64_t salt = (static_cast<uint64_t>(std::random_device{}()) << 32) | std::random_device{}();
  WorldId bytes{};
  const uint64_t words[2] = {salt, ++counter};
  std::memcpy(bytes.data(), "nvte_ep threads", 15);
  std::memcpy(bytes.data() + 16, words, sizeof(words));
  std::copy(bytes.begin(), bytes.end(), id);
}

Status create_thread_communicator(const uint8_t* id, int32_t rank, int32_t size,
                                  std::unique_ptr<Communicator>* communicator) {
  std::shared_ptr<World> world;
  if (id == nullptr) {
    if (size != 1)
      return invalid_argument("config.unique_id: expected an id from nvte_ep_unique_id, got NULL");
    world = std::make_shared<World>(1);
  } else {
    WorldId key;
    std::copy_n(id, key.size(), key.begin());
    if (std::memcmp(id, "nvte_ep threads", 15) != 0) {
      return invalid_argument("config.unique_id: expected one made for NVTE_EP_COMM_THREADS");
    }
    world = find_world(key, size);
  }
  if (world->size() != size) {
    return invalid_argument("config.num_ranks: expected ", world->size(),
                            " as another rank with this id said, got ", size);
  }
  if (!world->take(rank)) {
    return invalid_argument("config.rank: rank ", rank, " of this id already exists");
  }
  *communicator = std::make_unique<ThreadCommunicator>(std::move(world), rank);
  return Status();
}

Status probe_threads(const Communicator& comm, const GroupSettings& settings) {
  if (comm.kind() != NVTE_EP_COMM_THREADS) return unsupported("threads needs a communicator of kind THREADS");
  if (!settings.device.is_host())
    return unsupported("threads works on host memory, not on ", device_name(settings.device));
  return Status();
}

Status create_threads(Communicator* comm, const GroupSettings& settings, Backend* backend,
                      std::unique_ptr<GroupTransport>* group) {
  auto member = std::make_shared<Member>();
  member->rendezvous = next_rendezvous(comm);
  member->settings = settings;
  member->backend = backend;
  member->rank = comm->rank();
  member->size = comm->size();

  Publication mine;
  mine.step = "group_create";
  mine.agree_on("num_experts", settings.num_experts);
  mine.agree_on("hidden", settings.hidden);
  mine.agree_on("max_tokens_per_rank", settings.max_tokens_per_rank);
  mine.agree_on("max_top_k", settings.max_top_k);
  mine.agree_on("recv_capacity", settings.recv_capacity);
  mine.agree_on("overflow", settings.drop_on_overflow);
  mine.agree_on("zero_copy", settings.zero_copy);
  NVTE_EP_TRY(member->rendezvous->exchange(comm->rank(), mine, settings.timeout_ns,
                                           [](const std::vector<Publication>&) { return Status(); }));
  *group = std::make_unique<ThreadGroup>(std::move(member));
  return Status();
}

void threads_memory(const Communicator&, const GroupSettings& settings, int64_t* group_bytes,
                    int64_t* exchange_bytes, int64_t* handle_bytes) {
  *group_bytes = 0;
  *exchange_bytes = 0;
  const int64_t choices = settings.max_tokens_per_rank * settings.max_top_k;
  const int64_t slots = settings.recv_capacity;  // eager: as many as each prepare needs
  *handle_bytes = choices * static_cast<int64_t>(sizeof(int32_t) + sizeof(SlotAddress)) +
                  slots * static_cast<int64_t>(sizeof(int64_t) + 2 * sizeof(int32_t)) +
                  handle_scratch_bytes(settings);
}

}  // namespace nvte_ep
