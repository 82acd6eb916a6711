"""The ranks of `nvte-ep bench ep`: threads of this process, or processes that nvte_ep.job knows."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from nvte_ep.communicator import Communicator, unique_id
from nvte_ep.errors import NvteEpError, PeerFailedError, exception
from nvte_ep.job import Job

T = TypeVar("T")


class Ranks(ABC):
    """One rank, and how it meets the others on the host. Values are what JSON can hold."""

    rank: int
    size: int
    threads: bool  # of one process

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """The value of every rank."""

    def meet(self) -> None:
        self.gather(None)

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on rank 0; what it raises there is raised on every rank."""
        value, failure = None, None
        if self.rank == 0:
            try:
                value = make()
            except NvteEpError as error:
                failure = [int(error.status), str(error)]
        value, failure = self.gather([value, failure])[0]
        if failure is not None:
            raise exception(*failure)
        return value

    def communicator(self, kind: str, device_id: int) -> Communicator:
        """A new communicator of all ranks."""
        shared = bytes.fromhex(self.broadcast(lambda: unique_id(kind).hex()))
        return Communicator(kind, self.size, self.rank, shared, device_id=device_id)


class Processes(Ranks):
    threads = False

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank, self.size = job.rank, job.size

    def gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        return [json.loads(text) for text in self.job.gather(json.dumps(value).encode())]


class Threads(Ranks):
    threads = True

    def __init__(self, rank: int, size: int, shared: Shared) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def gather(self, value: Any) -> list[Any]:
        shared = self._shared
        shared.values[self.rank] = value
        shared.barrier.wait()
        values = list(shared.values)
        shared.barrier.wait()  # everybody has read
        return values


class Shared:
    """What ranks that are threads have in common."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size


def run_threads(size: int, body: Callable[[Ranks], T]) -> list[T]:
    """body(ranks) on a thread for each rank. Where one fails, all end and its error is raised."""
    shared = Shared(size)
    results: list[T | None] = [None] * size
    failures: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = body(Threads(rank, size, shared))
        except BaseException as error:
            failures.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # an interrupt: the ranks must not wait for one another any longer
        shared.barrier.abort()
        raise
    if failures:
        echoes = (threading.BrokenBarrierError, PeerFailedError)  # of what happened to another rank
        raise next((error for error in failures if not isinstance(error, echoes)), failures[0])
    return [result for result in results if result is not None]
