# SPDX-License-Identifier: Apache-2.0
"""Bodies of ranks for test_fidelity.py: a real transformer's hidden states, with the router that goes with
them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import nvte_ep
from numpy.typing import NDArray
from nvte_ep import Operand

from distributed.cases import DTYPES, Case
from distributed.launcher import Rank
from distributed.steps import RNG_STATE, open_group, open_handle
from distributed.transports import Transport

Array = NDArray[Any]

RANKS, EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 384
# Names of the states and the router of a layer in the data.
LAYERS = {"middle": ("hidden_states_bf16", "gate"), "late": ("late_hidden_states_bf16", "late_gate")}


@cache
def states_and_choice(layer: str) -> tuple[Array, Array, Array]:
    """[N, H] BF16, [N, K] experts and [N, K] weights (softmax over the chosen)."""
    states_name, gate_name = LAYERS[layer]
    with np.load(Path(nvte_ep.__file__).parent / "data" / "minilm_tokens.npz") as data:
        states = data[states_name].view(DTYPES["bfloat16"])
        logits = states.astype(np.float32) @ data[gate_name][:EXPERTS].T
    topk = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]
    chosen = np.exp(np.take_along_axis(logits, topk, axis=1) - logits.max(axis=1, keepdims=True))
    return states, topk, (chosen / chosen.sum(axis=1, keepdims=True)).astype(np.float32)


def case_of(layer: str, format: str) -> Case:
    """Ranks take contiguous parts of the text."""
    _, topk, _ = states_and_choice(layer)
    parts = np.array_split(topk, RANKS)
    return Case(
        f"{layer}_{format}",
        ranks=RANKS,
        experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        tokens=tuple(len(part) for part in parts),
        alignment=128,
        dispatch=format,
        combine_backward=format,
        choices=tuple(tuple(tuple(choice) for choice in part.tolist()) for part in parts),
    )


def sqnr(reference: Array, got: Array) -> float:
    """Signal to quantisation noise in dB."""
    signal, noise = reference.astype(np.float64), got.astype(np.float64) - reference.astype(np.float64)
    return float(10 * np.log10((signal**2).sum() / (noise**2).sum()))


def through_the_ranks(
    rank: Rank, transport: Transport, case: Case, layer: str
) -> dict[str, tuple[Array, Array]]:
    """By name, what should have come (in FP64) and what came, of this rank."""
    me = rank.index
    states, _, weights = states_and_choice(layer)
    everybody = np.split(states, np.cumsum(case.tokens_of)[:-1])
    tokens, mine = everybody[me], np.split(weights, np.cumsum(case.tokens_of)[:-1])[me]
    layout = case.layouts[me]
    filled, total = layout.filled, layout.total_rows
    sent = np.array(
        [everybody[layout.source_rank[slot]][layout.source_token[slot]] for slot in filled], np.float64
    )
    exact_slots = np.zeros((total, case.hidden))
    exact_slots[filled] = sent
    format = case.dispatch
    got: dict[str, tuple[Array, Array]] = {}
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        counts = np.array(handle.prepare(case.topk[me]).rows_per_expert)
        received = handle.dispatch(tokens, mine, receive="decoded", dtype="float32")
        got["token"] = sent, np.array(received.data)[filled]
        result = handle.combine(received.data, slot_weights=received.weights)
        got["layer"] = tokens.astype(np.float64), np.array(result)
        operand = handle.dispatch(tokens, receive="operand", columnwise=True, scale_layout="linear").operand
        assert operand is not None
        got["rowwise"] = exact_slots, rowwise(operand, counts)
        got["columnwise"] = exact_slots, columnwise(operand, counts)
        grads = handle.combine_backward(tokens, receive="decoded", dtype="float32")
        got["gradient"] = sent, np.array(grads.data)[filled]
        if format == "nvfp4":
            grads = handle.combine_backward(
                tokens, receive="decoded", dtype="float32", rounding="stochastic", rng_state=RNG_STATE
            )
            got["stochastic gradient"] = sent, np.array(grads.data)[filled]
    return got


# ---- what a GEMM would read from an operand ----------------------------------------------------------------

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E2M1_VALUES = np.concatenate([_E2M1, -_E2M1])
_SIGNS = np.where((0xD7E8 >> np.arange(16)) & 1, -1.0, 1.0)


def _codes(payload: Array) -> Array:
    """Two E2M1 values of each byte, the low nibble first."""
    return _E2M1_VALUES[np.stack([payload & 15, payload >> 4], axis=-1)].reshape(*payload.shape[:-1], -1)


def _e4m3(scales: Array) -> Array:
    return scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _e8m0(scales: Array) -> Array:
    return np.exp2(scales.astype(np.float64) - 127)


def _inverse_transform(blocks: Array) -> Array:
    """The inverse of the 16-point random Hadamard transform, over the last axis."""
    parity = np.array([[bin(i & j).count("1") & 1 for j in range(16)] for i in range(16)])
    result: Array = (blocks @ np.where(parity, -0.25, 0.25)) * _SIGNS
    return result


def rowwise(operand: Operand, counts: Array) -> Array:
    """[total, H]."""
    total = int(counts.sum())
    payload, scales = np.asarray(operand.payload)[:total], np.asarray(operand.scales)[:total]
    if operand.format == "mxfp8":
        return _e4m3(payload) * np.repeat(_e8m0(scales), 32, axis=1)
    of_slot = np.repeat(np.asarray(operand.expert_scale), counts)
    return _codes(payload) * np.repeat(_e4m3(scales), 16, axis=1) * of_slot[:, None]


def columnwise(operand: Operand, counts: Array) -> Array:
    """[total, H] again: transposed back, and the transform undone."""
    payload, scales = np.asarray(operand.columnwise_payload), np.asarray(operand.columnwise_scales)
    hidden = operand.hidden
    slabs = []
    begin = 0
    for e, count in enumerate(counts.tolist()):
        end = begin + count
        if operand.format == "mxfp8":
            block = _e8m0(scales[begin // 32 * hidden : end // 32 * hidden].reshape(-1, hidden))
            slabs.append(_e4m3(payload.reshape(-1, hidden)[begin:end]) * np.repeat(block, 32, axis=0))
        else:
            block = _e4m3(scales[begin // 16 * hidden : end // 16 * hidden].reshape(hidden, -1))
            codes = _codes(payload[begin * hidden // 2 : end * hidden // 2].reshape(hidden, -1))
            values = codes * np.repeat(block, 16, axis=1) * np.asarray(operand.columnwise_expert_scale)[e]
            slabs.append(_inverse_transform(values.reshape(hidden, -1, 16)).reshape(hidden, -1).T)
        begin = end
    return np.concatenate(slabs)
