// Every argument of every function, wrong once: the status class, a text that names the function and the argument, nothing
// written, the object usable afterwards, and a peer that waits while a refused rank repeats its call.
//
// A function's valid call is described once (Call); the wrong ones are made from it. Structs are passed in heap blocks of
// exactly struct_size bytes, so that a sanitizer sees a read past the caller's struct.
#include "model.h"

namespace {

using namespace ep_test;

constexpr int32_t kNoSuchDevice = 99;

// ---- calls and their arguments ---------------------------------------------------------------------------------------------

// A copy of a struct in a heap block of `size` bytes.
template <typename Struct>
class Block {
 public:
  Block(const Struct& value, size_t size) : bytes_(new uint8_t[size]()) {
    std::memcpy(bytes_.get(), &value, std::min(size, sizeof(Struct)));
    const uint32_t written = static_cast<uint32_t>(size);
    std::memcpy(bytes_.get(), &written, sizeof(written));
  }
  Struct* get() const { return reinterpret_cast<Struct*>(bytes_.get()); }
  uint8_t& last(size_t size) const { return bytes_[size - 1]; }

 private:
  std::unique_ptr<uint8_t[]> bytes_;
};

struct TensorArgument {
  std::string name;            // as texts name it
  nvte_ep_tensor_t** pointer;  // where the call reads it from
  bool required = true;        // NULL is wrong
  int64_t alignment = 0;       // of its base, in bytes; 0: its element
  bool free_rows = false;      // any number of rows (elements of a 1-d tensor) is right
  bool at_least = false;       // more rows than needed are right
};

struct StructArgument {
  std::string name;
  std::function<nvte_ep_status_t(void* replacement)> call;  // the call with another struct in its place
  const void* value;
  size_t size;
  size_t v1_size;
  bool required = true;
};

struct NumberArgument {
  std::string name;
  int32_t* value;
  std::vector<int32_t> wrong;
  nvte_ep_status_t status;
};

struct Call {
  std::string function;
  std::function<nvte_ep_status_t()> run;
  std::vector<TensorArgument> tensors;
  std::vector<StructArgument> structs;
  std::vector<NumberArgument> numbers;
  std::vector<Array*> arrays;  // everything that a refused call must leave alone

  // One call with something wrong.
  void expect(nvte_ep_status_t status, const std::string& argument, const std::string& what,
              const std::function<nvte_ep_status_t()>& call) const {
    std::vector<Bytes> before;
    for (Array* array : arrays) before.push_back(array->get());
    const nvte_ep_status_t got = call();
    expect_status(status, got, {function + ": ", argument}, function + " " + argument + " " + what);
    for (size_t i = 0; i < arrays.size(); ++i)
      EXPECT_EQ(before[i], arrays[i]->get()) << function << " " << argument << " " << what << " wrote";
  }

  void expect_refusals() const {
    for (const TensorArgument& argument : tensors) refuse_tensor(argument);
    for (const StructArgument& argument : structs) refuse_struct(argument);
    for (const NumberArgument& argument : numbers) {
      const int32_t right = *argument.value;
      for (int32_t wrong : argument.wrong) {
        *argument.value = wrong;
        expect(argument.status, argument.name, "= " + std::to_string(wrong), run);
      }
      *argument.value = right;
    }
  }

 private:
  void refuse_tensor(const TensorArgument& argument) const {
    nvte_ep_tensor_t* const right = *argument.pointer;
    const auto with = [&](const std::string& what, nvte_ep_status_t status,
                          const std::function<void(nvte_ep_tensor_t*)>& change) {
      nvte_ep_tensor_t wrong = *right;
      change(&wrong);
      *argument.pointer = &wrong;
      expect(status, argument.name, what, run);
    };
    const nvte_ep_status_t invalid = NVTE_EP_STATUS_INVALID_ARGUMENT;
    const bool matrix = right->ndim == 2;
    if (argument.required) {
      *argument.pointer = nullptr;
      expect(invalid, argument.name, "NULL", run);
    }
    with("data NULL", invalid, [](nvte_ep_tensor_t* t) { t->data = nullptr; });
    with("dtype float64", invalid,
         [](nvte_ep_tensor_t* t) { t->dtype_code = NVTE_EP_DTYPE_FLOAT, t->dtype_bits = 64; });
    with("dtype code 77", invalid, [](nvte_ep_tensor_t* t) { t->dtype_code = 77; });
    with("int16", invalid,
         [](nvte_ep_tensor_t* t) { t->dtype_code = NVTE_EP_DTYPE_INT, t->dtype_bits = 16; });
    with("lanes", invalid, [](nvte_ep_tensor_t* t) { t->dtype_lanes = 4; });
    with("ndim 0", invalid, [](nvte_ep_tensor_t* t) { t->ndim = 0; });
    with("ndim -1", invalid, [](nvte_ep_tensor_t* t) { t->ndim = -1; });
    with("ndim 3", invalid, [](nvte_ep_tensor_t* t) { t->ndim = 3, t->shape[2] = 1; });
    with("ndim 1000", invalid, [](nvte_ep_tensor_t* t) { t->ndim = 1000; });
    with("another ndim", invalid, [&](nvte_ep_tensor_t* t) { t->ndim = matrix ? 1 : 2, t->shape[1] = 1; });
    with("negative shape", invalid, [](nvte_ep_tensor_t* t) { t->shape[0] = -1; });
    if (!argument.free_rows) {
      with("fewer rows", invalid, [](nvte_ep_tensor_t* t) { t->shape[0] -= 1; });
      if (!argument.at_least) with("more rows", invalid, [](nvte_ep_tensor_t* t) { t->shape[0] += 1; });
    }
    if (matrix) {
      with("fewer columns", invalid, [](nvte_ep_tensor_t* t) { t->shape[1] -= 1; });
      with("more columns", invalid, [](nvte_ep_tensor_t* t) { t->shape[1] += 1; });
      with("negative columns", invalid, [](nvte_ep_tensor_t* t) { t->shape[1] = -t->shape[1]; });
      const auto strides = [&](int64_t row, int64_t column) {
        return [row, column](nvte_ep_tensor_t* t) { t->strides[0] = row, t->strides[1] = column; };
      };
      if (right->shape[1] > 1) {
        with("inner stride 2", invalid, strides(2 * right->shape[1], 2));
        with("transposed", invalid, strides(1, right->shape[0]));
      }
      if (right->shape[0] > 1) {
        with("overlapping rows", invalid, strides(right->shape[1] - 1, 1));
        with("negative row stride", invalid, strides(-right->shape[1], 1));
        with("huge row stride", invalid, strides(std::numeric_limits<int64_t>::max(), 1));
        if (argument.alignment > 1) with("unaligned rows", invalid, strides(right->shape[1] + 1, 1));
      }
    } else if (right->shape[0] > 1) {
      with("stride 2", invalid, [](nvte_ep_tensor_t* t) { t->strides[0] = 2; });
    }
    const int64_t alignment = argument.alignment > 0 ? argument.alignment : right->dtype_bits / 8;
    if (alignment > 1) {
      with("unaligned", invalid,
           [&](nvte_ep_tensor_t* t) { t->data = static_cast<uint8_t*>(t->data) + alignment / 2; });
    }
    with("device type 77", invalid, [](nvte_ep_tensor_t* t) { t->device_type = 77; });
    with("struct_size 0", invalid, [](nvte_ep_tensor_t* t) { t->struct_size = 0; });
    with("flags", NVTE_EP_STATUS_UNSUPPORTED, [](nvte_ep_tensor_t* t) { t->flags = 1; });

    *argument.pointer = nullptr;
    for (size_t size : {size_t{4}, sizeof(nvte_ep_tensor_t) - 1}) {
      const Block<nvte_ep_tensor_t> shorter(*right, size);
      *argument.pointer = shorter.get();
      expect(invalid, argument.name, "struct of " + std::to_string(size) + " bytes", run);
    }
    const size_t longer = sizeof(nvte_ep_tensor_t) + 24;
    const Block<nvte_ep_tensor_t> dirty(*right, longer);
    dirty.last(longer) = 1;
    *argument.pointer = dirty.get();
    expect(NVTE_EP_STATUS_UNSUPPORTED, argument.name, "struct with a dirty tail", run);
    *argument.pointer = right;
  }

