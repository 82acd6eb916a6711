# SPDX-License-Identifier: Apache-2.0
"""find_package(nvte_ep): C and C++ programs build with the installed tree and run, wherever the tree lies."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES C CXX)
find_package(nvte_ep {version} CONFIG REQUIRED)
add_executable(c_consumer c_consumer.c)
target_link_libraries(c_consumer PRIVATE nvte_ep::nvte_ep)
add_executable(cxx_consumer cxx_consumer.cc)
target_link_libraries(cxx_consumer PRIVATE nvte_ep::nvte_ep)
"""
CXX_CONSUMER = """
#include <cstdio>
#include <nvte_ep/nvte_ep.h>
int main() {
  std::printf("%d %d\\n", nvte_ep_version(), nvte_ep_abi_version());
  return nvte_ep_abi_version() == NVTE_EP_ABI_VERSION ? 0 : 1;
}
"""


def configure(folder: Path, prefix: Path, repository: Path, version: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(CMAKE_LISTS.format(version=version))
    (folder / "cxx_consumer.cc").write_text(CXX_CONSUMER)
    shutil.copy(repository / "tests/cpp/c_consumer.c", folder)
    return subprocess.run(
        ["cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}"],
        capture_output=True,
        text=True,
    )


def build_and_run(run: Any, folder: Path, prefix: Path, repository: Path) -> None:
    configured = configure(folder, prefix, repository, "0.1")
    assert configured.returncode == 0, configured.stdout + configured.stderr
    run(["cmake", "--build", folder / "build"])
    run([folder / "build/cxx_consumer"])
    assert "c_consumer: OK" in run([folder / "build/c_consumer"])


def test_programs_build_and_run(run: Any, tmp_path: Path, prefix: Path, repository: Path) -> None:
    build_and_run(run, tmp_path / "consumer", prefix, repository)


def test_the_tree_may_be_moved(run: Any, tmp_path: Path, prefix: Path, repository: Path) -> None:
    moved = tmp_path / "somewhere else" / "nvte_ep"
    shutil.copytree(prefix, moved, symlinks=True)
    build_and_run(run, tmp_path / "consumer", moved, repository)


@pytest.mark.parametrize("version", ["0.2", "1.0", "0.0.1"])
def test_another_version_is_refused(tmp_path: Path, prefix: Path, repository: Path, version: str) -> None:
    configured = configure(tmp_path / "consumer", prefix, repository, version)
    assert configured.returncode != 0
    assert "compatible with requested version" in configured.stdout + configured.stderr


def test_the_c_engine_example(run: Any, tmp_path: Path, prefix: Path, repository: Path) -> None:
    source = repository / "examples/c_engine"
    run(["cmake", "-S", source, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}"])
    run(["cmake", "--build", tmp_path])
    for ranks in ("1", "4"):
        output = run([tmp_path / "moe_engine", ranks])
        assert output.startswith(f"{ranks} ranks"), output
        assert "272 bytes a token on the wire, 512 in BF16" in output
