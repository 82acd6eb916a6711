#include "transports/nccl.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "transports/device_buffer.h"
#include "transports/device_exchange.h"
#include "transports/nccl_group_comm.h"

namespace nvte_ep {
namespace {

using nccl::check;

// So many bytes for each rank travel in two pieces: the second costs the start of a kernel of NCCL's.
constexpr int64_t kTwoPiecesBytes = int64_t{24} << 20;
// Fewer are not worth a stream of their own.
constexpr int64_t kSideStreamBytes = int64_t{1} << 20;

class NcclExchange : public DeviceExchange {
 public:
  NcclExchange(const nccl::Api& api, const GroupSettings& settings, Backend* backend, int32_t rank,
               int32_t size)
      : settings_(settings), backend_(backend), ranks_(api, backend, rank, size, settings.timeout_ns, true) {}
  ~NcclExchange() override {
    close();
    backend_->destroy_stream(side_);
    backend_->destroy_mark(ready_);
    backend_->destroy_mark(starts_);
    for (Piece& piece : pieces_) backend_->destroy_mark(piece.arrived);
  }

  // What a rank needs of its own comes before what it does with the others: where one rank lacks it, none waits for it.
  Status open(NcclCommunicator* base) {
    NVTE_EP_TRY(ranks_.open(base, settings_, NVTE_EP_TRANSPORT_NCCL));
    NVTE_EP_TRY(ranks_.settle("group_create", reserve(), nullptr));
    const Status connected = connect();
    if (!connected.ok()) ranks_.abort(connected.message());
    return connected;
  }

  bool exact_counts() const override { return settings_.eager() && ranks_.size() > 1; }

  // One outbox will do: what NCCL sends is read in the order of the stream.
  Status outbox(int64_t bytes, void** memory, nvte_ep_stream_t) override {
    NVTE_EP_TRY(outbox_.reserve(backend_, bytes));
    NVTE_EP_TRY(inbox_.reserve(backend_, bytes));
    *memory = outbox_.as<void>();
    return Status();
  }

  Status gather(const void* mine, void* all, int64_t bytes, nvte_ep_stream_t stream) override {
    return ranks_.watch().step(stream, [&] { return ranks_.gather(mine, all, bytes, stream); });
  }

  int32_t pieces(int64_t bytes) const override {
    if (ranks_.size() == 1) return 0;
    return bytes < kTwoPiecesBytes ? 1 : kMaxPieces;
  }

  // On a stream of its own, so that what has come is put into slots while the rest travels.
  Status begin(const std::vector<Travel>& travels, int32_t piece, nvte_ep_stream_t stream) override {
    int64_t bytes = 0;
    for (const Travel& t : travels) bytes += (t.end - t.begin) * t.item_bytes;
    Piece& mine = pieces_[piece];
    mine.aside = bytes >= kSideStreamBytes;
    if (!mine.aside) return exchange(travels, stream);
    NVTE_EP_TRY(backend_->set_mark(ready_, stream));
    NVTE_EP_TRY(backend_->wait_mark(ready_, side_));
    Status begun = backend_->set_mark(starts_, side_);
    if (begun.ok()) begun = exchange(travels, side_);
    const Status marked = backend_->set_mark(mine.arrived, side_);
    if (begun.ok()) begun = marked;
    if (begun.ok()) {
      // What comes next on the caller's stream would take all multiprocessors, and NCCL's kernel needs whole ones: it goes first.
      // A second piece starts when the first has come, for which nobody waits here.
      return piece == 0 ? backend_->wait_mark(starts_, stream) : Status();
    }
    // Nobody will await the pieces: what the caller does next comes after them all the same, and a capture can end.
    if (marked.ok()) (void)backend_->wait_mark(mine.arrived, stream);
    return begun;
  }
  Status await(int32_t piece, nvte_ep_stream_t stream) override {
    const Piece& mine = pieces_[piece];
    return mine.aside ? backend_->wait_mark(mine.arrived, stream) : Status();
  }

