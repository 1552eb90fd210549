#include "runtime/command/simulate/simulation_print.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/text_table.h"

namespace forebay {
namespace {

constexpr std::size_t kChangesShown = 3;
// A change that saves less than this part of a step is not shown. Smaller: noise looks like advice.
constexpr double kUsefulPart = 0.01;

std::string seconds_text(double seconds) {
  if (seconds >= 1) return format_text("%.3f s", seconds);
  if (seconds >= 1e-3) return format_text("%.2f ms", seconds * 1e3);
  return format_text("%.0f us", seconds * 1e6);
}

std::string percent(double part) {
  return format_text("%.1f %%", part * 100);
}

std::string rate(double number) {
  return number >= 1e6   ? format_text("%.2f M", number / 1e6)
         : number >= 1e4 ? format_text("%.0f", number)
                         : format_text("%.4g", number);
}

struct PoolLine {
  const char* name;
  std::uint64_t PoolBytes::*member;
};
constexpr PoolLine kPools[] = {
    {"parameters", &PoolBytes::parameters}, {"gradients", &PoolBytes::gradients},
    {"optimizer", &PoolBytes::optimizer},   {"gathered", &PoolBytes::gathered},
    {"buckets", &PoolBytes::buckets},       {"activations", &PoolBytes::activations}};

}  // namespace

std::string simulation_text(const SimulationRequest& request, const SimulationResult& result,
                            const std::vector<SimulatedChange>& changes, const std::string& description) {
  const auto line = [](const char* name, const std::string& value) {
    return format_text("  %-24s", name) + value + "\n";
  };
  const double per_second = result.tokens_per_second();
  std::string text = description + "\n" + format_count(static_cast<std::uint64_t>(request.ranks), "rank") +
                     " of " + request.cluster.name + ", " + request.cluster.device.name +
                     ", simulated: figures are the description's, the schedule is the engine's\n\n";
  text += line("step", seconds_text(result.step_seconds));
  text += line("tokens/s", rate(per_second) + ", " + rate(per_second / request.ranks) + " for each device");
  text += line("model FLOPs utilisation", percent(result.model_flops_used()));
  text += line("TFLOP/s of a device",
               format_text("%.1f, recomputation included, of %.0f", result.hardware_flops_per_second() / 1e12,
                           result.peak_flops / 1e12));

  const std::string stage =
      request.part.pipeline_parallel == 1
          ? ""
          : ", in pipeline stage " + std::to_string(result.pipeline_stage) + ", which needs most memory";
  text += "\ntime of a step" + stage + "\n";
  for (const bool exposed : {false, true}) {
    for (const SimulatedTime& time : result.times) {
      if (time.exposed != exposed) continue;
      text += line(time.cause.c_str(), format_text("%-12s %6s", seconds_text(time.seconds).c_str(),
                                                   percent(time.seconds / result.step_seconds).c_str()) +
                                           (exposed ? "   exposed" : ""));
    }
  }
  text += line("most time", bottleneck(result).cause);
  std::size_t shown = 0;
  for (const SimulatedChange& change : changes) {
    const double saved = 1 - change.step_seconds / result.step_seconds;
    if (shown == kChangesShown || saved < kUsefulPart) break;
    text += line(shown++ == 0 ? "would help" : "",
                 change.change + ": " + seconds_text(change.step_seconds) + ", " + percent(saved) + " less");
  }
  if (!changes.empty() && shown == 0) text += line("would help", "nothing by more than 1 %");

  const EngineStatistics& statistics = result.statistics;
  text += "\nmemory of a device\n";
  for (const PoolLine& pool : kPools) text += line(pool.name, format_bytes(statistics.peak.*pool.member));
  text += line(
      "= in chunks",
      format_bytes(statistics.peak_reserved_bytes) + " of " + format_bytes(result.device_bytes) + ", " +
          format_bytes(result.device_bytes - std::min(result.device_bytes, statistics.peak_reserved_bytes)) +
          " to spare");
  if (statistics.host_bytes > 0) {
    text += line("pinned, on the host", format_bytes(statistics.host_bytes) + " of the rank's share of " +
                                            format_bytes(result.host_memory_bytes));
  }
  if (statistics.file_bytes > 0) text += line("in files", format_bytes(statistics.file_bytes));
  return text;
}

std::string simulation_json(const SimulationRequest& request, const SimulationResult& result,
                            const std::vector<SimulatedChange>& changes) {
  nlohmann::ordered_json json;
  json["cluster"] = request.cluster.name;
  json["device"] = request.cluster.device.name;
  json["ranks"] = request.ranks;
  json["tensor_parallel"] = request.part.tensor_parallel;
  json["pipeline_parallel"] = request.part.pipeline_parallel;
  json["pipeline_stage"] = result.pipeline_stage;
  json["parameters"] = result.parameters;
  json["step_seconds"] = result.step_seconds;
  json["tokens_per_step"] = result.tokens_per_step;
  json["tokens_per_second"] = result.tokens_per_second();
  json["tokens_per_second_and_device"] = result.tokens_per_second() / request.ranks;
  json["model_flops_utilisation"] = result.model_flops_used();
  json["tflops_per_device"] = result.hardware_flops_per_second() / 1e12;
  for (const SimulatedTime& time : result.times)
    json["seconds"].push_back({{"cause", time.cause}, {"exposed", time.exposed}, {"seconds", time.seconds}});
  json["bottleneck"] = bottleneck(result).cause;
  for (const SimulatedChange& change : changes)
    json["changes"].push_back({{"change", change.change}, {"step_seconds", change.step_seconds}});
  auto& memory = json["memory"];
  for (const PoolLine& pool : kPools) memory[pool.name] = result.statistics.peak.*pool.member;
  memory["reserved"] = result.statistics.peak_reserved_bytes;
  memory["device"] = result.device_bytes;
  memory["host"] = result.statistics.host_bytes;
  memory["host_share"] = result.host_memory_bytes;
  memory["files"] = result.statistics.file_bytes;
  json["sent_bytes_per_step"] = result.sent_bytes_per_step;
  auto& busy = json["busy"];
  busy["compute"] = result.compute_busy;
  busy["bus"] = result.bus_busy;
  busy["host_memory"] = result.host_busy;
  for (std::size_t level = 0; level < result.link_busy.size(); ++level)
    busy["link " + request.cluster.links[level].name] = result.link_busy[level];
  return json.dump(2) + "\n";
}

}  // namespace forebay
