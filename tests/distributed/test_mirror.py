# SPDX-License-Identifier: Apache-2.0
"""The mirror itself, with host memory in the place of a device's: what it copies, and what it notices."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest
from nvte_ep import Status

from distributed import failures, mirror
from distributed.cases import CASES, Case
from distributed.checks import CHECKS, assert_same_step
from distributed.launcher import ProcessPool, Rank
from distributed.steps import open_group, open_handle, run_step
from distributed.transports import THREADS, THREADS_MIRRORED, Transport

MIRRORED = THREADS_MIRRORED
SMALL = Case("small", ranks=1, tokens=5, dispatch="nvfp4", combine_backward="nvfp4")
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["nvfp4_stochastic", "eager_mxfp8", "three_ranks", "drop_half", "float32"])
def test_a_mirrored_step_is_a_step(name: str) -> None:
    case = BY_NAME[name]
    assert len(case.where) == case.ranks
    steps = MIRRORED.run(case.ranks, run_step, MIRRORED, case)
    for check in CHECKS.values():
        check(MIRRORED, case, steps)
    for got, expected in zip(steps, THREADS.run(case.ranks, run_step, THREADS, case), strict=True):
        assert_same_step(got, expected)


def test_a_mirrored_call_is_refused_in_the_same_words() -> None:
    case = Case("refused", ranks=2, experts=6, tokens=(12, 24), capacity=256)
    MIRRORED.run(2, failures.refused_call_is_repeated, MIRRORED, case)


def test_steps_travel_through_a_pool_of_processes() -> None:
    expected = THREADS.run(1, run_step, THREADS, SMALL)
    with ProcessPool() as pool:
        for _ in range(2):
            assert_same_step(pool.run(1, run_step, MIRRORED, SMALL)[0], expected[0])


def pointers(_: Rank, transport: Transport, case: Case) -> None:
    """The library never sees the caller's memory."""
    seen: list[int] = []
    run = mirror.Call.run

    def spy(call: Any, handle: int, arguments: Any, **options: Any) -> None:
        struct = arguments._obj
        for name, _type in struct._fields_:
            value = getattr(struct, name)
            if isinstance(value, ctypes._Pointer) and value and hasattr(value.contents, "data"):
                seen.append(value.contents.data)
        run(call, handle, arguments, **options)

    with pytest.MonkeyPatch.context() as patch, open_group(_, transport, case) as group:
        patch.setattr(mirror.Call, "run", spy)
        assert isinstance(group, mirror.MirroredGroup)
        handle = open_handle(group, case)
        handle.prepare(case.topk[0])
        handle.dispatch(case.tokens_in(0), receive="rows")
        window = range(group.window.address, group.window.address + len(group.window.bytes))
        assert len(seen) == 12 and all(address in window for address in seen)


def test_the_library_works_on_copies() -> None:
    MIRRORED.run(1, pointers, MIRRORED, SMALL)


def writes_where_it_must_not(rank: Rank, transport: Transport, case: Case, fault: str) -> None:
    run = mirror.Call.run

    def fault_after(call: Any, *arguments: Any, **options: Any) -> None:
        run(call, *arguments, **options)
        spans = {span.name: span for span in call._spans}
        base = call._group.window.address
        address = {
            "before": base + spans["out"].begin - 1,
            "after": base + spans["out"].begin + len(spans["out"].host),
            "input": base + spans["tokens"].begin + 7,
        }[fault]
        ctypes.memset(address, 0x11, 1)

    with open_group(rank, transport, case) as group:
        handle = open_handle(group, case)
        handle.prepare(case.topk[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mirror.Call, "run", fault_after)
            with pytest.raises(AssertionError, match="no output were written"):
                handle.dispatch(case.tokens_in(0), receive="rows")
        handle.dispatch(case.tokens_in(0), receive="rows")


@pytest.mark.parametrize("fault", ["before", "after", "input"])
def test_a_byte_that_is_written_by_mistake_is_noticed(fault: str) -> None:
    MIRRORED.run(1, writes_where_it_must_not, MIRRORED, SMALL, fault)


def findings_and_failures(rank: Rank, transport: Transport, case: Case) -> None:
    with open_group(rank, transport, case) as group:
        handle = open_handle(group, case)
        topk = case.topk[0].copy()
        topk[0, 0] = case.experts
        handle.prepare(topk)
        error = group.poll_error()
        assert error is not None and (error.status, error.count) == (Status.INVALID_ARGUMENT, 1)
        assert group.poll_error() is None
        group.abort()
        for _ in range(2):
            error = group.poll_error()
            assert error is not None and error.status == Status.PEER_FAILED


def test_findings_come_once_and_failures_stay() -> None:
    MIRRORED.run(1, findings_and_failures, MIRRORED, SMALL)


def a_device_that_never_ends(rank: Rank, transport: Transport, case: Case) -> None:
    with open_group(rank, transport, case, timeout_ns=100_000_000) as group:
        handle = open_handle(group, case)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mirror.HostMemory, "is_idle", lambda *_: False)
            with pytest.raises(AssertionError, match="busy after twice the time-out"):
                handle.prepare(case.topk[0])


def test_a_device_that_never_ends_is_an_error() -> None:
    MIRRORED.run(1, a_device_that_never_ends, MIRRORED, SMALL)


def symmetric_memory(rank: Rank, transport: Transport, case: Case) -> None:
    with open_group(rank, transport, case, zero_copy=True) as group:
        memory = group.mem_alloc(4096)
        assert isinstance(group, mirror.MirroredGroup)
        inside = group.symmetric_at(memory.pointer + 4095)
        assert inside is not None and inside.real.pointer != memory.pointer
        assert inside.device_address(memory.pointer + 12) == inside.real.pointer + 12
        assert group.symmetric_at(memory.pointer + 4096) is not inside
        group.mem_free(memory)
        assert group.symmetric_at(memory.pointer) is None


def test_symmetric_memory_has_a_place_on_the_host() -> None:
    MIRRORED.run(1, symmetric_memory, MIRRORED, SMALL)


def test_windows_are_used_again_and_grow() -> None:
    device = (1, 77)  # nobody else's
    window = mirror.Window.take(device)
    assert window.address % 256 == 0
    window.give_back()
    again = mirror.Window.take(device)
    assert again is window and mirror.Window.take(device) is not window
    before = len(window.bytes)
    window.prepare(before + 1)
    assert len(window.bytes) > before


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 1)])
def test_spans_hold_the_first_byte_and_the_last(shape: tuple[int, ...]) -> None:
    from nvte_ep._dlpack import view

    wide = np.zeros((*shape[:-1], 8), np.float32) if shape else np.zeros((), np.float32)
    array = wide[..., : shape[-1]] if shape else wide
    found = view("f", "a", array)
    rows = int(np.prod(shape[:-1])) if shape else 1
    assert mirror._span_bytes(found.tensor) == 4 * ((rows - 1) * 8 + (shape[-1] if shape else 1))


def test_the_row_of_the_mirror_is_that_of_threads() -> None:
    assert dataclasses.replace(MIRRORED, id="threads", mirrored=False, examples=THREADS.examples) == THREADS
