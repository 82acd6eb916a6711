// The edge contract, one test a row, on every transport and memory that can run it. Layers are compared with the model byte
// for byte (layer.h), so a test brings the unusual inputs and names what it is about.
#include <set>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "venues.h"

namespace {

using namespace ep_test;

class Edges : public InEveryVenue {};
NVTE_EP_IN_EVERY_VENUE(Edges);
class HostEdges : public InEveryVenue {};
NVTE_EP_ON_THE_HOST(HostEdges);

// The format and receive kinds that matter for what arrives.
std::vector<LayerCase> receive_cases(const std::string& name) {
  std::vector<LayerCase> cases;
  for (int32_t format : {NVTE_EP_FORMAT_BF16, NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    for (int32_t receive : {NVTE_EP_RECEIVE_ROWS, NVTE_EP_RECEIVE_DECODED, NVTE_EP_RECEIVE_OPERAND}) {
      if (format == NVTE_EP_FORMAT_BF16 && receive == NVTE_EP_RECEIVE_OPERAND) continue;
      LayerCase c;
      c.dispatch = c.combine_backward = format;
      c.receive = c.backward_receive = receive;
      c.alignment = 32;
      c.columnwise = true;
      c.name = name + " " + format_name(format) + " receive " + std::to_string(receive);
      cases.push_back(c);
    }
  }
  return cases;
}

Step step_of(const LayerCase& c, const std::vector<int64_t>& tokens, uint64_t salt = 0) {
  Random random(seed_of(c.name) + salt);
  Step step;
  for (int64_t t : tokens) step.ranks.push_back(random_inputs(c, t, &random));
  return step;
}

// ---- T = 0 on some or all ranks, null pointers with it --------------------------------------------------------------------

TEST_P(Edges, NoTokensOnSomeOrAllRanks) {
  for (LayerCase c : receive_cases("no tokens")) {
    for (Capacity capacity : {Capacity::kAmple, Capacity::kEager}) {
      c.capacity = capacity;  // arrays of no elements have null data
      run(c, {step_of(c, {0, 9}), step_of(c, {9, 0}, 1), step_of(c, {0, 0}, 2), step_of(c, {9, 9}, 3)});
    }
  }
}

TEST_P(HostEdges, ARankWithNoTokensMayPassNothing) {
  const int64_t hidden = 64;
  run_ranks(2, [&](Rank& rank) {
    nvte_ep_group_config_t config = group_config(2, hidden, 4, 16);
    config.transport = GetParam().transport;
    const Group group = make_group(rank, config);
    const Handle handle =
        make_handle(group, handle_config(1, 16, NVTE_EP_FORMAT_NVFP4, NVTE_EP_FORMAT_NVFP4));
    const bool sends = rank.rank == 1;
    const Memory& memory = *GetParam().memory;
    Array idx(memory, Type::kInt64, {sends ? 4 : 0, 1}, bytes_of(std::vector<int64_t>(sends ? 4 : 0, 0)));
    require(prepare(handle, &idx));
    Array tokens(memory, Type::kBFloat16, {4, hidden},
                 encode(Type::kBFloat16, std::vector<float>(4 * hidden, 1.5f)));
    Array received(memory, Type::kBFloat16, {16, hidden});
    Array weights(memory, Type::kFloat32, {4, 1}, bytes_of(std::vector<float>(4, 0.5f)));
    Array recv_weights(memory, Type::kFloat32, {16});
    nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
    args.tokens = sends ? tokens.tensor() : nullptr;
    args.topk_weights = sends ? weights.tensor() : nullptr;
    args.recv_weights = recv_weights.tensor();
    args.receive = NVTE_EP_RECEIVE_DECODED;
    args.received = received.tensor();
    require(nvte_ep_handle_dispatch(handle.get(), &args, nullptr));
    std::vector<float> expected(16 * hidden, rank.rank == 0 ? 0.0f : std::numeric_limits<float>::quiet_NaN());
    if (rank.rank == 0) std::fill_n(expected.begin(), 4 * hidden, 1.5f);
    Bytes bytes = encode(Type::kBFloat16, expected);
    if (rank.rank == 1) std::fill(bytes.begin(), bytes.end(), kPoison);  // nothing arrived: untouched
    expect_bytes("received", bytes, received.get(), 2, hidden);
    Bytes expected_weights(16 * 4, kPoison);
    if (rank.rank == 0) {
      std::vector<float> four(16, 0.0f);
      std::fill_n(four.begin(), 4, 0.5f);
      expected_weights = bytes_of(four);
    }
    expect_bytes("recv_weights", expected_weights, recv_weights.get(), 4, 0);
    args.topk_weights = nullptr;
    args.recv_weights = nullptr;
    nvte_ep_combine_backward_args_t backward = NVTE_EP_COMBINE_BACKWARD_ARGS_INIT;
    backward.send = &args;
    require(nvte_ep_handle_combine_backward(handle.get(), &backward, nullptr));
    expect_bytes("gradient", bytes, received.get(), 2, hidden);
  });
}

// ---- a rank that receives nothing; an expert with no tokens ----------------------------------------------------------------

TEST_P(Edges, ARankAndExpertsThatReceiveNothing) {
  for (LayerCase c : receive_cases("nothing received")) {
    c.ranks = 3;
    c.experts_per_rank = 3;
    for (Capacity capacity : {Capacity::kAmple, Capacity::kEager}) {
      c.capacity = capacity;
      Step step = step_of(c, {11, 7, 5});
      for (RankInputs& in : step.ranks) {  // expert 1 of rank 0 and expert 5 of rank 1 only
        for (size_t i = 0; i < in.experts.size(); ++i) in.experts[i] = i % 2 ? 5 : 1;
      }
      run(c, {step});
    }
  }
}

TEST_P(HostEdges, AnExpertWithoutTokensHasAmaxZero) {
  const Memory& memory = *GetParam().memory;
  nvte_ep_operand_config_t layout_config = NVTE_EP_OPERAND_CONFIG_INIT;
  layout_config.format = NVTE_EP_FORMAT_NVFP4;
  layout_config.hidden = 32;
  layout_config.capacity = 48;
  layout_config.num_experts = 3;
  layout_config.alignment = 16;
  layout_config.columnwise = 1;
  run_ranks(1, [&](Rank& rank) {
    const Group group = make_group(rank, group_config(
                                             GetParam(),
                                             [] {
                                               LayerCase c;
                                               c.ranks = 1;
                                               c.experts_per_rank = 3;
                                               c.hidden = 32;
                                               return c;
                                             }(),
                                             48));
    const Handle handle = make_handle(group, handle_config(1, 16, NVTE_EP_FORMAT_NVFP4));
    Array idx(memory, Type::kInt64, {2, 1}, bytes_of(std::vector<int64_t>{2, 2}));
    require(prepare(handle, &idx));
    std::vector<float> x(64, 0.0f);
    x[3] = 2688.0f;  // token scale 1
    Array tokens(memory, Type::kFloat32, {2, 32}, encode(Type::kFloat32, x));
    nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
    require(nvte_ep_operand_layout(&layout_config, &layout));
    Array buffer(memory, Type::kUInt8, {layout.total_bytes});
    nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
    require(nvte_ep_operand_bind(&layout_config, buffer.tensor(), &operand));
    nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
    args.tokens = tokens.tensor();
    args.receive = NVTE_EP_RECEIVE_OPERAND;
    args.operand = &operand;
    require(nvte_ep_handle_dispatch(handle.get(), &args, nullptr));
    const Bytes bytes = buffer.get();
    const auto floats = [&](int64_t offset) {
      return decode(Type::kFloat32, Bytes(bytes.begin() + offset, bytes.begin() + offset + 12));
    };
    EXPECT_EQ(floats(layout.amax_offset), (std::vector<float>{0, 0, 2688}));
    EXPECT_EQ(floats(layout.expert_scale_offset), (std::vector<float>{0, 0, 1}));
    // A quarter of the sum of the block's two live token scales, a zero token's being none: 2^-2.
    EXPECT_EQ(floats(layout.columnwise_expert_scale_offset), (std::vector<float>{0, 0, 0.25f}));
    EXPECT_EQ(floats(layout.columnwise_amax_offset), (std::vector<float>{0, 0, 672}));
  });
}

// ---- any T up to the maximum, changing from step to step on one handle -------------------------------------------------------

TEST_P(Edges, TokensChangeFromStepToStepOnOneHandle) {
  for (LayerCase c : receive_cases("changing T")) {
    c.max_tokens = 33;
    c.accumulate = true;
    for (Capacity capacity : {Capacity::kAmple, Capacity::kEager, Capacity::kHalf}) {
      c.capacity = capacity;
      run(c, {step_of(c, {33, 1}), step_of(c, {1, 33}, 1), step_of(c, {7, 0}, 2), step_of(c, {32, 31}, 3),
              step_of(c, {2, 2}, 4)});
    }
  }
}

// ---- ranks that disagree on a setting (all settings: test_failures.cc) --------------------------------------------------------

TEST_P(HostEdges, DisagreementIsRefusedOnEveryRank) {
  run_ranks(3, [&](Rank& rank) {
    nvte_ep_group_config_t config = group_config(3, rank.rank == 1 ? 64 : 32, 4, 16);
    config.transport = GetParam().transport;
    nvte_ep_group_t group = nullptr;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_group_create(rank.comm, &config, &group),
                  {"hidden"});
    EXPECT_EQ(group, nullptr);
    config.hidden = 32;
    const Group agreed = make_group(rank, config);
  });
}

// ---- index -1; out of range; twice in one token ---------------------------------------------------------------------------------

TEST_P(Edges, UnroutedIndicesSendNothingAndIgnoreTheirWeights) {
  for (LayerCase c : receive_cases("unrouted")) {
    c.top_k = 4;
    Step some = step_of(c, {16, 12}), rows = step_of(c, {16, 12}, 1), all = step_of(c, {16, 12}, 2),
         first = step_of(c, {16, 12}, 3);
    for (size_t r = 0; r < 2; ++r) {
      for (size_t i = 0; i < some.ranks[r].experts.size(); ++i) {
        const float nan = std::numeric_limits<float>::quiet_NaN();
        const auto unroute = [&](Step* step) {
          step->ranks[r].experts[i] = -1;
          step->ranks[r].weights[i] = nan;
        };
        if (i % 3 == 0) unroute(&some);
        if (i / 4 % 3 == 0) unroute(&rows);
        unroute(&all);
        if (i % 4 < 3) unroute(&first);  // -1 before the valid one
      }
    }
    run(c, {some, rows, all, first});
  }
}

TEST_P(Edges, IndicesOutOfRangeAreReportedAndNeverTruncated) {
  for (Type index : {Type::kInt32, Type::kInt64}) {
    LayerCase c = receive_cases("out of range").back();
    c.index_type = index;
    c.top_k = 3;
    c.name += info_of(index).name;
    Step step = step_of(c, {16, 16});
    const int64_t wide[] = {4,
                            1000,
                            -2,
                            std::numeric_limits<int32_t>::min(),
                            std::numeric_limits<int32_t>::max(),
                            int64_t{1} << 32,
                            (int64_t{1} << 32) + 1,
                            std::numeric_limits<int64_t>::min(),
                            (int64_t{1} << 40) + 2};
    for (size_t i = 0; i < step.ranks[0].experts.size(); i += 2) {
      step.ranks[0].experts[i] = wide[i / 2 % (index == Type::kInt32 ? 5 : std::size(wide))];
    }
    run(c, {step, step_of(c, {4, 4}, 1)});
  }
}

TEST_P(Edges, TheFirstMentionOfAnExpertCounts) {
  for (LayerCase c : receive_cases("twice")) {
    c.top_k = 6;
    Step step = step_of(c, {8, 3});
    for (RankInputs& in : step.ranks) {
      for (int64_t t = 0; t < in.tokens; ++t) {
        const std::vector<int64_t> choices =
            t % 2 ? std::vector<int64_t>{3, 3, 1, 1, 1, 0} : std::vector<int64_t>(6, t % 4);
        std::copy(choices.begin(), choices.end(), in.experts.begin() + t * 6);
        for (int k = 0; k < 6; ++k)
          in.weights[static_cast<size_t>(t * 6 + k)] = 0.125f * static_cast<float>(k + 1);
      }
    }
    run(c, {step});
  }
}

// ---- a wrong argument (all of them: test_arguments.cc) ------------------------------------------------------------------------

TEST_P(HostEdges, AWrongArgumentIsNamedAndChangesNothing) {
  run_ranks(2, [&](Rank& rank) {
    const Memory& memory = *GetParam().memory;
    nvte_ep_group_config_t config = group_config(2, 32, 4, 32);
    config.transport = GetParam().transport;
    const Group group = make_group(rank, config);
    const Handle handle = make_handle(group, handle_config(1, 16));
    Array idx(memory, Type::kInt64, {4, 1}, bytes_of(std::vector<int64_t>{0, 1, 0, 1}));
    Array wrong(memory, Type::kInt64, {4, 2});
    Array counts(memory, Type::kInt64, {1});
    nvte_ep_prepare_args_t args = NVTE_EP_PREPARE_ARGS_INIT;
    args.topk_idx = rank.rank == 0 ? wrong.tensor() : idx.tensor();
    args.tokens_routed = counts.tensor();
    if (rank.rank == 0) {
      expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_prepare(handle.get(), &args, nullptr),
                    {"nvte_ep_handle_prepare: topk_idx: expected ", "[n, 1]", "got int64 [4, 2]"});
      EXPECT_EQ(counts.get(), Bytes(8, kPoison));
      args.topk_idx = idx.tensor();
    }
    require(nvte_ep_handle_prepare(handle.get(), &args, nullptr));  // the peer has waited
    EXPECT_EQ(counts.values<int64_t>(), std::vector<int64_t>{4});
  });
}

