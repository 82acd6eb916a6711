# SPDX-License-Identifier: Apache-2.0
"""What is not a case of the table: whose memory is used, several handles and groups, repetition, adapters.

CHECKLIST.md says which test stands for which row of the checklist.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import nvte_ep
import pytest

from distributed import checklist, model
from distributed.cases import CASES, Case
from distributed.checks import assert_same_step
from distributed.here import TESTED, TRANSPORTS, on_transports_that, pairs, transports_that, why_not
from distributed.launcher import run_processes, run_threads
from distributed.steps import RNG_STATE, run_step
from distributed.transports import ALL, THREADS, Transport

Framework = Callable[[str], ModuleType]
every_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=str)
where_zero_copy = on_transports_that("zero_copy")

QUANTIZED: dict[str, dict[str, Any]] = {
    "bf16": {},
    "mxfp8": {
        "dispatch": "mxfp8",
        "combine": "mxfp8",
        "dispatch_backward": "mxfp8",
        "combine_backward": "mxfp8",
    },
    "nvfp4": {"dispatch": "nvfp4", "combine_backward": "nvfp4"},
}


def prepared(case: Case) -> Case:
    """With the model's part made, once and before the ranks start."""
    assert len(case.where) == case.ranks
    return case


def test_every_transport_that_is_here_is_tested() -> None:
    here = {entry["name"] for entry in nvte_ep.build_info()["transports"] if entry["available"]}
    assert here <= {transport.name for transport in ALL}
    # What the table says of zero_copy and of sums in mxfp8 decides which tests run: it must be true.
    for transport in TESTED:
        (refused,) = transport.run(1, checklist.refused_settings, transport)
        assert refused == [name for name in ("zero_copy", "mxfp8_sums") if not getattr(transport, name)]


@on_transports_that("on_device")
def test_auto_takes_the_first_that_can(transport: Transport) -> None:
    """In the order of the table, of those with this kind of communicator."""
    rows = [row for row in ALL if row.on_device and row.communicator == transport.communicator]
    expected = next(row.name for row in rows if row in TESTED or why_not(row) is None)
    assert transport.run(2, checklist.chosen_by_auto, transport) == [expected] * 2


# ---- what travels ------------------------------------------------------------------------------------------


@every_transport
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_block_scales_travel_with_their_row(transport: Transport, format: str) -> None:
    case = prepared(Case("spelled", ranks=4, experts=16, hidden=512, tokens=(32, 5, 0, 300), dispatch=format))
    results = transport.run(4, checklist.identity_bytes, transport, case)
    payloads = [payload for _, _, payload in results]
    width, scales = payloads[0].shape[1], case.hidden // (32 if format == "mxfp8" else 16)
    seen: list[int] = []
    for rows, sources, _ in results:
        for row, source in zip(rows, sources, strict=True):
            if source < 0:
                assert not row.any()
                continue
            rank, token = int(source) >> 32, int(source) & 0xFFFFFFFF
            expected = payloads[rank][token]
            np.testing.assert_array_equal(row[:width], expected)
            np.testing.assert_array_equal(row[width : width + scales], 255 - expected[:scales])
            if format == "nvfp4":
                assert row[width + scales : width + scales + 4].view(np.float32)[0] == 2.0 ** (rank - 3)
            seen.append(int(source))
    sent = [
        rank << 32 | token for rank, count in enumerate(case.tokens_of) for token in range(count)
    ] * case.top_k
    assert sorted(seen) == sorted(sent)


@every_transport
def test_weight_gradients_are_per_choice(transport: Transport) -> None:
    case = prepared(Case("per_choice", ranks=3, experts=12, top_k=4, tokens=(9, 30, 1), routing="unrouted"))
    for rank, (got, routed) in enumerate(
        transport.run(3, checklist.per_choice_weight_gradients, transport, case)
    ):
        token, k = np.indices(got.shape)
        np.testing.assert_array_equal(got, np.where(routed, (rank * 1000 + token) * 8 + k, 0))


