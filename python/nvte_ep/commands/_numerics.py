"""Values of the formats in NumPy, apart from the library's own code, and the error measure.

The formulas are those of nvte_ep.h; that an operand decodes here to what was sent shows that its layout is
the documented one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvte_ep.operand import Operand

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

HADAMARD_SIGNS = 0xD7E8  # bit i: token i of a block of 16 is negated before the transform
AMAX_OF_SCALE = 2688.0  # of NVFP4: the largest code, 6, times the largest block scale, 448


def bf16_bits(values: Floats) -> NDArray[np.uint16]:
    """Rounds finite values to BF16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _e4m3_values() -> Floats:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(code & 127) == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


def _e8m0_values() -> Floats:
    value = np.ldexp(1.0, np.arange(256) - 127)
    value[255] = np.nan
    return value.astype(np.float32)


E4M3 = _e4m3_values()
E8M0 = _e8m0_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def nvfp4_codes(payload: Bytes) -> Floats:
    """[..., n] bytes to [..., 2n] values: the first of two elements is in the low nibble."""
    nibbles = np.stack([payload & 15, payload >> 4], axis=-1)
    return E2M1[nibbles.reshape(*payload.shape[:-1], 2 * payload.shape[-1])]


def swizzled_index(rows: int, columns: int) -> Ints:
    """Where scale (i, j) of a [rows, columns] matrix lies among its 128x4 tiles."""
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    tiles = -(-columns // 4)
    index = ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
    return index.astype(np.int64)


def inverse_hadamard(values: Floats) -> Floats:
    """[..., 16 n]: undoes the 16-point random Hadamard transform of every 16 values."""
    signs = np.where((HADAMARD_SIGNS >> np.arange(16)) & 1, -0.25, 0.25).astype(np.float32)
    blocks = values
    for stride in (1, 2, 4, 8):  # orthonormal and symmetric: the transform is its own inverse
        pairs = blocks.reshape(-1, 2, stride)
        a, b = pairs[:, 0], pairs[:, 1]
        blocks = np.stack([a + b, a - b], axis=1)
    return (blocks.reshape(-1, 16) * signs).reshape(values.shape)


def _bytes_of(part: Any) -> Bytes:
    return np.asarray(part).view(np.uint8).reshape(-1)


def _tiles(height: int, width: int) -> int:
    """Bytes of the scale tiles of a slab."""
    return -(-height // 128) * 128 * (-(-width // 4) * 4)


@dataclass(frozen=True)
class Slab:
    """The slots of one expert in an operand."""

    expert: int
    start: int
    rows: int
    scale_row: int  # where its scale tiles start, in rows


def slabs(rows_per_expert: Sequence[int]) -> list[Slab]:
    found, start, scale_row = [], 0, 0
    for expert, rows in enumerate(rows_per_expert):
        if rows:
            found.append(Slab(expert, start, rows, scale_row))
        start += rows
        scale_row += -(-rows // 128) * 128
    return found


def decode_operand(operand: Operand, rows_per_expert: Sequence[int]) -> Floats:
    """The rowwise parts of a swizzled operand as values [total rows, H]."""
    nvfp4 = operand.format == "nvfp4"
    hidden, block = operand.hidden, 16 if nvfp4 else 32
    columns = hidden // block
    payload = np.asarray(operand.payload)
    scales = _bytes_of(operand.scales)
    values = np.empty((sum(rows_per_expert), hidden), np.float32)
    for slab in slabs(rows_per_expert):
        rows = slice(slab.start, slab.start + slab.rows)
        first = slab.scale_row * (-(-columns // 4) * 4)
        tiles = scales[first : first + _tiles(slab.rows, columns)]
        codes = tiles[swizzled_index(slab.rows, columns)]
        if nvfp4:
            unit = np.asarray(operand.amax)[slab.expert] / np.float32(AMAX_OF_SCALE)
            factors, elements = E4M3[codes] * unit, nvfp4_codes(payload[rows])
        else:
            factors, elements = E8M0[codes], E4M3[payload[rows]]
        values[rows] = elements * np.repeat(factors, block, axis=1)
    return values


def decode_columnwise(operand: Operand, rows_per_expert: Sequence[int]) -> Floats:
    """The columnwise parts of a swizzled operand as values [total rows, H], the Hadamard transform undone."""
    nvfp4 = operand.format == "nvfp4"
    hidden, block = operand.hidden, 16 if nvfp4 else 32
    payload = _bytes_of(operand.columnwise_payload)
    scales = _bytes_of(operand.columnwise_scales)
    values = np.empty((sum(rows_per_expert), hidden), np.float32)
    for slab in slabs(rows_per_expert):
        rows = slice(slab.start, slab.start + slab.rows)
        columns = slab.rows // block  # the scale matrix of a slab is [H, rows / block]
        first = slab.scale_row // block * (-(-hidden // 128) * 128)
        tiles = scales[first : first + _tiles(hidden, columns)]
        codes = tiles[swizzled_index(hidden, columns)]
        if nvfp4:
            start = slab.start * hidden // 2
            packed = payload[start : start + hidden * slab.rows // 2].reshape(hidden, slab.rows // 2)
            unit = np.asarray(operand.columnwise_amax)[slab.expert] / np.float32(AMAX_OF_SCALE)
            transformed = nvfp4_codes(packed) * np.repeat(E4M3[codes] * unit, block, axis=1)
            values[rows] = inverse_hadamard(transformed).T
        else:
            start = slab.start * hidden
            elements = E4M3[payload[start : start + slab.rows * hidden].reshape(slab.rows, hidden)]
            values[rows] = elements * np.repeat(E8M0[codes].T, block, axis=0)
    return values


@dataclass(frozen=True)
class Error:
    """Energy of a signal and of what was added to it. Errors of parts add up to the error of the whole."""

    signal: float = 0.0
    noise: float = 0.0

    @classmethod
    def between(cls, reference: NDArray[Any], got: NDArray[Any]) -> Error:
        exact = np.asarray(reference, np.float64)
        difference = np.asarray(got, np.float64) - exact
        return cls(float(np.square(exact).sum()), float(np.square(difference).sum()))

    def __add__(self, other: Error) -> Error:
        return Error(self.signal + other.signal, self.noise + other.noise)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation noise ratio: infinite without any noise, NaN where it means nothing."""
        if self.noise == 0:
            return math.inf
        ratio = self.signal / self.noise
        return 10 * math.log10(ratio) if 0 < ratio < math.inf else math.nan
