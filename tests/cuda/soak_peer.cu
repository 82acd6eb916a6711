// SPDX-License-Identifier: Apache-2.0
// A soak of the `peer` transport: ranks as threads or as processes exchange rows at full speed with random delays, and every
// row that arrives is checked on the device against what it must be. All data is a function of (what, rank, token, iteration),
// so the receiver knows it without asking, and data of another iteration is never right.
//
//   soak_peer [--kind threads|processes] [--ranks N] [--gpus N] [--passes N] [--seconds S] [--iterations N] [--graph]
//             [--groups N] [--delay MICROSECONDS] [--tokens N] [--hidden N] [--timeout SECONDS] [--kill RANK] [--stall RANK]
//             [--transport peer|nccl] [--hog MICROSECONDS]
//
// An iteration: prepare with a new routing; dispatch in bf16 with weights; combine; dispatch with other data; dispatch
// backward; combine backward of packed nvfp4 rows. Two handles take turns. --groups: each with a stream of its own, all in
// flight at once. --graph captures an iteration of each handle and replays it. --hog: now and then, for so long at most, another
// kernel fills a rank's GPU, as the caller's own work does; not in graphs. So a rank may be behind in the middle of a call. --kill: that process is killed with
// SIGKILL in mid-run, and the others must name it within twice the time-out and end by themselves. --stall: it is stopped, and
// goes on when the others have given up: then it must name itself.
// Exit code: 0 all right, 1 wrong data or a wrong report, 2 usage, 3 a failure of the run itself.
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "nvte_ep/nvte_ep.h"

namespace {

constexpr int kTopK = 4;
constexpr int kMaxRanks = 64;
constexpr int kAlignment = 16;

// ---- what everything must be ---------------------------------------------------------------------------------------------

enum What : uint32_t {
  kTokens = 1,
  kOtherTokens,
  kExpertOut,
  kSlotGradients,
  kPackedRows,
  kRouting,
  kWeights,
  kCount,
  kDelay
};

__host__ __device__ inline uint32_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<uint32_t>(x >> 16);
}
__host__ __device__ inline uint32_t random_word(What what, int64_t iteration, int rank, int64_t token,
                                                int64_t i) {
  return mix(
      (static_cast<uint64_t>(mix((static_cast<uint64_t>(what) << 56) ^ static_cast<uint64_t>(iteration)))
       << 32) ^
      (static_cast<uint64_t>(rank) << 48) ^ (static_cast<uint64_t>(token) << 20) ^ static_cast<uint64_t>(i));
}

struct Shape {
  int ranks, experts, tokens, hidden;
  int64_t capacity, packed_bytes;
};

__host__ __device__ inline int tokens_of(const Shape& s, int64_t iteration, int rank) {
  const uint32_t r = random_word(kCount, iteration, rank, 0, 0);
  return r % 8 == 0 ? 0 : static_cast<int>((r >> 8) % static_cast<uint32_t>(s.tokens + 1));
}
// The expert of a choice, -1: unrouted. The experts of a token differ.
__host__ __device__ inline int expert_of(const Shape& s, int64_t iteration, int rank, int64_t token, int k) {
  const uint32_t r = random_word(kRouting, iteration, rank, token, 0);
  if (((r >> (3 * k)) & 7) == 0) return -1;
  const uint32_t experts = static_cast<uint32_t>(s.experts);
  const uint32_t start = random_word(kRouting, iteration, rank, token, 1) % experts;
  const uint32_t step = 1 + random_word(kRouting, iteration, rank, token, 2) % (experts / kTopK);
  return static_cast<int>((start + static_cast<uint32_t>(k) * step) % experts);
}
__host__ __device__ inline float weight_of(int64_t iteration, int rank, int64_t token, int k) {
  return static_cast<float>(random_word(kWeights, iteration, rank, token, k) & 0xFFFF);
}
// A pair of finite bf16 numbers.
__host__ __device__ inline uint32_t token_word(What what, int64_t iteration, int rank, int64_t token,
                                               int64_t i) {
  return 0x3F803F80u | (random_word(what, iteration, rank, token, i) & 0x807F807Fu);
}
// A pair of bf16 integers from 0 to 7, so that sums are exact.
__host__ __device__ inline int small_number(What what, int64_t iteration, int rank, int64_t token, int expert,
                                            int64_t h) {
  return static_cast<int>(random_word(what, iteration, rank, token * 4096 + expert, h) & 7);
}

__device__ inline uint32_t bf16_bits(int n) { return __float_as_uint(static_cast<float>(n)) >> 16; }

// ---- kernels ---------------------------------------------------------------------------------------------------------------

struct Counters {
  unsigned long long rows, wrong_rows, wrong_weights, wrong_sums, wrong_gradients, wrong_packed,
      wrong_routing;

