# SPDX-License-Identifier: Apache-2.0
"""Exceptions: one class per status, each also the built-in exception that fits, all of them NvteEpError."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from nvte_ep import _abi

__all__ = [
    "AbiMismatchError",
    "BadStateError",
    "CudaError",
    "InternalError",
    "InvalidArgumentError",
    "LibraryNotFoundError",
    "NvteEpError",
    "OutOfMemoryError",
    "PeerFailedError",
    "PeerTimeoutError",
    "RecvOverflowError",
    "Status",
    "TransportError",
    "UnsupportedError",
    "exception",
]


class Status(IntEnum):
    """Status classes, with the numbers of the C interface."""

    OK = _abi.CONSTANTS["NVTE_EP_STATUS_OK"]
    INVALID_ARGUMENT = _abi.CONSTANTS["NVTE_EP_STATUS_INVALID_ARGUMENT"]
    UNSUPPORTED = _abi.CONSTANTS["NVTE_EP_STATUS_UNSUPPORTED"]
    BAD_STATE = _abi.CONSTANTS["NVTE_EP_STATUS_BAD_STATE"]
    OUT_OF_MEMORY = _abi.CONSTANTS["NVTE_EP_STATUS_OUT_OF_MEMORY"]
    CUDA = _abi.CONSTANTS["NVTE_EP_STATUS_CUDA"]
    TRANSPORT = _abi.CONSTANTS["NVTE_EP_STATUS_TRANSPORT"]
    PEER_FAILED = _abi.CONSTANTS["NVTE_EP_STATUS_PEER_FAILED"]
    TIMEOUT = _abi.CONSTANTS["NVTE_EP_STATUS_TIMEOUT"]
    OVERFLOW = _abi.CONSTANTS["NVTE_EP_STATUS_OVERFLOW"]
    ABI_MISMATCH = _abi.CONSTANTS["NVTE_EP_STATUS_ABI_MISMATCH"]
    INTERNAL = _abi.CONSTANTS["NVTE_EP_STATUS_INTERNAL"]


class NvteEpError(Exception):
    """A failure of the library: `status` is its class, `text` says function, argument, expected and got."""

    status: int
    text: str

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = Status(status) if status in Status.__members__.values() else status
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self.status), self.text)


class InvalidArgumentError(NvteEpError, ValueError):
    """An argument is wrong; the text names it."""


class UnsupportedError(NvteEpError, NotImplementedError):
    """Legal, but not here: the text says what is missing."""


class LibraryNotFoundError(UnsupportedError, ImportError):
    """No libnvte_ep.so was found; the text lists every place that was looked at."""


class BadStateError(NvteEpError, RuntimeError):
    """The object cannot do this now."""


class OutOfMemoryError(NvteEpError, MemoryError):
    """Host or device memory ran out."""


class CudaError(NvteEpError, RuntimeError):
    """The CUDA runtime or driver reported an error."""


class TransportError(NvteEpError, RuntimeError):
    """NCCL or NCCL EP reported an error."""


class PeerFailedError(NvteEpError, ConnectionError):
    """A peer aborted, left or died; fatal for the group."""


class PeerTimeoutError(NvteEpError, TimeoutError):
    """A peer did not arrive in time; fatal for the group."""


class RecvOverflowError(NvteEpError, RuntimeError):
    """More slots than recv_capacity; the kept ones are exact."""


class AbiMismatchError(NvteEpError, RuntimeError):
    """This package and the library that was loaded do not fit each other."""


class InternalError(NvteEpError, RuntimeError):
    """A fault of the library itself."""


_CLASSES: dict[int, type[NvteEpError]] = {
    Status.INVALID_ARGUMENT: InvalidArgumentError,
    Status.UNSUPPORTED: UnsupportedError,
    Status.BAD_STATE: BadStateError,
    Status.OUT_OF_MEMORY: OutOfMemoryError,
    Status.CUDA: CudaError,
    Status.TRANSPORT: TransportError,
    Status.PEER_FAILED: PeerFailedError,
    Status.TIMEOUT: PeerTimeoutError,
    Status.OVERFLOW: RecvOverflowError,
    Status.ABI_MISMATCH: AbiMismatchError,
    Status.INTERNAL: InternalError,
}


def exception(status: int, text: str) -> NvteEpError:
    """The exception of a status; a status of a newer library, unknown here, is a plain NvteEpError."""
    return _CLASSES.get(status, NvteEpError)(status, text)


def in_words_of(function: str, names: Mapping[str, str], error: NvteEpError) -> NvteEpError:
    """The error as a caller of `function` knows the argument: names has the library's names as keys."""
    _, _, what = error.text.partition(": ")
    argument, colon, rest = what.partition(":")
    if not colon or argument not in names:
        return error
    return exception(error.status, f"{function}: {names[argument]}:{rest}")


def invalid(function: str, argument: str, expected: str, got: str) -> InvalidArgumentError:
    """The library's own wording, for arguments that do not get as far as the library."""
    return InvalidArgumentError(
        Status.INVALID_ARGUMENT, f"{function}: {argument}: expected {expected}, got {got}"
    )
