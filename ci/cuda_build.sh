#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles the library with its GPU side; no GPU is needed. nvcc comes from CUDACXX, PATH or CUDA_HOME, else from PyPI.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need g++ binutils
venv_with "$VENV" cmake ninja

arguments=()
nvcc="${CUDACXX:-$(command -v nvcc || true)}"
[[ -z $nvcc && -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]] && nvcc="${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"
if [[ -z $nvcc || ${NVTE_EP_NVCC_FROM_PYPI:-0} == 1 ]]; then
  # 13.0: the oldest driver of CUDA 13 can run what it makes.
  venv_with "$VENV" 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*' \
    'nvidia-nvvm==13.0.*' 'nvidia-cuda-cccl==13.0.*'
  toolkit="$("$VENV/bin/python" -c 'import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], "cu13"))')"
  nvcc="$toolkit/bin/nvcc"
  # The wheels have lib/ where nvcc looks for lib64/, and no unversioned libcudart.so for FindCUDAToolkit.
  export CUDAFLAGS="-L$toolkit/lib ${CUDAFLAGS:-}"
  arguments+=("-DCUDA_CUDART=$toolkit/lib/libcudart.so.13")
fi

say "CUDA build with $nvcc"
CUDACXX="$nvcc" build_library "$BUILD_DIR-cuda" -DNVTE_EP_CUDA=ON -DNVTE_EP_BUILD_TESTS=OFF "${arguments[@]}"

library="$BUILD_DIR-cuda/src/libnvte_ep.so"
needed="$(readelf -dW "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')"
if grep -E 'cuda|nccl' <<<"$needed"; then die "the library must not need CUDA or NCCL to load, but does: $needed"; fi
exported="$(nm -D --defined-only "$library" | awk '$2 ~ /[TtWwVuBDR]/ {print $3}' | grep -v '^nvte_ep_' || true)"
[[ -z $exported ]] || die "the library exports more than its functions: $exported"
echo "libnvte_ep.so: $(stat -Lc %s "$library") bytes, needs ${needed//$'\n'/ }"
echo "1 passed, 0 failed"
