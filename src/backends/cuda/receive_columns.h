#ifndef NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_H_
#define NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_H_

#include "backends/cuda/launch.h"

namespace nvte_ep {

struct ReceiveArguments;

// Both operands, or the columnwise one.
Status launch_receive_columns_nvfp4(const ReceiveArguments& arguments, const LaunchContext& context);
Status launch_receive_columns_mxfp8(const ReceiveArguments& arguments, const LaunchContext& context);

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_H_
