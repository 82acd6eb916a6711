# SPDX-License-Identifier: Apache-2.0
"""nvte-ep bench ep: bytes that it counts, what it prints and writes, that its check can fail, and how it
drives a device and NCCL EP; and what nvte-ep plan makes of its figures."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import nvte_ep
import pytest
from fake_cuda import FakeRuntime, install
from nvte_ep import job
from nvte_ep.commands import (
    _figures,
    _nccl_api,
    _nccl_ep_abi,
    _probe,
    bench_ep,
    bench_ep_nccl,
    bench_ep_nccl_ep,
    bench_machine,
    main,
)
from nvte_ep.commands._checks import Checks, unpack
from nvte_ep.commands._numerics import bf16_values
from nvte_ep.commands.bench_ep_clock import CudaClock, HostClock, Recorder, Spread
from nvte_ep.commands.bench_ep_data import (
    BLOCK,
    Data,
    Floor,
    Operation,
    Shape,
    floor,
    operations,
    step_operations,
)
from nvte_ep.commands.bench_ep_goals import goal, host_goal
from nvte_ep.commands.bench_ep_library import Library, Outputs, Sampling
from nvte_ep.commands.bench_ep_ranks import Processes, Ranks, run_threads
from nvte_ep.commands.bench_machine import CudaMachine, HostMachine
from nvte_ep.job import Job

SHAPE = ["--tokens", "40", "--hidden", "64", "--top-k", "3", "--experts", "8", "--alignment", "32"]
SMALL = ["bench", "ep", "--device", "cpu", *SHAPE]
TINY = Shape(40, 64, 3, 8, 32)
LAYER = Shape(4096, 7168, 8, 64, 128)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ep, "COPY_BYTES", {"cuda": 1 << 16, "cpu": 1 << 16})
    monkeypatch.setattr(bench_machine, "_host_cache_bytes", lambda: 1 << 14)
    monkeypatch.setattr(HostMachine, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(CudaClock, "FILLER_BYTES", 1 << 12)


@pytest.fixture
def measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the command and reads what --json wrote."""

    def run(*arguments: str, base: list[str] = SMALL, code: int = 0) -> dict[str, Any]:
        file = tmp_path / "figures.json"
        assert main([*base, *arguments, "--json", str(file)]) == code, capsys.readouterr().out
        answer: dict[str, Any] = json.loads(file.read_text())
        return answer

    return run


def alone(tmp_path: Path) -> Ranks:
    return Processes(Job(0, 1, tmp_path))


# ---- inputs and the fewest bytes -------------------------------------------------------------------------


def test_routing_is_that_of_the_library() -> None:
    data = Data(TINY, 2)

    def routed(ranks: Ranks) -> nvte_ep.Routing:
        comm = ranks.communicator("threads", 0)
        with nvte_ep.Group(
            comm, num_experts=8, hidden=64, max_tokens_per_rank=40, recv_capacity=data.capacity
        ) as group:
            return group.handle(top_k=3, alignment=32).prepare(data.topk(ranks.rank, 1))

    for rank, found in enumerate(run_threads(2, routed)):
        wanted = data.routed(rank, 1)
        assert list(found.rows_per_expert.numpy()) == wanted.rows_per_expert
        np.testing.assert_array_equal(found.slot_source.numpy()[: wanted.slots], wanted.slot_source)
        assert found.total_rows.numpy()[0] == wanted.slots < data.capacity


def test_every_token_tells_its_place() -> None:
    data = Data(TINY, 4)
    seen = set()
    for rank in range(4):
        for index in range(3):
            for token in data.tokens(rank, index):
                seen.add(tuple(token[:32] >> 15))
    assert len(seen) == 4 * 3 * 40
    np.testing.assert_array_equal(data.tokens(1, 2)[[7, 3]], data.tokens(1, 2, np.array([7, 3])))
    for wire in ("mxfp8", "nvfp4"):  # where the signs come through
        rows = data.packed(1, 0, wire)
        values = bf16_values(unpack(wire, rows, 64, "bfloat16"))
        np.testing.assert_array_equal(values[:, :32] < 0, data.tokens(1, 0)[:, :32] >> 15 == 1)


