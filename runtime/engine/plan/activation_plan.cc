#include "forebay/activation_plan.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>
#include <utility>

#include "forebay/units.h"
#include "runtime/engine/activations/constants.h"

namespace forebay {
namespace {

// NCCL and the kernels of devices move 16 bytes at a time.
constexpr std::uint64_t kSliceAlignment = 16;
// Larger: sums could overflow 64 bits. No activation is that large.
constexpr std::uint64_t kSlotBytesMax = std::uint64_t{1} << 50;
// The record beside an activation is in host memory.
constexpr std::size_t kStateBytesMax = std::size_t{1} << 30;
constexpr int kMicroBatchLimit = 4096;
constexpr int kBufferLimit = 64;

std::string name_of(const ActivationSlot& slot) {
  return "slot " + std::to_string(slot.slot) + " of unit " + std::to_string(slot.unit);
}

std::uint64_t times(int count, std::uint64_t bytes) {
  return static_cast<std::uint64_t>(count) * bytes;
}

std::uint64_t padded(std::uint64_t bytes) {
  return round_up(bytes, kActivationAlignment);
}

Status check_range(const char* name, int value, int smallest, int largest) {
  if (value >= smallest && value <= largest) return {};
  return {StatusCode::kInvalidArgument, std::string(name) + " of an activation plan is " +
                                            std::to_string(value) + "; use " + std::to_string(smallest) +
                                            " to " + std::to_string(largest)};
}

Status check_options(const ActivationPlanOptions& options) {
  FOREBAY_RETURN_IF_ERROR(check_range("ranks", options.ranks, 1, 1 << 16));
  FOREBAY_RETURN_IF_ERROR(check_range("micro_batches", options.micro_batches, 1, kMicroBatchLimit));
  FOREBAY_RETURN_IF_ERROR(check_range("look_ahead", options.look_ahead, kAutoLookAhead, kLookAheadLimit));
  FOREBAY_RETURN_IF_ERROR(check_range("lease_limit", options.lease_limit, 1, kBufferLimit));
  FOREBAY_RETURN_IF_ERROR(check_range("staging_count", options.staging_count, 1, kBufferLimit));
  if (options.chunk_bytes == 0)
    return {StatusCode::kInvalidArgument,
            "chunk_bytes of an activation plan is 0; use the device's granularity"};
  return {};
}

Status check_slot(const ActivationSlot& slot) {
  if (slot.bytes == 0 || slot.bytes > kSlotBytesMax) {
    return {StatusCode::kInvalidArgument, name_of(slot) + " has " + std::to_string(slot.bytes) +
                                              " bytes; use 1 to " + std::to_string(kSlotBytesMax)};
  }
  if (slot.state_bytes > kStateBytesMax) {
    return {StatusCode::kInvalidArgument, name_of(slot) + " has a state of up to " +
                                              std::to_string(slot.state_bytes) + " bytes; use at most " +
                                              std::to_string(kStateBytesMax)};
  }
  if (!(slot.spill_fraction >= 0.0 && slot.spill_fraction <= 1.0)) {
    return {StatusCode::kInvalidArgument,
            name_of(slot) + " has spill_fraction " + std::to_string(slot.spill_fraction) + "; use 0 to 1"};
  }
  if (!(slot.recompute_seconds >= 0.0) || !std::isfinite(slot.recompute_seconds)) {
    return {StatusCode::kInvalidArgument, name_of(slot) + " has recompute_seconds " +
                                              std::to_string(slot.recompute_seconds) + "; use 0 or more"};
  }
  return {};
}

Status check_slots(const std::vector<ActivationSlot>& slots) {
  std::set<std::pair<int, int>> seen;
  for (const ActivationSlot& slot : slots) {
    FOREBAY_RETURN_IF_ERROR(check_slot(slot));
    if (!seen.insert({slot.unit, slot.slot}).second)
      return {StatusCode::kInvalidArgument, name_of(slot) + " was declared twice; give it another number"};
  }
  return {};
}

ActivationPlace place_of(const ActivationSlot& slot, int ranks) {
  ActivationPlace place;
  const bool cut = slot.placement != ActivationPlacement::kKeep && slot.shared;
  place.ways = cut ? ranks : 1;
  place.slice_bytes = activation_slice_bytes(slot.bytes, place.ways);
  if (slot.placement == ActivationPlacement::kPartitionAndSpill) {
    const auto wanted = static_cast<std::uint64_t>(
        std::llround(slot.spill_fraction * static_cast<double>(place.slice_bytes)));
    place.spilled_bytes = std::min(padded(wanted), place.slice_bytes);
  }
  place.kept_bytes = place.slice_bytes - place.spilled_bytes;
  return place;
}

std::uint64_t received_bytes(const ActivationPlace& place) {
  return times(place.ways - 1, place.slice_bytes);
}

// The time of a backward pass by the declared times, with `look_ahead` buffers ahead of the one in use. An
// activation is fetched, then gathered, then used. At any time one is fetched, one is gathered and one is
// used. A buffer is free when the activation in it has been used.
double backward_seconds(const ActivationPlan& plan, int look_ahead) {
  double fetched = 0;
  double gathered = 0;
  double used = 0;
  std::vector<double> ends;  // The end of each use of a buffer, in order.
  const std::size_t buffers = static_cast<std::size_t>(look_ahead) + 1;
  for (std::size_t i = plan.slots.size(); i-- > 0;) {
    const ActivationPlace& place = plan.places[i];
    double ready = 0;
    if (!place.direct()) {
      const double free = ends.size() < buffers ? 0 : ends[ends.size() - buffers];
      double at = free;
      if (place.spilled_bytes > 0) {
        at = fetched = std::max(fetched, free) +
                       static_cast<double>(place.spilled_bytes) / plan.options.fetch_bytes_per_second;
      }
      if (place.ways > 1) {
        at = gathered = std::max(gathered, at) +
                        static_cast<double>(received_bytes(place)) / plan.options.gather_bytes_per_second;
      }
      ready = at;
    }
    used = std::max(used, ready) + plan.slots[i].recompute_seconds;
    if (!place.direct()) ends.push_back(used);
  }
  return used;
}

Status choose_look_ahead(ActivationPlan& plan) {
  if (plan.options.look_ahead != kAutoLookAhead) {
    plan.look_ahead = plan.options.look_ahead;
    return {};
  }
  double seconds = 0;
  bool spills = false;
  bool gathers = false;
  for (std::size_t i = 0; i < plan.slots.size(); ++i) {
    seconds += plan.slots[i].recompute_seconds;
    spills = spills || plan.places[i].spilled_bytes > 0;
    gathers = gathers || plan.places[i].ways > 1;
  }
  if ((spills && !(plan.options.fetch_bytes_per_second > 0)) ||
      (gathers && !(plan.options.gather_bytes_per_second > 0)) || ((spills || gathers) && !(seconds > 0))) {
    return {
        StatusCode::kInvalidArgument,
        "the look-ahead of saved activations is to follow from their times, and some are missing; give the "
        "times of recomputation, the bytes per second of fetches where they spill and of gathers where they "
        "are partitioned, or give the look-ahead as a number"};
  }
  // A gain of one percent is not worth another buffer.
  const double least = backward_seconds(plan, kLookAheadLimit);
  for (plan.look_ahead = 0; plan.look_ahead < kLookAheadLimit; ++plan.look_ahead) {
    if (backward_seconds(plan, plan.look_ahead) <= 1.01 * least) break;
  }
  return {};
}

// Computes all bytes of the plan.
//
// Requires: no slot has the placement kAuto.
Status add_up(ActivationPlan& plan) {
  const ActivationPlanOptions& options = plan.options;
  plan.places.clear();
  for (const ActivationSlot& slot : plan.slots) plan.places.push_back(place_of(slot, options.ranks));
  FOREBAY_RETURN_IF_ERROR(choose_look_ahead(plan));

  std::uint64_t largest_spilled = 0;
  std::uint64_t largest_gathered = 0;
  int indirect_count = 0;
  plan.kept_bytes = plan.host_spilled_bytes = plan.file_bytes = 0;
  plan.spilled_bytes_per_micro_batch = plan.wire_per_micro_batch.received = 0;
  for (const ActivationPlace& place : plan.places) {
    plan.kept_bytes += times(options.micro_batches, padded(place.kept_bytes));
    plan.spilled_bytes_per_micro_batch += place.spilled_bytes;
    if (options.tier == Tier::kPinned) {
      plan.host_spilled_bytes += times(options.micro_batches, padded(place.spilled_bytes));
    } else {
      plan.file_bytes += times(options.micro_batches, round_up(place.spilled_bytes, kActivationPageBytes));
    }
    plan.wire_per_micro_batch.received += received_bytes(place);
    largest_spilled = std::max(largest_spilled, place.spilled_bytes);
    if (place.direct()) continue;
    largest_gathered = std::max(largest_gathered, place.whole_bytes());
    ++indirect_count;
  }
  plan.wire_per_micro_batch.sent = plan.wire_per_micro_batch.received;
  plan.staging_buffer_bytes = padded(largest_spilled);
  plan.staging_bytes = times(options.staging_count, plan.staging_buffer_bytes);
  plan.gathered_buffer_bytes = padded(largest_gathered);
  plan.gathered_count =
      std::min(plan.look_ahead + options.lease_limit, indirect_count * options.micro_batches);
  plan.gathered_bytes = times(plan.gathered_count, plan.gathered_buffer_bytes);
  plan.file_piece_bytes = 0;
  if (options.tier == Tier::kFile && largest_spilled > 0) {
    const std::uint64_t share = options.file_staging_bytes / (2 * kActivationMoverBuffers);
    const std::uint64_t piece = share / kFilePieceGranule * kFilePieceGranule;
    plan.file_piece_bytes =
        std::clamp(piece, kFilePieceGranule, round_up(largest_spilled, kFilePieceGranule));
  }
  plan.host_staging_bytes = 2 * kActivationMoverBuffers * plan.file_piece_bytes;
  plan.reserved_bytes = round_up(plan.device_bytes(), options.chunk_bytes);
  return {};
}

bool fits(const ActivationPlan& plan) {
  return plan.options.device_bytes == 0 || plan.reserved_bytes <= plan.options.device_bytes;
}

// Chooses the placements of the slots with kAuto. Plans that spill fewer bytes come first. If no bytes need
// to be spilled, the plan that partitions the fewest slots wins; it partitions the first ones.
class Chooser {
 public:
  explicit Chooser(ActivationPlan& plan) : plan_(plan) {
    for (std::size_t i = 0; i < plan_.slots.size(); ++i) {
      if (plan_.slots[i].placement == ActivationPlacement::kAuto) open_.push_back(i);
    }
  }

