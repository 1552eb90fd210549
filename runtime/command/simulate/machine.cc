#include "runtime/command/simulate/machine.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "forebay/regular_file.h"
#include "forebay/text.h"
#include "runtime/command/simulate/machine_files.h"

namespace forebay {
namespace {

using nlohmann::json;

// The largest file and the deepest brackets of a description. Larger: a wrong file takes more memory before
// it is refused.
constexpr std::size_t kFileBytesMost = std::size_t{1} << 20;
constexpr int kDepthMost = 16;
constexpr double kHostRanksMost = 200'000;
constexpr double kMemoryBytesMost = 1e18;  // Memory is counted in 64 bits.

constexpr std::pair<const char*, DataType> kTypes[] = {
    {"fp32", DataType::kFloat32}, {"bf16", DataType::kBfloat16}, {"fp16", DataType::kFloat16}};

// Reads the fields of one JSON object, remembers the first problem, and refuses fields that nobody asked for.
class Fields {
 public:
  Fields(std::string file, std::string path, const json& object)
      : file_(std::move(file)), path_(std::move(path)), object_(object) {
    if (!object.is_object()) refuse(path_.empty() ? "the file" : path_, "is not an object; use {...}");
  }

  std::string text(const char* name) {
    const json* const value = find(name);
    if (value == nullptr) return {};
    if (!value->is_string() || value->get<std::string>().empty()) {
      refuse(full(name), "is not a text; use \"...\"");
      return {};
    }
    return shown_value(value->get<std::string>());
  }
  // A figure with its source. `least`: the smallest value allowed, or, if `above`, not allowed any more.
  double figure(const char* name, double least, bool above, double most = 1e30) {
    const json* const value = find(name);
    if (value == nullptr) return 0;
    Fields inner(file_, full(name), *value);
    const double number = inner.number("value", least, above, most);
    inner.text("source");
    inner.finish();
    if (status_.ok()) status_ = inner.status_;
    return number;
  }
  double number(const char* name, double least, bool above, double most = 1e30) {
    const json* const value = find(name);
    if (value == nullptr) return 0;
    return checked(full(name), *value, least, above, most);
  }
  int count(const char* name, int least, double most = 1e6) {
    const double number = this->number(name, least, false, most);
    if (number != std::floor(number)) refuse(full(name), "is not whole; use a whole number");
    return static_cast<int>(number);
  }
  bool flag(const char* name) {
    const json* const value = find(name);
    if (value == nullptr || value->is_boolean()) return value != nullptr && value->get<bool>();
    refuse(full(name), "is " + value->dump() + "; use true or false");
    return false;
  }
  double checked(const std::string& name, const json& value, double least, bool above, double most) {
    const double number = value.is_number() ? value.get<double>() : std::nan("");
    const bool good = std::isfinite(number) && (above ? number > least : number >= least) && number <= most;
    if (good) return number;
    std::ostringstream allowed;
    allowed << "is " << shown_value(value.dump()) << "; use a number " << (above ? "above " : "of at least ")
            << least;
    if (most < 1e30) allowed << ", at most " << most;
    refuse(name, allowed.str());
    return 0;
  }
  bool has(const char* name) const { return object_.is_object() && object_.contains(name); }
  const json* find(const char* name) {
    asked_.push_back(name);
    if (has(name)) return &object_.at(name);
    refuse(full(name), "is missing");
    return nullptr;
  }
  void finish() {
    if (!object_.is_object()) return;
    for (const auto& [name, value] : object_.items()) {
      if (std::find(asked_.begin(), asked_.end(), name) == asked_.end())
        refuse(full(shown_value(name)), "is not a field of a description; remove it, or correct its name");
    }
  }
  void refuse(const std::string& field, const std::string& problem) {
    if (status_.ok()) status_ = Status(StatusCode::kInvalidArgument, file_ + ": " + field + " " + problem);
  }
  void take(const Status& status) {
    if (status_.ok()) status_ = status;
  }
  std::string full(const std::string& name) const { return path_.empty() ? name : path_ + "." + name; }
  const std::string& file() const { return file_; }
  const Status& status() const { return status_; }

