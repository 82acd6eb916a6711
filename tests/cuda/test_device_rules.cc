// What a per-step call promises on a device: it can be captured, reads its state on the device, uses the
// tensors' device, and takes more than 2^31 elements.
#include "codec_calls.h"

namespace nvte_ep::testing {
namespace {

class DeviceRules : public CudaTest {};

// A graph bakes pointers, not values: row counts, expert counts and the random state may change between
// replays.
TEST_F(DeviceRules, GraphCapture) {
  Rng rng(31);
  const int64_t rows = 384, hidden = 1024;
  Tokens tokens(DType::kBFloat16, rows, hidden, hidden), back(DType::kBFloat16, rows, hidden, hidden);
  Rows packed(NVTE_EP_FORMAT_NVFP4, rows, hidden, true);
  OperandShape shape;
  shape.format = NVTE_EP_FORMAT_NVFP4;
  shape.hidden = hidden;
  shape.num_experts = 3;
  shape.capacity = rows;
  Operand operand(shape, true);
  auto counts = Mirror::of(std::vector<int64_t>{128, 0, 256});
  Options options;
  options.with_rng(1, 2);
  options.with_row_count(rows, true);
  options.with_findings();
  const auto run = [&](bool cuda, cudaStream_t stream) {
    Backend* backend = cuda ? cuda_ : host_;
    CodecOptions receive = options.on(cuda);
    receive.row_count = IndexView();
    ASSERT_TRUE(
        backend->quantize(NVTE_EP_FORMAT_NVFP4, tokens.on(cuda), packed.on(cuda), options.on(cuda), stream)
            .ok());
    ASSERT_TRUE(
        backend
            ->dequantize(NVTE_EP_FORMAT_NVFP4, packed.on(cuda), back.on(cuda), options.on(cuda), {}, stream)
            .ok());
    ASSERT_TRUE(backend
                    ->direct_receive(NVTE_EP_FORMAT_NVFP4, packed.on(cuda), IndexView{counts->on(cuda), true},
                                     operand.on(cuda), receive, stream)
                    .ok());
  };
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  run(true, stream);
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int step = 0; step < 3; ++step) {
    tokens.set(make_values(kAllData[step], rows, hidden, &rng));
    const std::vector<int64_t> slabs[] = {{128, 0, 256}, {256, 128, 0}, {0, 0, 128}};
    std::memcpy(counts->host(), slabs[step].data(), 24);
    const int64_t state[] = {step * 7, step};
    std::memcpy(options.rng_state->host(), state, 16);
    const int64_t count = rows - 100 * step;
    std::memcpy(options.row_count->host(), &count, 8);
    counts->upload();
    options.rng_state->upload();
    options.row_count->upload();
    run(false, nullptr);
    ASSERT_CUDA(cudaDeviceSynchronize());
    ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    ASSERT_TRUE(packed.equal()) << "step " << step;
    ASSERT_TRUE(back.equal());
    ASSERT_TRUE(operand.equal());
  }
  ASSERT_CUDA(cudaGraphExecDestroy(exec));
  ASSERT_CUDA(cudaGraphDestroy(graph));
  ASSERT_CUDA(cudaStreamDestroy(stream));
}

TEST_F(DeviceRules, CurrentDeviceIsTheCallersAgain) {
  int devices = 0;
  ASSERT_CUDA(cudaGetDeviceCount(&devices));
  if (devices < 2) {
    if (required("two_gpus")) FAIL() << "expected two GPUs, got " << devices;
    GTEST_SKIP() << "needs two GPUs";
  }
  Backend* second;
  ASSERT_TRUE(find_backend(Device{NVTE_EP_DEVICE_CUDA, 1}, 0, &second).ok());
  Rng rng(32);
  ASSERT_CUDA(cudaSetDevice(1));
  Tokens tokens(DType::kBFloat16, 100, 256, 256);
  tokens.set(make_values(Data::kGaussian, 100, 256, &rng));
  Rows rows(NVTE_EP_FORMAT_NVFP4, 100, 256, true);
  ASSERT_CUDA(cudaSetDevice(0));
  ASSERT_TRUE(
      second->quantize(NVTE_EP_FORMAT_NVFP4, tokens.on(true), rows.on(true), CodecOptions(), nullptr).ok());
  int current;
  ASSERT_CUDA(cudaGetDevice(&current));
  EXPECT_EQ(current, 0);
  ASSERT_TRUE(
      host_->quantize(NVTE_EP_FORMAT_NVFP4, tokens.on(false), rows.on(false), CodecOptions(), nullptr).ok());
  ASSERT_CUDA(cudaSetDevice(1));
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(rows.equal());
  ASSERT_CUDA(cudaSetDevice(0));
}

TEST_F(DeviceRules, NoSuchDevice) {
  Backend* backend;
  const Status status = find_backend(Device{NVTE_EP_DEVICE_CUDA, 63}, 0, &backend);
  EXPECT_EQ(status.code(), NVTE_EP_STATUS_INVALID_ARGUMENT);
  EXPECT_NE(status.message().find("63"), std::string::npos) << status.message();
}

// Memory of the device alone, for sizes that the host does not mirror.
struct Large {
  void* data = nullptr;
  explicit Large(int64_t bytes) { check_cuda(cudaMalloc(&data, static_cast<size_t>(bytes))); }
  ~Large() { check_cuda(cudaFree(data)); }
  Large(const Large&) = delete;
  Large& operator=(const Large&) = delete;
  std::vector<uint8_t> read(int64_t at, int64_t bytes) const {
    std::vector<uint8_t> out(static_cast<size_t>(bytes));
    check_cuda(cudaMemcpy(out.data(), static_cast<uint8_t*>(data) + at, out.size(), cudaMemcpyDeviceToHost));
    return out;
  }
};

// More than 2^31 elements: the last rows are right.
TEST_F(DeviceRules, LargeTensors) {
  constexpr int64_t kLast = 1024;
  Rng rng(33);
  const struct {
    int64_t rows, hidden;
  } sizes[] = {{851456, 2688}, {262145, 8192}};
  for (const auto& size : sizes) {
    for (const int32_t format : {NVTE_EP_FORMAT_NVFP4, NVTE_EP_FORMAT_MXFP8}) {
      SCOPED_TRACE(text(size.rows, " x ", size.hidden, " format ", format));
      const RowLayout layout = row_layout(*find_format(format), size.hidden);
      size_t free_bytes = 0, total = 0;
      ASSERT_CUDA(cudaMemGetInfo(&free_bytes, &total));
      const int64_t token_bytes = size.rows * size.hidden * 2;
      const int64_t needed = token_bytes * 2 + size.rows * layout.row_bytes * 3;
      if (static_cast<int64_t>(free_bytes) < needed) {
        if (required("large"))
          FAIL() << "expected " << needed << " bytes of device memory, got " << free_bytes;
        GTEST_SKIP() << "needs " << needed << " bytes of device memory";
      }
      Large tokens(token_bytes), rows(size.rows * layout.row_bytes), back(token_bytes);
      const int64_t patch_rows = 4096;
      const std::vector<uint8_t> patch =
          to_bytes(make_values(Data::kOutlierChannels, patch_rows, size.hidden, &rng), DType::kBFloat16,
                   patch_rows, size.hidden, size.hidden);
      for (int64_t r = 0; r < size.rows; r += patch_rows) {
        const int64_t n = std::min(patch_rows, size.rows - r);
        ASSERT_CUDA(cudaMemcpy(static_cast<uint8_t*>(tokens.data) + r * size.hidden * 2, patch.data(),
                               static_cast<size_t>(n * size.hidden * 2), cudaMemcpyHostToDevice));
      }
      TensorView x;
      x.data = tokens.data;
      x.dtype = DType::kBFloat16;
      x.device = Device{NVTE_EP_DEVICE_CUDA, 0};
      x.ndim = 2;
      x.shape[0] = size.rows;
      x.shape[1] = x.stride = size.hidden;
      TensorView y = x;
      y.data = back.data;
      const RowsView view = packed_rows(format, rows.data, layout.row_bytes, size.rows, size.hidden);
      ASSERT_TRUE(cuda_->quantize(format, x, view, CodecOptions(), nullptr).ok());
      ASSERT_TRUE(cuda_->dequantize(format, view, y, CodecOptions(), {}, nullptr).ok());
      ASSERT_CUDA(cudaDeviceSynchronize());

      const int64_t first = size.rows - kLast;
      std::vector<uint8_t> last = tokens.read(first * size.hidden * 2, kLast * size.hidden * 2);
      std::vector<uint8_t> want_rows(static_cast<size_t>(kLast * layout.row_bytes)), want_back(last.size());
      TensorView host_x = x;
      host_x.data = last.data();
      host_x.device = Device();
      host_x.shape[0] = kLast;
      TensorView host_y = host_x;
      host_y.data = want_back.data();
      const RowsView host_view = packed_rows(format, want_rows.data(), layout.row_bytes, kLast, size.hidden);
      ASSERT_TRUE(host_->quantize(format, host_x, host_view, CodecOptions(), nullptr).ok());
      ASSERT_TRUE(host_->dequantize(format, host_view, host_y, CodecOptions(), {}, nullptr).ok());
      EXPECT_TRUE(rows.read(first * layout.row_bytes, kLast * layout.row_bytes) == want_rows);
      EXPECT_TRUE(back.read(first * size.hidden * 2, kLast * size.hidden * 2) == want_back);

      // Direct receive: the last expert has the last rows.
      OperandShape shape;
      shape.format = format;
      shape.hidden = size.hidden;
      shape.num_experts = 3;
      shape.capacity = size.rows / 128 * 128;
      const nvte_ep_operand_layout_t parts = operand_layout(shape, true);
      Large buffer(parts.total_bytes);
      const auto bind = [&](uint8_t* base, const nvte_ep_operand_layout_t& p, const OperandShape& s) {
        OperandView v;
        v.shape = s;
        v.payload = base + p.payload_offset;
        v.scales = base + p.scales_offset;
        v.columnwise_payload = base + p.columnwise_payload_offset;
        v.columnwise_scales = base + p.columnwise_scales_offset;
        return v;
      };
      const int64_t last_rows = 1024;
      auto counts = Mirror::of(std::vector<int64_t>{shape.capacity - 2 * last_rows, last_rows, last_rows});
      const OperandView operand = bind(static_cast<uint8_t*>(buffer.data), parts, shape);
      ASSERT_TRUE(cuda_
                      ->direct_receive(format, view, IndexView{counts->device(), true}, operand,
                                       CodecOptions(), nullptr)
                      .ok());
      ASSERT_CUDA(cudaDeviceSynchronize());
      const int64_t slab = shape.capacity - last_rows;
      const std::vector<uint8_t> slab_rows = rows.read(slab * layout.row_bytes, last_rows * layout.row_bytes);
      OperandShape small = shape;
      small.num_experts = 1;
      small.capacity = last_rows;
      const nvte_ep_operand_layout_t small_parts = operand_layout(small, true);
      std::vector<uint8_t> want(static_cast<size_t>(small_parts.total_bytes + 256));
      uint8_t* base = want.data() + (256 - reinterpret_cast<uintptr_t>(want.data()) % 256) % 256;
      int64_t count = last_rows;
      const RowsView small_view = packed_rows(format, const_cast<uint8_t*>(slab_rows.data()),
                                              layout.row_bytes, last_rows, size.hidden);
      ASSERT_TRUE(host_
                      ->direct_receive(format, small_view, IndexView{&count, true},
                                       bind(base, small_parts, small), CodecOptions(), nullptr)
                      .ok());
      const int64_t columns = size.hidden / find_format(format)->block;
      const auto same = [&](int64_t at, int64_t small_at, int64_t bytes) {
        return buffer.read(at, bytes) == std::vector<uint8_t>(base + small_at, base + small_at + bytes);
      };
      EXPECT_TRUE(same(parts.payload_offset + slab * layout.payload_bytes, small_parts.payload_offset,
                       last_rows * layout.payload_bytes));
      EXPECT_TRUE(same(parts.scales_offset + slab * round_up(columns, 4), small_parts.scales_offset,
                       last_rows * round_up(columns, 4)));
      EXPECT_TRUE(same(parts.columnwise_payload_offset + slab * layout.payload_bytes,
                       small_parts.columnwise_payload_offset, last_rows * layout.payload_bytes));
      EXPECT_TRUE(same(
          parts.columnwise_scales_offset + slab / find_format(format)->block * round_up(size.hidden, 128),
          small_parts.columnwise_scales_offset,
          last_rows / find_format(format)->block * round_up(size.hidden, 128)));
      ASSERT_FALSE(HasFailure());
    }
  }
}

}  // namespace
}  // namespace nvte_ep::testing
