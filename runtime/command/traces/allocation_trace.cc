#include "runtime/command/traces/allocation_trace.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/traces/pickle_reader.h"
#include "runtime/command/traces/rmm_log.h"
#include "runtime/command/traces/text_trace.h"
#include "runtime/command/traces/torch_snapshot.h"

namespace forebay {

// --- the trace ---

std::uint64_t AllocationTrace::peak_requested_bytes() const {
  std::uint64_t live = 0;
  std::uint64_t peak = 0;
  for (const TraceEvent& event : events) {
    const std::uint64_t bytes = blocks[event.block].bytes;
    live = event.is_free ? live - bytes : live + bytes;
    peak = std::max(peak, live);
  }
  return peak;
}

std::size_t AllocationTrace::peak_event() const {
  std::uint64_t live = 0;
  std::uint64_t peak = 0;
  std::size_t found = 0;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const std::uint64_t bytes = blocks[events[i].block].bytes;
    live = events[i].is_free ? live - bytes : live + bytes;
    if (live <= peak) continue;
    peak = live;
    found = i;
  }
  return found;
}

// --- building one ---

std::uint32_t TraceBuilder::dense_stream(std::uint64_t stream) {
  const auto next = static_cast<std::uint32_t>(std::min<std::size_t>(streams_.size(), kTraceStreamLimit - 1));
  return streams_.emplace(stream, next).first->second;
}

TraceBuilder::Outcome TraceBuilder::allocate(std::uint64_t id, std::uint64_t bytes, std::uint64_t stream,
                                             std::uint32_t holder) {
  if (live_.contains(id)) return Outcome::kIsLive;
  if (bytes > kTraceBlockLimit || live_bytes_ > kTraceBlockLimit - bytes) return Outcome::kTooLarge;
  if (trace_.events.size() >= kTraceEventLimit) return Outcome::kTooMany;
  const auto block = static_cast<std::uint32_t>(trace_.blocks.size());
  const std::uint32_t dense = dense_stream(stream);
  trace_.blocks.push_back({.bytes = bytes, .stream = dense, .holder = holder});
  trace_.events.push_back({.block = block, .stream = dense, .is_free = false});
  live_.emplace(id, block);
  live_bytes_ += bytes;
  return Outcome::kTaken;
}

TraceBuilder::Outcome TraceBuilder::free(std::uint64_t id, std::optional<std::uint64_t> stream) {
  const auto found = live_.find(id);
  if (found == live_.end()) return Outcome::kUnknown;
  if (trace_.events.size() >= kTraceEventLimit) return Outcome::kTooMany;
  const TraceBlock& block = trace_.blocks[found->second];
  trace_.events.push_back(
      {.block = found->second, .stream = stream ? dense_stream(*stream) : block.stream, .is_free = true});
  live_bytes_ -= block.bytes;
  live_.erase(found);
  return Outcome::kTaken;
}

TraceBuilder::Outcome TraceBuilder::fail(std::uint64_t bytes, std::uint64_t stream, std::uint32_t holder,
                                         std::optional<std::uint64_t> device_free_bytes) {
  if (bytes > kTraceBlockLimit || live_bytes_ > kTraceBlockLimit - bytes) return Outcome::kTooLarge;
  if (trace_.events.size() + 1 >= kTraceEventLimit) return Outcome::kTooMany;
  const auto block = static_cast<std::uint32_t>(trace_.blocks.size());
  const std::uint32_t dense = dense_stream(stream);
  trace_.failure =
      RecordedFailure{.bytes = bytes, .device_free_bytes = device_free_bytes, .event = trace_.events.size()};
  trace_.blocks.push_back({.bytes = bytes, .stream = dense, .holder = holder, .failed = true});
  trace_.events.push_back({.block = block, .stream = dense, .is_free = false});
  trace_.events.push_back({.block = block, .stream = dense, .is_free = true});
  return Outcome::kTaken;
}

std::uint32_t TraceBuilder::holder(std::string name) {
  if (name.empty()) return 0;
  const auto [found, is_new] =
      holder_indices_.emplace(std::move(name), static_cast<std::uint32_t>(trace_.holders.size()));
  if (is_new) trace_.holders.push_back(found->first);
  return found->second;
}

AllocationTrace TraceBuilder::finish() {
  trace_.stream_count = static_cast<std::uint32_t>(std::min<std::size_t>(streams_.size(), kTraceStreamLimit));
  if (streams_.size() > kTraceStreamLimit) {
    trace_.notes.push_back(std::to_string(streams_.size()) + " streams; those beyond " +
                           std::to_string(kTraceStreamLimit) + " are taken as one");
  }
  return std::move(trace_);
}

std::string describe_outcome(TraceBuilder::Outcome outcome, const std::string& id, std::uint64_t bytes) {
  switch (outcome) {
    case TraceBuilder::Outcome::kTaken:
      break;
    case TraceBuilder::Outcome::kIsLive:
      return "block " + id + " is live already; free it first, or give the new one another id";
    case TraceBuilder::Outcome::kUnknown:
      return "block " + id + " is freed, but no such block is live; allocate it first, and free it once";
    case TraceBuilder::Outcome::kTooLarge:
      return format_bytes(bytes) + " more would be live than " + format_bytes(kTraceBlockLimit) +
             ", which no device has; check the size";
    case TraceBuilder::Outcome::kTooMany:
      return "there are more than " + std::to_string(kTraceEventLimit) +
             " events; cut the recording into pieces";
  }
  return "";
}

