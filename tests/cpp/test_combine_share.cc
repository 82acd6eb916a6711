// Every item of a combine is done by one warp, whatever there is of each kind and however many warps there are.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "transports/peer/combine_share.h"

namespace nvte_ep {
namespace {

void expect_every_item_once(uint32_t warps, uint32_t sums, uint32_t partials) {
  const uint32_t part = partial_share(sums, partials);
  std::vector<int> done_sums(sums), done_partials(partials);
  for (uint32_t warp = 0; warp < warps; ++warp) {
    const CombineShare share = share_of(warp, warps, sums, partials, part);
    std::vector<int>& done = share.is_sum ? done_sums : done_partials;
    ASSERT_EQ(share.end, done.size());
    ASSERT_GT(share.stride, 0u);
    for (uint32_t i = share.next; i < share.end; i += share.stride) ++done[i];
  }
  for (const std::vector<int>* done : {&done_sums, &done_partials}) {
    for (int times : *done) ASSERT_EQ(times, 1) << warps << " warps, " << sums << ", " << partials;
  }
}

TEST(CombineShare, EveryItemOnce) {
  std::mt19937 random(1);
  const auto below = [&random](uint32_t n) {
    return std::uniform_int_distribution<uint32_t>(0, n - 1)(random);
  };
  const uint32_t few[] = {0, 1, 2, 5};
  for (int i = 0; i < 1000; ++i) {
    const uint32_t sums = below(2) == 0 ? few[below(4)] : below(2000);
    const uint32_t partials = below(2) == 0 ? few[below(4)] : below(9000);
    const uint32_t blocks =
        (sums + partials + 3) / 4;  // as many as there is work, or as a few multiprocessors hold
    if (blocks == 0) continue;
    expect_every_item_once(4 * blocks, sums, partials);
    expect_every_item_once(4 * (1 + below(blocks)), sums, partials);
  }
}

TEST(CombineShare, AsManyOfBothTakeTurns) {
  for (uint32_t items : {1u, 7u, 4096u, 28672u}) {
    const uint32_t warps = (2 * items + 3) / 4 * 4;
    const uint32_t part = partial_share(items, items);
    for (uint32_t warp = 0; warp < warps; ++warp) {
      const CombineShare share = share_of(warp, warps, items, items, part);
      ASSERT_EQ(share.is_sum, warp % 2 == 0);
      ASSERT_EQ(share.next, warp / 2);
      ASSERT_EQ(share.stride, warps / 2);
    }
  }
}

}  // namespace
}  // namespace nvte_ep
