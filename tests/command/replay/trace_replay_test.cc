#include "runtime/command/replay/trace_replay.h"

#include <gtest/gtest.h>

#include <string>

#include "forebay/model_backend.h"
#include "forebay/units.h"
#include "runtime/command/traces/explanation.h"
#include "runtime/device/model/script.h"

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

}  // namespace
}  // namespace forebay
