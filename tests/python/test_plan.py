# SPDX-License-Identifier: Apache-2.0
"""nvte-ep plan: floors that agree with nvte-ep bench ep, and times that agree with what was measured.
What else it prints: test_commands.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import nvte_ep
import pytest
from nvte_ep.commands import _figures, main, plan
from nvte_ep.commands.bench_ep_data import Data, Operation, Shape, floor

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "h200"
PACKAGE = {"ep_1gpu": "ep_h200_1gpu.json", "ep_2gpus": "ep_h200.json"}
PARTS = ("layer", "backward", "tokens", "experts", "steps")
LAYER = ["--hidden", "7168", "--top-k", "8", "--experts", "64"]  # what was measured


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


# ---- figures of the package -------------------------------------------------------------------------------


def runs(prefix: str) -> list[dict[str, Any]]:
    return [json.loads((BENCHMARKS / f"{prefix}_{part}.json").read_text()) for part in PARTS]


@pytest.mark.parametrize("prefix", PACKAGE)
def test_the_packages_figures_are_the_benchmarks(prefix: str) -> None:
    """After new runs: nvte_ep/data/README.md says how to make them."""
    merged = _figures.merged(runs(prefix), "peer")
    text = (_figures.DATA / PACKAGE[prefix]).read_text()
    assert text == json.dumps(merged, separators=(",", ":")) + "\n"


def measured(prefix: str, part: str, tokens: int, experts: int = 64) -> dict[str, float]:
    """Medians of peer, by operation."""
    file = json.loads((BENCHMARKS / f"{prefix}_{part}.json").read_text())
    (shape,) = (s for s in file["shapes"] if (s["tokens"], s["experts"]) == (tokens, experts))
    return {
        entry["operation"]: entry["figures"]["peer"]["microseconds"]["median"]
        for entry in shape["operations"]
        if "peer" in entry["figures"]
    }


@pytest.mark.parametrize(("prefix", "ranks"), [("ep_1gpu", 1), ("ep_2gpus", 2)])
@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 8192])
def test_expected_times_are_those_measured(
    prefix: str, ranks: int, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within a tenth where the floors of the plan's rates and routing stand for those of the run: one rank by
    figures of two was off by up to 1.85."""
    plans = formats(document(capsys, *LAYER, "--ranks", str(ranks), "--tokens", str(tokens)))
    times = measured(prefix, "tokens", tokens)
    for name, operation in {
        "bf16": "dispatch bf16 -> decoded",
        "nvfp4": "dispatch nvfp4 -> operand",
    }.items():
        assert plans[name]["expected"]["dispatch"] == pytest.approx(times[operation], rel=0.1)
        assert plans[name]["expected"]["combine"] == pytest.approx(times["combine bf16"], rel=0.1)
    training = plans["nvfp4"]["expected"]["training dispatch"]
    assert training == pytest.approx(times["dispatch nvfp4 -> operand + columns"], rel=0.1)


