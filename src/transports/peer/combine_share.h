// Which warps of a combine make partial rows and which make sums.
#ifndef NVTE_EP_TRANSPORTS_PEER_COMBINE_SHARE_H_
#define NVTE_EP_TRANSPORTS_PEER_COMBINE_SHARE_H_

#include <algorithm>
#include <cstdint>

#include "formats/numerics.h"

namespace nvte_ep {

// The items of a warp, all of one kind: next, next + stride, .. below end.
struct CombineShare {
  bool is_sum;
  uint32_t next, stride, end;
};

// Of 2^32 warps, those that make partial rows: by the work, but a quarter at least, and of the others too. So sums, which wait
// for links, start early, and four warps have some of both kinds.
inline uint32_t partial_share(uint32_t sums, uint32_t partials) {
  constexpr uint64_t kQuarter = uint64_t{1} << 30;
  const uint64_t all = uint64_t{sums} + partials;
  return static_cast<uint32_t>(
      std::min(std::max((uint64_t{partials} << 32) / std::max<uint64_t>(all, 1), kQuarter), 3 * kQuarter));
}

// sums, partials: items of all warps. warps: a multiple of four. share: partial_share(sums, partials). Warps of one kind lie
// evenly among those of the other.
NVTE_EP_HD CombineShare share_of(uint32_t warp, uint32_t warps, uint32_t sums, uint32_t partials,
                                 uint32_t share) {
  if (sums == 0) return {false, warp, warps, partials};
  if (partials == 0) return {true, warp, warps, sums};
  const auto before = [share](uint32_t end) { return static_cast<uint32_t>(uint64_t{end} * share >> 32); };
  const uint32_t others = before(warps), place = before(warp);
  if (before(warp + 1) != place) return {false, place, others, partials};
  return {true, warp - place, warps - others, sums};
}

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_COMBINE_SHARE_H_
