// Threads over the chunks of a row, or of several narrow rows: for kernels whose chunks do not depend on each
// other.
#ifndef NVTE_EP_BACKENDS_CUDA_ROW_THREADS_H_
#define NVTE_EP_BACKENDS_CUDA_ROW_THREADS_H_

#include <cstdint>

#include "backends/cuda/launch.h"
#include "core/row_layout.h"

namespace nvte_ep {

struct RowThreads {
  int chunks;  // of a row
  int threads_per_row;
  int rows_per_block;
};

constexpr int kRowThreads = 256;  // of a block, at most

inline RowThreads row_threads(int64_t chunks) {
  RowThreads t{};
  t.chunks = static_cast<int>(chunks);
  if (chunks <= kRowThreads / 2) {
    t.threads_per_row = static_cast<int>(chunks);
    t.rows_per_block = static_cast<int>(kRowThreads / chunks);
  } else {  // as few idle lanes as can be
    const int64_t rounds = (chunks + kRowThreads - 1) / kRowThreads;
    t.threads_per_row = static_cast<int>(round_up((chunks + rounds - 1) / rounds, 32));
    t.rows_per_block = 1;
  }
  return t;
}

inline LaunchShape row_launch(const RowThreads& t, int64_t rows) {
  LaunchShape shape;
  shape.blocks = (rows + t.rows_per_block - 1) / t.rows_per_block;
  shape.threads = static_cast<int>(round_up(static_cast<int64_t>(t.threads_per_row) * t.rows_per_block, 32));
  shape.bounded = true;
  return shape;
}

}  // namespace nvte_ep

#endif  // NVTE_EP_BACKENDS_CUDA_ROW_THREADS_H_
