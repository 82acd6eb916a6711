// prepare of a few tokens: one cluster of thread blocks, in one launch. A rank's choices go straight into every peer's pool, each beside the
// number of the meeting: there is no flag to wait for after the data.
#ifndef NVTE_EP_TRANSPORTS_PEER_PREPARE_FEW_H_
#define NVTE_EP_TRANSPORTS_PEER_PREPARE_FEW_H_

#include "transports/peer/prepare.h"

namespace nvte_ep {

// The same on every rank of a group.
bool few_choices(const RouteMaps& maps);
Status launch_prepare_few(const PrepareArguments& arguments, const LaunchContext& context);

// Of PrepareArguments::inbox; 0 where no handle of the group can have few choices.
int64_t prepare_inbox_bytes(int32_t size, int64_t tokens, int32_t max_top_k);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_PREPARE_FEW_H_
