# SPDX-License-Identifier: Apache-2.0
"""nvte-ep demo, doctor and plan: what they print, what they find, and that their checks can fail."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import nvte_ep
import pytest
from numpy.typing import NDArray
from nvte_ep import codecs
from nvte_ep.commands import _checks, _expect, _numerics, _probe, _ranks, demo, doctor, main, plan
from nvte_ep.commands._moe import Experts, Layer, make_gate, route
from nvte_ep.commands._report import Progress, size, table

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL = ["--tokens", "90", "--repeat", "1", "--ffn", "4", "--experts", "8", "--top-k", "2"]


def command_line(*arguments: str) -> str:
    """Code that runs the command as `python -m nvte_ep` does."""
    return f"""
        import runpy, sys
        sys.argv = ["nvte-ep", *{list(arguments)!r}]
        runpy.run_module("nvte_ep", run_name="__main__", alter_sys=True)
    """


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """What a command prints with --json, and nothing but that."""
    assert main([*arguments, "--json"]) == code
    printed = capsys.readouterr()
    answer: dict[str, Any] = json.loads(printed.out)
    return answer


# ---- the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["doctor", "demo", "plan"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_no_command_prints_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().err
    assert all(name in text for name in ("doctor", "demo", "plan"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert f"library {nvte_ep.version()} (ABI {nvte_ep.abi_version()})" in capsys.readouterr().out


def test_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["frobnicate"])
    assert ended.value.code == 2


# ---- demo: what it prints -------------------------------------------------------------------------


def test_demo_on_its_own_data(run_python: RunPython) -> None:
    """All of the real data, as a user runs it; once per exchange is enough here."""
    done = run_python(command_line("demo", "--json", "--repeat", "1"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["ok"] is True
    assert answer["data"]["tokens"] == 2039
    layer = answer["layer"]
    assert (layer["ranks"], layer["experts"], layer["top_k"], layer["alignment"]) == (4, 64, 8, 128)
    assert answer["routing"]["slots"] == 2039 * 8
    formats = {entry["name"]: entry for entry in answer["formats"]}
    assert list(formats) == ["bf16", "mxfp8", "nvfp4", "nvfp4+sr"]
    assert [entry["row_bytes"] for entry in formats.values()] == [768, 400, 224, 224]
    for name, entry in formats.items():
        assert entry["checks"]["failed"] == []
        assert entry["checks"]["passed"] > 100
        assert entry["checks"]["bytes"] > 10**8
        sent, rows = entry["bytes_between_ranks"], answer["routing"]["rows_between_ranks"]
        assert sent["dispatch"] == sent["combine_backward"] == rows * entry["row_bytes"]
        assert sent["combine"] == sent["dispatch_backward"] == rows * 768
        stages = set(_ranks.STAGES) - ({"pack"} if name == "bf16" else set())
        assert set(entry["milliseconds"]) == stages
        assert all(ms > 0 for ms in entry["milliseconds"].values())
    # What the formats can do on real states; a wrong bit anywhere costs more than these margins.
    expected = {"mxfp8": (31.5, 31.5), "nvfp4": (20.8, 17.6), "nvfp4+sr": (20.8, 17.6)}
    for name, (wire, columnwise) in expected.items():
        decibels = formats[name]["sqnr_db"]
        assert set(decibels) == set(demo.SQNR)
        assert decibels["tokens"] == pytest.approx(wire, abs=0.2)
        assert decibels["tokens_operand"] == pytest.approx(wire, abs=0.2)
        assert decibels["tokens_columnwise"] == pytest.approx(columnwise, abs=0.2)
    # Stochastic rounding doubles the noise of the gradients that it rounds, and touches nothing before them.
    nearest, stochastic = formats["nvfp4"]["sqnr_db"], formats["nvfp4+sr"]["sqnr_db"]
    assert stochastic["output"] == nearest["output"]
    assert 2 < nearest["gradients"] - stochastic["gradients"] < 5
    assert formats["bf16"]["sqnr_db"]["tokens"] == "exact"
    assert formats["bf16"]["sqnr_db"]["output"] > 45


def test_demo_report_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    text = printed.out
    for words in ("all-MiniLM-L6-v2", "bytes", "SQNR, dB", "milliseconds", "checks", "nvfp4+sr"):
        assert words in text
    assert lines[-1].startswith("OK: all ")


def test_demo_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, "--json", "--progress"]) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    last = printed.err.splitlines()[-1]
    assert last.startswith("[" + "#" * 24 + "]")
    total = 1 + sum(_ranks.num_steps(wire, 1) for wire in _ranks.wires())
    assert f"{total}/{total}" in last


@pytest.mark.parametrize("formats", ["bf16", "mxfp8", "nvfp4", "nvfp4+sr,mxfp8"])
def test_demo_formats(formats: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = document(capsys, "demo", *SMALL, "--formats", formats)
    names = [entry["name"] for entry in answer["formats"]]
    assert set(names) == {"bf16", *formats.split(",")}
    assert names[0] == "bf16"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("alignment", [1, 16, 256])
def test_demo_ranks_and_alignments(ranks: int, alignment: int, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--tokens", "61", "--repeat", "1", "--ffn", "4", "--experts", str(2 * ranks), "--top-k", "2"]
    answer = document(capsys, "demo", *small, "--ranks", str(ranks), "--alignment", str(alignment))
    assert answer["ok"] is True
    columnwise = {e["name"]: "tokens_columnwise" in e["sqnr_db"] for e in answer["formats"]}
    least = {"bf16": 10**9, "mxfp8": 32, "nvfp4": 16, "nvfp4+sr": 16}
    assert columnwise == {name: alignment >= need for name, need in least.items()}
    if ranks == 1:
        assert all(sum(e["bytes_between_ranks"].values()) == 0 for e in answer["formats"])


def test_demo_more_ranks_than_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tokens", "3", "--ranks", "8", "--experts", "8", "--repeat", "1", "--ffn", "4"]
    assert document(capsys, "demo", *arguments)["ok"] is True


def test_demo_default_experts_divide_over_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    answer = document(capsys, "demo", "--tokens", "40", "--repeat", "1", "--ranks", "3", "--formats", "bf16")
    assert answer["layer"]["experts"] == 63


# ---- demo: the user's own activations -------------------------------------------------------------


def activations(kind: str) -> NDArray[Any]:
    values = np.random.default_rng(7).standard_normal((3, 20, 96), np.float32)
    values[..., 11] *= 40  # an outlier channel
    if kind == "bfloat16 as uint16":
        return _numerics.bf16_bits(values)
    if kind == "bfloat16 as NumPy stores ml_dtypes":
        return _numerics.bf16_bits(values).view("V2")
    return values.astype(kind)


KINDS = ["float16", "float32", "float64", "bfloat16 as uint16", "bfloat16 as NumPy stores ml_dtypes"]


@pytest.mark.parametrize("kind", KINDS)
def test_demo_input(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", activations(kind))
    arguments = ["--input", str(tmp_path / "x.npy"), "--experts", "8", "--top-k", "2", "--repeat", "1"]
    answer = document(capsys, "demo", *arguments, "--ffn", "4")
    assert answer["ok"] is True
    assert (answer["data"]["tokens"], answer["data"]["hidden"]) == (60, 96)
    exact = answer["formats"][0]["sqnr_db"]["tokens"]
    assert exact == "exact" if kind.startswith("bfloat16") else exact > 50


def test_demo_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", activations("float32"))
    gate = np.zeros((6, 96), np.float32)
    gate[3, 11], gate[4, 11] = 1, -1  # the outlier channel decides between two experts
    np.save(tmp_path / "g.npy", gate)
    files = ["--input", str(tmp_path / "x.npy"), "--gate", str(tmp_path / "g.npy")]
    answer = document(capsys, "demo", *files, "--top-k", "1", "--ranks", "2", "--repeat", "1", "--ffn", "4")
    assert answer["layer"]["experts"] == 6
    assert answer["routing"]["tokens_per_expert"]["min"] == 0
    assert answer["routing"]["tokens_per_expert"]["max"] >= 30


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((4, 50), np.float32), "multiple of 32, got 50"),
        (np.zeros((4, 64), np.int32), "got int32"),
        (np.zeros(64, np.float32), "expected [T, H]"),
        (np.zeros((0, 64), np.float32), "no tokens"),
        (np.full((2, 64), np.nan, np.float32), "2 tokens hold NaN or Inf"),
        (np.full((2, 64), 1e30, np.float32), "the largest magnitude is 1e+30"),
    ],
)
def test_demo_refuses_input(
    array: NDArray[Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", array)
    assert main(["demo", "--input", str(tmp_path / "x.npy")]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--formats", "fp3"], "expected bf16, mxfp8, nvfp4, nvfp4+sr, got fp3"),
        (["--experts", "10"], "--experts: must divide evenly over 4 ranks, got 10"),
        (["--experts", "128"], "up to 64 experts, got 128"),
        (["--experts", "4", "--top-k", "5"], "--top-k: at most 4"),
        (["--alignment", "48"], "--alignment: a power of two, got 48"),
        (["--input", "no such file.npy"], "No such file"),
        (["--gate", "g.npy"], "--gate: only together with --input"),
        (["--ffn", "1000000000"], "of memory and the machine has"),
    ],
)
def test_demo_refuses_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *arguments]) == 2
    assert words in capsys.readouterr().err


# ---- demo: its checks can fail -----------------------------------------------------------------


def corrupt(array: Any) -> Any:
    """The same array with one bit of its first element turned."""
    np.asarray(array).reshape(-1).view(np.uint8)[0] ^= 1
    return array


def corrupt_local_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = codecs.nvfp4_pack
    monkeypatch.setattr(codecs, "nvfp4_pack", lambda *a, **k: corrupt(pack(*a, **k)))


def corrupt_local_unpack(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = codecs.mxfp8_unpack
    monkeypatch.setattr(codecs, "mxfp8_unpack", lambda *a, **k: corrupt(unpack(*a, **k)))


def corrupt_received(kind: str) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        dispatch = nvte_ep.Handle.dispatch

        def corrupted(self: nvte_ep.Handle, *arguments: Any, **options: Any) -> nvte_ep.Received:
            received = dispatch(self, *arguments, **options)
            if options.get("receive") == kind:
                if received.operand is not None:
                    corrupt(received.operand.columnwise_scales)
                else:
                    corrupt(received.data)
            return received

        monkeypatch.setattr(nvte_ep.Handle, "dispatch", corrupted)

    return patch


def corrupt_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte beyond the last slot, which nobody may write."""
    combine_backward = nvte_ep.Handle.combine_backward

    def corrupted(self: nvte_ep.Handle, *arguments: Any, **options: Any) -> nvte_ep.Received:
        received = combine_backward(self, *arguments, **options)
        if options.get("receive") == "rows":
            corrupt(received.data[-1])
        return received

    monkeypatch.setattr(nvte_ep.Handle, "combine_backward", corrupted)


