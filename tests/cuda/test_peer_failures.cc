// What goes wrong between the ranks of `peer`: one that never comes, comes late, or ends the group while others wait on the
// device. Whoever is left learns in time which rank it was, calls return, graphs too, and the device is as good as before.
// Processes that are killed: soak_peer --kill.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "mirror.h"
#include "nvte_ep/nvte_ep.h"

namespace nvte_ep::testing {
namespace {

constexpr int64_t kHidden = 256;
constexpr int64_t kTokens = 16;
constexpr double kTimeout = 0.5;  // seconds

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One rank: a group, a handle, and what a step needs.
class Member {
 public:
  Member(int rank, int size, const uint8_t* id, double timeout) : rank_(rank) {
    int devices = 1;
    check_cuda(cudaGetDeviceCount(&devices));
    device_ = rank % devices;
    check_cuda(cudaSetDevice(device_));
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check_cuda(cudaMalloc(&memory_, kBytes));
    check_cuda(cudaMemset(memory_, 0, kBytes));
    check_cuda(cudaDeviceSynchronize());
    nvte_ep_comm_config_t comm = NVTE_EP_COMM_CONFIG_INIT;
    comm.kind = NVTE_EP_COMM_THREADS;
    comm.num_ranks = size;
    comm.rank = rank;
    comm.unique_id = id;
    EXPECT_EQ(nvte_ep_comm_create(&comm, &comm_), NVTE_EP_STATUS_OK) << nvte_ep_last_error();
    nvte_ep_group_config_t group = NVTE_EP_GROUP_SETTINGS_INIT;
    group.device_type = NVTE_EP_DEVICE_CUDA;
    group.device_id = device_;
    group.num_experts = size;
    group.hidden = kHidden;
    group.max_tokens_per_rank = kTokens;
    group.recv_capacity = kTokens * size;
    group.transport = NVTE_EP_TRANSPORT_PEER;
    group.timeout_ns = static_cast<int64_t>(timeout * 1e9);
    EXPECT_EQ(nvte_ep_group_create(comm_, &group, &group_), NVTE_EP_STATUS_OK) << nvte_ep_last_error();
    nvte_ep_handle_config_t handle = NVTE_EP_HANDLE_CONFIG_INIT;
    handle.top_k = 1;
    handle.alignment = 1;
    EXPECT_EQ(nvte_ep_handle_create(group_, &handle, &handle_), NVTE_EP_STATUS_OK) << nvte_ep_last_error();
    slots_ = kTokens * size;
  }
  ~Member() {
    EXPECT_EQ(nvte_ep_group_destroy(group_), NVTE_EP_STATUS_OK) << nvte_ep_last_error();
    EXPECT_EQ(nvte_ep_handle_destroy(handle_), NVTE_EP_STATUS_OK);
    EXPECT_EQ(nvte_ep_comm_destroy(comm_), NVTE_EP_STATUS_OK);
    check_cuda(cudaStreamDestroy(stream_));
    check_cuda(cudaFree(memory_));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "a sticky error";
  }

  nvte_ep_group_t group() const { return group_; }
  cudaStream_t stream() const { return stream_; }

