// Checks that codecs and per-step calls share.
#ifndef NVTE_EP_API_OPTIONS_H_
#define NVTE_EP_API_OPTIONS_H_

#include "core/backend.h"
#include "core/status.h"
#include "core/tensor_view.h"

namespace nvte_ep {

// Reads options (null: defaults) for a codec of the format. experts: length of fixed_expert_scale.
Status read_codec_options(const nvte_ep_codec_options_t* options, const Device& device, int64_t experts,
                          CodecOptions* out);

// The fields that codec options and dispatch arguments have in common.
struct RoundingFields {
  int32_t rounding, nonfinite, scale_rounding, column_bound;
  const nvte_ep_tensor_t* rng_state;
  const nvte_ep_tensor_t* tensor_scale;
  const nvte_ep_tensor_t* fixed_expert_scale;
  const nvte_ep_tensor_t* findings;
};
Status read_rounding(const RoundingFields& fields, const Device& device, int64_t experts, CodecOptions* out);

// Options that formats without a second-level scale do not have.
Status check_format_options(const FormatRow& format, const CodecOptions& options);

// Host memory takes no stream.
Status check_stream(const Device& device, nvte_ep_stream_t stream);

// hidden is a positive multiple of what rows of the format need.
Status check_hidden(const FormatRow& format, int64_t hidden, const char* name);

}  // namespace nvte_ep

#endif  // NVTE_EP_API_OPTIONS_H_
