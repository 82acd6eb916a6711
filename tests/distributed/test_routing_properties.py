# SPDX-License-Identifier: Apache-2.0
"""Any routing at all, of any small group: whole steps against the model, on examples that hypothesis makes
up.

The examples are the same in every run. A failing one is shrunk and printed as a Case, which can be run again.
"""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from distributed import checks
from distributed.cases import EAGER, Case
from distributed.here import TRANSPORTS
from distributed.steps import run_step
from distributed.transports import Transport

FORMATS = ["bf16", "mxfp8", "nvfp4"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 5), "ranks")
    experts = ranks * draw(st.integers(1, 5), "experts of a rank")
    top_k = draw(st.integers(1, min(experts, 6)), "top_k")
    tokens = draw(st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks), "tokens")
    # Mostly legal choices, repeated ones among them; now and then one out of range.
    expert = st.one_of(
        st.integers(-1, experts - 1), st.integers(-1, experts - 1), st.sampled_from([experts, -2, 2**31 - 1])
    )
    choices = tuple(
        tuple(tuple(draw(st.lists(expert, min_size=top_k, max_size=top_k))) for _ in range(count))
        for count in tokens
    )
    alignment = draw(st.sampled_from([1, 2, 16, 32, 128]), "alignment")
    units = st.integers(1, max(1, sum(tokens) * top_k // alignment + 2))
    capacity = draw(
        st.one_of(st.sampled_from([EAGER, "fit", "exact"]), units.map(lambda n: n * alignment)), "capacity"
    )
    return Case(
        "drawn",
        ranks=ranks,
        experts=experts,
        top_k=top_k,
        hidden=draw(st.sampled_from([32, 96]), "hidden"),
        tokens=tuple(tokens),
        alignment=alignment,
        capacity=capacity,
        overflow="error" if capacity == EAGER else draw(st.sampled_from(["error", "drop"]), "overflow"),
        index=draw(st.sampled_from(["int32", "int64"]), "index"),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"]), "dtype"),
        dispatch=draw(st.sampled_from(FORMATS), "dispatch"),
        combine=draw(st.sampled_from(FORMATS[:2]), "combine"),
        dispatch_backward=draw(st.sampled_from(FORMATS[:2]), "dispatch_backward"),
        combine_backward=draw(st.sampled_from(FORMATS), "combine_backward"),
        choices=choices,
    )


@pytest.mark.parametrize("transport", TRANSPORTS, ids=str)
def test_any_routing(transport: Transport) -> None:
    @hypothesis.settings(max_examples=transport.examples, deadline=None, derandomize=True, database=None)
    @hypothesis.given(case=cases())
    def every_case(case: Case) -> None:
        assert len(case.where) == case.ranks
        steps = transport.run(case.ranks, run_step, transport, case)
        for check in checks.CHECKS.values():
            check(transport, case, steps)

    every_case()


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
@hypothesis.given(case=cases())
def test_layouts_hold_what_was_kept_and_nothing_else(case: Case) -> None:
    """Of the model: every choice that was not dropped has one slot, slabs lie one after the other and inside
    the capacity, and what comes first in a slab came first."""
    kept = sum(int((where[:, :, 0] >= 0).sum()) for where in case.where)
    assert kept == sum(len(layout.filled) for layout in case.layouts)
    for layout in case.layouts:
        assert layout.tokens_routed.sum() == len(layout.filled) + layout.dropped_rows
        np.testing.assert_array_equal(np.diff(layout.row_offsets), layout.rows_per_expert)
        assert (layout.rows_per_expert % case.alignment == 0).all()
        if case.recv_capacity:
            assert layout.total_rows <= case.recv_capacity
        for e, (begin, end) in enumerate(zip(layout.row_offsets[:-1], layout.row_offsets[1:], strict=True)):
            slab = layout.slot_source[begin:end]
            count = layout.tokens_per_expert[e]
            assert (np.diff(slab[:count]) > 0).all() and (slab[count:] == -1).all()
