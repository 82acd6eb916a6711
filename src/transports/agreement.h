// What ranks must agree on, in a form that travels.
#ifndef NVTE_EP_TRANSPORTS_AGREEMENT_H_
#define NVTE_EP_TRANSPORTS_AGREEMENT_H_

#include <array>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "transports/device_group.h"

namespace nvte_ep {

// The step and the values of one rank; the size is fixed.
constexpr int kMaxAgreed = 13;
using AgreedValues = std::array<int64_t, kMaxAgreed + 2>;
AgreedValues agreed_values(const char* step, const std::vector<Agreed>& mine);

// INVALID_ARGUMENT where all, of every rank, are not the same; mine names the values.
Status check_agreement(const std::vector<Agreed>& mine, const std::vector<AgreedValues>& all);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_AGREEMENT_H_
