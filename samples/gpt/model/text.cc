#include "model/text.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "forebay/error.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "model/random.h"
#include "model/shape.h"

namespace forebay::gpt {
namespace {

constexpr std::uint64_t kHashBegin = 0xCBF29CE484222325u;

std::uint64_t mixed(std::uint64_t hash, std::uint64_t value) {
  return (hash ^ value) * 0x100000001B3u;
}

// Errors: throws kOutOfMemory for more than half of the host's memory. Each rank holds the text.
void check_bytes(const std::vector<std::string>& files) {
  const auto host = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                    static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::uint64_t bytes = 0;
  for (const std::string& file : files) {
    std::error_code error;
    const std::uintmax_t of_file = std::filesystem::file_size(file, error);
    if (!error) bytes += of_file;
  }
  if (bytes <= host / 2) return;
  throw Error(StatusCode::kOutOfMemory, "the text of --text has " + format_bytes(bytes) +
                                            ", and each rank holds it in the host's memory of " +
                                            format_bytes(host) +
                                            "; give tokens with --data, which reads its file as it goes");
}

}  // namespace

Text Text::read(const std::vector<std::string>& files, std::size_t vocabulary) {
  check_bytes(files);
  std::vector<std::uint8_t> bytes;
  for (const std::string& file : files) {
    const auto refuse = [&](const std::string& found) {
      throw Error(StatusCode::kIoError, "cannot read the text file " + shown_path(file) + ": " + found +
                                            "; give existing files with --text");
    };
    std::error_code error;
    // Others may have no end, or block.
    if (std::filesystem::is_directory(file, error)) refuse("it is a directory");
    if (std::filesystem::exists(file, error) && !std::filesystem::is_regular_file(file, error))
      refuse("it is not a regular file");
    std::ifstream stream(file, std::ios::binary);
    if (!stream) refuse(std::strerror(errno));
    char part[1 << 16];
    while (stream.read(part, sizeof(part)), stream.gcount() > 0)
      bytes.insert(bytes.end(), part, part + stream.gcount());
    if (stream.bad()) refuse(std::strerror(errno));
  }
  return Text(std::move(bytes), vocabulary);
}

Text::Text(std::vector<std::uint8_t> bytes, std::size_t vocabulary)
    : vocabulary_(vocabulary), bytes_(std::move(bytes)), hash_(kHashBegin) {
  for (const std::uint8_t byte : bytes_) hash_ = mixed(hash_, byte);
}

Text Text::open(const std::string& file, std::size_t vocabulary) {
  Text text({}, vocabulary);
  text.file_ = std::make_shared<const TokenFile>(file);
  const std::uint64_t size = text.size();
  text.hash_ = mixed(kHashBegin, size);
  const std::uint64_t hashed = std::min(size, kHashedTokens);
  for (std::uint64_t i = 0; i < hashed; ++i) {
    Token token = 0;
    text.file_->read(i * (size / hashed), {&token, 1});
    text.hash_ = mixed(text.hash_, token);
  }
  return text;
}

Text Text::encoded(const BytePairs& tokenizer) const {
  Text text({}, vocabulary_);
  text.is_encoded_ = true;
  text.tokens_ = tokenizer.encode({reinterpret_cast<const char*>(bytes_.data()), bytes_.size()});
  for (const Token token : text.tokens_) text.hash_ = mixed(text.hash_, token);
  return text;
}

void Text::copy(std::uint64_t first, std::span<Token> target) const {
  if (is_bytes()) {
    std::copy_n(bytes_.begin() + static_cast<std::ptrdiff_t>(first), target.size(), target.begin());
  } else if (file_ != nullptr) {
    file_->read(first, target);
  } else {
    std::copy_n(tokens_.begin() + static_cast<std::ptrdiff_t>(first), target.size(), target.begin());
  }
  const auto other =
      std::find_if(target.begin(), target.end(), [&](Token token) { return token >= vocabulary_; });
  if (other != target.end()) refuse(first + static_cast<std::uint64_t>(other - target.begin()), *other);
}

void Text::refuse(std::uint64_t place, Token token) const {
  const std::string name = (is_bytes() ? "byte " : "token ") + std::to_string(place) + " of " +
                           (is_token_file() ? shown_path(file_->path()) : "the text");
  throw Error(StatusCode::kInvalidArgument,
              name + " is " + std::to_string(token) + ", and this model has a vocabulary of " +
                  std::to_string(vocabulary_) + "; give a text of its tokens, or a larger --vocabulary");
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

void copy_sample(const Text& text, std::uint64_t seed, std::uint64_t index, std::span<Token> tokens,
                 std::span<Token> targets) {
  const std::uint64_t start = draw(seed, kTextStream, index) % (text.size() - tokens.size());
  text.copy(start, tokens);
  text.copy(start + 1, targets);
}

}  // namespace forebay::gpt
