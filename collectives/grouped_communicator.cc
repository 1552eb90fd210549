#include "forebay/grouped_communicator.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "collectives/arguments.h"
#include "forebay/units.h"

namespace forebay {
namespace {

constexpr std::size_t kStagingAlignment = 512;

Status check_groups(int size, int group) {
  if (group >= 1 && size % group == 0) return {};
  return invalid_argument("all-reduce groups of ", group, " ranks do not divide ", size,
                          " ranks; give a number that does, 1 for no groups");
}

// The offsets in the staging of one reduce_scatter: contributions from within the group, the group's sums,
// and sums from the other groups.
struct Staging {
  Staging(const GroupedOptions& options, int world_size, std::size_t count, DataType type) {
    const auto group = static_cast<std::size_t>(options.group);
    const std::size_t groups = static_cast<std::size_t>(world_size) / group;
    partial = round_up(group * count * element_bytes(type), kStagingAlignment);
    across = partial + round_up((options.replicate ? 1 : groups) * count * sizeof(float), kStagingAlignment);
    end = across + round_up((options.replicate ? 1 : groups) * count * sizeof(float), kStagingAlignment);
  }
  std::size_t partial;
  std::size_t across;
  std::size_t end;
};

class GroupedCommunicator final : public Communicator {
 public:
  GroupedCommunicator(Communicator& world, const GroupedOptions& options,
                      std::unique_ptr<Communicator> within, std::unique_ptr<Communicator> across)
      : world_(world), options_(options), within_(std::move(within)), across_(std::move(across)) {}

  int rank() const noexcept override { return members().rank(); }
  int size() const noexcept override { return members().size(); }
  const char* name() const noexcept override { return world_.name(); }

  std::size_t staging_bytes(std::size_t count, DataType type) const override {
    return grouped_staging_bytes(options_, world_.size(), count, type);
  }

  Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(world_.status());
    FOREBAY_RETURN_IF_ERROR(internal::check_arguments(arguments, size()));
    if (arguments.count == 0) return {};
    const std::size_t groups = static_cast<std::size_t>(across_->size());
    if (options_.replicate && arguments.count % groups != 0) {
      return invalid_argument("reduce_scatter: ", arguments.count, " elements are not a multiple of the ",
                              groups, " groups that add them; pad the slices to one");
    }
    const Staging staging(options_, world_.size(), arguments.count, arguments.type);
    auto* const partial = reinterpret_cast<float*>(arguments.receive + staging.partial);
    // Whole: for each group, the slice of its rank that has this rank's place.
    const std::size_t sums = options_.replicate ? 1 : groups;
    const auto group = static_cast<std::size_t>(options_.group);
    for (std::size_t k = 0; k < sums; ++k) {
      ReduceScatterArguments inner = arguments;
      inner.source = arguments.source + k * group * arguments.source_stride_bytes;
      inner.target = partial + k * arguments.count;
      inner.first = true;
      FOREBAY_RETURN_IF_ERROR(within_->reduce_scatter(inner, stream));
    }
    ReduceScatterArguments outer{};
    outer.source = reinterpret_cast<const std::byte*>(partial);
    outer.count = arguments.count * sums / groups;
    outer.source_stride_bytes = outer.count * sizeof(float);
    outer.type = DataType::kFloat32;
    outer.receive = arguments.receive + staging.across;
    // Replicated: this group adds up a part of the slice; then all groups exchange their parts.
    const std::size_t own = options_.replicate ? static_cast<std::size_t>(across_->rank()) * outer.count : 0;
    outer.target = arguments.target + own;
    outer.first = arguments.first;
    FOREBAY_RETURN_IF_ERROR(across_->reduce_scatter(outer, stream));
    if (!options_.replicate) return {};
    return across_->all_gather({.source = reinterpret_cast<const std::byte*>(outer.target),
                                .target = reinterpret_cast<std::byte*>(arguments.target),
                                .target_stride_bytes = outer.count * sizeof(float),
                                .bytes = outer.count * sizeof(float)},
                               stream);
  }

