# SPDX-License-Identifier: Apache-2.0
"""Owned arrays on their way out: DLPack, NumPy, views, and the lifetime of the memory on both sides."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import nvte_ep
import pytest
from nvte_ep import Array, _cuda, _device_pool
from nvte_ep._dtypes import BY_NAME
from nvte_ep.array import dlpack_tensor

NUMPY = tuple(int(part) for part in np.__version__.split(".")[:2])
Framework = Callable[[str], ModuleType]


def filled(shape: tuple[int, ...], dtype: str = "float32") -> Array:
    array = Array.empty(shape, dtype)
    flat = array._array.reshape(-1)
    flat[...] = np.arange(flat.size)
    return array


def test_empty() -> None:
    array = Array.empty((3, 8), "float32")
    assert (array.shape, array.strides, array.dtype, array.ndim) == ((3, 8), (8, 1), "float32", 2)
    assert (array.size, array.nbytes, len(array)) == (24, 96, 3)
    assert array.device == array.__dlpack_device__() == (1, 0)
    assert repr(array) == "Array(shape=(3, 8), dtype=float32, device=cpu)"
    assert Array.empty(5).shape == (5,)
    assert Array.empty((0, 8)).nbytes == 0


@pytest.mark.parametrize("nbytes", [1, 255, 256, 4097])
def test_alignment(nbytes: int) -> None:
    arrays = [Array.empty((nbytes,)) for _ in range(8)]
    assert [array.pointer % 256 for array in arrays] == [0] * 8


def test_bad_arguments() -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match="dtype"):
        Array.empty((2,), "complex64")
    with pytest.raises(nvte_ep.InvalidArgumentError, match="shape"):
        Array.empty((-1,))
    with pytest.raises(nvte_ep.InvalidArgumentError, match="device"):
        Array.empty((2,), "uint8", "tpu")
    with pytest.raises(nvte_ep.OutOfMemoryError, match="bytes"):
        Array.empty((1 << 60,))


def test_names_of_types() -> None:
    assert Array.empty((1,), np.float32).dtype == "float32"
    assert Array.empty((1,), np.dtype("int64")).dtype == "int64"
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert Array.empty((1,), ml_dtypes.bfloat16).dtype == "bfloat16"


def test_numpy_shares_memory() -> None:
    array = filled((3, 8))
    view = array.numpy()
    assert view.ctypes.data == array.pointer
    assert np.asarray(array).ctypes.data == array.pointer
    view[0, 0] = 7
    assert array.tolist()[0][0] == 7
    assert np.array(array, copy=True).ctypes.data != array.pointer
    assert np.asarray(array, dtype=np.float64).dtype == np.float64
    if NUMPY >= (2, 0):
        with pytest.raises(ValueError, match="needs a copy"):
            array.__array__(np.float64, copy=False)


def test_bfloat16_in_numpy() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = Array.empty((2,), "bfloat16")
    array._array[...] = [0x3F80, 0xC000]
    assert array.numpy().dtype == ml_dtypes.bfloat16
    assert array.numpy().tolist() == [1.0, -2.0]


def test_bfloat16_without_ml_dtypes(run_clean: Callable[..., str]) -> None:
    code = """
        import sys
        sys.modules["ml_dtypes"] = None  # importing it fails
        import numpy as np
        import nvte_ep
        tokens = nvte_ep.nvfp4_unpack(nvte_ep.nvfp4_pack(np.full((1, 16), 6, np.float32)), 16)
        assert tokens.dtype == "bfloat16"
        print(tokens.numpy().dtype, hex(tokens.numpy()[0, 0]))
    """
    assert run_clean(code) == "uint16 0x40c0\n"


def test_views() -> None:
    array = filled((4, 6))
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    for key in (1, -1, slice(1, 3), (slice(None), slice(2, 5)), (2, slice(1, None)), ..., (..., 0), (3, 5)):
        assert array[key].tolist() == whole[key].tolist(), key
    assert array[1].pointer == array.pointer + 24
    assert array.reshape(2, 12).tolist() == whole.reshape(2, 12).tolist()
    assert array.reshape(-1).shape == (24,)
    assert array.view("int32")[0, 1].tolist() == np.float32(1).view(np.int32)
    with pytest.raises(ValueError, match="dense"):
        array[:, 1:3].reshape(-1)
    with pytest.raises(TypeError, match="integers, slices"):
        array[[0, 1]]
    with pytest.raises(IndexError):
        array[4]


# ---- DLPack --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(BY_NAME))
@pytest.mark.parametrize("version", [None, (1, 0), (1, 1), (2, 0)])
def test_capsule(name: str, version: Any) -> None:
    array = Array.empty((3, 4), name)
    capsule = array.__dlpack__(max_version=version)
    tensor, major, flags = dlpack_tensor(capsule)
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == BY_NAME[name][1:4]
    assert (tensor.device_type, tensor.device_id, tensor.ndim, flags) == (1, 0, 2, 0)
    assert tensor.shape[:2] == [3, 4]
    assert not tensor.strides or tensor.strides[:2] == [4, 1]  # before DLPack 1.2 none means compact
    assert tensor.data + tensor.byte_offset == array.pointer
    versioned = version is not None and NUMPY >= (2, 1)
    assert major == (1 if versioned else 0)
    assert ('"dltensor_versioned"' in repr(capsule)) is versioned


def test_export_arguments() -> None:
    array = filled((2, 2))
    for arguments, same in (({"dl_device": (1, 0)}, True), ({"copy": True}, False), ({"copy": False}, True)):
        capsule = array.__dlpack__(**arguments)
        assert (dlpack_tensor(capsule)[0].data == array.pointer) is same
    with pytest.raises(BufferError, match="cpu"):
        array.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="stream"):
        array.__dlpack__(stream=1)


def test_from_dlpack_of_numpy() -> None:
    array = filled((3, 4))
    view = np.from_dlpack(array)
    array.numpy()[1, 1] = 50
    assert view.tolist() == array.tolist()
    if NUMPY >= (2, 1):  # before, whatever came through DLPack was read-only
        view[1, 1] = 51
        assert array.tolist()[1][1] == 51


def test_from_dlpack_of_torch(framework: Framework) -> None:
    torch = framework("torch")
    for name in ("float32", "float16", "bfloat16", "uint8", "int64"):
        array = filled((3, 4), "float32" if name == "bfloat16" else name)
        if name == "bfloat16":
            array = Array.empty((3, 4), "bfloat16")
            array._array[...] = 0x4040
        tensor = torch.from_dlpack(array)
        assert tensor.dtype == getattr(torch, name)
        assert tensor.data_ptr() == array.pointer
        assert tensor.tolist() == array.numpy().astype(np.float64).tolist()
        assert torch.from_dlpack(array[1:, :2]).tolist() == array.numpy().astype(np.float64)[1:, :2].tolist()


def test_from_dlpack_of_jax(framework: Framework) -> None:
    jnp = framework("jax").numpy
    array = filled((3, 4))
    assert jnp.from_dlpack(array).tolist() == array.tolist()
    half = Array.empty((2, 2), "bfloat16")
    half._array[...] = 0x4040
    assert jnp.from_dlpack(half).dtype == jnp.bfloat16
    assert jnp.from_dlpack(half).tolist() == [[3.0, 3.0], [3.0, 3.0]]


# ---- lifetimes -----------------------------------------------------------------------------------


class Owner:
    """Stands for memory: when it goes, the memory would."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)


