#include "trainer/tokenizer_file.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <unordered_map>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "forebay/regular_file.h"
#include "forebay/text.h"
#include "output/json_file.h"

namespace forebay::gpt {
namespace {

using Json = nlohmann::json;

constexpr const char* kEnd = "<|endoftext|>";

// GPT-2 writes each byte as a character: the visible ones of Latin-1 as themselves, the others from 256 on.
std::array<int, 512> bytes_by_character() {
  std::array<int, 512> bytes;
  bytes.fill(-1);
  std::size_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool is_visible = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    bytes[is_visible ? static_cast<std::size_t>(byte) : next++] = byte;
  }
  return bytes;
}

// The bytes that `text` stands for; none if it has other characters.
std::optional<std::string> bytes_of(const std::string& text) {
  static const std::array<int, 512> kBytes = bytes_by_character();
  std::string bytes;
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i++]);
    std::size_t code = first;
    if (first >= 0x80) {  // The characters above have two bytes at most.
      if ((first & 0xE0u) != 0xC0u || i == text.size()) return std::nullopt;
      code = (first & 0x1Fu) << 6 | (static_cast<unsigned char>(text[i++]) & 0x3Fu);
    }
    if (code >= kBytes.size() || kBytes[code] < 0) return std::nullopt;
    bytes += static_cast<char>(kBytes[code]);
  }
  return bytes;
}

// Collects the tables, with errors that name the file.
class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) {}

  void add_vocabulary(const Json& vocabulary) {
    if (!vocabulary.is_object() || vocabulary.empty()) damaged("it has no tokens");
    for (const auto& [text, number] : vocabulary.items()) {
      const Token token = token_of(number, text);
      const std::optional<std::string> bytes = bytes_of(text);
      put(token, bytes ? *bytes : text, text);
      if (text == kEnd) put_whole(token, false);
    }
  }
  void add_merge(const std::string& left, const std::string& right) {
    const auto find = [&](const std::string& text) {
      const auto found = tokens_.find(text);
      if (found == tokens_.end()) {
        damaged("its merge " + std::to_string(tables_.merges.size()) + " needs the token " +
                shown_value(text) + ", which the vocabulary lacks");
      }
      return found->second;
    };
    tables_.merges.push_back({find(left), find(right), find(left + right)});
  }
  void add_whole(const std::string& text, const Json& number, bool is_last) {
    const Token token = token_of(number, text);
    const auto known = tokens_.find(text);
    if (known == tokens_.end()) put(token, text, text);
    if (!text.empty()) put_whole(token, is_last);
  }
  BytePairs finish() {
    try {
      return BytePairs(std::move(tables_));
    } catch (const Error& error) {
      throw Error(error.status().with_context(shown_path(path_)));
    }
  }
  [[noreturn]] void damaged(const std::string& found) const {
    throw Error(StatusCode::kCorruption, shown_path(path_) + " is not a tokenizer of GPT-2: " + found +
                                             "; download or write it again");
  }
  [[noreturn]] void unsupported(const std::string& key, const Json& value) const {
    throw Error(
        StatusCode::kUnsupported,
        shown_path(path_) + ": " + key + " is " +
            shown_value(value.dump(-1, ' ', true, Json::error_handler_t::replace)) +
            ", and forebay-gpt has GPT-2's byte-level BPE only; give the tokenizer of a GPT-2, or files of "
            "tokens with --data");
  }

 private:
  Token token_of(const Json& number, const std::string& text) const {
    if (!number.is_number_unsigned() || number.get<std::uint64_t>() >= kVocabularyMax) {
      throw Error(StatusCode::kUnsupported,
                  shown_path(path_) + ": the token " + shown_value(text) + " has the number " +
                      shown_value(number.dump(-1, ' ', true, Json::error_handler_t::replace)) +
                      "; use one with " + std::to_string(kVocabularyMax) +
                      " tokens at most, numbered from 0: tokens have 16 bits");
    }
    return number.get<Token>();
  }
  void put(Token token, const std::string& bytes, const std::string& text) {
    if (tables_.tokens.size() <= token) tables_.tokens.resize(std::size_t{token} + 1);
    if (!tables_.tokens[token].empty()) damaged("two tokens have the number " + std::to_string(token));
    tables_.tokens[token] = bytes;
    tokens_.emplace(text, token);
  }
  void put_whole(Token token, bool is_last) {
    if (!std::exchange(is_whole_[token], true))
      (is_last ? tables_.whole_after : tables_.whole).push_back(token);
  }

  std::string path_;
  BytePairs::Tables tables_;
  std::vector<char> is_whole_ =
      std::vector<char>(kVocabularyMax);           // By token: whether it is a whole one of tables_.
  std::unordered_map<std::string, Token> tokens_;  // By the text in the file.
};