  void operator+=(const Counters& c) {
    rows += c.rows;
    wrong_rows += c.wrong_rows;
    wrong_weights += c.wrong_weights;
    wrong_sums += c.wrong_sums;
    wrong_gradients += c.wrong_gradients;
    wrong_packed += c.wrong_packed;
    wrong_routing += c.wrong_routing;
  }
  unsigned long long wrong() const {
    return wrong_rows + wrong_weights + wrong_sums + wrong_gradients + wrong_packed + wrong_routing;
  }
};

__global__ void advance(int64_t* iteration) { ++*iteration; }

__device__ void wait_ns(uint64_t ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < ns);
}

__global__ void delay(const int64_t* iteration, int rank, int site, int most_us) {
  const uint32_t r = random_word(kDelay, *iteration, rank, site, 0);
  if (most_us == 0 || r % 4 != 0) return;
  wait_ns(static_cast<uint64_t>((r >> 4) % static_cast<uint32_t>(most_us)) * (r % 64 == 0 ? 10000 : 1000));
}

// Other work: as many blocks as there are multiprocessors, with so much shared memory that nothing fits beside them.
constexpr int kAllSharedBytes = 200 << 10;
__global__ void __launch_bounds__(1024) occupy(uint64_t ns) { wait_ns(ns); }

__global__ void route(Shape s, const int64_t* iteration, int rank, int rows, int32_t* topk, float* weights) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= rows * kTopK) return;
  const int token = i / kTopK, k = i % kTopK;
  topk[i] = token < tokens_of(s, *iteration, rank) ? expert_of(s, *iteration, rank, token, k) : -1;
  weights[i] = weight_of(*iteration, rank, token, k);
}

__global__ void fill_tokens(Shape s, What what, const int64_t* iteration, int rank, uint32_t* tokens) {
  for (int64_t i = threadIdx.x; i < s.hidden / 2; i += blockDim.x)
    tokens[blockIdx.x * int64_t{s.hidden / 2} + i] = token_word(what, *iteration, rank, blockIdx.x, i);
}

__global__ void fill_packed(Shape s, const int64_t* iteration, int rank, uint32_t* rows) {
  for (int64_t i = threadIdx.x; i < s.packed_bytes / 4; i += blockDim.x)
    rows[blockIdx.x * (s.packed_bytes / 4) + i] = random_word(kPackedRows, *iteration, rank, blockIdx.x, i);
}

// What the experts of this rank answer, and the gradient of each slot's weight.
__global__ void fill_slots(Shape s, What what, const int64_t* iteration, int rank, const int64_t* total,
                           const int64_t* source, const int32_t* expert, uint32_t* slots, float* gradients) {
  const int64_t slot = blockIdx.x;
  if (slot >= *total || source[slot] < 0) return;
  const int from = static_cast<int>(source[slot] >> 32);
  const int64_t token = source[slot] & 0xFFFFFFFF;
  const int e = expert[slot] + rank * (s.experts / s.ranks);
  if (from < 0 || from >= s.ranks || token >= s.tokens) return;
  for (int64_t i = threadIdx.x; i < s.hidden / 2; i += blockDim.x) {
    slots[slot * (s.hidden / 2) + i] = bf16_bits(small_number(what, *iteration, from, token, e, 2 * i)) |
                                       bf16_bits(small_number(what, *iteration, from, token, e, 2 * i + 1))
                                           << 16;
  }
  if (threadIdx.x == 0)
    gradients[slot] = static_cast<float>(small_number(what, *iteration, from, token, e, -1));
}

// Each slot: its source is one that chose the expert, in order, and its row and weight are the source's.
__global__ void check_slots(Shape s, What what, const int64_t* iteration, int rank, const int64_t* total,
                            const int64_t* source, const int32_t* expert, const uint32_t* rows, int64_t words,
                            const float* weights, Counters* counters) {
  const int64_t slot = blockIdx.x;
  if (slot >= *total) return;
  const int local = s.experts / s.ranks;
  const int64_t at = source[slot];
  const int from = static_cast<int>(at >> 32);
  const int64_t token = at & 0xFFFFFFFF;
  int k = 0;
  bool legal = true;
  if (at >= 0) {
    legal =
        from < s.ranks && token < tokens_of(s, *iteration, from) && expert[slot] >= 0 && expert[slot] < local;
    while (legal && k < kTopK && expert_of(s, *iteration, from, token, k) != expert[slot] + rank * local) ++k;
    legal = legal && k < kTopK;
    if (slot > 0 && expert[slot - 1] == expert[slot] && source[slot - 1] >= at) legal = false;
  }
  if (!legal) {
    if (threadIdx.x == 0) atomicAdd(&counters->wrong_routing, 1ull);
    return;
  }
  int wrong = 0;
  for (int64_t i = threadIdx.x; i < words; i += blockDim.x) {
    const uint32_t expected = at < 0                ? 0u
                              : what == kPackedRows ? random_word(what, *iteration, from, token, i)
                                                    : token_word(what, *iteration, from, token, i);
    wrong |= rows[slot * words + i] != expected;
  }
  wrong = __syncthreads_or(wrong);
  if (threadIdx.x != 0) return;
  if (at >= 0) atomicAdd(&counters->rows, 1ull);
  if (wrong) atomicAdd(what == kPackedRows ? &counters->wrong_packed : &counters->wrong_rows, 1ull);
  if (weights != nullptr && weights[slot] != (at < 0 ? 0.f : weight_of(*iteration, from, token, k)))
    atomicAdd(&counters->wrong_weights, 1ull);
}

