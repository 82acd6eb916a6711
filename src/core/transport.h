// Transport: how rows and slots travel between the ranks of a group. A Communicator knows the ranks, a GroupTransport is one
// rank's member of a group, a HandleTransport its routing state for one layer. core asks for capabilities, never for a
// transport by name.
#ifndef NVTE_EP_CORE_TRANSPORT_H_
#define NVTE_EP_CORE_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "core/finding.h"
#include "core/status.h"
#include "core/tensor_view.h"

namespace nvte_ep {

class Communicator {
 public:
  Communicator(int32_t kind, int32_t rank, int32_t size) : kind_(kind), rank_(rank), size_(size) {}
  virtual ~Communicator() = default;
  int32_t kind() const { return kind_; }
  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  // Where groups live that name no device, if that is a CUDA device.
  virtual int32_t device() const { return 0; }

 private:
  int32_t kind_, rank_, size_;
};

struct GroupSettings {
  Device device;
  int32_t num_experts = 0;
  int32_t max_top_k = 0;
  int64_t hidden = 0;
  int64_t max_tokens_per_rank = 0;
  int64_t recv_capacity = 0;  // 0: eager
  int32_t num_sms = 0;
  int64_t timeout_ns = 0;
  bool drop_on_overflow = false;
  bool zero_copy = false;
  bool eager() const { return recv_capacity == 0; }
};

struct HandleSettings {
  int64_t id = 0;  // the n-th handle of the group, the same on every rank
  int32_t top_k = 0;
  int32_t alignment = 128;
  int32_t dispatch = 0;
  int32_t combine = 0;
  int32_t dispatch_backward = 0;
  int32_t combine_backward = 0;
};

struct Capabilities {
  const char* name;
  bool capturable;
  bool slot_order_exact;
  bool quantized_combine;  // combine and dispatch_backward in mxfp8
};

// What prepare hands out; data null: not wanted.
struct PrepareCall {
  TensorView topk_idx;
  TensorView tokens_routed, tokens_per_expert, rows_per_expert, row_offsets, scale_row_offsets;
  TensorView total_rows, dropped_rows, slot_source, slot_expert;
  int64_t* total_rows_host = nullptr;
};

// The routing as later steps read it, in the backend's memory.
struct RoutingView {
  int64_t tokens = 0;         // T of prepare
  IndexView rows_per_expert;  // [num_local_experts]
  IndexView total_rows;       // [1]
  const int64_t* slot_source = nullptr;
  int64_t slots = 0;  // slots that a received tensor must have: the capacity, or the eager total
};

// Input and output of dispatch and combine_backward.
struct DispatchCall {
  bool backward = false;
  TensorView tokens;  // tokens [T, H], or packed rows uint8 [T, row_bytes]; data null with apart
  bool packed = false;
  bool is_apart = false;
  RowsView apart;
  TensorView weights;  // topk_weights
  bool gives_weights = false;
  int32_t receive = 0;
  CodecOptions options;
  TensorView received;
  OperandView operand;
  TensorView recv_weights;
  RowWeighting weighting;  // combine_backward: slot_weights, expert_out, grad_slot_weights

