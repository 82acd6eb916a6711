# SPDX-License-Identifier: Apache-2.0
"""Runs one function as the ranks of a job: on threads of this process, or in a process for each rank.

    results = run_threads(4, body, case)      # body(rank, case) on four threads; results in rank order
    results = run_processes(4, body, case)    # the same, with pickled arguments and results

Both end all ranks when one fails, raise the exception of the rank that failed first, show its log on stderr,
and give up with RanksHung, which shows where every rank stands, after `timeout` seconds.
This file knows nothing of the library under test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

DEFAULT_TIMEOUT = 60.0
_POLL = 0.005
# How long the others may take to end after a failure, and how long a cause may come in after its consequence.
_GRACE = 2.0
_CAUSE_WAIT = 0.5

Environment = Callable[[int], Mapping[str, str]]


class RanksHung(TimeoutError):
    """Some ranks did not end in time; the text shows where they stand."""


class RankDied(RuntimeError):
    """The process of a rank ended without a result."""


# ---- what ranks tell each other before they have a communicator --------------------------------------------


class Store(Protocol):
    """Values that one rank puts and the others wait for, each under a name of its own."""

    def put(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout: float) -> bytes: ...


class MemoryStore:
    """For ranks that are threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or key in self._values, timeout)
            if key in self._values:
                return self._values[key]
            if self._closed:
                raise ConnectionAbortedError(f"{key}: another rank failed")
            raise TimeoutError(f"{key}: nobody put it within {timeout:g} s")

    def close(self) -> None:
        """Ends every wait, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class FileStore:
    """For ranks that are processes: a file for each value, which appears whole because it is renamed into
    place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, value: bytes) -> None:
        write_whole(self._folder / key, value)

    def get(self, key: str, timeout: float) -> bytes:
        path = self._folder / key
        end = time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"{key}: nobody put it within {timeout:g} s")
            time.sleep(_POLL)
        return path.read_bytes()


def write_whole(path: Path, value: bytes) -> None:
    """Nobody ever sees half of the file."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "wb") as file:
        file.write(value)
    os.replace(name, path)


# ---- a rank ------------------------------------------------------------------------------------------------


class Rank:
    """What the function of a rank is given."""

    def __init__(self, index: int, size: int, store: Store, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.index = index
        self.size = size
        self._store = store
        self._timeout = timeout
        self._exchanges = 0
        self._stops: list[Callable[[], object]] = []
        self._lines: list[str] = []
        self._start = time.monotonic()

    def log(self, text: str) -> None:
        """A line of this rank's log, shown if it is the first to fail."""
        line = f"[{time.monotonic() - self._start:8.3f} s] {text}"
        self._lines.append(line)

    @property
    def lines(self) -> list[str]:
        return self._lines

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank. All ranks call it, in the same order as their other exchanges."""
        name = f"exchange-{self._exchanges}"
        self._exchanges += 1
        self._store.put(f"{name}-{self.index}", pickle.dumps(value))
        return [pickle.loads(self._store.get(f"{name}-{rank}", self._timeout)) for rank in range(self.size)]

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, for everybody."""
        name = f"exchange-{self._exchanges}"
        self._exchanges += 1
        if self.index == 0:
            self._store.put(name, pickle.dumps(make()))
        return pickle.loads(self._store.get(name, self._timeout))

    def barrier(self) -> None:
        self.gather(None)

    def on_failure(self, stop: Callable[[], object]) -> None:
        """Ends this rank's waiting when another rank fails: called from another thread. Threads only, since a
        process is killed."""
        self._stops.append(stop)

    def stop(self) -> None:
        for end in self._stops:
            with contextlib.suppress(Exception):
                end()


@dataclass(frozen=True)
class _Failure:
    when: float
    rank: int
    error: BaseException

    @property
    def is_consequence(self) -> bool:
        """A rank that reports its peer, or the wait for it, is not the first to have failed."""
        return isinstance(self.error, (ConnectionError, TimeoutError))


def _first(failures: list[_Failure]) -> _Failure:
    return min(failures, key=lambda failure: (failure.is_consequence, failure.when))


def _show_log(rank: int, size: int, log: str) -> None:
    print(f"---- log of rank {rank} of {size}, the first to fail ----\n{log.rstrip()}", file=sys.stderr)


# ---- threads -----------------------------------------------------------------------------------------------


