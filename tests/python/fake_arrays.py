# SPDX-License-Identifier: Apache-2.0
"""Producers that speak an array protocol in a way of their own, over NumPy memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from nvte_ep.array import DLTensor, dlpack_tensor

NUMPY = tuple(int(part) for part in np.__version__.split(".")[:2])  # DLPack 1.0 came with 2.1


class Producer:
    """Exports a NumPy array through DLPack as asked: versioned or not, with another device, type or
    version."""

    def __init__(self, array: np.ndarray[Any, Any], **changes: Any) -> None:
        self.array = array
        self.changes = changes
        self.calls: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.changes.get("device", (1, 0))
        return device

    def __dlpack__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        if "error" in self.changes:
            raise self.changes["error"]
        if self.changes.get("old") and "max_version" in arguments:  # of before DLPack 1.0
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        if self.changes.get("old") or NUMPY < (2, 1):
            capsule = self.array.__dlpack__()
        else:
            capsule = self.array.__dlpack__(max_version=arguments.get("max_version"))
        tensor, _, _ = dlpack_tensor(capsule)
        self.change(tensor)
        return capsule

    def change(self, tensor: DLTensor) -> None:
        if "device" in self.changes:
            tensor.device_type, tensor.device_id = self.changes["device"]
        if "dtype" in self.changes:
            tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = self.changes["dtype"]
        if "byte_offset" in self.changes:
            tensor.byte_offset = self.changes["byte_offset"]
            tensor.data -= self.changes["byte_offset"]
        if self.changes.get("no_strides"):
            tensor.strides = None


class CudaArrayInterface:
    """Has __cuda_array_interface__ and nothing else. The pointer is never followed."""

    def __init__(self, pointer: int = 0x7000_0000_0000, **interface: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (2, 32),
            "typestr": "<f4",
            "data": (pointer, False),
            "version": 3,
            **interface,
        }
