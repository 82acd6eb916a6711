# SPDX-License-Identifier: Apache-2.0
"""Which stream a call goes on: what a caller may pass, and whom we ask otherwise. No GPU needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import nvte_ep
import pytest
from nvte_ep import _streams

Framework = Callable[[str], ModuleType]
CUDA = (2, 1)


class Protocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 41


class Index:
    def __index__(self) -> int:
        return 42


class Int:
    def __int__(self) -> int:
        return 43


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (1 << 47, 1 << 47),
        (np.int64(5), 5),
        (Protocol(), 41),
        (Index(), 42),
        (Int(), 43),
        (SimpleNamespace(cuda_stream=44), 44),
        (SimpleNamespace(ptr=45), 45),
        (SimpleNamespace(__cuda_stream__=(0, 46)), 46),
    ],
)
def test_handle(stream: Any, handle: int) -> None:
    assert _streams.handle("function", stream) == handle


@pytest.mark.parametrize("stream", ["text", object(), [1]])
def test_no_stream(stream: Any) -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"^function: stream: expected an integer"):
        _streams.handle("function", stream)


def test_host_arrays_have_no_stream() -> None:
    assert _streams.current((1, 0), [np.zeros(1)]) == 0


def test_a_stream_for_host_arrays_is_refused() -> None:
    with pytest.raises(nvte_ep.InvalidArgumentError, match=r"stream"):
        nvte_ep.nvfp4_pack(np.zeros((1, 16), np.float32), stream=5)
    nvte_ep.nvfp4_pack(np.zeros((1, 16), np.float32), stream=0)


def fake_torch(initialised: bool = True) -> Any:
    def current_stream(device: int) -> Any:
        return SimpleNamespace(cuda_stream=100 + device)

    return SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: initialised, current_stream=current_stream)
    )


def fake_cupy() -> Any:
    return SimpleNamespace(
        cuda=SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=200 + device))
    )


@pytest.fixture
def no_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def of_framework(name: str) -> Any:
    return type("Array", (), {"__module__": f"{name}.something"})()


def test_nobody_to_ask(no_frameworks: None) -> None:
    assert _streams.current(CUDA, [object()]) == 0


def test_the_framework_that_is_imported(monkeypatch: pytest.MonkeyPatch, no_frameworks: None) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    assert _streams.current(CUDA, [object()]) == 201
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert _streams.current(CUDA, [object()]) == 101
    assert _streams.current(CUDA, [of_framework("cupy")]) == 201
    assert _streams.current(CUDA, [None, of_framework("torch")]) == 101


def test_a_framework_without_cuda_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, no_frameworks: None
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(initialised=False))
    assert _streams.current(CUDA, [of_framework("torch")]) == 0
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    assert _streams.current(CUDA, [of_framework("torch")]) == 0


def test_never_imports_a_framework(run_clean: Callable[..., str]) -> None:
    code = """
        import sys
        from nvte_ep import _streams
        assert _streams.current((2, 0), [object()]) == 0
        print(sorted({"torch", "cupy", "jax"} & set(sys.modules)))
    """
    assert run_clean(code) == "[]\n"


def test_exchange_api_of_torch(framework: Framework) -> None:
    torch = framework("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch has no DLPack exchange API")
    assert _streams.exchange_api_stream(torch.Tensor, (1, 0)) == 0
    assert _streams.exchange_api_stream(np.ndarray, (1, 0)) is None


def test_exchange_api_comes_first(monkeypatch: pytest.MonkeyPatch, no_frameworks: None) -> None:
    import ctypes

    stream_type = ctypes.PYFUNCTYPE(
        ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
    )

    def current(device_type: int, device_id: int, out: Any) -> int:
        out[0] = 300 + 10 * device_type + device_id
        return 0

    callback = stream_type(current)
    api = _streams._ExchangeApi(major=1, current_work_stream=ctypes.cast(callback, ctypes.c_void_p))
    new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    name = ctypes.c_char_p(b"dlpack_exchange_api")  # the capsule keeps the pointer
    capsule = new_capsule(ctypes.addressof(api), name, None)
    array = type("Array", (), {"__module__": "torch", "__dlpack_c_exchange_api__": capsule})()
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert _streams.current(CUDA, [array]) == 321
    api.major = 2
    assert _streams.current(CUDA, [array]) == 101
