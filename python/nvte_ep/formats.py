# SPDX-License-Identifier: Apache-2.0
"""Wire formats, as the library lists them."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from nvte_ep import _abi, _lib
from nvte_ep._arguments import integer
from nvte_ep.errors import UnsupportedError, invalid


@dataclass(frozen=True)
class FormatInfo:
    """Sizes of a wire format; see nvte_ep_format_info_t."""

    name: str
    format: int
    block: int
    payload_bits: int
    scale_bytes: int
    token_scale_bytes: int
    hidden_multiple: int
    operand_multiple: int
    columnwise_alignment: int


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, FormatInfo]:
    formats: dict[str, FormatInfo] = {}
    _lib.library()  # one that is not found is no end of the list
    while True:
        info = _abi.FormatInfo()
        try:
            _lib.call("nvte_ep_format_info", len(formats), ctypes.byref(info))
        except UnsupportedError:  # the end of the list
            return formats
        name = info.name.decode()
        formats[name] = FormatInfo(
            name=name,
            format=info.format,
            block=info.block,
            payload_bits=info.payload_bits,
            scale_bytes=info.scale_bytes,
            token_scale_bytes=info.token_scale_bytes,
            hidden_multiple=info.hidden_multiple,
            operand_multiple=info.operand_multiple,
            columnwise_alignment=info.columnwise_alignment,
        )


def format_info() -> dict[str, FormatInfo]:
    """Every wire format of the library, by name."""
    return dict(_table())


def lookup(function: str, argument: str, name: str) -> FormatInfo:
    formats = _table()
    if not isinstance(name, str) or name not in formats:
        raise invalid(function, argument, " or ".join(f'"{known}"' for known in formats), repr(name))
    return formats[name]


def row_bytes(format: str, hidden: int) -> int:
    """Bytes of one packed row of `hidden` elements."""
    function = "nvte_ep_row_bytes"
    answer = ctypes.c_int64()
    number = lookup(function, "format", format).format
    _lib.call(function, number, integer(function, "hidden", hidden), ctypes.byref(answer))
    return answer.value
