"""How commands talk: tables, units, a progress bar, and the error of a wrong argument."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

WIDTH = 80


class UsageError(Exception):
    """An argument, or a file it names, that cannot be used: exit code 2."""


def table(rows: Iterable[Sequence[str]], *, indent: str = "  ", gap: str = "  ") -> list[str]:
    """Lines of a table: the first column to the left, the others to the right. A row of one cell is a
    heading that stretches over all columns."""
    rows = [tuple(row) for row in rows]
    columns = max((len(row) for row in rows), default=0)
    widths = [max((len(r[c]) for r in rows if 1 < len(r) > c), default=0) for c in range(columns)]
    lines = []
    for row in rows:
        if len(row) == 1:
            lines.append(row[0])
            continue
        cells = [row[0].ljust(widths[0])] + [row[c].rjust(widths[c]) for c in range(1, len(row))]
        lines.append((indent + gap.join(cells)).rstrip())
    return lines


def machine_line(device: Mapping[str, Any]) -> str:
    """What a benchmark ran on, from the `device` of its JSON."""
    if device["kind"] == "cuda":
        driver = device["driver"] or "unknown"
        return f"{device['name']}, driver {driver}, CUDA {device['driver_cuda_version']}"
    return f"host memory, {device['threads']} threads, {device['name']}"


def software_line(versions: Mapping[str, str]) -> str:
    """The line that names what a benchmark ran with."""
    return "with " + ", ".join(f"{name} {version}" for name, version in versions.items())


def pairs(
    rows: Iterable[tuple[str, str]], *, indent: str = "  ", margin: int = 0, width: int = WIDTH
) -> list[str]:
    """Lines of names and texts; long texts are wrapped beside their name. margin: where texts begin at the
    least."""
    rows = list(rows)
    margin = max(margin, len(indent) + max((len(name) for name, _ in rows), default=0) + 2)
    lines: list[str] = []
    for name, text in rows:
        head = (indent + name).ljust(margin)
        wrapped = textwrap.wrap(text, width - margin, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [(head if i == 0 else " " * margin) + part for i, part in enumerate(wrapped)]
    return lines


def size(nbytes: float) -> str:
    """1234567 -> "1.23 MB": powers of ten, three digits."""
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit + 1 < len(units):
        value /= 1000
        unit += 1
    return f"{value:.3g} {units[unit]}"


def print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


class Progress:
    """A bar on standard error: where that is a terminal, or when asked for. Otherwise it says nothing."""

    def __init__(self, total: int, *, shown: bool | None = None, stream: TextIO | None = None) -> None:
        self.total = max(total, 1)
        self.done = 0
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._shown = self._terminal if shown is None else shown
        self._started = self._drawn = time.monotonic()

    def step(self, text: str) -> None:
        """One more piece of work is done; `text` says which."""
        self.done += 1
        now = time.monotonic()
        if self._shown and (now - self._drawn > 0.1 or self.done == self.total):
            self._drawn = now
            self._draw(text)

    def _draw(self, text: str) -> None:
        full = min(self.done * 24 // self.total, 24)
        seconds = time.monotonic() - self._started
        line = f"[{'#' * full}{'.' * (24 - full)}] {self.done}/{self.total}  {seconds:4.1f} s  {text}"
        line = line[: WIDTH - 1]
        self._stream.write(f"\r{line:{WIDTH - 1}}" if self._terminal else f"{line}\n")
        self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown and self._terminal:
            self._stream.write("\r" + " " * (WIDTH - 1) + "\r")
            self._stream.flush()
