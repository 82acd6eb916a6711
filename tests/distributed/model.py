# SPDX-License-Identifier: Apache-2.0
"""What the library computes, in NumPy and by definition: routing, dispatch, combine, both backwards, and a
whole MoE layer.

Ranks are positions of lists: topk[r] is the [T_r, K] choice of rank r. Nothing here calls the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]

SCALE_TILE_ROWS = 128
MX_BLOCK = 32


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# ---- routing -----------------------------------------------------------------------------------------------


@dataclass
class Layout:
    """The routing as one rank sees it: what prepare tells, and where every slot comes from."""

    tokens_routed: Array  # [E_local]
    tokens_per_expert: Array  # [E_local]
    rows_per_expert: Array  # [E_local]
    row_offsets: Array  # [E_local + 1]
    scale_row_offsets: Array  # [E_local + 1]
    total_rows: int
    dropped_rows: int
    needed_rows: int  # the capacity that would have been enough
    source_rank: Array  # [total_rows]; -1 for padding, as the next two
    source_token: Array
    source_k: Array
    expert: Array  # [total_rows] local expert

    @property
    def slot_source(self) -> Array:
        """As prepare tells it: source rank << 32 | token, -1 for padding."""
        return np.where(self.source_rank < 0, -1, (self.source_rank << 32) | self.source_token)

    @property
    def filled(self) -> Array:
        """Numbers of the slots that hold a token."""
        return np.flatnonzero(self.source_rank >= 0)


def clean_choice(topk: Array, num_experts: int) -> tuple[Array, int]:
    """Illegal indices and repeated experts of one token as -1, and how many they were."""
    clean = np.full(topk.shape, -1, np.int64)
    faults = 0
    for t, choice in enumerate(topk.tolist()):
        for k, expert in enumerate(choice):
            if expert == -1:
                continue
            if 0 <= expert < num_experts and expert not in choice[:k]:
                clean[t, k] = expert
            else:
                faults += 1
    return clean, faults


def layouts(
    topk: Sequence[Array], num_experts: int, alignment: int, capacity: int | None = None
) -> list[Layout]:
    """The layout of every rank. capacity None: room for everything, as in an eager group."""
    ranks = len(topk)
    experts = num_experts // ranks
    clean = [clean_choice(choice, num_experts)[0] for choice in topk]
    rank_of = np.concatenate([np.full(c.size, r, np.int64) for r, c in enumerate(clean)])
    token_of = np.concatenate([np.repeat(np.arange(len(c)), c.shape[1]) for c in clean])
    k_of = np.concatenate([np.tile(np.arange(c.shape[1]), len(c)) for c in clean])
    expert_of = np.concatenate([c.reshape(-1) for c in clean])
    order = np.lexsort((token_of, rank_of, expert_of))

    found = []
    for rank in range(ranks):
        routed = np.zeros(experts, np.int64)
        kept, rows, offsets, scale_offsets = routed.copy(), routed.copy(), [0], [0]
        sources: list[Array] = []
        end = 0  # where the slab would end were there no capacity
        for e in range(experts):
            mine = order[expert_of[order] == rank * experts + e]
            routed[e] = len(mine)
            end += round_up(len(mine), alignment)
            offsets.append(end if capacity is None else min(end, capacity))
            rows[e] = offsets[-1] - offsets[-2]
            kept[e] = min(len(mine), rows[e])
            scale_offsets.append(scale_offsets[-1] + round_up(int(rows[e]), SCALE_TILE_ROWS))
            slab = np.full((4, rows[e]), -1, np.int64)
            slab[:3, : kept[e]] = [column[mine[: kept[e]]] for column in (rank_of, token_of, k_of)]
            slab[3] = e
            sources.append(slab)
        slots = np.concatenate(sources, axis=1)
        found.append(
            Layout(
                tokens_routed=routed,
                tokens_per_expert=kept,
                rows_per_expert=rows,
                row_offsets=np.array(offsets),
                scale_row_offsets=np.array(scale_offsets),
                total_rows=offsets[-1],
                dropped_rows=int((routed - kept).sum()),
                needed_rows=end,
                source_rank=slots[0],
                source_token=slots[1],
                source_k=slots[2],
                expert=slots[3],
            )
        )
    return found


# ---- dispatch and combine ----------------------------------------------------------------------------------


def dispatch(layout: Layout, tokens: Sequence[Array]) -> Array:
    """tokens[r] [T_r, ...] to the slots of one rank [total_rows, ...]; padding is zero. Rows of bytes go as
    well."""
    slots = np.zeros((layout.total_rows, *tokens[0].shape[1:]), tokens[0].dtype)
    for slot in layout.filled:
        slots[slot] = tokens[layout.source_rank[slot]][layout.source_token[slot]]
    return slots


def dispatch_weights(layout: Layout, weights: Sequence[Array]) -> Array:
    slots = np.zeros(layout.total_rows, weights[0].dtype)
    for slot in layout.filled:
        token = layout.source_token[slot], layout.source_k[slot]
        slots[slot] = weights[layout.source_rank[slot]][token]
    return slots


def slots_of_tokens(everybody: Sequence[Layout], rank: int, num_tokens: int, top_k: int) -> Array:
    """[T, K, 2] of (rank, slot) for the tokens of one rank; -1 where a choice has no slot."""
    where = np.full((num_tokens, top_k, 2), -1, np.int64)
    for receiver, layout in enumerate(everybody):
        for slot in layout.filled[layout.source_rank[layout.filled] == rank]:
            where[layout.source_token[slot], layout.source_k[slot]] = receiver, slot
    return where


def combine(
    where: Array,
    slots: Sequence[Array],
    slot_weights: Sequence[Array] | None = None,
    *,
    dtype: DTypeLike = np.float32,
    wire: str = "bf16",
    add_to: Array | None = None,
) -> Array:
    """The tokens of one rank: sums over their slots in `dtype`, in the order of k.

    wire "mxfp8": the slots of a token on one rank are summed first, that sum is rounded to MXFP8, and the
    ranks are added in their order.
    """
    num_tokens, top_k, _ = where.shape
    hidden = slots[0].shape[1]
    result = np.zeros((num_tokens, hidden), dtype)
    for t in range(num_tokens):
        rows = []
        for k in range(top_k):
            rank, slot = where[t, k]
            if rank < 0:
                continue
            row = slots[rank][slot].astype(dtype)
            if slot_weights is not None:
                row = (np.asarray(slot_weights[rank][slot], dtype) * row).astype(dtype)
            rows.append((int(rank), row))
        if wire == "mxfp8":
            partial: dict[int, Array] = {}
            for rank, row in rows:
                partial[rank] = partial.get(rank, np.zeros(hidden, dtype)) + row
            rows = [(rank, round_to_mxfp8(partial[rank])) for rank in sorted(partial)]
        for _, row in rows:
            result[t] += row
    return result if add_to is None else (add_to.astype(dtype) + result).astype(dtype)


def combine_magnitude(
    where: Array, slots: Sequence[Array], slot_weights: Sequence[Array] | None = None
) -> Array:
    """Sum of the magnitudes of what is added: what the error of a transport is measured against."""
    magnitudes = [np.abs(rows.astype(np.float64)) for rows in slots]
    weights = None if slot_weights is None else [np.abs(row.astype(np.float64)) for row in slot_weights]
    return combine(where, magnitudes, weights, dtype=np.float64)


def gather_slot_values(where: Array, values: Sequence[Array]) -> Array:
    """[T, K] of a value that every slot has; 0 where a choice has no slot."""
    result = np.zeros(where.shape[:2], np.float32)
    for t, k in np.ndindex(*where.shape[:2]):
        rank, slot = where[t, k]
        if rank >= 0:
            result[t, k] = values[rank][slot]
    return result


def round_to_mxfp8(row: Array) -> Array:
    """Finite values to E4M3 with a power-of-two scale for each 32, and back, in the array's type."""
    blocks = row.reshape(-1, MX_BLOCK).astype(np.float64)
    amax = np.abs(blocks).max(axis=1, keepdims=True)
    exponent = np.ceil(np.log2(np.where(amax > 0, amax, 1) / 448))
    scale = np.exp2(np.where(amax > 0, np.clip(exponent, -127, 127), -127))
    codes = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scale).reshape(row.shape).astype(row.dtype)


