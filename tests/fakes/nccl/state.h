// The state of the fake NCCL: groups of ranks, their communicators, and the launches that move bytes.
//
// Threads: one mutex guards everything; it is given up while bytes are copied. Launches run as kernels on the
// fake CUDA driver's threads, one of which each holds while it waits for its peers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/nccl/abi.h"
#include "tests/fakes/nccl/fake_nccl.h"

namespace forebay::fake_nccl {

using namespace forebay::nccl;  // NOLINT: this library is an implementation of that interface.

using Lock = std::unique_lock<std::mutex>;

// Matching: messages by pair, collectives of one kind with each other.
enum class Channel : std::uint8_t { kMessage, kAllGather, kReduceScatter };

// A send that waits for its recv. Lives in the launch that sends.
struct Post {
  const std::byte* source = nullptr;
  std::size_t bytes = 0;
  bool taken = false;
  bool done = false;
};

struct MailboxKey {
  Channel channel;
  int from;
  int to;
  friend auto operator<=>(const MailboxKey&, const MailboxKey&) = default;
};

// The ranks that share an id. Shared by their communicators.
struct World {
  int size = 0;
  int joined = 0;
  std::vector<int> devices;
  NcclResult failure = NcclResult::kSuccess;  // The failure of joining.
  std::map<MailboxKey, std::deque<Post*>> mailboxes;
};

struct Transfer {
  Channel channel;
  bool is_send;
  int peer;
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::size_t bytes = 0;
};

// The sum that follows the transfers of a reduce_scatter: terms[i] came from, or belongs to, rank i.
struct Sum {
  std::vector<std::vector<std::byte>> terms;
  const std::byte* own;
  std::byte* target;
  std::size_t count;
};

struct Comm;

// One group of calls on one communicator and stream.
struct Launch {
  std::shared_ptr<Comm> comm;
  NcclStream stream = nullptr;
  std::vector<Transfer> transfers;
  std::vector<std::unique_ptr<Sum>> sums;
  std::vector<const void*> addresses;  // The device memory that it uses.
  bool hangs = false;
};

struct Comm {
  NcclComm handle = nullptr;
  std::shared_ptr<World> world;
  int rank = 0;
  int device = 0;
  void* context = nullptr;
  void* module = nullptr;
  void* kernel = nullptr;
  std::atomic<bool> in_use{false};
  std::atomic<bool> launching{false};  // In the driver, which blocks while the stream's queue is full.
  // Guarded by the mutex.
  bool ready = false;  // All ranks have joined.
  bool aborted = false;
  bool finalized = false;
  int polls_left = 0;  // "In progress" answers before `pending` is done.
  std::function<NcclResult(Lock&)> pending;
  NcclResult async = NcclResult::kSuccess;
  std::map<void*, std::size_t> registrations;
};
using CommPtr = std::shared_ptr<Comm>;

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  FakeNcclOptions options;
  std::map<NcclComm, CommPtr> comms;
  std::map<std::string, std::weak_ptr<World>> worlds;         // By id.
  std::map<std::uint64_t, std::shared_ptr<Launch>> launches;  // Launched and not over, by number.
  std::map<int, std::uint64_t> calls;                         // By rank.
  std::map<int, std::uint64_t> operations;                    // By rank.
  std::uint64_t launch_count = 0;
  std::uint64_t next_handle = 0x2CC1'0000'0000'0040;
  std::uint64_t next_id = 1;
  std::uint64_t faults = 0, misuses = 0, aborts = 0, destroys = 0;
};

// The one state. Made at first use, never destroyed.
State& state();

// Counts and prints uses that NCCL forbids.
[[gnu::format(printf, 1, 2)]] void misuse(const char* format, ...);

// Moves a launch's bytes; returns when all is done or its communicator is aborted.
void run_launch(Launch& launch);

// --- the CUDA driver (cuda.cc) ---

// The context current on this thread and its device. False when there is none.
bool current_context(void** context, int* device);
// Gets the kernel that runs launches into the comm's context, which is current.
bool load_kernel(Comm& comm);
void unload_kernel(Comm& comm);
// Queues the launch's kernel on its stream.
bool queue_kernel(const Launch& launch, std::uint64_t number);

}  // namespace forebay::fake_nccl
