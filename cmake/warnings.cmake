# Warnings are errors, unless a compiler that nobody has tried is not to stop a build. Sanitizers
# instrument everything that links this. The warnings are GCC's: clang, for fuzzing, warns of other
# things, libstdc++'s own among them. nvcc warns too, and hands its C++ to GCC: in a form that is not
# pedantic's.
add_library(gradwire_warnings INTERFACE)
if(GRADWIRE_FUZZ)
  target_compile_options(gradwire_warnings INTERFACE -w)
else()
  set(warnings -Wall -Wextra -Wshadow -Wconversion -Wnon-virtual-dtor -Woverloaded-virtual)
  set(cuda_warnings "")
  if(GRADWIRE_WARNINGS_ARE_ERRORS)
    list(APPEND warnings -Werror)
    set(cuda_warnings --Werror=all-warnings)
  endif()
  target_compile_options(gradwire_warnings INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:${warnings};-Wpedantic>"
    "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_warnings};-Xcompiler=$<JOIN:${warnings},$<COMMA>>>")
endif()

# -g1: lines and functions, which is what a report shows.
if(GRADWIRE_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_compile_definitions(__SANITIZE_ADDRESS__)  # clang 19 does not say so, as GCC does
  add_link_options(-fsanitize=address,undefined)
elseif(GRADWIRE_SANITIZE STREQUAL "thread")
  # GCC does not model atomic_thread_fence under TSan; the code uses no bare fences.
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=thread)
elseif(GRADWIRE_SANITIZE)
  message(FATAL_ERROR "GRADWIRE_SANITIZE is '${GRADWIRE_SANITIZE}'; use address or thread")
endif()

# Coverage for libFuzzer. Every object has it.
if(GRADWIRE_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
