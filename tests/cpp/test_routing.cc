// build_routing and clean_indices against the model, on random and extreme routings.
#include "core/routing.h"

#include "model.h"

namespace {

using namespace ep_test;
namespace lib = nvte_ep;

struct Shape {
  int ranks, experts_per_rank, top_k;
  int64_t alignment, capacity;  // 0: unbounded
};

// One rank's cleaned indices, and the slots that the library noted for its tokens.
struct Source {
  std::vector<int32_t> clean;
  std::vector<lib::SlotAddress> slots;
};

void check(const Shape& s, const Step& step) {
  const int experts = s.ranks * s.experts_per_rank;
  std::vector<Source> sources(step.ranks.size());
  std::vector<lib::RoutingSource> views;
  for (size_t r = 0; r < sources.size(); ++r) {
    const RankInputs& in = step.ranks[r];
    Source& source = sources[r];
    source.clean.resize(in.experts.size());
    source.slots.assign(in.experts.size(), -1);
    lib::TensorView idx;
    std::vector<int64_t> copy = in.experts;
    idx.data = copy.data();
    idx.dtype = lib::DType::kInt64;
    idx.ndim = 2;
    idx.shape[0] = in.tokens;
    idx.shape[1] = idx.stride = s.top_k;
    const lib::IndexFaults faults = lib::clean_indices(idx, experts, source.clean.data());
    ASSERT_EQ(faults.out_of_range + faults.duplicates, count_faults(in, s.top_k, experts));
    views.push_back({source.clean.data(), in.tokens, source.slots.data()});
  }

  std::vector<Routed> expected;
  for (int rank = 0; rank < s.ranks; ++rank) {
    expected.push_back(route(step, rank, s.experts_per_rank, s.top_k, s.alignment, s.capacity));
    const Routed& want = expected.back();
    lib::RoutingShape shape;
    shape.rank = rank;
    shape.num_local_experts = s.experts_per_rank;
    shape.top_k = s.top_k;
    shape.alignment = s.alignment;
    shape.capacity = s.capacity == 0 ? std::numeric_limits<int64_t>::max() : s.capacity;
    lib::Routing got;
    lib::build_routing(views, shape, &got);
    ASSERT_EQ(got.tokens_routed, want.tokens_routed);
    ASSERT_EQ(got.tokens_per_expert, want.tokens_per_expert);
    ASSERT_EQ(got.rows_per_expert, want.rows_per_expert);
    ASSERT_EQ(got.row_offsets, want.row_offsets);
    ASSERT_EQ(got.scale_row_offsets, want.scale_row_offsets);
    ASSERT_EQ(got.total_rows, want.total_rows);
    ASSERT_EQ(got.dropped_rows, want.dropped_rows);
    ASSERT_EQ(got.needed_rows, want.needed_rows);
    ASSERT_EQ(got.slot_source.size(), want.slots.size());
    for (size_t slot = 0; slot < want.slots.size(); ++slot) {
      const SlotCopy& copy = want.slots[slot];
      ASSERT_EQ(got.slot_source[slot],
                copy.source < 0 ? -1 : (static_cast<int64_t>(copy.source) << 32) + copy.token);
      ASSERT_EQ(got.slot_expert[slot], want.slot_expert[slot]);
      if (copy.source >= 0) {
        ASSERT_EQ(got.slot_k[slot], copy.k);
      }
    }
  }
  // The sources' maps are the inverse of the slots.
  const std::vector<std::vector<SlotPlace>> all_places = places_of(expected, step, s.top_k);
  for (size_t r = 0; r < sources.size(); ++r) {
    const std::vector<SlotPlace>& places = all_places[r];
    for (size_t i = 0; i < places.size(); ++i) {
      const lib::SlotAddress want =
          places[i].rank < 0 ? -1 : (static_cast<int64_t>(places[i].rank) << lib::kSlotBits) + places[i].slot;
      ASSERT_EQ(sources[r].slots[i], want) << "rank " << r << " choice " << i;
    }
  }
}

RankInputs inputs(int64_t tokens, int top_k, const std::function<int64_t(int64_t, int)>& expert) {
  RankInputs in;
  in.tokens = tokens;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int k = 0; k < top_k; ++k) in.experts.push_back(expert(t, k));
  }
  return in;
}

