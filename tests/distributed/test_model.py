# SPDX-License-Identifier: Apache-2.0
"""The model itself: a layout worked out by hand, sums as matrix products, gradients by finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from distributed import model
from distributed.cases import CASES, Case

Array = NDArray[Any]

# Two ranks of two experts; three tokens on rank 0, two on rank 1.
TOPK = [np.array([[0, 3], [2, -1], [0, 0]]), np.array([[3, 0], [1, 9]])]


def test_a_layout_by_hand() -> None:
    first, second = model.layouts(TOPK, 4, alignment=2)
    assert first.tokens_routed.tolist() == [3, 1]
    assert first.rows_per_expert.tolist() == [4, 2]
    assert first.row_offsets.tolist() == [0, 4, 6]
    assert first.scale_row_offsets.tolist() == [0, 128, 256]
    assert first.slot_source.tolist() == [0, 2, 1 << 32, -1, (1 << 32) | 1, -1]
    assert first.source_k.tolist() == [0, 0, 1, -1, 0, -1]
    assert first.expert.tolist() == [0, 0, 0, 0, 1, 1]
    assert (first.total_rows, first.dropped_rows, first.needed_rows) == (6, 0, 6)
    assert second.slot_source.tolist() == [1, -1, 0, 1 << 32]
    assert second.expert.tolist() == [0, 0, 1, 1]


def test_an_overflow_by_hand() -> None:
    layout = model.layouts(TOPK, 4, alignment=2, capacity=2)[0]
    assert layout.tokens_per_expert.tolist() == [2, 0]
    assert layout.row_offsets.tolist() == [0, 2, 2]
    assert layout.slot_source.tolist() == [0, 2]
    assert (layout.total_rows, layout.dropped_rows, layout.needed_rows) == (2, 2, 6)


def test_faults_of_a_choice() -> None:
    clean, faults = model.clean_choice(np.array([[3, 3, 7, -1, 0, 9, -5, 3]]), 8)
    assert clean.tolist() == [[3, -1, 7, -1, 0, -1, -1, -1]]
    assert faults == 4


@pytest.mark.parametrize("case", [case for case in CASES if case.hidden <= 64], ids=str)
def test_combine_is_the_transpose_of_dispatch(case: Case) -> None:
    """<dispatch(x), y> == <x, combine(y)> summed over ranks, in exact small integers."""
    random = case.random(0, "transpose")
    tokens = [random.integers(-4, 5, (n, case.hidden)).astype(np.float64) for n in case.tokens_of]
    slots = [random.integers(-4, 5, (lay.total_rows, case.hidden)).astype(np.float64) for lay in case.layouts]
    sent = sum(
        float((model.dispatch(lay, tokens) * y).sum()) for lay, y in zip(case.layouts, slots, strict=True)
    )
    back = sum(
        float((x * model.combine(where, slots, dtype=np.float64)).sum())
        for x, where in zip(tokens, case.where, strict=True)
    )
    assert sent == back


def test_mxfp8_rounding() -> None:
    row = np.zeros(64, np.float32)
    row[:3] = [448.0, 1.0, 0.017]
    row[32:34] = [1e-3, -2e-3]
    got = model.round_to_mxfp8(row)
    assert got[:3].tolist() == [448.0, 1.0, 0.017578125]
    assert np.abs(got / np.where(row, row, 1) - 1)[[0, 1, 2, 32, 33]].max() < 2**-4
    assert not got[3:32].any() and not got[34:].any()


def small_layer() -> tuple[model.Experts, Array, Array, Array, Array]:
    random = np.random.default_rng(3)
    experts = model.Experts(random.standard_normal((4, 6, 5)) / 2, random.standard_normal((4, 5, 6)) / 2)
    topk = np.array([[0, 3], [2, -1], [-1, -1], [3, 1], [1, 0]])
    tokens, grad = random.standard_normal((2, 5, 6))
    return experts, tokens, topk, random.random((5, 2)), grad


def test_gradients_of_the_layer_by_finite_differences() -> None:
    experts, tokens, topk, weights, grad = small_layer()
    grads = model.layer_backward(experts, tokens, topk, weights, grad)

    def loss() -> float:
        return float((model.layer(experts, tokens, topk, weights) * grad).sum())

    for values, gradient in (
        (tokens, grads.tokens),
        (weights, grads.weights),
        (experts.inner, grads.inner),
        (experts.outer, grads.outer),
    ):
        np.testing.assert_allclose(gradient, finite_differences(loss, values), rtol=1e-6, atol=1e-9)


def finite_differences(loss: Callable[[], float], values: Array, step: float = 1e-5) -> Array:
    result = np.zeros(values.shape)
    for index in np.ndindex(*values.shape):
        here = values[index]
        values[index] = here + step
        above = loss()
        values[index] = here - step
        below = loss()
        values[index] = here
        result[index] = (above - below) / (2 * step)
    return result


def test_the_layer_over_slots_is_the_layer() -> None:
    """Dispatch, experts on slots and combine are the definition by tokens, forward and backward."""
    experts, tokens, topk, weights, grad = small_layer()
    everybody = model.layouts([topk[:2], topk[2:]], 4, alignment=4)
    parts, weight_parts, grad_parts = ([x[:2], x[2:]] for x in (tokens, weights, grad))
    wheres = [model.slots_of_tokens(everybody, rank, len(x), 2) for rank, x in enumerate(parts)]
    slots = [model.dispatch(layout, parts) for layout in everybody]
    outs = [
        experts.on_slots(layout, 2 * r, x) for r, (layout, x) in enumerate(zip(everybody, slots, strict=True))
    ]
    slot_weights = [model.dispatch_weights(layout, weight_parts) for layout in everybody]
    result = np.concatenate([model.combine(where, outs, slot_weights, dtype=np.float64) for where in wheres])
    np.testing.assert_allclose(result, model.layer(experts, tokens, topk, weights), rtol=1e-12)

    expected = model.layer_backward(experts, tokens, topk, weights, grad)
    slot_grads = [model.dispatch(layout, grad_parts) for layout in everybody]
    weighted = [g * w[:, None] for g, w in zip(slot_grads, slot_weights, strict=True)]
    backwards = [
        experts.on_slots_backward(layout, 2 * r, x, g)
        for r, (layout, x, g) in enumerate(zip(everybody, slots, weighted, strict=True))
    ]
    grad_slots = [grads[0] for grads in backwards]
    got = np.concatenate([model.combine(where, grad_slots, dtype=np.float64) for where in wheres])
    np.testing.assert_allclose(got, expected.tokens, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(np.concatenate([g[1] for g in backwards]), expected.inner, atol=1e-14)
    np.testing.assert_allclose(np.concatenate([g[2] for g in backwards]), expected.outer, atol=1e-14)
    dots = [(g * out).sum(axis=1) for g, out in zip(slot_grads, outs, strict=True)]
    weight_grads = np.concatenate([model.gather_slot_values(where, dots) for where in wheres])
    np.testing.assert_allclose(weight_grads, expected.weights, atol=1e-6)
