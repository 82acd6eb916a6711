"""The figures of `nvte-ep bench codecs` as a table, as JSON, as Markdown and as a plot."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from nvte_ep.commands._report import machine_line, size, software_line, table
from nvte_ep.commands.bench_cases import Moved
from nvte_ep.commands.bench_machine import Timing

SCHEMA = 1  # of the JSON; a change that breaks a reader counts it up


@dataclass(frozen=True)
class Copy:
    """The fastest plain copy that reads and writes this many bytes together."""

    nbytes: int
    method: str
    timing: Timing

    @property
    def gbps(self) -> float:
        return self.nbytes / self.timing.median / 1e3


@dataclass
class Result:
    """One codec at one size."""

    codec: str
    format: str
    formula: str
    tokens: int
    hidden: int
    moved: Moved
    sets: int
    cold: bool  # nothing can have come from the cache
    timing: Timing
    copy: Copy
    instead: list[tuple[str, str, Timing]] = field(default_factory=list)  # name, what it is

    @property
    def gbps(self) -> float:
        return self.moved.total / self.timing.median / 1e3

    @property
    def share(self) -> float:
        """Of the rate of a copy of as many bytes."""
        return self.copy.timing.median / self.timing.median


@dataclass
class Report:
    """A whole run."""

    device: dict[str, Any]
    software: dict[str, str]
    library: dict[str, Any]
    peak: Copy  # at a size where starting it costs nothing
    results: list[Result] = field(default_factory=list)
    compared_bytes: int = 0
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)  # of what stands in for codecs


# ---- JSON ------------------------------------------------------------------------------------------------


def _timing(timing: Timing) -> dict[str, Any]:
    low, high = timing.quartiles
    return {
        "median": timing.median,
        "quartiles": [low, high],
        "least": min(timing.samples),
        "samples": len(timing.samples),
        "calls_per_sample": timing.calls,
    }


def _copy(copy: Copy) -> dict[str, Any]:
    return {
        "bytes": copy.nbytes,
        "method": copy.method,
        "microseconds": _timing(copy.timing),
        "gbps": copy.gbps,
    }


def document(report: Report) -> dict[str, Any]:
    """Times in microseconds, rates in GB/s (10^9 bytes read and written), shares of 1."""
    return {
        "schema": SCHEMA,
        "benchmark": "codecs",
        "ok": not report.failed,
        "library": report.library,
        "device": report.device,
        "software": report.software,
        "peak_copy": _copy(report.peak),
        "checks": {
            "passed": report.passed,
            "compared_bytes": report.compared_bytes,
            "failed": report.failed,
        },
        "not_run": report.not_run,
        "results": [
            {
                "codec": result.codec,
                "format": result.format,
                "tokens": result.tokens,
                "hidden": result.hidden,
                "fewest_bytes": {
                    "formula": result.formula,
                    "read": result.moved.reads,
                    "written": result.moved.writes,
                    "total": result.moved.total,
                },
                "buffer_sets": result.sets,
                "cold": result.cold,
                "microseconds": _timing(result.timing),
                "call_microseconds": result.timing.call_microseconds,
                "gbps": result.gbps,
                "copy": _copy(result.copy),
                "share_of_copy": result.share,
                "share_of_peak_copy": result.gbps / report.peak.gbps,
                "instead": [
                    {"name": name, "what": what, "microseconds": _timing(timing)}
                    for name, what, timing in result.instead
                ],
            }
            for result in report.results
        ],
    }


# ---- text ------------------------------------------------------------------------------------------------


def where(report: Report) -> list[str]:
    """Lines that say what ran where."""
    peak = report.peak
    return [
        f"nvte_ep {report.library['version']} on {machine_line(report.device)}",
        software_line(report.software),
        f"largest copy: {peak.gbps:.0f} GB/s, read + written ({peak.method}, {size(peak.nbytes)})",
    ]


def legend(report: Report) -> list[str]:
    """What the columns mean."""
    lines = [
        "GB/s of the fewest bytes that must move; of copy: that rate over the rate of",
        "a copy of as many bytes; spread: distance of the quartiles over the median;",
        "H, P, S: elements, payload and scale bytes of a token; R, r: of a packed row",
        "with and without its padding. torch, triton: times of what stands in for it.",
    ]
    if report.device["kind"] == "cuda":
        lines.append("call: host time of a call from Python. *: may have come from the cache.")
    else:
        lines.append("The copy is NumPy's, on one thread. *: may have come from the cache.")
    return lines


def _microseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1e4 else f"{value:.0f}"


def _columns(report: Report) -> list[str]:
    names = list(dict.fromkeys(name for result in report.results for name, _, _ in result.instead))
    call = ["call us"] if report.device["kind"] == "cuda" else []
    return ["tokens", "us", "spread", "GB/s", "of copy", *call, *(f"{name} us" for name in names)]


def _cells(result: Result, columns: Sequence[str]) -> list[str]:
    values = {
        "tokens": f"{result.tokens}{'' if result.cold else '*'}",
        "us": _microseconds(result.timing.median),
        "spread": f"{result.timing.spread:.1%}",
        "GB/s": f"{result.gbps:.0f}" if result.gbps >= 100 else f"{result.gbps:.3g}",
        "of copy": f"{result.share:.0%}" if result.share >= 0.1 else f"{result.share:.1%}",
        "call us": _microseconds(result.timing.call_microseconds),
    }
    values |= {f"{name} us": _microseconds(timing.median) for name, _, timing in result.instead}
    return [values.get(column, "-") for column in columns]


def _stand_ins(results: Sequence[Result]) -> list[str]:
    named = dict.fromkeys((name, what) for result in results for name, what, _ in result.instead)
    return [f"{name}: {what}" for name, what in named]


def text(report: Report) -> list[str]:
    """The table of a terminal."""
    columns = _columns(report)
    rows: list[list[str]] = [columns]
    for codec, group in groupby(report.results, key=lambda result: result.codec):
        results = list(group)
        rows.append([f"{codec}, {results[0].formula} bytes"])
        rows += [[f"  {line}"] for line in _stand_ins(results)]
        rows += [_cells(result, columns) for result in results]
    return [*where(report), *legend(report), "", *table(rows), "", *verdict(report)]


def verdict(report: Report) -> list[str]:
    compared = f"{report.passed} comparisons with the host backend, {size(report.compared_bytes)}"
    skipped = [f"not run: {line}" for line in report.not_run]
    if not report.failed:
        return [*skipped, f"OK: {compared}, every byte equal"]
    return [*skipped, f"FAILED: {compared} equal, but:", *(f"  {line}" for line in report.failed[:20])]


def markdown(report: Report) -> str:
    """The same as Markdown."""
    columns = _columns(report)
    lines = ["# Codecs", "", *(f"- {line}" for line in where(report)), "", " ".join(legend(report)), ""]
    for codec, group in groupby(report.results, key=lambda result: result.codec):
        results = list(group)
        lines += [f"## {codec}", "", f"Fewest bytes: {results[0].formula}.", ""]
        lines += [f"- {line}" for line in _stand_ins(results)]
        lines += [""] if _stand_ins(results) else []
        lines.append("| " + " | ".join(columns) + " |")
        lines.append("|" + " --: |" * len(columns))
        lines += ["| " + " | ".join(_cells(result, columns)).replace("*", "\\*") + " |" for result in results]
        lines.append("")
    return "\n".join([*lines, *verdict(report), ""])


# ---- plot ------------------------------------------------------------------------------------------------


def plot(report: Report, file: Path) -> None:
    """Rate over bytes: a panel for each format, the copy in each."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    formats = list(dict.fromkeys(result.format for result in report.results))
    figure, axes = pyplot.subplots(
        1, len(formats), figsize=(7 * len(formats), 5.5), sharey=True, squeeze=False
    )
    for axis, format in zip(axes[0], formats, strict=True):
        mine = [result for result in report.results if result.format == format]
        copies = sorted({(result.copy.nbytes, result.copy.gbps) for result in mine})
        axis.plot(*zip(*copies, strict=True), color="black", linewidth=2, label="copy of as many bytes")
        for codec, group in groupby(mine, key=lambda result: result.codec):
            points = sorted((result.moved.total, result.gbps) for result in group)
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=codec)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(format)
        axis.set_xlabel("fewest bytes that must move")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    axes[0][0].set_ylabel("GB/s")
    figure.suptitle(where(report)[0])
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
