#include "transports/nccl.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace nvte_ep {
namespace {

using nccl::check;
using Clock = std::chrono::steady_clock;

// Device memory that goes with its owner.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() {
    if (backend_ != nullptr) backend_->release(pointer_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Status reserve(Backend* backend, int64_t bytes) {
    if (bytes <= bytes_) return Status();
    void* fresh = nullptr;
    NVTE_EP_TRY(backend->allocate(bytes, &fresh));
    if (backend_ != nullptr) backend_->release(pointer_);
    backend_ = backend;
    pointer_ = fresh;
    bytes_ = bytes;
    return Status();
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(pointer_);
  }

 private:
  Backend* backend_ = nullptr;
  void* pointer_ = nullptr;
  int64_t bytes_ = 0;
};

// ---- a group ---------------------------------------------------------------------------------------------------------------

// A value on which the ranks must agree.
struct Agreed {
  const char* name;
  int64_t value;
};

// What the group and its handles share on one rank.
class NcclHandle;

class Member {
 public:
  Member(const nccl::Api& api, const GroupSettings& settings, Backend* backend, int32_t rank, int32_t size)
      : api(api), settings(settings), backend(backend), rank(rank), size(size) {}
  ~Member() { close(); }

  // The communicator goes; handles that are left answer that the group is closed.
  void close() {
    nccl::Comm mine = std::exchange(comm, nullptr);
    if (mine == nullptr) return;
    (void)backend->with_device([&] {
      (void)(failure().ok() ? api.ncclCommDestroy(mine) : api.ncclCommAbort(mine));
      return Status();
    });
  }

  int32_t local_experts() const { return settings.num_experts / size; }

  // Rows, or values, of every rank for every rank: count(r) items go to rank r and come from it.
  struct Counts {
    std::vector<int64_t> send, receive;  // [ranks] items
    int64_t sent() const { return sum(send); }
    int64_t received() const { return sum(receive); }
    static int64_t sum(const std::vector<int64_t>& v) {
      int64_t total = 0;
      for (int64_t n : v) total += n;
      return total;
    }
  };
  // send holds the items for rank 0, 1, ...: or, shared, one block of which every rank gets its first items.
  Status exchange(const void* send, bool shared, void* receive, const Counts& counts, int64_t item_bytes,
                  nvte_ep_stream_t stream) {
    return backend->with_device([&]() -> Status {
      NVTE_EP_TRY(check(api, api.ncclGroupStart(), "ncclGroupStart", comm));
      Status status;
      int64_t from = 0;
      int64_t to = 0;
      for (int32_t r = 0; r < size && status.ok(); ++r) {
        const uint8_t* source = static_cast<const uint8_t*>(send) + (shared ? 0 : from * item_bytes);
        uint8_t* target = static_cast<uint8_t*>(receive) + to * item_bytes;
        const int64_t out = counts.send[r] * item_bytes;
        const int64_t in = counts.receive[r] * item_bytes;
        if (out > 0) {
          status = check(api, api.ncclSend(source, static_cast<size_t>(out), nccl::kUint8, r, comm, stream), "ncclSend", comm);
        }
        if (status.ok() && in > 0) {
          status = check(api, api.ncclRecv(target, static_cast<size_t>(in), nccl::kUint8, r, comm, stream), "ncclRecv", comm);
        }
        from += counts.send[r];
        to += counts.receive[r];
      }
      const Status ended = check(api, api.ncclGroupEnd(), "ncclGroupEnd", comm);
      return status.ok() ? ended : status;
    });
  }

  Status all_gather(const void* send, void* receive, int64_t bytes, nvte_ep_stream_t stream) {
    return backend->with_device([&] {
      return check(api, api.ncclAllGather(send, receive, static_cast<size_t>(bytes), nccl::kUint8, comm, stream),
                   "ncclAllGather", comm);
    });
  }

