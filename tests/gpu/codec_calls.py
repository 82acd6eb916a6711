# SPDX-License-Identifier: Apache-2.0
"""A call of every codec, with what the host backend makes of the same bytes.

The sizes are such that nothing is aligned by accident: H = 288 leaves tiles partly filled, and of three
experts one has no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import nvte_ep
from device_arrays import POISON, STORAGE_NAMES, Typed, typed
from numpy.typing import NDArray
from nvte_ep import Operand, codecs

HIDDEN = 288
COUNTS = (32, 0, 128)
TOKENS = sum(COUNTS)
ALIGNMENT = 32
SEED = (1234567890123, 5)

Put = Callable[[Typed], Any]
Host = Callable[[Any], NDArray[np.uint8]]  # reads the bytes of an array


def tokens(seed: int = 0, count: int = TOKENS, hidden: int = HIDDEN) -> Typed:
    """BF16 of very different magnitude, with zeros, and one token that holds a NaN."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((count, hidden)).astype(np.float32)
    values *= np.exp2(random.integers(-12, 13, (count, 1))).astype(np.float32)
    values[random.random(values.shape) < 0.2] = 0
    if count > 3:
        values[3, 5] = np.nan
    return typed((values.view(np.uint32) >> 16).astype(np.uint16), "bfloat16")


@dataclass
class CodecCall:
    """A function of nvte_ep.codecs. Its arguments are the first of `inputs`, `after`, the other inputs;
    `scalars` are options by value, `arrays` options that are arrays too, `operand` describes the result where
    it is one."""

    function: str
    inputs: list[Typed]
    after: tuple[Any, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Typed] = field(default_factory=dict)
    operand: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        # From outputs that held this byte or that before: where they differ, the host backend writes nothing.
        self.outputs, again = (self._host_outputs(byte) for byte in (POISON, POISON ^ 0xFF))
        self.written = [
            as_bytes(ours.array) == as_bytes(theirs.array)
            for ours, theirs in zip(self.outputs, again, strict=True)
        ]

    def place(self, put: Put) -> list[Any]:
        """The arrays of a call where they are wanted."""
        return [put(array) for array in (*self.inputs, *self.arrays.values())]

    def run(self, placed: list[Any], out: Any = None, stream: Any = None) -> Any:
        """The call with such arrays, into `out` or into arrays of its own."""
        first, *others = placed[: len(self.inputs)]
        options = self.scalars | dict(zip(self.arrays, placed[len(self.inputs) :], strict=True))
        if self.operand is not None and out is None:
            options |= {name: self.operand[name] for name in ("columnwise", "alignment", "scale_layout")}
        if self.inputs[0].dtype == "bfloat16":
            options["dtype"] = "bfloat16"  # for frameworks that have it as uint16
        function = getattr(codecs, self.function)
        return function(first, *self.after, *others, out=out, stream=stream, **options)

    def make_out(self, make: Callable[[tuple[int, ...], str], Any]) -> Any:
        """Arrays to write into, as `out` takes them."""
        if self.operand is not None:
            layout = nvte_ep.operand_layout(**self.operand)
            return Operand(**self.operand, buffer=make((layout.total_bytes,), "uint8"))
        made = tuple(make(part.shape, part.dtype) for part in self.outputs)
        return made if len(made) > 1 else made[0]

    def check(self, result: Any, host: Host, *, poisoned: bool) -> None:
        """The bytes that `host` reads are the host backend's; with poisoned also those that nobody writes."""
        parts = [result.buffer] if isinstance(result, Operand) else result
        parts = parts if isinstance(parts, (list, tuple)) else [parts]
        for index, (part, expected, written) in enumerate(
            zip(parts, self.outputs, self.written, strict=True)
        ):
            got, wanted = host(part), as_bytes(expected.array)
            if not poisoned:
                assert got.size == wanted.size
                got, wanted = got[written], wanted[written]
            same_bytes(f"{self.function}, output {index}", got, wanted)

    def _host_outputs(self, byte: int) -> list[Typed]:
        def copy(host: Typed) -> Any:
            return host.array.copy()

        def make(shape: tuple[int, ...], dtype: str) -> Any:
            array = nvte_ep.Array.empty(shape, dtype)
            array.view("uint8").numpy().fill(byte)
            return array

        if self.operand is None:  # a first call, for the shapes
            made = self.run(self.place(copy))
            parts = made if isinstance(made, tuple) else (made,)
            self.outputs = [Typed(np.empty(part.shape), part.dtype) for part in parts]
        result = self.run(self.place(copy), self.make_out(make))
        if isinstance(result, Operand):
            return [typed(result.bytes.numpy())]
        parts = result if isinstance(result, tuple) else (result,)
        return [Typed(part.view(STORAGE_NAMES[part.dtype]).numpy(), part.dtype) for part in parts]


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def same_bytes(what: str, got: NDArray[Any], expected: NDArray[Any]) -> None:
    a, b = as_bytes(got), as_bytes(expected)
    assert a.size == b.size, f"{what}: {a.size} bytes, expected {b.size}"
    wrong = np.flatnonzero(a != b)
    assert wrong.size == 0, (
        f"{what}: {wrong.size} of {a.size} bytes differ, the first at {wrong[0]}: "
        f"expected 0x{b[wrong[0]]:02x}, got 0x{a[wrong[0]]:02x}"
    )