  nvte_ep_status_t prepare() {
    const nvte_ep_tensor_t idx = tensor(0, kTokens, 1, NVTE_EP_DTYPE_INT, 32);
    nvte_ep_prepare_args_t args = NVTE_EP_PREPARE_ARGS_INIT;
    args.topk_idx = &idx;
    return nvte_ep_handle_prepare(handle_, &args, stream_);
  }
  nvte_ep_status_t dispatch() {
    const nvte_ep_tensor_t tokens = tensor(4096, kTokens, kHidden, NVTE_EP_DTYPE_BFLOAT, 16);
    nvte_ep_tensor_t received = tensor(65536, slots_, kHidden, NVTE_EP_DTYPE_BFLOAT, 16);
    nvte_ep_dispatch_args_t args = NVTE_EP_DISPATCH_ARGS_INIT;
    args.tokens = &tokens;
    args.receive = NVTE_EP_RECEIVE_DECODED;
    args.received = &received;
    return nvte_ep_handle_dispatch(handle_, &args, stream_);
  }
  nvte_ep_status_t combine() {
    const nvte_ep_tensor_t out = tensor(65536, slots_, kHidden, NVTE_EP_DTYPE_BFLOAT, 16);
    nvte_ep_tensor_t result = tensor(32768, kTokens, kHidden, NVTE_EP_DTYPE_BFLOAT, 16);
    nvte_ep_combine_args_t args = NVTE_EP_COMBINE_ARGS_INIT;
    args.expert_out = &out;
    args.result = &result;
    return nvte_ep_handle_combine(handle_, &args, stream_);
  }
  nvte_ep_status_t step() {
    if (const nvte_ep_status_t status = prepare()) return status;
    if (const nvte_ep_status_t status = dispatch()) return status;
    return combine();
  }
  void wait() { check_cuda(cudaStreamSynchronize(stream_)); }
  nvte_ep_error_info_t poll() {
    nvte_ep_error_info_t error = NVTE_EP_ERROR_INFO_INIT;
    EXPECT_EQ(nvte_ep_group_poll_error(group_, &error), NVTE_EP_STATUS_OK);
    return error;
  }
  // The group has failed because of a rank, and says so for ever: to poll_error and to every call.
  void expect_failed(int because_of, std::initializer_list<nvte_ep_status_t> allowed) {
    for (int turn = 0; turn < 2; ++turn) {
      const nvte_ep_error_info_t error = poll();
      const std::string words = nvte_ep_last_error();
      EXPECT_NE(words.find(text("rank ", because_of)), std::string::npos) << words;
      EXPECT_EQ(error.rank, because_of) << "on rank " << rank_;
      EXPECT_NE(std::find(allowed.begin(), allowed.end(), error.status), allowed.end())
          << "on rank " << rank_ << ": " << nvte_ep_status_name(error.status);
      EXPECT_EQ(dispatch(), error.status);
      EXPECT_EQ(prepare(), error.status);
      EXPECT_NE(std::string(nvte_ep_last_error()).find(text("rank ", because_of)), std::string::npos)
          << nvte_ep_last_error();
      EXPECT_EQ(combine(), error.status);
    }
    const double start = seconds();
    wait();
    EXPECT_LT(seconds() - start, 0.1) << "calls after a failure wait";
  }

 private:
  static constexpr size_t kBytes = size_t{1} << 20;
  nvte_ep_tensor_t tensor(size_t offset, int64_t rows, int64_t columns, int code, int bits) const {
    return nvte_ep_tensor_2d(static_cast<uint8_t*>(memory_) + offset, rows, columns, code, bits,
                             NVTE_EP_DEVICE_CUDA, device_);
  }
  const int rank_;
  int device_ = 0;
  int64_t slots_ = 0;
  void* memory_ = nullptr;
  cudaStream_t stream_ = nullptr;
  nvte_ep_comm_t comm_ = nullptr;
  nvte_ep_group_t group_ = nullptr;
  nvte_ep_handle_t handle_ = nullptr;
};

class PeerFailures : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    ASSERT_EQ(nvte_ep_unique_id(NVTE_EP_COMM_THREADS, id_), NVTE_EP_STATUS_OK);
  }
  // body(member, rank) on every rank, each with a thread and a finished step.
  template <typename Body>
  void run(int size, double timeout, const Body& body) {
    std::vector<std::thread> threads;
    std::atomic<int> ready{0};
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        Member member(r, size, id_, timeout);
        EXPECT_EQ(member.step(), NVTE_EP_STATUS_OK) << nvte_ep_last_error();
        member.wait();
        EXPECT_EQ(member.poll().status, NVTE_EP_STATUS_OK);
        ++ready;
        while (ready < size) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        body(member, r);
        ++ready;
        while (ready < 2 * size) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  uint8_t id_[NVTE_EP_UNIQUE_ID_BYTES];
};

TEST_F(PeerFailures, ARankThatNeverComes) {
  run(4, kTimeout, [](Member& member, int rank) {
    if (rank == 2) return;
    const double start = seconds();
    EXPECT_EQ(member.dispatch(), NVTE_EP_STATUS_OK);
    EXPECT_LT(seconds() - start, kTimeout / 2) << "a call has blocked the host";
    member.wait();
    EXPECT_GT(seconds() - start, 0.9 * kTimeout);
    EXPECT_LT(seconds() - start, 2 * kTimeout);
    member.expect_failed(2, {NVTE_EP_STATUS_TIMEOUT, NVTE_EP_STATUS_PEER_FAILED});
  });
}

// Who comes when the others have given up learns that the group is over, and that it was because of itself.
TEST_F(PeerFailures, ARankThatComesTooLate) {
  run(2, kTimeout, [](Member& member, int rank) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::duration<double>(2.5 * kTimeout));
    const double start = seconds();
    for (int step = 0; step < 4; ++step) (void)member.step();
    member.wait();
    EXPECT_LT(seconds() - start, 2 * kTimeout);
    if (rank == 0) {
      member.expect_failed(1, {NVTE_EP_STATUS_TIMEOUT});
    } else {
      member.expect_failed(1, {NVTE_EP_STATUS_PEER_FAILED});
    }
  });
}

