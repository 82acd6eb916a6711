# SPDX-License-Identifier: Apache-2.0
"""Runs one function as the ranks of a job: on threads of this process, or in a process for each rank.

    results = run_threads(4, body, case)      # body(rank, case) on four threads; results in rank order
    results = run_processes(4, body, case)    # the same, with pickled arguments and results
    pool.run(4, body, case)                   # on processes that live on: ProcessPool

All end all ranks when one fails, raise the exception of the rank that failed first, show its log on stderr,
and give up with RanksHung, which shows where every rank stands, after `timeout` seconds.
This file knows nothing of the library under test.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, cast

DEFAULT_TIMEOUT = 60.0
_POLL = 0.001
# How long the others may take to end after a failure, and how long a cause may come in after its consequence.
_GRACE = 2.0
_CAUSE_WAIT = 0.5

Environment = Callable[[int], Mapping[str, str]]


class RanksHung(TimeoutError):
    """Some ranks did not end in time; the text shows where they stand."""


class RankDied(RuntimeError):
    """The process of a rank ended without a result."""


class RankFailed(RuntimeError):
    """The outcome of a rank cannot travel between processes as it is; the text tells it."""


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

    def __init__(
        self,
        index: int,
        size: int,
        store: Store,
        timeout: float = DEFAULT_TIMEOUT,
        session: dict[str, Any] | None = None,
    ) -> None:
        self.index = index
        self.size = size
        # What a process keeps from job to job; a thread keeps nothing.
        self.session: dict[str, Any] = {} if session is None else session
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

_CHILD = "import sys; from {module} import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"


def run_processes(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT,
    environment: Environment | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """`environment` gives the variables of a rank, its GPU for example. body, args and results are pickled,
    so body is a function of a module. may_die: ranks whose death is part of the test, with result None."""
    with ProcessPool(environment) as pool:
        return pool.run(size, body, *args, timeout=timeout, may_die=may_die)


class ProcessPool:
    """Processes of ranks that live on from job to job, so that what takes seconds to start (Python, a CUDA
    context, NCCL) is paid once. After a failure all of them are killed; the next job gets new ones.

    start_timeout: what a job may take longer when it is the first of some of its processes."""

    def __init__(self, environment: Environment | None = None, start_timeout: float = 0.0) -> None:
        self._environment = environment
        self._start_timeout = start_timeout
        self._children: list[_Child] = []
        self._jobs = 0

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        size: int,
        body: Callable[..., Any],
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            if len(self._children) < size:
                timeout += self._start_timeout
            while len(self._children) < size:
                rank = len(self._children)
                self._children.append(_Child(rank, self._environment(rank) if self._environment else {}))
            children = self._children[:size]
            whole = False
            try:
                job = _pickled_job(size, folder, body, args, timeout)
                for child in children:
                    child.begin(job)
                results, failures, hung = _watch(children, timeout, may_die)
                if hung:
                    _ask_for_stacks(children, hung)
                    stands = "\n".join(f"rank {rank}:\n{children[rank].log()}" for rank in hung)
                    raise RanksHung(f"ranks {hung} of {size} did not end within {timeout:g} s\n{stands}")
                if failures:
                    first = _first(failures)
                    _show_log(first.rank, size, children[first.rank].log())
                    raise first.error
                whole = not may_die
            finally:
                if not whole:
                    self.close()
            return [results[rank] for rank in range(size)]

    def close(self) -> None:
        for child in self._children:
            child.kill()
        self._children = []


class _Child:
    """The process of a rank, as the launcher sees it."""

    def __init__(self, rank: int, variables: Mapping[str, str]) -> None:
        self.rank = rank
        self._folder = tempfile.TemporaryDirectory(prefix=f"rank-{rank}-")
        self._log = Path(self._folder.name) / "log"
        self._log_start = 0
        self.connection, theirs = Pipe()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with self._log.open("wb") as log:
            code = _CHILD.format(module=__name__)
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code, str(rank), str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": path, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that what a rank has started ends with it
            )
        theirs.close()

    def begin(self, job: bytes) -> None:
        self._log_start = self._log.stat().st_size
        # One that died since the last job is found by its outcome.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(job)

    def outcome(self) -> tuple[Any, BaseException | None]:
        """Once its connection has something: a result, or the end."""
        try:
            value, error = pickle.loads(self.connection.recv_bytes())
            return value, error
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return None, RankDied(f"rank {self.rank} ended with {how} and left no result")

    def log(self) -> str:
        """Of the job that it was given last."""
        return self._log.read_bytes()[self._log_start :].decode(errors="replace")

    def ask_for_stack(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        self._folder.cleanup()


def _watch(
    children: list[_Child], timeout: float, may_die: Collection[int]
) -> tuple[dict[int, Any], list[_Failure], list[int]]:
    """Waits until all have ended, one has failed or the time is up: results, failures, ranks that hang."""
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    running = {child.connection: child for child in children}
    end = time.monotonic() + timeout
    while running:
        limit = min(end, failures[0].when + _CAUSE_WAIT) if failures else end
        for connection in wait(list(running), max(0.0, limit - time.monotonic())):
            child = running.pop(cast(Connection, connection))
            value, error = child.outcome()
            if isinstance(error, RankDied) and child.rank in may_die:
                error = None
            if error is None:
                results[child.rank] = value
            else:
                failures.append(_Failure(time.monotonic(), child.rank, error))
        if failures and (not _first(failures).is_consequence or time.monotonic() >= limit):
            break
        if time.monotonic() >= end:
            break
    hung = [] if failures else sorted(child.rank for child in running.values())
    return results, failures, hung


def _ask_for_stacks(children: list[_Child], ranks: list[int]) -> None:
    for rank in ranks:
        children[rank].ask_for_stack()
    time.sleep(0.3)


def die_with_parent() -> None:
    """For a process that must not outlive who started it, however that one ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


def serve(index: int, descriptor: int) -> None:
    """The main program of a rank that is a process: jobs until the launcher goes."""
    die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Connection(descriptor)
    session: dict[str, Any] = {}
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            # Not through the interpreter's exit: peers may be gone, and libraries wait for them there.
            os._exit(0)
        connection.send_bytes(_pickled(_work(index, job, session)))


def _work(index: int, job: bytes, session: dict[str, Any]) -> tuple[Any, BaseException | None]:
    try:
        size, folder, timeout, call = pickle.loads(job)
        # Should the launcher die, nobody kills this process but itself.
        faulthandler.dump_traceback_later(timeout + _GRACE, exit=True)
        body, args = pickle.loads(call)
        rank = _ProcessRank(index, size, FileStore(Path(folder)), timeout, session)
        return body(rank, *args), None
    except BaseException as error:
        traceback.print_exc()
        return None, error
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()


def _pickled_job(
    size: int, folder: str, body: Callable[..., Any], args: tuple[Any, ...], timeout: float
) -> bytes:
    return pickle.dumps((size, folder, timeout, pickle.dumps((body, args))))


class _ProcessRank(Rank):
    def log(self, text: str) -> None:
        super().log(text)
        print(self.lines[-1], flush=True)


def _pickled(outcome: tuple[Any, BaseException | None]) -> bytes:
    """What cannot be pickled, or unpickled, becomes a RankFailed: that of an error (pytest's own cannot be)
    with its text, that of a result says why."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
        return data
    except Exception as problem:
        value, error = outcome
        text = f"{value!r} does not survive pickling: {problem}"
        if error is not None:
            text = f"{type(error).__name__}: {error}"
        return pickle.dumps((None, RankFailed(text)))
