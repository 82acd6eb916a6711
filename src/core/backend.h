// Backend: the arithmetic of the library on one kind of memory. Implementations: host (the reference that defines every
// byte) and CUDA. Arguments are checked before they get here; pointers are on the backend's device; every call enqueues on
// the stream only (host: does the work) and allocates nothing.
#ifndef NVTE_EP_CORE_BACKEND_H_
#define NVTE_EP_CORE_BACKEND_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/operand_layout.h"
#include "core/row_layout.h"
#include "core/status.h"
#include "core/tensor_view.h"

namespace nvte_ep {

// T quantised rows: packed, or payload and scales apart. Strides are in bytes.
struct RowsView {
  uint8_t* payload = nullptr;
  int64_t payload_stride = 0;
  uint8_t* scales = nullptr;  // null where the format has none
  int64_t scales_stride = 0;
  uint8_t* token_scales = nullptr;  // null: none (other formats, or apart in tensor-scale mode)
  int64_t token_scale_stride = 0;
  int64_t rows = 0;
  int64_t hidden = 0;
  bool packed = false;  // the three pointers lie in one row, whose pad bytes are written too
  // Rows that are written to one of two places: where *flip, in the backend's memory, is odd, flip_bytes further on.
  const uint32_t* flip = nullptr;
  int64_t flip_bytes = 0;
  // Packed rows that lie anywhere [rows]; the pointers above are then those of any one row. For dequantize and
  // direct_receive on a device.
  const uint8_t* const* anywhere = nullptr;
  // Rows in this range of addresses are being written by the kernel before, which lets the next one start; all the others,
  // and the array itself, are there already. For direct_receive with columns.
  const uint8_t* late_begin = nullptr;
  const uint8_t* late_end = nullptr;

  // A part of row i. first: that part of the first row, one of the three pointers.
  NVTE_EP_HD const uint8_t* part(const uint8_t* first, int64_t stride, int64_t i) const {
    return anywhere == nullptr ? first + i * stride : anywhere[i] + (first - payload);
  }
};

// How much further on the rows of a view lie; called where *flip can be read.
NVTE_EP_HD int64_t flip_of(const RowsView& view) {
  return view.flip == nullptr || (*view.flip & 1u) == 0 ? 0 : view.flip_bytes;
}

inline RowsView packed_rows(int32_t format, void* base, int64_t row_stride_bytes, int64_t rows,
                            int64_t hidden) {
  const RowLayout layout = row_layout(*find_format(format), hidden);
  uint8_t* p = static_cast<uint8_t*>(base);
  RowsView view;
  view.payload = p;
  view.scales = layout.scale_bytes && p ? p + layout.payload_bytes : nullptr;
  view.token_scales = layout.token_scale_bytes && p ? p + layout.token_scale_offset : nullptr;
  view.payload_stride = view.scales_stride = view.token_scale_stride = row_stride_bytes;
  view.rows = rows;
  view.hidden = hidden;
  view.packed = true;
  return view;
}

// Integers in the backend's memory, int32 or int64; null data: not given.
struct IndexView {
  void* data = nullptr;
  bool is_int64 = true;
};

// What an int32 output gets of a number of rows.
NVTE_EP_HD int32_t saturated_int32(int64_t count) {
  return static_cast<int32_t>(count < INT32_MAX ? count : INT32_MAX);
}

struct CodecOptions {
  bool stochastic = false;
  bool saturate = false;
  bool scale_up = false;
  bool column_max = false;
  uint64_t row_id_base = 0;
  int32_t rank = 0;
  const int64_t* rng_state = nullptr;         // {seed, offset}
  const float* tensor_scale = nullptr;        // [1]
  const float* fixed_expert_scale = nullptr;  // [E]
  // [E, 2], for direct_receive on a device: the rowwise and the columnwise exponent of each expert, from kMinExponent up, 255
  // illegal; published already. Null: they are found.
  const uint8_t* expert_exponents = nullptr;
  IndexView row_count;          // [1]; rows in use
  int32_t num_sms = 0;          // that kernels may take up; 0: all
  bool reads_ahead = false;     // quantize may read its inputs while the kernel before in the stream runs
  int32_t* findings = nullptr;  // [1]
};

// Decoding gradients of weighted slots: row s becomes decoded * weights[s], dots[s] = decoded . expert_out[s].
//
// A dot product is summed in FP64 in one order, so that it has the same bits everywhere: lane l of kDotLanes adds the
// (exact) products of elements 8j to 8j + 7 for j = l, l + kDotLanes, ...; lanes of 32 are folded, upper half onto lower,
// down to one; the sums of the groups are added first to last.
constexpr int kDotLanes = 256;
constexpr int kDotRun = 8;
struct RowWeighting {
  const float* weights = nullptr;        // [slots]
  const int64_t* slot_source = nullptr;  // [slots], negative: padding, whose results are zero
  TensorView expert_out;                 // data null: no dots
  float* dots = nullptr;                 // [slots]
};

// Where a token's k-th copy went: rank << 40 | slot, or -1.
using SlotAddress = int64_t;
constexpr int kSlotBits = 40;
constexpr SlotAddress slot_address(int32_t rank, int64_t slot) {
  return (static_cast<int64_t>(rank) << kSlotBits) | slot;
}

// One array of every rank: given rank by rank, or (pointers null) as one block with a fixed distance between the ranks. That
// of own_rank may lie elsewhere.
struct RankArrays {
  const void* const* pointers = nullptr;  // [ranks] first row of each rank; a null entry: none
  const int64_t* strides = nullptr;       // [ranks] bytes from row to row; null: row_stride for all
  const void* block = nullptr;
  int64_t rank_stride = 0;  // bytes
  int64_t row_stride = 0;   // bytes
  int64_t offset = 0;       // bytes from a rank's pointer to its first row
  int32_t own_rank = -1;    // -1: no exception
  const void* own = nullptr;
  int64_t own_stride = 0;  // bytes

