// Failures that users of other expert-parallel and low-precision libraries reported in public, as inputs for this one. A test
// is named after its case; layers are compared with the model byte for byte (layer.h).
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "venues.h"

namespace {

using namespace ep_test;

class FieldCases : public InEveryVenue {};
NVTE_EP_IN_EVERY_VENUE(FieldCases);
class HostFieldCases : public InEveryVenue {};
NVTE_EP_ON_THE_HOST(HostFieldCases);

Step step_of(const LayerCase& c, const std::vector<int64_t>& tokens, uint64_t salt = 0) {
  Random random(seed_of(c.name) + salt);
  Step step;
  for (int64_t t : tokens) step.ranks.push_back(random_inputs(c, t, &random));
  return step;
}

LayerCase layer(const std::string& name, int32_t format, int32_t receive, int64_t max_tokens) {
  LayerCase c;
  c.name = name + " " + format_name(format);
  c.dispatch = c.combine_backward = format;
  c.receive = c.backward_receive = receive;
  c.max_tokens = max_tokens;
  return c;
}

constexpr int32_t kScaledFormats[] = {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4};

// ---- routing and counts ------------------------------------------------------------------------------------------------------

TEST_P(FieldCases, BC01_ARankWithNothingToSend) {
  for (int32_t format : kScaledFormats) {
    LayerCase c = layer("BC01", format, NVTE_EP_RECEIVE_ROWS, 128);
    c.experts_per_rank = 8;
    c.top_k = 8;
    c.hidden = 7168;
    c.max_tokens = 24;  // 128 in the report
    run(c, {step_of(c, {0, 24}), step_of(c, {24, 0}, 1), step_of(c, {0, 0}, 2)});
  }
}

TEST_P(FieldCases, BC02_ARankThatReceivesNothing) {
  for (int32_t format : kScaledFormats) {
    for (Capacity capacity : {Capacity::kEager, Capacity::kAmple}) {
      LayerCase c = layer("BC02", format, NVTE_EP_RECEIVE_OPERAND, 64);
      c.alignment = 128;
      c.columnwise = true;
      c.capacity = capacity;
      Step step = step_of(c, {64, 64});
      for (RankInputs& in : step.ranks) {
        for (size_t i = 0; i < in.experts.size(); ++i) in.experts[i] = i % 2;  // experts of rank 0
      }
      run(c, {step});
    }
  }
}

TEST_P(FieldCases, BC04_OddTokenCounts) {
  for (int32_t format : kScaledFormats) {
    LayerCase c = layer("BC04", format, NVTE_EP_RECEIVE_DECODED, 127);
    c.experts_per_rank = 4;
    c.hidden = 288;
    std::vector<Step> steps;
    for (int64_t tokens : {1, 2, 3, 31, 33, 63, 65, 127})
      steps.push_back(step_of(c, {tokens, tokens}, static_cast<uint64_t>(tokens)));
    run(c, steps);
    c.hidden = 32;
    c.max_tokens = 8191;
    c.weights = false;
    run(c, {step_of(c, {4095, 4095}), step_of(c, {8191, 8191}, 1)});
  }
}

TEST_P(FieldCases, BC05_RanksWithDifferentTokenCounts) {
  LayerCase c = layer("BC05", NVTE_EP_FORMAT_NVFP4, NVTE_EP_RECEIVE_ROWS, 4096);
  c.ranks = 8;
  c.experts_per_rank = 1;
  c.hidden = 32;
  run(c, {step_of(c, {672, 1, 0, 4095, 64, 63, 2048, 17})});
  run_ranks(8, [&](Rank& rank) {  // rank 3 declares another maximum
    nvte_ep_group_config_t config = group_config(GetParam(), c, 1024);
    config.max_tokens_per_rank = rank.rank == 3 ? 2048 : 4096;
    nvte_ep_group_t group = nullptr;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_group_create(rank.comm, &config, &group),
                  {"max_tokens_per_rank", "2048", "4096", "rank 3"});
  });
}

TEST_P(FieldCases, BC07_UnroutedEntries) {
  for (int32_t format : kScaledFormats) {
    LayerCase c = layer("BC07", format, NVTE_EP_RECEIVE_DECODED, 256);
    c.experts_per_rank = 8;
    c.top_k = 8;
    c.slot_weights = true;
    std::vector<Step> steps;
    for (int kind = 0; kind < 4; ++kind) {
      Step step = step_of(c, {256, 256}, static_cast<uint64_t>(kind));
      Random random(seed_of("BC07 -1") + static_cast<uint64_t>(kind));
      for (RankInputs& in : step.ranks) {
        for (size_t i = 0; i < in.experts.size(); ++i) {
          const bool none = kind == 0   ? random.chance(0.3)
                            : kind == 1 ? i / 8 % 4 == 0
                                        : kind == 2 || i % 8 < 5;
          if (!none) continue;
          in.experts[i] = -1;
          in.weights[i] = std::numeric_limits<float>::quiet_NaN();
        }
      }
      steps.push_back(std::move(step));
    }
    run(c, steps);
  }
}

TEST_P(FieldCases, BC08_TheSameExpertTwiceInARow) {
  for (int32_t format : kScaledFormats) {
    LayerCase c = layer("BC08", format, NVTE_EP_RECEIVE_DECODED, 6);
    c.experts_per_rank = 4;
    c.top_k = 8;
    c.slot_weights = true;
    Step step = step_of(c, {6, 6});
    for (RankInputs& in : step.ranks) {
      for (int64_t t = 0; t < in.tokens; ++t) {
        const std::vector<int64_t> row =
            t % 2 ? std::vector<int64_t>(8, t) : std::vector<int64_t>{3, 3, 7, 7, 7, -1, 0, 3};
        std::copy(row.begin(), row.end(), in.experts.begin() + t * 8);
        for (int k = 0; k < 8; ++k)
          in.weights[static_cast<size_t>(t * 8 + k)] = static_cast<float>(k + 1) / 8;
      }
    }
    run(c, {step});
  }
}

