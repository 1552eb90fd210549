// TokenFile: a file of tokens as 16-bit numbers, which is mapped and not read as a whole.
//
// nanoGPT writes nothing but tokens. llm.c writes a header of 1024 bytes before them, which is skipped.
// Source: https://github.com/karpathy/llm.c, dev/data/data_common.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace forebay::gpt {

class TokenFile {
 public:
  // Errors: throws Error: kIoError if the file cannot be mapped, kCorruption for another number of bytes than
  // tokens take, kUnsupported for an llm.c file of another version.
  explicit TokenFile(const std::string& path);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  const std::string& path() const { return path_; }
  // Requires: nobody shortens the file meanwhile.
  std::span<const std::uint16_t> tokens() const { return tokens_; }

 private:
  const std::string path_;
  void* mapping_ = nullptr;
  std::size_t mapped_bytes_ = 0;
  std::span<const std::uint16_t> tokens_;
};

}  // namespace forebay::gpt
