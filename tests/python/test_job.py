# SPDX-License-Identifier: Apache-2.0
"""Job: rank and size from every launcher's environment, and exchanges between processes through files."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nvte_ep
import pytest
from nvte_ep import Job, job

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
}
ENVIRONMENTS = {"torchrun": TORCHRUN, "Open MPI": OPEN_MPI, "MPICH": MPICH, "Slurm": SLURM}


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.tempfile, "gettempdir", lambda: str(tmp_path))


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What the calls give, each on a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_places(launcher: str) -> None:
    found = Job.from_environment(ENVIRONMENTS[launcher])
    rank = list(ENVIRONMENTS).index(launcher)
    rank = {"torchrun": 1, "Open MPI": 2, "MPICH": 3, "Slurm": 0}[launcher]
    assert (found.rank, found.size, found.local_rank, found.local_size) == (rank, 4, rank, 4)
    assert found.launcher == launcher


def test_alone(tmp_path: Path) -> None:
    """No files."""
    with Job.from_environment({}) as alone:
        assert (alone.rank, alone.size, alone.local_rank) == (0, 1, 0)
        assert alone.gather(b"x") == [b"x"]
        assert alone.broadcast(lambda: b"y") == b"y"
        alone.barrier()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(nvte_ep.InvalidArgumentError, match="folder"):
        Job(0, 2, None)


def test_mpirun_inside_a_slurm_job_is_an_mpirun() -> None:
    assert Job.from_environment({**SLURM, **OPEN_MPI}).launcher == "Open MPI"


def test_a_batch_script_is_no_step() -> None:
    """Slurm sets SLURM_PROCID and SLURM_NTASKS there too, for one process."""
    assert Job.from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).size == 1


@pytest.mark.parametrize(("text", "local"), [("4", 4), ("4(x1)", 4), ("3,1", None), ("", None)])
def test_ranks_of_a_machine(text: str, local: int | None) -> None:
    assert job._number({"N": text}, "N") == local


def folder_of(environment: dict[str, str]) -> Path:
    return Job.from_environment(environment)._folder


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_the_ranks_of_a_job_meet_and_those_of_another_do_not(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = ENVIRONMENTS[launcher]
    mine = next(entry for entry in job.LAUNCHERS if entry.name == launcher)
    other_rank = {**variables, mine.rank: "1" if variables[mine.rank] != "1" else "2"}
    assert folder_of(other_rank) == folder_of(variables)
    if mine.job_is_unique:
        assert folder_of({**variables, mine.job[0]: "another"}) != folder_of(variables)
    else:  # the same settings, started later
        before = folder_of(variables)
        monkeypatch.setattr(job, "_parent", lambda: "another")
        assert folder_of(variables) != before


def test_a_job_that_slurm_started_again_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = folder_of(SLURM), folder_of({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert first != again
    monkeypatch.setattr(job, "_parent", lambda: "another")
    assert [folder_of(SLURM), folder_of({**SLURM, "SLURM_RESTART_COUNT": "1"})] == [first, again]


def test_several_machines_need_a_folder(tmp_path: Path) -> None:
    variables = {**TORCHRUN, "WORLD_SIZE": "8"}
    with pytest.raises(nvte_ep.UnsupportedError, match="NVTE_EP_RENDEZVOUS"):
        Job.from_environment(variables)
    assert folder_of({**variables, "NVTE_EP_RENDEZVOUS": str(tmp_path)}) == tmp_path


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    base = tmp_path / f"nvte_ep.{os.getuid()}"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(nvte_ep.UnsupportedError, match="alone"):
        Job.from_environment(TORCHRUN)
    base.chmod(0o700)
    folder = folder_of(TORCHRUN)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    lonely = Job(0, 2, tmp_path, timeout=0.2)
    started = time.monotonic()
    with pytest.raises(
        nvte_ep.PeerTimeoutError, match=r"rank 1 of 2 did not come to exchange 1 within 0\.2 s"
    ):
        lonely.gather(b"")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (nvte_ep.UnsupportedError(nvte_ep.Status.UNSUPPORTED, "NCCL: none here"), nvte_ep.UnsupportedError),
        (OSError("none here"), nvte_ep.PeerFailedError),
    ],
    ids=["the library's", "another"],
)
def test_the_others_do_not_wait_for_what_a_rank_cannot_make(
    error: Exception, kind: type[Exception], tmp_path: Path
) -> None:
    def fail() -> bytes:
        raise error

    def broadcast(rank: int) -> Exception:
        with Job(rank, 2, tmp_path, timeout=20) as job, pytest.raises(Exception, match="none here") as caught:
            job.broadcast(fail)
        return caught.value

    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        own, told = pool.map(broadcast, range(2))
    assert time.monotonic() - start < 10
    assert own is error
    assert type(told) is kind
    assert str(told).startswith("Job: rank 0: ")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_is_not_there(rank: int, tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", Path(__file__)):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"folder \(NVTE_EP_RENDEZVOUS\): expected"):
            Job(rank, 2, folder).barrier()


def test_a_folder_that_was_named_is_no_hint(tmp_path: Path) -> None:
    with pytest.raises(nvte_ep.PeerTimeoutError) as caught:
        Job(0, 2, tmp_path, timeout=0.1).barrier()
    assert "NVTE_EP_RENDEZVOUS" not in str(caught.value)


def test_half_a_value_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a value is not there before all of it is."""
    writer, reader = Job(0, 2, tmp_path), Job(1, 2, tmp_path)
    together([writer.barrier, reader.barrier])
    reader.timeout = 0.05
    real = os.replace
    seen = []

    def replace(source: Any, target: Any) -> None:
        with pytest.raises(nvte_ep.PeerTimeoutError):
            reader._get("2", 0)
        seen.append(Path(source).read_bytes())
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    writer.broadcast(lambda: b"all of it")
    assert seen == [b"+all of it"]
    assert reader.broadcast(lambda: b"") == b"all of it"
    (file,) = tmp_path.glob("*.2.0")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_comes_late_after_all(rank: int, tmp_path: Path) -> None:
    early, late = Job(rank, 2, tmp_path, timeout=0.1), Job(1 - rank, 2, tmp_path)
    with pytest.raises(nvte_ep.PeerTimeoutError):
        early.barrier()
    early.timeout = 30
    expected = [b"0", b"1"]
    assert (
        together([lambda: early.gather(b"%d" % early.rank), lambda: late.gather(b"%d" % late.rank)])
        == [expected] * 2
    )


