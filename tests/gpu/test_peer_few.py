# SPDX-License-Identifier: Apache-2.0
"""Few tokens on `peer`: prepare in one block, and rows in small pieces.

Up to 1024 tokens of all ranks are few. Both sides of that limit, and what makes the block's work uneven.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import nvte_ep
import pytest
from distributed.launcher import Rank, run_threads

with contextlib.suppress(ImportError):  # the fixture says so, and fails where NVTE_EP_REQUIRE names it
    import torch
pytestmark = pytest.mark.usefixtures("torch")

HIDDEN = 288  # 18 scales a row: not a multiple of 16
STEPS = 3  # each with another routing, on one handle


@dataclass(frozen=True)
class Few:
    ranks: int
    tokens: int  # of a rank at most
    top_k: int
    experts: int
    alignment: int = 16
    popular: int = 0  # so many experts are everybody's first choices
    wrong: bool = False  # some choices are illegal, or mentioned twice
    room: float = 1.0  # of the slots that the routing needs at most

    def __str__(self) -> str:
        extras = [f"popular{self.popular}" if self.popular else "", "wrong" if self.wrong else ""]
        extras += ["dropping" if self.room < 1 else "", f"alignment{self.alignment}"]
        return "-".join(
            [f"{self.ranks}x{self.tokens}", f"k{self.top_k}", f"e{self.experts}", *filter(None, extras)]
        )

    @property
    def capacity(self) -> int:
        local = self.experts // self.ranks
        most = self.ranks * self.tokens * min(self.top_k, local) + local * (self.alignment - 1)
        return max(int(most * self.room) // self.alignment, 1) * self.alignment

    def topk(self, rank: int, step: int) -> Any:
        random = np.random.default_rng([rank, step])
        count = self.tokens if step == 0 else int(random.integers(0, self.tokens + 1))
        likes = random.random((count, self.experts))
        likes[:, : self.popular] -= 1
        chosen = likes.argsort(axis=1)[:, : self.top_k].astype(np.int64 if step % 2 else np.int32)
        if self.wrong:
            kind = random.integers(0, 10, chosen.shape)
            chosen[kind == 0] = -1
            chosen[kind == 1] = self.experts + 3
            chosen[kind == 2] = -7
            chosen = np.where(kind == 3, chosen[:, :1], chosen)
        return torch.from_numpy(np.ascontiguousarray(chosen))


CASES = (
    Few(1, 128, 8, 64),
    Few(1, 1024, 8, 64),
    Few(1, 1025, 8, 64),
    Few(2, 512, 6, 96),
    Few(2, 513, 6, 96),
    Few(4, 33, 10, 64, wrong=True),
    Few(3, 7, 5, 9, alignment=1),
    Few(1, 1, 1, 1),
    Few(2, 48, 32, 64, alignment=128),
    Few(1, 40, 33, 40, wrong=True),  # more choices than a warp has lanes
    Few(2, 300, 2, 16, popular=2),  # experts with several bands of scales
    Few(2, 200, 4, 16, popular=3, room=0.3, wrong=True),
    Few(8, 16, 8, 512),
)


def outcome(rank: Rank, case: Few, transport: str) -> list[dict[str, Any]]:
    """Of every step: all that prepare hands out, an operand with its weights, and what was found."""
    gpu = rank.index % torch.cuda.device_count()
    device = f"cuda:{gpu}" if transport == "peer" else "cpu"
    shared_id = rank.broadcast(lambda: nvte_ep.unique_id("threads"))
    group = nvte_ep.Group(
        nvte_ep.Communicator("threads", rank.size, rank.index, shared_id, device_id=gpu),
        transport=transport,
        num_experts=case.experts,
        hidden=HIDDEN,
        max_tokens_per_rank=case.tokens,
        recv_capacity=case.capacity,
        max_top_k=case.top_k,
        device=device,
        overflow="drop",
        timeout_ns=20_000_000_000,
    )
    rank.on_failure(group.abort)
    handle = group.handle(top_k=case.top_k, alignment=case.alignment, dispatch="nvfp4")
    local, slots = case.experts // case.ranks, case.capacity

    def new(*shape: int, dtype: Any, fill: int = 85) -> Any:
        return torch.full(shape, fill, dtype=dtype, device=device)

    layout = nvte_ep.operand_layout("nvfp4", HIDDEN, slots, local, alignment=case.alignment)
    steps = []
    for step in range(STEPS):
        topk = case.topk(rank.index, step)
        random = torch.Generator().manual_seed(rank.index * STEPS + step)
        tokens = torch.randn((len(topk), HIDDEN), generator=random)
        tokens *= torch.exp2(torch.randint(-9, 9, (len(topk), 1), generator=random))
        weights = torch.rand((len(topk), case.top_k), generator=random)
        counts = {
            name: new(local, dtype=torch.int32)
            for name in ("tokens_routed", "tokens_per_expert", "rows_per_expert")
        }
        offsets = {name: new(local + 1, dtype=torch.int64) for name in ("row_offsets", "scale_row_offsets")}
        totals = {name: new(1, dtype=torch.int64) for name in ("total_rows", "dropped_rows")}
        of_slots = {
            "slot_source": new(slots, dtype=torch.int64),
            "slot_expert": new(slots, dtype=torch.int32),
        }
        buffer = new(layout.total_bytes + 256, dtype=torch.uint8)
        buffer = buffer[-buffer.data_ptr() % 256 :][: layout.total_bytes]
        got = {**counts, **offsets, **totals, **of_slots, "operand": buffer}
        got["weights"] = new(slots, dtype=torch.float32)
        given = [t.to(device) for t in (topk, tokens.bfloat16(), weights)]
        stream = torch.cuda.Stream(gpu) if transport == "peer" else None
        if stream is not None:
            torch.cuda.synchronize(gpu)
        steps.append((got, given, stream, buffer))
    rank.barrier()  # nobody allocates while others wait
    found = []
    for got, (topk, tokens, weights), stream, buffer in steps:
        routing = {name: got[name] for name in got if name not in ("operand", "weights")}
        operand = nvte_ep.Operand("nvfp4", HIDDEN, slots, local, alignment=case.alignment, buffer=buffer)
        handle.prepare(topk, out=nvte_ep.Routing(**routing), stream=stream)
        handle.dispatch(
            tokens, weights, receive="operand", out=operand, recv_weights=got["weights"], stream=stream
        )
        if stream is not None:
            stream.synchronize()
        error = group.poll_error()
        found.append(None if error is None else (error.status.name, error.rank, error.count))
    results = [{name: value.cpu() for name, value in got.items()} for got, *_ in steps]
    rank.barrier()
    group.close()
    return [result | {"found": finding} for result, finding in zip(results, found, strict=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_tokens_have_the_bytes_of_threads(case: Few) -> None:
    expected = run_threads(case.ranks, outcome, case, "threads")
    got = run_threads(case.ranks, outcome, case, "peer")
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for step, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert one["found"] == other["found"], (rank, step)
            for name in other:
                if name != "found":
                    np.testing.assert_array_equal(
                        one[name].numpy(), other[name].numpy(), err_msg=f"rank {rank}, step {step}: {name}"
                    )


@pytest.mark.parametrize("between", [False, True], ids=["tokens-before-prepare", "tokens-after-prepare"])
def test_tokens_that_are_made_in_the_graph(between: bool) -> None:
    """Late, before prepare or between it and dispatch, which may begin early."""
    case = Few(1, 128, 8, 64)
    torch.cuda.set_device(0)
    made = [torch.randn((case.tokens, 4096), device="cuda").bfloat16() for _ in range(3)]
    topk = case.topk(0, 0).to("cuda")
    given, tokens = torch.zeros_like(made[0]), torch.zeros_like(made[0])
    comm = nvte_ep.Communicator("threads", 1, 0, nvte_ep.unique_id("threads"))
    settings: dict[str, Any] = {"num_experts": case.experts, "hidden": 4096, "recv_capacity": case.capacity}
    group = nvte_ep.Group(
        comm, transport="peer", max_tokens_per_rank=case.tokens, device="cuda:0", **settings
    )
    handle = group.handle(top_k=case.top_k, alignment=case.alignment, dispatch="nvfp4")
    row_bytes = nvte_ep.row_bytes("nvfp4", 4096)
    rows, expected = (torch.zeros((case.capacity, row_bytes), dtype=torch.uint8, device="cuda") for _ in "ab")
    total = torch.zeros(1, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()

    def make() -> None:
        torch.cuda._sleep(100_000)
        tokens.copy_(given)

    def step() -> None:
        if not between:
            make()
        handle.prepare(topk, out=nvte_ep.Routing(total_rows=total), stream=stream)
        if between:
            make()
        handle.dispatch(tokens, receive="rows", out=rows, stream=stream)

    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        for values in made:
            given.copy_(values)
            graph.replay()
            handle.dispatch(values, receive="rows", out=expected, stream=stream)
            stream.synchronize()
            count = int(total[0])
            assert count > 0
            assert torch.equal(rows[:count], expected[:count])
    group.close()