TEST_P(HostFieldCases, BC10_WideRouting) {
  const struct {
    int top_k, experts;
    int64_t hidden;
  } shapes[] = {{16, 896, 3584}, {22, 512, 1024}, {32, 1024, 7168}, {1, 8, 7168}, {22, 72, 2048}};
  for (const auto& shape : shapes) {
    LayerCase c = layer("BC10", NVTE_EP_FORMAT_NVFP4, NVTE_EP_RECEIVE_ROWS, 4);
    c.experts_per_rank = shape.experts / 2;
    c.top_k = shape.top_k;
    c.hidden = shape.hidden;
    c.alignment = 1;
    run(c, {step_of(c, {4, 3})});
  }
  run_ranks(4, [&](Rank& rank) {
    nvte_ep_group_config_t config = group_config(10, 32, 4, 16);
    config.transport = GetParam().transport;
    nvte_ep_group_t group = nullptr;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_group_create(rank.comm, &config, &group),
                  {"nvte_ep_group_create: config.num_experts", "4", "10"});
  });
}

// ---- sizes, layout, memory ---------------------------------------------------------------------------------------------------

TEST(LocalFieldCases, BC11_PackedRowBytes) {
  const struct {
    int64_t hidden, mxfp8, nvfp4;
  } sizes[] = {{2880, 2976, 1632}, {2688, 2784, 1520}, {1024, 1056, 592}, {3584, 3696, 2032},
               {2720, 2816, 1536}, {1040, 0, 592},     {32, 48, 32},      {16, 0, 16}};
  for (const auto& size : sizes) {
    int64_t bytes = -1;
    require(nvte_ep_row_bytes(NVTE_EP_FORMAT_NVFP4, size.hidden, &bytes));
    EXPECT_EQ(bytes, size.nvfp4) << size.hidden;
    if (size.mxfp8 > 0) {
      require(nvte_ep_row_bytes(NVTE_EP_FORMAT_MXFP8, size.hidden, &bytes));
      EXPECT_EQ(bytes, size.mxfp8) << size.hidden;
    } else {
      expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT,
                    nvte_ep_row_bytes(NVTE_EP_FORMAT_MXFP8, size.hidden, &bytes),
                    {"hidden", std::to_string(size.hidden)});
    }
    Random random(seed_of("BC11"));
    const std::vector<float> x = rounded(Type::kBFloat16, random_tokens(&random, 5, size.hidden));
    for (int32_t format : kScaledFormats) {
      if (format == NVTE_EP_FORMAT_MXFP8 && size.mxfp8 == 0) {
        Array tokens(host_memory(), Type::kBFloat16, {5, size.hidden}),
            rows(host_memory(), Type::kUInt8, {5, 2048});
        expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT,
                      nvte_ep_mxfp8_pack(tokens.tensor(), rows.tensor(), nullptr, nullptr),
                      {"hidden", std::to_string(size.hidden)});
        continue;
      }
      const Bytes rows = pack(format, Type::kBFloat16, x, size.hidden);
      const RowParts parts = row_parts(format, size.hidden);
      const int64_t used =
          format == NVTE_EP_FORMAT_MXFP8 ? parts.payload + parts.scales : parts.token_scale_at + 4;
      for (int64_t t = 0; t < 5; ++t) {
        for (int64_t b = used; b < parts.bytes; ++b)
          EXPECT_EQ(rows[static_cast<size_t>(t * parts.bytes + b)], 0) << "pad byte";
        for (int64_t b = parts.payload + parts.scales;
             format == NVTE_EP_FORMAT_NVFP4 && b < parts.token_scale_at; ++b) {
          EXPECT_EQ(rows[static_cast<size_t>(t * parts.bytes + b)], 0) << "pad byte";
        }
      }
      const std::vector<float> y = decode(Type::kFloat32, unpack(format, rows, size.hidden, Type::kFloat32));
      EXPECT_EQ(unpack(format, pack(format, Type::kFloat32, y, size.hidden), size.hidden, Type::kFloat32),
                encode(Type::kFloat32, y))
          << "decodes to the same again";
    }
  }
  int64_t bytes = -1;
  for (int64_t hidden : {int64_t{0}, int64_t{-16}, int64_t{8}, int64_t{1000}, (int64_t{1} << 40),
                         std::numeric_limits<int64_t>::max() / 16 * 16}) {
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_row_bytes(NVTE_EP_FORMAT_NVFP4, hidden, &bytes),
                  {"hidden"});
  }
}

TEST_P(FieldCases, BC11_LayersOfOddHiddenSizes) {
  for (int64_t hidden : {2880, 2688, 2720, 1040, 16}) {
    for (int32_t format : kScaledFormats) {
      if (format == NVTE_EP_FORMAT_MXFP8 && hidden % 32 != 0) continue;
      for (int32_t receive : {NVTE_EP_RECEIVE_ROWS, NVTE_EP_RECEIVE_OPERAND}) {
        if (receive == NVTE_EP_RECEIVE_OPERAND && hidden % 32 != 0) continue;
        LayerCase c = layer("BC11", format, receive, 6);
        c.hidden = hidden;
        c.alignment = 32;
        c.columnwise = true;
        run(c, {step_of(c, {6, 5})});
      }
    }
  }
}

