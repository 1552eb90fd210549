// The C++ standard that every public header needs. Types and names are the same from C++17 on, so a program
// may be compiled with another standard than the libraries, which are C++20.
#pragma once

#if __cplusplus < 201703L
#error \
    "The headers of forebay need C++17 or newer: compile with -std=c++17 (CMake: target_compile_features(... cxx_std_17))."
#endif
