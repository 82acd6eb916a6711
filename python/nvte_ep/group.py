# SPDX-License-Identifier: Apache-2.0
"""Group: the expert-parallel group of a rank, its errors and its memory.

A group is closed by close() or by a with statement. One that is dropped instead is closed without waiting for
anybody: it is aborted first, so that its peers do not wait for a rank that is gone.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvte_ep import _abi, _lib
from nvte_ep._arguments import boolean, integer
from nvte_ep._dtypes import Device, parse_device
from nvte_ep.array import Array, Memory
from nvte_ep.communicator import Communicator
from nvte_ep.errors import BadStateError, NvteEpError, Status, exception, in_words_of, invalid

if TYPE_CHECKING:
    from nvte_ep.handle import Handle

Allocator = tuple[Callable[[int, int, int], int], Callable[[int, int, int, int], None]]


@dataclass(frozen=True)
class GroupInfo:
    """What was chosen for a group; see nvte_ep_group_info_t."""

    transport: str
    num_ranks: int
    rank: int
    num_local_experts: int
    max_top_k: int
    capturable: bool
    slot_order_exact: bool
    recv_capacity: int


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes that a group and each of its handles hold; see nvte_ep_memory_info_t."""

    group_bytes: int
    handle_bytes: int
    exchange_bytes: int


@dataclass(frozen=True)
class ErrorInfo:
    """What went wrong after a call had returned; see nvte_ep_error_info_t."""

    status: Status
    rank: int
    handle: Handle | None
    count: int
    needed_rows: int
    text: str  # the same in words

    def exception(self) -> NvteEpError:
        return exception(self.status, self.text)


class _GroupState:
    """What outlives a Group object while its handles live: the library's group and its calling thread's
    duties.

    The calls on one group come from one thread at a time. The garbage collector keeps to no thread: a handle
    that it finds dead waits here until the group's thread calls again.

    No lock: finalizers run anywhere between two steps of a thread, also of one that already holds it. A
    deque's append and popleft and a dict's pop are single steps; nothing else is needed.
    """

    pointer: int | None = None  # in the instance while the group is open; see take_pointer

    def __init__(self) -> None:
        self.process = os.getpid()
        self.dead_handles: collections.deque[int] = collections.deque()
        self.callbacks: tuple[Any, ...] = ()
        self.callback_error: BaseException | None = None

    def bury_handles(self) -> None:
        while self.dead_handles:
            try:
                handle = self.dead_handles.popleft()
            except IndexError:
                return
            _lib.quiet_call("nvte_ep_handle_destroy", handle)

    def handle_died(self, pointer: int) -> None:
        if os.getpid() != self.process:
            return
        # In this order: whoever takes the pointer buries afterwards, so one of the two sees the handle.
        self.dead_handles.append(pointer)
        if self.pointer is None:
            self.bury_handles()

    def take_pointer(self) -> int | None:
        """The group's pointer, for one caller only."""
        pointer: int | None = vars(self).pop("pointer", None)
        return pointer if os.getpid() == self.process else None

    def abandon(self) -> None:
        """Ends a group that nobody closed, without waiting for its peers."""
        pointer = self.take_pointer()
        if pointer is not None:
            _lib.quiet_call("nvte_ep_group_abort", pointer)
            self.bury_handles()
            _lib.quiet_call("nvte_ep_group_destroy", pointer)
            self.bury_handles()

    def check_callbacks(self) -> None:
        error, self.callback_error = self.callback_error, None
        if error is not None:
            raise error


def _wrap_allocator(state: _GroupState, allocator: Allocator) -> tuple[Any, Any]:
    """The caller's two functions as C callbacks; what they raise is raised again by the call that needed
    memory."""
    if (
        not isinstance(allocator, (tuple, list))
        or len(allocator) != 2
        or not all(callable(function) for function in allocator)
    ):
        raise invalid(
            "nvte_ep_group_create", "allocator", "a pair of functions (alloc, free)", repr(allocator)
        )
    allocate, release = allocator

    def alloc(nbytes: int, device_id: int, stream: int | None, _: Any) -> int | None:
        try:
            return int(allocate(nbytes, device_id, stream or 0)) or None
        except BaseException as error:
            state.callback_error = error
            return None

    def free(address: int, nbytes: int, device_id: int, stream: int | None, _: Any) -> None:
        try:
            release(address, nbytes, device_id, stream or 0)
        except BaseException as error:
            state.callback_error = error

    return _abi.AllocFunction(alloc), _abi.FreeFunction(free)


def _group_device(comm: Communicator, device: Any, function: str) -> Device:
    if not isinstance(comm, Communicator):
        raise invalid(function, "comm", "a Communicator", type(comm).__name__)
    return comm.default_device if device is None else parse_device(function, device)


