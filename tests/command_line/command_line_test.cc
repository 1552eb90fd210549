#include "forebay/command_line.h"

#include <gtest/gtest.h>

#include <sstream>

#include "forebay/text.h"

namespace forebay {
namespace {

CommandText example() {
  CommandText plan{.name = "forebay plan", .summary = "Print a plan's bytes"};
  plan.options.push_back({.names = {"-h", "--help"}, .help = "Print this help", .heading = "Options"});
  plan.options.push_back({.names = {"--dtype"},
                          .values = "fp32|bf16|fp16",
                          .help = "Type of [parameters]: it's fixed",
                          .fallback = "bf16",
                          .heading = "Sharding"});
  plan.options.push_back({.names = {"--bucket"},
                          .values = "BYTES|auto",
                          .help = "Size",
                          .environment = "BUCKET",
                          .heading = "Sharding"});
  plan.options.push_back({.values = "FILE", .help = "A model", .heading = "Arguments", .required = true});
  return {.name = "forebay", .summary = "A runtime", .commands = {plan}};
}

TEST(WrapText, BreaksAtSpacesAndKeepsIndentsAndLongWords) {
  EXPECT_EQ(wrap_text("one two three four", 9), "one two\nthree\nfour");
  EXPECT_EQ(wrap_text("one two three", 12, 4), "one two\n    three");
  EXPECT_EQ(wrap_text("a\n  b c d\n\ne", 5), "a\n  b c\n  d\n\ne");
  EXPECT_EQ(wrap_text("incomprehensible word", 5), "incomprehensible\nword");
  EXPECT_EQ(wrap_text("name    value", 80), "name    value");
  EXPECT_EQ(wrap_text("", 80), "");
}

TEST(HelpText, FitsTheWidthAndGroupsOptionsWithTheirDefaults) {
  const std::string help = help_text(example().commands[0], 60);

  EXPECT_EQ(help,
            "Usage: forebay plan [OPTIONS] FILE\n\nPrint a plan's bytes\n\n"
            "Sharding:\n"
            "  --dtype fp32|bf16|fp16    Type of [parameters]: it's fixed\n"
            "                            [default: bf16]\n"
            "  --bucket BYTES|auto       Size [environment: BUCKET]\n\n"
            "Arguments:\n  FILE                      A model\n\n"
            "Options:\n  -h, --help                Print this help\n");
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 60u) << line;
  EXPECT_NE(help_text(example(), 80).find("Commands:\n  plan  "), std::string::npos);
}

TEST(HelpText, AWordThatIsNotKnownIsAnsweredWithTheNearest) {
  const CommandText plan = example().commands[0];
  EXPECT_EQ(unknown_word_text(plan, "--dtpye=3"),
            "there is no option --dtpye; did you mean --dtype? (forebay plan --help lists the options)");
  EXPECT_EQ(unknown_word_text(example(), "paln"),
            "there is no command 'paln'; did you mean plan? (forebay --help lists the commands)");
  EXPECT_EQ(unknown_word_text(plan, "--temperature"),
            "there is no option --temperature (forebay plan --help lists the options)");
}

TEST(ManualPage, EscapesTheTextsOfTroff) {
  CommandText plan = example().commands[0];
  plan.footer = ".begins with a dot";
  const std::string page = manual_page(plan);
  EXPECT_EQ(page.find(".TH FOREBAY-PLAN 1"), 0u);
  for (const char* part :
       {"\\fB\\-\\-dtype\\fR \\fIfp32|bf16|fp16\\fR", "Default: bf16.", ".SS Sharding", "\n\\&.begins"})
    EXPECT_NE(page.find(part), std::string::npos) << part << "\n" << page;
}

TEST(Completion, OffersTheWordsOfAnOption) {
  const CommandText program = example();
  EXPECT_NE(bash_completion(program).find("--dtype) words='fp32 bf16 fp16'"), std::string::npos);
  EXPECT_NE(bash_completion(program).find("--bucket) words='auto'"), std::string::npos);
  EXPECT_NE(zsh_completion(program).find(
                "'--dtype[Type of \\[parameters\\]\\: it'\\''s fixed]:value:(fp32 bf16 fp16)'"),
            std::string::npos);
  EXPECT_NE(fish_completion(program).find("-l dtype -x -a 'fp32 bf16 fp16' -d 'Type of [parameters]'"),
            std::string::npos);
}

}  // namespace
}  // namespace forebay