@pytest.mark.parametrize("where", ["a folder of its own", "the caller's folder"])
@pytest.mark.parametrize("closed", [False, True])
def test_jobs_one_after_another(where: str, closed: bool, tmp_path: Path) -> None:
    """Rank 1 is in the next job while rank 0 is still in the one before, and leaves its files alone."""
    mine = {} if where == "a folder of its own" else {"NVTE_EP_RENDEZVOUS": str(tmp_path)}

    def jobs_of(rank: int) -> list[bytes]:
        found = []
        for number in range(3):
            ranks = Job.from_environment(
                {**TORCHRUN, **mine, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
                timeout=10,
            )
            found.append(ranks.broadcast(lambda number=number: str(number).encode()))
            if rank == 0:
                time.sleep(0.1)
            if closed:
                ranks.close()
        return found

    assert together([lambda: jobs_of(0), lambda: jobs_of(1)]) == [[b"0", b"1", b"2"]] * 2
    if where == "a folder of its own" and closed:
        assert list(tmp_path.glob("nvte_ep.*/*")) == []


def test_closed(tmp_path: Path) -> None:
    closed = Job(0, 1, tmp_path)
    closed.close()
    closed.close()
    assert tmp_path.is_dir()  # the caller's
    with pytest.raises(nvte_ep.BadStateError, match="closed"):
        closed.barrier()


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_impossible_ranks(rank: int, size: int, tmp_path: Path) -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match="rank"):
        Job(rank, size, tmp_path)


@pytest.mark.parametrize("digits", ["", "zz", "00" * 127, "00" * 129])
def test_unique_ids_that_are_none(digits: str) -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match="NVTE_EP_UNIQUE_ID"):
        job.parse_unique_id(digits)