// As many slots as there are choices for this rank's experts.
__global__ void check_counts(Shape s, const int64_t* iteration, int rank, const int64_t* routed,
                             Counters* counters) {
  const int local = s.experts / s.ranks;
  int64_t got = 0, expected = 0;
  for (int e = 0; e < local; ++e) got += routed[e];
  for (int r = 0; r < s.ranks; ++r) {
    for (int t = static_cast<int>(threadIdx.x); t < tokens_of(s, *iteration, r);
         t += static_cast<int>(blockDim.x)) {
      for (int k = 0; k < kTopK; ++k) {
        const int e = expert_of(s, *iteration, r, t, k);
        expected += e >= 0 && e / local == rank;
      }
    }
  }
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, static_cast<unsigned long long>(expected));
  __syncthreads();
  if (threadIdx.x == 0 && sum != static_cast<unsigned long long>(got))
    atomicAdd(&counters->wrong_routing, 1ull);
}

__global__ void check_sums(Shape s, What what, const int64_t* iteration, int rank, const uint32_t* result,
                           const float* gradients, unsigned long long* wrong_sums) {
  const int64_t token = blockIdx.x;
  const bool used = token < tokens_of(s, *iteration, rank);
  int wrong = 0;
  for (int64_t i = threadIdx.x; i < s.hidden / 2; i += blockDim.x) {
    int low = 0, high = 0;
    for (int k = 0; used && k < kTopK; ++k) {
      const int e = expert_of(s, *iteration, rank, token, k);
      if (e < 0) continue;
      low += small_number(what, *iteration, rank, token, e, 2 * i);
      high += small_number(what, *iteration, rank, token, e, 2 * i + 1);
    }
    wrong |= result[token * (s.hidden / 2) + i] != (bf16_bits(low) | bf16_bits(high) << 16);
  }
  if (gradients != nullptr && threadIdx.x < kTopK) {
    const int e = used ? expert_of(s, *iteration, rank, token, static_cast<int>(threadIdx.x)) : -1;
    const float expected =
        e < 0 ? 0.f : static_cast<float>(small_number(what, *iteration, rank, token, e, -1));
    wrong |= gradients[token * kTopK + threadIdx.x] != expected;
  }
  wrong = __syncthreads_or(wrong);
  if (threadIdx.x == 0 && wrong) atomicAdd(wrong_sums, 1ull);
}

// ---- the run ---------------------------------------------------------------------------------------------------------------

struct Options {
  bool processes = false, graph = false;
  int ranks = 2, gpus = 1, passes = 1, iterations = 2000, groups = 1, delay_us = 40, hog_us = 0, tokens = 96,
      hidden = 512, kill = -1;
  bool stall = false;  // the rank to kill is stopped instead
  double seconds = 0, timeout = 20;
  std::string transport = "peer";
};

// What ranks tell each other besides the library; in memory that processes share.
struct Shared {
  uint8_t id[NVTE_EP_UNIQUE_ID_BYTES];
  std::atomic<int> has_id, arrived, stop, failed;
  std::atomic<int64_t> killed_at_ns;
  Counters counters[kMaxRanks];
};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Shared* all_ranks = nullptr;