  void refuse_struct(const StructArgument& argument) const {
    const uint8_t* bytes = static_cast<const uint8_t*>(argument.value);
    const auto with = [&](const std::string& what, size_t size, nvte_ep_status_t status,
                          const std::function<void(uint8_t*)>& change) {
      std::unique_ptr<uint8_t[]> copy(new uint8_t[size]());
      std::memcpy(copy.get(), bytes, std::min(size, argument.size));
      const uint32_t written = static_cast<uint32_t>(size);
      std::memcpy(copy.get(), &written, sizeof(written));
      change(copy.get());
      expect(status, argument.name, what, [&] { return argument.call(copy.get()); });
    };
    const auto nothing = [](uint8_t*) {};
    if (argument.required) {
      expect(NVTE_EP_STATUS_INVALID_ARGUMENT, argument.name, "NULL", [&] { return argument.call(nullptr); });
    }
    with("struct_size 4", 4, NVTE_EP_STATUS_INVALID_ARGUMENT, nothing);
    with("struct_size V1 - 1", argument.v1_size - 1, NVTE_EP_STATUS_INVALID_ARGUMENT, nothing);
    with("dirty tail", argument.size + 16, NVTE_EP_STATUS_UNSUPPORTED,
         [&](uint8_t* copy) { copy[argument.size + 15] = 1; });
    with("struct_size 2^31", argument.size, NVTE_EP_STATUS_INVALID_ARGUMENT, [](uint8_t* copy) {
      const uint32_t huge = 0x80000000u;
      std::memcpy(copy, &huge, sizeof(huge));
    });
    with("flags", argument.size, NVTE_EP_STATUS_UNSUPPORTED, [](uint8_t* copy) { copy[4] = 1; });
  }
};

// The call with its struct longer by zeros, as a later caller passes it.
void expect_longer_struct_accepted(const StructArgument& argument) {
  std::unique_ptr<uint8_t[]> copy(new uint8_t[argument.size + 64]());
  std::memcpy(copy.get(), argument.value, argument.size);
  const uint32_t size = static_cast<uint32_t>(argument.size + 64);
  std::memcpy(copy.get(), &size, sizeof(size));
  expect_status(NVTE_EP_STATUS_OK, argument.call(copy.get()), {}, argument.name + " longer by zeros");
}

template <typename Struct>
StructArgument struct_argument(const std::string& name, const Struct* value, size_t v1_size,
                               std::function<nvte_ep_status_t(const Struct*)> call, bool required = true) {
  return {name,    [call](void* other) { return call(static_cast<const Struct*>(other)); },
          value,   sizeof(Struct),
          v1_size, required};
}

nvte_ep_stream_t some_stream() { return reinterpret_cast<nvte_ep_stream_t>(uintptr_t{0x1000}); }

// ---- codecs -----------------------------------------------------------------------------------------------------------------

constexpr int64_t kHidden = 64;
constexpr int64_t kRows = 32;

// Everything that a codec's call may point at. The pointers are what calls are made with.
struct CodecArguments {
  explicit CodecArguments(int32_t codec_format)
      : format(codec_format),
        parts(row_parts(codec_format, kHidden)),
        tokens(host_memory(), Type::kFloat32, {kRows, kHidden},
               encode(Type::kFloat32, std::vector<float>(kRows * kHidden, 1.5f))),
        rows(host_memory(), Type::kUInt8, {kRows, parts.bytes},
             Bytes(static_cast<size_t>(kRows * parts.bytes), 0)),
        payload(host_memory(), Type::kUInt8, {kRows, parts.payload},
                Bytes(static_cast<size_t>(kRows * parts.payload), 0)),
        scales(host_memory(), Type::kUInt8, {kRows, parts.scales},
               Bytes(static_cast<size_t>(kRows * parts.scales), 0)),
        token_scales(host_memory(), Type::kFloat32, {kRows}, bytes_of(std::vector<float>(kRows, 1.0f))),
        rng(host_memory(), Type::kInt64, {2}, bytes_of(std::vector<int64_t>{1, 2})),
        tensor_scale(host_memory(), Type::kFloat32, {1}, bytes_of(std::vector<float>{1.0f})),
        row_count(host_memory(), Type::kInt64, {1}, bytes_of(std::vector<int64_t>{kRows})),
        expert_scale(host_memory(), Type::kFloat32, {2}, bytes_of(std::vector<float>{1.0f, 1.0f})),
        findings(host_memory(), Type::kInt32, {1}, bytes_of(std::vector<int32_t>{0})) {
    tokens_p = tokens.tensor(), rows_p = rows.tensor(), payload_p = payload.tensor(),
    scales_p = scales.tensor();
    token_scales_p = format == NVTE_EP_FORMAT_NVFP4 ? token_scales.tensor() : nullptr;
    options.rng_state = rng.tensor();
    options.findings = findings.tensor();
  }
  // Options point at const tensors; the address of such a field as that of a mutable one.
  static nvte_ep_tensor_t** field(const nvte_ep_tensor_t** pointer) {
    return const_cast<nvte_ep_tensor_t**>(pointer);
  }

  std::vector<Array*> all() {
    return {&tokens, &rows,         &payload,   &scales,       &token_scales,
            &rng,    &tensor_scale, &row_count, &expert_scale, &findings};
  }
  // What options say in every codec's call.
  void add_options(Call* call, std::function<nvte_ep_status_t(const nvte_ep_codec_options_t*)> with_options) {
    const nvte_ep_status_t unsupported = NVTE_EP_STATUS_UNSUPPORTED,
                           invalid = NVTE_EP_STATUS_INVALID_ARGUMENT;
    call->structs.push_back(struct_argument<nvte_ep_codec_options_t>(
        "options", &options, NVTE_EP_CODEC_OPTIONS_V1_SIZE, with_options, false));
    call->tensors.push_back({"rng_state", field(&options.rng_state), false});
    call->tensors.push_back({"findings", const_cast<nvte_ep_tensor_t**>(&options.findings), false});
    call->numbers.push_back({"rounding", &options.rounding, {2, -1, 1000}, unsupported});
    call->numbers.push_back({"nonfinite", &options.nonfinite, {2, -1}, unsupported});
    call->numbers.push_back({"scale_rounding", &options.scale_rounding, {2, -1}, unsupported});
    call->numbers.push_back({"column_bound", &options.column_bound, {2, -1}, unsupported});
    call->numbers.push_back({"rank", &options.rank, {-1, 1024}, invalid});
    call->numbers.push_back({"reserved0", &options.reserved0, {1}, unsupported});
  }

  int32_t format;
  RowParts parts;
  Array tokens, rows, payload, scales, token_scales, rng, tensor_scale, row_count, expert_scale, findings;
  nvte_ep_tensor_t *tokens_p, *rows_p, *payload_p, *scales_p, *token_scales_p;
  nvte_ep_codec_options_t options = NVTE_EP_CODEC_OPTIONS_INIT;
  nvte_ep_stream_t stream = nullptr;
};

void check_codec_call(CodecArguments* a, Call call,
                      const std::function<nvte_ep_status_t()>& without_options) {
  call.arrays = a->all();
  SCOPED_TRACE(call.function);
  call.expect_refusals();
  a->stream = some_stream();
  call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "stream", "on host memory", call.run);
  a->stream = nullptr;
  a->options.row_id_base = -1;
  call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "row_id_base", "-1", call.run);
  a->options.row_id_base = 0;
  if (a->format == NVTE_EP_FORMAT_NVFP4) {
    a->options.rounding = NVTE_EP_ROUNDING_STOCHASTIC;
    a->options.rng_state = nullptr;
    call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "rng_state", "NULL with stochastic rounding", call.run);
    a->options.rounding = NVTE_EP_ROUNDING_NEAREST;
    a->options.rng_state = a->rng.tensor();
  }
  // On a device that is not there: the first tensor decides, the others must lie where it does.
  for (const TensorArgument& argument : call.tensors) {
    nvte_ep_tensor_t* const right = *argument.pointer;
    nvte_ep_tensor_t elsewhere = *right;
    elsewhere.device_type = NVTE_EP_DEVICE_CUDA;
    elsewhere.device_id = kNoSuchDevice;
    *argument.pointer = &elsewhere;
    const nvte_ep_status_t status = call.run();
    EXPECT_TRUE(status == NVTE_EP_STATUS_INVALID_ARGUMENT || status == NVTE_EP_STATUS_UNSUPPORTED)
        << argument.name << ": " << nvte_ep_status_name(status);
    EXPECT_NE(std::string(nvte_ep_last_error()).find("CUDA device 99"), std::string::npos)
        << nvte_ep_last_error();
    *argument.pointer = right;
  }
  for (const StructArgument& argument : call.structs) expect_longer_struct_accepted(argument);
  expect_status(NVTE_EP_STATUS_OK, without_options(), {}, call.function);
  expect_status(NVTE_EP_STATUS_OK, call.run(), {}, call.function);
}

TEST(Arguments, PackAndUnpack) {
  for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    CodecArguments a(format);
    const Codec& codec = codec_of(format);
    const std::string prefix = std::string("nvte_ep_") + format_name(format);
    a.options.row_count = a.row_count.tensor();
    const auto run_pack = [&](const nvte_ep_codec_options_t* options) {
      return codec.pack(a.tokens_p, a.rows_p, options, a.stream);
    };
    Call pack_call{prefix + "_pack",
                   [&] { return run_pack(&a.options); },
                   {{"tokens", &a.tokens_p, true, 0, true}, {"rows", &a.rows_p, true, 16}},
                   {},
                   {},
                   {}};
    a.add_options(&pack_call, run_pack);
    pack_call.tensors.push_back({"row_count", CodecArguments::field(&a.options.row_count), false});
    check_codec_call(&a, pack_call, [&] { return run_pack(nullptr); });

    const auto run_unpack = [&](const nvte_ep_codec_options_t* options) {
      return codec.unpack(a.rows_p, a.tokens_p, options, a.stream);
    };
    Call unpack_call{prefix + "_unpack",
                     [&] { return run_unpack(&a.options); },
                     {{"tokens", &a.tokens_p, true, 0, true}, {"rows", &a.rows_p, true, 16}},
                     {},
                     {},
                     {}};
    a.add_options(&unpack_call, run_unpack);
    unpack_call.tensors.push_back({"row_count", CodecArguments::field(&a.options.row_count), false});
    check_codec_call(&a, unpack_call, [&] { return run_unpack(nullptr); });
  }
}

TEST(Arguments, QuantizeAndDequantize) {
  for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    CodecArguments a(format);
    const bool nvfp4 = format == NVTE_EP_FORMAT_NVFP4;
    const std::string prefix = std::string("nvte_ep_") + format_name(format);
    std::vector<TensorArgument> tensors = {
        {"tokens", &a.tokens_p, true, 0, true}, {"payload", &a.payload_p}, {"scales", &a.scales_p}};
    if (nvfp4) tensors.push_back({"token_scales", &a.token_scales_p});
    const auto run_quantize = [&](const nvte_ep_codec_options_t* options) {
      return nvfp4 ? nvte_ep_nvfp4_quantize(a.tokens_p, a.payload_p, a.scales_p, a.token_scales_p, options,
                                            a.stream)
                   : nvte_ep_mxfp8_quantize(a.tokens_p, a.payload_p, a.scales_p, options, a.stream);
    };
    Call quantize_call{prefix + "_quantize", [&] { return run_quantize(&a.options); }, tensors, {}, {}, {}};
    a.add_options(&quantize_call, run_quantize);
    check_codec_call(&a, quantize_call, [&] { return run_quantize(nullptr); });

    const auto run_dequantize = [&](const nvte_ep_codec_options_t* options) {
      return nvfp4 ? nvte_ep_nvfp4_dequantize(a.payload_p, a.scales_p, a.token_scales_p, a.tokens_p, options,
                                              a.stream)
                   : nvte_ep_mxfp8_dequantize(a.payload_p, a.scales_p, a.tokens_p, options, a.stream);
    };
    Call dequantize_call{
        prefix + "_dequantize", [&] { return run_dequantize(&a.options); }, tensors, {}, {}, {}};
    a.add_options(&dequantize_call, run_dequantize);
    check_codec_call(&a, dequantize_call, [&] { return run_dequantize(nullptr); });

    if (!nvfp4) continue;
    a.options.tensor_scale =
        a.tensor_scale.tensor();  // token scales are then optional, the tensor scale is looked at
    for (TensorArgument& tensor : tensors) tensor.required = tensor.name != "token_scales";
    tensors.push_back({"tensor_scale", CodecArguments::field(&a.options.tensor_scale), false});
    Call tensor_scale_call{
        prefix + "_quantize", [&] { return run_quantize(&a.options); }, tensors, {}, {}, {}};
    check_codec_call(&a, tensor_scale_call, [&] {
      a.token_scales_p = nullptr;
      const nvte_ep_status_t status = run_quantize(&a.options);
      a.token_scales_p = a.token_scales.tensor();
      return status;
    });
  }
}

