// Hooks for tests of the engine and the activation checkpointer: another file store, and scripted time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "forebay/status.h"
#include "forebay/store.h"

namespace forebay::internal {

// Each is used where it is set. The engine copies them when it is made.
struct EngineHooks {
  // Makes the file store of rank `rank`, instead of files in the directories of the options.
  std::function<Result<std::unique_ptr<Store>>(int rank)> make_store;
  // The thread that updates on the host calls this before each piece of `count` elements. On a model backend
  // it is all that the update does.
  std::function<void(std::uint64_t count)> before_host_update;
  // The same for micro-steps that add up on the host: each pass over `bytes`, read and written.
  std::function<void(std::uint64_t bytes)> before_host_sum;
  // The thread that saves calls this before it writes so many bytes.
  std::function<void(std::uint64_t bytes)> before_state_write;
  // The clock of measurements, instead of a steady one.
  std::function<std::chrono::nanoseconds()> now;
};

}  // namespace forebay::internal
