#include "transports/device_group.h"

#include <algorithm>
#include <map>
#include <utility>

namespace nvte_ep {

DeviceReport::~DeviceReport() {
  if (memory_ != nullptr) backend_->release_shared(memory_);
}

Status DeviceReport::allocate(Backend* backend) {
  void* shared = nullptr;
  NVTE_EP_TRY(backend->allocate_shared(sizeof(DeviceCounters) + sizeof(int64_t), &shared));
  backend_ = backend;
  memory_ = static_cast<int64_t*>(shared);
  std::fill_n(memory_, kDeviceCounters + 1, int64_t{0});
  return Status();
}

Finding DeviceReport::next_finding(const GroupSettings& settings, int32_t rank, int64_t handle_id) {
  const volatile int64_t* now = memory_;
  const DeviceCounters seen = seen_;
  seen_ = DeviceCounters{now[0], now[1], now[2], now[3], now[4], now[5]};
  const IndexFaults faults{seen_.out_of_range - seen.out_of_range, seen_.duplicates - seen.duplicates};
  if (faults.out_of_range + faults.duplicates > 0) {  // one at a time
    seen_.dropped_rows = seen.dropped_rows;
    seen_.missing_values = seen.missing_values;
    return bad_indices(faults, settings.num_experts, rank, handle_id);
  }
  const int64_t missing = seen_.missing_values - seen.missing_values;
  if (missing > 0) {
    seen_.dropped_rows = seen.dropped_rows;
    return missing_values(missing, static_cast<int32_t>(seen_.missing_rank), handle_id);
  }
  const int64_t dropped = seen_.dropped_rows - seen.dropped_rows;
  if (dropped > 0 && !settings.drop_on_overflow) {
    static_cast<volatile int64_t*>(memory_)[kDeviceCounters] = seen_.dropped_rows;
    return dropped_rows(dropped, seen_.needed_rows, settings.recv_capacity, rank, handle_id);
  }
  return Finding();
}

Status DeviceMember::begin_prepare(const HandleSettings& handle, nvte_ep_stream_t stream,
                                   bool* agreed) const {
  NVTE_EP_TRY(check_alive());
  bool capturing = false;
  NVTE_EP_TRY(backend->is_capturing(stream, &capturing));
  if (capturing && settings.eager())
    return bad_state("stream: an eager group cannot be captured, its prepare waits");
  if (*agreed) return Status();
  if (capturing) {
    return bad_state(
        "stream: a handle's first prepare checks the ranks' settings and waits: call it once before the "
        "capture");
  }
  NVTE_EP_TRY(ranks->agree("prepare",
                           {{"handle (the n-th of the group)", handle.id},
                            {"top_k", handle.top_k},
                            {"alignment", handle.alignment},
                            {"dispatch", handle.dispatch},
                            {"combine", handle.combine},
                            {"dispatch_backward", handle.dispatch_backward},
                            {"combine_backward", handle.combine_backward}},
                           stream));
  *agreed = true;
  return Status();
}

Status check_weights_given(bool wanted, bool given, int64_t tokens) {
  if (!wanted || given || tokens == 0) return Status();
  return invalid_argument(
      "topk_weights: expected on every rank because this one asks for recv_weights, got NULL");
}

Status check_gradients_given(const ReturnRows& call, int64_t slots) {
  if (!call.wants_scalars || call.slot_scalars != nullptr || slots == 0) return Status();
  return invalid_argument(
      "grad_recv_weights: expected on every rank because this one asks for grad_topk_weights, got NULL");
}

void DeviceMember::add(DeviceReport* report, int64_t handle_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reporters_.push_back(Reporter{report, handle_id});
}

void DeviceMember::remove(DeviceReport* report) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(reporters_.begin(), reporters_.end(),
                                  [report](const Reporter& r) { return r.report == report; });
  if (found == reporters_.end()) return;
  for (Finding last = next_of(*found); !last.status.ok(); last = next_of(*found)) left_.push_back(last);
  reporters_.erase(found);
}

Finding DeviceMember::next_finding() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!left_.empty()) {
    const Finding finding = left_.front();
    left_.pop_front();
    return finding;
  }
  for (const Reporter& r : reporters_) {
    const Finding finding = next_of(r);
    if (!finding.status.ok()) return finding;
  }
  return Finding();
}

Finding DeviceMember::next_of(const Reporter& r) const {
  return r.report->next_finding(settings, rank, r.handle_id);
}

namespace {

class DeviceGroup : public GroupTransport {
 public:
  DeviceGroup(const Capabilities& capabilities, std::shared_ptr<DeviceMember> member,
              MakeDeviceHandle make_handle)
      : capabilities_(capabilities), member_(std::move(member)), make_handle_(std::move(make_handle)) {}
  ~DeviceGroup() override {
    close();
    for (const auto& block : symmetric_) release(const_cast<uint8_t*>(block.first));
  }

  Capabilities capabilities() const override { return capabilities_; }

  Status create_handle(const HandleSettings& settings, std::unique_ptr<HandleTransport>* handle) override {
    return make_handle_(settings, handle);
  }

  Status mem_alloc(int64_t bytes, void** pointer) override {
    NVTE_EP_TRY(member_->check_alive());
    NVTE_EP_TRY(member_->ranks->agree("mem_alloc", {{"bytes", bytes}}, nullptr));
    void* block = nullptr;
    NVTE_EP_TRY(member_->ranks->allocate_symmetric(member_->backend, bytes, &block));
    symmetric_[static_cast<uint8_t*>(block)] = bytes;
    *pointer = block;
    return Status();
  }
  Status mem_free(void* pointer) override {
    const auto found = symmetric_.find(static_cast<uint8_t*>(pointer));
    if (found == symmetric_.end())
      return invalid_argument("pointer: expected one from mem_alloc of this group, got ", pointer);
    NVTE_EP_TRY(member_->ranks->agree("mem_free", {{"bytes", found->second}}, nullptr));
    release(pointer);
    symmetric_.erase(found);
    return Status();
  }
  bool is_symmetric(const void* pointer, int64_t bytes) const override {
    const uint8_t* p = static_cast<const uint8_t*>(pointer);
    auto it = symmetric_.upper_bound(p);
    if (it == symmetric_.begin()) return false;
    --it;
    return p + bytes <= it->first + it->second;
  }

  Finding poll() override {
    int32_t rank = -1;
    Status failed = member_->ranks->failure(&rank);
    if (failed.ok()) failed = member_->ranks->check_clock();
    return failed.ok() ? member_->next_finding() : fatal(failed, rank);
  }

  Status failure() const override { return member_->check_alive(); }

  void abort() override { member_->ranks->abort(text("rank ", member_->rank, " aborted the group")); }

  void close() override {
    if (closed_) return;
    closed_ = true;
    member_->ranks->close();
  }

 private:
  void release(void* memory) { member_->ranks->release_symmetric(member_->backend, memory); }

  const Capabilities capabilities_;
  const std::shared_ptr<DeviceMember> member_;
  const MakeDeviceHandle make_handle_;
  std::map<const uint8_t*, int64_t> symmetric_;
  bool closed_ = false;
};

}  // namespace

std::unique_ptr<GroupTransport> make_device_group(const Capabilities& capabilities,
                                                  std::shared_ptr<DeviceMember> member,
                                                  MakeDeviceHandle make_handle) {
  return std::make_unique<DeviceGroup>(capabilities, std::move(member), std::move(make_handle));
}

}  // namespace nvte_ep
