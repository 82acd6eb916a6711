// Groups.
#include <algorithm>
#include <limits>

#include "api/guard.h"
#include "api/objects.h"
#include "core/struct_reader.h"

using namespace nvte_ep;

namespace {

constexpr int64_t kDefaultTimeoutNs = 100'000'000'000;
constexpr int64_t kMostElements = int64_t{1}
                                  << 56;  // of an array: sums of a few sizes in bytes do not overflow
constexpr int64_t kLongestTimeoutNs = 1'000'000'000'000'000'000;  // 31 years: clocks do not overflow

Status read_config(const nvte_ep_group_config_t* config, const Communicator& comm, GroupSettings* settings,
                   int32_t* transport) {
  nvte_ep_group_config_t c;
  NVTE_EP_TRY(read_struct(config, NVTE_EP_GROUP_CONFIG_V1_SIZE, "config", &c));
  const int32_t default_device =
      comm.kind() == NVTE_EP_COMM_THREADS ? NVTE_EP_DEVICE_CPU : NVTE_EP_DEVICE_CUDA;
  settings->device.type = c.device_type == 0 ? default_device : c.device_type;
  if (settings->device.type == NVTE_EP_DEVICE_CUDA_HOST) settings->device.type = NVTE_EP_DEVICE_CPU;
  if (settings->device.type != NVTE_EP_DEVICE_CPU && settings->device.type != NVTE_EP_DEVICE_CUDA) {
    return unsupported("config.device_type: expected 1 (CPU) or 2 (CUDA), got ", c.device_type);
  }
  const bool unnamed = c.device_type == 0 && c.device_id == 0;
  settings->device.id = settings->device.is_host() ? 0 : unnamed ? comm.device() : c.device_id;

  if (c.num_experts < 1 || c.num_experts % comm.size() != 0) {
    return invalid_argument("config.num_experts: expected a positive multiple of the ", comm.size(),
                            " ranks, got ", c.num_experts);
  }
  settings->num_experts = c.num_experts;
  settings->max_top_k = c.max_top_k == 0 ? std::min(c.num_experts, 32) : c.max_top_k;
  if (settings->max_top_k < 1)
    return invalid_argument("config.max_top_k: expected 1 or more, got ", c.max_top_k);
  NVTE_EP_TRY([&]() -> Status {
    if (c.hidden > 0 && c.hidden % 16 == 0 && c.hidden <= (int64_t{1} << 31)) return Status();
    return invalid_argument("config.hidden: expected a positive multiple of 16, at most 2^31, got ",
                            c.hidden);
  }());
  settings->hidden = c.hidden;
  if (c.max_tokens_per_rank < 1 || c.max_tokens_per_rank > std::numeric_limits<int32_t>::max()) {
    return invalid_argument("config.max_tokens_per_rank: expected 1 to 2^31 - 1, got ",
                            c.max_tokens_per_rank);
  }
  if (c.max_tokens_per_rank > kMostElements / c.hidden) {
    return invalid_argument("config.max_tokens_per_rank: expected a number of tokens that fits memory, got ",
                            c.max_tokens_per_rank, " of hidden ", c.hidden);
  }
  if (settings->max_top_k > kMostElements / c.max_tokens_per_rank) {
    return invalid_argument("config.max_top_k: expected a number of choices that fits memory, got ",
                            c.max_top_k);
  }
  settings->max_tokens_per_rank = c.max_tokens_per_rank;
  if (c.recv_capacity < 0 || c.recv_capacity >= (int64_t{1} << kSlotBits) ||
      c.recv_capacity > (int64_t{1} << 60) / (4 * c.hidden)) {
    return invalid_argument(
        "config.recv_capacity: expected 0 (eager) or a number of slots that fits memory, got ",
        c.recv_capacity);
  }
  settings->recv_capacity = c.recv_capacity;
  if (c.num_sms < 0) return invalid_argument("config.num_sms: expected 0 or more, got ", c.num_sms);
  settings->num_sms = c.num_sms;
  if (c.timeout_ns < 0) return invalid_argument("config.timeout_ns: expected 0 or more, got ", c.timeout_ns);
  settings->timeout_ns = c.timeout_ns == 0 ? kDefaultTimeoutNs : std::min(c.timeout_ns, kLongestTimeoutNs);
  NVTE_EP_TRY(check_enum(c.overflow, 2, "config.overflow"));
  settings->drop_on_overflow = c.overflow == NVTE_EP_ON_OVERFLOW_DROP;
  NVTE_EP_TRY(check_bool(c.zero_copy, "config.zero_copy"));
  settings->zero_copy = c.zero_copy != 0;
  if (settings->zero_copy && settings->eager()) {
    return invalid_argument("config.zero_copy: expected a recv_capacity with it, got 0 (eager)");
  }
  if ((c.alloc_fn == nullptr) != (c.free_fn == nullptr)) {
    return invalid_argument("config.alloc_fn: expected together with free_fn, got only one of them");
  }
  if (c.alloc_fn != nullptr && !settings->device.is_host()) {
    return unsupported(
        "config.alloc_fn: the transports of device memory take theirs from CUDA so far, expected NULL");
  }
  *transport = c.transport;
  return Status();
}

Status find_group(nvte_ep_group_t group, std::shared_ptr<Group>* found) {
  return groups().find(group, "group", found);
}

}  // namespace

