// Faults that were found by trying to break the library, one test each.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/backend.h"
#include "nvte_ep/nvte_ep.h"
#include "ranks.h"

namespace {

using namespace ep_test;

nvte_ep_tensor_t bytes_2d(void* data, int64_t rows, int64_t columns) {
  return nvte_ep_tensor_2d(data, rows, columns, NVTE_EP_DTYPE_UINT, 8, NVTE_EP_DEVICE_CPU, 0);
}
nvte_ep_tensor_t bytes_1d(void* data, int64_t size) {
  return nvte_ep_tensor_1d(data, size, NVTE_EP_DTYPE_UINT, 8, NVTE_EP_DEVICE_CPU, 0);
}

// A group and its handle of one rank.
struct OneRank {
  explicit OneRank(int64_t capacity = 256, int32_t dispatch = NVTE_EP_FORMAT_NVFP4)
      : comm(make_comm(id, 0, 1)) {
    nvte_ep_group_config_t config = NVTE_EP_GROUP_SETTINGS_INIT;
    config.num_experts = 2;
    config.hidden = 32;
    config.max_tokens_per_rank = 4;
    config.recv_capacity = capacity;
    nvte_ep_group_t g = nullptr;
    require(nvte_ep_group_create(comm.get(), &config, &g));
    group = Group(g);
    handle = new_handle(dispatch);
  }
  Handle new_handle(int32_t dispatch = NVTE_EP_FORMAT_NVFP4) const {
    nvte_ep_handle_config_t config = NVTE_EP_HANDLE_CONFIG_INIT;
    config.top_k = 1;
    config.dispatch = dispatch;
    nvte_ep_handle_t h = nullptr;
    require(nvte_ep_handle_create(group.get(), &config, &h));
    return Handle(h);
  }
  nvte_ep_status_t prepare(nvte_ep_prepare_args_t args = NVTE_EP_PREPARE_ARGS_INIT) {
    nvte_ep_tensor_t topk = nvte_ep_tensor_2d(indices, 2, 1, NVTE_EP_DTYPE_INT, 64, NVTE_EP_DEVICE_CPU, 0);
    args.topk_idx = &topk;
    return nvte_ep_handle_prepare(handle.get(), &args, nullptr);
  }
  WorldId id;
  Comm comm;
  Group group;
  Handle handle;
  int64_t indices[2] = {0, 1};
};

TEST(Regressions, NoExpertIsNotOneMatrix) {
  alignas(256) uint8_t scales[400] = {}, tiles[16] = {};
  nvte_ep_tensor_t s = bytes_2d(scales, 100, 4), t = bytes_1d(tiles, sizeof(tiles));
  nvte_ep_tensor_t none = nvte_ep_tensor_1d(nullptr, 0, NVTE_EP_DTYPE_INT, 32, NVTE_EP_DEVICE_CPU, 0);
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_scales_swizzle(&s, &none, &t, nullptr),
                {"rows_per_expert"});
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_scales_unswizzle(&t, &none, &s, nullptr),
                {"rows_per_expert"});
  nvte_ep_tensor_t endless =
      nvte_ep_tensor_1d(tiles, INT64_MAX / 127, NVTE_EP_DTYPE_INT, 32, NVTE_EP_DEVICE_CPU, 0);
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_scales_swizzle(&s, &endless, &t, nullptr),
                {"rows_per_expert"});
  nvte_ep_tensor_t flat = bytes_2d(scales, INT64_MAX, 0);
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_scales_swizzle(&flat, nullptr, &t, nullptr),
                {"scales"});
}

TEST(Regressions, CountsThatInt32CannotHoldSaturate) {
  nvte_ep::Backend* backend = nullptr;
  ASSERT_TRUE(nvte_ep::find_backend(nvte_ep::Device(), 1, &backend).ok());
  const int64_t counts[] = {0, INT32_MAX, int64_t{INT32_MAX} + 1, int64_t{3} << 32};
  int32_t narrow[4] = {};
  nvte_ep::TensorView out;
  out.data = narrow;
  out.dtype = nvte_ep::DType::kInt32;
  out.ndim = 1;
  out.shape[0] = 4;
  ASSERT_TRUE(backend->write_index(out, counts, nullptr).ok());
  EXPECT_EQ(std::vector<int32_t>(narrow, narrow + 4),
            (std::vector<int32_t>{0, INT32_MAX, INT32_MAX, INT32_MAX}));
}

TEST(Regressions, ADestroyedHandleNeverMeansALaterOne) {
  OneRank one;
  const nvte_ep_handle_t old = one.handle.get();
  one.handle = Handle();  // destroys it
  const Handle fresh = one.new_handle();
  EXPECT_NE(old, fresh.get());
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_destroy(old), {"handle", "destroyed"});
}

TEST(Regressions, OutOfMemoryInMemAllocIsToldToAllAndTheGroupGoesOn) {
  run_ranks(2, [](Rank& rank) {
    nvte_ep_group_config_t config = NVTE_EP_GROUP_SETTINGS_INIT;
    config.num_experts = 2;
    config.hidden = 32;
    config.max_tokens_per_rank = 4;
    config.recv_capacity = 256;
    config.timeout_ns = 20'000'000'000;
    nvte_ep_group_t g = nullptr;
    require(nvte_ep_group_create(rank.comm, &config, &g));
    const Group group(g);
    void* memory = nullptr;
#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)  // their allocators end the program instead
    expect_status(NVTE_EP_STATUS_OUT_OF_MEMORY, nvte_ep_mem_alloc(g, (size_t{1} << 44) - 1, &memory),
                  {"bytes"});
    EXPECT_EQ(memory, nullptr);
#endif
    require(nvte_ep_mem_alloc(g, 4096, &memory));
    require(nvte_ep_mem_free(g, memory));
  });
}

