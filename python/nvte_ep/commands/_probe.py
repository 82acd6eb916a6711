"""What the driver and NCCL say, as JSON on standard output. doctor runs this in a process of its own: a
broken driver must not end doctor, and doctor must not leave CUDA or NCCL in the caller's process.

    python -c "from nvte_ep.commands import _probe; _probe.main()"
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from nvte_ep import _lib, _nccl
from nvte_ep.errors import NvteEpError

COMPUTE_CAPABILITY = (75, 76)  # CUdevice_attribute: major, minor


def probe_driver() -> dict[str, Any]:
    """Version and devices; "error" where there is no driver or it does not start."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": str(error)}
    found: dict[str, Any] = {"path": loaded_file("libcuda.so") or "libcuda.so.1"}
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        found["cuda_version"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    code = cuda.cuInit(0)
    if code != 0:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        return found | {"error": f"cuInit: {(text.value or b'unknown error').decode()} ({code})"}
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    found["devices"] = [_device(cuda, index) for index in range(count.value)]
    return found


def _device(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, len(name), device)
    nbytes = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)
    capability = []
    for attribute in COMPUTE_CAPABILITY:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return {
        "name": name.value.decode(errors="replace"),
        "compute_capability": f"{capability[0]}.{capability[1]}",
        "memory_bytes": nbytes.value,
    }


def probe_nccl() -> dict[str, Any]:
    """The NCCL that this package's library would use here, found as it finds it."""
    _nccl.preload()
    tried = ["libnccl.so.2"]
    with contextlib.suppress(NvteEpError):  # the place beside an installed library, which its RUNPATH names
        tried.append(str(_lib.find().resolve().parent / "../../nvidia/nccl/lib/libnccl.so.2"))
    errors = []
    for name in tried:
        try:
            nccl = ctypes.CDLL(name)
        except OSError as error:
            errors.append(str(error))
            continue
        found: dict[str, Any] = {"path": loaded_file("libnccl.so") or name}
        number = ctypes.c_int()
        if nccl.ncclGetVersion(ctypes.byref(number)) == 0:
            found["version"] = version_text(number.value)
        return found
    return {"error": errors[0]}


def version_text(number: int) -> str:
    """22307 -> "2.23.7"; NCCL before 2.9 counts differently."""
    scale = 10000 if number >= 10000 else 1000
    return f"{number // scale}.{number % scale // 100}.{number % 100}"


def loaded_file(prefix: str) -> str | None:
    """The file that this process has mapped under a library's name."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).name.startswith(prefix):
            return fields[5]
    return None


def main() -> None:
    probes = {"driver": probe_driver, "nccl": probe_nccl}
    for name in sys.argv[1:] or list(probes):
        print(json.dumps(probes[name]()), flush=True)
