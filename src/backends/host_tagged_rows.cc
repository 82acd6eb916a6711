// Rows that carry where they come from, on the host.
#include <algorithm>
#include <cstring>

#include "backends/host_backend.h"

namespace nvte_ep {
namespace {

int64_t slot_of(SlotAddress address) { return address & ((int64_t{1} << kSlotBits) - 1); }

}  // namespace

Status HostBackend::tag_rows(const TagRows& t, nvte_ep_stream_t) {
  for (int64_t token = 0; token < t.tokens; ++token) {
    uint8_t* trailer = t.rows + token * t.row_stride + t.trailer;
    const int32_t tag[kTagBytes / 4] = {t.rank, static_cast<int32_t>(token)};
    std::memcpy(trailer, tag, sizeof(tag));
    float* weights = reinterpret_cast<float*>(trailer + kTagBytes);
    std::fill_n(weights, t.top_k, 0.0f);
    if (t.weights != nullptr) std::copy_n(t.weights + token * t.weights_stride, t.top_k, weights);
  }
  return Status();
}

Status HostBackend::locate_rows(const LocateRows& l, nvte_ep_stream_t) {
  const int64_t in_use = std::min(l.num_slots, load_index(l.slot_count, 0));
  for (int64_t s = 0; s < in_use; ++s) {
    if (l.slot_source[s] < 0) l.place[s] = -1;
  }
  for (int32_t e = 0; e < l.num_experts; ++e) {
    if (l.counts[e] != (e < l.num_expected ? l.expected[e] : 0)) *l.differs = 1;
    for (int64_t i = 0; i < std::min<int64_t>(l.counts[e], l.rows_per_expert); ++i) {
      const int64_t at = e * l.rows_per_expert + i;
      int32_t tag[2];
      std::memcpy(tag, l.rows + at * l.row_stride + l.trailer, sizeof(tag));
      const bool known = tag[0] >= 0 && tag[0] < l.num_ranks && tag[1] >= 0 && tag[1] < l.tokens;
      const SlotAddress* slots = l.slots + (known ? tag[0] * l.tokens + tag[1] : 0) * l.top_k;
      bool found = false;
      for (int32_t k = 0; known && k < l.top_k; ++k) {
        if (slots[k] < 0 || l.slot_expert[slot_of(slots[k])] != e) continue;
        l.place[slot_of(slots[k])] = at;
        found = true;
      }
      if (!found) *l.differs = 1;
    }
  }
  return Status();
}

Status HostBackend::scatter_rows(const ScatterRows& s, nvte_ep_stream_t) {
  const int64_t bytes = s.rows.columns() * dtype_bytes(s.rows.dtype);
  const int64_t in_use = std::min(s.rows.rows(), load_index(s.slot_count, 0));
  for (int64_t slot = 0; slot < in_use; ++slot) {
    if (s.place[slot] < 0) continue;
    std::memcpy(s.out + s.place[slot] * s.out_stride, s.rows.row(slot), static_cast<size_t>(bytes));
  }
  return Status();
}

}  // namespace nvte_ep
