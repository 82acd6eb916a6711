// The caller's thread may flush subnormals, round upwards or trap on floating point exceptions: no byte changes, and the
// environment is the caller's again when a call returns.
#include <cfenv>
#include <functional>

#include "model.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace {

using namespace ep_test;

constexpr int64_t kTokens = 192;  // enough that codecs split the work over threads
constexpr int64_t kHidden = 1024;

// A hostile environment for as long as it lives.
class OddEnvironment {
 public:
  OddEnvironment() {
    std::fegetenv(&saved_);
#if defined(__SSE__)
    _mm_setcsr(_mm_getcsr() | 0x8040);  // flush to zero, denormals are zero
#endif
    std::fesetround(FE_UPWARD);
#if defined(__GLIBC__)
    feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW);
#endif
    control_ = control();
  }
  ~OddEnvironment() { std::fesetenv(&saved_); }
  // Rounding, flushing, traps and the flags that are raised, as one number.
  static uint64_t control() {
    uint64_t word = static_cast<uint64_t>(std::fegetround()) << 32;
#if defined(__SSE__)
    word |= _mm_getcsr();
#endif
    return word;
  }
  void expect_unchanged(const char* what) const {
    const uint64_t now = control();
    EXPECT_EQ(now, control_) << what << " changed the floating point environment";
  }

 private:
  std::fenv_t saved_;
  uint64_t control_ = 0;
};

struct Call {
  const char* name;
  std::function<nvte_ep_status_t()> run;
  std::vector<Array*> outputs;
};

// Runs the calls once as usual and once in an odd environment.
void expect_same_bytes(const std::vector<Call>& calls) {
  std::vector<Bytes> expected;
  for (const Call& call : calls) {
    require(call.run());
    for (Array* output : call.outputs) expected.push_back(output->get());
  }
  for (const Call& call : calls) {
    for (Array* output : call.outputs)
      output->set(Bytes(static_cast<size_t>(output->size() * item_bytes(output->type())), kPoison));
  }
  for (const Call& call : calls) {
    nvte_ep_status_t status;
    {
      const OddEnvironment odd;
      status = call.run();
      odd.expect_unchanged(call.name);
    }
    require(status);
  }
  size_t i = 0;
  for (const Call& call : calls) {
    for (Array* output : call.outputs) expect_bytes(call.name, expected[i++], output->get(), 1, 0);
  }
}

// Values whose quantisation depends on rounding, and products and sums that are subnormal.
std::vector<float> sensitive_tokens() {
  Random random(seed_of("environment"));
  std::vector<float> x = random_tokens(&random, kTokens, kHidden);
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t row = i / static_cast<size_t>(kHidden);
    if (row % 4 == 1) x[i] = std::ldexp(x[i], -120);
    if (row % 4 == 2) x[i] = std::ldexp(x[i], -128);
    if (row % 4 == 3) x[i] = std::ldexp(x[i], -140);
  }
  return x;
}

TEST(FloatEnvironment, CodecsGiveTheSameBytes) {
  const std::vector<float> x = sensitive_tokens();
  for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    const bool nvfp4 = format == NVTE_EP_FORMAT_NVFP4;
    const RowParts parts = row_parts(format, kHidden);
    const Codec& codec = codec_of(format);
    const Memory& host = host_memory();
    Array tokens(host, Type::kFloat32, {kTokens, kHidden}, encode(Type::kFloat32, x));
    Array halves(host, Type::kFloat16, {kTokens, kHidden}, encode(Type::kFloat16, x));
    Array rows(host, Type::kUInt8, {kTokens, parts.bytes}),
        rows_of_halves(host, Type::kUInt8, {kTokens, parts.bytes});
    Array payload(host, Type::kUInt8, {kTokens, parts.payload}),
        scales(host, Type::kUInt8, {kTokens, parts.scales});
    Array token_scales(host, Type::kFloat32, {kTokens});
    Array float32(host, Type::kFloat32, {kTokens, kHidden}),
        float16(host, Type::kFloat16, {kTokens, kHidden});
    Array bfloat16(host, Type::kBFloat16, {kTokens, kHidden}),
        apart(host, Type::kBFloat16, {kTokens, kHidden});
    Array counts(host, Type::kInt32, {2}, bytes_of(std::vector<int32_t>{64, 128}));
    nvte_ep_operand_config_t config = NVTE_EP_OPERAND_CONFIG_INIT;
    config.format = format;
    config.hidden = kHidden;
    config.capacity = kTokens;
    config.num_experts = 2;
    config.alignment = 64;
    config.columnwise = 1;
    nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
    require(nvte_ep_operand_layout(&config, &layout));
    Array buffer(host, Type::kUInt8, {layout.total_bytes});
    nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
    require(nvte_ep_operand_bind(&config, buffer.tensor(), &operand));
    expect_same_bytes({
        {"pack", [&] { return codec.pack(tokens.tensor(), rows.tensor(), nullptr, nullptr); }, {&rows}},
        {"pack of float16",
         [&] { return codec.pack(halves.tensor(), rows_of_halves.tensor(), nullptr, nullptr); },
         {&rows_of_halves}},
        {"quantize",
         [&] {
           return nvfp4 ? nvte_ep_nvfp4_quantize(tokens.tensor(), payload.tensor(), scales.tensor(),
                                                 token_scales.tensor(), nullptr, nullptr)
                        : nvte_ep_mxfp8_quantize(tokens.tensor(), payload.tensor(), scales.tensor(), nullptr,
                                                 nullptr);
         },
         {&payload, &scales, &token_scales}},
        {"unpack to float32",
         [&] { return codec.unpack(rows.tensor(), float32.tensor(), nullptr, nullptr); },
         {&float32}},
        {"unpack to float16",
         [&] { return codec.unpack(rows.tensor(), float16.tensor(), nullptr, nullptr); },
         {&float16}},
        {"unpack to bfloat16",
         [&] { return codec.unpack(rows.tensor(), bfloat16.tensor(), nullptr, nullptr); },
         {&bfloat16}},
        {"dequantize",
         [&] {
           return nvfp4 ? nvte_ep_nvfp4_dequantize(payload.tensor(), scales.tensor(), token_scales.tensor(),
                                                   apart.tensor(), nullptr, nullptr)
                        : nvte_ep_mxfp8_dequantize(payload.tensor(), scales.tensor(), apart.tensor(), nullptr,
                                                   nullptr);
         },
         {&apart}},
        {"direct_receive",
         [&] { return codec.direct_receive(rows.tensor(), counts.tensor(), &operand, nullptr, nullptr); },
         {&buffer}},
    });
  }
}

