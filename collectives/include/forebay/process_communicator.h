// Ranks as processes: where they meet, and the communicator that suits the place where they run.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "forebay/backend.h"
#include "forebay/communicator.h"

namespace forebay {

// A rendezvous store of the caller: small named texts that all ranks see, such as the store of a launcher.
//
// Threads: any, also at the same time. Errors: none may be thrown.
class RendezvousTexts {
 public:
  virtual ~RendezvousTexts() = default;
  // Replaces the text if it is there already.
  virtual Status set(const std::string& name, std::string_view text) = 0;
  // Nothing when the text is not there; does not wait for it.
  virtual std::optional<std::string> get(const std::string& name) = 0;
  // Sets the text unless one is there.
  virtual Status set_if_absent(const std::string& name, std::string_view text) = 0;
  virtual void remove(const std::string& name) noexcept = 0;
};

struct ProcessOptions {
  int rank = 0;
  int size = 1;
  // The rendezvous store, where the ranks meet: a directory that all ranks see, private to this run (mode
  // 0700) and empty before it; or tcp://HOST:PORT[/JOB], which rank 0 serves. Its texts are removed once all
  // ranks are connected.
  std::string store;
  // The ranks meet in these texts instead; `store` then goes in front of each name.
  std::shared_ptr<RendezvousTexts> texts;
  // The local address or interface to listen on. Empty: the address at which the store was reached, where
  // there is one; else the loopback address, if every rank is on this host.
  std::string interface;
  // Any text that must be the same on every rank: ranks whose texts differ refuse each other when they meet.
  std::string configuration;
  // For connecting, once all ranks have met, and for each operation, from its beginning.
  std::chrono::milliseconds deadline{60'000};
  // For meeting, from when this rank begins to wait; 0: `deadline`. Ranks may have different ones.
  std::chrono::milliseconds join_deadline{0};
};

// Makes the communicator over shared memory (shm_communicator.h) where all ranks can share memory, else the
// one over TCP (gloo_communicator.h). The ranks find out by the boot's id and the namespaces of their
// processes, never by host names or variables of the environment.
// Order:    collective over all ranks; blocks.
// Requires: `backend` outlives the communicator and has memory that the host reaches.
// Errors:   kTimeout naming the ranks that did not join; kPeerLost naming a rank that ended;
//           kInvalidArgument when ranks differ in size, version or configuration; and those of the
//           communicator it makes.
Result<std::unique_ptr<Communicator>> create_process_communicator(const ProcessOptions& options,
                                                                  Backend& backend);

}  // namespace forebay
