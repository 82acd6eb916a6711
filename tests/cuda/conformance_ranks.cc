// The conformance cases with a process for each rank: layers over device memory, every output compared with the model. Every
// process runs the same tests in the same order; whoever starts them ends all when one fails.
//
//   RANK=0 WORLD_SIZE=2 NVTE_EP_ID_FILE=/tmp/id conformance_ranks nccl
//
// Rank 0 writes the communicator's id to the file, which must not exist before.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <thread>

#include "../cpp/layer.h"
#include "cuda_memory.h"

namespace {

using namespace ep_test;

struct World {
  Rank rank;
  Venue venue;
};
World* world = nullptr;

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) throw RankFailure(std::string(name) + " is not set");
  return text;
}

// The id appears whole, since it is renamed into place.
WorldId exchange_id(int rank, const std::string& path) {
  WorldId id(NVTE_EP_COMM_NCCL, rank == 0);
  if (rank == 0) {
    const std::string unfinished = path + ".unfinished";
    std::ofstream(unfinished, std::ios::binary)
        .write(reinterpret_cast<const char*>(id.bytes), sizeof(id.bytes));
    if (std::rename(unfinished.c_str(), path.c_str()) != 0) throw RankFailure("cannot write " + path);
    return id;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(id.bytes), sizeof(id.bytes))) {
    if (std::chrono::steady_clock::now() > end) throw RankFailure("rank 0 wrote no id to " + path);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return id;
}

std::vector<LayerCase> cases(int ranks) {
  struct Direction {
    int32_t format, receive;
  };
  const Direction directions[] = {
      {NVTE_EP_FORMAT_BF16, NVTE_EP_RECEIVE_ROWS},     {NVTE_EP_FORMAT_BF16, NVTE_EP_RECEIVE_DECODED},
      {NVTE_EP_FORMAT_MXFP8, NVTE_EP_RECEIVE_DECODED}, {NVTE_EP_FORMAT_MXFP8, NVTE_EP_RECEIVE_OPERAND},
      {NVTE_EP_FORMAT_NVFP4, NVTE_EP_RECEIVE_ROWS},    {NVTE_EP_FORMAT_NVFP4, NVTE_EP_RECEIVE_DECODED},
      {NVTE_EP_FORMAT_NVFP4, NVTE_EP_RECEIVE_OPERAND}};
  const Capacity capacities[] = {Capacity::kAmple, Capacity::kEager, Capacity::kHalf};
  const Type types[] = {Type::kBFloat16, Type::kFloat16, Type::kFloat32};
  const Input inputs[] = {Input::kTokens, Input::kRows, Input::kApart};
  std::vector<LayerCase> made;
  Random random(static_cast<uint64_t>(ranks));  // the same table on every rank
  for (const Direction& forward : directions) {
    for (Capacity capacity : capacities) {
      const Direction& backward = directions[random.below(7)];
      LayerCase c;
      c.name = "case" + std::to_string(made.size());
      c.ranks = ranks;
      c.experts_per_rank = static_cast<int>(1 + random.below(4));
      c.top_k = static_cast<int>(std::min<int64_t>(num_experts(c), 1 + random.below(5)));
      c.hidden = 32 * (1 + random.below(9));
      c.max_tokens = 1 + random.below(40);
      c.alignment = 1 << (2 * random.below(4));
      c.dispatch = forward.format;
      c.receive = forward.receive;
      c.combine_backward = backward.format;
      c.backward_receive = backward.receive;
      c.capacity = capacity;
      c.drop = random.chance(0.5);
      c.index_type = random.chance(0.5) ? Type::kInt32 : Type::kInt64;
      c.token_type = types[random.below(3)];
      c.received_type = types[random.below(3)];
      c.input = inputs[random.below(3)];
      c.columnwise = random.chance(0.5);
      c.stochastic = random.chance(0.5);
      c.slot_weights = random.chance(0.5);
      c.accumulate = random.chance(0.5);
      c.strided = random.chance(0.5);
      made.push_back(c);
    }
  }
  return made;
}

class ConformanceOfRanks : public ::testing::Test {
 public:
  explicit ConformanceOfRanks(LayerCase c) : case_(std::move(c)) {}
  void TestBody() override {
    SCOPED_TRACE(replay_text(case_.name));
    run_rank_of_layer(world->venue, case_, make_plan(case_, random_steps(case_, 3)), world->rank);
  }

 private:
  const LayerCase case_;
};

Venue venue_of(const std::string& transport) {
  const std::pair<const char*, int32_t> known[] = {{"peer", NVTE_EP_TRANSPORT_PEER},
                                                   {"nccl_ep", NVTE_EP_TRANSPORT_NCCL_EP},
                                                   {"nccl", NVTE_EP_TRANSPORT_NCCL}};
  for (const auto& [name, id] : known) {
    if (transport == name) return Venue{name, id, &cuda_memory(), false, false};
  }
  throw RankFailure("expected peer, nccl_ep or nccl, got " + transport);
}

int run(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 2) throw RankFailure("usage: conformance_ranks TRANSPORT, see the head of the source");
  const int rank = std::stoi(variable("RANK")), size = std::stoi(variable("WORLD_SIZE"));
  int gpus = 0;
  require_cuda(cudaGetDeviceCount(&gpus));
  require_cuda(cudaSetDevice(rank % gpus));
  const Comm comm =
      make_comm(exchange_id(rank, variable("NVTE_EP_ID_FILE")), rank, size, NVTE_EP_COMM_NCCL, rank % gpus);
  World here{Rank{rank, size, comm.get()}, venue_of(argv[1])};
  world = &here;
  for (const LayerCase& wanted : cases(size)) {
    const LayerCase c = case_for(here.venue, wanted);
    ::testing::RegisterTest("ConformanceOfRanks", c.name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                            [c]() -> ::testing::Test* { return new ConformanceOfRanks(c); });
  }
  ::testing::GTEST_FLAG(fail_fast) = true;  // the peers have lost this rank's place
  return RUN_ALL_TESTS();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
}
