/* SPDX-License-Identifier: Apache-2.0
 *
 * A user of the library in strict C99: the header alone, included twice, every INIT macro, a codec round trip and one step of
 * a one-rank group. Linked to the shared library only.
 */
#include "nvte_ep/nvte_ep.h"
/* Twice on purpose. */
#include "nvte_ep/nvte_ep.h"

#include <stdio.h>
#include <string.h>

#define HIDDEN 32
#define TOKENS 3
#define TOP_K 2
#define EXPERTS 2
#define ALIGNMENT 16
#define CAPACITY 64

static int failures = 0;

static void check(int good, const char* what, int line) {
  if (good) return;
  fprintf(stderr, "line %d: %s (last error: %s)\n", line, what, nvte_ep_last_error());
  ++failures;
}
#define CHECK(condition) check((condition) != 0, #condition, __LINE__)
#define CHECK_OK(call) check((call) == NVTE_EP_STATUS_OK, #call, __LINE__)

/* BF16 bits of 0, .5, 1, 1.5, 2, 3, 4, 6: what E2M1 holds, so NVFP4 carries a block of them without a loss. */
static const uint16_t kExact[8] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};

static nvte_ep_tensor_t tokens_of(const uint16_t* data, int64_t rows) {
  return nvte_ep_tensor_2d(data, rows, HIDDEN, NVTE_EP_DTYPE_BFLOAT, 16, NVTE_EP_DEVICE_CPU, 0);
}

/* Each INIT macro must be a constant initialiser of its struct, with struct_size set and nothing else. */
#define CHECK_INIT(type, init)                      \
  do {                                              \
    static const type fresh = init;                 \
    type zero;                                      \
    memset(&zero, 0, sizeof zero);                  \
    zero.struct_size = (uint32_t)sizeof zero;       \
    CHECK(memcmp(&fresh, &zero, sizeof zero) == 0); \
  } while (0)

static void check_struct_init(void) {
  CHECK_INIT(nvte_ep_tensor_t, NVTE_EP_TENSOR_INIT);
  CHECK_INIT(nvte_ep_codec_options_t, NVTE_EP_CODEC_OPTIONS_INIT);
  CHECK_INIT(nvte_ep_format_info_t, NVTE_EP_FORMAT_INFO_INIT);
  CHECK_INIT(nvte_ep_operand_config_t, NVTE_EP_OPERAND_CONFIG_INIT);
  CHECK_INIT(nvte_ep_operand_layout_t, NVTE_EP_OPERAND_LAYOUT_INIT);
  CHECK_INIT(nvte_ep_operand_t, NVTE_EP_OPERAND_INIT);
  CHECK_INIT(nvte_ep_comm_config_t, NVTE_EP_COMM_CONFIG_INIT);
  CHECK_INIT(nvte_ep_group_config_t, NVTE_EP_GROUP_SETTINGS_INIT);
  CHECK_INIT(nvte_ep_memory_info_t, NVTE_EP_MEMORY_INFO_INIT);
  CHECK_INIT(nvte_ep_group_info_t, NVTE_EP_GROUP_INFO_INIT);
  CHECK_INIT(nvte_ep_error_info_t, NVTE_EP_ERROR_INFO_INIT);
  CHECK_INIT(nvte_ep_handle_config_t, NVTE_EP_HANDLE_CONFIG_INIT);
  CHECK_INIT(nvte_ep_prepare_args_t, NVTE_EP_PREPARE_ARGS_INIT);
  CHECK_INIT(nvte_ep_dispatch_args_t, NVTE_EP_DISPATCH_ARGS_INIT);
  CHECK_INIT(nvte_ep_combine_args_t, NVTE_EP_COMBINE_ARGS_INIT);
  CHECK_INIT(nvte_ep_dispatch_backward_args_t, NVTE_EP_DISPATCH_BACKWARD_ARGS_INIT);
  CHECK_INIT(nvte_ep_combine_backward_args_t, NVTE_EP_COMBINE_BACKWARD_ARGS_INIT);
}