  RankArrays arrivals(const Travel& travel) const override {
    RankArrays arrivals;
    arrivals.block = inbox_.as<uint8_t>() + travel.inbox_at;
    arrivals.row_stride = travel.item_bytes;
    arrivals.rank_stride = travel.listed != nullptr ? 0 : travel.tokens * travel.item_bytes;
    arrivals.own_rank = ranks_.rank();
    arrivals.own = travel.own;
    arrivals.own_stride = travel.own_stride;
    return arrivals;
  }

  Status agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) override {
    return ranks_.agree(step, mine, stream);
  }
  Status wait(const char* step, nvte_ep_stream_t stream) override { return ranks_.wait(step, stream); }
  Status failure(int32_t* rank) override {
    *rank = -1;
    return ranks_.failure();
  }
  Status check_clock() override { return ranks_.check_watch(); }
  void abort(const std::string& message) override { ranks_.abort(message); }
  void close() override { ranks_.close(); }

 private:
  struct Piece {
    void* arrived = nullptr;
    bool aside = false;  // on the side stream
  };

  Status reserve() {
    // Loading a kernel waits for those that run, NCCL's that wait for a peer among them.
    NVTE_EP_TRY(backend_->preload());
    NVTE_EP_TRY(backend_->create_stream(&side_));
    NVTE_EP_TRY(backend_->create_mark(&ready_));
    NVTE_EP_TRY(backend_->create_mark(&starts_));
    for (Piece& piece : pieces_) NVTE_EP_TRY(backend_->create_mark(&piece.arrived));
    const int64_t bytes = settings_.eager() ? ranks_.size() * std::max(kWord, routing_bytes())
                                            : outbox_bytes(settings_, ranks_.size());
    NVTE_EP_TRY(outbox_.reserve(backend_, bytes));
    return inbox_.reserve(backend_, bytes);
  }

  // NCCL connects two ranks when they first send each other something, and all of them for a kind of collective when it is first
  // made; its call waits until they come. Steps must not wait for peers on the host, where no clock of ours ends it: so a word goes
  // from each to each, and as much as a routing has around, when the group is made.
  Status connect() {
    if (ranks_.size() == 1) return Status();
    Travel word;
    word.items = outbox_.as<void>();
    word.item_bytes = kWord;
    word.tokens = word.end = 1;
    word.to_each = true;
    NVTE_EP_TRY(exchange({word}, nullptr));
    NVTE_EP_TRY(gather(outbox_.as<void>(), inbox_.as<void>(), routing_bytes(), nullptr));
    return ranks_.wait("group_create", nullptr);
  }
  static constexpr int64_t kWord = 16;  // bytes
  // That a rank gives in prepare, at most.
  int64_t routing_bytes() const { return settings_.max_tokens_per_rank * settings_.max_top_k * 4; }

  Status exchange(const std::vector<Travel>& travels, nvte_ep_stream_t stream) {
    return ranks_.watch().step(stream, [&] { return send_and_receive(travels, stream); });
  }
  Status send_and_receive(const std::vector<Travel>& travels, nvte_ep_stream_t stream) {
    const nccl::Api& api = ranks_.api();
    return ranks_.use([&](nccl::Comm comm) -> Status {
      NVTE_EP_TRY(check(api, api.ncclGroupStart(), "ncclGroupStart", comm));
      Status status;
      for (const Travel& t : travels) {
        if (status.ok())
          status = t.listed != nullptr ? enqueue_listed(t, comm, stream) : enqueue(t, comm, stream);
      }
      const Status ended = check(api, api.ncclGroupEnd(), "ncclGroupEnd", comm);
      return status.ok() ? ended : status;
    });
  }

  Status enqueue(const Travel& t, nccl::Comm comm, nvte_ep_stream_t stream) {
    const int64_t bytes = (t.end - t.begin) * t.item_bytes;
    const uint8_t* items = static_cast<const uint8_t*>(t.items) + t.begin * t.item_bytes;
    uint8_t* inbox = inbox_.as<uint8_t>() + t.inbox_at + t.begin * t.item_bytes;
    for (int32_t r = 0; r < ranks_.size(); ++r) {
      if (r == ranks_.rank()) continue;
      const int64_t block = r * t.tokens * t.item_bytes;
      NVTE_EP_TRY(swap(r, items + (t.to_each ? block : 0), bytes, inbox + block, bytes, comm, stream));
    }
    return Status();
  }

