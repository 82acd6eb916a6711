# SPDX-License-Identifier: Apache-2.0
"""nvte-ep plan: floors that agree with nvte-ep bench ep, and times that agree with what was measured. What else
it prints: test_commands.py."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from nvte_ep.commands import main
from nvte_ep.commands.bench_ep_data import Data, Operation, Shape, floor


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What it prints with --json."""
    assert main(["plan", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def words(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What it prints without, on one line."""
    assert main(["plan", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def formats(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in answer["formats"]}


# ---- floors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("alignment", [1, 128])  # 128: padding for the most part
def test_floors_are_those_of_the_bench(
    ranks: int, alignment: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = Shape(tokens=96, hidden=256, top_k=4, experts=32, alignment=alignment)
    names = {"tokens": 96, "hidden": 256, "top-k": 4, "experts": 32, "alignment": alignment, "ranks": ranks}
    options = [word for name, value in names.items() for word in (f"--{name}", str(value))]
    plans = formats(document(capsys, *options, "--no-figures"))
    data = Data(shape, ranks)

    def measured(operation: Operation) -> float:
        return float(np.mean([floor(data, operation, rank).memory_bytes for rank in range(ranks)]))

    for name, entry in plans.items():
        dispatch = Operation("dispatch", name, receive="decoded" if name == "bf16" else "rows")
        assert entry["dispatch"]["memory_bytes"] == pytest.approx(measured(dispatch), rel=0.03)
        for sums in ("combine", "dispatch_backward"):  # all ranks together have as many rows as tokens have
            assert entry["combine"]["memory_bytes"] == measured(Operation(sums))


def test_a_combine_does_not_read_padding(capsys: pytest.CaptureFixture[str]) -> None:
    """16 tokens to 32 experts of a rank: 128 rows in 4026 slots."""
    combine = document(capsys, "--tokens", "16", "--ranks", "8")["formats"][0]["combine"]
    assert combine["memory_bytes"] == 2 * 7168 * (16 * 8 + 16)
    assert combine["bound_by"] == "link"
    assert combine["microseconds"] == pytest.approx(combine["link_bytes"] / 380e3)
