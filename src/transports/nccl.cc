#include "transports/nccl.h"

#include <cstring>
#include <utility>
#include <vector>

#include "transports/device_buffer.h"
#include "transports/device_exchange.h"
#include "transports/nccl_group_comm.h"

namespace nvte_ep {
namespace {

using nccl::check;

class NcclExchange : public DeviceExchange {
 public:
  NcclExchange(const nccl::Api& api, const GroupSettings& settings, Backend* backend, int32_t rank,
               int32_t size)
      : settings_(settings), backend_(backend), ranks_(api, backend, rank, size, settings.timeout_ns, true) {}
  ~NcclExchange() override { close(); }

  Status open(NcclCommunicator* base) {
    NVTE_EP_TRY(ranks_.open(base, settings_, NVTE_EP_TRANSPORT_NCCL));
    if (settings_.eager()) return Status();
    NVTE_EP_TRY(outbox_.reserve(backend_, outbox_bytes(settings_, ranks_.size())));
    return inbox_.reserve(backend_, outbox_bytes(settings_, ranks_.size()));
  }

  bool exact_counts() const override { return settings_.eager(); }
  bool may_read_elsewhere() const override { return true; }

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

  Status share(const void* items, int64_t tokens, int64_t item_bytes, const ItemCounts* counts,
               RankArrays* received, nvte_ep_stream_t stream) override {
    return travel(items, counts == nullptr, tokens, item_bytes, counts, received, stream);
  }
  Status give_back(const void* items, int64_t tokens, int64_t item_bytes, const ItemCounts* counts,
                   RankArrays* received, nvte_ep_stream_t stream) override {
    return travel(items, false, tokens, item_bytes, counts, received, stream);
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
  // all: every rank gets the same items; else the items for rank 0, 1, ... follow each other.
  Status travel(const void* items, bool all, int64_t tokens, int64_t item_bytes, const ItemCounts* counts,
                RankArrays* received, nvte_ep_stream_t stream) {
    received->pointers = nullptr;
    received->block = inbox_.as<void>();
    received->rank_stride = counts != nullptr ? 0 : tokens * item_bytes;
    received->row_stride = item_bytes;
    return ranks_.watch().step(
        stream, [&] { return send_and_receive(items, all, tokens, item_bytes, counts, stream); });
  }

  Status send_and_receive(const void* items, bool all, int64_t tokens, int64_t item_bytes,
                          const ItemCounts* counts, nvte_ep_stream_t stream) {
    const nccl::Api& api = ranks_.api();
    return ranks_.use([&](nccl::Comm comm) -> Status {
      NVTE_EP_TRY(check(api, api.ncclGroupStart(), "ncclGroupStart", comm));
      Status status;
      const uint8_t* source = static_cast<const uint8_t*>(items);
      uint8_t* target = inbox_.as<uint8_t>();
      for (int32_t r = 0; r < ranks_.size() && status.ok(); ++r) {
        const int64_t out = (counts != nullptr ? counts->send[static_cast<size_t>(r)] : tokens) * item_bytes;
        const int64_t in =
            (counts != nullptr ? counts->receive[static_cast<size_t>(r)] : tokens) * item_bytes;
        if (out > 0) {
          status = check(api, api.ncclSend(source, static_cast<size_t>(out), nccl::kUint8, r, comm, stream),
                         "ncclSend", comm);
        }
        if (status.ok() && in > 0) {
          status = check(api, api.ncclRecv(target, static_cast<size_t>(in), nccl::kUint8, r, comm, stream),
                         "ncclRecv", comm);
        }
        if (!all) source += out;
        target += in;
      }
      const Status ended = check(api, api.ncclGroupEnd(), "ncclGroupEnd", comm);
      return status.ok() ? ended : status;
    });
  }

  const GroupSettings settings_;
  Backend* const backend_;
  NcclGroupComm ranks_;
  DeviceBuffer outbox_, inbox_;
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

Status NcclCommunicator::meet_apart(Backend* backend) {
  if (apart_ != nullptr || size() == 1) return Status();
  nccl::Comm fresh = nullptr;
  NVTE_EP_TRY(backend->with_device([&] {
    return check(api_, api_.ncclCommSplit(comm_, 0, rank(), &fresh, nullptr), "ncclCommSplit", comm_);
  }));
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
  NVTE_EP_TRY(backend->with_device([&] {
    return check(*api, api->ncclCommSplit(given, 0, rank, &comm, nullptr), "ncclCommSplit", given);
  }));
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
  NVTE_EP_TRY(base.check_usable());
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
