/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvte_ep: expert-parallel dispatch and combine of Mixture-of-Experts tokens in BF16, MXFP8 and NVFP4.
 *
 * The whole public API. C99, standard headers only; usable from C++ and, through ctypes, from Python.
 *
 * Words, one meaning each
 *   token        an input vector [H]
 *   row          one token as bytes on the wire
 *   payload      the codes of a row             scales       its block scales
 *   token scale  NVFP4's FP32 second level      slot         one received row
 *   slab         the slots of one expert, padded to the alignment
 *   routing      the result of prepare: counts, offsets, slot maps
 *   operand      payload + scales (+ second-level scale) in the layout a grouped GEMM reads
 *   wire format  bf16, mxfp8, nvfp4             capacity     slots a rank can receive
 *   rank         a member of the expert-parallel group
 *   handle       the routing state of one layer or micro-batch
 *
 * Rules that hold for every function
 *   Status    Functions return nvte_ep_status_t; NVTE_EP_STATUS_OK is 0. After a failure nvte_ep_last_error() has the text
 *             "function: argument: expected ..., got ...". On failure out-parameters are untouched. Nothing throws,
 *             aborts, exits or prints.
 *   Structs   Begin with struct_size (set by the *_INIT macro) and flags (0). Zero means default in every field.
 *             Fields named reserved must be 0. A longer struct than this library knows is accepted only if what it does
 *             not know is zero.
 *   Tensors   The inner dimension is contiguous; the stride of the outer one is free (in elements) unless said otherwise.
 *             Alignment of base pointers: token arrays by element, packed rows 16 bytes, operand parts 256 bytes.
 *             Outputs overlap neither inputs nor each other, unless said otherwise.
 *   Streams   Work is enqueued on the given stream only, on the device of the tensors; the caller's current device stays
 *             as it was. Host tensors: stream must be NULL and the call does the work before it returns. Inputs must
 *             live, and outputs must not be read, until the stream has passed the call.
 *   Capture   Codecs and per-step calls allocate nothing, do not block the host and can be captured in a CUDA graph, but
 *             for host memory and eager groups.
 *   Threads   Codecs may be called from any thread. The calls on one group come from one thread at a time;
 *             nvte_ep_group_poll_error and nvte_ep_group_abort from any.
 */
#ifndef NVTE_EP_NVTE_EP_H_
#define NVTE_EP_NVTE_EP_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NVTE_EP_VERSION_MAJOR 0
#define NVTE_EP_VERSION_MINOR 1
#define NVTE_EP_VERSION_PATCH 0
/* Counter of the binary interface: the shared library's SOVERSION. */
#define NVTE_EP_ABI_VERSION 1

#if defined(_WIN32)
#define NVTE_EP_API
#else
#define NVTE_EP_API __attribute__((visibility("default")))
#endif

/* ---- status ---------------------------------------------------------------------------------------------------- */

typedef int32_t nvte_ep_status_t;
enum {
  NVTE_EP_STATUS_OK = 0,
  NVTE_EP_STATUS_INVALID_ARGUMENT = 1, /* an argument is wrong; the text names it */
  NVTE_EP_STATUS_UNSUPPORTED = 2,      /* legal, but not here: the text says what is missing */
  NVTE_EP_STATUS_BAD_STATE = 3,        /* the object cannot do this now (dispatch before prepare, destroyed group) */
  NVTE_EP_STATUS_OUT_OF_MEMORY = 4,
  NVTE_EP_STATUS_CUDA = 5,        /* the CUDA runtime or driver reported an error */
  NVTE_EP_STATUS_TRANSPORT = 6,   /* NCCL or NCCL EP reported an error, or handed out other rows than were sent */
  NVTE_EP_STATUS_PEER_FAILED = 7, /* a peer aborted, left or died; fatal for the group */
  NVTE_EP_STATUS_TIMEOUT = 8,     /* a peer did not arrive in time; fatal for the group */
  NVTE_EP_STATUS_OVERFLOW = 9,    /* more slots than recv_capacity; the kept ones are exact */
  NVTE_EP_STATUS_ABI_MISMATCH = 10,
  NVTE_EP_STATUS_INTERNAL = 11
};

/* ---- enumerations; they travel as int32_t ------------------------------------------------------------------------ */

enum { /* wire formats */
  NVTE_EP_FORMAT_BF16 = 0,
  NVTE_EP_FORMAT_MXFP8 = 1, /* E4M3 payload, one E8M0 scale per 32 elements */
  NVTE_EP_FORMAT_NVFP4 = 2  /* E2M1 payload, one E4M3 scale per 16 elements, one FP32 power-of-two token scale */
};
enum { /* DLPack device types */
  NVTE_EP_DEVICE_CPU = 1,
  NVTE_EP_DEVICE_CUDA = 2,
  NVTE_EP_DEVICE_CUDA_HOST = 3 /* pinned host memory: treated as host memory */
};
enum { /* DLPack type codes used here */
  NVTE_EP_DTYPE_INT = 0,
  NVTE_EP_DTYPE_UINT = 1,
  NVTE_EP_DTYPE_FLOAT = 2,
  NVTE_EP_DTYPE_BFLOAT = 4
};
enum { NVTE_EP_ROUNDING_NEAREST = 0, NVTE_EP_ROUNDING_STOCHASTIC = 1 /* nvfp4 payload only */ };
enum { /* a token that holds NaN or Inf */
  NVTE_EP_NONFINITE_PROPAGATE = 0, /* nvfp4: the token scale becomes NaN and the whole token reads back as NaN */
  NVTE_EP_NONFINITE_SATURATE = 1   /* NaN becomes +6 and Inf the largest value of its block */
};
enum { /* nvfp4 block scale */
  NVTE_EP_SCALE_ROUNDING_NEAREST = 0,
  NVTE_EP_SCALE_ROUNDING_UP = 1 /* towards +infinity: no clipping, so no clip bias with stochastic rounding */
};
enum { /* bound of an nvfp4 columnwise operand's values, from token scales alone */
  NVTE_EP_COLUMN_BOUND_L1 = 0, /* quarter of the largest sum of token scales over 16 rows */
  NVTE_EP_COLUMN_BOUND_MAX = 1 /* four times the largest token scale of the expert */
};
enum {
  NVTE_EP_SCALE_LAYOUT_SWIZZLED = 0, /* 128x4 tiles, as cuBLASLt reads them */
  NVTE_EP_SCALE_LAYOUT_LINEAR = 1    /* compact row-major */
};
enum { /* what dispatch and combine_backward hand out */
  NVTE_EP_RECEIVE_ROWS = 0,    /* packed rows as they came, uint8 [slots, row_bytes] */
  NVTE_EP_RECEIVE_DECODED = 1, /* BF16, FP16 or FP32 [slots, H] */
  NVTE_EP_RECEIVE_OPERAND = 2  /* nvte_ep_operand_t */
};
enum { NVTE_EP_COMM_THREADS = 1, NVTE_EP_COMM_NCCL = 2 };
/* What each can: docs/device_transports.md. */
enum {
  NVTE_EP_TRANSPORT_AUTO = 0,    /* host memory: THREADS; else the first of PEER, NCCL_EP, NCCL that serves the config */
  NVTE_EP_TRANSPORT_THREADS = 1, /* ranks are threads of one process, host memory */
  NVTE_EP_TRANSPORT_PEER = 2,    /* ranks load each other's device memory: one NVLink domain. No zero_copy */
  NVTE_EP_TRANSPORT_NCCL_EP = 3, /* needs NCCL EP and nvcc at run time. No sums in MXFP8 */
  NVTE_EP_TRANSPORT_NCCL = 4     /* ncclSend and ncclRecv. No zero_copy, num_sms 0, no sums in MXFP8 */
};
enum { /* more slots than recv_capacity */
  NVTE_EP_ON_OVERFLOW_ERROR = 0, /* nvte_ep_group_poll_error reports OVERFLOW with the rows needed */
  NVTE_EP_ON_OVERFLOW_DROP = 1   /* only dropped_rows tells */
};
enum { /* bits that codecs OR into nvte_ep_codec_options_t.findings */
  NVTE_EP_FINDING_ROW_COUNT = 1,    /* a row count did not fit and was clamped */
  NVTE_EP_FINDING_TENSOR_SCALE = 2, /* tensor_scale is not 2^[-116, 105]: every token became NaN */
  NVTE_EP_FINDING_EXPERT_SCALE = 4  /* a row did not fit fixed_expert_scale and was saturated, or that is no 2^[-116, 105] */
};

