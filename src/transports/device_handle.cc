#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "core/group.h"
#include "transports/device_buffer.h"
#include "transports/device_exchange.h"
#include "transports/device_group.h"

// The routing and the steps of every transport of device memory: clean, exchange, route; share rows, gather them into slots;
// sum slots by source, give them back, sum the ranks. How items travel is the exchange's part.
namespace nvte_ep {
namespace {

// How rows travel in one routing, and how received ones are found. The same items come back in combine, the other way.
struct Plan {
  ItemCounts rows;  // dispatch: rows to and from each rank
  const int64_t* send_tokens =
      nullptr;  // [rows.sent()] source of each row sent; null: every token to every rank
  const int64_t* slot_source = nullptr;       // [slots] where a slot's row lies among those received
  const SlotAddress* partials = nullptr;      // [rows.received(), top_k] slots of each received row
  const SlotAddress* own_partials = nullptr;  // [T, top_k] slots of each of this rank's own
  const SlotAddress* sums =
      nullptr;  // [T, ranks] where the partial rows of a token lie among those that come back
  const SlotAddress* choices = nullptr;  // [T, top_k] the same for the value of each choice
};

class DeviceHandle : public HandleTransport {
 public:
  // exchange: null where the ranks move rows by a SlotExchange for each handle.
  DeviceHandle(std::shared_ptr<DeviceMember> member, std::shared_ptr<RoutingRanks> ranks,
               DeviceExchange* exchange, const HandleSettings& settings)
      : member_(std::move(member)), ranks_(std::move(ranks)), exchange_(exchange), settings_(settings) {}
  ~DeviceHandle() override { member_->remove(&report_); }

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
    const int64_t slots =
        g.eager() ? choices * member_->size + experts * (settings_.alignment - 1) : g.recv_capacity;

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
                 {pointer(&counters_), kDeviceCounters * 8},
                 {pointer(&r.slot_source), slots * 8},
                 {pointer(&r.slot_k), slots * 4},
                 {pointer(&r.slot_expert), slots * 4},
                 {pointer(&r.in_slots), choices * 8 * member_->size},
                 {pointer(&r.rank_rows), g.max_tokens_per_rank * member_->size * 8},
                 {pointer(&r.rank_choices), choices * 8},
                 {pointer(&r.kept_indices), exchange_ == nullptr ? choices * 4 : 0},
                 {pointer(&no_values_), exchange_ != nullptr ? choices * 4 : int64_t{4}},
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
    if (exchange_ != nullptr) r.kept_indices = nullptr;
    r.kept_experts = ranks_->kept_experts();
    NVTE_EP_TRY(ranks_->open_slots(settings_, route_, &slot_exchange_));
    NVTE_EP_TRY(report_.allocate(backend));
    r.reported = report_.reported();
    member_->add(&report_, settings_.id);
    return Status();
  }

