#include "model/text.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "forebay/error.h"
#include "model/random.h"

namespace forebay::gpt {

Text Text::read(const std::vector<std::string>& files) {
  std::vector<std::uint8_t> bytes;
  for (const std::string& file : files) {
    const auto refuse = [&](const std::string& found) {
      throw Error(StatusCode::kIoError,
                  "cannot read the text file " + file + ": " + found + "; give existing files with --text");
    };
    std::error_code error;
    // Others may have no end, or block.
    if (std::filesystem::is_directory(file, error)) refuse("it is a directory");
    if (std::filesystem::exists(file, error) && !std::filesystem::is_regular_file(file, error))
      refuse("it is not a regular file");
    std::ifstream stream(file, std::ios::binary);
    if (!stream) refuse(std::strerror(errno));
    bytes.insert(bytes.end(), std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
    if (stream.bad()) refuse("reading failed");
  }
  return Text(std::move(bytes));
}

Text::Text(std::vector<std::uint8_t> bytes) : bytes_(std::move(bytes)), hash_(0xCBF29CE484222325u) {
  for (const std::uint8_t byte : bytes_) hash_ = (hash_ ^ byte) * 0x100000001B3u;
}

std::vector<std::string> default_text_files() {
  const std::string directory = "/usr/share/common-licenses/";
  std::vector<std::string> files;
  for (const char* name :
       {"Apache-2.0", "GPL-1", "GPL-2", "GPL-3", "LGPL-2", "LGPL-2.1", "LGPL-3", "MPL-1.1", "MPL-2.0"}) {
    std::error_code error;
    if (std::filesystem::is_regular_file(directory + name, error)) files.push_back(directory + name);
  }
  if (files.empty()) {
    throw Error(StatusCode::kIoError,
                "no default text: " + directory +
                    " has none of the licences that Debian puts there; name files with --text");
  }
  return files;
}

void copy_sample(const Text& text, std::uint64_t seed, std::uint64_t index, std::span<std::uint8_t> tokens,
                 std::span<std::uint8_t> targets) {
  const std::span<const std::uint8_t> bytes = text.bytes();
  const std::uint64_t start = draw(seed, kTextStream, index) % (bytes.size() - tokens.size());
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(start), tokens.size(), tokens.begin());
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(start) + 1, targets.size(), targets.begin());
}

}  // namespace forebay::gpt
