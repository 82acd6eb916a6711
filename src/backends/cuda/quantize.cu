// Tokens to rows, packed or apart, and rows apart to packed ones.
//
// NVFP4 needs a row's largest magnitude before its first code, so a row is held in registers, by as many
// warps as it takes, and every byte of a token is read from memory once. Thread blocks are short-lived and
// come in the order of the rows: that keeps what the device reads and writes at one time close together, and
// memory is fastest then. Rows too wide to be held are read twice.
#include <type_traits>

#include "backends/cuda/launch.h"
#include "backends/cuda/row_threads.h"
#include "device/codec_options.cuh"
#include "device/kernel_order.cuh"
#include "device/memory.cuh"
#include "device/mxfp8_scale.cuh"
#include "device/nvfp4_block.cuh"
#include "device/tokens.cuh"
#include "device/warp.cuh"
#include "formats/mxfp8.h"

namespace nvte_ep {
namespace {

using namespace nvte_ep::device;  // NOLINT

struct QuantizeArguments {
  const uint8_t* tokens;
  int64_t token_stride;  // bytes
  int token_alignment;
  int payload_alignment;
  RowsView rows;
  RowLayout layout;
  CodecOptions options;

  // flip: flip_of(rows), read once
  __device__ __forceinline__ uint8_t* payload(int64_t row, int64_t flip) const {
    return rows.payload + (row * rows.payload_stride + flip);
  }
  __device__ __forceinline__ uint8_t* scales(int64_t row, int64_t flip) const {
    return rows.scales + (row * rows.scales_stride + flip);
  }
  __device__ __forceinline__ uint8_t* token_scale(int64_t row, int64_t flip) const {
    return rows.token_scales + (row * rows.token_scale_stride + flip);
  }
};

// What follows the scales in a packed row: the token scale, if there is one, between zero bytes. One warp
// writes it.
__device__ __forceinline__ void store_row_tail(const RowLayout& layout, uint8_t* row, uint32_t token_scale) {
  const int64_t used = layout.payload_bytes + layout.scale_bytes;
  const int64_t at = used + lane_id();
  if (at >= layout.row_bytes) return;
  const int64_t byte = at - layout.token_scale_offset;
  const bool in_scale = layout.token_scale_bytes != 0 && byte >= 0 && byte < 4;
  row[at] = in_scale ? static_cast<uint8_t>(token_scale >> (8 * byte)) : uint8_t{0};
}
__device__ __forceinline__ void store_token_scale(const QuantizeArguments& a, int64_t row, int64_t flip,
                                                  uint32_t bits) {
  if (a.rows.packed) {
    store_row_tail(a.layout, a.payload(row, flip), bits);
  } else if (a.rows.token_scales != nullptr && lane_id() == 0) {
    *reinterpret_cast<uint32_t*>(a.token_scale(row, flip)) = bits;
  }
}

// ---- NVFP4 ------------------------------------------------------------------------------------------------

constexpr int kMaxThreads = 512;
constexpr int kLoneWarps = 2;  // rows of one warp each that share a thread block

// Codes of a row whose largest magnitude is known. largest: FP32 bits, above infinity's if there is a NaN.
struct RowScale {
  int k;
  bool zero;  // zero bytes throughout
  bool finite;
  bool illegal;  // the tensor scale is none: the row reads as NaN

  __device__ __forceinline__ RowScale(const TensorScale& tensor_scale, uint32_t largest,
                                      uint32_t largest_number)
      : k(tensor_scale.kind == Nvfp4::ScaleKind::kLive ? tensor_scale.exponent
                                                       : Nvfp4::token_exponent(bits_float(largest_number))),
        zero(largest == 0),
        finite(largest < 0x7F800000u),
        illegal(tensor_scale.kind == Nvfp4::ScaleKind::kNan) {}