  Status choose() {
    if (open_.empty()) return add_up(plan_);
    for (std::size_t count = 0; count <= open_.size(); ++count) {
      FOREBAY_RETURN_IF_ERROR(partition(count));
      if (fits(plan_)) return {};
    }
    return spill_least();
  }

 private:
  Status partition(std::size_t count) {
    for (std::size_t i = 0; i < open_.size(); ++i)
      slot(i).placement = i < count ? ActivationPlacement::kPartition : ActivationPlacement::kKeep;
    return add_up(plan_);
  }

  // Spills the first `level` bytes of every open slot.
  Status spill(std::uint64_t level) {
    for (std::size_t i = 0; i < open_.size(); ++i) {
      ActivationSlot& open = slot(i);
      const std::uint64_t slice = slice_bytes(i);
      open.placement = ActivationPlacement::kPartitionAndSpill;
      open.spill_fraction = static_cast<double>(std::min(level, slice)) / static_cast<double>(slice);
    }
    return add_up(plan_);
  }

  // The buffers for spilling are as large as the largest spilled part of a slot. So spilling the same level
  // of all slots spills the fewest bytes. Between two sizes of slices the device's bytes are linear in the
  // level. They fall up to the best of these sizes and rise after it. So the smallest level that fits lies
  // at, or just below, the first size that fits.
  Status spill_least() {
    std::set<std::uint64_t> levels;
    for (std::size_t i = 0; i < open_.size(); ++i) levels.insert(padded(slice_bytes(i)));
    std::uint64_t below = 0;
    for (const std::uint64_t level : levels) {
      FOREBAY_RETURN_IF_ERROR(spill(level));
      if (!fits(plan_)) {
        below = level;
        continue;
      }
      std::uint64_t enough = level;
      while (enough - below > kActivationAlignment) {
        const std::uint64_t middle = padded(below + (enough - below) / 2);
        if (middle == enough) break;
        FOREBAY_RETURN_IF_ERROR(spill(middle));
        (fits(plan_) ? enough : below) = middle;
      }
      return spill(enough);
    }
    return {};
  }

