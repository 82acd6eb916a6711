// Library: versions, formats, build information, error texts.
#include "api/guard.h"
#include "core/json.h"
#include "core/struct_reader.h"
#include "core/transport.h"
#include "formats/format_table.h"

using namespace nvte_ep;

namespace {

std::string json_list(const std::vector<Availability>& list) {
  std::string out = "[";
  for (const Availability& item : list) {
    if (out.size() > 1) out += ", ";
    out += "{\"name\": " + json_string(item.name) + ", \"available\": " + (item.available ? "true" : "false");
    if (!item.available) out += ", \"reason\": " + json_string(item.reason);
    out += "}";
  }
  return out + "]";
}

std::string describe_build() {
  std::vector<Availability> formats;
  for (const FormatRow& row : kFormats) formats.push_back({row.name, true, ""});
  return text("{\"version\": \"", NVTE_EP_VERSION_MAJOR, ".", NVTE_EP_VERSION_MINOR, ".",
              NVTE_EP_VERSION_PATCH, "\", \"abi_version\": ", NVTE_EP_ABI_VERSION,
              ", \"formats\": ", json_list(formats), ", \"backends\": ", json_list(list_backends()),
              ", \"transports\": ", json_list(list_transports()), "}");
}

}  // namespace

extern "C" {

int32_t nvte_ep_version(void) {
  return NVTE_EP_VERSION_MAJOR * 10000 + NVTE_EP_VERSION_MINOR * 100 + NVTE_EP_VERSION_PATCH;
}

int32_t nvte_ep_abi_version(void) { return NVTE_EP_ABI_VERSION; }

nvte_ep_status_t nvte_ep_build_info(const char** json) {
  return boundary("nvte_ep_build_info", [&]() -> Status {
    if (json == nullptr) return invalid_argument("json: expected a pointer, got NULL");
    static const std::string* info = new std::string(describe_build());
    *json = info->c_str();
    return Status();
  });
}

const char* nvte_ep_status_name(nvte_ep_status_t status) {
  switch (status) {
    case NVTE_EP_STATUS_OK:
      return "OK";
    case NVTE_EP_STATUS_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case NVTE_EP_STATUS_UNSUPPORTED:
      return "UNSUPPORTED";
    case NVTE_EP_STATUS_BAD_STATE:
      return "BAD_STATE";
    case NVTE_EP_STATUS_OUT_OF_MEMORY:
      return "OUT_OF_MEMORY";
    case NVTE_EP_STATUS_CUDA:
      return "CUDA";
    case NVTE_EP_STATUS_TRANSPORT:
      return "TRANSPORT";
    case NVTE_EP_STATUS_PEER_FAILED:
      return "PEER_FAILED";
    case NVTE_EP_STATUS_TIMEOUT:
      return "TIMEOUT";
    case NVTE_EP_STATUS_OVERFLOW:
      return "OVERFLOW";
    case NVTE_EP_STATUS_ABI_MISMATCH:
      return "ABI_MISMATCH";
    case NVTE_EP_STATUS_INTERNAL:
      return "INTERNAL";
    default:
      return "UNKNOWN";
  }
}

const char* nvte_ep_last_error(void) { return LastError::get(); }

nvte_ep_status_t nvte_ep_format_info(int32_t format, nvte_ep_format_info_t* info) {
  return boundary("nvte_ep_format_info", [&]() -> Status {
    NVTE_EP_TRY(check_out_struct(info, NVTE_EP_FORMAT_INFO_V1_SIZE, "info"));
    const FormatRow* row = find_format(format);
    if (row == nullptr) return unsupported("format: expected 0 to ", kNumFormats - 1, ", got ", format);
    nvte_ep_format_info_t out = NVTE_EP_FORMAT_INFO_INIT;
    out.name = row->name;
    out.format = row->id;
    out.block = row->block;
    out.payload_bits = row->payload_bits;
    out.scale_bytes = row->scale_bytes;
    out.token_scale_bytes = row->token_scale_bytes;
    out.hidden_multiple = row->hidden_multiple;
    out.operand_multiple = row->operand_multiple;
    out.columnwise_alignment = row->columnwise_alignment;
    write_struct(out, info);
    return Status();
  });
}

}  // extern "C"
