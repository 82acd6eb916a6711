# SPDX-License-Identifier: Apache-2.0
"""Any array as the library's tensor struct: borrowed through DLPack or __cuda_array_interface__, never
copied."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nvte_ep import _abi, _cuda, _streams, _torch_tensor
from nvte_ep._dtypes import (
    BY_CODE,
    BY_NAME,
    BYTE_LIKE,
    CPU,
    CUDA_MANAGED_TYPE,
    CUDA_TYPE,
    UINT8,
    Device,
    DType,
    numpy_dtype,
)
from nvte_ep._kept_views import Facts, KeptViews, facts_of
from nvte_ep.array import Array, dlpack_tensor
from nvte_ep.errors import InvalidArgumentError, NvteEpError, invalid

_MAX_NDIM = _abi.CONSTANTS["NVTE_EP_MAX_NDIM"]
_MAX_VERSION = (1, 1)
_READ_ONLY = 1
_SUBBYTE_PADDED = 4


@dataclass
class View:
    """An array as the library sees it. Unless `tensor.owner` is set, the caller's array keeps the memory
    alive."""

    tensor: _abi.Tensor
    dtype: DType
    shape: tuple[int, ...]
    device: Device
    read_only: bool = False
    pointer: Any = field(init=False)  # nvte_ep_tensor_t*; keeps the struct alive, and that its owner

    def __post_init__(self) -> None:
        self.pointer = ctypes.pointer(self.tensor)


@dataclass
class _Description:
    """What an array protocol says about an array; strides in elements."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: Device
    read_only: bool
    owner: Any = None  # of a DLPack capsule: it must live as long as the memory is used


def device_of(function: str, name: str, array: Any) -> Device:
    """Where an array lies. Pinned memory is host memory, managed memory is device memory."""
    if isinstance(array, Array):
        return array.device
    if isinstance(array, (np.ndarray, list, tuple)):
        return CPU
    if _torch_tensor.is_plain(type(array)) and array.is_cuda:  # as below, sooner
        return CUDA_TYPE, array.get_device()
    if hasattr(array, "__dlpack_device__"):
        try:
            kind, index = (int(part) for part in array.__dlpack_device__())
        except Exception as error:  # no memory at all, such as PyTorch's meta tensors
            raise _no_export(function, name, array, error) from error
        return (CUDA_TYPE if kind == CUDA_MANAGED_TYPE else kind, index)
    if hasattr(array, "__cuda_array_interface__"):
        try:
            address = int(array.__cuda_array_interface__["data"][0])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise invalid(
                function,
                name,
                "an array that exports __cuda_array_interface__",
                f"{type(array).__name__}: {error}",
            ) from error
        return CUDA_TYPE, _cuda.pointer_device(address)
    raise _no_array(function, name, array)


def _no_array(function: str, name: str, array: Any) -> InvalidArgumentError:
    expected = "an array with __dlpack__ or __cuda_array_interface__"
    return invalid(function, name, expected, type(array).__name__)


def _no_export(function: str, name: str, array: Any, error: Exception) -> InvalidArgumentError:
    return invalid(function, name, "an array that exports DLPack", f"{type(array).__name__}: {error}")