  NVTE_EP_HD const uint8_t* row(int64_t rank, int64_t i) const {
    if (rank == own_rank) return own ? static_cast<const uint8_t*>(own) + i * own_stride : nullptr;
    const uint8_t* first = pointers ? static_cast<const uint8_t*>(pointers[rank])
                           : block  ? static_cast<const uint8_t*>(block) + rank * rank_stride
                                    : nullptr;
    return first ? first + offset + i * (strides ? strides[rank] : row_stride) : nullptr;
  }
  NVTE_EP_HD const float* floats(int64_t rank, int64_t i) const {
    return reinterpret_cast<const float*>(row(rank, i));
  }
};

// A part of the tokens of all ranks, for steps that begin before everything has come.
struct TokenPart {
  enum Which : int32_t { kAll, kOwn, kOthers };
  Which which = kAll;
  int32_t own_rank = 0;
  int64_t begin = 0, end = 0;  // of each of the ranks that are meant

  NVTE_EP_HD bool has(int64_t rank, int64_t token) const {
    if (which == kAll) return true;
    return (rank == own_rank) == (which == kOwn) && token >= begin && token < end;
  }
};

// Rows of every rank into this rank's slots: slot s takes row (rank, token) of slot_source[s] = rank << 32 | token; a
// negative source is padding and becomes zero.
struct GatherRows {
  RankArrays rows;
  RankArrays weights;          // float32 [T, K] of each rank; none: not wanted
  const int64_t* slot_source;  // [slots]; null: slot s takes row (0, s)
  const int32_t* slot_k;       // [slots] which of the token's top_k choices
  int64_t slots;               // total_rows, or more with slot_count
  IndexView slot_count;        // [1] in the backend's memory; null data: slots says it all
  int64_t row_bytes;
  void* out;           // null: weights only
  int64_t out_stride;  // bytes
  float* out_weights;  // [slots] or null
  TokenPart part;      // padding belongs to the own tokens
  // The same map from the other side, where it is known: row (r, i) goes to the slots at (r * source_rows + i) * top_k. A part
  // whose rows go to several slots each then reads them once.
  const SlotAddress* source_slots;
  int64_t source_rows;
  int32_t top_k;
  int32_t num_ranks;
};

// A token's slots on every rank, summed: result[t] = sum over k of weight * row, FP32, in order of k, rounded once.
struct ReduceRows {
  int32_t num_ranks;
  int32_t top_k;
  RankArrays rows;           // slots of each rank
  RankArrays weights;        // float32 [slots] of each rank; none: 1
  const SlotAddress* slots;  // [T, K]
  TensorView result;         // [T, H]; its dtype is that of the rows
  bool accumulate;
  int32_t
      partial_format;  // BF16: rows travel as they are; MXFP8: one partial row per (token, rank) is rounded to MXFP8
};

// The slots of each token on this rank summed into the first of them, the others cleared, so that a sum over all of them is
// exact: out[s] = sum over the slots of s's token of weight * row, FP32, in order of k, rounded once, if s is the first; else
// zero. Padding is left as it is.
struct MergeSlots {
  TensorView rows;             // [slots, columns]
  const float* weights;        // [slots]; null: 1
  const int64_t* slot_source;  // [slots] as Route has it
  const SlotAddress* slots;    // [num_ranks, tokens, top_k] as Route::in_slots
  int64_t tokens;              // of each rank
  int32_t top_k;
  IndexView slot_count;  // [1] slots in use
  TensorView out;        // [slots, columns], dtype of the rows, or FP32
};

// Rows that say of themselves whose they are: behind the row a trailer of {rank, token} int32 [2], padded to 16 bytes, and the
// token's weights, float32 [top_k], or zeros.
struct TagRows {
  uint8_t* rows;  // [tokens]
  int64_t row_stride;
  int64_t trailer;       // bytes from a row to its trailer, a multiple of 16
  const float* weights;  // [tokens, top_k] or null
  int64_t weights_stride;
  int64_t tokens;
  int32_t rank;
  int32_t top_k;
};
constexpr int64_t kTagBytes = 16;  // from the trailer to the weights

// Tagged rows that came in any order, expert by expert: place[s] = e * rows_per_expert + i for the row i of expert e that
// belongs to slot s; -1 for padding. Tags that are none (of rows that an aborted exchange left) place nothing.
struct LocateRows {
  const uint8_t* rows;  // [num_experts, rows_per_expert]
  int64_t row_stride;
  int64_t trailer;
  const int32_t* counts;  // [num_experts] rows that came
  int32_t num_experts;
  int64_t rows_per_expert;
  const SlotAddress* slots;  // [num_ranks, tokens, top_k] as Route::in_slots
  int32_t num_ranks;
  int64_t tokens;
  int32_t top_k;
  const int64_t* slot_source;  // [slots]
  const int32_t* slot_expert;  // [slots]
  int64_t num_slots;
  IndexView slot_count;  // [1] slots in use
  int64_t* place;        // [slots]
  // Where other numbers of rows came than were sent, or one for which there is no slot, *differs (memory that the host reads)
  // becomes 1.
  const int64_t* expected;  // [num_expected] rows of each expert; of the experts behind them none
  int32_t num_expected;
  int32_t* differs;
};

// Rows in slots to the places of the above; padding goes nowhere.
struct ScatterRows {
  TensorView rows;  // [slots, columns]
  const int64_t* place;
  IndexView slot_count;
  uint8_t* out;
  int64_t out_stride;
};

// needed_rows of the calls that dropped rows since the host reported some: of this call, and of those before it where not all
// that they dropped has been reported.
NVTE_EP_HD int64_t largest_need(int64_t needed, int64_t needed_before, int64_t dropped_before,
                                int64_t reported) {
  return dropped_before != reported && needed_before > needed ? needed_before : needed;
}

// prepare on one rank, from the choices of all: what core/routing.h defines, in the backend's memory.
struct Route {
  int32_t rank = 0;
  int32_t num_ranks = 0;
  int32_t num_experts = 0;  // of all ranks
  int32_t top_k = 0;
  int64_t alignment = 1;
  int64_t capacity = 0;  // INT64_MAX: whatever is needed
  int64_t tokens = 0;    // rows of indices and slots per rank; a rank with fewer tokens pads with -1
  const int32_t* indices = nullptr;  // [num_ranks, tokens, top_k], clean
  // Of this rank's experts; null: not wanted
  int64_t* tokens_routed = nullptr;      // [num_local_experts]
  int64_t* tokens_per_expert = nullptr;  // [num_local_experts]
  int64_t* rows_per_expert = nullptr;    // [num_local_experts]
  int64_t* row_offsets = nullptr;        // [num_local_experts + 1]
  int64_t* scale_row_offsets = nullptr;  // [num_local_experts + 1]
  int64_t* totals = nullptr;             // [3] total_rows, dropped_rows, needed_rows
  int64_t* history = nullptr;            // [2] over all calls: dropped rows are added; largest_need
  const int64_t* reported = nullptr;  // [1] of the dropped rows in history, those that the host has reported
  int64_t* slot_source = nullptr;     // [total_rows]
  int32_t* slot_k = nullptr;          // [total_rows]
  int32_t* slot_expert = nullptr;     // [total_rows]
  // Where copies went: of this rank's tokens on every rank, and of every rank's tokens on this one
  SlotAddress* slots = nullptr;     // [tokens, top_k]
  SlotAddress* in_slots = nullptr;  // [num_ranks, tokens, top_k]; the rank part is this rank
  // For sums that come back one row or value a rank: what the ranks that hold a token's copies send for it
  SlotAddress* rank_rows = nullptr;  // [tokens, num_ranks]: (rank, token), -1 where the rank holds none
  SlotAddress* rank_choices =
      nullptr;  // [tokens, top_k]: (rank, token * top_k + k), -1 where there is no copy
  // [tokens, top_k] this rank's indices, -1 where the copy was dropped; numbered as if every rank had kept_experts of them
  int32_t* kept_indices = nullptr;
  int32_t kept_experts = 0;
  void* workspace = nullptr;  // route_workspace_bytes
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;

