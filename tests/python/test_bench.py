# SPDX-License-Identifier: Apache-2.0
"""nvte-ep bench codecs: bytes that it counts, what it prints and writes, and that its check can fail."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import nvte_ep
import pytest
from fake_cuda import LAUNCH_SECONDS, FakeRuntime, install
from nvte_ep import codecs
from nvte_ep.commands import _probe, bench_codecs, bench_machine, main
from nvte_ep.commands.bench_cases import (
    Case,
    Data,
    Moved,
    ReceiveCase,
    RowCase,
    SwizzleCase,
    all_cases,
    sample,
)
from nvte_ep.commands.bench_codecs import gigabyte_tokens
from nvte_ep.commands.bench_instead import Frameworks
from nvte_ep.commands.bench_machine import CudaMachine, HostMachine, Machine, Timing
from nvte_ep.operand import operand_layout

SMALL = ["bench", "codecs", "--device", "cpu", "--sizes", "16,160", "--hidden", "64", "--quick"]
NAMES = [case.name for case in all_cases()]


def case_of(name: str) -> Case:
    return next(case for case in all_cases() if case.name == name)


@pytest.fixture(autouse=True)
def short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMachine, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(bench_codecs, "PEAK_BYTES", {"cuda": 1 << 16, "cpu": 1 << 16})
    monkeypatch.setattr(bench_machine, "_host_cache_bytes", lambda: 1 << 14)


@pytest.fixture
def measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the command and reads what --json wrote."""

    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        file = tmp_path / "figures.json"
        assert main([*SMALL, *arguments, "--json", str(file)]) == code, capsys.readouterr().out
        answer: dict[str, Any] = json.loads(file.read_text())
        return answer

    return run


# ---- the fewest bytes ------------------------------------------------------------------------------

# By hand, at H = 7168: BF16 14336 bytes; nvfp4 payload 3584, scales 448, token scale 4, row 4048 (4036 used);
# mxfp8 payload 7168, scales 224, row 7392 (all used).
BYTES_OF_256 = {
    "nvfp4_pack": (14336, 4048),
    "nvfp4_pack stochastic": (14336, 4048),
    "nvfp4_unpack": (4036, 14336),
    "nvfp4_quantize": (14336, 4036),
    "nvfp4_dequantize": (4036, 14336),
    "mxfp8_pack": (14336, 7392),
    "mxfp8_unpack": (7392, 14336),
    "mxfp8_quantize": (14336, 7392),
    "mxfp8_dequantize": (7392, 14336),
    "mxfp8_direct_receive": (7392, 7392),
    "mxfp8_direct_receive + columnwise": (7392, 14784),
    "scales_swizzle nvfp4": (448, 448),
    "scales_unswizzle nvfp4": (448, 448),
    "scales_swizzle mxfp8": (224, 224),
    "scales_unswizzle mxfp8": (224, 224),
}


@pytest.mark.parametrize("name", BYTES_OF_256)
def test_fewest_bytes(name: str) -> None:
    read, written = BYTES_OF_256[name]
    assert case_of(name).moved(256, 7168) == Moved(256 * read, 256 * written)


def test_fewest_bytes_of_nvfp4_direct_receive() -> None:
    """Two experts of 128 slots, so two of each FP32 value of an expert."""
    rowwise = case_of("nvfp4_direct_receive").moved(256, 7168)
    assert rowwise == Moved(256 * 4036, 256 * (3584 + 448) + 2 * 2 * 4)
    both = case_of("nvfp4_direct_receive + columnwise").moved(256, 7168)
    assert both == Moved(256 * 4036, 2 * rowwise.writes)


def test_padding_of_tiles_is_written() -> None:
    # 160 rows of 18 scales: tiles of 128 x 4 cover 256 x 20. Of it only the scales need be read back.
    assert SwizzleCase("nvfp4", inverse=False).moved(160, 288) == Moved(160 * 18, 256 * 20)
    assert SwizzleCase("nvfp4", inverse=True).moved(160, 288) == Moved(160 * 18, 160 * 18)
    # 32 slots of one expert: a tile row of 128, H = 160 has 5 scale columns, and across 160 rows of 1 column.
    moved = ReceiveCase("mxfp8", columnwise=True).moved(32, 160)
    assert moved == Moved(32 * (160 + 5), 32 * 160 + 128 * 8 + 32 * 160 + 256 * 4)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("hidden", [128, 7168, 2880])
