// BlockInputs: keeps the inputs of blocks that are recomputed, between their forward and their backward pass.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::gpt {

class BlockInputs {
 public:
  virtual ~BlockInputs() = default;
  // Queues the save in order with the model's work. Work queued later may overwrite `input`.
  virtual void save(std::size_t layer, std::uint64_t micro_step, const float* input) = 0;
  // Returns the saved input, valid from this point of the stream until release(). Order: layers in reverse.
  virtual const float* load(std::size_t layer, std::uint64_t micro_step) = 0;
  virtual void release() = 0;
};

}  // namespace forebay::gpt
