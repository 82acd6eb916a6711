#include "core/pipeline.h"

namespace nvte_ep {
namespace {

// The rows to send: as given where they are rows of the wire format already, else packed into the handle's scratch.
Status pack(Handle* handle, int32_t format, const DispatchCall& call, SendRows* send,
            nvte_ep_stream_t stream) {
  if (call.is_wire(format)) {
    send->rows = call.tokens.data;
    send->row_stride = call.tokens.stride * dtype_bytes(call.tokens.dtype);
    send->readable_rows = call.tokens.rows();
    return Status();
  }
  const int64_t tokens = call.is_apart ? call.apart.rows : call.tokens.rows();
  void* memory = nullptr;
  NVTE_EP_TRY(handle->transport().send_memory(&memory, stream));
  const RowsView rows = packed_rows(format, memory ? memory : handle->send_rows().data(), send->row_bytes,
                                    tokens, handle->group().settings().hidden);
  send->rows = rows.payload;
  send->row_stride = send->row_bytes;
  send->readable_rows = handle->group().settings().max_tokens_per_rank;
  if (tokens == 0) return Status();
  Backend* backend = handle->group().backend();
  return call.is_apart ? backend->assemble(format, call.apart, rows, call.options, stream)
                       : backend->quantize(format, call.tokens, rows, call.options, stream);
}

}  // namespace

Status receive_rows(Backend* backend, int32_t format, const RowsView& rows, const RoutingView& routing,
                    const DispatchCall& call, nvte_ep_stream_t stream) {
  CodecOptions options = call.options;
  options.tensor_scale = nullptr;  // every row carries it
  if (call.receive == NVTE_EP_RECEIVE_OPERAND) {
    return backend->direct_receive(format, rows, routing.rows_per_expert, call.operand, options, stream);
  }
  options.row_count = routing.total_rows;
  RowWeighting weighting = call.weighting;
  if (call.is_weighted()) weighting.slot_source = routing.slot_source;
  return backend->dequantize(format, rows, call.received, options, weighting, stream);
}

Status run_dispatch(Handle* handle, const DispatchCall& call, nvte_ep_stream_t stream) {
  if (handle->transport().takes_dispatch()) return handle->transport().dispatch(call, stream);
  const HandleSettings& settings = handle->settings();
  const int32_t format = call.backward ? settings.combine_backward : settings.dispatch;
  const int64_t hidden = handle->group().settings().hidden;
  const RoutingView routing = handle->routing();

  SendRows send;
  send.row_bytes = row_layout(*find_format(format), hidden).row_bytes;
  send.format = format;
  send.backward = call.backward;
  send.weights = call.weights;
  send.gives_weights = call.gives_weights;
  send.out_weights = static_cast<float*>(call.recv_weights.data);
  NVTE_EP_TRY(pack(handle, format, call, &send, stream));

  // Rows that are wanted as they travel land in the caller's memory.
  const bool direct = call.receive == NVTE_EP_RECEIVE_ROWS ||
                      (call.receive == NVTE_EP_RECEIVE_DECODED && format == NVTE_EP_FORMAT_BF16 &&
                       call.received.dtype == DType::kBFloat16 && !call.is_weighted());
  if (direct) {
    send.out = call.received.data;
    send.out_stride = call.received.stride * dtype_bytes(call.received.dtype);
  } else {
    NVTE_EP_TRY(handle->recv_rows().reserve(routing.slots * send.row_bytes));  // grows in eager groups only
    send.out = handle->recv_rows().data();
    send.out_stride = send.row_bytes;
  }
  send.symmetric = call.receive == NVTE_EP_RECEIVE_OPERAND ? call.operand.payload : call.received.data;
  NVTE_EP_TRY(handle->transport().send_rows(send, stream));
  if (direct) return Status();

  const RowsView rows = packed_rows(format, send.out, send.out_stride, routing.slots, hidden);
  return receive_rows(handle->group().backend(), format, rows, routing, call, stream);
}

}  // namespace nvte_ep
