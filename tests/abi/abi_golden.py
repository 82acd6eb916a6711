# SPDX-License-Identifier: Apache-2.0
"""abi_v<N>.json: the binary interface as released. What it lists never changes; what is new is appended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from abi_header import Header

RELEASE_MACROS = ("NVTE_EP_VERSION_MAJOR", "NVTE_EP_VERSION_MINOR", "NVTE_EP_VERSION_PATCH")


def path(abi_version: int) -> Path:
    return Path(__file__).with_name(f"abi_v{abi_version}.json")


def describe(header: Header) -> dict[str, Any]:
    return {
        "functions": {
            name: f"{result}({', '.join(args)})" for name, (result, args) in header.functions.items()
        },
        "structs": {
            name: {"size": struct.size, "fields": [list(field) for field in struct.fields]}
            for name, struct in header.structs.items()
        },
        "constants": {name: value for name, value in header.constants.items() if name not in RELEASE_MACROS},
    }


def load(abi_version: int) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads(path(abi_version).read_text())
    return golden


def breaks(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Every entry of old that new has lost or changed; a struct may have new fields, at its end only."""
    found = []
    for kind in ("functions", "constants"):
        for name, value in old[kind].items():
            if new[kind].get(name) != value:
                found.append(f"{name}: was {value}, is {new[kind].get(name)}")
    for name, struct in old["structs"].items():
        now = new["structs"].get(name, {"size": 0, "fields": []})
        before = struct["fields"]
        if now["fields"][: len(before)] != before:
            found.append(f"{name}: fields were {before}, are {now['fields']}")
        elif len(now["fields"]) == len(before) and now["size"] != struct["size"]:
            found.append(f"{name}: size was {struct['size']}, is {now['size']}")
        elif any(field[2] < struct["size"] for field in now["fields"][len(before) :]):
            found.append(f"{name}: a new field lies inside the old struct")
    return found


def additions(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Every entry of new that old does not list, or lists with fewer fields."""
    return [
        name
        for kind in ("functions", "structs", "constants")
        for name, value in new[kind].items()
        if name not in old[kind]
        or (kind == "structs" and len(value["fields"]) > len(old[kind][name]["fields"]))
    ]
