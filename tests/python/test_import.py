# SPDX-License-Identifier: Apache-2.0
"""Importing is free: no library, no CUDA, no NCCL, no framework. Forks and exits are clean."""

from __future__ import annotations

from collections.abc import Callable

import nvte_ep
import pytest

LOADED = """
def loaded():
    files = {line.rpartition("/")[2] for line in open("/proc/self/maps")}
    names = ("libnvte_ep", "libcuda", "libcudart", "libnccl")
    return [name for name in names if any(file.startswith(name + ".so") for file in files)]
"""

ONE_STEP = """
import numpy as np
import nvte_ep

def step(group):
    handle = group.handle(top_k=1, alignment=1, dispatch="nvfp4")
    handle.prepare([[0], [1]])
    received = handle.dispatch(np.ones((2, 32), np.float32), receive="decoded")
    return handle, received, handle.combine(received.data)

def open_group():
    return nvte_ep.Group(
        nvte_ep.Communicator.threads(1)[0], num_experts=2, hidden=32, max_tokens_per_rank=4, recv_capacity=8
    )
"""


def test_import_loads_nothing(run_clean: Callable[..., str]) -> None:
    output = run_clean(
        LOADED
        + """
import sys
import nvte_ep
assert loaded() == [], loaded()
for name in nvte_ep.__all__:
    if name != "__version__":  # the version may have to be asked of the library
        assert getattr(nvte_ep, name) is not None
assert loaded() == [], loaded()
imported = {name.split(".")[0] for name in sys.modules}
assert not imported & {"torch", "jax", "jaxlib", "cupy", "cuda", "ml_dtypes"}
nvte_ep.row_bytes("nvfp4", 32)
assert loaded() == ["libnvte_ep"], loaded()
print("done")
"""
    )
    assert output == "done\n"


def test_public_names() -> None:
    assert set(nvte_ep.__all__) <= set(dir(nvte_ep))
    assert sorted(set(nvte_ep._HOME) | {"__version__"}) == sorted(nvte_ep.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        nvte_ep.no_such_name  # noqa: B018


def test_versions() -> None:
    assert nvte_ep.version().count(".") == 2
    assert nvte_ep.__version__
    assert nvte_ep.abi_version() == 1
    info = nvte_ep.build_info()
    assert info["version"] == nvte_ep.version()
    assert {transport["name"] for transport in info["transports"] if transport["available"]} >= {"threads"}


def test_fork_after_import(run_clean: Callable[..., str]) -> None:
    code = """
        import os
        import nvte_ep
        child = os.fork()
        width = nvte_ep.row_bytes("nvfp4", 32)
        if child == 0:
            os._exit(0 if width == 32 else 1)
        assert os.waitpid(child, 0)[1] == 0
        print(width)
    """
    assert run_clean(code) == "32\n"


def test_fork_with_live_objects(run_clean: Callable[..., str]) -> None:
    """The child leaves through the interpreter, so every finalizer runs there, and then in the parent."""
    code = (
        ONE_STEP
        + """
import os, sys, warnings
group = open_group()
live = step(group)
child = os.fork()
if child == 0:
    sys.exit(0)  # closes nothing of the parent's
assert os.waitpid(child, 0)[1] == 0
again = step(group)
assert again[2].tolist() == live[2].tolist()
group.close()
print("done")
"""
    )
    assert run_clean(code) == "done\n"


@pytest.mark.parametrize(
    "how", ["pass", "sys.exit(0)", "del group", "del live; gc.collect()", "group.close()"]
)
def test_exit_with_live_objects(run_clean: Callable[..., str], how: str) -> None:
    code = ONE_STEP + f"import gc, sys\ngroup = open_group()\nlive = step(group)\nprint('done')\n{how}\n"
    assert run_clean(code) == "done\n"


def test_exit_while_a_rank_waits(run_clean: Callable[..., str]) -> None:
    """A daemon thread waits for a peer that never comes; leaving the interpreter wakes nobody and hangs
    nowhere."""
    code = (
        ONE_STEP
        + """
import threading, time
comms = nvte_ep.Communicator.threads(2)
groups = [None, None]

def create(rank):
    groups[rank] = nvte_ep.Group(
        comms[rank], num_experts=2, hidden=32, max_tokens_per_rank=4, recv_capacity=8
    )

threads = [threading.Thread(target=create, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
handle = groups[0].handle(top_k=1, alignment=1)

def wait():
    try:
        handle.prepare([[0]])
    except nvte_ep.PeerFailedError:
        pass

waiting = threading.Thread(target=wait, daemon=True)
waiting.start()
time.sleep(0.2)
assert waiting.is_alive()
print("done")
"""
    )
    assert run_clean(code) == "done\n"


def test_reference_cycle_through_a_group(run_clean: Callable[..., str]) -> None:
    code = (
        ONE_STEP
        + """
import gc
group = open_group()
group.cycle = [group, step(group)]
del group
assert gc.collect() > 0
print("done")
"""
    )
    assert run_clean(code) == "done\n"
