# Every third-party package, found here and nowhere else. Nothing is downloaded. A missing package is named with the
# Debian package that has it.

function(forebay_missing what debian)
  message(FATAL_ERROR "forebay needs ${what}, which was not found. On Debian or Ubuntu: apt-get install ${debian}\n"
                      "  ('./dev setup' installs all that is missing.)")
endfunction()

find_package(PkgConfig QUIET)

find_package(TBB QUIET)
if(NOT TBB_FOUND)
  forebay_missing("oneTBB" libtbb-dev)
endif()

find_package(hwy QUIET CONFIG)
if(TARGET hwy::hwy)
  add_library(forebay_hwy ALIAS hwy::hwy)
elseif(PKG_CONFIG_FOUND)
  pkg_check_modules(HWY QUIET IMPORTED_TARGET libhwy)
  if(TARGET PkgConfig::HWY)
    add_library(forebay_hwy ALIAS PkgConfig::HWY)
  endif()
endif()
if(NOT TARGET forebay_hwy)
  forebay_missing("Highway" libhwy-dev)
endif()

find_package(nlohmann_json 3.7 QUIET CONFIG)
if(NOT nlohmann_json_FOUND)
  forebay_missing("nlohmann-json" nlohmann-json3-dev)
endif()

find_package(CLI11 QUIET CONFIG)
if(NOT CLI11_FOUND)
  forebay_missing("CLI11" libcli11-dev)
endif()

find_path(XXHASH_INCLUDE_DIR xxhash.h)
if(NOT XXHASH_INCLUDE_DIR)
  forebay_missing("xxHash" libxxhash-dev)
endif()
add_library(forebay_xxhash INTERFACE)
target_include_directories(forebay_xxhash SYSTEM INTERFACE "${XXHASH_INCLUDE_DIR}")
target_compile_definitions(forebay_xxhash INTERFACE XXH_INLINE_ALL)

# Gloo: ranks as processes. Optional: without it only `--communicator local` is there.
find_path(GLOO_INCLUDE_DIR gloo/context.h)
find_library(GLOO_LIBRARY gloo)
if(GLOO_INCLUDE_DIR AND GLOO_LIBRARY)
  set(FOREBAY_HAVE_GLOO ON)
  add_library(forebay_gloo INTERFACE)
  target_include_directories(forebay_gloo SYSTEM INTERFACE "${GLOO_INCLUDE_DIR}")
  target_link_libraries(forebay_gloo INTERFACE "${GLOO_LIBRARY}")
else()
  set(FOREBAY_HAVE_GLOO OFF)
  message(STATUS "Gloo not found (Debian: libgloo-dev): ranks will be threads of one process only")
endif()

# oneDNN: matrix products of the sample on the CPU. Optional: without it only `--matmul plain` is there.
# By header and library: Debian 12's CMake package of oneDNN demands the headers of OpenCL, which libdnnl-dev does not
# bring and the sample does not use.
find_path(ONEDNN_INCLUDE_DIR dnnl.hpp)
find_library(ONEDNN_LIBRARY dnnl)
if(ONEDNN_INCLUDE_DIR AND ONEDNN_LIBRARY)
  if(NOT TARGET DNNL::dnnl)
    add_library(DNNL::dnnl INTERFACE IMPORTED GLOBAL)
    target_include_directories(DNNL::dnnl SYSTEM INTERFACE "${ONEDNN_INCLUDE_DIR}")
    target_link_libraries(DNNL::dnnl INTERFACE "${ONEDNN_LIBRARY}")
  endif()
  set(FOREBAY_HAVE_ONEDNN ON)
else()
  set(FOREBAY_HAVE_ONEDNN OFF)
  message(STATUS "oneDNN not found (Debian: libdnnl-dev): the sample has its own plain matrix products only")
endif()

if(FOREBAY_TESTS)
  find_package(GTest QUIET)
  if(NOT GTest_FOUND)
    forebay_missing("GoogleTest" "libgtest-dev libgmock-dev")
  endif()
  include(GoogleTest)
endif()
