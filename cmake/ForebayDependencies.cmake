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
  set(hwy hwy::hwy)
elseif(PKG_CONFIG_FOUND)
  pkg_check_modules(HWY QUIET IMPORTED_TARGET libhwy)
  if(TARGET PkgConfig::HWY)
    set(hwy PkgConfig::HWY)
  endif()
endif()
if(NOT hwy)
  forebay_missing("Highway" libhwy-dev)
endif()
# Highway's headers alone, in a namespace of their own: libhwy.so takes 3.5 ms to load, and kernels/simd_targets.cc has the
# functions that the headers call. That source knows x86-64 only.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(FOREBAY_SIMD_TARGETS simd_targets.cc)
  add_library(forebay_hwy INTERFACE)
  target_include_directories(forebay_hwy SYSTEM INTERFACE "$<TARGET_PROPERTY:${hwy},INTERFACE_INCLUDE_DIRECTORIES>")
  target_compile_definitions(forebay_hwy INTERFACE hwy=forebay_hwy)
else()
  add_library(forebay_hwy ALIAS ${hwy})
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
option(FOREBAY_GLOO "Use Gloo where it is found" ON)
find_path(GLOO_INCLUDE_DIR gloo/context.h)
find_library(GLOO_LIBRARY gloo)
# Connected sockets are handed to Gloo's pairs, whose interface is not a public one (collectives/process/gloo_context.cc).
set(gloo_pairs "")
if(GLOO_INCLUDE_DIR)
  file(STRINGS "${GLOO_INCLUDE_DIR}/gloo/transport/tcp/pair.h" gloo_pairs REGEX "(handleConnected|connectCallback)\\(")
  if(NOT gloo_pairs)
    message(STATUS "The Gloo in ${GLOO_INCLUDE_DIR} is not used: its pairs take no connected sockets. Known to work are those of Debian 12 "
                   "and 13 and of September 2025")
  endif()
endif()
if(FOREBAY_GLOO AND gloo_pairs AND GLOO_LIBRARY)
  set(FOREBAY_HAVE_GLOO ON)
  add_library(forebay_gloo INTERFACE)
  if(gloo_pairs MATCHES "connectCallback")
    target_compile_definitions(forebay_gloo INTERFACE FOREBAY_GLOO_DEVICE_LISTENS)
  endif()
  target_include_directories(forebay_gloo SYSTEM INTERFACE "${GLOO_INCLUDE_DIR}")
  target_link_libraries(forebay_gloo INTERFACE "${GLOO_LIBRARY}")
  if(NOT EXISTS "${GLOO_INCLUDE_DIR}/gloo/common/memory.h")
    target_include_directories(forebay_gloo SYSTEM INTERFACE "${PROJECT_SOURCE_DIR}/collectives/process/gloo_headers")
  endif()
else()
  set(FOREBAY_HAVE_GLOO OFF)
  message(STATUS "Gloo not found (Debian: libgloo-dev) or not wanted: ranks will be threads of one process only")
endif()

# An optional package that pkg-config finds: the target forebay_<name>, FOREBAY_HAVE_<NAME>, and the option to leave it out.
function(forebay_optional_module name requirement debian otherwise)
  string(TOUPPER ${name} upper)
  option(FOREBAY_${upper} "Use ${name} where it is found" ON)
  if(FOREBAY_${upper} AND PKG_CONFIG_FOUND)
    pkg_check_modules(${upper} QUIET IMPORTED_TARGET GLOBAL ${requirement})
  endif()
  if(TARGET PkgConfig::${upper})
    set(FOREBAY_HAVE_${upper} ON PARENT_SCOPE)
    add_library(forebay_${name} ALIAS PkgConfig::${upper})
  else()
    set(FOREBAY_HAVE_${upper} OFF PARENT_SCOPE)
    message(STATUS "${requirement} not found (Debian: ${debian}) or not wanted: ${otherwise}")
  endif()
endfunction()

# From 2.2 on liburing has tables of registered memory that are filled bit by bit.
forebay_optional_module(liburing "liburing>=2.2" liburing-dev "the file tier will use threads, not io_uring")
forebay_optional_module(hwloc "hwloc>=2.1" libhwloc-dev "the topology of the host will be read from sysfs")