  // Waits for the stream, timeout_ns at most: then the communicator, which is ours, is aborted.
  Status wait(const char* step, nvte_ep_stream_t stream) {
    const auto deadline = Clock::now() + std::chrono::nanoseconds(settings.timeout_ns);
    for (;;) {
      bool idle = false;
      NVTE_EP_TRY(backend->is_idle(stream, &idle));
      if (idle) return Status();
      NVTE_EP_TRY(failure());
      nccl::Result error = 0;
      NVTE_EP_TRY(check(api, api.ncclCommGetAsyncError(comm, &error), "ncclCommGetAsyncError", comm));
      if (error != 0 && error != nccl::kInProgress) {
        return fail(NVTE_EP_STATUS_PEER_FAILED, text(step, ": NCCL reports ", api.ncclGetErrorString(error)));
      }
      if (Clock::now() > deadline) {
        return fail(NVTE_EP_STATUS_TIMEOUT, text(step, ": a peer did not arrive within ",
                                                 static_cast<double>(settings.timeout_ns) * 1e-9,
                                                 " s (NCCL does not tell which)"));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  // Every rank's values to every rank's host; INVALID_ARGUMENT on all of them where they differ. Waits.
  Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) {
    const int64_t n = static_cast<int64_t>(mine.size());
    std::vector<int64_t> values;
    for (const Agreed& a : mine) values.push_back(a.value);
    Buffer send, receive;
    NVTE_EP_TRY(send.reserve(backend, n * 8));
    NVTE_EP_TRY(receive.reserve(backend, n * 8 * size));
    NVTE_EP_TRY(backend->upload(send.as<void>(), values.data(), n * 8, stream));
    NVTE_EP_TRY(all_gather(send.as<void>(), receive.as<void>(), n * 8, stream));
    NVTE_EP_TRY(wait(step, stream));
    std::vector<int64_t> all(static_cast<size_t>(n * size));
    NVTE_EP_TRY(backend->download(all.data(), receive.as<void>(), n * 8 * size, stream));
    for (int32_t r = 1; r < size; ++r) {
      for (int64_t i = 0; i < n; ++i) {
        if (all[static_cast<size_t>(r * n + i)] == all[static_cast<size_t>(i)]) continue;
        return invalid_argument(mine[static_cast<size_t>(i)].name, ": expected the same on every rank, got ",
                                all[static_cast<size_t>(i)], " on rank 0 and ", all[static_cast<size_t>(r * n + i)],
                                " on rank ", r);
      }
    }
    return Status();
  }

  Status failure() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }
  // For ever; ends what is in flight.
  Status fail(nvte_ep_status_t code, const std::string& message) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!failure_.ok()) return failure_;
      failure_ = Status(code, message);
    }
    close();
    return failure_;
  }
  void abort(const std::string& message) { (void)fail(NVTE_EP_STATUS_PEER_FAILED, message); }

  const nccl::Api& api;
  const GroupSettings settings;
  Backend* const backend;
  const int32_t rank;
  const int32_t size;
  nccl::Comm comm = nullptr;
  Buffer receive;  // rows of all ranks; the calls on a group are ordered, so one serves all handles
  Buffer send;
  std::mutex handles_mutex;
  std::vector<NcclHandle*> handles;

 private:
  mutable std::mutex mutex_;
  Status failure_;
};

// What a handle's kernels tell the host, at any time: sums over all calls.
struct Report {
  int64_t out_of_range;
  int64_t duplicates;
  int64_t dropped_rows;
  int64_t needed_rows;  // the largest need
};
constexpr int64_t kReportWords = 4;

// How rows travel in one routing, and how received ones are found. The same items come back in combine, the other way.
struct Plan {
  Member::Counts rows;                       // dispatch: rows to and from each rank
  const int64_t* send_tokens = nullptr;      // [rows.sent()] source of each row sent; null: every token to every rank
  const int64_t* slot_source = nullptr;      // [slots] where a slot's row lies among those received
  const SlotAddress* partials = nullptr;     // [rows.received(), top_k] slots of each received row
  const SlotAddress* sums = nullptr;         // [T, ranks] where the partial rows of a token lie among those that come back
  const SlotAddress* choices = nullptr;      // [T, top_k] the same for the value of each choice
  int64_t rank_rows = 0;                     // rows between ranks in what is received; 0: addresses count all rows
};

class NcclHandle : public HandleTransport {
 public:
  NcclHandle(std::shared_ptr<Member> member, const HandleSettings& settings)
      : member_(std::move(member)), settings_(settings) {}
  ~NcclHandle() override {
    {
      const std::lock_guard<std::mutex> lock(member_->handles_mutex);
      auto& all = member_->handles;
      all.erase(std::remove(all.begin(), all.end(), this), all.end());
    }
    if (report_ != nullptr) member_->backend->release_shared(report_);
  }