def corrupt_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = nvte_ep.Handle.prepare

    def corrupted(self: nvte_ep.Handle, *arguments: Any, **options: Any) -> nvte_ep.Routing:
        routing = prepare(self, *arguments, **options)
        corrupt(routing.slot_source)
        return routing

    monkeypatch.setattr(nvte_ep.Handle, "prepare", corrupted)


def corrupt_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = nvte_ep.Handle.combine

    def corrupted(self: nvte_ep.Handle, *arguments: Any, **options: Any) -> Any:
        result = combine(self, *arguments, **options)
        np.asarray(result).view(np.uint8).reshape(-1)[-1] ^= 0x80  # a sign
        return result

    monkeypatch.setattr(nvte_ep.Handle, "combine", corrupted)


def corrupt_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = nvte_ep.Handle.dispatch_backward

    def corrupted(self: nvte_ep.Handle, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        grad_tokens, grad_weights = backward(self, *arguments, **options)
        return grad_tokens, corrupt(grad_weights)

    monkeypatch.setattr(nvte_ep.Handle, "dispatch_backward", corrupted)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (corrupt_local_pack, "nvfp4, rank 0: dispatch rows == pack"),
        (corrupt_local_unpack, "mxfp8, rank 2: combine_backward decoded float32 == unpack"),
        (corrupt_received("rows"), "bf16, rank 1: dispatch rows == pack: 1 of"),
        (corrupt_received("decoded"), "mxfp8, rank 3: dispatch decoded bfloat16 == unpack"),
        (
            corrupt_received("operand"),
            "nvfp4+sr, rank 0: dispatch operand == direct_receive.columnwise_scales",
        ),
        (corrupt_tail, "nvfp4, rank 0: combine_backward rows == pack"),
        (corrupt_routing, "bf16, rank 0: prepare.slot_source"),
        (corrupt_combine, "bf16, rank 0: combine == sum over k"),
        (corrupt_combine, "nvfp4, rank 0: combine of an identity layer == sum over k"),
        (corrupt_weight_gradient, "mxfp8, rank 1: dispatch_backward grad_topk_weights"),
    ],
)
def test_demo_fails_on_one_wrong_byte(
    break_it: Callable[[pytest.MonkeyPatch], None],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it(monkeypatch)
    answer = document(capsys, "demo", *SMALL, code=1)
    assert answer["ok"] is False
    failed = [line for entry in answer["formats"] for line in entry["checks"]["failed"]]
    assert any(line.startswith(words) for line in failed), failed


def test_demo_says_what_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    corrupt_local_pack(monkeypatch)
    assert main(["demo", *SMALL]) == 1
    text = capsys.readouterr().out
    assert "FAILED: " in text
    assert "bytes differ, the first in element" in text
    assert "OK: all" not in text


def test_demo_compares_bf16_with_one_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that go astray in the same way on both sides of every byte check: the layer itself tells."""
    run_in_one_place = demo.run_in_one_place

    def other_weights(layer: Layer) -> Any:
        return run_in_one_place(Layer(**{**vars(layer), "weights": [w[:, ::-1] for w in layer.weights]}))

    monkeypatch.setattr(demo, "run_in_one_place", other_weights)
    answer = document(capsys, "demo", *SMALL, "--formats", "bf16", code=1)
    failed = answer["formats"][0]["checks"]["failed"]
    assert any("output == that of the layer in one place" in line for line in failed)


def test_demo_ends_when_a_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for it in an exchange: they must not wait for ever, and its error is the one."""
    forward = Experts.forward

    def failing(self: Experts, expert: int, x: Any) -> Any:
        import threading

        if threading.current_thread().name == "rank 2":
            raise ZeroDivisionError("rank 2 has a fault")
        return forward(self, expert, x)

    monkeypatch.setattr(Experts, "forward", failing)
    with pytest.raises(ZeroDivisionError, match="rank 2 has a fault"):
        main(["demo", *SMALL])


def test_demo_reports_errors_of_the_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_ranks, "TIMEOUT_NS", -1)
    assert main(["demo", *SMALL]) == 1
    assert "nvte_ep_group_create: timeout_ns" in capsys.readouterr().err