  __device__ __forceinline__ uint32_t token_scale(const TensorScale& tensor_scale, bool saturate) const {
    if (illegal || (!finite && !saturate)) return kNanBits;
    return zero && tensor_scale.kind != Nvfp4::ScaleKind::kLive ? 0u : float_bits(exp2_int(k));
  }
};

__device__ __forceinline__ Philox4 row_random(const QuantizeArguments& a, int64_t row, int64_t block,
                                              uint64_t seed, uint64_t offset) {
  const uint64_t blocks = static_cast<uint64_t>(a.rows.hidden) / Nvfp4::kBlock;
  return random_block(
      seed, offset, RandomStream::kRow,
      (a.options.row_id_base + static_cast<uint64_t>(row)) * blocks + static_cast<uint64_t>(block));
}

// One block of any row, at any alignment.
template <typename Token, bool kStochastic>
__device__ __forceinline__ void store_nvfp4_block(const QuantizeArguments& a, const Block16<Token>& x,
                                                  int64_t row, int64_t flip, int64_t block,
                                                  const RowScale& scale, uint64_t seed, uint64_t offset) {
  uint2 codes = make_uint2(0, 0);
  uint32_t b = scale.illegal ? 0x7Fu : 0u;
  if (!scale.illegal && !scale.zero) {
    Philox4 random;
    if constexpr (kStochastic) random = row_random(a, row, block, seed, offset);
    codes = encode_nvfp4_block<Token, kStochastic>(x, bits_float(x.largest_number()), scale.finite,
                                                   SecondLevel(scale.k, a.options.scale_up), random.word, &b);
    if (!scale.finite && !a.options.saturate && a.rows.token_scales == nullptr) b = 0x7Fu;
  }
  store8(a.payload(row, flip) + block * 8, codes, a.payload_alignment);
  a.scales(row, flip)[block] = static_cast<uint8_t>(b);
}

template <typename Token>
__device__ __forceinline__ Block16<Token> load_block(const uint8_t* from, int alignment) {
  Block16<Token> x;
#pragma unroll
  for (int i = 0; i < Token::kBytes; ++i) {
    const uint4 v = load16(from + 16 * i, alignment);
    x.word[4 * i] = v.x;
    x.word[4 * i + 1] = v.y;
    x.word[4 * i + 2] = v.z;
    x.word[4 * i + 3] = v.w;
  }
  return x;
}

// Registers decide how many rows a multiprocessor works on.
template <typename Token, int kUnits>
constexpr int kRowRegisters =
    Token::kBytes == 4 ? 72 : (kUnits <= 2 ? 80 : kUnits * Block16<Token>::kWords + 56);

// A row a thread block, or (kLoneWarp) a row a warp; a lane holds kUnits blocks of 16. Tokens at multiples of
// 16 bytes, payload at multiples of 8.
template <typename Token, bool kStochastic, int kUnits, bool kLoneWarp>
__global__ void __maxnreg__((kRowRegisters<Token, kUnits>)) quantize_nvfp4_rows(const QuantizeArguments a) {
  __shared__ uint32_t exchange[kLoneWarp ? 1 : 2][kLoneWarp ? 1 : kMaxWarps];
  using Block = Block16<Token>;
  constexpr int kBlockBytes = 16 * Token::kBytes;
  const bool ahead = a.options.reads_ahead;
  if (!ahead) wait_for_kernel_before();
  let_next_kernel_start();
  int64_t flip = ahead ? 0 : flip_of(a.rows);
  const int warps_per_row = kLoneWarp ? 1 : static_cast<int>(blockDim.x) / kWarp;
  const int rows_per_block = kLoneWarp ? static_cast<int>(blockDim.x) / kWarp : 1;
  const int64_t count = rows_in_use(a.rows.rows, a.options);
  const TensorScale tensor_scale = read_tensor_scale(a.options);
  uint64_t seed = 0, offset = 0;
  if constexpr (kStochastic) {
    seed = uniform(static_cast<uint64_t>(a.options.rng_state[0]));
    offset = uniform(static_cast<uint64_t>(a.options.rng_state[1]));
  }
  const int blocks = static_cast<int>(a.rows.hidden / Nvfp4::kBlock);
  const int first_block = kLoneWarp ? lane_id() : static_cast<int>(threadIdx.x);  // and block_step further on
  const int block_step = warps_per_row * kWarp;

  for (int64_t row = static_cast<int64_t>(blockIdx.x) * rows_per_block + (kLoneWarp ? warp_id() : 0);
       row < count; row += static_cast<int64_t>(gridDim.x) * rows_per_block) {
    const uint8_t* tokens = a.tokens + row * a.token_stride + first_block * kBlockBytes;
    Block x[kUnits];
    uint32_t partial[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (first_block + u * block_step < blocks) {
        x[u] = load_block<Token>(tokens + u * block_step * kBlockBytes, 16);
      } else {
        x[u] = Block{};
      }
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) partial[u] = x[u].partial_largest();
    uint32_t largest = partial[0];
#pragma unroll
    for (int u = 1; u < kUnits; ++u) largest = Block::combine(largest, partial[u]);
    largest = block_max(Block::largest_of(largest), warps_per_row, exchange[0]);
    uint32_t number = largest;
    if (largest > 0x7F800000u) {  // NaNs: the row's scale comes from the others
      number = 0;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const uint32_t m = x[u].largest_number();
        number = max(number, m > 0x7F800000u ? 0u : m);
      }
      number = block_max(number, warps_per_row, exchange[kLoneWarp ? 0 : 1]);
    }
    const RowScale scale(tensor_scale, largest, number);
    if (ahead) {
      wait_for_kernel_before();
      flip = flip_of(a.rows);
    }
    uint32_t left = ~0u;  // units that the fast functions do not take
    if (scale.finite && !scale.zero && !scale.illegal && scale.k <= kMaxFastExponent) {
      left = 0;
      const SecondLevel second(scale.k, a.options.scale_up);
      uint8_t* payload = a.payload(row, flip) + first_block * 8;
      uint8_t* scales = a.scales(row, flip) + first_block;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if (first_block + u * block_step >= blocks) break;
        const float amax = bits_float(Block::largest_of(partial[u]));
        const uint32_t b = second.block_scale_of_finite(amax);
        const float prepared = prepare_multiplier<Token, kStochastic>(second.multiplier(b), b);
        if (is_fast<Token, kStochastic>(amax, prepared)) {
          Philox4 random;
          if constexpr (kStochastic) random = row_random(a, row, first_block + u * block_step, seed, offset);
          *reinterpret_cast<uint2*>(payload + u * block_step * 8) =
              encode_fast<Token, kStochastic>(x[u], prepared, random.word);
          scales[u * block_step] = static_cast<uint8_t>(b);
        } else {
          left |= 1u << u;
        }
      }
    }
    if (left != 0) {  // rare, and out of the way: once for all units, from memory
#pragma unroll 1
      for (int u = 0; u < kUnits; ++u) {
        const int block = first_block + u * block_step;
        if ((left >> u & 1u) == 0 || block >= blocks) continue;
        store_nvfp4_block<Token, kStochastic>(a, load_block<Token>(tokens + u * block_step * kBlockBytes, 16),
                                              row, flip, block, scale, seed, offset);
      }
    }
    if (kLoneWarp || warp_id() == 0) {
      store_token_scale(a, row, flip, scale.token_scale(tensor_scale, a.options.saturate));
    }
    if (warps_per_row > 1) __syncthreads();  // before the next row's exchange
  }
  if (ahead)
    wait_for_kernel_before();  // without a row, too: whoever waits for this kernel waits for that one
}

