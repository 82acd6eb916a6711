// Times every codec of the CUDA backend beside a device copy, and checks the timed buffers against the host
// backend.
//
//   codec_bench [--json FILE] [--markdown FILE] [--hidden H] [--rows N,N,...] [--only NAME] [--repeats N]
//
// Bytes are the fewest that must move: every input read once, every output written once. The rate to reach is
// that of a device copy in the same run: the better of cudaMemcpyAsync and a plain kernel, at 1 GB or more.
// Buffers rotate, so that what is read comes from memory as soon as one set is larger than the L2 cache;
// smaller sizes are marked.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/backend.h"

using namespace nvte_ep;  // NOLINT

namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}
void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

__global__ void __launch_bounds__(512) copy_kernel(const uint4* from, uint4* to, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = from[i], b = from[i + stride], c = from[i + 2 * stride], d = from[i + 3 * stride];
    to[i] = a;
    to[i + stride] = b;
    to[i + 2 * stride] = c;
    to[i + 3 * stride] = d;
  }
  for (; i < count; i += stride) to[i] = from[i];
}

struct DeviceBytes {
  uint8_t* data = nullptr;
  int64_t bytes;
  explicit DeviceBytes(int64_t n) : bytes(n) {
    check(cudaMalloc(reinterpret_cast<void**>(&data), static_cast<size_t>(std::max<int64_t>(n, 256))));
  }
  ~DeviceBytes() { cudaFree(data); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  // A host pattern, repeated.
  void fill(const std::vector<uint8_t>& pattern) {
    const int64_t n = static_cast<int64_t>(pattern.size());
    check(cudaMemcpy(data, pattern.data(), static_cast<size_t>(std::min(n, bytes)), cudaMemcpyHostToDevice));
    for (int64_t done = n; done < bytes; done *= 2) {
      check(cudaMemcpy(data + done, data, static_cast<size_t>(std::min(done, bytes - done)),
                       cudaMemcpyDeviceToDevice));
    }
  }
  std::vector<uint8_t> read(int64_t at, int64_t n) const {
    std::vector<uint8_t> out(static_cast<size_t>(n));
    check(cudaMemcpy(out.data(), data + at, out.size(), cudaMemcpyDeviceToHost));
    return out;
  }
};

struct Timing {
  double median_us, low_us, high_us;  // 10th and 90th percentile
};

// Launches in batches, so that the events' own cost vanishes; one number a batch.
Timing time_calls(const std::function<void(int)>& call, int repeats) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  int next = 0;
  const auto batch = [&](int n) {
    check(cudaEventRecord(begin, nullptr));
    for (int i = 0; i < n; ++i) call(next++);
    check(cudaEventRecord(end, nullptr));
    check(cudaEventSynchronize(end));
    float ms;
    check(cudaEventElapsedTime(&ms, begin, end));
    return 1000.0 * ms / n;
  };
  batch(3);
  const double once = batch(5);
  const int n = std::max(1, static_cast<int>(400.0 / once));
  std::vector<double> us;
  for (int i = 0; i < repeats; ++i) us.push_back(batch(n));
  std::sort(us.begin(), us.end());
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  const auto at = [&](double q) {
    return us[static_cast<size_t>(q * static_cast<double>(us.size() - 1) + 0.5)];
  };
  return {at(0.5), at(0.1), at(0.9)};
}

struct Result {
  std::string name;
  int64_t rows, hidden;
  double bytes;
  Timing t;
  double copy_gbs;
  bool cached, correct;
  double gbs() const { return bytes / t.median_us / 1e3; }
};

struct Options {
  std::string json, markdown, only;
  int64_t hidden = 7168;
  std::vector<int64_t> rows{16, 128, 1024, 4096, 16384, 131072};
  int repeats = 25;
};

class Bench {
 public:
  explicit Bench(const Options& options) : o_(options), rng_(7) {
    check(find_backend(Device{NVTE_EP_DEVICE_CUDA, 0}, 0, &cuda_));
    check(find_backend(Device(), 0, &host_));
    check(cudaGetDeviceProperties(&properties_, 0));
    check(cudaDriverGetVersion(&driver_));
    check(cudaRuntimeGetVersion(&runtime_));
  }

