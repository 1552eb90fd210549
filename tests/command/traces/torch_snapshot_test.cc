#include "runtime/command/traces/torch_snapshot.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <string>

#include "forebay/units.h"
#include "runtime/command/traces/explanation.h"
#include "tests/support/pickle_writer.h"

namespace forebay {
namespace {

using testing::PickleWriter;

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

struct Entry {
  const char* action;
  std::int64_t address;
  std::int64_t bytes;
  std::int64_t stream = 0;
};

void write_events(PickleWriter& writer, const std::vector<Entry>& events) {
  writer.begin_list();
  for (const Entry& event : events) {
    writer.begin_dict()
        .entry("action", event.action)
        .entry("size", event.bytes)
        .entry("stream", event.stream);
    writer.entry(std::string_view(event.action) == "oom" ? "device_free" : "addr", event.address).end_dict();
  }
  writer.end_list();
}

std::string snapshot_of(const std::vector<Entry>& events) {
  PickleWriter writer;
  writer.begin_dict().text("segments").empty_list().text("device_traces").begin_list();
  write_events(writer, events);
  return writer.end_list().end_dict().finish();
}

AllocationTrace parse(const std::string& text) {
  Result<std::vector<AllocationTrace>> traces = parse_torch_snapshot(text, "t");
  EXPECT_TRUE(traces.ok()) << traces.status().to_string();
  if (!traces.ok() || traces.value().empty()) return {};
  return std::move(traces.value().front());
}

std::string refusal(const std::string& text) {
  const Result<std::vector<AllocationTrace>> traces = parse_torch_snapshot(text, "t");
  EXPECT_FALSE(traces.ok());
  return traces.ok() ? "" : traces.status().message();
}

TEST(TorchSnapshot, AFreeCountsWhenItCompletes) {
  const AllocationTrace trace = parse(snapshot_of({{"alloc", 0x1000, 10},
                                                   {"free_requested", 0x1000, 10},
                                                   {"alloc", 0x2000, 20},
                                                   {"free_completed", 0x1000, 10}}));
  ASSERT_EQ(trace.events.size(), 3u);
  EXPECT_TRUE(trace.events[2].is_free);
  EXPECT_EQ(trace.peak_requested_bytes(), 30u);
}

TEST(TorchSnapshot, WithoutCompletionsTheRequestCounts) {
  const AllocationTrace trace =
      parse(snapshot_of({{"alloc", 0x1000, 10}, {"free_requested", 0x1000, 10}, {"alloc", 0x2000, 20}}));
  ASSERT_EQ(trace.events.size(), 3u);
  EXPECT_EQ(trace.peak_requested_bytes(), 20u);
}

TEST(TorchSnapshot, WhatIsFreedUnseenWasLiveBefore) {
  const AllocationTrace trace = parse(snapshot_of({{"segment_alloc", 0x1000, 4096},
                                                   {"free_completed", 0x3000, 30, 5},
                                                   {"free_completed", 0x2000, 20},
                                                   {"alloc", 0x2000, 7}}));
  EXPECT_EQ(trace.warm_event_count, 2u);
  EXPECT_EQ(trace.blocks[0].bytes, 20u);  // In address order.
  EXPECT_EQ(trace.blocks[1].bytes, 30u);
  EXPECT_EQ(trace.stream_count, 2u);
  EXPECT_EQ(trace.events.size(), 5u);
}

TEST(TorchSnapshot, OddHistoriesAreTakenAndCounted) {
  const AllocationTrace trace = parse(snapshot_of({{"alloc", 0x1000, 10},
                                                   {"alloc", 0x1000, 12},
                                                   {"free_completed", 0x1000, 12},
                                                   {"free_completed", 0x1000, 12},
                                                   {"dance", 0x1000, 12},
                                                   {"oom", 5, 99},
                                                   {"oom", 5, std::uint64_t{1} << 50}}));
  EXPECT_EQ(trace.notes.size(), 5u);
  ASSERT_TRUE(trace.failure.has_value());
  EXPECT_EQ(trace.failure->bytes, 99u);
  EXPECT_EQ(trace.failure->device_free_bytes, 5u);
}

TEST(TorchSnapshot, DevicesAreTracesOfTheirOwn) {
  PickleWriter writer;
  writer.begin_dict().text("segments").empty_list().text("device_traces").begin_list();
  write_events(writer, {{"alloc", 0x1000, 10}});
  writer.empty_list();
  write_events(writer, {{"alloc", 0x1000, 30}});
  const auto traces = parse_torch_snapshot(writer.end_list().end_dict().finish(), "t");
  ASSERT_TRUE(traces.ok());
  ASSERT_EQ(traces.value().size(), 2u);
  EXPECT_EQ(traces.value()[0].name, "t");
  EXPECT_EQ(traces.value()[1].name, "t device 2");
  EXPECT_EQ(traces.value()[1].peak_requested_bytes(), 30u);
}

struct Frame {
  const char* file;
  const char* function;
  std::int64_t line = 7;
};

// The holder of a block that was requested with this stack, the innermost frame first.
std::string holder_of(const std::vector<Frame>& frames) {
  PickleWriter writer;
  writer.begin_dict().text("segments").empty_list().text("device_traces").begin_list().begin_list();
  writer.begin_dict()
      .entry("action", "alloc")
      .entry("size", 10)
      .entry("addr", 0x1000)
      .text("frames")
      .begin_list();
  for (const Frame& frame : frames) {
    writer.begin_dict()
        .entry("filename", frame.file)
        .entry("name", frame.function)
        .entry("line", frame.line)
        .end_dict();
  }
  writer.end_list().end_dict().end_list().end_list().end_dict();
  const AllocationTrace trace = parse(writer.finish());
  return trace.blocks.empty() ? "" : trace.holders[trace.blocks[0].holder];
}

TEST(TorchSnapshot, ABlockIsNamedAfterTheInnermostFrameOfTheUser) {
  EXPECT_EQ(holder_of({{"??", "torch::unwind::unwind()"},
                       {"/v/lib/python3.11/site-packages/torch/nn/modules/linear.py", "forward"},
                       {"/v/lib/python3.11/contextlib.py", "inner"},
                       {"/home/u/model.py", "forward"},
                       {"/home/u/train.py", "main"}}),
            "model.py:7 forward");
  EXPECT_EQ(holder_of({{"/v/lib/python3.11/site-packages/transformers/models/llama.py", "forward"}}),
            "transformers/models/llama.py:7 forward");
  EXPECT_EQ(
      holder_of({{"/usr/lib/python3/dist-packages/torch/_tensor.py", "backward"}, {"<stdin>", "<module>"}}),
      "<stdin>:7 <module>");
}

TEST(TorchSnapshot, PathsOfWindowsAreUnderstood) {
  EXPECT_EQ(holder_of({{R"(C:\v\Lib\site-packages\torch\nn\functional.py)", "linear"},
                       {R"(C:\Users\u\train.py)", "step"}}),
            "train.py:7 step");
  EXPECT_EQ(holder_of({{R"(C:\v\Lib\site-packages\torch\nn\functional.py)", "linear"}}),
            R"(torch\nn\functional.py:7 linear)");
}

TEST(TorchSnapshot, NamesOfBlocksArePrintable) {
  EXPECT_EQ(holder_of({{"/home/u/m\xc3\xb6.py", "a\tb\x7f"}}), "m??.py:7 a?b?");
  EXPECT_EQ(holder_of({{"/home/u/model.py", "forward", 0}}), "model.py forward");
  EXPECT_EQ(holder_of({{"/v/site-packages", "call"}}), "site-packages:7 call");
  EXPECT_EQ(holder_of({{"??", "mine::Thing::apply(int)"}}), "??:7 mine::Thing::apply(int)");
}

TEST(TorchSnapshot, ThousandsOfFramesMayShareALongName) {
  constexpr std::string_view kKeep("q\x07", 2), kKept("h\x07", 2);
  PickleWriter writer;
  writer.begin_dict()
      .text("segments")
      .empty_list()
      .text("device_traces")
      .begin_list()
      .begin_list()
      .begin_dict();
  writer.entry("action", "alloc")
      .entry("addr", 4096)
      .entry("size", 512)
      .entry("stream", 0)
      .text("frames")
      .begin_list();
  for (int i = 0; i < 3000; ++i) {
    writer.begin_dict().text("filename");
    i == 0 ? writer.text(std::string(std::size_t{1} << 20, 'n')).raw(kKeep) : writer.raw(kKept);
    writer.text("name").raw(kKept).end_dict();
  }
  writer.end_list().end_dict().end_list().end_list().end_dict();
  const std::string text = writer.finish();
  const auto begin = std::chrono::steady_clock::now();

  const AllocationTrace trace = parse(text);

  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10))
      << "it is searched for each frame";
  EXPECT_EQ(trace.holders.at(trace.blocks.at(0).holder), std::string(120, 'n') + " " + std::string(120, 'n'));
}

