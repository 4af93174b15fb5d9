# Decides if the CUDA backend is built (SLUICE_CUDA_FOUND), and for which architectures.
set(SLUICE_CUDA_ARCHITECTURES "80-real;86-real;89-real;90a-real;100-real;120"
    CACHE STRING "Processors to build CUDA kernels for; fewer of them build faster")

# For developers with a large GPU who test for smaller ones (scripts/gpu_tests.sh --pretend).
option(SLUICE_PRETEND_GPU "Let the environment say what GPU this is; for tests" OFF)

# Kernels that begin early wait by an instruction of 9.0. PTX for older architectures lacks it, and
# newer GPUs would run such PTX without it.
foreach(architecture IN LISTS SLUICE_CUDA_ARCHITECTURES)
  if(NOT SLUICE_PRETEND_GPU AND architecture MATCHES "^([0-9]+)[af]?(-virtual)?$" AND CMAKE_MATCH_1 LESS 90)
    message(FATAL_ERROR "SLUICE_CUDA_ARCHITECTURES has ${architecture}; write ${CMAKE_MATCH_1}-real")
  endif()
endforeach()

set(SLUICE_CUDA_FOUND OFF)
if(NOT SLUICE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  # nvcc may have been installed since the last configuration.
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES ${SLUICE_CUDA_ARCHITECTURES})
    enable_language(CUDA)
    # CMake 3.25.1 of Debian 12 does not know that nvcc supports C++20.
    if(NOT cuda_std_20 IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
      string(APPEND CMAKE_CUDA_FLAGS " -std=c++20")
    endif()
    find_package(CUDAToolkit 12.8 REQUIRED)
    # Halves the size (append.cu: 39 KB instead of 84); the code is unpacked when the device is
    # first used.
    string(APPEND CMAKE_CUDA_FLAGS " --compress-mode=size")
    set(SLUICE_CUDA_FOUND ON)
  elseif(SLUICE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SLUICE_CUDA=ON, but there is no nvcc; put it on the PATH or set CUDACXX")
  endif()
endif()
message(STATUS "CUDA backend: ${SLUICE_CUDA_FOUND}")
