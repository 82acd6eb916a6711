// The flow of every step:
//   tokens -> pack -> exchange -> receive -> rows | decoded | operand     dispatch, combine_backward
//   slots  -> reduce at the expert's rank -> exchange -> sum -> tokens    combine, dispatch_backward (in the transport)
#ifndef NVTE_EP_CORE_PIPELINE_H_
#define NVTE_EP_CORE_PIPELINE_H_

#include "core/group.h"

namespace nvte_ep {

// The last part: packed rows in slots, as they travelled, to what the call wants of them.
Status receive_rows(Backend* backend, int32_t format, const RowsView& rows, const RoutingView& routing,
                    const DispatchCall& call, nvte_ep_stream_t stream);

Status run_dispatch(Handle* handle, const DispatchCall& call, nvte_ep_stream_t stream);

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_PIPELINE_H_
