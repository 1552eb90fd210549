#include "runtime/command/traces/rmm_log.h"

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <vector>

#include "forebay/units.h"

namespace forebay {
namespace {

constexpr std::size_t kColumnLimit = 32;  // RMM writes six.

enum Column : std::uint8_t { kAction, kPointer, kSize, kStream, kColumnCount };
constexpr std::string_view kColumnNames[kColumnCount] = {"Action", "Pointer", "Size", "Stream"};

std::string_view trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t' || text.front() == '"')) {
    text.remove_prefix(1);
  }
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t' || text.back() == '"')) {
    text.remove_suffix(1);
  }
  return text;
}

void split(std::string_view line, std::vector<std::string_view>* fields) {
  fields->clear();
  while (fields->size() < kColumnLimit) {
    const std::size_t comma = line.find(',');
    fields->push_back(trim(line.substr(0, comma)));
    if (comma == std::string_view::npos) return;
    line.remove_prefix(comma + 1);
  }
}

// Where each column is. Empty if one is missing.
std::optional<std::vector<std::size_t>> find_columns(std::string_view header) {
  std::vector<std::string_view> fields;
  split(header, &fields);
  std::vector<std::size_t> columns;
  for (const std::string_view name : kColumnNames) {
    const auto found = std::find(fields.begin(), fields.end(), name);
    if (found == fields.end()) return std::nullopt;
    columns.push_back(static_cast<std::size_t>(found - fields.begin()));
  }
  return columns;
}

bool next_content(LineReader& lines, std::string_view* line) {
  while (lines.next(line)) {
    if (!trim(*line).empty()) return true;
  }
  return false;
}

// "0x7f00", "(nil)", "0": addresses are hexadecimal, with or without 0x.
bool parse_address(std::string_view text, std::uint64_t* value) {
  if (text == "(nil)" || text == "nullptr") {
    *value = 0;
    return true;
  }
  if (text.size() > 2 && text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) text.remove_prefix(2);
  return parse_number(text, 16, value);
}

struct Row {
  enum class Action : std::uint8_t { kAllocate, kFree, kFailure } action;
  std::uint64_t pointer = 0;
  std::uint64_t bytes = 0;
  std::uint64_t stream = 0;
};

}  // namespace

bool is_rmm_log(std::string_view text) {
  LineReader lines(text);
  std::string_view line;
  return next_content(lines, &line) && find_columns(line).has_value();
}

