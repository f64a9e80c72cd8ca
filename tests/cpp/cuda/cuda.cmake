# gradwire's CUDA part over a simulated device (tests/simulated_cuda/).
file(GLOB simulated_users CONFIGURE_DEPENDS cuda/cuda_*_test.cc)
list(REMOVE_ITEM simulated_users ${CMAKE_CURRENT_SOURCE_DIR}/cuda/cuda_plugin_test.cc)
foreach(source ${simulated_users})
  get_filename_component(name ${source} NAME_WE)
  target_link_libraries(${name} PRIVATE simulated_cuda)
  target_compile_definitions(${name} PRIVATE
    GRADWIRE_SIMULATED_CUDA_SO="$<TARGET_FILE:simulated_cuda>")
endforeach()

# The real one, where nvcc built it, and its double.
set(plugin "")
if(TARGET gradwire_cuda_plugin)
  set(plugin $<TARGET_FILE:gradwire_cuda_plugin>)
  add_dependencies(cuda_plugin_test gradwire_cuda_plugin)
endif()
add_dependencies(cuda_plugin_test simulated_cuda)
target_compile_definitions(cuda_plugin_test PRIVATE
  GRADWIRE_CUDA_PLUGIN="${plugin}" GRADWIRE_SIMULATED_CUDA_SO="$<TARGET_FILE:simulated_cuda>")

# A libnccl for tests without a GPU; one that has the real one's name; and two that are refused.
foreach(library fake_nccl named_nccl old_nccl lacking_nccl)
  add_library(${library} SHARED cuda/fake_nccl.cc)
  target_link_libraries(${library} PRIVATE gradwire_base gradwire_warnings)
  target_include_directories(${library} PRIVATE ${CMAKE_SOURCE_DIR}/csrc)
endforeach()
target_link_options(named_nccl PRIVATE LINKER:-soname,libnccl.so.2)
set_target_properties(named_nccl PROPERTIES NO_SONAME ON)
target_compile_definitions(old_nccl PRIVATE FAKE_NCCL_VERSION=21605)
target_compile_definitions(lacking_nccl PRIVATE FAKE_NCCL_LACKS_ABORT)
foreach(name cuda_nccl_test cuda_messages_nccl_test cuda_nccl_blocking_test cuda_native_test
        cuda_counts_test cuda_direct_test)
  add_dependencies(${name} fake_nccl named_nccl old_nccl lacking_nccl)
  target_compile_definitions(${name} PRIVATE
    GRADWIRE_FAKE_NCCL="$<TARGET_FILE:fake_nccl>" GRADWIRE_NAMED_NCCL="$<TARGET_FILE:named_nccl>"
    GRADWIRE_OLD_NCCL="$<TARGET_FILE:old_nccl>" GRADWIRE_LACKING_NCCL="$<TARGET_FILE:lacking_nccl>")
endforeach()
