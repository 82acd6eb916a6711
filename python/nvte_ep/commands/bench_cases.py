"""The codecs of `nvte-ep bench codecs`: what each is called with, the fewest bytes it must move, and how what
it wrote is compared with the host backend.

Sizes in the formulas, in bytes a token: 2H the BF16 elements, P the payload, S the scales, R the packed row
with its padding, r without it (P + S, and 4 for NVFP4's token scale).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvte_ep import codecs
from nvte_ep.array import Array
from nvte_ep.commands._checks import Checks
from nvte_ep.commands._numerics import bf16_bits
from nvte_ep.commands.bench_machine import Call, Machine
from nvte_ep.formats import FormatInfo, format_info, row_bytes
from nvte_ep.operand import Operand, operand_layout

FORMATS = ("nvfp4", "mxfp8")
BLOCK_TOKENS = 4093  # prime: tokens that a wrong offset confuses are not the same token by accident
EXPERTS = 64
SEED, OFFSET = 20261130, 7  # of stochastic rounding
SAMPLED_TOKENS = 8
SAMPLED_PARTS = 3  # sets of buffers, experts, bands of tiles: first, last and one more


@dataclass(frozen=True)
class Moved:
    """The fewest bytes that one call can move: each input read once, each output written."""

    reads: int
    writes: int

    @property
    def total(self) -> int:
        return self.reads + self.writes


class Data:
    """Inputs: a block of tokens, repeated to fill larger arrays, and what the host backend makes of it."""

    def __init__(self, hidden: int, tokens: int = BLOCK_TOKENS, seed: int = 0) -> None:
        self.hidden = hidden
        self.num_tokens = min(tokens, BLOCK_TOKENS)
        self.rng = np.random.default_rng(seed)

    @functools.cached_property
    def tokens(self) -> NDArray[np.uint16]:
        """BF16: Gaussian elements, tokens of different magnitude, and a few channels far above the others."""
        values = self.rng.standard_normal((self.num_tokens, self.hidden), np.float32)
        values *= np.exp2(self.rng.integers(-4, 5, (self.num_tokens, 1))).astype(np.float32)
        values[:, self.rng.integers(0, self.hidden, max(self.hidden // 512, 1))] *= 64
        return bf16_bits(values)

    @functools.cached_property
    def rows(self) -> dict[str, NDArray[np.uint8]]:
        """Packed rows, by format."""
        return {
            format: host_bytes(getattr(codecs, f"{format}_pack")(self.tokens, dtype="bfloat16"))
            for format in FORMATS
        }

    @functools.cached_property
    def apart(self) -> dict[str, tuple[NDArray[np.uint8], ...]]:
        """Payload, scales and, for NVFP4, token scales, by format."""
        return {
            format: tuple(
                host_bytes(part)
                for part in getattr(codecs, f"{format}_quantize")(self.tokens, dtype="bfloat16")
            )
            for format in FORMATS
        }

    def block(self, format: str, part: str) -> NDArray[Any]:
        """The block of an input by its name."""
        if part == "tokens":
            return self.tokens
        if part == "rows":
            return self.rows[format]
        return self.apart[format][("payload", "scales", "token_scales").index(part)]


def host_bytes(array: Array) -> NDArray[np.uint8]:
    """The bytes of a host array, row by row."""
    found = array.view("uint8").numpy()
    return found.reshape(array.shape[0], -1) if array.shape[0] else found


def sample(count: int, most: int, rng: np.random.Generator) -> list[int]:
    """The first, the last, and random ones between."""
    chosen = {0, count - 1, *(int(i) for i in rng.integers(0, count, max(most - 2, 0)))}
    return sorted(chosen)


@dataclass(frozen=True)
class Part:
    """One array of a codec: elements a token, or None for one and no dimension of its own."""

    name: str
    dtype: str
    width: int | None
    used: int  # bytes a token that must move

    @property
    def nbytes(self) -> int:
        return (self.width or 1) * {"bfloat16": 2, "float32": 4, "uint8": 1}[self.dtype]

    def shape(self, sets: int, tokens: int) -> tuple[int, ...]:
        return (sets, tokens) if self.width is None else (sets, tokens, self.width)


class Run(abc.ABC):
    """A case with its buffers: one call for each set of them."""

    calls: list[Call]

    @abc.abstractmethod
    def check(self, checks: Checks, rng: np.random.Generator) -> None:
        """Compares a sample of what the calls wrote with the host backend's bytes."""


