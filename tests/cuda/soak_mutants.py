#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows that soak_peer can fail: builds the library with a broken meeting and expects wrong rows of it.

    python3 tests/cuda/soak_mutants.py BUILD [--build-only | --run-only] [SOAK_ARGUMENT...]

BUILD holds a finished build of nvte_ep and soak_peer with Ninja. What a mutant changes is compiled again, and
all is linked into BUILD/mutants/NAME.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "src/libnvte_ep.so"


PEER = "src/transports/peer"


@dataclass(frozen=True)
class Edit:
    source: str  # of PEER
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    name: str
    edits: tuple[Edit, ...]


ARRIVAL = "(load_acquire(arrival) - epoch) < 0; ++spin"
MUTANTS = (
    Mutant("nobody_waits", (Edit("meeting.cuh", ARRIVAL, ARRIVAL.replace("< 0", "< -(1 << 30)")),)),
    Mutant("waits_for_the_meeting_before", (Edit("meeting.cuh", ARRIVAL, ARRIVAL.replace("< 0", "< -1")),)),
    Mutant(
        "overwrites_what_peers_read",
        (
            Edit("pools.h", "return now & 1u;", "return now & 0u;"),
            Edit("peer_handle.cc", "packed.flip_bytes = rows->outbox.bytes;", "packed.flip_bytes = 0;"),
        ),
    ),
)


def commands(build: Path, target: str) -> list[str]:
    run = subprocess.run(
        ["ninja", "-t", "commands", target], cwd=build, capture_output=True, text=True, check=True
    )
    return [
        line.replace("-Werror all-warnings", "").replace("-Werror", "") for line in run.stdout.splitlines()
    ]


def build_mutant(build: Path, mutant: Mutant) -> Path:
    """Headers that the mutant changes lie before the true ones, and all kernels are compiled with them."""
    folder = build / "mutants" / mutant.name
    changed = folder / "include" / PEER.removeprefix("src/")
    changed.mkdir(parents=True, exist_ok=True)
    for edit in mutant.edits:
        text = (ROOT / PEER / edit.source).read_text()
        if text.count(edit.old) != 1:
            raise SystemExit(f"{mutant.name}: {edit.source} has {text.count(edit.old)} times {edit.old!r}")
        (changed / edit.source).write_text(text.replace(edit.old, edit.new))
    compiled = {path.name for path in (ROOT / PEER).glob("*.cu")}
    compiled |= {edit.source for edit in mutant.edits if edit.source.endswith(".cc")}
    link = next(line for line in commands(build, LIBRARY) if " -shared " in line)

    def compile_source(name: str) -> tuple[str, Path]:
        inside = f"src/CMakeFiles/nvte_ep_objects.dir/{PEER.removeprefix('src/')}/{name}.o"
        mine = folder / f"{name}.o"
        line = next(line for line in commands(build, inside) if f"-o {inside}" in line)
        line = line.replace(f"-o {inside}", f"-o {mine}").replace(f"{inside}.d", f"{mine}.d")
        line = line.replace(f"-I{ROOT}/src ", f"-I{folder}/include -I{ROOT}/src ", 1)
        if (changed / name).exists():
            line = line.replace(str(ROOT / PEER / name), str(changed / name))
        subprocess.run(line, shell=True, cwd=build, check=True)
        return inside, mine

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for inside, mine in pool.map(compile_source, sorted(compiled)):
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
    arguments = [a for a in arguments if a not in steps] or ["--ranks", "2", "--iterations", "500"]
    survivors = []
    for mutant in MUTANTS:
        library = build / "mutants" / mutant.name / "libnvte_ep.so.1"
        if "--run-only" not in steps:
            library = build_mutant(build, mutant)
        if "--build-only" in steps:
            continue
        code, output = soak(build, library, arguments)
        found = code == 1 and "wrong" in output
        print(
            f"{mutant.name}: {'found' if found else 'NOT FOUND'} (exit {code})\n  {output[-400:]}", flush=True
        )
        if not found:
            survivors.append(mutant.name)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
