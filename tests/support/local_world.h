// Ranks as threads, each with a backend, kernels and a local communicator of its own. Most engine tests run
// in this.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "forebay/error.h"
#include "forebay/kernels.h"
#include "forebay/local_communicator.h"
#include "runtime/device/host/script.h"

namespace forebay::testing {

struct Rank {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Kernels> kernels;
  std::unique_ptr<Communicator> communicator;

  // Requires: the world makes host backends.
  ScriptedHostBackend& host_backend() { return dynamic_cast<ScriptedHostBackend&>(*backend); }
};

struct WorldOptions {
  LocalOptions local;
  HostBackendOptions backend{.granularity = 64u << 10};
  HostScript script;
  // If set, all ranks' backends and communicators share it; in virtual time the rank threads take part in it.
  HostClock* clock = nullptr;
  // If set, makes other backends than host ones.
  std::function<std::unique_ptr<Backend>(int rank)> create_backend;
  // If set, makes the rank's communicator out of the local one; the rank has its backend and kernels by then.
  std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator> local, Rank&)> connect;
};

// Runs body(rank) on `size` threads. An exception on any thread is rethrown here after all threads have
// ended: the first by rank that is not only a consequence of another rank's failure (kPeerLost).
inline void run_ranks(int size, const WorldOptions& options, const std::function<void(Rank&)>& body) {
  LocalOptions local = options.local;
  if (options.clock != nullptr) local.clock = options.clock;
  const std::shared_ptr<LocalGroup> group = LocalGroup::create(size, local);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  std::vector<HostClock::Registration> registrations(static_cast<std::size_t>(size));
  if (options.clock != nullptr) {
    for (HostClock::Registration& registration : registrations)
      registration = HostClock::Registration(*options.clock);
  }
  for (int r = 0; r < size; ++r) {
    threads.emplace_back(
        [&, r, registration = std::move(registrations[static_cast<std::size_t>(r)])]() mutable {
          registration.adopt();
          // Ends on this thread, after the variables below.
          const HostClock::Registration taking_part = std::move(registration);
          try {
            Rank rank;
            if (options.create_backend) {
              rank.backend = options.create_backend(r);
            } else {
              HostBackendOptions backend_options = options.backend;
              if (options.clock != nullptr) backend_options.clock = options.clock;
              backend_options.name = "host rank " + std::to_string(r);
              rank.backend = value_or_throw(ScriptedHostBackend::create(backend_options, options.script));
            }
            rank.kernels = value_or_throw(Kernels::create(*rank.backend, {.thread_count = 1}));
            rank.communicator = value_or_throw(group->communicator(r, *rank.backend, *rank.kernels));
            if (options.connect) rank.communicator = options.connect(std::move(rank.communicator), rank);
            try {
              body(rank);
            } catch (const Error& error) {
              rank.communicator->abort(error.status());
              throw;
            } catch (...) {
              rank.communicator->abort(Status(StatusCode::kInternal, "the rank's body threw"));
              throw;
            }
          } catch (...) {
            errors[static_cast<std::size_t>(r)] = std::current_exception();
          }
        });
  }
  for (std::thread& thread : threads) thread.join();
  std::exception_ptr first;
  for (const std::exception_ptr& error : errors) {
    if (error == nullptr) continue;
    if (first == nullptr) first = error;
    try {
      std::rethrow_exception(error);
    } catch (const Error& status) {
      if (status.code() == StatusCode::kPeerLost) continue;
      std::rethrow_exception(error);
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace forebay::testing
