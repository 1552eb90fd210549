# Installs into a fresh prefix and builds SAMPLES against it, each alone, as a user of an installed forebay would. Then
# runs PROGRAM, the last of them, with ARGUMENTS.

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed (${result}): ${ARGN}\n${output}")
  endif()
endfunction()

set(prefix "${WORK_DIRECTORY}/prefix")
file(REMOVE_RECURSE "${WORK_DIRECTORY}")
run("${CMAKE_COMMAND}" --install "${BUILD_DIRECTORY}" --prefix "${prefix}")
foreach(sample IN LISTS SAMPLES)
  set(build "${WORK_DIRECTORY}/${sample}")
  run("${CMAKE_COMMAND}" -S "${SAMPLES_DIRECTORY}/${sample}" -B "${build}" -G "${GENERATOR}"
      "-DCMAKE_C_COMPILER=${C_COMPILER}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" "-DCMAKE_PREFIX_PATH=${prefix}")
  run("${CMAKE_COMMAND}" --build "${build}" --parallel 2)
endforeach()
run("${build}/${PROGRAM}" ${ARGUMENTS})
