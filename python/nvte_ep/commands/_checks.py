"""Comparisons that count: every check compares what an exchange delivered with what the local codecs make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvte_ep import codecs
from nvte_ep.commands._moe import Addresses
from nvte_ep.commands._numerics import Bytes, Floats, bf16_bits, bf16_values
from nvte_ep.formats import row_bytes
from nvte_ep.operand import PARTS, Operand

CANARY = 0xA5  # what receive buffers hold beforehand: bytes that nobody may write must keep it


@dataclass
class Checks:
    """Passed checks, the bytes that they compared, and a line for each failed one."""

    where: str
    passed: int = 0
    nbytes: int = 0
    failed: list[str] = field(default_factory=list)

    def equal(self, what: str, got: NDArray[Any], expected: NDArray[Any]) -> None:
        """The same type, shape and bytes."""
        if got.shape != expected.shape or got.dtype != expected.dtype:
            self._fail(what, f"expected {expected.dtype} {expected.shape}, got {got.dtype} {got.shape}")
            return
        a = np.ascontiguousarray(got).reshape(-1).view(np.uint8)
        b = np.ascontiguousarray(expected).reshape(-1).view(np.uint8)
        self.nbytes += a.size
        wrong = np.flatnonzero(a != b)
        if wrong.size == 0:
            self.passed += 1
            return
        place = int(wrong[0])
        index = np.unravel_index(place // got.dtype.itemsize, got.shape)
        self._fail(
            what,
            f"{wrong.size} of {a.size} bytes differ, the first in element {[int(i) for i in index]}: "
            f"expected 0x{b[place]:02x}, got 0x{a[place]:02x}",
        )

    def close(self, what: str, got: Floats, expected: Floats, tolerance: NDArray[Any]) -> None:
        """No further apart than the tolerance, element by element."""
        self.nbytes += got.nbytes
        apart = np.abs(got.astype(np.float64) - expected)
        wrong = np.flatnonzero(~(apart <= tolerance))
        if wrong.size == 0:
            self.passed += 1
            return
        place = np.unravel_index(int(wrong[0]), got.shape)
        self._fail(
            what,
            f"{wrong.size} of {got.size} values are further off than rounding explains, the first in element "
            f"{[int(i) for i in place]}: expected {float(expected[place])!r}, got {float(got[place])!r}",
        )

    def true(self, what: str, fact: bool, otherwise: str) -> None:
        if fact:
            self.passed += 1
        else:
            self._fail(what, otherwise)

    def _fail(self, what: str, text: str) -> None:
        self.failed.append(f"{self.where}: {what}: {text}")

    def add(self, other: Checks) -> None:
        self.passed += other.passed
        self.nbytes += other.nbytes
        self.failed += other.failed


@dataclass(frozen=True)
class Sending:
    """How one direction of one run packs its rows."""

    format: str
    rounding: str = "nearest"
    rng_state: NDArray[np.int64] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """For the calls that round: none where the defaults do."""
        if self.rounding == "nearest":
            return {}
        return {"rounding": self.rounding, "rng_state": self.rng_state}


def pack(sending: Sending, tokens: NDArray[Any], *, row_id_base: int = 0, out: Any = None) -> Bytes:
    """Rows by the local codec. A BF16 row is its own definition: the BF16 elements."""
    if sending.format == "bf16":
        bits = tokens if tokens.dtype == np.uint16 else bf16_bits(tokens.astype(np.float32))
        payload = np.ascontiguousarray(bits).view(np.uint8)
        rows = np.zeros((len(tokens), row_bytes("bf16", tokens.shape[1])), np.uint8)
        rows[:, : payload.shape[1]] = payload
        return rows
    options = dict(sending.options)
    if options:
        options["row_id_base"] = row_id_base
    function = getattr(codecs, f"{sending.format}_pack")
    dtype = "bfloat16" if tokens.dtype == np.uint16 else None
    return np.asarray(function(tokens, dtype=dtype, out=out, **options))


def unpack(format: str, rows: Bytes, hidden: int, dtype: str) -> NDArray[Any]:
    """Values of rows by the local codec, float32 or BF16 as uint16."""
    if format == "bf16":
        bits = np.ascontiguousarray(rows[:, : 2 * hidden]).view(np.uint16)
        return bits if dtype == "bfloat16" else bf16_values(bits)
    values = np.asarray(getattr(codecs, f"{format}_unpack")(rows, hidden, dtype=dtype))
    return values.view(np.uint16) if dtype == "bfloat16" else values


def direct_receive(
    sending: Sending, rows: Bytes, rows_per_expert: list[int], like: Operand, rank: int
) -> Operand:
    """The operand by the local codec, in a buffer that held the canary."""
    operand = Operand(
        like.format,
        like.hidden,
        like.capacity,
        like.num_experts,
        alignment=like.alignment,
        columnwise=like.columnwise,
        scale_layout=like.scale_layout,
    )
    fill(operand.bytes)
    options = dict(sending.options)
    if options:
        options["rank"] = rank
    function = getattr(codecs, f"{sending.format}_direct_receive")
    received: Operand = function(rows, like.hidden, rows_per_expert, out=operand, **options)
    return received


def fill(array: Any) -> None:
    """Overwrites every byte of an array of the host with the canary."""
    np.asarray(array).reshape(-1).view(np.uint8).fill(CANARY)


def check_operand(checks: Checks, what: str, got: Operand, expected: Operand) -> None:
    """Every part, byte for byte; the parts end with slots that nobody received: they must still hold the
    canary, as they do in `expected`."""
    for name in PARTS:
        part = getattr(got, name)
        if part is not None:
            checks.equal(f"{what}.{name}", np.asarray(part), np.asarray(getattr(expected, name)))


def sum_of_slots(
    values: list[Floats], weights: list[Floats] | None, places: Addresses
) -> tuple[Floats, Floats]:
    """What combine must give for tokens whose K copies are at these places: the FP32 sum in the order of k,
    and the sum of the magnitudes. `values` [slots, H] and `weights` [slots] have an entry per rank."""
    num_tokens, top_k = places.rank.shape
    total = np.zeros((num_tokens, values[0].shape[1]), np.float32)
    magnitude = np.zeros_like(total)
    for k in range(top_k):
        for rank, source in enumerate(values):
            token = np.flatnonzero(places.rank[:, k] == rank)
            slot = places.slot[token, k]
            term = source[slot]
            if weights is not None:
                term = weights[rank][slot, None] * term
            total[token] += term
            magnitude[token] += np.abs(term)
    return total, magnitude
