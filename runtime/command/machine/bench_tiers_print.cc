#include "runtime/command/machine/bench_tiers_print.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/text_table.h"

namespace forebay {
namespace {

using Json = nlohmann::ordered_json;

std::string rate_text(double bytes_per_second) {
  return format_text("%.2f GB/s", bytes_per_second / 1e9);
}

std::string time_text(double seconds) {
  if (seconds <= 0) return "0";
  return seconds < 0.1 ? format_text("%.2f ms", seconds * 1e3) : format_text("%.3f s", seconds);
}

std::string cell(const std::string& text, std::size_t width) {
  return std::string(width > text.size() ? width - text.size() : 1, ' ') + text;
}
std::string label(const std::string& text, std::size_t width) {
  return text + std::string(width > text.size() ? width - text.size() : 1, ' ');
}

const char* how_copied(const BenchTiersReport& report) {
  return report.device_in_host
             ? "the device is ordinary memory of this host: every copy is a memcpy by a thread"
             : "by the device's copy engines";
}

std::string directories_text(const FileMeasurement& files) {
  std::string text;
  for (const DirectoryFacts& one : files.directories)
    text += (text.empty() ? "" : " + ") + shown_path(one.path);
  return text;
}

std::string facts_text(const DirectoryFacts& facts) {
  std::string text = facts.file_system.empty() ? "unknown file system" : facts.file_system;
  if (!facts.drives.empty()) text += " on " + facts.drive_names();
  const auto turns = facts.rotational();
  if (turns) text += *turns ? " (rotational, according to the kernel)" : " (flash)";
  if (facts.kind == DirectoryKind::kMemory) text += " in memory";
  if (facts.kind == DirectoryKind::kNetwork) text += " on another host";
  if (!facts.nodes.empty()) {
    text += std::string(", NUMA ") + (facts.nodes.size() == 1 ? "node " : "nodes ") +
            processors_text(facts.nodes);
  }
  return text;
}

std::string files_text(const FileMeasurement& files) {
  std::string text = "\nfiles in " + directories_text(files) + "\n";
  for (const DirectoryFacts& one : files.directories)
    text += "  " + shown_path(one.path) + ": " + facts_text(one) + "\n";
  const bool in_memory = std::any_of(files.directories.begin(), files.directories.end(),
                                     [](const auto& one) { return one.kind == DirectoryKind::kMemory; });
  text +=
      in_memory ? "  files there are memory: rates are those of copies\n"
      : files.is_direct
          ? "  past the page cache (O_DIRECT)\n"
          : "  through the page cache: the file system has no O_DIRECT, so rates may be those of memory\n";
  text += "  " + label("block", 12) + cell("depth", 6) + cell("read", 12) + cell("write", 12) + "\n";
  for (const StoreMeasurementPoint& point : files.store.points) {
    const bool is_chosen =
        point.block_bytes == files.store.chosen.block_bytes && point.depth == files.store.chosen.depth;
    text += "  " + label(format_bytes(point.block_bytes), 12) + cell(std::to_string(point.depth), 6) +
            cell(rate_text(point.read_bytes_per_second), 12) +
            cell(rate_text(point.write_bytes_per_second), 12) + (is_chosen ? "  chosen" : "") + "\n";
  }
  return text;
}

std::string model_text(const BenchedModel& model) {
  const PlanOptions& options = model.options;
  const TierLimits& limits = model.limits;
  std::string text = "\nmodel: " + model.description + "\n  " + std::to_string(model.parameters) +
                     " parameters, " + data_type_name(options.dtype) + ", stage " +
                     std::to_string(options.stage) + ", " + std::to_string(options.ranks) +
                     (options.ranks == 1 ? " rank, " : " ranks, ") + std::to_string(limits.host_ranks) +
                     " on this host\n  budgets: " + format_bytes(limits.device_bytes) +
                     " of device memory a rank; on this host " + format_bytes(limits.host_bytes) +
                     " of memory and " + format_bytes(limits.file_bytes) + " of files\n";
  std::vector<TableRow> rows = {
      {"  per rank", "device", "host", "files", "down", "up", "both", "AdamW", "files", "added", "fits"}};
  for (std::size_t i = 0; i < model.choice.estimates.size(); ++i) {
    const OffloadEstimate& one = model.choice.estimates[i];
    rows.push_back(
        {(static_cast<int>(i) == model.choice.chosen ? "* " : "  ") + setting_name(one.offload, one.tier),
         format_bytes(one.device_bytes), format_bytes(one.host_bytes), format_bytes(one.file_bytes),
         time_text(one.down_seconds), time_text(one.up_seconds), time_text(one.both_seconds),
         time_text(one.adamw_seconds), time_text(one.file_seconds), time_text(one.added_seconds),
         one.fits ? "yes" : "no"});
  }
  text += table_text(rows);
  const OffloadEstimate& chosen = model.choice.estimates[static_cast<std::size_t>(model.choice.chosen)];
  text += "  chosen: " + setting_name(chosen.offload, chosen.tier) + ". " + model.choice.reason + "\n";
  if (chosen.offload != Offload::kNone) {
    text += std::string("  options: --offload ") + offload_name(chosen.offload) + " --offload-tier " +
            (chosen.tier == Tier::kFile ? "nvme:DIR" : "cpu") +
            "; --offload-fraction auto measures in the run itself and offloads the fastest fraction\n";
  }
  text +=
      "  activations are an estimate of a usual transformer's ('forebay plan' tells which); a trainer's may "
      "differ\n  how times are estimated:\n";
  for (const std::string& line : offload_formulas()) text += "    " + line + "\n";
  return text;
}

const char* link_name(LinkKind link) {
  return link == LinkKind::kShm ? "shm" : "tcp";
}

std::string link_text(const std::string& name, const LinkMeasurement& link) {
  return "  " + label(name, 18) + cell(format_text("%.3g GB/s", link.bytes_per_second / 1e9), 12) +
         format_text("  (collectives; latency %.3g us)\n", link.latency_seconds * 1e6);
}

std::string ranks_text(const RankMeasurement& ranks, LinkKind link) {
  std::string text =
      "\n" + std::to_string(ranks.ranks) + (ranks.ranks == 1 ? " rank" : " ranks at the same time");
  if (ranks.host_ranks < ranks.ranks) text += ", " + std::to_string(ranks.host_ranks) + " on each host";
  text += "; for each\n";
  text += "  AdamW             " + cell(rate_text(ranks.kernel_bytes_per_second), 12) + "  (one thread)\n";
  text += "  copies            " + cell(rate_text(ranks.copy_bytes_per_second), 12) + "\n";
  if (ranks.within_host.bytes_per_second > 0)
    text += link_text(std::string("in a host, ") + link_name(link), ranks.within_host);
  if (ranks.between_hosts.bytes_per_second > 0) text += link_text("between hosts", ranks.between_hosts);
  return text;
}

Json link_json(const LinkMeasurement& link) {
  if (link.bytes_per_second <= 0) return nullptr;
  return Json{{"bytes_per_second", link.bytes_per_second},
              {"latency_seconds", link.latency_seconds},
              {"processor_seconds_per_byte", link.processor_seconds_per_byte}};
}

Json ranks_json(const RankMeasurement& ranks, LinkKind link) {
  return Json{{"ranks", ranks.ranks},
              {"host_ranks", ranks.host_ranks},
              {"adamw_bytes_per_second", ranks.kernel_bytes_per_second},
              {"copy_bytes_per_second", ranks.copy_bytes_per_second},
              {"link", link_name(link)},
              {"within_host", link_json(ranks.within_host)},
              {"between_hosts", link_json(ranks.between_hosts)},
              {"control_seconds", ranks.control_seconds}};
}

Json strings(const std::string& text) {
  return text.empty() ? Json(nullptr) : Json(text);
}

Json point_json(const StoreMeasurementPoint& point) {
  return Json{{"block_bytes", point.block_bytes},
              {"depth", point.depth},
              {"read_bytes_per_second", point.read_bytes_per_second},
              {"write_bytes_per_second", point.write_bytes_per_second}};
}

Json files_json(const FileMeasurement& files) {
  Json directories = Json::array();
  for (const DirectoryFacts& one : files.directories) {
    const auto turns = one.rotational();
    directories.push_back({{"path", one.path},
                           {"mount_point", strings(one.mount_point)},
                           {"file_system", strings(one.file_system)},
                           {"kind", directory_kind_name(one.kind)},
                           {"drives", strings(one.drive_names())},
                           {"rotational", turns ? Json(*turns) : Json(nullptr)},
                           {"numa_nodes", one.nodes}});
  }
  Json points = Json::array();
  for (const StoreMeasurementPoint& point : files.store.points) points.push_back(point_json(point));
  return Json{{"directories", directories},
              {"direct", files.is_direct},
              {"free_bytes", files.free_bytes},
              {"points", points},
              {"chosen", point_json(files.store.chosen)}};
}

Json setting_json(const OffloadEstimate& one) {
  return Json{{"offload", offload_name(one.offload)},
              {"offload_tier", one.offload == Offload::kNone ? Json(nullptr) : Json(tier_name(one.tier))},
              {"device_bytes", one.device_bytes},
              {"host_bytes", one.host_bytes},
              {"file_bytes", one.file_bytes},
              {"fits", one.fits},
              {"lacks", strings(one.lacks)},
              {"down_seconds", one.down_seconds},
              {"up_seconds", one.up_seconds},
              {"both_seconds", one.both_seconds},
              {"adamw_seconds", one.adamw_seconds},
              {"file_seconds", one.file_seconds},
              {"added_seconds", one.added_seconds},
              {"bound_by", strings(one.bound_by)}};
}

Json model_json(const BenchedModel& model) {
  Json settings = Json::array();
  for (const OffloadEstimate& one : model.choice.estimates) settings.push_back(setting_json(one));
  return Json{{"description", model.description},
              {"parameters", model.parameters},
              {"dtype", data_type_name(model.options.dtype)},
              {"stage", model.options.stage},
              {"ranks", model.options.ranks},
              {"micro_steps", model.options.micro_steps},
              {"limits",
               {{"device_bytes", model.limits.device_bytes},
                {"host_bytes", model.limits.host_bytes},
                {"file_bytes", model.limits.file_bytes},
                {"host_ranks", model.limits.host_ranks}}},
              {"settings", settings},
              {"chosen", settings.at(static_cast<std::size_t>(model.choice.chosen))},
              {"reason", model.choice.reason},
              {"formulas", offload_formulas()}};
}

}  // namespace

std::string bench_tiers_text(const BenchTiersReport& report) {
  const Placement& placement = report.placement;
  const HostMeasurement& host = report.host;
  std::string text =
      "device " + report.device + "; topology by " + report.topology_source + ": " + placement.reason + "\n";
  text += "  threads on processors " + processors_text(placement.processors) + ", pinned memory " +
          (placement.memory_node < 0 ? "anywhere" : "on NUMA node " + std::to_string(placement.memory_node)) +
          "\n";
  text += "\ncopies of " + format_bytes(report.bytes) + " (" + how_copied(report) + ")\n";
  text += "  to the device     " + cell(rate_text(report.copies.to_device_bytes_per_second), 12) + "\n";
  text += "  from the device   " + cell(rate_text(report.copies.from_device_bytes_per_second), 12) + "\n";
  text += "  both at once      " + cell(rate_text(report.copies.both_bytes_per_second), 12) + " together\n";
  text += "\nhost memory: " + std::to_string(host.thread_count) + " threads on " +
          std::to_string(host.node_count) + (host.node_count == 1 ? " NUMA node\n" : " NUMA nodes\n");
  text += "  triad             " + cell(rate_text(host.triad_bytes_per_second), 12) +
          "  (a = b + s * c in fp64, 24 bytes an element)\n";
  text += "  AdamW             " +
          cell(rate_text(host.adamw_elements_per_second * static_cast<double>(host.adamw_bytes_per_element)),
               12) +
          format_text("  (%.0f million elements/s, ", host.adamw_elements_per_second / 1e6) +
          std::to_string(host.adamw_bytes_per_element) + " bytes each)\n";
  for (const FileMeasurement& files : report.files) text += files_text(files);
  if (report.ranks) text += ranks_text(*report.ranks, report.ranks_link);
  if (report.model) text += model_text(*report.model);
  return text;
}

std::string bench_tiers_json(const BenchTiersReport& report) {
  const Placement& placement = report.placement;
  const HostMeasurement& host = report.host;
  Json files = Json::array();
  for (const FileMeasurement& one : report.files) files.push_back(files_json(one));
  const Json json{{"device", report.device},
                  {"device_in_host", report.device_in_host},
                  {"topology", report.topology_source},
                  {"placement",
                   {{"nodes", placement.nodes},
                    {"memory_node", placement.memory_node < 0 ? Json(nullptr) : Json(placement.memory_node)},
                    {"processors", processors_text(placement.processors)},
                    {"cores", processors_text(placement.cores)},
                    {"reason", placement.reason}}},
                  {"bytes", report.bytes},
                  {"copies",
                   {{"how", how_copied(report)},
                    {"to_device_bytes_per_second", report.copies.to_device_bytes_per_second},
                    {"from_device_bytes_per_second", report.copies.from_device_bytes_per_second},
                    {"both_bytes_per_second", report.copies.both_bytes_per_second}}},
                  {"host",
                   {{"threads", host.thread_count},
                    {"numa_nodes", host.node_count},
                    {"triad_bytes_per_second", host.triad_bytes_per_second},
                    {"adamw_elements_per_second", host.adamw_elements_per_second},
                    {"adamw_bytes_per_element", host.adamw_bytes_per_element}}},
                  {"files", files},
                  {"ranks", report.ranks ? ranks_json(*report.ranks, report.ranks_link) : Json(nullptr)},
                  {"model", report.model ? model_json(*report.model) : Json(nullptr)}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace forebay
