// A plain model of a layer, written from the contract and not from src/: which slot takes which copy of which token, what
// travels, and what comes back. Single threaded, nothing shared. Bytes of a row come from the codecs of the C ABI, which the
// golden vectors check; BF16 and all sums are done here.
#ifndef NVTE_EP_TESTS_MODEL_H_
#define NVTE_EP_TESTS_MODEL_H_

#include "ranks.h"

namespace ep_test {

// ---- formats ---------------------------------------------------------------------------------------------------------------

inline const char* format_name(int32_t format) {
  nvte_ep_format_info_t info = NVTE_EP_FORMAT_INFO_INIT;
  require(nvte_ep_format_info(format, &info));
  return info.name;
}

// Bytes of a packed row's parts, as the header documents them.
struct RowParts {
  int64_t payload = 0, scales = 0, token_scale_at = 0, bytes = 0;
};
inline RowParts row_parts(int32_t format, int64_t hidden) {
  const auto up = [](int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; };
  switch (format) {
    case NVTE_EP_FORMAT_MXFP8:
      return {hidden, hidden / 32, 0, up(hidden + hidden / 32, 16)};
    case NVTE_EP_FORMAT_NVFP4:
      return {hidden / 2, hidden / 16, up(hidden / 2 + hidden / 16, 4),
              up(up(hidden / 2 + hidden / 16, 4) + 4, 16)};
    default:
      return {2 * hidden, 0, 0, up(2 * hidden, 16)};
  }
}

// Functions of one scaled format.
struct Codec {
  decltype(&nvte_ep_nvfp4_pack) pack;
  decltype(&nvte_ep_nvfp4_unpack) unpack;
  decltype(&nvte_ep_nvfp4_direct_receive) direct_receive;
};
inline const Codec& codec_of(int32_t format) {
  static const Codec mxfp8 = {nvte_ep_mxfp8_pack, nvte_ep_mxfp8_unpack, nvte_ep_mxfp8_direct_receive};
  static const Codec nvfp4 = {nvte_ep_nvfp4_pack, nvte_ep_nvfp4_unpack, nvte_ep_nvfp4_direct_receive};
  return format == NVTE_EP_FORMAT_MXFP8 ? mxfp8 : nvfp4;
}

// x [T, hidden], as an array of `type` holds it, to packed rows.
inline Bytes pack(int32_t format, Type type, const std::vector<float>& x, int64_t hidden,
                  const nvte_ep_codec_options_t* options = nullptr) {
  const int64_t tokens = static_cast<int64_t>(x.size()) / hidden;
  const Bytes content = encode(type, x);
  if (format == NVTE_EP_FORMAT_BF16) return encode(Type::kBFloat16, decode(type, content));
  Array in(host_memory(), type, {tokens, hidden}, content);
  Array out(host_memory(), Type::kUInt8, {tokens, row_parts(format, hidden).bytes});
  require(codec_of(format).pack(in.tensor(), out.tensor(), options, nullptr));
  return out.get();
}

// Packed rows to the bytes of tokens of `type`.
inline Bytes unpack(int32_t format, const Bytes& rows, int64_t hidden, Type type) {
  if (format == NVTE_EP_FORMAT_BF16) return encode(type, decode(Type::kBFloat16, rows));
  const int64_t row_bytes = row_parts(format, hidden).bytes;
  const int64_t tokens = static_cast<int64_t>(rows.size()) / row_bytes;
  Array in(host_memory(), Type::kUInt8, {tokens, row_bytes}, rows);
  Array out(host_memory(), type, {tokens, hidden});
  require(codec_of(format).unpack(in.tensor(), out.tensor(), nullptr, nullptr));
  return out.get();
}

// Payload, scales and token scales in arrays of their own.
struct ApartRows {
  Bytes payload, scales, token_scales;
};
inline ApartRows quantize(int32_t format, Type type, const std::vector<float>& x, int64_t hidden,
                          const nvte_ep_codec_options_t* options) {
  const int64_t tokens = static_cast<int64_t>(x.size()) / hidden;
  const RowParts parts = row_parts(format, hidden);
  Array in(host_memory(), type, {tokens, hidden}, encode(type, x));
  Array payload(host_memory(), Type::kUInt8, {tokens, parts.payload});
  Array scales(host_memory(), Type::kUInt8, {tokens, parts.scales});
  Array token_scales;
  if (format == NVTE_EP_FORMAT_MXFP8) {
    require(nvte_ep_mxfp8_quantize(in.tensor(), payload.tensor(), scales.tensor(), options, nullptr));
  } else {
    if (options == nullptr || options->tensor_scale == nullptr) {
      token_scales = Array(host_memory(), Type::kFloat32, {tokens});
    }
    require(nvte_ep_nvfp4_quantize(in.tensor(), payload.tensor(), scales.tensor(), token_scales.tensor(),
                                   options, nullptr));
  }
  return {payload.get(), scales.get(), token_scales.get()};
}

// The same as packed rows; tensor_scale in place of token scales that are absent.
inline Bytes assemble(int32_t format, const ApartRows& apart, int64_t hidden, float tensor_scale) {
  const RowParts parts = row_parts(format, hidden);
  const int64_t tokens = static_cast<int64_t>(apart.payload.size()) / parts.payload;
  Bytes rows(static_cast<size_t>(tokens * parts.bytes), 0);
  for (int64_t t = 0; t < tokens; ++t) {
    const auto row = rows.begin() + t * parts.bytes;
    std::copy_n(apart.payload.begin() + t * parts.payload, parts.payload, row);
    std::copy_n(apart.scales.begin() + t * parts.scales, parts.scales, row + parts.payload);
    if (format != NVTE_EP_FORMAT_NVFP4) continue;
    const Bytes token_scale = apart.token_scales.empty() ? bytes_of(std::vector<float>{tensor_scale})
                                                         : Bytes(apart.token_scales.begin() + 4 * t,
                                                                 apart.token_scales.begin() + 4 * t + 4);
    std::copy_n(token_scale.begin(), 4, row + parts.token_scale_at);
  }
  return rows;
}

// ---- what ranks bring to a step ------------------------------------------------------------------------------------------------

struct RankInputs {
  int64_t tokens = 0;
  std::vector<int64_t> experts;  // [T, K] as the caller gives them, faults included
  std::vector<float> x, grad;    // [T, H]: tokens, and the gradient of combine's result
  std::vector<float> weights;    // [T, K]
};
struct Step {
  std::vector<RankInputs> ranks;
};

// ---- routing -------------------------------------------------------------------------------------------------------------------

struct SlotCopy {  // what a slot holds: the k-th choice of a token; source -1: padding
  int source = -1;
  int64_t token = -1;
  int k = -1;
};

struct Routed {  // of one rank
  std::vector<int64_t> tokens_routed, tokens_per_expert, rows_per_expert, row_offsets, scale_row_offsets;
  int64_t total_rows = 0, dropped_rows = 0, needed_rows = 0;
  std::vector<SlotCopy> slots;       // [total_rows]
  std::vector<int64_t> slot_expert;  // [total_rows], local
};

// Index of the token's first mention of the expert, or -1.
inline int first_mention(const RankInputs& in, int64_t token, int top_k, int64_t expert) {
  for (int k = 0; k < top_k; ++k) {
    if (in.experts[static_cast<size_t>(token * top_k + k)] == expert) return k;
  }
  return -1;
}

// Indices that poll_error reports: out of range, and second mentions.
inline int64_t count_faults(const RankInputs& in, int top_k, int64_t num_experts) {
  int64_t faults = 0;
  for (int64_t t = 0; t < in.tokens; ++t) {
    for (int k = 0; k < top_k; ++k) {
      const int64_t expert = in.experts[static_cast<size_t>(t * top_k + k)];
      if (expert == -1) continue;
      const bool in_range = expert >= 0 && expert < num_experts;
      faults += !in_range || first_mention(in, t, top_k, expert) != k;
    }
  }
  return faults;
}

// capacity 0: whatever is needed.
inline Routed route(const Step& step, int rank, int experts_per_rank, int top_k, int64_t alignment,
                    int64_t capacity) {
  const auto bounded = [&](int64_t offset) { return capacity == 0 ? offset : std::min(offset, capacity); };
  Routed r;
  r.row_offsets = r.scale_row_offsets = {0};
  for (int e = 0; e < experts_per_rank; ++e) {
    std::vector<SlotCopy> copies;
    for (int source = 0; source < static_cast<int>(step.ranks.size()); ++source) {
      const RankInputs& in = step.ranks[static_cast<size_t>(source)];
      for (int64_t t = 0; t < in.tokens; ++t) {
        const int k = first_mention(in, t, top_k, rank * experts_per_rank + e);
        if (k >= 0) copies.push_back({source, t, k});
      }
    }
    const int64_t routed = static_cast<int64_t>(copies.size());
    r.needed_rows += (routed + alignment - 1) / alignment * alignment;
    const int64_t begin = r.row_offsets.back();
    const int64_t rows = bounded(r.needed_rows) - begin;
    const int64_t kept = std::min(routed, rows);
    r.tokens_routed.push_back(routed);
    r.tokens_per_expert.push_back(kept);
    r.rows_per_expert.push_back(rows);
    r.row_offsets.push_back(begin + rows);
    r.scale_row_offsets.push_back(r.scale_row_offsets.back() + (rows + 127) / 128 * 128);
    r.dropped_rows += routed - kept;
    copies.resize(static_cast<size_t>(kept));
    copies.resize(static_cast<size_t>(rows));  // the rest is padding
    r.slots.insert(r.slots.end(), copies.begin(), copies.end());
    r.slot_expert.insert(r.slot_expert.end(), static_cast<size_t>(rows), e);
  }
  r.total_rows = r.row_offsets.back();
  return r;
}

struct SlotPlace {  // rank -1: the copy was not sent, or was dropped
  int rank = -1;
  int64_t slot = -1;
};
// Where every rank's copies went: [T, K] of each.
inline std::vector<std::vector<SlotPlace>> places_of(const std::vector<Routed>& routed, const Step& step,
                                                     int top_k) {
  std::vector<std::vector<SlotPlace>> places;
  for (const RankInputs& in : step.ranks) places.emplace_back(static_cast<size_t>(in.tokens * top_k));
  for (int rank = 0; rank < static_cast<int>(routed.size()); ++rank) {
    const std::vector<SlotCopy>& slots = routed[static_cast<size_t>(rank)].slots;
    for (size_t s = 0; s < slots.size(); ++s) {
      if (slots[s].source < 0) continue;
      places[static_cast<size_t>(slots[s].source)][static_cast<size_t>(slots[s].token * top_k + slots[s].k)] =
          {rank, static_cast<int64_t>(s)};
    }
  }
  return places;
}

// ---- sums ----------------------------------------------------------------------------------------------------------------------

// What every rank has at its slots: [slots, H], and a factor per slot (empty: 1).
struct SlotValues {
  std::vector<float> x;
  std::vector<float> weights;
};

// One token's result of combine: FP32, in order of k, each product and each sum rounded. In mxfp8 every rank's partial sum
// crosses as one row, in order of ranks.
inline std::vector<float> sum_token(const SlotPlace* places, int top_k, const std::vector<SlotValues>& values,
                                    int64_t hidden, int32_t format) {
  const auto add = [&](const SlotPlace& place, std::vector<float>* sum) {
    const SlotValues& at = values[static_cast<size_t>(place.rank)];
    for (int64_t h = 0; h < hidden; ++h) {
      volatile float term =
          at.x[static_cast<size_t>(place.slot * hidden + h)];  // volatile: rounded to FP32 here
      if (!at.weights.empty()) term = at.weights[static_cast<size_t>(place.slot)] * term;
      volatile float& total = (*sum)[static_cast<size_t>(h)];
      total = total + term;
    }
  };
  std::vector<float> sum(static_cast<size_t>(hidden), 0.0f);
  if (format == NVTE_EP_FORMAT_BF16) {
    for (int k = 0; k < top_k; ++k) {
      if (places[k].rank >= 0) add(places[k], &sum);
    }
    return sum;
  }
  for (int rank = 0; rank < static_cast<int>(values.size()); ++rank) {
    std::vector<float> partial(static_cast<size_t>(hidden), 0.0f);
    bool any = false;
    for (int k = 0; k < top_k; ++k) {
      if (places[k].rank != rank) continue;
      add(places[k], &partial);
      any = true;
    }
    if (!any) continue;
    partial = decode(Type::kFloat32,
                     unpack(format, pack(format, Type::kFloat32, partial, hidden), hidden, Type::kFloat32));
    for (size_t h = 0; h < sum.size(); ++h) sum[h] += partial[h];
  }
  return sum;
}

}  // namespace ep_test

#endif  // NVTE_EP_TESTS_MODEL_H_
