// Text traces and RMM logs, and how files are told apart.
#include "runtime/command/traces/allocation_trace.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/process.h"

namespace forebay {
namespace {

AllocationTrace parse(const std::string& text) {
  Result<std::vector<AllocationTrace>> traces = parse_allocation_traces(text, "t");
  EXPECT_TRUE(traces.ok()) << traces.status().to_string();
  if (!traces.ok()) return {};
  EXPECT_EQ(traces.value().size(), 1u);
  return std::move(traces.value().front());
}

std::string refusal(const std::string& text) {
  const Result<std::vector<AllocationTrace>> traces = parse_allocation_traces(text, "t");
  EXPECT_FALSE(traces.ok());
  if (traces.ok()) return "";
  EXPECT_EQ(traces.status().code(), StatusCode::kInvalidArgument);
  return traces.status().message();
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

TEST(TextTrace, KeepsOrderSizesStreamsAndWarmBlocks) {
  const AllocationTrace trace = parse("# a remark\na 5 100 7\n# warm\r\n\na 6 50 9\r\nf 5\na 5 30 7\nf 6");
  EXPECT_EQ(trace.format, "text trace");
  EXPECT_EQ(trace.warm_event_count, 1u);
  ASSERT_EQ(trace.events.size(), 5u);
  ASSERT_EQ(trace.blocks.size(), 3u);  // An id may be used again once it is free.
  EXPECT_EQ(trace.stream_count, 2u);
  EXPECT_EQ(trace.blocks[0].bytes, 100u);
  EXPECT_EQ(trace.blocks[1].stream, 1u);
  EXPECT_TRUE(trace.events[2].is_free);
  EXPECT_EQ(trace.events[2].block, 0u);
  EXPECT_EQ(trace.events[2].stream, 0u);
  EXPECT_EQ(trace.peak_requested_bytes(), 150u);
  EXPECT_EQ(trace.peak_event(), 1u);
}

TEST(TextTrace, NamesTheLineOfWhatMakesNoSense) {
  expect_contains(refusal("a 0 1 0\na 1 -5 0\n"), "line 2: the size in bytes is '-5'");
  expect_contains(refusal("a 0 1 0\na x 5 0\n"), "line 2: the id is 'x'");
  expect_contains(refusal("a 0 1 0\na 1 5 99999999999999999999\n"), "line 2: the stream is");
  expect_contains(refusal("a 0 1 0\na 0 5 0\n"), "line 2: block 0 is live already");
  expect_contains(refusal("a 0 1 0\nf 0\nf 0\n"), "line 3: block 0 is freed, but no such block is live");
  expect_contains(refusal("a 0 1 0\na 1 5\n"), "line 2: found 'a 1 5'");
  expect_contains(refusal("a 0 1 0\na 1 5 0 0\n"), "line 2: found");
  expect_contains(refusal("a 0 1 0\nfree 0\n"), "line 2: found 'free 0'");
  expect_contains(refusal("a 0 1 0\nf 0\n# warm\n"), "line 3: a block is freed before");
  expect_contains(refusal("a 0 1 0\n# warm\n# warm\n"), "line 3: '# warm' for the second time");
  expect_contains(refusal("a 0 18446744073709551615 0\n"), "line 1");
  expect_contains(refusal("a 0 70368744177664 0\na 1 1 0\n"), "line 2");  // Together more than the limit.
}

TEST(TextTrace, BlocksThatAreFreedLeaveRoomForOthers) {
  EXPECT_EQ(parse("a 0 70368744177664 0\nf 0\na 1 1 0\n").events.size(), 3u);
}

TEST(TextTrace, ReadsAMillionLines) {
  std::string text;
  for (int i = 0; i < 500'000; ++i) {
    text += "a " + std::to_string(i) + " 4096 0\n";
    text += "f " + std::to_string(i) + "\n";
  }
  const AllocationTrace trace = parse(text);
  EXPECT_EQ(trace.events.size(), 1'000'000u);
  EXPECT_EQ(trace.peak_requested_bytes(), 4096u);
}

TEST(TextTrace, TakesStreamsBeyondTheLimitAsOne) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += "a " + std::to_string(i) + " 1 " + std::to_string(1000 + i) + "\n";
  const AllocationTrace trace = parse(text);
  EXPECT_EQ(trace.stream_count, kTraceStreamLimit);
  EXPECT_EQ(trace.blocks.back().stream, kTraceStreamLimit - 1);
  ASSERT_EQ(trace.notes.size(), 1u);
  expect_contains(trace.notes[0], "300 streams");
}

constexpr const char* kHeader = "Thread,Time,Action,Pointer,Size,Stream\n";

TEST(RmmLog, PlaysWhatTheLogSays) {
  const AllocationTrace trace = parse(std::string(kHeader) +
                                      "1,10:00:00:000001,allocate,0x7f00,1000,0x0\n"
                                      "1,10:00:00:000002,allocate,0x8f00,24,0x5\n"
                                      "1,10:00:00:000003,free,0x7f00,1000,0x5\n");
  EXPECT_EQ(trace.format, "RMM log");
  ASSERT_EQ(trace.events.size(), 3u);
  EXPECT_EQ(trace.blocks[0].bytes, 1000u);
  EXPECT_EQ(trace.stream_count, 2u);
  EXPECT_EQ(trace.events[2].stream, 1u);  // Freed on another stream than it was allocated on.
  EXPECT_EQ(trace.peak_requested_bytes(), 1024u);
  EXPECT_TRUE(trace.notes.empty());
}

TEST(RmmLog, TakesOddLinesAndCountsThem) {
  const AllocationTrace trace = parse(std::string(kHeader) +
                                      "1,1,free,0xb0,20,0\n"  // Allocated before the log began.
                                      "1,1,free,0xa0,10,0\n"
                                      "1,1,free,0xa0,10,0\n"     // Twice.
                                      "1,1,allocate,0xc0,5,0\n"  // Its free was lost.
                                      "1,1,allocate,0xc0,6,0\n"
                                      "1,1,free,0x0,7,0\n"
                                      "1,1,allocate,(nil),0,0\n"
                                      "1,1,allocate failure,(nil),99,0\n");
  EXPECT_EQ(trace.warm_event_count, 2u);
  EXPECT_EQ(trace.blocks[0].bytes, 10u);  // In address order.
  ASSERT_EQ(trace.notes.size(), 5u);
  EXPECT_EQ(trace.notes[0],
            "2 blocks freed without having been allocated: taken as live before the log began");
  EXPECT_EQ(trace.notes[1], "2 lines about a null pointer: left out");
  ASSERT_TRUE(trace.failure.has_value());
  EXPECT_EQ(trace.failure->bytes, 99u);
  EXPECT_TRUE(trace.blocks.back().failed);
}

TEST(RmmLog, NamesTheLineOfWhatMakesNoSense) {
  const std::string good = std::string(kHeader) + "1,1,allocate,0xa0,10,0\n";
  expect_contains(refusal(good + "1,1,allocate,0xb0,-10,0\n"), "line 3: the size is '-10'");
  expect_contains(refusal(good + "1,1,allocate,zz,10,0\n"), "line 3: the pointer is 'zz'");
  expect_contains(refusal(good + "1,1,reserve,0xb0,10,0\n"), "line 3: the action is 'reserve'");
  expect_contains(refusal(good + "1,1,free,0xa0\n"), "line 3: found 4 of 6 fields");
  expect_contains(refusal(good + "1,1,free,0xa0,10,red\n"), "line 3: the stream is 'red'");
}

TEST(AllocationTraceFiles, SayWhatTheyAreWhenTheyAreNoTrace) {
  expect_contains(refusal(""), "it is empty");
  expect_contains(refusal("PK\x03\x04"), "zip archive");
  expect_contains(refusal("\x1f\x8b\x08"), "compressed");
  expect_contains(refusal("{\"a\": 1}"), "looks like JSON");
  expect_contains(refusal("hello\n"), "it begins with 'hello'");
  expect_contains(refusal("h\x01llo\n"), "it begins with 'h?llo'");
  const std::string most(40, 'x');
  expect_contains(refusal(most + "\n"), "it begins with '" + most + "'");
  expect_contains(refusal(most + "x\n"), "it begins with '" + most + "...'");
  expect_contains(refusal("\x80\x06N."), "a pickle of protocol 6, and protocols 2 to 5 are read");
  expect_contains(refusal("(dp0\nVsegments\np1\n(lp2\nsVdevice_traces\np3\n(lp4\ns."),
                  "a pickle of protocol 0, and protocols 2 to 5 are read");
  expect_contains(refusal("(lp0\n(dp1\nVaddress\np2\nI1\nsa."), "a pickle of protocol 0");
  expect_contains(refusal(std::string("]q\0}q\1.", 6)), "a pickle of protocol 1");
  expect_contains(refusal("}q"), "does pickle.dump(snapshot, file, protocol=4)");
  expect_contains(refusal("(dpx"), "it begins with '(dpx'");
}

TEST(AllocationTraceFiles, ALogOfNothingIsNoTrace) {
  expect_contains(refusal(kHeader), "there is nothing to replay");
  expect_contains(refusal(std::string(kHeader) + "1,1,allocate,(nil),0,0\n"), "there is nothing to replay");
}

TEST(AllocationTraceFiles, OnesThatAreTooLargeAreRefusedUnreadWithTheirSize) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "large.trace";
  std::ofstream(path) << "a 0 1 0\n";
  std::filesystem::resize_file(path, kTraceFileLimit + 512 * 1024 * 1024);  // Takes no room on the disk.
  const Status status = read_allocation_traces(path).status();
  EXPECT_EQ(status.code(), StatusCode::kIoError);
  expect_contains(status.message(), "it has 2.50 GiB, and at most 2.00 GiB are read");
}

TEST(AllocationTraceFiles, MissingOnesAreNamed) {
  const testing::TemporaryDirectory directory;
  const Status missing = read_allocation_traces(directory / "none.trace").status();
  EXPECT_EQ(missing.code(), StatusCode::kIoError);
  expect_contains(missing.message(), "none.trace");
  EXPECT_EQ(read_allocation_traces(directory.path()).status().code(), StatusCode::kIoError);
}

// It has no end.
TEST(AllocationTraceFiles, DevicesAreRefused) {
  const Status status = read_allocation_traces("/dev/zero").status();
  EXPECT_EQ(status.code(), StatusCode::kIoError);
  expect_contains(status.message(), "it is a device; give a file or a pipe");
}

}  // namespace
}  // namespace forebay
