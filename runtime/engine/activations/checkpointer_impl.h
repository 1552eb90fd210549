// The inside of ActivationCheckpointer: the places that commit() makes, and the activations saved now.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "forebay/activation_checkpointer.h"
#include "forebay/arena.h"
#include "runtime/engine/activations/tier.h"
#include "runtime/engine/marked_span.h"

namespace forebay {

struct ActivationCheckpointer::Impl {
  // The place of one activation of one micro-batch. A slot has one for each micro-batch in flight.
  struct Place {
    int slot = 0;               // Index of the plan's slots.
    DevicePtr kept = nullptr;   // Null: no part stays on the device.
    ActivationTier::Home home;  // The offloaded part, which comes before the kept part.
    Event saved;                // The activation has been copied here, and to staging.
    Event spilled;              // The copy out of staging is done.
    Event read;                 // Its last reader on the device has run.
    Event fetched;              // It is back on the device.
    std::vector<std::byte> state;
    // The activation that it holds now:
    bool used = false;
    bool leased = false;
    int micro_batch = 0;
    int buffer = -1;  // The buffer that it has been fetched and gathered to.
    std::size_t state_bytes = 0;
  };

  struct StagingPlace {
    DevicePtr data = nullptr;
    Event filled;
    Event left;
  };

  struct GatheredBuffer {
    DevicePtr data = nullptr;
    int place = -1;  // The place that was fetched and gathered to it; -1: free.
    Event ready;
    Event released;  // Recorded at the end of its lease.
  };

  struct MicroBatch {
    int number = 0;
    std::vector<int> places;  // In the order of saving.
    bool complete = false;    // Its forward pass is over; loads follow.
  };

  Impl(Backend& backend_in, Communicator& communicator_in, ActivationCheckpointerOptions options_in);
  ~Impl();

  // --- commit ---
  ActivationPlanOptions plan_options() const;
  void commit(DevicePtr region);
  void take_region();
  void lay_out(DevicePtr region);
  Event make_event();

  // --- forward ---
  void save(const ActivationKey& key, const std::byte* source, std::uint64_t bytes, Stream stream,
            Span<const std::byte> state);
  void check_save(const ActivationKey& key, int slot, const std::byte* source, std::uint64_t bytes,
                  std::size_t state_bytes) const;
  void queue_save(int index, const std::byte* source, Stream stream);
  void spill(Place& place, const std::byte* source, std::uint64_t bytes, Stream stream);

  // --- backward ---
  // Leases a place and returns the address of its activation, ready for `stream`.
  int load(const ActivationKey& key, Stream stream, DevicePtr* data);
  void fetch_ahead();
  // Uses a free buffer.
  void fetch(int index);
  void end_lease(int index, Stream stream) noexcept;
  void discard(const ActivationKey& key);
  void discard_all();
  void forget(int index);

  void check();
  ActivationStatistics statistics();

  // -1: there is none.
  int find_slot(const ActivationKey& key) const;
  int find_saved(const ActivationKey& key) const;
  int find_free(int slot) const;
  MicroBatch* find_micro_batch(int number);
  int free_buffer() const;
  Place& place(int index) { return places[static_cast<std::size_t>(index)]; }
  const ActivationPlace& planned(const Place& p) const {
    return plan.places[static_cast<std::size_t>(p.slot)];
  }
  MarkedSpan marked(Stream stream, const char* track, const char* what, const Place& p);
  [[noreturn]] static void misuse(const std::string& message);
  void expect_committed(const char* call) const;
  // Throws, and leaves the checkpointer failed, unless `status` is ok.
  void must(const Status& status);
  // The first failure of the communicator or the store.
  Status status() const;
  void check_peers();
  // Whether all ranks have gathered the same activations in the same order so far.
  Status check_order();

  // Constant after construction.
  Backend& backend;
  Communicator& communicator;
  const ActivationCheckpointerOptions options;

  // Constant after commit.
  std::vector<ActivationSlot> slots;  // As declared.
  ActivationPlan plan;
  bool committed = false;
  std::unique_ptr<Arena> arena;  // Null if a region was given.
  Stream gather_stream;          // It orders the collectives.
  std::unique_ptr<ActivationTier> tier;
  std::vector<Event> events;  // All events, for the destructor.
  Traffic traffic_before;

  std::vector<Place> places;  // Slot by slot.
  std::vector<StagingPlace> staging;
  std::vector<GatheredBuffer> buffers;
  std::vector<MicroBatch> in_flight;  // In the order of their first save.
  std::size_t next_staging = 0;
  std::size_t next_buffer = 0;
  int leased_buffers = 0;
  int lease_count = 0;
  std::uint64_t saved_bytes = 0;
  std::uint64_t gathered = 0;  // A hash of the gathered activations, in their order.
  ActivationStatistics counts;
  Status failure;
};

}  // namespace forebay
