"""Time and GB/s of every codec by size, beside a copy of as many bytes and beside what PyTorch and Triton have for
the job, with a check of the timed buffers against the host backend.

A rate counts the fewest bytes that must move: each input read once, each output written once. Buffers rotate, so
that nothing comes from the cache by accident; rows marked * are too small for that. Exit code 1: a byte differs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nvte_ep import _cuda
from nvte_ep._dtypes import CPU, CUDA_TYPE, Device, parse_device
from nvte_ep.commands._checks import Checks
from nvte_ep.commands._report import Progress, UsageError, size
from nvte_ep.commands.bench_cases import Case, Data, all_cases
from nvte_ep.commands.bench_instead import Frameworks, instead_of
from nvte_ep.commands.bench_machine import Machine, Timing, open_machine
from nvte_ep.commands.bench_output import Copy, Report, Result, document, markdown, plot, text
from nvte_ep.errors import InvalidArgumentError, OutOfMemoryError, Status
from nvte_ep.formats import format_info
from nvte_ep.library import abi_version, version

GIGABYTE = 10**9
# Powers of four from a decode batch on; the largest is a gigabyte of BF16 on a device. The host is no fast path.
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


def _device(argument: str | None) -> Device | None:
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
        self.room = max(2 * _half(most), 2 * machine.cache_bytes)
        noise = np.random.default_rng(1).integers(0, 256, 1 << 24, np.uint8)
        self.source = machine.filled((self.room,), "uint8", noise)
        self.target = machine.poisoned((self.room,), "uint8")
        self.known: dict[int, Copy] = {}

    def of(self, nbytes: int) -> Copy:
        """The fastest copy of half as many bytes, which are read and written."""
        if nbytes not in self.known:
            self.known[nbytes] = self._measure(nbytes)
        return self.known[nbytes]

    def _measure(self, nbytes: int) -> Copy:
        half = _half(nbytes)
        sets = min(self.room // half, self.machine.max_sets)
        pieces = [
            (self.target[i * half : (i + 1) * half], self.source[i * half : (i + 1) * half])
            for i in range(sets)
        ]
        machine = self.machine
        name = "cudaMemcpyAsync" if machine.kind == "cuda" else "numpy.copyto"
        ways = {name: [lambda pair=pair: machine.copy(*pair) for pair in pieces]}
        with self.frameworks.on_stream():
            kernels = [self.frameworks.copy_kernel(*pair) for pair in pieces]
            ways["kernel"] = [kernel for kernel in kernels if kernel is not None]
            timings = {way: machine.time(calls, self.repeats) for way, calls in ways.items() if calls}
        best = min(timings, key=lambda way: timings[way].median)
        return Copy(2 * half, best, timings[best])


def _half(nbytes: int) -> int:
    return max(-(-nbytes // 32) * 16, 16)


def _measure(
    case: Case,
    tokens: int,
    data: Data,
    machine: Machine,
    frameworks: Frameworks,
    copies: CopyRate,
    repeats: int,
    report: Report,
) -> Result:
    moved, held = case.moved(tokens, data.hidden), case.held(tokens, data.hidden)
    if held > machine.free_bytes():
        raise OutOfMemoryError(
            Status.OUT_OF_MEMORY,
            f"{case.name} of {tokens} tokens needs {size(held)}, {size(machine.free_bytes())} are free: "
            "see --sizes",
        )
    sets = machine.sets(moved.total, held)
    run = case.start(machine, data, tokens, sets)
    timing = machine.time(run.calls, repeats)
    checks = Checks(f"{case.name}, {tokens} tokens")
    run.check(checks, np.random.default_rng(tokens))
    report.passed += checks.passed
    report.compared_bytes += checks.nbytes
    report.failed += checks.failed
    result = Result(
        case.name,
        case.format,
        case.formula,
        tokens,
        data.hidden,
        moved,
        sets,
        machine.is_cold(moved.total, sets),
        timing,
        copies.of(moved.total),
    )
    for make in instead_of(run, data, frameworks):
        result.instead.append(_time_instead(make, machine, frameworks, repeats))
    return result


def _time_instead(
    make: object, machine: Machine, frameworks: Frameworks, repeats: int
) -> tuple[str, str, Timing]:
    with frameworks.on_stream():
        way = make()  # type: ignore[operator]
        return way.name, way.what, machine.time(way.calls, repeats)