// A thread block a row, read twice, at any alignment.
template <typename Token, bool kStochastic>
__global__ void __launch_bounds__(kMaxThreads) quantize_nvfp4_wide_rows(const QuantizeArguments a) {
  wait_for_kernel_before();
  let_next_kernel_start();
  const int64_t flip = flip_of(a.rows);
  __shared__ uint32_t exchange[2][kMaxWarps];
  const int64_t blocks = a.rows.hidden / Nvfp4::kBlock;
  const int64_t count = rows_in_use(a.rows.rows, a.options);
  const TensorScale tensor_scale = read_tensor_scale(a.options);
  uint64_t seed = 0, offset = 0;
  if constexpr (kStochastic) {
    seed = static_cast<uint64_t>(a.options.rng_state[0]);
    offset = static_cast<uint64_t>(a.options.rng_state[1]);
  }
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const uint8_t* tokens = a.tokens + row * a.token_stride;
    uint32_t largest = 0;
    uint32_t number = 0;
    for (int64_t block = threadIdx.x; block < blocks; block += blockDim.x) {
      const Block16<Token> x = load_block<Token>(tokens + block * 16 * Token::kBytes, a.token_alignment);
      largest = max(largest, x.largest());
      const uint32_t m = x.largest_number();
      number = max(number, m > 0x7F800000u ? 0u : m);
    }
    largest = block_max(largest, static_cast<int>(blockDim.x) / kWarp, exchange[0]);
    number = block_max(number, static_cast<int>(blockDim.x) / kWarp, exchange[1]);
    const RowScale scale(tensor_scale, largest, number);
    for (int64_t block = threadIdx.x; block < blocks; block += blockDim.x) {
      const Block16<Token> x = load_block<Token>(tokens + block * 16 * Token::kBytes, a.token_alignment);
      store_nvfp4_block<Token, kStochastic>(a, x, row, flip, block, scale, seed, offset);
    }
    if (warp_id() == 0) store_token_scale(a, row, flip, scale.token_scale(tensor_scale, a.options.saturate));
    __syncthreads();
  }
}

