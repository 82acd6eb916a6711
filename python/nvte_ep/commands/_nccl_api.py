"""libnccl and libnccl_ep, called directly, for the benchmark. Found as the library finds NCCL."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvte_ep import _nccl
from nvte_ep.commands import _nccl_ep_abi as abi
from nvte_ep.commands.bench_ep_ranks import Ranks
from nvte_ep.commands.bench_machine import CudaMachine
from nvte_ep.errors import Status, TransportError, UnsupportedError


class NcclApi:
    """A failure becomes an exception."""

    def __init__(self) -> None:
        _nccl.preload()
        try:
            # Global: libnccl_ep looks for its symbols.
            self._nccl = ctypes.CDLL("libnccl.so.2", mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise UnsupportedError(Status.UNSUPPORTED, f"{error}: pip install nvidia-nccl-cu13") from error
        self._functions = _typed(self._nccl, abi.NCCL_FUNCTIONS)
        self._nccl.ncclGetErrorString.argtypes = (ctypes.c_int,)
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code != 0:
            text = self._nccl.ncclGetErrorString(code).decode()
            raise TransportError(Status.TRANSPORT, f"{name}: {text}")

    def versions(self) -> dict[str, str]:
        return {"NCCL": self._version("ncclGetVersion")}

    def _version(self, function: str) -> str:
        number = ctypes.c_int()
        self.call(function, ctypes.byref(number))
        value = number.value
        return f"{value // 10000}.{value % 10000 // 100}.{value % 100}"


class NcclEpApi(NcclApi):
    def __init__(self) -> None:
        super().__init__()
        errors = []
        for name in _candidates():
            try:
                library = ctypes.CDLL(name)
                break
            except OSError as error:
                errors.append(str(error))
        else:
            raise UnsupportedError(
                Status.UNSUPPORTED, f"libnccl_ep not found ({errors[0]}): pip install nccl-extensions"
            )
        self._functions |= _typed(library, abi.EP_FUNCTIONS)

    def versions(self) -> dict[str, str]:
        return super().versions() | {"NCCL EP": self._version("ncclEpGetVersion")}


def _candidates() -> Iterator[str]:
    home = os.environ.get("NCCL_EP_HOME")
    if home:
        yield str(Path(home) / "lib" / "libnccl_ep.so")
    yield "libnccl_ep.so.0"
    yield "libnccl_ep.so"
    for folder in sys.path:  # the wheel nccl-extensions
        for major in (13, 12):
            yield str(Path(folder) / f"nccl/ep/lib/cu{major}/libnccl_ep.so")


def _typed(library: ctypes.CDLL, functions: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    found = {}
    for name, argtypes in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argtypes, ctypes.c_int
        found[name] = function
    return found


def new_comm(api: NcclApi, ranks: Ranks, machine: CudaMachine) -> ctypes.c_void_p:
    """A communicator of all ranks."""

    def unique_id() -> str:
        made = abi.UniqueId()
        api.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made).hex()

    shared = abi.UniqueId.from_buffer_copy(bytes.fromhex(ranks.broadcast(unique_id)))
    comm = ctypes.c_void_p()
    machine.use()
    api.call("ncclCommInitRank", ctypes.byref(comm), ranks.size, shared, ranks.rank)
    return comm
