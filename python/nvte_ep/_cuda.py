# SPDX-License-Identifier: Apache-2.0
"""The little that owned device arrays need of CUDA. cuda.bindings is imported when the first of them is
made."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from nvte_ep.errors import CudaError, OutOfMemoryError, Status, UnsupportedError

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_CAPTURE_ACTIVE = 1  # cudaStreamCaptureStatusActive


def runtime() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise UnsupportedError(
            Status.UNSUPPORTED,
            f"device arrays of this package need cuda.bindings ({error}): "
            "pip install cuda-python, or pass out=",
        ) from error


def _check(name: str, answer: tuple[Any, ...]) -> Any:
    """The results of a call to cuda.bindings; a failure becomes an exception."""
    code, *results = answer
    if int(code) == _OUT_OF_MEMORY:
        raise OutOfMemoryError(Status.OUT_OF_MEMORY, f"{name}: out of device memory")
    if int(code) != 0:
        raise CudaError(Status.CUDA, f"{name}: {code!s}")
    return results[0] if results else None


def current_device() -> int:
    return int(_check("cudaGetDevice", runtime().cudaGetDevice()))


def device_count() -> int:
    return int(_check("cudaGetDeviceCount", runtime().cudaGetDeviceCount()))


@contextlib.contextmanager
def use_device(device_id: int) -> Iterator[None]:
    before = current_device()
    if before == device_id:
        yield
        return
    cudart = runtime()
    _check("cudaSetDevice", cudart.cudaSetDevice(device_id))
    try:
        yield
    finally:
        _check("cudaSetDevice", cudart.cudaSetDevice(before))


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Memory may come and go while this thread or another captures a graph: it is no part of the graph."""
    cudart = runtime()
    exchange = cudart.cudaThreadExchangeStreamCaptureMode
    relaxed = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    before = _check("cudaThreadExchangeStreamCaptureMode", exchange(relaxed))
    try:
        yield
    finally:
        exchange(before)


def total_memory(device_id: int) -> int:
    with use_device(device_id):
        code, _, total = runtime().cudaMemGetInfo()
    _check("cudaMemGetInfo", (code,))
    return int(total)


def malloc(nbytes: int, device_id: int) -> int:
    with use_device(device_id), _relaxed_capture():
        return int(_check("cudaMalloc", runtime().cudaMalloc(max(nbytes, 1))))


def free(pointer: int, device_id: int) -> bool:
    """Waits for the device, so that no stream still uses the memory; allowed while a graph is captured. Never
    raises; False where it failed."""
    with contextlib.suppress(Exception), use_device(device_id), _relaxed_capture():
        return int(runtime().cudaFree(pointer)[0]) == 0
    return False


def _is_capturing(stream: int) -> bool:
    if (stream or 1) == 1:  # the legacy default stream: never captured, and not to be asked while others are
        return False
    status = _check("cudaStreamIsCapturing", runtime().cudaStreamIsCapturing(stream))
    return int(status) == _CAPTURE_ACTIVE


def is_capturing(device_id: int, stream: int) -> bool:
    """Whether what goes on the stream becomes part of a CUDA graph."""
    if (stream or 1) == 1:
        return False
    with use_device(device_id):
        return _is_capturing(stream)


def order(device_id: int, first: int, then: int) -> None:
    """Makes the stream `then` wait for all that is on the stream `first` so far.

    Not in a capture that `first` is no part of: CUDA refuses to wait there for what no graph holds, and what
    comes before a replay is for who replays.
    """
    if (first or 1) == (then or 1):  # 0 and 1 are both the legacy default stream
        return
    cudart = runtime()
    with use_device(device_id):
        if _is_capturing(then) and not _is_capturing(first):
            return
        event = _check(
            "cudaEventCreateWithFlags", cudart.cudaEventCreateWithFlags(cudart.cudaEventDisableTiming)
        )
        try:
            _check("cudaEventRecord", cudart.cudaEventRecord(event, first))
            _check("cudaStreamWaitEvent", cudart.cudaStreamWaitEvent(then, event, 0))
        finally:
            cudart.cudaEventDestroy(event)


def copy_to_host(destination: int, source: int, nbytes: int, device_id: int, stream: int) -> None:
    """Copies after all that is on the stream; returns when the bytes are there."""
    cudart = runtime()
    kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
    with use_device(device_id):
        _check("cudaMemcpyAsync", cudart.cudaMemcpyAsync(destination, source, nbytes, kind, stream))
        _check("cudaStreamSynchronize", cudart.cudaStreamSynchronize(stream))


def pointer_device(pointer: int) -> int:
    """The device that memory lies on; the current one for a null pointer."""
    if pointer == 0:
        return current_device()
    return int(_check("cudaPointerGetAttributes", runtime().cudaPointerGetAttributes(pointer)).device)
