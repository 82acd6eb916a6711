#include "backends/cuda/cuda_backend.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>

#include "backends/cuda/device_guard.h"
#include "backends/cuda/launch.h"

namespace nvte_ep {
namespace {

constexpr int kMinMajor = 9;  // what the kernels are compiled for: sm_90 and later

// In words that tell a user what is missing; clears the error, which is not the caller's.
std::string no_cuda_reason(cudaError_t error) {
  (void)cudaGetLastError();
  int driver = 0;
  (void)cudaDriverGetVersion(&driver);
  return driver == 0 ? "this machine has no CUDA driver" : cudaGetErrorString(error);
}

Status describe_device(int device, LaunchContext* context) {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found == cudaErrorInsufficientDriver || found == cudaErrorNoDevice) {
    return unsupported("CUDA device ", device, ": ", no_cuda_reason(found));
  }
  NVTE_EP_TRY(cuda_status(found, "cudaGetDeviceCount"));
  if (device < 0 || device >= count || device >= kMaxDevices) {
    return invalid_argument("device_id: expected 0 to ", std::min(count, kMaxDevices) - 1, ", got ", device);
  }
  int major = 0;
  int minor = 0;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } wanted[] = {{cudaDevAttrComputeCapabilityMajor, &major},
                {cudaDevAttrComputeCapabilityMinor, &minor},
                {cudaDevAttrMultiProcessorCount, &context->sms},
                {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &context->shared_bytes_per_sm},
                {cudaDevAttrMaxSharedMemoryPerBlockOptin, &context->shared_bytes_per_block}};
  for (const auto& w : wanted) {
    NVTE_EP_TRY(cuda_status(cudaDeviceGetAttribute(w.value, w.attribute, device), "cudaDeviceGetAttribute"));
  }
  if (major < kMinMajor) {
    return unsupported("CUDA device ", device, ": expected compute capability ", kMinMajor,
                       ".0 or more, got ", major, ".", minor);
  }
  context->device = device;
  return Status();
}

}  // namespace

template <typename Function>
Status CudaBackend::on_device(nvte_ep_stream_t stream, const Function& function) {
  const DeviceGuard guard(device_.device);
  NVTE_EP_TRY(cuda_status(guard.error(), "cudaSetDevice"));
  LaunchContext context = device_;
  context.stream = stream;
  return function(context);
}

namespace {

LaunchContext within(LaunchContext context, const CodecOptions& options) {
  context.max_sms = options.num_sms;
  return context;
}

}  // namespace

Status CudaBackend::quantize(int32_t format, const TensorView& tokens, const RowsView& rows,
                             const CodecOptions& options, nvte_ep_stream_t stream) {
  if (rows.rows == 0) return Status();
  return on_device(stream, [&](const LaunchContext& c) {
    return launch_quantize(format, tokens, rows, options, within(c, options));
  });
}

Status CudaBackend::dequantize(int32_t format, const RowsView& rows, const TensorView& tokens,
                               const CodecOptions& options, const RowWeighting& weighting,
                               nvte_ep_stream_t stream) {
  if (rows.rows == 0) return Status();
  return on_device(stream, [&](const LaunchContext& c) {
    return launch_dequantize(format, rows, tokens, options, weighting, within(c, options));
  });
}

Status CudaBackend::assemble(int32_t format, const RowsView& apart, const RowsView& packed,
                             const CodecOptions& options, nvte_ep_stream_t stream) {
  if (apart.rows == 0) return Status();
  return on_device(stream, [&](const LaunchContext& c) {
    return launch_assemble(format, apart, packed, options, within(c, options));
  });
}

Status CudaBackend::direct_receive(int32_t format, const RowsView& rows, const IndexView& rows_per_expert,
                                   const OperandView& operand, const CodecOptions& options,
                                   nvte_ep_stream_t stream) {
  return on_device(stream, [&](const LaunchContext& c) {
    return launch_direct_receive(format, rows, rows_per_expert, operand, options, within(c, options));
  });
}

Status CudaBackend::swizzle(const TensorView& scales, const IndexView& rows_per_expert, int32_t num_experts,
                            uint8_t* swizzled, int64_t tile_rows, bool inverse, nvte_ep_stream_t stream) {
  return on_device(stream, [&](const LaunchContext& c) {
    return launch_swizzle(scales, rows_per_expert, num_experts, swizzled, tile_rows, inverse, c);
  });
}

Status CudaBackend::gather_rows(const GatherRows& gather, nvte_ep_stream_t stream) {
  if (gather.slots == 0) return Status();
  return on_device(stream, [&](const LaunchContext& c) { return launch_gather_rows(gather, c); });
}

Status CudaBackend::reduce_rows(const ReduceRows& reduce, nvte_ep_stream_t stream) {
  if (reduce.result.size() == 0) return Status();
  return on_device(stream, [&](const LaunchContext& c) { return launch_reduce_rows(reduce, c); });
}

