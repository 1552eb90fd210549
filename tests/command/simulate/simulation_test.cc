// Simulated steps: memory equal to the plan, the same figures from the same request, and times that follow
// the machine.

#include "runtime/command/simulate/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "runtime/command/simulate/cluster_timing.h"
#include "runtime/command/simulate/simulated_drives.h"
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

// Times to five digits: what the trainer's stream did and waited for, the most busy parts, the figures.
std::string figures_of(const SimulationRequest& request) {
  const SimulationResult result = value_or_throw(simulate(request));
  std::string text;
  const auto add = [&text](const char* name, double value) {
    char line[160];
    std::snprintf(line, sizeof(line), "%s%s %.5g", text.empty() ? "" : ", ", name, value);
    text += line;
  };
  for (const SimulatedTime& time : result.times) {
    if (time.seconds > 0) add((time.cause + (time.exposed ? "*" : "")).c_str(), time.seconds * 1e3);
  }
  text += "; ";
  text += "busy";
  for (const double busy : {result.compute_busy, result.bus_busy, result.host_busy}) {
    char line[40];
    std::snprintf(line, sizeof(line), " %.4f", busy);
    text += line;
  }
  for (const double busy : result.link_busy) {
    char line[40];
    std::snprintf(line, sizeof(line), " %.4f", busy);
    text += line;
  }
  text += "; sent " + std::to_string(result.sent_bytes_per_step) + ", tokens " +
          std::to_string(result.tokens_per_step) + ", device " +
          std::to_string(result.statistics.peak_reserved_bytes) + " of " +
          std::to_string(result.device_bytes) + ", host " + std::to_string(result.statistics.host_bytes) +
          " of " + std::to_string(result.host_memory_bytes) + ", files " +
          std::to_string(result.statistics.file_bytes) + ", stage " + std::to_string(result.pipeline_stage);
  add("model TFLOPs", result.model_flops / 1e12);
  add("with recomputation", result.hardware_flops / 1e12);
  add("peak", result.peak_flops / 1e12);
  return text;
}

