# SPDX-License-Identifier: Apache-2.0
"""Functions of a rank for the tests of the launcher: they know nothing but Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from distributed.launcher import Rank


def describe(rank: Rank, scale: int) -> tuple[int, int, list[int]]:
    return rank.index, rank.size, rank.gather(rank.index * scale)


def agree(rank: Rank) -> bytes:
    first: bytes = rank.broadcast(lambda: os.urandom(16))
    second: bytes = rank.broadcast(lambda: os.urandom(16))
    rank.barrier()
    return first + second


def environment_of(_: Rank, name: str) -> str:
    return os.environ[name]


def fail_at(rank: Rank, culprit: int) -> None:
    """One rank raises; the others wait for it in an exchange."""
    rank.log(f"this is rank {rank.index}")
    if rank.index == culprit:
        time.sleep(0.05)
        raise ValueError(f"rank {rank.index} has had enough")
    rank.barrier()


def fail_after_consequence(rank: Rank) -> None:
    """Rank 0 notices that rank 1 is gone before rank 1 has said why."""
    if rank.index == 0:
        raise ConnectionResetError("peer 1 is gone")
    time.sleep(0.2)
    raise ArithmeticError("the cause")


def hang_at(rank: Rank, culprit: int) -> int:
    if rank.index == culprit:
        wait_for_godot()
    return rank.index


def wait_for_godot() -> None:
    time.sleep(600)


def sleep_unless_first(rank: Rank) -> None:
    if rank.index == 0:
        raise ValueError("early")
    time.sleep(600)


def die_at(rank: Rank, culprit: int) -> None:
    if rank.index == culprit:
        print("about to go", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    rank.barrier()


def die_alone(rank: Rank, culprit: int) -> int:
    if rank.index == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank.index


def beat(rank: Rank, folder: str) -> None:
    for count in range(10**6):
        (Path(folder) / f"beat-{rank.index}").write_text(str(count))
        time.sleep(0.01)


def sleep(_: Rank, seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def count_jobs(rank: Rank) -> tuple[int, int]:
    """Of this process, which keeps the count from job to job."""
    rank.session["jobs"] = rank.session.get("jobs", 0) + 1
    rank.log(f"job number {rank.session['jobs']}")
    return os.getpid(), rank.session["jobs"]


def start_child_and_fail(rank: Rank, folder: str) -> None:
    """Leaves a process behind that writes on and on."""
    code = (
        "import pathlib, sys, time\n"
        "for i in range(10**6):\n    pathlib.Path(sys.argv[1]).write_text(str(i)); time.sleep(.01)"
    )
    beat = Path(folder) / f"beat-{rank.index}"
    subprocess.Popen([sys.executable, "-c", code, str(beat)])
    while not beat.exists():
        time.sleep(0.01)
    raise ValueError("left a child")


class Unpicklable(Exception):
    def __init__(self, text: str, lock: Any) -> None:
        super().__init__(text)
        self.lock = lock


def raise_unpicklable(_: Rank) -> None:
    import threading

    raise Unpicklable("has a lock", threading.Lock())


def fail_a_check_of_pytest(_: Rank) -> None:
    import pytest

    with pytest.raises(ValueError):
        pass


def return_unpicklable(_: Rank) -> Any:
    return lambda: None