// ---- more slots than capacity -----------------------------------------------------------------------------------------------------

TEST_P(Edges, OverflowKeepsTheFirstSlotsExactly) {
  for (LayerCase c : receive_cases("overflow")) {
    c.max_tokens = 70;
    c.top_k = 3;
    c.slot_weights = c.receive == NVTE_EP_RECEIVE_DECODED;
    for (Capacity capacity : {Capacity::kNeed, Capacity::kNeedLessUnit, Capacity::kHalf, Capacity::kUnit}) {
      for (bool drop : {false, true}) {
        c.capacity = capacity;
        c.drop = drop;
        run(c, {step_of(c, {70, 64}), step_of(c, {3, 0}, 1), step_of(c, {64, 70}, 2)});
      }
    }
  }
}

// ---- more than 2^31 elements, more than 4 GiB: offsets in sparse memory ----------------------------------------------------------

// Address space of which only the touched pages exist.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes) : bytes_(bytes) {
    void* base =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw RankFailure("no address space for a sparse array");
    base_ = static_cast<uint8_t*>(base);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  ~SparseMemory() { munmap(base_, bytes_); }
  uint8_t* data() const { return base_; }

 private:
  size_t bytes_;
  uint8_t* base_ = nullptr;
};

// A matrix whose rows are more than 2^32 bytes and 2^31 elements apart.
class SparseMatrix {
 public:
  SparseMatrix(Type type, int64_t rows, int64_t columns)
      : type_(type),
        rows_(rows),
        row_bytes_(columns * item_bytes(type)),
        memory_(static_cast<size_t>((rows - 1) * kPitch * item_bytes(type) + row_bytes_)) {
    tensor_ = nvte_ep_tensor_2d(memory_.data(), rows, columns, info_of(type).code, info_of(type).bits,
                                NVTE_EP_DEVICE_CPU, 0);
    tensor_.strides[0] = kPitch;
    tensor_.strides[1] = 1;
  }
  nvte_ep_tensor_t* tensor() { return &tensor_; }
  void set(const Bytes& content) {
    for (int64_t r = 0; r < rows_; ++r) std::copy_n(content.begin() + r * row_bytes_, row_bytes_, row(r));
  }
  Bytes get() const {
    Bytes content;
    for (int64_t r = 0; r < rows_; ++r) content.insert(content.end(), row(r), row(r) + row_bytes_);
    return content;
  }

