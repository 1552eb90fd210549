// forebay-gpt on the cuda backend, over the fake driver. Ranks share one GPU, host access to its memory
// crashes, and the CUDA kernels are built for the host. Results are bit for bit those of the host. Then a
// script makes the driver calls of such a run fail.
//
// `./dev test` fails the first, the middle and the last call of each kind; under the label slow every call
// fails once.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "runtime/device/cuda/driver.h"
#include "tests/end_to_end/parallel_run.h"
#include "tests/support/fake_gpu.h"
#include "tests/support/process.h"
#include "tests/support/slow.h"

namespace forebay::testing {
namespace {

using Json = nlohmann::json;

const Words kOnGpu = {"--device", "cuda"};

void expect_the_bits_of_the_host(const Words& words, const Words& model = kSmall) {
  SCOPED_TRACE(::testing::PrintToString(words));
  const gpt::TrainingReport host = train(model + words + kOnHost);
  const FakeGpu gpu;

  const gpt::TrainingReport report = train(model + words + kOnGpu);

  EXPECT_EQ(report.digest, host.digest);
  EXPECT_EQ(report.loss, host.loss);
  EXPECT_EQ(report.grad_norm, host.grad_norm);
  for (const gpt::RankReport& rank : report.ranks) {
    EXPECT_EQ(rank.peak_bytes, rank.planned_bytes);
    EXPECT_EQ(rank.reserved_bytes, rank.planned_reserved_bytes);
  }
}

TEST(CudaTraining, GivesTheBitsOfTheHostAtEveryStage) {
  for (const char* stage : {"0", "1", "2", "3"})
    expect_the_bits_of_the_host({"--ranks", "3", "--stage", stage});
}

TEST(CudaTraining, GivesTheBitsOfTheHostInEveryType) {
  for (const char* type : {"bf16", "fp16"})
    expect_the_bits_of_the_host({"--ranks", "3", "--stage", "3", "--dtype", type});
}

TEST(CudaTraining, GivesTheBitsOfTheHostWhereRanksShareLayersRecomputeAndDrop) {
  const Words words = {"--dropout", "0.1", "--recompute", "every:2"};
  expect_the_bits_of_the_host(words + Words{"--ranks", "3", "--tensor-parallel", "3"});
  expect_the_bits_of_the_host(
      words + Words{"--ranks", "6", "--tensor-parallel", "3", "--stage", "3", "--dtype", "bf16"});
  expect_the_bits_of_the_host(
      words + Words{"--ranks", "3", "--tensor-parallel", "3", "--activations", "partition+cpu"});
}

// Ranks whose memory the host cannot reach wait for each other inside a call.
TEST(CudaTraining, GivesTheBitsOfTheHostWhereRanksAreStagesOfAPipeline) {
  const Words model = with(kSmall, {"--layers", "4", "--micro-steps", "6"}) + Words{"--dropout", "0.1"};
  expect_the_bits_of_the_host({"--ranks", "2", "--pipeline-parallel", "2"}, model);
  expect_the_bits_of_the_host({"--ranks", "4", "--pipeline-parallel", "4", "--stage", "3", "--dtype", "bf16"},
                              model);
  expect_the_bits_of_the_host({"--ranks", "6", "--tensor-parallel", "3", "--pipeline-parallel", "2",
                               "--recompute", "block", "--activations", "partition+cpu"},
                              model);
}

// More micro-steps than the host has buffers for.
TEST(CudaTraining, GivesTheBitsOfTheHostHoweverItAccumulates) {
  expect_the_bits_of_the_host({"--ranks", "2", "--stage", "2", "--micro-steps", "5", "--dtype", "bf16"});
  expect_the_bits_of_the_host({"--micro-steps", "5", "--accumulate", "local"});
}

TEST(CudaTraining, GivesTheSameBitsHoweverStreamsOvertakeEachOther) {
  const Words words = kSmall + Words{"--ranks", "3", "--stage", "3", "--dtype", "bf16"};
  const std::string expected = train(words + kOnHost).digest;
  for (const std::uint64_t seed : {1u, 2u}) {
    fake_cuda::FakeOptions options = strict_gpu();
    options.seed = seed;
    const FakeGpu gpu(options);
    EXPECT_EQ(train(words + kOnGpu).digest, expected) << seed;
  }
}

TEST(CudaTraining, RanksTakeTheGpusInTurn) {
  fake_cuda::FakeOptions options = strict_gpu();
  options.device_count = 2;
  const FakeGpu gpu(options);
  const Words words = kSmall + Words{"--ranks", "3", "--stage", "3"};

  const gpt::TrainingReport in_turn = train(words + kOnGpu);
  const gpt::TrainingReport on_second = train(words + Words{"--device", "cuda:1"});

  EXPECT_EQ(in_turn.device.substr(0, 6), "cuda:0");
  EXPECT_EQ(on_second.device.substr(0, 6), "cuda:1");
  EXPECT_EQ(on_second.digest, in_turn.digest);
}

TEST(CudaTraining, OnlyRanksOnSeveralGpusNeedPeers) {
  fake_cuda::FakeOptions options = gpus(3);
  options.peers = false;
  const FakeGpu gpu(options);
  const Words two = kSmall + Words{"--ranks", "2"};

  EXPECT_EQ(train(kSmall + kOnGpu).device.substr(0, 6), "cuda:0");
  EXPECT_EQ(train(two + Words{"--device", "cuda:1"}).device.substr(0, 6), "cuda:1");
  EXPECT_NE(error_of(two + kOnGpu).find("cuda:1 cannot reach the memory of cuda:0"), std::string::npos);
}

// The program, as a user starts it.
class CudaCommand : public ::testing::Test {
 protected:
  Finished run(const Words& words, const std::string& driver = FOREBAY_FAKE_LIBCUDA) {
    return run_program(Words{FOREBAY_GPT} + words, {{"FOREBAY_LIBCUDA", driver},
                                                    {"FAKE_CUDA_KERNELS", FOREBAY_FAKE_KERNELS},
                                                    {"FAKE_CUDA_STRICT", "1"}});
  }
  void expect_refused(const Finished& finished, int exit_code, const Words& named) {
    EXPECT_EQ(finished.exit_code, exit_code) << finished.output;
    for (const std::string& word : named)
      EXPECT_NE(finished.output.find(word), std::string::npos) << finished.output;
    EXPECT_EQ(std::count(finished.output.begin(), finished.output.end(), '\n'), 1) << finished.output;
  }