[[noreturn]] void give_up(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
  fflush(stderr);
  if (all_ranks != nullptr) all_ranks->failed = 1;
  _exit(3);
}
#define CUDA(call)                                                                                      \
  do {                                                                                                  \
    const cudaError_t error_ = (call);                                                                  \
    if (error_ != cudaSuccess) give_up("line %d: %s: %s", __LINE__, #call, cudaGetErrorString(error_)); \
  } while (0)
#define EP(call)                                                                                \
  do {                                                                                          \
    const nvte_ep_status_t status_ = (call);                                                    \
    if (status_ != NVTE_EP_STATUS_OK)                                                           \
      give_up("line %d: %s: %s", __LINE__, nvte_ep_status_name(status_), nvte_ep_last_error()); \
  } while (0)

class RankRun {
 public:
  RankRun(const Options& options, Shared* shared, int rank, int group)
      : o_(options), shared_(shared), rank_(rank), base_(int64_t{group} << 32) {}

  // One group of the rank's communicator.
  void open(nvte_ep_comm_t communicator) {
    device_ = rank_ % o_.gpus;
    CUDA(cudaSetDevice(device_));
    CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    int least = 0, greatest = 0;
    CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA(cudaStreamCreateWithPriority(&other_work_, cudaStreamNonBlocking, greatest));
    CUDA(cudaEventCreateWithFlags(&reached_, cudaEventDisableTiming));
    CUDA(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device_));
    CUDA(cudaFuncSetAttribute(occupy, cudaFuncAttributeMaxDynamicSharedMemorySize, kAllSharedBytes));
    const int experts = 4 * o_.ranks;
    const int64_t worst = int64_t{o_.ranks} * o_.tokens * kTopK + 4 * kAlignment;
    shape_ =
        Shape{o_.ranks, experts, o_.tokens, o_.hidden, (worst + kAlignment - 1) / kAlignment * kAlignment, 0};
    EP(nvte_ep_row_bytes(NVTE_EP_FORMAT_NVFP4, o_.hidden, &shape_.packed_bytes));

    nvte_ep_group_config_t group = NVTE_EP_GROUP_SETTINGS_INIT;
    group.device_type = NVTE_EP_DEVICE_CUDA;
    group.device_id = device_;
    group.num_experts = experts;
    group.max_top_k = kTopK;
    group.hidden = o_.hidden;
    group.max_tokens_per_rank = o_.tokens;
    group.recv_capacity = shape_.capacity;
    group.transport = o_.transport == "nccl" ? NVTE_EP_TRANSPORT_NCCL : NVTE_EP_TRANSPORT_PEER;
    group.timeout_ns = static_cast<int64_t>(o_.timeout * 1e9);
    EP(nvte_ep_group_create(communicator, &group, &group_));
    nvte_ep_handle_config_t handle = NVTE_EP_HANDLE_CONFIG_INIT;
    handle.top_k = kTopK;
    handle.alignment = kAlignment;
    handle.dispatch = handle.combine = handle.dispatch_backward = NVTE_EP_FORMAT_BF16;
    handle.combine_backward = NVTE_EP_FORMAT_NVFP4;
    for (nvte_ep_handle_t& h : handles_) EP(nvte_ep_handle_create(group_, &handle, &h));

    const int64_t local = experts / o_.ranks, slots = shape_.capacity;
    const auto room = [](auto** pointer, int64_t bytes) {
      CUDA(cudaMalloc(pointer, static_cast<size_t>(bytes)));
      CUDA(cudaMemset(*pointer, 0, static_cast<size_t>(bytes)));
    };
    room(&iteration_, 8);
    CUDA(cudaMemcpy(iteration_, &base_, 8, cudaMemcpyHostToDevice));
    room(&topk_, int64_t{o_.tokens} * kTopK * 4);
    room(&weights_, int64_t{o_.tokens} * kTopK * 4);
    room(&tokens_, int64_t{o_.tokens} * o_.hidden * 2);
    room(&packed_, o_.tokens * shape_.packed_bytes);
    room(&result_, int64_t{o_.tokens} * o_.hidden * 2);
    room(&choice_gradients_, int64_t{o_.tokens} * kTopK * 4);
    room(&received_, slots * o_.hidden * 2);
    room(&received_packed_, slots * shape_.packed_bytes);
    room(&slots_, slots * o_.hidden * 2);
    room(&slot_weights_, slots * 4);
    room(&slot_gradients_, slots * 4);
    room(&routed_, local * 8);
    room(&total_, 8);
    room(&source_, slots * 8);
    room(&expert_, slots * 4);
    room(&counters_, sizeof(Counters));
    CUDA(cudaDeviceSynchronize());
  }

  // One iteration, enqueued. host_tokens: how many tokens this rank has, as shapes say it.
  nvte_ep_status_t iterate(nvte_ep_handle_t handle, int host_tokens) {
    const unsigned rows = static_cast<unsigned>(host_tokens), slots = static_cast<unsigned>(shape_.capacity);
    const nvte_ep_tensor_t topk = matrix(topk_, host_tokens, kTopK, NVTE_EP_DTYPE_INT, 32);
    nvte_ep_tensor_t routed = vector(routed_, shape_.experts / shape_.ranks, NVTE_EP_DTYPE_INT, 64);
    nvte_ep_tensor_t total = vector(total_, 1, NVTE_EP_DTYPE_INT, 64);
    nvte_ep_tensor_t source = vector(source_, shape_.capacity, NVTE_EP_DTYPE_INT, 64);
    nvte_ep_tensor_t expert = vector(expert_, shape_.capacity, NVTE_EP_DTYPE_INT, 32);
    const nvte_ep_tensor_t tokens = matrix(tokens_, host_tokens, o_.hidden, NVTE_EP_DTYPE_BFLOAT, 16);
    const nvte_ep_tensor_t packed = matrix(packed_, host_tokens, shape_.packed_bytes, NVTE_EP_DTYPE_UINT, 8);
    const nvte_ep_tensor_t weights = matrix(weights_, host_tokens, kTopK, NVTE_EP_DTYPE_FLOAT, 32);
    nvte_ep_tensor_t result = matrix(result_, host_tokens, o_.hidden, NVTE_EP_DTYPE_BFLOAT, 16);
    nvte_ep_tensor_t choice_gradients =
        matrix(choice_gradients_, host_tokens, kTopK, NVTE_EP_DTYPE_FLOAT, 32);
    nvte_ep_tensor_t received = matrix(received_, shape_.capacity, o_.hidden, NVTE_EP_DTYPE_BFLOAT, 16);
    nvte_ep_tensor_t received_packed =
        matrix(received_packed_, shape_.capacity, shape_.packed_bytes, NVTE_EP_DTYPE_UINT, 8);
    const nvte_ep_tensor_t answers = matrix(slots_, shape_.capacity, o_.hidden, NVTE_EP_DTYPE_BFLOAT, 16);
    nvte_ep_tensor_t slot_weights = vector(slot_weights_, shape_.capacity, NVTE_EP_DTYPE_FLOAT, 32);
    const nvte_ep_tensor_t slot_gradients = vector(slot_gradients_, shape_.capacity, NVTE_EP_DTYPE_FLOAT, 32);

    advance<<<1, 1, 0, stream_>>>(iteration_);
    if (rows > 0)
      route<<<(rows * kTopK + 127) / 128, 128, 0, stream_>>>(shape_, iteration_, rank_, host_tokens, topk_,
                                                             weights_);
    pause(0);
    nvte_ep_prepare_args_t prepare = NVTE_EP_PREPARE_ARGS_INIT;
    prepare.topk_idx = &topk;
    prepare.tokens_routed = &routed;
    prepare.total_rows = &total;
    prepare.slot_source = &source;
    prepare.slot_expert = &expert;
    if (const nvte_ep_status_t status = nvte_ep_handle_prepare(handle, &prepare, stream_)) return status;
    check_counts<<<1, 128, 0, stream_>>>(shape_, iteration_, rank_, routed_, counters_);

    for (What what : {kTokens, kOtherTokens}) {
      if (rows > 0) fill_tokens<<<rows, 128, 0, stream_>>>(shape_, what, iteration_, rank_, tokens_);
      pause(1 + what);
      nvte_ep_dispatch_args_t dispatch = NVTE_EP_DISPATCH_ARGS_INIT;
      dispatch.tokens = &tokens;
      dispatch.receive = NVTE_EP_RECEIVE_DECODED;
      dispatch.received = &received;
      if (what == kTokens) {
        dispatch.topk_weights = &weights;
        dispatch.recv_weights = &slot_weights;
      }
      if (const nvte_ep_status_t status = nvte_ep_handle_dispatch(handle, &dispatch, stream_)) return status;
      check_slots<<<slots, 128, 0, stream_>>>(shape_, what, iteration_, rank_, total_, source_, expert_,
                                              received_, o_.hidden / 2,
                                              what == kTokens ? slot_weights_ : nullptr, counters_);
      const What answer = what == kTokens ? kExpertOut : kSlotGradients;
      fill_slots<<<slots, 128, 0, stream_>>>(shape_, answer, iteration_, rank_, total_, source_, expert_,
                                             slots_, slot_gradients_);
      pause(3 + what);
      if (what == kTokens) {
        nvte_ep_combine_args_t combine = NVTE_EP_COMBINE_ARGS_INIT;
        combine.expert_out = &answers;
        combine.result = &result;
        if (const nvte_ep_status_t status = nvte_ep_handle_combine(handle, &combine, stream_)) return status;
        if (rows > 0)
          check_sums<<<rows, 128, 0, stream_>>>(shape_, answer, iteration_, rank_, result_, nullptr,
                                                &counters_->wrong_sums);
      } else {
        nvte_ep_dispatch_backward_args_t backward = NVTE_EP_DISPATCH_BACKWARD_ARGS_INIT;
        backward.grad_received = &answers;
        backward.grad_recv_weights = &slot_gradients;
        backward.grad_tokens = &result;
        backward.grad_topk_weights = &choice_gradients;
        if (const nvte_ep_status_t status = nvte_ep_handle_dispatch_backward(handle, &backward, stream_))
          return status;
        if (rows > 0)
          check_sums<<<rows, 128, 0, stream_>>>(shape_, answer, iteration_, rank_, result_, choice_gradients_,
                                                &counters_->wrong_gradients);
      }
    }
    if (rows > 0) fill_packed<<<rows, 128, 0, stream_>>>(shape_, iteration_, rank_, packed_);
    pause(6);
    nvte_ep_dispatch_args_t send = NVTE_EP_DISPATCH_ARGS_INIT;
    send.tokens = &packed;
    send.receive = NVTE_EP_RECEIVE_ROWS;
    send.received = &received_packed;
    nvte_ep_combine_backward_args_t backward = NVTE_EP_COMBINE_BACKWARD_ARGS_INIT;
    backward.send = &send;
    if (const nvte_ep_status_t status = nvte_ep_handle_combine_backward(handle, &backward, stream_))
      return status;
    check_slots<<<slots, 128, 0, stream_>>>(shape_, kPackedRows, iteration_, rank_, total_, source_, expert_,
                                            received_packed_, shape_.packed_bytes / 4, nullptr, counters_);
    CUDA(cudaGetLastError());
    return NVTE_EP_STATUS_OK;
  }

  // Iteration i of a pass. False: the group has failed, in the way that --kill wants it.
  bool step(int64_t first, int i) {
    nvte_ep_status_t status = NVTE_EP_STATUS_OK;
    nvte_ep_handle_t handle = handles_[i % 2];
    cudaGraphExec_t& replay = replays_[i % 2];
    if (!o_.graph) {
      status = iterate(handle, tokens_of(shape_, base_ + first + i + 1, rank_));
      const uint32_t r = random_word(kDelay, first + i, rank_, 99, 0);
      if (o_.delay_us > 0 && r % 16 == 0) usleep((r >> 8) % static_cast<uint32_t>(4 * o_.delay_us));
    } else if (i < 4) {  // the first prepare of a handle cannot be captured
      status = iterate(handle, o_.tokens);
    } else {
      if (replay == nullptr) {
        cudaGraph_t graph = nullptr;
        CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
        EP(iterate(handle, o_.tokens));
        CUDA(cudaStreamEndCapture(stream_, &graph));
        CUDA(cudaGraphInstantiate(&replay, graph, 0));
        CUDA(cudaGraphDestroy(graph));
      }
      CUDA(cudaGraphLaunch(replay, stream_));
    }
    if (i % 64 == 63 || o_.kill >= 0) CUDA(cudaStreamSynchronize(stream_));  // bounds what is in flight
    return (o_.kill < 0 && status == NVTE_EP_STATUS_OK) || check_alive(status);
  }

  bool end_pass() {
    CUDA(cudaStreamSynchronize(stream_));
    for (cudaGraphExec_t& replay : replays_) {
      if (replay != nullptr) CUDA(cudaGraphExecDestroy(replay));
      replay = nullptr;
    }
    Counters mine;
    CUDA(cudaMemcpy(&mine, counters_, sizeof(mine), cudaMemcpyDeviceToHost));
    shared_->counters[rank_] += mine;
    CUDA(cudaMemset(counters_, 0, sizeof(mine)));
    CUDA(cudaDeviceSynchronize());
    return check_alive(NVTE_EP_STATUS_OK);
  }

  void close() {
    EP(nvte_ep_group_destroy(group_));
    for (nvte_ep_handle_t handle : handles_) EP(nvte_ep_handle_destroy(handle));
    CUDA(cudaDeviceSynchronize());  // no sticky error
    for (void* memory :
         std::initializer_list<void*>{iteration_, topk_, weights_, tokens_, packed_, result_,
                                      choice_gradients_, received_, received_packed_, slots_, slot_weights_,
                                      slot_gradients_, routed_, total_, source_, expert_, counters_})
      CUDA(cudaFree(memory));
  }

 private:
  nvte_ep_tensor_t matrix(const void* data, int64_t rows, int64_t columns, int code, int bits) const {
    return nvte_ep_tensor_2d(data, rows, columns, code, bits, NVTE_EP_DEVICE_CUDA, device_);
  }
  nvte_ep_tensor_t vector(const void* data, int64_t size, int code, int bits) const {
    return nvte_ep_tensor_1d(data, size, code, bits, NVTE_EP_DEVICE_CUDA, device_);
  }
  void pause(int site) {
    if (o_.delay_us > 0) delay<<<1, 1, 0, stream_>>>(iteration_, rank_, site, o_.delay_us);
    if (o_.hog_us > 0 && !o_.graph) start_other_work(site);
  }
  // A while from here on, beside what the stream gets next.
  void start_other_work(int site) {
    const uint32_t r = random_word(kDelay, ++pauses_, rank_, 1000 + site, 0),
                   most = static_cast<uint32_t>(o_.hog_us);
    if (r % 4 != 0) return;
    CUDA(cudaEventRecord(reached_, stream_));
    CUDA(cudaStreamWaitEvent(other_work_, reached_, 0));
    occupy<<<1, 1, 0, other_work_>>>((r >> 4) % most * uint64_t{1000});
    occupy<<<sms_, 1024, kAllSharedBytes, other_work_>>>((r >> 14) % most * uint64_t{1000});
  }

  bool check_alive(nvte_ep_status_t status) {
    nvte_ep_error_info_t error = NVTE_EP_ERROR_INFO_INIT;
    EP(nvte_ep_group_poll_error(group_, &error));
    if (status == NVTE_EP_STATUS_OK && error.status == NVTE_EP_STATUS_OK) return true;
    const int64_t killed_at = shared_->killed_at_ns;
    const double after = static_cast<double>(now_ns() - killed_at) * 1e-9;
    const bool expected =
        killed_at != 0 && error.rank == o_.kill && after <= 2 * o_.timeout &&
        (error.status == NVTE_EP_STATUS_TIMEOUT || error.status == NVTE_EP_STATUS_PEER_FAILED);
    printf("rank %d: %s, rank %d, %.3f s after the kill%s\n", rank_, nvte_ep_status_name(error.status),
           error.rank, killed_at != 0 ? after : -1.0, expected ? "" : " (NOT what was expected)");
    fflush(stdout);
    if (!expected) shared_->failed = 1;
    return false;
  }

  const Options& o_;
  Shared* const shared_;
  const int rank_;
  const int64_t base_;  // groups have other data
  int device_ = 0;
  Shape shape_{};
  cudaStream_t stream_ = nullptr, other_work_ = nullptr;
  cudaEvent_t reached_ = nullptr;  // by stream_
  int sms_ = 0;
  int64_t pauses_ = 0;
  nvte_ep_group_t group_ = nullptr;
  nvte_ep_handle_t handles_[2] = {};
  cudaGraphExec_t replays_[2] = {};
  int64_t *iteration_ = nullptr, *routed_ = nullptr, *total_ = nullptr, *source_ = nullptr;
  int32_t *topk_ = nullptr, *expert_ = nullptr;
  uint32_t *tokens_ = nullptr, *packed_ = nullptr, *result_ = nullptr, *received_ = nullptr,
           *received_packed_ = nullptr;
  uint32_t* slots_ = nullptr;
  float *weights_ = nullptr, *choice_gradients_ = nullptr, *slot_weights_ = nullptr,
        *slot_gradients_ = nullptr;
  Counters* counters_ = nullptr;
};

