/* SPDX-License-Identifier: Apache-2.0
 *
 * The Mixture-of-Experts layer of a small inference engine, in C. Every rank is a thread here; on a machine with GPUs it is a
 * process with a device, and the calls are the same.
 *
 * Each rank routes its tokens, sends them in MXFP8, receives the operand of its experts' GEMM, multiplies, and gets the
 * weighted sum of its tokens' experts back. The result is compared with the same layer computed in place.
 *
 *   moe_engine [ranks]
 */
#define _XOPEN_SOURCE 600
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <nvte_ep/nvte_ep.h>

enum { HIDDEN = 256, TOKENS = 96, TOP_K = 2, EXPERTS_PER_RANK = 4, ALIGNMENT = 32, MAX_RANKS = 16 };

typedef struct {
  int rank, num_ranks;
  const uint8_t* unique_id;
  double error_squared, norm_squared;
  int failed;
} rank_t;

/* One place that turns a status into a message; a real engine would tear the layer down. */
#define TRY(call)                                                         \
  do {                                                                    \
    if ((call) != NVTE_EP_STATUS_OK) {                                    \
      fprintf(stderr, "rank %d: %s\n", self->rank, nvte_ep_last_error()); \
      self->failed = 1;                                                   \
      return;                                                             \
    }                                                                     \
  } while (0)

static nvte_ep_tensor_t matrix(const void* data, int64_t rows, int64_t columns, int dtype, int bits) {
  return nvte_ep_tensor_2d(data, rows, columns, dtype, bits, NVTE_EP_DEVICE_CPU, 0);
}

static void* allocate(int64_t bytes) {
  void* pointer = NULL;
  if (posix_memalign(&pointer, 256, (size_t)bytes + 256) != 0) abort();
  memset(pointer, 0, (size_t)bytes + 256);
  return pointer;
}

/* Deterministic numbers in [-1, 1) from a seed and a position: every rank can recompute every weight. */
static float noise(uint32_t seed, uint32_t i) {
  uint32_t x = seed * 0x9E3779B9u + i * 0x85EBCA6Bu + 1u;
  x ^= x >> 16, x *= 0x7FEB352Du, x ^= x >> 15, x *= 0x846CA68Bu, x ^= x >> 16;
  return (float)(int32_t)x / 2147483648.0f;
}

/* The expert: a diagonal and a cyclic neighbour, so that a row depends on two inputs. y = W_e x. */
static void run_expert(int expert, const float* x, float* y) {
  for (int h = 0; h < HIDDEN; ++h) {
    const float here = noise((uint32_t)expert, (uint32_t)(2 * h));
    const float next = noise((uint32_t)expert, (uint32_t)(2 * h + 1));
    y[h] = here * x[h] + next * x[(h + 1) % HIDDEN];
  }
}

