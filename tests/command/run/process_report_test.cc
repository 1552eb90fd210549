// The reports of `forebay run`: each figure of a process and of a run in its place.

#include "runtime/command/run/process_report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "runtime/command/run/summary.h"

namespace forebay {
namespace {

// No two figures are equal.
ProcessReport reported_process(std::uint64_t first) {
  ProcessReport process;
  PreloadReport& record = process.record;
  record.mode = PreloadMode::kArena;
  record.process = static_cast<int>(first);
  record.parent = static_cast<int>(first) + 1;
  record.rank = static_cast<int>(first) + 2;
  record.program = "python\ttrain.py";
  for (std::size_t i = 0; i < kPreloadServerCount; ++i) {
    record.allocations[i] = first + 10 + i;
    record.bytes[i] = (first + 30 + i) << 10;
  }
  record.allocations[4] = 0;
  record.refused = first + 50;
  record.unknown_frees = first + 51;
  record.peak_live_bytes = (first + 52) << 10;
  record.problem = "a problem";
  record.around = "liba.so";
  ProcessHistory history;
  PreloadDeviceFigures& figures = history.figures;
  figures.device = 3;
  figures.capacity_bytes = (first + 60) << 20;
  figures.allocations = first + 61;
  figures.frees = first + 62;
  figures.refused = first + 63;
  figures.peak_requested_bytes = (first + 64) << 20;
  figures.peak_reserved_bytes = (first + 90) << 20;
  figures.requested_bytes = (first + 66) << 20;
  figures.arena_bytes = (first + 67) << 20;
  figures.elsewhere_bytes = (first + 68) << 20;
  history.dropped_events = first + 70;
  history.untold_blocks = first + 71;
  history.events.resize(5);
  history.peak_requested_bytes = (first + 63) << 20;
  history.untracked_count = first + 72;
  history.untracked_bytes = (first + 73) << 10;
  history.baseline_reserved_bytes = (first + 74) << 20;
  PageMoment moment;
  moment.name = kPeakMoment;
  moment.time_ns = 1'234'567'890;
  moment.asked_bytes = 77 << 10;
  moment.requested_bytes = 78 << 10;
  moment.reserved_bytes = 79 << 10;
  for (std::uint64_t i = 0; i < 14; ++i)
    moment.blocks.push_back({.address = i << 20, .bytes = std::uint64_t{512} << i, .stream = i % 3});
  moment.blocks.push_back({.address = 1, .bytes = 1000, .stream = 0});
  history.moments.push_back(moment);
  process.histories.push_back(history);
  return process;
}

RunStory reported_run() {
  RunStory story;
  story.command = "python train.py";
  story.state = "the command has ended with 137";
  story.processes = {reported_process(100), reported_process(200)};
  story.processes[0].histories[0].figures.refused = 0;
  story.processes[0].histories[0].baseline_reserved_bytes.reset();
  story.processes.push_back({});
  story.processes[2].record.process = 7;
  story.processes[2].record.program = "one";
  story.processes[2].record.allocations[0] = 1;
  story.processes[2].events_problem = "no events";
  story.processes.push_back({});
  story.processes[3].record.process = 8;
  story.processes[3].record.program = "two";
  story.left_out = {{"/r/x is left out", "/r/x"}};
  return story;
}

TEST(ProcessReport, EachFigureStandsInItsPlace) {
  EXPECT_EQ(process_text(reported_process(100)), R"(rank 102, process 100: python\ttrain.py
mode: arena
handled 110 of 912 allocations, 130.00 KiB of 1.18 MiB, in 1 process; at most 152.00 KiB live in one
not handled: 112, 132.00 KiB: captured into a graph, which owns them
not handled: 113, 133.00 KiB: from a memory pool of the program's own
not handled: 115, 135.00 KiB: pitched
not handled: 116, 136.00 KiB: managed memory
not handled: 117, 137.00 KiB: mapped by the program itself (cuMemCreate), as PyTorch's expandable segments are
not handled: 118, 138.00 KiB: where the arena could not serve
refused because memory ran out: 150
problem in a process: a problem
freed without a recorded allocation: 151; a library allocates around the hook
reached the driver past the hook: liba.so

cuda:3
  it could have had 160.00 MiB
  peak requested 164.00 MiB
  peak reserved  190.00 MiB
  fragmentation  13.7 % (26.00 MiB)
  the baseline caching allocator would have reserved 174.00 MiB for the same requests
  161 allocations, 162 frees, out of memory 163 times
  The bound of events was reached: the 170 oldest of the process were dropped. Peaks and counts are of the whole run; moments, holders and the baseline are of the 5 that are kept, whose own peak is 163.00 MiB.
  The table of live blocks was full 171 times: blocks that are older than the events may be missing.
  Mapped by the program itself (cuMemCreate): 172 allocations, 173.00 KiB in total; their frees are not seen, so no figure includes them.
  at the peak (1.235 s): 77.00 KiB more were asked for; 15 blocks of 78.00 KiB, 79.00 KiB held
    4.00 MiB in 1 block of 4.00 MiB to 8.00 MiB each, the default stream, the arena
    2.00 MiB in 1 block of 2.00 MiB to 4.00 MiB each, plain allocations, the arena
    1.00 MiB in 1 block of 1.00 MiB to 2.00 MiB each, threads' default streams, the arena
    512.00 KiB in 1 block of 512.00 KiB to 1.00 MiB each, the default stream, the arena
    256.00 KiB in 1 block of 256.00 KiB to 512.00 KiB each, plain allocations, the arena
    128.00 KiB in 1 block of 128.00 KiB to 256.00 KiB each, threads' default streams, the arena
    64.00 KiB in 1 block of 64.00 KiB to 128.00 KiB each, the default stream, the arena
    32.00 KiB in 1 block of 32.00 KiB to 64.00 KiB each, plain allocations, the arena
    16.00 KiB in 1 block of 16.00 KiB to 32.00 KiB each, threads' default streams, the arena
    8.00 KiB in 1 block of 8.00 KiB to 16.00 KiB each, the default stream, the arena
    4.00 KiB in 1 block of 4.00 KiB to 8.00 KiB each, plain allocations, the arena
    2.00 KiB in 1 block of 2.00 KiB to 4.00 KiB each, threads' default streams, the arena
    and 2 smaller groups
)");

  ProcessReport plain = reported_process(100);
  plain.record.rank = -1;
  plain.events_problem = "no events";
  ProcessHistory& history = plain.histories[0];
  history.figures.capacity_bytes = 0;
  history.figures.peak_requested_bytes = history.figures.peak_reserved_bytes = 0;
  history.baseline_reserved_bytes.reset();
  history.dropped_events = history.untold_blocks = history.untracked_count = 0;
  history.moments.clear();
  const std::string text = process_text(plain);
  EXPECT_EQ(text.substr(text.find("\ncuda:3")), R"(
cuda:3
  peak requested 0 B
  peak reserved  0 B
  fragmentation  0.0 % (0 B)
  161 allocations, 162 frees, out of memory 163 times
)");
  EXPECT_EQ(text.find("process 100: python\\ttrain.py\nmode: arena\n"), 0u) << text;
  EXPECT_NE(text.find("\nno events\n"), std::string::npos) << text;
}

TEST(ProcessReport, EachFigureHasItsKeyInJson) {
  nlohmann::json json = nlohmann::json::parse(process_json(reported_process(100)));
  nlohmann::json& holders = json.at("devices").at(0).at("moments").at(0).at("holders");
  EXPECT_EQ(holders.size(), 14u) << "two blocks are of one size";
  holders.erase(holders.begin() + 1, holders.end());
  EXPECT_EQ(json, nlohmann::json::parse(R"(
{"devices": [{"allocations": 161, "baseline_reserved_bytes": 182452224, "capacity_bytes": 167772160,
              "device": 3, "events": {"dropped_by_process": 170, "kept": 5},
              "fragmentation": 0.1368421052631579, "frees": 162, "held_bytes": 351272960,
              "live_requested_bytes": 174063616,
              "moments": [{"asked_bytes": 78848, "block_count": 15,
                           "holders": [{"block_count": 1, "bytes": 4194304, "least_block_bytes": 4194304,
                                        "server": "the arena", "stream": 1, "stream_name": "the default stream"}],
                           "name": "at the peak", "requested_bytes": 79872, "reserved_bytes": 80896,
                           "time_ns": 1234567890}],
              "out_of_memory": 163, "peak_requested_bytes": 171966464,
              "peak_requested_bytes_of_kept_events": 170917888, "peak_reserved_bytes": 199229440,
              "untracked": {"bytes": 177152, "count": 172}}],
 "events_problem": "", "mode": "arena", "parent": 101, "problem": "a problem", "process": 100,
 "program": "python\ttrain.py", "rank": 102, "reached_the_driver_past_the_hook": "liba.so", "refused": 150,
 "served": [{"allocations": 110, "by": "the arena", "bytes": 133120},
            {"allocations": 111, "by": "only observed", "bytes": 134144},
            {"allocations": 112, "by": "captured into a graph, which owns them", "bytes": 135168},
            {"allocations": 113, "by": "from a memory pool of the program's own", "bytes": 136192},
            {"allocations": 115, "by": "pitched", "bytes": 138240},
            {"allocations": 116, "by": "managed memory", "bytes": 139264},
            {"allocations": 117,
             "by": "mapped by the program itself (cuMemCreate), as PyTorch's expandable segments are",
             "bytes": 140288},
            {"allocations": 118, "by": "where the arena could not serve", "bytes": 141312}],
 "unknown_frees": 151})"));
}

TEST(ProcessReport, TheWorstOfARunStandsFirst) {
  EXPECT_EQ(story_text(reported_run()), R"(python train.py
the command has ended with 137
handled 321 of 2625 allocations, 360.00 KiB of 3.23 MiB, in 4 processes; at most 252.00 KiB live in one
not handled: 324, 364.00 KiB: captured into a graph, which owns them
not handled: 326, 366.00 KiB: from a memory pool of the program's own
not handled: 330, 370.00 KiB: pitched
not handled: 332, 372.00 KiB: managed memory
not handled: 334, 374.00 KiB: mapped by the program itself (cuMemCreate), as PyTorch's expandable segments are
not handled: 336, 376.00 KiB: where the arena could not serve
refused because memory ran out: 400
problem in a process: a problem
freed without a recorded allocation: 402; a library allocates around the hook
reached the driver past the hook: liba.so
process 7: no events
/r/x is left out

the worst: rank 202, process 200, cuda:3: peak requested 264.00 MiB, reserved 290.00 MiB, fragmentation 9.0 %, out of memory 263 times

all, the worst first:
  rank 202, process 200, cuda:3: requested 264.00 MiB, reserved 290.00 MiB, fragmentation 9.0 %, out of memory 263, baseline 274.00 MiB: python\ttrain.py
  rank 102, process 100, cuda:3: requested 164.00 MiB, reserved 190.00 MiB, fragmentation 13.7 %, out of memory 0: python\ttrain.py
  process 7: 1 allocation; nothing more is known of them: one
  process 8: nothing was allocated: two
)");
  EXPECT_EQ(worst_line(reported_run()),
            "rank 202, process 200, cuda:3: peak requested 264.00 MiB, reserved 290.00 MiB, fragmentation "
            "9.0 %, out of memory 263 times");
  EXPECT_EQ(worst_line({}), "");
}

TEST(ProcessReport, ARunHasItsWorstProcessInJson) {
  RunStory story = reported_run();
  story.not_written = {{"cannot write x", "x"}};
  nlohmann::json json = nlohmann::json::parse(story_json(story));
  EXPECT_EQ(json.at("processes").size(), 4u);
  EXPECT_EQ(json.at("processes").at(1), nlohmann::json::parse(process_json(story.processes[1])));
  json.erase("processes");
  json.at("lines") = json.at("lines").size();
  EXPECT_EQ(
      json.dump(),
      R"({"command":"python train.py","lines":14,"mode":"arena","state":"the command has ended with 137, )"
      R"(and not all of this report could be written","worst":{"device":3,"process":200,"rank":202}})");
}

TEST(RunSummary, ObservedAllocationsAreCalledThat) {
  const std::vector<PreloadReport> records = {reported_process(100).record, reported_process(200).record};
  EXPECT_EQ(run_summary(PreloadMode::kObserve, records).front(),
            "observed 2624 allocations, 3.23 MiB, in 2 processes");
  EXPECT_EQ(
      run_summary(PreloadMode::kArena, {records[0]}).front(),
      "handled 110 of 912 allocations, 130.00 KiB of 1.18 MiB, in 1 process; at most 152.00 KiB live in one");
  EXPECT_EQ(run_summary(PreloadMode::kArena, {}).front().find("handled 0 of 0 allocations: no process of"),
            0u);
}

}  // namespace
}  // namespace forebay
