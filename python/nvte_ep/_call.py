# SPDX-License-Identifier: Apache-2.0
"""One call into the library: its arrays, the device they lie on, the stream it goes on."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvte_ep import _abi, _cuda, _lib, _streams
from nvte_ep._arguments import boolean, float32, integer, natural, short
from nvte_ep._dlpack import View, device_of, pointer, view
from nvte_ep._dtypes import BY_NAME, CPU, CUDA_TYPE, Device, dtype_name
from nvte_ep.array import Array
from nvte_ep.errors import BadStateError, NvteEpError, Status, in_words_of, invalid


class Call:
    """Borrows the arrays of one call and makes it.

    `function` is the C function; error texts name it. The device is that of the first array, unless it is
    known.
    """

    # Arguments of the C function that have other names in Python.
    names: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, function: str, arrays: dict[str, Any], stream: Any, device: Device | None = None
    ) -> None:
        self.function = function
        if device is None:
            given = (item for item in arrays.items() if item[1] is not None)
            device = next((device_of(function, name, array) for name, array in given), CPU)
        self.device = device
        self.stream = (
            _streams.current(device, arrays.values()) if stream is None else _streams.handle(function, stream)
        )
        self._written: list[Array] = []

    def read(
        self, name: str, array: Any, *, as_bytes: bool = False, uint16_is: str | None = None
    ) -> View | None:
        if array is None:
            return None
        return view(self.function, name, array, self.stream, False, as_bytes, uint16_is)

    def _read_made(self, name: str, array: NDArray[Any]) -> View:
        """One that was made here: nobody but the view holds it."""
        return view(self.function, name, array, stream=self.stream, lasting=True)

    def need(
        self,
        name: str,
        array: Any,
        expected: str,
        *,
        as_bytes: bool = False,
        uint16_is: str | None = None,
    ) -> View:
        """As read, for what cannot be left out."""
        found = self.read(name, array, as_bytes=as_bytes, uint16_is=uint16_is)
        if found is None:
            raise invalid(self.function, name, expected, "None")
        return found

    def read_indices(self, name: str, array: Any) -> View | None:
        """Integers; plain Python sequences will do on the host."""
        if isinstance(array, (list, tuple)):
            return self._read_made(name, self._integers(name, array))
        return self.read(name, array)

    def _integers(self, name: str, numbers: Any) -> Any:
        try:
            array = np.asarray(numbers)
        except (
            ValueError,
            OverflowError,
        ) as error:  # lists of different lengths, integers of more than 64 bits
            raise invalid(self.function, name, "integers", str(error)) from None
        if array.size and array.dtype.kind != "i":
            raise invalid(self.function, name, "integers", f"{array.dtype} numbers")
        return array.astype(np.int64)

    def read_scalar(self, name: str, value: Any, dtype: str) -> View | None:
        """An array of one element; a plain number will do on the host, and no dimension is as good as one."""
        if isinstance(value, (int, float, np.integer, np.floating)):
            self._host_only(name, "a number")
            convert = integer if dtype == "int64" else float32
            return self._read_made(name, np.array([convert(self.function, name, value)], dtype=dtype))
        found = self.read(name, value)
        return None if found is None else _at_least_1d(found)

    def read_scale(self, name: str, value: Any, findings: Any) -> View | None:
        """As read_scalar, a second-level scale. `findings` tells of one that is none; where there is no such
        array, a number that is none is refused."""
        if findings is None and isinstance(value, (int, float, np.integer, np.floating)):
            number = float32(self.function, name, value)
            if math.frexp(number)[0] != 0.5 or not 2**-116 <= number <= 2**105:
                raise invalid(self.function, name, "a power of two from 2^-116 to 2^105", str(value))
        return self.read_scalar(name, value, "float32")

    def read_rng_state(self, value: Any) -> View | None:
        """int64 [2] {seed, offset}; on the host a pair of integers will do."""
        if isinstance(value, (list, tuple)):
            self._host_only("rng_state", "a pair of numbers")
            if len(value) != 2:
                raise invalid(self.function, "rng_state", "(seed, offset)", repr(value))
            bits = [_int64_bits(self.function, part) for part in value]
            return self._read_made("rng_state", np.array(bits, dtype=np.int64))
        return self.read("rng_state", value)

    def write(
        self, name: str, array: Any, *, as_bytes: bool = False, uint16_is: str | None = None
    ) -> View | None:
        if array is None:
            return None
        found = view(self.function, name, array, self.stream, True, as_bytes, uint16_is)
        if isinstance(array, Array):
            self._written.append(array)
        return found

    def fill(self, name: str, array: Any, *, as_bytes: bool = False, uint16_is: str | None = None) -> View:
        """As write, for an array that is there."""
        found = self.write(name, array, as_bytes=as_bytes, uint16_is=uint16_is)
        assert found is not None
        return found

    def write_findings(self, array: Any) -> View | None:
        found = self.write("findings", array)
        return None if found is None else _at_least_1d(found)

    def new(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """An output that the caller did not pass."""
        self.may_make(name)
        return Array.empty(shape, dtype, self.device)

    def may_make(self, name: str) -> None:
        """Refuses to make an output while the stream is captured: replays write to it, long after it went to
        somebody else because nobody held it any more."""
        if self.device[0] == CUDA_TYPE and _cuda.is_capturing(self.device[1], self.stream):
            raise BadStateError(
                Status.BAD_STATE,
                f"{self.function}: {name}: the stream is captured in a CUDA graph, whose replays write to "
                f"this output: pass {name}= and keep it as long as the graph",
            )

    def run(self, *arguments: Any, check: Callable[[], None] | None = None) -> None:
        """Calls the C function with the arguments and the stream; `check` may raise in its place."""
        try:
            _lib.call(self.function, *arguments, self.stream or None)
        except NvteEpError as error:
            raise in_words_of(self.function, self.names, error) from None
        finally:
            if check is not None:
                check()
        for array in self._written:
            array.written_on(self.stream)

    def will_write(self, array: Array) -> None:
        """For memory that goes to the library by another way than write()."""
        array.wait_on(self.stream)
        self._written.append(array)

    def _host_only(self, name: str, what: str) -> None:
        if self.device[0] == _abi.CONSTANTS["NVTE_EP_DEVICE_CUDA"]:
            raise invalid(self.function, name, "an array on the device of the other arrays", what)

    def matrix(self, name: str, found: View) -> tuple[int, int]:
        """The sizes of an array of two dimensions."""
        if len(found.shape) != 2:
            raise invalid(self.function, name, "2 dimensions", f"shape {found.shape}")
        return found.shape[0], found.shape[1]

    def typed(self, name: str, array: Any, dtype: Any) -> View:
        """A token array whose type the caller may state: needed where uint16 holds another type's bits."""
        wanted = None if dtype is None else float_type(self.function, "dtype", dtype)
        found = self.need(name, array, "[T, H]", uint16_is=wanted)
        if wanted is not None and found.dtype.name != wanted:
            raise invalid(self.function, name, f"{wanted}, as dtype says", found.dtype.name)
        return found


def float_type(function: str, name: str, dtype: Any) -> str:
    text = dtype_name(dtype)
    if text not in ("bfloat16", "float16", "float32"):
        raise invalid(function, name, "bfloat16, float16 or float32", repr(dtype))
    return text


def storage_name(text: str) -> str | None:
    """What a uint16 array may stand for where elements of this type are expected."""
    return text if BY_NAME[text].bits == 16 else None


def _at_least_1d(found: View) -> View:
    if found.shape:
        return found
    tensor = _abi.Tensor.from_buffer_copy(found.tensor)  # the view may be used again
    tensor.owner = found.tensor.owner
    tensor.ndim = 1
    tensor.shape[0] = 1
    tensor.strides[0] = 1
    return View(tensor, found.dtype, (1,), found.device, found.read_only)


def _int64_bits(function: str, value: Any) -> int:
    """Seeds are 64 bits of any kind: unsigned ones go through too."""
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid(function, "rng_state", "integers", repr(value)) from None
    if not -(1 << 63) <= number < 1 << 64:
        raise invalid(function, "rng_state", "64-bit integers", short(number))
    return ctypes.c_int64(number).value


__all__ = ["Call", "boolean", "float_type", "integer", "natural", "pointer", "storage_name"]
