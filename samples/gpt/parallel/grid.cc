#include "parallel/grid.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "forebay/error.h"
#include "forebay/grouped_communicator.h"

namespace forebay::gpt {
namespace {

Result<RankGrid> make_grid(int ranks, const Grid::Options& options) {
  Result<RankGrid> grid = RankGrid::create({.world_size = ranks,
                                            .tensor_parallel = options.tensor_parallel,
                                            .pipeline_parallel = options.pipeline_parallel});
  if (grid.ok()) return grid;
  const bool of_tensor = ranks % options.tensor_parallel != 0;
  return grid.status().with_context(of_tensor ? "--tensor-parallel" : "--pipeline-parallel");
}

// Compared before ranks form groups, so that the message names ranks with other options.
void check_agreement(Communicator& world, const Grid::Options& options) {
  struct Choice {
    int tensor_parallel;
    int pipeline_parallel;
    int activations;
  };
  if (world.size() == 1) return;
  const Choice mine{options.tensor_parallel, options.pipeline_parallel,
                    static_cast<int>(options.activations)};
  std::vector<Choice> all(static_cast<std::size_t>(world.size()));
  throw_if_error(world.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
  const auto compare = [&](const char* option, const auto& value_of) {
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      const std::string first = value_of(all[0]);
      const std::string other = value_of(all[rank]);
      if (other == first) continue;
      throw Error(StatusCode::kInvalidArgument, std::string(option) + " is " + first + " on rank 0 and " +
                                                    other + " on rank " + std::to_string(rank) +
                                                    "; give all ranks the same");
    }
  };
  compare("--tensor-parallel", [](const Choice& one) { return std::to_string(one.tensor_parallel); });
  compare("--pipeline-parallel", [](const Choice& one) { return std::to_string(one.pipeline_parallel); });
  compare("--activations", [](const Choice& one) {
    return std::string(activation_placement_name(static_cast<ActivationPlacement>(one.activations)));
  });
}

RankGrid agreed_grid(Communicator& world, const Grid::Options& options) {
  check_agreement(world, options);
  return value_or_throw(make_grid(world.size(), options));
}

}  // namespace

Grid::Grid(Communicator& world, const Options& options)
    : world_(world), shape_(agreed_grid(world, options)), at_(shape_.coordinates(world.rank())) {
  if (part_count() > 1) communicators_ = value_or_throw(split_grid(world, shape_));
  if (options.activations != ActivationPlacement::kKeep)
    activations_ = value_or_throw(world.split(world.rank() - at_.tensor, at_.tensor));
  if (shape_.pipeline_parallel() == 1) return;
  backward_ = value_or_throw(communicators_.pipeline->split(0, at_.pipeline));
  const bool is_end = stage().is_first() || stage().is_last();
  ends_ = value_or_throw(communicators_.pipeline->split(is_end ? 0 : 1, at_.pipeline));
}

std::vector<OperationTraffic> Grid::operation_traffic(const std::vector<OperationTraffic>& data) {
  if (part_count() == 1) return data;
  std::vector<OperationTraffic> all = world_.operation_traffic();
  const auto add = [&](const std::vector<OperationTraffic>& some, int GridCoordinates::*dimension) {
    add_operation_traffic(all, some, world_.size(), [&](int peer) {
      GridCoordinates place = at_;
      place.*dimension = peer;
      return shape_.rank(place);
    });
  };
  add(data, &GridCoordinates::data);
  add(communicators_.tensor->operation_traffic(), &GridCoordinates::tensor);
  if (activations_ != nullptr) add(activations_->operation_traffic(), &GridCoordinates::tensor);
  add(communicators_.pipeline->operation_traffic(), &GridCoordinates::pipeline);
  if (backward_ == nullptr) return all;
  add(backward_->operation_traffic(), &GridCoordinates::pipeline);
  if (!stage().is_first() && !stage().is_last()) return all;
  add_operation_traffic(all, ends_->operation_traffic(), world_.size(), [&](int peer) {
    return shape_.rank({at_.tensor, at_.data, peer == 0 ? 0 : shape_.pipeline_parallel() - 1});
  });
  return all;
}

std::vector<std::string> Grid::of_each_part(const std::string& mine) {
  const auto size = static_cast<std::size_t>(world_.size());
  const std::size_t length = mine.size();
  std::vector<std::size_t> lengths(size);
  throw_if_error(
      world_.exchange(std::as_bytes(std::span(&length, 1)), std::as_writable_bytes(std::span(lengths))));
  const std::size_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::string padded = mine;
  padded.resize(longest);
  std::string all(longest * size, '\0');
  throw_if_error(world_.exchange(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all))));

  std::vector<std::string> texts;
  for (int pipeline = 0; pipeline < shape_.pipeline_parallel(); ++pipeline) {
    for (int tensor = 0; tensor < shape_.tensor_parallel(); ++tensor) {
      const auto rank =
          static_cast<std::size_t>(shape_.rank({.tensor = tensor, .data = 0, .pipeline = pipeline}));
      texts.push_back(all.substr(rank * longest, lengths[rank]));
    }
  }
  return texts;
}

Status check_grid(int ranks, const Grid::Options& options) {
  return make_grid(ranks, options).status();
}

Status check_order_group(int ranks, const Grid::Options& options, int group) {
  Result<RankGrid> grid = make_grid(ranks, options);
  FOREBAY_RETURN_IF_ERROR(grid.status());
  const int data = grid.value().data_parallel();
  if (data % group == 0) return {};
  std::string divisors;
  for (int divisor = 1; divisor <= data; ++divisor) {
    if (data % divisor == 0)
      divisors += (divisors.empty() ? "" : ", ") + ("group:" + std::to_string(divisor));
  }
  return Status(StatusCode::kInvalidArgument,
                "--order group:" + std::to_string(group) + ": groups of " + std::to_string(group) +
                    " do not divide the " + std::to_string(data) + " data-parallel ranks" +
                    (data == ranks ? "" : " that " + std::to_string(ranks) + " ranks make") +
                    "; use one of " + divisors);
}

}  // namespace forebay::gpt
