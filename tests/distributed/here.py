# SPDX-License-Identifier: Apache-2.0
"""The transports that this run tests. Only the tests import this, not the processes of ranks.

NVTE_EP_TRANSPORTS=peer_threads,nccl runs the suites on these only, and fails where one of them cannot run.
Without it they run on all that can.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

from distributed.cases import Case
from distributed.transports import (
    ALL,
    START_TIMEOUT,
    THREADS_MIRRORED,
    Transport,
    count_gpus,
    why_not_at,
)


def why_not(transport: Transport) -> str | None:
    if not transport.on_device:
        return None
    if count_gpus() == 0:
        return "no GPU, or no cuda.bindings to find it with"
    # The first of its kind in this process, or in the ranks'.
    found: str | None = transport.run(1, why_not_at, transport, timeout=START_TIMEOUT)[0]
    return found


def _choose() -> tuple[list[Transport], dict[str, str]]:
    known = {transport.id: transport for transport in [*ALL, THREADS_MIRRORED]}
    wanted = [name for name in os.environ.get("NVTE_EP_TRANSPORTS", "").split(",") if name]
    if unknown := set(wanted) - known.keys():
        raise ValueError(f"NVTE_EP_TRANSPORTS: unknown {sorted(unknown)}; known: {', '.join(known)}")
    chosen = [known[name] for name in wanted] if wanted else ALL
    missing = {row.id: reason for row in chosen if (reason := why_not(row)) is not None}
    if wanted and missing:
        raise RuntimeError(f"NVTE_EP_TRANSPORTS asks for what cannot run here: {missing}")
    return [row for row in chosen if row.id not in missing], missing


TESTED, MISSING = _choose()
# Those that take cases of any shape.
TRANSPORTS = [transport for transport in TESTED if not transport.one_shape]


def pairs(cases: Iterable[Case], among: Iterable[Transport] = TESTED) -> list[tuple[Transport, Case]]:
    """Every case on every transport that gets it, as that gets it."""
    fits = ((transport, transport.fit(case)) for transport in among for case in cases)
    return [(transport, case) for transport, case in fits if case is not None]


def transports_that(trait: str) -> list[Transport]:
    """Those whose field of this name is true. What holds for the others is told in CHECKLIST.md."""
    return [transport for transport in TRANSPORTS if getattr(transport, trait)]


def on_transports_that(trait: str) -> pytest.MarkDecorator:
    """Runs a test on each of them. Where there is none it is skipped, and the reasons are told."""
    found = transports_that(trait) or [pytest.param(None, marks=nothing_that(trait))]
    return pytest.mark.parametrize("transport", found, ids=str)


def nothing_that(trait: str) -> pytest.MarkDecorator:
    return pytest.mark.skip(f"no transport under test has {trait}; {MISSING}")


def summary() -> list[str]:
    lines = [f"transports under test: {', '.join(map(str, TESTED))}"]
    return lines + [f"not under test: {name}: {reason}" for name, reason in MISSING.items()]
