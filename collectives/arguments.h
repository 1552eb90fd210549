// The checks of arguments that all communicators share, so that a wrong call gets the same answer from each
// of them.
#pragma once

#include <span>

#include "forebay/communicator.h"

namespace forebay::internal {

// Ok, or kInvalidArgument that says which argument of which operation is wrong.
Status check_arguments(const ReduceScatterArguments& arguments, int size);
Status check_arguments(const AllGatherArguments& arguments, int size);
// Of send and recv, whose name is `operation`.
Status check_peer(const char* operation, const void* address, std::size_t bytes, int peer, int rank,
                  int size);
Status check_exchange(std::span<const std::byte> mine, std::span<std::byte> all, int size);

}  // namespace forebay::internal