// Refuses a setting other than these.
void expect(const Reader& reader, const Json& object, const char* key, const std::vector<Json>& known) {
  const Json value = object.value(key, known.front());
  if (std::find(known.begin(), known.end(), value) == known.end()) reader.unsupported(key, value);
}

BytePairs read_whole(const std::string& path, const Json& root) {
  Reader reader(path);
  const Json& model = root.at("model");
  expect(reader, model, "type", {"BPE"});
  expect(reader, model, "dropout", {nullptr, 0.0});
  expect(reader, model, "continuing_subword_prefix", {nullptr, ""});
  expect(reader, model, "end_of_word_suffix", {nullptr, ""});
  expect(reader, model, "byte_fallback", {false});
  expect(reader, model, "ignore_merges", {false});
  expect(reader, root, "normalizer", {nullptr});
  const Json pieces = root.value("pre_tokenizer", Json());
  if (!pieces.is_object() || pieces.value("type", Json()) != "ByteLevel")
    reader.unsupported("pre_tokenizer", pieces);
  expect(reader, pieces, "add_prefix_space", {false});
  expect(reader, pieces, "use_regex", {true});

  reader.add_vocabulary(model.value("vocab", Json()));
  for (const Json& merge : model.value("merges", Json::array())) {
    if (merge.is_string()) {  // "left right"; newer files have ["left", "right"].
      const auto text = merge.get<std::string>();
      const std::size_t space = text.find(' ');
      if (space == std::string::npos) reader.damaged("a merge has no space between two tokens");
      reader.add_merge(text.substr(0, space), text.substr(space + 1));
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      reader.add_merge(merge[0].get<std::string>(), merge[1].get<std::string>());
    } else {
      reader.damaged("a merge is not a pair of tokens");
    }
  }
  for (const Json& added : root.value("added_tokens", Json::array())) {
    if (!added.is_object() || !added.value("content", Json()).is_string())
      reader.damaged("an added token has no text");
    for (const char* key : {"lstrip", "rstrip", "single_word"}) expect(reader, added, key, {false});
    // Tokens that a normalizer may change are taken last, although there is none here.
    const bool is_special = added.value("special", Json()) == true;
    const bool is_last = added.value("normalized", Json(!is_special)) == true;
    reader.add_whole(added["content"].get<std::string>(), added.value("id", Json()), is_last);
  }
  return reader.finish();
}

BytePairs read_pair(const std::string& path, const Json& vocabulary) {
  Reader reader(path);
  constexpr std::string_view kName = "vocab.json";
  if (!path.ends_with(kName)) {
    reader.damaged(
        "it has no \"model\" as a tokenizer.json has, and its name does not end in vocab.json, beside which "
        "a "
        "merges.txt would lie");
  }
  reader.add_vocabulary(vocabulary);
  const std::string merges = path.substr(0, path.size() - kName.size()) + "merges.txt";
  const Result<std::string> read = internal::read_regular_file(merges, kJsonBytesMax);
  if (!read.ok()) {
    throw Error(StatusCode::kIoError, "cannot read " + shown_path(merges) + ": " + read.status().message() +
                                          "; it belongs to " + shown_path(path));
  }
  std::istringstream stream(read.value());
  bool is_first = true;
  for (std::string line; std::getline(stream, line); is_first = false) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty() || (is_first && line.starts_with("#version"))) continue;
    const std::size_t space = line.find(' ');
    if (space == std::string::npos) reader.damaged("a line of its merges.txt is not a pair of tokens");
    reader.add_merge(line.substr(0, space), line.substr(space + 1));
  }
  return reader.finish();
}

}  // namespace

BytePairs read_tokenizer(const std::string& path) {
  std::error_code error;
  std::string file = path;
  if (std::filesystem::is_directory(path, error)) {
    file = path + "/tokenizer.json";
    if (!std::filesystem::exists(file, error)) file = path + "/vocab.json";
  }
  const Json root = read_json(file);
  return root.contains("model") && root["model"].is_object() ? read_whole(file, root) : read_pair(file, root);
}

}  // namespace forebay::gpt
