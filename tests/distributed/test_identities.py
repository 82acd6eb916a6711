# SPDX-License-Identifier: Apache-2.0
"""Two ways through the library that must end in the same bytes, and layers whose result is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distributed import identities
from distributed.cases import Case
from distributed.here import TRANSPORTS
from distributed.transports import Transport

every_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=str)


def case_of(ranks: int, alignment: int, format: str, **changes: Any) -> Case:
    tokens = tuple((7, 0, 12, 5, 9)[rank % 5] for rank in range(ranks))
    settings: dict[str, Any] = {
        "experts": 2 * ranks,
        "top_k": min(3, 2 * ranks),
        "hidden": 96,
        "tokens": tokens,
        "alignment": alignment,
        "dispatch": format,
        "combine_backward": format,
        "routing": "unrouted",
    }
    return Case(f"{format}_{ranks}_{alignment}", ranks=ranks, **{**settings, **changes})


SHAPES = [
    (transport, ranks, alignment)
    for transport in TRANSPORTS
    for ranks in (1, 2, 3, 8, 64)
    for alignment in transport.alignments
    if transport.takes(ranks)
]


@pytest.mark.parametrize(("transport", "ranks", "alignment"), SHAPES, ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_quantized_equals_bf16_of_what_was_quantized(
    transport: Transport, format: str, alignment: int, ranks: int
) -> None:
    case = case_of(ranks, alignment, format)
    assert case.layouts
    transport.run(ranks, identities.quantized_equals_bf16_of_what_was_quantized, transport, case)


@every_transport
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("capacity", ["fit", "eager"])
def test_quantized_beforehand_equals_quantized_inside(
    transport: Transport, format: str, capacity: str
) -> None:
    case = case_of(3, 16, format, capacity=capacity)
    assert case.layouts
    transport.run(3, identities.quantized_beforehand_equals_quantized_inside, transport, case)


@every_transport
@pytest.mark.parametrize("capacity", ["fit", "eager"])
def test_tensor_scale_equals_its_rows(transport: Transport, capacity: str) -> None:
    case = case_of(3, 16, "nvfp4", capacity=capacity)
    assert case.layouts
    transport.run(3, identities.tensor_scale_equals_its_rows, transport, case)


@every_transport
@pytest.mark.parametrize("option", identities.OPERANDS)
def test_operand_options_reach_direct_receive(transport: Transport, option: str) -> None:
    case = case_of(2, 32, "nvfp4", tokens=48, routing="skewed")
    assert case.layouts
    changed = transport.run(2, identities.operand_options_reach_direct_receive, transport, case, option)
    assert all(changed), "the option was to make a difference"


@every_transport
@pytest.mark.parametrize("format", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("routing", ["random", "unrouted", "twice"])
def test_identity_layer_is_the_sum_within_one_rounding(
    transport: Transport, format: str, routing: str
) -> None:
    case = case_of(4, 16, format, top_k=8, routing=routing, tokens=(33, 1, 0, 20))
    assert case.layouts
    for rank, results in enumerate(transport.run(4, identities.identity_layer, transport, case)):
        for got, weighted in zip(results, (False, True), strict=True):
            exact, magnitude = identities.sum_of_choices(case, rank, weighted)
            # One rounding to BF16, and what FP32 sums of eight are off.
            roundings = 1 if transport.exact_sums else 2
            allowed = magnitude * (roundings * 2.0**-8 + 8 * 2.0**-24)
            assert (np.abs(got.astype(np.float64) - exact) <= allowed).all()
            if transport.exact_sums and not weighted:
                # FP32 sums of up to eight equal BF16 numbers are exact: it is the correctly rounded sum.
                assert got.tobytes() == exact.astype(got.dtype).tobytes()
