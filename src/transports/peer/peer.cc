#include "transports/peer/peer.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "transports/device_buffer.h"
#include "transports/device_exchange.h"
#include "transports/peer/peer_kernels.h"
#include "transports/rendezvous.h"
#include "transports/threads.h"

// A step is: meet, write the outbox, meet, read the peers' outboxes. The first meeting says that everybody has read the step
// before, the second that everybody has written this one. Epochs count on in device memory, so a captured step can be
// replayed.
namespace nvte_ep {
namespace {

constexpr int64_t kFlagBytes = 4096;

class PeerExchange : public DeviceExchange {
 public:
  PeerExchange(const GroupSettings& settings, Backend* backend, std::shared_ptr<Rendezvous> rendezvous,
               int32_t rank, int32_t size)
      : settings_(settings),
        backend_(backend),
        rendezvous_(std::move(rendezvous)),
        rank_(rank),
        size_(size) {}
  ~PeerExchange() override {
    close();
    if (report_ != nullptr) backend_->release_shared(report_);
  }

  Status open() {
    const int64_t outbox = outbox_bytes(settings_, size_);
    // The pool: flags and the epoch | indices | outbox.
    index_offset_ = kFlagBytes;
    outbox_offset_ = index_offset_ + round_up(settings_.max_tokens_per_rank * settings_.max_top_k * 4, 256);
    NVTE_EP_TRY(pool_.reserve(backend_, outbox_offset_ + outbox));
    NVTE_EP_TRY(backend_->allocate_shared(sizeof(MeetingReport), &report_));
    NVTE_EP_TRY(rendezvous_->common(
        [&](std::shared_ptr<void>* word) -> Status {
          void* memory = nullptr;
          NVTE_EP_TRY(backend_->allocate_shared(sizeof(int32_t), &memory));
          *word =
              std::shared_ptr<void>(memory, [backend = backend_](void* p) { backend->release_shared(p); });
          return Status();
        },
        &abort_));
    NVTE_EP_TRY(backend_->with_device([] { return load_peer_kernels(); }));
    NVTE_EP_TRY(backend_->preload());

    // Every rank's pool and device. The rendezvous only lets the ranks look at each other's values here.
    Publication mine;
    mine.step = "group_create";
    for (const Agreed& a : group_agreement(settings_, NVTE_EP_TRANSPORT_PEER)) mine.agree_on(a.name, a.value);
    mine.rows = pool_.as<void>();
    mine.row_stride = settings_.device.id;
    std::vector<const void*> pointers(static_cast<size_t>(3 * size_));
    return rendezvous_->exchange(
        rank_, mine, settings_.timeout_ns, [&](const std::vector<Publication>& all) -> Status {
          for (int32_t r = 0; r < size_; ++r) {
            const Publication& p = all[static_cast<size_t>(r)];
            NVTE_EP_TRY(backend_->with_device(
                [&] { return enable_peer_access(settings_.device.id, static_cast<int32_t>(p.row_stride)); }));
            const uint8_t* pool = static_cast<const uint8_t*>(p.rows);
            pointers[static_cast<size_t>(r)] = pool;
            pointers[static_cast<size_t>(size_ + r)] = pool + index_offset_;
            pointers[static_cast<size_t>(2 * size_ + r)] = pool + outbox_offset_;
          }
          NVTE_EP_TRY(pointers_.reserve(backend_, 3 * size_ * 8));
          return backend_->upload(pointers_.as<void>(), pointers.data(), 3 * size_ * 8, nullptr);
        });
  }

  bool exact_counts() const override { return false; }
  bool may_read_elsewhere() const override { return false; }

  Status outbox(int64_t, void** memory, nvte_ep_stream_t stream) override {
    if (!open_) NVTE_EP_TRY(meet(stream));
    open_ = true;
    *memory = pool_.as<uint8_t>() + outbox_offset_;
    return Status();
  }

  Status gather(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(meet(stream));
    uint8_t* indices = pool_.as<uint8_t>() + index_offset_;
    NVTE_EP_TRY(backend_->copy_rows(indices, bytes, mine, bytes, bytes, 1, stream));
    NVTE_EP_TRY(meet(stream));
    return backend_->with_device([&] {
      return launch_pull_blocks(pointers_.as<const void*>() + size_, size_, bytes, all, backend_->num_sms(),
                                stream);
    });
  }

  Status share(const void*, int64_t, int64_t item_bytes, const ItemCounts*, RankArrays* received,
               nvte_ep_stream_t stream) override {
    return hand_over(0, item_bytes, received, stream);
  }
  Status give_back(const void*, int64_t tokens, int64_t item_bytes, const ItemCounts*, RankArrays* received,
                   nvte_ep_stream_t stream) override {
    return hand_over(rank_ * tokens * item_bytes, item_bytes, received, stream);
  }

  Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t) override {
    Publication p;
    p.step = step;
    for (const Agreed& a : mine) p.agree_on(a.name, a.value);
    return rendezvous_->exchange(rank_, p, settings_.timeout_ns,
                                 [](const std::vector<Publication>&) { return Status(); });
  }

