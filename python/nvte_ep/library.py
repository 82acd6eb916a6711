# SPDX-License-Identifier: Apache-2.0
"""What the library says about itself."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from nvte_ep import _lib


def version() -> str:
    """Release of the library that is loaded: "major.minor.patch"."""
    number = int(_lib.library().nvte_ep_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def abi_version() -> int:
    """Version of its binary interface."""
    return int(_lib.library().nvte_ep_abi_version())


def library_path() -> Path:
    """The library file that this process uses, or would use."""
    return _lib.find()


def build_info() -> dict[str, Any]:
    """Formats, backends and transports of the library, and why one is not available here."""
    text = ctypes.c_char_p()
    _lib.call("nvte_ep_build_info", ctypes.byref(text))
    info: dict[str, Any] = json.loads(text.value or b"{}")
    return info


def package_version() -> str:
    """Release of the installed distribution; of the library where this package runs from its sources."""
    try:
        return importlib.metadata.version(_lib.DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return version()
