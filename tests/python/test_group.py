# SPDX-License-Identifier: Apache-2.0
"""Communicator, Group and Handle on the threads transport, mostly with one rank: the API, its results and its
ends."""

from __future__ import annotations

import collections
import gc
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import nvte_ep
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvte_ep import Array, Communicator, Group, Handle, Operand, Routing, _nccl
from run_ranks import run_ranks

Framework = Callable[[str], ModuleType]

EXPERTS, HIDDEN, TOKENS, TOP_K, ALIGNMENT, CAPACITY = 4, 64, 12, 2, 16, 160
SETTINGS: dict[str, Any] = {
    "num_experts": EXPERTS,
    "hidden": HIDDEN,
    "max_tokens_per_rank": 16,
    "recv_capacity": CAPACITY,
}


def open_group(**changes: Any) -> Group:
    return Group(Communicator.threads(1)[0], **(SETTINGS | changes))


@pytest.fixture
def group() -> Iterator[Group]:
    with open_group() as one:
        yield one


def routing_of(seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    indices = np.array([random.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)], np.int64)
    indices[3, 1] = -1
    indices[5] = -1
    return indices, random.random((TOKENS, TOP_K), np.float32)


def tokens_of(rows: int = TOKENS, seed: int = 1) -> Any:
    """Small multiples of 1/8: exact in every format that carries them here, and sums of them are exact."""
    return (np.random.default_rng(seed).integers(-8, 9, (rows, HIDDEN)) / 8).astype(np.float32)


class Model:
    """Where every token goes, by the rules in the header, for one rank: an index out of range and an expert's
    second mention in one token count as -1."""

    def __init__(self, indices: Any, alignment: int = ALIGNMENT, capacity: int = CAPACITY) -> None:
        self.pairs = [
            [(t, list(row).index(expert)) for t, row in enumerate(indices) if expert in row]
            for expert in range(EXPERTS)
        ]
        self.routed = [len(pairs) for pairs in self.pairs]
        ends = np.cumsum([0] + [-(-count // alignment) * alignment for count in self.routed])
        self.row_offsets = np.minimum(ends, capacity)
        self.rows = np.diff(self.row_offsets)
        self.kept = np.minimum(self.routed, self.rows)
        self.total = int(self.row_offsets[-1])
        self.source = np.full(self.total, -1, np.int64)
        self.expert = np.zeros(self.total, np.int32)
        self.slots: dict[tuple[int, int], int] = {}
        for expert, pairs in enumerate(self.pairs):
            begin = int(self.row_offsets[expert])
            self.expert[begin : begin + int(self.rows[expert])] = expert
            for place, (t, k) in enumerate(pairs[: int(self.kept[expert])]):
                self.source[begin + place] = t
                self.slots[t, k] = begin + place


# ---- communicators -------------------------------------------------------------------------------


def test_communicators() -> None:
    comms = Communicator.threads(3)
    assert len(comms) == 3
    assert len({comm.pointer for comm in comms}) == 3
    comms[0].close()
    comms[0].close()
    with pytest.raises(nvte_ep.BadStateError, match=r"closed"):
        comms[0].pointer  # noqa: B018
    with comms[1] as comm:
        assert comm.pointer
    with pytest.raises(nvte_ep.BadStateError, match=r"closed"):
        open_group_on(comm)


def open_group_on(comm: Communicator) -> Group:
    return Group(comm, **SETTINGS)


@pytest.mark.parametrize("size", [0, -1, 1 << 40, 1.5])
def test_communicators_that_are_refused(size: Any) -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"num_ranks"):
        Communicator.threads(size)


def test_unique_ids() -> None:
    first, second = nvte_ep.unique_id("threads"), nvte_ep.unique_id("threads")
    assert len(first) == len(second) == 128
    assert first != second
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"kind"):
        nvte_ep.unique_id("pigeon")
    for bad in (b"short", "text", first + b"x"):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"unique_id: expected 128 bytes"):
            Communicator("threads", 2, 0, bad)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"rank"):
        Communicator("threads", 2, 2, first)


def test_nccl_where_there_is_none() -> None:
    transports = {entry["name"]: entry for entry in nvte_ep.build_info()["transports"]}
    if transports["nccl"]["available"]:
        pytest.skip("NCCL is here")
    with pytest.raises(nvte_ep.NvteEpError):
        nvte_ep.unique_id("nccl")
    with pytest.raises(nvte_ep.NvteEpError):
        Communicator.from_nccl(0x1000)


def test_the_communicator_may_go_first() -> None:
    comms = Communicator.threads(1)
    group = Group(comms[0], **SETTINGS)
    comms[0].close()
    del comms
    gc.collect()
    group.handle(top_k=1, alignment=1).prepare([[0]])
    group.close()


# ---- groups --------------------------------------------------------------------------------------


def test_info(group: Group) -> None:
    info = group.info
    assert (info.transport, info.num_ranks, info.rank) == ("threads", 1, 0)
    assert (info.num_local_experts, info.recv_capacity) == (EXPERTS, CAPACITY)
    assert info.max_top_k == EXPERTS
    assert info.capturable is False
    assert info.slot_order_exact is True
    assert group.device == (1, 0)