// All ranks; false when one is gone.
bool barrier(const Options& o, Shared* shared, int* round) {
  ++*round;
  shared->arrived.fetch_add(1);
  const int64_t end = now_ns() + static_cast<int64_t>((3 * o.timeout + 60) * 1e9);
  while (shared->arrived < *round * o.ranks) {
    if (now_ns() > end || shared->failed) return false;
    usleep(100);
  }
  return true;
}

nvte_ep_comm_t join(const Options& o, Shared* shared, int rank) {
  if (rank == 0) {
    EP(nvte_ep_unique_id(o.processes ? NVTE_EP_COMM_NCCL : NVTE_EP_COMM_THREADS, shared->id));
    shared->has_id = 1;
  }
  while (!shared->has_id && !shared->failed) usleep(1000);
  nvte_ep_comm_config_t config = NVTE_EP_COMM_CONFIG_INIT;
  config.kind = o.processes ? NVTE_EP_COMM_NCCL : NVTE_EP_COMM_THREADS;
  config.num_ranks = o.ranks;
  config.rank = rank;
  config.device_id = rank % o.gpus;
  config.unique_id = shared->id;
  nvte_ep_comm_t comm = nullptr;
  EP(nvte_ep_comm_create(&config, &comm));
  return comm;
}

// Iterations of all groups in turn; false where one has failed.
bool run_pass(const Options& o, std::vector<std::unique_ptr<RankRun>>& groups, int pass) {
  for (int i = 0; i < o.iterations; ++i) {
    for (auto& group : groups) {
      if (!group->step(int64_t{pass} * o.iterations, i)) return false;
    }
  }
  for (auto& group : groups) {
    if (!group->end_pass()) return false;
  }
  return true;
}

