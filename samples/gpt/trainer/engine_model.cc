#include "trainer/engine_model.h"

#include <numeric>

#include "forebay/units.h"

namespace forebay::gpt {

namespace {

constexpr std::uint64_t kAlignment = 512;

}  // namespace

EngineModel::EngineModel(Engine& engine, const std::vector<GptUnit>& units, ComputeStream& compute,
                         Communicator* token_stages)
    : engine_(engine), compute_(compute) {
  ParameterId tokens;
  for (const GptUnit& unit : units) {
    const bool is_embedding = unit.name == "embedding";
    // An embedding's backward pass only adds rows of gradients; it reads no weights.
    const bool backward_reads_parameters = unit.is_computed && !is_embedding;
    const UnitId id = engine.add_unit(unit.name, backward_reads_parameters);
    for (const GptParameter& parameter : unit.parameters) {
      const ParameterId added =
          engine.add_parameter(id, parameter.name, parameter.count(), parameter.group, /*frozen=*/false,
                               /*replicated=*/parameter.cut == Cut::kWhole);
      engine.declare_shape(added, std::vector<std::uint64_t>(parameter.shape.begin(), parameter.shape.end()));
      if (parameter.split) engine.declare_split(added, *parameter.split);
      if (is_token_embedding(parameter.name)) tokens = added;
      if (is_embedding || is_token_embedding(parameter.name) || parameter.name == "lm_head.weight")
        engine.declare_elementwise(added);
    }
    if (!unit.is_computed) {
      tokens_ = id;
      engine.share(id, *token_stages);
      continue;
    }
    std::vector<int> parameters(unit.parameters.size());
    std::iota(parameters.begin(), parameters.end(), 0);
    if (unit.uses_tokens) {
      const int tied = engine.tie(id, tokens);
      parameters.insert(is_embedding ? parameters.begin() : parameters.end(), tied);
    }
    units_.push_back({id, backward_reads_parameters, std::move(parameters)});
  }
}

std::uint64_t EngineModel::memory_bytes(const Gpt& gpt, std::uint64_t more_bytes) {
  return round_up(gpt.memory_bytes(), kAlignment) + more_bytes;
}

void EngineModel::set_model(Gpt& gpt, std::uint64_t more_bytes) {
  gpt_ = &gpt;
  engine_.declare_activations(memory_bytes(gpt, more_bytes));
}

DevicePtr EngineModel::use_engine_memory() {
  gpt_->use_memory(engine_.activations());
  return engine_.activations() + memory_bytes(*gpt_, 0);
}

void EngineModel::forward_pass(int index) {
  engine_.micro_step_begin(index);
  forward_units();
}

void EngineModel::evaluation_pass() {
  engine_.evaluation_begin();
  forward_units();
  engine_.evaluation_end();
}

void EngineModel::forward_units() {
  if (tokens_) static_cast<void>(engine_.forward(*tokens_, compute_.stream()));
  for (std::size_t unit = 0; unit < units_.size(); ++unit) forward(unit);
}

void EngineModel::backward_pass() {
  for (std::size_t unit = units_.size(); unit-- > 0;) backward(unit);
}

void EngineModel::end_backward_pass() {
  if (tokens_) static_cast<void>(engine_.backward(*tokens_, compute_.stream()));
}

void EngineModel::forward(std::size_t unit) {
  const Lease lease = engine_.forward(units_[unit].id, compute_.stream());
  gpt_->forward(static_cast<int>(unit), parameters_of(lease, units_[unit]));
}

void EngineModel::backward(std::size_t unit) {
  const Unit& of = units_[unit];
  Lease lease = engine_.backward(of.id, compute_.stream());
  Parameters parameters;
  if (of.backward_reads_parameters) parameters = parameters_of(lease, of);
  Gradients gradients(of.parameters.size());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    gradients[i].data = lease.gradient(of.parameters[i], &gradients[i].accumulate);
  }
  gpt_->backward(static_cast<int>(unit), parameters, gradients, engine_.loss_scale());
}

Parameters EngineModel::parameters_of(const Lease& lease, const Unit& unit) {
  Parameters parameters;
  for (const int index : unit.parameters) parameters.push_back(lease.parameter(index));
  return parameters;
}

}  // namespace forebay::gpt