// More than 4 GiB of slots of which a few are used: costs address space, not memory or time. (Rows beyond 2^31 elements are
// reached in test_edges.cc.)
TEST_P(HostFieldCases, BC12_AHugeReceiveBufferOfWhichLittleIsUsed) {
  if (GetParam().memory->device_type != NVTE_EP_DEVICE_CPU)
    GTEST_SKIP() << "needs address space that costs nothing: host memory";
  const int64_t hidden = 16384, capacity = 270336;
  run_ranks(1, [&](Rank& rank) {
    nvte_ep_group_config_t config = group_config(4, hidden, 2, capacity);
    config.transport = GetParam().transport;
    const Group group = make_group(rank, config);
    const Handle handle =
        make_handle(group, handle_config(1, 16, NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_MXFP8));
    const int64_t row_bytes = row_parts(NVTE_EP_FORMAT_MXFP8, hidden).bytes;
    EXPECT_EQ(row_bytes, 16896);
    const size_t bytes = static_cast<size_t>(capacity * row_bytes);
    void* base =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(base, MAP_FAILED);
    Array idx(host_memory(), Type::kInt64, {2, 1}, bytes_of(std::vector<int64_t>{3, 1}));
    require(prepare(handle, &idx));
    Random random(seed_of("BC12"));
    const std::vector<float> x = random_tokens(&random, 2, hidden);
    Array tokens(host_memory(), Type::kFloat32, {2, hidden}, encode(Type::kFloat32, x));
    nvte_ep_tensor_t received =
        nvte_ep_tensor_2d(base, capacity, row_bytes, NVTE_EP_DTYPE_UINT, 8, NVTE_EP_DEVICE_CPU, 0);
    nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
    args.tokens = tokens.tensor();
    args.received = &received;
    require(nvte_ep_handle_dispatch(handle.get(), &args, nullptr));
    const Bytes rows = pack(NVTE_EP_FORMAT_MXFP8, Type::kFloat32, x, hidden);
    EXPECT_TRUE(
        std::equal(rows.begin(), rows.begin() + row_bytes, static_cast<uint8_t*>(base) + 16 * row_bytes))
        << "token 0, second slab";
    EXPECT_TRUE(std::equal(rows.begin() + row_bytes, rows.end(), static_cast<uint8_t*>(base)))
        << "token 1, first slab";
    const int64_t page = sysconf(_SC_PAGESIZE);
    std::vector<unsigned char> resident(bytes / static_cast<size_t>(page) + 1);
    ASSERT_EQ(mincore(base, bytes, resident.data()), 0);
    const int64_t used =
        std::count_if(resident.begin(), resident.end(), [](unsigned char r) { return r & 1; });
    // Two slabs of 16 rows. The machine may map pages in larger units, so leave it some.
    EXPECT_LE(used * page, 32 * row_bytes + (int64_t{4} << 20)) << "nothing is touched past the slabs in use";
    munmap(base, bytes);
  });
}

TEST(LocalFieldCases, BC12_SizesThatDoNotFitAreRefused) {
  run_ranks(1, [](Rank& rank) {
    nvte_ep_group_config_t config = group_config(1, 16384, 4, int64_t{1} << 50);
    nvte_ep_group_t group = nullptr;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_group_create(rank.comm, &config, &group),
                  {"recv_capacity"});
    config.recv_capacity = 128;
    config.max_tokens_per_rank = int64_t{1} << 31;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_group_create(rank.comm, &config, &group),
                  {"max_tokens_per_rank"});
    config.max_tokens_per_rank = 4;
    config.hidden = int64_t{1} << 33;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_group_create(rank.comm, &config, &group),
                  {"hidden"});
  });
  // A tensor of more bytes than a 64-bit offset can say.
  nvte_ep_tensor_t tokens = nvte_ep_tensor_2d(reinterpret_cast<void*>(uintptr_t{4096}), int64_t{1} << 61, 32,
                                              NVTE_EP_DTYPE_FLOAT, 32, NVTE_EP_DEVICE_CPU, 0);
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_nvfp4_pack(&tokens, &tokens, nullptr, nullptr),
                {"tokens"});
}

// Host memory: a call has done all reading of every rank when it returns, so inputs may be reused at once.
TEST_P(HostFieldCases, BC14_InputsMayBeReusedWhenACallReturns) {
  const int64_t hidden = 512, tokens = 64;
  const Memory& memory = *GetParam().memory;
  run_ranks(3, [&](Rank& rank) {
    nvte_ep_group_config_t config = group_config(3, hidden, tokens, 192);
    config.transport = GetParam().transport;
    const Group group = make_group(rank, config);
    const Handle handle = make_handle(group, handle_config(1, 1));
    Array idx(memory, Type::kInt64, {tokens, 1}), in(memory, Type::kBFloat16, {tokens, hidden}),
        received(memory, Type::kBFloat16, {192, hidden});
    Array out(memory, Type::kBFloat16, {192, hidden}), result(memory, Type::kBFloat16, {tokens, hidden});
    for (int round = 0; round < 30; ++round) {
      // Rank (round % 3) receives everything: it is the last to finish reading its peers' tokens.
      idx.set(bytes_of(std::vector<int64_t>(tokens, round % 3)));
      require(prepare(handle, &idx));
      idx.set(bytes_of(std::vector<int64_t>(tokens, -1)));
      in.set(encode(Type::kBFloat16, std::vector<float>(static_cast<size_t>(tokens * hidden),
                                                        static_cast<float>(rank.rank + 1))));
      nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
      args.tokens = in.tensor();
      args.receive = NVTE_EP_RECEIVE_DECODED;
      args.received = received.tensor();
      require(nvte_ep_handle_dispatch(handle.get(), &args, nullptr));
      in.set(Bytes(static_cast<size_t>(in.size() * 2), kPoison));
      if (rank.rank == round % 3) {
        const std::vector<float> got = decode(Type::kBFloat16, received.get());
        for (size_t i = 0; i < got.size(); ++i)
          ASSERT_EQ(got[i], static_cast<float>(i / static_cast<size_t>(tokens * hidden) + 1)) << round;
        out.set(received.get());
      }
      nvte_ep_combine_args_t combine = NVTE_EP_COMBINE_ARGS_INIT;
      combine.expert_out = out.tensor();
      combine.result = result.tensor();
      require(nvte_ep_handle_combine(handle.get(), &combine, nullptr));
      out.set(Bytes(static_cast<size_t>(out.size() * 2), kPoison));
      for (float y : decode(Type::kBFloat16, result.get()))
        ASSERT_EQ(y, static_cast<float>(rank.rank + 1)) << round;
    }
  });
}

