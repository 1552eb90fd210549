#include "runtime/command/report/run_report.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <utility>

#include "forebay/activation_formulas.h"
#include "forebay/error.h"
#include "forebay/regular_file.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/text_table.h"
#include "runtime/command/traces/allocation_trace.h"

namespace forebay {
namespace {

using Json = nlohmann::ordered_json;

// A training run of a million steps writes tens of megabytes.
constexpr std::uint64_t kReportBytesMax = std::uint64_t{256} << 20;

[[noreturn]] void bad_report(const std::string& path, const std::string& found) {
  throw Error(StatusCode::kCorruption, "cannot read report '" + shown_path(path) + "': " + found +
                                           "; give files that forebay-gpt wrote with --report");
}

// A value of the file and its path of keys, so that a message can name a wrong value. Requires: the JSON
// outlives it.
class Entry {
 public:
  explicit Entry(const Json& json) : json_(json) {}

  bool has(const std::string& key) const { return object().contains(key); }
  Entry at(const std::string& key) const {
    const auto found = object().find(key);
    if (found == json_.end()) throw Unreadable{(place_.empty() ? "it" : place_) + " has no '" + key + "'"};
    return Entry(*found, place_.empty() ? key : place_ + "." + key);
  }
  std::vector<Entry> items() const {
    if (!json_.is_array()) complain("a list");
    std::vector<Entry> items;
    for (const Json& item : json_) {
      items.push_back(Entry(item, place_ + "[" + std::to_string(items.size()) + "]"));
    }
    return items;
  }

  std::uint64_t count() const {
    if (!json_.is_number_unsigned()) complain("a whole number from 0 up");
    return json_.get<std::uint64_t>();
  }
  int small_number() const {
    if (!json_.is_number_integer() || std::abs(json_.get<double>()) > std::numeric_limits<int>::max()) {
      complain("a whole number below 2^31");
    }
    return json_.get<int>();
  }
  // A mean over steps, to the nearest byte.
  std::uint64_t mean_bytes() const {
    constexpr double kLimit = 1e18;
    if (!json_.is_number() || !(json_.get<double>() >= 0 && json_.get<double>() < kLimit))
      complain("a number from 0 up");
    return static_cast<std::uint64_t>(json_.get<double>() + 0.5);
  }
  double number() const {
    if (!json_.is_number()) complain("a number");
    return json_.get<double>();
  }
  // None for null.
  std::optional<double> number_or_null() const {
    if (json_.is_null()) return std::nullopt;
    if (!json_.is_number()) complain("a number or null");
    return json_.get<double>();
  }
  // Its first 300 bytes.
  std::string text() const {
    if (!json_.is_string()) complain("a text");
    return shown_path(json_.get_ref<const std::string&>());
  }

  int small_number(const std::string& key, int otherwise) const {
    return has(key) ? at(key).small_number() : otherwise;
  }
  std::uint64_t count(const std::string& key, std::uint64_t otherwise) const {
    return has(key) ? at(key).count() : otherwise;
  }
  std::string text(const std::string& key, const char* otherwise) const {
    return has(key) ? at(key).text() : otherwise;
  }
  bool flag(const std::string& key) const {
    if (!has(key)) return false;
    const Entry entry = at(key);
    if (!entry.json_.is_boolean()) entry.complain("true or false");
    return entry.json_.get<bool>();
  }
  // Names and texts of an object.
  std::vector<std::pair<std::string, std::string>> texts(const std::string& key) const {
    std::vector<std::pair<std::string, std::string>> all;
    if (!has(key)) return all;
    const Entry entry = at(key);
    for (const auto& [name, unused] : entry.object().items())
      all.emplace_back(shown_path(name), entry.at(name).text());
    return all;
  }

  struct Unreadable {
    std::string found;
  };

 private:
  Entry(const Json& json, std::string place) : json_(json), place_(std::move(place)) {}

  const Json& object() const {
    if (!json_.is_object()) complain("an object");
    return json_;
  }
  [[noreturn]] void complain(const char* wanted) const {
    throw Unreadable{(place_.empty() ? "it" : place_) + " is " +
                     quote_text(json_.dump(-1, ' ', true, Json::error_handler_t::replace)) + " and not " +
                     wanted};
  }

