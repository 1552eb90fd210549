// The parts that all communicators share: checks of arguments, so that a wrong call gets the same answer from
// each, and collectives as copies of bytes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collectives/fingerprint.h"
#include "forebay/communicator.h"
#include "forebay/kernels.h"

namespace forebay::internal {

// Ok, or kInvalidArgument that says which argument of which operation is wrong.
Status check_arguments(const ReduceScatterArguments& arguments, int size);
Status check_arguments(const AllGatherArguments& arguments, int size);
// `operation` is "send" or "recv".
Status check_peer(const char* operation, const void* address, std::size_t bytes, int peer, int rank,
                  int size);
Status check_exchange(std::span<const std::byte> mine, std::span<std::byte> all, int size);
Status check_vote(std::span<const std::byte> decision);

// The cause that an abort of `world_rank` spreads: the one it gave, or one that says that it gave none.
Status cause_of_abort(const Status& cause, int world_rank);

// Longer deadlines would overflow the arithmetic of clocks.
inline constexpr std::chrono::milliseconds kDeadlineMax = std::chrono::hours(24 * 365);
// `deadline`, at least 1 ms and at most kDeadlineMax.
std::chrono::milliseconds clamp_deadline(std::chrono::milliseconds deadline) noexcept;

// One rank's part of a collective, in bytes: slice `r` of the source goes to rank r, and the bytes from rank
// r go to slice r of the target. A source stride of 0 gives every rank the same slice.
struct Piece {
  const std::byte* source = nullptr;
  std::size_t source_stride = 0;
  std::byte* target = nullptr;
  std::size_t target_stride = 0;
  std::size_t bytes = 0;  // Bytes of one slice.
  bool keep_own = false;  // The own slice belongs at its place in `target` too.
};

// A collective without its sequence number.
struct Collective {
  Fingerprint fingerprint;
  Piece piece;
};

Collective reduce_scatter_transfer(const ReduceScatterArguments& arguments);
Collective all_gather_transfer(const AllGatherArguments& arguments);
// For exchange, barrier and split.
Collective control_transfer(Operation operation, std::span<const std::byte> mine, std::span<std::byte> all);

// The sum that the owner computes once the slices are there.
AccumulateArguments accumulate_arguments(const ReduceScatterArguments& arguments, int rank, int size);

// Copies this rank's own slice of a gather to its place.
void place_own(const Piece& piece, int rank) noexcept;

// A rank's wish in a split.
struct SplitWish {
  int color;
  int key;
  int rank;
};
// The members of the group of `color`, in their order in it.
std::vector<SplitWish> split_members(std::vector<SplitWish> wishes, int color);
// "in the group of ranks 4 and 6": the name of a group in messages. Rank numbers are those of a world of
// `world_size` ranks; empty for the world itself.
std::string describe_group(const std::vector<int>& world_ranks, int world_size);

// The last vote of one rank for a step's decision (Communicator::vote). Its owner's mutex guards it.
struct Ballot {
  std::uint64_t step = 0;
  std::vector<std::byte> decision;
  bool cast = false;

  void mark(std::uint64_t voted_step, std::span<const std::byte> voted) {
    step = voted_step;
    decision.assign(voted.begin(), voted.end());
    cast = true;
  }
  bool is_for(std::uint64_t wanted) const { return cast && step == wanted; }
};

}  // namespace forebay::internal