  virtual Status quantize(int32_t format, const TensorView& tokens, const RowsView& rows,
                          const CodecOptions& options, nvte_ep_stream_t stream) = 0;
  virtual Status dequantize(int32_t format, const RowsView& rows, const TensorView& tokens,
                            const CodecOptions& options, const RowWeighting& weighting,
                            nvte_ep_stream_t stream) = 0;
  // Rows given apart into packed ones; the token scale comes from the rows or from options.tensor_scale.
  virtual Status assemble(int32_t format, const RowsView& apart, const RowsView& packed,
                          const CodecOptions& options, nvte_ep_stream_t stream) = 0;
  virtual Status direct_receive(int32_t format, const RowsView& rows, const IndexView& rows_per_expert,
                                const OperandView& operand, const CodecOptions& options,
                                nvte_ep_stream_t stream) = 0;
  // scales [R, C] <-> tiles; rows_per_expert.data null: one matrix. tile_rows: that swizzled has, a multiple of 128; what
  // slabs would have beyond is left alone on both sides.
  virtual Status swizzle(const TensorView& scales, const IndexView& rows_per_expert, int32_t num_experts,
                         uint8_t* swizzled, int64_t tile_rows, bool inverse, nvte_ep_stream_t stream) = 0;

  virtual Status gather_rows(const GatherRows& gather, nvte_ep_stream_t stream) = 0;
  virtual Status reduce_rows(const ReduceRows& reduce, nvte_ep_stream_t stream) = 0;
  virtual Status merge_slots(const MergeSlots& merge, nvte_ep_stream_t stream) = 0;
  // result [T, H] += sums [T, H], FP32 and contiguous; rounded once.
  virtual Status add_sums(const float* sums, const TensorView& result, nvte_ep_stream_t stream) = 0;
  virtual Status tag_rows(const TagRows& tag, nvte_ep_stream_t stream) = 0;
  virtual Status locate_rows(const LocateRows& locate, nvte_ep_stream_t stream) = 0;
  virtual Status scatter_rows(const ScatterRows& scatter, nvte_ep_stream_t stream) = 0;
  // out[t, k] = the value of slots[t, k], 0 where there is none.
  virtual Status gather_scalars(int32_t top_k, const SlotAddress* slots, const RankArrays& values,
                                const TensorView& out, nvte_ep_stream_t stream) = 0;