 private:
  static constexpr int64_t kPitch = (int64_t{1} << 32) + 4096;  // elements
  uint8_t* row(int64_t r) const { return memory_.data() + r * kPitch * item_bytes(type_); }
  Type type_;
  int64_t rows_, row_bytes_;
  SparseMemory memory_;
  nvte_ep_tensor_t tensor_;
};

TEST(Sizes, CodecsReachRowsBeyond4GiB) {
  const int64_t hidden = 64;
  Random random(seed_of("sparse"));
  const std::vector<float> x = random_tokens(&random, 3, hidden);
  for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    const RowParts parts = row_parts(format, hidden);
    SparseMatrix tokens(Type::kFloat32, 3, hidden), rows(Type::kUInt8, 3, parts.bytes),
        back(Type::kBFloat16, 3, hidden);
    tokens.set(encode(Type::kFloat32, x));
    require(codec_of(format).pack(tokens.tensor(), rows.tensor(), nullptr, nullptr));
    const Bytes expected = pack(format, Type::kFloat32, x, hidden);
    expect_bytes("rows", expected, rows.get(), 1, parts.bytes);
    require(codec_of(format).unpack(rows.tensor(), back.tensor(), nullptr, nullptr));
    expect_bytes("tokens", unpack(format, expected, hidden, Type::kBFloat16), back.get(), 2, hidden);
    SparseMatrix payload(Type::kUInt8, 3, parts.payload), scales(Type::kUInt8, 3, parts.scales);
    Array token_scales(host_memory(), Type::kFloat32, {3});
    if (format == NVTE_EP_FORMAT_NVFP4) {
      require(nvte_ep_nvfp4_quantize(tokens.tensor(), payload.tensor(), scales.tensor(),
                                     token_scales.tensor(), nullptr, nullptr));
    } else {
      require(nvte_ep_mxfp8_quantize(tokens.tensor(), payload.tensor(), scales.tensor(), nullptr, nullptr));
    }
    expect_bytes("assembled", expected,
                 assemble(format, {payload.get(), scales.get(), token_scales.get()}, hidden, 0), 1,
                 parts.bytes);
  }
}

