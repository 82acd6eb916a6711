#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The Python side on a GPU, with a library that is built already: tests/gpu on PyTorch, CuPy, JAX and cuda-python, then
# `nvte-ep bench codecs`. Installs nothing and builds nothing: python3 and its packages are the machine's.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: ci/gpu_python.sh [--no-tests] [--no-bench] [--tests EXPRESSION] [FOLDER] [-- BENCH_ARGUMENT...]
  FOLDER              for logs, figures and plots (default: $OUT, else build/gpu_python)
  --tests EXPRESSION  only these tests, as pytest -k has it
Environment: NVTE_EP_LIBRARY, a libnvte_ep.so with its CUDA side (required); PYTHON (python3);
NVTE_EP_REQUIRE, what must be there (cuda,torch,cupy,jax,triton: a test that misses one fails)
TEXT
}

tests=1 bench=1 out="${OUT:-$BUILD_DIR/gpu_python}" selection=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --no-tests) tests=0 ;;
    --no-bench) bench=0 ;;
    --tests) selection=(-k "$2"); shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    -*) usage >&2; die "unknown argument: $1" ;;
    *) out="$1" ;;
  esac
  shift
done
[[ -f ${NVTE_EP_LIBRARY:-} ]] || die "NVTE_EP_LIBRARY must name a libnvte_ep.so, got '${NVTE_EP_LIBRARY:-}'"
NVTE_EP_LIBRARY="$(realpath "$NVTE_EP_LIBRARY")"
mkdir -p "$out"
out="$(realpath "$out")"
export NVTE_EP_LIBRARY NVTE_EP_REQUIRE="${NVTE_EP_REQUIRE-cuda,torch,cupy,jax,triton}"
export PYTHONPATH="$ROOT/python" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
python="${PYTHON:-python3}"
cd "$ROOT"
failed=0

# run_tests NAME PYTEST_ARGUMENT...: the whole log in a file, what did not pass on the screen.
run_tests() {
  local name="$1"
  shift
  # A test that hangs says where.
  "$python" -m pytest -p no:cacheprovider -q --tb=short -o faulthandler_timeout=120 -o junit_family=xunit1 \
    --junit-xml "$out/$name.xml" "$@" >"$out/$name.log" 2>&1 || failed=1
  grep -E '^(FAILED|ERROR|SKIPPED)' "$out/$name.log" | cut -c1-300 | tail -40 || true
  tail -1 "$out/$name.log"
}

if [[ $tests -eq 1 ]]; then
  say "tests"
  run_tests gpu_tests tests/gpu "${selection[@]}"
fi

if [[ $bench -eq 1 ]]; then
  say "codecs"
  plot=()
  if "$python" -c 'import matplotlib' 2>/dev/null; then plot=(--plot "$out/codecs_python.png"); fi
  "$python" -m nvte_ep bench codecs --device cuda --json "$out/codecs_python.json" \
    --markdown "$out/codecs_python.md" "${plot[@]}" "$@" | tee "$out/codecs_python.txt" || failed=1
fi
exit $failed
