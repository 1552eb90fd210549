#include "runtime/command/machine/machine_description.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

#include "forebay/regular_file.h"
#include "forebay/text.h"

namespace forebay {
namespace {

using Json = nlohmann::ordered_json;

// forebay-gpt trains on bytes.
constexpr std::uint64_t kVocabulary = 256;
// A report is some KiB for each step. Larger: a wrong file takes more memory before it is refused.
constexpr std::uint64_t kReportBytesMost = std::uint64_t{256} << 20;
// Simulations of each run until its time is met. Interpolation couples the points only weakly.
constexpr int kRounds = 12;
// Below the smallest measured product the curve is flat down to this size.
constexpr double kSmallestProduct = 8;

Status refuse_run(const std::string& path, const std::string& problem) {
  return Status(StatusCode::kInvalidArgument, path + ": " + problem);
}

// Reads the shape and the options that forebay-gpt reports.
class ReportReader {
 public:
  ReportReader(const std::string& path, const Json& report) : path_(path), report_(report) {}

  std::uint64_t count(const char* section, const char* name) {
    const Json* const value = find(section, name);
    std::uint64_t number = 0;
    if (value != nullptr && value->is_string()) {
      const auto& text = value->get_ref<const std::string&>();
      std::from_chars(text.data(), text.data() + text.size(), number);
    } else if (value != nullptr && value->is_number_unsigned()) {
      number = value->get<std::uint64_t>();
    }
    if (number == 0) fail(std::string(name) + " is not a positive number; is it a report of forebay-gpt?");
    return number;
  }
  std::string text(const char* name) {
    const Json* const value = find(nullptr, name);
    if (value != nullptr && value->is_string()) return value->get<std::string>();
    fail(std::string(name) + " is missing; is it a report of forebay-gpt?");
    return {};
  }
  double step_seconds() {
    const Json::json_pointer place("/ranks/0/step_ms");
    const bool there = report_.is_object() && report_.contains(place) && report_.at(place).is_number();
    const double ms = there ? report_.at(place).get<double>() : 0;
    if (!(ms > 0)) fail("ranks[0].step_ms is not a positive number; is it a report of forebay-gpt?");
    return ms / 1e3;
  }
  void fail(const std::string& problem) {
    if (status_.ok()) status_ = refuse_run(path_, problem);
  }
  const Status& status() const { return status_; }

 private:
  const Json* find(const char* section, const char* name) const {
    const Json* object = &report_;
    if (section != nullptr) {
      if (!object->is_object() || !object->contains(section)) return nullptr;
      object = &object->at(section);
    }
    return object->is_object() && object->contains(name) ? &object->at(name) : nullptr;
  }