TEST(Sizes, LayersReachRowsBeyond4GiB) {
  const int64_t hidden = 32;
  run_ranks(1, [&](Rank& rank) {
    const Group group = make_group(rank, group_config(1, hidden, 3, 4));
    const Handle handle = make_handle(group, handle_config(1, 1, NVTE_EP_FORMAT_BF16, NVTE_EP_FORMAT_NVFP4));
    Random random(seed_of("sparse layer"));
    const std::vector<float> x = rounded(Type::kBFloat16, random_tokens(&random, 3, hidden));
    SparseMatrix idx(Type::kInt32, 3, 1), tokens(Type::kBFloat16, 3, hidden),
        received(Type::kBFloat16, 4, hidden);
    SparseMatrix result(Type::kBFloat16, 3, hidden), weights(Type::kFloat32, 3, 1);
    idx.set(bytes_of(std::vector<int32_t>(3, 0)));
    tokens.set(encode(Type::kBFloat16, x));
    weights.set(bytes_of(std::vector<float>{0.5f, 0.25f, 0.125f}));
    Array recv_weights(host_memory(), Type::kFloat32, {4});
    nvte_ep_prepare_args_t prepare_args = NVTE_EP_PREPARE_ARGS_INIT;
    prepare_args.topk_idx = idx.tensor();
    require(nvte_ep_handle_prepare(handle.get(), &prepare_args, nullptr));
    nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
    args.tokens = tokens.tensor();
    args.receive = NVTE_EP_RECEIVE_DECODED;
    args.received = received.tensor();
    args.topk_weights = weights.tensor();
    args.recv_weights = recv_weights.tensor();
    require(nvte_ep_handle_dispatch(handle.get(), &args, nullptr));
    Bytes expected = encode(Type::kBFloat16, x);
    expected.resize(expected.size() + 2 * hidden, 0);  // the fourth slot: fresh pages
    expect_bytes("received", expected, received.get(), 2, hidden);
    EXPECT_EQ(recv_weights.values<float>()[2], 0.125f);
    nvte_ep_combine_args_t combine = NVTE_EP_COMBINE_ARGS_INIT;
    combine.expert_out = received.tensor();
    combine.result = result.tensor();
    require(nvte_ep_handle_combine(handle.get(), &combine, nullptr));
    expect_bytes("result", encode(Type::kBFloat16, x), result.get(), 2, hidden);
    args.topk_weights = nullptr;
    args.recv_weights = nullptr;
    nvte_ep_combine_backward_args_t backward = NVTE_EP_COMBINE_BACKWARD_ARGS_INIT;
    backward.send = &args;
    require(nvte_ep_handle_combine_backward(handle.get(), &backward, nullptr));
    expected = unpack(NVTE_EP_FORMAT_NVFP4, pack(NVTE_EP_FORMAT_NVFP4, Type::kBFloat16, x, hidden), hidden,
                      Type::kBFloat16);
    expected.resize(expected.size() + 2 * hidden, 0);
    expect_bytes("gradient", expected, received.get(), 2, hidden);
  });
}

