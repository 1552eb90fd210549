// EngineModel: a Gpt whose parameters and gradients an Engine keeps. This is the whole of what a model has to
// do to be trained under ZeRO: say what there is, and lease each unit around its forward and its backward
// pass.
//
// A stage of a pipeline that has "tokens" as a unit of its own shares it with the other stage that has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "forebay/engine.h"
#include "model/gpt.h"
#include "model/shape.h"
#include "trainer/compute_stream.h"

namespace forebay::gpt {

class EngineModel {
 public:
  // Registers the model's units, as this rank has them, with `engine`, not yet committed. All three outlive
  // this.
  // `token_stages`: the stages that have "tokens".
  EngineModel(Engine& engine, const std::vector<GptUnit>& units, ComputeStream& compute,
              Communicator* token_stages = nullptr);

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
  void run_micro_step(int index) {
    forward_pass(index);
    backward_pass();
    end_backward_pass();
  }
  // The same in pieces, for a pipeline: what goes to the stage before is complete after the second.
  void forward_pass(int index);
  void backward_pass();
  void end_backward_pass();

 private:
  // A unit that the model computes: where its parameters are in a lease, in the order of describe_units().
  struct Unit {
    UnitId id = 0;
    bool backward_reads_parameters = true;
    std::vector<int> parameters;
  };

  void forward(std::size_t unit);
  void backward(std::size_t unit);
  static Parameters parameters_of(const Lease& lease, const Unit& unit);

  Engine& engine_;
  Gpt* gpt_ = nullptr;
  ComputeStream& compute_;
  std::vector<Unit> units_;
  std::optional<UnitId> tokens_;  // The unit that is not computed.
};

}  // namespace forebay::gpt
