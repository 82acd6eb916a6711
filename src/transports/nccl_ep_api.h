// NVIDIA's NCCL EP (libnccl_ep) as function pointers, loaded at run time, and the structs that its calls take. Its structs
// carry their size and are append-only, so these mirrors of API version 2 stay valid; names keep NCCL EP's.
#ifndef NVTE_EP_TRANSPORTS_NCCL_EP_API_H_
#define NVTE_EP_TRANSPORTS_NCCL_EP_API_H_

#include <cstdint>
#include <string>

#include "transports/nccl_api.h"

namespace nvte_ep {
namespace nccl_ep {

constexpr unsigned kApiVersion = 2;
constexpr unsigned kMagic = 0xC00FFFEEu;
constexpr unsigned kTensorMagic = 0xCAFECAFEu;
constexpr int kMinimumVersion = 200;         // 0.2.0
constexpr int kMinimumNcclVersion = 23007;   // 2.30.7: what its device code is written for
constexpr int64_t kMaxTokensPerRank = 8192;  // compiled in
constexpr int64_t kTokenMultiple = 16;       // of max_dispatch_tokens_per_rank, for 16-byte rows of its maps
constexpr int kMaxRanks = 64;
constexpr int kMaxTopK = 32;
constexpr int kMaxLocalExperts = 512;
constexpr int kExpertMultiple = 4;  // weights travel as 16-byte rows of FP32, one for each expert of a domain
constexpr int64_t kAlignment = 16;  // of rows and their addresses

enum Algorithm { kLowLatency = 0, kHighThroughput = 1 };
enum Layout { kExpertMajor = 1, kRankMajor = 2, kFlat = 3 };
enum PassDirection { kForward = 0, kBackward = 1 };
enum DispatchRecipe { kNoScales = 0, kForwardScales = 1 };
enum ZeroCopy { kZeroCopyAuto = 0, kZeroCopyOff = 1, kZeroCopyOn = 2 };

struct Tensor {
  unsigned size = sizeof(Tensor);
  unsigned magic = kTensorMagic;
  unsigned ndim = 0;
  int datatype = 0;  // ncclDataType_t
  void* data = nullptr;
  nccl::Window window = nullptr;
  uint64_t window_offset = 0;
  size_t* sizes = nullptr;
};
struct GroupConfig {
  unsigned size = sizeof(GroupConfig);
  unsigned magic = kMagic;
  unsigned version = kApiVersion;
  int algorithm = 0;
  unsigned num_experts = 0;
  unsigned max_dispatch_tokens_per_rank = 0;
  unsigned max_recv_tokens_per_rank = 0;
  unsigned max_token_bytes = 0;
  unsigned long rdma_buffer_size = 0;
  unsigned num_qp_per_rank = 0;
  unsigned num_channels = 0;
  unsigned max_num_sms = 0;
  void* alloc_fn = nullptr;
  void* free_fn = nullptr;
  void* alloc_context = nullptr;
  unsigned enable_mask = 0;
  uint64_t timeout_ns = 0;
  int zero_copy = 0;
  int overflow_policy = 0;
  unsigned num_topk = 0;
  unsigned char padding_v2[4] = {};
};
struct LayoutInfo {
  unsigned size = sizeof(LayoutInfo);
  unsigned magic = kMagic;
  Tensor* expert_counters = nullptr;
  Tensor* src_rank_counters = nullptr;
  Tensor* expert_offsets = nullptr;
  Tensor* recv_total_counter = nullptr;
  int recv_topk_idx_kind = 0;
  unsigned char padding_v2[4] = {};
};
struct HandleConfig {
  unsigned size = sizeof(HandleConfig);
  unsigned magic = kMagic;
  size_t dispatch_output_per_expert_alignment = 0;
};
struct DispatchInputs {
  unsigned size = sizeof(DispatchInputs);
  unsigned magic = kMagic;
  Tensor* tokens = nullptr;
  Tensor* topk_weights = nullptr;
  Tensor* scales = nullptr;
};
struct DispatchOutputs {
  unsigned size = sizeof(DispatchOutputs);
  unsigned magic = kMagic;
  Tensor* tokens = nullptr;
  Tensor* topk_weights = nullptr;
  Tensor* scales = nullptr;
  Tensor* topk_idx = nullptr;
};
struct DispatchConfig {
  unsigned size = sizeof(DispatchConfig);
  unsigned magic = kMagic;
  unsigned send_only = 0;
  unsigned round_scales = 0;
  int pass_direction = kForward;
  int quant_recipe = kNoScales;
};
struct CombineInputs {
  unsigned size = sizeof(CombineInputs);
  unsigned magic = kMagic;
  Tensor* tokens = nullptr;
  Tensor* topk_weights = nullptr;
  Tensor* scales = nullptr;
};
struct CombineOutputs {
  unsigned size = sizeof(CombineOutputs);
  unsigned magic = kMagic;
  Tensor* tokens = nullptr;
  Tensor* topk_weights = nullptr;
};
struct CombineConfig {
  unsigned size = sizeof(CombineConfig);
  unsigned magic = kMagic;
  unsigned send_only = 0;
  int pass_direction = kForward;
  int quant_recipe = 0;
};
static_assert(sizeof(Tensor) == 48 && sizeof(GroupConfig) == 112 && sizeof(LayoutInfo) == 48 &&
                  sizeof(HandleConfig) == 16 && sizeof(DispatchInputs) == 32 &&
                  sizeof(DispatchOutputs) == 40 && sizeof(DispatchConfig) == 24 &&
                  sizeof(CombineInputs) == 32 && sizeof(CombineOutputs) == 24 && sizeof(CombineConfig) == 20,
              "the sizes of API version 2");

struct GroupStruct;
using Group = GroupStruct*;
struct HandleStruct;
using Handle = HandleStruct*;

struct Api {
  const nccl::Api* nccl = nullptr;
  std::string path;
  int version = 0;  // MAJOR * 10000 + MINOR * 100 + PATCH

