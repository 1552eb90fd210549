// GPT-2's tokenizer: the pieces of a text, merges, the files that it is read from, and training on its
// tokens. tests/python/gpt_test.py compares it with the library tokenizers.

#include "model/byte_pairs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "model/pieces.h"
#include "model/random.h"
#include "model/text.h"
#include "tests/samples/small_training.h"
#include "tests/support/temporary_directory.h"
#include "trainer/options.h"
#include "trainer/tokenizer_file.h"
#include "trainer/training.h"

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

using Pieces = std::vector<std::string>;

Pieces pieces_of(std::string_view text) {
  Pieces pieces;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = piece_end(text, begin);
    if (end <= begin || end > text.size()) {
      ADD_FAILURE() << "a piece ends at " << end << " and begins at " << begin;
      break;
    }
    pieces.emplace_back(text.substr(begin, end - begin));
    begin = end;
  }
  return pieces;
}

TEST(BytePairPieces, AreThoseOfThePattern) {
  EXPECT_EQ(pieces_of("Hello world"), (Pieces{"Hello", " world"}));
  EXPECT_EQ(pieces_of("don't we'll DON'T"), (Pieces{"don", "'t", " we", "'ll", " DON", "'", "T"}));
  EXPECT_EQ(pieces_of("it 's 've'd'm're"), (Pieces{"it", " '", "s", " '", "ve", "'d", "'m", "'re"}));
  EXPECT_EQ(pieces_of("x1y22 33,44!?"), (Pieces{"x", "1", "y", "22", " 33", ",", "44", "!?"}));
  EXPECT_EQ(pieces_of("a  b   c"), (Pieces{"a", " ", " b", "  ", " c"}));
  EXPECT_EQ(pieces_of("a\n\nb\n c \n"), (Pieces{"a", "\n", "\n", "b", "\n", " c", " \n"}));
  EXPECT_EQ(pieces_of("a\tb"), (Pieces{"a", "\t", "b"}));
  EXPECT_EQ(pieces_of("   "), (Pieces{"   "}));
  EXPECT_EQ(pieces_of("a "), (Pieces{"a", " "}));
  EXPECT_EQ(pieces_of("  ...x"), (Pieces{" ", " ...", "x"}));
}

TEST(BytePairPieces, KnowTheLettersNumbersAndSpacesOfUnicode) {
  EXPECT_EQ(pieces_of("na\xC3\xAFve stra\xC3\x9F"
                      "e"),
            (Pieces{"na\xC3\xAFve",
                    " stra\xC3\x9F"
                    "e"}));
  EXPECT_EQ(pieces_of("\xE6\x97\xA5\xE6\x9C\xAC 1"), (Pieces{"\xE6\x97\xA5\xE6\x9C\xAC", " 1"}));
  EXPECT_EQ(pieces_of("a\xC2\xBD\xC2\xB2"), (Pieces{"a", "\xC2\xBD\xC2\xB2"}));  // 1/2, squared.
  EXPECT_EQ(pieces_of("a\xC2\xA0\xE3\x80\x80"
                      "b"),
            (Pieces{"a", "\xC2\xA0", "\xE3\x80\x80", "b"}));
  EXPECT_EQ(pieces_of("a \xF0\x9F\x99\x82"
                      "b"),
            (Pieces{"a", " \xF0\x9F\x99\x82", "b"}));  // An emoji.
  EXPECT_EQ(pieces_of("e\xCC\x81"
                      "a"),
            (Pieces{"e", "\xCC\x81", "a"}));  // A mark is no letter.
  EXPECT_EQ(pieces_of("\x1C"
                      "a"),
            (Pieces{"\x1C", "a"}));
}

