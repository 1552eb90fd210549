# No program or library of ours needs a CUDA library to start: the driver, the kernels' image and NCCL are loaded at run
# time, so that one build serves machines with and without a GPU.

file(GLOB candidates "${BINARY_DIRECTORY}/lib/*.so*" "${BINARY_DIRECTORY}/lib/*/*.so*" "${BINARY_DIRECTORY}/bin/*"
  "${BINARY_DIRECTORY}/bench/*" "${BINARY_DIRECTORY}/tests/*")
set(seen 0)
foreach(candidate IN LISTS candidates)
  if(IS_DIRECTORY "${candidate}" OR IS_SYMLINK "${candidate}")
    continue()
  endif()
  # Stands for a third-party program that uses the runtime API: linked to it on purpose.
  if(candidate MATCHES "/tests/runtime_program_dynamic$")
    continue()
  endif()
  file(READ "${candidate}" magic LIMIT 4 HEX)
  if(NOT magic STREQUAL "7f454c46")
    continue()
  endif()
  execute_process(COMMAND "${READELF}" --dynamic --wide "${candidate}"
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
  if(NOT result EQUAL 0 OR NOT output MATCHES "Dynamic section")
    message(FATAL_ERROR "cannot read what ${candidate} needs (${result}): ${error}")
  endif()
  math(EXPR seen "${seen} + 1")
  # The loader takes an empty entry of the search path for the working directory, where anybody may have put a library.
  if(output MATCHES "path: \\[([^\n]*)\\]\n")
    set(path ":${CMAKE_MATCH_1}:")
    if(path MATCHES "::")
      message(SEND_ERROR "${candidate} searches the working directory for libraries: its path is '${path}'")
    endif()
  endif()
  string(REGEX MATCHALL "Shared library: \\[[^]]+" needed "${output}")
  foreach(entry IN LISTS needed)
    if(entry MATCHES "\\[lib(cuda|cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|nccl|nvrtc|nvidia|nvJitLink|nvToolsExt|nvml)")
      message(SEND_ERROR "${candidate} needs a CUDA library: ${entry}]; load it at run time instead")
    endif()
  endforeach()
endforeach()
# At least the core, the host backend, the library and the command.
if(seen LESS 4)
  message(FATAL_ERROR "only ${seen} programs and libraries below ${BINARY_DIRECTORY}: is it the build directory?")
endif()
