#include "transports/peer/peer_handle.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/pipeline.h"
#include "transports/device_buffer.h"
#include "transports/peer/combine.h"
#include "transports/peer/dispatch.h"
#include "transports/peer/found_rows.h"
#include "transports/peer/prepare.h"

// What runs:
//
//   prepare            publish indices and meet | scan | assign                   a few tokens: one launch
//   dispatch           pack | publish and meet | deliver                          pack only where rows are not packed yet
//   with columns       pack | publish and meet | find rows, exponents | copy peers' rows | tiles (of direct receive)
//   combine            partial rows and meet | sum, beside it partial rows and meet | .. | sum       passes of tokens
namespace nvte_ep {
namespace {

// Partial rows of so many bytes: one half is made while the other is on the links.
constexpr int64_t kWorthTwoPasses = int64_t{24} << 20;

bool is_aligned(const void* pointer, int64_t stride_bytes) {
  return (reinterpret_cast<uintptr_t>(pointer) | static_cast<uintptr_t>(stride_bytes)) % 16 == 0;
}

// Slots that no routing can exceed.
int64_t most_slots(const GroupSettings& g, int32_t size, int32_t top_k, int64_t alignment) {
  const int64_t local = g.num_experts / size;
  const int64_t copies = std::min<int64_t>(top_k, local);  // of a token on one rank
  return g.max_tokens_per_rank * copies * size + local * (alignment - 1);
}

class PeerHandle : public HandleTransport {
 public:
  PeerHandle(std::shared_ptr<DeviceMember> member, std::shared_ptr<PeerGroup> group,
             const HandleSettings& settings)
      : member_(std::move(member)), group_(std::move(group)), settings_(settings) {}
  ~PeerHandle() override { member_->remove(&report_); }

  Status allocate() {
    const GroupSettings& g = member_->settings;
    Backend* backend = member_->backend;
    RouteMaps& m = maps_;
    m.rank = member_->rank;
    m.size = member_->size;
    m.num_experts = g.num_experts;
    m.top_k = settings_.top_k;
    m.tokens = static_cast<int32_t>(g.max_tokens_per_rank);
    m.alignment = settings_.alignment;
    m.capacity = g.eager() ? most_slots(g, m.size, m.top_k, m.alignment) : g.recv_capacity;
    if (m.capacity > std::numeric_limits<int32_t>::max()) {
      return unsupported("peer: expected at most 2^31 - 1 slots, the group needs ", m.capacity);
    }
    const int64_t experts = m.local_experts();
    const int64_t chunks = prepare_chunks(m.tokens);
    const auto pointer = [](auto** p) { return reinterpret_cast<void**>(p); };
    const struct {
      void** pointer;
      int64_t bytes;
    } parts[] = {{pointer(&m.row_slots), m.choices() * m.size * 4},
                 {pointer(&m.slot_source), m.capacity * 8},
                 {pointer(&m.kept_experts), m.choices() * 4},
                 {pointer(&m.holders), int64_t{m.tokens} * m.holder_words() * 4},
                 {pointer(&m.tokens_routed), experts * 8},
                 {pointer(&m.tokens_per_expert), experts * 8},
                 {pointer(&m.rows_per_expert), experts * 8},
                 {pointer(&m.row_offsets), (experts + 1) * 8},
                 {pointer(&m.scale_row_offsets), (experts + 1) * 8},
                 {pointer(&m.totals), 2 * 8},
                 {pointer(&counters_), kDeviceCounters * 8},
                 {pointer(&told_), kDeviceCounters * 8},
                 {pointer(&found_rows_), m.capacity * 8},
                 {pointer(&zero_row_), largest_row()},
                 {pointer(&exponents_), experts * 2},
                 {pointer(&exponent_sums_), experts * 4},
                 {pointer(&peer_rows_), (m.size - 1) * int64_t{m.tokens} * largest_operand_row()},
                 {pointer(&tails_shares_), sizeof(TailsShares)},
                 {pointer(&starts_), chunks * m.size * m.num_experts * 4},
                 {pointer(&totals_), m.num_experts * int64_t{4}}};
    int64_t total = 0;
    for (const auto& p : parts) total += round_up(p.bytes, kOperandPartAlignment);
    NVTE_EP_TRY(memory_.reserve(backend, total));
    int64_t at = 0;
    for (const auto& p : parts) {
      *p.pointer = memory_.as<uint8_t>() + at;
      at += round_up(p.bytes, kOperandPartAlignment);
    }
    NVTE_EP_TRY(report_.allocate(backend));
    member_->add(&report_, settings_.id);
    return Status();
  }

