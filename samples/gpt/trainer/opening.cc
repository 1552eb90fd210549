#include "trainer/opening.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "forebay/units.h"

namespace forebay::gpt {
namespace {

void show_bucket(RankModel& model) {
  const WireSpeed speed = model.engine.statistics().wire_speed;
  if (speed.bytes_per_second <= 0) return;
  std::fprintf(stderr, "forebay-gpt: buckets of %s: a collective takes %.0f us and as long as %s/s need\n",
               format_bytes(model.engine.plan().options.bucket_bytes).c_str(), speed.latency_seconds * 1e6,
               format_bytes(static_cast<std::uint64_t>(speed.bytes_per_second)).c_str());
}

void show_pipeline(RankModel& model) {
  const int stages = model.grid.shape().pipeline_parallel();
  if (stages == 1) return;
  const int micro_steps = model.options.micro_steps;
  const double waits = 100.0 * (stages - 1) / (micro_steps + stages - 1);
  std::fprintf(stderr,
               "forebay-gpt: pipeline of %d stages, %d micro-steps: each stage waits %.0f %% of a step at "
               "least; more --micro-steps make it less\n",
               stages, micro_steps, waits);
}

void show_activations(const std::vector<std::string>& choices) {
  const bool same = std::equal(choices.begin() + 1, choices.end(), choices.begin());
  for (std::size_t stage = 0; stage < (same ? 1 : choices.size()); ++stage) {
    std::fprintf(stderr, "forebay-gpt: activations auto%s: %s\n",
                 same ? "" : (" at pipeline stage " + std::to_string(stage)).c_str(), choices[stage].c_str());
  }
}

void show_offload(RankModel& model) {
  if (model.options.offload == Offload::kNone) return;
  const std::string store = model.engine.statistics().store_description;
  const double share = 100.0 * static_cast<double>(model.offloaded_parameters()) /
                       static_cast<double>(parameter_count(model.options.model));
  std::fprintf(
      stderr, "forebay-gpt: offload %s to %s: %.0f %% of the model, %d of %zu units stay on the device%s%s\n",
      offload_name(model.options.offload), tier_name(model.options.tier), share,
      model.engine.plan().device_units, model.engine.model().units.size(), store.empty() ? "" : "; ",
      store.c_str());
}

}  // namespace

void show_opening(RankModel& model) {
  std::vector<std::string> activations;
  if (model.options.activations == ActivationPlacement::kAuto) {
    activations = model.of_each_stage(
        model.inputs == nullptr ? "keep: the device has room for the inputs of all recomputed blocks"
                                : describe_choice(model.inputs->plan()));
  }
  if (model.rank.place.rank != 0 || !model.options.progress) return;
  show_bucket(model);
  show_pipeline(model);
  if (!activations.empty()) show_activations(activations);
  show_offload(model);
}

}  // namespace forebay::gpt