  Status allocate() {
    const GroupSettings& g = member_->settings;
    Backend* backend = member_->backend;
    const int64_t experts = member_->local_experts();
    const int64_t choices = g.max_tokens_per_rank * settings_.top_k;
    Route& r = route_;
    r.rank = member_->rank;
    r.num_ranks = member_->size;
    r.num_experts = g.num_experts;
    r.top_k = settings_.top_k;
    r.alignment = settings_.alignment;
    r.capacity = g.eager() ? std::numeric_limits<int64_t>::max() : g.recv_capacity;
    r.tokens = g.max_tokens_per_rank;
    // Eager: no routing can need more.
    const int64_t slots = g.eager() ? choices * member_->size + experts * (settings_.alignment - 1) : g.recv_capacity;

    const auto pointer = [](auto** p) { return reinterpret_cast<void**>(p); };
    const struct {
      void** pointer;
      int64_t bytes;
    } parts[] = {{pointer(&clean_), choices * 4},
                 {pointer(&all_), choices * 4 * member_->size},
                 {pointer(&r.tokens_routed), experts * 8},
                 {pointer(&r.tokens_per_expert), experts * 8},
                 {pointer(&r.rows_per_expert), experts * 8},
                 {pointer(&r.row_offsets), (experts + 1) * 8},
                 {pointer(&r.scale_row_offsets), (experts + 1) * 8},
                 {pointer(&r.totals), 3 * 8},
                 {pointer(&counters_), kReportWords * 8},
                 {pointer(&r.slot_source), slots * 8},
                 {pointer(&r.slot_k), slots * 4},
                 {pointer(&r.slot_expert), slots * 4},
                 {pointer(&r.in_slots), choices * 8 * member_->size},
                 {pointer(&r.rank_rows), g.max_tokens_per_rank * member_->size * 8},
                 {pointer(&r.rank_choices), choices * 8},
                 {&r.workspace, backend->route_workspace_bytes(r)}};
    int64_t total = 0;
    for (const auto& p : parts) total += round_up(p.bytes, kOperandPartAlignment);
    NVTE_EP_TRY(memory_.reserve(backend, total));
    int64_t at = 0;
    for (const auto& p : parts) {
      *p.pointer = memory_.as<uint8_t>() + at;
      at += round_up(p.bytes, kOperandPartAlignment);
    }
    r.indices = all_;
    r.history = counters_ + 2;
    void* shared = nullptr;
    NVTE_EP_TRY(backend->allocate_shared(kReportWords * 8, &shared));
    report_ = static_cast<int64_t*>(shared);
    const std::lock_guard<std::mutex> lock(member_->handles_mutex);
    member_->handles.push_back(this);
    return Status();
  }

  Status prepare(const PrepareCall& call, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(member_->failure());
    Backend* backend = member_->backend;
    bool capturing = false;
    NVTE_EP_TRY(backend->is_capturing(stream, &capturing));
    if (capturing && (member_->settings.eager() || !agreed_)) {
      return bad_state(member_->settings.eager() ? "stream: an eager group cannot be captured, its prepare waits"
                                                 : "stream: a handle's first prepare checks the ranks' settings and "
                                                   "waits: call it once before the capture");
    }
    prepared_ = false;
    if (!agreed_) {
      NVTE_EP_TRY(member_->agree("prepare",
                                 {{"handle (the n-th of the group)", settings_.id},
                                  {"top_k", settings_.top_k},
                                  {"alignment", settings_.alignment},
                                  {"dispatch", settings_.dispatch},
                                  {"combine", settings_.combine},
                                  {"dispatch_backward", settings_.dispatch_backward},
                                  {"combine_backward", settings_.combine_backward}},
                                 stream));
      agreed_ = true;
    }
    tokens_ = call.topk_idx.rows();
    const int64_t choices = route_.tokens * settings_.top_k;
    NVTE_EP_TRY(backend->clean_indices(call.topk_idx, route_.num_experts, route_.tokens, clean_, counters_, stream));
    NVTE_EP_TRY(member_->all_gather(clean_, all_, choices * 4, stream));
    NVTE_EP_TRY(backend->route(route_, stream));
    NVTE_EP_TRY(backend->write_index(shared_report(), counters_, stream));
    if (member_->settings.eager()) {
      NVTE_EP_TRY(plan_exact(stream));
    } else {
      plan_fixed();
    }
    prepared_ = true;
    return hand_out(call, stream);
  }

  bool prepared() const override { return prepared_; }

  RoutingView routing() const override {
    RoutingView view;
    view.tokens = tokens_;
    view.rows_per_expert = IndexView{route_.rows_per_expert, true};
    view.total_rows = IndexView{route_.totals, true};
    view.slot_source = route_.slot_source;
    view.slots = slots_;
    return view;
  }

