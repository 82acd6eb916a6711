# SPDX-License-Identifier: Apache-2.0
"""Device arrays: the same bytes as on the host, on the stream that the caller or the framework says."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import nvte_ep
import pytest
from device_arrays import NewStream
from nvte_ep import Array, _cuda, _streams

Framework = Callable[[str], ModuleType]
Missing = Callable[[str, str], NoReturn]

HIDDEN = 256


def on_device(array: Any, dtype: str | None = None, device: str = "cuda:0") -> Array:
    """A copy of a NumPy array on the device."""
    array = np.ascontiguousarray(array)
    copy = Array.empty(array.shape, dtype or array.dtype.name, device)
    cudart = _cuda.runtime()
    with _cuda.use_device(copy.device[1]):
        kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        assert int(cudart.cudaMemcpy(copy.pointer, array.ctypes.data, array.nbytes, kind)[0]) == 0
    return copy


def tokens_of(rows: int, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return (random.standard_normal((rows, HIDDEN)) * 2.0 ** random.integers(-6, 7, (1, HIDDEN))).astype(
        np.float32
    )


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_codecs_are_those_of_the_host(format: str) -> None:
    tokens = tokens_of(256)
    pack, unpack = (getattr(nvte_ep, f"{format}_{verb}") for verb in ("pack", "unpack"))
    rows = pack(on_device(tokens))
    assert rows.device == (2, 0)
    expected = pack(tokens)
    assert (rows.numpy() == expected.numpy()).all()
    decoded = unpack(rows, HIDDEN, dtype="float32")
    assert (decoded.numpy() == unpack(expected, HIDDEN, dtype="float32").numpy()).all()
    for ours, theirs in zip(
        getattr(nvte_ep, f"{format}_quantize")(on_device(tokens)),
        getattr(nvte_ep, f"{format}_quantize")(tokens),
        strict=True,
    ):
        assert (ours.numpy() == theirs.numpy()).all()
    counts = np.array([128, 0, 128], np.int32)
    receive = getattr(nvte_ep, f"{format}_direct_receive")
    ours, theirs = (
        receive(given, HIDDEN, sizes, columnwise=True)
        for given, sizes in ((rows, on_device(counts)), (expected, counts))
    )
    for name in ours.layout.parts:
        assert (getattr(ours, name).numpy() == getattr(theirs, name).numpy()).all(), name


def test_stochastic_rounding_on_the_device() -> None:
    tokens = tokens_of(64)
    state = np.array([1234, 5], np.int64)
    rows = nvte_ep.nvfp4_pack(on_device(tokens), rounding="stochastic", rng_state=on_device(state))
    expected = nvte_ep.nvfp4_pack(tokens, rounding="stochastic", rng_state=state)
    assert (rows.numpy() == expected.numpy()).all()
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"rng_state: expected an array on the device"):
        nvte_ep.nvfp4_pack(on_device(tokens), rounding="stochastic", rng_state=(1234, 5))


def test_arrays_of_two_places_are_refused() -> None:
    tokens = on_device(tokens_of(4))
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"(out|rows): expected"):
        nvte_ep.nvfp4_pack(tokens, out=np.zeros((4, nvte_ep.row_bytes("nvfp4", HIDDEN)), np.uint8))
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"rows_per_expert: expected"):
        nvte_ep.nvfp4_direct_receive(nvte_ep.nvfp4_pack(on_device(tokens_of(128))), HIDDEN, [128])


def test_streams_of_the_caller(new_stream: NewStream) -> None:
    tokens = tokens_of(512)
    expected = nvte_ep.nvfp4_unpack(nvte_ep.nvfp4_pack(tokens), HIDDEN, dtype="float32").numpy()
    first, second = new_stream(), new_stream()

    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, second

    for _ in range(10):  # the second stream waits for the first by itself
        rows = nvte_ep.nvfp4_pack(on_device(tokens), stream=first)
        decoded = nvte_ep.nvfp4_unpack(rows, HIDDEN, dtype="float32", stream=Stream())
        assert (decoded.numpy() == expected).all()


def test_the_current_device_stays(cudart: Any) -> None:
    code, devices = cudart.cudaGetDeviceCount()
    assert int(code) == 0
    for current in range(devices):
        for other in range(devices):
            with _cuda.use_device(current):
                rows = nvte_ep.nvfp4_pack(on_device(tokens_of(4), device=f"cuda:{other}"))
                assert rows.device == (2, other)
                assert _cuda.current_device() == current
                assert (rows.numpy() == nvte_ep.nvfp4_pack(tokens_of(4)).numpy()).all()


def test_cuda_array_interface_alone() -> None:
    class Only:
        def __init__(self, array: Array) -> None:
            self.array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    tokens = tokens_of(8)
    out = on_device(np.zeros((8, nvte_ep.row_bytes("nvfp4", HIDDEN)), np.uint8))
    nvte_ep.nvfp4_pack(Only(on_device(tokens)), out=Only(out))
    assert (out.numpy() == nvte_ep.nvfp4_pack(tokens).numpy()).all()


def test_torch(torch: Any) -> None:
    tokens = torch.randn(64, HIDDEN, device="cuda", dtype=torch.bfloat16)
    expected = nvte_ep.nvfp4_pack(tokens.cpu()).numpy()
    rows = torch.from_dlpack(nvte_ep.nvfp4_pack(tokens))
    assert rows.device == tokens.device
    assert (rows.cpu().numpy() == expected).all()
    out = torch.empty_like(tokens)
    assert nvte_ep.nvfp4_unpack(rows, HIDDEN, out=out) is out
    assert torch.equal(out.cpu(), torch.from_dlpack(nvte_ep.nvfp4_unpack(expected, HIDDEN)))


def test_current_stream_of_torch(torch: Any) -> None:
    stream = torch.cuda.Stream()
    tensor = torch.zeros(1, device="cuda")
    with torch.cuda.stream(stream):
        assert _streams.current((2, 0), [tensor]) == stream.cuda_stream
        assert _streams.current((2, 0), [object()]) == stream.cuda_stream  # it is imported and in use
        # Behind long work of this stream: the result is right only if the call went on this stream.
        for _ in range(20):
            work = torch.randn(2048, 2048, device="cuda")
            for _ in range(10):
                work = work @ work / 64
            tokens = work[:64, :HIDDEN].nan_to_num(0, 1, -1).contiguous()
            rows = torch.from_dlpack(nvte_ep.nvfp4_pack(tokens))
            total = rows.long().sum()
        assert total.item() == int(nvte_ep.nvfp4_pack(tokens.cpu()).numpy().astype(np.int64).sum())
    assert _streams.handle("function", stream) == stream.cuda_stream


def test_current_stream_of_cupy(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        tokens = cupy.asarray(tokens_of(16))
        assert _streams.current((2, 0), [tokens]) == stream.ptr
        rows = cupy.from_dlpack(nvte_ep.nvfp4_pack(tokens))
        assert (cupy.asnumpy(rows) == nvte_ep.nvfp4_pack(tokens_of(16)).numpy()).all()
    assert _streams.handle("function", stream) == stream.ptr


def test_jax_on_the_device(framework: Framework) -> None:
    jax = framework("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("this JAX has no GPU")
    tokens = jax.device_put(tokens_of(16), device)
    rows = jax.numpy.from_dlpack(nvte_ep.nvfp4_pack(tokens * 2))
    assert (np.asarray(rows) == nvte_ep.nvfp4_pack(tokens_of(16) * 2).numpy()).all()


def test_graph_capture(torch: Any) -> None:
    tokens = torch.zeros(64, HIDDEN, device="cuda")
    rows = torch.zeros(64, nvte_ep.row_bytes("nvfp4", HIDDEN), device="cuda", dtype=torch.uint8)
    nvte_ep.nvfp4_pack(tokens, out=rows)  # what is loaded lazily is loaded now
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        nvte_ep.nvfp4_pack(tokens, out=rows)
    for seed in range(3):
        tokens.copy_(torch.from_numpy(tokens_of(64, seed)))
        graph.replay()
        assert (rows.cpu().numpy() == nvte_ep.nvfp4_pack(tokens_of(64, seed)).numpy()).all()


def test_memory_outlives_its_array(torch: Any) -> None:
    tensor = torch.from_dlpack(nvte_ep.nvfp4_pack(on_device(tokens_of(64))))
    noise = [Array.empty((1 << 20,), "uint8", "cuda") for _ in range(8)]
    assert (tensor.cpu().numpy() == nvte_ep.nvfp4_pack(tokens_of(64)).numpy()).all()
    assert len({array.pointer for array in noise}) == 8


def test_a_step_on_the_device(missing: Missing) -> None:
    """One rank over the device transport, against the same step on the host."""
    transports = {entry["name"]: entry for entry in nvte_ep.build_info()["transports"]}
    if not transports["peer"]["available"]:
        missing("cuda", transports["peer"]["reason"])
    random = np.random.default_rng(1)
    indices = np.array([random.permutation(4)[:2] for _ in range(48)], np.int32)
    weights = random.random((48, 2), np.float32)
    tokens, grad = tokens_of(48, 2), tokens_of(48, 3)

    def step(device: str, take: Callable[[Any], Any]) -> list[Any]:
        comm = nvte_ep.Communicator.threads(1)[0]
        with nvte_ep.Group(
            comm, num_experts=4, hidden=HIDDEN, max_tokens_per_rank=64, recv_capacity=512, device=device
        ) as group:
            handle = group.handle(top_k=2, alignment=16, dispatch="nvfp4", combine_backward="mxfp8")
            routing = handle.prepare(take(indices))
            total = int(routing.total_rows.numpy()[0])
            received = handle.dispatch(take(tokens), take(weights), receive="decoded")
            result = handle.combine(received.data, slot_weights=received.weights)
            back = handle.combine_backward(take(grad), receive="decoded")
            grads = handle.dispatch_backward(back.data, received.weights)
            assert group.poll_error() is None
            return [
                routing.row_offsets.numpy(),
                routing.slot_source.numpy()[:total],
                received.data.numpy()[:total].astype(np.float32),
                received.weights.numpy()[:total],
                result.numpy().astype(np.float32),
                back.data.numpy()[:total].astype(np.float32),
                *[value.numpy().astype(np.float32) for value in grads],
            ]

    for ours, theirs in zip(step("cuda", on_device), step("cpu", lambda array: array), strict=True):
        # Sums may round one partial row on the way; all else is the same bytes.
        assert np.allclose(ours, theirs, rtol=2**-7, atol=2**-6)
