# SPDX-License-Identifier: Apache-2.0
"""Calls on a stream that is captured make no outputs of their own: replays would write to memory that nobody
keeps for them. On a stand-in for a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import nvte_ep
import pytest
from fake_cuda import FakeRuntime, install
from nvte_ep import Array, Communicator, Group, Handle, Operand
from nvte_ep import _cuda as cuda

STREAM = 0x51
TOKENS, HIDDEN, EXPERTS, TOP_K, CAPACITY = 8, 64, 4, 2, 512


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    install(monkeypatch, fake)
    monkeypatch.setattr(cuda, "order", lambda *_: None)
    return fake


def zeros(shape: tuple[int, ...], dtype: str = "bfloat16") -> Array:
    array = Array.empty(shape, dtype, "cuda")
    nbytes = array.nbytes
    cuda.runtime().cudaMemsetAsync(array.pointer, 0, nbytes, STREAM)
    return array


Case = tuple[Callable[..., Any], dict[str, Callable[[], Any]]]  # a call, and what makes its outputs


def codec_cases() -> dict[str, Case]:
    x, rows = zeros((TOKENS, HIDDEN)), zeros((TOKENS, nvte_ep.row_bytes("nvfp4", HIDDEN)), "uint8")
    counts, scales = zeros((1,), "int64"), zeros((TOKENS, 4), "uint8")
    tiles = zeros((512,), "uint8")
    parts = nvte_ep.nvfp4_quantize(x, stream=STREAM)
    eights = nvte_ep.mxfp8_quantize(x, stream=STREAM)
    return {
        "pack": (lambda **to: nvte_ep.nvfp4_pack(x, **to), {"out": lambda: zeros(rows.shape, "uint8")}),
        "unpack": (lambda **to: nvte_ep.nvfp4_unpack(rows, HIDDEN, **to), {"out": lambda: zeros(x.shape)}),
        "nvfp4_quantize": (
            lambda **to: nvte_ep.nvfp4_quantize(x, **to),
            {"out": lambda: tuple(zeros(part.shape, part.dtype) for part in parts)},
        ),
        "mxfp8_quantize": (
            lambda **to: nvte_ep.mxfp8_quantize(x, **to),
            {"out": lambda: tuple(zeros(part.shape, part.dtype) for part in eights)},
        ),
        "dequantize": (lambda **to: nvte_ep.mxfp8_dequantize(*eights, **to), {"out": lambda: zeros(x.shape)}),
        "direct_receive": (
            lambda **to: nvte_ep.nvfp4_direct_receive(rows, HIDDEN, counts, **to),
            {"out": lambda: Operand("nvfp4", HIDDEN, 128, 1, device="cuda")},
        ),
        "swizzle": (
            lambda **to: nvte_ep.scales_swizzle(scales, **to),
            {"out": lambda: zeros((512,), "uint8")},
        ),
        "unswizzle": (
            lambda **to: nvte_ep.scales_unswizzle(tiles, TOKENS, 4, **to),
            {"out": lambda: zeros((TOKENS, 4), "uint8")},
        ),
    }


def handle_cases(handle: Handle) -> dict[str, Case]:
    x, weights = zeros((TOKENS, HIDDEN)), zeros((TOKENS, TOP_K), "float32")
    slots, slot_weights = zeros((CAPACITY, HIDDEN)), zeros((CAPACITY,), "float32")

    def new_slots() -> Array:
        return zeros((CAPACITY, HIDDEN))

    def new_slot_weights() -> Array:
        return zeros((CAPACITY,), "float32")

    def new_tokens() -> Array:
        return zeros((TOKENS, HIDDEN))

    indices = zeros((TOKENS, TOP_K), "int64")
    return {
        "prepare": (lambda **to: handle.prepare(indices, **to), {"out": handle.empty_routing}),
        "dispatch": (lambda **to: handle.dispatch(x, **to), {"out": handle.empty_operand}),
        "dispatch decoded": (
            lambda **to: handle.dispatch(x, weights, receive="decoded", **to),
            {"out": new_slots, "recv_weights": new_slot_weights},
        ),
        "dispatch rows": (
            lambda **to: handle.dispatch(x, receive="rows", **to),
            {"out": lambda: zeros((CAPACITY, nvte_ep.row_bytes("mxfp8", HIDDEN)), "uint8")},
        ),
        "combine": (lambda **to: handle.combine(slots, **to), {"out": new_tokens}),
        "dispatch_backward": (
            lambda **to: handle.dispatch_backward(slots, slot_weights, **to),
            {"out": new_tokens, "grad_topk_weights": lambda: zeros((TOKENS, TOP_K), "float32")},
        ),
        "combine_backward": (
            lambda **to: handle.combine_backward(
                x, receive="decoded", slot_weights=slot_weights, expert_out=slots, **to
            ),
            {"out": new_slots, "grad_slot_weights": new_slot_weights},
        ),
    }


def check(runtime: FakeRuntime, cases: dict[str, Case]) -> None:
    for name, (call, makers) in cases.items():
        outputs = {output: make() for output, make in makers.items()}
        call(stream=STREAM)  # makes them itself
        runtime.capturing, captured = True, runtime.captured_calls
        allocated = len(runtime.allocations)
        for missing in outputs:
            given = {output: array for output, array in outputs.items() if output != missing}
            with pytest.raises(nvte_ep.BadStateError, match=f"{missing}: .* pass {missing}="):
                call(**given, stream=STREAM)
        assert (runtime.captured_calls, len(runtime.allocations)) == (captured, allocated), name
        call(**outputs, stream=STREAM)
        assert runtime.captured_calls == captured + 1, name
        runtime.capturing = False


def test_codecs(runtime: FakeRuntime) -> None:
    check(runtime, codec_cases())


def test_handles(runtime: FakeRuntime) -> None:
    with (
        Communicator.threads(1)[0] as comm,
        Group(
            comm,
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_tokens_per_rank=TOKENS,
            recv_capacity=CAPACITY,
            device="cuda",
        ) as group,
        group.handle(top_k=TOP_K, dispatch="mxfp8") as handle,
    ):
        handle.prepare(zeros((TOKENS, TOP_K), "int64"), stream=STREAM)
        check(runtime, handle_cases(handle))


def test_the_default_stream_is_not_asked(runtime: FakeRuntime) -> None:
    """CUDA refuses the question while another stream is captured; it is never captured itself."""
    runtime.capturing = True
    assert not cuda.is_capturing(0, 0)
    assert not cuda.is_capturing(0, 1)


def test_calls_on_the_host_do_not_ask(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "runtime", lambda: pytest.fail("a call on the host asks CUDA"))
    nvte_ep.mxfp8_pack(np.zeros((TOKENS, HIDDEN), np.float32))