  void run() {
    measure_copy();
    for (const int64_t rows : o_.rows) run_size(rows);
    write();
  }
  bool all_correct() const {
    return std::all_of(results_.begin(), results_.end(), [](const Result& r) { return r.correct; });
  }

 private:
  bool wanted(const std::string& name) const {
    return o_.only.empty() || name.find(o_.only) != std::string::npos;
  }

  void measure_copy() {
    const int64_t bytes = int64_t{2} << 30;
    DeviceBytes a(bytes), b(bytes);
    a.fill(std::vector<uint8_t>(1 << 20, 7));
    const Timing memcpy_time = time_calls(
        [&](int) {
          check(
              cudaMemcpyAsync(b.data, a.data, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, nullptr));
        },
        o_.repeats);
    double best = memcpy_time.median_us;
    for (const int blocks : {2, 4, 8, 16}) {
      const Timing t = time_calls(
          [&](int) {
            copy_kernel<<<properties_.multiProcessorCount * blocks, 512>>>(
                reinterpret_cast<const uint4*>(a.data), reinterpret_cast<uint4*>(b.data), bytes / 16);
          },
          o_.repeats);
      std::printf("copy kernel, %d blocks per SM: %.0f GB/s\n", blocks,
                  2e-3 * static_cast<double>(bytes) / t.median_us);
      best = std::min(best, t.median_us);
    }
    copy_gbs_ = 2e-3 * static_cast<double>(bytes) / best;
    std::printf("cudaMemcpyAsync: %.0f GB/s; copy rate taken: %.0f GB/s\n\n",
                2e-3 * static_cast<double>(bytes) / memcpy_time.median_us, copy_gbs_);
  }

  // Tokens with outlier channels; 64 MB of them, repeated. Made once: that takes longer than timing a codec.
  const std::vector<uint8_t>& token_pattern(DType dtype, int64_t hidden) {
    const int64_t rows = 2048;
    std::vector<uint8_t>& out = patterns_[dtype];
    if (!out.empty()) return out;
    std::normal_distribution<float> normal;
    out.resize(static_cast<size_t>(rows * hidden * dtype_bytes(dtype)));
    for (int64_t i = 0; i < rows * hidden; ++i) {
      const float v = normal(rng_) * (i % hidden % 197 == 3 ? 40.0f : 1.0f);
      const uint16_t half = dtype == DType::kBFloat16 ? float_to_bf16(v) : float_to_fp16(v);
      if (dtype == DType::kFloat32) {
        std::memcpy(out.data() + i * 4, &v, 4);
      } else {
        std::memcpy(out.data() + i * 2, &half, 2);
      }
    }
    return out;
  }

  void record(const std::string& name, int64_t rows, int64_t hidden, double bytes, double set_bytes,
              const Timing& t, bool correct) {
    Result r{name, rows, hidden, bytes, t, copy_gbs_, set_bytes < 1.5 * properties_.l2CacheSize, correct};
    results_.push_back(r);
    std::printf("%-34s T %7lld H %5lld  %9.1f us (%.1f-%.1f)  %6.0f GB/s  %5.1f %% of copy%s%s\n",
                name.c_str(), static_cast<long long>(rows), static_cast<long long>(hidden), t.median_us,
                t.low_us, t.high_us, r.gbs(), 100.0 * r.gbs() / copy_gbs_, r.cached ? " (L2)" : "",
                correct ? "" : "  WRONG");
    std::fflush(stdout);
  }

  TensorView tokens_view(void* data, DType dtype, int64_t rows, int64_t hidden, bool cuda) const {
    TensorView v;
    v.data = data;
    v.dtype = dtype;
    v.device = cuda ? Device{NVTE_EP_DEVICE_CUDA, 0} : Device();
    v.ndim = 2;
    v.shape[0] = rows;
    v.shape[1] = v.stride = hidden;
    return v;
  }

  // Sets of buffers that are used in turn: as many as make twice the cache, at most 16.
  int sets_for(double set_bytes) const {
    return static_cast<int>(
        std::min(16.0, std::max(1.0, std::ceil(2.0 * properties_.l2CacheSize / set_bytes))));
  }