def test_memory() -> None:
    comm = Communicator.threads(1)[0]
    small = Group.memory(comm, **SETTINGS)
    large = Group.memory(
        comm, **(SETTINGS | {"hidden": 1024, "max_tokens_per_rank": 4096, "recv_capacity": 1 << 16})
    )
    assert small.group_bytes >= 0
    assert large.group_bytes + large.handle_bytes > small.group_bytes + small.handle_bytes


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": (1 << 32) + 4}, "num_experts"),
        ({"hidden": 63}, "hidden"),
        ({"hidden": "64"}, "hidden"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank"),
        ({"recv_capacity": -1}, "recv_capacity"),
        ({"max_top_k": -1}, "max_top_k"),
        ({"transport": "pigeon"}, "transport"),
        ({"overflow": "ignore"}, "overflow"),
        ({"device": "tpu"}, "device"),
        ({"timeout_ns": -1}, "timeout_ns"),
    ],
)
def test_groups_that_are_refused(change: dict[str, Any], named: str) -> None:
    for make in (
        lambda: open_group(**change),
        lambda: Group.memory(Communicator.threads(1)[0], **(SETTINGS | change)),
    ):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=rf"nvte_ep_group_\w+: (config\.)?{named}"):
            make()


def test_close_twice(group: Group) -> None:
    group.close()
    group.close()
    with pytest.raises(nvte_ep.BadStateError, match=r"closed"):
        group.handle(top_k=1)


def test_handles_outlive_the_group() -> None:
    group = open_group()
    handle = group.handle(top_k=2, alignment=ALIGNMENT)
    group.close()
    with pytest.raises(nvte_ep.BadStateError):
        handle.prepare([[0, 1]])
    handle.close()
    handle.close()
    with pytest.raises(nvte_ep.BadStateError, match=r"Handle: it is closed"):
        handle.pointer  # noqa: B018
    for call in (handle.combine, handle.dispatch):
        with pytest.raises(
            nvte_ep.BadStateError, match=rf"nvte_ep_handle_{call.__name__}: handle: it is closed"
        ):
            call(np.zeros((1, 8), np.float32))


def test_with_closes() -> None:
    with open_group() as group, group.handle(top_k=1, alignment=1) as handle:
        handle.prepare([[0]])
    with pytest.raises(nvte_ep.BadStateError, match=r"closed"):
        group.pointer  # noqa: B018


def test_an_exception_goes_through_and_frees_the_peers() -> None:
    comms = Communicator.threads(2)
    waiting = threading.Event()
    caught: list[BaseException] = []

    def stays() -> None:
        with pytest.raises(nvte_ep.PeerFailedError), open_group_on(comms[0]) as group:
            handle = group.handle(top_k=1, alignment=1)
            waiting.set()
            handle.prepare([[0]])

    def leaves() -> None:
        try:
            with open_group_on(comms[1]):
                waiting.wait(20)
                time.sleep(0.05)
                raise KeyError("mine")
        except KeyError as error:
            caught.append(error)

    run_ranks(stays, leaves)
    assert str(caught[0]) == "'mine'"


def test_a_dropped_group_frees_its_peers() -> None:
    comms = Communicator.threads(2)
    waiting = threading.Event()

    def stays() -> None:
        with pytest.raises(nvte_ep.PeerFailedError), open_group_on(comms[0]) as group:
            handle = group.handle(top_k=1, alignment=1)
            waiting.set()
            handle.prepare([[0]])

    def leaves() -> None:
        group = open_group_on(comms[1])
        waiting.wait(20)
        time.sleep(0.05)
        assert group.pointer

    run_ranks(stays, leaves)


def test_waiting_does_not_hold_the_gil() -> None:
    """Rank 1 comes late, and is Python code all the while that rank 0 waits in the library."""
    comms = Communicator.threads(2)
    progress: list[int] = []

    def first() -> None:
        with open_group_on(comms[0]) as group:
            group.handle(top_k=1, alignment=1).prepare([[0]])

    def second() -> None:
        with open_group_on(comms[1]) as group:
            handle = group.handle(top_k=1, alignment=1)
            for step in range(10):
                time.sleep(0.01)
                progress.append(step)
            handle.prepare([[0]])

    run_ranks(first, second)
    assert progress == list(range(10))


def test_a_dead_handle_is_destroyed_by_its_group(monkeypatch: pytest.MonkeyPatch, group: Group) -> None:
    """The collector finds handles in any thread; the library sees the destruction in the group's thread
    only."""
    handle = group.handle(top_k=1, alignment=1)
    other = group.handle(top_k=1, alignment=1)
    gone = weakref.ref(handle)
    holder = [handle]
    del handle
    collector = threading.Thread(target=holder.clear)
    collector.start()
    collector.join()
    assert gone() is None
    assert len(group._state.dead_handles) == 1
    other.prepare([[0]])
    assert len(group._state.dead_handles) == 0


def test_many_groups_at_once() -> None:
    groups = [open_group() for _ in range(4)]
    handles = [group.handle(top_k=1, alignment=1) for group in groups]
    for step in range(3):
        for number, handle in enumerate(handles):
            assert (
                handle.prepare([[(step + number) % EXPERTS]]).tokens_per_expert.tolist()[
                    (step + number) % EXPERTS
                ]
                == 1
            )
    for group in groups:
        group.close()


def test_symmetric_memory(group: Group) -> None:
    memory = group.mem_alloc(4096)
    assert (memory.nbytes, memory.pointer % 256, memory.device) == (4096, 0, (1, 0))
    memory.numpy()[...] = 7
    group.mem_free(memory)
    group.mem_alloc(256)  # goes with the group
    for size in (-1, 1 << 70, 0.5):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"bytes"):
            group.mem_alloc(size)


def test_an_allocator_is_kept() -> None:
    """Device memory only: on the host it is never asked, but it must go through and live as long as the
    group."""
    calls: list[int] = []

    def alloc(nbytes: int, device: int, stream: int) -> int:
        calls.append(nbytes)
        return 0

    with open_group(allocator=(alloc, lambda *_: None)) as group:
        gc.collect()
        group.handle(top_k=1, alignment=1).prepare([[0]])
    assert calls == []