  Status wait(const char*, nvte_ep_stream_t stream) override {
    for (;;) {
      bool idle = false;
      NVTE_EP_TRY(backend_->is_idle(stream, &idle));
      int32_t ignored;
      if (idle) return failure(&ignored);
      std::this_thread::sleep_for(std::chrono::microseconds(20));  // the meetings end by themselves
    }
  }

  Status failure(int32_t* rank) override {
    *rank = -1;
    if (report_ == nullptr || abort_ == nullptr) return Status();
    const volatile MeetingReport& report = *static_cast<const MeetingReport*>(report_);
    const int32_t status = report.status;
    if (status == 0) {
      const int32_t ended = *abort_word();
      if (ended != 0) {
        *rank = ended - 1;
        return Status(NVTE_EP_STATUS_PEER_FAILED, text("rank ", *rank, " ended the group"));
      }
      return rendezvous_->failure(rank);
    }
    *rank = report.rank;
    if (status == NVTE_EP_STATUS_TIMEOUT) {
      return Status(status, text("rank ", *rank, " did not arrive within ",
                                 static_cast<double>(settings_.timeout_ns) * 1e-9, " s"));
    }
    return Status(status, text("rank ", *rank, " ended the group"));
  }

  void abort(const std::string&) override {
    *abort_word() = rank_ + 1;  // every rank's meetings look at it
    rendezvous_->abort(rank_);
  }

  void close() override {
    if (closed_) return;
    closed_ = true;
    // Peers may still read this rank's pool: it goes when all have come here.
    int32_t ignored;
    if (pointers_.as<void>() != nullptr && failure(&ignored).ok() && backend_->synchronize().ok()) {
      (void)agree("group_destroy", {}, nullptr);
    }
    rendezvous_->leave(rank_);
  }

 private:
  volatile int32_t* abort_word() const { return static_cast<volatile int32_t*>(abort_.get()); }

  Status meet(nvte_ep_stream_t stream) {
    Meeting m;
    m.rank = rank_;
    m.size = size_;
    m.arrivals = pointers_.as<uint32_t*>();
    m.epoch = reinterpret_cast<uint32_t*>(pool_.as<uint8_t>() + kFlagBytes) - 1;
    m.timeout_ns = settings_.timeout_ns;
    m.report = static_cast<MeetingReport*>(report_);
    m.ended = static_cast<const int32_t*>(abort_.get());
    return backend_->with_device([&] { return launch_meet(m, stream); });
  }

  Status hand_over(int64_t offset, int64_t item_bytes, RankArrays* received, nvte_ep_stream_t stream) {
    open_ = false;
    NVTE_EP_TRY(meet(stream));
    *received = RankArrays();
    received->pointers = pointers_.as<const void*>() + 2 * size_;
    received->row_stride = item_bytes;
    received->offset = offset;
    return Status();
  }

  const GroupSettings settings_;
  Backend* const backend_;
  const std::shared_ptr<Rendezvous> rendezvous_;
  const int32_t rank_;
  const int32_t size_;
  DeviceBuffer pool_, pointers_;
  int64_t index_offset_ = 0;
  int64_t outbox_offset_ = 0;
  void* report_ = nullptr;       // a MeetingReport that the device writes
  std::shared_ptr<void> abort_;  // one word for the group
  bool open_ = false;            // the outbox may be written
  bool closed_ = false;
};

}  // namespace

Status probe_peer(const Communicator& comm, const GroupSettings& settings) {
  if (settings.device.is_host()) return unsupported("peer works on CUDA devices, not on host memory");
  if (comm.kind() != NVTE_EP_COMM_THREADS)
    return unsupported("peer works between ranks of one process so far");
  if (settings.zero_copy) return unsupported("peer has no zero_copy yet");
  if (settings.num_sms != 0) return unsupported("peer does not honour num_sms yet: expected 0");
  // The flags and the epoch share one page.
  if (comm.size() > static_cast<int32_t>(kFlagBytes / 4) - 1)
    return unsupported("peer: expected at most 1023 ranks, got ", comm.size());
  return Status();
}

Status create_peer(Communicator* comm, const GroupSettings& settings, Backend* backend,
                   std::unique_ptr<GroupTransport>* group) {
  auto exchange =
      std::make_unique<PeerExchange>(settings, backend, next_rendezvous(comm), comm->rank(), comm->size());
  NVTE_EP_TRY(exchange->open());
  *group = make_device_group("peer", settings, backend, comm->rank(), comm->size(), std::move(exchange));
  return Status();
}

void peer_memory(const Communicator& comm, const GroupSettings& settings, int64_t* group_bytes,
                 int64_t* exchange_bytes, int64_t* handle_bytes) {
  *exchange_bytes = outbox_bytes(settings, comm.size()) +
                    settings.max_tokens_per_rank * settings.max_top_k * 4 + kFlagBytes;
  *group_bytes = *exchange_bytes;
  *handle_bytes = device_handle_bytes(settings, comm.size());
}

}  // namespace nvte_ep
