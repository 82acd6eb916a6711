# SPDX-License-Identifier: Apache-2.0
"""Plain values of the caller's as the library takes them; what does not fit is refused by name."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from nvte_ep.errors import invalid


def integer(function: str, name: str, value: Any, bits: int = 64) -> int:
    """An integer that a C field of so many bits can hold: ctypes itself would silently cut it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid(function, name, "an integer", repr(value)) from None
    if not -(1 << (bits - 1)) <= number < 1 << (bits - 1):
        raise invalid(function, name, f"an integer of {bits} bits", short(number))
    return number


def natural(function: str, name: str, value: Any) -> int:
    """A size: not negative."""
    number = integer(function, name, value)
    if number < 0:
        raise invalid(function, name, "0 or more", short(number))
    return number


def boolean(function: str, name: str, value: Any) -> bool:
    """True or False: not just anything that Python takes for one of them, such as a text or None."""
    if not isinstance(value, (bool, np.bool_)):
        raise invalid(function, name, "True or False", repr(value))
    return bool(value)


def float32(function: str, name: str, value: Any) -> float:
    """A number that FP32 can hold; infinities and NaN are for the library to judge."""
    largest = float(np.finfo(np.float32).max)
    try:
        number = float(value)
    except OverflowError:
        raise invalid(function, name, "a number that float32 can hold", short(value)) from None
    if largest < abs(number) < float("inf"):
        raise invalid(function, name, "a number that float32 can hold", repr(value))
    return number


def short(number: Any) -> str:
    """The digits of an integer, unless they are thousands (which Python may even refuse to print)."""
    bits = int(number).bit_length()
    return str(number) if bits <= 128 else f"one of {bits} bits"