// ---- numerics -----------------------------------------------------------------------------------------------------------------

TEST(LocalFieldCases, BC16_Mxfp8OfVerySmallValues) {
  const struct {
    float value;
    int scale;
    double magnitude;
    Type type;
  } cases[] = {{1e-35f, 2, 416, Type::kFloat32},         {1e-36f, 0, 176, Type::kFloat32},
               {1e-37f, 0, 18, Type::kFloat32},          {1e-38f, 0, 1.75, Type::kFloat32},
               {1e-39f, 0, 0.171875, Type::kFloat32},    {9.18e-40f, 0, 0.15625, Type::kBFloat16},
               {9.18e-41f, 0, 0.015625, Type::kBFloat16}};
  for (const auto& c : cases) {
    const std::vector<float> x = rounded(c.type, std::vector<float>(32, c.value));
    const Bytes rows = pack(NVTE_EP_FORMAT_MXFP8, c.type, x, 32);
    EXPECT_EQ(rows[32], c.scale) << c.value;
    Bytes one(rows.begin(), rows.end());
    one[32] = 127;  // scale 1: the magnitude itself
    const std::vector<float> magnitudes =
        decode(Type::kFloat32, unpack(NVTE_EP_FORMAT_MXFP8, one, 32, Type::kFloat32));
    const std::vector<float> back =
        decode(Type::kFloat32, unpack(NVTE_EP_FORMAT_MXFP8, rows, 32, Type::kFloat32));
    for (int i = 0; i < 32; ++i) {
      EXPECT_EQ(magnitudes[static_cast<size_t>(i)], c.magnitude) << c.value;
      EXPECT_NEAR(back[static_cast<size_t>(i)], c.value, 0.06 * c.value);
    }
  }
}

TEST(LocalFieldCases, BC17_ScaleCodesAtTheEnds) {
  const struct {
    uint8_t element, scale;
    double value;
  } cases[] = {{56, 0, 0x1p-127}, {56, 1, 0x1p-126},  {56, 127, 1},
               {56, 134, 128},    {56, 254, 0x1p127}, {0, 0, 0}};
  for (const auto& c : cases) {
    Bytes row(48, 0);
    std::fill_n(row.begin(), 32, c.element);
    row[32] = c.scale;
    for (float y : decode(Type::kFloat32, unpack(NVTE_EP_FORMAT_MXFP8, row, 32, Type::kFloat32)))
      EXPECT_EQ(y, c.value) << int{c.scale};
    row[32] = 255;
    for (float y : decode(Type::kFloat32, unpack(NVTE_EP_FORMAT_MXFP8, row, 32, Type::kFloat32)))
      EXPECT_TRUE(std::isnan(y));
  }
}

TEST(LocalFieldCases, BC19_NanAndInfinity) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const int64_t hidden = 96;
  const std::vector<std::vector<float>> specials = {{nan}, {inf}, {-inf}, {nan, inf}, {inf, -inf, nan}};
  for (int32_t format : kScaledFormats) {
    for (const std::vector<float>& special : specials) {
      Random random(seed_of("BC19"));
      std::vector<float> x(static_cast<size_t>(3 * hidden));
      for (float& value : x) value = from_bfloat16(to_bfloat16(1.0f + static_cast<float>(random.uniform())));
      const Bytes clean = pack(format, Type::kBFloat16, x, hidden);
      for (size_t i = 0; i < special.size(); ++i)
        x[static_cast<size_t>(hidden) + 40 + i] = special[i];  // row 1, second block of 32
      const Bytes rows = pack(format, Type::kBFloat16, x, hidden);
      const int64_t row_bytes = row_parts(format, hidden).bytes;
      EXPECT_TRUE(std::equal(rows.begin(), rows.begin() + row_bytes, clean.begin())) << "row 0";
      EXPECT_TRUE(std::equal(rows.begin() + 2 * row_bytes, rows.end(), clean.begin() + 2 * row_bytes))
          << "row 2";
      const std::vector<float> y = decode(Type::kFloat32, unpack(format, rows, hidden, Type::kFloat32));
      for (size_t i = static_cast<size_t>(hidden); i < static_cast<size_t>(2 * hidden); ++i) {
        if (format == NVTE_EP_FORMAT_NVFP4) {
          EXPECT_TRUE(std::isnan(y[i])) << "the whole token reads back as NaN";
        } else if (std::isnan(x[i])) {
          EXPECT_TRUE(std::isnan(y[i])) << "NaN stays NaN";
        } else if (std::isinf(x[i])) {
          EXPECT_GE(std::fabs(y[i]), 0x1p127) << "infinity stays larger than any finite BF16 product";
          EXPECT_EQ(std::signbit(y[i]), std::signbit(x[i]));
        } else if (i < static_cast<size_t>(hidden) + 32 || i >= static_cast<size_t>(hidden) + 64) {
          EXPECT_NEAR(y[i], x[i], 0.07 * std::fabs(x[i])) << "other blocks are unharmed";
        }
      }
    }
  }
  // A token of NaN alone, one of infinity alone: never a silent finite number.
  for (float value : {nan, inf, -inf}) {
    const std::vector<float> x(32, value);
    for (float y : decode(Type::kFloat32,
                          unpack(NVTE_EP_FORMAT_NVFP4, pack(NVTE_EP_FORMAT_NVFP4, Type::kFloat32, x, 32), 32,
                                 Type::kFloat32))) {
      EXPECT_TRUE(std::isnan(y));
    }
    for (float y : decode(Type::kFloat32,
                          unpack(NVTE_EP_FORMAT_MXFP8, pack(NVTE_EP_FORMAT_MXFP8, Type::kFloat32, x, 32), 32,
                                 Type::kFloat32))) {
      EXPECT_EQ(std::isnan(y), std::isnan(value));
      if (std::isinf(value)) {
        EXPECT_GE(std::fabs(y), 0x1p127);
      }
    }
  }
}