#define NVTE_EP_MAX_NDIM 4
#define NVTE_EP_UNIQUE_ID_BYTES 128

/* ---- common structs ----------------------------------------------------------------------------------------------- */

/* The CUDA stream type, without a CUDA header: the same type as cudaStream_t and CUstream. */
typedef struct CUstream_st* nvte_ep_stream_t;

/* A borrowed array with DLPack's numbers. strides are in elements; all zero means compact row-major. */
typedef struct nvte_ep_tensor {
  uint32_t struct_size;
  uint32_t flags;
  void* data;
  int64_t shape[NVTE_EP_MAX_NDIM];
  int64_t strides[NVTE_EP_MAX_NDIM];
  int32_t ndim;
  int32_t device_type; /* NVTE_EP_DEVICE_*; 0 = CPU */
  int32_t device_id;
  uint8_t dtype_code; /* NVTE_EP_DTYPE_* */
  uint8_t dtype_bits;
  uint16_t dtype_lanes; /* 0 or 1 */
} nvte_ep_tensor_t;
#define NVTE_EP_TENSOR_INIT \
  { (uint32_t)sizeof(nvte_ep_tensor_t), 0, NULL, {0, 0, 0, 0}, {0, 0, 0, 0}, 0, 0, 0, 0, 0, 0 }
#define NVTE_EP_TENSOR_V1_SIZE 96

/* A compact tensor in host or device memory, for callers with raw pointers: nvte_ep_tensor_2d(x, T, H, NVTE_EP_DTYPE_BFLOAT,
 * 16, NVTE_EP_DEVICE_CPU, 0). */
static inline nvte_ep_tensor_t nvte_ep_tensor_2d(const void* data, int64_t rows, int64_t columns, int dtype_code,
                                                 int dtype_bits, int device_type, int device_id) {
  nvte_ep_tensor_t tensor = NVTE_EP_TENSOR_INIT;
  tensor.data = (void*)(uintptr_t)data;
  tensor.ndim = 2;
  tensor.shape[0] = rows;
  tensor.shape[1] = columns;
  tensor.device_type = device_type;
  tensor.device_id = device_id;
  tensor.dtype_code = (uint8_t)dtype_code;
  tensor.dtype_bits = (uint8_t)dtype_bits;
  return tensor;
}
static inline nvte_ep_tensor_t nvte_ep_tensor_1d(const void* data, int64_t size, int dtype_code, int dtype_bits,
                                                 int device_type, int device_id) {
  nvte_ep_tensor_t tensor = nvte_ep_tensor_2d(data, size, 0, dtype_code, dtype_bits, device_type, device_id);
  tensor.ndim = 1;
  return tensor;
}

/* Options of the codecs. NULL in place of the struct means all defaults. */
typedef struct nvte_ep_codec_options {
  uint32_t struct_size;
  uint32_t flags;
  int32_t rounding;       /* NVTE_EP_ROUNDING_*; of pack, quantize and the columnwise operand */
  int32_t nonfinite;      /* NVTE_EP_NONFINITE_*; of pack and quantize */
  int32_t scale_rounding; /* NVTE_EP_SCALE_ROUNDING_* */
  int32_t column_bound;   /* NVTE_EP_COLUMN_BOUND_* */
  int64_t row_id_base;    /* id of row 0 in the random stream: row i draws as row_id_base + i */
  int32_t rank;           /* folded into the columnwise random stream, [0, 1023] */
  int32_t reserved0;
  const nvte_ep_tensor_t* rng_state; /* int64 [2] {seed, offset} on the tensors' device; needed for STOCHASTIC */
  /* float32 [1] on the tensors' device, 2^[-116, 105]: replaces every row's own token scale (tensor-scale mode) */
  const nvte_ep_tensor_t* tensor_scale;
  const nvte_ep_tensor_t* row_count;          /* int32 or int64 [1] on the device: rows in use; the rest is not touched */
  const nvte_ep_tensor_t* fixed_expert_scale; /* float32 [E], powers of two: direct_receive uses them as 2^K_e */
  nvte_ep_tensor_t* findings;                 /* int32 [1] on the device; NVTE_EP_FINDING_* bits are OR-ed in */
} nvte_ep_codec_options_t;
#define NVTE_EP_CODEC_OPTIONS_INIT \
  { (uint32_t)sizeof(nvte_ep_codec_options_t), 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL }
#define NVTE_EP_CODEC_OPTIONS_V1_SIZE 80

/* ---- library -------------------------------------------------------------------------------------------------------- */

/* Release number, MAJOR * 10000 + MINOR * 100 + PATCH. Cannot fail. Since ABI 1. */
NVTE_EP_API int32_t nvte_ep_version(void);

/* NVTE_EP_ABI_VERSION of the library that is loaded. Cannot fail. Since ABI 1. */
NVTE_EP_API int32_t nvte_ep_abi_version(void);

/* [out] json: NUL-terminated JSON, owned by the library, valid for ever: version, abi_version, formats, backends and
 * transports with "available" and, where false, "reason". Where there is a CUDA device, the first call looks for NCCL and
 * NCCL EP, and so loads them and sets the environment variables that NCCL EP's compiler reads. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_build_info(const char** json);

/* Name of a status class, e.g. "INVALID_ARGUMENT"; "UNKNOWN" for any other number. Cannot fail. Since ABI 1. */
NVTE_EP_API const char* nvte_ep_status_name(nvte_ep_status_t status);

/* Text of the last failure on the calling thread, "" after a success, but for nvte_ep_group_poll_error: what that has found,
 * in words. Valid until the thread's next call into this library. Cannot fail. Since ABI 1. */
NVTE_EP_API const char* nvte_ep_last_error(void);

typedef struct nvte_ep_format_info {
  uint32_t struct_size;
  uint32_t flags;
  const char* name;            /* "bf16", "mxfp8", "nvfp4"; owned by the library */
  int32_t format;              /* NVTE_EP_FORMAT_* */
  int32_t block;               /* elements that share a scale; 0: no scales */
  int32_t payload_bits;        /* bits per element */
  int32_t scale_bytes;         /* bytes per block scale; 0: no scales */
  int32_t token_scale_bytes;   /* 4 where a row carries an FP32 second-level scale, else 0 */
  int32_t hidden_multiple;     /* H of a row must be a multiple of this */
  int32_t operand_multiple;    /* H of an operand must be a multiple of this; 0: the format has no scaled operand */
  int32_t columnwise_alignment; /* smallest slab alignment with a columnwise operand */
} nvte_ep_format_info_t;
#define NVTE_EP_FORMAT_INFO_INIT { (uint32_t)sizeof(nvte_ep_format_info_t), 0, NULL, 0, 0, 0, 0, 0, 0, 0, 0 }
#define NVTE_EP_FORMAT_INFO_V1_SIZE 48

/* [in] format NVTE_EP_FORMAT_*, [in|out] info. Iterate from 0 until UNSUPPORTED to list every format. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_format_info(int32_t format, nvte_ep_format_info_t* info);

/* ---- codecs: local, no group needed ---------------------------------------------------------------------------------
 *
 * A packed row, little endian:
 *   bf16   BF16 elements                                                       zero pad to 16 bytes
 *   mxfp8  H E4M3 bytes | H/32 E8M0 bytes                                      zero pad to 16 bytes
 *   nvfp4  H/2 bytes of E2M1, element 2i in the low nibble | H/16 E4M3 bytes |
 *          FP32 token scale at the next multiple of 4                          zero pad to 16 bytes
 * Values: mxfp8 2^(scale - 127) * E4M3, nvfp4 E2M1 * E4M3 * token scale; both follow OCP MX v1.0 and NVIDIA's NVFP4.
 * All zero bytes are a zero token in every format.
 */

/* Bytes of one packed row of H = hidden elements, a multiple of 16. [out] row_bytes. Since ABI 1.
 * INVALID_ARGUMENT: hidden is not a positive multiple of hidden_multiple of the format. */
NVTE_EP_API nvte_ep_status_t nvte_ep_row_bytes(int32_t format, int64_t hidden, int64_t* row_bytes);

