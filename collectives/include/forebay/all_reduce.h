// all_reduce: the sum of what every rank has, on every rank; for activations, whose ranks all go on with it.
//
// It is reduce_scatter, then all_gather: an element's owner adds the contributions in rank order in fp32 and
// rounds the sum once to the type, so all ranks get the same bits, however many elements a bucket has. It
// goes bucket by bucket through staging of constant size, which the caller owns. With one rank nothing
// happens.
#pragma once

#include <cstdint>

#include "forebay/communicator.h"
#include "forebay/kernels.h"

namespace forebay {

struct AllReduceArguments {
  std::byte* data;      // `count` elements of `type`, replaced by their sums.
  std::uint64_t count;  // Any number; the last bucket is padded in the staging.
  DataType type;
  std::byte* staging;  // all_reduce_staging_bytes() of it, aligned to 4 bytes; contents undefined after.
  std::uint64_t bucket_bytes;  // Of the elements that one reduce_scatter and one all_gather take, at most.
};

// Staging of an all_reduce over `rank_count` ranks with these buckets: 0 for one rank, otherwise two buckets
// and what one slice takes in fp32.
std::uint64_t all_reduce_staging_bytes(int rank_count, std::uint64_t bucket_bytes, DataType type) noexcept;

// What each rank sends, and receives, to sum up `count` elements.
std::uint64_t all_reduce_sent_bytes(int rank_count, std::uint64_t bucket_bytes, DataType type,
                                    std::uint64_t count) noexcept;

// Queues on `stream`, as the communicator's data operations do, and of which it is a fixed sequence.
// `backend` and `kernels` are those of the communicator. Requires: a bucket of at least one element; the same
// arguments but for addresses on every rank.
Status all_reduce(Communicator& communicator, Backend& backend, Kernels& kernels,
                  const AllReduceArguments& arguments, Stream stream);

}  // namespace forebay
