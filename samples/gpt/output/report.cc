#include "output/report.h"

#include <cmath>
#include <nlohmann/json.hpp>

namespace forebay::gpt {
namespace {

using Json = nlohmann::ordered_json;

template <typename Figure>
Json to_json(const Figure& figure) {
  return figure;
}
Json to_json(const PoolBytes& bytes) {
  return {{"parameters", bytes.parameters}, {"gradients", bytes.gradients},
          {"optimizer", bytes.optimizer},   {"gathered", bytes.gathered},
          {"buckets", bytes.buckets},       {"activations", bytes.activations}};
}

Json rank_json(const RankReport& rank) {
  Json json;
#define FOREBAY_FIGURE_JSON(Type, name) json[#name] = to_json(rank.name);
  FOREBAY_RANK_FIGURES(FOREBAY_FIGURE_JSON)
#undef FOREBAY_FIGURE_JSON
  return json;
}

Json traffic_json(const std::vector<OperationReport>& operations) {
  Json all = Json::array();
  for (const OperationReport& one : operations) {
    all.push_back({{"operation", one.operation},
                   {"count", one.count},
                   {"sent_bytes", one.sent_bytes},
                   {"received_bytes", one.received_bytes}});
  }
  return all;
}

// JSON has no infinities and no NaN: null.
Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json();
}

}  // namespace

std::optional<std::uint64_t> first_step_of_lost_loss(const TrainingReport& report) {
  std::size_t finite = report.loss.size();
  while (finite > 0 && !std::isfinite(report.loss[finite - 1])) --finite;
  if (finite == report.loss.size()) return std::nullopt;
  return report.first_step + finite + 1;  // Steps count from 1.
}

std::string report_json(const TrainingReport& report) {
  Json norms = Json::array();
  for (const std::optional<double>& norm : report.grad_norm) norms.push_back(norm ? number(*norm) : Json());
  Json losses = Json::array();
  for (const double loss : report.loss) losses.push_back(number(loss));
  Json evaluations = Json::array();
  for (const Evaluated& one : report.evaluations)
    evaluations.push_back({{"step", one.step}, {"loss", number(one.loss)}});
  Json ranks = Json::array();
  for (const RankReport& rank : report.ranks) ranks.push_back(rank_json(rank));
  for (std::size_t rank = 0; rank < report.traffic.size(); ++rank)
    ranks[rank]["traffic"] = traffic_json(report.traffic[rank]);
  Json training = Json::object();
  for (const auto& [name, value] : report.training) training[name] = value;
  Json json = {{"world_size", report.world_size},           {"training", training},
               {"tensor_parallel", report.tensor_parallel}, {"pipeline_parallel", report.pipeline_parallel},
               {"data_parallel", report.data_parallel},     {"recompute", report.recompute},
               {"activations", report.activations},         {"dropout", report.dropout}};
  for (const OptionRow& row : sharding_option_table()) {
    if (row.report_key != nullptr) json[row.report_key] = Json::parse(option_json(report.sharding, row));
  }
  if (report.sharding.optimizer != Optimizer::kAdamW)
    json["optimizer"] = optimizer_name(report.sharding.optimizer);
  if (report.sharding.moments != MomentFormat::kFloat32)
    json["moments"] = moment_format_name(report.sharding.moments);
  if (!report.sharding.master_weights) json["master_weights"] = "off";
  if (report.sharding.ema > 0) json["ema"] = report.sharding.ema;
  json.update({{"offloaded_parameters", report.offloaded_parameters},
               {"store", report.store},
               {"parameters", report.parameters},
               {"first_step", report.first_step},
               {"steps", report.steps},
               {"loss", losses},
               {"grad_norm", norms},
               {"evaluations", evaluations},
               {"generated", report.generated},
               {"digest", report.digest},
               {"tokens_per_second", report.tokens_per_second},
               {"compute_threads", report.compute_threads},
               {"device", report.device},
               {"communicator", report.communicator},
               {"matmul", report.matmul},
               {"interrupted", report.interrupted},
               {"ranks", ranks}});
  // Paths may hold any bytes; JSON may not.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string flight_json(const Status& cause, const std::vector<OperationRecord>& operations) {
  constexpr const char* kStates[] = {"queued", "running", "done", "failed"};
  const auto ms = [](std::chrono::nanoseconds time) { return static_cast<double>(time.count()) / 1e6; };
  Json all = Json::array();
  for (const OperationRecord& one : operations) {
    all.push_back({{"operation", one.what},
                   {"state", kStates[static_cast<int>(one.state)]},
                   {"queued_ms", ms(one.queued)},
                   {"begun_ms", ms(one.begun)},
                   {"ended_ms", ms(one.ended)}});
  }
  const Json json = {{"cause", cause.to_string()}, {"last_operations", all}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace forebay::gpt
