"""FP32 arithmetic in integers.

Every FP32 value is carried as its bits (uint32). Products, sums and reciprocals are formed exactly in int64
and rounded once, to nearest with ties to even, with subnormals. The host's floating point is never used, so
that the golden vectors cannot depend on compiler flags, flushing of subnormals or contraction.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

INF = 0x7F800000
NAN = 0x7FC00000
MAX = 0x7F7FFFFF
ONE = 0x3F800000
QUARTER = 0x3E800000
MAGNITUDE = 0x7FFFFFFF


def magnitude(x: Bits) -> Bits:
    result: Bits = x & np.uint32(MAGNITUDE)
    return result


def is_nan(x: Bits) -> Flags:
    result: Flags = magnitude(x) > INF
    return result


def is_inf(x: Bits) -> Flags:
    result: Flags = magnitude(x) == INF
    return result


def power_of_two(exponent: Ints | int) -> Bits:
    """Bits of 2^exponent, exponent in [-149, 127]."""
    e = np.asarray(exponent, np.int64)
    if np.any((e < -149) | (e > 127)):
        raise ValueError("2^exponent is no FP32 number")
    normal = (e + 127) << 23
    subnormal = np.int64(1) << np.clip(e + 149, 0, 23)
    return np.where(e >= -126, normal, subnormal).astype(np.uint32)


def _bit_length(x: Ints) -> Ints:
    length = np.zeros_like(x)
    rest = x.copy()
    for step in (32, 16, 8, 4, 2, 1):
        large = rest >= (np.int64(1) << step)
        length += np.where(large, step, 0)
        rest = np.where(large, rest >> step, rest)
    result: Ints = length + rest
    return result


def round_to_fp32(negative: Flags, significand: Ints, exponent: Ints) -> Bits:
    """RN((-1)^negative * significand * 2^exponent); 0 <= significand < 2^62. A caller that dropped low bits
    leaves a 1 in bit 0 and at least two bits below the rounding position."""
    lsb = np.maximum(exponent + _bit_length(significand) - 24, -149)
    shift = lsb - exponent
    left = significand << np.clip(-shift, 0, 62)
    right = np.clip(shift, 1, 63)
    kept = significand >> right
    rest = significand - (kept << right)
    half = np.int64(1) << (right - 1)
    rounded = kept + ((rest > half) | ((rest == half) & (kept & 1 == 1)))
    # A carry out of the significand moves into the exponent field by itself; so does the step from subnormal.
    bits = np.where(shift <= 0, left, rounded) + ((lsb + 149) << 23)
    bits = np.where(significand == 0, 0, np.minimum(bits, INF))
    result: Bits = (bits + (negative.astype(np.int64) << 31)).astype(np.uint32)
    return result


def _split(x: Bits) -> tuple[Flags, Ints, Ints]:
    """Sign, significand and exponent of finite values: (-1)^sign * significand * 2^exponent."""
    bits = x.astype(np.int64)
    field = (bits >> 23) & 0xFF
    fraction = bits & 0x7FFFFF
    return bits >> 31 == 1, np.where(field > 0, fraction + 0x800000, fraction), np.maximum(field, 1) - 150


def multiply(a: Bits, b: Bits) -> Bits:
    a, b = np.broadcast_arrays(a, b)
    negative_a, significand_a, exponent_a = _split(a)
    negative_b, significand_b, exponent_b = _split(b)
    negative = negative_a ^ negative_b
    product = round_to_fp32(negative, significand_a * significand_b, exponent_a + exponent_b)
    infinite = (np.where(negative, 0x80000000, 0) + INF).astype(np.uint32)
    product = np.where(is_inf(a) | is_inf(b), infinite, product)
    zero_times_infinity = (is_inf(a) & (magnitude(b) == 0)) | (is_inf(b) & (magnitude(a) == 0))
    return np.where(is_nan(a) | is_nan(b) | zero_times_infinity, np.uint32(NAN), product)


def add(a: Bits, b: Bits) -> Bits:
    a, b = np.broadcast_arrays(a, b)
    swap = _split(a)[2] < _split(b)[2]
    high, low = np.where(swap, b, a), np.where(swap, a, b)
    negative_high, significand_high, exponent_high = _split(high)
    negative_low, significand_low, exponent_low = _split(low)
    distance = np.minimum(exponent_high - exponent_low, 62)
    wide = significand_low << 34
    shifted = wide >> distance
    shifted |= (wide != shifted << distance).astype(np.int64)
    total = np.where(negative_high, -1, 1) * (significand_high << 34)
    total += np.where(negative_low, -1, 1) * shifted
    negative = np.where(total == 0, negative_high & negative_low, total < 0)
    result = round_to_fp32(negative, np.abs(total), exponent_high - 34)
    result = np.where(is_inf(a), a, np.where(is_inf(b), b, result))
    opposite_infinities = is_inf(a) & is_inf(b) & (a != b)
    return np.where(is_nan(a) | is_nan(b) | opposite_infinities, np.uint32(NAN), result)


def negate(x: Bits) -> Bits:
    result: Bits = x ^ np.uint32(0x80000000)
    return result


def reciprocal(x: Bits) -> Bits:
    """RN(1/x)."""
    negative, significand, exponent = _split(x)
    divisor = np.maximum(significand, 1)
    quotient = (np.int64(1) << 61) // divisor
    quotient |= (quotient * divisor != np.int64(1) << 61).astype(np.int64)
    result = round_to_fp32(negative, quotient, -61 - exponent)
    sign = np.where(negative, 0x80000000, 0).astype(np.uint32)
    result = np.where(magnitude(x) == 0, sign + np.uint32(INF), result)
    result = np.where(is_inf(x), sign, result)
    return np.where(is_nan(x), np.uint32(NAN), result)


def fp32_from_fraction(value: Fraction) -> int:
    """RN(value) as bits, one number, by exact rational arithmetic. Written apart from round_to_fp32 on
    purpose: self_check() holds the two against each other."""
    sign = 0x80000000 if value < 0 else 0
    value = abs(value)
    if value == 0:
        return sign
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - 23, -149)
    steps = round(value / unit)  # Fraction rounds ties to even
    if steps * unit >= Fraction(2) ** 128:
        return sign + INF
    if steps * unit >= Fraction(2) ** (exponent + 1):
        exponent += 1
        steps = round(steps * unit / Fraction(2) ** max(exponent - 23, -149))
    if exponent < -126:
        return sign + int(steps)
    return sign + ((exponent + 127) << 23) + int(steps) - 0x800000


def fraction_from_fp32(bits: int) -> Fraction:
    field, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if field == 0xFF:
        raise ValueError("not finite")
    if field > 0:
        fraction += 0x800000
    value = fraction * Fraction(2) ** (max(field, 1) - 150)
    return -value if bits >> 31 else value


def constant(value: Fraction) -> Bits:
    return np.array(fp32_from_fraction(value), np.uint32)


def self_check(samples: Bits) -> None:
    """Holds the vector arithmetic against rational arithmetic on pairs of finite values."""
    a, b = samples[0::2], samples[1::2]
    products, sums, inverses = multiply(a, b), add(a, b), reciprocal(a)
    for i in range(len(a)):
        x, y = fraction_from_fp32(int(a[i])), fraction_from_fp32(int(b[i]))
        expected = {"product": fp32_from_fraction(x * y), "sum": fp32_from_fraction(x + y)}
        got = {"product": int(products[i]), "sum": int(sums[i])}
        if x != 0:
            expected["reciprocal"], got["reciprocal"] = fp32_from_fraction(1 / x), int(inverses[i])
        for name, bits in expected.items():
            same_zero = bits & MAGNITUDE == 0 and got[name] & MAGNITUDE == 0  # a Fraction has no sign of zero
            if got[name] != bits and not same_zero:
                operands = f"{int(a[i]):08x} and {int(b[i]):08x}"
                raise AssertionError(f"{name} of {operands}: {got[name]:08x}, not {bits:08x}")
