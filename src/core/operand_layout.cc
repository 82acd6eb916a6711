#include "core/operand_layout.h"

#include <algorithm>

#include "core/struct_reader.h"

namespace nvte_ep {
namespace {

constexpr int64_t kMaxOperandBytes = int64_t{1} << 62;

Status check_shape(const OperandShape& s, const char* name) {
  const FormatRow* format = find_format(s.format);
  if (format == nullptr) return unsupported(name, ".format: expected a known format, got ", s.format);
  if (format->operand_multiple == 0) {
    return unsupported(name, ".format: ", format->name,
                       " has no scaled operand: receive it decoded or as rows");
  }
  if (s.hidden <= 0 || s.hidden % format->operand_multiple != 0 || s.hidden > (int64_t{1} << 31)) {
    return invalid_argument(name, ".hidden: expected a positive multiple of ", format->operand_multiple,
                            ", got ", s.hidden);
  }
  if (s.num_experts <= 0)
    return invalid_argument(name, ".num_experts: expected at least 1, got ", s.num_experts);
  NVTE_EP_TRY(check_alignment(s.alignment, name));
  if (s.capacity < 0 || s.capacity % s.alignment != 0 || s.capacity > kMaxOperandBytes / (8 * s.hidden)) {
    return invalid_argument(name, ".capacity: expected a multiple of the alignment ", s.alignment,
                            " that fits 2^62 bytes, got ", s.capacity);
  }
  return Status();
}

Status check_columnwise(const OperandShape& s, const char* name) {
  const FormatRow& format = s.traits();
  if (s.alignment >= format.columnwise_alignment) return Status();
  return unsupported(name, ".alignment: columnwise ", format.name, " needs ", format.columnwise_alignment,
                     " or more, got ", s.alignment);
}

}  // namespace

int64_t OperandShape::scale_rows() const {
  // A slab that holds rows wastes at most 128 - alignment rows of its last tile.
  const int64_t waste = std::max<int64_t>(0, kScaleTileRows - alignment);
  const int64_t slabs = std::min<int64_t>(num_experts, capacity / alignment);
  return (capacity + slabs * waste) / kScaleTileRows * kScaleTileRows;
}

Status check_alignment(int32_t alignment, const char* name) {
  if (alignment > 0 && (alignment & (alignment - 1)) == 0) return Status();
  return invalid_argument(name, ".alignment: expected a power of two, got ", alignment);
}

Status read_operand_config(const nvte_ep_operand_config_t* config, OperandShape* shape, bool* columnwise) {
  nvte_ep_operand_config_t c;
  NVTE_EP_TRY(read_struct(config, NVTE_EP_OPERAND_CONFIG_V1_SIZE, "config", &c));
  NVTE_EP_TRY(check_reserved(c.reserved0, "config.reserved0"));
  NVTE_EP_TRY(check_enum(c.scale_layout, 2, "config.scale_layout"));
  NVTE_EP_TRY(check_bool(c.columnwise, "config.columnwise"));
  *shape = OperandShape{c.format,      c.scale_layout == NVTE_EP_SCALE_LAYOUT_LINEAR, c.hidden, c.capacity,
                        c.num_experts, c.alignment == 0 ? 128 : c.alignment};
  *columnwise = c.columnwise != 0;
  NVTE_EP_TRY(check_shape(*shape, "config"));
  return *columnwise ? check_columnwise(*shape, "config") : Status();
}

nvte_ep_operand_layout_t operand_layout(const OperandShape& shape, bool columnwise) {
  nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
  const FormatRow& format = shape.traits();
  const int64_t columns = shape.hidden / format.block;
  int64_t end = 0;
  const auto place = [&](int64_t bytes, int64_t* offset, int64_t* size) {
    *offset = end;
    *size = bytes;
    end = round_up(end + bytes, kOperandPartAlignment);
  };
  const RowLayout row = shape.row();
  place(shape.capacity * row.payload_bytes, &layout.payload_offset, &layout.payload_bytes);
  place(shape.linear_scales ? shape.capacity * columns
                            : shape.scale_rows() * round_up(columns, kScaleTileColumns),
        &layout.scales_offset, &layout.scales_bytes);
  if (columnwise) {
    place(shape.capacity * row.payload_bytes, &layout.columnwise_payload_offset,
          &layout.columnwise_payload_bytes);
    place(shape.linear_scales ? shape.capacity / format.block * shape.hidden
                              : shape.scale_rows() / format.block * round_up(shape.hidden, kScaleTileRows),
          &layout.columnwise_scales_offset, &layout.columnwise_scales_bytes);
  }
  if (format.token_scale_bytes != 0) {
    const int64_t bytes = static_cast<int64_t>(shape.num_experts) * 4;
    place(bytes, &layout.amax_offset, &layout.amax_bytes);
    place(bytes, &layout.expert_scale_offset, &layout.expert_scale_bytes);
    if (columnwise) {
      place(bytes, &layout.columnwise_amax_offset, &layout.columnwise_amax_bytes);
      place(bytes, &layout.columnwise_expert_scale_offset, &layout.columnwise_expert_scale_bytes);
    }
  }
  layout.total_bytes = end;
  return layout;
}

Status bind_operand(const OperandShape& shape, bool columnwise, const TensorView& buffer,
                    nvte_ep_operand_t* operand) {
  const nvte_ep_operand_layout_t layout = operand_layout(shape, columnwise);
  if (buffer.size() < layout.total_bytes) {
    return invalid_argument("buffer: expected at least ", layout.total_bytes, " bytes, got ", buffer.size());
  }
  nvte_ep_operand_t out = NVTE_EP_OPERAND_INIT;
  out.format = shape.format;
  out.scale_layout = shape.linear_scales ? NVTE_EP_SCALE_LAYOUT_LINEAR : NVTE_EP_SCALE_LAYOUT_SWIZZLED;
  out.hidden = shape.hidden;
  out.capacity = shape.capacity;
  out.num_experts = shape.num_experts;
  out.alignment = shape.alignment;
  out.device_type = buffer.device.type;
  out.device_id = buffer.device.id;
  // A part of no bytes (capacity 0) still gets a pointer where the operand has it: NULL means "not wanted".
  const auto part = [&](int64_t offset) -> void* { return static_cast<uint8_t*>(buffer.data) + offset; };
  if (buffer.data != nullptr) {
    const bool second_level = shape.traits().token_scale_bytes != 0;
    out.payload = part(layout.payload_offset);
    out.scales = part(layout.scales_offset);
    if (columnwise) {
      out.columnwise_payload = part(layout.columnwise_payload_offset);
      out.columnwise_scales = part(layout.columnwise_scales_offset);
    }
    if (second_level) {
      out.amax = part(layout.amax_offset);
      out.expert_scale = part(layout.expert_scale_offset);
      if (columnwise) {
        out.columnwise_amax = part(layout.columnwise_amax_offset);
        out.columnwise_expert_scale = part(layout.columnwise_expert_scale_offset);
      }
    }
  }
  write_struct(out, operand);
  return Status();
}

Status read_operand(const nvte_ep_operand_t* operand, OperandView* view) {
  nvte_ep_operand_t o;
  NVTE_EP_TRY(read_struct(operand, NVTE_EP_OPERAND_V1_SIZE, "operand", &o));
  NVTE_EP_TRY(check_enum(o.scale_layout, 2, "operand.scale_layout"));
  view->shape =
      OperandShape{o.format,      o.scale_layout == NVTE_EP_SCALE_LAYOUT_LINEAR, o.hidden, o.capacity,
                   o.num_experts, o.alignment == 0 ? 128 : o.alignment};
  NVTE_EP_TRY(check_shape(view->shape, "operand"));
  switch (o.device_type) {
    case 0:
    case NVTE_EP_DEVICE_CPU:
    case NVTE_EP_DEVICE_CUDA_HOST:
      view->device = Device{NVTE_EP_DEVICE_CPU, 0};
      break;
    case NVTE_EP_DEVICE_CUDA:
      view->device = Device{NVTE_EP_DEVICE_CUDA, o.device_id};
      break;
    default:
      return invalid_argument("operand.device_type: expected 1 (CPU), 2 (CUDA) or 3 (pinned host), got ",
                              o.device_type);
  }
  const struct {
    const char* name;
    void* pointer;
  } parts[] = {{"payload", o.payload},
               {"scales", o.scales},
               {"columnwise_payload", o.columnwise_payload},
               {"columnwise_scales", o.columnwise_scales},
               {"amax", o.amax},
               {"columnwise_amax", o.columnwise_amax},
               {"expert_scale", o.expert_scale},
               {"columnwise_expert_scale", o.columnwise_expert_scale}};
  for (const auto& part : parts) {
    if (reinterpret_cast<uintptr_t>(part.pointer) % kOperandPartAlignment != 0) {
      return invalid_argument("operand.", part.name, ": expected a pointer aligned to ",
                              kOperandPartAlignment, " bytes, got ", part.pointer);
    }
  }
  view->payload = static_cast<uint8_t*>(o.payload);
  view->scales = static_cast<uint8_t*>(o.scales);
  view->columnwise_payload = static_cast<uint8_t*>(o.columnwise_payload);
  view->columnwise_scales = static_cast<uint8_t*>(o.columnwise_scales);
  view->amax = static_cast<float*>(o.amax);
  view->columnwise_amax = static_cast<float*>(o.columnwise_amax);
  view->expert_scale = static_cast<float*>(o.expert_scale);
  view->columnwise_expert_scale = static_cast<float*>(o.columnwise_expert_scale);
  if (view->columnwise()) NVTE_EP_TRY(check_columnwise(view->shape, "operand"));
  if (view->shape.traits().token_scale_bytes == 0 &&
      (o.amax || o.columnwise_amax || o.expert_scale || o.columnwise_expert_scale)) {
    return invalid_argument("operand: ", view->shape.traits().name,
                            " has no second-level scales: expected NULL for amax and expert_scale parts");
  }
  return Status();
}

}  // namespace nvte_ep