static void layer(rank_t* self, nvte_ep_comm_t comm) {
  const int num_experts = EXPERTS_PER_RANK * self->num_ranks;
  /* Enough for every token of every rank to come here, each slab padded. */
  const int64_t capacity = (int64_t)self->num_ranks * TOKENS * TOP_K + EXPERTS_PER_RANK * ALIGNMENT;

  /* Once per model: the group; once per layer: the handle with its wire formats. */
  nvte_ep_group_config_t group_config = NVTE_EP_GROUP_SETTINGS_INIT;
  group_config.num_experts = num_experts;
  group_config.hidden = HIDDEN;
  group_config.max_tokens_per_rank = TOKENS;
  group_config.recv_capacity = capacity;
  nvte_ep_group_t group;
  TRY(nvte_ep_group_create(comm, &group_config, &group));
  nvte_ep_handle_config_t handle_config = NVTE_EP_HANDLE_CONFIG_INIT;
  handle_config.top_k = TOP_K;
  handle_config.alignment = ALIGNMENT;
  handle_config.dispatch = NVTE_EP_FORMAT_MXFP8;
  handle_config.combine = NVTE_EP_FORMAT_BF16;
  nvte_ep_handle_t handle;
  TRY(nvte_ep_handle_create(group, &handle_config, &handle));

  /* The library says how large the operand is and where its parts lie; the memory is ours. */
  nvte_ep_operand_config_t operand_config = NVTE_EP_OPERAND_CONFIG_INIT;
  operand_config.format = NVTE_EP_FORMAT_MXFP8;
  operand_config.scale_layout = NVTE_EP_SCALE_LAYOUT_LINEAR;
  operand_config.hidden = HIDDEN;
  operand_config.capacity = capacity;
  operand_config.num_experts = EXPERTS_PER_RANK;
  operand_config.alignment = ALIGNMENT;
  nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
  TRY(nvte_ep_operand_layout(&operand_config, &layout));
  nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
  nvte_ep_tensor_t buffer = nvte_ep_tensor_1d(allocate(layout.total_bytes), layout.total_bytes,
                                              NVTE_EP_DTYPE_UINT, 8, NVTE_EP_DEVICE_CPU, 0);
  TRY(nvte_ep_operand_bind(&operand_config, &buffer, &operand));

  /* This step's tokens and the router's choice. */
  float* tokens = allocate(TOKENS * HIDDEN * 4);
  float* weights = allocate(TOKENS * TOP_K * 4);
  int32_t* topk_idx = allocate(TOKENS * TOP_K * 4);
  for (int i = 0; i < TOKENS * HIDDEN; ++i) tokens[i] = noise(1000u + (uint32_t)self->rank, (uint32_t)i);
  for (int t = 0; t < TOKENS; ++t) {
    const float draw = noise(2000u + (uint32_t)self->rank, (uint32_t)t);
    topk_idx[t * TOP_K] = (int)((draw + 1) / 2 * (float)num_experts) % num_experts;
    topk_idx[t * TOP_K + 1] = (topk_idx[t * TOP_K] + 1 + t % (num_experts - 1)) % num_experts;
    weights[t * TOP_K] = 0.625f;
    weights[t * TOP_K + 1] = 0.375f;
  }

  /* prepare: where every token goes. */
  int32_t rows_per_expert[EXPERTS_PER_RANK], row_offsets[EXPERTS_PER_RANK + 1];
  nvte_ep_tensor_t idx_view = matrix(topk_idx, TOKENS, TOP_K, NVTE_EP_DTYPE_INT, 32);
  nvte_ep_tensor_t rows_view =
      nvte_ep_tensor_1d(rows_per_expert, EXPERTS_PER_RANK, NVTE_EP_DTYPE_INT, 32, NVTE_EP_DEVICE_CPU, 0);
  nvte_ep_tensor_t offsets_view =
      nvte_ep_tensor_1d(row_offsets, EXPERTS_PER_RANK + 1, NVTE_EP_DTYPE_INT, 32, NVTE_EP_DEVICE_CPU, 0);
  nvte_ep_prepare_args_t prepare = NVTE_EP_PREPARE_ARGS_INIT;
  prepare.topk_idx = &idx_view;
  prepare.rows_per_expert = &rows_view;
  prepare.row_offsets = &offsets_view;
  TRY(nvte_ep_handle_prepare(handle, &prepare, NULL));

  /* dispatch: tokens to the experts' ranks, as the operand of their GEMM. */
  float* slot_weights = allocate(capacity * 4);
  nvte_ep_tensor_t tokens_view = matrix(tokens, TOKENS, HIDDEN, NVTE_EP_DTYPE_FLOAT, 32);
  nvte_ep_tensor_t weights_view = matrix(weights, TOKENS, TOP_K, NVTE_EP_DTYPE_FLOAT, 32);
  nvte_ep_tensor_t slot_weights_view =
      nvte_ep_tensor_1d(slot_weights, capacity, NVTE_EP_DTYPE_FLOAT, 32, NVTE_EP_DEVICE_CPU, 0);
  nvte_ep_dispatch_args_t dispatch = NVTE_EP_DISPATCH_ARGS_INIT;
  dispatch.tokens = &tokens_view;
  dispatch.topk_weights = &weights_view;
  dispatch.receive = NVTE_EP_RECEIVE_OPERAND;
  dispatch.operand = &operand;
  dispatch.recv_weights = &slot_weights_view;
  TRY(nvte_ep_handle_dispatch(handle, &dispatch, NULL));

  /* The experts. A GPU's grouped GEMM reads the operand's parts as they are; this stand-in decodes them first. */
  const int64_t slots = row_offsets[EXPERTS_PER_RANK];
  float* inputs = allocate(capacity * HIDDEN * 4);
  float* outputs = allocate(capacity * HIDDEN * 4);
  nvte_ep_tensor_t payload = matrix(operand.payload, slots, HIDDEN, NVTE_EP_DTYPE_UINT, 8);
  nvte_ep_tensor_t scales = matrix(operand.scales, slots, HIDDEN / 32, NVTE_EP_DTYPE_UINT, 8);
  nvte_ep_tensor_t inputs_view = matrix(inputs, slots, HIDDEN, NVTE_EP_DTYPE_FLOAT, 32);
  TRY(nvte_ep_mxfp8_dequantize(&payload, &scales, &inputs_view, NULL, NULL));
  for (int e = 0; e < EXPERTS_PER_RANK; ++e) {
    for (int64_t s = row_offsets[e]; s < row_offsets[e + 1]; ++s) {
      run_expert(self->rank * EXPERTS_PER_RANK + e, inputs + s * HIDDEN, outputs + s * HIDDEN);
    }
  }

  /* combine: the weighted sum of each token's experts, back at its own rank. */
  float* result = allocate(TOKENS * HIDDEN * 4);
  nvte_ep_tensor_t outputs_view = matrix(outputs, capacity, HIDDEN, NVTE_EP_DTYPE_FLOAT, 32);
  nvte_ep_tensor_t result_view = matrix(result, TOKENS, HIDDEN, NVTE_EP_DTYPE_FLOAT, 32);
  nvte_ep_combine_args_t combine = NVTE_EP_COMBINE_ARGS_INIT;
  combine.expert_out = &outputs_view;
  combine.slot_weights = &slot_weights_view;
  combine.result = &result_view;
  TRY(nvte_ep_handle_combine(handle, &combine, NULL));

  /* The same layer without any exchange, in FP32. */
  float expected[HIDDEN];
  for (int t = 0; t < TOKENS; ++t) {
    for (int h = 0; h < HIDDEN; ++h) expected[h] = 0;
    for (int k = 0; k < TOP_K; ++k) {
      float y[HIDDEN];
      run_expert(topk_idx[t * TOP_K + k], tokens + t * HIDDEN, y);
      for (int h = 0; h < HIDDEN; ++h) expected[h] += weights[t * TOP_K + k] * y[h];
    }
    for (int h = 0; h < HIDDEN; ++h) {
      const double difference = (double)result[t * HIDDEN + h] - expected[h];
      self->error_squared += difference * difference;
      self->norm_squared += (double)expected[h] * expected[h];
    }
  }

  TRY(nvte_ep_handle_destroy(handle));
  TRY(nvte_ep_group_destroy(group));
  free(tokens), free(weights), free(topk_idx), free(buffer.data), free(slot_weights);
  free(inputs), free(outputs), free(result);
}

