"""Times of collective calls: all ranks make them together, and the slowest rank counts.

On a device the calls lie in a CUDA graph between two events: what the device spends, and nothing of the
interpreter. Ranks meet on the host before; the replays that nobody times, right before those that count,
bring the devices together. A device is kept busy until all of them are enqueued, so that it never waits for
the host in between.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvte_ep import _lib
from nvte_ep.commands.bench_ep_ranks import Ranks
from nvte_ep.commands.bench_machine import Call, CudaMachine, HostMachine, Machine
from nvte_ep.errors import exception


@dataclass(frozen=True)
class Spread:
    """Microseconds of one call: of each sample the slowest rank's."""

    samples: tuple[float, ...]
    calls: int  # that each sample is the mean of

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def range(self) -> tuple[float, float]:
        """10 and 90 %."""
        low, high = np.percentile(self.samples, [10, 90])
        return float(low), float(high)


class Clock(ABC):
    """What every rank's clock does together with the others'."""

    def __init__(self, machine: Machine, ranks: Ranks) -> None:
        self.machine, self.ranks = machine, ranks

    @abstractmethod
    def time(self, calls: Sequence[Call], repeats: int, *, single: bool = False) -> Spread:
        """All calls in turn, each at least once, over and over; `single`: one call a sample. What they write
        is there afterwards."""

    @abstractmethod
    def synchronize(self) -> None: ...

    def slowest(self, samples: Sequence[float], calls: int) -> Spread:
        """The same on every rank."""
        of_all = np.array(self.ranks.gather([float(sample) for sample in samples]))
        return Spread(tuple(float(sample) for sample in of_all.max(axis=0)), calls)

    def host_time(self, call: Call, number: int = 12, rounds: int = 5) -> float:
        """Microseconds until one call returned, the median of some; at one time fewer than a stream takes in
        before it blocks."""
        samples = []
        for _ in range(rounds):
            self.synchronize()
            self.ranks.meet()
            for index in range(number):
                before = time.perf_counter()
                call()
                if index > 1:
                    samples.append((time.perf_counter() - before) * 1e6)
        self.synchronize()
        self.ranks.meet()
        return float(np.median(samples))


class HostClock(Clock):
    """Wall clock of calls that do their work before they return."""

    def __init__(self, machine: HostMachine, ranks: Ranks) -> None:
        super().__init__(machine, ranks)

    def synchronize(self) -> None: ...

    def time(self, calls: Sequence[Call], repeats: int, *, single: bool = False) -> Spread:
        for call in calls:
            self.ranks.meet()
            call()
        samples = []
        for number in range(max(repeats, len(calls))):
            self.ranks.meet()
            before = time.perf_counter()
            calls[number % len(calls)]()
            samples.append((time.perf_counter() - before) * 1e6)
        return self.slowest(samples, 1)


class CudaClock(Clock):
    SAMPLE_MICROSECONDS = 1000.0  # of a replay: far above what starting a graph takes
    MAX_CALLS = 512  # of a graph
    WARM_REPLAYS = 3
    # Copies that keep the device busy until the host has enqueued what is timed: about a millisecond.
    FILLER_BYTES = 1 << 28
    FILLERS = 8

    machine: CudaMachine

    def __init__(self, machine: CudaMachine, ranks: Ranks) -> None:
        super().__init__(machine, ranks)
        self._filler = machine.poisoned((2, self.FILLER_BYTES), "uint8")

    def synchronize(self) -> None:
        self.machine.synchronize()

    def time(self, calls: Sequence[Call], repeats: int, *, single: bool = False) -> Spread:
        """Ranks may share a device and wait for one another on it. So nothing that may wait for all of it
        happens between two meetings: graphs are made and destroyed when no rank has work in flight."""
        machine, ranks = self.machine, self.ranks
        ranks.meet()
        for call in calls:  # loads and compiles what is loaded and compiled on first use
            call()
        machine.synchronize()
        if single:
            calls = calls[:1]
            rounds = 1
        else:
            mean = self._replay(calls, 1, 2)[-1] / len(calls)
            wanted = math.ceil(self.SAMPLE_MICROSECONDS / max(mean * len(calls), 1e-3))
            rounds = max(min(wanted, self.MAX_CALLS // len(calls)), 1)
            rounds = max(ranks.gather(rounds))
        samples = self._replay(list(calls) * rounds, self.WARM_REPLAYS, repeats)
        number = len(calls) * rounds
        return self.slowest([sample / number for sample in samples], number)

    def _replay(self, calls: Sequence[Call], warm: int, repeats: int) -> list[float]:
        """Microseconds of each of some launches of a graph of the calls."""
        machine, ranks = self.machine, self.ranks
        ranks.meet()
        with machine.graph(calls) as graph:
            ranks.meet()
            for _ in range(self.FILLERS):
                machine.copy(self._filler[1], self._filler[0])
            samples = machine.replays(graph, warm + repeats)[warm:]
            ranks.meet()
        return samples


class Recorder:
    """The C function and its arguments behind a call of the Python layer: to make it without that layer.

    For one thread at a time: the calls of others go through unseen."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[Any, ...]]] = []

    def __enter__(self) -> Recorder:
        self._thread, self._real = threading.get_ident(), _lib.call
        _lib.call = self._call
        return self

    def _call(self, name: str, *arguments: Any) -> None:
        if threading.get_ident() == self._thread:
            self.made.append((name, arguments))
        self._real(name, *arguments)

    def __exit__(self, *_: object) -> None:
        _lib.call = self._real

    def bare(self) -> Call:
        """The recorded calls."""
        return _bare(self.made)

    def idle(self) -> Call:
        """As many calls of a function that does next to nothing: what ctypes takes."""
        answer = ctypes.c_int64()
        return _bare([("nvte_ep_row_bytes", (0, 16, ctypes.byref(answer)))] * len(self.made))


def _bare(made: Sequence[tuple[str, tuple[Any, ...]]]) -> Call:
    calls = [(getattr(_lib.library(), name), arguments) for name, arguments in made]

    def make() -> None:
        for function, arguments in calls:
            status = function(*arguments)
            if status != 0:
                raise exception(status, _lib.last_error())

    return make
