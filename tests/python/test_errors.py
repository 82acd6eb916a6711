# SPDX-License-Identifier: Apache-2.0
"""Every status is an exception of its own, that is also the built-in one which fits, with the library's
text."""

from __future__ import annotations

import pickle
import threading
import time

import numpy as np
import nvte_ep
import pytest
from nvte_ep import _lib
from nvte_ep.errors import Status, exception

BUILT_IN = {
    Status.INVALID_ARGUMENT: (nvte_ep.InvalidArgumentError, ValueError),
    Status.UNSUPPORTED: (nvte_ep.UnsupportedError, NotImplementedError),
    Status.BAD_STATE: (nvte_ep.BadStateError, RuntimeError),
    Status.OUT_OF_MEMORY: (nvte_ep.OutOfMemoryError, MemoryError),
    Status.CUDA: (nvte_ep.CudaError, RuntimeError),
    Status.TRANSPORT: (nvte_ep.TransportError, RuntimeError),
    Status.PEER_FAILED: (nvte_ep.PeerFailedError, ConnectionError),
    Status.TIMEOUT: (nvte_ep.PeerTimeoutError, TimeoutError),
    Status.OVERFLOW: (nvte_ep.RecvOverflowError, RuntimeError),
    Status.ABI_MISMATCH: (nvte_ep.AbiMismatchError, RuntimeError),
    Status.INTERNAL: (nvte_ep.InternalError, RuntimeError),
}


def test_every_status_has_a_class() -> None:
    assert set(BUILT_IN) == set(Status) - {Status.OK}


@pytest.mark.parametrize("status", list(BUILT_IN), ids=lambda status: status.name)
def test_class_of_a_status(status: Status) -> None:
    ours, built_in = BUILT_IN[status]
    error = exception(status, "function: argument: expected this, got that")
    assert type(error) is ours
    assert isinstance(error, built_in)
    assert isinstance(error, nvte_ep.NvteEpError)
    assert error.status is status
    assert error.text == str(error) == "function: argument: expected this, got that"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ours
    assert (again.status, again.text) == (error.status, error.text)


def test_names_of_statuses() -> None:
    for status in Status:
        assert _lib.status_name(status) == status.name
    assert _lib.status_name(4711) == "UNKNOWN"


def test_a_status_of_a_newer_library() -> None:
    error = exception(99, "new")
    assert type(error) is nvte_ep.NvteEpError
    assert error.status == 99
    assert pickle.loads(pickle.dumps(error)).status == 99


def test_library_not_found_is_an_import_error() -> None:
    error = nvte_ep.LibraryNotFoundError(Status.UNSUPPORTED, "text")
    assert isinstance(error, (ImportError, NotImplementedError))
    assert str(error) == "text"


def group(comm: nvte_ep.Communicator, **settings: object) -> nvte_ep.Group:
    defaults = {"num_experts": 4, "hidden": 32, "max_tokens_per_rank": 8, "recv_capacity": 32}
    return nvte_ep.Group(comm, **(defaults | settings))


def test_invalid_argument() -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"nvte_ep_nvfp4_pack: .*tokens") as caught:
        nvte_ep.nvfp4_pack(np.zeros((2, 32), np.int32))
    assert caught.value.status == Status.INVALID_ARGUMENT
    with pytest.raises(ValueError, match=r"hidden"):
        nvte_ep.row_bytes("nvfp4", 17)


def test_unsupported() -> None:
    with group(nvte_ep.Communicator.threads(1)[0]) as one:
        with pytest.raises(nvte_ep.UnsupportedError, match=r"combine") as caught:
            one.handle(top_k=2, alignment=1, combine="nvfp4")
        assert caught.value.status == Status.UNSUPPORTED


def test_bad_state() -> None:
    one = group(nvte_ep.Communicator.threads(1)[0])
    handle = one.handle(top_k=2, alignment=1)
    with pytest.raises(nvte_ep.BadStateError, match=r"prepare") as caught:
        handle.dispatch(np.zeros((2, 32), np.float32), receive="decoded")
    assert caught.value.status == Status.BAD_STATE
    one.close()
    with pytest.raises(nvte_ep.BadStateError):
        handle.prepare([[0, 1]])
    with pytest.raises(nvte_ep.BadStateError, match=r"closed"):
        one.poll_error()


def test_timeout_of_a_missing_peer() -> None:
    comm = nvte_ep.Communicator.threads(2)[0]
    begin = time.monotonic()
    with pytest.raises(nvte_ep.PeerTimeoutError, match=r"rank") as caught:
        group(comm, timeout_ns=100_000_000)
    assert caught.value.status == Status.TIMEOUT
    assert 0.05 < time.monotonic() - begin < 5