TEST(LocalFieldCases, BC21_StochasticRounding) {
  const int64_t hidden = 1024, tokens = 1024;
  const auto pack_values = [&](float value, int64_t seed, int64_t base, int64_t count) {
    std::vector<float> x(static_cast<size_t>(count * hidden), value);
    for (size_t i = 0; i < x.size(); i += 16)
      x[i] = 6.0f;  // block scale 256, token scale 2^-8: elements are their codes
    Array rng(host_memory(), Type::kInt64, {2}, bytes_of(std::vector<int64_t>{seed, 3}));
    nvte_ep_codec_options_t options = NVTE_EP_CODEC_OPTIONS_INIT;
    options.rounding = NVTE_EP_ROUNDING_STOCHASTIC;
    options.rng_state = rng.tensor();
    options.row_id_base = base;
    return pack(NVTE_EP_FORMAT_NVFP4, Type::kFloat32, x, hidden, &options);
  };
  const struct {
    float value, low, high;
  } cases[] = {{2.5f, 2, 3}, {2.25f, 2, 3}, {3.5f, 3, 4}, {5.0f, 4, 6}, {0.25f, 0, 0.5f}, {-2.5f, -3, -2}};
  for (const auto& c : cases) {
    const std::vector<float> y =
        decode(Type::kFloat32,
               unpack(NVTE_EP_FORMAT_NVFP4, pack_values(c.value, 11, 0, tokens), hidden, Type::kFloat32));
    double sum = 0;
    int64_t samples = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      if (i % 16 == 0) {
        ASSERT_EQ(y[i], 6.0f) << "exact codes stay exact";
        continue;
      }
      ASSERT_TRUE(y[i] == c.low || y[i] == c.high) << c.value << " became " << y[i];
      sum += y[i];
      ++samples;
    }
    const double p = (c.value - c.low) / (c.high - c.low);
    const double sigma = (c.high - c.low) * std::sqrt(p * (1 - p) / static_cast<double>(samples));
    EXPECT_NEAR(sum / static_cast<double>(samples), c.value, 4 * sigma);
  }
  for (float exact : {0.0f, 0.5f, -1.5f, 4.0f}) {
    const std::vector<float> y = decode(
        Type::kFloat32, unpack(NVTE_EP_FORMAT_NVFP4, pack_values(exact, 5, 0, 8), hidden, Type::kFloat32));
    for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(y[i], i % 16 == 0 ? 6.0f : exact);
  }
  // The same ids in other portions, hence other numbers of threads: the same bytes. Another seed: others.
  const Bytes whole = pack_values(2.5f, 11, 0, 256);
  Bytes pieces;
  for (int64_t base = 0; base < 256; base += 8) {
    const Bytes piece = pack_values(2.5f, 11, base, 8);
    pieces.insert(pieces.end(), piece.begin(), piece.end());
  }
  EXPECT_EQ(whole, pieces);
  EXPECT_NE(whole, pack_values(2.5f, 12, 0, 256));
  // To nearest, ties to even.
  std::vector<float> ties(16, 6.0f);
  const std::vector<std::pair<float, float>> expected = {{2.5f, 2},  {3.5f, 4},  {5, 4},    {0.25f, 0},
                                                         {0.75f, 1}, {1.25f, 1}, {1.75f, 2}};
  for (size_t i = 0; i < expected.size(); ++i) ties[i + 1] = expected[i].first;
  const std::vector<float> y = decode(
      Type::kFloat32,
      unpack(NVTE_EP_FORMAT_NVFP4, pack(NVTE_EP_FORMAT_NVFP4, Type::kFloat32, ties, 16), 16, Type::kFloat32));
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(y[i + 1], expected[i].second) << expected[i].first;
}

// ---- contract of calls -----------------------------------------------------------------------------------------------------------

