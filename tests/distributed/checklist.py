# SPDX-License-Identifier: Apache-2.0
"""Bodies of ranks for test_checklist.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import nvte_ep
from numpy.typing import NDArray
from nvte_ep import Group, Handle, Operand, Routing, UnsupportedError

from distributed.cases import DTYPES, Case
from distributed.launcher import Rank
from distributed.steps import (
    RNG_STATE,
    Step,
    has_columnwise,
    has_operand,
    open_group,
    open_handle,
    row_bytes,
    step_on,
)
from distributed.transports import ANY_TRANSPORT, Transport

Array = NDArray[Any]
BF16 = DTYPES["bfloat16"]


def refused_settings(rank: Rank, transport: Transport) -> list[str]:
    """What of the table's traits the library says UNSUPPORTED to."""
    refused = []
    try:
        transport.join(rank, zero_copy=True, **ANY_TRANSPORT).close()
    except UnsupportedError:
        refused.append("zero_copy")
    with transport.join(rank, **ANY_TRANSPORT) as group:
        try:
            # Not by way of a mirror, which would ask for what the transport has.
            Handle(group, top_k=1, combine="mxfp8", dispatch_backward="mxfp8").close()
        except UnsupportedError:
            refused.append("mxfp8_sums")
    return refused


def chosen_by_auto(rank: Rank, transport: Transport) -> str:
    auto = dataclasses.replace(transport, name="auto")
    with auto.join(rank, **ANY_TRANSPORT) as group:
        return group.info.transport


# ---- what travels ------------------------------------------------------------------------------------------


def identity_bytes(rank: Rank, transport: Transport, case: Case) -> tuple[Array, Array, Array]:
    """Every token is sent as payload and scales that spell its rank and number; what arrived in the slots,
    and the slot_source that says what should have."""
    me = rank.index
    payload_bytes, scale_bytes = {"mxfp8": (1, 32), "nvfp4": (2, 16)}[case.dispatch]
    count = case.tokens_of[me]
    spelled = np.zeros((count, 4), np.uint8)
    spelled[:, 0], spelled[:, 1], spelled[:, 2], spelled[:, 3] = (
        me,
        np.arange(count) & 255,
        np.arange(count) >> 8,
        1,
    )
    payload = np.resize(spelled, (count, 4))[:, np.arange(case.hidden // payload_bytes) % 4].copy()
    scales = 255 - payload[:, : case.hidden // scale_bytes]
    parts: list[Any] = [payload, scales]
    if case.dispatch == "nvfp4":
        parts.append(np.full(count, 2.0 ** (me - 3), np.float32))
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        routing = handle.prepare(case.topk[me])
        rows = np.array(handle.dispatch(tuple(parts), receive="rows").data)
        total = case.layouts[me].total_rows
        return rows[:total], np.array(routing.slot_source)[:total], payload


def per_choice_weight_gradients(rank: Rank, transport: Transport, case: Case) -> tuple[Array, Array]:
    """Every slot's gradient says which choice it came from; grad_topk_weights, from NaN, and the clean
    choice."""
    me = rank.index
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[me])
        layout = case.layouts[me]
        spelled = np.zeros(handle.slots, np.float32)
        spelled[: layout.total_rows] = (layout.source_rank * 1000 + layout.source_token) * 8 + layout.source_k
        grads = np.zeros((handle.slots, case.hidden), BF16)
        result = np.full((case.tokens_of[me], case.top_k), np.nan, np.float32)
        handle.dispatch_backward(grads, spelled, grad_topk_weights=result)
        return result, case.where[me][:, :, 0] >= 0


def three_dimensions(rank: Rank, transport: Transport, case: Case, batch: int) -> tuple[Array, Array]:
    """[B, S, H] through dispatch and combine as [B * S, H]."""
    tokens = case.tokens_in(rank.index).reshape(batch, -1, case.hidden)
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[rank.index])
        slots = handle.dispatch(tokens.reshape(-1, case.hidden), receive="decoded").data
        result = np.empty_like(tokens)
        handle.combine(slots, out=result.reshape(-1, case.hidden))
        return tokens, result


NONFINITE = {1: np.nan, 4: np.inf, 9: -np.inf}  # by token: what its element 20 is in special_tokens
ZERO_TOKENS = (2, 3)  # +0 and -0 throughout


def special_tokens(rank: Rank, transport: Transport, case: Case, nonfinite: str) -> dict[str, list[Array]]:
    """By what was received of the case's tokens without and with special ones among those of rank 0: rows,
    decoded, and the scales of the operand, whose layout is linear."""
    got: dict[str, list[Array]] = {"rows": [], "decoded": [], "scales": [], "columnwise_scales": []}
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[rank.index])
        total = case.layouts[rank.index].total_rows
        for special in (False, True):
            tokens = case.tokens_in(rank.index)
            if rank.index == 0:
                tokens[ZERO_TOKENS[0]], tokens[ZERO_TOKENS[1]] = 0.0, -0.0
                for token, value in NONFINITE.items() if special else ():
                    tokens[token, 20] = value
            got["rows"].append(
                np.array(handle.dispatch(tokens, receive="rows", nonfinite=nonfinite).data)[:total]
            )
            received = handle.dispatch(tokens, receive="decoded", dtype="float32", nonfinite=nonfinite)
            got["decoded"].append(np.array(received.data)[:total])
            operand = handle.dispatch(
                tokens, receive="operand", columnwise=True, scale_layout="linear", nonfinite=nonfinite
            ).operand
            assert operand is not None
            got["scales"].append(np.array(operand.scales)[:total])
            block = 16 if case.dispatch == "nvfp4" else 32
            got["columnwise_scales"].append(
                np.array(operand.columnwise_scales)[: total // block * case.hidden]
            )
    return got


# ---- whose memory ------------------------------------------------------------------------------------------


def caller_buffers(rank: Rank, transport: Transport, case: Case) -> None:
    """What is received lies in the caller's memory, at the caller's stride; the result object is the
    caller's."""
    me = rank.index
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[me])
        total = case.layouts[me].total_rows
        for direction, source in (("dispatch", case.tokens_in(me)), ("combine_backward", case.grad_in(me))):
            send = getattr(handle, direction)
            expected = np.array(send(source, receive="decoded").data)[:total]
            out = np.full((handle.slots, case.hidden + 16), 7, BF16)
            received = send(source, receive="decoded", out=out[:, : case.hidden])
            assert np.shares_memory(received.data, out)
            assert out[:total, : case.hidden].tobytes() == expected.tobytes()
            assert (out[:, case.hidden :] == 7).all() and (out[total:] == 7).all()

            width = row_bytes(handle.formats[direction], case.hidden)
            packed = np.full((handle.slots, width + 16), 9, np.uint8)
            send(source, receive="rows", out=packed[:, :width])
            np.testing.assert_array_equal(
                packed[:total, :width], np.array(send(source, receive="rows").data)[:total]
            )
            assert (packed[:, width:] == 9).all() and (packed[total:] == 9).all()


