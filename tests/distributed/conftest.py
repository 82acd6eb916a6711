# SPDX-License-Identifier: Apache-2.0
"""The modules of this folder are the package `distributed`, in the tests and in the processes of ranks."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# JAX takes most of a GPU's memory otherwise, and there are others on it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# A time limit ends the tests as ctrl-C does: with a summary, and the ranks with them.
signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_configure() -> None:
    """Finds out which transports can run, once. Without one that was asked for no test runs."""
    try:
        importlib.import_module("distributed.here")
    except Exception as error:
        raise pytest.UsageError(f"{type(error).__name__}: {error}") from error


def pytest_report_header() -> list[str]:
    from distributed.here import summary

    return summary()
