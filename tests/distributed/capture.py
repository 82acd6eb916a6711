# SPDX-License-Identifier: Apache-2.0
"""Bodies of ranks for test_capture.py: all calls of a step captured once in a CUDA graph, and replayed while
the memory that it reads changes: routing, tokens, gradients and the random state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import nvte_ep
from numpy.typing import NDArray
from nvte_ep import Array, Group, Handle, Operand, Routing, _cuda

from distributed.cases import DTYPES, Case
from distributed.launcher import Rank
from distributed.mirror import Window, wait_for
from distributed.steps import RNG_STATE, findings, has_columnwise, open_handle, row_bytes
from distributed.transports import TIMEOUT_NS, Transport

HostArray = NDArray[Any]

# What a round gave, by name, and what poll_error told after it.
Round = tuple[dict[str, bytes], list[tuple[str, int, int]]]
SUMS = ("result", "grad_tokens")


# ---- the arrays of a step, on either side ------------------------------------------------------------------


def inputs(case: Case, me: int, rounds: list[int]) -> list[dict[str, HostArray]]:
    """For each round, of which the first `used` tokens are routed: a capture fixes the number of tokens."""
    made = []
    for index, used in enumerate(rounds):
        random = case.random(me, f"round {index}")
        tokens, slots = case.tokens_of[me], case.slots_of(me)

        def values(*shape: int, random: np.random.Generator = random) -> HostArray:
            return random.standard_normal(shape).astype(np.float32)

        topk = np.full((tokens, case.top_k), -1, np.int64)
        topk[:used] = random.permuted(np.tile(np.arange(case.experts), (used, 1)), axis=1)[:, : case.top_k]
        made.append(
            {
                "topk": topk,
                "tokens": values(tokens, case.hidden).astype(DTYPES["bfloat16"]),
                "weights": values(tokens, case.top_k),
                "expert_out": values(slots, case.hidden).astype(DTYPES["bfloat16"]),
                "slot_weights": values(slots),
                "grad": values(tokens, case.hidden).astype(DTYPES["bfloat16"]),
                "grad_received": values(slots, case.hidden).astype(DTYPES["bfloat16"]),
                "grad_recv_weights": values(slots),
            }
        )
    return made


def outputs(case: Case, me: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of what a step writes."""
    experts, tokens, slots = case.experts_per_rank, case.tokens_of[me], case.slots_of(me)
    sizes: dict[str, tuple[int, str]] = dict.fromkeys(
        ("tokens_routed", "tokens_per_expert", "rows_per_expert"), (experts, "int64")
    )
    sizes |= dict.fromkeys(("row_offsets", "scale_row_offsets"), (experts + 1, "int64"))
    sizes |= dict.fromkeys(("total_rows", "dropped_rows"), (1, "int64"))
    sizes |= {"slot_source": (slots, "int64"), "slot_expert": (slots, "int32")}
    return {name: ((size,), dtype) for name, (size, dtype) in sizes.items()} | {
        "decoded": ((slots, case.hidden), "bfloat16"),
        "recv_weights": ((slots,), "float32"),
        "operand": ((operand_of(case, case.dispatch, slots).total_bytes,), "uint8"),
        "result": ((tokens, case.hidden), "bfloat16"),
        "grad_rows": ((slots, row_bytes(case.combine_backward, case.hidden)), "uint8"),
        "grad_operand": ((operand_of(case, case.combine_backward, slots).total_bytes,), "uint8"),
        "grad_tokens": ((tokens, case.hidden), "bfloat16"),
        "grad_topk_weights": ((tokens, case.top_k), "float32"),
    }


def operand_of(case: Case, format: str, slots: int) -> nvte_ep.OperandLayout:
    return nvte_ep.operand_layout(
        format,
        case.hidden,
        slots,
        case.experts_per_rank,
        alignment=case.alignment,
        columnwise=has_columnwise(format, case.alignment),
    )


