#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows that the suites would notice: changes one constant or operator of the arithmetic at a time, in a copy
of the source tree, builds the host suites and expects at least one of them to fail. A mutation that survives
is a hole in the tests; one that does not apply, or does not compile, is a fault of the table below."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The suites that hold the arithmetic. The rest of the tests would notice much of it too, but takes longer.
SUITES = ("test_golden", "test_routing")


# Every source that computes with what the headers below define. A change of such a header rebuilds these and
# leaves alone the many that only see its types: half a minute each becomes a few seconds. One that is missing
# here would show as a mutation that survives.
ARITHMETIC = (
    "src/backends/*.cc",
    "src/core/operand_layout.cc",
    "src/core/routing.cc",
    "tests/cpp/test_golden.cc",
)


@dataclass(frozen=True)
class Mutation:
    file: str  # in src/
    pattern: str  # occurs exactly once
    replacement: str
    why: str  # what would be wrong


NUMERICS = "formats/numerics.h"
MXFP8 = "formats/mxfp8.h"
NVFP4 = "formats/nvfp4.h"
ROUTING = "core/routing.cc"
LAYOUT_H = "core/operand_layout.h"
LAYOUT = "core/operand_layout.cc"

MUTATIONS = (
    # E4M3
    Mutation(NUMERICS, "sign | 0x7Eu);  // 464", "sign | 0x7Du);  // 464", "E4M3 saturates at 416"),
    Mutation(NUMERICS, "a + 0x7FFFFu + ((a >> 20) & 1u)", "a + 0x80000u", "E4M3 ties round away from zero"),
    Mutation(NUMERICS, "* 0.001953125f", "* 0.00390625f", "E4M3 subnormals decode to twice their value"),
    Mutation(
        NUMERICS, "e4m3_to_float(code) < x", "e4m3_to_float(code) <= x", "rounding up skips exact values"
    ),
    # E8M0
    Mutation(
        NUMERICS, "mantissa > 0 && exponent", "mantissa > 1 && exponent", "E8M0 rounds down just above 2^k"
    ),
    Mutation(NUMERICS, "mantissa <= 0x400000u", "mantissa < 0x400000u", "2^-127 gets the scale of 2^-126"),
    Mutation(NUMERICS, "code == 0 ? 0x00400000u :", "code == 0 ? 0u :", "E8M0 code 0 decodes to zero"),
    # E2M1
    Mutation(NUMERICS, "a + 0x1FFFFFu + ((a >> 22) & 1u)", "a + 0x200000u", "E2M1 ties round away from zero"),
    Mutation(
        NUMERICS, "a < 4.0f ? 1.0f : 2.0f", "a < 3.0f ? 1.0f : 2.0f", "stochastic step between 3 and 4 is 2"
    ),
    Mutation(NUMERICS, "* 0.00390625f, step", "* 0.0039215689f, step", "random byte over 255, not 256"),
    # Philox, Hadamard, BF16, FP16
    Mutation(NUMERICS, "round < 10", "round < 9", "Philox4x32-9"),
    Mutation(NUMERICS, "(8 * (i & 3))", "(8 * (3 - (i & 3)))", "random bytes in big-endian order"),
    Mutation(
        NUMERICS, "static_cast<uint32_t>(stream) << 31", "static_cast<uint32_t>(stream) << 30", "streams"
    ),
    Mutation(NUMERICS, "kHadamardSigns = 0xD7E8u", "kHadamardSigns = 0xD7E9u", "one sign of the transform"),
    Mutation(NUMERICS, "add_rn(mul_rn(v[i], 0.25f), 0.0f)", "mul_rn(v[i], 0.25f)", "-0 after the transform"),
    Mutation(NUMERICS, "u + 0x7FFFu + ((u >> 16) & 1u)", "u + 0x8000u", "BF16 ties round away from zero"),
    Mutation(NUMERICS, "if (a >= 0x38800000u)", "if (a >= 0x38000000u)", "FP16 normals start at 2^-15"),
    # MXFP8
    Mutation(MXFP8, "1.0f / 448.0f", "1.0f / 447.0f", "MXFP8 block scale"),
    Mutation(MXFP8, "all_nan ? kNanBits : amax", "all_nan ? 0u : amax", "a block of NaNs gets a scale"),
    # NVFP4
    Mutation(NVFP4, "> 0x280000u ?", ">= 0x280000u ?", "token exponent one too large at 1.3125 * 2^n"),
    Mutation(NVFP4, "kMinExponent = -116", "kMinExponent = -115", "smallest token scale"),
    Mutation(NVFP4, "kMaxExponent = 105", "kMaxExponent = 106", "largest token scale"),
    Mutation(NVFP4, "1.0f / 6.0f", "1.0f / 6.5f", "NVFP4 block scale"),
    Mutation(NVFP4, "inverse < kFloatMax ? inverse : kFloatMax", "inverse", "underflowing blocks"),
    Mutation(
        NVFP4, "scale_code & 0x7Fu), token_scale", "scale_code), token_scale", "sign of a block scale counts"
    ),
    Mutation(NVFP4, "random->byte(i + 1)", "random->byte(i)", "neighbours share a random byte"),
    Mutation(NVFP4, "d >= 24 ? 1u", "d >= 24 ? 0u", "rows far below the largest leave the column bound"),
    Mutation(NVFP4, "expert_k - 26 + log2_up", "expert_k - 25 + log2_up", "column bound twice too large"),
    # Routing
    Mutation(ROUTING, "expert >= num_experts", "expert > num_experts", "an index one past the last is legal"),
    Mutation(ROUTING, "if (expert == -1) continue;", "if (expert < 0) continue;", "-2 is not reported"),
    Mutation(ROUTING, "++faults.duplicates", "--faults.duplicates", "count of duplicates"),
    Mutation(ROUTING, "round_up(r->tokens_routed[e], shape.alignment)", "r->tokens_routed[e]", "no padding"),
    Mutation(ROUTING, "std::min(offset, shape.capacity)", "offset", "capacity is not kept"),
    Mutation(ROUTING, "<< 32) | (i / shape.top_k)", "<< 32) | (i % shape.top_k)", "source token of a slot"),
    Mutation(
        ROUTING, "r->slot_source.assign(total, -1)", "r->slot_source.assign(total, 0)", "padding has a source"
    ),
    Mutation(ROUTING, "filled[e] >= r->tokens", "filled[e] > r->tokens", "one row past a full slab"),
    # Operand layout
    Mutation(LAYOUT_H, "(r % 32) * 16 + (r / 32) * 4", "(r % 32) * 4 + (r / 32) * 128", "scale tile order"),
    Mutation(LAYOUT_H, "(columns + 3) / 4) + j / 4", "columns / 4) + j / 4", "tiles where columns are no 4n"),
    Mutation(
        LAYOUT, "kScaleTileRows - alignment)", "kScaleTileRows - 2 * alignment)", "space for scale tiles"
    ),
    Mutation(LAYOUT, "end = round_up(end + bytes", "end = round_up(bytes", "parts of an operand overlap"),
)