  Status enqueue_listed(const Travel& t, nccl::Comm comm, nvte_ep_stream_t stream) {
    const uint8_t* items = static_cast<const uint8_t*>(t.items);
    uint8_t* inbox = inbox_.as<uint8_t>() + t.inbox_at;
    for (int32_t r = 0; r < ranks_.size(); ++r) {
      const int64_t out = t.listed->send[static_cast<size_t>(r)] * t.item_bytes;
      const int64_t in = t.listed->receive[static_cast<size_t>(r)] * t.item_bytes;
      NVTE_EP_TRY(swap(r, items, out, inbox, in, comm, stream));
      items += out;
      inbox += in;
    }
    return Status();
  }

  // Bytes to a rank, and bytes from it.
  Status swap(int32_t peer, const void* out, int64_t out_bytes, void* in, int64_t in_bytes, nccl::Comm comm,
              nvte_ep_stream_t stream) {
    const nccl::Api& api = ranks_.api();
    if (out_bytes > 0) {
      NVTE_EP_TRY(check(api,
                        api.ncclSend(out, static_cast<size_t>(out_bytes), nccl::kUint8, peer, comm, stream),
                        "ncclSend", comm));
    }
    if (in_bytes == 0) return Status();
    return check(api, api.ncclRecv(in, static_cast<size_t>(in_bytes), nccl::kUint8, peer, comm, stream),
                 "ncclRecv", comm);
  }

  const GroupSettings settings_;
  Backend* const backend_;
  NcclGroupComm ranks_;
  DeviceBuffer outbox_, inbox_;
  nvte_ep_stream_t side_ = nullptr;
  void* ready_ = nullptr;   // what a piece sends is
  void* starts_ = nullptr;  // a piece does
  Piece pieces_[kMaxPieces];
};

}  // namespace

NcclCommunicator::~NcclCommunicator() {
  // Its groups are gone.
  for (std::atomic<nccl::Comm>* comm : {&apart_, &comm_}) {
    if (lost_peer_) abort_comm(comm);
    if (const nccl::Comm mine = comm->exchange(nullptr)) (void)api_.ncclCommDestroy(mine);
  }
}

Status NcclCommunicator::check_usable() const {
  return comm_ != nullptr && !ended_ ? Status() : bad_state("comm: it was ended because a peer did not come");
}

Status NcclCommunicator::check_usable(const Device& device) const {
  if (device.id != device_) {
    return invalid_argument("config.device_id: expected ", device_, ", the communicator's device, got ",
                            device.id);
  }
  return check_usable();
}

Status NcclCommunicator::meet_apart(Backend* backend) {
  if (apart_ != nullptr || size() == 1) return Status();
  nccl::Comm fresh = nullptr;
  NVTE_EP_TRY(backend->with_device([&] { return nccl::split(api_, comm_, rank(), &fresh); }));
  apart_ = fresh;
  return Status();
}

void NcclCommunicator::end_meetings() {
  ended_ = true;
  lost_peer_ = true;
  abort_comm(apart_ != nullptr ? &apart_ : &comm_);
}

void NcclCommunicator::abort_comm(std::atomic<nccl::Comm>* comm) {
  if (const nccl::Comm mine = comm->exchange(nullptr)) (void)api_.ncclCommAbort(mine);
}

Status make_nccl_id(uint8_t* unique_id) {
  const nccl::Api* api = nullptr;
  NVTE_EP_TRY(nccl::load(&api));
  nccl::UniqueId id;
  NVTE_EP_TRY(check(*api, api->ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr));
  static_assert(sizeof(id.internal) == NVTE_EP_UNIQUE_ID_BYTES, "an NCCL id is 128 bytes");
  std::memcpy(unique_id, id.internal, sizeof(id.internal));
  return Status();
}

