#ifndef NVTE_EP_TRANSPORTS_PEER_CUDA_STATUS_H_
#define NVTE_EP_TRANSPORTS_PEER_CUDA_STATUS_H_

#include <cuda_runtime.h>

#include "core/status.h"

namespace nvte_ep {

inline Status peer_cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  return Status(NVTE_EP_STATUS_CUDA, text(what, ": ", cudaGetErrorString(error)));
}

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_CUDA_STATUS_H_