TEST_P(FieldCases, BC23_OverflowInEveryMeasure) {
  for (int32_t format : kScaledFormats) {
    for (bool drop : {true, false}) {
      for (Capacity capacity : {Capacity::kNeedLessUnit, Capacity::kNeed, Capacity::kHalf, Capacity::kUnit}) {
        LayerCase c = layer("BC23", format, NVTE_EP_RECEIVE_OPERAND, 90);
        c.experts_per_rank = 4;
        c.top_k = 3;
        c.alignment = 32;
        c.capacity = capacity;
        c.drop = drop;
        run(c, {step_of(c, {90, 80}), step_of(c, {1, 1}, 1)});  // the next call works
      }
    }
  }
}

TEST_P(HostFieldCases, BC23_ConfigsOfOtherSizes) {
  run_ranks(2, [&](Rank& rank) {
    struct Later {
      nvte_ep_group_config_t known;
      uint64_t added[4];
    } later = {group_config(2, 32, 4, 16), {0, 0, 0, 0}};
    later.known.transport = GetParam().transport;
    later.known.struct_size = sizeof(Later);
    nvte_ep_group_t group = nullptr;
    later.added[3] = 1;  // an option that this library does not know
    expect_status(NVTE_EP_STATUS_UNSUPPORTED, nvte_ep_group_create(rank.comm, &later.known, &group),
                  {"nvte_ep_group_create: config", std::to_string(sizeof(Later))});
    later.added[3] = 0;
    require(nvte_ep_group_create(rank.comm, &later.known, &group));
    const Group from_later(std::exchange(group, nullptr));
    nvte_ep_group_config_t first = later.known;
    first.struct_size = NVTE_EP_GROUP_CONFIG_V1_SIZE;
    require(nvte_ep_group_create(rank.comm, &first, &group));
    const Group from_first(group);
    first.struct_size = NVTE_EP_GROUP_CONFIG_V1_SIZE - 1;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_group_create(rank.comm, &first, &group),
                  {"config.struct_size"});
  });
}

// ---- extras -------------------------------------------------------------------------------------------------------------------------

TEST_P(HostFieldCases, BX1_ADeadOrLatePeer) {
  for (int64_t timeout_ms : {500, 1000}) {
    std::atomic<bool> over{false};
    run_ranks(3, [&](Rank& rank) {
      nvte_ep_group_config_t config = group_config(3, 32, 4, 48);
      config.transport = GetParam().transport;
      config.timeout_ns = timeout_ms * kMillisecond;
      Group group = make_group(rank, config);
      Handle handle = make_handle(group, handle_config(1, 16));
      Array idx(*GetParam().memory, Type::kInt64, {4, 1}, bytes_of(std::vector<int64_t>{0, 1, 2, -1}));
      require(prepare(handle, &idx));
      if (rank.rank == 1) {  // sleeps past the time-out
        while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        expect_status(NVTE_EP_STATUS_TIMEOUT, prepare(handle, &idx), {"nvte_ep_handle_prepare", "rank 1"},
                      "the late rank hears of it at once");
      } else {
        const auto start = std::chrono::steady_clock::now();
        expect_status(NVTE_EP_STATUS_TIMEOUT, prepare(handle, &idx), {"nvte_ep_handle_prepare", "rank 1"});
        EXPECT_LE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(2 * timeout_ms));
        over = true;
        const nvte_ep_error_info_t info = poll(group);
        EXPECT_EQ(info.status, NVTE_EP_STATUS_TIMEOUT);
        EXPECT_EQ(info.rank, 1);
      }
      config.timeout_ns = kPatience;
      group = make_group(rank, config);  // a fresh group of the same communicator works
      handle = make_handle(group, handle_config(1, 16));
      require(prepare(handle, &idx));
    });
  }
}

TEST_P(HostFieldCases, BX2_NoLimitIsFoundByAnAbort) {
  run_ranks(9, [&](Rank& rank) {  // nine ranks, 8193 tokens each
    nvte_ep_group_config_t config = group_config(9, 16, 8193, 0);
    config.transport = GetParam().transport;
    const Group group = make_group(rank, config);
    const Handle handle = make_handle(group, handle_config(1, 1, NVTE_EP_FORMAT_NVFP4));
    Array idx(*GetParam().memory, Type::kInt32, {8193, 1}, bytes_of(std::vector<int32_t>(8193, 4)));
    require(prepare(handle, &idx));
    nvte_ep_handle_config_t refused = handle_config(1, 1);
    nvte_ep_handle_t none = nullptr;
    refused.combine = NVTE_EP_FORMAT_NVFP4;
    expect_status(NVTE_EP_STATUS_UNSUPPORTED, nvte_ep_handle_create(group.get(), &refused, &none),
                  {"nvte_ep_handle_create: config.combine", "nvfp4"});
    refused = handle_config(1, 1, NVTE_EP_FORMAT_MXFP8);  // of hidden 16
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_create(group.get(), &refused, &none),
                  {"config.dispatch", "mxfp8", "hidden", "32"});
    const Handle unprepared = make_handle(group, handle_config(1, 1));
    Array result(*GetParam().memory, Type::kBFloat16, {0, 16});
    nvte_ep_combine_args_t args = NVTE_EP_COMBINE_ARGS_INIT;
    args.expert_out = args.result = result.tensor();
    expect_status(NVTE_EP_STATUS_BAD_STATE, nvte_ep_handle_combine(unprepared.get(), &args, nullptr),
                  {"nvte_ep_handle_combine", "prepare"});
  });
}

TEST_P(FieldCases, BX4_ExtremeTokens) {
  LayerCase c = layer("BX4", NVTE_EP_FORMAT_NVFP4, NVTE_EP_RECEIVE_DECODED, 65536);
  c.hidden = 16;
  c.top_k = 1;
  c.weights = false;
  run(c, {step_of(c, {65536, 1})});
}

