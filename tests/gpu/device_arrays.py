# SPDX-License-Identifier: Apache-2.0
"""Device arrays of each framework, made from host bytes and read back."""

from __future__ import annotations

import abc
import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import nvte_ep
from numpy.typing import NDArray

Delay = Callable[..., None]  # of the fixture
NewStream = Callable[[], int]

POISON = 0xA5
# How elements are held on the host: bfloat16 is uint16 there.
STORAGE_NAMES = {name: name for name in ("float32", "float16", "uint8", "uint16", "int32", "int64")}
STORAGE_NAMES["bfloat16"] = "uint16"


@dataclass(frozen=True)
class Typed:
    """A host array and the type of its elements."""

    array: NDArray[Any]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


def typed(array: Any, dtype: str | None = None) -> Typed:
    array = np.ascontiguousarray(array)
    return Typed(array, dtype or array.dtype.name)


def check(answer: tuple[Any, ...]) -> Any:
    """The result of a function of cuda.bindings."""
    code, *results = answer
    assert int(code) == 0, code
    return results[0] if results else None


def own_bytes(array: nvte_ep.Array) -> NDArray[np.uint8]:
    """The bytes of an array of the package, once they are computed."""
    return np.ascontiguousarray(array.numpy()).reshape(-1).view(np.uint8)


class Producer(abc.ABC):
    """A framework's arrays in device memory."""

    needs: str  # the fixture that gives its module
    writable = True

    def __init__(self, module: Any) -> None:
        self.module = module

    @abc.abstractmethod
    def put(self, host: Typed) -> Any:
        """A copy on the device."""

    @abc.abstractmethod
    def host(self, array: Any) -> NDArray[np.uint8]:
        """The bytes of an array, once it is computed."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array whose bytes are POISON."""
        storage = np.dtype(STORAGE_NAMES[dtype])
        poison = np.full(math.prod(shape) * storage.itemsize, POISON, np.uint8)
        return self.put(Typed(poison.view(storage).reshape(shape), dtype))

    def take(self, array: nvte_ep.Array) -> NDArray[np.uint8]:
        """The bytes of an array of the package, as this framework reads them."""
        return own_bytes(array)

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """The framework's work goes on this stream."""
        yield


class Torch(Producer):
    needs = "torch"

    def put(self, host: Typed) -> Any:
        stored = host.array.view("i2") if host.dtype == "bfloat16" else host.array
        return self.module.from_numpy(stored.copy()).to("cuda").view(getattr(self.module, host.dtype))

    def host(self, array: Any) -> NDArray[np.uint8]:
        flat = array.contiguous().reshape(-1).view(self.module.uint8)
        return np.asarray(flat.cpu().numpy())

    def take(self, array: nvte_ep.Array) -> NDArray[np.uint8]:
        return self.host(self.module.from_dlpack(array))

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        with self.module.cuda.stream(self.module.cuda.ExternalStream(stream)):
            yield


class CuPy(Producer):
    """Has bfloat16 as uint16."""

    needs = "cupy"

    def put(self, host: Typed) -> Any:
        return self.module.asarray(host.array)

    def host(self, array: Any) -> NDArray[np.uint8]:
        return (
            np.asarray(self.module.asnumpy(self.module.ascontiguousarray(array))).reshape(-1).view(np.uint8)
        )

    def take(self, array: nvte_ep.Array) -> NDArray[np.uint8]:
        named = array.view("uint16") if array.dtype == "bfloat16" else array
        return self.host(self.module.from_dlpack(named))

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        with self.module.cuda.ExternalStream(stream):
            yield


class Jax(Producer):
    needs = "jax"
    writable = False

    def put(self, host: Typed) -> Any:
        import ml_dtypes

        array = host.array.view(ml_dtypes.bfloat16) if host.dtype == "bfloat16" else host.array
        with self.module.enable_x64(True):  # else int64 becomes int32
            return self.module.device_put(array, self.module.devices("gpu")[0])

    def host(self, array: Any) -> NDArray[np.uint8]:
        return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)

    def take(self, array: nvte_ep.Array) -> NDArray[np.uint8]:
        return self.host(self.module.numpy.from_dlpack(array))


class RawMemory(Producer):
    """cudaMalloc of cuda.bindings: a pointer, in an object that says what lies there."""

    needs = "cudart"

    class Array:
        def __init__(self, pointer: int, shape: tuple[int, ...], storage: str, stream: int | None) -> None:
            self.pointer = pointer
            self.nbytes = math.prod(shape) * np.dtype(storage).itemsize
            self.__cuda_array_interface__ = {
                "data": (pointer, False),
                "shape": shape,
                "typestr": np.dtype(storage).str,
                "version": 3,
                "stream": stream,
            }

    def put(self, host: Typed, stream: int | None = None) -> Any:
        pointer = int(check(self.module.cudaMalloc(max(host.array.nbytes, 1))))
        array = self.Array(pointer, host.shape, STORAGE_NAMES[host.dtype], stream)
        weakref.finalize(array, self.module.cudaFree, pointer).atexit = False
        kind = self.module.cudaMemcpyKind.cudaMemcpyHostToDevice
        check(self.module.cudaMemcpy(pointer, host.array.ctypes.data, host.array.nbytes, kind))
        check(self.module.cudaDeviceSynchronize())
        return array

    def host(self, array: Any, stream: int | None = None) -> NDArray[np.uint8]:
        """Beside all streams but the given one, which the copy waits for."""
        copy = np.empty(array.nbytes, np.uint8)
        kind = self.module.cudaMemcpyKind.cudaMemcpyDeviceToHost
        if stream is None:
            check(self.module.cudaMemcpy(copy.ctypes.data, array.pointer, array.nbytes, kind))
        else:
            check(self.module.cudaMemcpyAsync(copy.ctypes.data, array.pointer, array.nbytes, kind, stream))
            check(self.module.cudaStreamSynchronize(stream))
        return copy

    def copy(self, target: Any, source: Any, stream: int) -> None:
        kind = self.module.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        check(self.module.cudaMemcpyAsync(target.pointer, source.pointer, source.nbytes, kind, stream))


class Own(Producer):
    """The package's own arrays."""

    needs = "cudart"

    def put(self, host: Typed) -> Any:
        array = nvte_ep.Array.empty(host.shape, host.dtype, "cuda")
        kind = self.module.cudaMemcpyKind.cudaMemcpyHostToDevice
        check(self.module.cudaMemcpy(array.pointer, host.array.ctypes.data, host.array.nbytes, kind))
        check(self.module.cudaDeviceSynchronize())
        return array

    def host(self, array: Any) -> NDArray[np.uint8]:
        return own_bytes(array)


PRODUCERS: dict[str, type[Producer]] = {
    "torch": Torch,
    "cupy": CuPy,
    "jax": Jax,
    "cuda-python": RawMemory,
    "nvte_ep": Own,
}