TEST(Simulation, EachFigureIsWhatItWas) {
  SimulationRequest request = small(16, 3);
  request.options.micro_steps = 2;
  request.recompute_every = 2;
  EXPECT_EQ(
      figures_of(request),
      R"(backward 4.1811, forward 2.2068, recomputation 0.47532, gradient reductions* 2.9652, parameter gathers* 0.82115, decision and host* 0.057004, update on the device* 0.032738, offload copies* 0.007506; busy 0.5898 0.0000 0.0000 0.1552 0.4998; sent 765006600, tokens 65536, device 1639972864 of 85496692736, host 0 of 274877906944, files 0, stage 0, model TFLOPs 2.6048, with recomputation 2.7594, peak 989)");

  request.options.stage = 2;
  request.options.offload = Offload::kOptimizer;
  request.fused_attention = false;
  request.sequence = 256;
  request.options.memory_bytes = std::uint64_t{40} << 30;
  request.options.room_bytes = std::uint64_t{1} << 30;
  EXPECT_EQ(
      figures_of(request),
      R"(backward 3.1699, forward 1.818, recomputation 0.54226, gradient reductions* 2.3853, update on the host* 2.3691, parameter gathers* 0.76858, offload copies* 0.37642, decision and host* 0.053004; busy 0.4019 0.0892 0.5625 0.0996 0.4434; sent 576001800, tokens 32768, device 1027604480 of 41875931136, host 104497152 of 274877906944, files 0, stage 0, model TFLOPs 1.2766, with recomputation 1.3496, peak 989)");

  request.options.tier = Tier::kFile;
  EXPECT_EQ(
      figures_of(request),
      R"(backward 3.1666, forward 1.818, recomputation 0.54226, drives* 19.405, update on the host* 3.2999, gradient reductions* 2.4987, parameter gathers* 0.81663, offload copies* 0.34195, decision and host* 0.053004; busy 0.1445 0.0321 0.2022 0.0358 0.1594; sent 576001800, tokens 32768, device 1027604480 of 41875931136, host 112631808 of 274877906944, files 76812288, stage 0, model TFLOPs 1.2766, with recomputation 1.3496, peak 989)");

  request = small(16, 1);
  request.part = {.tensor_parallel = 2, .pipeline_parallel = 4};
  request.options.micro_steps = 4;
  request.activation_bytes = std::uint64_t{1} << 30;
  EXPECT_EQ(
      figures_of(request),
      R"(backward 0.87358, tensor-parallel sums 0.58818, forward 0.44713, pipeline bubble* 4.1759, gradient reductions* 0.58521, parameter gathers* 0.41285, update on the device* 0.12902, decision and host* 0.093036, offload copies* 0.007506; busy 0.2178 0.0000 0.0000 0.1034 0.0793; sent 188523384, tokens 16384, device 1589641216 of 85496692736, host 0 of 274877906944, files 0, stage 0, model TFLOPs 0.6512, with recomputation 0.6512, peak 989)");

  request = small(8, 1);
  request.part.tensor_parallel = 2;
  request.recompute_every = 1;
  request.activations = ActivationPlacement::kPartitionAndSpill;
  EXPECT_EQ(
      figures_of(request),
      R"(backward 1.2157, forward 0.66795, tensor-parallel sums 0.62499, recomputation 0.33267, activation copies 0.015892, decision and host* 0.384, parameter gathers* 0.11844, update on the device* 0.003555; busy 0.6363 0.0499 0.0812 0.2143 0.0000; sent 154399496, tokens 8192, device 926941184 of 85496692736, host 8388608 of 274877906944, files 0, stage 0, model TFLOPs 0.6512, with recomputation 0.72851, peak 989)");
  request.activation_tier = Tier::kFile;
  EXPECT_EQ(
      figures_of(request),
      R"(backward 1.2157, forward 0.66795, tensor-parallel sums 0.61558, recomputation 0.34006, activation copies 0.015892, drives* 1.8488, decision and host* 0.384, parameter gathers* 0.17122, offload copies* 0.07683, update on the device* 0.003555; busy 0.4008 0.0314 0.0511 0.1350 0.0000; sent 154399496, tokens 8192, device 926941184 of 85496692736, host 16777216 of 274877906944, files 8388608, stage 0, model TFLOPs 0.6512, with recomputation 0.72851, peak 989)");

  request = small(16, 3);
  request.options.group = 8;
  request.options.shard_within_group = true;
  request.cluster.shared_processors = true;
  request.cluster.links[0].processor_seconds_per_byte = 1e-12;
  EXPECT_EQ(
      figures_of(request),
      R"(backward 2.2346, forward 1.1508, gradient reductions* 0.87549, parameter gathers* 0.80149, update on the device* 0.06241, decision and host* 0.057004, offload copies* 0.007507; busy 0.6827 0.0000 0.0000 0.2380 0.2223; sent 475748104, tokens 32768, device 1876951040 of 85496692736, host 0 of 274877906944, files 0, stage 0, model TFLOPs 1.3024, with recomputation 1.3024, peak 989)");

  request = small(4, 2);
  request.options.optimizer = Optimizer::kMuon;
  request.options.dtype = DataType::kFloat16;
  EXPECT_EQ(
      figures_of(request),
      R"(backward 2.1243, forward 1.0997, update on the device* 3.8366, gradient reductions* 1.0586, parameter gathers* 0.7361, decision and host* 0.25748, offload copies* 0.007506; busy 0.8855 0.0000 0.0000 0.1909 0.0000; sent 609472896, tokens 8192, device 2202009600 of 85496692736, host 0 of 274877906944, files 0, stage 0, model TFLOPs 1.3024, with recomputation 1.3024, peak 989)");
}

TEST(Simulation, AChangeIsOfThePartThatItNames) {
  SimulationRequest request = small(16, 1);
  request.options.offload = Offload::kOptimizer;
  request.options.tier = Tier::kFile;
  const auto changed = [&](const std::string& name) {
    for (const SimulatedChange& change : value_or_throw(simulate_changes(request))) {
      if (change.change == name) return change.step_seconds;
    }
    return 0.0;
  };
  const auto with = [&](void (*apply)(ClusterDescription & cluster)) {
    SimulationRequest other = request;
    apply(other.cluster);
    return step_seconds(other);
  };
  request.cluster.drive_write_bytes_per_second /= 8;
  EXPECT_EQ(changed("twice the drives"), with([](ClusterDescription& c) {
              c.drive_read_bytes_per_second *= 2;
              c.drive_write_bytes_per_second *= 2;
            }));
  request.cluster.control_seconds = 1e-3;
  EXPECT_EQ(changed("links without latency"), with([](ClusterDescription& c) {
              for (LinkDescription& link : c.links) link.latency_seconds = link.message_seconds = 0;
              c.control_seconds = 0;
            }));
  EXPECT_EQ(changed("kernels without gaps and launches"),
            with([](ClusterDescription& c) { c.device.kernel_seconds = c.device.queue_seconds = 0; }));
}

