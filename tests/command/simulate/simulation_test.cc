// Simulated steps: memory equal to the plan, the same figures from the same request, and times that follow
// the machine.

#include "runtime/command/simulate/simulation.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "runtime/command/simulate/simulation_print.h"
#include "tests/support/thread_limit.h"

namespace forebay {
namespace {

SimulationRequest small(int ranks, int stage) {
  SimulationRequest request;
  request.shape = {.layers = 4, .hidden = 1024, .heads = 16, .vocabulary = 50257, .positions = 512};
  request.batch = 4;
  request.ranks = ranks;
  request.options.stage = stage;
  request.options.dtype = DataType::kBfloat16;
  request.cluster = value_or_throw(read_cluster("dgx-h100"));
  return request;
}

double step_seconds(const SimulationRequest& request) {
  return value_or_throw(simulate(request)).step_seconds;
}

double seconds_of(const SimulationResult& result, const std::string& cause) {
  for (const SimulatedTime& time : result.times) {
    if (time.cause == cause) return time.seconds;
  }
  return 0;
}

TEST(Simulation, TellsHowFarItIs) {
  SimulationRequest request = small(16, 3);
  request.options.micro_steps = 2;
  std::vector<std::pair<std::string, double>> told;
  request.progress = [&](const std::string& subject, double done) { told.emplace_back(subject, done); };
  value_or_throw(simulate(request));
  ASSERT_EQ(told.size(), 72u);  // 3 steps, 2 micro-steps, 2 passes, 6 units.
  for (std::size_t i = 0; i < told.size(); ++i) {
    EXPECT_EQ(told[i].first, "a step");
    EXPECT_DOUBLE_EQ(told[i].second, static_cast<double>(i) / 72.0);
  }
  told.clear();
  value_or_throw(simulate_changes(request));
  EXPECT_EQ(told.front().first, "a step with twice the FLOP/s of the device");
}

TEST(Simulation, HoldsThePlannedBytesAtEveryStage) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const Offload offload : {Offload::kNone, Offload::kOptimizer}) {
      for (const int micro_steps : {1, 3}) {
        SimulationRequest request = small(16, stage);
        request.options.offload = offload;
        request.options.micro_steps = micro_steps;
        const SimulationResult result = value_or_throw(simulate(request));
        EXPECT_EQ(result.statistics.peak, result.statistics.planned) << stage;
        EXPECT_EQ(result.statistics.peak_reserved_bytes, result.statistics.planned_reserved_bytes) << stage;
        EXPECT_EQ(result.statistics.host_bytes, result.statistics.planned_host_bytes) << stage;
        EXPECT_EQ(result.sent_bytes_per_step, result.statistics.planned_wire_per_step.sent) << stage;
      }
    }
  }
}

TEST(Simulation, MuonTakesTheBytesAndTheTimeOfItsProducts) {
  for (const Offload offload : {Offload::kNone, Offload::kOptimizer}) {
    SimulationRequest request = small(4, 2);
    request.options.offload = offload;
    const SimulationResult adamw = value_or_throw(simulate(request));
    request.options.optimizer = Optimizer::kMuon;
    const SimulationResult muon = value_or_throw(simulate(request));
    EXPECT_GT(muon.statistics.planned.buckets, adamw.statistics.planned.buckets);
    EXPECT_EQ(muon.statistics.peak, muon.statistics.planned);
    EXPECT_EQ(muon.sent_bytes_per_step, muon.statistics.planned_wire_per_step.sent);
    EXPECT_GT(muon.step_seconds, adamw.step_seconds);
    request.cluster.device.flops[DataType::kFloat32] /= 10;
    EXPECT_GT(seconds_of(value_or_throw(simulate(request)), "update on the device"),
              4 * seconds_of(muon, "update on the device"));
  }
}

