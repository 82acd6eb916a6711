#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the library and runs its demo: a Mixture-of-Experts layer over several ranks of this machine, checked against BF16.
# Arguments go to `nvte-ep demo`; --help lists them.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need g++
venv_with "$VENV" cmake ninja numpy ml_dtypes

log="$(mktemp)"
trap 'rm -f "$log"' EXIT
build_library "$BUILD_DIR" -DNVTE_EP_BUILD_TESTS=OFF -DNVTE_EP_CUDA="$(cuda_here)" >"$log" 2>&1 || {
  cat "$log" >&2
  die "the build failed"
}
export NVTE_EP_LIBRARY="$BUILD_DIR/src/libnvte_ep.so"
export PYTHONPATH="$ROOT/python${PYTHONPATH:+:$PYTHONPATH}"
"$VENV/bin/python" -m nvte_ep demo "$@"