Status CudaBackend::merge_slots(const MergeSlots& merge, nvte_ep_stream_t stream) {
  if (merge.out.size() == 0) return Status();
  return on_device(stream, [&](const LaunchContext& c) { return launch_merge_slots(merge, c); });
}

Status CudaBackend::add_sums(const float* sums, const TensorView& result, nvte_ep_stream_t stream) {
  if (result.size() == 0) return Status();
  return on_device(stream, [&](const LaunchContext& c) { return launch_add_sums(sums, result, c); });
}

Status CudaBackend::tag_rows(const TagRows& tag, nvte_ep_stream_t stream) {
  if (tag.tokens == 0) return Status();
  return on_device(stream, [&](const LaunchContext& c) { return launch_tag_rows(tag, c); });
}

Status CudaBackend::locate_rows(const LocateRows& locate, nvte_ep_stream_t stream) {
  return on_device(stream, [&](const LaunchContext& c) { return launch_locate_rows(locate, c); });
}

Status CudaBackend::scatter_rows(const ScatterRows& scatter, nvte_ep_stream_t stream) {
  if (scatter.rows.size() == 0) return Status();
  return on_device(stream, [&](const LaunchContext& c) { return launch_scatter_rows(scatter, c); });
}

Status CudaBackend::create_mark(void** mark) {
  return on_device(nullptr, [&](const LaunchContext&) {
    cudaEvent_t event = nullptr;
    const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    *mark = event;
    return cuda_status(error, "cudaEventCreateWithFlags");
  });
}

void CudaBackend::destroy_mark(void* mark) {
  if (mark == nullptr) return;
  const DeviceGuard guard(device_.device);
  (void)cudaEventDestroy(static_cast<cudaEvent_t>(mark));
}

Status CudaBackend::set_mark(void* mark, nvte_ep_stream_t stream) {
  return on_device(stream, [&](const LaunchContext&) {
    return cuda_status(cudaEventRecord(static_cast<cudaEvent_t>(mark), stream), "cudaEventRecord");
  });
}

Status CudaBackend::wait_mark(void* mark, nvte_ep_stream_t stream) {
  return on_device(stream, [&](const LaunchContext&) {
    return cuda_status(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(mark), 0), "cudaStreamWaitEvent");
  });
}

