#include "runtime/command/traces/text_trace.h"

#include <array>
#include <string>

namespace forebay {
namespace {

constexpr std::size_t kWordLimit = 5;  // One more than the longest line has, so that a further word shows.

// The words of a line; at most kWordLimit of them.
std::size_t split_words(std::string_view line, std::array<std::string_view, kWordLimit>* words) {
  std::size_t count = 0;
  while (count < kWordLimit) {
    const std::size_t begin = line.find_first_not_of(" \t");
    if (begin == std::string_view::npos) break;
    line.remove_prefix(begin);
    const std::size_t end = line.find_first_of(" \t");
    (*words)[count++] = line.substr(0, end);
    line.remove_prefix(end == std::string_view::npos ? line.size() : end);
  }
  return count;
}

}  // namespace

bool is_text_trace(std::string_view text) {
  LineReader lines(text);
  std::string_view line;
  while (lines.next(&line)) {
    std::array<std::string_view, kWordLimit> words;
    if (split_words(line, &words) == 0 || words[0][0] == '#') continue;
    return words[0] == "a" || words[0] == "f";
  }
  return false;
}

Result<AllocationTrace> parse_text_trace(std::string_view text, const std::string& name) {
  TraceBuilder builder;
  LineReader lines(text);
  std::string_view line;
  bool has_warm = false;
  const auto refusal = [&](const std::string& found_and_try) {
    return Status(StatusCode::kInvalidArgument, "cannot read '" + name + "' as a text trace: line " +
                                                    std::to_string(lines.number()) + ": " + found_and_try);
  };
  while (lines.next(&line)) {
    std::array<std::string_view, kWordLimit> words;
    const std::size_t count = split_words(line, &words);
    if (count == 0) continue;
    if (words[0][0] == '#') {
      if (count != 2 || words[0] != "#" || words[1] != "warm") continue;
      if (has_warm) return refusal("'# warm' for the second time; leave one of them out");
      if (builder.live_count() != builder.trace().events.size()) {
        return refusal(
            "a block is freed before '# warm'; write there only the blocks that were live before the "
            "recording");
      }
      has_warm = true;
      builder.end_warm();
      continue;
    }
    const bool allocates = words[0] == "a" && count == 4;
    if (!allocates && !(words[0] == "f" && count == 2)) {
      return refusal("found " + quote_text(line) + "; use 'a ID BYTES STREAM', 'f ID' or '# warm'");
    }
    std::uint64_t numbers[3] = {};
    for (std::size_t i = 1; i < count; ++i) {
      if (parse_number(words[i], 10, &numbers[i - 1])) continue;
      constexpr const char* kNames[] = {"the id", "the size in bytes", "the stream"};
      return refusal(std::string(kNames[i - 1]) + " is " + quote_text(words[i]) +
                     "; use a decimal number from 0 to 2^64 - 1");
    }
    const TraceBuilder::Outcome outcome =
        allocates ? builder.allocate(numbers[0], numbers[1], numbers[2]) : builder.free(numbers[0]);
    if (outcome != TraceBuilder::Outcome::kTaken) {
      return refusal(describe_outcome(outcome, std::to_string(numbers[0]), numbers[1]));
    }
  }
  AllocationTrace trace = builder.finish();
  trace.name = name;
  trace.format = "text trace";
  return trace;
}

}  // namespace forebay
