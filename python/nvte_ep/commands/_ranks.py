"""The layer over ranks that are threads of this process: exchanges, times, errors and checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nvte_ep.commands._checks import (
    Checks,
    Sending,
    check_operand,
    direct_receive,
    fill,
    pack,
    sum_of_slots,
    unpack,
)
from nvte_ep.commands._moe import Addresses, Layer, Result, Slots, as_float32
from nvte_ep.commands._numerics import (
    Bytes,
    Error,
    Floats,
    bf16_bits,
    bf16_values,
    decode_columnwise,
    decode_operand,
)
from nvte_ep.communicator import Communicator
from nvte_ep.errors import PeerFailedError
from nvte_ep.formats import format_info
from nvte_ep.group import Group
from nvte_ep.handle import Handle, Received, Routing

T = TypeVar("T")

STAGES = ("pack", "prepare", "dispatch", "combine", "combine_backward", "dispatch_backward")
TIMEOUT_NS = 600 * 10**9  # a rank may work on its experts for long before its peers see it again


@dataclass(frozen=True)
class Wire:
    """One run of the layer: dispatch and combine_backward in a format, the two sums in BF16."""

    name: str
    format: str
    stochastic: bool = False  # rounding of the gradients in combine_backward

    def sending(self, seed: int) -> tuple[Sending, Sending]:
        """For dispatch and for combine_backward."""
        forward = Sending(self.format)
        if not self.stochastic:
            return forward, forward
        return forward, Sending(self.format, "stochastic", np.array([seed, 0], np.int64))


def wires() -> list[Wire]:
    """Every wire format of the library, BF16 first, and NVFP4 once more as training uses it."""
    found = [Wire(name, name) for name in format_info()]
    return [*found, *(Wire("nvfp4+sr", "nvfp4", stochastic=True) for wire in found if wire.name == "nvfp4")]


@dataclass
class RankRun:
    """What one rank brings home from one run."""

    checks: Checks
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, Error] = field(default_factory=dict)
    rows_from_peers: int = 0
    output: Floats | None = None
    grad_tokens: Floats | None = None
    grad_weights: Floats | None = None
    grad_experts: list[Floats] = field(default_factory=list)


@dataclass
class Shared:
    """What the ranks of a run have in common; lists have an entry per rank."""

    layer: Layer
    wire: Wire
    seed: int
    repeat: int
    capacity: int
    slots: list[Slots]
    addresses: list[Addresses]
    token_rows: list[Bytes]  # by the local codec
    grad_rows: list[Bytes]
    barrier: threading.Barrier
    progress: Callable[[str], None]
    exchanged: dict[str, list[Any]] = field(default_factory=dict)


def run(
    layer: Layer, wire: Wire, *, seed: int, repeat: int, progress: Callable[[str], None]
) -> tuple[list[RankRun], Result]:
    """The layer in one wire format over all ranks, and what it computed."""
    forward, backward = wire.sending(seed)
    slots, addresses = layer.slots()
    # One unit more than the fullest rank needs: so every rank has slots that nobody may touch.
    capacity = max(part.total for part in slots) + layer.alignment
    shared = Shared(
        layer=layer,
        wire=wire,
        seed=seed,
        repeat=repeat,
        capacity=capacity,
        slots=slots,
        addresses=addresses,
        token_rows=[pack(forward, tokens) for tokens in layer.tokens],
        grad_rows=[
            pack(backward, grads, row_id_base=rank * layer.max_tokens)
            for rank, grads in enumerate(layer.grads)
        ],
        barrier=threading.Barrier(layer.num_ranks),
        progress=progress,
    )
    runs = on_ranks(layer.num_ranks, lambda rank, comm: _Rank(shared, rank).run(comm), shared.barrier)
    result = Result(
        output=np.concatenate([r.output for r in runs if r.output is not None]),
        grad_tokens=np.concatenate([r.grad_tokens for r in runs if r.grad_tokens is not None]),
        grad_weights=np.concatenate([r.grad_weights for r in runs if r.grad_weights is not None]),
        grad_experts=[part for r in runs for part in r.grad_experts],
    )
    return runs, result


def num_steps(wire: Wire, repeat: int) -> int:
    """How often `run` calls progress: for every timed call and every group of checks."""
    stages = len(STAGES) - (wire.format == "bf16")  # which has nothing to pack
    return stages * (repeat + 1) + 4


def on_ranks(
    num_ranks: int, work: Callable[[int, Communicator], T], barrier: threading.Barrier | None = None
) -> list[T]:
    """Runs work(rank, communicator) in a thread per rank. Where one fails, all end and its error is raised.

    `barrier`: one that the work waits at. work closes its group when it fails, as `with Group(...)` does."""
    results: list[T | None] = [None] * num_ranks
    failures: list[BaseException] = []

    def one(rank: int, comm: Communicator) -> None:
        try:
            results[rank] = work(rank, comm)
        except BaseException as error:
            failures.append(error)
            if barrier is not None:
                barrier.abort()

    threads = [
        threading.Thread(target=one, args=item, name=f"rank {item[0]}", daemon=True)
        for item in enumerate(Communicator.threads(num_ranks))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # an interrupt: the ranks must not wait for one another any longer
        if barrier is not None:
            barrier.abort()
        raise
    if failures:
        echoes = (threading.BrokenBarrierError, PeerFailedError)  # of what happened to another rank
        raise next((error for error in failures if not isinstance(error, echoes)), failures[0])
    return [result for result in results if result is not None]


class _Rank:
    """One rank's part of a run."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self.rank, self.layer = shared, rank, shared.layer
        self.mine = shared.slots[rank]
        self.total = self.mine.total
        self.hidden = self.layer.hidden
        self.forward, self.backward = shared.wire.sending(shared.seed)
        self.quantised = shared.wire.format != "bf16"
        info = format_info()[shared.wire.format]
        self.columnwise = self.quantised and self.layer.alignment >= info.columnwise_alignment
        self.report = RankRun(Checks(f"{shared.wire.name}, rank {rank}"))
        self.report.rows_from_peers = self.mine.rows_from_peers(rank)

    def run(self, comm: Communicator) -> RankRun:
        layer, wire = self.layer, self.shared.wire
        with Group(
            comm,
            num_experts=layer.num_experts,
            hidden=self.hidden,
            max_tokens_per_rank=layer.max_tokens,
            max_top_k=layer.top_k,
            recv_capacity=self.shared.capacity,
            timeout_ns=TIMEOUT_NS,
        ) as group:
            handle = group.handle(
                top_k=layer.top_k,
                alignment=layer.alignment,
                dispatch=wire.format,
                combine="bf16",
                dispatch_backward="bf16",
                combine_backward=wire.format,
            )
            self._layer(handle)
            found = group.poll_error()
            self.report.checks.true("group.poll_error", found is None, f"expected nothing, got {found}")
            handle.close()
        return self.report

    # ---- the layer, timed ------------------------------------------------------------------------

    def _timed(self, stage: str, call: Callable[[Any], T]) -> T:
        """Calls once to warm up, then `repeat` times with all ranks at once. The call gets its last result,
        to write into it again."""
        result = call(None)
        self._step(stage)
        seconds = []
        for _ in range(self.shared.repeat):
            self.shared.barrier.wait()
            start = time.perf_counter()
            result = call(result)
            seconds.append(time.perf_counter() - start)
            self._step(stage)
        self.report.seconds[stage] = seconds
        return result

    def _step(self, text: str) -> None:
        if self.rank == 0:
            self.shared.progress(f"{self.shared.wire.name}: {text}")

    def _layer(self, handle: Handle) -> None:
        rank, layer = self.rank, self.layer
        tokens, weights, grads = layer.tokens[rank], layer.weights[rank], layer.grads[rank]

        # Forward.
        if self.quantised:
            self._timed("pack", lambda out: pack(self.forward, tokens, out=out))
        routing = self._timed("prepare", lambda out: handle.prepare(layer.topk[rank], out=out))
        self._check_routing(routing)
        sent = self._timed("dispatch", lambda out: self._dispatch(handle, tokens, weights, out))
        x, x_columns = self._values(sent, "tokens", self._sources(layer.tokens))
        y = np.zeros((self.shared.capacity, self.hidden), np.float32)
        saved = []
        for expert, rows in self._slabs():
            y[rows], before = layer.experts.forward(expert, x[rows])
            saved.append(before)
        expert_out = bf16_bits(y)
        slot_weights = sent.weights
        output = self._timed(
            "combine", lambda out: handle.combine(expert_out, slot_weights=slot_weights, out=out)
        )

        # Backward: slots get the gradient of their token; times the slot's weight it is the expert's.
        back = self._timed("combine_backward", lambda out: self._combine_backward(handle, grads, out))
        g, g_columns = self._values(back, "gradients", self._sources(layer.grads))
        w = np.asarray(slot_weights)[: self.total, None]
        grad_slots = np.zeros_like(y)
        grad_slot_weights = np.zeros(self.shared.capacity, np.float32)
        grad_slot_weights[: self.total] = np.einsum("sh,sh->s", g, bf16_values(expert_out[: self.total]))
        for (expert, rows), before in zip(self._slabs(), saved, strict=True):
            grad_slots[rows], grad_before = layer.experts.backward(expert, before, w[rows] * g[rows])
            self.report.grad_experts.append(
                layer.experts.weight_gradients(
                    x_columns[rows], before, grad_before, w[rows] * g_columns[rows]
                )
            )
        grad_received = bf16_bits(grad_slots)
        grad_tokens, grad_weights = self._timed(
            "dispatch_backward",
            lambda out: handle.dispatch_backward(
                grad_received,
                grad_slot_weights,
                out=None if out is None else out[0],
                grad_topk_weights=None if out is None else out[1],
            ),
        )
        self.report.output = self._bf16(output)
        self.report.grad_tokens = self._bf16(grad_tokens)
        self.report.grad_weights = np.asarray(grad_weights).copy()

        # Everything that came, against the local codecs.
        self._step("checks of dispatch")
        self._check_received(handle, "dispatch", sent)
        self._check_recv_weights(sent)
        self._step("checks of combine")
        self._check_sum("combine", output, expert_out, np.asarray(slot_weights))
        self._check_identity(handle)
        self._step("checks of combine_backward")
        self._check_received(handle, "combine_backward", back)
        self._check_weighted_gradients(handle, expert_out, np.asarray(slot_weights))
        self._step("checks of dispatch_backward")
        self._check_sum("dispatch_backward", grad_tokens, grad_received, None)
        self._check_weight_gradients(grad_weights, grad_slot_weights)

    def _dispatch(
        self, handle: Handle, tokens: NDArray[Any], weights: Floats, last: Received | None
    ) -> Received:
        if self.quantised:
            operand = self._operand(handle, "dispatch") if last is None else last.operand
            where: dict[str, Any] = {"receive": "operand", "out": operand}
        else:
            data = self._bf16_slots() if last is None else last.data
            where = {"receive": "decoded", "out": data}
        recv_weights = None if last is None else last.weights
        return handle.dispatch(tokens, weights, recv_weights=recv_weights, **where, **self.forward.options)

    def _combine_backward(self, handle: Handle, grads: NDArray[np.uint16], last: Received | None) -> Received:
        if self.quantised:
            operand = self._operand(handle, "combine_backward") if last is None else last.operand
            return handle.combine_backward(grads, receive="operand", out=operand, **self.backward.options)
        data = self._bf16_slots() if last is None else last.data
        return handle.combine_backward(grads, receive="decoded", out=data)

    def _operand(self, handle: Handle, direction: str) -> Any:
        operand = handle.empty_operand(direction, columnwise=self.columnwise)
        fill(operand.bytes)
        return operand

    def _bf16_slots(self) -> NDArray[np.uint16]:
        slots = np.empty((self.shared.capacity, self.hidden), np.uint16)
        fill(slots)
        return slots

    def _slabs(self) -> list[tuple[int, slice]]:
        """This rank's experts and the slots of their tokens."""
        found, start = [], 0
        for local, rows in enumerate(self.mine.rows_per_expert):
            count = self.mine.tokens_per_expert[local]
            found.append((self.rank * self.layer.num_local_experts + local, slice(start, start + count)))
            start += rows
        return found

    def _sources(self, per_rank: list[NDArray[Any]]) -> Floats:
        """What each kept slot's token was before it was packed."""
        values = np.zeros((self.total, self.hidden), np.float32)
        for source, tokens in enumerate(per_rank):
            slot = np.flatnonzero(self.mine.source_rank == source)
            values[slot] = as_float32(tokens[self.mine.source_token[slot]])
        return values

    def _values(self, received: Received, name: str, exact: Floats) -> tuple[Floats, Floats]:
        """What an expert reads along H and along the tokens, and how far that is from what was sent."""
        report = self.report
        if not self.quantised:
            values = bf16_values(received.data[: self.total])
            report.errors[name] = Error.between(exact, values)
            return values, values
        operand = received.operand
        assert operand is not None
        counts = self.mine.rows_per_expert
        along_h = decode_operand(operand, counts)
        report.errors[f"{name}_operand"] = Error.between(exact, along_h)
        if not self.columnwise:
            return along_h, along_h
        along_tokens = decode_columnwise(operand, counts)
        report.errors[f"{name}_columnwise"] = Error.between(exact, along_tokens)
        return along_h, along_tokens

    @staticmethod
    def _bf16(array: Any) -> Floats:
        return bf16_values(np.asarray(array).view(np.uint16))

    # ---- checks ----------------------------------------------------------------------------------

    def _from_all(self, key: str, value: Any) -> list[Any]:
        """What every rank gave under this key."""
        with_key = self.shared.exchanged.setdefault(key, [None] * self.layer.num_ranks)
        with_key[self.rank] = value
        self.shared.barrier.wait()
        return with_key

    def _expected_rows(self, direction: str) -> Bytes:
        per_rank = self.shared.token_rows if direction == "dispatch" else self.shared.grad_rows
        rows = np.zeros((self.total, per_rank[0].shape[1]), np.uint8)
        for source, sent in enumerate(per_rank):
            slot = np.flatnonzero(self.mine.source_rank == source)
            rows[slot] = sent[self.mine.source_token[slot]]
        return rows

    def _check_routing(self, routing: Routing) -> None:
        checks, mine = self.report.checks, self.mine
        source = np.where(mine.kept, mine.source_rank << 32 | mine.source_token, -1)
        rows = np.array(mine.rows_per_expert, np.int64)
        tiled = -(-rows // 128) * 128
        expected = {
            "tokens_routed": np.array(mine.tokens_per_expert, np.int64),
            "tokens_per_expert": np.array(mine.tokens_per_expert, np.int64),
            "rows_per_expert": rows,
            "row_offsets": np.concatenate([[0], np.cumsum(rows)]),
            "scale_row_offsets": np.concatenate([[0], np.cumsum(tiled)]),
            "total_rows": np.array([self.total]),
            "dropped_rows": np.array([0]),
        }
        for name, value in expected.items():
            checks.equal(f"prepare.{name}", np.asarray(getattr(routing, name)), value.astype(np.int64))
        checks.equal("prepare.slot_source", np.asarray(routing.slot_source)[: self.total], source)
        expert = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
        checks.equal("prepare.slot_expert", np.asarray(routing.slot_expert)[: self.total], expert)

    def _receive(self, handle: Handle, direction: str, receive: str, out: Any) -> None:
        """The same exchange once more, in another receive kind."""
        fill(out)
        layer, rank = self.layer, self.rank
        if direction == "dispatch":
            handle.dispatch(layer.tokens[rank], receive=receive, out=out, **self.forward.options)
        else:
            handle.combine_backward(layer.grads[rank], receive=receive, out=out, **self.backward.options)

    def _check_received(self, handle: Handle, direction: str, timed: Received) -> None:
        """Rows are the sender's pack, decoded values their unpack, the operand their direct receive; and
        beyond the last slot every byte is as it was."""
        checks, format = self.report.checks, self.shared.wire.format
        sending = self.forward if direction == "dispatch" else self.backward
        expected = self._expected_rows(direction)
        untouched = np.zeros_like(expected[:1])
        fill(untouched)
        capacity = self.shared.capacity

        def with_tail(values: NDArray[Any]) -> NDArray[Any]:
            whole = np.empty((capacity, values.shape[1]), values.dtype)
            fill(whole)
            whole[: self.total] = values
            return whole

        rows = np.empty((capacity, expected.shape[1]), np.uint8)
        self._receive(handle, direction, "rows", rows)
        checks.equal(f"{direction} rows == pack", rows, with_tail(expected))
        for dtype, storage in (("bfloat16", np.uint16), ("float32", np.float32)):
            decoded = np.empty((capacity, self.hidden), storage)
            self._receive(handle, direction, "decoded", decoded)
            wanted = unpack(format, rows[: self.total], self.hidden, dtype)
            checks.equal(f"{direction} decoded {dtype} == unpack", decoded, with_tail(wanted))
        # The wire's own error, which the last decoded values show.
        name = "tokens" if direction == "dispatch" else "gradients"
        exact = self._sources(self.layer.tokens if direction == "dispatch" else list(self.layer.grads))
        self.report.errors[name] = Error.between(exact, decoded[: self.total])
        if timed.operand is None:
            wanted = unpack(format, rows[: self.total], self.hidden, "bfloat16")
            checks.equal(f"{direction} timed == unpack", timed.data, with_tail(wanted))
            return
        local = direct_receive(
            sending, rows[: self.total], self.mine.rows_per_expert, timed.operand, self.rank
        )
        check_operand(checks, f"{direction} operand == direct_receive", timed.operand, local)

    def _check_recv_weights(self, sent: Received) -> None:
        expected = np.zeros(self.total, np.float32)
        mine = self.mine
        for source, weights in enumerate(self.layer.weights):
            slot = np.flatnonzero(mine.source_rank == source)
            expected[slot] = weights[mine.source_token[slot], mine.source_k[slot]]
        self.report.checks.equal("dispatch recv_weights", np.asarray(sent.weights)[: self.total], expected)

    def _check_sum(self, what: str, got: Any, slots: NDArray[np.uint16], slot_weights: Floats | None) -> None:
        """A result of BF16 slots, against the FP32 sum over k rounded once to BF16."""
        values = self._from_all(f"{what} slots", bf16_values(slots))
        weights = None if slot_weights is None else self._from_all(f"{what} weights", slot_weights)
        total, magnitude = sum_of_slots(values, weights, self.shared.addresses[self.rank])
        tolerance = 2.0**-8 * np.abs(total) + 2.0**-20 * magnitude
        self.report.checks.close(f"{what} == sum over k", self._bf16(got), total, tolerance)

    def _check_identity(self, handle: Handle) -> None:
        """Experts that return what they get: combine gives each token K times its decoded row."""
        decoded = np.zeros((self.shared.capacity, self.hidden), np.float32)
        self._receive(handle, "dispatch", "decoded", decoded)
        decoded[self.total :] = 0
        got = np.asarray(handle.combine(decoded))
        mine = unpack(self.shared.wire.format, self.shared.token_rows[self.rank], self.hidden, "float32")
        total = self.layer.top_k * mine
        self.report.checks.close(
            "combine of an identity layer == sum over k", got, total, 2.0**-22 * np.abs(total)
        )

    def _check_weighted_gradients(
        self, handle: Handle, expert_out: NDArray[np.uint16], weights: Floats
    ) -> None:
        """Decoded gradients times the slot's weight, and the gradient of that weight, as the library makes
        them."""
        checks, total = self.report.checks, self.total
        back = handle.combine_backward(
            self.layer.grads[self.rank],
            receive="decoded",
            dtype="float32",
            slot_weights=weights,
            expert_out=expert_out,
            **self.backward.options,
        )
        rows = self._expected_rows("combine_backward")
        grad = unpack(self.shared.wire.format, rows, self.hidden, "float32")
        checks.equal("combine_backward weighted", np.asarray(back.data)[:total], weights[:total, None] * grad)
        y = bf16_values(expert_out[:total]).astype(np.float64)
        dots = np.einsum("sh,sh->s", grad, y)
        rounding = 2.0**-22 * np.einsum("sh,sh->s", np.abs(grad), np.abs(y))
        checks.close("combine_backward grad_slot_weights", np.asarray(back.weights)[:total], dots, rounding)

    def _check_weight_gradients(self, got: Any, grad_slot_weights: Floats) -> None:
        per_rank = self._from_all("grad_slot_weights", grad_slot_weights)
        places = self.shared.addresses[self.rank]
        expected = np.zeros(places.rank.shape, np.float32)
        for rank, grads in enumerate(per_rank):
            here = places.rank == rank
            expected[here] = grads[places.slot[here]]
        self.report.checks.equal("dispatch_backward grad_topk_weights", np.asarray(got), expected)