// ---- zero block, zero token ---------------------------------------------------------------------------------------------------------

TEST(Zeros, DecodeToExactZeroAndFiniteInputNeverMakesANanScale) {
  const int64_t hidden = 96;
  Random random(seed_of("zeros"));
  std::vector<float> x = random_tokens(&random, 40, hidden);
  for (int64_t t = 0; t < 40; ++t) {
    for (int64_t h = 0; h < hidden; ++h) {
      float& value = x[static_cast<size_t>(t * hidden + h)];
      if (t % 8 == 0) value = h % 2 ? -0.0f : 0.0f;                         // a zero token
      if (t % 8 == 1 && h / 32 == 1) value = -0.0f;                         // a zero block
      if (t % 8 == 2) value = std::copysign(3.3895e38f, value);             // the largest BF16 values
      if (t % 8 == 3) value = std::ldexp(value, -140);                      // subnormals
      if (t % 8 == 4) value = h == 50 ? 3.0e38f : std::ldexp(value, -140);  // both in one token
      if (t % 8 == 5)
        value = std::copysign(std::numeric_limits<float>::max(), value);  // the largest FP32 values
    }
  }
  for (Type type : {Type::kBFloat16, Type::kFloat32}) {
    const std::vector<float> tokens = type == Type::kBFloat16 ? rounded(type, x) : x;
    const Bytes rows = pack(NVTE_EP_FORMAT_NVFP4, type, tokens, hidden);
    const RowParts parts = row_parts(NVTE_EP_FORMAT_NVFP4, hidden);
    for (size_t t = 0; t < 40; ++t) {
      for (int64_t b = 0; b < parts.scales; ++b) {
        const uint8_t scale =
            rows[t * static_cast<size_t>(parts.bytes) + static_cast<size_t>(parts.payload + b)];
        if (type == Type::kBFloat16 && t % 8 == 5) continue;  // rounds to infinity
        ASSERT_LT(scale, 0x7F) << "token " << t << " block " << b;
      }
    }
    for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
      const std::vector<float> y =
          decode(Type::kFloat32, unpack(format, pack(format, type, tokens, hidden), hidden, Type::kFloat32));
      for (size_t i = 0; i < y.size(); ++i) {
        const size_t t = i / static_cast<size_t>(hidden);
        const size_t block = i % static_cast<size_t>(hidden) / 32;
        if (t % 8 == 0 || (t % 8 == 1 && block == 1)) {
          ASSERT_EQ(y[i], 0.0f) << format_name(format) << " token " << t;
        } else if (tokens[i] == 0.0f) {
          ASSERT_FALSE(std::isnan(y[i]));
        }
      }
    }
    // A token of +-0 is zero bytes in NVFP4.
    const std::vector<float> zero(static_cast<size_t>(hidden), -0.0f);
    EXPECT_EQ(pack(NVTE_EP_FORMAT_NVFP4, type, zero, hidden), Bytes(static_cast<size_t>(parts.bytes), 0));
  }
}

// ---- NaN or Inf in a token ---------------------------------------------------------------------------------------------------------

TEST_P(Edges, NanAndInfinityHurtTheirOwnTokenAlone) {
  for (LayerCase c : receive_cases("nan")) {
    for (bool saturate : {false, true}) {
      for (int way = 0; way < 4; ++way) {
        c.saturate = saturate;
        c.input = way % 2 ? Input::kApart : Input::kTokens;
        c.tensor_scale = way / 2 == 1;
        c.token_type = Type::kBFloat16;
        Step step = step_of(c, {16, 16});
        std::vector<float>& x = step.ranks[0].x;
        x[64 * 3 + 5] = std::numeric_limits<float>::quiet_NaN();
        x[64 * 6 + 9] = std::numeric_limits<float>::infinity();
        x[64 * 9 + 9] = -std::numeric_limits<float>::infinity();
        step.ranks[1].grad[7] = std::numeric_limits<float>::quiet_NaN();
        run(c, {step});
      }
    }
  }
}