TEST(Simulation, AMemoryLimitBeyondTheDeviceIsTheDevice) {
  SimulationRequest request = small(1, 0);
  request.options.room_bytes = 0;
  const std::uint64_t device = request.cluster.device.memory_bytes;
  request.options.memory_bytes = device + 1;
  EXPECT_EQ(value_or_throw(simulate(request)).device_bytes, device);
  request.options.memory_bytes = device - 1;
  EXPECT_EQ(value_or_throw(simulate(request)).device_bytes, device - 1);
}

TEST(Simulation, ChangesAreThoseThatTheRequestCanHave) {
  const auto names = [](const SimulationRequest& request) {
    std::vector<std::string> names;
    double last = 0;
    for (const SimulatedChange& change : value_or_throw(simulate_changes(request))) {
      EXPECT_GE(change.step_seconds, last);
      last = change.step_seconds;
      names.push_back(change.change);
    }
    std::sort(names.begin(), names.end());
    return names;
  };
  std::vector<std::string> expected = {"kernels without gaps and launches", "twice the FLOP/s of the device",
                                       "twice the memory bandwidth of the device"};
  EXPECT_EQ(names(small(1, 0)), expected);
  expected.insert(expected.begin() + 1, "links without latency");
  expected.push_back("twice the bandwidth of the links: " + small(1, 0).cluster.links[0].name);
  const auto sorted = [](std::vector<std::string> names) {
    std::sort(names.begin(), names.end());
    return names;
  };
  // All ranks are on one host.
  EXPECT_EQ(names(small(8, 0)), sorted(expected));
  expected.push_back("twice the bandwidth of the links: " + small(1, 0).cluster.links[1].name);
  SimulationRequest request = small(9, 0);
  EXPECT_EQ(names(request), sorted(expected));
  request.options.offload = Offload::kOptimizer;
  expected.emplace_back("twice the bus to the host");
  expected.emplace_back("twice the memory bandwidth of the host");
  EXPECT_EQ(names(request), sorted(expected));
  request.options.tier = Tier::kFile;
  expected.emplace_back("twice the drives");
  EXPECT_EQ(names(request), sorted(expected));
}

TEST(Simulation, DrivesOfEitherDirectionAreNeeded) {
  SimulationRequest request = small(8, 1);
  request.options.offload = Offload::kOptimizer;
  request.options.tier = Tier::kFile;
  for (double ClusterDescription::*const rate : {&ClusterDescription::drive_read_bytes_per_second,
                                                 &ClusterDescription::drive_write_bytes_per_second}) {
    SimulationRequest without = request;
    without.cluster.*rate = 0;
    const Status status = simulate(without).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_EQ(status.message(),
              "cluster dgx-h100 has no drives for offload-tier nvme; use cpu, or give their rates in its "
              "description");
  }
}

// Rates that are no multiples of each other.
ClusterDescription odd_cluster() {
  ClusterDescription cluster;
  cluster.device = {.name = "odd",
                    .memory_bytes = 1u << 30,
                    .memory_bytes_per_second = 2000,
                    .memory_efficiency = 0.5,
                    .flops = {{DataType::kBfloat16, 300}, {DataType::kFloat16, 70}},
                    .matrix_efficiency = {{1, 0.5}, {1e6, 0.5}},
                    .kernel_seconds = 0.25,
                    .queue_seconds = 1.5e-6};
  cluster.host_ranks = 4;
  cluster.host_bytes_per_second = 4400;
  cluster.bus_bytes_per_second = 1300;
  cluster.ranks_per_bus = 2;
  cluster.drive_read_bytes_per_second = 1700;
  cluster.drive_write_bytes_per_second = 1900;
  cluster.links = {{.name = "near",
                    .ranks = 4,
                    .bytes_per_second = 11,
                    .ranks_per_link = 12,
                    .latency_seconds = 13,
                    .message_seconds = 14,
                    .processor_seconds_per_byte = 15},
                   {.name = "far",
                    .ranks = 0,
                    .bytes_per_second = 21,
                    .ranks_per_link = 22,
                    .latency_seconds = 23,
                    .message_seconds = 24}};
  return cluster;
}

void expect_work(const ModelWork& work, const char* name, double delay,
                 const std::vector<std::pair<int, double>>& parts) {
  SCOPED_TRACE(name);
  EXPECT_STREQ(work.name, name);
  EXPECT_DOUBLE_EQ(work.delay_seconds, delay);
  ASSERT_EQ(work.part_count, parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(work.parts[i].resource, parts[i].first);
    EXPECT_DOUBLE_EQ(work.parts[i].seconds, parts[i].second);
  }
}

