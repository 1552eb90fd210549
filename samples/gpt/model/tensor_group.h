// TensorGroup: the ranks that share every layer of a model, and what they do together in the middle of one.
//
// What it does is queued on the stream on which the model computes, in order with it. A group of one rank
// does nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/communicator.h"
#include "forebay/kernels.h"
#include "model/shape.h"

namespace forebay::gpt {

class TensorGroup {
 public:
  struct Options {
    Communicator* communicator = nullptr;  // Used by nobody else. Null: one rank.
    Backend* backend = nullptr;
    Kernels* kernels = nullptr;
    Stream stream;
    std::uint64_t bucket_bytes = 16u << 20;  // That one collective moves at most.
  };

  TensorGroup() = default;
  // What the options point to outlives this.
  explicit TensorGroup(const Options& options) : options_(options) {}

  TensorPart part() const;

  // Device memory for all_reduce(), aligned to 256 bytes.
  std::size_t staging_bytes() const;

  // Replaces `data` by the sum over ranks, the same bits on each: fp32, in rank order.
  void all_reduce(float* data, std::size_t count, std::byte* staging);
  // Rank r's `bytes` are at data + r * bytes: brings every rank's to every other.
  void all_gather(std::byte* data, std::size_t bytes);

 private:
  bool is_alone() const { return part().size == 1; }

  Options options_;
};

}  // namespace forebay::gpt
