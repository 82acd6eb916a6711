// Communicators.
#include "api/guard.h"
#include "api/objects.h"
#include "core/struct_reader.h"

using namespace nvte_ep;

extern "C" {

nvte_ep_status_t nvte_ep_unique_id(int32_t kind, uint8_t* unique_id) {
  return boundary("nvte_ep_unique_id", [&]() -> Status {
    if (unique_id == nullptr) return invalid_argument("unique_id: expected 128 bytes, got NULL");
    return make_unique_id(kind, unique_id);
  });
}

nvte_ep_status_t nvte_ep_comm_create(const nvte_ep_comm_config_t* config, nvte_ep_comm_t* comm) {
  return boundary("nvte_ep_comm_create", [&]() -> Status {
    nvte_ep_comm_config_t c;
    NVTE_EP_TRY(read_struct(config, NVTE_EP_COMM_CONFIG_V1_SIZE, "config", &c));
    if (comm == nullptr) return invalid_argument("comm: expected a pointer, got NULL");
    // Ranks are folded into random streams as 10 bits.
    if (c.num_ranks < 1 || c.num_ranks > 1024) {
      return invalid_argument("config.num_ranks: expected 1 to 1024, got ", c.num_ranks);
    }
    if (c.rank < 0 || c.rank >= c.num_ranks) {
      return invalid_argument("config.rank: expected 0 to ", c.num_ranks - 1, ", got ", c.rank);
    }
    if (c.timeout_ns < 0)
      return invalid_argument("config.timeout_ns: expected 0 or more, got ", c.timeout_ns);
    std::unique_ptr<Communicator> created;
    NVTE_EP_TRY(
        create_communicator({c.kind, c.rank, c.num_ranks, c.device_id, c.unique_id, c.timeout_ns}, &created));
    *comm = comms().add(std::move(created));
    return Status();
  });
}

nvte_ep_status_t nvte_ep_comm_from_nccl(void* nccl_comm, nvte_ep_comm_t* comm) {
  return boundary("nvte_ep_comm_from_nccl", [&]() -> Status {
    if (nccl_comm == nullptr) return invalid_argument("nccl_comm: expected an ncclComm_t, got NULL");
    if (comm == nullptr) return invalid_argument("comm: expected a pointer, got NULL");
    std::unique_ptr<Communicator> created;
    NVTE_EP_TRY(borrow_nccl_communicator(nccl_comm, &created));
    *comm = comms().add(std::move(created));
    return Status();
  });
}

nvte_ep_status_t nvte_ep_comm_destroy(nvte_ep_comm_t comm) {
  return boundary("nvte_ep_comm_destroy", [&]() -> Status {
    if (comm == nullptr) return Status();
    std::shared_ptr<Communicator> last;
    return comms().remove(comm, "comm", &last);
  });
}

}  // extern "C"