  void run_size(int64_t rows) {
    const int64_t hidden = o_.hidden;
    const bool all_types = rows >= 16384;
    for (const int32_t format : {NVTE_EP_FORMAT_NVFP4, NVTE_EP_FORMAT_MXFP8}) {
      const std::string name = find_format(format)->name;
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
        if (dtype != DType::kBFloat16 && !all_types) continue;
        const std::string from = std::string(dtype == DType::kBFloat16 ? "" : " ") +
                                 (dtype == DType::kBFloat16 ? "" : dtype_name(dtype));
        rows_and_back(format, name, from, dtype, rows, hidden);
      }
      receive(format, name, rows, hidden);
    }
    swizzle(rows, hidden);
    combine_steps(rows, hidden);
  }

  void rows_and_back(int32_t format, const std::string& name, const std::string& from, DType dtype,
                     int64_t rows, int64_t hidden) {
    if (!wanted(name + " pack stochastic" + from) && !wanted(name + " pack" + from) &&
        !wanted(name + " unpack" + from) && !wanted(name + " quantize" + from)) {
      return;
    }
    const RowLayout layout = row_layout(*find_format(format), hidden);
    const double token_bytes = static_cast<double>(rows * hidden * dtype_bytes(dtype));
    const double row_bytes = static_cast<double>(rows * layout.used_bytes());
    const double set_bytes = token_bytes + static_cast<double>(rows * layout.row_bytes);
    const int sets = sets_for(set_bytes);
    const std::vector<uint8_t>& pattern = token_pattern(dtype, hidden);
    std::vector<std::unique_ptr<DeviceBytes>> tokens, packed;
    for (int i = 0; i < sets; ++i) {
      tokens.push_back(std::make_unique<DeviceBytes>(static_cast<int64_t>(token_bytes)));
      tokens.back()->fill(pattern);
      packed.push_back(std::make_unique<DeviceBytes>(rows * layout.row_bytes));
      check(cudaMemset(packed.back()->data, 0xEE, static_cast<size_t>(packed.back()->bytes)));
    }
    DeviceBytes scales(rows * std::max<int64_t>(layout.scale_bytes, 1)), token_scales(rows * 4), rng(16);
    const int64_t state[2] = {1234, 5678};
    check(cudaMemcpy(rng.data, state, 16, cudaMemcpyHostToDevice));
    CodecOptions nearest, stochastic;
    stochastic.stochastic = true;
    stochastic.rng_state = reinterpret_cast<const int64_t*>(rng.data);

    const auto packs_right = [&](const CodecOptions& options) {
      const int64_t n = std::min<int64_t>(rows, 256);
      std::vector<uint8_t> x =
          tokens[0]->read((rows - n) * hidden * dtype_bytes(dtype), n * hidden * dtype_bytes(dtype));
      std::vector<uint8_t> want(static_cast<size_t>(n * layout.row_bytes));
      CodecOptions host_options = options;
      if (options.stochastic) host_options.rng_state = state;
      host_options.row_id_base = static_cast<uint64_t>(rows - n);
      check(host_->quantize(format, tokens_view(x.data(), dtype, n, hidden, false),
                            packed_rows(format, want.data(), layout.row_bytes, n, hidden), host_options,
                            nullptr));
      return packed[0]->read((rows - n) * layout.row_bytes, n * layout.row_bytes) == want;
    };
    for (const bool sr : {true, false}) {  // nearest last: its rows are unpacked
      if (sr && format != NVTE_EP_FORMAT_NVFP4) continue;
      const std::string what = name + " pack" + (sr ? " stochastic" : "") + from;
      const CodecOptions& options = sr ? stochastic : nearest;
      const auto call = [&](int i) {
        check(cuda_->quantize(format, tokens_view(tokens[i % sets]->data, dtype, rows, hidden, true),
                              packed_rows(format, packed[i % sets]->data, layout.row_bytes, rows, hidden),
                              options, nullptr));
      };
      if (wanted(what)) {
        const Timing t = time_calls(call, o_.repeats);
        for (int i = 0; i < sets; ++i) call(i);
        record(what, rows, hidden, token_bytes + row_bytes, set_bytes, t, packs_right(options));
      } else if (!sr) {
        for (int i = 0; i < sets; ++i) call(i);
      }
    }
    const std::string unpack = name + " unpack" + from;
    if (wanted(unpack)) {
      const auto call = [&](int i) {
        check(cuda_->dequantize(
            format, packed_rows(format, packed[i % sets]->data, layout.row_bytes, rows, hidden),
            tokens_view(tokens[i % sets]->data, dtype, rows, hidden, true), nearest, {}, nullptr));
      };
      const Timing t = time_calls(call, o_.repeats);
      const int64_t n = std::min<int64_t>(rows, 256);
      std::vector<uint8_t> in = packed[0]->read((rows - n) * layout.row_bytes, n * layout.row_bytes);
      std::vector<uint8_t> want(static_cast<size_t>(n * hidden * dtype_bytes(dtype)));
      check(host_->dequantize(format, packed_rows(format, in.data(), layout.row_bytes, n, hidden),
                              tokens_view(want.data(), dtype, n, hidden, false), nearest, {}, nullptr));
      record(
          unpack, rows, hidden, token_bytes + row_bytes, set_bytes, t,
          tokens[0]->read((rows - n) * hidden * dtype_bytes(dtype), n * hidden * dtype_bytes(dtype)) == want);
      for (auto& buffer : tokens) buffer->fill(pattern);
    }
    const std::string quantize = name + " quantize" + from;
    if (wanted(quantize)) {
      const auto view = [&](int i) {
        RowsView v;
        v.payload = packed[i % sets]->data;
        v.payload_stride = layout.payload_bytes;
        v.scales = scales.data;
        v.scales_stride = layout.scale_bytes;
        v.token_scales = layout.token_scale_bytes ? token_scales.data : nullptr;
        v.token_scale_stride = 4;
        v.rows = rows;
        v.hidden = hidden;
        return v;
      };
      const Timing t = time_calls(
          [&](int i) {
            check(cuda_->quantize(format, tokens_view(tokens[i % sets]->data, dtype, rows, hidden, true),
                                  view(i), nearest, nullptr));
          },
          o_.repeats);
      const int64_t n = std::min<int64_t>(rows, 256);
      std::vector<uint8_t> x =
          tokens[0]->read((rows - n) * hidden * dtype_bytes(dtype), n * hidden * dtype_bytes(dtype));
      std::vector<uint8_t> payload(static_cast<size_t>(n * layout.payload_bytes)),
          s(static_cast<size_t>(n * layout.scale_bytes)), ts(static_cast<size_t>(n * 4));
      RowsView h = view(0);
      h.payload = payload.data();
      h.scales = s.data();
      h.token_scales = layout.token_scale_bytes ? ts.data() : nullptr;
      h.rows = n;
      check(host_->quantize(format, tokens_view(x.data(), dtype, n, hidden, false), h, nearest, nullptr));
      record(quantize, rows, hidden, token_bytes + row_bytes, set_bytes, t,
             packed[0]->read((rows - n) * layout.payload_bytes, n * layout.payload_bytes) == payload &&
                 scales.read((rows - n) * layout.scale_bytes, n * layout.scale_bytes) == s);
    }
  }

  static OperandView bind(const OperandShape& shape, bool columnwise, uint8_t* base) {
    const nvte_ep_operand_layout_t p = operand_layout(shape, columnwise);
    OperandView v;
    v.shape = shape;
    v.payload = base + p.payload_offset;
    v.scales = base + p.scales_offset;
    if (columnwise) {
      v.columnwise_payload = base + p.columnwise_payload_offset;
      v.columnwise_scales = base + p.columnwise_scales_offset;
    }
    if (shape.traits().token_scale_bytes) {
      v.amax = reinterpret_cast<float*>(base + p.amax_offset);
      v.expert_scale = reinterpret_cast<float*>(base + p.expert_scale_offset);
      if (columnwise) {
        v.columnwise_amax = reinterpret_cast<float*>(base + p.columnwise_amax_offset);
        v.columnwise_expert_scale = reinterpret_cast<float*>(base + p.columnwise_expert_scale_offset);
      }
    }
    return v;
  }

  void receive(int32_t format, const std::string& name, int64_t rows, int64_t hidden) {
    const RowLayout layout = row_layout(*find_format(format), hidden);
    OperandShape shape;
    shape.format = format;
    shape.hidden = hidden;
    shape.capacity = rows;
    shape.alignment = rows >= 128 * 8 ? 128 : 16;
    shape.num_experts = static_cast<int32_t>(std::min<int64_t>(64, rows / shape.alignment));
    std::vector<int64_t> counts(static_cast<size_t>(shape.num_experts),
                                rows / shape.num_experts / shape.alignment * shape.alignment);
    counts.back() += rows / shape.alignment * shape.alignment - counts[0] * shape.num_experts;
    DeviceBytes device_counts(shape.num_experts * 8), rng(16);
    check(cudaMemcpy(device_counts.data, counts.data(), counts.size() * 8, cudaMemcpyHostToDevice));
    const int64_t state[2] = {1234, 5678};
    check(cudaMemcpy(rng.data, state, 16, cudaMemcpyHostToDevice));
    // Packed rows of tokens, repeated.
    const int64_t pattern_rows = 2048;
    std::vector<uint8_t> x = token_pattern(DType::kBFloat16, hidden);
    std::vector<uint8_t> pattern(static_cast<size_t>(pattern_rows * layout.row_bytes));
    check(host_->quantize(format, tokens_view(x.data(), DType::kBFloat16, pattern_rows, hidden, false),
                          packed_rows(format, pattern.data(), layout.row_bytes, pattern_rows, hidden),
                          CodecOptions(), nullptr));
    for (const int variant : {0, 1, 2}) {  // rowwise, both, both with stochastic rounding
      const bool columnwise = variant > 0;
      if (variant == 2 && format != NVTE_EP_FORMAT_NVFP4) continue;
      if (columnwise && shape.alignment < find_format(format)->columnwise_alignment) continue;
      const std::string what =
          name +
          (variant == 0 ? " receive rowwise" : (variant == 1 ? " receive both" : " receive both stochastic"));
      if (!wanted(what)) continue;
      const nvte_ep_operand_layout_t parts = operand_layout(shape, columnwise);
      const double read = static_cast<double>(rows * layout.used_bytes());
      const double written =
          static_cast<double>(rows * layout.payload_bytes + parts.scales_bytes +
                              (columnwise ? rows * layout.payload_bytes + parts.columnwise_scales_bytes : 0));
      const int sets = sets_for(read + written);
      std::vector<std::unique_ptr<DeviceBytes>> packed, operands;
      for (int i = 0; i < sets; ++i) {
        packed.push_back(std::make_unique<DeviceBytes>(rows * layout.row_bytes));
        packed.back()->fill(pattern);
        operands.push_back(std::make_unique<DeviceBytes>(parts.total_bytes));
      }
      CodecOptions options;
      if (variant == 2) {
        options.stochastic = true;
        options.rng_state = reinterpret_cast<const int64_t*>(rng.data);
      }
      const auto call = [&](int i) {
        check(cuda_->direct_receive(
            format, packed_rows(format, packed[i % sets]->data, layout.row_bytes, rows, hidden),
            IndexView{device_counts.data, true}, bind(shape, columnwise, operands[i % sets]->data), options,
            nullptr));
      };
      const Timing t = time_calls(call, o_.repeats);
      for (int i = 0; i < sets; ++i) call(i);
      // The first expert, or a part of it, again on the host: an expert's slab does not depend on the others.
      OperandShape small = shape;
      small.num_experts = 1;
      small.capacity = counts[0];
      const nvte_ep_operand_layout_t small_parts = operand_layout(small, columnwise);
      std::vector<uint8_t> in = packed[0]->read(0, counts[0] * layout.row_bytes),
                           want(static_cast<size_t>(small_parts.total_bytes + 256));
      uint8_t* base = want.data() + (256 - reinterpret_cast<uintptr_t>(want.data()) % 256) % 256;
      CodecOptions host_options = options;
      if (variant == 2) host_options.rng_state = state;
      check(host_->direct_receive(format, packed_rows(format, in.data(), layout.row_bytes, counts[0], hidden),
                                  IndexView{counts.data(), true}, bind(small, columnwise, base), host_options,
                                  nullptr));
      const auto same = [&](int64_t at, int64_t small_at, int64_t bytes) {
        return std::vector<uint8_t>(base + small_at, base + small_at + bytes) == operands[0]->read(at, bytes);
      };
      const int64_t block = find_format(format)->block, band = round_up(counts[0], 128);
      bool correct =
          same(parts.payload_offset, small_parts.payload_offset, counts[0] * layout.payload_bytes) &&
          same(parts.scales_offset, small_parts.scales_offset, band * round_up(hidden / block, 4));
      if (columnwise) {
        correct = correct &&
                  same(parts.columnwise_payload_offset, small_parts.columnwise_payload_offset,
                       counts[0] * layout.payload_bytes) &&
                  // Tiles in use: with fewer than 64 (128) rows there is room that nobody writes.
                  same(parts.columnwise_scales_offset, small_parts.columnwise_scales_offset,
                       round_up(counts[0] / block, 4) * round_up(hidden, 128));
      }
      record(what, rows, hidden, read + written, read + written, t, correct);
    }
  }

  void swizzle(int64_t rows, int64_t hidden) {
    // As many scales as make a matrix of the size of the other calls' tokens.
    const int64_t columns = hidden / 16;
    const int64_t matrix_rows = rows * 8;
    for (const bool inverse : {false, true}) {
      const std::string what = inverse ? "scales unswizzle" : "scales swizzle";
      if (!wanted(what)) continue;
      const int64_t tile_bytes = round_up(matrix_rows, 128) * round_up(columns, 4);
      const double bytes = static_cast<double>(matrix_rows * columns) + static_cast<double>(tile_bytes);
      const int sets = sets_for(bytes);
      std::vector<uint8_t> pattern(1 << 22);
      for (uint8_t& b : pattern) b = static_cast<uint8_t>(rng_());
      std::vector<std::unique_ptr<DeviceBytes>> scales, tiles;
      for (int i = 0; i < sets; ++i) {
        scales.push_back(std::make_unique<DeviceBytes>(matrix_rows * columns));
        tiles.push_back(std::make_unique<DeviceBytes>(tile_bytes));
        scales.back()->fill(pattern);
        tiles.back()->fill(pattern);
      }
      const auto view = [&](void* data) {
        TensorView v = tokens_view(data, DType::kUInt8, matrix_rows, columns, true);
        return v;
      };
      const auto call = [&](int i) {
        check(cuda_->swizzle(view(scales[i % sets]->data), IndexView(), 1, tiles[i % sets]->data,
                             round_up(matrix_rows, 128), inverse, nullptr));
      };
      const Timing t = time_calls(call, o_.repeats);
      const int64_t n = std::min<int64_t>(matrix_rows, 1024);
      std::vector<uint8_t> a = scales[0]->read(0, n * columns),
                           b = tiles[0]->read(0, round_up(n, 128) * round_up(columns, 4));
      std::vector<uint8_t> c = inverse ? std::vector<uint8_t>(a.size()) : std::vector<uint8_t>(b.size());
      TensorView h = view(inverse ? c.data() : a.data());
      h.shape[0] = n;
      check(host_->swizzle(h, IndexView(), 1, inverse ? b.data() : c.data(), round_up(n, 128), inverse,
                           nullptr));
      record(what, matrix_rows, columns, bytes, bytes, t, c == (inverse ? a : b));
    }
  }

  // Dispatch's and combine's steps on one device: 8 slots a token.
  void combine_steps(int64_t tokens, int64_t hidden) {
    constexpr int32_t kTopK = 8;
    const int64_t slots = tokens * kTopK;
    if (slots * hidden * 2 > (int64_t{24} << 30)) return;
    const double slot_bytes = static_cast<double>(slots * hidden * 2),
                 token_bytes = static_cast<double>(tokens * hidden * 2);
    std::vector<SlotAddress> address(static_cast<size_t>(slots));
    std::vector<int64_t> source(address.size());
    std::vector<int64_t> order(address.size());
    for (int64_t i = 0; i < slots; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), rng_);
    for (int64_t i = 0; i < slots; ++i) {
      address[i] = order[i];
      source[order[i]] = i / kTopK;
    }
    DeviceBytes map(slots * 8), sources(slots * 8), rows(slots * hidden * 2), result(tokens * hidden * 2),
        pointers(64), weights(slots * 4);
    check(cudaMemcpy(map.data, address.data(), address.size() * 8, cudaMemcpyHostToDevice));
    check(cudaMemcpy(sources.data, source.data(), source.size() * 8, cudaMemcpyHostToDevice));
    rows.fill(token_pattern(DType::kBFloat16, hidden));
    std::vector<uint8_t> weight_pattern(4096);
    for (size_t i = 0; i < 1024; ++i) {
      const float w = static_cast<float>(i) / 700.0f;
      std::memcpy(weight_pattern.data() + 4 * i, &w, 4);
    }
    weights.fill(weight_pattern);
    const void* base[] = {rows.data, reinterpret_cast<void*>(hidden * 2), weights.data, result.data};
    check(cudaMemcpy(pointers.data, base, sizeof(base), cudaMemcpyHostToDevice));
    const auto at = [&](int i) { return pointers.data + 8 * i; };
    if (wanted("reduce")) {
      ReduceRows r{};
      r.num_ranks = 1;
      r.top_k = kTopK;
      r.rows.pointers = reinterpret_cast<const void* const*>(at(0));
      r.rows.strides = reinterpret_cast<const int64_t*>(at(1));
      r.slots = reinterpret_cast<const SlotAddress*>(map.data);
      r.result = tokens_view(result.data, DType::kBFloat16, tokens, hidden, true);
      r.partial_format = NVTE_EP_FORMAT_BF16;
      const Timing t = time_calls([&](int) { check(cuda_->reduce_rows(r, nullptr)); }, o_.repeats);
      const int64_t n = std::min<int64_t>(tokens, 16);
      std::vector<uint8_t> picked, want(static_cast<size_t>(n * hidden * 2));
      std::vector<SlotAddress> local(static_cast<size_t>(n * kTopK));
      std::vector<float> w(local.size());
      for (int64_t i = 0; i < n * kTopK; ++i) {
        local[i] = i;
        const std::vector<uint8_t> one = rows.read(address[i] * hidden * 2, hidden * 2),
                                   weight = weights.read(address[i] * 4, 4);
        picked.insert(picked.end(), one.begin(), one.end());
        std::memcpy(&w[i], weight.data(), 4);
      }
      const void* host_rows[] = {picked.data()};
      const int64_t host_strides[] = {hidden * 2};
      const float* host_weights[] = {w.data()};
      ReduceRows h = r;
      h.rows.pointers = host_rows;
      h.rows.strides = host_strides;
      h.slots = local.data();
      h.result = tokens_view(want.data(), DType::kBFloat16, n, hidden, false);
      check(host_->reduce_rows(h, nullptr));
      record("reduce bf16, top_k 8", tokens, hidden, slot_bytes + token_bytes, slot_bytes + token_bytes, t,
             result.read(0, n * hidden * 2) == want);
    }
    if (wanted("gather")) {
      GatherRows g{};
      g.rows.pointers = reinterpret_cast<const void* const*>(at(3));
      g.rows.strides = reinterpret_cast<const int64_t*>(at(1));
      g.slot_source = reinterpret_cast<const int64_t*>(sources.data);
      g.slots = slots;
      g.row_bytes = hidden * 2;
      g.out = rows.data;
      g.out_stride = hidden * 2;
      result.fill(token_pattern(DType::kBFloat16, hidden));
      const Timing t = time_calls([&](int) { check(cuda_->gather_rows(g, nullptr)); }, o_.repeats);
      bool correct = true;
      for (int64_t s = 0; s < slots; s += slots / 16)
        correct = correct &&
                  rows.read(s * hidden * 2, hidden * 2) == result.read(source[s] * hidden * 2, hidden * 2);
      record("gather rows bf16, top_k 8", tokens, hidden, slot_bytes + token_bytes, slot_bytes + token_bytes,
             t, correct);
    }
  }

  void write() const {
    std::ostringstream json, table;
    json << "{\n  \"device\": \"" << properties_.name << "\", \"sms\": " << properties_.multiProcessorCount
         << ", \"l2_bytes\": " << properties_.l2CacheSize << ",\n  \"driver_cuda\": " << driver_
         << ", \"runtime_cuda\": " << runtime_ << ", \"copy_gb_per_s\": " << copy_gbs_
         << ",\n  \"results\": [";
    table << "Device: " << properties_.name << ", driver for CUDA " << driver_ / 1000 << "."
          << driver_ % 1000 / 10 << ", runtime " << runtime_ / 1000 << "." << runtime_ % 1000 / 10
          << ". Copy rate of this run: " << std::llround(copy_gbs_) << " GB/s (read + write).\n\n"
          << "| codec | T | H | median us | 10-90 % us | bytes | GB/s | share of copy rate | right "
             "|\n|---|---|---|---|---|---|---|---|---|\n";
    for (size_t i = 0; i < results_.size(); ++i) {
      const Result& r = results_[i];
      char line[512];
      std::snprintf(line, sizeof(line),
                    "%s\n    {\"codec\": \"%s\", \"rows\": %lld, \"hidden\": %lld, \"median_us\": %.3f, "
                    "\"p10_us\": %.3f, \"p90_us\": %.3f, \"bytes\": %.0f, \"gb_per_s\": %.1f, "
                    "\"share_of_copy\": %.4f, \"from_l2\": %s, \"correct\": %s}",
                    i ? "," : "", r.name.c_str(), static_cast<long long>(r.rows),
                    static_cast<long long>(r.hidden), r.t.median_us, r.t.low_us, r.t.high_us, r.bytes,
                    r.gbs(), r.gbs() / copy_gbs_, r.cached ? "true" : "false", r.correct ? "true" : "false");
      json << line;
      std::snprintf(line, sizeof(line),
                    "| %s | %lld | %lld | %.1f | %.1f-%.1f | %.3g | %.0f | %.1f %%%s | %s |\n",
                    r.name.c_str(), static_cast<long long>(r.rows), static_cast<long long>(r.hidden),
                    r.t.median_us, r.t.low_us, r.t.high_us, r.bytes, r.gbs(), 100.0 * r.gbs() / copy_gbs_,
                    r.cached ? " (L2)" : "", r.correct ? "yes" : "NO");
      table << line;
    }
    json << "\n  ]\n}\n";
    for (const auto& out : {std::make_pair(o_.json, json.str()), std::make_pair(o_.markdown, table.str())}) {
      if (out.first.empty()) continue;
      if (FILE* file = std::fopen(out.first.c_str(), "w")) {
        std::fputs(out.second.c_str(), file);
        std::fclose(file);
      }
    }
  }

  Options o_;
  std::mt19937_64 rng_;
  Backend* cuda_ = nullptr;
  Backend* host_ = nullptr;
  cudaDeviceProp properties_;
  int driver_ = 0, runtime_ = 0;
  double copy_gbs_ = 0;
  std::map<DType, std::vector<uint8_t>> patterns_;
  std::vector<Result> results_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--json")
      options.json = value;
    else if (key == "--markdown")
      options.markdown = value;
    else if (key == "--only")
      options.only = value;
    else if (key == "--hidden")
      options.hidden = std::atoll(value.c_str());
    else if (key == "--repeats")
      options.repeats = std::atoi(value.c_str());
    else if (key == "--rows") {
      options.rows.clear();
      std::stringstream list(value);
      for (std::string n; std::getline(list, n, ',');) options.rows.push_back(std::atoll(n.c_str()));
    } else {
      std::fprintf(stderr, "unknown argument %s\n", key.c_str());
      return 2;
    }
  }
  Bench bench(options);
  bench.run();
  return bench.all_correct() ? 0 : 1;
}
