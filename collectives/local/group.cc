#include "collectives/local/group.h"

#include <string>

#include "forebay/check.h"

namespace forebay {
namespace internal {
namespace {

// The port of a rank whose bytes `backend` copies.
Result<DevicePort> make_port(Backend& backend, int world_rank) {
  DevicePort port{.backend = &backend, .rank = world_rank};
  FOREBAY_ASSIGN_OR_RETURN(port.come, backend.event_create());
  Result<Event> copied = backend.event_create();
  if (!copied.ok()) {
    static_cast<void>(backend.event_destroy(port.come));
    return copied.status();
  }
  port.copied = copied.value();
  return port;
}

}  // namespace

LocalGroupImpl::LocalGroupImpl(int size, const LocalOptions& options)
    : ranks_(std::make_shared<LocalWorld>(size, options)),
      rounds_(ranks_),
      messages_(ranks_),
      fault_(options.fault),
      handed_out_(static_cast<std::size_t>(size)) {}

// Without a fault: a script counts the operations of the communicator it was written for.
LocalGroupImpl::LocalGroupImpl(LocalGroupImpl& origin, const std::vector<SplitWish>& members)
    : ranks_(origin.ranks_, members), rounds_(ranks_), messages_(ranks_), handed_out_(members.size()) {}

Status LocalGroupImpl::claim(int rank, const Capabilities& device) {
  const std::string name = "rank " + std::to_string(rank) + " of a local group";
  const Mover mover = device.host_accessible ? Mover::kHost : Mover::kBackend;
  const LocalOptions& options = ranks_.world().options();
  const bool has_link = options.latency.count() > 0 || options.bytes_per_second > 0;
  if (mover == Mover::kBackend && has_link) {
    return Status(StatusCode::kUnsupported, "local ranks on ", device.name,
                  " have its own speed; leave latency and bytes_per_second "
                  "out, or model the link on the host backend");
  }
  const std::lock_guard lock(ranks_.world().mutex());
  char& is_handed_out = handed_out_[static_cast<std::size_t>(rank)];
  if (is_handed_out) return invalid_argument(name, " was handed out before; ask once per rank");
  if (mover_ != Mover::kUndecided && mover_ != mover) {
    return invalid_argument(
        name, " is on ", device.name, ", whose memory the host ",
        mover == Mover::kHost ? "reaches" : "does not reach",
        ", unlike that of the ranks before it; put all ranks on the same kind of backend");
  }
  mover_ = mover;
  is_handed_out = 1;
  return {};
}

Result<std::unique_ptr<Communicator>> LocalGroupImpl::communicator(int rank, Backend& backend,
                                                                   Kernels& kernels) {
  if (rank < 0 || rank >= ranks_.size()) {
    return invalid_argument("a local group of ", ranks_.size(), " has no rank ", rank, "; ranks are 0..",
                            ranks_.size() - 1);
  }
  const Capabilities& device = backend.capabilities();
  FOREBAY_RETURN_IF_ERROR(claim(rank, device));
  DevicePort port;
  if (!device.host_accessible) {
    FOREBAY_ASSIGN_OR_RETURN(port, make_port(backend, ranks_.world_rank(rank)));
  }
  return create_local_communicator(shared_from_this(), rank, backend, kernels, port);
}

std::shared_ptr<LocalGroupImpl> LocalGroupImpl::split_group(std::uint64_t sequence, int color,
                                                            const std::vector<SplitWish>& members) {
  const std::lock_guard lock(ranks_.world().mutex());
  const auto [place, is_new] = splits_.try_emplace({sequence, color});
  if (is_new)
    place->second = {std::make_shared<LocalGroupImpl>(*this, members), static_cast<int>(members.size())};
  std::shared_ptr<LocalGroupImpl> group = place->second.group;
  if (--place->second.remaining_count == 0) splits_.erase(place);
  return group;
}

}  // namespace internal

std::shared_ptr<LocalGroup> LocalGroup::create(int size, LocalOptions options) {
  FOREBAY_CHECK(size >= 1, "a local group needs at least one rank, not %d", size);
  return std::make_shared<internal::LocalGroupImpl>(size, options);
}

}  // namespace forebay
