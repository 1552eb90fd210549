// The training text, as bytes, as tokens or as a file of tokens, and the samples that a step reads from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/byte_pairs.h"
#include "model/shape.h"
#include "model/token_file.h"
#include "model/tokens.h"

namespace forebay::gpt {

class Text {
 public:
  // Concatenates `files`, in the order given.
  // Errors: throws Error naming the file (kIoError); kOutOfMemory for more than half of the host's memory.
  static Text read(const std::vector<std::string>& files, std::size_t vocabulary = kVocabulary);
  explicit Text(std::vector<std::uint8_t> bytes, std::size_t vocabulary = kVocabulary);
  // Errors: those of TokenFile.
  static Text open(const std::string& file, std::size_t vocabulary = kVocabulary);
  // This text of bytes as tokens of `tokenizer`.
  Text encoded(const BytePairs& tokenizer) const;

  // Tokens; without a tokenizer a token of a text file is a byte.
  std::uint64_t size() const {
    return is_bytes() ? bytes_.size() : file_ != nullptr ? file_->size() : tokens_.size();
  }
  // Copies the tokens from `first` on. Requires: there are as many. Errors: throws Error(kInvalidArgument)
  // naming a token that is not in the vocabulary, kIoError as TokenFile::read.
  void copy(std::uint64_t first, std::span<Token> target) const;
  // Empty unless is_bytes().
  std::span<const std::uint8_t> bytes() const { return bytes_; }
  bool is_bytes() const { return file_ == nullptr && !is_encoded_; }
  bool is_token_file() const { return file_ != nullptr; }
  // FNV-1a over the bytes, by which ranks notice that their files differ. A file of tokens is hashed over its
  // length and kHashedTokens of them, which lie evenly in it.
  static constexpr std::uint64_t kHashedTokens = 4096;
  std::uint64_t hash() const { return hash_; }

 private:
  [[noreturn]] void refuse(std::uint64_t place, Token token) const;

  std::size_t vocabulary_ = kVocabulary;
  std::vector<std::uint8_t> bytes_;
  bool is_encoded_ = false;  // tokens_ has the text.
  std::vector<Token> tokens_;
  std::shared_ptr<const TokenFile> file_;  // Shared by copies. Null: the text is in memory.
  std::uint64_t hash_ = 0;
};

// The licences of Debian and Ubuntu that this machine has, in a fixed order.
// Errors: throws Error(kIoError) when there is none.
std::vector<std::string> default_text_files();

// Copies sample `index` of `sequence` tokens: tokens = text[start ...], targets one byte further, with
// start = draw(seed, kTextStream, index) mod (bytes - sequence).
// Requires: the text has more than `sequence` tokens.
void copy_sample(const Text& text, std::uint64_t seed, std::uint64_t index, std::span<Token> tokens,
                 std::span<Token> targets);

// The position of a rank's batch in the order of samples. Samples go to ranks in rank order, so N ranks of
// batch B together read the samples that one rank of batch N * B reads.
struct BatchPlace {
  std::uint64_t first_sample = 0;  // Samples that earlier steps read, over all ranks.
  std::uint64_t micro_step = 0;
  std::uint64_t rank = 0;
  std::uint64_t rank_count = 1;
  std::uint64_t batch = 1;  // Per rank.

  std::uint64_t sample() const { return first_sample + (micro_step * rank_count + rank) * batch; }
};

}  // namespace forebay::gpt
