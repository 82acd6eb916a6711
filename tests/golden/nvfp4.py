"""NVFP4: rows, their decoding, and the operand made from received rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import pairwise

import layout
import numpy as np
import philox
from codes import (
    E2M1_DECODE,
    E4M3_DECODE,
    E4M3_NAN,
    MAX_TOKEN_EXPONENT,
    MIN_TOKEN_EXPONENT,
    encode_e2m1,
    encode_e2m1_stochastic,
    encode_e4m3,
    encode_e4m3_up,
    round_to_bf16,
    token_exponent,
    widen_bf16,
)
from exact import (
    INF,
    MAX,
    NAN,
    QUARTER,
    Bits,
    Bytes,
    Flags,
    Ints,
    add,
    constant,
    is_nan,
    magnitude,
    multiply,
    negate,
    power_of_two,
    reciprocal,
)

SIXTH = constant(Fraction(1, 6))
SIGN_MASK = 0xD7E8  # bit i: input i of the Hadamard transform is negated


@dataclass(frozen=True)
class Random:
    """State of stochastic rounding."""

    seed: int
    offset: int


def encode_blocks(x: Bits, exponent: Ints, scale_up: bool, random: Bytes | None) -> tuple[Bytes, Bytes]:
    """Blocks x [..., 16] under the second-level scale 2^exponent [...]: (scales [...], codes [..., 16])."""
    encode_scale = power_of_two(-exponent)
    numbers = np.where(is_nan(x), 0, magnitude(x)).astype(np.uint32)
    amax = np.where(is_nan(x).all(axis=-1), NAN, numbers.max(axis=-1)).astype(np.uint32)
    product = multiply(amax, multiply(encode_scale, SIXTH))
    product = np.where(is_nan(product), MAX, np.minimum(product, MAX)).astype(np.uint32)
    scales = encode_e4m3_up(product) if scale_up else encode_e4m3(product)
    inverse = reciprocal(multiply(E4M3_DECODE[scales], power_of_two(exponent)))
    inverse = np.minimum(inverse, np.uint32(MAX))
    scaled = multiply(x, inverse[..., None])
    return scales, encode_e2m1(scaled) if random is None else encode_e2m1_stochastic(scaled, random)


def join_nibbles(codes: Bytes) -> Bytes:
    result: Bytes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return result


def split_nibbles(payload: Bytes) -> Bytes:
    return np.stack([payload & 15, payload >> 4], axis=-1).reshape((*payload.shape[:-1], -1))


@dataclass(frozen=True)
class Quantised:
    payload: Bytes  # [T, H/2]
    scales: Bytes  # [T, H/16]
    token_scales: Bits  # [T]


def quantise(
    x: Bits,
    *,
    random: Random | None = None,
    row_id_base: int = 0,
    scale_up: bool = False,
    saturate: bool = False,
    tensor_exponent: int | None = None,
) -> Quantised:
    """Tokens x [T, H] as FP32 bits."""
    tokens, hidden = x.shape
    not_finite = magnitude(x) >= INF
    amax = np.where(is_nan(x), 0, magnitude(x)).max(axis=1).astype(np.uint32)
    exponent = token_exponent(amax)
    if tensor_exponent is not None:
        exponent = np.full(tokens, tensor_exponent, np.int64)
    blocks = x.reshape(tokens, hidden // 16, 16)
    draws = None
    if random is not None:
        first = [(row_id_base + row) * (hidden // 16) % 2**64 for row in range(tokens)]
        block_id = np.array(first, np.uint64)[:, None] + np.arange(hidden // 16, dtype=np.uint64)
        draws = philox.random_bytes(random.seed, random.offset, philox.PACK, block_id)
    scales, codes = encode_blocks(blocks, exponent[:, None], scale_up, draws)
    payload = join_nibbles(codes.reshape(tokens, hidden))
    zero = (magnitude(x) == 0).all(axis=1)
    payload[zero], scales[zero] = 0, 0
    token_scales = power_of_two(exponent)
    if tensor_exponent is None:
        token_scales[zero] = 0
    if not saturate:
        token_scales[not_finite.any(axis=1)] = NAN
    return Quantised(payload, scales, token_scales)


def join_row(parts: Quantised) -> Bytes:
    tokens, half = parts.payload.shape
    rows = np.zeros((tokens, layout.nvfp4_row_bytes(half * 2)), np.uint8)
    at = layout.nvfp4_token_scale_at(half * 2)
    rows[:, :half] = parts.payload
    rows[:, half : half + parts.scales.shape[1]] = parts.scales
    rows[:, at : at + 4] = parts.token_scales.astype("<u4").view(np.uint8).reshape(tokens, 4)
    return rows


def split_row(rows: Bytes, hidden: int) -> Quantised:
    half, at = hidden // 2, layout.nvfp4_token_scale_at(hidden)
    token_scales = np.ascontiguousarray(rows[:, at : at + 4]).view("<u4").ravel().astype(np.uint32)
    return Quantised(rows[:, :half], rows[:, half : half + hidden // 16], token_scales)


def legal_token_scale(bits: Bits) -> Bits:
    """The scale itself if it is +0 or 2^k with k in [-116, 105], else NaN."""
    exponent = (bits >> 23).astype(np.int64) - 127  # a sign bit makes it too large
    power = (bits & 0x7FFFFF == 0) & (exponent >= MIN_TOKEN_EXPONENT) & (exponent <= MAX_TOKEN_EXPONENT)
    return np.where(power | (bits == 0), bits, NAN).astype(np.uint32)


def decode(parts: Quantised) -> Bits:
    """[T, H] FP32 bits, exact."""
    scale = multiply(E4M3_DECODE[parts.scales & 0x7F], legal_token_scale(parts.token_scales)[:, None])
    return multiply(E2M1_DECODE[split_nibbles(parts.payload)], np.repeat(scale, 16, axis=1))


def hadamard(x: Bits) -> Bits:
    """x [..., 16, H], finite: signs, butterflies with strides 1, 2, 4, 8 along the 16 tokens, a quarter,
    +0.0 (which turns -0 into +0), BF16. Returned as FP32 bits."""
    y = x.copy()
    for i in range(16):
        if SIGN_MASK >> i & 1:
            y[..., i, :] = negate(y[..., i, :])
    for stride in (1, 2, 4, 8):
        upper = [i for i in range(16) if not i & stride]
        lower = [i + stride for i in upper]
        a, b = y[..., upper, :], y[..., lower, :]
        y[..., upper, :], y[..., lower, :] = add(a, b), add(a, negate(b))
    y = add(multiply(y, np.uint32(QUARTER)), np.uint32(0))
    return widen_bf16(round_to_bf16(y))


def column_exponent(live: Flags, exponent: Ints, expert_exponent: int, bound: str) -> int:
    """c_e: 2688 * 2^c_e is not below any value of the transformed slab."""
    if bound == "max":
        return max(MIN_TOKEN_EXPONENT, expert_exponent + 2)
    terms = [
        max(1, 2**24 >> (expert_exponent - int(k))) if alive else 0
        for k, alive in zip(exponent, live, strict=True)
    ]
    largest = max(sum(terms[i : i + 16]) for i in range(0, len(terms), 16))
    return max(MIN_TOKEN_EXPONENT, expert_exponent - 26 + (largest - 1).bit_length())


def shift_down(scales: Bytes, distance: Ints) -> Bytes:
    """E4M3 block scales times 2^-distance, nearest even; a negative distance may saturate."""
    factor = power_of_two(np.clip(-distance, -140, 127))  # 448 * 2^-140 is as good as any smaller one
    return encode_e4m3(multiply(E4M3_DECODE[scales & 0x7F], factor))


@dataclass(frozen=True)
class Slots:
    """Received rows, taken apart."""

    scales: Bytes  # [slots, H/16]
    token_scales: Bits  # legal ones or NaN
    exponent: Ints  # where live
    live: Flags  # token scale neither 0 nor NaN
    values: Bits  # [slots, H]

    def slab(self, low: int, high: int) -> Slots:
        return Slots(*(getattr(self, field.name)[low:high] for field in fields(self)))


def open_rows(rows: Bytes, hidden: int) -> Slots:
    parts = split_row(rows, hidden)
    token_scales = legal_token_scale(parts.token_scales)
    live = ~is_nan(token_scales) & (token_scales != 0)
    return Slots(parts.scales, token_scales, (token_scales >> 23).astype(np.int64) - 127, live, decode(parts))


@dataclass(frozen=True)
class ExpertScale:
    """Second-level scales 2^k of one expert's operands; None: there is none; nan: it is NaN."""

    rowwise: int | None
    columnwise: int | None
    nan: bool = False

    def bits(self, exponent: int | None) -> int:
        if self.nan:
            return NAN
        return 0 if exponent is None else int(power_of_two(exponent))


