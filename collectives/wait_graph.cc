#include "collectives/wait_graph.h"

#include <algorithm>
#include <map>

#include "collectives/fingerprint.h"

namespace forebay::internal {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::nanoseconds kValidityMax = 1s;
constexpr int kReportsPerValidity = 8;
// Ranks of a circle that a message shows.
constexpr std::size_t kShownMax = 4;

// A rank that was reached in the graph, and the waits that lead on from it.
struct Node {
  int rank;
  std::vector<Wait> waits;
};

std::string failing(const std::vector<int>& ranks, const Wait& wait) {
  return rank_list(ranks) + (wait.came ? " did not finish" : " did not join");
}

std::string milliseconds_text(std::chrono::milliseconds duration) {
  return std::to_string(duration.count()) + " ms";
}

constexpr char kAdvice[] = "; look there for the reason, or raise the deadline";

Status direct_timeout(int rank, const Wait& wait, const std::vector<int>& blocking,
                      std::chrono::milliseconds deadline) {
  return Status(StatusCode::kTimeout, wait.what, " on rank ", rank, ": ", failing(blocking, wait), " within ",
                milliseconds_text(deadline), kAdvice);
}

// `rank` in `wait` was blocked by `node` in `its_wait`, which was blocked by the ranks `blocking`.
Status indirect_timeout(int rank, const Wait& wait, const Node& node, const Wait& its_wait,
                        const std::vector<int>& blocking, std::chrono::milliseconds deadline) {
  return Status(StatusCode::kTimeout, its_wait.what, " on rank ", node.rank, ": ",
                failing(blocking, its_wait), "; this blocked rank ", rank, " in ", wait.what, " for ",
                milliseconds_text(deadline), kAdvice);
}

Status deadlock(const std::vector<Node>& nodes) {
  std::string text = "ranks wait for each other (deadlock): ";
  for (std::size_t i = 0; i < nodes.size() && i < kShownMax; ++i) {
    const Wait& wait = nodes[i].waits.front();
    text += (i == 0 ? "rank " : ", rank ") + std::to_string(nodes[i].rank) + " in " + wait.what + " for " +
            rank_list(wait.ranks);
  }
  if (nodes.size() > kShownMax) text += ", and others";
  return invalid_argument(text, "; every rank must issue the same operations in the same order");
}

// A short wait says nothing: the rank was late before it, or it exchanges heartbeats.
std::vector<Wait> long_waits(int rank, std::chrono::milliseconds deadline, const WaitsOf& waits_of) {
  std::vector<Wait> waits = waits_of(rank);
  std::erase_if(waits, [&](const Wait& wait) { return wait.age < wait_reporting(deadline).validity; });
  return waits;
}

// Searches the graph from the one node in `nodes`, breadth first, for a wait for a rank that waits for
// nobody. A wait younger than `age_min` shows that its rank waits, but is not followed. Ok: every rank waits.
Status find_blocking_rank(std::vector<Node>& nodes, std::chrono::milliseconds deadline,
                          const WaitsOf& waits_of, std::chrono::nanoseconds age_min) {
  const int rank = nodes.front().rank;
  const Wait wait = nodes.front().waits.front();
  std::map<int, bool> is_waiting{{rank, true}};
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    for (std::size_t w = 0; w < nodes[i].waits.size(); ++w) {
      const Wait at = nodes[i].waits[w];
      if (i > 0 && at.age < age_min) continue;
      std::vector<int> blocking;
      for (const int next : at.ranks) {
        if (!is_waiting.contains(next)) {
          std::vector<Wait> theirs = long_waits(next, deadline, waits_of);
          is_waiting[next] = !theirs.empty();
          if (!theirs.empty()) nodes.push_back({next, std::move(theirs)});
        }
        if (!is_waiting[next]) blocking.push_back(next);
      }
      if (blocking.empty()) continue;
      return i == 0 ? direct_timeout(rank, wait, blocking, deadline)
                    : indirect_timeout(rank, wait, nodes[i], at, blocking, deadline);
    }
    if (i + 1 < nodes.size() || nodes.back().rank == rank) continue;
    // The other ranks may wait for this one because of another of its operations.
    if (std::vector<Wait> others = long_waits(rank, deadline, waits_of); !others.empty())
      nodes.push_back({rank, std::move(others)});
  }
  return {};
}

}  // namespace

Status explain_timeout(int rank, const Wait& wait, std::chrono::milliseconds deadline,
                       const WaitsOf& waits_of) {
  std::vector<Node> nodes;
  for (const std::chrono::nanoseconds age_min : {std::chrono::nanoseconds(deadline) / 2, 0ns}) {
    nodes = {{rank, {wait}}};
    FOREBAY_RETURN_IF_ERROR(find_blocking_rank(nodes, deadline, waits_of, age_min));
  }
  if (nodes.back().rank == rank && nodes.size() > 1) nodes.pop_back();
  const bool one_operation = std::all_of(nodes.begin(), nodes.end(), [&](const Node& node) {
    return std::any_of(node.waits.begin(), node.waits.end(),
                       [&](const Wait& one) { return one.what == wait.what; });
  });
  // All are alive and in one operation: their bytes do not arrive.
  return one_operation ? direct_timeout(rank, wait, wait.ranks, deadline) : deadlock(nodes);
}

WaitReporting wait_reporting(std::chrono::milliseconds deadline) {
  const std::chrono::nanoseconds validity = std::min(kValidityMax, std::chrono::nanoseconds(deadline) / 4);
  return {.period = validity / kReportsPerValidity, .validity = validity};
}

}  // namespace forebay::internal
