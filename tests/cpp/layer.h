// One MoE layer over all ranks, forward and backward, every output compared with the model byte for byte. A case is data; the
// runner knows no transport and no memory but those it is given, and every rank of it works from the case and the inputs
// alone, so that ranks may be threads or processes.
#ifndef NVTE_EP_TESTS_LAYER_H_
#define NVTE_EP_TESTS_LAYER_H_

#include "model.h"

namespace ep_test {

// Where a case runs: a transport, and the memory that its tensors live in.
struct Venue {
  std::string name;
  int32_t transport = NVTE_EP_TRANSPORT_AUTO;
  const Memory* memory = &host_memory();
  bool exact_sums = true;  // sums of slots are rounded once; else the part of each rank too
  bool mxfp8_sums = true;  // they may travel in mxfp8; else cases that want it get bf16
  int max_ranks = 64;
};

inline void PrintTo(const Venue& venue, std::ostream* out) { *out << venue.name; }

enum class Input { kTokens, kRows, kApart };
enum class Capacity { kAmple, kEager, kNeed, kNeedLessUnit, kHalf, kUnit };

struct LayerCase {
  std::string name = "layer";
  int ranks = 2;
  int experts_per_rank = 2;
  int top_k = 2;
  int64_t hidden = 64;
  int64_t max_tokens = 16;
  int alignment = 16;
  int32_t dispatch = NVTE_EP_FORMAT_NVFP4;
  int32_t combine = NVTE_EP_FORMAT_BF16;
  int32_t dispatch_backward = NVTE_EP_FORMAT_BF16;
  int32_t combine_backward = NVTE_EP_FORMAT_NVFP4;
  Capacity capacity = Capacity::kAmple;
  bool drop = false;
  Type index_type = Type::kInt64;     // of topk_idx
  Type count_type = Type::kInt64;     // of the counts that prepare gives
  Type token_type = Type::kBFloat16;  // of tokens, gradients and expert outputs
  Type received_type = Type::kBFloat16;
  Input input = Input::kTokens;
  bool tensor_scale = false;  // nvfp4
  int32_t receive = NVTE_EP_RECEIVE_DECODED;
  int32_t backward_receive = NVTE_EP_RECEIVE_DECODED;
  int32_t scale_layout = NVTE_EP_SCALE_LAYOUT_SWIZZLED;
  bool columnwise = false;
  bool stochastic = false;
  bool scale_up = false;
  bool column_max = false;
  bool saturate = false;
  bool weights = true;        // topk_weights travel, and their gradients come back
  bool slot_weights = false;  // combine multiplies by them, its backward gives their gradient
  bool accumulate = false;
  bool strided = false;     // gaps between rows, and more rows than needed where that is allowed
  bool no_outputs = false;  // prepare is asked for nothing
};

inline void PrintTo(const LayerCase& c, std::ostream* out) { *out << c.name; }

constexpr float kTensorScale = 0x1p-6f;

inline int num_experts(const LayerCase& c) { return c.ranks * c.experts_per_rank; }

// ---- inputs ----------------------------------------------------------------------------------------------------------------

inline RankInputs random_inputs(const LayerCase& c, int64_t tokens, Random* random) {
  RankInputs in;
  in.tokens = tokens;
  in.x = random_tokens(random, tokens, c.hidden);
  in.grad = random_tokens(random, tokens, c.hidden);
  for (int64_t t = 0; t < tokens; ++t) {
    const bool unrouted = random->chance(0.05);
    std::vector<int64_t> left(static_cast<size_t>(num_experts(c)));
    for (size_t e = 0; e < left.size(); ++e) left[e] = static_cast<int64_t>(e);
    for (int k = 0; k < c.top_k; ++k) {
      // Low experts are favoured; none comes twice.
      const size_t pick = static_cast<size_t>(std::min(random->below(static_cast<int64_t>(left.size())),
                                                       random->below(static_cast<int64_t>(left.size()))));
      const bool none = unrouted || random->chance(0.05) || left.size() == 1;
      in.experts.push_back(none ? -1 : left[pick]);
      if (!none) left.erase(left.begin() + static_cast<std::ptrdiff_t>(pick));
      in.weights.push_back(none ? std::numeric_limits<float>::quiet_NaN()
                                : static_cast<float>(random->uniform()));
    }
  }
  return in;
}

// Tokens per rank of every step are different, the maximum in the first.
inline std::vector<Step> random_steps(const LayerCase& c, int steps) {
  Random random(seed_of(c.name));
  std::vector<Step> out(static_cast<size_t>(steps));
  for (int s = 0; s < steps; ++s) {
    for (int r = 0; r < c.ranks; ++r) {
      const int64_t tokens = s == 0 ? c.max_tokens : random.below(c.max_tokens + 1);
      out[static_cast<size_t>(s)].ranks.push_back(random_inputs(c, tokens, &random));
    }
  }
  return out;
}

// ---- the plan: what is known before a rank starts --------------------------------------------------------------------------

inline nvte_ep_codec_options_t codec_options(const LayerCase& c, int32_t format, int rank, Array* rng,
                                             Array* tensor_scale) {
  nvte_ep_codec_options_t options = NVTE_EP_CODEC_OPTIONS_INIT;
  if (format != NVTE_EP_FORMAT_NVFP4) return options;
  options.rounding = c.stochastic ? NVTE_EP_ROUNDING_STOCHASTIC : NVTE_EP_ROUNDING_NEAREST;
  options.nonfinite = c.saturate ? NVTE_EP_NONFINITE_SATURATE : NVTE_EP_NONFINITE_PROPAGATE;
  options.scale_rounding = c.scale_up ? NVTE_EP_SCALE_ROUNDING_UP : NVTE_EP_SCALE_ROUNDING_NEAREST;
  options.column_bound = c.column_max ? NVTE_EP_COLUMN_BOUND_MAX : NVTE_EP_COLUMN_BOUND_L1;
  options.rng_state = c.stochastic ? rng->tensor() : nullptr;
  options.tensor_scale = c.tensor_scale && tensor_scale ? tensor_scale->tensor() : nullptr;
  options.rank = rank;
  options.row_id_base = rank * c.max_tokens;
  return options;
}

inline std::vector<int64_t> rng_state(int step, bool backward) {
  return {1234567, 1000 * step + (backward ? 500 : 0)};
}

// One direction's rows as a rank sends them, and as they travel.
struct SentRows {
  ApartRows apart;
  Bytes rows;
};
inline SentRows sent_rows(const LayerCase& c, int32_t format, int rank, int step, bool backward,
                          const std::vector<float>& x) {
  Array rng(host_memory(), Type::kInt64, {2}, bytes_of(rng_state(step, backward)));
  Array scale(host_memory(), Type::kFloat32, {1}, bytes_of(std::vector<float>{kTensorScale}));
  const nvte_ep_codec_options_t options = codec_options(c, format, rank, &rng, &scale);
  SentRows sent;
  if (c.input == Input::kApart && format != NVTE_EP_FORMAT_BF16) {
    sent.apart = quantize(format, c.token_type, x, c.hidden, &options);
    sent.rows = assemble(format, sent.apart, c.hidden, kTensorScale);
  } else {
    sent.rows = pack(format, c.token_type, x, c.hidden, &options);
  }
  return sent;
}

struct StepPlan {
  Step step;
  std::vector<Routed> routed;
  std::vector<std::vector<SlotPlace>> places;
  std::vector<SentRows> forward, backward;
  std::vector<SlotValues> expert_out, slot_grads;  // as their arrays hold them; padding is NaN
};

struct Plan {
  int64_t capacity = 0;  // of the group; 0: eager
  std::vector<StepPlan> steps;
};

inline int64_t capacity_of(const LayerCase& c, const std::vector<Step>& steps) {
  int64_t need = c.alignment;
  for (const Step& step : steps) {
    for (int r = 0; r < c.ranks; ++r) {
      need = std::max(need, route(step, r, c.experts_per_rank, c.top_k, c.alignment, 0).needed_rows);
    }
  }
  switch (c.capacity) {
    case Capacity::kAmple:
      return need + 3 * c.alignment;
    case Capacity::kEager:
      return 0;
    case Capacity::kNeed:
      return need;
    case Capacity::kNeedLessUnit:
      return std::max<int64_t>(need - c.alignment, c.alignment);
    case Capacity::kHalf:
      return (need / 2 + c.alignment - 1) / c.alignment * c.alignment;
    default:
      return c.alignment;
  }
}

inline SlotValues random_slots(const LayerCase& c, const Routed& routed, bool weighted, Random* random) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  SlotValues values;
  for (const SlotCopy& slot : routed.slots) {
    const bool padding = slot.source < 0;
    const std::vector<float> row = padding ? std::vector<float>(static_cast<size_t>(c.hidden), nan)
                                           : rounded(c.token_type, random_tokens(random, 1, c.hidden));
    values.x.insert(values.x.end(), row.begin(), row.end());
    if (weighted) values.weights.push_back(padding ? nan : static_cast<float>(random->uniform()));
  }
  return values;
}

