# SPDX-License-Identifier: Apache-2.0
# Flags that every target of this project is compiled with.

set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 99)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)

set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

# A warning is an error here; not for who installs the Python package with a compiler that we have not met. To override:
# cmake --compile-no-warning-as-error.
if(NOT DEFINED CMAKE_COMPILE_WARNING_AS_ERROR AND NOT SKBUILD)
  set(CMAKE_COMPILE_WARNING_AS_ERROR ON)
endif()

# Same bits everywhere: no fused multiply-add unless the source says so, and no -march (the library runs on any x86-64 or
# aarch64). -O3 comes from the build type.
function(nvte_ep_compile_options target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -ffp-contract=off>
    # 128: "loop is not reachable", which a template is where one of its instances returns before it.
    $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false --expt-relaxed-constexpr -diag-suppress=128
      -Xcompiler=-Wall,-ffp-contract=off,-fvisibility-inlines-hidden ${NVTE_EP_CUDA_GENCODE}>)
  if(NVTE_EP_SANITIZE)
    list(JOIN NVTE_EP_SANITIZE "," sanitizers)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1>)
    # PUBLIC: whoever links a sanitized archive needs the runtime.
    target_link_options(${target} PUBLIC -fsanitize=${sanitizers})
  endif()
endfunction()
