#include "runtime/command/compare/comparison_print.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "forebay/activation_formulas.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/page/text.h"
#include "runtime/command/text_table.h"

namespace forebay {
namespace {

constexpr std::size_t kBestShown = 5;
constexpr std::size_t kMissesShown = 3;

// Price of a million tokens.
double token_price(const Setting& setting, double price) {
  return price * setting.request.ranks / 3600 / setting.tokens_per_second * 1e6;
}

TableRow head_of(const ComparisonText& text) {
  TableRow row = {"setting", "step", "tokens/s", "MFU", "device", "host"};
  if (text.price > 0) row.push_back("price of 1M tokens");
  row.push_back("most time");
  return row;
}

TableRow row_of(const Setting& setting, const ComparisonText& text) {
  TableRow row = {setting_text(setting),
                  format_text("%.3f s", setting.step_seconds),
                  format_text("%.0f", setting.tokens_per_second),
                  format_text("%.1f %%", setting.model_flops_used * 100),
                  format_bytes(setting.device_bytes),
                  format_bytes(setting.host_bytes)};
  if (text.price > 0) row.push_back(format_text("%.4f", token_price(setting, text.price)));
  row.push_back(setting.bottleneck);
  return row;
}

std::string rows_text(const Comparison& comparison, const std::vector<std::size_t>& indices, std::size_t most,
                      const ComparisonText& text) {
  std::string lines;
  const TableRow head = head_of(text);
  for (std::size_t i = 0; i < std::min(most, indices.size()); ++i) {
    const Setting& setting = comparison.settings[indices[i]];
    const TableRow row = row_of(setting, text);
    lines += "  " + row[0] + "\n   ";
    for (std::size_t c = 1; c < row.size(); ++c) lines += (c == 1 ? " " : ", ") + head[c] + " " + row[c];
    lines += "\n";
  }
  return lines;
}

// "3 could not be simulated: ..."; empty without such settings.
std::string failures_text(const Comparison& comparison) {
  const auto failed = failures(comparison);
  if (failed.empty()) return "";
  const Setting& first = comparison.settings[failed.front()];
  return std::to_string(failed.size()) + " could not be simulated, the first one (" + setting_text(first) +
         "): " + shown_text(first.failure.message()) + "\n";
}

nlohmann::ordered_json json_of(const Setting& setting, const ComparisonText& text) {
  const SimulationRequest& r = setting.request;
  nlohmann::ordered_json json;
  json["setting"] = setting_text(setting);
  json["options"] = setting_options(setting);
  json["stage"] = r.options.stage;
  json["offload"] = offload_name(r.options.offload);
  json["tier"] = tier_name(r.options.tier);
  json["fraction"] = r.options.offload_fraction;
  json["recompute"] = recompute_name(r.recompute_every);
  json["tensor_parallel"] = r.part.tensor_parallel;
  json["pipeline_parallel"] = r.part.pipeline_parallel;
  json["activations"] = activations_name(r.activations, r.activation_tier);
  json["group"] = r.options.group;
  json["batch"] = r.batch;
  json["micro_steps"] = r.options.micro_steps;
  json["bucket"] = r.options.bucket_bytes;
  json["device_bytes"] = setting.device_bytes;
  json["host_bytes"] = setting.host_bytes;
  json["missing_bytes"] = setting.missing_bytes();
  if (!setting.failure.ok()) json["failure"] = shown_text(setting.failure.message());
  if (!setting.simulated) return json;
  json["step_seconds"] = setting.step_seconds;
  json["tokens_per_second"] = setting.tokens_per_second;
  json["model_flops_utilisation"] = setting.model_flops_used;
  json["bottleneck"] = setting.bottleneck;
  if (text.price > 0) json["price_per_million_tokens"] = token_price(setting, text.price);
  return json;
}

// The drawing: device memory to the right, seconds upwards, both from zero.
std::string plot(const Comparison& comparison) {
  constexpr double kWidth = 800, kHeight = 420, kLeft = 70, kBottom = 45;
  const auto simulated = best_first(comparison, Objective::kTime);
  if (simulated.empty()) return "<p>No setting fits, so nothing is drawn.</p>\n";
  double most_bytes = 0, most_seconds = 0;
  for (const std::size_t i : simulated) {
    most_bytes = std::max(most_bytes, static_cast<double>(comparison.settings[i].device_limit));
    most_seconds = std::max(most_seconds, comparison.settings[i].step_seconds);
  }
  const auto x = [&](double bytes) { return kLeft + bytes / most_bytes * (kWidth - kLeft - 10); };
  const auto y = [&](double seconds) {
    return kHeight - kBottom - seconds / most_seconds * (kHeight - kBottom - 10);
  };
  std::string svg = format_text(
      "<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"Seconds of a step against device memory\">\n",
      kWidth, kHeight);
  for (int i = 0; i <= 4; ++i) {
    const double seconds = most_seconds * i / 4;
    const double bytes = most_bytes * i / 4;
    svg += format_text("<line class=\"grid\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>", kLeft,
                       y(seconds), kWidth - 10, y(seconds));
    svg += format_text("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%.3g s</text>", kLeft - 6,
                       y(seconds) + 4, seconds);
    svg += format_text("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x(bytes),
                       kHeight - kBottom + 18, i == 4 ? "end" : "middle",
                       format_bytes(static_cast<std::uint64_t>(bytes)).c_str());
  }
  svg += format_text("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">device memory</text>\n",
                     (kLeft + kWidth) / 2, kHeight - 6);
  for (const std::size_t i : simulated) {
    const Setting& setting = comparison.settings[i];
    svg += format_text("<circle class=\"stage%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"><title>",
                       setting.request.options.stage, x(static_cast<double>(setting.device_bytes)),
                       y(setting.step_seconds));
    svg += html_text(setting_text(setting)) + format_text(": %.3f s, ", setting.step_seconds) +
           format_bytes(setting.device_bytes) + "</title></circle>\n";
  }
  svg += "<polyline class=\"front\" points=\"";
  for (const std::size_t i : pareto_front(comparison)) {
    const Setting& setting = comparison.settings[i];
    svg += format_text("%.1f,%.1f ", x(static_cast<double>(setting.device_bytes)), y(setting.step_seconds));
  }
  return svg + "\"/>\n</svg>\n";
}

std::string table(const Comparison& comparison, const std::vector<std::size_t>& indices, std::size_t most,
                  const ComparisonText& text) {
  std::string rows = "<table><thead><tr>";
  for (const std::string& cell : head_of(text)) rows += "<th scope=\"col\">" + html_text(cell) + "</th>";
  rows += "</tr></thead><tbody>\n";
  for (std::size_t i = 0; i < std::min(most, indices.size()); ++i) {
    rows += "<tr>";
    for (const std::string& cell : row_of(comparison.settings[indices[i]], text))
      rows += "<td>" + html_text(cell) + "</td>";
    rows += "</tr>\n";
  }
  return rows + "</tbody></table>\n";
}

constexpr char kPageStyle[] =
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b;"
    "background:#fff}svg{width:100%;height:auto;font-size:12px}.grid{stroke:#ddd}.front{fill:none;stroke:#"
    "333;"
    "stroke-width:1.5}.stage0{fill:#888}.stage1{fill:#1f77b4}.stage2{fill:#2ca02c}.stage3{fill:#d62728}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.3rem .6rem;"
    "text-align:left;vertical-align:top;white-space:nowrap}td:first-child{white-space:normal}.key "
    "span{margin-right:1.5em}";

}  // namespace

std::string comparison_text(const Comparison& comparison, const ComparisonText& text) {
  const auto best = best_first(comparison, text.objective);
  const auto misses = nearest_misses(comparison);
  std::string lines = text.model + "\n" + format_count(comparison.settings.size(), "setting") + ": " +
                      std::to_string(best.size()) + " simulated, " + std::to_string(misses.size()) +
                      " do not fit";
  if (comparison.left_out > 0) lines += ", " + std::to_string(comparison.left_out) + " left out by --limit";
  lines += "\n" + failures_text(comparison);
  if (!best.empty()) {
    lines += "\nbest\n" + rows_text(comparison, best, kBestShown, text);
    lines += "  options: " + setting_options(comparison.settings[best.front()]) + "\n";
    lines += "\nno setting is both faster and smaller\n" +
             rows_text(comparison, pareto_front(comparison), best.size(), text);
  }
  if (!misses.empty()) lines += "\njust do not fit\n";
  for (std::size_t i = 0; i < std::min(kMissesShown, misses.size()); ++i) {
    const Setting& setting = comparison.settings[misses[i]];
    lines += "  " + setting_text(setting) + ": " + format_bytes(setting.missing_bytes()) + " too much\n";
  }
  return lines;
}

std::string comparison_csv(const Comparison& comparison, const ComparisonText& text) {
  std::string lines;
  std::vector<std::string> names;
  for (const Setting& setting : comparison.settings) {
    if (!setting.simulated && !names.empty()) continue;
    names.clear();
    const nlohmann::ordered_json json = json_of(setting, text);
    for (const auto& [name, value] : json.items()) names.push_back(name);
    if (setting.simulated) break;
  }
  for (std::size_t i = 0; i < names.size(); ++i) lines += (i == 0 ? "" : ",") + names[i];
  lines += "\n";
  for (const Setting& setting : comparison.settings) {
    const auto json = json_of(setting, text);
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (i > 0) lines += ",";
      if (!json.contains(names[i])) continue;
      const auto& value = json.at(names[i]);
      lines += value.is_string() ? "\"" + value.get<std::string>() + "\"" : value.dump();
    }
    lines += "\n";
  }
  return lines;
}