inline Plan make_plan(const LayerCase& c, const std::vector<Step>& steps) {
  Plan plan;
  plan.capacity = capacity_of(c, steps);
  Random random(seed_of(c.name + " slots"));
  for (size_t n = 0; n < steps.size(); ++n) {
    StepPlan p;
    p.step = steps[n];
    for (int r = 0; r < c.ranks; ++r) {
      const RankInputs& in = p.step.ranks[static_cast<size_t>(r)];
      p.routed.push_back(route(p.step, r, c.experts_per_rank, c.top_k, c.alignment, plan.capacity));
      p.forward.push_back(sent_rows(c, c.dispatch, r, static_cast<int>(n), false, in.x));
      p.backward.push_back(sent_rows(c, c.combine_backward, r, static_cast<int>(n), true, in.grad));
      p.expert_out.push_back(random_slots(c, p.routed.back(), c.slot_weights, &random));
      p.slot_grads.push_back(random_slots(c, p.routed.back(), false, &random));
    }
    p.places = places_of(p.routed, p.step, c.top_k);
    plan.steps.push_back(std::move(p));
  }
  return plan;
}

// ---- one rank --------------------------------------------------------------------------------------------------------------

class LayerRank {
 public:
  LayerRank(const Venue& venue, const LayerCase& c, const Plan& plan, const Rank& rank, const Group& group,
            const Handle& handle)
      : memory_(*venue.memory),
        exact_sums_(venue.exact_sums),
        c_(c),
        plan_(plan),
        rank_(rank.rank),
        group_(group),
        handle_(handle) {}

