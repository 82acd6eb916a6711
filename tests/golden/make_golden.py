#!/usr/bin/env python3
"""Makes the golden vectors: what every backend of the library must produce, bit for bit.

    make_golden.py            writes vectors/ beside this file
    make_golden.py --check    makes them again elsewhere and compares byte for byte; status 1 if one differs

README.md says what each case holds. The files of this folder are an implementation of their own, in exact
integers; none of the library's sources is used.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path

import codes
import exact
import layout
import mxfp8
import numpy as np
import numpy.typing as npt
import nvfp4
import philox
from exact import INF, MAX, NAN, Bits, Bytes
from tokens import (
    BFLOAT16,
    DTYPES,
    FLOAT16,
    FLOAT32,
    Dtype,
    Numbers,
    companions,
    every_half,
    mixed_tokens,
    mxfp8_thresholds,
    nvfp4_code_thresholds,
    nvfp4_scale_thresholds,
    scaled,
)

# Bits of the codecs' findings.
TENSOR_SCALE = 2
EXPERT_SCALE = 4

AnyArray = npt.NDArray[np.generic]
Value = str | int | list[int]


class Vectors:
    """The cases of index.json and the arrays that they name."""

    def __init__(self) -> None:
        self.arrays: dict[str, AnyArray] = {}
        self.cases: list[dict[str, Value]] = []

    def case(self, name: str, kind: str, arrays: Mapping[str, AnyArray | str], **parameters: Value) -> None:
        """An array may be the path of one that another case has stored."""
        entry: dict[str, Value] = {"name": name, "kind": kind, **parameters}
        for key, array in arrays.items():
            path = array if isinstance(array, str) else f"{name}/{key}.npy"
            if not isinstance(array, str):
                if path in self.arrays:
                    raise ValueError(f"{path} twice")
                self.arrays[path] = array
            elif path not in self.arrays:
                raise ValueError(f"{path} is not there")
            entry[key] = path
        self.cases.append(entry)

    def write(self, folder: Path) -> None:
        for path, array in self.arrays.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
            with file.open("wb") as stream:
                np.lib.format.write_array(stream, little, version=(1, 0), allow_pickle=False)
        lines = ",\n".join("  " + json.dumps(case) for case in self.cases)
        (folder / "index.json").write_text(f'{{"cases": [\n{lines}\n]}}\n')


def both_signs(x: Bits) -> Bits:
    return np.concatenate([x, x | np.uint32(0x80000000)])


def specials() -> Bits:
    return np.array([0, 1, 2, 0x400000, 0x7FFFFF, 0x800000, MAX, INF, INF + 1, NAN, 0x7FFFFFFF], np.uint32)


def tables(out: Vectors, numbers: Numbers) -> None:
    """What single functions give for single values."""
    for name, y in (
        ("e2m1_decode", codes.E2M1_DECODE),
        ("e4m3_decode", codes.E4M3_DECODE),
        ("e8m0_decode", codes.E8M0_DECODE),
        ("e8m0_multiplier", codes.E8M0_MULTIPLIER),
    ):
        out.case(name, name, {"y": y})

    random = numbers.finite(0, 254, 500) & np.uint32(0x7FFFFFFF)
    e4m3 = np.concatenate([codes.neighbours(codes.E4M3_NEAREST), codes.neighbours(codes.E4M3_MAGNITUDES)])
    near_e4m3 = numbers.finite(115, 137, 500) & np.uint32(0x7FFFFFFF)
    x = both_signs(np.concatenate([specials(), e4m3, random, near_e4m3]))
    out.case("e4m3_encode", "e4m3_encode", {"x": x, "y": codes.encode_e4m3(x)})
    x = x[x <= INF]
    out.case("e4m3_encode_up", "e4m3_encode_up", {"x": x, "y": codes.encode_e4m3_up(x)})
    distances = np.arange(25)
    shifted = np.stack([nvfp4.shift_down(np.full(25, b, np.uint8), distances) for b in range(127)])
    out.case("e4m3_shift_down", "e4m3_shift_down", {"y": shifted})

    e2m1 = np.concatenate(
        [codes.neighbours(codes.E2M1_NEAREST, 2), codes.neighbours(codes.E2M1_MAGNITUDES, 2)]
    )
    near_e2m1 = numbers.finite(122, 130, 500) & np.uint32(0x7FFFFFFF)
    x = both_signs(np.concatenate([specials(), e2m1, random, near_e2m1]))
    out.case("e2m1_encode", "e2m1_encode", {"x": x, "y": codes.encode_e2m1(x)})
    x = both_signs(np.concatenate([specials(), e2m1, random[:40], near_e2m1[:60]]))
    draws = np.broadcast_to(np.arange(256, dtype=np.uint8), (len(x), 256))
    y = codes.encode_e2m1_stochastic(np.broadcast_to(x[:, None], draws.shape), draws)
    out.case("e2m1_stochastic", "e2m1_stochastic", {"x": x, "y": y})

    x = np.concatenate([specials(), codes.neighbours(codes.E8M0_DECODE[:255]), random])
    out.case("e8m0_encode", "e8m0_encode", {"x": x, "y": codes.encode_e8m0(x)})
    limits = exact.multiply(codes.E8M0_DECODE[:247], exact.constant(Fraction(448)))
    x = np.concatenate([specials(), codes.neighbours(limits, 2), random])
    y = codes.encode_e8m0(exact.multiply(x, mxfp8.INVERSE_OF_448))
    out.case("mxfp8_scale", "mxfp8_scale", {"x": x, "y": y})

    limits = exact.multiply(exact.power_of_two(np.arange(-130, 117)), exact.constant(Fraction(2688)))
    x = np.concatenate(
        [codes.neighbours(limits), random, np.array([1, 0x7FFFFF, 0x800000, MAX, INF], np.uint32)]
    )
    out.case("token_exponent", "token_exponent", {"x": x, "y": codes.token_exponent(x).astype(np.int8)})

    x = numbers.finite(0, 254, 600)
    x[100:400] = numbers.finite(100, 145, 300)
    x[400:] = (x[400:] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)  # ties of BF16
    ties16 = (numbers.finite(113, 142, 100) & np.uint32(0xFFFFE000)) | np.uint32(0x1000)
    edges16 = np.array([0x477FEFFF, 0x477FF000, 0x477FF001, 0x33000000, 0x33000001, 0x32FFFFFF], np.uint32)
    x = both_signs(np.concatenate([specials(), x & np.uint32(0x7FFFFFFF), ties16, edges16]))
    out.case("bf16_round", "bf16_round", {"x": x, "y": codes.round_to_bf16(x)})
    out.case("fp16_round", "fp16_round", {"x": x, "y": codes.round_to_fp16(x)})

    counter, key, y = (np.array(column, np.uint32) for column in zip(*philox.KNOWN_ANSWERS, strict=True))
    more = (numbers.words(29, 6) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    drawn = [
        philox.philox4x32(row[:4].astype(np.uint64), (int(row[4]), int(row[5]))).astype(np.uint32)
        for row in more
    ]
    out.case(
        "philox",
        "philox",
        {
            "counter": np.concatenate([counter, more[:, :4]]),
            "key": np.concatenate([key, more[:, 4:]]),
            "y": np.concatenate([y, np.stack(drawn)]),
        },
    )
    seeds, offsets, blocks = (numbers.words(32) for _ in range(3))
    offsets[:4] = 0, 1, 2**31, 2**63 - 1
    blocks[:4] = 0, 1, 2**32, 2**64 - 1
    streams = numbers.below(2, 32).astype(np.int32)
    drawn_bytes = [
        philox.random_bytes(int(seed), int(offset), int(stream), block)
        for seed, offset, stream, block in zip(seeds, offsets, streams, blocks, strict=True)
    ]
    out.case(
        "random_bytes",
        "random_bytes",
        {
            "seed": seeds.view(np.int64),
            "offset": offsets.view(np.int64),
            "stream": streams,
            "block_id": blocks,
            "y": np.stack(drawn_bytes),
        },
    )
    hadamard(out, numbers)


def one_e2m1_value(numbers: Numbers) -> np.uint32:
    value: np.uint32 = codes.E2M1_DECODE[1 + numbers.below(7, 1)][0]
    return value


def hadamard(out: Vectors, numbers: Numbers) -> None:
    """[n, 16] values of one column over 16 tokens, and their transform as BF16 bits."""
    digits = codes.E2M1_DECODE[numbers.below(16, 400, 16)]
    x = np.concatenate(
        [
            numbers.gaussian(50, 16),
            scaled(numbers.gaussian(100, 16), -numbers.below(40, 100, 16)),
            scaled(digits[:100], numbers.below(4, 100, 16)),
            scaled(digits[100:200], numbers.below(30, 100, 16)),
            scaled(digits[200:300], -125 + numbers.below(10, 100, 16)),
            scaled(digits[300:400], 100 + numbers.below(14, 100, 16)),
            np.full((1, 16), 0x80000000, np.uint32),
            np.full((1, 16), exact.ONE, np.uint32),
            np.eye(16, dtype=np.uint32) * np.uint32(exact.ONE),
        ]
    )
    # Large equal values that cancel in half of the sums: what is left of the others shows the order of sums.
    far = scaled(codes.E2M1_DECODE[numbers.below(16, 100, 16)], -18 - numbers.below(12, 100, 16))
    for row in far:
        row[numbers.below(16, 2 + int(numbers.below(3, 1)[0]))] = one_e2m1_value(numbers)
    x = np.concatenate([x, far])
    y = nvfp4.hadamard(x[:, :, None])[:, :, 0]
    out.case("hadamard", "hadamard", {"x": x, "y": codes.round_to_bf16(y)})


@dataclass(frozen=True)
class Tokens:
    """The input of a case: the values, and how a reader of the case gets at them."""

    dtype: Dtype
    x: Bits
    arrays: Mapping[str, AnyArray | str]
    parameters: Mapping[str, Value] = field(default_factory=dict)

    def described(self) -> dict[str, Value]:
        return {"dtype": self.dtype.name, "hidden": self.x.shape[1], **self.parameters}


def stored(dtype: Dtype, x: Bits) -> Tokens:
    return Tokens(dtype, x, {"tokens": dtype.store(x)})


def again(tokens: Tokens, name: str) -> Tokens:
    """The same tokens, which the named case has stored."""
    return Tokens(
        tokens.dtype, tokens.x, {key: f"{name}/{key}.npy" for key in tokens.arrays}, tokens.parameters
    )


def nvfp4_case(
    out: Vectors,
    name: str,
    tokens: Tokens,
    *,
    random: nvfp4.Random | None = None,
    row_id_base: int = 0,
    scale_up: bool = False,
    saturate: bool = False,
    tensor_exponent: int | None = None,
) -> None:
    parts = nvfp4.quantise(
        tokens.x,
        random=random,
        row_id_base=row_id_base,
        scale_up=scale_up,
        saturate=saturate,
        tensor_exponent=tensor_exponent,
    )
    parameters = tokens.described()
    arrays: dict[str, AnyArray | str] = {**tokens.arrays, "rows": nvfp4.join_row(parts)}
    if random is not None:
        parameters |= {"rounding": "stochastic", "seed": random.seed, "offset": random.offset}
        parameters |= {"row_id_base": row_id_base}
    if scale_up:
        parameters["scale_rounding"] = "up"
    if saturate:
        parameters["nonfinite"] = "saturate"
    if tensor_exponent is not None:
        parameters["tensor_scale"] = int(exact.power_of_two(tensor_exponent))
        # Without a token scale of its own, a token that is NaN can only say so in its block scales.
        apart = np.where(exact.is_nan(parts.token_scales)[:, None], codes.E4M3_NAN, parts.scales)
        arrays["scales_apart"] = apart.astype(np.uint8)
    out.case(name, "nvfp4_pack", arrays, **parameters)


def mxfp8_case(out: Vectors, name: str, tokens: Tokens) -> None:
    rows = mxfp8.join_row(*mxfp8.quantise(tokens.x))
    out.case(name, "mxfp8_pack", {**tokens.arrays, "rows": rows}, **tokens.described())


def nvfp4_pack(out: Vectors, numbers: Numbers) -> None:
    states = (nvfp4.Random(0x0123456789ABCDEF, 1), nvfp4.Random(-7, 2**62 + 12345), nvfp4.Random(42, -3))
    for hidden in (16, 32, 48, 384, 1040, 2880):
        for dtype in DTYPES:
            x = mixed_tokens(numbers, hidden, dtype)
            if hidden > 1000:
                x = x[numbers.below(8) :: 8]
            name = f"nvfp4_pack_{dtype.name}_{hidden}"
            tokens = stored(dtype, x)
            nvfp4_case(out, name, tokens)
            if hidden not in (32, 48, 384):
                continue
            tokens = again(tokens, name)
            nvfp4_case(out, f"{name}_saturate", tokens, saturate=True)
            nvfp4_case(out, f"{name}_up", tokens, scale_up=True)
            nvfp4_case(out, f"{name}_stochastic", tokens, random=states[0])
            far = 2**32 + 5
            nvfp4_case(out, f"{name}_stochastic_up", tokens, random=states[1], scale_up=True, row_id_base=far)
            if hidden == 48:
                far = 2**60 + 2**33 + 1
                nvfp4_case(
                    out,
                    f"{name}_stochastic_saturate",
                    tokens,
                    random=states[2],
                    saturate=True,
                    row_id_base=far,
                )
                tensor_scales(out, name, tokens, states[0])

    tokens = stored(FLOAT32, nvfp4_code_thresholds(numbers, (0, -116, 37, 105)))
    nvfp4_case(out, "nvfp4_code_thresholds", tokens)
    tokens = stored(FLOAT32, nvfp4_scale_thresholds(numbers, (0, -116)))
    nvfp4_case(out, "nvfp4_scale_thresholds", tokens)
    tokens = again(tokens, "nvfp4_scale_thresholds")
    nvfp4_case(out, "nvfp4_scale_thresholds_up", tokens, scale_up=True)
    nvfp4_case(out, "nvfp4_scale_thresholds_stochastic", tokens, random=states[1])


def tensor_scales(out: Vectors, name: str, tokens: Tokens, random: nvfp4.Random) -> None:
    """A scale from the caller in place of the token scales."""
    for exponent in (-116, -9, 0, 105):
        label = f"{name}_tensor_scale_{'minus_' if exponent < 0 else ''}{abs(exponent)}"
        nvfp4_case(out, label, tokens, tensor_exponent=exponent)
    nvfp4_case(
        out,
        f"{name}_tensor_scale_stochastic_up_saturate",
        tokens,
        tensor_exponent=-5,
        random=random,
        scale_up=True,
        saturate=True,
    )
    # No legal scale: every token is NaN, whatever it holds.
    count, hidden = tokens.x.shape
    parts = nvfp4.Quantised(
        np.zeros((count, hidden // 2), np.uint8),
        np.full((count, hidden // 16), codes.E4M3_NAN, np.uint8),
        np.full(count, NAN, np.uint32),
    )
    arrays = {**tokens.arrays, "tensor_scales": illegal_tensor_scales(), "rows": nvfp4.join_row(parts)}
    label = f"{name}_illegal_tensor_scale"
    out.case(label, "nvfp4_illegal_tensor_scale", arrays, **tokens.described(), findings=TENSOR_SCALE)


def illegal_tensor_scales() -> Bits:
    return np.concatenate([illegal_token_scales(), np.array([0], np.uint32)])


def illegal_token_scales() -> Bits:
    one, top, bottom = exact.ONE, int(exact.power_of_two(106)), int(exact.power_of_two(-117))
    return np.array(
        [
            *(0x80000000, 0x80000000 | one, one + 1, one + 0x400000, top, bottom, 1, 0x400000, MAX),
            *(INF, INF | 0x80000000, NAN, 0x7F800001, 0xFFC00000, 0xFFFFFFFF),
        ],
        np.uint32,
    )


def exhaustive(out: Vectors, numbers: Numbers) -> None:
    """All values of the 16-bit types. The tokens are not stored: a reader makes them as `input` says."""
    for dtype in (BFLOAT16, FLOAT16):
        every = every_half(dtype)
        tokens = Tokens(dtype, every.reshape(16, 4096), {}, {"input": "in_order"})
        nvfp4_case(out, f"nvfp4_every_{dtype.name}_in_order", tokens)
        mxfp8_case(out, f"mxfp8_every_{dtype.name}_in_order", tokens)

        x = np.concatenate([companions(numbers, every, dtype) for _ in range(2)])
        last = dtype.store(x[:, 15::16])
        tokens = Tokens(dtype, x, {"last": last}, {"input": "beside"})
        name = f"nvfp4_every_{dtype.name}_beside"
        nvfp4_case(out, name, tokens)
        mxfp8_case(out, f"mxfp8_every_{dtype.name}_beside", again(tokens, name))

        # Only the listed bytes of a row can differ from 0.
        alone = np.zeros((65536, 32), np.uint32)
        alone[:, 0] = every.ravel()
        nvfp4_rows = nvfp4.join_row(nvfp4.quantise(alone[:, :16]))
        mxfp8_rows = mxfp8.join_row(*mxfp8.quantise(alone))
        for form, hidden, rows, kept in (
            ("nvfp4", 16, nvfp4_rows, [0, 8, 14, 15]),
            ("mxfp8", 32, mxfp8_rows, [0, 32]),
        ):
            if np.delete(rows, kept, axis=1).any():
                raise AssertionError("a byte that is not kept is not zero")
            out.case(
                f"{form}_every_{dtype.name}_alone",
                f"{form}_pack",
                {"kept": rows[:, kept]},
                dtype=dtype.name,
                hidden=hidden,
                input="alone",
                kept_bytes=kept,
            )


def unpack_case(out: Vectors, name: str, kind: str, hidden: int, rows: Bytes | str, values: Bits) -> None:
    out.case(
        name,
        kind,
        {
            "rows": rows,
            "float32": values,
            "bfloat16": codes.round_to_bf16(values),
            "float16": codes.round_to_fp16(values),
        },
        hidden=hidden,
    )


def random_nvfp4_rows(numbers: Numbers, count: int, hidden: int, token_scales: Bits) -> Bytes:
    """Any codes; any block scales but NaN, some with a sign."""
    scales = (
        numbers.below(127, count, hidden // 16) | (numbers.below(9, count, hidden // 16) // 8 << 7)
    ).astype(np.uint8)
    return nvfp4.join_row(nvfp4.Quantised(numbers.bytes(count, hidden // 2), scales, token_scales))


def nvfp4_unpack(out: Vectors, numbers: Numbers) -> None:
    for hidden in (48, 384):
        path = f"nvfp4_pack_float32_{hidden}/rows.npy"
        rows = out.arrays[path].astype(np.uint8)
        unpack_case(
            out,
            f"nvfp4_unpack_{hidden}",
            "nvfp4_unpack",
            hidden,
            path,
            nvfp4.decode(nvfp4.split_row(rows, hidden)),
        )

    rows = random_nvfp4_rows(numbers, 222, 16, exact.power_of_two(np.arange(-116, 106)))
    unpack_case(
        out,
        "nvfp4_unpack_every_token_scale",
        "nvfp4_unpack",
        16,
        rows,
        nvfp4.decode(nvfp4.split_row(rows, 16)),
    )

    # Every block scale, NaN and signed ones too, with every code.
    payload = np.tile(nvfp4.join_nibbles(np.arange(16, dtype=np.uint8)), (3, 256))
    scales = np.tile(np.arange(256, dtype=np.uint8), (3, 1))
    token_scales = exact.power_of_two(np.array([-116, 0, 105]))
    rows = nvfp4.join_row(nvfp4.Quantised(payload, scales, token_scales))
    unpack_case(
        out, "nvfp4_unpack_every_scale", "nvfp4_unpack", 4096, rows, nvfp4.decode(nvfp4.split_row(rows, 4096))
    )

    hostile = np.concatenate([illegal_token_scales(), np.array([0, exact.ONE, 0, exact.ONE], np.uint32)])
    rows = random_nvfp4_rows(numbers, len(hostile), 96, hostile)
    rows[-2:, 48 + 3] = 0x7F
    rows[-2:, 48 + 5] = 0xFF
    unpack_case(
        out, "nvfp4_unpack_hostile", "nvfp4_unpack", 96, rows, nvfp4.decode(nvfp4.split_row(rows, 96))
    )


def mxfp8_pack(out: Vectors, numbers: Numbers) -> None:
    for hidden in (32, 96, 2720, 2880):
        for dtype in DTYPES:
            x = mixed_tokens(numbers, hidden, dtype)
            if hidden > 1000:
                x = x[numbers.below(10) :: 10]
            mxfp8_case(out, f"mxfp8_pack_{dtype.name}_{hidden}", stored(dtype, x))
    mxfp8_case(out, "mxfp8_thresholds", stored(FLOAT32, mxfp8_thresholds(numbers)))

    # Blocks of one very small value; the last two are subnormal BF16.
    small = [Fraction(1, 10**p) for p in range(35, 40)]
    x = np.array([exact.fp32_from_fraction(value) for value in small] + [0x000A0000, 0x00010000], np.uint32)
    mxfp8_case(out, "mxfp8_very_small", stored(FLOAT32, np.repeat(x, 32).reshape(7, 32)))


def mxfp8_unpack(out: Vectors, numbers: Numbers) -> None:
    for hidden in (32, 96):
        path = f"mxfp8_pack_float32_{hidden}/rows.npy"
        rows = out.arrays[path].astype(np.uint8)
        unpack_case(
            out,
            f"mxfp8_unpack_{hidden}",
            "mxfp8_unpack",
            hidden,
            path,
            mxfp8.decode(*mxfp8.split_row(rows, hidden)),
        )
    # Every scale with every 32nd code in each row, so that the eight rows have every pair.
    payload = (np.arange(32, dtype=np.int64) + 32 * np.arange(8)[:, None, None]).astype(np.uint8)
    payload = np.broadcast_to(payload, (8, 256, 32)).reshape(8, 8192)
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8), (8, 256))
    unpack_case(
        out,
        "mxfp8_unpack_every_pair",
        "mxfp8_unpack",
        8192,
        mxfp8.join_row(payload, scales),
        mxfp8.decode(payload, scales),
    )


def receive_case(
    out: Vectors,
    name: str,
    kind: str,
    hidden: int,
    alignment: int,
    rows_per_expert: Sequence[int],
    rows: Bytes | str,
    operand: nvfp4.Operand | mxfp8.Operand,
    more: Mapping[str, AnyArray],
    **parameters: Value,
) -> None:
    arrays: dict[str, AnyArray | str] = {"rows": rows, "rows_per_expert": np.array(rows_per_expert, np.int64)}
    arrays |= {
        part.name: array for part in fields(operand) if (array := getattr(operand, part.name)) is not None
    }
    arrays |= more
    out.case(name, kind, arrays, hidden=hidden, alignment=alignment, **parameters)


def received_rows(numbers: Numbers, hidden: int, slots: int, spread: int, top: int = 3) -> Bytes:
    """Packed tokens whose size varies by 2^spread, among them arbitrary bytes, zero rows, now and then a row
    that is NaN or has a block that is."""
    size = top - numbers.below(spread + 1, slots)
    x = scaled(numbers.gaussian(slots, hidden), np.maximum(size, -126)[:, None])
    rows = nvfp4.join_row(nvfp4.quantise(x))
    arbitrary = random_nvfp4_rows(numbers, slots, hidden, exact.power_of_two(np.maximum(size - 9, -116)))
    choice = numbers.below(16, slots)
    rows[choice < 5] = arbitrary[choice < 5]
    rows[choice == 15] = 0
    at = layout.nvfp4_token_scale_at(hidden)
    illegal = illegal_token_scales().astype("<u4").view(np.uint8).reshape(-1, 4)
    for slot in range(7, slots, 53):
        rows[slot, at : at + 4] = illegal[slot % len(illegal)]
    for slot in range(29, slots, 61):
        rows[slot, hidden // 2 + slot % (hidden // 16)] = 0x7F | (slot & 1) << 7
    for slot in range(17, slots, 67):
        rows[slot, at : at + 4] = 0  # a zero token whose other bytes are not zero
        rows[slot, hidden // 2] = 0x7F if slot % 2 else 0x3F
    return rows


def nvfp4_receive(out: Vectors, numbers: Numbers) -> None:
    def case(
        name: str, hidden: int, alignment: int, counts: Sequence[int], rows: Bytes, columnwise: bool = True
    ) -> None:
        operand = nvfp4.direct_receive(rows, hidden, counts, with_columnwise=columnwise)
        receive_case(out, name, "nvfp4_receive", hidden, alignment, counts, rows, operand, {})

    states = (nvfp4.Random(1234567, 0), nvfp4.Random(-1, -1))
    for hidden, alignment, counts, spread in (
        (32, 16, (16, 0, 48, 32), 12),
        (96, 32, (32, 64, 0, 96, 32), 40),
        (128, 128, (128, 0, 256), 16),
        (160, 64, (64, 0, 0, 192, 64), 20),
    ):
        total = sum(counts)
        rows = received_rows(numbers, hidden, total + alignment, spread)
        rows[total:] = numbers.bytes(alignment, rows.shape[1])  # past the slabs: never read
        if hidden in (96, 160):  # the last expert has rows, but only zero ones
            rows[total - counts[-1] : total] = 0
        name = f"nvfp4_receive_{hidden}"
        case(name, hidden, alignment, counts, rows)
        for suffix, bound, random, rank, scale_up in (
            ("max", "max", None, 0, False),
            ("up", "l1", None, 0, True),
            ("stochastic", "l1", states[0], 0, False),
            ("stochastic_rank", "l1", states[0], 1023, False),
            ("stochastic_max_up", "max", states[1], 5, True),
        ):
            parameters: dict[str, Value] = {"column_bound": bound}
            if scale_up:
                parameters["scale_rounding"] = "up"
            if random is not None:
                parameters |= {"rounding": "stochastic", "rank": rank}
                parameters |= {"seed": random.seed, "offset": random.offset}
            operand = nvfp4.direct_receive(
                rows, hidden, counts, bound=bound, random=random, rank=rank, scale_up=scale_up
            )
            path = f"{name}/rows.npy"
            receive_case(
                out,
                f"{name}_{suffix}",
                "nvfp4_receive",
                hidden,
                alignment,
                counts,
                path,
                operand,
                {},
                **parameters,
            )

    case("nvfp4_receive_2880", 2880, 16, (16, 32), received_rows(numbers, 2880, 48, 6))
    for label, top, spread in (("largest", 114, 9), ("smallest", -110, 20), ("widest", 114, 240)):
        case(f"nvfp4_receive_{label}", 32, 32, (32, 64), received_rows(numbers, 32, 96, spread, top))

    # Sums that cancel, and zeros of either sign.
    payload = np.full((64, 16), 0x22, np.uint8)
    payload[16:32] = 0x88
    payload[32:48] = numbers.bytes(1, 16)
    payload[48:, :8] = 0x80
    token_scales = np.full(64, exact.ONE, np.uint32)
    token_scales[35::4] = exact.power_of_two(-3)
    rows = nvfp4.join_row(nvfp4.Quantised(payload, np.full((64, 2), 0x38, np.uint8), token_scales))
    case("nvfp4_receive_cancel", 32, 16, (16,) * 4, rows)

    # The same, but far smaller rows are left where the large ones cancel: signs of zero show the order.
    pairs = ((0, 1), (0, 8), (3, 12), (0, 1, 2, 3))
    token_scales = exact.power_of_two(-16 - numbers.below(12, 64))
    rows = random_nvfp4_rows(numbers, 64, 64, token_scales)
    large = random_nvfp4_rows(numbers, 4, 64, exact.power_of_two(np.zeros(4, np.int64)))
    for slab, members in enumerate(pairs):
        for member in members:
            rows[16 * slab + member] = large[slab]
    case("nvfp4_receive_cancel_far", 64, 16, (16,) * 4, rows)

    # One and two live rows at the smallest token scales: the columnwise exponent is clamped.
    rows = np.zeros((64, layout.nvfp4_row_bytes(32)), np.uint8)
    for slab, (k, live) in enumerate(((-116, 1), (-116, 2), (-115, 1), (-113, 16))):
        token_scales = exact.power_of_two(np.full(live, k))
        rows[16 * slab + 5 :][:live] = random_nvfp4_rows(numbers, live, 32, token_scales)[
            : 64 - 16 * slab - 5
        ]
    case("nvfp4_receive_clamped_columns", 32, 16, (16,) * 4, rows)

    # Rows shifted by every distance from the largest; only the rowwise operand, which takes any alignment.
    rows = random_nvfp4_rows(numbers, 42, 2048, exact.power_of_two(5 - np.arange(42)))
    rows[:, 1024 : 1024 + 128] = np.tile(np.arange(128, dtype=np.uint8), (42, 1))
    case("nvfp4_receive_every_distance", 2048, 2, (42,), rows, columnwise=False)
    case(
        "nvfp4_receive_any_count",
        64,
        1,
        (3, 0, 5, 1, 0, 20),
        received_rows(numbers, 64, 29, 10),
        columnwise=False,
    )

    # Scales that the consumer fixed: for rows that fit, rows that saturate, zero rows and no rows.
    counts = (16, 32, 16, 0)
    rows = received_rows(numbers, 64, sum(counts), 14)
    rows[48:64] = 0
    for label, exponents, findings in (
        ("fits", (3, 9, 20, 3), 0),
        ("saturates", (1, -9, -116, 105), EXPERT_SCALE),
    ):
        fixed = exact.power_of_two(np.array(exponents))
        operand = nvfp4.direct_receive(rows, 64, counts, fixed_scales=fixed)
        for bound in ("l1", "max"):  # makes no difference here
            stored_rows = (
                rows if (label, bound) == ("fits", "l1") else "nvfp4_receive_fixed_scale_fits_l1/rows.npy"
            )
            receive_case(
                out,
                f"nvfp4_receive_fixed_scale_{label}_{bound}",
                "nvfp4_receive",
                64,
                16,
                counts,
                stored_rows,
                operand,
                {"fixed_expert_scale": fixed},
                column_bound=bound,
                findings=findings,
            )
    # Illegal ones.
    fixed = illegal_tensor_scales()
    per_expert = [16] * (len(fixed) - 1) + [0]
    rows = received_rows(numbers, 32, sum(per_expert), 14)
    operand = nvfp4.direct_receive(rows, 32, per_expert, fixed_scales=fixed)
    receive_case(
        out,
        "nvfp4_receive_illegal_fixed_scale",
        "nvfp4_receive",
        32,
        16,
        per_expert,
        rows,
        operand,
        {"fixed_expert_scale": fixed},
        findings=EXPERT_SCALE,
    )


def mxfp8_receive(out: Vectors, numbers: Numbers) -> None:
    for hidden, alignment, rows_per_expert in (
        (32, 32, (32, 0, 96)),
        (96, 64, (64, 128, 0, 64)),
        (128, 128, (128, 0, 256)),
        (160, 32, (32, 0, 160, 64)),
        (2880, 32, (32,)),
    ):
        total = sum(rows_per_expert)
        size = 3 - numbers.below(30, total)[:, None]
        x = scaled(numbers.gaussian(total, hidden), size)
        payload, scales = mxfp8.quantise(x)
        kind = numbers.below(12, total)
        arbitrary = numbers.bytes(total, hidden)
        arbitrary[arbitrary & 0x7F == 0x7F] = 0x7E
        payload[kind < 3] = arbitrary[kind < 3]
        scales[kind == 0] = numbers.below(256, *scales.shape)[kind == 0].astype(np.uint8)
        payload[kind == 11], scales[kind == 11] = 0, 0
        for slot in range(5, total, 37):
            payload[slot, slot % hidden] = 0x7F | (slot & 1) << 7
        for slot in range(9, total, 71):
            scales[slot, slot % scales.shape[1]] = (255, 254, 0, 1)[slot % 4]
        if hidden == 160:
            payload[-64:], scales[-64:] = 0, 0
        rows = mxfp8.join_row(payload, scales)
        if hidden < 1000:  # past the slabs: never read
            rows = np.concatenate([rows, numbers.bytes(alignment, rows.shape[1])])
        name = f"mxfp8_receive_{hidden}"
        operand = mxfp8.direct_receive(rows, hidden, rows_per_expert)
        receive_case(out, name, "mxfp8_receive", hidden, alignment, rows_per_expert, rows, operand, {})
    rows = mxfp8.join_row(*mxfp8.quantise(numbers.gaussian(29, 96)))
    counts = (3, 0, 5, 1, 0, 20)
    rows_only = mxfp8.direct_receive(rows, 96, counts, with_columnwise=False)
    receive_case(out, "mxfp8_receive_any_count", "mxfp8_receive", 96, 1, counts, rows, rows_only, {})


def swizzle(out: Vectors, numbers: Numbers) -> None:
    for rows, columns in (
        (1, 1),
        (3, 5),
        (31, 2),
        (128, 4),
        (129, 7),
        (200, 18),
        (257, 9),
        (384, 12),
        (0, 3),
    ):
        scales = numbers.bytes(rows, columns)
        out.case(
            f"swizzle_{rows}x{columns}",
            "swizzle",
            {
                "index": layout.swizzle_index(rows, columns).astype(np.int32),
                "scales": scales,
                "swizzled": layout.swizzle(scales),
            },
        )
    for columns, rows_per_expert in ((5, (3, 0, 129, 128, 1)), (8, (0, 0)), (6, (16, 32, 0, 16))):
        scales = numbers.bytes(sum(rows_per_expert), columns)
        out.case(
            f"swizzle_experts_{columns}",
            "swizzle",
            {
                "scales": scales,
                "swizzled": layout.swizzle_per_expert(scales, rows_per_expert),
                "rows_per_expert": np.array(rows_per_expert, np.int64),
            },
        )


def make() -> Vectors:
    numbers = Numbers(20250701)
    exact.self_check(
        np.concatenate(
            [numbers.finite(0, 254, 3000), numbers.finite(0, 3, 1000), numbers.finite(120, 134, 4000)]
        )
    )
    philox.self_check()
    out = Vectors()
    # Each part has a generator of its own, so that a change in one leaves the vectors of the others alone.
    for seed, part in enumerate(
        (
            tables,
            nvfp4_pack,
            nvfp4_unpack,
            mxfp8_pack,
            mxfp8_unpack,
            exhaustive,
            nvfp4_receive,
            mxfp8_receive,
            swizzle,
        )
    ):
        part(out, Numbers(seed << 32))
    return out


def difference(made: Path, kept: Path) -> list[str]:
    names = {path.relative_to(root) for root in (made, kept) for path in root.rglob("*") if path.is_file()}
    _, differing, missing = filecmp.cmpfiles(made, kept, [str(name) for name in names], shallow=False)
    return sorted(differing + missing)


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the golden vectors.")
    parser.add_argument(
        "--check", action="store_true", help="compare with what is there instead of writing it"
    )
    arguments = parser.parse_args()
    folder = Path(__file__).resolve().parent / "vectors"
    vectors = make()
    if not arguments.check:
        vectors.write(folder)
        kept = {str(folder / path) for path in vectors.arrays} | {str(folder / "index.json")}
        for stale in [path for path in folder.rglob("*") if path.is_file() and str(path) not in kept]:
            stale.unlink()
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{len(vectors.cases)} cases, {size} bytes")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        vectors.write(Path(scratch))
        wrong = difference(Path(scratch), folder)
    for name in wrong:
        print(f"{name}: differs or is missing", file=sys.stderr)
    if not wrong:
        print(f"{len(vectors.cases)} cases equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
