# SPDX-License-Identifier: Apache-2.0
"""nvte_ep.jax: the layer and its gradients, under jit and out of it, over one rank and more."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import nvte_ep
import pytest
from run_ranks import run_ranks

Framework = Callable[[str], ModuleType]

EXPERTS, HIDDEN, TOP_K, ALIGNMENT, CAPACITY, TOKENS = 4, 32, 2, 8, 96, 12


@pytest.fixture
def jax(framework: Framework) -> Any:
    return framework("jax")


@pytest.fixture
def ep(framework: Framework) -> Any:
    framework("jax")
    import nvte_ep.jax

    return nvte_ep.jax


def open_group(comm: nvte_ep.Communicator) -> nvte_ep.Group:
    return nvte_ep.Group(
        comm, num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=16, recv_capacity=CAPACITY
    )


def problem(seed: int, tokens: int = TOKENS) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(seed)
    values = (random.integers(-8, 9, (tokens, HIDDEN)) / 8).astype(np.float32)
    indices = np.array([random.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)], np.int32)
    indices[1, 0] = -1
    indices[2] = -1
    return values, indices, (random.integers(1, 8, (tokens, TOP_K)) / 8).astype(np.float32)


def make_layer(jax: Any, ep: Any, handle: Any, first_expert: int) -> Callable[..., Any]:
    jnp = jax.numpy

    def layer(tokens: Any, indices: Any, weights: Any) -> Any:
        counts = ep.prepare(handle, indices)
        received, slot_weights = ep.dispatch(handle, tokens, weights)
        numbers = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(handle.slots), side="right") + first_expert
        slots = received * (numbers[:, None] + 1.0) + jnp.abs(received) / 2
        return ep.combine(handle, slots, slot_weights, num_tokens=tokens.shape[0])

    return layer


def dense_layer(jnp: Any, tokens: Any, indices: Any, weights: Any) -> Any:
    result = jnp.zeros_like(tokens)
    for k in range(TOP_K):
        factor = jnp.where(indices[:, k] >= 0, weights[:, k], 0.0)
        result += factor[:, None] * (tokens * (indices[:, k, None] + 1.0) + jnp.abs(tokens) / 2)
    return result


def check(jax: Any, layer: Callable[..., Any], seed: int, jit: bool) -> None:
    jnp = jax.numpy
    tokens, indices, weights = (jnp.asarray(value) for value in problem(seed))
    grad = jnp.asarray((np.random.default_rng(99).integers(-4, 5, (TOKENS, HIDDEN)) / 4).astype(np.float32))

    def value_and_gradients(function: Callable[..., Any]) -> Any:
        def run(tokens: Any, weights: Any) -> Any:
            result, backward = jax.vjp(lambda t, w: function(t, indices, w), tokens, weights)
            return result, backward(grad)

        return (jax.jit(run) if jit else run)(tokens, weights)

    ours = value_and_gradients(layer)
    theirs = value_and_gradients(lambda *arguments: dense_layer(jnp, *arguments))
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert left.shape == right.shape
        assert np.allclose(left, right, atol=2**-5, rtol=2**-6)


@pytest.mark.parametrize("jit", [False, True])
def test_gradients(jax: Any, ep: Any, jit: bool) -> None:
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
        check(jax, make_layer(jax, ep, handle, 0), 0, jit)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_over_ranks(jax: Any, ep: Any, ranks: int, jit: bool) -> None:
    comms = nvte_ep.Communicator.threads(ranks)

    def rank(number: int) -> None:
        with open_group(comms[number]) as group:
            handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
            check(jax, make_layer(jax, ep, handle, number * EXPERTS // ranks), number, jit)

    run_ranks(*[functools.partial(rank, number) for number in range(ranks)], seconds=100)


def test_a_jitted_step_runs_again(jax: Any, ep: Any) -> None:
    """Every call runs the callbacks again, in order, with the routing of its own arguments."""
    jnp = jax.numpy
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
        step = jax.jit(make_layer(jax, ep, handle, 0))
        for seed in range(4):
            arguments = [jnp.asarray(value) for value in problem(seed)]
            assert np.allclose(step(*arguments), dense_layer(jnp, *arguments), atol=2**-5, rtol=2**-6)
        assert handle.prepared == 4


def test_unweighted_bfloat16(jax: Any, ep: Any) -> None:
    jnp = jax.numpy
    tokens, indices, _ = problem(0)
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
        ep.prepare(handle, jnp.asarray(indices))

        def run(tokens: Any) -> Any:
            received, weights = ep.dispatch(handle, tokens)
            assert weights is None
            return ep.combine(handle, received * 2, num_tokens=TOKENS)

        result, backward = jax.vjp(run, jnp.asarray(tokens, jnp.bfloat16))
        copies = (indices >= 0).sum(axis=1, keepdims=True)
        assert result.dtype == jnp.bfloat16
        assert (np.asarray(result, np.float32) == tokens * 2 * copies).all()
        (grad,) = backward(jnp.ones_like(result))
        assert (np.asarray(grad, np.float32) == np.broadcast_to(2 * copies, tokens.shape)).all()


def test_quantised_directions(jax: Any, ep: Any) -> None:
    jnp = jax.numpy
    tokens, indices, weights = (jnp.asarray(value) for value in problem(0))
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT, dispatch="nvfp4", combine_backward="nvfp4")
        layer = make_layer(jax, ep, handle, 0)
        result, backward = jax.vjp(lambda t: layer(t, indices, weights), tokens)
        expected, dense_backward = jax.vjp(lambda t: dense_layer(jnp, t, indices, weights), tokens)
        grad = jnp.ones_like(result)
        for ours, theirs in ((result, expected), (backward(grad)[0], dense_backward(grad)[0])):
            assert jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs) < 0.2


def test_errors_come_through(jax: Any, ep: Any) -> None:
    jnp = jax.numpy
    with open_group(nvte_ep.Communicator.threads(1)[0]) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
        with pytest.raises(Exception, match="prepare"):
            jax.block_until_ready(ep.dispatch(handle, jnp.zeros((4, HIDDEN))))