  TemporaryDirectory directory_;
};

TEST_F(CudaCommand, ReportsWhereItRanAndTheDigestOfTheHost) {
  const Words words = kSmall + Words{"--ranks", "3", "--stage", "3"};
  const std::string path = directory_ / "report.json";

  const Finished finished = run(words + kOnGpu + Words{"--report", path});

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  std::ifstream file(path);
  const Json report = Json::parse(file, nullptr, false);
  EXPECT_EQ(report.at("device"), "cuda:0 Fake GPU 0");
  EXPECT_EQ(report.at("communicator"), "local");
  EXPECT_EQ(report.at("matmul"), "plain");
  EXPECT_EQ(report.at("stage"), 3);
  EXPECT_EQ(report.at("ranks").size(), 3u);
  const Json host = Json::parse(gpt::report_json(train(words + kOnHost)));
  EXPECT_EQ(report.at("digest"), host.at("digest"));
  EXPECT_EQ(host.at("device"), "host");
  for (const auto& [key, value] : host.items()) EXPECT_TRUE(report.contains(key)) << key;
}

TEST_F(CudaCommand, SavesAndGoesOnBetweenHostAndGpu) {
  const std::string state = directory_ / "state";
  const std::string path = directory_ / "report.json";
  const Words words = kModel + Words{"--matmul", "plain", "--ranks", "2", "--stage", "2", "--report", path};
  const Words to_the_end = {"--steps", "4"};
  ASSERT_EQ(run(words + to_the_end + kOnGpu).exit_code, 0);
  const auto digest = [&] {
    std::ifstream file(path);
    return Json::parse(file, nullptr, false).at("digest");
  };
  const Json whole = digest();

  const Finished first = run(words + kOnGpu + Words{"--steps", "2", "--save-state", state});
  ASSERT_EQ(first.exit_code, 0) << first.output;
  const Finished second = run(words + to_the_end + kOnHost + Words{"--load-state", state});
  ASSERT_EQ(second.exit_code, 0) << second.output;

  EXPECT_EQ(digest(), whole);
}

TEST_F(CudaCommand, SaysInOneLineWhatIsMissing) {
  const Words words = kSmall + Words{"--ranks", "2", "--stage", "1"};
  expect_refused(run(words + kOnGpu, directory_ / "no-driver.so"), 1, {"--device cuda", "no-driver.so"});
  expect_refused(run(words + Words{"--device", "cuda:5"}), 1, {"--device cuda", "cuda:5"});
  expect_refused(run(words + Words{"--device", "cuda:"}), 2, {"--device is 'cuda:'", "cuda:N"});
  expect_refused(run(words + Words{"--device", "cuda:-1"}), 2, {"--device is 'cuda:-1'"});
  expect_refused(run(words + kOnGpu + Words{"--communicator", "gloo"}), 2, {"--communicator gloo", "local"});
  // There is no cuBLAS, or it does not accept the fake driver.
  expect_refused(run(kModel + kOnGpu + Words{"--matmul", "library"}), 1, {"use --matmul plain"});
}

// --- faults ---

struct Call {
  const char* name;    // The name in messages, without the version.
  const char* symbol;  // The name in the fake's script.
};

#define FOREBAY_TEST_CALL(name, symbol, version, parameters) {#name, #symbol},
constexpr Call kCalls[] = {FOREBAY_CUDA_CALLED(FOREBAY_TEST_CALL) FOREBAY_CUDA_OPTIONAL(FOREBAY_TEST_CALL)};
#undef FOREBAY_TEST_CALL

bool gives_back(const std::string& name) {
  for (const char* verb : {"Destroy", "Free", "Release", "Unmap", "Unregister", "Unload"}) {
    if (name.find(verb) != std::string::npos) return true;
  }
  return false;
}

// Some of the calls of one kind: every `parts`-th call of a run, from `part` on.
struct Sweep {
  Call call;
  std::uint64_t part = 1;
  std::uint64_t parts = 1;
};

// A run makes thousands of calls of some kinds; their tests are divided so that none takes much longer.
std::uint64_t part_count(const std::string& name) {
  if (name == "cuCtxSetCurrent" || name == "cuThreadExchangeStreamCaptureMode") return 8;
  if (name == "cuCtxGetCurrent") return 4;
  return name == "cuLaunchKernel" || name == "cuStreamIsCapturing" ? 2 : 1;
}

std::vector<Sweep> sweeps(bool every_call) {
  std::vector<Sweep> all;
  for (const Call& call : kCalls) {
    const std::uint64_t parts = every_call ? part_count(call.name) : 1;
    for (std::uint64_t part = 1; part <= parts; ++part) all.push_back({call, part, parts});
  }
  return all;
}

// Small, and long enough to use every part. When every call fails there are only two ranks: a third rank
// would make no other kinds of calls.
Words fault_run() {
  return {"--layers", "1",       "--hidden", "8",       "--heads",    "2",       "--sequence",
          "4",        "--batch", "1",        "--steps", "5",          "--ranks", is_slow_test() ? "2" : "3",
          "--stage",  "3",       "--dtype",  "bf16",    "--threads",  "1",       "--quiet",
          "--matmul", "plain",   "--device", "cuda",    "--deadline", "20"};
}

class CudaTrainingFaults : public ::testing::TestWithParam<Sweep> {
 protected:
  CudaTrainingFaults() : fake_(open()) {}