  Status send_rows(const SendRows& call, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(member_->failure());
    NVTE_EP_TRY(reserve_eager(std::max(call.row_bytes, int64_t{settings_.top_k} * 4)));
    NVTE_EP_TRY(travel(call.rows, call.row_stride, call.readable_rows, call.row_bytes, stream));
    GatherRows gather{};
    gather.rows = received(call.row_bytes);
    gather.slot_source = plan_.slot_source;
    gather.slot_k = route_.slot_k;
    gather.slots = slots_;
    gather.slot_count = IndexView{route_.totals, true};
    gather.row_bytes = call.row_bytes;
    gather.out = call.out;
    gather.out_stride = call.out_stride;
    NVTE_EP_TRY(member_->backend->gather_rows(gather, stream));
    if (call.backward) return Status();
    // The weights travel in every forward dispatch: a rank cannot know whether a peer wants them.
    const int64_t bytes = int64_t{settings_.top_k} * 4;
    if (call.weights.data != nullptr) {
      NVTE_EP_TRY(travel(call.weights.data, call.weights.stride * 4, tokens_, bytes, stream));
    } else {
      NVTE_EP_TRY(travel(member_->send.as<void>(), bytes, route_.tokens, bytes, stream));  // whatever: nobody reads it
    }
    if (call.out_weights == nullptr) return Status();
    gather.out = nullptr;
    gather.weights = received(bytes);
    gather.out_weights = call.out_weights;
    return member_->backend->gather_rows(gather, stream);
  }

  Status return_rows(const ReturnRows& call, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(member_->failure());
    Backend* backend = member_->backend;
    const int64_t hidden = member_->settings.hidden;
    const int64_t row_bytes = hidden * dtype_bytes(call.slots.dtype);
    NVTE_EP_TRY(reserve_eager(row_bytes));
    const int64_t partial_rows = plan_.rows.received();

    // One partial row for each row that came, in the order in which they came.
    ReduceRows reduce{};
    reduce.num_ranks = 1;
    reduce.top_k = settings_.top_k;
    reduce.rows = RankArrays{nullptr, nullptr, call.slots.data, 0, call.slots.stride * dtype_bytes(call.slots.dtype)};
    reduce.weights = RankArrays{nullptr, nullptr, call.slot_weights, 0, 4};
    reduce.slots = plan_.partials;
    reduce.result = TensorView{member_->send.as<void>(), call.slots.dtype, member_->settings.device, 2,
                               {partial_rows, hidden}, hidden};
    NVTE_EP_TRY(backend->reduce_rows(reduce, stream));
    NVTE_EP_TRY(member_->exchange(member_->send.as<void>(), false, member_->receive.as<void>(), back(), row_bytes, stream));
    ReduceRows sum{};
    sum.num_ranks = member_->size;
    sum.top_k = member_->size;
    sum.rows = received(row_bytes);
    sum.slots = plan_.sums;
    sum.result = call.result;
    sum.accumulate = call.accumulate;
    NVTE_EP_TRY(backend->reduce_rows(sum, stream));
    if (!call.backward) return Status();

    // The gradients of the weights travel in every dispatch backward, as the weights did.
    const int64_t bytes = int64_t{settings_.top_k} * 4;
    if (call.slot_scalars != nullptr) {
      const TensorView values{member_->send.as<void>(), DType::kFloat32, member_->settings.device, 2,
                              {partial_rows, settings_.top_k}, settings_.top_k};
      NVTE_EP_TRY(backend->gather_scalars(settings_.top_k, plan_.partials,
                                          RankArrays{nullptr, nullptr, call.slot_scalars, 0, 4}, values, stream));
    }
    NVTE_EP_TRY(member_->exchange(member_->send.as<void>(), false, member_->receive.as<void>(), back(), bytes, stream));
    if (call.scalars.data == nullptr) return Status();
    const RankArrays values{nullptr, nullptr, member_->receive.as<void>(), plan_.rank_rows * bytes, 4};
    return backend->gather_scalars(settings_.top_k, plan_.choices, values, call.scalars, stream);
  }

  // What is new since the last time.
  Finding next_finding(bool report_overflow) {
    const volatile int64_t* now = report_;
    const Report seen = seen_;
    seen_ = Report{now[0], now[1], now[2], now[3]};
    Finding finding;
    finding.rank = member_->rank;
    finding.handle_id = settings_.id;
    finding.count = seen_.out_of_range + seen_.duplicates - seen.out_of_range - seen.duplicates;
    if (finding.count > 0) {
      seen_.dropped_rows = seen.dropped_rows;  // one at a time
      finding.status = NVTE_EP_STATUS_INVALID_ARGUMENT;
      return finding;
    }
    finding.count = seen_.dropped_rows - seen.dropped_rows;
    if (finding.count > 0 && report_overflow) {
      finding.status = NVTE_EP_STATUS_OVERFLOW;
      finding.needed_rows = seen_.needed_rows;
      return finding;
    }
    return Finding();
  }