def strided_inputs(rank: Rank, transport: Transport, case: Case) -> None:
    """Every input may be a part of a wider array: the outer stride is free."""
    me = rank.index

    def inside(array: Array) -> Array:
        wide = np.full((len(array), array.shape[1] + 16), 3, array.dtype)
        wide[:, : array.shape[1]] = array
        return wide[:, : array.shape[1]]

    def step(at: Any) -> list[bytes]:
        tokens, grad = at(case.tokens_in(me)), at(case.grad_in(me))
        outs, grads = at(case.at_slots(me, "expert_out")), at(case.at_slots(me, "grad_received"))
        handle.prepare(at(case.topk[me]))
        received = handle.dispatch(tokens, at(case.weights_in(me)), receive="decoded")
        back = handle.combine_backward(grad, receive="decoded", expert_out=outs)
        arrays = (received.data, received.weights, back.data, back.weights)
        result, grad_tokens = handle.combine(outs), handle.dispatch_backward(grads)[0]
        total = case.layouts[me].total_rows
        return [np.array(x)[:total].tobytes() for x in arrays] + [
            np.array(x).tobytes() for x in (result, grad_tokens)
        ]

    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        assert step(inside) == step(np.ascontiguousarray)


def operand_in_one_buffer(rank: Rank, transport: Transport, case: Case, symmetric: bool) -> None:
    """Data and scales in one buffer that the caller sized by operand_layout; every part lies in it."""
    me = rank.index
    experts = case.experts_per_rank
    with open_group(rank, transport, case, zero_copy=symmetric) as group, open_handle(group, case) as handle:
        handle.prepare(case.topk[me])
        for direction, source in (("dispatch", case.tokens_in(me)), ("combine_backward", case.grad_in(me))):
            format = handle.formats[direction]
            shape: dict[str, Any] = {"alignment": case.alignment, "columnwise": True}
            layout = nvte_ep.operand_layout(format, case.hidden, handle.slots, experts, **shape)
            if symmetric:
                buffer: Any = group.mem_alloc(layout.total_bytes)
            else:
                buffer = nvte_ep.Array.empty(layout.total_bytes)
            bytes_of_buffer = np.asarray(buffer)
            bytes_of_buffer[...] = 0
            operand = Operand(format, case.hidden, handle.slots, experts, buffer=buffer, **shape)
            send = getattr(handle, direction)
            assert send(source, receive="operand", out=operand).operand is operand
            first = bytes_of_buffer.ctypes.data
            for name, part in layout.parts.items():
                array = getattr(operand, name)
                assert array.pointer == first + part.offset and array.nbytes == part.nbytes, name
                assert part.offset + part.nbytes <= layout.total_bytes
            # The payload of the operand is the payload of the rows.
            if not symmetric:
                rows = np.array(send(source, receive="rows").data)
                payload = np.asarray(operand.payload)
                total = case.layouts[me].total_rows
                np.testing.assert_array_equal(payload[:total], rows[:total, : payload.shape[1]])