# ---- the layer ---------------------------------------------------------------------------------------------


@dataclass
class Experts:
    """expert e: x -> tanh(x @ inner[e]) @ outer[e]."""

    inner: Array  # [E, H, F]
    outer: Array  # [E, F, H]

    def forward(self, expert: int, x: Array) -> Array:
        return np.tanh(x @ self.inner[expert]) @ self.outer[expert]

    def backward(self, expert: int, x: Array, grad: Array) -> tuple[Array, Array, Array]:
        """Gradients of x and of the two matrices of the expert."""
        activation = np.tanh(x @ self.inner[expert])
        grad_inside = (grad @ self.outer[expert].T) * (1 - activation**2)
        return grad_inside @ self.inner[expert].T, x.T @ grad_inside, activation.T @ grad

    def on_slots(self, layout: Layout, first_expert: int, slots: Array) -> Array:
        """The experts of one rank on its slots."""
        result = np.zeros(slots.shape, np.float64)
        for e, (begin, end) in enumerate(zip(layout.row_offsets[:-1], layout.row_offsets[1:], strict=True)):
            result[begin:end] = self.forward(first_expert + e, slots[begin:end].astype(np.float64))
        return result

    def on_slots_backward(
        self, layout: Layout, first_expert: int, slots: Array, grads: Array
    ) -> tuple[Array, Array, Array]:
        """Gradients of the slots, and of the matrices of the rank's experts [E_local, ...]."""
        grad_slots = np.zeros(slots.shape, np.float64)
        experts = len(layout.rows_per_expert)
        grad_inner = np.zeros((experts, *self.inner.shape[1:]))
        grad_outer = np.zeros((experts, *self.outer.shape[1:]))
        for e, (begin, end) in enumerate(zip(layout.row_offsets[:-1], layout.row_offsets[1:], strict=True)):
            grad_slots[begin:end], grad_inner[e], grad_outer[e] = self.backward(
                first_expert + e, slots[begin:end].astype(np.float64), grads[begin:end].astype(np.float64)
            )
        return grad_slots, grad_inner, grad_outer


