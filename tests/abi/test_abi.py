# SPDX-License-Identifier: Apache-2.0
"""The header, the ctypes mirror, the export map, the built library and the released interface say the
same."""

from __future__ import annotations

import copy
import ctypes
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import abi_golden as golden
from abi_header import Header, read_header
from nvte_ep import _abi

MAP_FILE = Path(__file__).resolve().parents[2] / "src" / "api" / "nvte_ep.map"
# Names that TransformerEngine exports under the same prefix.
TAKEN = {
    f"nvte_ep_{name}"
    for name in (
        "initialize",
        "shutdown",
        "handle_mem_size",
        "prepare",
        "dispatch",
        "combine",
        "dispatch_bwd",
        "combine_bwd",
    )
}

SIMPLE_TYPES: dict[str, Any] = {
    "void": None,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint16_t": ctypes.c_uint16,
    "uint8_t": ctypes.c_uint8,
    "size_t": ctypes.c_size_t,
    "void*": ctypes.c_void_p,
    "char*": ctypes.c_char_p,
    "nvte_ep_status_t": ctypes.c_int32,
    "nvte_ep_stream_t": ctypes.c_void_p,
    "nvte_ep_comm_t": ctypes.c_void_p,
    "nvte_ep_group_t": ctypes.c_void_p,
    "nvte_ep_handle_t": ctypes.c_void_p,
    **_abi.STRUCTS,
}


def ctypes_type(spelling: str) -> Any:
    """The ctypes type of a C type."""
    spelling = re.sub(r"\bconst ", "", spelling)
    if spelling in SIMPLE_TYPES:
        return SIMPLE_TYPES[spelling]
    array = re.fullmatch(r"(.*)\[(\d+)\]", spelling)
    if array:
        return ctypes_type(array[1]) * int(array[2])
    function = re.fullmatch(r"(.*)\(\*\)\((.*)\)", spelling)
    if function:
        return ctypes.CFUNCTYPE(ctypes_type(function[1]), *map(ctypes_type, function[2].split(", ")))
    assert spelling.endswith("*"), spelling
    return ctypes.POINTER(ctypes_type(spelling[:-1]))


@pytest.fixture(scope="module")
def header() -> Header:
    return read_header()


def test_header_was_read(header: Header) -> None:
    assert len(header.functions) >= 40
    assert len(header.structs) >= 17
    assert len(header.constants) >= 60


def test_functions(header: Header) -> None:
    assert list(_abi.FUNCTIONS) == list(header.functions)
    for name, (result, arguments) in header.functions.items():
        restype, argtypes = _abi.FUNCTIONS[name]
        assert restype is ctypes_type(result), name
        assert list(argtypes) == [ctypes_type(argument) for argument in arguments], name


def test_struct_names(header: Header) -> None:
    assert list(_abi.STRUCTS) == list(header.structs)


@pytest.mark.parametrize("name", list(_abi.STRUCTS))
def test_struct(header: Header, name: str) -> None:
    mirror = _abi.STRUCTS[name]
    struct = header.structs[name]
    assert ctypes.sizeof(mirror) == struct.size
    assert [entry[0] for entry in mirror._fields_] == [entry[0] for entry in struct.fields]
    for (member, kind), (_, spelling, offset, size) in zip(mirror._fields_, struct.fields, strict=True):
        assert kind is ctypes_type(spelling), member
        assert getattr(mirror, member).offset == offset, member
        assert getattr(mirror, member).size == size, member


@pytest.mark.parametrize("name", list(_abi.STRUCTS))
def test_fresh_struct_is_all_defaults(name: str) -> None:
    size = ctypes.sizeof(_abi.STRUCTS[name])
    assert bytes(_abi.STRUCTS[name]()) == size.to_bytes(4, sys.byteorder) + bytes(size - 4)


def test_constants(header: Header) -> None:
    expected = {
        name: value
        for name, value in header.constants.items()
        if name not in golden.RELEASE_MACROS and not name.endswith("_V1_SIZE")
    }
    assert expected == _abi.CONSTANTS


def test_sizes_of_version_1(header: Header) -> None:
    sizes = {name: value for name, value in header.constants.items() if name.endswith("_V1_SIZE")}
    assert len(sizes) == len(header.structs)
    for name, value in sizes.items():
        struct = "nvte_ep_" + name[len("NVTE_EP_") : -len("_V1_SIZE")].lower() + "_t"
        assert header.structs[struct].size >= value, struct


def test_released_interface_stands(header: Header) -> None:
    version = header.constants["NVTE_EP_ABI_VERSION"]
    described = golden.describe(header)
    released = golden.load(version)
    assert golden.breaks(released, described) == []
    assert golden.additions(released, described) == [], "run tests/abi/make_abi_golden.py"


def test_golden_check_sees_every_kind_of_break(header: Header) -> None:
    released = golden.describe(header)

    def broken(change: Any) -> list[str]:
        changed = copy.deepcopy(released)
        change(changed)
        return golden.breaks(released, changed)

    tensor = "nvte_ep_tensor_t"
    assert broken(lambda new: new["functions"].pop("nvte_ep_version"))
    assert broken(lambda new: new["functions"].update(nvte_ep_version="int64_t()"))
    assert broken(lambda new: new["constants"].update(NVTE_EP_STATUS_CUDA=6))
    assert broken(lambda new: new["structs"].pop(tensor))
    assert broken(lambda new: new["structs"][tensor]["fields"].pop())
    assert broken(lambda new: new["structs"][tensor]["fields"].reverse())
    assert broken(lambda new: new["structs"][tensor].update(size=104))
    assert broken(lambda new: new["structs"][tensor]["fields"].append(["late", "int32_t", 92, 4]))

    def append(new: dict[str, Any]) -> None:
        new["structs"][tensor]["fields"].append(["late", "int64_t", 96, 8])
        new["structs"][tensor]["size"] = 104
        new["functions"]["nvte_ep_new"] = "int32_t()"

    assert broken(append) == []
    grown = copy.deepcopy(released)
    append(grown)
    assert golden.additions(released, grown) == ["nvte_ep_new", tensor]


def _map_names() -> list[str]:
    text = re.sub(r"/\*.*?\*/", "", MAP_FILE.read_text(), flags=re.DOTALL)
    return re.findall(r"^\s*(nvte_ep_\w+);", text, re.MULTILINE)


def _exports(library: Path) -> dict[str, str]:
    """Dynamic symbols that the library defines: name -> kind."""
    output = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True
    ).stdout
    symbols = {}
    for line in output.splitlines():
        kind, name = line.split()[-2:]
        symbols[name.partition("@")[0]] = kind
    return symbols


def test_export_map(header: Header) -> None:
    names = _map_names()
    assert len(names) == len(set(names))
    assert set(names) == set(header.functions)


def test_library_exports(library_path: Path) -> None:
    exports = _exports(library_path)
    assert exports.pop("NVTE_EP_1", "A") == "A"  # the version node itself
    assert set(exports) == set(_abi.FUNCTIONS)
    assert set(exports.values()) == {"T"}


def test_no_name_of_transformer_engine(header: Header) -> None:
    assert not TAKEN & set(header.functions)
    text = (Path(__file__).resolve().parents[2] / "include/nvte_ep/nvte_ep.h").read_text()
    assert not re.search(r"\bNVTEEp\w*|\bNVTE_EP_(GROUP|LAYER)_CONFIG_INIT\b", text)