  const Json& json_;
  std::string place_;
};

PoolBytes read_pools(const Entry& object) {
  PoolBytes bytes;
  bytes.parameters = object.at("parameters").count();
  bytes.gradients = object.at("gradients").count();
  bytes.optimizer = object.at("optimizer").count();
  bytes.gathered = object.at("gathered").count();
  bytes.buckets = object.at("buckets").count();
  bytes.activations = object.at("activations").count();
  return bytes;
}

PoolBytes largest(const PoolBytes& a, const PoolBytes& b) {
  return {.parameters = std::max(a.parameters, b.parameters),
          .gradients = std::max(a.gradients, b.gradients),
          .optimizer = std::max(a.optimizer, b.optimizer),
          .gathered = std::max(a.gathered, b.gathered),
          .buckets = std::max(a.buckets, b.buckets),
          .activations = std::max(a.activations, b.activations)};
}

void read_ranks(const Entry& ranks, RunReport& run) {
  for (const Entry& rank : ranks.items()) {
    const PoolBytes peak = read_pools(rank.at("peak_bytes"));
    const PoolBytes planned = read_pools(rank.at("planned_bytes"));
    run.peak = largest(run.peak, peak);
    run.planned = largest(run.planned, planned);
    run.model_states.measured = std::max(run.model_states.measured, peak.model_states());
    run.model_states.planned = std::max(run.model_states.planned, planned.model_states());
    run.reserved_bytes = std::max(run.reserved_bytes, rank.at("reserved_bytes").count());
    // Older reports lack some of these.
    using Read = std::uint64_t (Entry::*)() const;
    const auto raise = [&](std::uint64_t& target, const std::string& key, Read read) {
      if (rank.has(key)) target = std::max(target, (rank.at(key).*read)());
    };
    const auto raise_both = [&](MeasuredBytes& target, const std::string& key, Read read) {
      raise(target.measured, key, read);
      raise(target.planned, "planned_" + key, &Entry::count);
    };
    raise(run.part_parameters, "parameters", &Entry::count);
    raise(run.tensor_sent_bytes_per_step, "tensor_sent_bytes_per_step", &Entry::mean_bytes);
    raise(run.pipeline_sent_bytes_per_step, "pipeline_sent_bytes_per_step", &Entry::mean_bytes);
    raise_both(run.saved_device, "saved_device_bytes", &Entry::count);
    raise_both(run.saved_host, "saved_host_bytes", &Entry::count);
    raise_both(run.saved_file, "saved_file_bytes", &Entry::count);
    raise_both(run.saved_sent_per_step, "saved_sent_bytes_per_step", &Entry::mean_bytes);
    raise_both(run.host, "host_bytes", &Entry::count);
    raise_both(run.file, "file_bytes", &Entry::count);
    raise_both(run.file_read_per_step, "file_read_bytes_per_step", &Entry::mean_bytes);
    raise_both(run.file_written_per_step, "file_written_bytes_per_step", &Entry::mean_bytes);
    run.sent_bytes_per_step = std::max(run.sent_bytes_per_step, rank.at("sent_bytes_per_step").mean_bytes());
    run.received_bytes_per_step =
        std::max(run.received_bytes_per_step, rank.at("received_bytes_per_step").mean_bytes());
  }
}

// The ranks' arrangement. Sizes that do not divide the ranks would make nonsense of every formula.
void read_grid(const Entry& json, RunReport& run) {
  run.world_size = json.at("world_size").small_number();
  run.tensor_parallel = json.small_number("tensor_parallel", 1);
  run.pipeline_parallel = json.small_number("pipeline_parallel", 1);
  run.group = json.small_number("group", 1);
  run.shard_within_group = json.flag("shard_within_group");
  const auto divides = [](int divisor, int number) { return divisor >= 1 && number % divisor == 0; };
  if (!divides(run.tensor_parallel, run.world_size) ||
      !divides(run.pipeline_parallel, run.world_size / run.tensor_parallel))
    throw Entry::Unreadable{"its tensor_parallel and pipeline_parallel do not divide its world_size"};
  if (!divides(run.group, run.data_parallel()))
    throw Entry::Unreadable{"its group does not divide its data-parallel ranks"};
}

RunReport read_run(const std::string& path, const Entry& json) {
  RunReport run;
  run.name = path;
  read_grid(json, run);
  run.training = json.texts("training");
  run.recompute = json.text("recompute", "none");
  run.activations = json.text("activations", "keep");
  run.stage = json.at("stage").small_number();
  run.dtype = json.at("dtype").text();
  run.parameters = json.at("parameters").count();
  run.steps = json.at("steps").small_number();
  run.first_step = json.small_number("first_step", 0);
  run.micro_steps = json.small_number("micro_steps", 1);
  run.accumulate = json.text("accumulate", "shard");
  run.optimizer = json.text("optimizer", "adamw");
  run.moments = json.text("moments", "fp32");
  run.master_weights = json.text("master_weights", "on") == "on";
  if (json.has("ema")) run.ema = json.at("ema").number();
  run.offload = json.text("offload", "none");
  run.tier = json.text("offload_tier", "cpu");
  run.offloaded_parameters = json.count("offloaded_parameters", run.offload == "none" ? 0 : run.parameters);
  run.store = json.text("store", "");
  for (const Entry& loss : json.at("loss").items()) {
    // JSON has no NaN.
    run.losses.push_back(loss.number_or_null().value_or(std::numeric_limits<double>::quiet_NaN()));
  }
  for (const Entry& norm : json.at("grad_norm").items()) run.grad_norms.push_back(norm.number_or_null());
  run.digest = json.at("digest").text();
  run.tokens_per_second = json.at("tokens_per_second").number();
  read_ranks(json.at("ranks"), run);
  return run;
}

// Errors name the place and the text that is not JSON.
Json parse_json(const std::string& path, const std::string& text) {
  constexpr int kDepthMax = 16;  // Far more than there is in a report.
  if (is_nested_deeper(text, kDepthMax))
    bad_report(path, "it is nested deeper than " + std::to_string(kDepthMax) + " levels");
  // The parser would take it for the end of the text.
  if (const std::size_t zero = text.find('\0'); zero != std::string::npos)
    bad_report(path,
               "byte " + std::to_string(zero + 1) + " of it is 0, which JSON never has; is it damaged?");
  try {
    return Json::parse(text);
  } catch (const Json::parse_error& error) {
    // Counted from 1: the byte that was read last, and did not fit.
    const std::size_t at = error.byte == 0 ? 0 : error.byte - 1;
    if (text.empty()) bad_report(path, "it is empty");
    if (at >= text.size()) bad_report(path, "it ends before its JSON does; is it cut off?");
    const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n');
    const std::size_t line_begin = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;
    bad_report(path, "line " + std::to_string(line) + ", byte " + std::to_string(at - line_begin + 1) +
                         " of it: it is not JSON from " + quote_text(text.substr(at, 20)) + " on");
  } catch (const Json::out_of_range&) {
    bad_report(path, "it has a number that is too large for 64 bits");
  }
}

std::string grouped_number(double value) {
  return grouped(static_cast<std::uint64_t>(std::llround(value)));
}

std::string fixed(double value, int digits) {
  return format_text("%.*f", digits, value);
}

std::uint64_t worst_wire(const RunReport& run) {
  return std::max(run.sent_bytes_per_step, run.received_bytes_per_step);
}

std::string wire_cell(const RunReport& run) {
  const double theory = wire_formula_bytes(run);
  if (theory == 0) return worst_wire(run) == 0 ? "none" : grouped(worst_wire(run)) + " / 0";
  return grouped(worst_wire(run)) + " / " + grouped_number(theory) + " = " +
         fixed(static_cast<double>(worst_wire(run)) / theory, 4);
}

bool offloads(const RunReport& run) {
  return run.offload != "none";
}

// Ranks that a unit is sharded over.
int shards(const RunReport& run) {
  return run.shard_within_group ? run.group : run.data_parallel();
}

// "optimizer, 60% on nvme".
std::string offload_cell(const RunReport& run) {
  if (!offloads(run)) return run.offload;
  std::string text = run.offload;
  const double part = part_parameters(run);
  if (static_cast<double>(run.offloaded_parameters) != part) {
    text +=
        ", " + fixed(100.0 * static_cast<double>(run.offloaded_parameters) / std::max(part, 1.0), 0) + "%";
  }
  return text + " on " + run.tier;
}

std::vector<TableRow> table_rows(const std::vector<RunReport>& runs) {
  const bool any_offloads = std::any_of(runs.begin(), runs.end(), offloads);
  std::vector<TableRow> rows = {{"stage", "states measured", "planned", "formula", "gathered", "buckets",
                                 "wire / theory", "tokens/s", "final loss", "digest"}};
  if (any_offloads) rows.front().insert(rows.front().begin() + 4, {"offload", "host measured", "planned"});
  for (const RunReport& run : runs) {
    rows.push_back({std::to_string(run.stage), grouped(run.model_states.measured),
                    grouped(run.model_states.planned), grouped_number(model_state_formula_bytes(run)),
                    grouped(run.peak.gathered), grouped(run.peak.buckets), wire_cell(run),
                    grouped_number(run.tokens_per_second),
                    run.losses.empty() ? "-" : fixed(run.losses.back(), 6), run.digest.substr(0, 12)});
    if (any_offloads) {
      rows.back().insert(rows.back().begin() + 4,
                         {offload_cell(run), grouped(run.host.measured), grouped(run.host.planned)});
    }
  }
  return rows;
}

bool parts_layers(const RunReport& run) {
  return run.tensor_parallel > 1 || run.pipeline_parallel > 1 ||
         run.saved_device.measured + run.saved_host.measured + run.saved_file.measured > 0;
}

std::string beside(const MeasuredBytes& bytes) {
  return grouped(bytes.measured) + " / " + grouped(bytes.planned);
}

std::string tensor_cell(const RunReport& run) {
  const std::optional<double> theory = tensor_formula_bytes(run);
  if (run.tensor_parallel == 1) return "none";
  if (!theory) return grouped(run.tensor_sent_bytes_per_step);
  return grouped(run.tensor_sent_bytes_per_step) + " / " + grouped_number(*theory) + " = " +
         fixed(static_cast<double>(run.tensor_sent_bytes_per_step) / *theory, 4);
}

// The bytes of the gathers of saved inputs as a share of the bytes that tensor parallelism sends.
std::string gather_share(const RunReport& run) {
  if (run.tensor_sent_bytes_per_step == 0) return "-";
  return fixed(100.0 * static_cast<double>(run.saved_sent_per_step.measured) /
                   static_cast<double>(run.tensor_sent_bytes_per_step),
               2) +
         "%";
}

// The bytes that the ranks of one model send each other, and the saved inputs that are partitioned or
// offloaded.
void print_activation_rows(std::ostream& out, const std::vector<RunReport>& runs) {
  std::vector<TableRow> rows = {{"stage", "tensor-parallel", "its wire / theory", "recompute", "activations",
                                 "saved on device / planned", "on host / planned", "in files / planned",
                                 "gathers' wire / planned", "of tensor's", "pipeline-parallel", "its wire"}};
  for (const RunReport& run : runs) {
    if (!parts_layers(run)) continue;
    rows.push_back({std::to_string(run.stage), std::to_string(run.tensor_parallel), tensor_cell(run),
                    run.recompute, run.activations, beside(run.saved_device), beside(run.saved_host),
                    beside(run.saved_file), beside(run.saved_sent_per_step), gather_share(run),
                    std::to_string(run.pipeline_parallel), grouped(run.pipeline_sent_bytes_per_step)});
  }
  if (rows.size() == 1) return;
  out << '\n';
  out << table_text(rows);
}

void print_file_rows(std::ostream& out, const std::vector<RunReport>& runs) {
  std::vector<TableRow> rows = {{"stage", "files measured", "planned", "read/step measured", "planned",
                                 "written/step measured", "planned"}};
  std::vector<std::string> stores;
  for (const RunReport& run : runs) {
    if (run.tier != "nvme" || !offloads(run)) continue;
    rows.push_back({std::to_string(run.stage), grouped(run.file.measured), grouped(run.file.planned),
                    grouped(run.file_read_per_step.measured), grouped(run.file_read_per_step.planned),
                    grouped(run.file_written_per_step.measured), grouped(run.file_written_per_step.planned)});
    if (!run.store.empty()) stores.push_back("store of '" + run.name + "': " + run.store);
  }
  if (rows.size() == 1) return;
  out << '\n';
  out << table_text(rows);
  for (const std::string& store : stores) out << store << '\n';
}

// "seed 1 / 2, lr 0.001 / 0.01": the settings in both reports that differ.
std::string setup_difference(const RunReport& a, const RunReport& b) {
  std::string text;
  const auto compare = [&](const std::string& what, const auto& left, const auto& right) {
    if (left == right) return;
    std::ostringstream values;
    values << left << " / " << right;
    text += (text.empty() ? "" : ", ") + what + " " + values.str();
  };
  compare("world_size", a.world_size, b.world_size);
  compare("dtype", a.dtype, b.dtype);
  compare("parameters", a.parameters, b.parameters);
  compare("steps", a.steps, b.steps);
  compare("micro_steps", a.micro_steps, b.micro_steps);
  compare("accumulate", a.accumulate, b.accumulate);
  compare("optimizer", a.optimizer, b.optimizer);
  compare("moments", a.moments, b.moments);
  compare("ema", a.ema, b.ema);
  compare("master_weights", a.master_weights, b.master_weights);
  for (const auto& [name, value] : a.training) {
    const auto other = std::find_if(b.training.begin(), b.training.end(),
                                    [&name = name](const auto& entry) { return entry.first == name; });
    if (other != b.training.end()) compare(name, value, other->second);
  }
  if (text.empty()) return text;
  return "not the same training (" + text + ") in '" + a.name + "' and '" + b.name + "'";
}

Json optional_json(const std::optional<double>& value) {
  return value ? Json(*value) : Json();
}

Json measured_and_planned(const MeasuredBytes& bytes) {
  return {{"measured", bytes.measured}, {"planned", bytes.planned}};
}

bool same(double a, double b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

bool same(const std::optional<double>& a, const std::optional<double>& b) {
  return a.has_value() == b.has_value() && (!a || same(*a, *b));
}

// Compares the steps that both runs made: a resumed one has only those since. Values are compared as numbers
// read from text with 17 digits: equal text, equal bits.
template <typename T>
std::string series_difference(const char* what, const RunReport& run_a, const std::vector<T>& a,
                              const RunReport& run_b, const std::vector<T>& b) {
  const auto begin = [](const RunReport& run) { return static_cast<std::size_t>(run.first_step); };
  const std::size_t end = begin(run_a) + a.size();
  for (std::size_t step = std::max(begin(run_a), begin(run_b)); step < std::min(end, begin(run_b) + b.size());
       ++step) {
    if (!same(a[step - begin(run_a)], b[step - begin(run_b)])) {
      return std::string(what) + " differs first at step " + std::to_string(step + 1);
    }
  }
  return end == begin(run_b) + b.size() ? "" : std::string(what) + " ends at another step";
}

std::string result_difference(const RunReport& a, const RunReport& b) {
  const std::string pair = " between '" + a.name + "' and '" + b.name + "'";
  if (a.digest != b.digest) return "digest " + a.digest + " against " + b.digest + pair;
  const std::string loss = series_difference("loss", a, a.losses, b, b.losses);
  if (!loss.empty()) return loss + pair;
  const std::string norm = series_difference("grad_norm", a, a.grad_norms, b, b.grad_norms);
  return norm.empty() ? "" : norm + pair;
}

}  // namespace

double part_parameters(const RunReport& run) {
  if (run.part_parameters > 0) return static_cast<double>(run.part_parameters);
  return static_cast<double>(run.parameters) / (run.tensor_parallel * run.pipeline_parallel);
}

double model_state_formula_bytes(const RunReport& run) {
  const double psi = part_parameters(run);
  const double shard = psi / shards(run);
  // The parameters that are not offloaded.
  const double here = psi - (offloads(run) ? static_cast<double>(run.offloaded_parameters) : 0);
  const double here_shard = here / shards(run);
  const bool shard_accumulator = run.micro_steps > 1 && run.accumulate == "shard";
  const double element = run.dtype == "fp32" ? 4 : 2;
  const double moment = run.moments == "bf16" ? 2 : run.moments == "block8" ? 1 + 1 / 256.0 : 4;
  // Muon: the update of a matrix takes the place of its v.
  const double moments = run.optimizer == "adafactor"                        ? 0
                         : run.optimizer == "sgd" || run.optimizer == "lion" ? 1
                                                                             : 2;
  const bool has_master = run.dtype != "fp32" && run.master_weights;  // Else the parameter is the master.
  const double optimizer = moments * moment + (has_master ? 4 : 0) + (run.ema > 0 ? 4 : 0);
  const bool parameters_leave = run.offload == "optimizer+parameters";
  const double parameters = element * (run.stage < 3 ? psi : parameters_leave ? here_shard : shard);
  double gradients = element * (run.stage >= 2 ? here_shard : psi);
  // The fp32 accumulator of a shard stands beside whole gradients, and replaces a gradient shard. If ranks
  // update shards, the accumulator of offloaded units is on the host.
  const double accumulator = 4 * (run.stage >= 1 ? here_shard : shard);
  if (shard_accumulator) gradients = run.stage >= 2 ? accumulator : gradients + accumulator;
  return parameters + gradients + optimizer * (run.stage >= 1 ? here_shard : here);
}

double wire_formula_bytes(const RunReport& run) {
  const double bytes = part_parameters(run) * (run.dtype == "fp32" ? 4 : 2);
  const double ranks = run.data_parallel();
  const double group = run.group;
  const auto others = [](double size) { return (size - 1) / size; };
  double reduction = bytes * others(ranks);
  if (run.group > 1 || run.shard_within_group) {
    // Within groups in the gradients' type, then the sums across them, in fp32; with hybrid sharding these
    // come back too.
    const double across = 4 * part_parameters(run) * (ranks / group - 1) / ranks;
    reduction = bytes * others(group) + across * (run.shard_within_group ? 2 : 1);
  }
  const double gather = bytes * others(shards(run));
  if (run.stage >= 3) return run.micro_steps * (reduction + 2 * gather);
  return (run.accumulate == "shard" ? run.micro_steps : 1) * reduction + gather;
}

std::optional<double> tensor_formula_bytes(const RunReport& run) {
  const auto number = [&](const char* name) -> std::uint64_t {
    for (const auto& [key, value] : run.training) {
      if (key == name) return std::strtoull(value.c_str(), nullptr, 10);
    }
    return 0;
  };
  const std::optional<int> every = parse_recompute(run.recompute);
  if (run.pipeline_parallel > 1 || !every) return std::nullopt;
  const Result<ActivationFormulas> formulas = activation_formulas({.layers = number("layers"),
                                                                   .hidden = number("hidden"),
                                                                   .sequence = number("sequence"),
                                                                   .batch = number("batch"),
                                                                   .tensor_parallel = run.tensor_parallel,
                                                                   .element_bytes = sizeof(float),
                                                                   .recompute_every = *every});
  if (!formulas.ok()) return std::nullopt;
  return run.micro_steps * static_cast<double>(formulas.value().tensor_parallel_wire);
}

RunReport read_run_report(const std::string& path) {
  const Result<std::string> text = internal::read_regular_file(path, kReportBytesMax);
  if (!text.ok()) {
    throw Error(text.status().code(), "cannot read report '" + shown_path(path) +
                                          "': " + text.status().message() +
                                          "; check the name that --report was given");
  }
  RunReport run;
  try {
    run = read_run(path, Entry(parse_json(path, text.value())));
  } catch (const Entry::Unreadable& error) {
    bad_report(path, error.found);
  }
  if (run.world_size < 1) bad_report(path, "world_size is " + std::to_string(run.world_size));
  if (run.stage < 0 || run.stage > 3) bad_report(path, "stage is " + std::to_string(run.stage));
  if (run.dtype != "fp32" && run.dtype != "bf16" && run.dtype != "fp16") {
    bad_report(path, "dtype is '" + run.dtype + "'");
  }
  return run;
}

RunComparison compare_runs(const std::vector<RunReport>& runs) {
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (std::string found = setup_difference(runs[0], runs[i]); !found.empty())
      return {false, std::move(found)};
  }
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (std::string found = result_difference(runs[0], runs[i]); !found.empty())
      return {true, std::move(found)};
  }
  return {};
}

