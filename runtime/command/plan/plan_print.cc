#include "runtime/command/plan/plan_print.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "forebay/units.h"
#include "runtime/command/plan/activation_print.h"
#include "runtime/command/text_table.h"

namespace forebay {
namespace {

using Json = nlohmann::ordered_json;

std::string padded_left(const std::string& text, std::size_t width) {
  return std::string(width > text.size() ? width - text.size() : 0, ' ') + text;
}
std::string padded_right(const std::string& text, std::size_t width) {
  return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
}

// One plan is printed to the byte; several side by side only as far as a person compares them.
std::string cell(std::uint64_t bytes, bool alone) {
  return alone ? grouped(bytes) + " B" + padded_left(format_bytes(bytes), 14) : format_bytes(bytes);
}

// A pool that the convention leaves out or that needs the shape, or a sum without it.
std::string unknown(const PlanReport& report, std::optional<std::uint64_t> PlanFigures::*member) {
  const bool of_sum = member == &PlanFigures::total ||
                      (member == &PlanFigures::reserved && report.preset == Preset::kForebay);
  return of_sum ? ">= " + format_bytes(report.bytes.known()) : "not counted";
}

class Table {
 public:
  explicit Table(const std::vector<PlanReport>& reports) : reports_(reports) {}

  template <typename Cell>
  void row(const std::string& label, Cell cell_of) {
    constexpr std::size_t kLabelWidth = 20;
    const std::size_t width = reports_.size() == 1 ? 40 : 18;
    std::string line = padded_right(label, kLabelWidth + (label.front() == '\n' ? 1 : 0));
    for (const PlanReport& report : reports_) line += padded_left(cell_of(report), width);
    line.resize(line.find_last_not_of(' ') + 1);
    text_ += line + "\n";
  }
  void bytes(const std::string& label, std::uint64_t PlanFigures::*member) {
    row(label, [&](const PlanReport& report) { return cell(report.bytes.*member, alone()); });
  }
  void bytes(const std::string& label, std::optional<std::uint64_t> PlanFigures::*member) {
    row(label, [&](const PlanReport& report) {
      const std::optional<std::uint64_t>& value = report.bytes.*member;
      return value ? cell(*value, alone()) : unknown(report, member);
    });
  }
  bool alone() const { return reports_.size() == 1; }
  std::string take() { return std::move(text_); }

