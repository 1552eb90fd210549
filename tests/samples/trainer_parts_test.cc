// The parts of the sample's trainer one by one: its checks of files and states, the opening of a rank, and
// the order of its transfers.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/local_communicator.h"
#include "model/host_operations.h"
#include "model/shape.h"
#include "model/text.h"
#include "output/files.h"
#include "output/output_file.h"
#include "output/safetensors.h"
#include "parallel/checkpointed_inputs.h"
#include "parallel/grid.h"
#include "parallel/parted_state.h"
#include "parallel/pipeline_group.h"
#include "runtime/device/forwarding_backend.h"
#include "tests/samples/small_training.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/temporary_directory.h"
#include "trainer/cursor.h"
#include "trainer/initial.h"
#include "trainer/rank_setup.h"
#include "trainer/training.h"

namespace forebay::gpt {
namespace {

// The error that a call throws; empty, and a failure of the test, where it throws none.
Status thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.status();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

void expect_thrown(StatusCode code, const std::string& text, const std::function<void()>& call) {
  const Status status = thrown_by(call);
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
}

class TrainerParts : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return directory_ / name; }
  void make_directory(const std::string& name) const { std::filesystem::create_directories(path(name)); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }
  TrainerOptions options() const {
    TrainerOptions o = testing::small_options();
    testing::write_text(path("text"), testing::kTextBytes, testing::kTextSeed);
    o.text = {path("text")};
    return o;
  }

  const forebay::testing::TemporaryDirectory directory_;
};

// --- the cursor ---

constexpr Cursor kCursor{
    .samples = 1, .seed = 2, .text = 3, .heads = 4, .part = 5, .rope_theta = 6, .norm_epsilon = 0.5};

TEST(TrainerCursor, IsReadAsItWasWritten) {
  const Cursor read = Cursor::from_text(kCursor.to_text());
  EXPECT_EQ(read.to_text(), kCursor.to_text());
  EXPECT_EQ(read.part, 5u);
  EXPECT_EQ(read.rope_theta, 6);
  EXPECT_EQ(read.norm_epsilon, 0.5);
  EXPECT_EQ((Cursor{.samples = 1}).to_text(), R"({"samples":1,"seed":0,"text":0,"heads":0,"part":0})");
  expect_thrown(StatusCode::kCorruption, "its data cursor has no samples",
                [] { Cursor::from_text(R"({"samples": -1, "seed": 0, "text": 0, "heads": 0, "part": 0})"); });
  for (const char* const damaged : {
           "",
           "[]",
           "{\"samples\": 1}",
       })
    expect_thrown(StatusCode::kCorruption, "its data cursor has no ", [&] { Cursor::from_text(damaged); });
}

TEST(TrainerCursor, EachSettingMustBeThatOfTheSavedRun) {
  const auto refused = [](auto Cursor::*field, auto value, StatusCode code, const std::string& text) {
    Cursor saved = kCursor;
    saved.*field = value;
    expect_thrown(code, text, [&] { check_may_resume(kCursor, saved, "LOAD", "DIRECTORY"); });
  };
  check_may_resume(kCursor, kCursor, "LOAD", "DIRECTORY");
  // Samples go on, and a state of an older version does not say the other two.
  Cursor older = kCursor;
  older.samples = 99;
  older.rope_theta = older.norm_epsilon = 0;
  check_may_resume(kCursor, older, "LOAD", "DIRECTORY");

  constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
  refused(&Cursor::seed, 9, kInvalid, "--load-state LOAD was saved with another --seed, 9;");
  refused(&Cursor::text, 9, kInvalid, "another --text;");
  refused(&Cursor::heads, 9, kInvalid, "another --heads, 9;");
  refused(&Cursor::rope_theta, 9, kInvalid, "another --rope-theta, 9;");
  refused(&Cursor::norm_epsilon, 0.25, kInvalid, "another rms_norm_eps, 0.25, which --initial gives;");
  refused(&Cursor::part, 9, StatusCode::kCorruption, "DIRECTORY holds part 9 of the model, not part 5");
}

// --- files ---

TEST_F(TrainerParts, ChecksOfFilesLeaveNothingBehind) {
  TrainerOptions o = options();
  o.save_state = path("state");
  make_directory("drive");
  o.offload_directories = o.activation_directories = {path("drive")};
  check_files(o);
  EXPECT_FALSE(std::filesystem::exists(path("state")));
  EXPECT_TRUE(std::filesystem::is_empty(path("drive")));
  make_directory("state");
  check_files(o);
  EXPECT_TRUE(std::filesystem::is_empty(path("state")));
}

