# SPDX-License-Identifier: Apache-2.0
"""Element types by name, and devices: the numbers are DLPack's."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from nvte_ep import _abi
from nvte_ep._arguments import integer
from nvte_ep.errors import invalid

Device = tuple[int, int]  # DLPack device type and device id

CPU: Device = (_abi.CONSTANTS["NVTE_EP_DEVICE_CPU"], 0)
CUDA_TYPE = _abi.CONSTANTS["NVTE_EP_DEVICE_CUDA"]
CUDA_MANAGED_TYPE = 13  # reachable from the device: to the library it is CUDA memory


class DType(NamedTuple):
    """A type of elements: its name, DLPack's code, bits and lanes, and the NumPy type of the same size."""

    name: str
    code: int
    bits: int
    lanes: int
    storage: str


_TYPES = (
    DType("int8", 0, 8, 1, "i1"),
    DType("int16", 0, 16, 1, "i2"),
    DType("int32", 0, 32, 1, "i4"),
    DType("int64", 0, 64, 1, "i8"),
    DType("uint8", 1, 8, 1, "u1"),
    DType("uint16", 1, 16, 1, "u2"),
    DType("uint32", 1, 32, 1, "u4"),
    DType("uint64", 1, 64, 1, "u8"),
    DType("float16", 2, 16, 1, "f2"),
    DType("float32", 2, 32, 1, "f4"),
    DType("float64", 2, 64, 1, "f8"),
    DType("bfloat16", 4, 16, 1, "u2"),
    DType("bool", 6, 8, 1, "u1"),
    DType("float8_e4m3fn", 10, 8, 1, "u1"),
    DType("float8_e5m2", 12, 8, 1, "u1"),
    DType("float8_e8m0fnu", 14, 8, 1, "u1"),
    DType("float4_e2m1fn", 17, 4, 1, "u1"),  # two elements to a byte, the first in the low nibble
    DType("float4_e2m1fn_x2", 17, 4, 2, "u1"),
)
BY_NAME = {dtype.name: dtype for dtype in _TYPES}
BY_CODE = {(dtype.code, dtype.bits, dtype.lanes): dtype for dtype in _TYPES}
UINT8 = BY_NAME["uint8"]
# Eight bits that hold a code or a scale; where bytes are asked for they are as good as uint8.
BYTE_LIKE = frozenset({"int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"})


def dtype_name(dtype: Any) -> str:
    """The name of "bfloat16", numpy.dtype("float32"), torch.bfloat16, jax.numpy.bfloat16, ..."""
    if isinstance(dtype, str):
        return dtype
    if str(dtype).startswith("torch."):
        return str(dtype)[len("torch.") :]
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return str(dtype)


@functools.lru_cache(maxsize=256)
def numpy_dtype(dtype: np.dtype[Any]) -> DType | None:
    """What a NumPy array of this type holds, ml_dtypes included; None: nothing that the library knows."""
    found = BY_NAME.get(dtype.name)
    if found is None or not dtype.isnative:
        return None
    if found.name == "float4_e2m1fn":  # ml_dtypes keeps one element per byte: these are no packed codes
        return None
    return found


def device_name(device: Device) -> str:
    names = {1: "cpu", 2: "cuda", 3: "cuda_host"}
    name = names.get(device[0], f"device type {device[0]}")
    return name if device[0] == CPU[0] else f"{name}:{device[1]}"


def parse_device(function: str, device: Any) -> Device:
    """ "cpu", "cuda", "cuda:1", a DLPack pair, or anything that prints as one of the first three
    (torch.device)."""
    if isinstance(device, tuple) and len(device) == 2:
        return integer(function, "device", device[0], 32), integer(function, "device", device[1], 32)
    kind, _, index = str(device).partition(":")
    if kind in ("cpu", "cuda") and (index.isdecimal() or not index):
        number = integer(function, "device", int(index or 0), 32)
        return (CUDA_TYPE, number) if kind == "cuda" else CPU
    raise invalid(function, "device", '"cpu", "cuda" or "cuda:<index>"', repr(device))