def borrowed() -> tuple[Array, weakref.ref[Owner]]:
    owner = Owner(64)
    array = Array.borrow(owner.bytes.ctypes.data, 64, (1, 0), owner)
    return array, weakref.ref(owner)


@pytest.mark.parametrize("version", [None, (1, 1)])
def test_an_unconsumed_capsule_gives_the_memory_back(version: Any) -> None:
    array, owner = borrowed()
    capsule = array.__dlpack__(max_version=version)
    del array
    gc.collect()
    assert owner() is not None
    del capsule
    gc.collect()
    assert owner() is None


def test_the_consumer_outlives_the_producer() -> None:
    array, owner = borrowed()
    consumer = np.from_dlpack(array.view("float32")[4:8])
    del array
    gc.collect()
    assert owner() is not None
    assert consumer.tolist() == [0, 0, 0, 0]
    del consumer
    gc.collect()
    assert owner() is None


def test_the_producer_outlives_the_consumer() -> None:
    array, owner = borrowed()
    consumer = np.from_dlpack(array)
    del consumer
    gc.collect()
    assert owner() is not None
    assert array.tolist() == [0] * 64
    del array
    gc.collect()
    assert owner() is None


def test_torch_keeps_the_memory(framework: Framework) -> None:
    torch = framework("torch")
    array, owner = borrowed()
    tensor = torch.from_dlpack(array)
    part = tensor[3:5]
    del array, tensor
    gc.collect()
    assert owner() is not None
    assert part.tolist() == [0, 0]
    del part
    gc.collect()
    assert owner() is None


