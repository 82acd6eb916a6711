// NCCL as function pointers, loaded at run time, so that one library serves machines with and without it. Only entry points
// and constants of NCCL's stable C interface (nccl.h) are declared; the names keep NCCL's.
#ifndef NVTE_EP_TRANSPORTS_NCCL_API_H_
#define NVTE_EP_TRANSPORTS_NCCL_API_H_

#include <cstddef>
#include <string>
#include <vector>

#include "core/status.h"

namespace nvte_ep {
namespace nccl {

using Result = int;  // ncclResult_t; 0 is success
constexpr Result kInProgress = 7;
struct CommStruct;
using Comm = CommStruct*;
struct UniqueId {
  char internal[128];
};
enum DataType {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kBfloat16 = 9,
  kFloat4x2 = 12  // bytes of two E2M1 codes; NCCL EP only
};
struct WindowStruct;
using Window = WindowStruct*;
struct Team {
  int size, rank, stride;
};
constexpr int kWindowsVersion = 23007;            // the first whose windows are used
constexpr int kWindowCollectiveSymmetric = 0x01;  // NCCL_WIN_COLL_SYMMETRIC

struct Api {
  std::string path;  // of the library that is in use
  int version = 0;   // MAJOR * 10000 + MINOR * 100 + PATCH

  Result (*ncclGetVersion)(int* version);
  Result (*ncclGetUniqueId)(UniqueId* id);
  Result (*ncclCommInitRank)(Comm* comm, int num_ranks, UniqueId id, int rank);
  Result (*ncclCommSplit)(Comm comm, int color, int key, Comm* new_comm, void* config);
  Result (*ncclCommDestroy)(Comm comm);
  Result (*ncclCommAbort)(Comm comm);
  Result (*ncclCommGetAsyncError)(Comm comm, Result* error);
  Result (*ncclCommCount)(const Comm comm, int* count);
  Result (*ncclCommUserRank)(const Comm comm, int* rank);
  Result (*ncclCommCuDevice)(const Comm comm, int* device);
  const char* (*ncclGetErrorString)(Result result);
  const char* (*ncclGetLastError)(Comm comm);
  Result (*ncclGroupStart)();
  Result (*ncclGroupEnd)();
  Result (*ncclSend)(const void* buffer, size_t count, DataType type, int peer, Comm comm,
                     nvte_ep_stream_t stream);
  Result (*ncclRecv)(void* buffer, size_t count, DataType type, int peer, Comm comm, nvte_ep_stream_t stream);
  Result (*ncclAllGather)(const void* send, void* receive, size_t count, DataType type, Comm comm,
                          nvte_ep_stream_t stream);
  // Newer entry points; null in an NCCL that lacks them.
  Result (*ncclMemAlloc)(void** pointer, size_t bytes);
  Result (*ncclMemFree)(void* pointer);
  Result (*ncclCommWindowRegister)(Comm comm, void* buffer, size_t bytes, Window* window, int flags);
  Result (*ncclCommWindowDeregister)(Comm comm, Window window);
  Result (*ncclGetLsaDevicePointer)(Window window, size_t offset, int lsa_rank, void** pointer);
  Team (*ncclTeamLsa)(Comm comm);  // the ranks whose memory this one's device can load and store
};

// The NCCL of this process: the one that is loaded already, else NVTE_EP_NCCL_LIBRARY, else the nvidia wheel beside this
// library, else the system's. Loaded once and never closed. UNSUPPORTED with what was tried and the remedy.
Status load(const Api** api);

// A communicator of the same ranks that orders no calls of the other. Collective. INVALID_ARGUMENT where its calls would not
// block: what they enqueue would not be there when they return.
Status split(const Api& api, Comm whole, int32_t rank, Comm* fresh);

// The text of a failed call, as a TRANSPORT status; OK for success.
Status check(const Api& api, Result result, const char* call, Comm comm);

// Places where a library of this name may lie, in the order in which they are tried: the one configured alone, or the paths
// given in each of the folders of wheels, then the plain name for the system.
std::vector<std::string> library_candidates(const char* configured, const std::vector<std::string>& sites,
                                            const std::vector<std::string>& wheel_paths,
                                            const char* system_name);
// The folder of wheels that this library was installed from, and the one that an NCCL lies in; empty where there is none.
std::string site_packages();
std::string site_of_nccl(const std::string& nccl_path);
// The file that holds a symbol.
std::string loaded_path(void* symbol);

}  // namespace nccl
}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_NCCL_API_H_
