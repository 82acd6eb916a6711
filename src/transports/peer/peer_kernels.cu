#include "transports/peer/peer_kernels.h"

#include <cuda_runtime.h>

namespace nvte_ep {

Status last_captured(nvte_ep_stream_t stream, CapturedNode* last) {
  cudaStreamCaptureStatus status;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
  *last = CapturedNode();
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaStreamGetCaptureInfo(stream, &status, &last->capture, nullptr, &nodes, &edges, &count);
#else
  const cudaError_t error =
      cudaStreamGetCaptureInfo_v3(stream, &status, &last->capture, nullptr, &nodes, &edges, &count);
#endif
  NVTE_EP_TRY(cuda_status(error, "cudaStreamGetCaptureInfo"));
  if (status == cudaStreamCaptureStatusActive && count == 1) last->node = nodes[0];
  return Status();
}

Status enable_peer_access(int32_t device, int32_t other) {
  if (device == other) return Status();
  int possible = 0;
  NVTE_EP_TRY(cuda_status(cudaDeviceCanAccessPeer(&possible, device, other), "cudaDeviceCanAccessPeer"));
  if (!possible)
    return unsupported("peer: CUDA device ", device, " cannot access the memory of device ", other);
  const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return Status();
  }
  return cuda_status(error, "cudaDeviceEnablePeerAccess");
}

Status describe_launches(int32_t device, int32_t num_sms, LaunchContext* context) {
  context->device = device;
  context->max_sms = num_sms;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } wanted[] = {{cudaDevAttrMultiProcessorCount, &context->sms},
                {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &context->shared_bytes_per_sm},
                {cudaDevAttrMaxSharedMemoryPerBlockOptin, &context->shared_bytes_per_block}};
  for (const auto& w : wanted) {
    NVTE_EP_TRY(cuda_status(cudaDeviceGetAttribute(w.value, w.attribute, device), "cudaDeviceGetAttribute"));
  }
  return Status();
}

}  // namespace nvte_ep