  const std::string& path_;
  const Json& report_;
  Status status_;
};

Json figure(double value, const std::string& source) {
  return {{"value", value}, {"source", source}};
}

// The size of the product that takes most of the time: that of the feed-forward network.
double product_size(const SimulationRequest& request) {
  const double tokens = static_cast<double>(request.batch) * static_cast<double>(request.shape.positions);
  const auto hidden = static_cast<double>(request.shape.hidden);
  return std::cbrt(tokens * 4 * hidden * hidden);
}

// Brings the points of the curve to the times of the runs.
Status calibrate(ClusterDescription& cluster, const std::vector<MeasuredRun>& runs) {
  auto& curve = cluster.device.matrix_efficiency;
  for (int round = 0; round < kRounds; ++round) {
    for (const MeasuredRun& run : runs) {
      const double size = product_size(run.request);
      SimulationRequest request = run.request;
      request.cluster = cluster;
      const Result<SimulationResult> simulated = simulate(request);
      if (!simulated.ok()) return simulated.status().with_context(run.name);
      const double factor = simulated.value().step_seconds / run.step_seconds;
      for (auto& [at, part] : curve) {
        if (at == size || (at == kSmallestProduct && size == curve[1].first)) part *= factor;
      }
    }
  }
  double most = 0;
  for (const auto& [at, part] : curve) most = std::max(most, part);
  for (auto& [type, flops] : cluster.device.flops) flops *= most;
  for (auto& [at, part] : curve) part /= most;
  return {};
}

Json description_json(const ClusterDescription& cluster, const MachineFigures& figures,
                      const std::string& runs) {
  const std::string measured =
      "measured by forebay bench-tiers, " + std::to_string(figures.rank.ranks) + " ranks at once";
  const std::string calibrated = "from runs of one rank: " + runs;
  const std::string counted = "counted in matrix_efficiency";
  const DeviceDescription& device = cluster.device;
  Json points = Json::array();
  for (const auto& [size, part] : device.matrix_efficiency) points.push_back({size, part});
  const auto& [type, flops] = *device.flops.begin();
  Json links = Json::array();
  for (const LinkDescription& link : cluster.links) {
    links.push_back({{"name", link.name}});
    if (link.ranks != 0) links.back()["ranks"] = link.ranks;
    links.back()["bytes_per_second"] = figure(link.bytes_per_second, measured + ": collectives");
    links.back()["ranks_per_link"] = link.ranks_per_link;
    links.back()["latency_seconds"] = figure(link.latency_seconds, measured + ": collectives");
    links.back()["message_seconds"] = figure(0, "counted in latency_seconds");
    links.back()["processor_seconds_per_byte"] =
        figure(link.processor_seconds_per_byte, measured + ": collectives");
  }
  return {
      {"name", cluster.name},
      {"device",
       {{"name", device.name},
        {"memory_bytes", figure(static_cast<double>(device.memory_bytes), "a rank's part of the host's")},
        {"memory_bytes_per_second", figure(device.memory_bytes_per_second, measured + ": AdamW, one thread")},
        {"memory_efficiency", figure(1, "counted in memory_bytes_per_second")},
        {"flops", {{data_type_name(type), figure(flops, calibrated)}}},
        {"matrix_efficiency", {{"source", calibrated}, {"points", points}}},
        {"kernel_seconds", figure(0, counted)},
        {"queue_seconds", figure(0, counted)}}},
      {"host_ranks", cluster.host_ranks},
      {"host_memory_bytes", figure(static_cast<double>(cluster.host_memory_bytes), "/proc/meminfo")},
      {"host_bytes_per_second", figure(cluster.host_bytes_per_second, measured + ": AdamW")},
      {"bus_bytes_per_second", figure(cluster.bus_bytes_per_second, measured + ": copies")},
      {"ranks_per_bus", cluster.ranks_per_bus},
      {"drive_read_bytes_per_second", figure(cluster.drive_read_bytes_per_second, measured)},
      {"drive_write_bytes_per_second", figure(cluster.drive_write_bytes_per_second, measured)},
      {"control_seconds", figure(cluster.control_seconds, measured + ": barriers")},
      {"shared_processors", cluster.shared_processors},
      {"links", links}};
}

}  // namespace

Result<MeasuredRun> read_measured_run(const std::string& path) {
  const Result<std::string> text = internal::read_regular_file(path, kReportBytesMost);
  if (!text.ok()) {
    return Status(text.status().code(), "cannot read the report ", shown_path(path), ": ",
                  text.status().message(), "; use a report of forebay-gpt --report");
  }
  const Json report = Json::parse(text.value(), nullptr, /*allow_exceptions=*/false);
  if (report.is_discarded()) return refuse_run(path, "is not JSON; use a report of forebay-gpt --report");
  ReportReader reader(path, report);
  MeasuredRun run{.name = path};
  run.request.shape.layers = reader.count("training", "layers");
  run.request.shape.hidden = reader.count("training", "hidden");
  run.request.shape.heads = reader.count("training", "heads");
  run.request.shape.positions = reader.count("training", "sequence");
  run.request.shape.vocabulary = kVocabulary;
  run.request.batch = reader.count("training", "batch");
  run.request.options.micro_steps = static_cast<int>(reader.count(nullptr, "micro_steps"));
  run.request.options.bucket_bytes = reader.count(nullptr, "bucket_bytes");
  run.step_seconds = reader.step_seconds();
  const std::string dtype = reader.text("dtype");
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
    if (dtype == data_type_name(type)) run.request.options.dtype = type;
  }
  run.request.options.stage = 0;
  if (reader.count(nullptr, "world_size") != 1) reader.fail("has several ranks; use a run with --ranks 1");
  if (reader.text("offload") != "none" || reader.text("recompute") != "none")
    reader.fail("offloads or recomputes; use a run that does neither");
  FOREBAY_RETURN_IF_ERROR(reader.status());
  return run;
}

