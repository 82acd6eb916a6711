# SPDX-License-Identifier: Apache-2.0
"""Which CUDA stream a call goes on. A stream is its handle as an integer; 0 is the legacy default stream."""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Iterable
from typing import Any

from nvte_ep import _torch_tensor
from nvte_ep._dtypes import CUDA_TYPE, Device
from nvte_ep.errors import invalid

NO_STREAM = -1  # DLPack's word for: no ordering wanted

_CAPSULE = b"dlpack_exchange_api"
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
# Runs Python code of its framework and reports failure as a Python exception: called with the GIL held.
_CurrentWorkStream = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class _ExchangeApi(ctypes.Structure):
    """DLPackExchangeAPI of DLPack 1.2 and later, as far as it is used here."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("managed_tensor_allocator", ctypes.c_void_p),
        ("managed_tensor_from_py_object_no_sync", ctypes.c_void_p),
        ("managed_tensor_to_py_object_no_sync", ctypes.c_void_p),
        ("dltensor_from_py_object_no_sync", ctypes.c_void_p),
        ("current_work_stream", ctypes.c_void_p),
    ]


def exchange_api_stream(array_type: type, device: Device) -> int | None:
    """The current stream as the array's type tells it through DLPack's C exchange API; None: it does not."""
    capsule = getattr(array_type, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    api = _ExchangeApi.from_address(_get_pointer(capsule, _CAPSULE))
    if api.major != 1 or not api.current_work_stream:
        return None
    stream = ctypes.c_void_p()
    if _CurrentWorkStream(api.current_work_stream)(device[0], device[1], ctypes.byref(stream)) != 0:
        return None
    return stream.value or 0


def _framework_stream(framework: str, device_id: int) -> int | None:
    """The framework's current stream; None where it is not imported or has no such thing (JAX)."""
    module = sys.modules.get(framework)
    if module is None:
        return None
    try:
        if framework == "torch":
            in_use = module.cuda.is_initialized()
            return int(module.cuda.current_stream(device_id).cuda_stream) if in_use else None
        if framework == "cupy":
            return int(module.cuda.get_current_stream(device_id).ptr)
    except (AttributeError, RuntimeError, AssertionError):  # half imported, or built without CUDA
        return None
    return None


def current(device: Device, arrays: Iterable[Any]) -> int:
    """The current stream of the framework that the arrays come from, else of one that is imported, else 0."""
    if device[0] != CUDA_TYPE:
        return 0
    owners = [type(array) for array in arrays if array is not None]
    if owners and _torch_tensor.is_plain(owners[0]):  # the same answer as below, sooner
        stream = _torch_tensor.raw_stream(device[1])
        if stream is not None:
            return stream
    for owner in owners:
        stream = exchange_api_stream(owner, device)
        if stream is not None:
            return stream
    for framework in [owner.__module__.partition(".")[0] for owner in owners] + ["torch", "cupy"]:
        stream = _framework_stream(framework, device[1])
        if stream is not None:
            return stream
    return 0


def handle(function: str, stream: Any) -> int:
    """The handle of an integer, an object with __cuda_stream__, or a framework's stream object."""
    if type(stream) is int:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        try:
            _, number = pair
            return int(number)
        except (TypeError, ValueError):
            raise invalid(
                function, "stream", "__cuda_stream__ to give (version, handle)", repr(pair)
            ) from None
    for attribute in ("cuda_stream", "ptr"):  # torch.cuda.Stream, cupy.cuda.Stream
        value = getattr(stream, attribute, None)
        if value is not None:
            return int(value)
    try:
        return operator.index(stream)
    except TypeError:
        pass
    try:
        return int(stream)  # cuda.bindings' CUstream and cudaStream_t
    except (TypeError, ValueError):
        raise invalid(
            function, "stream", "an integer or an object with __cuda_stream__", type(stream).__name__
        ) from None


def for_dlpack(stream: int) -> int:
    """The number that the DLPack protocol has for a stream: 0 is ambiguous there, the legacy default stream
    is 1."""
    return stream or 1
