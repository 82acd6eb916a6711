// Handles: the per-step calls.
#include "api/guard.h"
#include "api/objects.h"
#include "api/options.h"
#include "core/pipeline.h"
#include "core/struct_reader.h"

using namespace nvte_ep;

namespace {

// What every per-step call needs.
struct Step {
  std::shared_ptr<Handle> handle;
  Device device;
  int64_t hidden = 0;
  int32_t experts = 0;

  const GroupSettings& group() const { return handle->group().settings(); }

  Status read(const nvte_ep_tensor_t* tensor, const TensorRule& rule, TensorView* view) const {
    return read_tensor_on(device, tensor, rule, view);
  }
  Status read_optional(const nvte_ep_tensor_t* tensor, const TensorRule& rule, TensorView* view) const {
    return tensor == nullptr ? Status() : read(tensor, rule, view);
  }
  // zero_copy: what peers read or write lies in memory from mem_alloc.
  Status check_symmetric(const char* name, const void* data, int64_t bytes) const {
    if (!group().zero_copy) return Status();
    return handle->group().with_transport([&](GroupTransport& transport) -> Status {
      if (transport.is_symmetric(data, bytes)) return Status();
      return invalid_argument(
          name, ": expected memory from nvte_ep_mem_alloc (the group has zero_copy), got ", data);
    });
  }
  Status check_symmetric(const char* name, const TensorView& matrix) const {
    const int64_t elements = matrix.rows() == 0 ? 0 : (matrix.rows() - 1) * matrix.stride + matrix.columns();
    return check_symmetric(name, matrix.data, elements * dtype_bytes(matrix.dtype));
  }
};

Status find_step(nvte_ep_handle_t handle, nvte_ep_stream_t stream, Step* step) {
  NVTE_EP_TRY(handles().find(handle, "handle", &step->handle));
  NVTE_EP_TRY(step->handle->group().check_open());
  step->device = step->group().device;
  step->hidden = step->group().hidden;
  step->experts = step->handle->group().local_experts();
  return check_stream(step->device, stream);
}

Status prepare(const Step& step, const nvte_ep_prepare_args_t* args, nvte_ep_stream_t stream) {
  nvte_ep_prepare_args_t a;
  NVTE_EP_TRY(read_struct(args, NVTE_EP_PREPARE_ARGS_V1_SIZE, "args", &a));
  const GroupSettings& g = step.group();
  PrepareCall call;
  NVTE_EP_TRY(step.read(a.topk_idx, {"topk_idx", kIndexDTypes, 2, -1, step.handle->settings().top_k},
                        &call.topk_idx));
  if (call.topk_idx.rows() > g.max_tokens_per_rank) {
    return invalid_argument("topk_idx: expected at most ", g.max_tokens_per_rank,
                            " tokens (max_tokens_per_rank), got ", call.topk_idx.rows());
  }
  const struct {
    const char* name;
    const nvte_ep_tensor_t* tensor;
    int64_t size;
    TensorView* view;
  } counts[] = {{"tokens_routed", a.tokens_routed, step.experts, &call.tokens_routed},
                {"tokens_per_expert", a.tokens_per_expert, step.experts, &call.tokens_per_expert},
                {"rows_per_expert", a.rows_per_expert, step.experts, &call.rows_per_expert},
                {"row_offsets", a.row_offsets, step.experts + 1, &call.row_offsets},
                {"scale_row_offsets", a.scale_row_offsets, step.experts + 1, &call.scale_row_offsets},
                {"total_rows", a.total_rows, 1, &call.total_rows},
                {"dropped_rows", a.dropped_rows, 1, &call.dropped_rows}};
  for (const auto& c : counts)
    NVTE_EP_TRY(step.read_optional(c.tensor, {c.name, kIndexDTypes, 1, c.size}, c.view));
  NVTE_EP_TRY(step.read_optional(
      a.slot_source, {"slot_source", {DType::kInt64}, 1, g.recv_capacity, -1, 0, true}, &call.slot_source));
  NVTE_EP_TRY(step.read_optional(
      a.slot_expert, {"slot_expert", {DType::kInt32}, 1, g.recv_capacity, -1, 0, true}, &call.slot_expert));
  if (a.total_rows_host != nullptr && !g.eager()) {
    return invalid_argument("total_rows_host: expected NULL in a group of fixed capacity (read total_rows)");
  }
  call.total_rows_host = a.total_rows_host;
  return step.handle->transport().prepare(call, stream);
}

// Tokens, packed rows, or payload and scales apart.
Status read_source(const Step& step, const nvte_ep_dispatch_args_t& a, int32_t format, const char* name,
                   DispatchCall* call) {
  const int64_t tokens = step.handle->routing().tokens;
  const RowLayout layout = row_layout(*find_format(format), step.hidden);
  if ((a.tokens == nullptr) == (a.payload == nullptr)) {
    if (a.tokens == nullptr && tokens == 0) return Status();  // a rank with nothing to send may pass nothing
    return invalid_argument(name, ": expected either ", name, " or payload, got ",
                            a.tokens ? "both" : "neither");
  }
  if (a.tokens != nullptr) {
    nvte_ep_tensor_t given;
    NVTE_EP_TRY(read_struct(a.tokens, NVTE_EP_TENSOR_V1_SIZE, name, &given));
    call->packed = given.dtype_code == NVTE_EP_DTYPE_UINT;
    if (call->packed) {
      NVTE_EP_TRY(
          step.read(a.tokens, {name, {DType::kUInt8}, 2, tokens, layout.row_bytes, 16}, &call->tokens));
    } else {
      NVTE_EP_TRY(step.read(a.tokens, {name, kTokenDTypes, 2, tokens, step.hidden}, &call->tokens));
    }
    if (call->packed && a.tensor_scale != nullptr) {
      return invalid_argument("tensor_scale: packed rows carry their scales, expected NULL");
    }
    if (a.scales != nullptr || a.token_scales != nullptr) {
      return invalid_argument(a.scales ? "scales" : "token_scales", ": expected only together with payload");
    }
    return Status();
  }
  if (layout.scale_bytes == 0) {
    return unsupported("payload: ", find_format(format)->name, " has no scales: pass ", name);
  }
  TensorView payload, scales, token_scales;
  NVTE_EP_TRY(step.read(a.payload, {"payload", {DType::kUInt8}, 2, tokens, layout.payload_bytes}, &payload));
  NVTE_EP_TRY(step.read(a.scales, {"scales", {DType::kUInt8}, 2, tokens, layout.scale_bytes}, &scales));
  call->is_apart = true;
  call->apart.payload = static_cast<uint8_t*>(payload.data);
  call->apart.payload_stride = payload.stride;
  call->apart.scales = static_cast<uint8_t*>(scales.data);
  call->apart.scales_stride = scales.stride;
  call->apart.rows = tokens;
  call->apart.hidden = step.hidden;
  if (a.token_scales != nullptr) {
    if (a.tensor_scale != nullptr) {
      return invalid_argument("token_scales: expected NULL together with tensor_scale, which replaces them");
    }
    if (layout.token_scale_bytes == 0) {
      return invalid_argument("token_scales: ", find_format(format)->name, " has none, expected NULL");
    }
    NVTE_EP_TRY(step.read(a.token_scales, {"token_scales", {DType::kFloat32}, 1, tokens}, &token_scales));
    call->apart.token_scales = static_cast<uint8_t*>(token_scales.data);
    call->apart.token_scale_stride = 4;
  } else if (layout.token_scale_bytes != 0 && a.tensor_scale == nullptr) {
    return invalid_argument("token_scales: expected float32 [", tokens,
                            "] unless tensor_scale is given, got NULL");
  }
  return Status();
}

Status read_destination(const Step& step, const nvte_ep_dispatch_args_t& a, int32_t format,
                        DispatchCall* call) {
  const int64_t slots = step.handle->routing().slots;
  const FormatRow& traits = *find_format(format);
  NVTE_EP_TRY(check_enum(a.receive, 3, "receive"));
  call->receive = a.receive;
  if (a.receive == NVTE_EP_RECEIVE_OPERAND) {
    if (a.received != nullptr) return invalid_argument("received: expected NULL when receiving an operand");
    NVTE_EP_TRY(read_operand(a.operand, &call->operand));
    const OperandShape& shape = call->operand.shape;
    if (shape.format != format) {
      return invalid_argument("operand.format: expected ", traits.name, " as this direction travels, got ",
                              shape.traits().name);
    }
    if (shape.hidden != step.hidden || shape.num_experts != step.experts ||
        shape.alignment != step.handle->settings().alignment) {
      return invalid_argument("operand: expected hidden ", step.hidden, ", num_experts ", step.experts,
                              ", alignment ", step.handle->settings().alignment, ", got ", shape.hidden, ", ",
                              shape.num_experts, ", ", shape.alignment);
    }
    if (shape.capacity < slots) {
      return invalid_argument("operand.capacity: expected at least ", slots, " slots, got ", shape.capacity);
    }
    if (!(call->operand.device == step.device)) {
      return invalid_argument("operand.device_type: expected ", device_name(step.device), ", got ",
                              device_name(call->operand.device));
    }
    return step.check_symmetric("operand.payload", call->operand.payload,
                                slots * row_layout(traits, step.hidden).payload_bytes);
  }
  if (a.operand != nullptr) return invalid_argument("operand: expected NULL unless receive is OPERAND");
  const int64_t row_bytes = row_layout(traits, step.hidden).row_bytes;
  if (a.receive == NVTE_EP_RECEIVE_ROWS) {
    NVTE_EP_TRY(
        step.read(a.received, {"received", {DType::kUInt8}, 2, slots, row_bytes, 16, true}, &call->received));
  } else {
    NVTE_EP_TRY(
        step.read(a.received, {"received", kTokenDTypes, 2, slots, step.hidden, 0, true}, &call->received));
  }
  return step.check_symmetric("received", call->received);
}

Status read_dispatch(const Step& step, const nvte_ep_dispatch_args_t* args, bool backward,
                     DispatchCall* call) {
  nvte_ep_dispatch_args_t a;
  NVTE_EP_TRY(read_struct(args, NVTE_EP_DISPATCH_ARGS_V1_SIZE, backward ? "args.send" : "args", &a));
  NVTE_EP_TRY(check_reserved(a.reserved0, "reserved0"));
  NVTE_EP_TRY(step.handle->check_prepared());
  const HandleSettings& settings = step.handle->settings();
  const int32_t format = backward ? settings.combine_backward : settings.dispatch;
  const FormatRow& traits = *find_format(format);
  call->backward = backward;
  NVTE_EP_TRY(read_source(step, a, format, backward ? "grad" : "tokens", call));
  NVTE_EP_TRY(read_rounding({a.rounding, a.nonfinite, a.scale_rounding, a.column_bound, a.rng_state,
                             a.tensor_scale, a.fixed_expert_scale, a.findings},
                            step.device, step.experts, &call->options));
  NVTE_EP_TRY(check_format_options(traits, call->options));
  const int32_t rank = step.handle->group().rank();
  call->options.rank = rank;
  call->options.num_sms = step.group().num_sms;
  call->options.row_id_base =
      static_cast<uint64_t>(rank) * static_cast<uint64_t>(step.group().max_tokens_per_rank);
  if (backward && (a.topk_weights != nullptr || a.recv_weights != nullptr)) {
    return invalid_argument(a.topk_weights ? "topk_weights" : "recv_weights",
                            ": expected NULL in combine_backward");
  }
  const int64_t tokens = step.handle->routing().tokens;
  NVTE_EP_TRY(step.read_optional(
      a.topk_weights, {"topk_weights", {DType::kFloat32}, 2, tokens, settings.top_k}, &call->weights));
  call->gives_weights = a.topk_weights != nullptr;
  NVTE_EP_TRY(step.read_optional(
      a.recv_weights, {"recv_weights", {DType::kFloat32}, 1, step.handle->routing().slots, -1, 0, true},
      &call->recv_weights));
  return read_destination(step, a, format, call);
}

Status read_combine_backward(const Step& step, const nvte_ep_combine_backward_args_t* args,
                             DispatchCall* call) {
  nvte_ep_combine_backward_args_t a;
  NVTE_EP_TRY(read_struct(args, NVTE_EP_COMBINE_BACKWARD_ARGS_V1_SIZE, "args", &a));
  NVTE_EP_TRY(read_dispatch(step, a.send, true, call));
  const int64_t slots = step.handle->routing().slots;
  const bool weighted =
      a.slot_weights != nullptr || a.grad_slot_weights != nullptr || a.expert_out != nullptr;
  if (weighted && call->receive != NVTE_EP_RECEIVE_DECODED) {
    return unsupported("slot_weights: weighted gradients and those of the weights need receive DECODED");
  }
  if ((a.grad_slot_weights == nullptr) != (a.expert_out == nullptr)) {
    return invalid_argument("grad_slot_weights: expected together with expert_out, got only one of them");
  }
  TensorView weights, dots;
  NVTE_EP_TRY(step.read_optional(a.slot_weights, {"slot_weights", {DType::kFloat32}, 1, slots, -1, 0, true},
                                 &weights));
  NVTE_EP_TRY(step.read_optional(a.expert_out, {"expert_out", kTokenDTypes, 2, slots, step.hidden, 0, true},
                                 &call->weighting.expert_out));
  NVTE_EP_TRY(step.read_optional(a.grad_slot_weights,
                                 {"grad_slot_weights", {DType::kFloat32}, 1, slots, -1, 0, true}, &dots));
  call->weighting.weights = static_cast<const float*>(weights.data);
  call->weighting.dots = static_cast<float*>(dots.data);
  return Status();
}

Status combine(const Step& step, const nvte_ep_combine_args_t* args, nvte_ep_stream_t stream) {
  nvte_ep_combine_args_t a;
  NVTE_EP_TRY(read_struct(args, NVTE_EP_COMBINE_ARGS_V1_SIZE, "args", &a));
  NVTE_EP_TRY(check_reserved(a.reserved0, "reserved0"));
  NVTE_EP_TRY(check_bool(a.accumulate, "accumulate"));
  NVTE_EP_TRY(step.handle->check_prepared());
  const RoutingView routing = step.handle->routing();
  ReturnRows call;
  TensorView weights;
  NVTE_EP_TRY(step.read(a.expert_out, {"expert_out", kTokenDTypes, 2, routing.slots, step.hidden, 0, true},
                        &call.slots));
  NVTE_EP_TRY(
      step.read(a.result, {"result", {call.slots.dtype}, 2, routing.tokens, step.hidden}, &call.result));
  NVTE_EP_TRY(step.read_optional(
      a.slot_weights, {"slot_weights", {DType::kFloat32}, 1, routing.slots, -1, 0, true}, &weights));
  NVTE_EP_TRY(step.check_symmetric("expert_out", call.slots));
  call.slot_weights = static_cast<const float*>(weights.data);
  call.format = step.handle->settings().combine;
  call.accumulate = a.accumulate != 0;
  call.symmetric = call.slots.data;
  return step.handle->transport().return_rows(call, stream);
}

Status dispatch_backward(const Step& step, const nvte_ep_dispatch_backward_args_t* args,
                         nvte_ep_stream_t stream) {
  nvte_ep_dispatch_backward_args_t a;
  NVTE_EP_TRY(read_struct(args, NVTE_EP_DISPATCH_BACKWARD_ARGS_V1_SIZE, "args", &a));
  NVTE_EP_TRY(check_reserved(a.reserved0, "reserved0"));
  NVTE_EP_TRY(check_bool(a.accumulate, "accumulate"));
  NVTE_EP_TRY(step.handle->check_prepared());
  const RoutingView routing = step.handle->routing();
  ReturnRows call;
  TensorView scalars;
  call.backward = true;
  NVTE_EP_TRY(step.read(
      a.grad_received, {"grad_received", kTokenDTypes, 2, routing.slots, step.hidden, 0, true}, &call.slots));
  NVTE_EP_TRY(step.read(a.grad_tokens, {"grad_tokens", {call.slots.dtype}, 2, routing.tokens, step.hidden},
                        &call.result));
  NVTE_EP_TRY(step.read_optional(a.grad_recv_weights,
                                 {"grad_recv_weights", {DType::kFloat32}, 1, routing.slots, -1, 0, true},
                                 &scalars));
  NVTE_EP_TRY(step.read_optional(
      a.grad_topk_weights,
      {"grad_topk_weights", {DType::kFloat32}, 2, routing.tokens, step.handle->settings().top_k},
      &call.scalars));
  NVTE_EP_TRY(step.check_symmetric("grad_received", call.slots));
  call.slot_scalars = static_cast<const float*>(scalars.data);
  call.wants_scalars = a.grad_topk_weights != nullptr && routing.tokens > 0;
  call.format = step.handle->settings().dispatch_backward;
  call.accumulate = a.accumulate != 0;
  call.symmetric = call.slots.data;
  return step.handle->transport().return_rows(call, stream);
}

}  // namespace