# oneDNN: matrix products of the sample on the CPU. Optional: without it only `--matmul plain` is there.
# By header and library: Debian 12's CMake package of oneDNN demands the headers of OpenCL, which libdnnl-dev does not
# bring and the sample does not use.
option(FOREBAY_ONEDNN "Use oneDNN where it is found" ON)
find_path(ONEDNN_INCLUDE_DIR dnnl.hpp)
find_library(ONEDNN_LIBRARY dnnl)
if(FOREBAY_ONEDNN AND ONEDNN_INCLUDE_DIR AND ONEDNN_LIBRARY)
  if(NOT TARGET DNNL::dnnl)
    add_library(DNNL::dnnl INTERFACE IMPORTED GLOBAL)
    target_include_directories(DNNL::dnnl SYSTEM INTERFACE "${ONEDNN_INCLUDE_DIR}")
    target_link_libraries(DNNL::dnnl INTERFACE "${ONEDNN_LIBRARY}")
  endif()
  set(FOREBAY_HAVE_ONEDNN ON)
else()
  set(FOREBAY_HAVE_ONEDNN OFF)
  message(STATUS "oneDNN not found (Debian: libdnnl-dev) or not wanted: the sample has its own plain matrix products only")
endif()

if(FOREBAY_TESTS)
  find_package(GTest QUIET)
  if(NOT GTest_FOUND)
    forebay_missing("GoogleTest" "libgtest-dev libgmock-dev")
  endif()
  include(GoogleTest)

  # pmix.h: a test compares our own declarations of PMIx with it. Optional, and tests only.
  set(FOREBAY_HAVE_PMIX_H OFF)
  if(PKG_CONFIG_FOUND)
    pkg_check_modules(PMIX QUIET pmix>=3)
  endif()
  if(PMIX_FOUND)
    set(FOREBAY_HAVE_PMIX_H ON)
    add_library(forebay_pmix_h INTERFACE)
    target_include_directories(forebay_pmix_h SYSTEM INTERFACE ${PMIX_INCLUDE_DIRS})
  else()
    message(STATUS "pmix.h not found (Debian: libpmix-dev): our declarations of PMIx are not checked against it")
  endif()

  # cuda.h: a test compares our own declarations of the driver's interface with it. Optional, and tests only.
  find_path(FOREBAY_CUDA_H cuda.h HINTS "$ENV{CUDA_HOME}/include" /usr/local/cuda/include
    DOC "The directory of the CUDA toolkit's cuda.h")
  set(FOREBAY_HAVE_CUDA_H OFF)
  if(FOREBAY_CUDA_H)
    file(STRINGS "${FOREBAY_CUDA_H}/cuda.h" version REGEX "^#define CUDA_VERSION [0-9]+")
    string(REGEX MATCH "[0-9]+$" version "${version}")
  endif()
  if(NOT FOREBAY_CUDA_H)
    message(STATUS "cuda.h not found (CUDA toolkit 13): our declarations of the driver are not checked against it")
  elseif(NOT EXISTS "${FOREBAY_CUDA_H}/cudaTypedefs.h" OR version LESS 13000)
    message(STATUS "${FOREBAY_CUDA_H}/cuda.h is of version '${version}', older than 13000, from which our declarations of "
                   "the driver were written: they are not checked against it")
  else()
    set(FOREBAY_HAVE_CUDA_H ON)
    add_library(forebay_cuda_h INTERFACE)
    target_include_directories(forebay_cuda_h SYSTEM INTERFACE "${FOREBAY_CUDA_H}")
  endif()

  # nccl.h: a test compares our own declarations of NCCL's interface with it. Optional, and tests only. It includes the
  # toolkit's cuda_runtime.h.
  find_path(FOREBAY_NCCL_H nccl.h HINTS "$ENV{NCCL_HOME}/include" /usr/local/cuda/include
    DOC "The directory of NCCL's nccl.h")
  set(FOREBAY_HAVE_NCCL_H OFF)
  if(NOT FOREBAY_NCCL_H)
    message(STATUS "nccl.h not found (NCCL 2.18 or newer; -D FOREBAY_NCCL_H=<its directory>): our declarations of NCCL are "
                   "not checked against it")
  elseif(NOT FOREBAY_CUDA_H OR NOT EXISTS "${FOREBAY_CUDA_H}/cuda_runtime.h")
    message(STATUS "${FOREBAY_NCCL_H}/nccl.h needs cuda_runtime.h (CUDA toolkit), which was not found: our declarations of "
                   "NCCL are not checked against it")
  else()
    set(FOREBAY_HAVE_NCCL_H ON)
    add_library(forebay_nccl_h INTERFACE)
    target_include_directories(forebay_nccl_h SYSTEM INTERFACE "${FOREBAY_NCCL_H}" "${FOREBAY_CUDA_H}")
  endif()
endif()

