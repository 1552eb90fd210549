// forebay-gpt over the fake NCCL, with a fake GPU for each rank. Results are bit for bit those of the host.
// The fake's ranks are threads of one process, so it refuses several processes, and one process alone trains.

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "forebay/host_backend.h"
#include "forebay/local_communicator.h"
#include "tests/end_to_end/parallel_run.h"
#include "tests/support/fake_gpu.h"
#include "tests/support/fake_nccl_library.h"
#include "tests/support/process.h"
#include "trainer/rank_setup.h"

namespace forebay::testing {
namespace {

using Json = nlohmann::json;

const Words kAsThreads = {"--device", "cuda", "--communicator", "nccl-threads"};
const Words kAsProcesses = {"--device", "cuda", "--communicator", "nccl"};

void expect_the_bits_of_the_host(const Words& words, int ranks, const Words& model = kSmall) {
  SCOPED_TRACE(::testing::PrintToString(words));
  const Words run = model + words + Words{"--ranks", std::to_string(ranks)};
  const gpt::TrainingReport host = train(run + kOnHost);
  const FakeGpu gpu(gpus(ranks));
  const FakeNcclLibrary nccl;

  const gpt::TrainingReport report = train(run + kAsThreads);

  EXPECT_EQ(report.digest, host.digest);
  EXPECT_EQ(report.loss, host.loss);
  EXPECT_EQ(report.grad_norm, host.grad_norm);
  EXPECT_EQ(report.communicator, "nccl");
  EXPECT_GT(nccl.controls().accounts().launches, 0u);
  for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
    EXPECT_EQ(report.ranks[rank].sent_bytes_per_step, host.ranks[rank].sent_bytes_per_step);
    EXPECT_EQ(report.ranks[rank].received_bytes_per_step, host.ranks[rank].received_bytes_per_step);
  }
}

TEST(NcclTraining, GivesTheBitsOfTheHostAtEveryStage) {
  for (const char* stage : {"0", "1", "2", "3"}) expect_the_bits_of_the_host({"--stage", stage}, 3);
}

TEST(NcclTraining, GivesTheBitsOfTheHostInGroups) {
  expect_the_bits_of_the_host({"--stage", "3", "--order", "group:2"}, 4);
  expect_the_bits_of_the_host({"--stage", "2", "--order", "group:2", "--shard-within", "group"}, 4);
}

TEST(NcclTraining, TakesNcclsOwnSumsWhenTheyAreFast) {
  const Words run = kSmall + Words{"--ranks", "3", "--stage", "2"};
  const gpt::TrainingReport host = train(run + kOnHost);
  const FakeGpu gpu(gpus(3));
  const FakeNcclLibrary nccl;

  const gpt::TrainingReport report = train(run + kAsThreads + Words{"--order", "fast"});

  // The fake adds from the last rank on, so the sums are the same only up to fp32 rounding.
  EXPECT_NE(report.digest, host.digest);
  ASSERT_EQ(report.loss.size(), host.loss.size());
  for (std::size_t i = 0; i < host.loss.size(); ++i) EXPECT_NEAR(report.loss[i], host.loss[i], 1e-4);
}

TEST(NcclTraining, GivesTheBitsOfTheHostWhateverElseIsChosen) {
  expect_the_bits_of_the_host({"--stage", "3", "--dtype", "bf16", "--micro-steps", "3"}, 4);
  expect_the_bits_of_the_host({"--stage", "2", "--dtype", "fp16", "--offload", "optimizer"}, 2);
  expect_the_bits_of_the_host({"--stage", "0"}, 1);
}

TEST(NcclTraining, GivesTheBitsOfTheHostWhereRanksShareLayers) {
  expect_the_bits_of_the_host(
      {"--tensor-parallel", "3", "--recompute", "block", "--activations", "partition"}, 3);
  expect_the_bits_of_the_host({"--tensor-parallel", "3", "--stage", "3", "--dtype", "bf16"}, 6);
}

TEST(NcclTraining, GivesTheBitsOfTheHostWhereRanksAreStagesOfAPipeline) {
  const Words model = with(kSmall, {"--layers", "3", "--micro-steps", "4"});
  expect_the_bits_of_the_host({"--pipeline-parallel", "3", "--stage", "1"}, 3, model);
  expect_the_bits_of_the_host(
      {"--pipeline-parallel", "2", "--stage", "3", "--dtype", "bf16", "--recompute", "block"}, 4, model);
}

// A rank of two hosts with two GPUs each, and rank 0 as a peer that hears of its failure.
class RankOverNccl : public ::testing::Test {
 protected:
  RankOverNccl()
      : gpu_(gpus(2)),
        group_(LocalGroup::create(4)),
        backend_(value_or_throw(HostBackend::create({}))),
        kernels_(value_or_throw(Kernels::create(*backend_, {}))),
        peer_(value_or_throw(group_->communicator(0, *backend_, *kernels_))) {
    options_ = gpt::resolve_options(
        gpt::parse_command(kSmall + kAsProcesses + Words{"--ranks", "1"}).options.value());
  }

