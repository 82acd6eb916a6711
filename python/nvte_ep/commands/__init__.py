"""The command line: nvte-ep doctor, demo, plan, bench. Also python -m nvte_ep."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from nvte_ep.commands._report import UsageError
from nvte_ep.errors import NvteEpError

# Each is a module here, with add_arguments(parser) and run(arguments) -> exit code.
COMMANDS = {
    "doctor": "what works on this machine, what does not, and the remedy",
    "demo": "an MoE layer, forward and backward, in every wire format: bytes, times, errors",
    "plan": "bytes, memory, floors and expected times for a model and a cluster that this machine is not",
    "bench": "what codecs and exchanges take on this machine, beside a copy and beside NCCL EP",
}

USAGE_ERROR = 2  # argparse's own


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nvte-ep",
        description="Expert-parallel dispatch and combine of MoE tokens in BF16, MXFP8 and NVFP4.",
    )
    parser.add_argument("--version", action="store_true", help="print the versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        module = importlib.import_module(f"{__name__}.{name}")
        command = commands.add_parser(
            name,
            help=text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def _limit_blas_threads() -> None:
    """The ranks of the demo are threads already: BLAS threads under each of them only fight for the cores.
    Works as long as NumPy is not imported, and leaves the user's own settings alone."""
    if "numpy" not in sys.modules:
        for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
            os.environ.setdefault(name, "1")


def _print_version() -> None:
    import nvte_ep

    print(f"nvte-ep {nvte_ep.__version__}, library {nvte_ep.version()} (ABI {nvte_ep.abi_version()})")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command: 0, or 1 where it failed. A wrong argument exits with 2, as argparse does."""
    _limit_blas_threads()
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    names = (arguments.command, getattr(arguments, "benchmark", None))
    command = " ".join(["nvte-ep", *filter(None, names)])
    arguments.argv = list(sys.argv[1:] if argv is None else argv)  # for a command that starts itself again
    if unknown:  # argparse itself would print the usage of nvte-ep, whatever the command
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if arguments.version:
            _print_version()
            return 0
        if arguments.command is None:
            parser.print_help(sys.stderr)
            return USAGE_ERROR
        return int(arguments.run(arguments))
    except UsageError as error:
        print(f"{command}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except NvteEpError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has gone: | head
        sys.stderr.close()
        return 0
