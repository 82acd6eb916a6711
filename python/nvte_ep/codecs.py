# SPDX-License-Identifier: Apache-2.0
"""The codecs: tokens to rows and back, rows to the operand of a grouped GEMM. Local: no group, any thread.

Arrays come in through DLPack or __cuda_array_interface__. Results are the caller's `out`, or new Arrays where
the input lies. `dtype` names the type of a uint16 array of tokens; of outputs it names the type to make.
`row_count` (rows in use) and `findings` (bits that are OR-ed in) are arrays of one element. nvte_ep.h has
every rule.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from nvte_ep import _abi, _lib
from nvte_ep._call import Call, float_type, integer, natural, pointer, storage_name
from nvte_ep._dlpack import View
from nvte_ep.errors import NvteEpError, in_words_of, invalid
from nvte_ep.formats import FormatInfo, lookup, row_bytes
from nvte_ep.operand import Operand

__all__ = [
    "mxfp8_dequantize",
    "mxfp8_direct_receive",
    "mxfp8_pack",
    "mxfp8_quantize",
    "mxfp8_unpack",
    "nvfp4_dequantize",
    "nvfp4_direct_receive",
    "nvfp4_pack",
    "nvfp4_quantize",
    "nvfp4_unpack",
    "scales_swizzle",
    "scales_unswizzle",
]


_DEFAULTS = ("nearest", "propagate", "nearest", "l1", 0, 0, None, None, None, None, None)


def _options(
    call: Call,
    *,
    rounding: str = "nearest",
    nonfinite: str = "propagate",
    scale_rounding: str = "nearest",
    column_bound: str = "l1",
    row_id_base: int = 0,
    rank: int = 0,
    rng_state: Any = None,
    tensor_scale: Any = None,
    row_count: Any = None,
    fixed_expert_scale: Any = None,
    findings: Any = None,
) -> Any:
    name = call.function
    given = (
        rounding, nonfinite, scale_rounding, column_bound, row_id_base, rank, rng_state, tensor_scale,
        row_count, fixed_expert_scale, findings,
    )  # fmt: skip
    if all(map(operator.is_, given, _DEFAULTS)):
        return None  # all of them defaults
    return _abi.CodecOptions(
        rounding=_lib.enum(name, "rounding", "NVTE_EP_ROUNDING_", rounding),
        nonfinite=_lib.enum(name, "nonfinite", "NVTE_EP_NONFINITE_", nonfinite),
        scale_rounding=_lib.enum(name, "scale_rounding", "NVTE_EP_SCALE_ROUNDING_", scale_rounding),
        column_bound=_lib.enum(name, "column_bound", "NVTE_EP_COLUMN_BOUND_", column_bound),
        row_id_base=integer(name, "row_id_base", row_id_base),
        rank=integer(name, "rank", rank, 32),
        rng_state=pointer(call.read_rng_state(rng_state)),
        tensor_scale=pointer(call.read_scale("tensor_scale", tensor_scale, findings)),
        row_count=pointer(call.read_scalar("row_count", row_count, "int64")),
        fixed_expert_scale=pointer(call.read("fixed_expert_scale", fixed_expert_scale)),
        findings=pointer(call.write_findings(findings)),
    )


def _tokens_of(format: str, call: Call, source: View) -> tuple[FormatInfo, int, int]:
    """The format, T and H of [T, H], before an output is made for them."""
    info = lookup(call.function, "format", format)
    count, hidden = call.matrix("tokens", source)
    if hidden <= 0 or hidden % info.hidden_multiple:
        raise invalid(
            call.function, "tokens", f"[T, H], H a multiple of {info.hidden_multiple}", f"H = {hidden}"
        )
    return info, count, hidden


def _pack(format: str, tokens: Any, out: Any, dtype: Any, stream: Any, **options: Any) -> Any:
    call = Call(f"nvte_ep_{format}_pack", {"tokens": tokens, "out": out}, stream)
    source = call.typed("tokens", tokens, dtype)
    if out is None:
        _, count, hidden = _tokens_of(format, call, source)
        out = call.new("out", (count, row_bytes(format, hidden)), "uint8")
    rows = call.write("out", out, as_bytes=True)
    call.names = {"rows": "out"}
    call.run(pointer(source), pointer(rows), _options(call, **options))
    return out


def _decoded(call: Call, out: Any, shape: tuple[int, int], dtype: Any) -> tuple[Any, View]:
    """The output array of a decoder: the caller's, which must have this shape, or a new one. dtype None: the
    type of `out`, bfloat16 for a new one."""
    wanted = float_type(call.function, "dtype", "bfloat16" if dtype is None else dtype)
    if out is None:
        out = call.new("out", shape, wanted)
    tokens = call.fill("out", out, uint16_is=storage_name(wanted))
    if tokens.shape != shape:
        raise invalid(call.function, "out", f"shape {shape}", f"shape {tokens.shape}")
    if dtype is not None and tokens.dtype.name != wanted:
        raise invalid(call.function, "out", f"{wanted}, as dtype says", tokens.dtype.name)
    return out, tokens


def _hidden(format: str, call: Call, hidden: Any) -> int:
    number = natural(call.function, "hidden", hidden)
    multiple = lookup(call.function, "format", format).hidden_multiple
    if number == 0 or number % multiple or number > 2**31:
        raise invalid(
            call.function, "hidden", f"a positive multiple of {multiple}, at most 2^31", str(number)
        )
    return number


def _unpack(format: str, rows: Any, hidden: int, out: Any, dtype: Any, stream: Any, **options: Any) -> Any:
    call = Call(f"nvte_ep_{format}_unpack", {"rows": rows, "out": out}, stream)
    source = call.need("rows", rows, "[T, row_bytes]", as_bytes=True)
    count, width = call.matrix("rows", source)
    number = _hidden(format, call, hidden)
    if row_bytes(format, number) > width:  # before memory is asked for
        raise invalid(call.function, "hidden", f"rows of {row_bytes(format, number)} bytes", f"of {width}")
    out, tokens = _decoded(call, out, (count, number), dtype)
    call.names = {"tokens": "out"}
    call.run(pointer(source), pointer(tokens), _options(call, **options))
    return out


def _quantized_shapes(format: str, call: Call, source: View) -> tuple[tuple[int, int], tuple[int, int]]:
    info, count, hidden = _tokens_of(format, call, source)
    return (count, hidden * info.payload_bits // 8), (count, hidden // info.block)


def _out_parts(call: Call, out: Any, count: int) -> tuple[Any, ...]:
    if out is None:
        return (None,) * count
    if not isinstance(out, (tuple, list)):
        raise invalid(call.function, "out", f"a tuple of {count}", repr(type(out).__name__))
    if len(out) != count:
        raise invalid(call.function, "out", f"a tuple of {count}", f"one of {len(out)}")
    return tuple(out)


def nvfp4_pack(
    tokens: Any,
    *,
    out: Any = None,
    rounding: str = "nearest",
    rng_state: Any = None,
    row_id_base: int = 0,
    nonfinite: str = "propagate",
    scale_rounding: str = "nearest",
    tensor_scale: Any = None,
    row_count: Any = None,
    findings: Any = None,
    dtype: Any = None,
    stream: Any = None,
) -> Any:
    """Tokens [T, H] to packed rows uint8 [T, row_bytes].

    rounding="stochastic" needs rng_state: int64 [2] {seed, offset} beside the tokens, or on the host a pair
    of integers. tensor_scale (float32 [1], a power of two) replaces every row's own token scale.
    """
    return _pack(
        "nvfp4",
        tokens,
        out,
        dtype,
        stream,
        rounding=rounding,
        rng_state=rng_state,
        row_id_base=row_id_base,
        nonfinite=nonfinite,
        scale_rounding=scale_rounding,
        tensor_scale=tensor_scale,
        row_count=row_count,
        findings=findings,
    )


def mxfp8_pack(
    tokens: Any,
    *,
    out: Any = None,
    row_count: Any = None,
    findings: Any = None,
    dtype: Any = None,
    stream: Any = None,
) -> Any:
    """Tokens [T, H] to packed rows uint8 [T, row_bytes]."""
    return _pack("mxfp8", tokens, out, dtype, stream, row_count=row_count, findings=findings)


def nvfp4_unpack(
    rows: Any,
    hidden: int,
    *,
    out: Any = None,
    dtype: Any = None,
    row_count: Any = None,
    findings: Any = None,
    stream: Any = None,
) -> Any:
    """Packed rows to tokens [T, hidden] of bfloat16 (unless dtype says another), float16 or float32."""
    return _unpack("nvfp4", rows, hidden, out, dtype, stream, row_count=row_count, findings=findings)


def mxfp8_unpack(
    rows: Any,
    hidden: int,
    *,
    out: Any = None,
    dtype: Any = None,
    row_count: Any = None,
    findings: Any = None,
    stream: Any = None,
) -> Any:
    """Packed rows to tokens [T, hidden] of bfloat16 (unless dtype says another), float16 or float32."""
    return _unpack("mxfp8", rows, hidden, out, dtype, stream, row_count=row_count, findings=findings)


def nvfp4_quantize(
    tokens: Any,
    *,
    out: Any = None,
    rounding: str = "nearest",
    rng_state: Any = None,
    row_id_base: int = 0,
    nonfinite: str = "propagate",
    scale_rounding: str = "nearest",
    tensor_scale: Any = None,
    row_count: Any = None,
    findings: Any = None,
    dtype: Any = None,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Tokens [T, H] to (payload uint8 [T, H/2], scales uint8 [T, H/16], token_scales float32 [T]).

    With tensor_scale no token scales travel: the third is None, unless the caller's `out` has an array for
    it.
    """
    call = Call("nvte_ep_nvfp4_quantize", {"tokens": tokens}, stream)
    source = call.typed("tokens", tokens, dtype)
    payload_shape, scales_shape = _quantized_shapes("nvfp4", call, source)
    payload, scales, token_scales = _out_parts(call, out, 3)
    payload = call.new("out", payload_shape, "uint8") if payload is None else payload
    scales = call.new("out", scales_shape, "uint8") if scales is None else scales
    if token_scales is None and tensor_scale is None:
        token_scales = call.new("out", payload_shape[:1], "float32")
    options = _options(
        call,
        rounding=rounding,
        rng_state=rng_state,
        row_id_base=row_id_base,
        nonfinite=nonfinite,
        scale_rounding=scale_rounding,
        tensor_scale=tensor_scale,
        row_count=row_count,
        findings=findings,
    )
    call.run(
        pointer(source),
        pointer(call.write("payload", payload, as_bytes=True)),
        pointer(call.write("scales", scales, as_bytes=True)),
        pointer(call.write("token_scales", token_scales)),
        options,
    )
    return payload, scales, token_scales


