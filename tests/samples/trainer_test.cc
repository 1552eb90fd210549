// The trainer over `local` ranks, and the command line: small runs that end in well under a second each. The
// whole matrix of stages, types and ranks is tested elsewhere (tests/end_to_end).

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "model/random.h"
#include "model/text.h"
#include "output/progress.h"
#include "output/safetensors.h"
#include "tests/samples/gpt_reference.h"
#include "tests/samples/small_training.h"
#include "tests/support/temporary_directory.h"
#include "trainer/initial.h"
#include "trainer/options.h"
#include "trainer/training.h"

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

class Trainer : public ::testing::Test {
 protected:
  Trainer() {
    directory_ = forebay::testing::make_temporary_directory("trainer");
    testing::write_text(path("text"), testing::kTextBytes, testing::kTextSeed);
    clear_stop();
  }
  ~Trainer() override {
    clear_stop();
    fs::remove_all(directory_);
  }

  std::string path(const std::string& name) const { return (directory_ / name).string(); }

  TrainerOptions options() const {
    TrainerOptions o = testing::small_options();
    o.text = {path("text")};
    o.bucket_bytes = 8192;
    return o;
  }

  // The error of a run; fails when there is none.
  static Status error_of(const std::vector<TrainerOptions>& by_rank) {
    try {
      run_training(by_rank);
    } catch (const Error& error) {
      return error.status();
    }
    ADD_FAILURE() << "the run did not fail";
    return {};
  }

  fs::path directory_;
};

TEST_F(Trainer, StartsAtTheDocumentedLossAndGoesDown) {
  TrainerOptions o = options();

  const TrainingReport report = run_training(o);

  const std::vector<GptUnit> units = describe_units(o.model);
  std::map<std::string, Values> values;
  std::uint64_t stream = 0;
  for (const GptUnit& unit : units) {
    for (const GptParameter& parameter : unit.parameters) {
      const std::vector<float> initial = random_values(parameter, stream++, o.seed);
      values[parameter.name] = Values(initial.begin(), initial.end());
    }
  }
  const Text text = Text::read(o.text);
  std::vector<std::uint8_t> tokens, targets;
  for (std::uint64_t sample = 0; sample < o.batch; ++sample) {
    const std::size_t start = draw(o.seed, kTextStream, sample) % (text.bytes().size() - o.model.sequence);
    for (std::size_t i = 0; i < o.model.sequence; ++i) {
      tokens.push_back(text.bytes()[start + i]);
      targets.push_back(text.bytes()[start + i + 1]);
    }
  }
  ASSERT_EQ(report.loss.size(), 4u);
  EXPECT_NEAR(report.loss[0], GptReference(o.model, values).loss(tokens, targets), 1e-6);
  EXPECT_LT(report.loss[3], report.loss[0]);
}

TEST_F(Trainer, StagesGiveTheSameBits) {
  TrainerOptions o = options();
  o.ranks = 3;
  o.micro_steps = 2;
  o.dtype = DataType::kBfloat16;
  const TrainingReport first = run_training(o);

  for (const int stage : {1, 2, 3}) {
    o.stage = stage;
    const TrainingReport report = run_training(o);
    EXPECT_EQ(report.digest, first.digest) << stage;
    EXPECT_EQ(report.loss, first.loss) << stage;
    EXPECT_EQ(report.grad_norm, first.grad_norm) << stage;
    EXPECT_LT(report.ranks[0].peak_bytes.model_states(), first.ranks[0].peak_bytes.model_states()) << stage;
  }
}

TEST_F(Trainer, RanksOfBatchBAgreeWithOneRankOfBatchNTimesB) {
  TrainerOptions together = options();
  together.batch = 6;
  TrainerOptions apart = options();
  apart.ranks = 3;

  const TrainingReport one = run_training(together);
  const TrainingReport three = run_training(apart);

  for (std::size_t i = 0; i < one.loss.size(); ++i) {
    EXPECT_NEAR(three.loss[i], one.loss[i], 1e-5 * one.loss[i]);
    EXPECT_NEAR(*three.grad_norm[i], *one.grad_norm[i], 1e-4 * *one.grad_norm[i]);
  }
}

