#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the library and runs its demo: a Mixture-of-Experts layer over several ranks of this machine, checked against BF16.
# Arguments go to `nvte-ep demo`; --help lists them.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need g++
venv_with "$VENV" cmake ninja numpy ml_dtypes

# Not to the standard output, which is the demo's.
{
  say "building in ${BUILD_DIR#"$ROOT"/}: a minute or two the first time"
  build_library "$BUILD_DIR" -DNVTE_EP_BUILD_TESTS=OFF "${cuda_here[@]}"
} >&2 || die "the build failed"
export NVTE_EP_LIBRARY="$BUILD_DIR/src/libnvte_ep.so"
export PYTHONPATH="$ROOT/python${PYTHONPATH:+:$PYTHONPATH}"
"$VENV/bin/python" -m nvte_ep demo "$@"
