#include "transports/nccl_ep_slots.h"

#include <algorithm>
#include <utility>

#include "core/pipeline.h"

namespace nvte_ep {

using nccl::check;

namespace {

TensorView part(const TensorView& whole, int64_t at, int64_t columns) {
  TensorView view = whole;
  if (view.data != nullptr) view.data = static_cast<uint8_t*>(view.data) + at;
  view.shape[1] = columns;
  return view;
}

}  // namespace

NcclEpSlots::~NcclEpSlots() {
  if (ranks_ == nullptr) return;
  close();
  ranks_->forget(this);
}

Status NcclEpSlots::open() {
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
  const Array memory(memory_.as<void>(), nccl::kUint8, {static_cast<int64_t>(bytes)});
  NVTE_EP_TRY(backend->with_device([&] {
    return check(*api.nccl,
                 api.ncclEpInitHandle(&handle_, ranks_->group(), nccl_ep::kExpertMajor, &config,
                                      settings_.top_k, &memory.tensor),
                 "ncclEpInitHandle", nullptr);
  }));
  if (ranks_->low_latency_group() == nullptr) return Status();
  low_latency_ = std::make_unique<NcclEpLowLatency>(ranks_, settings_, route_);
  return low_latency_->open();
}

void NcclEpSlots::orphan() {
  close();
  ranks_ = nullptr;
}

Status NcclEpSlots::prepare(int64_t tokens, int64_t slots, nvte_ep_stream_t stream) {
  tokens_ = tokens;
  slots_ = slots;
  NVTE_EP_TRY(no_slot_values_.reserve(ranks_->backend(), slots * 4));
  NVTE_EP_TRY(slot_values_.reserve(ranks_->backend(), slots * 4));
  updated_ = false;
  if (low_latency_ != nullptr) return low_latency_->prepare(tokens, stream);
  return update(stream);
}

// In low-latency mode only the steps that need it pay for it; ranks make the same steps, so they meet here.
Status NcclEpSlots::update(nvte_ep_stream_t stream) {
  if (updated_) return Status();
  const Array indices(route_.kept_indices, nccl::kInt32, {tokens_, settings_.top_k});
  NVTE_EP_TRY(ranks_->step("ncclEpUpdateHandle", stream, [&] {
    return ranks_->api().ncclEpUpdateHandle(handle_, &indices.tensor, nullptr, stream);
  }));
  updated_ = true;
  return Status();
}

Status NcclEpSlots::dispatch(const DispatchCall& call, const RoutingView& routing, nvte_ep_stream_t stream) {
  const int64_t hidden = ranks_->settings().hidden;
  const int32_t format = call.backward ? settings_.combine_backward : settings_.dispatch;
  const int64_t row_bytes = row_layout(*find_format(format), hidden).row_bytes;
  // Rows that are wanted as they travel land in the caller's memory.
  const bool as_they_travel = call.receive == NVTE_EP_RECEIVE_ROWS ||
                              (call.receive == NVTE_EP_RECEIVE_DECODED && format == NVTE_EP_FORMAT_BF16 &&
                               call.received.dtype == DType::kBFloat16 && !call.is_weighted());
  TensorView received = call.received;
  if (!as_they_travel) {
    received =
        TensorView{nullptr, DType::kUInt8, ranks_->settings().device, 2, {slots_, row_bytes}, row_bytes};
    NVTE_EP_TRY(ranks_->slot_rows(slots_, &received.data));
  }
  if (low_latency_ != nullptr) {
    NVTE_EP_TRY(low_latency_->dispatch(call, format, received, slots_, stream));
  } else {
    NVTE_EP_TRY(high_throughput(call, format, row_bytes, received, stream));
  }
  if (as_they_travel) return Status();
  return receive_rows(ranks_->backend(), format,
                      packed_rows(format, received.data, row_bytes, slots_, hidden), routing, call, stream);
}

// Rows of the wire format to received, which may be strided.
Status NcclEpSlots::high_throughput(const DispatchCall& call, int32_t format, int64_t row_bytes,
                                    const TensorView& received, nvte_ep_stream_t stream) {
  const void* rows = nullptr;
  NVTE_EP_TRY(rows_to_send(call, format, row_bytes, &rows, stream));
  const bool direct = received.stride * dtype_bytes(received.dtype) == row_bytes && is_aligned(received.data);
  void* slots = received.data;
  if (!direct) NVTE_EP_TRY(ranks_->slot_rows(slots_, &slots));
  NVTE_EP_TRY(exchange(call, rows, slots, row_bytes, stream));
  return direct ? Status() : spread(slots, row_bytes, received, stream);
}

Status NcclEpSlots::return_rows(const ReturnRows& call, nvte_ep_stream_t stream) {
  const int64_t hidden = ranks_->settings().hidden;
  const bool low_latency = low_latency_ != nullptr && low_latency_->can_combine(call);
  // What is added to a result must not be rounded before: NCCL EP rounds the sum over the ranks to the type of its rows.
  const bool rounds_twice = !low_latency && call.accumulate && ranks_->size() > 1;
  NVTE_EP_TRY(ranks_->agree_on_sums(call, low_latency, rounds_twice, stream));
  if (low_latency) return low_latency_combine(call, stream);
  NVTE_EP_TRY(update(stream));
  const DType dtype = rounds_twice ? DType::kFloat32 : call.slots.dtype;
  const int64_t columns = std::min(hidden, token_bytes(ranks_->settings()) / dtype_bytes(dtype));
  const int64_t passes = hidden / columns;
  const bool direct_in = passes == 1 && call.slot_weights == nullptr && call.slots.stride == hidden &&
                         is_aligned(call.slots.data);
  const bool direct_out =
      passes == 1 && !call.accumulate && call.result.stride == hidden && is_aligned(call.result.data);
  void* merged = nullptr;
  if (!direct_in) NVTE_EP_TRY(ranks_->slot_rows(slots_, &merged));
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t at = pass * columns * dtype_bytes(call.slots.dtype);
    const TensorView result = part(call.result, at, columns);
    const void* from = call.slots.data;
    if (!direct_in) {
      NVTE_EP_TRY(merge(part(call.slots, at, columns), call.slot_weights, dtype, merged, stream));
      from = merged;
    }
    void* to = direct_out ? result.data : ranks_->token_rows();
    NVTE_EP_TRY(combine(from, to, dtype, columns, pass == 0 ? &call : nullptr, stream));
    if (rounds_twice) {
      NVTE_EP_TRY(ranks_->backend()->add_sums(static_cast<const float*>(to), result, stream));
    } else if (!direct_out) {
      NVTE_EP_TRY(add(to, result, call.accumulate, stream));
    }
  }
  return Status();
}

