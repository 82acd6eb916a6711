# SPDX-License-Identifier: Apache-2.0
"""Shared by every Python test: which nvte_ep is tested, and which frameworks must be there.

The library is the file that NVTE_EP_LIBRARY names, used with the Python package of this source tree, or else
that of
the installed package. Without either the tests fail: nothing is skipped because it was not built.

    pytest --frameworks=torch,jax      a framework that is named and missing is a failure
    pytest                             tests of a missing framework are skipped
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FRAMEWORKS = ("torch", "jax")

if os.environ.get("NVTE_EP_LIBRARY") or importlib.util.find_spec("nvte_ep") is None:
    sys.path.insert(0, str(REPOSITORY / "python"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--frameworks",
        default="",
        help=f"must be there, of {', '.join(FRAMEWORKS)}; else tests of a missing one are skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    unknown = set(_required(config)) - set(FRAMEWORKS)
    if unknown:
        raise pytest.UsageError(f"--frameworks: unknown {', '.join(sorted(unknown))}")


def _required(config: pytest.Config) -> list[str]:
    return [name for name in config.getoption("--frameworks").split(",") if name]


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> Callable[[str], ModuleType]:
    """framework("torch") imports it, skips the test where it is missing, or fails where --frameworks names
    it."""

    def get(name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if name in _required(request.config):
                pytest.fail(f"--frameworks names {name}, which cannot be imported: {error}")
            pytest.skip(f"{name} is not installed")

    return get


@pytest.fixture(scope="session")
def library_path() -> Path:
    """The library under test."""
    from nvte_ep import _lib

    return _lib.find()