TEST(Simulation, AdafactorTakesItsPlannedBytesAndTheTimeOfItsSums) {
  for (const Offload offload : {Offload::kNone, Offload::kOptimizer}) {
    SimulationRequest request = small(4, 2);
    request.options.offload = offload;
    request.options.optimizer = Optimizer::kAdafactor;
    const SimulationResult adafactor = value_or_throw(simulate(request));
    EXPECT_EQ(adafactor.statistics.peak, adafactor.statistics.planned);
    EXPECT_EQ(adafactor.statistics.host_bytes, adafactor.statistics.planned_host_bytes);
    EXPECT_EQ(adafactor.sent_bytes_per_step, adafactor.statistics.planned_wire_per_step.sent);
    if (offload != Offload::kNone) continue;
    EXPECT_EQ(adafactor.statistics.host_bytes, 0u);
    EXPECT_GT(seconds_of(adafactor, "update on the device"), 0);
  }
}

TEST(Simulation, TheTimesAddUpToTheStep) {
  SimulationRequest request = small(16, 3);
  request.options.offload = Offload::kOptimizer;
  const SimulationResult result = value_or_throw(simulate(request));
  double sum = 0;
  for (const SimulatedTime& time : result.times) sum += time.seconds;
  EXPECT_NEAR(sum, result.step_seconds, 1e-9);
  EXPECT_GT(seconds_of(result, "forward"), 0);
  EXPECT_GT(seconds_of(result, "backward"), seconds_of(result, "forward"));
  EXPECT_GT(result.model_flops_used(), 0);
  EXPECT_LT(result.model_flops_used(), 1);
}

TEST(Simulation, TheSameRequestGivesTheSameFigures) {
  SimulationRequest request = small(64, 3);
  request.options.offload = Offload::kOptimizerAndParameters;
  request.options.tier = Tier::kFile;
  request.part.tensor_parallel = 2;
  const std::string first = simulation_json(request, value_or_throw(simulate(request)), {});
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(simulation_json(request, value_or_throw(simulate(request)), {}), first);
}

TEST(Simulation, PipelineStagesHoldThePlannedBytes) {
  for (const int stages : {2, 4}) {
    for (int stage = 0; stage <= 3; ++stage) {
      SimulationRequest request = small(16, stage);
      request.part = {.tensor_parallel = 2, .pipeline_parallel = stages};
      request.options.micro_steps = 3;
      const SimulationResult result = value_or_throw(simulate(request));
      EXPECT_EQ(result.statistics.peak, result.statistics.planned) << stage;
      EXPECT_EQ(result.statistics.peak_reserved_bytes, result.statistics.planned_reserved_bytes) << stage;
      EXPECT_GT(seconds_of(result, "pipeline bubble"), 0);
    }
  }
}

// m micro-steps over p even stages take m + p - 1 turns, of which p - 1 are the bubble.
TEST(Simulation, ThePipelineBubbleIsThatOfOneForwardOneBackward) {
  SimulationRequest request = small(1, 0);
  request.shape.layers = 8;
  request.shape.vocabulary = 256;
  request.options.micro_steps = 8;
  request.cluster.device.kernel_seconds = request.cluster.device.queue_seconds = 0;
  request.cluster.links[0].bytes_per_second = 1e15;
  for (LinkDescription& link : request.cluster.links) link.latency_seconds = link.message_seconds = 0;
  const double alone = step_seconds(request);
  for (const int stages : {2, 4}) {
    request.ranks = stages;
    request.part.pipeline_parallel = stages;
    const double turns = 8.0 + stages - 1;
    EXPECT_NEAR(step_seconds(request) / (alone * turns / 8 / stages), 1, 0.06) << stages;
  }
}

TEST(Simulation, ThePipelineGivesTheSameFigures) {
  SimulationRequest request = small(32, 2);
  request.part.pipeline_parallel = 4;
  request.options.micro_steps = 5;
  request.options.offload = Offload::kOptimizer;
  const std::string first = simulation_json(request, value_or_throw(simulate(request)), {});
  for (int i = 0; i < 5; ++i)
    EXPECT_EQ(simulation_json(request, value_or_throw(simulate(request)), {}), first);
}