def test_an_operand_of_whole_tiles_is_written_whole(format: str, columnwise: bool, hidden: int) -> None:
    case = ReceiveCase(format, columnwise)
    slab = case.slabs([256], hidden)[0]
    layout = operand_layout(format, hidden, 256, 1, columnwise=columnwise)
    assert {name: nbytes for name, (_, nbytes) in slab.ranges.items()} == {
        name: part.nbytes for name, part in layout.parts.items()
    }


@pytest.mark.parametrize("slots", [16, 32, 96, 128, 1024, 4096, 131072])
def test_slabs_cover_the_slots(slots: int) -> None:
    for case in (ReceiveCase("nvfp4", False), ReceiveCase("mxfp8", True)):
        (rounded,) = case.sizes([slots], 64)
        counts = case.counts(rounded)
        assert sum(counts) == rounded >= slots
        assert len(counts) <= 64
        assert max(counts) - min(counts) <= case.alignment(rounded)
        assert all(count % case.alignment(rounded) == 0 for count in counts)


def test_sizes() -> None:
    assert gigabyte_tokens(7168) == 131072
    for hidden in (32, 64, 2880, 4096, 16384):
        tokens = gigabyte_tokens(hidden)
        assert tokens * 2 * hidden >= 10**9 > tokens * hidden
    assert RowCase("nvfp4", "pack").sizes([16, 100], 7168) == [16, 100]
    assert ReceiveCase("mxfp8", columnwise=True).sizes([16, 32, 100, 130], 7168) == [32, 128, 256]
    swizzle = SwizzleCase("nvfp4", inverse=False)
    assert swizzle.sizes([16, 100], 7168) == [16, 100, 3200]
    assert swizzle.moved(3200, 7168).reads == 100 * 2 * 7168


def test_every_codec_of_the_library_is_measured() -> None:
    functions = {case.name.split()[0] for case in all_cases()}
    assert functions == set(codecs.__all__)


# ---- times and buffers -----------------------------------------------------------------------------


def test_timing() -> None:
    timing = Timing((4.0, 1.0, 2.0, 3.0, 5.0), 7, None)
    assert (timing.median, timing.quartiles) == (3.0, (2.0, 4.0))
    assert timing.spread == pytest.approx(2 / 3)


class Somewhere(HostMachine):
    """With a cache of 1000 bytes and 100,000 bytes of memory."""

    max_sets = 64

    def __init__(self) -> None:
        self.cache_bytes = 1000

    def free_bytes(self) -> int:
        return 100_000


@pytest.mark.parametrize(
    ("nbytes", "held", "sets", "cold"),
    [
        (500, 500, 4, True),  # twice the cache
        (3000, 3000, 2, True),  # never less than two
        (1, 1, 64, False),  # too small for as many buffers as are made
        (500, 25_000, 2, False),  # too large for more
        (90_000, 90_000, 1, True),
    ],
)
def test_buffers_rotate_past_the_cache(nbytes: int, held: int, sets: int, cold: bool) -> None:
    machine: Machine = Somewhere()
    assert machine.sets(nbytes, held) == sets
    assert machine.is_cold(nbytes, sets) is cold


def test_host_times_every_call() -> None:
    made: list[int] = []
    calls = [lambda index=index: made.append(index) for index in range(3)]
    timing = HostMachine().time(calls, 5)
    assert made == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(timing.samples) == 5


@pytest.mark.parametrize("size", [1, 4, 7, 12, 13])
def test_data_repeats(size: int) -> None:
    data = np.arange(1, 5, dtype=np.uint8)
    array = HostMachine().filled((size,), "uint8", data)
    assert array.numpy().tolist() == np.resize(data, size).tolist()


