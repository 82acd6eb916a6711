// One rank of a group of `nccl_ep`: NCCL EP's groups, symmetric memory, and what the handles share.
#ifndef NVTE_EP_TRANSPORTS_NCCL_EP_RANKS_H_
#define NVTE_EP_TRANSPORTS_NCCL_EP_RANKS_H_

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transports/device_buffer.h"
#include "transports/device_exchange.h"
#include "transports/nccl_ep_arrays.h"
#include "transports/nccl_group_comm.h"

namespace nvte_ep {

class NcclEpSlots;

// NCCL EP's own variable for the multiprocessors of its exchange, which wins over what a group says; and what the user has set
// there, or null.
constexpr const char* kExchangeSms = "NCCL_EP_COMM_SMS";
const char* exchange_sms_of_user();

// One rank of the group, and what its handles share. Steps follow each other on the group's stream, so one set of buffers
// for rows that cannot be handed over as they are will do.
class NcclEpRanks : public RoutingRanks {
 public:
  NcclEpRanks(const nccl::Api& api, const GroupSettings& settings, Backend* backend, int32_t rank,
              int32_t size)
      : settings_(settings),
        backend_(backend),
        ranks_(api, backend, rank, size, settings.timeout_ns, false) {}
  ~NcclEpRanks() override;

  Status open(NcclCommunicator* base);

  Status gather(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream) override {
    return ranks_.watch().step(stream, [&] { return ranks_.gather(mine, all, bytes, stream); });
  }
  Status open_slots(const HandleSettings& settings, const Route& route,
                    std::unique_ptr<SlotExchange>* slots) override;
  int32_t kept_experts() const override { return padded_local_experts(settings_, ranks_.size()); }
  Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) override {
    return ranks_.agree(step, mine, stream);
  }
  Status wait(const char* step, nvte_ep_stream_t stream) override { return ranks_.wait(step, stream); }
  Status failure(int32_t* rank) override;
  Status check_clock() override { return ranks_.check_watch(); }
  void abort(const std::string& message) override { ranks_.abort(message); }
  void close() override;

  Status allocate_symmetric(Backend* backend, int64_t bytes, void** memory) override;
  void release_symmetric(Backend* backend, void* memory) override;
  // The window that holds memory which zero_copy names. Its place must be the same on every rank: a place that has not been
  // seen yet is compared, which waits.
  Status bind(nccl_ep::Tensor* tensor, nvte_ep_stream_t stream);

  // Ranks that sum in unlike ways make unlike calls of NCCL EP, whose kernels then wait for ever. A way that the group has not
  // gone yet is compared, which waits; not in a capture.
  Status agree_on_sums(const ReturnRows& call, bool low_latency, bool rounds_twice, nvte_ep_stream_t stream);

  // Enqueues calls of NCCL EP as one step.
  template <typename Function>
  Status step(const char* name, nvte_ep_stream_t stream, const Function& call) {
    return ranks_.watch().step(stream, [&] {
      return ranks_.use([&](nccl::Comm comm) { return nccl::check(ranks_.api(), call(), name, comm); });
    });
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
  // For small batches there is a second group, in low-latency mode; null where there is none.
  nccl_ep::Group low_latency_group() const { return low_latency_group_; }
  void* low_latency_send_rows() const { return low_latency_send_rows_.as<void>(); }
  void* low_latency_rows() const { return low_latency_rows_.as<void>(); }
  // For the device to say that other rows came than were sent.
  int32_t* low_latency_differs() const { return low_latency_differs_; }
  const SlotAddress* identity() const { return identity_.as<SlotAddress>(); }
  void forget(NcclEpSlots* handle) { handles_.erase(std::find(handles_.begin(), handles_.end(), handle)); }
  int32_t rank() const { return ranks_.rank(); }
  bool is_stuck() { return ranks_.is_stuck(); }

 private:
  struct Block {
    int64_t number;  // the n-th allocation
    int64_t bytes;
    nccl::Window window;
  };

  Status reserve(bool low_latency);
  Status create_group();
  Status open_low_latency();

  const nccl_ep::Api* api_ = nullptr;
  const GroupSettings settings_;
  Backend* const backend_;
  NcclGroupComm ranks_;
  nccl_ep::Group group_ = nullptr;
  nccl_ep::Group low_latency_group_ = nullptr;
  DeviceBuffer low_latency_send_rows_;  // [max_tokens] of low_latency_row_bytes
  DeviceBuffer low_latency_rows_;       // [local experts, ranks, max_tokens] of the same
  int32_t* low_latency_differs_ = nullptr;
  std::vector<NcclEpSlots*> handles_;
  DeviceBuffer identity_;                   // [max_tokens_per_rank]: token t is item t
  DeviceBuffer token_rows_, slot_rows_;     // of token_bytes
  void* symmetric_slot_rows_ = nullptr;     // in place of slot_rows_ where there is zero_copy
  std::map<const uint8_t*, Block> blocks_;  // symmetric memory
  int64_t num_blocks_ = 0;
  std::set<std::pair<int64_t, int64_t>> agreed_places_;  // number of the block, offset
  std::set<std::array<int64_t, 3>> agreed_sums_[2];      // of combine and of dispatch backward
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_NCCL_EP_RANKS_H_