  Status prepare(const PrepareCall& call, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(member_->begin_prepare(settings_, stream, &agreed_));
    prepared_ = false;
    const bool eager = member_->settings.eager();
    tokens_ = call.topk_idx.rows();
    const PoolLayout& pool = group_->layout();
    PrepareArguments a{};
    a.pools = group_->pools();
    a.meeting = group_->meeting(signature_of(PeerCall::kPrepare, settings_.id));
    a.indices = pool.indices;
    a.histograms = pool.histograms;
    a.inbox = pool.inbox;
    a.maps = maps_;
    a.topk_idx = call.topk_idx.data;
    a.is_int64 = call.topk_idx.dtype == DType::kInt64;
    a.stride = call.topk_idx.stride;
    a.given_tokens = static_cast<int32_t>(tokens_);
    a.starts = starts_;
    a.totals = totals_;
    a.ticket = group_->ticket();
    const auto view = [](const TensorView& t) { return IndexView{t.data, t.dtype == DType::kInt64}; };
    a.tokens_routed = view(call.tokens_routed);
    a.tokens_per_expert = view(call.tokens_per_expert);
    a.rows_per_expert = view(call.rows_per_expert);
    a.row_offsets = view(call.row_offsets);
    a.scale_row_offsets = view(call.scale_row_offsets);
    a.total_rows = view(call.total_rows);
    a.dropped_rows = view(call.dropped_rows);
    // An eager group's slot maps are written once their size is known.
    a.slot_source = eager ? nullptr : static_cast<int64_t*>(call.slot_source.data);
    a.slot_expert = eager ? nullptr : static_cast<int32_t*>(call.slot_expert.data);
    a.counters = counters_;
    a.told = told_;
    a.report = report_.memory();
    a.reported = report_.reported();
    NVTE_EP_TRY(group_->launch(stream, [&](const LaunchContext& c) {
      NVTE_EP_TRY(launch_prepare(a, c));
      return last_captured(stream, &after_prepare_);
    }));
    slots_ = member_->settings.recv_capacity;
    if (eager) NVTE_EP_TRY(learn_slots(call, stream));
    prepared_ = true;
    return eager ? hand_out_slots(call, stream) : Status();
  }

  bool prepared() const override { return prepared_; }

  RoutingView routing() const override {
    RoutingView view;
    view.tokens = tokens_;
    view.rows_per_expert = IndexView{maps_.rows_per_expert, true};
    view.total_rows = IndexView{maps_.totals, true};
    view.slot_source = maps_.slot_source;
    view.slots = slots_;
    return view;
  }

  bool takes_dispatch() const override { return true; }

