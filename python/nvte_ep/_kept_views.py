# SPDX-License-Identifier: Apache-2.0
"""Views of arrays that come again and again, such as the outputs of a training step: made once.

A view is kept under the identity of its array for as long as the array lives, and used again only while the
array still says of itself what it said then. It does not keep the array alive; the caller of a function does.

For Arrays and PyTorch's tensors. Not for NumPy's arrays: one that is weakly referenced cannot be resized.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from nvte_ep import _torch_tensor
from nvte_ep.array import Array

V = TypeVar("V")
Key = tuple[int, bool, str | None]  # id of the array, and how it is to be read
Facts = Callable[[Any, int], Any]

MOST = 4096  # arrays; a program that keeps more alive starts over


def _facts_of_own(array: Array, stream: int) -> Any:
    """Nothing about an Array changes, unless its memory is taken back."""
    array.wait_on(stream)
    return ()


_facts: dict[type, Facts | None] = {Array: _facts_of_own}


def facts_of(kind: type) -> Facts | None:
    """What tells whether an array of this type is still what it was; None: its views are not kept."""
    try:
        return _facts[kind]
    except KeyError:
        found = _torch_tensor.facts if _torch_tensor.is_plain(kind) else None
        _facts[kind] = found
        return found


class KeptViews(Generic[V]):
    def __init__(self) -> None:
        self._kept: dict[Key, tuple[weakref.ref[Any], Facts, Any, V]] = {}

    def find(self, key: Key, array: Any, stream: int) -> V | None:
        """The view, and the array is ordered before the stream; None: it must be made (again)."""
        kept = self._kept.get(key)
        if kept is None or kept[0]() is not array:
            return None
        _, read, facts, view = kept
        return view if read(array, stream) == facts else None

    def keep(self, key: Key, array: Any, stream: int, view: V) -> None:
        read = facts_of(type(array))
        if read is None:
            return
        facts = read(array, stream)
        if facts is None:
            return
        if len(self._kept) >= MOST:
            self._kept.clear()
        self._kept[key] = (
            weakref.ref(array, lambda dead: self._forget(key, dead)),
            read,
            facts,
            view,
        )

    def _forget(self, key: Key, dead: weakref.ref[Any]) -> None:
        kept = self._kept.get(key)
        if kept is not None and kept[0] is dead:
            self._kept.pop(key, None)

    def __len__(self) -> int:
        return len(self._kept)