def test_results_survive_everything_else() -> None:
    """What a codec returns holds its memory alone; its inputs may go."""
    tokens = np.full((4, 32), 6, np.float32)
    rows = nvte_ep.nvfp4_pack(tokens)
    decoded = np.from_dlpack(nvte_ep.nvfp4_unpack(rows, 32, dtype="float32"))
    del tokens, rows
    gc.collect()
    assert (decoded == 6).all()


def test_parts_of_an_operand_survive_it() -> None:
    operand = nvte_ep.Operand("nvfp4", 32, 128, 1)
    assert operand.amax is not None
    operand.amax.numpy()[...] = 3
    amax = np.from_dlpack(operand.amax)
    del operand
    gc.collect()
    noise = [Array.empty((1 << 16,)) for _ in range(16)]
    for array in noise:
        array.numpy()[...] = 255
    assert amax.tolist() == [3.0]


@pytest.mark.parametrize("consumer", ["np.from_dlpack", "torch.from_dlpack", "jax.numpy.from_dlpack"])
def test_exit_with_consumers(framework: Framework, run_clean: Callable[..., str], consumer: str) -> None:
    """The deleters run after the interpreter began to end, or never; both are fine."""
    module = consumer.partition(".")[0]
    if module != "np":
        framework(module)
    code = f"""
        import sys, threading
        import numpy as np
        import nvte_ep
        {"import " + module if module != "np" else ""}
        class Keeper:
            pass
        # Gone with the last module:
        sys.keep = [{consumer}(nvte_ep.Array.empty((4, 4), "float32")) for _ in range(8)]
        cycle = Keeper()
        cycle.me, cycle.array = cycle, {consumer}(nvte_ep.Array.empty((4, 4), "float32"))
        capsule = nvte_ep.Array.empty((4, 4)).__dlpack__()  # never consumed
        threading.stack = [nvte_ep.Array.empty((4, 4)).__dlpack__(max_version=(1, 1))]
        print("done")
    """
    assert run_clean(code) == "done\n"


# ---- arrays on a device, without a device: only what is said about the memory --------------------


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    monkeypatch.setattr(_cuda, "order", lambda device, first, then: found.append((device, first, then)))
    return found


@pytest.fixture
def device_array() -> Array:
    return Array.borrow(0x7000_0000_0000, 1 << 20, (2, 1), None, stream=7).view("bfloat16").reshape(512, 1024)


def test_device_geometry(device_array: Array) -> None:
    part = device_array[2:4, 16:32]
    assert part.pointer == 0x7000_0000_0000 + (2 * 1024 + 16) * 2
    assert (part.shape, part.strides, part.device) == ((2, 16), (1024, 1), (2, 1))
    assert repr(part) == "Array(shape=(2, 16), dtype=bfloat16, device=cuda:1)"
    assert device_array[3, 5].shape == ()


def test_device_capsule(device_array: Array, orders: list[tuple[int, int, int]]) -> None:
    capsule = device_array.__dlpack__(stream=9, max_version=(1, 1))
    tensor, _, _ = dlpack_tensor(capsule)
    assert (tensor.device_type, tensor.device_id) == (2, 1)
    assert (tensor.dtype.code, tensor.dtype.bits) == (4, 16)
    assert tensor.data == 0x7000_0000_0000
    assert orders == [(1, 7, 9)]
    device_array.__dlpack__()
    assert orders[1:] == [(1, 7, 0)]
    device_array.__dlpack__(stream=-1)
    assert len(orders) == 2
    with pytest.raises(BufferError, match="copy"):
        device_array.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="cuda:1"):
        device_array.__dlpack__(dl_device=(1, 0))