TEST(NonFinite, OtherTokensOfTheOperandKeepTheirBytes) {
  const int64_t hidden = 64, tokens = 64;
  Random random(seed_of("nan operand"));
  std::vector<float> x(static_cast<size_t>(tokens * hidden));
  for (float& value : x) value = from_bfloat16(to_bfloat16(random.normal()));
  for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    const int64_t block = format == NVTE_EP_FORMAT_MXFP8 ? 32 : 16;
    nvte_ep_operand_config_t config = NVTE_EP_OPERAND_CONFIG_INIT;
    config.format = format;
    config.scale_layout = NVTE_EP_SCALE_LAYOUT_LINEAR;
    config.hidden = hidden;
    config.capacity = tokens;
    config.num_experts = 1;
    config.alignment = 32;
    config.columnwise = 1;
    nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
    require(nvte_ep_operand_layout(&config, &layout));
    const auto receive = [&](const std::vector<float>& values) {
      Array rows(host_memory(), Type::kUInt8, {tokens, row_parts(format, hidden).bytes},
                 pack(format, Type::kBFloat16, values, hidden));
      Array counts(host_memory(), Type::kInt64, {1}, bytes_of(std::vector<int64_t>{tokens}));
      Array buffer(host_memory(), Type::kUInt8, {layout.total_bytes});
      nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
      require(nvte_ep_operand_bind(&config, buffer.tensor(), &operand));
      require(codec_of(format).direct_receive(rows.tensor(), counts.tensor(), &operand, nullptr, nullptr));
      return buffer.get();
    };
    const Bytes clean = receive(x);
    const int64_t hurt = 37;
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> y = x;
      y[static_cast<size_t>(hurt * hidden + 11)] = bad;
      const Bytes got = receive(y);
      const std::string what = std::string(format_name(format)) + (std::isnan(bad) ? " NaN" : " infinity");
      const int64_t row_payload = row_parts(format, hidden).payload, columns = hidden / block;
      for (int64_t t = 0; t < tokens; ++t) {
        const auto same = [&](int64_t offset, int64_t bytes) {
          return std::equal(clean.begin() + offset, clean.begin() + offset + bytes, got.begin() + offset);
        };
        if (t != hurt) {
          ASSERT_TRUE(same(layout.payload_offset + t * row_payload, row_payload)) << what << " row " << t;
          ASSERT_TRUE(same(layout.scales_offset + t * columns, columns)) << what << " row " << t;
        }
        for (int64_t h = 0; h < hidden && t / block != hurt / block;
             ++h) {  // columnwise, blocks of other tokens
          const int64_t payload_at = format == NVTE_EP_FORMAT_MXFP8 ? t * hidden + h : h * tokens / 2 + t / 2;
          const int64_t scale_at =
              format == NVTE_EP_FORMAT_MXFP8 ? t / block * hidden + h : h * (tokens / block) + t / block;
          ASSERT_TRUE(same(layout.columnwise_payload_offset + payload_at, 1)) << what << " " << t << " " << h;
          ASSERT_TRUE(same(layout.columnwise_scales_offset + scale_at, 1)) << what << " " << t << " " << h;
        }
      }
      if (format == NVTE_EP_FORMAT_NVFP4) {
        for (int64_t j = 0; j < columns; ++j)
          EXPECT_EQ(got[static_cast<size_t>(layout.scales_offset + hurt * columns + j)], 0x7F) << what;
        for (int64_t h = 0; h < hidden; ++h) {
          EXPECT_EQ(
              got[static_cast<size_t>(layout.columnwise_scales_offset + h * (tokens / block) + hurt / block)],
              0x7F)
              << what << " " << h;
        }
        EXPECT_TRUE(std::equal(clean.begin() + layout.amax_offset, clean.begin() + layout.amax_offset + 4,
                               got.begin() + layout.amax_offset))
            << "amax comes from the other rows";
      }
    }
  }
}

// ---- hostile packed rows (more: tests/fuzz) --------------------------------------------------------------------------------------

TEST(HostileRows, IllegalTokenScalesReadAsNanAndTheSignOfAScaleIsIgnored) {
  const int64_t hidden = 16;
  const RowParts parts = row_parts(NVTE_EP_FORMAT_NVFP4, hidden);
  const auto decode_with = [&](uint32_t token_scale, uint8_t scale) {
    Bytes row(static_cast<size_t>(parts.bytes), 0);
    for (int i = 0; i < 8; ++i) row[static_cast<size_t>(i)] = 0x31;  // 0.5 and 1.5
    row[8] = scale;
    std::memcpy(&row[static_cast<size_t>(parts.token_scale_at)], &token_scale, 4);
    return decode(Type::kFloat32, unpack(NVTE_EP_FORMAT_NVFP4, row, hidden, Type::kFloat32));
  };
  const uint8_t one = 0x38;
  for (int k = -126; k <= 127; ++k) {
    const float first = decode_with(bits_of(std::ldexp(1.0f, k)), one)[0];
    if (k < -116 || k > 105) {
      EXPECT_TRUE(std::isnan(first)) << k;
    } else {
      EXPECT_EQ(first, std::ldexp(0.5, k)) << k;
    }
  }
  for (uint32_t illegal : {0x80000000u, 0xBF800000u, 0x3F800001u, 0x3FC00000u, 0x00000001u, 0x007FFFFFu,
                           0x7F800000u, 0x7FC00000u, 0xFFFFFFFFu}) {
    for (float y : decode_with(illegal, one)) EXPECT_TRUE(std::isnan(y)) << std::hex << illegal;
  }
  for (float y : decode_with(0, one)) EXPECT_EQ(y, 0.0f);
  EXPECT_EQ(decode_with(0x3F800000u, one | 0x80), decode_with(0x3F800000u, one));
  for (uint8_t nan : {uint8_t{0x7F}, uint8_t{0xFF}}) {
    for (float y : decode_with(0x3F800000u, nan)) EXPECT_TRUE(std::isnan(y));
  }
}

// ---- stochastic rounding -----------------------------------------------------------------------------------------------------------