TEST(TorchSnapshot, TheEndOfALongPathCounts) {
  const std::string path = "/" + std::string(10'000, 'd') + "/model.py";
  EXPECT_EQ(holder_of({{path.c_str(), "forward"}, {"/home/u/train.py", "main"}}), "model.py:7 forward");
}

TEST(TorchSnapshot, ABlockOfTheBackwardPassIsNamedAfterItsAutogradNode) {
  const std::vector<Frame> frames = {
      {"??", "torch::unwind::unwind()"},
      {"??", "torch::CapturedTraceback::gather(bool, bool, bool)"},
      {"??", "at::_ops::bmm::call(at::Tensor const&, at::Tensor const&)"},
      {"??", "torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)"},
      {"??", "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)"}};

  EXPECT_EQ(holder_of(frames), "BmmBackward0 (backward pass)");
  EXPECT_EQ(holder_of({frames[0], frames[1], frames[2]}),
            "??:7 at::_ops::bmm::call(at::Tensor const&, at::Tensor const&)");
}

TEST(TorchSnapshot, ADeviceWithoutABlockIsLeftOut) {
  PickleWriter writer;
  writer.begin_dict().text("segments").begin_list();
  writer.begin_dict()
      .entry("device", 1)
      .entry("address", 4096)
      .entry("total_size", 2)
      .text("blocks")
      .empty_list();
  writer.end_dict().end_list().text("device_traces").begin_list();
  write_events(writer, {{"alloc", 0x1000, 10}});
  const auto traces = parse_torch_snapshot(writer.end_list().end_dict().finish(), "t");

  ASSERT_TRUE(traces.ok());
  ASSERT_EQ(traces.value().size(), 1u);
  EXPECT_EQ(traces.value()[0].name, "t");
}

// The state is that of the end; without a failure the blocks shown are those of the peak.
TEST(TorchSnapshot, TheStateAtTheEndIsCalledThat) {
  std::ifstream file(std::string(FOREBAY_FUZZ_CORPUS) + "/pickle/state-only.pickle", std::ios::binary);
  const AllocationTrace trace = parse(std::string{std::istreambuf_iterator<char>(file), {}});

  const Result<Explanation> explanation = explain(trace, {});

  ASSERT_TRUE(explanation.ok());
  expect_contains(explanation_text(trace, explanation.value()),
                  "State:   at the end of the recording: 60.00 MiB");
}

// Written by Python's own pickler (tests/fuzz/corpus/pickle).
TEST(TorchSnapshot, ReadsWhatPythonWrites) {
  for (const char* name : {"fragmented-p2", "fragmented-p4", "state-only", "bare-segments"}) {
    SCOPED_TRACE(name);
    std::ifstream file(std::string(FOREBAY_FUZZ_CORPUS) + "/pickle/" + name + ".pickle", std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const AllocationTrace trace = parse(text);
    ASSERT_TRUE(trace.state.has_value());
    EXPECT_EQ(trace.state->reserved_bytes, 60_MiB);
    EXPECT_EQ(trace.state->live_bytes, 40_MiB);
    EXPECT_EQ(trace.state->pending_bytes, 20_MiB);
    EXPECT_EQ(trace.state->requested_bytes, 40_MiB - 100);
    EXPECT_EQ(trace.state->largest_free_bytes, 10_MiB);
    ASSERT_EQ(trace.holders.size(), 3u);
    EXPECT_EQ(trace.holders[1], "train.py:33 forward");
    EXPECT_EQ(trace.holders[2], "optimizer.py:12 step");
    EXPECT_EQ(trace.warm_event_count, 3u);
    EXPECT_EQ(trace.failure.has_value(), std::string(name).substr(0, 4) == "frag");
  }
}

struct Block {
  std::int64_t size;
  std::int64_t requested;
  std::int64_t address;
};

void write_segment(PickleWriter& writer, std::int64_t device, std::int64_t bytes,
                   const std::vector<Block>& blocks) {
  writer.begin_dict().entry("device", device).entry("address", 0x1000).entry("total_size", bytes);
  writer.text("blocks").begin_list();
  for (const Block& block : blocks) {
    writer.begin_dict()
        .entry("size", block.size)
        .entry("requested_size", block.requested)
        .entry("address", block.address)
        .entry("state", "active_allocated")
        .end_dict();
  }
  writer.end_list().end_dict();
}

TEST(TorchSnapshot, ABlockIsAtItsOwnAddressAndHoldsNoMoreThanItsSize) {
  PickleWriter writer;
  writer.begin_dict().text("segments").begin_list();
  write_segment(writer, 0, 8192, {{512, 9999, 0x2000}});
  writer.end_list().text("device_traces").begin_list();
  write_events(writer, {{"alloc", 0x2000, 500}, {"snapshot", 0, 0}});

  const AllocationTrace trace = parse(writer.end_list().end_dict().finish());

  EXPECT_EQ(trace.warm_event_count, 0u);
  ASSERT_TRUE(trace.state.has_value());
  EXPECT_EQ(trace.state->requested_bytes, 512u);
  EXPECT_EQ(trace.format, "PyTorch memory snapshot");
  EXPECT_EQ(trace.origin, TraceOrigin::kPyTorch);
  EXPECT_TRUE(trace.notes.empty());
}

TEST(TorchSnapshot, ADeviceWithoutABlockIsShownWhereThereIsNoOther) {
  PickleWriter writer;
  writer.begin_list();
  write_segment(writer, 0, 4096, {});

  EXPECT_TRUE(parse(writer.end_list().finish()).events.empty());
}

TEST(TorchSnapshot, SegmentsThatNoDeviceHasAreRefused) {
  const auto refused = [](const std::vector<std::int64_t>& bytes, std::int64_t device = 0,
                          const std::vector<Block>& blocks = {}) {
    PickleWriter writer;
    writer.begin_list();
    for (const std::int64_t one : bytes) write_segment(writer, device, one, blocks);
    return refusal(writer.end_list().finish());
  };
  constexpr auto kLimit = static_cast<std::int64_t>(kTraceBlockLimit);
  expect_contains(refused({kLimit + 1}), "segment 1: more is reserved than any device has");
  expect_contains(refused({kLimit, 1}), "segment 2: more is reserved than any device has");
  expect_contains(refused({100}, 0, {{60, 60, 0x1000}, {60, 60, 0x2000}}),
                  "segment 1: a block has no size, or one beyond its segment");
  expect_contains(refused({100}, 256), "a segment is no dict, or of no device there is");
  PickleWriter writer;
  writer.begin_dict().text("device_traces").begin_list();
  for (int device = 0; device < 257; ++device) writer.empty_list();
  expect_contains(refusal(writer.end_list().end_dict().finish()), "more devices than there can be");
  expect_contains(refusal(snapshot_of({{"alloc", 1, kLimit + 1}})), "event 1 (alloc): it has no usable");
}

TEST(TorchSnapshot, NamesTheEventOfWhatMakesNoSense) {
  expect_contains(refusal(snapshot_of({{"alloc", 0x1000, 10}, {"alloc", 0x2000, -4}})), "event 2 (alloc)");
  expect_contains(refusal(snapshot_of({{"alloc", -1, 10}})), "event 1 (alloc)");
  expect_contains(refusal(snapshot_of({{"alloc", 1, std::int64_t{1} << 46}, {"alloc", 2, 1}})), "event 2");
  expect_contains(refusal(snapshot_of({})), "no segment and no event");
  expect_contains(refusal(PickleWriter().integer(3).finish()), "neither segments nor device_traces");
  expect_contains(refusal(PickleWriter().begin_list().integer(3).end_list().finish()),
                  "a segment is no dict");
  const std::string whole = snapshot_of({{"alloc", 0x1000, 10}});
  expect_contains(refusal(whole.substr(0, whole.size() - 20)), "byte ");
  PickleWriter writer;
  writer.begin_list().begin_dict().entry("address", 0).entry("total_size", 100).text("blocks").begin_list();
  writer.begin_dict().entry("size", 101).end_dict().end_list().end_dict().end_list();
  expect_contains(refusal(writer.finish()), "segment 1: a block has no size, or one beyond its segment");
}

}  // namespace
}  // namespace forebay
