# SPDX-License-Identifier: Apache-2.0
"""Bodies of ranks for test_stochastic.py."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distributed.cases import DTYPES, Case
from distributed.launcher import Rank
from distributed.steps import open_group, open_handle
from distributed.transports import Transport

Array = NDArray[Any]


def halfway_tokens(count: int, hidden: int, value: float) -> Array:
    """Blocks of one 6 and fifteen times `value`: scaled by a power of two, so that `value` is what is
    rounded."""
    tokens = np.full((count, hidden // 16, 16), value, np.float32)
    tokens[:, :, 0] = 6
    return tokens.reshape(count, hidden).astype(DTYPES["bfloat16"])


def rounded(rank: Rank, transport: Transport, case: Case, value: float, rng_state: Array) -> Array:
    """What became of `value` in the gradients that this rank received, [slots, 15 of every 16]."""
    grads = halfway_tokens(case.tokens_of[rank.index], case.hidden, value)
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[rank.index])
        received = handle.combine_backward(
            grads, receive="decoded", dtype="float32", rounding="stochastic", rng_state=rng_state
        )
        filled = case.layouts[rank.index].filled
        blocks = np.asarray(received.data)[filled].reshape(len(filled), -1, 16)
        assert (blocks[:, :, 0] == 6).all(), "exact codes stay exact"
        return blocks[:, :, 1:].copy()


def bytes_of_a_step(
    rank: Rank, transport: Transport, case: Case, rng_state: Array, delays: tuple[float, ...]
) -> tuple[bytes, bytes]:
    """Rows and operand of a stochastic combine backward, of ranks that come in the order of their delays."""
    me = rank.index
    grad = case.grad_in(me)
    options: dict[str, Any] = {"rounding": "stochastic", "rng_state": rng_state}
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        time.sleep(delays[me])
        handle.prepare(case.topk[me])
        time.sleep(delays[me])
        rows = handle.combine_backward(grad, receive="rows", **options).data
        operand = handle.empty_operand("combine_backward", columnwise=True)
        np.asarray(operand.bytes)[...] = 0
        handle.combine_backward(grad, receive="operand", out=operand, **options)
        total = case.layouts[me].total_rows
        return np.asarray(rows)[:total].tobytes(), np.asarray(operand.bytes).tobytes()


def same_tokens_everywhere(
    rank: Rank, transport: Transport, case: Case, rng_state: Array
) -> tuple[Array, Array]:
    """All ranks send the same tokens to an expert of their own: payload of the rows, and of the columnwise
    operand that is made of nearest-rounded rows, which are the same everywhere."""
    grad = halfway_tokens(case.tokens_of[rank.index], case.hidden, 2.5)
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[rank.index])
        rows = handle.combine_backward(grad, receive="rows", rounding="stochastic", rng_state=rng_state).data
        payload = np.asarray(rows)[: len(grad), : case.hidden // 2].copy()

        random = np.random.default_rng(8)
        plain = random.standard_normal(grad.shape).astype(DTYPES["bfloat16"])
        rows = np.array(handle.combine_backward(plain, receive="rows").data)[: len(grad)]
        assert len(set(rank.gather(rows.tobytes()))) == 1
        # Rows that are packed already are not rounded again: what differs between ranks is the columnwise
        # part.
        operand = handle.combine_backward(
            rows, receive="operand", columnwise=True, rounding="stochastic", rng_state=rng_state
        ).operand
        assert operand is not None
        return payload, np.array(operand.columnwise_payload)[: case.hidden * len(grad) // 2]