TEST_F(TrainerParts, FilesThatTheProgramDidNotWriteAreNotOverwritten) {
  const auto refused = [&](const std::string& text, std::string TrainerOptions::*file) {
    TrainerOptions o = options();
    o.*file = path("file");
    expect_thrown(StatusCode::kInvalidArgument, text, [&] { check_files(o); });
    o.*file = path("own");
    check_files(o);
    o.*file = path("empty");
    check_files(o);
  };
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})";
  write("file", std::string(1, static_cast<char>(header.size())) + std::string(7, '\0') + header);
  write("empty", "");
  SafetensorsWriter(path("own"), {{"a", {0}}}).finish();
  refused("--export: cannot write", &TrainerOptions::export_file);
  refused("--logits: cannot write", &TrainerOptions::logits_file);
  TrainerOptions o = options();
  for (const char* const name : {"own", "empty", "none"}) {
    o.tokens_file = path(name);
    if (name != std::string("own")) {
      check_files(o);
      continue;
    }
    expect_thrown(StatusCode::kInvalidArgument, "--write-tokens: cannot write", [&] { check_files(o); });
  }
}

TEST_F(TrainerParts, EachFileIsCheckedUnderItsOption) {
  const auto refused = [&](const std::string& text, const std::function<void(TrainerOptions&)>& change) {
    TrainerOptions o = options();
    change(o);
    expect_thrown(StatusCode::kIoError, text, [&] { check_files(o); });
  };
  const std::string nowhere = path("nowhere/file");
  refused("--report", [&](TrainerOptions& o) { o.report_file = nowhere; });
  refused("--logits", [&](TrainerOptions& o) { o.logits_file = nowhere; });
  refused("--write-tokens", [&](TrainerOptions& o) { o.tokens_file = nowhere; });
  refused("--export", [&](TrainerOptions& o) { o.export_file = nowhere; });
  refused("--flight-recorder", [&](TrainerOptions& o) { o.flight_recorder = nowhere; });
  refused("--save-state", [&](TrainerOptions& o) { o.save_state = nowhere + "/state"; });
  refused("--offload-tier", [&](TrainerOptions& o) { o.offload_directories = {nowhere}; });
  refused("--activations", [&](TrainerOptions& o) { o.activation_directories = {nowhere}; });
  refused("cannot read the text file", [&](TrainerOptions& o) { o.evaluation_text = {nowhere}; });
  refused("it is a directory; give existing files with --text",
          [&](TrainerOptions& o) { o.text = {directory_.path()}; });
  // The timeline of rank 1 lies beside that of rank 0.
  make_directory("timeline.rank-1.json");
  refused("--timeline", [&](TrainerOptions& o) {
    o.ranks = 2;
    o.timeline_file = path("timeline.json");
  });
}

// The file of an earlier run, or an empty one, makes place; another one does not.
TEST_F(TrainerParts, OnlyFilesOfTheSameKindAreReplaced) {
  using Member = std::string TrainerOptions::*;
  for (const auto& [member, ours] : std::initializer_list<std::pair<Member, std::string>>{
           {&TrainerOptions::report_file, "{\"world_size\": 1}"},
           {&TrainerOptions::timeline_file, R"({"displayTimeUnit":"ms","traceEvents":[]})"},
           {&TrainerOptions::export_file, std::string(8, 'x') + R"({"__metadata__":{"exported_by":)"}}) {
    TrainerOptions o = options();
    o.*member = path("file");
    for (const std::string& text : {ours, std::string()}) {
      write("file", text);
      check_files(o);
    }
    for (const char* const text : {"an essay that took a week", R"({"settings": "of another program"})"}) {
      write("file", text);
      expect_thrown(StatusCode::kInvalidArgument, "is not overwritten", [&] { check_files(o); });
    }
  }
  TrainerOptions o = options();
  o.ranks = 2;
  o.flight_recorder = directory_.path();
  write("flight.rank-1.json", "{\n  \"cause\": ");
  check_files(o);
  write("flight.rank-1.json", "an essay");
  expect_thrown(StatusCode::kInvalidArgument, "is not overwritten", [&] { check_files(o); });
}

