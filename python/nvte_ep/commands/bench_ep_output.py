"""The figures of `nvte-ep bench ep` as a table, as JSON, as Markdown and as a plot."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from nvte_ep.commands._report import machine_line, size, software_line, table
from nvte_ep.commands.bench_ep_clock import Spread
from nvte_ep.commands.bench_ep_data import Shape
from nvte_ep.commands.bench_ep_goals import PYTHON_CALL, host_goal
from nvte_ep.commands.bench_ep_growth import Growth, growth
from nvte_ep.commands.bench_ep_report import Figure, Report, Row, Section

SCHEMA = 1  # of the JSON; a change that breaks a reader counts it up

# ---- JSON ------------------------------------------------------------------------------------------------


def _spread(spread: Spread) -> dict[str, Any]:
    low, high = spread.range
    return {
        "median": spread.median,
        "10_percent": low,
        "90_percent": high,
        "samples": len(spread.samples),
        "calls_per_sample": spread.calls,
    }


def _figure(row: Row, figure: Figure, direct: Figure | None) -> dict[str, Any]:
    host = figure.host
    return {
        "microseconds": _spread(figure.spread),
        "way": figure.way,
        "ways": figure.ways,
        "over_floor": figure.spread.median / row.floor_microseconds,
        "nccl_ep_over_it": None if direct is None else direct.spread.median / figure.spread.median,
        "host": None
        if host is None
        else asdict(host) | {"c_goal": host_goal(host.launches), "python_goal_over_c": PYTHON_CALL},
        "goal": None if figure.goal is None else asdict(figure.goal) | {"passed": figure.passed},
    }


def document(report: Report, peer: str) -> dict[str, Any]:
    """Times in microseconds, of the slowest rank; rates in GB/s (10^9 bytes)."""
    return {
        "schema": SCHEMA,
        "benchmark": "ep",
        "ok": not report.failed and not report.nothing,
        "library": report.library,
        "device": report.device,
        "software": report.software,
        "ranks": {
            "number": report.ranks,
            "are": "threads of one process" if report.threads else "processes",
            "devices": report.devices,
            "num_sms": report.num_sms,
        },
        "rates": {"copy_gbps": report.copy_gbps, "link_gbps": report.link_gbps},
        "checks": {
            "passed": report.passed,
            "compared_bytes": report.compared_bytes,
            "failed": report.failed,
        },
        "not_run": report.not_run,
        "notes": report.notes,
        "shapes": [
            {
                **asdict(section.shape),
                "slots": section.slots,
                "memory": section.memory,
                "operations": [
                    {
                        "operation": row.operation.key,
                        **asdict(row.operation),
                        "fewest_bytes": asdict(row.floor),
                        "floor_microseconds": row.floor_microseconds,
                        "buffer_sets": row.sets,
                        "cold": row.cold,
                        "figures": {
                            side: _figure(row, figure, row.figures.get(peer) if side != peer else None)
                            for side, figure in row.figures.items()
                        },
                    }
                    for row in section.rows
                ],
            }
            for section in report.sections
        ],
        "growth": [asdict(found) | {"passed": found.passed} for found in growth(report.sections)],
    }


# ---- text ------------------------------------------------------------------------------------------------


def where(report: Report) -> list[str]:
    """Lines that say what ran where."""
    kind = "threads of one process" if report.threads else "processes"
    ranks = "1 rank" if report.ranks == 1 else f"{report.ranks} ranks ({kind})"
    if report.ranks > 1 and report.device["kind"] == "cuda":
        ranks += f" on {report.devices} device{'s' if report.devices > 1 else ''}"
    lines = [
        f"nvte_ep {report.library['version']}, {ranks}, {machine_line(report.device)}",
        software_line(report.software),
        f"copy: {report.copy_gbps:.0f} GB/s, read + written"
        + (
            f"; link taken as {report.link_gbps:.0f} GB/s a direction"
            if report.ranks > 1 and report.link_gbps is not None
            else ""
        )
        + (f"; every side on at most {report.num_sms} multiprocessors" if report.num_sms else ""),
    ]
    if report.shared_device and report.device["kind"] == "cuda":
        lines.append(
            "The ranks share a device"
            + (
                ": times are those of all of them together."
                if report.threads
                else " by time slices: their times say nothing."
            )
        )
    return lines


HOST_LEGEND = [
    "us: median wall clock of the slowest rank, 10 to 90 % in brackets; x floor: over the fewest bytes at",
    "the rate above. *: small enough to come from the cache. step: one whole step, prepare included.",
]
LEGEND = [
    "us: median time of the slowest rank on the device, 10 to 90 % in brackets; x floor: over the fewest",
    "bytes at the rates above; NCCL EP: called directly, the best of its settings; gain: its time over ours.",
    "*: small enough to come from the cache. step: one graph replay of a whole step, prepare included.",
]


def legend(report: Report) -> list[str]:
    return LEGEND if report.device["kind"] == "cuda" else HOST_LEGEND


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _cells(row: Row, figure: Figure, peer: str) -> list[str]:
    low, high = figure.spread.range
    direct = row.figures.get(peer) if figure.side != peer else None
    goal = "" if figure.goal is None else microseconds(figure.goal.microseconds)
    return [
        figure.side,
        microseconds(figure.spread.median),
        f"({microseconds(low)}-{microseconds(high)})",
        "" if row.floor_microseconds < 1 else f"{figure.spread.median / row.floor_microseconds:.2f}",
        "" if direct is None else f"{direct.spread.median / figure.spread.median:.2f}",
        goal,
        _VERDICT[figure.passed],
        figure.way,
    ]


COLUMNS = ["side", "us", "10-90 %", "x floor", "gain", "goal us", "", "setting"]


def _starred(row: Row) -> str:
    return row.operation.key + ("" if row.cold else "*")


def _heading(row: Row) -> str:
    nbytes = f"memory {size(row.floor.memory_bytes)}"
    if row.floor.link_bytes:
        nbytes += f", between ranks {size(row.floor.link_bytes)}"
    return f"{_starred(row)}: {nbytes}, floor {microseconds(row.floor_microseconds)} us"


def _host_rows(section: Section) -> Iterator[list[str]]:
    for row in section.rows:
        for figure in row.figures.values():
            host = figure.host
            if host is None:
                continue
            yield [
                row.operation.key,
                figure.side,
                f"{host.python:.1f}",
                "" if host.c is None else f"{host.c:.1f}",
                "" if host.c is None else f"{host.python - host.c:.1f}",
                str(host.launches),
                f"{host_goal(host.launches):.1f}",
                "" if host.c is None else _VERDICT[host.passed],
            ]


HOST_COLUMNS = ["host time of a call", "side", "Python us", "C us", "over C us", "launches", "C goal us", ""]


def _memory_lines(section: Section) -> list[str]:
    lines = []
    for side, found in section.memory.items():
        line = (
            f"memory of {side}: group {size(found['group_bytes'])}, each handle {size(found['handle_bytes'])}"
        )
        if "goal_bytes" in found:
            held = found["group_bytes"] + found["handle_bytes"]
            how = "pass" if held <= found["goal_bytes"] else "MISS"
            line += f"; together at most {size(found['goal_bytes'])}: {how}"
        lines.append(line)
    return lines


GROWTH_COLUMNS = ["growth", "side", "from", "to", "time of a token or slot", "goal", ""]


def _growth_cells(found: Growth) -> list[str]:
    return [
        found.operation,
        found.side,
        f"{found.first} {found.by}",
        str(found.then),
        f"x {found.ratio:.2f}",
        "" if found.goal is None else f"x {found.goal:.2f}",
        _VERDICT[found.passed],
    ]


_VERDICT = {None: "", True: "pass", False: "MISS"}


def text(report: Report, peer: str) -> list[str]:
    """The tables of a terminal."""
    lines = [*where(report), *legend(report)]
    for section in report.sections:
        lines += ["", f"{section.shape.name}: {section.slots} slots"]
        cells: list[list[str]] = [COLUMNS]
        for row in section.rows:
            cells.append([_heading(row)])
            cells += [_cells(row, figure, peer) for figure in row.figures.values()]
        lines += table(cells)
        host = list(_host_rows(section))
        if host:
            lines += ["", *table([HOST_COLUMNS, *host], indent="")]
        lines += _memory_lines(section)
    grown = list(growth(report.sections))
    if grown:
        lines += ["", *table([GROWTH_COLUMNS, *(_growth_cells(found) for found in grown)], indent="")]
    return [*lines, "", *verdict(report)]


def verdict(report: Report) -> list[str]:
    compared = f"{report.passed} comparisons with the host backend, {size(report.compared_bytes)}"
    lines = [f"note: {line}" for line in report.notes] + [f"not run: {line}" for line in report.not_run]
    if not report.failed:
        return [*lines, f"OK: {compared}, none failed"]
    return [*lines, f"FAILED: {compared} passed, but:", *(f"  {line}" for line in report.failed[:20])]


def _markdown_table(columns: list[str], rows: Iterator[list[str]] | list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + " --- |" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row).replace("*", "\\*") + " |"


def markdown(report: Report, peer: str) -> str:
    """The same as Markdown."""
    lines = ["# Exchanges", "", *(f"- {line}" for line in where(report)), "", " ".join(legend(report)), ""]
    for section in report.sections:
        lines += [f"## {section.shape.name}", "", f"{section.slots} slots.", ""]
        rows = [
            [_starred(row), microseconds(row.floor_microseconds), *_cells(row, figure, peer)]
            for row in section.rows
            for figure in row.figures.values()
        ]
        lines += [*_markdown_table(["operation", "floor us", *COLUMNS], rows), ""]
        host = list(_host_rows(section))
        if host:
            lines += [*_markdown_table(HOST_COLUMNS, host), ""]
        lines += [f"- {line}" for line in _memory_lines(section)]
        lines.append("")
    grown = list(growth(report.sections))
    if grown:
        lines += ["## Growth", ""]
        lines += [*_markdown_table(GROWTH_COLUMNS, [_growth_cells(found) for found in grown]), ""]
    return "\n".join([*lines, *(f"- {line}" for line in verdict(report)), ""])


# ---- plot ------------------------------------------------------------------------------------------------


def plot(documents: Sequence[dict[str, Any]], file: Path) -> None:
    """Bars by operation, a panel for each shape of the documents, which are as document() makes them and of
    one machine; the floor as a line across them."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    panels = []
    for one in documents:
        for shape in one["shapes"]:
            name = Shape(**{field.name: shape[field.name] for field in fields(Shape)}).name
            panels.append((name, [row for row in shape["operations"] if row["figures"]]))
    sides = list(dict.fromkeys(side for _, rows in panels for row in rows for side in row["figures"]))
    height = max(len(rows) for _, rows in panels)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(10 * len(panels), 1.5 + 0.5 * height), squeeze=False
    )
    width = 0.8 / max(len(sides), 1)
    for axis, (name, rows) in zip(axes[0], panels, strict=True):
        for number, side in enumerate(sides):
            mine = [
                (place, row["figures"][side]["microseconds"])
                for place, row in enumerate(rows)
                if side in row["figures"]
            ]
            if mine:
                times = [time["median"] for _, time in mine]
                errors = (
                    [time["median"] - time["10_percent"] for _, time in mine],
                    [time["90_percent"] - time["median"] for _, time in mine],
                )
                places = [place + (number + 0.5) * width - 0.4 for place, _ in mine]
                axis.barh(places, times, width, label=side, xerr=errors)
        for place, row in enumerate(rows):
            label = "floor" if place == 0 else None
            floor = row["floor_microseconds"]
            axis.plot([floor] * 2, [place - 0.45, place + 0.45], color="black", label=label)
        axis.set_yticks(range(len(rows)), [row["operation"] for row in rows])
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xlabel("microseconds")
        axis.set_title(name)
        axis.grid(True, axis="x", alpha=0.3)
        axis.legend(fontsize=8)
    first = documents[0]
    ranks = first["ranks"]
    who = "1 rank" if ranks["number"] == 1 else f"{ranks['number']} ranks on {ranks['devices']} devices"
    figure.suptitle(f"nvte_ep {first['library']['version']}, {who}, {machine_line(first['device'])}")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
