# Manual pages of the C functions, section 3, from the comments of forebay.h:
#   cmake -D HEADER=forebay.h -D VERSION=0.1.0 -D OUTPUT=share/man/man3 -P manual.cmake
# A comment above a declaration is its page; the comment of its section, "/* == Name == ... */", ends every page of it.
cmake_minimum_required(VERSION 3.25)
string(ASCII 1 semicolon)
string(ASCII 2 open)
string(ASCII 3 close)
file(READ "${HEADER}" text)
# Lists end at semicolons and count brackets.
string(REPLACE ";" "${semicolon}" text "${text}")
string(REPLACE "[" "${open}" text "${text}")
string(REPLACE "]" "${close}" text "${text}")

# Text of a comment without its signs, as roff: labels begin a paragraph.
function(to_roff comment target)
  string(REGEX REPLACE "^/\\* ?| ?\\*/$" "" body "${comment}")
  string(REGEX REPLACE "\n \\* ?" "\n" body "${body}")
  string(REGEX REPLACE "^== [^\n]* ==\n" "" body "${body}")
  string(REPLACE "\\" "\\e" body "${body}")
  string(REPLACE "-" "\\-" body "${body}")
  string(REGEX REPLACE "(^|\n)(Errors|Threads|Since|Ownership|Order|Options): " "\\1.PP\n.B \\2:\n" body "${body}")
  string(REGEX REPLACE "\n([.'][^PB])" "\n\\\\&\\1" body "${body}")
  string(STRIP "${body}" body)
  set(${target} "${body}" PARENT_SCOPE)
endfunction()

file(MAKE_DIRECTORY "${OUTPUT}")
string(REGEX MATCHALL "/\\*[^*]*\\*+([^/*][^*]*\\*+)*/\n+FOREBAY_API [^${semicolon}]*|/\\* == [^\n]* ==\n[^*]*\\*+([^/*][^*]*\\*+)*/" parts "${text}")
set(count 0)
foreach(part IN LISTS parts)
  if(part MATCHES "^/\\* == ([^\n]*) ==\n" AND NOT part MATCHES "\nFOREBAY_API ")
    to_roff("${part}" section)
    continue()
  endif()
  string(REGEX MATCH "\nFOREBAY_API (.*)$" matched "${part}")
  set(declaration "${CMAKE_MATCH_1}")
  string(REGEX MATCH "forebay_[a-z0-9_]+" ignored "${part}")
  string(REGEX REPLACE "^.*[ *](forebay_[a-z0-9_]+)\\(.*$" "\\1" name "${declaration}")
  string(REGEX MATCH "^/\\*[^*]*\\*+([^/*][^*]*\\*+)*/" comment "${part}")
  to_roff("${comment}" body)
  string(REGEX MATCH "^[^.:]*" line "${body}")
  string(REPLACE "\n" " " line "${line}")
  string(REPLACE "-" "\\-" shown "${declaration}")
  set(page ".TH ${name} 3 \"\" \"forebay ${VERSION}\" \"The C interface of forebay\"
.SH NAME
${name} \\- ${line}
.SH SYNOPSIS
.nf
#include <forebay/forebay.h>

${shown};

Link with \\-lforebay\\-c.
.fi
.SH DESCRIPTION
${body}
.SH NOTES
${section}
.PP
A function returns 0 or a code; forebay_last_error() is the text. See the head of forebay/forebay.h for the rules of
handles, ownership, threads and streams.
")
  string(REPLACE "${semicolon}" ";" page "${page}")
  string(REPLACE "${open}" "[" page "${page}")
  string(REPLACE "${close}" "]" page "${page}")
  file(WRITE "${OUTPUT}/${name}.3" "${page}")
  math(EXPR count "${count} + 1")
endforeach()
message(STATUS "${count} manual pages in ${OUTPUT}")
if(count LESS 100)
  message(FATAL_ERROR "only ${count} functions were found in ${HEADER}")
endif()
