// What transports need whose engine moves rows between tokens and slots by itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "slot_scene.h"

namespace nvte_ep::testing {
namespace {

TEST(SlotExchange, KeptIndicesAreThoseOfSlots) {
  const SlotScene scene;
  int64_t dropped = 0;
  for (size_t i = 0; i < scene.kept.size(); ++i) {
    const int32_t given = scene.indices[static_cast<size_t>(scene.rank * scene.tokens * scene.top_k) + i];
    const int32_t local = scene.local_experts();
    const int32_t numbered = given / local * scene.kept_experts() + given % local;
    EXPECT_EQ(scene.kept[i], scene.slots[i] < 0 ? -1 : numbered);
    dropped += given >= 0 && scene.kept[i] < 0;
  }
  EXPECT_GT(dropped, 0) << "the capacity is chosen so that some do not fit";
}

class SlotExchangeRows : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(AndNobodys, SlotExchangeRows, ::testing::Bool());

TEST_P(SlotExchangeRows, TaggedRowsFindTheirSlots) {
  const SlotScene scene;
  HostBackend host(1);
  std::vector<uint8_t> came;
  std::vector<int32_t> counts;
  scene.deliver(&came, &counts, GetParam());
  std::vector<int64_t> place(static_cast<size_t>(scene.capacity), -7);
  int32_t differs = 0;
  ASSERT_TRUE(
      host.locate_rows(scene.locate(came.data(), counts.data(), place.data(), &differs), nullptr).ok());
  EXPECT_EQ(differs, GetParam()) << "rows that nobody sent are told";
  for (int64_t s = scene.in_use(); s < scene.capacity; ++s) EXPECT_EQ(place[static_cast<size_t>(s)], -7);

  GatherRows gather{};
  gather.rows.block = came.data();
  gather.rows.row_stride = scene.stride();
  gather.weights = gather.rows;
  gather.weights.offset = scene.row_bytes + kTagBytes;
  gather.slot_source = place.data();
  gather.slot_k = scene.slot_k.data();
  gather.slots = scene.in_use();
  gather.row_bytes = scene.row_bytes;
  std::vector<uint8_t> rows(static_cast<size_t>(scene.in_use() * scene.row_bytes), 0xDD);
  std::vector<float> weights(static_cast<size_t>(scene.in_use()), -1.0f);
  gather.out = rows.data();
  gather.out_stride = scene.row_bytes;
  gather.out_weights = weights.data();
  ASSERT_TRUE(host.gather_rows(gather, nullptr).ok());
  for (int64_t s = 0; s < scene.in_use(); ++s) {
    const int64_t source = scene.slot_source[static_cast<size_t>(s)];
    const int64_t rank = source >> 32, token = source & 0xFFFFFFFF;
    const float weight =
        source < 0 ? 0.0f : SlotScene::weight(rank, token, scene.slot_k[static_cast<size_t>(s)]);
    EXPECT_EQ(weights[static_cast<size_t>(s)], weight) << s;
    for (int64_t i = 0; i < scene.row_bytes; ++i) {
      const uint8_t byte = source < 0 ? 0 : SlotScene::byte(rank, token, i);
      ASSERT_EQ(rows[static_cast<size_t>(s * scene.row_bytes + i)], byte) << "slot " << s;
    }
  }

  // And back to where they came from.
  std::vector<uint8_t> back(came.size(), 0xEE);
  ScatterRows scatter{};
  scatter.rows =
      TensorView{rows.data(), DType::kUInt8, Device(), 2, {scene.in_use(), scene.row_bytes}, scene.row_bytes};
  scatter.place = place.data();
  scatter.slot_count = IndexView{const_cast<int64_t*>(scene.totals.data()), true};
  scatter.out = back.data();
  scatter.out_stride = scene.stride();
  ASSERT_TRUE(host.scatter_rows(scatter, nullptr).ok());
  for (int64_t at = 0; at < scene.local_experts() * scene.rows_per_expert(); ++at) {
    const bool is_there =
        at % scene.rows_per_expert() < counts[static_cast<size_t>(at / scene.rows_per_expert())];
    for (int64_t i = 0; i < scene.stride(); ++i) {
      const size_t where = static_cast<size_t>(at * scene.stride() + i);
      ASSERT_EQ(back[where], is_there && i < scene.row_bytes ? came[where] : 0xEE);
    }
  }
}

// What came, to be spoilt, and whether that is told.
struct Delivery {
  SlotScene scene;
  std::vector<uint8_t> came;
  std::vector<int32_t> counts;
  Delivery() { scene.deliver(&came, &counts, false); }

