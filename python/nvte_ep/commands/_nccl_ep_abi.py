"""NCCL and NCCL EP as ctypes data, as far as `nvte-ep bench ep` calls them: nccl.h and nccl_ep.h, API
version 2.

Nothing here loads a library.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char, c_int, c_size_t, c_uint, c_uint64, c_ulong, c_void_p
from typing import Any

MAGIC = 0xC00FFFEE
TENSOR_MAGIC = 0xCAFECAFE
API_VERSION = 2

ALGO_LOW_LATENCY, ALGO_HIGH_THROUGHPUT = 0, 1
LAYOUT_EXPERT_MAJOR = 1
FORWARD, BACKWARD = 0, 1
QUANT_NONE, QUANT_FORWARDED = 0, 1

# ncclDataType_t by our names; float4 pairs count as one element of a byte.
DATA_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float4_e2m1fn_x2": 12,
}


class UniqueId(Structure):
    _fields_ = [("internal", c_char * 128)]


class Tensor(Structure):
    _fields_ = [
        ("size", c_uint),
        ("magic", c_uint),
        ("ndim", c_uint),
        ("datatype", c_int),
        ("data", c_void_p),
        ("win_hdl", c_void_p),
        ("win_offset", c_uint64),
        ("sizes", POINTER(c_size_t)),
    ]


class Sized(Structure):
    """A struct that begins with its size and the magic number; everything else starts as zero: default."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(size=ctypes.sizeof(type(self)), magic=MAGIC, **fields)


class GroupConfig(Sized):
    _fields_ = [
        ("size", c_uint),
        ("magic", c_uint),
        ("version", c_uint),
        ("algorithm", c_int),
        ("num_experts", c_uint),
        ("max_dispatch_tokens_per_rank", c_uint),
        ("max_recv_tokens_per_rank", c_uint),
        ("max_token_bytes", c_uint),
        ("rdma_buffer_size", c_ulong),
        ("num_qp_per_rank", c_uint),
        ("num_channels", c_uint),
        ("max_num_sms", c_uint),
        ("alloc_fn", c_void_p),
        ("free_fn", c_void_p),
        ("alloc_context", c_void_p),
        ("enable_mask", c_uint),
        ("timeout_ns", c_uint64),
        ("zero_copy", c_int),
        ("overflow_policy", c_int),
        ("num_topk", c_uint),
        ("padding_v2", c_uint),
    ]


class HandleConfig(Sized):
    _fields_ = [("size", c_uint), ("magic", c_uint), ("dispatch_output_per_expert_alignment", c_size_t)]


class LayoutInfo(Sized):
    _fields_ = [
        ("size", c_uint),
        ("magic", c_uint),
        ("expert_counters", POINTER(Tensor)),
        ("src_rank_counters", POINTER(Tensor)),
        ("expert_offsets", POINTER(Tensor)),
        ("recv_total_counter", POINTER(Tensor)),
        ("recv_topk_idx_kind", c_int),
        ("padding_v2", c_uint),
    ]


class DispatchInputs(Sized):
    _fields_ = [
        ("size", c_uint),
        ("magic", c_uint),
        ("tokens", POINTER(Tensor)),
        ("topk_weights", POINTER(Tensor)),
        ("scales", POINTER(Tensor)),
    ]


class DispatchOutputs(Sized):
    _fields_ = [
        ("size", c_uint),
        ("magic", c_uint),
        ("tokens", POINTER(Tensor)),
        ("topk_weights", POINTER(Tensor)),
        ("scales", POINTER(Tensor)),
        ("topk_idx", POINTER(Tensor)),
    ]


class DispatchConfig(Sized):
    _fields_ = [
        ("size", c_uint),
        ("magic", c_uint),
        ("send_only", c_uint),
        ("round_scales", c_uint),
        ("pass_direction", c_int),
        ("quant_recipe", c_int),
    ]


class CombineInputs(Sized):
    _fields_ = [
        ("size", c_uint),
        ("magic", c_uint),
        ("tokens", POINTER(Tensor)),
        ("topk_weights", POINTER(Tensor)),
        ("scales", POINTER(Tensor)),
    ]


class CombineOutputs(Sized):
    _fields_ = [
        ("size", c_uint),
        ("magic", c_uint),
        ("tokens", POINTER(Tensor)),
        ("topk_weights", POINTER(Tensor)),
    ]


class CombineConfig(Sized):
    _fields_ = [
        ("size", c_uint),
        ("magic", c_uint),
        ("send_only", c_uint),
        ("pass_direction", c_int),
        ("quant_recipe", c_int),
    ]


# Bytes of each, as nccl_ep.h freezes them.
SIZES = {
    Tensor: 48,
    GroupConfig: 112,
    HandleConfig: 16,
    LayoutInfo: 48,
    DispatchInputs: 32,
    DispatchOutputs: 40,
    DispatchConfig: 24,
    CombineInputs: 32,
    CombineOutputs: 24,
    CombineConfig: 20,
}

# name -> argtypes; every one returns an ncclResult_t.
NCCL_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommDestroy": (c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}
EP_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclEpGetVersion": (POINTER(c_int),),
    "ncclEpCreateGroup": (POINTER(c_void_p), c_void_p, POINTER(GroupConfig)),
    "ncclEpGroupDestroy": (c_void_p,),
    "ncclEpInitHandle": (
        POINTER(c_void_p), c_void_p, c_int, POINTER(HandleConfig), c_int, POINTER(Tensor),
    ),
    "ncclEpCreateHandle": (
        POINTER(c_void_p), c_void_p, c_int, POINTER(Tensor), POINTER(LayoutInfo), POINTER(HandleConfig),
        c_void_p,
    ),
    "ncclEpUpdateHandle": (c_void_p, POINTER(Tensor), POINTER(LayoutInfo), c_void_p),
    "ncclEpHandleDestroy": (c_void_p,),
    "ncclEpDispatch": (
        c_void_p, POINTER(DispatchInputs), POINTER(DispatchOutputs), POINTER(LayoutInfo),
        POINTER(DispatchConfig), c_void_p,
    ),
    "ncclEpCombine": (
        c_void_p, POINTER(CombineInputs), POINTER(CombineOutputs), POINTER(CombineConfig), c_void_p,
    ),
}  # fmt: skip


def tensor(pointer: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A tensor over device memory; keeps its sizes alive."""
    sizes = (c_size_t * len(shape))(*shape)
    made = Tensor(
        size=ctypes.sizeof(Tensor),
        magic=TENSOR_MAGIC,
        ndim=len(shape),
        datatype=DATA_TYPES[dtype],
        data=pointer,
        sizes=ctypes.cast(sizes, POINTER(c_size_t)),
    )
    made._sizes = sizes
    return made
