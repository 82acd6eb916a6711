# SPDX-License-Identifier: Apache-2.0
"""Bodies of ranks for test_failures.py: ranks that disagree, stall, leave or err."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import nvte_ep
import pytest
from nvte_ep import (
    BadStateError,
    Group,
    Handle,
    InvalidArgumentError,
    NvteEpError,
    PeerFailedError,
    PeerTimeoutError,
    Status,
)

from distributed.cases import DTYPES, Case
from distributed.checks import assert_same_step
from distributed.launcher import Rank
from distributed.steps import Step, findings, group_settings, open_group, open_handle, step_on
from distributed.transports import Transport

TIMEOUT_NS = 1_000_000_000
# The rank must be named within twice the time-out.
TIMEOUT_S = TIMEOUT_NS * 1e-9
FATAL = (PeerTimeoutError, PeerFailedError)


def every_call(handle: Handle, case: Case, me: int) -> dict[str, Any]:
    """All per-step calls, by name."""
    tokens = case.tokens_in(me)
    slots = np.zeros((handle.slots, case.hidden), DTYPES["bfloat16"])
    return {
        "prepare": lambda: handle.prepare(case.topk[me]),
        "dispatch": lambda: handle.dispatch(tokens, receive="rows"),
        "combine": lambda: handle.combine(slots),
        "dispatch_backward": lambda: handle.dispatch_backward(slots),
        "combine_backward": lambda: handle.combine_backward(tokens, receive="rows"),
    }


def about(transport: Transport, culprit: int) -> str:
    """What the text of a failure holds: the rank that caused it, where the transport can know."""
    return f"rank {culprit}" if transport.names_culprit else ""


def assert_dead(
    transport: Transport,
    group: Group,
    handle: Handle,
    case: Case,
    me: int,
    culprit: int,
    statuses: tuple[Status, ...],
) -> None:
    """Every call returns at once with the failure, poll_error keeps naming it, destroy works."""
    for _ in range(2):
        error = group.poll_error()
        assert error is not None and error.status in statuses
        assert error.rank == culprit or (not transport.names_culprit and error.rank == -1)
    start = time.monotonic()
    for name, call in every_call(handle, case, me).items():
        with pytest.raises(FATAL, match=about(transport, culprit)) as caught:
            call()
        assert caught.value.status in statuses, name
    with pytest.raises(FATAL):
        open_handle(group, case)
    assert time.monotonic() - start < TIMEOUT_S, "no call waits any more"
    close_dead(group, handle, case, me)


def close_dead(group: Group, handle: Handle, case: Case, me: int) -> None:
    start = time.monotonic()
    group.close()
    assert time.monotonic() - start < 2 * TIMEOUT_S
    with pytest.raises(BadStateError):
        handle.prepare(case.topk[me])
    # Not when the collector finds it: that may be while ranks that share a GPU wait for each other, and
    # freeing its memory waits for all of them.
    handle.close()


# ---- ranks that do not come --------------------------------------------------------------------------------


def one_stalls(rank: Rank, transport: Transport, case: Case, step: str, culprit: int) -> None:
    """One rank stays away from a step for longer than the time-out: the others name it within twice of that,
    the first by its own time-out and the rest by what that one told; and it learns when it comes."""
    group = open_group(rank, transport, case, timeout_ns=TIMEOUT_NS)
    handle = open_handle(group, case)
    handle.prepare(case.topk[rank.index])
    rank.barrier()
    call = every_call(handle, case, rank.index)[step]
    if rank.index != culprit:
        start = time.monotonic()
        with pytest.raises(FATAL, match=about(transport, culprit)):
            call()
        assert TIMEOUT_S * 0.9 < time.monotonic() - start < 2 * TIMEOUT_S
    rank.barrier()  # the others have given up
    if rank.index == culprit and not transport.calls_meet:
        # It misses its peers on the device now, and cannot know that they had missed it.
        with pytest.raises(FATAL):
            call()
            # What they sent before they gave up may be all that it needs, where that does not travel.
            assert not transport.aborts_travel
            call()
        close_dead(group, handle, case, rank.index)
    else:
        statuses = (Status.TIMEOUT,) if transport.calls_meet else (Status.TIMEOUT, Status.PEER_FAILED)
        assert_dead(transport, group, handle, case, rank.index, culprit, statuses)


def one_is_killed(rank: Rank, transport: Transport, case: Case, culprit: int) -> str:
    """The survivors are told within twice the time-out, and can end their group."""
    group = open_group(rank, transport, case, timeout_ns=TIMEOUT_NS)
    handle = open_handle(group, case)
    handle.prepare(case.topk[rank.index])
    step_on(rank, handle, case)
    rank.barrier()
    if rank.index == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(FATAL, match=about(transport, culprit)):
        every_call(handle, case, rank.index)["dispatch"]()
    assert time.monotonic() - start < 2 * TIMEOUT_S
    statuses = (Status.TIMEOUT, Status.PEER_FAILED)
    assert_dead(transport, group, handle, case, rank.index, culprit, statuses)
    return "survived"


def one_aborts(rank: Rank, transport: Transport, case: Case, culprit: int) -> None:
    """Waits in flight end when a peer aborts: long before the time-out, or with it where the abort does not
    travel."""
    travels = transport.aborts_travel
    timeout = {} if travels else {"timeout_ns": TIMEOUT_NS}
    group = open_group(rank, transport, case, **timeout)
    handle = open_handle(group, case)
    handle.prepare(case.topk[rank.index])
    rank.barrier()
    start = time.monotonic()
    if rank.index == culprit:
        time.sleep(0.1)
        group.abort()
    else:
        with pytest.raises(PeerFailedError if travels else FATAL, match=about(transport, culprit)):
            every_call(handle, case, rank.index)["combine"]()
    assert time.monotonic() - start < (5 if travels else 2 * TIMEOUT_S)
    told = travels or rank.index == culprit
    statuses = (Status.PEER_FAILED,) if told else (Status.PEER_FAILED, Status.TIMEOUT)
    assert_dead(transport, group, handle, case, rank.index, culprit, statuses)


def one_leaves(rank: Rank, transport: Transport, case: Case, culprit: int) -> None:
    """A rank that closes its group while the others wait for it in a call. Where calls meet, they are told
    at once, else the time-out tells them."""
    statuses = (Status.PEER_FAILED,) if transport.calls_meet else (Status.PEER_FAILED, Status.TIMEOUT)
    group = open_group(
        rank, transport, case, timeout_ns=5 * TIMEOUT_NS if transport.calls_meet else TIMEOUT_NS
    )
    handle = open_handle(group, case)
    handle.prepare(case.topk[rank.index])
    rank.barrier()
    start = time.monotonic()
    if rank.index == culprit:
        time.sleep(0.1)
        with contextlib.suppress(*FATAL):  # its peers may be gone by then
            group.close()
        assert time.monotonic() - start < 2 * TIMEOUT_S
        return
    with pytest.raises(FATAL, match=about(transport, culprit)):
        every_call(handle, case, rank.index)["dispatch"]()
    assert time.monotonic() - start < 2 * TIMEOUT_S
    assert_dead(transport, group, handle, case, rank.index, culprit, statuses)


def one_never_creates(rank: Rank, transport: Transport, case: Case, culprit: int) -> None:
    """The others are told who it was; the communicator is over, and a group that it had before lives on."""
    comm = transport.connect(rank, keep=False)
    settings = group_settings(case)
    before = transport.another_group(rank, comm, **settings)
    handle = open_handle(before, case)
    expected = step_on(rank, handle, case)
    if rank.index == culprit:
        rank.barrier()
    else:
        start = time.monotonic()
        with pytest.raises(PeerTimeoutError, match=about(transport, culprit)):
            transport.another_group(rank, comm, timeout_ns=TIMEOUT_NS, **settings)
        assert time.monotonic() - start < 2 * TIMEOUT_S
        rank.barrier()
    with pytest.raises(PeerTimeoutError) if rank.index == culprit else pytest.raises(NvteEpError):
        transport.another_group(rank, comm, timeout_ns=TIMEOUT_NS, **settings)
    rank.barrier()
    assert_same_step(step_on(rank, handle, case), expected)
    handle.close()
    before.close()


def aborted_by_another_thread(rank: Rank, transport: Transport, case: Case) -> None:
    """poll_error and abort come from any thread, also while the group's own thread waits."""
    group = open_group(rank, transport, case)
    handle = open_handle(group, case)
    handle.prepare(case.topk[rank.index])
    rank.barrier()
    if rank.index == 1:  # never calls
        rank.barrier()
    else:
        polled = []

        def watch() -> None:
            time.sleep(0.1)
            polled.append(group.poll_error())
            group.abort()

        watcher = threading.Thread(target=watch)
        watcher.start()
        with pytest.raises(PeerFailedError, match=about(transport, 0)):
            every_call(handle, case, 0)["dispatch"]()
        watcher.join()
        assert polled == [None]
        rank.barrier()
    if rank.index == 1 and not transport.aborts_travel:
        group.abort()
    # A host that calls nothing learns of it by poll_error, some milliseconds late.
    end = time.monotonic() + TIMEOUT_S
    while group.poll_error() is None and time.monotonic() < end:
        time.sleep(0.005)
    assert_dead(transport, group, handle, case, rank.index, 0, (Status.PEER_FAILED,))


