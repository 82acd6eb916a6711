#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows that soak_peer can fail: builds the library with a broken meeting and expects to be told.

    python3 tests/cuda/soak_mutants.py BUILD [--build-only | --run-only] [SOAK_ARGUMENT...]

The last mutant needs two GPUs. SOAK_ARGUMENT overrides what a mutant is soaked with.
BUILD holds a finished build of nvte_ep and soak_peer with Ninja. What reads the file of a mutant is compiled
again, and all is linked into BUILD/mutants/NAME.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "src/libnvte_ep.so"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below src
    edits: tuple[tuple[str, str], ...]
    soak: tuple[str, ...] = ("--iterations", "500")  # arguments of soak_peer that find it


WAIT = "while (is_missing(meeting_of(flag = load_acquire(arrival)), epoch))"
NUMBER = "if (static_cast<uint32_t>(both >> 32) == epoch)"
MUTANTS = (
    Mutant(
        "nobody_waits", "transports/peer/meeting.cuh", ((WAIT, WAIT.replace("epoch", "epoch - (1u << 30)")),)
    ),
    Mutant(
        "waits_for_the_meeting_before",
        "transports/peer/meeting.cuh",
        ((WAIT, WAIT.replace("epoch", "epoch - 1")),),
    ),
    Mutant(
        "takes_choices_of_any_meeting",
        "transports/peer/prepare_few.cu",
        ((NUMBER, NUMBER.replace("== epoch", "!= 0")),),
    ),
    # Found on two GPUs alone: a rank must be held up in the middle of a call, while its peer goes on.
    Mutant(
        "one_copy",
        "transports/peer/pools.h",
        (("return now & 1u;", "return 0u * now;"),),
        ("--gpus", "2", "--iterations", "2000", "--hog", "60"),
    ),
)


def ninja(build: Path, tool: str, *targets: str) -> list[str]:
    run = subprocess.run(
        ["ninja", "-t", tool, *targets], cwd=build, capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()


def objects_that_read(build: Path, file: Path) -> list[str]:
    """Objects of the library whose compilation reads the file."""
    found, current = [], ""
    for line in ninja(build, "deps"):
        if not line.startswith(" "):
            current = line.split(":")[0]
        elif line.strip() and (build / line.strip()).resolve() == file and "nvte_ep_objects" in current:
            found.append(current)
    if not found:
        raise SystemExit(f"nothing in {build} was compiled from {file}")
    return found


def build_mutant(build: Path, mutant: Mutant) -> Path:
    source = ROOT / "src" / mutant.file
    text = source.read_text()
    for old, new in mutant.edits:
        if text.count(old) != 1:
            raise SystemExit(f"{mutant.name}: {mutant.file} has {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    folder = build / "mutants" / mutant.name
    changed = folder / mutant.file  # found before the original: every include names the path below src
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text(text)
    link = next(line for line in ninja(build, "commands", LIBRARY) if " -shared " in line)
    for number, inside in enumerate(objects_that_read(build, source)):
        command = next(line for line in ninja(build, "commands", inside) if f"-o {inside}" in line)
        mine = folder / f"{number}.o"
        for old, new in (
            ("-Werror all-warnings", ""),
            ("-Werror", ""),
            (" -I", f" -I{folder} -I"),
            (f"-o {inside}", f"-o {mine}"),
            (f"{inside}.d", f"{mine}.d"),
            (f" {source}", f" {changed}"),
        ):
            command = command.replace(old, new, 1 if old == " -I" else -1)
        subprocess.run(command, shell=True, cwd=build, check=True)
        link = link.replace(inside, str(mine))
    output = next(word for word in link.split() if word.startswith(LIBRARY))
    library = folder / "libnvte_ep.so.1"
    subprocess.run(link.replace(f"-o {output}", f"-o {library}"), shell=True, cwd=build, check=True)
    return library


def soak(build: Path, library: Path, arguments: list[str]) -> tuple[int, str]:
    run = subprocess.run(
        [str(build / "tests/cuda/soak_peer"), *arguments],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return run.returncode, (run.stdout + run.stderr).strip()


def main() -> int:
    build = Path(sys.argv[1]).resolve()
    arguments = sys.argv[2:]
    steps = [step for step in ("--build-only", "--run-only") if step in arguments]
    arguments = [a for a in arguments if a not in steps]
    survivors = []
    for mutant in MUTANTS:
        library = build / "mutants" / mutant.name / "libnvte_ep.so.1"
        if "--run-only" not in steps:
            library = build_mutant(build, mutant)
        if "--build-only" in steps:
            continue
        code, output = soak(build, library, ["--ranks", "2", *mutant.soak, *arguments])
        found = code == 1  # wrong rows, or a report of what nobody did
        verdict = "found" if found else "NOT FOUND"
        print(f"{mutant.name}: {verdict} (exit {code})\n  {output[-400:]}", flush=True)
        if not found:
            survivors.append(mutant.name)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
