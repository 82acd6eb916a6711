#include "transports/nccl_ep.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/pipeline.h"
#include "transports/device_buffer.h"
#include "transports/device_exchange.h"
#include "transports/nccl.h"
#include "transports/nccl_ep_api.h"
#include "transports/nccl_group_comm.h"

namespace nvte_ep {
namespace {

using nccl::check;

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % nccl_ep::kAlignment == 0;
}

// The largest row that travels: BF16 tokens. FP32 sums go in two halves of that size.
int64_t token_bytes(const GroupSettings& settings) { return settings.hidden * 2; }

// Tokens and slots that NCCL EP is made for.
int64_t max_tokens(const GroupSettings& settings) {
  return round_up(settings.max_tokens_per_rank, nccl_ep::kTokenMultiple);
}
int64_t max_slots(const GroupSettings& settings) {
  return std::max(settings.recv_capacity, max_tokens(settings));
}

int data_type(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return nccl::kBfloat16;
    case DType::kFloat16:
      return nccl::kFloat16;
    default:
      return nccl::kFloat32;
  }
}

// A contiguous array with the extents that its descriptor points at. Rows count as given even where NCCL EP asks for memory
// that it does not touch.
struct Array {
  Array(const void* data, int datatype, int64_t rows) : Array(data, datatype, rows, 0, 1) {}
  Array(const void* data, int datatype, int64_t rows, int64_t columns)
      : Array(data, datatype, rows, columns, 2) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  size_t sizes[2];
  nccl_ep::Tensor tensor;

 private:
  Array(const void* data, int datatype, int64_t rows, int64_t columns, unsigned ndim)
      : sizes{static_cast<size_t>(rows), static_cast<size_t>(columns)} {
    tensor.ndim = ndim;
    tensor.datatype = datatype;
    tensor.data = const_cast<void*>(data);
    tensor.sizes = sizes;
  }
};

// Multiprocessors of the exchange itself, which NCCL EP's config sets together with those of its local kernels. On an H200
// dispatch is fastest with 24, combine with 96; this is the best for both together. The local kernels keep all of them.
constexpr const char* kExchangeSms = "NCCL_EP_COMM_SMS";
constexpr const char* kExchangeSmsDefault = "32";

class NcclEpSlots;

// One rank of the group, and what its handles share. Steps follow each other on the group's stream, so one set of buffers
// for rows that cannot be handed over as they are will do.
class NcclEpRanks : public RoutingRanks {
 public:
  NcclEpRanks(const nccl::Api& api, const GroupSettings& settings, Backend* backend, int32_t rank,
              int32_t size)
      : settings_(settings),
        backend_(backend),
        ranks_(api, backend, rank, size, settings.timeout_ns, false) {}
  ~NcclEpRanks() override { close(); }

  Status open(NcclCommunicator* base) {
    NVTE_EP_TRY(ranks_.open(base, settings_, NVTE_EP_TRANSPORT_NCCL_EP));
    // AUTO goes on to the next transport where one rank cannot take part.
    NVTE_EP_TRY(ranks_.settle("group_create", nccl_ep::load(&api_), nullptr));
    NVTE_EP_TRY(backend_->preload());
    NVTE_EP_TRY(backend_->with_device([&] { return create_group(); }));
    std::vector<SlotAddress> identity(static_cast<size_t>(settings_.max_tokens_per_rank));
    std::iota(identity.begin(), identity.end(), SlotAddress{0});
    NVTE_EP_TRY(identity_.reserve(backend_, settings_.max_tokens_per_rank * 8));
    NVTE_EP_TRY(
        backend_->upload(identity_.as<void>(), identity.data(), settings_.max_tokens_per_rank * 8, nullptr));
    NVTE_EP_TRY(token_rows_.reserve(backend_, settings_.max_tokens_per_rank * token_bytes(settings_)));
    const int64_t slot_bytes = settings_.recv_capacity * token_bytes(settings_);
    if (!settings_.zero_copy) return slot_rows_.reserve(backend_, slot_bytes);
    agreed_places_.insert({num_blocks_, 0});  // the same on every rank by construction
    return allocate_symmetric(backend_, slot_bytes, &symmetric_slot_rows_);
  }