// ---- MXFP8 ------------------------------------------------------------------------------------------------

// Two lanes share a block of 32 elements; all lanes of a warp call it.
template <typename Token>
__device__ __forceinline__ uint4 encode_mxfp8_half(const Block16<Token>& x, uint32_t* scale) {
  // NaNs are dropped, unless all 32 elements are.
  const float mine = bits_float(x.largest_number());
  *scale = fast_mxfp8_scale(fmaxf(mine, __shfl_xor_sync(kAllLanes, mine, 1)));
  const float multiplier = fast_e8m0_inverse(*scale);
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes[i] =
        floats_to_e4m3x2(mul_rn(x.value(4 * i), multiplier), mul_rn(x.value(4 * i + 1), multiplier)) |
        (floats_to_e4m3x2(mul_rn(x.value(4 * i + 2), multiplier), mul_rn(x.value(4 * i + 3), multiplier))
         << 16);
  }
  return make_uint4(codes[0], codes[1], codes[2], codes[3]);
}

// Threads of a row, and chunks of a row, are even in number, so that the halves of a block meet in one warp.
template <typename Token, bool kAligned>
__global__ void __launch_bounds__(256, Token::kBytes == 4 && !kAligned ? 3 : 4)
    quantize_mxfp8_rows(const QuantizeArguments a, const RowThreads threads) {
  constexpr int kInFlight = 2;
  constexpr int kChunkBytes = 16 * Token::kBytes;
  wait_for_kernel_before();
  let_next_kernel_start();
  const int64_t flip = flip_of(a.rows);
  const int token_alignment = kAligned ? 16 : a.token_alignment;
  const int payload_alignment = kAligned ? 16 : a.payload_alignment;
  const int64_t count = rows_in_use(a.rows.rows, a.options);
  const int row_in_block = threads.row_of(threadIdx.x);
  const int first_chunk = static_cast<int>(threadIdx.x) - row_in_block * threads.threads_per_row;
  const int step = threads.threads_per_row;
  for (int64_t first_row = static_cast<int64_t>(blockIdx.x) * threads.rows_per_block; first_row < count;
       first_row += static_cast<int64_t>(gridDim.x) * threads.rows_per_block) {
    const int64_t row = first_row + row_in_block;
    // Threads without a row take part with no chunk of one.
    const int chunks = row_in_block < threads.rows_per_block && row < count ? threads.chunks : 0;
    const uint8_t* tokens = a.tokens + (row * a.token_stride + first_chunk * kChunkBytes);
    uint8_t* payload = a.payload(row, flip) + first_chunk * 16;
    uint8_t* scales = a.scales(row, flip) + first_chunk / 2;
#pragma unroll 1
    for (int done = 0; done < threads.chunks; done += kInFlight * step) {
      Block16<Token> x[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        x[i] = Block16<Token>{};
        if (done + i * step + first_chunk < chunks) {
          x[i] = load_block<Token>(tokens + (done + i * step) * kChunkBytes, token_alignment);
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        uint32_t scale;
        const uint4 codes = encode_mxfp8_half(x[i], &scale);
        if (done + i * step + first_chunk < chunks) {
          store16(payload + (done + i * step) * 16, codes, payload_alignment);
          if (first_chunk % 2 == 0) scales[(done + i * step) / 2] = static_cast<uint8_t>(scale);
        }
      }
    }
    if (a.rows.packed && chunks != 0) {
      const int pad = static_cast<int>(a.layout.row_bytes - a.layout.payload_bytes - a.layout.scale_bytes);
#pragma unroll 1
      for (int at = first_chunk; at < pad; at += step) {
        a.payload(row, flip)[a.layout.payload_bytes + a.layout.scale_bytes + at] = 0;
      }
    }
  }
}

// ---- BF16 -------------------------------------------------------------------------------------------------

// Eight elements a thread; BF16 tokens keep their bytes, NaN payloads too.
template <typename Token>
__global__ void __launch_bounds__(256, 4)
    quantize_bf16_rows(const QuantizeArguments a, const RowThreads threads) {
  wait_for_kernel_before();
  let_next_kernel_start();
  const int64_t flip = flip_of(a.rows);
  const int64_t count = rows_in_use(a.rows.rows, a.options);
  const int row_in_block = threads.row_of(threadIdx.x);
  const int first_chunk = static_cast<int>(threadIdx.x) - row_in_block * threads.threads_per_row;
  if (row_in_block >= threads.rows_per_block) return;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * threads.rows_per_block + row_in_block; row < count;
       row += static_cast<int64_t>(gridDim.x) * threads.rows_per_block) {
    for (int chunk = first_chunk; chunk < threads.chunks; chunk += threads.threads_per_row) {
      const uint8_t* from = a.tokens + row * a.token_stride + static_cast<int64_t>(chunk) * 8 * Token::kBytes;
      uint4 out = load16(from, a.token_alignment);
      if constexpr (std::is_same_v<Token, Fp16Token>) {
        out = make_uint4(floats_to_bf16x2(Token::lo(out.x), Token::hi(out.x)),
                         floats_to_bf16x2(Token::lo(out.y), Token::hi(out.y)),
                         floats_to_bf16x2(Token::lo(out.z), Token::hi(out.z)),
                         floats_to_bf16x2(Token::lo(out.w), Token::hi(out.w)));
      } else if constexpr (std::is_same_v<Token, Fp32Token>) {
        const uint4 more = load16(from + 16, a.token_alignment);
        out = make_uint4(floats_to_bf16x2(bits_float(out.x), bits_float(out.y)),
                         floats_to_bf16x2(bits_float(out.z), bits_float(out.w)),
                         floats_to_bf16x2(bits_float(more.x), bits_float(more.y)),
                         floats_to_bf16x2(bits_float(more.z), bits_float(more.w)));
      }
      store16(a.payload(row, flip) + static_cast<int64_t>(chunk) * 16, out, a.payload_alignment);
    }
    // H is a multiple of 16: a BF16 row has no pad.
  }
}

