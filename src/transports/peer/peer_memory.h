// Memory that the ranks of a group load and store directly: one pool a rank, which every rank's device can address.
// Implementations: threads of one process (thread_memory.h), and processes (process_memory.h).
#ifndef NVTE_EP_TRANSPORTS_PEER_PEER_MEMORY_H_
#define NVTE_EP_TRANSPORTS_PEER_PEER_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/transport.h"
#include "transports/device_buffer.h"
#include "transports/device_exchange.h"

namespace nvte_ep {

// What a device tells its host when a meeting fails; written once.
struct MeetingReport {
  int32_t status;  // nvte_ep_status_t; 0: nothing
  int32_t rank;    // the one that did not come, or that ended the group
};

class PeerMemory {
 public:
  PeerMemory(const GroupSettings& settings, Backend* backend, int32_t rank, int32_t size);
  virtual ~PeerMemory();  // after close
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  // [size] every rank's pool (as many bytes on every rank, zero at first) as this rank's device addresses it.
  const std::vector<uint8_t*>& pools() const { return pools_; }
  uint8_t* own_pool() const { return pools_[static_cast<size_t>(rank_)]; }

  // What this rank's meetings look at while they wait: rank + 1 of the one that ended the group, 0: nobody. Readable by the
  // device.
  const int32_t* ended() const { return ended_[static_cast<size_t>(rank_)]; }
  // [size] in device memory: the words of all ranks. A meeting that gives up tells them whom it has waited for.
  int32_t* const* ended_words() const { return ended_words_.as<int32_t*>(); }
  // Where they report a failure; memory of the host.
  MeetingReport* report() const { return report_; }

  // Every rank's values to every rank's host; INVALID_ARGUMENT on all of them where they differ. Waits, the group's time-out
  // at most.
  virtual Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) = 0;

  // What ended the group as far as this host knows (a failed meeting, a rank that ended it or left), or OK; *rank is the one
  // that caused it, -1 unknown. Never blocks; any thread.
  Status failure(int32_t* rank);
  // Ends the group for every rank: waits return, in flight and later ones. Never blocks; any thread.
  virtual void abort() = 0;
  // Nobody reads this rank's pool after it. Waits for all ranks unless the group has failed; then for this rank's work only.
  virtual void close() = 0;

 protected:
  virtual Status host_failure(int32_t* rank) const = 0;  // without the meetings
  // The peers learn that the group has ended because of this rank. Never blocks.
  virtual void tell(int32_t rank) = 0;

  const GroupSettings settings_;
  Backend* const backend_;
  std::vector<uint8_t*> pools_;
  std::vector<int32_t*> ended_;  // [size]

 private:
  friend Status open_peer_memory(Communicator* comm, const GroupSettings& settings, Backend* backend,
                                 int64_t bytes_per_rank, std::unique_ptr<PeerMemory>* memory);
  virtual Status open(int64_t bytes) = 0;  // fills pools_ and ended_

  const int32_t rank_;
  const int32_t size_;
  MeetingReport* report_ = nullptr;
  DeviceBuffer ended_words_;
  std::atomic<bool> told_{false};
};

// OK, or UNSUPPORTED with the reason. The same on every rank.
Status probe_peer_memory(const Communicator& comm, const GroupSettings& settings);
// Collective; checks that the ranks agree on the group's settings.
Status open_peer_memory(Communicator* comm, const GroupSettings& settings, Backend* backend,
                        int64_t bytes_per_rank, std::unique_ptr<PeerMemory>* memory);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PEER_MEMORY_H_