  Status gather(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(ranks_.watch().begin(stream));
    NVTE_EP_TRY(ranks_.gather(mine, all, bytes, stream));
    return ranks_.watch().end(stream);
  }
  Status open_slots(const HandleSettings& settings, const Route& route,
                    std::unique_ptr<SlotExchange>* slots) override;
  Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) override {
    return ranks_.agree(step, mine, stream);
  }
  Status wait(const char* step, nvte_ep_stream_t stream) override { return ranks_.wait(step, stream); }
  Status failure(int32_t* rank) override {
    *rank = -1;
    return ranks_.failure();
  }
  Status check_clock() override { return ranks_.check_watch(); }
  void abort(const std::string& message) override { ranks_.abort(message); }
  void close() override;

  Status allocate_symmetric(Backend* backend, int64_t bytes, void** memory) override;
  void release_symmetric(Backend* backend, void* memory) override;
  // The window that holds memory which zero_copy names. Its place must be the same on every rank: a place that has not been
  // seen yet is compared, which waits.
  Status bind(nccl_ep::Tensor* tensor, nvte_ep_stream_t stream);

  // Enqueues calls of NCCL EP as one step.
  template <typename Function>
  Status step(const char* name, nvte_ep_stream_t stream, const Function& call) {
    NVTE_EP_TRY(ranks_.watch().begin(stream));
    NVTE_EP_TRY(backend_->with_device([&] { return check(ranks_.api(), call(), name, ranks_.comm()); }));
    return ranks_.watch().end(stream);
  }

  const nccl_ep::Api& api() const { return *api_; }
  nccl_ep::Group group() const { return group_; }
  const GroupSettings& settings() const { return settings_; }
  Backend* backend() const { return backend_; }
  int32_t size() const { return ranks_.size(); }
  void* token_rows() const { return token_rows_.as<void>(); }
  // Room for so many slots; grows in eager groups only.
  Status slot_rows(int64_t slots, void** rows) {
    *rows = symmetric_slot_rows_;
    if (settings_.zero_copy) return Status();
    NVTE_EP_TRY(slot_rows_.reserve(backend_, slots * token_bytes(settings_)));
    *rows = slot_rows_.as<void>();
    return Status();
  }
  const SlotAddress* identity() const { return identity_.as<SlotAddress>(); }
  void forget(NcclEpSlots* handle) { handles_.erase(std::find(handles_.begin(), handles_.end(), handle)); }
  bool is_stuck() { return ranks_.is_stuck(); }

 private:
  struct Block {
    int64_t number;  // the n-th allocation
    int64_t bytes;
    nccl::Window window;
  };

  Status create_group() {
    nccl_ep::GroupConfig config;
    config.algorithm = nccl_ep::kHighThroughput;
    config.num_experts = static_cast<unsigned>(settings_.num_experts);
    config.max_dispatch_tokens_per_rank = static_cast<unsigned>(max_tokens(settings_));
    config.max_recv_tokens_per_rank = settings_.eager() ? 0 : static_cast<unsigned>(max_slots(settings_));
    config.max_token_bytes = static_cast<unsigned>(token_bytes(settings_));
    config.num_topk = static_cast<unsigned>(settings_.max_top_k);
    config.max_num_sms = static_cast<unsigned>(settings_.num_sms);
    config.zero_copy = settings_.zero_copy ? nccl_ep::kZeroCopyOn : nccl_ep::kZeroCopyAuto;
    // Its environment is read here, and nowhere else.
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    const bool choose = settings_.num_sms == 0 && std::getenv(kExchangeSms) == nullptr;
    if (choose) setenv(kExchangeSms, kExchangeSmsDefault, 1);
    const nccl::Result result = api_->ncclEpCreateGroup(&group_, ranks_.comm(), &config);
    if (choose) unsetenv(kExchangeSms);
    return check(ranks_.api(), result, "ncclEpCreateGroup", ranks_.comm());
  }

  const nccl_ep::Api* api_ = nullptr;
  const GroupSettings settings_;
  Backend* const backend_;
  NcclGroupComm ranks_;
  nccl_ep::Group group_ = nullptr;
  std::vector<NcclEpSlots*> handles_;
  DeviceBuffer identity_;                   // [max_tokens_per_rank]: token t is item t
  DeviceBuffer token_rows_, slot_rows_;     // of token_bytes
  void* symmetric_slot_rows_ = nullptr;     // in place of slot_rows_ where there is zero_copy
  std::map<const uint8_t*, Block> blocks_;  // symmetric memory
  int64_t num_blocks_ = 0;
  std::set<std::pair<int64_t, int64_t>> agreed_places_;  // number of the block, offset
};