def late_but_in_time(rank: Rank, transport: Transport, case: Case) -> Step:
    """A rank that is late for every call, but within the time-out, changes nothing."""
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        if rank.index == 1:
            time.sleep(0.2)
        step_on(rank, handle, case)
        if rank.index == 0:
            time.sleep(0.2)
        return step_on(rank, handle, case)


# ---- ranks that disagree -----------------------------------------------------------------------------------

GROUP_SETTINGS: dict[str, Any] = {
    "num_experts": 12,
    "hidden": 96,
    "max_tokens_per_rank": 30,
    "max_top_k": 3,
    "recv_capacity": 512,
    "overflow": "drop",
    "zero_copy": True,
}
HANDLE_SETTINGS: dict[str, Any] = {
    "top_k": 1,
    "alignment": 32,
    "dispatch": "nvfp4",
    "combine": "mxfp8",
    "dispatch_backward": "mxfp8",
    "combine_backward": "mxfp8",
}


def can_disagree_on(transport: Transport, setting: str) -> bool:
    """False where one of the two values is refused by itself."""
    if setting == "zero_copy":
        return transport.zero_copy
    return transport.mxfp8_sums or setting not in ("combine", "dispatch_backward")


def disagree_on_group(rank: Rank, transport: Transport, case: Case, setting: str) -> None:
    """The last rank has another value: nobody gets a group, everybody is told; then they agree."""
    comm = transport.connect(rank)
    settings: dict[str, Any] = {
        "num_experts": case.experts,
        "hidden": case.hidden,
        "max_tokens_per_rank": case.max_tokens,
        "max_top_k": case.top_k,
        "recv_capacity": case.recv_capacity,
    }
    other = {setting: GROUP_SETTINGS[setting]} if rank.index == rank.size - 1 else {}
    with pytest.raises(InvalidArgumentError, match=setting):
        transport.another_group(rank, comm, **{**settings, **other})
    with transport.another_group(rank, comm, **settings) as group, open_handle(group, case) as handle:
        step_on(rank, handle, case)


