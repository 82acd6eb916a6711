# SPDX-License-Identifier: Apache-2.0
"""nvte-ep doctor: remedies that can be followed, options that are not passed over. What else it finds:
test_commands.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nvte_ep.commands import doctor, main

ROOT = Path(__file__).resolve().parents[2]


def test_remedies_name_what_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of the extra: nvte-ep itself is on no index for who runs from the source tree."""
    monkeypatch.setattr(doctor, "installed", lambda *names: None)
    found = [*doctor.examine_packages(), *doctor.examine_nccl({"error": "no libnccl.so.2"})]
    remedies = " ".join(finding.remedy for finding in found)
    assert "nvte-ep[" not in remedies
    (extra,) = re.findall(r"^cu13 = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    packages = re.findall(r'"([^"]+)"', extra)
    assert len(packages) == 2
    for package in packages:
        assert re.search(rf"pip install '?{re.escape(package)}", remedies), package


@pytest.mark.parametrize("warm", [[], ["--warm", "64,512,3,8"]], ids=["alone", "warm"])
@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--formats", "foo", "expected some of bf16, mxfp8, nvfp4 (of --warm), got 'foo'"),
        ("--formats", "", "expected some of bf16, mxfp8, nvfp4 (of --warm), got ''"),
        ("--ranks", "0", "expected 1 or more (of --warm), got 0"),
    ],
)
def test_options_of_warm_are_checked_without_it(
    warm: list[str], option: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *warm, option, value]) == 2
    assert capsys.readouterr().err == f"nvte-ep doctor: error: {option}: {told}\n"


@pytest.mark.parametrize(("option", "value"), [("--formats", "nvfp4"), ("--ranks", "2")])
def test_options_of_warm_do_nothing_without_it(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", option, value]) == 2
    assert f"{option}: only together with --warm" in capsys.readouterr().err
