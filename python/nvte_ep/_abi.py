# SPDX-License-Identifier: Apache-2.0
"""The C interface of include/nvte_ep/nvte_ep.h as ctypes data; tests/abi holds the two against a compiler.

Nothing here loads a library. Structs, constants and functions stand in the order of the header.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_void_p,
)
from typing import Any

CONSTANTS: dict[str, int] = {
    "NVTE_EP_ABI_VERSION": 1,
    "NVTE_EP_STATUS_OK": 0,
    "NVTE_EP_STATUS_INVALID_ARGUMENT": 1,
    "NVTE_EP_STATUS_UNSUPPORTED": 2,
    "NVTE_EP_STATUS_BAD_STATE": 3,
    "NVTE_EP_STATUS_OUT_OF_MEMORY": 4,
    "NVTE_EP_STATUS_CUDA": 5,
    "NVTE_EP_STATUS_TRANSPORT": 6,
    "NVTE_EP_STATUS_PEER_FAILED": 7,
    "NVTE_EP_STATUS_TIMEOUT": 8,
    "NVTE_EP_STATUS_OVERFLOW": 9,
    "NVTE_EP_STATUS_ABI_MISMATCH": 10,
    "NVTE_EP_STATUS_INTERNAL": 11,
    "NVTE_EP_FORMAT_BF16": 0,
    "NVTE_EP_FORMAT_MXFP8": 1,
    "NVTE_EP_FORMAT_NVFP4": 2,
    "NVTE_EP_DEVICE_CPU": 1,
    "NVTE_EP_DEVICE_CUDA": 2,
    "NVTE_EP_DEVICE_CUDA_HOST": 3,
    "NVTE_EP_DTYPE_INT": 0,
    "NVTE_EP_DTYPE_UINT": 1,
    "NVTE_EP_DTYPE_FLOAT": 2,
    "NVTE_EP_DTYPE_BFLOAT": 4,
    "NVTE_EP_ROUNDING_NEAREST": 0,
    "NVTE_EP_ROUNDING_STOCHASTIC": 1,
    "NVTE_EP_NONFINITE_PROPAGATE": 0,
    "NVTE_EP_NONFINITE_SATURATE": 1,
    "NVTE_EP_SCALE_ROUNDING_NEAREST": 0,
    "NVTE_EP_SCALE_ROUNDING_UP": 1,
    "NVTE_EP_COLUMN_BOUND_L1": 0,
    "NVTE_EP_COLUMN_BOUND_MAX": 1,
    "NVTE_EP_SCALE_LAYOUT_SWIZZLED": 0,
    "NVTE_EP_SCALE_LAYOUT_LINEAR": 1,
    "NVTE_EP_RECEIVE_ROWS": 0,
    "NVTE_EP_RECEIVE_DECODED": 1,
    "NVTE_EP_RECEIVE_OPERAND": 2,
    "NVTE_EP_COMM_THREADS": 1,
    "NVTE_EP_COMM_NCCL": 2,
    "NVTE_EP_TRANSPORT_AUTO": 0,
    "NVTE_EP_TRANSPORT_THREADS": 1,
    "NVTE_EP_TRANSPORT_PEER": 2,
    "NVTE_EP_TRANSPORT_NCCL_EP": 3,
    "NVTE_EP_TRANSPORT_NCCL": 4,
    "NVTE_EP_ON_OVERFLOW_ERROR": 0,
    "NVTE_EP_ON_OVERFLOW_DROP": 1,
    "NVTE_EP_FINDING_ROW_COUNT": 1,
    "NVTE_EP_FINDING_TENSOR_SCALE": 2,
    "NVTE_EP_FINDING_EXPERT_SCALE": 4,
    "NVTE_EP_MAX_NDIM": 4,
    "NVTE_EP_UNIQUE_ID_BYTES": 128,
}


@functools.cache
def choices(prefix: str) -> dict[str, int]:
    """The constants that begin with prefix, by the lower-case rest of their names: {"nearest": 0,
    "stochastic": 1}."""
    return {
        name[len(prefix) :].lower(): value for name, value in CONSTANTS.items() if name.startswith(prefix)
    }


Stream = c_void_p  # nvte_ep_stream_t
Communicator = c_void_p  # nvte_ep_comm_t
Group = c_void_p  # nvte_ep_group_t
Handle = c_void_p  # nvte_ep_handle_t
Status = c_int32  # nvte_ep_status_t

AllocFunction = CFUNCTYPE(c_void_p, c_size_t, c_int32, Stream, c_void_p)
FreeFunction = CFUNCTYPE(None, c_void_p, c_size_t, c_int32, Stream, c_void_p)


class SizedStruct(Structure):
    """A struct that begins with its size; everything else starts as zero, which means default."""

    def __init__(self, **fields: Any) -> None:
        if fields:
            super().__init__(**fields)
        self.struct_size = ctypes.sizeof(self)


class Tensor(SizedStruct):
    owner: Any = (
        None  # keeps the memory alive; ctypes keeps this object alive in the structs that point to it
    )

    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("data", c_void_p),
        ("shape", c_int64 * 4),
        ("strides", c_int64 * 4),
        ("ndim", c_int32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("dtype_code", c_uint8),
        ("dtype_bits", c_uint8),
        ("dtype_lanes", c_uint16),
    ]


class CodecOptions(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("rounding", c_int32),
        ("nonfinite", c_int32),
        ("scale_rounding", c_int32),
        ("column_bound", c_int32),
        ("row_id_base", c_int64),
        ("rank", c_int32),
        ("reserved0", c_int32),
        ("rng_state", POINTER(Tensor)),
        ("tensor_scale", POINTER(Tensor)),
        ("row_count", POINTER(Tensor)),
        ("fixed_expert_scale", POINTER(Tensor)),
        ("findings", POINTER(Tensor)),
    ]


class FormatInfo(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("name", c_char_p),
        ("format", c_int32),
        ("block", c_int32),
        ("payload_bits", c_int32),
        ("scale_bytes", c_int32),
        ("token_scale_bytes", c_int32),
        ("hidden_multiple", c_int32),
        ("operand_multiple", c_int32),
        ("columnwise_alignment", c_int32),
    ]


class OperandConfig(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("format", c_int32),
        ("scale_layout", c_int32),
        ("hidden", c_int64),
        ("capacity", c_int64),
        ("num_experts", c_int32),
        ("alignment", c_int32),
        ("columnwise", c_int32),
        ("reserved0", c_int32),
    ]


class OperandLayout(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("total_bytes", c_int64),
        ("payload_offset", c_int64),
        ("payload_bytes", c_int64),
        ("scales_offset", c_int64),
        ("scales_bytes", c_int64),
        ("columnwise_payload_offset", c_int64),
        ("columnwise_payload_bytes", c_int64),
        ("columnwise_scales_offset", c_int64),
        ("columnwise_scales_bytes", c_int64),
        ("amax_offset", c_int64),
        ("amax_bytes", c_int64),
        ("columnwise_amax_offset", c_int64),
        ("columnwise_amax_bytes", c_int64),
        ("expert_scale_offset", c_int64),
        ("expert_scale_bytes", c_int64),
        ("columnwise_expert_scale_offset", c_int64),
        ("columnwise_expert_scale_bytes", c_int64),
    ]


class Operand(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("format", c_int32),
        ("scale_layout", c_int32),
        ("hidden", c_int64),
        ("capacity", c_int64),
        ("num_experts", c_int32),
        ("alignment", c_int32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("payload", c_void_p),
        ("scales", c_void_p),
        ("columnwise_payload", c_void_p),
        ("columnwise_scales", c_void_p),
        ("amax", c_void_p),
        ("columnwise_amax", c_void_p),
        ("expert_scale", c_void_p),
        ("columnwise_expert_scale", c_void_p),
    ]


class CommConfig(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("kind", c_int32),
        ("num_ranks", c_int32),
        ("rank", c_int32),
        ("device_id", c_int32),
        ("unique_id", POINTER(c_uint8)),
        ("timeout_ns", c_int64),
    ]


class GroupConfig(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("num_experts", c_int32),
        ("max_top_k", c_int32),
        ("hidden", c_int64),
        ("max_tokens_per_rank", c_int64),
        ("recv_capacity", c_int64),
        ("transport", c_int32),
        ("num_sms", c_int32),
        ("timeout_ns", c_int64),
        ("overflow", c_int32),
        ("zero_copy", c_int32),
        ("alloc_fn", AllocFunction),
        ("free_fn", FreeFunction),
        ("alloc_context", c_void_p),
    ]


class MemoryInfo(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("group_bytes", c_int64),
        ("handle_bytes", c_int64),
        ("exchange_bytes", c_int64),
    ]


class GroupInfo(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("transport", c_char_p),
        ("num_ranks", c_int32),
        ("rank", c_int32),
        ("num_local_experts", c_int32),
        ("max_top_k", c_int32),
        ("capturable", c_int32),
        ("slot_order_exact", c_int32),
        ("recv_capacity", c_int64),
    ]


class ErrorInfo(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("status", Status),
        ("rank", c_int32),
        ("handle", Handle),
        ("count", c_int64),
        ("needed_rows", c_int64),
    ]


class HandleConfig(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("top_k", c_int32),
        ("alignment", c_int32),
        ("dispatch", c_int32),
        ("combine", c_int32),
        ("dispatch_backward", c_int32),
        ("combine_backward", c_int32),
    ]


class PrepareArgs(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("topk_idx", POINTER(Tensor)),
        ("tokens_routed", POINTER(Tensor)),
        ("tokens_per_expert", POINTER(Tensor)),
        ("rows_per_expert", POINTER(Tensor)),
        ("row_offsets", POINTER(Tensor)),
        ("scale_row_offsets", POINTER(Tensor)),
        ("total_rows", POINTER(Tensor)),
        ("dropped_rows", POINTER(Tensor)),
        ("slot_source", POINTER(Tensor)),
        ("slot_expert", POINTER(Tensor)),
        ("total_rows_host", POINTER(c_int64)),
    ]


class DispatchArgs(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("tokens", POINTER(Tensor)),
        ("payload", POINTER(Tensor)),
        ("scales", POINTER(Tensor)),
        ("token_scales", POINTER(Tensor)),
        ("tensor_scale", POINTER(Tensor)),
        ("topk_weights", POINTER(Tensor)),
        ("receive", c_int32),
        ("rounding", c_int32),
        ("nonfinite", c_int32),
        ("scale_rounding", c_int32),
        ("column_bound", c_int32),
        ("reserved0", c_int32),
        ("rng_state", POINTER(Tensor)),
        ("fixed_expert_scale", POINTER(Tensor)),
        ("received", POINTER(Tensor)),
        ("operand", POINTER(Operand)),
        ("recv_weights", POINTER(Tensor)),
        ("findings", POINTER(Tensor)),
    ]


class CombineArgs(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("expert_out", POINTER(Tensor)),
        ("slot_weights", POINTER(Tensor)),
        ("result", POINTER(Tensor)),
        ("accumulate", c_int32),
        ("reserved0", c_int32),
    ]


class DispatchBackwardArgs(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("grad_received", POINTER(Tensor)),
        ("grad_recv_weights", POINTER(Tensor)),
        ("grad_tokens", POINTER(Tensor)),
        ("grad_topk_weights", POINTER(Tensor)),
        ("accumulate", c_int32),
        ("reserved0", c_int32),
    ]


class CombineBackwardArgs(SizedStruct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("send", POINTER(DispatchArgs)),
        ("slot_weights", POINTER(Tensor)),
        ("expert_out", POINTER(Tensor)),
        ("grad_slot_weights", POINTER(Tensor)),
    ]


STRUCTS: dict[str, type[SizedStruct]] = {
    "nvte_ep_tensor_t": Tensor,
    "nvte_ep_codec_options_t": CodecOptions,
    "nvte_ep_format_info_t": FormatInfo,
    "nvte_ep_operand_config_t": OperandConfig,
    "nvte_ep_operand_layout_t": OperandLayout,
    "nvte_ep_operand_t": Operand,
    "nvte_ep_comm_config_t": CommConfig,
    "nvte_ep_group_config_t": GroupConfig,
    "nvte_ep_memory_info_t": MemoryInfo,
    "nvte_ep_group_info_t": GroupInfo,
    "nvte_ep_error_info_t": ErrorInfo,
    "nvte_ep_handle_config_t": HandleConfig,
    "nvte_ep_prepare_args_t": PrepareArgs,
    "nvte_ep_dispatch_args_t": DispatchArgs,
    "nvte_ep_combine_args_t": CombineArgs,
    "nvte_ep_dispatch_backward_args_t": DispatchBackwardArgs,
    "nvte_ep_combine_backward_args_t": CombineBackwardArgs,
}

_tensor = POINTER(Tensor)
_options = POINTER(CodecOptions)
_operand = POINTER(Operand)

# name -> (restype, argtypes)
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "nvte_ep_version": (c_int32, ()),
    "nvte_ep_abi_version": (c_int32, ()),
    "nvte_ep_build_info": (Status, (POINTER(c_char_p),)),
    "nvte_ep_status_name": (c_char_p, (Status,)),
    "nvte_ep_last_error": (c_char_p, ()),
    "nvte_ep_format_info": (Status, (c_int32, POINTER(FormatInfo))),
    "nvte_ep_row_bytes": (Status, (c_int32, c_int64, POINTER(c_int64))),
    "nvte_ep_nvfp4_pack": (Status, (_tensor, _tensor, _options, Stream)),
    "nvte_ep_mxfp8_pack": (Status, (_tensor, _tensor, _options, Stream)),
    "nvte_ep_nvfp4_unpack": (Status, (_tensor, _tensor, _options, Stream)),
    "nvte_ep_mxfp8_unpack": (Status, (_tensor, _tensor, _options, Stream)),
    "nvte_ep_nvfp4_quantize": (Status, (_tensor, _tensor, _tensor, _tensor, _options, Stream)),
    "nvte_ep_mxfp8_quantize": (Status, (_tensor, _tensor, _tensor, _options, Stream)),
    "nvte_ep_nvfp4_dequantize": (Status, (_tensor, _tensor, _tensor, _tensor, _options, Stream)),
    "nvte_ep_mxfp8_dequantize": (Status, (_tensor, _tensor, _tensor, _options, Stream)),
    "nvte_ep_operand_layout": (Status, (POINTER(OperandConfig), POINTER(OperandLayout))),
    "nvte_ep_operand_bind": (Status, (POINTER(OperandConfig), _tensor, _operand)),
    "nvte_ep_nvfp4_direct_receive": (Status, (_tensor, _tensor, _operand, _options, Stream)),
    "nvte_ep_mxfp8_direct_receive": (Status, (_tensor, _tensor, _operand, _options, Stream)),
    "nvte_ep_scales_swizzle": (Status, (_tensor, _tensor, _tensor, Stream)),
    "nvte_ep_scales_unswizzle": (Status, (_tensor, _tensor, _tensor, Stream)),
    "nvte_ep_unique_id": (Status, (c_int32, POINTER(c_uint8))),
    "nvte_ep_comm_create": (Status, (POINTER(CommConfig), POINTER(Communicator))),
    "nvte_ep_comm_from_nccl": (Status, (c_void_p, POINTER(Communicator))),
    "nvte_ep_comm_destroy": (Status, (Communicator,)),
    "nvte_ep_group_create": (Status, (Communicator, POINTER(GroupConfig), POINTER(Group))),
    "nvte_ep_group_destroy": (Status, (Group,)),
    "nvte_ep_group_memory": (Status, (Communicator, POINTER(GroupConfig), POINTER(MemoryInfo))),
    "nvte_ep_group_info": (Status, (Group, POINTER(GroupInfo))),
    "nvte_ep_group_poll_error": (Status, (Group, POINTER(ErrorInfo))),
    "nvte_ep_group_abort": (Status, (Group,)),
    "nvte_ep_mem_alloc": (Status, (Group, c_size_t, POINTER(c_void_p))),
    "nvte_ep_mem_free": (Status, (Group, c_void_p)),
    "nvte_ep_handle_create": (Status, (Group, POINTER(HandleConfig), POINTER(Handle))),
    "nvte_ep_handle_destroy": (Status, (Handle,)),
    "nvte_ep_handle_prepare": (Status, (Handle, POINTER(PrepareArgs), Stream)),
    "nvte_ep_handle_dispatch": (Status, (Handle, POINTER(DispatchArgs), Stream)),
    "nvte_ep_handle_combine": (Status, (Handle, POINTER(CombineArgs), Stream)),
    "nvte_ep_handle_dispatch_backward": (Status, (Handle, POINTER(DispatchBackwardArgs), Stream)),
    "nvte_ep_handle_combine_backward": (Status, (Handle, POINTER(CombineBackwardArgs), Stream)),
}