  Status dispatch(const DispatchCall& call, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(member_->check_alive());
    NVTE_EP_TRY(check_weights_given(call.recv_weights.data != nullptr, call.gives_weights, tokens_));
    const int32_t format = call.backward ? settings_.combine_backward : settings_.dispatch;
    const RowLayout layout = row_layout(*find_format(format), member_->settings.hidden);
    TravellingRows rows;
    NVTE_EP_TRY(pack(call, format, layout, &rows, stream));
    const bool by_bands = call.receive == NVTE_EP_RECEIVE_OPERAND && !wants_columns(call.operand);
    NVTE_EP_TRY(publish(call, format, layout, rows, stream));

    DeliverArguments a = deliver_arguments(call, layout, rows);
    const auto deliver = [&](SlotForm form) {
      return group_->launch(stream, [&](const LaunchContext& c) {
        return launch_deliver(form, format, call.received.dtype, a, c);
      });
    };
    if (by_bands) {
      set_operand(call, layout, &a);
      return deliver(SlotForm::kOperand);
    }
    const TensorView& received = call.received;
    const int64_t stride = received.stride * dtype_bytes(received.dtype);
    if (call.receive != NVTE_EP_RECEIVE_OPERAND && !call.is_weighted() && is_aligned(received.data, stride)) {
      a.out = static_cast<uint8_t*>(received.data);
      a.out_stride = stride;
      const bool as_it_is = call.receive == NVTE_EP_RECEIVE_ROWS ||
                            (format == NVTE_EP_FORMAT_BF16 && received.dtype == DType::kBFloat16);
      const int64_t bytes =
          as_it_is ? layout.row_bytes : member_->settings.hidden * dtype_bytes(received.dtype);
      a.chunks = static_cast<int32_t>(bytes / 16);
      return deliver(as_it_is ? SlotForm::kBytes : SlotForm::kDecoded);
    }
    // Operands with columns, gradients times weights, and tokens at any alignment: from the rows where they are.
    if (a.out_weights != nullptr) NVTE_EP_TRY(deliver(SlotForm::kBytes));
    return receive_found(call, format, layout, rows, stream);
  }

  Status send_rows(const SendRows&, nvte_ep_stream_t) override {
    return Status(NVTE_EP_STATUS_INTERNAL, "peer takes a dispatch whole");
  }

  Status return_rows(const ReturnRows& call, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(member_->check_alive());
    NVTE_EP_TRY(check_gradients_given(call, routing().slots));
    const DType dtype = call.slots.dtype;
    const PoolLayout& pool = group_->layout();
    CombineArguments a{};
    a.pools = group_->pools();
    a.maps = maps_;
    a.mxfp8 = call.format == NVTE_EP_FORMAT_MXFP8;
    a.outbox = pool.outbox;
    a.slots = static_cast<const uint8_t*>(call.slots.data);
    a.slot_stride = call.slots.stride * dtype_bytes(dtype);
    a.slot_weights = call.slot_weights;
    a.slot_values = call.slot_scalars;
    a.values = pool.gradients;
    a.tokens = static_cast<int32_t>(tokens_);
    a.result = static_cast<uint8_t*>(call.result.data);
    a.result_stride = call.result.stride * dtype_bytes(dtype);
    a.accumulate = call.accumulate;
    a.own_value_stride = call.scalars.stride;
    a.counters = counters_;
    a.report = report_.memory();
    a.send_values = call.backward;
    a.own_values = static_cast<float*>(call.scalars.data);
    a.ticket = group_->ticket();
    a.meeting = group_->meeting(
        signature_of(call.backward ? PeerCall::kDispatchBackward : PeerCall::kCombine, settings_.id, dtype));
    a.chunks = static_cast<int32_t>(member_->settings.hidden * dtype_bytes(dtype) / 16);
    const int32_t pass = maps_.size == 1 ? maps_.tokens : tokens_of_a_pass(dtype, a.mxfp8);
    const auto tokens_from = [&](int32_t first) {
      TokenRange tokens;
      tokens.first = first;
      tokens.count = std::max(0, std::min(pass, maps_.tokens - first));
      return tokens;
    };
    return group_->launch(stream, [&](const LaunchContext& c) {
      if (maps_.size > 1) NVTE_EP_TRY(launch_combine(dtype, a, TokenRange(), tokens_from(0), c));
      for (int32_t first = 0; first < maps_.tokens; first += pass) {
        const TokenRange next = maps_.size > 1 ? tokens_from(first + pass) : TokenRange();
        NVTE_EP_TRY(launch_combine(dtype, a, tokens_from(first), next, c));
      }
      return Status();
    });
  }

 private:
  int64_t largest_row() const {
    int64_t bytes = 0;
    for (int32_t format : {settings_.dispatch, settings_.combine_backward}) {
      bytes = std::max(bytes, row_layout(*find_format(format), member_->settings.hidden).row_bytes);
    }
    return bytes;
  }

