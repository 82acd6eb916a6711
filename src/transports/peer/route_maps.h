// What prepare leaves for the later steps of a handle, in device memory.
#ifndef NVTE_EP_TRANSPORTS_PEER_ROUTE_MAPS_H_
#define NVTE_EP_TRANSPORTS_PEER_ROUTE_MAPS_H_

#include <cstdint>

#include "formats/numerics.h"

namespace nvte_ep {

struct RouteMaps {
  // The group as this handle sees it
  int32_t rank = 0;
  int32_t size = 0;
  int32_t num_experts = 0;  // of all ranks
  int32_t top_k = 0;
  int32_t tokens = 0;  // max_tokens_per_rank
  int64_t alignment = 1;
  int64_t capacity = 0;

  // Every rank's tokens on this rank
  int32_t* row_slots = nullptr;    // [size, tokens, top_k] the slot of a choice, -1: not here
  int64_t* slot_source = nullptr;  // [total_rows] rank << 32 | token, -1: padding
  // This rank's tokens on all ranks
  int32_t* kept_experts = nullptr;  // [tokens, top_k] the expert of a choice, -1: unrouted or dropped
  uint32_t* holders = nullptr;      // [tokens, holder_words()] bit r: rank r has a copy
  // This rank's experts, as core/routing.h has them
  int64_t* tokens_routed = nullptr;
  int64_t* tokens_per_expert = nullptr;
  int64_t* rows_per_expert = nullptr;
  int64_t* row_offsets = nullptr;
  int64_t* scale_row_offsets = nullptr;
  int64_t* totals = nullptr;  // [2] total_rows, dropped_rows

  NVTE_EP_HD int32_t local_experts() const { return num_experts / size; }
  NVTE_EP_HD int32_t holder_words() const { return (size + 31) / 32; }
  NVTE_EP_HD int64_t choices() const { return static_cast<int64_t>(tokens) * top_k; }
};

// Where a rank's part lies among those of all ranks but one, and the rank whose part lies there.
NVTE_EP_HD int32_t place_among_others(int32_t rank, int32_t without) {
  return rank < without ? rank : rank - 1;
}
NVTE_EP_HD int32_t rank_among_others(int32_t place, int32_t without) {
  return place < without ? place : place + 1;
}

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_ROUTE_MAPS_H_
