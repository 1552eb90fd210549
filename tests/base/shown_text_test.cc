#include <gtest/gtest.h>

#include <random>
#include <string>

#include "forebay/text.h"

namespace forebay {
namespace {

TEST(ShownText, SpellsOutWhatATerminalWouldObey) {
  EXPECT_EQ(shown_text("python train.py --name 'größe ✓'"), "python train.py --name 'größe ✓'");
  EXPECT_EQ(shown_text("a\nb\tc\rd"), "a\\nb\\tc\\rd");
  EXPECT_EQ(shown_text("\x1b[31mred\x07\x7f"), "\\x1b[31mred\\x07\\x7f");
  EXPECT_EQ(shown_text(std::string("a\0b", 3)), "a\\x00b");
  // A control character of two bytes, the mark that turns the direction of writing, and one without width.
  EXPECT_EQ(shown_text("\xC2\x9B"
                       "31m \xE2\x80\xAE \xEF\xBB\xBF"),
            "\\u009b31m \\u202e \\ufeff");
  EXPECT_EQ(shown_text("C:\\n"), "C:\\n");
}

TEST(ShownText, SpellsOutTheEndsOfEachRangeOfInvisibleCharacters) {
  for (const std::uint32_t invisible :
       {0x00u, 0x1Fu, 0x7Fu, 0x9Fu, 0x061Cu, 0x200Bu, 0x200Fu, 0x2028u, 0x202Eu, 0x2060u, 0x206Fu, 0xFEFFu})
    EXPECT_TRUE(is_invisible(invisible)) << invisible;
  for (const std::uint32_t visible : {0x20u, 0x7Eu, 0xA0u, 0x061Bu, 0x061Du, 0x200Au, 0x2010u, 0x2027u,
                                      0x202Fu, 0x205Fu, 0x2070u, 0xFEFEu, 0xFF00u})
    EXPECT_FALSE(is_invisible(visible)) << visible;
}

// The first and the last character of each length, and the bytes beside them that are none.
TEST(ShownText, KnowsTheCharactersOfUtf8) {
  const auto length = [](const std::string& bytes, std::uint32_t expected) {
    std::uint32_t character = 0;
    const std::size_t found = utf8_length(bytes, &character);
    if (found > 0) {
      EXPECT_EQ(character, expected);
    }
    return found;
  };
  EXPECT_EQ(length("\x7F", 0x7F), 1u);
  EXPECT_EQ(length("\xC2\x80", 0x80), 2u);
  EXPECT_EQ(length("\xDF\xBF", 0x7FF), 2u);
  EXPECT_EQ(length("\xE0\xA0\x80", 0x800), 3u);
  EXPECT_EQ(length("\xED\x9F\xBF", 0xD7FF), 3u);
  EXPECT_EQ(length("\xEE\x80\x80", 0xE000), 3u);
  EXPECT_EQ(length("\xEF\xBF\xBF", 0xFFFF), 3u);
  EXPECT_EQ(length("\xF0\x90\x80\x80", 0x10000), 4u);
  EXPECT_EQ(length("\xF4\x8F\xBF\xBF", 0x10FFFF), 4u);
  for (const std::string bytes : {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80",
                                  "\xED\xBF\xBF", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80",
                                  "\xC2", "\xC2\x20", "\xE2\x82", "\xF0\x90\x80"})
    EXPECT_EQ(length(bytes, 0), 0u) << shown_text(bytes);
}

TEST(RepeatedName, IsFoundInTheOutermostObjectAlone) {
  EXPECT_EQ(repeated_name(R"({"a": {"x": 1, "x": 2}, "b" : ["a", "b"], "c": "a\"b"})", 3), std::nullopt);
  EXPECT_EQ(repeated_name(R"({"a": 1, "b": "a", "a": 2})", 2), "a");
  EXPECT_EQ(repeated_name(R"({"a": 1, "\u0061": 2})", 1), "a name");
  EXPECT_EQ(repeated_name(R"({"a\"": 1, "b": 2, "a\"": 3})", 2), R"(a\")");
  EXPECT_EQ(repeated_name("{}", 0), std::nullopt);
}

TEST(ShownText, SpellsOutBytesThatAreNoText) {
  EXPECT_EQ(shown_text("\xFF(\xC3("), "\\xff(\\xc3(");
  EXPECT_EQ(shown_text("cut \xE2\x82"), "cut \\xe2\\x82");
  EXPECT_EQ(shown_text("\x9b"), "\\x9b");
}

TEST(ShownText, LeavesNoControlCharacterOfWhateverText) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 2000; ++i) {
    std::string text(random() % 24, '\0');
    for (char& letter : text) letter = static_cast<char>(random());
    const std::string shown = shown_text(text);

    for (const char letter : shown) {
      EXPECT_GE(static_cast<unsigned char>(letter), 0x20) << shown;
      EXPECT_NE(letter, '\x7f') << shown;
    }
    EXPECT_EQ(shown_text(shown), shown);
  }
}

}  // namespace
}  // namespace forebay
