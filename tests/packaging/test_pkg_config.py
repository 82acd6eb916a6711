# SPDX-License-Identifier: Apache-2.0
"""pkg-config: its flags suffice for a C99 program, wherever the tree lies; its version is the header's."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any


def pkg_config(run: Any, folder: Path, *arguments: str) -> str:
    return run(
        ["pkg-config", *arguments, "nvte_ep"], env={**os.environ, "PKG_CONFIG_PATH": str(folder)}
    ).strip()


def test_the_version_is_the_headers(run: Any, prefix: Path, pkgconfig_dir: Path) -> None:
    header = (prefix / "include/nvte_ep/nvte_ep.h").read_text()
    version = ".".join(re.findall(r"^#define NVTE_EP_VERSION_\w+ (\d+)$", header, re.MULTILINE))
    assert pkg_config(run, pkgconfig_dir, "--modversion") == version


def test_a_program_builds_and_runs(
    run: Any, tmp_path: Path, prefix: Path, pkgconfig_dir: Path, library: Path, repository: Path
) -> None:
    # Moved, and moved back to life by the file's own place.
    moved = tmp_path / "moved"
    shutil.copytree(prefix, moved, symlinks=True)
    folder = moved / pkgconfig_dir.relative_to(prefix)
    flags = pkg_config(run, folder, "--cflags", "--libs").split()
    program = tmp_path / "consumer"
    source = repository / "tests/cpp/c_consumer.c"
    run(["cc", "-std=c99", "-pedantic-errors", "-Wall", "-Wextra", "-Werror", source, "-o", program, *flags])
    moved_library = moved / library.relative_to(prefix)
    output = run([program], env={**os.environ, "LD_LIBRARY_PATH": str(moved_library.parent)})
    assert "c_consumer: OK" in output
