// parallel_for covers every item once, whatever the numbers, and hands exceptions of its threads to the caller.
#include "backends/parallel_for.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>

namespace {

using nvte_ep::parallel_for;

TEST(ParallelFor, EveryItemOnce) {
  for (int64_t count : {0, 1, 2, 3, 7, 64, 1000}) {
    for (int64_t grain : {0, 1, 3, 64, 5000}) {
      for (int threads : {1, 2, 3, 16}) {
        std::unique_ptr<std::atomic<int>[]> visits(new std::atomic<int>[static_cast<size_t>(count)]());
        parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
          ASSERT_LT(begin, end);
          for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        });
        for (int64_t i = 0; i < count; ++i)
          ASSERT_EQ(visits[static_cast<size_t>(i)], 1) << i << " of " << count;
      }
    }
  }
}

TEST(ParallelFor, ExceptionsReachTheCallerWhenAllHaveEnded) {
  for (int64_t bad : {0, 50, 99}) {
    std::atomic<int> done{0};
    EXPECT_THROW(parallel_for(100, 1, 4,
                              [&](int64_t begin, int64_t end) {
                                if (begin <= bad && bad < end) throw std::runtime_error("one piece");
                                done += static_cast<int>(end - begin);
                              }),
                 std::runtime_error);
    EXPECT_EQ(done, 75) << "the other pieces ran to their end";
  }
}

}  // namespace
