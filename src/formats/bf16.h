// BF16 wire format: no scales; FP16 and FP32 tokens are rounded to nearest even.
#ifndef NVTE_EP_FORMATS_BF16_H_
#define NVTE_EP_FORMATS_BF16_H_

#include "formats/numerics.h"

namespace nvte_ep {

struct Bf16 {
  static constexpr const char* kName = "bf16";
  static constexpr int kBlock = 0;
  static constexpr int kPayloadBits = 16;
  static constexpr int kScaleBytes = 0;
  static constexpr int kTokenScaleBytes = 0;
  static constexpr int kHiddenMultiple = 16;
  static constexpr int kOperandMultiple = 0;  // a BF16 GEMM reads the rows themselves
  static constexpr int kColumnwiseAlignment = 0;
};

}  // namespace nvte_ep

#endif  // NVTE_EP_FORMATS_BF16_H_
