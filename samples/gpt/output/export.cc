#include "output/export.h"

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "forebay/error.h"
#include "output/safetensors.h"

namespace forebay::gpt {
namespace {

// Puts the parts that the tensor-parallel ranks have together; `values` is this rank's.
std::vector<float> join_tensor_parts(Grid& grid, const GptParameter& parameter,
                                     std::span<const float> values) {
  Communicator* const tensor = grid.tensor();
  if (tensor == nullptr) return {values.begin(), values.end()};
  TensorPart part = grid.tensor_part();
  std::vector<float> parts(values.size() * part.size);
  throw_if_error(tensor->exchange(std::as_bytes(values), std::as_writable_bytes(std::span(parts))));
  std::vector<float> whole(parameter.count());
  for (part.rank = 0; part.rank < part.size; ++part.rank)
    put_part(parameter, part, std::span(parts).subspan(part.rank * values.size(), values.size()), whole);
  return whole;
}

// Gives all pipeline stages the values that `stage` has in `mine`.
std::vector<float> share_from_stage(Grid& grid, int stage, std::vector<float> mine) {
  Communicator* const stages = grid.forward();
  if (stages == nullptr) return mine;
  std::vector<float> all(mine.size() * static_cast<std::size_t>(stages->size()));
  throw_if_error(stages->exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
  const auto place = all.begin() + static_cast<std::ptrdiff_t>(mine.size()) * stage;
  return {place, place + static_cast<std::ptrdiff_t>(mine.size())};
}

// The first pipeline stage that has the parameter: the first and the last both have the tied one.
int stage_that_has(const RankModel& model, const GptParameter& parameter) {
  const auto count = static_cast<std::size_t>(model.grid.shape().pipeline_parallel());
  for (std::size_t stage = 0; stage + 1 < count; ++stage) {
    for (const GptUnit& unit : stage_of(model.whole_units, {stage, count})) {
      for (const GptParameter& one : unit.parameters) {
        if (one.name == parameter.name) return static_cast<int>(stage);
      }
    }
  }
  return static_cast<int>(count) - 1;
}

// Writes the parameters that `stage` has and no stage before it, in the order of the model.
void export_stage(RankModel& model, int stage, SafetensorsWriter* writer) {
  Grid& grid = model.grid;
  std::vector<const GptParameter*> parameters;
  for (const GptUnit& unit : model.whole_units) {
    for (const GptParameter& parameter : unit.parameters) {
      if (stage_that_has(model, parameter) == stage) parameters.push_back(&parameter);
    }
  }
  std::size_t index = 0;
  const auto write = [&](std::span<const float> mine) {
    const GptParameter& parameter = *parameters[index++];
    const std::vector<float> whole = share_from_stage(grid, stage, join_tensor_parts(grid, parameter, mine));
    if (writer != nullptr) writer->write(whole);
  };
  if (grid.at().pipeline == stage) {
    model.engine.visit_parameters([&](const ParameterShape& shape, std::span<const float> values) {
      if (index < parameters.size() && shape.name == parameters[index]->name) write(values);
    });
  } else {  // The other stages take part in the exchanges with values that nobody reads.
    while (index < parameters.size())
      write(std::vector<float>(part_of(*parameters[index], grid.tensor_part()).count()));
  }
}

}  // namespace

void export_weights(RankModel& model, const std::string& path) {
  std::unique_ptr<SafetensorsWriter> writer;
  if (model.rank.place.rank == 0) {
    std::vector<TensorHeader> headers;
    for (const GptUnit& unit : model.whole_units) {
      for (const GptParameter& parameter : unit.parameters)
        headers.push_back({parameter.name, parameter.shape});
    }
    writer = std::make_unique<SafetensorsWriter>(path, headers);
  }
  for (int stage = 0; stage < model.grid.shape().pipeline_parallel(); ++stage)
    export_stage(model, stage, writer.get());
  if (writer != nullptr) writer->finish();
}

}  // namespace forebay::gpt
