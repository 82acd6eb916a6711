// id -> traits row, expanded from formats.def.
#ifndef NVTE_EP_FORMATS_FORMAT_TABLE_H_
#define NVTE_EP_FORMATS_FORMAT_TABLE_H_

#include "formats/bf16.h"
#include "formats/mxfp8.h"
#include "formats/nvfp4.h"
#include "nvte_ep/nvte_ep.h"

namespace nvte_ep {

struct FormatRow {
  int32_t id;
  const char* name;
  int32_t block;
  int32_t payload_bits;
  int32_t scale_bytes;
  int32_t token_scale_bytes;
  int32_t hidden_multiple;
  int32_t operand_multiple;
  int32_t columnwise_alignment;
};

#define NVTE_EP_FORMAT(id, NAME, Type) \
  static_assert(NVTE_EP_FORMAT_##NAME == (id), #NAME " in formats.def and header");
#include "formats/formats.def"
#undef NVTE_EP_FORMAT

constexpr FormatRow kFormats[] = {
#define NVTE_EP_FORMAT(id, NAME, Type) \
  {id,                                 \
   Type::kName,                        \
   Type::kBlock,                       \
   Type::kPayloadBits,                 \
   Type::kScaleBytes,                  \
   Type::kTokenScaleBytes,             \
   Type::kHiddenMultiple,              \
   Type::kOperandMultiple,             \
   Type::kColumnwiseAlignment},
#include "formats/formats.def"
#undef NVTE_EP_FORMAT
};
constexpr int32_t kNumFormats = static_cast<int32_t>(sizeof(kFormats) / sizeof(kFormats[0]));

inline const FormatRow* find_format(int32_t id) {
  return id >= 0 && id < kNumFormats ? &kFormats[id] : nullptr;
}

// Calls function(Traits{}) with the trait type of a known format id.
template <typename Function>
auto with_format(int32_t id, Function&& function) {
  switch (id) {
#define NVTE_EP_FORMAT(id, NAME, Type) \
  case id:                             \
    return function(Type{});
#include "formats/formats.def"
#undef NVTE_EP_FORMAT
    default:
      return function(Bf16{});
  }
}

}  // namespace nvte_ep

#endif  // NVTE_EP_FORMATS_FORMAT_TABLE_H_