Status create_nccl_communicator(const CommunicatorSettings& settings,
                                std::unique_ptr<Communicator>* communicator) {
  const nccl::Api* api = nullptr;
  NVTE_EP_TRY(nccl::load(&api));
  nccl::UniqueId id;
  if (settings.unique_id != nullptr) {
    std::memcpy(id.internal, settings.unique_id, sizeof(id.internal));
  } else if (settings.size == 1) {
    NVTE_EP_TRY(check(*api, api->ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr));
  } else {
    return invalid_argument("config.unique_id: expected an id from nvte_ep_unique_id, got NULL");
  }
  Backend* backend = nullptr;
  NVTE_EP_TRY(find_backend(Device{NVTE_EP_DEVICE_CUDA, settings.device_id}, 0, &backend));
  nccl::Comm comm = nullptr;
  NVTE_EP_TRY(backend->with_device([&] {
    return check(*api, api->ncclCommInitRank(&comm, settings.size, id, settings.rank), "ncclCommInitRank",
                 nullptr);
  }));
  *communicator =
      std::make_unique<NcclCommunicator>(*api, comm, settings.rank, settings.size, settings.device_id);
  return Status();
}

Status split_nccl_communicator(void* nccl_comm, std::unique_ptr<Communicator>* communicator) {
  const nccl::Api* api = nullptr;
  NVTE_EP_TRY(nccl::load(&api));
  const nccl::Comm given = static_cast<nccl::Comm>(nccl_comm);
  int rank = 0;
  int size = 0;
  int device = 0;
  NVTE_EP_TRY(check(*api, api->ncclCommUserRank(given, &rank), "ncclCommUserRank", given));
  NVTE_EP_TRY(check(*api, api->ncclCommCount(given, &size), "ncclCommCount", given));
  NVTE_EP_TRY(check(*api, api->ncclCommCuDevice(given, &device), "ncclCommCuDevice", given));
  Backend* backend = nullptr;
  NVTE_EP_TRY(find_backend(Device{NVTE_EP_DEVICE_CUDA, device}, 0, &backend));
  nccl::Comm comm = nullptr;
  NVTE_EP_TRY(backend->with_device([&] { return nccl::split(*api, given, rank, &comm); }));
  *communicator = std::make_unique<NcclCommunicator>(*api, comm, rank, size, device);
  return Status();
}

Status probe_nccl(const Communicator& comm, const GroupSettings& settings) {
  if (comm.kind() != NVTE_EP_COMM_NCCL) return unsupported("nccl needs a communicator of kind NCCL");
  if (settings.device.is_host()) return unsupported("nccl works on CUDA devices, not on host memory");
  if (settings.zero_copy) return unsupported("nccl has no zero_copy: rows are staged");
  if (settings.num_sms != 0)
    return unsupported("nccl does not bound the multiprocessors it uses: expected num_sms 0");
  return Status();
}

Status create_nccl(Communicator* comm, const GroupSettings& settings, Backend* backend,
                   std::unique_ptr<GroupTransport>* group) {
  NcclCommunicator& base = *static_cast<NcclCommunicator*>(comm);
  NVTE_EP_TRY(base.check_usable(settings.device));
  auto exchange = std::make_unique<NcclExchange>(base.api(), settings, backend, comm->rank(), comm->size());
  NVTE_EP_TRY(exchange->open(&base));
  *group = make_device_group("nccl", settings, backend, comm->rank(), comm->size(), std::move(exchange));
  return Status();
}

void nccl_memory(const Communicator& comm, const GroupSettings& settings, int64_t* group_bytes,
                 int64_t* exchange_bytes, int64_t* handle_bytes) {
  *exchange_bytes = settings.eager() ? 0 : 2 * outbox_bytes(settings, comm.size());
  *group_bytes = *exchange_bytes;
  *handle_bytes = device_handle_bytes(settings, comm.size());
}

}  // namespace nvte_ep
