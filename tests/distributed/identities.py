# SPDX-License-Identifier: Apache-2.0
"""Bodies of ranks for test_identities.py: the same data by two ways through the library."""

from __future__ import annotations

from typing import Any

import numpy as np
import nvte_ep
from numpy.typing import NDArray
from nvte_ep import Handle

from distributed import model
from distributed.cases import DTYPES, Case
from distributed.launcher import Rank
from distributed.steps import RNG_STATE, Guarded, guarded_operand, has_columnwise, open_group, open_handle
from distributed.transports import Transport

Array = NDArray[Any]


def codec(format: str, name: str) -> Any:
    return getattr(nvte_ep, f"{format}_{name}")


def decoded(handle: Handle, direction: str, source: Any, **options: Any) -> bytes:
    """The whole receive buffer, what is left untouched included."""
    out = Guarded((handle.slots, handle.group.hidden), DTYPES["bfloat16"])
    getattr(handle, direction)(source, receive="decoded", out=out.inside, **options)
    return out.check("decoded").tobytes()


def packed(handle: Handle, direction: str, source: Any, **options: Any) -> Array:
    return np.array(getattr(handle, direction)(source, receive="rows", **options).data)


def operand(handle: Handle, direction: str, source: Any, **options: Any) -> bytes:
    columnwise = has_columnwise(handle.formats[direction], handle.alignment)
    out, buffer = guarded_operand(handle, direction, columnwise)
    getattr(handle, direction)(source, receive="operand", out=out, **options)
    return buffer.check("operand").tobytes()


def received_directly(handle: Handle, direction: str, rows: Array, counts: Any, **options: Any) -> bytes:
    """direct_receive of rows, called by hand."""
    format = handle.formats[direction]
    out, buffer = guarded_operand(handle, direction, has_columnwise(format, handle.alignment))
    codec(format, "direct_receive")(rows, handle.group.hidden, counts, out=out, **options)
    return buffer.check("operand").tobytes()


def quantized_equals_bf16_of_what_was_quantized(rank: Rank, transport: Transport, case: Case) -> None:
    """Dispatch in the case's format against BF16 dispatch of unpack(pack(tokens)), and the operand against
    direct_receive of the received rows; then the same for combine backward, stochastic in nvfp4."""
    format = case.dispatch
    stochastic = {"rounding": "stochastic", "rng_state": RNG_STATE} if format == "nvfp4" else {}
    row_ids = {"row_id_base": rank.index * case.max_tokens}
    with open_group(rank, transport, case) as group:
        quantized = open_handle(group, case)
        plain = open_handle(group, case, dispatch="bf16", combine_backward="bf16")
        counts = quantized.prepare(case.topk[rank.index]).rows_per_expert
        plain.prepare(case.topk[rank.index])
        for direction, source, options in (
            ("dispatch", case.tokens_in(rank.index), {}),
            ("combine_backward", case.grad_in(rank.index), stochastic),
        ):
            rows = codec(format, "pack")(source, **options, **(row_ids if options else {}))
            rounded = codec(format, "unpack")(rows, case.hidden)
            assert decoded(quantized, direction, source, **options) == decoded(plain, direction, rounded)

            ranked = {**options, "rank": rank.index} if options else {}
            rows = packed(quantized, direction, source, **options)
            by_hand = received_directly(quantized, direction, rows, counts, **ranked)
            assert operand(quantized, direction, source, **options) == by_hand


def quantized_beforehand_equals_quantized_inside(rank: Rank, transport: Transport, case: Case) -> None:
    """Packed rows, and payload and scales apart, arrive as the tokens do that they were made of."""
    format = case.dispatch
    tokens = case.tokens_in(rank.index)
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[rank.index])
        for direction in ("dispatch", "combine_backward"):
            expected = packed(handle, direction, tokens)
            filled = case.layouts[rank.index].total_rows
            rows = np.array(codec(format, "pack")(tokens))
            strided = np.zeros((len(rows), rows.shape[1] + 32), np.uint8)[:, : rows.shape[1]]
            strided[...] = rows
            for source in (rows, strided, codec(format, "quantize")(tokens)):
                np.testing.assert_array_equal(packed(handle, direction, source)[:filled], expected[:filled])


