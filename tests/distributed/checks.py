# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a case got, against the model and the codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import nvte_ep
from numpy.typing import NDArray

from distributed import model
from distributed.cases import DTYPES, EAGER, Case
from distributed.steps import (
    RNG_STATE,
    Guarded,
    Step,
    is_untouched,
    operands,
    row_bytes,
)
from distributed.transports import Transport

Array = NDArray[Any]


# Of a step's results, those that nobody adds up.
NOT_SUMS = ("grad_topk_weights",)


def assert_same_step(got: Step, expected: Step, sums: bool = True) -> None:
    """Byte for byte, what was left untouched included. Without `sums`, leaves out what slots are added to,
    and lets the gradients of slot weights (sums over H) differ in their last place."""
    for mine, wanted in zip(
        (got.routing, got.sent, got.results, got.grads),
        (expected.routing, expected.sent, expected.results, expected.grads),
        strict=True,
    ):
        assert mine.keys() == wanted.keys()
        for name in mine:
            if name == "grad_slot_weights" and not sums:
                np.testing.assert_array_max_ulp(mine[name], wanted[name], 1)
            elif mine is not got.results or sums or name in NOT_SUMS:
                assert mine[name].tobytes() == wanted[name].tobytes(), name
    assert got.sent_weights is not None and expected.sent_weights is not None
    assert got.sent_weights.tobytes() == expected.sent_weights.tobytes()
    assert (got.total, got.findings) == (expected.total, expected.findings)


# ---- what is expected --------------------------------------------------------------------------------------


def pack(format: str, tokens: Array, **options: Any) -> Array:
    if format == "bf16":
        rows = np.zeros((len(tokens), row_bytes("bf16", tokens.shape[1])), np.uint8)
        rows[:, : 2 * tokens.shape[1]] = tokens.astype(DTYPES["bfloat16"]).view(np.uint8)
        return rows
    return np.array(getattr(nvte_ep, f"{format}_pack")(tokens, **options))


def unpack(format: str, rows: Array, hidden: int, dtype: str) -> Array:
    if format == "bf16":
        return np.ascontiguousarray(rows[:, : 2 * hidden]).view(DTYPES["bfloat16"]).astype(DTYPES[dtype])
    return np.array(getattr(nvte_ep, f"{format}_unpack")(rows, hidden, dtype=dtype))


def direct_receive(
    format: str, case: Case, rank: int, columnwise: bool, rows: Array, options: dict[str, Any]
) -> Array:
    """The whole operand buffer that direct_receive makes of received rows, in a buffer like that of the
    step."""
    experts, slots = case.experts_per_rank, case.slots_of(rank)
    layout = nvte_ep.operand_layout(
        format, case.hidden, slots, experts, alignment=case.alignment, columnwise=columnwise
    )
    buffer = Guarded((layout.total_bytes,), np.uint8)
    operand = nvte_ep.Operand(
        format,
        case.hidden,
        slots,
        experts,
        alignment=case.alignment,
        columnwise=columnwise,
        buffer=buffer.inside,
    )
    receive = getattr(nvte_ep, f"{format}_direct_receive")
    receive(rows, case.hidden, case.layouts[rank].rows_per_expert, out=operand, **options)
    return buffer.check("operand")


def check_received(
    case: Case,
    rank: int,
    format: str,
    got: dict[str, Array],
    rows_of: list[Array],
    operand_options: dict[str, Any],
) -> None:
    """All receive kinds of one direction, given the packed rows of every rank."""
    layout = case.layouts[rank]
    total = layout.total_rows
    expected = model.dispatch(layout, rows_of)
    np.testing.assert_array_equal(got["rows"][:total], expected, "rows")
    assert is_untouched(got["rows"][total:])

    decoded = unpack(format, expected, case.hidden, case.dtype)
    assert got["decoded"][:total].tobytes() == decoded.tobytes(), "decoded"
    assert is_untouched(got["decoded"][total:])

    kinds = operands(format, case)
    assert {name for name in got if "operand" in name} == kinds.keys()
    for name, columnwise in kinds.items():
        whole = direct_receive(format, case, rank, columnwise, got["rows"], operand_options)
        np.testing.assert_array_equal(got[name], whole, name)


