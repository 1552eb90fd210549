#include "forebay/units.h"

#include <gtest/gtest.h>

#include <clocale>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "forebay/text.h"
#include "tests/support/temporary_directory.h"

namespace forebay {
namespace {

TEST(Units, FormatsBytes) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(1_MiB), "1.00 MiB");
  EXPECT_EQ(format_bytes(1_GiB), "1.00 GiB");
  EXPECT_EQ(format_bytes(1024_GiB), "1.00 TiB");
  EXPECT_EQ(format_bytes(std::uint64_t{1} << 50), "1.00 PiB");
  EXPECT_EQ(format_bytes(~std::uint64_t{0}), "16384.00 PiB");
  EXPECT_EQ(format_bytes(3584_MiB), "3.50 GiB");
  EXPECT_EQ(format_count(1, "block"), "1 block");
  EXPECT_EQ(format_count(0, "block"), "0 blocks");
  EXPECT_EQ(format_count(2, "pass", "passes"), "2 passes");
  EXPECT_EQ(format_count(1, "pass", "passes"), "1 pass");
}

TEST(Units, GroupsDigitsByThree) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(1000), "1,000");
  EXPECT_EQ(grouped(123456), "123,456");
  EXPECT_EQ(grouped(18446744073709551615u), "18,446,744,073,709,551,615");
}

TEST(Units, ParsesBytes) {
  const struct {
    const char* text;
    std::uint64_t bytes;
  } kCases[] = {{"4096", 4096},
                {"64KiB", 64_KiB},
                {"1.5GiB", 1536_MiB},
                {"2GB", 2000000000},
                {"2G", 2_GiB},
                {"80 GB", 80000000000},
                {"80g", 80_GiB},
                {"80 gib", 80_GiB},
                {"0", 0},
                {"0.0", 0},
                {"0.5KiB", 512},
                {"3 KB", 3000},
                {"1KB", 1000},
                {"2 TB", 2000000000000},
                {"9", 9},
                {"1B", 1},
                {"3K", 3072},
                {"5M", 5_MiB},
                {"7MiB", 7_MiB},
                {"6MB", 6000000},
                {"2T", 2048_GiB},
                {"3TiB", 3072_GiB},
                {"1024.9", 1024},
                {"18446744073709549568", 18446744073709549568u}};
  for (const auto& [text, expected] : kCases) {
    std::uint64_t bytes = 0;
    EXPECT_TRUE(parse_bytes(text, &bytes)) << text;
    EXPECT_EQ(bytes, expected) << text;
  }
  for (const char* text :
       {"", "-1", "GiB", "3 parsecs", "1e40", "0.5", "0.0001KiB", "1e-400", "0x10", "0X1p4", "1,5GiB", "0x",
        "nan", "inf", "18446744073709551616", "16777216TiB", "0.9999B"}) {
    std::uint64_t bytes = 7;
    EXPECT_FALSE(parse_bytes(text, &bytes)) << text;
    EXPECT_EQ(bytes, 7u) << text;
  }
  EXPECT_FALSE(parse_bytes(nullptr, nullptr));
}

// As German and Turkish programs set it: a comma for the point, and another small letter for I. Makes the
// locales where they are not installed.
TEST(Units, ParsesBytesTheSameInEveryLocale) {
  const std::string before = std::setlocale(LC_ALL, nullptr);
  const testing::TemporaryDirectory made;
  const auto set = [&](const char* name, const char* source) {
    if (std::setlocale(LC_ALL, name) != nullptr) return true;
    const std::string place = made / name;
    const std::string command =
        std::string("localedef -c -i ") + source + " -f UTF-8 '" + place + "' >/dev/null 2>&1";
    static_cast<void>(!std::system(command.c_str()));
    ::setenv("LOCPATH", made.path().c_str(), 1);
    const bool is_set = std::setlocale(LC_ALL, name) != nullptr;
    ::unsetenv("LOCPATH");
    return is_set;
  };
  int found = 0;
  for (const auto& [name, source] : {std::pair("de_DE.UTF-8", "de_DE"), {"tr_TR.UTF-8", "tr_TR"}}) {
    if (!set(name, source)) continue;
    ++found;
    std::uint64_t bytes = 0;
    EXPECT_TRUE(parse_bytes("1.5gib", &bytes)) << name;
    EXPECT_EQ(bytes, 1536_MiB) << name;
    EXPECT_FALSE(parse_bytes("1,5GiB", &bytes)) << name;
    std::setlocale(LC_ALL, before.c_str());
  }
  if (found == 0) GTEST_SKIP() << "no locale with a decimal comma is installed (package locales)";
}

