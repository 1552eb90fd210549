// BlockInputs: keeps the inputs of blocks that are recomputed, between their forward and their backward pass.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::gpt {

class BlockInputs {
 public:
  virtual ~BlockInputs() = default;
  // Queues, in order with the model's work: what is queued after it may overwrite `input`.
  virtual void save(std::size_t layer, std::uint64_t micro_step, const float* input) = 0;
  // What was saved, from that point of the stream on and until release(). Layers come in reverse order.
  virtual const float* load(std::size_t layer, std::uint64_t micro_step) = 0;
  virtual void release() = 0;
};

}  // namespace forebay::gpt