def call_all(handle: Handle, a: dict[str, Any], stream: Any) -> None:
    """A step, forward and backward, on arrays that are there; stochastic rounding where gradients travel."""

    def operand(name: str, direction: str) -> Operand:
        format = handle.formats[direction]
        return Operand(
            format,
            handle.group.hidden,
            handle.slots,
            handle.group.info.num_local_experts,
            alignment=handle.alignment,
            columnwise=has_columnwise(format, handle.alignment),
            buffer=a[name],
        )

    routing = {name: a[name] for name in vars(Routing()) if name != "total"}
    handle.prepare(a["topk"], out=Routing(**routing), stream=stream)
    handle.dispatch(
        a["tokens"],
        a["weights"],
        receive="decoded",
        out=a["decoded"],
        recv_weights=a["recv_weights"],
        stream=stream,
    )
    handle.dispatch(a["tokens"], receive="operand", out=operand("operand", "dispatch"), stream=stream)
    handle.combine(a["expert_out"], slot_weights=a["slot_weights"], out=a["result"], stream=stream)
    stochastic = {"rounding": "stochastic", "rng_state": a["rng_state"], "stream": stream}
    handle.combine_backward(a["grad"], receive="rows", out=a["grad_rows"], **stochastic)
    handle.combine_backward(
        a["grad"], receive="operand", out=operand("grad_operand", "combine_backward"), **stochastic
    )
    handle.dispatch_backward(
        a["grad_received"],
        a["grad_recv_weights"],
        out=a["grad_tokens"],
        grad_topk_weights=a["grad_topk_weights"],
        stream=stream,
    )


def random_states(rounds: list[int]) -> HostArray:
    return np.stack([RNG_STATE + np.array([0, index]) for index in range(len(rounds) + 2)])


# ---- on the host: what is expected -------------------------------------------------------------------------


def on_host(rank: Rank, transport: Transport, case: Case, rounds: list[int]) -> list[Round]:
    me = rank.index
    arrays: dict[str, Any] = {
        name: np.frombuffer(bytearray(b"\xa5" * _size(shape, dtype)), DTYPES.get(dtype, dtype)).reshape(shape)
        for name, (shape, dtype) in outputs(case, me).items()
    }
    for name in ("operand", "grad_operand"):  # parts of it must lie at multiples of 256
        arrays[name] = Array.empty(arrays[name].shape)
        np.asarray(arrays[name])[:] = 0xA5
    states = random_states(rounds)
    got = []
    with transport.join(rank, **settings(case)) as group, open_handle(group, case) as handle:
        for index, given in enumerate(inputs(case, me, rounds)):
            call_all(handle, arrays | given | {"rng_state": states[index]}, None)
            told = {name: np.asarray(arrays[name]).tobytes() for name in outputs(case, me)}
            got.append((told, findings(group)))
    return got


def settings(case: Case) -> dict[str, Any]:
    return {
        "num_experts": case.experts,
        "hidden": case.hidden,
        "max_tokens_per_rank": case.max_tokens,
        "max_top_k": case.top_k,
        "recv_capacity": case.recv_capacity,
        "overflow": case.overflow,
    }


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape)) * np.dtype(DTYPES.get(dtype, dtype)).itemsize


# ---- on the device -----------------------------------------------------------------------------------------


