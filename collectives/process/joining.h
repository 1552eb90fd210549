// How a rank comes to a transport: it meets the others, and whoever cannot go on from there says why.
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
  Membership membership;
  Meeting meeting;
  std::shared_ptr<RendezvousStore> store;
  std::string interface;                        // As given, or where the store was reached.
  std::chrono::steady_clock::time_point limit;  // Of connecting.

  // A text of this run under which every rank has one.
  std::string name(const std::string& what) const { return membership.generation + "." + what; }
};

// Meets the others for the transport called `transport`: ranks that ask for different ones refuse each other.
// Requires: more than one rank. Errors: those of opening the store and of meeting.
Result<Joining> meet_others(const char* transport, const ProcessOptions& options, const Backend& backend);

// The text `name`, once it is there. Errors: the first failure, if a rank gives up meanwhile; kTimeout, with
// `missing` as what is missing.
Result<std::string> await_text(const Joining& joining, const std::string& name, const std::string& missing);

// After what came of joining on this rank: tells the others why it does not come, if it does not. The first
// cause of all, or ok.
Status conclude(Joining& joining, Status joined);

// One transport of the run, over what is in `joining`.
Result<std::shared_ptr<Transport>> connect_gloo(const Joining& joining);
Result<std::shared_ptr<Transport>> connect_shm(const Joining& joining);

// Meets the others, connects and concludes.
using Connect = Result<std::shared_ptr<Transport>> (*)(const Joining& joining);
Result<std::unique_ptr<Communicator>> create_over(const char* transport, Connect connect,
                                                  const ProcessOptions& options, Backend& backend);

}  // namespace forebay::internal
