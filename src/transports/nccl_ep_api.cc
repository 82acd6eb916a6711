#include "transports/nccl_ep_api.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

#include "transports/nccl_ep_compiler.h"

namespace nvte_ep {
namespace nccl_ep {
namespace {

constexpr const char* kName = "libnccl_ep.so.0";
constexpr const char* kRemedy =
    "install it (pip install nccl-extensions) or set NVTE_EP_NCCL_EP_LIBRARY to its path";

// The wheel carries one library for each major version of CUDA; a newer one needs a newer driver.
std::vector<std::string> wheel_paths() {
  int driver = 0;
  if (void* cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
    const auto version = reinterpret_cast<int (*)(int*)>(dlsym(cuda, "cuDriverGetVersion"));
    if (version != nullptr) (void)version(&driver);
  }
  if (driver >= 13000) return {"nccl/ep/lib/cu13/libnccl_ep.so", "nccl/ep/lib/cu12/libnccl_ep.so"};
  return {"nccl/ep/lib/cu12/libnccl_ep.so"};
}

Status fill(void* library, Api* api) {
  std::string missing;
  const auto resolve = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (*function == nullptr) missing += text(" ", name);
  };
  resolve("ncclEpGetVersion", &api->ncclEpGetVersion);
  resolve("ncclEpCreateGroup", &api->ncclEpCreateGroup);
  resolve("ncclEpGroupDestroy", &api->ncclEpGroupDestroy);
  resolve("ncclEpHandleMemSize", &api->ncclEpHandleMemSize);
  resolve("ncclEpInitHandle", &api->ncclEpInitHandle);
  resolve("ncclEpHandleDestroy", &api->ncclEpHandleDestroy);
  resolve("ncclEpUpdateHandle", &api->ncclEpUpdateHandle);
  resolve("ncclEpDispatch", &api->ncclEpDispatch);
  resolve("ncclEpCombine", &api->ncclEpCombine);
  resolve("ncclEpGetAsyncError", &api->ncclEpGetAsyncError);
  if (api->ncclEpGetVersion != nullptr) (void)api->ncclEpGetVersion(&api->version);
  api->path = nccl::loaded_path(reinterpret_cast<void*>(api->ncclEpGetVersion));
  if (missing.empty() && api->version >= kMinimumVersion) return Status();
  return unsupported("NCCL EP: expected version ", kMinimumVersion, " (0.2.0) or newer, got ", api->version,
                     " from ", api->path, missing.empty() ? "" : ", which lacks" + missing, "; ", kRemedy);
}

Status open(Api* api) {
  NVTE_EP_TRY(nccl::load(&api->nccl));
  if (api->nccl->version < kMinimumNcclVersion) {
    return unsupported(
        "NCCL EP: expected NCCL ", kMinimumNcclVersion, " (2.30.7) or newer in this process, got ",
        api->nccl->version, " from ", api->nccl->path,
        "; PyTorch's own NCCL is older: preload a newer one (LD_PRELOAD=.../libnccl.so.2), or install it ",
        "(pip install -U nvidia-nccl-cu12 or nvidia-nccl-cu13, never both) and load it before PyTorch");
  }
  void* library = dlopen(kName, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen("libnccl_ep.so", RTLD_NOW | RTLD_NOLOAD);
  std::string tried;
  if (library == nullptr) {
    for (const std::string& path : nccl::library_candidates(
             std::getenv("NVTE_EP_NCCL_EP_LIBRARY"),
             {nccl::site_packages(), nccl::site_of_nccl(api->nccl->path)}, wheel_paths(), kName)) {
      library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library != nullptr) break;
      const char* reason = dlerror();
      tried += "\n  " + std::string(reason != nullptr ? reason : path);
    }
  }
  if (library == nullptr) {
    return unsupported("NCCL EP: could not load ", kName, ": ", kRemedy, ". Tried:", tried);
  }
  NVTE_EP_TRY(fill(library, api));
  return provide_compiler(api->path, *api->nccl);
}

}  // namespace

Status load(const Api** api) {
  static std::mutex mutex;
  static Api* loaded = nullptr;  // never destroyed: groups may be alive at exit
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) {  // a failure is tried again: what was missing may have come since
    Api fresh{};
    NVTE_EP_TRY(open(&fresh));
    loaded = new Api(fresh);
  }
  *api = loaded;
  return Status();
}

}  // namespace nccl_ep
}  // namespace nvte_ep