# ---- demo: its own arithmetic ---------------------------------------------------------------------


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("rows_per_expert", [[128], [0, 32, 0, 288], [64, 256, 32]])
def test_operands_decode_to_the_rows(format: str, rows_per_expert: list[int]) -> None:
    """NumPy and the documented layout against the library's unpack."""
    total, hidden = sum(rows_per_expert), 160
    tokens = np.random.default_rng(3).standard_normal((total, hidden), np.float32)
    rows = _checks.pack(_checks.Sending(format), tokens)
    receive = getattr(nvte_ep, f"{format}_direct_receive")
    operand = receive(rows, hidden, rows_per_expert, columnwise=True, alignment=32)
    values = _checks.unpack(format, rows, hidden, "float32")
    np.testing.assert_array_equal(_numerics.decode_operand(operand, rows_per_expert), values)
    along_tokens = _numerics.decode_columnwise(operand, rows_per_expert)
    least = 40 if format == "mxfp8" else 17  # of the second rounding alone, against the wire's values
    assert _numerics.Error.between(values, along_tokens).sqnr_db > least


def test_bf16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-9, 0.0, -0.0], np.float32)
    rounded = _numerics.bf16_values(_numerics.bf16_bits(values))
    expected = np.array([1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0, 0.0, -0.0], np.float32)
    np.testing.assert_array_equal(rounded.view(np.uint32), expected.view(np.uint32))