# Arguments that are several fields in C, or have other names there.
_NAMES = {"device_type": "device", "device_id": "device", "alloc_fn": "allocator"}


def _group_config(
    comm: Communicator,
    function: str,
    *,
    num_experts: int,
    hidden: int,
    max_tokens_per_rank: int,
    recv_capacity: int = 0,
    max_top_k: int = 0,
    device: Any = None,
    transport: str = "auto",
    num_sms: int = 0,
    timeout_ns: int = 0,
    overflow: str = "error",
    zero_copy: bool = False,
) -> _abi.GroupConfig:
    device_type, device_id = _group_device(comm, device, function)
    return _abi.GroupConfig(
        device_type=device_type,
        device_id=device_id,
        num_experts=integer(function, "num_experts", num_experts, 32),
        max_top_k=integer(function, "max_top_k", max_top_k, 32),
        hidden=integer(function, "hidden", hidden),
        max_tokens_per_rank=integer(function, "max_tokens_per_rank", max_tokens_per_rank),
        recv_capacity=integer(function, "recv_capacity", recv_capacity),
        transport=_lib.enum(function, "transport", "NVTE_EP_TRANSPORT_", transport),
        num_sms=integer(function, "num_sms", num_sms, 32),
        timeout_ns=integer(function, "timeout_ns", timeout_ns),
        overflow=_lib.enum(function, "overflow", "NVTE_EP_ON_OVERFLOW_", overflow),
        zero_copy=boolean(function, "zero_copy", zero_copy),
    )


