"""The shapes and operations of `nvte-ep bench ep`, their inputs, what they must give and the fewest bytes
that they can move.

Inputs follow from numbers (rank, set of buffers), so that every rank knows those of all others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvte_ep.commands._checks import Sending, pack
from nvte_ep.commands._numerics import Bytes, Floats, Ints, bf16_bits, bf16_values
from nvte_ep.commands.bench_cases import ReceiveCase
from nvte_ep.formats import row_bytes
from nvte_ep.operand import Operand

BLOCK = 509  # prime: tokens that a wrong offset confuses are not the same token by accident
ID_BITS = 32  # elements of a token whose signs tell rank, set and token
SEED, OFFSET = 20261130, 7  # of stochastic rounding


@dataclass(frozen=True)
class Shape:
    """An MoE layer as one rank sees it."""

    tokens: int
    hidden: int
    top_k: int
    experts: int
    alignment: int

    @property
    def name(self) -> str:
        return (
            f"T {self.tokens}, H {self.hidden}, K {self.top_k}, E {self.experts}, alignment {self.alignment}"
        )


@dataclass(frozen=True)
class Operation:
    """A row of the report.

    verb: prepare, dispatch, combine, the two backwards, or "step" for whole steps of a small batch. wire:
    the format that travels. given, receive: what goes in and what comes out of a dispatch.
    """

    verb: str
    wire: str = "bf16"
    given: str = "tokens"
    receive: str = "decoded"
    columnwise: bool = False
    stochastic: bool = False
    combine: bool = False  # of a step: the combine too

    @property
    def key(self) -> str:
        if self.verb == "prepare":
            return "prepare"
        if self.verb in ("combine", "dispatch_backward"):
            return f"{self.verb} {self.wire}"
        if self.verb == "step":
            return f"step {self.wire} dispatch{' + combine' if self.combine else ''}"
        what = f"{self.receive}{' + columns' if self.columnwise else ''}"
        source = "" if self.given == "tokens" else "packed "
        rounding = " stochastic" if self.stochastic else ""
        return f"{self.verb} {self.wire}{rounding} {source}-> {what}"

    @property
    def principal(self) -> bool:
        """Of the forward pass, in the kinds that its consumers want."""
        if self.verb in ("prepare", "combine"):
            return self.wire == "bf16"
        as_it_came = self.given == "packed" and self.receive == "rows"
        to_experts = self.given == "tokens" and (self.receive == "operand" or self.wire == "bf16")
        return self.verb == "dispatch" and (as_it_came or to_experts)

    @property
    def sends(self) -> bool:
        """Each token goes to its slots; otherwise slots are summed."""
        return self.verb in ("dispatch", "combine_backward", "step")


def operations() -> list[Operation]:
    """In the order of the report."""
    found = [Operation("prepare"), Operation("dispatch", "bf16", receive="decoded")]
    for wire in ("mxfp8", "nvfp4"):
        found += [
            Operation("dispatch", wire, given="packed", receive="rows"),
            Operation("dispatch", wire, receive="rows"),
            Operation("dispatch", wire, receive="decoded"),
            Operation("dispatch", wire, given="packed", receive="operand"),
            Operation("dispatch", wire, receive="operand"),
            Operation("dispatch", wire, receive="operand", columnwise=True),
        ]
    found += [
        Operation("combine", "bf16"),
        Operation("combine", "mxfp8"),
        Operation("combine_backward", "bf16", receive="decoded"),
        Operation("combine_backward", "mxfp8", receive="operand", columnwise=True),
        Operation("combine_backward", "nvfp4", receive="operand", columnwise=True, stochastic=True),
        Operation("dispatch_backward", "bf16"),
        Operation("dispatch_backward", "mxfp8"),
    ]
    return found


def step_operations() -> list[Operation]:
    """Whole steps of a small batch, prepare included."""
    return [
        Operation("step", "nvfp4", receive="operand"),
        Operation("step", "nvfp4", receive="operand", combine=True),
        Operation("step", "bf16", receive="decoded", combine=True),
    ]


# ---- inputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routed:
    """What a rank receives, by rule: experts in order, in each the tokens by rank and index, then padding."""

    source_rank: Ints  # [slots], -1 for padding
    source_token: Ints
    rows_per_expert: list[int]

    @property
    def slots(self) -> int:
        return len(self.source_rank)

    @property
    def kept(self) -> NDArray[np.bool_]:
        return self.source_rank >= 0

    @property
    def slot_source(self) -> Ints:
        return np.where(self.kept, self.source_rank << 32 | self.source_token, -1)

    def rows_from_peers(self, rank: int) -> int:
        """Rows that must cross to this rank: each token once, however many of its experts live here."""
        sources = self.slot_source[self.kept]
        return int(np.count_nonzero(np.unique(sources) >> 32 != rank))


class Data:
    """Inputs of all ranks for one shape."""

    def __init__(self, shape: Shape, ranks: int, routings: int = 2) -> None:
        self.shape, self.ranks, self.routings = shape, ranks, routings
        self.block = functools.lru_cache(maxsize=64)(self._block)
        self.stochastic_operand = functools.lru_cache(maxsize=2)(self._stochastic_operand)
        self.routed = functools.cache(self._routed)
        self.topk = functools.cache(self._topk)

    def _topk(self, rank: int, routing: int = 0) -> Ints:
        """Uniform: every set of K experts is as likely as any other, in any order."""
        shape = self.shape
        rng = np.random.default_rng([1, rank, routing])
        chosen = np.argpartition(rng.random((shape.tokens, shape.experts), np.float32), shape.top_k - 1)
        return np.ascontiguousarray(chosen[:, : shape.top_k], np.int64)

    def weights(self, rank: int) -> Floats:
        """Of different sizes, so that a weight in the wrong slot shows."""
        rng = np.random.default_rng([2, rank])
        values: Floats = rng.random((self.shape.tokens, self.shape.top_k), np.float32) + np.float32(0.5)
        return values

    def tokens(self, rank: int, index: int, which: Ints | None = None) -> NDArray[np.uint16]:
        """BF16 [T, H], or some of them: Gaussian elements, tokens of different magnitude, a few channels far
        above the others. The signs of the first elements tell rank, set and token."""
        number = np.arange(self.shape.tokens) if which is None else which
        tokens = self.block(3, rank, index)[number % BLOCK]
        name = number | rank << 20 | index << 28
        signs = (name[:, None] >> np.arange(ID_BITS) & 1).astype(np.uint16) << 15
        tokens[:, :ID_BITS] = tokens[:, :ID_BITS] & 0x7FFF | signs
        return tokens

    def slot_block(self, rank: int, index: int) -> NDArray[np.uint16]:
        """BF16 [BLOCK, H]: slot i of combine's input holds row i modulo BLOCK."""
        return self.block(4, rank, index)

    def slot_grads(self, rank: int) -> Floats:
        """FP32 [slots]: of the weights that came with the slots."""
        rng = np.random.default_rng([5, rank])
        values: Floats = rng.random(self.capacity, np.float32) + np.float32(0.5)
        return values

    def _block(self, *key: int) -> NDArray[np.uint16]:
        rng = np.random.default_rng(key)
        values = rng.standard_normal((BLOCK, self.shape.hidden), np.float32)
        values *= np.exp2(rng.integers(-4, 5, (BLOCK, 1))).astype(np.float32)
        # The signs of the first elements must survive every format.
        some = rng.integers(ID_BITS, self.shape.hidden, max(self.shape.hidden // 512, 1))
        values[:, some] *= 64
        first = values[:, :ID_BITS].reshape(BLOCK, -1, 16)
        least = np.abs(first).max(axis=2, keepdims=True) / 8
        values[:, :ID_BITS] = np.where(np.abs(first) < least, least, first).reshape(BLOCK, ID_BITS)
        return bf16_bits(values)

    def packed(self, rank: int, index: int, wire: str, *, stochastic: bool = False) -> Bytes:
        """The packed rows of a rank's tokens, by the host backend."""
        sending = Sending(wire, "stochastic", np.array([SEED, OFFSET])) if stochastic else Sending(wire)
        return pack(sending, self.tokens(rank, index), row_id_base=rank * self.shape.tokens)

    def _routed(self, rank: int, routing: int = 0) -> Routed:
        shape = self.shape
        local = shape.experts // self.ranks
        topk = np.stack([self.topk(source, routing) for source in range(self.ranks)])
        experts = topk - rank * local
        source, token, _ = np.nonzero((experts >= 0) & (experts < local))
        expert = experts[(experts >= 0) & (experts < local)]
        order = np.argsort(expert, kind="stable")  # (source, token) is their order already
        counts = np.bincount(expert, minlength=local)
        rows = -(-counts // shape.alignment) * shape.alignment
        starts = np.cumsum(rows) - rows
        slot = np.repeat(starts, counts) + np.concatenate([np.arange(count) for count in counts])
        source_rank = np.full(int(rows.sum()), -1)
        source_token = np.zeros_like(source_rank)
        source_rank[slot] = source[order]
        source_token[slot] = token[order]
        return Routed(source_rank, source_token, rows.tolist())

    @functools.cached_property
    def capacity(self) -> int:
        """Slots that any rank needs for any of the routings, and one unit that nobody may touch."""
        most = max(
            self.routed(rank, routing).slots for rank in range(self.ranks) for routing in range(self.routings)
        )
        return most + self.shape.alignment

    # ---- what must come out ------------------------------------------------------------------------------

    def rows_at_slots(
        self, rank: int, index: int, wire: str, slots: slice, *, stochastic: bool = False
    ) -> Bytes:
        """Packed rows at some slots of a rank; zeros where there is padding."""
        routed = self.routed(rank)
        source, token = routed.source_rank[slots], routed.source_token[slots]
        rows = np.zeros((len(source), row_bytes(wire, self.shape.hidden)), np.uint8)
        for sender in np.unique(source[source >= 0]):
            here = source == sender
            if stochastic:  # what a token draws depends on its place among the tokens
                rows[here] = self.packed(int(sender), index, wire, stochastic=True)[token[here]]
            else:
                rows[here] = pack(Sending(wire), self.tokens(int(sender), index, token[here]))
        return rows

    def _stochastic_operand(
        self, rank: int, index: int, wire: str, columnwise: bool, experts: int
    ) -> Operand:
        """What a rank's first experts receive when rounding is stochastic."""
        counts = self.routed(rank).rows_per_expert[:experts]
        rows = self.rows_at_slots(rank, index, wire, slice(0, sum(counts)), stochastic=True)
        options: dict[str, Any] = {"rounding": "stochastic", "rng_state": (SEED, OFFSET), "rank": rank}
        return receive_on_host(
            rows, self.shape.hidden, counts, wire, columnwise, self.shape.alignment, **options
        )

    def weights_at_slots(self, rank: int) -> Floats:
        routed = self.routed(rank)
        values = np.zeros(routed.slots, np.float32)
        local = self.shape.experts // self.ranks
        expert = np.repeat(np.arange(local), routed.rows_per_expert) + rank * local
        for sender in range(self.ranks):
            slot = np.flatnonzero(routed.source_rank == sender)
            token = routed.source_token[slot]
            k = np.argmax(self.topk(sender)[token] == expert[slot, None], axis=1)
            values[slot] = self.weights(sender)[token, k]
        return values

    def sums(self, rank: int, index: int, tokens: Ints) -> tuple[Floats, Floats]:
        """What combine must give for some tokens of a rank, and the sum of the magnitudes."""
        total = np.zeros((len(tokens), self.shape.hidden), np.float32)
        magnitude = np.zeros_like(total)
        for place, token in enumerate(tokens):
            for expert_rank, slot in self.slots_of(rank, int(token)):
                term = bf16_values(self.slot_block(expert_rank, index)[slot % BLOCK])
                total[place] += term
                magnitude[place] += np.abs(term)
        return total, magnitude

    def slots_of(self, rank: int, token: int) -> list[tuple[int, int]]:
        """(rank, slot) of a token's copies, in the order of its experts' numbers."""
        found = []
        for expert_rank in range(self.ranks):
            routed = self.routed(expert_rank)
            here = (routed.source_rank == rank) & (routed.source_token == token)
            found += [(expert_rank, int(slot)) for slot in np.flatnonzero(here)]
        return found


def receive_on_host(
    rows: Bytes, hidden: int, rows_per_expert: list[int], wire: str, columnwise: bool, alignment: int,
    **options: Any,
) -> Operand:  # fmt: skip
    """The operand of packed rows, by the host backend."""
    return ReceiveCase(wire, columnwise).function()(
        rows, hidden, rows_per_expert, columnwise=columnwise, alignment=alignment, **options
    )


# ---- the fewest bytes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Floor:
    """The fewest bytes that a rank must move for an operation: through its memory, and in over the link (as
    many go out)."""

    memory_bytes: int
    link_bytes: int

    def microseconds(self, memory_gbps: float, link_gbps: float) -> float:
        return max(self.memory_bytes / memory_gbps, self.link_bytes / link_gbps) / 1e3


def sum_bytes(hidden: int, tokens: int, rows: int) -> int:
    """Of memory for a combine or a dispatch backward: the BF16 rows of the slots read, the sums of the tokens
    written. Padding belongs to no token: it is not read."""
    return 2 * hidden * (rows + tokens)


def floor(data: Data, operation: Operation, rank: int) -> Floor:
    """Every input read once, every output written once; one row a (token, rank) pair over the link. Padding
    is written, not read."""
    shape, routed = data.shape, data.routed(rank)
    hidden = shape.hidden
    crossing = routed.rows_from_peers(rank)
    width = row_bytes(operation.wire, hidden)
    tokens, kept = shape.tokens, int(routed.kept.sum())
    summed = sum_bytes(hidden, tokens, kept)
    if operation.verb == "prepare":
        index_bytes = 8 * shape.tokens * shape.top_k
        return Floor(index_bytes + 8 * routed.slots, index_bytes * (data.ranks - 1))
    if not operation.sends:
        return Floor(summed, crossing * width)
    read = tokens * (width if operation.given == "packed" else 2 * hidden)
    if operation.receive == "rows":
        written = routed.slots * width
    elif operation.receive == "decoded":
        written = routed.slots * 2 * hidden
    else:
        slabs = ReceiveCase(operation.wire, operation.columnwise).slabs(routed.rows_per_expert, hidden)
        written = sum(nbytes for slab in slabs for _, nbytes in slab.ranges.values())
    if operation.combine:
        back = crossing * 2 * hidden
        return Floor(read + written + summed, crossing * width + back)
    return Floor(read + written, crossing * width)
