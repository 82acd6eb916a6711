// Rows, packed or apart, to tokens. A thread makes the 16 bytes of one store: 8 elements of BF16 or FP16, 4
// of FP32.
#include <type_traits>

#include "backends/cuda/launch.h"
#include "backends/cuda/row_threads.h"
#include "device/codec_options.cuh"
#include "device/decode.cuh"
#include "device/memory.cuh"
#include "device/warp.cuh"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

struct DequantizeArguments {
  RowsView rows;
  uint8_t* tokens;
  int64_t token_stride;  // bytes
  int token_alignment;
  int payload_alignment;
  CodecOptions options;
  RowWeighting weighting;
};

// The token scale of a row of NVFP4, NaN where it is none.
__device__ __forceinline__ float row_scale(const DequantizeArguments& a, const TensorScale& tensor_scale,
                                           int64_t row) {
  if (tensor_scale.kind == Nvfp4::ScaleKind::kLive) return exp2_int(tensor_scale.exponent);
  if (tensor_scale.kind == Nvfp4::ScaleKind::kNan || a.rows.token_scales == nullptr)
    return bits_float(kNanBits);
  const float scale = *reinterpret_cast<const float*>(a.rows.token_scales + row * a.rows.token_scale_stride);
  int exponent;
  return Nvfp4::classify(scale, &exponent) == Nvfp4::ScaleKind::kNan ? bits_float(kNanBits) : scale;
}

// ---- kernels ----------------------------------------------------------------------------------------------

constexpr int kChunksInFlight = 4;

template <typename Format, typename Token, bool kAligned>
__global__ void __launch_bounds__(kRowThreads, 4)
    dequantize_rows(const DequantizeArguments a, const RowThreads threads) {
  const int payload_alignment = kAligned ? 16 : a.payload_alignment;
  const int token_alignment = kAligned ? 16 : a.token_alignment;
  const int64_t count = rows_in_use(a.rows.rows, a.options);
  const TensorScale tensor_scale = read_tensor_scale(a.options);
  const int row_in_block = static_cast<int>(threadIdx.x) / threads.threads_per_row;
  const int first_chunk = static_cast<int>(threadIdx.x) % threads.threads_per_row;
  if (row_in_block >= threads.rows_per_block) return;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * threads.rows_per_block + row_in_block; row < count;
       row += static_cast<int64_t>(gridDim.x) * threads.rows_per_block) {
    const float token_scale = std::is_same_v<Format, Nvfp4> ? row_scale(a, tensor_scale, row) : 0.0f;
    const uint8_t* payload = a.rows.payload + row * a.rows.payload_stride;
    const uint8_t* scales = a.rows.scales + row * a.rows.scales_stride;
    uint8_t* out = a.tokens + row * a.token_stride;
    for (int chunk = first_chunk; chunk < threads.chunks;
         chunk += kChunksInFlight * threads.threads_per_row) {
      Chunk<Format, Token> c[kChunksInFlight];
#pragma unroll
      for (int i = 0; i < kChunksInFlight; ++i) {
        const int at = chunk + i * threads.threads_per_row;
        if (at < threads.chunks) c[i].load(payload, scales, at, payload_alignment);
      }
#pragma unroll
      for (int i = 0; i < kChunksInFlight; ++i) {
        const int at = chunk + i * threads.threads_per_row;
        if (at < threads.chunks)
          store16(out + static_cast<int64_t>(at) * 16, c[i].tokens(token_scale), token_alignment);
      }
    }
  }
}

