# SPDX-License-Identifier: Apache-2.0
"""check_release.py on a small tree that is right, and on each way to break it."""

from __future__ import annotations

from pathlib import Path

import check_release
import pytest

HEADER = """#define NVTE_EP_VERSION_MAJOR 1
#define NVTE_EP_VERSION_MINOR 2
#define NVTE_EP_VERSION_PATCH 3
#define NVTE_EP_ABI_VERSION 4
NVTE_EP_API int32_t nvte_ep_one(void);
NVTE_EP_API const char* nvte_ep_two(int32_t x,
                                    int32_t y);
"""
MAP = "/* nvte_ep_none; */ NVTE_EP_4 { global: nvte_ep_one; nvte_ep_two; local: *; };"
CHANGELOG = "# Changes\n\n## 1.2.3\n\n### ABI\n\n- First.\n\n## 1.2.2\n"


def write(root: Path, header: str = HEADER, exports: str = MAP, changelog: str = CHANGELOG) -> list[str]:
    for path, text in {
        "include/nvte_ep/nvte_ep.h": header,
        "src/api/nvte_ep.map": exports,
        "CHANGELOG.md": changelog,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return list(check_release.problems(root))


def test_a_consistent_tree_passes(tmp_path: Path) -> None:
    assert write(tmp_path) == []
    assert write(tmp_path, changelog=CHANGELOG.replace("1.2.3", "[Unreleased]")) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"exports": MAP.replace("nvte_ep_two; ", "")}, "nvte_ep_two of the header is not exported"),
        (
            {"exports": MAP.replace("nvte_ep_two", "nvte_ep_three; nvte_ep_two")},
            "nvte_ep_three is not in the",
        ),
        ({"exports": MAP.replace("NVTE_EP_4", "NVTE_EP_3")}, "no node NVTE_EP_4"),
        ({"changelog": CHANGELOG.replace("1.2.3", "1.2.1")}, "newest section is 1.2.1"),
        ({"changelog": CHANGELOG.replace("- First.", "")}, "no '### ABI' entry"),
        ({"changelog": CHANGELOG.replace("### ABI", "### Added")}, "no '### ABI' entry"),
    ],
)
def test_each_break_is_reported(tmp_path: Path, change: dict[str, str], expected: str) -> None:
    found = write(tmp_path, **change)
    assert len(found) == 1
    assert expected in found[0]


def test_this_tree_is_consistent() -> None:
    assert list(check_release.problems(Path(__file__).resolve().parent.parent)) == []