 private:
  TensorView shared_report() const {
    return TensorView{report_, DType::kInt64, member_->settings.device, 1, {kReportWords, 1}, 1};
  }

  Member::Counts back() const { return Member::Counts{plan_.rows.receive, plan_.rows.send}; }

  // Items of this rank's tokens to the ranks that need them.
  Status travel(const void* items, int64_t stride, int64_t readable, int64_t bytes, nvte_ep_stream_t stream) {
    Backend* backend = member_->backend;
    const void* send = member_->send.as<void>();
    if (plan_.send_tokens != nullptr) {
      GatherRows gather{};
      gather.rows = RankArrays{nullptr, nullptr, items, 0, stride};
      gather.slot_source = plan_.send_tokens;
      gather.slots = plan_.rows.sent();
      gather.row_bytes = bytes;
      gather.out = member_->send.as<void>();
      gather.out_stride = bytes;
      NVTE_EP_TRY(backend->gather_rows(gather, stream));
    } else if (readable >= route_.tokens && stride == bytes) {
      send = items;
    } else {
      NVTE_EP_TRY(backend->copy_rows(member_->send.as<void>(), bytes, items, stride, bytes, tokens_, stream));
    }
    return member_->exchange(send, plan_.send_tokens == nullptr, member_->receive.as<void>(), plan_.rows, bytes, stream);
  }

  RankArrays received(int64_t item_bytes) const {
    return RankArrays{nullptr, nullptr, member_->receive.as<void>(), plan_.rank_rows * item_bytes, item_bytes};
  }

  void plan_fixed() {
    slots_ = member_->settings.recv_capacity;
    plan_ = Plan();
    plan_.rows.send.assign(static_cast<size_t>(member_->size), route_.tokens);
    plan_.rows.receive = plan_.rows.send;
    plan_.slot_source = route_.slot_source;
    plan_.partials = route_.in_slots;
    plan_.sums = route_.rank_rows;
    plan_.choices = route_.rank_choices;
    plan_.rank_rows = route_.tokens;
  }

  // Eager: the host reads the routing and lists what has to travel.
  Status plan_exact(nvte_ep_stream_t stream) {
    Backend* backend = member_->backend;
    const size_t ranks = static_cast<size_t>(member_->size);
    const int64_t top_k = settings_.top_k;
    const int64_t choices = route_.tokens * top_k;
    NVTE_EP_TRY(member_->wait("prepare", stream));
    int64_t totals[3];
    NVTE_EP_TRY(backend->download(totals, route_.totals, sizeof(totals), stream));
    slots_ = totals[0];
    std::vector<SlotAddress> in_slots(static_cast<size_t>(choices) * ranks), own(static_cast<size_t>(choices));
    std::vector<SlotAddress> sums(static_cast<size_t>(route_.tokens) * ranks);
    std::vector<int64_t> slot_source(static_cast<size_t>(slots_));
    NVTE_EP_TRY(backend->download(in_slots.data(), route_.in_slots, choices * 8 * member_->size, stream));
    NVTE_EP_TRY(backend->download(own.data(), route_.rank_choices, choices * 8, stream));
    NVTE_EP_TRY(backend->download(sums.data(), route_.rank_rows, route_.tokens * 8 * member_->size, stream));
    NVTE_EP_TRY(backend->download(slot_source.data(), route_.slot_source, slots_ * 8, stream));

    plan_ = Plan();
    plan_.rows.send.assign(ranks, 0);
    plan_.rows.receive.assign(ranks, 0);
    std::vector<int64_t> send_tokens;
    for (size_t r = 0; r < ranks; ++r) {
      for (int64_t t = 0; t < tokens_; ++t) {
        SlotAddress& address = sums[static_cast<size_t>(t) * ranks + r];
        if (address < 0) continue;
        address = static_cast<int64_t>(send_tokens.size());
        send_tokens.push_back(t);
        ++plan_.rows.send[r];
      }
    }
    for (int64_t i = 0; i < choices; ++i) {
      SlotAddress& address = own[static_cast<size_t>(i)];
      if (address < 0) continue;
      const size_t rank = static_cast<size_t>(address >> kSlotBits);
      address = sums[static_cast<size_t>(i / top_k) * ranks + rank] * top_k + i % top_k;
    }
    std::vector<SlotAddress> partials;
    std::vector<int64_t> place(static_cast<size_t>(route_.tokens) * ranks, -1);
    int64_t received = 0;
    for (size_t r = 0; r < ranks; ++r) {
      for (int64_t t = 0; t < route_.tokens; ++t) {
        const SlotAddress* slots = in_slots.data() + static_cast<int64_t>(r) * choices + t * top_k;
        if (std::all_of(slots, slots + top_k, [](SlotAddress a) { return a < 0; })) continue;
        partials.insert(partials.end(), slots, slots + top_k);
        place[r * static_cast<size_t>(route_.tokens) + static_cast<size_t>(t)] = received++;
        ++plan_.rows.receive[r];
      }
    }
    for (int64_t& source : slot_source) {
      if (source >= 0) {
        source = place[static_cast<size_t>(source >> 32) * static_cast<size_t>(route_.tokens) +
                       static_cast<size_t>(source & 0xFFFFFFFF)];
      }
    }
    const struct {
      Buffer& buffer;
      const std::vector<int64_t>& values;
      const int64_t** pointer;
    } lists[] = {{lists_[0], send_tokens, &plan_.send_tokens},
                 {lists_[1], slot_source, &plan_.slot_source},
                 {lists_[2], partials, &plan_.partials},
                 {lists_[3], sums, &plan_.sums},
                 {lists_[4], own, &plan_.choices}};
    for (const auto& list : lists) {
      const int64_t bytes = static_cast<int64_t>(list.values.size()) * 8;
      NVTE_EP_TRY(list.buffer.reserve(backend, std::max<int64_t>(bytes, 8)));
      if (bytes > 0) NVTE_EP_TRY(backend->upload(list.buffer.as<void>(), list.values.data(), bytes, stream));
      *list.pointer = list.buffer.as<int64_t>();
    }
    return Status();
  }