  Status prepare(const PrepareCall& call, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(member_->begin_prepare(settings_, stream, &agreed_));
    prepared_ = false;
    Backend* backend = member_->backend;
    tokens_ = call.topk_idx.rows();
    const int64_t choices = route_.tokens * settings_.top_k;
    const bool alone = member_->size == 1;
    NVTE_EP_TRY(backend->clean_indices(call.topk_idx, route_.num_experts, route_.tokens,
                                       alone ? all_ : clean_, counters_, stream));
    if (!alone) NVTE_EP_TRY(ranks_->gather(clean_, all_, choices * 4, stream));
    NVTE_EP_TRY(backend->route(route_, stream));
    NVTE_EP_TRY(backend->write_index(shared_report(), counters_, stream));
    NVTE_EP_TRY(member_->settings.eager() ? plan_eager(stream) : plan_fixed());
    if (slot_exchange_ != nullptr) NVTE_EP_TRY(slot_exchange_->prepare(tokens_, slots_, stream));
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

  Status send_memory(void** memory, nvte_ep_stream_t stream) override {
    *memory = nullptr;
    NVTE_EP_TRY(member_->check_alive());
    if (plan_.send_tokens != nullptr) return Status();  // listed items are gathered from anywhere
    return exchange_->outbox(dispatch_need(largest_row()), memory, stream);
  }

  bool takes_dispatch() const override { return slot_exchange_ != nullptr; }

  Status dispatch(const DispatchCall& call, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(member_->check_alive());
    NVTE_EP_TRY(check_weights_given(call.recv_weights.data != nullptr, call.gives_weights, tokens_));
    return slot_exchange_->dispatch(call, routing(), stream);
  }

  Status send_rows(const SendRows& call, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(member_->check_alive());
    NVTE_EP_TRY(check_weights_given(call.out_weights != nullptr, call.gives_weights, tokens_));
    // The weights travel in every forward dispatch: a rank cannot know whether a peer wants them. One that gives none sends
    // zeros, not what lay in the outbox.
    const int64_t value_bytes = int64_t{settings_.top_k} * 4;
    const bool given = call.weights.data != nullptr;
    const void* values = given ? call.weights.data : no_values_;
    const int64_t value_stride = given ? call.weights.stride * 4 : value_bytes;
    void* outbox = nullptr;
    NVTE_EP_TRY(exchange_->outbox(dispatch_need(call.row_bytes), &outbox, stream));
    Travel rows = travel(call.row_bytes);
    Travel weights = travel(value_bytes);
    weights.inbox_at = round_up(most_items() * call.row_bytes, kOperandPartAlignment);
    NVTE_EP_TRY(load(call.rows, call.row_stride, call.readable_rows, outbox, &rows, stream));
    if (!call.backward) {
      NVTE_EP_TRY(load(values, value_stride, given ? tokens_ : route_.tokens,
                       static_cast<uint8_t*>(outbox) + weights.inbox_at, &weights, stream));
    }

    GatherRows gather{};
    gather.rows = exchange_->arrivals(rows);
    if (call.out_weights != nullptr) gather.weights = exchange_->arrivals(weights);
    gather.slot_source = plan_.slot_source;
    gather.slot_k = route_.slot_k;
    gather.slots = slots_;
    gather.slot_count = IndexView{route_.totals, true};
    gather.row_bytes = call.row_bytes;
    gather.out = call.out;
    gather.out_stride = call.out_stride;
    gather.out_weights = call.out_weights;
    gather.part.own_rank = member_->rank;

    const int32_t pieces = num_pieces(rows);
    for (int32_t p = 0; p < pieces; ++p) {
      cut(&rows, p, pieces);
      std::vector<Travel> together{rows};
      if (p == 0 && !call.backward) together.push_back(weights);
      NVTE_EP_TRY(exchange_->begin(together, p, stream));
    }
    gather.part.which = TokenPart::kOwn;  // they have no way to go
    gather.part.end = tokens_;
    gather.top_k = settings_.top_k;
    gather.source_slots = plan_.own_partials;
    NVTE_EP_TRY(member_->backend->gather_rows(gather, stream));
    gather.part.which = TokenPart::kOthers;
    const bool listed = rows.listed != nullptr;
    gather.source_slots = plan_.partials;
    gather.source_rows = listed ? 0 : rows.tokens;
    gather.num_ranks = listed ? 2 : member_->size;  // counted through, as if one other rank had sent them
    for (int32_t p = 0; p < pieces; ++p) {
      cut(&rows, p, pieces);
      gather.part.begin = rows.begin;
      gather.part.end = listed ? plan_.rows.received() : rows.end;
      NVTE_EP_TRY(exchange_->await(p, stream));
      NVTE_EP_TRY(member_->backend->gather_rows(gather, stream));
    }
    return Status();
  }

  Status return_rows(const ReturnRows& call, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(member_->check_alive());
    NVTE_EP_TRY(check_gradients_given(call, slots_));
    if (slot_exchange_ != nullptr && !sums_stay()) return slot_exchange_->return_rows(call, stream);
    ReduceRows reduce{};
    reduce.num_ranks = 1;
    reduce.top_k = settings_.top_k;
    reduce.rows.block = call.slots.data;
    reduce.rows.row_stride = call.slots.stride * dtype_bytes(call.slots.dtype);
    reduce.weights.block = call.slot_weights;
    reduce.weights.row_stride = 4;
    RankArrays scalars;  // zeros for every slot where the caller gives none
    scalars.block = call.slot_scalars != nullptr ? call.slot_scalars : no_values_;
    scalars.row_stride = call.slot_scalars != nullptr ? 4 : 0;
    if (sums_stay()) {
      reduce.slots = plan_.own_partials;
      reduce.result = call.result;
      reduce.accumulate = call.accumulate;
      NVTE_EP_TRY(member_->backend->reduce_rows(reduce, stream));
      if (!call.backward || call.scalars.data == nullptr) return Status();
      return member_->backend->gather_scalars(settings_.top_k, plan_.own_partials, scalars, call.scalars,
                                              stream);
    }
    NVTE_EP_TRY(return_sums(reduce, call, stream));
    // The gradients of the weights travel in every dispatch backward, as the weights did.
    return call.backward ? return_scalars(scalars, call, stream) : Status();
  }

 private:
  // A rank alone has nobody to give sums to: they are the result. A bound on multiprocessors is for the SlotExchange, as the
  // backend has none.
  bool sums_stay() const { return member_->size == 1 && member_->settings.num_sms == 0; }

  TensorView shared_report() const {
    return TensorView{report_.memory(), DType::kInt64, member_->settings.device, 1, {kDeviceCounters, 1}, 1};
  }

  int64_t largest_row() const {
    int64_t bytes = 0;
    for (int32_t format : {settings_.dispatch, settings_.combine_backward}) {
      bytes = std::max(bytes, row_layout(*find_format(format), member_->settings.hidden).row_bytes);
    }
    return bytes;
  }

  // What the outbox or the inbox holds in any step. On the way back listed items are followed by the own ones.
  int64_t most_items() const {
    const int64_t own = plan_.send_tokens != nullptr ? route_.tokens : 0;
    return std::max({plan_.rows.sent(), plan_.rows.received() + own, route_.tokens});
  }
  int64_t first_own() const {
    return plan_.send_tokens != nullptr ? plan_.rows.received() : member_->rank * route_.tokens;
  }
  // Fixed capacity has its outbox from the group's creation on.
  int64_t outbox_need(int64_t item_bytes) const {
    return member_->settings.eager() ? most_items() * item_bytes : 0;
  }
  int64_t dispatch_need(int64_t row_bytes) const {
    return outbox_need(row_bytes + int64_t{settings_.top_k} * 4) + kOperandPartAlignment;
  }

  const ItemCounts* listed(const ItemCounts& counts) const {
    return plan_.send_tokens != nullptr ? &counts : nullptr;
  }

  Travel travel(int64_t item_bytes) const {
    Travel t;
    t.item_bytes = item_bytes;
    t.tokens = t.end = route_.tokens;
    t.listed = listed(plan_.rows);
    return t;
  }

  int32_t num_pieces(const Travel& t) const {
    return t.listed != nullptr ? 1 : exchange_->pieces(t.tokens * t.item_bytes);
  }
  // Of two pieces the one during which this rank has least to do is short: the last on the way to slots, for then there is
  // little left to do, and the first on the way back, which waits for its sums.
  static void cut(Travel* t, int32_t piece, int32_t pieces) {
    const int64_t few = t->tokens / 5;
    const int64_t first = pieces == 1 ? t->tokens : t->to_each ? few : t->tokens - few;
    t->begin = piece == 0 ? 0 : first;
    t->end = piece == 0 ? first : t->tokens;
  }

  // Items of this rank's tokens to where they travel from: where they are, or memory of the outbox. readable: how many of them
  // may be read.
  Status load(const void* items, int64_t stride, int64_t readable, void* memory, Travel* t,
              nvte_ep_stream_t stream) {
    Backend* backend = member_->backend;
    t->items = memory;
    t->own = items;
    t->own_stride = stride;
    if (items == nullptr) return Status();
    if (t->listed != nullptr) {
      GatherRows gather{};
      gather.rows.block = items;
      gather.rows.row_stride = stride;
      gather.slot_source = plan_.send_tokens;
      gather.slots = plan_.rows.sent();
      gather.row_bytes = t->item_bytes;
      gather.out = memory;
      gather.out_stride = t->item_bytes;
      return backend->gather_rows(gather, stream);
    }
    if (member_->size == 1 || (readable >= route_.tokens && stride == t->item_bytes)) {
      t->items = items;
      return Status();
    }
    return backend->copy_rows(memory, t->item_bytes, items, stride, t->item_bytes,
                              std::min(readable, tokens_), stream);
  }

  // One partial row for each row that came, in the order in which they came; the ranks' sums of each token.
  Status return_sums(ReduceRows reduce, const ReturnRows& call, nvte_ep_stream_t stream) {
    Backend* backend = member_->backend;
    const int64_t hidden = member_->settings.hidden;
    const ItemCounts counts = plan_.rows.back();
    Travel back;
    NVTE_EP_TRY(travel_back(hidden * dtype_bytes(call.slots.dtype), counts, &back, stream));
    const auto reduce_some = [&](const SlotAddress* slots, int64_t first, int64_t count) {
      reduce.slots = slots;
      reduce.result = TensorView{
          item(back, first), call.slots.dtype, member_->settings.device, 2, {count, hidden}, hidden};
      return backend->reduce_rows(reduce, stream);
    };
    ReduceRows sum{};
    sum.rows = exchange_->arrivals(back);
    sum.num_ranks = member_->size;
    sum.top_k = member_->size;
    sum.accumulate = call.accumulate;
    const int32_t pieces = num_pieces(back);
    for (int32_t p = 0; p < pieces; ++p) {
      cut(&back, p, pieces);
      for (int32_t r = 0; back.listed == nullptr && r < member_->size; ++r) {
        const int64_t first = r * back.tokens + back.begin;
        if (r == member_->rank) continue;
        NVTE_EP_TRY(reduce_some(plan_.partials + first * settings_.top_k, first, back.end - back.begin));
      }
      if (back.listed != nullptr) NVTE_EP_TRY(reduce_some(plan_.partials, 0, plan_.rows.received()));
      NVTE_EP_TRY(exchange_->begin({back}, p, stream));
    }
    NVTE_EP_TRY(reduce_some(plan_.own_partials, first_own(), tokens_));
    for (int32_t p = 0; p < pieces; ++p) {
      cut(&back, p, pieces);
      NVTE_EP_TRY(exchange_->await(p, stream));
      const int64_t count = std::min(back.end, tokens_) - back.begin;
      if (count <= 0) continue;
      sum.slots = plan_.sums + back.begin * member_->size;
      sum.result = call.result;
      sum.result.data = call.result.row(back.begin);
      sum.result.shape[0] = count;
      NVTE_EP_TRY(backend->reduce_rows(sum, stream));
    }
    return Status();
  }

  // Items that go back, in the outbox: to be written.
  Status travel_back(int64_t item_bytes, const ItemCounts& counts, Travel* back, nvte_ep_stream_t stream) {
    void* outbox = nullptr;
    NVTE_EP_TRY(exchange_->outbox(outbox_need(item_bytes), &outbox, stream));
    *back = travel(item_bytes);
    back->listed = listed(counts);
    back->to_each = true;
    back->items = outbox;
    back->own = item(*back, first_own());
    back->own_stride = item_bytes;
    return Status();
  }
  static uint8_t* item(const Travel& t, int64_t i) {
    return static_cast<uint8_t*>(const_cast<void*>(t.items)) + i * t.item_bytes;
  }

  Status return_scalars(const RankArrays& of_slots, const ReturnRows& call, nvte_ep_stream_t stream) {
    Backend* backend = member_->backend;
    const ItemCounts counts = plan_.rows.back();
    Travel back;
    NVTE_EP_TRY(travel_back(int64_t{settings_.top_k} * 4, counts, &back, stream));
    const auto gather_some = [&](const SlotAddress* slots, int64_t first, int64_t count) {
      const TensorView out{item(back, first),        DType::kFloat32, member_->settings.device, 2,
                           {count, settings_.top_k}, settings_.top_k};
      return backend->gather_scalars(settings_.top_k, slots, of_slots, out, stream);
    };
    NVTE_EP_TRY(gather_some(plan_.partials, 0, plan_.rows.received()));
    NVTE_EP_TRY(exchange_->begin({back}, 0, stream));
    NVTE_EP_TRY(gather_some(plan_.own_partials, first_own(), tokens_));
    NVTE_EP_TRY(exchange_->await(0, stream));
    if (call.scalars.data == nullptr) return Status();
    RankArrays values = exchange_->arrivals(back);
    values.row_stride = values.own_stride = 4;  // a choice, not a token's choices
    return backend->gather_scalars(settings_.top_k, plan_.choices, values, call.scalars, stream);
  }

  Status plan_fixed() {
    slots_ = member_->settings.recv_capacity;
    plan_ = Plan();
    plan_.rows.send.assign(static_cast<size_t>(member_->size), route_.tokens);
    plan_.rows.receive = plan_.rows.send;
    plan_.slot_source = route_.slot_source;
    plan_.partials = route_.in_slots;
    plan_.own_partials = own_partials();
    plan_.sums = route_.rank_rows;
    plan_.choices = route_.rank_choices;
    return Status();
  }

  const SlotAddress* own_partials() const {
    return route_.in_slots + member_->rank * route_.tokens * settings_.top_k;
  }

  // Eager: the host learns the number of slots, and where the exchange can use it, what exactly has to travel.
  Status plan_eager(nvte_ep_stream_t stream) {
    NVTE_EP_TRY(ranks_->wait("prepare", stream));
    NVTE_EP_TRY(plan_fixed());
    int64_t totals[3];
    NVTE_EP_TRY(member_->backend->download(totals, route_.totals, sizeof(totals), stream));
    slots_ = totals[0];
    return exchange_ != nullptr && exchange_->exact_counts() ? plan_exact(stream) : Status();
  }

  // The host reads the routing and lists what has to travel: none of what a rank has for itself.
  Status plan_exact(nvte_ep_stream_t stream) {
    Backend* backend = member_->backend;
    const size_t ranks = static_cast<size_t>(member_->size);
    const int64_t top_k = settings_.top_k;
    const int64_t choices = route_.tokens * top_k;
    std::vector<SlotAddress> in_slots(static_cast<size_t>(choices) * ranks),
        own(static_cast<size_t>(choices));
    std::vector<SlotAddress> sums(static_cast<size_t>(route_.tokens) * ranks);
    std::vector<int64_t> slot_source(static_cast<size_t>(slots_));
    NVTE_EP_TRY(backend->download(in_slots.data(), route_.in_slots, choices * 8 * member_->size, stream));
    NVTE_EP_TRY(backend->download(own.data(), route_.rank_choices, choices * 8, stream));
    NVTE_EP_TRY(backend->download(sums.data(), route_.rank_rows, route_.tokens * 8 * member_->size, stream));
    NVTE_EP_TRY(backend->download(slot_source.data(), route_.slot_source, slots_ * 8, stream));

    plan_ = Plan();
    plan_.own_partials = own_partials();
    plan_.rows.send.assign(ranks, 0);
    plan_.rows.receive.assign(ranks, 0);
    std::vector<int64_t> send_tokens;
    const size_t me = static_cast<size_t>(member_->rank);
    for (size_t r = 0; r < ranks; ++r) {
      if (r == me) continue;
      for (int64_t t = 0; t < tokens_; ++t) {
        SlotAddress& address = sums[static_cast<size_t>(t) * ranks + r];
        if (address < 0) continue;
        address = slot_address(static_cast<int32_t>(r), static_cast<int64_t>(send_tokens.size()));
        send_tokens.push_back(t);
        ++plan_.rows.send[r];
      }
    }
    for (int64_t i = 0; i < choices; ++i) {
      SlotAddress& address = own[static_cast<size_t>(i)];
      if (address < 0) continue;
      const int32_t rank = static_cast<int32_t>(address >> kSlotBits);
      const SlotAddress sum = sums[static_cast<size_t>(i / top_k) * ranks + static_cast<size_t>(rank)];
      address = slot_address(rank, (sum - slot_address(rank, 0)) * top_k + i % top_k);
    }
    std::vector<SlotAddress> partials;
    std::vector<int64_t> place(static_cast<size_t>(route_.tokens) * ranks, -1);
    int64_t received = 0;
    for (size_t r = 0; r < ranks; ++r) {
      if (r == me) continue;
      for (int64_t t = 0; t < route_.tokens; ++t) {
        const SlotAddress* slots = in_slots.data() + static_cast<int64_t>(r) * choices + t * top_k;
        if (std::all_of(slots, slots + top_k, [](SlotAddress a) { return a < 0; })) continue;
        partials.insert(partials.end(), slots, slots + top_k);
        place[r * static_cast<size_t>(route_.tokens) + static_cast<size_t>(t)] = received++;
        ++plan_.rows.receive[r];
      }
    }
    for (int64_t& source : slot_source) {
      const int64_t rank = source >> 32;
      if (source < 0 || rank == member_->rank) continue;
      source = rank << 32 | place[static_cast<size_t>(rank * route_.tokens + (source & 0xFFFFFFFF))];
    }
    const struct {
      DeviceBuffer& buffer;
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

  Status hand_out(const PrepareCall& call, nvte_ep_stream_t stream) {
    Backend* backend = member_->backend;
    const struct {
      const TensorView& out;
      const int64_t* counts;
    } outputs[] = {{call.tokens_routed, route_.tokens_routed},
                   {call.tokens_per_expert, route_.tokens_per_expert},
                   {call.rows_per_expert, route_.rows_per_expert},
                   {call.row_offsets, route_.row_offsets},
                   {call.scale_row_offsets, route_.scale_row_offsets},
                   {call.total_rows, route_.totals},
                   {call.dropped_rows, route_.totals + 1}};
    for (const auto& o : outputs) {
      if (o.out.data != nullptr) NVTE_EP_TRY(backend->write_index(o.out, o.counts, stream));
    }
    if (call.total_rows_host != nullptr) *call.total_rows_host = slots_;
    const struct {
      const char* name;
      const TensorView& out;
      const void* slots;
    } maps[] = {{"slot_source", call.slot_source, route_.slot_source},
                {"slot_expert", call.slot_expert, route_.slot_expert}};
    for (const auto& m : maps) {
      if (m.out.ndim == 0) continue;
      if (m.out.size() < slots_) {
        return invalid_argument(m.name, ": expected at least ", slots_, " slots, got ", m.out.size());
      }
      NVTE_EP_TRY(backend->copy_words(m.out.data, m.slots, dtype_bytes(m.out.dtype) / 4, slots_,
                                      IndexView{route_.totals, true}, stream));
    }
    return Status();
  }

  const std::shared_ptr<DeviceMember> member_;
  const std::shared_ptr<RoutingRanks> ranks_;
  DeviceExchange* const exchange_;  // the same
  const HandleSettings settings_;
  DeviceBuffer memory_;
  DeviceBuffer lists_[5];
  Route route_;
  std::unique_ptr<SlotExchange> slot_exchange_;
  Plan plan_;
  int32_t* clean_ = nullptr;
  int32_t* all_ = nullptr;
  float* no_values_ = nullptr;   // [tokens, top_k] zeros; one where a SlotExchange moves rows
  int64_t* counters_ = nullptr;  // DeviceCounters on the device
  DeviceReport report_;          // the host's view of them
  int64_t tokens_ = 0;
  int64_t slots_ = 0;
  bool agreed_ = false;
  bool prepared_ = false;
};

std::unique_ptr<GroupTransport> make_group(const char* name, const GroupSettings& settings, Backend* backend,
                                           int32_t rank, int32_t size,
                                           const std::shared_ptr<RoutingRanks>& ranks,
                                           DeviceExchange* exchange) {
  auto member = std::make_shared<DeviceMember>();
  member->ranks = ranks;
  member->settings = settings;
  member->backend = backend;
  member->rank = rank;
  member->size = size;
  return make_device_group(Capabilities{name, true, true, false}, member,
                           [member, ranks, exchange](const HandleSettings& handle_settings,
                                                     std::unique_ptr<HandleTransport>* handle) {
                             auto created =
                                 std::make_unique<DeviceHandle>(member, ranks, exchange, handle_settings);
                             NVTE_EP_TRY(created->allocate());
                             *handle = std::move(created);
                             return Status();
                           });
}

}  // namespace

std::unique_ptr<GroupTransport> make_device_group(const char* name, const GroupSettings& settings,
                                                  Backend* backend, int32_t rank, int32_t size,
                                                  std::unique_ptr<DeviceExchange> exchange) {
  DeviceExchange* const same = exchange.get();
  return make_group(name, settings, backend, rank, size, std::move(exchange), same);
}

std::unique_ptr<GroupTransport> make_slot_group(const char* name, const GroupSettings& settings,
                                                Backend* backend, int32_t rank, int32_t size,
                                                std::unique_ptr<RoutingRanks> ranks) {
  return make_group(name, settings, backend, rank, size, std::move(ranks), nullptr);
}

std::vector<Agreed> group_agreement(const GroupSettings& settings) {
  return {{"num_experts", settings.num_experts},
          {"hidden", settings.hidden},
          {"max_tokens_per_rank", settings.max_tokens_per_rank},
          {"max_top_k", settings.max_top_k},
          {"recv_capacity", settings.recv_capacity},
          {"overflow", settings.drop_on_overflow},
          {"zero_copy", settings.zero_copy}};
}

int64_t outbox_bytes(const GroupSettings& settings, int32_t size) {
  // For every token of every rank a partial sum in FP32, a row with its weights, or a token's choices.
  const int64_t weights = int64_t{settings.max_top_k} * 4;
  return settings.max_tokens_per_rank * size * std::max(settings.hidden * 4, settings.hidden * 2 + weights) +
         kOperandPartAlignment;
}

int64_t device_handle_bytes(const GroupSettings& settings, int32_t size) {
  const int64_t choices = settings.max_tokens_per_rank * settings.max_top_k;
  const int64_t local = settings.num_experts / size;
  const int64_t slots = settings.eager() ? choices * size + local * 127 : settings.recv_capacity;
  return choices * (4 + 8) * (size + 1) + choices * 4 + settings.max_tokens_per_rank * size * 8 + slots * 16 +
         local * 40 + handle_scratch_bytes(settings);
}

}  // namespace nvte_ep
