// ActivationPlan: the bytes of the activations that an ActivationCheckpointer keeps between the forward and
// the backward pass, on every tier and on the wire, computed before anything is allocated. The checkpointer
// allocates what the plan says; `forebay plan` prints it.
//
// A saved activation that is the same on all ranks of the tensor-parallel group may be cut into slices, of
// which each rank keeps one (Pa of the ZeRO paper); what is left on a rank may be spilled below the device
// (Pa+cpu), all of it or a part.
//
// The slice rule. Of `bytes` over t ranks a slice has S = ceil(bytes / t) bytes, rounded up to 16; rank r
// keeps [r S, (r+1) S) of the activation, cut off at its end, so the last slices may be short or empty. Every
// rank has room for S and S bytes are sent, so every rank has the same plan.
//
// Source: Rajbhandari et al., arXiv 1910.02054, sections 4.2 and 6.1; ARCHITECTURE.md, "The memory contract".
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "forebay/plan.h"
#include "forebay/status.h"

namespace forebay {

// Where an activation waits for the backward pass.
enum class ActivationPlacement : std::uint8_t {
  kKeep,               // Whole, on this rank's device.
  kPartition,          // This rank's slice, on the device. Not shared, or one rank: as kKeep.
  kPartitionAndSpill,  // The same, spilled: `spill_fraction` of it is below the device.
  kAuto,  // Chosen with the plan: the first of these with which the budget is enough, spilling least.
};

const char* activation_placement_name(ActivationPlacement placement) noexcept;  // "partition+spill"

// One activation that each micro-batch saves: the input of a block, say, from which it is computed again.
struct ActivationSlot {
  int unit = 0;             // Any number; the trainer's.
  int slot = 0;             // The same, within the unit.
  std::uint64_t bytes = 0;  // Of the whole activation; not zero.
  bool shared = true;       // The same bytes on all ranks of the group. False: each rank keeps its own whole.
  ActivationPlacement placement = ActivationPlacement::kKeep;
  double spill_fraction = 1.0;   // kPartitionAndSpill: of the slice, 0 to 1; rounded up to 512 bytes.
  std::size_t state_bytes = 0;   // Longest record that save() may be given for it (random-number state).
  double recompute_seconds = 0;  // What its backward pass takes with the recomputation; for kAutoLookAhead.
};

// ActivationPlanOptions::look_ahead: the fewest that hide the fetches behind the declared times.
inline constexpr int kAutoLookAhead = -1;
inline constexpr int kLookAheadLimit = 8;  // More would hold more device memory than it could hide.

struct ActivationPlanOptions {
  int ranks = 1;          // Of the tensor-parallel group.
  int micro_batches = 1;  // That may be saved at the same time: p - i at stage i of p, with 1F1B.
  // Activations that are fetched and gathered ahead of the one in use. Smaller: less device memory. Larger:
  // uneven times are evened out. kAutoLookAhead needs the times of slots and the two rates below.
  int look_ahead = 1;
  int lease_limit = 1;  // Leases of gathered or fetched activations alive at the same time.
  // Device buffers that spilled bytes leave from. One: a save waits until the spill before has left.
  int staging_count = 2;
  Tier tier = Tier::kPinned;                     // Where spilled bytes go.
  std::uint64_t device_bytes = 0;                // Budget for reserved_bytes; 0: none.
  std::uint64_t host_bytes = 0;                  // Most page-locked host memory; 0: what the host gives.
  std::uint64_t chunk_bytes = 2u << 20;          // The device's mapping granularity, for reserved bytes.
  std::uint64_t file_staging_bytes = 16u << 20;  // Tier kFile: host memory that spilled bytes pass through.
  double fetch_bytes_per_second = 0;             // From the tier to the device, for kAutoLookAhead.
  double gather_bytes_per_second = 0;            // Received in a gather, for kAutoLookAhead.
};

// How one slot is kept on each rank; bytes are of one micro-batch.
struct ActivationPlace {
  int ways = 1;                     // Slices: 1 or the number of ranks.
  std::uint64_t slice_bytes = 0;    // S; with one way the activation's bytes.
  std::uint64_t spilled_bytes = 0;  // The first bytes of the slice are spilled,
  std::uint64_t kept_bytes = 0;     // the others stay on the device.
  bool direct() const { return ways == 1 && spilled_bytes == 0; }  // Is read where it was saved.
  std::uint64_t whole_bytes() const { return static_cast<std::uint64_t>(ways) * slice_bytes; }
  friend bool operator==(const ActivationPlace&, const ActivationPlace&) = default;
};

struct ActivationPlan {
  ActivationPlanOptions options;
  std::vector<ActivationSlot> slots;    // As declared, with no kAuto left.
  std::vector<ActivationPlace> places;  // By slot.
  int look_ahead = 0;                   // Chosen, if it was to be.

  // Per rank; every rank has the same.
  std::uint64_t kept_bytes = 0;      // Of the device: whole activations and slices,
  std::uint64_t staging_bytes = 0;   // what spilled bytes leave from,
  std::uint64_t gathered_bytes = 0;  // and what activations are fetched and gathered into.
  std::uint64_t device_bytes() const { return kept_bytes + staging_bytes + gathered_bytes; }
  std::uint64_t reserved_bytes = 0;      // device_bytes in whole chunks.
  std::uint64_t host_spilled_bytes = 0;  // Page-locked: spilled bytes (tier kPinned),
  std::uint64_t host_staging_bytes = 0;  // and what they pass through (tier kFile).
  std::uint64_t host_bytes() const { return host_spilled_bytes + host_staging_bytes; }
  std::uint64_t file_bytes = 0;  // In the store, ranges padded to a page.

  // Moved by one micro-batch, forward and backward.
  WireBytes wire_per_micro_batch;                   // Payload of the gathers.
  std::uint64_t spilled_bytes_per_micro_batch = 0;  // Down; the same number comes up.

  std::size_t staging_buffer_bytes = 0;   // Of each.
  std::size_t gathered_buffer_bytes = 0;  // Of each.
  int gathered_count = 0;                 // Buffers; none when every slot is direct.
  std::size_t file_piece_bytes = 0;       // Tier kFile: what passes through host memory at once.

  // Same text on every rank means the same plan.
  std::string fingerprint_text() const;
};

// Of one slice of `bytes` over `ways` ranks: the rule above.
std::uint64_t activation_slice_bytes(std::uint64_t bytes, int ways) noexcept;

// Errors: kInvalidArgument naming the option or the slot and what it may be; kOutOfMemory where a budget is
// not enough, naming what is needed and what makes it smaller.
Result<ActivationPlan> make_activation_plan(const std::vector<ActivationSlot>& slots,
                                            const ActivationPlanOptions& options);

}  // namespace forebay