  // Fixed capacity has its memory from the group's creation on.
  Status reserve_eager(int64_t item_bytes) {
    if (!member_->settings.eager()) return Status();
    const int64_t rows = std::max<int64_t>(1, std::max(plan_.rows.sent(), plan_.rows.received()));
    NVTE_EP_TRY(member_->send.reserve(member_->backend, rows * item_bytes));
    return member_->receive.reserve(member_->backend, rows * item_bytes);
  }

  Status hand_out(const PrepareCall& call, nvte_ep_stream_t stream) {
    Backend* backend = member_->backend;
    const struct {
      const TensorView& out;
      const int64_t* counts;
    } outputs[] = {{call.tokens_routed, route_.tokens_routed},     {call.tokens_per_expert, route_.tokens_per_expert},
                   {call.rows_per_expert, route_.rows_per_expert}, {call.row_offsets, route_.row_offsets},
                   {call.scale_row_offsets, route_.scale_row_offsets},
                   {call.total_rows, route_.totals},               {call.dropped_rows, route_.totals + 1}};
    for (const auto& o : outputs) {
      if (o.out.data != nullptr) NVTE_EP_TRY(backend->write_index(o.out, o.counts, stream));
    }
    if (call.total_rows_host != nullptr) *call.total_rows_host = slots_;
    const struct {
      const char* name;
      const TensorView& out;
      const void* slots;
    } maps[] = {{"slot_source", call.slot_source, route_.slot_source}, {"slot_expert", call.slot_expert, route_.slot_expert}};
    for (const auto& m : maps) {
      if (m.out.data == nullptr) continue;
      if (m.out.size() < slots_) {
        return invalid_argument(m.name, ": expected at least ", slots_, " slots, got ", m.out.size());
      }
      NVTE_EP_TRY(backend->copy_words(m.out.data, m.slots, dtype_bytes(m.out.dtype) / 4, slots_,
                                      IndexView{route_.totals, true}, stream));
    }
    return Status();
  }

  std::shared_ptr<Member> member_;
  HandleSettings settings_;
  Buffer memory_;
  Buffer lists_[5];
  Route route_;
  Plan plan_;
  int32_t* clean_ = nullptr;
  int32_t* all_ = nullptr;
  int64_t* counters_ = nullptr;  // a Report on the device
  int64_t* report_ = nullptr;    // the host's view of it
  Report seen_{};
  int64_t tokens_ = 0;
  int64_t slots_ = 0;
  bool agreed_ = false;
  bool prepared_ = false;
};

