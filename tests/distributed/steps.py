# SPDX-License-Identifier: Apache-2.0
"""One step of a case: prepare, dispatch, combine and both backwards, in every receive kind. Runs on a rank
and hands out NumPy arrays; the tests compare them with the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvte_ep import Group, Handle, Operand, Routing

from distributed import model
from distributed.cases import BLOCK, DTYPES, Case
from distributed.launcher import Rank
from distributed.transports import Transport

Array = NDArray[Any]

RNG_STATE = np.array([0x1234_5678_9ABC, 41], np.int64)
_SENTINEL = 0xA5
_GUARD_ROWS = 2


@dataclass
class Step:
    """What one rank got. Buffers are whole: slots past the total included."""

    routing: dict[str, Array]
    total: int | None  # of an eager group
    findings: list[tuple[str, int, int]]  # (status, count, needed rows)
    sent: dict[str, Array] = field(default_factory=dict)  # by receive kind
    sent_weights: Array | None = None
    results: dict[str, Array] = field(default_factory=dict)
    grads: dict[str, Array] = field(default_factory=dict)


class Guarded:
    """An output buffer whose surroundings must stay as they are."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        row = int(np.prod(shape[1:], dtype=np.int64)) * np.dtype(dtype).itemsize
        # 256 bytes on both sides at least, and a base aligned as the strictest part needs it.
        self._guard = model.round_up(max(row, 1) * _GUARD_ROWS, 256)
        size = shape[0] * row
        raw = np.full(size + 2 * self._guard + 256, _SENTINEL, np.uint8)
        start = -raw.ctypes.data % 256
        self._whole = raw[start : start + size + 2 * self._guard]
        self.inside = self._whole[self._guard : self._guard + size].view(dtype).reshape(shape)

    def check(self, what: str) -> Array:
        outside = np.concatenate([self._whole[: self._guard], self._whole[len(self._whole) - self._guard :]])
        assert (outside == _SENTINEL).all(), f"{what}: bytes around the output were written"
        return self.inside


def is_untouched(array: Array) -> bool:
    """All bytes as a Guarded buffer has them before anything is written."""
    return bool((np.ascontiguousarray(array).view(np.uint8) == _SENTINEL).all())


def guarded_operand(handle: Handle, direction: str, columnwise: bool) -> tuple[Operand, Guarded]:
    layout = handle.empty_operand(direction, columnwise=columnwise).layout
    buffer = Guarded((layout.total_bytes,), np.uint8)
    operand = Operand(
        handle.formats[direction],
        handle.group.hidden,
        handle.slots,
        handle.group.info.num_local_experts,
        alignment=handle.alignment,
        columnwise=columnwise,
        buffer=buffer.inside,
    )
    return operand, buffer


def has_operand(format: str, hidden: int) -> bool:
    return BLOCK[format] > 0 and hidden % 32 == 0


def has_columnwise(format: str, alignment: int) -> bool:
    return alignment >= BLOCK[format] > 0


def operands(format: str, case: Case) -> dict[str, bool]:
    """The operands that a direction of a case can be received as, by name: whether they have columns."""
    if not has_operand(format, case.hidden):
        return {}
    columnwise = has_columnwise(format, case.alignment)
    return {"operand": columnwise} | ({"rowwise operand": False} if columnwise else {})


def group_settings(case: Case) -> dict[str, Any]:
    return {
        "num_experts": case.experts,
        "hidden": case.hidden,
        "max_tokens_per_rank": case.max_tokens,
        "recv_capacity": case.recv_capacity,
        "max_top_k": case.top_k,
        "overflow": case.overflow,
    }


def open_group(rank: Rank, transport: Transport, case: Case, **changes: Any) -> Group:
    return transport.join(rank, **(group_settings(case) | changes))


def open_handle(group: Group, case: Case, **changes: Any) -> Handle:
    settings: dict[str, Any] = {
        "top_k": case.top_k,
        "alignment": case.alignment,
        "dispatch": case.dispatch,
        "combine": case.combine,
        "dispatch_backward": case.dispatch_backward,
        "combine_backward": case.combine_backward,
    }
    return group.handle(**(settings | changes))


def guarded_routing(handle: Handle, case: Case, me: int) -> tuple[Routing, dict[str, Guarded]]:
    """Room for everything that prepare tells; counts in the type of the indices."""
    experts, slots = case.experts_per_rank, case.slots_of(me)
    sizes = dict.fromkeys(("tokens_routed", "tokens_per_expert", "rows_per_expert"), experts)
    sizes |= dict.fromkeys(("row_offsets", "scale_row_offsets"), experts + 1)
    sizes |= dict.fromkeys(("total_rows", "dropped_rows"), 1)
    buffers = {name: Guarded((size,), case.index) for name, size in sizes.items()}
    buffers["slot_source"] = Guarded((slots,), np.int64)
    buffers["slot_expert"] = Guarded((slots,), np.int32)
    return Routing(**{name: buffer.inside for name, buffer in buffers.items()}), buffers


def findings(group: Group) -> list[tuple[str, int, int]]:
    found = []
    while (error := group.poll_error()) is not None:
        assert error.rank == group.info.rank, "a finding is about the rank that made it"
        found.append((error.status.name, error.count, error.needed_rows))
    return sorted(found)


