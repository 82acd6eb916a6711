// Rows of slots where they are, for what reads them from there: operands with columns, gradients times weights.
#ifndef NVTE_EP_TRANSPORTS_PEER_FOUND_ROWS_H_
#define NVTE_EP_TRANSPORTS_PEER_FOUND_ROWS_H_

#include "transports/peer/dispatch.h"

namespace nvte_ep {

// The experts' second-level exponents (NVFP4), for an operand with columns.
struct FoundExponents {
  uint8_t* found = nullptr;  // [local experts, 2] as CodecOptions::expert_exponents; null: not wanted
  uint32_t* sums = nullptr;  // [local experts] zero between launches
  TravellingExponents maxima;
  int64_t token_scale_offset = 0;
  const float* fixed_expert_scale = nullptr;
  bool column_max = false;
  float* amax = nullptr;  // the operand's
  float* columnwise_amax = nullptr;
  float* expert_scale = nullptr;
  float* columnwise_expert_scale = nullptr;
  int32_t* findings = nullptr;
};

struct FindRowsArguments {
  Pools pools;
  RouteMaps maps;
  TravellingRows rows;
  const uint8_t* zero_row;  // of padding
  const uint8_t** found;    // [slots]
  uint8_t* copies;  // [size - 1, tokens] the peers' rows will be there; null: they stay where they are
  FoundExponents exponents;
  uint32_t* ticket;
};
// Where the row of each slot in use lies.
Status launch_find_rows(const FindRowsArguments& arguments, const LaunchContext& context);

// The peers' rows to their copies: each crosses the links once. The next kernel may run beside it.
Status launch_copy_rows(const FindRowsArguments& arguments, const LaunchContext& context);

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_FOUND_ROWS_H_
