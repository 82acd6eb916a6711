# SPDX-License-Identifier: Apache-2.0
"""Every case of the table, on every transport, against the model and the codecs.

A case is run once on a transport; each test looks at another part of what its ranks got.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed import checks
from distributed.cases import CASES, Case
from distributed.here import pairs
from distributed.steps import Step, run_step
from distributed.transports import THREADS, Transport


@pytest.fixture(scope="module", params=pairs(CASES), ids=lambda row: f"{row[0]}-{row[1]}")
def row(request: pytest.FixtureRequest) -> tuple[Transport, Case]:
    found: tuple[Transport, Case] = request.param
    return found


@pytest.fixture(scope="module")
def transport(row: tuple[Transport, Case]) -> Transport:
    return row[0]


@pytest.fixture(scope="module")
def case(row: tuple[Transport, Case]) -> Case:
    return row[1]


@pytest.fixture(scope="module")
def steps(transport: Transport, case: Case) -> Iterator[list[Step]]:
    assert len(case.where) == case.ranks  # the model's part, once and before the ranks start
    yield transport.run(case.ranks, run_step, transport, case)


def test_bytes_are_those_of_threads(transport: Transport, case: Case, steps: list[Step]) -> None:
    """All that was received; sums too where a transport rounds them once."""
    for got, expected in zip(steps, THREADS.run(case.ranks, run_step, THREADS, case), strict=True):
        checks.assert_same_step(got, expected, sums=transport.exact_sums)


def test_prepare(transport: Transport, case: Case, steps: list[Step]) -> None:
    checks.check_prepare(transport, case, steps)


def test_findings(transport: Transport, case: Case, steps: list[Step]) -> None:
    checks.check_findings(transport, case, steps)


def test_dispatch(transport: Transport, case: Case, steps: list[Step]) -> None:
    checks.check_dispatch(transport, case, steps)


def test_weights_travel_with_their_tokens(transport: Transport, case: Case, steps: list[Step]) -> None:
    checks.check_weights(transport, case, steps)


def test_combine(transport: Transport, case: Case, steps: list[Step]) -> None:
    checks.check_combine(transport, case, steps)


def test_a_token_without_a_slot_combines_to_zero(transport: Transport, case: Case, steps: list[Step]) -> None:
    checks.check_tokens_without_slot(transport, case, steps)


def test_dispatch_backward(transport: Transport, case: Case, steps: list[Step]) -> None:
    checks.check_dispatch_backward(transport, case, steps)


def test_combine_backward(transport: Transport, case: Case, steps: list[Step]) -> None:
    checks.check_combine_backward(transport, case, steps)


def test_combine_backward_of_a_weighted_sum(transport: Transport, case: Case, steps: list[Step]) -> None:
    checks.check_combine_backward_of_a_weighted_sum(transport, case, steps)
