// The cost of offloaded activations for a step, on the virtual clock: almost nothing if copies can hide
// behind computation, the time by theory if they cannot. The timeline shows the exposed part.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "runtime/device/forwarding_backend.h"
#include "runtime/engine/engine_hooks.h"
#include "tests/engine/activations/chain.h"

namespace forebay::testing {
namespace {

using enum ActivationPlacement;

constexpr int kLayers = 24;
constexpr std::uint64_t kBytes = 48u << 10;

// Seconds of one layer, on one rank.
struct Times {
  double forward = 3e-3;   // Also of the recomputation.
  double backward = 6e-3;  // Without it.
  double copy = 1e-3;      // A copy of one rank's offloaded part, in either direction.
  double gather = 0;       // A gather of the ranks' slices.
  double drive =
      0;  // A transfer of one rank's offloaded part to or from a modelled drive; 0: there is no drive.
};

HostClock::Nanoseconds nanoseconds(double seconds) {
  return HostClock::Nanoseconds(static_cast<std::int64_t>(seconds * 1e9 + 0.5));
}

// A device behind a link: what comes from pinned memory or goes there takes its time, what stays on the
// device takes none.
class LinkedBackend final : public ForwardingBackend {
 public:
  LinkedBackend(std::unique_ptr<HostBackend> device, HostClock& clock, double bytes_per_second)
      : ForwardingBackend(*device), device_(std::move(device)), clock_(clock), rate_(bytes_per_second) {}

  Status pin(void* address, std::size_t bytes) override {
    FOREBAY_RETURN_IF_ERROR(device_->pin(address, bytes));
    pinned_.emplace_back(static_cast<std::byte*>(address), bytes);
    return {};
  }
  Status copy_async(void* target, const void* source, std::size_t bytes, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(device_->copy_async(target, source, bytes, stream));
    if (!is_pinned(target) && !is_pinned(source)) return {};
    return call_on(*device_, stream, [clock = &clock_, seconds = static_cast<double>(bytes) / rate_] {
      clock->sleep(nanoseconds(seconds));
    });
  }

 private:
  bool is_pinned(const void* address) const {
    const auto* byte = static_cast<const std::byte*>(address);
    return std::any_of(pinned_.begin(), pinned_.end(), [byte](const auto& range) {
      return byte >= range.first && byte < range.first + range.second;
    });
  }

