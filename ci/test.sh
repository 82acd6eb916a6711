#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the library and runs every test that this machine can run. On a bare machine it sets up what it needs.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: ci/test.sh [--frameworks] [--sanitize] [--mutations] [-- PYTEST_ARGUMENT...]
  --frameworks  with PyTorch (CPU) and JAX: then none of their tests may be skipped
  --sanitize    the C and C++ tests once more under AddressSanitizer + UBSan, and under ThreadSanitizer
  --mutations   shows that the suites catch single wrong constants and operators (ci/mutation.py)
Environment: NVTE_EP_VENV (.venv-test), NVTE_EP_BUILD_DIR (build), NVTE_EP_CUDA (AUTO where there is a GPU, else OFF)
TEXT
}

frameworks=0 sanitize=0 mutations=0
while [[ $# -gt 0 ]]; do
  case "$1" in
    --frameworks) frameworks=1 ;;
    --sanitize) sanitize=1 ;;
    --mutations) mutations=1 ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) usage >&2; die "unknown argument: $1" ;;
  esac
  shift
done

need g++ libgtest-dev pkg-config binutils
mapfile -t requirements < <(extra test)
venv_with "$VENV" cmake ninja numpy "${requirements[@]}"
if [[ $frameworks -eq 1 ]]; then
  # One call each, so that PyTorch's version is exact whatever JAX asks for.
  "$VENV/bin/python" -c 'import torch' 2>/dev/null || {
    say "installing torch 2.13.0"
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0
  }
  "$VENV/bin/python" -c 'import jax' 2>/dev/null || {
    say "installing jax"
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check jax
  }
  export NVTE_EP_REQUIRE="torch,jax${NVTE_EP_REQUIRE:+,$NVTE_EP_REQUIRE}"
fi

results="$BUILD_DIR/results"
rm -rf "$results"
mkdir -p "$results"
export PATH="$VENV/bin:$PATH"
failed=0

# run_ctest NAME BUILD_DIRECTORY: one JUnit file from ctest (a program each) and one from each GoogleTest program.
run_ctest() {
  GTEST_OUTPUT="xml:$results/$1.gtest/" "${launcher[@]}" ctest --test-dir "$2" --output-on-failure -j "$(nproc)" \
    --no-tests=error --output-junit "$results/$1.ctest.xml" || failed=1
}
launcher=()

say "build"
build_library "$BUILD_DIR" -DNVTE_EP_BUILD_TESTS=ON "${cuda_here[@]}"

say "C and C++ tests"
run_ctest plain "$BUILD_DIR"

say "Python tests"
suites=()
folders=(tests/python tests/abi tests/distributed tests/golden tests/packaging ci)
[[ -e /dev/nvidiactl ]] && folders+=(tests/gpu)
for suite in "${folders[@]}"; do
  [[ -n "$(find "$ROOT/$suite" -name 'test_*.py' -print -quit)" ]] && suites+=("$suite")
done
(
  cd "$ROOT"
  export NVTE_EP_LIBRARY="$BUILD_DIR/src/libnvte_ep.so" NVTE_EP_BUILD_DIR="$BUILD_DIR"
  PYTHONPATH="$ROOT/python" python -m pytest "${suites[@]}" --junit-xml "$results/pytest.xml" "$@"
) || failed=1
# pytest that dies writes no report: that is a failure too.
[[ -s $results/pytest.xml ]] ||
  echo '<testsuite><testcase name="pytest"><error message="it died"/></testcase></testsuite>' >"$results/pytest.xml"

if [[ $sanitize -eq 1 ]]; then
  say "C and C++ tests under AddressSanitizer and UBSan"
  build_library "$BUILD_DIR-asan" -DNVTE_EP_SANITIZE="address;undefined" -DNVTE_EP_CUDA=OFF
  ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 run_ctest asan "$BUILD_DIR-asan"

  say "C and C++ tests under ThreadSanitizer"
  build_library "$BUILD_DIR-tsan" -DNVTE_EP_SANITIZE=thread -DNVTE_EP_CUDA=OFF
  # Its shadow memory does not fit every address space layout: without randomisation it always does.
  setarch "$(uname -m)" -R true 2>/dev/null && launcher=(setarch "$(uname -m)" -R)
  TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 run_ctest tsan "$BUILD_DIR-tsan"
  launcher=()
fi

if [[ $mutations -eq 1 ]]; then
  say "mutations"
  python ci/mutation.py --junit-xml "$results/mutation.xml" || failed=1
fi

say "results"
python "$ROOT/ci/count_tests.py" "$results" || failed=1
exit $failed
