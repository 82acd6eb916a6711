// The host's part of dispatch and combine: rows into slots, and slots summed back to tokens.
#include <algorithm>
#include <vector>

#include "backends/host_backend.h"
#include "backends/host_rows.h"
#include "backends/parallel_for.h"

namespace nvte_ep {
namespace {

int32_t rank_of(SlotAddress address) { return static_cast<int32_t>(address >> kSlotBits); }
int64_t slot_of(SlotAddress address) { return address & ((int64_t{1} << kSlotBits) - 1); }

// sum += weight * row, two roundings.
void add_slot(const ReduceRows& r, SlotAddress address, std::vector<float>* row, std::vector<float>* sum) {
  const int32_t rank = rank_of(address);
  const int64_t slot = slot_of(address);
  const int64_t hidden = r.result.columns();
  load_row(r.rows.row(rank, slot), r.result.dtype, hidden, row->data());
  const float* weight = r.weights.floats(rank, slot);
  if (weight == nullptr) {
    for (int64_t h = 0; h < hidden; ++h) (*sum)[h] = add_rn((*sum)[h], (*row)[h]);
  } else {
    const float w = *weight;
    for (int64_t h = 0; h < hidden; ++h) (*sum)[h] = add_rn((*sum)[h], mul_rn(w, (*row)[h]));
  }
}

// What a partial row becomes when it crosses in MXFP8.
void round_to_mxfp8(std::vector<float>* partial) {
  uint8_t codes[Mxfp8::kBlock];
  for (size_t b = 0; b < partial->size(); b += Mxfp8::kBlock) {
    const uint8_t scale = Mxfp8::encode_block(partial->data() + b, 1, codes, 1);
    for (int i = 0; i < Mxfp8::kBlock; ++i) (*partial)[b + i] = Mxfp8::decode(codes[i], scale);
  }
}

void sum_token(const ReduceRows& r, const SlotAddress* slots, std::vector<float>* row,
               std::vector<float>* partial, std::vector<float>* sum) {
  std::fill(sum->begin(), sum->end(), 0.0f);
  if (r.partial_format == NVTE_EP_FORMAT_BF16) {
    for (int32_t k = 0; k < r.top_k; ++k) {
      if (slots[k] >= 0) add_slot(r, slots[k], row, sum);
    }
    return;
  }
  for (int32_t rank = 0; rank < r.num_ranks; ++rank) {
    bool any = false;
    for (int32_t k = 0; k < r.top_k; ++k) {
      if (slots[k] < 0 || rank_of(slots[k]) != rank) continue;
      if (!any) std::fill(partial->begin(), partial->end(), 0.0f);
      any = true;
      add_slot(r, slots[k], row, partial);
    }
    if (!any) continue;
    round_to_mxfp8(partial);
    for (size_t h = 0; h < sum->size(); ++h) (*sum)[h] = add_rn((*sum)[h], (*partial)[h]);
  }
}

}  // namespace

Status HostBackend::gather_rows(const GatherRows& g, nvte_ep_stream_t) {
  const int64_t slots = g.slot_count.data ? std::min(g.slots, load_index(g.slot_count, 0)) : g.slots;
  parallel_for(slots, grain_of(g.row_bytes), max_threads_, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t source = g.slot_source != nullptr ? g.slot_source[s] : s;
      const int64_t rank = source >> 32;
      const int64_t token = source & 0xFFFFFFFF;
      if (source < 0 ? g.part.which == TokenPart::kOthers : !g.part.has(rank, token)) continue;
      if (g.out != nullptr) {
        uint8_t* out = static_cast<uint8_t*>(g.out) + s * g.out_stride;
        if (source < 0) {
          std::memset(out, 0, static_cast<size_t>(g.row_bytes));
        } else {
          std::memcpy(out, g.rows.row(rank, token), static_cast<size_t>(g.row_bytes));
        }
      }
      if (g.out_weights != nullptr) {
        g.out_weights[s] = source < 0 ? 0.0f : g.weights.floats(rank, token)[g.slot_k[s]];
      }
    }
  });
  return Status();
}

Status HostBackend::reduce_rows(const ReduceRows& r, nvte_ep_stream_t) {
  const int64_t hidden = r.result.columns();
  parallel_for(r.result.rows(), grain_of(hidden * r.top_k), max_threads_, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(hidden)), partial(row), sum(row);
    for (int64_t t = begin; t < end; ++t) {
      sum_token(r, r.slots + t * r.top_k, &row, &partial, &sum);
      if (r.accumulate) {
        load_row(r.result.row(t), r.result.dtype, hidden, row.data());
        for (int64_t h = 0; h < hidden; ++h) sum[h] = add_rn(row[h], sum[h]);
      }
      store_row(sum.data(), r.result.dtype, hidden, r.result.row(t));
    }
  });
  return Status();
}

Status HostBackend::merge_slots(const MergeSlots& m, nvte_ep_stream_t) {
  ReduceRows r{};
  r.num_ranks = 1;
  r.top_k = m.top_k;
  r.rows.block = m.rows.data;
  r.rows.row_stride = m.rows.stride * dtype_bytes(m.rows.dtype);
  r.weights.block = m.weights;
  r.weights.row_stride = 4;
  r.result = m.rows;  // for the type of the rows
  const int64_t columns = m.out.columns();
  std::vector<float> row(static_cast<size_t>(columns)), partial, sum(row);
  for (int64_t s = 0; s < load_index(m.slot_count, 0); ++s) {
    const int64_t source = m.slot_source[s];
    if (source < 0) continue;
    const SlotAddress* slots = m.slots + ((source >> 32) * m.tokens + (source & 0xFFFFFFFF)) * m.top_k;
    const SlotAddress* first = std::find_if(slots, slots + m.top_k, [](SlotAddress a) { return a >= 0; });
    if (slot_of(*first) == s) {
      sum_token(r, slots, &row, &partial, &sum);
    } else {
      std::fill(sum.begin(), sum.end(), 0.0f);
    }
    store_row(sum.data(), m.out.dtype, columns, m.out.row(s));
  }
  return Status();
}

Status HostBackend::add_sums(const float* sums, const TensorView& result, nvte_ep_stream_t) {
  const int64_t hidden = result.columns();
  std::vector<float> row(static_cast<size_t>(hidden));
  for (int64_t t = 0; t < result.rows(); ++t) {
    load_row(result.row(t), result.dtype, hidden, row.data());
    for (int64_t h = 0; h < hidden; ++h) row[h] = add_rn(row[h], sums[t * hidden + h]);
    store_row(row.data(), result.dtype, hidden, result.row(t));
  }
  return Status();
}

Status HostBackend::gather_scalars(int32_t top_k, const SlotAddress* slots, const RankArrays& values,
                                   const TensorView& out, nvte_ep_stream_t) {
  for (int64_t t = 0; t < out.rows(); ++t) {
    float* row = reinterpret_cast<float*>(out.row(t));
    for (int32_t k = 0; k < top_k; ++k) {
      const SlotAddress address = slots[t * top_k + k];
      row[k] = address < 0 ? 0.0f : *values.floats(rank_of(address), slot_of(address));
    }
  }
  return Status();
}

}  // namespace nvte_ep