class Group:
    """This rank's member of an expert-parallel group. Creating it is collective.

    recv_capacity: slots a rank can receive, padding included; 0 = eager: sized by each prepare.
    max_top_k, num_sms, timeout_ns: 0 = the library's choice. overflow: "error" or "drop".
    device: "cpu", "cuda:1", ...; None: the communicator's.
    allocator: for device memory, alloc(nbytes, device_id, stream) -> address and
    free(address, nbytes, device_id, stream).
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        num_experts: int,
        hidden: int,
        max_tokens_per_rank: int,
        recv_capacity: int = 0,
        max_top_k: int = 0,
        device: Any = None,
        transport: str = "auto",
        num_sms: int = 0,
        timeout_ns: int = 0,
        overflow: str = "error",
        zero_copy: bool = False,
        allocator: Allocator | None = None,
    ) -> None:
        function = "nvte_ep_group_create"
        config = _group_config(
            comm,
            function,
            num_experts=num_experts,
            hidden=hidden,
            max_tokens_per_rank=max_tokens_per_rank,
            recv_capacity=recv_capacity,
            max_top_k=max_top_k,
            device=device,
            transport=transport,
            num_sms=num_sms,
            timeout_ns=timeout_ns,
            overflow=overflow,
            zero_copy=zero_copy,
        )
        self.device = _group_device(comm, device, function)
        self.num_experts = num_experts
        self.hidden = hidden
        self.max_tokens_per_rank = max_tokens_per_rank
        self._state = state = _GroupState()
        if allocator is not None:
            config.alloc_fn, config.free_fn = state.callbacks = _wrap_allocator(state, allocator)
        created = ctypes.c_void_p()
        try:
            _lib.call(function, comm.pointer, ctypes.byref(config), ctypes.byref(created))
        except NvteEpError as error:
            raise in_words_of(function, _NAMES, error) from None
        finally:
            state.check_callbacks()
        state.pointer = created.value
        self._finalizer = weakref.finalize(self, state.abandon)
        self._memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        self._info: GroupInfo | None = None

    @staticmethod
    def memory(
        comm: Communicator,
        *,
        num_experts: int,
        hidden: int,
        max_tokens_per_rank: int,
        recv_capacity: int = 0,
        max_top_k: int = 0,
        device: Any = None,
        transport: str = "auto",
        num_sms: int = 0,
        timeout_ns: int = 0,
        overflow: str = "error",
        zero_copy: bool = False,
    ) -> MemoryInfo:
        """Bytes that a group of these settings would hold. Local; allocates nothing.

        Arguments are those of Group."""
        function = "nvte_ep_group_memory"
        info = _abi.MemoryInfo()
        settings = _group_config(
            comm,
            function,
            num_experts=num_experts,
            hidden=hidden,
            max_tokens_per_rank=max_tokens_per_rank,
            recv_capacity=recv_capacity,
            max_top_k=max_top_k,
            device=device,
            transport=transport,
            num_sms=num_sms,
            timeout_ns=timeout_ns,
            overflow=overflow,
            zero_copy=zero_copy,
        )
        _lib.call(function, comm.pointer, ctypes.byref(settings), ctypes.byref(info))
        return MemoryInfo(info.group_bytes, info.handle_bytes, info.exchange_bytes)

    @property
    def pointer(self) -> int:
        """The nvte_ep_group_t."""
        pointer = self._state.pointer
        if pointer is None:
            raise BadStateError(Status.BAD_STATE, "Group: it is closed")
        return pointer

    @property
    def info(self) -> GroupInfo:
        if self._info is None:
            info = _abi.GroupInfo()
            _lib.call("nvte_ep_group_info", self.pointer, ctypes.byref(info))
            self._info = GroupInfo(
                transport=info.transport.decode(),
                num_ranks=info.num_ranks,
                rank=info.rank,
                num_local_experts=info.num_local_experts,
                max_top_k=info.max_top_k,
                capturable=bool(info.capturable),
                slot_order_exact=bool(info.slot_order_exact),
                recv_capacity=info.recv_capacity,
            )
        return self._info

    def poll_error(self) -> ErrorInfo | None:
        """What went wrong after a call had returned; None: nothing. Never blocks; any thread."""
        info = _abi.ErrorInfo()
        _lib.call("nvte_ep_group_poll_error", self.pointer, ctypes.byref(info))
        if info.status == Status.OK:
            return None
        handle = self._handles.get(info.handle) if info.handle else None
        return ErrorInfo(
            Status(info.status), info.rank, handle, info.count, info.needed_rows, _lib.last_error()
        )

    def check(self) -> None:
        """Raises what poll_error finds."""
        error = self.poll_error()
        if error is not None:
            raise error.exception()

    def abort(self) -> None:
        """Ends the group: waits of this rank and of its peers return PEER_FAILED. Never blocks; any
        thread."""
        _lib.call("nvte_ep_group_abort", self.pointer)

    def mem_alloc(self, nbytes: int) -> Array:
        """Symmetric memory for zero_copy, uint8 [nbytes]. Collective, the same size on every rank.

        It goes with close() or mem_free. After that the Array and what was sliced from it refuse every use,
        but arrays that other libraries made of it (numpy.asarray, torch.from_dlpack) DANGLE: to read them is
        to read freed memory. Drop or copy them before. While none of the two is called, any of them keeps the
        group and its memory alive.
        """
        size = integer("nvte_ep_mem_alloc", "bytes", nbytes)
        if size < 0:
            raise invalid("nvte_ep_mem_alloc", "bytes", "no negative size", str(size))
        address = ctypes.c_void_p()
        self.call("nvte_ep_mem_alloc", self.pointer, size, ctypes.byref(address))
        memory = Array.borrow(address.value or 0, size, self.device, self)
        if memory._borrowed is not None:
            self._memories.add(memory._borrowed)
        return memory

    def mem_free(self, memory: Array) -> None:
        """Gives memory of mem_alloc back; no array made from it may be used after that: see mem_alloc.
        Collective."""
        if not isinstance(memory, Array):
            raise invalid("nvte_ep_mem_free", "memory", "the Array of mem_alloc", type(memory).__name__)
        self.call("nvte_ep_mem_free", self.pointer, memory.pointer)
        if memory._borrowed is not None:
            memory._borrowed.gone = "mem_free gave it back"

    def handle(
        self,
        *,
        top_k: int,
        alignment: int = 128,
        dispatch: str = "bf16",
        combine: str = "bf16",
        dispatch_backward: str = "bf16",
        combine_backward: str = "bf16",
    ) -> Handle:
        """The routing state of one layer or micro-batch, with a wire format for each direction."""
        from nvte_ep.handle import Handle  # handles know groups, not the other way round

        return Handle(
            self,
            top_k=top_k,
            alignment=alignment,
            dispatch=dispatch,
            combine=combine,
            dispatch_backward=dispatch_backward,
            combine_backward=combine_backward,
        )

    def call(self, function: str, *arguments: Any) -> None:
        """For this package: one call on the group, in its thread."""
        self._state.bury_handles()
        try:
            _lib.call(function, *arguments)
        finally:
            self._state.check_callbacks()

    def close(self) -> None:
        """Destroys the group. Collective, unless it failed or was aborted. Closing twice is fine.

        Memory of mem_alloc goes with it: see there about arrays made from it.
        """
        self._finalizer.detach()
        pointer = self._state.take_pointer()
        if pointer is not None:
            for memory in self._memories:
                memory.gone = "its group was closed"
            self._state.bury_handles()
            try:
                _lib.call("nvte_ep_group_destroy", pointer)
            finally:
                self._state.bury_handles()
                self._state.check_callbacks()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # Peers must not wait for a rank that left on an exception, and that exception is the one to see.
        with contextlib.suppress(NvteEpError):
            self.abort()
        with contextlib.suppress(NvteEpError):
            self.close()
