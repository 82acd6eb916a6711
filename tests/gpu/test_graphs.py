# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: codecs are captured once and replayed with new contents, by PyTorch and by cuda-python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import nvte_ep
import pytest
from codec_calls import ALIGNMENT, COUNTS, HIDDEN, TOKENS, same_bytes, tokens
from device_arrays import NewStream, RawMemory, check, typed
from nvte_ep import Array, Operand, codecs

SEED, OFFSET = 42, 1000
STEP = 3  # what every replay adds to the offset


class Chain:
    """pack, unpack and direct_receive with its columnwise operand, in both formats, nvfp4 with stochastic
    rounding."""

    def __init__(self, make: Callable[[Any, str], Any], x: Any, rng_state: Any, counts: Any) -> None:
        self.x, self.rng_state, self.counts = x, rng_state, counts
        self.rows = {
            format: make((TOKENS, nvte_ep.row_bytes(format, HIDDEN)), "uint8")
            for format in ("nvfp4", "mxfp8")
        }
        self.decoded = {format: make((TOKENS, HIDDEN), "bfloat16") for format in self.rows}
        self.operands = {}
        for format in self.rows:
            settings = {"alignment": ALIGNMENT, "columnwise": True}
            layout = nvte_ep.operand_layout(format, HIDDEN, TOKENS, len(COUNTS), **settings)  # type: ignore[arg-type]
            self.operands[format] = Operand(
                format,
                HIDDEN,
                TOKENS,
                len(COUNTS),
                buffer=make((layout.total_bytes,), "uint8"),
                **settings,  # type: ignore[arg-type]
            )

    def run(self, stream: Any = None) -> None:
        for format, rows in self.rows.items():
            options: dict[str, Any] = {}
            if format == "nvfp4":
                options = {"rounding": "stochastic", "rng_state": self.rng_state}
            getattr(codecs, f"{format}_pack")(self.x, dtype="bfloat16", out=rows, stream=stream, **options)
            getattr(codecs, f"{format}_unpack")(rows, HIDDEN, out=self.decoded[format], stream=stream)
            getattr(codecs, f"{format}_direct_receive")(
                rows, HIDDEN, self.counts, out=self.operands[format], stream=stream, **options
            )

    def check(self, host: Callable[[Any], Any], seed: int, offset: int) -> None:
        """Against the same chain on the host."""

        def make(shape: Any, dtype: str) -> Array:
            array = Array.empty(shape, dtype)
            array.view("uint8").numpy().fill(0xA5)
            return array

        expected = Chain(make, tokens(seed).array, (SEED, offset), list(COUNTS))
        expected.run()
        for format in self.rows:
            same_bytes(f"{format} rows", host(self.rows[format]), expected.rows[format].numpy())
            same_bytes(
                f"{format} tokens",
                host(self.decoded[format]),
                expected.decoded[format].view("uint8").numpy(),
            )
            same_bytes(
                f"{format} operand",
                host(self.operands[format].buffer),
                expected.operands[format].bytes.numpy(),
            )


def test_torch(torch: Any) -> None:
    def make(shape: Any, dtype: str) -> Any:
        nbytes = int(np.prod(shape)) * (2 if dtype == "bfloat16" else 1)
        poison = torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cuda")
        return poison.view(getattr(torch, dtype)).view(shape)

    def contents(seed: int) -> Any:
        return torch.from_numpy(tokens(seed).array.view(np.int16)).view(torch.bfloat16)

    state = torch.tensor([SEED, OFFSET], dtype=torch.int64, device="cuda")
    chain = Chain(make, contents(0).to("cuda"), state, torch.tensor(COUNTS, device="cuda"))
    chain.run()  # loads what is loaded lazily
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
        state[1] += STEP  # on the device, as a training loop does
    assert state.tolist() == [SEED, OFFSET]  # a capture runs nothing
    for replay in range(4):
        chain.x.copy_(contents(replay))
        graph.replay()
        assert state.tolist() == [SEED, OFFSET + STEP * (replay + 1)]
        chain.check(
            lambda array: array.reshape(-1).view(torch.uint8).cpu().numpy(), replay, OFFSET + STEP * replay
        )


@contextmanager
def capture(cudart: Any, stream: int, mode: str = "Global") -> Iterator[list[Any]]:
    """The list holds the executable graph at the end."""
    made: list[Any] = []
    check(
        cudart.cudaStreamBeginCapture(
            stream, getattr(cudart.cudaStreamCaptureMode, f"cudaStreamCaptureMode{mode}")
        )
    )
    try:
        yield made
    finally:
        graph = check(cudart.cudaStreamEndCapture(stream))
        made.append(check(cudart.cudaGraphInstantiate(graph, 0)))
        check(cudart.cudaGraphDestroy(graph))


@pytest.mark.parametrize("arrays", ["plain memory", "arrays of the package"])
@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_cuda_python(arrays: str, mode: str, cudart: Any, raw: RawMemory, new_stream: NewStream) -> None:
    stream = new_stream()

    def make(shape: Any, dtype: str) -> Any:
        poison = raw.empty(shape, dtype)
        if arrays == "plain memory":
            return poison
        own = Array.empty(shape, dtype, "cuda")
        raw.copy(own, poison, stream)
        check(cudart.cudaStreamSynchronize(stream))
        return own

    # rng_state moves by a copy from a table: what a kernel of the caller's would do.
    table = raw.put(typed(np.array([[SEED, OFFSET + STEP]], np.int64)))
    chain = Chain(
        make,
        raw.put(tokens(0)),
        raw.put(typed(np.array([SEED, OFFSET], np.int64))),
        raw.put(typed(np.array(COUNTS, np.int64))),
    )
    # No call before the capture: arrays of the package have been on no stream but the default one.
    with capture(cudart, stream, mode) as made:
        chain.run(stream)
        raw.copy(chain.rng_state, table, stream)
    (graph,) = made
    for replay in range(4):
        contents = tokens(replay)
        kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        check(
            cudart.cudaMemcpyAsync(
                chain.x.pointer, contents.array.ctypes.data, contents.array.nbytes, kind, stream
            )
        )
        check(cudart.cudaGraphLaunch(graph, stream))
        check(cudart.cudaStreamSynchronize(stream))
        chain.check(raw.host, replay, OFFSET + STEP * min(replay, 1))
    check(cudart.cudaGraphExecDestroy(graph))


