"""Runs a Mixture-of-Experts layer, forward and backward, over ranks that are threads of this process: once in
BF16 and once in each other wire format. Prints side by side what crosses between the ranks, how long each
exchange takes here, and how far tokens, operands, output and gradients are from those of the BF16 layer.

Everything that arrives is compared, byte for byte, with what the codecs make of it on the spot. One byte that
differs fails the command.

Without --input the layer works on hidden states of a real transformer over real text (the input of a
feed-forward block of all-MiniLM-L6-v2) with a router computed from them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvte_ep.commands._checks import Checks
from nvte_ep.commands._moe import (
    Experts,
    Layer,
    Result,
    as_float32,
    make_gate,
    outputs_in_one_place,
    route,
    run_in_one_place,
)
from nvte_ep.commands._numerics import Error, Floats, bf16_bits
from nvte_ep.commands._ranks import STAGES, RankRun, Wire, num_steps, wires
from nvte_ep.commands._ranks import run as run_wire
from nvte_ep.commands._report import Progress, UsageError, pairs, print_json, size, table
from nvte_ep.formats import format_info, row_bytes

DATA = Path(__file__).resolve().parent.parent / "data" / "minilm_tokens.npz"
# Rounding once to BF16 leaves about 54 dB, and the layer rounds several times. Less than this is a fault.
BF16_LAYER_DB = 30.0
SMALLEST = 1e-12  # of the largest magnitude in a user's activations, and its inverse the largest

SQNR = {  # in the order of the report
    "tokens": "received tokens",
    "tokens_operand": "  operand, along H",
    "tokens_columnwise": "  operand, along tokens",
    "output": "output of the layer",
    "gradients": "received gradients",
    "gradients_operand": "  operand, along H",
    "gradients_columnwise": "  operand, along tokens",
    "grad_tokens": "gradient of the tokens",
    "grad_weights": "gradient of the top-k weights",
    "grad_experts": "gradient of the experts",
}
EXCHANGES = ("dispatch", "combine", "combine_backward", "dispatch_backward")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what the layer works on")
    what.add_argument(
        "--input",
        type=Path,
        metavar="X.npy",
        help="your own activations [T, H] (or [..., H]) of float16, float32 or BF16 (ml_dtypes or uint16), "
        "H a multiple of 32",
    )
    what.add_argument(
        "--gate",
        type=Path,
        metavar="G.npy",
        help="the router for --input, [experts, H]: logits = x @ G.T; without it one is made from the "
        "activations",
    )
    what.add_argument("--tokens", type=_positive, metavar="N", help="only the first N tokens")
    what.add_argument(
        "--experts",
        type=_positive,
        metavar="E",
        help="of all ranks, a multiple of --ranks (as many as --gate has; without it 64, or the most below "
        "that --ranks divides)",
    )
    what.add_argument("--top-k", type=_positive, metavar="K", help="experts of a token (8)")
    what.add_argument("--ffn", type=_positive, default=128, metavar="F", help="width of an expert (128)")
    what.add_argument("--seed", type=int, default=0, help="of experts and stochastic rounding (0)")
    how = parser.add_argument_group("how it runs")
    how.add_argument(
        "--ranks",
        type=_positive,
        default=4,
        metavar="N",
        help="threads of this process; the experts are divided evenly among them (4)",
    )
    how.add_argument(
        "--formats",
        metavar="LIST",
        help="comma-separated, of bf16, mxfp8, nvfp4, nvfp4+sr (all); bf16 always runs",
    )
    how.add_argument(
        "--alignment",
        type=_positive,
        default=128,
        metavar="A",
        help="slots of an expert are a multiple (128)",
    )
    how.add_argument("--repeat", type=_positive, default=3, metavar="N", help="timings of each exchange (3)")
    how.add_argument("--json", action="store_true", help="print JSON and nothing else")
    how.add_argument(
        "--progress", action="store_true", help="a progress bar even where stderr is no terminal"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return int(text)


# ---- what the layer works on ---------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    description: str
    router: str
    tokens: NDArray[Any]  # [T, H] uint16 (BF16), float16 or float32
    gate: Floats  # [E, H]


def _num_experts(arguments: argparse.Namespace) -> int:
    """64, or a little less where that does not divide over the ranks."""
    ranks: int = arguments.ranks
    return arguments.experts or max(64 // ranks * ranks, ranks)


def _own_data(arguments: argparse.Namespace) -> Data:
    with np.load(DATA, allow_pickle=False) as archive:
        tokens, gate = archive["hidden_states_bf16"], archive["gate"]
        metadata = json.loads(str(archive["metadata"]))
    experts = _num_experts(arguments)
    if experts > len(gate):
        raise UsageError(f"--experts: the data has a router of up to {len(gate)} experts, got {experts}")
    layer = metadata["arrays"]["hidden_states_bf16"]["layer"]
    return Data(
        f"real hidden states in BF16: {metadata['model'].split('/')[-1]}, layer {layer}, "
        f"input of the feed-forward block, over {len(metadata['texts'])} passages of English prose and verse",
        "computed from these states (k-means centroids), not a trained one",
        tokens,
        np.asarray(gate[:experts], np.float32),
    )


def _load(path: Path, option: str) -> NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:  # its own text may name the file again
        raise UsageError(f"{option}: {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{option}: {path}: {error}") from error
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{option}: {path}: expected one array (.npy), got an archive")
    if array.dtype.itemsize == 2 and array.dtype.kind == "V":  # how NumPy stores BF16 of ml_dtypes
        array = array.view(np.uint16)
    return array


def _users_data(arguments: argparse.Namespace) -> Data:
    path = arguments.input
    tokens = _load(path, "--input")
    if tokens.dtype == np.float64:
        tokens = tokens.astype(np.float32)
    if tokens.dtype not in (np.uint16, np.float16, np.float32):
        raise UsageError(f"--input: {path}: expected float16, float32 or BF16, got {tokens.dtype}")
    if tokens.ndim < 2:
        raise UsageError(f"--input: {path}: expected [T, H], got shape {tokens.shape}")
    tokens = np.ascontiguousarray(tokens.reshape(-1, tokens.shape[-1]))
    tokens = tokens[: arguments.tokens]
    if len(tokens) == 0:
        raise UsageError(f"--input: {path}: no tokens")
    states = as_float32(tokens)
    bad = np.flatnonzero(~np.isfinite(states).all(axis=1))
    if len(bad):
        raise UsageError(f"--input: {path}: {len(bad)} tokens hold NaN or Inf, the first is token {bad[0]}")
    largest = float(np.abs(states).max())
    if largest and not SMALLEST <= largest <= 1 / SMALLEST:
        raise UsageError(
            f"--input: {path}: the largest magnitude is {largest:.2g}; squares of such values leave FP32, in "
            f"which this layer computes: scale them to {SMALLEST:g} to {1 / SMALLEST:g}"
        )
    if arguments.gate is None:
        gate = make_gate(states, _num_experts(arguments), arguments.seed)
        router = "made for these states (random directions): routing is not your model's"
    else:
        gate = _load(arguments.gate, "--gate")
        gate = as_float32(gate) if gate.ndim == 2 else gate
        if gate.ndim != 2 or gate.shape[1] != tokens.shape[1]:
            raise UsageError(
                f"--gate: {arguments.gate}: expected [experts, {tokens.shape[1]}], got {gate.shape}"
            )
        if arguments.experts is not None and arguments.experts != len(gate):
            raise UsageError(f"--experts: the router has {len(gate)}, got {arguments.experts}")
        router = str(arguments.gate)
    kind = "bfloat16" if tokens.dtype == np.uint16 else str(tokens.dtype)
    return Data(f"{path}, {kind}", router, tokens, gate)


def _make_layer(arguments: argparse.Namespace) -> tuple[Data, Layer]:
    if arguments.input is None:
        if arguments.gate is not None:
            raise UsageError("--gate: only together with --input")
        data = _own_data(arguments)
        data = replace(data, tokens=data.tokens[: arguments.tokens])
    else:
        data = _users_data(arguments)
    num_tokens, hidden = data.tokens.shape
    experts, ranks = len(data.gate), arguments.ranks
    top_k = arguments.top_k or min(8, experts)
    multiple = max(max(info.hidden_multiple, info.operand_multiple) for info in format_info().values())
    if hidden % multiple:
        raise UsageError(f"--input: {arguments.input}: H must be a multiple of {multiple}, got {hidden}")
    if experts % ranks:
        if arguments.experts is None:  # then the router says how many
            raise UsageError(
                f"--ranks: must divide the {experts} experts of {arguments.gate or 'the router'}, got {ranks}"
            )
        raise UsageError(f"--experts: must divide evenly over {ranks} ranks, got {experts}")
    if top_k > experts:
        raise UsageError(f"--top-k: at most {experts}, the number of experts, got {top_k}")
    if arguments.alignment & (arguments.alignment - 1):
        raise UsageError(f"--alignment: a power of two, got {arguments.alignment}")
    _check_memory(num_tokens, top_k, hidden, experts, arguments)
    topk, weights = route(as_float32(data.tokens), data.gate, top_k)
    layer = Layer(
        tokens=np.array_split(data.tokens, ranks),
        topk=np.array_split(topk, ranks),
        weights=np.array_split(weights, ranks),
        experts=Experts(experts, hidden, arguments.ffn, arguments.seed),
        num_experts=experts,
        alignment=arguments.alignment,
    )
    return data, replace(layer, grads=np.array_split(_gradient(layer), ranks))


def _check_memory(
    num_tokens: int, top_k: int, hidden: int, experts: int, arguments: argparse.Namespace
) -> None:
    """Says so beforehand where it cannot fit, instead of being killed half-way."""
    slots = num_tokens * top_k + experts * arguments.alignment
    need = 60 * slots * hidden + 5 * 8 * experts * hidden * arguments.ffn
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > 0.8 * have:
        raise UsageError(
            f"this would take about {size(need)} of memory and the machine has {size(have)}: "
            "take fewer tokens (--tokens) or experts, or a smaller --ffn"
        )


def _gradient(layer: Layer) -> NDArray[np.uint16]:
    """Of the loss that has each token's output predict the next token, mean squared, in BF16: a gradient of
    real states, with their outlier channels, and the same for every wire format."""
    output = outputs_in_one_place(layer)
    tokens = np.concatenate([as_float32(part) for part in layer.tokens])
    return bf16_bits((output - np.roll(tokens, -1, axis=0)) * np.float32(2 / output.size))


# ---- running -------------------------------------------------------------------------------------


@dataclass
class WireReport:
    """What the report says about one wire format."""

    wire: Wire
    row_bytes: int
    sent: dict[str, int]  # bytes between ranks, of all ranks, per exchange
    milliseconds: dict[str, float]
    errors: dict[str, Error]
    checks: Checks


def _select(arguments: argparse.Namespace) -> list[Wire]:
    known = {wire.name: wire for wire in wires()}
    if arguments.formats is None:
        return list(known.values())
    names = [name.strip() for name in arguments.formats.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(f"--formats: expected {', '.join(known)}, got {', '.join(unknown) or 'nothing'}")
    return [wire for name, wire in known.items() if name in names or name == "bf16"]


def _compare(reference: Result, got: Result) -> dict[str, Error]:
    experts = [Error.between(a, b) for a, b in zip(reference.grad_experts, got.grad_experts, strict=True)]
    return {
        "output": Error.between(reference.output, got.output),
        "grad_tokens": Error.between(reference.grad_tokens, got.grad_tokens),
        "grad_weights": Error.between(reference.grad_weights, got.grad_weights),
        "grad_experts": sum(experts, Error()),
    }


def _summarise(wire: Wire, layer: Layer, runs: list[RankRun], errors: dict[str, Error]) -> WireReport:
    checks = Checks(wire.name)
    for rank in runs:
        checks.add(rank.checks)
        for name, error in rank.errors.items():
            errors[name] = errors.get(name, Error()) + error
    crossing = sum(rank.rows_from_peers for rank in runs)
    width, bf16_width = row_bytes(wire.format, layer.hidden), row_bytes("bf16", layer.hidden)
    sent = {
        name: crossing * (bf16_width if name in ("combine", "dispatch_backward") else width)
        for name in EXCHANGES
    }
    milliseconds = {}
    for stage in STAGES:
        per_rank = [rank.seconds[stage] for rank in runs if stage in rank.seconds]
        if per_rank:
            milliseconds[stage] = 1000 * statistics.median(map(max, zip(*per_rank, strict=True)))
    return WireReport(wire, width, sent, milliseconds, errors, checks)


def run_layer(
    layer: Layer, chosen: list[Wire], *, seed: int, repeat: int, progress: Progress
) -> list[WireReport]:
    """The layer in every chosen wire format. BF16 is held against the layer in one place and in FP32, and
    every other format against BF16."""
    reference = run_in_one_place(layer)
    progress.step("BF16")
    reports: list[WireReport] = []
    for wire in chosen:
        runs, result = run_wire(layer, wire, seed=seed, repeat=repeat, progress=progress.step)
        report = _summarise(wire, layer, runs, _compare(reference, result))
        if wire.name == "bf16":
            for name in _compare(reference, reference):
                found = report.errors[name].sqnr_db
                report.checks.true(
                    f"{name} == that of the layer in one place",
                    found >= BF16_LAYER_DB,
                    f"expected at least {BF16_LAYER_DB} dB, got {found:.1f}",
                )
            reference = result
        reports.append(report)
    return reports


# ---- the report ----------------------------------------------------------------------------------


def _decibels(error: Error | None) -> str:
    if error is None:
        return "-"
    return "exact" if math.isinf(error.sqnr_db) else f"{error.sqnr_db:.1f}"


def _load_text(layer: Layer) -> dict[str, Any]:
    slots, _ = layer.slots()
    counts = [count for part in slots for count in part.tokens_per_expert]
    return {
        "slots": sum(counts),
        "slots_with_padding": sum(part.total for part in slots),
        "tokens_per_expert": {
            "min": min(counts),
            "mean": statistics.fmean(counts),
            "max": max(counts),
        },
        "rows_between_ranks": sum(part.rows_from_peers(rank) for rank, part in enumerate(slots)),
    }


def _document(
    arguments: argparse.Namespace, data: Data, layer: Layer, reports: list[WireReport]
) -> dict[str, Any]:
    import nvte_ep

    def decibels(error: Error) -> float | str | None:  # JSON knows neither infinity nor NaN
        value = error.sqnr_db
        return value if math.isfinite(value) else "exact" if math.isinf(value) else None

    return {
        "command": "demo",
        "version": nvte_ep.version(),
        "ok": not any(report.checks.failed for report in reports),
        "data": {
            "description": data.description,
            "router": data.router,
            "tokens": len(data.tokens),
            "hidden": layer.hidden,
        },
        "layer": {
            "ranks": layer.num_ranks,
            "experts": layer.num_experts,
            "top_k": layer.top_k,
            "ffn": arguments.ffn,
            "alignment": layer.alignment,
            "seed": arguments.seed,
            "transport": "threads",
        },
        "routing": _load_text(layer),
        "repeat": arguments.repeat,
        "formats": [
            {
                "name": report.wire.name,
                "format": report.wire.format,
                "rounding_of_gradients": "stochastic" if report.wire.stochastic else "nearest",
                "row_bytes": report.row_bytes,
                "fewer_bytes_than_bf16": reports[0].row_bytes / report.row_bytes,
                "bytes_between_ranks": report.sent,
                "milliseconds": report.milliseconds,
                "compared_with": "the layer in one place, FP32" if report.wire.name == "bf16" else "bf16",
                "sqnr_db": {name: decibels(report.errors[name]) for name in SQNR if name in report.errors},
                "checks": {
                    "passed": report.checks.passed,
                    "bytes": report.checks.nbytes,
                    "failed": report.checks.failed,
                },
            }
            for report in reports
        ],
    }


def _print_report(arguments: argparse.Namespace, data: Data, layer: Layer, reports: list[WireReport]) -> None:
    load = _load_text(layer)
    spread = load["tokens_per_expert"]
    print("A Mixture-of-Experts layer, forward and backward")
    facts = [
        ("data", f"{data.description}: {len(data.tokens)} tokens, H = {layer.hidden}"),
        ("router", f"top {layer.top_k} of {layer.num_experts} experts, {data.router}"),
        (
            "experts",
            f"two-layer perceptrons of width {arguments.ffn} in FP32, random weights (seed {arguments.seed})",
        ),
        (
            "ranks",
            f"{layer.num_ranks} threads of this process, host memory; {load['slots']} slots, "
            f"{load['slots_with_padding']} with padding to {layer.alignment}; "
            f"{spread['min']} to {spread['max']} tokens an expert",
        ),
    ]
    print("\n".join(pairs(facts)))

    base = reports[0]
    rows: list[tuple[str, ...]] = [
        ("", *(report.wire.name for report in reports)),
        ("bytes",),
        ("a token on the wire", *(str(report.row_bytes) for report in reports)),
        ("  fewer than BF16", *(f"{base.row_bytes / report.row_bytes:.2f}x" for report in reports)),
    ]
    for exchange in EXCHANGES:
        name = f"{exchange.replace('_', ' ')}, all ranks"
        rows.append((name, *(size(report.sent[exchange]) for report in reports)))
    totals = [sum(report.sent.values()) for report in reports]
    rows.append(("all four", *(size(total) for total in totals)))
    rows.append(("  fewer than BF16", *(f"{totals[0] / total:.2f}x" if total else "-" for total in totals)))
    rows.append(("SQNR, dB",))
    for key, name in SQNR.items():
        rows.append((name, *(_decibels(report.errors.get(key)) for report in reports)))
    rows.append(("milliseconds here",))
    for stage in STAGES:
        shown = [report.milliseconds.get(stage) for report in reports]
        rows.append((stage.replace("_", " "), *("-" if ms is None else f"{ms:.1f}" for ms in shown)))
    rows.append(("checks",))
    rows.append(("passed", *(str(report.checks.passed) for report in reports)))
    rows.append(("failed", *(str(len(report.checks.failed)) for report in reports)))
    rows.append(("bytes compared", *(size(report.checks.nbytes) for report in reports)))
    print("\n" + "\n".join(table(rows)) + "\n")
    notes = [
        (
            "bytes",
            "between ranks: a row once to each rank that needs it; combine and dispatch backward travel "
            "in BF16",
        ),
        ("SQNR", "of BF16: against the same layer in one place and in FP32; of the others: against BF16"),
        (
            "time",
            f"of the host's reference code on {os.cpu_count()} CPUs: the slowest rank, median of "
            f"{arguments.repeat}; dispatch and combine backward include packing and making the operand. "
            "Nothing here tells the speed of a GPU",
        ),
    ]
    if any(report.wire.stochastic for report in reports):
        notes.append(
            ("nvfp4+sr", "rounds the gradients stochastically in combine backward, as training does")
        )
    print("\n".join(pairs(notes)))
    failed = [line for report in reports for line in report.checks.failed]
    passed = sum(report.checks.passed for report in reports)
    if failed:
        print(f"\nFAILED: {len(failed)} of {len(failed) + passed} checks")
        print("\n".join(f"  {line}" for line in failed[:20]))
        if len(failed) > 20:
            print(f"  and {len(failed) - 20} more (--json lists all)")
    else:
        print(f"\nOK: all {passed} checks passed")


def run(arguments: argparse.Namespace) -> int:
    chosen = _select(arguments)
    data, layer = _make_layer(arguments)
    steps = 1 + sum(num_steps(wire, arguments.repeat) for wire in chosen)
    with Progress(steps, shown=True if arguments.progress else None) as progress:
        reports = run_layer(layer, chosen, seed=arguments.seed, repeat=arguments.repeat, progress=progress)
    if arguments.json:
        print_json(_document(arguments, data, layer, reports))
    else:
        _print_report(arguments, data, layer, reports)
    return 1 if any(report.checks.failed for report in reports) else 0
