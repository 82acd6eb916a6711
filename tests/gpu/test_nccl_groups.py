# SPDX-License-Identifier: Apache-2.0
"""Groups over NCCL communicators: borrowed ones, what AUTO takes, and peers that do not come."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import nvte_ep
import pytest
from distributed.launcher import Rank, run_processes
from nvte_ep import InvalidArgumentError, Status, UnsupportedError

with contextlib.suppress(ImportError):  # the fixture says so, and fails where NVTE_EP_REQUIRE names it
    import torch
pytestmark = pytest.mark.usefixtures("torch")

ENVIRONMENT = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
HIDDEN, EXPERTS, TOKENS = 512, 8, 70
EXIT_TIMEOUT = 120.0


def run(size: int, body: Any, *args: Any, may_die: tuple[int, ...] = (), **environment: str) -> list[Any]:
    variables = ENVIRONMENT | environment
    return run_processes(
        size, body, *args, environment=lambda _: variables, timeout=EXIT_TIMEOUT, may_die=may_die
    )


def use_gpu(rank: Rank) -> int:
    gpu = rank.index % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    return int(gpu)


def open_group(comm: Any, gpu: int, **config: Any) -> Any:
    usual = {"recv_capacity": 640, "timeout_ns": 20_000_000_000, "max_tokens_per_rank": TOKENS}
    return nvte_ep.Group(comm, num_experts=EXPERTS, hidden=HIDDEN, device=f"cuda:{gpu}", **(usual | config))


# ---- borrowed communicators --------------------------------------------------------------------------------


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def raw_communicator(rank: Rank) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """An ncclComm_t that is not the library's, of the NCCL that this process has."""
    nvte_ep.unique_id("nccl")  # NCCL is loaded
    nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # type: ignore[attr-defined]
    made = UniqueId()
    if rank.index == 0:
        assert nccl.ncclGetUniqueId(ctypes.byref(made)) == 0
    shared = UniqueId.from_buffer_copy(rank.broadcast(lambda: bytes(made)))
    comm = ctypes.c_void_p()
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    assert nccl.ncclCommInitRank(ctypes.byref(comm), rank.size, shared, rank.index) == 0
    return nccl, comm


def borrow_raw(rank: Rank) -> tuple[int, bytes]:
    gpu = use_gpu(rank)
    nccl, raw = raw_communicator(rank)
    comm = nvte_ep.Communicator.from_nccl(raw.value)
    rows = one_step(rank, comm, gpu)
    comm.close()
    # It is still the caller's, and works.
    count = ctypes.c_int()
    assert nccl.ncclCommCount(raw, ctypes.byref(count)) == 0
    ones = torch.ones(4, dtype=torch.int32, device=f"cuda:{gpu}")
    int32, plus = 2, 0
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    pointer = ctypes.c_void_p(ones.data_ptr())
    assert nccl.ncclAllReduce(pointer, pointer, ctypes.c_size_t(4), int32, plus, raw, stream) == 0
    torch.cuda.synchronize()
    assert ones.tolist() == [rank.size] * 4
    assert nccl.ncclCommDestroy(raw) == 0
    return count.value, rows


def borrow_torch(rank: Rank) -> tuple[int, bytes]:
    """The communicator of a process group of PyTorch."""
    gpu = use_gpu(rank)
    folder = rank.broadcast(lambda: os.environ["NVTE_EP_TEST_FOLDER"])
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank.index,
        world_size=rank.size,
        device_id=torch.device("cuda", gpu),
    )
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cuda"))
    comm = nvte_ep.Communicator.from_nccl(backend._comm_ptr())
    rows = one_step(rank, comm, gpu)
    comm.close()
    ones = torch.ones(1, device=f"cuda:{gpu}")
    torch.distributed.all_reduce(ones)
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()
    return int(ones.item()), rows