TEST(Arguments, WhatMxfp8DoesNotHave) {
  CodecArguments a(NVTE_EP_FORMAT_MXFP8);
  a.options.rounding = NVTE_EP_ROUNDING_STOCHASTIC;
  expect_status(NVTE_EP_STATUS_UNSUPPORTED, nvte_ep_mxfp8_pack(a.tokens_p, a.rows_p, &a.options, nullptr),
                {"nvte_ep_mxfp8_pack: rounding"});
  a.options.rounding = NVTE_EP_ROUNDING_NEAREST;
  a.options.tensor_scale = a.tensor_scale.tensor();
  expect_status(NVTE_EP_STATUS_UNSUPPORTED, nvte_ep_mxfp8_pack(a.tokens_p, a.rows_p, &a.options, nullptr),
                {"nvte_ep_mxfp8_pack: tensor_scale"});
}

struct OperandArguments : CodecArguments {
  explicit OperandArguments(int32_t format) : CodecArguments(format) {
    config.format = format;
    config.hidden = kHidden;
    config.capacity = kRows;
    config.num_experts = 2;
    config.alignment = 32;
    config.columnwise = 1;
    nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
    require(nvte_ep_operand_layout(&config, &layout));
    buffer = Array(host_memory(), Type::kUInt8, {layout.total_bytes});
    counts = Array(host_memory(), Type::kInt64, {2}, bytes_of(std::vector<int64_t>{32, 0}));
    require(nvte_ep_operand_bind(&config, buffer.tensor(), &operand));
    counts_p = counts.tensor();
    buffer_p = buffer.tensor();
  }
  nvte_ep_operand_config_t config = NVTE_EP_OPERAND_CONFIG_INIT;
  nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
  Array buffer, counts;
  nvte_ep_tensor_t *counts_p, *buffer_p;
};

// What is wrong with an operand, whatever call it is given to.
void refuse_operands(nvte_ep_operand_t* operand, const Call& call) {
  const nvte_ep_operand_t right = *operand;
  const auto with = [&](const std::string& argument, nvte_ep_status_t status,
                        const std::function<void(nvte_ep_operand_t*)>& change) {
    *operand = right;
    change(operand);
    call.expect(status, argument, "of the operand", call.run);
    *operand = right;
  };
  const nvte_ep_status_t invalid = NVTE_EP_STATUS_INVALID_ARGUMENT, unsupported = NVTE_EP_STATUS_UNSUPPORTED;
  with("operand.format", unsupported, [](nvte_ep_operand_t* o) { o->format = 9; });
  with("operand.format", unsupported, [](nvte_ep_operand_t* o) { o->format = -1; });
  with("operand.format", unsupported, [](nvte_ep_operand_t* o) { o->format = NVTE_EP_FORMAT_BF16; });
  with("operand", invalid, [](nvte_ep_operand_t* o) {
    o->amax = o->expert_scale = o->columnwise_amax = o->columnwise_expert_scale = nullptr;
    o->format = o->format == NVTE_EP_FORMAT_MXFP8 ? NVTE_EP_FORMAT_NVFP4 : NVTE_EP_FORMAT_MXFP8;
  });
  with("operand.scale_layout", unsupported, [](nvte_ep_operand_t* o) { o->scale_layout = 2; });
  with("operand.hidden", invalid, [](nvte_ep_operand_t* o) { o->hidden = 0; });
  with("operand.hidden", invalid, [](nvte_ep_operand_t* o) { o->hidden = 48; });
  with("operand.capacity", invalid, [](nvte_ep_operand_t* o) { o->capacity = -32; });
  with("operand.capacity", invalid, [](nvte_ep_operand_t* o) { o->capacity = 33; });
  with("operand.capacity", invalid, [](nvte_ep_operand_t* o) { o->capacity = int64_t{1} << 60; });
  with("operand.num_experts", invalid, [](nvte_ep_operand_t* o) { o->num_experts = 0; });
  with("operand.alignment", invalid, [](nvte_ep_operand_t* o) { o->alignment = 3; });
  with("operand.alignment", invalid, [](nvte_ep_operand_t* o) { o->alignment = -32; });
  with("operand.alignment", unsupported,
       [](nvte_ep_operand_t* o) { o->alignment = 8; });  // columnwise parts are set
  with("operand.device_type", invalid, [](nvte_ep_operand_t* o) { o->device_type = 77; });
  using Part = void* nvte_ep_operand_t::*;
  const std::pair<const char*, Part> parts[] = {
      {"operand.payload", &nvte_ep_operand_t::payload},
      {"operand.scales", &nvte_ep_operand_t::scales},
      {"operand.columnwise_payload", &nvte_ep_operand_t::columnwise_payload},
      {"operand.columnwise_scales", &nvte_ep_operand_t::columnwise_scales},
      {"operand.amax", &nvte_ep_operand_t::amax},
      {"operand.columnwise_amax", &nvte_ep_operand_t::columnwise_amax},
      {"operand.expert_scale", &nvte_ep_operand_t::expert_scale},
      {"operand.columnwise_expert_scale", &nvte_ep_operand_t::columnwise_expert_scale}};
  for (const auto& part : parts) {
    if (right.*part.second == nullptr) continue;
    with(part.first, invalid,
         [&](nvte_ep_operand_t* o) { o->*part.second = static_cast<uint8_t*>(o->*part.second) + 128; });
  }
  if (right.format == NVTE_EP_FORMAT_MXFP8) {
    with("operand", invalid, [](nvte_ep_operand_t* o) { o->amax = o->payload; });
  }
}

TEST(Arguments, DirectReceive) {
  for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    OperandArguments a(format);
    const auto run = [&](const nvte_ep_codec_options_t* options) {
      return codec_of(format).direct_receive(a.rows_p, a.counts_p, &a.operand, options, a.stream);
    };
    Call call{std::string("nvte_ep_") + format_name(format) + "_direct_receive",
              [&] { return run(&a.options); },
              {},
              {},
              {},
              {}};
    call.tensors = {{"rows", &a.rows_p, true, 16, false}, {"rows_per_expert", &a.counts_p}};
    call.tensors[0].free_rows = true;
    a.add_options(&call, run);
    call.structs.push_back(struct_argument<nvte_ep_operand_t>(
        "operand", &a.operand, NVTE_EP_OPERAND_V1_SIZE, [&](const nvte_ep_operand_t* operand) {
          return codec_of(format).direct_receive(
              a.rows_p, a.counts_p, const_cast<nvte_ep_operand_t*>(operand), &a.options, a.stream);
        }));
    if (format == NVTE_EP_FORMAT_NVFP4) {
      a.options.fixed_expert_scale = a.expert_scale.tensor();
      call.tensors.push_back(
          {"fixed_expert_scale", CodecArguments::field(&a.options.fixed_expert_scale), false});
    }
    check_codec_call(&a, call, [&] { return run(nullptr); });
    call.arrays = a.all();
    call.arrays.push_back(&a.buffer);
    refuse_operands(&a.operand, call);
    nvte_ep_tensor_t more = *a.rows_p;
    more.shape[0] = kRows + 1;  // more rows than the operand holds
    std::swap(*a.rows_p, more);
    call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "rows", "more than operand.capacity", call.run);
    std::swap(*a.rows_p, more);
    a.options.row_count = a.row_count.tensor();
    call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "row_count", "beside rows_per_expert", call.run);
    a.options.row_count = nullptr;
    if (format == NVTE_EP_FORMAT_MXFP8) {
      a.options.rounding = NVTE_EP_ROUNDING_STOCHASTIC;
      call.expect(NVTE_EP_STATUS_UNSUPPORTED, "rounding", "stochastic in mxfp8", call.run);
      a.options.rounding = NVTE_EP_ROUNDING_NEAREST;
      a.options.fixed_expert_scale = a.expert_scale.tensor();
      call.expect(NVTE_EP_STATUS_UNSUPPORTED, "fixed_expert_scale", "in mxfp8", call.run);
    }
  }
}

