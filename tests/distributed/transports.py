# SPDX-License-Identifier: Apache-2.0
"""The transports under test: how their ranks run, and how a rank gets into the library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nvte_ep
from nvte_ep import Communicator, Group, NvteEpError

from distributed.launcher import Rank, run_threads

# Of every wait in the library. A test that fails must not take the library's own 100 s.
TIMEOUT_NS = 20_000_000_000


@dataclass(frozen=True)
class Transport:
    name: str
    communicator: str  # kind
    run: Callable[..., list[Any]]  # a launcher
    exact_sums: bool  # sums of slots are rounded once; else once more for each contributing rank

    def __str__(self) -> str:
        return self.name

    def join(self, rank: Rank, *, timeout_ns: int = TIMEOUT_NS, **config: Any) -> Group:
        """This rank's member of a new group. When another rank fails it is aborted, so that nobody waits."""
        shared_id = rank.broadcast(lambda: nvte_ep.unique_id(self.communicator))
        comm = Communicator(self.communicator, rank.size, rank.index, shared_id, timeout_ns=timeout_ns)
        return self.another_group(rank, comm, timeout_ns=timeout_ns, **config)

    def another_group(
        self, rank: Rank, comm: Communicator, *, timeout_ns: int = TIMEOUT_NS, **config: Any
    ) -> Group:
        group = Group(comm, transport=self.name, timeout_ns=timeout_ns, **config)

        def abort() -> None:
            with contextlib.suppress(NvteEpError):
                group.abort()

        rank.on_failure(abort)
        rank.log(f"group of {rank.size} ranks over {self.name}: {config}")
        return group


TRANSPORTS = [Transport("threads", "threads", run_threads, exact_sums=True)]
