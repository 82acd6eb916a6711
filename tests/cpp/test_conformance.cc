// One table of layers for every transport: ranks, alignments, formats and receive kinds in full, everything else mixed in so
// that each value meets each format and each capacity. Inputs and expectations: layer.h.
#include <set>

#include "venues.h"

namespace {

using namespace ep_test;

constexpr int kRanks[] = {1, 2, 3, 8, 64};
constexpr int kAlignments[] = {1, 16, 32, 64, 128, 256};
struct Direction {
  int32_t format;
  int32_t receive;
};
constexpr Direction kDirections[] = {
    {NVTE_EP_FORMAT_BF16, NVTE_EP_RECEIVE_ROWS},     {NVTE_EP_FORMAT_BF16, NVTE_EP_RECEIVE_DECODED},
    {NVTE_EP_FORMAT_MXFP8, NVTE_EP_RECEIVE_ROWS},    {NVTE_EP_FORMAT_MXFP8, NVTE_EP_RECEIVE_DECODED},
    {NVTE_EP_FORMAT_MXFP8, NVTE_EP_RECEIVE_OPERAND}, {NVTE_EP_FORMAT_NVFP4, NVTE_EP_RECEIVE_ROWS},
    {NVTE_EP_FORMAT_NVFP4, NVTE_EP_RECEIVE_DECODED}, {NVTE_EP_FORMAT_NVFP4, NVTE_EP_RECEIVE_OPERAND}};
const char* const kReceiveNames[] = {"rows", "decoded", "operand"};
constexpr Type kTokenTypes[] = {Type::kBFloat16, Type::kFloat16, Type::kFloat32};
constexpr Type kIndexTypes[] = {Type::kInt32, Type::kInt64};
constexpr Input kInputs[] = {Input::kTokens, Input::kRows, Input::kApart};
constexpr Capacity kCapacities[] = {Capacity::kAmple,        Capacity::kEager, Capacity::kNeed,
                                    Capacity::kNeedLessUnit, Capacity::kHalf,  Capacity::kUnit};

template <typename T, size_t n>
T pick(const T (&values)[n], Random* random) {
  return values[random->below(static_cast<int64_t>(n))];
}

std::vector<LayerCase> make_cases() {
  std::vector<LayerCase> cases;
  Random random(2025);  // the table is the same in every run; NVTE_EP_TEST_SEED changes the inputs alone
  const auto flip = [&] { return random.chance(0.5); };
  for (int ranks : kRanks) {
    for (int alignment : kAlignments) {
      for (const Direction& direction : kDirections) {
        LayerCase c;
        c.ranks = ranks;
        c.alignment = alignment;
        c.dispatch = direction.format;
        c.receive = direction.receive;
        const Direction backward = pick(kDirections, &random);
        c.combine_backward = backward.format;
        c.backward_receive = backward.receive;
        const bool large = ranks == 64;
        const int64_t small_sizes[] = {32, 64, 96};
        const int64_t sizes[] = {64, 96, 160, 288, 48};
        c.hidden = large ? pick(small_sizes, &random) : pick(sizes, &random);
        c.combine = flip() ? NVTE_EP_FORMAT_MXFP8 : NVTE_EP_FORMAT_BF16;
        c.dispatch_backward = flip() ? NVTE_EP_FORMAT_MXFP8 : NVTE_EP_FORMAT_BF16;
        const bool blocks_of_32 =
            c.combine == NVTE_EP_FORMAT_MXFP8 || c.dispatch_backward == NVTE_EP_FORMAT_MXFP8 ||
            c.dispatch == NVTE_EP_FORMAT_MXFP8 || c.combine_backward == NVTE_EP_FORMAT_MXFP8 ||
            c.receive == NVTE_EP_RECEIVE_OPERAND || c.backward_receive == NVTE_EP_RECEIVE_OPERAND;
        if (blocks_of_32 && c.hidden % 32 != 0) c.hidden = 128;
        c.experts_per_rank = static_cast<int>(1 + random.below(large ? (alignment > 64 ? 1 : 2) : 4));
        c.top_k = static_cast<int>(std::min<int64_t>(num_experts(c), 1 + random.below(5)));
        c.max_tokens = large ? 1 + random.below(4) : 1 + random.below(ranks == 8 ? 24 : 60);
        c.capacity = pick(kCapacities, &random);
        c.drop = flip();
        c.index_type = pick(kIndexTypes, &random);
        c.count_type = pick(kIndexTypes, &random);
        c.token_type = pick(kTokenTypes, &random);
        c.received_type = pick(kTokenTypes, &random);
        c.input = pick(kInputs, &random);
        c.tensor_scale = flip();
        c.scale_layout = flip() ? NVTE_EP_SCALE_LAYOUT_LINEAR : NVTE_EP_SCALE_LAYOUT_SWIZZLED;
        c.columnwise = flip();
        c.stochastic = flip();
        c.scale_up = flip();
        c.column_max = flip();
        c.saturate = flip();
        c.weights = flip();
        c.slot_weights = flip();
        c.accumulate = flip();
        c.strided = flip();
        c.no_outputs = random.chance(0.1);
        c.name = "ranks" + std::to_string(ranks) + "_alignment" + std::to_string(alignment) + "_" +
                 format_name(c.dispatch) + "_" + kReceiveNames[c.receive];
        cases.push_back(c);
      }
    }
  }
  return cases;
}

const std::vector<LayerCase>& cases() {
  static const std::vector<LayerCase> all = make_cases();
  return all;
}

using Row = std::pair<Venue, LayerCase>;
class Conformance : public ::testing::TestWithParam<Row> {};

TEST_P(Conformance, EveryOutputOfALayerIsExact) {
  const auto& [venue, c] = GetParam();
  run_layer(venue, c, random_steps(c, 2));
}
INSTANTIATE_TEST_SUITE_P(Table, Conformance, ::testing::ValuesIn(in_venues(cases())),
                         [](const ::testing::TestParamInfo<Row>& info) {
                           return info.param.first.name + "_" + info.param.second.name;
                         });

TEST(ConformanceTable, EveryAvailableTransportIsInIt) {
  for (const std::string& name : available_transports()) {
    if (!has_threads(name)) continue;
    EXPECT_TRUE(std::any_of(venues().begin(), venues().end(),
                            [&](const Venue& v) { return v.name.rfind(name + "_", 0) == 0; }))
        << name << " is listed as available and took no kind of memory that this test knows";
  }
}

TEST(ConformanceTable, EveryValueMeetsEveryFormatAndEveryCapacity) {
  std::set<std::string> seen;
  for (const LayerCase& c : cases()) {
    const std::vector<std::pair<std::string, int64_t>> values = {
        {"backward", c.combine_backward * 10 + c.backward_receive},
        {"combine", c.combine},
        {"dispatch_backward", c.dispatch_backward},
        {"drop", c.drop},
        {"index", static_cast<int>(c.index_type)},
        {"count", static_cast<int>(c.count_type)},
        {"token", static_cast<int>(c.token_type)},
        {"received", static_cast<int>(c.received_type)},
        {"input", static_cast<int>(c.input)},
        {"tensor_scale", c.tensor_scale},
        {"scale_layout", c.scale_layout},
        {"columnwise", c.columnwise},
        {"stochastic", c.stochastic},
        {"scale_up", c.scale_up},
        {"column_max", c.column_max},
        {"saturate", c.saturate},
        {"weights", c.weights},
        {"slot_weights", c.slot_weights},
        {"accumulate", c.accumulate},
        {"strided", c.strided}};
    for (const auto& value : values) {
      const std::string text = value.first + "=" + std::to_string(value.second);
      seen.insert(text + " format " + std::to_string(c.dispatch));
      seen.insert(text + " capacity " + std::to_string(static_cast<int>(c.capacity)));
    }
  }
  // Values per axis, in the order above.
  const int counts[] = {8, 2, 2, 2, 2, 2, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2};
  size_t expected = 0;
  for (int n : counts) expected += static_cast<size_t>(n) * (3 + std::size(kCapacities));
  EXPECT_EQ(seen.size(), expected);
}

}  // namespace