  void run(int step) {
    step_ = step;
    p_ = &plan_.steps[static_cast<size_t>(step)];
    in_ = &p_->step.ranks[static_cast<size_t>(rank_)];
    routed_ = &p_->routed[static_cast<size_t>(rank_)];
    slots_ = plan_.capacity > 0 ? plan_.capacity : routed_->total_rows;
    if (c_.strided) slots_ += 3;  // a received tensor may be longer
    SCOPED_TRACE(replay_text(c_.name) + ", step " + std::to_string(step) + ", rank " + std::to_string(rank_));
    check_prepare();
    check_findings();
    check_dispatch();
    check_combine();
    check_dispatch_backward();
    check_combine_backward();
    const nvte_ep_error_info_t info = poll(group_);
    EXPECT_EQ(info.status, NVTE_EP_STATUS_OK) << "steps after prepare report nothing";
  }

 private:
  Array make(Type type, std::vector<int64_t> shape, int64_t gap = 0) const {
    return Array(memory_, type, std::move(shape), c_.strided ? gap : 0);
  }
  Array make(Type type, std::vector<int64_t> shape, const Bytes& content, int64_t gap = 0) const {
    return Array(memory_, type, std::move(shape), content, c_.strided ? gap : 0);
  }
  const std::vector<SlotPlace>& places() const { return p_->places[static_cast<size_t>(rank_)]; }
  // Content for all slots: what is given, then whatever nobody wrote.
  Bytes with_tail(Bytes content, int64_t bytes_per_slot) const {
    content.resize(static_cast<size_t>(slots_ * bytes_per_slot), kPoison);
    return content;
  }