TEST_F(TrainerParts, AModelIsExportedBesideOtherFilesAndNoOtherModel) {
  TrainerOptions o = options();
  o.export_file = path("model");
  make_directory("model");
  write("model/README", "a model");
  check_files(o);
  for (const char* const name : {"config.json", "any.safetensors", "model.safetensors.index.json"}) {
    write(std::string("model/") + name, "");
    expect_thrown(StatusCode::kInvalidArgument, "holds a model already", [&] { check_files(o); });
    std::filesystem::remove(path(std::string("model/") + name));
  }
}

TEST_F(TrainerParts, APipeNeedsAReaderAndIsNoExport) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  expect_thrown(StatusCode::kIoError, "no process reads from it; start the reader first",
                [&] { const OutputFile file(path("pipe")); });
  OutputFile::check(path("pipe"));  // The reader may come later.
  expect_thrown(StatusCode::kIoError, "it is not a regular file",
                [&] { OutputFile::check_regular(path("pipe")); });
  EXPECT_TRUE(std::filesystem::is_fifo(path("pipe")));
}

TEST_F(TrainerParts, AFileThatIsReplacedKeepsItsPermissions) {
  write("file", "before");
  ASSERT_EQ(::chmod(path("file").c_str(), 0640), 0);
  OutputFile file(path("file"));
  file.write("after", 5);
  file.finish();
  struct stat status {};
  ASSERT_EQ(::stat(path("file").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0640u);
  EXPECT_EQ(status.st_size, 5);
}

TEST(TrainerShapes, ThatCannotBeAreRefusedByTheirOption) {
  const auto refused = [](const std::string& text, const std::function<void(GptShape&)>& change) {
    GptShape shape{.layers = 2, .hidden = 16, .heads = 2, .sequence = 8, .kind = ModelKind::kLlama};
    static_cast<void>(describe_units(shape));
    change(shape);
    expect_thrown(StatusCode::kInvalidArgument, text, [&] { describe_units(shape); });
  };
  refused("--layers is 0", [](GptShape& s) { s.layers = 0; });
  refused("--hidden is 0", [](GptShape& s) { s.hidden = 0; });
  refused("--heads is 0", [](GptShape& s) { s.heads = 0; });
  refused("--sequence is 0", [](GptShape& s) { s.sequence = 0; });
  refused("--vocabulary is 0", [](GptShape& s) { s.vocabulary = 0; });
  refused("--vocabulary is 65537", [](GptShape& s) { s.vocabulary = 65537; });
  refused("--rope-theta is", [](GptShape& s) { s.rope_theta = 0.5; });
  refused("--sequence is 1048577", [](GptShape& s) { s.sequence = (1 << 20) + 1; });
  refused("--sequence 8 is more than the model's 7 positions", [](GptShape& s) { s.positions = 7; });
  const GptShape largest{.layers = 2,
                         .hidden = 16,
                         .heads = 2,
                         .sequence = 1 << 20,
                         .vocabulary = 65536,
                         .kind = ModelKind::kLlama,
                         .rope_theta = 1};
  EXPECT_FALSE(describe_units(largest).empty());
}

TEST_F(TrainerParts, ASavedStateIsReplacedOnlyByARunThatGoesOnFromIt) {
  make_directory("state");
  write("state/latest", "step-1");
  make_directory("other");
  std::filesystem::create_directory_symlink(path("state"), path("link"));
  TrainerOptions o = options();
  o.save_state = path("state");
  const auto refused = [&] {
    expect_thrown(StatusCode::kInvalidArgument, "holds a saved state already", [&] { check_files(o); });
  };
  refused();
  o.load_state = path("other");
  refused();
  o.load_state = path("link");
  check_files(o);

  o.load_state.clear();
  o.initial_file = "weights";
  find_state_to_resume(o);
  EXPECT_EQ(o.load_state, "");
  o.resume = true;
  find_state_to_resume(o);
  EXPECT_EQ(o.load_state, path("state"));
  EXPECT_EQ(o.initial_file, "");
  o = options();
  o.resume = true;
  o.save_state = path("other");
  o.initial_file = "weights";
  find_state_to_resume(o);
  EXPECT_EQ(o.load_state, "");
  EXPECT_EQ(o.initial_file, "weights");
}

TEST_F(TrainerParts, AStateIsFoundByEachOfItsFiles) {
  make_directory("a");
  EXPECT_FALSE(holds_state(path("a")));
  std::filesystem::create_symlink("latest", path("a/latest"));  // A link in a loop.
  EXPECT_TRUE(holds_state(path("a")));
  make_directory("b");
  write("b/parts", "step-1");
  EXPECT_TRUE(holds_state(path("b")));
  make_directory("c/step-1");
  EXPECT_FALSE(holds_state(path("c")));
  write("c/step-1/manifest.json", "{}");
  EXPECT_TRUE(holds_state(path("c")));
}

// A communicator of one rank.
std::unique_ptr<Communicator> lone_rank(Backend& backend, Kernels& kernels) {
  return LocalGroup::create(1, {})->communicator(0, backend, kernels).value();
}

TEST_F(TrainerParts, AStateInPartsIsLoadedByItsParts) {
  const auto backend = HostBackend::create({}).value();
  const auto kernels = Kernels::create(*backend).value();
  const auto world = lone_rank(*backend, *kernels);
  Grid grid(*world, {});
  const std::string text = " tensor-parallel 1 pipeline-parallel 1\n";
  for (const char* const name : {"s/step-4/part-0", "s/step-8/part-0", "s/step-9"}) make_directory(name);
  const std::string state = path("s");
  EXPECT_EQ(directory_to_load(grid, state, std::nullopt), state);
  write("s/parts", "step-8" + text);
  EXPECT_EQ(directory_to_load(grid, state, std::nullopt), state + "/step-8/part-0");
  EXPECT_EQ(directory_to_load(grid, state, 4), state + "/step-4/part-0");
  expect_thrown(StatusCode::kIoError, "no state of step 5 is saved",
                [&] { directory_to_load(grid, state, 5); });
  write("s/parts", "step-8 tensor-parallel 2 pipeline-parallel 1\n");
  expect_thrown(StatusCode::kInvalidArgument, "in other parts than this run has",
                [&] { directory_to_load(grid, state, std::nullopt); });
  write("s/parts", "step-8/../step-4" + text);
  expect_thrown(StatusCode::kCorruption, "names no saved state",
                [&] { directory_to_load(grid, state, std::nullopt); });
  write("s/latest", "step-9");
  EXPECT_EQ(directory_to_load(grid, state, std::nullopt), state);
}

TEST(TrainerFiles, TheTimelineOfRank0HasTheGivenName) {
  TrainerOptions o;
  o.timeline_file = "a/b.json";
  EXPECT_EQ(timeline_file(o, 0), "a/b.json");
  EXPECT_EQ(timeline_file(o, 3), "a/b.rank-3.json");
}

// --- grids ---

TEST(TrainerGrid, RefusalsNameTheOption) {
  EXPECT_TRUE(check_grid(8, {.tensor_parallel = 2, .pipeline_parallel = 2}).ok());
  EXPECT_TRUE(check_grid(6, {.tensor_parallel = 4}).message().starts_with("--tensor-parallel"));
  EXPECT_TRUE(check_grid(6, {.tensor_parallel = 2, .pipeline_parallel = 2})
                  .message()
                  .starts_with("--pipeline-parallel"));
  EXPECT_TRUE(check_order_group(8, {.tensor_parallel = 2}, 4).ok());
  EXPECT_EQ(
      check_order_group(12, {.tensor_parallel = 2}, 4).message(),
      "--order group:4: groups of 4 do not divide the 6 data-parallel ranks that 12 ranks make; use one of "
      "group:1, group:2, group:3, group:6");
  EXPECT_EQ(
      check_order_group(6, {}, 4).message(),
      "--order group:4: groups of 4 do not divide the 6 data-parallel ranks; use one of group:1, group:2, "
      "group:3, group:6");
}

// --- activations ---

TEST(TrainerActivations, ArePlacedByTheRoom) {
  TrainerOptions o = testing::small_options();
  o.recompute_every = 1;
  EXPECT_EQ(choose_activations(o, {}, {.keep = 1000, .elsewhere = 100}, 1000), std::nullopt);
  constexpr std::uint64_t kMuch = std::uint64_t{1} << 30;
  EXPECT_EQ(choose_activations(o, {}, {.keep = 2 * kMuch, .elsewhere = 100}, kMuch), kMuch - 100);
  expect_thrown(StatusCode::kOutOfMemory,
                "they take 1000 B (1000 bytes) with the inputs of recomputed blocks kept",
                [&] { choose_activations(o, {}, {.keep = 1000, .elsewhere = 900}, 800); });

  ActivationPlan plan;
  plan.options.ranks = 2;
  plan.slots = {{.placement = ActivationPlacement::kPartition}, {.placement = ActivationPlacement::kKeep}};
  plan.places = {{.ways = 2, .slice_bytes = 1024}, {.ways = 1, .slice_bytes = 1024}};
  EXPECT_EQ(activations_name(plan), "partition");
  EXPECT_EQ(describe_choice(plan), "partition: the inputs of 1 of 2 recomputed blocks are cut over 2 ranks");
  plan.slots[0].placement = ActivationPlacement::kPartitionAndSpill;
  plan.spilled_bytes_per_micro_batch = 512;
  EXPECT_EQ(
      describe_choice(plan),
      "partition+cpu: the inputs of 1 of 2 recomputed blocks are cut over 2 ranks, and 512 B of each rank's "
      "2.00 KiB wait in host memory");
}

// --- weights and texts ---

TEST(TrainerTokens, AWholeTokenMustBeThere) {
  BytePairs::Tables tables;
  for (int byte = 0; byte < 256; ++byte) tables.tokens.emplace_back(1, static_cast<char>(byte));
  tables.whole = {300};
  expect_thrown(StatusCode::kCorruption, "the whole token 300 is not there", [&] { BytePairs made(tables); });
}

TEST_F(TrainerParts, EachParameterHasValuesOfItsOwn) {
  GptParameter parameter;
  parameter.shape = {4, 4};
  parameter.initial = Initial::kNormal;
  parameter.deviation = 1;
  EXPECT_NE(random_values(parameter, 0, 1), random_values(parameter, 1, 1));
  EXPECT_NE(random_values(parameter, 0, 1), random_values(parameter, 0, 2));
  EXPECT_EQ(random_values(parameter, 1, 1), random_values(parameter, 1, 1));
}

TEST_F(TrainerParts, AnotherTokenOrLengthIsAnotherText) {
  const auto hash_of = [&](const std::string& bytes) {
    write("tokens", bytes);
    return Text::open(path("tokens"), 1000).hash();
  };
  const std::string bytes(2000, '\1');
  std::string other = bytes;
  other[1998] = '\2';
  EXPECT_NE(hash_of(bytes), hash_of(other));
  // More tokens than are hashed: they lie over the whole file, and the length counts.
  constexpr std::size_t kLong = std::size_t{1} << 22;
  const std::string many(kLong, '\1');
  std::string half = many;
  std::fill(half.begin() + kLong / 2, half.end(), '\2');
  EXPECT_NE(hash_of(many), hash_of(half));
  EXPECT_NE(hash_of(many), hash_of(many + many));
}

// --- ranks ---

TEST_F(TrainerParts, ARankTakesItsShareOfTheHost) {
  const auto open = [&](int threads, int local_size) {
    TrainerOptions o = options();
    o.threads = threads;
    return open_rank(o, {.rank = 0, .size = 1, .local_rank = 0, .local_size = local_size},
                     [](Backend& backend, Kernels& kernels) {
                       return LocalGroup::create(1, {})->communicator(0, backend, kernels);
                     });
  };
  const Rank alone = open(0, 1), of_four = open(3, 4), of_many = open(0, 1 << 20);
  EXPECT_EQ(alone.threads, default_compute_threads());
  EXPECT_EQ(of_four.threads, 3);
  EXPECT_EQ(of_many.threads, 1);
  const auto bytes = [](const Rank& rank) {
    return static_cast<double>(rank.backend->capabilities().memory_bytes);
  };
  EXPECT_NEAR(bytes(alone) / bytes(of_four), 4, 1.5);
  EXPECT_STREQ(alone.backend->capabilities().name, "host of rank 0");
}

TEST_F(TrainerParts, AFailedRunWritesItsFlightRecords) {
  TrainerOptions o = options();
  o.flight_recorder = directory_.path();
  o.memory_bytes = 1;
  const auto record = [&](int rank) {
    std::ifstream file(flight_file(o, rank));
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  expect_thrown(StatusCode::kOutOfMemory, "", [&] { run_training(std::vector<TrainerOptions>{o}); });
  EXPECT_NE(record(0).find("last_operations"), std::string::npos);
  EXPECT_EQ(record(0).find("rank 0: "), std::string::npos) << record(0);
  expect_thrown(StatusCode::kOutOfMemory, "", [&] { run_training(std::vector<TrainerOptions>{o, o}); });
  EXPECT_NE(record(0).find("rank "), std::string::npos) << record(0);
  EXPECT_NE(record(1).find("rank "), std::string::npos) << record(1);

  // Others may put a link there while it trains.
  write("other", "an essay");
  std::filesystem::remove(flight_file(o, 0));
  std::filesystem::create_symlink(path("other"), flight_file(o, 0));
  expect_thrown(StatusCode::kOutOfMemory, "", [&] { run_training(std::vector<TrainerOptions>{o}); });
  EXPECT_NE(record(0).find("last_operations"), std::string::npos);
  std::ifstream other(path("other"));
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(other), {}), "an essay");
}

