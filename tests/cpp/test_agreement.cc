// What ranks of device transports tell each other: any difference is seen, by every rank in the same words.
#include <gtest/gtest.h>

#include "transports/agreement.h"

namespace nvte_ep {
namespace {

using Values = std::vector<Agreed>;

// The outcome that each rank comes to; they are the same.
Status agree(const std::vector<std::pair<const char*, Values>>& ranks) {
  std::vector<AgreedValues> all;
  for (const auto& [step, values] : ranks) all.push_back(agreed_values(step, values));
  const Status first = check_agreement(ranks[0].second, all);
  for (const auto& [step, values] : ranks) {
    const Status other = check_agreement(values, all);
    EXPECT_EQ(other.code(), first.code());
    EXPECT_EQ(other.message(), first.message());
  }
  return first;
}

TEST(Agreement, SameValues) {
  const Values values = {{"top_k", 8}, {"alignment", 128}};
  EXPECT_TRUE(agree({{"prepare", values}, {"prepare", values}, {"prepare", values}}).ok());
  EXPECT_TRUE(agree({{"group_destroy", {}}, {"group_destroy", {}}}).ok());
}

TEST(Agreement, ADifferenceIsNamed) {
  const Status status = agree({{"prepare", {{"top_k", 8}, {"alignment", 128}}},
                               {"prepare", {{"top_k", 8}, {"alignment", 128}}},
                               {"prepare", {{"top_k", 8}, {"alignment", int64_t{1} << 40}}}});
  EXPECT_EQ(status.code(), NVTE_EP_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(status.message(), "alignment: expected the same on every rank, got 128 on rank 0 and " +
                                  std::to_string(int64_t{1} << 40) + " on rank 2");
}

TEST(Agreement, EveryValueCounts) {
  Values values(kMaxAgreed, Agreed{"x", 1});
  for (int i = 0; i < kMaxAgreed; ++i) {
    Values other = values;
    other[static_cast<size_t>(i)].value = -1;
    EXPECT_EQ(agree({{"step", values}, {"step", other}}).code(), NVTE_EP_STATUS_INVALID_ARGUMENT) << i;
  }
}

TEST(Agreement, OtherCalls) {
  EXPECT_EQ(agree({{"mem_alloc", {{"bytes", 1}}}, {"mem_free", {{"bytes", 1}}}}).code(),
            NVTE_EP_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(agree({{"prepare", {{"x", 0}}}, {"prepare", {}}}).code(), NVTE_EP_STATUS_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace nvte_ep
