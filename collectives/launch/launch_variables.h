// read_launch_environment() over given variables instead of those of the process.
#pragma once

#include <map>
#include <string>

#include "forebay/bootstrap.h"

namespace forebay::internal {

Result<LaunchEnvironment> read_launch_variables(const std::map<std::string, std::string>& variables);

}  // namespace forebay::internal