class DeviceArrays:
    """All arrays of a step in device memory, with copies on the host, and the stream they are used on."""

    def __init__(self, case: Case, me: int, window: Window, rounds: list[int]) -> None:
        self._cuda = _cuda.runtime()
        self._window = window
        self.stream = window.stream
        self._places: dict[str, tuple[int, int]] = {}
        self.arrays: dict[str, Any] = {}
        shapes = dict(outputs(case, me))
        given = inputs(case, me, rounds)[0]
        shapes |= {name: (array.shape, array.dtype.name) for name, array in given.items()}
        states = random_states(rounds)
        shapes |= {"rng_states": (states.shape, "int64"), "rng_next": (states[1:].shape, "int64")}
        end = 0
        for name, (shape, dtype) in shapes.items():
            self._places[name] = end, _size(shape, dtype)
            end += -(-_size(shape, dtype) // 256) * 256
        window.prepare(end)
        self._end = end
        for name, (shape, dtype) in shapes.items():
            begin, nbytes = self._places[name]
            memory = Array.borrow(window.address + begin, nbytes, window.device, self, window.stream)
            self.arrays[name] = memory.view(dtype).reshape(*shape)
        self.arrays["rng_state"] = self.arrays["rng_states"].reshape(states.size)[:2]
        window.bytes[:end] = 0xA5
        self.set("rng_states", states)

    def set(self, name: str, value: HostArray) -> None:
        begin, nbytes = self._places[name]
        self._window.bytes[begin : begin + nbytes] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)

    def get(self, name: str) -> bytes:
        begin, nbytes = self._places[name]
        return self._window.bytes[begin : begin + nbytes].tobytes()

    def next_random_state(self) -> None:
        """Enqueues that the second state becomes the first, and so on: as a kernel of the caller's would."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        states, after = self.arrays["rng_states"], self.arrays["rng_next"]
        for target, source in ((after.pointer, states[1:].pointer), (states.pointer, after.pointer)):
            _check(self._cuda.cudaMemcpyAsync(target, source, after.nbytes, kind, self.stream))

    def round(
        self, group: Group, given: dict[str, HostArray], run: Callable[[], None], names: list[str]
    ) -> Round:
        for name, value in given.items():
            self.set(name, value)
        # Not what lies on the device alone: the random states.
        for name in given:
            begin, nbytes = self._places[name]
            memory = self._window.memory
            source = self._window.bytes.ctypes.data + begin
            memory.upload(self._window.address + begin, source, nbytes, self.stream)
        run()
        wait_for(self._window, group, TIMEOUT_NS)
        self._window.download(self._end)
        wait_for(self._window, group, TIMEOUT_NS)
        return {name: self.get(name) for name in names}, findings(group)

    def reset(self, rounds: list[int]) -> None:
        """Outputs that nobody has written, and the first random state."""
        self._window.bytes[: self._end] = 0xA5
        self.set("rng_states", random_states(rounds))
        self._window.upload(self._end)


def on_device(
    rank: Rank, transport: Transport, case: Case, rounds: list[int]
) -> tuple[list[Round], list[Round]]:
    """The rounds by calls, and by replays of one graph."""
    me = rank.index
    cudart = _cuda.runtime()
    window = Window.take(transport.device_of(rank))
    names = list(outputs(case, me))
    given = inputs(case, me, rounds)
    with transport.join_plainly(rank, **settings(case)) as group, open_handle(group, case) as handle:
        step = DeviceArrays(case, me, window, rounds)

        def calls() -> None:
            call_all(handle, step.arrays, step.stream)
            step.next_random_state()

        step.reset(rounds)
        called = [step.round(group, values, calls, names) for values in given]

        rank.barrier()
        # Of this thread only: ranks that are threads capture at the same time.
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        _check(cudart.cudaStreamBeginCapture(step.stream, mode))
        try:
            calls()
        finally:
            graph = _check(cudart.cudaStreamEndCapture(step.stream))
        executable = _check(cudart.cudaGraphInstantiate(graph, 0))
        _check(cudart.cudaGraphDestroy(graph))
        rank.barrier()

        def replay() -> None:
            _check(cudart.cudaGraphLaunch(executable, step.stream))

        step.reset(rounds)
        replayed = [step.round(group, values, replay, names) for values in given]
        rank.barrier()
        _check(cudart.cudaGraphExecDestroy(executable))  # before its group: it may hold NCCL's work
    window.give_back()
    return called, replayed


def _check(answer: tuple[Any, ...]) -> Any:
    code, *results = answer
    assert int(code) == 0, code
    return results[0] if results else None