def mxfp8_quantize(
    tokens: Any,
    *,
    out: Any = None,
    row_count: Any = None,
    findings: Any = None,
    dtype: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Tokens [T, H] to (payload uint8 [T, H], scales uint8 [T, H/32])."""
    call = Call("nvte_ep_mxfp8_quantize", {"tokens": tokens}, stream)
    source = call.typed("tokens", tokens, dtype)
    payload_shape, scales_shape = _quantized_shapes("mxfp8", call, source)
    payload, scales = _out_parts(call, out, 2)
    payload = call.new("out", payload_shape, "uint8") if payload is None else payload
    scales = call.new("out", scales_shape, "uint8") if scales is None else scales
    options = _options(call, row_count=row_count, findings=findings)
    call.run(
        pointer(source),
        pointer(call.write("payload", payload, as_bytes=True)),
        pointer(call.write("scales", scales, as_bytes=True)),
        options,
    )
    return payload, scales


def nvfp4_dequantize(
    payload: Any,
    scales: Any,
    token_scales: Any = None,
    *,
    out: Any = None,
    tensor_scale: Any = None,
    dtype: Any = None,
    row_count: Any = None,
    findings: Any = None,
    stream: Any = None,
) -> Any:
    """The inverse of nvfp4_quantize, with token_scales or tensor_scale."""
    call = Call("nvte_ep_nvfp4_dequantize", {"payload": payload, "scales": scales, "out": out}, stream)
    codes = call.need("payload", payload, "[T, payload bytes]", as_bytes=True)
    count, width = call.matrix("payload", codes)
    out, tokens = _decoded(call, out, (count, 2 * width), dtype)
    options = _options(call, tensor_scale=tensor_scale, row_count=row_count, findings=findings)
    call.run(
        pointer(codes),
        pointer(call.read("scales", scales, as_bytes=True)),
        pointer(call.read("token_scales", token_scales)),
        pointer(tokens),
        options,
    )
    return out


def mxfp8_dequantize(
    payload: Any,
    scales: Any,
    *,
    out: Any = None,
    dtype: Any = None,
    row_count: Any = None,
    findings: Any = None,
    stream: Any = None,
) -> Any:
    """The inverse of mxfp8_quantize."""
    call = Call("nvte_ep_mxfp8_dequantize", {"payload": payload, "scales": scales, "out": out}, stream)
    codes = call.need("payload", payload, "[T, payload bytes]", as_bytes=True)
    out, tokens = _decoded(call, out, call.matrix("payload", codes), dtype)
    options = _options(call, row_count=row_count, findings=findings)
    call.run(pointer(codes), pointer(call.read("scales", scales, as_bytes=True)), pointer(tokens), options)
    return out


# Of direct_receive, by the names of the operand that it makes.
_OPERAND_NAMES = {
    "hidden": "hidden",
    "alignment": "alignment",
    "columnwise": "columnwise",
    "scale_layout": "scale_layout",
    "capacity": "rows",
    "num_experts": "rows_per_expert",
}


def _direct_receive(
    format: str,
    rows: Any,
    hidden: int,
    rows_per_expert: Any,
    out: Operand | None,
    columnwise: bool,
    scale_layout: str,
    alignment: int,
    stream: Any,
    **options: Any,
) -> Operand:
    call = Call(
        f"nvte_ep_{format}_direct_receive", {"rows": rows, "rows_per_expert": rows_per_expert}, stream
    )
    source = call.need("rows", rows, "[slots, row_bytes]", as_bytes=True)
    counts = call.read_indices("rows_per_expert", rows_per_expert)
    if counts is None or len(counts.shape) != 1:
        got = "None" if counts is None else f"shape {counts.shape}"
        raise invalid(call.function, "rows_per_expert", "1 dimension", got)
    slots, _ = call.matrix("rows", source)
    if out is None:
        call.may_make("out")
        step = max(integer(call.function, "alignment", alignment, 32), 1)
        try:
            out = Operand(
                format,
                hidden,
                -(-slots // step) * step,
                counts.shape[0],
                alignment=alignment,
                columnwise=columnwise,
                scale_layout=scale_layout,
                device=call.device,
            )
        except NvteEpError as error:
            raise in_words_of(call.function, _OPERAND_NAMES, error) from None
    elif not isinstance(out, Operand):
        raise invalid(call.function, "out", "an Operand", type(out).__name__)
    elif out.hidden != hidden:
        raise invalid(call.function, "out", f"an Operand of hidden {hidden}", f"hidden {out.hidden}")
    if options.get("findings") is None and isinstance(rows_per_expert, (list, tuple)):
        _check_counts(call.function, rows_per_expert, out.alignment, slots)
    call.will_write(out.bytes)
    call.run(pointer(source), pointer(counts), out.struct, _options(call, **options))
    return out


def _check_counts(function: str, counts: Sequence[int], alignment: int, slots: int) -> None:
    """Of counts that the host knows, where there is no `findings` to tell that they were clamped."""
    if any(count < 0 or count % alignment for count in counts):
        raise invalid(
            function, "rows_per_expert", f"multiples of the alignment {alignment}", str(list(counts))
        )
    if sum(counts) > slots:
        raise invalid(function, "rows_per_expert", f"{slots} rows in all at most", str(sum(counts)))


def nvfp4_direct_receive(
    rows: Any,
    hidden: int,
    rows_per_expert: Any,
    *,
    out: Operand | None = None,
    columnwise: bool = False,
    scale_layout: str = "swizzled",
    column_bound: str = "l1",
    alignment: int = 128,
    rounding: str = "nearest",
    rng_state: Any = None,
    rank: int = 0,
    scale_rounding: str = "nearest",
    fixed_expert_scale: Any = None,
    findings: Any = None,
    stream: Any = None,
) -> Operand:
    """Packed rows [slots, row_bytes], ordered by expert, to the operand of a grouped GEMM.

    rows_per_expert [E]: rows of each expert, padding included. columnwise, scale_layout and alignment
    describe the operand that is made; a caller's `out` brings its own. The rounding is that of the columnwise
    part.
    """
    return _direct_receive(
        "nvfp4",
        rows,
        hidden,
        rows_per_expert,
        out,
        columnwise,
        scale_layout,
        alignment,
        stream,
        column_bound=column_bound,
        rounding=rounding,
        rng_state=rng_state,
        rank=rank,
        scale_rounding=scale_rounding,
        fixed_expert_scale=fixed_expert_scale,
        findings=findings,
    )


def mxfp8_direct_receive(
    rows: Any,
    hidden: int,
    rows_per_expert: Any,
    *,
    out: Operand | None = None,
    columnwise: bool = False,
    scale_layout: str = "swizzled",
    alignment: int = 128,
    findings: Any = None,
    stream: Any = None,
) -> Operand:
    """Packed rows [slots, row_bytes], ordered by expert, to the operand of a grouped GEMM."""
    return _direct_receive(
        "mxfp8",
        rows,
        hidden,
        rows_per_expert,
        out,
        columnwise,
        scale_layout,
        alignment,
        stream,
        findings=findings,
    )


def scales_swizzle(scales: Any, rows_per_expert: Any = None, *, out: Any = None, stream: Any = None) -> Any:
    """Compact scales uint8 [R, C] to 128x4 tiles, uint8 [n]; with rows_per_expert [E] each expert's on their
    own."""
    call = Call("nvte_ep_scales_swizzle", {"scales": scales, "out": out}, stream)
    source = call.need("scales", scales, "[R, C]", as_bytes=True)
    counts = call.read_indices("rows_per_expert", rows_per_expert)
    rows, columns = call.matrix("scales", source)
    if out is None:
        out = call.new("out", (_swizzled_bytes(rows, columns, counts),), "uint8")
    call.run(pointer(source), pointer(counts), pointer(call.write("out", out, as_bytes=True)))
    return out


def scales_unswizzle(
    swizzled: Any,
    rows: int,
    columns: int,
    rows_per_expert: Any = None,
    *,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """The inverse of scales_swizzle: tiles to compact scales uint8 [rows, columns]."""
    call = Call("nvte_ep_scales_unswizzle", {"swizzled": swizzled, "out": out}, stream)
    source = call.need("swizzled", swizzled, "uint8 [n]", as_bytes=True)
    counts = call.read_indices("rows_per_expert", rows_per_expert)
    if out is None:
        shape = natural(call.function, "rows", rows), natural(call.function, "columns", columns)
        out = call.new("out", shape, "uint8")
    call.run(pointer(source), pointer(counts), pointer(call.write("out", out, as_bytes=True)))
    return out


def _swizzled_bytes(rows: int, columns: int, counts: View | None) -> int:
    """Room for every expert's last tile to be a partial one: the counts may lie on a device."""
    if counts is None:
        tiled_rows = -(-rows // 128) * 128
    else:
        tiled_rows = (rows + 127 * counts.tensor.shape[0]) // 128 * 128
    return -(-columns // 4) * 4 * tiled_rows
