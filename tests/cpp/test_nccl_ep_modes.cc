// Which groups of `nccl_ep` work in NCCL EP's low-latency mode.
#include <gtest/gtest.h>

#include <cstdlib>

#include "transports/nccl_ep_low_latency.h"

namespace nvte_ep {
namespace {

GroupSettings decode() {
  GroupSettings s;
  s.num_experts = 64;
  s.max_top_k = 8;
  s.hidden = 7168;
  s.max_tokens_per_rank = 128;
  s.recv_capacity = 2048;
  return s;
}

class NcclEpModes : public ::testing::Test {
 protected:
  NcclEpModes() { clear(); }
  ~NcclEpModes() override { clear(); }
  static void clear() {
    unsetenv(kVariable);
    unsetenv(kExchangeSms);
  }
  static constexpr const char* kVariable = "NVTE_EP_NCCL_EP_LOW_LATENCY";
};

TEST_F(NcclEpModes, SmallBatchesHaveLowLatency) { EXPECT_TRUE(low_latency_fits(decode(), 2)); }

TEST_F(NcclEpModes, NotWhereTheEnvironmentDeclinesIt) {
  for (const char* value : {"0", "0x"}) {
    setenv(kVariable, value, 1);
    EXPECT_FALSE(low_latency_fits(decode(), 2)) << value;
  }
  for (const char* value : {"1", ""}) {
    setenv(kVariable, value, 1);
    EXPECT_TRUE(low_latency_fits(decode(), 2)) << value;
  }
}

TEST_F(NcclEpModes, WhatItsKernelsAreNotMadeForHasHighThroughput) {
  const auto with = [](auto change) {
    GroupSettings s = decode();
    change(&s);
    return low_latency_fits(s, 2);
  };
  EXPECT_FALSE(with([](GroupSettings* s) { s->max_tokens_per_rank = 129; }));
  EXPECT_FALSE(with([](GroupSettings* s) { s->recv_capacity = 0; }));
  EXPECT_FALSE(with([](GroupSettings* s) { s->zero_copy = true; }));
  EXPECT_FALSE(with([](GroupSettings* s) { s->hidden = 2880; }));
  EXPECT_FALSE(with([](GroupSettings* s) { s->hidden = 8704; }));
  EXPECT_FALSE(with([](GroupSettings* s) { s->max_top_k = 32; }));
  EXPECT_TRUE(with([](GroupSettings* s) { s->max_top_k = 31; }));
  EXPECT_TRUE(with([](GroupSettings* s) { s->num_experts = 896; }));
  EXPECT_FALSE(with([](GroupSettings* s) { s->num_experts = 900; }));  // of any device
  EXPECT_FALSE(with([](GroupSettings* s) { s->num_sms = 4; }));
  EXPECT_TRUE(with([](GroupSettings* s) { s->num_sms = 5; }));
}

TEST_F(NcclEpModes, NcclEpsOwnNumberOfMultiprocessorsWins) {
  GroupSettings s = decode();
  s.num_experts = 256;
  EXPECT_TRUE(low_latency_fits(s, 2));
  setenv(kExchangeSms, "18", 1);
  EXPECT_FALSE(low_latency_fits(s, 2));
  s.num_sms = 64;
  EXPECT_FALSE(low_latency_fits(s, 2));
  setenv(kExchangeSms, "19", 1);
  s.num_sms = 4;
  EXPECT_TRUE(low_latency_fits(s, 2));
}

TEST_F(NcclEpModes, ARowHasRoomForItsTrailer) {
  for (int64_t row_bytes : {304, 4048, 7392, 14336, 496, 512}) {
    for (int32_t top_k : {1, 8, 31}) {
      const int64_t bytes = low_latency_row_bytes(row_bytes, top_k);
      EXPECT_GE(bytes, row_bytes + kTagBytes + 4 * top_k);
      EXPECT_EQ(bytes % 512, 0);
      EXPECT_LT(bytes, row_bytes + kTagBytes + 4 * top_k + 512);
    }
  }
}

}  // namespace
}  // namespace nvte_ep