def test_peer_failed_and_poll_error() -> None:
    comms = nvte_ep.Communicator.threads(2)
    groups: list[nvte_ep.Group | None] = [None, None]

    def create(rank: int) -> None:
        groups[rank] = group(comms[rank])

    threads = [threading.Thread(target=create, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = groups
    assert first is not None
    assert second is not None
    handle = second.handle(top_k=1, alignment=1)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            handle.prepare([[0]])
        except nvte_ep.NvteEpError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    first.abort()
    waiting.join(20)
    assert len(caught) == 1
    assert isinstance(caught[0], nvte_ep.PeerFailedError)
    assert "rank 0" in str(caught[0])
    error = second.poll_error()
    assert error is not None
    assert (error.status, error.rank) == (Status.PEER_FAILED, 0)
    with pytest.raises(ConnectionError, match=r"rank 0"):
        second.check()
    first.close()
    second.close()


def test_overflow_and_poll_error() -> None:
    with group(nvte_ep.Communicator.threads(1)[0], recv_capacity=2) as one:
        handle = one.handle(top_k=1, alignment=1)
        assert one.poll_error() is None
        routing = handle.prepare([[0], [1], [2], [3], [3]])
        assert routing.dropped_rows.tolist() == [3]
        error = one.poll_error()
        assert error is not None
        assert error.status is Status.OVERFLOW
        assert error.handle is handle
        assert (error.count, error.needed_rows) == (3, 5)
        assert one.poll_error() is None
        handle.prepare([[0], [1], [2]])
        with pytest.raises(
            nvte_ep.RecvOverflowError,
            match="recv_capacity: expected at least 3, got 2; rows dropped on rank 0: 1",
        ):
            one.check()
        one.check()


def test_findings_about_indices() -> None:
    with group(nvte_ep.Communicator.threads(1)[0]) as one:
        handle = one.handle(top_k=2, alignment=1)
        handle.prepare([[0, 4], [1, 1]])
        with pytest.raises(nvte_ep.InvalidArgumentError) as caught:
            one.check()
        assert str(caught.value) == (
            "nvte_ep_group_poll_error: topk_idx: expected global expert ids below 4 or -1, each expert at "
            "most once a token; got 1 out of range and 1 named twice on rank 0, which count as -1"
        )
        handle.prepare([[0, 7], [-2, 1]])
        handle.prepare([[2, 2], [9, 1]])
        error = one.poll_error()
        assert error is not None
        assert (error.status, error.count) == (Status.INVALID_ARGUMENT, 4)
        assert "got 3 out of range and 1 named twice" in error.text
        assert one.poll_error() is None
        assert _lib.last_error() == ""


def test_text_of_a_finding_survives_a_finalizer(monkeypatch: pytest.MonkeyPatch) -> None:
    with group(nvte_ep.Communicator.threads(1)[0]) as one:
        one.handle(top_k=1, alignment=1).prepare([[4]])
        call = _lib.call

        def call_and_collect(name: str, *arguments: object) -> None:
            call(name, *arguments)
            _lib.quiet_call("nvte_ep_comm_destroy", None)

        monkeypatch.setattr(_lib, "call", call_and_collect)
        error = one.poll_error()
        monkeypatch.undo()
        assert error is not None
        assert "topk_idx" in error.text


def test_indices_are_told_before_what_they_left_no_room_for() -> None:
    with group(nvte_ep.Communicator.threads(1)[0], recv_capacity=1) as one:
        handle = one.handle(top_k=1, alignment=1)
        handle.prepare([[0], [1], [4]])
        for status in (Status.INVALID_ARGUMENT, Status.OVERFLOW):
            error = one.poll_error()
            assert error is not None
            assert (error.status, error.count, error.handle) == (status, 1, handle)
        assert one.poll_error() is None


def test_text_survives_a_finalizer() -> None:
    """The collector may destroy an object between a failed call and the reading of its text."""
    (comm,) = nvte_ep.Communicator.threads(1)
    assert _lib.library().nvte_ep_row_bytes(2, 17, None) == Status.INVALID_ARGUMENT
    del comm
    assert _lib.library().nvte_ep_last_error() == b""  # the finalizer's call succeeded
    assert "nvte_ep_row_bytes" in _lib.last_error()
    assert _lib.last_error() == ""


# ---- the argument that a text names is one of Python's ---------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rank": 3}, "nvte_ep_comm_create: rank: expected 0 to 1, got 3"),
        ({"num_ranks": 0}, "nvte_ep_comm_create: num_ranks: expected"),
        ({"timeout_ns": -1}, "nvte_ep_comm_create: timeout_ns: expected"),
    ],
)
def test_arguments_of_a_communicator(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError) as caught:
        nvte_ep.Communicator("threads", **({"num_ranks": 2, "rank": 0} | arguments))
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(("name", "value"), [("hidden", 17), ("num_experts", 0), ("timeout_ns", -1)])
def test_arguments_of_a_group(name: str, value: int) -> None:
    comm = nvte_ep.Communicator.threads(1)[0]
    settings = {"num_experts": 4, "hidden": 32, "max_tokens_per_rank": 8, name: value}
    for function in (nvte_ep.Group, nvte_ep.Group.memory):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=rf"_(create|memory): {name}: expected"):
            function(comm, **settings)


def test_an_argument_of_a_group_with_another_name_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = nvte_ep.Communicator.threads(1)[0]

    def refuse(name: str, *_: object) -> None:
        raise exception(Status.INVALID_ARGUMENT, f"{name}: device_id: expected 0, got 1")

    monkeypatch.setattr(_lib, "call", refuse)
    with pytest.raises(nvte_ep.InvalidArgumentError) as caught:
        group(comm)
    assert str(caught.value) == "nvte_ep_group_create: device: expected 0, got 1"


def test_arguments_of_codecs() -> None:
    tokens = np.ones((4, 64), np.float32)
    rows = nvte_ep.nvfp4_pack(tokens)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"nvfp4_pack: row_id_base: expected"):
        nvte_ep.nvfp4_pack(tokens, row_id_base=-1)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"nvfp4_direct_receive: rank: expected"):
        nvte_ep.nvfp4_direct_receive(rows, 64, [4], alignment=4, rank=-1)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"operand_layout: num_experts: expected"):
        nvte_ep.operand_layout("nvfp4", 64, 4, -1)