class Case(abc.ABC):
    """A codec with its options."""

    name: str
    format: str
    formula: str  # of the fewest bytes

    @abc.abstractmethod
    def moved(self, tokens: int, hidden: int) -> Moved:
        """The fewest bytes of a call."""

    @abc.abstractmethod
    def held(self, tokens: int, hidden: int) -> int:
        """Bytes of one set of buffers."""

    @abc.abstractmethod
    def start(self, machine: Machine, data: Data, tokens: int, sets: int) -> Run:
        """Makes the buffers."""

    def sizes(self, sizes: Sequence[int], hidden: int) -> list[int]:
        """The sizes that this codec is measured at, when asked for these."""
        return list(sizes)

    @property
    def info(self) -> FormatInfo:
        return format_info()[self.format]

    def payload_bytes(self, hidden: int) -> int:
        return hidden * self.info.payload_bits // 8

    def scale_bytes(self, hidden: int) -> int:
        return hidden // self.info.block * self.info.scale_bytes

    def used_row_bytes(self, hidden: int) -> int:
        """A packed row without its padding."""
        return self.payload_bytes(hidden) + self.scale_bytes(hidden) + self.info.token_scale_bytes


# ---- token by token: pack, unpack, quantize, dequantize ------------------------------------------------


class RowCase(Case):
    """A codec whose output for a token depends on that token alone."""

    def __init__(self, format: str, verb: str, stochastic: bool = False) -> None:
        self.format, self.verb, self.stochastic = format, verb, stochastic
        self.name = f"{format}_{verb}" + (" stochastic" if stochastic else "")
        token_scale = " + 4" if self.info.token_scale_bytes else ""
        self.formula = {
            "pack": "T (2H + R)",
            "unpack": "T (r + 2H)",
            "quantize": f"T (2H + P + S{token_scale})",
            "dequantize": f"T (P + S{token_scale} + 2H)",
        }[verb]

    def _parts(self, hidden: int) -> tuple[list[Part], list[Part]]:
        payload, scales = self.payload_bytes(hidden), self.scale_bytes(hidden)
        tokens = [Part("tokens", "bfloat16", hidden, 2 * hidden)]
        apart = [Part("payload", "uint8", payload, payload), Part("scales", "uint8", scales, scales)]
        if self.info.token_scale_bytes:
            apart.append(Part("token_scales", "float32", None, 4))
        width = row_bytes(self.format, hidden)
        return {
            "pack": (tokens, [Part("rows", "uint8", width, width)]),
            "unpack": ([Part("rows", "uint8", width, self.used_row_bytes(hidden))], tokens),
            "quantize": (tokens, apart),
            "dequantize": (apart, tokens),
        }[self.verb]

    def moved(self, tokens: int, hidden: int) -> Moved:
        inputs, outputs = self._parts(hidden)
        return Moved(*(tokens * sum(part.used for part in parts) for parts in (inputs, outputs)))

    def held(self, tokens: int, hidden: int) -> int:
        inputs, outputs = self._parts(hidden)
        return tokens * sum(part.nbytes for part in inputs + outputs)

    def start(self, machine: Machine, data: Data, tokens: int, sets: int) -> RowRun:
        return RowRun(self, machine, data, tokens, sets)

    def function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(codecs, f"{self.format}_{self.verb}")
        return function


