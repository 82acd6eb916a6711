// Identities between the library's own calls, without a model: what travels in a format is what the codecs make of it, an
// operand is direct_receive of the rows, a layer of identity experts gives the sum over k.
#include "venues.h"

namespace {

using namespace ep_test;

constexpr int64_t kHidden = 96;
constexpr int64_t kMaxTokens = 12;
constexpr int kTopK = 3;
constexpr int kExpertsPerRank = 2;

struct Setting {
  int ranks;
  int32_t format;
  bool stochastic;
};
void PrintTo(const Setting& s, std::ostream* out) { *out << s.ranks << " ranks, format " << s.format; }
using Row = std::pair<Venue, Setting>;
class Identities : public ::testing::TestWithParam<Row> {};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (int ranks : {1, 2, 3, 8, 64}) {
    all.push_back({ranks, NVTE_EP_FORMAT_MXFP8, false});
    all.push_back({ranks, NVTE_EP_FORMAT_NVFP4, false});
    all.push_back({ranks, NVTE_EP_FORMAT_NVFP4, true});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Table, Identities, ::testing::ValuesIn(in_venues(settings())),
                         [](const ::testing::TestParamInfo<Row>& info) {
                           const Setting& s = info.param.second;
                           return info.param.first.name + "_ranks" + std::to_string(s.ranks) + "_" +
                                  format_name(s.format) + (s.stochastic ? "_stochastic" : "");
                         });

// One rank with two handles over the same routing: one that sends in the format, one in BF16.
class TwoHandles {
 public:
  TwoHandles(const Venue& venue, const Setting& setting, const Rank& rank)
      : memory_(*venue.memory),
        exact_sums_(venue.exact_sums),
        setting_(setting),
        rank_(rank),
        slots_(int64_t{kMaxTokens} * setting.ranks * kTopK + kExpertsPerRank * 32) {
    slots_ = (slots_ + 31) / 32 * 32;
    nvte_ep_group_config_t config = group_config(kExpertsPerRank * rank.size, kHidden, kMaxTokens, slots_);
    config.max_top_k = kTopK;
    config.transport = venue.transport;
    config.device_type = venue.memory->device_type;
    group_ = make_group(rank, config);
    scaled_ = make_handle(group_, handle_config(kTopK, 32, setting.format, setting.format));
    plain_ = make_handle(group_, handle_config(kTopK, 32));
    LayerCase c;
    c.ranks = rank.size;
    c.experts_per_rank = kExpertsPerRank;
    c.top_k = kTopK;
    c.hidden = kHidden;
    Random random(seed_of("identities") + static_cast<uint64_t>(rank.rank));
    in_ = random_inputs(c, random.below(kMaxTokens + 1), &random);
    Array idx(memory_, Type::kInt64, {in_.tokens, kTopK}, bytes_of(in_.experts));
    counts_ = Array(memory_, Type::kInt64, {kExpertsPerRank});
    nvte_ep_prepare_args_t args = NVTE_EP_PREPARE_ARGS_INIT;
    args.topk_idx = idx.tensor();
    args.rows_per_expert = counts_.tensor();
    require(nvte_ep_handle_prepare(scaled_.get(), &args, memory_.stream()));
    require(nvte_ep_handle_prepare(plain_.get(), &args, memory_.stream()));
    rng_ = Array(memory_, Type::kInt64, {2}, bytes_of(std::vector<int64_t>{99, 5}));
  }

  void check() {
    const Bytes tokens = encode(Type::kBFloat16, in_.x), grads = encode(Type::kBFloat16, in_.grad);
    expect_bytes("dispatch is BF16 dispatch of unpack(pack(tokens))",
                 exchange(plain_, false, through_codec(tokens), false),
                 exchange(scaled_, false, tokens, setting_.stochastic), 2, kHidden);
    expect_bytes("combine_backward is BF16 combine_backward of unpack(pack(grad))",
                 exchange(plain_, true, through_codec(grads), false),
                 exchange(scaled_, true, grads, setting_.stochastic), 2, kHidden);
    check_operand(tokens, false);
    check_operand(grads, true);
    check_sum(exchange(plain_, false, tokens, false), tokens);
  }

