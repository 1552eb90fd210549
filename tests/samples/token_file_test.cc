// Files of 16-bit tokens: the same training as from the bytes, and files that are refused in words.

#include "model/token_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "model/text.h"
#include "tests/samples/small_training.h"
#include "tests/support/temporary_directory.h"
#include "trainer/options.h"
#include "trainer/training.h"

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

class Tokens : public ::testing::Test {
 protected:
  Tokens() {
    directory_ = forebay::testing::make_temporary_directory("tokens");
    for (std::uint64_t i = 0; i < testing::kTextBytes; ++i)
      tokens_.push_back(static_cast<std::uint16_t>(testing::drawn_letter(testing::kTextSeed, i)));
  }
  ~Tokens() override { fs::remove_all(directory_); }

  std::string path(const std::string& name) const { return (directory_ / name).string(); }
  void write(const std::string& name, const std::vector<std::int32_t>& header,
             const std::vector<std::uint16_t>& tokens) const {
    std::ofstream file(path(name), std::ios::binary);
    file.write(reinterpret_cast<const char*>(header.data()), static_cast<std::streamsize>(header.size() * 4));
    file.write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(tokens.size() * 2));
  }
  static std::vector<std::int32_t> header(std::int32_t magic, std::int32_t version) {
    std::vector<std::int32_t> numbers(256);
    numbers[0] = magic;
    numbers[1] = version;
    return numbers;
  }
  TrainerOptions options() const {
    TrainerOptions o = testing::small_options();
    o.steps = 3;
    o.ranks = 2;
    o.stage = 3;
    return o;
  }
  void refused(const std::string& name, StatusCode code, const std::string& part) const {
    try {
      TokenFile file(path(name));
      ADD_FAILURE() << name << " was read";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }

  fs::path directory_;
  std::vector<std::uint16_t> tokens_;
};

TEST_F(Tokens, TrainLikeTheBytesThatTheyStandFor) {
  std::ofstream text(path("text"), std::ios::binary);
  for (const std::uint16_t token : tokens_) text.put(static_cast<char>(token));
  text.close();
  TrainerOptions o = options();
  o.text = {path("text")};
  const TrainingReport expected = run_training(o);
  o.text.clear();
  write("nano.bin", {}, tokens_);
  write("llmc.bin", header(20240520, 1), tokens_);
  for (const char* name : {"nano.bin", "llmc.bin"}) {
    o.data = path(name);
    const TrainingReport report = run_training(o);
    EXPECT_EQ(report.digest, expected.digest) << name;
    EXPECT_EQ(report.loss, expected.loss) << name;
  }
}

TEST_F(Tokens, AStateIsResumedWithTheSameFileOnly) {
  write("a.bin", {}, tokens_);
  tokens_[1500] = 'x';
  write("b.bin", {}, tokens_);
  EXPECT_NE(Text::open(path("a.bin")).hash(), Text::open(path("b.bin")).hash());
  EXPECT_EQ(Text::open(path("a.bin")).hash(), Text::open(path("a.bin")).hash());
}

TEST_F(Tokens, BeyondTheVocabularyAreNamed) {
  tokens_[700] = 256;
  write("large.bin", {}, tokens_);
  const Text text = Text::open(path("large.bin"));
  std::vector<Token> copied(10);
  text.copy(690, copied);
  EXPECT_EQ(copied[9], tokens_[699]);
  try {
    text.copy(691, copied);
    ADD_FAILURE() << "copied";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("token 700"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("is 256"), std::string::npos) << error.what();
  }
}

TEST_F(Tokens, AFileThatIsShortenedMeanwhileIsReported) {
  write("cut.bin", {}, tokens_);
  const Text text = Text::open(path("cut.bin"));
  std::vector<Token> copied(10);
  fs::resize_file(path("cut.bin"), 2 * 695);
  text.copy(685, copied);
  try {
    text.copy(690, copied);
    ADD_FAILURE() << "copied";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kIoError);
    EXPECT_NE(std::string(error.what()).find("shorter"), std::string::npos) << error.what();
  }
}

TEST_F(Tokens, FilesThatHoldNoneAreRefused) {
  refused("none.bin", StatusCode::kIoError, "No such file");
  refused(".", StatusCode::kIoError, "not a regular file");
  write("empty.bin", {}, {});
  refused("empty.bin", StatusCode::kIoError, "it is empty");
  std::ofstream(path("odd.bin")) << "abc";
  refused("odd.bin", StatusCode::kCorruption, "odd number of bytes, 3");
  write("short.bin", {20240520, 1}, {});
  refused("short.bin", StatusCode::kCorruption, "ends in its header");
  std::vector<std::int32_t> cut = header(20240520, 1);
  cut[2] = static_cast<std::int32_t>(tokens_.size() + 1);
  write("cut.bin", cut, tokens_);
  refused("cut.bin", StatusCode::kCorruption,
          "its header says " + std::to_string(cut[2]) + " tokens, and it has");
  write("newer.bin", header(20240520, 2), tokens_);
  refused("newer.bin", StatusCode::kUnsupported, "another version");
  write("llama.bin", header(20240801, 7), tokens_);
  refused("llama.bin", StatusCode::kUnsupported, "another version");
}

TEST_F(Tokens, AFileThatIsTooShortIsRefusedByItsOption) {
  tokens_.resize(12);
  write("short.bin", {}, tokens_);
  TrainerOptions o = options();
  o.data = path("short.bin");
  try {
    run_training(o);
    ADD_FAILURE() << "it ran";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("--data has 12 tokens, too few for --sequence 12"),
              std::string::npos)
        << error.what();
  }
}

TEST(TokenOptions, TextAndDataExcludeEachOther) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(parse_command({"--text", "a", "--data", "b"}).exit_code, 2);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("use one of them"), std::string::npos);
}

TEST(FileOptions, NoOutputTakesThePlaceOfAnotherFile) {
  const forebay::testing::TemporaryDirectory directory;
  const std::string text = directory / "text", other = directory.path() + "/./text",
                    fresh = directory / "fresh";
  std::ofstream(text) << "what is not to be lost";
  for (const std::vector<std::string>& words : {std::vector<std::string>{"--text", text, "--export", other},
                                                {"--text", text, "--report", text},
                                                {"--text", text, "--write-tokens", text},
                                                {"--export", fresh, "--report", fresh}}) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(parse_command(words).exit_code, 2);
    const std::string told = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(told.find("give each a file of its own"), std::string::npos) << told;
  }
  EXPECT_EQ(parse_command({"--export", "/dev/null", "--report", "/dev/null"}).exit_code, 0);
}

}  // namespace
}  // namespace forebay::gpt
