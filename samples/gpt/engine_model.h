// EngineModel: a Gpt whose parameters and gradients an Engine keeps. This is the whole of what a model has to
// do to be trained under ZeRO: say what there is, and lease each unit around its forward and its backward
// pass.
#pragma once

#include <vector>

#include "compute_stream.h"
#include "forebay/engine.h"
#include "gpt.h"
#include "shape.h"

namespace forebay::gpt {

class EngineModel {
 public:
  // Registers the model's units, as this rank has them, with `engine`, not yet committed. All three outlive
  // this.
  EngineModel(Engine& engine, const std::vector<GptUnit>& units, ComputeStream& compute);

  // Before the engine's commit: declares the memory of `gpt`, which outlives this, and `more_bytes`, to be
  // had behind it.
  void set_model(Gpt& gpt, std::uint64_t more_bytes);
  // What that is of the engine's activations.
  static std::uint64_t memory_bytes(const Gpt& gpt, std::uint64_t more_bytes);
  // After the engine's commit: takes the declared activation memory, and returns where those bytes are,
  // aligned to 512.
  DevicePtr use_engine_memory();

  // Queues the forward and the backward pass of one micro-step, which the model has begun and whose tokens it
  // has.
  void run_micro_step(int index);

 private:
  void forward(int unit);
  void backward(int unit);
  std::size_t parameter_count_of(int unit) const;
  Parameters parameters_of(const Lease& lease, int unit) const;

  Engine& engine_;
  Gpt* gpt_ = nullptr;
  const std::vector<GptUnit>& units_;
  ComputeStream& compute_;
};

}  // namespace forebay::gpt
