"""One rank of `nvte-ep bench ep`: every side that works here, operation by operation."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from nvte_ep.commands._checks import Checks
from nvte_ep.commands._report import Progress
from nvte_ep.commands.bench_ep_clock import Clock, Recorder
from nvte_ep.commands.bench_ep_data import Data, Operation, Shape, floor
from nvte_ep.commands.bench_ep_goals import goal, memory_goal
from nvte_ep.commands.bench_ep_library import Library, Sampling, Side, Work
from nvte_ep.commands.bench_ep_nccl import NAME as NCCL
from nvte_ep.commands.bench_ep_nccl import SendReceive
from nvte_ep.commands.bench_ep_nccl_ep import NAME as NCCL_EP
from nvte_ep.commands.bench_ep_nccl_ep import Direct
from nvte_ep.commands.bench_ep_output import document
from nvte_ep.commands.bench_ep_ranks import Ranks
from nvte_ep.commands.bench_ep_report import Figure, HostCall, Report, Row, Section
from nvte_ep.commands.bench_machine import CudaMachine, Machine
from nvte_ep.errors import NvteEpError, UnsupportedError

T = TypeVar("T")

TRANSPORTS = ("peer", "nccl_ep", "nccl")


@dataclass
class Bench:
    """What every measurement of a rank shares."""

    arguments: argparse.Namespace
    ranks: Ranks
    machine: Machine
    clock: Clock
    report: Report
    progress: Progress
    repeats: int
    sampling: Sampling
    nccl_ep_sms: list[int]  # that NCCL EP is tried with; none: what may suit it best

    def together(self, what: str, make: Callable[[], T]) -> tuple[T | None, str]:
        """The result, if every rank has one; else why not."""
        result: T | None = None
        reason = ""
        try:
            result = make()
        except NvteEpError as error:
            reason = f"{what}: {error}"
        reasons = [text for text in self.ranks.gather(reason) if text]
        return (None, reasons[0]) if reasons else (result, "")

    def shape(self, shape: Shape, wanted: list[Operation]) -> None:
        data = Data(shape, self.ranks.size)
        slots = max(data.routed(rank).slots for rank in range(self.ranks.size))
        section = Section(shape, slots)
        self.report.sections.append(section)
        with contextlib.ExitStack() as stack:
            sides = self._sides(data, section)
            for side in sides:
                stack.callback(side.close)
            for operation in wanted:
                self._operation(data, section, sides, operation)
                self.progress.step(f"{shape.tokens} tokens, E {shape.experts}: {operation.key}")
                self.ranks.meet()
            for side in sides:
                self._findings(side)

    def _sides(self, data: Data, section: Section) -> list[Side]:
        """Every side that works here, in the order of the report."""
        sides: list[Side] = []
        for name in _transports(self.arguments, self.ranks, self.machine):
            side, reason = self.together(name, lambda name=name: self._library(name, data))  # type: ignore[misc]
            if side is None:
                self._not_run(f"{name}, {section.shape.name}: {reason}")
            else:
                sides.append(side)
                section.memory[name] = side.memory()
                if name == "peer":
                    section.memory[name]["goal_bytes"] = memory_goal(data)
        if self.machine.kind == "cuda" and not self.arguments.no_nccl_ep:
            if self.ranks.threads:
                self._not_run(f"{NCCL_EP} itself: it wants a process for each rank, not threads")
            else:
                direct, reason = self.together(NCCL_EP, lambda: self._direct(data))
                if direct is None:
                    self._not_run(f"{NCCL_EP}, {section.shape.name}: {reason}")
                else:
                    sides.append(direct)
                    self.report.software |= direct.api.versions()
        if any(side.name == "nccl" for side in sides) and self.ranks.size > 1:
            plain, reason = self.together(NCCL, lambda: self._plain(data))
            if plain is None:
                self._not_run(f"{NCCL}, {section.shape.name}: {reason}")
            else:
                sides.append(plain)
        self.report.sides += [side.name for side in sides if side.name not in self.report.sides]
        return sides

    def _library(self, name: str, data: Data) -> Library:
        num_sms = self.arguments.num_sms
        share = -(-self.ranks.size // self.report.devices)
        if num_sms == 0 and share > 1 and self.ranks.threads and isinstance(self.machine, CudaMachine):
            # Ranks wait for one another on the device: all of them must fit on it.
            with contextlib.suppress(UnsupportedError):
                each = self.machine.multiprocessors // share
                return Library(name, self.ranks, self.machine, data, self.sampling, each)
        return Library(name, self.ranks, self.machine, data, self.sampling, num_sms)

    def _direct(self, data: Data) -> Direct:
        assert isinstance(self.machine, CudaMachine)
        return Direct(
            self.ranks,
            self.machine,
            data,
            self.sampling,
            self.nccl_ep_sms,
            thorough=not self.arguments.quick,
        )

    def _plain(self, data: Data) -> SendReceive:
        assert isinstance(self.machine, CudaMachine)
        return SendReceive(self.ranks, self.machine, data, self.sampling)

    def _not_run(self, line: str) -> None:
        if line not in self.report.not_run:
            self.report.not_run.append(line)

    # ---- one operation -----------------------------------------------------------------------------------

    def _operation(self, data: Data, section: Section, sides: list[Side], operation: Operation) -> None:
        floors = [floor(data, operation, rank) for rank in range(self.ranks.size)]
        rates = self.report.rates
        least = max(floors, key=lambda found: found.microseconds(*rates))
        single = operation.verb == "step"
        moved = least.memory_bytes
        sets = 1 if single else min(self.ranks.gather(self.machine.sets(moved, 2 * moved)))
        cold = not single and self.machine.is_cold(moved, sets)
        row = Row(operation, least, least.microseconds(*rates), sets, cold)
        section.rows.append(row)
        for side in sides:
            figure = self._figure(side, operation, sets, section.shape)
            if figure is not None:
                row.figures[side.name] = figure
        medians = {name: figure.spread.median for name, figure in row.figures.items()}
        for figure in row.figures.values():
            if not self.report.shared_device:
                figure.goal = goal(
                    figure.side,
                    section.shape,
                    operation,
                    self.ranks.size,
                    str(self.report.device["name"]),
                    self.arguments.num_sms,
                    medians.get(NCCL_EP),
                    medians.get(NCCL),
                )
        if self.arguments.json is not None and self.ranks.rank == 0:
            self.arguments.json.write_text(dump(self.report))

    def _figure(self, side: Side, operation: Operation, sets: int, shape: Shape) -> Figure | None:
        """The best of the side's settings."""
        what = f"{side.name}, {operation.key}, {shape.tokens} tokens"
        best: Figure | None = None
        ways = iter(side.work(operation, sets))
        while True:
            work, reason = self.together(what, lambda: next(ways, None))
            if reason:
                self._not_run(reason)
                break
            if work is None:
                break
            figure, reason = self.together(what, lambda work=work: self._timed(side, operation, work))  # type: ignore[misc]
            if figure is None:
                self._failed(side, reason)
                break
            self._compare(side, what, work)
            if best is None or figure.spread.median < best.spread.median:
                best, figure.ways = figure, {} if best is None else best.ways
            best.ways[figure.way] = figure.spread.median
            if isinstance(side, Library) and operation.verb != "step" and not self.arguments.no_host:
                figure.host = self._host(side, work)
            del work
        return best

    def _timed(self, side: Side, operation: Operation, work: Work) -> Figure:
        spread = self.clock.time(work.calls, self.repeats, single=operation.verb == "step")
        return Figure(side.name, spread, work.way)

    def _compare(self, side: Side, what: str, work: Work) -> None:
        checks = Checks(f"rank {self.ranks.rank}: {what}{', ' + work.way if work.way else ''}")
        work.check(checks)
        for passed, nbytes, failed in self.ranks.gather([checks.passed, checks.nbytes, checks.failed]):
            self.report.passed += passed
            self.report.compared_bytes += nbytes
            if side.name in (NCCL_EP, NCCL):  # another project's: told, but no failure of ours
                self.report.notes += failed[:1]
            else:
                self.report.failed += failed

    def _failed(self, side: Side, reason: str) -> None:
        if side.name in (NCCL_EP, NCCL):
            self._not_run(reason)
        else:
            self.report.failed.append(reason)

    def _host(self, side: Library, work: Work) -> HostCall | None:
        if not isinstance(self.machine, CudaMachine):
            return None
        call = work.calls[0]
        python = self.clock.host_time(call)
        # Rank 0 makes the same call without the Python layer; the others must make it too.
        if self.ranks.rank == 0:
            with Recorder() as recorder:
                call()
            bare, idle = recorder.bare(), recorder.idle()
        else:
            call()
            bare, idle = call, lambda: None
        c = self.clock.host_time(bare) - self.clock.host_time(idle)
        launches = self.machine.nodes(call)
        self.ranks.meet()
        return HostCall(python, c, launches)

    def _findings(self, side: Side) -> None:
        if isinstance(side, Library):
            error = side.group.poll_error()
            for found in self.ranks.gather("" if error is None else str(error.exception())):
                if found:
                    self.report.failed.append(f"{side.name}: {found}")


def _transports(arguments: argparse.Namespace, ranks: Ranks, machine: Machine) -> list[str]:
    if arguments.transports is not None:
        return list(dict.fromkeys(arguments.transports.split(",")))
    if machine.kind == "cpu":
        return ["threads"]
    return ["peer"] if ranks.threads else list(TRANSPORTS)


def dump(report: Report) -> str:
    return json.dumps(document(report, NCCL_EP), indent=2, allow_nan=False) + "\n"