  void check_prepare() {
    const int64_t experts = c_.experts_per_rank;
    Array idx = make(c_.index_type, {in_->tokens, c_.top_k}, encode_index(c_.index_type, in_->experts), 3);
    struct Output {
      const char* name;
      nvte_ep_tensor_t* nvte_ep_prepare_args_t::* field;
      Array array;
      std::vector<int64_t> expected;
    };
    using Args = nvte_ep_prepare_args_t;
    const auto counts = [&](int64_t n) { return Array(memory_, c_.count_type, {n}); };
    const int64_t slot_map = plan_.capacity > 0 ? plan_.capacity : routed_->total_rows + 2;
    std::vector<int64_t> source;
    for (const SlotCopy& slot : routed_->slots) {
      source.push_back(slot.source < 0 ? -1
                                       : static_cast<int64_t>(slot.source) * (int64_t{1} << 32) + slot.token);
    }
    std::vector<Output> outputs;
    outputs.push_back({"tokens_routed", &Args::tokens_routed, counts(experts), routed_->tokens_routed});
    outputs.push_back(
        {"tokens_per_expert", &Args::tokens_per_expert, counts(experts), routed_->tokens_per_expert});
    outputs.push_back({"rows_per_expert", &Args::rows_per_expert, counts(experts), routed_->rows_per_expert});
    outputs.push_back({"row_offsets", &Args::row_offsets, counts(experts + 1), routed_->row_offsets});
    outputs.push_back(
        {"scale_row_offsets", &Args::scale_row_offsets, counts(experts + 1), routed_->scale_row_offsets});
    outputs.push_back({"total_rows", &Args::total_rows, counts(1), {routed_->total_rows}});
    outputs.push_back({"dropped_rows", &Args::dropped_rows, counts(1), {routed_->dropped_rows}});
    outputs.push_back(
        {"slot_source", &Args::slot_source, Array(memory_, Type::kInt64, {slot_map}, 0, 0x5A), source});
    outputs.push_back({"slot_expert", &Args::slot_expert, Array(memory_, Type::kInt32, {slot_map}, 0, 0x5A),
                       routed_->slot_expert});
    nvte_ep_prepare_args_t args = NVTE_EP_PREPARE_ARGS_INIT;
    args.topk_idx = idx.tensor();
    if (!c_.no_outputs) {
      for (Output& output : outputs) args.*output.field = output.array.tensor();
    }
    int64_t total_rows_host = -7;
    if (plan_.capacity == 0) args.total_rows_host = &total_rows_host;
    require(nvte_ep_handle_prepare(handle_.get(), &args, memory_.stream()));
    idx.set(Bytes(static_cast<size_t>(idx.size() * item_bytes(c_.index_type)),
                  kPoison));  // may be reused from here on
    if (plan_.capacity == 0) {
      EXPECT_EQ(total_rows_host, routed_->total_rows);
    }
    if (c_.no_outputs) return;
    for (const Output& output : outputs) {
      const Type type = output.array.type();
      const int64_t item = item_bytes(type);
      Bytes expected = encode_index(type, output.expected);
      expected.resize(static_cast<size_t>(output.array.size() * item), 0x5A);
      expect_bytes(output.name, expected, output.array.get(), item, 0);
    }
  }

  void check_findings() {
    nvte_ep_error_info_t info = NVTE_EP_ERROR_INFO_INIT;
    const int64_t faults = count_faults(*in_, c_.top_k, num_experts(c_));
    if (faults > 0) {
      info = poll(group_);
      EXPECT_EQ(info.status, NVTE_EP_STATUS_INVALID_ARGUMENT);
      EXPECT_EQ(info.rank, rank_);
      EXPECT_EQ(info.handle, handle_.get());
      EXPECT_EQ(info.count, faults);
    }
    if (routed_->dropped_rows > 0 && !c_.drop) {
      info = poll(group_);
      EXPECT_EQ(info.status, NVTE_EP_STATUS_OVERFLOW);
      EXPECT_EQ(info.rank, rank_);
      EXPECT_EQ(info.handle, handle_.get());
      EXPECT_EQ(info.count, routed_->dropped_rows);
      EXPECT_EQ(info.needed_rows, routed_->needed_rows);
    }
    info = poll(group_);
    EXPECT_EQ(info.status, NVTE_EP_STATUS_OK) << "findings are cleared when read";
  }

  // The packed rows that this rank's slots must hold.
  Bytes expected_rows(bool backward) const {
    const int64_t row_bytes = row_parts(backward ? c_.combine_backward : c_.dispatch, c_.hidden).bytes;
    const std::vector<SentRows>& sent = backward ? p_->backward : p_->forward;
    Bytes rows(static_cast<size_t>(routed_->total_rows * row_bytes), 0);
    for (size_t s = 0; s < routed_->slots.size(); ++s) {
      const SlotCopy& slot = routed_->slots[s];
      if (slot.source < 0) continue;
      std::copy_n(sent[static_cast<size_t>(slot.source)].rows.begin() + slot.token * row_bytes, row_bytes,
                  rows.begin() + static_cast<std::ptrdiff_t>(s) * row_bytes);
    }
    return rows;
  }