// ---- rows apart to packed rows ----------------------------------------------------------------------------

struct AssembleArguments {
  RowsView apart;
  RowsView packed;
  RowLayout layout;
  CodecOptions options;
  int payload_alignment;
  int scales_alignment;
};

// A thread block a row: payload, scales and tail by 16 bytes.
__global__ void __launch_bounds__(256, 4) assemble_rows(const AssembleArguments a) {
  wait_for_kernel_before();
  let_next_kernel_start();
  const int64_t count = rows_in_use(a.apart.rows, a.options);
  const TensorScale tensor_scale = read_tensor_scale(a.options);
  const int64_t flip = flip_of(a.packed);
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    uint8_t* to = a.packed.payload + (row * a.packed.payload_stride + flip);
    const auto copy = [&](uint8_t* out, const uint8_t* in, int64_t bytes, int alignment) {
      for (int64_t at = static_cast<int64_t>(threadIdx.x) * 16; at < bytes; at += blockDim.x * 16) {
        const int piece = static_cast<int>(bytes - at < 16 ? bytes - at : 16);
        store16(out + at, load16(in + at, alignment, piece), alignment, piece);
      }
    };
    copy(to, a.apart.payload + row * a.apart.payload_stride, a.layout.payload_bytes, a.payload_alignment);
    if (a.layout.scale_bytes != 0) {
      copy(to + a.layout.payload_bytes, a.apart.scales + row * a.apart.scales_stride, a.layout.scale_bytes,
           a.scales_alignment);
    }
    if (warp_id() == 0) {
      uint32_t bits = 0;
      if (a.layout.token_scale_bytes != 0) {
        if (tensor_scale.kind == Nvfp4::ScaleKind::kZero) {
          bits = *reinterpret_cast<const uint32_t*>(a.apart.token_scales + row * a.apart.token_scale_stride);
        } else {
          bits = tensor_scale.kind == Nvfp4::ScaleKind::kLive ? float_bits(exp2_int(tensor_scale.exponent))
                                                              : kNanBits;
        }
      }
      store_row_tail(a.layout, to, bits);
    }
  }
}

