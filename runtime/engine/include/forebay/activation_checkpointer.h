// ActivationCheckpointer keeps the activations that a recomputation starts from, between the forward and the
// backward pass. Each activation is kept whole, partitioned over the tensor-parallel ranks (Pa of the ZeRO
// paper), or partitioned and offloaded to pinned host memory or files (Pa+cpu). It is back on the device,
// whole, before the backward pass asks for it, bit for bit as it was saved.
//
//   checkpointer.declare({.unit = u, .bytes = n, .placement = ActivationPlacement::kPartition});  // each u
//   checkpointer.commit();
//   for each micro-batch m:
//     for each unit u:             checkpointer.save({u, 0, m}, input, n, stream);  ... forward of u ...
//     for each unit u, last first: { ActivationLease in = checkpointer.load({u, 0, m}, stream);
//                                    ... kernels that read in.data(): forward again, then backward ... }
//   wait for stream; checkpointer.check();
//
// Nothing is allocated after commit.
//
// Order: work that is queued on `stream` after save() may overwrite the source. Micro-batches are loaded in
// the order in which their first activation was saved. The activations of a micro-batch are loaded in the
// reverse order of saving. Fetching ahead follows this order; it begins when all slots of the micro-batch
// have been saved or the first of them is loaded. Other orders give the same values, but wait longer. All
// tensor-parallel ranks make the same calls in the same order, which fixes the order of the gathers.
//
// Streams: save() and load() do not wait for the device. A load makes `stream` wait until the activation is
// there. The end of a lease is a point of the stream given to load(). The streams outlive the checkpointer or
// are drained before.
//
// Errors: thrown as Error. Misuse (a load without a save, saving twice, another size, a micro-batch too many)
// is kInvalidArgument and changes nothing. After a failure of a peer, a stream, the device or the file store
// the checkpointer is failed: its communicator is aborted so that no peer waits for it, and every later call
// throws. The next call throws the failure of queued work. The data of a lease is valid if check(), called
// after waiting for the stream, throws nothing.
//
// Threads: one thread drives it.
//
// Source: Rajbhandari et al., arXiv 1910.02054, sections 4.2 and 6.1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "forebay/activation_plan.h"
#include "forebay/backend.h"
#include "forebay/communicator.h"
#include "forebay/span.h"
#include "forebay/timeline.h"

namespace forebay {

namespace internal {
struct EngineHooks;
}

// One activation of one micro-batch.
struct ActivationKey {
  int unit = 0;
  int slot = 0;
  int micro_batch = 0;  // Any number that no other micro-batch in flight has.
  friend constexpr bool operator==(const ActivationKey& a, const ActivationKey& b) noexcept {
    return a.unit == b.unit && a.slot == b.slot && a.micro_batch == b.micro_batch;
  }
  friend constexpr bool operator!=(const ActivationKey& a, const ActivationKey& b) noexcept {
    return !(a == b);
  }
};

struct ActivationCheckpointerOptions {
  ActivationPlanOptions plan;  // `ranks` and `chunk_bytes` are the communicator's and the backend's.
  // The trainer gives commit() a region. The budget plan.device_bytes then counts bytes, not whole chunks.
  bool in_region = false;
  // Tier kFile: directories for anonymous files; offloaded bytes are striped over them.
  std::vector<std::string> directories;
  Timeline* timeline = nullptr;  // Not owned; outlives the checkpointer. Null: nothing is marked.
  const internal::EngineHooks* hooks = nullptr;  // For tests; outlives commit().
};

struct ActivationStatistics {
  std::uint64_t device_bytes = 0;  // Taken at commit, of the arena or of the region that was given.
  std::uint64_t host_bytes = 0;    // Pinned, the requested bytes.
  std::uint64_t file_bytes = 0;    // Ranges of the store.
  Traffic traffic;                 // Payload of the gathers so far.
  std::uint64_t spilled_bytes = 0;
  std::uint64_t fetched_bytes = 0;
  std::uint64_t save_count = 0;
  std::uint64_t load_count = 0;
  std::uint64_t ahead_count = 0;         // Loads whose fetch or gather had been queued before.
  std::uint64_t most_saved_bytes = 0;    // Most bytes that places held at the same time, on all tiers.
  std::uint64_t most_micro_batches = 0;  // Most that were in flight at the same time.
};

class ActivationCheckpointer;

// The right to read a loaded activation. Move-only; ends with its scope, in stream order, and with it the
// saved activation.
class ActivationLease {
 public:
  ActivationLease(ActivationLease&& other) noexcept;
  ActivationLease& operator=(ActivationLease&& other) noexcept;
  ~ActivationLease();

  // The whole activation, aligned to 512 bytes. The trainer may write there too: nobody reads it again.
  DevicePtr data() const noexcept { return data_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  // The record that save() was given; the same bytes until the lease ends.
  Span<const std::byte> state() const noexcept { return state_; }

 private:
  friend class ActivationCheckpointer;
  ActivationLease() = default;

  ActivationCheckpointer* owner_ = nullptr;
  int item_ = -1;
  Stream stream_;
  DevicePtr data_ = nullptr;
  std::uint64_t bytes_ = 0;
  Span<const std::byte> state_;
};

class ActivationCheckpointer {
 public:
  // Requires: `backend` and `communicator` outlive it. The communicator has the tensor-parallel ranks, one or
  // more. Nothing else uses it after commit, because its data operations are in the order of one stream of
  // the checkpointer (Communicator::split makes another communicator of the same ranks).
  ActivationCheckpointer(Backend& backend, Communicator& communicator,
                         ActivationCheckpointerOptions options = {});
  // Waits for its queued work. Requires: no lease is alive.
  ~ActivationCheckpointer();
  ActivationCheckpointer(const ActivationCheckpointer&) = delete;
  ActivationCheckpointer& operator=(const ActivationCheckpointer&) = delete;

  // --- describe, before commit ---
  // Order: the order in which a forward pass saves. Errors: kInvalidArgument for a slot that was declared
  // before.
  void declare(const ActivationSlot& slot);
  // Allocates nothing. Errors: as make_activation_plan.
  ActivationPlan plan() const;
  // Compares the plans of the ranks and allocates everything; all ranks succeed or all throw. Collective.
  // `region`: plan().device_bytes() of device memory, aligned to 512, that outlives the checkpointer, such as
  // Engine::activations(). Null: the checkpointer has an arena of its own.
  // Errors: as plan(); kInvalidArgument naming ranks with different plans; kOutOfMemory if the device or
  // the host has not enough; the errors of the file store.
  void commit(DevicePtr region = nullptr);

  // --- forward ---
  // `source`: the whole activation. `state`: a record that load() gives back, at most the slot's state_bytes;
  // copied at once.
  void save(const ActivationKey& key, const std::byte* source, std::uint64_t bytes, Stream stream,
            Span<const std::byte> state = {});

  // --- backward ---
  [[nodiscard]] ActivationLease load(const ActivationKey& key, Stream stream);
  // Drops a saved activation that will not be loaded (evaluation, an abandoned pass).
  void discard(const ActivationKey& key);
  // Drops all saved activations. Requires: no lease is alive.
  void discard_all();

  // Throws the first failure, on any rank, of the queued work that has run by now. Collective: all ranks
  // throw or none does. Order: after the stream has been waited for, and before its results are used for good
  // (before Engine::step). Errors: kInvalidArgument if ranks have loaded different activations, or in
  // different orders; then the checkpointer is failed.
  void check();

  // Waits for the gathers that are queued, so that the traffic is complete.
  ActivationStatistics statistics();
  const ActivationPlan& committed_plan() const;

 private:
  friend class ActivationLease;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay
