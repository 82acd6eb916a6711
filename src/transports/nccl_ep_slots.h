// One handle's rows over NCCL EP: from tokens to slots, and sums of slots back to tokens.
#ifndef NVTE_EP_TRANSPORTS_NCCL_EP_SLOTS_H_
#define NVTE_EP_TRANSPORTS_NCCL_EP_SLOTS_H_

#include <memory>

#include "transports/nccl_ep_low_latency.h"
#include "transports/nccl_ep_ranks.h"

namespace nvte_ep {

class NcclEpSlots : public SlotExchange {
 public:
  NcclEpSlots(NcclEpRanks* ranks, const HandleSettings& settings, const Route& route)
      : ranks_(ranks), settings_(settings), route_(route) {}
  ~NcclEpSlots() override;
  Status open();
  // The group ends before its handle.
  void orphan();

  Status prepare(int64_t tokens, int64_t slots, nvte_ep_stream_t stream) override;
  Status dispatch(const DispatchCall& call, const RoutingView& routing, nvte_ep_stream_t stream) override;
  Status return_rows(const ReturnRows& call, nvte_ep_stream_t stream) override;

 private:
  // A fixed group expects as many rows as it is made for; only slots in use are touched.
  int64_t claimed_slots() const {
    return ranks_->settings().eager() ? slots_ : max_slots(ranks_->settings());
  }
  IndexView slot_count() const { return IndexView{route_.totals, true}; }

  Status update(nvte_ep_stream_t stream);
  Status high_throughput(const DispatchCall& call, int32_t format, int64_t row_bytes,
                         const TensorView& received, nvte_ep_stream_t stream);
  Status rows_to_send(const DispatchCall& call, int32_t format, int64_t row_bytes, const void** rows,
                      nvte_ep_stream_t stream);
  Status exchange(const DispatchCall& call, const void* rows, void* slots, int64_t row_bytes,
                  nvte_ep_stream_t stream);
  Status spread(const void* rows, int64_t bytes, const TensorView& received, nvte_ep_stream_t stream);
  Status low_latency_combine(const ReturnRows& call, nvte_ep_stream_t stream);
  Status merge(const TensorView& slots, const float* weights, DType dtype, void* merged,
               nvte_ep_stream_t stream);
  Status combine(const void* from, void* to, DType dtype, int64_t columns, const ReturnRows* call,
                 nvte_ep_stream_t stream);
  Status add(const void* sums, const TensorView& result, bool accumulate, nvte_ep_stream_t stream);
  void close();

  NcclEpRanks* ranks_;
  const HandleSettings settings_;
  const Route route_;
  nccl_ep::Handle handle_ = nullptr;
  std::unique_ptr<NcclEpLowLatency> low_latency_;  // null where there is none
  bool updated_ = false;                           // handle_ knows the routing
  DeviceBuffer memory_;
  DeviceBuffer no_weights_, choice_values_;    // [max_tokens_per_rank, top_k]; the first is always zero
  DeviceBuffer no_slot_values_, slot_values_;  // [slots]
  int64_t tokens_ = 0;
  int64_t slots_ = 0;
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_NCCL_EP_SLOTS_H_