def disagree_on_handle(rank: Rank, transport: Transport, case: Case, setting: str) -> None:
    with open_group(rank, transport, case) as group:
        other = {setting: HANDLE_SETTINGS[setting]} if rank.index == rank.size - 1 else {}
        handle = open_handle(group, case, **other)
        topk = case.topk[rank.index][:, : handle.top_k].copy()
        with pytest.raises(InvalidArgumentError, match=setting):
            handle.prepare(topk)
        with pytest.raises(BadStateError):
            handle.dispatch(case.tokens_in(rank.index), receive="rows")
        assert not findings(group)
        step_on(rank, open_handle(group, case), case)


def disagree_on_step(rank: Rank, transport: Transport, case: Case) -> None:
    """Ranks in different calls: both are told, and the group goes on."""
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[rank.index])
        calls = every_call(handle, case, rank.index)
        names = list(calls)
        for shift in range(1, len(names)):
            name = names[shift if rank.index == 0 else 0]
            with pytest.raises(InvalidArgumentError, match="same calls"):
                calls[name]()
            if name == "prepare":  # the routing that it had is gone
                with pytest.raises(BadStateError):
                    calls["dispatch"]()
            handle.prepare(case.topk[rank.index])
        step_on(rank, handle, case)


def disagree_on_handle_order(rank: Rank, transport: Transport, case: Case) -> None:
    with open_group(rank, transport, case) as group:
        handles = [open_handle(group, case) for _ in range(2)]
        for handle in handles:
            handle.prepare(case.topk[rank.index])
        with pytest.raises(InvalidArgumentError, match="handle"):
            handles[rank.index].dispatch(case.tokens_in(rank.index), receive="rows")
        step_on(rank, handles[0], case)