  // 0: no direction has an operand.
  int64_t largest_operand_row() const {
    int64_t bytes = 0;
    for (int32_t format : {settings_.dispatch, settings_.combine_backward}) {
      const FormatRow& traits = *find_format(format);
      if (traits.operand_multiple == 0) continue;
      bytes = std::max(bytes, row_layout(traits, member_->settings.hidden).row_bytes);
    }
    return bytes;
  }

  // Of few rows bands read the tails where they are.
  bool brings_tails() const { return maps_.size > 1 && !few_rows(maps_); }

  static bool wants_columns(const OperandView& o) {
    return o.columnwise() || o.columnwise_amax != nullptr || o.columnwise_expert_scale != nullptr;
  }

  // Rows of the wire format stay where they are, others go into the outbox.
  Status pack(const DispatchCall& call, int32_t format, const RowLayout& layout, TravellingRows* rows,
              nvte_ep_stream_t stream) {
    rows->outbox = group_->layout().outbox;
    rows->row_bytes = layout.row_bytes;
    const int64_t stride = call.tokens.stride * dtype_bytes(call.tokens.dtype);
    if (call.is_wire(format) && is_aligned(call.tokens.data, stride)) {
      rows->own = static_cast<const uint8_t*>(call.tokens.data);
      rows->own_stride = stride;
      return Status();
    }
    if (tokens_ == 0) return Status();
    RowsView packed = packed_rows(format, group_->pools().own + rows->outbox.offset, layout.row_bytes,
                                  tokens_, member_->settings.hidden);
    if (maps_.size == 1) {  // nobody else looks, and there may be no meeting
      rows->own = packed.payload;
      rows->own_stride = layout.row_bytes;
    } else {
      packed.flip = group_->pools().epoch;
      packed.flip_bytes = rows->outbox.distance();
    }
    Backend* backend = member_->backend;
    if (call.is_apart) return backend->assemble(format, call.apart, packed, call.options, stream);
    // A graph in which nothing comes between prepare and this: tokens are there when prepare begins.
    CodecOptions options = call.options;
    CapturedNode now;
    NVTE_EP_TRY(group_->launch(stream, [&](const LaunchContext&) { return last_captured(stream, &now); }));
    options.reads_ahead = now.node != nullptr && now == after_prepare_ && few_rows(maps_);
    return backend->quantize(format, call.tokens, packed, options, stream);
  }

  Status publish(const DispatchCall& call, int32_t format, const RowLayout& layout,
                 const TravellingRows& rows, nvte_ep_stream_t stream) {
    PublishArguments a{};
    a.pools = group_->pools();
    a.meeting = group_->meeting(
        signature_of(call.backward ? PeerCall::kCombineBackward : PeerCall::kDispatch, settings_.id));
    a.maps = maps_;
    a.rows = rows;
    a.copy_rows = rows.own != nullptr && maps_.size > 1;
    a.tokens = static_cast<int32_t>(tokens_);
    a.weights = group_->layout().weights;
    a.own_weights = static_cast<const float*>(call.weights.data);
    a.own_weight_stride = call.weights.stride;
    a.send_weights = a.own_weights != nullptr && maps_.size > 1;
    a.gives_weights = call.gives_weights || tokens_ == 0;
    a.exponents = group_->layout().exponents;
    // Whatever this rank wants of its slots, a peer may want an operand.
    a.send_exponents = format == NVTE_EP_FORMAT_NVFP4 && !few_rows(maps_) &&
                       (call.receive == NVTE_EP_RECEIVE_OPERAND || maps_.size > 1);
    if (maps_.size == 1 && !a.send_exponents) return Status();  // nobody to tell, nothing to wait for
    a.token_scale_offset = layout.token_scale_offset;
    a.ticket = group_->ticket();
    a.tails_shares = brings_tails() ? tails_shares_ : nullptr;
    return group_->launch(stream, [&](const LaunchContext& c) { return launch_publish(a, c); });
  }