def expert_scale(slab: Slots, bound: str) -> ExpertScale:
    if not slab.live.any():
        return ExpertScale(None, None)
    largest = int(slab.exponent[slab.live].max())
    return ExpertScale(largest, column_exponent(slab.live, slab.exponent, largest, bound))


def fixed_expert_scale(slab: Slots, scale: int) -> ExpertScale:
    """A fixed scale does not depend on the rows, and neither does the column's: 2^(K + 2)."""
    if not len(slab.live):
        return ExpertScale(None, None)
    legal = int(legal_token_scale(np.array([scale], np.uint32))[0])
    if legal in (0, NAN):
        return ExpertScale(0, 0, nan=True)
    return ExpertScale((legal >> 23) - 127, (legal >> 23) - 125)


def rowwise_scales(slab: Slots, scale: ExpertScale) -> Bytes:
    distance = np.where(slab.live, (scale.rowwise or 0) - slab.exponent, 0)
    shifted = shift_down(slab.scales, distance[:, None])
    shifted = np.where((slab.token_scales == 0)[:, None], 0, shifted)
    nan = (slab.scales & 0x7F == E4M3_NAN) | is_nan(slab.token_scales)[:, None] | scale.nan
    return np.where(nan, E4M3_NAN, shifted).astype(np.uint8)


