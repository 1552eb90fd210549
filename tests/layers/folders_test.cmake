# Inside a layer, a source includes private headers of its own folder and of the folders in its row, and no others.
# A folder means the files that lie directly in it.
cmake_minimum_required(VERSION 3.25)
set(rows
  "collectives:"
  "collectives/rendezvous: collectives"
  "collectives/process: collectives collectives/rendezvous"
  "collectives/process/gloo_headers/gloo/common:"
  "collectives/nccl: collectives"
  "collectives/local: collectives"
  "collectives/simulated: collectives"
  "collectives/launch:"
)
set(layers collectives)
list(JOIN layers "|" any_layer)

set(folders)
foreach(row IN LISTS rows)
  string(REGEX MATCH "^([^:]*): ?(.*)$" matched "${row}")
  set(folder "${CMAKE_MATCH_1}")
  string(REPLACE " " ";" below "${CMAKE_MATCH_2}")
  list(APPEND folders "${folder}")
  file(GLOB sources "${ROOT}/${folder}/*.h" "${ROOT}/${folder}/*.cc")
  if(NOT sources)
    message(SEND_ERROR "${folder} has no sources: remove its row, or correct its name")
  endif()
  foreach(source IN LISTS sources)
    file(STRINGS "${source}" includes REGEX "^#include \"")
    foreach(include IN LISTS includes)
      string(REGEX REPLACE "^#include \"(.*)/[^/]*\".*$" "\\1" used "${include}")
      if(NOT used STREQUAL folder AND NOT used IN_LIST below AND used MATCHES "^(${any_layer})(/|$)")
        message(SEND_ERROR "${source}: ${include}: ${folder} may use its own folder and \"${below}\"; "
          "move the header down, or change the order in the layer's README and here")
      endif()
    endforeach()
  endforeach()
endforeach()

# Every folder with sources has a row.
foreach(layer IN LISTS layers)
  file(GLOB_RECURSE sources RELATIVE "${ROOT}" "${ROOT}/${layer}/*.h" "${ROOT}/${layer}/*.cc")
  foreach(source IN LISTS sources)
    get_filename_component(folder "${source}" DIRECTORY)
    if(NOT folder IN_LIST folders AND NOT folder MATCHES "/include/forebay$")
      message(SEND_ERROR "${source}: ${folder} has no row in the table of this test")
    endif()
  endforeach()
endforeach()
