# SPDX-License-Identifier: Apache-2.0
"""The transports under test: the table of them, how their ranks run, and how a rank gets into the library.

here.py chooses the rows that a run tests.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nvte_ep
from nvte_ep import Communicator, Group, NvteEpError, UnsupportedError, _cuda
from nvte_ep._dtypes import CPU, CUDA_TYPE, Device

from distributed.cases import Case
from distributed.launcher import DEFAULT_TIMEOUT, ProcessPool, Rank, run_threads
from distributed.mirror import MirroredGroup

# Settings of a group of one or two ranks that no transport is too narrow for.
ANY_TRANSPORT = {"num_experts": 16, "hidden": 512, "max_tokens_per_rank": 128, "recv_capacity": 1024}
# Of every wait in the library. A test that fails must not take the library's own 100 s.
TIMEOUT_NS = 20_000_000_000
# Seconds: a CUDA context and NCCL take long to come where a machine is busy.
START_TIMEOUT = 90.0

# On devices, where more of them only share the same GPUs and links.
MAX_RANKS = int(os.environ.get("NVTE_EP_MAX_RANKS", "8"))
# Of any test on devices, those included that have a number of ranks of their own.
MOST_RANKS = max(MAX_RANKS, 8)

# Streams of one process share so many queues of a GPU, and ranks that wait for each other must share none.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@dataclass(frozen=True)
class Transport:
    """A row of the table. What follows `communicator` says how it differs from `threads`."""

    id: str
    name: str
    communicator: str  # kind
    on_device: bool = True
    in_processes: bool = False
    variables: tuple[tuple[str, str], ...] = ()  # of the environment of its processes
    mirrored: bool = True  # what the tests see are host arrays, and the library works on copies: mirror.py
    max_ranks: int = MAX_RANKS
    # Sums of slots are rounded once; else once more for each contributing rank. See checks.check_sum.
    exact_sums: bool = False
    mxfp8_sums: bool = False  # combine and dispatch backward may travel in mxfp8
    zero_copy: bool = False
    # A call returns when all ranks have made it: so ranks in different calls, or with other arguments, are
    # told. On a device a call returns when it is enqueued.
    calls_meet: bool = False
    # On a device a rank that wants weights which a peer does not give gets zeros; here a finding too.
    reports_missing_weights: bool = False
    # Of a rank that stalls or leaves, the others tell its number, and so does its own next call.
    names_culprit: bool = True
    aborts_travel: bool = True  # an abort ends the waits of the peers at once; else their time-out does
    creation_times_out: bool = True  # where a rank never creates its group
    survives_failures: bool = True  # processes can go on when a group of theirs has failed
    # Its kernels are compiled at run time for each shape, which takes a minute: it gets the cases of one,
    # with room for so many tokens.
    one_shape: bool = False
    room_for_tokens: int = 170
    # How thorough the suites are where they could go on for ever.
    examples: int = 40  # of routings that are made up
    alignments: tuple[int, ...] = (1, 16, 32, 64, 128, 256)

    def __str__(self) -> str:
        return self.id

    # ---- in the tests ----

    def run(
        self,
        size: int,
        body: Callable[..., Any],
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT,
        may_die: Collection[int] = (),
        fails: bool = False,
    ) -> list[Any]:
        """body(rank, *args) on every rank; the results in their order. fails: groups fail in it."""
        if not self.in_processes:
            return run_threads(size, body, *args, timeout=timeout)
        if fails and not self.survives_failures:
            with ProcessPool(self.environment, START_TIMEOUT) as pool:
                return pool.run(size, body, *args, timeout=timeout, may_die=may_die)
        return _pool(self).run(size, body, *args, timeout=timeout, may_die=may_die)

    def environment(self, rank: int) -> dict[str, str]:
        """Of a rank's process."""
        return environment(rank) | dict(self.variables)

    def takes(self, ranks: int) -> bool:
        return ranks <= self.max_ranks

    def fit(self, case: Case) -> Case | None:
        """The case as this transport gets it, if it does. Cases that are about a shape are not for one that
        has its own."""
        if not self.takes(case.ranks):
            return None
        if not self.one_shape:
            return case
        if case.ranks not in (1, 2, 4):  # the number of ranks is part of the shape
            return None
        if case.hidden > 64 or case.experts > 64 or case.top_k > 8 or case.max_tokens > 128:
            return None
        experts = max(8, 4 * case.ranks)
        return dataclasses.replace(
            case, hidden=512, experts=experts, top_k=3, room_for_tokens=self.room_for_tokens
        )

    def sum_format(self, format: str) -> str:
        """How sums travel where a case asks for this wire format."""
        return "bf16" if format == "mxfp8" and not self.mxfp8_sums else format

    # ---- in the ranks ----

    def device_of(self, rank: Rank) -> Device:
        return (CUDA_TYPE, rank.index % max(1, count_gpus())) if self.on_device else CPU

    def connect(self, rank: Rank, *, keep: bool = True) -> Communicator:
        """A communicator of all ranks. One of processes takes long to make, and is kept for later jobs."""
        key = f"communicator of {rank.size}"
        if key not in rank.session or not keep:
            shared_id = rank.broadcast(lambda: nvte_ep.unique_id(self.communicator))
            options = {"device_id": self.device_of(rank)[1], "timeout_ns": TIMEOUT_NS}
            made = Communicator(self.communicator, rank.size, rank.index, shared_id, **options)
            if not self.in_processes or not keep:
                return made
            rank.session[key] = made
        kept: Communicator = rank.session[key]
        return kept

    def join(self, rank: Rank, *, timeout_ns: int = TIMEOUT_NS, **config: Any) -> Group:
        """This rank's member of a new group. When another rank fails it is aborted, so that nobody waits."""
        return self.another_group(rank, self.connect(rank), timeout_ns=timeout_ns, **config)

    def join_plainly(self, rank: Rank, *, timeout_ns: int = TIMEOUT_NS, **config: Any) -> Group:
        """As join, a group whose arrays lie where the library works."""
        return dataclasses.replace(self, mirrored=False).join(rank, timeout_ns=timeout_ns, **config)

    def another_group(
        self, rank: Rank, comm: Communicator, *, timeout_ns: int = TIMEOUT_NS, **config: Any
    ) -> Group:
        config |= {"transport": self.name, "timeout_ns": timeout_ns}
        if self.mirrored:
            group: Group = MirroredGroup(
                comm, device=self.device_of(rank), sum_format=self.sum_format, **config
            )
        else:
            group = Group(comm, device=self.device_of(rank), **config)

        def abort() -> None:
            with contextlib.suppress(NvteEpError):
                group.abort()

        rank.on_failure(abort)
        rank.log(f"group of {rank.size} ranks over {self.name}: {config}")
        return group


