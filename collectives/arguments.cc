#include "arguments.h"

#include <string>

namespace forebay::internal {
namespace {

Status invalid(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message));
}

}  // namespace

Status check_arguments(const ReduceScatterArguments& arguments, int size) {
  if (arguments.count == 0) return {};
  const std::size_t slice_bytes = arguments.count * element_bytes(arguments.type);
  if (arguments.source == nullptr) return invalid("reduce_scatter: source is null; give this rank's slices");
  if (arguments.target == nullptr)
    return invalid("reduce_scatter: target is null; give room for one slice in fp32");
  if (size == 1) return {};
  if (arguments.receive == nullptr) {
    return invalid("reduce_scatter: receive is null; give staging for " + std::to_string(size) + " slices");
  }
  if (arguments.source_stride_bytes < slice_bytes) {
    return invalid("reduce_scatter: a stride of " + std::to_string(arguments.source_stride_bytes) +
                   " bytes makes slices of " + std::to_string(slice_bytes) +
                   " bytes overlap; the stride must be at least the slice");
  }
  return {};
}

Status check_arguments(const AllGatherArguments& arguments, int size) {
  if (arguments.bytes == 0) return {};
  if (arguments.source == nullptr) return invalid("all_gather: source is null; give this rank's slice");
  if (arguments.target == nullptr) return invalid("all_gather: target is null; give room for all slices");
  if (size > 1 && arguments.target_stride_bytes < arguments.bytes) {
    return invalid("all_gather: a stride of " + std::to_string(arguments.target_stride_bytes) +
                   " bytes makes slices of " + std::to_string(arguments.bytes) +
                   " bytes overlap; the stride must be at least the slice");
  }
  return {};
}

Status check_peer(const char* operation, const void* address, std::size_t bytes, int peer, int rank,
                  int size) {
  if (peer < 0 || peer >= size || peer == rank) {
    return invalid(std::string(operation) + ": peer " + std::to_string(peer) + " is not another rank of 0.." +
                   std::to_string(size - 1) + " seen from rank " + std::to_string(rank));
  }
  if (bytes > 0 && address == nullptr) {
    return invalid(std::string(operation) + ": the address is null; give " + std::to_string(bytes) +
                   " bytes");
  }
  return {};
}

Status check_exchange(std::span<const std::byte> mine, std::span<std::byte> all, int size) {
  if (all.size() == mine.size() * static_cast<std::size_t>(size)) return {};
  return invalid("exchange: `all` has " + std::to_string(all.size()) + " bytes; " + std::to_string(size) +
                 " ranks with " + std::to_string(mine.size()) + " bytes each need " +
                 std::to_string(mine.size() * static_cast<std::size_t>(size)));
}

}  // namespace forebay::internal
