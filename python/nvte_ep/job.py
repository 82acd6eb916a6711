# SPDX-License-Identifier: Apache-2.0
"""Job: which rank this process is, and what ranks tell each other before they have a communicator.

Rank and size come from the environment that the launcher made: torchrun, mpirun (Open MPI, MPICH and their
kin), srun, or launch() below. Values go through files that appear whole, because they are renamed into place:
no port, no server.

A folder may hold files of other jobs: of the one before in the same processes, of a run that crashed. Files
are told apart by the number of the job in its process, and by a token that the ranks agree on before the
first exchange and that no earlier run can have known.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvte_ep import _abi
from nvte_ep.communicator import Communicator, unique_id
from nvte_ep.errors import (
    BadStateError,
    NvteEpError,
    PeerTimeoutError,
    Status,
    UnsupportedError,
    exception,
    invalid,
)

FOLDER_VARIABLE = "NVTE_EP_RENDEZVOUS"  # a fresh folder that every rank of the job sees
UNIQUE_ID_VARIABLE = "NVTE_EP_UNIQUE_ID"  # beside it: the id of its one communicator, in hexadecimal
DEFAULT_TIMEOUT = 100.0  # seconds
_LONGEST_POLL = 0.01


@dataclass(frozen=True)
class _Launcher:
    """The variables in which a launcher tells a process its place."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()  # what tells this job from others
    job_is_unique: bool = False  # also from one started later with the same settings
    restarts: str = ""  # how often the job was started again; it need not be set


# The first whose rank and size are set. An mpirun inside a Slurm job sets its own beside Slurm's.
LAUNCHERS = (
    _Launcher(
        "nvte_ep.job.launch", "NVTE_EP_RANK", "NVTE_EP_SIZE", "NVTE_EP_LOCAL_RANK", "NVTE_EP_LOCAL_SIZE"
    ),
    _Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    ),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
        job_is_unique=True,
    ),
    _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        job_is_unique=True,
        restarts="SLURM_RESTART_COUNT",  # a requeued job keeps its id
    ),
)


