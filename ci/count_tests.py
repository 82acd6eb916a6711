#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds up the tests of a results folder: NAME.ctest.xml with the programs that ctest ran, the cases inside a
program in NAME.gtest/PROGRAM.xml, and JUnit files of anything else. The last line is 'N passed, N failed'."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)


def count_junit(path: Path) -> Count:
    """Cases of a JUnit file, by pytest, GoogleTest or ctest."""
    count = Count()
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            count.failed += 1
        elif case.get("status") in ("notrun", "disabled"):
            continue  # disabled in GoogleTest
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            count.skipped += 1
        else:
            count.passed += 1
    return count


def count_ctest(path: Path) -> Count:
    """Cases of every program where it wrote them, else the program itself. One that failed without a failed
    case (it crashed, or timed out) counts as one failure."""
    total = Count()
    cases = path.with_name(path.name.replace(".ctest.xml", ".gtest"))
    for program in ElementTree.parse(path).iter("testcase"):
        report = cases / f"{program.get('name')}.xml"
        program_failed = program.find("failure") is not None or program.get("status") not in ("run", None)
        try:
            count = count_junit(report) if report.exists() else Count(passed=0 if program_failed else 1)
        except ElementTree.ParseError:
            count = Count()
        if program_failed and count.failed == 0:
            count.failed = 1
        total += count
    return total


def main(folder: Path) -> int:
    total = Count()
    for path in sorted(folder.glob("*.xml")):
        count = count_ctest(path) if path.name.endswith(".ctest.xml") else count_junit(path)
        name = path.name.removesuffix(".xml")
        print(f"{name:16} {count.passed:7} passed {count.failed:5} failed {count.skipped:5} skipped")
        total += count
    print(f"{total.passed} passed, {total.failed} failed")
    return 0 if total.failed == 0 and total.passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
