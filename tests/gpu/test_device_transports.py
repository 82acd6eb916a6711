# SPDX-License-Identifier: Apache-2.0
"""Transports of device memory against `threads`: the same calls with the same inputs give the same bytes.

Ranks are threads or processes; several of them share a GPU where there are fewer GPUs than ranks.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import nvte_ep
import pytest
from distributed.launcher import Rank, run_processes, run_threads
from distributed.transports import environment

with contextlib.suppress(ImportError):  # the fixture says so, and fails where NVTE_EP_REQUIRE names it
    import torch
pytestmark = pytest.mark.usefixtures("torch")


@dataclass(frozen=True)
class Setup:
    ranks: int
    tokens: tuple[int, ...]  # of each rank
    hidden: int = 512
    experts: int = 8
    top_k: int = 3
    alignment: int = 32
    dispatch: str = "nvfp4"
    combine_backward: str = "nvfp4"
    dtype: str = "bfloat16"
    capacity: int = 0  # of each rank; 0: eager
    overflow: str = "error"
    zero_copy: bool = False
    num_sms: int = 0

    def __str__(self) -> str:
        kind = "eager" if self.capacity == 0 else f"capacity {self.capacity}"
        kind += f", T {max(self.tokens)}" if max(self.tokens) > 128 else ""
        kind += f", E {self.experts}" if self.experts % 4 else ""
        kind += ", zero copy" if self.zero_copy else ""
        kind += f", {self.num_sms} SMs" if self.num_sms else ""
        return f"{self.ranks} ranks, {self.dispatch}, {self.dtype}, H {self.hidden}, {kind}"


SETUPS = [
    Setup(1, (70,), capacity=512),
    Setup(2, (70, 33), capacity=640),
    Setup(2, (70, 33), dispatch="mxfp8", combine_backward="mxfp8", capacity=640),
    Setup(2, (70, 33), dispatch="bf16", combine_backward="bf16", dtype="float32", capacity=640),
    Setup(2, (0, 65), hidden=2880, dispatch="nvfp4", combine_backward="mxfp8", dtype="float16", capacity=640),
    Setup(2, (64, 64), capacity=96, overflow="drop"),
    Setup(4, (1, 128, 0, 17), experts=16, top_k=8, alignment=128, capacity=2048),
    Setup(4, (31, 64, 5, 17), experts=16, top_k=8, alignment=16, capacity=0),
]


def inputs(setup: Setup, rank: int) -> dict[str, Any]:
    rng = np.random.default_rng([17, rank])
    tokens = setup.tokens[rank]
    topk = np.argsort(rng.random((tokens, setup.experts)), axis=1)[:, : setup.top_k].astype(np.int64)
    topk[rng.random(topk.shape) < 0.1] = -1
    if tokens > 3:
        topk[1, 0] = setup.experts + 3  # out of range
        topk[2, -1] = topk[2, 0]  # twice, where there are two
    x = torch.from_numpy(rng.standard_normal((tokens, setup.hidden)).astype(np.float32))
    return {
        "topk": torch.from_numpy(topk),
        "tokens": x.to(getattr(torch, setup.dtype)),
        "weights": torch.from_numpy(rng.random((tokens, setup.top_k)).astype(np.float32)),
        "grad": torch.from_numpy(rng.standard_normal((tokens, setup.hidden)).astype(np.float32)).to(
            getattr(torch, setup.dtype)
        ),
    }


def raw(tensor: Any, rows: int | None = None) -> bytes:
    whole = tensor[:rows].contiguous().cpu()
    return bytes(whole.view(torch.uint8).numpy().tobytes())


def step(rank: Rank, setup: Setup, transport: str, kind: str, device: str) -> dict[str, bytes]:
    """All calls of a step but operands, twice on one handle; what every output holds. On the host also, under
    "bound ...", the sums of the magnitudes that each sum is made of."""
    shared_id = rank.broadcast(lambda: nvte_ep.unique_id(kind))
    where = f"cuda:{rank.index % torch.cuda.device_count()}" if device == "cuda" else "cpu"
    options: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.set_device(where)
        options["device"] = where
        options["num_sms"] = setup.num_sms
    gpu = rank.index % torch.cuda.device_count()
    comm = nvte_ep.Communicator(kind, rank.size, rank.index, shared_id, device_id=gpu)
    given = {name: t.to(where) for name, t in inputs(setup, rank.index).items()}
    got: dict[str, bytes] = {}
    stream = torch.cuda.Stream() if device == "cuda" else None
    with nvte_ep.Group(
        comm,
        transport=transport,
        num_experts=setup.experts,
        hidden=setup.hidden,
        max_tokens_per_rank=max(setup.tokens),
        recv_capacity=setup.capacity,
        overflow=setup.overflow,
        zero_copy=setup.zero_copy and device == "cuda",
        timeout_ns=20_000_000_000 if transport != "nccl_ep" else 200_000_000_000,  # it compiles kernels
        **options,
    ) as group:
        rank.on_failure(group.abort)
        handle = group.handle(
            top_k=setup.top_k,
            alignment=setup.alignment,
            dispatch=setup.dispatch,
            combine_backward=setup.combine_backward,
        )
        use: dict[str, Any] = {"stream": stream} if stream is not None else {}
        # Every output is allocated before the first step: ranks that share a GPU wait for each other on it,
        # and an allocation in between may wait for all that runs there.
        tokens, experts = setup.tokens[rank.index], group.info.num_local_experts
        most = (
            setup.capacity
            or setup.ranks * max(setup.tokens) * min(setup.top_k, experts) + experts * setup.alignment
        )
        dtype = getattr(torch, setup.dtype)
        row = nvte_ep.row_bytes(setup.dispatch, setup.hidden)

        def room(shape: tuple[int, ...], kind: Any) -> Any:
            return torch.zeros(shape, dtype=kind, device=where)

        def large(shape: tuple[int, int], kind: Any) -> Any:
            """What zero_copy names."""
            if not setup.zero_copy or device != "cuda":
                return room(shape, kind)
            memory = torch.from_dlpack(group.mem_alloc(shape[0] * shape[1] * kind.itemsize))
            return memory.zero_().view(kind).reshape(shape)

        sizes = dict.fromkeys(("tokens_routed", "tokens_per_expert", "rows_per_expert"), experts)
        sizes |= {
            "row_offsets": experts + 1,
            "scale_row_offsets": experts + 1,
            "total_rows": 1,
            "dropped_rows": 1,
        }
        routed = {name: room((size,), torch.int64) for name, size in sizes.items()}
        routed |= {"slot_source": room((most,), torch.int64), "slot_expert": room((most,), torch.int32)}
        rows, slots, grads = (
            large((most, row), torch.uint8),
            large((most, setup.hidden), dtype),
            large((most, setup.hidden), dtype),
        )
        slot_weights, result = room((most,), torch.float32), room((tokens, setup.hidden), dtype)
        grad_weights = room((tokens, setup.top_k), torch.float32)
        if stream is not None:
            torch.cuda.current_stream().synchronize()
        rank.barrier()
        for turn in range(2):
            handle.prepare(given["topk"], out=nvte_ep.Routing(**routed), **use)
            if stream is not None:
                stream.synchronize()
            total = int(routed["total_rows"][0])
            for name, tensor in routed.items():
                got[f"{turn} {name}"] = raw(tensor, total if name.startswith("slot") else None)

            def keep(name: str, tensor: Any, count: int, turn: int = turn) -> None:
                if stream is not None:
                    stream.synchronize()
                got[f"{turn} {name}"] = raw(tensor, count)

            handle.dispatch(given["tokens"], receive="rows", out=rows, **use)
            keep("rows", rows, total)
            handle.dispatch(
                given["tokens"],
                given["weights"],
                receive="decoded",
                dtype=setup.dtype,
                out=slots,
                recv_weights=slot_weights,
                **use,
            )
            keep("decoded", slots, total)
            keep("weights", slot_weights, total)
            handle.combine(slots, out=result, **use)
            keep("combine", result, tokens)
            if setup.zero_copy:  # which sums in place
                handle.dispatch(given["tokens"], receive="decoded", dtype=setup.dtype, out=slots, **use)
            handle.combine(slots, slot_weights=slot_weights, out=result, **use)
            keep("combine weighted", result, tokens)
            if stream is None:  # on the host only: a device's ranks allocate nothing between the steps
                handle.combine(slots.abs(), out=result)
                keep("bound combine", result, tokens)
                handle.combine(slots.abs(), slot_weights=slot_weights.abs(), out=result)
                keep("bound combine weighted", result, tokens)
            handle.combine_backward(given["grad"], receive="decoded", dtype=setup.dtype, out=grads, **use)
            keep("grads", grads, total)
            handle.dispatch_backward(grads, slot_weights, out=result, grad_topk_weights=grad_weights, **use)
            keep("grad tokens", result, tokens)
            keep("grad weights", grad_weights, tokens)
            if stream is None:
                handle.dispatch_backward(
                    grads.abs(), slot_weights, out=result, grad_topk_weights=grad_weights
                )
                keep("bound grad tokens", result, tokens)
        found = []
        while (error := group.poll_error()) is not None:
            found.append((error.status.name, error.count, error.needed_rows))
        got["findings"] = repr(sorted(found)).encode()
        if stream is not None:
            torch.cuda.synchronize()
    return got


# A device rounds each rank's partial row and then the sum, the host only the sum: three roundings of at most
# half a last place, relative to the sum of the magnitudes (itself rounded, hence 3.1). FP32 also adds in
# another order.
SUMS = ("combine", "combine weighted", "grad tokens")
RELATIVE = {"bfloat16": 3.1 * 2**-8, "float16": 3.1 * 2**-11, "float32": 2**-20}


def compare(setup: Setup, expected: list[dict[str, bytes]], got: list[dict[str, bytes]]) -> None:
    dtype = getattr(torch, setup.dtype)
    for rank, (want, have) in enumerate(zip(expected, got, strict=True)):
        assert {name for name in want if "bound" not in name} == have.keys()
        for name in have:
            if name[2:] not in SUMS:
                assert have[name] == want[name], f"rank {rank}: {name} differs"
                continue
            if not want[name]:
                continue
            a = torch.frombuffer(bytearray(want[name]), dtype=dtype).double()
            b = torch.frombuffer(bytearray(have[name]), dtype=dtype).double()
            magnitudes = torch.frombuffer(
                bytearray(want[f"{name[:2]}bound {name[2:]}"]), dtype=dtype
            ).double()
            off = (a - b).abs()
            assert (off <= RELATIVE[setup.dtype] * magnitudes).all(), f"rank {rank}: {name}: {off.max()}"


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_peer_threads(setup: Setup) -> None:
    expected = run_threads(setup.ranks, step, setup, "threads", "threads", "cpu")
    compare(setup, expected, run_threads(setup.ranks, step, setup, "peer", "threads", "cuda"))


# Rows enough for the stream of its own on which `nccl` exchanges them, in two pieces.
LARGE = Setup(
    2,
    (1750, 1701),
    hidden=7168,
    top_k=1,
    dispatch="bf16",
    combine_backward="nvfp4",
    capacity=2560,
)


@pytest.mark.parametrize("setup", [*SETUPS, LARGE], ids=str)
def test_nccl_processes(setup: Setup) -> None:
    expected = run_threads(setup.ranks, step, setup, "threads", "threads", "cpu")
    got = run_processes(setup.ranks, step, setup, "nccl", "nccl", "cuda", environment=environment)
    compare(setup, expected, got)


@pytest.mark.parametrize("memory", ("windows", "ipc"))
@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[1], SETUPS[5], SETUPS[6], SETUPS[7]], ids=str)
def test_peer_processes(setup: Setup, memory: str) -> None:
    """Both ways in which processes address each other's memory; the same kernels run as between threads."""
    expected = run_threads(setup.ranks, step, setup, "threads", "threads", "cpu")
    got = run_processes(
        setup.ranks,
        step,
        setup,
        "peer",
        "nccl",
        "cuda",
        environment=lambda rank: environment(rank) | {"NVTE_EP_PEER_MEMORY": memory},
    )
    compare(setup, expected, got)