  ActivationSlot& slot(std::size_t i) { return plan_.slots[open_[i]]; }
  std::uint64_t slice_bytes(std::size_t i) {
    return activation_slice_bytes(slot(i).bytes, slot(i).shared ? plan_.options.ranks : 1);
  }

  ActivationPlan& plan_;
  std::vector<std::size_t> open_;  // Indices of slots.
};

std::string advice(const ActivationPlan& plan) {
  bool can_partition = false;
  bool can_spill = false;
  for (std::size_t i = 0; i < plan.slots.size(); ++i) {
    const ActivationSlot& slot = plan.slots[i];
    can_partition = can_partition ||
                    (slot.shared && plan.options.ranks > 1 && slot.placement == ActivationPlacement::kKeep);
    can_spill = can_spill || plan.places[i].kept_bytes > 0;
  }
  std::string text;
  if (can_partition) text += "partition them over the tensor-parallel ranks, ";
  if (can_spill) text += "spill (more of) them, ";
  return text + "make the batch smaller, keep fewer micro-batches in flight or make look_ahead smaller";
}

Status check_budgets(const ActivationPlan& plan) {
  if (!fits(plan)) {
    return {StatusCode::kOutOfMemory,
            "the activations need " + format_bytes(plan.reserved_bytes) + " (" +
                std::to_string(plan.reserved_bytes) + " bytes) of the device, the budget is " +
                std::to_string(plan.options.device_bytes) + " bytes: kept " + format_bytes(plan.kept_bytes) +
                ", staging " + format_bytes(plan.staging_bytes) + ", gathered " +
                format_bytes(plan.gathered_bytes) + "; " + advice(plan)};
  }
  if (plan.options.host_bytes != 0 && plan.host_bytes() > plan.options.host_bytes) {
    return {StatusCode::kOutOfMemory,
            "the spilled activations need " + format_bytes(plan.host_bytes()) + " (" +
                std::to_string(plan.host_bytes()) + " bytes) of pinned host memory, the limit is " +
                std::to_string(plan.options.host_bytes) +
                " bytes; spill a smaller fraction, spill to files, or raise the limit"};
  }
  return {};
}

}  // namespace

const char* activation_placement_name(ActivationPlacement placement) noexcept {
  switch (placement) {
    case ActivationPlacement::kKeep:
      return "keep";
    case ActivationPlacement::kPartition:
      return "partition";
    case ActivationPlacement::kPartitionAndSpill:
      return "partition+spill";
    case ActivationPlacement::kAuto:
      return "auto";
  }
  return "unknown";
}

std::optional<ActivationChoice> parse_activations(std::string_view word) {
  for (const ActivationPlacement placement :
       {ActivationPlacement::kKeep, ActivationPlacement::kPartition, ActivationPlacement::kAuto}) {
    if (word == activation_placement_name(placement)) return ActivationChoice{.placement = placement};
  }
  constexpr std::string_view kSpilled = "partition+";
  ShardingOptions options;
  if (!word.starts_with(kSpilled) || !set_option(options, "offload-tier", word.substr(kSpilled.size())).ok())
    return std::nullopt;
  return ActivationChoice{ActivationPlacement::kPartitionAndSpill, options.tier, options.offload_directories};
}

std::string activations_name(ActivationPlacement placement, Tier tier) {
  if (placement == ActivationPlacement::kPartitionAndSpill)
    return std::string("partition+") + tier_name(tier);
  return activation_placement_name(placement);
}

std::uint64_t activation_slice_bytes(std::uint64_t bytes, int ways) noexcept {
  if (ways <= 1) return bytes;
  return round_up(ceil_div(bytes, static_cast<std::uint64_t>(ways)), kSliceAlignment);
}

std::string ActivationPlan::fingerprint_text() const {
  std::ostringstream text;
  text << "tensor-parallel " << options.ranks << "\nmicro-batches " << options.micro_batches
       << "\nlook-ahead " << look_ahead << "\nleases " << options.lease_limit << "\nstaging-count "
       << options.staging_count << "\ntier " << tier_name(options.tier) << "\nchunk " << options.chunk_bytes
       << '\n';
  for (std::size_t i = 0; i < slots.size(); ++i) {
    text << "activation:" << slots[i].unit << '.' << slots[i].slot << ' ' << slots[i].bytes << " bytes, "
         << (slots[i].shared ? "shared, " : "") << activation_placement_name(slots[i].placement)
         << ", spilled " << places[i].spilled_bytes << ", state " << slots[i].state_bytes << '\n';
  }
  return text.str();
}

Result<ActivationPlan> make_activation_plan(const std::vector<ActivationSlot>& slots,
                                            const ActivationPlanOptions& options) {
  FOREBAY_RETURN_IF_ERROR(check_options(options));
  FOREBAY_RETURN_IF_ERROR(check_slots(slots));
  ActivationPlan plan;
  plan.options = options;
  plan.slots = slots;
  FOREBAY_RETURN_IF_ERROR(Chooser(plan).choose());
  FOREBAY_RETURN_IF_ERROR(check_budgets(plan));
  return plan;
}

}  // namespace forebay