class Job:
    """The ranks of a job, each a process, as this one of them sees it.

    Every rank makes the same sequence of calls of gather, broadcast, barrier and communicator, and begins its
    jobs in the same order. The first call waits for all ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        folder: str | os.PathLike[str] | None,
        *,
        local_rank: int | None = None,
        local_size: int | None = None,
        launcher: str = "",
        timeout: float = DEFAULT_TIMEOUT,
        owns_folder: bool = False,
    ) -> None:
        """folder: one that every rank of the job sees and no other running job uses; a rank alone needs
        none."""
        if not 0 <= rank < size:
            raise invalid("Job", "rank", f"0 to {size - 1}", str(rank))
        if folder is None and size > 1:
            raise invalid("Job", "folder", f"one that {size} ranks share", "None")
        self.rank = rank
        self.size = size
        self.local_rank = rank if local_rank is None else local_rank
        self.local_size = local_size
        self.launcher = launcher
        self.timeout = timeout
        self._folder = Path("" if folder is None else folder)
        self._owns_folder = owns_folder
        self._number = 0  # of the jobs of this rank in the folder, from its first exchange on
        self._word = ""  # nobody else knows it before
        self._token = ""  # of this run of the job
        self._exchanges = 0
        self._closed = False

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, *, timeout: float = DEFAULT_TIMEOUT
    ) -> Job:
        """What the launcher says; a process that nobody launched is a job of one rank.

        The ranks meet in the folder NVTE_EP_RENDEZVOUS. Where that is not set and all ranks are on one
        machine they meet in one of their own in the temporary folder.
        """
        variables = os.environ if environment is None else environment
        for launcher in LAUNCHERS:
            rank = _number(variables, launcher.rank)
            size = _number(variables, launcher.size)
            if rank is not None and size is not None:
                break
        else:
            return cls(0, 1, None)
        local_size = _number(variables, launcher.local_size)
        named = variables.get(FOLDER_VARIABLE)
        if named is None and size > 1 and local_size != size:
            raise UnsupportedError(
                Status.UNSUPPORTED,
                f"Job: {launcher.name} started {size} ranks, {launcher.local_size} says "
                f"{variables.get(launcher.local_size)!r} of them here: where there are several machines, "
                f"set {FOLDER_VARIABLE} to a new folder that all of them share",
            )
        return cls(
            rank,
            size,
            _own_folder(launcher, variables) if named is None else named,
            local_rank=_number(variables, launcher.local_rank),
            local_size=local_size,
            launcher=launcher.name,
            timeout=timeout,
            owns_folder=named is None,
        )

    # ---- exchanges ---------------------------------------------------------------------------------------

    def gather(self, value: bytes) -> list[bytes]:
        """The value of every rank, by rank."""
        exchange = self._next()
        if self.size == 1:
            return [value]
        self._put(exchange, value)
        return [self._get(exchange, rank) for rank in range(self.size)]

    def broadcast(self, make: Callable[[], bytes], root: int = 0) -> bytes:
        """What `make` gives on one rank; where it raises there, the others raise the same, or PeerFailedError
        for what is no NvteEpError."""
        exchange = self._next()
        if self.rank != root:
            return _value_of(self._get(exchange, root), root)
        try:
            value = make()
        except Exception as error:  # the others need not wait for what does not come
            if self.size > 1:
                self._put(exchange, _FAILED + _told(error))
            raise
        if self.size > 1:
            self._put(exchange, _MADE + value)
        return value

    def barrier(self) -> None:
        """Returns when every rank has come."""
        self.gather(b"")

    def communicator(self, *, device_id: int | None = None, timeout_ns: int = 0) -> Communicator:
        """A communicator of kind nccl of all ranks. device_id None: the current CUDA device.

        NVTE_EP_UNIQUE_ID, where it is set, is its id: then nothing goes through files.
        """
        given = os.environ.get(UNIQUE_ID_VARIABLE)
        shared = self.broadcast(unique_id) if given is None else parse_unique_id(given)
        return Communicator.nccl(shared, self.rank, self.size, device_id=device_id, timeout_ns=timeout_ns)

    def close(self) -> None:
        """Takes the job's files out of a folder of the package's own, when every rank has read what is in
        them, and the folder, where no other job has files in it."""
        if self._closed:
            return
        self._closed = True
        if not self._owns_folder or self.size == 1:
            return
        if self._token:
            self._put("closed", b"")
        if self.rank != 0:
            return
        if self._token:
            for rank in range(self.size):
                self._get("closed", rank)
            for pattern in (f"{self._number}.*", f".{self._number}.*"):  # a crashed run's of this number too
                for path in self._folder.glob(pattern):
                    path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another job's files, or it is gone
            self._folder.rmdir()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    # ---- the first exchange ------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Agrees on the token.

        Every rank says hello with a word that nobody can know before; the others put the word of rank 0
        beside their own, so that rank 0 tells this run's hellos from those that an earlier run has left. Then
        it lists all words: a rank takes the list that has its own.
        """
        if not self._owns_folder and not self._folder.is_dir():
            raise invalid("Job", f"folder ({FOLDER_VARIABLE})", "one that is there", str(self._folder))
        if not self._number:
            self._number = _next_number(self._folder, self.rank)
            self._word = secrets.token_hex(
                16
            )  # kept where the ranks do not all come in time and it tries again
        end = time.monotonic() + self.timeout
        words = self._collect(end) if self.rank == 0 else self._answer(end)
        self._token = hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]

    def _collect(self, end: float) -> list[str]:
        self._write(self._name("hello", 0), self._word.encode())
        words = [self._word, *(self._word_of(rank, end) for rank in range(1, self.size))]
        self._write(self._name("start", 0), " ".join(words).encode())
        return words

    def _word_of(self, rank: int, end: float) -> str:
        for _ in _pauses(end):
            word, *answered = self._words("hello", rank) or [""]
            if answered == [self._word]:
                return word
        raise self._timeout(rank, "1")

    def _answer(self, end: float) -> list[str]:
        answered: list[str] = []
        for _ in _pauses(end):
            hello = self._words("hello", 0)
            if hello != answered:
                self._write(self._name("hello", self.rank), " ".join([self._word, *hello]).encode())
                answered = hello
            words = self._words("start", 0)
            if words[self.rank : self.rank + 1] == [self._word]:
                return words
        raise PeerTimeoutError(
            Status.TIMEOUT,
            f"Job: not all of {self.size} ranks came to exchange 1 within {self.timeout:g} s "
            f"({self._folder})",
        )

    def _words(self, what: str, rank: int) -> list[str]:
        return (self._read(self._name(what, rank)) or b"").decode().split()

    # ---- files -------------------------------------------------------------------------------------------

    def _next(self) -> str:
        if self._closed:
            raise BadStateError(Status.BAD_STATE, "Job: it is closed")
        if self.size > 1 and not self._token:
            self._meet()
        self._exchanges += 1
        return str(self._exchanges)

    def _name(self, what: str, rank: int) -> str:
        """Of a file that `rank` writes."""
        return ".".join(part for part in (str(self._number), self._token, what, str(rank)) if part)

    def _put(self, exchange: str, value: bytes) -> None:
        self._write(self._name(exchange, self.rank), value)

    def _get(self, exchange: str, rank: int) -> bytes:
        name = self._name(exchange, rank)
        for _ in _pauses(time.monotonic() + self.timeout):
            value = self._read(name)
            if value is not None:
                return value
        raise self._timeout(rank, exchange)

    def _timeout(self, rank: int, exchange: str) -> PeerTimeoutError:
        return PeerTimeoutError(
            Status.TIMEOUT,
            f"Job: rank {rank} of {self.size} did not come to exchange {exchange} within {self.timeout:g} s "
            f"({self._folder})" + self._hint(),
        )

    def _hint(self) -> str:
        if not self._owns_folder:
            return ""
        return (
            "; ranks that a launcher starts through a program between need "
            f"{FOLDER_VARIABLE}, a folder that all of them see"
        )

    def _write(self, name: str, value: bytes) -> None:
        """Nobody ever sees half of the file; nobody but the user sees any of it."""
        for _ in _pauses(time.monotonic() + self.timeout):
            try:
                descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=f".{name}.")
                break
            except FileNotFoundError:  # rank 0 closed the job before and found the folder empty
                if not self._owns_folder:
                    raise
                self._folder.mkdir(mode=0o700, exist_ok=True)
        else:
            raise self._timeout(self.rank, name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(value)
        os.replace(temporary, self._folder / name)

    def _read(self, name: str) -> bytes | None:
        """None: it is not there."""
        try:
            return (self._folder / name).read_bytes()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # ESTALE: replaced, on another machine
                raise
            return None

    def __repr__(self) -> str:
        return f"Job(rank={self.rank}, size={self.size}, launcher={self.launcher!r})"


_numbers: dict[tuple[str, int], int] = {}
_numbers_lock = threading.Lock()


# What a broadcast begins with.
_MADE, _FAILED = b"+", b"-"


def _told(error: Exception) -> bytes:
    if isinstance(error, NvteEpError):
        return f"{int(error.status)} {error.text}".encode()
    return f"{int(Status.PEER_FAILED)} {type(error).__name__}: {error}".encode()


def _value_of(sent: bytes, root: int) -> bytes:
    if sent.startswith(_MADE):
        return sent[1:]
    status, _, text = sent[1:].decode(errors="replace").partition(" ")
    raise exception(int(status), f"Job: rank {root}: {text}")


def _next_number(folder: Path, rank: int) -> int:
    """Jobs are numbered in every process alike. Ranks may be threads of one."""
    key = (os.path.realpath(folder), rank)
    with _numbers_lock:
        _numbers[key] = _numbers.get(key, 0) + 1
        return _numbers[key]


def _pauses(end: float) -> Iterator[None]:
    """Goes on at once, then after longer and longer pauses; once more when the end has come."""
    pause = 1e-4
    while True:
        last = time.monotonic() > end
        yield
        if last:
            return
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_POLL)