def test_an_allocator_that_raises_is_heard() -> None:
    """Called as the library would call it."""

    def alloc(nbytes: int, device: int, stream: int) -> int:
        if nbytes > 100:
            raise KeyError("no room")
        return 0x1000

    freed: list[tuple[int, ...]] = []
    group = open_group(allocator=(alloc, lambda *arguments: freed.append(arguments)))
    alloc_fn, free_fn = group._state.callbacks
    assert alloc_fn(10, 0, None, None) == 0x1000
    free_fn(0x1000, 10, 0, 5, None)
    assert freed == [(0x1000, 10, 0, 5)]
    assert alloc_fn(101, 0, None, None) is None
    with pytest.raises(KeyError, match=r"no room"):
        group.handle(top_k=1, alignment=1)
    group.close()


# ---- handles -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_k": 5}, ValueError, "top_k"),
        ({"alignment": 3}, ValueError, "alignment"),
        ({"alignment": 128}, ValueError, "alignment"),  # 160 slots are no multiple of it
        ({"dispatch": "fp3"}, ValueError, "dispatch"),
        ({"combine": "nvfp4"}, NotImplementedError, "combine"),
        ({"dispatch_backward": "nvfp4"}, NotImplementedError, "dispatch_backward"),
    ],
)
def test_handles_that_are_refused(
    group: Group, change: dict[str, Any], error: type[Exception], named: str
) -> None:
    arguments: dict[str, Any] = {"top_k": 2, "alignment": 16} | change
    with pytest.raises(error, match=named):
        group.handle(**arguments)


