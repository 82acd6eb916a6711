# SPDX-License-Identifier: Apache-2.0
"""The codec functions: what they take, what they give, and that their bytes mean what the header says.

The bits themselves are compared with golden vectors elsewhere; here a small decoder reads rows and
operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import nvte_ep
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvte_ep import Array, Operand

Framework = Callable[[str], ModuleType]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_CODES = np.arange(256)
E4M3 = np.where(
    _CODES & 0x78,
    (1 + (_CODES & 7) / 8) * 2.0 ** (((_CODES >> 3) & 15) - 7.0),
    (_CODES & 7) / 512,
) * np.where(_CODES & 128, -1, 1)
E4M3[[0x7F, 0xFF]] = np.nan

FORMATS = ("mxfp8", "nvfp4")


def pack(format: str) -> Any:
    return getattr(nvte_ep, f"{format}_pack")


def unpack(format: str) -> Any:
    return getattr(nvte_ep, f"{format}_unpack")


def quantize(format: str) -> Any:
    return getattr(nvte_ep, f"{format}_quantize")


def dequantize(format: str) -> Any:
    return getattr(nvte_ep, f"{format}_dequantize")


def direct_receive(format: str) -> Any:
    return getattr(nvte_ep, f"{format}_direct_receive")


def tokens_of(rows: int, hidden: int, seed: int = 0) -> Any:
    """BF16 values in FP32, a few channels far above the rest."""
    random = np.random.default_rng(seed)
    tokens = random.standard_normal((rows, hidden)) * 2.0 ** random.integers(-6, 7, (1, hidden))
    return (tokens.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def bf16_bits(tokens: Any) -> Any:
    return (tokens.view(np.uint32) >> 16).astype(np.uint16)


def nibbles(payload: Bytes) -> Any:
    return np.stack([payload & 15, payload >> 4], axis=-1).reshape(*payload.shape[:-1], -1)


def decode_nvfp4(payload: Bytes, scales: Bytes, token_scales: Any) -> Any:
    values = E2M1[nibbles(payload)] * np.repeat(np.abs(E4M3[scales]), 16, axis=-1)
    return values * np.asarray(token_scales)[:, None]


def decode_mxfp8(payload: Bytes, scales: Bytes) -> Any:
    return E4M3[payload] * np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=-1)


def decode_row(format: str, rows: Bytes, hidden: int) -> Any:
    if format == "mxfp8":
        return decode_mxfp8(rows[:, :hidden], rows[:, hidden : hidden + hidden // 32])
    codes, end = hidden // 2, hidden // 2 + hidden // 16
    at = -(-end // 4) * 4
    token_scales = np.ascontiguousarray(rows[:, at : at + 4]).view(np.float32)[:, 0]
    return decode_nvfp4(rows[:, :codes], rows[:, codes:end], token_scales)


def test_format_info() -> None:
    formats = nvte_ep.format_info()
    assert list(formats) == ["bf16", "mxfp8", "nvfp4"]
    nvfp4 = formats["nvfp4"]
    assert (nvfp4.format, nvfp4.block, nvfp4.payload_bits, nvfp4.token_scale_bytes) == (2, 16, 4, 4)
    assert (nvfp4.hidden_multiple, nvfp4.operand_multiple, nvfp4.columnwise_alignment) == (16, 32, 16)
    mxfp8 = formats["mxfp8"]
    assert (mxfp8.format, mxfp8.block, mxfp8.payload_bits, mxfp8.token_scale_bytes) == (1, 32, 8, 0)


ROW_BYTES = {
    ("mxfp8", 2880): 2976,
    ("mxfp8", 1024): 1056,
    ("mxfp8", 3584): 3696,
    ("nvfp4", 2880): 1632,
    ("nvfp4", 1024): 592,
    ("nvfp4", 1040): 592,
    ("nvfp4", 16): 16,
    ("bf16", 7168): 14336,
}


@pytest.mark.parametrize(("format", "hidden"), list(ROW_BYTES))
def test_row_bytes(format: str, hidden: int) -> None:
    assert nvte_ep.row_bytes(format, hidden) == ROW_BYTES[format, hidden]


@pytest.mark.parametrize(
    ("format", "hidden", "named"),
    [
        ("mxfp8", 1040, "hidden"),
        ("nvfp4", 24, "hidden"),
        ("nvfp4", 0, "hidden"),
        ("nvfp4", -16, "hidden"),
        ("nvfp4", 1 << 70, "hidden"),
        ("nvfp4", 16.0, "hidden"),
        ("nvfp5", 16, "format"),
        (None, 16, "format"),
    ],
)
def test_row_bytes_that_are_refused(format: Any, hidden: Any, named: str) -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match=rf"nvte_ep_row_bytes: {named}: expected"):
        nvte_ep.row_bytes(format, hidden)


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hidden", [32, 96, 384, 2880])
def test_rows_mean_what_the_header_says(format: str, hidden: int) -> None:
    tokens = tokens_of(7, hidden)
    rows = pack(format)(tokens)
    assert (rows.shape, rows.dtype) == ((7, nvte_ep.row_bytes(format, hidden)), "uint8")
    decoded = unpack(format)(rows, hidden, dtype="float32")
    assert (decoded.shape, decoded.dtype) == ((7, hidden), "float32")
    expected = decode_row(format, rows.numpy(), hidden)
    assert (decoded.numpy() == expected.astype(np.float32)).all()
    # At most half a step of the top binade: MXFP8's block maximum lies in 224 .. 448, NVFP4's scale is
    # rounded too.
    block = nvte_ep.format_info()[format].block
    blocks = np.abs(tokens).reshape(7, -1, block).max(axis=2, keepdims=True)
    error = np.abs(decoded.numpy() - tokens).reshape(7, -1, block)
    assert (error <= blocks * (16 / 224 if format == "mxfp8" else 0.26)).all()
    assert error.max() > 0


@pytest.mark.parametrize("format", FORMATS)
def test_what_fits_is_exact(format: str) -> None:
    tokens = np.tile(E2M1.astype(np.float32) * 4, (3, 4))
    for dtype in ("bfloat16", "float16", "float32"):
        decoded = unpack(format)(pack(format)(tokens), 64, dtype=dtype)
        assert decoded.dtype == dtype
        assert decoded.tolist() == tokens.tolist()


@pytest.mark.parametrize("format", FORMATS)
def test_input_types_agree(format: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tokens = tokens_of(4, 64)
    rows = pack(format)(tokens).tolist()
    assert pack(format)(tokens.astype(ml_dtypes.bfloat16)).tolist() == rows
    assert pack(format)(bf16_bits(tokens), dtype="bfloat16").tolist() == rows
    assert pack(format)(tokens, dtype="float32").tolist() == rows
    halves = (tokens / 16).astype(np.float16)
    assert pack(format)(halves.view(np.uint16), dtype="float16").tolist() == pack(format)(halves).tolist()


@pytest.mark.parametrize("format", FORMATS)
def test_uint16_must_be_named(format: str) -> None:
    bits = bf16_bits(tokens_of(4, 64))
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"tokens: expected .*bfloat16"):
        pack(format)(bits)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"tokens: expected bfloat16, as dtype says"):
        pack(format)(tokens_of(4, 64), dtype="bfloat16")
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"dtype: expected bfloat16, float16 or float32"):
        pack(format)(bits, dtype="int8")


def test_frameworks_agree(framework: Framework) -> None:
    torch = framework("torch")
    tokens = tokens_of(5, 64)
    tensor = torch.from_numpy(tokens)
    for format in FORMATS:
        rows = pack(format)(tokens)
        assert pack(format)(tensor).tolist() == rows.tolist()
        assert pack(format)(tensor.bfloat16()).tolist() == rows.tolist()
        decoded = torch.from_dlpack(unpack(format)(torch.from_dlpack(rows), 64))
        assert decoded.dtype == torch.bfloat16
        assert decoded.float().tolist() == unpack(format)(rows, 64, dtype="float32").tolist()
        out = torch.full((5, 64), -1.0, dtype=torch.bfloat16)
        assert unpack(format)(rows, 64, out=out) is out
        assert torch.equal(out, decoded)


def test_jax_agrees(framework: Framework) -> None:
    jnp = framework("jax").numpy
    tokens = tokens_of(5, 64)
    for format in FORMATS:
        rows = pack(format)(jnp.asarray(tokens))
        assert rows.tolist() == pack(format)(tokens).tolist()
        assert pack(format)(jnp.asarray(tokens, jnp.bfloat16)).tolist() == rows.tolist()
        decoded = jnp.from_dlpack(unpack(format)(jnp.from_dlpack(rows), 64))
        assert decoded.dtype == jnp.bfloat16
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"out: expected a writable array"):
            unpack(format)(rows, 64, out=jnp.zeros((5, 64), jnp.bfloat16))


@pytest.mark.parametrize("format", FORMATS)
def test_no_tokens(format: str) -> None:
    rows = pack(format)(np.zeros((0, 64), np.float32))
    assert rows.shape == (0, nvte_ep.row_bytes(format, 64))
    assert unpack(format)(rows, 64).shape == (0, 64)
    for part in quantize(format)(np.zeros((0, 64), np.float32)):
        assert part.shape[0] == 0


@pytest.mark.parametrize("format", FORMATS)
def test_strided_rows(format: str) -> None:
    wide = tokens_of(8, 128)
    part = wide[::2, 32:96]
    width = nvte_ep.row_bytes(format, 64)
    expected = pack(format)(part.copy()).numpy()
    buffer = np.full((4, width + 32), 0xAB, np.uint8)
    out = buffer[:, 16 : 16 + width]
    if out.ctypes.data % 16:  # rows begin at multiples of 16
        shift = -buffer.ctypes.data % 16
        out = buffer.reshape(-1)[shift : shift + 3 * (width + 32) + width]
        out = np.lib.stride_tricks.as_strided(out, (4, width), (width + 32, 1))
    assert pack(format)(part, out=out) is out
    assert (out == expected).all()
    assert (buffer == 0xAB).sum() >= 4 * 32 - (expected == 0xAB).sum()
    assert unpack(format)(out, 64).tolist() == unpack(format)(expected, 64).tolist()


@pytest.mark.parametrize("format", FORMATS)
def test_out_that_is_refused(format: str) -> None:
    tokens = tokens_of(4, 64)
    width = nvte_ep.row_bytes(format, 64)
    rows = pack(format)(tokens)
    read_only = np.zeros((4, width), np.uint8)
    read_only.flags.writeable = False
    for out in (
        np.zeros((3, width), np.uint8),
        np.zeros((4, width + 16), np.uint8),
        np.zeros((4, width), np.float32),
        np.zeros(4 * width, np.uint8),
        read_only,
        [0],
    ):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"_pack: out: expected"):
            pack(format)(tokens, out=out)
    for out in (np.zeros((4, 32), np.float32), np.zeros((4, 64), np.int32), np.zeros((5, 64), np.float16)):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"_unpack: out: expected"):
            unpack(format)(rows, 64, out=out)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"out: expected float16, as dtype says"):
        unpack(format)(rows, 64, out=np.zeros((4, 64), np.float32), dtype="float16")


@pytest.mark.parametrize("format", FORMATS)
def test_input_that_is_refused(format: str) -> None:
    function = f"nvte_ep_{format}_pack: tokens: expected"
    for tokens in (np.zeros(64, np.float32), np.zeros((2, 2, 64), np.float32)):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=rf"{function} 2 dimensions"):
            pack(format)(tokens)
    for tokens in (np.zeros((2, 64), np.float64), np.zeros((2, 64), np.int32)):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=function):
            pack(format)(tokens)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=rf"{function} \[T, H\], H a multiple of .*H = 40"):
        pack(format)(np.zeros((2, 40), np.float32))
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"rows"):
        unpack(format)(np.zeros((2, 17), np.uint8), 64)
    for hidden in (-16, 0, 7):
        with pytest.raises(
            nvte_ep.InvalidArgumentError, match=rf"{format}_unpack: hidden: expected .*{hidden}"
        ):
            unpack(format)(np.zeros((2, 128), np.uint8), hidden)
    receive = getattr(nvte_ep, f"{format}_direct_receive")
    for name, value in (("alignment", 24), ("hidden", -64)):
        settings = {"hidden": 64, "alignment": 32} | {name: value}
        with pytest.raises(nvte_ep.InvalidArgumentError, match=rf"{format}_direct_receive: {name}: expected"):
            receive(pack(format)(np.zeros((2, 64), np.float32)), rows_per_expert=[2], **settings)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"dtype"):
        unpack(format)(np.zeros((2, 128), np.uint8), 64, dtype="float64")


# ---- payload and scales apart --------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [32, 96, 384])
def test_nvfp4_parts_are_those_of_the_row(hidden: int) -> None:
    tokens = tokens_of(6, hidden)
    payload, scales, token_scales = nvte_ep.nvfp4_quantize(tokens)
    assert (payload.shape, scales.shape) == ((6, hidden // 2), (6, hidden // 16))
    assert (token_scales.shape, token_scales.dtype) == ((6,), "float32")
    rows = nvte_ep.nvfp4_pack(tokens).numpy()
    assert (rows[:, : hidden // 2] == payload.numpy()).all()
    assert (rows[:, hidden // 2 : hidden // 2 + hidden // 16] == scales.numpy()).all()
    decoded = nvte_ep.nvfp4_dequantize(payload, scales, token_scales, dtype="float32")
    assert decoded.tolist() == nvte_ep.nvfp4_unpack(rows, hidden, dtype="float32").tolist()


@pytest.mark.parametrize("hidden", [32, 96, 384])
def test_mxfp8_parts_are_those_of_the_row(hidden: int) -> None:
    tokens = tokens_of(6, hidden)
    payload, scales = nvte_ep.mxfp8_quantize(tokens)
    assert (payload.shape, scales.shape) == ((6, hidden), (6, hidden // 32))
    rows = nvte_ep.mxfp8_pack(tokens).numpy()
    assert (rows[:, :hidden] == payload.numpy()).all()
    assert (rows[:, hidden : hidden + hidden // 32] == scales.numpy()).all()
    decoded = nvte_ep.mxfp8_dequantize(payload, scales, dtype="float32")
    assert decoded.tolist() == nvte_ep.mxfp8_unpack(rows, hidden, dtype="float32").tolist()


def test_parts_into_typed_arrays(framework: Framework) -> None:
    torch = framework("torch")
    tokens = tokens_of(6, 64)
    payload = torch.empty(6, 32, dtype=torch.float4_e2m1fn_x2)
    scales = torch.empty(6, 4, dtype=torch.float8_e4m3fn)
    token_scales = torch.empty(6)
    out = (payload, scales, token_scales)
    assert nvte_ep.nvfp4_quantize(tokens, out=out) == out
    expected = nvte_ep.nvfp4_quantize(tokens)
    assert payload.view(torch.uint8).tolist() == expected[0].tolist()
    assert scales.view(torch.uint8).tolist() == expected[1].tolist()
    assert nvte_ep.nvfp4_dequantize(*out).tolist() == nvte_ep.nvfp4_dequantize(*expected).tolist()
    e8m0 = torch.empty(6, 2, dtype=torch.float8_e8m0fnu)
    e4m3 = torch.empty(6, 64, dtype=torch.float8_e4m3fn)
    nvte_ep.mxfp8_quantize(tokens, out=(e4m3, e8m0))
    assert e4m3.float().tolist() == E4M3[e4m3.view(torch.uint8).numpy()].tolist()
    assert (
        nvte_ep.mxfp8_dequantize(e4m3, e8m0).tolist()
        == nvte_ep.mxfp8_unpack(nvte_ep.mxfp8_pack(tokens), 64).tolist()
    )


def test_part_of_the_parts() -> None:
    tokens = tokens_of(4, 64)
    scales = np.zeros((4, 4), np.uint8)
    payload, same, token_scales = nvte_ep.nvfp4_quantize(tokens, out=(None, scales, None))
    assert same is scales
    assert (payload.shape, token_scales.shape) == ((4, 32), (4,))
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"out: expected a tuple of 3"):
        nvte_ep.nvfp4_quantize(tokens, out=scales)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"out: expected a tuple of 2"):
        nvte_ep.mxfp8_quantize(tokens, out=(None, scales, None))
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"scales"):
        nvte_ep.nvfp4_quantize(tokens, out=(None, scales[:, :3], None))


@pytest.mark.parametrize("scale", [2.0**-3, np.array([2.0**-3], np.float32), np.array(2.0**-3, np.float32)])
def test_tensor_scale(scale: Any) -> None:
    tokens = tokens_of(4, 64)
    payload, scales, token_scales = nvte_ep.nvfp4_quantize(tokens, tensor_scale=scale)
    assert token_scales is None
    decoded = nvte_ep.nvfp4_dequantize(payload, scales, tensor_scale=scale, dtype="float32").numpy()
    assert (decoded == decode_nvfp4(payload.numpy(), scales.numpy(), np.full(4, 0.125))).all()
    rows = nvte_ep.nvfp4_pack(tokens, tensor_scale=scale)
    assert nvte_ep.nvfp4_unpack(rows, 64, dtype="float32").tolist() == decoded.tolist()


def test_tensor_scale_with_token_scales_too() -> None:
    out = (None, None, np.zeros(4, np.float32))
    _, _, token_scales = nvte_ep.nvfp4_quantize(tokens_of(4, 64), tensor_scale=2.0**-3, out=out)
    assert token_scales is out[2]
    assert (token_scales == 0.125).all()


def test_findings_of_a_bad_tensor_scale() -> None:
    findings = np.zeros(1, np.int32)
    rows = nvte_ep.nvfp4_pack(tokens_of(2, 32), tensor_scale=0.3, findings=findings)
    assert findings.tolist() == [2]
    assert np.isnan(nvte_ep.nvfp4_unpack(rows, 32, dtype="float32").numpy()).all()


@pytest.mark.parametrize(
    "scale", [3.0, 0, -2.0, 2.0**106, 2.0**-117, float("nan"), float("inf"), np.float32(0.3)]
)
def test_a_number_that_is_no_tensor_scale(scale: Any) -> None:
    """Where nothing else would tell."""
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"nvfp4_pack: tensor_scale: expected"):
        nvte_ep.nvfp4_pack(tokens_of(2, 32), tensor_scale=scale)


@pytest.mark.parametrize("scale", [2.0**105, 2.0**-116, 1, np.float64(0.5)])
def test_a_number_that_is_a_tensor_scale(scale: Any) -> None:
    nvte_ep.nvfp4_pack(tokens_of(2, 32), tensor_scale=scale)


def test_row_count() -> None:
    tokens = tokens_of(6, 32)
    expected = nvte_ep.nvfp4_pack(tokens).numpy()
    for count in (4, np.array([4], np.int32), np.array(4, np.int64)):
        out = np.full((6, 32), 0xAB, np.uint8)
        nvte_ep.nvfp4_pack(tokens, out=out, row_count=count)
        assert (out[:4] == expected[:4]).all()
        assert (out[4:] == 0xAB).all()
    findings = np.zeros(1, np.int32)
    nvte_ep.mxfp8_pack(tokens, row_count=7, findings=findings)
    assert findings.tolist() == [1]


def test_nonfinite() -> None:
    tokens = tokens_of(3, 32)
    tokens[1, 5] = np.nan
    finite = nvte_ep.nvfp4_pack(np.delete(tokens, 1, axis=0)).numpy()
    marked = nvte_ep.nvfp4_pack(tokens)
    decoded = nvte_ep.nvfp4_unpack(marked, 32, dtype="float32").numpy()
    assert np.isnan(decoded[1]).all()
    assert (marked.numpy()[[0, 2]] == finite).all()
    saturated = nvte_ep.nvfp4_unpack(nvte_ep.nvfp4_pack(tokens, nonfinite="saturate"), 32, dtype="float32")
    assert np.isfinite(saturated.numpy()).all()


def test_stochastic_rounding() -> None:
    tokens = tokens_of(64, 64)
    kwargs: dict[str, Any] = {"rounding": "stochastic"}
    rows = nvte_ep.nvfp4_pack(tokens, rng_state=(1234, 5), **kwargs).numpy()
    array = np.array([1234, 5], np.int64)
    assert (nvte_ep.nvfp4_pack(tokens, rng_state=array, **kwargs).numpy() == rows).all()
    assert (nvte_ep.nvfp4_pack(tokens, rng_state=(1234, 6), **kwargs).numpy() != rows).any()
    assert (nvte_ep.nvfp4_pack(tokens, rng_state=(1235, 5), **kwargs).numpy() != rows).any()
    # Row ids go on from row_id_base: two halves draw what the whole drew.
    second = nvte_ep.nvfp4_pack(tokens[32:], rng_state=(1234, 5), row_id_base=32, **kwargs).numpy()
    assert (second == rows[32:]).all()
    unsigned = nvte_ep.nvfp4_pack(tokens, rng_state=((1 << 64) - 1, 5), **kwargs).numpy()
    assert (unsigned == nvte_ep.nvfp4_pack(tokens, rng_state=(-1, 5), **kwargs).numpy()).all()
    up = nvte_ep.nvfp4_pack(tokens, rng_state=(1234, 5), scale_rounding="up", **kwargs).numpy()
    assert (up != rows).any()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rounding": "stochastic"}, "rng_state"),
        ({"rounding": "stochastic", "rng_state": (1,)}, "rng_state"),
        ({"rounding": "stochastic", "rng_state": (1, 2, 3)}, "rng_state"),
        ({"rounding": "stochastic", "rng_state": (1.5, 2)}, "rng_state"),
        ({"rounding": "stochastic", "rng_state": (1 << 64, 2)}, "rng_state"),
        ({"rounding": "stochastic", "rng_state": np.zeros(2, np.int32)}, "rng_state"),
        ({"rounding": "sideways"}, "rounding"),
        ({"nonfinite": "ignore"}, "nonfinite"),
        ({"scale_rounding": 1}, "scale_rounding"),
        ({"row_id_base": 1 << 63}, "row_id_base"),
        ({"row_id_base": "0"}, "row_id_base"),
        ({"tensor_scale": np.ones(2, np.float32)}, "tensor_scale"),
        ({"tensor_scale": np.ones(1, np.float64)}, "tensor_scale"),
        ({"row_count": np.ones(1, np.float32)}, "row_count"),
        ({"findings": np.ones(1, np.int64)}, "findings"),
        ({"findings": 0}, "findings"),
    ],
)
def test_options_that_are_refused(arguments: dict[str, Any], named: str) -> None:
    tokens = tokens_of(2, 32)
    out = np.full((2, 32), 0xAB, np.uint8)
    with pytest.raises(
        nvte_ep.InvalidArgumentError, match=rf"nvte_ep_nvfp4_pack: (options\.)?{named}: expected"
    ):
        nvte_ep.nvfp4_pack(tokens, out=out, **arguments)
    assert (out == 0xAB).all()


# ---- operands ------------------------------------------------------------------------------------


def swizzled_index(row: Any, column: Any, columns: int) -> Any:
    tiles = -(-columns // 4)
    return ((row // 128) * tiles + column // 4) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


@given(rows=st.integers(0, 300), columns=st.integers(1, 13), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_swizzle(rows: int, columns: int, seed: int) -> None:
    scales = np.random.default_rng(seed).integers(1, 256, (rows, columns)).astype(np.uint8)
    swizzled = nvte_ep.scales_swizzle(scales)
    expected = np.zeros(-(-rows // 128) * 128 * -(-columns // 4) * 4, np.uint8)
    i, j = np.indices((rows, columns))
    expected[swizzled_index(i, j, columns)] = scales
    assert (swizzled.numpy() == expected).all()
    assert (nvte_ep.scales_unswizzle(swizzled, rows, columns).numpy() == scales).all()


@given(counts=st.lists(st.integers(0, 200), min_size=1, max_size=5), columns=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_swizzle_by_expert(counts: list[int], columns: int) -> None:
    rows = sum(counts)
    scales = (np.arange(rows * columns, dtype=np.int64) % 251 + 1).astype(np.uint8).reshape(rows, columns)
    swizzled = nvte_ep.scales_swizzle(scales, counts).numpy()
    begin = at = 0
    for count in counts:
        own = nvte_ep.scales_swizzle(scales[begin : begin + count]).numpy()
        assert (swizzled[at : at + own.size] == own).all()
        begin, at = begin + count, at + own.size
    back = nvte_ep.scales_unswizzle(swizzled, rows, columns, np.array(counts, np.int32))
    assert (back.numpy() == scales).all()


@pytest.mark.parametrize("alignment", [16, 32, 128])
def test_unswizzle_an_operand(alignment: int) -> None:
    """The scales of an operand, which has no room for slabs of any size, give the linear ones back."""
    counts = np.array([3, 0, 9, 1], np.int64) * alignment
    rows, hidden = int(counts.sum()), 96
    tokens = np.random.default_rng(7).standard_normal((rows, hidden)).astype(np.float32)
    packed = nvte_ep.nvfp4_pack(tokens)
    operands = {
        layout: nvte_ep.nvfp4_direct_receive(packed, hidden, counts, scale_layout=layout, alignment=alignment)
        for layout in ("swizzled", "linear")
    }
    back = nvte_ep.scales_unswizzle(operands["swizzled"].scales, rows, hidden // 16, counts)
    assert (back.numpy() == np.asarray(operands["linear"].scales).reshape(rows, -1)).all()


def test_operand_layout() -> None:
    layout = nvte_ep.operand_layout("nvfp4", 256, 512, 4, columnwise=True)
    assert list(layout.parts) == list(nvte_ep.operand.PARTS)
    parts = layout.parts
    assert parts["payload"].nbytes >= 512 * 128
    assert parts["amax"].nbytes == 16
    assert all(part.offset % 256 == 0 for part in parts.values())
    ordered = sorted(parts.values())
    assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(ordered))
    assert layout.total_bytes >= ordered[-1].offset + ordered[-1].nbytes
    rowwise = nvte_ep.operand_layout("mxfp8", 256, 512, 4)
    assert list(rowwise.parts) == ["payload", "scales"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": "bf16"}, NotImplementedError),
        ({"format": "fp3"}, ValueError),
        ({"hidden": 48}, ValueError),
        ({"capacity": 100}, ValueError),
        ({"num_experts": -1}, ValueError),
        ({"num_experts": 1 << 40}, ValueError),
        ({"alignment": 96}, ValueError),
        ({"alignment": 8, "columnwise": True}, NotImplementedError),
        ({"scale_layout": "diagonal"}, ValueError),
    ],
)
def test_operand_layout_that_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    arguments: dict[str, Any] = {"format": "nvfp4", "hidden": 64, "capacity": 256, "num_experts": 2} | change
    with pytest.raises(error):
        nvte_ep.operand_layout(**arguments)


COUNTS = [128, 0, 256, 128]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("index", [list, np.int32, np.int64])
def test_rowwise_operand_means_the_rows(format: str, index: Any) -> None:
    hidden, slots = 96, sum(COUNTS)
    rows = pack(format)(tokens_of(slots, hidden))
    counts = list(COUNTS) if index is list else np.array(COUNTS, index)
    operand = direct_receive(format)(rows, hidden, counts, scale_layout="linear")
    assert (operand.capacity, operand.num_experts, operand.format) == (slots, 4, format)
    expected = unpack(format)(rows, hidden, dtype="float32").numpy()
    payload, scales = operand.payload.numpy(), operand.scales.numpy()
    assert payload.shape == (slots, hidden // 2 if format == "nvfp4" else hidden)
    assert scales.shape == (slots, hidden // nvte_ep.format_info()[format].block)
    if format == "mxfp8":
        assert operand.amax is None
        assert (decode_mxfp8(payload, scales) == expected).all()
    else:
        expert = np.repeat(np.arange(4), COUNTS)
        scale = operand.expert_scale.numpy()
        assert operand.amax.tolist() == (2688 * scale).tolist()
        assert scale[1] == 0
        decoded = decode_nvfp4(payload, scales, scale[expert])
        # A small row's scales may round in the expert's range: two steps at most of E4M3's subnormals.
        step = np.repeat(6 * 2 * 2.0**-9 * scale, COUNTS)[:, None]
        assert (np.abs(decoded - expected) <= np.maximum(np.abs(expected) / 16, step)).all()
    swizzled = direct_receive(format)(rows, hidden, counts)
    expected_scales = nvte_ep.scales_swizzle(scales, COUNTS).numpy()
    assert (swizzled.payload.numpy() == payload).all()
    used = sum(-(-count // 128) * 128 for count in COUNTS) * -(-scales.shape[1] // 4) * 4
    assert (swizzled.scales.numpy()[:used] == expected_scales[:used]).all()


def test_columnwise_mxfp8_operand() -> None:
    hidden, counts = 64, [64, 32]
    rows = nvte_ep.mxfp8_pack(tokens_of(96, hidden))
    operand = nvte_ep.mxfp8_direct_receive(
        rows, hidden, counts, columnwise=True, scale_layout="linear", alignment=32
    )
    assert operand.columnwise_payload is not None
    assert operand.columnwise_scales is not None
    payload = operand.columnwise_payload.numpy()[: 96 * hidden].reshape(96, hidden)
    scales = operand.columnwise_scales.numpy()[: 3 * hidden].reshape(3, hidden)
    decoded = decode_mxfp8(payload.T, scales.T).T
    expected = nvte_ep.mxfp8_unpack(rows, hidden, dtype="float32").numpy()
    largest = np.abs(expected).reshape(3, 32, hidden).max(axis=1, keepdims=True)
    assert (np.abs(decoded - expected).reshape(3, 32, hidden) <= largest * 0.04).all()


def test_columnwise_nvfp4_operand() -> None:
    """Its values are those of the rows after the random Hadamard transform along 16 tokens."""
    hidden, counts = 32, [32, 16]
    tokens = tokens_of(48, hidden)
    rows = nvte_ep.nvfp4_pack(tokens)
    operand = nvte_ep.nvfp4_direct_receive(
        rows, hidden, counts, columnwise=True, scale_layout="linear", alignment=16
    )
    assert operand.columnwise_payload is not None
    assert operand.columnwise_scales is not None
    assert operand.columnwise_expert_scale is not None
    unpacked = nvte_ep.nvfp4_unpack(rows, hidden, dtype="float32").numpy().astype(np.float64)
    signs = np.array([-1.0 if 0xD7E8 >> bit & 1 else 1.0 for bit in range(16)])
    hadamard = np.array([[1.0]])
    for _ in range(4):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    transformed = np.einsum(
        "ij,bjh->bih", hadamard * 0.25, signs[None, :, None] * unpacked.reshape(3, 16, hidden)
    )
    payload, scales = operand.columnwise_payload.numpy(), operand.columnwise_scales.numpy()
    at = 0
    for expert, count in enumerate(counts):
        codes = nibbles(payload[at * hidden // 2 : (at + count) * hidden // 2].reshape(hidden, count // 2))
        own = scales[at // 16 * hidden : (at + count) // 16 * hidden].reshape(hidden, count // 16)
        factor = operand.columnwise_expert_scale.numpy()[expert]
        decoded = E2M1[codes] * np.repeat(np.abs(E4M3[own]), 16, axis=1) * factor
        expected = transformed[at // 16 : (at + count) // 16].reshape(count, hidden).T
        largest = np.abs(expected).reshape(hidden, -1, 16).max(axis=2, keepdims=True)
        error = np.abs(decoded - expected).reshape(hidden, -1, 16)
        assert (error <= largest * 0.27 + 1e-6).all()
        at += count


def test_columnwise_options() -> None:
    rows = nvte_ep.nvfp4_pack(tokens_of(128, 32))
    arguments: dict[str, Any] = {"columnwise": True, "alignment": 16}
    default = nvte_ep.nvfp4_direct_receive(rows, 32, [128], **arguments)
    widest = nvte_ep.nvfp4_direct_receive(rows, 32, [128], column_bound="max", **arguments)
    assert default.columnwise_amax is not None
    assert widest.columnwise_amax is not None
    assert default.columnwise_amax.tolist() <= widest.columnwise_amax.tolist()
    drawn = [
        nvte_ep.nvfp4_direct_receive(
            rows, 32, [128], rounding="stochastic", rng_state=(7, 0), rank=rank, **arguments
        )
        for rank in (0, 0, 1)
    ]
    codes = [
        operand.columnwise_payload.tolist() for operand in drawn if operand.columnwise_payload is not None
    ]
    assert codes[0] == codes[1]
    assert codes[0] != codes[2]


def test_fixed_expert_scale() -> None:
    rows = nvte_ep.nvfp4_pack(np.full((32, 32), 6.0, np.float32))
    findings = np.zeros(1, np.int32)
    scale = np.array([4.0, 2.0**-20], np.float32)
    operand = nvte_ep.nvfp4_direct_receive(
        rows, 32, [16, 16], alignment=16, fixed_expert_scale=scale, findings=findings
    )
    assert operand.expert_scale is not None
    assert operand.expert_scale.tolist() == scale.tolist()
    assert findings.tolist() == [4]  # the second expert's rows did not fit


@pytest.mark.parametrize("format", FORMATS)
def test_counts_that_do_not_fit_are_clamped(format: str) -> None:
    rows = pack(format)(tokens_of(128, 32))
    findings = np.zeros(1, np.int32)
    direct_receive(format)(rows, 32, [128, 128], findings=findings)
    assert findings.tolist() == [1]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("counts", [[128, 128], [-128, 128], [64, 0], (3,)])
def test_counts_that_do_not_fit_are_refused_where_nothing_would_tell(format: str, counts: Any) -> None:
    rows = pack(format)(tokens_of(128, 32))
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"direct_receive: rows_per_expert: expected"):
        direct_receive(format)(rows, 32, counts)


@pytest.mark.parametrize("format", FORMATS)
def test_operand_in_the_callers_buffer(format: str) -> None:
    rows = pack(format)(tokens_of(128, 32))
    total = nvte_ep.operand_layout(format, 32, 128, 2).total_bytes
    buffer = Array.empty((total + 64,)).numpy()
    buffer[...] = 0xAB
    operand = Operand(format, 32, 128, 2, buffer=buffer)
    assert operand.buffer is buffer
    assert direct_receive(format)(rows, 32, [128, 0], out=operand) is operand
    own = direct_receive(format)(rows, 32, [128, 0])
    for name, (offset, nbytes) in operand.layout.parts.items():
        part = getattr(operand, name)
        assert part.pointer == buffer.ctypes.data + offset
        assert part.nbytes == nbytes
    assert (operand.payload.numpy() == own.payload.numpy()).all()
    assert (buffer[total:] == 0xAB).all()
    assert repr(operand).startswith(f"Operand({format}, hidden=32, capacity=128, num_experts=2")


def test_operand_in_a_torch_buffer(framework: Framework) -> None:
    torch = framework("torch")
    total = nvte_ep.operand_layout("nvfp4", 32, 128, 1).total_bytes
    big = torch.zeros(total + 256, dtype=torch.uint8)
    shift = -big.data_ptr() % 256
    operand = nvte_ep.nvfp4_direct_receive(
        nvte_ep.nvfp4_pack(tokens_of(128, 32)),
        32,
        [128],
        out=Operand("nvfp4", 32, 128, 1, buffer=big[shift:]),
    )
    address = big.data_ptr() + shift
    del big
    payload = torch.from_dlpack(operand.payload)
    assert payload.data_ptr() == address + operand.layout.parts["payload"].offset
    del operand
    assert payload.sum() > 0


def test_buffers_that_are_refused() -> None:
    total = nvte_ep.operand_layout("nvfp4", 32, 128, 1).total_bytes
    aligned = Array.empty((total + 256,)).numpy()
    read_only = Array.empty((total,)).numpy()
    read_only.flags.writeable = False
    for buffer in (
        aligned[: total - 1],
        aligned[1:],
        aligned.view(np.float32),
        aligned.reshape(1, -1),
        read_only,
    ):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"nvte_ep_operand_bind: buffer: expected"):
            Operand("nvfp4", 32, 128, 1, buffer=buffer)


def test_direct_receive_that_is_refused() -> None:
    rows = nvte_ep.nvfp4_pack(tokens_of(128, 64))
    for counts, named in (
        (None, "rows_per_expert"),
        ([1.5], "rows_per_expert"),
        ([[128]], "rows_per_expert"),
        ([1 << 70], "rows_per_expert"),
        ([[1], [2, 3]], "rows_per_expert"),
        (np.array([128.0]), "rows_per_expert"),
        (np.array([128], np.int16), "rows_per_expert"),
    ):
        with pytest.raises(nvte_ep.InvalidArgumentError, match=rf"{named}: expected"):
            nvte_ep.nvfp4_direct_receive(rows, 64, counts)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"out: expected an Operand of hidden 64"):
        nvte_ep.nvfp4_direct_receive(rows, 64, [128], out=Operand("nvfp4", 32, 128, 1))
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"out: expected an Operand"):
        nvte_ep.nvfp4_direct_receive(rows, 64, [128], out=np.zeros(4))
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"operand"):
        nvte_ep.nvfp4_direct_receive(rows, 64, [128], out=Operand("mxfp8", 64, 128, 1))
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"rows"):
        nvte_ep.nvfp4_direct_receive(rows, 32, [128])
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"rows_per_expert"):
        nvte_ep.nvfp4_direct_receive(rows, 64, [128, 0], out=Operand("nvfp4", 64, 128, 1))


def test_codecs_run_in_many_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    tokens = [tokens_of(64, 256, seed) for seed in range(8)]
    alone = [nvte_ep.nvfp4_pack(each).tolist() for each in tokens]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda each: nvte_ep.nvfp4_pack(each).tolist(), tokens * 4)) == alone * 4


# ---- arguments of the wrong kind -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: nvte_ep.scales_swizzle(None), "scales"),
        (lambda: nvte_ep.scales_unswizzle(None, 4, 4), "swizzled"),
        (lambda: nvte_ep.nvfp4_unpack(None, 32), "rows"),
        (lambda: nvte_ep.mxfp8_unpack(None, 32), "rows"),
        (lambda: nvte_ep.nvfp4_dequantize(None, None), "payload"),
        (lambda: nvte_ep.mxfp8_dequantize(None, None), "payload"),
        (lambda: nvte_ep.mxfp8_dequantize(np.zeros((1, 32), np.uint8), None), "scales"),
        (lambda: nvte_ep.nvfp4_pack(None), "tokens"),
        (lambda: nvte_ep.mxfp8_quantize(None), "tokens"),
        (lambda: nvte_ep.nvfp4_direct_receive(None, 32, [0]), "rows"),
        (lambda: nvte_ep.nvfp4_direct_receive(np.zeros((1, 32), np.uint8), 32, None), "rows_per_expert"),
        (lambda: nvte_ep.row_bytes(["nvfp4"], 32), "format"),  # type: ignore[arg-type]
        (lambda: nvte_ep.operand_layout("nvfp4", 32, 128, 1, columnwise="yes"), "columnwise"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_left_out(call: Callable[[], Any], named: str) -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match=rf"nvte_ep_\w+: {named}: expected"):
        call()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tensor_scale", 10**400),
        ("tensor_scale", 1e300),
        ("tensor_scale", 10**10000),
        ("row_count", 10**400),
        ("row_count", 1.5),
        ("row_id_base", 10**10000),
        ("rng_state", (0, 10**10000)),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, float)) else "huge",
)
def test_numbers_that_do_not_fit(option: str, value: Any) -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match=rf"nvte_ep_nvfp4_pack: {option}: expected"):
        nvte_ep.nvfp4_pack(np.zeros((2, 32), np.float32), **{option: value})


def test_shapes_that_do_not_fit_name_their_argument() -> None:
    scales = np.zeros(1024, np.uint8)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"scales_unswizzle: rows: expected"):
        nvte_ep.scales_unswizzle(scales, -4, 4)
    rows = nvte_ep.nvfp4_pack(tokens_of(2, 32))
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"nvfp4_unpack: hidden: expected rows of"):
        nvte_ep.nvfp4_unpack(rows, 2**31)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"nvfp4_unpack: hidden: expected a positive mul"):
        nvte_ep.nvfp4_unpack(rows, 2**40)
    parts = np.zeros((2, 16), np.uint8)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"out: expected a tuple of 3, got one of 2"):
        nvte_ep.nvfp4_quantize(tokens_of(2, 32), out=(parts, parts))


def test_numpy_numbers_are_numbers() -> None:
    tokens = np.ones((2, 32), np.float32)
    plain = nvte_ep.nvfp4_pack(tokens, tensor_scale=0.5, row_count=1).tolist()
    assert nvte_ep.nvfp4_pack(tokens, tensor_scale=np.float32(0.5), row_count=np.int32(1)).tolist() == plain


def test_types_have_names_in_errors() -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"got float64"):
        nvte_ep.nvfp4_pack(np.zeros((2, 32)))


def test_a_stated_dtype_is_that_of_out() -> None:
    rows = nvte_ep.mxfp8_pack(np.ones((2, 32), np.float32))
    assert nvte_ep.mxfp8_unpack(rows, 32, out=np.zeros((2, 32), np.float32)).tolist() == [[1.0] * 32] * 2
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"out: expected bfloat16, as dtype says"):
        nvte_ep.mxfp8_unpack(rows, 32, out=np.zeros((2, 32), np.float32), dtype="bfloat16")