def run_step(rank: Rank, transport: Transport, case: Case) -> Step:
    with open_group(rank, transport, case) as group:
        return step_on(rank, open_handle(group, case), case)


def step_on(rank: Rank, handle: Handle, case: Case) -> Step:
    """All calls of one step, with guarded buffers of the caller."""
    me = rank.index
    rank.log(f"{case.name}: {case.tokens_of[me]} tokens")
    routing, buffers = guarded_routing(handle, case, me)
    handle.prepare(case.topk[me], out=routing)
    told = {name: buffer.check(name) for name, buffer in buffers.items()}
    step = Step(told, routing.total, findings(handle.group))
    assert handle.slots == case.slots_of(me)
    _dispatch(step, handle, case, me)
    _combine(step, handle, case, me)
    _dispatch_backward(step, handle, case, me)
    _combine_backward(step, handle, case, me)
    assert not findings(handle.group), "only prepare finds anything here"
    return step


def _receive(handle: Handle, case: Case, direction: str, source: Array, **options: Any) -> dict[str, Array]:
    """By receive kind: rows, decoded, and for formats that have them the operands, their whole buffers."""
    send = getattr(handle, direction)
    format = handle.formats[direction]
    got = {}
    rows = Guarded((handle.slots, row_bytes(format, case.hidden)), np.uint8)
    send(source, receive="rows", out=rows.inside, **options)
    got["rows"] = rows.check("rows")
    decoded = Guarded((handle.slots, case.hidden), DTYPES[case.dtype])
    send(source, receive="decoded", out=decoded.inside, dtype=case.dtype, **options)
    got["decoded"] = decoded.check("decoded")
    for name, columnwise in operands(format, case).items():
        operand, buffer = guarded_operand(handle, direction, columnwise)
        send(source, receive="operand", out=operand, **options)
        got[name] = buffer.check(name)
    return got


def row_bytes(format: str, hidden: int) -> int:
    """By the layout in the header, not asked of the library."""
    if format == "bf16":
        return model.round_up(2 * hidden, 16)
    if format == "mxfp8":
        return model.round_up(hidden + hidden // 32, 16)
    return model.round_up(model.round_up(hidden // 2 + hidden // 16, 4) + 4, 16)


def _dispatch(step: Step, handle: Handle, case: Case, me: int) -> None:
    tokens, weights = case.tokens_in(me), case.weights_in(me)
    step.sent = _receive(handle, case, "dispatch", tokens)
    slot_weights = Guarded((handle.slots,), np.float32)
    received = Guarded((handle.slots, case.hidden), DTYPES[case.dtype])
    handle.dispatch(
        tokens,
        weights,
        receive="decoded",
        out=received.inside,
        dtype=case.dtype,
        recv_weights=slot_weights.inside,
    )
    assert received.check("decoded").tobytes() == step.sent["decoded"].tobytes(), (
        "weights change nothing else"
    )
    step.sent_weights = slot_weights.check("recv_weights")


def _combine(step: Step, handle: Handle, case: Case, me: int) -> None:
    expert_out, weights = case.at_slots(me, "expert_out"), case.scalars_at_slots(me, "slot_weights")
    shape = case.tokens_of[me], case.hidden
    kinds: dict[str, dict[str, Any]] = {
        "combine": {},
        "combine_weighted": {"slot_weights": weights},
        "combine_accumulated": {"slot_weights": weights, "accumulate": True},
    }
    for name, options in kinds.items():
        result = Guarded(shape, DTYPES[case.dtype])
        if "accumulate" in options:
            result.inside[...] = case.values(me, "residual", shape[0])
        handle.combine(expert_out, out=result.inside, **options)
        step.results[name] = result.check(name)


def _dispatch_backward(step: Step, handle: Handle, case: Case, me: int) -> None:
    grads, weight_grads = case.at_slots(me, "grad_received"), case.scalars_at_slots(me, "grad_recv_weights")
    tokens = Guarded((case.tokens_of[me], case.hidden), DTYPES[case.dtype])
    weights = Guarded((case.tokens_of[me], case.top_k), np.float32)
    handle.dispatch_backward(grads, weight_grads, out=tokens.inside, grad_topk_weights=weights.inside)
    step.results["dispatch_backward"] = tokens.check("grad_tokens")
    step.results["grad_topk_weights"] = weights.check("grad_topk_weights")


def _combine_backward(step: Step, handle: Handle, case: Case, me: int) -> None:
    options: dict[str, Any] = {}
    if case.rounding == "stochastic":
        options = {"rounding": "stochastic", "rng_state": RNG_STATE}
    grad = case.grad_in(me)
    step.grads = _receive(handle, case, "combine_backward", grad, **options)
    weighted = Guarded((handle.slots, case.hidden), DTYPES[case.dtype])
    dots = Guarded((handle.slots,), np.float32)
    handle.combine_backward(
        grad,
        receive="decoded",
        out=weighted.inside,
        dtype=case.dtype,
        slot_weights=case.scalars_at_slots(me, "slot_weights"),
        expert_out=case.at_slots(me, "expert_out"),
        grad_slot_weights=dots.inside,
        **options,
    )
    step.grads["weighted"] = weighted.check("weighted")
    step.grads["grad_slot_weights"] = dots.check("grad_slot_weights")
