# SPDX-License-Identifier: Apache-2.0
"""The examples of README.md: each is built and run as printed, and prints what the README shows below it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any


def example(repository: Path, language: str) -> tuple[str, str]:
    """Code and output of the one example in a language: its block, and the ```text block right after it."""
    readme = (repository / "README.md").read_text()
    found = re.findall(
        rf"^```{language}\n(.*?)^```\n+(?:Prints:\n+)?```text\n(.*?)^```$", readme, re.M | re.S
    )
    assert len(found) == 1, f"README.md: expected one {language} example with its output, found {len(found)}"
    return found[0]


def test_the_c_example(
    run: Any, tmp_path: Path, prefix: Path, library: Path, repository: Path, run_env: dict[str, str]
) -> None:
    code, output = example(repository, "c")
    source = tmp_path / "example.c"
    source.write_text(code)
    program = tmp_path / "example"
    flags = ["-std=c99", "-pedantic-errors", "-Wall", "-Wextra", "-Werror"]
    run(["cc", *flags, source, "-o", program, f"-I{prefix}/include", f"-L{library.parent}", "-lnvte_ep"])
    assert run([program], env=run_env) == output


def test_the_python_example(run: Any, tmp_path: Path, repository: Path) -> None:
    code, output = example(repository, "python")
    source = tmp_path / "example.py"
    source.write_text(code)
    assert run([sys.executable, source], env=dict(os.environ), cwd=tmp_path) == output


def test_the_table_of_row_bytes(repository: Path) -> None:
    import nvte_ep

    readme = (repository / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", readme, re.MULTILINE)
    assert [name for name, _ in rows] == ["bf16", "mxfp8", "nvfp4"]
    for name, row_bytes in rows:
        assert nvte_ep.row_bytes(name, 7168) == int(row_bytes)


def test_the_python_layer_example(run: Any, repository: Path) -> None:
    for ranks in ("1", "4"):
        output = run([sys.executable, repository / "examples/python/moe_layer.py", ranks])
        assert [line.split()[0] for line in output.splitlines()] == [ranks, "wire", "bf16", "mxfp8", "nvfp4"]


def test_every_file_that_the_texts_name_exists(repository: Path) -> None:
    named = re.compile(
        r"(?<![\w/.])(?:\./)?((?:ci|docs|examples|tools|tests|include|src)/[\w./-]*\w)(?![\w<*])"
    )
    for text in [
        repository / "README.md",
        repository / "CONTRIBUTING.md",
        *(repository / "docs").glob("*.md"),
    ]:
        content = text.read_text()
        for path in named.findall(content):
            assert (repository / path).exists(), f"{text.name}: {path}"
        for target in re.findall(r"\]\(([^)#:]+)\)", content):
            assert (text.parent / target).exists(), f"{text.name}: {target}"