@every_transport
@pytest.mark.parametrize("capacity", ["fit", "eager"])
def test_counts_add_up_over_the_ranks(transport: Transport, capacity: str) -> None:
    case = prepared(Case("counts", ranks=4, experts=16, tokens=32, capacity=capacity))
    steps = transport.run(4, run_step, transport, case)
    assert sum(int(step.routing["tokens_routed"].sum()) for step in steps) == 4 * 32 * 2
    for step in steps:
        routed = step.routing["tokens_routed"]
        padded = [model.round_up(int(n), case.alignment) for n in routed]
        assert step.routing["rows_per_expert"].tolist() == padded
        assert step.routing["total_rows"].tolist() == [sum(padded)]


@every_transport
def test_an_eager_group_receives_exactly_what_comes(transport: Transport) -> None:
    case = prepared(
        Case("sizes", ranks=4, experts=16, tokens=(3, 0, 41, 8), routing="skewed", capacity="eager")
    )
    for rank, step in enumerate(transport.run(4, run_step, transport, case)):
        exact = case.layouts[rank].total_rows
        assert step.total == exact
        assert {len(step.sent["rows"]), len(step.sent["decoded"]), len(step.grads["decoded"])} == {exact}


@every_transport
@pytest.mark.parametrize("overflow", ["drop", "error"])
def test_dropped_rows_are_counted_and_the_rest_is_exact(transport: Transport, overflow: str) -> None:
    case = prepared(
        Case("dropping", ranks=4, experts=16, tokens=32, capacity=32, overflow=overflow, alignment=16)
    )
    for rank, step in enumerate(transport.run(4, run_step, transport, case)):
        layout = case.layouts[rank]
        assert layout.dropped_rows > 0
        assert step.routing["rows_per_expert"].sum() == case.recv_capacity
        assert step.routing["tokens_routed"].tolist() == layout.tokens_routed.tolist(), (
            "before anything is dropped"
        )
        kept = step.routing["tokens_per_expert"].sum()
        assert step.routing["dropped_rows"].tolist() == [layout.tokens_routed.sum() - kept]
        assert bool(step.findings) == (overflow == "error")


@every_transport
def test_three_dimensions(transport: Transport) -> None:
    case = prepared(Case("three_dimensions", ranks=2, tokens=(24, 12), routing="round_robin"))
    for tokens, result in transport.run(2, checklist.three_dimensions, transport, case, 4):
        assert result.shape == tokens.shape
        np.testing.assert_array_equal(result, 2 * tokens)


SPECIAL = Case(
    "special",
    ranks=2,
    experts=2,
    top_k=1,
    hidden=64,
    tokens=64,
    alignment=64,
    choices=(((1,),) * 64, ((0,),) * 64),
)


def special_slots(transport: Transport, format: str, nonfinite: str) -> tuple[dict[str, list[Any]], Any]:
    """What rank 1 got of the tokens of rank 0, one slot each and in their order; and which slots are
    special."""
    case = prepared(dataclasses.replace(SPECIAL, dispatch=format))
    got = transport.run(2, checklist.special_tokens, transport, case, nonfinite)
    for clean, special in got[0].values():
        assert clean.tobytes() == special.tobytes(), "the tokens of rank 1 are not concerned"
    return got[1], np.isin(np.arange(64), list(checklist.NONFINITE))


@every_transport
@pytest.mark.parametrize("nonfinite", ["propagate", "saturate"])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_special_tokens_hurt_no_others(transport: Transport, format: str, nonfinite: str) -> None:
    slots, special = special_slots(transport, format, nonfinite)
    # Saturated, an Inf makes its expert's scale as large as can be, and the other tokens of an operand
    # vanish.
    for name in ("rows", "decoded") if nonfinite == "saturate" else ("rows", "decoded", "scales"):
        clean, hurt = slots[name]
        assert clean[~special].tobytes() == hurt[~special].tobytes(), name
    decoded = slots["decoded"][1]
    for token in checklist.ZERO_TOKENS:
        assert (decoded[token] == 0).all()
        assert format == "mxfp8" or not slots["rows"][1][token].any(), "all zero bytes"
    if nonfinite == "saturate" and format == "nvfp4":
        assert np.isfinite(decoded).all()
    else:
        # MXFP8 keeps a NaN where it was and flushes what shares a block with an Inf, which is 448 * 2^127
        # then.
        beyond = ~np.isfinite(decoded)
        width = 64 if format == "nvfp4" else 1
        assert beyond[special].sum(axis=1).tolist() == [width] * len(checklist.NONFINITE)
        assert not beyond[~special].any()