  int32_t differs() const {
    HostBackend host(1);
    std::vector<int64_t> place(static_cast<size_t>(scene.capacity), -7);
    int32_t told = 0;
    const LocateRows locate = scene.locate(came.data(), counts.data(), place.data(), &told);
    EXPECT_TRUE(host.locate_rows(locate, nullptr).ok());
    return told;
  }
};

TEST(SlotExchange, ARowThatDoesNotComeIsTold) {
  Delivery delivery;
  EXPECT_EQ(delivery.differs(), 0);
  for (int32_t& count : delivery.counts) {
    --count;
    EXPECT_EQ(delivery.differs(), 1);
    ++count;
  }
}

// In the place of one that was sent, so that the numbers are right.
TEST(SlotExchange, ARowThatNobodySentIsTold) {
  Delivery delivery;
  const SlotScene& scene = delivery.scene;
  ASSERT_GT(delivery.counts.front(), 0);
  // A token that has no slot at the first expert.
  int64_t other = 0;
  const auto is_here = [&](SlotAddress a) {
    return a >= 0 && scene.slot_expert[static_cast<size_t>(a & ((int64_t{1} << kSlotBits) - 1))] == 0;
  };
  while (std::any_of(scene.in_slots.begin() + other * scene.top_k,
                     scene.in_slots.begin() + (other + 1) * scene.top_k, is_here)) {
    ++other;
  }
  ASSERT_LT(other, scene.tokens);
  const int32_t tags[][2] = {
      {-5, 0}, {scene.ranks, 0}, {0, static_cast<int32_t>(scene.tokens)}, {0, static_cast<int32_t>(other)}};
  for (const auto& tag : tags) {
    std::memcpy(delivery.came.data() + scene.row_bytes, tag, sizeof(tag));
    EXPECT_EQ(delivery.differs(), 1) << tag[0] << ", " << tag[1];
  }
}

TEST(SlotExchange, WithoutWeightsTheTrailerHoldsZeros) {
  const SlotScene scene;
  HostBackend host(1);
  std::vector<uint8_t> rows(static_cast<size_t>(scene.tokens * scene.stride()), 0xEE);
  ASSERT_TRUE(host.tag_rows(scene.tag(3, rows.data(), nullptr), nullptr).ok());
  int32_t tag[4];
  float weights[3];
  std::memcpy(tag, rows.data() + 7 * scene.stride() + scene.row_bytes, sizeof(tag));
  std::memcpy(weights, rows.data() + 7 * scene.stride() + scene.row_bytes + kTagBytes, sizeof(weights));
  EXPECT_EQ(tag[0], 3);
  EXPECT_EQ(tag[1], 7);
  for (float w : weights) EXPECT_EQ(w, 0.0f);
}

TEST(SlotExchange, MergedSlotsSumToTheSame) {
  const SlotScene scene;
  HostBackend host(1);
  const int64_t columns = 16;
  std::vector<float> rows(static_cast<size_t>(scene.capacity * columns)),
      weights(static_cast<size_t>(scene.capacity));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 97) - 48;
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i % 5) - 1;
  std::vector<float> merged(rows.size(), -3.0f);
  MergeSlots m{};
  m.rows = TensorView{rows.data(), DType::kFloat32, Device(), 2, {scene.capacity, columns}, columns};
  m.weights = weights.data();
  m.slot_source = scene.slot_source.data();
  m.slots = scene.in_slots.data();
  m.tokens = scene.tokens;
  m.top_k = scene.top_k;
  m.slot_count = IndexView{const_cast<int64_t*>(scene.totals.data()), true};
  m.out = m.rows;
  m.out.data = merged.data();
  ASSERT_TRUE(host.merge_slots(m, nullptr).ok());

  std::set<int64_t> firsts;
  for (size_t t = 0; t < scene.in_slots.size(); t += static_cast<size_t>(scene.top_k)) {
    std::vector<int64_t> slots;
    for (int32_t k = 0; k < scene.top_k; ++k) {
      const SlotAddress a = scene.in_slots[t + static_cast<size_t>(k)];
      if (a >= 0) slots.push_back(a & ((int64_t{1} << kSlotBits) - 1));
    }
    for (size_t i = 0; i < slots.size(); ++i) {
      for (int64_t c = 0; c < columns; ++c) {
        float sum = 0;
        for (int64_t s : slots) {
          sum += weights[static_cast<size_t>(s)] * rows[static_cast<size_t>(s * columns + c)];
        }
        EXPECT_EQ(merged[static_cast<size_t>(slots[i] * columns + c)], i == 0 ? sum : 0.0f);
      }
      firsts.insert(slots[i]);
    }
  }
  for (int64_t s = 0; s < scene.capacity; ++s) {  // padding and what lies behind are left alone
    if (firsts.count(s) != 0) continue;
    EXPECT_EQ(merged[static_cast<size_t>(s * columns)], -3.0f) << s;
  }
}

