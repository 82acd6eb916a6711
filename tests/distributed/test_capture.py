# SPDX-License-Identifier: Apache-2.0
"""Steps that are captured once in a CUDA graph and replayed with other routing, data and random state."""

from __future__ import annotations

from typing import Any

import pytest

from distributed import capture
from distributed.cases import Case
from distributed.here import TESTED, nothing_that, pairs
from distributed.transports import THREADS, Transport

# Tokens that are routed in each round. All of them first, so that nothing is met for the first time later.
ROUNDS = [24, 3, 24, 0, 17]
FORMATS: dict[str, dict[str, Any]] = {
    "nvfp4": {"dispatch": "nvfp4", "combine_backward": "nvfp4"},
    "mxfp8": {"dispatch": "mxfp8", "combine_backward": "nvfp4"},
}


def cases() -> list[Case]:
    made = []
    for ranks in (1, 2, 4):
        for format, formats in FORMATS.items():
            shape: dict[str, Any] = {"ranks": ranks, "experts": 2 * ranks, "tokens": 24, "alignment": 32}
            made.append(Case(f"{format}_{ranks}", capacity=256 * ranks, **shape, **formats))
    # More than 1024 tokens of all ranks are not few, whatever comes.
    many: dict[str, Any] = {"ranks": 2, "experts": 4, "tokens": 24, "capacity": 256, "room_for_tokens": 600}
    for format, formats in FORMATS.items():
        made += [Case(f"{format}_of_many_by_{unit}", alignment=unit, **many, **formats) for unit in (8, 32)]
    # Room for a part of what comes: the findings of every replay are told.
    tight: dict[str, Any] = {"ranks": 2, "experts": 4, "tokens": 24, "capacity": 32, **FORMATS["nvfp4"]}
    return [*made, Case("error", **tight), Case("drop", overflow="drop", **tight)]


ROWS = pairs(cases(), [transport for transport in TESTED if transport.on_device])


@pytest.mark.parametrize(
    ("transport", "case"), ROWS or [pytest.param(None, None, marks=nothing_that("on_device"))], ids=str
)
def test_a_captured_step_is_replayed(transport: Transport, case: Case) -> None:
    expected = THREADS.run(case.ranks, capture.on_host, THREADS, case, ROUNDS)
    got = transport.run(case.ranks, capture.on_device, transport, case, ROUNDS)
    for rank, (called, replayed) in enumerate(got):
        for index, wanted in enumerate(expected[rank]):
            where = f"rank {rank}, round {index}"
            assert replayed[index] == called[index], f"{where}: a replay is the calls that were captured"
            told, found = replayed[index]
            assert found == wanted[1], where
            for name in told.keys() - set(capture.SUMS):
                assert told[name] == wanted[0][name], f"{where}: {name}"
    same_tokens = [expected[0][index][0]["grad_rows"] for index in (0, 2)]
    assert same_tokens[0] != same_tokens[1]
