# What is installed: libforebay-core.so (base, device seam, allocator), libforebay-host.so (the host backend) and
# libforebay.so (everything else, on the core), with a CMake package and a pkg-config file.

function(forebay_library target output)
  cmake_parse_arguments(ARG "" "" "LAYERS;LINK;PUBLIC" ${ARGN})
  add_library(${target} SHARED)
  add_library(forebay::${target} ALIAS ${target})
  foreach(layer IN LISTS ARG_LAYERS)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:forebay_${layer}>)
    target_include_directories(${target} INTERFACE
      "$<BUILD_INTERFACE:$<TARGET_PROPERTY:forebay_${layer},INTERFACE_INCLUDE_DIRECTORIES>>")
  endforeach()
  target_include_directories(${target} INTERFACE "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
  target_compile_features(${target} INTERFACE cxx_std_20)
  target_link_libraries(${target} PRIVATE forebay_flags ${ARG_LINK} PUBLIC ${ARG_PUBLIC})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${output} VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR} LINKER_LANGUAGE CXX INSTALL_RPATH "$ORIGIN")
  install(TARGETS ${target} EXPORT forebay-targets LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endfunction()

forebay_library(forebay-core forebay-core LAYERS base device allocator)
forebay_library(forebay-host forebay-host LAYERS host PUBLIC forebay-core)
set(engine_link TBB::tbb forebay_hwy)
if(FOREBAY_HAVE_GLOO)
  list(APPEND engine_link forebay_gloo)
endif()
forebay_library(forebay forebay LAYERS kernels collectives engine api LINK ${engine_link}
  PUBLIC forebay-core forebay-host)
set_target_properties(forebay_flags PROPERTIES EXPORT_NAME flags)