TEST_F(TrainerParts, RanksAgreeOnTheirTexts) {
  const TrainerOptions o = options();
  testing::write_text(path("other"), testing::kTextBytes, testing::kTextSeed + 1);
  TrainerOptions other = o;
  other.text = {path("other")};
  expect_thrown(StatusCode::kInvalidArgument, "--text", [&] { run_training({o, other}); });
  other = o;
  other.evaluation_text = {path("other")};
  TrainerOptions same = o;
  same.evaluation_text = o.text;
  expect_thrown(StatusCode::kInvalidArgument, "--evaluation-text", [&] { run_training({same, other}); });
}

TEST_F(TrainerParts, OptionsReachTheEngineAndTheReport) {
  TrainerOptions o = options();
  testing::write_text(path("evaluation"), 200, testing::kTextSeed + 1);
  o.evaluation_text = {path("evaluation")};
  const TrainingReport report = run_training(o);
  EXPECT_EQ(report.device, "host");
  const auto text = std::find_if(report.training.begin(), report.training.end(),
                                 [](const auto& one) { return one.first == "text"; });
  ASSERT_NE(text, report.training.end());
  EXPECT_EQ(text->second, std::to_string(training_text(o).hash()));
  o.evaluation_samples = 1'000'000;  // More than there are.
  EXPECT_EQ(run_training(o).evaluations.back().loss, report.evaluations.back().loss);
  o.epsilon = 1;
  EXPECT_NE(run_training(o).digest, report.digest);
}