TEST(BytePairPieces, TakeBytesThatAreNotUtf8ForOtherCharacters) {
  EXPECT_EQ(pieces_of("a\xFF\x80"
                      "b"),
            (Pieces{"a", "\xFF\x80", "b"}));
  EXPECT_EQ(pieces_of("a\xC3"), (Pieces{"a", "\xC3"}));                  // Cut off.
  EXPECT_EQ(pieces_of("\xC0\xA0z"), (Pieces{"\xC0\xA0", "z"}));          // Overlong.
  EXPECT_EQ(pieces_of("\xED\xA0\x80z"), (Pieces{"\xED\xA0\x80", "z"}));  // Half a surrogate pair.
}

// Every byte, and merges of the tokens of these texts.
BytePairs::Tables tables_of(const std::vector<std::pair<std::string, std::string>>& merges) {
  BytePairs::Tables tables;
  for (int byte = 0; byte < 256; ++byte) tables.tokens.emplace_back(1, static_cast<char>(byte));
  const auto find = [&](const std::string& text) {
    const auto found = std::find(tables.tokens.begin(), tables.tokens.end(), text);
    return static_cast<Token>(found - tables.tokens.begin());
  };
  for (const auto& [left, right] : merges) {
    const Token result = find(left + right);
    if (result == tables.tokens.size()) tables.tokens.push_back(left + right);
    tables.merges.push_back({find(left), find(right), result});
  }
  return tables;
}

std::vector<std::string> texts_of(const BytePairs& pairs, std::string_view text) {
  std::vector<std::string> texts;
  for (const Token token : pairs.encode(text)) texts.emplace_back(pairs.bytes_of(token));
  return texts;
}

TEST(BytePairs, MergesThePairOfTheLowestRankFirst) {
  const BytePairs pairs(tables_of({{"l", "o"}, {"lo", "w"}, {"e", "r"}, {" ", "low"}, {"w", "e"}}));

  EXPECT_EQ(texts_of(pairs, "low lower"), (Pieces{"low", " low", "er"}));
  EXPECT_EQ(texts_of(pairs, "wer"), (Pieces{"w", "er"}));  // "er" comes before "we".
  EXPECT_EQ(texts_of(pairs, "we"), (Pieces{"we"}));
  EXPECT_EQ(texts_of(pairs, "l ow"), (Pieces{"l", " ", "o", "w"}));  // Pieces are not merged.
  EXPECT_EQ(texts_of(pairs, ""), Pieces());
}