TEST_P(HostEdges, StochasticRoundingFollowsIdsAndNotRanksOrTime) {
  const int64_t hidden = 256, tokens = 8;
  const Memory& memory = *GetParam().memory;
  std::vector<float> x(static_cast<size_t>(tokens * hidden), 2.5f);  // halfway between two codes
  for (size_t i = 0; i < x.size(); i += 16) x[i] = 6.0f;
  std::vector<Bytes> rows_of[2];  // per rank, per round
  for (int round = 0; round < 2; ++round) {
    rows_of[0].emplace_back();
    rows_of[1].emplace_back();
    run_ranks(2, [&](Rank& rank) {
      if (rank.rank == round)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the order of ranks changes
      nvte_ep_group_config_t config = group_config(2, hidden, tokens, 2 * tokens);
      config.transport = GetParam().transport;
      const Group group = make_group(rank, config);
      const Handle handle = make_handle(group, handle_config(1, 1, NVTE_EP_FORMAT_NVFP4));
      Array idx(memory, Type::kInt64, {tokens, 1}, bytes_of(std::vector<int64_t>(tokens, 1 - rank.rank)));
      require(prepare(handle, &idx));
      Array in(memory, Type::kFloat32, {tokens, hidden}, encode(Type::kFloat32, x));
      Array rng(memory, Type::kInt64, {2}, bytes_of(std::vector<int64_t>{42, 7}));
      Array received(memory, Type::kUInt8, {2 * tokens, row_parts(NVTE_EP_FORMAT_NVFP4, hidden).bytes});
      nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
      args.tokens = in.tensor();
      args.rounding = NVTE_EP_ROUNDING_STOCHASTIC;
      args.rng_state = rng.tensor();
      args.received = received.tensor();
      require(nvte_ep_handle_dispatch(handle.get(), &args, nullptr));
      rows_of[1 - rank.rank].back() = received.get();
    });
  }
  EXPECT_EQ(rows_of[0][0], rows_of[0][1]) << "same seed, offset and ids: same bytes";
  EXPECT_EQ(rows_of[1][0], rows_of[1][1]);
  const size_t row_bytes = static_cast<size_t>(row_parts(NVTE_EP_FORMAT_NVFP4, hidden).bytes);
  std::set<Bytes> different;
  for (const Bytes& rows : {rows_of[0][0], rows_of[1][0]}) {
    for (size_t t = 0; t < tokens; ++t)
      different.emplace(rows.begin() + static_cast<std::ptrdiff_t>(t * row_bytes),
                        rows.begin() + static_cast<std::ptrdiff_t>(t * row_bytes) + hidden / 2);
  }
  EXPECT_EQ(different.size(), 2 * static_cast<size_t>(tokens))
      << "equal tokens draw differently on every row of every rank";
}

// ---- zero_copy -----------------------------------------------------------------------------------------------------------------------

// Bytes of symmetric memory seen as a tensor.
nvte_ep_tensor_t view(void* base, int64_t offset, int64_t rows, int64_t columns, Type type,
                      const Memory& memory) {
  return nvte_ep_tensor_2d(static_cast<uint8_t*>(base) + offset, rows, columns, info_of(type).code,
                           info_of(type).bits, memory.device_type, 0);
}

TEST_P(HostEdges, ZeroCopyTensorsLieInSymmetricMemoryAtEqualOffsets) {
  const int64_t hidden = 64, slots = 16, tokens = 4;
  const Memory& memory = *GetParam().memory;
  run_ranks(2, [&](Rank& rank) {
    nvte_ep_group_config_t config = group_config(2, hidden, tokens, slots);
    config.transport = GetParam().transport;
    config.zero_copy = 1;
    const Group group = make_group(rank, config);
    const Handle handle = make_handle(group, handle_config(1, 16));
    void* block = nullptr;
    require(nvte_ep_mem_alloc(group.get(), 3 * slots * hidden * 2, &block));
    void* other = nullptr;
    require(nvte_ep_mem_alloc(group.get(), 3 * slots * hidden * 2, &other));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 256, 0u);
    Array idx(memory, Type::kInt64, {tokens, 1}, bytes_of(std::vector<int64_t>(tokens, 1 - rank.rank)));
    require(prepare(handle, &idx));
    const std::vector<float> x(static_cast<size_t>(tokens * hidden), 1.0f + static_cast<float>(rank.rank));
    Array in(memory, Type::kBFloat16, {tokens, hidden}, encode(Type::kBFloat16, x));
    Array outside(memory, Type::kBFloat16, {slots, hidden});
    const int64_t bytes = slots * hidden * 2;
    nvte_ep_tensor_t good = view(block, bytes, slots, hidden, Type::kBFloat16, memory);
    nvte_ep_tensor_t beyond = view(block, 2 * bytes + 2 * hidden, slots, hidden, Type::kBFloat16, memory);
    void* unlike_base = rank.rank == 0 ? block : other;
    nvte_ep_tensor_t unlike = view(unlike_base, bytes, slots, hidden, Type::kBFloat16, memory);
    nvte_ep_tensor_t uneven = view(block, rank.rank == 0 ? bytes : 0, slots, hidden, Type::kBFloat16, memory);
    nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
    args.tokens = in.tensor();
    args.receive = NVTE_EP_RECEIVE_DECODED;
    args.received = outside.tensor();
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_dispatch(handle.get(), &args, nullptr),
                  {"received", "mem_alloc"});
    args.received = &beyond;  // begins inside and ends outside
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_dispatch(handle.get(), &args, nullptr),
                  {"received", "mem_alloc"});
    args.received = &uneven;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_dispatch(handle.get(), &args, nullptr),
                  {"offset"}, "on both ranks");
    args.received = &unlike;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_dispatch(handle.get(), &args, nullptr),
                  {"allocation"}, "of two allocations");
    args.received = &good;
    require(nvte_ep_handle_dispatch(handle.get(), &args, nullptr));
    Bytes expected = encode(Type::kBFloat16, std::vector<float>(static_cast<size_t>(tokens * hidden),
                                                                2.0f - static_cast<float>(rank.rank)));
    expected.resize(static_cast<size_t>(bytes), 0);
    Bytes got(expected.size());
    memory.copy(got.data(), good.data, got.size());
    expect_bytes("received", expected, got, 2, hidden);

    Array result(memory, Type::kBFloat16, {tokens, hidden});
    nvte_ep_combine_args_t combine = NVTE_EP_COMBINE_ARGS_INIT;
    combine.result = result.tensor();
    nvte_ep_tensor_t wide = view(block, 2 * bytes, slots, hidden, Type::kBFloat16, memory);
    wide.strides[0] = 2 * hidden;  // its last rows lie outside
    wide.strides[1] = 1;
    for (nvte_ep_tensor_t* wrong : {outside.tensor(), &beyond, &wide}) {
      combine.expert_out = wrong;
      expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_combine(handle.get(), &combine, nullptr),
                    {"expert_out", "mem_alloc"});
    }
    combine.expert_out = &uneven;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_combine(handle.get(), &combine, nullptr),
                  {"offset"});
    combine.expert_out = &good;
    require(nvte_ep_handle_combine(handle.get(), &combine, nullptr));
    expect_bytes("result", encode(Type::kBFloat16, x), result.get(), 2, hidden);
    require(nvte_ep_mem_free(group.get(), block));
  });
}

