"""Figures of `nvte-ep bench ep` as a rule for other sizes: a time is a fixed part and a multiple of the
floor.

Both come from the shapes that were measured, by least squares of the relative error. What was measured in
one shape only takes the fixed part of a call that does the same with other bytes and was measured in more;
where there is none, it has no fixed part. One rank on a GPU is bound by memory, more ranks by the link:
figures of the same kind as the plan are worth more than others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nvte_ep.commands._report import UsageError

DEFAULT = Path(__file__).resolve().parents[1] / "data" / "ep_h200.json"
SCHEMA = 1


@dataclass(frozen=True)
class Rule:
    overhead: float  # microseconds
    factor: float  # of the floor
    shapes: int  # that it comes from

    def microseconds(self, floor: float) -> float:
        return self.overhead + self.factor * floor


def fit(points: Sequence[tuple[float, float]]) -> Rule:
    """From (floor, measured): neither part below zero."""
    floors, times = (np.array(part, np.float64) for part in zip(*points, strict=True))
    if len(set(floors)) > 1:
        # Relative errors: every row over its own time, so that the right side is one.
        system = np.stack([1 / times, floors / times], axis=1)
        (overhead, factor), *_ = np.linalg.lstsq(system, np.ones(len(points)), rcond=None)
        if overhead >= 0 and factor >= 0:
            return Rule(float(overhead), float(factor), len(points))
        if factor < 0:
            return Rule(float(1 / np.mean(1 / times)), 0.0, len(points))
    ratio = floors / times
    return Rule(0.0, float(ratio.sum() / (ratio * ratio).sum()), len(points))


@dataclass(frozen=True)
class Figures:
    source: str
    device: str
    ranks: int
    transport: str
    rules: dict[str, Rule]  # by the name of the operation

    def microseconds(self, operation: str, floor: float) -> float | None:
        """None: it was not measured."""
        rule = self.rules.get(operation)
        return None if rule is None else rule.microseconds(floor)


def load(path: Path, transport: str) -> Figures:
    """What `bench ep --json` wrote, or a part of it."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--figures: {path}: {error}") from error
    except ValueError as error:
        raise UsageError(f"--figures: {path} is no JSON: {error}") from error
    if (
        not isinstance(document, dict)
        or document.get("benchmark") != "ep"
        or document.get("schema") != SCHEMA
    ):
        raise UsageError(f"--figures: {path} is no JSON of nvte-ep bench ep (schema {SCHEMA})")
    try:
        return _read(document, str(path), transport)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"--figures: {path} is not as bench ep writes it: {type(error).__name__} {error}"
        ) from error


def _rule(operation: str, points: list[tuple[float, float]]) -> Rule:
    if operation == "prepare":  # launches and meetings; its bytes are few
        return Rule(float(np.mean([time for _, time in points])), 0.0, len(points))
    return fit(points)


def _kind(operation: str) -> str:
    """Calls of one kind have as many launches and meetings."""
    if operation.startswith(("combine ", "dispatch_backward")):
        return "sums"
    ends = ("columns", "operand", "rows", "decoded")
    return next((end for end in ends if operation.endswith(end)), operation)


def _with_fixed_parts(
    rules: dict[str, Rule], points: dict[str, list[tuple[float, float]]]
) -> dict[str, Rule]:
    kin: dict[str, Rule] = {}
    for operation, rule in rules.items():
        known = kin.get(_kind(operation))
        if rule.shapes > 1 and (known is None or rule.shapes > known.shapes):
            kin[_kind(operation)] = rule
    completed = {}
    for operation, rule in rules.items():
        floor, time = points[operation][0]
        like = kin.get(_kind(operation))
        if rule.shapes == 1 and operation != "prepare" and like is not None and like.overhead < time:
            rule = Rule(like.overhead, (time - like.overhead) / floor, 1)
        completed[operation] = rule
    return completed


def _read(document: dict[str, Any], source: str, transport: str) -> Figures:
    points: dict[str, list[tuple[float, float]]] = {}
    for shape in document["shapes"]:
        for entry in shape["operations"]:
            figure = entry["figures"].get(transport)
            if figure is not None:
                found = float(entry["floor_microseconds"]), float(figure["microseconds"]["median"])
                points.setdefault(entry["operation"], []).append(found)
    if not points:
        raise UsageError(f"--figures: {source} has none of the transport {transport}")
    return Figures(
        source=source,
        device=str(document["device"]["name"]),
        ranks=int(document["ranks"]["number"]),
        transport=transport,
        rules=_with_fixed_parts(
            {operation: _rule(operation, found) for operation, found in points.items()}, points
        ),
    )


def reduced(document: dict[str, Any], transport: str) -> dict[str, Any]:
    """Of a document of bench ep what load() reads."""
    return {
        "schema": document["schema"],
        "benchmark": document["benchmark"],
        "library": document["library"],
        "device": {name: document["device"].get(name) for name in ("name", "driver")},
        "ranks": document["ranks"],
        "shapes": [
            {
                **{
                    name: shape[name]
                    for name in ("tokens", "hidden", "top_k", "experts", "alignment", "slots")
                },
                "operations": [
                    {
                        "operation": entry["operation"],
                        "floor_microseconds": entry["floor_microseconds"],
                        "figures": {
                            transport: {
                                "microseconds": {
                                    "median": entry["figures"][transport]["microseconds"]["median"]
                                }
                            }
                        },
                    }
                    for entry in shape["operations"]
                    if transport in entry["figures"]
                ],
            }
            for shape in document["shapes"]
        ],
    }
