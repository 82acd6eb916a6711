// The CUDA backend: everything of core/backend.h on one device, with the host backend's bytes.
#ifndef NVTE_EP_BACKENDS_CUDA_CUDA_BACKEND_H_
#define NVTE_EP_BACKENDS_CUDA_CUDA_BACKEND_H_

#include <atomic>

#include "backends/cuda/launch.h"
#include "core/backend.h"

namespace nvte_ep {

// Calls enqueue one kernel (direct receive of NVFP4 two, route three) on the stream; they allocate nothing,
// wait for nothing, and can be captured in a graph. Arrays of one entry per rank lie on the device, too. Any
// thread may call.
class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const LaunchContext& device) : device_(device) {}
  const char* name() const override { return "cuda"; }

  Status quantize(int32_t format, const TensorView& tokens, const RowsView& rows, const CodecOptions& options,
                  nvte_ep_stream_t stream) override;
  Status dequantize(int32_t format, const RowsView& rows, const TensorView& tokens,
                    const CodecOptions& options, const RowWeighting& weighting,
                    nvte_ep_stream_t stream) override;
  Status assemble(int32_t format, const RowsView& apart, const RowsView& packed, const CodecOptions& options,
                  nvte_ep_stream_t stream) override;
  Status direct_receive(int32_t format, const RowsView& rows, const IndexView& rows_per_expert,
                        const OperandView& operand, const CodecOptions& options,
                        nvte_ep_stream_t stream) override;
  Status swizzle(const TensorView& scales, const IndexView& rows_per_expert, int32_t num_experts,
                 uint8_t* swizzled, int64_t tile_rows, bool inverse, nvte_ep_stream_t stream) override;
  Status gather_rows(const GatherRows& gather, nvte_ep_stream_t stream) override;
  Status reduce_rows(const ReduceRows& reduce, nvte_ep_stream_t stream) override;
  Status merge_slots(const MergeSlots& merge, nvte_ep_stream_t stream) override;
  Status add_sums(const float* sums, const TensorView& result, nvte_ep_stream_t stream) override;
  Status tag_rows(const TagRows& tag, nvte_ep_stream_t stream) override;
  Status locate_rows(const LocateRows& locate, nvte_ep_stream_t stream) override;
  Status scatter_rows(const ScatterRows& scatter, nvte_ep_stream_t stream) override;
  Status gather_scalars(int32_t top_k, const SlotAddress* slots, const RankArrays& values,
                        const TensorView& out, nvte_ep_stream_t stream) override;
  Status create_mark(void** mark) override;
  void destroy_mark(void* mark) override;
  Status set_mark(void* mark, nvte_ep_stream_t stream) override;
  Status wait_mark(void* mark, nvte_ep_stream_t stream) override;
  Status create_stream(nvte_ep_stream_t* stream) override;
  void destroy_stream(nvte_ep_stream_t stream) override;
  Status mark_passed(void* mark, bool* passed) override;
  Status synchronize() override;
  Status preload() override;
  int32_t num_sms() const override { return device_.sms; }
  Status is_capturing(nvte_ep_stream_t stream, bool* capturing) override;
  Status is_idle(nvte_ep_stream_t stream, bool* idle) override;
  Status with_device(const std::function<Status()>& function) override;
  Status clean_indices(const TensorView& topk_idx, int32_t num_experts, int64_t tokens, int32_t* clean,
                       int64_t* faults, nvte_ep_stream_t stream) override;
  int64_t route_workspace_bytes(const Route& route) const override;
  Status route(const Route& route, nvte_ep_stream_t stream) override;
  Status copy_rows(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t row_bytes,
                   int64_t rows, nvte_ep_stream_t stream) override;
  Status copy_words(void* to, const void* from, int64_t words_per_item, int64_t items, const IndexView& count,
                    nvte_ep_stream_t stream) override;
  Status write_index(const TensorView& out, const int64_t* counts, nvte_ep_stream_t stream) override;
  Status allocate(int64_t bytes, void** pointer) override;
  void release(void* pointer) override;
  void abandon() override { abandoned_ = true; }
  Status allocate_shared(int64_t bytes, void** pointer) override;
  void release_shared(void* pointer) override;
  Status upload(void* to, const void* from, int64_t bytes, nvte_ep_stream_t stream) override;
  Status download(void* to, const void* from, int64_t bytes, nvte_ep_stream_t stream) override;

 private:
  // Calls function(context) while the backend's device is current; the caller's device is current again
  // afterwards.
  template <typename Function>
  Status on_device(nvte_ep_stream_t stream, const Function& function);

  LaunchContext device_;
  std::atomic<bool> abandoned_{false};
};

// Whether this machine can run the backend: a driver, and a device of compute capability 9.0 or more.
Availability probe_cuda();
// The backend of a device; UNSUPPORTED with the reason where it cannot be.
Status find_cuda_backend(int32_t device, Backend** backend);

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_CUDA_CUDA_BACKEND_H_