  bool is_weighted() const { return weighting.weights != nullptr || weighting.dots != nullptr; }
  // The tokens are rows of the wire format already.
  bool is_wire(int32_t format) const {
    return !is_apart && (packed || (format == NVTE_EP_FORMAT_BF16 && tokens.dtype == DType::kBFloat16));
  }
};

// Every token's row to the slots of its experts.
struct SendRows {
  const void* rows = nullptr;  // [T]
  int64_t row_stride = 0;      // bytes
  int64_t readable_rows = 0;   // T, or more where the memory behind is the handle's own
  int64_t row_bytes = 0;
  int32_t format = 0;
  bool backward = false;  // combine_backward
  TensorView weights;     // [T, K]; data null: not given
  bool gives_weights = false;
  void* out = nullptr;  // [slots]; padding inside slabs becomes zero
  int64_t out_stride = 0;
  float* out_weights = nullptr;     // [slots] or null
  const void* symmetric = nullptr;  // the memory that zero_copy names
};

// Every token's slots, summed at the token's rank.
struct ReturnRows {
  TensorView slots;                     // [slots, H]
  const float* slot_weights = nullptr;  // [slots]; null: 1
  int32_t format = 0;
  bool backward = false;  // dispatch_backward
  TensorView result;      // [T, H]
  bool accumulate = false;
  const float* slot_scalars = nullptr;  // [slots] gradients of the slots' weights; or null
  TensorView scalars;                   // [T, K] those of topk_weights; data null: not wanted
  bool wants_scalars = false;
  const void* symmetric = nullptr;
};

class HandleTransport {
 public:
  virtual ~HandleTransport() = default;
  // Where packed rows of the next send_rows are best written, max_tokens_per_rank of them; null: anywhere.
  virtual Status send_memory(void** memory, nvte_ep_stream_t) {
    *memory = nullptr;
    return Status();
  }
  virtual Status prepare(const PrepareCall& call, nvte_ep_stream_t stream) = 0;
  virtual bool prepared() const = 0;
  virtual RoutingView routing() const = 0;
  // Where a transport packs, sends and receives in steps of its own, it takes the call whole; otherwise core packs, send_rows
  // moves rows, and core makes of the slots what is wanted.
  virtual bool takes_dispatch() const { return false; }
  virtual Status dispatch(const DispatchCall&, nvte_ep_stream_t) {
    return Status(NVTE_EP_STATUS_INTERNAL, "this transport does not take a dispatch whole");
  }
  virtual Status send_rows(const SendRows& call, nvte_ep_stream_t stream) = 0;
  virtual Status return_rows(const ReturnRows& call, nvte_ep_stream_t stream) = 0;
};

class GroupTransport {
 public:
  virtual ~GroupTransport() = default;
  virtual Capabilities capabilities() const = 0;
  virtual Status create_handle(const HandleSettings& settings, std::unique_ptr<HandleTransport>* handle) = 0;
  virtual Status mem_alloc(int64_t bytes, void** pointer) = 0;
  virtual Status mem_free(void* pointer) = 0;
  // True where [pointer, pointer + bytes) lies in memory from mem_alloc.
  virtual bool is_symmetric(const void* pointer, int64_t bytes) const = 0;
  virtual Finding poll() = 0;
  // What ended the group for ever, or OK. Any thread.
  virtual Status failure() const { return Status(); }
  virtual void abort() = 0;
  // The group ends for this rank.
  virtual void close() = 0;
};

struct CommunicatorSettings {
  int32_t kind = 0;  // NVTE_EP_COMM_*
  int32_t rank = 0;
  int32_t size = 0;
  int32_t device_id = 0;
  const uint8_t* unique_id = nullptr;
  int64_t timeout_ns = 0;
};

// From src/transports/registry.cc: the kinds of communicators, and the transports.
Status make_unique_id(int32_t kind, uint8_t* unique_id);
Status create_communicator(const CommunicatorSettings& settings, std::unique_ptr<Communicator>* communicator);
Status borrow_nccl_communicator(void* nccl_comm, std::unique_ptr<Communicator>* communicator);
std::vector<Availability> list_transports();
// transport is NVTE_EP_TRANSPORT_*; AUTO takes the first of the list that fits.
Status create_transport(Communicator* comm, const GroupSettings& settings, int32_t transport,
                        Backend* backend, std::unique_ptr<GroupTransport>* group);
// Bytes that the transport itself would hold: for a group, and for each handle.
Status transport_memory(const Communicator& comm, const GroupSettings& settings, int32_t transport,
                        int64_t* group_bytes, int64_t* exchange_bytes, int64_t* handle_bytes);

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_TRANSPORT_H_
