// Messages of the C++ libraries in the words of the C interface.
#pragma once

#include <string>
#include <string_view>

namespace forebay::api {

// Names C functions for C++ ones, options by their names, and acquisitions for leases. `function` is the C
// function that failed.
std::string in_words_of_c(std::string_view message, std::string_view function);

}  // namespace forebay::api
