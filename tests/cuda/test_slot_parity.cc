// What transports need whose engine moves rows between tokens and slots by itself, against the host.
#include "../cpp/slot_scene.h"
#include "codec_calls.h"

namespace nvte_ep::testing {
namespace {

class SlotParity : public CudaTest {
 protected:
  template <typename T>
  static T* as(Mirror& mirror, bool cuda) {
    return reinterpret_cast<T*>(mirror.on(cuda));
  }
  SlotScene scene_;
  std::unique_ptr<Mirror> totals_ = Mirror::of(scene_.totals);
  std::unique_ptr<Mirror> source_ = Mirror::of(scene_.slot_source);
  std::unique_ptr<Mirror> choice_ = Mirror::of(scene_.slot_k);
  std::unique_ptr<Mirror> expert_ = Mirror::of(scene_.slot_expert);
  std::unique_ptr<Mirror> kept_of_expert_ = Mirror::of(scene_.kept_of_expert);
  std::unique_ptr<Mirror> in_slots_ = Mirror::of(scene_.in_slots);
  IndexView count(bool cuda) { return IndexView{totals_->on(cuda), true}; }
  Backend* backend(bool cuda) { return cuda ? cuda_ : host_; }
};

TEST_F(SlotParity, KeptIndices) {
  auto indices = Mirror::of(scene_.indices);
  Mirror kept(scene_.kept.size() * 4);
  for (const bool cuda : {false, true}) {
    Route r;
    r.rank = scene_.rank;
    r.num_ranks = scene_.ranks;
    r.num_experts = scene_.experts;
    r.top_k = scene_.top_k;
    r.alignment = scene_.alignment;
    r.capacity = scene_.capacity;
    r.tokens = scene_.tokens;
    r.indices = as<int32_t>(*indices, cuda);
    r.kept_indices = as<int32_t>(kept, cuda);
    r.kept_experts = scene_.kept_experts();
    ASSERT_TRUE(backend(cuda)->allocate(backend(cuda)->route_workspace_bytes(r), &r.workspace).ok());
    ASSERT_TRUE(backend(cuda)->route(r, nullptr).ok());
    ASSERT_CUDA(cudaDeviceSynchronize());
    backend(cuda)->release(r.workspace);
  }
  EXPECT_TRUE(kept.equal("kept_indices"));
}

TEST_F(SlotParity, TaggedRows) {
  for (const bool weighted : {false, true}) {
    auto rows = Mirror::of(std::vector<uint8_t>(static_cast<size_t>(scene_.tokens * scene_.stride())));
    auto weights = Mirror::of(scene_.weights_of(1));
    for (const bool cuda : {false, true}) {
      const TagRows tag = scene_.tag(1, rows->on(cuda), weighted ? as<float>(*weights, cuda) : nullptr);
      ASSERT_TRUE(backend(cuda)->tag_rows(tag, nullptr).ok());
    }
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_TRUE(rows->equal("tagged rows"));
  }
}

// Whether rows come that nobody sent.
class SlotRowsParity : public SlotParity, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(AndNobodys, SlotRowsParity, ::testing::Bool());

TEST_P(SlotRowsParity, FindTheirSlotsAndGoBack) {
  std::vector<uint8_t> delivered;
  std::vector<int32_t> delivered_counts;
  scene_.deliver(&delivered, &delivered_counts, GetParam());
  auto came = Mirror::of(delivered);
  auto counts = Mirror::of(delivered_counts);
  auto back = Mirror::of(std::vector<uint8_t>(delivered.size(), 0xEE));
  auto differs = Mirror::of(std::vector<int32_t>{0});
  Mirror place(static_cast<size_t>(scene_.capacity * 8));
  Mirror rows(static_cast<size_t>(scene_.capacity * scene_.row_bytes)),
      weights(static_cast<size_t>(scene_.capacity * 4));
  for (const bool cuda : {false, true}) {
    LocateRows l = scene_.locate(came->on(cuda), as<int32_t>(*counts, cuda), as<int64_t>(place, cuda),
                                 as<int32_t>(*differs, cuda));
    l.expected = as<int64_t>(*kept_of_expert_, cuda);
    l.slots = as<SlotAddress>(*in_slots_, cuda);
    l.slot_source = as<int64_t>(*source_, cuda);
    l.slot_expert = as<int32_t>(*expert_, cuda);
    l.slot_count = count(cuda);
    ASSERT_TRUE(backend(cuda)->locate_rows(l, nullptr).ok());
    GatherRows g{};
    g.rows.block = came->on(cuda);
    g.rows.row_stride = scene_.stride();
    g.weights = g.rows;
    g.weights.offset = scene_.row_bytes + kTagBytes;
    g.slot_source = as<int64_t>(place, cuda);
    g.slot_k = as<int32_t>(*choice_, cuda);
    g.slots = scene_.capacity;
    g.slot_count = count(cuda);
    g.row_bytes = scene_.row_bytes;
    g.out = rows.on(cuda);
    g.out_stride = scene_.row_bytes;
    g.out_weights = as<float>(weights, cuda);
    ASSERT_TRUE(backend(cuda)->gather_rows(g, nullptr).ok());
    ScatterRows s{};
    s.rows = TensorView{rows.on(cuda),   DType::kUInt8, Device(), 2, {scene_.capacity, scene_.row_bytes},
                        scene_.row_bytes};
    s.place = as<int64_t>(place, cuda);
    s.slot_count = count(cuda);
    s.out = back->on(cuda);
    s.out_stride = scene_.stride();
    ASSERT_TRUE(backend(cuda)->scatter_rows(s, nullptr).ok());
  }
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(place.equal("place"));
  EXPECT_TRUE(differs->equal("differs"));
  EXPECT_EQ(*as<int32_t>(*differs, false), GetParam());
  EXPECT_TRUE(rows.equal("rows"));
  EXPECT_TRUE(weights.equal("weights"));
  EXPECT_TRUE(back->equal("rows that went back"));
}

TEST_F(SlotParity, MergedSlots) {
  Rng rng(31);
  const struct {
    DType rows, merged;
  } kinds[] = {{DType::kBFloat16, DType::kBFloat16},
               {DType::kFloat16, DType::kFloat16},
               {DType::kFloat32, DType::kFloat32},
               {DType::kBFloat16, DType::kFloat32},
               {DType::kFloat16, DType::kFloat32}};
  for (const auto& kind : kinds) {
    for (const int64_t columns : {16, 96, 7168}) {
      for (const bool weighted : {false, true}) {
        SCOPED_TRACE(text(dtype_name(kind.rows), " to ", dtype_name(kind.merged), " columns ", columns,
                          " weighted ", weighted));
        Tokens rows(kind.rows, scene_.capacity, columns, columns + 8),
            merged(kind.merged, scene_.capacity, columns, columns);
        rows.set(make_values(Data::kOutlierChannels, scene_.capacity, columns, &rng));
        auto weights = Mirror::of(make_values(Data::kGaussian, 1, scene_.capacity, &rng));
        for (const bool cuda : {false, true}) {
          MergeSlots m{};
          m.rows = rows.on(cuda);
          m.weights = weighted ? as<float>(*weights, cuda) : nullptr;
          m.slot_source = as<int64_t>(*source_, cuda);
          m.slots = as<SlotAddress>(*in_slots_, cuda);
          m.tokens = scene_.tokens;
          m.top_k = scene_.top_k;
          m.slot_count = count(cuda);
          m.out = merged.on(cuda);
          ASSERT_TRUE(backend(cuda)->merge_slots(m, nullptr).ok());
        }
        ASSERT_CUDA(cudaDeviceSynchronize());
        ASSERT_TRUE(merged.equal("merged"));
      }
    }
  }
}

TEST_F(SlotParity, SumsAreAdded) {
  Rng rng(32);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const int64_t columns : {16, 96, 3584}) {
      for (const int64_t stride : {columns, columns + 8, columns + 1}) {
        SCOPED_TRACE(text(dtype_name(dtype), " columns ", columns, " stride ", stride));
        const int64_t tokens = 37;
        Tokens result(dtype, tokens, columns, stride);
        result.set(make_values(Data::kGaussian, tokens, columns, &rng));
        auto sums = Mirror::of(make_values(Data::kGaussian, tokens, columns, &rng));
        for (const bool cuda : {false, true}) {
          ASSERT_TRUE(backend(cuda)->add_sums(as<float>(*sums, cuda), result.on(cuda), nullptr).ok());
        }
        ASSERT_CUDA(cudaDeviceSynchronize());
        ASSERT_TRUE(result.equal("result"));
      }
    }
  }
}

}  // namespace
}  // namespace nvte_ep::testing