  // The arrays of one dispatch or combine_backward; they live while the call runs.
  struct Exchange {
    Array tokens, payload, scales, token_scales, rng, tensor_scale, findings, received, operand_bytes;
    nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
    nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
  };
  nvte_ep_operand_config_t operand_config(int32_t format) const {
    nvte_ep_operand_config_t config = NVTE_EP_OPERAND_CONFIG_INIT;
    config.format = format;
    config.scale_layout = c_.scale_layout;
    config.hidden = c_.hidden;
    config.capacity = plan_.capacity > 0 ? plan_.capacity : routed_->total_rows;
    config.num_experts = c_.experts_per_rank;
    config.alignment = c_.alignment;
    nvte_ep_format_info_t info = NVTE_EP_FORMAT_INFO_INIT;
    require(nvte_ep_format_info(format, &info));
    config.columnwise = c_.columnwise && c_.alignment >= info.columnwise_alignment;
    return config;
  }
  Array operand_buffer(const nvte_ep_operand_config_t& config, const Memory& memory,
                       nvte_ep_operand_t* operand) const {
    nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
    require(nvte_ep_operand_layout(&config, &layout));
    Array buffer(memory, Type::kUInt8, {layout.total_bytes});
    require(nvte_ep_operand_bind(&config, buffer.tensor(), operand));
    return buffer;
  }

  void fill(Exchange* e, bool backward) const {
    const int32_t format = backward ? c_.combine_backward : c_.dispatch;
    const RowParts parts = row_parts(format, c_.hidden);
    const SentRows& sent = (backward ? p_->backward : p_->forward)[static_cast<size_t>(rank_)];
    const std::vector<float>& x = backward ? in_->grad : in_->x;
    e->rng = make(Type::kInt64, {2}, bytes_of(rng_state(step_, backward)));
    e->tensor_scale = make(Type::kFloat32, {1}, bytes_of(std::vector<float>{kTensorScale}));
    e->findings = make(Type::kInt32, {1}, bytes_of(std::vector<int32_t>{0}));
    const nvte_ep_codec_options_t options = codec_options(c_, format, rank_, &e->rng, &e->tensor_scale);
    nvte_ep_dispatch_args_t& a = e->args;
    a.rounding = options.rounding;
    a.nonfinite = options.nonfinite;
    a.scale_rounding = options.scale_rounding;
    a.column_bound = options.column_bound;
    a.rng_state = options.rng_state;
    a.tensor_scale = c_.input == Input::kRows ? nullptr : options.tensor_scale;  // rows carry theirs
    a.findings = e->findings.tensor();
    if (c_.input == Input::kRows) {
      e->tokens = make(Type::kUInt8, {in_->tokens, parts.bytes}, sent.rows, 32);
    } else if (c_.input == Input::kApart && format != NVTE_EP_FORMAT_BF16) {
      e->payload = make(Type::kUInt8, {in_->tokens, parts.payload}, sent.apart.payload, 5);
      e->scales = make(Type::kUInt8, {in_->tokens, parts.scales}, sent.apart.scales, 3);
      if (!sent.apart.token_scales.empty() || (format == NVTE_EP_FORMAT_NVFP4 && !c_.tensor_scale)) {
        e->token_scales = make(Type::kFloat32, {in_->tokens}, sent.apart.token_scales);
      }
    } else {
      e->tokens = make(c_.token_type, {in_->tokens, c_.hidden}, encode(c_.token_type, x), 1);
    }
    a.tokens = e->tokens.tensor();
    a.payload = e->payload.tensor();
    a.scales = e->scales.tensor();
    a.token_scales = e->token_scales.tensor();

    a.receive = backward ? c_.backward_receive : c_.receive;
    if (a.receive == NVTE_EP_RECEIVE_OPERAND) {
      e->operand_bytes = operand_buffer(operand_config(format), memory_, &e->operand);
      a.operand = &e->operand;
    } else {
      e->received = a.receive == NVTE_EP_RECEIVE_ROWS ? make(Type::kUInt8, {slots_, parts.bytes}, 48)
                                                      : make(c_.received_type, {slots_, c_.hidden}, 5);
      e->received.forbid_from(routed_->total_rows);
      a.received = e->received.tensor();
    }
  }

