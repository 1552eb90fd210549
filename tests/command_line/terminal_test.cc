// The programs as people start them: help, manual pages, completions, and the answers to mistakes.

#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "tests/support/process.h"

namespace forebay::testing {
namespace {

const std::vector<std::string> kCommands = {"devices", "plan", "report",     "replay",
                                            "explain", "run",  "bench-tiers"};

Finished forebay(std::vector<std::string> arguments, const Process::Variables& variables = {}) {
  arguments.insert(arguments.begin(), FOREBAY_COMMAND);
  return run_program(arguments, variables);
}

Finished gpt(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), FOREBAY_GPT);
  return run_program(arguments);
}

std::string contents(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file) << path;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The names that a help text lists, of options that it has: "--stage".
std::set<std::string> options_in(const std::string& help) {
  std::set<std::string> names;
  std::istringstream lines(help);
  const std::regex option("^  (?:-[a-z], )?(--[a-z0-9-]+)");
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_search(line, match, option)) names.insert(match[1]);
  }
  EXPECT_GE(names.size(), 2u) << help;
  return names;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

void expect_named(const std::set<std::string>& options, const std::string& page,
                  const std::string& completion) {
  const std::string plain = replaced(page, "\\-", "-");
  for (const std::string& option : options) {
    EXPECT_NE(plain.find("\\fB" + option + "\\fR"), std::string::npos) << option;
    EXPECT_NE((completion + " ").find(option), std::string::npos) << option;
  }
}

TEST(Terminal, ManualPagesAndCompletionsNameEveryOptionOfTheHelp) {
  const TemporaryDirectory share;
  ASSERT_EQ(forebay({"--write-manual", share.path()}).exit_code, 0);
  ASSERT_EQ(gpt({"--write-manual", share.path()}).exit_code, 0);

  for (const char* const program : {"forebay", "forebay-gpt"}) {
    for (const std::string& file : {std::string("bash-completion/completions/") + program,
                                    std::string("zsh/site-functions/_") + program}) {
      const std::string completion = contents(share / file);
      if (std::string(program) == "forebay-gpt") {
        expect_named(options_in(gpt({"--help"}).output), contents(share / "man/man1/forebay-gpt.1"),
                     completion);
        continue;
      }
      expect_named(options_in(forebay({"--help"}).output), contents(share / "man/man1/forebay.1"),
                   completion);
      for (const std::string& command : kCommands) {
        expect_named(options_in(forebay({command, "--help"}).output),
                     contents(share / ("man/man1/forebay-" + command + ".1")), completion);
      }
    }
    const std::string fish = replaced(
        contents(share / ("fish/vendor_completions.d/" + std::string(program) + ".fish")), " -l ", " --");
    const Finished help = std::string(program) == "forebay" ? forebay({"plan", "--help"}) : gpt({"--help"});
    for (const std::string& option : options_in(help.output))
      EXPECT_NE(fish.find(option), std::string::npos) << option;
  }
}

TEST(Terminal, CompletesInBash) {
  if (!std::filesystem::exists("/bin/bash")) GTEST_SKIP() << "there is no /bin/bash";
  const TemporaryDirectory share;
  ASSERT_EQ(forebay({"--write-manual", share.path()}).exit_code, 0);
  ASSERT_EQ(gpt({"--write-manual", share.path()}).exit_code, 0);
  const auto completed = [&](const std::string& function, const std::string& words) {
    const std::string file = function == "_forebay" ? "forebay" : "forebay-gpt";
    const Finished bash = run_program(
        {"/bin/bash", "-euc",
         "source " + (share / ("bash-completion/completions/" + file)) + "; COMP_WORDS=(" + words +
             "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); " + function + "; echo ${COMPREPLY[*]:-}"});
    EXPECT_EQ(bash.exit_code, 0) << bash.output;
    return bash.output;
  };
  EXPECT_EQ(completed("_forebay", "forebay re"), "report replay\n");
  EXPECT_EQ(completed("_forebay", "forebay plan --offload-f"), "--offload-fraction\n");
  EXPECT_EQ(completed("_forebay", "forebay plan --dtype ''"), "fp32 bf16 fp16\n");
  EXPECT_EQ(completed("_forebay", "forebay plan --dtype = b"), "bf16\n");
  EXPECT_EQ(completed("_forebay", "forebay help pl"), "plan\n");
  EXPECT_EQ(completed("_forebay_gpt", "forebay-gpt --pipe"), "--pipeline-parallel\n");
}

TEST(Terminal, HelpFitsTheWidth) {
  for (const char* columns : {"60", "100"}) {
    const Finished help = forebay({"help", "plan"}, {{"COLUMNS", columns}});
    EXPECT_EQ(help.exit_code, 0);
    std::istringstream lines(help.output);
    std::size_t longest = 0;
    for (std::string line; std::getline(lines, line);) {
      // A placeholder is not broken.
      if (line.rfind("  --", 0) != 0) longest = std::max(longest, line.size());
    }
    EXPECT_LE(longest, std::stoul(columns)) << help.output;
    EXPECT_GT(longest, std::stoul(columns) - 12) << help.output;
  }
  EXPECT_EQ(forebay({"help"}).output, forebay({"--help"}).output);
}

TEST(Terminal, EveryCommandHasAVersion) {
  const std::string version = forebay({"--version"}).output;
  EXPECT_EQ(version.find("forebay 0."), 0u) << version;
  for (const std::string& command : kCommands)
    EXPECT_EQ(forebay({command, "--version"}).output, version) << command;
  EXPECT_EQ(gpt({"--version"}).output.find("forebay-gpt 0."), 0u);
}

TEST(Terminal, MistakesAreNamedWithTheProgramAndTheNearestName) {
  const auto says = [](const Finished& finished, const std::string& beginning) {
    EXPECT_EQ(finished.exit_code, 2);
    EXPECT_EQ(finished.output.find(beginning), 0u) << finished.output;
  };
  says(forebay({"paln"}), "forebay: there is no command 'paln'; did you mean plan?");
  says(forebay({"plan", "--stgae", "3"}), "forebay plan: there is no option --stgae; did you mean --stage?");
  says(forebay({"replay", "--baselin"}),
       "forebay replay: there is no option --baselin; did you mean --baseline?");
  says(forebay({"run", "--observ"}), "forebay run: there is no option --observ; did you mean --observe?");
  says(forebay({"replay"}), "forebay replay: ");
  says(forebay({}), "forebay: ");
  says(forebay({"plan", "--memory", "80"}), "forebay plan: --memory is 80 bytes; did you mean 80GiB?");
  says(gpt({"--memory", "80"}), "forebay-gpt: --memory is 80 bytes; did you mean 80GiB?");
  says(gpt({"--dytpe", "bf16"}), "forebay-gpt: there is no option --dytpe; did you mean --dtype?");
}

TEST(Terminal, SizesHaveOneFormEverywhere) {
  for (const char* const size : {"80 GB", "80GiB", "80G", "80g"})
    EXPECT_EQ(forebay({"plan", "--stage", "3", "--memory", size, "--host-ranks", "0"}).exit_code, 0) << size;
}

}  // namespace
}  // namespace forebay::testing