TEST(Arguments, OperandLayoutAndBind) {
  OperandArguments a(NVTE_EP_FORMAT_NVFP4);
  nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
  Call layout_call{
      "nvte_ep_operand_layout", [&] { return nvte_ep_operand_layout(&a.config, &layout); }, {}, {}, {}, {}};
  layout_call.structs.push_back(struct_argument<nvte_ep_operand_config_t>(
      "config", &a.config, NVTE_EP_OPERAND_CONFIG_V1_SIZE,
      [&](const nvte_ep_operand_config_t* config) { return nvte_ep_operand_layout(config, &layout); }));
  layout_call.structs.push_back(struct_argument<nvte_ep_operand_layout_t>(
      "layout", &layout, NVTE_EP_OPERAND_LAYOUT_V1_SIZE, [&](const nvte_ep_operand_layout_t* out) {
        return nvte_ep_operand_layout(&a.config, const_cast<nvte_ep_operand_layout_t*>(out));
      }));
  const nvte_ep_status_t invalid = NVTE_EP_STATUS_INVALID_ARGUMENT, unsupported = NVTE_EP_STATUS_UNSUPPORTED;
  const std::vector<NumberArgument> numbers = {
      {"config.format", &a.config.format, {3, -1, NVTE_EP_FORMAT_BF16}, unsupported},
      {"config.scale_layout", &a.config.scale_layout, {2, -1}, unsupported},
      {"config.columnwise", &a.config.columnwise, {2, -1}, unsupported},
      {"config.num_experts", &a.config.num_experts, {0, -1}, invalid},
      {"config.alignment", &a.config.alignment, {-1, 3, 48}, invalid},
      {"config.alignment", &a.config.alignment, {1, 8}, unsupported},
      {"config.reserved0", &a.config.reserved0, {1}, unsupported}};
  layout_call.numbers = numbers;
  layout_call.expect_refusals();
  for (const StructArgument& argument : layout_call.structs) expect_longer_struct_accepted(argument);
  Call bind_call{"nvte_ep_operand_bind",
                 [&] { return nvte_ep_operand_bind(&a.config, a.buffer_p, &a.operand); },
                 {},
                 {},
                 numbers,
                 {&a.buffer}};
  bind_call.tensors = {{"buffer", &a.buffer_p, true, 256, false, true}};
  bind_call.structs.push_back(struct_argument<nvte_ep_operand_config_t>(
      "config", &a.config, NVTE_EP_OPERAND_CONFIG_V1_SIZE, [&](const nvte_ep_operand_config_t* config) {
        return nvte_ep_operand_bind(config, a.buffer_p, &a.operand);
      }));
  bind_call.structs.push_back(struct_argument<nvte_ep_operand_t>(
      "operand", &a.operand, NVTE_EP_OPERAND_V1_SIZE, [&](const nvte_ep_operand_t* operand) {
        return nvte_ep_operand_bind(&a.config, a.buffer_p, const_cast<nvte_ep_operand_t*>(operand));
      }));
  bind_call.expect_refusals();
  for (const StructArgument& argument : bind_call.structs) expect_longer_struct_accepted(argument);
  for (int64_t hidden : {int64_t{0}, int64_t{-32}, int64_t{48}, int64_t{1} << 40}) {
    a.config.hidden = hidden;
    layout_call.expect(invalid, "config.hidden", std::to_string(hidden), layout_call.run);
  }
  a.config.hidden = kHidden;
  for (int64_t capacity : {int64_t{-32}, int64_t{33}, int64_t{1} << 60}) {
    a.config.capacity = capacity;
    layout_call.expect(invalid, "config.capacity", std::to_string(capacity), layout_call.run);
  }
}

TEST(Arguments, Swizzle) {
  Array scales(host_memory(), Type::kUInt8, {kRows, 4}, Bytes(kRows * 4, 1)),
      swizzled(host_memory(), Type::kUInt8, {512}, Bytes(512, 0));
  Array counts(host_memory(), Type::kInt32, {2}, bytes_of(std::vector<int32_t>{16, 16}));
  Array grouped(host_memory(), Type::kUInt8, {1024}, Bytes(1024, 0));
  nvte_ep_tensor_t *scales_p = scales.tensor(), *swizzled_p = swizzled.tensor(), *counts_p = nullptr;
  nvte_ep_stream_t stream = nullptr;
  for (const bool inverse : {false, true}) {
    Call call{inverse ? "nvte_ep_scales_unswizzle" : "nvte_ep_scales_swizzle",
              [&] {
                return inverse ? nvte_ep_scales_unswizzle(swizzled_p, counts_p, scales_p, stream)
                               : nvte_ep_scales_swizzle(scales_p, counts_p, swizzled_p, stream);
              },
              {},
              {},
              {},
              {&scales, &swizzled, &counts, &grouped}};
    // Any shape of scales is right as long as the tiles hold it.
    const auto wrong = [&](nvte_ep_tensor_t** pointer, const char* name,
                           const std::function<void(nvte_ep_tensor_t*)>& change) {
      nvte_ep_tensor_t* const right = *pointer;
      nvte_ep_tensor_t copy = *right;
      change(&copy);
      *pointer = &copy;
      call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, name, "wrong", call.run);
      *pointer = right;
    };
    wrong(&scales_p, "scales", [](nvte_ep_tensor_t* t) { t->ndim = 1; });
    wrong(&scales_p, "scales", [](nvte_ep_tensor_t* t) { t->dtype_bits = 32; });
    wrong(&scales_p, "scales", [](nvte_ep_tensor_t* t) { t->data = nullptr; });
    wrong(&scales_p, "scales", [](nvte_ep_tensor_t* t) { t->shape[1] = -4; });
    wrong(&scales_p, "swizzled", [](nvte_ep_tensor_t* t) { t->shape[0] = 129; });
    wrong(&scales_p, "swizzled", [](nvte_ep_tensor_t* t) { t->shape[0] = 1, t->shape[1] = 5; });
    call.tensors = {{"swizzled", &swizzled_p, true, 0, false, true}};
    call.expect_refusals();
    counts_p = counts.tensor();
    if (!inverse) {
      call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "swizzled", "too small for two experts", call.run);
    }
    swizzled_p = grouped.tensor();
    expect_status(NVTE_EP_STATUS_OK, call.run(), {}, call.function);
    call.tensors = {{"rows_per_expert", &counts_p, false, 0, true}};
    call.expect_refusals();
    stream = some_stream();
    call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "stream", "on host memory", call.run);
    stream = nullptr;
    nvte_ep_tensor_t* none = nullptr;
    std::swap(scales_p, none);
    call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "scales", "NULL", call.run);
    std::swap(scales_p, none);
    swizzled_p = swizzled.tensor();
    counts_p = nullptr;
    expect_status(NVTE_EP_STATUS_OK, call.run(), {}, call.function);
  }
}

TEST(Arguments, Library) {
  int64_t bytes = -7;
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_build_info(nullptr), {"nvte_ep_build_info: json"});
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_row_bytes(0, 16, nullptr),
                {"nvte_ep_row_bytes: row_bytes"});
  for (int32_t format : {-1, 3, 1000}) {
    expect_status(NVTE_EP_STATUS_UNSUPPORTED, nvte_ep_row_bytes(format, 16, &bytes),
                  {"nvte_ep_row_bytes: format"});
    nvte_ep_format_info_t info = NVTE_EP_FORMAT_INFO_INIT;
    expect_status(NVTE_EP_STATUS_UNSUPPORTED, nvte_ep_format_info(format, &info),
                  {"nvte_ep_format_info: format"});
    EXPECT_EQ(info.name, nullptr);
  }
  EXPECT_EQ(bytes, -7);
  nvte_ep_format_info_t info = NVTE_EP_FORMAT_INFO_INIT;
  Call call{"nvte_ep_format_info", [&] { return nvte_ep_format_info(0, &info); }, {}, {}, {}, {}};
  call.structs.push_back(struct_argument<nvte_ep_format_info_t>(
      "info", &info, NVTE_EP_FORMAT_INFO_V1_SIZE, [](const nvte_ep_format_info_t* out) {
        return nvte_ep_format_info(0, const_cast<nvte_ep_format_info_t*>(out));
      }));
  call.expect_refusals();
  expect_longer_struct_accepted(call.structs[0]);
}

// ---- communicator and group --------------------------------------------------------------------------------------------------

TEST(Arguments, Communicator) {
  uint8_t id[NVTE_EP_UNIQUE_ID_BYTES];
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_unique_id(NVTE_EP_COMM_THREADS, nullptr),
                {"nvte_ep_unique_id: unique_id"});
  for (int32_t kind : {0, -1, 3})
    expect_status(NVTE_EP_STATUS_UNSUPPORTED, nvte_ep_unique_id(kind, id), {"nvte_ep_unique_id: kind"});
  require(nvte_ep_unique_id(NVTE_EP_COMM_THREADS, id));
  nvte_ep_comm_config_t config = NVTE_EP_COMM_CONFIG_INIT;
  config.kind = NVTE_EP_COMM_THREADS;
  config.num_ranks = 2;
  config.unique_id = id;
  nvte_ep_comm_t comm = nullptr;
  Call call{"nvte_ep_comm_create", [&] { return nvte_ep_comm_create(&config, &comm); }, {}, {}, {}, {}};
  call.structs.push_back(struct_argument<nvte_ep_comm_config_t>(
      "config", &config, NVTE_EP_COMM_CONFIG_V1_SIZE,
      [&](const nvte_ep_comm_config_t* c) { return nvte_ep_comm_create(c, &comm); }));
  call.numbers = {{"kind", &config.kind, {0, -1, 3}, NVTE_EP_STATUS_UNSUPPORTED},
                  {"config.num_ranks", &config.num_ranks, {0, -1, 1025}, NVTE_EP_STATUS_INVALID_ARGUMENT},
                  {"config.rank", &config.rank, {-1, 2}, NVTE_EP_STATUS_INVALID_ARGUMENT}};
  call.expect_refusals();
  config.unique_id = nullptr;
  call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "config.unique_id", "NULL with two ranks", call.run);
  uint8_t noise[NVTE_EP_UNIQUE_ID_BYTES];
  std::fill_n(noise, sizeof(noise), uint8_t{0x5C});
  config.unique_id = noise;
  call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "config.unique_id", "of something else", call.run);
  config.unique_id = id;
  config.timeout_ns = -1;
  call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "config.timeout_ns", "-1", call.run);
  config.timeout_ns = 0;
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_comm_create(&config, nullptr),
                {"nvte_ep_comm_create: comm"});
  EXPECT_EQ(comm, nullptr);
  require(call.run());
  const Comm first(std::exchange(comm, nullptr));
  call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "config.rank", "twice", call.run);
  config.rank = 1;
  config.num_ranks = 3;
  call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "config.num_ranks", "not what the first rank said", call.run);
  config.num_ranks = 2;
  require(call.run());
  const Comm second(std::exchange(comm, nullptr));
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_comm_from_nccl(nullptr, &comm),
                {"nvte_ep_comm_from_nccl: nccl_comm"});
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_comm_from_nccl(&comm, nullptr),
                {"nvte_ep_comm_from_nccl: comm"});
  EXPECT_EQ(comm, nullptr);
}