class NcclEpSlots : public SlotExchange {
 public:
  NcclEpSlots(NcclEpRanks* ranks, const HandleSettings& settings, const Route& route)
      : ranks_(ranks), settings_(settings), route_(route) {}
  ~NcclEpSlots() override {
    if (ranks_ == nullptr) return;
    close();
    ranks_->forget(this);
  }

  Status open() {
    nccl_ep::HandleConfig config;
    config.dispatch_output_per_expert_alignment = static_cast<size_t>(settings_.alignment);
    const nccl_ep::Api& api = ranks_->api();
    Backend* backend = ranks_->backend();
    size_t bytes = 0;
    NVTE_EP_TRY(backend->with_device([&] {
      return check(
          *api.nccl,
          api.ncclEpHandleMemSize(ranks_->group(), nccl_ep::kExpertMajor, &config, &bytes, settings_.top_k),
          "ncclEpHandleMemSize", nullptr);
    }));
    NVTE_EP_TRY(memory_.reserve(backend, static_cast<int64_t>(bytes)));
    const int64_t choices = ranks_->settings().max_tokens_per_rank * settings_.top_k;
    NVTE_EP_TRY(no_weights_.reserve(backend, choices * 4));
    NVTE_EP_TRY(choice_values_.reserve(backend, choices * 4));
    NVTE_EP_TRY(no_slot_values_.reserve(backend, max_slots(ranks_->settings()) * 4));
    NVTE_EP_TRY(slot_values_.reserve(backend, max_slots(ranks_->settings()) * 4));
    const Array memory(memory_.as<void>(), nccl::kUint8, static_cast<int64_t>(bytes));
    return backend->with_device([&] {
      return check(*api.nccl,
                   api.ncclEpInitHandle(&handle_, ranks_->group(), nccl_ep::kExpertMajor, &config,
                                        settings_.top_k, &memory.tensor),
                   "ncclEpInitHandle", nullptr);
    });
  }

  // The group ends before its handle.
  void orphan() {
    close();
    ranks_ = nullptr;
  }

  Status prepare(int64_t tokens, int64_t slots, nvte_ep_stream_t stream) override {
    tokens_ = tokens;
    slots_ = slots;
    const Array indices(route_.kept_indices, nccl::kInt32, tokens, settings_.top_k);
    NVTE_EP_TRY(no_slot_values_.reserve(ranks_->backend(), slots * 4));
    NVTE_EP_TRY(slot_values_.reserve(ranks_->backend(), slots * 4));
    return ranks_->step("ncclEpUpdateHandle", stream, [&] {
      return ranks_->api().ncclEpUpdateHandle(handle_, &indices.tensor, nullptr, stream);
    });
  }

