# SPDX-License-Identifier: Apache-2.0
"""What a per-step call does in Python where its arrays were seen before: counted, since times differ from
machine to machine."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import nvte_ep
import pytest
from nvte_ep import Array, _dlpack, _lib

TOKENS, HIDDEN, TOP_K, EXPERTS, SLOTS = 4, 64, 2, 4, 128
Calls = dict[str, Callable[[], Any]]

# Functions of Python that a call may enter: a quarter more than it does.
MOST_FUNCTIONS = {
    "prepare": 60,
    "dispatch to rows": 55,
    "dispatch to an operand": 50,
    "dispatch, decoded": 60,
    "combine": 33,
    "dispatch_backward": 48,
    "combine_backward": 46,
}


def make_calls(group: nvte_ep.Group, zeros: Callable[[tuple[int, ...], str], Any]) -> Calls:
    handle = group.handle(top_k=TOP_K, alignment=32, dispatch="nvfp4", combine_backward="nvfp4")
    topk_idx = zeros((TOKENS, TOP_K), "int64")
    tokens, result = (zeros((TOKENS, HIDDEN), "bfloat16") for _ in range(2))
    weights, weight_grads = (zeros((TOKENS, TOP_K), "float32") for _ in range(2))
    slots, decoded = (zeros((SLOTS, HIDDEN), "bfloat16") for _ in range(2))
    slot_weights = zeros((SLOTS,), "float32")
    rows = zeros((SLOTS, nvte_ep.row_bytes("nvfp4", HIDDEN)), "uint8")
    operand = handle.empty_operand()
    routing = nvte_ep.Routing(
        rows_per_expert=zeros((EXPERTS,), "int32"),
        row_offsets=zeros((EXPERTS + 1,), "int32"),
        total_rows=zeros((1,), "int32"),
        slot_source=zeros((SLOTS,), "int64"),
    )
    given: dict[str, Any] = {"topk_weights": weights, "recv_weights": slot_weights}
    return {
        "prepare": lambda: handle.prepare(topk_idx, out=routing),
        "dispatch to rows": lambda: handle.dispatch(tokens, receive="rows", out=rows, **given),
        "dispatch to an operand": lambda: handle.dispatch(tokens, receive="operand", out=operand, **given),
        "dispatch, decoded": lambda: handle.dispatch(tokens, receive="decoded", out=decoded, **given),
        "combine": lambda: handle.combine(slots, out=result),
        "dispatch_backward": lambda: handle.dispatch_backward(
            slots, slot_weights, out=result, grad_topk_weights=weight_grads
        ),
        "combine_backward": lambda: handle.combine_backward(tokens, receive="decoded", out=decoded),
    }


def own_zeros(shape: tuple[int, ...], dtype: str) -> Array:
    array = Array.empty(shape, dtype)
    array.numpy()[...] = 0
    return array


@pytest.fixture(params=["Array", "torch"])
def calls(request: pytest.FixtureRequest, framework: Callable[[str], ModuleType]) -> Iterator[Calls]:
    """Each has been made once, so that every array has been seen."""
    zeros: Callable[[tuple[int, ...], str], Any] = own_zeros
    if request.param == "torch":
        torch = framework("torch")

        def zeros(shape: tuple[int, ...], dtype: str) -> Any:
            return torch.zeros(shape, dtype=getattr(torch, dtype))

    comm = nvte_ep.Communicator.threads(1)[0]
    with nvte_ep.Group(
        comm, num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=TOKENS, recv_capacity=SLOTS
    ) as group:
        found = make_calls(group, zeros)
        for call in found.values():
            call()
        yield found


@pytest.mark.parametrize("name", MOST_FUNCTIONS)
def test_no_array_is_read_again(calls: Calls, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = _dlpack._view

    def view(function: str, argument: str, found: Any) -> _dlpack.View:
        read.append(argument)
        return real(function, argument, found)

    monkeypatch.setattr(_dlpack, "_view", view)
    calls[name]()
    assert read == []


@pytest.mark.parametrize("name", MOST_FUNCTIONS)
def test_the_library_is_entered_once(calls: Calls, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    class Watched:
        """The library; tells of every function that somebody takes from it."""

        def __getattr__(self, function: str) -> Any:
            entered.append(function)
            return getattr(library, function)

    library = _lib.library()
    monkeypatch.setattr(_lib, "_library", Watched())
    calls[name]()
    assert len(entered) == 1, entered
    assert entered[0].startswith("nvte_ep_handle_")


@pytest.mark.parametrize("name", MOST_FUNCTIONS)
def test_few_functions_are_entered(calls: Calls, name: str) -> None:
    entered: collections.Counter[str] = collections.Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        calls[name]()
    finally:
        sys.setprofile(before)
    number = sum(entered.values())
    assert 10 < number <= MOST_FUNCTIONS[name], entered
