# SPDX-License-Identifier: Apache-2.0
"""CMake options as a build folder keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_what_a_script_takes_auto_for_is_not_kept(run: Any, repository: Path, tmp_path: Path) -> None:
    """Otherwise a build by hand in the folder of ci/demo.sh or ci/test.sh would quietly have no CUDA."""
    configure = ["cmake", "-S", repository, "-B", tmp_path, "-DNVTE_EP_BUILD_TESTS=OFF"]
    said = run([*configure, "-DNVTE_EP_CUDA=AUTO", "-DNVTE_EP_CUDA_AUTO_IS=OFF"])
    assert "CPU only (NVTE_EP_CUDA=AUTO, without CUDA this time)" in said
    cache = (tmp_path / "CMakeCache.txt").read_text()
    assert "NVTE_EP_CUDA:STRING=AUTO\n" in cache and "NVTE_EP_CUDA_AUTO_IS" not in cache
    assert "this time" not in run(configure)
