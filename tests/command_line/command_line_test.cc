#include "forebay/command_line.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "forebay/text.h"
#include "tests/support/temporary_directory.h"

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
  EXPECT_EQ(parse_error_text("--steps: At Most 1 required but received 2", "forebay plan"),
            "--steps was given 2 times; give it once (forebay plan --help lists the options)");
  EXPECT_EQ(parse_error_text("--steps: no number", "forebay"),
            "--steps: no number (forebay --help lists the options)");
  EXPECT_EQ(unknown_word_text(plan, "--temperature"),
            "there is no option --temperature (forebay plan --help lists the options)");
}

CommandText odd() {
  CommandText command{.name = "forebay odd", .summary = "Print: 'odd' texts"};
  command.options.push_back({.names = {"-q"}, .help = "A flag; it is quiet", .heading = "Options"});
  command.options.push_back({.names = {"--exactly-24-columns"},
                             .values = "X",
                             .help = "Fits",
                             .heading = "Options",
                             .repeats = true});
  command.options.push_back({.names = {"--exactly-25-columns-"}, .values = "Y", .heading = "Options"});
  command.options.push_back({.names = {"--path"},
                             .values = "FILE",
                             .help = "A file: any. 'One' more",
                             .fallback = "none",
                             .environment = "ODD_PATH",
                             .heading = "Options"});
  command.options.push_back({.values = "WORD", .help = "Words", .heading = "Arguments", .repeats = true});
  command.footer = "A note.\n'quoted' \\ note";
  return command;
}

TEST(HelpText, LabelsThatAreTooLongHaveALineOfTheirOwn) {
  EXPECT_EQ(help_text(odd(), 60), R"(Usage: forebay odd [OPTIONS] [WORD...]

Print: 'odd' texts

Arguments:
  WORD...                   Words

Options:
  -q                        A flag; it is quiet
  --exactly-24-columns X...
                            Fits
  --exactly-25-columns- Y
  --path FILE               A file: any. 'One' more
                            [default: none] [environment:
                            ODD_PATH]

A note.
'quoted' \ note
)");
}

TEST(HelpText, OnlyOptionsBeginWithADash) {
  EXPECT_EQ(unknown_word_text(odd(), "word"),
            "'word' is no option and is not expected here (forebay odd --help lists the options)");
  EXPECT_EQ(unknown_word_text(odd(), "-"),
            "'-' is no option and is not expected here (forebay odd --help lists the options)");
  EXPECT_EQ(unknown_word_text(odd(), "-x"),
            "there is no option -x; did you mean -q? (forebay odd --help lists the options)");
}

TEST(HelpText, TheTerminalHasAWidth) {
  const char* const before = std::getenv("COLUMNS");
  const std::string kept = before == nullptr ? "" : before;
  for (const auto& [columns, width] : std::vector<std::pair<const char*, std::size_t>>{
           {"60", 60}, {"41", 41}, {"40", 40}, {"39", 40}, {"1", 40}, {"100000", 100000}}) {
    ::setenv("COLUMNS", columns, 1);
    EXPECT_EQ(terminal_width(), width) << columns;
  }
  ::setenv("COLUMNS", kept.c_str(), 1);
  if (before == nullptr) ::unsetenv("COLUMNS");
}

TEST(ManualPage, HasAllPartsOfACommand) {
  std::string page = manual_page(odd());
  page.erase(0, page.find('\n') + 1);  // The version.
  EXPECT_EQ(page, R"(.SH NAME
forebay\-odd \- Print: 'odd' texts
.SH SYNOPSIS
.B forebay odd
[OPTIONS] \fIWORD\fR...
.SH OPTIONS
.SS Options
.TP
\fB\-q\fR
A flag; it is quiet
.TP
\fB\-\-exactly\-24\-columns\fR \fIX\fR...
Fits
.TP
\fB\-\-exactly\-25\-columns\-\fR \fIY\fR

.TP
\fB\-\-path\fR \fIFILE\fR
A file: any. 'One' more
Default: none.
Environment: ODD_PATH.
.SS Arguments
.TP
\fIWORD\fR...
Words
.SH NOTES
.nf
A note.
\&'quoted' \e note
.fi
)");
  std::string program = manual_page({.name = "forebay", .summary = "A runtime", .commands = {odd()}});
  program.erase(0, program.find('\n') + 1);
  EXPECT_EQ(program, R"(.SH NAME
forebay \- A runtime
.SH SYNOPSIS
.B forebay
COMMAND [OPTIONS]
.SH COMMANDS
.TP
\fBforebay\-odd\fR(1)
Print: 'odd' texts
.SH OPTIONS
)");
}

TEST(ManualPage, AFileThatCannotBeWrittenIsNamed) {
  const Status status = write_manual(odd(), "/proc/nowhere");
  EXPECT_EQ(status.code(), StatusCode::kIoError);
  EXPECT_EQ(status.message().find("cannot write /proc/nowhere/man/man1/forebay-odd.1: "), 0u)
      << status.message();
  EXPECT_NE(status.message().find("; name a directory that can be written to"), std::string::npos);
  const testing::TemporaryDirectory share;
  std::filesystem::create_symlink("/dev/full", share / "full");
  std::filesystem::create_directories(share / "man/man1");
  std::filesystem::create_symlink("/dev/full", share / "man/man1/forebay-odd.1");
  EXPECT_EQ(write_manual(odd(), share.path()).code(), StatusCode::kIoError) << "the disk was full";
}

