# SPDX-License-Identifier: Apache-2.0
"""tools/ep_tables.py: the tables of a page are what its files of figures say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/device_transports.md", "benchmarks/h200/ep.md")


def run(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "ep_tables.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The pages and the figures, to be changed."""
    for page in PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    for figures in (ROOT / "benchmarks" / "h200").glob("ep_*.json"):
        shutil.copy(figures, tmp_path / "benchmarks" / "h200" / figures.name)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_a_wrong_figure_is_found_and_put_right(tree: Path, page: str) -> None:
    path = tree / page
    right = path.read_text()
    start = right.index("<!-- ep_tables:")
    row = right.index("| prepare |", start)
    digit = next(at for at in range(row, len(right)) if right[at].isdigit())
    other = str((int(right[digit]) + 1) % 10)
    path.write_text(right[:digit] + other + right[digit + 1 :])
    found = run("--check", path)
    assert found.returncode == 1
    assert str(path) in found.stderr
    assert run(path).returncode == 0
    assert path.read_text() == right
    assert run("--check", path).returncode == 0


def test_a_page_without_tables(tree: Path) -> None:
    page = tree / "README.md"
    page.write_text(page.read_text().replace("ep_tables: summary", "ep_table: summary"))
    found = run("--check", page)
    assert found.returncode == 2
    assert "README.md" in found.stderr


def test_a_table_that_is_not_known(tree: Path) -> None:
    page = tree / "README.md"
    page.write_text("<!-- ep_tables: pigeons benchmarks/h200/ep_1gpu -->\n")
    found = run(page)
    assert found.returncode == 2
    assert "pigeons" in found.stderr and "summary" in found.stderr


def test_a_file_that_is_not_there(tree: Path) -> None:
    page = tree / "README.md"
    page.write_text("<!-- ep_tables: calls benchmarks/h200/ep_3gpus -->\n")
    found = run(page)
    assert found.returncode == 2
    assert "ep_3gpus_layer.json" in found.stderr