// --- reading text ---

bool LineReader::next(std::string_view* line) {
  if (rest_.empty()) return false;
  const std::size_t end = rest_.find('\n');
  *line = rest_.substr(0, end);
  rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 1);
  if (!line->empty() && line->back() == '\r') line->remove_suffix(1);
  ++number_;
  return true;
}

bool parse_number(std::string_view text, int base, std::uint64_t* value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value, base);
  return !text.empty() && error == std::errc() && stop == end;
}

std::string quote_text(std::string_view text) {
  constexpr std::size_t kLimit = 40;
  std::string quoted(text.substr(0, kLimit));
  for (char& c : quoted) {
    if (c < ' ' || c > '~') c = '?';
  }
  return "'" + quoted + (text.size() > kLimit ? "...'" : "'");
}

// --- files ---

namespace {

std::string hint_of(std::string_view text) {
  const auto begins = [&](std::string_view start) { return text.substr(0, start.size()) == start; };
  if (text.empty()) return "it is empty";
  if (begins("PK")) return "it is a zip archive (torch.save makes one; a snapshot is written by pickle.dump)";
  if (begins("\x1f\x8b")) return "it is compressed; unpack it first";
  if (begins("{") || begins("[")) return "it looks like JSON";
  if (begins("\x80") && text.size() > 1) {
    return "it is a pickle of protocol " + std::to_string(static_cast<unsigned char>(text[1])) +
           ", and protocols 2 to 5 are read; write it again with pickle.dump(snapshot, file, protocol=4)";
  }
  if (const std::optional<int> protocol = old_pickle_protocol(text)) {
    return "it is a pickle of protocol " + std::to_string(*protocol) +
           ", and protocols 2 to 5 are read: torch.cuda.memory._dump_snapshot writes one of these, and so "
           "does pickle.dump(snapshot, file, protocol=4)";
  }
  std::string_view line;
  LineReader(text).next(&line);
  return "it begins with " + quote_text(line);
}

}  // namespace

Result<std::vector<AllocationTrace>> parse_allocation_traces(std::string_view text, const std::string& name) {
  const auto one = [](Result<AllocationTrace> trace) -> Result<std::vector<AllocationTrace>> {
    if (!trace.ok()) return trace.status();
    std::vector<AllocationTrace> traces;
    traces.push_back(std::move(trace).value());
    return traces;
  };
  if (is_torch_snapshot(text)) return parse_torch_snapshot(text, name);
  if (is_rmm_log(text)) return one(parse_rmm_log(text, name));
  if (is_text_trace(text)) return one(parse_text_trace(text, name));
  return Status(StatusCode::kInvalidArgument,
                "cannot read '" + name + "' as a trace: " + hint_of(text) +
                    "; give a text trace (lines 'a ID BYTES STREAM' and 'f ID'), a PyTorch memory snapshot "
                    "(.pickle) or an RMM log (.csv)");
}

Result<std::vector<AllocationTrace>> read_allocation_traces(const std::string& path) {
  const auto refusal = [&](const std::string& found_and_try) {
    return Status(StatusCode::kIoError, "cannot read '" + shown_path(path) + "': " + found_and_try);
  };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (file == nullptr) return refusal(std::string(std::strerror(errno)) + "; check the path");
  // The size of a pipe or terminal is known only at its end.
  struct stat facts {};
  const bool is_known = ::fstat(::fileno(file.get()), &facts) == 0;
  if (is_known && (S_ISBLK(facts.st_mode) || (S_ISCHR(facts.st_mode) && ::isatty(::fileno(file.get())) == 0)))
    return refusal("it is a device; give a file or a pipe");
  const bool has_size = is_known && S_ISREG(facts.st_mode);
  const std::uint64_t file_bytes = has_size ? static_cast<std::uint64_t>(facts.st_size) : 0;
  const auto too_large = [&] {
    return refusal("it has " + (has_size ? format_bytes(file_bytes) : "more") + ", and at most " +
                   format_bytes(kTraceFileLimit) +
                   " are read; record less history (max_entries) or cut it into pieces");
  };
  if (file_bytes > kTraceFileLimit) return too_large();
  try {
    std::string text;
    text.reserve(file_bytes);
    char part[1 << 16];
    errno = 0;
    for (std::size_t count; (count = std::fread(part, 1, sizeof(part), file.get())) > 0;) {
      if (text.size() + count > kTraceFileLimit) return too_large();
      text.append(part, count);
    }
    if (std::ferror(file.get()) != 0) return refusal(std::string(std::strerror(errno)) + "; give a file");
    const std::size_t slash = path.find_last_of('/');
    return parse_allocation_traces(text, slash == std::string::npos ? path : path.substr(slash + 1));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  "cannot read '" + shown_path(path) + "': the host has no memory for its " +
                      format_bytes(file_bytes) +
                      " and the trace in them; free host memory, raise the limit of this process (ulimit "
                      "-v), or record less history (max_entries)");
  }
}

}  // namespace forebay