TEST(Routing, RandomShapesAndIndices) {
  Random random(seed_of("routing"));
  for (int round = 0; round < 400; ++round) {
    Shape s;
    s.ranks = static_cast<int>(1 + random.below(round % 20 == 0 ? 64 : 6));
    s.experts_per_rank = static_cast<int>(1 + random.below(5));
    s.top_k = static_cast<int>(1 + random.below(6));
    s.alignment = int64_t{1} << random.below(9);
    s.capacity = random.chance(0.3) ? 0 : s.alignment * (1 + random.below(6));
    const int64_t experts = s.ranks * s.experts_per_rank;
    Step step;
    for (int r = 0; r < s.ranks; ++r) {
      const int64_t tokens = random.chance(0.2) ? 0 : random.below(30);
      step.ranks.push_back(inputs(tokens, s.top_k, [&](int64_t, int) {
        return random.chance(0.15)
                   ? -1
                   : random.below(experts + (random.chance(0.1) ? 3 : 0));  // faults among them
      }));
    }
    SCOPED_TRACE(replay_text("routing") + " round " + std::to_string(round));
    ASSERT_NO_FATAL_FAILURE(check(s, step));
  }
}

TEST(Routing, EveryTokenToOneExpert) {
  for (int64_t capacity : {0, 16, 32, 48, 512}) {
    Step step;
    for (int r = 0; r < 3; ++r) {
      step.ranks.push_back(inputs(40, 2, [](int64_t, int k) { return k == 0 ? 5 : -1; }));
    }
    ASSERT_NO_FATAL_FAILURE(check({3, 2, 2, 16, capacity}, step));
  }
}

TEST(Routing, AnOverfullExpertPushesOutThoseBehindIt) {
  Step step;
  step.ranks.push_back(inputs(100, 1, [](int64_t t, int) { return t < 60 ? 0 : (t < 99 ? 1 : 3); }));
  ASSERT_NO_FATAL_FAILURE(check({1, 4, 1, 32, 96}, step));
  const Routed r = route(step, 0, 4, 1, 32, 96);
  EXPECT_EQ(r.tokens_per_expert, (std::vector<int64_t>{60, 32, 0, 0}));
  EXPECT_EQ(r.row_offsets, (std::vector<int64_t>{0, 64, 96, 96, 96}));
  EXPECT_EQ(r.dropped_rows, 8);
  EXPECT_EQ(r.needed_rows, 160);
}

TEST(CleanIndices, FarValuesAreNotTruncatedToLegalOnes) {
  for (const bool wide : {true, false}) {
    std::vector<int64_t> far = {int64_t{1} << 32,
                                (int64_t{1} << 32) + 1,
                                std::numeric_limits<int64_t>::max(),
                                std::numeric_limits<int64_t>::min(),
                                -(int64_t{1} << 32) - 1,
                                2};
    std::vector<int32_t> near = {
        std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min(), 4, -2, -100, 2};
    lib::TensorView idx;
    idx.data = wide ? static_cast<void*>(far.data()) : near.data();
    idx.dtype = wide ? lib::DType::kInt64 : lib::DType::kInt32;
    idx.ndim = 2;
    idx.shape[0] = 1;
    idx.shape[1] = idx.stride = 6;
    int32_t clean[6];
    const lib::IndexFaults faults = lib::clean_indices(idx, 4, clean);
    EXPECT_EQ(faults.out_of_range, 5);
    EXPECT_EQ(faults.duplicates, 0);
    for (int k = 0; k < 5; ++k) EXPECT_EQ(clean[k], -1) << k;
    EXPECT_EQ(clean[5], 2);
  }
}

}  // namespace
