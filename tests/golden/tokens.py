"""The inputs: tokens as FP32 bits, made from a counter-based integer generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from codes import (
    E2M1_VALUES,
    E4M3_VALUES,
    fp32_array,
    halfway,
    neighbours,
    round_to_bf16,
    round_to_fp16,
    widen_bf16,
    widen_fp16,
)
from exact import (
    INF,
    MAX,
    NAN,
    Bits,
    Bytes,
    Ints,
    constant,
    fp32_from_fraction,
    magnitude,
    multiply,
    power_of_two,
    round_to_fp32,
)

Stored = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class Numbers:
    """splitmix64: the n-th number is a mix of seed + n * golden ratio."""

    def __init__(self, seed: int) -> None:
        self._state = seed % 2**64

    def words(self, *shape: int) -> npt.NDArray[np.uint64]:
        count = int(np.prod(shape, dtype=np.int64))
        z = np.uint64(self._state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._state = (self._state + count * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        result: npt.NDArray[np.uint64] = (z ^ (z >> np.uint64(31))).reshape(shape)
        return result

    def below(self, limit: int, *shape: int) -> Ints:
        result: Ints = (self.words(*shape) >> np.uint64(33)).astype(np.int64) % limit
        return result

    def bytes(self, *shape: int) -> Bytes:
        return self.below(256, *shape).astype(np.uint8)

    def gaussian(self, *shape: int) -> Bits:
        """About normal with standard deviation 1: the sum of twelve uniform numbers less their mean."""
        total = self.below(2**25, *shape, 12).sum(axis=-1) * 2 - 12 * (2**25 - 1)
        return round_to_fp32(total < 0, np.abs(total), np.full(shape, -26, np.int64))

    def finite(self, lowest: int, highest: int, *shape: int) -> Bits:
        """Any mantissa and sign, exponent field in [lowest, highest]."""
        field = lowest + self.below(highest - lowest + 1, *shape)
        return ((self.below(2, *shape) << 31) | (field << 23) | self.below(2**23, *shape)).astype(np.uint32)


@dataclass(frozen=True)
class Dtype:
    """A token type: how FP32 bits get into it and out again, and its range."""

    name: str
    store: Callable[[Bits], Stored]
    load: Callable[[Stored], Bits]
    fields: tuple[int, int]  # FP32 exponent fields of the finite values
    largest: int  # FP32 bits of the largest finite value
    unit: int  # FP32 bits between neighbouring values of one binade

    def rounded(self, x: Bits) -> Bits:
        return self.load(self.store(x))

    def at(self, exponent: int) -> int:
        """The exponent, moved into the normal range of the type with room to spare."""
        low, high = (-10, 8) if self.name == "float16" else (-100, 110)
        return max(low, min(high, exponent))


def _load_bf16(stored: Stored) -> Bits:
    return widen_bf16(stored.astype(np.uint16))


def _load_fp16(stored: Stored) -> Bits:
    return widen_fp16(stored.astype(np.uint16))


BFLOAT16 = Dtype("bfloat16", round_to_bf16, _load_bf16, (0, 254), 0x7F7F0000, 1 << 16)
FLOAT16 = Dtype("float16", round_to_fp16, _load_fp16, (103, 142), 0x477FE000, 1 << 13)
FLOAT32 = Dtype("float32", lambda x: x, lambda x: x.astype(np.uint32), (0, 254), MAX, 1)
DTYPES = (BFLOAT16, FLOAT16, FLOAT32)


def scaled(x: Bits, exponent: Ints | int) -> Bits:
    return multiply(x, power_of_two(exponent))


def mixed_tokens(numbers: Numbers, hidden: int, dtype: Dtype) -> Bits:
    """One token of each kind that a codec may treat in its own way: [T, H], all values exact in dtype."""
    rows: list[Bits] = []

    def gaussian() -> Bits:
        return numbers.gaussian(hidden)

    def signs() -> Bits:
        return (numbers.below(2, hidden) << 31).astype(np.uint32)

    def keep(row: Bits) -> None:
        rows.append(dtype.rounded(row.astype(np.uint32)))

    channel = np.arange(hidden)
    keep(gaussian())
    keep(scaled(gaussian(), dtype.at(60)))
    keep(scaled(gaussian(), dtype.at(-90)))
    keep(scaled(gaussian(), np.where(channel % 37 == 5, 6, 0)))  # outlier channels
    keep(np.where(channel < hidden // 2, 0, gaussian()))
    keep(np.where(channel // 4 % 2 == 0, signs(), gaussian()))
    keep(scaled(gaussian(), -numbers.below(21, hidden)))  # falls off the range of block scales
    keep(scaled(gaussian(), -(channel // 16 % 24)))  # block after block smaller
    keep(numbers.finite(*dtype.fields, hidden))
    keep(signs())  # +-0: a zero token
    keep(np.full(hidden, constant(Fraction(-13, 16))))
    keep(np.where(channel == hidden - 1, gaussian(), 0))

    # Largest magnitudes at a threshold of the token exponent, 1.3125 * 2^e, and one step of the type from it.
    for steps in (-1, 0, 1):
        peak = (dtype.at(3) + 127 << 23) + 0x280000 + steps * dtype.unit
        row = gaussian()
        row[numbers.below(hidden)] = peak
        keep(row)

    # Ends of the range: everything clamps, or is subnormal.
    keep(np.where(channel % 5 == 1, np.uint32(dtype.largest), scaled(gaussian(), dtype.at(100))) | signs())
    lowest = 103 if dtype is FLOAT16 else 11
    for field in (lowest - 1, lowest, lowest + 3):
        keep(np.where(channel % 3 == 0, np.uint32(max(field, 0) << 23), 0) | signs())
    keep(numbers.finite(0, 0, hidden) if dtype is not FLOAT16 else numbers.finite(103, 112, hidden))
    if dtype is not FLOAT16:
        for k in (-117, -116, -115):  # around 2688 * 2^-116, where the token exponent is clamped
            keep(scaled(gaussian(), k + 9))
        for k in (104, 105, 106):
            keep(scaled(gaussian(), k + 9))

    # NaN and infinity.
    minus_inf = INF | 0x80000000
    for special in ((NAN,), (INF,), (minus_inf,), (0xFFC12345, INF), (0x7F800001, INF, minus_inf)):
        row = gaussian()
        for bits in special:
            row[numbers.below(hidden)] = bits if dtype is FLOAT32 or bits & 0x7FFFFF == 0 else bits | 0x400000
        keep(row)
    keep(np.where(channel < 32, np.uint32(NAN), gaussian()))  # blocks of nothing else
    keep(np.where(channel >= hidden - 16, np.uint32(NAN), 0))
    keep(np.where(channel % 3 == 0, np.uint32(NAN), signs()))  # NaN and no other number but zero
    keep(np.where(channel % 3 == 0, np.uint32(INF), signs()))
    keep(np.where(channel % 5 == 0, NAN, np.where(channel % 5 == 1, INF, signs())))
    keep(np.full(hidden, NAN))
    keep(np.full(hidden, INF) | signs())
    return np.stack(rows)


def companions(numbers: Numbers, values: Bits, dtype: Dtype) -> Bits:
    """Every value in a block of 16 whose last member decides the scale. values [rows, n], a row of about one
    binade; the last member is up to 2^5 times as large, so that the values run through all codes."""
    rows, count = values.shape
    blocks = -(-count // 15)
    filled = np.zeros((rows, blocks * 15), np.uint32)
    filled[:, :count] = values
    out = np.zeros((rows, blocks, 16), np.uint32)
    out[..., :15] = filled.reshape(rows, blocks, 15)
    finite = np.where(magnitude(values) < INF, magnitude(values), 0).max(axis=1).astype(np.int64)
    field = np.minimum((finite[:, None] >> 23) + numbers.below(6, rows, blocks), dtype.fields[1])
    last = (field << 23) | numbers.below(2**23, rows, blocks)
    out[..., 15] = dtype.rounded(np.minimum(last, dtype.largest).astype(np.uint32))
    return out.reshape(rows, blocks * 16)


def every_half(dtype: Dtype) -> Bits:
    """All 65,536 values of a 16-bit type as [256, 256], each row within one exponent."""
    return dtype.load(np.arange(65536, dtype=np.uint16)).reshape(256, 256)


def _random_signs(numbers: Numbers, x: Bits) -> Bits:
    return x ^ (numbers.below(2, *x.shape) << 31).astype(np.uint32)


def nvfp4_code_thresholds(numbers: Numbers, exponents: tuple[int, ...]) -> Bits:
    """One token per exponent k: for each finite block scale b > 0 blocks that begin with 6 * b * 2^k and hold
    the FP32 neighbourhood of every product of b * 2^k with a halfway point between E2M1 values."""
    ties = halfway(E2M1_VALUES)
    rows = []
    for k in exponents:
        blocks = []
        for b in E4M3_VALUES[1:]:
            unit = b * Fraction(2) ** k
            near = neighbours(fp32_array([unit * tie for tie in ties]), reach=2)
            largest = np.full((3, 1), fp32_from_fraction(6 * unit), np.uint32)
            blocks.append(np.concatenate([largest, np.resize(near, 45).reshape(3, 15)], axis=1))
        rows.append(np.concatenate(blocks).ravel())
    return _random_signs(numbers, np.stack(rows))


def nvfp4_scale_thresholds(numbers: Numbers, exponents: tuple[int, ...]) -> Bits:
    """One token per exponent k: blocks whose largest member is near 6 * 2^k times a block scale or a halfway
    point between two; the others are smaller by factors in [0, 1]."""
    limits = [6 * value for value in E4M3_VALUES[1:] + halfway(E4M3_VALUES)]
    rows = []
    for k in exponents:
        amax = neighbours(fp32_array([limit * Fraction(2) ** k for limit in limits]), reach=2)
        amax = amax[amax <= fp32_from_fraction(2688 * Fraction(2) ** k)]  # more would raise k
        share = numbers.finite(117, 126, len(amax), 16) & np.uint32(0x7FFFFFFF)
        blocks = multiply(amax[:, None], share)
        blocks[:, 7] = amax
        rows.append(blocks.ravel())
    return _random_signs(numbers, np.stack(rows))


def mxfp8_thresholds(numbers: Numbers) -> Bits:
    """[n, 32]: the first member is near 448 * 2^j, for every j that FP32 has; the others are near halfway
    points between E4M3 values, times 2^j."""
    ties = halfway(E4M3_VALUES)
    rows = []
    for j in range(-157, 120):
        near = neighbours(fp32_array([tie * Fraction(2) ** max(j, -127) for tie in ties]))
        for amax in neighbours(fp32_array([448 * Fraction(2) ** j])):
            row = near[numbers.below(len(near), 32)]
            row = np.minimum(row, amax)
            row[0] = amax
            rows.append(row)
    return _random_signs(numbers, np.stack(rows))
