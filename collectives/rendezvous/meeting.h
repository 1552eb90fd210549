// How the ranks of one run find each other in a RendezvousStore, and nobody else: texts that an earlier run
// left behind are recognised and ignored.
//
// Each rank writes one text with a random number of its own and the numbers it has read from the others, and
// rewrites it when it reads a new one. The ranks have met when all texts say the same. A text of an earlier
// run cannot say this run's numbers, so a stale one only looks like a rank that has not come yet.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/rendezvous/introduction.h"
#include "collectives/rendezvous/rendezvous_store.h"
#include "forebay/status.h"

namespace forebay::internal {

struct Meeting {
  std::string generation;    // A word all ranks of this run share and no other run has.
  bool one_host = true;      // All ranks gave the same host.
  std::string first_host;    // Rank 0's.
  int other_host_rank = -1;  // A rank on another host than rank 0, and that host.
  std::string other_host;
};

// Errors: kTimeout naming the ranks that did not come; kInvalidArgument when two processes claim one rank, or
// ranks differ in size, version or configuration.
Result<Meeting> meet(RendezvousStore& store, const Participant& me,
                     std::chrono::steady_clock::time_point deadline,
                     std::chrono::milliseconds deadline_length);

// What a rank writes into a store that cannot tell who wrote it.
struct Card {
  Introduction introduction;
  std::string presence;                // As RendezvousStore::presence() gives it.
  std::vector<std::uint64_t> numbers;  // By rank; 0: not seen yet.
};

std::string encode(const Card& card);
// False for what is not a card of this protocol.
bool decode(std::string_view text, Card* card);

// Removes this rank's text. Only once all ranks have met.
void leave_meeting(RendezvousStore& store, int rank) noexcept;

}  // namespace forebay::internal
