# SPDX-License-Identifier: Apache-2.0
"""Where the library is installed: NVTE_EP_PREFIX (a wheel's nvte_ep folder, set by ci/wheel.sh), else the
build in NVTE_EP_BUILD_DIR (set by ci/test.sh), installed into a temporary folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Run(Protocol):
    def __call__(
        self, command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str: ...


def _run(
    command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def run() -> Run:
    """Standard output of a command; a failure shows everything it said."""
    return _run


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("NVTE_EP_PREFIX")
    if given:
        return Path(given)
    build = Path(os.environ.get("NVTE_EP_BUILD_DIR", ROOT / "build"))
    assert (build / "CMakeCache.txt").exists(), f"{build}: no build there; ci/test.sh makes one"
    folder = tmp_path_factory.mktemp("installed") / "prefix"
    _run(["cmake", "--install", build, "--prefix", folder, "--component", "nvte_ep"])
    return folder


@pytest.fixture(scope="session")
def is_wheel() -> bool:
    return "NVTE_EP_PREFIX" in os.environ


@pytest.fixture(scope="session")
def library(prefix: Path) -> Path:
    (found,) = prefix.glob("lib*/**/libnvte_ep.so")
    return found


@pytest.fixture(scope="session")
def pkgconfig_dir(prefix: Path) -> Path:
    (found,) = prefix.glob("lib*/**/nvte_ep.pc")
    return found.parent


@pytest.fixture(scope="session")
def run_env(library: Path) -> dict[str, str]:
    """For programs that a test builds: the loader finds the installed library."""
    return {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
