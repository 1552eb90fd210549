// The plan of the activations that an ActivationCheckpointer keeps between the forward and the backward pass:
// their bytes on every tier and on the wire, computed before anything is allocated. The checkpointer
// allocates the plan's bytes; `forebay plan` prints it. Activations that are not checkpointed are not in it.
//
// A saved activation that is the same on all ranks of the tensor-parallel group may be partitioned: each rank
// keeps one slice (Pa of the ZeRO paper). A slice, or a part of it, may be spilled to host memory or files
// (Pa+cpu).
//
// The slice rule. An activation of B bytes over t ranks has slices of S = ceil(B / t) bytes, rounded up
// to 16. Rank r keeps bytes [r S, (r+1) S) of the activation, up to its end, so the last slices may be short
// or empty. Every rank has room for S bytes and sends S bytes, so every rank has the same plan.
//
// Source: Rajbhandari et al., arXiv 1910.02054, sections 4.2 and 6.1; ARCHITECTURE.md, "The memory contract".
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/plan.h"
#include "forebay/status.h"

namespace forebay {

// Where an activation waits for the backward pass.
enum class ActivationPlacement : std::uint8_t {
  kKeep,               // Whole, on this rank's device.
  kPartition,          // This rank's slice, on the device. With one rank, or not shared: as kKeep.
  kPartitionAndSpill,  // The same, with `spill_fraction` of the slice on the tier.
  kAuto,  // The plan takes the first of these that fits the budget, and spills as little as it can.
};

const char* activation_placement_name(ActivationPlacement placement) noexcept;  // "partition+spill"

// A placement as command lines write it: "keep", "partition", "partition+cpu", "partition+nvme" or
// "partition+nvme:DIR[,DIR...]", "auto".
struct ActivationChoice {
  ActivationPlacement placement = ActivationPlacement::kKeep;
  Tier tier = Tier::kPinned;
  std::vector<std::string> directories;  // Tier kFile.
};
// Nothing for other words.
std::optional<ActivationChoice> parse_activations(std::string_view word);
std::string activations_name(ActivationPlacement placement, Tier tier);  // Without directories.

// One activation that each micro-batch saves, for example the input from which a block is recomputed.
struct ActivationSlot {
  int unit = 0;             // Any number that the trainer chooses.
  int slot = 0;             // Any number that no other activation of the unit has.
  std::uint64_t bytes = 0;  // The size of the whole activation; not zero.
  // Whether all tensor-parallel ranks save the same bytes. False: each rank keeps its own activation whole.
  bool shared = true;
  ActivationPlacement placement = ActivationPlacement::kKeep;
  // kPartitionAndSpill: the part of the slice to spill, 0 to 1, rounded up to 512 bytes.
  double spill_fraction = 1.0;
  // The longest state (of random numbers) that save() may be given with the activation.
  std::size_t state_bytes = 0;
  // Time of the recomputation and backward pass of the activation. kAutoLookAhead needs it.
  double recompute_seconds = 0;
};

// ActivationPlanOptions::look_ahead: the plan takes the smallest number that hides the fetches behind the
// declared times.
inline constexpr int kAutoLookAhead = -1;
// Smaller: long fetches are not hidden. Larger: more device memory, and nothing left to hide.
inline constexpr int kLookAheadLimit = 8;

struct ActivationPlanOptions {
  int ranks = 1;  // Ranks of the tensor-parallel group.
  // Micro-batches with saved activations at the same time. Pipeline stage i of p has p - i of them, with one
  // forward, one backward.
  int micro_batches = 1;
  // Activations that are fetched and gathered ahead of the one in use. Smaller: less device memory. Larger:
  // longer fetches are hidden where times are uneven. kAutoLookAhead needs the times of slots and the two
  // rates below.
  int look_ahead = 1;
  int lease_limit = 1;  // Leases of gathered or fetched activations alive at the same time.
  // Device buffers from which bytes are spilled. With one, a save waits until the spill before it is over.
  int staging_count = 2;
  Tier tier = Tier::kPinned;             // The place of spilled bytes.
  std::uint64_t device_bytes = 0;        // Budget for reserved_bytes. 0: none.
  std::uint64_t host_bytes = 0;          // Budget for pinned host memory. 0: none.
  std::uint64_t chunk_bytes = 2u << 20;  // The device's mapping granularity, for reserved_bytes.
  // Tier kFile: budget for the host memory between the device and files. Smaller: more and smaller pieces.
  std::uint64_t file_staging_bytes = 16u << 20;
  double fetch_bytes_per_second = 0;   // From the tier to the device, for kAutoLookAhead.
  double gather_bytes_per_second = 0;  // Received in a gather, for kAutoLookAhead.
};

// The parts of one slot on each rank, in bytes per micro-batch.
struct ActivationPlace {
  int ways = 1;                     // Number of slices: 1, or the number of ranks.
  std::uint64_t slice_bytes = 0;    // S; with one slice, the activation's bytes.
  std::uint64_t spilled_bytes = 0;  // The first bytes of the slice, which are spilled.
  std::uint64_t kept_bytes = 0;     // The other bytes of the slice, which stay on the device.
  // Whether the activation is read where it was saved.
  bool direct() const { return ways == 1 && spilled_bytes == 0; }
  std::uint64_t whole_bytes() const { return static_cast<std::uint64_t>(ways) * slice_bytes; }
  friend constexpr bool operator==(const ActivationPlace& a, const ActivationPlace& b) noexcept {
    return a.ways == b.ways && a.slice_bytes == b.slice_bytes && a.spilled_bytes == b.spilled_bytes &&
           a.kept_bytes == b.kept_bytes;
  }
  friend constexpr bool operator!=(const ActivationPlace& a, const ActivationPlace& b) noexcept {
    return !(a == b);
  }
};

// An activation plan is the same on every rank: all figures are per rank.
struct ActivationPlan {
  ActivationPlanOptions options;
  std::vector<ActivationSlot> slots;    // As declared, with a placement chosen where it was kAuto.
  std::vector<ActivationPlace> places;  // By slot.
  int look_ahead = 0;                   // As in the options, with a number chosen for kAutoLookAhead.