def test_inverse_hadamard_undoes_the_transform() -> None:
    n = np.arange(16)
    matrix = np.array([[(-1.0) ** bin(i & j).count("1") / 4 for j in n] for i in n])
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    x = np.random.default_rng(5).standard_normal((3, 4, 16))
    transformed = ((x * signs) @ matrix).astype(np.float32).reshape(3, 64)
    np.testing.assert_allclose(_numerics.inverse_hadamard(transformed), x.reshape(3, 64), atol=1e-6)


def test_sqnr() -> None:
    one = _numerics.Error.between(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    assert one.sqnr_db == pytest.approx(20.0)
    assert (one + one).sqnr_db == pytest.approx(20.0)
    assert _numerics.Error.between(np.ones(3), np.ones(3)).sqnr_db == math.inf
    assert math.isnan(_numerics.Error.between(np.zeros(3), np.ones(3)).sqnr_db)


def test_checks_see_type_shape_and_value() -> None:
    checks = _checks.Checks("here")
    checks.equal("same", np.arange(3), np.arange(3))
    checks.equal("zeros of two signs", np.array([0.0]), np.array([-0.0]))
    checks.equal("type", np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int64))
    checks.equal("shape", np.zeros((1, 3)), np.zeros(3))
    checks.close("near", np.float32([1.0]), np.float32([1.0]), np.array([0.0]))
    checks.close("far", np.float32([1.0]), np.float32([1.5]), np.array([0.4]))
    checks.close("NaN", np.float32([np.nan]), np.float32([1.5]), np.array([9.0]))
    assert checks.passed == 2
    assert [line.split(": ")[1] for line in checks.failed] == [
        "zeros of two signs",
        "type",
        "shape",
        "far",
        "NaN",
    ]


def numeric_gradient(f: Callable[[NDArray[Any]], float], x: NDArray[Any]) -> NDArray[Any]:
    gradient = np.zeros_like(x, dtype=np.float64)
    for place in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-3
        gradient[place] = (f(x + step) - f(x - step)) / 2e-3
    return gradient


def test_gradients_of_the_experts_are_gradients() -> None:
    rng = np.random.default_rng(11)
    experts = Experts(1, 8, 5, seed=0)
    x, grad = rng.standard_normal((3, 8)), rng.standard_normal((3, 8))
    _, before = experts.forward(0, x.astype(np.float32))
    grad_x, grad_before = experts.backward(0, before, grad.astype(np.float32))

    def loss(x: NDArray[Any]) -> float:
        inner = x @ experts.up[0].astype(np.float64)
        return float(((inner / (1 + np.exp(-inner))) @ experts.down[0] * grad).sum())

    np.testing.assert_allclose(grad_x, numeric_gradient(loss, x), rtol=1e-3, atol=1e-4)
    weights = experts.weight_gradients(x.astype(np.float32), before, grad_before, grad.astype(np.float32))

    def loss_of_up(up: NDArray[Any]) -> float:
        inner = x @ up
        return float(((inner / (1 + np.exp(-inner))) @ experts.down[0] * grad).sum())

    up = numeric_gradient(loss_of_up, experts.up[0].astype(np.float64))
    np.testing.assert_allclose(weights[:40].reshape(8, 5), up, rtol=1e-3, atol=1e-4)


def test_router() -> None:
    states = np.random.default_rng(2).standard_normal((50, 32), np.float32)
    gate = make_gate(states, 8, seed=0)
    experts, weights = route(states, gate, 3)
    assert np.std(states @ gate.T) == pytest.approx(2.0, rel=1e-3)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    assert (np.diff(weights, axis=1) <= 0).all()
    assert all(len(set(row)) == 3 for row in experts)
    for constant in (np.zeros((4, 32), np.float32), np.ones((1, 32), np.float32)):
        assert np.isfinite(make_gate(constant, 8, seed=0)).all()


