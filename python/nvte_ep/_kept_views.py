# SPDX-License-Identifier: Apache-2.0
"""Views that are made once for memory that comes again and again, as it does in the steps of a program: in
the same arrays, or in new ones that an allocator has put there.

A view is kept under all that its array says of itself. It keeps no memory alive and needs none: it is for
whoever has an array that says the same.

For Arrays and PyTorch's tensors, which say it in little time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from nvte_ep import _torch_tensor
from nvte_ep.array import Array

V = TypeVar("V")
Facts = tuple[Any, ...]
Read = Callable[[Any, int], "Facts | None"]

MOST = 4096  # views; a program that needs more starts over


def _facts_of_own(array: Array, stream: int) -> Facts:
    array.wait_on(stream)
    return array.facts


_read: dict[type, Read | None] = {Array: _facts_of_own}


def facts_of(array: Any, stream: int) -> Facts | None:
    """Memory and form of an array, which is ordered before the stream; None: its view is not kept."""
    kind = type(array)
    try:
        read = _read[kind]
    except KeyError:
        read = _read[kind] = _torch_tensor.facts if _torch_tensor.is_plain(kind) else None
    return None if read is None else read(array, stream)


class KeptViews(Generic[V]):
    def __init__(self) -> None:
        self._kept: dict[Hashable, V] = {}
        self.find = self._kept.get

    def keep(self, key: Hashable, view: V) -> None:
        if len(self._kept) >= MOST:
            self._kept.clear()
        self._kept[key] = view

    def __len__(self) -> int:
        return len(self._kept)
