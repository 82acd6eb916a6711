// What the transports of device memory do differently: how items get from rank to rank. device_handle.h does the rest.
#ifndef NVTE_EP_TRANSPORTS_DEVICE_EXCHANGE_H_
#define NVTE_EP_TRANSPORTS_DEVICE_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/transport.h"

namespace nvte_ep {

// A value on which the ranks must agree.
struct Agreed {
  const char* name;
  int64_t value;
};

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

// One handle's rows, for transports whose engine puts them straight into slots and sums slots straight into tokens.
class SlotExchange {
 public:
  virtual ~SlotExchange() = default;
  // After the routing is known: tokens of this rank, slots as RoutingView has them.
  virtual Status prepare(int64_t tokens, int64_t slots, nvte_ep_stream_t stream) = 0;
  virtual Status send_rows(const SendRows& call, nvte_ep_stream_t stream) = 0;
  virtual Status return_rows(const ReturnRows& call, nvte_ep_stream_t stream) = 0;
};

// One rank of a group of device transport. Steps of a group follow each other on its stream, on all ranks alike. Nothing waits
// on the host but agree and wait.
class DeviceRanks {
 public:
  virtual ~DeviceRanks() = default;

  // All-gather of a few bytes a rank, in rank order.
  virtual Status gather(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream) = 0;

  // What moves a handle's rows, for transports that are not a DeviceExchange. route: filled by every prepare.
  virtual Status open_slots(const HandleSettings&, const Route& /*route*/, std::unique_ptr<SlotExchange>*) {
    return Status();
  }

  // Every rank's values to every rank's host; INVALID_ARGUMENT on all of them where they differ. Waits.
  virtual Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) = 0;
  // Waits for the stream, the time-out at most.
  virtual Status wait(const char* step, nvte_ep_stream_t stream) = 0;

  // The failure that ended the group, or OK; *rank is the one that caused it, -1 unknown. Never blocks.
  virtual Status failure(int32_t* rank) = 0;
  // The same, and TIMEOUT where kernels that cannot be timed are on the device for too long.
  virtual Status check_clock() { return Status(); }
  virtual void abort(const std::string& message) = 0;
  virtual void close() = 0;
};

// Ranks that exchange items: rows or values of tokens, as a step lists them.
class DeviceExchange : public DeviceRanks {
 public:
  // Whether the exchange of each step moves listed items only (counts known to the host), or every token's.
  virtual bool exact_counts() const = 0;

  // Memory for the items of the next step; what is enqueued after the call may write it. bytes: at least, eager groups only.
  virtual Status outbox(int64_t bytes, void** memory, nvte_ep_stream_t stream) = 0;

  // items (in the outbox, or the caller's own memory where may_read_elsewhere) [tokens] of item_bytes, to be read by every
  // rank; *received: rank r's items at row(r, token). With counts: the items for rank 0, 1, ... one after the other, and
  // received counts them through.
  virtual Status share(const void* items, int64_t tokens, int64_t item_bytes, const ItemCounts* counts,
                       RankArrays* received, nvte_ep_stream_t stream) = 0;
  virtual bool may_read_elsewhere() const = 0;

  // The way back: items [ranks, tokens] in the outbox, block r for rank r; *received: rank r's block for this rank at
  // row(r, token). With counts as share.
  virtual Status give_back(const void* items, int64_t tokens, int64_t item_bytes, const ItemCounts* counts,
                           RankArrays* received, nvte_ep_stream_t stream) = 0;
};

// The group of a device transport over its exchange, or over ranks whose open_slots moves the rows. name as in
// nvte_ep_group_info.
std::unique_ptr<GroupTransport> make_device_group(const char* name, const GroupSettings& settings,
                                                  Backend* backend, int32_t rank, int32_t size,
                                                  std::unique_ptr<DeviceExchange> exchange);
std::unique_ptr<GroupTransport> make_slot_group(const char* name, const GroupSettings& settings,
                                                Backend* backend, int32_t rank, int32_t size,
                                                std::unique_ptr<DeviceRanks> ranks);
// What ranks must agree on to form a group. transport is NVTE_EP_TRANSPORT_*: AUTO may have chosen differently.
std::vector<Agreed> group_agreement(const GroupSettings& settings, int32_t transport);
// Bytes of the outbox that the largest step of a group of fixed capacity fills.
int64_t outbox_bytes(const GroupSettings& settings, int32_t size);
int64_t device_handle_bytes(const GroupSettings& settings, int32_t size);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_DEVICE_EXCHANGE_H_
