# SPDX-License-Identifier: Apache-2.0
"""Ranks that stall, leave, abort, disagree or err: everybody is told, in time, and who can go on does."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from distributed import failures
from distributed.cases import Case
from distributed.checks import assert_same_step
from distributed.here import TRANSPORTS, on_transports_that
from distributed.steps import run_step
from distributed.transports import Transport

every_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=str)
where_calls_meet = on_transports_that("calls_meet")

CASE = Case("failures", ranks=3, experts=6, tokens=(12, 24, 7), capacity=256)
PAIR = Case("failures_of_two", ranks=2, experts=6, tokens=(12, 24), capacity=256)
assert CASE.layouts and PAIR.layouts


@every_transport
@pytest.mark.parametrize("step", ["prepare", "dispatch", "combine", "dispatch_backward", "combine_backward"])
def test_a_rank_that_stalls_is_named_in_time(transport: Transport, step: str) -> None:
    transport.run(3, failures.one_stalls, transport, CASE, step, 1, fails=True)


@on_transports_that("creation_times_out")
def test_a_rank_that_never_creates_its_group_is_named(transport: Transport) -> None:
    transport.run(3, failures.one_never_creates, transport, CASE, 2, fails=True)


@on_transports_that("in_processes")
def test_a_rank_that_is_killed_is_reported(transport: Transport) -> None:
    ends = transport.run(3, failures.one_is_killed, transport, CASE, 1, may_die=[1], fails=True)
    assert ends == ["survived", None, "survived"]


@every_transport
def test_an_abort_ends_the_waits_of_all(transport: Transport) -> None:
    transport.run(3, failures.one_aborts, transport, CASE, 2, fails=True)


@every_transport
def test_a_rank_that_leaves_is_named(transport: Transport) -> None:
    transport.run(3, failures.one_leaves, transport, CASE, 0, fails=True)


@every_transport
def test_abort_and_poll_from_another_thread(transport: Transport) -> None:
    transport.run(2, failures.aborted_by_another_thread, transport, PAIR, fails=True)


@every_transport
def test_a_late_rank_changes_nothing(transport: Transport) -> None:
    assert CASE.where
    expected = transport.run(3, run_step, transport, CASE)
    for got, wanted in zip(
        transport.run(3, failures.late_but_in_time, transport, CASE), expected, strict=True
    ):
        assert_same_step(got, wanted)


def disagreements(settings: Iterable[str]) -> pytest.MarkDecorator:
    pairs = [
        (transport, setting)
        for transport in TRANSPORTS
        for setting in settings
        if failures.can_disagree_on(transport, setting)
    ]
    return pytest.mark.parametrize(("transport", "setting"), pairs, ids=str)


@disagreements(failures.GROUP_SETTINGS)
def test_ranks_that_disagree_on_a_group(transport: Transport, setting: str) -> None:
    transport.run(3, failures.disagree_on_group, transport, CASE, setting)


@disagreements(failures.HANDLE_SETTINGS)
def test_ranks_that_disagree_on_a_handle(transport: Transport, setting: str) -> None:
    transport.run(3, failures.disagree_on_handle, transport, CASE, setting)


@where_calls_meet
def test_ranks_in_different_calls(transport: Transport) -> None:
    transport.run(2, failures.disagree_on_step, transport, PAIR)


@where_calls_meet
def test_ranks_with_different_handles(transport: Transport) -> None:
    transport.run(2, failures.disagree_on_handle_order, transport, PAIR)


@on_transports_that("zero_copy")
def test_memory_that_is_not_symmetric(transport: Transport) -> None:
    transport.run(2, failures.disagree_on_place, transport, PAIR)


@every_transport
def test_a_refused_call_is_repeated_while_the_peers_wait(transport: Transport) -> None:
    transport.run(2, failures.refused_call_is_repeated, transport, PAIR)


@where_calls_meet
def test_weights_come_from_all_ranks_or_none(transport: Transport) -> None:
    transport.run(2, failures.weights_on_some_ranks, transport, PAIR)


@on_transports_that("on_device")
def test_weights_that_a_peer_does_not_give(transport: Transport) -> None:
    assert PAIR.where
    transport.run(2, failures.weights_that_a_peer_does_not_give, transport, PAIR)


@every_transport
def test_nothing_goes_before_prepare(transport: Transport) -> None:
    transport.run(3, failures.before_prepare, transport, CASE)


@every_transport
def test_impossible_settings_are_refused_at_creation(transport: Transport) -> None:
    transport.run(2, failures.impossible_settings, transport, PAIR)


@every_transport
def test_handles_outlive_their_group_as_objects(transport: Transport) -> None:
    transport.run(3, failures.live_handles_after_the_group, transport, CASE)