def parse_unique_id(digits: str) -> bytes:
    """The id that `unique_id().hex()` wrote."""
    size = _abi.CONSTANTS["NVTE_EP_UNIQUE_ID_BYTES"]
    try:
        value = bytes.fromhex(digits)
    except ValueError:
        value = b""
    if len(value) != size:
        raise invalid(
            "Job", UNIQUE_ID_VARIABLE, f"{2 * size} hexadecimal digits", f"{len(digits)} characters"
        )
    return value


def _number(variables: Mapping[str, str], name: str) -> int | None:
    """4, and Slurm's "4" or "4(x2)" for as many on each machine; None where it is not set or says more."""
    found = re.fullmatch(r"(\d+)(\(x\d+\))?", variables.get(name, ""))
    return int(found[1]) if found else None


def _own_folder(launcher: _Launcher, variables: Mapping[str, str]) -> Path:
    """A folder that the ranks of this job alone find, on this machine."""
    words = [launcher.name, *(variables.get(name, "") for name in launcher.job)]
    if not (launcher.job_is_unique and all(words)):
        words.append(_parent())  # one process starts the ranks of a job: torchrun's agent, mpirun's proxy
    words.append(variables.get(launcher.restarts, ""))
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:24]
    # The user's own: nobody else may plant an id there.
    base = Path(tempfile.gettempdir()) / f"nvte_ep.{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or base.is_symlink():
        raise UnsupportedError(
            Status.UNSUPPORTED, f"Job: {base} is not this user's alone: set {FOLDER_VARIABLE} to a new folder"
        )
    folder = base / digest
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _parent() -> str:
    """The parent process, told from a later one with the same number by when it started."""
    parent = os.getppid()
    try:
        fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return str(parent)
    return f"{parent}.{fields[19]}"


# ---- ranks without a launcher ----------------------------------------------------------------------------


def environment_of(rank: int, size: int, folder: str | os.PathLike[str]) -> dict[str, str]:
    """What tells a process of one's own starting, on this machine, that it is a rank."""
    return {
        "NVTE_EP_RANK": str(rank),
        "NVTE_EP_SIZE": str(size),
        "NVTE_EP_LOCAL_RANK": str(rank),
        "NVTE_EP_LOCAL_SIZE": str(size),
        FOLDER_VARIABLE: str(folder),
    }


def launch(command: Sequence[str], size: int, *, environment: Mapping[str, str] | None = None) -> int:
    """Runs a command as the ranks of a job on this machine. 0, or the exit code of the first that failed;
    then the others are ended."""
    with tempfile.TemporaryDirectory(prefix="nvte_ep.") as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(size):
                variables = {**os.environ, **(environment or {}), **environment_of(rank, size, folder)}
                processes.append(subprocess.Popen(list(command), env=variables))
            return _wait(processes)
        finally:
            _end(processes)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(0.02)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + 5
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
