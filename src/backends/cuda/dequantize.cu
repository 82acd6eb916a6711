// Rows, packed or apart, to tokens. A thread makes the 16 bytes of one store: 8 elements of BF16 or FP16, 4
// of FP32.
#include <type_traits>

#include "backends/cuda/launch_kernel.h"
#include "backends/cuda/row_threads.h"
#include "device/codec_options.cuh"
#include "device/e2m1.cuh"
#include "device/memory.cuh"
#include "device/tokens.cuh"
#include "device/warp.cuh"
#include "formats/mxfp8.h"

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

template <typename Token>
constexpr int kElements = 16 / Token::kBytes;

// FP32 numbers, NaN canonical or not, to the 16 bytes of a store.
template <typename Token>
__device__ __forceinline__ uint4 pack_tokens(const float* x) {
  if constexpr (std::is_same_v<Token, Bf16Token>) {
    return make_uint4(floats_to_bf16x2(x[0], x[1]), floats_to_bf16x2(x[2], x[3]),
                      floats_to_bf16x2(x[4], x[5]), floats_to_bf16x2(x[6], x[7]));
  } else if constexpr (std::is_same_v<Token, Fp16Token>) {
    return make_uint4(floats_to_fp16x2(x[0], x[1]), floats_to_fp16x2(x[2], x[3]),
                      floats_to_fp16x2(x[4], x[5]), floats_to_fp16x2(x[6], x[7]));
  } else {
    return make_uint4(float_bits(canonical_nan(x[0])), float_bits(canonical_nan(x[1])),
                      float_bits(canonical_nan(x[2])), float_bits(canonical_nan(x[3])));
  }
}

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

// ---- one chunk of a row, before it is decoded, and decoded ------------------------------------------------

template <typename Format, typename Token>
struct Chunk;

template <typename Token>
struct Chunk<Nvfp4, Token> {
  uint32_t codes;
  uint32_t scale;

  __device__ __forceinline__ void load(const uint8_t* payload, const uint8_t* scales, int chunk,
                                       int alignment) {
    codes = Token::kBytes == 4 ? load2(payload + chunk * int64_t{2}, alignment)
                               : load4(payload + chunk * int64_t{4}, alignment);
    scale = scales[chunk / (Nvfp4::kBlock / kElements<Token>)];
  }
  // Exact in BF16, or NaN: then the result is true.
  __device__ __forceinline__ bool decode_bf16(float token_scale, uint32_t* pairs) const {
    const float unit = mul_rn(fast_e4m3_to_float(scale & 0x7Fu), token_scale);
    const uint32_t u = float_bits(unit) >> 16;
    decode_e2m1x8_bf16(codes, u | (u << 16), pairs);
    return is_nan(unit);
  }
  __device__ __forceinline__ uint4 tokens(float token_scale) const {
    uint32_t p[4];
    const bool nan = decode_bf16(token_scale, p);
    if constexpr (std::is_same_v<Token, Bf16Token>) {
      return nan ? make_uint4(0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u)
                 : make_uint4(p[0], p[1], p[2], p[3]);
    } else if constexpr (std::is_same_v<Token, Fp16Token>) {
      if (nan) return make_uint4(0x7E007E00u, 0x7E007E00u, 0x7E007E00u, 0x7E007E00u);
      uint32_t h[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) h[i] = bits_of(__floats2half2_rn(Bf16Token::lo(p[i]), Bf16Token::hi(p[i])));
      return make_uint4(h[0], h[1], h[2], h[3]);
    } else {
      if (nan) return make_uint4(kNanBits, kNanBits, kNanBits, kNanBits);
      return make_uint4(p[0] << 16, p[0] & 0xFFFF0000u, p[1] << 16, p[1] & 0xFFFF0000u);
    }
  }
  __device__ __forceinline__ void values(float token_scale, float* x) const {
    uint32_t p[4];
    const bool nan = decode_bf16(token_scale, p);
#pragma unroll
    for (int i = 0; i < kElements<Token>; ++i) {
      x[i] = nan ? bits_float(kNanBits) : (i % 2 ? Bf16Token::hi(p[i / 2]) : Bf16Token::lo(p[i / 2]));
    }
  }
};

template <typename Token>
struct Chunk<Mxfp8, Token> {
  uint2 codes;
  uint32_t scale;

  __device__ __forceinline__ void load(const uint8_t* payload, const uint8_t* scales, int chunk,
                                       int alignment) {
    codes = Token::kBytes == 4 ? make_uint2(load4(payload + chunk * int64_t{4}, alignment), 0)
                               : load8(payload + chunk * int64_t{8}, alignment);
    scale = scales[chunk / (Mxfp8::kBlock / kElements<Token>)];
  }
  __device__ __forceinline__ void values(float, float* x) const {
    const float s = e8m0_to_float(static_cast<uint8_t>(scale));
    const uint32_t pair[4] = {codes.x & 0xFFFFu, codes.x >> 16, codes.y & 0xFFFFu, codes.y >> 16};
#pragma unroll
    for (int i = 0; i < kElements<Token> / 2; ++i) {
      const float2 f = e4m3x2_to_floats(pair[i]);
      x[2 * i] = mul_rn(s, f.x);
      x[2 * i + 1] = mul_rn(s, f.y);
    }
  }
  __device__ __forceinline__ uint4 tokens(float) const {
    float x[kElements<Token>];
    values(0.0f, x);
    // 0x7F and 0xFF are the NaNs; only then are results looked at one by one.
    const uint32_t nan =
        (((codes.x & 0x7F7F7F7Fu) + 0x01010101u) | ((codes.y & 0x7F7F7F7Fu) + 0x01010101u)) & 0x80808080u;
    if (nan != 0 || scale == 0xFFu || Token::kBytes == 4) return pack_tokens<Token>(x);
    uint32_t h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      h[i] = std::is_same_v<Token, Bf16Token> ? bits_of(__floats2bfloat162_rn(x[2 * i], x[2 * i + 1]))
                                              : bits_of(__floats2half2_rn(x[2 * i], x[2 * i + 1]));
    }
    return make_uint4(h[0], h[1], h[2], h[3]);
  }
};

