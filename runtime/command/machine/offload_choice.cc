#include "runtime/command/machine/offload_choice.h"

#include <algorithm>
#include <utility>

#include "forebay/text.h"
#include "forebay/units.h"

namespace forebay {
namespace {

struct Setting {
  Offload offload;
  Tier tier;
};

std::vector<Setting> settings_at(int stage) {
  std::vector<Setting> settings = {{Offload::kNone, Tier::kPinned},
                                   {Offload::kOptimizer, Tier::kPinned},
                                   {Offload::kOptimizer, Tier::kFile}};
  // The parameter shard can leave where there is one.
  if (stage == 3) {
    settings.push_back({Offload::kOptimizerAndParameters, Tier::kPinned});
    settings.push_back({Offload::kOptimizerAndParameters, Tier::kFile});
  }
  return settings;
}

double seconds(double amount, double rate) {
  return rate > 0 ? amount / rate : 0;
}

void judge(const TierLimits& limits, OffloadEstimate& estimate) {
  const auto of_all = [&](std::uint64_t bytes) {
    std::uint64_t product = 0;
    return __builtin_mul_overflow(bytes, limits.host_ranks, &product) ? ~std::uint64_t{0} : product;
  };
  const std::string ranks =
      limits.host_ranks == 1 ? "" : " for " + std::to_string(limits.host_ranks) + " ranks";
  const auto hold = [&](std::uint64_t needed, std::uint64_t limit, const std::string& what,
                        const std::string& there) {
    if (needed <= limit) return;
    estimate.lacks += (estimate.lacks.empty() ? "" : "; ") + format_bytes(needed) + " of " + what + ", and " +
                      there + " " + format_bytes(limit);
  };
  hold(estimate.device_bytes, limits.device_bytes, "device memory", "the budget is");
  const std::uint64_t host = estimate.host_bytes + (limits.device_in_host ? estimate.device_bytes : 0);
  hold(of_all(host), limits.host_bytes,
       "host memory" + ranks + (limits.device_in_host ? ", the device's included" : ""), "the host has");
  hold(of_all(estimate.file_bytes), limits.file_bytes, "files" + ranks, "the directories have");
  estimate.fits = estimate.lacks.empty();
}

void cost(const Plan plan, std::uint64_t parameter_bytes_up, const TierLimits& limits, const TierRates& rates,
          OffloadEstimate& estimate) {
  const auto share = static_cast<double>(limits.host_ranks);
  const double link_share = limits.device_in_host ? share : 1;
  const auto down = static_cast<double>(plan.host_bytes.gradients);
  // A parameter has as many bytes as its gradient.
  const double up =
      estimate.offload == Offload::kOptimizerAndParameters ? static_cast<double>(parameter_bytes_up) : down;
  const double elements = down / static_cast<double>(element_bytes(plan.options.dtype));
  estimate.down_seconds = link_share * seconds(down, rates.from_device_bytes_per_second);
  estimate.up_seconds = link_share * seconds(up, rates.to_device_bytes_per_second);
  estimate.both_seconds = link_share * seconds(down + up, rates.both_bytes_per_second);
  estimate.adamw_seconds = share * seconds(elements, rates.adamw_elements_per_second);
  estimate.file_seconds =
      share *
      (seconds(static_cast<double>(plan.file_bytes.read_per_step), rates.file_read_bytes_per_second) +
       seconds(static_cast<double>(plan.file_bytes.written_per_step), rates.file_write_bytes_per_second));
  const std::pair<const char*, double> parts[] = {{"gradients down", estimate.down_seconds},
                                                  {"parameters up", estimate.up_seconds},
                                                  {"both ways", estimate.both_seconds},
                                                  {"AdamW on the host", estimate.adamw_seconds},
                                                  {"files", estimate.file_seconds}};
  for (const auto& [name, time] : parts) {
    if (time <= estimate.added_seconds) continue;
    estimate.added_seconds = time;
    estimate.bound_by = name;
  }
}

std::string seconds_text(double time) {
  return time < 0.1 ? format_text("%.2f ms", time * 1e3) : format_text("%.3f s", time);
}

// Where the device has no room for any setting: the one that takes least of it, and its largest pool.
std::string device_shortage_of(const OffloadChoice& choice) {
  const OffloadEstimate& least = *std::min_element(
      choice.estimates.begin(), choice.estimates.end(),
      [](const OffloadEstimate& a, const OffloadEstimate& b) { return a.device_bytes < b.device_bytes; });
  struct Pool {
    const char* name;
    std::uint64_t bytes;
    const char* advice;
  };
  const Pool pools[] = {{"parameters", least.pools.parameters, "use --stage 3, or more --ranks"},
                        {"gradients", least.pools.gradients, "use --stage 2 or 3, or more --ranks"},
                        {"optimizer", least.pools.optimizer, "use --stage 1 or higher, or more --ranks"},
                        {"gathered", least.pools.gathered, "use a smaller --hidden or --vocabulary"},
                        {"buckets", least.pools.buckets, "use fewer --ranks"},
                        {"activations", least.pools.activations, "use a smaller --batch or --sequence"}};
  const Pool& largest = *std::max_element(std::begin(pools), std::end(pools),
                                          [](const Pool& a, const Pool& b) { return a.bytes < b.bytes; });
  return "the one that takes least of the device, " + setting_name(least.offload, least.tier) + ", needs " +
         least.lacks + "; the largest pool there is " + largest.name + " with " +
         format_bytes(largest.bytes) + ": " + largest.advice + ", or a larger --memory";
}

std::string shortage_of(const OffloadChoice& choice, const TierLimits& limits) {
  std::string text;
  for (const OffloadEstimate& one : choice.estimates) {
    if (one.device_bytes > limits.device_bytes) continue;
    text += setting_name(one.offload, one.tier) + " needs " + one.lacks + "; ";
  }
  if (text.empty()) return device_shortage_of(choice);
  return text + "keep fewer ranks on this host (--host-ranks), or name directories with more room";
}

std::string reason_of(const OffloadChoice& choice, const TierLimits& limits) {
  if (choice.chosen < 0) return shortage_of(choice, limits);
  std::string text;
  for (std::size_t i = 0; i < choice.estimates.size(); ++i) {
    const OffloadEstimate& one = choice.estimates[i];
    const std::string name = setting_name(one.offload, one.tier);
    const bool is_chosen = static_cast<int>(i) == choice.chosen;
    if (one.fits && !is_chosen && choice.chosen == 0) continue;  // Nothing adds less than nothing.
    text += (text.empty() ? "" : "; ") + name;
    if (!one.fits) {
      text += " needs " + one.lacks;
    } else if (one.added_seconds <= 0) {
      text += is_chosen && i == 0 ? " fits and adds nothing" : " fits";
    } else {
      text += (is_chosen ? " fits and adds " : " would add ") + seconds_text(one.added_seconds) + " (" +
              one.bound_by + ")";
    }
  }
  return text;
}

}  // namespace

std::string setting_name(Offload offload, Tier tier) {
  return offload == Offload::kNone ? "none" : std::string(offload_name(offload)) + " on " + tier_name(tier);
}

Result<OffloadChoice> choose_offload(const ModelShape& model, const PlanOptions& options,
                                     const TierLimits& limits, const TierRates& rates) {
  OffloadChoice choice;
  for (const Setting& setting : settings_at(options.stage)) {
    PlanOptions wanted = options;
    wanted.offload = setting.offload;
    wanted.tier = setting.tier;
    FOREBAY_ASSIGN_OR_RETURN(const Plan plan, make_plan(model, wanted));
    OffloadEstimate estimate;
    estimate.offload = setting.offload;
    estimate.tier = setting.tier;
    estimate.device_bytes = plan.reserved_bytes;
    estimate.pools = plan.bytes;
    estimate.host_bytes = plan.host_bytes.total();
    estimate.file_bytes = plan.file_bytes.total();
    judge(limits, estimate);
    if (setting.offload != Offload::kNone) {
      // On any tier, the bytes fetched for gathers equal the bytes that a file tier reads beside the
      // optimizer's.
      wanted.tier = Tier::kFile;
      FOREBAY_ASSIGN_OR_RETURN(const Plan in_files, make_plan(model, wanted));
      const FileBytes& files = in_files.file_bytes;
      cost(plan, files.read_per_step - files.optimizer, limits, rates, estimate);
    }
    choice.estimates.push_back(std::move(estimate));
    const OffloadEstimate& last = choice.estimates.back();
    const auto index = static_cast<int>(choice.estimates.size()) - 1;
    if (last.fits &&
        (choice.chosen < 0 ||
         last.added_seconds < choice.estimates[static_cast<std::size_t>(choice.chosen)].added_seconds)) {
      choice.chosen = index;
    }
  }
  choice.reason = reason_of(choice, limits);
  return choice;
}

std::vector<std::string> offload_formulas() {
  return {
      "P: elements that are updated; b: bytes of a gradient or parameter; per rank and step, N ranks in all, "
      "R on this host",
      "gradients down: b * P / N at the rate from the device",
      "parameters up: b * P / N at the rate to the device; with optimizer+parameters, for every gather",
      "both ways: the sum of these at the rate of both directions at once",
      "AdamW on the host: R * P / N at the measured step; its memory traffic is 28 bytes an element",
      "files: R * 12 * P / N read, then as much written, at the chosen point; with optimizer+parameters the "
      "parameters too, for every gather",
      "added: the longest of these, because they run at the same time; no overlap with the computation is "
      "assumed, and the time of the device's own step is not subtracted",
      "at ZeRO stage 0 every rank updates all parameters: P instead of P / N"};
}

}  // namespace forebay