def test_device_array_is_no_host_array(device_array: Array) -> None:
    with pytest.raises(TypeError, match="CUDA device"):
        np.asarray(device_array)


def test_device_cuda_array_interface(device_array: Array) -> None:
    assert not hasattr(Array.empty((2,)), "__cuda_array_interface__")
    assert not hasattr(device_array, "__cuda_array_interface__")  # it has no bfloat16
    interface = device_array.view("float16")[:4].__cuda_array_interface__
    assert interface["data"] == (0x7000_0000_0000, False)
    assert (interface["shape"], interface["typestr"], interface["stream"]) == ((4, 1024), "<f2", 7)


def test_device_memory_needs_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)  # importing it fails
    with pytest.raises(nvte_ep.UnsupportedError, match="pip install cuda-python, or pass out="):
        Array.empty((4,), "uint8", "cuda")


class FakeRuntime:
    """cuda.bindings.runtime, as far as memory is concerned."""

    class cudaStreamCaptureMode:
        cudaStreamCaptureModeRelaxed = 2

    def __init__(self) -> None:
        self.device = 0
        self.mode = 0
        self.live: dict[int, int] = {}
        self.room = self.total = 1 << 20
        self.allocated = 0  # in all
        self.waits = 0  # for the device
        self.sizes: dict[int, int] = {}

    def cudaGetDevice(self) -> tuple[int, int]:
        return 0, self.device

    def cudaSetDevice(self, device: int) -> tuple[int]:
        self.device = device
        return (0,)

    def cudaThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:
        before, self.mode = self.mode, mode
        return 0, before

    def cudaMalloc(self, nbytes: int) -> tuple[int, int]:
        assert self.mode == 2
        if sum(self.sizes[address] for address in self.live) + nbytes > self.room:
            return 2, 0
        address = 0x7000_0000_0000 + 4096 * self.allocated
        self.allocated += 1
        self.live[address], self.sizes[address] = self.device, nbytes
        return 0, address

    def cudaFree(self, address: int) -> tuple[int]:
        assert self.mode == 2
        assert self.live.pop(address) == self.device
        self.waits += 1
        return (0,)

    def cudaMemGetInfo(self) -> tuple[int, int, int]:
        return 0, self.total, self.total


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """CUDA with no memory of this package's in it yet."""
    cudart = FakeRuntime()
    monkeypatch.setattr(_cuda, "runtime", lambda: cudart)
    monkeypatch.setattr(_device_pool, "_pools", {})
    return cudart


def test_device_memory_lives_as_long_as_what_is_made_of_it(cudart: FakeRuntime) -> None:
    array = Array.empty((16, 4), "float32", "cuda:3")
    assert array.device == (2, 3)
    assert cudart.live == {array.pointer: 3}
    assert (cudart.device, cudart.mode) == (0, 0)  # as they were
    part = array[3:5]
    capsule = part.__dlpack__(stream=-1)
    for _ in range(2):
        nvte_ep.empty_cache()
        assert len(cudart.live) == 1
        array = part = None  # type: ignore[assignment]
        gc.collect()
    del capsule
    gc.collect()
    assert len(cudart.live) == 1  # kept, though nobody uses it
    nvte_ep.empty_cache()
    assert cudart.live == {}
    assert (cudart.device, cudart.mode) == (0, 0)


def test_device_memory_is_used_again_after_the_device_was_idle(
    cudart: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device_pool, "MOST_BLOCKS", 3)
    first = [Array.empty(1000, device="cuda:1") for _ in range(4)]
    addresses = {array.pointer for array in first}
    assert cudart.waits == 0
    first.clear()
    gc.collect()
    again = Array.empty(1000, device="cuda:1")  # more than three wait: CUDA is asked once, by a release
    assert cudart.waits == 1
    assert again.pointer in addresses
    more = [Array.empty(1000, device="cuda:1") for _ in range(2)]
    assert {again.pointer, *(array.pointer for array in more)} < addresses
    assert cudart.allocated == 4
    other = Array.empty(1000, device="cuda:2")  # another device's
    assert (cudart.live[other.pointer], cudart.allocated) == (2, 5)


def test_nothing_is_used_again_before_the_device_was_idle(cudart: FakeRuntime) -> None:
    for count in range(1, 20):
        array = Array.empty(1000, device="cuda")
        del array
        gc.collect()
        assert (cudart.allocated, cudart.waits) == (count, 0)


