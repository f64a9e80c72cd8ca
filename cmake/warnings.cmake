# Warnings are errors; sanitizers instrument everything that links this. They are GCC's: clang, which
# only fuzzing needs, warns of other things, libstdc++'s own among them.
add_library(gradwire_warnings INTERFACE)
if(GRADWIRE_FUZZ)
  target_compile_options(gradwire_warnings INTERFACE -w)
else()
  target_compile_options(gradwire_warnings INTERFACE
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wnon-virtual-dtor -Woverloaded-virtual -Werror)
endif()

if(GRADWIRE_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=address,undefined)
elseif(GRADWIRE_SANITIZE STREQUAL "thread")
  # GCC does not model atomic_thread_fence under TSan; the code uses no bare fences.
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=thread)
elseif(GRADWIRE_SANITIZE)
  message(FATAL_ERROR "GRADWIRE_SANITIZE is '${GRADWIRE_SANITIZE}'; use address or thread")
endif()

# Coverage for libFuzzer, and what makes a bad access or an overflow a finding. Every object has it.
if(GRADWIRE_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -g1)
  add_link_options(-fsanitize=address,undefined)
endif()