def test_repr(group: Group) -> None:
    handle = group.handle(top_k=2, alignment=16, dispatch="nvfp4")
    assert repr(handle).startswith("Handle(top_k=2, alignment=16, dispatch=nvfp4, combine=bf16")


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("capacity", [CAPACITY, 32, 0])
def test_prepare(index: Any, capacity: int) -> None:
    indices, _ = routing_of()
    model = Model(indices, capacity=capacity or 1 << 20)
    with open_group(recv_capacity=capacity, overflow="drop") as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
        routing = handle.prepare(indices.astype(index), index_dtype=index)
        assert routing.tokens_routed.dtype == np.dtype(index).name
        assert routing.tokens_routed.tolist() == model.routed
        assert routing.tokens_per_expert.tolist() == model.kept.tolist()
        assert routing.rows_per_expert.tolist() == model.rows.tolist()
        assert routing.row_offsets.tolist() == model.row_offsets.tolist()
        tiles = np.cumsum([0] + [-(-rows // 128) * 128 for rows in model.rows])
        assert routing.scale_row_offsets.tolist() == tiles.tolist()
        assert routing.total_rows.tolist() == [model.total]
        assert routing.dropped_rows.tolist() == [sum(model.routed) - int(sum(model.kept))]
        assert routing.slot_source.numpy()[: model.total].tolist() == model.source.tolist()
        assert routing.slot_expert.numpy()[: model.total].tolist() == model.expert.tolist()
        assert routing.total == (None if capacity else model.total)
        assert handle.slots == (capacity or model.total)
        assert handle.num_tokens == TOKENS
        if not capacity:
            assert routing.slot_source.shape == (model.total,)


@given(
    indices=st.lists(
        st.tuples(*[st.integers(-2, EXPERTS + 1)] * 3), max_size=SETTINGS["max_tokens_per_rank"]
    ),
    alignment=st.sampled_from([1, 2, 8, 32]),
    slabs=st.integers(0, 6),
)
@settings(max_examples=150, deadline=None)
def test_routing_of_anything(indices: list[tuple[int, ...]], alignment: int, slabs: int) -> None:
    """Any indices, legal or not, and any capacity: routing, dispatch and combine follow the rules."""
    capacity = slabs * alignment
    model = Model(indices, alignment, capacity or 1 << 20)
    tokens = tokens_of(len(indices))
    with open_group(recv_capacity=capacity, overflow="drop") as group:
        handle = group.handle(top_k=3, alignment=alignment)
        routing = handle.prepare(np.array(indices, np.int32).reshape(-1, 3))
        assert routing.tokens_routed.tolist() == model.routed
        assert routing.tokens_per_expert.tolist() == model.kept.tolist()
        assert routing.row_offsets.tolist() == model.row_offsets.tolist()
        assert routing.dropped_rows.tolist() == [sum(model.routed) - int(sum(model.kept))]
        assert routing.slot_source.tolist()[: model.total] == model.source.tolist()
        legal = [[e for e in row if 0 <= e < EXPERTS] for row in indices]
        out_of_range = sum(not -1 <= e < EXPERTS for row in indices for e in row)
        repeated = sum(len(row) - len(set(row)) for row in legal)
        error = group.poll_error()
        assert (0 if error is None else error.count) == out_of_range + repeated
        data = handle.dispatch(tokens, receive="decoded", dtype="float32").data.numpy()
        for slot, source in enumerate(model.source):
            assert (data[slot] == (0 if source < 0 else tokens[source])).all()
        copies = np.bincount([t for t, _ in model.slots], minlength=len(indices)).astype(np.float32)
        assert (handle.combine(data).numpy() == tokens * copies[:, None]).all()


def test_prepare_into_the_callers_arrays(group: Group) -> None:
    indices, _ = routing_of()
    model = Model(indices)
    handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
    rows = np.zeros(EXPERTS, np.int32)
    source = np.full(CAPACITY, 99, np.int64)
    wanted = Routing(rows_per_expert=rows, slot_source=source)
    assert handle.prepare(indices, out=wanted) is wanted
    assert rows.tolist() == model.rows.tolist()
    assert source[: model.total].tolist() == model.source.tolist()
    assert (source[model.total :] == 99).all()
    assert wanted.total_rows is None
    again = handle.empty_routing("int32")
    handle.prepare(indices, out=again)
    assert again.row_offsets.tolist() == model.row_offsets.tolist()


def test_prepare_takes_lists(group: Group) -> None:
    handle = group.handle(top_k=2, alignment=1)
    assert handle.prepare([[0, 1], (3, -1)]).tokens_per_expert.tolist() == [1, 1, 0, 1]
    assert handle.prepare(np.zeros((0, 2), np.int32)).total_rows.tolist() == [0]


@pytest.mark.parametrize(
    "indices",
    [None, [0, 1], [[0]], [[0.5, 1]], np.zeros((2, 2), np.uint8), np.zeros((17, 2), np.int32)],
    ids=["none", "flat", "another top_k", "floats", "uint8", "too many"],
)
def test_prepare_that_is_refused(group: Group, indices: Any) -> None:
    handle = group.handle(top_k=2, alignment=1)
    with pytest.raises(
        nvte_ep.InvalidArgumentError, match=r"nvte_ep_handle_prepare: (args.)?topk_idx: expected"
    ):
        handle.prepare(indices)
    with pytest.raises(nvte_ep.BadStateError):
        handle.num_tokens  # noqa: B018


def test_prepare_outputs_that_are_refused(group: Group) -> None:
    handle = group.handle(top_k=2, alignment=1)
    for name, array in (
        ("rows_per_expert", np.zeros(EXPERTS + 1, np.int32)),
        ("row_offsets", np.zeros(EXPERTS, np.int64)),
        ("total_rows", np.zeros(1, np.float32)),
        ("slot_source", np.zeros(CAPACITY, np.int32)),
        ("slot_expert", np.zeros(3, np.int32)),
    ):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=name):
            handle.prepare([[0, 1]], out=Routing(**{name: array}))


def make(group: Group, **formats: str) -> tuple[Handle, Model, Any, Any]:
    indices, weights = routing_of()
    handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT, **formats)
    handle.prepare(indices)
    return handle, Model(indices), indices, weights


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "nvfp4"])
def test_dispatch_rows(group: Group, format: str) -> None:
    handle, model, _, weights = make(group, dispatch=format)
    tokens = tokens_of()
    received = handle.dispatch(tokens, weights, receive="rows")
    assert received.operand is None
    rows, slot_weights = received.data.numpy(), received.weights.numpy()
    assert rows.shape == (CAPACITY, nvte_ep.row_bytes(format, HIDDEN))
    if format == "bf16":
        packed = (tokens.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        packed = getattr(nvte_ep, f"{format}_pack")(tokens).numpy()
    for (t, k), slot in model.slots.items():
        assert (rows[slot] == packed[t]).all()
        assert slot_weights[slot] == weights[t, k]
    padding = model.source < 0
    assert (rows[: model.total][padding] == 0).all()
    assert (slot_weights[: model.total][padding] == 0).all()


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dispatch_decoded(group: Group, format: str, dtype: str) -> None:
    handle, model, _, _ = make(group, dispatch=format)
    tokens = tokens_of()
    received = handle.dispatch(tokens, receive="decoded", dtype=dtype)
    assert received.weights is None
    assert (received.data.dtype, received.data.shape) == (dtype, (CAPACITY, HIDDEN))
    if format == "bf16":
        expected = tokens
    else:
        packed = getattr(nvte_ep, f"{format}_pack")(tokens)
        expected = (
            getattr(nvte_ep, f"{format}_unpack")(packed, HIDDEN, dtype=dtype).numpy().astype(np.float32)
        )
    data = received.data.numpy().astype(np.float32)
    for (t, _), slot in model.slots.items():
        assert (data[slot] == expected[t]).all()
    assert (data[: model.total][model.source < 0] == 0).all()


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("layout", ["swizzled", "linear"])
def test_dispatch_operand(group: Group, format: str, layout: str) -> None:
    indices, _ = routing_of()
    alignment = 32
    handle = group.handle(top_k=TOP_K, alignment=alignment, dispatch=format)
    counts = handle.prepare(indices).rows_per_expert
    model = Model(indices, alignment)
    tokens = tokens_of()
    operand = handle.dispatch(tokens, columnwise=True, scale_layout=layout).operand
    assert operand is not None
    rows = handle.dispatch(tokens, receive="rows").data
    expected = getattr(nvte_ep, f"{format}_direct_receive")(
        rows, HIDDEN, counts, columnwise=True, scale_layout=layout, alignment=alignment
    )
    for name in operand.layout.parts:
        ours, theirs = getattr(operand, name).numpy(), getattr(expected, name).numpy()
        used = used_of(name, model, operand)
        assert used.size > 0
        assert (ours.reshape(-1)[used] == theirs.reshape(-1)[used]).all(), name


def used_of(name: str, model: Model, operand: Operand) -> Any:
    """Which elements of a part are in use; between the tiles of two experts there may be room."""
    block = nvte_ep.format_info()[operand.format].block
    if name.endswith("payload"):
        return np.arange(model.total * (HIDDEN if operand.format == "mxfp8" else HIDDEN // 2))
    if "amax" in name or "expert_scale" in name:
        return np.arange(EXPERTS)
    if operand.scale_layout == "linear":
        return np.arange(model.total * HIDDEN // block)
    tile_rows = np.cumsum([0] + [-(-int(rows) // 128) * 128 for rows in model.rows])
    used = []
    for expert, rows in enumerate(model.rows):
        if name == "scales":
            width = -(-(HIDDEN // block) // 4) * 4
            begin, size = tile_rows[expert] * width, (tile_rows[expert + 1] - tile_rows[expert]) * width
        else:
            height = -(-HIDDEN // 128) * 128
            begin, size = tile_rows[expert] // block * height, -(-int(rows) // block // 4) * 4 * height
        used.append(np.arange(begin, begin + size))
    return np.concatenate(used)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_dispatch_of_what_is_quantised_already(group: Group, format: str) -> None:
    handle, model, _, _ = make(group, dispatch=format)
    tokens = tokens_of()
    expected = handle.dispatch(tokens, receive="rows").data.numpy()[: model.total]
    parts = getattr(nvte_ep, f"{format}_quantize")(tokens)
    packed = getattr(nvte_ep, f"{format}_pack")(tokens)
    for source in (parts, list(parts), packed):
        assert (handle.dispatch(source, receive="rows").data.numpy()[: model.total] == expected).all()


def test_dispatch_with_a_tensor_scale(group: Group) -> None:
    handle, model, _, _ = make(group, dispatch="nvfp4")
    tokens = tokens_of()
    payload, scales, nothing = nvte_ep.nvfp4_quantize(tokens, tensor_scale=0.25)
    assert nothing is None
    apart = handle.dispatch((payload, scales), receive="decoded", tensor_scale=0.25, dtype="float32")
    same = handle.dispatch((payload, scales, None), receive="decoded", tensor_scale=0.25, dtype="float32")
    expected = nvte_ep.nvfp4_dequantize(payload, scales, tensor_scale=0.25, dtype="float32").numpy()
    for (t, _), slot in model.slots.items():
        assert (apart.data.numpy()[slot] == expected[t]).all()
        assert (same.data.numpy()[slot] == expected[t]).all()


def test_dispatch_types(group: Group) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    handle, model, _, _ = make(group, dispatch="nvfp4")
    tokens = tokens_of()
    expected = handle.dispatch(tokens, receive="rows").data.numpy()[: model.total]
    bits = (tokens.view(np.uint32) >> 16).astype(np.uint16)
    for source in (tokens.astype(ml_dtypes.bfloat16), tokens.astype(np.float16), bits):
        assert (handle.dispatch(source, receive="rows").data.numpy()[: model.total] == expected).all()


def test_dispatch_into_the_callers_arrays(group: Group) -> None:
    handle, model, _, weights = make(group, dispatch="nvfp4")
    tokens = tokens_of()
    out = np.full((CAPACITY, HIDDEN), -7, np.float16)
    slot_weights = np.full(CAPACITY, -7, np.float32)
    received = handle.dispatch(tokens, weights, receive="decoded", out=out, recv_weights=slot_weights)
    assert received.data is out
    assert received.weights is slot_weights
    assert (out[model.total :] == -7).all()
    assert (slot_weights[model.total :] == -7).all()
    assert (out[: model.total] != -7).any()
    operand = handle.empty_operand()
    assert handle.dispatch(tokens, out=operand).operand is operand
    bits = np.zeros((CAPACITY, HIDDEN), np.uint16)
    handle.dispatch(tokens, receive="decoded", out=bits)
    assert bits.any()


def test_stochastic_dispatch(group: Group) -> None:
    handle, model, _, _ = make(group, dispatch="nvfp4")
    tokens = np.random.default_rng(5).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    rows = [
        handle.dispatch(tokens, receive="rows", rounding="stochastic", rng_state=state).data.numpy()[
            : model.total
        ]
        for state in ((1, 0), (1, 0), (1, 1))
    ]
    assert (rows[0] == rows[1]).all()
    assert (rows[0] != rows[2]).any()
    alone = nvte_ep.nvfp4_pack(tokens, rounding="stochastic", rng_state=(1, 0)).numpy()
    for (t, _), slot in model.slots.items():
        assert (rows[0][slot] == alone[t]).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": np.zeros((TOKENS, 32), np.float32)}, "tokens"),
        ({"tokens": np.zeros((TOKENS + 1, HIDDEN), np.float32)}, "tokens"),
        ({"tokens": np.zeros((TOKENS, HIDDEN), np.int64)}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"tokens": (np.zeros((TOKENS, 32), np.uint8),)}, "tokens"),
        ({"topk_weights": np.zeros((TOKENS, TOP_K), np.float64)}, "topk_weights"),
        ({"topk_weights": np.zeros((TOKENS, 1), np.float32)}, "topk_weights"),
        ({"receive": "everything"}, "receive"),
        ({"out": np.zeros((CAPACITY - 1, HIDDEN), np.float32)}, "(out|received)"),
        ({"out": 3}, "out"),
        ({"receive": "operand", "out": np.zeros(3)}, "out"),
        ({"rounding": "stochastic"}, "rng_state"),
        ({"rounding": "up"}, "rounding"),
        ({"dtype": "float64"}, "dtype"),
        ({"recv_weights": np.zeros(CAPACITY, np.float64)}, "recv_weights"),
        ({"stream": 5}, "stream"),
    ],
)
def test_dispatch_that_is_refused(group: Group, change: dict[str, Any], named: str) -> None:
    handle, _, _, weights = make(group, dispatch="nvfp4")
    arguments: dict[str, Any] = {
        "tokens": tokens_of(),
        "topk_weights": weights,
        "receive": "decoded",
    } | change
    with pytest.raises(
        nvte_ep.InvalidArgumentError, match=rf"nvte_ep_handle_dispatch: (args\.)?{named}: expected"
    ):
        handle.dispatch(**arguments)
    handle.dispatch(tokens_of(), weights, receive="decoded")  # the group is as good as before


def test_an_operand_of_bf16_is_unsupported(group: Group) -> None:
    handle, _, _, _ = make(group)
    with pytest.raises(
        nvte_ep.UnsupportedError, match='nvte_ep_handle_dispatch: receive="operand": bf16 has no'
    ):
        handle.dispatch(tokens_of(), receive="operand")


def test_received_by_default(group: Group) -> None:
    """The operand where the wire format has one, else decoded."""
    handle, _, _, _ = make(group, dispatch="nvfp4")
    assert handle.dispatch(tokens_of()).operand is not None
    assert handle.combine_backward(tokens_of()).operand is None  # bf16
    handle, model, _, _ = make(group)
    received = handle.dispatch(tokens_of())
    assert received.operand is None
    expected = handle.dispatch(tokens_of(), receive="decoded").data
    assert (received.data.numpy()[: model.total] == expected.numpy()[: model.total]).all()


def combined(model: Model, slots: Any, weights: Any) -> Any:
    result = np.zeros((TOKENS, HIDDEN), np.float32)
    for (t, _), slot in sorted(model.slots.items()):
        result[t] += slots[slot] * (1 if weights is None else weights[slot])
    return result


@pytest.mark.parametrize("weighted", [False, True])
def test_combine(group: Group, weighted: bool) -> None:
    handle, model, _, weights = make(group)
    slot_weights = handle.dispatch(tokens_of(), weights, receive="decoded").weights.numpy()
    expert_out = tokens_of(CAPACITY, seed=9)
    expert_out[model.total :] = np.nan  # never read
    given = slot_weights if weighted else None
    result = handle.combine(expert_out, slot_weights=given)
    assert (result.shape, result.dtype) == ((TOKENS, HIDDEN), "float32")
    expected = combined(model, expert_out, given)
    assert np.allclose(result.numpy(), expected, rtol=2**-7, atol=2**-7)
    if not weighted:
        assert result.tolist() == expected.tolist()
    out = np.full((TOKENS, HIDDEN), 4, np.float32)
    assert handle.combine(expert_out, slot_weights=given, out=out, accumulate=True) is out
    assert np.allclose(out, expected + 4, rtol=2**-7, atol=2**-7)
    assert (result.numpy()[5] == 0).all()  # routed nowhere
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"out: expected an array to add to"):
        handle.combine(expert_out, accumulate=True)
    for count in (TOKENS + 1, -1):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"handle_combine: num_tokens: expected"):
            handle.combine(expert_out, num_tokens=count)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=f"expected {TOKENS}, as in prepare, got 3$"):
        handle.combine(expert_out, num_tokens=3)


def test_an_index_type_that_is_none(group: Group) -> None:
    handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"prepare: index_dtype: expected int32 or int64"):
        handle.prepare(np.zeros((2, TOP_K), np.int64), index_dtype="float32")


@pytest.mark.parametrize("arguments", [{}, {"num_experts": 4, "hiden": 64}], ids=["missing", "unknown"])
def test_wrong_keywords_of_memory_name_the_function_that_was_called(arguments: dict[str, int]) -> None:
    with pytest.raises(TypeError, match=r"^Group\.memory\(\) "):
        Group.memory(Communicator.threads(1)[0], hidden=64, max_tokens_per_rank=1, **arguments)


def test_a_configured_nccl_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    pathfinder = types.ModuleType("cuda.pathfinder")
    pathfinder.load_nvidia_dynamic_lib = asked.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    for configured, expected in (("/opt/libnccl.so.2", []), ("", ["nccl"])):
        monkeypatch.setenv("NVTE_EP_NCCL_LIBRARY", configured)
        _nccl.preload.__wrapped__()
        assert asked == expected


def test_combine_types(group: Group, framework: Framework) -> None:
    torch = framework("torch")
    handle, model, _, _ = make(group)
    expert_out = torch.from_numpy(tokens_of(CAPACITY, seed=9)).bfloat16()
    result = torch.from_dlpack(handle.combine(expert_out))
    assert result.dtype == torch.bfloat16
    expected = torch.from_numpy(combined(model, expert_out.float().numpy(), None))
    assert torch.equal(result.float(), expected)


def test_backwards_are_the_adjoints(group: Group) -> None:
    handle, model, _, weights = make(group, combine_backward="bf16")
    tokens, slots, grad = tokens_of(), tokens_of(CAPACITY, seed=3), tokens_of(seed=4)
    slots[model.total :] = 0
    received = handle.dispatch(tokens, weights, receive="decoded", dtype="float32")
    live = received.data.numpy()
    live[model.total :] = 0
    # <dispatch(x), y> = <x, dispatch_backward(y)>
    back, nothing = handle.dispatch_backward(slots)
    assert nothing is None
    assert (live * slots).sum() == (tokens * back.numpy()).sum()
    # <combine(y), g> = <y, combine_backward(g)>
    sent = handle.combine_backward(grad, receive="decoded", dtype="float32").data.numpy()
    sent[model.total :] = 0
    assert (handle.combine(slots).numpy() * grad).sum() == (slots * sent).sum()
    for (t, _), slot in model.slots.items():
        assert (sent[slot] == grad[t]).all()


def test_gradient_of_the_weights(group: Group) -> None:
    handle, model, _, weights = make(group)
    handle.dispatch(tokens_of(), weights, receive="decoded")
    grads = np.arange(CAPACITY, dtype=np.float32)
    out = np.full((TOKENS, HIDDEN), 1, np.float32)
    weight_grads = np.full((TOKENS, TOP_K), -1, np.float32)
    results = handle.dispatch_backward(
        tokens_of(CAPACITY), grads, out=out, grad_topk_weights=weight_grads, accumulate=True
    )
    assert results[0] is out
    assert results[1] is weight_grads
    for t in range(TOKENS):
        for k in range(TOP_K):
            slot = model.slots.get((t, k))
            assert weight_grads[t, k] == (0 if slot is None else slot)
    assert handle.dispatch_backward(tokens_of(CAPACITY), grads)[1].tolist() == weight_grads.tolist()
    short = np.zeros((TOKENS - 1, HIDDEN), np.float32)
    for arguments, argument in (
        ({"out": short}, "out"),
        ({"out": short, "num_tokens": TOKENS}, "out"),
        ({"num_tokens": TOKENS - 1}, "num_tokens"),
        ({"out": np.zeros((TOKENS, HIDDEN), np.float32), "num_tokens": TOKENS - 1}, "num_tokens"),
    ):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=rf"dispatch_backward: {argument}: expected"):
            handle.dispatch_backward(tokens_of(CAPACITY), grads, **arguments)


def test_combine_backward_with_weights(group: Group) -> None:
    handle, model, _, weights = make(group, combine_backward="mxfp8")
    slot_weights = handle.dispatch(tokens_of(), weights, receive="decoded").weights.numpy()
    grad, expert_out = tokens_of(seed=4), tokens_of(CAPACITY, seed=5)
    received = handle.combine_backward(
        grad, receive="decoded", slot_weights=slot_weights, expert_out=expert_out, dtype="float32"
    )
    decoded = nvte_ep.mxfp8_unpack(nvte_ep.mxfp8_pack(grad), HIDDEN, dtype="float32").numpy()
    for (t, _), slot in model.slots.items():
        assert np.allclose(received.data.numpy()[slot], decoded[t] * slot_weights[slot], rtol=1e-6)
        assert np.isclose(
            received.weights.numpy()[slot], (decoded[t] * expert_out[slot]).sum(), rtol=1e-5, atol=1e-5
        )
    padding = model.source < 0
    assert (received.weights.numpy()[: model.total][padding] == 0).all()


@pytest.mark.parametrize("receive", ["rows", "decoded", "operand"])
def test_combine_backward_in_every_kind(group: Group, receive: str) -> None:
    handle, model, _, _ = make(group, combine_backward="nvfp4")
    grad = tokens_of(seed=4)
    received = handle.combine_backward(
        grad, receive=receive, rounding="stochastic", rng_state=(3, 0), scale_rounding="up"
    )
    packed = nvte_ep.nvfp4_pack(grad, rounding="stochastic", rng_state=(3, 0), scale_rounding="up").numpy()
    for (t, _), slot in model.slots.items():
        if receive == "rows":
            assert (received.data.numpy()[slot] == packed[t]).all()
        elif receive == "decoded":
            expected = nvte_ep.nvfp4_unpack(packed, HIDDEN, dtype="float32").numpy()
            assert (received.data.numpy()[slot].astype(np.float32) == expected[t]).all()
        else:
            assert received.operand is not None
            assert received.operand.payload is not None
            assert (received.operand.payload.numpy()[slot] == packed[t, : HIDDEN // 2]).all()


def test_eager_sizes() -> None:
    indices, weights = routing_of()
    model = Model(indices, capacity=1 << 20)
    with open_group(recv_capacity=0) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT, dispatch="nvfp4")
        with pytest.raises(nvte_ep.BadStateError, match=r"after prepare"):
            handle.slots  # noqa: B018
        handle.prepare(indices)
        received = handle.dispatch(tokens_of(), weights, receive="decoded", dtype="float32")
        assert received.data.shape == (model.total, HIDDEN)
        assert received.weights.shape == (model.total,)
        operand = handle.dispatch(tokens_of()).operand
        assert operand is not None
        assert operand.capacity == model.total
        assert np.allclose(
            handle.combine(received.data).numpy(), combined(model, received.data.numpy(), None), atol=2**-6
        )


def test_dropped_slots() -> None:
    indices, _ = routing_of()
    model = Model(indices, capacity=32)
    with open_group(recv_capacity=32, overflow="drop") as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
        handle.prepare(indices)
        assert group.poll_error() is None
        slots = tokens_of(32, seed=3)
        assert handle.combine(slots).tolist() == combined(model, slots, None).tolist()


def test_chains_of_arrays(group: Group, framework: Framework) -> None:
    """What one call gives, the next one takes; also by way of a framework."""
    torch = framework("torch")
    handle, _, _, weights = make(group, dispatch="nvfp4")
    rows = nvte_ep.nvfp4_pack(torch.from_numpy(tokens_of()))
    assert isinstance(rows, Array)
    received = handle.dispatch(rows, torch.from_numpy(weights), receive="decoded")
    expert_out = torch.from_dlpack(received.data) * 2
    result = handle.combine(expert_out, slot_weights=received.weights)
    assert torch.from_dlpack(result).shape == (TOKENS, HIDDEN)


# ---- finalizers, and arguments of the wrong kind -------------------------------------------------


def test_a_finalizer_may_run_inside_a_finalizer(run_clean: Callable[..., str]) -> None:
    """A signal handler drops handles between any two steps of the thread that drops handles too. A lock in
    the way would hang here; the alarm that goes off then ends the process."""
    out = run_clean(
        """
        import faulthandler, signal, time
        import nvte_ep

        faulthandler.dump_traceback_later(60, exit=True)
        comm = nvte_ep.Communicator.threads(1)[0]
        group = nvte_ep.Group(comm, num_experts=4, hidden=64, max_tokens_per_rank=4)
        spare = [group.handle(top_k=1) for _ in range(400)]
        orphans = []

        def drop(*_):
            if spare:
                spare.pop()
            if orphans:
                orphans.pop()

        signal.signal(signal.SIGALRM, drop)
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 2e-4)
        end = time.monotonic() + 20
        while spare and time.monotonic() < end:
            group.handle(top_k=1)
        other = nvte_ep.Group(comm, num_experts=4, hidden=64, max_tokens_per_rank=4)
        mine = [other.handle(top_k=1) for _ in range(200)]
        orphans += [other.handle(top_k=1) for _ in range(200)]
        other.close()
        while mine:
            mine.pop()
        while orphans and time.monotonic() < end:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        group.close()
        print(len(spare), len(orphans))
        """
    )
    assert out == "0 0\n"


def test_a_finalizer_takes_no_lock() -> None:
    """The same without luck: a handle dies at every step of what runs when another one dies or a group
    closes."""
    group = open_group()
    spare = [group.handle(top_k=1, alignment=1) for _ in range(120)]
    steps: collections.Counter[str] = collections.Counter()

    def trace(frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_name
        if name in ("handle_died", "take_pointer", "bury_handles") and steps[name] < 30:
            steps[name] += 1
            sys.settrace(None)
            spare.pop()
            sys.settrace(trace)
        return trace

    def die() -> None:
        sys.settrace(trace)
        spare.pop()
        group.handle(top_k=1, alignment=1)
        group.close()
        spare.pop()

    thread = threading.Thread(target=die, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert set(steps) == {"handle_died", "take_pointer", "bury_handles"}
    assert len(spare) == 118 - steps.total()
    assert group._state.pointer is None
    spare.clear()
    assert not group._state.dead_handles


def test_the_pointer_is_taken_once(group: Group) -> None:
    state = group._state
    pointer = state.take_pointer()
    assert pointer is not None
    assert state.take_pointer() is None
    state.pointer = pointer


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"zero_copy": None}, "zero_copy"),
        ({"zero_copy": "yes"}, "zero_copy"),
        ({"allocator": 5}, "allocator"),
        ({"allocator": (1,)}, "allocator"),
        ({"allocator": (1, 2)}, "allocator"),
        ({"allocator": (print, print, print)}, "allocator"),
        ({"device": ("a", "b")}, "device"),
        ({"num_experts": "4"}, "num_experts"),
    ],
    ids=repr,
)
def test_group_arguments_of_the_wrong_kind(change: dict[str, Any], named: str) -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match=rf"nvte_ep_group_create: {named}: expected"):
        open_group(**change)


