#include "runtime/command/state/state_print.h"

#include <nlohmann/json.hpp>

#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/text_table.h"

namespace forebay {
namespace {

using Json = nlohmann::ordered_json;

// Wider: a row with a shape of four dimensions does not fit into kTableWidth.
constexpr std::size_t kNameColumns = 40;
// The rest of a state's text; a trainer may save anything.
constexpr std::size_t kTrainerColumns = 300;

// "[256, 64]".
std::string shape_text(const SavedParameter& parameter) {
  if (!parameter.has_shape) return "-";
  std::string text;
  for (const std::uint64_t extent : parameter.shape)
    text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "[" + text + "]";
}

std::uint64_t file_bytes(const SavedStateFacts& facts) {
  std::uint64_t bytes = 0;
  for (const SavedFile& file : facts.files) bytes += file.bytes;
  return bytes;
}

std::string row(const char* label, const std::string& text) {
  constexpr std::size_t kLabelColumns = 12;
  std::string line = label;
  line.resize(kLabelColumns, ' ');
  return line + wrap_text(text, kTableWidth, kLabelColumns) + "\n";
}

// The ends of characters in UTF-8.
std::vector<std::size_t> character_ends(const std::string& text) {
  std::vector<std::size_t> ends;
  for (std::size_t at = 0; at < text.size();) {
    std::uint32_t character = 0;
    const std::size_t length = utf8_length(std::string_view(text).substr(at), &character);
    at += length == 0 ? 1 : length;
    ends.push_back(at);
  }
  return ends;
}

}  // namespace

std::string shortened_name(const std::string& name, std::size_t columns) {
  const std::string shown = shown_text(name);
  const std::vector<std::size_t> ends = character_ends(shown);
  if (ends.size() <= columns) return shown;
  const std::size_t head = (columns - 3) / 3;
  const std::size_t tail = columns - 3 - head;
  return shown.substr(0, ends[head - 1]) + "..." + shown.substr(ends[ends.size() - tail - 1]);
}

std::string state_size_text(const SavedStateFacts& facts) {
  return format_count(facts.files.size(), "file") + ", " + format_bytes(file_bytes(facts)) + "; " +
         format_count(facts.parameters.size(), "parameter");
}

std::string state_text(const SavedStateFacts& facts, const std::vector<std::string>& names) {
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
  for (const SavedParameter& parameter : facts.parameters) {
    elements += parameter.count;
    bytes += parameter.bytes();
  }
  std::string text;
  text += row("state", shown_text(facts.path));
  text +=
      row("step", grouped(facts.attempted_steps) + ", " + grouped(facts.applied_steps) + " of them applied");
  text += row("saved by", format_count(static_cast<std::uint64_t>(facts.ranks), "rank") + " at ZeRO stage " +
                              std::to_string(facts.stage) + " in " + shown_text(facts.dtype));
  if (facts.dtype == "fp16") text += row("loss scale", format_text("%.9g", facts.loss_scale));
  text += row("files", format_count(facts.files.size(), "file") + ", " + format_bytes(file_bytes(facts)));
  text += row("parameters", format_count(facts.parameters.size(), "parameter") + " of " + grouped(elements) +
                                " elements; weights, m and v in fp32 take " + format_bytes(bytes));
  const std::string trainer = shown_text(facts.trainer_state.substr(0, kTrainerColumns));
  text += row("trainer", trainer.empty() ? "-" : trainer);
  if (names.size() > 1) {
    std::string kept;
    for (const std::string& name : names) kept += (kept.empty() ? "" : ", ") + name;
    text += row("kept states", kept);
  }
  std::vector<TableRow> rows = {{"parameter", "shape", "elements", "bytes"}};
  for (const SavedParameter& parameter : facts.parameters) {
    rows.push_back({shortened_name(parameter.name, kNameColumns) + (parameter.frozen ? " (frozen)" : ""),
                    shape_text(parameter), grouped(parameter.count), grouped(parameter.bytes())});
  }
  return text + "\n" + table_text(rows);
}

std::string state_json(const SavedStateFacts& facts, const std::vector<std::string>& names) {
  Json files = Json::array();
  for (const SavedFile& file : facts.files) files.push_back({{"name", file.name}, {"bytes", file.bytes}});
  Json parameters = Json::array();
  for (const SavedParameter& parameter : facts.parameters) {
    parameters.push_back({{"name", parameter.name},
                          {"shape", parameter.has_shape ? Json(parameter.shape) : Json(nullptr)},
                          {"elements", parameter.count},
                          {"bytes", parameter.bytes()},
                          {"frozen", parameter.frozen}});
  }
  const Json json = {{"path", facts.path},
                     {"step", facts.attempted_steps},
                     {"applied_steps", facts.applied_steps},
                     {"loss_scale", facts.loss_scale},
                     {"ranks", facts.ranks},
                     {"stage", facts.stage},
                     {"dtype", facts.dtype},
                     {"trainer_state", facts.trainer_state},
                     {"kept_states", names},
                     {"files", files},
                     {"parameters", parameters}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace forebay
