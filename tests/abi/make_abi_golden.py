# SPDX-License-Identifier: Apache-2.0
"""Writes abi_v<N>.json from the header: python tests/abi/make_abi_golden.py

Refuses to change what the file lists already: an incompatible change needs a new NVTE_EP_ABI_VERSION, and so
a new file. Needs a C compiler and pycparser.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import abi_golden as golden
from abi_header import read_header

SCALAR = r'(?:"[^"\n]*"|\d+)'


def main() -> int:
    header = read_header()
    described = golden.describe(header)
    version = header.constants["NVTE_EP_ABI_VERSION"]
    file = golden.path(version)
    if file.exists():
        broken = golden.breaks(golden.load(version), described)
        if broken:
            print(f"the header breaks {file.name}:", *broken, sep="\n  ", file=sys.stderr)
            return 1
    text = json.dumps(described, indent=1)
    flat_list = rf"\[\s+({SCALAR}(?:,\s+{SCALAR})*)\s+\]"
    text = re.sub(flat_list, lambda found: "[" + re.sub(r"\n\s*", " ", found[1]) + "]", text)
    file.write_text(text + "\n")  # one line for each field
    counts = ", ".join(f"{len(entries)} {kind}" for kind, entries in described.items())
    print(f"{file.name}: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
