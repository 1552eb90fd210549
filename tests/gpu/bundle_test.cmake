# Packs the bundle, moves it to a path with a space, and runs a few of its parts on the fake driver there.

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed (${result}): ${ARGN}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

set(packed "${WORK_DIRECTORY}/packed")
set(moved "${WORK_DIRECTORY}/moved elsewhere")
file(REMOVE_RECURSE "${packed}" "${moved}")
run("${CMAKE_COMMAND}" --install "${BUILD_DIRECTORY}" --component gpu-bundle --prefix "${packed}")
file(RENAME "${packed}" "${moved}")

foreach(program bin/forebay bin/forebay-gpt tests/gpu-questions)
  if(EXISTS "${moved}/${program}")
    run(ldd "${moved}/${program}")
    if(output MATCHES "not found" OR output MATCHES "${BUILD_DIRECTORY}/lib/")
      message(FATAL_ERROR "${program} does not find its libraries in the bundle:\n${output}")
    endif()
  endif()
endforeach()

run("${moved}/run-gpu-checks" --fake --only questions,preload-check --out "${WORK_DIRECTORY}/moved-results")
file(READ "${WORK_DIRECTORY}/moved-results/gpu-checks.json" json)
string(JSON preload_outcome GET "${json}" parts 0 outcome)
string(JSON outcome GET "${json}" parts 1 outcome)
string(JSON same GET "${json}" parts 1 result aliases shows_the_same_bytes)
if(NOT preload_outcome STREQUAL "passed" OR NOT outcome STREQUAL "passed" OR NOT same)
  message(FATAL_ERROR "the questions were not answered:\n${json}")
endif()

# The exit code shows that a part failed, and the output names it.
execute_process(COMMAND "${moved}/run-gpu-checks" --fake --only questions,nonsense --out "${WORK_DIRECTORY}/moved-results"
  RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE error)
if(NOT result EQUAL 1 OR NOT error MATCHES "no part nonsense")
  message(FATAL_ERROR "a part that is not there ended with ${result}: ${error}")
endif()
file(REMOVE_RECURSE "${moved}")