class NcclGroup : public GroupTransport {
 public:
  explicit NcclGroup(std::shared_ptr<Member> member) : member_(std::move(member)) {}
  ~NcclGroup() override {
    close();
    for (const auto& block : symmetric_) member_->backend->release(const_cast<uint8_t*>(block.first));
  }

  Capabilities capabilities() const override { return {"nccl", true, true, false}; }

  Status create_handle(const HandleSettings& settings, std::unique_ptr<HandleTransport>* handle) override {
    auto created = std::make_unique<NcclHandle>(member_, settings);
    NVTE_EP_TRY(created->allocate());
    *handle = std::move(created);
    return Status();
  }

  // Nothing is read by peers in place; zero_copy is refused at creation, so this is plain memory.
  Status mem_alloc(int64_t bytes, void** pointer) override {
    NVTE_EP_TRY(member_->failure());
    void* block = nullptr;
    NVTE_EP_TRY(member_->backend->allocate(bytes, &block));
    const Status met = member_->agree("mem_alloc", {{"bytes", bytes}}, nullptr);
    if (!met.ok()) {
      member_->backend->release(block);
      return met;
    }
    symmetric_[static_cast<uint8_t*>(block)] = bytes;
    *pointer = block;
    return Status();
  }
  Status mem_free(void* pointer) override {
    const auto found = symmetric_.find(static_cast<uint8_t*>(pointer));
    if (found == symmetric_.end()) return invalid_argument("pointer: expected one from mem_alloc of this group, got ", pointer);
    NVTE_EP_TRY(member_->agree("mem_free", {{"bytes", found->second}}, nullptr));
    member_->backend->release(pointer);
    symmetric_.erase(found);
    return Status();
  }
  bool is_symmetric(const void* pointer, int64_t bytes) const override {
    const uint8_t* p = static_cast<const uint8_t*>(pointer);
    auto it = symmetric_.upper_bound(p);
    if (it == symmetric_.begin()) return false;
    --it;
    return p + bytes <= it->first + it->second;
  }

  Finding poll() override {
    Finding finding;
    const Status failed = member_->failure();
    if (!failed.ok()) {
      finding.status = failed.code();
      return finding;
    }
    nccl::Result error = 0;
    if (member_->comm != nullptr && member_->api.ncclCommGetAsyncError(member_->comm, &error) == 0 && error != 0 &&
        error != nccl::kInProgress) {
      finding.status =
          member_->fail(NVTE_EP_STATUS_PEER_FAILED, text("NCCL reports ", member_->api.ncclGetErrorString(error))).code();
      return finding;
    }
    const std::lock_guard<std::mutex> lock(member_->handles_mutex);
    for (NcclHandle* handle : member_->handles) {
      finding = handle->next_finding(!member_->settings.drop_on_overflow);
      if (finding.status != NVTE_EP_STATUS_OK) return finding;
    }
    return Finding();
  }

  void abort() override { member_->abort(text("rank ", member_->rank, " aborted the group")); }

  void close() override {
    if (closed_) return;
    closed_ = true;
    member_->close();
  }

 private:
  std::shared_ptr<Member> member_;
  std::map<const uint8_t*, int64_t> symmetric_;
  bool closed_ = false;
};

// Rows of the widest thing that travels: FP32 sums.
int64_t exchange_item_bytes(const GroupSettings& settings) { return settings.hidden * 4; }

}  // namespace

NcclCommunicator::~NcclCommunicator() {
  // The communicator's device must be current; its own groups work on splits of it.
  (void)api_.ncclCommDestroy(comm_);
}

Status make_nccl_id(uint8_t* unique_id) {
  const nccl::Api* api = nullptr;
  NVTE_EP_TRY(nccl::load(&api));
  nccl::UniqueId id;
  NVTE_EP_TRY(check(*api, api->ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr));
  static_assert(sizeof(id.internal) == NVTE_EP_UNIQUE_ID_BYTES, "an NCCL id is 128 bytes");
  std::memcpy(unique_id, id.internal, sizeof(id.internal));
  return Status();
}