  void check_received(const Exchange& e, bool backward, const Bytes& rows) const {
    const int32_t format = backward ? c_.combine_backward : c_.dispatch;
    const int64_t row_bytes = row_parts(format, c_.hidden).bytes;
    EXPECT_EQ(e.findings.values<int32_t>()[0], 0);
    if (e.args.receive == NVTE_EP_RECEIVE_ROWS) {
      expect_bytes("received rows", with_tail(rows, row_bytes), e.received.get(), 1, row_bytes);
    } else if (e.args.receive == NVTE_EP_RECEIVE_DECODED) {
      const int64_t item = item_bytes(c_.received_type);
      expect_bytes("received", with_tail(unpack(format, rows, c_.hidden, c_.received_type), item * c_.hidden),
                   e.received.get(), item, c_.hidden);
    } else {  // the operand of direct_receive over the same rows
      nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
      Array expected = operand_buffer(operand_config(format), host_memory(), &operand);
      Array in(host_memory(), Type::kUInt8, {routed_->total_rows, row_bytes}, rows);
      Array counts(host_memory(), Type::kInt64, {c_.experts_per_rank}, bytes_of(routed_->rows_per_expert));
      Array rng(host_memory(), Type::kInt64, {2}, bytes_of(rng_state(step_, backward)));
      const nvte_ep_codec_options_t options = codec_options(c_, format, rank_, &rng, nullptr);
      require(codec_of(format).direct_receive(in.tensor(), counts.tensor(), &operand, &options, nullptr));
      expect_bytes("operand", expected.get(), e.operand_bytes.get(), 1, 0);
    }
  }

  void check_dispatch() {
    Exchange e;
    fill(&e, false);
    Array topk_weights, recv_weights;
    if (c_.weights) {
      topk_weights = make(Type::kFloat32, {in_->tokens, c_.top_k}, bytes_of(in_->weights), 2);
      recv_weights = make(Type::kFloat32, {slots_});
      recv_weights.forbid_from(routed_->total_rows);
    }
    e.args.topk_weights = topk_weights.tensor();
    e.args.recv_weights = recv_weights.tensor();
    require(nvte_ep_handle_dispatch(handle_.get(), &e.args, memory_.stream()));
    check_received(e, false, expected_rows(false));
    if (!c_.weights) return;
    std::vector<float> weights;
    for (const SlotCopy& slot : routed_->slots) {
      const RankInputs* from = slot.source < 0 ? nullptr : &p_->step.ranks[static_cast<size_t>(slot.source)];
      weights.push_back(from ? from->weights[static_cast<size_t>(slot.token * c_.top_k + slot.k)] : 0.0f);
    }
    expect_bytes("recv_weights", with_tail(bytes_of(weights), 4), recv_weights.get(), 4, 0);
  }

  // The sum over each token's slots, on top of what the result holds.
  void expect_sums(const std::string& what, const std::vector<SlotValues>& values, int32_t format,
                   const std::vector<float>& before, const Array& result) const {
    std::vector<float> all, sizes;
    std::vector<SlotValues> magnitudes = values;
    for (SlotValues& rank : magnitudes) {
      for (float& x : rank.x) x = std::fabs(x);
      for (float& weight : rank.weights) weight = std::fabs(weight);
    }
    for (int64_t t = 0; t < in_->tokens; ++t) {
      const SlotPlace* token = &places()[static_cast<size_t>(t * c_.top_k)];
      const auto append = [&](std::vector<float>* to, const std::vector<SlotValues>& from, int32_t wire) {
        const std::vector<float> sum = sum_token(token, c_.top_k, from, c_.hidden, wire);
        to->insert(to->end(), sum.begin(), sum.end());
      };
      append(&all, values, format);
      if (!exact_sums_) append(&sizes, magnitudes, NVTE_EP_FORMAT_BF16);
    }
    for (size_t i = 0; c_.accumulate && i < all.size(); ++i) all[i] = before[i] + all[i];
    if (exact_sums_) {
      expect_bytes(what, encode(c_.token_type, all), result.get(), item_bytes(c_.token_type), c_.hidden);
      return;
    }
    // One rounding of each rank's part and one of the sum; FP32 also in another order, and what is expected is rounded to it.
    const double rounding = c_.token_type == Type::kBFloat16  ? 0x1p-8
                            : c_.token_type == Type::kFloat16 ? 0x1p-11
                                                              : 0x1p-24;
    const double smallest = c_.token_type == Type::kFloat16 ? 0x1p-25 : 0x1p-134;
    const std::vector<float> got = decode(c_.token_type, result.get());
    ASSERT_EQ(got.size(), all.size()) << what;
    for (size_t i = 0; i < all.size(); ++i) {
      const double size = std::fabs(static_cast<double>(all[i]));
      const double allowed =
          rounding * (sizes[i] + size) + 0x1p-24 * size + 0x1p-20 * sizes[i] + (c_.ranks + 1) * smallest;
      ASSERT_LE(std::fabs(static_cast<double>(got[i]) - all[i]), allowed)
          << what << ": element " << i << ": expected " << all[i] << ", got " << got[i];
    }
  }