  Status dispatch(const DispatchCall& call, const RoutingView& routing, nvte_ep_stream_t stream) override {
    const int64_t hidden = ranks_->settings().hidden;
    const int32_t format = call.backward ? settings_.combine_backward : settings_.dispatch;
    const int64_t row_bytes = row_layout(*find_format(format), hidden).row_bytes;
    const void* rows = nullptr;
    NVTE_EP_TRY(rows_to_send(call, format, row_bytes, &rows, stream));

    // Rows that are wanted as they travel land in the caller's memory.
    const bool as_they_travel = call.receive == NVTE_EP_RECEIVE_ROWS ||
                                (call.receive == NVTE_EP_RECEIVE_DECODED && format == NVTE_EP_FORMAT_BF16 &&
                                 call.received.dtype == DType::kBFloat16 && !call.is_weighted());
    const bool direct = as_they_travel &&
                        call.received.stride * dtype_bytes(call.received.dtype) == row_bytes &&
                        is_aligned(call.received.data);
    void* slots = call.received.data;
    if (!direct) NVTE_EP_TRY(ranks_->slot_rows(slots_, &slots));
    NVTE_EP_TRY(exchange(call, rows, slots, row_bytes, stream));
    if (direct) return Status();
    return as_they_travel
               ? spread(slots, row_bytes, call.received, stream)
               : receive_rows(ranks_->backend(), format,
                              packed_rows(format, slots, row_bytes, slots_, hidden), routing, call, stream);
  }