@every_transport
def test_a_special_token_hurts_its_row_and_its_column_blocks_of_an_operand(transport: Transport) -> None:
    slots, special = special_slots(transport, "nvfp4", "propagate")
    assert (slots["scales"][1][special] == 0x7F).all() and (slots["scales"][1][~special] < 0x7F).all()
    clean, hurt = (scales.reshape(64, 4) for scales in slots["columnwise_scales"])  # [H, slots / 16]
    blocks = special.reshape(4, 16).any(axis=1)
    assert blocks.tolist() == [True, False, False, False]
    assert (hurt[:, blocks] == 0x7F).all()
    np.testing.assert_array_equal(hurt[:, ~blocks], clean[:, ~blocks])


# ---- whose memory ------------------------------------------------------------------------------------------


@every_transport
@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("capacity", ["fit", "eager"])
def test_received_tokens_and_gradients_lie_in_the_callers_memory(
    transport: Transport, format: str, capacity: str
) -> None:
    case = prepared(
        Case("caller", ranks=3, experts=6, tokens=(20, 3, 0), capacity=capacity, **QUANTIZED[format])
    )
    transport.run(3, checklist.caller_buffers, transport, case)


@every_transport
@pytest.mark.parametrize("format", QUANTIZED)
def test_inputs_may_be_parts_of_wider_arrays(transport: Transport, format: str) -> None:
    case = prepared(Case("strided", ranks=3, experts=6, tokens=(20, 3, 9), **QUANTIZED[format]))
    transport.run(3, checklist.strided_inputs, transport, case)


PLACES = [(transport, False) for transport in TRANSPORTS]
PLACES += [(transport, True) for transport in transports_that("zero_copy")]


@pytest.mark.parametrize(
    ("transport", "symmetric"), PLACES, ids=[f"{t}-{'symmetric' if s else 'plain'}" for t, s in PLACES]
)
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_operands_lie_in_one_buffer_of_the_caller(transport: Transport, format: str, symmetric: bool) -> None:
    case = prepared(Case("one_buffer", hidden=256, tokens=50, alignment=128, **QUANTIZED[format]))
    transport.run(2, checklist.operand_in_one_buffer, transport, case, symmetric)


def zero_copy_cases() -> list[Case]:
    shape: dict[str, Any] = {"ranks": 2, "experts": 6, "tokens": (20, 33), "routing": "unrouted"}
    return [
        Case(f"zero_copy_{format}_{dtype}", dtype=dtype, **shape, **formats)
        for format, formats in QUANTIZED.items()
        for dtype in ("bfloat16", "float32")
    ]


@pytest.mark.parametrize(
    ("transport", "case"), pairs(zero_copy_cases(), [row for row in TESTED if row.zero_copy]), ids=str
)
def test_zero_copy_gives_the_bytes_of_the_staged_step(transport: Transport, case: Case) -> None:
    staged = transport.run(case.ranks, run_step, transport, prepared(case))
    zero_copy = transport.run(case.ranks, checklist.zero_copy_step, transport, case)
    for got, step in zip(zero_copy, staged, strict=True):
        assert got == checklist.staged_bytes(step)


@where_zero_copy
def test_symmetric_memory_comes_and_goes(transport: Transport) -> None:
    case = prepared(Case("pool", ranks=3, experts=6, tokens=(20, 3, 33)))
    transport.run(3, checklist.symmetric_pool, transport, case)


# ---- again and again ---------------------------------------------------------------------------------------


@every_transport
@pytest.mark.parametrize("capacity", ["fit", "eager"])
@pytest.mark.parametrize("format", QUANTIZED)
def test_five_iterations_are_the_same(transport: Transport, format: str, capacity: str) -> None:
    case = prepared(
        Case("again", ranks=4, experts=8, tokens=(17, 0, 40, 8), capacity=capacity, **QUANTIZED[format])
    )
    for first, *others in transport.run(4, checklist.repeated, transport, case, 5):
        for other in others:
            assert_same_step(other, first)