TEST_F(Trainer, AResumedRunIsTheSameAsOneThatDidNotStop) {
  TrainerOptions o = options();
  o.ranks = 2;
  o.stage = 2;
  o.steps = 6;
  const TrainingReport whole = run_training(o);

  TrainerOptions first_half = o;
  first_half.steps = 3;
  first_half.save_state = path("state");
  run_training(first_half);
  TrainerOptions second_half = o;
  second_half.load_state = path("state");
  const TrainingReport resumed = run_training(second_half);

  EXPECT_EQ(resumed.first_step, 3u);
  EXPECT_EQ(resumed.steps, 6u);
  EXPECT_EQ(resumed.digest, whole.digest);
  EXPECT_EQ(resumed.loss, std::vector<double>(whole.loss.begin() + 3, whole.loss.end()));
}

TEST_F(Trainer, AStopIsTheSameStepForAllRanksAndSavesTheState) {
  TrainerOptions o = options();
  o.ranks = 2;
  o.steps = 1000000;
  o.save_state = path("state");
  request_stop();  // The first step sees it.

  const TrainingReport report = run_training(o);

  EXPECT_TRUE(report.interrupted);
  EXPECT_EQ(report.steps, 1u);
  clear_stop();
  TrainerOptions resumed = options();
  resumed.ranks = 2;
  resumed.steps = 1;
  resumed.load_state = path("state");
  EXPECT_EQ(run_training(resumed).digest, report.digest);
}

TEST_F(Trainer, AStopInTheLastStepInterruptsNothing) {
  TrainerOptions o = options();
  o.steps = 1;
  o.export_file = path("weights");
  request_stop();
  EXPECT_FALSE(run_training(o).interrupted);
  EXPECT_TRUE(std::filesystem::exists(o.export_file));
}

TEST_F(Trainer, ExportedInitialWeightsStartTheSameTraining) {
  TrainerOptions o = options();
  o.ranks = 2;
  const TrainingReport direct = run_training(o);
  TrainerOptions exporting = o;
  exporting.stage = 3;
  exporting.steps = 0;
  exporting.export_file = path("initial.safetensors");
  run_training(exporting);
  TrainerOptions importing = o;
  importing.initial_file = path("initial.safetensors");

  const TrainingReport imported = run_training(importing);

  EXPECT_EQ(imported.digest, direct.digest);
  EXPECT_EQ(imported.loss, direct.loss);
  SafetensorsReader file(path("initial.safetensors"));
  EXPECT_EQ(file.tensors().at("h.1.mlp.c_fc.weight").shape, (std::vector<std::uint64_t>{24, 96}));
}

TEST_F(Trainer, PeaksAndTrafficAreAsPlanned) {
  for (const int stage : {0, 1, 2, 3}) {
    TrainerOptions o = options();
    o.ranks = 3;
    o.stage = stage;

    const TrainingReport report = run_training(o);

    for (const RankReport& rank : report.ranks) {
      EXPECT_EQ(rank.peak_bytes, rank.planned_bytes) << stage;
      EXPECT_EQ(rank.reserved_bytes, rank.planned_reserved_bytes) << stage;
      EXPECT_EQ(rank.sent_bytes_per_step, static_cast<double>(rank.planned_sent_bytes_per_step)) << stage;
      EXPECT_EQ(rank.received_bytes_per_step, static_cast<double>(rank.planned_received_bytes_per_step))
          << stage;
    }
  }
}

