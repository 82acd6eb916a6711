#include "transports/peer/process_memory.h"

#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transports/peer/cuda_status.h"
#include "transports/peer/mailboxes.h"
#include "transports/peer/process_pools.h"

namespace nvte_ep {
namespace {

using Clock = std::chrono::steady_clock;

enum class Way : int64_t { kAuto, kWindows, kIpc };

Status configured_way(Way* way) {
  const char* value = std::getenv("NVTE_EP_PEER_MEMORY");
  const std::string name = value == nullptr ? "" : value;
  *way = name == "windows" ? Way::kWindows : name == "ipc" ? Way::kIpc : Way::kAuto;
  if (*way != Way::kAuto || name.empty() || name == "auto") return Status();
  return invalid_argument("NVTE_EP_PEER_MEMORY: expected auto, windows or ipc, got ", name);
}

// Calls of CUDA that wait for nothing, also while some stream of this thread is recording a graph.
class NotCaptured {
 public:
  NotCaptured() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~NotCaptured() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  NotCaptured(const NotCaptured&) = delete;
  NotCaptured& operator=(const NotCaptured&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class ProcessMemory : public PeerMemory {
 public:
  ProcessMemory(NcclCommunicator* comm, const GroupSettings& settings, Backend* backend)
      : PeerMemory(settings, backend, comm->rank(), comm->size()),
        comm_(comm),
        gather_(
            backend, comm->size(),
            [this](const void* mine, void* all, int64_t size, nvte_ep_stream_t stream) {
              return enqueue_gather(mine, all, size, stream);
            },
            [this](const char* step, nvte_ep_stream_t stream) { return wait_for_nccl(step, stream); }) {}
  ~ProcessMemory() override { close(); }

  Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t) override {
    int32_t ignored;
    NVTE_EP_TRY(failure(&ignored));
    std::vector<AgreedValues> all;
    NVTE_EP_TRY(mailboxes_.exchange(
        agreed_values(step, mine), settings_.timeout_ns, [&] { return failure(&ignored); },
        [&](const std::vector<int32_t>& missing) { return fail(late_at(step, missing), missing.front()); },
        &all));
    return check_agreement(mine, all);
  }

  void abort() override {
    (void)fail(Status(NVTE_EP_STATUS_PEER_FAILED, text("rank ", rank(), " aborted the group")), rank());
  }

  void close() override {
    if (closing_.exchange(true)) return;
    // The work of this rank ends by itself: its meetings are bounded, and do not wait after a failure.
    const bool orderly =
        pools_way_ != nullptr && backend_->synchronize().ok() && agree("group_destroy", {}, nullptr).ok();
    int32_t late;
    // Peers in another step would wait for this rank until their time is up.
    if (pools_way_ != nullptr && !orderly && failure(&late).ok())
      (void)fail(Status(NVTE_EP_STATUS_PEER_FAILED, text("rank ", rank(), " left the group")), rank());
    if (failure(&late).code() == NVTE_EP_STATUS_TIMEOUT) comm_->expect_lost_peer();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    (void)backend_->with_device([&] {
      return stream_ == nullptr ? Status()
                                : peer_cuda_status(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    });
    if (pools_way_ != nullptr) pools_way_->close(ranks(), orderly);
    (void)backend_->with_device([&] {
      if (stream_ != nullptr) (void)cudaStreamDestroy(std::exchange(stream_, nullptr));
      return Status();
    });
    if (words_ != nullptr) backend_->release_shared(std::exchange(words_, nullptr));
  }

 private:
  // Words of the host that are copied to and from devices.
  struct Words {
    int32_t ended;         // what this rank's word held a moment ago
    int32_t new_ended[2];  // what abort and a late peer put there: [0] a peer, [1] this rank
  };

  ProcessRanks ranks() { return ProcessRanks{comm_, backend_, &gather_, stream_}; }

  Status open(int64_t bytes) override {
    NVTE_EP_TRY(comm_->check_usable(settings_.device));
    NVTE_EP_TRY(backend_->with_device([&]() -> Status {
      // Ahead of the kernels of this process, and on no queue with them.
      int least = 0;
      int greatest = 0;
      NVTE_EP_TRY(peer_cuda_status(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                                   "cudaDeviceGetStreamPriorityRange"));
      return peer_cuda_status(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
                              "cudaStreamCreateWithPriority");
    }));
    void* words = nullptr;
    NVTE_EP_TRY(backend_->allocate_shared(sizeof(Words), &words));
    words_ = static_cast<Words*>(words);

    Way way;
    NVTE_EP_TRY(configured_way(&way));
    std::vector<Agreed> agreed = group_agreement(settings_);
    agreed.push_back({"NVTE_EP_PEER_MEMORY", static_cast<int64_t>(way)});
    NVTE_EP_TRY(gather_.agree("group_create", agreed, stream_));
    NVTE_EP_TRY(comm_->meet_apart(backend_));  // every rank has come

    // The pool, then a page with the word, then the mailboxes.
    constexpr int64_t kPage = 4096;
    const int64_t word_offset = round_up(bytes, kPage);
    const int64_t mail_offset = word_offset + kPage;
    const int64_t total = round_up(mail_offset + Mailboxes::bytes(size()), int64_t{2} << 20);
    NVTE_EP_TRY(open_pools(way, total));
    std::vector<uint8_t*> boxes;
    for (uint8_t* pool : pools_) {
      ended_.push_back(reinterpret_cast<int32_t*>(pool + word_offset));
      boxes.push_back(pool + mail_offset);
    }
    return mailboxes_.open(backend_, rank(), std::move(boxes), stream_);
  }

  Status open_pools(Way way, int64_t bytes) {
    Status windows = unsupported("not asked for");
    if (way != Way::kIpc) {
      windows = probe_window_pools(*comm_);
      if (windows.ok()) windows = open_pools(make_window_pools(), bytes);
      // Another failure than of the means may be this rank's alone.
      const bool can_go_on =
          windows.code() == NVTE_EP_STATUS_UNSUPPORTED || windows.code() == NVTE_EP_STATUS_TRANSPORT;
      if (windows.ok() || way == Way::kWindows || !can_go_on) return windows;
    }
    const Status ipc = open_pools(make_ipc_pools(), bytes);
    if (ipc.ok() || way == Way::kIpc) return ipc;
    return Status(ipc.code(), text(ipc.message(), "; and ", windows.message()));
  }

  Status open_pools(std::unique_ptr<ProcessPools> pools_way, int64_t bytes) {
    std::vector<uint8_t*> pools;
    NVTE_EP_TRY(pools_way->open(ranks(), bytes, &pools));
    pools_way_ = std::move(pools_way);
    pools_ = std::move(pools);
    return Status();
  }

  // Ranks to each other, not in a ring: what is there when the time is up tells who has come.
  Status enqueue_gather(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream) {
    const nccl::Comm comm = comm_->meeting_point();
    if (comm == nullptr) return comm_->check_usable();
    gathered_ = static_cast<const uint8_t*>(all);
    gathered_bytes_ = bytes;
    const nccl::Api& api = comm_->api();
    return backend_->with_device([&]() -> Status {
      NVTE_EP_TRY(nccl::check(api, api.ncclGroupStart(), "ncclGroupStart", comm));
      Status status;
      const size_t count = static_cast<size_t>(bytes);
      for (int32_t r = 0; r < size() && status.ok(); ++r) {
        status = nccl::check(api, api.ncclSend(mine, count, nccl::kUint8, r, comm, stream), "ncclSend", comm);
        if (!status.ok()) break;
        uint8_t* from = static_cast<uint8_t*>(all) + r * bytes;
        status = nccl::check(api, api.ncclRecv(from, count, nccl::kUint8, r, comm, stream), "ncclRecv", comm);
      }
      const Status ended = nccl::check(api, api.ncclGroupEnd(), "ncclGroupEnd", comm);
      return status.ok() ? ended : status;
    });
  }

  // NCCL waits for ever.
  Status wait_for_nccl(const char* step, nvte_ep_stream_t stream) {
    const auto deadline = Clock::now() + std::chrono::nanoseconds(settings_.timeout_ns);
    for (;;) {
      bool idle = false;
      NVTE_EP_TRY(backend_->is_idle(stream, &idle));
      if (idle) return Status();
      int32_t ignored;
      NVTE_EP_TRY(communicator_error(&ignored));
      if (Clock::now() > deadline) {
        comm_->end_meetings();
        return late_at(step, who_has_not_come(stream));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  // Once nothing is in flight any more.
  std::vector<int32_t> who_has_not_come(nvte_ep_stream_t stream) const {
    std::vector<uint8_t> all(static_cast<size_t>(gathered_bytes_ * size()));
    if (!backend_->download(all.data(), gathered_, static_cast<int64_t>(all.size()), stream).ok()) return {};
    std::vector<int32_t> missing;
    for (int32_t r = 0; r < size(); ++r) {
      if (!NcclGather::has_come(all.data() + r * gathered_bytes_, gathered_bytes_)) missing.push_back(r);
    }
    return missing;
  }

  Status late_at(const char* step, const std::vector<int32_t>& missing) const {
    std::string ranks;
    for (int32_t r : missing) ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(r);
    return Status(NVTE_EP_STATUS_TIMEOUT,
                  text(ranks.empty() ? "a peer" : ranks, " did not arrive at ", step, " within ",
                       static_cast<double>(settings_.timeout_ns) * 1e-9, " s"));
  }

  Status communicator_error(int32_t* rank) const {
    *rank = -1;
    const nccl::Comm comm = comm_->comm();
    if (comm == nullptr) return comm_->check_usable();
    const nccl::Api& api = comm_->api();
    nccl::Result error = 0;
    NVTE_EP_TRY(nccl::check(api, api.ncclCommGetAsyncError(comm, &error), "ncclCommGetAsyncError", comm));
    if (error == 0 || error == nccl::kInProgress) return Status();
    return Status(NVTE_EP_STATUS_PEER_FAILED, text("NCCL reports ", api.ncclGetErrorString(error)));
  }

  // For ever; the first failure stays. Peers learn which rank it is about.
  Status fail(const Status& status, int32_t rank_of_it) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.ok()) {
      failure_ = status;
      failed_rank_ = rank_of_it;
    }
    tell_locked(rank_of_it);
    return failure_;
  }

  void tell(int32_t rank_of_it) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    tell_locked(rank_of_it);
  }

  void tell_locked(int32_t rank_of_it) {
    if (closed_ || words_ == nullptr) return;
    int32_t* word = &words_->new_ended[rank_of_it == rank() ? 1 : 0];
    *word = rank_of_it + 1;
    (void)backend_->with_device([&] {
      const NotCaptured guard;
      for (int32_t* ended : ended_)
        (void)cudaMemcpyAsync(ended, word, sizeof(*word), cudaMemcpyDefault, stream_);
      return Status();
    });
  }

  Status host_failure(int32_t* rank_of_it) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    *rank_of_it = failed_rank_;
    if (!failure_.ok() || closed_ || words_ == nullptr || ended_.empty()) return failure_;
    const int32_t ended = look_locked();
    if (ended == 0) return communicator_error(rank_of_it);
    *rank_of_it = ended - 1;
    return Status(NVTE_EP_STATUS_PEER_FAILED, text("rank ", *rank_of_it, " ended the group"));
  }

  // This rank's word, seen now and then: a host that waits for nothing still learns what a peer has put there.
  int32_t look_locked() const {
    constexpr auto kEvery = std::chrono::milliseconds(5);
    const auto now = Clock::now();
    if (now - looked_ >= kEvery) {
      looked_ = now;
      (void)backend_->with_device([&] {
        const NotCaptured guard;
        (void)cudaMemcpyAsync(&words_->ended, ended(), sizeof(int32_t), cudaMemcpyDefault, stream_);
        return Status();
      });
    }
    return *static_cast<volatile int32_t*>(&words_->ended);
  }

  NcclCommunicator* const comm_;
  const NcclGather gather_;
  const uint8_t* gathered_ = nullptr;  // [size, gathered_bytes_] on the device, of the gather in flight
  int64_t gathered_bytes_ = 0;
  nvte_ep_stream_t stream_ = nullptr;
  std::unique_ptr<ProcessPools> pools_way_;
  Mailboxes mailboxes_;
  Words* words_ = nullptr;
  mutable std::mutex mutex_;
  mutable Clock::time_point looked_{};
  Status failure_;
  int32_t failed_rank_ = -1;
  std::atomic<bool> closing_{false};
  bool closed_ = false;  // pools and words are going
};

}  // namespace

Status probe_process_memory(const Communicator& comm) {
  Way way;
  NVTE_EP_TRY(configured_way(&way));
  const NcclCommunicator& base = static_cast<const NcclCommunicator&>(comm);
  NVTE_EP_TRY(base.check_usable());
  const Status windows = probe_window_pools(base);
  const bool knows_domains = base.api().version >= nccl::kWindowsVersion;
  return way == Way::kWindows || (way == Way::kAuto && knows_domains) ? windows : Status();
}

std::unique_ptr<PeerMemory> make_process_memory(Communicator* comm, const GroupSettings& settings,
                                                Backend* backend) {
  return std::make_unique<ProcessMemory>(static_cast<NcclCommunicator*>(comm), settings, backend);
}

}  // namespace nvte_ep