 private:
  const std::string file_;
  const std::string path_;
  const json& object_;
  std::vector<std::string> asked_;
  Status status_;
};

DeviceDescription read_device_fields(Fields& fields) {
  DeviceDescription device;
  device.name = fields.text("name");
  device.memory_bytes = static_cast<std::uint64_t>(fields.figure("memory_bytes", 0, true, kMemoryBytesMost));
  device.memory_bytes_per_second = fields.figure("memory_bytes_per_second", 0, true);
  device.memory_efficiency = fields.figure("memory_efficiency", 0, true, 1);
  device.kernel_seconds = fields.figure("kernel_seconds", 0, false);
  device.queue_seconds = fields.figure("queue_seconds", 0, false);
  if (const json* const flops = fields.find("flops")) {
    Fields types(fields.file(), fields.full("flops"), *flops);
    for (const auto& [name, type] : kTypes) {
      if (types.has(name)) device.flops[type] = types.figure(name, 0, true);
    }
    types.finish();
    if (device.flops.empty()) types.refuse(fields.full("flops"), "has no type; use fp32, bf16 or fp16");
    fields.take(types.status());
  }
  if (const json* const curve = fields.find("matrix_efficiency")) {
    Fields inner(fields.file(), fields.full("matrix_efficiency"), *curve);
    inner.text("source");
    const json* const points = inner.find("points");
    if (points != nullptr && (!points->is_array() || points->empty()))
      inner.refuse(inner.full("points"), "is not a list; use [[SIZE, PART], ...]");
    for (std::size_t i = 0; points != nullptr && points->is_array() && i < points->size(); ++i) {
      const json& point = points->at(i);
      const std::string name = inner.full("points[" + std::to_string(i) + "]");
      if (!point.is_array() || point.size() != 2) {
        inner.refuse(name, "is not a pair; use [SIZE, PART]");
        break;
      }
      const double least = device.matrix_efficiency.empty() ? 0 : device.matrix_efficiency.back().first;
      device.matrix_efficiency.emplace_back(inner.checked(name + "[0]", point[0], least, true, 1e30),
                                            inner.checked(name + "[1]", point[1], 0, true, 1));
    }
    inner.finish();
    fields.take(inner.status());
  }
  fields.finish();
  return device;
}

LinkDescription read_link(Fields& fields, bool is_last) {
  LinkDescription link;
  link.name = fields.text("name");
  link.ranks = is_last && !fields.has("ranks") ? 0 : fields.count("ranks", 1);
  link.bytes_per_second = fields.figure("bytes_per_second", 0, true);
  link.ranks_per_link = fields.count("ranks_per_link", 1);
  link.latency_seconds = fields.figure("latency_seconds", 0, false);
  link.message_seconds = fields.figure("message_seconds", 0, false);
  if (fields.has("processor_seconds_per_byte"))
    link.processor_seconds_per_byte = fields.figure("processor_seconds_per_byte", 0, false);
  fields.finish();
  return link;
}

void read_links(Fields& fields, ClusterDescription& cluster) {
  const json* const links = fields.find("links");
  if (links == nullptr) return;
  if (!links->is_array() || links->empty() || links->size() > 4) {
    fields.refuse("links", "is not a list of 1 to 4 levels");
    return;
  }
  for (std::size_t i = 0; i < links->size(); ++i) {
    Fields inner(fields.file(), "links[" + std::to_string(i) + "]", links->at(i));
    cluster.links.push_back(read_link(inner, i + 1 == links->size()));
    fields.take(inner.status());
  }
}

Result<json> parse_json(const std::string& file, std::string_view text) {
  if (is_nested_deeper(text, kDepthMost)) {
    return Status(StatusCode::kInvalidArgument, file + " is nested deeper than " +
                                                    std::to_string(kDepthMost) +
                                                    " levels; compare it with an installed description");
  }
  json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!value.is_discarded()) return value;
  return Status(StatusCode::kInvalidArgument,
                file + " is not JSON; compare it with an installed description");
}

const MachineFile* find_file(std::string_view kind, std::string_view name) {
  for (const MachineFile& file : machine_files()) {
    if (file.kind == kind && file.name == name) return &file;
  }
  return nullptr;
}

std::vector<std::string> names_of(std::string_view kind) {
  std::vector<std::string> names;
  for (const MachineFile& file : machine_files()) {
    if (file.kind == kind) names.emplace_back(file.name);
  }
  return names;
}

std::string list_of(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) text += (i == 0 ? "" : ", ") + names[i];
  return text;
}

}  // namespace

std::vector<std::string> device_names() {
  return names_of("device");
}
std::vector<std::string> cluster_names() {
  return names_of("cluster");
}

Result<DeviceDescription> parse_device(const std::string& file, std::string_view text) {
  FOREBAY_ASSIGN_OR_RETURN(const json value, parse_json(file, text));
  Fields fields(file, "", value);
  DeviceDescription device = read_device_fields(fields);
  FOREBAY_RETURN_IF_ERROR(fields.status());
  return device;
}