Status create_nccl_communicator(const CommunicatorSettings& settings, std::unique_ptr<Communicator>* communicator) {
  const nccl::Api* api = nullptr;
  NVTE_EP_TRY(nccl::load(&api));
  nccl::UniqueId id;
  if (settings.unique_id != nullptr) {
    std::memcpy(id.internal, settings.unique_id, sizeof(id.internal));
  } else if (settings.size == 1) {
    NVTE_EP_TRY(check(*api, api->ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr));
  } else {
    return invalid_argument("config.unique_id: expected an id from nvte_ep_unique_id, got NULL");
  }
  Backend* backend = nullptr;
  NVTE_EP_TRY(find_backend(Device{NVTE_EP_DEVICE_CUDA, settings.device_id}, 0, &backend));
  nccl::Comm comm = nullptr;
  NVTE_EP_TRY(backend->with_device([&] {
    return check(*api, api->ncclCommInitRank(&comm, settings.size, id, settings.rank), "ncclCommInitRank", nullptr);
  }));
  *communicator = std::make_unique<NcclCommunicator>(*api, comm, settings.rank, settings.size, settings.device_id);
  return Status();
}

Status split_nccl_communicator(void* nccl_comm, std::unique_ptr<Communicator>* communicator) {
  const nccl::Api* api = nullptr;
  NVTE_EP_TRY(nccl::load(&api));
  const nccl::Comm given = static_cast<nccl::Comm>(nccl_comm);
  int rank = 0;
  int size = 0;
  int device = 0;
  NVTE_EP_TRY(check(*api, api->ncclCommUserRank(given, &rank), "ncclCommUserRank", given));
  NVTE_EP_TRY(check(*api, api->ncclCommCount(given, &size), "ncclCommCount", given));
  NVTE_EP_TRY(check(*api, api->ncclCommCuDevice(given, &device), "ncclCommCuDevice", given));
  Backend* backend = nullptr;
  NVTE_EP_TRY(find_backend(Device{NVTE_EP_DEVICE_CUDA, device}, 0, &backend));
  nccl::Comm comm = nullptr;
  NVTE_EP_TRY(backend->with_device(
      [&] { return check(*api, api->ncclCommSplit(given, 0, rank, &comm, nullptr), "ncclCommSplit", given); }));
  *communicator = std::make_unique<NcclCommunicator>(*api, comm, rank, size, device);
  return Status();
}

Status probe_nccl(const Communicator& comm, const GroupSettings& settings) {
  if (comm.kind() != NVTE_EP_COMM_NCCL) return unsupported("nccl needs a communicator of kind NCCL");
  if (settings.device.is_host()) return unsupported("nccl works on CUDA devices, not on host memory");
  if (settings.zero_copy) return unsupported("nccl has no zero_copy: rows are staged");
  return Status();
}

Status create_nccl(Communicator* comm, const GroupSettings& settings, Backend* backend,
                   std::unique_ptr<GroupTransport>* group) {
  const NcclCommunicator& base = *static_cast<NcclCommunicator*>(comm);
  auto member = std::make_shared<Member>(base.api(), settings, backend, comm->rank(), comm->size());
  NVTE_EP_TRY(backend->with_device([&] {
    return check(base.api(), base.api().ncclCommSplit(base.comm(), 0, comm->rank(), &member->comm, nullptr),
                 "ncclCommSplit", base.comm());
  }));
  NVTE_EP_TRY(member->agree("group_create",
                            {{"num_experts", settings.num_experts},
                             {"hidden", settings.hidden},
                             {"max_tokens_per_rank", settings.max_tokens_per_rank},
                             {"max_top_k", settings.max_top_k},
                             {"recv_capacity", settings.recv_capacity},
                             {"overflow", settings.drop_on_overflow}},
                            nullptr));
  if (!settings.eager()) {
    const int64_t bytes = settings.max_tokens_per_rank * comm->size() * exchange_item_bytes(settings);
    NVTE_EP_TRY(member->send.reserve(backend, bytes));
    NVTE_EP_TRY(member->receive.reserve(backend, bytes));
  }
  *group = std::make_unique<NcclGroup>(std::move(member));
  return Status();
}

void nccl_memory(const Communicator& comm, const GroupSettings& settings, int64_t* group_bytes, int64_t* exchange_bytes,
                 int64_t* handle_bytes) {
  const int64_t ranks = comm.size();
  const int64_t rows = settings.max_tokens_per_rank * ranks;
  *exchange_bytes = settings.eager() ? 0 : 2 * rows * exchange_item_bytes(settings);
  *group_bytes = *exchange_bytes;
  const int64_t choices = settings.max_tokens_per_rank * settings.max_top_k;
  const int64_t local = settings.num_experts / ranks;
  const int64_t slots = settings.eager() ? choices * ranks + local * 127 : settings.recv_capacity;
  *handle_bytes = choices * (4 + 8) * (ranks + 1) + rows * 8 + slots * 16 + local * 40;
}

}  // namespace nvte_ep
