// Files that `forebay run` writes over.
#include "runtime/command/run/output_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "tests/support/temporary_directory.h"

namespace forebay {
namespace {

TEST(OutputFile, KeepsNothingOfALongerTextThatItOverwrites) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "summary.txt";
  std::ofstream(path) << "a longer text\n";

  EXPECT_TRUE(overwrite_run_text(path, "short\n").ok());

  std::ostringstream found;
  found << std::ifstream(path).rdbuf();
  EXPECT_EQ(found.str(), "short\n");
}

}  // namespace
}  // namespace forebay