def test_arguments_of_the_wrong_kind(group: Group) -> None:
    nobody: Any = "comm"
    nothing: Any = None
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"comm: expected a Communicator, got str"):
        Group(nobody, **SETTINGS)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"comm: expected a Communicator, got str"):
        Group.memory(nobody, **SETTINGS)
    for memory in (np.zeros(3), None, 7):
        with pytest.raises(
            nvte_ep.InvalidArgumentError, match=r"nvte_ep_mem_free: memory: expected the Array"
        ):
            group.mem_free(memory)  # type: ignore[arg-type]
    handle, _, indices, _ = make(group)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"out: expected a Routing, got str"):
        handle.prepare(indices, out=nobody)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"accumulate: expected True or False"):
        handle.combine(tokens_of(CAPACITY), out=tokens_of(), accumulate=nothing)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"expert_out: expected \[slots, H\], got None"):
        handle.combine(None)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"topk_idx: expected an array without a mask"):
        handle.prepare(np.ma.masked_less(indices, 0))


@pytest.mark.parametrize("receive", ["rows", "operand"])
def test_a_dtype_is_for_decoded_tokens(group: Group, receive: str) -> None:
    handle, *_ = make(group, dispatch="nvfp4", combine_backward="nvfp4")
    for send in (handle.dispatch, handle.combine_backward):
        with pytest.raises(
            nvte_ep.InvalidArgumentError, match=rf'dtype: expected None with receive="{receive}"'
        ):
            send(tokens_of(), receive=receive, dtype="float32")
        send(tokens_of(), receive=receive)
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"columnwise: expected False with receive"):
            send(tokens_of(), receive="decoded", columnwise=True)
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"out: expected float16, as dtype says"):
            send(tokens_of(), receive="decoded", dtype="float16", out=tokens_of(CAPACITY))
        assert send(tokens_of(), receive="decoded").data.dtype == "bfloat16"


