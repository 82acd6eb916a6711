# SPDX-License-Identifier: Apache-2.0
"""Where the library is looked for, and what is said when the one that is found does not fit."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest
from nvte_ep import _abi, _lib
from nvte_ep.errors import AbiMismatchError, LibraryNotFoundError, NvteEpError, Status, UnsupportedError


def compile_library(folder: Path, source: str, name: str = "libnvte_ep.so") -> Path:
    file = folder / f"{name}.c"
    file.write_text(source)
    library = folder / name
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(file), "-o", str(library)], check=True)
    return library


@pytest.fixture
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_lib.LIBRARY_VARIABLE, raising=False)


@pytest.fixture
def package_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_variable: None) -> Path:
    """Makes the package believe that it lies in an empty folder."""
    package = tmp_path / "site" / "nvte_ep"
    package.mkdir(parents=True)
    monkeypatch.setattr(_lib, "__file__", str(package / "_lib.py"))
    return package


def install_record(monkeypatch: pytest.MonkeyPatch, site: Path, files: list[str]) -> None:
    """A distribution nvte-ep whose RECORD lists these files."""
    info = site / "nvte_ep-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvte-ep\nVersion: 9.9\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    distribution = importlib.metadata.Distribution.at(info)
    monkeypatch.setattr(importlib.metadata, "files", lambda name: distribution.files)


def test_variable_comes_first(monkeypatch: pytest.MonkeyPatch, package_at: Path, library_path: Path) -> None:
    (package_at / "lib").mkdir()
    (package_at / "lib" / "libnvte_ep.so").touch()
    monkeypatch.setenv(_lib.LIBRARY_VARIABLE, str(library_path))
    assert _lib.find() == library_path


def test_variable_does_not_fall_back(
    monkeypatch: pytest.MonkeyPatch, package_at: Path, tmp_path: Path
) -> None:
    (package_at / "lib").mkdir()
    (package_at / "lib" / "libnvte_ep.so").touch()
    wrong = tmp_path / "nowhere.so"
    monkeypatch.setenv(_lib.LIBRARY_VARIABLE, str(wrong))
    with pytest.raises(LibraryNotFoundError, match=r"NVTE_EP_LIBRARY") as caught:
        _lib.find()
    assert str(wrong) in str(caught.value)


def test_library_beside_the_package(package_at: Path) -> None:
    (package_at / "lib").mkdir()
    beside = package_at / "lib" / "libnvte_ep.so"
    beside.touch()
    assert _lib.find() == beside


def test_library_of_an_editable_install(
    monkeypatch: pytest.MonkeyPatch, package_at: Path, tmp_path: Path
) -> None:
    site = tmp_path / "elsewhere"
    built = site / "nvte_ep" / "lib" / "libnvte_ep.so"
    built.parent.mkdir(parents=True)
    built.touch()
    install_record(monkeypatch, site, ["nvte_ep/lib/libnvte_ep.so", "nvte_ep/include/nvte_ep.h"])
    assert _lib.find() == built


def test_every_place_is_named(monkeypatch: pytest.MonkeyPatch, package_at: Path, tmp_path: Path) -> None:
    site = tmp_path / "elsewhere"
    install_record(monkeypatch, site, ["nvte_ep/lib/libnvte_ep.so"])
    with pytest.raises(LibraryNotFoundError) as caught:
        _lib.find()
    text = str(caught.value)
    for place in ("NVTE_EP_LIBRARY (not set)", str(package_at / "lib" / "libnvte_ep.so")):
        assert place in text
    # From 3.13 on importlib.metadata leaves out files that are gone.
    assert str(site / "nvte_ep" / "lib" / "libnvte_ep.so") in text or "(has no libnvte_ep.so)" in text
    assert isinstance(caught.value, (ImportError, UnsupportedError, NvteEpError))
    assert caught.value.status == Status.UNSUPPORTED


def test_record_without_the_library(
    monkeypatch: pytest.MonkeyPatch, package_at: Path, tmp_path: Path
) -> None:
    install_record(monkeypatch, tmp_path / "elsewhere", ["nvte_ep/__init__.py"])
    with pytest.raises(
        LibraryNotFoundError, match=r"RECORD of the distribution nvte-ep .has no libnvte_ep.so"
    ):
        _lib.find()


def test_not_installed(monkeypatch: pytest.MonkeyPatch, package_at: Path) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(LibraryNotFoundError, match=r"RECORD of the distribution nvte-ep .not installed"):
        _lib.find()


def test_another_abi_version_names_both_files(tmp_path: Path) -> None:
    library = compile_library(tmp_path, "int nvte_ep_abi_version(void) { return 7; }")
    with pytest.raises(AbiMismatchError) as caught:
        _lib._load(library)
    text = str(caught.value)
    assert str(library) in text
    assert _abi.__file__ in text
    assert "has 7" in text
    assert caught.value.status == Status.ABI_MISMATCH


def test_a_missing_function_is_named(tmp_path: Path) -> None:
    version = _abi.CONSTANTS["NVTE_EP_ABI_VERSION"]
    library = compile_library(tmp_path, f"int nvte_ep_abi_version(void) {{ return {version}; }}")
    with pytest.raises(AbiMismatchError, match=r"nvte_ep_version") as caught:
        _lib._load(library)
    assert str(library) in str(caught.value)


def test_a_library_of_something_else(tmp_path: Path) -> None:
    library = compile_library(tmp_path, "int other(void) { return 1; }")
    with pytest.raises(AbiMismatchError, match=r"nvte_ep_abi_version"):
        _lib._load(library)


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    file = tmp_path / "libnvte_ep.so"
    file.write_text("no library")
    with pytest.raises(LibraryNotFoundError, match=r"cannot be loaded") as caught:
        _lib._load(file)
    assert str(file) in str(caught.value)


def test_library_needs_nothing_beside_it(library_path: Path, tmp_path: Path) -> None:
    """One file is enough: no symbolic links, no folder of its own."""
    copy = tmp_path / "libnvte_ep.so"
    shutil.copyfile(library_path, copy)
    assert _lib._load(copy).nvte_ep_abi_version() == 1


def test_every_function_has_its_types() -> None:
    library = _lib.library()
    for name, (restype, argtypes) in _abi.FUNCTIONS.items():
        function = getattr(library, name)
        assert function.restype is restype, name
        assert list(function.argtypes) == list(argtypes), name