// One rank is a plain local permute: the tokens of two ranks, given by one, arrive in the same order with the same bytes.
TEST_P(HostFieldCases, BX4_AGroupOfOneGivesTheSameBytes) {
  const int64_t hidden = 64;
  const int experts = 4, top_k = 2;
  const Memory& memory = *GetParam().memory;
  LayerCase c = layer("BX4 one", NVTE_EP_FORMAT_NVFP4, NVTE_EP_RECEIVE_ROWS, 20);
  const Step step = step_of(c, {20, 13});
  RankInputs together = step.ranks[0];
  together.tokens += step.ranks[1].tokens;
  const RankInputs& second = step.ranks[1];
  together.x.insert(together.x.end(), second.x.begin(), second.x.end());
  together.experts.insert(together.experts.end(), second.experts.begin(), second.experts.end());
  const int64_t row_bytes = row_parts(NVTE_EP_FORMAT_NVFP4, hidden).bytes;
  const auto received_by = [&](const Rank& rank, const RankInputs& in) {
    nvte_ep_group_config_t config = group_config(experts, hidden, 64, 0);
    config.transport = GetParam().transport;
    const Group group = make_group(rank, config);
    const Handle handle = make_handle(group, handle_config(top_k, 1, NVTE_EP_FORMAT_NVFP4));
    Array idx(memory, Type::kInt64, {in.tokens, top_k}, bytes_of(in.experts));
    int64_t total = 0;
    nvte_ep_prepare_args_t prepare_args = NVTE_EP_PREPARE_ARGS_INIT;
    prepare_args.topk_idx = idx.tensor();
    prepare_args.total_rows_host = &total;
    require(nvte_ep_handle_prepare(handle.get(), &prepare_args, nullptr));
    Array tokens(memory, Type::kFloat32, {in.tokens, hidden}, encode(Type::kFloat32, in.x));
    Array received(memory, Type::kUInt8, {total, row_bytes});
    nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
    args.tokens = tokens.tensor();
    args.received = received.tensor();
    require(nvte_ep_handle_dispatch(handle.get(), &args, nullptr));
    return received.get();
  };
  Bytes alone, halves[2];
  run_ranks(1, [&](Rank& rank) { alone = received_by(rank, together); });
  run_ranks(2, [&](Rank& rank) {
    halves[rank.rank] = received_by(rank, step.ranks[static_cast<size_t>(rank.rank)]);
  });
  halves[0].insert(halves[0].end(), halves[1].begin(), halves[1].end());
  expect_bytes("rows", halves[0], alone, 1, row_bytes);
}

// A tail that cannot be touched: what lies past the rows really received is not mapped.
class FencedTail {
 public:
  explicit FencedTail(size_t bytes) : used_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t whole = (bytes + page - 1) / page * page;
    bytes_ = 16 * whole + page;
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_, whole, PROT_READ | PROT_WRITE) != 0) throw RankFailure("mmap");
    data_ = base_ + whole - bytes;  // used bytes end where the fence begins
    std::fill_n(data_, bytes, kPoison);
  }
  FencedTail(const FencedTail&) = delete;
  FencedTail& operator=(const FencedTail&) = delete;
  ~FencedTail() { munmap(base_, bytes_); }
  nvte_ep_tensor_t matrix(int64_t rows, int64_t columns, Type type) const {
    return nvte_ep_tensor_2d(data_, rows, columns, info_of(type).code, info_of(type).bits, NVTE_EP_DEVICE_CPU,
                             0);
  }
  nvte_ep_tensor_t vector(int64_t size, Type type) const {
    return nvte_ep_tensor_1d(data_, size, info_of(type).code, info_of(type).bits, NVTE_EP_DEVICE_CPU, 0);
  }
  void* data() const { return data_; }
  void set(const Bytes& content) { std::copy(content.begin(), content.end(), data_); }
  Bytes get() const { return Bytes(data_, data_ + used_); }

 private:
  size_t used_ = 0, bytes_ = 0;
  uint8_t* base_ = nullptr;
  uint8_t* data_ = nullptr;
};