def disagree_on_place(rank: Rank, transport: Transport, case: Case) -> None:
    """zero_copy: memory that is not symmetric, and unequal sizes and offsets."""
    with open_group(rank, transport, case, zero_copy=True) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[rank.index])
        tokens = case.tokens_in(rank.index)
        with pytest.raises(InvalidArgumentError, match="bytes"):
            group.mem_alloc(4096 + rank.index)
        size = handle.slots * case.hidden * 2
        memory = group.mem_alloc(2 * size)
        with pytest.raises(InvalidArgumentError, match="out: expected memory"):
            handle.dispatch(tokens, receive="decoded")  # memory of its own, refused before anybody waits
        with pytest.raises(InvalidArgumentError, match="out: expected"):  # its second half would lie outside
            tail = memory[2 * size - size // 2 :].pointer
            outside = nvte_ep.Array.borrow(tail, size, (1, 0), memory)
            handle.dispatch(tokens, receive="decoded", out=outside.view("bfloat16").reshape(-1, case.hidden))
        shifted = memory[256 * rank.index : 256 * rank.index + size].view("bfloat16").reshape(-1, case.hidden)
        with pytest.raises(InvalidArgumentError, match="offset"):
            handle.dispatch(tokens, receive="decoded", out=shifted)
        slots = memory[:size].view("bfloat16").reshape(-1, case.hidden)
        handle.dispatch(tokens, receive="decoded", out=slots)
        expected = np.array(slots)
        with pytest.raises(InvalidArgumentError, match="expert_out"):
            handle.combine(expected)
        handle.combine(slots)


# ---- a call that is refused --------------------------------------------------------------------------------


def refused_call_is_repeated(rank: Rank, transport: Transport, case: Case) -> None:
    """One rank's bad argument concerns nobody else: its peers wait while it repeats the call."""
    me = rank.index
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        if me == 1:
            for wrong in (
                np.zeros((case.tokens_of[me], case.top_k + 1), np.int64),
                np.zeros((case.max_tokens + 1, case.top_k), np.int64),
                np.zeros((case.tokens_of[me], case.top_k), np.int16),
                np.zeros((case.tokens_of[me], case.top_k), np.float32),
            ):
                with pytest.raises(InvalidArgumentError, match="topk_idx"):
                    handle.prepare(wrong)
            with pytest.raises(BadStateError):
                handle.combine(np.zeros((handle.slots, case.hidden), DTYPES["bfloat16"]))
            rank.log("five refused calls before prepare")
        handle.prepare(case.topk[me])
        tokens = case.tokens_in(me)
        if me == 0:
            for misfit in (tokens[:, :-16], tokens[:-1], tokens.astype(np.float64)):
                out = np.full((handle.slots, case.hidden), 5, DTYPES["bfloat16"])
                with pytest.raises(InvalidArgumentError, match="tokens"):
                    handle.dispatch(misfit, receive="decoded", out=out)
                assert (out == 5).all(), "outputs of a refused call stay as they were"
        received = handle.dispatch(tokens, receive="decoded")
        if me == 1:
            with pytest.raises(InvalidArgumentError, match="combine: out: expected"):
                handle.combine(received.data, out=np.zeros((case.tokens_of[me], case.hidden), np.float32))
            with pytest.raises(InvalidArgumentError, match="expert_out"):
                handle.combine(np.zeros((handle.slots - 1, case.hidden), DTYPES["bfloat16"]))
        handle.combine(received.data)
        step_on(rank, handle, case)


def weights_on_some_ranks(rank: Rank, transport: Transport, case: Case) -> None:
    """A rank that wants weights, or their gradients, needs them from all."""
    me = rank.index
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[me])
        weights = np.empty(handle.slots, np.float32)
        with pytest.raises(InvalidArgumentError, match="topk_weights"):
            handle.dispatch(
                case.tokens_in(me),
                case.weights_in(me) if me == 0 else None,
                receive="rows",
                recv_weights=weights if me == 0 else None,
            )
        slots = np.zeros((handle.slots, case.hidden), DTYPES["bfloat16"])
        with pytest.raises(InvalidArgumentError, match="grad_recv_weights"):
            handle.dispatch_backward(slots, weights if me == 0 else None)
        step_on(rank, handle, case)


