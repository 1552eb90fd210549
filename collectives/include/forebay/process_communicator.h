// Ranks as processes: how they are told of each other, and the communicator that suits where they are.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "forebay/backend.h"
#include "forebay/communicator.h"

namespace forebay {

struct ProcessOptions {
  int rank = 0;
  int size = 1;
  // Where the ranks meet: a directory that all see, private to this run (0700) and empty before it, or
  // tcp://HOST:PORT[/JOB], which rank 0 serves. What they write there is removed once all are connected.
  std::string store;
  // Local address or interface name to listen on; empty: the address at which the store was reached, where it
  // has one, else the loopback address when every rank is on this host.
  std::string interface;
  // Any text that must be the same on every rank: those that differ refuse each other when they meet.
  std::string configuration;
  // Of connecting, once all have met, and of each operation, from when it begins.
  std::chrono::milliseconds deadline{60'000};
  // Until all ranks have met, from when this one comes; 0: `deadline`. Ranks may be given different ones.
  std::chrono::milliseconds join_deadline{0};
};

// The one over shared memory (shm_communicator.h) where all ranks can share it, else the one over TCP
// (gloo_communicator.h). The ranks find out by the boot's id and the namespaces, never by names or variables
// of the environment. Collective over all ranks. Errors: those of the one it makes.
Result<std::unique_ptr<Communicator>> create_process_communicator(const ProcessOptions& options,
                                                                  Backend& backend);

}  // namespace forebay
