"""A Mixture-of-Experts layer in NumPy: router, experts, and the layer in one place without any exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvte_ep.commands._numerics import Floats, Ints, bf16_values

LOGIT_STD = 2.0  # standard deviation of a made router's logits: favourites, but no vanishing weight


def as_float32(tokens: NDArray[Any]) -> Floats:
    """uint16 holds BF16."""
    return bf16_values(tokens) if tokens.dtype == np.uint16 else tokens.astype(np.float32)


def make_gate(states: Floats, num_experts: int, seed: int) -> Floats:
    """A router for states that come without one: fixed directions over the standardised channels."""
    rng = np.random.default_rng(seed)
    directions = rng.standard_normal((num_experts, states.shape[1]))
    exact = states.astype(np.float64)
    spread = exact.std(axis=0)
    # A channel that never changes says nothing about a token; a single token has no other kind.
    gate = directions / np.where(spread > 0, spread, np.sqrt(np.mean(exact**2)) or 1.0)
    deviation = float((exact @ gate.T).std())
    return np.asarray(gate * (LOGIT_STD / deviation if deviation > 0 else 1.0), np.float32)


def route(states: Floats, gate: Floats, top_k: int) -> tuple[Ints, Floats]:
    """Expert ids [T, K], best first, and their weights [T, K]: softmax over the chosen logits."""
    logits = states.astype(np.float64) @ gate.astype(np.float64).T
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(logits, experts, axis=1)
    weights = np.exp(chosen - chosen[:, :1])
    weights /= weights.sum(axis=1, keepdims=True)
    return np.ascontiguousarray(experts, np.int64), weights.astype(np.float32)


class Experts:
    """Two-layer perceptrons y = silu(x @ up) @ down in FP32, with fixed random weights."""

    def __init__(self, num_experts: int, hidden: int, ffn: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.up = rng.standard_normal((num_experts, hidden, ffn), np.float32) / np.float32(np.sqrt(hidden))
        self.down = rng.standard_normal((num_experts, ffn, hidden), np.float32) / np.float32(np.sqrt(ffn))

    def forward(self, expert: int, x: Floats) -> tuple[Floats, Floats]:
        """The output [n, H] and what the backward pass needs: x @ up."""
        before = x @ self.up[expert]
        return _silu(before) @ self.down[expert], before

    def backward(self, expert: int, before: Floats, grad: Floats) -> tuple[Floats, Floats]:
        """Gradients of x [n, H] and of x @ up [n, F]."""
        gate = _sigmoid(before)
        grad_before = (grad @ self.down[expert].T) * (gate * (1 + before * (1 - gate)))
        return grad_before @ self.up[expert].T, grad_before

    def weight_gradients(self, x: Floats, before: Floats, grad_before: Floats, grad: Floats) -> Floats:
        """Gradients of both matrices, in one vector."""
        return np.concatenate([(x.T @ grad_before).ravel(), (_silu(before).T @ grad).ravel()])


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)), np.float32)  # never overflows


def _silu(x: Floats) -> Floats:
    return x * _sigmoid(x)


@dataclass(frozen=True)
class Addresses:
    """Where the K copies of each token of a rank go: rank and slot, [T, K] each."""

    rank: Ints
    slot: Ints


@dataclass(frozen=True)
class Slots:
    """What a rank receives, by rule: experts in order, in each the tokens by rank and index, then padding."""

    source_rank: Ints  # [total], -1 for padding
    source_token: Ints
    source_k: Ints
    tokens_per_expert: list[int]
    rows_per_expert: list[int]

    @property
    def total(self) -> int:
        return len(self.source_rank)

    @property
    def kept(self) -> NDArray[np.bool_]:
        return self.source_rank >= 0

    def rows_from_peers(self, rank: int) -> int:
        """Rows that must cross to this rank: each token once, however many of its experts live here."""
        sources = (self.source_rank << 32 | self.source_token)[self.kept]
        return int(np.count_nonzero(np.unique(sources) >> 32 != rank))


@dataclass(frozen=True)
class Layer:
    """The layer that every rank works on; lists have an entry per rank."""

    tokens: list[NDArray[Any]]  # [T, H] uint16 (BF16), float16 or float32
    topk: list[Ints]  # [T, K]
    weights: list[Floats]  # [T, K]
    experts: Experts
    num_experts: int
    alignment: int
    grads: list[NDArray[np.uint16]] = field(default_factory=list)  # of the output, [T, H] BF16

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def hidden(self) -> int:
        return int(self.tokens[0].shape[1])

    @property
    def top_k(self) -> int:
        return int(self.topk[0].shape[1])

    @property
    def max_tokens(self) -> int:
        return max(1, *(len(tokens) for tokens in self.tokens))

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def slots(self) -> tuple[list[Slots], list[Addresses]]:
        """The routing, worked out here from the rule alone."""
        received = []
        addresses = [Addresses(np.full_like(topk, -1), np.full_like(topk, -1)) for topk in self.topk]
        for rank in range(self.num_ranks):
            parts: list[Ints] = []
            counts, rows, start = [], [], 0
            for expert in range(rank * self.num_local_experts, (rank + 1) * self.num_local_experts):
                found = []
                for source, topk in enumerate(self.topk):
                    token, k = np.nonzero(topk == expert)
                    found.append(np.stack([np.full_like(token, source), token, k]))
                slab = np.concatenate(found, axis=1)
                count = slab.shape[1]
                for source, place in enumerate(addresses):
                    mine = slab[0] == source
                    place.rank[slab[1, mine], slab[2, mine]] = rank
                    place.slot[slab[1, mine], slab[2, mine]] = start + np.flatnonzero(mine)
                padded = -(-count // self.alignment) * self.alignment
                parts += [slab, np.full((3, padded - count), -1)]
                counts.append(count)
                rows.append(padded)
                start += padded
            source_rank, source_token, source_k = np.concatenate(parts, axis=1)
            received.append(Slots(source_rank, source_token, source_k, counts, rows))
        return received, addresses


@dataclass
class Result:
    """What a layer computed. output and grad_tokens [T, H], grad_weights [T, K] in order of the tokens;
    grad_experts one vector per expert."""

    output: Floats
    grad_tokens: Floats
    grad_weights: Floats
    grad_experts: list[Floats]


def outputs_in_one_place(layer: Layer) -> Floats:
    """The output of the layer in FP32, without an exchange."""
    tokens, topk, weights = _whole(layer)
    output = np.zeros_like(tokens)
    for expert in range(layer.num_experts):
        token, k = np.nonzero(topk == expert)
        y, _ = layer.experts.forward(expert, tokens[token])
        output[token] += weights[token, k, None] * y
    return output


def run_in_one_place(layer: Layer) -> Result:
    """The layer forward and backward in FP32, without an exchange."""
    tokens, topk, weights = _whole(layer)
    grads = np.concatenate([bf16_values(grad) for grad in layer.grads])
    result = Result(np.zeros_like(tokens), np.zeros_like(tokens), np.zeros_like(weights), [])
    for expert in range(layer.num_experts):
        token, k = np.nonzero(topk == expert)
        x, weight, grad = tokens[token], weights[token, k, None], grads[token]
        y, before = layer.experts.forward(expert, x)
        grad_x, grad_before = layer.experts.backward(expert, before, weight * grad)
        result.output[token] += weight * y
        result.grad_weights[token, k] = np.einsum("th,th->t", grad, y)
        result.grad_tokens[token] += grad_x
        result.grad_experts.append(layer.experts.weight_gradients(x, before, grad_before, weight * grad))
    return result


def _whole(layer: Layer) -> tuple[Floats, Ints, Floats]:
    tokens: Sequence[Floats] = [as_float32(part) for part in layer.tokens]
    return np.concatenate(tokens), np.concatenate(layer.topk), np.concatenate(layer.weights)