def test_sample_has_both_ends() -> None:
    for count in (1, 2, 3, 1000):
        chosen = sample(count, 8, np.random.default_rng(0))
        assert chosen[0] == 0
        assert chosen[-1] == count - 1
        assert len(chosen) <= 8
        assert chosen == sorted(set(chosen))


def test_data_is_the_same_every_time() -> None:
    first, again = Data(64, 100), Data(64, 100)
    assert (first.tokens == again.tokens).all()
    assert first.tokens.shape == (100, 64)
    assert (first.rows["nvfp4"] == nvte_ep.nvfp4_pack(first.tokens, dtype="bfloat16").numpy()).all()


# ---- the command -----------------------------------------------------------------------------------


def test_figures(measured: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    answer = measured("--no-instead")
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert lines[-1].startswith("OK: ")
    assert all(any(line.startswith(name) for line in lines) for name in NAMES)

    assert (answer["schema"], answer["benchmark"], answer["ok"]) == (1, "codecs", True)
    assert answer["library"] == {"version": nvte_ep.version(), "abi_version": nvte_ep.abi_version()}
    assert answer["device"]["kind"] == "cpu"
    assert answer["checks"]["failed"] == []
    assert answer["checks"]["passed"] > 100
    assert answer["peak_copy"]["bytes"] == 1 << 16
    assert list(dict.fromkeys(result["codec"] for result in answer["results"])) == NAMES
    for result in answer["results"]:
        case = case_of(result["codec"])
        moved = case.moved(result["tokens"], 64)
        assert result["fewest_bytes"] == {
            "formula": case.formula,
            "read": moved.reads,
            "written": moved.writes,
            "total": moved.total,
        }
        times = result["microseconds"]
        assert 0 < times["least"] <= times["quartiles"][0] <= times["median"] <= times["quartiles"][1]
        assert times["samples"] >= 5
        assert result["gbps"] == pytest.approx(moved.total / times["median"] / 1e3)
        copy = result["copy"]
        assert 0 <= copy["bytes"] - moved.total <= 32
        assert copy["gbps"] == pytest.approx(copy["bytes"] / copy["microseconds"]["median"] / 1e3)
        assert result["share_of_copy"] == pytest.approx(copy["microseconds"]["median"] / times["median"])
        assert result["cold"] is (result["buffer_sets"] * moved.total >= 1 << 15)
        assert result["instead"] == []


def test_markdown_has_the_same_rows(
    measured: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.md"
    answer = measured("--no-instead", "--only", "pack,swizzle", "--markdown", str(file))
    text = file.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "tokens" not in line]
    assert len([row for row in rows if "--:" not in row]) == len(answer["results"])
    printed = capsys.readouterr().out
    for line in text.splitlines():
        if line.startswith("## "):
            assert f"\n{line[3:]}, " in printed


def test_only_some_codecs(measured: Callable[..., dict[str, Any]]) -> None:
    answer = measured("--no-instead", "--only", "mxfp8_pack,unswizzle")
    assert list(dict.fromkeys(result["codec"] for result in answer["results"])) == [
        "mxfp8_pack",
        "scales_unswizzle nvfp4",
        "scales_unswizzle mxfp8",
    ]


def test_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--no-instead", "--only", "mxfp8_pack", "--progress"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith("[" + "#" * 24 + "] 4/4")


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    file = tmp_path / "rates.png"
    assert main([*SMALL, "--no-instead", "--only", "pack", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_what_pytorch_takes(measured: Callable[..., dict[str, Any]], framework: Callable[[str], Any]) -> None:
    framework("torch")
    answer = measured("--only", "nvfp4_pack,mxfp8_unpack,swizzle")
    assert "torch" in answer["software"]
    assert answer["not_run"] == []
    for result in answer["results"]:
        (instead,) = result["instead"]
        assert instead["name"] == "torch"
        assert instead["microseconds"]["median"] > 0


def test_what_does_not_run_beside_a_codec_is_said(
    measured: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails() -> Any:
        raise RuntimeError("no such kernel\nand a long trace")

    monkeypatch.setattr(bench_codecs, "instead_of", lambda *_: [fails])
    answer = measured("--only", "mxfp8_pack")
    assert answer["not_run"][0] == "beside mxfp8_pack, 16 tokens: RuntimeError: no such kernel"
    assert answer["ok"] is True
    assert "not run: beside mxfp8_pack, 16 tokens" in capsys.readouterr().out


# ---- the check -------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], None] | None) -> None:
    """Calls of a codec that write into `out` write something else; those that make their result are right."""
    real = getattr(codecs, name)

    def codec(*arguments: Any, out: Any = None, **options: Any) -> Any:
        if out is None:
            return real(*arguments, **options)
        if change is not None:
            real(*arguments, out=out, **options)
            change(out)
        return out

    monkeypatch.setattr(codecs, name, codec)


def flip_last_byte(out: Any) -> None:
    for part in out if isinstance(out, tuple) else (out.bytes if isinstance(out, nvte_ep.Operand) else out,):
        part.view("uint8").numpy().reshape(-1)[-1] ^= 1


@pytest.mark.parametrize("name", [name for name in codecs.__all__ if "direct_receive" not in name])
def test_a_wrong_byte_is_found(
    name: str,
    measured: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(monkeypatch, name, flip_last_byte)
    # The compact scales of 160 tokens end inside a tile: the byte that unswizzle spoils is a scale's.
    answer = measured("--no-instead", "--only", name, code=1)
    assert answer["ok"] is False
    assert any("bytes differ" in line for line in answer["checks"]["failed"])
    assert "\nFAILED: " in capsys.readouterr().out


@pytest.mark.parametrize("name", codecs.__all__)
def test_an_output_that_nobody_wrote_is_found(
    name: str, measured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, name, None)
    answer = measured("--no-instead", "--only", name, code=1)
    assert answer["checks"]["failed"]


@pytest.mark.parametrize("part", ["payload", "scales", "columnwise_payload", "columnwise_scales", "amax"])
def test_a_wrong_byte_of_an_operand_is_found(
    part: str, measured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(operand: nvte_ep.Operand) -> None:
        offset = operand.layout.parts[part].offset
        operand.bytes.numpy()[offset] ^= 1

    spoil(monkeypatch, "nvfp4_direct_receive", change)
    answer = measured("--no-instead", "--only", "nvfp4_direct_receive + columnwise", code=1)
    assert all(f", {part}: " in line for line in answer["checks"]["failed"])


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (
            nvte_ep.CudaError(nvte_ep.Status.CUDA, "nvte_ep_mxfp8_unpack: illegal memory access"),
            "nvte_ep_mxfp8_unpack: illegal memory access",
        ),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_figures_before_a_failure_are_kept(
    failure: BaseException,
    text: str,
    measured: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def codec(*_: Any, **__: Any) -> Any:
        raise failure

    monkeypatch.setattr(codecs, "mxfp8_unpack", codec)
    answer = measured("--no-instead", "--only", "mxfp8_pack,mxfp8_unpack", code=1)
    assert [result["codec"] for result in answer["results"]] == ["mxfp8_pack"] * 2
    assert answer["checks"]["failed"] == [f"mxfp8_unpack, 16 tokens: {text}"]


# ---- wrong arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--sizes", "16,x"], "--sizes: expected numbers of tokens"),
        (["--sizes", "0"], "--sizes: expected numbers of tokens"),
        (["--hidden", "48"], "--hidden: expected a multiple of 32, got 48"),
        (["--hidden", "0"], "--hidden: expected a multiple of 32, got 0"),
        (["--only", "nvfp5"], "--only: no codec is named like 'nvfp5'"),
        (["--device", "tpu"], "--device: expected cuda, cuda:<index> or cpu, got 'tpu'"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codecs", "--quick", "--device", "cpu", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*SMALL, "--plot", "rates.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_too_large_for_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "codecs", "--device", "cpu", "--sizes", "1000000000000", "--only", "nvfp4_pack"]) == 1
    )
    assert "nvfp4_pack of 1000000000000 tokens takes " in capsys.readouterr().err


def test_no_device_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    backends = [{"name": "cuda", "available": False, "reason": "no driver, says the test"}]
    monkeypatch.setattr(bench_machine, "build_info", lambda: {"backends": backends})
    assert main(["bench", "codecs", "--device", "cuda"]) == 1
    assert "no benchmark on a CUDA device: no driver, says the test" in capsys.readouterr().err
    assert bench_machine.open_machine(None).kind == "cpu"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "codecs", "--help"])
    assert ended.value.code == 0
    assert "--sizes" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 2


# ---- on a device, whose runtime is a stand-in ------------------------------------------------------


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    install(monkeypatch, fake)
    backends = [{"name": "cuda", "available": True}]
    monkeypatch.setattr(bench_machine, "build_info", lambda: {"backends": backends})
    monkeypatch.setattr(bench_machine, "_driver_release", lambda: "580.00")
    device = {"name": "Fake", "compute_capability": "9.0", "memory_bytes": fake.memory_bytes}
    monkeypatch.setattr(_probe, "probe_driver", lambda: {"cuda_version": "13.0", "devices": [device]})
    return fake


def test_on_a_device(
    runtime: FakeRuntime,
    measured: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = measured("--no-instead", "--device", "cuda")
    assert answer["device"] == {
        "kind": "cuda",
        "name": "Fake",
        "compute_capability": "9.0",
        "multiprocessors": 2,
        "memory_bytes": runtime.memory_bytes,
        "cache_bytes": runtime.cache_bytes,
        "driver": "580.00",
        "driver_cuda_version": "13.0",
        "bindings_cuda_version": "13.0",
    }
    assert answer["checks"]["failed"] == []
    assert answer["peak_copy"]["method"] == "cudaMemcpyAsync"
    printed = capsys.readouterr().out
    assert "Fake, driver 580.00, CUDA 13.0" in printed
    assert "call us" in printed
    assert max(map(len, printed.splitlines())) <= 80
    # What is timed are calls inside graphs, and of each all the sets of buffers, equally often.
    per_sample = [result["microseconds"]["calls_per_sample"] for result in answer["results"]]
    assert all(
        calls % result["buffer_sets"] == 0
        for calls, result in zip(per_sample, answer["results"], strict=True)
    )
    assert runtime.captured_calls == sum(per_sample) + sum(
        result["buffer_sets"] for result in answer["results"]
    )
    assert runtime.captured_copies > 0
    assert all(result["call_microseconds"] > 0 for result in answer["results"])
    assert runtime.live == set()
    nvte_ep.empty_cache()
    assert runtime.allocations == {}


def test_times_on_a_device_are_those_of_its_events(runtime: FakeRuntime) -> None:
    machine = CudaMachine()
    made: list[bool] = []
    timing = machine.time([lambda: made.append(runtime.capturing)], 4)
    rounds = timing.calls
    assert made == [False, False, True, *[True] * rounds]
    assert len(timing.samples) == 4
    assert min(timing.samples) >= LAUNCH_SECONDS * 1e6 / rounds
    assert runtime.launches == 2 + machine.WARM_REPLAYS + 4


def test_a_failure_ends_the_capture(runtime: FakeRuntime) -> None:
    machine = CudaMachine()

    def fails() -> None:
        if runtime.capturing:
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        machine.time([fails], 1)
    assert not runtime.capturing


def test_copies_rotate_and_are_measured_once(runtime: FakeRuntime) -> None:
    machine = CudaMachine()
    copies = bench_codecs.CopyRate(machine, Frameworks(machine, wanted=False), 1 << 16, 3)
    before = runtime.captured_copies
    copy = copies.of(1000)
    assert copy.nbytes == 1024
    assert copy.timing.calls % (copies.room // 512) == 0
    assert runtime.captured_copies > before
    launches = runtime.launches
    assert copies.of(1000) is copy
    assert runtime.launches == launches


@pytest.mark.parametrize("size", [1, 5, 40, 41])
def test_data_repeats_on_a_device(runtime: FakeRuntime, size: int) -> None:
    data = np.arange(1, 6, dtype=np.uint8)
    machine = CudaMachine()
    array = machine.filled((size,), "uint8", data)
    assert machine.read(array).tolist() == np.resize(data, size).tolist()
