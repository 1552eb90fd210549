// EngineModel: a Gpt whose parameters and gradients an Engine keeps. A model needs no more than this to train
// under ZeRO: register units and parameters, then lease each unit around its forward and its backward pass.
//
// A pipeline stage that has "tokens" as a unit of its own shares it with the other stage that has it.
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
  // Registers this rank's units with `engine`. The arguments outlive this. `token_stages` joins the two
  // stages that have "tokens". Requires: the engine is not committed.
  EngineModel(Engine& engine, const std::vector<GptUnit>& units, ComputeStream& compute,
              Communicator* token_stages = nullptr);

  // Declares the memory of `gpt`, which outlives this, and `more_bytes` behind it. Order: before the engine's
  // commit.
  void set_model(Gpt& gpt, std::uint64_t more_bytes);
  // The bytes that set_model() declares.
  static std::uint64_t memory_bytes(const Gpt& gpt, std::uint64_t more_bytes);
  // Gives the declared memory to the model and returns the address of the further bytes, aligned to 512.
  // Order: after the engine's commit.
  DevicePtr use_engine_memory();

  // Queue the forward and the backward pass of one micro-step. After backward_pass(), the gradient for the
  // preceding stage is complete. Order: after Gpt::begin() and the copy of the tokens.
  void forward_pass(int index);
  void backward_pass();
  void end_backward_pass();
  // Queues a forward pass that belongs to no step. Order: between steps. Collective.
  void evaluation_pass();

 private:
  // A unit that the model computes. `parameters` are their indices in a lease, in the order of
  // describe_units().
  struct Unit {
    UnitId id = 0;
    bool backward_reads_parameters = true;
    std::vector<int> parameters;
  };

  void forward_units();
  void forward(std::size_t unit);
  void backward(std::size_t unit);
  static Parameters parameters_of(const Lease& lease, const Unit& unit);

  Engine& engine_;
  Gpt* gpt_ = nullptr;
  ComputeStream& compute_;
  std::vector<Unit> units_;
  std::optional<UnitId> tokens_;  // The unit "tokens", which is not computed.
};

}  // namespace forebay::gpt