Result<DeviceDescription> read_device(const std::string& name) {
  if (const MachineFile* const file = find_file("device", name))
    return parse_device(std::string(file->name) + ".json", file->text);
  return Status(StatusCode::kInvalidArgument, "there is no description of device '" + shown_value(name) +
                                                  "'; use " + list_of(device_names()));
}

Result<ClusterDescription> parse_cluster(const std::string& file, std::string_view text) {
  FOREBAY_ASSIGN_OR_RETURN(const json value, parse_json(file, text));
  Fields fields(file, "", value);
  ClusterDescription cluster;
  cluster.name = fields.text("name");
  if (const json* const device = fields.find("device")) {
    if (device->is_string()) {
      Result<DeviceDescription> named = read_device(device->get<std::string>());
      if (named.ok()) {
        cluster.device = std::move(named).value();
      } else {
        fields.refuse("device", "is unknown: " + named.status().message());
      }
    } else {
      Fields inner(file, "device", *device);
      cluster.device = read_device_fields(inner);
      fields.take(inner.status());
    }
  }
  cluster.host_ranks = fields.count("host_ranks", 1, kHostRanksMost);
  cluster.host_memory_bytes =
      static_cast<std::uint64_t>(fields.figure("host_memory_bytes", 0, true, kMemoryBytesMost));
  cluster.host_bytes_per_second = fields.figure("host_bytes_per_second", 0, true);
  cluster.bus_bytes_per_second = fields.figure("bus_bytes_per_second", 0, true);
  cluster.ranks_per_bus = fields.count("ranks_per_bus", 1);
  cluster.drive_read_bytes_per_second = fields.figure("drive_read_bytes_per_second", 0, false);
  cluster.drive_write_bytes_per_second = fields.figure("drive_write_bytes_per_second", 0, false);
  cluster.control_seconds = fields.figure("control_seconds", 0, false);
  if (fields.has("shared_processors")) cluster.shared_processors = fields.flag("shared_processors");
  read_links(fields, cluster);
  fields.finish();
  FOREBAY_RETURN_IF_ERROR(fields.status());
  return cluster;
}

Result<std::string> this_machine_path() {
  if (const char* const path = std::getenv("FOREBAY_MACHINE"); path != nullptr && *path != '\0')
    return std::string(path);
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') return std::string(cache) + "/forebay/machine.json";
  const char* const home = std::getenv("HOME");
  if (home == nullptr || *home == '\0') {
    return Status(
        StatusCode::kInvalidArgument,
        "HOME is not set, so there is no place for the description of this machine; give FILE instead of "
        "'this', or set FOREBAY_MACHINE to a file");
  }
  return std::string(home) + "/.cache/forebay/machine.json";
}

Result<ClusterDescription> read_cluster(const std::string& name_or_path) {
  if (const MachineFile* const file = find_file("cluster", name_or_path))
    return parse_cluster(std::string(file->name) + ".json", file->text);
  const bool is_this = name_or_path == "this";
  if (!is_this && name_or_path.find_first_of("/.") == std::string::npos) {
    return Status(StatusCode::kInvalidArgument, "there is no description of cluster '" + name_or_path +
                                                    "'; use " + list_of(cluster_names()) +
                                                    ", this, or the path of a JSON file");
  }
  std::string path = name_or_path;
  if (is_this) {
    FOREBAY_ASSIGN_OR_RETURN(path, this_machine_path());
  }
  const Result<std::string> text = internal::read_regular_file(path, kFileBytesMost);
  if (!text.ok()) {
    return Status(
        text.status().code(), "cannot read the cluster ", shown_path(path), ": ", text.status().message(),
        is_this ? "; measure this machine by forebay bench-tiers --save this" : "; give a JSON file");
  }
  return parse_cluster(path, text.value());
}

double matrix_efficiency(const DeviceDescription& device, double m, double n, double k) {
  const double size = std::cbrt(m * n * k);
  const auto& points = device.matrix_efficiency;
  const auto above =
      std::find_if(points.begin(), points.end(), [&](const auto& p) { return p.first >= size; });
  if (above == points.end()) return points.back().second;
  // Below the first point the time stands still, so the part falls with the work.
  if (above == points.begin()) return above->second * std::pow(size / above->first, 3);
  const auto below = above - 1;
  const double way = std::log(size / below->first) / std::log(above->first / below->first);
  return below->second + way * (above->second - below->second);
}

}  // namespace forebay
