# SPDX-License-Identifier: Apache-2.0
"""count_tests.py: passes, failures and skips of every kind of report, and programs that died without one."""

from __future__ import annotations

from pathlib import Path

import count_tests
import pytest

PYTEST = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/><testcase name="c"><skipped message="no GPU"/></testcase>
<testcase name="d"><failure message="wrong"/></testcase><testcase name="e"><error message="setup"/></testcase>
</testsuite></testsuites>"""
CTEST = """<testsuite>
<testcase name="test_good" status="run"/>
<testcase name="test_bad" status="fail"><failure message=""/></testcase>
<testcase name="test_crash" status="fail"><failure message=""/></testcase>
<testcase name="test_half" status="fail"><failure message=""/></testcase>
<testcase name="plain_program" status="run"/>
</testsuite>"""
GOOD = """<testsuites><testsuite>
<testcase name="a" status="run" result="completed"/><testcase name="b" status="run" result="completed"/>
<testcase name="c" status="run" result="skipped"><skipped message="reason"/></testcase>
<testcase name="DISABLED_d" status="notrun" result="suppressed"/>
</testsuite></testsuites>"""
BAD = """<testsuites><testsuite>
<testcase name="a" status="run"/><testcase name="b" status="run"><failure message="x"/></testcase>
</testsuite></testsuites>"""


def write(folder: Path, reports: dict[str, str]) -> None:
    for name, text in reports.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_everything_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path,
        {
            "pytest.xml": PYTEST,  # 2 passed, 2 failed, 1 skipped
            "plain.ctest.xml": CTEST,
            "plain.gtest/test_good.xml": GOOD,  # 2 passed, 1 skipped
            "plain.gtest/test_bad.xml": BAD,  # 1 passed, 1 failed
            "plain.gtest/test_half.xml": GOOD[:80],  # it died while it wrote: 1 failed
        },
    )  # and test_crash: 1 failed, plain_program: 1 passed
    assert count_tests.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "6 passed, 5 failed"


def test_only_passes_are_a_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"a.xml": GOOD})
    assert count_tests.main(tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 0 failed"


def test_no_test_is_a_failure(tmp_path: Path) -> None:
    assert count_tests.main(tmp_path) == 1