int run_rank(const Options& o, Shared* shared, int rank) {
  CUDA(cudaSetDevice(rank % o.gpus));
  nvte_ep_comm_t comm = join(o, shared, rank);
  std::vector<std::unique_ptr<RankRun>> groups;
  for (int g = 0; g < o.groups; ++g) {
    groups.push_back(std::make_unique<RankRun>(o, shared, rank, g));
    groups.back()->open(comm);
  }
  const auto close = [&] {
    for (auto& group : groups) group->close();
    EP(nvte_ep_comm_destroy(comm));
  };
  int rounds = 0;
  if (!barrier(o, shared, &rounds)) give_up("rank %d: not all ranks have started", rank);
  const int64_t start = now_ns();
  unsigned long long wrong = 0, before = 0;
  for (int pass = 0; !shared->stop; ++pass) {
    const int64_t pass_start = now_ns();
    if (!run_pass(o, groups, pass)) {
      close();
      printf("rank %d: destroyed, %.3f s after the kill\n", rank,
             static_cast<double>(now_ns() - shared->killed_at_ns) * 1e-9);
      fflush(stdout);
      return shared->failed ? 1 : 0;
    }
    if (!barrier(o, shared, &rounds)) give_up("rank %d: a rank is gone", rank);
    if (rank == 0) {
      Counters sum{};
      for (int r = 0; r < o.ranks; ++r) sum += shared->counters[r];
      wrong = sum.wrong();
      printf(
          "pass %d: %d iterations, %llu rows so far, wrong: rows %llu, weights %llu, sums %llu, gradients "
          "%llu, "
          "packed rows %llu, routing %llu; %.2f s\n",
          pass + 1, o.iterations, sum.rows, sum.wrong_rows, sum.wrong_weights, sum.wrong_sums,
          sum.wrong_gradients, sum.wrong_packed, sum.wrong_routing,
          static_cast<double>(now_ns() - pass_start) * 1e-9);
      fflush(stdout);
      if (sum.rows <= before) give_up("pass %d: no row was checked", pass + 1);
      before = sum.rows;
      const bool enough =
          o.seconds > 0 ? static_cast<double>(now_ns() - start) * 1e-9 > o.seconds : pass + 1 >= o.passes;
      if (wrong > 0 || enough) shared->stop = 1;
    }
    if (!barrier(o, shared, &rounds)) give_up("rank %d: a rank is gone", rank);
  }
  close();
  return wrong > 0 ? 1 : 0;
}