extern "C" {

nvte_ep_status_t nvte_ep_group_create(nvte_ep_comm_t comm, const nvte_ep_group_config_t* config,
                                      nvte_ep_group_t* group) {
  return boundary("nvte_ep_group_create", [&]() -> Status {
    std::shared_ptr<Communicator> communicator;
    NVTE_EP_TRY(comms().find(comm, "comm", &communicator));
    if (group == nullptr) return invalid_argument("group: expected a pointer, got NULL");
    GroupSettings settings;
    int32_t transport;
    NVTE_EP_TRY(read_config(config, *communicator, &settings, &transport));
    std::shared_ptr<Group> created;
    NVTE_EP_TRY(Group::create(communicator, settings, transport, &created));
    *group = groups().add(std::move(created));
    return Status();
  });
}

nvte_ep_status_t nvte_ep_group_destroy(nvte_ep_group_t group) {
  return boundary("nvte_ep_group_destroy", [&]() -> Status {
    if (group == nullptr) return Status();
    std::shared_ptr<Group> last;
    NVTE_EP_TRY(groups().remove(group, "group", &last));
    last->close();
    return Status();
  });
}

nvte_ep_status_t nvte_ep_group_memory(nvte_ep_comm_t comm, const nvte_ep_group_config_t* config,
                                      nvte_ep_memory_info_t* info) {
  return boundary("nvte_ep_group_memory", [&]() -> Status {
    std::shared_ptr<Communicator> communicator;
    NVTE_EP_TRY(comms().find(comm, "comm", &communicator));
    GroupSettings settings;
    int32_t transport;
    NVTE_EP_TRY(read_config(config, *communicator, &settings, &transport));
    NVTE_EP_TRY(check_out_struct(info, NVTE_EP_MEMORY_INFO_V1_SIZE, "info"));
    nvte_ep_memory_info_t out = NVTE_EP_MEMORY_INFO_INIT;
    NVTE_EP_TRY(transport_memory(*communicator, settings, transport, &out.group_bytes, &out.exchange_bytes,
                                 &out.handle_bytes));
    write_struct(out, info);
    return Status();
  });
}

nvte_ep_status_t nvte_ep_group_info(nvte_ep_group_t group, nvte_ep_group_info_t* info) {
  return boundary("nvte_ep_group_info", [&]() -> Status {
    std::shared_ptr<Group> g;
    NVTE_EP_TRY(find_group(group, &g));
    NVTE_EP_TRY(check_out_struct(info, NVTE_EP_GROUP_INFO_V1_SIZE, "info"));
    nvte_ep_group_info_t out = NVTE_EP_GROUP_INFO_INIT;
    NVTE_EP_TRY(g->with_transport([&](GroupTransport& transport) -> Status {
      const Capabilities capabilities = transport.capabilities();
      out.transport = capabilities.name;
      out.capturable = capabilities.capturable && !g->settings().eager();
      out.slot_order_exact = capabilities.slot_order_exact;
      return Status();
    }));
    out.num_ranks = g->num_ranks();
    out.rank = g->rank();
    out.num_local_experts = g->local_experts();
    out.max_top_k = g->settings().max_top_k;
    out.recv_capacity = g->settings().recv_capacity;
    write_struct(out, info);
    return Status();
  });
}

nvte_ep_status_t nvte_ep_group_poll_error(nvte_ep_group_t group, nvte_ep_error_info_t* info) {
  Finding finding;
  const nvte_ep_status_t status = boundary("nvte_ep_group_poll_error", [&]() -> Status {
    std::shared_ptr<Group> g;
    NVTE_EP_TRY(find_group(group, &g));
    NVTE_EP_TRY(check_out_struct(info, NVTE_EP_ERROR_INFO_V1_SIZE, "info"));
    NVTE_EP_TRY(g->with_transport([&](GroupTransport& transport) -> Status {
      finding = transport.poll();
      return Status();
    }));
    nvte_ep_error_info_t out = NVTE_EP_ERROR_INFO_INIT;
    out.status = finding.status.code();
    out.rank = finding.rank;
    out.handle = static_cast<nvte_ep_handle_t>(const_cast<void*>(g->public_handle(finding.handle_id)));
    out.count = finding.count;
    out.needed_rows = finding.needed_rows;
    write_struct(out, info);
    return Status();
  });
  if (status == NVTE_EP_STATUS_OK && !finding.status.ok()) {
    LastError::set("nvte_ep_group_poll_error", finding.status.message());
  }
  return status;
}

nvte_ep_status_t nvte_ep_group_abort(nvte_ep_group_t group) {
  return boundary("nvte_ep_group_abort", [&]() -> Status {
    std::shared_ptr<Group> g;
    NVTE_EP_TRY(find_group(group, &g));
    return g->with_transport([&](GroupTransport& transport) -> Status {
      transport.abort();
      return Status();
    });
  });
}

nvte_ep_status_t nvte_ep_mem_alloc(nvte_ep_group_t group, size_t bytes, void** pointer) {
  return boundary("nvte_ep_mem_alloc", [&]() -> Status {
    std::shared_ptr<Group> g;
    NVTE_EP_TRY(find_group(group, &g));
    if (pointer == nullptr) return invalid_argument("pointer: expected a pointer, got NULL");
    if (bytes == 0 || bytes > (size_t{1} << 44) - 1) {
      return invalid_argument("bytes: expected 1 to 2^44 - 1, got ", bytes);
    }
    return g->with_transport(
        [&](GroupTransport& transport) { return transport.mem_alloc(static_cast<int64_t>(bytes), pointer); });
  });
}

nvte_ep_status_t nvte_ep_mem_free(nvte_ep_group_t group, void* pointer) {
  return boundary("nvte_ep_mem_free", [&]() -> Status {
    std::shared_ptr<Group> g;
    NVTE_EP_TRY(find_group(group, &g));
    if (pointer == nullptr) return Status();
    return g->with_transport([&](GroupTransport& transport) { return transport.mem_free(pointer); });
  });
}

}  // extern "C"
