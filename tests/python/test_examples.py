# SPDX-License-Identifier: Apache-2.0
"""The examples and the guide's code, as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import nvte_ep
import pytest
from nvte_ep.group import ErrorInfo

ROOT = Path(__file__).resolve().parents[2]
MOE_LAYER = ROOT / "examples" / "python" / "moe_layer.py"


def run_example(library_path: Path, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    package = str(Path(nvte_ep.__file__).resolve().parent.parent)
    environment = os.environ | {"NVTE_EP_LIBRARY": str(library_path), "PYTHONPATH": package}
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_moe_layer(library_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_example(library_path, MOE_LAYER, *arguments)


def test_moe_layer(library_path: Path) -> None:
    done = run_moe_layer(library_path, "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 ranks, 8 experts")


@pytest.mark.parametrize("ranks", ["3", "0", "-2", "16", "many"])
def test_moe_layer_with_ranks_that_do_not_divide(library_path: Path, ranks: str) -> None:
    done = run_moe_layer(library_path, ranks)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ranks: expected a divisor of the 8 experts, got {ranks}\n"


def test_torch_layer(library_path: Path, framework: Callable[[str], ModuleType]) -> None:
    framework("torch")
    done = run_example(library_path, ROOT / "examples" / "python" / "torch_layer.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("rank 0 of 1, ")


def test_the_front_ends_of_frameworks_are_there_by_name(framework: Callable[[str], ModuleType]) -> None:
    framework("torch")
    assert callable(nvte_ep.torch.dispatch)


def test_the_guides_error_loop_ends(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "poll_error" in block]
    assert len(blocks) == 1
    names: dict[str, object] = {}
    exec(blocks[0], names)
    report = names["report"]
    assert callable(report)
    comm = nvte_ep.Communicator.threads(1)[0]
    group = nvte_ep.Group(comm, num_experts=4, hidden=64, max_tokens_per_rank=4)
    group.handle(top_k=1).prepare(np.array([[9], [0]]))
    report(group)
    assert "topk_idx: expected" in capsys.readouterr().out
    report(group)
    assert capsys.readouterr().out == ""
    group.abort()
    for _ in range(2):
        with pytest.raises(nvte_ep.PeerFailedError):
            report(group)
    group.close()

    class RanksInDifferentCalls:  # as `peer` tells them, for ever
        @staticmethod
        def poll_error() -> ErrorInfo:
            return ErrorInfo(nvte_ep.Status.INVALID_ARGUMENT, 1, None, 0, 0, "ranks in different calls")

    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"ranks in different calls"):
        report(RanksInDifferentCalls())
