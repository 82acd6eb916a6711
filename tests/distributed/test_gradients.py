# SPDX-License-Identifier: Apache-2.0
"""Both backwards: against finite differences of the forwards, an FP64 layer, and autograd of plain PyTorch
and JAX models of the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from distributed import gradients, model
from distributed.cases import Case
from distributed.gradients import LayerResult, data_of, experts_of
from distributed.here import TRANSPORTS
from distributed.transports import Transport

Framework = Callable[[str], ModuleType]
every_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=str)

# Everything in FP32, so that what is compared is the mathematics.
_FP32: dict[str, Any] = {"dtype": "float32", "routing": "unrouted", "experts": 6, "ranks": 3}
TINY = Case("tiny", **_FP32, hidden=16, tokens=(3, 0, 2), alignment=4)
LAYERS = [
    Case("layer", **_FP32, hidden=64, tokens=(20, 9, 33), top_k=3),
    Case("layer_eager", **_FP32, hidden=64, tokens=(20, 0, 33), top_k=3, capacity="eager"),
    Case("layer_of_one_rank", **{**_FP32, "ranks": 1}, hidden=32, tokens=25, top_k=2, alignment=1),
]
QUANTIZED = [
    Case("layer_nvfp4", **_FP32, hidden=64, tokens=(20, 9, 33), dispatch="nvfp4", combine_backward="nvfp4"),
    Case("layer_mxfp8", **_FP32, hidden=64, tokens=(20, 9, 33), dispatch="mxfp8", combine_backward="mxfp8"),
    Case("layer_mixed", **_FP32, hidden=64, tokens=(20, 9, 0), dispatch="nvfp4", combine_backward="mxfp8"),
]


def assert_same_layer(
    got: Sequence[LayerResult], expected: Sequence[LayerResult], tolerance: float = 2e-5
) -> None:
    """Results and gradients of the ranks' own tokens; gradients of expert matrices are sums over all tokens.
    The tolerance is relative to the largest value."""

    def compare(mine: Any, wanted: Any, name: str) -> None:
        largest = np.abs(wanted).max(initial=0)
        np.testing.assert_allclose(
            mine.astype(np.float64), wanted, rtol=tolerance, atol=tolerance * largest, err_msg=name
        )

    for rank, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
        for name in ("result", "tokens", "weights"):
            compare(getattr(mine, name), getattr(wanted, name), f"{name} of rank {rank}")
    for name in ("inner", "outer"):
        everywhere = np.concatenate([getattr(mine, name) for mine in got])
        compare(everywhere, np.sum([getattr(wanted, name) for wanted in expected], axis=0), name)


@every_transport
@pytest.mark.parametrize("differences", [gradients.differences_of_dispatch, gradients.differences_of_combine])
def test_backward_is_the_finite_difference_of_the_forward(transport: Transport, differences: Any) -> None:
    assert TINY.layouts
    for of_values, values_differ, of_weights, weights_differ in transport.run(
        3, differences, transport, TINY
    ):
        np.testing.assert_array_equal(of_values, values_differ)
        np.testing.assert_array_equal(of_weights, weights_differ)


@every_transport
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        *((case, 2e-6) for case in LAYERS),
        (Case("layer_bfloat16", **{**_FP32, "dtype": "bfloat16"}, hidden=64, tokens=(20, 9, 33)), 2e-2),
        (Case("layer_float16", **{**_FP32, "dtype": "float16"}, hidden=64, tokens=(20, 9, 33)), 5e-3),
    ],
    ids=str,
)
def test_layer_against_its_definition(transport: Transport, case: Case, tolerance: float) -> None:
    assert case.layouts
    got = transport.run(case.ranks, gradients.layer_by_hand, transport, case)
    experts = experts_of(case)
    expected = []
    for data in (data_of(case, rank) for rank in range(case.ranks)):
        result = model.layer(experts, data.tokens, data.topk, data.weights)
        grads = model.layer_backward(experts, data.tokens, data.topk, data.weights, data.grad)
        expected.append(LayerResult(result, grads.tokens, grads.weights, grads.inner, grads.outer))
    assert_same_layer(got, expected, tolerance)


@every_transport
@pytest.mark.parametrize("case", LAYERS + QUANTIZED, ids=str)
def test_torch_layer_against_plain_torch(framework: Framework, transport: Transport, case: Case) -> None:
    torch = framework("torch")
    assert case.layouts
    got = transport.run(case.ranks, gradients.torch_layer, transport, case)
    expected = [gradients.plain_torch_layer(torch, case, rank) for rank in range(case.ranks)]
    assert_same_layer(got, expected)


@every_transport
@pytest.mark.parametrize(
    ("case", "compiled"), [(LAYERS[0], True), (LAYERS[2], True), (LAYERS[2], False)], ids=str
)
def test_jax_layer_against_plain_jax(
    framework: Framework, transport: Transport, case: Case, compiled: bool
) -> None:
    jax = framework("jax")
    assert case.layouts
    got = transport.run(case.ranks, gradients.jax_layer, transport, case, compiled)
    assert_same_layer(got, [gradients.plain_jax_layer(jax, case, rank) for rank in range(case.ranks)])