def view(
    function: str,
    name: str,
    array: Any,
    stream: int = 0,
    writable: bool = False,
    as_bytes: bool = False,
    uint16_is: str | None = None,
    *,
    lasting: bool = False,
) -> View:
    """Borrows an array for one argument of one function, ordered before `stream` where it lies on a device.

    as_bytes: eight-bit codes and scales of any type, and FP4 pairs, count as uint8.
    uint16_is: the type that a uint16 array really holds.
    lasting: the view itself keeps the memory alive, for what outlives the call or nobody else holds.
    """
    facts = None if lasting else facts_of(array, stream)
    if facts is not None:
        kept = _kept.find((facts, as_bytes, uint16_is))
        if kept is not None:
            return kept
    if writable and type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise invalid(function, name, "a writable array", f"a read-only {type(array).__name__}")
    if isinstance(array, Array):
        found = _describe_own(array, stream)
    elif facts is not None and _torch_tensor.element_type(facts[3]) is not None:
        found = _describe_torch(array, facts)
    elif isinstance(array, np.ndarray):
        found = _describe_numpy(function, name, array)
    elif hasattr(array, "__dlpack__"):
        found = _describe_dlpack(function, name, array, stream)
    elif hasattr(array, "__cuda_array_interface__"):
        found = _describe_cuda_interface(function, name, array, stream)
    else:
        raise _no_array(function, name, array)
    if writable and found.read_only:
        raise invalid(function, name, "a writable array", f"a read-only {type(array).__name__}")
    if as_bytes:
        found = _as_bytes(function, name, found)
    if uint16_is is not None and found.dtype.name == "uint16":
        found.dtype = BY_NAME[uint16_is]
    made = _view(function, name, found)
    if lasting and made.tensor.owner is None:
        made.tensor.owner = array
    elif facts is not None and made.tensor.owner is None:
        _kept.keep((facts, as_bytes, uint16_is), made)
    return made


_kept: KeptViews[View] = KeptViews()


def _describe_torch(tensor: Any, facts: Facts) -> _Description:
    pointer, shape, strides, torch_type, index = facts
    dtype = _torch_tensor.element_type(torch_type)
    assert dtype is not None
    return _Description(pointer, tuple(shape), strides, dtype, _torch_tensor.device(tensor, index), False)


def _describe_own(array: Array, stream: int) -> _Description:
    array.wait_on(stream)
    return _Description(array.pointer, array.shape, array.strides, array.element_type, array.device, False)