TEST_F(Trainer, WhatIsOffloadedGivesTheSameBitsAndMovesThePlannedBytes) {
  TrainerOptions o = options();
  o.ranks = 3;
  o.stage = 3;
  o.dtype = DataType::kBfloat16;
  o.steps = 6;
  const TrainingReport whole = run_training(o);
  EXPECT_EQ(whole.offloaded_parameters, 0u);
  o.staging_bytes = 8u << 20;
  for (const Offload offload : {Offload::kOptimizer, Offload::kOptimizerAndParameters}) {
    for (const Tier tier : {Tier::kPinned, Tier::kFile}) {
      for (const double fraction : {1.0, 0.6}) {
        SCOPED_TRACE(std::string(offload_name(offload)) + " on " + tier_name(tier) + ", " +
                     std::to_string(fraction));
        o.offload = offload;
        o.tier = tier;
        o.offload_directories.assign(tier == Tier::kFile ? 1 : 0, directory_);
        o.offload_fraction = fraction;

        const TrainingReport report = run_training(o);

        EXPECT_EQ(report.digest, whole.digest);
        EXPECT_EQ(report.loss, whole.loss);
        if (fraction == 1.0) {
          EXPECT_EQ(report.offloaded_parameters, report.parameters);
        } else {
          EXPECT_LT(report.offloaded_parameters, report.parameters);
          EXPECT_GT(report.offloaded_parameters, report.parameters / 2);
        }
        EXPECT_EQ(report.store.empty(), tier == Tier::kPinned) << report.store;
        for (const RankReport& rank : report.ranks) {
          EXPECT_EQ(rank.peak_bytes, rank.planned_bytes);
          EXPECT_GE(rank.host_bytes, rank.planned_host_bytes);
          EXPECT_LE(rank.host_bytes, rank.planned_host_bytes + 4096);
          EXPECT_EQ(rank.planned_file_bytes > 0, tier == Tier::kFile);
          // Each range has whole pages and is moved as a whole.
          const std::uint64_t padding = 4 * 4 * 4096;
          EXPECT_GE(rank.file_bytes, rank.planned_file_bytes);
          EXPECT_LE(rank.file_bytes, rank.planned_file_bytes + padding);
          const auto within = [&](double measured, std::uint64_t planned) {
            EXPECT_GE(measured, static_cast<double>(planned));
            EXPECT_LE(measured, static_cast<double>(planned + 2 * padding));
          };
          within(rank.file_read_bytes_per_step, rank.planned_file_read_bytes_per_step);
          within(rank.file_written_bytes_per_step, rank.planned_file_written_bytes_per_step);
        }
      }
    }
  }
}

TEST_F(Trainer, AFractionThatIsChosenGivesTheSameBits) {
  TrainerOptions o = options();
  o.ranks = 2;
  o.stage = 1;
  const TrainingReport whole = run_training(o);
  o.offload = Offload::kOptimizer;
  o.offload_auto = true;

  const TrainingReport report = run_training(o);

  EXPECT_EQ(report.digest, whole.digest);
  EXPECT_GE(report.sharding.offload_fraction, 0);
  EXPECT_LE(report.sharding.offload_fraction, 1);
}

TEST_F(Trainer, FilesAreMeteredWithoutWhatSavingMoves) {
  TrainerOptions o = options();
  o.stage = 2;
  o.offload = Offload::kOptimizer;
  o.tier = Tier::kFile;
  o.offload_directories = {directory_};
  o.steps = 5;
  const RankReport undisturbed = run_training(o).ranks[0];
  o.save_state = path("state");
  o.save_every = 2;

  const RankReport saved = run_training(o).ranks[0];

  EXPECT_EQ(saved.file_written_bytes_per_step, undisturbed.file_written_bytes_per_step);
  EXPECT_GT(saved.file_written_bytes_per_step, 0);
}

TEST_F(Trainer, AnOverflowedStepIsSkippedAndHasNoNorm) {
  TrainerOptions o = options();
  o.dtype = DataType::kFloat16;
  o.loss_scale = 1e30;
  o.steps = 2;

  const TrainingReport report = run_training(o);

  EXPECT_FALSE(report.grad_norm[0].has_value());
  const auto json = nlohmann::json::parse(report_json(report));
  EXPECT_TRUE(json["grad_norm"][0].is_null());
}

