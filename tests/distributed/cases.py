# SPDX-License-Identifier: Apache-2.0
"""The one table of cases. Every suite that runs whole steps runs all of them, on every transport.

A case says everything about a job: its ranks, shapes, routing, formats. The data of every rank follow from
its name, so that any rank, and the test itself, can make those of all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from distributed import model

Array = NDArray[Any]

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("f2"), "float32": np.dtype("f4")}
BLOCK = {"bf16": 0, "mxfp8": 32, "nvfp4": 16}
EAGER = "eager"

# Of what the fullest rank needs, and the alignment.
CAPACITIES: dict[str, Callable[[int, int], int]] = {
    EAGER: lambda need, unit: 0,
    "fit": lambda need, unit: need + unit,
    "exact": lambda need, unit: need,
    "one_unit_short": lambda need, unit: need - unit,
    "half": lambda need, unit: model.round_up(need // 2, unit),
    "one_unit": lambda need, unit: unit,
    "eightfold": lambda need, unit: 8 * need,
}


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int = 2
    experts: int = 8  # of all ranks
    top_k: int = 2
    hidden: int = 64
    tokens: int | tuple[int, ...] = 24  # of each rank
    alignment: int = 16
    room_for_tokens: int = 1  # max_tokens_per_rank at least
    capacity: int | str = "fit"  # slots of each rank, or a name of CAPACITIES
    overflow: str = "error"
    routing: str = "random"
    index: str = "int64"
    dtype: str = "bfloat16"
    dispatch: str = "bf16"
    combine: str = "bf16"
    dispatch_backward: str = "bf16"
    combine_backward: str = "bf16"
    rounding: str = "nearest"  # of combine_backward
    # The choices themselves, [rank][token][k], in place of a routing by name.
    choices: tuple[tuple[tuple[int, ...], ...], ...] | None = None

    def __str__(self) -> str:
        return self.name

    def random(self, rank: int, what: str) -> np.random.Generator:
        return np.random.default_rng([zlib.crc32(self.name.encode()), rank, zlib.crc32(what.encode())])

    @property
    def tokens_of(self) -> tuple[int, ...]:
        return (self.tokens,) * self.ranks if isinstance(self.tokens, int) else self.tokens

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ranks

    @property
    def max_tokens(self) -> int:
        return max(*self.tokens_of, self.room_for_tokens)

    @cached_property
    def topk(self) -> list[Array]:
        made = ROUTINGS[self.routing]
        chosen = self.choices or [made(self, rank) for rank in range(self.ranks)]
        shapes = [(count, self.top_k) for count in self.tokens_of]
        return [
            np.array(choice, self.index).reshape(shape) for choice, shape in zip(chosen, shapes, strict=True)
        ]

    @cached_property
    def exact_capacity(self) -> int:
        """The slots that the fullest rank needs; never 0, which means eager."""
        need = max(layout.needed_rows for layout in model.layouts(self.topk, self.experts, self.alignment))
        return max(need, self.alignment)

    @property
    def recv_capacity(self) -> int:
        if isinstance(self.capacity, int):
            return self.capacity
        return CAPACITIES[self.capacity](self.exact_capacity, self.alignment)

    @cached_property
    def layouts(self) -> list[model.Layout]:
        return model.layouts(self.topk, self.experts, self.alignment, self.recv_capacity or None)

    @cached_property
    def where(self) -> list[Array]:
        """For every rank [T, K, 2]: (rank, slot) of each choice."""
        return [
            model.slots_of_tokens(self.layouts, rank, count, self.top_k)
            for rank, count in enumerate(self.tokens_of)
        ]

    def slots_of(self, rank: int) -> int:
        """Slots of a receive buffer."""
        return self.recv_capacity or self.layouts[rank].total_rows

    # Data of a rank. The parts of receive buffers that nobody may read hold NaN.

    def values(self, rank: int, what: str, rows: int) -> Array:
        random = self.random(rank, what)
        size = np.exp(random.normal(0, 1, (rows, 1)))  # tokens of different sizes
        return (random.standard_normal((rows, self.hidden)) * size).astype(DTYPES[self.dtype])

    def tokens_in(self, rank: int) -> Array:
        return self.values(rank, "tokens", self.tokens_of[rank])

    def grad_in(self, rank: int) -> Array:
        return self.values(rank, "grad", self.tokens_of[rank])

    def weights_in(self, rank: int) -> Array:
        """NaN where unrouted."""
        weights = self.random(rank, "weights").random((self.tokens_of[rank], self.top_k), np.float32)
        clean, _ = model.clean_choice(self.topk[rank], self.experts)
        return np.where(clean >= 0, weights, np.float32(np.nan)).astype(np.float32)

    def at_slots(self, rank: int, what: str) -> Array:
        """[slots, H] with values in the slots that hold a token."""
        slots = np.full((self.slots_of(rank), self.hidden), np.nan, DTYPES[self.dtype])
        filled = self.layouts[rank].filled
        slots[filled] = self.values(rank, what, len(filled))
        return slots

    def scalars_at_slots(self, rank: int, what: str) -> Array:
        slots = np.full(self.slots_of(rank), np.nan, np.float32)
        filled = self.layouts[rank].filled
        slots[filled] = self.random(rank, what).standard_normal(len(filled)).astype(np.float32)
        return slots


# ---- routings: [T, K] of a rank ----------------------------------------------------------------------------


def _random(case: Case, rank: int) -> Array:
    return _choose(case, rank, case.experts)


def _choose(case: Case, rank: int, experts: int) -> Array:
    """Different ones of the first experts."""
    random = case.random(rank, "routing")
    choice = np.empty((case.tokens_of[rank], case.top_k), np.int64)
    for row in choice:
        row[:] = random.permutation(experts)[: case.top_k]
    return choice


def _round_robin(case: Case, rank: int) -> Array:
    """Token t of rank r goes to experts (r + t) * K and the ones after it: every expert gets as many."""
    first = (rank + np.arange(case.tokens_of[rank])) * case.top_k
    return (first[:, None] + np.arange(case.top_k)) % case.experts


def _skewed(case: Case, rank: int) -> Array:
    """A few experts are popular with everybody."""
    random = case.random(rank, "routing")
    odds = 1 / np.arange(1, case.experts + 1) ** 1.5
    return np.array(
        [
            random.choice(case.experts, case.top_k, replace=False, p=odds / odds.sum())
            for _ in range(case.tokens_of[rank])
        ]
    )


def _rank_0_only(case: Case, rank: int) -> Array:
    return _choose(case, rank, case.experts_per_rank)


def _one_expert(case: Case, rank: int) -> Array:
    """All tokens to the last expert; the other choices are unrouted."""
    choice = np.full((case.tokens_of[rank], case.top_k), -1)
    choice[:, -1] = case.experts - 1
    return choice


def _unrouted(case: Case, rank: int) -> Array:
    """30 % of the entries, whole tokens, and -1 first with a valid one last."""
    choice = _random(case, rank)
    choice[case.random(rank, "unrouted").random(choice.shape) < 0.3] = -1
    choice[::7] = -1
    choice[3::7, :-1] = -1
    return choice


def _nothing(case: Case, rank: int) -> Array:
    return np.full((case.tokens_of[rank], case.top_k), -1)


def _twice(case: Case, rank: int) -> Array:
    """Experts named more than once, [3, 3, 7, 7, 7, -1, 0, 3] among them, and tokens that name only one."""
    choice = case.random(rank, "routing").integers(-1, case.experts, (case.tokens_of[rank], case.top_k))
    choice[::4] = np.resize([3, 3, 7, 7, 7, -1, 0, 3], case.top_k)
    choice[1::4] = 5
    return choice


def _illegal(case: Case, rank: int) -> Array:
    """Indices out of range; in 64 bits also ones whose low half is legal."""
    choice = _random(case, rank)
    bad = [case.experts, -2, 2**31 - 1, -(2**31)]
    if case.index == "int64":
        bad += [2**32 + 1, 2**63 - 1, -(2**32) + 3, -(2**63)]
    flat = choice.reshape(-1)
    flat[::3] = np.resize(bad, len(flat[::3]))
    return choice


ROUTINGS: dict[str, Callable[[Case, int], Array]] = {
    "random": _random,
    "round_robin": _round_robin,
    "skewed": _skewed,
    "rank_0_only": _rank_0_only,
    "one_expert": _one_expert,
    "unrouted": _unrouted,
    "nothing": _nothing,
    "twice": _twice,
    "illegal": _illegal,
}


# ---- the table ---------------------------------------------------------------------------------------------

_NVFP4: dict[str, Any] = {"dispatch": "nvfp4", "combine_backward": "nvfp4"}
_MXFP8: dict[str, Any] = {
    "dispatch": "mxfp8",
    "combine": "mxfp8",
    "dispatch_backward": "mxfp8",
    "combine_backward": "mxfp8",
}

CASES = [
    # The plain ones
    Case("bf16"),
    Case("mxfp8", **_MXFP8),
    Case("nvfp4", **_NVFP4),
    Case("nvfp4_stochastic", **_NVFP4, rounding="stochastic"),
    Case("eager", capacity=EAGER, **_NVFP4),
    Case("eager_mxfp8", capacity=EAGER, **_MXFP8),
    Case("one_rank", ranks=1, **_NVFP4),
    Case("one_rank_eager", ranks=1, capacity=EAGER),
    Case("every_direction_its_own", dispatch="nvfp4", combine="mxfp8", combine_backward="mxfp8"),
    Case("int32", index="int32", **_NVFP4),
    Case("float16", dtype="float16", **_NVFP4),
    Case("float32", dtype="float32"),
    Case("float32_mxfp8", dtype="float32", **_MXFP8),
    Case("round_robin", experts=8, tokens=32, hidden=512, routing="round_robin"),
    # Ranks and their tokens
    *(
        Case(
            f"{ranks}_ranks_{name}",
            ranks=ranks,
            experts=4 * ranks,
            top_k=4,
            tokens=20,
            routing="unrouted",
            **formats,
        )
        for ranks in (4, 8)
        for name, formats in (("bf16", {}), ("mxfp8", _MXFP8), ("nvfp4", _NVFP4))
    ),
    Case("four_ranks_eager", ranks=4, experts=8, tokens=(9, 0, 30, 2), capacity=EAGER, **_NVFP4),
    Case("three_ranks", ranks=3, experts=9, tokens=(5, 0, 17), **_NVFP4),
    Case(
        "eight_ranks_all_different", ranks=8, experts=16, tokens=(672, 1, 0, 4095, 64, 63, 2048, 17), **_NVFP4
    ),
    Case("eight_ranks_mxfp8", ranks=8, experts=16, tokens=(6, 1, 0, 4, 3, 9, 2, 5), alignment=32, **_MXFP8),
    Case("sixty_four_ranks", ranks=64, experts=128, tokens=6, top_k=4, hidden=32, alignment=1, **_NVFP4),
    Case("nothing_to_send_on_one", tokens=(0, 128), experts=16, top_k=8, **_NVFP4),
    Case("nothing_to_send_on_the_other", tokens=(128, 0), experts=16, top_k=8, **_MXFP8),
    Case("nothing_to_send_at_all", tokens=0, **_NVFP4),
    Case("nothing_to_send_at_all_eager", tokens=0, capacity=EAGER, **_MXFP8),
    *(Case(f"odd_{tokens}", tokens=tokens, hidden=32, **_NVFP4) for tokens in (1, 2, 3, 31, 33, 63, 65, 127)),
    Case("many_tokens_of_one_rank", ranks=1, tokens=65536, top_k=1, hidden=16, routing="skewed", **_NVFP4),
    Case("many_tokens_mxfp8", tokens=(1500, 701), hidden=96, experts=16, top_k=4, **_MXFP8),
    Case("many_tokens_nvfp4", ranks=3, tokens=(513, 0, 401), hidden=96, experts=12, top_k=4, **_NVFP4),
    Case("many_tokens_columns", tokens=(700, 601), hidden=288, alignment=32, **_MXFP8),
    Case("odd_8191", tokens=(8191, 4095), hidden=16, dispatch="nvfp4", alignment=128),
    # What is received
    Case("one_receives_nothing", tokens=64, routing="rank_0_only", **_NVFP4),
    Case("one_receives_nothing_eager", tokens=64, routing="rank_0_only", capacity=EAGER, **_MXFP8),
    Case("one_expert_gets_all", routing="one_expert", tokens=40, **_NVFP4),
    Case("skewed", ranks=4, experts=32, top_k=6, routing="skewed", **_NVFP4),
    # Choices
    Case("unrouted", tokens=64, top_k=8, experts=16, routing="unrouted", **_NVFP4),
    Case("all_unrouted", routing="nothing", **_NVFP4),
    Case("all_unrouted_eager", routing="nothing", capacity=EAGER),
    Case("twice", tokens=32, top_k=8, experts=8, routing="twice", **_NVFP4),
    Case("twice_mxfp8", tokens=32, top_k=8, experts=8, routing="twice", index="int32", **_MXFP8),
    Case("illegal_int64", tokens=32, top_k=4, experts=8, routing="illegal", **_NVFP4),
    Case("illegal_int32", tokens=32, top_k=4, experts=8, routing="illegal", index="int32"),
    # Wide routing
    Case("top_16_of_896", experts=896, top_k=16, tokens=8, hidden=32, alignment=1, dispatch="nvfp4"),
    Case("top_22_of_512", experts=512, top_k=22, tokens=8, hidden=32, **_NVFP4),
    Case("top_32_of_1024", experts=1024, top_k=32, tokens=4, hidden=32, alignment=1, dispatch="mxfp8"),
    Case("top_1_of_8", experts=8, top_k=1, tokens=12, hidden=7168, **_NVFP4),
    Case("top_22_of_72", experts=72, top_k=22, tokens=8, hidden=2048, alignment=1, **_NVFP4),
    Case("every_expert", experts=8, top_k=8, tokens=8, **_MXFP8),
    # Hidden sizes and alignments
    *(
        Case(f"hidden_{hidden}", hidden=hidden, tokens=9, alignment=32, **_NVFP4)
        for hidden in (32, 96, 1024, 2688, 2720, 2880, 3584)
    ),
    Case("hidden_2880_mxfp8", hidden=2880, tokens=9, alignment=32, **_MXFP8),
    Case("hidden_1040", hidden=1040, tokens=9, dispatch="nvfp4", combine_backward="nvfp4"),
    Case("hidden_16", hidden=16, tokens=9, dispatch="nvfp4", combine_backward="nvfp4"),
    *(Case(f"alignment_{n}", alignment=n, tokens=40, **_NVFP4) for n in (1, 2, 64, 128, 256)),
    # More slots than there is room for
    *(
        Case(f"{policy}_{capacity}", capacity=capacity, overflow=policy, tokens=40, **formats)
        for policy, formats in (("error", _NVFP4), ("drop", _MXFP8))
        for capacity in ("exact", "one_unit_short", "half", "one_unit")
    ),
    Case("drop_in_mid_slab", capacity=20, alignment=4, overflow="drop", routing="skewed", tokens=40),
    Case("room_to_spare", capacity="eightfold", **_NVFP4),
]