Result<AllocationTrace> parse_rmm_log(std::string_view text, const std::string& name) {
  LineReader lines(text);
  std::string_view line;
  const auto refusal = [&](const std::string& found_and_try) {
    return Status(StatusCode::kInvalidArgument, "cannot read '" + name + "' as an RMM log: line " +
                                                    std::to_string(lines.number()) + ": " + found_and_try);
  };
  if (!next_content(lines, &line)) return refusal("it is empty; give a log with a header");
  const std::optional<std::vector<std::size_t>> columns = find_columns(line);
  if (!columns) return refusal("the header has no Action, Pointer, Size and Stream; give RMM's own CSV");
  const std::size_t field_count = *std::max_element(columns->begin(), columns->end()) + 1;

  // What was live before is known only when it is freed, and must come first; so rows are read, then played.
  std::vector<Row> rows;
  std::vector<std::size_t> numbers;  // Of the lines.
  std::vector<std::string_view> fields;
  while (next_content(lines, &line)) {
    split(line, &fields);
    if (fields.size() < field_count) {
      return refusal("found " + std::to_string(fields.size()) + " of " + format_count(field_count, "field") +
                     "; is the file cut off?");
    }
    const auto field = [&](Column column) { return fields[(*columns)[column]]; };
    Row row{};
    if (field(kAction) == "allocate") {
      row.action = Row::Action::kAllocate;
    } else if (field(kAction) == "free" || field(kAction) == "deallocate") {
      row.action = Row::Action::kFree;
    } else if (field(kAction) == "allocate failure") {
      row.action = Row::Action::kFailure;
    } else {
      return refusal("the action is " + quote_text(field(kAction)) +
                     "; use allocate, free or allocate failure");
    }
    if (row.action != Row::Action::kFailure && !parse_address(field(kPointer), &row.pointer)) {
      return refusal("the pointer is " + quote_text(field(kPointer)) + "; use 0x and hexadecimal digits");
    }
    if (!parse_number(field(kSize), 10, &row.bytes) || row.bytes > kTraceBlockLimit) {
      return refusal("the size is " + quote_text(field(kSize)) + "; use bytes from 0 to 2^46");
    }
    if (!parse_address(field(kStream), &row.stream)) {
      return refusal("the stream is " + quote_text(field(kStream)) + "; use a number");
    }
    if (rows.size() >= kTraceEventLimit) {
      return refusal(describe_outcome(TraceBuilder::Outcome::kTooMany, "", 0));
    }
    rows.push_back(row);
    numbers.push_back(lines.number());
  }

  // Warm: freed before it is allocated.
  std::vector<Row> warm;
  std::unordered_set<std::uint64_t> seen;
  for (const Row& row : rows) {
    if (row.action == Row::Action::kFailure || row.pointer == 0) continue;
    if (seen.insert(row.pointer).second && row.action == Row::Action::kFree) warm.push_back(row);
  }
  std::sort(warm.begin(), warm.end(), [](const Row& a, const Row& b) { return a.pointer < b.pointer; });

  TraceBuilder builder;
  std::size_t number = 0;
  const auto refuse_at = [&](TraceBuilder::Outcome outcome, std::uint64_t bytes) {
    return Status(StatusCode::kInvalidArgument, "cannot read '" + name + "' as an RMM log: line " +
                                                    std::to_string(number) + ": " +
                                                    describe_outcome(outcome, "", bytes));
  };
  using Outcome = TraceBuilder::Outcome;
  for (const Row& row : warm) {
    const Outcome outcome = builder.allocate(row.pointer, row.bytes, row.stream);
    if (outcome != Outcome::kTaken) return refuse_at(outcome, row.bytes);
  }
  builder.end_warm();

  std::size_t null_count = 0;
  std::size_t twice_count = 0;
  std::size_t unknown_count = 0;
  std::size_t failure_count = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    number = numbers[i];
    Outcome outcome = Outcome::kTaken;
    if (row.action == Row::Action::kFailure) {
      ++failure_count;
      outcome = builder.fail(row.bytes, row.stream, 0, std::nullopt);
    } else if (row.pointer == 0) {
      ++null_count;
    } else if (row.action == Row::Action::kAllocate) {
      if (builder.is_live(row.pointer)) {
        ++twice_count;
        outcome = builder.free(row.pointer, row.stream);
      }
      if (outcome == Outcome::kTaken) outcome = builder.allocate(row.pointer, row.bytes, row.stream);
    } else if (builder.is_live(row.pointer)) {
      outcome = builder.free(row.pointer, row.stream);
    } else {
      ++unknown_count;
    }
    if (outcome != Outcome::kTaken) return refuse_at(outcome, row.bytes);
  }

  AllocationTrace trace = builder.finish();
  if (trace.events.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot read '" + name +
                      "' as an RMM log: no line after its header is about an allocation, so there is nothing "
                      "to replay; log while the program allocates, and flush or end it before");
  }
  trace.name = name;
  trace.format = "RMM log";
  const auto note = [&](std::size_t count, const char* what, const char* how) {
    if (count > 0) trace.notes.push_back(format_count(count, what) + " " + how);
  };
  note(warm.size(), "block", "freed without having been allocated: taken as live before the log began");
  note(null_count, "line", "about a null pointer: left out");
  note(twice_count, "allocation", "of an address that is live: the earlier block taken as freed there");
  note(unknown_count, "free", "of what was freed already: left out");
  note(failure_count, "request", "that failed when recorded: played as allocated and freed at once");
  return trace;
}

}  // namespace forebay