TEST_P(HostEdges, SymmetricMemoryIsCollectiveWithEqualSizes) {
  run_ranks(3, [&](Rank& rank) {
    nvte_ep_group_config_t config = group_config(3, 32, 4, 16);
    config.transport = GetParam().transport;
    const Group group = make_group(rank, config);
    void* first = nullptr;
    void* second = nullptr;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT,
                  nvte_ep_mem_alloc(group.get(), rank.rank == 2 ? 512 : 256, &first),
                  {"nvte_ep_mem_alloc: bytes"});
    EXPECT_EQ(first, nullptr);
    require(nvte_ep_mem_alloc(group.get(), 100, &first));
    require(nvte_ep_mem_alloc(group.get(), 5000, &second));
    const Bytes fill(5000, static_cast<uint8_t>(rank.rank));
    GetParam().memory->copy(second, fill.data(), fill.size());
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT,
                  nvte_ep_mem_free(group.get(), rank.rank == 0 ? second : first), {"nvte_ep_mem_free"},
                  "different blocks");
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT,
                  nvte_ep_mem_free(group.get(), static_cast<uint8_t*>(second) + 256),
                  {"nvte_ep_mem_free: pointer"});
    int on_the_stack = 0;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_mem_free(group.get(), &on_the_stack),
                  {"nvte_ep_mem_free: pointer"});
    require(nvte_ep_mem_free(group.get(), first));
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_mem_free(group.get(), first),
                  {"nvte_ep_mem_free: pointer"}, "twice");
    require(nvte_ep_mem_free(group.get(), nullptr));
    Bytes back(5000);
    GetParam().memory->copy(back.data(), second, back.size());
    EXPECT_EQ(back, fill) << "the other block is as it was; it goes with the group";
  });
}

// ---- fork, exit with live objects ------------------------------------------------------------------------------------------------

TEST(Process, AForkedChildWorks) {
  const WorldId id;
  const Comm comm = make_comm(id, 0, 1);
  const Group group = make_group(Rank{0, 1, comm.get()}, group_config(1, 32, 2, 2));
  const pid_t child = fork();
  if (child == 0) {  // no gtest in here
    Array idx(host_memory(), Type::kInt32, {2, 1}, bytes_of(std::vector<int32_t>{0, 0}));
    nvte_ep_handle_t handle = nullptr;
    nvte_ep_handle_config_t config = handle_config(1, 1);
    bool fine = nvte_ep_handle_create(group.get(), &config, &handle) == NVTE_EP_STATUS_OK;
    nvte_ep_prepare_args_t args = NVTE_EP_PREPARE_ARGS_INIT;
    args.topk_idx = idx.tensor();
    fine = fine && nvte_ep_handle_prepare(handle, &args, nullptr) == NVTE_EP_STATUS_OK;
    fine = fine && nvte_ep_handle_destroy(handle) == NVTE_EP_STATUS_OK;
    _exit(fine ? 0 : 1);
  }
  ASSERT_GT(child, 0);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// Runs in a process of its own: a group whose handle was used, another one in which a thread still waits for a peer.
void exit_with_live_objects() {
  const WorldId id;
  nvte_ep_comm_t comm = make_comm(id, 0, 1).release();
  nvte_ep_group_t group = make_group(Rank{0, 1, comm}, group_config(1, 32, 2, 2)).release();
  nvte_ep_handle_config_t config = handle_config(1, 1);
  nvte_ep_handle_t handle = nullptr;
  require(nvte_ep_handle_create(group, &config, &handle));
  const WorldId lonely;
  nvte_ep_comm_t waiting = make_comm(lonely, 0, 2).release();
  std::thread([waiting] {
    nvte_ep_group_config_t settings = group_config(2, 32, 2, 2);
    nvte_ep_group_t never = nullptr;
    (void)nvte_ep_group_create(waiting, &settings, &never);
  }).detach();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  std::exit(0);
}

TEST(ProcessDeathTest, ExitWithLiveObjectsIsClean) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(exit_with_live_objects(), ::testing::ExitedWithCode(0), "^$");
}

}  // namespace