TEST_F(TrainerParts, TheReportOfAGridIsMeasuredOnEachOfItsRanks) {
  TrainerOptions o = options();
  o.model.heads = 4;
  o.ranks = 4;
  o.tensor_parallel = 2;
  o.pipeline_parallel = 2;
  o.micro_steps = 2;
  o.recompute_every = 1;
  o.activations = ActivationPlacement::kPartition;
  o.timeline_file = path("timeline.json");
  const auto begin = std::chrono::steady_clock::now();
  const TrainingReport report = run_training(o);
  const double wall_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();

  ASSERT_EQ(report.ranks.size(), 4u);
  ASSERT_EQ(report.digest.size(), 4 * 32u + 3);
  EXPECT_EQ(report.digest[32], '+');
  for (const RankReport& rank : report.ranks) {
    EXPECT_GT(rank.communication_ms_per_step, 0);
    EXPECT_LE(rank.communication_ms_per_step * static_cast<double>(o.steps), 4 * wall_ms);
    EXPECT_LE(rank.exposed_communication_ms_per_step, rank.communication_ms_per_step);
    EXPECT_GT(rank.tensor_sent_bytes_per_step, 0);
    EXPECT_EQ(rank.tensor_received_bytes_per_step, rank.tensor_sent_bytes_per_step);
    EXPECT_GT(rank.pipeline_sent_bytes_per_step, 0);
    EXPECT_EQ(rank.pipeline_received_bytes_per_step, rank.pipeline_sent_bytes_per_step);
    EXPECT_GT(rank.saved_sent_bytes_per_step, 0);
    EXPECT_EQ(rank.saved_sent_bytes_per_step, static_cast<double>(rank.planned_saved_sent_bytes_per_step));
  }
  EXPECT_EQ(report.ranks[0].most_passes_in_flight, 2u);
  EXPECT_NEAR(report.tokens_per_second * report.ranks[0].step_ms / 1e3, 2 * 2 * 12, 1e-6);
  // The second pipeline stage receives all that the first one sends.
  const auto of_kind = [&](std::size_t rank, const std::string& kind) {
    const auto found = std::find_if(report.traffic[rank].begin(), report.traffic[rank].end(),
                                    [&](const OperationReport& one) { return one.operation == kind; });
    EXPECT_NE(found, report.traffic[rank].end()) << kind;
    return *found;
  };
  const OperationReport sent = of_kind(0, "send"), received = of_kind(2, "recv");
  EXPECT_GT(sent.sent_bytes[2], 0u);
  EXPECT_EQ(sent.sent_bytes[2], received.received_bytes[0]);
  EXPECT_EQ(sent.received_bytes[2], 0u);
  for (const auto& operations : report.traffic) {
    for (const OperationReport& operation : operations) EXPECT_GT(operation.count, 0u) << operation.operation;
  }
}