def receive(format: str, rows: Typed, columnwise: bool, **fields: Any) -> CodecCall:
    """direct_receive of all slots."""
    operand = {
        "format": format,
        "hidden": HIDDEN,
        "capacity": TOKENS,
        "num_experts": len(COUNTS),
        "alignment": ALIGNMENT,
        "columnwise": columnwise,
        "scale_layout": "swizzled",
    }
    counts = typed(np.array(COUNTS, np.int32))
    return CodecCall(f"{format}_direct_receive", [rows, counts], (HIDDEN,), operand=operand, **fields)


def calls(seed: int = 0) -> dict[str, CodecCall]:
    """Every codec, and its options that are arrays on the device."""
    made: dict[str, CodecCall] = {}
    x = tokens(seed)
    counts = typed(np.array(COUNTS, np.int64))
    state = {"rng_state": typed(np.array(SEED, np.int64))}
    stochastic = {"rounding": "stochastic", "scale_rounding": "up"}
    for format in ("nvfp4", "mxfp8"):
        made[f"{format}_pack"] = pack = CodecCall(f"{format}_pack", [x])
        (rows,) = pack.outputs
        made[f"{format}_unpack"] = CodecCall(f"{format}_unpack", [rows], (HIDDEN,))
        made[f"{format}_quantize"] = quantize = CodecCall(f"{format}_quantize", [x])
        made[f"{format}_dequantize"] = CodecCall(f"{format}_dequantize", quantize.outputs)
        made[f"{format}_direct_receive"] = receive(format, rows, False)
        made[f"{format}_direct_receive columnwise"] = receive(format, rows, True)
        scales = quantize.outputs[1]
        made[f"scales_swizzle {format}"] = swizzle = CodecCall("scales_swizzle", [scales])
        made[f"scales_unswizzle {format}"] = CodecCall("scales_unswizzle", swizzle.outputs, scales.shape)
        made[f"scales_swizzle by expert {format}"] = swizzle = CodecCall("scales_swizzle", [scales, counts])
        made[f"scales_unswizzle by expert {format}"] = CodecCall(
            "scales_unswizzle", [*swizzle.outputs, counts], scales.shape
        )
    rows = made["nvfp4_pack"].outputs[0]
    made["nvfp4_pack stochastic"] = CodecCall(
        "nvfp4_pack", [x], scalars=stochastic | {"row_id_base": 7}, arrays=state
    )
    made["nvfp4_direct_receive stochastic"] = receive(
        "nvfp4", rows, True, scalars=stochastic | {"rank": 3}, arrays=state
    )
    scale = typed(np.array([2.0**3], np.float32))
    made["nvfp4_pack tensor_scale"] = CodecCall("nvfp4_pack", [x], arrays={"tensor_scale": scale})
    some = typed(np.array([TOKENS - 50], np.int32))
    made["nvfp4_pack row_count"] = CodecCall("nvfp4_pack", [x], arrays={"row_count": some})
    made["mxfp8_unpack row_count"] = CodecCall(
        "mxfp8_unpack", made["mxfp8_pack"].outputs, (HIDDEN,), arrays={"row_count": some}
    )
    fixed = typed(np.array([2.0**6, 1, 2.0**9], np.float32))
    made["nvfp4_direct_receive fixed_expert_scale"] = receive(
        "nvfp4", rows, True, arrays={"fixed_expert_scale": fixed}
    )
    return made


NAMES = list(calls())
