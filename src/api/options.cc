#include "api/options.h"

#include "core/struct_reader.h"

namespace nvte_ep {

Status read_rounding(const RoundingFields& f, const Device& device, int64_t experts, CodecOptions* out) {
  NVTE_EP_TRY(check_enum(f.rounding, 2, "rounding"));
  NVTE_EP_TRY(check_enum(f.nonfinite, 2, "nonfinite"));
  NVTE_EP_TRY(check_enum(f.scale_rounding, 2, "scale_rounding"));
  NVTE_EP_TRY(check_enum(f.column_bound, 2, "column_bound"));
  out->stochastic = f.rounding == NVTE_EP_ROUNDING_STOCHASTIC;
  out->saturate = f.nonfinite == NVTE_EP_NONFINITE_SATURATE;
  out->scale_up = f.scale_rounding == NVTE_EP_SCALE_ROUNDING_UP;
  out->column_max = f.column_bound == NVTE_EP_COLUMN_BOUND_MAX;
  TensorView view;
  if (f.rng_state != nullptr) {
    NVTE_EP_TRY(read_tensor_on(device, f.rng_state, {"rng_state", {DType::kInt64}, 1, 2}, &view));
    out->rng_state = static_cast<const int64_t*>(view.data);
  } else if (out->stochastic) {
    return invalid_argument("rng_state: expected int64 [2] {seed, offset} for stochastic rounding, got NULL");
  }
  if (f.tensor_scale != nullptr) {
    NVTE_EP_TRY(read_tensor_on(device, f.tensor_scale, {"tensor_scale", {DType::kFloat32}, 1, 1}, &view));
    out->tensor_scale = static_cast<const float*>(view.data);
  }
  if (f.fixed_expert_scale != nullptr) {
    NVTE_EP_TRY(read_tensor_on(device, f.fixed_expert_scale,
                               {"fixed_expert_scale", {DType::kFloat32}, 1, experts}, &view));
    out->fixed_expert_scale = static_cast<const float*>(view.data);
  }
  if (f.findings != nullptr) {
    NVTE_EP_TRY(read_tensor_on(device, f.findings, {"findings", {DType::kInt32}, 1, 1}, &view));
    out->findings = static_cast<int32_t*>(view.data);
  }
  return Status();
}

Status read_codec_options(const nvte_ep_codec_options_t* options, const Device& device, int64_t experts,
                          CodecOptions* out) {
  if (options == nullptr) return Status();
  nvte_ep_codec_options_t o;
  NVTE_EP_TRY(read_struct(options, NVTE_EP_CODEC_OPTIONS_V1_SIZE, "options", &o));
  NVTE_EP_TRY(check_reserved(o.reserved0, "options.reserved0"));
  NVTE_EP_TRY(read_rounding({o.rounding, o.nonfinite, o.scale_rounding, o.column_bound, o.rng_state,
                             o.tensor_scale, o.fixed_expert_scale, o.findings},
                            device, experts, out));
  if (o.row_id_base < 0)
    return invalid_argument("options.row_id_base: expected 0 or more, got ", o.row_id_base);
  if (o.rank < 0 || o.rank > 1023) return invalid_argument("options.rank: expected 0 to 1023, got ", o.rank);
  out->row_id_base = static_cast<uint64_t>(o.row_id_base);
  out->rank = o.rank;
  if (o.row_count != nullptr) {
    TensorView view;
    NVTE_EP_TRY(read_tensor_on(device, o.row_count, {"row_count", kIndexDTypes, 1, 1}, &view));
    out->row_count = IndexView{view.data, view.dtype == DType::kInt64};
  }
  return Status();
}

Status check_format_options(const FormatRow& format, const CodecOptions& options) {
  if (format.token_scale_bytes != 0) return Status();
  const char* refused = options.stochastic                      ? "rounding: stochastic rounding"
                        : options.tensor_scale != nullptr       ? "tensor_scale: it"
                        : options.fixed_expert_scale != nullptr ? "fixed_expert_scale: it"
                                                                : nullptr;
  return refused == nullptr ? Status() : unsupported(refused, " is for nvfp4, not for ", format.name);
}

Status check_stream(const Device& device, nvte_ep_stream_t stream) {
  if (!device.is_host() || stream == nullptr) return Status();
  return invalid_argument("stream: expected NULL for host memory, got ", static_cast<const void*>(stream));
}

Status check_hidden(const FormatRow& format, int64_t hidden, const char* name) {
  if (hidden > 0 && hidden % format.hidden_multiple == 0 && hidden <= (int64_t{1} << 31)) return Status();
  return invalid_argument(name, ": expected hidden to be a positive multiple of ", format.hidden_multiple,
                          " for ", format.name, ", at most 2^31, got ", hidden);
}

}  // namespace nvte_ep
