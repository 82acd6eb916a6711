# SPDX-License-Identifier: Apache-2.0
"""Bodies of ranks for test_gradients.py: layers through the library, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import nvte_ep
from numpy.typing import NDArray
from nvte_ep import Handle

from distributed import model
from distributed.cases import DTYPES, Case
from distributed.launcher import Rank
from distributed.steps import open_group, open_handle
from distributed.transports import Transport

Array = NDArray[Any]


def dyadic(random: np.random.Generator, *shape: int) -> Array:
    """Multiples of 1/8 up to 2: exact in BF16, and so are their sums and products in FP32."""
    return (random.integers(-16, 17, shape) / 8).astype(np.float32)


# ---- finite differences of the library's own forward -------------------------------------------------------


def differences_of_dispatch(rank: Rank, transport: Transport, case: Case) -> tuple[Array, ...]:
    """Gradients of sum(received * g) + sum(recv_weights * gw), summed over ranks: by dispatch_backward, and
    element by element by central differences of dispatch. They are linear, so both are exact."""
    me = rank.index
    random = case.random(me, "differences")
    tokens = dyadic(random, case.tokens_of[me], case.hidden)
    weights = dyadic(random, case.tokens_of[me], case.top_k)
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[me])
        total = case.layouts[me].total_rows
        grad = np.zeros((handle.slots, case.hidden), np.float32)
        grad[:total] = dyadic(random, total, case.hidden)
        grad_weights = np.zeros(handle.slots, np.float32)
        grad_weights[:total] = dyadic(random, total)

        def loss() -> float:
            received = handle.dispatch(tokens, weights, receive="decoded", dtype="float32")
            slots = np.asarray(received.data)[:total].astype(np.float64)
            slot_weights = np.asarray(received.weights)[:total].astype(np.float64)
            mine = float((slots * grad[:total]).sum() + (slot_weights * grad_weights[:total]).sum())
            return sum(rank.gather(mine))

        by_library = handle.dispatch_backward(grad, grad_weights)
        return (
            np.array(by_library[0]),
            central_differences(rank, loss, tokens),
            np.array(by_library[1]),
            central_differences(rank, loss, weights),
        )


def differences_of_combine(rank: Rank, transport: Transport, case: Case) -> tuple[Array, ...]:
    """The same for sum(result * g): combine is linear in the expert outputs and in the weights."""
    me = rank.index
    random = case.random(me, "differences")
    grad = dyadic(random, case.tokens_of[me], case.hidden)
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[me])
        total = case.layouts[me].total_rows
        outs = np.zeros((handle.slots, case.hidden), np.float32)
        outs[:total] = dyadic(random, total, case.hidden)
        weights = np.zeros(handle.slots, np.float32)
        weights[:total] = dyadic(random, total)

        def loss() -> float:
            result = np.asarray(handle.combine(outs, slot_weights=weights)).astype(np.float64)
            return sum(rank.gather(float((result * grad).sum())))

        received = handle.combine_backward(
            grad, receive="decoded", dtype="float32", slot_weights=weights, expert_out=outs
        )
        return (
            np.array(received.data)[:total],
            central_differences(rank, loss, outs)[:total],
            np.array(received.weights)[:total],
            central_differences(rank, loss, weights)[:total],
        )


def central_differences(rank: Rank, loss: Any, values: Array) -> Array:
    """Ranks take turns: the loss is a collective call, and every rank makes all of them."""
    result = np.zeros(values.shape, np.float64)
    for turn, size in enumerate(rank.gather(values.size)):
        flat, grads = values.reshape(-1), result.reshape(-1)
        for i in range(size):
            mine = turn == rank.index
            here = flat[i] if mine else np.float32(0)
            step = np.float32(0.5)
            ends = []
            for end in (here + step, here - step):
                if mine:
                    flat[i] = end
                ends.append(loss())
            if mine:
                flat[i] = here
                grads[i] = ends[0] - ends[1]
    return result


# ---- an MoE layer ------------------------------------------------------------------------------------------


def experts_of(case: Case, width: int = 16) -> model.Experts:
    """The same on every rank."""
    random = case.random(0, "experts")
    inner = random.standard_normal((case.experts, case.hidden, width)) / np.sqrt(case.hidden)
    outer = random.standard_normal((case.experts, width, case.hidden)) / np.sqrt(width)
    return model.Experts(inner, outer)


@dataclass
class LayerData:
    """What a rank brings to a layer."""

    tokens: Array
    topk: Array
    weights: Array
    grad: Array


def data_of(case: Case, rank: int) -> LayerData:
    """Tokens and gradients are BF16 numbers, held in FP32: the bf16 wire loses nothing."""
    tokens, grad = (
        x.astype(DTYPES["bfloat16"]).astype(np.float32) for x in (case.tokens_in(rank), case.grad_in(rank))
    )
    clean, _ = model.clean_choice(case.topk[rank], case.experts)
    return LayerData(tokens, clean, np.nan_to_num(case.weights_in(rank)), grad)


@dataclass
class LayerResult:
    result: Array
    tokens: Array  # gradients from here on
    weights: Array
    inner: Array
    outer: Array


def layer_by_hand(rank: Rank, transport: Transport, case: Case) -> LayerResult:
    """Forward and backward by the six calls, with the experts in NumPy."""
    me = rank.index
    data, experts, layout = data_of(case, me), experts_of(case), case.layouts[me]
    first = me * case.experts_per_rank
    total = layout.total_rows
    dtype = DTYPES[case.dtype]

    def whole(values: Array, dtype: Any = np.float32) -> Array:
        """With slots that nobody may read behind it."""
        slots = np.full((handle.slots, *values.shape[1:]), np.nan, dtype)
        slots[:total] = values
        return slots

    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(data.topk)
        received = handle.dispatch(
            data.tokens.astype(dtype), data.weights, receive="decoded", dtype=case.dtype
        )
        slots = np.array(received.data)[:total]
        slot_weights = whole(np.array(received.weights)[:total])
        outs = whole(experts.on_slots(layout, first, slots), dtype)
        result = np.array(handle.combine(outs, slot_weights=slot_weights))
        grads = handle.combine_backward(
            data.grad.astype(dtype),
            receive="decoded",
            dtype=case.dtype,
            slot_weights=slot_weights,
            expert_out=outs,
        )
        grad_slots, inner, outer = experts.on_slots_backward(
            layout, first, slots, np.array(grads.data)[:total]
        )
        tokens, weights = handle.dispatch_backward(
            whole(grad_slots, dtype), whole(np.array(grads.weights)[:total])
        )
        return LayerResult(result, np.array(tokens), np.array(weights), inner, outer)


# ---- PyTorch -----------------------------------------------------------------------------------------------


def quantize_like(torch: Any, format: str, x: Any) -> Any:
    """What the wire makes of a tensor, as FP32."""
    if format == "bf16":
        return x.to(torch.bfloat16).float()
    rows = getattr(nvte_ep, f"{format}_pack")(x.detach().float().contiguous())
    out = torch.empty(x.shape, dtype=torch.float32)
    getattr(nvte_ep, f"{format}_unpack")(rows, x.shape[1], out=out, dtype="float32")
    return out


def plain_torch_layer(torch: Any, case: Case, rank: int) -> LayerResult:
    """The layer in plain PyTorch, without slots or ranks, differentiated by autograd. Quantisation passes the
    gradient through; the gradient of the result is quantised as it travels."""
    data, experts = data_of(case, rank), experts_of(case)
    tokens, weights, inner, outer = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True)
        for x in (data.tokens, data.weights, experts.inner, experts.outer)
    )
    sent = tokens + (quantize_like(torch, case.dispatch, tokens) - tokens).detach()
    rows = []
    for t, choice in enumerate(data.topk.tolist()):
        row = torch.zeros(case.hidden, dtype=torch.float64)
        for k, e in enumerate(choice):
            if e >= 0:
                row = row + weights[t, k] * (torch.tanh(sent[t] @ inner[e]) @ outer[e])
        rows.append(row)
    result = torch.stack(rows) if rows else torch.zeros((0, case.hidden), dtype=torch.float64) + 0 * sent
    result.backward(quantize_like(torch, case.combine_backward, torch.from_numpy(data.grad)).double())
    grads = [x.grad if x.grad is not None else torch.zeros_like(x) for x in (tokens, weights, inner, outer)]
    return LayerResult(result.detach().numpy(), *(grad.numpy() for grad in grads))


def torch_layer(rank: Rank, transport: Transport, case: Case) -> LayerResult:
    """The same through nvte_ep.torch, differentiated by autograd over all ranks."""
    import nvte_ep.torch as ep
    import torch

    me = rank.index
    data, experts, layout = data_of(case, me), experts_of(case), case.layouts[me]
    mine = slice(me * case.experts_per_rank, (me + 1) * case.experts_per_rank)
    tokens, weights, inner, outer = (
        torch.tensor(x, dtype=torch.float32, requires_grad=True)
        for x in (data.tokens, data.weights, experts.inner[mine], experts.outer[mine])
    )
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(torch.from_numpy(data.topk))
        slots, slot_weights = ep.dispatch(handle, tokens, weights)
        counts = [*layout.rows_per_expert.tolist(), handle.slots - layout.total_rows]
        slabs = torch.split(slots, counts)
        outs = [torch.tanh(slab @ inner[e]) @ outer[e] for e, slab in enumerate(slabs[:-1])]
        result = ep.combine(handle, torch.cat([*outs, slabs[-1]]), slot_weights)
        result.backward(torch.from_numpy(data.grad))
        grads = [
            x.grad if x.grad is not None else torch.zeros_like(x) for x in (tokens, weights, inner, outer)
        ]
        return LayerResult(result.detach().numpy(), *(grad.numpy() for grad in grads))


# ---- JAX ---------------------------------------------------------------------------------------------------


def plain_jax_layer(jax: Any, case: Case, rank: int) -> LayerResult:
    """The layer in plain JAX, differentiated by vjp."""
    jnp = jax.numpy
    data, experts = data_of(case, rank), experts_of(case)

    def layer(tokens: Any, weights: Any, inner: Any, outer: Any) -> Any:
        result = jnp.zeros_like(tokens)
        for k in range(case.top_k):
            chosen = jnp.maximum(data.topk[:, k], 0)
            hidden = jnp.tanh(jnp.einsum("th,thf->tf", tokens, inner[chosen]))
            factor = jnp.where(data.topk[:, k] >= 0, weights[:, k], 0)
            result = result + factor[:, None] * jnp.einsum("tf,tfh->th", hidden, outer[chosen])
        return result

    inputs = [jnp.asarray(x, jnp.float32) for x in (data.tokens, data.weights, experts.inner, experts.outer)]
    result, vjp = jax.vjp(layer, *inputs)
    return LayerResult(np.array(result), *(np.array(grad) for grad in vjp(jnp.asarray(data.grad))))


def jax_layer(rank: Rank, transport: Transport, case: Case, compiled: bool) -> LayerResult:
    """The same through nvte_ep.jax."""
    import jax
    import jax.numpy as jnp
    import nvte_ep.jax as ep

    me = rank.index
    data, experts = data_of(case, me), experts_of(case)
    mine = slice(me * case.experts_per_rank, (me + 1) * case.experts_per_rank)
    inputs = [
        jnp.asarray(x, jnp.float32)
        for x in (data.tokens, data.weights, experts.inner[mine], experts.outer[mine])
    ]
    topk, grad = jnp.asarray(data.topk, jnp.int32), jnp.asarray(data.grad)

    def step(handle: Handle, *inputs: Any) -> Any:
        counts = ep.prepare(handle, topk)
        of_slot = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(handle.slots), side="right")
        of_slot = jnp.minimum(of_slot, case.experts_per_rank - 1)

        def layer(tokens: Any, weights: Any, inner: Any, outer: Any) -> Any:
            slots, slot_weights = ep.dispatch(handle, tokens, weights)
            inside = jnp.tanh(jnp.einsum("sh,shf->sf", slots, inner[of_slot]))
            outs = jnp.einsum("sf,sfh->sh", inside, outer[of_slot])
            return ep.combine(handle, outs, slot_weights, num_tokens=tokens.shape[0])

        result, vjp = jax.vjp(layer, *inputs)
        return result, *vjp(grad)

    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        run = jax.jit(lambda *x: step(handle, *x)) if compiled else (lambda *x: step(handle, *x))
        return LayerResult(*(np.array(x) for x in run(*inputs)))