// The gradient of a weighted slot: a thread block a row. The dot product is summed in FP64, in the same order
// every time.
template <typename Format, typename Token>
__global__ void __launch_bounds__(kRowThreads, 4) dequantize_weighted_rows(const DequantizeArguments a) {
  __shared__ double partial[kRowThreads / kWarp];
  const int64_t count = rows_in_use(a.rows.rows, a.options);
  const TensorScale tensor_scale = read_tensor_scale(a.options);
  const RowWeighting& w = a.weighting;
  const int64_t chunks = a.rows.hidden / kElements<Token>;
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const bool padding = w.slot_source != nullptr && w.slot_source[row] < 0;
    const float weight = w.weights != nullptr && !padding ? w.weights[row] : 1.0f;
    const float token_scale = std::is_same_v<Format, Nvfp4> ? row_scale(a, tensor_scale, row) : 0.0f;
    const uint8_t* payload = a.rows.payload + row * a.rows.payload_stride;
    const uint8_t* scales = a.rows.scales + row * a.rows.scales_stride;
    double sum = 0.0;
    for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
      float x[kElements<Token>];
      if (padding) {
#pragma unroll
        for (int i = 0; i < kElements<Token>; ++i) x[i] = 0.0f;
      } else {
        Chunk<Format, Token> c;
        c.load(payload, scales, static_cast<int>(chunk), a.payload_alignment);
        c.values(token_scale, x);
        if (w.dots != nullptr) {
          const uint8_t* y = static_cast<const uint8_t*>(w.expert_out.data);
          const int64_t first = row * w.expert_out.stride + chunk * kElements<Token>;
#pragma unroll
          for (int i = 0; i < kElements<Token>; ++i) {
            float v;
            switch (w.expert_out.dtype) {
              case DType::kBFloat16:
                v = bf16_to_float(reinterpret_cast<const uint16_t*>(y)[first + i]);
                break;
              case DType::kFloat16:
                v = Fp16Token::lo(reinterpret_cast<const uint16_t*>(y)[first + i]);
                break;
              default:
                v = reinterpret_cast<const float*>(y)[first + i];
            }
            sum = __dadd_rn(sum, __dmul_rn(static_cast<double>(x[i]), static_cast<double>(v)));
          }
        }
        if (w.weights != nullptr) {
#pragma unroll
          for (int i = 0; i < kElements<Token>; ++i) x[i] = mul_rn(x[i], weight);
        }
      }
      store16(a.tokens + row * a.token_stride + chunk * 16, pack_tokens<Token>(x), a.token_alignment);
    }
    if (w.dots == nullptr) continue;
#pragma unroll
    for (int d = kWarp / 2; d > 0; d /= 2) sum = __dadd_rn(sum, __shfl_down_sync(kAllLanes, sum, d));
    if (lane_id() == 0) partial[warp_id()] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      double total = 0.0;
      for (int i = 0; i < kRowThreads / kWarp; ++i) total = __dadd_rn(total, partial[i]);
      w.dots[row] = padding ? 0.0f : canonical_nan(static_cast<float>(total));
    }
    __syncthreads();
  }
}

template <typename Format, typename Token>
Status launch_format(const DequantizeArguments& a, bool weighted, const LaunchContext& context) {
  if (weighted) {
    LaunchShape shape;
    shape.bounded = true;
    shape.blocks = a.rows.rows;
    shape.threads = kRowThreads;
    return launch_kernel<dequantize_weighted_rows<Format, Token>>("dequantize_weighted_rows", context, shape,
                                                                  a);
  }
  const RowThreads threads = row_threads(a.rows.hidden / kElements<Token>);
  const LaunchShape shape = row_launch(threads, a.rows.rows);
  return a.token_alignment >= 16 && a.payload_alignment >= 16
             ? launch_kernel<dequantize_rows<Format, Token, true>>("dequantize_rows", context, shape, a,
                                                                   threads)
             : launch_kernel<dequantize_rows<Format, Token, false>>("dequantize_rows", context, shape, a,
                                                                    threads);
}

}  // namespace

Status launch_dequantize(int32_t format, const RowsView& rows, const TensorView& tokens,
                         const CodecOptions& options, const RowWeighting& weighting,
                         const LaunchContext& context) {
  DequantizeArguments a{};
  a.rows = rows;
  a.tokens = static_cast<uint8_t*>(tokens.data);
  a.token_stride = tokens.stride * dtype_bytes(tokens.dtype);
  a.token_alignment = alignment_of(tokens.data, a.token_stride);
  a.payload_alignment = alignment_of(rows.payload, rows.payload_stride);
  a.options = options;
  a.weighting = weighting;
  if (format != NVTE_EP_FORMAT_NVFP4) a.options.tensor_scale = nullptr;
  const bool weighted = weighting.weights != nullptr || weighting.dots != nullptr;
  return with_format(format, [&](auto traits) {
    using Format = decltype(traits);
    switch (tokens.dtype) {
      case DType::kBFloat16:
        return launch_format<Format, Bf16Token>(a, weighted, context);
      case DType::kFloat16:
        return launch_format<Format, Fp16Token>(a, weighted, context);
      default:
        return launch_format<Format, Fp32Token>(a, weighted, context);
    }
  });
}

}  // namespace nvte_ep
