#include "collectives/wait_graph.h"

#include <algorithm>
#include <map>

#include "collectives/fingerprint.h"

namespace forebay::internal {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::nanoseconds kFreshMax = 1s;
constexpr int kBeatsInFresh = 8;
// Of ranks that wait for each other, those that a message shows.
constexpr std::size_t kShownMax = 4;

// A rank that waits, met on the way along the chain.
struct Link {
  int rank;
  std::vector<Wait> waits;
};

std::string fate(const Wait& wait) {
  return wait.came ? " did not finish it" : " did not come";
}

Status late(int rank, const Wait& wait, const std::vector<int>& missing, std::chrono::milliseconds deadline) {
  return Status(StatusCode::kTimeout, wait.what + " on rank " + std::to_string(rank) + ": " +
                                          rank_list(missing) + fate(wait) + " within " +
                                          std::to_string(deadline.count()) +
                                          " ms; look at what they do, or raise the deadline");
}

Status late_for_another(const Link& link, const Wait& wait, const std::vector<int>& missing, int judge,
                        const Wait& judges_wait, std::chrono::milliseconds deadline) {
  return Status(StatusCode::kTimeout, wait.what + " on rank " + std::to_string(link.rank) + ": " +
                                          rank_list(missing) + fate(wait) + ", and rank " +
                                          std::to_string(judge) + " waits for that since " +
                                          std::to_string(deadline.count()) + " ms in " + judges_wait.what +
                                          "; look at what they do, or raise the deadline");
}

Status endless(const std::vector<Link>& links) {
  std::string text = "ranks wait for each other: ";
  for (std::size_t i = 0; i < links.size() && i < kShownMax; ++i) {
    const Wait& wait = links[i].waits.front();
    text += (i == 0 ? "rank " : ", rank ") + std::to_string(links[i].rank) + " in " + wait.what + " for " +
            rank_list(wait.ranks);
  }
  if (links.size() > kShownMax) text += ", and others";
  return Status(StatusCode::kInvalidArgument,
                text + "; every rank must issue the same operations in the same order");
}

// A rank that has waited for a moment only was late before, or exchanges heartbeats: it is not kept.
std::vector<Wait> long_waits(int rank, std::chrono::milliseconds deadline, const WaitsOf& waits_of) {
  std::vector<Wait> waits = waits_of(rank);
  std::erase_if(waits, [&](const Wait& wait) { return wait.age < wait_rhythm(deadline).fresh; });
  return waits;
}

// Follows the chain from `links`' only one. What ranks have waited in for less than `age_min` tells only that
// they wait. Ok: there is no end.
Status find_end(std::vector<Link>& links, std::chrono::milliseconds deadline, const WaitsOf& waits_of,
                std::chrono::nanoseconds age_min) {
  const int rank = links.front().rank;
  const Wait wait = links.front().waits.front();
  std::map<int, bool> waits{{rank, true}};  // By rank: whether it does.
  for (std::size_t i = 0; i < links.size(); ++i) {
    for (std::size_t w = 0; w < links[i].waits.size(); ++w) {
      const Wait at = links[i].waits[w];
      if (i > 0 && at.age < age_min) continue;
      std::vector<int> ends;
      for (const int next : at.ranks) {
        if (!waits.contains(next)) {
          std::vector<Wait> theirs = long_waits(next, deadline, waits_of);
          waits[next] = !theirs.empty();
          if (!theirs.empty()) links.push_back({next, std::move(theirs)});
        }
        if (!waits[next]) ends.push_back(next);
      }
      if (ends.empty()) continue;
      return i == 0 ? late(rank, wait, ends, deadline)
                    : late_for_another(links[i], at, ends, rank, wait, deadline);
    }
    if (i + 1 < links.size() || links.back().rank == rank) continue;
    // Whoever waits for this rank may do so because of something else that it waits in.
    if (std::vector<Wait> others = long_waits(rank, deadline, waits_of); !others.empty())
      links.push_back({rank, std::move(others)});
  }
  return {};
}

}  // namespace

Status judge(int rank, const Wait& wait, std::chrono::milliseconds deadline, const WaitsOf& waits_of) {
  std::vector<Link> links;
  for (const std::chrono::nanoseconds age_min : {std::chrono::nanoseconds(deadline) / 2, 0ns}) {
    links = {{rank, {wait}}};
    FOREBAY_RETURN_IF_ERROR(find_end(links, deadline, waits_of, age_min));
  }
  if (links.back().rank == rank && links.size() > 1) links.pop_back();
  const bool one_operation = std::all_of(links.begin(), links.end(), [&](const Link& link) {
    return std::any_of(link.waits.begin(), link.waits.end(),
                       [&](const Wait& one) { return one.what == wait.what; });
  });
  // All are in one operation and alive: what they send does not arrive.
  return one_operation ? late(rank, wait, wait.ranks, deadline) : endless(links);
}

WaitRhythm wait_rhythm(std::chrono::milliseconds deadline) {
  const std::chrono::nanoseconds fresh = std::min(kFreshMax, std::chrono::nanoseconds(deadline) / 4);
  return {.beat = fresh / kBeatsInFresh, .fresh = fresh};
}

}  // namespace forebay::internal