// --- transfers ---

// Writes down what is recorded and waited for; streams and events by the order of their first use.
class WatchedOrder final : public ForwardingBackend {
 public:
  explicit WatchedOrder(Backend& below) : ForwardingBackend(below) {}
  Status event_record(Event event, Stream stream) override {
    log += "record " + number(event.handle) + " on " + number(stream.handle) + "; ";
    return ForwardingBackend::event_record(event, stream);
  }
  Status stream_wait(Stream stream, Event event) override {
    log += number(stream.handle) + " waits for " + number(event.handle) + "; ";
    return ForwardingBackend::stream_wait(stream, event);
  }
  std::string number(void* handle) {
    const auto found = std::find(handles_.begin(), handles_.end(), handle);
    const auto index = found - handles_.begin();
    if (found == handles_.end()) handles_.push_back(handle);
    return std::to_string(index);
  }
  std::string taken() { return std::exchange(log, {}); }
  std::string log;

 private:
  std::vector<void*> handles_;
};

class WatchedTransfers final : public forebay::testing::ForwardingCommunicator {
 public:
  WatchedTransfers(std::unique_ptr<Communicator> inner, WatchedOrder& order)
      : ForwardingCommunicator(std::move(inner)), order_(order) {}
  Status send(const std::byte*, std::size_t, int peer, std::uint32_t, Stream stream) override {
    order_.log += "send to rank " + std::to_string(peer) + " on " + order_.number(stream.handle) + "; ";
    return {};
  }
  Status recv(std::byte*, std::size_t, int peer, std::uint32_t, Stream stream) override {
    order_.log += "receive of rank " + std::to_string(peer) + " on " + order_.number(stream.handle) + "; ";
    return {};
  }