TEST(Completion, KnowsAllOptionsOfAllCommands) {
  const CommandText program{
      .name = "forebay-x", .summary = "A runtime", .commands = {odd(), example().commands[0]}};
  EXPECT_EQ(bash_completion(program), R"(# Completion of forebay-x for bash.
_forebay_x() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=''
  [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}
  case ${COMP_WORDS[1]} in
    odd)
      case $before in
        *) [[ $word == -* ]] && words='-q --exactly-24-columns --exactly-25-columns- --path' ;;
      esac
      ;;
    plan)
      case $before in
        --dtype) words='fp32 bf16 fp16' ;;
        --bucket) words='auto' ;;
        *) [[ $word == -* ]] && words='-h --help --dtype --bucket' ;;
      esac
      ;;
    help) words='odd plan help' ;;
    *)
      case $before in
        *) [[ $word == -* ]] && words='' ;;
      esac
      (( COMP_CWORD == 1 )) && [[ $word != -* ]] && words='odd plan help'
      ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _forebay_x forebay-x
)");
  EXPECT_EQ(zsh_completion(program), R"(#compdef forebay-x
# Completion of forebay-x for zsh.
local -a commands=(
  'odd:Print\: '\''odd'\'' texts'
  'plan:Print a plan'\''s bytes'
  'help:Print help'
)
if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then
  _describe command commands
  return
fi
case $words[2] in
  odd)
    shift words
    (( CURRENT-- ))
    _arguments \
      '-q[A flag; it is quiet]' \
      '--exactly-24-columns[Fits]:value:_files' \
      '--exactly-25-columns-[]:value:_files' \
      '--path[A file\: any. '\''One'\'' more]:value:_files' \
      '*:file:_files'
    ;;
  plan)
    shift words
    (( CURRENT-- ))
    _arguments \
      '-h[Print this help]' \
      '--help[Print this help]' \
      '--dtype[Type of \[parameters\]\: it'\''s fixed]:value:(fp32 bf16 fp16)' \
      '--bucket[Size]:value:(auto)' \
      '*:file:_files'
    ;;
  help) _describe command commands ;;
  *)
    _arguments \
      '*:file:_files'
    ;;
esac
)");
  EXPECT_EQ(fish_completion(program), R"(# Completion of forebay-x for fish.
complete -c forebay-x -n __fish_use_subcommand -a odd -d 'Print: '\''odd'\'' texts'
complete -c forebay-x -n __fish_use_subcommand -a plan -d 'Print a plan'\''s bytes'
complete -c forebay-x -n __fish_use_subcommand -a help -d 'Print help'
complete -c forebay-x -n '__fish_seen_subcommand_from odd' -s q -d 'A flag'
complete -c forebay-x -n '__fish_seen_subcommand_from odd' -l exactly-24-columns -r -d 'Fits'
complete -c forebay-x -n '__fish_seen_subcommand_from odd' -l exactly-25-columns- -r -d ''
complete -c forebay-x -n '__fish_seen_subcommand_from odd' -l path -r -d 'A file'
complete -c forebay-x -n '__fish_seen_subcommand_from plan' -s h -l help -d 'Print this help'
complete -c forebay-x -n '__fish_seen_subcommand_from plan' -l dtype -x -a 'fp32 bf16 fp16' -d 'Type of [parameters]'
complete -c forebay-x -n '__fish_seen_subcommand_from plan' -l bucket -x -a 'auto' -d 'Size'
)");
}

TEST(Completion, AProgramWithoutCommandsHasItsOptions) {
  CommandText program = odd();
  program.name = "forebay-odd";
  EXPECT_EQ(bash_completion(program), R"(# Completion of forebay-odd for bash.
_forebay_odd() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=''
  [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}
  case ${COMP_WORDS[1]} in
    *)
      case $before in
        *) [[ $word == -* ]] && words='-q --exactly-24-columns --exactly-25-columns- --path' ;;
      esac
      ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _forebay_odd forebay-odd
)");
  EXPECT_EQ(zsh_completion(program), R"(#compdef forebay-odd
# Completion of forebay-odd for zsh.
_arguments \
  '-q[A flag; it is quiet]' \
  '--exactly-24-columns[Fits]:value:_files' \
  '--exactly-25-columns-[]:value:_files' \
  '--path[A file\: any. '\''One'\'' more]:value:_files' \
  '*:file:_files'
)");
  EXPECT_EQ(fish_completion(program), R"(# Completion of forebay-odd for fish.
complete -c forebay-odd -s q -d 'A flag'
complete -c forebay-odd -l exactly-24-columns -r -d 'Fits'
complete -c forebay-odd -l exactly-25-columns- -r -d ''
complete -c forebay-odd -l path -r -d 'A file'
)");
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
