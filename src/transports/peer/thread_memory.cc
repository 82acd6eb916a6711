#include "transports/peer/thread_memory.h"

#include <mutex>
#include <utility>
#include <vector>

#include "transports/peer/peer_kernels.h"
#include "transports/rendezvous.h"
#include "transports/threads.h"

namespace nvte_ep {
namespace {

// What the ranks of a group share. It goes with the last of them: a rank that leaves after a failure waits for nobody, and
// what its peers have in flight may still read its pool.
class SharedPools {
 public:
  ~SharedPools() {
    for (const Pool& pool : pools_) pool.backend->release(pool.memory);
    if (ended_ != nullptr) backend_->release_shared(ended_);
  }
  Status open(Backend* backend) {
    backend_ = backend;
    return backend->allocate_shared(sizeof(int32_t), &ended_);
  }
  Status add(Backend* backend, int64_t bytes, void** pool) {
    NVTE_EP_TRY(backend->allocate(bytes, pool));
    const std::lock_guard<std::mutex> lock(mutex_);
    pools_.push_back(Pool{backend, *pool});
    return Status();
  }
  volatile int32_t* ended() const { return static_cast<volatile int32_t*>(ended_); }

 private:
  struct Pool {
    Backend* backend;
    void* memory;
  };
  Backend* backend_ = nullptr;
  std::mutex mutex_;
  std::vector<Pool> pools_;
  void* ended_ = nullptr;
};

class ThreadMemory : public PeerMemory {
 public:
  ThreadMemory(Communicator* comm, const GroupSettings& settings, Backend* backend)
      : PeerMemory(settings, backend, comm->rank(), comm->size()), rendezvous_(next_rendezvous(comm)) {}
  ~ThreadMemory() override { close(); }

  Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t) override {
    Publication p;
    p.step = step;
    for (const Agreed& a : mine) p.agree_on(a.name, a.value);
    return rendezvous_->exchange(rank(), p, settings_.timeout_ns,
                                 [](const std::vector<Publication>&) { return Status(); });
  }

  void abort() override { tell(rank()); }

  void close() override {
    if (rendezvous_ == nullptr) return;
    if (!pools_.empty()) {
      // Ends at once after a failure, as meetings do not wait then.
      const Status idle = backend_->synchronize();
      int32_t ignored;
      if (idle.ok() && failure(&ignored).ok()) (void)agree("group_destroy", {}, nullptr);
    }
    rendezvous_->leave(rank());
    pools_.clear();
    shared_.reset();
    rendezvous_.reset();
  }

 private:
  Status open(int64_t bytes) override {
    void* pool = nullptr;
    Publication mine;
    mine.step = "group_create";
    for (const Agreed& a : group_agreement(settings_)) mine.agree_on(a.name, a.value);
    // Allocated once all are here, so that a rank without memory tells the others.
    NVTE_EP_TRY(
        rendezvous_->exchange(rank(), mine, settings_.timeout_ns,
                              [&](const std::vector<Publication>&) { return allocate(bytes, &pool); }));
    // Every rank's pool and device.
    mine.rows = pool;
    mine.row_stride = settings_.device.id;
    std::vector<uint8_t*> pools;
    NVTE_EP_TRY(rendezvous_->exchange(
        rank(), mine, settings_.timeout_ns, [&](const std::vector<Publication>& all) -> Status {
          for (const Publication& p : all) {
            NVTE_EP_TRY(backend_->with_device(
                [&] { return enable_peer_access(settings_.device.id, static_cast<int32_t>(p.row_stride)); }));
            pools.push_back(static_cast<uint8_t*>(const_cast<void*>(p.rows)));
          }
          return Status();
        }));
    pools_ = std::move(pools);
    ended_.assign(pools_.size(), const_cast<int32_t*>(shared_->ended()));
    return Status();
  }

  Status allocate(int64_t bytes, void** pool) {
    std::shared_ptr<void> common;
    NVTE_EP_TRY(rendezvous_->common(
        [&](std::shared_ptr<void>* made) {
          auto pools = std::make_shared<SharedPools>();
          NVTE_EP_TRY(pools->open(backend_));
          *made = std::move(pools);
          return Status();
        },
        &common));
    shared_ = std::static_pointer_cast<SharedPools>(common);
    return shared_->add(backend_, bytes, pool);
  }

  void tell(int32_t rank_of_it) override {
    if (shared_ == nullptr) return;  // closed
    *shared_->ended() = rank_of_it + 1;
    rendezvous_->abort(rank_of_it);
  }

  Status host_failure(int32_t* rank) const override {
    if (shared_ == nullptr) return Status();  // closed
    const int32_t ended = *shared_->ended();
    if (ended == 0) return rendezvous_->failure(rank);
    *rank = ended - 1;
    return Status(NVTE_EP_STATUS_PEER_FAILED, text("rank ", *rank, " ended the group"));
  }

  std::shared_ptr<Rendezvous> rendezvous_;
  std::shared_ptr<SharedPools> shared_;
};

}  // namespace

std::unique_ptr<PeerMemory> make_thread_memory(Communicator* comm, const GroupSettings& settings,
                                               Backend* backend) {
  return std::make_unique<ThreadMemory>(comm, settings, backend);
}

}  // namespace nvte_ep
