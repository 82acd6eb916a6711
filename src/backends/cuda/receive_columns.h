#ifndef NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_H_
#define NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_H_

#include "backends/cuda/launch.h"

namespace nvte_ep {

struct ReceiveArguments;

// Both operands, or the columnwise one, of up to so many bands of 128 rows.
Status launch_receive_tiles(int32_t format, ReceiveArguments arguments, int64_t tiles,
                            const LaunchContext& context);

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_CUDA_RECEIVE_COLUMNS_H_