TEST(Simulation, AStageThatDoesNotFitEndsThemAll) {
  SimulationRequest request = small(8, 0);
  request.part.pipeline_parallel = 4;
  request.options.micro_steps = 4;
  request.options.memory_bytes = 600u << 20;
  EXPECT_EQ(simulate(request).status().code(), StatusCode::kOutOfMemory);
}

TEST(Simulation, SaysThatThereAreTooFewThreadsForThePipelineStages) {
  SimulationRequest request = small(4, 0);
  request.part.pipeline_parallel = 4;
  request.options.micro_steps = 2;
  for (int threads = 0; threads < 4; ++threads) {
    const testing::ThreadLimit limit(threads);
    const Status status = simulate(request).status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << threads;
    EXPECT_NE(status.message().find("no thread for pipeline stage " + std::to_string(threads)),
              std::string::npos)
        << status.message();
  }
}

TEST(Simulation, SavedActivationsLieWhereTheyArePlaced) {
  SimulationRequest request = small(8, 1);
  request.part.tensor_parallel = 2;
  request.recompute_every = 1;
  request.batch = 8;
  const SimulationResult kept = value_or_throw(simulate(request));
  request.activations = ActivationPlacement::kPartition;
  const SimulationResult parted = value_or_throw(simulate(request));
  EXPECT_GT(parted.step_seconds, kept.step_seconds);
  request.activations = ActivationPlacement::kPartitionAndSpill;
  const SimulationResult spilled = value_or_throw(simulate(request));
  const std::uint64_t saved = 4 * 8 * 512 * 1024 * 2 / 2;  // Four inputs, cut over two ranks.
  EXPECT_EQ(spilled.statistics.host_bytes - parted.statistics.host_bytes, saved);
  EXPECT_LT(spilled.statistics.peak.activations, parted.statistics.peak.activations + saved);
  request.cluster.bus_bytes_per_second = 1e8;
  EXPECT_GT(step_seconds(request), 2 * spilled.step_seconds);
  request.activation_tier = Tier::kFile;
  EXPECT_GE(value_or_throw(simulate(request)).statistics.file_bytes, saved);
  request.cluster.drive_write_bytes_per_second = 0;
  EXPECT_NE(simulate(request).status().message().find("no drives for activations"), std::string::npos);
}

// The device is the host: copies, updates and links take the time of its kernels.
TEST(Simulation, SharedProcessorsDoOneThingAtATime) {
  SimulationRequest request = small(2, 1);
  request.options.offload = Offload::kOptimizer;
  request.cluster.links[0].processor_seconds_per_byte = 1e-9;
  const double apart = step_seconds(request);
  request.cluster.shared_processors = true;
  EXPECT_GT(step_seconds(request), apart);
  EXPECT_NEAR(value_or_throw(simulate(request)).compute_busy, 1, 0.2);
}

// Compute alone: the step of one rank without launches is the time of its products and passes.
TEST(Simulation, OneRankTakesTheTimeOfItsWork) {
  SimulationRequest request = small(1, 0);
  request.cluster.device.kernel_seconds = request.cluster.device.queue_seconds = 0;
  const SimulationResult result = value_or_throw(simulate(request));
  const double computed =
      seconds_of(result, "forward") + seconds_of(result, "backward") + seconds_of(result, "recomputation");
  EXPECT_GT(computed, 0.8 * result.step_seconds);
  EXPECT_GT(computed, result.model_flops / result.peak_flops);
  request.cluster.device.flops[DataType::kBfloat16] *= 2;
  request.cluster.device.memory_bytes_per_second *= 2;
  EXPECT_NEAR(step_seconds(request), result.step_seconds / 2, 0.02 * result.step_seconds);
}