Status NcclEpSlots::low_latency_combine(const ReturnRows& call, nvte_ep_stream_t stream) {
  TensorView from = call.slots;
  if (call.slot_weights != nullptr) {
    from.stride = from.columns();
    NVTE_EP_TRY(ranks_->slot_rows(slots_, &from.data));
    NVTE_EP_TRY(merge(call.slots, call.slot_weights, from.dtype, from.data, stream));
  }
  const bool direct_out =
      !call.accumulate && call.result.stride == call.result.columns() && is_aligned(call.result.data);
  void* to = direct_out ? call.result.data : ranks_->token_rows();
  NVTE_EP_TRY(low_latency_->combine(from, to, stream));
  return direct_out ? Status() : add(to, call.result, call.accumulate, stream);
}

// Contiguous rows of the wire format, 16-byte aligned.
Status NcclEpSlots::rows_to_send(const DispatchCall& call, int32_t format, int64_t row_bytes,
                                 const void** rows, nvte_ep_stream_t stream) {
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
Status NcclEpSlots::exchange(const DispatchCall& call, const void* rows, void* slots, int64_t row_bytes,
                             nvte_ep_stream_t stream) {
  Backend* backend = ranks_->backend();
  Array in_rows(rows, nccl::kBfloat16, {tokens_, row_bytes / 2});
  Array out_rows(slots, nccl::kBfloat16, {claimed_slots(), row_bytes / 2});
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
  Array in_weights(weights, nccl::kFloat32, {tokens_, settings_.top_k});
  Array out_weights(direct ? wanted : slot_values_.as<void>(), nccl::kFloat32, {claimed_slots()});
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
Status NcclEpSlots::spread(const void* rows, int64_t bytes, const TensorView& received,
                           nvte_ep_stream_t stream) {
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

// Slots that are weighted, strided, too wide or to be summed in another type: NCCL EP adds contiguous rows as they are. A
// token's slots are summed into the first of them, so this rank's part is rounded once, like NCCL EP's own.
Status NcclEpSlots::merge(const TensorView& slots, const float* weights, DType dtype, void* merged,
                          nvte_ep_stream_t stream) {
  MergeSlots m{};
  m.rows = slots;
  m.weights = weights;
  m.slot_source = route_.slot_source;
  m.slots = route_.in_slots;
  m.tokens = route_.tokens;
  m.top_k = settings_.top_k;
  m.slot_count = slot_count();
  m.out = slots;
  m.out.dtype = dtype;
  m.out.data = merged;
  m.out.stride = slots.columns();
  m.out.shape[0] = slots_;
  return ranks_->backend()->merge_slots(m, stream);
}

// call: given in the pass in which the weights' gradients travel.
Status NcclEpSlots::combine(const void* from, void* to, DType dtype, int64_t columns, const ReturnRows* call,
                            nvte_ep_stream_t stream) {
  Array in_rows(from, data_type(dtype), {claimed_slots(), columns});
  Array out_rows(to, data_type(dtype), {tokens_, columns});
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
  Array in_scalars(slot_values, nccl::kFloat32, {claimed_slots()});
  Array out_scalars(scalars_direct ? call->scalars.data : choice_values_.as<void>(), nccl::kFloat32,
                    {tokens_, settings_.top_k});
  if (backward) {
    config.pass_direction = nccl_ep::kBackward;
    inputs.topk_weights = &in_scalars.tensor;
    outputs.topk_weights = &out_scalars.tensor;
  }
  NVTE_EP_TRY(ranks_->step("ncclEpCombine", stream, [&] {
    return ranks_->api().ncclEpCombine(handle_, &inputs, &outputs, &config, stream);
  }));
  if (!wanted || scalars_direct) return Status();
  return ranks_->backend()->copy_rows(call->scalars.data, call->scalars.stride * 4, choice_values_.as<void>(),
                                      settings_.top_k * 4, settings_.top_k * 4, tokens_, stream);
}

// Contiguous sums of tokens to the caller's rows.
Status NcclEpSlots::add(const void* sums, const TensorView& result, bool accumulate,
                        nvte_ep_stream_t stream) {
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

void NcclEpSlots::close() {
  if (low_latency_ != nullptr) low_latency_->close();
  const nccl_ep::Handle handle = std::exchange(handle_, nullptr);
  if (handle == nullptr || ranks_->is_stuck()) return;
  (void)ranks_->backend()->with_device([&] {
    (void)ranks_->api().ncclEpHandleDestroy(handle);
    return Status();
  });
}

Status NcclEpRanks::open_slots(const HandleSettings& settings, const Route& route,
                               std::unique_ptr<SlotExchange>* slots) {
  auto created = std::make_unique<NcclEpSlots>(this, settings, route);
  handles_.push_back(created.get());
  NVTE_EP_TRY(created->open());
  *slots = std::move(created);
  return Status();
}

}  // namespace nvte_ep
