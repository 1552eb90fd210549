#include "runtime/command/replay/trace_replay.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "forebay/model_backend.h"
#include "forebay/units.h"
#include "runtime/command/replay/replay_report.h"
#include "runtime/command/traces/explanation.h"
#include "runtime/device/model/script.h"
#include "tests/allocator/arena/families.h"

namespace forebay {
namespace {

AllocationTrace parse(const std::string& text) {
  return parse_allocation_traces(text, "t").value().front();
}

std::unique_ptr<ModelBackend> device(std::size_t memory_bytes) {
  ModelBackendOptions options;
  options.memory_bytes = memory_bytes;
  return ModelBackend::create(options).value();
}

constexpr std::uint64_t kMiB = 1 << 20;

std::string line(int id, std::uint64_t mib, int stream = 0) {
  return "a " + std::to_string(id) + " " + std::to_string(mib * kMiB) + " " + std::to_string(stream) + "\n";
}

TEST(TraceReplay, ReportsWhatWasTakenForWhatWasAsked) {
  const AllocationTrace trace = parse(line(0, 10) + line(1, 6) + "f 0\n" + line(2, 3) + "f 1\nf 2\n");
  for (const ReplayTarget target : {ReplayTarget::kArena, ReplayTarget::kBaseline}) {
    const auto backend = device(1_GiB);
    const ReplayResult result = replay_trace(trace, *backend, target, {.passes = 4, .timed = true}).value();
    EXPECT_TRUE(result.completed);
    EXPECT_EQ(result.peak_requested_bytes, 16 * kMiB);
    EXPECT_GE(result.peak_physical_bytes, 16 * kMiB);
    EXPECT_GE(result.last_peak_physical_bytes, 16 * kMiB);
    EXPECT_DOUBLE_EQ(result.fragmentation(),
                     1 - 16.0 * kMiB / static_cast<double>(result.peak_physical_bytes));
    EXPECT_GT(result.first_pass_calls.total(), 0u);
    EXPECT_EQ(result.times.allocate.count, 12u);
    EXPECT_EQ(result.times.free.count, 12u);
    EXPECT_LT(result.times.allocate_off_mapping.count, 12u);  // The first needed memory.
    EXPECT_GE(result.times.allocate.p999_ns, result.times.allocate.p50_ns);
    ASSERT_TRUE(result.steady_calls.has_value());
    EXPECT_EQ(*result.steady_calls, 0);
    EXPECT_EQ(backend->live_handle_count(), 0u);  // Everything went back.
    EXPECT_EQ(backend->charged_bytes(), 0u);
  }
}

TEST(TraceReplay, BlocksThatAreLiveAtTheEndAreFreedBeforeTheNextPass) {
  const AllocationTrace trace = parse(line(0, 40) + line(1, 2) + "f 1\n");
  for (const ReplayTarget target : {ReplayTarget::kArena, ReplayTarget::kBaseline}) {
    const auto backend = device(64 * kMiB);  // Not enough for two passes at once.
    const ReplayResult result = replay_trace(trace, *backend, target, {.passes = 4, .timed = false}).value();
    EXPECT_TRUE(result.completed);
    EXPECT_EQ(backend->charged_bytes(), 0u);
  }
}

TEST(TraceReplay, AnArenaStitchesWhatTheBaselineCannotUse) {
  // Ten blocks of 20 MiB in a device of 200 MiB, every other one freed: 100 MiB are free in pieces of 20.
  std::string text;
  for (int i = 0; i < 10; ++i) text += line(i, 20);
  for (int i = 0; i < 10; i += 2) text += "f " + std::to_string(i) + "\n";
  // The pieces are split first, so that whole segments cannot go back.
  for (int i = 0; i < 5; ++i) text += line(20 + i, 2);
  const AllocationTrace trace = parse(text + line(40, 60));
  const auto arena = replay_trace(trace, *device(200_MiB), ReplayTarget::kArena, {.passes = 1}).value();
  EXPECT_TRUE(arena.completed) << arena.failure;
  const auto baseline =
      replay_trace(trace, *device(180_MiB + 12_MiB), ReplayTarget::kBaseline, {.passes = 1}).value();
  EXPECT_FALSE(baseline.completed);
}

// A job that leaves blocks behind: the first pass wastes memory that the last one does not.
TEST(TraceReplay, ThePeakOfTheLastPassIsItsOwn) {
  const AllocationTrace trace = testing::FamilyMaker(testing::Family::kLeaks, 1).make();
  const auto result =
      replay_trace(trace, *device(128_GiB), ReplayTarget::kArena, {.passes = 4, .timed = false}).value();
  EXPECT_TRUE(result.completed) << result.failure;
  EXPECT_LT(result.last_peak_physical_bytes, result.peak_physical_bytes);
  EXPECT_GE(result.last_peak_physical_bytes, result.peak_requested_bytes);
}

TEST(TraceReplay, SaysWhatStoppedIt) {
  const AllocationTrace trace = parse(line(0, 10) + line(1, 30) + "f 0\n");
  for (const ReplayTarget target : {ReplayTarget::kArena, ReplayTarget::kBaseline}) {
    const auto backend = device(32_MiB);
    const ReplayResult result = replay_trace(trace, *backend, target, {.passes = 3}).value();
    EXPECT_FALSE(result.completed);
    EXPECT_EQ(result.failure.rfind("event 2 of 3, 30.00 MiB: ", 0), 0u) << result.failure;
    EXPECT_FALSE(result.steady_calls.has_value());
    EXPECT_EQ(backend->charged_bytes(), 0u);
  }
}

TEST(TraceReplay, MinimumCapacityIsOneAtWhichItCompletesAndTheStepBelowIsNot) {
  std::string text;
  for (int i = 0; i < 30; ++i) text += line(i, 3 + static_cast<std::uint64_t>(i * 7 % 11), i % 3);
  for (int i = 0; i < 30; i += 2) text += "f " + std::to_string(i) + "\n";
  for (int i = 0; i < 5; ++i) text += line(100 + i, 17);
  const AllocationTrace trace = parse(text);
  for (const ReplayTarget target : {ReplayTarget::kArena, ReplayTarget::kBaseline}) {
    const std::optional<std::uint64_t> found = find_minimum_capacity(trace, target, {}).value();
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(*found % (2 * kMiB), 0u);
    EXPECT_GE(*found, trace.peak_requested_bytes());
    const auto completes = [&](std::uint64_t capacity) {
      return replay_trace(trace, *device(capacity), target, {.passes = 1, .timed = false}).value().completed;
    };
    EXPECT_TRUE(completes(*found));
    EXPECT_FALSE(completes(*found - 2 * kMiB));
  }
}

TEST(TraceReplay, AnEmptyTraceAndEmptyBlocksAreFine) {
  AllocationTrace nothing;
  EXPECT_TRUE(replay_trace(nothing, *device(1_GiB), ReplayTarget::kArena, {}).value().completed);
  EXPECT_EQ(replay_trace(nothing, *device(1_GiB), ReplayTarget::kBaseline, {}).value().fragmentation(), 0);
  const AllocationTrace zero = parse("a 0 0 0\na 1 0 0\nf 0\n");
  EXPECT_TRUE(replay_trace(zero, *device(1_GiB), ReplayTarget::kArena, {}).value().completed);
  EXPECT_EQ(find_minimum_capacity(zero, ReplayTarget::kArena, {}).value(), 2 * kMiB);
}

TEST(TraceReplay, AFullDeviceFailsCleanlyWhateverCallFails) {
  const AllocationTrace trace = parse(line(0, 10) + line(1, 6) + "f 0\n" + line(2, 30) + "f 1\nf 2\n");
  for (const HostCall call : {HostCall::kChunkCreate, HostCall::kMap, HostCall::kSetAccess}) {
    ModelBackendOptions options;
    options.memory_bytes = 1_GiB;
    ModelScript script;
    script.faults.push_back({.call = call, .nth = 1, .status = {StatusCode::kInternal, "as scripted"}});
    const auto backend = ScriptedModelBackend::create(options, script).value();
    const ReplayResult result = replay_trace(trace, *backend, ReplayTarget::kArena, {.passes = 2}).value();
    EXPECT_FALSE(result.completed);
    EXPECT_EQ(backend->charged_bytes(), 0u);
  }
}

TEST(TraceReplay, ClocksAreMeasured) {
  const double cycle_ns = measure_cycle_ns();
  EXPECT_GT(cycle_ns, 0.05);  // 20 GHz.
  EXPECT_LT(cycle_ns, 100);
  EXPECT_GE(measure_timer_ns(), 0);
}

// --- explain ---

Explanation explained(const AllocationTrace& trace) {
  Result<Explanation> explanation = explain(trace, {});
  EXPECT_TRUE(explanation.ok());
  return std::move(explanation).value();
}

AllocationTrace with_failure(std::uint64_t failed_mib, std::uint64_t reserved_mib,
                             std::uint64_t device_free_mib) {
  TraceBuilder builder;
  static_cast<void>(builder.allocate(1, 10 * kMiB, 0, builder.holder("train.py:3 forward")));
  static_cast<void>(builder.allocate(2, 20 * kMiB, 0, builder.holder("train.py:9 step")));
  static_cast<void>(builder.fail(failed_mib * kMiB, 0, 0, device_free_mib * kMiB));
  AllocationTrace trace = builder.finish();
  trace.name = "t";
  trace.format = "PyTorch memory snapshot";
  trace.origin = TraceOrigin::kPyTorch;
  trace.state = RecordedState{.reserved_bytes = reserved_mib * kMiB,
                              .live_bytes = 30 * kMiB,
                              .requested_bytes = 30 * kMiB,
                              .pending_bytes = 0,
                              .largest_free_bytes = 4 * kMiB};
  return trace;
}

TEST(Explain, TellsFragmentationFromShortage) {
  const AllocationTrace fragmented = with_failure(12, 40, 2);
  EXPECT_EQ(explained(fragmented).verdict, Verdict::kFragmentation);
  EXPECT_EQ(explained(fragmented).free_bytes, 12 * kMiB);
  EXPECT_EQ(explained(fragmented).capacity_bytes, 42 * kMiB);
  const AllocationTrace short_of = with_failure(13, 40, 2);
  EXPECT_EQ(explained(short_of).verdict, Verdict::kShortage);
  EXPECT_EQ(explained(short_of).short_bytes, 1 * kMiB);

  EXPECT_NE(explanation_text(fragmented, explained(fragmented)).find("FRAGMENTATION: 12.00 MiB failed"),
            std::string::npos);
  const std::string text = explanation_text(short_of, explained(short_of));
  EXPECT_NE(text.find("TRUE SHORTAGE: 13.00 MiB failed"), std::string::npos) << text;
  EXPECT_NE(text.find("is 1.00 MiB short"), std::string::npos) << text;
  EXPECT_NE(text.find("20.00 MiB in 1 block train.py:9 step"), std::string::npos) << text;
}

TEST(Explain, HoldersBeyondTheFourthAreAddedUp) {
  const AllocationTrace trace = with_failure(12, 40, 2);
  Explanation explanation = explained(trace);
  explanation.holdings.assign(4, {"one", 1 * kMiB, 1});
  EXPECT_EQ(explanation_text(trace, explanation).find("other"), std::string::npos);
  explanation.holdings.push_back({"two", 2 * kMiB, 3});
  explanation.holdings.push_back({"three", 3 * kMiB, 4});
  const std::string text = explanation_text(trace, explanation);
  EXPECT_NE(text.find("\n  5.00 MiB in 7 others\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("two"), std::string::npos) << text;
}

TEST(Explain, AdviceIsForTheAllocatorThatItWas) {
  AllocationTrace trace = with_failure(12, 40, 12);
  const auto text_of = [&](TraceOrigin origin) {
    trace.origin = origin;
    return explanation_text(trace, explained(trace));
  };
  const std::string torch = text_of(TraceOrigin::kPyTorch);
  const std::string run = text_of(TraceOrigin::kRun);
  const std::string observed = text_of(TraceOrigin::kRunObserved);
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };

  EXPECT_TRUE(has(torch, " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True comes nearest\n")) << torch;
  EXPECT_TRUE(has(run, "FRAGMENTATION: 12.00 MiB failed although 12.00 MiB were free")) << run;
  EXPECT_TRUE(has(run, "there were 42.00 MiB")) << run;
  EXPECT_TRUE(has(run, "Try:     the arena alone serves these requests in 42.00 MiB")) << run;
  EXPECT_TRUE(has(observed, "leave out --observe: the same requests fit under the arena in 42.00 MiB"))
      << observed;
  for (const std::string& text : {run, observed}) EXPECT_FALSE(has(text, "expandable")) << text;
}

// The blocks of the allocator are larger than the requests.
TEST(Explain, TheStateIsThatOfAFailureThatEndsTheRecording) {
  AllocationTrace trace = with_failure(12, 40, 2);
  trace.state->live_bytes = 31 * kMiB;

  const Explanation explanation = explained(trace);

  EXPECT_EQ(explanation.free_bytes, 11 * kMiB);
  EXPECT_EQ(explanation.verdict, Verdict::kShortage);
  EXPECT_EQ(explanation_text(trace, explanation).find("at the end of the recording"), std::string::npos);
}

TEST(Explain, WhatWasFreedAfterTheFailureDoesNotCountAsFreeThen) {
  TraceBuilder builder;
  ASSERT_EQ(builder.allocate(1, 30 * kMiB, 0), TraceBuilder::Outcome::kTaken);
  ASSERT_EQ(builder.fail(20 * kMiB, 0, 0, 2 * kMiB), TraceBuilder::Outcome::kTaken);
  ASSERT_EQ(builder.free(1), TraceBuilder::Outcome::kTaken);
  AllocationTrace trace = builder.finish();
  trace.state = RecordedState{.reserved_bytes = 40 * kMiB, .live_bytes = 0};
  const Explanation explanation = explained(trace);
  EXPECT_EQ(explanation.verdict, Verdict::kShortage);
  EXPECT_EQ(explanation.free_bytes, 12 * kMiB);
  EXPECT_NE(explanation_text(trace, explanation).find("at the end of the recording"), std::string::npos);
}

TEST(Explain, WithoutFiguresOfTheAllocatorThePastDecides) {
  // 40 MiB were live once, so 10 + 20 would have fitted.
  const std::string header = "Thread,Time,Action,Pointer,Size,Stream\n";
  const AllocationTrace before = parse(header +
                                       "1,1,allocate,0xa0,10485760,0\n1,1,allocate,0xb0,31457280,0\n"
                                       "1,1,free,0xb0,31457280,0\n1,1,allocate failure,0x0,20971520,0\n");
  EXPECT_EQ(explained(before).verdict, Verdict::kFragmentation);
  const AllocationTrace never =
      parse(header + "1,1,allocate,0xa0,10485760,0\n1,1,allocate failure,0x0,20971520,0\n");
  EXPECT_EQ(explained(never).verdict, Verdict::kUnclear);
  EXPECT_NE(explanation_text(never, explained(never)).find("exceeds 30.00 MiB"), std::string::npos);
}

TEST(Explain, WithoutAFailureThePeakIsShown) {
  const AllocationTrace trace = parse(line(0, 10) + line(1, 6) + line(2, 6) + "f 0\n" + line(3, 1));
  const Explanation explanation = explained(trace);
  EXPECT_EQ(explanation.verdict, Verdict::kNoFailure);
  EXPECT_EQ(explanation.live_bytes, 22 * kMiB);
  ASSERT_EQ(explanation.holdings.size(), 2u);
  EXPECT_EQ(explanation.holdings[0].bytes, 12 * kMiB);  // Two of 6 MiB.
  EXPECT_EQ(explanation.holdings[0].count, 2u);
  ASSERT_TRUE(explanation.arena_capacity_bytes.has_value());
  EXPECT_EQ(explanation.arena_capacity_bytes, 22 * kMiB);
}

CallTimes times_from(std::uint64_t first) {
  const auto ns = static_cast<double>(first);
  return {
      .count = first, .p50_ns = ns + 0.14, .p99_ns = ns + 1.16, .p999_ns = ns + 2.2, .worst_ns = ns + 3.3};
}

// No two figures are equal.
ReplayFigures printed_figures(std::uint64_t first) {
  ReplayFigures figures;
  ReplayResult& result = figures.result;
  result.completed = true;
  result.peak_requested_bytes = (first + 90) * kMiB;
  result.peak_physical_bytes = (first + 100) * kMiB;
  result.last_peak_physical_bytes = (first + 120) * kMiB;
  result.first_pass_calls = {.create = first + 1,
                             .destroy = first + 2,
                             .map = first + 3,
                             .unmap = first + 4,
                             .set_access = first + 5,
                             .alloc = first + 6,
                             .free = first + 7};
  result.steady_calls = 8.04;
  result.steady_chunks_moved = 9.96;
  result.retry_count = first + 10;
  result.pass_calls = {first + 11, first + 12, first + 13, first + 14, first + 15, first + 16};
  result.enough_mappings = first + 17;
  result.times = {.allocate = times_from(first + 100),
                  .free = times_from(first + 110),
                  .allocate_own = times_from(first + 120),
                  .free_own = times_from(first + 130),
                  .allocate_off_mapping = times_from(first + 140),
                  .free_off_mapping = times_from(first + 150),
                  .allocate_mapping = times_from(first + 160)};
  figures.searched_minimum = true;
  figures.minimum_capacity_bytes = (first + 110) * kMiB;
  return figures;
}

ReplayReport printed_replay() {
  ReplayReport report;
  report.trace = "a.trace";
  report.format = "text";
  report.event_count = 21;
  report.warm_count = 22;
  report.stream_count = 23;
  report.notes = {"a note"};
  report.device = "model";
  report.memory_bytes = 24 * kMiB;
  report.passes = 6;
  report.mappings_max = 25;
  report.cycle_ns = 0.5;
  report.arena = printed_figures(1000);
  report.arena.result.last_dropped_mappings = 26;
  report.baseline = printed_figures(2000);
  report.glibc = printed_figures(3000).result.times;
  return report;
}

TEST(ReplayReport, EachFigureStandsInItsColumn) {
  EXPECT_EQ(replay_text({printed_replay()}),
            R"(Device: model, 24.00 MiB; 6 passes each, everything freed in between.

MEMORY                                  com- requested  physical  frag.   last  smallest   over
trace                          by       pl.        MiB       MiB      %      %       MiB      %
a.trace                        arena    yes       1090      1100   0.91   2.68      1110   1.83
                               baseline yes       2090      2100   0.48   1.42      2110   0.96

DRIVER CALLS                               first     pass                      steady    chunks
trace                          by         create      map    unmap   access     calls     moved
a.trace                        arena        2007     1003     2011     1005       8.0      10.0
                               baseline     4007     2003     4011     2005       8.0      10.0

DRIVER CALLS OF EACH PASS
a.trace                        arena       1011    1012    1013    1014 ...    1016
                               baseline    2011    2012    2013    2014 ...    2016

TIMES, ns (p50 p99 p99.9)                      | all calls               | off the mapping path
a.trace                        arena    malloc |   1100    1101     1102 |   1140    1141     1142
                                        alone  |   1120    1121     1122 |      -       -        -
                                        free   |   1110    1111     1112 |   1150    1151     1152
                               baseline malloc |   2100    2101     2102 |   2140    2141     2142
                                        alone  |   2120    2121     2122 |      -       -        -
                                        free   |   2110    2111     2112 |   2150    2151     2152
                               glibc    malloc |   3100    3101     3102 |   3140    3141     3142
                                        alone  |   3120    3121     3122 |      -       -        -
                                        free   |   3110    3111     3112 |   3150    3151     3152

One core cycle is 0.500 ns here (a loop of dependent multiplications, 3 cycles each). The timer's own cost is taken off. alone: malloc without the time in the device's calls.
The baseline is forebay's own caching allocator of the best-fit-with-coalescing kind, a yardstick; its create and unmap are blocks taken and given back.
a.trace: a note
a.trace: the last repeat made driver calls because the arena gave up 26 mappings to keep about 25; 1017 are enough (--mappings-max)
)");
}

TEST(ReplayReport, ANameFillsItsColumn) {
  ReplayReport report = printed_replay();
  for (const std::string name : {"abcdefghijklmnopqrstuvwxy.trac", "-abcdefghijklmnopqrstuvwxy.trac"}) {
    report.trace = name;
    const std::string text = replay_text({report});
    EXPECT_NE(text.find("\n" + (name.size() == 30 ? name : "...defghijklmnopqrstuvwxy.trac") + " arena "),
              std::string::npos)
        << text;
  }
}

TEST(ReplayReport, FiguresThatThereAreNotAreDashes) {
  ReplayReport report = printed_replay();
  report.passes = 5;
  report.arena.result.completed = false;
  report.arena.result.failure = "event 7: no memory";
  report.arena.result.steady_chunks_moved.reset();
  report.arena.result.pass_calls.pop_back();
  report.arena.result.times.allocate_mapping = report.arena.result.times.allocate_off_mapping = {};
  report.arena.minimum_capacity_bytes.reset();
  report.arena.result.last_dropped_mappings = 0;
  report.baseline.reset();
  report.glibc.reset();
  ReplayReport other = report;
  other.trace = "abcdefghijklmnopqrstuvwxyz.trac";
  other.arena.searched_minimum = false;
  other.arena.result.completed = true;
  other.notes.clear();
  EXPECT_EQ(replay_text({report, other}),
            R"(Device: model, 24.00 MiB; 5 passes each, everything freed in between.

MEMORY                                  com- requested  physical  frag.   last  smallest   over
trace                          by       pl.        MiB       MiB      %      %       MiB      %
a.trace                        arena    NO        1090      1100      -      -      none      -
...efghijklmnopqrstuvwxyz.trac arena    yes       1090      1100   0.91   2.68         -      -

DRIVER CALLS                               first     pass                      steady    chunks
trace                          by         create      map    unmap   access     calls     moved
a.trace                        arena        2007     1003     2011     1005         -         -
...efghijklmnopqrstuvwxyz.trac arena        2007     1003     2011     1005         -         -

DRIVER CALLS OF EACH PASS
a.trace                        arena       1011    1012    1013    1014    1015
...efghijklmnopqrstuvwxyz.trac arena       1011    1012    1013    1014    1015

TIMES, ns (p50 p99 p99.9)                      | all calls               | off the mapping path
a.trace                        arena    malloc |   1100    1101     1102 |      -       -        -
                                        free   |   1110    1111     1112 |   1150    1151     1152
...efghijklmnopqrstuvwxyz.trac arena    malloc |   1100    1101     1102 |      -       -        -
                                        free   |   1110    1111     1112 |   1150    1151     1152

One core cycle is 0.500 ns here (a loop of dependent multiplications, 3 cycles each). The timer's own cost is taken off. alone: malloc without the time in the device's calls.
a.trace: a note
a.trace: NOT COMPLETED by the arena: event 7: no memory
)");
}

// A single pass has no repeats, and two passes no last repeat in a steady state.
TEST(ReplayReport, FewPassesSayLess) {
  ReplayReport report = printed_replay();
  report.passes = 1;
  std::string text = replay_text({report});
  EXPECT_NE(text.find("; 1 pass each.\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("EACH PASS"), std::string::npos) << text;
  report.passes = 2;
  text = replay_text({report});
  EXPECT_NE(text.find("; 2 passes each, everything freed in between.\n"), std::string::npos) << text;
  EXPECT_NE(text.find("EACH PASS"), std::string::npos) << text;
  EXPECT_EQ(text.find("the last repeat made driver calls"), std::string::npos) << text;
  report.passes = 3;
  EXPECT_NE(replay_text({report}).find("the last repeat made driver calls"), std::string::npos);
  EXPECT_EQ(replay_text({}), "");
}

TEST(ReplayReport, EachFigureHasItsKeyInJson) {
  EXPECT_EQ(nlohmann::json::parse(replay_json({printed_replay()})), nlohmann::json::parse(R"(
[{"baseline": {"completed": true,
               "driver_calls": {"alloc": 2006, "create": 2001, "destroy": 2002, "free": 2007, "map": 2003,
                                "set_access": 2005, "unmap": 2004},
               "driver_calls_per_pass": [2011, 2012, 2013, 2014, 2015, 2016],
               "fragmentation": 0.004761904761904745, "fragmentation_last_repeat": 0.014150943396226467,
               "free_cycles": {"p50": 4220.3, "p99": 4222.3, "p999": 4224.4, "worst": 4226.6},
               "free_ns": {"p50": 2110.1, "p99": 2111.2, "p999": 2112.2, "worst": 2113.3},
               "free_off_mapping_cycles": {"p50": 4300.3, "p99": 4302.3, "p999": 4304.4, "worst": 4306.6},
               "free_off_mapping_ns": {"p50": 2150.1, "p99": 2151.2, "p999": 2152.2, "worst": 2153.3},
               "free_own_ns": {"p50": 2130.1, "p99": 2131.2, "p999": 2132.2, "worst": 2133.3},
               "label": "forebay's own caching allocator (best fit with coalescing), a yardstick",
               "malloc_cycles": {"p50": 4200.3, "p99": 4202.3, "p999": 4204.4, "worst": 4206.6},
               "malloc_miss_count": 2160,
               "malloc_miss_ns": {"p50": 2160.1, "p99": 2161.2, "p999": 2162.2, "worst": 2163.3},
               "malloc_ns": {"p50": 2100.1, "p99": 2101.2, "p999": 2102.2, "worst": 2103.3},
               "malloc_off_mapping_cycles": {"p50": 4280.3, "p99": 4282.3, "p999": 4284.4, "worst": 4286.6},
               "malloc_off_mapping_ns": {"p50": 2140.1, "p99": 2141.2, "p999": 2142.2, "worst": 2143.3},
               "malloc_own_ns": {"p50": 2120.1, "p99": 2121.2, "p999": 2122.2, "worst": 2123.3},
               "mappings_dropped_in_last_repeat": 0, "mappings_enough": 2017,
               "minimum_capacity_bytes": 2212495360, "minimum_capacity_overhead": 0.009569377990430672,
               "peak_physical_bytes": 2202009600, "peak_requested_bytes": 2191523840,
               "retries_after_synchronizing": 2010, "steady_chunks_moved_per_repeat": 10.0,
               "steady_driver_calls_per_repeat": 8.0},
  "completed": true, "cycle_ns": 0.5, "device": "model",
  "driver_calls": {"alloc": 1006, "create": 1001, "destroy": 1002, "free": 1007, "map": 1003,
                   "set_access": 1005, "unmap": 1004},
  "driver_calls_per_pass": [1011, 1012, 1013, 1014, 1015, 1016], "events": 21, "format": "text",
  "fragmentation": 0.009090909090909038, "fragmentation_last_repeat": 0.0267857142857143,
  "free_cycles": {"p50": 2220.3, "p99": 2222.3, "p999": 2224.4, "worst": 2226.6},
  "free_ns": {"p50": 1110.1, "p99": 1111.2, "p999": 1112.2, "worst": 1113.3},
  "free_off_mapping_cycles": {"p50": 2300.3, "p99": 2302.3, "p999": 2304.4, "worst": 2306.6},
  "free_off_mapping_ns": {"p50": 1150.1, "p99": 1151.2, "p999": 1152.2, "worst": 1153.3},
  "free_own_ns": {"p50": 1130.1, "p99": 1131.2, "p999": 1132.2, "worst": 1133.3},
  "glibc": {"free_cycles": {"p50": 6220.3, "p99": 6222.3, "p999": 6224.4, "worst": 6226.6},
            "free_ns": {"p50": 3110.1, "p99": 3111.2, "p999": 3112.2, "worst": 3113.3},
            "malloc_cycles": {"p50": 6200.3, "p99": 6202.3, "p999": 6204.4, "worst": 6206.6},
            "malloc_ns": {"p50": 3100.1, "p99": 3101.2, "p999": 3102.2, "worst": 3103.3}},
  "malloc_cycles": {"p50": 2200.3, "p99": 2202.3, "p999": 2204.4, "worst": 2206.6}, "malloc_miss_count": 1160,
  "malloc_miss_ns": {"p50": 1160.1, "p99": 1161.2, "p999": 1162.2, "worst": 1163.3},
  "malloc_ns": {"p50": 1100.1, "p99": 1101.2, "p999": 1102.2, "worst": 1103.3},
  "malloc_off_mapping_cycles": {"p50": 2280.3, "p99": 2282.3, "p999": 2284.4, "worst": 2286.6},
  "malloc_off_mapping_ns": {"p50": 1140.1, "p99": 1141.2, "p999": 1142.2, "worst": 1143.3},
  "malloc_own_ns": {"p50": 1120.1, "p99": 1121.2, "p999": 1122.2, "worst": 1123.3},
  "mappings_dropped_in_last_repeat": 26, "mappings_enough": 1017, "memory_bytes": 25165824,
  "minimum_capacity_bytes": 1163919360, "minimum_capacity_overhead": 0.0183486238532109, "notes": ["a note"],
  "peak_physical_bytes": 1153433600, "peak_requested_bytes": 1142947840, "repeats": 6,
  "retries_after_synchronizing": 1010, "steady_chunks_moved_per_repeat": 10.0,
  "steady_driver_calls_per_repeat": 8.0, "streams": 23, "trace": "a.trace", "warm_blocks": 22}])"));

  ReplayReport report = printed_replay();
  report.arena.result.completed = false;
  report.arena.result.failure = "no memory";
  report.arena.minimum_capacity_bytes.reset();
  report.arena.result.steady_calls.reset();
  report.baseline.reset();
  report.glibc.reset();
  const nlohmann::json one = nlohmann::json::parse(replay_json({report})).at(0);
  EXPECT_EQ(one.at("failure"), "no memory");
  for (const char* const key : {"fragmentation", "fragmentation_last_repeat", "minimum_capacity_bytes",
                                "steady_driver_calls_per_repeat", "glibc"})
    EXPECT_TRUE(one.at(key).is_null()) << key;
  EXPECT_FALSE(one.contains("minimum_capacity_overhead"));
  EXPECT_FALSE(one.contains("baseline"));
}

}  // namespace
}  // namespace forebay