TEST(Simulation, FiguresOfNoMachineAreRefusedAtOnce) {
  const std::pair<const char*, void (*)(ClusterDescription&)> cases[] = {
      {"bus", [](ClusterDescription& c) { c.bus_bytes_per_second = 1e-300; }},
      {"host", [](ClusterDescription& c) { c.host_bytes_per_second = 1e-9; }},
      {"drives", [](ClusterDescription& c) { c.drive_read_bytes_per_second = 5e-324; }},
      {"control", [](ClusterDescription& c) { c.control_seconds = 1e30; }},
      {"latency", [](ClusterDescription& c) { c.links[1].latency_seconds = 1e300; }},
      {"link", [](ClusterDescription& c) { c.links[0].bytes_per_second = 5e-324; }},
      {"flops", [](ClusterDescription& c) { c.device.flops[DataType::kBfloat16] = 1e-300; }},
      {"memory", [](ClusterDescription& c) { c.device.memory_bytes_per_second = 5e-324; }},
      {"kernels", [](ClusterDescription& c) { c.device.kernel_seconds = 1e300; }},
      {"queue", [](ClusterDescription& c) { c.device.queue_seconds = 1e30; }}};
  for (const auto& [name, apply] : cases) {
    SimulationRequest request = small(16, 3);
    request.options.offload = Offload::kOptimizer;
    request.options.tier = Tier::kFile;
    apply(request.cluster);
    const Result<SimulationResult> result = simulate(request);
    ASSERT_FALSE(result.ok()) << name;
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument) << name;
    EXPECT_NE(result.status().message().find("more than 31 years"), std::string::npos)
        << name << ": " << result.status().message();
  }
}

// Figures from 1e-300 to 1e300, several at once: a refusal in words, or finite times.
TEST(Simulation, AnyFiguresGiveTimesOrARefusal) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  int simulated = 0;
  for (int i = 0; i < 60; ++i) {
    SimulationRequest request = small(16, static_cast<int>(random() % 4));
    request.options.offload = random() % 2 == 0 ? Offload::kNone : Offload::kOptimizer;
    ClusterDescription& c = request.cluster;
    double* const figures[] = {&c.bus_bytes_per_second,
                               &c.host_bytes_per_second,
                               &c.control_seconds,
                               &c.links[0].bytes_per_second,
                               &c.links[1].bytes_per_second,
                               &c.links[0].latency_seconds,
                               &c.links[1].message_seconds,
                               &c.device.flops[DataType::kBfloat16],
                               &c.device.memory_bytes_per_second,
                               &c.device.kernel_seconds,
                               &c.device.queue_seconds};
    for (std::uint64_t count = 1 + random() % 3; count > 0; --count)
      *figures[random() % std::size(figures)] = std::pow(10.0, static_cast<double>(random() % 601) - 300);
    const Result<SimulationResult> result = simulate(request);
    if (!result.ok()) {
      EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument) << result.status().message();
      continue;
    }
    ++simulated;
    EXPECT_GT(result.value().step_seconds, 0);
    EXPECT_LT(result.value().step_seconds, 1e9);
    for (const SimulatedTime& time : result.value().times) EXPECT_GE(time.seconds, 0);
  }
  std::printf("%d of 60 were simulated\n", simulated);
}

TEST(Simulation, RecomputationCostsAForwardPass) {
  SimulationRequest request = small(8, 1);
  const SimulationResult without = value_or_throw(simulate(request));
  request.recompute_every = 1;
  const SimulationResult with = value_or_throw(simulate(request));
  EXPECT_GT(with.step_seconds, without.step_seconds);
  EXPECT_GT(with.hardware_flops, with.model_flops);
  EXPECT_EQ(with.model_flops, without.model_flops);
  EXPECT_LT(with.statistics.peak.activations, without.statistics.peak.activations);
  EXPECT_LT(seconds_of(with, "recomputation"), seconds_of(with, "forward"));
}