extern "C" {

nvte_ep_status_t nvte_ep_handle_create(nvte_ep_group_t group, const nvte_ep_handle_config_t* config,
                                       nvte_ep_handle_t* handle) {
  return boundary("nvte_ep_handle_create", [&]() -> Status {
    std::shared_ptr<Group> g;
    NVTE_EP_TRY(groups().find(group, "group", &g));
    nvte_ep_handle_config_t c;
    NVTE_EP_TRY(read_struct(config, NVTE_EP_HANDLE_CONFIG_V1_SIZE, "config", &c));
    if (handle == nullptr) return invalid_argument("handle: expected a pointer, got NULL");
    HandleSettings settings;
    settings.top_k = c.top_k;
    settings.alignment = c.alignment == 0 ? 128 : c.alignment;
    settings.dispatch = c.dispatch;
    settings.combine = c.combine;
    settings.dispatch_backward = c.dispatch_backward;
    settings.combine_backward = c.combine_backward;
    std::shared_ptr<Handle> created;
    NVTE_EP_TRY(Handle::create(g, settings, &created));
    *handle = handles().add(std::move(created));
    g->add_handle(*handle);
    return Status();
  });
}

nvte_ep_status_t nvte_ep_handle_destroy(nvte_ep_handle_t handle) {
  return boundary("nvte_ep_handle_destroy", [&]() -> Status {
    if (handle == nullptr) return Status();
    std::shared_ptr<Handle> last;
    NVTE_EP_TRY(handles().remove(handle, "handle", &last));
    last->group().forget_handle(handle);
    return Status();
  });
}

nvte_ep_status_t nvte_ep_handle_prepare(nvte_ep_handle_t handle, const nvte_ep_prepare_args_t* args,
                                        nvte_ep_stream_t stream) {
  return boundary("nvte_ep_handle_prepare", [&]() -> Status {
    Step step;
    NVTE_EP_TRY(find_step(handle, stream, &step));
    return prepare(step, args, stream);
  });
}

nvte_ep_status_t nvte_ep_handle_dispatch(nvte_ep_handle_t handle, const nvte_ep_dispatch_args_t* args,
                                         nvte_ep_stream_t stream) {
  return boundary("nvte_ep_handle_dispatch", [&]() -> Status {
    Step step;
    DispatchCall call;
    NVTE_EP_TRY(find_step(handle, stream, &step));
    NVTE_EP_TRY(read_dispatch(step, args, false, &call));
    return run_dispatch(step.handle.get(), call, stream);
  });
}

nvte_ep_status_t nvte_ep_handle_combine(nvte_ep_handle_t handle, const nvte_ep_combine_args_t* args,
                                        nvte_ep_stream_t stream) {
  return boundary("nvte_ep_handle_combine", [&]() -> Status {
    Step step;
    NVTE_EP_TRY(find_step(handle, stream, &step));
    return combine(step, args, stream);
  });
}

nvte_ep_status_t nvte_ep_handle_dispatch_backward(nvte_ep_handle_t handle,
                                                  const nvte_ep_dispatch_backward_args_t* args,
                                                  nvte_ep_stream_t stream) {
  return boundary("nvte_ep_handle_dispatch_backward", [&]() -> Status {
    Step step;
    NVTE_EP_TRY(find_step(handle, stream, &step));
    return dispatch_backward(step, args, stream);
  });
}

nvte_ep_status_t nvte_ep_handle_combine_backward(nvte_ep_handle_t handle,
                                                 const nvte_ep_combine_backward_args_t* args,
                                                 nvte_ep_stream_t stream) {
  return boundary("nvte_ep_handle_combine_backward", [&]() -> Status {
    Step step;
    DispatchCall call;
    NVTE_EP_TRY(find_step(handle, stream, &step));
    NVTE_EP_TRY(read_combine_backward(step, args, &call));
    return run_dispatch(step.handle.get(), call, stream);
  });
}

}  // extern "C"
