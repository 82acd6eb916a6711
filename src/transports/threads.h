// `threads`: N ranks as threads of one process, host memory. It defines the semantics of every transport. The communicator
// also serves other in-process transports: it is only a place to meet.
#ifndef NVTE_EP_TRANSPORTS_THREADS_H_
#define NVTE_EP_TRANSPORTS_THREADS_H_

#include <memory>

#include "core/transport.h"

namespace nvte_ep {

class Rendezvous;

// id names a world of ranks within this process (see thread_world_id); null with one rank.
Status create_thread_communicator(const uint8_t* id, int32_t rank, int32_t size,
                                  std::unique_ptr<Communicator>* communicator);
void thread_world_id(uint8_t* id);
// Where the ranks of comm, a communicator of kind THREADS, meet for their next group.
std::shared_ptr<Rendezvous> next_rendezvous(Communicator* comm);

Status probe_threads(const Communicator& comm, const GroupSettings& settings);
Status create_threads(Communicator* comm, const GroupSettings& settings, Backend* backend,
                      std::unique_ptr<GroupTransport>* group);
void threads_memory(const Communicator& comm, const GroupSettings& settings, int64_t* group_bytes,
                    int64_t* exchange_bytes, int64_t* handle_bytes);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_THREADS_H_