def one_step(rank: Rank, comm: Any, gpu: int) -> bytes:
    """Every token to its own rank's first expert and to the next rank's; the rows that come."""
    experts = EXPERTS // rank.size
    following = (rank.index + 1) % rank.size
    topk = torch.tensor([[rank.index * experts, following * experts + 1]] * TOKENS, device=f"cuda:{gpu}")
    tokens = torch.full((TOKENS, HIDDEN), float(rank.index + 1), dtype=torch.bfloat16, device=f"cuda:{gpu}")
    received = torch.zeros((640, HIDDEN), dtype=torch.bfloat16, device=f"cuda:{gpu}")
    torch.cuda.synchronize()
    with open_group(comm, gpu, transport="nccl") as group:
        rank.on_failure(group.abort)
        handle = group.handle(top_k=2, alignment=16, dispatch="bf16")
        handle.prepare(topk)
        handle.dispatch(tokens, receive="decoded", dtype="bfloat16", out=received)
        torch.cuda.synchronize()
    return bytes(received[:, 0].float().cpu().numpy().astype(np.uint8).tobytes())


def expected_rows(rank: int, size: int) -> bytes:
    first = [rank + 1] * TOKENS + [0] * (-TOKENS % 16)
    second = [(rank - 1) % size + 1] * TOKENS + [0] * (-TOKENS % 16)
    rows = first + second
    return bytes(rows + [0] * (640 - len(rows)))


@pytest.mark.parametrize("size", (1, 2))
def test_a_borrowed_communicator(size: int) -> None:
    for rank, (count, rows) in enumerate(run(size, borrow_raw)):
        assert count == size
        assert rows == expected_rows(rank, size)


def test_a_communicator_of_pytorch(tmp_path: Any) -> None:
    got = run(2, borrow_torch, NVTE_EP_TEST_FOLDER=str(tmp_path))
    for rank, (total, rows) in enumerate(got):
        assert total == 2
        assert rows == expected_rows(rank, 2)


# ---- what AUTO takes ---------------------------------------------------------------------------------------


def chosen(rank: Rank, config: dict[str, Any]) -> str:
    gpu = use_gpu(rank)
    shared = rank.broadcast(lambda: nvte_ep.unique_id("nccl"))
    comm = nvte_ep.Communicator("nccl", rank.size, rank.index, shared, device_id=gpu)
    try:
        with open_group(comm, gpu, **config) as group:
            return str(group.info.transport)
    except UnsupportedError as error:
        return str(error)


def test_auto_takes_peer_then_nccl_ep_then_nccl() -> None:
    assert run(2, chosen, {}) == ["peer"] * 2
    available = {t["name"]: t["available"] for t in nvte_ep.build_info()["transports"]}
    if "nccl_ep" in os.environ.get("NVTE_EP_REQUIRE", ""):
        assert available["nccl_ep"]
    # peer has no zero_copy, and nccl has none either.
    got = run(2, chosen, {"zero_copy": True})
    if available["nccl_ep"]:
        assert got == ["nccl_ep"] * 2
    else:
        assert all("nccl_ep" in text for text in got)


def sum_in_unlike_ways(rank: Rank) -> list[str]:
    """What each of the ways is told; then all go the same one."""
    gpu = use_gpu(rank)
    shared = rank.broadcast(lambda: nvte_ep.unique_id("nccl"))
    comm = nvte_ep.Communicator("nccl", rank.size, rank.index, shared, device_id=gpu)
    told = []
    with open_group(comm, gpu, transport="nccl_ep") as group:
        rank.on_failure(group.abort)
        handle = group.handle(top_k=2, alignment=16, dispatch="bf16")
        topk = torch.tensor([[0, EXPERTS - 1]] * TOKENS, device=f"cuda:{gpu}")
        ones = torch.ones((640, HIDDEN), dtype=torch.bfloat16, device=f"cuda:{gpu}")
        result = torch.full((TOKENS, HIDDEN), 3.0, dtype=torch.bfloat16, device=f"cuda:{gpu}")
        torch.cuda.synchronize()
        handle.prepare(topk)
        for accumulate, slots in (
            (rank.index == 0, ones),
            (False, ones.float() if rank.index == 0 else ones),
        ):
            out = result.to(slots.dtype)
            with pytest.raises(InvalidArgumentError) as caught:
                handle.combine(slots, out=out, accumulate=accumulate)
            told.append(str(caught.value))
        for accumulate, expected in ((True, 5.0), (False, 2.0), (True, 4.0)):
            handle.combine(ones, out=result, accumulate=accumulate)
            torch.cuda.synchronize()
            assert (result == expected).all()
        assert group.poll_error() is None
    return told