  DeliverArguments deliver_arguments(const DispatchCall& call, const RowLayout& layout,
                                     const TravellingRows& rows) const {
    DeliverArguments a{};
    a.pools = group_->pools();
    a.maps = maps_;
    a.rows = rows;
    a.out_weights = static_cast<float*>(call.recv_weights.data);
    a.weights = group_->layout().weights;
    a.own_weights = static_cast<const float*>(call.weights.data);
    a.own_weight_stride = call.weights.stride;
    a.counters = counters_;
    a.report = report_.memory();
    a.payload_bytes = layout.payload_bytes;
    a.token_scale_offset = layout.token_scale_offset;
    return a;
  }

  // The rowwise operand.
  void set_operand(const DispatchCall& call, const RowLayout& layout, DeliverArguments* a) const {
    const OperandView& operand = call.operand;
    a->out = operand.payload;
    a->out_stride = layout.payload_bytes;
    a->chunks = static_cast<int32_t>(layout.payload_bytes / 16);
    a->exponents = group_->layout().exponents;
    a->exponents_travel = !few_rows(maps_);
    a->tails = brings_tails() ? peer_rows_ : nullptr;
    a->tail_bytes = layout.row_bytes - layout.payload_bytes;
    a->tails_shares = tails_shares_;
    OperandScales& o = a->operand;
    o.scales = operand.scales;
    o.linear = operand.shape.linear_scales;
    o.layout = layout;
    o.columns = layout.scale_bytes;
    o.amax = operand.amax;
    o.expert_scale = operand.expert_scale;
    o.fixed_expert_scale = call.options.fixed_expert_scale;
    o.findings = call.options.findings;
    OperandShape shape = operand.shape;
    shape.capacity = slots_;
    o.bands = shape.scale_rows() / kScaleTileRows;
  }

  Status receive_found(const DispatchCall& call, int32_t format, const RowLayout& layout,
                       const TravellingRows& rows, nvte_ep_stream_t stream) {
    FindRowsArguments find{};
    find.pools = group_->pools();
    find.maps = maps_;
    find.rows = rows;
    find.zero_row = zero_row_;
    find.found = found_rows_;
    find.ticket = group_->ticket();
    RowsView found = packed_rows(format, zero_row_, layout.row_bytes, slots_, member_->settings.hidden);
    found.anywhere = found_rows_;
    DispatchCall receive = call;
    if (call.receive == NVTE_EP_RECEIVE_OPERAND && call.operand.columnwise()) {
      if (format == NVTE_EP_FORMAT_NVFP4 && !few_rows(maps_)) {  // of few rows direct receive finds them
        find_exponents(call, layout, &find.exponents);
        receive.options.expert_exponents = find.exponents.found;
      }
      // A row is read once for each of its slots: over the links it goes once.
      if (maps_.size > 1) {
        find.copies = peer_rows_;
        found.late_begin = peer_rows_;
        found.late_end = peer_rows_ + (maps_.size - 1) * int64_t{maps_.tokens} * layout.row_bytes;
      }
    }
    NVTE_EP_TRY(group_->launch(stream, [&](const LaunchContext& c) {
      NVTE_EP_TRY(launch_find_rows(find, c));
      return find.copies != nullptr ? launch_copy_rows(find, c) : Status();
    }));
    return receive_rows(member_->backend, format, found, routing(), receive, stream);
  }

  void find_exponents(const DispatchCall& call, const RowLayout& layout, FoundExponents* x) const {
    x->found = exponents_;
    x->sums = exponent_sums_;
    x->maxima = group_->layout().exponents;
    x->token_scale_offset = layout.token_scale_offset;
    x->fixed_expert_scale = call.options.fixed_expert_scale;
    x->column_max = call.options.column_max;
    x->amax = call.operand.amax;
    x->columnwise_amax = call.operand.columnwise_amax;
    x->expert_scale = call.operand.expert_scale;
    x->columnwise_expert_scale = call.operand.columnwise_expert_scale;
    x->findings = call.options.findings;
  }

