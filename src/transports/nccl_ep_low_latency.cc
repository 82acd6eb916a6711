#include "transports/nccl_ep_low_latency.h"

#include <cstdlib>
#include <utility>
#include <vector>

namespace nvte_ep {

using nccl::check;

namespace {

// Up to here it has been seen to be faster than high-throughput mode; above, its memory gets large.
constexpr int64_t kMaxTokens = 128;
// What its kernels are made for.
constexpr int64_t kHiddenMultiple = 512;
constexpr int64_t kMaxHidden = 8192;
constexpr int64_t kRowMultiple = 512;  // bytes
constexpr int32_t kMaxTopK = 31;       // a warp for each, and one more
constexpr int64_t kExpertsPerSm = 14;
constexpr int64_t kFewestSms = 64;  // of the devices that it is made for

}  // namespace

bool low_latency_wanted() {
  const char* value = std::getenv("NVTE_EP_NCCL_EP_LOW_LATENCY");
  return value == nullptr || value[0] != '0';
}

bool low_latency_fits(const GroupSettings& settings, int32_t size) {
  const bool small = settings.max_tokens_per_rank <= kMaxTokens && !settings.eager() && !settings.zero_copy;
  const bool shape = settings.hidden % kHiddenMultiple == 0 && settings.hidden <= kMaxHidden &&
                     settings.max_top_k <= kMaxTopK;
  const int64_t experts = int64_t{padded_local_experts(settings, size)} * size;
  const char* const chosen = exchange_sms_of_user();
  const int64_t sms = chosen != nullptr       ? std::atoll(chosen)
                      : settings.num_sms != 0 ? settings.num_sms
                                              : kFewestSms;
  return low_latency_wanted() && small && shape && experts <= kExpertsPerSm * sms;
}

int64_t low_latency_row_bytes(int64_t row_bytes, int32_t top_k) {
  return round_up(row_bytes + kTagBytes + int64_t{top_k} * 4, kRowMultiple);
}

int64_t NcclEpLowLatency::rows_per_expert() const { return max_tokens(ranks_->settings()) * ranks_->size(); }

Status NcclEpLowLatency::open() {
  const nccl_ep::Api& api = ranks_->api();
  const GroupSettings& group = ranks_->settings();
  Backend* backend = ranks_->backend();
  const nccl_ep::HandleConfig config;
  size_t bytes = 0;
  NVTE_EP_TRY(backend->with_device([&] {
    return check(*api.nccl,
                 api.ncclEpHandleMemSize(ranks_->low_latency_group(), nccl_ep::kExpertMajor, &config, &bytes,
                                         settings_.top_k),
                 "ncclEpHandleMemSize (low latency)", nullptr);
  }));
  NVTE_EP_TRY(memory_.reserve(backend, static_cast<int64_t>(bytes)));
  NVTE_EP_TRY(counts_.reserve(backend, int64_t{ranks_->kept_experts()} * 4));
  NVTE_EP_TRY(place_.reserve(backend, group.recv_capacity * 8));
  const std::vector<float> ones(static_cast<size_t>(max_tokens(group) * settings_.top_k), 1.0f);
  const int64_t ones_bytes = static_cast<int64_t>(ones.size()) * 4;
  NVTE_EP_TRY(ones_.reserve(backend, ones_bytes));
  NVTE_EP_TRY(backend->upload(ones_.as<void>(), ones.data(), ones_bytes, nullptr));
  const Array memory(memory_.as<void>(), nccl::kUint8, {static_cast<int64_t>(bytes)});
  return backend->with_device([&] {
    return check(*api.nccl,
                 api.ncclEpInitHandle(&handle_, ranks_->low_latency_group(), nccl_ep::kExpertMajor, &config,
                                      settings_.top_k, &memory.tensor),
                 "ncclEpInitHandle (low latency)", nullptr);
  });
}

void NcclEpLowLatency::close() {
  const nccl_ep::Handle handle = std::exchange(handle_, nullptr);
  if (handle == nullptr || ranks_->is_stuck()) return;
  (void)ranks_->backend()->with_device([&] {
    (void)ranks_->api().ncclEpHandleDestroy(handle);
    return Status();
  });
}

Status NcclEpLowLatency::prepare(int64_t tokens, nvte_ep_stream_t stream) {
  tokens_ = tokens;
  dispatched_ = false;
  // Read by the steps themselves, from where it is.
  const Array indices(route_.kept_indices, nccl::kInt32, {tokens, settings_.top_k});
  return ranks_->step("ncclEpUpdateHandle (low latency)", stream, [&] {
    return ranks_->api().ncclEpUpdateHandle(handle_, &indices.tensor, nullptr, stream);
  });
}

Status NcclEpLowLatency::dispatch(const DispatchCall& call, int32_t format, const TensorView& received,
                                  int64_t slots, nvte_ep_stream_t stream) {
  Backend* backend = ranks_->backend();
  const int64_t hidden = ranks_->settings().hidden;
  const int64_t row_bytes = row_layout(*find_format(format), hidden).row_bytes;
  const int64_t stride = low_latency_row_bytes(row_bytes, settings_.top_k);
  uint8_t* send = static_cast<uint8_t*>(ranks_->low_latency_send_rows());
  uint8_t* came = static_cast<uint8_t*>(ranks_->low_latency_rows());
  if (call.is_wire(format)) {
    NVTE_EP_TRY(backend->copy_rows(send, stride, call.tokens.data,
                                   call.tokens.stride * dtype_bytes(call.tokens.dtype), row_bytes, tokens_,
                                   stream));
  } else if (tokens_ > 0) {
    const RowsView packed = packed_rows(format, send, stride, tokens_, hidden);
    NVTE_EP_TRY(call.is_apart ? backend->assemble(format, call.apart, packed, call.options, stream)
                              : backend->quantize(format, call.tokens, packed, call.options, stream));
  }
  TagRows tag{};
  tag.rows = send;
  tag.row_stride = stride;
  tag.trailer = row_bytes;
  tag.weights = static_cast<const float*>(call.weights.data);
  tag.weights_stride = call.weights.stride;
  tag.tokens = tokens_;
  tag.rank = ranks_->rank();
  tag.top_k = settings_.top_k;
  NVTE_EP_TRY(backend->tag_rows(tag, stream));

  const int64_t experts = ranks_->kept_experts();
  Array in_rows(send, nccl::kBfloat16, {tokens_, stride / 2});
  Array out_rows(came, nccl::kBfloat16, {experts, rows_per_expert(), stride / 2});
  Array counts(counts_.as<void>(), nccl::kInt32, {experts});
  nccl_ep::DispatchInputs inputs;
  inputs.tokens = &in_rows.tensor;
  nccl_ep::DispatchOutputs outputs;
  outputs.tokens = &out_rows.tensor;
  nccl_ep::LayoutInfo info;
  info.expert_counters = &counts.tensor;
  const nccl_ep::DispatchConfig config;
  NVTE_EP_TRY(ranks_->step("ncclEpDispatch (low latency)", stream, [&] {
    return ranks_->api().ncclEpDispatch(handle_, &inputs, &outputs, &info, &config, stream);
  }));
  dispatched_ = true;

  LocateRows locate{};
  locate.rows = came;
  locate.row_stride = stride;
  locate.trailer = row_bytes;
  locate.counts = counts_.as<int32_t>();
  locate.num_experts = static_cast<int32_t>(experts);
  locate.rows_per_expert = rows_per_expert();
  locate.slots = route_.in_slots;
  locate.num_ranks = route_.num_ranks;
  locate.tokens = route_.tokens;
  locate.top_k = settings_.top_k;
  locate.slot_source = route_.slot_source;
  locate.slot_expert = route_.slot_expert;
  locate.num_slots = slots;
  locate.slot_count = IndexView{route_.totals, true};
  locate.place = place_.as<int64_t>();
  locate.expected = route_.tokens_per_expert;
  locate.num_expected = route_.num_experts / route_.num_ranks;
  locate.differs = ranks_->low_latency_differs();
  NVTE_EP_TRY(backend->locate_rows(locate, stream));
  GatherRows gather{};
  gather.rows.block = came;
  gather.rows.row_stride = stride;
  gather.weights = gather.rows;
  gather.weights.offset = row_bytes + kTagBytes;
  gather.slot_source = place_.as<int64_t>();
  gather.slot_k = route_.slot_k;
  gather.slots = slots;
  gather.slot_count = locate.slot_count;
  gather.row_bytes = row_bytes;
  gather.out = received.data;
  gather.out_stride = received.stride * dtype_bytes(received.dtype);
  gather.out_weights = static_cast<float*>(call.recv_weights.data);
  return backend->gather_rows(gather, stream);
}

// Weighted slots of a token are merged and rounded before they travel, and the sum over the ranks is rounded: adding it to a
// result would round once too often.
bool NcclEpLowLatency::can_combine(const ReturnRows& call) const {
  const bool rounds_twice = call.accumulate && call.slot_weights != nullptr && ranks_->size() > 1;
  return dispatched_ && !call.backward && call.slots.dtype == DType::kBFloat16 && !rounds_twice;
}

Status NcclEpLowLatency::combine(const TensorView& slots, void* sums, nvte_ep_stream_t stream) {
  const int64_t hidden = slots.columns();
  const int64_t experts = ranks_->kept_experts();
  uint8_t* back = static_cast<uint8_t*>(ranks_->low_latency_rows());
  ScatterRows scatter{};
  scatter.rows = slots;
  scatter.place = place_.as<int64_t>();
  scatter.slot_count = IndexView{route_.totals, true};
  scatter.out = back;
  scatter.out_stride = hidden * dtype_bytes(slots.dtype);
  NVTE_EP_TRY(ranks_->backend()->scatter_rows(scatter, stream));
  Array in_rows(back, data_type(slots.dtype), {experts, rows_per_expert(), hidden});
  Array out_rows(sums, data_type(slots.dtype), {tokens_, hidden});
  Array weights(ones_.as<void>(), nccl::kFloat32, {tokens_, settings_.top_k});
  nccl_ep::CombineInputs inputs;
  inputs.tokens = &in_rows.tensor;
  nccl_ep::CombineOutputs outputs;
  outputs.tokens = &out_rows.tensor;
  outputs.topk_weights = &weights.tensor;
  const nccl_ep::CombineConfig config;
  return ranks_->step("ncclEpCombine (low latency)", stream, [&] {
    return ranks_->api().ncclEpCombine(handle_, &inputs, &outputs, &config, stream);
  });
}

}  // namespace nvte_ep