static void check_library(void) {
  const char* json = NULL;
  nvte_ep_format_info_t info = NVTE_EP_FORMAT_INFO_INIT;
  int32_t format = 0;
  CHECK(nvte_ep_version() ==
        NVTE_EP_VERSION_MAJOR * 10000 + NVTE_EP_VERSION_MINOR * 100 + NVTE_EP_VERSION_PATCH);
  CHECK(nvte_ep_abi_version() == NVTE_EP_ABI_VERSION);
  CHECK_OK(nvte_ep_build_info(&json));
  CHECK(json != NULL && json[0] == '{');
  CHECK(strcmp(nvte_ep_status_name(NVTE_EP_STATUS_TIMEOUT), "TIMEOUT") == 0);
  CHECK(strcmp(nvte_ep_status_name(-7), "UNKNOWN") == 0);

  while (nvte_ep_format_info(format, &info) == NVTE_EP_STATUS_OK) {
    CHECK(info.format == format && info.name != NULL);
    ++format;
  }
  CHECK(format == 3);
  CHECK(strlen(nvte_ep_last_error()) > 0);
}

static void check_codecs(void) {
  static uint16_t tokens[HIDDEN], back[HIDDEN], ones[HIDDEN];
  /* Rows want 16-byte alignment; a union gives it in C99. */
  union {
    long double align;
    uint8_t bytes[48];
  } row;
  nvte_ep_tensor_t x = tokens_of(tokens, 1), y = tokens_of(back, 1), u = tokens_of(ones, 1), rows;
  int64_t row_bytes = -1;
  int i;

  for (i = 0; i < HIDDEN; ++i) {
    tokens[i] = kExact[i % 8];
    ones[i] = 0x3f80;
  }
  CHECK(nvte_ep_row_bytes(NVTE_EP_FORMAT_NVFP4, HIDDEN + 1, &row_bytes) == NVTE_EP_STATUS_INVALID_ARGUMENT);
  CHECK(row_bytes == -1);
  CHECK_OK(nvte_ep_row_bytes(NVTE_EP_FORMAT_NVFP4, HIDDEN, &row_bytes));
  CHECK(row_bytes == 32); /* 16 codes, 2 scales, pad, token scale at 20, pad */
  rows = nvte_ep_tensor_2d(row.bytes, 1, row_bytes, NVTE_EP_DTYPE_UINT, 8, NVTE_EP_DEVICE_CPU, 0);
  CHECK_OK(nvte_ep_nvfp4_pack(&x, &rows, NULL, NULL));
  CHECK(row.bytes[0] == 0x10 && row.bytes[1] == 0x32 && row.bytes[2] == 0x54 && row.bytes[3] == 0x76);
  memset(back, 0xff, sizeof back);
  CHECK_OK(nvte_ep_nvfp4_unpack(&rows, &y, NULL, NULL));
  CHECK(memcmp(tokens, back, sizeof tokens) == 0);

  CHECK_OK(nvte_ep_row_bytes(NVTE_EP_FORMAT_MXFP8, HIDDEN, &row_bytes));
  CHECK(row_bytes == 48); /* 32 codes, 1 scale, pad */
  rows = nvte_ep_tensor_2d(row.bytes, 1, row_bytes, NVTE_EP_DTYPE_UINT, 8, NVTE_EP_DEVICE_CPU, 0);
  CHECK_OK(nvte_ep_mxfp8_pack(&u, &rows, NULL, NULL));
  CHECK(row.bytes[0] == 0x78 && row.bytes[31] == 0x78); /* 256 * 2^(119 - 127) */
  CHECK(row.bytes[32] == 119 && row.bytes[33] == 0 && row.bytes[47] == 0);

  CHECK(nvte_ep_nvfp4_pack(NULL, &rows, NULL, NULL) == NVTE_EP_STATUS_INVALID_ARGUMENT);
  CHECK(strstr(nvte_ep_last_error(), "nvte_ep_nvfp4_pack") != NULL);
}

