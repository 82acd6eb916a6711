# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU: ci/gpu_python.sh runs them. Elsewhere they are skipped, with the reason.

NVTE_EP_REQUIRE=cuda,torch,cupy,jax,triton,two_gpus turns each of these skips into a failure.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import nvte_ep
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the launcher of tests/distributed
sys.path.insert(0, str(Path(__file__).resolve().parent))
# JAX takes most of a GPU's memory otherwise, and there are others in this process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Streams of one process share so many queues of a GPU, and ranks that wait for each other must share none.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from device_arrays import PRODUCERS, Delay, NewStream, Producer, RawMemory

Missing = Callable[[str, str], NoReturn]
Framework = Callable[[str], ModuleType]

CYCLES_PER_MILLISECOND = 2_000_000  # no GPU's clock is faster: delays are at least as long as they say


@pytest.fixture(autouse=True)
def cudart(missing: Missing) -> Any:
    """cuda.bindings.runtime, where the library has a device to work on."""
    backends = {entry["name"]: entry for entry in nvte_ep.build_info()["backends"]}
    cuda = backends.get("cuda", {"available": False, "reason": "built without the CUDA backend"})
    if not cuda["available"]:
        missing("cuda", cuda["reason"])
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        missing("cuda", f"cuda.bindings cannot be imported: {error}")


@pytest.fixture
def torch(framework: Framework, missing: Missing) -> Any:
    module: Any = framework("torch")
    if not module.cuda.is_available():
        missing("torch", "this PyTorch has no CUDA")
    return module


@pytest.fixture
def cupy(framework: Framework) -> Any:
    return framework("cupy")


@pytest.fixture
def jax(framework: Framework, missing: Missing) -> Any:
    module: Any = framework("jax")
    try:
        module.devices("gpu")
    except RuntimeError as error:
        missing("jax", f"this JAX has no GPU: {error}")
    return module


@pytest.fixture
def two_gpus(cudart: Any, missing: Missing) -> None:
    code, count = cudart.cudaGetDeviceCount()
    assert int(code) == 0
    if count < 2:
        missing("two_gpus", "there is one GPU")


@pytest.fixture(params=PRODUCERS)
def producer(request: pytest.FixtureRequest) -> Producer:
    """Arrays of one framework after the other."""
    kind: type[Producer] = PRODUCERS[request.param]
    return kind(request.getfixturevalue(kind.needs))


@pytest.fixture
def raw(cudart: Any) -> RawMemory:
    """Plain device memory, by pointer."""
    return RawMemory(cudart)


@pytest.fixture
def new_stream(cudart: Any) -> Iterator[NewStream]:
    """Makes streams that do not wait for the legacy default stream, as handles; they end with the test."""
    made: list[int] = []

    def make() -> int:
        code, stream = cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking)
        assert int(code) == 0
        made.append(int(stream))
        return made[-1]

    yield make
    for stream in made:
        cudart.cudaStreamSynchronize(stream)
        cudart.cudaStreamDestroy(stream)


@pytest.fixture
def delay(torch: Any) -> Delay:
    """delay(stream) keeps a stream busy with a kernel for a tenth of a second or more."""
    torch.cuda._sleep(1)  # loaded now, not while others wait
    torch.cuda.synchronize()

    def run(stream: int, milliseconds: int = 100) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()):
            torch.cuda._sleep(CYCLES_PER_MILLISECOND * milliseconds)

    return run
