"""Measurements on this machine. `nvte-ep bench codecs --help` has the options of one."""

from __future__ import annotations

import argparse
import importlib

# Each is a module bench_<name> here, with add_arguments(parser) and run(arguments) -> exit code.
BENCHMARKS = {
    "codecs": "every codec by size: time, GB/s, share of a copy's rate, and what PyTorch and Triton take",
    "ep": "dispatch, combine and their backwards, over one rank or more, beside NCCL EP",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, text in BENCHMARKS.items():
        module = importlib.import_module(f"nvte_ep.commands.bench_{name}")
        benchmark = benchmarks.add_parser(
            name,
            help=text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(benchmark)
        benchmark.set_defaults(run_benchmark=module.run, parser=benchmark)


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.run_benchmark(arguments))
