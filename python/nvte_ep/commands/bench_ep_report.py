"""What a run of `nvte-ep bench ep` found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from nvte_ep.commands.bench_ep_clock import Spread
from nvte_ep.commands.bench_ep_data import Floor, Operation, Shape
from nvte_ep.commands.bench_ep_goals import PYTHON_CALL, Goal, host_goal


@dataclass
class HostCall:
    """Host time of a call, in microseconds."""

    python: float
    c: float | None  # the same call with its arguments made before, less what ctypes takes to make it
    launches: int  # what it puts on the device

    @property
    def passed(self) -> bool:
        """Both the call in C and what Python adds to it."""
        if self.c is None:
            return False
        return self.c <= host_goal(self.launches) and self.python - self.c <= PYTHON_CALL


@dataclass
class Figure:
    """One operation by one side."""

    side: str
    spread: Spread
    way: str = ""  # the best of its settings
    ways: dict[str, float] = field(default_factory=dict)  # medians of all of them
    host: HostCall | None = None
    goal: Goal | None = None

    @property
    def passed(self) -> bool | None:
        return None if self.goal is None else self.spread.median <= self.goal.microseconds


@dataclass
class Row:
    operation: Operation
    floor: Floor
    floor_microseconds: float
    sets: int
    cold: bool
    figures: dict[str, Figure] = field(default_factory=dict)


@dataclass
class Section:
    """One shape."""

    shape: Shape
    slots: int  # of the fullest rank, padding included
    rows: list[Row] = field(default_factory=list)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)  # by transport


@dataclass
class Report:
    device: dict[str, Any]
    software: dict[str, str]
    library: dict[str, Any]
    ranks: int
    threads: bool
    devices: int  # that the ranks are on
    num_sms: int
    copy_gbps: float
    link_gbps: float | None  # None: there is no link, the ranks share a memory
    sides: list[str] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    compared_bytes: int = 0
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def rates(self) -> tuple[float, float]:
        """GB/s of memory and of the link."""
        return self.copy_gbps, math.inf if self.link_gbps is None else self.link_gbps

    @property
    def nothing(self) -> bool:
        """Nothing was measured, and nothing failed: no result at all."""
        measured = any(row.figures for section in self.sections for row in section.rows)
        return not measured and not self.failed

    @property
    def shared_device(self) -> bool:
        return self.devices < self.ranks
