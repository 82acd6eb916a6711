# SPDX-License-Identifier: Apache-2.0
"""A program for each rank, started and watched like any other job: GoogleTest programs over processes.

PYTHONPATH=python:tests python3 -m distributed.programs --ranks 2 build/tests/cuda/conformance_ranks nccl
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from distributed.launcher import Rank, die_with_parent, run_processes
from distributed.transports import environment


def run_program(rank: Rank, command: Sequence[str]) -> None:
    """With RANK, WORLD_SIZE and NVTE_EP_ID_FILE: a file that rank 0 makes, and that is not there yet. What
    the program prints is the log of the rank."""
    folder = rank.broadcast(lambda: tempfile.mkdtemp(prefix="program-"))
    variables = {
        "RANK": str(rank.index),
        "WORLD_SIZE": str(rank.size),
        "NVTE_EP_ID_FILE": str(Path(folder, "id")),
    }
    subprocess.run(command, env={**os.environ, **variables}, check=True, preexec_fn=die_with_parent)
    rank.barrier()
    if rank.index == 0:
        for path in Path(folder).iterdir():
            path.unlink()
        Path(folder).rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(prog="distributed.programs", description="One process for each rank.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("which program?")
    # Of this module as ranks import it, not of __main__.
    from distributed import programs

    try:
        run_processes(
            arguments.ranks,
            programs.run_program,
            arguments.command,
            environment=environment,
            timeout=arguments.timeout,
        )
    except Exception as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
