#include "transports/peer/peer.h"

#include <chrono>
#include <thread>
#include <vector>

#include "transports/device_buffer.h"
#include "transports/device_exchange.h"
#include "transports/peer/peer_kernels.h"
#include "transports/peer/peer_memory.h"

// A step is: meet, write the outbox, meet, read the peers' outboxes. The first meeting says that everybody has read the step
// before, the second that everybody has written this one. Epochs count on in device memory, so a captured step can be
// replayed.
namespace nvte_ep {
namespace {

constexpr int64_t kFlagBytes = 4096;

class PeerExchange : public DeviceExchange {
 public:
  PeerExchange(const GroupSettings& settings, Backend* backend) : settings_(settings), backend_(backend) {}
  ~PeerExchange() override { close(); }

  Status open(Communicator* comm) {
    size_ = comm->size();
    // Before any rank can wait for another one on the device.
    NVTE_EP_TRY(backend_->with_device([] { return load_peer_kernels(); }));
    NVTE_EP_TRY(backend_->preload());
    // The pool: flags and the epoch | indices | outbox.
    index_offset_ = kFlagBytes;
    outbox_offset_ = index_offset_ + round_up(settings_.max_tokens_per_rank * settings_.max_top_k * 4, 256);
    NVTE_EP_TRY(open_peer_memory(comm, settings_, backend_, outbox_offset_ + outbox_bytes(settings_, size_),
                                 &memory_));
    std::vector<const void*> pointers;
    for (int64_t offset : {int64_t{0}, index_offset_, outbox_offset_}) {
      for (const uint8_t* pool : memory_->pools()) pointers.push_back(pool + offset);
    }
    NVTE_EP_TRY(pointers_.reserve(backend_, 3 * size_ * 8));
    NVTE_EP_TRY(backend_->upload(pointers_.as<void>(), pointers.data(), 3 * size_ * 8, nullptr));
    // Nobody waits on a device for a rank that still allocates and copies there.
    return memory_->agree("group_create", {}, nullptr);
  }

  bool exact_counts() const override { return false; }
  bool may_read_elsewhere() const override { return false; }

  Status outbox(int64_t, void** memory, nvte_ep_stream_t stream) override {
    if (!open_) NVTE_EP_TRY(meet(stream));
    open_ = true;
    *memory = memory_->own_pool() + outbox_offset_;
    return Status();
  }

  Status gather(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream) override {
    NVTE_EP_TRY(meet(stream));
    uint8_t* indices = memory_->own_pool() + index_offset_;
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
    return hand_over(memory_->rank() * tokens * item_bytes, item_bytes, received, stream);
  }

  Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) override {
    return memory_->agree(step, mine, stream);
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

  Status failure(int32_t* rank) override { return memory_->failure(rank); }
  void abort(const std::string&) override { memory_->abort(); }
  void close() override {
    if (memory_ != nullptr) memory_->close();
  }

 private:
  Status meet(nvte_ep_stream_t stream) {
    Meeting m;
    m.rank = memory_->rank();
    m.size = size_;
    m.arrivals = pointers_.as<uint32_t*>();
    m.epoch = reinterpret_cast<uint32_t*>(memory_->own_pool() + kFlagBytes) - 1;
    m.timeout_ns = settings_.timeout_ns;
    m.report = memory_->report();
    m.ended = memory_->ended();
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
  int32_t size_ = 0;
  std::unique_ptr<PeerMemory> memory_;
  DeviceBuffer pointers_;
  int64_t index_offset_ = 0;
  int64_t outbox_offset_ = 0;
  bool open_ = false;  // the outbox may be written
};

}  // namespace

Status probe_peer(const Communicator& comm, const GroupSettings& settings) {
  if (settings.device.is_host()) return unsupported("peer works on CUDA devices, not on host memory");
  NVTE_EP_TRY(probe_peer_memory(comm, settings));
  if (settings.zero_copy) return unsupported("peer has no zero_copy yet");
  if (settings.num_sms != 0) return unsupported("peer does not honour num_sms yet: expected 0");
  // The flags and the epoch share one page.
  if (comm.size() > static_cast<int32_t>(kFlagBytes / 4) - 1)
    return unsupported("peer: expected at most 1023 ranks, got ", comm.size());
  return Status();
}

Status create_peer(Communicator* comm, const GroupSettings& settings, Backend* backend,
                   std::unique_ptr<GroupTransport>* group) {
  auto exchange = std::make_unique<PeerExchange>(settings, backend);
  NVTE_EP_TRY(exchange->open(comm));
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
