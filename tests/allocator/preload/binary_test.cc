// The contents of the preload's library, and programs that do not use CUDA, which it does not change.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "allocator/preload/calls.h"
#include "tests/allocator/preload/preload_run.h"

namespace forebay::testing {
namespace {

std::string output_of(const std::string& command) {
  std::string output;
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  char line[4096];
  while (std::fgets(line, sizeof(line), pipe) != nullptr) output += line;
  EXPECT_EQ(::pclose(pipe), 0) << command;
  return output;
}

std::set<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::set<std::string> words;
  for (std::string word; stream >> word;) words.insert(word);
  return words;
}

TEST(PreloadLibrary, ExportsOnlyTheHookedCalls) {
  std::set<std::string> expected = {"dlsym"};
#define FOREBAY_PRELOAD_ROW(name, symbol, version, NULL_STREAM, parameters, arguments) \
  expected.insert(#symbol);
  FOREBAY_PRELOAD_HOOKED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW

  // With their versions. There must be none: dlsym@SOMETHING would not be found for dlsym@GLIBC_2.34.
  const std::string names = output_of(
      CMAKE_NM " -D --defined-only --with-symbol-versions --format=just-symbols " + kPreloadLibrary);
  EXPECT_EQ(words_of(names), expected);
}

TEST(PreloadLibrary, NeedsOnlyTheCLibrary) {
  const std::string dynamic = output_of(CMAKE_READELF " --dynamic --wide " + kPreloadLibrary);
  std::istringstream lines(dynamic);
  std::vector<std::string> needed;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("(NEEDED)") != std::string::npos) needed.push_back(line.substr(line.find('[')));
  }

  EXPECT_EQ(needed, std::vector<std::string>{"[libc.so.6]"});
}

// Nothing runs when it is loaded, and it has no thread-local memory that a program would have to find room
// for.
TEST(PreloadLibrary, HasNoConstructorAndNoThreadLocalMemory) {
  const std::string dynamic = output_of(CMAKE_READELF " --dynamic --wide " + kPreloadLibrary);
  for (const char* tag :
       {"(INIT)", "(FINI)", "(INIT_ARRAY)", "(FINI_ARRAY)", "(PREINIT_ARRAY)", "(TEXTREL)"}) {
    EXPECT_EQ(dynamic.find(tag), std::string::npos) << tag;
  }
  const std::string segments = output_of(CMAKE_READELF " --segments --wide " + kPreloadLibrary);
  EXPECT_EQ(segments.find(" TLS "), std::string::npos);
  EXPECT_EQ(segments.find("RWE"), std::string::npos);
}

// The newest version of the C library's symbols that the file refers to, as major * 1000 + minor.
int newest_glibc(const std::string& library) {
  std::istringstream versions(output_of(CMAKE_READELF " --version-info --wide " + library));
  int newest = 0;
  for (std::string word; versions >> word;) {
    int major = 0, minor = 0;
    if (std::sscanf(word.c_str(), "GLIBC_%d.%d", &major, &minor) == 2)
      newest = std::max(newest, major * 1000 + minor);
  }
  return newest;
}

TEST(PreloadLibrary, RunsOnAnOldCLibrary) {
  EXPECT_GT(newest_glibc(kPreloadLibrary), 0);
  EXPECT_LE(newest_glibc(kPreloadLibrary), 2028);
#if __GLIBC__ == 2 && __GLIBC_MINOR__ <= 36
  // Built on Debian 12; a newer distribution's headers may bring newer symbols in.
  if (!kSanitized) {
    EXPECT_LE(newest_glibc(CORE_LIBRARY), 2034);
  }
#endif
}

// --- other programs ---

struct Tool {
  std::string name;
  std::vector<std::string> command;
  // Its standard error is the same each time. (Chromium's log has the time in it.)
  bool repeats_errors = true;
};

void PrintTo(const Tool& tool, std::ostream* stream) {
  *stream << tool.name;
}

class PreloadTool : public ::testing::TestWithParam<Tool> {};

