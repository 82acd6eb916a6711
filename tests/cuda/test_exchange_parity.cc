// The steps of dispatch and combine on one device: rows into slots, slots summed to tokens, routing.
#include "codec_calls.h"
#include "core/routing.h"

namespace nvte_ep::testing {
namespace {

constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

class ExchangeParity : public CudaTest {
 protected:
  // An array of one pointer (or number) per rank, in both memories.
  template <typename T>
  struct PerRank {
    std::vector<T> host;
    T* device = nullptr;
    explicit PerRank(std::vector<T> host_in, const std::vector<T>& device_in) : host(std::move(host_in)) {
      check_cuda(cudaMalloc(reinterpret_cast<void**>(&device), device_in.size() * sizeof(T)));
      check_cuda(cudaMemcpy(device, device_in.data(), device_in.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~PerRank() { check_cuda(cudaFree(device)); }
    T* on(bool cuda) { return cuda ? device : host.data(); }
  };
};

TEST_F(ExchangeParity, GatherRows) {
  Rng rng(21);
  for (const int64_t row_bytes : {16, 48, 592, 4048, 1040 * 2, 14336}) {
    for (const int ranks : {1, 3}) {
      const int64_t tokens = 50, slots = 333, top_k = 4, out_stride = row_bytes + (rng() % 2 ? 16 : 0);
      std::vector<std::unique_ptr<Mirror>> rows, weights;
      std::vector<const void*> row_host, row_device;
      std::vector<const float*> weight_host, weight_device;
      for (int r = 0; r < ranks; ++r) {
        rows.push_back(Mirror::of(random_bytes(static_cast<size_t>(tokens * row_bytes), &rng)));
        weights.push_back(Mirror::of(random_bytes(static_cast<size_t>(tokens * top_k * 4), &rng)));
        row_host.push_back(rows.back()->host());
        row_device.push_back(rows.back()->device());
        weight_host.push_back(reinterpret_cast<const float*>(weights.back()->host()));
        weight_device.push_back(reinterpret_cast<const float*>(weights.back()->device()));
      }
      PerRank<const void*> rank_rows(row_host, row_device);
      PerRank<const float*> rank_weights(weight_host, weight_device);
      const std::vector<int64_t> strides(ranks, row_bytes);
      PerRank<int64_t> rank_strides(strides, strides);
      std::vector<int64_t> source(slots);
      std::vector<int32_t> choice(slots);
      for (int64_t s = 0; s < slots; ++s) {
        source[s] = rng() % 6 == 0
                        ? -1
                        : static_cast<int64_t>(rng() % ranks) << 32 | static_cast<int64_t>(rng() % tokens);
        choice[s] = static_cast<int32_t>(rng() % top_k);
      }
      auto slot_source = Mirror::of(source);
      auto slot_k = Mirror::of(choice);
      auto elsewhere = Mirror::of(random_bytes(static_cast<size_t>(tokens * row_bytes), &rng));
      Mirror out(static_cast<size_t>(slots * out_stride)), out_weights(slots * 4);
      const int32_t last = ranks - 1;
      const TokenPart parts[] = {
          {TokenPart::kAll, -1, 0, 0}, {TokenPart::kOwn, last, 0, tokens}, {TokenPart::kOthers, last, 7, 31}};
      // The same map by source: as many slots a row as the one with the most has.
      std::vector<std::vector<int64_t>> slots_of(static_cast<size_t>(ranks * tokens));
      for (int64_t s = 0; s < slots; ++s) {
        if (source[s] >= 0) slots_of[(source[s] >> 32) * tokens + (source[s] & 0xFFFFFFFF)].push_back(s);
      }
      size_t most = 0;
      for (const auto& of_row : slots_of) most = std::max(most, of_row.size());
      std::vector<SlotAddress> by_source;
      for (const auto& of_row : slots_of) {
        for (size_t k = 0; k < most; ++k)
          by_source.push_back(k < of_row.size() ? slot_address(last, of_row[k]) : -1);
      }
      auto source_slots = Mirror::of(by_source);
      for (const int variant : {0, 1, 2, 3, 4, 5}) {
        const TokenPart& part = parts[variant % 3];
        const bool with_rows = variant != 3;
        SCOPED_TRACE(text("row_bytes ", row_bytes, " ranks ", ranks, " variant ", variant));
        for (const bool cuda : {false, true}) {
          GatherRows g{};
          g.part = part;
          if (variant > 3) {
            const bool own = part.which == TokenPart::kOwn;
            g.source_slots = reinterpret_cast<const SlotAddress*>(source_slots->on(cuda)) +
                             (own ? last * tokens * static_cast<int64_t>(most) : 0);
            g.source_rows = own ? 0 : tokens;
            g.top_k = static_cast<int32_t>(most);
            g.num_ranks = ranks;
          }
          g.rows.pointers = rank_rows.on(cuda);
          g.rows.strides = rank_strides.on(cuda);
          g.rows.own_rank = part.own_rank;  // lies elsewhere
          g.rows.own = elsewhere->on(cuda);
          g.rows.own_stride = row_bytes;
          g.weights.pointers = reinterpret_cast<const void* const*>(rank_weights.on(cuda));
          g.weights.row_stride = top_k * 4;
          g.slot_source = reinterpret_cast<const int64_t*>(slot_source->on(cuda));
          g.slot_k = reinterpret_cast<const int32_t*>(slot_k->on(cuda));
          g.slots = slots;
          g.row_bytes = row_bytes;
          g.out = with_rows ? out.on(cuda) : nullptr;
          g.out_stride = out_stride;
          g.out_weights = reinterpret_cast<float*>(out_weights.on(cuda));
          ASSERT_TRUE((cuda ? cuda_ : host_)->gather_rows(g, nullptr).ok());
        }
        ASSERT_CUDA(cudaDeviceSynchronize());
        ASSERT_TRUE(out.equal("slots"));
        ASSERT_TRUE(out_weights.equal("weights"));
      }
    }
  }
}

// ReduceRows, in a shape that compute-sanitizer gets through.
TEST_F(ExchangeParity, SmallShapes) {
  Rng rng(26);
  for (const DType dtype : kDTypes) {
    for (const int32_t format : {NVTE_EP_FORMAT_BF16, NVTE_EP_FORMAT_MXFP8}) {
      const int64_t hidden = 96, slots = 9, tokens = 5;
      Tokens rows(dtype, slots, hidden, hidden), result(dtype, tokens, hidden, hidden);
      rows.set(make_values(Data::kGaussian, slots, hidden, &rng));
      result.set(make_values(Data::kGaussian, tokens, hidden, &rng));
      PerRank<const void*> rank_rows({rows.data->host()}, {rows.data->device()});
      PerRank<const float*> rank_weights({nullptr}, {nullptr});
      PerRank<int64_t> rank_strides({hidden * dtype_bytes(dtype)}, {hidden * dtype_bytes(dtype)});
      auto map = Mirror::of(std::vector<int64_t>{0, 1, 8, -1, -1, -1, 3, 3, 7, 2});
      for (const bool cuda : {false, true}) {
        ReduceRows r{};
        r.num_ranks = 1;
        r.top_k = 2;
        r.rows.pointers = rank_rows.on(cuda);
        r.rows.strides = rank_strides.on(cuda);
        r.weights.pointers = reinterpret_cast<const void* const*>(rank_weights.on(cuda));
        r.weights.row_stride = 4;
        r.slots = reinterpret_cast<const SlotAddress*>(map->on(cuda));
        r.result = result.on(cuda);
        r.accumulate = true;
        r.partial_format = format;
        ASSERT_TRUE((cuda ? cuda_ : host_)->reduce_rows(r, nullptr).ok());
      }
      ASSERT_CUDA(cudaDeviceSynchronize());
      EXPECT_TRUE(result.equal("result"));
    }
  }
}

TEST_F(ExchangeParity, ReduceRows) {
  Rng rng(22);
  for (const DType dtype : kDTypes) {
    for (const int64_t hidden : {32, 96, 1024, 2720, 7168}) {
      for (const int32_t format : {NVTE_EP_FORMAT_BF16, NVTE_EP_FORMAT_MXFP8}) {
        for (const int variant : {0, 1, 2, 3}) {
          const int ranks = 3;
          const int64_t slots = 60, tokens = 41;
          const int32_t top_k = 1 + static_cast<int32_t>(rng() % 8);
          SCOPED_TRACE(text(dtype_name(dtype), " hidden ", hidden, " format ", format, " variant ", variant,
                            " top_k ", top_k));
          std::vector<std::unique_ptr<Tokens>> rows;
          std::vector<std::unique_ptr<Mirror>> weights;
          std::vector<const void*> row_host, row_device;
          std::vector<const float*> weight_host, weight_device;
          for (int r = 0; r < ranks; ++r) {
            rows.push_back(std::make_unique<Tokens>(dtype, slots, hidden, hidden));
            rows.back()->set(
                make_values(variant == 3 ? Data::kNonFinite : Data::kOutlierChannels, slots, hidden, &rng));
            weights.push_back(Mirror::of(make_values(Data::kGaussian, 1, slots, &rng)));
            row_host.push_back(rows.back()->data->host());
            row_device.push_back(rows.back()->data->device());
            const bool weighted = variant % 2 == 1 && r != 1;
            weight_host.push_back(weighted ? reinterpret_cast<const float*>(weights.back()->host())
                                           : nullptr);
            weight_device.push_back(weighted ? reinterpret_cast<const float*>(weights.back()->device())
                                             : nullptr);
          }
          PerRank<const void*> rank_rows(row_host, row_device);
          PerRank<const float*> rank_weights(weight_host, weight_device);
          const std::vector<int64_t> strides(ranks, hidden * dtype_bytes(dtype));
          PerRank<int64_t> rank_strides(strides, strides);
          std::vector<int64_t> address(static_cast<size_t>(tokens * top_k));
          for (int64_t i = 0; i < tokens * top_k; ++i) {
            address[i] = rng() % 4 == 0 || i / top_k == 7 ? -1
                                                          : slot_address(static_cast<int32_t>(rng() % ranks),
                                                                         static_cast<int64_t>(rng() % slots));
          }
          auto map = Mirror::of(address);
          Tokens result(dtype, tokens, hidden, hidden + (variant == 2 ? 3 : 0));
          result.set(make_values(Data::kGaussian, tokens, hidden, &rng));
          for (const bool cuda : {false, true}) {
            ReduceRows r{};
            r.num_ranks = ranks;
            r.top_k = top_k;
            r.rows.pointers = rank_rows.on(cuda);
            r.rows.strides = rank_strides.on(cuda);
            r.weights.pointers = reinterpret_cast<const void* const*>(rank_weights.on(cuda));
            r.weights.row_stride = 4;
            r.slots = reinterpret_cast<const SlotAddress*>(map->on(cuda));
            r.result = result.on(cuda);
            r.accumulate = variant >= 2;
            r.partial_format = format;
            ASSERT_TRUE((cuda ? cuda_ : host_)->reduce_rows(r, nullptr).ok());
          }
          ASSERT_CUDA(cudaDeviceSynchronize());
          ASSERT_TRUE(result.equal("result"));
        }
      }
    }
  }
}

TEST_F(ExchangeParity, IndexOutputsSaturate) {
  const std::vector<int64_t> counts = {0, 7, INT32_MAX, int64_t{INT32_MAX} + 1, int64_t{5} << 33};
  const auto given = Mirror::of(counts);
  for (const DType dtype : {DType::kInt32, DType::kInt64}) {
    Mirror out(counts.size() * 8);
    for (const bool cuda : {false, true}) {
      TensorView view;
      view.data = out.on(cuda);
      view.dtype = dtype;
      view.ndim = 1;
      view.shape[0] = static_cast<int64_t>(counts.size());
      ASSERT_TRUE((cuda ? cuda_ : host_)
                      ->write_index(view, reinterpret_cast<const int64_t*>(given->on(cuda)), nullptr)
                      .ok());
    }
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_TRUE(out.equal("counts"));
  }
}

TEST_F(ExchangeParity, GatherScalars) {
  Rng rng(23);
  const int64_t slots = 500, tokens = 300;
  const int32_t top_k = 5;
  auto a = Mirror::of(make_values(Data::kBits, 1, slots, &rng)),
       b = Mirror::of(make_values(Data::kBits, 1, slots, &rng));
  PerRank<const float*> values(
      {reinterpret_cast<const float*>(a->host()), reinterpret_cast<const float*>(b->host())},
      {reinterpret_cast<const float*>(a->device()), reinterpret_cast<const float*>(b->device())});
  std::vector<int64_t> address(static_cast<size_t>(tokens * top_k));
  for (int64_t& s : address)
    s = rng() % 4 == 0 ? -1
                       : slot_address(static_cast<int32_t>(rng() % 2), static_cast<int64_t>(rng() % slots));
  auto map = Mirror::of(address);
  Tokens out(DType::kFloat32, tokens, top_k, top_k + 2);
  for (const bool cuda : {false, true}) {
    RankArrays arrays;
    arrays.pointers = reinterpret_cast<const void* const*>(values.on(cuda));
    arrays.row_stride = 4;
    ASSERT_TRUE((cuda ? cuda_ : host_)
                    ->gather_scalars(top_k, reinterpret_cast<const SlotAddress*>(map->on(cuda)), arrays,
                                     out.on(cuda), nullptr)
                    .ok());
  }
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(out.equal("gradients"));
}

TEST_F(ExchangeParity, CleanIndices) {
  Rng rng(24);
  for (const bool is_int64 : {false, true}) {
    for (const int64_t tokens : {0, 1, 33, 1000}) {
      const int64_t top_k = 1 + static_cast<int64_t>(rng() % 8), rows = tokens - tokens / 5,
                    stride = top_k + 2;
      std::vector<int64_t> index(static_cast<size_t>(rows * stride));
      for (int64_t& i : index) i = static_cast<int64_t>(rng() % 20) - 2;
      if (!index.empty() && is_int64) index[0] = (int64_t{1} << 32) + 3;  // never cut to a legal id
      auto given =
          is_int64 ? Mirror::of(index) : Mirror::of(std::vector<int32_t>(index.begin(), index.end()));
      Mirror clean(static_cast<size_t>(tokens * top_k * 4));
      auto faults = Mirror::of(std::vector<int64_t>{100, 200});
      for (const bool cuda : {false, true}) {
        TensorView v;
        v.data = given->on(cuda);
        v.dtype = is_int64 ? DType::kInt64 : DType::kInt32;
        v.ndim = 2;
        v.shape[0] = rows;
        v.shape[1] = top_k;
        v.stride = stride;
        ASSERT_TRUE((cuda ? cuda_ : host_)
                        ->clean_indices(v, 16, tokens, reinterpret_cast<int32_t*>(clean.on(cuda)),
                                        reinterpret_cast<int64_t*>(faults->on(cuda)), nullptr)
                        .ok());
      }
      ASSERT_CUDA(cudaDeviceSynchronize());
      ASSERT_TRUE(clean.equal("clean"));
      ASSERT_TRUE(faults->equal("faults"));
    }
  }
}

TEST_F(ExchangeParity, Route) {
  Rng rng(25);
  struct Case {
    int32_t ranks, experts, top_k;
    int64_t tokens, alignment, capacity;
  };
  const Case cases[] = {{1, 1, 1, 1, 1, 64},          {1, 64, 8, 4096, 128, 65536},
                        {2, 64, 8, 1000, 16, 8192},   {4, 256, 8, 700, 128, 1024},
                        {8, 1024, 6, 333, 32, 640},   {3, 9, 3, 0, 8, 64},
                        {1, 4, 4, 257, 1, INT64_MAX}, {2, 8, 2, 100, 64, 0}};
  for (const Case& c : cases) {
    for (const bool skewed : {false, true}) {
      SCOPED_TRACE(text(c.ranks, " ranks ", c.experts, " experts ", c.tokens, " tokens alignment ",
                        c.alignment, " capacity ", c.capacity));
      const int32_t local = c.experts / c.ranks;
      std::vector<int32_t> clean;
      for (int64_t i = 0; i < c.ranks * c.tokens; ++i) {
        std::vector<int32_t> mine(c.top_k, -1);
        for (int32_t k = 0; k < c.top_k; ++k) {
          const int32_t e = static_cast<int32_t>(
              rng() % static_cast<uint64_t>(skewed ? std::min(c.experts, c.top_k + 1) : c.experts));
          if (rng() % 9 != 0 && std::find(mine.begin(), mine.end(), e) == mine.end()) mine[k] = e;
        }
        clean.insert(clean.end(), mine.begin(), mine.end());
      }
      // What an aborted exchange leaves may be anything, and counts as no choice. The host ignores it by definition.
      if (c.ranks == 4 && !skewed) {
        for (const int32_t none : {-2, INT32_MIN, INT32_MAX, c.experts, c.experts + 7, 1 << 20})
          clean[rng() % clean.size()] = none;
      }
      auto indices = Mirror::of(clean);
      const int64_t most =
          c.capacity == INT64_MAX ? c.ranks * c.tokens * c.top_k + local * c.alignment : c.capacity;
      for (int32_t rank = 0; rank < c.ranks; rank += std::max(1, c.ranks - 1)) {
        Mirror routed(local * 8), kept(local * 8), rows(local * 8), offsets(local * 8 + 8),
            scale_offsets(local * 8 + 8), totals(24);
        Mirror source(most * 8), choice(most * 4), expert(most * 4);
        Mirror slots(static_cast<size_t>(c.tokens * c.top_k * 8)),
            in_slots(static_cast<size_t>(c.ranks * c.tokens * c.top_k * 8));
        for (const bool cuda : {false, true}) {
          Route r;
          r.rank = rank;
          r.num_ranks = c.ranks;
          r.num_experts = c.experts;
          r.top_k = c.top_k;
          r.alignment = c.alignment;
          r.capacity = c.capacity;
          r.tokens = c.tokens;
          r.indices = reinterpret_cast<const int32_t*>(indices->on(cuda));
          r.tokens_routed = reinterpret_cast<int64_t*>(routed.on(cuda));
          r.tokens_per_expert = reinterpret_cast<int64_t*>(kept.on(cuda));
          r.rows_per_expert = reinterpret_cast<int64_t*>(rows.on(cuda));
          r.row_offsets = reinterpret_cast<int64_t*>(offsets.on(cuda));
          r.scale_row_offsets = reinterpret_cast<int64_t*>(scale_offsets.on(cuda));
          r.totals = reinterpret_cast<int64_t*>(totals.on(cuda));
          r.slot_source = reinterpret_cast<int64_t*>(source.on(cuda));
          r.slot_k = reinterpret_cast<int32_t*>(choice.on(cuda));
          r.slot_expert = reinterpret_cast<int32_t*>(expert.on(cuda));
          r.slots = reinterpret_cast<SlotAddress*>(slots.on(cuda));
          r.in_slots = reinterpret_cast<SlotAddress*>(in_slots.on(cuda));
          Backend* backend = cuda ? cuda_ : host_;
          void* workspace = nullptr;
          ASSERT_TRUE(backend->allocate(backend->route_workspace_bytes(r), &workspace).ok());
          r.workspace = workspace;
          const Status status = backend->route(r, nullptr);
          ASSERT_TRUE(status.ok()) << status.message();
          ASSERT_CUDA(cudaDeviceSynchronize());
          backend->release(workspace);
        }
        EXPECT_TRUE(routed.equal("tokens_routed"));
        EXPECT_TRUE(kept.equal("tokens_per_expert"));
        EXPECT_TRUE(rows.equal("rows_per_expert"));
        EXPECT_TRUE(offsets.equal("row_offsets"));
        EXPECT_TRUE(scale_offsets.equal("scale_row_offsets"));
        EXPECT_TRUE(totals.equal("totals"));
        EXPECT_TRUE(source.equal("slot_source"));
        EXPECT_TRUE(choice.equal("slot_k"));
        EXPECT_TRUE(expert.equal("slot_expert"));
        EXPECT_TRUE(slots.equal("slots"));
        EXPECT_TRUE(in_slots.equal("in_slots"));
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

}  // namespace
}  // namespace nvte_ep::testing