Status CudaBackend::create_stream(nvte_ep_stream_t* stream) {
  return on_device(nullptr, [&](const LaunchContext&) {
    int least = 0, greatest = 0;
    NVTE_EP_TRY(
        cuda_status(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange"));
    return cuda_status(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, greatest),
                       "cudaStreamCreateWithPriority");
  });
}

void CudaBackend::destroy_stream(nvte_ep_stream_t stream) {
  if (stream == nullptr) return;
  const DeviceGuard guard(device_.device);
  (void)cudaStreamDestroy(stream);
}

Status CudaBackend::mark_passed(void* mark, bool* passed) {
  return on_device(nullptr, [&](const LaunchContext&) {
    // Asking is harmless, but ends another thread's capture unless it is said to be.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    NVTE_EP_TRY(
        cuda_status(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode"));
    const cudaError_t state = cudaEventQuery(static_cast<cudaEvent_t>(mark));
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    *passed = state == cudaSuccess;
    return state == cudaErrorNotReady ? Status() : cuda_status(state, "cudaEventQuery");
  });
}

Status CudaBackend::synchronize() {
  return on_device(nullptr, [&](const LaunchContext&) {
    return cuda_status(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  });
}

Status CudaBackend::preload() {
  return on_device(nullptr, [&](const LaunchContext& context) {
    for (PrepareKernel prepare : known_kernels()) {
      int registers;
      NVTE_EP_TRY(prepare(context, &registers));
    }
    return Status();
  });
}

Status CudaBackend::is_capturing(nvte_ep_stream_t stream, bool* capturing) {
  return on_device(stream, [&](const LaunchContext&) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    NVTE_EP_TRY(cuda_status(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing"));
    *capturing = status != cudaStreamCaptureStatusNone;
    return Status();
  });
}

Status CudaBackend::is_idle(nvte_ep_stream_t stream, bool* idle) {
  return on_device(stream, [&](const LaunchContext&) {
    const cudaError_t state = cudaStreamQuery(stream);
    *idle = state == cudaSuccess;
    return state == cudaErrorNotReady ? Status() : cuda_status(state, "cudaStreamQuery");
  });
}

Status CudaBackend::with_device(const std::function<Status()>& function) {
  return on_device(nullptr, [&](const LaunchContext&) { return function(); });
}

Status CudaBackend::gather_scalars(int32_t top_k, const SlotAddress* slots, const RankArrays& values,
                                   const TensorView& out, nvte_ep_stream_t stream) {
  if (out.rows() == 0 || top_k == 0) return Status();
  return on_device(
      stream, [&](const LaunchContext& c) { return launch_gather_scalars(top_k, slots, values, out, c); });
}

Status CudaBackend::clean_indices(const TensorView& topk_idx, int32_t num_experts, int64_t tokens,
                                  int32_t* clean, int64_t* faults, nvte_ep_stream_t stream) {
  return on_device(stream, [&](const LaunchContext& c) {
    return launch_clean_indices(topk_idx, num_experts, tokens, clean, faults, c);
  });
}

int64_t CudaBackend::route_workspace_bytes(const Route& route) const { return route_workspace_size(route); }

Status CudaBackend::route(const Route& route, nvte_ep_stream_t stream) {
  return on_device(stream, [&](const LaunchContext& c) { return launch_route(route, c); });
}

Status CudaBackend::copy_rows(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                              int64_t row_bytes, int64_t rows, nvte_ep_stream_t stream) {
  if (rows == 0 || row_bytes == 0) return Status();
  return on_device(stream, [&](const LaunchContext&) {
    const size_t width = static_cast<size_t>(row_bytes);
    if (rows == 1 || (to_stride == row_bytes && from_stride == row_bytes)) {
      return cuda_status(
          cudaMemcpyAsync(to, from, width * static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
    }
    return cuda_status(
        cudaMemcpy2DAsync(to, static_cast<size_t>(to_stride), from, static_cast<size_t>(from_stride), width,
                          static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, stream),
        "cudaMemcpy2DAsync");
  });
}

Status CudaBackend::copy_words(void* to, const void* from, int64_t words_per_item, int64_t items,
                               const IndexView& count, nvte_ep_stream_t stream) {
  if (items == 0) return Status();
  return on_device(stream, [&](const LaunchContext& c) {
    return launch_copy_words(to, from, words_per_item, items, count, c);
  });
}

Status CudaBackend::write_index(const TensorView& out, const int64_t* counts, nvte_ep_stream_t stream) {
  return on_device(stream, [&](const LaunchContext& c) { return launch_write_index(out, counts, c); });
}

Status CudaBackend::allocate(int64_t bytes, void** pointer) {
  return on_device(nullptr, [&](const LaunchContext&) {
    const size_t size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    NVTE_EP_TRY(cuda_status(cudaMalloc(pointer, size), "cudaMalloc"));
    const cudaError_t zeroed = cudaMemset(*pointer, 0, size);
    const cudaError_t done = zeroed == cudaSuccess ? cudaStreamSynchronize(cudaStreamLegacy) : zeroed;
    if (done != cudaSuccess) (void)cudaFree(*pointer);
    return cuda_status(done, "cudaMemset");
  });
}

Status CudaBackend::allocate_shared(int64_t bytes, void** pointer) {
  return on_device(nullptr, [&](const LaunchContext&) {
    const size_t size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    NVTE_EP_TRY(cuda_status(cudaHostAlloc(pointer, size, cudaHostAllocPortable | cudaHostAllocMapped),
                            "cudaHostAlloc"));
    std::memset(*pointer, 0, size);
    return Status();
  });
}

void CudaBackend::release_shared(void* pointer) {
  if (abandoned_) return;
  const DeviceGuard guard(device_.device);
  (void)cudaFreeHost(pointer);
}

Status CudaBackend::upload(void* to, const void* from, int64_t bytes, nvte_ep_stream_t stream) {
  return on_device(stream, [&](const LaunchContext&) {
    NVTE_EP_TRY(
        cuda_status(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream),
                    "cudaMemcpyAsync"));
    return cuda_status(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  });
}

Status CudaBackend::download(void* to, const void* from, int64_t bytes, nvte_ep_stream_t stream) {
  return on_device(stream, [&](const LaunchContext&) {
    NVTE_EP_TRY(
        cuda_status(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream),
                    "cudaMemcpyAsync"));
    return cuda_status(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  });
}

void CudaBackend::release(void* pointer) {
  if (abandoned_) return;
  const DeviceGuard guard(device_.device);
  (void)cudaFree(pointer);
}

Availability probe_cuda() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    return {"cuda", false, no_cuda_reason(error)};
  }
  std::string reason = "no CUDA device";
  for (int device = 0; device < count; ++device) {
    LaunchContext context;
    const Status status = describe_device(device, &context);
    if (status.ok()) return {"cuda", true, ""};
    reason = status.message();
  }
  return {"cuda", false, reason};
}

Status find_cuda_backend(int32_t device, Backend** backend) {
  static std::mutex mutex;
  static std::array<std::unique_ptr<CudaBackend>, kMaxDevices> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (device < 0 || device >= kMaxDevices || known[static_cast<size_t>(device)] == nullptr) {
    LaunchContext context;
    NVTE_EP_TRY(describe_device(device, &context));
    known[static_cast<size_t>(device)] = std::make_unique<CudaBackend>(context);
  }
  *backend = known[static_cast<size_t>(device)].get();
  return Status();
}

}  // namespace nvte_ep