template <typename Token>
struct Chunk<Bf16, Token> {
  uint4 pairs;

  __device__ __forceinline__ void load(const uint8_t* payload, const uint8_t*, int chunk, int alignment) {
    if constexpr (Token::kBytes == 4) {
      const uint2 half = load8(payload + chunk * int64_t{8}, alignment);
      pairs = make_uint4(half.x, half.y, 0, 0);
    } else {
      pairs = load16(payload + chunk * int64_t{16}, alignment);
    }
  }
  __device__ __forceinline__ void values(float, float* x) const {
    const uint32_t p[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < kElements<Token>; ++i)
      x[i] = i % 2 ? Bf16Token::hi(p[i / 2]) : Bf16Token::lo(p[i / 2]);
  }
  __device__ __forceinline__ uint4 tokens(float) const {
    if constexpr (std::is_same_v<Token, Bf16Token>) {
      return pairs;  // the bytes, NaN payloads too
    } else {
      float x[kElements<Token>];
      values(0.0f, x);
      return pack_tokens<Token>(x);
    }
  }
};

// ---- kernels ----------------------------------------------------------------------------------------------

constexpr int kChunksInFlight = 4;

template <typename Format, typename Token, bool kAligned>
__global__ void __launch_bounds__(kRowThreads, 4)
    dequantize_rows(const DequantizeArguments a, const RowThreads threads) {
  const int payload_alignment = kAligned ? 16 : a.payload_alignment;
  const int token_alignment = kAligned ? 16 : a.token_alignment;
  const int64_t count = rows_in_use(a.rows.rows, a.options);
  const TensorScale tensor_scale = read_tensor_scale(a.options);
  const int row_in_block = threads.row_of(threadIdx.x);
  const int first_chunk = static_cast<int>(threadIdx.x) - row_in_block * threads.threads_per_row;
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

__device__ __forceinline__ float element_of(const TensorView& view, int64_t at) {
  switch (view.dtype) {
    case DType::kBFloat16:
      return bf16_to_float(static_cast<const uint16_t*>(view.data)[at]);
    case DType::kFloat16:
      return Fp16Token::lo(static_cast<const uint16_t*>(view.data)[at]);
    default:
      return static_cast<const float*>(view.data)[at];
  }
}

// The gradient of a weighted slot: a thread block a row, a thread a lane of the dot product.
template <typename Format, typename Token>
__global__ void __launch_bounds__(kDotLanes, 4) dequantize_weighted_rows(const DequantizeArguments a) {
  constexpr int kCount = kElements<Token>;
  constexpr int kChunks = kDotRun / kCount;
  __shared__ double partial[kDotLanes / kWarp];
  const int64_t count = rows_in_use(a.rows.rows, a.options);
  const TensorScale tensor_scale = read_tensor_scale(a.options);
  const RowWeighting& w = a.weighting;
  const int64_t runs = a.rows.hidden / kDotRun;
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const bool padding = w.slot_source != nullptr && w.slot_source[row] < 0;
    const float weight = w.weights != nullptr && !padding ? w.weights[row] : 1.0f;
    const float token_scale = std::is_same_v<Format, Nvfp4> ? row_scale(a, tensor_scale, row) : 0.0f;
    const uint8_t* payload = a.rows.payload + row * a.rows.payload_stride;
    const uint8_t* scales = a.rows.scales + row * a.rows.scales_stride;
    double sum = 0.0;
    for (int64_t run = threadIdx.x; run < runs; run += kDotLanes) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const int64_t chunk = run * kChunks + j;
        float x[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] = 0.0f;
        if (!padding) {
          Chunk<Format, Token> c;
          c.load(payload, scales, static_cast<int>(chunk), a.payload_alignment);
          c.values(token_scale, x);
          if (w.dots != nullptr) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
              const float y = element_of(w.expert_out, row * w.expert_out.stride + chunk * kCount + i);
              sum = __dadd_rn(sum, __dmul_rn(static_cast<double>(x[i]), static_cast<double>(y)));
            }
          }
          if (w.weights != nullptr) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) x[i] = mul_rn(x[i], weight);
          }
        }
        store16(a.tokens + row * a.token_stride + chunk * 16, pack_tokens<Token>(x), a.token_alignment);
      }
    }
    if (w.dots == nullptr) continue;
#pragma unroll
    for (int d = kWarp / 2; d > 0; d /= 2) sum = __dadd_rn(sum, __shfl_down_sync(kAllLanes, sum, d));
    if (lane_id() == 0) partial[warp_id()] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      double total = 0.0;
      for (int i = 0; i < kDotLanes / kWarp; ++i) total = __dadd_rn(total, partial[i]);
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
    shape.threads = kDotLanes;
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
