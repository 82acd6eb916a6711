// Sizes and offsets of every part of an operand, and where a slab's scales lie in it.
#ifndef NVTE_EP_CORE_OPERAND_LAYOUT_H_
#define NVTE_EP_CORE_OPERAND_LAYOUT_H_

#include "core/row_layout.h"
#include "core/status.h"
#include "core/tensor_view.h"

namespace nvte_ep {

constexpr int64_t kScaleTileRows = 128;
constexpr int64_t kScaleTileColumns = 4;
constexpr int64_t kOperandPartAlignment = 256;

// Byte of scale (i, j) in a swizzled matrix with the given number of scale columns.
NVTE_EP_HD int64_t swizzle_index(int64_t i, int64_t j, int64_t columns) {
  const int64_t tile = (i / 128) * ((columns + 3) / 4) + j / 4;
  const int64_t r = i % 128;
  return tile * 512 + (r % 32) * 16 + (r / 32) * 4 + j % 4;
}

struct OperandShape {
  int32_t format = 0;
  bool linear_scales = false;
  int64_t hidden = 0;
  int64_t capacity = 0;
  int32_t num_experts = 0;
  int32_t alignment = 128;

  const FormatRow& traits() const { return *find_format(format); }
  RowLayout row() const { return row_layout(traits(), hidden); }
  // Upper bound of the sum over slabs of rows rounded up to a scale tile.
  int64_t scale_rows() const;
};

// An operand in memory: null parts are not wanted.
struct OperandView {
  OperandShape shape;
  Device device;
  uint8_t* payload = nullptr;
  uint8_t* scales = nullptr;
  uint8_t* columnwise_payload = nullptr;
  uint8_t* columnwise_scales = nullptr;
  float* amax = nullptr;
  float* columnwise_amax = nullptr;
  float* expert_scale = nullptr;
  float* columnwise_expert_scale = nullptr;
  bool rowwise() const { return payload || scales; }
  bool columnwise() const { return columnwise_payload || columnwise_scales; }
};

Status check_alignment(int32_t alignment, const char* name);  // a power of two
Status read_operand_config(const nvte_ep_operand_config_t* config, OperandShape* shape, bool* columnwise);
nvte_ep_operand_layout_t operand_layout(const OperandShape& shape, bool columnwise);
Status bind_operand(const OperandShape& shape, bool columnwise, const TensorView& buffer,
                    nvte_ep_operand_t* operand);
// Reads an operand's description and parts, and checks what the parts need.
Status read_operand(const nvte_ep_operand_t* operand, OperandView* view);

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_OPERAND_LAYOUT_H_