def test_floors_by_hand() -> None:
    """One rank, H = 7168: BF16 14336 bytes, packed rows 7392 and 4048."""
    data = Data(LAYER, 1)
    slots = data.routed(0).slots
    assert 32768 <= slots <= 32768 + 64 * 127

    def of(operation: Operation) -> Floor:
        return floor(data, operation, 0)

    tokens = 4096
    assert of(Operation("dispatch")) == Floor(tokens * 14336 + slots * 14336, 0)
    assert of(Operation("dispatch", "mxfp8", given="packed", receive="rows")) == Floor(
        (tokens + slots) * 7392, 0
    )
    assert of(Operation("dispatch", "nvfp4", given="packed", receive="rows")) == Floor(
        (tokens + slots) * 4048, 0
    )
    # Codes and scales, and two FP32 values an expert; with alignment 128 no tile has padding.
    assert of(Operation("dispatch", "nvfp4", receive="operand")) == Floor(
        tokens * 14336 + slots * (3584 + 448) + 64 * 8, 0
    )
    assert of(Operation("combine")) == Floor((32768 + tokens) * 14336, 0)
    assert of(Operation("prepare")).link_bytes == 0


def test_floor_over_the_link() -> None:
    """Each token crosses once to a rank, however many of its experts live there."""
    data = Data(TINY, 2)
    crossing = sum((data.topk(1) < 4).any(axis=1))
    found = floor(data, Operation("dispatch", "nvfp4", given="packed", receive="rows"), 0)
    assert found.link_bytes == crossing * nvte_ep.row_bytes("nvfp4", 64)
    assert floor(data, Operation("combine"), 0).link_bytes == crossing * 128
    assert Floor(4200, 0).microseconds(4.2, 1) == 1.0
    assert Floor(4200, 760).microseconds(4.2, 0.38) == 2.0


def test_names_are_unique() -> None:
    keys = [operation.key for operation in [*operations(), *step_operations()]]
    assert len(set(keys)) == len(keys)
    assert "dispatch nvfp4 -> operand + columns" in keys
    assert "combine_backward nvfp4 stochastic -> operand + columns" in keys


# ---- on the host -----------------------------------------------------------------------------------------


