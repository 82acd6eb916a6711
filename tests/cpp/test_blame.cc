// Whoever waits in vain names the rank that was lost, wherever it was lost: all ranks and their flags, played through.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "transports/peer/blame.h"

namespace nvte_ep {
namespace {

// Ranks that come to one meeting after the other, a flag at a time in a random order; one stops for ever after some flags.
class Play {
 public:
  Play(int32_t size, uint32_t first, uint32_t seed)
      : size_(size), random_(seed), flags_(static_cast<size_t>(size * size), first), ranks_(size) {
    for (Rank& rank : ranks_) rank.meeting = first;
  }

  void run(int32_t victim, int flags_of_victim) {
    for (bool moved = true; moved;) {
      moved = false;
      std::vector<int32_t> order;
      for (int32_t r = 0; r < size_; ++r) order.push_back(r);
      std::shuffle(order.begin(), order.end(), random_);
      for (int32_t r : order) {
        if (r == victim && flags_of_victim == 0) continue;
        if (!step(r)) continue;
        if (r == victim) --flags_of_victim;
        moved = true;
        break;
      }
    }
  }

  void expect_all_name(int32_t victim) const {
    const auto arrivals = [&](int32_t at, int32_t of) { return flag(at, of); };
    for (int32_t r = 0; r < size_; ++r) {
      if (r == victim) continue;
      for (int32_t peer = 0; peer < size_; ++peer) {
        const uint32_t meeting = ranks_[static_cast<size_t>(r)].meeting;
        if (peer == r || !is_missing(flag(r, peer), meeting)) continue;
        EXPECT_EQ(blamed(r, size_, peer, meeting, arrivals), victim)
            << "rank " << r << " waits for rank " << peer << " in meeting " << meeting;
        ++waits_;
      }
    }
    EXPECT_GE(waits_, size_ - 1);
  }

 private:
  struct Rank {
    uint32_t meeting = 0;
    std::vector<int32_t> to_tell;  // who has not got the flag of this meeting yet
  };
  uint32_t& flag(int32_t at, int32_t of) { return flags_[static_cast<size_t>(at * size_ + of)]; }
  uint32_t flag(int32_t at, int32_t of) const { return flags_[static_cast<size_t>(at * size_ + of)]; }

  // Sets one flag; false where the rank waits.
  bool step(int32_t r) {
    Rank& rank = ranks_[static_cast<size_t>(r)];
    if (rank.to_tell.empty()) {
      for (int32_t peer = 0; peer < size_; ++peer) {
        if (peer != r && is_missing(flag(r, peer), rank.meeting)) return false;
      }
      ++rank.meeting;
      for (int32_t peer = 0; peer < size_; ++peer) {
        if (peer != r) rank.to_tell.push_back(peer);
      }
      std::shuffle(rank.to_tell.begin(), rank.to_tell.end(), random_);
    }
    flag(rank.to_tell.back(), r) = rank.meeting;
    rank.to_tell.pop_back();
    return true;
  }

  const int32_t size_;
  std::mt19937 random_;
  std::vector<uint32_t> flags_;  // [at, of]
  std::vector<Rank> ranks_;
  mutable int32_t waits_ = 0;
};

TEST(Blame, EverySurvivorNamesTheRankThatIsLost) {
  for (int32_t size : {2, 3, 4, 8}) {
    for (int32_t victim = 0; victim < size; ++victim) {
      for (int flags = 0; flags <= 3 * (size - 1);
           ++flags) {  // between any two of its flags, or between meetings
        for (uint32_t seed = 0; seed < 20; ++seed) {
          // Meetings count on past 2^32.
          for (uint32_t first : {0u, 0xFFFFFFFEu}) {
            Play play(size, first, seed);
            play.run(victim, flags);
            play.expect_all_name(victim);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Blame, ARankNeverBlamesItself) {
  // Two ranks, nobody has come anywhere but rank `me`.
  const auto nothing = [](int32_t, int32_t) { return 0u; };
  EXPECT_EQ(blamed(0, 2, 1, 1, nothing), 1);
  EXPECT_EQ(blamed(1, 2, 0, 1, nothing), 0);
  EXPECT_EQ(blamed(1, 4, 2, 1, nothing), 0);
}

}  // namespace
}  // namespace nvte_ep
