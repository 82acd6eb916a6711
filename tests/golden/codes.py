"""The small number types as ordered tables of exact values.

Encoding is a search in the ascending list of FP32 bit patterns at which the code changes: no shifting or
rounding of significands, so that nothing here has the shape of the code under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from exact import INF, MAGNITUDE, NAN, Bits, Bytes, Ints, add, fp32_from_fraction, is_nan, magnitude

Halves = npt.NDArray[np.uint16]


def _e4m3_value(code: int) -> Fraction:
    exponent, mantissa = code >> 3, code & 7
    if exponent > 0:
        mantissa += 8
    return mantissa * Fraction(2) ** (max(exponent, 1) - 10)


E2M1_VALUES = [Fraction(halves, 2) for halves in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3_VALUES = [_e4m3_value(code) for code in range(127)]  # 0x7F is NaN
E8M0_VALUES = [Fraction(2) ** (code - 127) for code in range(255)]  # 0xFF is NaN
E4M3_NAN = 0x7F
E8M0_NAN = 0xFF


def fp32_array(values: Sequence[Fraction]) -> Bits:
    return np.array([fp32_from_fraction(value) for value in values], np.uint32)


def halfway(values: Sequence[Fraction]) -> list[Fraction]:
    return [(low + high) / 2 for low, high in pairwise(values)]


def nearest_thresholds(values: Sequence[Fraction]) -> Bits:
    """Entry c: the smallest FP32 magnitude that rounds to code c + 1. A tie goes to the even code."""
    ties = fp32_array(halfway(values))
    return np.add(ties, np.array([1 - code % 2 for code in range(len(ties))], np.uint32))


def _with_sign(table: Bits) -> Bits:
    return np.concatenate([table, table | np.uint32(0x80000000)])


_NAN = np.array([NAN], np.uint32)
E2M1_MAGNITUDES = fp32_array(E2M1_VALUES)
E4M3_MAGNITUDES = fp32_array(E4M3_VALUES)
E2M1_DECODE = _with_sign(E2M1_MAGNITUDES)
E4M3_DECODE = np.concatenate([E4M3_MAGNITUDES, _NAN, E4M3_MAGNITUDES | np.uint32(0x80000000), _NAN])
E8M0_DECODE = np.concatenate([fp32_array(E8M0_VALUES), _NAN])
E8M0_MULTIPLIER = np.concatenate([fp32_array([1 / value for value in E8M0_VALUES]), _NAN])  # 2^(127 - code)
E2M1_NEAREST = nearest_thresholds(E2M1_VALUES)
E4M3_NEAREST = nearest_thresholds(E4M3_VALUES)


def encode_e4m3(x: Bits) -> Bytes:
    """Nearest even, saturating at 448; every NaN gives 0x7F."""
    code = np.searchsorted(E4M3_NEAREST, magnitude(x), side="right") + ((x >> 31) << 7)
    return np.where(is_nan(x), E4M3_NAN, code).astype(np.uint8)


def encode_e4m3_up(x: Bits) -> Bytes:
    """Towards +infinity, saturating at 448, for x >= 0."""
    if np.any(x > INF):
        raise ValueError("only for values from 0 to infinity")
    return np.minimum(np.searchsorted(E4M3_MAGNITUDES, x, side="left"), 126).astype(np.uint8)


def encode_e2m1(x: Bits) -> Bytes:
    """Nearest even, saturating at 6; every NaN gives +6; the sign of zero is kept."""
    code = np.searchsorted(E2M1_NEAREST, magnitude(x), side="right") + ((x >> 31) << 3)
    return np.where(is_nan(x), 7, code).astype(np.uint8)


# Row 0, 1, 2: the random byte r gives r/256 of the step .5, 1 and 2.
_PART_OF_STEP = np.stack([fp32_array([Fraction(r, 512) * 2**i for r in range(256)]) for i in range(3)])


def encode_e2m1_stochastic(x: Bits, random: Bytes) -> Bytes:
    """t = |x| + r/256 * step, rounded once to FP32; the code is the largest whose value is not above t."""
    a = magnitude(x)
    binade = (a >= E2M1_MAGNITUDES[4]).astype(np.int64) + (a >= E2M1_MAGNITUDES[6])
    t = add(a, _PART_OF_STEP[binade, random])
    code = np.searchsorted(E2M1_MAGNITUDES, t, side="right") - 1 + ((x >> 31) << 3)
    return np.where(is_nan(x), 7, code).astype(np.uint8)


def encode_e8m0(s: Bits) -> Bytes:
    """The smallest power of two that is not below s, within [2^-127, 2^127]; NaN gives 0xFF."""
    code = np.minimum(np.searchsorted(E8M0_DECODE[:255], magnitude(s), side="left"), 254)
    return np.where(is_nan(s), E8M0_NAN, code).astype(np.uint8)


MIN_TOKEN_EXPONENT = -116
MAX_TOKEN_EXPONENT = 105
_TOKEN_LIMITS = fp32_array(
    [2688 * Fraction(2) ** k for k in range(MIN_TOKEN_EXPONENT, MAX_TOKEN_EXPONENT + 1)]
)


def token_exponent(amax: Bits) -> Ints:
    """The smallest k of [-116, 105] with 2688 * 2^k >= amax; 105 where there is none."""
    index = np.searchsorted(_TOKEN_LIMITS, amax, side="left")
    return np.minimum(index + MIN_TOKEN_EXPONENT, MAX_TOKEN_EXPONENT).astype(np.int64)


def round_to_bf16(x: Bits) -> Halves:
    bits = x.astype(np.int64)
    kept, rest = bits >> 16, bits & 0xFFFF
    rounded = kept + ((rest > 0x8000) | ((rest == 0x8000) & (kept & 1 == 1)))
    return np.where(is_nan(x), 0x7FC0, rounded).astype(np.uint16)


def widen_bf16(x: Halves) -> Bits:
    result: Bits = x.astype(np.uint32) << np.uint32(16)
    return result


def _fp16_value(code: int) -> Fraction:
    exponent, mantissa = code >> 10, code & 0x3FF
    if exponent > 0:
        mantissa += 1024
    return mantissa * Fraction(2) ** (max(exponent, 1) - 25)


# Code 0x7C00 stands for 65536 in the search: what rounds to it overflows to infinity.
_FP16_VALUES = [_fp16_value(code) for code in range(0x7C01)]
_FP16_NEAREST = nearest_thresholds(_FP16_VALUES)
_FP16_NANS = np.uint32(INF) + (np.arange(1, 0x400, dtype=np.uint32) << 13)
_FP16_WIDE = np.concatenate([fp32_array(_FP16_VALUES[:0x7C00]), np.array([INF], np.uint32), _FP16_NANS])


def round_to_fp16(x: Bits) -> Halves:
    code = np.searchsorted(_FP16_NEAREST, magnitude(x), side="right") + ((x >> 31) << 15)
    return np.where(is_nan(x), 0x7E00, code).astype(np.uint16)


def widen_fp16(x: Halves) -> Bits:
    result: Bits = _FP16_WIDE[x & 0x7FFF] | ((x & 0x8000).astype(np.uint32) << 16)
    return result


def neighbours(magnitudes: Bits, reach: int = 1) -> Bits:
    """The given magnitudes and those up to `reach` FP32 steps away, ascending, without repeats."""
    steps = np.arange(-reach, reach + 1, dtype=np.int64)
    spread = (magnitudes.astype(np.int64)[:, None] + steps).ravel()
    return np.unique(spread[(spread >= 0) & (spread <= MAGNITUDE)]).astype(np.uint32)