@contextmanager
def symmetric_group(rank: Rank, transport: Transport, case: Case) -> Iterator[tuple[Group, Handle]]:
    with open_group(rank, transport, case, zero_copy=True) as group, open_handle(group, case) as handle:
        yield group, handle


def symmetric(group: Group, shape: tuple[int, int], dtype: str) -> Any:
    """An array in symmetric memory, all bytes 0xA5."""
    size = shape[0] * shape[1] * (1 if dtype == "uint8" else DTYPES[dtype].itemsize)
    memory = group.mem_alloc(size)
    np.asarray(memory)[...] = 0xA5
    return memory.view(dtype).reshape(*shape)


def zero_copy_step(rank: Rank, transport: Transport, case: Case) -> dict[str, bytes]:
    """Everything that peers read or write lies in symmetric memory; the bytes that came of it."""
    me = rank.index
    got: dict[str, bytes] = {}
    with symmetric_group(rank, transport, case) as (group, handle):
        handle.prepare(case.topk[me])
        slots = symmetric(group, (handle.slots, case.hidden), case.dtype)
        for direction, source in (("dispatch", case.tokens_in(me)), ("combine_backward", case.grad_in(me))):
            send, format = getattr(handle, direction), handle.formats[direction]
            send(source, receive="decoded", out=slots, dtype=case.dtype)
            got[f"{direction} decoded"] = np.asarray(slots).tobytes()
            rows = symmetric(group, (handle.slots, row_bytes(format, case.hidden)), "uint8")
            send(source, receive="rows", out=rows)
            got[f"{direction} rows"] = np.asarray(rows).tobytes()
            if has_operand(format, case.hidden):
                columnwise = has_columnwise(format, case.alignment)
                layout = handle.empty_operand(direction, columnwise=columnwise).layout
                memory = group.mem_alloc(layout.total_bytes)
                np.asarray(memory)[...] = 0xA5
                operand = Operand(
                    format,
                    case.hidden,
                    handle.slots,
                    case.experts_per_rank,
                    alignment=case.alignment,
                    columnwise=columnwise,
                    buffer=memory,
                )
                send(source, receive="operand", out=operand)
                got[f"{direction} operand"] = np.asarray(memory).tobytes()
        np.asarray(slots)[...] = case.at_slots(me, "expert_out")
        got["combine"] = np.array(handle.combine(slots)).tobytes()
        np.asarray(slots)[...] = case.at_slots(me, "grad_received")
        got["dispatch_backward"] = np.array(handle.dispatch_backward(slots)[0]).tobytes()
    return got


def staged_bytes(step: Step) -> dict[str, bytes]:
    """The same names for a step with ordinary memory."""
    kinds = {
        f"dispatch {kind}": step.sent[kind] for kind in ("decoded", "rows", "operand") if kind in step.sent
    }
    kinds |= {
        f"combine_backward {kind}": step.grads[kind]
        for kind in ("decoded", "rows", "operand")
        if kind in step.grads
    }
    kinds |= {name: step.results[name] for name in ("combine", "dispatch_backward")}
    return {name: array.tobytes() for name, array in kinds.items()}


