#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks meetings.pml with Spin: the protocol holds, and each mutant of it is refused.

    python3 tests/model/check_meetings.py

Needs spin and a C compiler (Debian: spin, gcc).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = Path(__file__).with_name("meetings.pml")
HOLD = ("", "RANKS=2 EXCHANGES=6", "DEATH", "OTHER_CALL")
REFUSED = (
    "COPIES=1",
    "WAIT_ONE_BEFORE",
    "ARRIVE_BEFORE_WRITING",
    "ARRIVE_BEFORE_READING",
    "NO_RELEASE",
    "DEATH NAME_ANY",
    "COMPARE_LATER",
)


def check(defines: str) -> tuple[bool, int, str]:
    """Whether the model holds, how many states there are, and what Spin said."""
    flags = [f"-D{name}" for name in defines.split()]
    with tempfile.TemporaryDirectory(prefix="spin-") as folder:
        subprocess.run(
            ["spin", *flags, "-a", str(MODEL)], cwd=folder, check=True, capture_output=True, text=True
        )
        compiler = os.environ.get("CC", "cc")
        compile_ = [compiler, "-O1", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=2000", "-o", "pan", "pan.c"]
        subprocess.run(compile_, cwd=folder, check=True, capture_output=True, text=True)
        run = subprocess.run(["./pan", "-m100000"], cwd=folder, capture_output=True, text=True, check=False)
    errors = re.search(r"errors: (\d+)", run.stdout)
    states = re.search(r"(\d+) states, stored", run.stdout)
    if errors is None or states is None or ("Search not completed" in run.stdout and errors[1] == "0"):
        raise SystemExit(f"spin, {defines or 'the protocol'}:\n{run.stdout}{run.stderr}")
    return errors[1] == "0", int(states[1]), run.stdout


def main() -> int:
    wrong = 0
    cases = [(defines, True) for defines in HOLD] + [(defines, False) for defines in REFUSED]
    for defines, expected in cases:
        holds, states, said = check(defines)
        verdict = ("holds" if holds else "refused") + ("" if holds == expected else ", which is WRONG")
        print(f"{defines or 'the protocol'}: {verdict}, {states} states", flush=True)
        if holds != expected:
            wrong += 1
            print(said)
    print(f"{len(cases) - wrong} passed, {wrong} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
