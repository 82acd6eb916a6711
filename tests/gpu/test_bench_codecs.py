# SPDX-License-Identifier: Apache-2.0
"""nvte-ep bench codecs on a device, and the stand-ins that it compares with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import nvte_ep
import pytest
from codec_calls import same_bytes
from nvte_ep.commands import main
from nvte_ep.commands.bench_cases import Data, ReceiveCase, SwizzleCase, all_cases
from nvte_ep.commands.bench_instead import Frameworks, instead_of
from nvte_ep.commands.bench_machine import CudaMachine


def test_figures(torch: Any, framework: Callable[[str], ModuleType], tmp_path: Path) -> None:
    framework("triton")
    file = tmp_path / "figures.json"
    arguments = ["bench", "codecs", "--device", "cuda", "--sizes", "16,1000", "--hidden", "1056", "--quick"]
    assert main([*arguments, "--json", str(file)]) == 0
    answer = json.loads(file.read_text())
    assert answer["not_run"] == []
    assert answer["checks"]["failed"] == []
    assert {result["codec"] for result in answer["results"]} == {case.name for case in all_cases()}
    for result in answer["results"]:
        assert result["gbps"] > 0
        names = {instead["name"] for instead in result["instead"]}
        assert names == (
            {"triton"} if "direct" in result["codec"] else {"torch"} if "scales" in result["codec"] else
            {"torch", "triton"}
        )  # fmt: skip


@pytest.mark.parametrize("hidden", [1056, 7168])
def test_triton_kernels_make_the_same_bytes(
    torch: Any, framework: Callable[[str], ModuleType], hidden: int
) -> None:
    """Else their times would say nothing."""
    framework("triton")
    from nvte_ep.commands import bench_triton

    data = Data(hidden, 300)
    count = data.num_tokens
    x = torch.from_numpy(data.tokens.view(np.int16)).to("cuda").view(torch.bfloat16)

    def empty(columns: int) -> Any:
        return torch.full((count, columns), 0xA5, dtype=torch.uint8, device="cuda")

    payload, scales = empty(hidden), empty(hidden // 32)
    bench_triton.mxfp8_quantize(x, payload, scales)
    expected = nvte_ep.mxfp8_quantize(data.tokens, dtype="bfloat16")
    same_bytes("mxfp8 payload", payload.cpu().numpy(), expected[0].numpy())
    same_bytes("mxfp8 scales", scales.cpu().numpy(), expected[1].numpy())
    out = torch.empty_like(x)
    bench_triton.mxfp8_dequantize(payload, scales, out)
    same_bytes(
        "mxfp8 values",
        out.view(torch.uint8).cpu().numpy(),
        nvte_ep.mxfp8_dequantize(expected[0], expected[1]).view("uint8").numpy(),
    )

    payload, scales = empty(hidden // 2), empty(hidden // 16)
    bench_triton.nvfp4_quantize(x, payload, scales, 1.0)
    flat = nvte_ep.nvfp4_quantize(data.tokens, dtype="bfloat16", tensor_scale=1.0)
    same_bytes("nvfp4 scales", scales.cpu().numpy(), flat[1].numpy())
    same_bytes("nvfp4 payload", payload.cpu().numpy(), flat[0].numpy())
    parts = nvte_ep.nvfp4_quantize(data.tokens, dtype="bfloat16")
    placed = [torch.from_dlpack(part).to("cuda") for part in parts]
    bench_triton.nvfp4_dequantize(placed[0], placed[1], placed[2], out)
    same_bytes(
        "nvfp4 values",
        out.view(torch.uint8).cpu().numpy(),
        nvte_ep.nvfp4_dequantize(*parts).view("uint8").numpy(),
    )


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_the_permutation_is_the_swizzle(torch: Any, format: str) -> None:
    machine = CudaMachine()
    frameworks = Frameworks(machine)
    data = Data(1056, 300)
    for inverse in (False, True):
        run = SwizzleCase(format, inverse).start(machine, data, 300, 2)
        with frameworks.on_stream():
            (make,) = instead_of(run, data, frameworks)
            instead = make()
            for call in instead.calls:
                call()
        for call in run.calls:
            call()
        torch.cuda.synchronize()
        for index in range(2):
            theirs: Any = instead.calls[index]
            if inverse:
                compact = theirs.padded[:300, : run.columns].cpu().numpy()
                same_bytes("compact", compact, machine.read(run.compact[index]))
            else:
                same_bytes("tiles", theirs.tiled.cpu().numpy(), machine.read(run.tiled[index]))


@pytest.mark.parametrize("columnwise", [False, True])
def test_the_way_around_direct_receive_runs(
    torch: Any, framework: Callable[[str], ModuleType], columnwise: bool
) -> None:
    framework("triton")
    machine = CudaMachine()
    frameworks = Frameworks(machine)
    data = Data(1056, 300)
    for format in ("nvfp4", "mxfp8"):
        run = ReceiveCase(format, columnwise).start(machine, data, 256, 2)
        with frameworks.on_stream():
            (make,) = instead_of(run, data, frameworks)
            assert machine.time(make().calls, 3).median > 0