def weights_that_a_peer_does_not_give(rank: Rank, transport: Transport, case: Case) -> None:
    """On a device no call can be refused for what a peer does later: there are zeros in place of what it does
    not give, not what it gave before, and where the transport can tell, a finding with its number. The group
    goes on."""
    me = rank.index
    layout, where = case.layouts[me], case.where[me]
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[me])
        tokens, weights = case.tokens_in(me), case.weights_in(me)
        slots = np.zeros((handle.slots, case.hidden), DTYPES["bfloat16"])
        scalars = np.ones(handle.slots, np.float32)

        def dispatch(given: bool) -> Any:
            room = np.empty(handle.slots, np.float32) if given else None
            handle.dispatch(tokens, weights if given else None, receive="rows", recv_weights=room)
            return room

        def dispatch_backward(given: bool) -> Any:
            return handle.dispatch_backward(slots, scalars if given else None)[1]

        for call in (dispatch, dispatch_backward):
            first = call(True)
            again = call(me == 0)
            error = group.poll_error()
            if me == 0 and transport.reports_missing_weights:
                assert error is not None
                assert (error.status, error.rank) == (Status.INVALID_ARGUMENT, 1)
            else:
                assert error is None
            if me == 0:
                if call is dispatch:
                    given = layout.source_rank == 0
                    expected = np.where(given, first[: layout.total_rows], 0)
                    np.testing.assert_array_equal(again[: layout.total_rows], expected)
                else:
                    np.testing.assert_array_equal(again, np.where(where[:, :, 0] == 0, 1, 0))
            assert group.poll_error() is None
        step_on(rank, handle, case)


def before_prepare(rank: Rank, transport: Transport, case: Case) -> None:
    with open_group(rank, transport, case) as group:
        handle = open_handle(group, case)
        tokens = case.tokens_in(rank.index)
        slots = np.zeros((handle.slots, case.hidden), DTYPES["bfloat16"])
        for call in (
            lambda: handle.dispatch(tokens, receive="rows"),
            lambda: handle.combine(slots, num_tokens=len(tokens)),
            lambda: handle.dispatch_backward(slots, num_tokens=len(tokens)),
            lambda: handle.combine_backward(tokens, receive="rows"),
        ):
            with pytest.raises(BadStateError):
                call()
        step_on(rank, handle, case)


def impossible_settings(rank: Rank, transport: Transport, case: Case) -> None:
    """Refused at creation, not in the first step."""
    comm = transport.connect(rank)
    settings: dict[str, Any] = {"num_experts": case.experts, "hidden": 64, "max_tokens_per_rank": 8}
    for name, value in {
        "num_experts": 2 * rank.size + 1,
        "hidden": 40,
        "max_tokens_per_rank": 0,
        "recv_capacity": -1,
        "max_top_k": -1,
    }.items():
        with pytest.raises(InvalidArgumentError, match=name):
            transport.another_group(rank, comm, **{**settings, name: value})
    with transport.another_group(rank, comm, **settings, recv_capacity=72, max_top_k=4) as group:
        with pytest.raises(InvalidArgumentError, match="top_k"):
            group.handle(top_k=5, alignment=8)
        with pytest.raises(InvalidArgumentError, match="alignment"):
            group.handle(top_k=2, alignment=3)
        with pytest.raises(InvalidArgumentError, match="alignment"):
            group.handle(top_k=2, alignment=16)  # the capacity is no multiple of it
        with pytest.raises(NvteEpError, match="combine") as caught:
            group.handle(top_k=2, alignment=8, combine="nvfp4")
        assert caught.value.status == Status.UNSUPPORTED
    with (
        transport.another_group(rank, comm, **{**settings, "hidden": 48}) as group,
        pytest.raises(InvalidArgumentError, match="hidden"),
    ):
        group.handle(top_k=2, dispatch="mxfp8")


def live_handles_after_the_group(rank: Rank, transport: Transport, case: Case) -> None:
    group = open_group(rank, transport, case)
    handle = open_handle(group, case)
    handle.prepare(case.topk[rank.index])
    calls = every_call(handle, case, rank.index)
    group.close()
    for call in calls.values():
        with pytest.raises(BadStateError):
            call()
    handle.close()
