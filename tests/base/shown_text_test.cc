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

TEST(RepeatedName, IsFoundInTheOutermostObjectAlone) {
  EXPECT_EQ(repeated_name(R"({"a": {"x": 1, "x": 2}, "b" : ["a", "b"], "c": "a\"b"})", 3), std::nullopt);
  EXPECT_EQ(repeated_name(R"({"a": 1, "b": "a", "a": 2})", 2), "a");
  EXPECT_EQ(repeated_name(R"({"a": 1, "\u0061": 2})", 1), "a name");
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
