// What NCCL EP needs to compile its kernels at run time.
#ifndef NVTE_EP_TRANSPORTS_NCCL_EP_COMPILER_H_
#define NVTE_EP_TRANSPORTS_NCCL_EP_COMPILER_H_

#include <string>

#include "core/status.h"
#include "transports/nccl_api.h"

namespace nvte_ep {
namespace nccl_ep {

// Finds nvcc with a host compiler, NCCL EP's headers and those of the loaded NCCL, and sets the environment variables by
// which NCCL EP is told (NCCL_EP_JIT_NVCC, NCCL_EP_JIT_SOURCE_DIR, NCCL_EP_JIT_BUILD_INCLUDE_DIR,
// NCCL_EP_JIT_CUDA_INCLUDE_DIR); those that are set already are left as they are. UNSUPPORTED with what is missing.
Status provide_compiler(const std::string& nccl_ep_path, const nccl::Api& nccl);

}  // namespace nccl_ep
}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_NCCL_EP_COMPILER_H_
