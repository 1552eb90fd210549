#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "forebay/error.h"
#include "trainer.h"

namespace forebay::gpt {
namespace {

using Json = nlohmann::ordered_json;

Json pools(const PoolBytes& bytes) {
  return {{"parameters", bytes.parameters}, {"gradients", bytes.gradients},
          {"optimizer", bytes.optimizer},   {"gathered", bytes.gathered},
          {"buckets", bytes.buckets},       {"activations", bytes.activations}};
}

Json rank_json(const RankReport& rank) {
  return {{"peak_bytes", pools(rank.peak_bytes)},
          {"planned_bytes", pools(rank.planned_bytes)},
          {"reserved_bytes", rank.reserved_bytes},
          {"planned_reserved_bytes", rank.planned_reserved_bytes},
          {"sent_bytes_per_step", rank.sent_bytes_per_step},
          {"received_bytes_per_step", rank.received_bytes_per_step},
          {"planned_sent_bytes_per_step", rank.planned_sent_bytes_per_step},
          {"planned_received_bytes_per_step", rank.planned_received_bytes_per_step},
          {"step_ms", rank.step_ms}};
}

}  // namespace

std::string report_json(const TrainingReport& report) {
  Json norms = Json::array();
  for (const std::optional<double>& norm : report.grad_norm) norms.push_back(norm ? Json(*norm) : Json());
  Json ranks = Json::array();
  for (const RankReport& rank : report.ranks) ranks.push_back(rank_json(rank));
  const Json json = {{"world_size", report.world_size},
                     {"stage", report.stage},
                     {"dtype", data_type_name(report.dtype)},
                     {"parameters", report.parameters},
                     {"first_step", report.first_step},
                     {"steps", report.steps},
                     {"loss", report.loss},
                     {"grad_norm", norms},
                     {"digest", report.digest},
                     {"tokens_per_second", report.tokens_per_second},
                     {"compute_threads", report.compute_threads},
                     {"communicator", report.communicator},
                     {"matmul", report.matmul},
                     {"interrupted", report.interrupted},
                     {"ranks", ranks}};
  return json.dump(2) + "\n";
}

void write_file(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".tmp";
  std::ofstream stream(temporary, std::ios::binary | std::ios::trunc);
  stream << text;
  stream.close();
  if (!stream || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const std::string cause = std::strerror(errno);
    std::remove(temporary.c_str());
    throw Error(StatusCode::kIoError, "cannot write " + path + ": " + cause +
                                          "; give a path in a directory that exists and may be written");
  }
}

}  // namespace forebay::gpt