TEST(Simulation, ASlowNetworkIsTheBottleneck) {
  SimulationRequest request = small(64, 3);
  request.cluster.links[1].bytes_per_second = 1e9;
  const SimulationResult slow = value_or_throw(simulate(request));
  EXPECT_TRUE(bottleneck(slow).exposed) << bottleneck(slow).cause;
  const std::vector<SimulatedChange> changes = value_or_throw(simulate_changes(request));
  EXPECT_EQ(changes.front().change, "twice the bandwidth of the links: network");
  EXPECT_LT(changes.front().step_seconds, 0.6 * slow.step_seconds);
}

TEST(Simulation, OffloadedStatesTakeTheHostsTime) {
  SimulationRequest request = small(8, 2);
  const double without = step_seconds(request);
  request.options.offload = Offload::kOptimizer;
  const SimulationResult host = value_or_throw(simulate(request));
  EXPECT_GT(host.step_seconds, without);
  request.cluster.host_bytes_per_second /= 4;
  const SimulationResult slow = value_or_throw(simulate(request));
  EXPECT_GT(slow.step_seconds, host.step_seconds);
  EXPECT_EQ(bottleneck(slow).cause, "update on the host");
  request.options.tier = Tier::kFile;
  request.cluster.host_bytes_per_second *= 4;
  request.cluster.drive_read_bytes_per_second /= 10;
  const SimulationResult files = value_or_throw(simulate(request));
  EXPECT_EQ(bottleneck(files).cause, "drives");
  EXPECT_GT(files.statistics.file_bytes, 0u);
  EXPECT_EQ(files.statistics.file_bytes, files.statistics.planned_file_bytes);
}

TEST(Simulation, ModelsLargerThanThisHostTakeNoMemoryOfIt) {
  SimulationRequest request = small(16, 3);
  request.shape = {.layers = 96, .hidden = 12288, .heads = 96, .vocabulary = 50257, .positions = 2048};
  request.batch = 1;
  request.recompute_every = 1;
  request.options.offload = Offload::kOptimizerAndParameters;
  const SimulationResult result = value_or_throw(simulate(request));
  EXPECT_GT(result.parameters, 170'000'000'000u);
  EXPECT_GT(result.statistics.host_bytes, 150ull << 30);
}

TEST(Simulation, AStepOfAHundredThousandRanksIsFast) {
  SimulationRequest request = small(100'000, 3);
  request.shape.layers = 32;
  const auto begin = std::chrono::steady_clock::now();
  const SimulationResult result = value_or_throw(simulate(request));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  EXPECT_GT(result.step_seconds, 0);
}

TEST(Simulation, SaysWhatDoesNotFit) {
  SimulationRequest request = small(1, 0);
  request.shape.layers = 96;
  request.shape.hidden = 8192;
  const Status status = simulate(request).status();
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_NE(status.message().find("the plan needs"), std::string::npos) << status.message();
  request = small(3, 0);
  request.part.tensor_parallel = 2;
  EXPECT_EQ(simulate(request).status().code(), StatusCode::kInvalidArgument);
  request = small(8, 0);
  request.cluster = value_or_throw(read_cluster("dgx-2"));
  EXPECT_NE(simulate(request).status().message().find("V100-32 has no products in bf16; it has"),
            std::string::npos);
}

TEST(Simulation, WritesATimelineOfTheEngine) {
  SimulationRequest request = small(8, 3);
  request.with_timeline = true;
  const SimulationResult result = value_or_throw(simulate(request));
  bool gathers = false;
  for (const Timeline::Span& span : result.spans) gathers = gathers || span.name == "gather h.2";
  EXPECT_TRUE(gathers);
  request.with_timeline = false;
  EXPECT_EQ(step_seconds(request), result.step_seconds);
}

}  // namespace
}  // namespace forebay
