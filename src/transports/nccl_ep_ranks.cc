#include "transports/nccl_ep_ranks.h"

#include <cstdlib>
#include <mutex>
#include <numeric>
#include <optional>

#include "transports/nccl.h"
#include "transports/nccl_ep_low_latency.h"
#include "transports/nccl_ep_slots.h"

namespace nvte_ep {

using nccl::check;

namespace {

// Multiprocessors of the exchange itself, which NCCL EP's config sets together with those of its local kernels. On an H200
// dispatch is fastest with 24, combine with 96; this is the best for both together. The local kernels keep all of them.
constexpr const char* kExchangeSmsDefault = "32";

// Chooses it for the groups that are created while an object of this class lives, unless the environment does. Several threads
// may create groups at a time, and have to where they are the ranks of one.
class ExchangeSms {
 public:
  ExchangeSms() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (users_++ > 0) return;
    chosen_ = std::getenv(kExchangeSms) == nullptr;
    if (chosen_) setenv(kExchangeSms, kExchangeSmsDefault, 1);
  }
  ~ExchangeSms() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--users_ == 0 && chosen_) unsetenv(kExchangeSms);
  }
  ExchangeSms(const ExchangeSms&) = delete;
  ExchangeSms& operator=(const ExchangeSms&) = delete;

  static const char* of_user() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return users_ > 0 && chosen_ ? nullptr : std::getenv(kExchangeSms);
  }

 private:
  inline static std::mutex mutex_;
  inline static int users_ = 0;
  inline static bool chosen_ = false;
};

}  // namespace

const char* exchange_sms_of_user() { return ExchangeSms::of_user(); }

NcclEpRanks::~NcclEpRanks() {
  close();
  if (low_latency_differs_ != nullptr) backend_->release_shared(low_latency_differs_);
}

Status NcclEpRanks::open(NcclCommunicator* base) {
  const bool low_latency = low_latency_fits(settings_, ranks_.size());
  NVTE_EP_TRY(
      ranks_.open(base, settings_, NVTE_EP_TRANSPORT_NCCL_EP,
                  {{"num_sms", settings_.num_sms},
                   {"low-latency mode (NVTE_EP_NCCL_EP_LOW_LATENCY, NCCL_EP_COMM_SMS)", low_latency}}));
  // What a rank needs of its own comes before what it does with the others: where one rank lacks it, none waits for it. Where it has no
  // NCCL EP, AUTO goes on to the next transport.
  NVTE_EP_TRY(ranks_.settle("group_create", reserve(low_latency), nullptr));
  NVTE_EP_TRY(backend_->with_device([&] { return create_group(); }));
  if (low_latency) NVTE_EP_TRY(open_low_latency());
  if (!settings_.zero_copy) return Status();
  agreed_places_.insert({num_blocks_, 0});  // the same on every rank by construction
  return allocate_symmetric(backend_, settings_.recv_capacity * token_bytes(settings_),
                            &symmetric_slot_rows_);
}

Status NcclEpRanks::reserve(bool low_latency) {
  NVTE_EP_TRY(nccl_ep::load(&api_));
  NVTE_EP_TRY(backend_->preload());
  const int64_t tokens = settings_.max_tokens_per_rank;
  std::vector<SlotAddress> identity(static_cast<size_t>(tokens));
  std::iota(identity.begin(), identity.end(), SlotAddress{0});
  NVTE_EP_TRY(identity_.reserve(backend_, tokens * 8));
  NVTE_EP_TRY(backend_->upload(identity_.as<void>(), identity.data(), tokens * 8, nullptr));
  NVTE_EP_TRY(token_rows_.reserve(backend_, tokens * token_bytes(settings_)));
  if (!settings_.zero_copy)
    NVTE_EP_TRY(slot_rows_.reserve(backend_, settings_.recv_capacity * token_bytes(settings_)));
  if (!low_latency) return Status();
  void* shared = nullptr;
  NVTE_EP_TRY(backend_->allocate_shared(sizeof(int32_t), &shared));
  low_latency_differs_ = static_cast<int32_t*>(shared);
  *low_latency_differs_ = 0;
  const int64_t row_bytes = low_latency_row_bytes(token_bytes(settings_), settings_.max_top_k);
  NVTE_EP_TRY(low_latency_send_rows_.reserve(backend_, max_tokens(settings_) * row_bytes));
  // Every expert may get all tokens of all ranks.
  return low_latency_rows_.reserve(
      backend_, int64_t{kept_experts()} * ranks_.size() * max_tokens(settings_) * row_bytes);
}

