// What the transports of device memory do differently: how items get from rank to rank. device_handle.cc does the rest.
#ifndef NVTE_EP_TRANSPORTS_DEVICE_EXCHANGE_H_
#define NVTE_EP_TRANSPORTS_DEVICE_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/transport.h"
#include "transports/device_group.h"

namespace nvte_ep {

// How many items go to each rank and come from each.
struct ItemCounts {
  std::vector<int64_t> send, receive;  // [ranks]
  static int64_t sum(const std::vector<int64_t>& v) {
    int64_t total = 0;
    for (int64_t n : v) total += n;
    return total;
  }
  int64_t sent() const { return sum(send); }
  int64_t received() const { return sum(receive); }
  ItemCounts back() const { return ItemCounts{receive, send}; }
};

// Items of this rank's tokens on their way to the other ranks, or on their way back.
struct Travel {
  const void* items = nullptr;
  int64_t item_bytes = 0;
  int64_t inbox_at = 0;  // bytes: where they arrive
  bool to_each = false;  // a block of items for each rank, one after the other; else the same ones for all
  int64_t tokens = 0;    // items of a block
  int64_t begin = 0, end = 0;  // those of each block that go now
  const ItemCounts* listed =
      nullptr;                // instead: items for rank 0, 1, ... one after the other, none for this rank
  const void* own = nullptr;  // what this rank has for itself, which does not travel
  int64_t own_stride = 0;     // bytes
};

// One handle's rows, for transports whose engine puts them straight into slots and sums slots straight into tokens.
class SlotExchange {
 public:
  virtual ~SlotExchange() = default;
  // After the routing is known: tokens of this rank, slots as RoutingView has them.
  virtual Status prepare(int64_t tokens, int64_t slots, nvte_ep_stream_t stream) = 0;
  virtual Status dispatch(const DispatchCall& call, const RoutingView& routing, nvte_ep_stream_t stream) = 0;
  virtual Status return_rows(const ReturnRows& call, nvte_ep_stream_t stream) = 0;
};

// Ranks that gather everybody's indices, each to build its part of the routing. Steps of a group follow each other on its
// stream, on all ranks alike. Nothing waits on the host but agree and wait.
class RoutingRanks : public DeviceRanks {
 public:
  // All-gather of a few bytes a rank, in rank order.
  virtual Status gather(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream) = 0;
  // Waits for the stream, the time-out at most.
  virtual Status wait(const char* step, nvte_ep_stream_t stream) = 0;
  // What moves a handle's rows, for ranks that are no DeviceExchange. route: what every prepare fills.
  virtual Status open_slots(const HandleSettings&, const Route& /*route*/, std::unique_ptr<SlotExchange>*) {
    return Status();
  }
  // For them: in which numbering of the experts they want kept indices, Route::kept_experts.
  virtual int32_t kept_experts() const { return 0; }
};

// Ranks that exchange items: rows or values of tokens, as a step lists them.
class DeviceExchange : public RoutingRanks {
 public:
  // Whether the exchange of each step moves listed items only (counts known to the host), or every token's.
  virtual bool exact_counts() const = 0;

  // Memory for the items of the next step; what is enqueued after the call may write it. bytes: at least, eager groups only.
  virtual Status outbox(int64_t bytes, void** memory, nvte_ep_stream_t stream) = 0;

  // In how many pieces so many bytes for each rank best travel, so that what has come can be worked on meanwhile. At most
  // kMaxPieces; 0 where there is no other rank.
  static constexpr int32_t kMaxPieces = 2;
  virtual int32_t pieces(int64_t bytes) const = 0;
  // Sends travels off, all in one go as a step's piece-th: after what the stream holds, but not before what it gets next.
  virtual Status begin(const std::vector<Travel>& travels, int32_t piece, nvte_ep_stream_t stream) = 0;
  // What is enqueued from now on comes after the arrival of a piece. Every piece is awaited.
  virtual Status await(int32_t piece, nvte_ep_stream_t stream) = 0;
  // Where a travel arrives: rank r's items at row(r, token), or where they are listed at row(r, i), counted through all ranks;
  // this rank's own where they are.
  virtual RankArrays arrivals(const Travel& travel) const = 0;
};

// The group of a device transport over its exchange, or over ranks whose open_slots moves the rows. name as in
// nvte_ep_group_info.
std::unique_ptr<GroupTransport> make_device_group(const char* name, const GroupSettings& settings,
                                                  Backend* backend, int32_t rank, int32_t size,
                                                  std::unique_ptr<DeviceExchange> exchange);
std::unique_ptr<GroupTransport> make_slot_group(const char* name, const GroupSettings& settings,
                                                Backend* backend, int32_t rank, int32_t size,
                                                std::unique_ptr<RoutingRanks> ranks);
// What ranks must agree on to form a group.
std::vector<Agreed> group_agreement(const GroupSettings& settings);
// Bytes of the outbox that the largest step of a group of fixed capacity fills.
int64_t outbox_bytes(const GroupSettings& settings, int32_t size);
int64_t device_handle_bytes(const GroupSettings& settings, int32_t size);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_DEVICE_EXCHANGE_H_
