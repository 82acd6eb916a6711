# SPDX-License-Identifier: Apache-2.0
"""Groups of `peer` between processes beside the exchange itself: how they begin, how they fail, how they end.

Two processes do one thing after the other on one communicator, over windows and over IPC. Bytes of steps are
compared in test_device_transports.py; processes that are killed: tests/cuda/soak_peer.cu.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nvte_ep
import pytest
from distributed.launcher import Rank, run_processes

with contextlib.suppress(ImportError):  # the fixture says so, and fails where NVTE_EP_REQUIRE names it
    import torch
pytestmark = pytest.mark.usefixtures("torch")

TOKENS, HIDDEN = 64, 512
TIMEOUT = 1.0  # seconds, where a rank is missing


class Layer:
    """A group, a handle, and the arrays of a step that gives every token back as it was."""

    def __init__(self, comm: nvte_ep.Communicator, *, timeout: float = 20, **settings: Any) -> None:
        config: dict[str, Any] = {
            "transport": "peer",
            "num_experts": 4,
            "hidden": HIDDEN,
            "max_tokens_per_rank": TOKENS,
            "recv_capacity": 2 * TOKENS + 4,
            "timeout_ns": int(timeout * 1e9),
        }
        self.group = nvte_ep.Group(comm, **(config | settings))
        self.handle = self.group.handle(top_k=1, alignment=1, dispatch="bf16", combine="bf16")
        self.stream = torch.cuda.Stream()
        rank = self.group.info.rank
        generator = torch.Generator().manual_seed(rank)
        self.topk = torch.randint(0, 4, (TOKENS, 1), generator=generator).cuda()
        self.tokens = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().cuda()
        self.slots = torch.zeros(2 * TOKENS + 4, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.result = torch.zeros_like(self.tokens)
        torch.cuda.synchronize()

    def prepare(self) -> None:
        self.handle.prepare(self.topk, out=nvte_ep.Routing(), stream=self.stream)

    def exchange(self) -> None:
        use = {"stream": self.stream}
        self.handle.dispatch(self.tokens, receive="decoded", dtype="bfloat16", out=self.slots, **use)
        self.handle.combine(self.slots, out=self.result, **use)

    def check(self) -> None:
        self.stream.synchronize()
        assert self.group.poll_error() is None
        assert torch.equal(self.result, self.tokens)
        self.result.zero_()
        torch.cuda.synchronize()


@contextmanager
def takes(least: float, most: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    elapsed = time.monotonic() - start
    assert least <= elapsed <= most, f"{elapsed} s"


def one_after_the_other(rank: Rank) -> str:
    torch.cuda.set_device(rank.index % torch.cuda.device_count())
    shared_id = rank.broadcast(lambda: nvte_ep.unique_id("nccl"))
    comm = nvte_ep.Communicator(
        "nccl", rank.size, rank.index, shared_id, device_id=torch.cuda.current_device()
    )

    # Ranks that mean different groups are told so, all of them, and may try again.
    with pytest.raises(nvte_ep.InvalidArgumentError, match="hidden"):
        Layer(comm, hidden=HIDDEN * (1 + rank.index))

    # Two groups at once; and whatever a group takes it gives back.
    free = []
    for _ in range(6):
        layers = [Layer(comm, max_tokens_per_rank=TOKENS * 64), Layer(comm)]
        rank.barrier()
        for layer in layers:
            layer.prepare()
        for _ in range(3):
            for layer in layers:
                layer.exchange()
        for layer in layers:
            layer.check()
        for layer in layers:
            layer.group.close()
        del layer, layers
        rank.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        rank.barrier()
    assert free[-1] >= free[1] - (8 << 20), f"memory is lost: {free}"

    # A rank ends the group while the other one waits on the device.
    layer = Layer(comm)
    rank.barrier()
    layer.prepare()
    layer.stream.synchronize()
    rank.barrier()
    if rank.index == 1:
        time.sleep(0.3)
        layer.group.abort()
    else:
        with takes(0.2, 3):
            layer.exchange()
            layer.stream.synchronize()
    error = layer.group.poll_error()
    assert error is not None and error.status == nvte_ep.Status.PEER_FAILED and error.rank == 1, error
    with pytest.raises(nvte_ep.PeerFailedError, match="rank 1"):
        layer.exchange()
    layer.group.close()

    # A rank that is told without waiting for anything.
    layer = Layer(comm)
    rank.barrier()
    if rank.index == 1:
        layer.group.abort()
    end = time.monotonic() + 2
    while (error := layer.group.poll_error()) is None and time.monotonic() < end:
        time.sleep(0.002)
    assert error is not None and error.rank == 1, error
    rank.barrier()
    layer.group.close()

    # A rank that does not come to the first prepare, where hosts wait.
    layer = Layer(comm, timeout=TIMEOUT)
    rank.barrier()
    if rank.index == 0:
        with takes(0.9 * TIMEOUT, 2 * TIMEOUT), pytest.raises(nvte_ep.PeerTimeoutError, match="rank 1"):
            layer.prepare()
        rank.barrier()
    else:
        rank.barrier()
        with takes(0, TIMEOUT / 2), pytest.raises(nvte_ep.PeerFailedError, match="rank 1"):
            layer.prepare()
    rank.barrier()
    layer.group.close()
    del layer
    return "done"


def a_rank_without_a_group(rank: Rank) -> float:
    torch.cuda.set_device(rank.index % torch.cuda.device_count())
    shared_id = rank.broadcast(lambda: nvte_ep.unique_id("nccl"))
    comm = nvte_ep.Communicator(
        "nccl", rank.size, rank.index, shared_id, device_id=torch.cuda.current_device()
    )
    Layer(comm).group.close()  # NCCL connects at the first use, which takes a while
    rank.barrier()
    if rank.index == 0:
        with takes(0.9 * TIMEOUT, 2 * TIMEOUT + 1), pytest.raises(nvte_ep.PeerTimeoutError):
            Layer(comm, timeout=TIMEOUT)
        with pytest.raises(nvte_ep.BadStateError):
            Layer(comm)
    rank.barrier()
    start = time.monotonic()
    comm.close()
    return time.monotonic() - start


@pytest.mark.parametrize("memory", ("windows", "ipc"))
def test_life_of_a_group(memory: str) -> None:
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NVTE_EP_PEER_MEMORY": memory}
    assert run_processes(2, one_after_the_other, environment=lambda _: environment) == ["done"] * 2


@pytest.mark.parametrize("memory", ("windows", "ipc"))
def test_a_rank_without_a_group(memory: str) -> None:
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NVTE_EP_PEER_MEMORY": memory}
    assert max(run_processes(2, a_rank_without_a_group, environment=lambda _: environment)) < 5