void* allocate(size_t, int32_t, nvte_ep_stream_t, void*) { return nullptr; }
void release(void*, size_t, int32_t, nvte_ep_stream_t, void*) {}

TEST(Arguments, Group) {
  run_ranks(2, [](Rank& rank) {
    nvte_ep_group_config_t config = group_config(4, kHidden, 8, 32);
    nvte_ep_group_t group = nullptr;
    const nvte_ep_status_t invalid = NVTE_EP_STATUS_INVALID_ARGUMENT,
                           unsupported = NVTE_EP_STATUS_UNSUPPORTED;
    const auto create = [&] { return nvte_ep_group_create(rank.comm, &config, &group); };
    nvte_ep_memory_info_t memory = NVTE_EP_MEMORY_INFO_INIT;
    if (rank.rank == 0) {  // the peer waits while every wrong call is refused
      const std::pair<std::string, std::function<nvte_ep_status_t(const nvte_ep_group_config_t*)>>
          functions[] = {
              {"nvte_ep_group_create",
               [&](const nvte_ep_group_config_t* c) { return nvte_ep_group_create(rank.comm, c, &group); }},
              {"nvte_ep_group_memory",
               [&](const nvte_ep_group_config_t* c) { return nvte_ep_group_memory(rank.comm, c, &memory); }}};
      for (const auto& function : functions) {
        Call call{function.first, [&] { return function.second(&config); }, {}, {}, {}, {}};
        call.structs.push_back(struct_argument<nvte_ep_group_config_t>(
            "config", &config, NVTE_EP_GROUP_CONFIG_V1_SIZE, function.second));
        call.numbers = {{"config.device_type", &config.device_type, {4, -1, 77}, unsupported},
                        {"config.num_experts", &config.num_experts, {0, -2, 3}, invalid},
                        {"config.max_top_k", &config.max_top_k, {-1}, invalid},
                        {"config.transport", &config.transport, {5, -1, 99}, unsupported},
                        {"config.num_sms", &config.num_sms, {-1}, invalid},
                        {"config.overflow", &config.overflow, {2, -1}, unsupported},
                        {"config.zero_copy", &config.zero_copy, {2, -1}, unsupported}};
        call.expect_refusals();
        const auto number = [&](const char* name, int64_t* value, std::initializer_list<int64_t> wrong) {
          const int64_t right = *value;
          for (int64_t w : wrong) {
            *value = w;
            call.expect(invalid, name, "= " + std::to_string(w), call.run);
          }
          *value = right;
        };
        number("config.hidden", &config.hidden, {0, -16, 8, 100, int64_t{1} << 40});
        number("config.max_tokens_per_rank", &config.max_tokens_per_rank, {0, -1, int64_t{1} << 31});
        number("config.recv_capacity", &config.recv_capacity, {-1, int64_t{1} << 60});
        number("config.timeout_ns", &config.timeout_ns, {-1});
        config.alloc_fn = allocate;
        call.expect(invalid, "config.alloc_fn", "without free_fn", call.run);
        config.alloc_fn = nullptr;
        config.free_fn = release;
        call.expect(invalid, "config.alloc_fn", "missing beside free_fn", call.run);
        config.free_fn = nullptr;
        config.zero_copy = 1;
        config.recv_capacity = 0;
        call.expect(invalid, "config.zero_copy", "in an eager group", call.run);
        config.zero_copy = 0;
        config.recv_capacity = 32;
        config.device_type = NVTE_EP_DEVICE_CUDA;
        config.device_id = kNoSuchDevice;
        call.expect(unsupported, "CUDA", "no such device", call.run);
        config.device_type = 0;
        config.device_id = 0;
      }
      expect_status(invalid, nvte_ep_group_create(nullptr, &config, &group), {"nvte_ep_group_create: comm"});
      expect_status(invalid, nvte_ep_group_create(rank.comm, &config, nullptr),
                    {"nvte_ep_group_create: group"});
      expect_status(invalid, nvte_ep_group_memory(nullptr, &config, &memory), {"nvte_ep_group_memory: comm"});
      Call call{"nvte_ep_group_memory", create, {}, {}, {}, {}};
      call.structs.push_back(struct_argument<nvte_ep_memory_info_t>(
          "info", &memory, NVTE_EP_MEMORY_INFO_V1_SIZE, [&](const nvte_ep_memory_info_t* info) {
            return nvte_ep_group_memory(rank.comm, &config, const_cast<nvte_ep_memory_info_t*>(info));
          }));
      call.expect_refusals();
      expect_longer_struct_accepted(call.structs[0]);
      EXPECT_EQ(group, nullptr);
    }
    require(create());
    const Group owned(group);
    require(nvte_ep_group_memory(rank.comm, &config, &memory));
    EXPECT_GT(memory.handle_bytes, 0);
    EXPECT_GE(memory.group_bytes, memory.exchange_bytes);

    nvte_ep_group_info_t info = NVTE_EP_GROUP_INFO_INIT;
    nvte_ep_error_info_t error = NVTE_EP_ERROR_INFO_INIT;
    Call info_call{"nvte_ep_group_info", create, {}, {}, {}, {}};
    info_call.structs.push_back(struct_argument<nvte_ep_group_info_t>(
        "info", &info, NVTE_EP_GROUP_INFO_V1_SIZE, [&](const nvte_ep_group_info_t* out) {
          return nvte_ep_group_info(group, const_cast<nvte_ep_group_info_t*>(out));
        }));
    info_call.expect_refusals();
    Call error_call{"nvte_ep_group_poll_error", create, {}, {}, {}, {}};
    error_call.structs.push_back(struct_argument<nvte_ep_error_info_t>(
        "info", &error, NVTE_EP_ERROR_INFO_V1_SIZE, [&](const nvte_ep_error_info_t* out) {
          return nvte_ep_group_poll_error(group, const_cast<nvte_ep_error_info_t*>(out));
        }));
    error_call.expect_refusals();
    expect_longer_struct_accepted(info_call.structs[0]);
    expect_longer_struct_accepted(error_call.structs[0]);
    require(nvte_ep_group_info(group, &info));
    EXPECT_EQ(info.num_ranks, 2);
    EXPECT_EQ(info.rank, rank.rank);
    EXPECT_EQ(info.num_local_experts, 2);
    EXPECT_EQ(info.max_top_k, 4);
    EXPECT_EQ(info.recv_capacity, 32);
    EXPECT_STREQ(info.transport, "threads");
    EXPECT_EQ(info.slot_order_exact, 1);
    expect_status(invalid, nvte_ep_group_info(nullptr, &info), {"nvte_ep_group_info: group"});
    expect_status(invalid, nvte_ep_group_poll_error(nullptr, &error), {"nvte_ep_group_poll_error: group"});
    expect_status(invalid, nvte_ep_group_abort(nullptr), {"nvte_ep_group_abort: group"});

    void* pointer = &info;
    expect_status(invalid, nvte_ep_mem_alloc(nullptr, 64, &pointer), {"nvte_ep_mem_alloc: group"});
    expect_status(invalid, nvte_ep_mem_alloc(group, 64, nullptr), {"nvte_ep_mem_alloc: pointer"});
    expect_status(invalid, nvte_ep_mem_alloc(group, 0, &pointer), {"nvte_ep_mem_alloc: bytes"});
    expect_status(invalid, nvte_ep_mem_alloc(group, std::numeric_limits<size_t>::max(), &pointer),
                  {"nvte_ep_mem_alloc: bytes"});
    EXPECT_EQ(pointer, &info);
    expect_status(invalid, nvte_ep_mem_free(nullptr, pointer), {"nvte_ep_mem_free: group"});
    expect_status(invalid, nvte_ep_mem_free(group, pointer), {"nvte_ep_mem_free: pointer"});
    EXPECT_EQ(nvte_ep_group_destroy(nullptr), NVTE_EP_STATUS_OK);
    EXPECT_EQ(nvte_ep_comm_destroy(nullptr), NVTE_EP_STATUS_OK);
    EXPECT_EQ(nvte_ep_handle_destroy(nullptr), NVTE_EP_STATUS_OK);
  });
}

// ---- handle -------------------------------------------------------------------------------------------------------------------

constexpr int64_t kTokens = 5;
constexpr int64_t kSlots = 64;
constexpr int kTopK = 2;

