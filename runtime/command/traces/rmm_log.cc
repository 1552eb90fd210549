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

void split_fields(std::string_view line, std::vector<std::string_view>* fields) {
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
  split_fields(header, &fields);
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
  std::size_t line = 0;  // Its number.
};

class RmmLog {
 public:
  explicit RmmLog(const std::string& name) : name_(name) {}

  Status read(std::string_view text) {
    LineReader lines(text);
    std::string_view line;
    if (!next_content(lines, &line))
      return refuse_at(lines.number(), "it is empty; give a log with a header");
    const std::optional<std::vector<std::size_t>> columns = find_columns(line);
    if (!columns) {
      return refuse_at(lines.number(),
                       "the header has no Action, Pointer, Size and Stream; give RMM's own CSV");
    }
    std::vector<std::string_view> fields;
    while (next_content(lines, &line)) {
      split_fields(line, &fields);
      Row row{};
      row.line = lines.number();
      if (const std::string problem = read_row(fields, *columns, &row); !problem.empty()) {
        return refuse_at(row.line, problem);
      }
      if (rows_.size() >= kTraceEventLimit) {
        return refuse_at(row.line, describe_outcome(Outcome::kTooMany, "", 0));
      }
      rows_.push_back(row);
    }
    return Status();
  }

  // Blocks that are freed before they are allocated.
  void find_warm() {
    std::unordered_set<std::uint64_t> seen;
    for (const Row& row : rows_) {
      if (row.action == Row::Action::kFailure || row.pointer == 0) continue;
      if (seen.insert(row.pointer).second && row.action == Row::Action::kFree) warm_.push_back(row);
    }
    std::sort(warm_.begin(), warm_.end(), [](const Row& a, const Row& b) { return a.pointer < b.pointer; });
  }

  Status play() {
    for (const Row& row : warm_) {
      const Outcome outcome = builder_.allocate(row.pointer, row.bytes, row.stream);
      if (outcome != Outcome::kTaken) return refuse_at(0, describe_outcome(outcome, "", row.bytes));
    }
    builder_.end_warm();
    for (const Row& row : rows_) {
      const Outcome outcome = play_row(row);
      if (outcome != Outcome::kTaken) return refuse_at(row.line, describe_outcome(outcome, "", row.bytes));
    }
    return Status();
  }

  Result<AllocationTrace> finish() {
    AllocationTrace trace = builder_.finish();
    if (trace.events.empty()) {
      return refuse(
          "no line after its header is about an allocation, so there is nothing to replay; log while the "
          "program allocates, and flush or end it before");
    }
    trace.name = name_;
    trace.format = "RMM log";
    const auto note = [&](std::size_t count, const char* noun, const char* how) {
      if (count > 0) trace.notes.push_back(format_count(count, noun) + " " + how);
    };
    note(warm_.size(), "block", "freed without having been allocated: taken as live before the log began");
    note(null_count_, "line", "about a null pointer: left out");
    note(twice_count_, "allocation", "of an address that is live: the earlier block taken as freed there");
    note(unknown_count_, "free", "of a block that was freed already: left out");
    note(failure_count_, "request", "that failed when recorded: played as allocated and freed at once");
    return trace;
  }

 private:
  using Outcome = TraceBuilder::Outcome;

  Status refuse(const std::string& found_and_try) const {
    return {StatusCode::kInvalidArgument, "cannot read '" + name_ + "' as an RMM log: " + found_and_try};
  }
  Status refuse_at(std::size_t line, const std::string& found_and_try) const {
    return refuse("line " + std::to_string(line) + ": " + found_and_try);
  }

  // Returns the finding and a remedy for a line that cannot be read.
  static std::string read_row(const std::vector<std::string_view>& fields,
                              const std::vector<std::size_t>& columns, Row* row) {
    const std::size_t field_count = *std::max_element(columns.begin(), columns.end()) + 1;
    if (fields.size() < field_count) {
      return "found " + std::to_string(fields.size()) + " of " + format_count(field_count, "field") +
             "; is the file cut off?";
    }
    const auto field = [&](Column column) { return fields[columns[column]]; };
    if (field(kAction) == "allocate") {
      row->action = Row::Action::kAllocate;
    } else if (field(kAction) == "free" || field(kAction) == "deallocate") {
      row->action = Row::Action::kFree;
    } else if (field(kAction) == "allocate failure") {
      row->action = Row::Action::kFailure;
    } else {
      return "the action is " + quote_text(field(kAction)) + "; use allocate, free or allocate failure";
    }
    if (row->action != Row::Action::kFailure && !parse_address(field(kPointer), &row->pointer)) {
      return "the pointer is " + quote_text(field(kPointer)) + "; use 0x and hexadecimal digits";
    }
    if (!parse_number(field(kSize), 10, &row->bytes) || row->bytes > kTraceBlockLimit) {
      return "the size is " + quote_text(field(kSize)) + "; use bytes from 0 to 2^46";
    }
    if (!parse_address(field(kStream), &row->stream)) {
      return "the stream is " + quote_text(field(kStream)) + "; use a number";
    }
    return "";
  }

  Outcome play_row(const Row& row) {
    if (row.action == Row::Action::kFailure) {
      ++failure_count_;
      return builder_.fail(row.bytes, row.stream, 0, std::nullopt);
    }
    if (row.pointer == 0) {
      ++null_count_;
      return Outcome::kTaken;
    }
    const bool is_live = builder_.is_live(row.pointer);
    if (row.action == Row::Action::kFree) {
      if (is_live) return builder_.free(row.pointer, row.stream);
      ++unknown_count_;
      return Outcome::kTaken;
    }
    if (is_live) {
      ++twice_count_;
      const Outcome outcome = builder_.free(row.pointer, row.stream);
      if (outcome != Outcome::kTaken) return outcome;
    }
    return builder_.allocate(row.pointer, row.bytes, row.stream);
  }

  const std::string& name_;
  std::vector<Row> rows_;
  std::vector<Row> warm_;  // In address order.
  TraceBuilder builder_;
  std::size_t null_count_ = 0;
  std::size_t twice_count_ = 0;
  std::size_t unknown_count_ = 0;
  std::size_t failure_count_ = 0;
};

}  // namespace

bool is_rmm_log(std::string_view text) {
  LineReader lines(text);
  std::string_view line;
  return next_content(lines, &line) && find_columns(line).has_value();
}

Result<AllocationTrace> parse_rmm_log(std::string_view text, const std::string& name) {
  // Blocks from before the log are known only when they are freed, and must come first. So all rows are read,
  // and then played.
  RmmLog log(name);
  FOREBAY_RETURN_IF_ERROR(log.read(text));
  log.find_warm();
  FOREBAY_RETURN_IF_ERROR(log.play());
  return log.finish();
}

}  // namespace forebay