  gpt::Rank open() {
    return gpt::open_rank(options_, place_, [this](Backend& backend, Kernels& kernels) {
      return group_->communicator(place_.rank, backend, kernels);
    });
  }
  const FakeGpu gpu_;
  const FakeNcclLibrary nccl_;
  const std::shared_ptr<LocalGroup> group_;
  const std::unique_ptr<Backend> backend_;
  const std::unique_ptr<Kernels> kernels_;
  const std::unique_ptr<Communicator> peer_;
  gpt::TrainerOptions options_;
  LaunchEnvironment place_{.launcher = "torchrun", .rank = 2, .size = 4, .local_rank = 1, .local_size = 2};
};

TEST_F(RankOverNccl, TakesTheGpuOfItsPlaceOnItsHost) {
  options_.room_bytes = std::size_t{1} << 20;
  const gpt::Rank rank = open();
  EXPECT_EQ(rank.ordinal, 1);
  place_.rank = 1;
  options_.room_bytes = std::size_t{3} << 20;
  place_.local_rank = 0;
  const gpt::Rank other = open();
  EXPECT_EQ(other.ordinal, 0);
  EXPECT_EQ(rank.backend->capabilities().memory_bytes - other.backend->capabilities().memory_bytes,
            std::size_t{2} << 20);
}

TEST_F(RankOverNccl, WithoutAGpuOfItsOwnItTellsAllRanks) {
  place_.local_size = 3;
  EXPECT_THROW(open(), Error);
  EXPECT_EQ(peer_->status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(peer_->status().message().find("rank 2: --device cuda: "), 0u) << peer_->status().message();
}

TEST_F(RankOverNccl, OnlyALauncherMayHaveChosenTheGpus) {
  place_.local_size = 3;
  ::setenv("NCCL_HOSTID", "two", 1);
  EXPECT_EQ(open().ordinal, 1);
  place_.launcher.clear();
  place_.rank = 3;
  EXPECT_THROW(open(), Error);
  ::unsetenv("NCCL_HOSTID");
}

// The program, as a user starts it.
class NcclCommand : public ::testing::Test {
 protected:
  static Process::Variables variables(int gpu_count) {
    return {{"FOREBAY_LIBCUDA", FOREBAY_FAKE_LIBCUDA},
            {"FAKE_CUDA_KERNELS", FOREBAY_FAKE_KERNELS},
            {"FAKE_CUDA_STRICT", "1"},
            {"FAKE_CUDA_DEVICES", std::to_string(gpu_count)},
            {"FOREBAY_NCCL_LIBRARY", FOREBAY_FAKE_LIBNCCL}};
  }
  static Finished run(const Words& words, const Process::Variables& environment) {
    return run_program(Words{FOREBAY_GPT} + words, environment);
  }
  static void expect_refused(const Finished& finished, int exit_code, const Words& named) {
    EXPECT_EQ(finished.exit_code, exit_code) << finished.output;
    for (const std::string& word : named)
      EXPECT_NE(finished.output.find(word), std::string::npos) << word << " is not in " << finished.output;
    EXPECT_EQ(std::count(finished.output.begin(), finished.output.end(), '\n'), 1) << finished.output;
  }
  Json report() const {
    std::ifstream file(path_);
    return Json::parse(file, nullptr, false);
  }

  TemporaryDirectory directory_;
  const std::string path_ = directory_ / "report.json";
};

TEST_F(NcclCommand, SaysWhichLibraryItUsesAndReportsIt) {
  const Words words = kSmall + Words{"--ranks", "3", "--stage", "3"};
  Words aloud = words;
  std::erase(aloud, "--quiet");

  const Finished finished = run(aloud + kAsThreads + Words{"--report", path_}, variables(3));

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  const std::string first_line = finished.output.substr(0, finished.output.find('\n'));
  EXPECT_EQ(first_line, std::string("forebay-gpt: NCCL 2.28.9 from ") + FOREBAY_FAKE_LIBNCCL);
  EXPECT_EQ(report().at("communicator"), "nccl");
  EXPECT_EQ(report().at("digest"), train(words + kOnHost).digest);
}

TEST_F(NcclCommand, ARankAloneIsAProcessThatTrains) {
  const Words words = kSmall + Words{"--stage", "1"};

  const Finished finished = run(words + kAsProcesses + Words{"--report", path_}, variables(1));

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_EQ(report().at("communicator"), "nccl");
  EXPECT_EQ(report().at("digest"), train(words + kOnHost).digest);
}

TEST_F(NcclCommand, RanksAsProcessesTakeAGpuEachAndAskNccl) {
  const Words words = kSmall + Words{"--ranks", "2", "--stage", "1"};
  expect_refused(run(words + kAsProcesses, variables(2)), 1, {"over NCCL", "the id is not of this process"});
}

TEST_F(NcclCommand, RefusesRanksThatWouldShareAGpu) {
  const Words words = kSmall + Words{"--ranks", "2", "--stage", "1"};
  const Words named = {"--communicator nccl", "2 ranks", "have 1", "--communicator local"};
  const Words on_one = {"--device", "cuda:1", "--communicator"};
  expect_refused(run(words + kAsThreads, variables(1)), 1, named);
  expect_refused(run(words + kAsProcesses, variables(1)), 1, named);
  expect_refused(run(words + on_one + Words{"nccl-threads"}, variables(2)), 1, named);
  expect_refused(run(words + on_one + Words{"nccl"}, variables(2)), 1, named);
}

TEST_F(NcclCommand, RefusesWhatMakesNoSense) {
  const Words words = kSmall + Words{"--ranks", "2"};
  const Words over_nccl = {"--communicator", "nccl"};
  expect_refused(run(words + over_nccl, variables(2)), 2, {"--communicator nccl", "--device cuda"});
  expect_refused(run(words + Words{"--device", "cuda", "--nccl-library", "x.so"}, variables(2)), 2,
                 {"--nccl-library", "--communicator nccl"});
  Process::Variables launched = variables(2);
  launched.insert({{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "2"}, {"FOREBAY_STORE", directory_.path()}});
  expect_refused(run(words + kAsThreads, launched), 1, {"--communicator nccl"});
}

TEST_F(NcclCommand, SaysWhatItTriedWhereThereIsNoNccl) {
  const std::string missing = directory_ / "no-nccl.so";
  Process::Variables elsewhere = variables(2);
  elsewhere["FOREBAY_NCCL_LIBRARY"] = missing;
  const Words named = {missing, "FOREBAY_NCCL_LIBRARY", "--nccl-library"};
  const Words words = kSmall + Words{"--ranks", "2", "--stage", "1"};
  expect_refused(run(words + kAsThreads, elsewhere), 1, named);
  expect_refused(run(words + kAsProcesses, elsewhere), 1, named);
  expect_refused(run(words + kAsThreads + Words{"--nccl-library", missing}, variables(2)), 1, named);
  // The option has precedence over the variable.
  const Words option = {"--nccl-library", FOREBAY_FAKE_LIBNCCL};
  const Finished found = run(words + kAsThreads + option, elsewhere);
  EXPECT_EQ(found.exit_code, 0) << found.output;
}

TEST_F(NcclCommand, EndsInOneLineWhenNcclFailsOneRank) {
  Process::Variables failing = variables(3);
  failing.insert({{"FAKE_NCCL_FAIL_RANK", "1"}, {"FAKE_NCCL_FAIL_CALL", "80"}});
  const Words words = kSmall + Words{"--ranks", "3", "--stage", "3"};
  expect_refused(run(words + kAsThreads, failing), 1, {"rank 1", "call 80 of rank 1"});
}

}  // namespace
}  // namespace forebay::testing
