# SPDX-License-Identifier: Apache-2.0
"""Groups of device memory that look like groups of host memory, so that one body of a test serves both.

A mirrored group takes and fills host arrays of any framework. For each call it copies the arrays into device
memory, makes the real call on a stream of its own, waits, and copies back what the library may have written.
Nothing else changes: the calls are those of the Python layer, with other addresses in the tensors.

Waiting never blocks the process: ranks that are threads of it must go on. Device memory comes from windows
that are kept for ever, because giving memory back waits for all work of a GPU, that of other ranks included.
Around every array lie bytes that nobody may write, and inputs must come back as they went.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from nvte_ep import Array, Communicator, Group, Handle, Operand, Status, _abi, _cuda
from nvte_ep._call import Call
from nvte_ep._dlpack import View
from nvte_ep._dtypes import CPU, CUDA_TYPE, Device, device_name
from nvte_ep.group import ErrorInfo
from nvte_ep.handle import Received

_GUARD = 512  # bytes on each side of an array at least
_SENTINEL = 0xA5
_ALIGNMENT = 256  # arrays keep their addresses modulo this
_WINDOW_BYTES = 16 << 20
_POLL_SECONDS = 5e-5
_GRACE_SECONDS = 0.1
_FATAL = (Status.TIMEOUT, Status.PEER_FAILED, Status.TRANSPORT)


class Memory(Protocol):
    """The memory of a device, and a stream on it."""

    def allocate(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """The address of device memory, and as many host bytes to copy from and to. Never given back."""

    def new_stream(self) -> int: ...
    def upload(self, target: int, source: int, nbytes: int, stream: int) -> None: ...
    def download(self, target: int, source: int, nbytes: int, stream: int) -> None: ...
    def is_idle(self, stream: int) -> bool: ...


class CudaMemory:
    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._cuda = _cuda.runtime()

    def _check(self, answer: tuple[Any, ...]) -> Any:
        code, *results = answer
        assert int(code) == 0, code
        return results[0] if results else None

    def allocate(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        with _cuda.use_device(self._device_id):
            device = int(self._check(self._cuda.cudaMalloc(nbytes)))
            # Page-locked, so that copies are asynchronous.
            host = int(self._check(self._cuda.cudaHostAlloc(nbytes, self._cuda.cudaHostAllocDefault)))
        return device, np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host))

    def new_stream(self) -> int:
        with _cuda.use_device(self._device_id):
            # One that the legacy default stream does not wait for.
            return int(self._check(self._cuda.cudaStreamCreateWithFlags(self._cuda.cudaStreamNonBlocking)))

    def upload(self, target: int, source: int, nbytes: int, stream: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._check(self._cuda.cudaMemcpyAsync(target, source, nbytes, kind, stream))

    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._check(self._cuda.cudaMemcpyAsync(target, source, nbytes, kind, stream))

    def is_idle(self, stream: int) -> bool:
        (code,) = self._cuda.cudaStreamQuery(stream)
        if code == self._cuda.cudaError_t.cudaErrorNotReady:
            return False
        assert int(code) == 0, f"the stream failed: {code}"
        return True


class HostMemory:
    """Host memory in the place of a device's: shows the mirror itself where there is no GPU."""

    def __init__(self) -> None:
        self._kept: list[NDArray[np.uint8]] = []

    def allocate(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
        self._kept.append(raw)
        return raw.ctypes.data + -raw.ctypes.data % _ALIGNMENT, np.empty(nbytes, np.uint8)

    def new_stream(self) -> int:
        return 0

    def upload(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def is_idle(self, stream: int) -> bool:
        return True


class Window:
    """A stretch of device memory with its twin on the host, and a stream."""

    _lock = threading.Lock()
    _memories: dict[Device, Memory] = {}  # noqa: RUF012 - of the process
    _free: dict[Device, list[Window]] = collections.defaultdict(list)  # noqa: RUF012

    def __init__(self, device: Device) -> None:
        with self._lock:
            if device not in self._memories:
                cuda = device[0] == CUDA_TYPE
                self._memories[device] = CudaMemory(device[1]) if cuda else HostMemory()
        self.device = device
        self.memory = self._memories[device]
        self.stream = self.memory.new_stream()
        self._grow(_WINDOW_BYTES)

    def _grow(self, nbytes: int) -> None:
        self.address, self.bytes = self.memory.allocate(nbytes)

    @classmethod
    def take(cls, device: Device) -> Window:
        with cls._lock:
            free = cls._free[device]
            if free:
                return free.pop()
        return cls(device)

    def give_back(self) -> None:
        """Nothing may be in flight on the stream."""
        with self._lock:
            self._free[self.device].append(self)

    def prepare(self, nbytes: int) -> None:
        if nbytes > len(self.bytes):
            self._grow(2 * nbytes)

    def upload(self, nbytes: int) -> None:
        self.memory.upload(self.address, self.bytes.ctypes.data, nbytes, self.stream)

    def download(self, nbytes: int) -> None:
        self.memory.download(self.bytes.ctypes.data, self.address, nbytes, self.stream)


def wait_for(
    window: Window, group: Group, timeout_ns: int, look: Callable[[], object] = lambda: None
) -> None:
    """Until the window's stream has done all. A peer that does not come is told within twice the time-out;
    `look` is called meanwhile, and may raise."""
    end = time.monotonic() + 2e-9 * timeout_ns + 1
    while not window.memory.is_idle(window.stream):
        if time.monotonic() > end:
            raise AssertionError(f"the device is busy after twice the time-out: {Group.poll_error(group)}")
        look()
        time.sleep(_POLL_SECONDS)


# ---- one call ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Span:
    """An array of a call: its host memory and its place in the window."""

    name: str
    host: NDArray[np.uint8]
    begin: int
    is_output: bool
    place: Callable[[int], None]  # tells whoever points there the device address


def _bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _span_bytes(tensor: _abi.Tensor) -> int:
    """From the first byte of an array to its last, gaps between rows included."""
    last = sum((tensor.shape[i] - 1) * tensor.strides[i] for i in range(tensor.ndim))
    return (last + 1) * tensor.dtype_bits // 8


class MirroredCall(Call):
    """Arrays are read and written as in any call of host memory, but the tensors point to the device."""

    def __init__(self, group: MirroredGroup, function: str, arrays: dict[str, Any], stream: Any) -> None:
        super().__init__(function, arrays, stream, CPU)
        self._group = group
        self._spans: list[_Span] = []
        self._symmetric: list[Symmetric] = []
        self._end = 0

    def read(self, name: str, array: Any, **options: Any) -> View | None:
        found = super().read(name, array, **options)
        return None if found is None else self._mirror(name, found, False)

    def write(self, name: str, array: Any, **options: Any) -> View | None:
        found = super().write(name, array, **options)
        return None if found is None else self._mirror(name, found, True)

    def receive_operand(self, arguments: _abi.DispatchArgs, operand: Operand) -> None:
        """An operand of the same shape on the device; it is bound once its buffer has a place."""
        twin = _abi.Operand()
        arguments.operand = ctypes.pointer(twin)
        symmetric = self._group.symmetric_at(operand.bytes.pointer)

        def place(address: int) -> None:
            device = self._group.real_device
            memory = Array.borrow(address, operand.layout.total_bytes, device, self._group)
            bound = Operand(
                operand.format,
                operand.hidden,
                operand.capacity,
                operand.num_experts,
                alignment=operand.alignment,
                columnwise=operand.columnwise,
                scale_layout=operand.scale_layout,
                buffer=memory,
            )
            ctypes.pointer(twin)[0] = bound.struct
            self._bound = bound  # lives as long as the call

        if symmetric is not None:
            self._symmetric.append(symmetric)
            place(symmetric.device_address(operand.bytes.pointer))
        else:
            self._add("operand", operand.bytes.pointer, operand.layout.total_bytes, True, place)

    def _mirror(self, name: str, found: View, is_output: bool) -> View:
        if found.device[0] == CUDA_TYPE:
            return found
        tensor = _abi.Tensor.from_buffer_copy(found.tensor)
        tensor.device_type, tensor.device_id = self._group.real_device
        symmetric = self._group.symmetric_at(tensor.data)
        if symmetric is not None:
            self._symmetric.append(symmetric)
            tensor.data = symmetric.device_address(tensor.data)
        elif tensor.data:
            self._add(
                name,
                tensor.data,
                _span_bytes(tensor),
                is_output,
                lambda address: setattr(tensor, "data", address),
            )
        return dataclasses.replace(found, tensor=tensor)

    def _add(
        self, name: str, address: int, nbytes: int, is_output: bool, place: Callable[[int], None]
    ) -> None:
        begin = self._end + _GUARD
        begin += (address - begin) % _ALIGNMENT
        self._spans.append(_Span(name, _bytes_at(address, nbytes), begin, is_output, place))
        self._end = begin + nbytes

    def run(self, *arguments: Any, check: Callable[[], None] | None = None) -> None:
        window, size = self._group.window, self._end + _GUARD
        window.prepare(size)
        window.bytes[:size] = _SENTINEL
        for span in self._spans:
            window.bytes[span.begin : span.begin + len(span.host)] = span.host
            span.place(window.address + span.begin)
        sent = window.bytes[:size].copy()
        window.upload(size)
        for memory in self._symmetric:
            memory.upload(window)
        self.stream = window.stream
        try:
            super().run(*arguments, check=check)
        finally:  # a call that was refused has written nothing either
            self._group.wait()
            window.download(size)
            for memory in self._symmetric:
                memory.download(window)
            self._group.wait()
            self._take(sent, window.bytes[:size])
        self._group.check_alive()

    def _take(self, sent: NDArray[np.uint8], got: NDArray[np.uint8]) -> None:
        """Outputs to the caller's arrays. Everything else must have stayed as it was sent."""
        end = 0
        for span in self._spans:
            begin, after = span.begin, span.begin + len(span.host)
            if span.is_output:
                span.host[:] = got[begin:after]
                sent[begin:after] = got[begin:after]
            end = after
        if not np.array_equal(sent, got):
            wrong = int(np.flatnonzero(sent != got)[0])
            near = min(self._spans, key=lambda span: abs(span.begin - wrong))
            raise AssertionError(
                f"{self.function}: {int((sent != got).sum())} bytes that are no output were written, "
                f"the first at byte {wrong - near.begin} of {near.name}, which has {len(near.host)}"
            )
        assert end == self._end


# ---- handles and groups ------------------------------------------------------------------------------------


class MirroredHandle(Handle):
    group: MirroredGroup

    def _new_call(self, function: str, arrays: dict[str, Any], stream: Any) -> Call:
        return MirroredCall(self.group, function, arrays, stream)

    def _receive(self, call: Call, arguments: _abi.DispatchArgs, *options: Any) -> Received:
        received = super()._receive(call, arguments, *options)
        if received.operand is not None:
            assert isinstance(call, MirroredCall)
            call.receive_operand(arguments, received.operand)
        return received


@dataclasses.dataclass
class Symmetric:
    """Memory of mem_alloc: a host array that stands for it."""

    real: Array
    twin: Array

    def device_address(self, host: int) -> int:
        return self.real.pointer + host - self.twin.pointer

    def upload(self, window: Window) -> None:
        window.memory.upload(self.real.pointer, self.twin.pointer, self.twin.nbytes, window.stream)

    def download(self, window: Window) -> None:
        window.memory.download(self.twin.pointer, self.real.pointer, self.twin.nbytes, window.stream)


class MirroredGroup(Group):
    """A group of `device` whose arrays are the host's. Calls return when the device has done them, and raise
    what ended the group meanwhile; findings wait for poll_error as ever."""

    def __init__(
        self,
        comm: Communicator,
        *,
        device: Device,
        timeout_ns: int,
        sum_format: Callable[[str], str],
        **config: Any,
    ) -> None:
        self.real_device = device
        self._sum_format = sum_format
        self.window = Window.take(device)
        self._found: collections.deque[ErrorInfo] = collections.deque()
        self._symmetric: list[Symmetric] = []
        self._timeout_ns = timeout_ns
        try:
            super().__init__(comm, device=device_name(device), timeout_ns=timeout_ns, **config)
        except BaseException:
            self.window.give_back()
            raise
        self.device = CPU

    def handle(self, **settings: Any) -> Handle:
        for direction in ("combine", "dispatch_backward"):
            if direction in settings:
                settings[direction] = self._sum_format(settings[direction])
        return MirroredHandle(self, **settings)

    def wait(self) -> None:
        wait_for(self.window, self, self._timeout_ns, self._end_of_waiting)

    def _end_of_waiting(self) -> None:
        """A group that failed may leave a device busy for ever, after a moment for it to end."""
        error = self._look()
        if error is not None:
            time.sleep(_GRACE_SECONDS)
            if not self.window.memory.is_idle(self.window.stream):
                raise error.exception()

    def _look(self) -> ErrorInfo | None:
        """What ended the group; findings are kept for poll_error."""
        while (error := super().poll_error()) is not None:
            if error.status in _FATAL:
                return error
            self._found.append(error)
        return None

    def check_alive(self) -> None:
        error = self._look()
        if error is not None:
            raise error.exception()

    def poll_error(self) -> ErrorInfo | None:
        return self._look() or (self._found.popleft() if self._found else None)

    def mem_alloc(self, nbytes: int) -> Array:
        real = super().mem_alloc(nbytes)
        twin = Array.empty((nbytes,))
        self._symmetric.append(Symmetric(real, twin))
        return twin

    def mem_free(self, memory: Array) -> None:
        symmetric = self.symmetric_at(memory.pointer)
        super().mem_free(memory if symmetric is None else symmetric.real)
        if symmetric is not None:
            self._symmetric.remove(symmetric)

    def symmetric_at(self, address: int | None) -> Symmetric | None:
        """Whose host array the address lies in."""
        for memory in self._symmetric:
            begin = memory.twin.pointer
            if address is not None and begin <= address < begin + memory.twin.nbytes:
                return memory
        return None

    def close(self) -> None:
        was_open = self._state.pointer is not None
        super().close()
        if was_open and self.window.memory.is_idle(self.window.stream):
            self.window.give_back()
