"""NCCL EP called directly, as the peer to beat in `nvte-ep bench ep`: through ctypes, on the same buffers,
with the setting that suits it best for each operation.

It takes packed rows as rows of BF16, or codes and scales apart; where the library hands out an operand, what
is timed is what one would write around NCCL EP: the codec, its dispatch, direct receive.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from nvte_ep import codecs
from nvte_ep.array import Array
from nvte_ep.commands import _nccl_ep_abi as abi
from nvte_ep.commands._checks import Checks
from nvte_ep.commands._nccl_api import NcclEpApi, new_comm
from nvte_ep.commands.bench_ep_data import OFFSET, SEED, Data, Operation
from nvte_ep.commands.bench_ep_library import Sampling, Side, Work
from nvte_ep.commands.bench_ep_ranks import Ranks
from nvte_ep.commands.bench_machine import Call, CudaMachine
from nvte_ep.errors import TransportError
from nvte_ep.formats import format_info, row_bytes

NAME = "NCCL EP"
LOW_LATENCY_TOKENS = 512  # low-latency mode is tried up to here
# Multiprocessors that high-throughput mode is tried with, 0: its default; the others were never its best on
# an H200. By whether all ways are tried.
ROWS_SMS = {True: (0, 24), False: (0,)}
SUMS_SMS = {True: (0, 132), False: (132,)}
TIMEOUT_NS = 60 * 10**9
SCALED_TYPES = {"mxfp8": ("float8_e4m3fn", "uint8"), "nvfp4": ("float4_e2m1fn_x2", "float8_e4m3fn")}


class _Mode:
    """One group of NCCL EP with a handle: a number of multiprocessors, high-throughput or low-latency."""

    def __init__(self, group: ctypes.c_void_p, handle: ctypes.c_void_p, counts: Array | None) -> None:
        self.group, self.handle, self.counts = group, handle, counts


class Direct(Side):
    """NCCL EP, high-throughput mode with each of some numbers of multiprocessors (none given: what may suit
    it best), and low-latency mode for small batches. Every way costs it some seconds to compile."""

    name = NAME
    machine: CudaMachine

    def __init__(
        self,
        ranks: Ranks,
        machine: CudaMachine,
        data: Data,
        sampling: Sampling,
        sms: Sequence[int],
        *,
        thorough: bool,
    ) -> None:
        super().__init__(ranks, machine, data, sampling)
        self.sms, self.thorough = list(sms), thorough
        self.api = NcclEpApi()
        self.comm = new_comm(self.api, ranks, machine)
        self._modes: dict[int | str, _Mode] = {}
        topk = [data.topk(ranks.rank, routing) for routing in range(data.routings)]
        self.topk = [machine.filled(idx.shape, "int64", idx) for idx in topk]
        weights = data.weights(ranks.rank)
        self.topk_weights = machine.filled(weights.shape, "float32", weights)
        self.local = data.shape.experts // ranks.size

    # ---- groups and handles ------------------------------------------------------------------------------

    def _group(self, algorithm: int, max_num_sms: int) -> ctypes.c_void_p:
        shape = self.data.shape
        config = abi.GroupConfig(
            version=abi.API_VERSION,
            algorithm=algorithm,
            num_experts=shape.experts,
            max_dispatch_tokens_per_rank=shape.tokens,
            max_token_bytes=2 * shape.hidden,
            max_num_sms=max_num_sms,
            timeout_ns=TIMEOUT_NS,
        )
        if algorithm == abi.ALGO_HIGH_THROUGHPUT:
            config.max_recv_tokens_per_rank = max(self.data.capacity, shape.tokens)
            config.num_topk = shape.top_k
        group = ctypes.c_void_p()
        self.machine.use()
        self.api.call("ncclEpCreateGroup", ctypes.byref(group), self.comm, ctypes.byref(config))
        return group

    def mode(self, max_num_sms: int) -> _Mode:
        """High-throughput mode, prepared with routing 0."""
        if max_num_sms not in self._modes:
            group = self._group(abi.ALGO_HIGH_THROUGHPUT, max_num_sms)
            config = abi.HandleConfig(dispatch_output_per_expert_alignment=self.data.shape.alignment)
            handle = ctypes.c_void_p()
            self.api.call(
                "ncclEpInitHandle",
                ctypes.byref(handle),
                group,
                abi.LAYOUT_EXPERT_MAJOR,
                ctypes.byref(config),
                self.data.shape.top_k,
                None,
            )
            counts = self.new((self.local,), "int64")
            self._modes[max_num_sms] = _Mode(group, handle, counts)
            self._update(self._modes[max_num_sms], 0)()
            self.machine.synchronize()
        return self._modes[max_num_sms]

    def low_latency(self) -> _Mode:
        if "low latency" not in self._modes:
            group = self._group(abi.ALGO_LOW_LATENCY, 0)
            handle = ctypes.c_void_p()
            topk = self._tensor(self.topk[0])
            self.api.call(
                "ncclEpCreateHandle",
                ctypes.byref(handle),
                group,
                abi.LAYOUT_EXPERT_MAJOR,
                ctypes.byref(topk),
                None,
                None,
                self.machine.stream,
            )
            self.machine.synchronize()
            self._modes["low latency"] = _Mode(group, handle, self.new((self.local,), "int32"))
        return self._modes["low latency"]

    @staticmethod
    def _tensor(array: Array, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> abi.Tensor:
        return abi.tensor(array.pointer, shape or array.shape, dtype or array.dtype)

    # ---- its calls ---------------------------------------------------------------------------------------

    def _update(self, mode: _Mode, routing: int) -> Call:
        topk = self._tensor(self.topk[routing])
        assert mode.counts is not None
        counts = self._tensor(mode.counts)
        info = abi.LayoutInfo(expert_counters=ctypes.pointer(counts))
        stream = self.machine.stream
        return partial(
            self.api.call,
            "ncclEpUpdateHandle",
            mode.handle,
            ctypes.pointer(topk),
            ctypes.pointer(info),
            stream,
        )

    def _dispatch_call(
        self,
        mode: _Mode,
        tokens: abi.Tensor,
        received: abi.Tensor,
        *,
        scales: tuple[abi.Tensor, abi.Tensor] | None = None,
        recv_weights: Array | None = None,
        backward: bool = False,
    ) -> Call:
        inputs = abi.DispatchInputs(tokens=ctypes.pointer(tokens))
        outputs = abi.DispatchOutputs(tokens=ctypes.pointer(received))
        config = abi.DispatchConfig(pass_direction=abi.BACKWARD if backward else abi.FORWARD)
        if recv_weights is not None:
            inputs.topk_weights = ctypes.pointer(self._tensor(self.topk_weights))
            outputs.topk_weights = ctypes.pointer(self._tensor(recv_weights))
        if scales is not None:
            inputs.scales, outputs.scales = (ctypes.pointer(part) for part in scales)
            config.quant_recipe = abi.QUANT_FORWARDED
        layout = None
        if mode is self._modes.get("low latency"):
            assert mode.counts is not None
            layout = ctypes.pointer(abi.LayoutInfo(expert_counters=ctypes.pointer(self._tensor(mode.counts))))
        return partial(
            self.api.call,
            "ncclEpDispatch",
            mode.handle,
            ctypes.pointer(inputs),
            ctypes.pointer(outputs),
            layout,
            ctypes.pointer(config),
            self.machine.stream,
        )

    def _combine_call(
        self,
        mode: _Mode,
        tokens: abi.Tensor,
        result: abi.Tensor,
        *,
        weights: tuple[abi.Tensor | None, abi.Tensor] | None = None,
        backward: bool = False,
    ) -> Call:
        inputs = abi.CombineInputs(tokens=ctypes.pointer(tokens))
        outputs = abi.CombineOutputs(tokens=ctypes.pointer(result))
        config = abi.CombineConfig(pass_direction=abi.BACKWARD if backward else abi.FORWARD)
        if weights is not None:
            given, made = weights
            if given is not None:
                inputs.topk_weights = ctypes.pointer(given)
            outputs.topk_weights = ctypes.pointer(made)
        return partial(
            self.api.call,
            "ncclEpCombine",
            mode.handle,
            ctypes.pointer(inputs),
            ctypes.pointer(outputs),
            ctypes.pointer(config),
            self.machine.stream,
        )

    # ---- operations --------------------------------------------------------------------------------------

    def work(self, operation: Operation, sets: int) -> Iterator[Work]:
        """Each way that might be its best, one after the other. Not thorough: the forward operations of large
        batches and the steps of small ones; each of the others costs it another compilation."""
        if operation.verb == "step":
            yield from self._step(operation)
            return
        small = self.data.shape.tokens <= LOW_LATENCY_TOKENS
        if not self.thorough and (small or operation.verb.endswith("backward")):
            return
        sums = operation.verb in ("combine", "dispatch_backward")
        for sms in self.sms or (SUMS_SMS if sums else ROWS_SMS)[self.thorough]:
            way = f"{sms} SMs" if sms else "its SMs"
            for made in self._high_throughput(operation, sets, self.mode(sms)):
                made.way = f"{way}{', ' + made.way if made.way else ''}"
                yield made

    def _high_throughput(self, operation: Operation, sets: int, mode: _Mode) -> Iterator[Work]:
        if operation.verb == "prepare":
            order = list(range(self.data.routings))[::-1]
            yield Work([self._update(mode, routing) for routing in order], lambda checks: None)
        elif operation.verb in ("combine", "dispatch_backward"):
            if operation.wire == "bf16":
                yield self._combine(operation, sets, mode)
        elif operation.wire == "bf16":
            yield self._rows(operation, sets, mode)
        elif operation.given == "packed" and operation.receive == "rows":
            yield self._rows(operation, sets, mode)
            if self.thorough and self._scales_fit(operation.wire):
                yield self._apart(operation, sets, mode)
        elif operation.receive == "operand" and operation.given == "tokens":
            yield self._around(operation, sets, mode)

    def _received_weights(self, operation: Operation) -> Array | None:
        return self.new((self.data.capacity,), "float32") if operation.verb == "dispatch" else None

    def _rows(self, operation: Operation, sets: int, mode: _Mode) -> Work:
        """BF16 tokens, or packed rows of another format as rows of BF16."""
        width = row_bytes(operation.wire, self.data.shape.hidden) // 2
        weights = self._received_weights(operation)
        calls: list[Call] = []
        outs = []
        for index in range(sets):
            given = self.given(operation, index)
            out = self.new((self.data.capacity, 2 * width), "uint8")
            calls.append(
                self._dispatch_call(
                    mode,
                    self._tensor(given, "bfloat16", (self.data.shape.tokens, width)),
                    self._tensor(out, "bfloat16", (self.data.capacity, width)),
                    recv_weights=weights,
                    backward=operation.verb == "combine_backward",
                )
            )
            outs.append((given, out))

        def check(checks: Checks) -> None:
            for index in self.checked_sets(sets):
                self.outputs.rows(
                    checks, f"buffers {index}", outs[index][1], index, operation.wire, tail=False
                )
            if weights is not None:
                self.outputs.weights(checks, "all buffers", weights)

        return Work(calls, check, "" if operation.wire == "bf16" else "rows as BF16")

    def _scales_fit(self, wire: str) -> bool:
        """NCCL EP wants rows of scales to be whole multiples of 16 bytes."""
        return self.data.shape.hidden // format_info()[wire].block % 16 == 0

    def _apart(self, operation: Operation, sets: int, mode: _Mode) -> Work:
        """Codes and scales as two arrays; of NVFP4 without a scale per token."""
        hidden, capacity, tokens = self.data.shape.hidden, self.data.capacity, self.data.shape.tokens
        info = format_info()[operation.wire]
        payload, scales = hidden * info.payload_bits // 8, hidden // info.block * info.scale_bytes
        payload_type, scale_type = SCALED_TYPES[operation.wire]
        weights = self._received_weights(operation)
        calls: list[Call] = []
        outs = []
        for index in range(sets):
            rows = self.data.packed(self.ranks.rank, index, operation.wire)
            given = [
                self.machine.filled((tokens, width), "uint8", rows[:, start : start + width])
                for start, width in ((0, payload), (payload, scales))
            ]
            out = [self.new((capacity, width), "uint8") for width in (payload, scales)]
            calls.append(
                self._dispatch_call(
                    mode,
                    self._tensor(given[0], payload_type),
                    self._tensor(out[0], payload_type),
                    scales=(self._tensor(given[1], scale_type), self._tensor(out[1], scale_type)),
                    recv_weights=weights,
                )
            )
            outs.append((given, out))

        def check(checks: Checks) -> None:
            for index in self.checked_sets(sets):
                received = outs[index][1]
                self.outputs.rows_apart(checks, f"buffers {index}", received, index, operation.wire)

        return Work(calls, check, "codes and scales apart", weights)

    def _around(self, operation: Operation, sets: int, mode: _Mode) -> Work:
        """Pack, dispatch, direct receive: three calls, an operand in the end."""
        wire, hidden = operation.wire, self.data.shape.hidden
        width = row_bytes(wire, hidden)
        pack: Callable[..., Any] = getattr(codecs, f"{wire}_pack")
        receive: Callable[..., Any] = getattr(codecs, f"{wire}_direct_receive")
        options: dict[str, Any] = {"stream": self.machine.stream}
        packing, receiving = dict(options), dict(options)
        if operation.stochastic:
            state = self.machine.filled((2,), "int64", np.array([SEED, OFFSET], np.int64))
            stochastic = {"rounding": "stochastic", "rng_state": state}
            packing |= stochastic | {"row_id_base": self.ranks.rank * self.data.shape.tokens}
            receiving |= stochastic | {"rank": self.ranks.rank}
        weights = self._received_weights(operation)
        calls: list[Call] = []
        outs = []
        for index in range(sets):
            tokens = self.given(operation, index)
            rows = self.new((self.data.shape.tokens, width), "uint8")
            slots = self.new((self.data.capacity, width), "uint8")
            operand = self.operand(wire, operation.columnwise)
            dispatch = self._dispatch_call(
                mode,
                self._tensor(rows, "bfloat16", (self.data.shape.tokens, width // 2)),
                self._tensor(slots, "bfloat16", (self.data.capacity, width // 2)),
                recv_weights=weights,
                backward=operation.verb == "combine_backward",
            )
            steps: list[Call] = [
                partial(pack, tokens, out=rows, **packing),
                dispatch,
                partial(receive, slots, hidden, mode.counts, out=operand, **receiving),
            ]
            calls.append(partial(_in_turn, steps))
            outs.append(operand)

        def check(checks: Checks) -> None:
            for index in self.checked_sets(sets):
                self.outputs.operand(checks, f"buffers {index}", outs[index], index, operation.stochastic)

        return Work(calls, check, "pack + NCCL EP + direct receive", weights)

    def _combine(self, operation: Operation, sets: int, mode: _Mode) -> Work:
        shape = self.data.shape
        backward = operation.verb == "dispatch_backward"
        inputs = [self.slots_in(index) for index in range(sets)]
        results = [self.new((shape.tokens, shape.hidden), "bfloat16") for _ in range(sets)]
        weights: Any = None
        keep: list[Any] = [inputs]
        if backward:
            values = self.data.slot_grads(self.ranks.rank)
            slot_grads = self.machine.filled(values.shape, "float32", values)
            grads = self.new((shape.tokens, shape.top_k), "float32")
            weights = (self._tensor(slot_grads), self._tensor(grads))
            keep += [slot_grads, grads]
        calls = [
            self._combine_call(
                mode, self._tensor(source), self._tensor(result), weights=weights, backward=backward
            )
            for source, result in zip(inputs, results, strict=True)
        ]

        def check(checks: Checks) -> None:
            for index in self.checked_sets(sets):
                self.outputs.sums(checks, f"buffers {index}", results[index], index, "bf16")

        return Work(calls, check, keep=keep)

    # ---- whole steps -------------------------------------------------------------------------------------

    def _step(self, operation: Operation) -> Iterator[Work]:
        low_latency = self.data.shape.tokens <= LOW_LATENCY_TOKENS
        for sms in self.sms or (ROWS_SMS[True] if self.thorough else (() if low_latency else (0,))):
            mode = self.mode(sms)
            sending = Operation("dispatch", operation.wire, given=operation.given)
            if operation.wire == "bf16":
                dispatch = self._rows(sending, 1, mode)
            else:
                dispatch = self._around(Operation("dispatch", operation.wire, receive="operand"), 1, mode)
            steps = [self._update(mode, 0), dispatch.calls[0]]
            keep = [dispatch]
            if operation.combine:
                combined = self._combine(Operation("combine"), 1, mode)
                steps.append(combined.calls[0])
                keep.append(combined)
            way = f"high throughput, {sms} SMs" if sms else "high throughput"
            yield Work([partial(_in_turn, steps)], dispatch.check, way, keep)
        if low_latency:
            yield self._low_latency_step(operation)

    def _low_latency_step(self, operation: Operation) -> Work:
        """Dispatch of rows that are packed already (and combine): its routing and the packing excluded."""
        shape = self.data.shape
        mode = self.low_latency()
        slots = self.ranks.size * shape.tokens
        info = format_info()[operation.wire]
        payload = shape.hidden * info.payload_bits // 8
        rows = self.data.packed(self.ranks.rank, 0, operation.wire)
        given = self.machine.filled((shape.tokens, payload), "uint8", rows[:, :payload])
        out = self.new((self.local, slots, payload), "uint8")
        keep: list[Any] = [given, out]
        scales = None
        if operation.wire == "bf16":
            tokens = self._tensor(given, "bfloat16", (shape.tokens, shape.hidden))
            received = self._tensor(out, "bfloat16", (self.local, slots, shape.hidden))
        else:
            width = shape.hidden // info.block * info.scale_bytes
            given_scales = self.machine.filled(
                (shape.tokens, width), "uint8", rows[:, payload : payload + width]
            )
            out_scales = self.new((self.local, slots, width), "uint8")
            keep += [given_scales, out_scales]
            tokens = self._tensor(given, SCALED_TYPES[operation.wire][0])
            received = self._tensor(out, SCALED_TYPES[operation.wire][0])
            scales = (self._tensor(given_scales, "uint8"), self._tensor(out_scales, "uint8"))
        steps = [self._dispatch_call(mode, tokens, received, scales=scales)]
        if operation.combine:
            expert_out = self.new((self.local, slots, shape.hidden), "bfloat16")
            result = self.new((shape.tokens, shape.hidden), "bfloat16")
            keep += [expert_out, result]
            weights = (None, self._tensor(self.topk_weights))
            steps.append(
                self._combine_call(mode, self._tensor(expert_out), self._tensor(result), weights=weights)
            )
        way = "low latency, packing and its routing excluded"
        return Work([partial(_in_turn, steps)], lambda checks: None, way, keep)

    def close(self) -> None:
        self.machine.synchronize()
        for mode in self._modes.values():
            with contextlib.suppress(TransportError):
                self.api.call("ncclEpHandleDestroy", mode.handle)
                self.api.call("ncclEpGroupDestroy", mode.group)
        self._modes.clear()
        self.api.call("ncclCommDestroy", self.comm)


def _in_turn(steps: Sequence[Call]) -> None:
    for step in steps:
        step()
