// How the ranks of one run find each other in a RendezvousStore, and no rank of another run: texts that an
// earlier run left behind are recognised and ignored. Each rank writes one text, its card, with a random
// number of its own and the numbers it has read from the others. It writes its card again when it reads a new
// number. The ranks have met when all cards have the same numbers. A card of an earlier run cannot have this
// run's numbers, so it looks like a rank that has not come yet.
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
  std::string generation;    // A word that all ranks of this run share and no other run has.
  bool one_host = true;      // All ranks gave the same host.
  std::string first_host;    // The host of rank 0.
  int other_host_rank = -1;  // A rank on another host than rank 0, or -1.
  std::string other_host;
};

// Errors: kTimeout naming the ranks that did not join; kInvalidArgument when two processes claim one rank, or
// ranks differ in size, version or configuration.
Result<Meeting> meet(RendezvousStore& store, const Participant& me,
                     std::chrono::steady_clock::time_point deadline,
                     std::chrono::milliseconds deadline_length);

// The text of a rank in a store that cannot tell which process wrote it.
struct Card {
  Introduction introduction;
  std::string presence;                // As RendezvousStore::presence() gives it.
  std::vector<std::uint64_t> numbers;  // By rank; 0: not read yet.
};

std::string encode(const Card& card);
// False for a text that is not a card of this protocol.
bool decode(std::string_view text, Card* card);

// Removes this rank's card.
// Requires: all ranks have met.
void leave_meeting(RendezvousStore& store, int rank) noexcept;

}  // namespace forebay::internal