TEST_P(HostFieldCases, BX6_TheUnusedTailIsNeitherReadNorWritten) {
  if (GetParam().memory->device_type != NVTE_EP_DEVICE_CPU)
    GTEST_SKIP() << "needs pages that fault: host memory";
  // 32 slots in use of 256: eight times the rows received.
  const int64_t hidden = 512, capacity = 256, used = 32, tokens = 20;
  for (int32_t format : kScaledFormats) {
    run_ranks(1, [&](Rank& rank) {
      nvte_ep_group_config_t config = group_config(2, hidden, tokens, capacity);
      config.transport = GetParam().transport;
      const Group group = make_group(rank, config);
      const Handle handle = make_handle(group, handle_config(1, 16, format, format));
      std::vector<int64_t> experts(tokens, 0);
      std::fill(experts.begin() + 12, experts.end(), 1);
      Array idx(host_memory(), Type::kInt64, {tokens, 1}, bytes_of(experts));
      FencedTail source(used * 8), expert(used * 4);
      nvte_ep_tensor_t slot_source = source.vector(capacity, Type::kInt64),
                       slot_expert = expert.vector(capacity, Type::kInt32);
      nvte_ep_prepare_args_t prepare_args = NVTE_EP_PREPARE_ARGS_INIT;
      prepare_args.topk_idx = idx.tensor();
      prepare_args.slot_source = &slot_source;
      prepare_args.slot_expert = &slot_expert;
      require(nvte_ep_handle_prepare(handle.get(), &prepare_args, nullptr));

      const RowParts parts = row_parts(format, hidden);
      Array in(host_memory(), Type::kBFloat16, {tokens, hidden},
               encode(Type::kBFloat16, std::vector<float>(tokens * hidden, 6.0f)));  // exact in every format
      Array weights(host_memory(), Type::kFloat32, {tokens, 1}, bytes_of(std::vector<float>(tokens, 0.5f)));
      FencedTail rows(static_cast<size_t>(used * parts.bytes)), decoded(used * hidden * 2),
          recv_weights(used * 4);
      nvte_ep_tensor_t rows_tensor = rows.matrix(capacity, parts.bytes, Type::kUInt8);
      nvte_ep_tensor_t decoded_tensor = decoded.matrix(capacity, hidden, Type::kBFloat16);
      nvte_ep_tensor_t weights_tensor = recv_weights.vector(capacity, Type::kFloat32);
      nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
      args.tokens = in.tensor();
      args.topk_weights = weights.tensor();
      args.recv_weights = &weights_tensor;
      args.received = &rows_tensor;
      require(nvte_ep_handle_dispatch(handle.get(), &args, nullptr));
      args.receive = NVTE_EP_RECEIVE_DECODED;
      args.received = &decoded_tensor;
      require(nvte_ep_handle_dispatch(handle.get(), &args, nullptr));

      // Parts of the operand; where several rows share a scale tile, the part in use ends with the tile.
      FencedTail payload(static_cast<size_t>(used * parts.payload)),
          scales(static_cast<size_t>(used * parts.scales));
      nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
      operand.format = format;
      operand.scale_layout = NVTE_EP_SCALE_LAYOUT_LINEAR;
      operand.hidden = hidden;
      operand.capacity = capacity;
      operand.num_experts = 2;
      operand.alignment = 16;
      operand.payload = payload.data();
      operand.scales = scales.data();
      FencedTail columns(static_cast<size_t>(used * parts.payload)),
          column_scales(static_cast<size_t>(used * parts.scales));
      if (format == NVTE_EP_FORMAT_NVFP4) {  // alignment 16 has columnwise parts
        operand.columnwise_payload = columns.data();
        operand.columnwise_scales = column_scales.data();
      }
      args.receive = NVTE_EP_RECEIVE_OPERAND;
      args.received = nullptr;
      args.operand = &operand;
      require(nvte_ep_handle_dispatch(handle.get(), &args, nullptr));

      // The way back reads padding nowhere and the tail nowhere.
      const Bytes values = encode(Type::kBFloat16, std::vector<float>(used * hidden, 2.0f));
      FencedTail out(used * hidden * 2), slot_weights(used * 4), grads(used * 4), dots(used * 4);
      out.set(values);
      std::fill_n(static_cast<uint8_t*>(out.data()) + 12 * hidden * 2, 4 * hidden * 2,
                  kPoison);  // padding of the first slab: NaN
      slot_weights.set(bytes_of(std::vector<float>(used, 0.25f)));
      grads.set(bytes_of(std::vector<float>(used, 0.75f)));
      nvte_ep_tensor_t out_tensor = out.matrix(capacity, hidden, Type::kBFloat16);
      nvte_ep_tensor_t slot_weights_tensor = slot_weights.vector(capacity, Type::kFloat32);
      nvte_ep_tensor_t grads_tensor = grads.vector(capacity, Type::kFloat32),
                       dots_tensor = dots.vector(capacity, Type::kFloat32);
      Array result(host_memory(), Type::kBFloat16, {tokens, hidden}),
          grad_weights(host_memory(), Type::kFloat32, {tokens, 1});
      nvte_ep_combine_args_t combine = NVTE_EP_COMBINE_ARGS_INIT;
      combine.expert_out = &out_tensor;
      combine.slot_weights = &slot_weights_tensor;
      combine.result = result.tensor();
      require(nvte_ep_handle_combine(handle.get(), &combine, nullptr));
      for (float y : decode(Type::kBFloat16, result.get())) ASSERT_EQ(y, 0.5f);
      nvte_ep_dispatch_backward_args_t backward = NVTE_EP_DISPATCH_BACKWARD_ARGS_INIT;
      backward.grad_received = &out_tensor;
      backward.grad_recv_weights = &grads_tensor;
      backward.grad_tokens = result.tensor();
      backward.grad_topk_weights = grad_weights.tensor();
      require(nvte_ep_handle_dispatch_backward(handle.get(), &backward, nullptr));
      for (float y : decode(Type::kBFloat16, result.get())) ASSERT_EQ(y, 2.0f);
      for (float y : grad_weights.values<float>()) ASSERT_EQ(y, 0.75f);
      args.receive = NVTE_EP_RECEIVE_DECODED;
      args.received = &decoded_tensor;
      args.operand = nullptr;
      args.topk_weights = nullptr;
      args.recv_weights = nullptr;
      nvte_ep_combine_backward_args_t combine_backward = NVTE_EP_COMBINE_BACKWARD_ARGS_INIT;
      combine_backward.send = &args;
      combine_backward.slot_weights = &slot_weights_tensor;
      combine_backward.expert_out = &out_tensor;
      combine_backward.grad_slot_weights = &dots_tensor;
      require(nvte_ep_handle_combine_backward(handle.get(), &combine_backward, nullptr));
      const std::vector<float> got = decode(Type::kFloat32, dots.get());
      for (int64_t s = 0; s < used; ++s) {
        const bool padding = (s >= 12 && s < 16) || s >= 24;
        ASSERT_EQ(got[static_cast<size_t>(s)], padding ? 0.0f : 12.0f * hidden) << s;
      }
    });
  }
}

}  // namespace
