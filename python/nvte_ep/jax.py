# SPDX-License-Identifier: Apache-2.0
# The types must check with JAX installed and without:
# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
"""Dispatch and combine as JAX operations with gradients, inside jax.jit or out of it: for JAX on the CPU.

    counts = nvte_ep.jax.prepare(handle, topk_idx)
    received, weights = nvte_ep.jax.dispatch(handle, tokens, topk_weights)
    result = nvte_ep.jax.combine(handle, experts(received, counts), weights, num_tokens=tokens.shape[0])

Every call is an ordered callback, since every rank must make the same sequence of calls. A handle holds one
routing: use one for each layer and micro-batch. Under jit the group has a fixed recv_capacity. Tokens travel
in the wire formats of the handle and arrive decoded; slots past the routing's total are zero.

On a GPU pass arrays to the Handle itself, outside of jit: it takes them through DLPack.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from nvte_ep.handle import Handle, Routing

__all__ = ["combine", "dispatch", "prepare"]


def _shape(like: Any, *sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, like.dtype)


def _zeros(shape: jax.ShapeDtypeStruct) -> Any:
    # The library leaves slots past the total as they are; experts would turn what lies there into gradients.
    return np.zeros(shape.shape, shape.dtype)


def _host(array: Any) -> Any:
    """What a callback gets, as a NumPy array with a dense inner dimension; None stays None."""
    return None if array is None else np.ascontiguousarray(array)


def prepare(handle: Handle, topk_idx: jax.Array) -> jax.Array:
    """Exchanges the routing; tells rows_per_expert int32 [local experts], padding included. Collective."""
    shape = jax.ShapeDtypeStruct((handle.group.info.num_local_experts,), jnp.int32)

    def run(indices: Any) -> Any:
        rows = np.empty(shape.shape, np.int32)
        handle.prepare(_host(indices), out=Routing(rows_per_expert=rows))
        return rows

    return io_callback(run, shape, topk_idx, ordered=True)


def dispatch(
    handle: Handle, tokens: jax.Array, topk_weights: jax.Array | None = None, **packing: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Tokens [T, H] to the slots of this rank's experts: [slots, H], and weights float32 [slots] or None.
    Collective.

    packing: rounding, rng_state, nonfinite, scale_rounding, ... of Handle.dispatch.
    """
    num_tokens, hidden = tokens.shape
    received_shape = _shape(tokens, handle.slots, hidden)
    weights_shape = None if topk_weights is None else _shape(topk_weights, handle.slots)
    grad_shapes = (
        _shape(tokens, num_tokens, hidden),
        None if topk_weights is None else _shape(topk_weights, *topk_weights.shape),
    )

    def run_forward(tokens: Any, topk_weights: Any) -> Any:
        received = _zeros(received_shape)
        weights = None if weights_shape is None else _zeros(weights_shape)
        handle.dispatch(
            _host(tokens),
            _host(topk_weights),
            receive="decoded",
            out=received,
            recv_weights=weights,
            dtype=received.dtype,
            **packing,
        )
        return received, weights

    def run_backward(grad_received: Any, grad_weights: Any) -> Any:
        grad_tokens, grad_topk_weights = (None if shape is None else _zeros(shape) for shape in grad_shapes)
        handle.dispatch_backward(
            _host(grad_received), _host(grad_weights), out=grad_tokens, grad_topk_weights=grad_topk_weights
        )
        return grad_tokens, grad_topk_weights

    @jax.custom_vjp
    def operation(tokens: Any, topk_weights: Any) -> Any:
        return io_callback(run_forward, (received_shape, weights_shape), tokens, topk_weights, ordered=True)

    def forward(tokens: Any, topk_weights: Any) -> Any:
        return operation(tokens, topk_weights), None

    def backward(_: Any, grads: Any) -> Any:
        return io_callback(run_backward, grad_shapes, *grads, ordered=True)

    operation.defvjp(forward, backward)
    received, weights = operation(tokens, topk_weights)
    return received, weights


def combine(
    handle: Handle,
    expert_out: jax.Array,
    slot_weights: jax.Array | None = None,
    *,
    num_tokens: int,
    **packing: Any,
) -> jax.Array:
    """Expert outputs [slots, H] to the weighted sums of every token [num_tokens, H]. Collective.

    packing is for the backward, where gradients are dispatched.
    """
    hidden = expert_out.shape[1]
    result_shape = _shape(expert_out, num_tokens, hidden)
    grad_shapes = (
        _shape(expert_out, *expert_out.shape),
        None if slot_weights is None else _shape(slot_weights, *slot_weights.shape),
    )

    def run_forward(expert_out: Any, slot_weights: Any) -> Any:
        result = _zeros(result_shape)
        handle.combine(_host(expert_out), slot_weights=_host(slot_weights), out=result)
        return result

    def run_backward(grad: Any, expert_out: Any, slot_weights: Any) -> Any:
        grad_expert_out, grad_slot_weights = (
            None if shape is None else _zeros(shape) for shape in grad_shapes
        )
        handle.combine_backward(
            _host(grad),
            receive="decoded",
            out=grad_expert_out,
            slot_weights=_host(slot_weights),
            expert_out=_host(expert_out),
            grad_slot_weights=grad_slot_weights,
            dtype=result_shape.dtype,
            **packing,
        )
        return grad_expert_out, grad_slot_weights

    @jax.custom_vjp
    def operation(expert_out: Any, slot_weights: Any) -> Any:
        return io_callback(run_forward, result_shape, expert_out, slot_weights, ordered=True)

    def forward(expert_out: Any, slot_weights: Any) -> Any:
        # Unweighted, the backward reads neither.
        kept = (None, None) if slot_weights is None else (expert_out, slot_weights)
        return operation(expert_out, slot_weights), kept

    def backward(kept: Any, grad: Any) -> Any:
        return io_callback(run_backward, grad_shapes, grad, *kept, ordered=True)

    operation.defvjp(forward, backward)
    result: jax.Array = operation(expert_out, slot_weights)
    return result
