# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a CUDA device over host memory, for the code that drives one: cuda.bindings.runtime as far
as the package uses it, and a library that takes device arrays for host arrays.

It computes where a device would enqueue, so it says nothing about streams; it counts what was allocated,
captured and launched.
"""

from __future__ import annotations

import ctypes
import enum
import time
from typing import Any

import numpy as np
import pytest
from nvte_ep import _abi, _cuda, _device_pool, _lib

LAUNCH_SECONDS = 1e-5


class _Kind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class _Mode(enum.IntEnum):
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


class _Attribute(enum.IntEnum):
    cudaDevAttrMultiProcessorCount = 16
    cudaDevAttrL2CacheSize = 38


class FakeRuntime:
    """cuda.bindings.runtime. Every function returns a tuple that begins with a status."""

    cudaMemcpyKind = _Kind
    cudaStreamCaptureMode = _Mode
    cudaDeviceAttr = _Attribute
    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2

    def __init__(self, cache_bytes: int = 1 << 14, memory_bytes: int = 1 << 30) -> None:
        self.cache_bytes, self.memory_bytes = cache_bytes, memory_bytes
        self.allocations: dict[int, Any] = {}
        self.capturing = False
        self.captured_calls = 0  # of the library, in all captures
        self.captured_copies = 0
        self.launches = 0
        self.live: set[object] = set()  # graphs and events that nobody destroyed yet

    def cudaMalloc(self, nbytes: int) -> tuple[int, int]:
        raw = np.empty(nbytes + 255, np.uint8)
        pointer = raw.ctypes.data + -raw.ctypes.data % 256
        self.allocations[pointer] = raw
        return 0, pointer

    def cudaFree(self, pointer: int) -> tuple[int]:
        del self.allocations[pointer]
        return (0,)

    def cudaMemGetInfo(self) -> tuple[int, int, int]:
        used = sum(raw.nbytes for raw in self.allocations.values())
        return 0, self.memory_bytes - used, self.memory_bytes

    def cudaMemcpyAsync(
        self, target: int, source: int, nbytes: int, kind: int, stream: int | None
    ) -> tuple[int]:
        self.captured_copies += self.capturing
        ctypes.memmove(target, source, nbytes)
        return (0,)

    def cudaMemsetAsync(self, target: int, value: int, nbytes: int, stream: int | None) -> tuple[int]:
        ctypes.memset(target, value, nbytes)
        return (0,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        self.capturing = True
        return (0,)

    def cudaStreamIsCapturing(self, stream: int) -> tuple[int, int]:
        assert stream not in (0, 1), "CUDA refuses the question about the default stream"
        return 0, int(self.capturing)

    def _new(self) -> tuple[int, object]:
        made = [0.0]
        handle = _Handle(made)
        self.live.add(handle)
        return 0, handle

    def _destroy(self, handle: object) -> tuple[int]:
        self.live.remove(handle)
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, object]:
        self.capturing = False
        return self._new()

    def cudaGraphGetNodes(self, graph: object) -> tuple[int, None, int]:
        return 0, None, 1

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return 0, 1

    def cudaSetDevice(self, device: int) -> tuple[int]:
        return (0,)

    def cudaGraphInstantiate(self, graph: object, flags: int) -> tuple[int, object]:
        return self._new()

    def cudaGraphLaunch(self, graph: object, stream: int) -> tuple[int]:
        self.launches += 1
        time.sleep(LAUNCH_SECONDS)
        return (0,)

    def cudaEventCreate(self) -> tuple[int, object]:
        return self._new()

    cudaGraphDestroy = cudaGraphExecDestroy = cudaEventDestroy = _destroy

    def cudaEventRecord(self, event: Any, stream: int) -> tuple[int]:
        event.time[0] = time.perf_counter()
        return (0,)

    def cudaEventElapsedTime(self, first: Any, then: Any) -> tuple[int, float]:
        return 0, (then.time[0] - first.time[0]) * 1e3

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        return 0, 0x51

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        return 0, self.cache_bytes if attribute == _Attribute.cudaDevAttrL2CacheSize else 2

    def cudaRuntimeGetVersion(self) -> tuple[int, int]:
        return 0, 13000

    def cudaGetDevice(self) -> tuple[int, int]:
        return 0, 0

    def cudaThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:
        return 0, mode

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        return (0,)


class _Handle:
    def __init__(self, made: list[float]) -> None:
        self.time = made


def install(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    """From here on device arrays are made by the runtime, and the library works on them as on host arrays."""
    real_call = _lib.call

    def call(name: str, *arguments: Any) -> None:
        cuda = _abi.CONSTANTS["NVTE_EP_DEVICE_CUDA"]
        structs = [struct for argument in arguments for struct in _structs(argument)]
        on_device = [struct for struct in structs if struct.device_type == cuda]
        for struct in on_device:
            struct.device_type = _abi.CONSTANTS["NVTE_EP_DEVICE_CPU"]
        if on_device and not name.startswith(("nvte_ep_operand", "nvte_ep_group")):
            assert arguments[-1], f"{name} on the legacy default stream"
            runtime.captured_calls += runtime.capturing
            arguments = (*arguments[:-1], None)
        try:
            real_call(name, *arguments)
        finally:
            for struct in on_device:
                struct.device_type = cuda

    monkeypatch.setattr(_lib, "call", call)
    monkeypatch.setattr(_cuda, "runtime", lambda: runtime)
    monkeypatch.setattr(_device_pool, "_pools", {})


def _structs(argument: Any) -> list[Any]:
    """Every struct of an argument that says where memory lies."""
    if isinstance(argument, _abi.SizedStruct):
        members = [getattr(argument, name) for name, *_ in argument._fields_]
        found = [inner for member in members for inner in _structs(member)]
        return [argument, *found] if hasattr(argument, "device_type") else found
    try:
        contents = getattr(argument, "contents", None) if argument else None
    except (TypeError, ValueError):  # a null pointer, a function
        contents = None
    if contents is None:
        contents = getattr(argument, "_obj", None)  # of ctypes.byref
    return _structs(contents) if contents is not None else []