// ---- launches ---------------------------------------------------------------------------------------------

int64_t flip_bytes(const RowsView& rows) { return rows.flip == nullptr ? 0 : rows.flip_bytes; }

LaunchShape rows_shape(const RowThreads& threads, int64_t rows) {
  LaunchShape shape = row_launch(threads, rows);
  shape.overlaps = true;
  return shape;
}

template <typename Token, bool kStochastic, int kUnits, bool kLoneWarp>
Status launch_nvfp4_rows(const QuantizeArguments& a, const LaunchContext& context) {
  const int64_t blocks = a.rows.hidden / Nvfp4::kBlock;
  const int64_t warps = kLoneWarp ? kLoneWarps : (blocks + kWarp * kUnits - 1) / (kWarp * kUnits);
  const int64_t rows_per_block = kLoneWarp ? kLoneWarps : 1;
  LaunchShape shape;
  shape.bounded = true;
  shape.overlaps = true;
  shape.threads = static_cast<int>(warps * kWarp);
  shape.blocks = (a.rows.rows + rows_per_block - 1) / rows_per_block;
  return launch_kernel<quantize_nvfp4_rows<Token, kStochastic, kUnits, kLoneWarp>>("quantize_nvfp4_rows",
                                                                                   context, shape, a);
}

template <typename Token, bool kStochastic>
Status launch_nvfp4(const QuantizeArguments& a, const LaunchContext& context) {
  const int64_t blocks = a.rows.hidden / Nvfp4::kBlock;
  const int64_t units = (blocks + kWarp - 1) / kWarp;  // that a lone warp would hold
  constexpr int64_t kMaxWarpsPerRow = kMaxThreads / kWarp;
  if (a.token_alignment >= 16 && a.payload_alignment >= 8) {
    // A row a warp costs the fewest instructions; with few rows, a row a thread block is sooner done.
    const bool many = a.rows.rows >= int64_t{4} * context.sms;
    const bool few = a.rows.rows <= context.sms;
    if (units <= 2) return launch_nvfp4_rows<Token, kStochastic, 2, true>(a, context);
    if (few && units <= kMaxWarpsPerRow) return launch_nvfp4_rows<Token, kStochastic, 1, false>(a, context);
    if constexpr (Token::kBytes == 2) {
      if (many && units <= 4) return launch_nvfp4_rows<Token, kStochastic, 4, true>(a, context);
      if (many && units <= 8) return launch_nvfp4_rows<Token, kStochastic, 8, true>(a, context);
      if (many && units <= 14) return launch_nvfp4_rows<Token, kStochastic, 14, true>(a, context);
    }
    constexpr int kUnits = Token::kBytes == 2 ? 4 : 2;
    if (units <= kUnits * kMaxWarpsPerRow) {
      return launch_nvfp4_rows<Token, kStochastic, kUnits, false>(a, context);
    }
  }
  LaunchShape shape;
  shape.bounded = true;
  shape.overlaps = true;
  shape.threads = static_cast<int>(std::min<int64_t>(kMaxThreads, round_up(blocks, kWarp)));
  shape.blocks = a.rows.rows;
  return launch_kernel<quantize_nvfp4_wide_rows<Token, kStochastic>>("quantize_nvfp4_wide_rows", context,
                                                                     shape, a);
}