# ---- doctor --------------------------------------------------------------------------------------


def test_doctor(run_python: RunPython) -> None:
    done = run_python(command_line("doctor"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 120  # paths are as long as they are
    assert done.stdout.endswith("The self test passed.\n")
    assert "transport threads" in done.stdout


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer = document(capsys, "doctor")
    assert answer["ok"] is True
    sections = {
        section: {finding["name"]: finding for finding in findings}
        for section, findings in answer["sections"].items()
    }
    assert set(sections) == {"library", "python", "gpu", "nccl", "self test"}
    library = sections["library"]
    assert str(nvte_ep.library_path()) in library["library"]["detail"]
    for name in ("format bf16", "format mxfp8", "format nvfp4", "backend host", "transport threads"):
        assert library[name]["state"] == "ok"
    # Whatever the library cannot do here has its reason.
    assert all(f["detail"] for f in library.values())
    assert sections["python"]["numpy"]["detail"] == importlib.metadata.version("numpy")
    assert {"driver", "nvcc"} <= set(sections["gpu"])
    assert {"NCCL", "NCCL EP"} <= set(sections["nccl"])
    assert {finding["state"] for finding in sections["self test"].values()} == {"ok"}


def test_doctor_without_a_library(run_python: RunPython) -> None:
    done = run_python(command_line("doctor", "--json"), NVTE_EP_LIBRARY="/no/such/libnvte_ep.so")
    assert done.returncode == 1
    library = json.loads(done.stdout)["sections"]["library"]
    assert library[0]["state"] == "problem"
    assert "/no/such/libnvte_ep.so" in library[0]["detail"]
    assert "NVTE_EP_LIBRARY" in library[0]["remedy"]


@pytest.mark.parametrize("break_it", [corrupt_local_pack, corrupt_local_unpack])
def test_doctor_fails_with_its_self_test(
    break_it: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it(monkeypatch)
    answer = document(capsys, "doctor", code=1)
    assert answer["ok"] is False
    assert "problem" in {finding["state"] for finding in answer["sections"]["self test"]}


H200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory_bytes": 150 * 10**9}


@pytest.mark.parametrize(
    ("answer", "states"),
    [
        (
            {"path": "libcuda.so.1", "cuda_version": "13.0", "devices": [H200]},
            {"driver": "ok", "GPU 0": "ok"},
        ),
        (
            {"path": "libcuda.so.1", "cuda_version": "12.8", "devices": [H200]},
            {"driver": "problem", "GPU 0": "ok"},
        ),
        (
            {
                "path": "libcuda.so.1",
                "cuda_version": "13.1",
                "devices": [H200 | {"name": "old", "compute_capability": "8.6"}],
            },
            {"driver": "ok", "GPU 0": "absent"},
        ),
        (
            {"path": "libcuda.so.1", "cuda_version": "13.0", "error": "cuInit: no device (100)"},
            {"driver": "ok", "GPUs": "problem"},
        ),
        ({"path": "libcuda.so.1", "cuda_version": "13.0", "devices": []}, {"driver": "ok", "GPUs": "absent"}),
    ],
)
def test_doctor_understands_the_driver(answer: dict[str, Any], states: dict[str, str]) -> None:
    found = doctor.examine_driver(answer)
    assert {finding.name: finding.state for finding in found} == states
    assert all(finding.remedy for finding in found if finding.state != "ok")


@pytest.mark.parametrize(("kernel", "state"), [(None, "absent"), ("580.65.06", "problem")])
def test_doctor_tells_a_missing_driver_from_a_hidden_one(
    kernel: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_kernel_driver", lambda: kernel)
    (found,) = doctor.examine_driver({"error": "libcuda.so.1: cannot open shared object file"})
    assert found.state == state
    assert found.remedy


class FakeDistribution:
    def __init__(self, name: str, version: str, requires: list[str] | None = None) -> None:
        self.metadata = {"Name": name}
        self.version = version
        self.requires = requires


def test_doctor_says_who_pins_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [
        FakeDistribution(
            "torch", "2.13.0", ['nvidia-nccl-cu13==2.28.9; platform_system == "Linux"', "sympy"]
        ),
        FakeDistribution("nvte-ep", "0.1.0", ['nvidia-nccl-cu13; extra == "cu13"']),
        FakeDistribution("numpy", "2.0"),
    ]
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda: installed)
    assert doctor.nccl_pins() == ["torch 2.13.0 requires nvidia-nccl-cu13==2.28.9"]


def test_doctor_sees_two_nccl_wheels_and_an_old_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "installed", lambda *names: (names[0], "2.28.9") if "nccl-cu" in names[0] else None
    )
    found = {f.name: f for f in doctor.examine_nccl({"path": "/x/libnccl.so.2", "version": "2.28.9"})}
    assert found["NCCL wheels"].state == "problem"
    assert "2.30.7" in found["NCCL"].remedy
    assert found["NCCL EP"].state == "absent"
    newer = doctor.examine_nccl({"path": "/x/libnccl.so.2", "version": "2.30.7"})
    assert [f.remedy for f in newer if f.name == "NCCL"] == [""]


def test_a_probe_that_crashes_is_an_answer() -> None:
    assert "ended without an answer" in doctor.probe("no such probe")["error"]


@pytest.mark.parametrize(("number", "text"), [(22307, "2.23.7"), (23007, "2.30.7"), (2804, "2.8.4")])
def test_nccl_versions(number: int, text: str) -> None:
    assert _probe.version_text(number) == text


def test_doctor_describes_nccl_ep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_EP_NCCL_EP_LIBRARY", raising=False)
    monkeypatch.setenv("NCCL_EP_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "installed", lambda *names: None)
    (missing,) = doctor.examine_nccl_ep()
    assert missing.state == doctor.ABSENT and "pip install nccl-extensions" in missing.remedy

    monkeypatch.setattr(doctor, "installed", lambda *names: ("nccl-extensions", "0.1.0"))
    wheel, kernels = doctor.examine_nccl_ep()
    assert wheel.detail == "nccl-extensions 0.1.0"
    assert kernels.detail == f"0 compiled, in {tmp_path}" and "--warm" in kernels.remedy
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel.cubin").touch()
    assert (
        doctor.examine_nccl_ep()[1].detail.startswith("1 compiled") and not doctor.examine_nccl_ep()[1].remedy
    )

    monkeypatch.setenv("NVTE_EP_NCCL_EP_LIBRARY", "/x/libnccl_ep.so")
    assert "/x/libnccl_ep.so" in doctor.examine_nccl_ep()[0].detail


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--warm", "64,512"], "expected T,H,K,E"),
        (["--warm", "64,512,3,eight"], "expected T,H,K,E"),
        (["--warm", "64,512,3,8", "--ranks", "0"], "--ranks: expected 1 or more"),
        (["--warm", "64,512,3,8", "--formats", "fp5"], "--formats"),
    ],
)
def test_doctor_refuses_a_shape(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_doctor_warms_every_shape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[tuple[list[str], int]] = []

    def launch(command: list[str], ranks: int, *, environment: dict[str, str]) -> int:
        assert environment == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        jobs.append((command, ranks))
        return len(jobs) - 1  # the second fails

    monkeypatch.setattr(doctor, "cuda_reason", lambda: None)
    monkeypatch.setattr(doctor._warm.job, "launch", launch)
    shapes = ["--warm", "4096,7168,8,64", "--warm", "128,7168,8,64,16"]
    assert main(["doctor", *shapes, "--ranks", "2", "--formats", "bf16,nvfp4"]) == 1
    assert [ranks for _, ranks in jobs] == [2, 2]
    wanted = json.loads(jobs[1][0][-1])
    assert wanted["tokens"] == 128 and wanted["alignment"] == 16 and wanted["formats"] == ["bf16", "nvfp4"]
    assert "ended with 1" in capsys.readouterr().out


def test_doctor_finds_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (found,) = doctor.examine_toolkit()
    assert found.state == "ok"
    assert found.detail == f"13.0, {nvcc} (CUDA_HOME)"


# ---- plan ----------------------------------------------------------------------------------------


def simulate(cluster: _expect.Cluster, rounds: int) -> dict[str, float]:
    """Means over random routings: rank 0 sends, rank 0 receives."""
    rng = np.random.default_rng(0)
    tokens, ranks, local = cluster.tokens, cluster.ranks, cluster.local_experts
    sums = dict.fromkeys(("ranks", "link", "network", "slots"), 0.0)
    for _ in range(rounds):
        scores = rng.random((ranks, tokens, cluster.experts))
        chosen = np.argsort(scores, axis=2)[:, :, : cluster.top_k]
        hit = np.zeros((tokens, ranks), bool)
        np.put_along_axis(hit, chosen[0] // local, True, axis=1)
        sums["ranks"] += hit.sum() / tokens
        sums["link"] += hit[:, 1 : cluster.domain].sum()
        sums["network"] += hit[:, cluster.domain :].sum()
        counts = np.bincount(chosen.ravel(), minlength=cluster.experts)[:local]
        sums["slots"] += (-(-counts // cluster.alignment) * cluster.alignment).sum()
    return {name: value / rounds for name, value in sums.items()}


@pytest.mark.parametrize(
    "cluster",
    [
        _expect.Cluster(tokens=32, top_k=8, experts=64, ranks=8, domain=8, alignment=16),
        _expect.Cluster(tokens=16, top_k=2, experts=8, ranks=4, domain=2, alignment=1),
        _expect.Cluster(tokens=24, top_k=3, experts=12, ranks=6, domain=3, alignment=128),
        _expect.Cluster(tokens=40, top_k=4, experts=4, ranks=2, domain=2, alignment=8),
        _expect.Cluster(tokens=50, top_k=1, experts=5, ranks=1, domain=1, alignment=32),
    ],
)
def test_plan_against_simulated_routing(cluster: _expect.Cluster) -> None:
    found = simulate(cluster, 400)
    assert cluster.ranks_per_token == pytest.approx(found["ranks"], rel=0.01)
    assert cluster.link_rows == pytest.approx(found["link"], rel=0.02)
    assert cluster.network_rows == pytest.approx(found["network"], rel=0.02)
    assert cluster.slots == pytest.approx(found["slots"], rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "ranks", "experts", "top_k"), [(2, 1, 3, 2), (1, 2, 4, 2), (2, 2, 4, 1), (3, 1, 2, 2)]
)
@pytest.mark.parametrize("alignment", [1, 2, 4])
def test_plan_worst_case_is_the_worst(
    tokens: int, ranks: int, experts: int, top_k: int, alignment: int
) -> None:
    """Against every routing that there is."""
    cluster = _expect.Cluster(tokens, top_k, experts, ranks, ranks, alignment)
    choices = list(itertools.combinations(range(experts), top_k))
    worst = 0
    for routing in itertools.product(choices, repeat=tokens * ranks):
        counts = np.bincount(np.ravel(routing), minlength=experts)[: cluster.local_experts]
        worst = max(worst, int((-(-counts // alignment) * alignment).sum()))
    assert worst <= cluster.worst_capacity <= worst + alignment
    assert cluster.capacity(1000.0) == cluster.worst_capacity
    assert cluster.capacity(1.0) % alignment == 0


def test_plan_of_deepseek(capsys: pytest.CaptureFixture[str]) -> None:
    answer = document(capsys, "plan", "--model", "deepseek-v3", "--ranks", "8", "--tokens", "4096")
    layer = answer["layer"]
    assert (layer["hidden"], layer["experts"], layer["top_k"], layer["layers"]) == (7168, 256, 8, 58)
    assert answer["routing"]["ranks_per_token"] == pytest.approx(5.29, abs=0.01)
    assert answer["routing"]["remote_ranks_per_token"] == pytest.approx(4.63, abs=0.01)
    formats = {entry["name"]: entry for entry in answer["formats"]}
    for name, width in {"bf16": 14336, "mxfp8": 7392, "nvfp4": 4048}.items():
        entry = formats[name]
        nbytes = answer["routing"]["remote_ranks_per_token"] * 4096 * width
        assert entry["row_bytes"] == width
        assert entry["dispatch"]["link_bytes"] == pytest.approx(nbytes)
        assert entry["dispatch"]["microseconds"] == pytest.approx(nbytes / 380e9 * 1e6)
        assert entry["dispatch"]["bound_by"] == "link"
        assert entry["combine"]["link_bytes"] == pytest.approx(formats["bf16"]["dispatch"]["link_bytes"])
    capacity = answer["routing"]["recv_capacity"]
    layout = nvte_ep.operand_layout("nvfp4", 7168, capacity, 32)
    assert formats["nvfp4"]["operand_bytes"] == layout.total_bytes
    assert formats["nvfp4"]["training_operand_bytes"] > 1.9 * layout.total_bytes


def test_plan_rates_are_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", "--ranks", "16", "--domain", "8", "--format", "nvfp4", "--json"]
    slow = document(capsys, *base[:-1], "--network-gbps", "25")["formats"][0]["dispatch"]
    fast = document(capsys, *base[:-1], "--network-gbps", "1e9")["formats"][0]["dispatch"]
    assert slow["bound_by"] == "network"
    assert slow["microseconds"] == pytest.approx(slow["network_bytes"] / 25e3)
    assert fast["bound_by"] in ("link", "memory")
    alone = document(capsys, "plan", "--ranks", "1", "--format", "mxfp8")["formats"][0]["dispatch"]
    assert (alone["link_bytes"], alone["bound_by"]) == (0, "memory")


def test_plan_expects_nothing_of_a_transport_that_refuses_the_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Transport peer spans one domain."""
    assert document(capsys, "plan", "--ranks", "16", "--domain", "8")["figures"] is None
    assert document(capsys, "plan", "--ranks", "16", "--domain", "16")["figures"]["transport"] == "peer"
    assert main(["plan", "--ranks", "16", "--domain", "8"]) == 0
    assert "peer spans one domain only" in capsys.readouterr().out
    assert main(["plan", "--ranks", "1024", "--experts", "1024"]) == 0
    assert "transport peer takes at most 511 ranks" in capsys.readouterr().out
    assert main(["plan", "--domain", "4", "--figures", "nowhere.json"]) == 2
    assert "--figures: nowhere.json" in capsys.readouterr().err


def test_plan_expects_nothing_of_a_network_that_was_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A multiple of a floor that another link sets is no time of this one."""
    figures = tmp_path / "figures.json"
    figures.write_text(plan.default_figures(8).read_text().replace('"peer"', '"nccl_ep"'))
    arguments = ["plan", "--transport", "nccl_ep", "--figures", str(figures)]
    assert document(capsys, *arguments)["figures"]["transport"] == "nccl_ep"
    assert document(capsys, *arguments, "--domain", "4")["figures"] is None
    assert main([*arguments, "--domain", "4"]) == 0
    assert "say nothing of a network" in capsys.readouterr().out
    assert main([*arguments, "--tokens", "8193"]) == 0
    assert "nccl_ep takes at most 8192 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("model", sorted(plan.MODELS))
@pytest.mark.parametrize("domain", ["4", "8"])
def test_plan_report_fits_a_terminal(model: str, domain: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--domain", domain]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "inputs, not measurements" in text
    assert str(plan.MODELS[model].hidden) in text


def test_plan_without_room_for_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Columnwise MXFP8 takes slabs of a multiple of 32 slots."""
    arguments = ["plan", "--alignment", "16", "--formats", "mxfp8"]
    (found,) = document(capsys, *arguments)["formats"]
    assert found["training_operand_bytes"] is None
    assert found["expected"]["training dispatch"] is None
    assert found["expected"]["training layer"] is None
    assert found["expected"]["layer"] > 0
    assert main(arguments) == 0
    assert re.search(r"with columnwise parts +-\n", capsys.readouterr().out)


def test_plan_says_that_it_has_no_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan"]) == 0
    assert "of the package: peer with 2 ranks" in capsys.readouterr().out
    monkeypatch.setattr(plan, "default_figures", lambda ranks: tmp_path / "none.json")
    assert main(["plan"]) == 0
    printed = capsys.readouterr().out
    assert "give --figures" in printed
    assert "time expected" not in printed


@pytest.mark.parametrize("option", ["--format", "--formats"])
@pytest.mark.parametrize(
    "command", [["demo"], ["plan"], ["doctor", "--warm", "64,512,3,8"]], ids=lambda words: words[0]
)
def test_formats_have_one_name(option: str, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, option, "fp3"]) == 2
    assert f"nvte-ep {command[0]}: error: --formats: expected" in capsys.readouterr().err


def test_plan_lists_its_models(capsys: pytest.CaptureFixture[str]) -> None:
    models = document(capsys, "plan", "--list-models")["models"]
    assert models["gpt-oss-120b"] == {"hidden": 2880, "experts": 128, "top_k": 4, "moe_layers": 36}
    assert main(["plan", "--list-models"]) == 0
    assert "qwen3-235b-a22b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "7"], "--experts: must divide evenly over 7 ranks, got 256"),
        (["--ranks", "0"], "--ranks: expected more than 0"),
        (["--hidden", "100"], "--hidden: bf16 needs a multiple of 16, got 100"),
        (["--hidden", "48"], "--hidden: mxfp8 needs a multiple of 32, got 48"),
        (["--top-k", "300"], "--top-k: at most 256"),
        (["--formats", "fp3"], "--formats: expected bf16, mxfp8, nvfp4, got fp3"),
        (["--transport", "foo"], "--transport: expected peer, nccl_ep, nccl, threads, got foo"),
        (["--transport", "foo", "--no-figures"], "--transport: expected"),
        (["--combine", "nvfp4"], "--combine: expected bf16, mxfp8, got nvfp4"),
        (["--domain", "3"], "--domain: must divide the 8 ranks"),
        (["--link-gbps", "nan"], "--link-gbps: expected more than 0"),
    ],
)
def test_plan_refuses(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


# ---- helpers ----------------------------------------------------------------------------------------


def test_sizes() -> None:
    texts = {
        0: "0 B",
        999: "999 B",
        1000: "1 kB",
        4370000: "4.37 MB",
        999_499_999: "999 MB",
        999_600_000: "1 GB",
    }
    assert {number: size(number) for number in texts} == texts


def test_tables_line_up() -> None:
    assert table([("", "a", "long"), ("heading of the rest",), ("name", "1", "2")]) == [
        "        a  long",
        "heading of the rest",
        "  name  1     2",
    ]


def test_progress_is_silent_unless_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2) as progress:
        progress.step("one")
        progress.step("two")
    assert capsys.readouterr().err == ""


# ---- what a wrong argument is told ---------------------------------------------------------------


@pytest.mark.parametrize("command", ["demo", "plan", "doctor"])
def test_an_unknown_option_gets_the_usage_of_its_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--bogus"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: nvte-ep {command} [")
    assert error.endswith(f"nvte-ep {command}: error: unrecognized arguments: --bogus\n")


def test_a_missing_file_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.npy"
    assert main(["demo", "--input", str(missing)]) == 2
    assert capsys.readouterr().err == f"nvte-ep demo: error: --input: {missing}: No such file or directory\n"


def test_ranks_that_do_not_divide_the_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    tokens, gate = tmp_path / "x.npy", tmp_path / "g.npy"
    np.save(tokens, random.standard_normal((8, 32)).astype(np.float32))
    np.save(gate, random.standard_normal((8, 32)).astype(np.float32))
    arguments = ["demo", "--input", str(tokens), "--gate", str(gate), "--ranks", "5"]
    assert main(arguments) == 2
    assert f"--ranks: must divide the 8 experts of {gate}, got 5" in capsys.readouterr().err
    assert main([*arguments, "--experts", "8"]) == 2
    assert "--experts: must divide evenly over 5 ranks, got 8" in capsys.readouterr().err