def test_unique_id_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = bytes(range(128))
    made: list[Any] = []
    monkeypatch.setenv("NVTE_EP_UNIQUE_ID", given.hex())
    monkeypatch.setattr(job.Communicator, "nccl", lambda *arguments, **_: made.append(arguments))
    Job(1, 2, tmp_path).communicator(device_id=0)
    assert made == [(given, 1, 2)]
    assert list(tmp_path.iterdir()) == []


# ---- processes -------------------------------------------------------------------------------------------

EXCHANGES = """
import json, sys, time
from pathlib import Path
from nvte_ep import Job

with Job.from_environment(timeout=30) as job:
    time.sleep(0.05 * (job.rank * 7 % 3))
    found = {"rank": job.rank, "local": job.local_rank, "launcher": job.launcher}
    for number in range(30):
        found["gathered"] = [value.decode() for value in job.gather(f"{number}.{job.rank}".encode())]
        assert found["gathered"] == [f"{number}.{rank}" for rank in range(job.size)]
        root = number % job.size
        assert job.broadcast(lambda: f"from {job.rank}".encode(), root) == f"from {root}".encode()
    job.barrier()
Path(sys.argv[1], str(job.rank)).write_text(json.dumps(found))
"""


def run(size: int, code: str, folder: Path, environment: Callable[[int], dict[str, str]] | None) -> int:
    command = [sys.executable, "-c", code, str(folder)]
    path = str(Path(nvte_ep.__file__).resolve().parents[1])
    if environment is None:
        return job.launch(command, size, environment={"PYTHONPATH": path})
    import subprocess

    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder / "tmp"), **environment(rank)},
        )
        for rank in range(size)
    ]
    return max(process.wait(60) for process in processes)


@pytest.mark.parametrize("launcher", ["launch", *ENVIRONMENTS])
def test_processes(launcher: str, tmp_path: Path) -> None:
    size = 4
    (tmp_path / "tmp").mkdir()
    environment = None
    if launcher != "launch":
        mine = next(entry for entry in job.LAUNCHERS if entry.name == launcher)

        def environment(rank: int) -> dict[str, str]:
            return {**ENVIRONMENTS[launcher], mine.rank: str(rank), mine.local_rank: str(rank)}

    assert run(size, EXCHANGES, tmp_path, environment) == 0
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(size)]
    assert [one["rank"] for one in found] == [one["local"] for one in found] == [0, 1, 2, 3]
    assert {one["launcher"] for one in found} == {"nvte_ep.job.launch" if launcher == "launch" else launcher}
    assert list((tmp_path / "tmp").glob("nvte_ep.*/*")) == []  # taken away in the end


CRASH = """
import os, sys, time
from pathlib import Path
from nvte_ep import Job

job = Job.from_environment(timeout=30)
folder = Path(sys.argv[1])
if job.rank == 0 and (folder / "ran").exists():
    time.sleep(0.5)  # what the run before has left is all that the others find
value = job.broadcast(lambda: str(os.getpid()).encode()).decode()
values = job.gather(value.encode())
assert values == [value.encode()] * job.size, values
(folder / f"ran.{job.rank}").write_text(value)
os._exit(0)  # without closing
"""


def test_a_run_after_one_that_crashed(tmp_path: Path) -> None:
    """Its files are still there, and the folder is the same: the same parent, the same settings."""
    (tmp_path / "tmp").mkdir()
    ids = []
    for _ in range(2):
        assert (
            run(
                3,
                CRASH,
                tmp_path,
                lambda rank: {**MPICH, "PMI_RANK": str(rank), "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"},
            )
            == 0
        )
        ids.append({(tmp_path / f"ran.{rank}").read_text() for rank in range(3)})
        (tmp_path / "ran").touch()
    assert [len(one) for one in ids] == [1, 1]
    assert ids[0] != ids[1]
    (folder,) = (tmp_path / "tmp").glob("nvte_ep.*/*")
    assert list(folder.iterdir()) != []


def test_launch_ends_all_when_one_fails(tmp_path: Path) -> None:
    code = """
import os, sys, time
from nvte_ep import Job
rank = Job.from_environment().rank
if rank == 1:
    sys.exit(7)
time.sleep(60)
"""
    started = time.monotonic()
    assert run(3, code, tmp_path, None) == 7
    assert time.monotonic() - started < 30