  Status all_gather(const AllGatherArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(world_.status());
    FOREBAY_RETURN_IF_ERROR(internal::check_arguments(arguments, size()));
    if (arguments.bytes == 0) return {};
    if (options_.replicate) return within_->all_gather(arguments, stream);
    // Across the groups first, so that each slice enters a group once.
    const std::size_t stride = arguments.target_stride_bytes;
    const auto group = static_cast<std::size_t>(options_.group);
    std::byte* const column = arguments.target + static_cast<std::size_t>(within_->rank()) * stride;
    AllGatherArguments outer = arguments;
    outer.target = column;
    outer.target_stride_bytes = group * stride;
    FOREBAY_RETURN_IF_ERROR(across_->all_gather(outer, stream));
    for (std::size_t k = 0; k < static_cast<std::size_t>(across_->size()); ++k) {
      AllGatherArguments inner = arguments;
      inner.source = column + k * group * stride;
      inner.target = arguments.target + k * group * stride;
      FOREBAY_RETURN_IF_ERROR(within_->all_gather(inner, stream));
    }
    return {};
  }

  Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
              Stream stream) override {
    return members().send(source, bytes, peer, tag, stream);
  }
  Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) override {
    return members().recv(target, bytes, peer, tag, stream);
  }
  Status exchange(Span<const std::byte> mine, Span<std::byte> all) override {
    return members().exchange(mine, all);
  }
  Status barrier() override { return members().barrier(); }
  Result<std::unique_ptr<Communicator>> split(int color, int key) override {
    return members().split(color, key);
  }

  Status status() const override { return world_.status(); }
  void abort(const Status& cause) noexcept override { world_.abort(cause); }
  Status vote(std::uint64_t step, Span<const std::byte> decision) override {
    return world_.vote(step, decision);
  }
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) override {
    return world_.survivors_vote(step);
  }

  Traffic traffic() const override {
    const Traffic within = within_->traffic();
    const Traffic across = across_->traffic();
    return {within.sent_bytes + across.sent_bytes, within.received_bytes + across.received_bytes};
  }

  // By rank in the world.
  std::vector<OperationTraffic> operation_traffic() const override {
    std::vector<OperationTraffic> result;
    const int group = options_.group;
    const int first = world_.rank() / group * group;
    add_operation_traffic(result, within_->operation_traffic(), world_.size(),
                          [&](int peer) { return first + peer; });
    add_operation_traffic(result, across_->operation_traffic(), world_.size(),
                          [&](int peer) { return peer * group + within_->rank(); });
    return result;
  }

  // The world's record has the operations of both levels.
  std::vector<OperationRecord> last_operations() const override { return world_.last_operations(); }

 private:
  // The communicator that has this one's ranks.
  Communicator& members() const noexcept { return options_.replicate ? *within_ : world_; }

  Communicator& world_;
  const GroupedOptions options_;
  const std::unique_ptr<Communicator> within_;
  const std::unique_ptr<Communicator> across_;
};

}  // namespace

void add_operation_traffic(std::vector<OperationTraffic>& sum, const std::vector<OperationTraffic>& part,
                           int size, const std::function<int(int)>& rank_of) {
  for (const OperationTraffic& operation : part) {
    auto total = std::find_if(sum.begin(), sum.end(), [&](const OperationTraffic& known) {
      return std::string_view(known.operation) == operation.operation;
    });
    if (total == sum.end()) total = sum.insert(sum.end(), {.operation = operation.operation});
    total->count += operation.count;
    total->peers.resize(static_cast<std::size_t>(size));
    for (std::size_t peer = 0; peer < operation.peers.size(); ++peer) {
      Traffic& traffic = total->peers[static_cast<std::size_t>(rank_of(static_cast<int>(peer)))];
      traffic.sent_bytes += operation.peers[peer].sent_bytes;
      traffic.received_bytes += operation.peers[peer].received_bytes;
    }
  }
}

std::size_t grouped_staging_bytes(const GroupedOptions& options, int world_size, std::size_t count,
                                  DataType type) {
  return Staging(options, world_size, count, type).end;
}

Result<std::unique_ptr<Communicator>> create_grouped_communicator(Communicator& world,
                                                                  const GroupedOptions& options) {
  FOREBAY_RETURN_IF_ERROR(check_groups(world.size(), options.group));
  const int group = world.rank() / options.group;
  const int place = world.rank() % options.group;
  FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> within, world.split(group, place));
  FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> across, world.split(place, group));
  return std::make_unique<GroupedCommunicator>(world, options, std::move(within), std::move(across));
}

}  // namespace forebay
