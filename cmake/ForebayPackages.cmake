# Debian packages, one for each component: `cpack` in a build directory of the preset "package" (`./dev package`).
set(version "${PROJECT_VERSION}-1")
string(REGEX MATCH "^[0-9]+" so_version "${PROJECT_VERSION}")
get_target_property(c_so_version forebay-c SOVERSION)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_VENDOR "forebay")
set(CPACK_PACKAGE_CONTACT "forebay developers <developers@forebay.invalid>")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_PACKAGING_INSTALL_PREFIX "${CMAKE_INSTALL_PREFIX}")
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
# The libraries of one component are found by those of another; between components the dependencies are written below.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${PROJECT_BINARY_DIR}/lib")
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
# cpack runs ldconfig when a library is installed, but not when it is removed.
foreach(component LIBRARY C_LIBRARY PRELOAD)
  set(CPACK_DEBIAN_${component}_PACKAGE_CONTROL_EXTRA "${CMAKE_CURRENT_LIST_DIR}/debian/triggers")
endforeach()
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_PRE_BUILD_SCRIPTS "${CMAKE_CURRENT_LIST_DIR}/FinishPackages.cmake")

# package(component NAME name SECTION section SUMMARY text TEXT text [DEPENDS package...] [SUGGESTS package...])
function(package component)
  cmake_parse_arguments(ARG "" "NAME;SECTION;SUMMARY;TEXT" "DEPENDS;SUGGESTS" ${ARGN})
  string(TOUPPER "${component}" upper)
  list(JOIN ARG_DEPENDS ", " depends)
  list(JOIN ARG_SUGGESTS ", " suggests)
  foreach(field NAME SECTION DEPENDS SUGGESTS)
    string(TOLOWER ${field} value)
    if(NOT DEFINED ${value})
      set(${value} "${ARG_${field}}")
    endif()
    set(CPACK_DEBIAN_${upper}_PACKAGE_${field} "${${value}}" PARENT_SCOPE)
  endforeach()
  set(CPACK_DEBIAN_${upper}_DESCRIPTION "${ARG_SUMMARY}\n${ARG_TEXT}" PARENT_SCOPE)
  set(CPACK_COMPONENTS_ALL ${CPACK_COMPONENTS_ALL} ${component} PARENT_SCOPE)
endfunction()

set(CPACK_COMPONENTS_ALL)
package(library NAME libforebay${so_version} SECTION libs
  SUMMARY "offload and memory-management runtime for training large models"
  TEXT "forebay implements ZeRO stages 0 to 3, offload to host memory and files,\nand an arena for device memory.\n.\nThis package has the C++ libraries."
  SUGGESTS libnccl2 libpmix2)
package(c_library NAME libforebay-c${c_so_version} SECTION libs
  SUMMARY "offload and memory-management runtime for training large models: C library"
  TEXT "This package has the C interface of forebay in one library."
  SUGGESTS libnccl2 libpmix2)
package(preload NAME libforebay-preload SECTION libs
  SUMMARY "forebay's arena under unmodified CUDA programs"
  TEXT "This package has the library that 'forebay run' preloads."
  DEPENDS "libforebay${so_version} (= ${version})")
package(development NAME libforebay-dev SECTION libdevel
  SUMMARY "offload and memory-management runtime for training large models: headers"
  TEXT "This package has the headers, the files for CMake and pkg-config, and the\nmanual pages of the C interface."
  DEPENDS "libforebay${so_version} (= ${version})" "libforebay-c${c_so_version} (= ${version})")
package(command NAME forebay SECTION utils
  SUMMARY "plan, run, replay and explain the memory of trainings"
  TEXT "This package has the program 'forebay'."
  DEPENDS "libforebay${so_version} (= ${version})" "libforebay-preload (= ${version})")
if(TARGET forebay-gpt)
  package(sample NAME forebay-gpt SECTION utils
    SUMMARY "sample trainer of forebay"
    TEXT "This package has the program 'forebay-gpt', which trains a small GPT with ZeRO\nstages 0 to 3 on one rank or many."
    DEPENDS "libforebay${so_version} (= ${version})")
endif()
include(CPack)