TEST(ClusterTiming, EachKindOfWorkHasItsResourcesAndItsTime) {
  ClusterDescription cluster = odd_cluster();
  const ClusterTiming timing(cluster, DataType::kBfloat16);
  expect_work(timing.kernel("k", 500), "k", 0.25, {{kComputeResource, 0.5}});
  expect_work(timing.fill(500), "fill", 0.25, {{kComputeResource, 0.5}});
  expect_work(timing.copy(ModelCopy::kOnDevice, 500), "copy", 0.25, {{kComputeResource, 1}});
  expect_work(timing.copy(ModelCopy::kOnHost, 550), "sum on the host", 0, {{kHostMemoryResource, 1}});
  expect_work(timing.copy(ModelCopy::kToDevice, 650), "copy to the device", 0.25,
              {{kBusUpResource, 1}, {kHostMemoryResource, 650 / 1100.0}});
  expect_work(timing.copy(ModelCopy::kToHost, 1300), "copy to the host", 0.25,
              {{kBusDownResource, 2}, {kHostMemoryResource, 1300 / 1100.0}});
  expect_work(timing.host_update(11), "update on the host", 0, {{kHostMemoryResource, 0.28}});
  expect_work(timing.host_pass(1100), "sum on the host", 0, {{kHostMemoryResource, 1}});
  // Arithmetic takes 2 * 2 * 3 * 5 * 7 / 150 s; memory (2 * 5 + 5 * 3 + 2 * 3) * 7 * 2 / 1000 s.
  expect_work(timing.product("p", 2, 3, 5, 7), "p", 0.25, {{kComputeResource, 420 / 150.0}});
  expect_work(timing.product("p", 2, 3, 5, 7, 0.5), "p", 0.25, {{kComputeResource, 420 / 75.0}});
  expect_work(timing.product("p", 2, 3, 5, 7, 1000), "p", 0.25, {{kComputeResource, 0.434}});
  // The slowest type, with the bytes of fp32.
  expect_work(timing.fp32_products("p", 2, 3, 5, 7), "p", 0.25, {{kComputeResource, 420 / 35.0}});
  cluster.device.flops[DataType::kFloat32] = 90;
  expect_work(ClusterTiming(cluster, DataType::kBfloat16).fp32_products("p", 2, 3, 5, 7), "p", 0.25,
              {{kComputeResource, 420 / 45.0}});
  cluster.device.flops[DataType::kFloat32] = 1e6;
  expect_work(ClusterTiming(cluster, DataType::kBfloat16).fp32_products("p", 2, 3, 5, 7), "p", 0.25,
              {{kComputeResource, 0.868}});
  EXPECT_EQ(timing.queue_time(), std::chrono::nanoseconds(1500));
  EXPECT_DOUBLE_EQ(timing.drive_seconds(true, 850), 2);
  EXPECT_DOUBLE_EQ(timing.drive_seconds(false, 950), 2);

  cluster.shared_processors = true;
  const ClusterTiming shared(cluster, DataType::kBfloat16);
  expect_work(shared.copy(ModelCopy::kToDevice, 650), "copy to the device", 0.25, {{kComputeResource, 1}});
  expect_work(shared.copy(ModelCopy::kToHost, 650), "copy to the host", 0.25, {{kComputeResource, 1}});
  expect_work(shared.host_update(11), "update on the host", 0, {{kComputeResource, 0.28}});
  expect_work(shared.host_pass(1100), "sum on the host", 0, {{kComputeResource, 1}});
}

TEST(ClusterTiming, LevelsAreThoseOfTheLinks) {
  const ClusterTiming timing(odd_cluster(), DataType::kBfloat16);
  const std::pair<int, int> sizes[] = {{1, 4}, {4, 4}, {5, 8}, {8, 8}, {9, 12}};
  for (const auto& [ranks, whole] : sizes) {
    const std::vector<SimulatedLevel> levels = timing.levels(ranks);
    ASSERT_EQ(levels.size(), 2u);
    EXPECT_EQ(levels[0].ranks, 4);
    EXPECT_EQ(levels[1].ranks, whole) << ranks;
  }
  const std::vector<SimulatedLevel> levels = timing.levels(8);
  const double figures[2][5] = {{11, 12, 13, 14, 15}, {21, 22, 23, 24, 0}};
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(levels[i].name, i == 0 ? "near" : "far");
    EXPECT_EQ(levels[i].bytes_per_second, figures[i][0]);
    EXPECT_EQ(levels[i].ranks_per_link, figures[i][1]);
    EXPECT_EQ(levels[i].latency_seconds, figures[i][2]);
    EXPECT_EQ(levels[i].message_seconds, figures[i][3]);
    EXPECT_EQ(levels[i].processor_seconds_per_byte, figures[i][4]);
    EXPECT_EQ(levels[i].resource, kFirstLinkResource + static_cast<int>(i));
  }
}

