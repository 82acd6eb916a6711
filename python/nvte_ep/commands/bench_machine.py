"""Where a benchmark runs: memory, timing and copies on a CUDA device, or on the host.

Times on a device are those of calls inside a CUDA graph, between two events: what the device spends, launch
gaps of a stream that is never empty included, and nothing of the interpreter. Times on the host are wall
clock.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvte_ep import _cuda
from nvte_ep._dtypes import CPU, CUDA_TYPE, Device
from nvte_ep.array import Array
from nvte_ep.commands import _probe
from nvte_ep.errors import Status, UnsupportedError
from nvte_ep.library import build_info

POISON = 0xA5  # what outputs hold before the calls: a byte that nobody wrote does not look like a result
COLD_SWEEPS = 2  # buffers that rotate are this many times the last-level cache

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call, one sample a repeat."""

    samples: tuple[float, ...]
    calls: int  # that each sample is the mean of
    call_microseconds: float | None  # until a call returned, where it returns before its work is done

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.percentile(self.samples, [25, 75])
        return float(low), float(high)

    @property
    def spread(self) -> float:
        """The distance of the quartiles over the median."""
        low, high = self.quartiles
        return (high - low) / self.median


class Machine(abc.ABC):
    """Memory and time of one device."""

    kind: str
    device: Device
    stream: int | None  # of every call
    cache_bytes: int  # of the last level
    max_sets: int  # of buffers that rotate

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """What it is, for the report."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Memory that can still be had."""

    @abc.abstractmethod
    def write(self, array: Array, data: NDArray[np.uint8]) -> None:
        """Bytes of the host into the array, repeated until it is full."""

    @abc.abstractmethod
    def poison(self, array: Array) -> None:
        """Overwrites every byte."""

    @abc.abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """The plain copy of this place, enqueued like a call."""

    @abc.abstractmethod
    def time(self, calls: Sequence[Call], repeats: int) -> Timing:
        """All calls in turn, each at least once, over and over. What they write is there afterwards."""

    def filled(self, shape: tuple[int, ...], dtype: str, data: NDArray[Any]) -> Array:
        array = Array.empty(shape, dtype, self.device)
        self.write(array, np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        return array

    def poisoned(self, shape: tuple[int, ...], dtype: str) -> Array:
        array = Array.empty(shape, dtype, self.device)
        self.poison(array)
        return array

    def read(self, array: Array) -> NDArray[np.uint8]:
        """The bytes of a dense array, on the host; only between timings."""
        return array.view("uint8").numpy().reshape(-1)

    def sets(self, nbytes: int, held: int) -> int:
        """Sets of buffers that rotate so that none of a call's `nbytes` comes from the cache, as far as
        max_sets and the memory, of which a set holds `held` bytes, allow."""
        wanted = max(math.ceil(COLD_SWEEPS * self.cache_bytes / max(nbytes, 1)), 2)
        fitting = self.free_bytes() * 3 // 5 // max(held, 1)
        return max(min(wanted, self.max_sets, fitting), 1)

    def is_cold(self, nbytes: int, sets: int) -> bool:
        return sets * nbytes >= COLD_SWEEPS * self.cache_bytes


class HostMachine(Machine):
    """Host memory and the host backend, on all its threads."""

    kind = "cpu"
    device = CPU
    stream = None
    max_sets = 8
    MIN_SECONDS = 0.2
    MAX_SAMPLES = 200

    def __init__(self) -> None:
        self.cache_bytes = _host_cache_bytes()

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": _cpu_name(),
            "threads": os.cpu_count() or 1,
            "cache_bytes": self.cache_bytes,
        }

    def free_bytes(self) -> int:
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return 1 << 32

    def _bytes(self, array: Array) -> NDArray[np.uint8]:
        return array.view("uint8").numpy().reshape(-1)

    def write(self, array: Array, data: NDArray[np.uint8]) -> None:
        target = self._bytes(array)
        for start in range(0, target.size, max(data.size, 1)):
            piece = target[start : start + data.size]
            piece[:] = data[: piece.size]

    def poison(self, array: Array) -> None:
        self._bytes(array).fill(POISON)

    def copy(self, target: Array, source: Array) -> None:
        np.copyto(self._bytes(target), self._bytes(source))

    def time(self, calls: Sequence[Call], repeats: int) -> Timing:
        for call in calls:
            call()
        samples: list[float] = []
        started = time.perf_counter()
        least = max(repeats, len(calls))
        while len(samples) < least or (
            time.perf_counter() - started < self.MIN_SECONDS and len(samples) < self.MAX_SAMPLES
        ):
            call = calls[len(samples) % len(calls)]
            before = time.perf_counter()
            call()
            samples.append((time.perf_counter() - before) * 1e6)
        return Timing(tuple(samples), 1, None)