  Status return_rows(const ReturnRows& call, nvte_ep_stream_t stream) override {
    const DType dtype = call.slots.dtype;
    const int64_t element = dtype_bytes(dtype);
    const int64_t hidden = ranks_->settings().hidden;
    const int64_t columns = std::min(hidden, token_bytes(ranks_->settings()) / element);
    const int64_t passes = hidden / columns;
    const bool direct_in = passes == 1 && call.slot_weights == nullptr && call.slots.stride == hidden &&
                           is_aligned(call.slots.data);
    const bool direct_out =
        passes == 1 && !call.accumulate && call.result.stride == hidden && is_aligned(call.result.data);
    void* merged = nullptr;
    if (!direct_in) NVTE_EP_TRY(ranks_->slot_rows(slots_, &merged));
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t at = pass * columns * element;
      const TensorView result = part(call.result, at, columns);
      const void* from = call.slots.data;
      if (!direct_in) {
        NVTE_EP_TRY(merge(part(call.slots, at, columns), call.slot_weights, merged, stream));
        from = merged;
      }
      void* to = direct_out ? result.data : ranks_->token_rows();
      NVTE_EP_TRY(combine(from, to, dtype, columns, pass == 0 ? &call : nullptr, stream));
      if (!direct_out) NVTE_EP_TRY(add(to, result, call.accumulate, stream));
    }
    return Status();
  }

 private:
  // A fixed group expects as many rows as it is made for; only slots in use are touched.
  int64_t claimed_slots() const {
    return ranks_->settings().eager() ? slots_ : max_slots(ranks_->settings());
  }
  IndexView slot_count() const { return IndexView{route_.totals, true}; }

  static TensorView part(const TensorView& whole, int64_t at, int64_t columns) {
    TensorView view = whole;
    if (view.data != nullptr) view.data = static_cast<uint8_t*>(view.data) + at;
    view.shape[1] = columns;
    return view;
  }

  // Contiguous rows of the wire format, 16-byte aligned.
  Status rows_to_send(const DispatchCall& call, int32_t format, int64_t row_bytes, const void** rows,
                      nvte_ep_stream_t stream) {
    Backend* backend = ranks_->backend();
    void* scratch = ranks_->token_rows();
    *rows = scratch;
    if (tokens_ == 0) return Status();
    if (call.is_wire(format)) {
      const int64_t stride = call.tokens.stride * dtype_bytes(call.tokens.dtype);
      if (stride == row_bytes && is_aligned(call.tokens.data)) {
        *rows = call.tokens.data;
        return Status();
      }
      return backend->copy_rows(scratch, row_bytes, call.tokens.data, stride, row_bytes, tokens_, stream);
    }
    const RowsView packed = packed_rows(format, scratch, row_bytes, tokens_, ranks_->settings().hidden);
    return call.is_apart ? backend->assemble(format, call.apart, packed, call.options, stream)
                         : backend->quantize(format, call.tokens, packed, call.options, stream);
  }

  // Rows are moved as they are, whatever they hold: BF16 is the name of their bytes. The weights travel in every forward
  // dispatch: a rank cannot know whether a peer wants them.
  Status exchange(const DispatchCall& call, const void* rows, void* slots, int64_t row_bytes,
                  nvte_ep_stream_t stream) {
    Backend* backend = ranks_->backend();
    Array in_rows(rows, nccl::kBfloat16, tokens_, row_bytes / 2);
    Array out_rows(slots, nccl::kBfloat16, claimed_slots(), row_bytes / 2);
    NVTE_EP_TRY(ranks_->bind(&out_rows.tensor, stream));
    nccl_ep::DispatchInputs inputs;
    inputs.tokens = &in_rows.tensor;
    nccl_ep::DispatchOutputs outputs;
    outputs.tokens = &out_rows.tensor;
    nccl_ep::DispatchConfig config;
    config.pass_direction = call.backward ? nccl_ep::kBackward : nccl_ep::kForward;

    const int64_t values = int64_t{settings_.top_k} * 4;
    const void* weights = no_weights_.as<void>();
    if (call.weights.data != nullptr) {
      weights = call.weights.data;
      if (call.weights.stride != settings_.top_k) {
        weights = choice_values_.as<void>();
        NVTE_EP_TRY(backend->copy_rows(choice_values_.as<void>(), values, call.weights.data,
                                       call.weights.stride * 4, values, tokens_, stream));
      }
    }
    // With zero_copy NCCL EP writes weights past the slots in use.
    void* const wanted = call.recv_weights.data;
    const bool direct = wanted != nullptr && !ranks_->settings().zero_copy;
    Array in_weights(weights, nccl::kFloat32, tokens_, settings_.top_k);
    Array out_weights(direct ? wanted : slot_values_.as<void>(), nccl::kFloat32, claimed_slots());
    if (!call.backward) {
      inputs.topk_weights = &in_weights.tensor;
      outputs.topk_weights = &out_weights.tensor;
    }
    NVTE_EP_TRY(ranks_->step("ncclEpDispatch", stream, [&] {
      return ranks_->api().ncclEpDispatch(handle_, &inputs, &outputs, nullptr, &config, stream);
    }));
    if (wanted == nullptr || direct) return Status();
    return backend->copy_words(wanted, slot_values_.as<void>(), 1, slots_, slot_count(), stream);
  }

  // Contiguous rows in slots to the caller's rows.
  Status spread(const void* rows, int64_t bytes, const TensorView& received, nvte_ep_stream_t stream) {
    GatherRows gather{};
    gather.rows.block = rows;
    gather.rows.row_stride = bytes;
    gather.slots = slots_;
    gather.slot_count = slot_count();
    gather.row_bytes = bytes;
    gather.out = received.data;
    gather.out_stride = received.stride * dtype_bytes(received.dtype);
    return ranks_->backend()->gather_rows(gather, stream);
  }

  // Slots that are weighted, strided or too wide: NCCL EP adds contiguous rows as they are. A token's slots are summed into
  // the first of them, so this rank's part is rounded once, like NCCL EP's own.
  Status merge(const TensorView& slots, const float* weights, void* merged, nvte_ep_stream_t stream) {
    MergeSlots m{};
    m.rows = slots;
    m.weights = weights;
    m.slot_source = route_.slot_source;
    m.slots = route_.in_slots;
    m.tokens = route_.tokens;
    m.top_k = settings_.top_k;
    m.slot_count = slot_count();
    m.out = slots;
    m.out.data = merged;
    m.out.stride = slots.columns();
    m.out.shape[0] = slots_;
    return ranks_->backend()->merge_slots(m, stream);
  }

  // call: given in the pass in which the weights' gradients travel.
  Status combine(const void* from, void* to, DType dtype, int64_t columns, const ReturnRows* call,
                 nvte_ep_stream_t stream) {
    Array in_rows(from, data_type(dtype), claimed_slots(), columns);
    Array out_rows(to, data_type(dtype), tokens_, columns);
    NVTE_EP_TRY(ranks_->bind(&in_rows.tensor, stream));
    nccl_ep::CombineInputs inputs;
    inputs.tokens = &in_rows.tensor;
    nccl_ep::CombineOutputs outputs;
    outputs.tokens = &out_rows.tensor;
    nccl_ep::CombineConfig config;
    const bool backward = call != nullptr && call->backward;
    const bool wanted = backward && call->scalars.data != nullptr;
    const bool scalars_direct = wanted && call->scalars.stride == settings_.top_k;
    // They travel in every dispatch backward, as the weights did.
    const float* slot_values =
        backward && call->slot_scalars != nullptr ? call->slot_scalars : no_slot_values_.as<float>();
    Array in_scalars(slot_values, nccl::kFloat32, claimed_slots());
    Array out_scalars(scalars_direct ? call->scalars.data : choice_values_.as<void>(), nccl::kFloat32,
                      tokens_, settings_.top_k);
    if (backward) {
      config.pass_direction = nccl_ep::kBackward;
      inputs.topk_weights = &in_scalars.tensor;
      outputs.topk_weights = &out_scalars.tensor;
    }
    NVTE_EP_TRY(ranks_->step("ncclEpCombine", stream, [&] {
      return ranks_->api().ncclEpCombine(handle_, &inputs, &outputs, &config, stream);
    }));
    if (!wanted || scalars_direct) return Status();
    return ranks_->backend()->copy_rows(call->scalars.data, call->scalars.stride * 4,
                                        choice_values_.as<void>(), settings_.top_k * 4, settings_.top_k * 4,
                                        tokens_, stream);
  }

  // Contiguous sums of tokens to the caller's rows.
  Status add(const void* sums, const TensorView& result, bool accumulate, nvte_ep_stream_t stream) {
    ReduceRows reduce{};
    reduce.num_ranks = 1;
    reduce.top_k = 1;
    reduce.rows.block = sums;
    reduce.rows.row_stride = result.columns() * dtype_bytes(result.dtype);
    reduce.slots = ranks_->identity();
    reduce.result = result;
    reduce.accumulate = accumulate;
    return ranks_->backend()->reduce_rows(reduce, stream);
  }

  void close() {
    const nccl_ep::Handle handle = std::exchange(handle_, nullptr);
    if (handle == nullptr || ranks_->is_stuck()) return;
    (void)ranks_->backend()->with_device([&] {
      (void)ranks_->api().ncclEpHandleDestroy(handle);
      return Status();
    });
  }

  NcclEpRanks* ranks_;
  const HandleSettings settings_;
  const Route route_;
  nccl_ep::Handle handle_ = nullptr;
  DeviceBuffer memory_;
  DeviceBuffer no_weights_, choice_values_;    // [max_tokens_per_rank, top_k]; the first is always zero
  DeviceBuffer no_slot_values_, slot_values_;  // [slots]
  int64_t tokens_ = 0;
  int64_t slots_ = 0;
};