TEST(ClusterTiming, TimesEndWithTheClock) {
  EXPECT_EQ(bounded_nanoseconds(1e-9), std::chrono::nanoseconds(1));
  EXPECT_EQ(bounded_nanoseconds(2.5), std::chrono::nanoseconds(2'500'000'000));
  EXPECT_EQ(bounded_nanoseconds(1e300), kModelTimeEnd);
}

TEST(SimulatedDrives, ServeEachDirectionInTurn) {
  using std::chrono::seconds;
  HostClock clock(HostClock::Mode::kVirtual);
  const ClusterTiming timing(odd_cluster(), DataType::kBfloat16);
  const auto backend =
      value_or_throw(ModelBackend::create({.memory_bytes = 1u << 20, .timing = &timing, .clock = &clock}));
  const auto drives = make_simulated_drives(timing, *backend);
  EXPECT_EQ(value_or_throw(drives->create_range("a", 100)).index, 0u);
  const StoreRange range = value_or_throw(drives->create_range("b", 23));
  EXPECT_EQ(range.index, 1u);
  const auto transfer = [&](StoreDirection direction, std::size_t bytes) {
    StoreTransfer transfer;
    transfer.range = range;
    transfer.bytes = bytes;
    transfer.direction = direction;
    return transfer;
  };
  const auto begin = backend->now();
  // Two reads take 1 s and 2 s, one behind the other; a write of 2 s goes beside them.
  const StoreTransfer reads[] = {transfer(StoreDirection::kRead, 425), transfer(StoreDirection::kRead, 850)};
  const StoreTransfer write = transfer(StoreDirection::kWrite, 950);
  const StoreTicket first = value_or_throw(drives->submit({reads, 2}));
  const StoreTicket second = value_or_throw(drives->submit({&write, 1}));
  EXPECT_EQ(drives->statistics().transfers_in_flight, 3u);
  EXPECT_FALSE(value_or_throw(drives->poll(second)));
  EXPECT_TRUE(drives->wait(second, {}).ok());
  EXPECT_EQ(backend->now() - begin, seconds(2));
  EXPECT_FALSE(value_or_throw(drives->poll(first)));
  EXPECT_TRUE(drives->wait(first, {}).ok());
  EXPECT_EQ(backend->now() - begin, seconds(3));
  for (const StoreTicket spent : {first, second, StoreTicket{99}}) {
    EXPECT_EQ(drives->poll(spent).status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(drives->wait(spent, {}).code(), StatusCode::kInvalidArgument);
  }
  // Drives that had nothing to do begin now.
  const StoreTicket third = value_or_throw(drives->submit({&write, 1}));
  EXPECT_TRUE(drives->wait(third, {}).ok());
  EXPECT_EQ(backend->now() - begin, seconds(5));

  const std::vector<StoreTransfer> many(256, transfer(StoreDirection::kRead, 1));
  const StoreTicket all = value_or_throw(drives->submit({many.data(), many.size()}));
  EXPECT_EQ(drives->submit({&write, 1}).status().code(), StatusCode::kUnavailable);
  EXPECT_TRUE(drives->wait(all, {}).ok());
  EXPECT_TRUE(drives->submit({&write, 1}).ok());
  const StoreStatistics statistics = drives->statistics();
  EXPECT_EQ(statistics.range_bytes, 123u);
  EXPECT_EQ(statistics.read_bytes, 425u + 850 + 256);
  EXPECT_EQ(statistics.read_count, 258u);
  EXPECT_EQ(statistics.written_bytes, 3u * 950);
  EXPECT_EQ(statistics.write_count, 3u);
  EXPECT_EQ(statistics.transfers_in_flight, 1u);
  EXPECT_EQ(statistics.most_transfers_in_flight, 256u);
  EXPECT_EQ(statistics.refused_count, 1u);
  EXPECT_EQ(drives->facts().transfer_limit, 256u);
  EXPECT_EQ(drives->facts().depth, 256u);
  EXPECT_EQ(drives->facts().granule_bytes, 4096u);
}

}  // namespace
}  // namespace forebay
