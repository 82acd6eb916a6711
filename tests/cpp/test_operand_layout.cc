// Sizes and places of operand parts: enough for every way in which rows can fall on experts, never overlapping.
#include "core/operand_layout.h"

#include <functional>
#include <map>

#include "model.h"

namespace {

using namespace ep_test;
namespace lib = nvte_ep;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Largest sum over experts of rows rounded up to 128, over all splits of at most `capacity` rows in multiples of `alignment`.
int64_t most_tile_rows(int64_t capacity, int experts, int64_t alignment) {
  std::vector<int64_t> best(static_cast<size_t>(capacity / alignment + 1), 0);  // by units used
  for (int e = 0; e < experts; ++e) {
    std::vector<int64_t> next = best;
    for (size_t used = 0; used < best.size(); ++used) {
      for (size_t more = 1; used + more < best.size(); ++more) {
        next[used + more] =
            std::max(next[used + more], best[used] + round_up(static_cast<int64_t>(more) * alignment, 128));
      }
    }
    best = next;
  }
  return *std::max_element(best.begin(), best.end());
}

TEST(OperandLayout, ScaleRowsHoldEverySplitAndWasteLittle) {
  for (int64_t alignment : {1, 2, 16, 32, 64, 128, 256}) {
    for (int experts : {1, 2, 3, 7, 16}) {
      for (int64_t units = 0; units <= (alignment < 16 ? 200 : 40); units += alignment < 16 ? 7 : 1) {
        lib::OperandShape shape;
        shape.format = NVTE_EP_FORMAT_NVFP4;
        shape.hidden = 64;
        shape.capacity = units * alignment;
        shape.num_experts = experts;
        shape.alignment = static_cast<int32_t>(alignment);
        const int64_t most = most_tile_rows(shape.capacity, experts, alignment);
        ASSERT_GE(shape.scale_rows(), most)
            << "capacity " << shape.capacity << " experts " << experts << " alignment " << alignment;
        ASSERT_LE(shape.scale_rows(), most + 128 * std::min<int64_t>(experts, units + 1)) << "bounded waste";
        if (alignment >= 128) {
          ASSERT_EQ(shape.scale_rows(), shape.capacity) << "no padding where slabs are whole tiles";
        }
      }
    }
  }
}

struct Part {
  const char* name;
  int64_t nvte_ep_operand_layout_t::* offset;
  int64_t nvte_ep_operand_layout_t::* bytes;
  void* nvte_ep_operand_t::* pointer;
};
using L = nvte_ep_operand_layout_t;
using O = nvte_ep_operand_t;
const Part kParts[] = {
    {"payload", &L::payload_offset, &L::payload_bytes, &O::payload},
    {"scales", &L::scales_offset, &L::scales_bytes, &O::scales},
    {"columnwise_payload", &L::columnwise_payload_offset, &L::columnwise_payload_bytes,
     &O::columnwise_payload},
    {"columnwise_scales", &L::columnwise_scales_offset, &L::columnwise_scales_bytes, &O::columnwise_scales},
    {"amax", &L::amax_offset, &L::amax_bytes, &O::amax},
    {"columnwise_amax", &L::columnwise_amax_offset, &L::columnwise_amax_bytes, &O::columnwise_amax},
    {"expert_scale", &L::expert_scale_offset, &L::expert_scale_bytes, &O::expert_scale},
    {"columnwise_expert_scale", &L::columnwise_expert_scale_offset, &L::columnwise_expert_scale_bytes,
     &O::columnwise_expert_scale}};

void for_each_config(const std::function<void(const nvte_ep_operand_config_t&)>& body) {
  for (int32_t format : {NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4}) {
    for (int32_t layout : {NVTE_EP_SCALE_LAYOUT_SWIZZLED, NVTE_EP_SCALE_LAYOUT_LINEAR}) {
      for (int columnwise : {0, 1}) {
        for (int32_t alignment : {1, 16, 32, 128, 256, 0}) {
          for (int64_t hidden : {32, 96, 128, 2880, 7168}) {
            for (int64_t units : {0, 1, 5}) {
              nvte_ep_operand_config_t config = NVTE_EP_OPERAND_CONFIG_INIT;
              config.format = format;
              config.scale_layout = layout;
              config.columnwise = columnwise;
              config.alignment = alignment;
              config.hidden = hidden;
              config.capacity = units * (alignment ? alignment : 128);
              config.num_experts = 3;
              const int32_t smallest = format == NVTE_EP_FORMAT_MXFP8 ? 32 : 16;
              if (columnwise && alignment != 0 && alignment < smallest) {
                L ignored = NVTE_EP_OPERAND_LAYOUT_INIT;
                expect_status(NVTE_EP_STATUS_UNSUPPORTED, nvte_ep_operand_layout(&config, &ignored),
                              {"alignment"});
                continue;
              }
              body(config);
            }
          }
        }
      }
    }
  }
}

TEST(OperandLayout, PartsAreAlignedDisjointAndComplete) {
  for_each_config([](const nvte_ep_operand_config_t& config) {
    L layout = NVTE_EP_OPERAND_LAYOUT_INIT;
    require(nvte_ep_operand_layout(&config, &layout));
    const bool nvfp4 = config.format == NVTE_EP_FORMAT_NVFP4;
    std::map<int64_t, int64_t> taken;  // offset -> end
    for (const Part& part : kParts) {
      const std::string name = part.name;
      const bool columnwise = name.rfind("columnwise", 0) == 0;
      const bool second_level =
          name.find("amax") != std::string::npos || name.find("expert_scale") != std::string::npos;
      const bool exists = (!columnwise || config.columnwise) && (!second_level || nvfp4);
      const int64_t offset = layout.*part.offset;
      const int64_t bytes = layout.*part.bytes;
      EXPECT_EQ(offset % 256, 0) << name;
      if (second_level && exists) {
        EXPECT_EQ(bytes, config.num_experts * 4) << name;
      }
      if (!exists) {
        EXPECT_EQ(bytes, 0) << name;
      } else if (config.capacity > 0) {
        EXPECT_GT(bytes, 0) << name;
      }
      if (bytes == 0) continue;
      EXPECT_TRUE(taken.emplace(offset, offset + bytes).second) << name;
      EXPECT_LE(offset + bytes, layout.total_bytes) << name;
    }
    int64_t end = 0;
    for (const auto& range : taken) {
      EXPECT_GE(range.first, end) << "parts overlap";
      end = range.second;
    }
    if (config.alignment == 128 && config.hidden % 128 == 0 &&
        config.scale_layout == NVTE_EP_SCALE_LAYOUT_SWIZZLED) {
      // As TransformerEngine sizes a grouped tensor's buffers.
      const int64_t block = nvfp4 ? 16 : 32;
      EXPECT_EQ(layout.payload_bytes, config.capacity * config.hidden / (nvfp4 ? 2 : 1));
      EXPECT_EQ(layout.scales_bytes, config.capacity * config.hidden / block);
      if (config.columnwise) {
        EXPECT_EQ(layout.columnwise_payload_bytes, layout.payload_bytes);
        EXPECT_EQ(layout.columnwise_scales_bytes, layout.scales_bytes);
      }
    }
  });
}

TEST(OperandBind, FillsEveryPointerFromOneBuffer) {
  for_each_config([](const nvte_ep_operand_config_t& config) {
    L layout = NVTE_EP_OPERAND_LAYOUT_INIT;
    require(nvte_ep_operand_layout(&config, &layout));
    if (layout.total_bytes == 0) return;
    uint8_t* base = reinterpret_cast<uint8_t*>(uintptr_t{1} << 32);  // borrowed, not read
    nvte_ep_tensor_t buffer =
        nvte_ep_tensor_1d(base, layout.total_bytes, NVTE_EP_DTYPE_UINT, 8, NVTE_EP_DEVICE_CPU, 0);
    O operand = NVTE_EP_OPERAND_INIT;
    require(nvte_ep_operand_bind(&config, &buffer, &operand));
    EXPECT_EQ(operand.format, config.format);
    EXPECT_EQ(operand.scale_layout, config.scale_layout);
    EXPECT_EQ(operand.hidden, config.hidden);
    EXPECT_EQ(operand.capacity, config.capacity);
    EXPECT_EQ(operand.num_experts, config.num_experts);
    EXPECT_EQ(operand.alignment, config.alignment ? config.alignment : 128);
    EXPECT_EQ(operand.device_type, NVTE_EP_DEVICE_CPU);
    for (const Part& part : kParts) {
      if (layout.*part.bytes == 0) continue;
      EXPECT_EQ(operand.*part.pointer, base + layout.*part.offset) << part.name;
    }
    buffer.shape[0] -= 1;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_operand_bind(&config, &buffer, &operand),
                  {"buffer"});
    buffer.shape[0] += 1;
    buffer.data = base + 128;
    expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_operand_bind(&config, &buffer, &operand),
                  {"buffer", "256"});
  });
}

// Counts that do not fit: the numbers are refused, not wrapped.
TEST(OperandLayout, SizesBeyondTheAddressSpaceAreRefused) {
  nvte_ep_operand_config_t config = NVTE_EP_OPERAND_CONFIG_INIT;
  config.format = NVTE_EP_FORMAT_MXFP8;
  config.num_experts = 1;
  L layout = NVTE_EP_OPERAND_LAYOUT_INIT;
  for (int64_t hidden : {int64_t{32}, int64_t{7168}, int64_t{1} << 30}) {
    for (int64_t capacity : {int64_t{1} << 40, int64_t{1} << 52, int64_t{1} << 56,
                             std::numeric_limits<int64_t>::max() / 128 * 128}) {
      config.hidden = hidden;
      config.capacity = capacity;
      config.columnwise = 1;
      const nvte_ep_status_t status = nvte_ep_operand_layout(&config, &layout);
      if (status == NVTE_EP_STATUS_OK) {
        EXPECT_GE(layout.total_bytes, capacity) << "no wrap-around";
        EXPECT_GE(layout.columnwise_scales_bytes, capacity / 32);
      } else {
        expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, status, {"nvte_ep_operand_layout", "capacity"});
      }
    }
  }
}

}  // namespace