Status NcclEpRanks::open_slots(const HandleSettings& settings, const Route& route,
                               std::unique_ptr<SlotExchange>* slots) {
  auto created = std::make_unique<NcclEpSlots>(this, settings, route);
  handles_.push_back(created.get());
  NVTE_EP_TRY(created->open());
  *slots = std::move(created);
  return Status();
}

void NcclEpRanks::close() {
  for (NcclEpSlots* handle : std::exchange(handles_, {})) handle->orphan();
  const nccl_ep::Group group = std::exchange(group_, nullptr);
  // Waits for the device, and so for ever where a kernel waits for a peer that is gone.
  if (ranks_.failure().ok()) {
    (void)backend_->with_device([&] {
      if (group != nullptr) (void)api_->ncclEpGroupDestroy(group);
      for (auto& block : blocks_) {
        const nccl::Window window = std::exchange(block.second.window, nullptr);
        if (window != nullptr) (void)ranks_.api().ncclCommWindowDeregister(ranks_.comm(), window);
      }
      return Status();
    });
  }
  ranks_.close();
  if (symmetric_slot_rows_ != nullptr)
    release_symmetric(backend_, std::exchange(symmetric_slot_rows_, nullptr));
}

Status NcclEpRanks::allocate_symmetric(Backend* backend, int64_t bytes, void** memory) {
  if (!settings_.zero_copy) return RoutingRanks::allocate_symmetric(backend, bytes, memory);
  const nccl::Api& nccl = ranks_.api();
  const size_t size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  Block block{num_blocks_++, bytes, nullptr};
  void* fresh = nullptr;
  const Status allocated = backend_->with_device(
      [&] { return check(nccl, nccl.ncclMemAlloc(&fresh, size), "ncclMemAlloc", ranks_.comm()); });
  Status status = ranks_.settle("symmetric memory", allocated, nullptr);
  if (status.ok()) {
    status = backend_->with_device([&] {
      return check(nccl,
                   nccl.ncclCommWindowRegister(ranks_.comm(), fresh, size, &block.window,
                                               nccl::kWindowCollectiveSymmetric),
                   "ncclCommWindowRegister", ranks_.comm());
    });
  }
  if (!status.ok()) {
    if (fresh != nullptr) (void)nccl.ncclMemFree(fresh);
    return status;
  }
  blocks_[static_cast<const uint8_t*>(fresh)] = block;
  *memory = fresh;
  return Status();
}

