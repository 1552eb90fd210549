// TokenFile: a file of tokens as 16-bit numbers, read in parts. It is not mapped: a mapped file that somebody
// shortens ends the process by a signal.
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
  // Errors: throws Error: kIoError if the file cannot be read, kCorruption for another number of bytes than
  // tokens take, kUnsupported for an llm.c file of another version.
  explicit TokenFile(const std::string& path);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  const std::string& path() const { return path_; }
  // Tokens, as the file was when it was opened.
  std::uint64_t size() const { return size_; }
  // Copies the tokens from `first` on. Requires: there are as many.
  // Errors: throws Error(kIoError), also where the file has become shorter.
  void read(std::uint64_t first, std::span<std::uint16_t> target) const;

 private:
  void read_header();
  [[noreturn]] void cannot_read(const std::string& reason) const;
  void read_bytes(std::uint64_t at, void* target, std::size_t bytes) const;

  const std::string path_;
  int file_ = -1;
  std::uint64_t begin_ = 0;  // Bytes before the first token.
  std::uint64_t size_ = 0;
};

}  // namespace forebay::gpt