TEST_F(Trainer, TheReportHasItsKeysAndFullPrecision) {
  TrainerOptions o = options();
  o.ranks = 2;
  const TrainingReport report = run_training(o);

  const auto json = nlohmann::json::parse(report_json(report));

  for (const char* key :
       {"world_size", "stage", "dtype", "parameters", "steps", "loss", "grad_norm", "digest",
        "tokens_per_second", "compute_threads", "device", "communicator", "matmul", "ranks"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_EQ(json["loss"].get<std::vector<double>>(), report.loss);
  ASSERT_EQ(json["ranks"].size(), 2u);
  for (const char* key : {"peak_bytes", "planned_bytes"}) {
    for (const char* pool : {"parameters", "gradients", "optimizer", "gathered", "buckets", "activations"}) {
      EXPECT_TRUE(json["ranks"][1][key].contains(pool)) << key << pool;
    }
  }
}

TEST_F(Trainer, AnOptionThatDiffersBetweenRanksIsNamed) {
  TrainerOptions other = options();
  other.lr = 2e-3;

  const Status status = error_of({options(), options(), other});

  EXPECT_NE(status.message().find("--lr"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("2"), std::string::npos) << status.message();
}

TEST_F(Trainer, ABudgetTooSmallIsRefused) {
  TrainerOptions o = options();
  o.ranks = 2;
  o.memory_bytes = 1;

  const Status status = error_of({o, o});

  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory) << status.message();
}

TEST_F(Trainer, StateSavedWithAnotherSeedIsRefused) {
  TrainerOptions o = options();
  o.save_state = path("state");
  run_training(o);
  o.save_state.clear();
  o.load_state = path("state");
  o.seed = 99;

  const Status status = error_of({o});

  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("--seed"), std::string::npos);
}

TEST_F(Trainer, ATextShorterThanASampleIsRefused) {
  std::ofstream(path("short")) << "0123456789ab";  // 12 bytes: one too few.
  TrainerOptions o = options();
  o.text = {path("short")};

  const Status status = error_of({o});

  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("--sequence 12"), std::string::npos);
}

TEST(ProgressTimes, HaveTwoUnitsAtMost) {
  EXPECT_EQ(format_seconds(0), "0 s");
  EXPECT_EQ(format_seconds(59.4), "59 s");
  EXPECT_EQ(format_seconds(59.6), "1 min 00 s");
  EXPECT_EQ(format_seconds(3599), "59 min 59 s");
  EXPECT_EQ(format_seconds(3600), "1 h 00 min");
  EXPECT_EQ(format_seconds(2 * 3600 + 5 * 60 + 7), "2 h 05 min");
  EXPECT_EQ(format_seconds(100 * 3600 + 59 * 60 + 59), "100 h 59 min");
}

