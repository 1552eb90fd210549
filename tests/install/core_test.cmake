# The core may run inside another program's allocation call: it needs the C and C++ runtimes and no other library, and
# was compiled without exceptions and without run-time types of its own.

function(inspect)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
  if(NOT result EQUAL 0 OR output STREQUAL "")
    message(FATAL_ERROR "failed (${result}): ${ARGN}\n${error}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

inspect("${READELF}" --dynamic --wide "${CORE}")
string(REGEX MATCHALL "Shared library: \\[[^]]+" needed "${output}")
foreach(entry IN LISTS needed)
  if(NOT entry MATCHES "\\[(libc|libm|libstdc\\+\\+|libgcc_s|libpthread|libdl|librt|ld-linux[^.]*|lib[atu]+[bs]?san)\\.so")
    message(SEND_ERROR "libforebay-core.so needs a library it must not need: ${entry}")
  endif()
endforeach()

inspect("${NM}" --defined-only --demangle "${CORE}")
string(REGEX MATCHALL "typeinfo [a-z ]*for forebay::[^\n]*" types "${output}")
if(types)
  message(SEND_ERROR "libforebay-core.so has run-time types: ${types}")
endif()
# Exception handling would leave a landing pad.
inspect("${READELF}" --sections --wide "${CORE}")
if(output MATCHES "\\.gcc_except_table")
  message(SEND_ERROR "libforebay-core.so has exception tables")
endif()
