# SPDX-License-Identifier: Apache-2.0
"""What is installed: the files, the library's names, what it needs, and no path of the building machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

PACKAGE_FILES = {
    "nvte_ep.h",
    "nvte_ep.pc",
    "nvte_ep-config.cmake",
    "nvte_ep-config-version.cmake",
    "nvte_ep-targets.cmake",
    "nvte_ep-targets-release.cmake",
}


def test_the_files(prefix: Path, is_wheel: bool) -> None:
    folders = [prefix / "include", *prefix.glob("lib*")]
    files = {path.name for folder in folders for path in folder.rglob("*") if not path.is_dir()}
    libraries = {name for name in files if name.startswith("libnvte_ep")}
    assert files - libraries == PACKAGE_FILES
    if is_wheel:
        assert libraries == {"libnvte_ep.so"}
    else:
        assert libraries == {"libnvte_ep.so", "libnvte_ep.so.1", "libnvte_ep.so.0.1.0"}


def test_the_header_is_the_one_of_the_source_tree(prefix: Path, repository: Path) -> None:
    header = "include/nvte_ep/nvte_ep.h"
    assert (prefix / header).read_text() == (repository / header).read_text()


def test_the_library_names_itself_and_needs_only_the_c_and_cxx_runtime(
    run: Any, library: Path, is_wheel: bool
) -> None:
    dynamic = run(["readelf", "-dW", library])
    soname = "libnvte_ep.so" if is_wheel else "libnvte_ep.so.1"
    assert re.findall(r"\(SONAME\).*\[(.*)\]", dynamic) == [soname]
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    runtime = r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux[\w-]*)\.so\.\d+"
    assert {name for name in needed if not re.fullmatch(runtime, name)} == set()


def test_the_library_exports_the_headers_functions_under_one_node(
    run: Any, prefix: Path, library: Path
) -> None:
    header = (prefix / "include/nvte_ep/nvte_ep.h").read_text()
    declared = set(re.findall(r"^NVTE_EP_API[^;(]*?\b(nvte_ep_\w+)\(", header, re.MULTILINE))
    symbols = re.findall(r" ([A-Za-z]) (\S+)$", run(["nm", "-D", "--defined-only", library]), re.MULTILINE)
    assert len(declared) > 30
    assert {name for kind, name in symbols if kind != "A"} == {f"{name}@@NVTE_EP_1" for name in declared}


def test_no_installed_file_knows_where_it_was_built(prefix: Path, library: Path, repository: Path) -> None:
    machine = {str(repository), os.environ.get("NVTE_EP_BUILD_DIR", str(repository))}
    for folder in (library.parent, prefix / "include"):
        for path in folder.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert not any(place.encode() in content for place in machine), path