TEST(GptCommand, MistakesExitWith2AndSayWhatIsWrong) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> mistakes = {
      {{"--batch", "0"}, "--batch"},
      {{"--batch", "-1"}, "--batch"},
      {{"--stage", "4"}, "--stage is 4; use 0, 1, 2 or 3"},
      {{"--heads", "3"}, "--heads 3"},
      {{"--hidden", "0"}, "--hidden"},
      {{"--dtype", "fp8"}, "--dtype is 'fp8'; use fp32, bf16 or fp16"},
      {{"--device", "tpu"}, "--device is 'tpu'; use host"},
      {{"--order", "group"}, "--order is 'group'"},
      {{"--order", "fast"}, "--communicator nccl"},
      {{"--order", "group:0"}, "--order is group:0"},
      {{"--order", "2"}, "--order is 2"},
      {{"--shard-within", "host"}, "--shard-within is 'host'"},
      {{"--shard-within", "group"}, "add --order group:G"},
      {{"--device", "cuda:x"}, "--device is 'cuda:x'; use host"},
      {{"--device", "cuda", "--communicator", "gloo"}, "--communicator gloo"},
      {{"--bucket", "12parsecs"}, "--bucket is '12parsecs'"},
      {{"--memory", "-4"}, "--memory"},
      {{"--accumulate", "local", "--stage", "2"}, "--accumulate local"},
      {{"--save-every", "3"}, "--save-state"},
      {{"--load-state", "a", "--initial", "b"}, "--initial"},
      {{"--resume"}, "--resume needs --save-state"},
      {{"--resume", "--save-state", "a", "--load-state", "b"}, "--resume"},
      {{"--lr", "nan"}, "--lr"},
      {{"--beta2", "1"}, "--beta2"},
      {{"--communicator", "telepathy"}, "--communicator: 'telepathy' was given; use one of auto|shm"},
      {{"--matmul", "abacus"}, "--matmul: 'abacus' was given; use one of library|plain"},
      {{"--ranks", "0"}, "--ranks"},
      {{"--offload", "all"}, "--offload is 'all'; use none, optimizer or optimizer+parameters"},
      {{"--offload", "optimizer+parameters", "--stage", "2"}, "use stage 3"},
      {{"--offload", "optimizer", "--offload-tier", "disk"}, "nvme:DIR[,DIR...]"},
      {{"--offload", "optimizer", "--offload-tier", "nvme:"}, "without an empty directory"},
      {{"--offload", "optimizer", "--offload-tier", "nvme:a,,b"}, "without an empty directory"},
      {{"--offload", "optimizer", "--offload-tier", "nvme:a,"}, "without an empty directory"},
      {{"--offload-tier", "nvme:a"}, "add --offload optimizer"},
      {{"--offload-fraction", "0.5"}, "add --offload optimizer"},
      {{"--offload", "optimizer", "--offload-fraction", "1.5"},
       "--offload-fraction is 1.5; use 0 to 1, or auto"},
      {{"--offload", "optimizer", "--offload-fraction", "half"},
       "--offload-fraction is 'half'; use 0 to 1, or auto"},
      {{"--offload", "optimizer", "--offload-staging", "1GiB"}, "add --offload-tier nvme:DIR"},
      {{"--offload", "optimizer", "--offload-tier", "nvme:a", "--offload-staging", "4KiB"},
       "--offload-staging is 4KiB; use at least 8 MiB"},
      {{"--no-such-option"}, "--no-such-option"},
      {{"--lr", ""}, "--lr was given an empty value"},
      {{"--stage="}, "--stage was given an empty value"},
      {{"--report", ""}, "--report was given an empty value"},
      {{"--seed", "-1"}, "--seed"},
      {{"--seed", "18446744073709551616"}, "--seed"},
      {{"--save-every", "-1", "--save-state", "d"}, "--save-every"},
      {{"--threads", "257"}, "--threads: '257' was given; use a whole number from 0 to 256"},
      {{"--threads", "4294967297"}, "--threads"},
      {{"--memory", "0.5"}, "--memory is 0.5"},
      {{"--lr", "inf"}, "--lr"},
      {{"--lr", "1e39"}, "--lr"},
      {{"--weight-decay", "nan"}, "--weight-decay"},
      {{"--clip", "-1"}, "--clip"},
      {{"--beta1", "-0.1"}, "at least 0 and less than 1"},
      {{"--epsilon", "0"}, "--epsilon: '0' was given; use a number of at least 1e-30"},
      {{"--layers", "16777216", "--hidden", "16777216"}, "2^56"},
  };
  for (const auto& [arguments, expected] : mistakes) {
    ::testing::internal::CaptureStderr();
    const ParsedCommand command = parse_command(arguments);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_FALSE(command.options.has_value()) << expected;
    EXPECT_EQ(command.exit_code, 2) << expected;
    EXPECT_NE(said.find(expected), std::string::npos) << said;
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  }
}