  const std::unique_ptr<HostBackend> device_;
  HostClock& clock_;
  const double rate_;
  std::vector<std::pair<std::byte*, std::size_t>> pinned_;
};

struct Measured {
  double step_seconds = 0;    // The last one: forward, recomputation and backward.
  double waited_seconds = 0;  // The part in which the compute stream waited for activations, by the timeline.
  Exposure copies;            // Copies of all steps, and the part that computation did not cover.
};

Measured run(int ranks, ActivationPlacement placement, const Times& times) {
  constexpr int kSteps = 3;
  HostClock clock(HostClock::Mode::kVirtual);
  const double slice = static_cast<double>(kBytes) / ranks;
  WorldOptions world;
  world.clock = &clock;
  if (times.gather > 0) world.local.bytes_per_second = slice * (ranks - 1) / times.gather;
  world.create_backend = [&](int rank) -> std::unique_ptr<Backend> {
    HostBackendOptions options{.granularity = 64u << 10, .clock = &clock};
    options.name = "host rank " + std::to_string(rank);
    return std::make_unique<LinkedBackend>(value_or_throw(HostBackend::create(options)), clock,
                                           slice / times.copy);
  };
  Measured result;
  run_ranks(ranks, world, [&](Rank& rank) {
    ActivationCheckpointerOptions options;
    Timeline timeline([&clock] { return clock.now(); });
    options.timeline = &timeline;
    internal::EngineHooks hooks;
    if (times.drive > 0) {
      options.plan.tier = Tier::kFile;
      const auto rate = static_cast<std::uint64_t>(slice / times.drive);
      options.hooks = &hooks;
      hooks.make_store = [&clock, rate](int) {
        return make_memory_store({.granule_bytes = 4096,
                                  .clock = &clock,
                                  .read_bytes_per_second = rate,
                                  .write_bytes_per_second = rate});
      };
    }
    std::vector<HostClock::Nanoseconds> ends(kSteps);
    {
      ActivationCheckpointer checkpointer(*rank.backend, *rank.communicator, options);
      for (int u = 0; u < kLayers; ++u)
        checkpointer.declare({.unit = u, .bytes = kBytes, .placement = placement});
      checkpointer.commit();
      const Stream stream = value_or_throw(rank.backend->stream_create());
      DevicePtr const input = value_or_throw(rank.backend->alloc(kBytes));
      const auto compute = [&](double seconds) {
        throw_if_error(call_on(*rank.backend, stream, [&clock, &timeline, seconds] {
          timeline.begin("compute");
          clock.sleep(nanoseconds(seconds));
          timeline.end("compute", "layer");
        }));
      };
      throw_if_error(rank.communicator->barrier());
      for (int step = 0; step < kSteps; ++step) {
        for (int u = 0; u < kLayers; ++u) {
          checkpointer.save({u, 0, step}, input, kBytes, stream);
          compute(times.forward);
        }
        for (int u = kLayers - 1; u >= 0; --u) {
          const ActivationLease lease = checkpointer.load({u, 0, step}, stream);
          compute(times.forward + times.backward);
        }
        throw_if_error(call_on(*rank.backend, stream,
                               [&, step] { ends[static_cast<std::size_t>(step)] = clock.now(); }));
      }
      throw_if_error(rank.backend->stream_synchronize(stream));
      checkpointer.check();
      throw_if_error(rank.backend->stream_destroy(stream));
      throw_if_error(rank.backend->free(input));
    }
    if (rank.communicator->rank() != 0) return;
    const std::chrono::duration<double> step = ends[kSteps - 1] - ends[kSteps - 2];
    result.step_seconds = step.count();
    std::vector<Timeline::Span> spans = timeline.spans();
    for (Timeline::Span& span : spans) {
      if (span.track == "activations wait" && span.begin >= ends[kSteps - 2])
        result.waited_seconds += std::chrono::duration<double>(span.end - span.begin).count();
      if (span.track == "activations down" || span.track == "activations up") span.track = "copies";
    }
    result.copies = exposure(spans, "copies", "compute");
  });
  return result;
}

// The same step by arithmetic: two staging places on the way down, two buffers on the way up.
double theory_seconds(const Times& t) {
  const double down = t.copy + t.drive;
  std::vector<double> left(kLayers);
  double compute = 0;
  for (std::size_t i = 0; i < kLayers; ++i) {
    if (i >= 2) compute = std::max(compute, left[i - 2]);
    left[i] = std::max(compute, i > 0 ? left[i - 1] : 0.0) + down;
    compute += t.forward;
  }
  double fetched = 0;
  double gathered = 0;
  std::vector<double> used;
  for (std::size_t i = kLayers; i-- > 0;) {
    const double free = used.size() < 2 ? 0 : used[used.size() - 2];
    fetched = std::max({fetched, left[i], free}) + t.drive + t.copy;
    gathered = std::max(gathered, fetched) + t.gather;
    compute = std::max(compute, gathered) + t.forward + t.backward;
    used.push_back(compute);
  }
  return compute;
}

double least_seconds(const Times& t) {
  return kLayers * (2 * t.forward + t.backward);
}

TEST(ActivationOverlap, HidesWhatCanBeHidden) {
  std::printf("ranks   copy / recomputation   keep ms   partition   partition+spill   theory   waited\n");
  for (const int ranks : {1, 2, 4}) {
    for (const double ratio : {0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0}) {
      Times times;
      times.copy = ratio * times.forward;
      times.gather = ranks > 1 ? 0.25 * times.forward : 0;

      const Measured keep = run(ranks, kKeep, times);
      const Measured partition = run(ranks, kPartition, times);
      const Measured spill = run(ranks, kPartitionAndSpill, times);

      const double theory = theory_seconds(times);
      std::printf("%5d %22.2f %9.2f %11.2f %17.2f %8.2f %8.2f\n", ranks, ratio, keep.step_seconds * 1e3,
                  partition.step_seconds * 1e3, spill.step_seconds * 1e3, theory * 1e3,
                  spill.waited_seconds * 1e3);
      EXPECT_NEAR(keep.step_seconds, least_seconds(times), 1e-4);
      EXPECT_LE(partition.step_seconds, 1.05 * keep.step_seconds);
      if (ratio <= 1) {
        EXPECT_LE(spill.step_seconds, 1.05 * keep.step_seconds) << ranks << ", " << ratio;
      }
      EXPECT_NEAR(spill.step_seconds, theory, 0.01 * theory) << ranks << ", " << ratio;
      // The extra time is the time that the compute stream waits in the timeline.
      EXPECT_NEAR(spill.waited_seconds, spill.step_seconds - keep.step_seconds, 1e-4)
          << ranks << ", " << ratio;
      EXPECT_GT(spill.copies.busy.count(), 0);
      if (ratio > 1) {
        EXPECT_GT(spill.waited_seconds, 0.1 * ratio * times.forward);
      }
    }
  }
}

TEST(ActivationOverlap, HidesTheDriveToo) {
  for (const double share : {0.2, 0.4, 1.5}) {
    Times times;
    times.copy = 0.1 * times.forward;
    times.drive = share * times.forward;

    const Measured keep = run(1, kKeep, times);
    const Measured spill = run(1, kPartitionAndSpill, times);

    std::printf("drive / recomputation %.2f: keep %.2f ms, spilled %.2f ms, theory %.2f ms\n", share,
                keep.step_seconds * 1e3, spill.step_seconds * 1e3, theory_seconds(times) * 1e3);
    if (share < 1) {
      EXPECT_LE(spill.step_seconds, 1.05 * keep.step_seconds);
    } else {
      EXPECT_GT(spill.step_seconds, 1.05 * keep.step_seconds);
    }
    EXPECT_NEAR(spill.waited_seconds, spill.step_seconds - keep.step_seconds, 1e-4);
  }
}

}  // namespace
}  // namespace forebay::testing
