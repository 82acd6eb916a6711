# SPDX-License-Identifier: Apache-2.0
"""The operand of a grouped GEMM: every part of it in one buffer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

from nvte_ep import _abi, _lib
from nvte_ep._arguments import boolean, integer
from nvte_ep._dlpack import View, view
from nvte_ep._dtypes import CPU, device_name
from nvte_ep._streams import NO_STREAM
from nvte_ep.array import Array
from nvte_ep.formats import lookup

PARTS = (
    "payload",
    "scales",
    "columnwise_payload",
    "columnwise_scales",
    "amax",
    "columnwise_amax",
    "expert_scale",
    "columnwise_expert_scale",
)
_FLOAT_PARTS = frozenset({"amax", "columnwise_amax", "expert_scale", "columnwise_expert_scale"})


class Part(NamedTuple):
    """Where a part lies in the buffer."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class OperandLayout:
    """Bytes of a buffer for an operand, and where its parts lie; a part that does not exist is not listed."""

    total_bytes: int
    parts: dict[str, Part]


def _config(
    function: str,
    format: str,
    hidden: int,
    capacity: int,
    num_experts: int,
    alignment: int,
    columnwise: bool,
    scale_layout: str,
) -> _abi.OperandConfig:
    return _abi.OperandConfig(
        format=lookup(function, "format", format).format,
        scale_layout=_lib.enum(function, "scale_layout", "NVTE_EP_SCALE_LAYOUT_", scale_layout),
        hidden=integer(function, "hidden", hidden),
        capacity=integer(function, "capacity", capacity),
        num_experts=integer(function, "num_experts", num_experts, 32),
        alignment=integer(function, "alignment", alignment, 32),
        columnwise=boolean(function, "columnwise", columnwise),
    )


def _layout(config: _abi.OperandConfig) -> OperandLayout:
    layout = _abi.OperandLayout()
    _lib.call("nvte_ep_operand_layout", ctypes.byref(config), ctypes.byref(layout))
    parts = {
        name: Part(getattr(layout, f"{name}_offset"), getattr(layout, f"{name}_bytes")) for name in PARTS
    }
    return OperandLayout(layout.total_bytes, {name: part for name, part in parts.items() if part.nbytes})


def operand_layout(
    format: str,
    hidden: int,
    capacity: int,
    num_experts: int,
    *,
    alignment: int = 128,
    columnwise: bool = False,
    scale_layout: str = "swizzled",
) -> OperandLayout:
    """Sizes and offsets of every part of an operand, for who allocates the buffer."""
    function = "nvte_ep_operand_layout"
    return _layout(
        _config(function, format, hidden, capacity, num_experts, alignment, columnwise, scale_layout)
    )


class Operand:
    """Payload and scales of every expert's slab, in the layout that a grouped GEMM reads.

    The parts are arrays over one buffer, the caller's (uint8 [n], aligned to 256 bytes) or one of its own; a
    part that the format or the settings do not have is None. The header, nvte_ep.h, has the layout of each
    part.
    """

    payload: Array | None
    scales: Array | None
    columnwise_payload: Array | None
    columnwise_scales: Array | None
    amax: Array | None
    columnwise_amax: Array | None
    expert_scale: Array | None
    columnwise_expert_scale: Array | None

    def __init__(
        self,
        format: str,
        hidden: int,
        capacity: int,
        num_experts: int,
        *,
        alignment: int = 128,
        columnwise: bool = False,
        scale_layout: str = "swizzled",
        buffer: Any = None,
        device: Any = CPU,
    ) -> None:
        function = "nvte_ep_operand_bind"
        config = _config(function, format, hidden, capacity, num_experts, alignment, columnwise, scale_layout)
        self.layout = _layout(config)
        self.format = format
        self.hidden = config.hidden
        self.capacity = config.capacity
        self.num_experts = config.num_experts
        self.alignment = config.alignment or 128
        self.columnwise = bool(config.columnwise)
        self.scale_layout = scale_layout
        if buffer is None:
            buffer = Array.empty(self.layout.total_bytes, "uint8", device)
        self.buffer = buffer
        found = view(function, "buffer", buffer, stream=NO_STREAM, writable=True, as_bytes=True, lasting=True)
        self.struct = _abi.Operand()
        _lib.call(function, ctypes.byref(config), ctypes.byref(found.tensor), ctypes.byref(self.struct))
        self.bytes = _bytes(buffer, found)
        for name in PARTS:
            setattr(self, name, self._part(name))

    def _part(self, name: str) -> Array | None:
        if name not in self.layout.parts:
            return None
        offset, nbytes = self.layout.parts[name]
        part = self.bytes[offset : offset + nbytes]
        if name in _FLOAT_PARTS:
            return part.view("float32")
        if name == "payload" or (name == "scales" and self.scale_layout == "linear"):
            return part.reshape(
                self.capacity, nbytes // self.capacity
            )  # the rest has no shape without the counts
        return part

    def __repr__(self) -> str:
        return (
            f"Operand({self.format}, hidden={self.hidden}, capacity={self.capacity}, "
            f"num_experts={self.num_experts}, alignment={self.alignment}, columnwise={self.columnwise}, "
            f"scale_layout={self.scale_layout}, device={device_name(self.bytes.device)})"
        )


def _bytes(buffer: Any, found: View) -> Array:
    """The buffer as an Array; arrays cut from a caller's buffer keep it alive."""
    if isinstance(buffer, Array):
        return buffer
    return Array.borrow(found.tensor.data or 0, found.shape[0], found.device, found.tensor.owner)
