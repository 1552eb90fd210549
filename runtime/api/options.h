// Options: everything that a handle is made from, set by name from text. The options of sharding come from
// their one table (sharding_options.h); options.cc has a row for each of the others.
#pragma once

#include <string>
#include <string_view>

#include "forebay/activation_checkpointer.h"
#include "forebay/arena.h"
#include "forebay/bootstrap.h"
#include "forebay/engine.h"
#include "forebay/file_store.h"
#include "forebay/nccl_communicator.h"
#include "forebay/pinned_pool.h"
#include "forebay/process_communicator.h"
#include "runtime/api/handles.h"

namespace forebay::api {

enum class CommunicatorKind : std::uint8_t { kAuto, kShm, kGloo, kNccl };

struct Options {
  Options() { engine.optional_gradients = true; }  // Programs of the first version may leave out gradients.

  EngineOptions engine;
  // Devices. 0: the machine's memory, the device's granularity.
  std::uint64_t device_memory = 0;
  std::uint64_t granularity = 0;
  bool guard = false;
  // Ranks. rank -1: not given.
  ProcessOptions process{.rank = -1, .size = 0};
  int local_rank = -1;
  std::string store_prefix;
  CommunicatorKind communicator = CommunicatorKind::kAuto;
  NcclOptions nccl;

  ArenaOptions arena;
  PinnedPoolOptions pinned;
  ActivationCheckpointerOptions activations;
  ActivationSlot slot;
  FileStoreOptions store;

  // Errors: kInvalidArgument, with the allowed values or the nearest name; nothing is changed.
  Status set(std::string_view name, const std::string& value);
  Result<std::string> text(std::string_view name) const;
  // {"name", "value", "values", "help"} of every option.
  std::string json() const;
  Status read_environment();
};

struct OptionsObject : Object {
  Options options;
};

}  // namespace forebay::api