static void* run_rank(void* argument) {
  rank_t* self = argument;
  nvte_ep_comm_config_t config = NVTE_EP_COMM_CONFIG_INIT;
  config.kind = NVTE_EP_COMM_THREADS;
  config.num_ranks = self->num_ranks;
  config.rank = self->rank;
  config.unique_id = self->unique_id;
  nvte_ep_comm_t comm;
  if (nvte_ep_comm_create(&config, &comm) != NVTE_EP_STATUS_OK) {
    fprintf(stderr, "rank %d: %s\n", self->rank, nvte_ep_last_error());
    self->failed = 1;
    return NULL;
  }
  layer(self, comm);
  nvte_ep_comm_destroy(comm);
  return NULL;
}

int main(int argc, char** argv) {
  const int num_ranks = argc > 1 ? atoi(argv[1]) : 4;
  if (num_ranks < 1 || num_ranks > MAX_RANKS) {
    fprintf(stderr, "usage: moe_engine [ranks, 1 to %d]\n", MAX_RANKS);
    return 2;
  }
  uint8_t unique_id[NVTE_EP_UNIQUE_ID_BYTES];
  if (nvte_ep_unique_id(NVTE_EP_COMM_THREADS, unique_id) != NVTE_EP_STATUS_OK) {
    fprintf(stderr, "%s\n", nvte_ep_last_error());
    return 1;
  }
  rank_t ranks[MAX_RANKS];
  pthread_t threads[MAX_RANKS];
  for (int r = 0; r < num_ranks; ++r) {
    ranks[r] = (rank_t){.rank = r, .num_ranks = num_ranks, .unique_id = unique_id};
    if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) return 1;
  }
  double error_squared = 0, norm_squared = 0;
  int failed = 0;
  for (int r = 0; r < num_ranks; ++r) {
    pthread_join(threads[r], NULL);
    error_squared += ranks[r].error_squared;
    norm_squared += ranks[r].norm_squared;
    failed |= ranks[r].failed;
  }
  if (failed) return 1;

  int64_t row_bytes = 0;
  nvte_ep_row_bytes(NVTE_EP_FORMAT_MXFP8, HIDDEN, &row_bytes);
  const double error = sqrt(error_squared / norm_squared);
  printf("%d ranks, %d experts, %d tokens a rank, top %d\n", num_ranks, EXPERTS_PER_RANK * num_ranks, TOKENS,
         TOP_K);
  printf("%lld bytes a token on the wire, %d in BF16\n", (long long)row_bytes, 2 * HIDDEN);
  printf("relative error of the layer: %.4f\n", error);
  /* MXFP8 keeps 3 mantissa bits: about 2.5 % of the values' root mean square. */
  return error > 0 && error < 0.05 ? 0 : 1;
}
