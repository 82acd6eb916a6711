// THE list of backends: CUDA if it was built and its probe says yes; the host always.
#include <algorithm>
#include <thread>

#include "backends/host_backend.h"
#include "core/backend.h"

namespace nvte_ep {

Status find_backend(const Device& device, int max_threads, Backend** backend) {
  if (device.is_host()) {
    static HostBackend all_cores(static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
    static HostBackend one_core(1);
    *backend = max_threads == 1 ? &one_core : &all_cores;
    return Status();
  }
  return unsupported(device_name(device), ": this build has no CUDA backend");
}

std::vector<Availability> list_backends() {
  return {{"cuda", false, "this build has no CUDA backend"}, {"host", true, ""}};
}

}  // namespace nvte_ep