def tensor_scale_equals_its_rows(rank: Rank, transport: Transport, case: Case) -> None:
    """Tensor-scale mode: one scale for all tokens, which does not travel with payload and scales."""
    tokens = case.tokens_in(rank.index)
    largest = max(
        float(np.abs(x.astype(np.float32)).max(initial=1e-9)) for x in map(case.tokens_in, range(case.ranks))
    )
    scale = np.array([2.0 ** np.ceil(np.log2(largest / 2688))], np.float32)
    payload, scales, token_scales = nvte_ep.nvfp4_quantize(tokens, tensor_scale=scale)
    assert token_scales is None
    layout = case.layouts[rank.index]
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        counts = handle.prepare(case.topk[rank.index]).rows_per_expert
        expected = decoded(handle, "dispatch", nvte_ep.nvfp4_pack(tokens, tensor_scale=scale))
        assert decoded(handle, "dispatch", tokens, tensor_scale=scale) == expected
        assert decoded(handle, "dispatch", (payload, scales), tensor_scale=scale) == expected
        rows = packed(handle, "dispatch", (payload, scales), tensor_scale=scale)
        by_hand = received_directly(handle, "dispatch", rows, counts)
        assert operand(handle, "dispatch", (payload, scales), tensor_scale=scale) == by_hand
        received = handle.dispatch((payload, scales), tensor_scale=scale, receive="operand").operand
        assert received is not None
        used = layout.tokens_per_expert > 0
        amax = np.array(received.amax)
        np.testing.assert_array_equal(amax, np.where(used, 2688 * scale[0], 0).astype(np.float32))


OPERANDS: dict[str, dict[str, Any]] = {
    "linear": {"scale_layout": "linear"},
    "max": {"column_bound": "max"},
    "up": {"scale_rounding": "up"},
    "stochastic": {"rounding": "stochastic", "rng_state": RNG_STATE},
    "fixed": {"fixed_expert_scale": True},
}


def operand_options_reach_direct_receive(rank: Rank, transport: Transport, case: Case, name: str) -> bool:
    """An option of the receiver means the same in dispatch and in direct_receive; True if it changed a
    byte."""
    options = dict(OPERANDS[name])
    if "fixed_expert_scale" in options:
        options["fixed_expert_scale"] = np.full(case.experts_per_rank, 0.5, np.float32)
    layout = options.pop("scale_layout", "swizzled")
    tokens = case.tokens_in(rank.index)

    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        counts = handle.prepare(case.topk[rank.index]).rows_per_expert
        rows = packed(
            handle,
            "dispatch",
            tokens,
            **{k: options[k] for k in options if k in ("rounding", "rng_state", "scale_rounding")},
        )
        shape: dict[str, Any] = {"columnwise": True, "scale_layout": layout}
        outs = [handle.empty_operand(**shape) for _ in range(3)]
        for out in outs:
            np.asarray(out.bytes)[...] = 0
        handle.dispatch(tokens, receive="operand", out=outs[0], **options)
        ranked = {**options, **({"rank": rank.index} if "rounding" in options else {})}
        nvte_ep.nvfp4_direct_receive(rows, case.hidden, counts, out=outs[1], **ranked)
        nvte_ep.nvfp4_direct_receive(rows, case.hidden, counts, out=outs[2])
        got, expected, default = (np.asarray(out.bytes) for out in outs)
        np.testing.assert_array_equal(got, expected)
        return layout == "linear" or bool((got != default).any())


def identity_layer(rank: Rank, transport: Transport, case: Case) -> tuple[Array, Array]:
    """Dispatch and combine with nothing between, unweighted and weighted on the expert's side: [T, H]
    twice."""
    tokens, weights = case.tokens_in(rank.index), case.weights_in(rank.index)
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[rank.index])
        received = handle.dispatch(tokens, weights, receive="decoded", dtype=case.dtype)
        plain = handle.combine(received.data)
        weighted = handle.combine(received.data, slot_weights=received.weights)
        return np.array(plain), np.array(weighted)


def sum_of_choices(case: Case, rank: int, weighted: bool) -> tuple[Array, Array]:
    """What the identity layer is to give, in FP64, and the sum of the magnitudes that were added."""
    tokens = case.tokens_in(rank)
    if case.dispatch != "bf16":
        tokens = np.array(
            codec(case.dispatch, "unpack")(codec(case.dispatch, "pack")(tokens), case.hidden, dtype="float32")
        )
    else:
        tokens = tokens.astype(DTYPES["bfloat16"])
    clean, _ = model.clean_choice(case.topk[rank], case.experts)
    weights = np.where(clean >= 0, case.weights_in(rank) if weighted else 1.0, 0.0).astype(np.float64)
    total = weights.sum(axis=1, keepdims=True)
    exact = tokens.astype(np.float64) * total + 0.0  # sums begin at +0
    return exact, np.abs(exact)
