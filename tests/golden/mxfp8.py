"""MXFP8: rows, their decoding, and the operand made from received rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import layout
import numpy as np
from codes import E4M3_DECODE, E8M0_DECODE, E8M0_MULTIPLIER, encode_e4m3, encode_e8m0
from exact import NAN, Bits, Bytes, constant, is_nan, magnitude, multiply

INVERSE_OF_448 = constant(Fraction(1, 448))


def encode_blocks(x: Bits) -> tuple[Bytes, Bytes]:
    """Blocks x [..., 32]: (scales [...], codes [..., 32])."""
    numbers = np.where(is_nan(x), 0, magnitude(x)).astype(np.uint32)
    amax = np.where(is_nan(x).all(axis=-1), NAN, numbers.max(axis=-1)).astype(np.uint32)
    scales = encode_e8m0(multiply(amax, INVERSE_OF_448))
    return scales, encode_e4m3(multiply(x, E8M0_MULTIPLIER[scales][..., None]))


def quantise(x: Bits) -> tuple[Bytes, Bytes]:
    """Tokens [T, H] as FP32 bits: (payload [T, H], scales [T, H/32])."""
    tokens, hidden = x.shape
    scales, codes = encode_blocks(x.reshape(tokens, hidden // 32, 32))
    return codes.reshape(tokens, hidden), scales


def join_row(payload: Bytes, scales: Bytes) -> Bytes:
    tokens, hidden = payload.shape
    rows = np.zeros((tokens, layout.mxfp8_row_bytes(hidden)), np.uint8)
    rows[:, :hidden] = payload
    rows[:, hidden : hidden + hidden // 32] = scales
    return rows


def split_row(rows: Bytes, hidden: int) -> tuple[Bytes, Bytes]:
    return rows[:, :hidden], rows[:, hidden : hidden + hidden // 32]


def decode(payload: Bytes, scales: Bytes) -> Bits:
    """[T, H] FP32 bits; the product is exact, subnormals included, or overflows to infinity."""
    return multiply(E4M3_DECODE[payload], E8M0_DECODE[np.repeat(scales, 32, axis=1)])


@dataclass(frozen=True)
class Operand:
    """The parts of an operand but for the payload, which is the payload of the rows."""

    scales_linear: Bytes
    scales_swizzled: Bytes
    columnwise_payload: Bytes | None = None
    columnwise_scales_linear: Bytes | None = None
    columnwise_scales_swizzled: Bytes | None = None


def direct_receive(
    rows: Bytes, hidden: int, rows_per_expert: Sequence[int], *, with_columnwise: bool = True
) -> Operand:
    bounds = layout.offsets(rows_per_expert)
    payload, scales = split_row(rows[: bounds[-1]], hidden)
    tiles = layout.swizzle_per_expert(scales, rows_per_expert)
    if not with_columnwise:
        return Operand(scales, tiles)

    blocks = decode(payload, scales).reshape(-1, 32, hidden)
    column_scales, codes = encode_blocks(np.transpose(blocks, (0, 2, 1)))  # [slots/32, H], [slots/32, H, 32]
    tall = layout.round_up(hidden, 128)
    scale_rows = layout.scale_row_offsets(rows_per_expert)
    column_tiles = np.full(scale_rows[-1] // 32 * tall, layout.UNTOUCHED, np.uint8)
    for (low, high), at in zip(pairwise(bounds), scale_rows[:-1], strict=True):
        slab_tiles = layout.swizzle(column_scales[low // 32 : high // 32].T)
        column_tiles[at // 32 * tall :][: len(slab_tiles)] = slab_tiles
    return Operand(
        scales,
        tiles,
        columnwise_payload=np.transpose(codes, (0, 2, 1)).reshape(-1, hidden),
        columnwise_scales_linear=column_scales,
        columnwise_scales_swizzled=column_tiles,
    )
