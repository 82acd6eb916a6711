#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Things that must say the same: the public header, the export list, the change log.

- nvte_ep.map exports exactly the functions of the header, under the node of its ABI version;
- the newest section of CHANGELOG.md is of the header's version, or "Unreleased";
- where include/ or tests/abi/ changed since the last release, that section has an ABI entry."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ABI_PATHS = ("include", "tests/abi")


def header_number(header: str, name: str) -> int:
    match = re.search(rf"^#define NVTE_EP_{name} +(\d+)$", header, re.MULTILINE)
    if not match:
        raise SystemExit(f"nvte_ep.h: no line '#define NVTE_EP_{name} <number>'")
    return int(match[1])


def header_functions(header: str) -> set[str]:
    return set(re.findall(r"^NVTE_EP_API[^;(]*?\b(nvte_ep_\w+)\(", header, re.MULTILINE))


def map_nodes(script: str) -> dict[str, set[str]]:
    """Version node -> names that it exports."""
    script = re.sub(r"/\*.*?\*/", "", script, flags=re.DOTALL)
    return {
        node: set(re.findall(r"\b(nvte_ep_\w+);", body))
        for node, body in re.findall(r"(\w[\w.]*)\s*\{(.*?)\}", script, re.DOTALL)
    }


def newest_section(changelog: str) -> tuple[str, str]:
    """Title and text of the first '## ' section."""
    match = re.search(r"^## +\[?([^\]\n ]+)\]?.*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if not match:
        raise SystemExit("CHANGELOG.md: no section '## <version>'")
    return match[1], match[2]


def has_abi_entry(section: str) -> bool:
    match = re.search(r"^### ABI\n(.*?)(?=^### |\Z)", section, re.MULTILINE | re.DOTALL)
    return bool(match and re.search(r"^- \S", match[1], re.MULTILINE))


def changed_since_release(root: Path) -> bool:
    """Whether include/ or tests/abi/ differ from the last release tag; True without a tag or without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        tag = git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*")
        return bool(git("diff", "--name-only", tag, "--", *ABI_PATHS))
    except (OSError, subprocess.CalledProcessError):
        return True


def problems(root: Path) -> Iterator[str]:
    header = (root / "include/nvte_ep/nvte_ep.h").read_text()
    version = ".".join(str(header_number(header, f"VERSION_{part}")) for part in ("MAJOR", "MINOR", "PATCH"))
    abi = header_number(header, "ABI_VERSION")

    nodes = map_nodes((root / "src/api/nvte_ep.map").read_text())
    exported = set().union(*nodes.values())
    functions = header_functions(header)
    if f"NVTE_EP_{abi}" not in nodes:
        yield f"nvte_ep.map: no node NVTE_EP_{abi}, the header's ABI version"
    for name in sorted(functions - exported):
        yield f"nvte_ep.map: {name} of the header is not exported"
    for name in sorted(exported - functions):
        yield f"nvte_ep.map: {name} is not in the header"

    title, section = newest_section((root / "CHANGELOG.md").read_text())
    if title not in (version, "Unreleased"):
        yield f"CHANGELOG.md: the newest section is {title}, the header says {version}"
    if changed_since_release(root) and not has_abi_entry(section):
        yield f"CHANGELOG.md: include/ or tests/abi/ changed, but section {title} has no '### ABI' entry"


def main() -> int:
    found = list(problems(Path(__file__).resolve().parent.parent))
    print("\n".join(found) if found else "release: OK")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
