#include "grid.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>

#include "forebay/error.h"

namespace forebay::gpt {
namespace {

Result<RankGrid> make_grid(int ranks, const Grid::Options& options) {
  Result<RankGrid> grid = RankGrid::create({.world_size = ranks, .tensor_parallel = options.tensor_parallel});
  if (!grid.ok()) return grid.status().with_context("--tensor-parallel");
  return grid;
}

// Before ranks form groups, so that those that would form others are named. Ranks that form none go on to
// something else, and are met there.
void check_agreement(Communicator& world, const Grid::Options& options) {
  struct Choice {
    int tensor_parallel;
    int activations;
  };
  const Choice mine{options.tensor_parallel, static_cast<int>(options.activations)};
  if (mine.tensor_parallel == 1 && options.activations == ActivationPlacement::kKeep) return;
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
  compare("--activations", [](const Choice& one) {
    return std::string(activation_placement_name(static_cast<ActivationPlacement>(one.activations)));
  });
}

RankGrid agree(Communicator& world, const Grid::Options& options) {
  check_agreement(world, options);
  return value_or_throw(make_grid(world.size(), options));
}

}  // namespace

Grid::Grid(Communicator& world, const Options& options)
    : world_(world), shape_(agree(world, options)), at_(shape_.coordinates(world.rank())) {
  if (part_count() > 1) communicators_ = value_or_throw(split_grid(world, shape_));
  if (options.activations != ActivationPlacement::kKeep)
    activations_ = value_or_throw(world.split(world.rank() - at_.tensor, at_.tensor));
}

std::vector<OperationTraffic> Grid::operation_traffic(const std::vector<OperationTraffic>& data) {
  if (part_count() == 1) return data;
  std::vector<OperationTraffic> all = world_.operation_traffic();
  const auto add = [&](const OperationTraffic& one, int GridCoordinates::*dimension) {
    auto place = std::find_if(all.begin(), all.end(), [&](const OperationTraffic& known) {
      return std::string_view(known.operation) == one.operation;
    });
    if (place == all.end()) {
      const auto size = static_cast<std::size_t>(world_.size());
      place = all.insert(place, {one.operation, 0, std::vector<Traffic>(size)});
    }
    place->count += one.count;
    for (std::size_t i = 0; i < one.peers.size(); ++i) {
      GridCoordinates peer = at_;
      peer.*dimension = static_cast<int>(i);
      Traffic& sum = place->peers[static_cast<std::size_t>(shape_.rank(peer))];
      sum.sent_bytes += one.peers[i].sent_bytes;
      sum.received_bytes += one.peers[i].received_bytes;
    }
  };
  for (const OperationTraffic& one : data) add(one, &GridCoordinates::data);
  for (const OperationTraffic& one : communicators_.tensor->operation_traffic())
    add(one, &GridCoordinates::tensor);
  if (activations_ != nullptr) {
    for (const OperationTraffic& one : activations_->operation_traffic()) add(one, &GridCoordinates::tensor);
  }
  for (const OperationTraffic& one : communicators_.pipeline->operation_traffic())
    add(one, &GridCoordinates::pipeline);
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

}  // namespace forebay::gpt
