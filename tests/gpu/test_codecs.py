# SPDX-License-Identifier: Apache-2.0
"""Every codec on the memory of every framework: the bytes of the host backend, and none beside them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import nvte_ep
import pytest
from codec_calls import HIDDEN, NAMES, TOKENS, calls, same_bytes, tokens
from device_arrays import Producer, own_bytes, typed
from numpy.typing import NDArray

CALLS = calls()


@pytest.mark.parametrize("name", NAMES)
def test_into_arrays_of_the_framework(name: str, producer: Producer) -> None:
    if not producer.writable:
        with pytest.raises(nvte_ep.InvalidArgumentError, match="expected a writable array"):
            CALLS[name].run(CALLS[name].place(producer.put), CALLS[name].make_out(producer.empty))
        return
    result = CALLS[name].run(CALLS[name].place(producer.put), CALLS[name].make_out(producer.empty))
    CALLS[name].check(result, producer.host, poisoned=True)


@pytest.mark.parametrize("name", NAMES)
def test_into_arrays_of_the_package(name: str, producer: Producer) -> None:
    """The framework reads them through DLPack, or through the memory itself."""

    def host(array: Any) -> NDArray[np.uint8]:
        assert array.device == (2, 0)
        return producer.take(array)

    CALLS[name].check(CALLS[name].run(CALLS[name].place(producer.put)), host, poisoned=False)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_types_of_elements(format: str, dtype: str, producer: Producer) -> None:
    values = (tokens().array.astype(np.uint32) << 16).view(np.float32).clip(-1e4, 1e4)
    bits = values.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "bfloat16" else values.astype(dtype)
    pack, unpack = (getattr(nvte_ep, f"{format}_{verb}") for verb in ("pack", "unpack"))
    expected = pack(bits, dtype=dtype)
    rows = pack(producer.put(typed(bits, dtype)), dtype=dtype)
    same_bytes("rows", own_bytes(rows), expected.numpy())
    decoded = unpack(rows, HIDDEN, dtype=dtype)
    same_bytes(
        "tokens",
        own_bytes(decoded),
        unpack(expected, HIDDEN, dtype=dtype).view("uint8").numpy(),
    )


def test_strided_rows(torch: Any) -> None:
    """Every second token of a tensor, into every second row of another."""
    wide = torch.from_numpy(tokens(1, 2 * TOKENS).array.view(np.int16)).to("cuda").view(torch.bfloat16)
    rows = torch.full(
        (2 * TOKENS, nvte_ep.row_bytes("nvfp4", HIDDEN)), 0xA5, dtype=torch.uint8, device="cuda"
    )
    nvte_ep.nvfp4_pack(wide[::2], out=rows[1::2])
    expected = np.full(tuple(rows.shape), 0xA5, np.uint8)
    nvte_ep.nvfp4_pack(tokens(1, 2 * TOKENS).array[::2], dtype="bfloat16", out=expected[1::2])
    same_bytes("rows", rows.cpu().numpy(), expected)


def test_findings_and_counts_that_do_not_fit(producer: Producer) -> None:
    if not producer.writable:
        pytest.skip("its arrays are read-only: findings are the library's to write")
    findings = producer.put(typed(np.array([8], np.int32)))
    rows = producer.put(CALLS["nvfp4_pack"].outputs[0])
    counts = producer.put(typed(np.array([128, 128], np.int32)))  # more than there are
    nvte_ep.nvfp4_direct_receive(rows, HIDDEN, counts, alignment=32, findings=findings)
    assert producer.host(findings).view(np.int32)[0] == 8 | 1
    scale = producer.put(typed(np.array([3.0], np.float32)))  # no power of two
    nvte_ep.nvfp4_pack(producer.put(tokens()), dtype="bfloat16", tensor_scale=scale, findings=findings)
    assert producer.host(findings).view(np.int32)[0] == 8 | 1 | 2


def test_no_tokens(producer: Producer) -> None:
    empty = producer.put(tokens(0, 0))
    rows = nvte_ep.nvfp4_pack(empty, dtype="bfloat16")
    assert rows.shape == (0, nvte_ep.row_bytes("nvfp4", HIDDEN))
    assert rows.device == (2, 0)
    assert nvte_ep.nvfp4_unpack(rows, HIDDEN).shape == (0, HIDDEN)


def test_float8_and_float4_types_are_bytes(torch: Any) -> None:
    """What a framework calls FP8 or E8M0 is as good as uint8."""
    payload, scales = (part.array for part in CALLS["mxfp8_quantize"].outputs)
    codes = torch.from_numpy(payload).to("cuda").view(torch.float8_e4m3fn)
    exponents = torch.from_numpy(scales).to("cuda").view(torch.float8_e8m0fnu)
    decoded = nvte_ep.mxfp8_dequantize(codes, exponents)
    same_bytes(
        "tokens", decoded.view("uint8").numpy(), CALLS["mxfp8_dequantize"].outputs[0].array.view(np.uint8)
    )


def test_two_places_are_refused(producer: Producer) -> None:
    out = np.zeros((TOKENS, nvte_ep.row_bytes("nvfp4", HIDDEN)), np.uint8)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"(out|rows): expected"):
        nvte_ep.nvfp4_pack(producer.put(tokens()), dtype="bfloat16", out=out)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"rng_state: expected an array on the device"):
        nvte_ep.nvfp4_pack(producer.put(tokens()), dtype="bfloat16", rounding="stochastic", rng_state=(1, 2))
