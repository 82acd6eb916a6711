# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of Markdown pages of what `nvte-ep bench ep --json` wrote, below a line that names each.

    python tools/ep_tables.py README.md            # rewrites the tables in place
    python tools/ep_tables.py --check README.md    # fails where one is not what its files say

Such a line is <!-- ep_tables: KIND PATH... -->, with a function of this file for KIND, and a path from the
page on to what the names of its files begin with: ep_1gpu for ep_1gpu_layer.json, ep_1gpu_steps.json, ...
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MARK = re.compile(r"(<!-- ep_tables: (\w+) (.+) -->\n)((?:\|.*\n)*)")
SIDES = ("peer", "nccl_ep", "nccl", "ncclSend", "NCCL EP")

Row = list[str]


class Figures:
    """The files of one machine."""

    def __init__(self, begin: Path) -> None:
        self._begin = begin

    def shapes(self, name: str) -> list[dict[str, Any]]:
        path = self._begin.with_name(f"{self._begin.name}_{name}.json")
        found: list[dict[str, Any]] = json.loads(path.read_text())["shapes"]
        return found

    def operation(self, title: str) -> dict[str, Any]:
        """Of 4096 tokens, or a step of few."""
        (found,) = (
            o for o in self.operations("layer") + self.operations("steps")[1:] if o["operation"] == title
        )
        return found

    def operations(self, name: str, shape: int = 0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.shapes(name)[shape]["operations"]
        return found


def us(operation: dict[str, Any], side: str) -> str:
    figure = operation["figures"].get(side)
    return f"{figure['microseconds']['median']:.1f}" if figure else ""


def gain(operation: dict[str, Any]) -> str:
    ratio = operation["figures"]["peer"]["nccl_ep_over_it"]
    return f"{ratio:.2f}" if ratio else ""


def yes(passed: bool) -> str:
    return "yes" if passed else "no"


def calls(figures: Figures) -> list[Row]:
    """Every call: 4096 tokens forward and, `peer` alone, backward; then a step of few tokens."""
    layer, steps = figures.operations("layer"), figures.operations("steps")
    there = [side for side in SIDES if any(side in o["figures"] for o in layer)]
    rows = [["us", "floor", *map(name, there), "NCCL EP / `peer`", "goal for `peer`", "met"]]
    for operation in [*layer, *figures.operations("backward"), *steps]:
        title, is_prepare = operation["operation"], operation["verb"] == "prepare"
        if is_prepare and operation is steps[0]:
            title += " of 128 tokens"
        floor = "" if is_prepare else f"{operation['floor_microseconds']:.0f}"
        goal = operation["figures"]["peer"]["goal"]
        aim = [f"{goal['microseconds']:g}", yes(goal["passed"])] if goal else ["", ""]
        rows.append([title, floor, *(us(operation, side) for side in there), gain(operation), *aim])
    return rows


def name(side: str) -> str:
    return side if " " in side else f"`{side}`"


def sms24(figures: Figures) -> list[Row]:
    """All sides on 24 multiprocessors."""
    there = ("peer", "nccl_ep", "NCCL EP")
    rows = [["us", *map(name, there), "NCCL EP / `peer`", "twice as fast"]]
    for operation in figures.operations("sms24"):
        twice = operation["figures"]["peer"]["nccl_ep_over_it"] >= 2
        rows.append(
            [operation["operation"], *(us(operation, side) for side in there), gain(operation), yes(twice)]
        )
    return rows


def side_by_side(columns: Iterable[tuple[str, list[dict[str, Any]]]]) -> list[Row]:
    """`peer` in runs of the same operations."""
    columns = list(columns)
    rows = [["us", *(title for title, _ in columns)]]
    for same in zip(*(operations for _, operations in columns), strict=True):
        assert len({operation["operation"] for operation in same}) == 1
        rows.append([same[0]["operation"], *(us(operation, "peer") for operation in same)])
    return rows


def growth(figures: Figures) -> list[Row]:
    """More tokens, more experts."""
    columns = [(f"T {shape['tokens']}", shape["operations"]) for shape in figures.shapes("tokens")]
    most = figures.shapes("experts")[-1]
    columns.append((f"T {most['tokens']}, E {most['experts']}", most["operations"]))
    return side_by_side(columns)


def threads(figures: Figures) -> list[Row]:
    """Ranks that share a GPU, each with as many tokens as one alone."""
    columns = [("1 rank", figures.operations("tokens"))]
    columns += [(f"{ranks} ranks", figures.operations(f"threads_{ranks}")) for ranks in (2, 4, 8)]
    return side_by_side(columns)


def host(figures: Figures) -> list[Row]:
    """Host time of calls of `peer`."""
    rows = [["call", "launches", "C, us", "goal", "what Python adds, us"]]
    for operation in figures.operations("layer"):
        spent = operation["figures"]["peer"]["host"]
        adds = spent["python"] - spent["c"]
        times = [f"{value:.1f}" for value in (spent["c"], spent["c_goal"], adds)]
        rows.append([operation["operation"], str(spent["launches"]), *times])
    return rows


SUMMARY = {
    "prepare": "prepare",
    "dispatch, BF16": "dispatch bf16 -> decoded",
    "dispatch, packed MXFP8 rows": "dispatch mxfp8 packed -> rows",
    "dispatch, packed NVFP4 rows": "dispatch nvfp4 packed -> rows",
    "BF16 tokens to NVFP4 operand; NCCL EP: pack, dispatch, direct receive": "dispatch nvfp4 -> operand",
    "the same with the columnwise operand": "dispatch nvfp4 -> operand + columns",
    "combine, BF16": "combine bf16",
    "128 tokens, one graph replay: prepare, NVFP4 dispatch; NCCL EP: low latency, no routing or packing": (
        "step nvfp4 dispatch"
    ),
    "the same with combine": "step nvfp4 dispatch + combine",
}


def summary(one: Figures, two: Figures) -> list[Row]:
    """`peer` beside NCCL EP on one GPU and on two."""
    rows = [["", "one GPU: `peer`", "NCCL EP", "", "two GPUs: `peer`", "NCCL EP", ""]]
    for label, title in SUMMARY.items():
        row = [label]
        for operation in (one.operation(title), two.operation(title)):
            ratio = operation["figures"]["peer"]["nccl_ep_over_it"]
            row += [us(operation, "peer"), us(operation, "NCCL EP"), f"{ratio:.1f}x"]
        rows.append(row)
    return rows


BESIDE = [
    "prepare",
    "dispatch, BF16",
    "dispatch, packed MXFP8 rows",
    "dispatch, packed NVFP4 rows",
    "combine, BF16",
]


def nccl_ep(one: Figures, two: Figures) -> list[Row]:
    """The transport `nccl_ep` beside what it calls."""
    rows = [["", "one GPU: `nccl_ep`", "NCCL EP", "", "two GPUs: `nccl_ep`", "NCCL EP", ""]]
    for label in BESIDE:
        row = [label]
        for operation in (one.operation(SUMMARY[label]), two.operation(SUMMARY[label])):
            ours, theirs = (
                operation["figures"][side]["microseconds"]["median"] for side in ("nccl_ep", "NCCL EP")
            )
            row += [us(operation, "nccl_ep"), us(operation, "NCCL EP"), f"{ours / theirs - 1:+.0%}"]
        rows.append(row)
    return rows


TABLES: dict[str, Callable[..., list[Row]]] = {
    table.__name__: table for table in (calls, sms24, growth, threads, host, summary, nccl_ep)
}


def table_of(rows: list[Row]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rewritten(page: Path) -> str:
    def fill(match: re.Match[str]) -> str:
        mark, kind, paths = match[1], match[2], match[3].split()
        if kind not in TABLES:
            raise ValueError(f"{page}: no table is called {kind}, but {', '.join(TABLES)}")
        return mark + table_of(TABLES[kind](*(Figures(page.parent / path) for path in paths)))

    text, tables = MARK.subn(fill, page.read_text())
    if tables == 0:
        raise ValueError(f"{page}: no line <!-- ep_tables: KIND PATH... --> in it")
    return text


def main(arguments: list[str]) -> int:
    check = arguments[:1] == ["--check"]
    pages = [Path(argument) for argument in arguments[check:]]
    if not pages:
        print(__doc__)
        return 2
    stale = [page for page in pages if rewritten(page) != page.read_text()]
    if not check:
        for page in stale:
            page.write_text(rewritten(page))
        return 0
    for page in stale:
        print(f"{page}: a table is not what its files say: python tools/ep_tables.py {page}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
