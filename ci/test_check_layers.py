# SPDX-License-Identifier: Apache-2.0
"""Each rule of check_layers.py, once broken and once kept."""

from __future__ import annotations

from pathlib import Path

import check_layers
import pytest


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("include/nvte_ep/nvte_ep.h", "#include <stdio.h>"),
        ("include/nvte_ep/nvte_ep.h", '#include "nvte_ep/other.h"'),
        ("src/core/group.cc", '#include "backends/host_backend.h"'),
        ("src/core/group.cc", '#include "transports/threads.h"'),
        ("src/core/group.cc", '#include "formats/nvfp4.h"'),
        ("src/core/group.cc", "#include <cuda_runtime.h>"),
        ("src/api/c_api.cc", '#include "backends/host_backend.h"'),
        ("src/api/c_api.cc", '#include "formats/nvfp4.h"'),
        ("src/formats/nvfp4.h", '#include "core/status.h"'),
        ("src/formats/nvfp4.h", "#include <cuda_fp8.h>"),
        ("src/backends/host_backend.cc", '#include "transports/threads.h"'),
        ("src/backends/host_backend.cc", "#include <cuda_runtime.h>"),
        ("src/transports/threads.cc", '#include "backends/host_backend.h"'),
        ("src/transports/threads.cc", '#include "formats/nvfp4.h"'),
        ("src/transports/threads.cc", "#include <nccl.h>"),
        ("src/transports/peer/kernels.cu", '#include "backends/cuda/launch.h"'),
        ("src/device/tiles.cuh", '#include "backends/cuda/launch.h"'),
        ("src/core/group.cc", '#include "status.h"'),
        ("src/core/group.cc", '#include "../formats/nvfp4.h"'),
        ("src/backends/cuda/pack.cu", "#include <torch/extension.h>"),
        ("tests/cpp/test_any.cc", "#include <ATen/ATen.h>"),
        ("tests/cpp/c_consumer.c", '#include "core/status.h"'),
        ("src/core/group.cc", 'void f() { throw Error("x"); }'),
        ("src/core/group.cc", "void f() { std::abort(); }"),
        ("src/core/group.cc", "void f() { ::exit(1); }"),
        ("src/core/group.cc", "if (bad) abort();"),
        ("src/transports/threads.cc", '  printf("%d", 1);'),
        ("src/backends/host_backend.cc", "  std::cerr << 1;"),
        ("src/formats/nvfp4.h", "  assert(x > 0);"),
    ],
)
def test_break_is_found(path: str, line: str) -> None:
    breaks = list(check_layers.check_source(path, f"// first line\n{line}\n"))
    assert [number for number, _ in breaks] == [2]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("include/nvte_ep/nvte_ep.h", "#include <stdint.h>"),
        ("src/core/group.cc", '#include "core/backend.h"'),
        ("src/core/row_layout.h", '#include "formats/format_table.h"'),
        ("src/core/group.cc", "// never printf or abort() here"),
        ("src/core/group.cc", 'const char* text = "do not throw x;";'),
        ("src/core/group.cc", "group->abort(rank);"),
        ("src/core/group.cc", "void Group::abort() {"),
        ("src/core/group.h", "  void abort(int32_t rank);"),
        ("src/api/library.cc", '#include "backends/registry.h"'),
        ("src/core/group.h", "static_assert(sizeof(int) == 4);"),
        ("src/core/group.cc", "std::snprintf(buffer, sizeof buffer, format);"),
        ("src/api/guard.h", "throw;"),
        ("src/api/c_api.cc", '#include "core/group.h"'),
        ("src/formats/nvfp4.h", '#include "formats/numerics.h"'),
        ("src/backends/host_backend.cc", '#include "formats/nvfp4.h"'),
        ("src/backends/cuda/pack.cu", "#include <cuda_runtime.h>"),
        ("src/device/tiles.cuh", '#include "core/operand_layout.h"'),
        ("src/transports/nccl_api.cc", "#include <nccl.h>"),
        ("src/transports/peer/kernels.cu", '#include "device/flags.cuh"'),
        ("src/transports/threads.cc", '#include "transports/rendezvous.h"'),
        ("tests/cpp/test_any.cc", '#include "core/routing.h"'),
    ],
)
def test_what_is_allowed_passes(path: str, line: str) -> None:
    assert list(check_layers.check_source(path, f"{line}\n")) == []


@pytest.mark.parametrize(
    "line", ["import torch", "from jax import numpy", "def f() -> None:\n    import cupy"]
)
def test_frameworks_stay_in_their_adapters(line: str) -> None:
    assert len(list(check_layers.check_python("python/nvte_ep/codecs.py", line))) == 1
    assert list(check_layers.check_python("python/nvte_ep/torch.py", line)) == []


def test_the_tree_keeps_the_rules() -> None:
    assert check_layers.check_tree(Path(__file__).resolve().parent.parent) == []


def test_a_broken_tree_is_reported_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "src/core").mkdir(parents=True)
    (tmp_path / "src/core/bad.cc").write_text('\n#include "transports/threads.h"\n')
    assert [text.split(": ")[0] for text in check_layers.check_tree(tmp_path)] == ["src/core/bad.cc:2"]
