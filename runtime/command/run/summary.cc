#include "runtime/command/run/summary.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

#include "forebay/units.h"
#include "runtime/command/repeated_lines.h"

namespace forebay {
namespace {

struct Sum {
  std::uint64_t allocations = 0;
  std::uint64_t bytes = 0;
};

Sum sum_of(const std::vector<PreloadReport>& records, PreloadServer server) {
  Sum sum;
  for (const PreloadReport& record : records) {
    sum.allocations += record.allocations[static_cast<std::size_t>(server)];
    sum.bytes += record.bytes[static_cast<std::size_t>(server)];
  }
  return sum;
}

std::string processes(std::size_t count) {
  return count == 1 ? std::string("1 process") : std::to_string(count) + " processes";
}

void add_all(const char* what, const std::set<std::string>& ones, std::vector<std::string>* lines) {
  std::vector<RepeatedLine> repeated;
  for (const std::string& one : ones) repeated.push_back({what + one, {}});
  for (std::string& line : told_once(repeated)) lines->push_back(std::move(line));
}

}  // namespace

std::vector<std::string> run_summary(PreloadMode mode, const std::vector<PreloadReport>& records) {
  if (records.empty()) {
    return {
        "handled 0 of 0 allocations: no process of the command has used CUDA under the preload (static and "
        "set-uid programs, and programs without LD_PRELOAD, run without it; forebay's own programs have "
        "their own arena), or no process could write its record, which another line then says (for a process "
        "of another user, give --records a directory with mode 1777)"};
  }
  Sum all;
  for (std::size_t i = 0; i < kPreloadServerCount; ++i) {
    const Sum one = sum_of(records, static_cast<PreloadServer>(i));
    all.allocations += one.allocations;
    all.bytes += one.bytes;
  }
  std::uint64_t peak = 0;
  std::uint64_t refused = 0;
  std::uint64_t unknown_frees = 0;
  std::set<std::string> around, problems;
  for (const PreloadReport& record : records) {
    peak = std::max(peak, record.peak_live_bytes);
    refused += record.refused;
    unknown_frees += record.unknown_frees;
    if (!record.around.empty()) around.insert(record.around);
    if (!record.problem.empty()) problems.insert(record.problem);
  }
  std::vector<std::string> lines;
  if (mode == PreloadMode::kObserve) {
    lines.push_back("observed " + std::to_string(all.allocations) + " allocations, " +
                    format_bytes(all.bytes) + ", in " + processes(records.size()));
  } else {
    const Sum handled = sum_of(records, PreloadServer::kArena);
    lines.push_back("handled " + std::to_string(handled.allocations) + " of " +
                    std::to_string(all.allocations) + " allocations, " + format_bytes(handled.bytes) +
                    " of " + format_bytes(all.bytes) + ", in " + processes(records.size()) + "; at most " +
                    format_bytes(peak) + " live in one");
  }
  for (std::size_t i = 0; i < kPreloadServerCount; ++i) {
    const auto server = static_cast<PreloadServer>(i);
    const Sum one = sum_of(records, server);
    if (server == PreloadServer::kArena || server == PreloadServer::kObserved || one.allocations == 0)
      continue;
    lines.push_back("not handled: " + std::to_string(one.allocations) + ", " + format_bytes(one.bytes) +
                    ": " + preload_server_text(server));
  }
  if (refused != 0) lines.push_back("refused because memory ran out: " + std::to_string(refused));
  add_all("problem in a process: ", problems, &lines);
  if (unknown_frees != 0) {
    lines.push_back("freed without a recorded allocation: " + std::to_string(unknown_frees) +
                    "; a library allocates around the hook");
  }
  add_all("reached the driver past the hook: ", around, &lines);
  return lines;
}

}  // namespace forebay
