"""Figures of `nvte-ep bench ep` as a rule for other sizes: a time is a fixed part and a multiple of the
floor.

Both come from the shapes that were measured, by least squares of the relative error. What was measured in
one shape only takes the fixed part of a call that does the same with other bytes and was measured in more;
where there is none, it has no fixed part. One rank on a GPU is bound by memory, more ranks by the link: a
plan goes by figures of its own kind only.

Two things follow no floor. `prepare` lies between what was measured with the nearest numbers of tokens. A
step of a small batch is given as it was measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nvte_ep.commands._report import UsageError
from nvte_ep.commands.bench_ep_data import Shape

DATA = Path(__file__).resolve().parents[1] / "data"
SCHEMA = 1
SHAPE = ("tokens", "hidden", "top_k", "experts", "alignment")


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
class Step:
    """A whole step of a small batch, one replay of a graph, as it was measured."""

    shape: Shape
    microseconds: dict[str, float]  # by what it does: "nvfp4 dispatch + combine"


@dataclass(frozen=True)
class Figures:
    source: str
    device: str
    ranks: int
    transport: str
    rules: dict[str, Rule]  # by the name of the call
    tokens: tuple[int, int] | None  # of a rank: least and most of what the rules come from
    prepare: dict[int, float]  # microseconds by the tokens of a rank
    steps: list[Step]  # by their tokens

    def microseconds(self, operation: str, floor: float) -> float | None:
        """None: it was not measured."""
        rule = self.rules.get(operation)
        return None if rule is None else rule.microseconds(floor)

    def prepare_microseconds(self, tokens: int) -> float | None:
        """Between the nearest numbers of tokens measured; beyond them, the nearest."""
        if not self.prepare:
            return None
        known = sorted(self.prepare)
        return float(np.interp(tokens, known, [self.prepare[number] for number in known]))

    def step(self, tokens: int) -> Step | None:
        """The least step with as many tokens; None where the calls themselves were measured with so few."""
        if self.tokens is not None and tokens >= self.tokens[0]:
            return None
        return next((step for step in self.steps if step.shape.tokens >= tokens), None)


def default_figures(ranks: int) -> Path:
    """Those that come with the package."""
    return DATA / ("ep_h200_1gpu.json" if ranks == 1 else "ep_h200.json")


def load(path: Path, transport: str, ranks: int) -> Figures:
    """What `bench ep --json` wrote, or a part of it, for a plan of so many ranks."""
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
        figures = _read(document, str(path), transport)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"--figures: {path} is not as bench ep writes it: {type(error).__name__} {error}"
        ) from error
    if (figures.ranks == 1) != (ranks == 1):
        of, wanted = ("one rank", "several") if figures.ranks == 1 else ("several ranks", "one")
        raise UsageError(
            f"--figures: {path} is of {of}, the plan is of {wanted}: memory bounds the times of one rank, "
            "the link those of several"
        )
    return figures


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
        if rule.shapes == 1 and like is not None and like.overhead < time:
            rule = Rule(like.overhead, (time - like.overhead) / floor, 1)
        completed[operation] = rule
    return completed


def _read(document: dict[str, Any], source: str, transport: str) -> Figures:
    points: dict[str, list[tuple[float, float]]] = {}
    tokens: set[int] = set()
    prepare: dict[int, list[float]] = {}
    steps = []
    for shape in document["shapes"]:
        step: dict[str, float] = {}
        for entry in shape["operations"]:
            if transport not in entry["figures"]:
                continue
            name = str(entry["operation"])
            time = float(entry["figures"][transport]["microseconds"]["median"])
            if name == "prepare":  # launches and meetings; its bytes are few
                prepare.setdefault(int(shape["tokens"]), []).append(time)
            elif name.startswith("step "):
                step[name.removeprefix("step ")] = time
            else:
                points.setdefault(name, []).append((float(entry["floor_microseconds"]), time))
                tokens.add(int(shape["tokens"]))
        if step:
            steps.append(Step(Shape(**{name: int(shape[name]) for name in SHAPE}), step))
    if not (points or prepare or steps):
        where = "the package" if Path(source).parent == DATA else source
        raise UsageError(
            f"--transport: {where} has none of the transport {transport}: give --figures that have some, or "
            "--no-figures"
        )
    return Figures(
        source=source,
        device=str(document["device"]["name"]),
        ranks=int(document["ranks"]["number"]),
        transport=transport,
        rules=_with_fixed_parts({operation: fit(found) for operation, found in points.items()}, points),
        tokens=(min(tokens), max(tokens)) if tokens else None,
        prepare={number: float(np.mean(times)) for number, times in prepare.items()},
        steps=sorted(steps, key=lambda step: step.shape.tokens),
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
                **{name: shape[name] for name in (*SHAPE, "slots")},
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


def merged(documents: Sequence[dict[str, Any]], transport: str) -> dict[str, Any]:
    """Of runs of bench ep on one machine what load() reads; where two measured the same, the first one's. So
    the figures of the package are made: data/README.md."""
    parts = [reduced(document, transport) for document in documents]
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}
    for shape in (shape for part in parts for shape in part["shapes"]):
        known = shapes.setdefault(tuple(shape[name] for name in SHAPE), shape)
        names = [entry["operation"] for entry in known["operations"]]
        known["operations"] += [entry for entry in shape["operations"] if entry["operation"] not in names]
    return parts[0] | {"shapes": list(shapes.values())}
