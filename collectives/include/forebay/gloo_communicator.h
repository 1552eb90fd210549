// Ranks as processes, on one host or several, over TCP: Gloo as transport and rendezvous, our own ordered
// reduction on top. Present when forebay was built with Gloo (gloo_available()).
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "forebay/communicator.h"

namespace forebay {

struct GlooOptions {
  int rank = 0;
  int size = 1;
  // Where the ranks meet: a directory all ranks see, private to this run (0700) and empty before it. What they
  // write there is removed again once all ranks are connected.
  std::string store;
  // Local address or interface name to listen on; empty: the address at which the store was reached, where it
  // has one, else the loopback address when every rank is on this host.
  std::string interface;
  // Any text that must be the same on every rank: those that differ refuse each other when they meet.
  std::string configuration;
  std::chrono::milliseconds deadline{60'000};
};

bool gloo_available() noexcept;

// Collective over all ranks. Errors: kTimeout naming the ranks that never came; kUnsupported without Gloo.
Result<std::unique_ptr<Communicator>> create_gloo_communicator(const GlooOptions& options, Backend& backend);

}  // namespace forebay
