# SPDX-License-Identifier: Apache-2.0
"""Makes the NCCL of this process the one that the library finds, and asks for the current CUDA device."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys

from nvte_ep import _cuda
from nvte_ep.errors import NvteEpError


@functools.lru_cache(maxsize=1)
def preload() -> None:
    """Loads NCCL from the place where the installed frameworks have theirs; the library takes one that is
    loaded.

    cuda.pathfinder looks in the process, in the nvidia wheels, in conda and in the system. Without it the
    library looks by itself.
    """
    with contextlib.suppress(Exception):  # whatever is missing, the library says so in its own words
        pathfinder = importlib.import_module("cuda.pathfinder")
        pathfinder.load_nvidia_dynamic_lib("nccl")


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