void print_report_table(std::ostream& out, const std::vector<RunReport>& runs) {
  const RunReport& first = runs.front();
  out << grouped(first.parameters) << " parameters, " << first.dtype << ", "
      << format_count(static_cast<std::uint64_t>(first.world_size), "rank") << ", "
      << format_count(static_cast<std::uint64_t>(std::max(first.steps, 0)), "step")
      << ". Bytes are those of the worst rank; wire is per step.\n\n";
  out << table_text(table_rows(runs));
  print_activation_rows(out, runs);
  print_file_rows(out, runs);
  if (runs.size() < 2) return;
  out << '\n';
  const RunComparison comparison = compare_runs(runs);
  if (!comparison.comparable) {
    out << "Not compared: " << comparison.difference << ".\n";
  } else if (!comparison.difference.empty()) {
    out << "DIFFERENT: " << comparison.difference << ".\n";
  } else {
    out << "Digests are equal (" << first.digest << "), and so is every loss and gradient norm.\n";
  }
}

void print_report_json(std::ostream& out, const std::vector<RunReport>& runs) {
  Json json;
  for (const RunReport& run : runs) {
    json["runs"].push_back(
        {{"file", run.name},
         {"world_size", run.world_size},
         {"stage", run.stage},
         {"dtype", run.dtype},
         {"parameters", run.parameters},
         {"steps", run.steps},
         {"model_state_bytes",
          {{"measured", run.model_states.measured},
           {"planned", run.model_states.planned},
           {"formula", model_state_formula_bytes(run)}}},
         {"offload", run.offload},
         {"offload_tier", run.tier},
         {"offloaded_parameters", run.offloaded_parameters},
         {"store", run.store},
         {"host_bytes", measured_and_planned(run.host)},
         {"file_bytes", measured_and_planned(run.file)},
         {"file_bytes_read_per_step", measured_and_planned(run.file_read_per_step)},
         {"file_bytes_written_per_step", measured_and_planned(run.file_written_per_step)},
         {"gathered_bytes", run.peak.gathered},
         {"bucket_bytes", run.peak.buckets},
         {"wire_bytes_per_step",
          {{"sent", run.sent_bytes_per_step},
           {"received", run.received_bytes_per_step},
           {"theory", wire_formula_bytes(run)}}},
         {"tensor_parallel", run.tensor_parallel},
         {"pipeline_parallel", run.pipeline_parallel},
         {"data_parallel", run.data_parallel()},
         {"tensor_bytes_per_step",
          {{"sent", run.tensor_sent_bytes_per_step}, {"theory", optional_json(tensor_formula_bytes(run))}}},
         {"pipeline_bytes_sent_per_step", run.pipeline_sent_bytes_per_step},
         {"recompute", run.recompute},
         {"activations", run.activations},
         {"saved_bytes",
          {{"device", measured_and_planned(run.saved_device)},
           {"host", measured_and_planned(run.saved_host)},
           {"files", measured_and_planned(run.saved_file)},
           {"sent_per_step", measured_and_planned(run.saved_sent_per_step)}}},
         {"tokens_per_second", run.tokens_per_second},
         {"final_loss", run.losses.empty() ? Json() : Json(run.losses.back())},
         {"digest", run.digest}});
  }
  const RunComparison comparison = compare_runs(runs);
  json["comparable"] = comparison.comparable;
  json["equal"] = comparison.comparable && comparison.difference.empty();
  if (!comparison.difference.empty()) json["difference"] = comparison.difference;
  // Names of files may be no UTF-8.
  out << json.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
}

}  // namespace forebay
