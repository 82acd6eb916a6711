# SPDX-License-Identifier: Apache-2.0
"""A program for each rank, started and watched like any other job: GoogleTest programs over processes."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from distributed.launcher import Rank


def run_program(rank: Rank, command: Sequence[str]) -> None:
    """With RANK, WORLD_SIZE and NVTE_EP_ID_FILE: a file that rank 0 makes, and that is not there yet. What
    the program prints is the log of the rank."""
    folder = rank.broadcast(lambda: tempfile.mkdtemp(prefix="program-"))
    variables = {
        "RANK": str(rank.index),
        "WORLD_SIZE": str(rank.size),
        "NVTE_EP_ID_FILE": str(Path(folder, "id")),
    }
    subprocess.run(command, env={**os.environ, **variables}, check=True)
    rank.barrier()
    if rank.index == 0:
        for path in Path(folder).iterdir():
            path.unlink()
        Path(folder).rmdir()