  static fake_cuda::FakeCuda open() {
    ::setenv("FOREBAY_LOG", "info", 1);  // A failed trial is logged at this level.
    ::setenv("FAKE_CUDA_KERNELS", FOREBAY_FAKE_KERNELS, 1);
    ::setenv("FOREBAY_LIBCUDA", FOREBAY_FAKE_LIBCUDA, 1);
    return fake_cuda::FakeCuda::open(FOREBAY_FAKE_LIBCUDA);
  }

  // The error that the run ended with; empty when it ended well.
  std::string run(gpt::TrainingReport* report) {
    try {
      *report = train(fault_run());
      return "";
    } catch (const Error& error) {
      return error.status().message();
    }
  }

  void start() {
    fake_.reset();
    fake_cuda::FakeOptions options = strict_gpu();
    ASSERT_EQ(fake_.configure(options), 0);
  }

  // Which of `count` calls fail.
  static std::vector<std::uint64_t> chosen(const Sweep& sweep, std::uint64_t count) {
    std::set<std::uint64_t> calls;
    if (is_slow_test()) {
      for (std::uint64_t nth = sweep.part; nth <= count; nth += sweep.parts) calls.insert(nth);
    } else {
      calls = {1, (count + 1) / 2, count};
    }
    return {calls.begin(), calls.end()};
  }