template <typename Token>
Status launch_tokens(int32_t format, const QuantizeArguments& a, const LaunchContext& context) {
  switch (format) {
    case NVTE_EP_FORMAT_NVFP4:
      return a.options.stochastic ? launch_nvfp4<Token, true>(a, context)
                                  : launch_nvfp4<Token, false>(a, context);
    case NVTE_EP_FORMAT_MXFP8: {
      const RowThreads threads = row_threads(a.rows.hidden / 16);
      const LaunchShape shape = rows_shape(threads, a.rows.rows);
      return a.token_alignment >= 16 && a.payload_alignment >= 16
                 ? launch_kernel<quantize_mxfp8_rows<Token, true>>("quantize_mxfp8_rows", context, shape, a,
                                                                   threads)
                 : launch_kernel<quantize_mxfp8_rows<Token, false>>("quantize_mxfp8_rows", context, shape, a,
                                                                    threads);
    }
    default: {
      const RowThreads threads = row_threads(a.rows.hidden / 8);
      return launch_kernel<quantize_bf16_rows<Token>>("quantize_bf16_rows", context,
                                                      rows_shape(threads, a.rows.rows), a, threads);
    }
  }
}

}  // namespace

Status launch_quantize(int32_t format, const TensorView& tokens, const RowsView& rows,
                       const CodecOptions& options, const LaunchContext& context) {
  QuantizeArguments a{};
  a.tokens = static_cast<const uint8_t*>(tokens.data);
  a.token_stride = tokens.stride * dtype_bytes(tokens.dtype);
  a.token_alignment = alignment_of(tokens.data, a.token_stride);
  a.payload_alignment = alignment_of(rows.payload, rows.payload_stride, flip_bytes(rows));
  a.rows = rows;
  a.layout = row_layout(*find_format(format), rows.hidden);
  a.options = options;
  switch (tokens.dtype) {
    case DType::kBFloat16:
      return launch_tokens<Bf16Token>(format, a, context);
    case DType::kFloat16:
      return launch_tokens<Fp16Token>(format, a, context);
    default:
      return launch_tokens<Fp32Token>(format, a, context);
  }
}

Status launch_assemble(int32_t format, const RowsView& apart, const RowsView& packed,
                       const CodecOptions& options, const LaunchContext& context) {
  AssembleArguments a{};
  a.apart = apart;
  a.packed = packed;
  a.layout = row_layout(*find_format(format), apart.hidden);
  a.options = options;
  if (format != NVTE_EP_FORMAT_NVFP4) a.options.tensor_scale = nullptr;
  a.payload_alignment =
      alignment_of(apart.payload, apart.payload_stride, reinterpret_cast<int64_t>(packed.payload),
                   packed.payload_stride, flip_bytes(packed));
  a.scales_alignment =
      alignment_of(apart.scales, apart.scales_stride, reinterpret_cast<int64_t>(packed.payload),
                   packed.payload_stride, a.layout.payload_bytes, flip_bytes(packed));
  LaunchShape shape;
  shape.bounded = true;
  shape.overlaps = true;
  shape.blocks = apart.rows;
  shape.threads = 256;
  return launch_kernel<assemble_rows>("assemble_rows", context, shape, a);
}

}  // namespace nvte_ep
