#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Who may include whom. Prints each break of the rules with file and line; exits with 1 if there is any.

    api        -> core, include, the registries, formats/format_table.h
    core       -> include, formats/format_table.h
    formats    -> include (the numbers of the formats)
    device     -> core, formats
    backends   -> core, formats, device, include
    transports -> core, include; the device transport peer also formats and device
    python     -> include only, through ctypes; frameworks in torch.py and jax.py alone

The interfaces live in core and implementations point inwards: core never sees a backend or a transport, and
those never see each other."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE_SUFFIXES = {".h", ".cuh", ".cc", ".cu", ".c", ".def"}
PUBLIC_HEADER = "nvte_ep/nvte_ep.h"

# Layer of the includer -> what its quoted includes may start with (besides its own folder).
MAY_INCLUDE: dict[str, tuple[str, ...]] = {
    "include": (),
    "formats": (PUBLIC_HEADER,),  # the numbers of the formats
    "device": ("core/", "formats/"),
    "core": (PUBLIC_HEADER, "formats/format_table.h"),
    # api joins the two sides, and lists what there is; the arithmetic is none of its business.
    "api": (PUBLIC_HEADER, "core/", "backends/registry.h", "transports/registry.h", "formats/format_table.h"),
    "backends": (PUBLIC_HEADER, "core/", "formats/", "device/"),
    "transports": (PUBLIC_HEADER, "core/"),
    "peer": (PUBLIC_HEADER, "core/", "formats/", "device/", "transports/"),
}
OWN_FOLDER = {"peer": "transports/peer/"}

CUDA_INCLUDE = re.compile(r"^(cuda|cooperative_groups|cub/|cccl/|nv/|device_launch)")
CUDA_PLACES = re.compile(r"^src/(backends/cuda/|device/|transports/peer|transports/nccl)")
NCCL_INCLUDE = re.compile(r"^(nccl|nccl_ep|ep_enums)\w*\.h$")
NCCL_PLACES = re.compile(r"^src/transports/(nccl|peer/window)")
FRAMEWORK_INCLUDE = re.compile(
    r"^(torch|ATen|c10|pybind11|nanobind|xla|jax|tensorflow|transformer_engine)\b|^Python\.h$"
)

# What throws, prints or ends the process (methods may have such a name). The guard turns all into a status.
FORBIDDEN_WORDS = re.compile(
    r"(?<![\w.>:])(?<!void )(?<!Status )(?:std::|::)?"
    r"(throw|abort|exit|_exit|quick_exit|terminate|f?printf|f?puts|perror|assert|cout|cerr)\b"
    r"(?=\s*[(;<]|\s+\w)"
)
FORBIDDEN_EXCEPT = {"src/api/guard.h", "src/api/guard.cc"}

FRAMEWORK_MODULES = {"torch", "jax", "jaxlib", "tensorflow", "cupy", "transformer_engine"}
FRAMEWORK_FILES = {"torch.py", "jax.py"}

INCLUDE_LINE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def strip_comments(text: str) -> str:
    """Comments and the insides of strings become spaces; line numbers stay."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)

    def blank(match: re.Match[str]) -> str:
        if match[0][0] in "\"'":
            return match[0][0] + " " * (len(match[0]) - 2) + match[0][-1]
        return re.sub(r"[^\n]", " ", match[0])

    return pattern.sub(blank, text)


def layer_of(path: str) -> str | None:
    if path.startswith("include/"):
        return "include"
    if re.match(r"^src/transports/peer", path):
        return "peer"
    match = re.match(r"^src/(\w+)/", path)
    return match[1] if match and match[1] in MAY_INCLUDE else None


def check_source(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Breaks of one C, C++ or CUDA file, as (line, text). path is relative to the repository."""
    layer = layer_of(path)
    public_only = path == "tests/cpp/c_consumer.c" or path.startswith("examples/")
    allowed = MAY_INCLUDE.get(layer or "", ())
    own = OWN_FOLDER.get(layer or "", f"{layer}/")
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE_LINE.match(line)
        if not match:
            continue
        kind, name = match.groups()
        if FRAMEWORK_INCLUDE.match(name):
            yield number, f"{name}: no framework header anywhere"
        if layer is None and not public_only:
            continue
        if CUDA_INCLUDE.match(name) and not CUDA_PLACES.match(path):
            yield (
                number,
                f"{name}: CUDA headers belong in src/backends/cuda, src/device and the device transports",
            )
        if NCCL_INCLUDE.match(name) and not NCCL_PLACES.match(path):
            yield number, f"{name}: NCCL headers belong in src/transports/nccl* and the windows of peer"
        if layer == "include" and (kind == '"' or name not in ("stddef.h", "stdint.h")):
            yield number, f"{name}: the public header includes <stddef.h> and <stdint.h> only"
        if public_only and kind == '"' and name != PUBLIC_HEADER:
            yield number, f"{name}: a user of the library includes {PUBLIC_HEADER} only"
        if layer not in (None, "include") and kind == '"':
            if "/" not in name or name.startswith("."):
                yield number, f"{name}: write the path from src/"
            elif not name.startswith(own) and not name.startswith(allowed):
                yield number, f"{name}: {layer} may include {', '.join((own, *allowed))} only"
    if layer not in (None, "include") and path not in FORBIDDEN_EXCEPT:
        for number, line in enumerate(strip_comments(text).splitlines(), 1):
            for match in FORBIDDEN_WORDS.finditer(line):
                yield (
                    number,
                    f"{match[1]}: only src/api/guard.h may throw, print or end anything; return a Status",
                )


def check_python(path: str, text: str) -> Iterator[tuple[int, str]]:
    if Path(path).name in FRAMEWORK_FILES:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.split(".")[0] in FRAMEWORK_MODULES:
                yield node.lineno, f"{name}: only {' and '.join(sorted(FRAMEWORK_FILES))} import a framework"


def check_tree(root: Path) -> list[str]:
    breaks: list[str] = []
    for folder in ("include", "src", "tests/cpp", "examples", "python"):
        for file in sorted((root / folder).rglob("*")):
            path = file.relative_to(root).as_posix()
            if file.suffix in SOURCE_SUFFIXES:
                found = check_source(path, file.read_text())
            elif file.suffix == ".py" and folder == "python":
                found = check_python(path, file.read_text())
            else:
                continue
            breaks += [f"{path}:{number}: {text}" for number, text in found]
    return breaks


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    breaks = check_tree(root)
    print("\n".join(breaks) if breaks else "layers: OK")
    return 1 if breaks else 0


if __name__ == "__main__":
    sys.exit(main())
