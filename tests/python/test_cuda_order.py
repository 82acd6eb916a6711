# SPDX-License-Identifier: Apache-2.0
"""One stream waits for another, also where graphs are captured; on a stand-in for cuda.bindings."""

from __future__ import annotations

import numpy as np
import pytest
from nvte_ep import Array, _cuda
from nvte_ep._dtypes import CUDA_TYPE

DEFAULT, A, B = 0, 0xA0, 0xB0


class Streams:
    """cuda.bindings.runtime, as far as streams wait for events."""

    cudaEventDisableTiming = 2

    def __init__(self, captured: set[int]) -> None:
        self.captured = captured
        self.done: list[tuple[str, int]] = []

    def cudaGetDevice(self) -> tuple[int, int]:
        return 0, 0

    def cudaStreamIsCapturing(self, stream: int) -> tuple[int, int]:
        # CUDA refuses the question about the default stream while a blocking stream is captured.
        return (901, 0) if stream in (DEFAULT, 1) else (0, int(stream in self.captured))

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[int, object]:
        return 0, object()

    def cudaEventRecord(self, event: object, stream: int) -> tuple[int]:
        self.done.append(("record", stream))
        return (0,)

    def cudaStreamWaitEvent(self, stream: int, event: object, flags: int) -> tuple[int]:
        self.done.append(("wait", stream))
        return (0,)

    def cudaEventDestroy(self, event: object) -> tuple[int]:
        return (0,)


@pytest.mark.parametrize(
    ("captured", "first", "then", "waits"),
    [
        (set(), A, B, True),
        (set(), DEFAULT, B, True),
        (set(), A, DEFAULT, True),
        (set(), A, A, False),
        (set(), DEFAULT, 1, False),  # two names of the legacy default stream
        ({B}, A, B, False),  # what came before a capture is no part of it
        ({B}, DEFAULT, B, False),
        ({A, B}, A, B, True),  # two streams of one capture
    ],
)
def test_order(
    captured: set[int], first: int, then: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams(captured)
    monkeypatch.setattr(_cuda, "runtime", lambda: streams)
    _cuda.order(0, first, then)
    assert streams.done == ([("record", first), ("wait", then)] if waits else [])


def test_arrays_over_one_memory_share_its_last_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part cut out before the whole was written waits for that write, and the other way round."""
    streams = Streams(set())
    monkeypatch.setattr(_cuda, "runtime", lambda: streams)
    host = np.zeros(64, np.uint8)
    whole = Array.borrow(host.ctypes.data, host.nbytes, (CUDA_TYPE, 0), host)
    part = whole[16:32].view("float32").reshape(2, 2)
    whole.written_on(A)
    part.wait_on(B)
    part.written_on(B)
    whole[:4].wait_on(A)
    assert streams.done == [("record", A), ("wait", B), ("record", B), ("wait", A)]
