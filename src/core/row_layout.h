// Byte layout of one packed row: payload | scales | token scale at the next multiple of 4 | zero pad to 16 bytes.
#ifndef NVTE_EP_CORE_ROW_LAYOUT_H_
#define NVTE_EP_CORE_ROW_LAYOUT_H_

#include <cstdint>

#include "formats/format_table.h"

namespace nvte_ep {

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct RowLayout {
  int64_t payload_bytes;
  int64_t scale_bytes;
  int64_t token_scale_offset;  // where the token scale is, or would be
  int64_t token_scale_bytes;
  int64_t row_bytes;

  constexpr int64_t used_bytes() const {
    return token_scale_bytes ? token_scale_offset + token_scale_bytes : payload_bytes + scale_bytes;
  }
};

constexpr RowLayout row_layout(const FormatRow& format, int64_t hidden) {
  RowLayout layout{};
  layout.payload_bytes = hidden * format.payload_bits / 8;
  layout.scale_bytes = format.block ? hidden / format.block * format.scale_bytes : 0;
  layout.token_scale_offset = round_up(layout.payload_bytes + layout.scale_bytes, 4);
  layout.token_scale_bytes = format.token_scale_bytes;
  layout.row_bytes = round_up(layout.used_bytes(), 16);
  return layout;
}

static_assert(row_layout(kFormats[NVTE_EP_FORMAT_BF16], 7168).row_bytes == 14336, "bf16 row");
static_assert(row_layout(kFormats[NVTE_EP_FORMAT_MXFP8], 7168).row_bytes == 7392, "mxfp8 row");
static_assert(row_layout(kFormats[NVTE_EP_FORMAT_NVFP4], 7168).row_bytes == 4048, "nvfp4 row");
static_assert(row_layout(kFormats[NVTE_EP_FORMAT_NVFP4], 1024).row_bytes == 592, "nvfp4 row");

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_ROW_LAYOUT_H_