// Everything that the calls on one handle point at.
struct HandleArguments {
  HandleArguments(const Rank& rank, int32_t handle_format)
      : format(handle_format), parts(row_parts(handle_format, kHidden)) {
    const Memory& m = host_memory();
    group = make_group(rank, group_config(4, kHidden, 8, kSlots));
    nvte_ep_handle_config_t config = handle_config(kTopK, 32, format, format);
    handle = make_handle(group, config);
    idx = Array(m, Type::kInt64, {kTokens, kTopK},
                bytes_of(std::vector<int64_t>{0, 1, 2, 3, 1, 2, 0, 3, -1, 0}));
    for (Array* counts : {&tokens_routed, &tokens_per_expert, &rows_per_expert})
      *counts = Array(m, Type::kInt64, {2});
    for (Array* offsets : {&row_offsets, &scale_row_offsets}) *offsets = Array(m, Type::kInt32, {3});
    for (Array* totals : {&total_rows, &dropped_rows}) *totals = Array(m, Type::kInt32, {1});
    slot_source = Array(m, Type::kInt64, {kSlots});
    slot_expert = Array(m, Type::kInt32, {kSlots});
    const std::vector<float> ones(kSlots * kHidden, 1.0f);
    tokens = Array(m, Type::kBFloat16, {kTokens, kHidden},
                   encode(Type::kBFloat16, std::vector<float>(kTokens * kHidden, 1.0f)));
    payload = Array(m, Type::kUInt8, {kTokens, parts.payload},
                    Bytes(static_cast<size_t>(kTokens * parts.payload), 0));
    scales = Array(m, Type::kUInt8, {kTokens, std::max<int64_t>(parts.scales, 1)},
                   Bytes(static_cast<size_t>(kTokens * parts.scales), 0));
    token_scales = Array(m, Type::kFloat32, {kTokens}, bytes_of(std::vector<float>(kTokens, 1.0f)));
    topk_weights =
        Array(m, Type::kFloat32, {kTokens, kTopK}, bytes_of(std::vector<float>(kTokens * kTopK, 0.5f)));
    rng = Array(m, Type::kInt64, {2}, bytes_of(std::vector<int64_t>{1, 2}));
    tensor_scale = Array(m, Type::kFloat32, {1}, bytes_of(std::vector<float>{1.0f}));
    expert_scale = Array(m, Type::kFloat32, {2}, bytes_of(std::vector<float>{1.0f, 1.0f}));
    findings = Array(m, Type::kInt32, {1}, bytes_of(std::vector<int32_t>{0}));
    received = Array(m, Type::kFloat16, {kSlots, kHidden});
    recv_weights = Array(m, Type::kFloat32, {kSlots});
    expert_out = Array(m, Type::kFloat32, {kSlots, kHidden}, encode(Type::kFloat32, ones));
    slot_weights = Array(m, Type::kFloat32, {kSlots}, bytes_of(std::vector<float>(kSlots, 0.5f)));
    grad_slot_weights = Array(m, Type::kFloat32, {kSlots});
    result = Array(m, Type::kFloat32, {kTokens, kHidden});
    grad_topk_weights = Array(m, Type::kFloat32, {kTokens, kTopK});

    prepare_args.topk_idx = idx.tensor();
    prepare_args.tokens_routed = tokens_routed.tensor();
    prepare_args.tokens_per_expert = tokens_per_expert.tensor();
    prepare_args.rows_per_expert = rows_per_expert.tensor();
    prepare_args.row_offsets = row_offsets.tensor();
    prepare_args.scale_row_offsets = scale_row_offsets.tensor();
    prepare_args.total_rows = total_rows.tensor();
    prepare_args.dropped_rows = dropped_rows.tensor();
    prepare_args.slot_source = slot_source.tensor();
    prepare_args.slot_expert = slot_expert.tensor();
    send.tokens = tokens.tensor();
    send.topk_weights = topk_weights.tensor();
    send.receive = NVTE_EP_RECEIVE_DECODED;
    send.rng_state = rng.tensor();
    send.findings = findings.tensor();
    send.received = received.tensor();
    send.recv_weights = recv_weights.tensor();
  }
  std::vector<Array*> all() {
    return {&idx,
            &tokens_routed,
            &tokens_per_expert,
            &rows_per_expert,
            &row_offsets,
            &scale_row_offsets,
            &total_rows,
            &dropped_rows,
            &slot_source,
            &slot_expert,
            &tokens,
            &payload,
            &scales,
            &token_scales,
            &topk_weights,
            &rng,
            &tensor_scale,
            &expert_scale,
            &findings,
            &received,
            &recv_weights,
            &expert_out,
            &slot_weights,
            &grad_slot_weights,
            &result,
            &grad_topk_weights};
  }
  nvte_ep_status_t prepare() { return nvte_ep_handle_prepare(handle.get(), &prepare_args, stream); }
  nvte_ep_status_t dispatch() { return nvte_ep_handle_dispatch(handle.get(), &send, stream); }

  int32_t format;
  RowParts parts;
  Group group;
  Handle handle;
  Array idx, tokens_routed, tokens_per_expert, rows_per_expert, row_offsets, scale_row_offsets, total_rows,
      dropped_rows, slot_source, slot_expert;
  Array tokens, payload, scales, token_scales, topk_weights, rng, tensor_scale, expert_scale, findings,
      received, recv_weights;
  Array expert_out, slot_weights, grad_slot_weights, result, grad_topk_weights;
  nvte_ep_prepare_args_t prepare_args = NVTE_EP_PREPARE_ARGS_INIT;
  nvte_ep_dispatch_args_t send = NVTE_EP_DISPATCH_ARGS_INIT;
  nvte_ep_stream_t stream = nullptr;
};

nvte_ep_tensor_t** field(const nvte_ep_tensor_t** pointer) { return const_cast<nvte_ep_tensor_t**>(pointer); }
nvte_ep_tensor_t** field(nvte_ep_tensor_t** pointer) { return pointer; }

// Rank 0 makes every wrong call while rank 1 waits in the right one; then the right one succeeds on both.
void refuse_then_run(HandleArguments* a, const Rank& rank, Call call) {
  SCOPED_TRACE(call.function);
  if (rank.rank == 0) {
    call.arrays = a->all();
    call.expect_refusals();
    a->stream = some_stream();
    call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "stream", "on host memory", call.run);
    a->stream = nullptr;
    for (const TensorArgument& argument : call.tensors) {
      nvte_ep_tensor_t* const right = *argument.pointer;
      nvte_ep_tensor_t elsewhere = *right;
      elsewhere.device_type = NVTE_EP_DEVICE_CUDA;
      elsewhere.device_id = kNoSuchDevice;
      *argument.pointer = &elsewhere;
      call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, argument.name, "on a device", call.run);
      *argument.pointer = right;
    }
  }
  expect_status(NVTE_EP_STATUS_OK, call.run(), {}, call.function);
  for (const StructArgument& argument : call.structs) expect_longer_struct_accepted(argument);
}

// Fields that dispatch and combine_backward share.
void add_send_fields(HandleArguments* a, Call* call, const std::string& tokens_name) {
  const nvte_ep_status_t unsupported = NVTE_EP_STATUS_UNSUPPORTED;
  call->tensors.push_back({tokens_name, field(&a->send.tokens)});
  call->tensors.push_back({"rng_state", field(&a->send.rng_state), false});
  call->tensors.push_back({"findings", field(&a->send.findings), false});
  call->tensors.push_back({"received", field(&a->send.received), true, 0, false, true});
  call->numbers = {{"receive", &a->send.receive, {3, -1, 77}, unsupported},
                   {"rounding", &a->send.rounding, {2, -1}, unsupported},
                   {"nonfinite", &a->send.nonfinite, {2, -1}, unsupported},
                   {"scale_rounding", &a->send.scale_rounding, {2, -1}, unsupported},
                   {"column_bound", &a->send.column_bound, {2, -1}, unsupported},
                   {"reserved0", &a->send.reserved0, {1}, unsupported}};
}

TEST(Arguments, Prepare) {
  run_ranks(2, [](Rank& rank) {
    HandleArguments a(rank, NVTE_EP_FORMAT_NVFP4);
    Call call{"nvte_ep_handle_prepare", [&] { return a.prepare(); }, {}, {}, {}, {}};
    nvte_ep_prepare_args_t& args = a.prepare_args;
    call.tensors = {{"topk_idx", field(&args.topk_idx), true, 0, true},
                    {"tokens_routed", field(&args.tokens_routed), false},
                    {"tokens_per_expert", field(&args.tokens_per_expert), false},
                    {"rows_per_expert", field(&args.rows_per_expert), false},
                    {"row_offsets", field(&args.row_offsets), false},
                    {"scale_row_offsets", field(&args.scale_row_offsets), false},
                    {"total_rows", field(&args.total_rows), false},
                    {"dropped_rows", field(&args.dropped_rows), false},
                    {"slot_source", field(&args.slot_source), false, 0, false, true},
                    {"slot_expert", field(&args.slot_expert), false, 0, false, true}};
    call.structs.push_back(struct_argument<nvte_ep_prepare_args_t>(
        "args", &args, NVTE_EP_PREPARE_ARGS_V1_SIZE, [&](const nvte_ep_prepare_args_t* other) {
          return nvte_ep_handle_prepare(a.handle.get(), other, a.stream);
        }));
    if (rank.rank == 0) {
      Array many(host_memory(), Type::kInt64, {9, kTopK});
      const nvte_ep_tensor_t* right = std::exchange(args.topk_idx, many.tensor());
      call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "topk_idx", "more tokens than max_tokens_per_rank",
                  call.run);
      args.topk_idx = right;
      int64_t total = -7;
      args.total_rows_host = &total;
      call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "total_rows_host", "in a group of fixed capacity",
                  call.run);
      EXPECT_EQ(total, -7);
      args.total_rows_host = nullptr;
      expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_prepare(nullptr, &args, nullptr),
                    {"nvte_ep_handle_prepare: handle"});
      // int32 where int64 is fixed, and the other way round.
      for (Array* slots : {&a.slot_source, &a.slot_expert}) {
        nvte_ep_tensor_t* tensor = slots->tensor();
        tensor->dtype_bits = static_cast<uint8_t>(96 - tensor->dtype_bits);
        call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, slots == &a.slot_source ? "slot_source" : "slot_expert",
                    "of the other width", call.run);
        tensor->dtype_bits = static_cast<uint8_t>(96 - tensor->dtype_bits);
      }
    }
    refuse_then_run(&a, rank, call);
    const nvte_ep_error_info_t info = poll(a.group);
    EXPECT_EQ(info.status, NVTE_EP_STATUS_OK) << "refused calls leave no finding";
  });
}