def test_what_waits_is_limited(cudart: FakeRuntime) -> None:
    limit = cudart.total // _device_pool.SHARE
    for _ in range(50):
        array = Array.empty(limit // 3, device="cuda")
        del array
        gc.collect()
        assert sum(cudart.sizes[address] for address in cudart.live) <= 2 * limit + 2 * (limit // 3)
    assert 0 < cudart.waits < 30


def test_out_of_device_memory_gives_back_what_is_kept(cudart: FakeRuntime) -> None:
    array = Array.empty((3 << 18,), "uint8", "cuda")
    del array
    gc.collect()
    array = Array.empty((1 << 19,), "uint8", "cuda")  # with what is kept there would not be room
    assert list(cudart.live) == [array.pointer]
    with pytest.raises(nvte_ep.OutOfMemoryError, match="cudaMalloc"):
        Array.empty((1 << 21,), "uint8", "cuda")
    assert (cudart.device, cudart.mode) == (0, 0)


def test_nobody_waits_for_a_thread_that_waits_for_the_device(
    cudart: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks as threads on one GPU: what ends one's wait is what the other launches next."""
    monkeypatch.setattr(_device_pool, "MOST_BLOCKS", 1)
    first = [Array.empty(1000, device="cuda") for _ in range(3)]
    first.clear()
    gc.collect()
    waiting, launched = threading.Event(), threading.Event()
    release = FakeRuntime.cudaFree

    def wait(self: FakeRuntime, address: int) -> tuple[int]:
        waiting.set()
        assert launched.wait(10), "the other thread did not get its memory"
        return release(self, address)

    monkeypatch.setattr(FakeRuntime, "cudaFree", wait)
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(Array.empty, 1000, "uint8", "cuda")
        assert waiting.wait(10)
        other = Array.empty(1000, "uint8", "cuda")
        assert not one.done()
        launched.set()
        assert one.result().pointer != other.pointer


def test_what_is_ready_is_taken_before_the_device_is_waited_for(
    cudart: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device_pool, "MOST_BLOCKS", 3)
    kept = [Array.empty(1000, device="cuda") for _ in range(8)]
    kept.clear()
    gc.collect()
    kept = [Array.empty(1000, device="cuda") for _ in range(5)]  # two more are ready
    assert cudart.waits == 1
    kept.clear()  # more than three wait
    gc.collect()
    kept = [Array.empty(1000, device="cuda") for _ in range(2)]
    assert cudart.waits == 1
    kept.append(Array.empty(1000, device="cuda"))
    assert (cudart.waits, cudart.allocated) == (2, 8)


def test_a_release_that_fails_uses_nothing_again(
    cudart: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device_pool, "MOST_BLOCKS", 1)
    first = [Array.empty(1000, device="cuda") for _ in range(3)]
    addresses = {array.pointer for array in first}
    first.clear()
    gc.collect()
    monkeypatch.setattr(FakeRuntime, "cudaFree", lambda self, address: (700,))
    array = Array.empty(1000, device="cuda")
    assert array.pointer not in addresses


@pytest.mark.parametrize("nbytes", [0, 1, 511, 512, 513, 4096, 4097, 10**6, 525_336_576, 2**33 + 1])
def test_sizes_of_blocks(nbytes: int) -> None:
    size = _device_pool.block_size(nbytes)
    assert max(nbytes, 1) <= size <= max(nbytes + 512, nbytes * 9 // 8)
    assert size % 512 == 0
    assert _device_pool.block_size(size) == size


def test_arguments_that_are_no_sizes_or_types() -> None:
    assert Array.empty(np.int64(3)).shape == (3,)  # type: ignore[arg-type]
    shapes: list[Any] = ["text", None, 1.5, (2, "3"), (2, 1.0), 10**400]
    for shape in shapes:
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"Array.empty: shape"):
            Array.empty(shape)
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"Array.view: dtype"):
        Array.empty(8).view("float3")
    devices: list[Any] = [("a", 0), (1, None), "cuda:99999999999", 3]
    for device in devices:
        with pytest.raises(nvte_ep.InvalidArgumentError, match=r"device"):
            Array.empty(8, device=device)
