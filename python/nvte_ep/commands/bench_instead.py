"""What a user would run in place of a codec, where PyTorch and Triton are installed: for the report of
`nvte-ep bench codecs`, timed like the codecs and over the same inputs.

None of it writes the library's bytes. The casts of PyTorch have no block scales at all; the Triton kernels
leave payload and scales apart and NVFP4 without a scale per token: both do less than the codec beside them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nvte_ep.array import Array
from nvte_ep.commands.bench_cases import Data, ReceiveRun, RowRun, Run, SwizzleRun
from nvte_ep.commands.bench_machine import Call, Machine


@dataclass(frozen=True)
class Instead:
    """One way to do without a codec: a call for each set of buffers."""

    name: str  # "torch" or "triton": a column of the report
    what: str
    calls: list[Call]


class Frameworks:
    """PyTorch and Triton, as far as they are here and can use the machine."""

    def __init__(self, machine: Machine, wanted: bool = True) -> None:
        self.machine = machine
        self.torch: Any = _import("torch") if wanted else None
        if self.torch is not None and machine.kind == "cuda" and not self.torch.cuda.is_available():
            self.torch = None
        self.triton: Any = None
        if self.torch is not None and machine.kind == "cuda" and _import("triton") is not None:
            self.triton = importlib.import_module("nvte_ep.commands.bench_triton")

    def versions(self) -> dict[str, str]:
        found = {} if self.torch is None else {"torch": str(self.torch.__version__)}
        if self.triton is not None:
            found["triton"] = str(self.triton.triton.__version__)
        return found

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """PyTorch and Triton launch on the machine's stream."""
        if self.torch is None or self.machine.kind != "cuda":
            yield
            return
        index = self.machine.device[1]
        stream = self.torch.cuda.ExternalStream(self.machine.stream, device=index)
        with self.torch.cuda.device(index), self.torch.cuda.stream(stream):
            yield

    def tensor(self, array: Array) -> Any:
        return self.torch.from_dlpack(array)

    def empty(self, shape: tuple[int, ...], dtype: str = "uint8") -> Any:
        return self.tensor(self.machine.poisoned(shape, dtype))

    def float8(self, tensor: Any) -> Any:
        return tensor.view(self.torch.float8_e4m3fn)

    @property
    def copies_by_kernel(self) -> bool:
        return self.torch is not None and self.machine.kind == "cuda"

    def copy_kernel(self, target: Array, source: Array) -> Call:
        """A kernel that reads and writes each byte once: element by element, so that it is no memcpy."""
        words = self.tensor(source).view(self.torch.int32)
        return functools.partial(
            self.torch.bitwise_not, words, out=self.tensor(target).view(self.torch.int32)
        )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def instead_of(run: Run, data: Data, frameworks: Frameworks) -> list[Callable[[], Instead]]:
    """What can stand in for the codec of this run. Each makes its buffers when it is called."""
    if frameworks.torch is None:
        return []
    if isinstance(run, RowRun):
        encodes = run.case.verb in ("pack", "quantize")
        casts, kernels = (_cast_down, _triton_quantize) if encodes else (_cast_up, _triton_dequantize)
        ways: list[Callable[[], Instead]] = [functools.partial(casts, run, data, frameworks)]
        if frameworks.triton is not None:
            ways.append(functools.partial(kernels, run, data, frameworks))
        return ways
    if isinstance(run, ReceiveRun) and frameworks.triton is not None:
        return [functools.partial(_triton_receive, run, data, frameworks)]
    if isinstance(run, SwizzleRun):
        return [functools.partial(_permute, run, data, frameworks)]
    return []


# ---- token by token --------------------------------------------------------------------------------------


def _cast_down(run: RowRun, data: Data, frameworks: Frameworks) -> Instead:
    tokens = frameworks.tensor(run.inputs[0])
    codes = frameworks.float8(frameworks.empty(tuple(tokens.shape)))
    calls = [functools.partial(codes[i].copy_, tokens[i]) for i in range(run.sets)]
    return Instead("torch", "cast of BF16 to float8_e4m3fn, no scales", list(calls))


def _cast_up(run: RowRun, data: Data, frameworks: Frameworks) -> Instead:
    shape = (run.sets, run.tokens, run.hidden)
    payload = frameworks.machine.filled(shape, "uint8", data.apart["mxfp8"][0])
    codes, out = frameworks.float8(frameworks.tensor(payload)), frameworks.empty(shape, "bfloat16")
    calls = [functools.partial(out[i].copy_, codes[i]) for i in range(run.sets)]
    return Instead("torch", "cast of float8_e4m3fn to BF16, no scales", list(calls))


def _triton_quantize(run: RowRun, data: Data, frameworks: Frameworks) -> Instead:
    format, kernels = run.case.format, frameworks.triton
    quantize = kernels.nvfp4_quantize if format == "nvfp4" else kernels.mxfp8_quantize
    tokens = frameworks.tensor(run.inputs[0])
    payload = frameworks.empty((run.sets, run.tokens, run.case.payload_bytes(run.hidden)))
    scales = frameworks.empty((run.sets, run.tokens, run.case.scale_bytes(run.hidden)))
    calls = [functools.partial(quantize, tokens[i], payload[i], scales[i]) for i in range(run.sets)]
    what = f"{format.upper()} payload and scales apart, to nearest"
    return Instead("triton", what + (", no token scale" if format == "nvfp4" else ""), list(calls))


