#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows that soak_peer can fail: builds the library with a broken meeting and expects wrong rows of it.

    python3 tests/cuda/soak_mutants.py BUILD [--build-only | --run-only] [SOAK_ARGUMENT...]

BUILD holds a finished build of nvte_ep and soak_peer with Ninja. One file of each mutant is compiled again,
and all is linked into BUILD/mutants/NAME.
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
    source: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "nobody_waits",
        "src/transports/peer/peer_kernels.cu",
        "(load_acquire(arrival) - epoch) < 0; ++spin",
        "(load_acquire(arrival) - epoch) < -(1 << 30); ++spin",
    ),
    Mutant(
        "waits_for_the_meeting_before",
        "src/transports/peer/peer_kernels.cu",
        "(load_acquire(arrival) - epoch) < 0; ++spin",
        "(load_acquire(arrival) - epoch) < -1; ++spin",
    ),
    Mutant(
        "overwrites_what_peers_read",
        "src/transports/peer/peer.cc",
        "if (!open_) NVTE_EP_TRY(meet(stream));",
        "(void)stream;",
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
    source = ROOT / mutant.source
    text = source.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.source} has {text.count(mutant.old)} times {mutant.old!r}")
    folder = build / "mutants" / mutant.name
    folder.mkdir(parents=True, exist_ok=True)
    changed = folder / source.name
    changed.write_text(text.replace(mutant.old, mutant.new))
    inside = f"src/CMakeFiles/nvte_ep_objects.dir/{mutant.source.removeprefix('src/')}.o"
    mine = folder / "mutant.o"
    compiled = next(line for line in commands(build, inside) if f"-o {inside}" in line)
    compiled = compiled.replace(f"-o {inside}", f"-o {mine}").replace(f"{inside}.d", f"{mine}.d")
    subprocess.run(compiled.replace(str(source), str(changed)), shell=True, cwd=build, check=True)
    link = next(line for line in commands(build, LIBRARY) if " -shared " in line)
    output = next(word for word in link.split() if word.startswith(LIBRARY))
    library = folder / "libnvte_ep.so.1"
    link = link.replace(f"-o {output}", f"-o {library}").replace(inside, str(mine))
    subprocess.run(link, shell=True, cwd=build, check=True)
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
