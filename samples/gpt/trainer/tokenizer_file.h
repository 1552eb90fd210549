// Reads a tokenizer of GPT-2's kind from the files that Hugging Face's libraries write.
#pragma once

#include <string>

#include "model/byte_pairs.h"

namespace forebay::gpt {

// `path` names a tokenizer.json; or a vocab.json with its merges.txt, whose name has "merges.txt" in place of
// "vocab.json"; or a directory that has either. <|endoftext|> and the added tokens of tokenizer.json are
// taken from a text as a whole. Errors: throws Error: kIoError, kCorruption, kUnsupported naming a setting
// that GPT-2's tokenizer lacks.
BytePairs read_tokenizer(const std::string& path);

}  // namespace forebay::gpt
