// The objects behind the handles. Each keeps its parents; members are declared in the order in which they are
// made, so they end in the reverse order.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "forebay/activation_checkpointer.h"
#include "forebay/arena.h"
#include "forebay/backend.h"
#include "forebay/engine.h"
#include "forebay/file_store.h"
#include "forebay/kernels.h"
#include "forebay/local_communicator.h"
#include "forebay/pinned_pool.h"
#include "forebay/timeline.h"
#include "runtime/api/handles.h"
#include "runtime/api/options.h"

namespace forebay::api {

struct Device : Object {
  // `name`: "host", "cuda:1", "model".
  Device(const char* name, const Options& options);
  ~Device() override;

  // The stream that a caller's pointer means: the default one for null.
  Stream stream(void* handle);
  // The same where FOREBAY_NO_STREAM means that only the host uses the memory.
  Stream stream_or_none(void* handle);
  // Made at the first call.
  Kernels& kernels();

  std::unique_ptr<Backend> backend;
  std::mutex mutex;
  // Guarded by mutex.
  std::unique_ptr<Kernels> made_kernels;
  Stream default_stream;
  std::vector<void*> streams;  // Made here and not destroyed yet.
};

struct ArenaObject : Object {
  std::shared_ptr<Device> device;
  std::unique_ptr<Arena> arena;
  std::mutex mutex;
  std::vector<std::pair<std::string, Tag>> tags;  // Guarded by mutex.
};

struct PoolObject : Object {
  std::shared_ptr<Device> device;
  std::unique_ptr<PinnedPool> pool;
};

struct Group : Object {
  std::shared_ptr<LocalGroup> group;
};

struct Ranks : Object {
  std::shared_ptr<Device> device;
  std::shared_ptr<Device> control;  // NCCL: the device of its control operations.
  std::unique_ptr<Communicator> communicator;
};

struct TimelineObject : Object {
  Timeline timeline;
};

struct EngineObject : Object {
  std::shared_ptr<Device> device;  // Null: the engine only plans.
  std::shared_ptr<Ranks> ranks;
  std::vector<std::shared_ptr<Ranks>> others;  // The grid, and pipeline stages that share units.
  std::shared_ptr<TimelineObject> timeline;
  PlanOptions plan_options;  // An engine that only plans has these and `shape`.
  ModelShape shape;
  ModelDescription description{shape};
  std::unique_ptr<Engine> engine;
  bool committed = false;

  struct LiveLease {
    UnitId unit;
    bool backward;
    Stream stream;
    Lease lease;
  };
  std::vector<LiveLease> leases;
  Hyperparameters hyperparameters;
};

struct Checkpointer : Object {
  std::shared_ptr<Device> device;
  std::shared_ptr<Ranks> ranks;
  std::shared_ptr<TimelineObject> timeline;
  std::unique_ptr<ActivationCheckpointer> checkpointer;
  bool committed = false;
  std::vector<std::pair<ActivationKey, ActivationLease>> leases;
};

struct StoreObject : Object {
  std::unique_ptr<Store> store;
};

#define FOREBAY_HANDLE(handle, object, kind, name) \
  template <>                                      \
  struct Traits<handle> {                          \
    using Object = object;                         \
    static constexpr Kind kKind = Kind::kind;      \
    static constexpr const char* kName = name;     \
  }
FOREBAY_HANDLE(forebay_options, OptionsObject, kOptions, "options");
FOREBAY_HANDLE(forebay_device, Device, kDevice, "device");
FOREBAY_HANDLE(forebay_arena, ArenaObject, kArena, "arena");
FOREBAY_HANDLE(forebay_pinned_pool, PoolObject, kPinnedPool, "pool");
FOREBAY_HANDLE(forebay_local_group, Group, kLocalGroup, "group");
FOREBAY_HANDLE(forebay_communicator, Ranks, kCommunicator, "communicator");
FOREBAY_HANDLE(forebay_timeline, TimelineObject, kTimeline, "timeline");
FOREBAY_HANDLE(forebay_engine, EngineObject, kEngine, "engine");
FOREBAY_HANDLE(forebay_checkpointer, Checkpointer, kCheckpointer, "checkpointer");
FOREBAY_HANDLE(forebay_file_store, StoreObject, kFileStore, "store");
#undef FOREBAY_HANDLE

// A copy of the options; the defaults for a null handle.
Options options_of(forebay_options* options);

DataType data_type(std::int32_t dtype);

}  // namespace forebay::api