class RowRun(Run):
    def __init__(self, case: RowCase, machine: Machine, data: Data, tokens: int, sets: int) -> None:
        self.case, self.machine, self.tokens, self.sets = case, machine, tokens, sets
        self.hidden = data.hidden
        self.input_parts, self.output_parts = case._parts(data.hidden)
        self.inputs = [
            machine.filled(part.shape(sets, tokens), part.dtype, data.block(case.format, part.name))
            for part in self.input_parts
        ]
        self.outputs = [machine.poisoned(part.shape(sets, tokens), part.dtype) for part in self.output_parts]
        self.options: dict[str, Any] = {}
        if case.stochastic:
            state = machine.filled((2,), "int64", np.array([SEED, OFFSET], np.int64))
            self.options = {"rounding": "stochastic", "rng_state": state}
        self.calls = [self._call(index) for index in range(sets)]

    def _call(self, index: int) -> Call:
        inputs: list[Any] = [slab[index] for slab in self.inputs]
        outputs = tuple(slab[index] for slab in self.outputs)
        if self.case.verb == "unpack":
            inputs.append(self.hidden)
        return functools.partial(
            self.case.function(),
            *inputs,
            out=outputs if len(outputs) > 1 else outputs[0],
            stream=self.machine.stream,
            **self.options,
        )

    def reference(self, token: int, inputs: list[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        """What the host backend makes of one token, given as the bytes of its parts."""
        given: list[Any] = [
            part.view({"bfloat16": "u2", "float32": "f4", "uint8": "u1"}[of.dtype]).reshape(
                (1,) if of.width is None else (1, -1)
            )
            for part, of in zip(inputs, self.input_parts, strict=True)
        ]
        options: dict[str, Any] = {}
        if self.case.verb == "unpack":
            given.append(self.hidden)
        if self.case.verb in ("pack", "quantize"):
            options["dtype"] = "bfloat16"
        if self.case.stochastic:
            options |= {"rounding": "stochastic", "rng_state": (SEED, OFFSET), "row_id_base": token}
        made = self.case.function()(*given, **options)
        return [host_bytes(part).reshape(-1) for part in (made if isinstance(made, tuple) else (made,))]

    def check(self, checks: Checks, rng: np.random.Generator) -> None:
        for index in sample(self.sets, SAMPLED_PARTS, rng):
            for token in sample(self.tokens, SAMPLED_TOKENS, rng):
                inputs = [self.machine.read(slab[index, token : token + 1]) for slab in self.inputs]
                expected = self.reference(token, inputs)
                for part, slab, wanted in zip(self.output_parts, self.outputs, expected, strict=True):
                    got = self.machine.read(slab[index, token : token + 1])
                    checks.equal(f"buffers {index}, token {token}, {part.name}", got, wanted)


# ---- slab by slab: direct_receive ----------------------------------------------------------------------


@dataclass(frozen=True)
class Slab:
    """An expert's rows among all, and where its part of an operand part lies."""

    first: int  # row
    rows: int
    ranges: dict[str, tuple[int, int]]  # part -> first byte and bytes, padding of its tiles included


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


class ReceiveCase(Case):
    """Packed rows to the operand of a grouped GEMM, scales in 128x4 tiles."""

    def __init__(self, format: str, columnwise: bool) -> None:
        self.format, self.columnwise = format, columnwise
        self.name = f"{format}_direct_receive" + (" + columnwise" if columnwise else "")
        self.formula = "T (r + 2P + 2S)" if columnwise else "T (r + P + S)"

    def alignment(self, slots: int) -> int:
        least = self.info.columnwise_alignment if self.columnwise else 16
        return 128 if slots >= 128 else least

    def sizes(self, sizes: Sequence[int], hidden: int) -> list[int]:
        """Whole slabs."""
        rounded = (_up(size, self.alignment(size)) for size in sizes)
        return list(dict.fromkeys(rounded))

    def counts(self, slots: int) -> list[int]:
        """rows_per_expert: as even as whole alignments can be."""
        step = self.alignment(slots)
        blocks = slots // step
        experts = min(EXPERTS, blocks)
        return [(blocks // experts + (expert < blocks % experts)) * step for expert in range(experts)]

    def slabs(self, counts: Sequence[int], hidden: int) -> list[Slab]:
        payload, block = self.payload_bytes(hidden), self.info.block
        columns = _up(self.scale_bytes(hidden), 4)
        slabs = []
        first = tile_row = 0
        for expert, rows in enumerate(counts):
            ranges = {
                "payload": (first * payload, rows * payload),
                "scales": (tile_row * columns, _up(rows, 128) * columns),
            }
            directions = ["", "columnwise_"] if self.columnwise else [""]
            if self.columnwise:
                ranges["columnwise_payload"] = (first * payload, rows * payload)
                height = _up(hidden, 128)
                ranges["columnwise_scales"] = (tile_row // block * height, _up(rows // block, 4) * height)
            if self.info.token_scale_bytes:
                for direction in directions:
                    for name in ("amax", "expert_scale"):
                        ranges[direction + name] = (expert * 4, 4)
            slabs.append(Slab(first, rows, ranges))
            first += rows
            tile_row += _up(rows, 128)
        return slabs

    def moved(self, tokens: int, hidden: int) -> Moved:
        slabs = self.slabs(self.counts(tokens), hidden)
        written = sum(nbytes for slab in slabs for _, nbytes in slab.ranges.values())
        return Moved(tokens * self.used_row_bytes(hidden), written)

    def _operand_bytes(self, tokens: int, hidden: int) -> int:
        layout = operand_layout(
            self.format,
            hidden,
            tokens,
            len(self.counts(tokens)),
            alignment=self.alignment(tokens),
            columnwise=self.columnwise,
        )
        return _up(layout.total_bytes, 256)

    def held(self, tokens: int, hidden: int) -> int:
        return tokens * row_bytes(self.format, hidden) + self._operand_bytes(tokens, hidden)

    def start(self, machine: Machine, data: Data, tokens: int, sets: int) -> ReceiveRun:
        return ReceiveRun(self, machine, data, tokens, sets)

    def function(self) -> Callable[..., Operand]:
        function: Callable[..., Operand] = getattr(codecs, f"{self.format}_direct_receive")
        return function


class ReceiveRun(Run):
    def __init__(self, case: ReceiveCase, machine: Machine, data: Data, tokens: int, sets: int) -> None:
        self.case, self.machine, self.sets, self.tokens = case, machine, sets, tokens
        self.hidden = hidden = data.hidden
        counts = case.counts(tokens)
        self.slabs = case.slabs(counts, hidden)
        self.alignment = case.alignment(tokens)
        self.rows = machine.filled(
            (sets, tokens, row_bytes(case.format, hidden)), "uint8", data.rows[case.format]
        )
        self.counts = machine.filled((len(counts),), "int64", np.array(counts, np.int64))
        buffers = machine.poisoned((sets, case._operand_bytes(tokens, hidden)), "uint8")
        self.operands = [
            Operand(
                case.format,
                hidden,
                tokens,
                len(counts),
                alignment=self.alignment,
                columnwise=case.columnwise,
                buffer=buffers[index],
            )
            for index in range(sets)
        ]
        self.calls = [
            functools.partial(
                case.function(),
                self.rows[index],
                hidden,
                self.counts,
                out=self.operands[index],
                stream=machine.stream,
            )
            for index in range(sets)
        ]

    def check(self, checks: Checks, rng: np.random.Generator) -> None:
        for index in sample(self.sets, 2, rng):
            operand = self.operands[index]
            for expert in sample(len(self.slabs), SAMPLED_PARTS, rng):
                slab = self.slabs[expert]
                rows = self.machine.read(self.rows[index, slab.first : slab.first + slab.rows])
                alone = self.case.function()(
                    rows.reshape(slab.rows, -1),
                    self.hidden,
                    [slab.rows],
                    columnwise=self.case.columnwise,
                    alignment=self.alignment,
                )
                for name, (start, nbytes) in slab.ranges.items():
                    offset = operand.layout.parts[name].offset + start
                    got = self.machine.read(operand.bytes[offset : offset + nbytes])
                    offset = alone.layout.parts[name].offset
                    wanted = host_bytes(alone.bytes[offset : offset + nbytes]).reshape(-1)
                    checks.equal(f"buffers {index}, expert {expert}, {name}", got, wanted)


# ---- scales_swizzle, scales_unswizzle ------------------------------------------------------------------


class SwizzleCase(Case):
    """Compact scales of T tokens to 128x4 tiles, or back."""

    def __init__(self, format: str, inverse: bool) -> None:
        self.format, self.inverse = format, inverse
        self.name = f"scales_{'un' if inverse else ''}swizzle {format}"
        self.formula = "2 T S"

    def sizes(self, sizes: Sequence[int], hidden: int) -> list[int]:
        """And one more, at which the scales are as many bytes as the BF16 elements of the largest size."""
        return [*sizes, max(sizes) * 2 * hidden // self.scale_bytes(hidden)]

    def tiled_bytes(self, tokens: int, hidden: int) -> int:
        return _up(tokens, 128) * _up(self.scale_bytes(hidden), 4)

    def moved(self, tokens: int, hidden: int) -> Moved:
        compact = tokens * self.scale_bytes(hidden)
        # Unswizzle need not read the padding of the tiles; swizzle must write it.
        return Moved(compact, compact if self.inverse else self.tiled_bytes(tokens, hidden))

    def held(self, tokens: int, hidden: int) -> int:
        return tokens * self.scale_bytes(hidden) + self.tiled_bytes(tokens, hidden)

    def start(self, machine: Machine, data: Data, tokens: int, sets: int) -> SwizzleRun:
        return SwizzleRun(self, machine, data, tokens, sets)


class SwizzleRun(Run):
    def __init__(self, case: SwizzleCase, machine: Machine, data: Data, tokens: int, sets: int) -> None:
        self.case, self.machine, self.sets, self.tokens = case, machine, sets, tokens
        self.columns = case.scale_bytes(data.hidden)
        compact, tiled = (sets, tokens, self.columns), (sets, case.tiled_bytes(tokens, data.hidden))
        # Any bytes are scales; a prime number of them, so that neither rows nor tiles repeat soon.
        noise = data.rng.integers(0, 256, 1_299_709, np.uint8)
        if case.inverse:
            self.tiled = machine.filled(tiled, "uint8", noise)
            self.compact = machine.poisoned(compact, "uint8")
        else:
            self.compact = machine.filled(compact, "uint8", noise)
            self.tiled = machine.poisoned(tiled, "uint8")
        self.calls = [self._call(index) for index in range(sets)]

    def _call(self, index: int) -> Call:
        compact, tiled, stream = self.compact[index], self.tiled[index], self.machine.stream
        if self.case.inverse:
            return functools.partial(
                codecs.scales_unswizzle, tiled, self.tokens, self.columns, out=compact, stream=stream
            )
        return functools.partial(codecs.scales_swizzle, compact, out=tiled, stream=stream)

    def check(self, checks: Checks, rng: np.random.Generator) -> None:
        band_bytes = 128 * _up(self.columns, 4)  # of 128 rows
        for index in sample(self.sets, SAMPLED_PARTS, rng):
            for band in sample(-(-self.tokens // 128), SAMPLED_PARTS, rng):
                first, last = band * 128, min(band * 128 + 128, self.tokens)
                compact = self.machine.read(self.compact[index, first:last]).reshape(-1, self.columns)
                tiled = self.machine.read(self.tiled[index, band * band_bytes : (band + 1) * band_bytes])
                what = f"buffers {index}, rows {first} to {last}"
                if self.case.inverse:
                    wanted = codecs.scales_unswizzle(tiled, last - first, self.columns)
                    checks.equal(what, compact, host_bytes(wanted))
                else:
                    checks.equal(what, tiled, host_bytes(codecs.scales_swizzle(compact)).reshape(-1))


def all_cases() -> list[Case]:
    """Every codec of the library, in the order of the report."""
    cases: list[Case] = []
    for format in FORMATS:
        cases.append(RowCase(format, "pack"))
        if format == "nvfp4":
            cases.append(RowCase(format, "pack", stochastic=True))
        cases += [RowCase(format, verb) for verb in ("unpack", "quantize", "dequantize")]
        cases += [ReceiveCase(format, columnwise) for columnwise in (False, True)]
    cases += [SwizzleCase(format, inverse) for format in FORMATS for inverse in (False, True)]
    return cases
