// `nccl_ep`: NVIDIA's NCCL EP in high-throughput mode. Its engine puts rows into slots and sums slots into tokens; which slot
// holds what is decided by our own prepare, whose order it shares: NCCL EP is given the kept indices only, so it sees no
// illegal or repeated index and never overflows.
//
// zero_copy: dispatch writes straight into the peers' symmetric memory, combine and dispatch backward read it there, and add
// the slots of a token in place, unless a rank is alone: what lies in expert_out and grad_received is changed.
#ifndef NVTE_EP_TRANSPORTS_NCCL_EP_H_
#define NVTE_EP_TRANSPORTS_NCCL_EP_H_

#include <memory>

#include "core/transport.h"

namespace nvte_ep {

// NCCL EP with all that it needs to compile its kernels; UNSUPPORTED with what is missing.
Status nccl_ep_ready();

Status probe_nccl_ep(const Communicator& comm, const GroupSettings& settings);
Status create_nccl_ep(Communicator* comm, const GroupSettings& settings, Backend* backend,
                      std::unique_ptr<GroupTransport>* group);
void nccl_ep_memory(const Communicator& comm, const GroupSettings& settings, int64_t* group_bytes,
                    int64_t* exchange_bytes, int64_t* handle_bytes);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_NCCL_EP_H_