Result<std::string> describe_machine(const MachineFigures& figures, const std::vector<MeasuredRun>& given) {
  std::vector<MeasuredRun> runs = given;
  std::sort(runs.begin(), runs.end(), [](const MeasuredRun& a, const MeasuredRun& b) {
    return product_size(a.request) < product_size(b.request);
  });
  const RankMeasurement& rank = figures.rank;
  const auto host_ranks = static_cast<std::uint64_t>(rank.host_ranks);
  // A processor of its own for the work beside the kernels: then that takes nothing from them.
  const bool shared = 2 * rank.host_ranks > figures.processors;
  const double load = std::max(1.0, static_cast<double>(rank.host_ranks) / figures.processors);

  ClusterDescription cluster{.name = "this",
                             .host_ranks = rank.host_ranks,
                             .host_memory_bytes = figures.host_memory_bytes,
                             .host_bytes_per_second = rank.kernel_bytes_per_second * rank.host_ranks,
                             .bus_bytes_per_second = rank.copy_bytes_per_second,
                             .drive_read_bytes_per_second = figures.drive_read_bytes_per_second,
                             .drive_write_bytes_per_second = figures.drive_write_bytes_per_second,
                             .control_seconds = rank.control_seconds,
                             .shared_processors = shared};
  const auto add_link = [&](const std::string& name, int of, const LinkMeasurement& link) {
    cluster.links.push_back(
        {.name = name,
         .ranks = of,
         .bytes_per_second = rank.ranks > 1 ? link.bytes_per_second : 1e9,
         .latency_seconds = link.latency_seconds,
         .processor_seconds_per_byte = shared ? link.processor_seconds_per_byte * load : 0});
  };
  const bool several_hosts = rank.host_ranks < rank.ranks;
  if (rank.host_ranks > 1 || !several_hosts)
    add_link(figures.link == LinkKind::kShm ? "shm" : "tcp", several_hosts ? rank.host_ranks : 0,
             rank.within_host);
  if (several_hosts) add_link("network", 0, rank.between_hosts);
  DeviceDescription& device = cluster.device;
  device.name = "host";
  device.memory_bytes = figures.host_memory_bytes / host_ranks;
  device.memory_bytes_per_second = rank.kernel_bytes_per_second;
  device.memory_efficiency = 1;
  std::string names;
  device.matrix_efficiency.emplace_back(kSmallestProduct, 0.5);
  for (const MeasuredRun& run : runs) {
    if (run.request.options.dtype != runs.front().request.options.dtype)
      return refuse_run(run.name, "has another type than " + runs.front().name + "; use runs of one type");
    const double size = product_size(run.request);
    if (size == device.matrix_efficiency.back().first)
      return refuse_run(run.name, "has the same sizes as another run; leave one out");
    device.matrix_efficiency.emplace_back(size, 0.5);
    names += (names.empty() ? "" : ", ") + run.name;
  }
  device.flops[runs.front().request.options.dtype] = 1e11;
  FOREBAY_RETURN_IF_ERROR(calibrate(cluster, runs));
  return description_json(cluster, figures, names).dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace forebay
