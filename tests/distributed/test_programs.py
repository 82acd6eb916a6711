# SPDX-License-Identifier: Apache-2.0
"""C++ programs with a process for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from distributed.here import on_transports_that
from distributed.launcher import run_processes
from distributed.programs import run_program
from distributed.transports import Transport

BUILD = Path(os.environ.get("NVTE_EP_BUILD_DIR", "build"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@on_transports_that("in_processes")
def test_conformance(transport: Transport, ranks: int, missing: Callable[[str, str], NoReturn]) -> None:
    program = BUILD / "tests" / "cuda" / "conformance_ranks"
    if not program.exists():
        missing(
            "conformance_ranks", f"NVTE_EP_BUILD_DIR has no {program}: it is built with NVTE_EP_BUILD_TESTS"
        )
    run_processes(
        ranks, run_program, [str(program), transport.name], environment=transport.environment, timeout=180
    )


WRITES_AND_READS = """
import os, pathlib, sys, time
file = pathlib.Path(os.environ["NVTE_EP_ID_FILE"])
if os.environ["RANK"] == "0":
    assert not file.exists()
    file.write_text("id of " + os.environ["WORLD_SIZE"])
while not file.exists():
    time.sleep(0.01)
"""


def test_every_rank_has_its_variables() -> None:
    run_processes(3, run_program, [sys.executable, "-c", WRITES_AND_READS])


def test_the_launcher_is_a_command() -> None:
    begin = [sys.executable, "-m", "distributed.programs", "--ranks", "2", sys.executable, "-c"]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    for code, expected in ((WRITES_AND_READS, 0), ("raise SystemExit(3)", 1)):
        ended = subprocess.run([*begin, code], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
        assert ended.returncode == expected, ended.stderr.decode()


def test_a_program_that_fails_ends_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys, time; print('rank', os.environ['RANK'], 'speaks', flush=True); "
    code += "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    start = time.monotonic()
    with pytest.raises(Exception, match="exit status 7"):
        run_processes(2, run_program, [sys.executable, "-c", code])
    assert time.monotonic() - start < 20
    assert "rank 1 speaks" in capsys.readouterr().err
