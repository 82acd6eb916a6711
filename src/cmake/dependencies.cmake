# SPDX-License-Identifier: Apache-2.0
# What the library needs from outside: threads always, a CUDA compiler where the GPU side is built. NCCL is loaded at run time.

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# Sets NVTE_EP_WITH_CUDA, NVTE_EP_CUDA_SUMMARY and, with CUDA, NVTE_EP_CUDA_GENCODE.
set(NVTE_EP_WITH_CUDA OFF)
# What AUTO means in this configuration, where -DNVTE_EP_CUDA_AUTO_IS says so; the cache does not keep it.
set(wanted_cuda ${NVTE_EP_CUDA})
if(NVTE_EP_CUDA STREQUAL "AUTO" AND DEFINED NVTE_EP_CUDA_AUTO_IS)
  set(wanted_cuda ${NVTE_EP_CUDA_AUTO_IS})
endif()
unset(NVTE_EP_CUDA_AUTO_IS CACHE)
file(GLOB cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/backends/cuda/*.cu")
if(NOT wanted_cuda MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "NVTE_EP_CUDA: expected AUTO, ON or OFF, got '${wanted_cuda}'")
elseif(wanted_cuda STREQUAL "OFF")
  set(NVTE_EP_CUDA_SUMMARY "CPU only (NVTE_EP_CUDA=${NVTE_EP_CUDA}, without CUDA this time)")
  if(NVTE_EP_CUDA STREQUAL "OFF")
    set(NVTE_EP_CUDA_SUMMARY "CPU only (NVTE_EP_CUDA=OFF)")
  endif()
elseif(NOT cuda_sources)
  set(NVTE_EP_CUDA_SUMMARY "CPU only (this source tree has no CUDA backend yet)")
else()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(NVTE_EP_WITH_CUDA ON)
  else()
    set(NVTE_EP_CUDA_SUMMARY "CPU only (no CUDA compiler found)")
  endif()
endif()

if(wanted_cuda STREQUAL "ON" AND NOT NVTE_EP_WITH_CUDA)
  message(FATAL_ERROR "NVTE_EP_CUDA=ON, but: ${NVTE_EP_CUDA_SUMMARY}. Put nvcc on PATH or set CUDACXX; "
    "ci/cuda_build.sh shows how to take nvcc from PyPI.")
endif()

if(NVTE_EP_WITH_CUDA)
  # CMake 3.25 does not know the family targets (100f), so the -gencode flags are written out.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  include(CheckCompilerFlag)

  # What is compiled to machine code, and why:
  #   sm_90a   Hopper (H100, H200)
  #   sm_100f  the Blackwell data-centre family (B200, B300): FP4 and FP8 conversions need the family or arch variant
  #   sm_100a, sm_103a   the same for an nvcc that does not know families
  #   compute_90 PTX     what comes next is compiled by the driver
  set(NVTE_EP_CUDA_GENCODE -gencode=arch=compute_90a,code=sm_90a)
  set(cuda_targets sm_90a)
  check_compiler_flag(CUDA -gencode=arch=compute_100f,code=sm_100f NVTE_EP_NVCC_KNOWS_100F)
  if(NVTE_EP_NVCC_KNOWS_100F)
    list(APPEND NVTE_EP_CUDA_GENCODE -gencode=arch=compute_100f,code=sm_100f)
    list(APPEND cuda_targets sm_100f)
  else()
    foreach(arch IN ITEMS 100a 103a)
      check_compiler_flag(CUDA -gencode=arch=compute_${arch},code=sm_${arch} NVTE_EP_NVCC_KNOWS_${arch})
      if(NVTE_EP_NVCC_KNOWS_${arch})
        list(APPEND NVTE_EP_CUDA_GENCODE -gencode=arch=compute_${arch},code=sm_${arch})
        list(APPEND cuda_targets sm_${arch})
      endif()
    endforeach()
  endif()
  list(APPEND NVTE_EP_CUDA_GENCODE -gencode=arch=compute_90,code=compute_90)
  list(JOIN cuda_targets ", " cuda_targets)
  set(NVTE_EP_CUDA_SUMMARY "CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${cuda_targets} and compute_90 PTX")
endif()
