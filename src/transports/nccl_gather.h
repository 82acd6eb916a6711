// What the ranks of an NCCL communicator tell each other's hosts, while a group is created for example. Every call is
// collective and waits.
#ifndef NVTE_EP_TRANSPORTS_NCCL_GATHER_H_
#define NVTE_EP_TRANSPORTS_NCCL_GATHER_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "core/backend.h"
#include "transports/agreement.h"
#include "transports/nccl_api.h"

namespace nvte_ep {

class NcclGather {
 public:
  // Waits until the stream is idle, for a bounded time: NCCL itself waits for ever. After a failure the communicator is not
  // used any more.
  using Wait = std::function<Status(const char* step, nvte_ep_stream_t stream)>;
  // Enqueues an all-gather of device memory, bytes a rank.
  using Enqueue = std::function<Status(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream)>;
  NcclGather(Backend* backend, int32_t size, Enqueue enqueue, Wait wait)
      : backend_(backend), size_(size), enqueue_(std::move(enqueue)), wait_(std::move(wait)) {}

  // What travels of a rank: its bytes, then a word that is not zero. Memory is zero before, so it shows who has come.
  using Mark = int64_t;
  static bool has_come(const uint8_t* of_rank, int64_t bytes);

  // all [size, bytes]: every rank's bytes, in the order of the ranks.
  Status gather(const char* step, const void* mine, int64_t bytes, void* all, nvte_ep_stream_t stream) const;

  // INVALID_ARGUMENT on every rank where the ranks' values differ.
  Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) const;

  // OK where every rank is; else the first failure, on every rank, with the rank that has it.
  Status settle(const char* step, const Status& mine, nvte_ep_stream_t stream) const;

 private:
  Backend* const backend_;
  const int32_t size_;
  const Enqueue enqueue_;
  const Wait wait_;
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_NCCL_GATHER_H_
