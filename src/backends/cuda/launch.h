// What the CUDA backend calls: one function a kernel family, implemented in <family>.cu. Arguments are
// checked, pointers are on the current device, everything is enqueued on the context's stream.
#ifndef NVTE_EP_BACKENDS_CUDA_LAUNCH_H_
#define NVTE_EP_BACKENDS_CUDA_LAUNCH_H_

#include "core/backend.h"
#include "device/launch_kernel.h"

namespace nvte_ep {

Status launch_quantize(int32_t format, const TensorView& tokens, const RowsView& rows,
                       const CodecOptions& options, const LaunchContext& context);
Status launch_assemble(int32_t format, const RowsView& apart, const RowsView& packed,
                       const CodecOptions& options, const LaunchContext& context);
Status launch_dequantize(int32_t format, const RowsView& rows, const TensorView& tokens,
                         const CodecOptions& options, const RowWeighting& weighting,
                         const LaunchContext& context);
Status launch_direct_receive(int32_t format, const RowsView& rows, const IndexView& rows_per_expert,
                             const OperandView& operand, const CodecOptions& options,
                             const LaunchContext& context);
Status launch_swizzle(const TensorView& scales, const IndexView& rows_per_expert, int32_t num_experts,
                      uint8_t* swizzled, int64_t tile_rows, bool inverse, const LaunchContext& context);
// The arrays of one entry per rank lie on the device, as all pointers do.
Status launch_gather_rows(const GatherRows& gather, const LaunchContext& context);
Status launch_reduce_rows(const ReduceRows& reduce, const LaunchContext& context);
Status launch_tag_rows(const TagRows& tag, const LaunchContext& context);
Status launch_locate_rows(const LocateRows& locate, const LaunchContext& context);
Status launch_scatter_rows(const ScatterRows& scatter, const LaunchContext& context);
Status launch_merge_slots(const MergeSlots& merge, const LaunchContext& context);
Status launch_add_sums(const float* sums, const TensorView& result, const LaunchContext& context);
Status launch_gather_scalars(int32_t top_k, const SlotAddress* slots, const RankArrays& values,
                             const TensorView& out, const LaunchContext& context);
Status launch_clean_indices(const TensorView& topk_idx, int32_t num_experts, int64_t tokens, int32_t* clean,
                            int64_t* faults, const LaunchContext& context);
Status launch_copy_words(void* to, const void* from, int64_t words_per_item, int64_t items,
                         const IndexView& count, const LaunchContext& context);
Status launch_write_index(const TensorView& out, const int64_t* counts, const LaunchContext& context);
int64_t route_workspace_size(const Route& route);
Status launch_route(const Route& route, const LaunchContext& context);

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_CUDA_LAUNCH_H_
