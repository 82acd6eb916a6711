# SPDX-License-Identifier: Apache-2.0
"""Another library of the process may export names under our prefix, loaded first and for everybody. Ours must
keep calling itself: here the other one exports every name of ours, and the eight of TransformerEngine, and
ends the process if called."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

TRANSFORMER_ENGINE = [
    "nvte_ep_initialize",
    "nvte_ep_shutdown",
    "nvte_ep_handle_mem_size",
    "nvte_ep_prepare",
    "nvte_ep_dispatch",
    "nvte_ep_combine",
    "nvte_ep_dispatch_bwd",
    "nvte_ep_combine_bwd",
]
PROGRAM = """
import ctypes, sys
other = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
ours = ctypes.CDLL(sys.argv[2])
ours.nvte_ep_last_error.restype = ctypes.c_char_p
size = ctypes.c_int64(-1)
assert ours.nvte_ep_row_bytes(2, ctypes.c_int64(7168), ctypes.byref(size)) == 0, ours.nvte_ep_last_error()
assert size.value == 4048, size
assert ours.nvte_ep_row_bytes(2, ctypes.c_int64(7), ctypes.byref(size)) == 1
assert ours.nvte_ep_last_error().startswith(b"nvte_ep_row_bytes: "), ours.nvte_ep_last_error()
assert ours.nvte_ep_group_destroy(None) == 0
print("kept apart")
"""


def test_a_library_with_the_same_names_is_never_called(
    run: Any, tmp_path: Path, prefix: Path, library: Path
) -> None:
    header = (prefix / "include/nvte_ep/nvte_ep.h").read_text()
    ours = re.findall(r"^NVTE_EP_API[^;(]*?\b(nvte_ep_\w+)\(", header, re.MULTILINE)
    source = tmp_path / "other.c"
    source.write_text(
        "#include <stdlib.h>\n"
        + "\n".join(f"int {name}(void) {{ abort(); }}" for name in [*ours, *TRANSFORMER_ENGINE])
    )
    other = tmp_path / "libother.so"
    run(["cc", "-shared", "-fPIC", source, "-o", other])
    assert run([sys.executable, "-c", PROGRAM, other, library]).strip() == "kept apart"


def test_no_name_of_transformer_engine_is_defined(run: Any, prefix: Path, library: Path) -> None:
    header = (prefix / "include/nvte_ep/nvte_ep.h").read_text()
    exported = set(re.findall(r"(nvte_ep_\w+)@@", run(["nm", "-D", "--defined-only", library])))
    assert exported.isdisjoint(TRANSFORMER_ENGINE)
    words = set(re.findall(r"\w+", header))
    assert words.isdisjoint({*TRANSFORMER_ENGINE, "NVTE_EP_GROUP_CONFIG_INIT", "NVTE_EP_LAYER_CONFIG_INIT"})
    assert not {word for word in words if word.startswith("NVTEEp")}