@pytest.mark.parametrize(("ranks", "prefix"), [(1, "ep_1gpu"), (2, "ep_2gpus")])
def test_prepare_lies_between_the_nearest_measured(
    ranks: int, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(tokens: int) -> float:
        answer = document(capsys, *LAYER, "--ranks", str(ranks), "--tokens", str(tokens))
        found: float = answer["formats"][0]["expected"]["prepare"]
        return found

    known = {tokens: measured(prefix, "tokens", tokens)["prepare"] for tokens in (1024, 2048, 8192)}
    small = measured(prefix, "steps", 128)["prepare"]
    for tokens, time in known.items():
        assert prepare(tokens) == pytest.approx(time)
    assert prepare(1536) == pytest.approx((known[1024] + known[2048]) / 2)
    assert prepare(576) == pytest.approx((small + known[1024]) / 2)  # halfway from 128
    assert prepare(10**5) == pytest.approx(known[8192])
    text = words(capsys, *LAYER, "--ranks", str(ranks), "--tokens", "100000")
    assert "(100000 are extrapolated)" in text
    assert "prepare lies between the nearest of 128 to 8192 tokens, beyond them the nearest." in text


# ---- small batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "prefix"), [(1, "ep_1gpu"), (2, "ep_2gpus")])
def test_a_measured_step_is_told(ranks: int, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*LAYER, "--ranks", str(ranks), "--tokens", "128", "--alignment", "16"]
    answer = document(capsys, *arguments)
    times = measured(prefix, "steps", 128)
    shape = {"tokens": 128, "hidden": 7168, "top_k": 8, "experts": 64, "alignment": 16}
    assert answer["step"] == shape | {
        "microseconds": {
            name.removeprefix("step "): time for name, time in times.items() if name.startswith("step ")
        }
    }
    plans = formats(answer)
    for name in ("bf16", "nvfp4"):
        step = plans[name]["step"]
        assert step["prepare, dispatch, combine"] == times[f"step {name} dispatch + combine"]
        assert plans[name]["expected"] == {}
    assert plans["nvfp4"]["step"]["prepare, dispatch"] == times["step nvfp4 dispatch"]
    assert plans["mxfp8"]["step"]["prepare, dispatch, combine"] is None
    text = words(capsys, *arguments)
    assert "a step of 128 tokens a rank, H = 7168, top 8 of 64 experts, alignment 16, sums in BF16" in text
    assert "time expected" not in text


def test_small_batches_of_other_shapes_have_no_expected_times(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tokens", "16", "--ranks", "8"]
    answer = document(capsys, *arguments)
    assert answer["step"]["tokens"] == 128
    assert all(entry["expected"] == {} for entry in answer["formats"])
    assert "other shapes have no expected time" in words(capsys, *arguments)
    more = document(capsys, "--tokens", "129", "--ranks", "8")
    assert more["step"] is None
    assert all(entry["step"] == {} and entry["expected"]["layer"] > 0 for entry in more["formats"])


def test_calls_that_were_measured_with_few_tokens_are_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step is for what the calls do not reach."""
    figures = json.loads((_figures.DATA / "ep_h200.json").read_text())
    for shape in figures["shapes"]:
        shape["tokens"] = {1024: 64}.get(shape["tokens"], shape["tokens"])
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(figures))
    answer = document(capsys, "--tokens", "100", "--figures", str(file))
    assert answer["step"] is None and answer["formats"][0]["expected"]["layer"] > 0
    assert document(capsys, "--tokens", "60", "--figures", str(file))["step"]["tokens"] == 128


# ---- figures of the right kind ---------------------------------------------------------------------------


def test_one_rank_and_several_go_by_their_own_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, "--ranks", "1")["figures"]["ranks"] == 1
    assert document(capsys, "--ranks", "2")["figures"]["ranks"] == 2
    assert "of the package: peer with 1 rank on NVIDIA H200." in words(capsys, "--ranks", "1")
    assert "of the package: peer with 2 ranks on NVIDIA H200." in words(capsys, "--ranks", "8")


@pytest.mark.parametrize(
    ("ranks", "name", "told"),
    [
        (8, "ep_h200_1gpu.json", "is of one rank, the plan is of several"),
        (1, "ep_h200.json", "is of several ranks, the plan is of one"),
    ],
)
def test_figures_of_the_wrong_kind_are_refused(
    ranks: int, name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(_figures.DATA / name)
    text = error(capsys, "--ranks", str(ranks), "--figures", file)
    assert f"--figures: {file} {told}: memory bounds the times of one rank" in text


def test_what_the_times_of_a_format_include(capsys: pytest.CaptureFixture[str]) -> None:
    """In training bf16 looks faster than nvfp4: what the experts need is made elsewhere."""
    arguments = [*LAYER, "--ranks", "2", "--formats", "nvfp4,bf16"]
    plans = formats(document(capsys, *arguments))
    times = {name: entry["expected"]["training layer"] for name, entry in plans.items()}
    assert times["nvfp4"] > times["bf16"]
    text = words(capsys, *arguments)
    assert "nvfp4 include making the operands of the expert GEMM (in training the columns too)" in text
    assert "those of bf16 no quantising for it" in text


# ---- memory of a group -----------------------------------------------------------------------------------


def test_memory_of_a_group_is_unknown_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another transport's would stand beside times of peer."""
    monkeypatch.setattr(plan, "cuda_reason", lambda: "no driver")
    assert document(capsys, "--ranks", "2")["group_memory"] is None
    assert "library memory of a group: unknown here: needs a GPU floors" in words(capsys, "--ranks", "2")


def test_memory_of_a_group_is_that_of_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def memory(comm: nvte_ep.Communicator, **settings: Any) -> nvte_ep.MemoryInfo:
        asked.append(settings)
        return nvte_ep.MemoryInfo(group_bytes=10**6, exchange_bytes=10**5, handle_bytes=2 * 10**6)

    monkeypatch.setattr(plan, "cuda_reason", lambda: None)
    monkeypatch.setattr(plan.Group, "memory", memory)
    answer = document(capsys, "--ranks", "2", "--tokens", "1000")
    assert answer["group_memory"]["handle_bytes"] == 2 * 10**6
    assert asked == [
        {
            "transport": "peer",
            "device": "cuda:0",
            "num_experts": 256,
            "hidden": 7168,
            "max_tokens_per_rank": 1000,
            "max_top_k": 8,
            "recv_capacity": answer["routing"]["recv_capacity"],
        }
    ]
    text = words(capsys, "--ranks", "2")
    assert "group 1 MB, each handle 2 MB (nvte_ep_group_memory of transport peer)" in text

    def refuses(*arguments: Any, **options: Any) -> nvte_ep.MemoryInfo:
        raise nvte_ep.UnsupportedError(nvte_ep.Status.UNSUPPORTED, "too many")

    monkeypatch.setattr(plan.Group, "memory", refuses)
    assert document(capsys)["group_memory"] == {"transport": "peer", "error": "too many"}
    assert "cannot be told here: too many" in words(capsys)


# ---- transports ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["nccl", "nccl_ep"])
def test_a_transport_without_figures_names_its_option(
    transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error(capsys, "--transport", transport) == (
        f"nvte-ep plan: error: --transport: the package has none of the transport {transport}: give "
        "--figures that have some, or --no-figures\n"
    )
    assert document(capsys, "--transport", transport, "--no-figures")["figures"] is None


@pytest.mark.parametrize("transport", ["nccl", "nccl_ep"])
def test_sums_that_a_transport_does_not_carry_are_refused(
    transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--combine", "mxfp8", "--no-figures", "--transport"]
    text = error(capsys, *arguments, transport)
    assert f"--combine: transport {transport} carries no sums in mxfp8, only in bf16" in text
    for other in ("peer", "threads"):
        assert document(capsys, *arguments, other)["layer"]["combine"] == "mxfp8"