def test_an_eager_prepare_whose_arrays_are_too_small() -> None:
    """The routing is set by then: the totals are those of the new one, and the handle goes on with it."""
    indices, _ = routing_of()
    model = Model(indices, capacity=1 << 20)
    with open_group(recv_capacity=0) as group:
        handle = group.handle(top_k=TOP_K, alignment=ALIGNMENT)
        handle.prepare(indices[:2])
        few = handle.slots
        for name, array in (("slot_source", np.zeros(1, np.int64)), ("slot_expert", np.zeros(1, np.int32))):
            out = Routing(**{name: array})
            with pytest.raises(nvte_ep.InvalidArgumentError, match=name):
                handle.prepare(indices, out=out)
            assert (handle.slots, handle.num_tokens, out.total) == (model.total, TOKENS, model.total)
            assert few != model.total
        received = handle.dispatch(tokens_of(), receive="decoded", dtype="float32").data
        assert received.shape == (model.total, HIDDEN)
        assert handle.combine(received).shape == (TOKENS, HIDDEN)
        with pytest.raises(nvte_ep.InvalidArgumentError):  # refused before anything was set
            handle.prepare([[0, 1, 2]])
        assert (handle.slots, handle.num_tokens) == (model.total, TOKENS)


def test_symmetric_memory_after_its_end() -> None:
    group = open_group()
    freed, memory = group.mem_alloc(256), group.mem_alloc(4096)
    part = memory[:1024].view("float32")
    group.mem_free(freed)
    with pytest.raises(nvte_ep.BadStateError, match=r"memory is gone: mem_free"):
        freed.numpy()
    assert part.numpy().shape == (256,)
    group.close()
    for use in (
        lambda: np.asarray(memory),
        lambda: np.from_dlpack(part),
        lambda: part.pointer,
        lambda: memory[0],
        lambda: nvte_ep.mxfp8_pack(part.reshape(8, 32)),
    ):
        with pytest.raises(nvte_ep.BadStateError, match=r"memory is gone: its group was closed"):
            use()
    assert "4096" in repr(memory)


def test_symmetric_memory_keeps_a_dropped_group() -> None:
    """Without close() an array made from the memory is enough to keep it."""
    group = open_group()
    alive = weakref.ref(group)
    array = np.asarray(group.mem_alloc(4096))
    del group
    gc.collect()
    array[...] = 7
    assert alive() is not None
    assert array.sum() == 7 * 4096
    del array
    gc.collect()
    assert alive() is None
