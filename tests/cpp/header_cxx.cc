// A C++ user of the public header alone, compiled once per language standard; HEADER_USER names the function.
#include "nvte_ep/nvte_ep.h"
#include "nvte_ep/nvte_ep.h"  // twice: guarded

namespace {
template <typename Struct>
bool is_default(const Struct& value) {
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(&value);
  for (unsigned i = sizeof(value.struct_size); i < sizeof(value); ++i) {
    if (bytes[i] != 0) return false;
  }
  return value.struct_size == sizeof(Struct);
}
}  // namespace

// The C++ standard in use, or 0 where an INIT macro is not all defaults.
long HEADER_USER() {
  nvte_ep_tensor_t tensor = NVTE_EP_TENSOR_INIT;
  nvte_ep_codec_options_t options = NVTE_EP_CODEC_OPTIONS_INIT;
  nvte_ep_format_info_t format = NVTE_EP_FORMAT_INFO_INIT;
  nvte_ep_operand_config_t operand_config = NVTE_EP_OPERAND_CONFIG_INIT;
  nvte_ep_operand_layout_t layout = NVTE_EP_OPERAND_LAYOUT_INIT;
  nvte_ep_operand_t operand = NVTE_EP_OPERAND_INIT;
  nvte_ep_comm_config_t comm = NVTE_EP_COMM_CONFIG_INIT;
  nvte_ep_group_config_t group = NVTE_EP_GROUP_SETTINGS_INIT;
  nvte_ep_memory_info_t memory = NVTE_EP_MEMORY_INFO_INIT;
  nvte_ep_group_info_t group_info = NVTE_EP_GROUP_INFO_INIT;
  nvte_ep_error_info_t error = NVTE_EP_ERROR_INFO_INIT;
  nvte_ep_handle_config_t handle = NVTE_EP_HANDLE_CONFIG_INIT;
  nvte_ep_prepare_args_t prepare = NVTE_EP_PREPARE_ARGS_INIT;
  nvte_ep_dispatch_args_t dispatch = NVTE_EP_DISPATCH_ARGS_INIT;
  nvte_ep_combine_args_t combine = NVTE_EP_COMBINE_ARGS_INIT;
  nvte_ep_dispatch_backward_args_t dispatch_backward = NVTE_EP_DISPATCH_BACKWARD_ARGS_INIT;
  nvte_ep_combine_backward_args_t combine_backward = NVTE_EP_COMBINE_BACKWARD_ARGS_INIT;
  const bool defaults = is_default(tensor) && is_default(options) && is_default(format) &&
                        is_default(operand_config) && is_default(layout) && is_default(operand) &&
                        is_default(comm) && is_default(group) && is_default(memory) &&
                        is_default(group_info) && is_default(error) && is_default(handle) &&
                        is_default(prepare) && is_default(dispatch) && is_default(combine) &&
                        is_default(dispatch_backward) && is_default(combine_backward);
  const unsigned char bytes[6] = {0, 1, 2, 3, 4, 5};
  tensor = nvte_ep_tensor_2d(bytes, 2, 3, NVTE_EP_DTYPE_UINT, 8, NVTE_EP_DEVICE_CPU, 0);
  const nvte_ep_tensor_t line = nvte_ep_tensor_1d(bytes, 6, NVTE_EP_DTYPE_UINT, 8, NVTE_EP_DEVICE_CPU, 0);
  const bool helpers = tensor.ndim == 2 && tensor.shape[0] == 2 && tensor.shape[1] == 3 && line.ndim == 1 &&
                       line.shape[0] == 6 && tensor.data == static_cast<const void*>(bytes) &&
                       nvte_ep_abi_version() == NVTE_EP_ABI_VERSION;
  return defaults && helpers ? __cplusplus : 0;
}
