# SPDX-License-Identifier: Apache-2.0
"""Shared by every Python test: which nvte_ep is tested, and which frameworks must be there.

The library is the file that NVTE_EP_LIBRARY names, used with the Python package of this source tree, or else
that of
the installed package. Without either the tests fail: nothing is skipped because it was not built.

    pytest --frameworks=torch,jax      a framework that is named and missing is a failure
    pytest                             tests of a missing framework are skipped

NVTE_EP_REQUIRE=torch,jax,cuda does the same, for the tests that need a GPU too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn

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
    unknown = set(_names(config.getoption("--frameworks"))) - set(FRAMEWORKS)
    if unknown:
        raise pytest.UsageError(f"--frameworks: unknown {', '.join(sorted(unknown))}")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


@pytest.fixture
def missing(request: pytest.FixtureRequest) -> Callable[[str, str], NoReturn]:
    """missing("cuda", "no device") skips the test, or fails it where the thing was asked for by name."""
    required = _names(request.config.getoption("--frameworks")) + _names(
        os.environ.get("NVTE_EP_REQUIRE", "")
    )

    def leave(name: str, reason: str) -> NoReturn:
        if name in required:
            pytest.fail(f"{name} was asked for: {reason}")
        pytest.skip(reason)

    return leave


@pytest.fixture
def framework(missing: Callable[[str, str], NoReturn]) -> Callable[[str], ModuleType]:
    """framework("torch") imports it; see missing for where it is not installed."""

    def get(name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing(name, f"{name} cannot be imported: {error}")

    return get


@pytest.fixture(scope="session")
def library_path() -> Path:
    """The library under test."""
    from nvte_ep import _lib

    return _lib.find()
