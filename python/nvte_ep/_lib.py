# SPDX-License-Identifier: Apache-2.0
"""Finds, loads and calls libnvte_ep.so. Nothing happens before the first call into the library."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import threading
from pathlib import Path
from typing import Any

from nvte_ep import _abi
from nvte_ep._dtypes import BY_CODE
from nvte_ep.errors import AbiMismatchError, LibraryNotFoundError, Status, exception, invalid

LIBRARY_VARIABLE = "NVTE_EP_LIBRARY"
LIBRARY_NAME = "libnvte_ep.so"
DISTRIBUTION = "nvte-ep"

_library: ctypes.CDLL | None = None
_interrupted = threading.local()  # .text: what a finalizer found in nvte_ep_last_error; see quiet_call


def _candidates() -> tuple[list[Path], list[str]]:
    """Files to try, in order, and a line about each place for the error message."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:  # who names a file wants that file: no fallback to another
        return [Path(named)], [f"{named} (from {LIBRARY_VARIABLE})"]
    files = [Path(__file__).resolve().parent / "lib" / LIBRARY_NAME]
    places = [f"{LIBRARY_VARIABLE} (not set)", str(files[0])]
    # An editable install leaves the Python files in the source tree and the library where RECORD says.
    try:
        record = importlib.metadata.files(DISTRIBUTION) or []
        found = [Path(str(file.locate())) for file in record if file.name == LIBRARY_NAME]
    except importlib.metadata.PackageNotFoundError:
        found = []
        places.append(f"the RECORD of the distribution {DISTRIBUTION} (not installed)")
    else:
        if not found:
            places.append(f"the RECORD of the distribution {DISTRIBUTION} (has no {LIBRARY_NAME})")
    return files + found, places + [str(file) for file in found]


def find() -> Path:
    """The library file that this process uses, or would use."""
    files, places = _candidates()
    for file in files:
        if file.is_file():
            return file
    tried = "".join(f"\n  {place}" for place in places)
    raise LibraryNotFoundError(Status.UNSUPPORTED, f"{LIBRARY_NAME} not found; tried:{tried}")


def _load(file: Path) -> ctypes.CDLL:
    # RTLD_LOCAL: TransformerEngine exports other functions under the same prefix. CDLL, not PyDLL: a
    # collective that waits for its peers must not hold the GIL.
    try:
        library = ctypes.CDLL(str(file), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise LibraryNotFoundError(Status.UNSUPPORTED, f"{file} cannot be loaded: {error}") from error
    expected = _abi.CONSTANTS["NVTE_EP_ABI_VERSION"]
    try:
        version = int(library.nvte_ep_abi_version())
    except AttributeError as error:
        raise AbiMismatchError(Status.ABI_MISMATCH, f"{file} is no {LIBRARY_NAME}: {error}") from error
    if version != expected:
        raise AbiMismatchError(
            Status.ABI_MISMATCH,
            f"ABI version: {_abi.__file__} is for {expected}, the library {file} has {version}; "
            f"another release may be in the way (see {LIBRARY_VARIABLE})",
        )
    try:
        for name, (restype, argtypes) in _abi.FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = restype
            function.argtypes = argtypes
    except AttributeError as error:
        raise AbiMismatchError(
            Status.ABI_MISMATCH, f"{file} lacks a function that {_abi.__file__} names: {error}"
        ) from error
    return library


def library() -> ctypes.CDLL:
    """The loaded library, every function with its types."""
    global _library
    # No lock: loading twice gives the same library, while a lock could be held for ever in the child of a
    # fork.
    if _library is None:
        _library = _load(find())
    return _library


def last_error() -> str:
    raw: bytes = library().nvte_ep_last_error()
    text = raw.decode(errors="replace") or getattr(_interrupted, "text", "")
    _interrupted.text = ""
    return _with_arguments(_with_type_names(text))


def _with_arguments(text: str) -> str:
    """What is a field of a struct in C is an argument in Python."""
    return re.sub(r"^(\w+: )(?:config|options|args)\.", r"\1", text)


def _with_type_names(text: str) -> str:
    """The library has no names for types that it never takes; whoever reads this has: float64."""

    def name(match: re.Match[str]) -> str:
        found = BY_CODE.get((int(match[1]), int(match[2]), 1))
        return match[0] if found is None else found.name

    return re.sub(r"dtype code (\d+) of (\d+) bits", name, text)


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns a status; a failure becomes its exception."""
    status = getattr(_library or library(), name)(*arguments)
    if status != 0:
        raise exception(status, last_error() or f"{name}: {status_name(status)}")


def quiet_call(name: str, *arguments: Any) -> None:
    """A call for finalizers: it never raises. The collector may run it between a failed call and the reading
    of its
    text, which this call clears: so the text is kept for last_error."""
    text = library().nvte_ep_last_error().decode(errors="replace")
    getattr(library(), name)(*arguments)
    if text:
        _interrupted.text = text


def status_name(status: int) -> str:
    raw: bytes = library().nvte_ep_status_name(status)
    return raw.decode()


def enum(function: str, argument: str, prefix: str, name: str) -> int:
    """The number of an enumerator by its name in lower case."""
    values = _abi.choices(prefix)
    if not isinstance(name, str) or name not in values:
        raise invalid(function, argument, " or ".join(f'"{value}"' for value in values), repr(name))
    return values[name]
