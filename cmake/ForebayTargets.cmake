# forebay_layer, forebay_executable and forebay_test: the three ways a target is made here.

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")

# Programs find the libraries from where they lie, in the build tree as in an installed one. Otherwise CMake links programs of the build
# tree with a path that it replaces at installation, and pads that path with empty entries: for them the loader searches the working
# directory.
set(FOREBAY_PROGRAM_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
if(NOT CMAKE_INSTALL_LIBDIR STREQUAL "lib")
  list(APPEND FOREBAY_PROGRAM_RPATH "$ORIGIN/../lib")
endif()
if(FOREBAY_STANDALONE)
  set(FOREBAY_PROGRAM_RPATH "$ORIGIN")  # A wheel has the command beside the libraries.
endif()

# The preload and the programs that use it open the core by this name.
set(FOREBAY_CORE_SONAME "libforebay-core.so.${PROJECT_VERSION_MAJOR}")

# The compiler flags of every target. -ffp-contract=off: each fused multiply-add is written out, so that results do not
# depend on the compiler's choice (ARCHITECTURE.md, "The numeric contract").
add_library(forebay_flags INTERFACE)
target_compile_features(forebay_flags INTERFACE cxx_std_20)
target_compile_options(forebay_flags INTERFACE -Wall -Wextra -Wno-missing-field-initializers -ffp-contract=off)
# A failed check names its source; the place of the build shall not be in the libraries.
target_compile_options(forebay_flags INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=>)
# No library takes the place of another's functions here, so the compiler may inline its own although they are exported.
# Clang always does.
target_compile_options(forebay_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-semantic-interposition>)
# GCC collects garbage each time that its heap has doubled, which takes a twelfth of the time of a large source. With this it starts at
# 700 MB. Less: as before. More: several compilers may not have the memory; a compiler takes up to 880 MiB with it, and 740 without.
if(FOREBAY_UNITY)
  target_compile_options(forebay_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=700000>)
endif()
if(FOREBAY_WERROR)
  target_compile_options(forebay_flags INTERFACE -Werror)
endif()
if(FOREBAY_SANITIZE)
  target_compile_options(forebay_flags INTERFACE -fsanitize=${FOREBAY_SANITIZE} -fno-omit-frame-pointer)
  if(FOREBAY_SANITIZE MATCHES "undefined")
    # The core has no RTTI, without which this check calls every object of it invalid.
    target_compile_options(forebay_flags INTERFACE -fno-sanitize=vptr)
    # GCC takes members that the checks read for uninitialized, as in std::regex.
    target_compile_options(forebay_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>)
  endif()
  target_link_options(forebay_flags INTERFACE -fsanitize=${FOREBAY_SANITIZE})
endif()
find_package(Threads REQUIRED)
target_link_libraries(forebay_flags INTERFACE Threads::Threads)

# The headers that the larger layers include most, parsed once for all sources of a layer. A source still includes the
# headers that it needs.
set(FOREBAY_PRECOMPILED <algorithm> <chrono> <cstdint> <cstdio> <cstring> <functional> <map> <memory> <optional> <string>
  <string_view> <utility> <vector>)

# forebay_folders(target [ALONE a.cc ...]): with FOREBAY_UNITY, the sources of each folder of a target are compiled as one, so that the
# headers and templates that they share are compiled once. ALONE: sources with a name that another source of their folder has too.
# Builds without it (debug, the sanitizers, tidy) show that each source includes the headers that it needs.
function(forebay_folders target)
  cmake_parse_arguments(ARG "" "" "ALONE" ${ARGN})
  if(NOT FOREBAY_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "[.]cc$")
  foreach(source IN LISTS sources)
    get_filename_component(folder "${source}" DIRECTORY)
    if(source IN_LIST ARG_ALONE)
      set_source_files_properties("${source}" PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    else()
      set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "in_${folder}")
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

# forebay_layer(NAME [CORE] SOURCES a.cc ... [DEPENDS lower_layer ...] [LINK third_party ...]
#   [FOLDERS [ALONE a.cc ...]])
# One layer: an object library forebay_NAME with the include/ directory beside its CMakeLists.txt. It sees the headers
# of the layers it depends on and no others. CORE: may run inside another program's allocation call, so no exceptions
# and no RTTI. FOLDERS: see forebay_folders.
function(forebay_layer name)
  cmake_parse_arguments(ARG "CORE;FOLDERS" "" "SOURCES;DEPENDS;LINK;ALONE" ${ARGN})
  add_library(forebay_${name} OBJECT ${ARG_SOURCES})
  set_target_properties(forebay_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(forebay_${name} PUBLIC
    "$<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>" "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
  # Private headers are spelled from the source root; tests/layers checks that a layer reaches only its own that way.
  target_include_directories(forebay_${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  foreach(lower IN LISTS ARG_DEPENDS)
    target_include_directories(forebay_${name} PUBLIC
      "$<TARGET_PROPERTY:forebay_${lower},INTERFACE_INCLUDE_DIRECTORIES>")
  endforeach()
  target_link_libraries(forebay_${name} PRIVATE forebay_flags ${ARG_LINK})
  if(ARG_CORE)
    target_compile_options(forebay_${name} PRIVATE -fno-exceptions -fno-rtti)
  endif()
  list(LENGTH ARG_SOURCES source_count)
  if(ARG_FOLDERS)
    forebay_folders(forebay_${name} ALONE ${ARG_ALONE})
  endif()
  if(source_count GREATER 15 AND NOT FOREBAY_UNITY)
    target_precompile_headers(forebay_${name} PRIVATE ${FOREBAY_PRECOMPILED})
  endif()
  set_property(GLOBAL APPEND PROPERTY FOREBAY_LAYERS ${name})
  install(DIRECTORY include/ DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT development OPTIONAL)
endfunction()

# forebay_executable(target OUTPUT name SOURCES a.cc ... [LINK third_party ...])
# A program that is installed. It links the libraries as a user of them would, and sees their private headers from the
# source root.
function(forebay_executable target)
  cmake_parse_arguments(ARG "" "OUTPUT" "SOURCES;LINK" ${ARGN})
  add_executable(${target} ${ARG_SOURCES})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${target} PRIVATE forebay_flags forebay ${ARG_LINK})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${ARG_OUTPUT}
    INSTALL_RPATH "${FOREBAY_PROGRAM_RPATH}" BUILD_WITH_INSTALL_RPATH ON)
  install(TARGETS ${target} RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT command)
endfunction()

# Tests are compiled more often than they are run, and programs spend little time outside the libraries. A failing
# expectation says its line without debug information; presets with sanitizers have it.
set(FOREBAY_TEST_OPTIONS $<$<CONFIG:RelWithDebInfo>:-O0> $<$<CONFIG:RelWithDebInfo>:-g0>)
set(FOREBAY_BUSY_TEST_OPTIONS $<$<CONFIG:RelWithDebInfo>:-O1> $<$<CONFIG:RelWithDebInfo>:-g0>)
set(FOREBAY_COMMAND_OPTIONS $<$<CONFIG:RelWithDebInfo>:-O1>)

# The options and the precompiled headers of a test's sources. Headers that were compiled with -O0 do not serve -O1.
function(forebay_test_options target busy)
  if(busy)
    target_compile_options(${target} PRIVATE ${FOREBAY_BUSY_TEST_OPTIONS})
    target_precompile_headers(${target} REUSE_FROM forebay_busy_test_headers)
  else()
    target_compile_options(${target} PRIVATE ${FOREBAY_TEST_OPTIONS})
    target_precompile_headers(${target} REUSE_FROM forebay_test_headers)
  endif()
endfunction()

# forebay_suite(name [BUSY] SOURCES a.cc ...): parameterized tests that several programs instantiate, compiled once. A program has
# LINK name.
function(forebay_suite name)
  cmake_parse_arguments(ARG "BUSY" "" "SOURCES" ${ARGN})
  add_library(${name} OBJECT ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE forebay_flags forebay GTest::gtest_main)
  forebay_test_options(${name} "${ARG_BUSY}")
endfunction()

# forebay_test(name [BUSY] SOURCES a.cc ... [ALONE b.cc ...] [LABELS unit ...] [LONG name ...] [TIMEOUT seconds] [SLOW_TIMEOUT seconds]
#   [LINK extra ...])
# One GoogleTest program, one ctest entry per test case. Private headers are reached from the source root. With FOREBAY_UNITY the
# SOURCES are compiled as one, because each test source spends most of its time on the templates that its neighbours use too: about
# eight to a program, and none of them uses a local name of another. Sources that must be compiled by themselves are ALONE. BUSY:
# the tests compute for so long that -O1 saves more time than it costs. With
# SLOW_TIMEOUT the suites whose name begins with Slow have the label slow, and that time (tests/support/slow.h). A limit is at least
# ten times as long as the slowest test takes on an idle machine. LONG: regular expressions of the tests that have the label long too,
# which './dev test' leaves out and CI runs: the further settings of a test whose first ones stay, and what takes more than some seconds.
function(forebay_test name)
  cmake_parse_arguments(ARG "BUSY" "TIMEOUT;SLOW_TIMEOUT" "SOURCES;ALONE;LABELS;LONG;LINK" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  # gtest_discover_tests takes one value for each property: a second label would be taken for the next property's name.
  list(GET ARG_LABELS 0 label)
  # Tests that wait for deadlines and other processes start first, so that none of them runs alone in the end.
  set(cost 0)
  if("multirank" IN_LIST ARG_LABELS)
    set(cost ${ARG_TIMEOUT})
  endif()
  # Tests that the sanitized runs leave out are not built for them.
  set(built)
  if(FOREBAY_SANITIZE AND NOT "unit" IN_LIST ARG_LABELS AND NOT "conformance" IN_LIST ARG_LABELS)
    set(built EXCLUDE_FROM_ALL)
  endif()
  add_executable(${name} ${built} ${ARG_SOURCES} ${ARG_ALONE})
  if(FOREBAY_UNITY)
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
    set_source_files_properties(${ARG_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE forebay_flags forebay ${ARG_LINK} GTest::gtest_main)
  # tests_FOLDER builds the tests of one folder.
  get_filename_component(folder "${CMAKE_CURRENT_SOURCE_DIR}" NAME)
  if(NOT TARGET tests_${folder})
    add_custom_target(tests_${folder})
  endif()
  if(NOT built)
    add_dependencies(tests_${folder} ${name})
  endif()
  forebay_test_options(${name} "${ARG_BUSY}")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  set(ordinary)
  if(ARG_SLOW_TIMEOUT)
    set(ordinary TEST_FILTER "-Slow*")
    gtest_discover_tests(${name} TEST_FILTER "Slow*" TEST_LIST ${name}_SLOW_TESTS DISCOVERY_TIMEOUT 60 NO_PRETTY_VALUES
      PROPERTIES LABELS slow TIMEOUT ${ARG_SLOW_TIMEOUT} ENVIRONMENT "${FOREBAY_TEST_ENVIRONMENT}")
  endif()
  gtest_discover_tests(${name} ${ordinary} DISCOVERY_TIMEOUT 60 NO_PRETTY_VALUES
    PROPERTIES LABELS ${label} TIMEOUT ${ARG_TIMEOUT} COST ${cost} ENVIRONMENT "${FOREBAY_TEST_ENVIRONMENT}")
  if(ARG_LONG OR NOT ARG_LABELS STREQUAL label)
    list(JOIN ARG_LONG "|" long)
    set(script "${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake")
    file(WRITE "${script}" "foreach(test IN LISTS ${name}_TESTS)
  set(labels \"${ARG_LABELS}\")
  if(NOT \"${long}\" STREQUAL \"\" AND test MATCHES \"${long}\")
    list(APPEND labels long)
  endif()
  set_tests_properties(\"\${test}\" PROPERTIES LABELS \"\${labels}\")
endforeach()
")
    set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${script}")
  endif()
endfunction()

# forebay_harsh_test(name LABELS label... [TIMEOUT seconds]): the tests of a program once more, with the fake CUDA driver at its
# harshest (tests/fakes/cuda/fake_cuda.h, FAKE_CUDA_HARSH): one callback thread, a queue of 57, reordered streams. With a queue of
# 512, which fills up less often, they have the label slow. Call it after forebay_test(), with the same FOREBAY_TEST_ENVIRONMENT.
function(forebay_harsh_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  foreach(queue 57 512)
    if(queue EQUAL 512)
      set(ARG_LABELS slow)
    endif()
    gtest_discover_tests(${name} TEST_PREFIX harsh${queue}. TEST_LIST ${name}_HARSH${queue}_TESTS TEST_FILTER "-Slow*"
      DISCOVERY_TIMEOUT 60 NO_PRETTY_VALUES PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
      ENVIRONMENT "${FOREBAY_TEST_ENVIRONMENT}" ENVIRONMENT_MODIFICATION "FAKE_CUDA_HARSH=set:${queue}")
  endforeach()
endfunction()
