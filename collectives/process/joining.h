// How a rank joins a transport: it meets the other ranks, connects, and tells them the reason if it cannot.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/process/transport.h"
#include "collectives/rendezvous/meeting.h"
#include "collectives/rendezvous/rendezvous_store.h"
#include "forebay/process_communicator.h"

namespace forebay::internal {

// A rank that has met all others.
struct Joining {
  Membership membership{};
  Meeting meeting{};
  std::shared_ptr<RendezvousStore> store{};
  std::string interface = {};  // As given, else the address at which the store was reached.
  std::chrono::steady_clock::time_point limit{};  // For connecting.

  // The name of a text of this run in the store.
  std::string name(const std::string& what) const { return membership.generation + "." + what; }
};

// Meets the other ranks. Ranks that ask for transports of different names refuse each other.
// Requires: more than one rank. Errors: those of opening the store and of meeting.
Result<Joining> meet_others(const char* transport, const ProcessOptions& options, const Backend& backend);

// The text `name`, once it is there. Errors: the first failure, if a rank gives up meanwhile; kTimeout, with
// `missing` as its reason.
Result<std::string> await_text(const Joining& joining, const std::string& name, const std::string& missing);

// `joined` is the outcome of joining on this rank; if it is an error, the others are told. Returns the first
// failure of all ranks, or ok.
Status conclude(Joining& joining, Status joined);

// Each connects one transport.
Result<std::shared_ptr<Transport>> connect_gloo(const Joining& joining);
Result<std::shared_ptr<Transport>> connect_shm(const Joining& joining);

// Meets the others, connects and concludes.
using Connect = Result<std::shared_ptr<Transport>> (*)(const Joining& joining);
Result<std::unique_ptr<Communicator>> create_over(const char* transport, Connect connect,
                                                  const ProcessOptions& options, Backend& backend);

}  // namespace forebay::internal
