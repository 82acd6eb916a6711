# SPDX-License-Identifier: Apache-2.0
"""Arrays that this package owns or carves out of a buffer; every framework reads them through DLPack.

An Array is a NumPy array of the right shape over host or device memory, plus the element type and the device.
NumPy does all geometry and the DLPack export: its capsules, destructors and deleters are C code that is right
at any time, the end of the interpreter included. For device memory the NumPy array is a description only;
nothing reads through it.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvte_ep import _cuda, _device_pool
from nvte_ep._arguments import integer
from nvte_ep._dtypes import BY_NAME, CPU, CUDA_TYPE, Device, DType, device_name, dtype_name, parse_device
from nvte_ep._streams import NO_STREAM
from nvte_ep._streams import handle as stream_handle
from nvte_ep.errors import BadStateError, OutOfMemoryError, Status, UnsupportedError, invalid

ALIGNMENT = 256  # of operand parts, the strictest that the library asks for

_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


def dlpack_tensor(capsule: Any) -> tuple[DLTensor, int, int]:
    """The tensor in an unconsumed capsule, DLPack's major version (0: before 1.0) and the flags."""
    name = _capsule_name(capsule)
    if name not in (b"dltensor", b"dltensor_versioned"):
        raise TypeError(f"expected an unconsumed DLPack capsule, got one named {name!r}")
    address = _capsule_pointer(capsule, name)
    if name == b"dltensor":
        return DLTensor.from_address(address), 0, 0
    managed = _DLManagedTensorVersioned.from_address(address)
    if managed.major > 1:  # only the deleter may be looked at
        return DLTensor(), managed.major, 0
    return managed.tensor, managed.major, managed.flags