void NcclEpRanks::release_symmetric(Backend* backend, void* memory) {
  const auto found = blocks_.find(static_cast<const uint8_t*>(memory));
  if (found == blocks_.end()) return RoutingRanks::release_symmetric(backend, memory);
  const nccl::Window window = found->second.window;
  blocks_.erase(found);
  if (!ranks_.failure().ok()) return;  // peers may still reach it
  (void)backend_->with_device([&] {
    if (window != nullptr) (void)ranks_.api().ncclCommWindowDeregister(ranks_.comm(), window);
    (void)ranks_.api().ncclMemFree(memory);
    return Status();
  });
}

Status NcclEpRanks::bind(nccl_ep::Tensor* tensor, nvte_ep_stream_t stream) {
  if (!settings_.zero_copy) return Status();
  const uint8_t* data = static_cast<const uint8_t*>(tensor->data);
  auto found = blocks_.upper_bound(data);
  if (found == blocks_.begin())
    return invalid_argument("zero_copy: memory ", tensor->data, " is not symmetric");
  --found;
  const int64_t offset = data - found->first;
  if (offset >= found->second.bytes) {
    return invalid_argument("zero_copy: memory ", tensor->data, " is not symmetric");
  }
  tensor->window = found->second.window;
  tensor->window_offset = static_cast<uint64_t>(offset);
  const std::pair<int64_t, int64_t> place(found->second.number, offset);
  if (agreed_places_.count(place) != 0) return Status();
  bool capturing = false;
  NVTE_EP_TRY(backend_->is_capturing(stream, &capturing));
  if (capturing) {
    return bad_state(
        "zero_copy: symmetric memory at a new place is compared between the ranks, which waits: ",
        "use it once before the capture");
  }
  NVTE_EP_TRY(ranks_.agree(
      "zero_copy",
      {{"symmetric memory (the n-th allocation)", place.first}, {"symmetric memory offset", place.second}},
      stream));
  agreed_places_.insert(place);
  return Status();
}

}  // namespace