def test_on_the_host(measured: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    answer = measured("--ranks", "2")
    assert answer["ok"]
    assert answer["ranks"] == {
        "number": 2,
        "are": "threads of one process",
        "devices": 1,
        "num_sms": 0,
    }
    (shape,) = answer["shapes"]
    assert (shape["tokens"], shape["hidden"], shape["experts"]) == (40, 64, 8)
    keys = [entry["operation"] for entry in shape["operations"]]
    assert keys == [operation.key for operation in [*operations(), *step_operations()]]
    for entry in shape["operations"]:
        figure = entry["figures"]["threads"]
        times = figure["microseconds"]
        assert 0 < times["10_percent"] <= times["median"] <= times["90_percent"]
        assert figure["over_floor"] == pytest.approx(times["median"] / entry["floor_microseconds"])
        assert figure["goal"] is None  # those are of a device
    assert answer["checks"]["passed"] > 200
    printed = capsys.readouterr().out
    assert "OK: " in printed
    assert "dispatch nvfp4 -> operand + columns" in printed


def test_lists_are_combined(measured: Callable[..., dict[str, Any]]) -> None:
    answer = measured("--tokens", "8,40", "--experts", "4,8", "--only", "prepare,combine bf16")
    shapes = [(shape["tokens"], shape["experts"]) for shape in answer["shapes"]]
    assert shapes == [(8, 4), (40, 4), (8, 8), (40, 8)]
    assert [e["operation"] for e in answer["shapes"][0]["operations"]] == ["prepare", "combine bf16"]


def test_markdown(measured: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    measured("--only", "prepare,step", "--markdown", str(tmp_path / "figures.md"))
    text = (tmp_path / "figures.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 4
    assert all(row.count(" | ") == rows[0].count(" | ") for row in rows)


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    file = tmp_path / "times.png"
    assert main([*SMALL, "--only", "prepare,combine", "--tokens", "8,40", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_plot_of_figures_that_are_there(tmp_path: Path) -> None:
    """tools/plot_ep.py, with the figures of the source tree."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    root = Path(__file__).resolve().parents[2]
    figures = [root / "benchmarks" / "h200" / f"ep_2gpus_{name}.json" for name in ("layer", "steps")]
    file = tmp_path / "times.png"
    environment = os.environ | {"PYTHONPATH": str(root / "python")}
    command = [sys.executable, root / "tools" / "plot_ep.py", file, *figures]
    subprocess.run(command, check=True, env=environment)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "no such thing"], "no operation"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "x"], "--tokens"),
        (["--hidden", "100"], "--hidden"),
        (["--experts", "7", "--ranks", "2"], "--experts"),
        (["--top-k", "9"], "--top-k"),
        (["--alignment", "24"], "--alignment"),
        (["--alignment", "96"], "--alignment"),
        (["--transports", "pigeon"], "--transports"),
        (["--num-sms", "-1"], "--num-sms"),
        (["--ranks", "-3"], "--ranks: expected 1 or more, got -3"),
        (["--link-gbps", "0"], "--link-gbps: expected more than 0, got 0"),
        (["--nccl-ep-sms", "-1"], "--nccl-ep-sms"),
        (["--device", "tpu"], "--device"),
    ],
)
def test_refuses(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_transport_that_is_not_here(measured: Callable[..., dict[str, Any]]) -> None:
    answer = measured("--transports", "nccl,threads", "--only", "prepare")
    assert len(answer["not_run"]) == 1
    assert answer["not_run"][0].startswith("nccl, T 40")
    assert list(answer["shapes"][0]["operations"][0]["figures"]) == ["threads"]


def test_nothing_measured_is_an_error(
    measured: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = measured("--transports", "peer", "--only", "prepare", code=2)
    assert not answer["ok"]
    printed = capsys.readouterr()
    assert "OK" not in printed.out
    assert printed.err.startswith("nvte-ep bench ep: error: nothing was measured: peer, T 40")


@pytest.mark.parametrize("launched", [False, True])
def test_processes_need_a_gpu(
    launched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever starts them."""
    monkeypatch.setattr(bench_ep, "cuda_reason", lambda: "there is none")
    if launched:
        for name, value in job.environment_of(0, 2, "/nowhere").items():
            monkeypatch.setenv(name, value)
    assert main(["bench", "ep", *SHAPE, *([] if launched else ["--ranks", "2"])]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "ranks as processes need a GPU: there is none; use --threads" in printed.err


def test_the_host_is_not_described_as_a_device(
    measured: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = measured("--ranks", "2", "--only", "prepare")
    printed = capsys.readouterr().out
    assert answer["rates"]["link_gbps"] is None
    for word in ("device", "graph", "link", "NCCL"):
        assert word not in printed
    assert "small shape" not in printed
    measured("--only", "prepare", base=["bench", "ep", "--device", "cpu"])
    assert "the host is measured with a small shape" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("only", "part"),
    [
        ("packed -> rows", "received"),
        ("dispatch bf16 -> decoded", "received"),
        ("dispatch nvfp4 -> operand", "operand"),
        ("combine bf16", "result"),
        ("dispatch_backward bf16", "grad_topk_weights"),
    ],
)
def test_a_wrong_byte_fails_the_run(
    only: str,
    part: str,
    measured: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One byte of the first slab or token, turned after the library has written it."""
    real = nvte_ep._lib.call

    def call(name: str, *arguments: Any) -> None:
        real(name, *arguments)
        for argument in arguments:
            struct = getattr(argument, "_obj", None)
            member = getattr(struct, part, None)
            if member and not hasattr(struct, "topk_idx"):
                contents = member.contents
                address = contents.payload if part == "operand" else contents.data
                ctypes.c_uint8.from_address(address + 1).value ^= 0x40

    monkeypatch.setattr(nvte_ep._lib, "call", call)
    answer = measured("--only", only, code=1)
    assert not answer["ok"]
    assert any(only.split(" ->")[0].split(" packed")[0] in line for line in answer["checks"]["failed"])


def test_slots_past_those_in_use_are_watched(tmp_path: Path) -> None:
    data, machine = Data(TINY, 1), HostMachine()
    outputs = Outputs(machine, data, 0, Sampling())
    slots = machine.poisoned((data.capacity, 64), "uint8")
    checks = Checks("here")
    outputs._untouched(checks, "all", slots)
    assert (checks.passed, checks.failed) == (1, [])
    slots.numpy()[-1, -1] = 0
    outputs._untouched(checks, "all", slots)
    assert len(checks.failed) == 1


def test_sums_are_those_of_the_slots(tmp_path: Path) -> None:
    data = Data(TINY, 2)
    total, magnitude = data.sums(1, 0, np.array([5]))
    values = []
    for rank in range(2):
        routed = data.routed(rank)
        for slot in range(routed.slots):
            if (routed.source_rank[slot], routed.source_token[slot]) == (1, 5):
                values.append(bf16_values(data.slot_block(rank, 0))[slot % BLOCK])
    assert len(values) == 3
    np.testing.assert_allclose(total[0], np.sum(values, axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(magnitude[0], np.sum(np.abs(values), axis=0), rtol=1e-5)


# ---- ranks and clocks ------------------------------------------------------------------------------------


def test_the_slowest_rank_counts() -> None:
    def body(ranks: Ranks) -> Spread:
        clock = HostClock(HostMachine(), ranks)
        return clock.slowest([1.0 + ranks.rank, 5.0 - ranks.rank], 2)

    for spread in run_threads(3, body):
        assert spread == Spread((3.0, 5.0), 2)
        assert spread.median == 4.0


def test_a_rank_that_fails_ends_the_others() -> None:
    def body(ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise ValueError("rank 1 is out")
        ranks.meet()

    with pytest.raises(ValueError, match="rank 1 is out"):
        run_threads(3, body)


def test_processes_exchange_values(tmp_path: Path) -> None:
    assert alone(tmp_path).gather({"a": [1.5, None]}) == [{"a": [1.5, None]}]
    two = [Processes(Job(rank, 2, tmp_path)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        gathered = list(pool.map(lambda ranks: ranks.gather(f"from {ranks.rank}"), two))
    assert gathered == [["from 0", "from 1"]] * 2


def test_recorder(tmp_path: Path) -> None:
    tokens = np.ones((2, 32), np.float32)
    rows = nvte_ep.Array.empty((2, nvte_ep.row_bytes("nvfp4", 32)))
    with Recorder() as recorder:
        nvte_ep.nvfp4_pack(tokens, out=rows)
    wanted = rows.numpy().copy()
    rows.numpy()[:] = 0
    recorder.idle()()
    assert not rows.numpy().any()
    recorder.bare()()
    np.testing.assert_array_equal(rows.numpy(), wanted)
    with Recorder() as recorder:
        nvte_ep.nvfp4_pack(tokens, out=rows)
    tensor = recorder.made[0][1][1].contents
    tensor.data = None
    try:
        with pytest.raises(nvte_ep.InvalidArgumentError):
            recorder.bare()()
    finally:
        tensor.data = rows.pointer  # the struct is kept for the next array that lies there


# ---- on a device that is none ----------------------------------------------------------------------------


class FakeNcclEp:
    """NCCL EP as far as Python sees it: takes the calls and does nothing."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def call(self, name: str, *arguments: Any) -> None:
        types = _nccl_ep_abi.EP_FUNCTIONS.get(name) or _nccl_ep_abi.NCCL_FUNCTIONS[name]
        ctypes.CFUNCTYPE(ctypes.c_int, *types)(lambda *_: 0)(*arguments)  # the arguments fit
        self.made.append(name)

    def versions(self) -> dict[str, str]:
        return {"NCCL": "2.30.7", "NCCL EP": "0.2.0"}


def patch_device(monkeypatch: pytest.MonkeyPatch, fake: FakeRuntime) -> None:
    install(monkeypatch, fake)
    monkeypatch.setattr(bench_ep, "cuda_reason", lambda: None)
    monkeypatch.setattr(bench_machine, "_driver_release", lambda: "580.00")
    device = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory_bytes": 1 << 33}
    monkeypatch.setattr(_probe, "probe_driver", lambda: {"cuda_version": "13.0", "devices": [device]})


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime(memory_bytes=1 << 33)
    patch_device(monkeypatch, fake)
    return fake


@pytest.fixture
def nccl_ep(monkeypatch: pytest.MonkeyPatch) -> FakeNcclEp:
    api = FakeNcclEp()
    monkeypatch.setattr(bench_ep_nccl_ep, "NcclEpApi", lambda: api)
    return api


ON_DEVICE = [
    "bench", "ep", "--device", "cuda", "--transports", "threads", "--no-host",
    "--tokens", "48", "--hidden", "512", "--top-k", "3", "--experts", "8", "--alignment", "32",
]  # fmt: skip


def test_on_a_device(runtime: FakeRuntime, measured: Callable[..., dict[str, Any]]) -> None:
    answer = measured("--no-nccl-ep", base=ON_DEVICE)
    assert answer["ok"]
    assert answer["device"]["name"] == "NVIDIA H200"
    for entry in answer["shapes"][0]["operations"]:
        calls = entry["figures"]["threads"]["microseconds"]["calls_per_sample"]
        if entry["verb"] == "step":
            assert (calls, entry["buffer_sets"], entry["cold"]) == (1, 1, False)
        else:
            # prepare rotates routings, everything else its buffers.
            sets = 2 if entry["verb"] == "prepare" else entry["buffer_sets"]
            assert calls % sets == 0
    assert runtime.live == set()
    nvte_ep.empty_cache()
    assert runtime.allocations == {}


def test_nccl_ep_beside_it(
    runtime: FakeRuntime, nccl_ep: FakeNcclEp, measured: Callable[..., dict[str, Any]]
) -> None:
    """It did nothing here: its results are told as different, and do not fail the run."""
    answer = measured(base=ON_DEVICE)
    assert answer["ok"]
    assert answer["software"]["NCCL EP"] == "0.2.0"
    assert any(note.startswith("rank 0: NCCL EP, dispatch bf16") for note in answer["notes"])
    by_name = {entry["operation"]: entry["figures"] for entry in answer["shapes"][0]["operations"]}
    rows = by_name["dispatch nvfp4 packed -> rows"]["NCCL EP"]["ways"]
    assert set(rows) == {
        f"{sms}, {way}" for sms in ("its SMs", "24 SMs") for way in ("rows as BF16", "codes and scales apart")
    }
    assert set(by_name["combine bf16"]["NCCL EP"]["ways"]) == {"its SMs", "132 SMs"}
    assert (
        "low latency, packing and its routing excluded" in by_name["step nvfp4 dispatch"]["NCCL EP"]["ways"]
    )
    for name in ("dispatch nvfp4 -> operand", "combine_backward nvfp4 stochastic -> operand + columns"):
        assert "pack + NCCL EP + direct receive" in by_name[name]["NCCL EP"]["way"]
        own = by_name[name]["threads"]
        ratio = by_name[name]["NCCL EP"]["microseconds"]["median"] / own["microseconds"]["median"]
        assert own["nccl_ep_over_it"] == pytest.approx(ratio)
    assert "NCCL EP" not in by_name["dispatch nvfp4 -> decoded"]
    # Everything is given back, the groups before the communicator.
    counted = {name: nccl_ep.made.count(name) for name in set(nccl_ep.made)}
    assert counted["ncclEpCreateGroup"] == counted["ncclEpGroupDestroy"] == 4
    assert counted["ncclEpInitHandle"] + counted["ncclEpCreateHandle"] == counted["ncclEpHandleDestroy"] == 4
    assert nccl_ep.made[-1] == "ncclCommDestroy"


def test_quick(measured: Callable[..., dict[str, Any]]) -> None:
    answer = measured("--quick", "--tokens", "40,600")
    small, large = ([e["operation"] for e in shape["operations"]] for shape in answer["shapes"])
    assert small == ["prepare", *(operation.key for operation in step_operations())]
    assert large == [
        "prepare",
        "dispatch bf16 -> decoded",
        "dispatch mxfp8 packed -> rows",
        "dispatch mxfp8 -> operand",
        "dispatch mxfp8 -> operand + columns",
        "dispatch nvfp4 packed -> rows",
        "dispatch nvfp4 -> operand",
        "dispatch nvfp4 -> operand + columns",
        "combine bf16",
    ]


def test_quick_spares_compilations(
    runtime: FakeRuntime, nccl_ep: FakeNcclEp, measured: Callable[..., dict[str, Any]]
) -> None:
    answer = measured("--quick", "--only", "dispatch bf16 ->,backward bf16,step", base=ON_DEVICE)
    by_name = {entry["operation"]: entry["figures"] for entry in answer["shapes"][0]["operations"]}
    assert {name for name, figures in by_name.items() if "NCCL EP" in figures} == {
        operation.key for operation in step_operations()
    }
    answer = measured(
        "--quick", "--only", "dispatch bf16 ->,backward bf16", "--tokens", "600", base=ON_DEVICE
    )
    by_name = {entry["operation"]: entry["figures"] for entry in answer["shapes"][0]["operations"]}
    assert {name for name, figures in by_name.items() if "NCCL EP" in figures} == {"dispatch bf16 -> decoded"}


def test_the_same_multiprocessors_for_all(
    runtime: FakeRuntime, nccl_ep: FakeNcclEp, measured: Callable[..., dict[str, Any]]
) -> None:
    answer = measured("--num-sms", "24", "--only", "packed -> rows", base=ON_DEVICE)
    assert answer["ranks"]["num_sms"] == 24
    assert answer["not_run"] == [] or "num_sms" in answer["not_run"][0]
    ways = answer["shapes"][0]["operations"][0]["figures"]["NCCL EP"]["ways"]
    assert set(ways) == {"24 SMs, rows as BF16", "24 SMs, codes and scales apart"}


def test_nccl_ep_that_fails_is_told(
    runtime: FakeRuntime,
    nccl_ep: FakeNcclEp,
    measured: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = nccl_ep.call

    def call(name: str, *arguments: Any) -> None:
        if name == "ncclEpCombine":
            raise nvte_ep.TransportError(nvte_ep.Status.TRANSPORT, "ncclEpCombine: internal error")
        real(name, *arguments)

    monkeypatch.setattr(nccl_ep, "call", call)
    answer = measured("--only", "combine bf16,prepare", base=ON_DEVICE)
    assert answer["ok"]
    assert [line for line in answer["not_run"] if "ncclEpCombine: internal error" in line]
    assert list(answer["shapes"][0]["operations"][1]["figures"]) == ["threads"]


def test_plain_nccl(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 0 of two, with an NCCL that does nothing: what it is asked for, and that the check sees it."""
    api = FakeNcclEp()
    monkeypatch.setattr(bench_ep_nccl, "NcclApi", lambda: api)
    monkeypatch.setattr(bench_ep_nccl, "new_comm", lambda *_: ctypes.c_void_p(1))
    ranks = Processes(Job(0, 2, tmp_path))
    data = Data(TINY, 2)
    side = bench_ep_nccl.SendReceive(ranks, CudaMachine(), data, Sampling())
    packed = Operation("dispatch", "nvfp4", given="packed", receive="rows")
    assert list(side.work(Operation("combine"), 1)) == []
    assert list(side.work(Operation("dispatch", "nvfp4", receive="rows"), 1)) == []
    (work,) = side.work(packed, 2)
    work.calls[0]()
    assert api.made == ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]
    checks = Checks("here")
    work.check(checks)
    assert len(checks.failed) == 2
    (work,) = side.work(Operation("dispatch"), 1)
    side.close()
    assert api.made[-1] == "ncclCommDestroy"


def test_libraries_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_library(name: str, mode: int = 0) -> Any:
        opened.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(_nccl_api.ctypes, "CDLL", open_library)
    with pytest.raises(nvte_ep.UnsupportedError, match=r"libnccl\.so\.2.*pip install"):
        _nccl_api.NcclApi()
    monkeypatch.setattr(_nccl_api.NcclApi, "__init__", lambda self: None)
    monkeypatch.setenv("NCCL_EP_HOME", "/opt/nccl_ep")
    opened.clear()
    with pytest.raises(nvte_ep.UnsupportedError, match=r"libnccl_ep not found.*pip install nccl-extensions"):
        _nccl_api.NcclEpApi()
    assert opened[0] == "/opt/nccl_ep/lib/libnccl_ep.so"
    assert "libnccl_ep.so.0" in opened


def test_structs_are_those_of_the_header() -> None:
    for struct, nbytes in _nccl_ep_abi.SIZES.items():
        assert ctypes.sizeof(struct) == nbytes, struct.__name__
    tensor = _nccl_ep_abi.tensor(0x1000, (3, 5), "bfloat16")
    assert (tensor.size, tensor.magic, tensor.ndim, tensor.datatype) == (48, 0xCAFECAFE, 2, 9)
    assert (tensor.data, list(tensor.sizes[:2])) == (0x1000, [3, 5])


def test_a_device_times_whole_rounds(runtime: FakeRuntime, tmp_path: Path) -> None:
    machine = CudaMachine()
    clock = CudaClock(machine, alone(tmp_path))
    made: list[int] = []
    spread = clock.time([lambda: made.append(0), lambda: made.append(1)], 4)
    assert spread.calls % 2 == 0
    assert len(spread.samples) == 4
    assert made.count(0) == made.count(1) == 2 + spread.calls // 2
    launches = runtime.launches
    made.clear()
    single = clock.time([lambda: made.append(0)], 3, single=True)
    assert (single.calls, len(single.samples), len(made)) == (1, 3, 2)
    assert runtime.launches == launches + clock.WARM_REPLAYS + 3


def test_an_untimed_library_call_is_checked_too(tmp_path: Path) -> None:
    """The check sees what the calls wrote, and nothing that was there before."""
    data, machine = Data(TINY, 1), HostMachine()
    library = Library("threads", alone(tmp_path), machine, data, Sampling())
    (work,) = library.work(Operation("dispatch", "nvfp4", receive="operand"), 2)
    checks = Checks("here")
    work.check(checks)
    assert checks.failed  # nothing was received yet
    for call in work.calls:
        call()
    checks = Checks("here")
    work.check(checks)
    assert (checks.failed, checks.passed > 10) == ([], True)
    library.close()


# ---- goals -----------------------------------------------------------------------------------------------


def test_goals() -> None:
    dispatch = Operation("dispatch")
    budget = goal("peer", LAYER, dispatch, 1, "NVIDIA H200", 0, 600.0)
    assert budget is not None
    assert budget.microseconds == 160
    assert goal("peer", LAYER, dispatch, 1, "NVIDIA H100", 0, 600.0) is None
    assert goal("peer", TINY, dispatch, 1, "NVIDIA H200", 0, 600.0) is None
    assert goal("nccl", LAYER, dispatch, 1, "NVIDIA H200", 0, 600.0) is None
    overhead = goal("nccl_ep", LAYER, dispatch, 2, "any", 0, 600.0)
    assert overhead is not None
    assert overhead.microseconds == pytest.approx(618)
    plain = goal("nccl", LAYER, dispatch, 2, "any", 0, None, 100.0)
    assert plain is not None
    assert plain.microseconds == pytest.approx(110)
    bound = goal("peer", LAYER, dispatch, 2, "NVIDIA H200", 24, 600.0)
    assert bound is not None
    assert bound.microseconds == 300
    assert host_goal(4) == 13


# ---- plan ------------------------------------------------------------------------------------------------


def test_rule_of_exact_points() -> None:
    rule = _figures.fit([(10.0, 25.0), (100.0, 205.0), (50.0, 105.0)])
    assert (rule.overhead, rule.factor) == (pytest.approx(5), pytest.approx(2))
    assert rule.microseconds(1000) == pytest.approx(2005)


@pytest.mark.parametrize(
    "points", [[(10.0, 15.0)], [(10.0, 15.0), (10.0, 15.0)], [(10.0, 14.0), (100.0, 160.0)]]
)
def test_rule_without_a_fixed_part(points: list[tuple[float, float]]) -> None:
    rule = _figures.fit(points)
    assert rule.overhead == 0
    assert 1.4 <= rule.factor <= 1.6


def test_rule_of_times_that_fall() -> None:
    rule = _figures.fit([(10.0, 30.0), (100.0, 20.0)])
    assert rule.factor == 0
    assert 20 <= rule.overhead <= 30


def test_one_shape_takes_the_fixed_part_of_a_call_like_it() -> None:
    def shape(**times: tuple[float, float]) -> dict[str, Any]:
        names = {
            "nvfp4": "dispatch nvfp4 -> operand",
            "mxfp8": "dispatch mxfp8 -> operand",
            "sums": "combine bf16",
        }
        return {
            "tokens": 4096,
            "operations": [
                {
                    "operation": names[name],
                    "floor_microseconds": time[0],
                    "figures": {"peer": {"microseconds": {"median": time[1]}}},
                }
                for name, time in times.items()
            ],
        }

    document = {
        "device": {"name": "a GPU"},
        "ranks": {"number": 2},
        "shapes": [
            shape(nvfp4=(10.0, 40.0), mxfp8=(20.0, 60.0), sums=(10.0, 30.0)),
            shape(nvfp4=(100.0, 220.0)),
        ],
    }
    rules = _figures._read(document, "a test", "peer").rules
    assert rules["dispatch nvfp4 -> operand"].overhead == pytest.approx(20)
    assert rules["dispatch mxfp8 -> operand"].microseconds(20) == pytest.approx(60)
    assert rules["dispatch mxfp8 -> operand"].microseconds(0) == pytest.approx(20)
    assert rules["combine bf16"].microseconds(20) == pytest.approx(60)  # there is none like it


def test_plan_by_figures(
    measured: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = measured("--tokens", "40,8")
    capsys.readouterr()
    for shape in document["shapes"]:  # times that follow a rule
        for entry in shape["operations"]:
            for figure in entry["figures"].values():
                figure["microseconds"]["median"] = 7 + 3 * entry["floor_microseconds"]
    (prepare,) = (
        shape["operations"][0]["figures"]["threads"]["microseconds"]["median"]
        for shape in document["shapes"]
        if shape["tokens"] == 40  # the nearest to 4096
    )
    file = tmp_path / "other.json"
    file.write_text(json.dumps(_figures.reduced(document, "threads")))
    arguments = ["plan", "--figures", str(file), "--transport", "threads", "--ranks", "1", "--json"]
    assert main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["figures"]["transport"] == "threads"
    for found in plan["formats"]:
        expected = found["expected"]
        assert expected["dispatch"] == pytest.approx(7 + 3 * found["dispatch"]["microseconds"])
        assert expected["combine"] == pytest.approx(7 + 3 * found["combine"]["microseconds"])
        assert expected["prepare"] == pytest.approx(prepare)
        parts = ("prepare", "dispatch", "combine")
        assert expected["layer"] == pytest.approx(sum(expected[part] for part in parts))
        assert expected["training layer"] > expected["layer"]
    assert main(arguments[:-1]) == 0
    assert "time expected by the figures" in capsys.readouterr().out


def test_plan_without_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--no-figures"]) == 0
    assert "expected" not in capsys.readouterr().out.split("floors")[0]


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "codecs"}', '{"benchmark": "ep", "schema": 1}'])
def test_plan_refuses_what_are_no_figures(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "no.json"
    file.write_text(text)
    assert main(["plan", "--figures", str(file)]) == 2
    assert "--figures" in capsys.readouterr().err


def test_plan_refuses_a_transport_without_figures(
    measured: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured("--only", "prepare")
    assert main(["plan", "--figures", str(tmp_path / "figures.json")]) == 2
    assert "none of the transport peer" in capsys.readouterr().err


# ---- processes -------------------------------------------------------------------------------------------

A_RANK = """
import sys
sys.path.insert(0, sys.argv[1])
import pytest
import test_bench_ep as tests
from nvte_ep.commands import bench_ep_ranks

patch = pytest.MonkeyPatch()
tests.patch_device(patch, tests.FakeRuntime(memory_bytes=1 << 33))
patch.setattr(tests.bench_ep, "COPY_BYTES", {"cuda": 1 << 16, "cpu": 1 << 16})
patch.setattr(tests.bench_ep_nccl_ep, "NcclEpApi", tests.FakeNcclEp)

def unique_id(kind):
    raise tests.nvte_ep.UnsupportedError(tests.nvte_ep.Status.UNSUPPORTED, "no NCCL")

patch.setattr(bench_ep_ranks, "unique_id", unique_id)
sys.exit(tests.main(sys.argv[2:]))
"""


def test_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks with a device each, which are none; one of them prints and writes. The library cannot join
    them, which every rank takes the same way."""
    script = tmp_path / "rank.py"
    script.write_text(A_RANK)
    file = tmp_path / "figures.json"
    command = [sys.executable, str(script), str(Path(__file__).resolve().parent)]
    only = ["--only", "prepare,dispatch bf16 ->,combine bf16,step", "--json", str(file)]
    command += ["bench", "ep", "--device", "cuda", "--transports", "nccl", *SHAPE, *only]
    environment = {"PYTHONPATH": str(Path(nvte_ep.__file__).resolve().parents[1])}
    assert job.launch(command, 2, environment=environment) == 0
    printed = capfd.readouterr().out
    assert printed.count("OK: ") == 1
    answer = json.loads(file.read_text())
    assert answer["ranks"]["number"] == 2
    assert answer["ranks"]["are"] == "processes"
    assert answer["not_run"] == [f"nccl, {TINY.name}: nccl: no NCCL"]
    for entry in answer["shapes"][0]["operations"]:
        assert list(entry["figures"]) == ["NCCL EP"]
        assert entry["fewest_bytes"]["link_bytes"] > 0
    # Both ranks compared what they received, and found that NCCL EP did nothing.
    assert any(note.startswith("rank 0: NCCL EP, combine") for note in answer["notes"])
    assert any(note.startswith("rank 1: NCCL EP, combine") for note in answer["notes"])


def test_what_rank_0_cannot_make_fails_on_every_rank() -> None:
    def body(ranks: Ranks) -> str:
        def make() -> str:
            raise nvte_ep.UnsupportedError(nvte_ep.Status.UNSUPPORTED, "no such thing")

        with pytest.raises(nvte_ep.UnsupportedError, match="no such thing"):
            ranks.broadcast(make)
        return str(ranks.broadcast(lambda: "but this"))

    assert run_threads(3, body) == ["but this"] * 3