def layer(experts: Experts, tokens: Array, topk: Array, weights: Array) -> Array:
    """result[t] = sum over k of weights[t, k] * expert topk[t, k] of tokens[t], token by token in FP64. No
    ranks and no slots: the definition of the layer."""
    result = np.zeros(tokens.shape, np.float64)
    for t, k in np.ndindex(*topk.shape):
        if topk[t, k] >= 0:
            result[t] += float(weights[t, k]) * experts.forward(topk[t, k], tokens[t].astype(np.float64))
    return result


@dataclass
class LayerGrads:
    tokens: Array
    weights: Array
    inner: Array
    outer: Array


def layer_backward(experts: Experts, tokens: Array, topk: Array, weights: Array, grad: Array) -> LayerGrads:
    """Gradients of sum(layer * grad)."""
    grads = LayerGrads(
        np.zeros(tokens.shape),
        np.zeros(weights.shape),
        np.zeros(experts.inner.shape),
        np.zeros(experts.outer.shape),
    )
    for t, k in np.ndindex(*topk.shape):
        e = topk[t, k]
        if e < 0:
            continue
        x = tokens[t : t + 1].astype(np.float64)
        grads.weights[t, k] = float(grad[t] @ experts.forward(e, x)[0])
        grad_x, grad_inner, grad_outer = experts.backward(e, x, float(weights[t, k]) * grad[t : t + 1])
        grads.tokens[t] += grad_x[0]
        grads.inner[e] += grad_inner
        grads.outer[e] += grad_outer
    return grads
