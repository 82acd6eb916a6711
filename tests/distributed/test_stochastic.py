# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding over ranks: its mean, the same bytes whatever the order, no bits drawn twice."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from distributed import stochastic
from distributed.cases import Case
from distributed.here import TRANSPORTS
from distributed.transports import Transport

Array = NDArray[Any]
every_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=str)

SAMPLES = 1 << 20
# One slot for every token: 4 ranks * 280 tokens * 1024 elements, 15 of every 16 of them rounded.
MEAN = Case(
    "mean",
    ranks=4,
    experts=4,
    top_k=1,
    hidden=1024,
    tokens=280,
    combine_backward="nvfp4",
    routing="round_robin",
)
STEP = Case(
    "order",
    ranks=4,
    experts=8,
    tokens=(30, 7, 0, 19),
    combine_backward="nvfp4",
    routing="skewed",
    capacity=256,
)
OWN = Case(
    "own_expert",
    ranks=3,
    experts=3,
    top_k=1,
    hidden=1024,
    tokens=64,
    combine_backward="nvfp4",
    choices=tuple(((rank,),) * 64 for rank in range(3)),
)


@every_transport
@pytest.mark.parametrize(
    ("value", "below", "above"),
    [
        (2.5, 2, 3),
        (2.25, 2, 3),
        (2.75, 2, 3),
        (-2.5, -3, -2),
        (0.25, 0, 0.5),
        (0.125, 0, 0.5),
        (1.25, 1, 1.5),
        (3.5, 3, 4),
        (5.0, 4, 6),
        (-4.5, -6, -4),
    ],
)
def test_mean_of_a_million_roundings(transport: Transport, value: float, below: float, above: float) -> None:
    assert MEAN.layouts
    state = np.array([20, 3], np.int64)
    parts = transport.run(4, stochastic.rounded, transport, MEAN, value, state)
    samples = np.concatenate([part.reshape(-1) for part in parts])[:SAMPLES].astype(np.float64)
    assert len(samples) == SAMPLES
    assert set(np.unique(samples)) == {below, above}, "both neighbours, and nothing else"
    odds = (value - below) / (above - below)
    sigma = (above - below) * np.sqrt(odds * (1 - odds) / SAMPLES)
    assert abs(samples.mean() - value) < 4 * sigma


@every_transport
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -1.5, -6.0])
def test_exact_codes_stay_exact(transport: Transport, value: float) -> None:
    case = Case("exact", ranks=2, experts=2, top_k=1, hidden=256, tokens=64, combine_backward="nvfp4")
    assert case.layouts
    for part in transport.run(2, stochastic.rounded, transport, case, value, np.array([1, 2], np.int64)):
        assert (part == value).all()


@every_transport
def test_the_same_bytes_in_every_order_of_ranks(transport: Transport) -> None:
    assert STEP.layouts
    state = np.array([7, 11], np.int64)
    orders = [(0.0, 0.0, 0.0, 0.0), (0.03, 0.02, 0.01, 0.0), (0.0, 0.02, 0.01, 0.03), (0.02, 0.0, 0.03, 0.01)]
    results = [
        transport.run(4, stochastic.bytes_of_a_step, transport, STEP, state, delays) for delays in orders
    ]
    assert all(result == results[0] for result in results[1:])


@every_transport
def test_seed_and_offset_decide_the_bytes(transport: Transport) -> None:
    assert STEP.layouts
    still = (0.0,) * 4

    def rows_and_operands(seed: int, offset: int) -> tuple[bytes, bytes]:
        state = np.array([seed, offset], np.int64)
        parts = transport.run(4, stochastic.bytes_of_a_step, transport, STEP, state, still)
        return b"".join(rows for rows, _ in parts), b"".join(operand for _, operand in parts)

    states = [(7, 11), (7, 12), (8, 11), (7, 11 + 2**32), (7 + 2**32, 11), (7, 11 - 2**63)]
    results = {state: rows_and_operands(*state) for state in states}
    assert results[7, 11] == rows_and_operands(7, 11)
    assert results[7, 11] == results.pop((7, 11 - 2**63)), "offsets are modulo 2^63"
    for (one, other), part in itertools.product(itertools.combinations(results.values(), 2), (0, 1)):
        assert one[part] != other[part]


@every_transport
def test_two_ranks_never_draw_the_same_bits(transport: Transport) -> None:
    """With the same tokens, seed and offset on every rank: any two ranks decide independently of each other,
    in the rows that they pack and in the columnwise operands that they make. So do two tokens of a rank."""
    assert OWN.layouts
    parts = transport.run(3, stochastic.same_tokens_everywhere, transport, OWN, np.array([5, 6], np.int64))
    for (rows, columns), (other_rows, other_columns) in itertools.combinations(parts, 2):
        assert_independent(up(rows), up(other_rows))
        nibbles, others = (np.stack([x & 15, x >> 4]) for x in (columns, other_columns))
        # Of the columnwise codes only those that lie between two codes are open; many, but not all.
        assert 0.02 < (nibbles != others).mean() < 0.6
    for rows, _ in parts:
        decisions = up(rows)
        assert_independent(decisions[:-1], decisions[1:])


def up(payload: Array) -> Array:
    """Of tokens of 2.5: True where it became 3. The first of every 16 is a 6 and is left out."""
    codes = np.stack([payload & 15, payload >> 4], axis=-1).reshape(len(payload), -1, 16)[:, :, 1:]
    assert set(np.unique(codes)) == {4, 5}
    return codes.reshape(len(payload), -1) == 5


def assert_independent(one: Array, other: Array) -> None:
    """Fair coins agree half of the time: within 5 sigma."""
    agree = (one == other).mean()
    assert abs(agree - 0.5) < 5 * 0.5 / np.sqrt(one.size)
