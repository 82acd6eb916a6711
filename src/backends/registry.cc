// THE list of backends: CUDA if it was built and its probe says yes; the host always.
#include <algorithm>
#include <thread>

#include "backends/host_backend.h"
#include "core/backend.h"
#if defined(NVTE_EP_WITH_CUDA)
#include "backends/cuda/cuda_backend.h"
#endif

namespace nvte_ep {

Status find_backend(const Device& device, int max_threads, Backend** backend) {
  if (device.is_host()) {
    static HostBackend all_cores(static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
    static HostBackend one_core(1);
    *backend = max_threads == 1 ? &one_core : &all_cores;
    return Status();
  }
#if defined(NVTE_EP_WITH_CUDA)
  return find_cuda_backend(device.id, backend);
#else
  return unsupported(device_name(device), ": this build has no CUDA backend");
#endif
}

std::vector<Availability> list_backends() {
#if defined(NVTE_EP_WITH_CUDA)
  return {probe_cuda(), {"host", true, ""}};
#else
  return {{"cuda", false, "this build has no CUDA backend"}, {"host", true, ""}};
#endif
}

}  // namespace nvte_ep