  void check_combine() {
    Random random(seed_of(c_.name + " result") + static_cast<uint64_t>(rank_));
    const SlotValues& mine = p_->expert_out[static_cast<size_t>(rank_)];
    const std::vector<float> before = rounded(c_.token_type, random_tokens(&random, in_->tokens, c_.hidden));
    const int64_t item = item_bytes(c_.token_type);
    Array out = make(c_.token_type, {slots_, c_.hidden}, encode(c_.token_type, mine.x), 3);
    Array result = make(c_.token_type, {in_->tokens, c_.hidden}, 7);
    if (c_.accumulate) result.set(encode(c_.token_type, before));
    Array weights;
    if (c_.slot_weights) weights = make(Type::kFloat32, {slots_}, bytes_of(mine.weights));
    out.forbid_from(routed_->total_rows);
    weights.forbid_from(routed_->total_rows);
    nvte_ep_combine_args_t args = NVTE_EP_COMBINE_ARGS_INIT;
    args.expert_out = out.tensor();
    args.slot_weights = weights.tensor();
    args.result = result.tensor();
    args.accumulate = c_.accumulate;
    require(nvte_ep_handle_combine(handle_.get(), &args, memory_.stream()));
    expect_sums("result of combine", p_->expert_out, c_.combine, before, result);
    expect_bytes("expert_out is unchanged", with_tail(encode(c_.token_type, mine.x), item * c_.hidden),
                 out.get(), item, c_.hidden);
  }

  void check_dispatch_backward() {
    Random random(seed_of(c_.name + " grad_tokens") + static_cast<uint64_t>(rank_));
    const std::vector<float> before = rounded(c_.token_type, random_tokens(&random, in_->tokens, c_.hidden));
    const SlotValues& mine = p_->slot_grads[static_cast<size_t>(rank_)];
    Array grads = make(c_.token_type, {slots_, c_.hidden}, encode(c_.token_type, mine.x), 3);
    Array grad_tokens = make(c_.token_type, {in_->tokens, c_.hidden}, 7);
    if (c_.accumulate) grad_tokens.set(encode(c_.token_type, before));
    Array grad_recv_weights, grad_topk_weights;
    if (c_.weights) {
      std::vector<float> scalars;
      for (size_t s = 0; s < routed_->slots.size(); ++s) {
        scalars.push_back(routed_->slots[s].source < 0 ? std::numeric_limits<float>::quiet_NaN()
                                                       : slot_scalar(rank_, s));
      }
      grad_recv_weights = make(Type::kFloat32, {slots_}, bytes_of(scalars));
      grad_topk_weights = make(Type::kFloat32, {in_->tokens, c_.top_k}, 2);
      grad_recv_weights.forbid_from(routed_->total_rows);
    }
    grads.forbid_from(routed_->total_rows);
    nvte_ep_dispatch_backward_args_t args = NVTE_EP_DISPATCH_BACKWARD_ARGS_INIT;
    args.grad_received = grads.tensor();
    args.grad_recv_weights = grad_recv_weights.tensor();
    args.grad_tokens = grad_tokens.tensor();
    args.grad_topk_weights = grad_topk_weights.tensor();
    args.accumulate = c_.accumulate;
    require(nvte_ep_handle_dispatch_backward(handle_.get(), &args, memory_.stream()));
    expect_sums("grad_tokens", p_->slot_grads, c_.dispatch_backward, before, grad_tokens);
    if (!c_.weights) return;
    std::vector<float> expected;
    for (const SlotPlace& place : places()) {
      expected.push_back(place.rank < 0 ? 0.0f : slot_scalar(place.rank, static_cast<size_t>(place.slot)));
    }
    expect_bytes("grad_topk_weights", bytes_of(expected), grad_topk_weights.get(), 4, c_.top_k);
  }
  static float slot_scalar(int rank, size_t slot) {
    return static_cast<float>(rank * 1000) + 0.25f * static_cast<float>(slot + 1);
  }

