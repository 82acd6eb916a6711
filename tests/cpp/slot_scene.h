// A routing, and rows that went to slots by way of an engine which hands them out expert by expert, in any order.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "backends/host_backend.h"

namespace nvte_ep::testing {

struct SlotScene {
  int32_t ranks = 2, experts = 8, top_k = 3, rank = 1;
  int64_t tokens = 40, alignment = 8, capacity = 88;
  int64_t row_bytes = 48;

  std::vector<int32_t> indices;  // [ranks, tokens, top_k]
  std::vector<int64_t> totals, slot_source, kept_of_expert;
  std::vector<int32_t> slot_k, slot_expert, kept;
  std::vector<SlotAddress> in_slots, slots;
  Route route;

  explicit SlotScene(uint64_t seed = 5) {
    std::mt19937_64 rng(seed);
    for (int64_t t = 0; t < ranks * tokens; ++t) {
      std::vector<int32_t> all(static_cast<size_t>(experts));
      for (int32_t e = 0; e < experts; ++e) all[static_cast<size_t>(e)] = e;
      std::shuffle(all.begin(), all.end(), rng);
      for (int32_t k = 0; k < top_k; ++k) {
        indices.push_back(rng() % 8 == 0 ? -1 : all[static_cast<size_t>(k)]);
      }
    }
    const size_t choices = static_cast<size_t>(tokens * top_k);
    totals.resize(3);
    slot_source.resize(static_cast<size_t>(capacity));
    slot_k.resize(static_cast<size_t>(capacity));
    slot_expert.resize(static_cast<size_t>(capacity));
    in_slots.resize(choices * static_cast<size_t>(ranks));
    kept_of_expert.resize(static_cast<size_t>(local_experts()));
    slots.resize(choices);
    kept.resize(choices);
    route.rank = rank;
    route.num_ranks = ranks;
    route.num_experts = experts;
    route.top_k = top_k;
    route.alignment = alignment;
    route.capacity = capacity;
    route.tokens = tokens;
    route.indices = indices.data();
    route.totals = totals.data();
    route.tokens_per_expert = kept_of_expert.data();
    route.slot_source = slot_source.data();
    route.slot_k = slot_k.data();
    route.slot_expert = slot_expert.data();
    route.in_slots = in_slots.data();
    route.slots = slots.data();
    route.kept_indices = kept.data();
    route.kept_experts = kept_experts();
    HostBackend host(1);
    (void)host.route(route, nullptr);
  }

  int64_t in_use() const { return totals[0]; }
  int32_t local_experts() const { return experts / ranks; }
  int32_t kept_experts() const { return local_experts() + 2; }
  int64_t rows_per_expert() const { return tokens * ranks; }
  int64_t stride() const { return row_bytes + kTagBytes + 16; }  // with room for the weights

  static uint8_t byte(int64_t rank, int64_t token, int64_t i) {
    return static_cast<uint8_t>(rank * 101 + token * 7 + i);
  }
  static float weight(int64_t rank, int64_t token, int64_t k) {
    return static_cast<float>(1000 * rank + 10 * token + k + 1);
  }
  std::vector<float> weights_of(int32_t source) const {
    std::vector<float> weights;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < top_k; ++k) weights.push_back(weight(source, t, k));
    }
    return weights;
  }

  TagRows tag(int32_t source, uint8_t* rows, const float* weights) const {
    TagRows t{};
    t.rows = rows;
    t.row_stride = stride();
    t.trailer = row_bytes;
    t.weights = weights;
    t.weights_stride = top_k;
    t.tokens = tokens;
    t.rank = source;
    t.top_k = top_k;
    return t;
  }

  // What comes: every kept copy at its expert, shuffled, and how many at each; where there are nobody's, last at the first expert
  // rows with tags as an aborted exchange may leave them.
  void deliver(std::vector<uint8_t>* came, std::vector<int32_t>* counts, bool with_nobodys) const {
    HostBackend host(1);
    came->assign(static_cast<size_t>(local_experts() * rows_per_expert() * stride()), 0xEE);
    counts->assign(static_cast<size_t>(local_experts()), 0);
    std::vector<std::vector<uint8_t>> sent;
    for (int32_t r = 0; r < ranks; ++r) {
      sent.emplace_back(static_cast<size_t>(tokens * stride()));
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t i = 0; i < row_bytes; ++i) {
          sent.back()[static_cast<size_t>(t * stride() + i)] = byte(r, t, i);
        }
      }
      const std::vector<float> weights = weights_of(r);
      (void)host.tag_rows(tag(r, sent.back().data(), weights.data()), nullptr);
    }
    std::mt19937_64 rng(9);
    std::vector<int64_t> order(in_slots.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    std::shuffle(order.begin(), order.end(), rng);
    for (int64_t i : order) {
      const SlotAddress address = in_slots[static_cast<size_t>(i)];
      if (address < 0) continue;
      const int64_t slot = address & ((int64_t{1} << kSlotBits) - 1);
      const int64_t expert = slot_expert[static_cast<size_t>(slot)];
      const int64_t source = i / (tokens * top_k), token = i / top_k % tokens;
      const int64_t at = expert * rows_per_expert() + (*counts)[static_cast<size_t>(expert)]++;
      std::memcpy(came->data() + at * stride(), sent[static_cast<size_t>(source)].data() + token * stride(),
                  static_cast<size_t>(stride()));
    }
    if (!with_nobodys) return;
    const int32_t nobodys[][2] = {
        {-5, 0}, {ranks, 0}, {0, -1}, {0, static_cast<int32_t>(tokens)}, {1 << 30, 1 << 30}};
    for (const auto& tag : nobodys) {
      std::memcpy(came->data() + counts->front()++ * stride() + row_bytes, tag, sizeof(tag));
    }
  }

  LocateRows locate(const uint8_t* came, const int32_t* counts, int64_t* place, int32_t* differs) const {
    LocateRows l{};
    l.rows = came;
    l.row_stride = stride();
    l.trailer = row_bytes;
    l.counts = counts;
    l.num_experts = local_experts();
    l.rows_per_expert = rows_per_expert();
    l.slots = in_slots.data();
    l.num_ranks = ranks;
    l.tokens = tokens;
    l.top_k = top_k;
    l.slot_source = slot_source.data();
    l.slot_expert = slot_expert.data();
    l.num_slots = capacity;
    l.slot_count = IndexView{const_cast<int64_t*>(totals.data()), true};
    l.place = place;
    l.expected = kept_of_expert.data();
    l.num_expected = local_experts();
    l.differs = differs;
    return l;
  }
};

}  // namespace nvte_ep::testing