  // topk_idx [T, K] to clean [tokens, K], T <= tokens: what is illegal, a second mention, and rows past T become -1.
  // faults [2]: indices out of range and duplicates are added.
  virtual Status clean_indices(const TensorView& topk_idx, int32_t num_experts, int64_t tokens,
                               int32_t* clean, int64_t* faults, nvte_ep_stream_t stream) = 0;
  virtual int64_t route_workspace_bytes(const Route& route) const = 0;
  virtual Status route(const Route& route, nvte_ep_stream_t stream) = 0;

  // rows rows of row_bytes bytes from one place of the backend's memory to another.
  virtual Status copy_rows(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                           int64_t row_bytes, int64_t rows, nvte_ep_stream_t stream) = 0;
  // The first min(items, *count) items of words_per_item 32-bit words each.
  virtual Status copy_words(void* to, const void* from, int64_t words_per_item, int64_t items,
                            const IndexView& count, nvte_ep_stream_t stream) = 0;
  // counts [n] int64 to a caller's tensor, int64 or int32 (saturated).
  virtual Status write_index(const TensorView& out, const int64_t* counts, nvte_ep_stream_t stream) = 0;

  // Makes all kernels ready, so that none is loaded while another one waits for it.
  virtual Status preload() = 0;
  virtual int32_t num_sms() const = 0;
  // Runs function while the backend's device is the current one.
  virtual Status with_device(const std::function<Status()>& function) = 0;
  // True where the stream is recording a graph; idle: where all that was enqueued is done.
  virtual Status is_capturing(nvte_ep_stream_t stream, bool* capturing) = 0;
  // A stream of the backend's own, whose kernels go before those of other streams.
  virtual Status create_stream(nvte_ep_stream_t* stream) = 0;
  virtual void destroy_stream(nvte_ep_stream_t stream) = 0;
  // Marks in a stream: passed once all that was enqueued before them is done. Asking may happen at any time, from any thread,
  // about marks that are not set in a capture.
  virtual Status create_mark(void** mark) = 0;
  virtual void destroy_mark(void* mark) = 0;
  virtual Status set_mark(void* mark, nvte_ep_stream_t stream) = 0;
  // What is enqueued on the stream from now on comes after the mark.
  virtual Status wait_mark(void* mark, nvte_ep_stream_t stream) = 0;
  virtual Status mark_passed(void* mark, bool* passed) = 0;
  virtual Status synchronize() = 0;  // all work on the device
  virtual Status is_idle(nvte_ep_stream_t stream, bool* idle) = 0;
  // Memory, aligned to 256 bytes (zero at first on a device). Shared memory is written by the device and read by the host at any time.
  virtual Status allocate(int64_t bytes, void** pointer) = 0;
  virtual void release(void* pointer) = 0;
  // From now on nothing is freed: kernels that never end run on the device, and freeing waits for all that run.
  virtual void abandon() = 0;
  virtual Status allocate_shared(int64_t bytes, void** pointer) = 0;
  virtual void release_shared(void* pointer) = 0;
  // Between host memory and the backend's, done on return: for creation and for eager groups only.
  virtual Status upload(void* to, const void* from, int64_t bytes, nvte_ep_stream_t stream) = 0;
  virtual Status download(void* to, const void* from, int64_t bytes, nvte_ep_stream_t stream) = 0;
};

// The backend of a device, from src/backends/registry.cc; UNSUPPORTED with the reason where there is none.
// max_threads bounds what a host call uses (0: as many as there are cores).
Status find_backend(const Device& device, int max_threads, Backend** backend);

// What a list (of backends, of transports) says of itself.
struct Availability {
  const char* name;
  bool available;
  std::string reason;  // where it is not
};
std::vector<Availability> list_backends();

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_BACKEND_H_