TEST(BytePairs, MergesOverlappingPairsFromTheLeft) {
  const BytePairs pairs(tables_of({{"a", "a"}, {"aa", "aa"}, {"aa", "a"}}));
  EXPECT_EQ(texts_of(pairs, "aaa"), (Pieces{"aaa"}));
  EXPECT_EQ(texts_of(pairs, "aaaaa"), (Pieces{"aaaa", "a"}));
  EXPECT_EQ(pairs.encode(std::string(100'000, 'a')).size(), 25'000u);  // In reasonable time.
}

TEST(BytePairs, TakesWholeTokensOutOfTheText) {
  BytePairs::Tables tables = tables_of({{"x", "y"}});
  for (const char* text : {"<|end|>", "<|end|>more"}) {
    tables.whole.push_back(static_cast<Token>(tables.tokens.size()));
    tables.tokens.emplace_back(text);
  }
  const BytePairs pairs(std::move(tables));
  EXPECT_EQ(texts_of(pairs, "xy<|end|>xy<|end|><|end|>moreyx<|en"),
            (Pieces{"xy", "<|end|>", "xy", "<|end|>", "<|end|>more", "y", "x", "<", "|", "e", "n"}));
}

// The definition: merge the first of the pairs with the lowest rank until there is none.
std::vector<std::string> merged_plainly(const std::string& piece,
                                        const std::vector<std::pair<std::string, std::string>>& merges) {
  std::vector<std::string> symbols;
  for (const char byte : piece) symbols.emplace_back(1, byte);
  while (true) {
    std::size_t best = merges.size(), place = 0;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = std::find(merges.begin(), merges.end(), std::pair(symbols[i], symbols[i + 1]));
      const auto rank = static_cast<std::size_t>(found - merges.begin());
      if (rank < best) {
        best = rank;
        place = i;
      }
    }
    if (best == merges.size()) return symbols;
    symbols[place] += symbols[place + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(place) + 1);
  }
}

TEST(BytePairs, AgreesWithTheDefinitionOnRandomTablesAndTexts) {
  const char* text_of_seed = std::getenv("FOREBAY_SEED");
  const std::uint64_t seed = text_of_seed != nullptr ? std::strtoull(text_of_seed, nullptr, 10) : 20261124;
  std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(seed));
  for (std::uint64_t round = 0; round < 40; ++round) {
    std::uint64_t drawn = 0;
    const auto next = [&](std::uint64_t below) { return draw(seed, round, drawn++) % below; };
    std::vector<std::string> known = {"a", "b", "c"};
    std::vector<std::pair<std::string, std::string>> merges;
    for (int i = 0; i < 12; ++i) {
      std::pair<std::string, std::string> merge(known[next(known.size())], known[next(known.size())]);
      const std::string joined = merge.first + merge.second;
      if (std::find(known.begin(), known.end(), joined) != known.end()) continue;
      known.push_back(joined);
      merges.push_back(std::move(merge));
    }
    const BytePairs pairs(tables_of(merges));
    for (int i = 0; i < 50; ++i) {
      std::string piece;
      for (std::uint64_t length = 1 + next(20); length > 0; --length)
        piece += static_cast<char>('a' + next(3));
      ASSERT_EQ(texts_of(pairs, piece), merged_plainly(piece, merges)) << piece << ", round " << round;
    }
    std::string bytes;
    for (int i = 0; i < 300; ++i) bytes += static_cast<char>(next(256));
    std::string again;
    for (const std::string& text : texts_of(pairs, bytes)) again += text;
    ASSERT_EQ(again, bytes) << "round " << round;
  }
}

TEST(BytePairs, WithoutATokenForEachByteAreRefused) {
  BytePairs::Tables tables = tables_of({});
  tables.tokens[65].clear();
  try {
    const BytePairs pairs(std::move(tables));
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kCorruption);
    EXPECT_NE(std::string(error.what()).find("the byte 65 has no token"), std::string::npos) << error.what();
  }
}

// --- files ---

