# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# What the scripts of this folder share: where things are, and how to get what a bare machine lacks. Sourced, not run.
# Callers may set NVTE_EP_BUILD_DIR (default build/) and NVTE_EP_VENV (default .venv-test/).

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
BUILD_DIR="$(realpath -m "${NVTE_EP_BUILD_DIR:-$ROOT/build}")"
VENV="$(realpath -ms "${NVTE_EP_VENV:-$ROOT/.venv-test}")"
export ROOT BUILD_DIR VENV

say() { printf '\n== %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Debian packages by name, and for each a command that succeeds where it is not needed any more.
declare -A DEBIAN_PROBES=(
  [g++]="c++ --version"
  [libgtest-dev]="test -e /usr/include/gtest/gtest.h -o -e /usr/local/include/gtest/gtest.h"
  [python3]="find_python"
  [python3-venv]="python_has_venv"
  [pkg-config]="pkg-config --version"
  [binutils]="readelf --version"
  [spin]="spin -V"
)

find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

python_has_venv() {
  local python
  python="$(find_python)" && "$python" -c 'import ensurepip, venv' 2>/dev/null
}

# need PACKAGE...: installs what is missing, or says how.
need() {
  local package missing=()
  for package in "$@"; do
    eval "${DEBIAN_PROBES[$package]}" >/dev/null 2>&1 || missing+=("$package")
  done
  [[ ${#missing[@]} -eq 0 ]] && return 0
  if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 || {
      apt-get update -qq
      apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    }
    for package in "${missing[@]}"; do
      eval "${DEBIAN_PROBES[$package]}" >/dev/null 2>&1 || die "$package is installed, but '${DEBIAN_PROBES[$package]}' still fails"
    done
  else
    die "missing here: ${missing[*]}. On Debian or Ubuntu: sudo apt-get install ${missing[*]}"
  fi
}

# venv_with DIRECTORY REQUIREMENT...: a virtual environment that holds the requirements; a second call costs nothing.
venv_with() {
  local venv="$1" stamp="$1/requirements.stamp" python
  shift
  need python3 python3-venv
  if [[ ! -x $venv/bin/python ]]; then
    python="$(find_python)"
    say "making ${venv#"$ROOT"/} with $("$python" --version)"
    "$python" -m venv "$venv"
  fi
  if ! grep -qsxF "$*" "$stamp"; then
    say "installing into ${venv#"$ROOT"/}: $*"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@"
    echo "$*" >>"$stamp"
  fi
}

# extra NAME: the requirements of one extra of pyproject.toml, one a line.
extra() {
  sed -n "s/^$1 = \[\(.*\)\]\$/\1/p" "$ROOT/pyproject.toml" | tr ',' '\n' | sed 's/^ *"//; s/" *$//'
}

# For build_library: whether to build the GPU side. Where the caller did not say (NVTE_EP_CUDA), only what can run here is worth
# its minutes; a later build by hand in the same folder decides for itself.
cuda_here=(-DNVTE_EP_CUDA="${NVTE_EP_CUDA:-AUTO}")
[[ -n ${NVTE_EP_CUDA:-} || -e /dev/nvidiactl ]] || cuda_here+=(-DNVTE_EP_CUDA_AUTO_IS=OFF)

# build_library DIRECTORY CMAKE_ARGUMENT...: configures and builds with the CMake and Ninja of $VENV.
build_library() {
  local directory="$1"
  shift
  # Found again on every run: a build folder may outlive the environment that made it.
  "$VENV/bin/cmake" -S "$ROOT" -B "$directory" -G Ninja -DCMAKE_MAKE_PROGRAM="$VENV/bin/ninja" "$@"
  "$VENV/bin/cmake" --build "$directory"
}