TEST(Text, AValueOfAFileIsShownShortAndHarmless) {
  EXPECT_EQ(shown_value("gpt2"), "gpt2");
  EXPECT_EQ(shown_value("a\x1b]0;x\x07\n\xc2\x9b"), "a\\x1b]0;x\\x07\\n\\u009b");
  EXPECT_EQ(shown_value(std::string(65, 'b')), std::string(64, 'b') + "...");
  EXPECT_EQ(shown_value(std::string(64, 'b')), std::string(64, 'b'));
}

// Cut between characters of two, three and four bytes.
TEST(Text, AValueIsCutBetweenTwoCharacters) {
  for (const std::string character : {"ü", "€", "😀"}) {
    for (std::size_t before = 61; before <= 64; ++before) {
      const std::string head(before, 'b');
      const std::size_t fitting = (64 - before) / character.size();
      std::string shown = head;
      for (std::size_t i = 0; i < fitting; ++i) shown += character;
      EXPECT_EQ(shown_value(head + character + character + character + character), shown + "...") << before;
    }
  }
}

TEST(Text, APathIsShownShortAndHarmless) {
  EXPECT_EQ(shown_path("/tmp/über\x1b[2J/x\n"), "/tmp/über\\x1b[2J/x\\n");
  EXPECT_EQ(shown_path(std::string(300, 'p')), std::string(300, 'p'));
  EXPECT_EQ(shown_path(std::string(5000, 'p')), std::string(300, 'p') + "...");
  EXPECT_EQ(shown_path(std::string(299, 'p') + "über"), std::string(299, 'p') + "...");
}

TEST(Text, CountsTheDepthOfJson) {
  EXPECT_FALSE(is_nested_deeper("[[]]", 2));
  EXPECT_TRUE(is_nested_deeper("[[]]", 1));
  EXPECT_FALSE(is_nested_deeper(R"({"a": "[[[[", "b": "\"[[[["})", 1));
  EXPECT_TRUE(is_nested_deeper(R"({"a": "\\", "b": [[]]})", 2));
}

TEST(Text, BracketsOfBothKindsCloseWhatTheyOpen) {
  EXPECT_FALSE(is_nested_deeper("[{}, {}, [], []]", 2));
  EXPECT_TRUE(is_nested_deeper("[{}, {}, [[]]]", 2));
  EXPECT_FALSE(is_nested_deeper("", 0));
}

TEST(Text, LinesAreFilledToTheirLastColumn) {
  EXPECT_EQ(wrap_text("abc def ghi", 9, 2), "abc def\n  ghi");
  EXPECT_EQ(wrap_text("abc def ghi", 8, 2), "abc\n  def\n  ghi");
  EXPECT_EQ(wrap_text("abc  def", 20, 2), "abc  def") << "spaces within a line stay";
  EXPECT_EQ(wrap_text("a\n\n  b c", 6, 2), "a\n\n    b\n    c") << "an empty line has no spaces";
  EXPECT_EQ(wrap_text("longer than it", 4, 0), "longer\nthan\nit");
  EXPECT_EQ(wrap_text("", 4, 2), "");
}

TEST(Text, TheNearestNameDiffersInAThirdOfItsLettersAtMost) {
  const std::vector<std::string> names = {"stage", "steps", "sequence"};
  EXPECT_EQ(nearest_name("stgae", names), "stage") << "two letters are swapped";
  EXPECT_EQ(nearest_name("staXe", names), "stage");
  EXPECT_EQ(nearest_name("sXaXe", names), "") << "two of five differ";
  EXPECT_EQ(nearest_name("sequXXce", names), "sequence") << "two of eight";
  EXPECT_EQ(nearest_name("seXXXnce", names), "") << "three of eight";
  // Without a comparison of each character with each.
  const std::string endless(10'000'000, 's');
  EXPECT_EQ(nearest_name(endless, names), "");
  EXPECT_EQ(nearest_name("stgae", std::vector<std::string>{endless, "stage"}), "stage");
  EXPECT_EQ(nearest_name("st", std::vector<std::string>{"s", "t"}), "s")
      << "the first of two that are as near";
  EXPECT_EQ(nearest_name("", names), "");
  EXPECT_EQ(nearest_name("abcd", std::vector<std::string>{"badc"}), "");
  EXPECT_EQ(nearest_name("stxce", std::vector<std::string>{"stcye"}), "") << "c has moved and x is y: two";
}

TEST(Units, AsksWhetherABareSmallNumberIsMeant) {
  EXPECT_EQ(size_question("80"), "80 bytes; did you mean 80GiB?");
  EXPECT_EQ(size_question("4095"), "4095 bytes; did you mean 4095GiB?");
  for (const char* text : {"0", "4096", "80B", "80GiB", "1KiB", "much", ""})
    EXPECT_EQ(size_question(text), "");
}

}  // namespace
}  // namespace forebay
