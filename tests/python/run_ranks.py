# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads, for tests that need no more of them than to run and to end."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_ranks(*ranks: Callable[[], None], seconds: float = 60) -> None:
    """Each in a thread of its own, which may take so long; the first exception is raised here."""
    errors: list[BaseException] = []

    def run(rank: Callable[[], None]) -> None:
        try:
            rank()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
