# SPDX-License-Identifier: Apache-2.0
"""What only `peer` has to show: values that a rank did not give, few multiprocessors, combine in passes.

That it gives the bytes of `threads` is shown by tests/distributed and test_device_transports.py.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import nvte_ep
import pytest
from distributed.launcher import Rank, run_threads

with contextlib.suppress(ImportError):  # the fixture says so, and fails where NVTE_EP_REQUIRE names it
    import torch
pytestmark = pytest.mark.usefixtures("torch")

TOKENS, HIDDEN, EXPERTS, TOP_K, SLOTS = 40, 96, 24, 2, 512


class Layer:
    """A rank's group and handle, and memory for its steps: ranks that share a GPU allocate nothing later."""

    def __init__(self, rank: Rank, **settings: Any) -> None:
        self.rank = rank
        shared_id = rank.broadcast(lambda: nvte_ep.unique_id("threads"))
        gpu = rank.index % torch.cuda.device_count()
        torch.cuda.set_device(gpu)
        self.device = f"cuda:{gpu}"
        self.group = nvte_ep.Group(
            nvte_ep.Communicator("threads", rank.size, rank.index, shared_id, device_id=gpu),
            transport="peer",
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_tokens_per_rank=settings.get("max_tokens", TOKENS),
            recv_capacity=SLOTS,
            device=self.device,
            timeout_ns=20_000_000_000,
            **{name: value for name, value in settings.items() if name == "num_sms"},
        )
        rank.on_failure(self.group.abort)
        formats = {
            name: value for name, value in settings.items() if name not in ("num_sms", "dtype", "max_tokens")
        }
        self.handle = self.group.handle(top_k=TOP_K, alignment=16, **formats)
        random = torch.Generator().manual_seed(rank.index)
        dtype = settings.get("dtype", torch.bfloat16)
        self.topk = torch.rand((TOKENS, EXPERTS), generator=random).argsort(dim=1)[:, :TOP_K]
        self.tokens = torch.randn((TOKENS, HIDDEN), generator=random).to(dtype)
        self.weights = torch.rand((TOKENS, TOP_K), generator=random) + 1
        self.total = torch.zeros(1, dtype=torch.int64)
        self.source = torch.zeros(SLOTS, dtype=torch.int64)
        self.slots = torch.zeros((SLOTS, HIDDEN), dtype=dtype)
        self.slot_weights = torch.full((SLOTS,), 7.0)
        self.result = torch.zeros((TOKENS, HIDDEN), dtype=dtype)
        self.grads = torch.full((TOKENS, TOP_K), 7.0)
        self.operand_bytes = torch.zeros(0, dtype=torch.uint8)
        if (format := settings.get("dispatch", "bf16")) != "bf16":
            shape = (format, HIDDEN, SLOTS, EXPERTS // rank.size)
            size = nvte_ep.operand_layout(*shape, alignment=16).total_bytes
            self.operand_bytes = torch.zeros(size, dtype=torch.uint8)
        for name, value in list(vars(self).items()):
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(self.device))
        self.operand = None
        if len(self.operand_bytes) > 0:
            self.operand = nvte_ep.Operand(*shape, alignment=16, buffer=self.operand_bytes)
        self.stream = torch.cuda.Stream()
        torch.cuda.current_stream().synchronize()
        rank.barrier()
        self.handle.prepare(
            self.topk,
            out=nvte_ep.Routing(total_rows=self.total, slot_source=self.source),
            stream=self.stream,
        )

    def dispatch(self, weights: Any, wanted: bool) -> None:
        self.handle.dispatch(
            self.tokens,
            weights,
            receive="decoded",
            dtype=str(self.slots.dtype).removeprefix("torch."),
            out=self.slots,
            recv_weights=self.slot_weights if wanted else None,
            stream=self.stream,
        )

    def findings(self) -> list[tuple[str, int, int]]:
        self.stream.synchronize()
        found = []
        while (error := self.group.poll_error()) is not None:
            found.append((error.status.name, error.rank, error.count))
        return found

    def received(self) -> tuple[Any, Any, Any]:
        """(source rank, weights) of the slots that hold a token, and all slots in use."""
        self.stream.synchronize()
        total = int(self.total[0])
        source = self.source[:total].cpu()
        return source >> 32, self.slot_weights[:total].cpu(), self.slots[:total].cpu()


def one_gives_no_weights(rank: Rank) -> dict[str, Any]:
    layer = Layer(rank)
    with layer.group:
        gives = rank.index != 1
        layer.dispatch(layer.weights if gives else None, wanted=rank.index == 0)
        found = layer.findings()
        sources, weights, _ = layer.received()
        return {"found": found, "sources": sources, "weights": weights}


def test_weights_that_a_peer_did_not_give_are_zero_and_found() -> None:
    got = run_threads(3, one_gives_no_weights)
    # Rank 2 gives weights, and so gets what it did not ask for, too.
    assert got[0]["found"] == got[2]["found"] == [("INVALID_ARGUMENT", 1, 1)]
    assert got[1]["found"] == []
    sources, weights = got[0]["sources"], got[0]["weights"]
    assert (weights[sources == 1] == 0).all() and (weights[sources < 0] == 0).all()
    assert (sources == 1).any() and (weights[(sources == 0) | (sources == 2)] >= 1).all()