def symmetric_pool(rank: Rank, transport: Transport, case: Case) -> None:
    """Allocations of every size, freed in another order and made again; what is not freed goes with the
    group."""
    with symmetric_group(rank, transport, case) as (group, handle):
        handle.prepare(case.topk[rank.index])
        sizes = [1, 255, 4096, handle.slots * case.hidden * 2]
        for _ in range(3):
            blocks = [group.mem_alloc(size) for size in sizes]
            assert all(block.pointer % 256 == 0 for block in blocks)
            for fill, block in enumerate(blocks):
                np.asarray(block)[...] = fill
            for fill, block in enumerate(blocks):
                assert (np.asarray(block) == fill).all()
            for block in (blocks[2], blocks[0], blocks[1]):
                group.mem_free(block)
            slots = blocks[3].view("bfloat16").reshape(handle.slots, case.hidden)
            handle.dispatch(case.tokens_in(rank.index), receive="decoded", out=slots)


# ---- again and again ---------------------------------------------------------------------------------------


def repeated(rank: Rank, transport: Transport, case: Case, times: int) -> list[Step]:
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        return [step_on(rank, handle, case) for _ in range(times)]


def changing(rank: Rank, transport: Transport, cases: list[Case]) -> list[Step]:
    """Cases of one shape but for their tokens, one after the other on one handle."""
    largest = max(case.max_tokens for case in cases)
    with (
        open_group(rank, transport, cases[0], max_tokens_per_rank=largest) as group,
        open_handle(group, cases[0]) as handle,
    ):
        return [step_on(rank, handle, case) for case in cases]


def two_handles(rank: Rank, transport: Transport, first: Case, second: Case, order: str) -> list[Array]:
    """Two layers in flight on one group, each with its own routing, top_k, alignment and formats. The order
    is of the forwards and backwards, as a pipeline has them: F1 F2 B1 B2 and so on."""
    me = rank.index
    capacity = max(first.recv_capacity, second.recv_capacity)
    got: dict[str, Array] = {}
    with open_group(rank, transport, first, recv_capacity=capacity, max_top_k=8) as group:
        handles = {"1": open_handle(group, first), "2": open_handle(group, second)}
        cases = {"1": first, "2": second}
        for event in order.split():
            case, handle = cases[event[1]], handles[event[1]]
            total = case.layouts[me].total_rows
            if event[0] == "F":
                handle.prepare(case.topk[me])
                slots = handle.dispatch(case.tokens_in(me), receive="decoded").data
                got[f"{event} slots"] = np.array(slots)[:total]
                got[f"{event} result"] = np.array(handle.combine(slots))
            else:
                grads = handle.combine_backward(case.grad_in(me), receive="decoded").data
                got[f"{event} slots"] = np.array(grads)[:total]
                got[f"{event} tokens"] = np.array(handle.dispatch_backward(grads)[0])
    return [got[name] for name in sorted(got)]


def replayed(rank: Rank, transport: Transport, case: Case, rounds: list[int]) -> list[tuple[Array, Array]]:
    """What a captured graph would do: T and all pointers are fixed once, unused rows are routed -1, and only
    memory changes between the rounds: tokens, choices, random state. `rounds`: tokens used in each."""
    me = rank.index
    count = case.tokens_of[me]
    topk = np.full((count, case.top_k), -1, np.int64)
    grad = np.zeros((count, case.hidden), BF16)
    rng_state = np.array(RNG_STATE)
    counts = np.zeros(case.experts_per_rank, np.int64)
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        routing = Routing(rows_per_expert=counts, slot_source=np.zeros(handle.slots, np.int64))
        rows = np.zeros((handle.slots, row_bytes(case.combine_backward, case.hidden)), np.uint8)
        got = []
        for used in rounds:
            topk[:] = -1
            topk[:used] = case.topk[me][:used]
            grad[:] = 0
            grad[:used] = case.grad_in(me)[:used]
            handle.prepare(topk, out=routing)
            handle.combine_backward(
                grad, receive="rows", out=rows, rounding="stochastic", rng_state=rng_state
            )
            total = int(counts.sum())
            got.append((rows[:total].copy(), np.array(routing.slot_source)[:total]))
            rng_state[1] += 1
        return got


# ---- groups ------------------------------------------------------------------------------------------------