  // Device memory.
  std::uint64_t kept_bytes = 0;      // Whole activations and slices.
  std::uint64_t staging_bytes = 0;   // Buffers from which bytes are spilled.
  std::uint64_t gathered_bytes = 0;  // Buffers into which activations are fetched and gathered.
  std::uint64_t device_bytes() const { return kept_bytes + staging_bytes + gathered_bytes; }
  std::uint64_t reserved_bytes = 0;  // device_bytes() in whole chunks.
  // Pinned host memory.
  std::uint64_t host_spilled_bytes = 0;  // Tier kPinned: spilled bytes.
  std::uint64_t host_staging_bytes = 0;  // Tier kFile: buffers between the device and files.
  std::uint64_t host_bytes() const { return host_spilled_bytes + host_staging_bytes; }
  std::uint64_t file_bytes = 0;  // Tier kFile: spilled bytes, each range padded to a page.

  // Traffic of one micro-batch, forward and backward.
  WireBytes wire_per_micro_batch;                   // Payload of the gathers.
  std::uint64_t spilled_bytes_per_micro_batch = 0;  // Spilled, and as many fetched.

  std::size_t staging_buffer_bytes = 0;   // One staging buffer.
  std::size_t gathered_buffer_bytes = 0;  // One gathered buffer.
  int gathered_count = 0;                 // Gathered buffers; none when every slot is direct.
  std::size_t file_piece_bytes = 0;       // Tier kFile: one buffer between the device and files.

  // Ranks with the same text have the same plan.
  std::string fingerprint_text() const;
};

// The size S of a slice of an activation of `bytes` over `ways` ranks, by the slice rule above.
std::uint64_t activation_slice_bytes(std::uint64_t bytes, int ways) noexcept;

// Computes the plan of a trainer's activations.
//
// Errors: kInvalidArgument naming the option or the slot, and the allowed values; kOutOfMemory where a budget
// is too small, with the bytes needed and the options that make them fewer.
Result<ActivationPlan> make_activation_plan(const std::vector<ActivationSlot>& slots,
                                            const ActivationPlanOptions& options);

}  // namespace forebay
