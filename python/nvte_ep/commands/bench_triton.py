# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Plain Triton kernels that quantise and decode MXFP8 and NVFP4: what `nvte-ep bench codecs` compares with,
in place of the kernels that users write or get from a compiler. Payload and scales are apart, NVFP4 has one
FP32 scale for the whole tensor. Short rather than tuned; the bytes are those of the library's quantize
functions (NVFP4: in tensor-scale mode) for finite values.
"""

from __future__ import annotations

import importlib
from typing import Any

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

BLOCKS = 64  # scale blocks of a program
COLUMNS = 1024  # elements of a program that decodes


@triton.jit
def _mxfp8_quantize(x, payload, scales, blocks, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    element = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = block[:, None] < blocks
    values = tl.load(x + element, mask=inside, other=0.0).to(tl.float32)
    # E8M0, rounded up: the exponent, and one more where the mantissa is not zero.
    bits = (tl.max(tl.abs(values), axis=1) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ((exponent != 0) | (mantissa > 0x400000))
    code = exponent + up.to(tl.int32)
    inverse = tl.where(code == 254, 0x400000, (254 - code) << 23).to(tl.float32, bitcast=True)
    codes = (values * inverse[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(payload + element, codes, mask=inside)
    tl.store(scales + block, code.to(tl.uint8), mask=block < blocks)


@triton.jit
def _nvfp4_quantize(x, payload, scales, blocks, scale, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    element = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = block[:, None] < blocks
    values = tl.load(x + element, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(values), axis=1)
    block_scale = tl.minimum(amax * (scale * (1.0 / 6.0)), 448.0).to(tl.float8e4nv)
    divisor = block_scale.to(tl.float32) * (1.0 / scale)
    one = tl.full((BLOCKS,), 1.0, tl.float32)
    multiplier = tl.where(divisor == 0, 3.4028234663852886e38, tl.div_rn(one, divisor))
    scaled = values * multiplier[:, None]
    a = tl.abs(scaled)
    # E2M1, ties to even: how many of the seven midpoints lie below.
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (
        (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    )
    code |= (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    low, high = tl.split(tl.reshape(code, (BLOCKS, 8, 2)))
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(payload + byte, (low | (high << 4)).to(tl.uint8), mask=inside)
    tl.store(scales + block, block_scale.to(tl.uint8, bitcast=True), mask=block < blocks)


@triton.jit
def _mxfp8_dequantize(payload, payload_stride, scales, scales_stride, out, hidden, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    codes = tl.load(payload + row * payload_stride + column, mask=inside, other=0)
    code = tl.load(scales + row * scales_stride + column // 32, mask=inside, other=127).to(tl.int32)
    scale = tl.where(code == 0, 0x400000, code << 23).to(tl.float32, bitcast=True)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    tl.store(out + row * hidden + column, values.to(tl.bfloat16), mask=inside)


@triton.jit
def _e2m1_value(code):
    exponent = (code >> 1) & 3
    half = (code & 1).to(tl.float32) * 0.5
    power = ((exponent + 126) << 23).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, half, (1.0 + half) * power)
    return magnitude * tl.where((code & 8) != 0, -1.0, 1.0)  # -0 too


@triton.jit
def _nvfp4_dequantize(
    payload,
    payload_stride,
    scales,
    scales_stride,
    token_scales,
    token_stride,
    out,
    hidden,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    inside = byte < hidden // 2
    codes = tl.load(payload + row * payload_stride + byte, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + row * scales_stride + byte // 8, mask=inside, other=0)
    scale = scale.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.load(token_scales + row * token_stride)
    values = tl.interleave(_e2m1_value(codes & 15) * scale, _e2m1_value(codes >> 4) * scale)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + row * hidden + column, values.to(tl.bfloat16), mask=column < hidden)


def mxfp8_quantize(x: Any, payload: Any, scales: Any) -> None:
    """BF16 [T, H] to uint8 [T, H] and [T, H/32]; all compact."""
    blocks = scales.numel()
    _mxfp8_quantize[(triton.cdiv(blocks, BLOCKS),)](x, payload, scales, blocks, BLOCKS=BLOCKS)


def nvfp4_quantize(x: Any, payload: Any, scales: Any, scale: float = 1.0) -> None:
    """BF16 [T, H] to uint8 [T, H/2] and [T, H/16]; all compact. `scale` multiplies the block scales."""
    blocks = scales.numel()
    _nvfp4_quantize[(triton.cdiv(blocks, BLOCKS),)](x, payload, scales, blocks, scale, BLOCKS=BLOCKS)


def mxfp8_dequantize(payload: Any, scales: Any, out: Any) -> None:
    """The inverse; rows of payload and scales may have any stride."""
    rows, hidden = out.shape
    _mxfp8_dequantize[(rows, triton.cdiv(hidden, COLUMNS))](
        payload, payload.stride(0), scales, scales.stride(0), out, hidden, COLUMNS=COLUMNS
    )


def nvfp4_dequantize(payload: Any, scales: Any, token_scales: Any, out: Any) -> None:
    """The inverse, with an FP32 scale for each token."""
    rows, hidden = out.shape
    _nvfp4_dequantize[(rows, triton.cdiv(hidden, COLUMNS))](
        payload,
        payload.stride(0),
        scales,
        scales.stride(0),
        token_scales,
        token_scales.stride(0),
        out,
        hidden,
        COLUMNS=COLUMNS,
    )