/* Tokens to packed rows. Local.
 * [in]  tokens  [T, H] bfloat16, float16 or float32; T may be 0 (data may then be NULL)
 * [out] rows    [T, row_bytes] uint8, row stride a multiple of 16
 * [in]  options NULL for defaults: rounding, nonfinite, scale_rounding, row_id_base, rng_state, tensor_scale, row_count,
 *               findings are used
 * Stochastic rounding draws Philox4x32-10: key = seed, counter = {offset lo, offset hi (31 bits), block id lo, hi} with
 * block id = (row_id_base + row) * (H / 16) + block; the same seed, offset and ids give the same bytes on any device.
 * Capturable. Statuses: INVALID_ARGUMENT, UNSUPPORTED, CUDA. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_nvfp4_pack(const nvte_ep_tensor_t* tokens, nvte_ep_tensor_t* rows,
                                                const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream);
/* As nvte_ep_nvfp4_pack; rounding is always to nearest, a NaN element becomes E4M3 NaN. Uses row_count. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_mxfp8_pack(const nvte_ep_tensor_t* tokens, nvte_ep_tensor_t* rows,
                                                const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream);

/* Packed rows to tokens. Local.
 * [in]  rows   [T, row_bytes] uint8;  [out] tokens [T, H] bfloat16, float16 or float32
 * Uses row_count and findings. Every NVFP4 value is exact in BF16; FP16 and MXFP8 to BF16 round to nearest even.
 * Hostile rows are decoded, never followed: a token scale that is neither 0 nor 2^[-116, 105] reads as NaN, the sign of
 * a block scale is ignored. Capturable. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_nvfp4_unpack(const nvte_ep_tensor_t* rows, nvte_ep_tensor_t* tokens,
                                                  const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream);
NVTE_EP_API nvte_ep_status_t nvte_ep_mxfp8_unpack(const nvte_ep_tensor_t* rows, nvte_ep_tensor_t* tokens,
                                                  const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream);

/* Tokens to payload and scales apart (the same bytes as in a row). Local.
 * [in]  tokens       [T, H] bfloat16, float16 or float32
 * [out] payload      uint8 [T, H/2] (nvfp4) or [T, H] (mxfp8)
 * [out] scales       uint8 [T, H/16] (nvfp4, E4M3) or [T, H/32] (mxfp8, E8M0), compact or strided rows
 * [out] token_scales float32 [T]; NULL only in tensor-scale mode, where a token with NaN or Inf then gets scale bytes 0x7F
 * Options as pack. Capturable. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_nvfp4_quantize(const nvte_ep_tensor_t* tokens, nvte_ep_tensor_t* payload,
                                                    nvte_ep_tensor_t* scales, nvte_ep_tensor_t* token_scales,
                                                    const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream);
NVTE_EP_API nvte_ep_status_t nvte_ep_mxfp8_quantize(const nvte_ep_tensor_t* tokens, nvte_ep_tensor_t* payload,
                                                    nvte_ep_tensor_t* scales, const nvte_ep_codec_options_t* options,
                                                    nvte_ep_stream_t stream);

/* The inverse of quantize: payload, scales (and token_scales, or options.tensor_scale) to tokens [T, H] bfloat16, float16
 * or float32. Uses row_count, tensor_scale, findings. Capturable. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_nvfp4_dequantize(const nvte_ep_tensor_t* payload, const nvte_ep_tensor_t* scales,
                                                      const nvte_ep_tensor_t* token_scales, nvte_ep_tensor_t* tokens,
                                                      const nvte_ep_codec_options_t* options, nvte_ep_stream_t stream);
NVTE_EP_API nvte_ep_status_t nvte_ep_mxfp8_dequantize(const nvte_ep_tensor_t* payload, const nvte_ep_tensor_t* scales,
                                                      nvte_ep_tensor_t* tokens, const nvte_ep_codec_options_t* options,
                                                      nvte_ep_stream_t stream);

/* ---- operands ---------------------------------------------------------------------------------------------------------
 *
 * With p_e = rows_per_expert[e], row_offsets its prefix sum and scale_row_offsets the prefix sum of p_e rounded up to 128
 * (B = block of the format, C = H / B scale columns, rup = round up):
 *   payload            [slots, payload bytes of a row]; slab e at row_offsets[e]
 *   scales             SWIZZLED: slab e at byte scale_row_offsets[e] * rup(C, 4); scale (i, j) of a slab at
 *                      ((i/128)*(rup(C,4)/4) + j/4)*512 + (i%32)*16 + ((i%128)/32)*4 + j%4.  LINEAR: [slots, C]
 *   columnwise_payload mxfp8 [slots, H]: requantised in blocks of 32 tokens.  nvfp4: slab e is [H, p_e/2] at byte
 *                      row_offsets[e]*H/2, quantised along tokens after the 16-point random Hadamard transform
 *   columnwise_scales  the scale matrix of a slab is [H, p_e/B] (i = h, j = token block).  SWIZZLED: slab e at byte
 *                      scale_row_offsets[e]/B * rup(H, 128).  LINEAR: nvfp4 [H, p_e/16] at byte row_offsets[e]/16*H;
 *                      mxfp8 [p_e/32, H] at byte row_offsets[e]/32*H
 *   amax, columnwise_amax                  nvfp4, float32 [E]: 2688 * 2^K, 0 for an expert without a live row
 *   expert_scale, columnwise_expert_scale  nvfp4, float32 [E]: 2^K, 0 likewise
 * Every pad byte of a scale tile in use is written (0). With alignment 128 and H % 128 == 0 the parts equal the buffers of
 * TransformerEngine's grouped tensors.
 */

/* What an operand looks like: shared by layout, bind and direct_receive. */
typedef struct nvte_ep_operand_config {
  uint32_t struct_size;
  uint32_t flags;
  int32_t format;       /* NVTE_EP_FORMAT_MXFP8 or NVFP4 */
  int32_t scale_layout; /* NVTE_EP_SCALE_LAYOUT_* */
  int64_t hidden;       /* a multiple of operand_multiple (32) */
  int64_t capacity;     /* slots, a multiple of alignment */
  int32_t num_experts;  /* experts on this rank */
  int32_t alignment;    /* slots per slab are a multiple of it; a power of two; 0 = 128 */
  int32_t columnwise;   /* 1: with the columnwise parts too */
  int32_t reserved0;
} nvte_ep_operand_config_t;
#define NVTE_EP_OPERAND_CONFIG_INIT { (uint32_t)sizeof(nvte_ep_operand_config_t), 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define NVTE_EP_OPERAND_CONFIG_V1_SIZE 48