def two_groups_at_once(rank: Rank, transport: Transport, first: Case, second: Case) -> list[Step]:
    """Two groups of the same ranks, a thread for each: their calls meet in any order."""
    import threading

    steps: list[Step | BaseException] = [RuntimeError("the thread ended early")] * 2

    def work(index: int, group: Group, case: Case) -> None:
        try:
            for handle in [open_handle(group, case) for _ in range(5)]:
                steps[index] = step_on(rank, handle, case)
        except BaseException as error:
            steps[index] = error

    with open_group(rank, transport, first) as one, open_group(rank, transport, second) as other:
        threads = [
            threading.Thread(target=work, args=arguments, daemon=True)
            for arguments in ((0, one, first), (1, other, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Handles and groups end after the last step of both: where ranks share a GPU, giving memory back
        # waits for the steps of all of them.
        done = []
        for step in steps:
            if isinstance(step, BaseException):
                raise step
            done.append(step)
    return done


# ---- frameworks --------------------------------------------------------------------------------------------


def torch_in_place(rank: Rank, transport: Transport, case: Case) -> None:
    """A PyTorch tensor over symmetric memory receives in place, and combines from there."""
    import torch

    tokens = torch.from_numpy(case.tokens_in(rank.index).astype(np.float32)).to(torch.bfloat16)
    with symmetric_group(rank, transport, case) as (group, handle):
        handle.prepare(torch.from_numpy(case.topk[rank.index]))
        memory = group.mem_alloc(handle.slots * case.hidden * 2)
        slots = torch.from_dlpack(memory.view("bfloat16").reshape(handle.slots, case.hidden))
        assert slots.data_ptr() == memory.pointer
        received = handle.dispatch(tokens, receive="decoded", out=slots)
        assert received.data is slots and slots.data_ptr() == memory.pointer
        result = torch.empty_like(tokens)
        handle.combine(slots, out=result)
        copies = torch.from_numpy((case.where[rank.index][:, :, 0] >= 0).sum(axis=1))
        torch.testing.assert_close(result, tokens * copies[:, None], rtol=2**-8, atol=0)


def torch_autograd(rank: Rank, transport: Transport, case: Case) -> None:
    """Of dispatch: the gradient of half the squares of the slots is k times the token. Of combine: the
    gradient of the mean over k is the gradient of the result over k, in every slot."""
    import nvte_ep.torch as ep
    import torch

    me = rank.index
    tokens = torch.from_numpy(case.tokens_in(me).astype(np.float32)).to(torch.bfloat16).requires_grad_()
    copies = torch.from_numpy((case.where[me][:, :, 0] >= 0).sum(axis=1))[:, None]
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        handle.prepare(torch.from_numpy(case.topk[me]))
        slots, _ = ep.dispatch(handle, tokens)
        (slots.float() ** 2 / 2).sum().backward()
        torch.testing.assert_close(tokens.grad, tokens.detach() * copies, rtol=2**-8, atol=0)

        outs = slots.detach().clone().requires_grad_()
        mean = ep.combine(handle, outs) / case.top_k
        mean.float().sum().backward()
        filled = torch.from_numpy(case.layouts[me].filled)
        expected = torch.zeros_like(outs)
        expected[filled] = 1 / case.top_k
        torch.testing.assert_close(outs.grad, expected, rtol=2**-8, atol=0)


def jax_vjp(rank: Rank, transport: Transport, case: Case) -> None:
    """The same in JAX."""
    import jax
    import jax.numpy as jnp
    import nvte_ep.jax as ep

    me = rank.index
    tokens = jnp.asarray(case.tokens_in(me).astype(np.float32)).astype(jnp.bfloat16)
    copies = (case.where[me][:, :, 0] >= 0).sum(axis=1)[:, None]
    with open_group(rank, transport, case) as group, open_handle(group, case) as handle:
        ep.prepare(handle, jnp.asarray(case.topk[me], jnp.int32))
        slots, vjp = jax.vjp(lambda x: ep.dispatch(handle, x)[0], tokens)
        (grad,) = vjp(slots)
        np.testing.assert_allclose(
            np.asarray(grad, np.float32), np.asarray(tokens, np.float32) * copies, rtol=2**-8
        )

        _, vjp = jax.vjp(lambda x: ep.combine(handle, x, num_tokens=tokens.shape[0]) / case.top_k, slots)
        (grad,) = vjp(jnp.ones_like(tokens))
        expected = np.zeros(slots.shape, np.float32)
        expected[case.layouts[me].filled] = 1 / case.top_k
        np.testing.assert_allclose(np.asarray(grad, np.float32), expected, rtol=2**-8)