class CudaMachine(Machine):
    """A CUDA device, through cuda.bindings."""

    kind = "cuda"
    max_sets = 512
    MIN_MICROSECONDS = 1000.0  # of a replay: far above what starting a graph takes
    MAX_CALLS = 4096  # of a graph
    WARM_REPLAYS = 3
    HOST_TIMED_CALLS = 64  # fewer than a stream takes in before it blocks

    def __init__(self, index: int = 0) -> None:
        self.device = (CUDA_TYPE, index)
        self.cudart = _cuda.runtime()
        self.cache_bytes = self._attribute("cudaDevAttrL2CacheSize")
        self.multiprocessors = self._attribute("cudaDevAttrMultiProcessorCount")
        # One that does not wait for the legacy default stream: nothing else may get between two calls.
        self._stream = self._do("cudaStreamCreateWithFlags", self.cudart.cudaStreamNonBlocking)
        self.stream = int(self._stream)

    def _do(self, name: str, *arguments: Any) -> Any:
        with _cuda.use_device(self.device[1]):
            return _cuda._check(name, getattr(self.cudart, name)(*arguments))

    def use(self) -> None:
        """Makes it the current device of this thread, for libraries that work on that."""
        _cuda._check("cudaSetDevice", self.cudart.cudaSetDevice(self.device[1]))

    def _attribute(self, name: str) -> int:
        return int(
            self._do("cudaDeviceGetAttribute", getattr(self.cudart.cudaDeviceAttr, name), self.device[1])
        )

    def describe(self) -> dict[str, Any]:
        driver = _probe.probe_driver()
        device = driver["devices"][self.device[1]]
        runtime = int(self._do("cudaRuntimeGetVersion"))
        return {
            "kind": self.kind,
            "name": device["name"],
            "compute_capability": device["compute_capability"],
            "multiprocessors": self.multiprocessors,
            "memory_bytes": device["memory_bytes"],
            "cache_bytes": self.cache_bytes,
            "driver": _driver_release(),
            "driver_cuda_version": driver.get("cuda_version"),
            "bindings_cuda_version": f"{runtime // 1000}.{runtime % 1000 // 10}",
        }

    def free_bytes(self) -> int:
        with _cuda.use_device(self.device[1]):
            code, free, _ = self.cudart.cudaMemGetInfo()
        _cuda._check("cudaMemGetInfo", (code,))
        return int(free)

    def _copy(self, target: int, source: int, nbytes: int, kind: str) -> None:
        direction = getattr(self.cudart.cudaMemcpyKind, kind)
        self._do("cudaMemcpyAsync", target, source, nbytes, direction, self.stream)

    def write(self, array: Array, data: NDArray[np.uint8]) -> None:
        done = min(data.size, array.nbytes)
        self._copy(array.pointer, data.ctypes.data, done, "cudaMemcpyHostToDevice")
        while 0 < done < array.nbytes:  # the first half into the second, whole repetitions at a time
            piece = min(done, array.nbytes - done)
            self._copy(array.pointer + done, array.pointer, piece, "cudaMemcpyDeviceToDevice")
            done += piece
        self.synchronize()  # the host's bytes may go now
        array.written_on(self.stream or 0)

    def poison(self, array: Array) -> None:
        self._do("cudaMemsetAsync", array.pointer, POISON, array.nbytes, self.stream)
        array.written_on(self.stream or 0)

    def copy(self, target: Array, source: Array) -> None:
        self._copy(target.pointer, source.pointer, source.nbytes, "cudaMemcpyDeviceToDevice")

    def synchronize(self) -> None:
        self._do("cudaStreamSynchronize", self.stream)

    def read(self, array: Array) -> NDArray[np.uint8]:
        self.synchronize()
        return super().read(array)

    def time(self, calls: Sequence[Call], repeats: int) -> Timing:
        for call in calls:  # loads and compiles what is loaded and compiled on first use
            call()
        self.synchronize()
        some = calls[: self.HOST_TIMED_CALLS]
        started = time.perf_counter()
        for call in some:
            call()
        call_microseconds = (time.perf_counter() - started) / len(some) * 1e6
        self.synchronize()
        rounds = 1
        with self.graph(calls) as graph:
            once = self.replays(graph, 2)[-1]
        rounds = min(math.ceil(self.MIN_MICROSECONDS / once), self.MAX_CALLS // len(calls))
        rounds = max(rounds, 1)
        with self.graph(list(calls) * rounds) as graph:
            self.replays(graph, self.WARM_REPLAYS)
            samples = self.replays(graph, repeats)
        number = len(calls) * rounds
        return Timing(tuple(sample / number for sample in samples), number, call_microseconds)

    def nodes(self, call: Call) -> int:
        """What one call puts on the device: kernels, copies and fills."""
        with self._capture([call]) as graph:
            code, _, number = self.cudart.cudaGraphGetNodes(graph)
        _cuda._check("cudaGraphGetNodes", (code,))
        return int(number)

    @contextlib.contextmanager
    def graph(self, calls: Sequence[Call]) -> Iterator[Any]:
        """The calls as a CUDA graph, ready to be launched."""
        with self._capture(calls) as graph:
            executable = self._do("cudaGraphInstantiate", graph, 0)
            try:
                yield executable
            finally:
                self.synchronize()
                self._do("cudaGraphExecDestroy", executable)

    @contextlib.contextmanager
    def _capture(self, calls: Sequence[Call]) -> Iterator[Any]:
        mode = self.cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._do("cudaStreamBeginCapture", self.stream, mode)
        try:
            for call in calls:
                call()
        except BaseException:
            self.cudart.cudaStreamEndCapture(self.stream)  # broken already; its status says nothing new
            raise
        graph = self._do("cudaStreamEndCapture", self.stream)
        try:
            yield graph
        finally:
            self._do("cudaGraphDestroy", graph)

    def replays(self, graph: Any, repeats: int) -> list[float]:
        """Microseconds of each of some launches."""
        cudart, stream = self.cudart, self.stream
        events = [(self._do("cudaEventCreate"), self._do("cudaEventCreate")) for _ in range(repeats)]
        answers = []
        try:
            with _cuda.use_device(self.device[1]):  # once: the device must not wait for the host between them
                for before, after in events:
                    answers.append(cudart.cudaEventRecord(before, stream))
                    answers.append(cudart.cudaGraphLaunch(graph, stream))
                    answers.append(cudart.cudaEventRecord(after, stream))
            for answer in answers:
                _cuda._check("cudaGraphLaunch", answer)
            self.synchronize()
            return [float(self._do("cudaEventElapsedTime", before, after)) * 1e3 for before, after in events]
        finally:
            for event in (event for pair in events for event in pair):
                self.cudart.cudaEventDestroy(event)


def cuda_reason() -> str | None:
    """Why there is no benchmark on a CUDA device here; None: there can be one."""
    backends = {entry["name"]: entry for entry in build_info()["backends"]}
    cuda = backends.get("cuda", {"available": False, "reason": "this build has no CUDA backend"})
    if not cuda["available"]:
        return str(cuda["reason"])
    try:
        _cuda.runtime()
    except UnsupportedError as error:
        return str(error)
    return None


def open_machine(device: Device | None) -> Machine:
    """The machine of a device; None: a CUDA device where there is one."""
    if device == CPU:
        return HostMachine()
    reason = cuda_reason()
    if reason is None:
        return CudaMachine(device[1] if device else 0)
    if device is None:
        return HostMachine()
    raise UnsupportedError(Status.UNSUPPORTED, f"no benchmark on a CUDA device: {reason}")


def _driver_release() -> str | None:
    """Of the NVIDIA driver, as nvidia-smi prints it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        return text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0 else None
    finally:
        nvml.nvmlShutdown()


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _host_cache_bytes() -> int:
    """The largest cache that the first core has a share of."""
    sizes = [1 << 25]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = file.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0))
    return max(sizes)
