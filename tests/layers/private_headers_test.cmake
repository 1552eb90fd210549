# A source of a layer includes private headers of that layer alone, and spells them from the source root.
cmake_minimum_required(VERSION 3.25)
set(layers runtime/base runtime/command_line runtime/device runtime/topology runtime/engine runtime/api runtime/command kernels allocator collectives offload)
# Exceptions: `forebay run` reads the files that a process under the preload writes and names it a file of placements,
# `forebay replay` counts the calls of a Backend and the mappings of an arena, `forebay devices` and `forebay plan` read
# the system's files, and `forebay simulate` gives the engine virtual time. These headers are no user's business, so they
# are private ones of a layer below.
set(exceptions_runtime/command "allocator/arena/arena_mappings.h" "allocator/preload/events.h"
  "allocator/preload/learned_file.h" "allocator/preload/record.h" "runtime/device/forwarding_backend.h" "runtime/engine/engine_hooks.h" "runtime/topology/system_files.h")
set(seen 0)
foreach(layer IN LISTS layers)
  file(GLOB_RECURSE sources "${ROOT}/${layer}/*.h" "${ROOT}/${layer}/*.cc")
  foreach(source IN LISTS sources)
    math(EXPR seen "${seen} + 1")
    file(STRINGS "${source}" includes REGEX "^#include \"")
    foreach(include IN LISTS includes)
      string(REGEX REPLACE "^#include \"(.*)\".*" "\\1" header "${include}")
      if(header IN_LIST exceptions_${layer})
        continue()
      endif()
      if(NOT include MATCHES "^#include \"(${layer}|forebay|hwy)/" AND NOT include MATCHES "\\.inc\"")
        message(SEND_ERROR "${source}: ${include} is neither a public header nor a private one of ${layer}, spelled from the source root")
      endif()
    endforeach()
  endforeach()
endforeach()
if(seen LESS 20)
  message(FATAL_ERROR "only ${seen} sources found under ${ROOT}: is it the source root?")
endif()