def _columns_of(run: RowRun | ReceiveRun, frameworks: Frameworks) -> list[Any]:
    """Payload, scales and token scales of every set, cut out of packed rows or as they are."""
    if isinstance(run, RowRun) and run.case.verb == "dequantize":
        return [frameworks.tensor(slab) for slab in run.inputs]
    rows = frameworks.tensor(run.inputs[0] if isinstance(run, RowRun) else run.rows)
    payload, scales = run.case.payload_bytes(run.hidden), run.case.scale_bytes(run.hidden)
    parts = [rows[:, :, :payload], rows[:, :, payload : payload + scales]]
    if run.case.info.token_scale_bytes:
        parts.append(rows.view(frameworks.torch.float32)[:, :, -(-(payload + scales) // 4)])
    return parts


def _triton_decode(run: RowRun | ReceiveRun, frameworks: Frameworks, out: Any) -> list[Call]:
    kernels = frameworks.triton
    decode = kernels.nvfp4_dequantize if run.case.format == "nvfp4" else kernels.mxfp8_dequantize
    parts = _columns_of(run, frameworks)
    return [functools.partial(decode, *(part[i] for part in parts), out[i]) for i in range(run.sets)]


def _triton_dequantize(run: RowRun, data: Data, frameworks: Frameworks) -> Instead:
    out = frameworks.empty((run.sets, run.tokens, run.hidden), "bfloat16")
    what = f"the same {run.case.format.upper()} values"
    return Instead("triton", what, _triton_decode(run, frameworks, out))


# ---- direct_receive --------------------------------------------------------------------------------------


class _Requantize:
    """BF16 [rows, columns] to payload and tiled scales: Triton, then PyTorch for the tiles."""

    def __init__(self, format: str, rows: int, columns: int, block: int, frameworks: Frameworks) -> None:
        kernels = frameworks.triton
        self.quantize = kernels.nvfp4_quantize if format == "nvfp4" else kernels.mxfp8_quantize
        self.payload = frameworks.empty((rows, columns // 2 if format == "nvfp4" else columns))
        self.tile = _Tile(rows, columns // block, frameworks)

    def __call__(self, tokens: Any) -> None:
        self.quantize(tokens, self.payload, self.tile.compact)
        self.tile()


class _Tile:
    """Compact scales to 128x4 tiles by a permutation; a matrix of another size is copied into zeros first."""

    def __init__(self, rows: int, columns: int, frameworks: Frameworks, compact: Any = None) -> None:
        self.compact = frameworks.empty((rows, columns)) if compact is None else compact
        bands, tiles = -(-rows // 128), -(-columns // 4)
        self.padded = self.compact
        if (bands * 128, tiles * 4) != (rows, columns):
            self.padded = frameworks.empty((bands * 128, tiles * 4)).zero_()
        self.inside = self.padded[:rows, :columns]
        self.tiled = frameworks.empty((bands * tiles * 512,))
        self.target = self.tiled.view(bands, tiles, 32, 4, 4)
        self.source = self.padded.view(bands, 4, 32, tiles, 4).permute(0, 3, 2, 1, 4)

    def __call__(self) -> None:
        if self.padded is not self.compact:
            self.inside.copy_(self.compact)
        self.target.copy_(self.source)


class _Untile:
    """The inverse; the padding of the tiles comes along."""

    def __init__(self, tiled: Any, rows: int, columns: int, frameworks: Frameworks) -> None:
        bands, tiles = -(-rows // 128), -(-columns // 4)
        self.padded = frameworks.empty((bands * 128, tiles * 4))
        self.target = self.padded.view(bands, 4, 32, tiles, 4)
        self.source = tiled.view(bands, tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)

    def __call__(self) -> None:
        self.target.copy_(self.source)


def _triton_receive(run: ReceiveRun, data: Data, frameworks: Frameworks) -> Instead:
    """As one matrix: what a user has to do for each expert, or with offsets, is no less."""
    rows, hidden, block = run.tokens, run.hidden, run.case.info.block
    decoded = frameworks.empty((run.sets, rows, hidden), "bfloat16")
    decodes = _triton_decode(run, frameworks, decoded)

    def way(i: int) -> Call:
        rowwise = _Requantize(run.case.format, rows, hidden, block, frameworks)
        if not run.case.columnwise:

            def both() -> None:
                decodes[i]()
                rowwise(decoded[i])

            return both
        across = frameworks.empty((hidden, rows), "bfloat16")
        columnwise = _Requantize(run.case.format, hidden, rows, block, frameworks)

        def all_of_it() -> None:
            decodes[i]()
            rowwise(decoded[i])
            across.copy_(decoded[i].t())
            columnwise(across)

        return all_of_it

    what = "decode to BF16, quantise again, tile the scales"
    if run.case.columnwise:
        what = "decode, quantise both ways, tile the scales" + (
            ", no RHT" if run.case.format == "nvfp4" else ""
        )
    return Instead("triton", what, [way(i) for i in range(run.sets)])


# ---- scales ----------------------------------------------------------------------------------------------


def _permute(run: SwizzleRun, data: Data, frameworks: Frameworks) -> Instead:
    if not run.case.inverse:
        compact = frameworks.tensor(run.compact)
        tiles = [_Tile(run.tokens, run.columns, frameworks, compact[i]) for i in range(run.sets)]
        return Instead("torch", "reshape, permute, copy", list(tiles))
    tiled = frameworks.tensor(run.tiled)
    back = [_Untile(tiled[i], run.tokens, run.columns, frameworks) for i in range(run.sets)]
    return Instead("torch", "reshape, permute, copy", list(back))
