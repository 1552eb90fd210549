#include "output/export.h"

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "forebay/error.h"
#include "output/huggingface.h"
#include "output/output_file.h"
#include "output/safetensors.h"
#include "output/weight_files.h"

namespace forebay::gpt {
namespace {

// Takes each parameter; empty on ranks that write nothing.
using Sink = std::function<void(std::span<const float>)>;

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
void export_stage(RankModel& model, int stage, const Sink& sink) {
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
    if (sink) sink(whole);
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
  const bool is_directory = names_directory(path);
  const auto export_to = [&](const Sink& sink) {
    for (int stage = 0; stage < model.grid.shape().pipeline_parallel(); ++stage)
      export_stage(model, stage, sink);
  };
  if (model.rank.place.rank != 0) return export_to({});
  std::vector<TensorHeader> headers;
  for (const GptUnit& unit : model.whole_units) {
    for (const GptParameter& parameter : unit.parameters)
      headers.push_back({is_directory ? published_name(parameter.name) : parameter.name, parameter.shape});
  }
  const auto write = [&](auto&& writer) {
    export_to([&](std::span<const float> values) { writer.write(values); });
    writer.finish();
  };
  if (!is_directory) return write(SafetensorsWriter(path, headers));
  write(ModelDirectoryWriter(path, headers, model.options.export_shard_bytes));
  write_file(path + "/config.json", model_config(model.options.model));
}

bool names_directory(const std::string& path) {
  return path.ends_with('/') || is_model_directory(path);
}

}  // namespace forebay::gpt
