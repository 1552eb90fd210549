#include "collectives/simulated/link_times.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace forebay::internal {

LinkTimes::LinkTimes(const SimulatedOptions& options, const std::vector<int>& members, int rank)
    : options_(options), members_(members), rank_(rank) {
  const int mine = members[static_cast<std::size_t>(rank)];
  std::uint64_t inside = 1;
  std::uint64_t domains = members.size();
  for (const SimulatedLevel& level : options.levels) {
    std::uint64_t within = 0;
    std::vector<int> numbers;
    for (const int member : members) {
      const int domain = member / level.ranks;
      within += domain == mine / level.ranks ? 1 : 0;
      numbers.push_back(domain);
    }
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    levels_.push_back({.share = level.bytes_per_second / level.ranks_per_link,
                       .peers = within - inside,
                       .outside = members.size() - inside,
                       .inside = inside,
                       .hops = domains - numbers.size()});
    inside = within;
    domains = numbers.size();
  }
}

void LinkTimes::add_processor(ModelWork& work, const SimulatedLevel& link, double bytes) const {
  if (link.processor_seconds_per_byte > 0)
    work.add(options_.processor_resource, bytes * link.processor_seconds_per_byte);
}

ModelWork LinkTimes::direct(const char* name, std::uint64_t bytes) const {
  ModelWork work{.name = name};
  for (std::size_t l = 0; l < levels_.size(); ++l) {
    const Level& level = levels_[l];
    if (level.peers == 0) continue;
    const SimulatedLevel& link = options_.levels[l];
    work.delay_seconds = std::max(work.delay_seconds, link.latency_seconds);
    const auto peers = static_cast<double>(level.peers);
    work.add(link.resource, peers * (static_cast<double>(bytes) / level.share + link.message_seconds));
    add_processor(work, link, peers * static_cast<double>(bytes));
  }
  return work;
}

ModelWork LinkTimes::gather(const char* name, std::uint64_t bytes) const {
  if (options_.gather == GatherAlgorithm::kDirect) return direct(name, bytes);
  ModelWork work{.name = name};
  for (std::size_t l = 0; l < levels_.size(); ++l) {
    const Level& level = levels_[l];
    if (level.peers == 0) continue;
    const SimulatedLevel& link = options_.levels[l];
    work.delay_seconds += static_cast<double>(level.hops) * link.latency_seconds;
    const double entering = static_cast<double>(level.outside) * static_cast<double>(bytes);
    work.add(link.resource, entering / (static_cast<double>(level.inside) * level.share));
    add_processor(work, link, entering);
  }
  return work;
}

ModelWork LinkTimes::message(const char* name, std::uint64_t bytes, int peer) const {
  const int mine = members_[static_cast<std::size_t>(rank_)];
  const int other = members_[static_cast<std::size_t>(peer)];
  ModelWork work{.name = name};
  for (std::size_t l = 0; l < levels_.size(); ++l) {
    const SimulatedLevel& link = options_.levels[l];
    if (mine / link.ranks != other / link.ranks) continue;
    work.delay_seconds = link.latency_seconds;
    work.add(link.resource, static_cast<double>(bytes) / levels_[l].share + link.message_seconds);
    add_processor(work, link, static_cast<double>(bytes));
    break;
  }
  return work;
}

ModelWork LinkTimes::control(const char* name, std::uint64_t bytes) const {
  ModelWork work{.name = name};
  if (members_.size() < 2) return work;
  const int hops = static_cast<int>(std::bit_width(members_.size() - 1));
  work.delay_seconds = 2 * hops * options_.control_seconds;
  for (const Level& level : levels_) {
    if (level.peers == 0) continue;
    work.delay_seconds += static_cast<double>(level.peers) * static_cast<double>(bytes) / level.share;
  }
  return work;
}

}  // namespace forebay::internal