TEST(Arguments, Dispatch) {
  for (int32_t format : {NVTE_EP_FORMAT_BF16, NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    run_ranks(2, [&](Rank& rank) {
      HandleArguments a(rank, format);
      const nvte_ep_status_t invalid = NVTE_EP_STATUS_INVALID_ARGUMENT,
                             unsupported = NVTE_EP_STATUS_UNSUPPORTED;
      Call call{"nvte_ep_handle_dispatch", [&] { return a.dispatch(); }, {}, {}, {}, a.all()};
      call.expect(NVTE_EP_STATUS_BAD_STATE, "prepare", "before prepare", call.run);
      require(a.prepare());
      add_send_fields(&a, &call, "tokens");
      call.tensors.push_back({"topk_weights", field(&a.send.topk_weights), false});
      call.tensors.push_back({"recv_weights", field(&a.send.recv_weights), false, 0, false, true});
      call.structs.push_back(struct_argument<nvte_ep_dispatch_args_t>(
          "args", &a.send, NVTE_EP_DISPATCH_ARGS_V1_SIZE, [&](const nvte_ep_dispatch_args_t* other) {
            return nvte_ep_handle_dispatch(a.handle.get(), other, a.stream);
          }));
      if (rank.rank == 0) {
        expect_status(invalid, nvte_ep_handle_dispatch(nullptr, &a.send, nullptr),
                      {"nvte_ep_handle_dispatch: handle"});
        a.send.scales = a.scales.tensor();
        call.expect(invalid, "scales", "without payload", call.run);
        a.send.scales = nullptr;
        a.send.token_scales = a.token_scales.tensor();
        call.expect(invalid, "token_scales", "without payload", call.run);
        a.send.token_scales = nullptr;
        a.send.payload = a.payload.tensor();
        call.expect(invalid, "payload", "beside tokens", call.run);
        a.send.payload = nullptr;
        nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
        a.send.operand = &operand;
        call.expect(invalid, "operand", "where none is received", call.run);
        a.send.operand = nullptr;
        a.send.received = a.tokens.tensor();
        call.expect(invalid, "received", "too few slots", call.run);
        a.send.received = a.received.tensor();
        if (format != NVTE_EP_FORMAT_NVFP4) {
          a.send.rounding = NVTE_EP_ROUNDING_STOCHASTIC;
          call.expect(unsupported, "rounding", "of another format", call.run);
          a.send.rounding = 0;
          a.send.tensor_scale = a.tensor_scale.tensor();
          call.expect(unsupported, "tensor_scale", "of another format", call.run);
          a.send.tensor_scale = nullptr;
        } else {
          a.send.rounding = NVTE_EP_ROUNDING_STOCHASTIC;
          const nvte_ep_tensor_t* rng = std::exchange(a.send.rng_state, nullptr);
          call.expect(invalid, "rng_state", "NULL with stochastic rounding", call.run);
          a.send.rounding = 0;
          a.send.rng_state = rng;
        }
      }
      if (format == NVTE_EP_FORMAT_NVFP4) {
        a.send.tensor_scale = a.tensor_scale.tensor();
        a.send.fixed_expert_scale = a.expert_scale.tensor();
        call.tensors.push_back({"tensor_scale", field(&a.send.tensor_scale), false});
        call.tensors.push_back({"fixed_expert_scale", field(&a.send.fixed_expert_scale), false});
      }
      refuse_then_run(&a, rank, call);
    });
  }
}

TEST(Arguments, DispatchOfPayloadAndScales) {
  for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    run_ranks(2, [&](Rank& rank) {
      HandleArguments a(rank, format);
      require(a.prepare());
      a.send.tokens = nullptr;
      a.send.payload = a.payload.tensor();
      a.send.scales = a.scales.tensor();
      Call call{"nvte_ep_handle_dispatch", [&] { return a.dispatch(); }, {}, {}, {}, a.all()};
      call.tensors = {{"payload", field(&a.send.payload)}, {"scales", field(&a.send.scales)}};
      if (format == NVTE_EP_FORMAT_NVFP4) {
        a.send.token_scales = a.token_scales.tensor();
        call.tensors.push_back({"token_scales", field(&a.send.token_scales)});
      } else if (rank.rank == 0) {
        a.send.token_scales = a.token_scales.tensor();
        call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "token_scales", "of mxfp8", call.run);
        a.send.token_scales = nullptr;
      }
      refuse_then_run(&a, rank, call);
    });
  }
  run_ranks(2, [&](Rank& rank) {
    HandleArguments a(rank, NVTE_EP_FORMAT_BF16);
    require(a.prepare());
    a.send.tokens = nullptr;
    a.send.payload = a.payload.tensor();
    a.send.scales = a.scales.tensor();
    expect_status(NVTE_EP_STATUS_UNSUPPORTED, a.dispatch(), {"nvte_ep_handle_dispatch: payload", "bf16"});
  });
}

TEST(Arguments, DispatchOfPackedRowsToRows) {
  for (int32_t format : {NVTE_EP_FORMAT_BF16, NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    run_ranks(2, [&](Rank& rank) {
      HandleArguments a(rank, format);
      require(a.prepare());
      Array rows(host_memory(), Type::kUInt8, {kTokens, a.parts.bytes},
                 Bytes(static_cast<size_t>(kTokens * a.parts.bytes), 0));
      Array received(host_memory(), Type::kUInt8, {kSlots, a.parts.bytes});
      a.send.tokens = rows.tensor();
      a.send.received = received.tensor();
      a.send.receive = NVTE_EP_RECEIVE_ROWS;
      Call call{"nvte_ep_handle_dispatch", [&] { return a.dispatch(); }, {}, {}, {}, {}};
      call.tensors = {{"tokens", field(&a.send.tokens), true, 16},
                      {"received", field(&a.send.received), true, 16, false, true}};
      refuse_then_run(&a, rank, call);
    });
  }
}

TEST(Arguments, DispatchToAnOperand) {
  for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    run_ranks(2, [&](Rank& rank) {
      HandleArguments a(rank, format);
      require(a.prepare());
      nvte_ep_operand_config_t config = NVTE_EP_OPERAND_CONFIG_INIT;
      config.format = format;
      config.hidden = kHidden;
      config.capacity = kSlots;
      config.num_experts = 2;
      config.alignment = 32;
      config.columnwise = 1;
      nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
      require(nvte_ep_operand_layout(&config, &layout));
      Array buffer(host_memory(), Type::kUInt8, {layout.total_bytes});
      nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
      require(nvte_ep_operand_bind(&config, buffer.tensor(), &operand));
      a.send.receive = NVTE_EP_RECEIVE_OPERAND;
      Call call{"nvte_ep_handle_dispatch", [&] { return a.dispatch(); }, {}, {}, {}, {}};
      call.arrays = a.all();
      call.arrays.push_back(&buffer);
      if (rank.rank == 0) {
        call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "received", "beside an operand", call.run);
        a.send.received = nullptr;
        call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "operand", "NULL", call.run);
        a.send.operand = &operand;
        refuse_operands(&operand, call);
        const nvte_ep_operand_t right = operand;
        for (const auto& change : std::vector<std::function<void()>>{
                 [&] { operand.hidden = 2 * kHidden; }, [&] { operand.num_experts = 4; },
                 [&] { operand.alignment = 64; }, [&] { operand.capacity = kSlots / 2; },
                 [&] { operand.device_type = NVTE_EP_DEVICE_CUDA; }}) {
          change();
          call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "operand", "unlike the handle", call.run);
          operand = right;
        }
      }
      a.send.received = nullptr;
      a.send.operand = &operand;
      call.structs.push_back(struct_argument<nvte_ep_operand_t>(
          "operand", &operand, NVTE_EP_OPERAND_V1_SIZE, [&](const nvte_ep_operand_t* other) {
            a.send.operand = const_cast<nvte_ep_operand_t*>(other);
            const nvte_ep_status_t status = a.dispatch();
            a.send.operand = &operand;
            return status;
          }));
      refuse_then_run(&a, rank, call);
    });
  }
}

TEST(Arguments, Combine) {
  run_ranks(2, [](Rank& rank) {
    HandleArguments a(rank, NVTE_EP_FORMAT_NVFP4);
    nvte_ep_combine_args_t args = NVTE_EP_COMBINE_ARGS_INIT;
    args.expert_out = a.expert_out.tensor();
    args.slot_weights = a.slot_weights.tensor();
    args.result = a.result.tensor();
    const auto run = [&](const nvte_ep_combine_args_t* other) {
      return nvte_ep_handle_combine(a.handle.get(), other, a.stream);
    };
    Call call{"nvte_ep_handle_combine", [&] { return run(&args); }, {}, {}, {}, a.all()};
    call.expect(NVTE_EP_STATUS_BAD_STATE, "prepare", "before prepare", call.run);
    require(a.prepare());
    call.tensors = {{"expert_out", field(&args.expert_out), true, 0, false, true},
                    {"slot_weights", field(&args.slot_weights), false, 0, false, true},
                    {"result", field(&args.result)}};
    call.numbers = {{"accumulate", &args.accumulate, {2, -1}, NVTE_EP_STATUS_UNSUPPORTED},
                    {"reserved0", &args.reserved0, {1}, NVTE_EP_STATUS_UNSUPPORTED}};
    call.structs.push_back(
        struct_argument<nvte_ep_combine_args_t>("args", &args, NVTE_EP_COMBINE_ARGS_V1_SIZE, run));
    if (rank.rank == 0) {
      expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_combine(nullptr, &args, nullptr),
                    {"nvte_ep_handle_combine: handle"});
      Array other(host_memory(), Type::kFloat16, {kTokens, kHidden});
      args.result = other.tensor();
      call.expect(NVTE_EP_STATUS_INVALID_ARGUMENT, "result", "of another dtype than expert_out", call.run);
      args.result = a.result.tensor();
    }
    refuse_then_run(&a, rank, call);
  });
}

TEST(Arguments, DispatchBackward) {
  run_ranks(2, [](Rank& rank) {
    HandleArguments a(rank, NVTE_EP_FORMAT_NVFP4);
    nvte_ep_dispatch_backward_args_t args = NVTE_EP_DISPATCH_BACKWARD_ARGS_INIT;
    args.grad_received = a.expert_out.tensor();
    args.grad_recv_weights = a.slot_weights.tensor();
    args.grad_tokens = a.result.tensor();
    args.grad_topk_weights = a.grad_topk_weights.tensor();
    const auto run = [&](const nvte_ep_dispatch_backward_args_t* other) {
      return nvte_ep_handle_dispatch_backward(a.handle.get(), other, a.stream);
    };
    Call call{"nvte_ep_handle_dispatch_backward", [&] { return run(&args); }, {}, {}, {}, a.all()};
    call.expect(NVTE_EP_STATUS_BAD_STATE, "prepare", "before prepare", call.run);
    require(a.prepare());
    call.tensors = {{"grad_received", field(&args.grad_received), true, 0, false, true},
                    {"grad_recv_weights", field(&args.grad_recv_weights), false, 0, false, true},
                    {"grad_tokens", field(&args.grad_tokens)},
                    {"grad_topk_weights", field(&args.grad_topk_weights), false}};
    call.numbers = {{"accumulate", &args.accumulate, {2, -1}, NVTE_EP_STATUS_UNSUPPORTED},
                    {"reserved0", &args.reserved0, {1}, NVTE_EP_STATUS_UNSUPPORTED}};
    call.structs.push_back(struct_argument<nvte_ep_dispatch_backward_args_t>(
        "args", &args, NVTE_EP_DISPATCH_BACKWARD_ARGS_V1_SIZE, run));
    if (rank.rank == 0) {
      expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT,
                    nvte_ep_handle_dispatch_backward(nullptr, &args, nullptr),
                    {"nvte_ep_handle_dispatch_backward: handle"});
    }
    refuse_then_run(&a, rank, call);
  });
}

