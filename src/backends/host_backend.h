// The host backend: the reference that defines every byte. Plain loops over the format traits.
#ifndef NVTE_EP_BACKENDS_HOST_BACKEND_H_
#define NVTE_EP_BACKENDS_HOST_BACKEND_H_

#include "core/backend.h"

namespace nvte_ep {

class HostBackend : public Backend {
 public:
  explicit HostBackend(int max_threads) : max_threads_(max_threads) {}
  const char* name() const override { return "host"; }

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
  // Everything is done when a call returns.
  Status create_stream(nvte_ep_stream_t* stream) override {
    *stream = nullptr;
    return Status();
  }
  void destroy_stream(nvte_ep_stream_t) override {}
  Status create_mark(void** mark) override {
    *mark = nullptr;
    return Status();
  }
  void destroy_mark(void*) override {}
  Status set_mark(void*, nvte_ep_stream_t) override { return Status(); }
  Status wait_mark(void*, nvte_ep_stream_t) override { return Status(); }
  Status mark_passed(void*, bool* passed) override {
    *passed = true;
    return Status();
  }
  Status synchronize() override { return Status(); }
  Status preload() override { return Status(); }
  int32_t num_sms() const override { return 1; }
  Status is_capturing(nvte_ep_stream_t, bool* capturing) override {
    *capturing = false;
    return Status();
  }
  Status is_idle(nvte_ep_stream_t, bool* idle) override {
    *idle = true;
    return Status();
  }
  Status with_device(const std::function<Status()>& function) override { return function(); }
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
  void abandon() override {}
  Status allocate_shared(int64_t bytes, void** pointer) override { return allocate(bytes, pointer); }
  void release_shared(void* pointer) override { release(pointer); }
  Status upload(void* to, const void* from, int64_t bytes, nvte_ep_stream_t stream) override;
  Status download(void* to, const void* from, int64_t bytes, nvte_ep_stream_t stream) override;

 private:
  int max_threads_;
};

// ---- shared by the files of the host backend ----

inline int64_t load_index(const IndexView& view, int64_t i) {
  return view.is_int64 ? static_cast<const int64_t*>(view.data)[i]
                       : static_cast<const int32_t*>(view.data)[i];
}

inline void report(int32_t* findings, int32_t bits) {
  if (findings != nullptr && bits != 0) *findings |= bits;
}

// Rows in use: row_count where given, clamped to the rows there are.
int64_t rows_in_use(int64_t rows, const CodecOptions& options);

// Items of which a thread of its own is worth while, for items of the given elements.
inline int64_t grain_of(int64_t elements_per_item) {
  return std::max<int64_t>(1, 65536 / (elements_per_item + 1));
}

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_HOST_BACKEND_H_
