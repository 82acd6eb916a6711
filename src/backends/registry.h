// What the backend list says of itself, for nvte_ep_build_info.
#ifndef NVTE_EP_BACKENDS_REGISTRY_H_
#define NVTE_EP_BACKENDS_REGISTRY_H_

#include <vector>

#include "core/backend.h"

namespace nvte_ep {

std::vector<Availability> list_backends();

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_REGISTRY_H_