TEST(FloatEnvironment, SumsGiveTheSameBytes) {
  run_ranks(1, [](Rank& rank) {
    for (int32_t combine : {NVTE_EP_FORMAT_BF16, NVTE_EP_FORMAT_MXFP8}) {
      const Group group = make_group(rank, group_config(2, kHidden, kTokens, 0));
      nvte_ep_handle_config_t config = handle_config(2, 1);
      config.combine = combine;
      const Handle handle = make_handle(group, config);
      std::vector<int32_t> experts;
      for (int64_t t = 0; t < kTokens; ++t) experts.insert(experts.end(), {0, 1});
      Array idx(host_memory(), Type::kInt32, {kTokens, 2}, bytes_of(experts));
      require(prepare(handle, &idx));
      const std::vector<float> x = sensitive_tokens();
      std::vector<float> both = x;  // expert 0, then expert 1 with the channels turned
      both.insert(both.end(), x.begin() + 5, x.end());
      both.insert(both.end(), x.begin(), x.begin() + 5);
      Array out(host_memory(), Type::kFloat32, {2 * kTokens, kHidden}, encode(Type::kFloat32, both));
      Array weights(host_memory(), Type::kFloat32, {2 * kTokens},
                    bytes_of(std::vector<float>(2 * kTokens, 0.3f)));
      Array result(host_memory(), Type::kFloat32, {kTokens, kHidden});
      Array narrow_out(host_memory(), Type::kBFloat16, {2 * kTokens, kHidden}, encode(Type::kBFloat16, both));
      Array narrow(host_memory(), Type::kBFloat16, {kTokens, kHidden});
      Array grads(host_memory(), Type::kFloat32, {2 * kTokens, kHidden}),
          dots(host_memory(), Type::kFloat32, {2 * kTokens});
      Array grad(host_memory(), Type::kFloat32, {kTokens, kHidden}, encode(Type::kFloat32, x));
      nvte_ep_combine_args_t wide_args = NVTE_EP_COMBINE_ARGS_INIT;
      wide_args.expert_out = out.tensor();
      wide_args.slot_weights = weights.tensor();
      wide_args.result = result.tensor();
      nvte_ep_combine_args_t narrow_args = NVTE_EP_COMBINE_ARGS_INIT;
      narrow_args.expert_out = narrow_out.tensor();
      narrow_args.result = narrow.tensor();
      nvte_ep_dispatch_args_t send = NVTE_EP_DISPATCH_ARGS_INIT;
      send.tokens = grad.tensor();
      send.receive = NVTE_EP_RECEIVE_DECODED;
      send.received = grads.tensor();
      nvte_ep_combine_backward_args_t backward = NVTE_EP_COMBINE_BACKWARD_ARGS_INIT;
      backward.send = &send;
      backward.slot_weights = weights.tensor();
      backward.expert_out = out.tensor();
      backward.grad_slot_weights = dots.tensor();
      expect_same_bytes({
          {"combine of float32",
           [&] { return nvte_ep_handle_combine(handle.get(), &wide_args, nullptr); },
           {&result}},
          {"combine of bfloat16",
           [&] { return nvte_ep_handle_combine(handle.get(), &narrow_args, nullptr); },
           {&narrow}},
          {"combine_backward",
           [&] { return nvte_ep_handle_combine_backward(handle.get(), &backward, nullptr); },
           {&grads, &dots}},
      });
    }
  });
}

TEST(FloatEnvironment, IsRestoredAfterAFailureToo) {
  const OddEnvironment odd;
  const nvte_ep_status_t status = nvte_ep_nvfp4_pack(nullptr, nullptr, nullptr, nullptr);
  odd.expect_unchanged("a refused call");
  EXPECT_EQ(status, NVTE_EP_STATUS_INVALID_ARGUMENT);
}

}  // namespace
