#include "core/group.h"

#include <algorithm>

namespace nvte_ep {
namespace {

int64_t largest_row(const GroupSettings& settings, std::initializer_list<int32_t> formats) {
  int64_t bytes = 0;
  for (int32_t id : formats) {
    const FormatRow& format = *find_format(id);
    if (settings.hidden % format.hidden_multiple != 0) continue;
    bytes = std::max(bytes, row_layout(format, settings.hidden).row_bytes);
  }
  return bytes;
}

Status check_direction(const char* name, int32_t id, int64_t hidden, bool is_sum, bool quantized_sum) {
  const FormatRow* format = find_format(id);
  if (format == nullptr) return unsupported("config.", name, ": expected a known format, got ", id);
  if (hidden % format->hidden_multiple != 0) {
    return invalid_argument("config.", name, ": ", format->name, " needs hidden to be a multiple of ",
                            format->hidden_multiple, ", the group has ", hidden);
  }
  if (is_sum && id == NVTE_EP_FORMAT_NVFP4) {
    return unsupported("config.", name, ": sums of slots travel in bf16 or mxfp8, not in nvfp4");
  }
  if (is_sum && id != NVTE_EP_FORMAT_BF16 && !quantized_sum) {
    return unsupported("config.", name, ": this transport sums in bf16 only, got ", format->name);
  }
  return Status();
}

}  // namespace

Status Scratch::reserve(int64_t bytes) {
  if (bytes <= bytes_) return Status();
  void* fresh = nullptr;
  NVTE_EP_TRY(backend_->allocate(bytes, &fresh));
  backend_->release(pointer_);
  pointer_ = fresh;
  bytes_ = bytes;
  return Status();
}

Status Group::create(std::shared_ptr<Communicator> comm, const GroupSettings& settings, int32_t transport,
                     std::shared_ptr<Group>* group) {
  std::shared_ptr<Group> created(new Group());
  // Ranks are threads already: one core for each rank's arithmetic, all of them where there is one rank.
  NVTE_EP_TRY(find_backend(settings.device, comm->size() == 1 ? 0 : 1, &created->backend_));
  created->settings_ = settings;
  created->rank_ = comm->rank();
  created->num_ranks_ = comm->size();
  created->comm_ = std::move(comm);
  NVTE_EP_TRY(
      create_transport(created->comm_.get(), settings, transport, created->backend_, &created->transport_));
  *group = std::move(created);
  return Status();
}

void Group::close() {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  if (transport_) transport_->close();
  transport_.reset();
  comm_.reset();
}

void Group::add_handle(const void* public_handle) {
  const std::lock_guard<std::mutex> lock(handles_mutex_);
  handles_[num_handles_++] = public_handle;
}

const void* Group::public_handle(int64_t id) const {
  const std::lock_guard<std::mutex> lock(handles_mutex_);
  const auto found = handles_.find(id);
  return found == handles_.end() ? nullptr : found->second;
}

void Group::forget_handle(const void* public_handle) {
  const std::lock_guard<std::mutex> lock(handles_mutex_);
  for (auto it = handles_.begin(); it != handles_.end(); ++it) {
    if (it->second != public_handle) continue;
    handles_.erase(it);
    return;
  }
}

Status Handle::create(std::shared_ptr<Group> group, const HandleSettings& settings,
                      std::shared_ptr<Handle>* handle) {
  const GroupSettings& g = group->settings();
  NVTE_EP_TRY(group->check_open());
  if (settings.top_k < 1 || settings.top_k > g.max_top_k) {
    return invalid_argument("config.top_k: expected 1 to ", g.max_top_k, " (max_top_k of the group), got ",
                            settings.top_k);
  }
  NVTE_EP_TRY(check_alignment(settings.alignment, "config"));
  if (!g.eager() && g.recv_capacity % settings.alignment != 0) {
    return invalid_argument("config.alignment: expected a divisor of the group's recv_capacity ",
                            g.recv_capacity, ", got ", settings.alignment);
  }
  std::shared_ptr<Handle> created(new Handle(group));
  created->settings_ = settings;
  created->settings_.id = group->next_handle_id();
  NVTE_EP_TRY(group->with_transport([&](GroupTransport& transport) -> Status {
    const bool quantized = transport.capabilities().quantized_combine;
    NVTE_EP_TRY(check_direction("dispatch", settings.dispatch, g.hidden, false, quantized));
    NVTE_EP_TRY(check_direction("combine", settings.combine, g.hidden, true, quantized));
    NVTE_EP_TRY(check_direction("dispatch_backward", settings.dispatch_backward, g.hidden, true, quantized));
    NVTE_EP_TRY(check_direction("combine_backward", settings.combine_backward, g.hidden, false, quantized));
    return transport.create_handle(created->settings_, &created->transport_);
  }));
  if (!created->transport_->takes_dispatch()) {  // otherwise it has memory of its own
    const int64_t row_bytes = largest_row(g, {settings.dispatch, settings.combine_backward});
    NVTE_EP_TRY(created->send_rows_.reserve(g.max_tokens_per_rank * row_bytes));
    NVTE_EP_TRY(created->recv_rows_.reserve(g.recv_capacity * row_bytes));
  }
  *handle = std::move(created);
  return Status();
}

int64_t handle_scratch_bytes(const GroupSettings& settings) {
  const int64_t row_bytes =
      largest_row(settings, {NVTE_EP_FORMAT_BF16, NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4});
  return (settings.max_tokens_per_rank + settings.recv_capacity) * row_bytes;
}

}  // namespace nvte_ep
