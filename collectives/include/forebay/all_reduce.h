// all_reduce: the sum over all ranks, on every rank. Made for activations, with which every rank goes on.
//
// It is a reduce_scatter followed by an all_gather: an element's owner adds the contributions in rank order
// in fp32 and rounds the sum once to the type. So the results of all ranks are bit for bit the same, for any
// size of a bucket. The data goes bucket by bucket through staging of constant size, which the caller owns.
#pragma once

#include <cstdint>

#include "forebay/communicator.h"
#include "forebay/kernels.h"

namespace forebay {

struct AllReduceArguments {
  std::byte* data;      // `count` elements of `type`, replaced by their sums.
  std::uint64_t count;  // Any number; the last bucket is padded in the staging.
  DataType type;
  std::byte* staging;          // all_reduce_staging_bytes(), aligned to 4 bytes; contents undefined after.
  std::uint64_t bucket_bytes;  // At most so many bytes of elements go through one reduce_scatter.
};

// Bytes of staging for an all_reduce over `rank_count` ranks with these buckets: 0 for one rank, otherwise
// two buckets and one slice in fp32.
std::uint64_t all_reduce_staging_bytes(int rank_count, std::uint64_t bucket_bytes, DataType type) noexcept;

// Bytes that each rank sends, and receives, to add up `count` elements.
std::uint64_t all_reduce_sent_bytes(int rank_count, std::uint64_t bucket_bytes, DataType type,
                                    std::uint64_t count) noexcept;

// Replaces the data by its sums. With one rank it does nothing.
// Order:    queues a fixed sequence of data operations on `stream`.
// Requires: `backend` and `kernels` are those of the communicator; a bucket has at least one element; all
//           ranks give the same arguments, except for addresses.
// Errors:   those of the communicator's operations, of the copies and of the kernels.
Status all_reduce(Communicator& communicator, Backend& backend, Kernels& kernels,
                  const AllReduceArguments& arguments, Stream stream);

}  // namespace forebay
