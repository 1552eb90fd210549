#include "engine_model.h"

#include "forebay/units.h"

namespace forebay::gpt {

namespace {

constexpr std::uint64_t kAlignment = 512;

}  // namespace

EngineModel::EngineModel(Engine& engine, const std::vector<GptUnit>& units, ComputeStream& compute)
    : engine_(engine), units_(units), compute_(compute) {
  ParameterId tokens;
  for (const GptUnit& unit : units) {
    const bool is_embedding = &unit == &units.front();
    // An embedding's backward pass adds rows of gradients together: it needs no weights.
    const UnitId id = engine.add_unit(unit.name, /*backward_reads_parameters=*/!is_embedding);
    for (const GptParameter& parameter : unit.parameters) {
      const ParameterId added =
          engine.add_parameter(id, parameter.name, parameter.count(), parameter.group, /*frozen=*/false,
                               /*replicated=*/parameter.cut == Cut::kWhole);
      if (is_embedding && added.index == embedding::kTokens) tokens = added;
    }
    if (&unit == &units.back()) engine.tie(id, tokens);
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

void EngineModel::run_micro_step(int index) {
  engine_.micro_step_begin(index);
  for (int unit = 0; unit < gpt_->unit_count(); ++unit) forward(unit);
  for (int unit = gpt_->unit_count() - 1; unit >= 0; --unit) backward(unit);
}

void EngineModel::forward(int unit) {
  const Lease lease = engine_.forward(unit, compute_.stream());
  gpt_->forward(unit, parameters_of(lease, unit));
}

void EngineModel::backward(int unit) {
  Lease lease = engine_.backward(unit, compute_.stream());
  const bool reads_parameters = unit != 0;
  Parameters parameters;
  if (reads_parameters) parameters = parameters_of(lease, unit);
  Gradients gradients(parameter_count_of(unit));
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    gradients[i].data = lease.gradient(static_cast<int>(i), &gradients[i].accumulate);
  }
  gpt_->backward(unit, parameters, gradients, engine_.loss_scale());
}

// The last unit's tied wte.weight comes after its own.
std::size_t EngineModel::parameter_count_of(int unit) const {
  const std::size_t own = units_[static_cast<std::size_t>(unit)].parameters.size();
  return unit + 1 == gpt_->unit_count() ? own + 1 : own;
}

Parameters EngineModel::parameters_of(const Lease& lease, int unit) const {
  Parameters parameters(parameter_count_of(unit));
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i] = lease.parameter(static_cast<int>(i));
  return parameters;
}

}  // namespace forebay::gpt
