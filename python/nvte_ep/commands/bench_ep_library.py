"""A transport of the library under `nvte-ep bench ep`: the operations as calls, and the check of what they
wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvte_ep.array import Array
from nvte_ep.commands._checks import Checks, unpack
from nvte_ep.commands._numerics import Error, Floats, bf16_values
from nvte_ep.commands.bench_cases import ReceiveCase, host_bytes, sample
from nvte_ep.commands.bench_ep_data import OFFSET, SEED, Data, Operation, receive_on_host
from nvte_ep.commands.bench_ep_ranks import Ranks
from nvte_ep.commands.bench_machine import POISON, Call, Machine
from nvte_ep.formats import row_bytes
from nvte_ep.group import Group
from nvte_ep.handle import Handle, Routing
from nvte_ep.operand import Operand

TIMEOUT_NS = 60 * 10**9
# Three roundings of at most half a last place of BF16, relative to the sum of the magnitudes: see
# nvte_ep_handle_combine.
SUM_TOLERANCE = 3.1 * 2.0**-8
MXFP8_NOISE = 0.06  # relative error of a sum whose partial rows were rounded to MXFP8


@dataclass
class Sampling:
    """How much of what was written is compared."""

    slabs: int = 4  # of a receive buffer; 0: all
    tokens: int = 16
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def of_slabs(self, count: int) -> list[int]:
        return list(range(count)) if self.slabs == 0 else sample(count, min(self.slabs, count), self.rng)

    def of_tokens(self, count: int) -> NDArray[np.int64]:
        return np.array(sample(count, min(self.tokens, count), self.rng))


@dataclass
class Work:
    """One operation, ready to run: a call for each set of buffers."""

    calls: list[Call]
    check: Callable[[Checks], None]
    way: str = ""  # the setting, where there are several
    keep: Any = None  # memory that the calls use and nothing else holds


class Outputs:
    """What was received, for the checks that every side shares."""

    def __init__(self, machine: Machine, data: Data, rank: int, sampling: Sampling) -> None:
        self.machine, self.data, self.rank, self.sampling = machine, data, rank, sampling
        self.routed = data.routed(rank)

    def _all_slabs(self) -> list[tuple[int, slice]]:
        """Experts that have slots, and which."""
        found, start = [], 0
        for expert, rows in enumerate(self.routed.rows_per_expert):
            if rows:
                found.append((expert, slice(start, start + rows)))
            start += rows
        return found

    def _slabs(self) -> list[tuple[int, slice]]:
        found = self._all_slabs()
        return [found[i] for i in self.sampling.of_slabs(len(found))] if found else []

    def _untouched(self, checks: Checks, what: str, slots: Array) -> None:
        """The one unit that the capacity has too much."""
        rest = self.machine.read(slots[self.routed.slots :])
        checks.equal(f"{what}, past the slots in use", rest, np.full_like(rest, POISON))

    def rows(
        self, checks: Checks, what: str, slots: Array, index: int, wire: str, *, tail: bool = True
    ) -> None:
        for expert, part in self._slabs():
            wanted = self.data.rows_at_slots(self.rank, index, wire, part)
            got = self.machine.read(slots[part]).reshape(wanted.shape)
            checks.equal(f"{what}, expert {expert}", got, wanted)
        if tail:
            self._untouched(checks, what, slots)

    def rows_apart(self, checks: Checks, what: str, parts: list[Array], index: int, wire: str) -> None:
        """Codes and scales, each in an array."""
        for expert, part in self._slabs():
            rows = self.data.rows_at_slots(self.rank, index, wire, part)
            start = 0
            for name, array in zip(("codes", "scales"), parts, strict=True):
                wanted = np.ascontiguousarray(rows[:, start : start + array.shape[1]])
                got = self.machine.read(array[part]).reshape(wanted.shape)
                checks.equal(f"{what}, expert {expert}, {name}", got, wanted)
                start += array.shape[1]

    def decoded(self, checks: Checks, what: str, slots: Array, index: int, wire: str) -> None:
        hidden = self.data.shape.hidden
        for expert, part in self._slabs():
            rows = self.data.rows_at_slots(self.rank, index, wire, part)
            wanted = unpack(wire, rows, hidden, "bfloat16")
            got = self.machine.read(slots[part]).view(np.uint16).reshape(wanted.shape)
            checks.equal(f"{what}, expert {expert}", got, wanted)
        self._untouched(checks, what, slots)

    def weights(self, checks: Checks, what: str, weights: Array) -> None:
        got = self.machine.read(weights[: self.routed.slots]).view(np.float32)
        checks.equal(f"{what}, weights", got, self.data.weights_at_slots(self.rank))

    def operand(
        self, checks: Checks, what: str, operand: Operand, index: int, stochastic: bool = False
    ) -> None:
        """Slab by slab. What is rounded to nearest depends on the rows of its expert alone; what a stochastic
        block draws depends on its place among all slots, so there the first experts are checked."""
        case = ReceiveCase(operand.format, operand.columnwise)
        slabs = case.slabs(self.routed.rows_per_expert, operand.hidden)
        first = self.sampling.slabs or len(slabs)
        some = self._slabs()
        if stochastic:
            some = [(expert, part) for expert, part in self._all_slabs() if expert < first]
        for expert, part in some:
            if stochastic:
                wanted = self.data.stochastic_operand(
                    self.rank, index, operand.format, operand.columnwise, first
                )
                shift = slabs[expert].ranges
            else:
                rows = self.data.rows_at_slots(self.rank, index, operand.format, part)
                wanted = receive_on_host(
                    rows,
                    operand.hidden,
                    [len(rows)],
                    operand.format,
                    operand.columnwise,
                    operand.alignment,
                )
                shift = {}
            for name, (start, nbytes) in slabs[expert].ranges.items():
                offset = operand.layout.parts[name].offset + start
                got = self.machine.read(operand.bytes[offset : offset + nbytes])
                offset = wanted.layout.parts[name].offset + shift.get(name, (0, 0))[0]
                expected = host_bytes(wanted.bytes[offset : offset + nbytes]).reshape(-1)
                checks.equal(f"{what}, expert {expert}, {name}", got, expected)

    def sums(self, checks: Checks, what: str, result: Array, index: int, wire: str) -> None:
        tokens = self.sampling.of_tokens(self.data.shape.tokens)
        wanted, magnitude = self.data.sums(self.rank, index, tokens)
        got = np.stack(
            [bf16_values(self.machine.read(result[int(token)]).view(np.uint16)) for token in tokens]
        )
        if wire == "bf16":
            checks.close(what, got, wanted, SUM_TOLERANCE * magnitude)
            return
        error = Error.between(wanted, got)
        noise = (error.noise / max(error.signal, 1e-30)) ** 0.5
        checks.true(what, noise < MXFP8_NOISE, f"relative error {noise:.3f}, expected below {MXFP8_NOISE}")

    def weight_grads(self, checks: Checks, what: str, grads: Array) -> None:
        topk = self.data.topk(self.rank)
        for token in self.sampling.of_tokens(self.data.shape.tokens):
            by_expert = [
                self.data.slot_grads(expert_rank)[slot]
                for expert_rank, slot in self.data.slots_of(self.rank, int(token))
            ]
            wanted: Floats = np.zeros(topk.shape[1], np.float32)
            wanted[np.argsort(topk[token])] = by_expert
            got = self.machine.read(grads[int(token)]).view(np.float32)
            checks.equal(f"{what}, token {token}, weights", got, wanted)


class Side:
    """One way to exchange: what the report has a column for."""

    name: str

    def __init__(self, ranks: Ranks, machine: Machine, data: Data, sampling: Sampling) -> None:
        self.ranks, self.machine, self.data = ranks, machine, data
        self.outputs = Outputs(machine, data, ranks.rank, sampling)
        self.sampling = sampling

    def new(self, shape: tuple[int, ...], dtype: str) -> Array:
        return self.machine.poisoned(shape, dtype)

    def operand(self, wire: str, columnwise: bool) -> Operand:
        shape = self.data.shape
        operand = Operand(
            wire,
            shape.hidden,
            self.data.capacity,
            shape.experts // self.ranks.size,
            alignment=shape.alignment,
            columnwise=columnwise,
            device=self.machine.device,
        )
        self.machine.poison(operand.bytes)
        return operand

    def given(self, operation: Operation, index: int) -> Array:
        """This rank's tokens, packed or not."""
        shape, rank = self.data.shape, self.ranks.rank
        if operation.given == "packed":
            rows = self.data.packed(rank, index, operation.wire)
            return self.machine.filled(rows.shape, "uint8", rows)
        tokens = self.data.tokens(rank, index)
        return self.machine.filled((shape.tokens, shape.hidden), "bfloat16", tokens)

    def slots_in(self, index: int) -> Array:
        """The input of combine: BF16 at every slot."""
        shape = (self.data.capacity, self.data.shape.hidden)
        return self.machine.filled(shape, "bfloat16", self.data.slot_block(self.ranks.rank, index))

    def work(self, operation: Operation, sets: int) -> Iterator[Work]:
        """The operation in each way that might be the best here."""
        raise NotImplementedError

    def checked_sets(self, sets: int) -> list[int]:
        return sorted({0, sets - 1})

    def close(self) -> None: ...


