# gradwire's CUDA part, libgradwire_cuda.so, which the core loads from beside itself when a GPU is
# first asked for. nvcc compiles it; the rest is the same with and without.
# Compiling it takes longer than the rest, so AUTO leaves it out where nothing could run it.
# The environment variable counts for more than what an earlier build in the same folder was given.
set(about "Build the CUDA part: AUTO (where there are nvcc and a GPU or its driver), ON or OFF")
set(GRADWIRE_CUDA AUTO CACHE STRING ${about})
if(DEFINED ENV{GRADWIRE_CUDA})
  set(GRADWIRE_CUDA $ENV{GRADWIRE_CUDA} CACHE STRING ${about} FORCE)
endif()
set_property(CACHE GRADWIRE_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT GRADWIRE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "GRADWIRE_CUDA is '${GRADWIRE_CUDA}'; use AUTO, ON or OFF")
endif()

# Sets why_not: empty, or why nothing here could run the CUDA part.
function(gradwire_find_driver why_not)
  find_library(GRADWIRE_LIBCUDA NAMES libcuda.so.1 PATHS /usr/lib/wsl/lib NO_CACHE)
  set(${why_not} "" PARENT_SCOPE)
  if(NOT GRADWIRE_LIBCUDA AND NOT EXISTS /dev/nvidiactl)
    set(${why_not} "no NVIDIA GPU or driver is found (GRADWIRE_CUDA=ON builds it all the same)"
        PARENT_SCOPE)
  endif()
endfunction()

# Sets CMAKE_CUDA_COMPILER and, unless somebody chose, CMAKE_CUDA_ARCHITECTURES; why_not: empty, or
# why that can't be.
function(gradwire_find_nvcc why_not)
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # it may be there by now
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(${why_not} "no nvcc is found, or it does not work (CMakeFiles/CMakeConfigureLog.yaml in the \
build folder has its words)" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE version ERROR_QUIET)
  if(NOT version MATCHES "release ([0-9.]+)" OR CMAKE_MATCH_1 VERSION_LESS 12.0)
    set(${why_not} "C++20 needs nvcc 12.0, and ${CMAKE_CUDA_COMPILER} is not" PARENT_SCOPE)
    return()
  endif()
  set(${why_not} "" PARENT_SCOPE)
  if(DEFINED CMAKE_CUDA_ARCHITECTURES OR DEFINED ENV{CUDAARCHS})
    return()
  endif()
  # Machine code of sm_80 runs on 8.x, of sm_90 on 9.0, of sm_100 on 10.x; every other GPU from 8.0
  # on, and those to come, compile PTX. That is of sm_80, since a newer one's would leave out 8.7
  # (Jetson), and could not be tried (CUDA_FORCE_PTX_JIT=1) on the GPUs below it.
  set(chosen "")
  foreach(architecture 80 90-real 100-real)
    string(REGEX MATCH "[0-9]+" number ${architecture})
    if(known MATCHES "compute_${number}(\n|$)")
      list(APPEND chosen ${architecture})
    else()
      message(STATUS "CUDA part: without sm_${number}, which this nvcc does not know")
    endif()
  endforeach()
  set(CMAKE_CUDA_ARCHITECTURES "${chosen}" PARENT_SCOPE)
endfunction()

if(GRADWIRE_CUDA STREQUAL "OFF")
  set(cuda_why_not "GRADWIRE_CUDA=OFF")
elseif(GRADWIRE_SANITIZE)
  set(cuda_why_not "sanitizers don't instrument GPUs; they see tests/simulated_cuda")
else()
  set(cuda_why_not "")
  if(GRADWIRE_CUDA STREQUAL "AUTO")
    gradwire_find_driver(cuda_why_not)
  endif()
  if(NOT cuda_why_not)
    gradwire_find_nvcc(cuda_why_not)
  endif()
endif()

if(cuda_why_not AND GRADWIRE_CUDA STREQUAL "ON")
  message(FATAL_ERROR "GRADWIRE_CUDA=ON, but ${cuda_why_not}. Name an nvcc in CUDACXX or put it on \
PATH; or build without the CUDA part: GRADWIRE_CUDA=OFF")
elseif(cuda_why_not)
  message(STATUS "CUDA part: not built, ${cuda_why_not}")
  return()
endif()

set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)
message(STATUS "CUDA part: by nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")

file(GLOB_RECURSE plugin_sources CONFIGURE_DEPENDS csrc/gradwire/cuda/plugin/*.cu)
add_library(gradwire_cuda_plugin MODULE ${plugin_sources})
target_include_directories(gradwire_cuda_plugin PRIVATE csrc)
target_link_libraries(gradwire_cuda_plugin PRIVATE gradwire_warnings)
# The codecs' arithmetic: each operation rounded once, denormal numbers kept.
target_compile_options(gradwire_cuda_plugin PRIVATE
  -fmad=false -ftz=false -prec-div=true -prec-sqrt=true -Xcompiler=-ffp-contract=off
  --expt-relaxed-constexpr)
# Drivers before 12.4 can't read what it compresses, and nvcc 12's runtime works with those.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
  target_compile_options(gradwire_cuda_plugin PRIVATE --compress-mode=size)
endif()
# A process may have another CUDA runtime, torch's: this one is its own, and nobody sees it.
target_link_options(gradwire_cuda_plugin PRIVATE
  LINKER:--exclude-libs,ALL LINKER:--as-needed LINKER:-z,defs
  LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/cuda_exports.map)
set_target_properties(gradwire_cuda_plugin PROPERTIES UNITY_BUILD OFF
  OUTPUT_NAME gradwire_cuda LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/cuda_exports.map)
install(TARGETS gradwire_cuda_plugin DESTINATION gradwire)
