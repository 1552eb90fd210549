#include "collectives/process/transport.h"

#include <algorithm>
#include <utility>

namespace forebay::internal {
Status Transport::status() {
  if (Status own = own_status(); !own.ok()) return own;
  if (!origin_has_failed()) return {};
  return fail_of_all(membership_.origin->status());
}

Status Transport::fail(const Status& cause) noexcept {
  if (membership_.name_in_origin.empty()) return fail_of_all(cause);
  if (const Status known = own_status(); !known.ok() || origin_has_failed()) return fail_of_all(cause);
  try {
    return fail_of_all(cause.with_context(membership_.name_in_origin));
  } catch (const std::exception&) {
    return fail_of_all(cause);  // No memory for the context.
  }
}

Status Transport::fail_of_all(const Status& cause) noexcept {
  Transport* const origin = membership_.origin.get();
  if (origin == nullptr) {
    const Status first = fail_own(cause);
    spread(first);
    return first;
  }
  if (const Status own = own_status(); !own.ok()) return own;
  // The origin fails this one too, as one of its parts.
  return fail_own(origin->fail_of_all(cause));
}

void Transport::spread(const Status& cause) noexcept {
  const std::lock_guard lock(parts_mutex_);
  for (Transport* const part : parts_) {
    static_cast<void>(part->fail_own(cause));
    part->spread(cause);
  }
}

void Transport::leave_origin() noexcept {
  Transport* const origin = membership_.origin.get();
  if (origin == nullptr) return;
  const std::lock_guard lock(origin->parts_mutex_);
  std::erase(origin->parts_, this);
}

Result<std::shared_ptr<Transport>> Transport::split(Membership membership,
                                                    const std::vector<SplitWish>& members,
                                                    const Exchange& exchange) {
  membership.origin = shared_from_this();
  for (const SplitWish& member : members) membership.world_ranks.push_back(world_rank(member.rank));
  membership.name_in_origin = describe_group(membership.world_ranks, world().size());
  FOREBAY_ASSIGN_OR_RETURN(std::shared_ptr<Transport> part,
                           split_own(std::move(membership), members, exchange));
  {
    const std::lock_guard lock(parts_mutex_);
    parts_.push_back(part.get());
  }
  // A failure from before it was one of the parts reaches it now.
  FOREBAY_RETURN_IF_ERROR(part->status());
  return part;
}

}  // namespace forebay::internal