class Library(Side):
    """A transport of the library."""

    def __init__(
        self,
        name: str,
        ranks: Ranks,
        machine: Machine,
        data: Data,
        sampling: Sampling,
        num_sms: int = 0,
    ) -> None:
        super().__init__(ranks, machine, data, sampling)
        self.name = name
        alone = ranks.size == 1 and name in ("peer", "threads")
        kind = "threads" if ranks.threads or alone else "nccl"
        shape = data.shape
        self.comm = ranks.communicator(kind, machine.device[1])
        self._handles: dict[tuple[str, str], Handle] = {}
        self.settings: dict[str, Any] = {
            "num_experts": shape.experts,
            "hidden": shape.hidden,
            "max_tokens_per_rank": shape.tokens,
            "max_top_k": shape.top_k,
            "recv_capacity": data.capacity,
            "device": machine.device,
            "transport": name,
            "num_sms": num_sms,
            "timeout_ns": TIMEOUT_NS,
        }
        self.group = Group(self.comm, **self.settings)
        self.stream: dict[str, Any] = {} if machine.stream is None else {"stream": machine.stream}
        topk = [data.topk(ranks.rank, routing) for routing in range(data.routings)]
        self.topk = [machine.filled(idx.shape, "int64", idx) for idx in topk]
        weights = data.weights(ranks.rank)
        self.topk_weights = machine.filled(weights.shape, "float32", weights)

    def memory(self) -> dict[str, int]:
        found = Group.memory(self.comm, **self.settings)
        return {
            "group_bytes": found.group_bytes,
            "handle_bytes": found.handle_bytes,
            "exchange_bytes": found.exchange_bytes,
        }

    def handle(self, wire: str, sums: str = "bf16") -> Handle:
        """A handle with these formats whose routing is routing 0."""
        key = (wire, sums)
        if key not in self._handles:
            self._handles[key] = self.group.handle(
                top_k=self.data.shape.top_k,
                alignment=self.data.shape.alignment,
                dispatch=wire,
                combine=sums,
                dispatch_backward=sums,
                combine_backward=wire,
            )
            self._handles[key].prepare(self.topk[0], out=self._new_routing(), **self.stream)
        return self._handles[key]

    def _new_routing(self) -> Routing:
        experts = self.data.shape.experts // self.ranks.size
        return Routing(
            rows_per_expert=self.new((experts,), "int32"),
            row_offsets=self.new((experts + 1,), "int32"),
            total_rows=self.new((1,), "int32"),
            slot_source=self.new((self.data.capacity,), "int64"),
        )

    def work(self, operation: Operation, sets: int) -> Iterator[Work]:
        make = {
            "prepare": self._prepare,
            "dispatch": self._dispatch,
            "combine_backward": self._dispatch,
            "combine": self._combine,
            "dispatch_backward": self._combine,
            "step": self._step,
        }[operation.verb]
        yield make(operation, sets)

    # ---- prepare -----------------------------------------------------------------------------------------

    def _prepare(self, operation: Operation, sets: int) -> Work:
        handle = self.group.handle(
            top_k=self.data.shape.top_k, alignment=self.data.shape.alignment, dispatch="nvfp4"
        )
        # Routing changes from call to call, and the last one is routing 0.
        order = list(range(self.data.routings))[::-1]
        routings = [self._new_routing() for _ in order]
        calls: list[Call] = [
            partial(handle.prepare, self.topk[routing], out=out, **self.stream)
            for routing, out in zip(order, routings, strict=True)
        ]

        def check(checks: Checks) -> None:
            for routing, out in zip(order, routings, strict=True):
                self._check_routing(checks, f"routing {routing}", out, routing)

        return Work(calls, check)

    def _check_routing(self, checks: Checks, what: str, out: Routing, routing: int = 0) -> None:
        wanted = self.data.routed(self.ranks.rank, routing)
        counts = self.machine.read(out.rows_per_expert).view(np.int32)
        checks.equal(f"{what}, rows_per_expert", counts, np.array(wanted.rows_per_expert, np.int32))
        got = self.machine.read(out.slot_source[: wanted.slots]).view(np.int64)
        checks.equal(f"{what}, slot_source", got, wanted.slot_source)

    # ---- dispatch, combine_backward ----------------------------------------------------------------------

    def _out(self, operation: Operation) -> tuple[dict[str, Any], Any]:
        """Where it goes: arguments of the call, and the array or operand."""
        data = self.data
        if operation.receive == "operand":
            out: Any = self.operand(operation.wire, operation.columnwise)
            return {"receive": "operand", "out": out}, out
        if operation.receive == "rows":
            out = self.new((data.capacity, row_bytes(operation.wire, data.shape.hidden)), "uint8")
            return {"receive": "rows", "out": out}, out
        out = self.new((data.capacity, data.shape.hidden), "bfloat16")
        return {"receive": "decoded", "out": out}, out

    def check_received(self, checks: Checks, operation: Operation, index: int, out: Any) -> None:
        what = f"buffers {index}"
        if operation.receive == "operand":
            self.outputs.operand(checks, what, out, index, operation.stochastic)
        elif operation.receive == "rows":
            self.outputs.rows(checks, what, out, index, operation.wire)
        else:
            self.outputs.decoded(checks, what, out, index, operation.wire)

    def _dispatch(self, operation: Operation, sets: int) -> Work:
        handle = self.handle(operation.wire)
        forward = operation.verb == "dispatch"
        options: dict[str, Any] = dict(self.stream)
        weights = None
        if forward:
            weights = self.new((self.data.capacity,), "float32")
            options |= {"topk_weights": self.topk_weights, "recv_weights": weights}
        if operation.stochastic:
            state = self.machine.filled((2,), "int64", np.array([SEED, OFFSET], np.int64))
            options |= {"rounding": "stochastic", "rng_state": state}
        send = handle.dispatch if forward else handle.combine_backward
        calls: list[Call] = []
        outs = []
        for index in range(sets):
            where, out = self._out(operation)
            calls.append(partial(send, self.given(operation, index), **where, **options))
            outs.append(out)

        def check(checks: Checks) -> None:
            for index in self.checked_sets(sets):
                self.check_received(checks, operation, index, outs[index])
            if weights is not None:
                self.outputs.weights(checks, "all buffers", weights)

        return Work(calls, check)

    # ---- combine, dispatch_backward ----------------------------------------------------------------------

    def _combine(self, operation: Operation, sets: int) -> Work:
        handle = self.handle("bf16", operation.wire)
        shape = self.data.shape
        backward = operation.verb == "dispatch_backward"
        inputs = [self.slots_in(index) for index in range(sets)]
        results = [self.new((shape.tokens, shape.hidden), "bfloat16") for _ in range(sets)]
        calls: list[Call] = []
        grads = None
        if backward:
            values = self.data.slot_grads(self.ranks.rank)
            slot_grads = self.machine.filled(values.shape, "float32", values)
            grads = self.new((shape.tokens, shape.top_k), "float32")
        for source, out in zip(inputs, results, strict=True):
            if backward:
                calls.append(
                    partial(
                        handle.dispatch_backward,
                        source,
                        slot_grads,
                        out=out,
                        grad_topk_weights=grads,
                        **self.stream,
                    )
                )
            else:
                calls.append(partial(handle.combine, source, out=out, **self.stream))

        def check(checks: Checks) -> None:
            for index in self.checked_sets(sets):
                self.outputs.sums(checks, f"buffers {index}", results[index], index, operation.wire)
            if grads is not None:
                self.outputs.weight_grads(checks, "all buffers", grads)

        return Work(calls, check)

    # ---- whole steps ------------------------------------------------------------------------------------

    def _step(self, operation: Operation, sets: int) -> Work:
        """prepare and dispatch, and combine where asked for: what a step of inference exchanges."""
        handle, shape = self.handle(operation.wire), self.data.shape
        routing = Routing(rows_per_expert=self._new_routing().rows_per_expert)
        where, out = self._out(operation)
        weights = self.new((self.data.capacity,), "float32")
        tokens, expert_out = self.given(operation, 0), self.slots_in(0)
        result = self.new((shape.tokens, shape.hidden), "bfloat16")

        def step() -> None:
            handle.prepare(self.topk[0], out=routing, **self.stream)
            handle.dispatch(tokens, self.topk_weights, recv_weights=weights, **where, **self.stream)
            if operation.combine:
                handle.combine(expert_out, out=result, **self.stream)

        def check(checks: Checks) -> None:
            self.check_received(checks, operation, 0, out)
            self.outputs.weights(checks, "step", weights)
            if operation.combine:
                self.outputs.sums(checks, "combine", result, 0, "bf16")

        return Work([step], check)

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close()
        self.group.close()
        self.comm.close()
