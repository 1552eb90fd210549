#include "collectives/rendezvous/wait_report.h"

#include <algorithm>
#include <chrono>

#include "collectives/rendezvous/byte_text.h"
#include "collectives/rendezvous/introduction.h"

namespace forebay::internal {
namespace {

// Further ranks are left out: each of them leads on in the wait graph.
constexpr std::size_t kReportedRanksMax = 64;

}  // namespace

std::string encode(const WaitReport& report) {
  std::string bytes;
  append_number(bytes, report.number);
  const std::size_t count = std::min(report.waits.size(), kReportedWaitsMax);
  append_number(bytes, static_cast<std::uint8_t>(count));
  for (std::size_t i = 0; i < count; ++i) {
    const Wait& wait = report.waits[i];
    append_text(bytes, std::string_view(wait.what).substr(0, kWaitTextMax));
    append_number(bytes, static_cast<std::uint8_t>(wait.came));
    append_number(bytes, static_cast<std::uint64_t>(wait.age.count()));
    const std::size_t ranks = std::min(wait.ranks.size(), kReportedRanksMax);
    append_number(bytes, static_cast<std::uint8_t>(ranks));
    for (std::size_t r = 0; r < ranks; ++r) append_number(bytes, static_cast<std::uint32_t>(wait.ranks[r]));
  }
  return bytes;
}

bool decode(std::string_view bytes, WaitReport* report) {
  std::uint8_t count = 0;
  report->waits.clear();
  if (!take_number(&bytes, &report->number) || !take_number(&bytes, &count) || count > kReportedWaitsMax)
    return false;
  for (std::uint8_t i = 0; i < count; ++i) {
    Wait& wait = report->waits.emplace_back();
    std::uint8_t came = 0;
    std::uint64_t age = 0;
    std::uint8_t ranks = 0;
    if (!take_text(&bytes, kWaitTextMax, &wait.what) || !take_number(&bytes, &came) || came > 1 ||
        !take_number(&bytes, &age) || !take_number(&bytes, &ranks) || ranks > kReportedRanksMax)
      return false;
    wait.came = came != 0;
    wait.age = std::chrono::nanoseconds(static_cast<std::int64_t>(age));
    for (std::uint8_t r = 0; r < ranks; ++r) {
      std::uint32_t rank = 0;
      if (!take_number(&bytes, &rank) || rank >= static_cast<std::uint32_t>(kRanksMax)) return false;
      wait.ranks.push_back(static_cast<int>(rank));
    }
  }
  return bytes.empty();
}

}  // namespace forebay::internal
