# The installed libraries: libforebay-core.so (base, device seam, allocator), libforebay-host.so (the host backend) and
# libforebay.so (everything else, on the core), with a CMake package and a pkg-config file.

# zig's linker does not have it.
include(CheckLinkerFlag)
check_linker_flag(CXX "LINKER:-Bsymbolic-functions" FOREBAY_HAVE_BSYMBOLIC_FUNCTIONS)

# forebay_library(target output [EXPORTS map] LAYERS name ... [LINK third_party ...] [PUBLIC target ...])
# A library of the objects of LAYERS. With EXPORTS, a version script, it exports C functions only.
function(forebay_library target output)
  cmake_parse_arguments(ARG "" "EXPORTS" "LAYERS;LINK;PUBLIC" ${ARGN})
  add_library(${target} SHARED)
  add_library(forebay::${target} ALIAS ${target})
  foreach(layer IN LISTS ARG_LAYERS)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:forebay_${layer}>)
    if(NOT ARG_EXPORTS)
      target_include_directories(${target} INTERFACE
        "$<BUILD_INTERFACE:$<TARGET_PROPERTY:forebay_${layer},INTERFACE_INCLUDE_DIRECTORIES>>")
    endif()
  endforeach()
  target_include_directories(${target} INTERFACE "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
  if(NOT ARG_EXPORTS)
    # Its headers need no more, although its sources are C++20.
    target_compile_features(${target} INTERFACE cxx_std_17)
  endif()
  target_link_libraries(${target} PRIVATE forebay_flags ${ARG_LINK} PUBLIC ${ARG_PUBLIC})
  if(FOREBAY_HAVE_BSYMBOLIC_FUNCTIONS)
    # Its calls of its own functions are direct; see forebay_flags.
    target_link_options(${target} PRIVATE "LINKER:-Bsymbolic-functions")
  endif()
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${output} VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR} LINKER_LANGUAGE CXX INSTALL_RPATH "$ORIGIN" BUILD_WITH_INSTALL_RPATH ON)
  if(ARG_EXPORTS)
    target_link_options(${target} PRIVATE "LINKER:--version-script=${ARG_EXPORTS}")
    set_target_properties(${target} PROPERTIES LINK_DEPENDS "${ARG_EXPORTS}")
  endif()
  set(component library)
  if(target STREQUAL "forebay-c")
    set(component c_library)
  endif()
  install(TARGETS ${target} EXPORT forebay-targets
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT ${component} NAMELINK_COMPONENT development
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT development)
endfunction()

set(engine_link TBB::tbb)
if(NOT FOREBAY_SIMD_TARGETS)
  list(APPEND engine_link forebay_hwy)
endif()
if(FOREBAY_HAVE_GLOO)
  list(APPEND engine_link forebay_gloo)
endif()
if(FOREBAY_HAVE_LIBURING)
  list(APPEND engine_link forebay_liburing)
endif()
if(FOREBAY_HAVE_HWLOC)
  list(APPEND engine_link forebay_hwloc)
endif()
set(core_layers base device allocator)
set(engine_layers model topology kernels collectives offload engine)
set(c_layers ${core_layers} host ${engine_layers} api)
set(c_exports "${PROJECT_SOURCE_DIR}/runtime/api/forebay-c.map")
if(FOREBAY_STANDALONE)
  # Each library has a C++ library of its own inside, so no C++ type may pass between two of them. The command is in
  # libforebay-c.so, so that the engine and the CUDA kernels are there once; its program only calls it.
  forebay_library(forebay-core forebay-core LAYERS ${core_layers} EXPORTS "${PROJECT_SOURCE_DIR}/allocator/forebay-core.map")
  add_library(forebay INTERFACE)
  foreach(layer IN LISTS c_layers ITEMS command_line)
    target_include_directories(forebay INTERFACE "$<TARGET_PROPERTY:forebay_${layer},INTERFACE_INCLUDE_DIRECTORIES>")
  endforeach()
  list(APPEND c_layers command_line)
  file(READ "${c_exports}" exports)
  set(c_exports "${PROJECT_BINARY_DIR}/forebay-c-and-command.map")
  file(CONFIGURE OUTPUT "${c_exports}" CONTENT "${exports}FOREBAY_COMMAND { global: forebay_command_main; };\n" @ONLY)
else()
  forebay_library(forebay-core forebay-core LAYERS ${core_layers})
  forebay_library(forebay-host forebay-host LAYERS host PUBLIC forebay-core)
  forebay_library(forebay forebay LAYERS command_line ${engine_layers} LINK ${engine_link} PUBLIC forebay-core forebay-host)
endif()

# libforebay-c.so: the C interface and everything below it in one library, which exports the functions of forebay.h and
# nothing else. Its name carries FOREBAY_ABI. It stands beside the C++ libraries; a program uses one or the other.
forebay_library(forebay-c forebay-c LAYERS ${c_layers} LINK ${engine_link} EXPORTS "${c_exports}")
target_include_directories(forebay-c INTERFACE "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/runtime/api/include>")
file(STRINGS "${PROJECT_SOURCE_DIR}/runtime/api/include/forebay/forebay.h" abi REGEX "^#define FOREBAY_ABI [0-9]+")
string(REGEX MATCH "[0-9]+$" abi "${abi}")
set_target_properties(forebay-c PROPERTIES SOVERSION ${abi} VERSION ${abi}.${PROJECT_VERSION})
if(FOREBAY_STANDALONE)
  target_link_libraries(forebay-c PRIVATE forebay_subcommands forebay_command)
  return()
endif()

# find_package(forebay) -> forebay::forebay, and pkg-config. No third-party header is in a public header, so neither has
# dependencies to find.
include(CMakePackageConfigHelpers)
set(package_directory "${CMAKE_INSTALL_LIBDIR}/cmake/forebay")
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/forebay-config.cmake.in"
  "${PROJECT_BINARY_DIR}/forebay-config.cmake" INSTALL_DESTINATION "${package_directory}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/forebay-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(EXPORT forebay-targets NAMESPACE forebay:: DESTINATION "${package_directory}" COMPONENT development)
# The prefix is found from where the file lies, so that an installed tree can be moved.
file(RELATIVE_PATH prefix_from_pkgconfig "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" prefix_from_pkgconfig "${prefix_from_pkgconfig}")
configure_file("${CMAKE_CURRENT_LIST_DIR}/forebay.pc.in" "${PROJECT_BINARY_DIR}/forebay.pc" @ONLY)
configure_file("${CMAKE_CURRENT_LIST_DIR}/forebay-c.pc.in" "${PROJECT_BINARY_DIR}/forebay-c.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/forebay-config.cmake" "${PROJECT_BINARY_DIR}/forebay-config-version.cmake"
  DESTINATION "${package_directory}" COMPONENT development)
install(FILES "${PROJECT_BINARY_DIR}/forebay.pc" "${PROJECT_BINARY_DIR}/forebay-c.pc"
  DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT development)