def test_nccl_ep_ranks_that_sum_in_unlike_ways_are_told(missing: Callable[[str, str], NoReturn]) -> None:
    (entry,) = (t for t in nvte_ep.build_info()["transports"] if t["name"] == "nccl_ep")
    if not entry["available"]:
        missing("nccl_ep", entry["reason"])
    for told in run(2, sum_in_unlike_ways):
        assert "accumulate: expected the same on every rank" in told[0]
        assert "type of what is summed: expected the same on every rank" in told[1]


def test_where_one_rank_lacks_nccl_ep_none_takes_it() -> None:
    """Both ranks get the reason of the one that cannot."""

    def environment(rank: int) -> dict[str, str]:
        return ENVIRONMENT | ({"NVTE_EP_NCCL_EP_LIBRARY": "/nowhere/libnccl_ep.so"} if rank == 1 else {})

    got = run_processes(2, chosen, {"zero_copy": True}, environment=environment, timeout=EXIT_TIMEOUT)
    assert all("could not load" in text for text in got), got


# ---- peers that do not come --------------------------------------------------------------------------------

TIMEOUT_NS = 3_000_000_000


def alone(rank: Rank, transport: str, tokens: int) -> tuple[str, float]:
    """Rank 1 is gone before a dispatch: rank 0 is told by poll_error within twice the time-out, and ends."""
    gpu = use_gpu(rank)
    shared = rank.broadcast(lambda: nvte_ep.unique_id("nccl"))
    comm = nvte_ep.Communicator("nccl", rank.size, rank.index, shared, device_id=gpu)
    group = open_group(comm, gpu, transport=transport, timeout_ns=TIMEOUT_NS, max_tokens_per_rank=tokens)
    handle = group.handle(top_k=3, alignment=32, dispatch="nvfp4")
    topk = torch.tensor([[0, 3, 6]] * 33, device=f"cuda:{gpu}")
    x = torch.ones((33, HIDDEN), dtype=torch.bfloat16, device=f"cuda:{gpu}")
    rows = torch.zeros((640, nvte_ep.row_bytes("nvfp4", HIDDEN)), dtype=torch.uint8, device=f"cuda:{gpu}")
    torch.cuda.synchronize()
    handle.prepare(topk)
    handle.dispatch(x, receive="rows", out=rows)
    torch.cuda.synchronize()
    rank.barrier()
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handle.dispatch(x, receive="rows", out=rows)
    start = time.monotonic()
    error = None
    while error is None and time.monotonic() - start < 4 * TIMEOUT_NS * 1e-9:
        time.sleep(0.01)
        error = group.poll_error()
    took = time.monotonic() - start
    assert error is not None
    group.abort()
    group.close()
    comm.close()
    return error.status.name, took


@pytest.mark.parametrize(
    ("transport", "tokens", "low_latency"),
    (("nccl", 70, False), ("nccl_ep", 70, True), ("nccl_ep", 170, False)),
)
def test_a_peer_that_does_not_come(
    transport: str, tokens: int, low_latency: bool, missing: Callable[[str, str], NoReturn]
) -> None:
    here = {t["name"]: t for t in nvte_ep.build_info()["transports"]}[transport]
    if not here["available"]:
        missing(transport, here["reason"])
    (status, took), _ = run(
        2,
        alone,
        transport,
        tokens,
        may_die=(1,),
        NVTE_EP_NCCL_EP_LOW_LATENCY=str(int(low_latency)),
    )
    assert status in (Status.TIMEOUT.name, Status.PEER_FAILED.name)
    assert took < 2 * TIMEOUT_NS * 1e-9