TEST(Arguments, CombineBackward) {
  for (int32_t format : {NVTE_EP_FORMAT_BF16, NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    run_ranks(2, [&](Rank& rank) {
      HandleArguments a(rank, format);
      a.send.topk_weights = nullptr;
      a.send.recv_weights = nullptr;
      nvte_ep_combine_backward_args_t args = NVTE_EP_COMBINE_BACKWARD_ARGS_INIT;
      args.send = &a.send;
      args.slot_weights = a.slot_weights.tensor();
      args.expert_out = a.expert_out.tensor();
      args.grad_slot_weights = a.grad_slot_weights.tensor();
      const auto run = [&](const nvte_ep_combine_backward_args_t* other) {
        return nvte_ep_handle_combine_backward(a.handle.get(), other, a.stream);
      };
      Call call{"nvte_ep_handle_combine_backward", [&] { return run(&args); }, {}, {}, {}, a.all()};
      call.expect(NVTE_EP_STATUS_BAD_STATE, "prepare", "before prepare", call.run);
      require(a.prepare());
      add_send_fields(&a, &call, "grad");
      // DECODED is what weights need: other kinds are another mistake than an unknown one.
      call.tensors.push_back({"slot_weights", field(&args.slot_weights), false, 0, false, true});
      call.tensors.push_back({"expert_out", field(&args.expert_out), false, 0, false, true});
      call.tensors.push_back({"grad_slot_weights", field(&args.grad_slot_weights), false, 0, false, true});
      call.structs.push_back(struct_argument<nvte_ep_combine_backward_args_t>(
          "args", &args, NVTE_EP_COMBINE_BACKWARD_ARGS_V1_SIZE, run));
      call.structs.push_back(struct_argument<nvte_ep_dispatch_args_t>(
          "send", &a.send, NVTE_EP_DISPATCH_ARGS_V1_SIZE, [&](const nvte_ep_dispatch_args_t* other) {
            args.send = other;
            const nvte_ep_status_t status = run(&args);
            args.send = &a.send;
            return status;
          }));
      if (rank.rank == 0) {
        const nvte_ep_status_t invalid = NVTE_EP_STATUS_INVALID_ARGUMENT;
        expect_status(invalid, nvte_ep_handle_combine_backward(nullptr, &args, nullptr),
                      {"nvte_ep_handle_combine_backward: handle"});
        a.send.topk_weights = a.topk_weights.tensor();
        call.expect(invalid, "topk_weights", "in a backward pass", call.run);
        a.send.topk_weights = nullptr;
        a.send.recv_weights = a.recv_weights.tensor();
        call.expect(invalid, "recv_weights", "in a backward pass", call.run);
        a.send.recv_weights = nullptr;
        const nvte_ep_tensor_t* expert_out = std::exchange(args.expert_out, nullptr);
        call.expect(invalid, "grad_slot_weights", "without expert_out", call.run);
        args.expert_out = expert_out;
        nvte_ep_tensor_t* grads = std::exchange(args.grad_slot_weights, nullptr);
        call.expect(invalid, "grad_slot_weights", "missing beside expert_out", call.run);
        args.grad_slot_weights = grads;
        Array rows(host_memory(), Type::kUInt8, {kSlots, a.parts.bytes});
        a.send.receive = NVTE_EP_RECEIVE_ROWS;
        nvte_ep_tensor_t* received = std::exchange(a.send.received, rows.tensor());
        call.expect(NVTE_EP_STATUS_UNSUPPORTED, "slot_weights", "with rows received", call.run);
        a.send.receive = NVTE_EP_RECEIVE_DECODED;
        a.send.received = received;
      }
      refuse_then_run(&a, rank, call);
    });
  }
}

TEST(Arguments, HandleCreate) {
  run_ranks(2, [](Rank& rank) {
    const Group group = make_group(rank, group_config(4, 48, 8, 96));
    nvte_ep_handle_config_t config = handle_config(2, 32);
    nvte_ep_handle_t handle = nullptr;
    const nvte_ep_status_t invalid = NVTE_EP_STATUS_INVALID_ARGUMENT,
                           unsupported = NVTE_EP_STATUS_UNSUPPORTED;
    Call call{"nvte_ep_handle_create",
              [&] { return nvte_ep_handle_create(group.get(), &config, &handle); },
              {},
              {},
              {},
              {}};
    call.structs.push_back(struct_argument<nvte_ep_handle_config_t>(
        "config", &config, NVTE_EP_HANDLE_CONFIG_V1_SIZE, [&](const nvte_ep_handle_config_t* other) {
          return nvte_ep_handle_create(group.get(), other, &handle);
        }));
    call.numbers = {
        {"config.top_k", &config.top_k, {0, -1, 5}, invalid},
        {"config.alignment",
         &config.alignment,
         {-1, 3, 64, 48, std::numeric_limits<int32_t>::min()},
         invalid},
        {"config.dispatch", &config.dispatch, {3, -1, 99}, unsupported},
        {"config.dispatch", &config.dispatch, {NVTE_EP_FORMAT_MXFP8}, invalid},  // hidden 48
        {"config.combine", &config.combine, {3, -1, NVTE_EP_FORMAT_NVFP4}, unsupported},
        {"config.dispatch_backward", &config.dispatch_backward, {3, -1, NVTE_EP_FORMAT_NVFP4}, unsupported},
        {"config.combine_backward", &config.combine_backward, {3, -1}, unsupported},
        {"config.combine_backward", &config.combine_backward, {NVTE_EP_FORMAT_MXFP8}, invalid}};
    if (rank.rank == 0) {
      call.expect_refusals();
      expect_status(invalid, nvte_ep_handle_create(nullptr, &config, &handle),
                    {"nvte_ep_handle_create: group"});
      expect_status(invalid, nvte_ep_handle_create(group.get(), &config, nullptr),
                    {"nvte_ep_handle_create: handle"});
      config.alignment = 0;  // means 128, which does not divide 96
      call.expect(invalid, "config.alignment", "default", call.run);
      config.alignment = 32;
      EXPECT_EQ(handle, nullptr);
    }
    require(call.run());  // refused calls do not count: this is the first handle on both ranks
    const Handle owned(handle);
    Array idx(host_memory(), Type::kInt32, {0, 2});
    require(prepare(owned, &idx));
  });
}

TEST(Arguments, EagerSlotMapsMustHoldTheTotal) {
  run_ranks(1, [](Rank& rank) {
    const Group group = make_group(rank, group_config(1, 32, 8, 0));
    const Handle handle = make_handle(group, handle_config(1, 16));
    Array idx(host_memory(), Type::kInt32, {3, 1}, bytes_of(std::vector<int32_t>(3, 0)));
    Array few(host_memory(), Type::kInt64, {15}), enough(host_memory(), Type::kInt64, {16}),
        few_experts(host_memory(), Type::kInt32, {15});
    int64_t total = 0;
    nvte_ep_prepare_args_t args = NVTE_EP_PREPARE_ARGS_INIT;
    args.topk_idx = idx.tensor();
    args.total_rows_host = &total;
    args.slot_source = few.tensor();
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_prepare(handle.get(), &args, nullptr),
                  {"nvte_ep_handle_prepare: slot_source", "16", "15"});
    EXPECT_EQ(total, 16) << "the routing is set";
    args.slot_source = enough.tensor();
    args.slot_expert = few_experts.tensor();
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_prepare(handle.get(), &args, nullptr),
                  {"nvte_ep_handle_prepare: slot_expert"});
    Array out(host_memory(), Type::kFloat32, {15, 32}), result(host_memory(), Type::kFloat32, {3, 32});
    nvte_ep_combine_args_t combine = NVTE_EP_COMBINE_ARGS_INIT;
    combine.expert_out = out.tensor();
    combine.result = result.tensor();
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_combine(handle.get(), &combine, nullptr),
                  {"expert_out", "16", "15"});
  });
}

TEST(Arguments, WeightsThatSomeRanksDoNotGive) {
  run_ranks(2, [](Rank& rank) {
    HandleArguments a(rank, NVTE_EP_FORMAT_BF16);
    require(a.prepare());
    if (rank.rank == 1) a.send.topk_weights = nullptr;
    for (bool both_want : {true, false}) {
      a.send.recv_weights = both_want || rank.rank == 0 ? a.recv_weights.tensor() : nullptr;
      expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, a.dispatch(), {"topk_weights", "rank 1"},
                    "on every rank");
    }
    a.send.recv_weights = nullptr;  // nobody wants them: fine
    require(a.dispatch());
    nvte_ep_dispatch_backward_args_t args = NVTE_EP_DISPATCH_BACKWARD_ARGS_INIT;
    args.grad_received = a.expert_out.tensor();
    args.grad_tokens = a.result.tensor();
    args.grad_topk_weights = a.grad_topk_weights.tensor();
    args.grad_recv_weights = rank.rank == 1 ? nullptr : a.slot_weights.tensor();
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT,
                  nvte_ep_handle_dispatch_backward(a.handle.get(), &args, nullptr),
                  {"grad_recv_weights", "rank 1"});
    args.grad_recv_weights = a.slot_weights.tensor();
    require(nvte_ep_handle_dispatch_backward(a.handle.get(), &args, nullptr));
  });
}

}  // namespace