TEST_P(PreloadTool, ShowsNoDifferenceOnAMachineWithoutADriver) {
  if (!std::filesystem::exists(GetParam().command[0])) {
    GTEST_SKIP() << GetParam().command[0] << " is not installed here";
  }
  std::vector<std::string> command = GetParam().command;
  if (!GetParam().repeats_errors) {
    const std::vector<std::string> quiet = {"/bin/sh", "-c", "exec \"$@\" 2>/dev/null", "sh"};
    command.insert(command.begin(), quiet.begin(), quiet.end());
  }
  const Finished bare = run_program(command);
  const Finished run = run_program(command, {{"LD_PRELOAD", kPreloadLibrary}});

  EXPECT_EQ(run.exit_code, bare.exit_code);
  EXPECT_EQ(run.output, bare.output);
  EXPECT_NE(run.output, "");
}

INSTANTIATE_TEST_SUITE_P(
    Tools, PreloadTool,
    ::testing::Values(Tool{"Git", {"/usr/bin/git", "--version"}},
                      Tool{"GitFailing", {"/usr/bin/git", "-C", "/", "log"}},
                      Tool{"Gcc", {"/usr/bin/gcc", "-x", "c", "-fsyntax-only", "/dev/null", "-v"}},
                      Tool{"Python",
                           {"/usr/bin/python3", "-c",
                            "import ctypes, json, subprocess, sys, threading\n"
                            "print(json.dumps({'a': 1}), ctypes.CDLL(None).cuInit if False else 'ctypes')\n"
                            "print(subprocess.run(['/bin/echo', 'child'], capture_output=True).stdout)\n"
                            "sys.exit(7)"}},
                      Tool{"Bash",
                           {"/bin/bash", "-c", "for i in 1 2 3; do /bin/echo $i | /bin/cat; done; exit 5"}},
                      Tool{"Chromium",
                           {"/usr/bin/chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
                            "data:text/html,<p>forebay</p>"},
                           false}),
    [](const auto& info) { return info.param.name; });

class PreloadSanitized : public ::testing::TestWithParam<std::string> {};

TEST_P(PreloadSanitized, AProgramStartsAndEndsAsWithoutThePreload) {
  const std::string path = program("sanitized_program_" + GetParam());
  if (!std::filesystem::exists(path))
    GTEST_SKIP() << "the compiler has no such sanitizer, or this is its build";
  // The runtime of one wants to be the first of all libraries, and that of the other a certain place in
  // memory.
  const std::vector<std::string> command = {"/usr/bin/setarch", "-R", path, "a"};
  Process::Variables variables = {{"ASAN_OPTIONS", "verify_asan_link_order=0"}};
  const Finished bare = run_program(command, variables);
  if (bare.exit_code != 3) GTEST_SKIP() << "it does not run here: " << bare.output;
  variables.emplace("LD_PRELOAD", kPreloadLibrary);
  const Finished run = run_program(command, variables);

  EXPECT_EQ(run.exit_code, 3);
  EXPECT_EQ(run.output, "a and b\n");
}

INSTANTIATE_TEST_SUITE_P(Sanitizers, PreloadSanitized, ::testing::Values("address", "thread"),
                         [](const auto& info) { return info.param; });

double milliseconds_of(const std::vector<const char*>& environment) {
  const auto begin = std::chrono::steady_clock::now();
  const char* arguments[] = {"/bin/true", nullptr};
  pid_t child = 0;
  EXPECT_EQ(::posix_spawn(&child, arguments[0], nullptr, nullptr, const_cast<char* const*>(arguments),
                          const_cast<char* const*>(environment.data())),
            0);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

// In pairs, so that other load affects both alike; the median of the differences.
TEST(PreloadLibrary, CostsLessThanAMillisecondToStartWith) {
  const std::string preload = "LD_PRELOAD=" + kPreloadLibrary;
  std::vector<double> differences;
  for (int i = 0; i < 200; ++i) {
    const double without = milliseconds_of({"PATH=/bin", nullptr});
    const double with = milliseconds_of({"PATH=/bin", preload.c_str(), nullptr});
    differences.push_back(with - without);
  }
  std::sort(differences.begin(), differences.end());
  const double median = differences[differences.size() / 2];

  std::printf("%.3f ms more at the median of %zu pairs\n", median, differences.size());
  EXPECT_LT(median, 1.0);
}

}  // namespace
}  // namespace forebay::testing
