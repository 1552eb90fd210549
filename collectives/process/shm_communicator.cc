// How ranks come to share memory: rank 0 makes it and the others open it; then the communicator over it.
#include "forebay/shm_communicator.h"

#include <optional>
#include <string>
#include <utility>

#include "collectives/process/joining.h"
#include "collectives/process/shm_group.h"
#include "collectives/process/shm_segment.h"

namespace forebay {
namespace {

using internal::Joining;
using internal::Membership;
using internal::ProcessIdentity;
using internal::ShmGroup;
using internal::ShmSegment;
using internal::Transport;

// Rank 0 makes the memory, the others find it.
Result<std::unique_ptr<ShmSegment>> share_segment(const Joining& joining, const ProcessIdentity& me) {
  const Membership& membership = joining.membership;
  FOREBAY_ASSIGN_OR_RETURN(const std::string host, internal::host_identity());
  const std::string name = joining.name("segment");
  if (membership.rank == 0) {
    FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<ShmSegment> segment,
                             ShmSegment::create(membership.size, membership.generation));
    FOREBAY_RETURN_IF_ERROR(joining.store->write(
        name, internal::encode(internal::ShmAnnouncement{host, me, segment->descriptor()})));
    return segment;
  }
  FOREBAY_ASSIGN_OR_RETURN(const std::string text,
                           internal::await_text(joining, name, "rank 0 came but made no memory to share"));
  const std::optional<internal::ShmAnnouncement> found = internal::decode_shm_announcement(text);
  if (!found) {
    return Status(StatusCode::kCorruption, "the text ", name, " in ", joining.store->where(),
                  " is damaged; give every run a store of its own");
  }
  if (found->host != host) {
    return Status(StatusCode::kUnsupported, "rank 0 is on ", found->host, ", rank ", membership.rank, " on ",
                  host,
                  ": they cannot share memory; start all ranks on one host and in one container, or use "
                  "another communicator");
  }
  return ShmSegment::open(found->owner, found->descriptor, membership.size, membership.generation);
}

Result<std::shared_ptr<Transport>> join_group(const Joining& joining) {
  const Membership& membership = joining.membership;
  FOREBAY_ASSIGN_OR_RETURN(ProcessIdentity me, internal::this_process());
  FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<ShmSegment> segment, share_segment(joining, me));
  segment->rank(membership.rank).process = me;
  auto group = std::make_shared<ShmGroup>(membership, std::move(segment));
  FOREBAY_RETURN_IF_ERROR(group->join(joining.limit, *joining.store, joining.name("failed")));
  group->segment().close_descriptor();
  group->keep(joining.store);
  return group;
}

}  // namespace

Result<std::shared_ptr<Transport>> internal::connect_shm(const Joining& joining) {
  Result<std::shared_ptr<Transport>> transport = join_group(joining);
  if (joining.membership.rank == 0) joining.store->remove(joining.name("segment"));
  return transport;
}

Result<std::unique_ptr<Communicator>> create_shm_communicator(const ShmOptions& options, Backend& backend) {
  if (options.size > kShmRanksMax) {
    return invalid_argument(options.size, " ranks cannot share memory, at most ", kShmRanksMax,
                            " can; use another communicator");
  }
  if (options.size > 1) return internal::create_over("shm", internal::connect_shm, options, backend);
  FOREBAY_ASSIGN_OR_RETURN(
      Membership membership,
      internal::check_membership("shm", options.rank, options.size, options.deadline, backend));
  return internal::create_process_communicator(std::make_shared<ShmGroup>(std::move(membership), nullptr),
                                               backend);
}

}  // namespace forebay