  void check_combine_backward() {
    Exchange e;
    fill(&e, true);
    nvte_ep_combine_backward_args_t args = NVTE_EP_COMBINE_BACKWARD_ARGS_INIT;
    args.send = &e.args;
    const Bytes rows = expected_rows(true);
    if (!c_.slot_weights || c_.backward_receive != NVTE_EP_RECEIVE_DECODED) {
      require(nvte_ep_handle_combine_backward(handle_.get(), &args, memory_.stream()));
      check_received(e, true, rows);
      return;
    }
    const SlotValues& out = p_->expert_out[static_cast<size_t>(rank_)];
    Array weights = make(Type::kFloat32, {slots_}, bytes_of(out.weights));
    Array expert_out = make(c_.token_type, {slots_, c_.hidden}, encode(c_.token_type, out.x), 3);
    Array grad_weights = make(Type::kFloat32, {slots_});
    weights.forbid_from(routed_->total_rows);
    expert_out.forbid_from(routed_->total_rows);
    grad_weights.forbid_from(routed_->total_rows);
    args.slot_weights = weights.tensor();
    args.expert_out = expert_out.tensor();
    args.grad_slot_weights = grad_weights.tensor();
    require(nvte_ep_handle_combine_backward(handle_.get(), &args, memory_.stream()));

    std::vector<float> grads =
        decode(Type::kFloat32, unpack(c_.combine_backward, rows, c_.hidden, Type::kFloat32));
    const std::vector<float> got = grad_weights.values<float>();
    for (size_t s = 0; s < routed_->slots.size(); ++s) {
      const bool padding = routed_->slots[s].source < 0;
      double dot = 0.0, magnitude = 0.0;
      for (size_t h = s * static_cast<size_t>(c_.hidden); h < (s + 1) * static_cast<size_t>(c_.hidden); ++h) {
        if (!padding) dot += static_cast<double>(grads[h]) * out.x[h];
        if (!padding) magnitude += std::fabs(static_cast<double>(grads[h]) * out.x[h]);
        if (!padding) grads[h] = grads[h] * out.weights[s];
      }
      EXPECT_LE(std::fabs(got[s] - dot), 1e-6 * magnitude)
          << "grad_slot_weights[" << s << "]: expected " << dot << ", got " << got[s];
    }
    for (size_t s = routed_->slots.size(); s < got.size(); ++s)
      EXPECT_EQ(bits_of(got[s]), 0xFFFFFFFFu) << "grad_slot_weights past the end";
    const int64_t item = item_bytes(c_.received_type);
    expect_bytes("weighted gradient", with_tail(encode(c_.received_type, grads), item * c_.hidden),
                 e.received.get(), item, c_.hidden);
  }

  const Memory& memory_;
  const bool exact_sums_;
  const LayerCase& c_;
  const Plan& plan_;
  const int rank_;
  const Group& group_;
  const Handle& handle_;
  int step_ = 0;
  const StepPlan* p_ = nullptr;
  const RankInputs* in_ = nullptr;
  const Routed* routed_ = nullptr;
  int64_t slots_ = 0;
};

// ---- all ranks -------------------------------------------------------------------------------------------------------------

inline nvte_ep_group_config_t group_config(const Venue& venue, const LayerCase& c, int64_t capacity) {
  nvte_ep_group_config_t config = group_config(num_experts(c), c.hidden, c.max_tokens, capacity);
  config.device_type = venue.memory->device_type;
  config.device_id = venue.memory->device_id;
  config.transport = venue.transport;
  config.max_top_k = c.top_k;
  config.overflow = c.drop ? NVTE_EP_ON_OVERFLOW_DROP : NVTE_EP_ON_OVERFLOW_ERROR;
  return config;
}
inline nvte_ep_handle_config_t handle_config(const LayerCase& c) {
  nvte_ep_handle_config_t config = handle_config(c.top_k, c.alignment, c.dispatch, c.combine_backward);
  config.combine = c.combine;
  config.dispatch_backward = c.dispatch_backward;
  return config;
}

// The case as a venue can run it.
inline LayerCase case_for(const Venue& venue, LayerCase c) {
  if (!venue.mxfp8_sums) c.combine = c.dispatch_backward = NVTE_EP_FORMAT_BF16;
  return c;
}

// One rank's part of all steps, on one handle.
inline void run_rank_of_layer(const Venue& venue, const LayerCase& c, const Plan& plan, const Rank& rank) {
  const Group group = make_group(rank, group_config(venue, c, plan.capacity));
  const Handle handle = make_handle(group, handle_config(c));
  LayerRank layer(venue, c, plan, rank, group, handle);
  for (size_t s = 0; s < plan.steps.size(); ++s) layer.run(static_cast<int>(s));
}

inline void run_layer(const Venue& venue, const LayerCase& wanted, const std::vector<Step>& steps) {
  const LayerCase c = case_for(venue, wanted);
  SCOPED_TRACE(replay_text(c.name));
  const Plan plan = make_plan(c, steps);
  run_ranks(c.ranks, [&](Rank& rank) { run_rank_of_layer(venue, c, plan, rank); });
}

}  // namespace ep_test

#endif  // NVTE_EP_TESTS_LAYER_H_
