# The codecs' inner loops, a part of their layer, and instruction-set flags per file; everything else
# stays at the platform's baseline, so that one wheel runs everywhere. -ffp-contract=off: GCC would
# fuse even intrinsics into FMA and change the bits. ARM64 has the scalar ones alone, which the
# compiler may turn into NEON: elsewhere they are left as they are, to compare the others with.
set(GRADWIRE_X86 OFF)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(GRADWIRE_X86 ON)
else()  # where every processor has FMA, all files need it
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
endif()

function(gradwire_simd)
  set(dir ${PROJECT_SOURCE_DIR}/csrc/gradwire/codec)
  file(GLOB simd_sources CONFIGURE_DEPENDS ${dir}/simd/*.cc)
  if(NOT GRADWIRE_X86)
    list(FILTER simd_sources EXCLUDE REGEX "simd_avx[0-9]+\\.cc$")
  endif()
  target_sources(gradwire_codec PRIVATE ${simd_sources})
  set(optimised -O3)
  if(GRADWIRE_SANITIZE)  # compiled in two thirds of the time
    set(optimised -O1)
  endif()
  target_compile_options(gradwire_codec PRIVATE ${optimised} -ffp-contract=off)
  foreach(source ${simd_sources})  # files with options of their own stay out of unity builds
    set(flags "")
    if(GRADWIRE_X86 AND source MATCHES "simd_scalar.cc$")
      set(flags -fno-tree-vectorize)
    elseif(source MATCHES "simd_avx2.cc$")
      set(flags -mavx2 -mfma -mf16c -mbmi2 -mpopcnt)
    elseif(source MATCHES "simd_avx512.cc$")
      set(flags -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -mbmi2 -mpopcnt -mprefer-vector-width=512)
    endif()
    set_source_files_properties(${source} TARGET_DIRECTORY gradwire_codec PROPERTIES
                                COMPILE_OPTIONS "${flags}" SKIP_UNITY_BUILD_INCLUSION ON)
  endforeach()
endfunction()