Status NcclEpRanks::create_group() {
  nccl_ep::GroupConfig config;
  config.algorithm = nccl_ep::kHighThroughput;
  config.num_experts = static_cast<unsigned>(kept_experts() * ranks_.size());
  config.max_dispatch_tokens_per_rank = static_cast<unsigned>(max_tokens(settings_));
  config.max_recv_tokens_per_rank = settings_.eager() ? 0 : static_cast<unsigned>(max_slots(settings_));
  config.max_token_bytes = static_cast<unsigned>(token_bytes(settings_));
  config.num_topk = static_cast<unsigned>(settings_.max_top_k);
  config.max_num_sms = static_cast<unsigned>(settings_.num_sms);
  config.zero_copy = settings_.zero_copy ? nccl_ep::kZeroCopyOn : nccl_ep::kZeroCopyAuto;
  std::optional<ExchangeSms> sms;
  if (settings_.num_sms == 0) sms.emplace();
  return check(ranks_.api(), api_->ncclEpCreateGroup(&group_, ranks_.comm(), &config), "ncclEpCreateGroup",
               ranks_.comm());
}

Status NcclEpRanks::open_low_latency() {
  const int64_t row_bytes = low_latency_row_bytes(token_bytes(settings_), settings_.max_top_k);
  nccl_ep::GroupConfig config;
  config.algorithm = nccl_ep::kLowLatency;
  config.num_experts = static_cast<unsigned>(kept_experts() * ranks_.size());
  config.max_dispatch_tokens_per_rank = static_cast<unsigned>(max_tokens(settings_));
  config.max_token_bytes = static_cast<unsigned>(row_bytes);
  config.num_topk = static_cast<unsigned>(settings_.max_top_k);
  config.max_num_sms = static_cast<unsigned>(settings_.num_sms);
  // Its kernels end when a peer does not come in time; without this they would trap.
  config.enable_mask = 1;
  config.timeout_ns = static_cast<uint64_t>(settings_.timeout_ns);
  return backend_->with_device([&] {
    return check(ranks_.api(), api_->ncclEpCreateGroup(&low_latency_group_, ranks_.comm(), &config),
                 "ncclEpCreateGroup (low latency)", ranks_.comm());
  });
}

Status NcclEpRanks::failure(int32_t* rank) {
  *rank = -1;
  NVTE_EP_TRY(ranks_.failure());
  if (low_latency_group_ == nullptr) return Status();
  // In this order: rows of a peer that did not come in time are missing, too, and the device says so after that.
  const bool differs = *static_cast<volatile int32_t*>(low_latency_differs_) != 0;
  int late = 0;
  (void)api_->ncclEpGetAsyncError(low_latency_group_, &late);
  if (late != 0) {
    return ranks_.fail(NVTE_EP_STATUS_TIMEOUT,
                       text("a peer did not arrive within ", static_cast<double>(settings_.timeout_ns) * 1e-9,
                            " s (NCCL EP does not tell which)"));
  }
  if (!differs) return Status();
  // Its dispatch kernel tells its other warps that all counts have come before it writes down the last one (NCCL EP 0.2.0): seen
  // under compute-sanitizer, which makes that write slow, and nowhere else.
  return ranks_.fail(
      NVTE_EP_STATUS_TRANSPORT,
      "NCCL EP's low-latency dispatch handed out other rows than were sent: what was received may be wrong; "
      "NVTE_EP_NCCL_EP_LOW_LATENCY=0 does without this mode",
      /*lost_peer=*/false);
}

void NcclEpRanks::close() {
  for (NcclEpSlots* handle : std::exchange(handles_, {})) handle->orphan();
  const nccl_ep::Group groups[] = {std::exchange(low_latency_group_, nullptr),
                                   std::exchange(group_, nullptr)};
  // Waits for the device, and so for ever where a kernel waits for a peer that is gone.
  if (ranks_.failure().ok()) {
    (void)backend_->with_device([&] {
      for (const nccl_ep::Group group : groups) {
        if (group != nullptr) (void)api_->ncclEpGroupDestroy(group);
      }
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
    status = ranks_.use([&](nccl::Comm comm) {
      return check(
          nccl,
          nccl.ncclCommWindowRegister(comm, fresh, size, &block.window, nccl::kWindowCollectiveSymmetric),
          "ncclCommWindowRegister", comm);
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

Status NcclEpRanks::agree_on_sums(const ReturnRows& call, bool low_latency, bool rounds_twice,
                                  nvte_ep_stream_t stream) {
  if (ranks_.size() == 1) return Status();
  const std::array<int64_t, 3> way{static_cast<int64_t>(call.slots.dtype), rounds_twice, low_latency};
  std::set<std::array<int64_t, 3>>& known = agreed_sums_[call.backward];
  if (known.count(way) != 0) return Status();
  bool capturing = false;
  NVTE_EP_TRY(backend_->is_capturing(stream, &capturing));
  if (capturing) return Status();
  NVTE_EP_TRY(ranks_.agree(call.backward ? "dispatch_backward" : "combine",
                           {{"type of what is summed", way[0]},
                            {"accumulate", way[1]},
                            {"low-latency mode (not with slot_weights and accumulate)", way[2]}},
                           stream));
  known.insert(way);
  return Status();
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

}  // namespace nvte_ep
