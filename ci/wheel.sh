#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel, looks into it, and uses it in a fresh environment that never sees the source tree's Python package.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need g++ pkg-config binutils
mapfile -t requirements < <(extra test)
venv_with "$VENV" cmake ninja numpy "${requirements[@]}"

DIST="$BUILD_DIR-wheel"
rm -rf "$DIST"
mkdir -p "$DIST"
cd "$ROOT" || exit

say "wheel"
"$VENV/bin/python" -m pip wheel -qq --disable-pip-version-check --no-deps \
  -C cmake.define.NVTE_EP_CUDA="${NVTE_EP_CUDA:-AUTO}" -w "$DIST" .
wheels=("$DIST"/*.whl)
[[ ${#wheels[@]} -eq 1 && -e ${wheels[0]} ]] || die "expected one wheel in $DIST, got: ${wheels[*]}"
wheel="${wheels[0]}"

say "contents of $(basename "$wheel")"
"$VENV/bin/python" ci/check_wheel.py "$wheel"

say "fresh environment"
fresh="$DIST/venv"
"$(find_python)" -m venv "$fresh"
"$fresh/bin/python" -m pip install -qq --disable-pip-version-check "$wheel" cmake ninja "${requirements[@]}"
(
  cd "$DIST"
  unset PYTHONPATH NVTE_EP_LIBRARY
  site="$("$fresh/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])')"
  "$fresh/bin/python" - <<'PYTHON'
import json
import sys
from pathlib import Path

import numpy as np

import nvte_ep

assert Path(nvte_ep.__file__).is_relative_to(sys.prefix), nvte_ep.__file__
tokens = np.tile(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32), (3, 8))
rows = nvte_ep.nvfp4_pack(tokens)
back = np.asarray(nvte_ep.nvfp4_unpack(rows, 64, dtype="float32"))
np.testing.assert_array_equal(back, tokens)
print("smoke test: OK,", nvte_ep.__file__)
PYTHON
  "$fresh/bin/nvte-ep" --help >/dev/null
  "$fresh/bin/nvte-ep" doctor
  # The packaging tests read the README and the examples of the source tree and take the rest from the wheel.
  NVTE_EP_PREFIX="$site/nvte_ep" PATH="$fresh/bin:$PATH" "$fresh/bin/python" -m pytest -q -p no:cacheprovider \
    --rootdir "$DIST" -c /dev/null --import-mode=importlib "$ROOT/tests/packaging" --junit-xml "$DIST/packaging.xml"
) || failed=1

if command -v auditwheel >/dev/null; then auditwheel show "$wheel"; fi
mkdir -p "$DIST/results"
mv "$DIST"/*.xml "$DIST/results/"
"$VENV/bin/python" ci/count_tests.py "$DIST/results" || failed=1
exit "${failed:-0}"
