"""Times of prepare, dispatch, combine and their backwards over one rank or more, in every wire format, by
every transport that works here, with NCCL EP called directly in the same run as the peer to beat.

Ranks are processes, one for each GPU: --ranks N starts them, and torchrun, mpirun and srun do as well. With
--threads they are threads of this process, on one GPU or several, or on the host. What was received is
compared with the host backend on the timed buffers. Exit code 1: a byte differs, or an operation failed;
2: a wrong argument, or nothing could be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import platform
import sys
from pathlib import Path

import numpy as np

from nvte_ep import _cuda, job
from nvte_ep._dtypes import CPU, Device
from nvte_ep.commands._report import Progress, UsageError
from nvte_ep.commands.bench_codecs import CopyRate, check_files, device_argument
from nvte_ep.commands.bench_ep_clock import Clock, CudaClock, HostClock
from nvte_ep.commands.bench_ep_data import Operation, Shape, operations, step_operations
from nvte_ep.commands.bench_ep_library import Sampling
from nvte_ep.commands.bench_ep_nccl_ep import NAME as NCCL_EP
from nvte_ep.commands.bench_ep_output import document, markdown, plot, text
from nvte_ep.commands.bench_ep_rank import TRANSPORTS, Bench, dump
from nvte_ep.commands.bench_ep_ranks import Processes, Ranks, run_threads
from nvte_ep.commands.bench_ep_report import Report
from nvte_ep.commands.bench_instead import Frameworks
from nvte_ep.commands.bench_machine import CudaMachine, HostMachine, Machine, cuda_reason
from nvte_ep.errors import Status, UnsupportedError
from nvte_ep.formats import format_info
from nvte_ep.library import abi_version, version

LAYER = Shape(4096, 7168, 8, 64, 128)
DECODE = Shape(128, 7168, 8, 64, 16)
SHAPES = [LAYER, Shape(4096, 7168, 8, 256, 128), Shape(8192, 4096, 6, 64, 16), DECODE]
QUICK_SHAPES = [LAYER, DECODE]
HOST_SHAPES = [Shape(64, 256, 4, 16, 32)]
DECODE_TOKENS = 512  # whole steps are measured too up to here
REPEATS = {"cuda": (30, 10), "cpu": (5, 3)}  # and with --quick
COPY_BYTES = {"cuda": 4 * 10**9, "cpu": 10**8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    who = parser.add_argument_group("the ranks")
    who.add_argument("--ranks", type=int, metavar="N", help="how many (1, or those that a launcher started)")
    who.add_argument(
        "--threads",
        action="store_true",
        help="ranks are threads of this process: on GPUs by transport peer alone, on the host, where they "
        "are so in any case (--device cpu), by transport threads",
    )
    who.add_argument("--device", metavar="D", help="cuda or cpu (cuda where the library has it)")
    who.add_argument(
        "--transports",
        metavar="LIST",
        help=f"on GPUs of {', '.join(TRANSPORTS)}, on the host threads (all that work)",
    )
    who.add_argument("--no-nccl-ep", action="store_true", help="not NCCL EP itself beside them")
    who.add_argument(
        "--nccl-ep-sms",
        metavar="LIST",
        help="multiprocessors to try it with, 0 for its default; each takes it compilations "
        "(0,24 for rows, 0,132 for sums; --quick: 0, and 132)",
    )
    who.add_argument(
        "--num-sms", type=int, default=0, metavar="N", help="multiprocessors for every side (as it likes)"
    )
    what = parser.add_argument_group(
        "what is measured: lists are combined; without any, the usual shapes, or on the host a small one"
    )
    what.add_argument("--tokens", metavar="LIST", help="of a rank, e.g. 128,1024,4096,8192")
    what.add_argument("--hidden", metavar="LIST", help="elements of a token (7168; host: 256)")
    what.add_argument("--top-k", metavar="LIST", help="experts of a token (8; host: 4)")
    what.add_argument("--experts", metavar="LIST", help="of all ranks, e.g. 64,256 (64; host: 16)")
    what.add_argument("--alignment", metavar="LIST", help="slots of an expert are a multiple (128; host: 32)")
    what.add_argument(
        "--only", metavar="LIST", help='operations whose name contains one of these, e.g. "combine,nvfp4 ->"'
    )
    what.add_argument("--no-host", action="store_true", help="not the host time of calls")
    what.add_argument("--quick", action="store_true", help="two shapes, the main operations, few repeats")
    what.add_argument(
        "--check-all", action="store_true", help="compare every slot, not only those of some experts"
    )
    what.add_argument(
        "--link-gbps",
        type=float,
        default=380.0,
        metavar="G",
        help="GB/s between ranks, one direction, for the floor (380)",
    )
    how = parser.add_argument_group("output")
    how.add_argument("--json", type=Path, metavar="FILE", help="write every figure as JSON, as it comes")
    how.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    how.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="plot the times; .pdf and .svg too; needs matplotlib"
    )
    how.add_argument(
        "--progress",
        action="store_true",
        default=None,
        help="progress on standard error, also where that is no terminal",
    )


# ---- the arguments ---------------------------------------------------------------------------------------


def _numbers(option: str, value: str | None, otherwise: list[int], least: int = 1) -> list[int]:
    if value is None:
        return otherwise
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        numbers = [least - 1]
    if min(numbers) < least:
        raise UsageError(f"--{option}: expected numbers from {least} on, e.g. 128,4096, got {value!r}")
    return list(dict.fromkeys(numbers))


def _shapes(arguments: argparse.Namespace, kind: str, ranks: int) -> list[Shape]:
    lists = [getattr(arguments, name) for name in ("tokens", "hidden", "top_k", "experts", "alignment")]
    if all(value is None for value in lists):
        shapes = HOST_SHAPES if kind == "cpu" else QUICK_SHAPES if arguments.quick else SHAPES
    else:
        base = HOST_SHAPES[0] if kind == "cpu" else LAYER
        shapes = [
            Shape(tokens, hidden, top_k, experts, alignment)
            for experts in _numbers("experts", arguments.experts, [base.experts])
            for hidden in _numbers("hidden", arguments.hidden, [base.hidden])
            for top_k in _numbers("top-k", arguments.top_k, [base.top_k])
            for alignment in _numbers("alignment", arguments.alignment, [base.alignment])
            for tokens in _numbers("tokens", arguments.tokens, [base.tokens])
        ]
    multiple = max(info.operand_multiple for info in format_info().values())
    for shape in shapes:
        if shape.hidden % multiple:
            raise UsageError(f"--hidden: expected multiples of {multiple}, got {shape.hidden}")
        if shape.experts % ranks:
            raise UsageError(f"--experts: must divide evenly over {ranks} ranks, got {shape.experts}")
        if shape.top_k > shape.experts:
            raise UsageError(f"--top-k: at most {shape.experts}, the number of experts, got {shape.top_k}")
        if shape.alignment & (shape.alignment - 1):
            raise UsageError(f"--alignment: powers of two, got {shape.alignment}")
    return list(dict.fromkeys(shapes))


def _wanted(shape: Shape, arguments: argparse.Namespace) -> list[Operation]:
    small = shape.tokens <= DECODE_TOKENS
    found = [
        operation
        for operation in [*operations(), *(step_operations() if small else [])]
        if not operation.columnwise or shape.alignment >= format_info()[operation.wire].columnwise_alignment
    ]
    if arguments.only is not None:
        wanted = [part.strip() for part in arguments.only.split(",") if part.strip()]
        return [operation for operation in found if any(part in operation.key for part in wanted)]
    if arguments.quick and small:
        return [operation for operation in found if operation.verb in ("prepare", "step")]
    return [operation for operation in found if operation.principal or not arguments.quick]


def _check(arguments: argparse.Namespace) -> None:
    check_files(arguments)
    if arguments.only is not None:
        known = [operation.key for operation in [*operations(), *step_operations()]]
        for part in (part.strip() for part in arguments.only.split(",")):
            if not any(part in key for key in known):
                raise UsageError(f"--only: no operation is named like {part!r}; there are {', '.join(known)}")
    if arguments.transports is not None:
        for name in arguments.transports.split(","):
            if name not in (*TRANSPORTS, "threads"):
                raise UsageError(f"--transports: expected some of {', '.join(TRANSPORTS)}, got {name!r}")
    if arguments.ranks is not None and arguments.ranks < 1:
        raise UsageError(f"--ranks: expected 1 or more, got {arguments.ranks}")
    if not arguments.link_gbps > 0:
        raise UsageError(f"--link-gbps: expected more than 0, got {arguments.link_gbps:g}")
    if arguments.num_sms < 0:
        raise UsageError(f"--num-sms: expected 0 or more, got {arguments.num_sms}")
    _numbers("nccl-ep-sms", arguments.nccl_ep_sms, [0], 0)


def _software(machine: Machine) -> dict[str, str]:
    found = {"Python": platform.python_version(), "NumPy": np.__version__}
    if machine.kind == "cuda":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["cuda-bindings"] = importlib.metadata.version("cuda-bindings")
    return found


def _open(arguments: argparse.Namespace, ranks: Ranks) -> tuple[Machine, Clock, int]:
    """This rank's device, its clock, and on how many devices the ranks are."""
    device: Device | None = device_argument(arguments.device)
    reason = None if device == CPU else cuda_reason()
    if device == CPU or (device is None and reason is not None):
        host = HostMachine()
        return host, HostClock(host, ranks), 1
    if reason is not None:
        raise UnsupportedError(Status.UNSUPPORTED, f"no benchmark on a CUDA device: {reason}")
    count = _cuda.device_count()
    local = ranks.job.local_rank if isinstance(ranks, Processes) else ranks.rank
    first = device[1] if device else 0
    machine = CudaMachine((first + local) % count)
    local_size = ranks.job.local_size if isinstance(ranks, Processes) else ranks.size
    machines = -(-ranks.size // (local_size or ranks.size))
    return machine, CudaClock(machine, ranks), min(ranks.size, count * machines)


def measure(arguments: argparse.Namespace, ranks: Ranks) -> Report:
    machine, clock, devices = _open(arguments, ranks)
    shapes = _shapes(arguments, machine.kind, ranks.size)
    wanted = [(shape, _wanted(shape, arguments)) for shape in shapes]
    steps = sum(len(found) for _, found in wanted) + 1
    shown = arguments.progress if ranks.rank == 0 else False
    with Progress(steps, shown=shown) as progress:
        copy_gbps = ranks.broadcast(lambda: _copy_gbps(machine))
        progress.step("copy")
        report = Report(
            device=machine.describe(),
            software=_software(machine),
            library={"version": version(), "abi_version": abi_version()},
            ranks=ranks.size,
            threads=ranks.threads,
            devices=devices,
            num_sms=arguments.num_sms,
            copy_gbps=copy_gbps,
            link_gbps=arguments.link_gbps if machine.kind == "cuda" else None,
        )
        if machine.kind == "cpu" and shapes == HOST_SHAPES:
            report.notes.append(
                "the host is measured with a small shape, not those of a GPU: --tokens, --hidden, --top-k, "
                "--experts and --alignment give others"
            )
        bench = Bench(
            arguments,
            ranks,
            machine,
            clock,
            report,
            progress,
            REPEATS[machine.kind][bool(arguments.quick)],
            Sampling(slabs=0 if arguments.check_all else 4),
            _numbers(
                "nccl-ep-sms",
                arguments.nccl_ep_sms,
                [arguments.num_sms] if arguments.num_sms else [],
                0,
            ),
        )
        for shape, found in wanted:
            bench.shape(shape, found)
    return report


def _copy_gbps(machine: Machine) -> float:
    """GB/s read and written by the fastest of some copies."""
    nbytes = min(COPY_BYTES[machine.kind], machine.free_bytes() // 8)
    if isinstance(machine, CudaMachine):
        return machine.copy_gbps(nbytes)
    return CopyRate(machine, Frameworks(machine, wanted=False), nbytes, 5).of(nbytes).gbps


# ---- all ranks -------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    with job.Job.from_environment() as ranks:
        # On the host ranks are threads: there is no transport of host memory between processes.
        if arguments.threads or device_argument(arguments.device) == CPU:
            if ranks.size > 1:
                raise UsageError(f"ranks are threads here, and {ranks.launcher} has started processes")
            reports = run_threads(arguments.ranks or 1, lambda member: measure(arguments, member))
            return _finish(arguments, reports[0])
        if max(ranks.size, arguments.ranks or 1) > 1:
            reason = cuda_reason()
            if reason is not None:
                raise UsageError(f"ranks as processes need a GPU: {reason}; use --threads")
        if ranks.size == 1 and (arguments.ranks or 1) > 1:
            return _launch(arguments)
        if arguments.ranks not in (None, ranks.size):
            raise UsageError(
                f"--ranks: {ranks.launcher} started {ranks.size} processes, got {arguments.ranks}"
            )
        report = measure(arguments, Processes(ranks))
        # One rank speaks for all: who starts ranks may end the others when one of them fails.
        return _finish(arguments, report) if ranks.rank == 0 else 0


def _launch(arguments: argparse.Namespace) -> int:
    """This command again as the ranks of a job; rank 0 prints and writes."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *(path for path in sys.path if path and path != package)]
    environment = {"PYTHONPATH": ":".join(paths)}
    if cuda_reason() is None and _cuda.device_count() < arguments.ranks:
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    command = [sys.executable, "-m", "nvte_ep", *arguments.argv]
    return job.launch(command, arguments.ranks, environment=environment)


def _finish(arguments: argparse.Namespace, report: Report) -> int:
    if arguments.json is not None:
        arguments.json.write_text(dump(report))
    if report.nothing:
        raise UsageError(f"nothing was measured: {'; '.join(report.not_run)}")
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(report, NCCL_EP))
    if arguments.plot is not None:
        plot([document(report, NCCL_EP)], arguments.plot)
    for line in text(report, NCCL_EP):
        print(line)
    return 1 if report.failed else 0
