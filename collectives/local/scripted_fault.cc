#include "collectives/local/scripted_fault.h"

namespace forebay::internal {
namespace {

Status fail_with(LocalRanks& ranks, const Status& cause) {
  ranks.fail(cause);
  return ranks.status();
}

void pass_time(LocalWorld& world, LocalWorld::Nanoseconds duration) {
  LocalWorld::Lock lock(world.mutex());
  world.pass_time(lock, duration);
}

Status stall(LocalWorld& world) {
  LocalWorld::Lock lock(world.mutex());
  world.await(lock, [&] { return world.has_failed(); });
  return world.failure();
}

}  // namespace

Status died_by_script(const LocalRanks& ranks, int rank) {
  return Status(StatusCode::kPeerLost, ranks.name_of(rank) + " died by script");
}

Status run_faulty(LocalRanks& ranks, int rank, const LocalFault& fault, const Fingerprint& fingerprint,
                  const std::function<Status(const Fingerprint&)>& operation) {
  switch (fault.kind) {
    case LocalFault::Kind::kFails:
      return fail_with(ranks, fault.cause);
    case LocalFault::Kind::kFailsAfter: {
      const Status status = operation(fingerprint);
      pass_time(ranks.world(), fault.delay);
      return fail_with(ranks, status.ok() ? fault.cause : status);
    }
    case LocalFault::Kind::kDies:
      ranks.die(rank);
      return died_by_script(ranks, rank);
    case LocalFault::Kind::kStalls:
      return stall(ranks.world());
    case LocalFault::Kind::kMismatches: {
      Fingerprint other = fingerprint;
      ++other.count;
      return operation(other);
    }
    case LocalFault::Kind::kComesLate:
      pass_time(ranks.world(), fault.delay);
      return operation(fingerprint);
  }
  return {};
}

}  // namespace forebay::internal
