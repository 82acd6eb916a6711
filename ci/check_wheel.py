#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks into a wheel: the files, what the library needs, what it exports, its tag and size."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "nvte_ep/lib/libnvte_ep.so"
NATIVE_FILES = {
    LIBRARY,
    "nvte_ep/include/nvte_ep/nvte_ep.h",
    "nvte_ep/lib/pkgconfig/nvte_ep.pc",
    "nvte_ep/lib/cmake/nvte_ep/nvte_ep-config.cmake",
    "nvte_ep/lib/cmake/nvte_ep/nvte_ep-config-version.cmake",
    "nvte_ep/lib/cmake/nvte_ep/nvte_ep-targets.cmake",
    "nvte_ep/lib/cmake/nvte_ep/nvte_ep-targets-release.cmake",
}
# The C and C++ runtime of every Linux; nothing of CUDA, NCCL or Python.
MAY_NEED = re.compile(r"^(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux[\w-]*)\.so\.\d+$")
MAX_BYTES = 64 << 20


def package_files() -> set[str]:
    """What python/nvte_ep holds, as it should lie in the wheel."""
    folder = ROOT / "python"
    return {
        path.relative_to(folder).as_posix()
        for path in (folder / "nvte_ep").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check(wheel: Path) -> list[str]:
    wrong: list[str] = []
    header = (ROOT / "include/nvte_ep/nvte_ep.h").read_text()
    version = ".".join(
        re.search(rf"^#define NVTE_EP_VERSION_{part} +(\d+)$", header, re.MULTILINE)[1]  # type: ignore[index]
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    if not re.fullmatch(rf"nvte_ep-{re.escape(version)}-py3-none-(many)?linux\w*\.whl", wheel.name):
        wrong.append(f"name: expected nvte_ep-{version}-py3-none-linux_<machine>.whl, got {wheel.name}")
    if wheel.stat().st_size > MAX_BYTES:
        wrong.append(f"size: expected at most {MAX_BYTES} bytes, got {wheel.stat().st_size}")

    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
        expected = NATIVE_FILES | package_files()
        wrong += [f"files: {name} is missing" for name in sorted(expected - names)]
        wrong += [f"files: {name} does not belong there" for name in sorted(names - expected)]
        metadata = archive.read(f"nvte_ep-{version}.dist-info/METADATA").decode()
        if f"Version: {version}\n" not in metadata:
            wrong.append(f"metadata: expected version {version}")
        entry_points = archive.read(f"nvte_ep-{version}.dist-info/entry_points.txt").decode()
        if "[cmake.prefix]" not in entry_points or "nvte-ep" not in entry_points:
            wrong.append(f"entry points: expected nvte-ep and cmake.prefix, got {entry_points}")
        if LIBRARY not in names:
            return wrong
        library = archive.extract(LIBRARY, folder)

        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "-dW", library))
        wrong += [f"NEEDED: {name} must not be needed" for name in needed if not MAY_NEED.match(name)]
        soname = re.findall(r"\(SONAME\).*\[(.*)\]", output_of("readelf", "-dW", library))
        if soname != ["libnvte_ep.so"]:
            wrong.append(f"SONAME: expected libnvte_ep.so, got {soname}")
        symbols = re.findall(
            r" [A-Za-z] (\w+)(?:@@(\w+))?$", output_of("nm", "-D", "--defined-only", library), re.M
        )
        exported = {name for name, node in symbols if node}
        declared = set(re.findall(r"^NVTE_EP_API[^;(]*?\b(nvte_ep_\w+)\(", header, re.MULTILINE))
        wrong += [f"exports: {name} is missing" for name in sorted(declared - exported)]
        wrong += [f"exports: {name} is not in the header" for name in sorted(exported - declared)]
        wrong += [
            f"exports: {name} has no version"
            for name, node in symbols
            if not node and not name.startswith("NVTE_EP_")
        ]
        print(f"{wheel.name}: {wheel.stat().st_size} bytes, {len(names)} files, {len(exported)} functions")
        print(f"{LIBRARY}: {Path(library).stat().st_size} bytes, needs {' '.join(needed)}")
    return wrong


def main() -> int:
    wrong = check(Path(sys.argv[1]))
    print("\n".join(wrong) if wrong else "contents: OK")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
