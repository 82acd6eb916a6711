# SPDX-License-Identifier: Apache-2.0
"""libnvte_ep for Python: expert-parallel dispatch and combine of MoE tokens in BF16, MXFP8 and NVFP4.

Importing this package touches neither CUDA nor NCCL, and does not load the library: that is for the first
call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvte_ep._device_pool import empty_cache
    from nvte_ep.array import Array
    from nvte_ep.codecs import (
        mxfp8_dequantize,
        mxfp8_direct_receive,
        mxfp8_pack,
        mxfp8_quantize,
        mxfp8_unpack,
        nvfp4_dequantize,
        nvfp4_direct_receive,
        nvfp4_pack,
        nvfp4_quantize,
        nvfp4_unpack,
        scales_swizzle,
        scales_unswizzle,
    )
    from nvte_ep.communicator import Communicator, unique_id
    from nvte_ep.errors import (
        AbiMismatchError,
        BadStateError,
        CudaError,
        InternalError,
        InvalidArgumentError,
        LibraryNotFoundError,
        NvteEpError,
        OutOfMemoryError,
        PeerFailedError,
        PeerTimeoutError,
        RecvOverflowError,
        Status,
        TransportError,
        UnsupportedError,
    )
    from nvte_ep.formats import FormatInfo, format_info, row_bytes
    from nvte_ep.group import ErrorInfo, Group, GroupInfo, MemoryInfo
    from nvte_ep.handle import Handle, Received, Routing
    from nvte_ep.job import Job
    from nvte_ep.library import abi_version, build_info, library_path, version
    from nvte_ep.operand import Operand, OperandLayout, Part, operand_layout

    __version__: str

# Where each public name lives. Names are loaded when they are first used.
_HOMES = {
    "_device_pool": ("empty_cache",),
    "array": ("Array",),
    "codecs": (
        "mxfp8_dequantize",
        "mxfp8_direct_receive",
        "mxfp8_pack",
        "mxfp8_quantize",
        "mxfp8_unpack",
        "nvfp4_dequantize",
        "nvfp4_direct_receive",
        "nvfp4_pack",
        "nvfp4_quantize",
        "nvfp4_unpack",
        "scales_swizzle",
        "scales_unswizzle",
    ),
    "communicator": ("Communicator", "unique_id"),
    "errors": (
        "AbiMismatchError",
        "BadStateError",
        "CudaError",
        "InternalError",
        "InvalidArgumentError",
        "LibraryNotFoundError",
        "NvteEpError",
        "OutOfMemoryError",
        "PeerFailedError",
        "PeerTimeoutError",
        "RecvOverflowError",
        "Status",
        "TransportError",
        "UnsupportedError",
    ),
    "formats": ("FormatInfo", "format_info", "row_bytes"),
    "group": ("ErrorInfo", "Group", "GroupInfo", "MemoryInfo"),
    "handle": ("Handle", "Received", "Routing"),
    "job": ("Job",),
    "library": ("abi_version", "build_info", "library_path", "version"),
    "operand": ("Operand", "OperandLayout", "Part", "operand_layout"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AbiMismatchError",
    "Array",
    "BadStateError",
    "Communicator",
    "CudaError",
    "ErrorInfo",
    "FormatInfo",
    "Group",
    "GroupInfo",
    "Handle",
    "InternalError",
    "InvalidArgumentError",
    "Job",
    "LibraryNotFoundError",
    "MemoryInfo",
    "NvteEpError",
    "Operand",
    "OperandLayout",
    "OutOfMemoryError",
    "Part",
    "PeerFailedError",
    "PeerTimeoutError",
    "Received",
    "RecvOverflowError",
    "Routing",
    "Status",
    "TransportError",
    "UnsupportedError",
    "__version__",
    "abi_version",
    "build_info",
    "empty_cache",
    "format_info",
    "library_path",
    "mxfp8_dequantize",
    "mxfp8_direct_receive",
    "mxfp8_pack",
    "mxfp8_quantize",
    "mxfp8_unpack",
    "nvfp4_dequantize",
    "nvfp4_direct_receive",
    "nvfp4_pack",
    "nvfp4_quantize",
    "nvfp4_unpack",
    "operand_layout",
    "row_bytes",
    "scales_swizzle",
    "scales_unswizzle",
    "unique_id",
    "version",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.import_module("nvte_ep.library").package_version()
    elif name in ("job", "jax", "torch"):  # modules that the guide names; the last two need their frameworks
        value = importlib.import_module(f"nvte_ep.{name}")
    elif name in _HOME:
        value = getattr(importlib.import_module(f"nvte_ep.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
