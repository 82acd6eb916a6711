# SPDX-License-Identifier: Apache-2.0
"""PyTorch tensors read by their own attributes: what DLPack would say of them, in a tenth of its time.

PyTorch is never imported here. Whatever is out of the ordinary (a subclass, a gradient, a lazy negation,
another stream than PyTorch's current one) is left to DLPack, with its orderings and its errors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from nvte_ep._dtypes import BY_NAME, CPU, CUDA_TYPE, Device, DType

CUDA_HOST_TYPE = 3  # DLPack's: pinned

# Data pointer, shape, strides in elements, element type as PyTorch has it, device index: what a tensor is.
Facts = tuple[int, tuple[int, ...], tuple[int, ...], Any, int]


def is_plain(kind: type) -> bool:
    """torch.Tensor and torch.nn.Parameter; subclasses may be anything."""
    return (kind.__module__, kind.__name__) in (
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
    )


_ask: Callable[[int], int] | None = None  # PyTorch's own function, once it is in use on a device


def raw_stream(device_id: int) -> int | None:
    """PyTorch's current stream; None where it is not in use on a device."""
    global _ask
    if _ask is None:
        torch = sys.modules.get("torch")
        ask = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
        if torch is None or ask is None or not torch.cuda.is_initialized():
            return None
        _ask = ask
    return int(_ask(device_id))


def facts(tensor: Any, stream: int) -> Facts | None:
    """None: ask DLPack. Lazily conjugated tensors are complex, which no element type here is."""
    if tensor.requires_grad or tensor.is_neg():
        return None
    if tensor.is_cuda:
        index = tensor.get_device()
        if (raw_stream(index) if _ask is None else _ask(index)) != stream:
            return None
    elif tensor.is_cpu:
        index = -1
    else:
        return None
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, index
    except RuntimeError:  # no memory of the usual kind: sparse, nested, fake
        return None


@functools.cache
def element_type(dtype: Any) -> DType | None:
    return BY_NAME.get(str(dtype).removeprefix("torch."))


def device(tensor: Any, index: int) -> Device:
    if index >= 0:
        return CUDA_TYPE, index
    return (CUDA_HOST_TYPE, 0) if tensor.is_pinned() else CPU