  // False when the run made fewer calls than that, because threads race.
  bool expect_a_clean_end(const Call& call, std::uint64_t nth, const std::string& digest) {
    SCOPED_TRACE(std::string(call.symbol) + ", call " + std::to_string(nth));
    start();
    EXPECT_EQ(fake_.fail(call.symbol, nth, static_cast<int>(cuda::CuResult::kUnknown)), 0);
    ::testing::internal::CaptureStderr();
    const auto begin = std::chrono::steady_clock::now();

    gpt::TrainingReport report;
    const std::string error = run(&report);

    // Well before the deadline for silent peers, so the failure itself ended the run.
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15)) << error;
    const std::string log = ::testing::internal::GetCapturedStderr();
    if (fake_.call_count(call.symbol) < nth) return false;
    const std::string told = std::string(call.name) + ": CUDA_ERROR_UNKNOWN";
    if (error.empty()) {
      // The run can do without this call, and succeeded.
      EXPECT_EQ(report.digest, digest) << log;
      EXPECT_NE(log.find(told), std::string::npos) << "nobody was told: " << log;
    } else {
      // A build without nvcc says why no driver loads its kernels, instead of the driver's error.
      const bool no_nvcc =
          std::string(call.name) == "cuModuleLoadDataEx" && error.find("nvcc") != std::string::npos;
      EXPECT_TRUE(error.find(told) != std::string::npos || no_nvcc) << error;
    }
    const fake_cuda::FakeAccount account = fake_.accounts();
    EXPECT_EQ(account.operations, 0u);
    EXPECT_EQ(account.hazards, 0u) << error << log;
    EXPECT_EQ(account.forbidden_calls, 0u);
    // Resources that the driver refuses to release stay, and so do those that depend on them.
    if (!gives_back(call.name)) {
      EXPECT_EQ(account.live_handles(), 0u) << error << log;
      EXPECT_EQ(account.orphans, 0u) << error << log;
    }
    return true;
  }

  fake_cuda::FakeCuda fake_;
};

TEST_P(CudaTrainingFaults, EndWithAClearErrorAndLeaveNothing) {
  const Call& call = GetParam().call;
  start();
  gpt::TrainingReport clean;
  ASSERT_EQ(run(&clean), "");
  ASSERT_EQ(fake_.accounts().live_handles(), 0u);
  const std::uint64_t count = fake_.call_count(call.symbol);
  if (count == 0) GTEST_SKIP() << "a training run does not call " << call.symbol;
  const std::vector<std::uint64_t> calls = chosen(GetParam(), count);

  std::size_t met = 0;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    met += expect_a_clean_end(call, calls[i], clean.digest);
    if ((i + 1) % 100 != 0 && i + 1 != calls.size()) continue;
    std::printf("%s: %zu of %zu calls have failed, %zu were not met\n", call.symbol, i + 1, calls.size(),
                i + 1 - met);
    std::fflush(stdout);
  }

  EXPECT_GT(met, 0u);
}

std::string sweep_name(const ::testing::TestParamInfo<Sweep>& info) {
  const Sweep& sweep = info.param;
  std::string name = sweep.call.symbol;
  if (sweep.parts > 1) name += "_" + std::to_string(sweep.part) + "_of_" + std::to_string(sweep.parts);
  return name;
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaTrainingFaults, ::testing::ValuesIn(sweeps(false)), sweep_name);
INSTANTIATE_TEST_SUITE_P(Slow, CudaTrainingFaults, ::testing::ValuesIn(sweeps(true)), sweep_name);

}  // namespace
}  // namespace forebay::testing