@every_transport
def test_token_counts_may_change_from_step_to_step(transport: Transport) -> None:
    """On one handle; each step is that of a fresh handle."""
    shape: dict[str, Any] = {"ranks": 3, "experts": 6, "capacity": 320, **QUANTIZED["nvfp4"]}
    cases = [
        prepared(Case(f"changing_{i}", tokens=tokens, routing=routing, **shape))
        for i, (tokens, routing) in enumerate(
            [
                ((64, 3, 0), "random"),
                ((0, 0, 0), "random"),
                ((1, 63, 17), "unrouted"),
                ((64, 64, 64), "one_expert"),
            ]
        )
    ]
    by_rank = transport.run(3, checklist.changing, transport, cases)
    for index, case in enumerate(cases):
        fresh = transport.run(3, run_step, transport, case)
        for steps, expected in zip(by_rank, fresh, strict=True):
            assert_same_step(steps[index], expected)


LAYER_1 = Case("layer_1", ranks=2, tokens=30, alignment=16, **QUANTIZED["nvfp4"])
LAYER_2 = Case(
    "layer_2", ranks=2, tokens=(11, 30), top_k=5, alignment=32, index="int32", **QUANTIZED["mxfp8"]
)


@every_transport
@pytest.mark.parametrize("order", ["F1 F2 B1 B2", "F1 F2 B2 B1", "F1 F2 B1 F1 B2 B1 F2 B2"])
def test_two_handles_in_flight_do_not_disturb_each_other(transport: Transport, order: str) -> None:
    layers = prepared(LAYER_1), prepared(LAYER_2)
    alone = transport.run(2, checklist.two_handles, transport, *layers, "F1 B1 F2 B2")
    together = transport.run(2, checklist.two_handles, transport, *layers, order)
    for expected, got in zip(itertools.chain(*alone), itertools.chain(*together), strict=True):
        assert got.tobytes() == expected.tobytes()


@every_transport
def test_two_handles_do_not_alias(transport: Transport) -> None:
    """Same settings, other routings: what one handle was told stays when the other is prepared."""
    first = prepared(Case("one", capacity=256, **QUANTIZED["nvfp4"]))
    second = prepared(Case("other", capacity=256, routing="one_expert", **QUANTIZED["nvfp4"]))
    got = transport.run(2, checklist.two_handles, transport, first, second, "F1 F2 B1 B2")
    # By name: the slots and tokens of B1, B2, and the results and slots of F1, F2.
    for rank, arrays in enumerate(got):
        for name, case, array in zip(
            (
                "B1 slots",
                "B1 tokens",
                "B2 slots",
                "B2 tokens",
                "F1 result",
                "F1 slots",
                "F2 result",
                "F2 slots",
            ),
            (first, first, second, second, first, first, second, second),
            arrays,
            strict=True,
        ):
            rounded = [
                np.array(nvte_ep.nvfp4_unpack(nvte_ep.nvfp4_pack(source), case.hidden))
                for source in map(case.grad_in if name[0] == "B" else case.tokens_in, range(2))
            ]
            if name.endswith("slots"):
                expected = model.dispatch(case.layouts[rank], rounded)
            else:
                copies = (case.where[rank][:, :, 0] >= 0).sum(axis=1)[:, None]
                expected = (rounded[rank].astype(np.float32) * copies + 0.0).astype(rounded[rank].dtype)
            assert array.tobytes() == expected.tobytes(), name


@every_transport
def test_a_replay_reads_its_memory_anew(transport: Transport) -> None:
    """The part of graph capture that host memory can show; the capture itself needs a GPU."""
    case = prepared(Case("replay", tokens=(24, 9), capacity=256, **QUANTIZED["nvfp4"]))
    rounds = [9, 3, 9, 0, 9]
    everybody = transport.run(2, checklist.replayed, transport, case, rounds)
    for index, used in enumerate(rounds):
        topk = [np.where(np.arange(len(choice))[:, None] < used, choice, -1) for choice in case.topk]
        layouts = model.layouts(topk, case.experts, case.alignment, case.recv_capacity)
        rng_state = RNG_STATE + np.array([0, index])
        grads = [
            np.where(
                np.arange(count)[:, None] < used, case.grad_in(rank), np.zeros((), case.grad_in(rank).dtype)
            )
            for rank, count in enumerate(case.tokens_of)
        ]
        rows = [
            np.array(
                nvte_ep.nvfp4_pack(
                    grad, rounding="stochastic", rng_state=rng_state, row_id_base=rank * case.max_tokens
                )
            )
            for rank, grad in enumerate(grads)
        ]
        for rank, layout in enumerate(layouts):
            got, source = everybody[rank][index]
            np.testing.assert_array_equal(source, layout.slot_source)
            np.testing.assert_array_equal(got, model.dispatch(layout, rows))
    same_routing = [everybody[0][i][0].tobytes() for i, used in enumerate(rounds) if used == 9]
    assert len(set(same_routing)) == len(same_routing), "another offset is another rounding"


