#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, in one call: builds the library with its CUDA tests and benchmark, runs the
# tests, runs the small ones again under compute-sanitizer, and times the codecs.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: ci/gpu.sh [--prebuilt DIR] [--out DIR] [--tests FILTER]
                 [--no-tests] [--no-sanitizer] [--no-bench] [-- BENCH_ARGUMENT...]
  --prebuilt DIR  takes cuda_tests and codec_bench from DIR instead of building them
  --out DIR       logs and figures (default: build/gpu)
  --tests FILTER  a GoogleTest filter
Environment: NVTE_EP_BUILD_DIR (build), CUDACXX,
             NVTE_EP_REQUIRE (cuda is added, so that no test is skipped for want of a GPU; large and
             two_gpus make those tests fail where they cannot run)
TEXT
}

prebuilt="" out="" filter='*' tests=1 sanitizer=1 bench=1
while [[ $# -gt 0 ]]; do
  case "$1" in
    --prebuilt) prebuilt="$(realpath "$2")"; shift ;;
    --out) out="$2"; shift ;;
    --tests) filter="$2"; shift ;;
    --no-tests) tests=0 ;;
    --no-sanitizer) sanitizer=0 ;;
    --no-bench) bench=0 ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) usage >&2; die "unknown argument: $1" ;;
  esac
  shift
done
out="${out:-$BUILD_DIR/gpu}"
mkdir -p "$out"
export NVTE_EP_REQUIRE="cuda${NVTE_EP_REQUIRE:+,$NVTE_EP_REQUIRE}"
failed=0

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem --format=csv |
  tee "$out/device.txt"

if [[ -z $prebuilt ]]; then
  say "build"
  need g++ libgtest-dev
  if ! command -v cmake >/dev/null || ! command -v ninja >/dev/null; then venv_with "$VENV" cmake ninja; fi
  PATH="$PATH:$VENV/bin"
  cmake -S "$ROOT" -B "$BUILD_DIR-gpu" -G Ninja -DNVTE_EP_CUDA=ON -DNVTE_EP_BUILD_TESTS=ON
  cmake --build "$BUILD_DIR-gpu" --target cuda_tests codec_bench
  prebuilt="$BUILD_DIR-gpu/tests/cuda"
fi

if [[ $tests -eq 1 ]]; then
  say "tests"
  "$prebuilt/cuda_tests" --gtest_filter="$filter" --gtest_output="xml:$out/cuda_tests.xml" \
    >"$out/tests.log" 2>&1 || failed=1
  grep -E '^\[ +(OK|FAILED|SKIPPED|PASSED)|error|differ|written' "$out/tests.log" |
    cut -c1-400 | tail -80 || true
fi

# Shapes small enough for a tool that is a hundred times slower.
small='CodecParity.RowCountIsReadOnTheDevice:CodecParity.RowsFlip*:*.SmallShapes*:ReceiveParity.NoRowsAtAll'
small+=':ReceiveParity.StreamsOverlap:ExchangeParity.GatherScalars:ExchangeParity.CleanIndices'
small+=':ExchangeParity.IndexOutputsSaturate'
if [[ $sanitizer -eq 1 ]]; then
  for tool in memcheck racecheck initcheck synccheck; do
    say "compute-sanitizer $tool"
    status=0
    timeout 240 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 "$prebuilt/cuda_tests" \
      --gtest_filter="$small" >"$out/sanitizer-$tool.log" 2>&1 || status=$?
    tail -4 "$out/sanitizer-$tool.log" | cut -c1-300
    if [[ $status -ne 0 ]]; then
      echo "compute-sanitizer $tool: exit $status"
      grep -m 12 -E '=========|FAILED' "$out/sanitizer-$tool.log" | cut -c1-300 || true
      failed=1
    fi
  done
fi

if [[ $bench -eq 1 ]]; then
  say "codecs"
  "$prebuilt/codec_bench" --json "$out/codecs.json" --markdown "$out/codecs.md" "$@" || failed=1
fi
exit $failed