 private:
  WatchedOrder& order_;
};

TEST(TrainerStageLink, OrdersTransfersBehindTheWorkAndTheWorkBehindThem) {
  const auto host = HostBackend::create({}).value();
  WatchedOrder backend(*host);
  const auto kernels = Kernels::create(*host).value();
  WatchedTransfers communicator(lone_rank(*host, *kernels), backend);
  const Stream compute = host->stream_create().value();
  const std::size_t before = host->live_handle_count();
  {
    StageLink link(backend, communicator, compute, 3, 5);
    EXPECT_EQ(backend.number(compute.handle), "0");
    std::byte byte{};
    link.receive(&byte, 1);
    // 1: the event of the computed work; 2: the link's stream; 3: the event of the receipt.
    EXPECT_EQ(backend.taken(), "record 1 on 0; 2 waits for 1; receive of rank 3 on 2; record 3 on 2; ");
    link.wait_for_received();
    EXPECT_EQ(backend.taken(), "0 waits for 3; ");
    link.send(&byte, 1, 0);
    EXPECT_EQ(backend.taken(), "record 1 on 0; 2 waits for 1; send to rank 5 on 2; record 4 on 2; ");
    link.send(&byte, 1, 1);
    EXPECT_EQ(backend.taken(), "record 1 on 0; 2 waits for 1; send to rank 5 on 2; record 5 on 2; ");
    // The place of two micro-steps before.
    link.wait_for_place(2);
    EXPECT_EQ(backend.taken(), "0 waits for 4; ");
    link.wait_for_place(3);
    EXPECT_EQ(backend.taken(), "0 waits for 5; ");
  }
  EXPECT_EQ(host->live_handle_count(), before);
  ASSERT_TRUE(host->stream_destroy(compute).ok());
}

}  // namespace
}  // namespace forebay::gpt