def columnwise(
    values: Bits, exponent: int, scale_up: bool, random: Random | None, first_block_id: int
) -> tuple[Bytes, Bytes]:
    """Slab [T_e, H]: (payload [H, T_e/2], scales [H, T_e/16])."""
    count, hidden = values.shape
    blocks = values.reshape(count // 16, 16, hidden)
    hurt = is_nan(blocks).any(axis=1).T
    y = np.transpose(hadamard(np.where(is_nan(blocks), 0, blocks).astype(np.uint32)), (2, 0, 1))
    draws = None
    if random is not None:
        h, block = np.arange(hidden, dtype=np.uint64), np.arange(count // 16, dtype=np.uint64)
        block_id = np.uint64(first_block_id) + (h[:, None] << np.uint64(32)) + block
        draws = philox.random_bytes(random.seed, random.offset, philox.COLUMNWISE, block_id)
    scales, codes = encode_blocks(y, np.full(hurt.shape, exponent, np.int64), scale_up, draws)
    scales[hurt], codes[hurt] = E4M3_NAN, 7
    return join_nibbles(codes.reshape(hidden, count)), scales


@dataclass(frozen=True)
class Operand:
    """The parts of an operand but for the payload, which is the payload of the rows."""

    scales_linear: Bytes
    scales_swizzled: Bytes
    amax: Bits
    expert_scale: Bits
    columnwise_payload: Bytes | None = None
    columnwise_scales_linear: Bytes | None = None
    columnwise_scales_swizzled: Bytes | None = None
    columnwise_amax: Bits | None = None
    columnwise_expert_scale: Bits | None = None


def direct_receive(
    rows: Bytes,
    hidden: int,
    rows_per_expert: Sequence[int],
    *,
    with_columnwise: bool = True,
    bound: str = "l1",
    random: Random | None = None,
    rank: int = 0,
    scale_up: bool = False,
    fixed_scales: Bits | None = None,
) -> Operand:
    bounds = layout.offsets(rows_per_expert)
    slots = open_rows(rows[: bounds[-1]], hidden)
    slabs = [slots.slab(low, high) for low, high in pairwise(bounds)]
    if fixed_scales is None:
        seconds = [expert_scale(slab, bound) for slab in slabs]
    else:
        seconds = [
            fixed_expert_scale(slab, int(scale)) for slab, scale in zip(slabs, fixed_scales, strict=True)
        ]
    scales = np.concatenate([rowwise_scales(*pair) for pair in zip(slabs, seconds, strict=True)])
    expert_scales = np.array([second.bits(second.rowwise) for second in seconds], np.uint32)
    operand = Operand(
        scales_linear=scales,
        scales_swizzled=layout.swizzle_per_expert(scales, rows_per_expert),
        amax=multiply(constant(Fraction(2688)), expert_scales),
        expert_scale=expert_scales,
    )
    if not with_columnwise:
        return operand

    parts = []
    for slab, second, low in zip(slabs, seconds, bounds[:-1], strict=True):
        payload, column_scales = columnwise(
            slab.values, second.columnwise or 0, scale_up, random, rank << 54 | low // 16
        )
        if second.nan:
            payload[:], column_scales[:] = 0x77, E4M3_NAN
        parts.append((payload, column_scales))
    tall = layout.round_up(hidden, 128)
    scale_rows = layout.scale_row_offsets(rows_per_expert)
    column_tiles = np.full(scale_rows[-1] // 16 * tall, layout.UNTOUCHED, np.uint8)
    for (_, column_scales), low in zip(parts, scale_rows[:-1], strict=True):
        slab_tiles = layout.swizzle(column_scales)
        column_tiles[low // 16 * tall :][: len(slab_tiles)] = slab_tiles
    expert_scales = np.array([second.bits(second.columnwise) for second in seconds], np.uint32)
    return replace(
        operand,
        columnwise_payload=np.concatenate([payload.ravel() for payload, _ in parts]),
        columnwise_scales_linear=np.concatenate([column_scales.ravel() for _, column_scales in parts]),
        columnwise_scales_swizzled=column_tiles,
        columnwise_amax=multiply(constant(Fraction(2688)), expert_scales),
        columnwise_expert_scale=expert_scales,
    )