std::string comparison_json(const Comparison& comparison, const ComparisonText& text) {
  nlohmann::ordered_json json;
  json["model"] = text.model;
  json["settings"] = nlohmann::ordered_json::array();
  for (const Setting& setting : comparison.settings) json["settings"].push_back(json_of(setting, text));
  json["best"] = best_first(comparison, text.objective);
  json["pareto_front"] = pareto_front(comparison);
  json["nearest_misses"] = nearest_misses(comparison);
  return json.dump(2) + "\n";
}

std::string comparison_page(const Comparison& comparison, const ComparisonText& text) {
  const auto best = best_first(comparison, text.objective);
  std::string page =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Settings compared</title>"
      "<meta name=\"viewport\" content=\"width=device-width\"><style>" +
      std::string(kPageStyle) + "</style></head><body>\n<h1>Settings compared</h1>\n<p>" +
      html_text(text.model) + "</p>\n<p>" + format_count(comparison.settings.size(), "setting") + ", " +
      std::to_string(best.size()) + " simulated.</p>\n";
  if (const std::string failed = failures_text(comparison); !failed.empty())
    page += "<p>" + html_text(failed) + "</p>\n";
  page += plot(comparison);
  page += "<p class=\"key\">";
  for (int stage = 0; stage <= 3; ++stage) {
    page += format_text(
        "<span><svg style=\"width:.8em;height:.8em\" viewBox=\"0 0 10 10\"><circle class=\"stage%d\" "
        "cx=\"5\" "
        "cy=\"5\" r=\"5\"/></svg> stage %d</span>",
        stage, stage);
  }
  page += "The line joins the settings that no other one beats in both.</p>\n<h2>Best</h2>\n";
  page += table(comparison, best, 20, text);
  page += "<h2>Neither slower nor larger than any other</h2>\n" +
          table(comparison, pareto_front(comparison), best.size(), text);
  const auto misses = nearest_misses(comparison);
  if (!misses.empty()) page += "<h2>Just do not fit</h2>\n<ul>\n";
  for (std::size_t i = 0; i < std::min<std::size_t>(10, misses.size()); ++i) {
    const Setting& setting = comparison.settings[misses[i]];
    page += "<li>" + html_text(setting_text(setting)) + ": " + format_bytes(setting.missing_bytes()) +
            " too much</li>\n";
  }
  if (!misses.empty()) page += "</ul>\n";
  return page + "</body></html>\n";
}

}  // namespace forebay
