"""How the times of `nvte-ep bench ep` grow from shape to shape: with the tokens, and with the experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nvte_ep.commands.bench_ep_goals import LARGE_BATCH
from nvte_ep.commands.bench_ep_report import Section

EXPERTS_GOAL = 1.15  # of the time of a padded slot, from few experts to four times as many
TOKENS_GOAL = 1.05  # of the time of a token, from LARGE_BATCH up
SIDE = "peer"  # whose goals they are


@dataclass(frozen=True)
class Growth:
    """Of one operation by one side between two shapes that differ in one number."""

    by: str  # "tokens" or "experts"
    first: int
    then: int
    side: str
    operation: str
    ratio: float  # of the time of a token, or of a padded slot
    goal: float | None

    @property
    def passed(self) -> bool | None:
        return None if self.goal is None else self.ratio <= self.goal


def growth(sections: Sequence[Section]) -> Iterator[Growth]:
    for first in sections:
        for then in sections:
            for by in ("tokens", "experts"):
                before, after = getattr(first.shape, by), getattr(then.shape, by)
                if before < after and replace(first.shape, **{by: after}) == then.shape:
                    yield from _between(first, then, by, before, after)


def _between(first: Section, then: Section, by: str, before: int, after: int) -> Iterator[Growth]:
    if by == "tokens" and before < LARGE_BATCH:
        return
    units = (before, after) if by == "tokens" else (first.slots, then.slots)
    later = {row.operation.key: row for row in then.rows}
    for row in first.rows:
        if row.operation.verb == "prepare" or row.operation.key not in later:
            continue
        for side, figure in row.figures.items():
            other = later[row.operation.key].figures.get(side)
            if other is None:
                continue
            ratio = (other.spread.median / units[1]) / (figure.spread.median / units[0])
            goal = None
            if side == SIDE:
                goal = TOKENS_GOAL if by == "tokens" else EXPERTS_GOAL
            yield Growth(by, before, after, side, row.operation.key, ratio, goal)
