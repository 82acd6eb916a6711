# SPDX-License-Identifier: Apache-2.0
"""nvte-ep doctor: remedies that can be followed, options that are not passed over. What else it finds:
test_commands.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nvte_ep.commands import doctor

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