TEST(Regressions, ScalesThatContradictEachOtherAreRefused) {
  OneRank one;
  require(one.prepare());
  alignas(256) uint8_t payload[2 * 16] = {}, scales[2 * 2] = {}, rows[2 * 32] = {};
  std::vector<uint8_t> out_memory(256 * 32 + 256);
  uint8_t* out = out_memory.data() + (256 - reinterpret_cast<uintptr_t>(out_memory.data()) % 256) % 256;
  float token_scales[2] = {1, 1}, tensor_scale[1] = {64}, decoded[2 * 32];
  nvte_ep_tensor_t p = bytes_2d(payload, 2, 16), s = bytes_2d(scales, 2, 2), r = bytes_2d(rows, 2, 32);
  nvte_ep_tensor_t t = nvte_ep_tensor_1d(token_scales, 2, NVTE_EP_DTYPE_FLOAT, 32, NVTE_EP_DEVICE_CPU, 0);
  nvte_ep_tensor_t k = nvte_ep_tensor_1d(tensor_scale, 1, NVTE_EP_DTYPE_FLOAT, 32, NVTE_EP_DEVICE_CPU, 0);
  nvte_ep_tensor_t received = bytes_2d(out, 256, 32);
  nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
  args.payload = &p;
  args.scales = &s;
  args.token_scales = &t;
  args.tensor_scale = &k;
  args.received = &received;
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_dispatch(one.handle.get(), &args, nullptr),
                {"token_scales"});
  args.payload = args.scales = args.token_scales = nullptr;
  args.tokens = &r;
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_handle_dispatch(one.handle.get(), &args, nullptr),
                {"tensor_scale"});
  nvte_ep_codec_options_t options = NVTE_EP_CODEC_OPTIONS_INIT;
  options.tensor_scale = &k;
  nvte_ep_tensor_t x = nvte_ep_tensor_2d(decoded, 2, 32, NVTE_EP_DTYPE_FLOAT, 32, NVTE_EP_DEVICE_CPU, 0);
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_nvfp4_dequantize(&p, &s, &t, &x, &options, nullptr),
                {"token_scales"});
}

TEST(Regressions, AClosedGroupGivesItsRankBackWhileHandlesLive) {
  const WorldId id;
  Handle left;
  {
    const Comm comm = make_comm(id, 0, 1);
    nvte_ep_group_config_t config = NVTE_EP_GROUP_SETTINGS_INIT;
    config.num_experts = 1;
    config.hidden = 32;
    config.max_tokens_per_rank = 1;
    nvte_ep_group_t g = nullptr;
    require(nvte_ep_group_create(comm.get(), &config, &g));
    const Group group(g);
    nvte_ep_handle_config_t handle_config = NVTE_EP_HANDLE_CONFIG_INIT;
    handle_config.top_k = 1;
    nvte_ep_handle_t h = nullptr;
    require(nvte_ep_handle_create(g, &handle_config, &h));
    left = Handle(h);
  }
  const Comm again = make_comm(id, 0, 1);
  EXPECT_NE(again.get(), nullptr);
}

TEST(Regressions, TheStrideOfASingleRowDoesNotMatter) {
  float x[32] = {};
  alignas(16) uint8_t rows[32];
  nvte_ep_tensor_t in = nvte_ep_tensor_2d(x, 1, 32, NVTE_EP_DTYPE_FLOAT, 32, NVTE_EP_DEVICE_CPU, 0);
  nvte_ep_tensor_t out = bytes_2d(rows, 1, 32);
  in.strides[0] = out.strides[0] = INT64_MAX;
  in.strides[1] = out.strides[1] = 1;
  expect_status(NVTE_EP_STATUS_OK, nvte_ep_nvfp4_pack(&in, &out, nullptr, nullptr));
}

TEST(Regressions, TextsNameTypesThatAreNotTaken) {
  double x[32] = {};
  alignas(16) uint8_t rows[32];
  nvte_ep_tensor_t in = nvte_ep_tensor_2d(x, 1, 32, NVTE_EP_DTYPE_FLOAT, 64, NVTE_EP_DEVICE_CPU, 0);
  nvte_ep_tensor_t out = bytes_2d(rows, 1, 32);
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_nvfp4_pack(&in, &out, nullptr, nullptr),
                {"got float64 [1, 32]"});
}

TEST(Regressions, AnAllocatorThatWouldNotBeAskedIsRefused) {
  const WorldId id;
  const Comm comm = make_comm(id, 0, 1);
  nvte_ep_group_config_t config = NVTE_EP_GROUP_SETTINGS_INIT;
  config.device_type = NVTE_EP_DEVICE_CUDA;
  config.num_experts = 1;
  config.hidden = 32;
  config.max_tokens_per_rank = 1;
  config.alloc_fn = [](size_t, int32_t, nvte_ep_stream_t, void*) -> void* { return nullptr; };
  config.free_fn = [](void*, size_t, int32_t, nvte_ep_stream_t, void*) {};
  nvte_ep_group_t group = nullptr;
  expect_status(NVTE_EP_STATUS_UNSUPPORTED, nvte_ep_group_create(comm.get(), &config, &group), {"alloc_fn"});
}

TEST(Regressions, AnEmptySlotMapIsTooSmallAndNotAbsent) {
  OneRank one(0);  // eager
  nvte_ep_tensor_t empty = nvte_ep_tensor_1d(nullptr, 0, NVTE_EP_DTYPE_INT, 64, NVTE_EP_DEVICE_CPU, 0);
  nvte_ep_prepare_args_t args = NVTE_EP_PREPARE_ARGS_INIT;
  args.slot_source = &empty;
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, one.prepare(args), {"slot_source"});
}

}  // namespace