Status nccl_ep_ready() {
  const nccl_ep::Api* api = nullptr;
  return nccl_ep::load(&api);
}

Status probe_nccl_ep(const Communicator& comm, const GroupSettings& settings) {
  if (comm.kind() != NVTE_EP_COMM_NCCL) return unsupported("nccl_ep needs a communicator of kind NCCL");
  if (settings.device.is_host()) return unsupported("nccl_ep works on CUDA devices, not on host memory");
  const int32_t experts = settings.num_experts;
  const int64_t slots = settings.eager() ? settings.max_tokens_per_rank * comm.size() * settings.max_top_k
                                         : max_slots(settings);
  const struct {
    const char* what;
    int64_t got, most;
  } caps[] = {
      {"ranks", comm.size(), nccl_ep::kMaxRanks},
      {"tokens a rank (max_tokens_per_rank)", settings.max_tokens_per_rank, nccl_ep::kMaxTokensPerRank},
      {"choices a token (max_top_k)", settings.max_top_k, nccl_ep::kMaxTopK},
      {"experts a rank", experts / comm.size(), nccl_ep::kMaxLocalExperts},
      {"slots", slots, std::numeric_limits<int32_t>::max()}};
  for (const auto& cap : caps) {
    if (cap.got > cap.most) {
      return unsupported("nccl_ep: NCCL EP takes at most ", cap.most, " ", cap.what, ", got ", cap.got);
    }
  }
  if (settings.max_tokens_per_rank == 0) {
    return unsupported("nccl_ep: NCCL EP needs max_tokens_per_rank of 1 at least, got 0");
  }
  if (experts % nccl_ep::kExpertMultiple != 0) {
    return unsupported("nccl_ep: NCCL EP needs num_experts to be a multiple of ", nccl_ep::kExpertMultiple,
                       ", got ", experts);
  }
  return Status();
}

Status create_nccl_ep(Communicator* comm, const GroupSettings& settings, Backend* backend,
                      std::unique_ptr<GroupTransport>* group) {
  if (settings.num_sms > backend->num_sms()) {
    return invalid_argument("config.num_sms: expected at most ", backend->num_sms(), " on this device, got ",
                            settings.num_sms);
  }
  NcclCommunicator* const base = static_cast<NcclCommunicator*>(comm);
  auto ranks = std::make_unique<NcclEpRanks>(base->api(), settings, backend, comm->rank(), comm->size());
  NVTE_EP_TRY(ranks->open(base));
  *group = make_slot_group("nccl_ep", settings, backend, comm->rank(), comm->size(), std::move(ranks));
  return Status();
}

// NCCL EP does not tell what a group takes before there is one: this is what its buffers add up to.
void nccl_ep_memory(const Communicator& comm, const GroupSettings& settings, int64_t* group_bytes,
                    int64_t* exchange_bytes, int64_t* handle_bytes) {
  constexpr int64_t kWorkspace = 32 << 20;
  const int64_t tokens = max_tokens(settings);
  const int64_t all_tokens = tokens * comm.size();
  const int64_t slots = settings.eager() ? all_tokens * settings.max_top_k : max_slots(settings);
  const int64_t experts = settings.num_experts;
  const int64_t staging = (2 * all_tokens + slots) * token_bytes(settings) + 2 * slots * experts * 4;
  *exchange_bytes = staging + kWorkspace + all_tokens * round_up(experts, 8) / 8;
  *group_bytes = *exchange_bytes + (tokens + settings.recv_capacity) * token_bytes(settings) + tokens * 8;
  // Rows are packed, received and summed in the group's buffers, not in the handle's.
  const int64_t maps = slots * (experts / comm.size() + 8 * settings.max_top_k) + all_tokens * 16 +
                       tokens * (experts * 4 + settings.max_top_k * 16);
  *handle_bytes = device_handle_bytes(settings, comm.size()) + maps + max_slots(settings) * 8;
}

}  // namespace nvte_ep
