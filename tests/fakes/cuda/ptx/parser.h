// Parses PTX. Functions, global variables, textures and debug sections are refused: no kernel of the tree has
// them.
#pragma once

#include <string>
#include <vector>

#include "tests/fakes/cuda/ptx/program.h"

namespace forebay::ptx {

// Errors: throws Fault(kRefused), naming the line, for anything that this interpreter does not execute
// exactly.
Module parse(std::string text);

// The names of the kernels in a text, without parsing the rest.
std::vector<std::string> kernel_names(const std::string& text);

}  // namespace forebay::ptx