def require_nccl_ep() -> None:
    """NCCL EP is an option: where it is not there, its tests are skipped, unless NVTE_EP_REQUIRE names it."""
    (entry,) = (t for t in nvte_ep.build_info()["transports"] if t["name"] == "nccl_ep")
    if entry["available"]:
        return
    if "nccl_ep" in os.environ.get("NVTE_EP_REQUIRE", ""):
        pytest.fail(entry["reason"])
    pytest.skip(entry["reason"])


# NCCL EP compiles its kernels for each shape and number of ranks, for the better part of a minute.
COMPILE_TIMEOUT = 240.0


# NCCL EP's high-throughput mode at more tokens than its low-latency mode takes, and what only the former has.
HIGH_THROUGHPUT = [
    Setup(1, (170,), capacity=1024),
    Setup(1, (170,), capacity=1024, num_sms=24),  # whose sums are NCCL EP's, and not the library's own
    Setup(1, (170,), capacity=1024, zero_copy=True),
    Setup(1, (170,), dispatch="bf16", combine_backward="bf16", dtype="float32"),
    Setup(2, (170, 33), capacity=1024),
    Setup(2, (170, 33), dispatch="mxfp8", combine_backward="mxfp8", capacity=1024),
    Setup(2, (170, 33), dispatch="bf16", combine_backward="bf16", dtype="float32", capacity=1024),
    Setup(2, (170, 33), capacity=192, overflow="drop"),
    Setup(2, (170, 33), capacity=1024, zero_copy=True),
    Setup(2, (170, 33), experts=6, capacity=1024),  # not a multiple of 4
    Setup(4, (131, 128, 0, 17), experts=16, capacity=1024),
]


def run_nccl_ep(setup: Setup, low_latency: bool) -> None:
    require_nccl_ep()
    expected = run_threads(setup.ranks, step, setup, "threads", "threads", "cpu")
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NVTE_EP_NCCL_EP_LOW_LATENCY": str(int(low_latency))}
    got = run_processes(
        setup.ranks,
        step,
        setup,
        "nccl_ep",
        "nccl",
        "cuda",
        environment=lambda _: environment,
        timeout=COMPILE_TIMEOUT,
    )
    compare(setup, expected, got)


@pytest.mark.parametrize("setup", [*HIGH_THROUGHPUT, *SETUPS], ids=str)
def test_nccl_ep_processes(setup: Setup) -> None:
    run_nccl_ep(setup, low_latency=False)


# What does not fit (eager, H 2880) runs in high-throughput mode all the same.
@pytest.mark.parametrize(
    "setup", [setup for setup in SETUPS if setup.capacity and setup.hidden == 512], ids=str
)
def test_nccl_ep_low_latency(setup: Setup) -> None:
    run_nccl_ep(setup, low_latency=True)