TEST(GptCommand, OptionsArriveWhereTheyBelong) {
  const ParsedCommand command = parse_command({"--ranks",
                                               "4",
                                               "--stage",
                                               "3",
                                               "--dtype",
                                               "bf16",
                                               "--accumulate",
                                               "shard",
                                               "--micro-steps",
                                               "3",
                                               "--bucket",
                                               "64KiB",
                                               "--order",
                                               "group:2",
                                               "--shard-within",
                                               "group",
                                               "--memory",
                                               "1.5GiB",
                                               "--no-overlap",
                                               "--offload",
                                               "optimizer+parameters",
                                               "--offload-tier",
                                               "nvme:/a,b c",
                                               "--offload-fraction",
                                               "0.75",
                                               "--offload-staging",
                                               "64MiB",
                                               "--text",
                                               "a",
                                               "b",
                                               "--steps",
                                               "7",
                                               "--seed",
                                               "18446744073709551615"});

  ASSERT_TRUE(command.options.has_value());
  EXPECT_EQ(command.options->ranks, 4);
  EXPECT_EQ(command.options->stage, 3);
  EXPECT_EQ(command.options->dtype, DataType::kBfloat16);
  EXPECT_EQ(command.options->micro_steps, 3);
  EXPECT_EQ(command.options->bucket_bytes, 65536u);
  EXPECT_EQ(command.options->group, 2);
  EXPECT_TRUE(command.options->shard_within_group);
  EXPECT_EQ(command.options->memory_bytes, 1610612736u);
  EXPECT_FALSE(command.options->overlap);
  EXPECT_EQ(command.options->offload, Offload::kOptimizerAndParameters);
  EXPECT_EQ(command.options->tier, Tier::kFile);
  EXPECT_EQ(command.options->offload_directories, (std::vector<std::string>{"/a", "b c"}));
  EXPECT_EQ(command.options->offload_fraction, 0.75);
  EXPECT_EQ(command.options->staging_bytes, 64u << 20);
  EXPECT_EQ(command.options->text, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(command.options->steps, 7u);
  EXPECT_EQ(command.options->seed, UINT64_MAX);
}

TEST(GptCommand, ADeviceBringsItsOwnDefaults) {
  const auto resolved = [](const std::vector<std::string>& words) {
    return resolve_options(parse_command(words).options.value());
  };
  const TrainerOptions second = resolved({"--device", "cuda:1", "--ranks", "2"});
  EXPECT_EQ(second.device, (DeviceChoice{.cuda = true, .ordinal = 1}));
  EXPECT_EQ(second.communicator, "local");
  EXPECT_EQ(second.matmul, "library");
  EXPECT_EQ(resolved({"--device", "cuda"}).device, (DeviceChoice{.cuda = true}));
  EXPECT_EQ(resolved({"--device", "host"}).device, DeviceChoice{});
}

TEST(GptCommand, ProcessesCompareTheOptionsThatDecideTheirFirstOperations) {
  const auto configuration = [](const std::vector<std::string>& words) {
    return configuration_of(parse_command(words).options.value());
  };
  const std::string common = configuration({});
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"--tensor-parallel", "2"},
                                             {"--pipeline-parallel", "2"},
                                             {"--recompute", "block"},
                                             {"--recompute", "block", "--activations", "partition"},
                                             {"--recompute", "block", "--activations", "auto"}}) {
    EXPECT_NE(configuration(words), common) << words.front();
  }
}

TEST(GptCommand, HelpIsOnStdoutAndNamesEveryOption) {
  ::testing::internal::CaptureStdout();
  const ParsedCommand command = parse_command({"--help"});
  const std::string help = ::testing::internal::GetCapturedStdout();

  EXPECT_FALSE(command.options.has_value());
  EXPECT_EQ(command.exit_code, 0);
  for (const char* option :
       {"--ranks",      "--stage",   "--dtype",      "--device",       "--communicator", "--matmul",
        "--layers",     "--hidden",  "--heads",      "--sequence",     "--batch",        "--micro-steps",
        "--accumulate", "--steps",   "--lr",         "--weight-decay", "--clip",         "--seed",
        "--text",       "--bucket",  "--no-overlap", "--memory",       "--save-state",   "--save-every",
        "--load-state", "--initial", "--export",     "--report"}) {
    EXPECT_NE(help.find(option), std::string::npos) << option;
  }
}

}  // namespace
}  // namespace forebay::gpt