/* Three tokens over two experts of one rank: token 0 to both, token 1 to expert 1, token 2 nowhere. */
static void check_group(void) {
  nvte_ep_comm_config_t comm_config = NVTE_EP_COMM_CONFIG_INIT;
  nvte_ep_group_config_t group_config = NVTE_EP_GROUP_SETTINGS_INIT;
  nvte_ep_handle_config_t handle_config = NVTE_EP_HANDLE_CONFIG_INIT;
  nvte_ep_prepare_args_t prepare = NVTE_EP_PREPARE_ARGS_INIT;
  nvte_ep_dispatch_args_t dispatch = NVTE_EP_DISPATCH_ARGS_INIT;
  nvte_ep_combine_args_t combine = NVTE_EP_COMBINE_ARGS_INIT;
  nvte_ep_error_info_t error = NVTE_EP_ERROR_INFO_INIT;
  nvte_ep_comm_t comm = NULL;
  nvte_ep_group_t group = NULL;
  nvte_ep_handle_t handle = NULL;

  static uint16_t tokens[TOKENS * HIDDEN], slots[CAPACITY * HIDDEN], result[TOKENS * HIDDEN];
  const int64_t topk_idx[TOKENS * TOP_K] = {0, 1, 1, -1, -1, -1};
  int32_t tokens_per_expert[EXPERTS], row_offsets[EXPERTS + 1];
  nvte_ep_tensor_t tokens_view = tokens_of(tokens, TOKENS), slots_view = tokens_of(slots, CAPACITY);
  nvte_ep_tensor_t result_view = tokens_of(result, TOKENS);
  nvte_ep_tensor_t idx_view =
      nvte_ep_tensor_2d(topk_idx, TOKENS, TOP_K, NVTE_EP_DTYPE_INT, 64, NVTE_EP_DEVICE_CPU, 0);
  nvte_ep_tensor_t counts_view =
      nvte_ep_tensor_1d(tokens_per_expert, EXPERTS, NVTE_EP_DTYPE_INT, 32, NVTE_EP_DEVICE_CPU, 0);
  nvte_ep_tensor_t offsets_view =
      nvte_ep_tensor_1d(row_offsets, EXPERTS + 1, NVTE_EP_DTYPE_INT, 32, NVTE_EP_DEVICE_CPU, 0);
  int i;

  for (i = 0; i < TOKENS * HIDDEN; ++i) tokens[i] = kExact[(i + i / HIDDEN) % 8];
  memset(result, 0xff, sizeof result);

  comm_config.kind = NVTE_EP_COMM_THREADS;
  comm_config.num_ranks = 1;
  CHECK_OK(nvte_ep_comm_create(&comm_config, &comm));
  group_config.num_experts = EXPERTS;
  group_config.hidden = HIDDEN;
  group_config.max_tokens_per_rank = TOKENS;
  group_config.recv_capacity = CAPACITY;
  CHECK_OK(nvte_ep_group_create(comm, &group_config, &group));
  handle_config.top_k = TOP_K;
  handle_config.alignment = ALIGNMENT;
  handle_config.dispatch = NVTE_EP_FORMAT_NVFP4;
  CHECK_OK(nvte_ep_handle_create(group, &handle_config, &handle));

  dispatch.tokens = &tokens_view;
  dispatch.receive = NVTE_EP_RECEIVE_DECODED;
  dispatch.received = &slots_view;
  CHECK(nvte_ep_handle_dispatch(handle, &dispatch, NULL) == NVTE_EP_STATUS_BAD_STATE);

  prepare.topk_idx = &idx_view;
  prepare.tokens_per_expert = &counts_view;
  prepare.row_offsets = &offsets_view;
  CHECK_OK(nvte_ep_handle_prepare(handle, &prepare, NULL));
  CHECK(tokens_per_expert[0] == 1 && tokens_per_expert[1] == 2);
  CHECK(row_offsets[0] == 0 && row_offsets[1] == ALIGNMENT && row_offsets[2] == 2 * ALIGNMENT);

  CHECK_OK(nvte_ep_handle_dispatch(handle, &dispatch, NULL));
  CHECK(memcmp(slots, tokens, HIDDEN * 2) == 0);
  CHECK(memcmp(slots + ALIGNMENT * HIDDEN, tokens, 2 * HIDDEN * 2) == 0);

  combine.expert_out = &slots_view;
  combine.result = &result_view;
  CHECK_OK(nvte_ep_handle_combine(handle, &combine, NULL));
  for (i = 0; i < HIDDEN; ++i) {
    /* Token 0 comes back from two experts: doubled, which adds one to the BF16 exponent. */
    CHECK(result[i] == (tokens[i] == 0 ? 0 : tokens[i] + 0x80));
    CHECK(result[HIDDEN + i] == tokens[HIDDEN + i]);
    CHECK(result[2 * HIDDEN + i] == 0);
  }

  CHECK_OK(nvte_ep_group_poll_error(group, &error));
  CHECK(error.status == NVTE_EP_STATUS_OK);
  CHECK(strcmp(nvte_ep_last_error(), "") == 0);
  CHECK_OK(nvte_ep_handle_destroy(handle));
  CHECK_OK(nvte_ep_group_destroy(group));
  CHECK_OK(nvte_ep_comm_destroy(comm));
  CHECK_OK(nvte_ep_handle_destroy(NULL));
  CHECK_OK(nvte_ep_group_destroy(NULL));
  CHECK_OK(nvte_ep_comm_destroy(NULL));
}

int main(void) {
  check_struct_init();
  check_library();
  check_codecs();
  check_group();
  if (failures == 0) puts("c_consumer: OK");
  return failures == 0 ? 0 : 1;
}
