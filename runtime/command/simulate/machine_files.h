// The descriptions that the program brings with it, as text.
#pragma once

#include <span>
#include <string_view>

namespace forebay {

struct MachineFile {
  std::string_view kind;  // "device" or "cluster"
  std::string_view name;
  std::string_view text;
};

std::span<const MachineFile> machine_files();

}  // namespace forebay