  nccl::Result (*ncclEpGetVersion)(int* version);
  nccl::Result (*ncclEpCreateGroup)(Group* group, nccl::Comm comm, const GroupConfig* config);
  nccl::Result (*ncclEpGroupDestroy)(Group group);
  nccl::Result (*ncclEpHandleMemSize)(Group group, int layout, const HandleConfig* config, size_t* bytes,
                                      int num_topk);
  nccl::Result (*ncclEpInitHandle)(Handle* handle, Group group, int layout, const HandleConfig* config,
                                   int num_topk, const Tensor* memory);
  nccl::Result (*ncclEpHandleDestroy)(Handle handle);
  nccl::Result (*ncclEpUpdateHandle)(Handle handle, const Tensor* topk_idx, const LayoutInfo* info,
                                     nvte_ep_stream_t stream);
  nccl::Result (*ncclEpDispatch)(Handle handle, const DispatchInputs* inputs, const DispatchOutputs* outputs,
                                 const LayoutInfo* info, const DispatchConfig* config,
                                 nvte_ep_stream_t stream);
  nccl::Result (*ncclEpCombine)(Handle handle, const CombineInputs* inputs, const CombineOutputs* outputs,
                                const CombineConfig* config, nvte_ep_stream_t stream);
  nccl::Result (*ncclEpGetAsyncError)(Group group, int* error);
};

// NCCL 2.30.7 or newer and NCCL EP: what is in the process already, else NVTE_EP_NCCL_EP_LIBRARY, else the nccl-extensions
// wheel beside this library, else the system's. What NCCL EP needs to compile its kernels (nvcc, its own headers, those of
// NCCL and CUDA) is looked for, and told to NCCL EP by the environment variables that it reads, unless they are set.
// UNSUPPORTED with what is missing and the remedy.
Status load(const Api** api);

}  // namespace nccl_ep
}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_NCCL_EP_API_H_
