# SPDX-License-Identifier: Apache-2.0
"""Arrays on their way in: whatever speaks DLPack or __cuda_array_interface__ becomes the tensor struct, or is
refused by the name of its argument."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import nvte_ep
import pytest
from fake_arrays import NUMPY, CudaArrayInterface, Producer
from nvte_ep import _cuda, _dlpack
from nvte_ep._dlpack import View

Framework = Callable[[str], ModuleType]


def read(array: Any, **settings: Any) -> View:
    return _dlpack.view("function", "argument", array, **settings)


def refused(array: Any, match: str, **settings: Any) -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match=f"^function: argument: expected .*{match}"):
        read(array, **settings)


def dtype_of(view: View) -> tuple[int, int, int]:
    return view.tensor.dtype_code, view.tensor.dtype_bits, view.tensor.dtype_lanes


NUMPY_TYPES = {
    "int32": (0, 32, 1),
    "int64": (0, 64, 1),
    "uint8": (1, 8, 1),
    "uint16": (1, 16, 1),
    "float16": (2, 16, 1),
    "float32": (2, 32, 1),
    "float64": (2, 64, 1),
}


@pytest.mark.parametrize("name", list(NUMPY_TYPES))
def test_numpy(name: str) -> None:
    array = np.zeros((3, 8), name)
    view = read(array)
    assert dtype_of(view) == NUMPY_TYPES[name]
    assert view.tensor.data == array.ctypes.data
    assert (view.tensor.ndim, list(view.tensor.shape), list(view.tensor.strides)) == (
        2,
        [3, 8, 0, 0],
        [8, 1, 0, 0],
    )
    assert (view.tensor.device_type, view.tensor.device_id) == (1, 0)
    assert view.tensor.owner is None  # whoever calls holds the array
    assert read(array, lasting=True).tensor.owner is array


@pytest.mark.parametrize("name", list(NUMPY_TYPES))
def test_numpy_through_dlpack_is_the_same(name: str) -> None:
    array = np.zeros((4, 8), name)[1:, :]
    direct, exported = read(array), read(Producer(array))
    assert bytes(direct.tensor) == bytes(exported.tensor)


def test_numpy_row_stride() -> None:
    view = read(np.zeros((4, 16), np.float32)[::2, 3:11])
    assert list(view.tensor.strides[:2]) == [32, 1]
    assert list(view.tensor.shape[:2]) == [2, 8]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 8), np.float32)[:, ::2],
        np.zeros((8, 4), np.float32).T,
        np.zeros(8, np.float32)[::-1],
        np.broadcast_to(np.float32(1), (4, 8)),
    ],
    ids=["every other column", "transposed", "reversed", "broadcast"],
)
def test_inner_dimension_must_be_dense(array: np.ndarray[Any, Any]) -> None:
    refused(array, "a contiguous inner dimension, got shape")
    if array.flags.writeable:  # NumPy does not export the others
        refused(Producer(array), "a contiguous inner dimension, got shape")


def test_strides_of_single_elements_do_not_matter() -> None:
    for array in (
        np.zeros((1, 8), np.float32, order="F"),
        np.zeros((8, 3), np.float32)[:, :1][:1],
        np.zeros((5, 1), np.float32)[::5],
        np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (1, 8), (12, 4)),
    ):
        view = read(array)
        columns = array.shape[1]
        assert list(view.tensor.strides[:2]) == [columns, 1]


def test_strides_of_part_of_an_element() -> None:
    records = np.zeros(4, np.dtype([("pad", "u1"), ("value", "<f4")]))
    refused(records["value"], "strides of whole elements")


def test_empty_arrays() -> None:
    view = read(np.zeros((0, 8), np.float32))
    assert list(view.tensor.shape[:2]) == [0, 8]
    assert list(view.tensor.strides[:2]) == [8, 1]
    assert view.tensor.data is None  # nothing there to point to


def test_too_many_dimensions() -> None:
    refused(np.zeros((1, 1, 1, 1, 1)), "at most 4 dimensions, got 5")


def test_unknown_types() -> None:
    refused(np.zeros(3, np.complex64), "an element type that the library knows, got NumPy complex64")
    refused(np.zeros(3, ">f4"), "an element type")
    refused(np.array(["text"]), "an element type")
    refused(Producer(np.zeros(4, np.float32), dtype=(5, 64, 1)), r"an element type .*\(5, 64, 1\)")


@pytest.mark.parametrize("nothing", [None, 3, "text", object(), [1.0]], ids=repr)
def test_no_array(nothing: Any) -> None:
    refused(nothing, "an array with __dlpack__ or __cuda_array_interface__")


def test_read_only_numpy() -> None:
    array = np.zeros((2, 8), np.float32)
    array.flags.writeable = False
    read(array)
    refused(array, "a writable array, got a read-only ndarray", writable=True)
    if NUMPY >= (2, 1):  # before, it does not export them at all
        refused(Producer(array), "a writable array, got a read-only Producer", writable=True)


def test_old_producers() -> None:
    producer = Producer(np.zeros((2, 8), np.float32), old=True)
    view = read(producer)
    assert list(view.tensor.shape[:2]) == [2, 8]
    assert producer.calls == [{"max_version": (1, 1)}, {}]


def test_host_arrays_get_no_stream() -> None:
    producer = Producer(np.zeros((2, 8), np.float32))
    read(producer, stream=5)
    assert producer.calls == [{"max_version": (1, 1)}]


@pytest.mark.parametrize(("stream", "told"), [(0, 1), (1, 1), (2, 2), (4711, 4711), (-1, -1)])
def test_device_arrays_get_the_stream(stream: int, told: int) -> None:
    producer = Producer(np.zeros((2, 8), np.float32), device=(2, 3))
    view = read(producer, stream=stream)
    assert producer.calls == [{"max_version": (1, 1), "stream": told}]
    assert (view.tensor.device_type, view.tensor.device_id) == (2, 3)


def test_managed_memory_is_device_memory() -> None:
    view = read(Producer(np.zeros((2, 8), np.float32), device=(13, 1)))
    assert (view.tensor.device_type, view.tensor.device_id) == (2, 1)


def test_pinned_memory_is_host_memory() -> None:
    producer = Producer(np.zeros((2, 32), np.float32), device=(3, 0))
    assert read(producer).tensor.device_type == 3
    assert producer.calls == [{"max_version": (1, 1)}]
    assert nvte_ep.nvfp4_pack(producer).tolist() == nvte_ep.nvfp4_pack(producer.array).tolist()


def test_byte_offset_and_missing_strides() -> None:
    array = np.arange(16, dtype=np.float32).reshape(2, 8)
    view = read(Producer(array, byte_offset=64, no_strides=True))
    assert view.tensor.data == array.ctypes.data
    assert list(view.tensor.strides[:2]) == [8, 1]


def test_a_producer_that_refuses_is_named() -> None:
    producer = Producer(np.zeros(8), error=BufferError("not today"))
    refused(producer, "an array that exports DLPack, got Producer: not today")


def test_a_capsule_of_a_later_major_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dlpack, "dlpack_tensor", lambda capsule: (None, 2, 0))
    refused(Producer(np.zeros(8)), "DLPack version 1, got version 2")


def test_a_consumed_capsule() -> None:
    producer = Producer(np.zeros(8, np.float32))
    capsule = producer.__dlpack__()

    class Once(Producer):
        def __dlpack__(self, **_: Any) -> Any:
            return capsule

    np.from_dlpack(Once(producer.array))
    with pytest.raises(TypeError, match="used_dltensor"):
        _dlpack.dlpack_tensor(capsule)


def test_the_memory_lives_as_long_as_the_view() -> None:
    class Tracked(np.ndarray):
        pass

    array = np.zeros((2, 8), np.float32).view(Tracked)
    gone = weakref.ref(array)
    view = read(Producer(array))
    del array
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


# ---- bytes, and types that NumPy does not have ---------------------------------------------------


def test_uint16_stands_for_bfloat16() -> None:
    array = np.zeros((2, 8), np.uint16)
    assert dtype_of(read(array)) == (1, 16, 1)
    assert dtype_of(read(array, uint16_is="bfloat16")) == (4, 16, 1)
    assert dtype_of(read(Producer(array), uint16_is="float16")) == (2, 16, 1)
    assert dtype_of(read(np.zeros(8, np.float32), uint16_is="bfloat16")) == (2, 32, 1)


def test_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert dtype_of(read(np.zeros((2, 8), ml_dtypes.bfloat16))) == (4, 16, 1)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        assert dtype_of(read(np.zeros((2, 8), getattr(ml_dtypes, name)), as_bytes=True)) == (1, 8, 1)
    # One element per byte there: taking these for packed codes would be wrong.
    refused(np.zeros((2, 8), ml_dtypes.float4_e2m1fn), "an element type", as_bytes=True)


@pytest.mark.parametrize("code", [(0, 8, 1), (1, 8, 1), (10, 8, 1), (12, 8, 1), (14, 8, 1), (17, 4, 2)])
def test_codes_are_bytes_where_bytes_are_asked_for(code: tuple[int, int, int]) -> None:
    producer = Producer(np.zeros((2, 8), np.uint8), dtype=code)
    assert dtype_of(read(producer)) == code
    assert dtype_of(read(producer, as_bytes=True)) == (1, 8, 1)


def test_floats_are_not_bytes() -> None:
    assert dtype_of(read(np.zeros(8, np.float32), as_bytes=True)) == (2, 32, 1)


def test_fp4_counted_in_elements() -> None:
    packed = Producer(np.zeros((3, 16), np.uint8), dtype=(17, 4, 1))
    view = read(packed, as_bytes=True)
    assert dtype_of(view) == (1, 8, 1)
    assert view.shape == (3, 8)
    assert list(view.tensor.strides[:2]) == [8, 1]
    refused(
        Producer(np.zeros((3, 15), np.uint8), dtype=(17, 4, 1)), "whole bytes of FP4 pairs", as_bytes=True
    )


def test_torch(framework: Framework) -> None:
    torch = framework("torch")
    for dtype, code in (
        (torch.bfloat16, (4, 16, 1)),
        (torch.float16, (2, 16, 1)),
        (torch.float32, (2, 32, 1)),
        (torch.uint8, (1, 8, 1)),
        (torch.int64, (0, 64, 1)),
    ):
        tensor = torch.zeros(3, 8, dtype=dtype)
        view = read(tensor, writable=True)
        assert dtype_of(view) == code
        assert view.tensor.data == tensor.data_ptr()
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
        assert dtype_of(read(torch.empty(3, 8, dtype=dtype), as_bytes=True)) == (1, 8, 1)
    refused(torch.zeros(2, requires_grad=True), "an array that exports DLPack, got .*detach")
    assert list(read(torch.zeros(8, 6)[::2, :4]).tensor.strides[:2]) == [12, 1]
    refused(torch.zeros(8, 6).t(), "a contiguous inner dimension")


def test_jax(framework: Framework) -> None:
    jnp = framework("jax").numpy
    for name, code in (("bfloat16", (4, 16, 1)), ("float16", (2, 16, 1)), ("float32", (2, 32, 1))):
        array = jnp.zeros((3, 8), name)
        assert dtype_of(read(array)) == code
        # JAX arrays never change, though their capsules do not say so.
        refused(array, "a writable array, got a read-only", writable=True)
    for name in ("float8_e4m3fn", "float8_e8m0fnu"):
        assert dtype_of(read(jnp.zeros((3, 8), name), as_bytes=True)) == (1, 8, 1)


def test_jax_packs_fp4_as_we_do(framework: Framework) -> None:
    jnp = framework("jax").numpy
    values = jnp.array([[0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2], jnp.float4_e2m1fn)
    scales = np.full((1, 1), 0x38, np.uint8)  # E4M3 1.0
    tokens = nvte_ep.nvfp4_dequantize(values, scales, np.ones(1, np.float32), dtype="float32")
    assert tokens.tolist() == [[0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2]


# ---- __cuda_array_interface__ --------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """A CUDA without a device: memory lies on device 1, and orderings of streams are written down."""
    orders: list[tuple[int, int, int]] = []
    monkeypatch.setattr(_cuda, "pointer_device", lambda pointer: 1)
    monkeypatch.setattr(_cuda, "order", lambda device, first, then: orders.append((device, first, then)))
    return orders


def test_cuda_array_interface(cuda: list[tuple[int, int, int]]) -> None:
    view = read(CudaArrayInterface(), stream=7, writable=True)
    assert dtype_of(view) == (2, 32, 1)
    assert (view.tensor.device_type, view.tensor.device_id) == (2, 1)
    assert view.tensor.data == 0x7000_0000_0000
    assert list(view.tensor.strides[:2]) == [32, 1]
    assert cuda == []
    read(CudaArrayInterface(stream=5), stream=7)
    assert cuda == [(1, 5, 7)]
    assert list(read(CudaArrayInterface(strides=(256, 4))).tensor.strides[:2]) == [64, 1]


def test_cuda_array_interface_of_bfloat16(cuda: list[tuple[int, int, int]]) -> None:
    for typestr in ("|V2", "<V2", "<u2"):
        assert dtype_of(read(CudaArrayInterface(typestr=typestr), uint16_is="bfloat16")) == (4, 16, 1)


def test_cuda_array_interface_that_is_refused(cuda: list[tuple[int, int, int]]) -> None:
    refused(CudaArrayInterface(typestr="<c8"), "an unmasked array")
    refused(CudaArrayInterface(mask=object()), "an unmasked array")
    refused(CudaArrayInterface(strides=(130, 4)), "strides of whole elements")
    refused(CudaArrayInterface(strides=(4, 8)), "a contiguous inner dimension")
    refused(CudaArrayInterface(data=(16, True)), "a writable array", writable=True)


def test_dlpack_is_preferred(cuda: list[tuple[int, int, int]]) -> None:
    class Both(Producer):
        __cuda_array_interface__ = CudaArrayInterface().__cuda_array_interface__

    array = np.zeros((2, 8), np.float32)
    assert read(Both(array)).tensor.data == array.ctypes.data


# ---- what looks like an array and is none --------------------------------------------------------


def test_a_mask_is_not_ignored() -> None:
    refused(
        np.ma.masked_invalid(np.zeros((2, 8), np.float32)), r"an array without a mask .*, got MaskedArray"
    )


@pytest.mark.parametrize("capsule", [5, None, "dltensor"], ids=repr)
def test_a_producer_that_exports_no_capsule(capsule: Any) -> None:
    class Liar(Producer):
        def __dlpack__(self, **_: Any) -> Any:
            return capsule

    refused(Liar(np.zeros(8, np.float32)), "an array that exports DLPack, got Liar: ")


def test_a_producer_of_a_consumed_capsule() -> None:
    array = np.zeros(8, np.float32)
    capsule = array.__dlpack__()

    class Once(Producer):
        def __dlpack__(self, **_: Any) -> Any:
            return capsule

    np.from_dlpack(Once(array))
    refused(Once(array), "an array that exports DLPack, got Once: .*used_dltensor")


@pytest.mark.parametrize("device", [5, (1,), (1, 2, 3), ("a", "b"), None], ids=repr)
def test_a_producer_without_a_device(device: Any) -> None:
    refused(Producer(np.zeros(8, np.float32), device=device), "an array that exports DLPack, got Producer: ")


@pytest.mark.parametrize(
    "change", [{"shape": 5}, {"shape": ("a",)}, {"data": 7}, {"data": None}, {"typestr": "?!"}], ids=repr
)
def test_a_malformed_cuda_array_interface(cuda: list[tuple[int, int, int]], change: dict[str, Any]) -> None:
    refused(CudaArrayInterface(**change), "an array that exports __cuda_array_interface__, got Cuda")


def test_torch_tensors_that_memory_does_not_hold(framework: Framework) -> None:
    torch = framework("torch")
    refused(torch.empty((2, 8), device="meta"), "an array that exports DLPack, got Tensor: ")
    negative = torch.zeros((2, 8), dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    refused(negative, r"a tensor that memory holds as it is \(see .resolve_neg\(\)\), got is_neg")
    read(negative.resolve_neg().contiguous())
    refused(torch.zeros((2, 8), dtype=torch.complex64).conj(), r"resolve_conj\(\)")
