# SPDX-License-Identifier: Apache-2.0
"""Device memory of this package's Arrays. What an Array leaves behind is kept and used again, because CUDA's
own allocation and release wait for the device.

Nobody knows which streams still read memory whose last Array is gone: it may have gone to any framework. So
it waits until the device was idle once; that is asked for when much has gathered, not at each release.

Waiting for the device may be waiting for another thread: ranks that share a GPU wait on it for what the
others have yet to launch. So no lock that another thread needs to get memory is held meanwhile.
"""

from __future__ import annotations

import collections
import threading

from nvte_ep import _cuda
from nvte_ep.errors import OutOfMemoryError

SHARE = 32  # of a device's memory, one part of so many, may wait, and as much may be ready
MOST_BLOCKS = 1024  # that wait
_STEPS = 8  # sizes between two powers of two: at most an eighth is wasted
_LEAST = 512


def block_size(nbytes: int) -> int:
    """What is allocated for so many bytes."""
    step = max((1 << max(nbytes, 1).bit_length()) // (2 * _STEPS), _LEAST)
    return -(-max(nbytes, 1) // step) * step


class DevicePool:
    """The memory of one device."""

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self._limit = _cuda.total_memory(device_id) // SHARE
        # Finalizers put blocks here, anywhere between two steps of any thread: one step, and no lock.
        self._waiting: collections.deque[tuple[int, int]] = collections.deque()
        self._ready: dict[int, list[int]] = {}
        self._ready_bytes = 0
        self._lock = threading.Lock()  # of what is ready; never held during a call into CUDA
        self._settling = threading.Lock()  # held while the device is waited for

    def take(self, nbytes: int) -> int:
        size = block_size(nbytes)
        pointer = self._take_ready(size)
        if pointer is None and self._much_waits() and self._settling.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._settling.release()
            pointer = self._take_ready(size)
        if pointer is not None:
            return pointer
        try:
            return _cuda.malloc(size, self.device_id)
        except OutOfMemoryError:
            self.release()
            return _cuda.malloc(size, self.device_id)

    def _take_ready(self, size: int) -> int | None:
        with self._lock:
            pointers = self._ready.get(size)
            if not pointers:
                return None
            self._ready_bytes -= size
            return pointers.pop()

    def _much_waits(self) -> bool:
        waiting = list(self._waiting)
        return len(waiting) > MOST_BLOCKS or sum(held for _, held in waiting) > self._limit

    def give(self, pointer: int, nbytes: int) -> None:
        """For finalizers: makes no call into CUDA."""
        self._waiting.append((pointer, block_size(nbytes)))

    def release(self) -> None:
        """Gives all that is not in use back to CUDA."""
        with self._settling:
            self._settle()
        with self._lock:
            ready = [pointer for pointers in self._ready.values() for pointer in pointers]
            self._ready.clear()
            self._ready_bytes = 0
        for pointer in ready:
            _cuda.free(pointer, self.device_id)

    def _settle(self) -> None:
        """What waits is ready once the device was idle. To release one block waits for that, and unlike a
        synchronisation it may be done while graphs are captured."""
        gathered = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not gathered:
            return
        gathered.sort(key=lambda block: -block[1])
        if not _cuda.free(gathered.pop()[0], self.device_id):  # the smallest
            return  # CUDA has failed; nothing is used again
        too_many = []
        with self._lock:
            for pointer, size in gathered:
                if self._ready_bytes + size > self._limit:
                    too_many.append(pointer)
                else:
                    self._ready.setdefault(size, []).append(pointer)
                    self._ready_bytes += size
        for pointer in too_many:
            _cuda.free(pointer, self.device_id)


_pools: dict[int, DevicePool] = {}


def pool(device_id: int) -> DevicePool:
    found = _pools.get(device_id)
    # Two threads may make one each: setdefault keeps the first.
    return _pools.setdefault(device_id, DevicePool(device_id)) if found is None else found


def empty_cache() -> None:
    """Gives device memory back to CUDA that Arrays have left behind and this package keeps for the next ones.
    Waits for the devices."""
    for each in list(_pools.values()):
        each.release()