class Memory:
    """Raw bytes, described to NumPy. `owner` keeps them alive; None: whoever made this has attached a
    finalizer.

    `gone` says why an owner that was closed all the same has taken them back: no Array reads them after that.
    """

    def __init__(self, pointer: int, nbytes: int, owner: Any = None) -> None:
        self.owner = owner
        self.gone: str | None = None
        self.__array_interface__ = {
            "data": (pointer, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _host_bytes(nbytes: int) -> NDArray[Any]:
    raw = np.empty(nbytes + ALIGNMENT - 1, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + nbytes]


def _device_bytes(nbytes: int, device_id: int) -> NDArray[Any]:
    pool = _device_pool.pool(device_id)
    pointer = pool.take(nbytes)
    memory = Memory(pointer, nbytes)
    finalizer = weakref.finalize(memory, pool.give, pointer, nbytes)
    finalizer.atexit = False  # a consumer may still use it then, and the driver takes everything back
    return np.asarray(memory)


def element_type(function: str, dtype: Any) -> DType:
    name = dtype_name(dtype)
    if name not in BY_NAME:
        raise invalid(function, "dtype", "one of " + ", ".join(BY_NAME), repr(dtype))
    return BY_NAME[name]


class LastWrite:
    """The stream of the last write to a piece of memory, for all arrays over it.

    A write waits for the one before it, so the last stands for all.
    """

    __slots__ = ("stream",)

    def __init__(self, stream: int) -> None:
        self.stream = stream


class Array:
    """A dense array in host or CUDA memory. Exports DLPack, and on the host the NumPy protocol."""

    __slots__ = ("__weakref__", "_borrowed", "_data", "_facts", "_write", "device", "element_type")

    _data: NDArray[Any]
    _borrowed: Memory | None
    _facts: tuple[Any, ...] | None
    _write: LastWrite
    device: Device
    element_type: DType

    def __init__(
        self,
        array: NDArray[Any],
        element_type: DType,
        device: Device,
        write: LastWrite | None = None,
        borrowed: Memory | None = None,
    ) -> None:
        """For this package: see empty()."""
        self._data = array
        self._borrowed = borrowed
        self._facts = None
        self.element_type = element_type
        self.device = device
        self._write = write or LastWrite(0)

    @classmethod
    def empty(cls, shape: int | tuple[int, ...], dtype: Any = "uint8", device: Any = CPU) -> Array:
        """An uninitialised array, aligned to 256 bytes."""
        kind = element_type("Array.empty", dtype)
        where = parse_device("Array.empty", device)
        parts = shape if isinstance(shape, (tuple, list)) else (shape,)
        sizes = tuple(integer("Array.empty", "shape", part) for part in parts)
        if any(size < 0 for size in sizes):
            raise invalid("Array.empty", "shape", "no negative size", str(sizes))
        storage = np.dtype(kind.storage)
        nbytes = math.prod(sizes) * storage.itemsize
        try:
            memory = _device_bytes(nbytes, where[1]) if where[0] == CUDA_TYPE else _host_bytes(nbytes)
        except (MemoryError, ValueError) as error:
            if isinstance(error, OutOfMemoryError):
                raise
            raise OutOfMemoryError(Status.OUT_OF_MEMORY, f"Array.empty: {nbytes} bytes: {error}") from error
        return cls(memory.view(storage).reshape(sizes), kind, where)

    @classmethod
    def borrow(cls, pointer: int, nbytes: int, device: Device, owner: Any, stream: int = 0) -> Array:
        """Bytes that belong to `owner`, which lives as long as any array made from them."""
        memory = Memory(pointer, nbytes, owner)
        return cls(np.asarray(memory), BY_NAME["uint8"], device, LastWrite(stream), memory)

    @property
    def _array(self) -> NDArray[Any]:
        self.check()
        return self._data

    def check(self) -> None:
        """Refuses memory that its owner has taken back."""
        if self._borrowed is not None and self._borrowed.gone is not None:
            raise BadStateError(Status.BAD_STATE, f"Array: its memory is gone: {self._borrowed.gone}")

    @property
    def dtype(self) -> str:
        return self.element_type.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements, as DLPack has them."""
        itemsize = self._array.itemsize
        return tuple(stride // itemsize for stride in self._array.strides)

    @property
    def ndim(self) -> int:
        return self._array.ndim

    @property
    def size(self) -> int:
        return self._array.size

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    @property
    def pointer(self) -> int:
        """The address of the first element."""
        return int(self._array.__array_interface__["data"][0])

    @property
    def facts(self) -> tuple[Any, ...]:
        """For this package: all that tells the memory and the form of this array from those of others."""
        if self._facts is None:
            self._facts = (self.pointer, self.shape, self.strides, self.element_type.name, self.device)
        return self._facts

    def __len__(self) -> int:
        return len(self._array)

    def __repr__(self) -> str:
        return f"Array(shape={self._data.shape}, dtype={self.dtype}, device={device_name(self.device)})"

    def _same(self, array: NDArray[Any], element_type: DType | None = None) -> Array:
        return Array(array, element_type or self.element_type, self.device, self._write, self._borrowed)

    def __getitem__(self, key: Any) -> Array:
        """Basic indexing: a view of the same memory."""
        keys = key if isinstance(key, tuple) else (key,)
        if not all(part is Ellipsis or isinstance(part, (int, np.integer, slice)) for part in keys):
            raise TypeError("an Array takes integers, slices and Ellipsis; convert it for anything else")
        # The Ellipsis makes NumPy return a view, never a scalar, which it would have to read.
        return self._same(self._array[keys if Ellipsis in keys else (*keys, Ellipsis)])

    def part(self, offset: int, nbytes: int, element_type: DType) -> Array:
        """For this package: bytes of a uint8 array of one dimension as elements of a type."""
        return self._same(self._array[offset : offset + nbytes].view(element_type.storage), element_type)

    def reshape(self, *shape: int) -> Array:
        """The same memory in another shape."""
        if not self._array.flags.c_contiguous:  # NumPy would copy
            raise ValueError(f"reshape needs a dense array, got {self.shape}, strides {self.strides}")
        return self._same(self._array.reshape(shape))

    def view(self, dtype: Any) -> Array:
        """The same memory as another element type."""
        kind = element_type("Array.view", dtype)
        return self._same(self._array.view(kind.storage), kind)

    def wait_on(self, stream: int) -> None:
        """Makes `stream` wait for what was last written here."""
        if self._borrowed is not None:
            self.check()
        written = self._write.stream
        if written != stream and self.device[0] == CUDA_TYPE and stream != NO_STREAM:
            _cuda.order(self.device[1], written, stream)

    def written_on(self, stream: int) -> None:
        self._write.stream = stream

    def numpy(self) -> NDArray[Any]:
        """As a NumPy array: on the host the same memory, from a device a copy. bfloat16 and the FP8 types are
        those of ml_dtypes where it is installed, else raw uint16 and uint8."""
        array = self._array
        if self.device[0] == CUDA_TYPE:
            if not array.flags.c_contiguous:
                raise UnsupportedError(Status.UNSUPPORTED, "Array.numpy: a copy needs a dense array")
            copy = np.empty(array.shape, array.dtype)
            _cuda.copy_to_host(
                copy.ctypes.data, self.pointer, array.nbytes, self.device[1], self._write.stream
            )
            array = copy
        if self.dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
            try:
                import ml_dtypes
            except ImportError:
                return array
            return array.view(getattr(ml_dtypes, self.dtype))
        return array

    def tolist(self) -> Any:
        return self.numpy().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if self.device[0] == CUDA_TYPE:
            raise TypeError("this Array lies on a CUDA device; use .numpy() for a copy on the host")
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"a conversion from {array.dtype} to {np.dtype(dtype)} needs a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device[0] != CUDA_TYPE or BY_NAME.get(self._array.dtype.name) is not self.element_type:
            raise AttributeError("__cuda_array_interface__")  # on the host, or a type that it has no name for
        return {
            "data": (self.pointer, False),
            "shape": self.shape,
            "strides": self._array.strides,
            "typestr": self._array.dtype.str,
            "version": 3,
            "stream": self._write.stream or 1,
        }

    def __dlpack_device__(self) -> Device:
        return self.device

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if dl_device is not None and (int(dl_device[0]), int(dl_device[1])) != self.device:
            raise BufferError(f"this Array lies on {device_name(self.device)}")
        array: Any = self._array
        if self.device[0] == CUDA_TYPE:
            if copy:
                raise BufferError("an Array on a device exports its own memory, not a copy")
            # None: the consumer works on the legacy default stream.
            self.wait_on(0 if stream is None else stream_handle("__dlpack__", stream))
        elif stream is not None:
            raise BufferError("a host Array takes stream=None only")
        elif copy:
            array = array.copy()
        try:
            capsule = array.__dlpack__(max_version=max_version)
        except TypeError:  # NumPy before 2.1
            capsule = array.__dlpack__()
        # NumPy exported the storage on the host. Nobody else has seen the capsule yet: say what it really
        # holds.
        tensor, _, _ = dlpack_tensor(capsule)
        tensor.dtype = _DLDataType(*self.element_type[1:4])
        tensor.device_type, tensor.device_id = self.device
        return capsule
