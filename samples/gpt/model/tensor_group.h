// TensorGroup: the collectives of the tensor-parallel ranks inside a layer.
//
// They are queued on the model's stream, in order with its work. With one rank they do nothing.
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
    Communicator* communicator = nullptr;  // Not shared with other users. Null: one rank.
    Backend* backend = nullptr;
    Kernels* kernels = nullptr;
    Stream stream;
    std::uint64_t bucket_bytes = 16u << 20;  // The most that one collective moves.
  };

  TensorGroup() = default;
  // The objects in `options` outlive this.
  explicit TensorGroup(const Options& options) : options_(options) {}

  TensorPart part() const;

  // Device memory for all_reduce(), aligned to 256 bytes.
  std::size_t staging_bytes() const;

  // Replaces `data` by the sum over ranks: fp32, in rank order, bit for bit the same on each rank.
  void all_reduce(float* data, std::size_t count, std::byte* staging);
  // Gives every rank the `bytes` of each. Rank r's are at data + r * bytes.
  void all_gather(std::byte* data, std::size_t bytes);

 private:
  bool is_alone() const { return part().size == 1; }

  Options options_;
};

}  // namespace forebay::gpt
