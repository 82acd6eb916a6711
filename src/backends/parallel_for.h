// Splits a range over threads; runs inline where the range is small or one thread is allowed.
#ifndef NVTE_EP_BACKENDS_PARALLEL_FOR_H_
#define NVTE_EP_BACKENDS_PARALLEL_FOR_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace nvte_ep {

// Calls function(begin, end) on disjoint pieces of [0, count). grain: items worth a thread of their own. What function throws
// is thrown again when all pieces have ended.
template <typename Function>
void parallel_for(int64_t count, int64_t grain, int max_threads, const Function& function) {
  const int64_t pieces = std::min<int64_t>(max_threads, count / std::max<int64_t>(1, grain));
  if (pieces <= 1) {
    if (count > 0) function(int64_t{0}, count);
    return;
  }
  std::mutex mutex;
  std::exception_ptr failure;
  const auto run = [&](int64_t begin, int64_t end) {
    try {
      function(begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      failure = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(pieces - 1));
  int64_t begin = 0;
  for (int64_t piece = 0; piece < pieces - 1; ++piece) {
    const int64_t end = count * (piece + 1) / pieces;
    try {
      threads.emplace_back([&run, begin, end] { run(begin, end); });
    } catch (const std::system_error&) {
      break;  // no more threads to be had: the caller's does the rest
    }
    begin = end;
  }
  run(begin, count);
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_PARALLEL_FOR_H_
