#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every check that needs no build. `ci/lint.sh --fix` formats in place what can be.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

LINT_VENV="$(realpath -ms "${NVTE_EP_LINT_VENV:-$ROOT/.venv-lint}")"
mapfile -t requirements < <(extra lint)
venv_with "$LINT_VENV" "${requirements[@]}" numpy pytest
export PATH="$LINT_VENV/bin:$PATH"
cd "$ROOT" || exit

fix=0
[[ "${1:-}" == --fix ]] && fix=1

# The public header and the tables of formats.def are aligned by hand.
mapfile -t sources < <(find src tests examples -name '*.h' -o -name '*.cuh' -o -name '*.cc' -o -name '*.cu' -o -name '*.c' | sort)
mapfile -t scripts < <(find ci .ci -type f \( -name '*.sh' -o -path .ci/run \) | sort)

passed=0 failed=0
# check NAME COMMAND...: runs, shows the output of what fails, counts.
check() {
  local name="$1" output
  shift
  if output="$("$@" 2>&1)"; then
    printf '%-18s OK\n' "$name"
    passed=$((passed + 1))
  else
    printf '%-18s FAILED\n' "$name"
    head -60 <<<"$output"
    failed=$((failed + 1))
  fi
}

if [[ $fix -eq 1 ]]; then
  clang-format -i "${sources[@]}"
  ruff check --fix --quiet . || true
  ruff format --quiet .
fi
check clang-format clang-format --dry-run -Werror "${sources[@]}"
check ruff ruff check --no-cache .
check "ruff format" ruff format --check --no-cache .
check mypy mypy --no-incremental
check shellcheck shellcheck -x -P SCRIPTDIR "${scripts[@]}"
check layers python ci/check_layers.py
check release python ci/check_release.py
check figures python tools/ep_tables.py --check README.md docs/device_transports.md benchmarks/h200/ep.md

printf '%d passed, %d failed\n' "$passed" "$failed"
[[ $failed -eq 0 ]]
