#include "transports/nccl_api.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

namespace nvte_ep {
namespace nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr int kMinimumVersion = 21800;  // ncclCommSplit

template <typename Function>
bool resolve(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

Status fill(void* library, Api* api) {
  std::string missing;
#define NVTE_EP_REQUIRED(name) \
  if (!resolve(library, #name, &api->name)) missing += " " #name
  NVTE_EP_REQUIRED(ncclGetVersion);
  NVTE_EP_REQUIRED(ncclGetUniqueId);
  NVTE_EP_REQUIRED(ncclCommInitRank);
  NVTE_EP_REQUIRED(ncclCommSplit);
  NVTE_EP_REQUIRED(ncclCommDestroy);
  NVTE_EP_REQUIRED(ncclCommAbort);
  NVTE_EP_REQUIRED(ncclCommGetAsyncError);
  NVTE_EP_REQUIRED(ncclCommCount);
  NVTE_EP_REQUIRED(ncclCommUserRank);
  NVTE_EP_REQUIRED(ncclCommCuDevice);
  NVTE_EP_REQUIRED(ncclGetErrorString);
  NVTE_EP_REQUIRED(ncclGetLastError);
  NVTE_EP_REQUIRED(ncclGroupStart);
  NVTE_EP_REQUIRED(ncclGroupEnd);
  NVTE_EP_REQUIRED(ncclSend);
  NVTE_EP_REQUIRED(ncclRecv);
  NVTE_EP_REQUIRED(ncclAllGather);
#undef NVTE_EP_REQUIRED
  resolve(library, "ncclMemAlloc", &api->ncclMemAlloc);
  resolve(library, "ncclMemFree", &api->ncclMemFree);
  resolve(library, "ncclCommWindowRegister", &api->ncclCommWindowRegister);
  resolve(library, "ncclCommWindowDeregister", &api->ncclCommWindowDeregister);
  resolve(library, "ncclGetLsaDevicePointer", &api->ncclGetLsaDevicePointer);
  resolve(library, "ncclTeamLsa", &api->ncclTeamLsa);
  if (api->ncclGetVersion != nullptr) api->ncclGetVersion(&api->version);
  api->path = loaded_path(dlsym(library, "ncclGetVersion"));
  if (missing.empty() && api->version >= kMinimumVersion) return Status();
  return unsupported(
      "NCCL: expected version ", kMinimumVersion, " or newer, got ", api->version, " from ", api->path,
      missing.empty() ? "" : ", which lacks" + missing,
      "; install a newer one (pip install -U nvidia-nccl-cu12 or nvidia-nccl-cu13, never both)");
}

Status open(Api* api) {
  if (void* loaded = dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) return fill(loaded, api);
  std::string tried;
  for (const std::string& path : library_candidates(std::getenv("NVTE_EP_NCCL_LIBRARY"), {site_packages()},
                                                    {"nvidia/nccl/lib/libnccl.so.2"}, kName)) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return fill(library, api);
    const char* reason = dlerror();
    tried += "\n  " + std::string(reason ? reason : path);
  }
  return unsupported("NCCL: could not load ", kName,
                     ": install it (pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, ",
                     "never both) or set NVTE_EP_NCCL_LIBRARY to its path. Tried:", tried);
}

}  // namespace

namespace {

// The folder so many levels above a file; empty where there are not so many.
std::string above(std::string path, int levels) {
  for (int level = 0; level < levels; ++level) {
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return "";
    path.resize(slash);
  }
  return path;
}

}  // namespace

// <site>/nvte_ep/lib/libnvte_ep.so
std::string site_packages() { return above(loaded_path(reinterpret_cast<void*>(&site_packages)), 3); }

std::string site_of_nccl(const std::string& nccl_path) {
  const std::string site = above(nccl_path, 4);
  return !site.empty() && above(nccl_path, 1) == site + "/nvidia/nccl/lib" ? site : "";
}

std::string loaded_path(void* symbol) {
  Dl_info info;
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

std::vector<std::string> library_candidates(const char* configured, const std::vector<std::string>& sites,
                                            const std::vector<std::string>& wheel_paths,
                                            const char* system_name) {
  if (configured != nullptr && configured[0] != '\0') return {configured};
  std::vector<std::string> candidates;
  for (const std::string& site : sites) {
    if (site.empty()) continue;
    for (const std::string& path : wheel_paths) candidates.push_back(site + "/" + path);
  }
  candidates.push_back(system_name);
  return candidates;
}

Status load(const Api** api) {
  static std::mutex mutex;
  static Api* loaded = nullptr;  // never destroyed: communicators may be alive at exit
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) {  // a failure is tried again: the library may have been installed or loaded since
    Api fresh{};
    NVTE_EP_TRY(open(&fresh));
    loaded = new Api(fresh);
  }
  *api = loaded;
  return Status();
}

Status split(const Api& api, Comm whole, int32_t rank, Comm* fresh) {
  Result result = api.ncclCommSplit(whole, 0, rank, fresh, nullptr);
  if (result != kInProgress) return check(api, result, "ncclCommSplit", whole);
  // It would be of the same kind. It has to be there before it can go.
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    NVTE_EP_TRY(check(api, api.ncclCommGetAsyncError(whole, &result), "ncclCommGetAsyncError", whole));
  } while (result == kInProgress);
  NVTE_EP_TRY(check(api, result, "ncclCommSplit", whole));
  (void)api.ncclCommAbort(std::exchange(*fresh, nullptr));
  return invalid_argument(
      "nccl_comm: expected a communicator whose calls block (config.blocking 1), got one that does not");
}

Status check(const Api& api, Result result, const char* call, Comm comm) {
  if (result == 0) return Status();
  const char* detail = api.ncclGetLastError(comm);
  return Status(NVTE_EP_STATUS_TRANSPORT,
                text(call, ": ", api.ncclGetErrorString(result),
                     detail != nullptr && detail[0] != '\0' ? text(" (", detail, ")") : ""));
}

}  // namespace nccl
}  // namespace nvte_ep
