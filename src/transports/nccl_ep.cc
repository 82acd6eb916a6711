#include "transports/nccl_ep.h"

#include <limits>

#include "core/group.h"
#include "transports/nccl.h"
#include "transports/nccl_ep_low_latency.h"
#include "transports/nccl_ep_ranks.h"

namespace nvte_ep {

Status nccl_ep_ready() {
  const nccl_ep::Api* api = nullptr;
  return nccl_ep::load(&api);
}

Status probe_nccl_ep(const Communicator& comm, const GroupSettings& settings) {
  if (comm.kind() != NVTE_EP_COMM_NCCL) return unsupported("nccl_ep needs a communicator of kind NCCL");
  if (settings.device.is_host()) return unsupported("nccl_ep works on CUDA devices, not on host memory");
  const int64_t slots = settings.eager() ? settings.max_tokens_per_rank * comm.size() * settings.max_top_k
                                         : max_slots(settings);
  const struct {
    const char* what;
    int64_t got, most;
  } caps[] = {
      {"ranks", comm.size(), nccl_ep::kMaxRanks},
      {"tokens a rank (max_tokens_per_rank)", settings.max_tokens_per_rank, nccl_ep::kMaxTokensPerRank},
      {"choices a token (max_top_k)", settings.max_top_k, nccl_ep::kMaxTopK},
      {"experts a rank", padded_local_experts(settings, comm.size()), nccl_ep::kMaxLocalExperts},
      {"slots", slots, std::numeric_limits<int32_t>::max()}};
  for (const auto& cap : caps) {
    if (cap.got > cap.most) {
      return unsupported("nccl_ep: NCCL EP takes at most ", cap.most, " ", cap.what, ", got ", cap.got);
    }
  }
  return Status();
}

Status create_nccl_ep(Communicator* comm, const GroupSettings& settings, Backend* backend,
                      std::unique_ptr<GroupTransport>* group) {
  if (settings.num_sms > backend->num_sms()) {
    return invalid_argument("config.num_sms: expected at most ", backend->num_sms(), " on this device, got ",
                            settings.num_sms);
  }
  NcclCommunicator* const base = static_cast<NcclCommunicator*>(comm);
  NVTE_EP_TRY(base->check_usable(settings.device));
  auto ranks = std::make_unique<NcclEpRanks>(base->api(), settings, backend, comm->rank(), comm->size());
  NVTE_EP_TRY(ranks->open(base));
  *group = make_slot_group("nccl_ep", settings, backend, comm->rank(), comm->size(), std::move(ranks));
  return Status();
}

// NCCL EP does not tell what a group takes before there is one: this is what its buffers add up to.
void nccl_ep_memory(const Communicator& comm, const GroupSettings& settings, int64_t* group_bytes,
                    int64_t* exchange_bytes, int64_t* handle_bytes) {
  constexpr int64_t kWorkspace = 32 << 20;
  const int64_t tokens = max_tokens(settings);
  const int64_t all_tokens = tokens * comm.size();
  const int64_t slots = settings.eager() ? all_tokens * settings.max_top_k : max_slots(settings);
  const int64_t experts = int64_t{padded_local_experts(settings, comm.size())} * comm.size();
  const int64_t staging = (2 * all_tokens + slots) * token_bytes(settings) + 2 * slots * experts * 4;
  *exchange_bytes = staging + kWorkspace + all_tokens * round_up(experts, 8) / 8;
  *group_bytes = *exchange_bytes + (tokens + settings.recv_capacity) * token_bytes(settings) + tokens * 8;
  // Rows are packed, received and summed in the group's buffers, not in the handle's.
  const int64_t maps = slots * (experts / comm.size() + 8 * settings.max_top_k) + all_tokens * 16 +
                       tokens * (experts * 4 + settings.max_top_k * 16);
  *handle_bytes = device_handle_bytes(settings, comm.size()) - handle_scratch_bytes(settings) + maps +
                  max_slots(settings) * 8;
  if (!low_latency_fits(settings, comm.size())) return;
  // Two banks of what every expert may send back, and what came.
  const int64_t rows = tokens * experts * low_latency_row_bytes(token_bytes(settings), settings.max_top_k);
  *exchange_bytes += 2 * rows + kWorkspace;
  *group_bytes += 3 * rows + kWorkspace;
  *handle_bytes += all_tokens * (settings.max_top_k + 1) * 4 + max_slots(settings) * 8;
}

}  // namespace nvte_ep