 private:
  const std::vector<PlanReport>& reports_;
  std::string text_;
};

LimitVerdict judge_memory(const PlanReport& report, const PlanBudget& budget) {
  const std::string where = budget.room_bytes == 0
                                ? ""
                                : format_bytes(budget.memory_bytes + budget.room_bytes) + " less " +
                                      format_bytes(budget.room_bytes) + " for the driver, --device-room";
  return {.name = "--memory",
          .where = where,
          .limit_bytes = budget.memory_bytes,
          .needed_bytes = report.bytes.needed()};
}

std::vector<LimitVerdict> judge(const PlanReport& report, const PlanBudget& budget) {
  std::vector<LimitVerdict> verdicts;
  if (budget.memory_bytes != 0) verdicts.push_back(judge_memory(report, budget));
  if (budget.host_ranks == 0) return verdicts;
  for (const LimitVerdict& verdict : judge_host(report, budget.host_limits, budget.host_ranks)) {
    verdicts.push_back(verdict);
  }
  return verdicts;
}

std::string stage_label(const PlanReport& report) {
  return "stage " + std::to_string(report.options.stage);
}

// The offloaded bytes, and the units that stay on the device.
void add_below_device(Table& table, const std::vector<PlanReport>& reports) {
  const bool in_files = reports.front().options.tier == Tier::kFile;
  const bool has_staging = std::any_of(reports.begin(), reports.end(),
                                       [](const PlanReport& report) { return report.host.staging > 0; });
  const auto figure = [&](const char* label, auto member) {
    table.row(label, [&, member](const PlanReport& report) { return cell(member(report), table.alone()); });
  };
  table.row("units on the device", [](const PlanReport& report) {
    if (!report.device_units) return std::string("not counted");
    return std::to_string(*report.device_units) + " of " + std::to_string(report.units);
  });
  table.row("\npinned, on the host", [](const PlanReport&) { return std::string(); });
  figure("optimizer", [](const PlanReport& report) { return report.host.optimizer; });
  figure("gradients", [](const PlanReport& report) { return report.host.gradients; });
  figure("parameters", [](const PlanReport& report) { return report.host.parameters; });
  if (has_staging) figure("staging", [](const PlanReport& report) { return report.host.staging; });
  if (reports.front().options.save_async)
    figure("saving", [](const PlanReport& report) { return report.host.saving; });
  table.bytes("= pinned", &PlanFigures::pinned);
  if (!in_files) return;
  table.row("\nin files", [](const PlanReport&) { return std::string(); });
  figure("optimizer", [](const PlanReport& report) { return report.file.optimizer; });
  figure("parameters", [](const PlanReport& report) { return report.file.parameters; });
  figure("= files", [](const PlanReport& report) { return report.file.total(); });
  figure("read per step", [](const PlanReport& report) { return report.file.read_per_step; });
  figure("written per step", [](const PlanReport& report) { return report.file.written_per_step; });
}

// "  free memory (MemAvailable) 23.13 GiB (/proc/meminfo): holds stage 1 (7.35 GiB); DOES NOT HOLD stage 0
// (...)".
std::string verdict_line(const std::vector<PlanReport>& reports, const std::vector<LimitVerdict>& verdicts) {
  const LimitVerdict& first = verdicts.front();
  std::string line = "  " + first.name + " " + format_bytes(first.limit_bytes);
  if (!first.where.empty()) line += " (" + first.where + ")";
  line += ":";
  for (std::size_t i = 0; i < reports.size(); ++i) {
    line += std::string(i == 0 ? " " : "; ") + (verdicts[i].fits() ? "holds " : "DOES NOT HOLD ") +
            stage_label(reports[i]) + " (" + (reports[i].bytes.total ? "" : "at least ") +
            format_bytes(verdicts[i].needed_bytes) + ")";
  }
  return line + "\n";
}

std::string judgement(const std::vector<PlanReport>& reports, const PlanBudget& budget) {
  std::vector<std::vector<LimitVerdict>> by_limit;  // One row per limit, one column per report.
  for (const PlanReport& report : reports) {
    const std::vector<LimitVerdict> verdicts = judge(report, budget);
    by_limit.resize(verdicts.size());
    for (std::size_t i = 0; i < verdicts.size(); ++i) by_limit[i].push_back(verdicts[i]);
  }
  if (by_limit.empty()) return "";

  std::string text = "\nheld against";
  if (budget.host_ranks != 0) {
    text += ", if " + std::to_string(budget.host_ranks) + (budget.host_ranks == 1 ? " rank" : " ranks") +
            " ran on this host, without a GPU (--host-ranks)";
  }
  text += ":\n";
  for (const std::vector<LimitVerdict>& verdicts : by_limit) text += verdict_line(reports, verdicts);
  if (budget.memory_bytes != 0 && reports.front().exact)
    text += "  activations among them are an estimate; forebay-gpt goes by its own exact plan\n";
  for (std::size_t i = 0; i < reports.size(); ++i) {
    if (!plan_fits(reports[i], budget))
      text += "  " + stage_label(reports[i]) + ": " + shrink_advice(reports[i], budget.memory_bytes) + "\n";
  }
  const bool host_fails = std::any_of(
      by_limit.begin() + (budget.memory_bytes != 0 ? 1 : 0), by_limit.end(), [](const auto& verdicts) {
        return std::any_of(verdicts.begin(), verdicts.end(), [](const LimitVerdict& v) { return !v.fits(); });
      });
  if (host_fails && budget.host_ranks > 1) text += "  or keep fewer of the ranks on this host\n";
  return text;
}

// "4 ranks", "8 ranks = 2 data-parallel x 2 tensor-parallel x 2 pipeline stages".
std::string ranks_text(const PlanReport& report) {
  const int all = world_size(report);
  std::string text = std::to_string(all) + (all == 1 ? " rank" : " ranks");
  if (all == report.options.ranks) return text;
  text += " = " + std::to_string(report.options.ranks) + " data-parallel";
  if (report.part.tensor_parallel > 1)
    text += " x " + std::to_string(report.part.tensor_parallel) + " tensor-parallel";
  if (report.part.pipeline_parallel > 1)
    text += " x " + std::to_string(report.part.pipeline_parallel) + " pipeline stages";
  return text;
}

// "fits: stage 2 into 80.00 GiB with 12.00 GiB to spare": the first line of a plan with a budget.
std::string verdict_text(const std::vector<PlanReport>& reports, const PlanBudget& budget) {
  if (budget.memory_bytes == 0) return "";
  const PlanReport* best = nullptr;  // The lowest stage that fits: it sends least.
  const PlanReport* nearest = &reports.front();
  for (const PlanReport& report : reports) {
    if (best == nullptr && plan_fits(report, budget)) best = &report;
    if (report.bytes.needed() < nearest->bytes.needed()) nearest = &report;
  }
  const std::string memory = format_bytes(budget.memory_bytes);
  if (best != nullptr) {
    return "fits: " + stage_label(*best) + " on " + ranks_text(*best) + " of " + memory + " with " +
           format_bytes(budget.memory_bytes - best->bytes.needed()) + " to spare" +
           (best->bytes.total ? "" : ", less what is not counted") + "\n";
  }
  if (nearest->bytes.needed() <= budget.memory_bytes)
    return "does not fit into this host; see the end for the limits\n";
  return "DOES NOT FIT: " + stage_label(*nearest) + " on " + ranks_text(*nearest) + " of " + memory +
         " lacks " + (nearest->bytes.total ? "" : "at least ") +
         format_bytes(nearest->bytes.needed() - budget.memory_bytes) + "; " +
         shrink_advice(*nearest, budget.memory_bytes) + "\n";
}

std::string psi_text(const PlanReport& report) {
  if (world_size(report) == report.options.ranks) return "\nPsi: parameters; N: ranks";
  return "\nPsi: parameters that a rank has some or all of, " + grouped(report.part_parameters) +
         " here; N: data-parallel ranks, " + std::to_string(report.options.ranks);
}

// A line for each pipeline stage; the columns at the end are ZeRO stages.
std::string pipeline_text(const std::vector<PlanReport>& reports,
                          const std::vector<ActivationReport>& activations) {
  const PlanReport& first = reports.front();
  if (first.pipeline.empty()) return "";
  std::vector<TableRow> rows = {{"pipeline stage", "layers", "parameters", "micro-batches", "activations"}};
  for (const PlanReport& report : reports) rows[0].push_back("ZeRO " + stage_label(report));
  for (std::size_t i = 0; i < first.pipeline.size(); ++i) {
    const StageFigures& stage = first.pipeline[i];
    TableRow row = {std::to_string(i), std::to_string(stage.layers), grouped(stage.parameters),
                    std::to_string(activations[i].in_flight),
                    format_bytes(stage.bytes.activations.value_or(0))};
    for (const PlanReport& report : reports) row.push_back(format_bytes(report.pipeline[i].bytes.needed()));
    rows.push_back(std::move(row));
  }
  return "\n" + table_text(rows) + "figures above are those of pipeline stage " +
         std::to_string(first.part.pipeline_stage) +
         ", which needs most; micro-batches: those in flight at the same time\n";
}

Json pipeline_json(const PlanReport& report, const std::vector<ActivationReport>& activations) {
  Json stages = Json::array();
  for (std::size_t i = 0; i < report.pipeline.size(); ++i) {
    const StageFigures& stage = report.pipeline[i];
    stages.push_back({{"stage", i},
                      {"layers", stage.layers},
                      {"parameters", stage.parameters},
                      {"micro_batches", activations[i].in_flight},
                      {"model_states", stage.bytes.model_states()},
                      {"gathered", stage.bytes.gathered.value_or(0)},
                      {"buckets", stage.bytes.buckets.value_or(0)},
                      {"activations", stage.bytes.activations.value_or(0)},
                      {"needed", stage.bytes.needed()},
                      {"sent_per_step", stage.wire.sent}});
  }
  return stages;
}

Json number_or_null(const std::optional<std::uint64_t>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json verdict_json(const LimitVerdict& verdict) {
  Json object{{"name", verdict.name}};
  if (!verdict.where.empty()) object["where"] = verdict.where;
  object["limit_bytes"] = verdict.limit_bytes;
  object["needed_bytes"] = verdict.needed_bytes;
  object["fits"] = verdict.fits();
  return object;
}

}  // namespace

bool plan_fits(const PlanReport& report, const PlanBudget& budget) {
  const std::vector<LimitVerdict> verdicts = judge(report, budget);
  return std::all_of(verdicts.begin(), verdicts.end(), [](const LimitVerdict& one) { return one.fits(); });
}

std::string plan_text(const std::vector<PlanReport>& reports, const std::vector<std::string>& left_out,
                      const std::string& model, const PlanBudget& budget,
                      const std::vector<ActivationReport>& activations) {
  const PlanReport& first = reports.front();
  const PlanOptions& options = first.options;
  std::string text = verdict_text(reports, budget);
  text += "plan (" + std::string(preset_name(first.preset)) + "): " + grouped(first.parameters) +
          " parameters, " + data_type_name(options.dtype) + ", " + ranks_text(first) + ", " +
          std::to_string(options.micro_steps) + (options.micro_steps == 1 ? " micro-step" : " micro-steps") +
          " a step\n";
  if (!model.empty()) text += model + "\n";

  Table table(reports);
  table.row("\nbytes per rank",
            [](const PlanReport& report) { return "stage " + std::to_string(report.options.stage) + " "; });
  table.bytes("parameters", &PlanFigures::parameters);
  table.bytes("gradients", &PlanFigures::gradients);
  table.bytes("optimizer", &PlanFigures::optimizer);
  table.row("= model states",
            [&](const PlanReport& report) { return cell(report.bytes.model_states(), table.alone()); });
  table.row("  formula", [](const PlanReport& report) { return report.states_formula; });
  table.bytes("gathered", &PlanFigures::gathered);
  table.bytes("buckets", &PlanFigures::buckets);
  table.bytes("activations", &PlanFigures::activations);
  table.bytes("= total", &PlanFigures::total);
  table.bytes("reserved", &PlanFigures::reserved);
  if (options.offload != Offload::kNone) {
    add_below_device(table, reports);
  } else if (options.save_async) {
    table.bytes("\npinned, for saving", &PlanFigures::pinned);
  }
  table.row("\nwire per step", [](const PlanReport&) { return std::string(); });
  table.row("sent", [&](const PlanReport& report) { return cell(report.wire.sent, table.alone()); });
  table.row("received", [&](const PlanReport& report) { return cell(report.wire.received, table.alone()); });
  if (std::any_of(reports.begin(), reports.end(),
                  [](const PlanReport& r) { return r.evaluation.sent > 0; })) {
    table.row("sent, evaluation",
              [&](const PlanReport& report) { return cell(report.evaluation.sent, table.alone()); });
  }
  text += table.take();
  if (!first.bytes.total) text += "\n>=: without the parts that are not counted";

  text += psi_text(first) +
          (options.in_groups() ? "; G: ranks of a group, " + std::to_string(options.group) : "") + "\n";
  for (const PlanReport& report : reports) {
    if (!report.below_device_formula.empty())
      text += stage_label(report) + " below the device: " + report.below_device_formula + "\n";
  }
  for (const PlanReport& report : reports) {
    text += "stage " + std::to_string(report.options.stage) + " wire: " + report.wire_formula + "\n";
  }
  std::vector<std::string> said;
  for (const PlanReport& report : reports) {
    for (const std::string& note : report.notes) {
      if (std::find(said.begin(), said.end(), note) != said.end()) continue;
      said.push_back(note);
      text += "note: " + note + "\n";
    }
  }
  for (const std::string& reason : left_out) text += "left out: " + reason + "\n";
  if (!activations.empty())
    text += activation_text(activations[static_cast<std::size_t>(first.part.pipeline_stage)]);
  text += pipeline_text(reports, activations);
  text += judgement(reports, budget);
  return text;
}

std::string plan_json(const PlanReport& report, const PlanBudget& budget,
                      const std::vector<ActivationReport>& activations) {
  const PlanFigures& bytes = report.bytes;
  const PlanOptions& options = report.options;
  Json json{{"preset", preset_name(report.preset)},
            {"exact", report.exact},
            {"parameters", report.parameters},
            {"ranks", world_size(report)},
            {"data_parallel", options.ranks},
            {"tensor_parallel", report.part.tensor_parallel},
            {"pipeline_parallel", report.part.pipeline_parallel},
            {"pipeline_stage", report.part.pipeline_stage},
            {"part_parameters", report.part_parameters},
            {"units_on_device", report.device_units ? Json(*report.device_units) : Json(nullptr)},
            {"chunk_bytes", options.chunk_bytes},
            {"bytes_per_rank",
             {{"parameters", bytes.parameters},
              {"gradients", bytes.gradients},
              {"optimizer", bytes.optimizer},
              {"model_states", bytes.model_states()},
              {"gathered", number_or_null(bytes.gathered)},
              {"buckets", number_or_null(bytes.buckets)},
              {"activations", number_or_null(bytes.activations)},
              {"reserved", number_or_null(bytes.reserved)},
              {"pinned", number_or_null(bytes.pinned)},
              {"total", number_or_null(bytes.total)},
              {"known", bytes.known()}}},
            {"host_bytes_per_rank",
             {{"optimizer", report.host.optimizer},
              {"gradients", report.host.gradients},
              {"parameters", report.host.parameters},
              {"staging", report.host.staging},
              {"total", report.host.total()}}},
            {"file_bytes_per_rank",
             {{"optimizer", report.file.optimizer},
              {"parameters", report.file.parameters},
              {"total", report.file.total()},
              {"read_per_step", report.file.read_per_step},
              {"written_per_step", report.file.written_per_step}}},
            {"wire_bytes_per_step", {{"sent", report.wire.sent}, {"received", report.wire.received}}},
            {"wire_bytes_per_evaluation",
             {{"sent", report.evaluation.sent}, {"received", report.evaluation.received}}},
            {"formula",
             {{"model_states", report.states_formula},
              {"below_device", report.below_device_formula},
              {"wire", report.wire_formula}}},
            {"notes", report.notes}};
  for (const OptionRow& row : sharding_option_table()) {
    if (row.report_key != nullptr) json[row.report_key] = Json::parse(option_json(options, row));
  }
  if (options.save_async) json["host_bytes_per_rank"]["saving"] = report.host.saving;
  if (options.optimizer != Optimizer::kAdamW) json["optimizer"] = optimizer_name(options.optimizer);
  if (options.moments != MomentFormat::kFloat32) json["moments"] = moment_format_name(options.moments);
  if (!options.master_weights) json["master_weights"] = "off";
  if (options.ema > 0) json["ema"] = options.ema;
  if (!activations.empty())
    json["activations"] = activation_json(activations[static_cast<std::size_t>(report.part.pipeline_stage)]);
  if (!report.pipeline.empty()) json["pipeline"] = pipeline_json(report, activations);
  if (budget.memory_bytes != 0) {
    json["memory"] = verdict_json(judge_memory(report, budget));
  }
  if (budget.host_ranks != 0) {
    json["host"] = {{"ranks", budget.host_ranks}, {"limits", Json::array()}};
    for (const LimitVerdict& verdict : judge_host(report, budget.host_limits, budget.host_ranks)) {
      json["host"]["limits"].push_back(verdict_json(verdict));
    }
  }
  json["fits"] = plan_fits(report, budget);
  if (!plan_fits(report, budget)) json["advice"] = shrink_advice(report, budget.memory_bytes);
  return json.dump(2) + "\n";
}

}  // namespace forebay