# Half of the last place of a number, relative to it.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
SMALLEST = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-150}


def check_sum(
    transport: Transport, case: Case, rank: int, got: Array, slots: list[Array], wire: str, **options: Any
) -> None:
    """Sums of a token's slots. Exact ones are FP32 sums in the order of k, rounded once. The others may round
    the part of each rank too, and add in another order."""
    where = case.where[rank]
    exact = model.combine(where, slots, wire=transport.sum_format(wire), **options)
    # What crosses in MXFP8 is rounded to it on every transport alike.
    if transport.exact_sums or transport.sum_format(wire) == "mxfp8":
        assert got.tobytes() == exact.astype(DTYPES[case.dtype]).tobytes()
        return
    magnitude = model.combine_magnitude(where, slots, options.get("slot_weights"))
    exact = exact.astype(np.float64)
    # What is expected is rounded to FP32 itself.
    allowed = ROUNDING[case.dtype] * (magnitude + np.abs(exact)) + 2.0**-20 * magnitude
    allowed += 2.0**-24 * np.abs(exact)
    allowed += (case.ranks + 1) * SMALLEST[case.dtype]
    off = np.abs(got.astype(np.float64) - exact)
    assert (off <= allowed).all(), f"off by {(off / allowed).max():.3f} of what is allowed"


# ---- the checks --------------------------------------------------------------------------------------------


def check_prepare(_: Transport, case: Case, steps: list[Step]) -> None:
    for rank, (step, layout) in enumerate(zip(steps, case.layouts, strict=True)):
        total = layout.total_rows
        got = step.routing
        for name in (
            "tokens_routed",
            "tokens_per_expert",
            "rows_per_expert",
            "row_offsets",
            "scale_row_offsets",
        ):
            np.testing.assert_array_equal(got[name], getattr(layout, name), f"{name} of rank {rank}")
        assert got["total_rows"].tolist() == [total]
        assert got["dropped_rows"].tolist() == [layout.dropped_rows]
        np.testing.assert_array_equal(got["slot_source"][:total], layout.slot_source)
        np.testing.assert_array_equal(got["slot_expert"][:total], layout.expert)
        assert is_untouched(got["slot_source"][total:]) and is_untouched(got["slot_expert"][total:])
        assert step.total == (total if case.capacity == EAGER else None)


def check_findings(_: Transport, case: Case, steps: list[Step]) -> None:
    for rank, (step, layout) in enumerate(zip(steps, case.layouts, strict=True)):
        expected: list[tuple[str, int, int]] = []
        faults = model.clean_choice(case.topk[rank], case.experts)[1]
        if faults:
            expected.append(("INVALID_ARGUMENT", faults, 0))
        if layout.dropped_rows and case.overflow == "error":
            expected.append(("OVERFLOW", layout.dropped_rows, layout.needed_rows))
        assert step.findings == expected, f"rank {rank}"


def check_dispatch(_: Transport, case: Case, steps: list[Step]) -> None:
    rows = [pack(case.dispatch, case.tokens_in(rank)) for rank in range(case.ranks)]
    for rank, step in enumerate(steps):
        check_received(case, rank, case.dispatch, step.sent, rows, {})


def check_weights(_: Transport, case: Case, steps: list[Step]) -> None:
    weights = [case.weights_in(rank) for rank in range(case.ranks)]
    for step, layout in zip(steps, case.layouts, strict=True):
        assert step.sent_weights is not None
        expected = model.dispatch_weights(layout, weights)
        np.testing.assert_array_equal(step.sent_weights[: layout.total_rows], expected)
        assert is_untouched(step.sent_weights[layout.total_rows :])