TEST_F(PeerFailures, AbortEndsWaitsOnTheDevice) {
  run(3, 60, [](Member& member, int rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      EXPECT_EQ(nvte_ep_group_abort(member.group()), NVTE_EP_STATUS_OK);
    } else {
      const double start = seconds();
      for (int step = 0; step < 3; ++step) EXPECT_EQ(member.step(), NVTE_EP_STATUS_OK);
      member.wait();
      EXPECT_LT(seconds() - start, 2);
    }
    member.expect_failed(1, {NVTE_EP_STATUS_PEER_FAILED});
  });
}

// A graph is replayed many times while the peer has stopped: the first replay waits for the time-out, the others do not.
TEST_F(PeerFailures, GraphReplaysEndAtOnce) {
  run(2, kTimeout, [](Member& member, int rank) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    check_cuda(cudaStreamBeginCapture(member.stream(), cudaStreamCaptureModeThreadLocal));
    EXPECT_EQ(member.step(), NVTE_EP_STATUS_OK) << nvte_ep_last_error();
    check_cuda(cudaStreamEndCapture(member.stream(), &graph));
    check_cuda(cudaGraphInstantiate(&replay, graph, 0));
    const int replays = rank == 0 ? 60 : 20;
    const double start = seconds();
    for (int i = 0; i < replays; ++i) check_cuda(cudaGraphLaunch(replay, member.stream()));
    member.wait();
    EXPECT_LT(seconds() - start, 2 * kTimeout);
    if (rank == 0) {
      member.expect_failed(1, {NVTE_EP_STATUS_TIMEOUT});
    } else {
      std::this_thread::sleep_for(std::chrono::duration<double>(2 * kTimeout));
      member.expect_failed(1, {NVTE_EP_STATUS_PEER_FAILED});
    }
    check_cuda(cudaGraphExecDestroy(replay));
    check_cuda(cudaGraphDestroy(graph));
  });
}

// A rank leaves for good after an abort while the others' kernels may still read its memory.
TEST_F(PeerFailures, MemoryOutlivesTheRankThatLeaves) {
  for (int turn = 0; turn < 5; ++turn) {
    ASSERT_EQ(nvte_ep_unique_id(NVTE_EP_COMM_THREADS, id_), NVTE_EP_STATUS_OK);
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        Member member(r, 2, id_, 60);
        for (int step = 0; step < 20; ++step) (void)member.step();
        if (r == 1) {
          EXPECT_EQ(nvte_ep_group_abort(member.group()), NVTE_EP_STATUS_OK);
        }
      });  // rank 1 destroys everything at once; rank 0 when its steps are enqueued
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace nvte_ep::testing
