# SPDX-License-Identifier: Apache-2.0
"""Views that are made once for an array: used again, never wrong, never what keeps an array alive."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import nvte_ep
import pytest
from nvte_ep import Array, _abi, _dlpack, _kept_views, _lib, _torch_tensor

Framework = Callable[[str], ModuleType]


def read(array: Any, **settings: Any) -> _dlpack.View:
    return _dlpack.view("function", "argument", array, **settings)


def seen(view: _dlpack.View) -> tuple[Any, ...]:
    """What the library would read."""
    tensor, ndim = view.tensor, view.tensor.ndim
    dtype = tensor.dtype_code, tensor.dtype_bits
    return tensor.data, list(tensor.shape[:ndim]), list(tensor.strides[:ndim]), dtype


def fresh(array: Any, **settings: Any) -> tuple[Any, ...]:
    return seen(read(array, lasting=True, **settings))  # never kept


def make(kind: str, framework: Framework) -> Any:
    if kind == "Array":
        return Array.empty((4, 8), "float32")
    torch = framework("torch")
    return (
        torch.zeros(4, 8) if kind == "torch" else torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    )


KINDS = ["Array", "torch", "parameter"]


@pytest.mark.parametrize("kind", KINDS)
def test_made_once(kind: str, framework: Framework) -> None:
    array = make(kind, framework)
    first = read(array)
    assert read(array) is first
    assert seen(first) == fresh(array)


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_may_die(kind: str, framework: Framework) -> None:
    array = make(kind, framework)
    read(array)
    dead = weakref.ref(array)
    del array
    gc.collect()
    assert dead() is None


def test_made_once_for_the_same_memory(framework: Framework) -> None:
    torch = framework("torch")
    memory = torch.zeros(4, 8)
    first = read(memory.view(4, 8))
    assert read(memory.view(4, 8)) is first
    assert read(memory.view(4, 8), as_bytes=True) is not first
    array = Array.empty((4, 8), "float32")
    assert read(array[:2]) is read(array[:2])
    for other in (array[1:3], array[:3], array[::2], array[:2].view("int32")):
        assert seen(read(other)) == fresh(other) != seen(read(array[:2]))


@pytest.mark.parametrize("kind", ["Array", "torch"])
def test_memory_of_a_dead_array_used_anew(kind: str, framework: Framework) -> None:
    """Identities and addresses come again, with other shapes and types."""
    torch = framework("torch")
    rng = np.random.default_rng(0)
    identities = set()
    repeated = 0
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
        dtype = str(rng.choice(["float32", "int32", "uint8", "float16"]))
        array: Any = Array.empty(shape, dtype)
        if kind == "torch":
            array = torch.from_numpy(np.zeros(shape, dtype))
        repeated += id(array) in identities
        identities.add(id(array))
        assert seen(read(array)) == fresh(array)
        assert seen(read(array)) == fresh(array)
        del array
    assert repeated > 0  # else the test says nothing


def test_numpy_arrays_are_not_kept() -> None:
    """They stay free to change, which a weak reference would forbid."""
    array = np.zeros((4, 8), np.float32)
    before = len(_dlpack._kept)
    read(array)
    assert len(_dlpack._kept) == before
    array.resize((2, 2), refcheck=False)
    assert seen(read(array)) == fresh(array)
    array.flags.writeable = False
    with pytest.raises(nvte_ep.InvalidArgumentError, match="writable"):
        read(array, writable=True)


def test_torch_tensor_changes_in_place(framework: Framework) -> None:
    torch = framework("torch")
    tensor = torch.zeros(4, 8)
    first = read(tensor)
    tensor.resize_(2, 8)
    assert seen(read(tensor)) == fresh(tensor)
    assert read(tensor) is not first
    tensor.set_(torch.ones(5, 3))
    assert seen(read(tensor)) == fresh(tensor)
    tensor.t_()
    with pytest.raises(nvte_ep.InvalidArgumentError, match="contiguous"):
        read(tensor)
    tensor.t_()
    tensor.data = torch.ones(2, 6, dtype=torch.float16)
    assert seen(read(tensor)) == fresh(tensor)
    moved = torch.ones(2, 6)
    tensor.data = moved
    assert seen(read(tensor))[0] == moved.data_ptr()


def test_torch_tensor_that_gets_a_gradient(framework: Framework) -> None:
    """DLPack refuses such a tensor, whatever it was before."""
    torch = framework("torch")
    tensor = torch.zeros(4, 8)
    read(tensor)
    tensor.requires_grad_()
    with pytest.raises(nvte_ep.InvalidArgumentError, match="grad"):
        read(tensor)
    tensor.requires_grad_(False)
    assert seen(read(tensor)) == fresh(tensor)


@pytest.mark.parametrize("lazy", ["_neg_view", "conj"])
def test_lazy_torch_tensors_are_refused_each_time(lazy: str, framework: Framework) -> None:
    torch = framework("torch")
    base = torch.zeros(4, 8, dtype=torch.complex64 if lazy == "conj" else torch.float32)
    tensor = torch.conj(base) if lazy == "conj" else torch._neg_view(base)
    for _ in range(2):
        with pytest.raises(nvte_ep.InvalidArgumentError, match="as it is"):
            read(tensor)


@pytest.mark.parametrize("kind", ["sparse", "meta", "subclass"])
def test_other_torch_tensors_are_not_kept(kind: str, framework: Framework) -> None:
    torch = framework("torch")
    before = len(_dlpack._kept)
    if kind == "subclass":
        tensor = torch.zeros(4, 8).as_subclass(type("Mine", (torch.Tensor,), {}))
        assert seen(read(tensor)) == fresh(tensor)
    else:
        tensor = torch.zeros(4, 8, device="meta") if kind == "meta" else torch.eye(4).to_sparse()
        with pytest.raises(nvte_ep.InvalidArgumentError):
            read(tensor)
    assert len(_dlpack._kept) == before


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "int32", "int64", "uint8", "float8_e4m3fn", "bool"]
)
@pytest.mark.parametrize("cut", ["whole", "rows", "one row", "empty", "transposed one"])
def test_torch_attributes_say_what_dlpack_says(dtype: str, cut: str, framework: Framework) -> None:
    torch = framework("torch")
    whole = torch.zeros(6, 16).to(getattr(torch, dtype))
    tensor = {
        "whole": whole,
        "rows": whole[1::2, :8],
        "one row": whole[2:3],
        "empty": whole[:0],
        "transposed one": whole[:1].t(),
    }[cut]
    assert _torch_tensor.facts(tensor, 0) is not None
    view = read(tensor)
    wanted = read(tensor, lasting=True)
    assert bytes(view.tensor) == bytes(wanted.tensor)
    assert (view.dtype, view.shape, view.device) == (wanted.dtype, wanted.shape, wanted.device)


def test_ways_of_reading_do_not_mix() -> None:
    array = np.zeros((4, 8), np.uint16)
    assert read(array).dtype.name == "uint16"
    assert read(array, uint16_is="bfloat16").dtype.name == "bfloat16"
    assert read(array, uint16_is="float16").dtype.name == "float16"
    assert read(array).dtype.name == "uint16"


def test_a_number_of_no_dimension_stays_one() -> None:
    """read_scalar shows it to the library as [1]; others still see what it is."""
    tokens = np.zeros((2, 32), np.float32)
    count = Array.empty(1, "int64").reshape()
    count.numpy()[...] = 1
    nvte_ep.nvfp4_pack(tokens, row_count=count)
    assert read(count).shape == ()
    assert read(count).tensor.ndim == 0
    nvte_ep.nvfp4_pack(tokens, row_count=count)


def test_memory_that_was_taken_back_is_refused() -> None:
    comm = nvte_ep.Communicator.threads(1)[0]
    group = nvte_ep.Group(comm, num_experts=1, hidden=32, max_tokens_per_rank=4, recv_capacity=4)
    memory = group.mem_alloc(1024)
    read(memory)
    group.close()
    with pytest.raises(nvte_ep.BadStateError, match="closed"):
        read(memory)


def test_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kept_views, "MOST", 8)
    kept: _kept_views.KeptViews[str] = _kept_views.KeptViews()
    for number in range(20):
        kept.keep(number, "view")
        assert kept.find(number) == "view"
    assert len(kept) <= 8


def test_a_pair_as_rng_state_lives_as_long_as_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its array is made inside; nothing else may get its memory before the library has read it."""
    real_call = _lib.call
    found: list[list[int]] = []

    def call(name: str, *arguments: Any) -> None:
        others = [np.full(2, -1, np.int64) for _ in range(200)]
        for options in arguments:
            if isinstance(options, _abi.CodecOptions):
                address = options.rng_state.contents.data
                found.append(list((ctypes.c_int64 * 2).from_address(address)))
        del others
        real_call(name, *arguments)

    monkeypatch.setattr(_lib, "call", call)
    tokens = np.ones((2, 32), np.float32)
    for seed in range(20):
        nvte_ep.nvfp4_pack(tokens, rounding="stochastic", rng_state=(seed, 7))
    assert found == [[seed, 7] for seed in range(20)]
