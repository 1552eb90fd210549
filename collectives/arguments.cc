#include "collectives/arguments.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>

#include "forebay/stream_copy.h"

namespace forebay::internal {
Status check_arguments(const ReduceScatterArguments& arguments, int size) {
  if (arguments.count == 0) return {};
  const std::size_t slice_bytes = arguments.count * element_bytes(arguments.type);
  if (arguments.source == nullptr)
    return invalid_argument("reduce_scatter: source is null; give this rank's slices");
  if (arguments.target == nullptr)
    return invalid_argument("reduce_scatter: target is null; give room for one slice in fp32");
  if (size == 1) return {};
  if (arguments.receive == nullptr) {
    return invalid_argument("reduce_scatter: receive is null; give staging for ", size, " slices");
  }
  if (arguments.source_stride_bytes < slice_bytes) {
    return invalid_argument("reduce_scatter: a stride of ", arguments.source_stride_bytes,
                            " bytes makes slices of ", slice_bytes,
                            " bytes overlap; the stride must be at least the slice");
  }
  return {};
}

Status check_arguments(const AllGatherArguments& arguments, int size) {
  if (arguments.bytes == 0) return {};
  if (arguments.source == nullptr)
    return invalid_argument("all_gather: source is null; give this rank's slice");
  if (arguments.target == nullptr)
    return invalid_argument("all_gather: target is null; give room for all slices");
  if (size > 1 && arguments.target_stride_bytes < arguments.bytes) {
    return invalid_argument("all_gather: a stride of ", arguments.target_stride_bytes,
                            " bytes makes slices of ", arguments.bytes,
                            " bytes overlap; the stride must be at least the slice");
  }
  return {};
}

Status check_peer(const char* operation, const void* address, std::size_t bytes, int peer, int rank,
                  int size) {
  if (peer < 0 || peer >= size || peer == rank) {
    return invalid_argument(operation, ": peer ", peer, " is not another rank of 0..", size - 1,
                            " seen from rank ", rank, "; give the number of another rank");
  }
  if (bytes > 0 && address == nullptr) {
    return invalid_argument(operation, ": the address is null; give ", bytes, " bytes");
  }
  return {};
}

Status check_exchange(std::span<const std::byte> mine, std::span<std::byte> all, int size) {
  if (all.size() == mine.size() * static_cast<std::size_t>(size)) return {};
  return invalid_argument("exchange: `all` has ", all.size(), " bytes; ", size, " ranks with ", mine.size(),
                          " bytes each need ", mine.size() * static_cast<std::size_t>(size),
                          "; make `all` that large");
}

Status check_vote(std::span<const std::byte> decision) {
  if (decision.size() <= kDecisionBytesMax) return {};
  return invalid_argument("vote: a decision of ", decision.size(), " bytes; give at most ",
                          kDecisionBytesMax);
}

Status cause_of_abort(const Status& cause, int world_rank) {
  if (!cause.ok()) return cause;
  return Status(StatusCode::kPeerLost, "rank ", world_rank,
                " aborted the communicator without a cause; see its output");
}

std::chrono::milliseconds clamp_deadline(std::chrono::milliseconds deadline) noexcept {
  return std::clamp(deadline, std::chrono::milliseconds(1), kDeadlineMax);
}

Collective reduce_scatter_transfer(const ReduceScatterArguments& arguments) {
  const std::size_t bytes = arguments.count * element_bytes(arguments.type);
  return {{.count = arguments.count,
           .operation = Operation::kReduceScatter,
           .type = static_cast<std::uint32_t>(arguments.type)},
          {.source = arguments.source,
           .source_stride = arguments.source_stride_bytes,
           .target = arguments.receive,
           .target_stride = bytes,
           .bytes = bytes}};
}

Collective all_gather_transfer(const AllGatherArguments& arguments) {
  return {{.count = arguments.bytes, .operation = Operation::kAllGather},
          {.source = arguments.source,
           .target = arguments.target,
           .target_stride = arguments.target_stride_bytes,
           .bytes = arguments.bytes,
           .keep_own = true}};
}

Collective control_transfer(Operation operation, std::span<const std::byte> mine, std::span<std::byte> all) {
  return {{.count = mine.size(), .operation = operation},
          {.source = mine.data(),
           .target = all.data(),
           .target_stride = mine.size(),
           .bytes = mine.size(),
           .keep_own = true}};
}

AccumulateArguments accumulate_arguments(const ReduceScatterArguments& arguments, int rank, int size) {
  return {.own = arguments.source + static_cast<std::size_t>(rank) * arguments.source_stride_bytes,
          .received = arguments.receive,
          .received_stride_bytes = arguments.count * element_bytes(arguments.type),
          .target = arguments.target,
          .count = arguments.count,
          .rank = rank,
          .rank_count = size,
          .type = arguments.type,
          .first = arguments.first};
}

void place_own(const Piece& piece, int rank) noexcept {
  if (!piece.keep_own || piece.bytes == 0) return;
  std::byte* const place = piece.target + static_cast<std::size_t>(rank) * piece.target_stride;
  if (place != piece.source) stream_copy(place, piece.source, piece.bytes);
}

std::vector<SplitWish> split_members(std::vector<SplitWish> wishes, int color) {
  std::erase_if(wishes, [color](const SplitWish& wish) { return wish.color != color; });
  std::sort(wishes.begin(), wishes.end(), [](const SplitWish& a, const SplitWish& b) {
    return std::tie(a.key, a.rank) < std::tie(b.key, b.rank);
  });
  return wishes;
}

std::string describe_group(const std::vector<int>& world_ranks, int world_size) {
  // A longer list tells a reader less than its ends.
  constexpr std::size_t kListMax = 8;
  bool same = world_ranks.size() == static_cast<std::size_t>(world_size);
  for (std::size_t i = 0; i < world_ranks.size(); ++i) same = same && world_ranks[i] == static_cast<int>(i);
  if (same) return {};
  if (world_ranks.size() <= kListMax) return "in the group of " + rank_list(world_ranks);
  return "in the group of " + std::to_string(world_ranks.size()) + " ranks from " +
         std::to_string(world_ranks.front()) + " to " + std::to_string(world_ranks.back());
}

}  // namespace forebay::internal
