# SPDX-License-Identifier: Apache-2.0
"""The launchers, with functions that know nothing of the library."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed import plain_bodies as bodies
from distributed.launcher import (
    FileStore,
    MemoryStore,
    ProcessPool,
    Rank,
    RankDied,
    RankFailed,
    RanksHung,
    run_processes,
    run_threads,
    write_whole,
)

Launcher = Callable[..., list[Any]]


@pytest.fixture(params=[run_threads, run_processes], ids=["threads", "processes"])
def launch(request: pytest.FixtureRequest) -> Launcher:
    launcher: Launcher = request.param
    return launcher


@pytest.mark.parametrize("size", [1, 3])
def test_results_come_in_rank_order(launch: Launcher, size: int) -> None:
    everybody = [10 * rank for rank in range(size)]
    assert launch(size, bodies.describe, 10) == [(rank, size, everybody) for rank in range(size)]


def test_rank_0_tells_everybody(launch: Launcher) -> None:
    told = launch(3, bodies.agree)
    assert told[0] == told[1] == told[2]
    assert told[0][:16] != told[0][16:], "two broadcasts are two values"


def test_the_failing_rank_is_raised_and_its_log_shown(
    launch: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 has had enough"):
        launch(3, bodies.fail_at, 1)
    assert time.monotonic() - start < 20, "the others were to end at once"
    shown = capsys.readouterr().err
    assert "log of rank 1 of 3" in shown and "this is rank 1" in shown and "fail_at" in shown
    assert "this is rank 0" not in shown


def test_the_cause_is_raised_and_not_its_consequence(launch: Launcher) -> None:
    with pytest.raises(ArithmeticError, match="the cause"):
        launch(2, bodies.fail_after_consequence)


def test_a_rank_that_hangs_is_named_with_its_stack(launch: Launcher) -> None:
    start = time.monotonic()
    with pytest.raises(RanksHung) as caught:
        launch(3, bodies.hang_at, 2, timeout=1.5)
    assert time.monotonic() - start < 20
    text = str(caught.value)
    assert "ranks [2] of 3" in text and "wait_for_godot" in text


def test_processes_are_killed_when_one_fails() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="early"):
        run_processes(2, bodies.sleep_unless_first)
    assert time.monotonic() - start < 20


def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="left a child"):
        run_processes(1, bodies.start_child_and_fail, str(tmp_path))
    last = (tmp_path / "beat-0").read_text()
    time.sleep(0.2)
    assert (tmp_path / "beat-0").read_text() == last


def test_a_process_that_dies_is_reported_with_its_signal_and_log(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankDied, match="rank 1 ended with signal SIGKILL"):
        run_processes(2, bodies.die_at, 1)
    assert "about to go" in capsys.readouterr().err


def test_processes_live_on_from_job_to_job() -> None:
    with ProcessPool() as pool:
        first = pool.run(2, bodies.count_jobs)
        assert [jobs for _, jobs in first] == [1, 1]
        assert pool.run(1, bodies.count_jobs) == [(first[0][0], 2)], "a part of them"
        three = pool.run(3, bodies.count_jobs)
        assert [jobs for _, jobs in three] == [3, 2, 1], "and more"
        assert pool.run(3, bodies.describe, 10) == [(rank, 3, [0, 10, 20]) for rank in range(3)]
    for process, _ in three:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_the_first_job_of_a_process_may_take_longer() -> None:
    with ProcessPool(start_timeout=30.0) as pool:
        assert pool.run(1, bodies.sleep, 0.5, timeout=0.1) == [0.5]
        with pytest.raises(RanksHung):
            pool.run(1, bodies.sleep, 5, timeout=0.1)


def test_a_failure_ends_the_processes_and_the_next_job_has_new_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ProcessPool() as pool:
        pool.run(2, bodies.agree)
        old = [process for process, _ in pool.run(2, bodies.count_jobs)]
        with pytest.raises(ValueError, match="rank 1 has had enough"):
            pool.run(2, bodies.fail_at, 1)
        log = capsys.readouterr().err
        assert "this is rank 1" in log and "job number" not in log, "the log is of the last job"
        assert not set(old) & {process for process, _ in pool.run(2, bodies.count_jobs)}
        with pytest.raises(RanksHung):
            pool.run(2, bodies.hang_at, 0, timeout=0.5)
        assert [jobs for _, jobs in pool.run(2, bodies.count_jobs)] == [1, 1]


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    beats = [tmp_path / f"beat-{rank}" for rank in range(2)]
    code = "import sys; from distributed import launcher, plain_bodies as bodies; "
    code += "launcher.run_processes(2, bodies.beat, sys.argv[1])"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}
    )
    end = time.monotonic() + 20
    while not all(beat.exists() for beat in beats):
        assert time.monotonic() < end
        time.sleep(0.01)
    launcher.kill()
    launcher.wait()
    time.sleep(0.3)
    last = [beat.read_text() for beat in beats]
    time.sleep(0.2)
    assert [beat.read_text() for beat in beats] == last


def test_a_rank_may_be_expected_to_die() -> None:
    assert run_processes(3, bodies.die_alone, 1, may_die=[1]) == [0, None, 2]
    with pytest.raises(RankDied, match="rank 1"):
        run_processes(3, bodies.die_alone, 1, may_die=[2])


def test_each_process_has_its_environment() -> None:
    devices = run_processes(
        2, bodies.environment_of, "DEVICE_OF_RANK", environment=lambda rank: {"DEVICE_OF_RANK": str(7 - rank)}
    )
    assert devices == ["7", "6"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (bodies.raise_unpicklable, "^Unpicklable: has a lock$"),
        (bodies.fail_a_check_of_pytest, "^Failed: DID NOT RAISE"),
        (bodies.return_unpicklable, "does not survive pickling"),
    ],
)
def test_what_cannot_be_pickled_is_still_reported(body: Callable[..., Any], text: str) -> None:
    with pytest.raises(RankFailed, match=text):
        run_processes(1, body)


def test_threads_that_wait_elsewhere_are_woken_by_their_hook() -> None:
    """As a rank that waits inside the library is, by an abort of its group."""
    woken = threading.Event()

    def body(rank: Rank) -> None:
        if rank.index == 0:
            rank.gather(None)  # the other has set up its hook
            raise ValueError("rank 0 fails")
        rank.on_failure(woken.set)
        rank.gather(None)
        assert woken.wait(30)

    with pytest.raises(ValueError, match="rank 0 fails"):
        run_threads(2, body)
    assert woken.is_set()


def test_stores_time_out(tmp_path: Path) -> None:
    for store in (MemoryStore(), FileStore(tmp_path)):
        with pytest.raises(TimeoutError, match="never"):
            store.get("never", 0.05)
        store.put("now", b"value")
        assert store.get("now", 0.05) == b"value"


def test_a_file_is_never_seen_half_written(tmp_path: Path) -> None:
    path = tmp_path / "value"
    values = [bytes([i]) * 200_000 for i in range(64)]
    write_whole(path, values[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for value in values:
                write_whole(path, value)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [path.read_bytes() for _ in range(200)]
    finally:
        stop.set()
        writer.join()
    assert all(len(value) == 200_000 and len(set(value)) == 1 for value in seen)
    assert [entry.name for entry in tmp_path.iterdir()] == ["value"], "no temporary file stays"
