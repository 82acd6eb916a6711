# SPDX-License-Identifier: Apache-2.0
"""Makes the NCCL of this process the one that the library finds, and asks for the current CUDA device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import sys

from nvte_ep import _cuda
from nvte_ep.errors import NvteEpError


@functools.lru_cache(maxsize=1)
def preload() -> None:
    """Loads NCCL from the place where the installed frameworks have theirs; the library takes one that is
    loaded.

    cuda.pathfinder looks in the process, in the nvidia wheels, in conda and in the system. Without it, and
    where NVTE_EP_NCCL_LIBRARY names the one to take, the library looks by itself.
    """
    if os.environ.get("NVTE_EP_NCCL_LIBRARY"):
        return
    with contextlib.suppress(Exception):  # whatever is missing, the library says so in its own words
        pathfinder = importlib.import_module("cuda.pathfinder")
        pathfinder.load_nvidia_dynamic_lib("nccl")


def device_of(nccl_comm: int) -> int | None:
    """The CUDA device of a caller's ncclComm_t; None: the NCCL of this process cannot be asked."""
    device = ctypes.c_int()
    try:
        nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        failed = nccl.ncclCommCuDevice(ctypes.c_void_p(nccl_comm), ctypes.byref(device))
    except (OSError, AttributeError):
        return None
    return None if failed else device.value


def current_device() -> int:
    """The current CUDA device: as PyTorch sees it where that is in use, else as CUDA does; 0 where neither
    can be asked."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    try:
        return _cuda.current_device()
    except NvteEpError:
        return 0