THREADS = Transport(
    "threads",
    "threads",
    "threads",
    on_device=False,
    mirrored=False,
    max_ranks=64,
    exact_sums=True,
    mxfp8_sums=True,
    zero_copy=True,
    calls_meet=True,
    examples=250,
)
# Shows the mirror itself, without a GPU.
THREADS_MIRRORED = dataclasses.replace(THREADS, id="threads_mirrored", mirrored=True, examples=40)
_NCCL: dict[str, Any] = dict.fromkeys(
    ("names_culprit", "aborts_travel", "creation_times_out", "survives_failures"), False
)
_PEER: dict[str, Any] = {"mxfp8_sums": True, "reports_missing_weights": True}
_NCCL_EP: dict[str, Any] = {"zero_copy": True, "one_shape": True, "max_ranks": 4}
_IPC = (("NVTE_EP_PEER_MEMORY", "ipc"),)
_PROCESSES: dict[str, Any] = {"in_processes": True, "examples": 10, "alignments": (1, 32, 128)}
ALL = [
    THREADS,
    Transport("peer_threads", "peer", "threads", **_PEER),
    # Over NCCL windows where this NCCL has them.
    Transport("peer_processes", "peer", "nccl", **_PEER, **_PROCESSES),
    Transport("peer_ipc", "peer", "nccl", variables=_IPC, **_PEER, **_PROCESSES),
    Transport("nccl_ep", "nccl_ep", "nccl", **_NCCL_EP, **_NCCL, **_PROCESSES),
    # Few enough tokens for its low-latency mode.
    Transport("nccl_ep_few", "nccl_ep", "nccl", room_for_tokens=128, **_NCCL_EP, **_NCCL, **_PROCESSES),
    Transport("nccl", "nccl", "nccl", **_NCCL, **_PROCESSES),
]


# ---- processes ---------------------------------------------------------------------------------------------


@functools.cache
def count_gpus() -> int:
    try:
        code, count = _cuda.runtime().cudaGetDeviceCount()
    except NvteEpError:  # no cuda.bindings
        return 0
    return int(count) if int(code) == 0 else 0


def environment(rank: int) -> dict[str, str]:
    """Of a rank's process."""
    variables = {
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    if count_gpus() < MOST_RANKS:  # some share one
        variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    # A framework may load an NCCL of its own, and the first in a process is the one that all use.
    newer = Path(os.environ.get("NCCL_HOME", ""), "lib", "libnccl.so.2")
    if newer.is_absolute() and newer.exists():
        variables["LD_PRELOAD"] = str(newer)
    return variables


def why_not_at(rank: Rank, transport: Transport) -> str | None:
    """Why the library does not make a group of one rank; None: it does."""
    try:
        transport.join(rank, **ANY_TRANSPORT).close()
    except UnsupportedError as error:
        return str(error)
    return None


@functools.cache
def _pool(transport: Transport) -> ProcessPool:
    pool = ProcessPool(transport.environment, START_TIMEOUT)
    atexit.register(pool.close)
    return pool