def run(command: list[str], log: Path, timeout: float, env: dict[str, str] | None = None) -> bool:
    with log.open("w") as out:
        try:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=timeout, env=env)
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


class Bench:
    """A copy of the source tree and its build."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "source"
        self.build_dir = folder / "build"
        self.log = folder / "log"
        self.source.mkdir()
        for part in ("CMakeLists.txt", "include", "src", "tests"):
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, self.source / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / part, self.source)

    def configure(self) -> bool:
        command = ["cmake", "-G", "Ninja", "-S", str(self.source), "-B", str(self.build_dir)]
        # -O0: compiling again and again is what takes the time.
        command += ["-DNVTE_EP_CUDA=OFF", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0"]
        return run(command, self.log, 120)

    def build(self) -> bool:
        return run(["cmake", "--build", str(self.build_dir), "--target", *SUITES], self.log, 600)

    def test(self) -> str | None:
        """Name of the first suite that fails, or None."""
        env = {name: value for name, value in os.environ.items() if name != "GTEST_OUTPUT"}
        env["GTEST_FAIL_FAST"] = "1"
        for suite in SUITES:
            if not run([str(self.build_dir / "tests/cpp" / suite)], self.log, 120, env):
                return suite
        return None

    def write(self, path: Path, text: str) -> None:
        """Changes a source file. A header's time stays: only the sources that compute with it are rebuilt."""
        before = path.stat()
        path.write_text(text)
        if path.suffix == ".h":
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            for pattern in ARITHMETIC:
                for source in self.source.glob(pattern):
                    source.touch()


def judge(bench: Bench, mutation: Mutation) -> tuple[bool, str]:
    path = bench.source / "src" / mutation.file
    original = path.read_text()
    count = original.count(mutation.pattern)
    if count != 1:
        return False, f"the pattern occurs {count} times, not once"
    bench.write(path, original.replace(mutation.pattern, mutation.replacement))
    try:
        if not bench.build():
            return False, "does not compile:\n" + bench.log.read_text()[-2000:]
        suite = bench.test()
        return (True, f"caught by {suite}") if suite else (False, "SURVIVED: no suite failed")
    finally:
        bench.write(path, original)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only mutations whose file or reason contains this text")
    parser.add_argument("--junit-xml", type=Path, help="also write a JUnit file")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if arguments.only in f"{m.file} {m.why}"]

    report = ElementTree.Element("testsuite", name="mutation")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="nvte_ep_mutation_") as folder:
        bench = Bench(Path(folder))
        if not bench.configure() or not bench.build():
            print(bench.log.read_text())
            raise SystemExit("the unchanged tree does not build")
        suite = bench.test()
        if suite:
            print(bench.log.read_text())
            raise SystemExit(f"{suite} fails on the unchanged tree")
        for mutation in chosen:
            started = time.monotonic()
            caught, text = judge(bench, mutation)
            seconds = time.monotonic() - started
            print(f"{mutation.file:24} {mutation.why:50} {text} ({seconds:.1f} s)", flush=True)
            case = ElementTree.SubElement(report, "testcase", classname=mutation.file, name=mutation.why)
            if not caught:
                failed += 1
                ElementTree.SubElement(case, "failure", message=text)
    if arguments.junit_xml:
        ElementTree.ElementTree(report).write(arguments.junit_xml)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