def run_threads(
    size: int, body: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT
) -> list[Any]:
    store = MemoryStore()
    ranks = [Rank(index, size, store, timeout) for index in range(size)]
    results: list[Any] = [None] * size
    failures: list[_Failure] = []
    running = set(range(size))
    changed = threading.Condition()

    def work(rank: Rank) -> None:
        try:
            results[rank.index] = body(rank, *args)
        except BaseException as error:
            rank.log("".join(traceback.format_exception(type(error), error, error.__traceback__)))
            with changed:
                failures.append(_Failure(time.monotonic(), rank.index, error))
        finally:
            with changed:
                running.discard(rank.index)
                changed.notify_all()

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank.index}", daemon=True) for rank in ranks
    ]
    for thread in threads:
        thread.start()

    def stop_all() -> None:
        store.close()
        for rank in ranks:
            rank.stop()

    stands = ""
    try:
        with changed:
            changed.wait_for(lambda: not running or failures, timeout)
            if running and failures and _first(failures).is_consequence:
                changed.wait_for(lambda: not running or not _first(failures).is_consequence, _CAUSE_WAIT)
            hung = sorted(running) if not failures else []
        if hung:  # before anything ends them
            stands = "\n".join(_stack(threads[index]) for index in hung)
    finally:
        with changed:
            unfinished = bool(running)
        if unfinished:
            stop_all()
            with changed:
                changed.wait_for(lambda: not running, _GRACE)
    if hung:
        raise RanksHung(f"ranks {hung} of {size} did not end within {timeout:g} s\n{stands}")
    if failures:
        first = _first(failures)
        _show_log(first.rank, size, "\n".join(ranks[first.rank].lines))
        raise first.error
    return results


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (it has just ended)\n"
    return f"{thread.name} stands at:\n{stack}"


# ---- processes ---------------------------------------------------------------------------------------------

_CHILD = "import sys; from {module} import child; child(sys.argv[1], int(sys.argv[2]))"


def run_processes(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT,
    environment: Environment | None = None,
) -> list[Any]:
    """`environment` gives the variables of a rank, its GPU for example. body, args and results are pickled,
    so body is a function of a module."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps((size, body, args, timeout)))
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(size):
                children.append(_start(folder, rank, environment(rank) if environment else {}))
            results, failures, hung = _watch(folder, children, timeout)
            if hung:
                _ask_for_stacks(children, hung)
        finally:
            for child in children:
                _kill(child)
        if hung:
            stands = "\n".join(f"rank {rank}:\n{_log(folder, rank)}" for rank in hung)
            raise RanksHung(f"ranks {hung} of {size} did not end within {timeout:g} s\n{stands}")
        if failures:
            first = _first(failures)
            _show_log(first.rank, size, _log(folder, first.rank))
            raise first.error
        return [results[rank] for rank in range(size)]


def _start(folder: Path, rank: int, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with (folder / f"log-{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", _CHILD.format(module=__name__), str(folder), str(rank)],
            env={**os.environ, "PYTHONPATH": path, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what a rank has started ends with it
        )


def _watch(
    folder: Path, children: list[subprocess.Popen[bytes]], timeout: float
) -> tuple[dict[int, Any], list[_Failure], list[int]]:
    """Waits until all have ended, one has failed or the time is up: results, failures, ranks that hang."""
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    running = set(range(len(children)))
    end = time.monotonic() + timeout
    while running:
        for rank in sorted(running):
            code = children[rank].poll()
            if code is None:
                continue
            running.discard(rank)
            value, error = _outcome(folder, rank, code)
            if error is None:
                results[rank] = value
            else:
                failures.append(_Failure(time.monotonic(), rank, error))
        if failures:
            first = _first(failures)
            if not first.is_consequence or time.monotonic() > first.when + _CAUSE_WAIT:
                return results, failures, []
        if time.monotonic() > end:
            return results, failures, [] if failures else sorted(running)
        time.sleep(_POLL)
    return results, failures, []


def _outcome(folder: Path, rank: int, code: int) -> tuple[Any, BaseException | None]:
    path = folder / f"result-{rank}"
    if path.exists():
        value, error = pickle.loads(path.read_bytes())
        return value, error
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return None, RankDied(f"rank {rank} ended with {how} and left no result")


def _log(folder: Path, rank: int) -> str:
    return (folder / f"log-{rank}").read_text(errors="replace")


def _ask_for_stacks(children: list[subprocess.Popen[bytes]], ranks: list[int]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            children[rank].send_signal(signal.SIGUSR1)
    time.sleep(0.3)


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def child(folder_name: str, index: int) -> None:
    """The main program of a rank that is a process."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder = Path(folder_name)
    size, body, args, timeout = pickle.loads((folder / "job").read_bytes())
    # Should the launcher die, nobody kills this process but itself.
    faulthandler.dump_traceback_later(timeout + _GRACE, exit=True)
    rank = _ProcessRank(index, size, FileStore(folder), timeout)
    try:
        outcome: tuple[Any, BaseException | None] = body(rank, *args), None
    except BaseException as error:
        traceback.print_exc()
        outcome = None, error
    write_whole(folder / f"result-{index}", _pickled(outcome))
    sys.exit(0 if outcome[1] is None else 1)


class _ProcessRank(Rank):
    def log(self, text: str) -> None:
        super().log(text)
        print(self.lines[-1], flush=True)


def _pickled(outcome: tuple[Any, BaseException | None]) -> bytes:
    """What cannot be pickled, or unpickled, becomes a RuntimeError that says so."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
        return data
    except Exception as problem:
        what = outcome[1] if outcome[1] is not None else outcome[0]
        return pickle.dumps((None, RuntimeError(f"{what!r} does not survive pickling: {problem}")))