// The character of GPT-2 for a byte, in UTF-8.
std::string character_of(int byte) {
  int code = byte, next = 256;
  for (int one = 0; one <= byte; ++one) {
    const bool is_visible = (one >= 33 && one <= 126) || (one >= 161 && one <= 172) || one >= 174;
    if (!is_visible) code = one == byte ? next : code, ++next;
  }
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

class TokenizerFile : public ::testing::Test {
 protected:
  TokenizerFile() : directory_(forebay::testing::make_temporary_directory("tokenizer")) {
    for (int byte = 0; byte < 256; ++byte) vocabulary_[character_of(byte)] = byte;
    const std::string space = character_of(' ');
    for (const std::string& text : {std::string("th"), std::string("the"), space + "the"})
      vocabulary_[text] = vocabulary_.size();
    for (const auto& [left, right] :
         std::vector<std::pair<std::string, std::string>>{{"t", "h"}, {"th", "e"}, {space, "the"}})
      merges_.push_back(nlohmann::json::array({left, right}));
  }
  ~TokenizerFile() override { fs::remove_all(directory_); }

  std::string path(const std::string& name) const { return (directory_ / name).string(); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }
  void write_pair(const std::string& prefix = "") const {
    write(prefix + "vocab.json", vocabulary_.dump());
    std::string lines = "#version: 0.2\n";
    for (const auto& merge : merges_)
      lines += merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\n";
    write(prefix + "merges.txt", lines);
  }
  nlohmann::json whole() const {
    return {{"version", "1.0"},
            {"added_tokens", nlohmann::json::array()},
            {"normalizer", nullptr},
            {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
            {"model", {{"type", "BPE"}, {"dropout", nullptr}, {"vocab", vocabulary_}, {"merges", merges_}}}};
  }
  void refused(const std::string& name, StatusCode code, const std::string& part) const {
    try {
      const BytePairs pairs = read_tokenizer(path(name));
      ADD_FAILURE() << name << " was read";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }

  fs::path directory_;
  nlohmann::json vocabulary_ = nlohmann::json::object();
  nlohmann::json merges_ = nlohmann::json::array();
};

TEST_F(TokenizerFile, AllFormsGiveTheSameTokens) {
  write_pair();
  write_pair("gpt2-");
  write("tokenizer.json", whole().dump());
  nlohmann::json old = whole();  // Merges as one text, as older versions write them.
  for (auto& merge : old["model"]["merges"])
    merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  write("old.json", old.dump());

  const std::string text = "the then \xC3\xA9\n\x01\xFF the";
  const BytePairs pair = read_tokenizer(path("vocab.json"));
  EXPECT_EQ(pair.vocabulary(), 259u);
  std::vector<std::string> texts;
  for (const Token token : pair.encode(text)) texts.emplace_back(pair.bytes_of(token));
  EXPECT_EQ(texts, (Pieces{"the", " the", "n", " ", "\xC3", "\xA9", "\n", "\x01", "\xFF", " the"}));
  for (const char* name : {"gpt2-vocab.json", "tokenizer.json", "old.json", "."}) {
    const BytePairs other = read_tokenizer(path(name));
    EXPECT_EQ(other.encode(text), pair.encode(text)) << name;
    EXPECT_EQ(other.hash(), pair.hash()) << name;
  }
}

TEST_F(TokenizerFile, AddedTokensAreTakenAsAWhole) {
  nlohmann::json root = whole();
  root["added_tokens"].push_back({{"id", 300}, {"content", "<|endoftext|>"}, {"special", true}});
  write("tokenizer.json", root.dump());
  const BytePairs pairs = read_tokenizer(path("tokenizer.json"));
  EXPECT_EQ(pairs.vocabulary(), 301u);
  EXPECT_EQ(pairs.encode("the<|endoftext|>the"), (std::vector<Token>{257, 300, 257}));

  vocabulary_["<|endoftext|>"] = 259;
  write_pair();
  EXPECT_EQ(read_tokenizer(path("vocab.json")).encode("the<|endoftext|>the"),
            (std::vector<Token>{257, 259, 257}));
}

// As in tokenizers of Hugging Face: those that a normalizer may change come last.
TEST_F(TokenizerFile, SpecialTokensAreTakenBeforeOtherAddedOnes) {
  nlohmann::json root = whole();
  root["added_tokens"].push_back({{"id", 300}, {"content", "<s>"}, {"special", true}});
  root["added_tokens"].push_back({{"id", 301}, {"content", "ab<s>"}, {"normalized", true}});
  root["added_tokens"].push_back({{"id", 302}, {"content", "ab"}, {"special", false}});
  root["added_tokens"].push_back({{"id", 303}, {"content", "x<s>"}, {"normalized", false}});
  write("tokenizer.json", root.dump());
  const BytePairs pairs = read_tokenizer(path("tokenizer.json"));
  EXPECT_EQ(pairs.encode("ab<s>x<s>the"), (std::vector<Token>{302, 300, 303, 257}));
}

// A million entries that name the last of 65,000 whole tokens.
TEST_F(TokenizerFile, ManyAddedTokensTakeLinearTime) {
  std::string added;
  for (int number = 300; number < 65'300; ++number) {
    const std::string id = std::to_string(number);
    added += R"({"id":)" + id + R"(,"content":"<)" + id + R"(>"},)";
  }
  for (int i = 0; i < 1'000'000; ++i) added += R"({"id":65299,"content":"<65299>"},)";
  added.pop_back();
  const std::string root = whole().dump();
  const std::string empty = R"("added_tokens":[)";
  const std::size_t at = root.find(empty) + empty.size();
  write("tokenizer.json", root.substr(0, at) + added + root.substr(at));
  EXPECT_EQ(read_tokenizer(path("tokenizer.json")).vocabulary(), 65'300u);
}

TEST_F(TokenizerFile, APairOfFilesIsFoundInItsDirectoryAndReadLineByLine) {
  const auto hash = static_cast<Token>(vocabulary_.size());
  vocabulary_["##"] = hash;
  // A character that stands for no byte is a text of its own.
  const std::string letter = "\u0155";
  vocabulary_[letter] = hash + 1;
  merges_.push_back(nlohmann::json::array({"#", "#"}));
  write_pair();
  std::ostringstream lines;
  lines << std::ifstream(path("merges.txt")).rdbuf();
  std::string text = lines.str();
  for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 2) text.insert(at, "\r");
  write("merges.txt", text);

  const BytePairs pairs = read_tokenizer(directory_.string());

  EXPECT_EQ(pairs.encode("##"), std::vector<Token>{hash});
  EXPECT_EQ(pairs.encode("the").size(), 1u);
  EXPECT_EQ(pairs.bytes_of(static_cast<Token>(hash + 1)), letter);
}

TEST_F(TokenizerFile, OthersAreRefusedInWords) {
  refused("none.json", StatusCode::kIoError, "cannot read");
  write("other.json", "{\"a\": 1}");
  refused("other.json", StatusCode::kCorruption, "its name does not end in vocab.json");
  write_pair("lone-");
  fs::remove(path("lone-merges.txt"));
  refused("lone-vocab.json", StatusCode::kIoError, "lone-merges.txt");
  write_pair();
  write("merges.txt", "t h\nq zz\n");
  refused("vocab.json", StatusCode::kCorruption, "needs the token");
  write("merges.txt", "t h\nlonely\n");
  refused("vocab.json", StatusCode::kCorruption, "not a pair");
  fs::resize_file(path("merges.txt"), 1u << 30);
  refused("vocab.json", StatusCode::kIoError, "merges.txt: it has more than 64.00 MiB");

  const auto changed = [&](auto change) {
    nlohmann::json root = whole();
    change(root);
    write("tokenizer.json", root.dump());
  };
  changed([](auto& root) { root["model"]["type"] = "Unigram"; });
  refused("tokenizer.json", StatusCode::kUnsupported, "type is \"Unigram\"");
  changed([](auto& root) { root["pre_tokenizer"] = {{"type", "Sequence"}}; });
  refused("tokenizer.json", StatusCode::kUnsupported, "pre_tokenizer is");
  changed([](auto& root) { root["pre_tokenizer"]["add_prefix_space"] = true; });
  refused("tokenizer.json", StatusCode::kUnsupported, "add_prefix_space is true");
  changed([](auto& root) { root["model"]["byte_fallback"] = true; });
  refused("tokenizer.json", StatusCode::kUnsupported, "byte_fallback is true");
  changed([](auto& root) { root["normalizer"] = {{"type", "NFC"}}; });
  refused("tokenizer.json", StatusCode::kUnsupported, "normalizer is");
  for (const char* const key : {"lstrip", "rstrip", "single_word"}) {
    changed([&](auto& root) {
      root["added_tokens"].push_back({{"content", "<a>"}, {"id", 300}, {key, true}});
    });
    refused("tokenizer.json", StatusCode::kUnsupported, std::string(key) + " is true");
  }
  changed([](auto& root) { root["model"]["vocab"]["big"] = 70000; });
  refused("tokenizer.json", StatusCode::kUnsupported, "tokens have 16 bits");
  changed([](auto& root) { root["model"]["vocab"]["twice"] = 65; });
  refused("tokenizer.json", StatusCode::kCorruption, "two tokens have the number 65");
  changed([](auto& root) { root["model"]["merges"].push_back(nlohmann::json::array({"t"})); });
  refused("tokenizer.json", StatusCode::kCorruption, "not a pair of tokens");
  changed([](auto& root) { root["model"]["merges"].push_back("th"); });
  refused("tokenizer.json", StatusCode::kCorruption, "a merge has no space between two tokens");
  changed([](auto& root) { root["model"]["vocab"] = nlohmann::json::object(); });
  refused("tokenizer.json", StatusCode::kCorruption, "it has no tokens");
  for (const nlohmann::json& added : {nlohmann::json("<a>"), nlohmann::json({{"id", 300}})}) {
    changed([&](auto& root) { root["added_tokens"].push_back(added); });
    refused("tokenizer.json", StatusCode::kCorruption, "");
  }
  changed([](auto& root) { root["model"]["vocab"].erase("A"); });
  refused("tokenizer.json", StatusCode::kCorruption, "the byte 65 has no token");
}

// --- training ---

TEST_F(TokenizerFile, TrainingOnATextIsTrainingOnItsTokens) {
  write_pair();
  testing::write_text(path("text"), testing::kTextBytes, testing::kTextSeed);
  TrainerOptions o = testing::small_options();
  o.ranks = 2;
  o.stage = 3;
  o.text = {path("text")};
  o.tokenizer = std::make_shared<const BytePairs>(read_tokenizer(path("vocab.json")));
  o.model.vocabulary = o.tokenizer->vocabulary();
  o.tokens_file = path("tokens");
  o.evaluation_text = {path("text")};
  o.generate = 8;
  o.prompt = "the ";
  o.temperature = 0;
  const TrainingReport report = run_training(o);
  const std::uint64_t tokens =
      o.tokenizer
          ->encode(std::string(reinterpret_cast<const char*>(Text::read(o.text).bytes().data()),
                               testing::kTextBytes))
          .size();
  EXPECT_LT(tokens, testing::kTextBytes);
  EXPECT_EQ(fs::file_size(path("tokens")), 2 * tokens);
  EXPECT_EQ(report.generated.substr(0, 4), "the ");

  TrainerOptions mapped = o;
  mapped.text.clear();
  mapped.data = path("tokens");
  mapped.tokens_file.clear();
  const TrainingReport again = run_training(mapped);
  EXPECT_EQ(again.digest, report.digest);
  EXPECT_EQ(again.loss, report.loss);
  EXPECT_EQ(again.evaluations.back().loss, report.evaluations.back().loss);
  EXPECT_EQ(again.generated, report.generated);
}

TEST_F(TokenizerFile, OptionsTakeTheVocabularyFromIt) {
  write_pair();
  const auto refusal = [](const std::vector<std::string>& arguments) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(parse_command(arguments).exit_code, 2);
    return ::testing::internal::GetCapturedStderr();
  };
  const ParsedCommand parsed = parse_command({"--tokenizer", "bpe", path("vocab.json"), "--generate", "5"});
  ASSERT_TRUE(parsed.options);
  EXPECT_EQ(parsed.options->model.vocabulary, 259u);
  const ParsedCommand padded =
      parse_command({"--vocabulary", "320", "--tokenizer", "bpe", path("vocab.json")});
  ASSERT_TRUE(padded.options);
  EXPECT_EQ(padded.options->model.vocabulary, 320u);
  EXPECT_TRUE(parse_command({"--tokenizer", "bytes"}).options);
  EXPECT_NE(refusal({"--tokenizer", "bpe", path("vocab.json"), "--vocabulary", "100"}).find("use a larger"),
            std::string::npos);
  EXPECT_NE(refusal({"--tokenizer", "bpe"}).find("use bytes, or bpe FILE"), std::string::npos);
  EXPECT_NE(refusal({"--tokenizer", "words"}).find("use bytes, or bpe FILE"), std::string::npos);
  EXPECT_NE(refusal({"--tokenizer", "bpe", path("none")}).find("cannot read"), std::string::npos);
  EXPECT_NE(
      refusal({"--tokenizer", "bpe", path("vocab.json"), "--data", "x"}).find("--tokenizer is for text"),
      std::string::npos);
}

}  // namespace
}  // namespace forebay::gpt