 private:
  // unpack(pack(x)) with the ids that this rank's rows have.
  Bytes through_codec(const Bytes& x) {
    nvte_ep_codec_options_t options = NVTE_EP_CODEC_OPTIONS_INIT;
    Array rng(host_memory(), Type::kInt64, {2}, rng_.get());
    options.rounding = setting_.stochastic ? NVTE_EP_ROUNDING_STOCHASTIC : NVTE_EP_ROUNDING_NEAREST;
    options.rng_state = rng.tensor();
    options.row_id_base = rank_.rank * kMaxTokens;
    return unpack(setting_.format,
                  pack(setting_.format, Type::kBFloat16, decode(Type::kBFloat16, x), kHidden, &options),
                  kHidden, Type::kBFloat16);
  }
  nvte_ep_dispatch_args_t send_args(Array* tokens, bool stochastic) {
    nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
    args.tokens = tokens->tensor();
    args.rounding = stochastic ? NVTE_EP_ROUNDING_STOCHASTIC : NVTE_EP_ROUNDING_NEAREST;
    args.rng_state = rng_.tensor();
    return args;
  }
  void call(const Handle& handle, bool backward, const nvte_ep_dispatch_args_t& args) const {
    nvte_ep_combine_backward_args_t backward_args = NVTE_EP_COMBINE_BACKWARD_ARGS_INIT;
    backward_args.send = &args;
    require(backward ? nvte_ep_handle_combine_backward(handle.get(), &backward_args, memory_.stream())
                     : nvte_ep_handle_dispatch(handle.get(), &args, memory_.stream()));
  }
  Bytes exchange(const Handle& handle, bool backward, const Bytes& tokens, bool stochastic) {
    Array in(memory_, Type::kBFloat16, {in_.tokens, kHidden}, tokens),
        received(memory_, Type::kBFloat16, {slots_, kHidden});
    nvte_ep_dispatch_args_t args = send_args(&in, stochastic);
    args.receive = NVTE_EP_RECEIVE_DECODED;
    args.received = received.tensor();
    call(handle, backward, args);
    return received.get();
  }

  void check_operand(const Bytes& tokens, bool backward) {
    Array in(memory_, Type::kBFloat16, {in_.tokens, kHidden}, tokens);
    Array rows(memory_, Type::kUInt8, {slots_, row_parts(setting_.format, kHidden).bytes});
    nvte_ep_dispatch_args_t args = send_args(&in, setting_.stochastic);
    args.received = rows.tensor();
    call(scaled_, backward, args);
    nvte_ep_operand_config_t config = NVTE_EP_OPERAND_CONFIG_INIT;
    config.format = setting_.format;
    config.hidden = kHidden;
    config.capacity = slots_;
    config.num_experts = kExpertsPerRank;
    config.alignment = 32;
    config.columnwise = 1;
    nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
    require(nvte_ep_operand_layout(&config, &layout));
    Array direct(memory_, Type::kUInt8, {layout.total_bytes}),
        received(memory_, Type::kUInt8, {layout.total_bytes});
    nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
    require(nvte_ep_operand_bind(&config, received.tensor(), &operand));
    args.receive = NVTE_EP_RECEIVE_OPERAND;
    args.received = nullptr;
    args.operand = &operand;
    call(scaled_, backward, args);
    nvte_ep_codec_options_t options = NVTE_EP_CODEC_OPTIONS_INIT;
    options.rounding = args.rounding;
    options.rng_state = rng_.tensor();
    options.rank = rank_.rank;
    require(nvte_ep_operand_bind(&config, direct.tensor(), &operand));
    require(codec_of(setting_.format)
                .direct_receive(rows.tensor(), counts_.tensor(), &operand, &options, memory_.stream()));
    expect_bytes("the operand is direct_receive of the rows", direct.get(), received.get(), 1, 0);
  }

  // Experts that give back what they got.
  void check_sum(const Bytes& received, const Bytes& tokens) {
    Array out(memory_, Type::kBFloat16, {slots_, kHidden}, received),
        result(memory_, Type::kBFloat16, {in_.tokens, kHidden});
    nvte_ep_combine_args_t args = NVTE_EP_COMBINE_ARGS_INIT;
    args.expert_out = out.tensor();
    args.result = result.tensor();
    require(nvte_ep_handle_combine(plain_.get(), &args, memory_.stream()));
    const std::vector<float> x = decode(Type::kBFloat16, tokens), y = decode(Type::kBFloat16, result.get());
    const double rounding = exact_sums_ ? 0x1p-8 : 0x1p-7;  // of the sum, and of each rank's part
    for (int64_t t = 0; t < in_.tokens; ++t) {
      const int64_t copies =
          std::count_if(in_.experts.begin() + t * kTopK, in_.experts.begin() + (t + 1) * kTopK,
                        [](int64_t e) { return e >= 0; });
      for (int64_t h = t * kHidden; h < (t + 1) * kHidden; ++h) {
        const double sum = static_cast<double>(copies) * x[static_cast<size_t>(h)];
        ASSERT_LE(std::fabs(y[static_cast<size_t>(h)] - sum), std::fabs(sum) * rounding)
            << "token " << t << " channel " << h % kHidden;
      }
    }
  }

  const Memory& memory_;
  const bool exact_sums_;
  const Setting& setting_;
  const Rank& rank_;
  int64_t slots_;
  Group group_;
  Handle scaled_, plain_;
  RankInputs in_;
  Array counts_, rng_;
};

TEST_P(Identities, BetweenCallsOfTheLibrary) {
  const auto& [venue, setting] = GetParam();
  const Venue& where = venue;
  const Setting& what = setting;
  run_ranks(what.ranks, [&](Rank& rank) {
    SCOPED_TRACE(replay_text("identities") + ", rank " + std::to_string(rank.rank));
    TwoHandles(where, what, rank).check();
  });
}

}  // namespace
