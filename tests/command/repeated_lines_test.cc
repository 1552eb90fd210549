#include "runtime/command/repeated_lines.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace forebay {
namespace {

using Lines = std::vector<std::string>;

std::vector<RepeatedLine> files(int count) {
  std::vector<RepeatedLine> lines;
  for (int i = 0; i < count; ++i) {
    const std::string path = "out/trace.process-" + std::to_string(9990 + i) + ".txt";
    lines.push_back({"trace: " + path, path});
  }
  return lines;
}

TEST(RepeatedLines, AFewStayAsTheyAre) {
  EXPECT_EQ(told_once(files(3)),
            (Lines{"trace: out/trace.process-9990.txt", "trace: out/trace.process-9991.txt",
                   "trace: out/trace.process-9992.txt"}));
  EXPECT_EQ(told_once({}), Lines());
}

TEST(RepeatedLines, ManyBecomeAPatternAndACount) {
  // Beyond 9999 too: numbers are not cut.
  EXPECT_EQ(told_once(files(30)), Lines{"trace: out/trace.process-*.txt (30 of these)"});
}

TEST(RepeatedLines, WhatIsTheSameInAllIsKept) {
  std::vector<RepeatedLine> lines;
  for (const char* name : {"12-aXbY", "12-aXZ", "13-Q", "140-aXbY"}) {
    const std::string path = "/tmp/records 1/" + std::string(name) + ".events";
    lines.push_back({"process 12: cannot read " + path + ": 4096 bytes, " + std::string(name).substr(0, 2) +
                         " read; leave it out",
                     path});
  }
  EXPECT_EQ(told_once(lines), Lines{"process 12: cannot read /tmp/records 1/*.events: 4096 bytes, * read; "
                                    "leave it out (4 of these)"});
}

TEST(RepeatedLines, OtherWordsAreAnotherKind) {
  std::vector<RepeatedLine> lines = files(4);
  lines.insert(lines.begin() + 1,
               {"cannot write out/trace.process-1.txt: No space left on device", "out/trace.process-1.txt"});
  EXPECT_EQ(told_once(lines), (Lines{"trace: out/trace.process-*.txt (4 of these)",
                                     "cannot write out/trace.process-1.txt: No space left on device"}));
}

TEST(RepeatedLines, TheSameFourTimesIsToldOnce) {
  const RepeatedLine line{"no room", ""};
  EXPECT_EQ(told_once({line, line, line, line}), Lines{"no room (4 of these)"});
}

// Their beginning and their end overlap.
TEST(RepeatedLines, NamesOfWhichOneIsInAnother) {
  std::vector<RepeatedLine> lines;
  for (const char* name : {"aa", "aaa", "a", "aaaa"}) lines.push_back({std::string("in ") + name, name});
  EXPECT_EQ(told_once(lines), Lines{"in a* (4 of these)"});
}

}  // namespace
}  // namespace forebay