bool parse(int argc, char** argv, Options* o) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--graph") {
      o->graph = true;
      continue;
    }
    if (++i == argc) return false;
    const char* value = argv[i];
    if (name == "--kind") {
      o->processes = std::strcmp(value, "processes") == 0;
      if (!o->processes && std::strcmp(value, "threads") != 0) return false;
    } else if (name == "--transport") {
      o->transport = value;
    } else if (name == "--seconds") {
      o->seconds = std::atof(value);
    } else if (name == "--timeout") {
      o->timeout = std::atof(value);
    } else {
      int* const number = name == "--ranks"        ? &o->ranks
                          : name == "--gpus"       ? &o->gpus
                          : name == "--passes"     ? &o->passes
                          : name == "--iterations" ? &o->iterations
                          : name == "--groups"     ? &o->groups
                          : name == "--delay"      ? &o->delay_us
                          : name == "--hog"        ? &o->hog_us
                          : name == "--tokens"     ? &o->tokens
                          : name == "--hidden"     ? &o->hidden
                          : name == "--kill"       ? &o->kill
                          : name == "--stall"      ? &o->kill
                                                   : nullptr;
      if (number == nullptr) return false;
      *number = std::atoi(value);
      if (name == "--stall") o->stall = true;
    }
  }
  return o->groups > 0 && o->ranks > 0 && o->ranks <= kMaxRanks && o->gpus > 0 && o->tokens > 0 &&
         o->hidden % 64 == 0 && (o->kill < 0 || (o->processes && o->kill < o->ranks));
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  if (!parse(argc, argv, &o)) {
    fprintf(stderr, "see the head of soak_peer.cu; --kill and --stall need --kind processes\n");
    return 2;
  }
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);  // a kernel that is loaded late waits for those that run
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32",
         0);  // streams that share a queue of the device wait for each other
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 3;
  Shared* shared = all_ranks = new (memory) Shared{};
  int result = 0;
  if (!o.processes) {
    std::vector<std::thread> threads;
    std::atomic<int> worst{0};
    for (int r = 0; r < o.ranks; ++r) {
      threads.emplace_back([&, r] {
        const int code = run_rank(o, shared, r);
        if (code > worst) worst = code;
      });
    }
    for (std::thread& thread : threads) thread.join();
    result = worst;
  } else {
    if (o.kill >= 0) {
      o.seconds = 1e9;
      o.iterations = 1 << 30;
    }
    std::vector<pid_t> children;
    for (int r = 0; r < o.ranks; ++r) {
      const pid_t child = fork();
      if (child == 0) _exit(run_rank(o, shared, r));
      children.push_back(child);
    }
    if (o.kill >= 0) {
      for (int i = 0; i < 60000 && shared->arrived < o.ranks; ++i) usleep(1000);
      sleep(1);
      shared->killed_at_ns = now_ns();
      kill(children[static_cast<size_t>(o.kill)], o.stall ? SIGSTOP : SIGKILL);
    }
    const int64_t end = now_ns() + static_cast<int64_t>((2 * o.timeout + 30) * 1e9);
    // The rank that was killed or stopped comes last.
    for (int i = 0; i < o.ranks; ++i) {
      const int r = o.kill < 0 ? i : (o.kill + 1 + i) % o.ranks;
      const pid_t child = children[static_cast<size_t>(r)];
      if (r == o.kill) kill(child, SIGCONT);
      int status = 0;
      while (waitpid(child, &status, o.kill >= 0 ? WNOHANG : 0) == 0) {
        if (now_ns() > end) {
          printf("rank %d: does not end\n", r);
          kill(child, SIGKILL);
          result = 1;
        }
        usleep(10000);
      }
      if (r == o.kill && !o.stall) continue;
      const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 3;
      if (code > result) result = code;
    }
  }
  printf("%s\n", result == 0 ? "OK" : "FAILED");
  return result;
}