def check_combine(transport: Transport, case: Case, steps: list[Step]) -> None:
    slots = [case.at_slots(rank, "expert_out") for rank in range(case.ranks)]
    weights = [case.scalars_at_slots(rank, "slot_weights") for rank in range(case.ranks)]
    for rank, step in enumerate(steps):
        residual = case.values(rank, "residual", case.tokens_of[rank])
        kinds: dict[str, dict[str, Any]] = {
            "combine": {},
            "combine_weighted": {"slot_weights": weights},
            "combine_accumulated": {"slot_weights": weights, "add_to": residual},
        }
        for name, options in kinds.items():
            check_sum(transport, case, rank, step.results[name], slots, case.combine, **options)


def check_tokens_without_slot(_: Transport, case: Case, steps: list[Step]) -> None:
    for where, step in zip(case.where, steps, strict=True):
        nowhere = (where[:, :, 0] < 0).all(axis=1)
        for name in ("combine", "combine_weighted", "dispatch_backward", "grad_topk_weights"):
            assert not np.any(step.results[name][nowhere].view(np.uint8)), name


def check_dispatch_backward(transport: Transport, case: Case, steps: list[Step]) -> None:
    grads = [case.at_slots(rank, "grad_received") for rank in range(case.ranks)]
    weight_grads = [case.scalars_at_slots(rank, "grad_recv_weights") for rank in range(case.ranks)]
    for rank, step in enumerate(steps):
        check_sum(transport, case, rank, step.results["dispatch_backward"], grads, case.dispatch_backward)
        expected = model.gather_slot_values(case.where[rank], weight_grads)
        np.testing.assert_array_equal(step.results["grad_topk_weights"], expected)


def stochastic_options(case: Case) -> dict[str, Any]:
    stochastic = case.rounding == "stochastic"
    return {"rounding": "stochastic", "rng_state": RNG_STATE} if stochastic else {}


def packed_grads(case: Case) -> list[Array]:
    """Ids of rows are rank * max_tokens_per_rank + token."""
    options = stochastic_options(case)
    return [
        pack(
            case.combine_backward,
            case.grad_in(rank),
            **({"row_id_base": rank * case.max_tokens, **options} if options else {}),
        )
        for rank in range(case.ranks)
    ]


def check_combine_backward(_: Transport, case: Case, steps: list[Step]) -> None:
    rows = packed_grads(case)
    for rank, step in enumerate(steps):
        options = stochastic_options(case)
        if options:
            options["rank"] = rank
        check_received(case, rank, case.combine_backward, step.grads, rows, options)


def check_combine_backward_of_a_weighted_sum(_: Transport, case: Case, steps: list[Step]) -> None:
    rows = packed_grads(case)
    for rank, (step, layout) in enumerate(zip(steps, case.layouts, strict=True)):
        total, filled = layout.total_rows, layout.filled
        grads = unpack(case.combine_backward, model.dispatch(layout, rows), case.hidden, "float32")
        weights = case.scalars_at_slots(rank, "slot_weights")
        expected = np.zeros((total, case.hidden), np.float32)
        expected[filled] = grads[filled] * weights[filled, None]
        assert step.grads["weighted"][:total].tobytes() == expected.astype(DTYPES[case.dtype]).tobytes()
        assert is_untouched(step.grads["weighted"][total:])

        products = grads[filled].astype(np.float64) * case.at_slots(rank, "expert_out")[filled].astype(
            np.float64
        )
        dots = np.zeros(total)
        error = np.zeros(total)
        dots[filled] = products.sum(axis=1)
        error[filled] = np.abs(products).sum(axis=1) * case.hidden * 2.0**-24
        got = step.grads["grad_slot_weights"]
        assert (np.abs(got[:total] - dots) <= error).all()
        assert is_untouched(got[total:])


# Each of these with (transport, case, steps).
Check = Callable[[Transport, Case, list[Step]], None]
CHECKS: dict[str, Check] = {
    "prepare": check_prepare,
    "findings": check_findings,
    "dispatch": check_dispatch,
    "weights": check_weights,
    "combine": check_combine,
    "tokens_without_slot": check_tokens_without_slot,
    "dispatch_backward": check_dispatch_backward,
    "combine_backward": check_combine_backward,
    "combine_backward_weighted": check_combine_backward_of_a_weighted_sum,
}
