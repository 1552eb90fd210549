// The trainer over `local` ranks, and the command line: small runs that end in well under a second each. The
// whole matrix of stages, types and ranks is tested elsewhere (tests/end_to_end).

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "forebay/error.h"
#include "model/random.h"
#include "model/text.h"
#include "output/progress.h"
#include "output/safetensors.h"
#include "output/summary.h"
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

// More than the pinned buffers for losses.
TEST_F(Trainer, ManyMicroStepsHaveTheLossOfOneBatch) {
  TrainerOptions together = options();
  together.batch = 12;
  together.steps = 2;
  TrainerOptions apart = together;
  apart.batch = 2;
  apart.micro_steps = 6;

  const TrainingReport one = run_training(together);
  const TrainingReport six = run_training(apart);

  for (std::size_t i = 0; i < one.loss.size(); ++i) EXPECT_NEAR(six.loss[i], one.loss[i], 1e-5 * one.loss[i]);
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

  for (const RankReport& one : {undisturbed, saved}) {
    EXPECT_EQ(one.file_written_bytes_per_step, static_cast<double>(one.planned_file_written_bytes_per_step));
    EXPECT_EQ(one.file_read_bytes_per_step, static_cast<double>(one.planned_file_read_bytes_per_step));
  }
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

// No two figures are equal.
TrainingReport printed_report() {
  TrainingReport report;
  report.training = {{"seed", "1"}, {"lr", "0.5"}};
  report.traffic = {{{"all_gather", 3, {4, 5}, {6, 7}}},
                    {{"send", 8, {9, 10}, {11, 12}}, {"recv", 13, {14, 15}, {16, 17}}}};
  report.world_size = 21;
  report.tensor_parallel = 22;
  report.data_parallel = 23;
  report.pipeline_parallel = 24;
  report.recompute = "block";
  report.activations = "partition";
  report.dropout = 0.25;
  report.sharding.optimizer = Optimizer::kLion;
  report.sharding.moments = MomentFormat::kBfloat16;
  report.sharding.master_weights = false;
  report.sharding.ema = 0.5;
  report.offloaded_parameters = 25;
  report.store = "the store";
  report.device = "the device";
  report.communicator = "the communicator";
  report.matmul = "plain";
  report.compute_threads = 26;
  report.parameters = 27;
  report.first_step = 28;
  report.steps = 31;
  report.loss = {5.5, std::nan(""), 4.125};
  report.grad_norm = {1.5, std::nullopt, INFINITY};
  report.evaluations = {{29, 4.5}, {30, std::nan("")}};
  report.generated = "text \xff";
  report.digest = "00ff";
  report.tokens_per_second = 32.5;
  report.interrupted = true;
  report.ranks.resize(2);
  std::uint64_t next = 100;
  for (RankReport& rank : report.ranks) {
    const auto fill = [&](auto& figure) {
      if constexpr (std::is_same_v<std::decay_t<decltype(figure)>, PoolBytes>) {
        figure = {next, next + 1, next + 2, next + 3, next + 4, next + 5};
        next += 6;
      } else {
        figure = static_cast<std::decay_t<decltype(figure)>>(next++);
      }
    };
#define FILL(Type, name) fill(rank.name);
    FOREBAY_RANK_FIGURES(FILL)
#undef FILL
  }
  return report;
}

TEST(TrainingReportJson, EachFigureHasItsKey) {
  nlohmann::json json = nlohmann::json::parse(report_json(printed_report()));
  const nlohmann::json ranks = json["ranks"];
  json.erase("ranks");
  EXPECT_EQ(json, nlohmann::json::parse(R"(
{"accumulate": "shard", "activations": "partition", "bucket_bytes": 16777216,
 "communicator": "the communicator", "compute_threads": 26, "data_parallel": 23, "device": "the device",
 "digest": "00ff", "dropout": 0.25, "dtype": "fp32", "ema": 0.5,
 "evaluations": [{"loss": 4.5, "step": 29}, {"loss": null, "step": 30}], "first_step": 28,
 "generated": "text �", "grad_norm": [1.5, null, null], "group": 1, "interrupted": true,
 "loss": [5.5, null, 4.125], "master_weights": "off", "matmul": "plain", "micro_steps": 1, "moments": "bf16",
 "offload": "none", "offload_fraction": 1.0, "offload_staging_bytes": 100663296, "offload_tier": "cpu",
 "offloaded_parameters": 25, "optimizer": "lion", "parameters": 27, "pipeline_parallel": 24,
 "recompute": "block", "shard_within_group": false, "stage": 0, "steps": 31, "store": "the store",
 "tensor_parallel": 22, "tokens_per_second": 32.5, "training": {"lr": "0.5", "seed": "1"}, "world_size": 21})"));
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[0]["traffic"].dump(),
            R"([{"count":3,"operation":"all_gather","received_bytes":[6,7],"sent_bytes":[4,5]}])");
  EXPECT_EQ(
      ranks[1]["traffic"].dump(),
      R"([{"count":8,"operation":"send","received_bytes":[11,12],"sent_bytes":[9,10]},{"count":13,"operation":"recv","received_bytes":[16,17],"sent_bytes":[14,15]}])");
  EXPECT_EQ(
      ranks[0]["planned_bytes"].dump(),
      R"({"activations":112,"buckets":111,"gathered":110,"gradients":108,"optimizer":109,"parameters":107})");
  EXPECT_EQ(ranks[1]["step_ms"], 187.0);
}

TEST(TrainingReportJson, AnOptimizerThatIsTheUsualOneIsNotSaid) {
  const nlohmann::json json = nlohmann::json::parse(report_json(TrainingReport()));
  for (const char* const key : {"optimizer", "moments", "master_weights", "ema"})
    EXPECT_FALSE(json.contains(key)) << key;
}

TEST(TrainingReportJson, ALossIsLostFromTheFirstStepOfTheLastRunOfBadOnes) {
  const auto first = [](std::vector<double> losses, std::uint64_t first_step = 0) {
    TrainingReport report;
    report.loss = std::move(losses);
    report.first_step = first_step;
    return first_step_of_lost_loss(report);
  };
  EXPECT_EQ(first({}), std::nullopt);
  EXPECT_EQ(first({1.0}), std::nullopt);
  EXPECT_EQ(first({NAN, 1.0}), std::nullopt);
  EXPECT_EQ(first({1.0, NAN}), 2u);
  EXPECT_EQ(first({INFINITY, NAN}), 1u);
  EXPECT_EQ(first({1.0, NAN, 1.0, INFINITY, NAN}, 10), 14u);
}

TEST(FlightJson, HasTheCauseAndTheTimesOfTheLastOperations) {
  using std::chrono::microseconds;
  std::vector<OperationRecord> operations(4);
  for (int i = 0; i < 4; ++i) {
    operations[i].what = "operation " + std::to_string(i);
    operations[i].state = static_cast<decltype(operations[i].state)>(i);
    operations[i].queued = microseconds(1500 + i);
    operations[i].begun = microseconds(2500 + i);
    operations[i].ended = microseconds(3500 + i);
  }
  EXPECT_EQ(nlohmann::json::parse(flight_json(Status(StatusCode::kPeerLost, "rank 1 is gone"), operations)),
            nlohmann::json::parse(R"(
{"cause": "kPeerLost: rank 1 is gone",
 "last_operations": [{"operation": "operation 0", "state": "queued", "queued_ms": 1.5, "begun_ms": 2.5,
                      "ended_ms": 3.5},
                     {"operation": "operation 1", "state": "running", "queued_ms": 1.501, "begun_ms": 2.501,
                      "ended_ms": 3.501},
                     {"operation": "operation 2", "state": "done", "queued_ms": 1.502, "begun_ms": 2.502,
                      "ended_ms": 3.502},
                     {"operation": "operation 3", "state": "failed", "queued_ms": 1.503, "begun_ms": 2.503,
                      "ended_ms": 3.503}]})"));
}

TEST_F(Trainer, OpensWithEachFigureInItsRow) {
  testing::write_text(path("other"), 100, 7);
  const auto opening = [&](const TrainerOptions& o) {
    ::testing::internal::CaptureStderr();
    ::testing::internal::CaptureStdout();
    run_training(o);
    ::testing::internal::GetCapturedStdout();
    const std::string said = ::testing::internal::GetCapturedStderr();
    return said.substr(0, said.find("evaluation after"));
  };
  TrainerOptions o = options();
  o.progress = true;
  o.steps = 0;
  o.ranks = 4;
  o.pipeline_parallel = 2;
  o.micro_steps = 3;
  o.stage = 1;
  o.recompute_every = 1;
  o.evaluation_text = {path("other")};
  o.evaluate_every = 5;
  o.generate = 2;
  EXPECT_EQ(opening(o), R"(forebay-gpt: training a GPT of 20,928 parameters
  model       2 layers, 24 columns, 3 heads, 12 positions
  data        2,000 bytes of text; 24 tokens per rank and micro-step, 144 in each step
  ranks       4, communicator local; 1 tensor-parallel x 2 data-parallel x 2 pipeline-parallel
  device      host, 1 thread per rank, plain products
  sharding    ZeRO stage 1, fp32, buckets of 8.00 KiB
  pipeline    each stage waits at least 25 % of the time; more --micro-steps make it less
  offload     none
  activations recompute block, inputs of these blocks: keep
  evaluation  8 samples of another text in 2 passes at the end and every 5 steps
  text        2 bytes to generate, with a pass for each
  memory      2.00 MiB device, 0 B host, 0 B files on rank 0, as planned
)");

  TrainerOptions offloaded = options();
  offloaded.progress = true;
  offloaded.steps = 0;
  offloaded.ranks = 4;
  offloaded.stage = 3;
  offloaded.dtype = DataType::kBfloat16;
  offloaded.group = 2;
  offloaded.shard_within_group = true;
  offloaded.offload = Offload::kOptimizer;
  offloaded.offload_fraction = 0.6;
  offloaded.evaluation_text = {path("other")};
  EXPECT_EQ(opening(offloaded), R"(forebay-gpt: training a GPT of 20,928 parameters
  model       2 layers, 24 columns, 3 heads, 12 positions
  data        2,000 bytes of text; 24 tokens per rank and micro-step, 96 in each step
  ranks       4, communicator local
  device      host, 1 thread per rank, plain products
  sharding    ZeRO stage 3, bf16, buckets of 8.00 KiB, all-reduce groups of 2 ranks, sharded within
              them
  offload     optimizer to cpu: 69 % of the model, 1 of 4 units stay on the device
  evaluation  8 samples of another text in 1 pass at the end; each pass sends 26.00 KiB per rank, as
              planned
  memory      14.00 MiB device, 128.00 KiB host, 0 B files per rank, as planned
)");
}

// The largest figures of any rank, activations and offloaded states together.
TEST(Closing, EachFigureStandsInItsRow) {
  TrainingReport report = printed_report();
  report.steps = 1230;
  report.tokens_per_second = 12'345.6;
  report.digest = "0123456789abcdef0123456789abcdef";
  report.interrupted = false;
  report.evaluations.pop_back();
  report.ranks.assign(2, {});
  for (std::uint64_t i = 0; i < 2; ++i) {
    RankReport& rank = report.ranks[i];
    const std::uint64_t j = 1 - i;
    rank.reserved_bytes = (100 + i) << 20;
    rank.host_bytes = (200 + 5 * j) << 20;
    rank.saved_host_bytes = (10 + i) << 20;
    rank.file_bytes = (300 + i) << 20;
    rank.saved_file_bytes = (20 + 5 * j) << 20;
    rank.planned_reserved_bytes = (400 + j) << 20;
    rank.planned_host_bytes = (500 + 5 * i) << 20;
    rank.planned_saved_host_bytes = (30 + j) << 20;
    rank.planned_file_bytes = (600 + 5 * j) << 20;
    rank.planned_saved_file_bytes = (40 + i) << 20;
  }
  TrainerOptions o;
  o.steps = 1'234'567;
  o.save_state = "state";
  o.export_file = "weights";
  o.timeline_file = "timeline";
  o.report_file = "report";
  const auto closing = [&] {
    ::testing::internal::CaptureStderr();
    show_closing(o, report);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(closing(),
            "forebay-gpt: trained 1,230 of 1,234,567 steps, final loss 4.1250, 12346 tokens/s\n"
            "  evaluation  loss 4.5000 after step 29\n"
            "  measured    101.00 MiB device, 215.00 MiB host, 325.00 MiB files at the peak of any rank\n"
            "  planned     401.00 MiB device, 535.00 MiB host, 645.00 MiB files\n"
            "  digest      0123456789abcdef0123456789abcdef\n"
            "  files       state, weights, timeline, report\n");
  report.interrupted = true;
  EXPECT_NE(closing().find("  files       state, timeline, report\n"), std::string::npos) << closing();
  report.loss.clear();
  report.evaluations.clear();
  o.save_state = o.timeline_file = o.report_file = "";
  EXPECT_EQ(closing().find("forebay-gpt: trained 1,230 of 1,234,567 steps\n  measured"), 0u) << closing();
  EXPECT_EQ(closing().find("  files"), std::string::npos) << closing();
  o.progress = false;
  EXPECT_EQ(closing(), "");
}

// Without a terminal a line is printed for the first step, the last one, and every two seconds.
TEST(ProgressLines, TellTheFirstAndTheLastStep) {
  ::testing::internal::CaptureStderr();
  {
    Progress progress({.first_step = 10, .steps = 14, .tokens_per_step = 0});
    progress.show(11, 5.43216, 1.23456);
    progress.show(12, 5, 1);
    progress.show_evaluation(13, 4.98768);
    progress.show(14, 4.5, std::nullopt);
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(said,
            "step 11/14  loss 5.4322  grad norm 1.235  0 tokens/s  0 s left\n"
            "evaluation after step 13: loss 4.9877\n"
            "step 14/14  loss 4.5000  grad norm skipped  0 tokens/s  0 s left\n");

  ::testing::internal::CaptureStderr();
  {
    Progress progress({.enabled = false, .steps = 1});
    progress.show(1, 5, 1);
    progress.show_evaluation(1, 5);
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
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
      {{"--no\x1b[2J"}, "there is no option --no\\x1b[2J"},
      {{"--matmul", "\x1b[2J"}, "'\\x1b[2J' was given"},
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
      {{"--layers", "65536", "--hidden", "16777216"}, "2^56"},
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

// Each option that decides the result is named with its value, and a changed one changes that value alone.
TEST(GptCommand, EachSettingThatDecidesTheResultIsInTheReport) {
  using Settings = std::vector<std::pair<std::string, std::string>>;
  const auto settings = [](const std::vector<std::string>& words) {
    return training_of(parse_command(words).options.value());
  };
  const Settings usual = settings({});
  EXPECT_EQ(usual, (Settings{{"layers", "4"},
                             {"hidden", "128"},
                             {"heads", "4"},
                             {"sequence", "64"},
                             {"batch", "8"},
                             {"lr", "0.001"},
                             {"schedule", "constant"},
                             {"weight-decay", "0.1"},
                             {"clip", "1"},
                             {"beta1", "0.9"},
                             {"beta2", "0.95"},
                             {"epsilon", "1e-08"},
                             {"loss-scale", "65536"},
                             {"seed", "1"},
                             {"dropout", "0"},
                             {"tensor-parallel", "1"},
                             {"pipeline-parallel", "1"},
                             {"order", "rank"},
                             {"device", "host"},
                             {"matmul", ""},
                             {"initial", "no"}}));
  struct Change {
    std::vector<std::string> words;
    const char* name;
    const char* value;
  };
  for (const Change& change : {
           Change{{"--layers", "5"}, "layers", "5"},
           Change{{"--hidden", "256"}, "hidden", "256"},
           Change{{"--heads", "8"}, "heads", "8"},
           Change{{"--sequence", "65"}, "sequence", "65"},
           Change{{"--batch", "9"}, "batch", "9"},
           Change{{"--lr", "0.1"}, "lr", "0.1"},
           Change{{"--schedule", "cosine"}, "schedule", "cosine to 0 in 100 steps"},
           Change{{"--schedule", "wsd", "--last-lr", "1e-05", "--steps", "70", "--warmup", "70"},
                  "schedule",
                  "wsd to 1e-05 in 70 steps, warm-up 70"},
           Change{{"--warmup", "3"}, "schedule", "constant, warm-up 3"},
           Change{{"--weight-decay", "0.25"}, "weight-decay", "0.25"},
           Change{{"--clip", "0"}, "clip", "0"},
           Change{{"--beta1", "0.5"}, "beta1", "0.5"},
           Change{{"--beta2", "0.5"}, "beta2", "0.5"},
           Change{{"--epsilon", "1e-30"}, "epsilon", "1e-30"},
           Change{{"--loss-scale", "1"}, "loss-scale", "1"},
           Change{{"--seed", "7"}, "seed", "7"},
           Change{{"--dropout", "0.5"}, "dropout", "0.5"},
           Change{{"--tensor-parallel", "2"}, "tensor-parallel", "2"},
           Change{{"--pipeline-parallel", "2"}, "pipeline-parallel", "2"},
           Change{{"--order", "group:2"}, "order", "group:2"},
           Change{{"--order", "fast", "--communicator", "nccl", "--device", "cuda"}, "order", "fast"},
           Change{{"--device", "cuda:1"}, "device", "cuda"},
           Change{{"--matmul", "plain"}, "matmul", "plain"},
           Change{{"--initial", "file"}, "initial", "yes"},
           Change{{"--vocabulary", "300"}, "vocabulary", "300"},
           Change{{"--inner", "100"}, "inner", "100"},
           Change{{"--model", "llama"}, "model", "llama"},
           Change{{"--model", "llama", "--kv-heads", "2"}, "kv-heads", "2"},
           Change{{"--model", "llama", "--rope-theta", "500"}, "rope-theta", "500"},
           Change{{"--model", "llama"}, "kv-heads", "4"},
           Change{{"--model", "llama"}, "tied-head", "no"},
           Change{{"--optimizer", "lion"}, "optimizer", "lion"},
           Change{{"--moments", "bf16"}, "moments", "bf16"},
           Change{{"--ema", "0.5"}, "ema", "0.5"},
           Change{{"--optimizer", "muon", "--muon-rate", "match-rms-adamw"}, "muon-rate", "match-rms-adamw"},
       }) {
    SCOPED_TRACE(change.name + std::string(" ") + change.value);
    const Settings found = settings(change.words);
    EXPECT_NE(
        std::find(found.begin(), found.end(), std::pair<std::string, std::string>(change.name, change.value)),
        found.end());
    for (const auto& [name, value] : usual) {
      const auto other = std::find_if(found.begin(), found.end(),
                                      [&name = name](const auto& one) { return one.first == name; });
      ASSERT_NE(other, found.end()) << name;
      const bool follows = name == "order" || name == "device" || name == change.name;
      if (!follows) {
        EXPECT_EQ(other->second, value) << name;
      }
    }
  }
}

TEST(GptCommand, RanksAgreeOnEachOptionThatDecidesTheirOperations) {
  const auto agreement = [](const std::vector<std::string>& words) {
    return agreement_of(parse_command(words).options.value());
  };
  const auto usual = agreement({});
  struct Change {
    std::vector<std::string> words;
    const char* name;
    const char* value;
  };
  for (const Change& change : {
           Change{{"--seed", "7"}, "--seed", "7"},
           Change{{"--steps", "7"}, "--steps", "7"},
           Change{{"--recompute", "every:2"}, "--recompute", "every:2"},
           Change{
               {"--recompute", "block", "--activations", "partition+cpu"}, "--activations", "partition+cpu"},
           Change{{"--save-state", "d"}, "--save-state", "yes"},
           Change{{"--save-state", "d", "--save-every", "3"}, "--save-every", "3"},
           Change{{"--save-state", "d", "--keep", "2"}, "--keep", "2"},
           Change{{"--load-state", "d"}, "--load-state", "yes"},
           Change{{"--load-state", "d", "--load-step", "4"}, "--load-step", "4"},
           Change{{"--export", "f"}, "--export", "yes"},
           Change{{"--evaluation-text", "t", "--logits", "f"}, "--logits", "yes"},
           Change{{"--write-tokens", "f"}, "--write-tokens", "yes"},
           Change{{"--evaluation-text", "t", "--evaluate-every", "2"}, "--evaluate-every", "2"},
           Change{{"--evaluation-text", "t", "--evaluation-samples", "3"}, "--evaluation-samples", "3"},
           Change{{"--generate", "5"}, "--generate", "5"},
           Change{{"--generate", "5", "--prompt", "a\xff"}, "--prompt", "61ff"},
           Change{{"--generate", "5", "--temperature", "0.5"}, "--temperature", "0.5"},
       }) {
    SCOPED_TRACE(change.name);
    const auto found = agreement(change.words);
    ASSERT_EQ(found.size(), usual.size());
    std::string value;
    for (const auto& [name, one] : found) {
      if (name == change.name) value = one;
    }
    EXPECT_EQ(value, change.value);
    EXPECT_EQ(std::count(usual.begin(), usual.end(), std::pair<std::string, std::string>(change.name, value)),
              0);
  }
}

TEST(GptCommand, OptionsThatNeedOthersAreRefusedWithoutThem) {
  struct Mistake {
    std::vector<std::string> words;
    const char* answer;
  };
  for (const Mistake& mistake : {
           Mistake{{"--rope-theta", "500"},
                   "--rope-theta is for rotary position embeddings, which GPT-2 lacks; add --model llama"},
           Mistake{{"--offload", "optimizer", "--offload-tier", "nvme"},
                   "--offload-tier is nvme without a directory"},
           Mistake{{"--activations", "partition"}, "--activations partition needs recomputation"},
           Mistake{{"--activations", "partition+nvme", "--recompute", "block"},
                   "--activations is partition+nvme; use keep"},
           Mistake{{"--activations", "auto", "--recompute", "block", "--memory", "1GiB", "--bucket", "auto"},
                   "--activations auto fills"},
           Mistake{{"--recompute", "every:0"}, "--recompute is 'every:0'"},
           Mistake{{"--communicator", "nccl"}, "add --device cuda, or use auto"},
           Mistake{{"--nccl-library", "f"}, "--nccl-library is for ranks over NCCL"},
           Mistake{{"--device", "cuda", "--communicator", "shm"}, "with --device cuda use local"},
           Mistake{{"--text", "a", "--data", "b"}, "--text and --data both name the text"},
           Mistake{{"--last-lr", "0.1"}, "add --schedule cosine, say"},
           Mistake{{"--warmup", "8", "--steps", "7"}, "--warmup is 8 and --steps 7;"},
           Mistake{{"--evaluation-text", "a", "--evaluation-data", "b"},
                   "--evaluation-text and --evaluation-data both"},
           Mistake{{"--evaluate-every", "1"}, "--evaluate-every needs a text to evaluate"},
           Mistake{{"--evaluation-samples", "1"}, "--evaluation-samples needs a text to evaluate"},
           Mistake{{"--export", "f", "--export-shard", "1GiB"}, "add --export DIR/"},
           Mistake{{"--export", "d/", "--export-shard", "0"}, "--export-shard is '0'"},
           Mistake{{"--logits", "f"}, "--logits needs a text"},
           Mistake{{"--generate", "1", "--vocabulary", "300"},
                   "the tokens of a --vocabulary of 300 are not bytes"},
           Mistake{{"--prompt", "a"}, "add --generate N"},
           Mistake{{"--temperature", "2"}, "add --generate N"},
           Mistake{{"--keep", "2"}, "--keep says how many saved states"},
           Mistake{{"--save-async"}, "--save-async says how to save"},
           Mistake{{"--load-step", "1"}, "--load-step needs a directory of saved states"},
           Mistake{{"--elastic", "--save-state", "d"}, "--elastic goes on from the last saved state"},
           Mistake{{"--tokenizer", "words"}, "--tokenizer is 'words'; use bytes, or bpe FILE"},
           Mistake{{"--tokenizer", "bytes", "f"}, "--tokenizer is 'bytes f'; use bytes, or bpe FILE"},
           Mistake{{"--device", "cuda:-1"}, "--device is 'cuda:-1'"},
           Mistake{{"--dropout", "1"}, "a number of at least 0 and less than 1"},
           Mistake{{"--loss-scale", "0.5"}, "a number of at least 1"},
           Mistake{{"--keep", "0"}, "a whole number from 1 to 100000"},
           Mistake{{"--ranks", "1025"}, "a whole number from 1 to 1024"},
           Mistake{{"--batch", "16777217"}, "a whole number from 1 to 16777216"},
           Mistake{{"--report", "same", "--export", "same"}, "--report and --export both name same;"},
           Mistake{{"--report", "./same", "--data", "same"}, "--report and --data both name ./same;"},
           Mistake{{"--report", "same", "--save-state", "./same"},
                   "--report and --save-state both name same;"},
           Mistake{{"--report", "same", "--text", "other", "same"}, "--report and --text both name same;"},
           Mistake{{"--timeline", "same", "--evaluation-text", "same"},
                   "--timeline and --evaluation-text both name"},
       }) {
    ::testing::internal::CaptureStderr();
    const ParsedCommand command = parse_command(mistake.words);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(command.exit_code, 2) << mistake.answer;
    EXPECT_FALSE(command.options.has_value()) << mistake.answer;
    EXPECT_NE(said.find(mistake.answer), std::string::npos) << said;
  }
  // At their edges they are taken.
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"--warmup", "7", "--steps", "7"},
                                             {"--warmup", "8", "--steps", "0"},
                                             {"--threads", "256"},
                                             {"--keep", "100000", "--save-state", "d"},
                                             {"--ranks", "1024"},
                                             {"--loss-scale", "1"},
                                             {"--dropout", "0.999"},
                                             {"--epsilon", "1e-30"},
                                             {"--report", "a", "--export", "b"}}) {
    EXPECT_TRUE(parse_command(words).options.has_value()) << words[0] << " " << words[1];
  }
}

TEST(GptCommand, StagesOfAPipelineRecomputeTheLayersOfTheWholeModel) {
  TrainerOptions o;
  o.model.layers = 8;
  o.micro_steps = 3;
  using Layers = std::vector<std::size_t>;
  EXPECT_EQ(recomputed_layers(o, {.index = 0, .count = 1}), Layers());
  o.recompute_every = 3;
  EXPECT_EQ(recomputed_layers(o, {.index = 0, .count = 1}), (Layers{0, 3, 6}));
  EXPECT_EQ(recomputed_layers(o, {.index = 1, .count = 4}), (Layers{3}));
  EXPECT_EQ(recomputed_layers(o, {.index = 2, .count = 4}), Layers());
  EXPECT_EQ(recomputed_layers(o, {.index = 3, .count = 4}), (Layers{6}));
  EXPECT_EQ(forwards_ahead({.index = 0, .count = 4}), 3);
  EXPECT_EQ(forwards_ahead({.index = 3, .count = 4}), 0);
  EXPECT_EQ(passes_in_flight(o, {.index = 0, .count = 4}), 3) << "no more than micro-steps";
  EXPECT_EQ(passes_in_flight(o, {.index = 2, .count = 4}), 2);
  EXPECT_EQ(passes_in_flight(o, {.index = 3, .count = 4}), 1);
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