// Own rows first, then those of others as they come: together the same as all at once, and each touches its slots only.
TEST(SlotExchange, PartsOfTheTokensAddUp) {
  const SlotScene scene;
  HostBackend host(1);
  std::vector<uint8_t> rows;
  for (int32_t r = 0; r < scene.ranks; ++r) {
    for (int64_t t = 0; t < scene.tokens; ++t) {
      for (int64_t i = 0; i < scene.row_bytes; ++i) rows.push_back(SlotScene::byte(r, t, i));
    }
  }
  const std::vector<uint8_t> own(rows.begin() + scene.rank * scene.tokens * scene.row_bytes,
                                 rows.begin() + (scene.rank + 1) * scene.tokens * scene.row_bytes);
  std::vector<uint8_t> whole(static_cast<size_t>(scene.in_use() * scene.row_bytes), 0xDD), pieces(whole);
  GatherRows gather{};
  gather.rows.block = rows.data();
  gather.rows.rank_stride = scene.tokens * scene.row_bytes;
  gather.rows.row_stride = scene.row_bytes;
  gather.slot_source = scene.slot_source.data();
  gather.slots = scene.in_use();
  gather.row_bytes = scene.row_bytes;
  gather.out = whole.data();
  gather.out_stride = scene.row_bytes;
  ASSERT_TRUE(host.gather_rows(gather, nullptr).ok());

  std::fill_n(rows.begin() + scene.rank * scene.tokens * scene.row_bytes, own.size(), 0xEE);
  gather.rows.own_rank = scene.rank;
  gather.rows.own = own.data();
  gather.rows.own_stride = scene.row_bytes;
  gather.out = pieces.data();
  const TokenPart parts[] = {{TokenPart::kOwn, scene.rank, 0, scene.tokens},
                             {TokenPart::kOthers, scene.rank, 0, 13},
                             {TokenPart::kOthers, scene.rank, 13, scene.tokens}};
  for (const TokenPart& part : parts) {
    const std::vector<uint8_t> before = pieces;
    gather.part = part;
    ASSERT_TRUE(host.gather_rows(gather, nullptr).ok());
    for (int64_t s = 0; s < scene.in_use(); ++s) {
      const int64_t source = scene.slot_source[static_cast<size_t>(s)];
      const bool is_own = source < 0 || source >> 32 == scene.rank;
      const int64_t token = source & 0xFFFFFFFF;
      const bool mine =
          part.which == TokenPart::kOwn ? is_own : !is_own && token >= part.begin && token < part.end;
      const auto from = static_cast<std::ptrdiff_t>(s * scene.row_bytes);
      const std::vector<uint8_t>& expected = mine ? whole : before;
      EXPECT_TRUE(
          std::equal(pieces.begin() + from, pieces.begin() + from + scene.row_bytes, expected.begin() + from))
          << "slot " << s;
    }
  }
  EXPECT_EQ(pieces, whole);
}

TEST(SlotExchange, SumsAreAddedWithOneRounding) {
  HostBackend host(1);
  // The next number of BF16 after 1 is 1 + 2^-7: the first sums lie half way, the second a little behind.
  std::vector<uint16_t> result(16, 0x3F80);
  const std::vector<float> sums(16, 1.0f / 256);
  TensorView view{result.data(), DType::kBFloat16, Device(), 2, {1, 16}, 16};
  ASSERT_TRUE(host.add_sums(sums.data(), view, nullptr).ok());
  for (uint16_t bits : result) EXPECT_EQ(bits, 0x3F80);  // a tie, to even
  const std::vector<float> more(16, 1.0f / 256 + 1.0f / 8192);
  ASSERT_TRUE(host.add_sums(more.data(), view, nullptr).ok());
  for (uint16_t bits : result) EXPECT_EQ(bits, 0x3F81);
}

}  // namespace
}  // namespace nvte_ep::testing