def test_arrays_of_another_stream_can_be_captured(cudart: Any, raw: RawMemory, new_stream: NewStream) -> None:
    """The capture does not wait for the other stream, which CUDA would refuse: who replays has waited."""
    before, stream = new_stream(), new_stream()
    rows = nvte_ep.nvfp4_pack(raw.put(tokens()), dtype="bfloat16", stream=before)
    decoded = nvte_ep.nvfp4_unpack(rows, HIDDEN, stream=before)
    check(cudart.cudaStreamSynchronize(before))
    with capture(cudart, stream) as made:
        nvte_ep.nvfp4_pack(decoded, out=rows, stream=stream)
    check(cudart.cudaGraphLaunch(made[0], stream))
    check(cudart.cudaStreamSynchronize(stream))
    again = nvte_ep.nvfp4_unpack(nvte_ep.nvfp4_pack(tokens().array, dtype="bfloat16"), HIDDEN)
    same_bytes("rows", rows.numpy(), nvte_ep.nvfp4_pack(again).numpy())
    check(cudart.cudaGraphExecDestroy(made[0]))


def test_streams_that_join_a_capture_are_ordered(cudart: Any, raw: RawMemory, new_stream: NewStream) -> None:
    """Within one capture the package's arrays order two streams, as they do outside."""
    first, second = new_stream(), new_stream()
    x = raw.put(tokens())
    rows = Array.empty((TOKENS, nvte_ep.row_bytes("nvfp4", HIDDEN)), "uint8", "cuda")
    decoded = Array.empty((TOKENS, HIDDEN), "bfloat16", "cuda")
    fork, join = (check(cudart.cudaEventCreate()) for _ in range(2))
    with capture(cudart, first) as made:
        check(cudart.cudaEventRecord(fork, first))
        check(cudart.cudaStreamWaitEvent(second, fork, 0))
        nvte_ep.nvfp4_pack(x, dtype="bfloat16", out=rows, stream=first)
        nvte_ep.nvfp4_unpack(rows, HIDDEN, out=decoded, stream=second)
        check(cudart.cudaEventRecord(join, second))
        check(cudart.cudaStreamWaitEvent(first, join, 0))
    for seed in range(1, 4):
        raw.copy(x, raw.put(tokens(seed)), first)
        check(cudart.cudaGraphLaunch(made[0], first))
        check(cudart.cudaStreamSynchronize(first))
        expected = nvte_ep.nvfp4_unpack(nvte_ep.nvfp4_pack(tokens(seed).array, dtype="bfloat16"), HIDDEN)
        same_bytes("tokens", raw.host(decoded), expected.view("uint8").numpy())
    check(cudart.cudaGraphExecDestroy(made[0]))
    for event in (fork, join):
        check(cudart.cudaEventDestroy(event))


def test_a_capture_makes_no_results(torch: Any) -> None:
    """They would have to live as long as the graph. Arrays made during a capture are no part of it."""
    x = torch.from_numpy(tokens(0).array.view(np.int16)).to("cuda").view(torch.bfloat16)
    nvte_ep.nvfp4_pack(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(nvte_ep.BadStateError, match="pass out="):
            nvte_ep.nvfp4_pack(x)
        rows = Array.empty((TOKENS, nvte_ep.row_bytes("nvfp4", HIDDEN)), "uint8", "cuda")
        nvte_ep.nvfp4_pack(x, out=rows)
    tensor = torch.from_dlpack(rows)
    for seed in range(1, 3):
        x.copy_(torch.from_numpy(tokens(seed).array.view(np.int16)).view(torch.bfloat16))
        graph.replay()
        same_bytes(
            "rows", tensor.cpu().numpy(), nvte_ep.nvfp4_pack(tokens(seed).array, dtype="bfloat16").numpy()
        )


def test_a_refused_call_leaves_the_capture_as_it_was(torch: Any) -> None:
    x = torch.from_numpy(tokens(0).array.view(np.int16)).to("cuda").view(torch.bfloat16)
    rows = torch.empty((TOKENS, nvte_ep.row_bytes("mxfp8", HIDDEN)), dtype=torch.uint8, device="cuda")
    too_wide = torch.empty((TOKENS, HIDDEN + 32), dtype=torch.bfloat16, device="cuda")
    nvte_ep.mxfp8_pack(x, out=rows)
    torch.cuda.synchronize()
    rows.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(nvte_ep.InvalidArgumentError):
            nvte_ep.mxfp8_pack(x, out=rows[:-1])
        with pytest.raises(nvte_ep.InvalidArgumentError):
            nvte_ep.mxfp8_unpack(rows, HIDDEN + 32, out=too_wide)
        with pytest.raises(nvte_ep.BadStateError):
            nvte_ep.mxfp8_unpack(rows, HIDDEN)  # would make its output
        nvte_ep.mxfp8_pack(x, out=rows)
    graph.replay()
    same_bytes("rows", rows.cpu().numpy(), nvte_ep.mxfp8_pack(tokens(0).array, dtype="bfloat16").numpy())