  // Tokens are given back in passes whose partial rows fit the outbox, the same on every rank.
  int32_t tokens_of_a_pass(DType dtype, bool mxfp8) const {
    const int64_t of_a_token = (maps_.size - 1) * partial_row_bytes(dtype, mxfp8, member_->settings.hidden);
    const int64_t passes = of_a_token * maps_.tokens >= kWorthTwoPasses ? 2 : 1;
    const int64_t most = group_->layout().outbox.bytes / of_a_token;
    return static_cast<int32_t>(std::min(most, (maps_.tokens + passes - 1) / passes));
  }

  // Eager: the host learns the number of slots.
  Status learn_slots(const PrepareCall& call, nvte_ep_stream_t stream) {
    NVTE_EP_TRY(group_->wait(stream));
    NVTE_EP_TRY(member_->backend->download(&slots_, maps_.totals, sizeof(slots_), stream));
    if (call.total_rows_host != nullptr) *call.total_rows_host = slots_;
    return Status();
  }

  Status hand_out_slots(const PrepareCall& call, nvte_ep_stream_t stream) {
    const struct {
      const char* name;
      const TensorView& out;
    } outputs[] = {{"slot_source", call.slot_source}, {"slot_expert", call.slot_expert}};
    for (const auto& o : outputs) {
      if (o.out.ndim != 0 && o.out.size() < slots_) {
        return invalid_argument(o.name, ": expected at least ", slots_, " slots, got ", o.out.size());
      }
    }
    return group_->launch(stream, [&](const LaunchContext& c) {
      return launch_copy_slots(maps_, static_cast<int64_t*>(call.slot_source.data),
                               static_cast<int32_t*>(call.slot_expert.data), c);
    });
  }

  const std::shared_ptr<DeviceMember> member_;
  const std::shared_ptr<PeerGroup> group_;
  const HandleSettings settings_;
  DeviceBuffer memory_;
  RouteMaps maps_;
  const uint8_t** found_rows_ = nullptr;
  uint8_t* zero_row_ = nullptr;
  uint8_t* peer_rows_ =
      nullptr;  // copies of the peers' rows for operands with columns, of their tails for others
  TailsShares* tails_shares_ = nullptr;
  uint8_t* exponents_ = nullptr;
  uint32_t* exponent_sums_ = nullptr;
  int32_t* starts_ = nullptr;
  int32_t* totals_ = nullptr;
  int64_t* counters_ = nullptr;  // DeviceCounters on the device
  int64_t* told_ = nullptr;      // those that the host knows
  DeviceReport report_;          // the host's view of them
  CapturedNode after_prepare_;
  int64_t tokens_ = 0;
  int64_t slots_ = 0;
  bool agreed_ = false;
  bool prepared_ = false;
};

}  // namespace

Status make_peer_handle(std::shared_ptr<DeviceMember> member, std::shared_ptr<PeerGroup> group,
                        const HandleSettings& settings, std::unique_ptr<HandleTransport>* handle) {
  auto created = std::make_unique<PeerHandle>(std::move(member), std::move(group), settings);
  NVTE_EP_TRY(created->allocate());
  *handle = std::move(created);
  return Status();
}

int64_t peer_handle_bytes(const GroupSettings& g, int32_t size) {
  const int64_t local = g.num_experts / size;
  const int64_t choices = g.max_tokens_per_rank * g.max_top_k;
  const int64_t slots = g.eager() ? most_slots(g, size, g.max_top_k, kScaleTileRows) : g.recv_capacity;
  const int64_t row = row_layout(*find_format(NVTE_EP_FORMAT_BF16), g.hidden).row_bytes;
  int64_t operand_row = 0;
  for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    if (g.hidden % find_format(format)->hidden_multiple != 0) continue;
    operand_row = std::max(operand_row, row_layout(*find_format(format), g.hidden).row_bytes);
  }
  return choices * 4 * (size + 1) + g.max_tokens_per_rank * ((size + 31) / 32) * 4 + slots * 16 + row +
         local * 46 + (prepare_chunks(g.max_tokens_per_rank) * size + 1) * g.num_experts * 4 +
         (size - 1) * g.max_tokens_per_rank * operand_row;
}

}  // namespace nvte_ep