/* Offsets (multiples of 256) and bytes of every part in one buffer; bytes 0: the part does not exist. */
typedef struct nvte_ep_operand_layout {
  uint32_t struct_size;
  uint32_t flags;
  int64_t total_bytes;
  int64_t payload_offset, payload_bytes;
  int64_t scales_offset, scales_bytes;
  int64_t columnwise_payload_offset, columnwise_payload_bytes;
  int64_t columnwise_scales_offset, columnwise_scales_bytes;
  int64_t amax_offset, amax_bytes;
  int64_t columnwise_amax_offset, columnwise_amax_bytes;
  int64_t expert_scale_offset, expert_scale_bytes;
  int64_t columnwise_expert_scale_offset, columnwise_expert_scale_bytes;
} nvte_ep_operand_layout_t;
#define NVTE_EP_OPERAND_LAYOUT_INIT \
  { (uint32_t)sizeof(nvte_ep_operand_layout_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define NVTE_EP_OPERAND_LAYOUT_V1_SIZE 144

/* An operand in memory. Set the description and the parts wanted (NULL: not written), by hand or by nvte_ep_operand_bind.
 * Each part has at least the bytes that nvte_ep_operand_layout says for the same description. */
typedef struct nvte_ep_operand {
  uint32_t struct_size;
  uint32_t flags;
  int32_t format; /* these six as in nvte_ep_operand_config_t */
  int32_t scale_layout;
  int64_t hidden;
  int64_t capacity;
  int32_t num_experts;
  int32_t alignment;
  int32_t device_type; /* of every part */
  int32_t device_id;
  void* payload;
  void* scales;
  void* columnwise_payload;
  void* columnwise_scales;
  void* amax;
  void* columnwise_amax;
  void* expert_scale;
  void* columnwise_expert_scale;
} nvte_ep_operand_t;
#define NVTE_EP_OPERAND_INIT \
  { (uint32_t)sizeof(nvte_ep_operand_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }
#define NVTE_EP_OPERAND_V1_SIZE 112

/* Sizes and offsets of every part of the operand that config describes. Host only, no device work. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_operand_layout(const nvte_ep_operand_config_t* config,
                                                    nvte_ep_operand_layout_t* layout);

/* Fills the operand's description and every part pointer from one buffer.
 * [in] buffer uint8 [n], n >= layout.total_bytes, base aligned to 256 bytes; it is borrowed. [out] operand. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_operand_bind(const nvte_ep_operand_config_t* config, const nvte_ep_tensor_t* buffer,
                                                  nvte_ep_operand_t* operand);

/* Packed rows, ordered by expert, straight to the operand, without a BF16 round trip and without an amax pass.
 * [in]  rows            uint8 [slots, row_bytes], slots <= operand->capacity
 * [in]  rows_per_expert int32 or int64 [E], E = operand->num_experts, on the rows' device: rows of each expert, padding
 *                       included, multiples of operand->alignment. What does not fit is clamped and reported in findings.
 * [out] operand         parts that are NULL are not written. Slots past the sum are neither read nor written.
 * nvfp4: payload is copied; with K_e the largest token exponent of the expert, scales become E4M3(b * 2^(k_t - K_e)); the
 * columnwise parts are quantised along tokens after the 16-point random Hadamard transform (sign mask 0xD7E8), with a scale
 * from options.column_bound. mxfp8: payload and scales are copied; columnwise is requantised from the decoded rows.
 * Options: rounding and rng_state (columnwise nvfp4, block id = rank << 54 | h << 32 | slot / 16), rank, scale_rounding
 * (columnwise), column_bound, fixed_expert_scale, findings.
 * UNSUPPORTED: columnwise with an alignment below 16 (nvfp4) or 32 (mxfp8). Capturable. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_nvfp4_direct_receive(const nvte_ep_tensor_t* rows,
                                                          const nvte_ep_tensor_t* rows_per_expert,
                                                          nvte_ep_operand_t* operand,
                                                          const nvte_ep_codec_options_t* options,
                                                          nvte_ep_stream_t stream);
NVTE_EP_API nvte_ep_status_t nvte_ep_mxfp8_direct_receive(const nvte_ep_tensor_t* rows,
                                                          const nvte_ep_tensor_t* rows_per_expert,
                                                          nvte_ep_operand_t* operand,
                                                          const nvte_ep_codec_options_t* options,
                                                          nvte_ep_stream_t stream);

/* Compact scales [R, C] uint8 to 128x4 tiles, and back.
 * scales          uint8 [R, C], any row stride
 * rows_per_expert int32 or int64 [E]: each expert's rows form a matrix of their own, at scale_row_offsets[e] * rup(C, 4);
 *                 NULL: one matrix of R rows
 * swizzled        uint8 [n], n >= rup(C, 4) * (rup(R, 128), or R + 127 * E rounded down to 128 with rows_per_expert);
 *                 unswizzle takes n >= rup(C, 4) * rup(R, 128) in either case, so that it reads the scales of an operand,
 *                 which has room for slabs of its alignment only; rows whose tile would lie past n keep what they have
 * Pad bytes of the tiles in use are written 0 by swizzle and ignored by unswizzle. Capturable. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_scales_swizzle(const nvte_ep_tensor_t* scales,
                                                    const nvte_ep_tensor_t* rows_per_expert, nvte_ep_tensor_t* swizzled,
                                                    nvte_ep_stream_t stream);
NVTE_EP_API nvte_ep_status_t nvte_ep_scales_unswizzle(const nvte_ep_tensor_t* swizzled,
                                                      const nvte_ep_tensor_t* rows_per_expert, nvte_ep_tensor_t* scales,
                                                      nvte_ep_stream_t stream);

/* ---- communicator ----------------------------------------------------------------------------------------------------- */

typedef struct nvte_ep_comm* nvte_ep_comm_t;

typedef struct nvte_ep_comm_config {
  uint32_t struct_size;
  uint32_t flags;
  int32_t kind;      /* NVTE_EP_COMM_* */
  int32_t num_ranks; /* 1 .. 1024 */
  int32_t rank;      /* [0, num_ranks) */
  int32_t device_id; /* NCCL: the CUDA device of this rank */
  const uint8_t* unique_id; /* NVTE_EP_UNIQUE_ID_BYTES bytes, the same on every rank; NULL allowed with one rank */
  int64_t timeout_ns;       /* 0 or more; without effect so far: THREADS does not wait, NCCL waits in creation as long as it does */
} nvte_ep_comm_config_t;
#define NVTE_EP_COMM_CONFIG_INIT { (uint32_t)sizeof(nvte_ep_comm_config_t), 0, 0, 0, 0, 0, NULL, 0 }
#define NVTE_EP_COMM_CONFIG_V1_SIZE 40

/* A fresh id for a communicator; one rank makes it and gives it to the others. Local. Since ABI 1.
 * [in] kind NVTE_EP_COMM_*, [out] unique_id NVTE_EP_UNIQUE_ID_BYTES bytes. A THREADS id is good in its process only. */
NVTE_EP_API nvte_ep_status_t nvte_ep_unique_id(int32_t kind, uint8_t* unique_id);

/* Creates this rank's communicator. THREADS: local, does not wait (one thread may create all ranks' communicators).
 * NCCL: collective, blocks. [out] comm, destroyed with nvte_ep_comm_destroy after its groups. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_comm_create(const nvte_ep_comm_config_t* config, nvte_ep_comm_t* comm);

/* Borrows an ncclComm_t, of the NCCL that this process has loaded (PyTorch's, too): the library works on a split of it and
 * never aborts the caller's. Collective. Since ABI 1. [in] nccl_comm must outlive the communicator. UNSUPPORTED where no NCCL
 * can be loaded. */
NVTE_EP_API nvte_ep_status_t nvte_ep_comm_from_nccl(void* nccl_comm, nvte_ep_comm_t* comm);

/* NULL is OK. Groups that still use it keep what they need. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_comm_destroy(nvte_ep_comm_t comm);

/* ---- group -------------------------------------------------------------------------------------------------------------- */

typedef struct nvte_ep_group* nvte_ep_group_t;
typedef struct nvte_ep_handle* nvte_ep_handle_t;

typedef struct nvte_ep_group_config {
  uint32_t struct_size;
  uint32_t flags;
  int32_t device_type;  /* where the tensors of the group live; 0: CPU on a THREADS communicator, CUDA on NCCL */
  int32_t device_id;    /* CUDA device; on an NCCL communicator that one's: also where device_type and device_id are 0 */
  int32_t num_experts;  /* of all ranks; a multiple of the number of ranks; expert e lives on rank e / (E / ranks) */
  int32_t max_top_k;    /* largest top_k of a handle; 0 = min(num_experts, 32) */
  int64_t hidden;       /* H, a multiple of 16 */
  int64_t max_tokens_per_rank; /* the same on every rank, >= 1 */
  int64_t recv_capacity; /* slots a rank can receive, padding included; 0 = eager: sized exactly by each prepare */
  int32_t transport;     /* NVTE_EP_TRANSPORT_* */
  int32_t num_sms;       /* streaming multiprocessors a transport may occupy; 0 = its best */
  int64_t timeout_ns;    /* how long a call waits for a peer; 0 = 100 s */
  int32_t overflow;      /* NVTE_EP_ON_OVERFLOW_* */
  /* 1: the large tensors lie in memory from nvte_ep_mem_alloc. NCCL_EP then sums slots in place: combine may change expert_out,
   * dispatch_backward grad_received. */
  int32_t zero_copy;
  /* Device memory comes from here if set, else from CUDA. alloc_fn returns NULL when out of memory. Groups of device
   * memory answer UNSUPPORTED so far. */
  void* (*alloc_fn)(size_t bytes, int32_t device_id, nvte_ep_stream_t stream, void* context);
  void (*free_fn)(void* pointer, size_t bytes, int32_t device_id, nvte_ep_stream_t stream, void* context);
  void* alloc_context;
} nvte_ep_group_config_t;
/* Not ..._CONFIG_INIT: TransformerEngine has that name. */
#define NVTE_EP_GROUP_SETTINGS_INIT \
  { (uint32_t)sizeof(nvte_ep_group_config_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL }
#define NVTE_EP_GROUP_CONFIG_V1_SIZE 96

typedef struct nvte_ep_memory_info {
  uint32_t struct_size;
  uint32_t flags;
  int64_t group_bytes;      /* held from group creation on */
  int64_t handle_bytes;     /* held by each handle, largest over formats */
  int64_t exchange_bytes;   /* of group_bytes, memory that peers read or write */
} nvte_ep_memory_info_t;
#define NVTE_EP_MEMORY_INFO_INIT { (uint32_t)sizeof(nvte_ep_memory_info_t), 0, 0, 0, 0 }
#define NVTE_EP_MEMORY_INFO_V1_SIZE 32

typedef struct nvte_ep_group_info {
  uint32_t struct_size;
  uint32_t flags;
  const char* transport;    /* name of the transport in use; owned by the library */
  int32_t num_ranks;
  int32_t rank;
  int32_t num_local_experts;
  int32_t max_top_k;
  int32_t capturable;       /* 1: per-step calls can be captured in a CUDA graph */
  int32_t slot_order_exact; /* 1: slots are in the order (source rank, token); 0: only slot_source tells */
  int64_t recv_capacity;    /* 0 = eager */
} nvte_ep_group_info_t;
#define NVTE_EP_GROUP_INFO_INIT { (uint32_t)sizeof(nvte_ep_group_info_t), 0, NULL, 0, 0, 0, 0, 0, 0, 0 }
#define NVTE_EP_GROUP_INFO_V1_SIZE 48

typedef struct nvte_ep_error_info {
  uint32_t struct_size;
  uint32_t flags;
  nvte_ep_status_t status;  /* OK: nothing to report */
  int32_t rank;             /* it is about: the peer that failed or gave no weights, else this rank; -1 unknown */
  nvte_ep_handle_t handle;  /* the handle it happened on, or NULL */
  int64_t count;            /* INVALID_ARGUMENT: bad or duplicated indices, or weights, or gradients of them, that the
                             * rank did not give; OVERFLOW: rows dropped; 0: fatal */
  int64_t needed_rows;      /* OVERFLOW: the recv_capacity that would have been enough */
} nvte_ep_error_info_t;
#define NVTE_EP_ERROR_INFO_INIT { (uint32_t)sizeof(nvte_ep_error_info_t), 0, 0, 0, NULL, 0, 0 }
#define NVTE_EP_ERROR_INFO_V1_SIZE 40

/* Creates this rank's member of a group. Collective: waits for every rank of comm, timeout_ns at most, but over NCCL for ever
 * for a rank that never calls (transports NCCL and NCCL_EP). [in] config, [out] group.
 * Ranks that disagree on a setting all get INVALID_ARGUMENT naming it. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_group_create(nvte_ep_comm_t comm, const nvte_ep_group_config_t* config,
                                                  nvte_ep_group_t* group);

/* NULL is OK. Live handles stay valid objects that answer BAD_STATE. Collective unless the group failed or was aborted.
 * A captured graph that uses NCCL must be destroyed first. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_group_destroy(nvte_ep_group_t group);

/* Bytes that a group of comm with this config, and each of its handles, would hold. Local, allocates nothing. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_group_memory(nvte_ep_comm_t comm, const nvte_ep_group_config_t* config,
                                                  nvte_ep_memory_info_t* info);

/* What was chosen. Local. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_group_info(nvte_ep_group_t group, nvte_ep_group_info_t* info);

/* What went wrong after a call had returned. Never blocks; any thread. Findings (bad or duplicated index, overflow) are
 * cleared when read, one at a time; fatal ones (count 0: TIMEOUT, PEER_FAILED; INVALID_ARGUMENT: transport peer has found the
 * ranks in different calls, or with tokens of different types; TRANSPORT: NCCL EP handed out other rows than were sent) stay:
 * then only abort and destroy are accepted.
 * Returns OK when it could tell; the answer is info->status, and nvte_ep_last_error() says it in words, as after a failure.
 * Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_group_poll_error(nvte_ep_group_t group, nvte_ep_error_info_t* info);

/* Ends the group: this rank's and the peers' waits, in flight and later, return PEER_FAILED naming this rank. Any thread,
 * never blocks. Over NCCL (transports NCCL and NCCL_EP) the peers are told by their own time-out instead, and it may take the
 * 0.2 s that a call of NCCL on another thread is left in peace. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_group_abort(nvte_ep_group_t group);

/* Symmetric memory for zero_copy. Collective, the same size on every rank; aligned to 256 bytes; on the group's device.
 * [out] pointer. mem_free is collective too; NULL is OK. What is not freed goes with the group. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_mem_alloc(nvte_ep_group_t group, size_t bytes, void** pointer);
NVTE_EP_API nvte_ep_status_t nvte_ep_mem_free(nvte_ep_group_t group, void* pointer);

/* ---- handle -------------------------------------------------------------------------------------------------------------- */

typedef struct nvte_ep_handle_config {
  uint32_t struct_size;
  uint32_t flags;
  int32_t top_k;     /* 1 .. max_top_k */
  int32_t alignment; /* slots of a slab are a multiple of it: a power of two; 0 = 128 */
  int32_t dispatch;  /* NVTE_EP_FORMAT_* of each direction */
  int32_t combine;
  int32_t dispatch_backward;
  int32_t combine_backward;
} nvte_ep_handle_config_t;
#define NVTE_EP_HANDLE_CONFIG_INIT { (uint32_t)sizeof(nvte_ep_handle_config_t), 0, 0, 0, 0, 0, 0, 0 }
#define NVTE_EP_HANDLE_CONFIG_V1_SIZE 32

/* Creates the routing state of one layer or micro-batch; allocates what its per-step calls need. Local; every rank creates
 * its handles in the same order. recv_capacity must be a multiple of alignment. Since ABI 1.
 * UNSUPPORTED: a format that the direction or the transport cannot carry (combine and dispatch_backward: not nvfp4). */
NVTE_EP_API nvte_ep_status_t nvte_ep_handle_create(nvte_ep_group_t group, const nvte_ep_handle_config_t* config,
                                                   nvte_ep_handle_t* handle);
/* NULL is OK; may follow the group's destruction. No work of the handle may be in flight. Local. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_handle_destroy(nvte_ep_handle_t handle);

/* For expert e of this rank (E_local of them), with n_e routed tokens, p_e = n_e rounded up to the alignment and o the prefix
 * sum of p. Every output may be NULL; index outputs are int32 or int64 as the tensor says (a count that int32 cannot hold
 * becomes 2^31 - 1); all on the group's device. */
typedef struct nvte_ep_prepare_args {
  uint32_t struct_size;
  uint32_t flags;
  const nvte_ep_tensor_t* topk_idx;    /* [T, K] int32 or int64: global expert ids; -1: unrouted */
  nvte_ep_tensor_t* tokens_routed;     /* [E_local]   n_e */
  nvte_ep_tensor_t* tokens_per_expert; /* [E_local]   of those, kept: min(n_e, rows_per_expert) */
  nvte_ep_tensor_t* rows_per_expert;   /* [E_local]   slots of the slab, padding included */
  nvte_ep_tensor_t* row_offsets;       /* [E_local+1] min(o_e, capacity) */
  nvte_ep_tensor_t* scale_row_offsets; /* [E_local+1] prefix sum of rows_per_expert rounded up to 128 */
  nvte_ep_tensor_t* total_rows;        /* [1]         row_offsets[E_local] */
  nvte_ep_tensor_t* dropped_rows;      /* [1]         routed minus kept */
  nvte_ep_tensor_t* slot_source;       /* [capacity]  int64: source rank << 32 | token, -1 for padding */
  nvte_ep_tensor_t* slot_expert;       /* [capacity]  int32: local expert of the slot */
  int64_t* total_rows_host;            /* [1] on the host; eager groups only (there it is the size of what to receive) */
} nvte_ep_prepare_args_t;
#define NVTE_EP_PREPARE_ARGS_INIT \
  { (uint32_t)sizeof(nvte_ep_prepare_args_t), 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL \
   }
#define NVTE_EP_PREPARE_ARGS_V1_SIZE 96

/* Exchanges the routing. Collective. T may differ from rank to rank and from call to call, 0 included. topk_idx may be reused
 * once the stream has passed. An index out of range, and an expert's second mention in one token, count as -1 and are
 * reported by nvte_ep_group_poll_error. slot_source and slot_expert are written up to total_rows. In an eager group the host
 * waits for the count and slot_source and slot_expert must hold at least total_rows (else INVALID_ARGUMENT after the routing
 * is set). The first prepare of a handle on a device waits for all ranks, so it comes before a capture.
 * Statuses: INVALID_ARGUMENT, BAD_STATE, TIMEOUT, PEER_FAILED, CUDA, TRANSPORT. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_handle_prepare(nvte_ep_handle_t handle, const nvte_ep_prepare_args_t* args,
                                                    nvte_ep_stream_t stream);

/* Input of dispatch: tokens, or payload with scales. Exactly one of tokens and payload is set. */
typedef struct nvte_ep_dispatch_args {
  uint32_t struct_size;
  uint32_t flags;
  const nvte_ep_tensor_t* tokens; /* [T, H] bfloat16, float16, float32; or packed rows uint8 [T, row_bytes] */
  const nvte_ep_tensor_t* payload;      /* uint8 [T, payload bytes]: already quantised, with: */
  const nvte_ep_tensor_t* scales;       /* uint8 [T, H / block] */
  const nvte_ep_tensor_t* token_scales; /* nvfp4: float32 [T]; NULL with tensor_scale */
  const nvte_ep_tensor_t* tensor_scale; /* nvfp4: float32 [1], 2^K on the group's device: the scale of every row */
  const nvte_ep_tensor_t* topk_weights; /* float32 [T, K] or NULL */
  int32_t receive;                      /* NVTE_EP_RECEIVE_* */
  int32_t rounding;                     /* how tokens are packed: as in nvte_ep_codec_options_t */
  int32_t nonfinite;
  int32_t scale_rounding;
  int32_t column_bound;
  int32_t reserved0;
  const nvte_ep_tensor_t* rng_state;          /* int64 [2] {seed, offset} */
  const nvte_ep_tensor_t* fixed_expert_scale; /* float32 [E_local] or NULL */
  nvte_ep_tensor_t* received; /* ROWS: uint8 [slots, row_bytes]; DECODED: bfloat16, float16 or float32 [slots, H] */
  nvte_ep_operand_t* operand; /* OPERAND */
  nvte_ep_tensor_t* recv_weights; /* float32 [slots] or NULL: weight of each slot, 0 for padding */
  nvte_ep_tensor_t* findings;     /* int32 [1] or NULL: NVTE_EP_FINDING_* of packing and direct receive */
} nvte_ep_dispatch_args_t;
#define NVTE_EP_DISPATCH_ARGS_INIT \
  { (uint32_t)sizeof(nvte_ep_dispatch_args_t), 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0, 0, 0, NULL, \
   NULL, NULL, NULL, NULL, NULL }
#define NVTE_EP_DISPATCH_ARGS_V1_SIZE 128

/* Sends every token to the experts that prepare was given, in the handle's dispatch format. Collective.
 * slots is recv_capacity (eager: at least the total of prepare). Padding inside slabs is zero; slots past total_rows are
 * neither read nor written. Packing draws row id = rank * max_tokens_per_rank + token. All ranks pass topk_weights or none
 * where one wants recv_weights. BAD_STATE before prepare. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_handle_dispatch(nvte_ep_handle_t handle, const nvte_ep_dispatch_args_t* args,
                                                     nvte_ep_stream_t stream);

typedef struct nvte_ep_combine_args {
  uint32_t struct_size;
  uint32_t flags;
  const nvte_ep_tensor_t* expert_out;   /* [slots, H] bfloat16, float16 or float32 */
  const nvte_ep_tensor_t* slot_weights; /* float32 [slots], or NULL: unweighted */
  nvte_ep_tensor_t* result;             /* [T, H], same dtype as expert_out */
  int32_t accumulate;                   /* 1: adds to what result holds */
  int32_t reserved0;
} nvte_ep_combine_args_t;
#define NVTE_EP_COMBINE_ARGS_INIT { (uint32_t)sizeof(nvte_ep_combine_args_t), 0, NULL, NULL, NULL, 0, 0 }
#define NVTE_EP_COMBINE_ARGS_V1_SIZE 40

/* result[t] = sum over the kept slots of t of slot_weight * expert_out, in FP32, in a fixed order, rounded once (device
 * transports may round one partial row per contributing rank). A token without a kept slot gives exact zero. Collective.
 * With transport NCCL_EP and several ranks all give the same dtype and accumulate, and with accumulate slot_weights on all ranks
 * or on none: INVALID_ARGUMENT where they first differ, in a capture or later a hang. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_handle_combine(nvte_ep_handle_t handle, const nvte_ep_combine_args_t* args,
                                                    nvte_ep_stream_t stream);

typedef struct nvte_ep_dispatch_backward_args {
  uint32_t struct_size;
  uint32_t flags;
  const nvte_ep_tensor_t* grad_received;     /* [slots, H] bfloat16, float16 or float32 */
  const nvte_ep_tensor_t* grad_recv_weights; /* float32 [slots] or NULL */
  nvte_ep_tensor_t* grad_tokens;             /* [T, H], same dtype as grad_received */
  nvte_ep_tensor_t* grad_topk_weights;       /* float32 [T, K] or NULL; needs grad_recv_weights on every rank */
  int32_t accumulate;                        /* 1: adds to what grad_tokens holds */
  int32_t reserved0;
} nvte_ep_dispatch_backward_args_t;
#define NVTE_EP_DISPATCH_BACKWARD_ARGS_INIT \
  { (uint32_t)sizeof(nvte_ep_dispatch_backward_args_t), 0, NULL, NULL, NULL, NULL, 0, 0 }
#define NVTE_EP_DISPATCH_BACKWARD_ARGS_V1_SIZE 48

/* Gradient of dispatch: grad_tokens[t] = sum of grad_received over the kept slots of t; grad_topk_weights[t, k] = grad of the
 * weight of that slot, 0 where unrouted or dropped. Collective; dtype and accumulate as in nvte_ep_handle_combine. Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_handle_dispatch_backward(nvte_ep_handle_t handle,
                                                              const nvte_ep_dispatch_backward_args_t* args,
                                                              nvte_ep_stream_t stream);

/* Input and output as nvte_ep_dispatch_args_t, with the gradient of combine's result in place of the tokens. */
typedef struct nvte_ep_combine_backward_args {
  uint32_t struct_size;
  uint32_t flags;
  const nvte_ep_dispatch_args_t* send; /* tokens (or payload ...) = grad of result [T, H]; no topk_weights, recv_weights */
  const nvte_ep_tensor_t* slot_weights; /* float32 [slots]: received is multiplied by them (DECODED only); or NULL */
  const nvte_ep_tensor_t* expert_out;   /* [slots, H] bfloat16, float16 or float32, for grad_slot_weights; or NULL */
  nvte_ep_tensor_t* grad_slot_weights;  /* float32 [slots]: dot of grad and expert_out, 0 for padding (DECODED); or NULL */
} nvte_ep_combine_backward_args_t;
#define NVTE_EP_COMBINE_BACKWARD_ARGS_INIT \
  { (uint32_t)sizeof(nvte_ep_combine_backward_args_t), 0, NULL, NULL, NULL, NULL }
#define NVTE_EP_COMBINE_BACKWARD_ARGS_V1_SIZE 40

/* Gradient of combine: each kept slot of token t receives grad[t] in the handle's combine_backward format, in any receive
 * kind. grad_slot_weights is summed in FP64, in one order on every backend and transport: the same bits. Collective.
 * Since ABI 1. */
NVTE_EP_API nvte_ep_status_t nvte_ep_handle_combine_backward(nvte_ep_handle_t handle,
                                                             const nvte_ep_combine_backward_args_t* args,
                                                             nvte_ep_stream_t stream);

/* ---- sizes frozen per ABI version --------------------------------------------------------------------------------------- */

#if defined(__cplusplus) && __cplusplus >= 201103L
#define NVTE_EP_CHECK_SIZE(type, size) static_assert(sizeof(type) == (size), #type)
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define NVTE_EP_CHECK_SIZE(type, size) _Static_assert(sizeof(type) == (size), #type)
#else
#define NVTE_EP_CHECK_SIZE(type, size) typedef char type##_size_check[(sizeof(type) == (size)) ? 1 : -1]
#endif
NVTE_EP_CHECK_SIZE(nvte_ep_tensor_t, NVTE_EP_TENSOR_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_codec_options_t, NVTE_EP_CODEC_OPTIONS_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_format_info_t, NVTE_EP_FORMAT_INFO_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_operand_config_t, NVTE_EP_OPERAND_CONFIG_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_operand_layout_t, NVTE_EP_OPERAND_LAYOUT_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_operand_t, NVTE_EP_OPERAND_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_comm_config_t, NVTE_EP_COMM_CONFIG_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_group_config_t, NVTE_EP_GROUP_CONFIG_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_memory_info_t, NVTE_EP_MEMORY_INFO_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_group_info_t, NVTE_EP_GROUP_INFO_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_error_info_t, NVTE_EP_ERROR_INFO_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_handle_config_t, NVTE_EP_HANDLE_CONFIG_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_prepare_args_t, NVTE_EP_PREPARE_ARGS_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_dispatch_args_t, NVTE_EP_DISPATCH_ARGS_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_combine_args_t, NVTE_EP_COMBINE_ARGS_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_dispatch_backward_args_t, NVTE_EP_DISPATCH_BACKWARD_ARGS_V1_SIZE);
NVTE_EP_CHECK_SIZE(nvte_ep_combine_backward_args_t, NVTE_EP_COMBINE_BACKWARD_ARGS_V1_SIZE);
#undef NVTE_EP_CHECK_SIZE

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* NVTE_EP_NVTE_EP_H_ */