def one_gives_no_gradients(rank: Rank) -> dict[str, Any]:
    layer = Layer(rank)
    with layer.group:
        layer.slot_weights.fill_(3.0)
        layer.handle.dispatch_backward(
            layer.slots,
            layer.slot_weights if rank.index != 1 else None,
            out=layer.result,
            grad_topk_weights=layer.grads if rank.index == 0 else None,
            stream=layer.stream,
        )
        found = layer.findings()
        holders = (layer.topk // (EXPERTS // rank.size)).cpu()
        return {"found": found, "holders": holders, "grads": layer.grads.cpu()}


def test_gradients_that_a_peer_did_not_give_are_zero_and_found() -> None:
    got = run_threads(2, one_gives_no_gradients)
    assert got[0]["found"] == [("INVALID_ARGUMENT", 1, 1)]
    assert got[1]["found"] == []
    missing = got[0]["holders"] == 1
    assert missing.any() and (got[0]["grads"][missing] == 0).all() and (got[0]["grads"][~missing] == 3).all()


def everything(rank: Rank, settings: dict[str, Any]) -> list[Any]:
    layer = Layer(rank, **settings)
    with layer.group:
        layer.dispatch(layer.weights, wanted=True)
        _, weights, slots = layer.received()
        if layer.operand is not None:
            layer.handle.dispatch(layer.tokens, receive="operand", out=layer.operand, stream=layer.stream)
        layer.handle.combine(
            layer.slots, slot_weights=layer.slot_weights, out=layer.result, stream=layer.stream
        )
        assert layer.findings() == []
        return [weights, slots, layer.operand_bytes.cpu(), layer.result.cpu()]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    "formats",
    [
        {},
        {"dispatch": "nvfp4", "combine": "mxfp8"},
        # Peers' scales are copied where ranks may have more than 1024 tokens together.
        {"dispatch": "nvfp4", "max_tokens": 1100},
        {"dispatch": "mxfp8", "max_tokens": 1100, "dtype": "float32"},
    ],
    ids=["bf16", "quantised", "room for many", "room for many, in passes"],
)
def test_few_multiprocessors_give_the_same_bytes(ranks: int, formats: dict[str, Any]) -> None:
    if "dtype" in formats:
        formats = formats | {"dtype": getattr(torch, formats["dtype"])}
    few = run_threads(ranks, everything, formats | {"num_sms": 2})
    for one, other in zip(few, run_threads(ranks, everything, dict(formats)), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(
                a.contiguous().view(torch.uint8).numpy(), b.contiguous().view(torch.uint8).numpy()
            )


def sums_in_one_order(rank: Rank) -> tuple[Any, Any]:
    """Tokens in several passes: the partial rows of FP32 tokens of eight ranks do not fit the outbox."""
    layer = Layer(rank, dtype=torch.float32)
    with layer.group:
        layer.dispatch(layer.weights, wanted=False)
        layer.handle.combine(layer.slots, out=layer.result, stream=layer.stream)
        assert layer.findings() == []
        # Tokens travel in BF16 and every copy comes back as it was.
        return layer.result.cpu(), layer.tokens.bfloat16().float().cpu() * TOP_K


def test_combine_in_passes() -> None:
    for result, expected in run_threads(8, sums_in_one_order):
        assert torch.equal(result, expected)


def another_call(rank: Rank, how: str) -> tuple[str, int, str]:
    """Rank 1 breaks the rule that every rank makes the same calls; what the group says of it then."""
    layer = Layer(rank)
    with layer.group:
        other = layer.group.handle(top_k=TOP_K, alignment=16)
        other.prepare(layer.topk, stream=layer.stream, out=nvte_ep.Routing(total_rows=layer.total))
        slots, result = layer.slots.float(), layer.result.float()
        layer.stream.synchronize()
        torch.cuda.current_stream().synchronize()
        rank.barrier()
        if rank.index == 1 and how == "type":
            layer.handle.combine(slots, out=result, stream=layer.stream)
        elif rank.index == 1 and how == "call":
            layer.dispatch(layer.weights, wanted=False)
        elif rank.index == 1 and how == "handle":
            other.combine(layer.slots, out=layer.result, stream=layer.stream)
        else:
            layer.handle.combine(layer.slots, out=layer.result, stream=layer.stream)
        layer.stream.synchronize()
        error = layer.group.poll_error()
        assert error is not None
        with pytest.raises(nvte_ep.NvteEpError) as raised:
            layer.handle.combine(layer.slots, out=layer.result, stream=layer.stream)
        assert raised.value.status == error.status
        return error.status.name, error.rank, str(raised.value)


@pytest.mark.parametrize("how", ["type", "call", "handle"])
def test_a_rank_that_makes_another_call_is_named_by_all(how: str) -> None:
    got = run_threads(3, another_call, how)
    assert [status for status, _, _ in got] == ["INVALID_ARGUMENT"] * 3
    assert got[0][1] == got[2][1] == 1
    assert got[1][1] in (0, 2)
    for _, named, said in got:
        assert f"rank {named} made another one than this rank" in said
