# SPDX-License-Identifier: Apache-2.0
"""Communicator: the ranks that can form groups."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable

from nvte_ep import _abi, _lib, _nccl
from nvte_ep._arguments import integer
from nvte_ep._dtypes import CPU, CUDA_TYPE, Device
from nvte_ep.errors import BadStateError, Status, invalid


def unique_id(kind: str = "nccl") -> bytes:
    """A fresh id for a communicator of kind "threads" or "nccl"; one rank makes it and gives it to the
    others."""
    function = "nvte_ep_unique_id"
    number = _lib.enum(function, "kind", "NVTE_EP_COMM_", kind)
    if kind == "nccl":
        _nccl.preload()
    buffer = (ctypes.c_uint8 * _abi.CONSTANTS["NVTE_EP_UNIQUE_ID_BYTES"])()
    _lib.call(function, number, buffer)
    return bytes(buffer)


class Owned:
    """A library object that is destroyed once: by close(), or when nobody holds it any more.

    `destroy` runs in the process that made the object only: a fork has a copy of the memory, not of the
    threads, the device and the peers behind it.
    """

    def __init__(self, pointer: int, destroy: Callable[[int], None]) -> None:
        self.pointer: int | None = pointer
        self._destroy = destroy
        self._process = os.getpid()

    def release(self) -> None:
        pointer, self.pointer = self.pointer, None
        if pointer is not None and os.getpid() == self._process:
            self._destroy(pointer)


def _destroy_communicator(pointer: int) -> None:
    _lib.quiet_call("nvte_ep_comm_destroy", pointer)


class Communicator:
    """The ranks that can form groups: threads of this process, or processes over NCCL."""

    def __init__(
        self,
        kind: str,
        num_ranks: int,
        rank: int,
        unique_id: bytes | None = None,
        *,
        device_id: int = 0,
        timeout_ns: int = 0,
    ) -> None:
        function = "nvte_ep_comm_create"
        config = _abi.CommConfig(
            kind=_lib.enum(function, "kind", "NVTE_EP_COMM_", kind),
            num_ranks=integer(function, "num_ranks", num_ranks, 32),
            rank=integer(function, "rank", rank, 32),
            device_id=integer(function, "device_id", device_id, 32),
            timeout_ns=integer(function, "timeout_ns", timeout_ns),
        )
        if unique_id is not None:
            size = _abi.CONSTANTS["NVTE_EP_UNIQUE_ID_BYTES"]
            if not isinstance(unique_id, (bytes, bytearray)) or len(unique_id) != size:
                raise invalid(function, "unique_id", f"{size} bytes", repr(unique_id))
            config.unique_id = (ctypes.c_uint8 * size).from_buffer_copy(unique_id)
        if kind == "nccl":
            _nccl.preload()
        created = ctypes.c_void_p()
        _lib.call(function, ctypes.byref(config), ctypes.byref(created))
        self._adopt(created, CPU if kind == "threads" else (CUDA_TYPE, config.device_id))

    def _adopt(self, created: ctypes.c_void_p, device: Device) -> None:
        assert created.value is not None
        self.default_device = device
        self._owned = Owned(created.value, _destroy_communicator)
        self._finalizer = weakref.finalize(self, self._owned.release)

    @classmethod
    def threads(cls, num_ranks: int = 1, *, timeout_ns: int = 0) -> list[Communicator]:
        """One communicator for each rank of this process; each is to be used by a thread of its own."""
        function = "nvte_ep_comm_create"
        if integer(function, "num_ranks", num_ranks, 32) < 1:
            raise invalid(function, "num_ranks", "at least 1", str(num_ranks))
        shared_id = unique_id("threads")
        return [
            cls("threads", num_ranks, rank, shared_id, timeout_ns=timeout_ns) for rank in range(num_ranks)
        ]

    @classmethod
    def nccl(
        cls, unique_id: bytes, rank: int, size: int, *, device_id: int | None = None, timeout_ns: int = 0
    ) -> Communicator:
        """This rank's member of a new NCCL communicator. Collective. device_id None: the current CUDA
        device."""
        device_id = _nccl.current_device() if device_id is None else device_id
        return cls("nccl", size, rank, unique_id, device_id=device_id, timeout_ns=timeout_ns)

    @classmethod
    def from_nccl(cls, nccl_comm: int, *, device_id: int | None = None) -> Communicator:
        """Works on a split of the caller's ncclComm_t, whose calls block, and which must live longer.
        Collective. device_id: the communicator's, for an NCCL that does not tell it."""
        function = "nvte_ep_comm_from_nccl"
        address = integer(function, "nccl_comm", nccl_comm)
        if device_id is not None:
            device_id = integer(function, "device_id", device_id, 32)
        _nccl.preload()
        created = ctypes.c_void_p()
        _lib.call(function, address, ctypes.byref(created))
        self = cls.__new__(cls)
        if device_id is None:
            device_id = _nccl.device_of(address)
        self._adopt(created, (CUDA_TYPE, _nccl.current_device() if device_id is None else device_id))
        return self

    @property
    def pointer(self) -> int:
        """The nvte_ep_comm_t."""
        if self._owned.pointer is None:
            raise BadStateError(Status.BAD_STATE, "Communicator: it is closed")
        return self._owned.pointer

    def close(self) -> None:
        """Groups that still use it keep what they need. Closing twice is fine."""
        self._finalizer()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
