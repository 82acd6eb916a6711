// What a rank's member of a `peer` group is made of: the pools of all ranks and how they are divided, the meetings, and what
// launches need to know.
#ifndef NVTE_EP_TRANSPORTS_PEER_PEER_GROUP_H_
#define NVTE_EP_TRANSPORTS_PEER_PEER_GROUP_H_

#include <memory>
#include <string>
#include <vector>

#include "transports/device_buffer.h"
#include "transports/device_group.h"
#include "transports/peer/dispatch.h"
#include "transports/peer/peer_kernels.h"
#include "transports/peer/peer_memory.h"
#include "transports/peer/pools.h"

namespace nvte_ep {

// How every rank's pool is divided: the flags of the meetings, then areas with two copies each.
struct PoolLayout {
  Area indices, histograms, inbox;  // of prepare; peers write the last one
  Area outbox;  // rows of dispatch; partial rows of combine, in passes of tokens where they do not fit
  TravellingValues weights;    // with dispatch
  TravellingValues gradients;  // of weights, with dispatch_backward
  TravellingExponents exponents;
  int64_t bytes = 0;

  PoolLayout() = default;
  PoolLayout(const GroupSettings& settings, int32_t size);
};

class PeerGroup : public DeviceRanks {
 public:
  PeerGroup(const GroupSettings& settings, Backend* backend) : settings_(settings), backend_(backend) {}
  ~PeerGroup() override { close(); }
  Status open(Communicator* comm);

  Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) override {
    return memory_->agree(step, mine, stream);
  }
  Status failure(int32_t* rank) override { return memory_->failure(rank); }
  void abort(const std::string&) override { memory_->abort(); }
  void close() override {
    if (memory_ != nullptr) memory_->close();
  }

  // Waits for the stream; its meetings end by themselves.
  Status wait(nvte_ep_stream_t stream);

  const PoolLayout& layout() const { return layout_; }
  const Pools& pools() const { return pools_; }
  Meeting meeting(uint32_t call) const {
    Meeting meeting = meeting_;
    meeting.call = call;
    return meeting;
  }
  uint32_t* ticket() const { return words_.as<uint32_t>(); }
  // Runs function(launch context of the stream) on the group's device.
  template <typename Function>
  Status launch(nvte_ep_stream_t stream, const Function& function) const {
    return backend_->with_device([&] {
      LaunchContext context = context_;
      context.stream = stream;
      return function(context);
    });
  }

 private:
  const GroupSettings settings_;
  Backend* const backend_;
  std::unique_ptr<PeerMemory> memory_;
  PoolLayout layout_;
  LaunchContext context_;
  DeviceBuffer pointers_;
  DeviceBuffer words_;  // of launches: a ticket, whether a meeting has failed
  Pools pools_;
  Meeting meeting_{};
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PEER_GROUP_H_