@every_transport
def test_two_groups_work_at_once(transport: Transport) -> None:
    first = prepared(Case("group_1", ranks=3, experts=6, tokens=(5, 19, 0), **QUANTIZED["nvfp4"]))
    second = prepared(
        Case(
            "group_2",
            ranks=3,
            experts=12,
            hidden=96,
            tokens=7,
            top_k=3,
            capacity="eager",
            **QUANTIZED["mxfp8"],
        )
    )
    alone = [transport.run(3, run_step, transport, case) for case in (first, second)]
    together = transport.run(3, checklist.two_groups_at_once, transport, first, second)
    for rank, steps in enumerate(together):
        for index, step in enumerate(steps):
            assert_same_step(step, alone[index][rank])


@pytest.mark.parametrize("capacity", ["fit", "eager"])
def test_a_step_in_a_process_of_its_own(capacity: str) -> None:
    """Cases, transports and results travel to a rank's process and back."""
    case = prepared(Case("process", ranks=1, tokens=9, capacity=capacity, **QUANTIZED["nvfp4"]))
    there = run_processes(1, run_step, THREADS, case)
    assert_same_step(there[0], run_threads(1, run_step, THREADS, case)[0])


# ---- frameworks --------------------------------------------------------------------------------------------

UNEVEN = Case("uneven", ranks=3, experts=6, tokens=(20, 3, 33), routing="unrouted")


@where_zero_copy
def test_torch_receives_in_place(framework: Framework, transport: Transport) -> None:
    framework("torch")
    transport.run(3, checklist.torch_in_place, transport, prepared(UNEVEN))


@every_transport
@pytest.mark.parametrize("capacity", ["fit", "eager"])
def test_torch_autograd(framework: Framework, transport: Transport, capacity: str) -> None:
    framework("torch")
    case = Case("uneven", ranks=3, experts=6, tokens=(20, 3, 33), routing="unrouted", capacity=capacity)
    transport.run(3, checklist.torch_autograd, transport, prepared(case))


@every_transport
def test_jax_vjp(framework: Framework, transport: Transport) -> None:
    framework("jax")
    transport.run(3, checklist.jax_vjp, transport, prepared(UNEVEN))


# ---- the table itself --------------------------------------------------------------------------------------

HERE = Path(__file__).parent


def test_checklist_names_tests_and_cases_that_exist() -> None:
    text = (HERE / "CHECKLIST.md").read_text()
    rows = set(map(int, re.findall(r"^\| (\d+) \|", text, re.MULTILINE)))
    assert rows == set(range(1, 34))
    sources = {path.name: path.read_text() for path in HERE.parent.rglob("test_*.py")}
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)(?:\[(\w+)\])?`", text)
    assert len(named) > 40
    cases = {case.name for case in CASES}
    for file, test, case in named:
        assert f"def {test}(" in sources[file], f"{file}::{test}"
        assert not case or case in cases, f"{file}::{test}[{case}]"


def test_checklist_tells_the_transports_apart_as_the_table_does() -> None:
    text = (HERE / "CHECKLIST.md").read_text()
    table = text.split("## On which transports")[1].split("\n## ")[0]
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    (_, *names), *fields = rows
    assert names == [transport.id for transport in ALL]
    told = {
        (field, name): value for field, *values in fields for name, value in zip(names, values, strict=True)
    }
    for transport in ALL:
        for field, *_ in fields:
            value = getattr(transport, field)
            expected = ("no", "yes")[value] if isinstance(value, bool) else str(value)
            if field != "max_ranks" or not transport.on_device:  # NVTE_EP_MAX_RANKS changes it
                assert told[field, transport.id] == expected, f"{field} of {transport}"
    assert {field.name for field in dataclasses.fields(Transport) if field.type == "bool"} == {
        field for field, *_ in fields if field != "max_ranks"
    } | {"mirrored"}
