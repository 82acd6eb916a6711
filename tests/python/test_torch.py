# SPDX-License-Identifier: Apache-2.0
"""nvte_ep.torch: an MoE layer over ranks has the gradients of the same layer written densely."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import nvte_ep
import pytest
from run_ranks import run_ranks

Framework = Callable[[str], ModuleType]

EXPERTS, HIDDEN, TOP_K, ALIGNMENT, CAPACITY = 4, 32, 2, 8, 96


@pytest.fixture
def torch(framework: Framework) -> Any:
    return framework("torch")


@pytest.fixture
def ep(framework: Framework) -> Any:
    framework("torch")
    import nvte_ep.torch

    return nvte_ep.torch


def open_group(comm: nvte_ep.Communicator, **changes: Any) -> nvte_ep.Group:
    settings: dict[str, Any] = {
        "num_experts": EXPERTS,
        "hidden": HIDDEN,
        "max_tokens_per_rank": 16,
        "recv_capacity": CAPACITY,
    }
    return nvte_ep.Group(comm, **(settings | changes))


def problem(torch: Any, num_tokens: int, seed: int) -> tuple[Any, Any, Any]:
    """Tokens, indices and weights; small dyadic numbers, so that BF16 on the wire loses nothing."""
    random = np.random.default_rng(seed)
    tokens = torch.from_numpy((random.integers(-8, 9, (num_tokens, HIDDEN)) / 8).astype(np.float32))
    chosen = [random.permutation(EXPERTS)[:TOP_K] for _ in range(num_tokens)]
    indices = torch.from_numpy(np.array(chosen, np.int64).reshape(num_tokens, TOP_K))
    weights = torch.from_numpy((random.integers(1, 8, (num_tokens, TOP_K)) / 8).astype(np.float32))
    if num_tokens > 2:
        indices[1, 0] = -1
        indices[2] = -1
    return tokens, indices, weights


def expert(x: Any, number: Any) -> Any:
    """Every expert is another elementwise function, with dyadic values and slopes."""
    return x * (number + 1) + x.abs() / 2


def dense_layer(torch: Any, tokens: Any, indices: Any, weights: Any) -> Any:
    result = torch.zeros_like(tokens)
    for k in range(TOP_K):
        routed = indices[:, k] >= 0
        factor = torch.where(routed, weights[:, k], torch.zeros(()))
        result = result + factor[:, None] * expert(tokens, indices[:, k, None].clamp(min=0).float())
    return result


def layer(
    torch: Any, ep: Any, handle: Any, tokens: Any, indices: Any, weights: Any, first_expert: int
) -> Any:
    routing = handle.prepare(indices)
    received, slot_weights = ep.dispatch(handle, tokens, weights)
    numbers = np.zeros((handle.slots, 1), np.float32)
    total = routing.total_rows.tolist()[0]
    numbers[:total, 0] = routing.slot_expert.numpy()[:total] + first_expert
    slots = expert(received, torch.from_numpy(numbers))
    return ep.combine(handle, slots, slot_weights)


@pytest.mark.parametrize("sizes", [[12], [16, 7], [5, 0], [3, 16, 0, 9]], ids=str)
def test_gradients(torch: Any, ep: Any, sizes: list[int]) -> None:
    ranks = len(sizes)
    comms = nvte_ep.Communicator.threads(ranks)

    def rank(number: int) -> Callable[[], None]:
        def run() -> None:
            tokens, indices, weights = problem(torch, sizes[number], number)
            grad = torch.from_numpy(
                (np.random.default_rng(99 + number).integers(-4, 5, tuple(tokens.shape)) / 4).astype(
                    np.float32
                )
            )
            expected = [value.clone().requires_grad_() for value in (tokens, weights)]
            dense = dense_layer(torch, expected[0], indices, expected[1])
            dense.backward(grad)
            with open_group(comms[number]) as group:
                handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
                given = [value.clone().requires_grad_() for value in (tokens, weights)]
                result = layer(torch, ep, handle, given[0], indices, given[1], number * EXPERTS // ranks)
                result.backward(grad)
                assert torch.allclose(result, dense, atol=2**-5, rtol=2**-7)
                for ours, theirs in zip(given, expected, strict=True):
                    assert ours.grad.shape == theirs.grad.shape
                    assert torch.allclose(ours.grad, theirs.grad, atol=2**-5, rtol=2**-6)
                # An unrouted token gets exact zeros.
                if sizes[number] > 2:
                    assert not result[2].any()
                    assert not given[0].grad[2].any()
                    assert not given[1].grad[2].any()

        return run

    run_ranks(*[rank(number) for number in range(ranks)])


def test_unweighted_bfloat16(torch: Any, ep: Any) -> None:
    tokens, indices, _ = problem(torch, 12, 0)
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
        handle.prepare(indices)
        given = tokens.bfloat16().requires_grad_()
        received, weights = ep.dispatch(handle, given)
        assert weights is None
        assert received.dtype == torch.bfloat16
        result = ep.combine(handle, received * 2)
        result.sum().backward()
        copies = (indices >= 0).sum(dim=1, keepdim=True)
        assert torch.equal(result, (tokens * 2 * copies).bfloat16())
        assert torch.equal(given.grad, (2 * copies).expand(-1, HIDDEN).bfloat16())


def test_slots_past_the_total_are_zero(torch: Any, ep: Any) -> None:
    tokens, indices, weights = problem(torch, 12, 0)
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
        total = handle.prepare(indices).total_rows.tolist()[0]
        assert total < CAPACITY
        received, slot_weights = ep.dispatch(handle, tokens, weights)
        assert not received[total:].any()
        assert not slot_weights[total:].any()
        slots = received.clone().requires_grad_()
        ep.combine(handle, slots, slot_weights).sum().backward()
        assert not slots.grad[total:].any()


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_quantised_directions(torch: Any, ep: Any, format: str) -> None:
    tokens, indices, weights = problem(torch, 12, 0)
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT, dispatch=format, combine_backward=format)
        given = tokens.clone().requires_grad_()
        result = layer(torch, ep, handle, given, indices, weights, 0)
        result.backward(torch.ones_like(result))
        dense = tokens.clone().requires_grad_()
        expected = dense_layer(torch, dense, indices, weights)
        expected.backward(torch.ones_like(expected))
        for ours, theirs in ((result, expected), (given.grad, dense.grad)):
            error = ((ours - theirs).norm() / theirs.norm()).item()
            assert error < (0.05 if format == "mxfp8" else 0.2)


def test_stochastic_gradients(torch: Any, ep: Any) -> None:
    _, indices, _ = problem(torch, 12, 0)
    grad = torch.from_numpy(np.random.default_rng(3).standard_normal((12, HIDDEN)).astype(np.float32))
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT, combine_backward="nvfp4")
        handle.prepare(indices)
        grads = []
        for offset in (0, 0, 1):
            slots = torch.ones(CAPACITY, HIDDEN, requires_grad=True)
            state = torch.tensor([7, offset])
            ep.combine(handle, slots, rounding="stochastic", rng_state=state).backward(grad)
            grads.append(slots.grad)
        assert torch.equal(grads[0], grads[1])
        assert not torch.equal(grads[0], grads[2])


def test_dispatch_packing_options(torch: Any, ep: Any) -> None:
    tokens, indices, _ = problem(torch, 12, 0)
    tokens[0, 0] = float("nan")
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT, dispatch="nvfp4")
        handle.prepare(indices)
        assert ep.dispatch(handle, tokens)[0].isnan().any()
        assert not ep.dispatch(handle, tokens, nonfinite="saturate")[0].isnan().any()


def test_a_second_prepare_before_the_backward(torch: Any, ep: Any) -> None:
    tokens, indices, weights = problem(torch, 12, 0)
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
        result = layer(torch, ep, handle, tokens.requires_grad_(), indices, weights, 0)
        handle.prepare(indices)
        with pytest.raises(nvte_ep.BadStateError, match="prepared again"):
            result.sum().backward()


def test_layers_with_handles_of_their_own(torch: Any, ep: Any) -> None:
    tokens, indices, weights = problem(torch, 12, 0)
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handles = [group.handle(top_k=TOP_K, alignment=ALIGNMENT) for _ in range(2)]
        given = tokens.clone().requires_grad_()
        hidden = given
        for handle in handles:
            hidden = layer(torch, ep, handle, hidden / 4, indices, weights, 0)
        hidden.sum().backward()
        dense = tokens.clone().requires_grad_()
        expected = dense
        for _ in handles:
            expected = dense_layer(torch, expected / 4, indices, weights)
        expected.sum().backward()
        assert torch.allclose(hidden, expected, atol=2**-4, rtol=2**-5)
        assert torch.allclose(given.grad, dense.grad, atol=2**-4, rtol=2**-5)
