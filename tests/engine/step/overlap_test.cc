// The cost of an offloaded optimizer on the virtual clock, beside the least possible cost.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string_view>

#include "forebay/engine.h"
#include "forebay/stream_call.h"
#include "runtime/engine/engine_hooks.h"
#include "tests/offload/memory_store.h"
#include "tests/support/local_world.h"

namespace forebay::testing {
namespace {

constexpr int kRanks = 2;
constexpr int kUnits = 12;
constexpr std::uint64_t kElements = kRanks * 512 * 8;  // One unit, without padding.
constexpr std::uint64_t kSlice = kElements / kRanks;

// The trainer's work: kernels that only take their time.
constexpr const char* kForward = "forward";
constexpr const char* kBackward = "backward";
const HostKernel kCompute[] = {{kForward, [](const Dimensions&, const Dimensions&, void* const*) {}},
                               {kBackward, [](const Dimensions&, const Dimensions&, void* const*) {}},
                               {nullptr, nullptr}};

// Seconds for one unit on one rank.
struct Times {
  double forward = 2e-3;
  double backward = 4e-3;
  double host_update = 2e-3;
  double device_update = 0.25e-3;
  double copy = 1e-3;  // A slice of gradients or parameters, either way.
  double drive = 0;    // A unit's states, each way; 0: they are not on a drive.
};

struct Settings {
  int stage = 2;
  Offload offload = Offload::kOptimizer;
  double fraction = 1.0;
  bool automatic = false;
  // The driver's threads for host functions (0: one for each stream), and whether the work runs there.
  unsigned callback_threads = 0;
  bool work_in_callbacks = false;
};

struct Measured {
  double step_seconds = 0;  // The last step, from the end of one backward pass to the next.
  int device_units = 0;
  std::vector<std::vector<Timeline::Span>> spans;
};

HostClock::Nanoseconds nanoseconds(double seconds) {
  return HostClock::Nanoseconds(static_cast<std::int64_t>(seconds * 1e9 + 0.5));
}

Measured run(const Times& times, const Settings& settings, bool with_timeline = false) {
  constexpr int kSteps = 4;
  HostClock clock(HostClock::Mode::kVirtual);
  WorldOptions world;
  world.clock = &clock;
  world.script.copy_bytes_per_second = kSlice * sizeof(float) / times.copy;
  world.script.kernel_duration = [&](const char* kernel) {
    const std::string_view name = kernel;
    if (name == kForward) return nanoseconds(times.forward);
    if (name == kBackward) return nanoseconds(times.backward);
    return nanoseconds(name.find("adamw") == std::string_view::npos ? 0 : times.device_update);
  };
  world.script.callback_threads = settings.callback_threads;
  world.script.callback_duration = nanoseconds(10e-6);
  world.script.work_in_callbacks = settings.work_in_callbacks;
  Measured result;
  result.spans.resize(kRanks);
  std::vector<HostClock::Nanoseconds> ends(kSteps);
  run_ranks(kRanks, world, [&](Rank& rank) {
    EngineOptions options;
    options.stage = settings.stage;
    options.offload = settings.offload;
    options.offload_fraction = settings.fraction;
    options.offload_auto = settings.automatic;
    options.host_threads = 1;
    options.optional_gradients = true;
    internal::EngineHooks hooks;
    options.hooks = &hooks;
    hooks.now = [&clock] { return clock.now(); };
    hooks.before_host_update = [&](std::uint64_t count) {
      clock.sleep(nanoseconds(times.host_update * static_cast<double>(count) / kSlice));
    };
    if (times.drive > 0) {
      options.tier = Tier::kFile;
      const auto rate = static_cast<std::uint64_t>(12 * kSlice / times.drive);
      hooks.make_store = [&clock, rate](int) {
        return make_memory_store({.granule_bytes = 4096,
                                  .clock = &clock,
                                  .read_bytes_per_second = rate,
                                  .write_bytes_per_second = rate});
      };
    }
    Timeline timeline([&clock] { return clock.now(); });
    if (with_timeline) options.timeline = &timeline;
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
    for (int u = 0; u < kUnits; ++u)
      engine.add_parameter(engine.add_unit("u" + std::to_string(u)), "p" + std::to_string(u), kElements);
    engine.commit();
    const Stream stream = value_or_throw(rank.backend->stream_create());
    const Module module = value_or_throw(rank.backend->load_module({.host_kernels = kCompute}));
    const auto compute = [&](const char* kernel) {
      throw_if_error(rank.backend->launch(value_or_throw(rank.backend->get_kernel(module, kernel)), {}, {},
                                          nullptr, nullptr, 0, stream));
    };
    throw_if_error(rank.communicator->barrier());
    for (int step = 0; step < kSteps; ++step) {
      engine.step_begin();
      engine.micro_step_begin(0);
      for (int u = 0; u < kUnits; ++u) {
        const Lease lease = engine.forward(u, stream);
        compute(kForward);
      }
      for (int u = kUnits - 1; u >= 0; --u) {
        const Lease lease = engine.backward(u, stream);
        compute(kBackward);
      }
      if (rank.communicator->rank() == 0) {
        throw_if_error(call_on(*rank.backend, stream,
                               [&, step] { ends[static_cast<std::size_t>(step)] = clock.now(); }));
      }
      static_cast<void>(engine.step({.groups = {{}}}));
    }
    static_cast<void>(engine.statistics());
    throw_if_error(rank.backend->stream_synchronize(stream));
    if (rank.communicator->rank() == 0) result.device_units = engine.plan().device_units;
    result.spans[static_cast<std::size_t>(rank.communicator->rank())] = timeline.spans();
    throw_if_error(rank.backend->stream_destroy(stream));
    throw_if_error(rank.backend->unload_module(module));
  });
  result.step_seconds = std::chrono::duration<double>(ends[kSteps - 1] - ends[kSteps - 2]).count();
  return result;
}

// The least time of a step. When the norm is known, the first `device_units` are updated on the device, one
// after the other. The others are updated on the host, one after the other, when their gradients are down
// too. The parameters of each go up after its update, one after the other.
double least_step_seconds(const Times& t, int device_units) {
  const double all_gradients = device_units == 0 ? t.copy : std::max(0.0, t.copy - device_units * t.backward);
  double host = all_gradients;
  double up = 0;
  double forward = 0;
  for (int u = 0; u < kUnits; ++u) {
    double ready;
    if (u < device_units) {
      ready = (u + 1) * t.device_update;
    } else {
      host += t.host_update;
      up = std::max(up, host) + t.copy;
      ready = up;
    }
    forward = std::max(forward, ready) + t.forward;
  }
  return forward + kUnits * t.backward;
}

double compute_seconds(const Times& t) {
  return kUnits * (t.forward + t.backward);
}

TEST(OffloadOverlap, ExposesTheTimeOfTheTheory) {
  std::printf("host update / forward   units on device   exposed ms   theory ms\n");
  for (const double ratio : {0.25, 0.5, 1.0, 1.5, 2.0, 4.0}) {
    Times times;
    times.host_update = ratio * times.forward;
    for (const int stage : {1, 2, 3}) {
      for (const double fraction : {1.0, 0.75, 0.5, 0.0}) {
        const Measured measured = run(times, {.stage = stage, .fraction = fraction});
        const double theory = least_step_seconds(times, measured.device_units) - compute_seconds(times);
        const double exposed = measured.step_seconds - compute_seconds(times);
        if (stage == 3) {
          std::printf("%21.2f %17d %12.2f %11.2f\n", ratio, measured.device_units, exposed * 1e3,
                      theory * 1e3);
        }
        // The exchange of norms takes less than a tenth of a millisecond.
        EXPECT_NEAR(exposed, theory, 0.05 * theory + 1e-4)
            << "stage " << stage << ", ratio " << ratio << ", " << measured.device_units << " on the device";
      }
    }
  }
}

TEST(OffloadOverlap, AutoBeatsBothExtremesWhereItCan) {
  std::printf("host update / device update   none ms   all ms   auto ms (units on device)\n");
  for (const double device_ms : {0.05, 0.25, 1.0, 2.0, 4.0}) {
    for (const double host_ms : {0.5, 2.0, 8.0}) {
      Times times;
      times.device_update = device_ms * 1e-3;
      times.host_update = host_ms * 1e-3;
      times.copy = 0.1e-3;
      times.forward = 0.05e-3;  // Hides little.
      const double none = run(times, {.fraction = 0.0}).step_seconds;
      const double all = run(times, {.fraction = 1.0}).step_seconds;
      const Measured automatic = run(times, {.automatic = true});
      double best = least_step_seconds(times, 0);
      for (int u = 1; u <= kUnits; ++u) best = std::min(best, least_step_seconds(times, u));
      std::printf("%27.2f %9.2f %8.2f %9.2f (%d)\n", host_ms / device_ms, none * 1e3, all * 1e3,
                  automatic.step_seconds * 1e3, automatic.device_units);
      // A unit is the smallest part that can be offloaded.
      const double unit = std::min(times.device_update, times.host_update) + 1e-4;
      EXPECT_LE(automatic.step_seconds, std::min(none, all) + unit) << device_ms << ", " << host_ms;
      EXPECT_LE(automatic.step_seconds, best + unit + 0.05 * (best - kUnits * times.backward));
      if (best < std::min(none, all) - 2 * unit) {
        EXPECT_LT(automatic.step_seconds, std::min(none, all)) << device_ms << ", " << host_ms;
      }
    }
  }
}

// The states of an offloaded unit are read from the drive and written back beside its update, so the slower
// of both counts.
TEST(OffloadOverlap, AutoCountsTheTimeOfTheDrive) {
  struct Case {
    double drive_ms;
    int device_units;
  };
  // An update takes 2 ms on the device and on the host, so each has half of the units. A slower drive moves
  // units to the device: 2 / (2 + 6) of 12 stay offloaded where both ways of the drive take 6 ms.
  for (const auto& [drive_ms, device_units] : {Case{0.25, 6}, Case{1, 6}, Case{3, 9}, Case{11, 11}}) {
    Times times;
    times.device_update = times.host_update = 2e-3;
    times.copy = 0.1e-3;
    times.drive = drive_ms * 1e-3;
    EXPECT_EQ(run(times, {.automatic = true}).device_units, device_units) << drive_ms << " ms";
  }
}

// Reads, updates and writes overlap: a pass takes as long as the slower of drive and update.
TEST(OffloadOverlap, PassesOverADriveAtItsRateOrTheUpdates) {
  for (const double drive_ms : {0.25, 1.0, 3.0}) {
    Times times;
    times.drive = drive_ms * 1e-3;
    times.copy = 0.01e-3;
    times.forward = times.backward = 0.01e-3;
    const double step = run(times, {.stage = 2}).step_seconds;
    const double drive = kUnits * 2 * times.drive;
    const double updates = kUnits * times.host_update;
    EXPECT_GE(step, 0.95 * std::max(drive, updates));
    EXPECT_LE(step,
              1.1 * std::max(drive, updates) + 2 * times.drive + compute_seconds(times) + 3 * times.copy)
        << drive_ms;
  }
}

// A driver may call the host functions of all streams on one thread. They only signal, so it costs nothing.
// Parameters in files are left out: fetches and the pass over states ask the drive at the same virtual
// instant there, and the thread that comes first decides between two schedules.
TEST(OffloadOverlap, OneCallbackThreadIsAsFastAsMany) {
  struct Case {
    const char* name;
    Settings settings;
    double drive;
  };
  const Case cases[] = {
      {"host: states", {.stage = 2}, 0},
      {"host: states and parameters", {.stage = 3, .offload = Offload::kOptimizerAndParameters}, 0},
      {"files: states", {.stage = 2}, 1e-3}};
  std::printf("%-30s   many ms   one ms   one, work on it ms\n", "offloaded to");
  for (const Case& one : cases) {
    Times times;
    times.drive = one.drive;
    Settings settings = one.settings;
    settings.callback_threads = 1000;
    const double many = run(times, settings).step_seconds;
    settings.callback_threads = 1;
    const double single = run(times, settings).step_seconds;
    settings.work_in_callbacks = true;
    const double working = run(times, settings).step_seconds;
    std::printf("%-30s %9.2f %8.2f %20.2f\n", one.name, many * 1e3, single * 1e3, working * 1e3);
    EXPECT_NEAR(single, many, 0.02 * many) << one.name;
  }
}

TEST(OffloadOverlap, TheTimelineShowsIt) {
  Times times;
  const Measured shown = run(times, {.stage = 3, .offload = Offload::kOptimizerAndParameters}, true);
  const auto document = nlohmann::json::parse(timeline_json(shown.spans));
  std::size_t updates_beside_compute = 0;
  const auto& spans = shown.spans[0];
  for (const Timeline::Span& update : spans) {
    if (update.track != "host" || update.name.rfind("update", 0) != 0) continue;
    EXPECT_EQ(update.end - update.begin, nanoseconds(times.host_update)) << update.name;
    for (const Timeline::Span& forward : spans) {
      if (forward.track != "trainer" || forward.name.rfind("forward", 0) != 0) continue;
      if (forward.begin < update.end && update.begin < forward.end) ++updates_beside_compute;
    }
  }
  EXPECT_GE(updates_beside_compute, 2u * (kUnits - 1));
  std::size_t fetches = 0;
  for (const auto& event : document.at("traceEvents")) {
    if (event.at("ph") == "X" && event.at("name").get<std::string>().rfind("fetch", 0) == 0) ++fetches;
  }
  // On both ranks and in every step, two units stay in their slots between the passes.
  EXPECT_EQ(fetches, 2u * 4 * (2 * kUnits - 2));
}

}  // namespace
}  // namespace forebay::testing
