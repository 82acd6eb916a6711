#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer in NumPy over expert-parallel ranks, forward and backward.

Every rank is a thread here. The layer runs once per wire format; its output and gradients are compared with
the same layer computed in one place without any exchange.

    python moe_layer.py [ranks]
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

import numpy as np
import nvte_ep
from numpy.typing import NDArray

Floats = NDArray[np.float32]

TOKENS, HIDDEN, TOP_K, EXPERTS = 96, 256, 2, 8


@dataclass
class Step:
    """One rank's tokens, the router's choice, and the gradient that the next layer sends back."""

    tokens: Floats  # [T, H]
    experts: NDArray[np.int64]  # [T, K]
    weights: Floats  # [T, K]
    grad: Floats  # [T, H]


@dataclass
class Result:
    output: Floats  # [T, H]
    grad_tokens: Floats  # [T, H]
    grad_weights: Floats  # [T, K]


def make_step(rank: int) -> Step:
    rng = np.random.default_rng(rank)
    scores = rng.standard_normal((TOKENS, EXPERTS))
    experts = np.argsort(-scores, axis=1)[:, :TOP_K]
    weights = np.exp(np.take_along_axis(scores, experts, axis=1))
    return Step(
        tokens=rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32),
        experts=np.ascontiguousarray(experts),
        weights=(weights / weights.sum(axis=1, keepdims=True)).astype(np.float32),
        grad=rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32),
    )


def expert_matrix(expert: int) -> Floats:
    """y = x @ matrix."""
    rng = np.random.default_rng(1000 + expert)
    return (rng.standard_normal((HIDDEN, HIDDEN)) / np.sqrt(HIDDEN)).astype(np.float32)


def layer(group: nvte_ep.Group, step: Step, dispatch: str, combine_backward: str) -> Result:
    """The layer as one rank runs it: its tokens go out, other ranks' tokens come in."""
    handle = group.handle(
        top_k=TOP_K, alignment=16, dispatch=dispatch, combine="bf16", combine_backward=combine_backward
    )
    routing = handle.prepare(step.experts)
    offsets = np.asarray(routing.row_offsets)
    first = group.info.rank * group.info.num_local_experts
    matrices = [expert_matrix(first + e) for e in range(group.info.num_local_experts)]

    def experts(slots: Floats, transposed: bool) -> Floats:
        out = np.zeros_like(slots)
        for e, matrix in enumerate(matrices):
            rows = slice(offsets[e], offsets[e + 1])
            out[rows] = slots[rows] @ (matrix.T if transposed else matrix)
        return out

    # Forward.
    received = handle.dispatch(step.tokens, step.weights, receive="decoded", dtype="float32")
    outputs = experts(np.asarray(received.data), transposed=False)
    result = handle.combine(outputs, slot_weights=received.weights)

    # Backward: a token's gradient goes to its slots, times the slot's weight; that weight gets its gradient.
    back = handle.combine_backward(
        step.grad, receive="decoded", dtype="float32", slot_weights=received.weights, expert_out=outputs
    )
    grad_slots = experts(np.asarray(back.data), transposed=True)
    grad_tokens, grad_weights = handle.dispatch_backward(grad_slots, back.weights)
    return Result(np.asarray(result), np.asarray(grad_tokens), np.asarray(grad_weights))


def dense_layer(step: Step) -> Result:
    """The same without an exchange, in one place."""
    output, grad_tokens = np.zeros_like(step.tokens), np.zeros_like(step.tokens)
    grad_weights = np.zeros_like(step.weights)
    for expert in range(EXPERTS):
        matrix = expert_matrix(expert)
        t, k = np.nonzero(step.experts == expert)
        weights = step.weights[t, k][:, None]
        outputs = step.tokens[t] @ matrix
        output[t] += weights * outputs
        grad_weights[t, k] = (step.grad[t] * outputs).sum(axis=1)
        grad_tokens[t] += (weights * step.grad[t]) @ matrix.T
    return Result(output, grad_tokens, grad_weights)


def relative_error(got: list[Floats], expected: list[Floats]) -> float:
    difference = np.concatenate([(a - b).ravel() for a, b in zip(got, expected, strict=True)])
    return float(np.linalg.norm(difference) / np.linalg.norm(np.concatenate([b.ravel() for b in expected])))


def run_ranks(num_ranks: int, steps: list[Step], dispatch: str, combine_backward: str) -> list[Result]:
    results: list[Result | None] = [None] * num_ranks
    failures: list[BaseException] = []

    def rank(index: int, comm: nvte_ep.Communicator) -> None:
        try:
            with nvte_ep.Group(
                comm, num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=TOKENS, timeout_ns=10**10
            ) as group:
                results[index] = layer(group, steps[index], dispatch, combine_backward)
        except BaseException as error:
            failures.append(error)

    comms = nvte_ep.Communicator.threads(num_ranks)
    threads = [threading.Thread(target=rank, args=item) for item in enumerate(comms)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [result for result in results if result is not None]


def main() -> int:
    text = sys.argv[1] if len(sys.argv) > 1 else "4"
    num_ranks = int(text) if text.isdecimal() else 0
    if num_ranks < 1 or EXPERTS % num_ranks:
        print(f"ranks: expected a divisor of the {EXPERTS} experts, got {text}", file=sys.stderr)
        return 2
    steps = [make_step(rank) for rank in range(num_ranks)]
    expected = [dense_layer(step) for step in steps]

    print(f"{num_ranks} ranks, {EXPERTS} experts, {TOKENS} tokens a rank, top {TOP_K}, H = {HIDDEN}")
    print("wire    bytes a token   error of output   of grad tokens   of grad weights")
    # What the format explains: a weight's gradient has the error of two roundings, forward and backward.
    for name, bound in {"bf16": 0.01, "mxfp8": 0.06, "nvfp4": 0.2}.items():
        got = run_ranks(num_ranks, steps, name, name)
        errors = [
            relative_error([getattr(r, field) for r in got], [getattr(r, field) for r in expected])
            for field in ("output", "grad_tokens", "grad_weights")
        ]
        print(f"{name:8}{nvte_ep.row_bytes(name, HIDDEN):13}" + "".join(f"{error:17.4f}" for error in errors))
        if not all(0 < error < bound for error in errors):
            print(f"{name}: expected errors above 0 and below {bound}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
