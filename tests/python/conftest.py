# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import nvte_ep
import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
PACKAGE_ROOT = Path(nvte_ep.__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))  # what several tests here share


@pytest.fixture
def run_python(library_path: Path) -> RunPython:
    """Runs code in a fresh interpreter that sees the package and the library under test; returns what it
    did."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        settings = {"NVTE_EP_LIBRARY": str(library_path), "PYTHONPATH": str(PACKAGE_ROOT), **environment}
        return subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
            env=inherited | {name: value for name, value in settings.items() if value},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def run_clean(run_python: RunPython) -> Callable[..., str]:
    """As run_python, for code that must end well and silently; returns what it printed."""

    def run(code: str, **environment: str) -> str:
        done = run_python(code, **environment)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout

    return run