# nvcc: compiles the CUDA kernels. Optional: without it the library loads no kernels onto a GPU. Nothing of the toolkit is
# linked, and code is made for those of FOREBAY_CUDA_ARCHITECTURES that the nvcc found knows.
option(FOREBAY_CUDA_KERNELS "Compile the CUDA kernels where nvcc is found" ON)
set(FOREBAY_CUDA_ARCHITECTURES "75;80;86;89;90;100;120" CACHE STRING "Compute capabilities to compile for")
# PTX of 10.0 serves 11.0 and 13.0 too; PTX of 12.0 would not serve 11.0.
set(FOREBAY_CUDA_PTX_ARCHITECTURE 100 CACHE STRING "The newest compute capability for which PTX is embedded")
set(FOREBAY_NVCC_HOST_COMPILER "${CMAKE_CXX_COMPILER}" CACHE FILEPATH "The C++ compiler that nvcc preprocesses with")
set(FOREBAY_HAVE_NVCC OFF)
if(FOREBAY_CUDA_KERNELS)
  find_program(FOREBAY_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin
    DOC "The CUDA compiler")
  if(NOT FOREBAY_NVCC)
    message(STATUS "nvcc not found (CUDA toolkit 12 or newer): there will be no kernels for GPUs")
  else()
    execute_process(COMMAND "${FOREBAY_NVCC}" --version OUTPUT_VARIABLE version ERROR_QUIET)
    execute_process(COMMAND "${FOREBAY_NVCC}" --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
    string(REGEX MATCH "release ([0-9]+[.][0-9]+)" version "${version}")
    set(FOREBAY_NVCC_VERSION "${CMAKE_MATCH_1}")
    set(FOREBAY_NVCC_ARCHITECTURES "")
    unset(ptx_architecture)
    foreach(architecture IN LISTS FOREBAY_CUDA_ARCHITECTURES)
      if(known MATCHES "compute_${architecture}\n")
        list(APPEND FOREBAY_NVCC_ARCHITECTURES ${architecture})
        if(NOT DEFINED ptx_architecture OR architecture LESS_EQUAL FOREBAY_CUDA_PTX_ARCHITECTURE)
          set(ptx_architecture ${architecture})
        endif()
      endif()
    endforeach()
    set(FOREBAY_NVCC_PTX_ARCHITECTURE "${ptx_architecture}")
    if(NOT FOREBAY_NVCC_VERSION VERSION_GREATER_EQUAL 12.0)
      message(STATUS "${FOREBAY_NVCC} is of version '${FOREBAY_NVCC_VERSION}', older than 12.0, the first with C++20: "
                     "there will be no kernels for GPUs")
    elseif(NOT FOREBAY_NVCC_ARCHITECTURES)
      message(FATAL_ERROR "FOREBAY_CUDA_ARCHITECTURES is '${FOREBAY_CUDA_ARCHITECTURES}', of which ${FOREBAY_NVCC} "
                          "${FOREBAY_NVCC_VERSION} knows none; name some that 'nvcc --list-gpu-arch' lists")
    else()
      # Whether it gets along with this C++ compiler, asked once for each pair of the two.
      set(pair "${FOREBAY_NVCC} ${FOREBAY_NVCC_VERSION} ${FOREBAY_NVCC_HOST_COMPILER} ${CMAKE_CXX_COMPILER_VERSION}")
      if(NOT FOREBAY_NVCC_TRIED STREQUAL pair)
        set(probe "${PROJECT_BINARY_DIR}/CMakeFiles/nvcc_probe")
        file(WRITE "${probe}.cu" "#include <cmath>\n#include <cstdint>\n__global__ void probe(float* x) { *x = fmaf(*x, *x, *x); }\n")
        execute_process(COMMAND "${FOREBAY_NVCC}" -std=c++20 -ccbin "${FOREBAY_NVCC_HOST_COMPILER}" -ptx "${probe}.cu" -o "${probe}.ptx"
          RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
        set(FOREBAY_NVCC_TRIED "${pair}" CACHE INTERNAL "")
        set(FOREBAY_NVCC_RESULT "${result}" CACHE INTERNAL "")
        set(FOREBAY_NVCC_OUTPUT "${output}" CACHE INTERNAL "")
      endif()
      if(FOREBAY_NVCC_RESULT EQUAL 0)
        set(FOREBAY_HAVE_NVCC ON)
      else()
        message(STATUS "${FOREBAY_NVCC} ${FOREBAY_NVCC_VERSION} does not work with ${FOREBAY_NVCC_HOST_COMPILER}: there will be no "
                       "kernels for GPUs. It said: ${FOREBAY_NVCC_OUTPUT}")
      endif()
    endif()
  endif()
endif()