def _describe_numpy(function: str, name: str, array: np.ndarray[Any, Any]) -> _Description:
    if isinstance(array, np.ma.MaskedArray):  # codecs and exchanges would send what the mask hides
        raise invalid(function, name, "an array without a mask (see .filled())", type(array).__name__)
    dtype = numpy_dtype(array.dtype)
    if dtype is None:
        raise invalid(function, name, "an element type that the library knows", f"NumPy {array.dtype}")
    itemsize = array.itemsize
    if any(stride % itemsize for stride in array.strides):
        raise invalid(function, name, "strides of whole elements", f"{array.strides} bytes")
    strides = tuple(stride // itemsize for stride in array.strides)
    pointer = array.__array_interface__["data"][0]
    return _Description(pointer, array.shape, strides, dtype, CPU, not array.flags.writeable)


def _describe_dlpack(function: str, name: str, array: Any, stream: int) -> _Description:
    _refuse_lazy_torch(function, name, array)
    device = device_of(function, name, array)
    # On the host the stream must be None; on the device the producer makes our stream wait for its own.
    ordering = {"stream": _streams.for_dlpack(stream)} if device[0] == CUDA_TYPE else {}
    try:
        try:
            capsule = array.__dlpack__(max_version=_MAX_VERSION, **ordering)
        except TypeError:  # a producer of before DLPack 1.0
            capsule = array.__dlpack__(**ordering)
        # The capsule stays unconsumed: its destructor gives the memory back when the last reference goes.
        tensor, major, flags = dlpack_tensor(capsule)
    except Exception as error:
        raise _no_export(function, name, array, error) from error
    if major > 1:
        raise invalid(function, name, "DLPack version 1", f"version {major}")
    code = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    dtype = BY_CODE.get(code)
    if dtype is None or (dtype.name == "float4_e2m1fn" and flags & _SUBBYTE_PADDED):
        raise invalid(
            function, name, "an element type that the library knows", f"(code, bits, lanes) = {code}"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _compact(shape)
    pointer = (tensor.data or 0) + tensor.byte_offset
    return _Description(pointer, shape, strides, dtype, device, bool(flags & _READ_ONLY), capsule)


def _refuse_lazy_torch(function: str, name: str, array: Any) -> None:
    """PyTorch negates and conjugates by a flag that DLPack does not carry: the memory holds other numbers."""
    if type(array).__module__.partition(".")[0] != "torch":
        return
    for flag, remedy in (("is_neg", "resolve_neg()"), ("is_conj", "resolve_conj()")):
        test = getattr(array, flag, None)
        if test is not None and test():
            raise invalid(function, name, f"a tensor that memory holds as it is (see .{remedy})", flag)


def _describe_cuda_interface(function: str, name: str, array: Any, stream: int) -> _Description:
    try:
        return _read_cuda_interface(function, name, array, stream)
    except NvteEpError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise invalid(
            function,
            name,
            "an array that exports __cuda_array_interface__",
            f"{type(array).__name__}: {error}",
        ) from error


def _read_cuda_interface(function: str, name: str, array: Any, stream: int) -> _Description:
    interface = array.__cuda_array_interface__
    # bfloat16 has no type string of its own: it comes as two raw bytes or as uint16.
    typestr = "u2" if interface["typestr"][1:] == "V2" else interface["typestr"]
    dtype = numpy_dtype(np.dtype(typestr))
    if dtype is None or interface.get("mask") is not None:
        raise invalid(
            function, name, "an unmasked array of a type that the library knows", str(interface["typestr"])
        )
    pointer, read_only = interface["data"]
    device = device_of(function, name, array)
    producer = interface.get("stream")
    if producer is not None:
        _cuda.order(device[1], int(producer), stream)
    itemsize = np.dtype(typestr).itemsize
    shape = tuple(int(size) for size in interface["shape"])
    in_bytes = interface.get("strides")
    if in_bytes is None:
        strides = _compact(shape)
    elif any(stride % itemsize for stride in in_bytes):
        raise invalid(function, name, "strides of whole elements", f"{in_bytes} bytes")
    else:
        strides = tuple(stride // itemsize for stride in in_bytes)
    return _Description(int(pointer or 0), shape, strides, dtype, device, bool(read_only), array)


def _compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _as_bytes(function: str, name: str, found: _Description) -> _Description:
    if found.dtype.name in BYTE_LIKE:
        found.dtype = UINT8
    elif found.dtype.name == "float4_e2m1fn":  # counted in elements: two of them are a byte
        *outer, inner = found.shape or (0,)
        *outer_strides, inner_stride = found.strides or (1,)
        if inner % 2 or inner_stride != 1 or any(stride % 2 for stride in outer_strides):
            raise invalid(
                function, name, "whole bytes of FP4 pairs", f"shape {found.shape}, strides {found.strides}"
            )
        found.shape = (*outer, inner // 2)
        found.strides = (*(stride // 2 for stride in outer_strides), 1)
        found.dtype = UINT8
    return found


def _view(function: str, name: str, found: _Description) -> View:
    ndim = len(found.shape)
    if ndim > _MAX_NDIM:
        raise invalid(function, name, f"at most {_MAX_NDIM} dimensions", str(ndim))
    # The stride of a dimension of one element says nothing, nor does any of no elements: producers fill them
    # as they like.
    empty = 0 in found.shape
    strides = _compact(found.shape)
    if found.strides != strides:
        strides = tuple(
            step if empty or size == 1 else stride
            for size, stride, step in zip(found.shape, found.strides, strides, strict=True)
        )
    if ndim and strides[-1] != 1:  # also keeps all-zero strides, which mean compact, out of the struct
        raise invalid(
            function, name, "a contiguous inner dimension", f"shape {found.shape}, strides {strides}"
        )
    tensor = _abi.Tensor()
    tensor.data = None if empty else found.pointer
    tensor.ndim = ndim
    tensor.device_type, tensor.device_id = found.device
    tensor.dtype_code, tensor.dtype_bits, tensor.dtype_lanes = found.dtype[1:4]
    tensor.shape[:ndim] = found.shape
    tensor.strides[:ndim] = strides
    tensor.owner = found.owner
    return View(tensor, found.dtype, found.shape, found.device, found.read_only)


def pointer(found: View | None) -> Any:
    """For a struct member or an argument of type nvte_ep_tensor_t*."""
    return None if found is None else found.pointer
