// NCCL EP's low-latency mode, for small batches: it needs no preparation of its own, but hands out rows expert by expert in
// the order in which they come. So every row carries whose it is (core/backend.h, TagRows) and its token's weights; slots
// gather their rows by that, and combine puts them back to where they came.
//
// What it costs beside NCCL EP itself: a trailer of 16 + 4 * top_k bytes a row, three small kernels in dispatch, one in
// combine, and memory for every token of every rank at every expert.
#ifndef NVTE_EP_TRANSPORTS_NCCL_EP_LOW_LATENCY_H_
#define NVTE_EP_TRANSPORTS_NCCL_EP_LOW_LATENCY_H_

#include "transports/nccl_ep_ranks.h"

namespace nvte_ep {

// Whether groups that fit work in this mode: the environment variable NVTE_EP_NCCL_EP_LOW_LATENCY, 0 or 1.
bool low_latency_wanted();
// Whether a group of these settings does.
bool low_latency_fits(const GroupSettings& settings, int32_t size);
// A row with its trailer.
int64_t low_latency_row_bytes(int64_t row_bytes, int32_t top_k);

// One handle's steps.
class NcclEpLowLatency {
 public:
  NcclEpLowLatency(NcclEpRanks* ranks, const HandleSettings& settings, const Route& route)
      : ranks_(ranks), settings_(settings), route_(route) {}
  Status open();
  void close();

  Status prepare(int64_t tokens, nvte_ep_stream_t stream);
  // Rows of the wire format to received [slots, row_bytes], and the weights to call.recv_weights.
  Status dispatch(const DispatchCall& call, int32_t format, const TensorView& received, int64_t slots,
                  nvte_ep_stream_t stream);
  // Sums go back the way that the rows of the last dispatch came, so there must have been one for this routing. The
  // gradients of weights do not travel in this mode.
  bool can_combine(const ReturnRows& call) const;
  // Plain sums of slots [slots, hidden] to sums [tokens, hidden].
  Status combine(const TensorView& slots, void* sums, nvte_ep_stream_t stream);

 private:
  int64_t rows_per_expert() const;

  NcclEpRanks* const ranks_;
  const HandleSettings settings_;
  const Route route_;
  nccl_ep::Handle handle_ = nullptr;
  DeviceBuffer memory_;
  DeviceBuffer counts_;  // [local experts] rows that came
  DeviceBuffer place_;   // [slots] where a slot's row came to
  DeviceBuffer ones_;    // [max_tokens_per_rank, top_k]: the sums are plain
  int64_t tokens_ = 0;
  bool dispatched_ = false;  // since the last prepare
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_NCCL_EP_LOW_LATENCY_H_
