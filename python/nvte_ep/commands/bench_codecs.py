"""Time and GB/s of every codec by size, beside a copy of as many bytes and beside what PyTorch and Triton
have for the job, with a check of the timed buffers against the host backend.

A rate counts the fewest bytes that must move: each input read once, each output written once. Buffers rotate,
so that nothing comes from the cache by accident; rows marked * are too small for that. Exit code 1: a byte
differs, or a codec failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from nvte_ep._dtypes import Device, parse_device
from nvte_ep.commands._checks import Checks
from nvte_ep.commands._report import Progress, UsageError, size
from nvte_ep.commands.bench_cases import Case, Data, Run, all_cases
from nvte_ep.commands.bench_instead import Frameworks, instead_of
from nvte_ep.commands.bench_machine import Call, Machine, Timing, open_machine
from nvte_ep.commands.bench_output import Copy, Report, Result, document, markdown, plot, text
from nvte_ep.errors import InvalidArgumentError, NvteEpError, OutOfMemoryError, Status
from nvte_ep.formats import format_info
from nvte_ep.library import abi_version, version

GIGABYTE = 10**9
# Powers of four from a decode batch on; on a device a gigabyte of BF16 too. The host is no fast path.
SIZES = {"cuda": (16, 64, 256, 1024, 4096, 16384), "cpu": (16, 256, 4096)}
QUICK_SIZES = {"cuda": (16, 4096), "cpu": (16, 256)}
REPEATS = {False: 20, True: 5}  # by --quick
PEAK_BYTES = {"cuda": 4 * GIGABYTE, "cpu": GIGABYTE // 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--device", metavar="D", help="cuda, cuda:1, ... or cpu (cuda where the library has it)"
    )
    what.add_argument(
        "--sizes", metavar="LIST", help="tokens, e.g. 16,4096 (16 to a gigabyte of BF16; cpu: 16 to 4096)"
    )
    what.add_argument("--hidden", type=int, default=7168, metavar="H", help="elements of a token (7168)")
    what.add_argument(
        "--only", metavar="LIST", help="codecs whose name contains one of these, e.g. nvfp4_pack"
    )
    what.add_argument("--no-instead", action="store_true", help="not what PyTorch and Triton take")
    what.add_argument("--quick", action="store_true", help="two sizes, few repeats: a first look")
    how = parser.add_argument_group("output")
    how.add_argument("--json", type=Path, metavar="FILE", help="write every figure as JSON")
    how.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    how.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="plot the rates; .pdf and .svg too; needs matplotlib"
    )
    how.add_argument(
        "--progress",
        action="store_true",
        default=None,
        help="progress on standard error, also where that is no terminal",
    )


# ---- the arguments ---------------------------------------------------------------------------------------


def device_argument(argument: str | None) -> Device | None:
    if argument is None:
        return None
    try:
        return parse_device("nvte-ep bench", argument)
    except InvalidArgumentError as error:
        raise UsageError(f"--device: expected cuda, cuda:<index> or cpu, got {argument!r}") from error


def _sizes(arguments: argparse.Namespace, kind: str) -> list[int]:
    if arguments.sizes is None:
        default = list((QUICK_SIZES if arguments.quick else SIZES)[kind])
        if kind == "cuda":
            default.append(gigabyte_tokens(arguments.hidden))
        return default
    try:
        sizes = [int(part) for part in arguments.sizes.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise UsageError(f"--sizes: expected numbers of tokens, e.g. 16,4096, got {arguments.sizes!r}")
    return sorted(set(sizes))


def gigabyte_tokens(hidden: int) -> int:
    """The smallest power of two of tokens whose BF16 elements are a gigabyte or more."""
    return 1 << max(-(-GIGABYTE // (2 * hidden)) - 1, 1).bit_length()


def _cases(only: str | None) -> list[Case]:
    cases = all_cases()
    if only is None:
        return cases
    wanted = [part.strip() for part in only.split(",") if part.strip()]
    for part in wanted:
        if not any(part in case.name for case in cases):
            names = ", ".join(case.name for case in cases)
            raise UsageError(f"--only: no codec is named like {part!r}; there are {names}")
    return [case for case in cases if any(part in case.name for part in wanted)]


def _check(arguments: argparse.Namespace) -> None:
    multiple = max(info.operand_multiple for info in format_info().values())
    if arguments.hidden < multiple or arguments.hidden % multiple:
        raise UsageError(f"--hidden: expected a multiple of {multiple}, got {arguments.hidden}")
    check_files(arguments)


def check_files(arguments: argparse.Namespace) -> None:
    """That --json, --markdown and --plot can be written in the end."""
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed here: pip install matplotlib")
    for file in (arguments.json, arguments.markdown, arguments.plot):
        if file is not None and not file.resolve().parent.is_dir():
            raise UsageError(f"{file}: there is no folder {file.resolve().parent}")


# ---- the measurement -------------------------------------------------------------------------------------


class CopyRate:
    """Times of plain copies, by the number of bytes that they read and write."""

    def __init__(self, machine: Machine, frameworks: Frameworks, most: int, repeats: int) -> None:
        self.machine, self.frameworks, self.repeats = machine, frameworks, repeats
        # Room for the largest copy twice, and for small ones to rotate past the cache.
        self.room = max(2 * _half(most), machine.cache_bytes)
        noise = np.random.default_rng(1).integers(0, 256, 1 << 24, np.uint8)
        self.source = machine.filled((self.room,), "uint8", noise)
        self.target = machine.poisoned((self.room,), "uint8")
        self.known: dict[int, Copy] = {}

    def of(self, nbytes: int) -> Copy:
        """The fastest copy of half as many bytes, which are read and written."""
        if nbytes not in self.known:
            self.known[nbytes] = self.measure(nbytes)
        return self.known[nbytes]

    def measure(self, nbytes: int) -> Copy:
        half = _half(nbytes)
        sets = min(self.room // half, self.machine.max_sets)
        pieces = [slice(index * half, (index + 1) * half) for index in range(sets)]
        pairs = [(self.target[piece], self.source[piece]) for piece in pieces]
        name = "cudaMemcpyAsync" if self.machine.kind == "cuda" else "numpy.copyto"
        ways: dict[str, list[Call]] = {name: [partial(self.machine.copy, *pair) for pair in pairs]}
        with self.frameworks.on_stream():
            if self.frameworks.copies_by_kernel:
                ways["a copy kernel"] = [self.frameworks.copy_kernel(*pair) for pair in pairs]
            timings = {way: self.machine.time(calls, self.repeats) for way, calls in ways.items()}
        best = min(timings, key=lambda way: timings[way].median)
        return Copy(2 * half, best, timings[best])


def _half(nbytes: int) -> int:
    """Bytes to copy where a codec moves so many; a multiple of 16, as every vector load likes it."""
    return max(-(-nbytes // 32) * 16, 16)


@dataclass
class Bench:
    """What every measurement of a run shares."""

    machine: Machine
    frameworks: Frameworks
    data: Data
    copies: CopyRate
    repeats: int
    report: Report

    def measure(self, case: Case, tokens: int) -> None:
        machine, hidden = self.machine, self.data.hidden
        moved = case.moved(tokens, hidden)
        sets = machine.sets(moved.total, case.held(tokens, hidden))
        run = case.start(machine, self.data, tokens, sets)
        timing = machine.time(run.calls, self.repeats)
        checks = Checks(f"{case.name}, {tokens} tokens")
        run.check(checks, np.random.default_rng(tokens))
        self.report.passed += checks.passed
        self.report.compared_bytes += checks.nbytes
        self.report.failed += checks.failed
        self.report.results.append(
            Result(
                codec=case.name,
                format=case.format,
                formula=case.formula,
                tokens=tokens,
                hidden=hidden,
                moved=moved,
                sets=sets,
                cold=machine.is_cold(moved.total, sets),
                timing=timing,
                copy=self.copies.of(moved.total),
                instead=list(self._instead(case, tokens, run)),
            )
        )

    def _instead(self, case: Case, tokens: int, run: Run) -> Iterator[tuple[str, str, Timing]]:
        for make in instead_of(run, self.data, self.frameworks):
            try:
                with self.frameworks.on_stream():
                    way = make()
                    timing = self.machine.time(way.calls, self.repeats)
            except Exception as error:  # of another project's: no reason to do without our figures
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                self.report.not_run.append(f"beside {case.name}, {tokens} tokens: {reason}")
            else:
                yield way.name, way.what, timing


def _work(cases: list[Case], sizes: Sequence[int], hidden: int, machine: Machine) -> list[tuple[Case, int]]:
    """Each codec with each of its sizes; OutOfMemoryError where one does not fit."""
    work = [(case, tokens) for case in cases for tokens in case.sizes(sizes, hidden)]
    for case, tokens in work:
        # The buffers, a copy of as many bytes, and what stands in for the codec.
        needed, free = 4 * case.held(tokens, hidden), machine.free_bytes()
        if needed > free:
            raise OutOfMemoryError(
                Status.OUT_OF_MEMORY,
                f"{case.name} of {tokens} tokens takes {size(needed)} and {size(free)} are free: see --sizes",
            )
    return work


def _software(frameworks: Frameworks, machine: Machine) -> dict[str, str]:
    found = {"Python": platform.python_version(), "NumPy": np.__version__}
    if machine.kind == "cuda":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["cuda-bindings"] = importlib.metadata.version("cuda-bindings")
    return found | frameworks.versions()


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    cases = _cases(arguments.only)
    machine = open_machine(device_argument(arguments.device))
    sizes = _sizes(arguments, machine.kind)
    work = _work(cases, sizes, arguments.hidden, machine)
    repeats = REPEATS[arguments.quick]
    with Progress(len(work) + 2, shown=arguments.progress) as progress:
        frameworks = Frameworks(machine, wanted=not arguments.no_instead)
        data = Data(arguments.hidden, max(sizes))
        progress.step("frameworks")
        peak = min(PEAK_BYTES[machine.kind], machine.free_bytes() // 8)
        most = max(peak, *(case.moved(tokens, arguments.hidden).total for case, tokens in work))
        copies = CopyRate(machine, frameworks, most, repeats)
        report = Report(
            device=machine.describe(),
            software=_software(frameworks, machine),
            library={"version": version(), "abi_version": abi_version()},
            peak=copies.of(peak),
        )
        progress.step("copy")
        bench = Bench(machine, frameworks, data, copies, repeats, report)
        for case, tokens in work:
            try:
                bench.measure(case, tokens)
            except (NvteEpError, KeyboardInterrupt) as error:  # what was measured so far still counts
                report.failed.append(f"{case.name}, {tokens} tokens: {str(error) or 'interrupted'}")
                break
            progress.step(f"{case.name} of {tokens}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document(report), indent=2, allow_nan=False) + "\n")
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(report))
    if arguments.plot is not None:
        plot(report, arguments.plot)
    for line in text(report):
        print(line)
    return 1 if report.failed else 0
